"""Whether action lists run to their end: a dry run without times, and which actions of the lists
belong together.
"""

from collections import Counter, deque
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.actions import (
    AllReduce,
    Code,
    Compute,
    Direction,
    Ints,
    Kind,
    Program,
    Receive,
    Send,
    text,
)


def _is_transfer(kind: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (kind == Kind.SEND) | (kind == Kind.RECEIVE)
    return found


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which actions of some lists belong together.

    Attributes:
        key: (n,) a number for each computation of a device, the same for the receives that it
            waits for; of a sum, the sum.
        num_keys: how many there are.
        pair: (n,) of sends and receives, the ordered pair of devices.
        source: (P,) of a pair, the position of the device that sends.
        target: (P,) the one that receives.
        receives: the receives, by pair, in the order of their lists.
        first: (P + 1,) where the receives of a pair begin.
        sound: whether every send has its receive, in the same order.
    """

    key: Ints
    num_keys: int
    pair: Ints
    source: Ints
    target: Ints
    receives: Ints
    first: Ints
    sound: bool


@lru_cache(maxsize=2)
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
    return Wiring(
        key, num_keys, pair, pairs // (count + 1), pairs % (count + 1), receives, first, sound
    )


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
    from planner import dry_run_kernels as kernels

    code = lists.code
    wiring = wire(code)
    if wiring.sound and kernels.ends(
        code.start, code.kind, wiring.key, wiring.num_keys, wiring.pair, wiring.target,
        wiring.receives, wiring.first, lists.members,
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
                moved = True
    return _leftovers(state)


class _DryRun:
    """How far every device has come, and what has been posted and not yet transferred."""

    def __init__(self, lists: Program) -> None:
        self.lists = lists
        self.position = dict.fromkeys(lists.lists, 0)
        self.sent: dict[tuple[int, int], deque[Send]] = {}
        self.posted: dict[tuple[int, int], deque[Receive]] = {}
        # Per device and computation, the receives that it still waits for.
        self.missing: dict[int, Counter[Compute]] = {d: Counter() for d in lists.lists}
        self.come_to: dict[int, set[int]] = {i: set() for i in range(len(lists.sums))}

    def advance(self, device: int) -> bool:
        """Runs a device's list until it must wait; whether it moved."""
        actions, start = self.lists.lists[device], self.position[device]
        while self.position[device] < len(actions):
            match actions[self.position[device]]:
                case Send() as send:
                    self.sent.setdefault((device, send.device), deque()).append(send)
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
