"""Schedules: a strategy as one list of actions per device, which the simulator times and the
launcher runs.

What a device does, in the order of its list:

    F, B        forward and backward of (stage, microbatch); each waits for the receives that were
                posted for it.
    Send        starts to send a tensor (or its gradient) of one microbatch, right after the
                action that made it. It does not hold up the list.
    Receive     posts the buffer for a tensor, one action of the same kind ahead, so that the
                transfer hides behind the computation. It does not hold up the list either.
    AllReduce   sums gradients over devices; all devices run their sums in one global order.
    Step        the optimizer.

A transfer starts when both ends have posted it and ends for both at once (rendezvous); the
transfers of an ordered pair of devices run first in, first out. `dry_run` proves that lists with
these rules run to their end.

The text form: "2F0" and "2B0" are forward and backward of microbatch 0 in stage 2; "2>5:0:x"
sends tensor x of microbatch 0 from stage 2 to device 5 and "3<1:0:x" receives it for stage 3 from
device 1; "2>5:0:d/x" is x's gradient; "A0" is the first sum of gradients and "O" the step.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from urllib.parse import quote, unquote

import numpy as np
import numpy.typing as npt

from planner.graph import Graph
from planner.prediction import StagePrediction
from planner.strategy import (
    GradientSum,
    ScheduleName,
    Strategy,
    crossings,
    gradient_sums,
    shares_devices,
)

Ints = npt.NDArray[np.int64]


class Direction(StrEnum):
    """Forward or backward."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward or backward of one microbatch in one stage."""

    direction: Direction
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Starts to send a tensor, or (backward) its gradient, to a device.

    Attributes:
        stage: the stage of this device whose action made it.
    """

    direction: Direction
    stage: int
    microbatch: int
    tensor: str
    device: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Posts the buffer for a tensor, or (backward) its gradient, from a device.

    Attributes:
        stage: the stage of this device whose action waits for it.
    """

    direction: Direction
    stage: int
    microbatch: int
    tensor: str
    device: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums gradients over devices: an index into `Program.sums`."""

    sum: int


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer's step on this device."""


Action = Compute | Send | Receive | AllReduce | Step


class Kind(IntEnum):
    """What an action is, in arrays."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    SUM = 3
    STEP = 4


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """Action lists as arrays, one after the other: there can be millions of actions.

    Attributes:
        devices: (D,) the device of each list, ascending.
        start: (D + 1,) where each list begins, and the last one ends.
        kind: (n,) a `Kind`.
        backward: (n,) whether the direction is backward.
        stage: (n,) of computations, sends and receives.
        microbatch: (n,) likewise.
        tensor: (n,) of sends and receives, an index into `tensors`; of a sum, the sum.
        peer: (n,) of sends and receives, the device at the other end.
        tensors: names.
    """

    devices: Ints
    start: Ints
    kind: npt.NDArray[np.int8]
    backward: npt.NDArray[np.bool_]
    stage: Ints
    microbatch: Ints
    tensor: Ints
    peer: Ints
    tensors: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kind)

    def owner(self) -> Ints:
        """(n,) the position of each action's device in `devices`."""
        return np.repeat(np.arange(len(self.devices)), np.diff(self.start))


@dataclass(frozen=True, slots=True, eq=False)
class Lists(Mapping[int, tuple[Action, ...]]):
    """Arrays read as lists of actions, by device."""

    code: Code

    def __getitem__(self, device: int) -> tuple[Action, ...]:
        (found,) = np.flatnonzero(self.code.devices == device)[:1].tolist() or [None]
        if found is None:
            raise KeyError(device)
        return decode(self.code, range(self.code.start[found], self.code.start[found + 1]))

    def __iter__(self) -> Iterator[int]:
        return iter(self.code.devices.tolist())

    def __len__(self) -> int:
        return len(self.code.devices)


@dataclass(frozen=True, slots=True)
class Program:
    """What all devices do in one iteration.

    Attributes:
        lists: per used device, its actions in order; each sum once in the list of each member.
        sums: the all-reduces, in their global order.
    """

    lists: Mapping[int, tuple[Action, ...]]
    sums: tuple[GradientSum, ...]

    @property
    def code(self) -> Code:
        """The lists as arrays."""
        return self.lists.code if isinstance(self.lists, Lists) else encode(self.lists)

    @property
    def members(self) -> Ints:
        """How many devices come to each sum."""
        return np.array([len(one.devices) for one in self.sums], dtype=np.int64)


