"""Whether action lists run to their end: a dry run without times, and which actions of the lists
belong together.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from planner.schedules.actions import (
    Action,
    AllReduce,
    Code,
    Compute,
    Direction,
    Kind,
    Program,
    Receive,
    Send,
    text,
    waiting_for_sends,
)
from planner.support.arrays import Bools, Ints, Kinds
from planner.support.derived import derived


def _is_transfer(kind: Kinds) -> Bools:
    found: Bools = (kind == Kind.SEND) | (kind == Kind.RECEIVE)
    return found


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which actions of some lists belong together.

    Attributes:
        key: (n,) a number for each computation of a device, the same for the receives that it
            waits for; of a sum, the sum.
        num_keys: how many there are.
        holds: (n,) of a send, and of the receive that it meets, the key of the computation that
            begins only when the transfer is over, -1 where there is none.
        pair: (n,) of sends and receives, the ordered pair of devices.
        source: (P,) of a pair, the position of the device that sends.
        target: (P,) the one that receives.
        receives: the receives, by pair, in the order of their lists.
        first: (P + 1,) where the receives of a pair begin.
        sound: whether every send has its receive, in the same order.
    """

    key: Ints
    num_keys: int
    holds: Ints
    pair: Ints
    source: Ints
    target: Ints
    receives: Ints
    first: Ints
    sound: bool


@derived(kept=2)
def wire(code: Code) -> Wiring:
    """Finds what belongs together in some lists."""
    owner, count = code.owner(), len(code.devices)
    computing = (code.kind == Kind.COMPUTE) | (code.kind == Kind.RECEIVE)
    key = np.where(code.kind == Kind.SUM, code.tensor, 0)
    stages, turns = (int(one.max(initial=0)) + 1 for one in (code.stage, code.microbatch))
    mine, _ = _numbered(owner[computing] * stages + code.stage[computing], count * stages)
    names = (2 * mine + code.backward[computing]) * turns + code.microbatch[computing]
    key[computing], num_keys = _numbered(names, 2 * turns * (int(mine.max(initial=0)) + 1))
    moving = np.flatnonzero(_is_transfer(code.kind))
    position = np.full(int(max(code.devices.max(), code.peer.max(initial=0))) + 1, count)
    position[code.devices] = np.arange(count)
    here, there = owner[moving], position[code.peer[moving]]
    sending = code.kind[moving] == Kind.SEND
    ends = np.where(sending, here, there) * (count + 1) + np.where(sending, there, here)
    pair = np.zeros(len(code), dtype=np.int64)
    pair[moving], num_pairs = _numbered(ends, (count + 1) ** 2)
    pairs = np.zeros(num_pairs, dtype=np.int64)
    pairs[pair[moving]] = ends
    lists = []
    for end in (Kind.SEND, Kind.RECEIVE):
        own = np.flatnonzero(code.kind == end)
        # Short integers are sorted in linear time.
        short = pair[own].astype(np.uint16 if num_pairs < 2**16 else np.int64)
        lists.append(own[np.argsort(short, kind="stable")])
    sends, receives = lists
    sound = len(sends) == len(receives) and all(
        np.array_equal(one[sends], one[receives])
        for one in (pair, code.backward, code.microbatch, code.tensor)
    )
    first = np.concatenate([[0], np.cumsum(np.bincount(pair[receives], minlength=len(pairs)))])
    holds = _holds(code, owner, key, num_keys)
    if sound:
        holds[receives] = holds[sends]
    return Wiring(
        key, num_keys, holds, pair, pairs // (count + 1), pairs % (count + 1), receives, first,
        sound,
    )  # fmt: skip


def _holds(code: Code, owner: Ints, key: Ints, num_keys: int) -> Ints:
    """(n,) the `holds` of sends, -1 elsewhere: the second computation after the one that made what
    is sent, of those of the same device, stage and direction.
    """
    waiting = waiting_for_sends(code)
    waits = np.where(code.backward, Direction.BACKWARD in waiting, Direction.FORWARD in waiting)
    computes = np.flatnonzero(code.kind == Kind.COMPUTE)
    sends = np.flatnonzero((code.kind == Kind.SEND) & waits)
    found = np.full(len(code), -1, dtype=np.int64)
    stages = int(code.stage.max(initial=0)) + 1
    kind = 2 * (owner * stages + code.stage) + code.backward
    ordered = computes[np.argsort(kind[computes], kind="stable")]
    second = np.full(num_keys, -1, dtype=np.int64)
    alike = kind[ordered[:-2]] == kind[ordered[2:]]
    second[key[ordered[:-2]][alike]] = key[ordered[2:]][alike]
    # A send comes right after what made it, but for other sends and receives.
    latest = np.maximum.accumulate(np.where(code.kind == Kind.COMPUTE, np.arange(len(code)), -1))
    makers = latest[sends]
    own = (makers >= 0) & (kind[makers] == kind[sends])
    own &= code.microbatch[makers] == code.microbatch[sends]
    found[sends[own]] = second[key[makers[own]]]
    return found


