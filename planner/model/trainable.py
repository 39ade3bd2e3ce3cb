"""Which initializers are trained, and over which tensors a gradient flows.

Names cannot decide it (exporters call a transposed weight `val_58`), so the graph does: a
gradient starts at the loss, goes back through float tensors, and stops where an operator has no
derivative.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

import numpy as np
from onnx import NodeProto

from planner.errors import ModelError
from planner.model.definitions import FOREIGN
from planner.model.folding import operator_type, some

STATIC_INPUTS: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2), "Dropout": (1, 2), "Pad": (1, 2, 3), "Resize": (1, 2, 3), "Upsample": (1,),
    "com.microsoft.Pad": (1, 2),
}  # fmt: skip
"""Positions of inputs that configure an operator, as an attribute would."""

NONDIFFERENTIABLE_INPUTS: Mapping[str, tuple[int, ...]] = {
    **STATIC_INPUTS,
    "BatchNormalization": (3, 4),  # mean and variance are buffers
    "CastLike": (1,),
    "DequantizeLinear": (1, 2),  # scales and zero points come from a calibration
    "MaxRoiPool": (1,),
    "NegativeLogLikelihoodLoss": (2,),  # weights of classes
    "RandomNormalLike": (0,),
    "RandomUniformLike": (0,),
    "RoiAlign": (1,),
    "STFT": (2,),  # the window
    "SoftmaxCrossEntropyLoss": (2,),
}
"""Positions of float inputs that get no gradient; integers and booleans never do."""

NONDIFFERENTIABLE_OPERATORS = frozenset({
    "ArgMax", "ArgMin", "Bernoulli", "BitCast", "Ceil", "DynamicQuantizeLinear", "EyeLike", "Floor",
    "Hardmax", "Multinomial", "QuantizeLinear", "Round", "Shape", "Sign", "Size",
})  # fmt: skip

_MASKING = frozenset({"Add", "Attention", "Mul", "Sub", "Where"})
_VIEWS = frozenset({
    "Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
})  # fmt: skip
_MASKED_BELOW = -1e4  # an additive mask holds this or less where it hides something
_BLOCK = 4096  # elements looked at in one go


def differentiable_inputs(node: NodeProto) -> list[str]:
    """The inputs that get a gradient if they are floats and an output of the node has one."""
    kind = operator_type(node)
    if kind in NONDIFFERENTIABLE_OPERATORS:
        return []
    foreign = FOREIGN.get(kind)
    without = foreign.without_gradient if foreign else NONDIFFERENTIABLE_INPUTS.get(kind, ())
    return [name for i, name in enumerate(node.input) if name and i not in without]


def reaching(nodes: Sequence[NodeProto], loss: str, floats: Collection[str]) -> set[str]:
    """The float tensors from which a differentiable path leads to `loss`, itself included.

    Args:
        nodes: in topological order.
        loss: the tensor that the loss is computed from.
        floats: names of all float tensors.
    """
    reached = {loss}
    for node in reversed(nodes):
        if not reached.isdisjoint(node.output):
            reached.update(name for name in differentiable_inputs(node) if name in floats)
    return reached


def depending(
    nodes: Iterable[NodeProto], sources: Collection[str], floats: Collection[str]
) -> set[str]:
    """The float tensors to which a differentiable path leads from one of `sources`, and these."""
    reached = set(sources)
    for node in nodes:
        if not reached.isdisjoint(differentiable_inputs(node)):
            reached.update(name for name in node.output if name in floats)
    return reached


def masks(
    candidates: Iterable[str], nodes: Sequence[NodeProto], values: Mapping[str, np.ndarray]
) -> set[str]:
    """The candidates that hide part of another tensor, by use and then by content.

    Use: an operand of Add, Sub, Mul, Where or Attention, directly or through views. Content: 0
    and -10000 or less (additive), or 0 and 1 in square matrices (multiplicative). Only
    candidates that pass the first test are read, and only as far as they look like a mask.

    Args:
        candidates: names of float values of rank 2 or more.
        nodes: in topological order.
        values: read on access.
    """
    operands = {name for node in nodes if node.op_type in _MASKING for name in node.input}
    for node in reversed(nodes):
        if node.op_type in _VIEWS and not operands.isdisjoint(node.output):
            operands.add(node.input[0])
    return {name for name in candidates if name in operands and _looks_like_mask(values[name])}


def _looks_like_mask(value: np.ndarray) -> bool:
    return _is_additive_mask(value) or _is_causal_mask(value)


def _is_additive_mask(value: np.ndarray) -> bool:
    hides = False
    for block in _blocks(value):
        hidden = block <= _MASKED_BELOW
        if not np.all(hidden | (block == 0)):
            return False
        hides = hides or bool(hidden.any())
    return hides


def _is_causal_mask(value: np.ndarray) -> bool:
    seen: set[float] = set()
    if value.shape[-1] != value.shape[-2]:
        return False
    for block in _blocks(value):
        if not np.all((block == 0) | (block == 1)):
            return False
        seen.update(np.unique(block).tolist())
    return len(seen) == 2


def _blocks(value: np.ndarray) -> Iterable[np.ndarray]:
    flat = value.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        yield flat[start : start + _BLOCK].astype(np.float64)


def check_choices(train: Collection[str], freeze: Collection[str], known: Collection[str]) -> None:
    """Names to train and to freeze must exist, and none may be both.

    Args:
        train: names given with --train.
        freeze: names given with --freeze.
        known: names of all values that a model holds.

    Raises:
        ModelError: naming every mistake, with similar names.
    """
    problems = [f"--train and --freeze both name {name!r}" for name in sorted({*train} & {*freeze})]
    for option, names in (("--train", train), ("--freeze", freeze)):
        for name in names:
            if name not in known:
                near = get_close_matches(name, sorted(known)) or sorted(known)
                problems.append(f"{option} {name}: no value of that name; near: {some(near)}")
    if problems:
        raise ModelError("\n".join(problems))
