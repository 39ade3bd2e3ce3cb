"""Sequences of tensors, which exporters write for split and unbind, as plain operators.

    SplitToSequence(x, sizes), SequenceAt(s, 0), SequenceAt(s, 1)   ->  Split(x, sizes)
    SplitToSequence(x), SequenceAt(s, 0), SequenceAt(s, 1)          ->  Gather(x, 0), Gather(x, 1)

A Split has the name of the SplitToSequence and the outputs of the SequenceAt nodes, which are then
folded away; a Gather has the name of its SequenceAt, and the SplitToSequence is folded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from planner.errors import ModelError


@dataclass(frozen=True)
class TensorSequence:
    """The output of a SplitToSequence.

    Attributes:
        source: the tensor that is split.
        axis: along which it is split; not negative.
        sizes: of each part along the axis.
        split: the operator that makes the parts, to be given outputs; None if each part is taken
            out with Gather, because it loses the axis.
    """

    source: str
    axis: int
    sizes: tuple[int, ...]
    split: NodeProto | None


def read_sequence(
    node: NodeProto,
    shape: Sequence[int],
    values: Mapping[str, np.ndarray],
    opset: int,
) -> TensorSequence:
    """The output of a SplitToSequence.

    Args:
        node: the SplitToSequence.
        shape: of the tensor that it splits.
        values: of its second input, if that is a constant.
        opset: the version that the model imports.

    Raises:
        ModelError: if the sizes are no constant, or do not fit the shape.
    """
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    axis = attributes.get("axis", 0) % len(shape)
    length = shape[axis]
    if len(node.input) < 2 or not node.input[1]:
        sizes = (1,) * length
        whole = attributes.get("keepdims", 1)
        split = _split(node, axis, sizes, opset) if whole else None
        return TensorSequence(node.input[0], axis, sizes, split)
    if node.input[1] not in values:
        raise ModelError(
            f"{node.name}: expected constant sizes for SplitToSequence, got {node.input[1]!r}, "
            "which depends on data, so the model cannot be planned"
        )
    given = values[node.input[1]]
    if given.ndim:
        sizes = tuple(given.tolist())
    else:
        step = max(int(given), 1)
        sizes = tuple(min(step, length - at) for at in range(0, length, step))
    if sum(sizes) != length or given.min() < 1:
        raise ModelError(
            f"{node.name}: expected sizes that add up to {length}, got {given.tolist()}; the model "
            "may hold another batch size or length in its constants"
        )
    return TensorSequence(node.input[0], axis, sizes, _split(node, axis, sizes, opset))


def sizes_name(node: NodeProto) -> str:
    """The name of the constant with the sizes of a SplitToSequence's parts."""
    return f"{node.output[0]}.sizes"


def _split(node: NodeProto, axis: int, sizes: Sequence[int], opset: int) -> NodeProto:
    """A Split without outputs; its sizes are an attribute before operator set 13."""
    split = helper.make_node("Split", [node.input[0]], [""] * len(sizes), name=node.name, axis=axis)
    if opset >= 13:
        split.input.append(sizes_name(node))
    else:
        split.attribute.append(helper.make_attribute("split", sizes))
    return split


def gather(node: NodeProto, sequence: TensorSequence) -> NodeProto:
    """A SequenceAt of parts that lost the axis, as a Gather."""
    return helper.make_node(
        "Gather",
        [sequence.source, node.input[1]],
        list(node.output),
        name=node.name,
        axis=sequence.axis,
    )


def identity(node: NodeProto, tensor: str) -> NodeProto:
    """A SequenceAt that repeats an earlier one, as an Identity of the tensor that it made."""
    return helper.make_node("Identity", [tensor], list(node.output), name=node.name)