def _numbered(names: Ints, limit: int) -> tuple[Ints, int]:
    """(n,) numbers from 0 on for equal values, ascending with them, and how many there are.

    Args:
        names: (n,) from 0 to below the limit.
    """
    if limit > 16 * len(names):
        known, found = np.unique(names, return_inverse=True)
        return found, len(known)
    there = np.zeros(limit, dtype=bool)
    there[names] = True
    values = np.flatnonzero(there)
    number = np.empty(limit, dtype=np.int64)
    number[values] = np.arange(len(values))
    return number[names], len(values)


def dry_run(lists: Program) -> str | None:
    """Runs the lists without times: None if every action is reached, every transfer has both its
    ends, in the same order, and every sum all its members; else what blocks.

    The order in which devices take turns does not matter: each action waits for certain others,
    and no two ever compete.
    """
    from planner.schedules import dry_run_kernels as kernels

    code = lists.code
    wiring = wire(code)
    if wiring.sound and kernels.ends(
        code.start, code.kind, wiring.key, wiring.num_keys, wiring.holds, wiring.pair,
        wiring.source, wiring.target, wiring.receives, wiring.first, lists.members,
    ):  # fmt: skip
        return None
    return _what_blocks(lists)


def _what_blocks(lists: Program) -> str | None:
    """The same, action by action and in words."""
    state = _DryRun(lists)
    moved = True
    while moved:
        moved = False
        for device in lists.lists:
            moved |= state.advance(device)
        for pair in list(state.sent):
            sends, receives = state.sent[pair], state.posted.get(pair, deque())
            while sends and receives:
                send, receive = sends.popleft(), receives.popleft()
                if _message(send) != _message(receive):
                    return (
                        f"device {pair[0]} sends {text(send)},"
                        f" device {pair[1]} expects {text(receive)}"
                    )
                state.missing[pair[1]][_awaiting(receive)] -= 1
                if held := state.held[pair[0]].get(_maker(send)):
                    state.missing[pair[0]][held] -= 1
                moved = True
    return _leftovers(state)


class _DryRun:
    """How far every device has come, and what has been posted and not yet transferred."""

    def __init__(self, lists: Program) -> None:
        self.lists = lists
        self.position = dict.fromkeys(lists.lists, 0)
        self.sent: dict[tuple[int, int], deque[Send]] = {}
        self.posted: dict[tuple[int, int], deque[Receive]] = {}
        # Per device and computation, the receives and sends that it still waits for.
        self.missing: dict[int, Counter[Compute]] = {d: Counter() for d in lists.lists}
        waiting = waiting_for_sends(lists.code)
        self.held = {d: _second_next(actions, waiting) for d, actions in lists.lists.items()}
        self.come_to: dict[int, set[int]] = {i: set() for i in range(len(lists.sums))}

    def advance(self, device: int) -> bool:
        """Runs a device's list until it must wait; whether it moved."""
        actions, start = self.lists.lists[device], self.position[device]
        while self.position[device] < len(actions):
            match actions[self.position[device]]:
                case Send() as send:
                    self.sent.setdefault((device, send.device), deque()).append(send)
                    if held := self.held[device].get(_maker(send)):
                        self.missing[device][held] += 1
                case Receive() as receive:
                    pair = receive.device, device
                    self.posted.setdefault(pair, deque()).append(receive)
                    self.missing[device][_awaiting(receive)] += 1
                case Compute() as compute if self.missing[device][compute]:
                    break
                case AllReduce(index):
                    self.come_to[index].add(device)
                    if not self.come_to[index].issuperset(self.lists.sums[index].devices):
                        break
            self.position[device] += 1
        return self.position[device] > start


def _message(transfer: Send | Receive) -> tuple[Direction, int, str]:
    return transfer.direction, transfer.microbatch, transfer.tensor


def _awaiting(receive: Receive) -> Compute:
    """The computation that waits for a receive."""
    return Compute(receive.direction, receive.stage, receive.microbatch)


def _maker(send: Send) -> Compute:
    """The computation that made what is sent."""
    return Compute(send.direction, send.stage, send.microbatch)


def _second_next(
    actions: Sequence[Action], waiting: Collection[Direction]
) -> dict[Compute, Compute]:
    """Per computation of some directions, the second one after it of its stage and direction."""
    alike: dict[object, list[Compute]] = {}
    for action in actions:
        if isinstance(action, Compute) and action.direction in waiting:
            alike.setdefault((action.stage, action.direction), []).append(action)
    return {
        one: later
        for some in alike.values()
        for one, later in zip(some[:-2], some[2:], strict=True)
    }


def _leftovers(state: _DryRun) -> str | None:
    stuck = [
        f"device {device} waits at {text(actions[state.position[device]])}"
        for device, actions in state.lists.lists.items()
        if state.position[device] < len(actions)
    ]
    lost = [f"device {a} sends {text(s)}, unheard" for (a, _), m in state.sent.items() for s in m]
    lost += [
        f"device {b} awaits {text(r)} in vain" for (_, b), m in state.posted.items() for r in m
    ]
    return "; ".join(stuck + lost) or None
