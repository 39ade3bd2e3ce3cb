"""The types of the outputs of operators that ONNX does not define: ONNX Runtime's, `com.microsoft`
above all, and the planner's own. Rows of `artefacts/operator_types.py` name the functions.

B samples, S positions, T positions that are looked at, N heads, width numbers per head. The
functions that compute the operators are in `operators/microsoft.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.support.errors import OperatorError

Described = tuple[str, tuple[int, ...]]
"""The dtype, as in `graph.ITEM_BYTES`, and the shape of a tensor."""


@dataclass(frozen=True, slots=True)
class CustomNode:
    """A node, as far as the types of its outputs may depend on it.

    Attributes:
        type: the operator's, with its domain in front.
        version: of the domain's operator set that the model imports.
        inputs: in order; None where an optional one is absent.
        values: of the inputs that are constants, by position.
        attributes: by name, as int, float, str, tuples of these, or arrays.
        outputs: per output, whether somebody reads it.
    """

    type: str
    version: int
    inputs: tuple[Described | None, ...]
    values: Mapping[int, np.ndarray]
    attributes: Mapping[str, object]
    outputs: tuple[bool, ...]


ShapeFunction = Callable[[CustomNode], Sequence[Described]]
"""The types of the first outputs in order, all that are read among them.

An `OperatorError` of it says what the operator cannot do.
"""


def _input(node: CustomNode, position: int) -> Described:
    """An input that must be there."""
    given = node.inputs[position] if position < len(node.inputs) else None
    if given is None:
        raise OperatorError(f"expected input {position}, got none")
    return given


def _has(node: CustomNode, position: int) -> bool:
    return position < len(node.inputs) and node.inputs[position] is not None


def _number(node: CustomNode, name: str, default: int | None = None) -> int:
    value = node.attributes.get(name, default)
    if not isinstance(value, int):
        raise OperatorError(f"{name}: expected an integer, got {value!r}")
    return value


def _unread(node: CustomNode, *positions: int) -> None:
    """Refuses outputs that have no function."""
    read = [i for i in positions if i < len(node.outputs) and node.outputs[i]]
    if read:
        raise OperatorError(f"output {', '.join(map(str, read))} is not supported")


def like_first(node: CustomNode) -> Sequence[Described]:
    """Like the first input; a second output has no function."""
    _unread(node, 1)
    return [_input(node, 0)]


def normalized(node: CustomNode) -> Sequence[Described]:
    """Like the first input; behind it mean and deviation, which have no function, and the sum."""
    _unread(node, 1, 2)
    return [_input(node, 0)] * 4


def skipped(node: CustomNode) -> Sequence[Described]:
    """Like the first input, and the sum of both."""
    return [_input(node, 0)] * 2


def product(node: CustomNode) -> Sequence[Described]:
    """A matrix product, with both kinds of transposition."""
    (dtype, a), (_, b) = _input(node, 0), _input(node, 1)
    if min(len(a), len(b)) < 1:
        raise OperatorError(f"expected matrices, got {list(a)} and {list(b)}")
    a, b = _turned(node, a, "A"), _turned(node, b, "B")
    rows, inner = (1, a[0]) if len(a) == 1 else a[-2:]
    other, columns = (b[0], 1) if len(b) == 1 else b[-2:]
    if inner != other:
        raise OperatorError(f"expected matrices that fit, got {list(a)} and {list(b)}")
    batch = _broadcast(a[:-2], b[:-2])
    return [
        (dtype, (*batch, *((rows,) if len(a) > 1 else ()), *((columns,) if len(b) > 1 else ())))
    ]


def _turned(node: CustomNode, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    if len(shape) > 2 and _number(node, f"transBatch{name}", 0):
        shape = (*shape[1:-1], shape[0], shape[-1])
    if len(shape) > 1 and _number(node, f"trans{name}", 0):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return shape


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise OperatorError(f"expected shapes that broadcast, got {list(a)} and {list(b)}")
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def half(node: CustomNode) -> Sequence[Described]:
    """Like the first input, with half its last dimension."""
    dtype, shape = _input(node, 0)
    return [(dtype, (*shape[:-1], shape[-1] // 2))]


def attention(node: CustomNode) -> Sequence[Described]:
    """One product for queries, keys and values; the present has both, behind the past."""
    (dtype, (samples, length, _)), (_, (_, width)) = _input(node, 0), _input(node, 1)
    heads = _number(node, "num_heads")
    sizes = node.attributes.get("qkv_hidden_sizes")
    q, _, v = sizes if isinstance(sizes, tuple) and len(sizes) == 3 else (width // 3,) * 3
    past = _input(node, 4)[1][3] if _has(node, 4) else 0
    present = (2, samples, heads, past + length, q // heads)
    return [(dtype, (samples, length, v)), (dtype, present)]


def multi_head_attention(node: CustomNode) -> Sequence[Described]:
    """Queries (B, S, D), alone, with keys, or with keys and values; keys may lie in heads."""
    _unread(node, 3)
    dtype, q = _input(node, 0)
    heads = _number(node, "num_heads")
    if len(q) == 5:  # (B, S, N, 3, width)
        length, widths = q[1], (q[4], q[4])
    elif not _has(node, 2):  # (B, T, N, 2, width)
        key = _input(node, 1)[1]
        length, widths = key[1], (key[4], key[4])
    else:
        key, value = _input(node, 1)[1], _input(node, 2)[1]
        length = key[2] if len(key) == 4 else key[1]
        k_width, v_width = (s[3] if len(s) == 4 else s[2] // heads for s in (key, value))
        widths = k_width, v_width
    past = _input(node, 6)[1][2] if _has(node, 6) else 0
    present = [(dtype, (q[0], heads, past + length, width)) for width in widths]
    return [(dtype, (q[0], q[1], heads * widths[1])), *present]


def group_query_attention(node: CustomNode) -> Sequence[Described]:
    """Queries (B, S, D) with keys and values of fewer heads, or all three in one tensor."""
    _unread(node, 3)
    dtype, (samples, length, width) = _input(node, 0)
    heads, others = _number(node, "num_heads"), _number(node, "kv_num_heads")
    whole = heads if _has(node, 1) else heads + 2 * others
    head = width // whole
    present = (dtype, (samples, others, length, head))
    return [(dtype, (samples, length, heads * head)), present, present]


def embedded(node: CustomNode) -> Sequence[Described]:
    """The embedding, the length of each sample, and the sum before the normalization."""
    (_, ids), (dtype, table) = _input(node, 0), _input(node, 2)
    made = (dtype, (*ids, table[1]))
    return [made, ("int32", (ids[0],)), made]


def expanded(node: CustomNode) -> Sequence[Described]:
    """Like the first input, with one dimension more."""
    dtype, shape = _input(node, 0)
    if 1 not in node.values:
        raise OperatorError("input 1: expected a constant axis")
    axis = int(node.values[1].reshape(-1)[0])
    axis = axis + len(shape) + 1 if axis < 0 else axis
    return [(dtype, (*shape[:axis], 1, *shape[axis:]))]
