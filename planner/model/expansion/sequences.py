"""Operators on sequences and optionals, whose content is known while the graph is folded.

Exporters write SplitToSequence and SequenceAt for split and unbind. They become plain operators:

    SplitToSequence(x, sizes), SequenceAt(s, 0), SequenceAt(s, 1)   ->  Split(x, sizes)
    SplitToSequence(x), SequenceAt(s, 0), SequenceAt(s, 1)          ->  Gather(x, 0), Gather(x, 1)

The Split has the name of the SplitToSequence, and its outputs those of the SequenceAt nodes; a
Gather has the name of its SequenceAt. The parts of SplitToSequence lose the axis where keepdims is
0, which those of a Split do not. ConcatFromSequence is a Concat; all others leave no operator.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from planner.model.expansion.nested import (
    MAX_UNROLLED_NODES,
    Call,
    Element,
    Expander,
    Handler,
    Maybe,
    Part,
    Row,
    TensorSequence,
    Value,
)
from planner.support.errors import ModelError


def sequence(call: Call, position: int = 0) -> tuple[Element, ...]:
    """The elements of an input that is a sequence.

    Raises:
        ModelError: if it is none.
    """
    value = call.inputs[position] if position < len(call.inputs) else None
    if isinstance(value, Maybe):
        value = value.content
    if not isinstance(value, TensorSequence):
        raise ModelError(
            f"{call}: expected a sequence as input {position} of {call.node.op_type}, got"
            f" {'nothing' if value is None else 'a tensor'}; export the model again"
        )
    return value.elements


def known(x: Expander, call: Call, position: int, meaning: str) -> np.ndarray | None:
    """The value of an input that has to be known before the model runs; None if it is absent.

    Raises:
        ModelError: if it depends on data.
    """
    if position >= len(call.inputs) or call.inputs[position] is None:
        return None
    name = call.tensor(position)
    value = x.evaluate_now(call, name)
    if value is None:
        raise ModelError(
            f"{call}: expected a constant {meaning} for {call.node.op_type}, got {name!r}, "
            "which depends on data, so the model cannot be planned"
        )
    return value


def known_number(x: Expander, call: Call, position: int, meaning: str) -> int | float | bool | None:
    """The same of an input that is one number.

    Raises:
        ModelError: if it depends on data, or has several elements.
    """
    value = known(x, call, position, meaning)
    if value is not None and value.size != 1:
        raise ModelError(
            f"{call}: expected one {meaning} for {call.node.op_type}, got {value.size}; export the"
            " model again"
        )
    number: int | float | bool | None = None if value is None else value.item()
    return number


def _position(x: Expander, call: Call, at: int, length: int, inserting: bool = False) -> int | None:
    """A position in a sequence, from the front; None if the input is absent."""
    value = known_number(x, call, at, "position")
    if value is None:
        return None
    position = int(value)
    if not -length <= position < length + inserting:
        raise ModelError(
            f"{call}: expected a position within the {length} tensors of"
            f" {call.node.input[0]!r}, got {position}; export the model again"
        )
    return position + length if position < 0 else position


def _split_to_sequence(x: Expander, call: Call) -> Sequence[Value]:
    source = call.tensor(0)
    given = known(x, call, 1, "sizes")
    shape = x.shape(source)
    if not shape:
        raise ModelError(f"{call}: expected a tensor of rank 1 or more, got a number")
    axis = call.integer("axis") % len(shape)
    loses_axis = given is None and call.integer("keepdims", 1) == 0
    sizes = _sizes(call, shape[axis], given)
    if source in x.tensors.constants:
        arrays = np.split(x.tensors.values[source], np.cumsum(sizes)[:-1], axis)
        return [_constants(x, call, [a.squeeze(axis) for a in arrays] if loses_axis else arrays)]
    if loses_axis:
        return [TensorSequence(tuple(Row(source, axis, i) for i in range(len(sizes))))]
    split = x.split(call, source, axis, sizes, [""] * len(sizes))
    parts = (Part(split, i, axis, size) for i, size in enumerate(sizes))
    return [TensorSequence(tuple(parts))]


def _sizes(call: Call, length: int, given: np.ndarray | None) -> tuple[int, ...]:
    """Sizes of the parts along the axis."""
    _check_number(call, length, given)
    if given is None:
        return (1,) * length
    if given.ndim:
        sizes = tuple(given.tolist())
    else:
        step = max(int(given), 1)
        sizes = tuple(min(step, length - at) for at in range(0, length, step))
    if sum(sizes) != length or given.min(initial=1) < 1:
        raise ModelError(
            f"{call}: expected sizes that add up to {length}, got {given.tolist()}; the model "
            "may hold another batch size or length in its constants"
        )
    return sizes


def _check_number(call: Call, length: int, given: np.ndarray | None) -> None:
    """Refuses more parts than there may be nodes."""
    step = 1 if given is None or given.ndim else max(int(given), 1)
    number = given.size if given is not None and given.ndim else -(-length // step)
    if number > MAX_UNROLLED_NODES:
        raise ModelError(
            f"{call}: expected a sequence of at most {MAX_UNROLLED_NODES} tensors, got {number};"
            " export the model with a shorter one"
        )


def _constants(x: Expander, call: Call, arrays: Sequence[np.ndarray]) -> TensorSequence:
    names = [x.fresh(f"{call.name}/{i}") for i in range(len(arrays))]
    return TensorSequence(tuple(map(x.constant, names, arrays)))


def _construct(x: Expander, call: Call) -> Sequence[Value]:
    return [TensorSequence(tuple(call.tensor(i) for i in range(len(call.inputs))))]


def _empty(x: Expander, call: Call) -> Sequence[Value]:
    return [TensorSequence(())]


def _insert(x: Expander, call: Call) -> Sequence[Value]:
    elements = sequence(call)
    at = _position(x, call, 2, len(elements), inserting=True)
    at = len(elements) if at is None else at
    return [TensorSequence((*elements[:at], call.tensor(1), *elements[at:]))]


def _erase(x: Expander, call: Call) -> Sequence[Value]:
    elements = sequence(call)
    at = _position(x, call, 1, len(elements)) if elements else None
    at = len(elements) - 1 if at is None else at
    return [TensorSequence((*elements[:at], *elements[at + 1 :]))]


def _length(x: Expander, call: Call) -> Sequence[Value]:
    return [x.constant(x.output(call), np.array(len(sequence(call))))]


def _at(x: Expander, call: Call) -> Sequence[Value]:
    elements = sequence(call)
    at = _position(x, call, 1, len(elements))
    assert at is not None, "ONNX requires the position"
    return [x.element(call, elements[at], x.output(call))]


def _concat(x: Expander, call: Call) -> Sequence[Value]:
    names = x.elements(call, sequence(call))
    if not names:
        raise ModelError(f"{call}: expected tensors to concatenate, got an empty sequence")
    axis, output = call.integer("axis"), x.output(call)
    if call.integer("new_axis"):
        x.stack(call, names, axis, output)
    else:
        x.emit(call, "Concat", names, [output], axis=axis)
    return [output]


def _optional(x: Expander, call: Call) -> Sequence[Value]:
    content = call.inputs[0] if call.inputs else None
    assert not isinstance(content, Maybe), "ONNX has no optional of an optional"
    return [Maybe(content)]


def _has_element(x: Expander, call: Call) -> Sequence[Value]:
    value = call.inputs[0] if call.inputs else None
    content = value.content if isinstance(value, Maybe) else value
    return [x.constant(x.output(call), np.array(content is not None))]


def _get_element(x: Expander, call: Call) -> Sequence[Value]:
    value = call.inputs[0]
    content = value.content if isinstance(value, Maybe) else value
    if content is None:
        raise ModelError(f"{call}: expected an optional that holds something, got an empty one")
    return [content]


SEQUENCE_OPERATORS: Mapping[str, Handler] = {
    "ConcatFromSequence": _concat,
    "Optional": _optional,
    "OptionalGetElement": _get_element,
    "OptionalHasElement": _has_element,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split_to_sequence,
}
