"""Floating-point operations of an operator's forward pass, from its shapes alone.

Counted are products: of matrices, of convolutions, of attention and of recurrent operators, two
operations for each multiplication with its addition. Everything else counts as nothing beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

from planner.model.load import Node

Shapes = Sequence[tuple[int, ...]]


def flops_of(node: Node, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The operations of one node; 0 for types that multiply nothing.

    Args:
        node: an operator.
        shapes: of its inputs and outputs, by name.
    """
    count = _COUNTS.get(node.type)
    if count is None or (node.domain and node.domain != "com.microsoft"):
        return 0
    inputs = [shapes.get(name, ()) for name in node.inputs]
    outputs = [shapes.get(name, ()) for name in node.outputs]
    return count(node, inputs, outputs)


def _matmul(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(outputs[0]) * inputs[0][-1]


def _gemm(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(outputs[0]) * inputs[0][0 if node.attributes.get("transA") else 1]


def _conv(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(outputs[0]) * prod(inputs[1][1:])


def _conv_transpose(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    return 2 * prod(inputs[0]) * prod(inputs[1][1:])


def _attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Scores and mixing, for queries of (..., S, width) and keys of (..., T, width)."""
    query, key, value = inputs[:3]
    if len(query) == 4:
        batch, heads, rows, width = query
        return 2 * batch * heads * rows * key[-2] * (width + value[-1])
    heads = int(str(node.attributes.get("q_num_heads", 1)))
    kept = int(str(node.attributes.get("kv_num_heads", heads)))
    wide = query[-1] + heads * (value[-1] // kept)
    return 2 * query[0] * query[1] * key[1] * wide


def _recurrent(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Two products per time step and direction: (steps, batch, in) and (directions, gates, in)."""
    steps, batch = inputs[0][:2]
    return 2 * steps * batch * (prod(inputs[1]) + prod(inputs[2]))


_COUNTS: Mapping[str, Callable[[Node, Shapes, Shapes], int]] = {
    "Attention": _attention,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "FusedMatMul": _matmul,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "RNN": _recurrent,
}
