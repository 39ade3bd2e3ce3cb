"""From one spec of a tensor to another: the cheapest path of collectives and local steps.

A step changes the spec of one axis of the mesh:

    S<d> -> R     all-gather            R -> S<d>     slice, local
    S<d> -> S<e>  all-to-all            R -> P        the first of the line keeps it, local
    P -> R        all-reduce            S<d> -> P     put into zeros, local
    P -> S<d>     reduce-scatter

Chunks (C) are gathered, sliced and scattered alike, in buffers of equal chunks: of n devices that
hold r rows each has ceil(r / n). They are made only where they are asked for.

Where several axes cut one dimension the later ones cut what the earlier ones left, so that a step
takes a cut off, or puts one on, only where no later axis cuts the same dimension. A path is cheap
when a device receives few bytes by it (Table 2 of Alpa, Zheng et al., OSDI 2022, counts the same);
among equals the one of fewer collectives, then of fewer steps, then the first by the order of its
steps is taken, so that everyone who asks gets the same path.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import count
from math import prod

from planner.artefacts.sharding import (
    CHUNKS,
    OWN,
    Spec,
    blocks_of,
    check_spec,
    dim_of,
    local_shape,
    tiles,
)
from planner.artefacts.topology import CollectiveKind
from planner.support.memo import remembered


class Collective(StrEnum):
    """What a step of a conversion does."""

    ALL_GATHER = CollectiveKind.ALL_GATHER.value
    ALL_TO_ALL = CollectiveKind.ALL_TO_ALL.value
    ALL_REDUCE = CollectiveKind.ALL_REDUCE.value
    REDUCE_SCATTER = CollectiveKind.REDUCE_SCATTER.value
    SLICE = "slice"
    """Each device keeps its part of what all have."""
    FIRST = "first"
    """The first device of the line keeps what all have, the others have zeros: a sum."""
    SCATTER = "scatter"
    """Each device puts its part into zeros: a sum."""


LOCAL = frozenset({Collective.SLICE, Collective.FIRST, Collective.SCATTER})
"""The kinds that send nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversion, along the lines of one axis.

    Attributes:
        kind: what is done.
        axis: of the mesh; each line of devices along it does the step for itself.
        source: the part of the spec before, such as "S0"; "R" or "P" where nothing was cut.
        target: the part of the spec afterwards.
        bytes: of the largest buffer that a device of the line has: what it has after an all-gather
            or a scatter, before any other step. A ring sends (n - 1) / n of it, an all-reduce
            twice that.
        rows: of the first dimension where the step takes off or puts on a cut in chunks; else 0.
    """

    kind: Collective
    axis: int
    source: str
    target: str
    bytes: int
    rows: int = 0


# Of a path: bytes that a device receives, collectives, steps.
_Cost = tuple[float, int, int]


@remembered(kept=65536)
def conversion(
    shape: tuple[int, ...], item_bytes: float, mesh: tuple[int, ...], old: Spec, new: Spec
) -> tuple[Step, ...]:
    """The steps from one spec to another, none where they are the same.

    Args:
        shape: of the whole tensor.
        item_bytes: of one element.
        mesh: size of each axis.

    Raises:
        ValueError: if a spec is none of the mesh, or its dimensions are not there or do not divide.

    >>> [step.kind.value for step in conversion((8, 6), 4, (2,), ("P",), ("S0",))]
    ['reduce-scatter']
    >>> [step.bytes for step in conversion((8, 6), 4, (2,), ("S0",), ("S1",))]
    [96]
    """
    for spec in (old, new):
        check_spec(spec, len(mesh))
        tiles(shape, spec, mesh, 0)
    found = _paths(shape, item_bytes, mesh, old, _asked(new)).get(new)
    if found is None:
        raise ValueError(f"{old} -> {new}: no path of collectives")
    return found


def _asked(new: Spec) -> Spec:
    """Of a spec what decides which steps are tried on the way to it: sums, chunks and blocks. One
    search has the paths to all specs with the same of these.
    """
    return tuple(part if part in ("P", CHUNKS) or blocks_of(part) > 1 else "R" for part in new)


@remembered(kept=16384)
def _paths(
    shape: tuple[int, ...], item_bytes: float, mesh: tuple[int, ...], old: Spec, asked: Spec
) -> Mapping[Spec, tuple[Step, ...]]:
    """The cheapest paths from a spec to all others.

    Args:
        asked: see `_asked`.
    """
    size = int(prod(shape) * item_bytes)
    best: dict[Spec, _Cost] = {old: (0.0, 0, 0)}
    turn = count()
    queue: list[tuple[_Cost, int, Spec, tuple[Step, ...]]] = [((0.0, 0, 0), next(turn), old, ())]
    found: dict[Spec, tuple[Step, ...]] = {}
    while queue:
        cost, _, spec, path = heapq.heappop(queue)
        if spec in found or cost > best[spec]:
            continue
        found[spec] = path
        for step, after, received in _steps(shape, spec, asked, size, mesh):
            then = (cost[0] + received, cost[1] + (step.kind not in LOCAL), cost[2] + 1)
            if after not in best or then < best[after]:
                best[after] = then
                heapq.heappush(queue, (then, next(turn), after, (*path, step)))
    return found


@lru_cache(maxsize=65536)
def _steps(
    shape: tuple[int, ...], spec: Spec, asked: Spec, size: int, mesh: tuple[int, ...]
) -> tuple[tuple[Step, Spec, float], ...]:  # fmt: skip
    """The steps that may be taken from a spec, the spec behind each, and the bytes that a device
    receives by it.

    Args:
        asked: see `_asked`.
        size: of the whole tensor, in bytes.
    """
    return tuple(
        (step, spec_after(spec, [step]), received_bytes(step, mesh[step.axis]))
        for step in _possible(shape, spec, asked, size, mesh)
    )


def _possible(
    shape: tuple[int, ...], spec: Spec, asked: Spec, size: int, mesh: tuple[int, ...]
) -> Iterator[Step]:
    # All bytes are those of the buffer of one device. Divisions are exact, because both specs were
    # checked to cut the shape evenly.
    blocked = {part for part in (*spec, *asked) if blocks_of(part) > 1}
    cuts = [*(f"S{dim}" for dim in range(len(shape))), *sorted(blocked)]
    local = _local_bytes(shape, spec, size, mesh)
    for axis, part in enumerate(spec):
        if dim_of(part) is not None and dim_of(part) in map(dim_of, spec[axis + 1 :]):
            # A later axis cuts what this one left of the dimension: without this cut, its parts
            # would not lie beside each other. The cut of the last axis comes off first.
            continue
        for kind, target in _kinds(part, asked[axis]):
            whole = kind in (Collective.ALL_GATHER, Collective.SCATTER)
            for one in [target] if target else cuts:
                if (target and target != CHUNKS) or _can_cut(shape, mesh, spec, axis, one):
                    held, rows = local * mesh[axis] if whole else local, 0
                    if CHUNKS in (part, one):
                        rows = _rows(shape, spec, axis, mesh)
                    if kind is Collective.REDUCE_SCATTER and rows:
                        held = held * -(-rows // mesh[axis]) * mesh[axis] // rows
                    yield Step(kind, axis, part, one, held, rows)


def _local_bytes(
    shape: tuple[int, ...], spec: Spec, size: int, mesh: tuple[int, ...]
) -> int:  # fmt: skip
    """Bytes of what each device has, at most."""
    if CHUNKS in spec:
        return size * prod(local_shape(shape, spec, mesh)) // max(prod(shape), 1)
    return size // prod(n for part, n in zip(spec, mesh, strict=True) if part.startswith("S"))


def _rows(shape: tuple[int, ...], spec: Spec, axis: int, mesh: tuple[int, ...]) -> int:
    """Of the first dimension, those that devices of a line have together where they cut it."""
    return local_shape(shape, (*spec[:axis], "R", *spec[axis + 1 :]), mesh)[0]


def _can_cut(
    shape: tuple[int, ...], mesh: tuple[int, ...], spec: Spec, axis: int, cut: str
) -> bool:  # fmt: skip
    """Whether an axis can be made to cut a dimension that it does not cut. No later axis may cut
    it; one in blocks is cut by no other axis, and not exchanged for a cut of another dimension.
    """
    dim, part = dim_of(cut), spec[axis]
    others = [a for a in range(len(mesh)) if a != axis and dim_of(spec[a]) == dim]
    blocks = max(blocks_of(one) for one in (cut, part, *(spec[a] for a in others)))
    if dim is None or dim == dim_of(part) or any(a > axis for a in others):
        return False
    if cut == CHUNKS:
        return True
    if blocks > 1 and (others or part.startswith("S")):
        return False
    return shape[dim] % (blocks * mesh[axis] * prod(mesh[a] for a in others)) == 0


def _kinds(part: str, new: str) -> Iterator[tuple[Collective, str]]:
    """What can be done with an axis, and what it is afterwards; "" for any cut."""
    if part == OWN:
        return
    if part == CHUNKS:
        yield Collective.ALL_GATHER, "R"
        return
    if new == CHUNKS and not part.startswith("S"):
        yield Collective.REDUCE_SCATTER if part == "P" else Collective.SLICE, CHUNKS
    if part.startswith("S"):
        yield Collective.ALL_GATHER, "R"
        yield Collective.ALL_TO_ALL, ""
    elif part == "P":
        yield Collective.ALL_REDUCE, "R"
        yield Collective.REDUCE_SCATTER, ""
    else:
        yield Collective.SLICE, ""
    if new == "P" != part:  # a sum is made only where one is asked for
        yield Collective.FIRST if part == "R" else Collective.SCATTER, "P"


def spec_after(spec: Spec, steps: Sequence[Step]) -> Spec:
    """The spec behind some steps."""
    parts = list(spec)
    for one in steps:
        parts[one.axis] = one.target
    return tuple(parts)


def received_bytes(step: Step, n: int) -> float:
    """Bytes that each of n devices receives in a step, on a ring.

    >>> received_bytes(Step(Collective.ALL_REDUCE, 0, "P", "R", 12), 4)
    18.0
    """
    if step.kind in LOCAL:
        return 0.0
    return (2 if step.kind is Collective.ALL_REDUCE else 1) * (n - 1) / n * step.bytes


def sends(steps: Iterable[Step]) -> bool:
    """Whether steps send something."""
    return any(step.kind not in LOCAL for step in steps)
