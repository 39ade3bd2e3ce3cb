"""Modules that say something of their backward pass, trained by the planner beside PyTorch's loop.

An ONNX file has no backward pass: what a module says of its own is lost, unless the export refuses
the module or writes it otherwise. Each kind here is a small module with a sentence on its backward
pass and with the outcomes that are right: equal to a plain loop of PyTorch, or refused with the
cause named. What is never right is a training to something else in silence.

    kind.py        `Kind`, `Outcome`
    stops.py       detach, no_grad, .data
    estimators.py  flat functions, straight-through estimators, quantization
    functions.py   autograd.Function, custom operators
    hooks.py       hooks, checkpointing
    embeddings.py  padding_idx, scale_grad_by_freq, max_norm, sparse
    noise.py       dropout and other draws
    edges.py       bounds, ties, zeros
    points.py      the same in every step
    precision.py   float64
    networks.py    recurrent layers, attention, normalizations of weights, transformers
    states.py      state that forward changes, modes
    trial.py       the two trainings, and what comes of them

Some kinds cannot be seen in the gradients of the example inputs: a padding index that they do not
hold, tokens that they hold once, a bound that they do not reach, a branch that they do not take.
These are called "unseen", and have to be found in the module's attributes or its program, or by
other inputs.
"""

from tests.support.gradient_kinds import (
    edges,
    embeddings,
    estimators,
    functions,
    hooks,
    networks,
    noise,
    points,
    precision,
    states,
    stops,
)

KINDS = {
    **stops.KINDS,
    **estimators.KINDS,
    **functions.KINDS,
    **hooks.KINDS,
    **embeddings.KINDS,
    **noise.KINDS,
    **edges.KINDS,
    **points.KINDS,
    **precision.KINDS,
    **networks.KINDS,
    **states.KINDS,
}
