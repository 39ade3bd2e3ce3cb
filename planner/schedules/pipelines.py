"""Action lists where no device runs several stages, as arrays, stage by stage.

Replicas of a stage that have equally many microbatches have the same list but for the numbers of
the microbatches and the peers. So a list is made once for all of them (`Block`), and the lists of
all devices are blocks put together.

The devices with the same place in the meshes of a stage's replicas form a *row*: they hold the same
parts of everything. A stage of replicas on one device each is one row. Between rows boxes are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.sharding import Spec
from planner.artefacts.strategy import Crossing, GradientSum, ScheduleName, Stage, Strategy
from planner.resharding import pieces as pieces_between
from planner.schedules.actions import ActionKind, Code, Direction, Piece
from planner.schedules.orders import SCHEDULES
from planner.support.arrays import Bools, Ints, Kinds


@dataclass(frozen=True, slots=True)
class Row:
    """Devices with the same place in the meshes of a stage's replicas.

    Attributes:
        stage: the stage.
        devices: one per replica.
    """

    stage: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageTensor:
    """A tensor, or a part of one, that enters a row or leaves it.

    Attributes:
        piece: index into the pieces; of tensors that are sent whole, into the crossings.
        row: the row at the other end.
        gradient: whether its gradient goes the other way.
        forward: whether it goes itself: of the parts of split tensors, those that go and those
            whose gradients come back differ.
    """

    piece: int
    row: int
    gradient: bool
    forward: bool = True


@dataclass(frozen=True, slots=True)
class StageTensors:
    """The tensors that enter a row and those that leave it, in the order of the crossings."""

    entering: tuple[StageTensor, ...]
    leaving: tuple[StageTensor, ...]


class ListShape(NamedTuple):
    """All that the list of a replica depends on but for numbers and names.

    Attributes:
        schedule: of the strategy.
        num_microbatches: of the replica.
        warmup: W.
        entering: per tensor that comes into the stage, whether it comes and whether its gradient
            goes back.
        leaving: per tensor that leaves the stage, whether it goes and its gradient comes back.
        num_sums: how many all-reduces the replica takes part in; of an asynchronous schedule, in
            each of its rounds.
    """

    schedule: ScheduleName
    num_microbatches: int
    warmup: int
    entering: tuple[tuple[bool, bool], ...]
    leaving: tuple[tuple[bool, bool], ...]
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
    """The lists of r devices of a row, n actions each; columns as in `Code`.

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


def rows_of(strategy: Strategy) -> tuple[Row, ...]:
    """The rows of all stages, stage by stage; one for each stage where none is split."""
    return tuple(
        Row(s, devices)
        for s, stage in enumerate(strategy.stages)
        for devices in zip(*stage.groups, strict=True)
    )


def _stage_tensors(crossing: Sequence[Crossing], num_stages: int) -> tuple[StageTensors, ...]:
    """The tensors that enter each stage and those that leave it, where none is split."""
    entering: list[list[StageTensor]] = [[] for _ in range(num_stages)]
    leaving: list[list[StageTensor]] = [[] for _ in range(num_stages)]
    for i, one in enumerate(crossing):
        for target in one.targets:
            entering[target].append(StageTensor(i, one.source, one.gradient))
            leaving[one.source].append(StageTensor(i, target, one.gradient))
    return tuple(StageTensors(tuple(a), tuple(b)) for a, b in zip(entering, leaving, strict=True))


