"""A module's own forward and backward pass on example inputs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.operators.gradients.events import (
    Events,
    Seen,
    Suspect,
    functions_in,
    standing_suspects,
)
from planner.operators.gradients.precision import Recording, own_tensors, widened
from planner.operators.randomness import Draw
from planner.support.draws import ELSEWHERE, drawn_elsewhere


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one run gives.

    Attributes:
        outputs: its tensors, in order.
        parameters: gradient of each by name; None where none flows to it.
        inputs: the same of the tensors among the inputs, in order.
        states: what buffers hold afterwards, by name; of a graph, those that it gives new values.
    """

    outputs: Sequence[Tensor]
    parameters: Mapping[str, Tensor | None]
    inputs: Sequence[Tensor | None]
    states: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """A run of a module.

    Attributes:
        gradients: and outputs.
        of_inputs: whether its inputs got gradients.
        counted: positions of the outputs that the loss is made of where none is a loss.
        flowing: positions of the outputs through which a gradient flows.
        draws: the random numbers.
        strange: random operators whose numbers are not known.
        suspects: what may give it other gradients than its operators have.
        seen: tensors on the way, with their gradients, if they were asked for.
        rounding: types that the module has no tensors in, to which casts round.
    """

    gradients: Gradients
    of_inputs: bool
    counted: Sequence[int]
    flowing: Sequence[int]
    draws: Sequence[Draw]
    strange: Sequence[str]
    suspects: Sequence[Suspect]
    seen: Sequence[Seen]
    rounding: frozenset[torch.dtype]


def loss_of(outputs: Sequence[Tensor], own: Sequence[int], counted: Sequence[int]) -> Tensor | None:
    """The sum of the losses among the outputs; where there are none, of the products of outputs
    with fixed random numbers. None where no gradient flows to it.

    Args:
        outputs: of a module or graph.
        own: positions of outputs that are losses.
        counted: positions of the outputs that count where none is a loss.
    """
    if own:
        terms = [outputs[i].sum() for i in own]
    else:
        terms = [(outputs[i] * _factors(outputs[i], i)).sum() for i in counted]
    terms = [one.to(torch.float64) for one in terms if one.requires_grad]
    return torch.stack(terms).sum() if terms else None


def _factors(output: Tensor, position: int) -> Tensor:
    numbers = np.random.default_rng(position).standard_normal(tuple(output.shape))
    return torch.from_numpy(np.asarray(numbers)).to(output.dtype)


def run_module(
    module: nn.Module,
    positional: Sequence[object],
    named: Mapping[str, object],
    own: Sequence[int],
    *,
    double: bool,
    of_inputs: bool = True,
    tensors: bool = False,
) -> ModuleRun:
    """Runs a module in its own mode, and leaves it as it was.

    Args:
        positional: arguments of forward.
        named: the same by keyword.
        own: as of `loss_of`.
        double: in float64, or else in the types that the module has.
        of_inputs: whether tensors of floats among the inputs get a gradient.
        tensors: whether to keep all tensors on the way.
    """
    events = Events(module, tensors=tensors)
    standing = [*standing_suspects(module)]
    leaves, spec = pytree.tree_flatten((tuple(positional), dict(named)))
    inputs = [leaf(one, double, of_inputs) if isinstance(one, Tensor) else one for one in leaves]
    given = [one.clone() if isinstance(one, Tensor) else one for one in inputs]
    args, kwargs = pytree.tree_unflatten(given, spec)
    with _recorded(module, leaves, double) as recording:
        torch.manual_seed(0)
        before = drawn_elsewhere()
        with events.watching():
            made = module(*args, **kwargs)
        if drawn_elsewhere() != before:
            standing.append(Suspect(ELSEWHERE))
        outputs = [one for one in pytree.tree_leaves(made) if isinstance(one, Tensor)]
        states = {name: one.detach().cpu().clone() for name, one in module.named_buffers()}
        suspects = _all_suspects(events, outputs, standing)
        floats = [i for i, one in enumerate(outputs) if one.is_floating_point()]
        flowing = [i for i in floats if outputs[i].requires_grad]
        counted = flowing or floats
        loss = loss_of(outputs, own, counted)
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        events.forget()
        gradients = Gradients(
            [one.detach().cpu() for one in outputs],
            {name: dense(one.grad) for name, one in module.named_parameters()},
            [dense(one.grad) for one in inputs if isinstance(one, Tensor)],
            states,
        )
    return ModuleRun(
        gradients, of_inputs, counted, flowing, recording.draws, sorted(recording.strange),
        suspects, [*events.seen.values()], frozenset(recording.rounding),
    )  # fmt: skip


def run_evaluation(
    module: nn.Module, positional: Sequence[object], named: Mapping[str, object], *, double: bool
) -> tuple[list[Tensor], list[Draw]]:
    """The tensors that a module returns in evaluation, and the numbers that it draws; it is left as
    it was. Arguments as of `run_module`.
    """
    leaves, spec = pytree.tree_flatten((tuple(positional), dict(named)))
    given = [leaf(one, double, False) if isinstance(one, Tensor) else one for one in leaves]
    args, kwargs = pytree.tree_unflatten(given, spec)
    with _recorded(module, leaves, double) as recording:
        module.eval()
        made = module(*args, **kwargs)
    outputs = [one.detach() for one in pytree.tree_leaves(made) if isinstance(one, Tensor)]
    return outputs, list(recording.draws)


@contextmanager
def _recorded(module: nn.Module, inputs: Sequence[object], double: bool) -> Iterator[Recording]:
    """The mode that a module runs in, by the types that it has. With gradients: what forward does
    without them may be something else.
    """
    held = (*module.parameters(), *module.buffers(), *inputs)
    types = {one.dtype for one in held if isinstance(one, Tensor)}
    recording = Recording(
        double=double,
        short_scalars=double and torch.float64 not in types,
        rounding={torch.float16, torch.bfloat16} - types,
    )
    with (
        own_tensors(module, double=double),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        recording,
    ):
        yield recording


def _all_suspects(
    events: Events, outputs: list[Tensor], standing: Sequence[Suspect]
) -> list[Suspect]:
    """Those of the calls, of the graph of autograd that no call shows, and of the module."""
    of_calls = [*events.suspects.values()]
    known = {one.what for one in of_calls}
    return [*of_calls, *(one for one in functions_in(outputs) if one.what not in known), *standing]


def leaf(given: Tensor, double: bool, with_gradient: bool = True) -> Tensor:
    """A copy of an input, which gets a gradient if that is asked for and it holds floats."""
    copy = given.detach().clone()
    wide: Tensor = widened(copy) if double else copy
    return wide.requires_grad_(with_gradient and wide.is_floating_point())


def dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient as a plain tensor in the CPU's memory."""
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().cpu()
