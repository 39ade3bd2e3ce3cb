"""Rules that cut a dimension in blocks, each block for itself: S<d>/<c> (EasyDist's chunk).

Queries, keys and values that one weight makes lie side by side; cut plainly, each device would have
parts of one of them. Cut in three blocks, each has its heads of all three. Tokens of several
samples that a Reshape has put into one dimension are cut along the sequence in as many blocks as
there are samples.

1. A Split into equal parts reads its input in as many blocks; a Reshape reads or makes blocks where
   it takes apart or joins what is cut.
2. What is in blocks goes on to the operators that make and read it: where one has a rule that cuts
   the tensor along the dimension, the same rule in blocks is tried. So on, until nothing is new.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planner.artefacts.sharding import AxisRule, blocks_of, dim_of
from planner.operators.binding import Call
from planner.profilers.rules.template import Factors, Shape, reshaped

MAX_BLOCKS = 3
"""Of dimensions other than the first: queries, keys and values. More blocks there are heads, whose
own dimension is better cut."""


@dataclass(frozen=True)
class Node:
    """An operator of a model, as this module needs it.

    Attributes:
        kind: its ONNX type.
        call: of its function.
        tensors: tensors, not parameters, among what it reads and makes.
        reads: names of what it reads, in the call's order.
        makes: names of its outputs.
        shapes: of both, by name.
        rules: those that were found without blocks.
    """

    kind: str
    call: Call
    tensors: frozenset[str]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    shapes: Mapping[str, Shape]
    rules: tuple[AxisRule, ...]


def in_blocks(
    nodes: Sequence[Node], holds: Callable[[int, AxisRule], bool]
) -> list[list[AxisRule]]:  # fmt: skip
    """The rules with blocks of every operator.

    Args:
        holds: whether a rule holds for the operator of an index.
    """
    found: list[dict[AxisRule, None]] = [{} for _ in nodes]
    touched = _touched(nodes)
    waiting: deque[tuple[str, str]] = deque()
    seen: set[tuple[str, str]] = set()

    def keep(v: int, rule: AxisRule) -> None:
        found[v][rule] = None
        node = nodes[v]
        both = zip((*node.reads, *node.makes), rule.parts, strict=True)
        for name, part in both:
            if blocks_of(part) > 1 and name in node.tensors and (name, part) not in seen:
                seen.add((name, part))
                waiting.append((name, part))

    for v, node in enumerate(nodes):
        for rule in _first(node):
            if holds(v, rule):
                keep(v, rule)
    while waiting:
        name, part = waiting.popleft()
        for v in touched[name]:
            for rule in _alike(nodes[v], name, part):
                if rule not in found[v] and holds(v, rule):
                    keep(v, rule)
    return [list(rules) for rules in found]


def _touched(nodes: Sequence[Node]) -> dict[str, list[int]]:
    """Per tensor, the operators that read or make it."""
    touched: dict[str, list[int]] = {}
    for v, node in enumerate(nodes):
        for name in dict.fromkeys((*node.reads, *node.makes)):
            if name in node.tensors:
                touched.setdefault(name, []).append(v)
    return touched


def _alike(node: Node, name: str, part: str) -> Iterator[AxisRule]:
    """The rules of an operator that cut a tensor along a dimension, with all cuts in blocks."""
    plain, blocks = f"S{dim_of(part)}", blocks_of(part)
    for rule in node.rules:
        both = zip((*node.reads, *node.makes), rule.parts, strict=True)
        if (name, plain) in both:
            made = AxisRule(_with(rule.inputs, blocks), _with(rule.outputs, blocks), rule.local)
            if all(_divides(node, one) for one in _cuts(node, made)):
                yield made


def _with(parts: Sequence[str], blocks: int) -> tuple[str, ...]:
    return tuple(f"{one}/{blocks}" if one.startswith("S") else one for one in parts)


def _cuts(node: Node, rule: AxisRule) -> Iterator[tuple[str, str]]:
    both = zip((*node.reads, *node.makes), rule.parts, strict=True)
    return ((name, part) for name, part in both if dim_of(part) is not None)


def _divides(node: Node, cut: tuple[str, str]) -> bool:
    name, part = cut
    size = node.shapes[name][dim_of(part) or 0]
    return size % blocks_of(part) == 0 and size > blocks_of(part)


# ---- where blocks come from


def _first(node: Node) -> Iterator[AxisRule]:
    if node.kind == "Split" and len(node.reads) == 1:
        yield from _of_split(node)
    if node.kind in ("Flatten", "Reshape"):
        yield from _of_reshape(node)


def _of_split(node: Node) -> Iterator[AxisRule]:
    """A Split into equal parts reads its input in as many blocks."""
    axis = node.call.kwargs.get("axis", 0)
    assert isinstance(axis, int)
    axis %= len(node.shapes[node.reads[0]])
    sizes = [node.shapes[name][axis] for name in node.makes]
    if len(sizes) == node.call.kwargs["num_outputs"] and len(sizes) > 1 == len(set(sizes)):
        local = () if node.call.kwargs.get("split") is None else ("split",)
        yield AxisRule((f"S{axis}/{len(sizes)}",), (f"S{axis}",) * len(sizes), local)


def _of_reshape(node: Node) -> Iterator[AxisRule]:
    """A Reshape reads or makes blocks where it takes apart or joins what is cut."""
    read, made = node.shapes[node.reads[0]], node.shapes[node.makes[0]]
    (before,), (after,), _, _ = reshaped(node.call, read, made)
    shape = node.call.kwargs.get("shape")
    for d, j, left, right in _joints(before, after):
        few = all(blocks <= MAX_BLOCKS or dim == 0 for dim, blocks in ((d, left), (j, right)))
        if few and max(left, right) > 1:
            explicit = isinstance(shape, tuple) and shape[j] > 1
            local = (f"shape[{j}]",) if explicit else ()
            yield AxisRule((_part(d, left),), (_part(j, right),), local)


def _part(dim: int, blocks: int) -> str:
    return f"S{dim}/{blocks}" if blocks > 1 else f"S{dim}"


def _joints(
    before: Sequence[Factors], after: Sequence[Factors]
) -> Iterator[tuple[int, int, int, int]]:
    """Each factor's dimensions in input and output, and the sizes to its left in them."""
    places = {
        factor: (j, prod(one.real for one in dim[:m]))
        for j, dim in enumerate(after)
        for m, factor in enumerate(dim)
    }
    for d, dim in enumerate(before):
        for k, factor in enumerate(dim):
            if factor.free and factor in places:
                j, right = places[factor]
                yield d, j, prod(one.real for one in dim[:k]), right
