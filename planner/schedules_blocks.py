"""Action lists where no device runs several stages, as arrays, stage by stage.

Replicas of a stage that have equally many microbatches have the same list but for the numbers of
the microbatches and the peers. So a list is made once for all of them (`Block`), and the lists of
all devices are blocks put together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.schedules import SCHEDULES, Code, Direction, Ints, Kind
from planner.strategy import Crossing, GradientSum, Strategy


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


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The lists of r replicas of a stage, n actions each; columns as in `Code`.

    Attributes:
        devices: of the replicas.
        kind, backward, stage: (n,).
        microbatch, peer: (r, n).
        slot: (n,) what the action moves: a position among the tensors that enter the stage, those
            that leave it, its sums, and one more for actions that move nothing.
    """

    devices: tuple[int, ...]
    kind: npt.NDArray[np.int8]
    backward: npt.NDArray[np.bool_]
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
    strategy: Strategy, s: int, ends: Ends, num_sums: int
) -> tuple[Block, ...]:  # fmt: skip
    """The lists of a stage: one block, or two where M is no multiple of R.

    Args:
        ends: of the stage; which tensors they are does not matter.
        num_sums: how many sums its devices take part in.
    """
    stage, found = strategy.stages[s], []
    others = [end.stage for end in (*ends.entering, *ends.leaving)]
    rounds, more = divmod(strategy.num_microbatches, stage.num_replicas)
    for count, which in ((rounds + 1, range(more)), (rounds, range(more, stage.num_replicas))):
        if not which:
            continue
        kind, backward, turn, slot = _pattern(strategy, s, count, ends, num_sums)
        of_stage = kind <= Kind.RECEIVE
        microbatch = np.array(which)[:, None] + turn * stage.num_replicas
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
    moved = [
        np.array([*(e.tensor for e in (*both.entering, *both.leaving)), *tail, 0])
        for both, tail in zip(ends, tails, strict=True)
    ]
    return Code(
        np.array([device for device, *_ in rows], dtype=np.int64),
        np.cumsum([0, *(len(block.kind) for block in each)]),
        np.concatenate([block.kind for block in each]),
        np.concatenate([block.backward for block in each]),
        np.concatenate([block.stage for block in each]),
        np.concatenate(
            [block.microbatch[row] for block, (*_, row) in zip(each, rows, strict=True)]
        ),
        np.concatenate(
            [moved[s][block.slot] for block, (_, s, *_) in zip(each, rows, strict=True)]
        ),
        np.concatenate([block.peer[row] for block, (*_, row) in zip(each, rows, strict=True)]),
        names,
    )


def _pattern(
    strategy: Strategy, s: int, count: int, ends: Ends, num_sums: int
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_], Ints, Ints]:
    """Forwards, backwards and transfers of a replica of stage s, then its sums and the step.

    Args:
        count: its microbatches.

    Returns:
        (n,) each: kind, backward and slot as in `Block`, and which of the replica's microbatches,
        from 0 on, before the slot.
    """
    order = list(SCHEDULES[strategy.schedule](count, strategy.stages[s].warmup))
    back = np.array([direction is Direction.BACKWARD for direction, _ in order])
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
    before = {True: 0, False: len(ends.entering)}
    nothing = len(ends.entering) + len(ends.leaving) + num_sums
    parts = [(Kind.COMPUTE, places, nothing)]
    for kind, at, phase in ((Kind.RECEIVE, posted, 0), (Kind.SEND, places, 2)):
        for backward in (False, True):
            own = np.flatnonzero(back == backward)
            entering = (kind is Kind.RECEIVE) != backward
            for j, end in enumerate(ends.entering if entering else ends.leaving):
                if end.gradient or not backward:
                    place = at[own], np.full_like(own, phase), own, np.full_like(own, j)
                    keys.append(np.stack(place))
                    parts.append((kind, own, before[entering] + j))
    sizes = [len(own) for _, own, _ in parts]
    of = np.concatenate([own for _, own, _ in parts])
    place_of, phase_of, computation, j_of = np.concatenate(keys, axis=1)
    by_place = np.lexsort((j_of, computation, phase_of, place_of))
    zeros = np.zeros(num_sums + 1, dtype=np.int64)

    def column(values: Sequence[int], end: Sequence[int]) -> Ints:
        return np.concatenate([np.repeat(values, sizes)[by_place], end])

    return (
        column([kind for kind, *_ in parts], [*[Kind.SUM] * num_sums, Kind.STEP]).astype(np.int8),
        np.concatenate([back[of][by_place], zeros.astype(bool)]),
        np.concatenate([turn[of][by_place], zeros]),
        column([slot for *_, slot in parts], range(nothing - num_sums, nothing + 1)),
    )
