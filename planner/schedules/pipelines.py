"""Action lists where no device runs several stages, as arrays, stage by stage.

Replicas of a stage that have equally many microbatches have the same list but for the numbers of
the microbatches and the peers. So a list is made once for all of them (`Block`), and the lists of
all devices are blocks put together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.schedules.actions import Code, Direction, Kind, Piece
from planner.schedules.orders import SCHEDULES
from planner.strategy import Crossing, GradientSum, ScheduleName, Strategy
from planner.support.arrays import Bools, Ints, Kinds


@dataclass(frozen=True, slots=True)
class End:
    """A tensor that comes into a stage or leaves it.

    Attributes:
        tensor: index into the crossings.
        stage: at the other end.
        gradient: whether its gradient goes the other way.
    """

    tensor: int
    stage: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """What comes into a stage and what leaves it, in the order of the crossings."""

    entering: tuple[End, ...]
    leaving: tuple[End, ...]


class Shape(NamedTuple):
    """All that the list of a replica depends on but for numbers and names.

    Attributes:
        schedule: of the strategy.
        num_microbatches: of the replica.
        warmup: W.
        entering: per tensor that comes into the stage, whether it has a gradient.
        leaving: likewise.
        num_sums: how many sums the replica takes part in.
    """

    schedule: ScheduleName
    num_microbatches: int
    warmup: int
    entering: tuple[bool, ...]
    leaving: tuple[bool, ...]
    num_sums: int


class Pattern(NamedTuple):
    """The list of a replica, n actions; (n,) each.

    Attributes:
        kind, backward: as in `Code`.
        turn: which of the replica's microbatches, from 0 on.
        slot: what the action moves: a position among the tensors that enter the stage, those that
            leave it, its sums, and one more for actions that move nothing.
    """

    kind: Kinds
    backward: Bools
    turn: Ints
    slot: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The lists of r replicas of a stage, n actions each; columns as in `Code`.

    Attributes:
        devices: of the replicas.
        kind, backward, stage: (n,).
        microbatch, peer: (r, n).
        slot: (n,) as in `Pattern`.
    """

    devices: tuple[int, ...]
    kind: Kinds
    backward: Bools
    stage: Ints
    microbatch: Ints
    peer: Ints
    slot: Ints


def stage_ends(crossing: Sequence[Crossing], num_stages: int) -> tuple[Ends, ...]:
    """What comes into each stage and what leaves it."""
    entering: list[list[End]] = [[] for _ in range(num_stages)]
    leaving: list[list[End]] = [[] for _ in range(num_stages)]
    for i, one in enumerate(crossing):
        for target in one.targets:
            entering[target].append(End(i, one.source, one.gradient))
            leaving[one.source].append(End(i, target, one.gradient))
    return tuple(Ends(tuple(a), tuple(b)) for a, b in zip(entering, leaving, strict=True))


