"""The work of operators from shapes alone, without torch.

Counted are products, two operations for each multiplication with its addition: everything else is
nothing beside them. Rows of `artefacts/operator_types.py` name the functions, which take a node and
the shapes of its inputs and outputs.

B samples, S positions, T positions that are looked at, N heads, K heads of keys and values.
"""

from collections.abc import Mapping, Sequence
from math import prod

from planner.artefacts.operator_types import facts, imported
from planner.model.load import Node

Shape = tuple[int, ...]
Shapes = Sequence[Shape]


def flops_of(node: Node, shapes: Mapping[str, Shape]) -> int:
    """The operations of one node; 0 for types whose products are not counted.

    Args:
        node: an operator.
        shapes: of its inputs and outputs, by name.
    """
    name = facts(node.kind).flops
    if not name:
        return 0
    inputs = [shapes.get(one, ()) for one in node.inputs]
    outputs = [shapes.get(one, ()) for one in node.outputs]
    flops: int = imported(name, __name__)(node, inputs, outputs)
    return flops


def _at(inputs: Shapes, position: int) -> Shape:
    """The shape of an input; () where it is absent."""
    return inputs[position] if position < len(inputs) else ()


def _number(node: Node, name: str, default: int) -> int:
    value = node.attributes.get(name)
    return value if isinstance(value, int) else default


def matmul(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """The last dimension of the first factor is summed up."""
    return 2 * prod(outputs[0]) * inputs[0][-1]


def fused_matmul(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """The first factor may be transposed; transBatch moves its first dimension before the last."""
    first = inputs[0]
    if len(first) > 2 and _number(node, "transBatchA", 0):
        first = (*first[1:-1], first[0], first[-1])
    inner = first[-2] if len(first) > 1 and _number(node, "transA", 0) else first[-1]
    return 2 * prod(outputs[0]) * inner


def gemm(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """One product of matrices."""
    return 2 * prod(outputs[0]) * inputs[0][0 if node.attributes.get("transA") else 1]


def conv(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Each output is a sum over a window of all channels of its group."""
    return 2 * prod(outputs[0]) * prod(inputs[1][1:])


def conv_transpose(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Each input is spread over a window of all channels of its group."""
    return 2 * prod(inputs[0]) * prod(inputs[1][1:])


def einsum(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """One product after the other, from the left. What only one factor has is summed up before, and
    without a sum a product has no additions: it counts as little as a Mul.
    """
    terms, result = _labels(str(node.attributes.get("equation", "")), inputs)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=False):
        for label, size in zip(term, shape, strict=False):
            sizes[label] = max(size, sizes.get(label, 1))  # 1 is repeated
    count, made = 0, set(terms[0])
    for i, term in enumerate(terms[1:], 2):
        factors = made, set(term)
        kept = set(result).union(*terms[i:])
        summed = factors[0] & factors[1] - kept
        made = (factors[0] | factors[1]) & kept
        if summed:
            count += 2 * prod(sizes.get(label, 1) for label in made | summed)
    return count


def _labels(equation: str, inputs: Shapes) -> tuple[list[Sequence[str]], Sequence[str]]:
    """The dimensions of each factor and of the result of an Einsum, by label; those that an
    ellipsis stands for are labelled by their distance from its end.

    >>> _labels("...ij, jk", [(5, 2, 3), (3, 4)])
    ([['-1', 'i', 'j'], ['j', 'k']], ['-1', 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    hidden = [
        len(shape) - len(text.replace("...", "")) if "..." in text else 0
        for text, shape in zip(texts, inputs, strict=False)
    ]
    if not arrow:  # the labels that are there once, in order
        named = [label for text in texts for label in text.replace("...", "")]
        right = "..." + "".join(sorted(label for label in named if named.count(label) == 1))

    def spread(text: str, count: int) -> list[str]:
        before, dots, behind = text.partition("...")
        return [*before, *(str(i) for i in range(-count, 0) if dots), *behind]

    terms = [spread(text, count) for text, count in zip(texts, hidden, strict=False)]
    return [*terms], spread(right, max(hidden, default=0))


def attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Scores and mixing, for queries of (B, S, N width) or (B, N, S, width)."""
    query, key, value = inputs[:3]
    past = _at(inputs, 4)[2] if _at(inputs, 4) else 0
    if len(query) == 4:
        return 2 * prod(query[:3]) * (past + key[2]) * (query[3] + value[3])
    heads = _number(node, "q_num_heads", 1)
    kept = _number(node, "kv_num_heads", heads)
    return _looked(query, past + key[1], query[2], heads * (value[2] // kept))


def _looked(query: Shape, others: int, width: int, width_out: int) -> int:
    """Scores and mixing.

    Args:
        query: (B, S, ...).
        others: T.
        width: of all heads of queries.
        width_out: of all heads of the result.
    """
    return 2 * prod(query[:2]) * others * (width + width_out)


def projecting_attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """com.microsoft.Attention: (B, S, in) times the weights of queries, keys and values."""
    given, weights = inputs[:2]
    made = node.attributes.get("qkv_hidden_sizes")
    query, _, value = made if isinstance(made, tuple) and len(made) == 3 else (weights[1] // 3,) * 3
    past = _at(inputs, 4)[3] if _at(inputs, 4) else 0
    return 2 * prod(given) * weights[1] + _looked(given, past + given[1], query, value)


def multi_head_attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Queries (B, S, N width) with keys and values, alike or (B, N, T, width); with both in one,
    (B, T, N, 2, width); or all in one, (B, S, N, 3, width).
    """
    query, key, value = (_at(inputs, i) for i in range(3))
    past = _at(inputs, 6)[2] if _at(inputs, 6) else 0
    if not key:
        width = query[2] * query[4]
        return _looked(query, past + query[1], width, width)
    if not value:
        return _looked(query, past + key[1], query[2], query[2])
    wide = value[1] * value[3] if len(value) == 4 else value[2]
    return _looked(query, past + key[2 if len(key) == 4 else 1], query[2], wide)


def group_query_attention(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Queries (B, S, N width) with keys and values (B, S, K width), or all three in one; there is
    no past.
    """
    query, width = inputs[0], inputs[0][2]
    if not _at(inputs, 1):
        heads, others = (_number(node, name, 1) for name in ("num_heads", "kv_num_heads"))
        width = width // (heads + 2 * others) * heads
    return _looked(query, query[1], width, width)


def recurrent(node: Node, inputs: Shapes, outputs: Shapes) -> int:
    """Two products per time step and direction: (steps, batch, in) and (directions, gates, in)."""
    steps, batch = inputs[0][:2]
    return 2 * steps * batch * (prod(inputs[1]) + prod(inputs[2]))