def row_tensors(
    strategy: Strategy, graph: Graph, crossing: Sequence[Crossing]
) -> tuple[tuple[StageTensors, ...], tuple[Piece, ...]]:
    """The tensors, or parts of them, that enter each row and those that leave it, and the pieces
    that they are.
    """
    if all(stage.sharding is None for stage in strategy.stages):
        tensors = _stage_tensors(crossing, len(strategy.stages))
        return tensors, tuple(Piece(one.tensor) for one in crossing)
    rows = rows_of(strategy)
    first = [next(i for i, row in enumerate(rows) if row.stage == s)
             for s in range(len(strategy.stages))]  # fmt: skip
    entering: list[list[StageTensor]] = [[] for _ in rows]
    leaving: list[list[StageTensor]] = [[] for _ in rows]
    numbers: dict[Piece, int] = {}
    for one in crossing:
        shape = tensors_by_name(graph)[one.tensor].shape
        for target in one.targets:
            ends = (one.source, target), (target, one.source)
            for back, (giver, taker) in enumerate(ends[: 1 + one.gradient]):
                sides = [
                    mesh_end(
                        strategy.stages[end],
                        one.tensor,
                        source=end == one.source,
                        first=first[end],
                    )
                    for end in (giver, taker)
                ]
                for part in pieces_between(shape, sides[0], sides[1]):
                    whole = part.box == tuple((0, size) for size in shape)
                    piece = Piece(one.tensor, None if whole else part.box)
                    number = numbers.setdefault(piece, len(numbers))
                    up, down = part.source, part.target
                    up, down = (down, up) if back else (up, down)
                    leaving[up].append(StageTensor(number, down, bool(back), not back))
                    entering[down].append(StageTensor(number, up, bool(back), not back))
    both = zip(entering, leaving, strict=True)
    return tuple(StageTensors(tuple(a), tuple(b)) for a, b in both), tuple(numbers)


def mesh_end(
    stage: Stage, tensor: str, *, source: bool, first: int = 0
) -> tuple[range, tuple[int, ...], Spec]:
    """Places, mesh and spec of a tensor that crosses stages, as `splitting.pieces` takes them.

    Args:
        source: whether the stage makes it.
        first: the number of its first place.
    """
    if stage.sharding is None:
        return range(first, first + 1), (1,), ("R",)
    mesh = stage.sharding.mesh
    specs = stage.sharding.outputs if source else stage.sharding.inputs
    places = range(first, first + stage.sharding.num_devices)
    return places, mesh, specs.get(tensor, ("R",) * len(mesh))


def sums_by_device(sums: Sequence[GradientSum]) -> Mapping[int, tuple[int, ...]]:
    """Per device, the all-reduces that it takes part in; of those of a row, equally many. Replicas
    that keep parts take part in sums of their own.
    """
    found: dict[int, list[int]] = {}
    for i, one in enumerate(sums):
        for device in one.devices:
            found.setdefault(device, []).append(i)
    # Equal ones are one object, so that devices of a row share what is made of them.
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    return {
        device: known.setdefault(mine, mine)
        for device, some in found.items()
        for mine in [tuple(some)]
    }


def stage_blocks(
    strategy: Strategy,
    rows: Sequence[Row],
    r: int,
    tensors: StageTensors,
    num_sums: int,
    known: dict[ListShape, ListPattern],
) -> tuple[Block, ...]:
    """The lists of a row: one block, or two where M is no multiple of R.

    Args:
        rows: of the strategy.
        r: the row.
        tensors: of the row; their names do not matter.
        num_sums: how many all-reduces its devices take part in.
        known: patterns that were made before; new ones are added.
    """
    row, blocks = rows[r], []
    stage = strategy.stages[row.stage]
    others = [one.row for one in (*tensors.entering, *tensors.leaving)]
    rounds, more = divmod(strategy.num_microbatches, stage.num_replicas)
    for count, which in ((rounds + 1, range(more)), (rounds, range(more, stage.num_replicas))):
        if not which:
            continue
        entering, leaving = (
            tuple((e.forward, e.gradient) for e in some)
            for some in (tensors.entering, tensors.leaving)
        )
        shape = ListShape(strategy.schedule, count, stage.warmup, entering, leaving, num_sums)
        if shape not in known:
            known[shape] = pattern(shape)
        kind, backward, turn, slot = known[shape]
        of_stage = kind <= ActionKind.RECEIVE
        microbatch = np.array(which, dtype=np.int64)[:, None] + turn * stage.num_replicas
        microbatch = np.where(of_stage, microbatch, 0)
        peer = np.zeros_like(microbatch)
        for other in set(others):
            far = np.array(rows[other].devices, dtype=np.int64)
            own = np.flatnonzero(np.isin(slot, [j for j, t in enumerate(others) if t == other]))
            peer[:, own] = far[microbatch[:, own] % len(far)]
        devices = tuple(row.devices[replica] for replica in which)
        stages = np.where(of_stage, row.stage, 0)
        blocks.append(Block(devices, kind, backward, stages, microbatch, peer, slot, turn))
    return tuple(blocks)