def encode(lists: Mapping[int, Sequence[Action]]) -> Code:
    """Lists of actions as arrays, by device."""
    numbers: dict[str, int] = {}
    rows = []
    for device in sorted(lists):
        for action in lists[device]:
            match action:
                case Compute(direction, stage, m):
                    rows.append((Kind.COMPUTE, direction is Direction.BACKWARD, stage, m, 0, 0))
                case Send(direction, stage, m, name, peer) | Receive(
                    direction, stage, m, name, peer
                ):
                    kind = Kind.SEND if isinstance(action, Send) else Kind.RECEIVE
                    tensor = numbers.setdefault(name, len(numbers))
                    back = direction is Direction.BACKWARD
                    rows.append((kind, back, stage, m, tensor, peer))
                case AllReduce(index):
                    rows.append((Kind.SUM, False, 0, 0, index, 0))
                case Step():
                    rows.append((Kind.STEP, False, 0, 0, 0, 0))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy()
    return Code(
        np.array(sorted(lists), dtype=np.int64),
        np.cumsum([0, *(len(lists[device]) for device in sorted(lists))]),
        columns[0].astype(np.int8), columns[1].astype(bool), columns[2], columns[3], columns[4],
        columns[5], tuple(numbers),
    )  # fmt: skip


def decode(code: Code, some: Sequence[int] | Ints) -> tuple[Action, ...]:
    """Actions from their arrays.

    Args:
        some: indices of the actions.
    """
    where = np.asarray(some, dtype=np.int64)
    columns = (code.kind, code.backward, code.stage, code.microbatch, code.tensor, code.peer)
    found: list[Action] = []
    for kind, backward, stage, m, tensor, peer in zip(
        *(column[where].tolist() for column in columns), strict=True
    ):
        direction = Direction.BACKWARD if backward else Direction.FORWARD
        match kind:
            case Kind.COMPUTE:
                found.append(Compute(direction, stage, m))
            case Kind.SEND:
                found.append(Send(direction, stage, m, code.tensors[tensor], peer))
            case Kind.RECEIVE:
                found.append(Receive(direction, stage, m, code.tensors[tensor], peer))
            case Kind.SUM:
                found.append(AllReduce(tensor))
            case Kind.STEP:
                found.append(Step())
    return tuple(found)


def gpipe(num_microbatches: int, warmup: int) -> Iterator[tuple[Direction, int]]:
    """All forwards, then all backwards in the same order (Huang et al., GPipe, 2019).

    Args:
        num_microbatches: how many this device runs.
        warmup: not used; all microbatches are in flight.
    """
    for direction in Direction:
        for k in range(num_microbatches):
            yield direction, k


def one_f_one_b(num_microbatches: int, warmup: int) -> Iterator[tuple[Direction, int]]:
    """`warmup` forwards, then one backward and one forward in turn, then the backwards that are
    left (PipeDream-flush: Narayanan et al., 2021).

    Args:
        num_microbatches: how many this device runs.
        warmup: W, the forwards before the first backward.
    """
    ahead = min(warmup, num_microbatches)
    for k in range(ahead):
        yield Direction.FORWARD, k
    for k in range(num_microbatches):
        yield Direction.BACKWARD, k
        if k + ahead < num_microbatches:
            yield Direction.FORWARD, k + ahead


SCHEDULES: Mapping[ScheduleName, Callable[[int, int], Iterator[tuple[Direction, int]]]] = {
    ScheduleName.GPIPE: gpipe,
    ScheduleName.ONE_F_ONE_B: one_f_one_b,
}


