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
class StageTensor:
    """A tensor that enters a stage or leaves it.

    Attributes:
        crossing: index into the crossings.
        stage: the stage at the other end.
        gradient: whether its gradient goes the other way.
    """

    crossing: int
    stage: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The tensors that enter a stage and those that leave it, in the order of the crossings."""

    entering: tuple[StageTensor, ...]
    leaving: tuple[StageTensor, ...]


class ListShape(NamedTuple):
    """All that the list of a replica depends on but for numbers and names.

    Attributes:
        schedule: of the strategy.
        num_microbatches: of the replica.
        warmup: W.
        entering: per tensor that comes into the stage, whether it has a gradient.
        leaving: per tensor that leaves the stage, whether it has a gradient.
        num_sums: how many all-reduces the replica takes part in; of an asynchronous schedule, in
            each of its rounds.
    """

    schedule: ScheduleName
    num_microbatches: int
    warmup: int
    entering: tuple[bool, ...]
    leaving: tuple[bool, ...]
    num_sums: int


class ListPattern(NamedTuple):
    """The list of a replica, n actions; (n,) each.

    Attributes:
        kind, backward: as in `Code`.
        turn: which of the replica's microbatches, from 0 on; of an all-reduce, which of its rounds.
        slot: the tensor or all-reduce of the action: a position among the tensors that enter the
            stage, those that leave it, its all-reduces, and one more for actions without either.
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
        slot, turn: (n,) as in `ListPattern`.
    """

    devices: tuple[int, ...]
    kind: Kinds
    backward: Bools
    stage: Ints
    microbatch: Ints
    peer: Ints
    slot: Ints
    turn: Ints


def stage_tensors(crossing: Sequence[Crossing], num_stages: int) -> tuple[StageTensors, ...]:
    """The tensors that enter each stage and those that leave it."""
    entering: list[list[StageTensor]] = [[] for _ in range(num_stages)]
    leaving: list[list[StageTensor]] = [[] for _ in range(num_stages)]
    for i, one in enumerate(crossing):
        for target in one.targets:
            entering[target].append(StageTensor(i, one.source, one.gradient))
            leaving[one.source].append(StageTensor(i, target, one.gradient))
    return tuple(StageTensors(tuple(a), tuple(b)) for a, b in zip(entering, leaving, strict=True))


def stage_sums(strategy: Strategy, sums: Sequence[GradientSum]) -> tuple[tuple[int, ...], ...]:
    """Per stage, the all-reduces that its devices take part in: all of them or none."""
    tails: list[list[int]] = [[] for _ in strategy.stages]
    for i, one in enumerate(sums):
        members = frozenset(one.devices)
        for s, stage in enumerate(strategy.stages):
            if stage.devices[0] in members:
                tails[s].append(i)
    return tuple(map(tuple, tails))


def stage_blocks(
    strategy: Strategy,
    s: int,
    tensors: StageTensors,
    num_sums: int,
    known: dict[ListShape, ListPattern],
) -> tuple[Block, ...]:
    """The lists of a stage: one block, or two where M is no multiple of R.

    Args:
        tensors: of the stage; their names do not matter.
        num_sums: how many all-reduces its devices take part in.
        known: patterns that were made before; new ones are added.
    """
    stage, blocks = strategy.stages[s], []
    others = [one.stage for one in (*tensors.entering, *tensors.leaving)]
    rounds, more = divmod(strategy.num_microbatches, stage.num_replicas)
    for count, which in ((rounds + 1, range(more)), (rounds, range(more, stage.num_replicas))):
        if not which:
            continue
        entering, leaving = (
            tuple(e.gradient for e in some) for some in (tensors.entering, tensors.leaving)
        )
        shape = ListShape(strategy.schedule, count, stage.warmup, entering, leaving, num_sums)
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
        blocks.append(Block(devices, kind, backward, stages, microbatch, peer, slot, turn))
    return tuple(blocks)


def assembled(
    blocks: Sequence[Sequence[Block]],
    tensors: Sequence[StageTensors],
    tails: Sequence[Sequence[int]],
    names: tuple[str, ...],
) -> Code:
    """The lists of all devices.

    Args:
        blocks: of each stage.
        tensors: of each stage.
        tails: of each stage, its all-reduces; of an asynchronous schedule, those of its first
            round.
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
        _pieces([(s, block) for block, (_, s, *_) in zip(each, rows, strict=True)], tensors, tails),
        np.concatenate([block.peer[row] for block, (*_, row) in zip(each, rows, strict=True)]),
        tuple(map(Piece, names)),
    )


def renamed(
    code: Code,
    blocks: Sequence[Sequence[Block]],
    tensors: Sequence[StageTensors],
    tails: Sequence[Sequence[int]],
    names: tuple[str, ...],
) -> Code:
    """The lists that were put together from blocks, for other tensors. Arguments as of `assembled`,
    with the same blocks.
    """
    owner = {device: (s, b) for s, some in enumerate(blocks) for b in some for device in b.devices}
    piece = _pieces([owner[device] for device in code.devices.tolist()], tensors, tails)
    return replace(code, piece=piece, pieces=tuple(map(Piece, names)))


def _pieces(
    rows: Sequence[tuple[int, Block]],
    tensors: Sequence[StageTensors],
    tails: Sequence[Sequence[int]],
) -> Ints:
    """The column of pieces and all-reduces.

    Args:
        rows: stage and block of each device.
    """
    moved = [
        np.array([*(e.crossing for e in (*both.entering, *both.leaving)), *tail, 0])
        for both, tail in zip(tensors, tails, strict=True)
    ]
    # The all-reduces of a round have the numbers behind those of all stages in the round before.
    in_round = 1 + max((i for tail in tails for i in tail), default=-1)
    return np.concatenate(
        [
            moved[s][block.slot] + np.where(block.kind == Kind.ALL_REDUCE, in_round * block.turn, 0)
            for s, block in rows
        ]
    )


def pattern(shape: ListShape) -> ListPattern:
    """Forwards, backwards and transfers of a replica. Its all-reduces and the step come at the end,
    or, under an asynchronous schedule, behind each backward and its sends.
    """
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
    # (place, 0 before its action, 2 after it or 3 behind that, computation, position), and the kind
    # of the action.
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
    ending = [Kind.ALL_REDUCE] * shape.num_sums + [Kind.STEP]
    if shape.schedule.is_asynchronous:
        own = np.flatnonzero(back)
        for j, kind in enumerate(ending):
            keys.append(np.stack([own, np.full_like(own, 3), own, np.full_like(own, j)]))
            parts.append((kind, own, nothing - shape.num_sums + j))
        ending = []
    sizes = [len(own) for _, own, _ in parts]
    of = np.concatenate([own for _, own, _ in parts])
    place_of, phase_of, computation, j_of = np.concatenate(keys, axis=1)
    by_place = np.lexsort((j_of, computation, phase_of, place_of))
    kinds: Ints = np.repeat([kind for kind, *_ in parts], sizes)[by_place]
    slots: Ints = np.repeat([slot for *_, slot in parts], sizes)[by_place]
    zeros = np.zeros(len(ending), dtype=np.int64)
    return ListPattern(
        np.concatenate([kinds, ending]).astype(np.int8),
        np.concatenate([back[of][by_place] & (kinds <= Kind.RECEIVE), zeros.astype(bool)]),
        np.concatenate([turn[of][by_place], zeros]),
        np.concatenate([slots, nothing - shape.num_sums + np.arange(len(ending))]),
    )
