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
from enum import StrEnum
from urllib.parse import quote, unquote

from planner.graph import Graph
from planner.strategy import (
    Crossing,
    GradientSum,
    ScheduleName,
    Strategy,
    crossings,
    gradient_sums,
    used_devices,
)


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


@dataclass(frozen=True, slots=True)
class Program:
    """What all devices do in one iteration.

    Attributes:
        lists: per used device, its actions in order.
        sums: the all-reduces, in their global order.
    """

    lists: Mapping[int, tuple[Action, ...]]
    sums: tuple[GradientSum, ...]


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
) -> tuple[int, ...]:
    """W of every stage. For 1F1B: 1 in the last stage and, before it,

        W_s = ceil(W_{s+1} R_{s+1} / R_s) + 1 + extra,

    at most ceil(M / R_s). For GPipe: ceil(M / R_s).

    Args:
        widths: R_s, the number of replicas of each stage.
        num_microbatches: M.
        extra: more microbatches in flight per stage, to hide transfers.

    >>> default_warmups((2, 3, 1), 12)
    (4, 2, 1)
    """
    if schedule is ScheduleName.GPIPE:
        return tuple(-(-num_microbatches // width) for width in widths)
    warmups: list[int] = []
    for s in reversed(range(len(widths))):
        deep = 1 if not warmups else -(-warmups[0] * widths[s + 1] // widths[s]) + 1 + extra
        warmups.insert(0, min(deep, -(-num_microbatches // widths[s])))
    return tuple(warmups)


def program(strategy: Strategy, graph: Graph) -> Program:
    """The action lists of one iteration.

    Args:
        strategy: sound, as `violations` says; one stage per device.
    """
    crossing = crossings(strategy, graph)
    sums = gradient_sums(strategy, graph)
    lists = {}
    for s, stage in enumerate(strategy.stages):
        for replica, device in enumerate(stage.devices):
            body = _stage_list(strategy, s, replica, crossing)
            tail = [AllReduce(i) for i, one in enumerate(sums) if device in one.devices]
            lists[device] = (*body, *tail, Step())
    return Program({device: lists[device] for device in used_devices(strategy)}, sums)


def _stage_list(
    strategy: Strategy, s: int, replica: int, crossing: Sequence[Crossing]
) -> list[Action]:
    """Forwards, backwards and transfers of one replica of stage s."""
    stage = strategy.stages[s]
    mine = range(replica, strategy.num_microbatches, stage.num_replicas)
    crossing = [one for one in crossing if s == one.source or s in one.targets]
    order = SCHEDULES[strategy.schedule](len(mine), stage.warmup)
    computes = [Compute(direction, s, mine[k]) for direction, k in order]
    posted_before: dict[int, list[Receive]] = {}
    last_of: dict[Direction, int] = {}
    for i, compute in enumerate(computes):
        # One action of the same kind ahead; the first backward has only forwards before it.
        at = last_of.get(compute.direction, max(i - 1, 0))
        last_of[compute.direction] = i
        posted_before.setdefault(at, []).extend(_receives(strategy, compute, crossing))
    actions: list[Action] = []
    for i, compute in enumerate(computes):
        actions += [*posted_before.get(i, ()), compute, *_sends(strategy, compute, crossing)]
    return actions


def _device(strategy: Strategy, s: int, microbatch: int) -> int:
    devices = strategy.stages[s].devices
    return devices[microbatch % len(devices)]


def _receives(
    strategy: Strategy, compute: Compute, crossing: Sequence[Crossing]
) -> Iterator[Receive]:
    s, m, direction = compute.stage, compute.microbatch, compute.direction
    for one in crossing:
        if direction is Direction.FORWARD and s in one.targets:
            yield Receive(direction, s, m, one.tensor, _device(strategy, one.source, m))
        if direction is Direction.BACKWARD and s == one.source and one.gradient:
            for target in one.targets:
                yield Receive(direction, s, m, one.tensor, _device(strategy, target, m))


def _sends(strategy: Strategy, compute: Compute, crossing: Sequence[Crossing]) -> Iterator[Send]:
    s, m, direction = compute.stage, compute.microbatch, compute.direction
    for one in crossing:
        if direction is Direction.FORWARD and s == one.source:
            for target in one.targets:
                yield Send(direction, s, m, one.tensor, _device(strategy, target, m))
        if direction is Direction.BACKWARD and s in one.targets and one.gradient:
            yield Send(direction, s, m, one.tensor, _device(strategy, one.source, m))


def dry_run(lists: Program) -> str | None:
    """Runs the lists without times: None if every action is reached, every transfer has both its
    ends, in the same order, and every sum all its members; else what blocks.

    The order in which devices take turns does not matter: each action waits for certain others,
    and no two ever compete.
    """
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