def stage_sums(strategy: Strategy, sums: Sequence[GradientSum]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the sums that its devices take part in: all of them or none."""
    found: list[list[int]] = [[] for _ in strategy.stages]
    for i, one in enumerate(sums):
        members = frozenset(one.devices)
        for s, stage in enumerate(strategy.stages):
            if stage.devices[0] in members:
                found[s].append(i)
    return tuple(map(tuple, found))


def stage_blocks(
    strategy: Strategy, s: int, ends: Ends, num_sums: int, known: dict[Shape, Pattern]
) -> tuple[Block, ...]:
    """The lists of a stage: one block, or two where M is no multiple of R.

    Args:
        ends: of the stage; which tensors they are does not matter.
        num_sums: how many sums its devices take part in.
        known: patterns that were made before; new ones are added.
    """
    stage, found = strategy.stages[s], []
    others = [end.stage for end in (*ends.entering, *ends.leaving)]
    rounds, more = divmod(strategy.num_microbatches, stage.num_replicas)
    for count, which in ((rounds + 1, range(more)), (rounds, range(more, stage.num_replicas))):
        if not which:
            continue
        entering, leaving = (
            tuple(e.gradient for e in some) for some in (ends.entering, ends.leaving)
        )
        shape = Shape(strategy.schedule, count, stage.warmup, entering, leaving, num_sums)
        if shape not in known:
            known[shape] = pattern(shape)
        kind, backward, turn, slot = known[shape]
        of_stage = kind <= Kind.RECEIVE
        microbatch = np.array(which, dtype=np.int64)[:, None] + turn * stage.num_replicas
        microbatch = np.where(of_stage, microbatch, 0)
        peer = np.zeros_like(microbatch)
        for other in set(others):
            far = np.array(strategy.stages[other].devices, dtype=np.int64)
            own = np.flatnonzero(np.isin(slot, [j for j, t in enumerate(others) if t == other]))
            peer[:, own] = far[microbatch[:, own] % len(far)]
        devices = tuple(stage.devices[replica] for replica in which)
        stages = np.where(of_stage, s, 0)
        found.append(Block(devices, kind, backward, stages, microbatch, peer, slot))
    return tuple(found)


def assembled(
    blocks: Sequence[Sequence[Block]],
    ends: Sequence[Ends],
    tails: Sequence[Sequence[int]],
    names: tuple[str, ...],
) -> Code:
    """The lists of all devices.

    Args:
        blocks: of each stage.
        ends: of each stage.
        tails: of each stage, its sums.
        names: of the tensors that cross stages, in the order of the crossings.
    """
    rows = sorted(
        (device, s, b, row)
        for s, some in enumerate(blocks)
        for b, block in enumerate(some)
        for row, device in enumerate(block.devices)
    )
    each = [blocks[s][b] for _, s, b, _ in rows]
    return Code(
        np.array([device for device, *_ in rows], dtype=np.int64),
        np.cumsum([0, *(len(block.kind) for block in each)]),
        np.concatenate([block.kind for block in each]),
        np.concatenate([block.backward for block in each]),
        np.concatenate([block.stage for block in each]),
        np.concatenate(
            [block.microbatch[row] for block, (*_, row) in zip(each, rows, strict=True)]
        ),
        _tensors([(s, block) for block, (_, s, *_) in zip(each, rows, strict=True)], ends, tails),
        np.concatenate([block.peer[row] for block, (*_, row) in zip(each, rows, strict=True)]),
        tuple(map(Piece, names)),
    )


def renamed(
    code: Code,
    blocks: Sequence[Sequence[Block]],
    ends: Sequence[Ends],
    tails: Sequence[Sequence[int]],
    names: tuple[str, ...],
) -> Code:
    """The lists that were put together from blocks, for other tensors. Arguments as of `assembled`,
    with the same blocks.
    """
    owner = {device: (s, b) for s, some in enumerate(blocks) for b in some for device in b.devices}
    tensor = _tensors([owner[device] for device in code.devices.tolist()], ends, tails)
    return replace(code, piece=tensor, pieces=tuple(map(Piece, names)))


def _tensors(
    rows: Sequence[tuple[int, Block]], ends: Sequence[Ends], tails: Sequence[Sequence[int]]
) -> Ints:
    """The column of tensors and sums.

    Args:
        rows: stage and block of each device.
    """
    moved = [
        np.array([*(e.tensor for e in (*both.entering, *both.leaving)), *tail, 0])
        for both, tail in zip(ends, tails, strict=True)
    ]
    return np.concatenate([moved[s][block.slot] for s, block in rows])


def pattern(shape: Shape) -> Pattern:
    """Forwards, backwards and transfers of a replica, then its sums and the step."""
    order = list(SCHEDULES[shape.schedule](shape.num_microbatches, shape.warmup))
    back = np.array([direction is Direction.BACKWARD for direction, _ in order], dtype=bool)
    turn = np.array([k for _, k in order], dtype=np.int64)
    places = np.arange(len(order))
    # Receives are posted one action of their kind ahead; the first backward has only forwards
    # before it.
    posted = np.empty(len(order), dtype=np.int64)
    for backward in (False, True):
        same = np.flatnonzero(back == backward)
        posted[same[1:]] = same[:-1]
        posted[same[:1]] = np.maximum(same[:1] - 1, 0)
    # (place, 0 before its action or 2 after it, computation, position), and what the action is.
    keys = [np.stack([places, np.ones_like(places), places, np.zeros_like(places)])]
    before = {True: 0, False: len(shape.entering)}
    nothing = len(shape.entering) + len(shape.leaving) + shape.num_sums
    parts = [(Kind.COMPUTE, places, nothing)]
    for kind, at, phase in ((Kind.RECEIVE, posted, 0), (Kind.SEND, places, 2)):
        for backward in (False, True):
            own = np.flatnonzero(back == backward)
            entering = (kind is Kind.RECEIVE) != backward
            for j, gradient in enumerate(shape.entering if entering else shape.leaving):
                if gradient or not backward:
                    place = at[own], np.full_like(own, phase), own, np.full_like(own, j)
                    keys.append(np.stack(place))
                    parts.append((kind, own, before[entering] + j))
    sizes = [len(own) for _, own, _ in parts]
    of = np.concatenate([own for _, own, _ in parts])
    place_of, phase_of, computation, j_of = np.concatenate(keys, axis=1)
    by_place = np.lexsort((j_of, computation, phase_of, place_of))
    zeros = np.zeros(shape.num_sums + 1, dtype=np.int64)
    tail = [*[Kind.ALL_REDUCE] * shape.num_sums, Kind.STEP]

    def column(values: Sequence[int], end: Sequence[int]) -> Ints:
        return np.concatenate([np.repeat(values, sizes)[by_place], end])

    return Pattern(
        column([kind for kind, *_ in parts], tail).astype(np.int8),
        np.concatenate([back[of][by_place], zeros.astype(bool)]),
        np.concatenate([turn[of][by_place], zeros]),
        column([slot for *_, slot in parts], range(nothing - shape.num_sums, nothing + 1)),
    )