def default_warmups(
    widths: Sequence[int],
    num_microbatches: int,
    extra: int = 0,
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B,
    devices: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """W of every stage. For 1F1B: 1 in the last stage and, before it,

        W_s = ceil(W_{s+1} R_{s+1} / R_s) + 1 + extra,

    at most ceil(M / R_s), without the 1 + extra where a device of the stage runs a later one too:
    it has that one's microbatches to go on with. For GPipe: ceil(M / R_s).

    Args:
        widths: R_s, the number of replicas of each stage.
        num_microbatches: M.
        extra: more microbatches in flight per stage, to hide transfers.
        devices: of each stage; without them no two stages share one.

    >>> default_warmups((2, 3, 1), 12)
    (4, 2, 1)
    >>> default_warmups((1, 1, 1), 12, devices=((0,), (1,), (0,)))
    (2, 2, 1)
    """
    if schedule is ScheduleName.GPIPE:
        return tuple(-(-num_microbatches // width) for width in widths)
    warmups: list[int] = []
    later: set[int] = set()
    for s in reversed(range(len(widths))):
        own = set(devices[s]) if devices else set()
        more = 0 if own & later else 1 + extra
        deep = 1 if not warmups else -(-warmups[0] * widths[s + 1] // widths[s]) + more
        warmups.insert(0, min(deep, -(-num_microbatches // widths[s])))
        later |= own
    return tuple(warmups)


def program(strategy: Strategy, graph: Graph, times: Sequence[StagePrediction] = ()) -> Program:
    """The action lists of one iteration.

    Args:
        strategy: sound, as `violations` says.
        times: of each stage, which decide the order of the stages of a device that runs several
            (`schedules_shared.py`); without them a stage counts as long as it has operators.
    """
    crossing = crossings(strategy, graph)
    sums = gradient_sums(strategy, graph)
    if shares_devices(strategy):
        from planner import schedules_shared

        return Program(Lists(encode(schedules_shared.lists(strategy, crossing, sums, times))), sums)
    from planner.schedules_blocks import assembled, stage_blocks, stage_ends, stage_sums

    ends = stage_ends(crossing, len(strategy.stages))
    tails = stage_sums(strategy, sums)
    blocks = [
        stage_blocks(strategy, s, ends[s], len(tails[s])) for s in range(len(strategy.stages))
    ]
    code = assembled(blocks, ends, tails, tuple(one.tensor for one in crossing))
    return Program(Lists(code), sums)


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
    from planner import schedules_kernels as kernels

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


def waits(compute: Compute, receive: Receive) -> bool:
    """Whether a computation needs what this receive brings."""
    return (compute.direction, compute.stage, compute.microbatch) == (
        receive.direction, receive.stage, receive.microbatch
    )  # fmt: skip


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


def text(action: Action) -> str:
    """One action in text form; `parse` reads it back."""
    match action:
        case Compute(direction, stage, microbatch):
            return f"{stage}{direction}{microbatch}"
        case Send(direction, stage, microbatch, tensor, device):
            mark = "" if direction is Direction.FORWARD else "d/"
            return f"{stage}>{device}:{microbatch}:{mark}{quote(tensor, safe='')}"
        case Receive(direction, stage, microbatch, tensor, device):
            mark = "" if direction is Direction.FORWARD else "d/"
            return f"{stage}<{device}:{microbatch}:{mark}{quote(tensor, safe='')}"
        case AllReduce(index):
            return f"A{index}"
        case Step():
            return "O"


_COMPUTE = re.compile(r"(\d+)([FB])(\d+)")
_TRANSFER = re.compile(r"(\d+)([<>])(\d+):(\d+):(d/)?(\S+)")


def parse(word: str) -> Action:
    """The action that `text` wrote.

    Raises:
        ValueError: if the word is none.

    >>> parse("2B0")
    Compute(direction=<Direction.BACKWARD: 'B'>, stage=2, microbatch=0)
    """
    if word == "O":
        return Step()
    if re.fullmatch(r"A\d+", word):
        return AllReduce(int(word[1:]))
    if match := _COMPUTE.fullmatch(word):
        return Compute(Direction(match[2]), int(match[1]), int(match[3]))
    if match := _TRANSFER.fullmatch(word):
        end = Send if match[2] == ">" else Receive
        direction = Direction.BACKWARD if match[5] else Direction.FORWARD
        return end(direction, int(match[1]), int(match[4]), unquote(match[6]), int(match[3]))
    raise ValueError(f"{word!r} is no action")