def assembled(
    blocks: Sequence[Sequence[Block]],
    tensors: Sequence[StageTensors],
    tails: Mapping[int, tuple[int, ...]],
    pieces: tuple[Piece, ...],
) -> Code:
    """The lists of all devices.

    Args:
        blocks: of each row.
        tensors: of each row.
        tails: of each device, its all-reduces; of an asynchronous schedule, those of its first
            round.
        pieces: that are sent.
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
        _pieces(
            [(d, s, block) for block, (d, s, *_) in zip(each, rows, strict=True)], tensors, tails
        ),
        np.concatenate([block.peer[row] for block, (*_, row) in zip(each, rows, strict=True)]),
        pieces,
    )


def _pieces(
    rows: Sequence[tuple[int, int, Block]],
    tensors: Sequence[StageTensors],
    tails: Mapping[int, tuple[int, ...]],
) -> Ints:
    """The column of pieces and all-reduces.

    Args:
        rows: device, row and block of each.
    """
    moved = {
        (s, tail): np.array(
            [*(e.piece for e in (*tensors[s].entering, *tensors[s].leaving)), *tail, 0]
        )
        for s, tail in {(s, tails.get(device, ())) for device, s, _ in rows}
    }
    # The all-reduces of a round have the numbers behind those of all rows in the round before.
    in_round = 1 + max((i for tail in tails.values() for i in tail), default=-1)
    return np.concatenate(
        [
            moved[s, tails.get(device, ())][block.slot]
            + np.where(block.kind == ActionKind.ALL_REDUCE, in_round * block.turn, 0)
            for device, s, block in rows
        ]
    )


class _When(IntEnum):
    """Around one computation."""

    RECEIVE, COMPUTE, SEND, STEP = range(4)


def pattern(shape: ListShape) -> ListPattern:
    """Forwards, backwards and transfers of a replica. Its all-reduces and the step come at the end,
    or, under an asynchronous schedule, behind each backward and its sends.
    """
    order = list(SCHEDULES[shape.schedule](shape.num_microbatches, shape.warmup))
    back = np.array([direction is Direction.BACKWARD for direction, _ in order], dtype=bool)
    turn = np.array([k for _, k in order], dtype=np.int64)
    places, num_in = np.arange(len(order)), len(shape.entering)
    num_moved = num_in + len(shape.leaving)
    no_slot = num_moved + shape.num_sums
    ending = [ActionKind.ALL_REDUCE] * shape.num_sums + [ActionKind.STEP]
    last_slots = num_moved + np.arange(len(ending))
    blocks: list[Ints] = []

    def add(kind: ActionKind, when: _When, at: Ints, own: Ints, position: int, slot: int) -> None:
        """Actions of one kind around the computations `own`, at the places of others."""
        blocks.append(np.stack(np.broadcast_arrays(at, when, own, position, kind, slot)))

    add(ActionKind.COMPUTE, _When.COMPUTE, places, places, 0, no_slot)
    for backward in (False, True):
        own = np.flatnonzero(back == backward)
        # Receives are posted one computation of their kind ahead; the first backward has only
        # forwards before it.
        ahead = np.concatenate([np.maximum(own[:1] - 1, 0), own[:-1]])
        enters, leaves = (shape.entering, 0), (shape.leaving, num_in)
        (received, first_in), (sent, first_out) = (leaves, enters) if backward else (enters, leaves)
        for j, moves in enumerate(received):
            if moves[backward]:
                add(ActionKind.RECEIVE, _When.RECEIVE, ahead, own, j, first_in + j)
        for j, moves in enumerate(sent):
            if moves[backward]:
                add(ActionKind.SEND, _When.SEND, own, own, j, first_out + j)
        if backward and shape.schedule.is_asynchronous:
            for j, kind in enumerate(ending):
                add(kind, _When.STEP, own, own, j, int(last_slots[j]))
            ending, last_slots = [], last_slots[:0]
    place, when, of, position, kinds, slots = np.concatenate(blocks, axis=1)
    rank = np.lexsort((position, of, when, place))
    kinds, of, slots = kinds[rank], of[rank], slots[rank]
    zeros = np.zeros(len(ending), dtype=np.int64)
    return ListPattern(
        np.concatenate([kinds, ending]).astype(np.int8),
        np.concatenate([back[of] & (kinds <= ActionKind.RECEIVE), zeros.astype(bool)]),
        np.concatenate([turn[of], zeros]),
        np.concatenate([slots, last_slots]),
    )
