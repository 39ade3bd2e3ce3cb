"""What waits for what in the passes of a split stage whose collectives run beside its computations.

The collectives of a stage have a queue of their own, which does one after the other in the order in
which they are started. One rule holds for costs, simulator and launcher: a collective starts when
what it converts is there and the queue is free, and an operator waits for the collectives that it
reads. So all there is to say is where in a pass each one is started. In a forward a copy is started

    before   the first operator behind the maker of its tensor (of parameters and of what comes from
             other stages, behind the stage's begin and where the one that is read before is
             started) from which on all copies that are started and not read yet have no more bytes
             than `Stage.prefetch`

and is waited for by its first reader. The backward goes the same way back. The gradient of a copy
is started behind the backward of the copy's first reader, and is waited for where the copy was
started: gradients wait to be scattered as far as copies are gathered ahead. Parameters that are
gathered again are started before the backward of an operator in front of which all of them have no
more bytes than the same.

A product whose input's gradient is to be converted, such as one of Megatron's column-parallel ones
(Shoeybi et al. 2019, section 3), computes that gradient first, and those of its parameters when the
conversion has started. Products that read the same copy wait with their parameters for the last of
them.

A segment that is run again (`Stage.recomputed`) makes its copies anew: each is started where it is
in a forward, but not before the segment begins.

Without `Stage.prefetch` every collective is started where it is waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    differentiated,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.operator_types import PRODUCTS
from planner.artefacts.segments import Segment, segments_of
from planner.artefacts.sharding import local_shape
from planner.artefacts.strategy import Stage, indices_of
from planner.resharding.conversion import sends
from planner.resharding.over_replicas import over_replicas
from planner.resharding.reshardings import Resharding, reshardings
from planner.support.memo import remembered


@dataclass(frozen=True, slots=True)
class PassOrder:
    """Where the collectives of a stage of n operators are started; operators by their place in it.

    Attributes:
        first: per resharding, the place of its first reader; n of one that leaves.
        start: per resharding, the place of the operator before which it is started; n behind all.
        order: the reshardings in the order in which they are started.
        again: by the place of an operator, those of the operators whose parameters are started to
            be gathered again before its backward, in the order of that.
        late: per resharding, the operators whose parameters' gradients are computed when that of
            the copy has been started, in the order of the backward.
        reruns: the segments that are run again, by the place of the operator before whose backward
            that is.
    """

    first: tuple[int, ...]
    start: tuple[int, ...]
    order: tuple[int, ...]
    again: Mapping[int, tuple[int, ...]]
    late: Mapping[int, tuple[int, ...]]
    reruns: Mapping[int, "Rerun"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rerun:
    """A segment that is run again.

    Attributes:
        places: of its operators.
        kept: of those of them that are not computed again.
        starts: its reshardings in the order in which they are started, each with the place of the
            operator before which it is.
    """

    places: range
    kept: tuple[int, ...]
    starts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Copies:
    """The reshardings of a stage of n operators, as far as their order depends on them.

    Attributes:
        first: as in `PassOrder`.
        made: per resharding, the place of the operator from which on its tensor is there.
        moves: per resharding, whether it sends anything, there or back.
        bytes: per resharding, of the copy on a device.
        again: by the place of an operator, the bytes that it gathers again.
        backward: the places of operators that have a backward, ascending.
        late: as in `PassOrder`.
        segments: those that are run again.
    """

    first: tuple[int, ...]
    made: tuple[int, ...]
    moves: tuple[bool, ...]
    bytes: tuple[int, ...]
    again: Mapping[int, int]
    backward: tuple[int, ...]
    late: Mapping[int, tuple[int, ...]]
    segments: tuple[Segment, ...]


def pass_order(stage: Stage, graph: Graph) -> PassOrder:
    """Where the collectives of a stage are started.

    Args:
        stage: one with a sharding, or whose parameters lie in parts over replicas.
    """
    return _ordered(_copies(stage, graph), stage.prefetch)


def pass_orders(
    stage: Stage, graph: Graph, budgets: Iterable[int]
) -> list[tuple[int, PassOrder]]:  # fmt: skip
    """The same for several values of `Stage.prefetch`, each with its value."""
    copies = _copies(stage, graph)
    return [(budget, _ordered(copies, budget)) for budget in budgets]


def held_ahead_bytes(stage: Stage, graph: Graph) -> tuple[int, int]:
    """The bytes of the largest copy that a stage sends or receives, and of all of them; zeros where
    there is none.
    """
    copies = _copies(stage, graph)
    moved = [n for n, moves in zip(copies.bytes, copies.moves, strict=True) if moves]
    sizes = [*moved, *copies.again.values()]
    return max(sizes, default=0), max(sum(moved), sum(copies.again.values()))


@remembered(kept=256)
def _copies(stage: Stage, graph: Graph) -> _Copies:
    stage = over_replicas(stage, graph)
    every, count = reshardings(stage, graph), len(stage.operators)
    place = {name: i for i, name in enumerate(stage.operators)}
    index = {v: i for i, v in enumerate(indices_of(stage, graph))}
    made_by = producers(graph)
    with_backward = differentiated(graph)
    sizes = [_bytes(one, stage, graph) for one in every]
    again: dict[int, int] = {}
    for one, size in zip(every, sizes, strict=True):
        for name in one.again:
            again[place[name]] = again.get(place[name], 0) + size
    return _Copies(
        first=tuple(place[one.readers[0]] if one.readers else count for one in every),
        made=tuple(index.get(made_by.get(one.tensor, -1), -1) + 1 for one in every),
        moves=tuple(sends(one.forward) or sends(one.backward) for one in every),
        bytes=tuple(sizes),
        again=again,
        backward=tuple(i for v, i in index.items() if v in with_backward),
        late=_late(every, stage, graph),
        segments=segments_of(stage, graph),
    )


def _bytes(one: Resharding, stage: Stage, graph: Graph) -> int:
    """Of the copy on a device."""
    whole = parameters_by_name(graph).get(one.tensor) or tensors_by_name(graph)[one.tensor]
    shape = local_shape(whole.shape, one.new, stage.mesh)
    return round(prod(shape) * ITEM_BYTES[one.dtype])


def _late(
    every: Sequence[Resharding], stage: Stage, graph: Graph
) -> Mapping[int, tuple[int, ...]]:  # fmt: skip
    """As `PassOrder.late`; a product that reads several copies waits for the first one."""
    known = parameters_by_name(graph)
    todo = _products_in_two(every, stage, graph)
    found = {}
    for c, one in enumerate(every):
        if one.tensor not in known and sends(one.backward):
            mine = tuple(todo.pop(name) for name in reversed(one.readers) if name in todo)
            if mine:
                found[c] = mine
    return found


def _products_in_two(
    every: Sequence[Resharding], stage: Stage, graph: Graph
) -> dict[str, int]:  # fmt: skip
    """The places of the products with a backward that train parameters and read them as they lie,
    by name.
    """
    known, with_backward = parameters_by_name(graph), differentiated(graph)
    converted = {name for one in every if one.tensor in known for name in one.readers}
    operators = [(v, graph.operators[v]) for v in indices_of(stage, graph)]
    return {
        one.name: place
        for place, (v, one) in enumerate(operators)
        if one.type in PRODUCTS and v in with_backward and one.name not in converted
        and any(known[name].trainable for name in one.parameters)
    }  # fmt: skip


def _ordered(copies: _Copies, prefetch: int | None) -> PassOrder:
    """The order of a budget."""
    start = copies.first if prefetch is None else _starts(copies, prefetch)
    order = sorted(range(len(start)), key=lambda c: (start[c], copies.first[c], c))
    return PassOrder(
        first=copies.first,
        start=start,
        order=tuple(order),
        again=_again(copies, prefetch or 0),
        late={} if prefetch is None else copies.late,
        reruns={
            one.last: Rerun(
                range(one.first, one.end),
                one.kept,
                tuple(
                    (c, max(start[c], one.first))
                    for c in order
                    if one.first <= copies.first[c] < one.end
                ),
            )
            for one in copies.segments
        },
    )


def _starts(copies: _Copies, prefetch: int) -> tuple[int, ...]:
    """Per resharding, where it is started; those that are read first come as far ahead as they
    may. Of what is there from the beginning none overtakes another: a small one would be held, and
    its gradient wait, for most of a pass.
    """
    start, least = list(copies.first), 0
    ahead = [0] * max(copies.first, default=0)  # bytes that are held before each operator
    for c in sorted(range(len(start)), key=lambda c: (copies.first[c], c)):
        if copies.moves[c]:
            first, size, made = start[c], copies.bytes[c], copies.made[c]
            start[c] = _earliest(ahead, first, made or least, prefetch - size)
            least = least if made else start[c]
            for i in range(start[c], first):
                ahead[i] += size
    return tuple(start)


def _earliest(ahead: Sequence[int], first: int, least: int, room: int) -> int:
    """The first place from which on, up to another one, no more than some bytes are held."""
    at = first
    while at > least and ahead[at - 1] <= room:
        at -= 1
    return at


def _again(copies: _Copies, prefetch: int) -> Mapping[int, tuple[int, ...]]:
    """As `PassOrder.again`; an operator that starts its own, too."""
    found: dict[int, list[int]] = {}
    # The operators with a backward in its order, and the bytes that are held before each.
    order, least = copies.backward[::-1], 0
    ahead = [0] * len(order)
    for k, j in enumerate(order):
        if j in copies.again:
            size = copies.again[j]
            least = _earliest(ahead, k, least, prefetch - size)
            for i in range(least, k):
                ahead[i] += size
            found.setdefault(order[least], []).append(j)
    return {i: tuple(some) for i, some in found.items()}
