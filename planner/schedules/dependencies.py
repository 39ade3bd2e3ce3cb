"""What the actions of lists have to do with each other, as the compiled rules (`event_loop.py`)
need it: which send meets which receive, and which counter each action waits for or changes.
"""

import numpy as np

from planner.schedules.actions import ActionKind, Code, Direction, waiting_for_sends
from planner.schedules.tasks import Cuts, Dependencies, Tasks
from planner.support.arrays import Floats, Ints
from planner.support.memo import remembered


def tasks(
    code: Code,
    known: Dependencies,
    members: Ints,
    duration_s: Floats,
    size_bytes: Floats,
    cuts: Cuts | None = None,
) -> Tasks:
    """What the devices do in some lists.

    Args:
        known: `dependencies` of the lists.
        members: how many devices come to each all-reduce.
        duration_s: (n,) for which each action occupies its device.
        size_bytes: (n,) of receives.
        cuts: of computations; without them the gradients of an all-reduce are there when its device
            comes to it.
    """
    if cuts is None:
        none = np.zeros(0, dtype=np.int64)
        cuts = Cuts(np.zeros(len(code.start), dtype=np.int64), none, np.zeros(0), none)
    counters = np.concatenate([np.zeros(known.num_computations, dtype=np.int64), members])
    return Tasks(code.start, code.kind, known, duration_s, size_bytes, counters, cuts)


@remembered(kept=2)
def dependencies(code: Code) -> Dependencies:
    """Finds which actions of some lists belong together."""
    owner = code.owner()
    computation, num_computations = _computations(code, owner)
    receives, sends = code.kind == ActionKind.RECEIVE, np.flatnonzero(code.kind == ActionKind.SEND)
    reducing = np.flatnonzero(code.kind == ActionKind.ALL_REDUCE)
    counter = np.where((code.kind == ActionKind.COMPUTE) | receives, computation, -1)
    counter[reducing] = num_computations + code.piece[reducing]
    counter[sends] = _held_by(code, owner, computation, num_computations)[computation[sends]]
    pair, source, target = _pairs(code, owner)
    first, send, receive = _meetings(code, pair, len(source))
    return Dependencies(counter, num_computations, pair, source, target, first, send, receive)


def _pairs(code: Code, owner: Ints) -> tuple[Ints, Ints, Ints]:
    """`pair`, `source` and `target` of `Dependencies`."""
    count, moving = (
        len(code.devices),
        np.flatnonzero((code.kind == ActionKind.SEND) | (code.kind == ActionKind.RECEIVE)),
    )
    # A peer without a list is a position behind all others.
    position = np.full(int(max(code.devices.max(), code.peer.max(initial=0))) + 1, count)
    position[code.devices] = np.arange(count)
    here, there = owner[moving], position[code.peer[moving]]
    sending = code.kind[moving] == ActionKind.SEND
    names = np.where(sending, here, there) * (count + 1) + np.where(sending, there, here)
    pair = np.zeros(len(code), dtype=np.int64)
    pair[moving], num_pairs = _numbered(names, (count + 1) ** 2)
    pairs = np.zeros(num_pairs, dtype=np.int64)
    pairs[pair[moving]] = names
    return pair, pairs // (count + 1), pairs % (count + 1)


def _meetings(code: Code, pair: Ints, num_pairs: int) -> tuple[Ints, Ints, Ints]:
    """`first`, `send` and `receive` of `Dependencies`."""
    by_pair, bounds = [], []
    for kind in (ActionKind.SEND, ActionKind.RECEIVE):
        own = np.flatnonzero(code.kind == kind)
        # Short integers are sorted in linear time.
        short = pair[own].astype(np.uint16 if num_pairs < 2**16 else np.int64)
        by_pair.append(own[np.argsort(short, kind="stable")])
        bounds.append(np.concatenate([[0], np.cumsum(np.bincount(short, minlength=num_pairs))]))
    (send, receive), (first, first_receive) = by_pair, bounds
    if not np.array_equal(first, first_receive):
        # The k-th send of a pair and its k-th receive, as far as there are both.
        both = np.minimum(np.diff(first), np.diff(first_receive))
        turn = np.arange(both.sum()) - np.repeat(np.cumsum(both) - both, both)
        send = send[np.repeat(first[:-1], both) + turn]
        receive = receive[np.repeat(first_receive[:-1], both) + turn]
        first = np.concatenate([[0], np.cumsum(both)])
    differ = np.zeros(len(send), dtype=bool)
    for column in (code.backward, code.microbatch, code.piece):
        differ |= column[send] != column[receive]
    if differ.any():
        # Those of a pair before the first that differs.
        so_far = np.concatenate([[0], np.cumsum(differ)])
        kept = so_far[1:] == np.repeat(so_far[first[:-1]], np.diff(first))
        first = np.concatenate([[0], np.cumsum(kept)])[first]
        send, receive = send[kept], receive[kept]
    return first, send, receive


def _computations(code: Code, owner: Ints) -> tuple[Ints, int]:
    """(n,) a number for each computation, which the receives that it needs and the sends of its
    results have, too; and how many there are.
    """
    own = np.flatnonzero(code.kind <= ActionKind.RECEIVE)
    stages, turns = (int(one.max(initial=0)) + 1 for one in (code.stage, code.microbatch))
    stage, num_stages = _numbered(owner[own] * stages + code.stage[own], len(code.devices) * stages)
    names = (2 * stage + code.backward[own]) * turns + code.microbatch[own]
    computation = np.full(len(code), -1)
    computation[own], count = _numbered(names, 2 * turns * num_stages)
    return computation, count


def _held_by(code: Code, owner: Ints, computation: Ints, num_computations: int) -> Ints:
    """Per computation, the one that begins only when all its results are sent: the second one after
    it of the same device, stage and direction, in the directions that wait; -1 without one.
    """
    waiting = waiting_for_sends(code)
    held_by = np.full(num_computations, -1)
    for direction in waiting:
        backward = code.backward == (direction is Direction.BACKWARD)
        computes = np.flatnonzero((code.kind == ActionKind.COMPUTE) & backward)
        stage = owner[computes] * (int(code.stage.max(initial=0)) + 1) + code.stage[computes]
        by_stage = np.argsort(stage, kind="stable")
        ordered, stage = computation[computes[by_stage]], stage[by_stage]
        alike = stage[:-2] == stage[2:]
        held_by[ordered[:-2][alike]] = ordered[2:][alike]
    return held_by


def _numbered(names: Ints, limit: int) -> tuple[Ints, int]:
    """(n,) numbers from 0 on for equal values, ascending with them, and how many there are.

    Args:
        names: (n,) from 0 to below the limit.
    """
    if limit > 16 * len(names):
        known, numbers = np.unique(names, return_inverse=True)
        return numbers, len(known)
    there = np.zeros(limit, dtype=bool)
    there[names] = True
    values = np.flatnonzero(there)
    number = np.empty(limit, dtype=np.int64)
    number[values] = np.arange(len(values))
    return number[names], len(values)
