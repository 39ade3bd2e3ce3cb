"""`Timeline`: the actions of every device and their times, simulated or measured.

The simulator fills it from costs and the launcher from its clock, so that prediction and
measurement are compared and drawn by the same code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.artefacts.sharding import Box
from planner.schedules.actions import Action, ActionKind, Code, Compute, Direction, Step, decode
from planner.support.arrays import Bools, Floats, Ints

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Event:
    """An action that took time of a device: a computation, a step, or, where it took time, the
    posting of a send or receive; or an all-reduce, which may run beside them.

    Attributes:
        device: index into the topology.
        start_s: since the start of the iteration, in s.
        end_s: since the start of the iteration, in s.
    """

    device: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one tensor, or (backward) of its gradient.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        start_s: when both ends had posted it and the one before it had ended, in s.
        end_s: when it was there, in s.
        bytes: its size.
        box: the part of the tensor that is sent; None is all of it.
    """

    source: int
    target: int
    direction: Direction
    microbatch: int
    tensor: str
    start_s: float
    end_s: float
    bytes: int
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration.

    Attributes:
        iteration_s: from the first start, at 0, to the last end.
        events: by start, then device.
        transfers: by start, then source, then target.
        memory: per device, (time in s, bytes in use from then on), ascending; empty where it is
            not known.
    """

    iteration_s: float
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...]
    memory: Mapping[int, tuple[tuple[float, int], ...]] = field(default_factory=dict)


def compute_s(timeline: Timeline, device: int) -> float:
    """Time in which a device computes: forwards, backwards and steps."""
    return _covered_s(_computing(timeline, device), timeline.iteration_s)


def communication_s(timeline: Timeline, device: int) -> float:
    """Time in which a device does not compute, and a transfer, all-reduce or posting of it runs."""
    return _busy_s(timeline, device) - compute_s(timeline, device)


def idle_s(timeline: Timeline, device: int) -> float:
    """Time in which a device neither computes nor communicates."""
    return timeline.iteration_s - _busy_s(timeline, device)


def _busy_s(timeline: Timeline, device: int) -> float:
    computing, communicating = _computing(timeline, device), _communicating(timeline, device)
    return _covered_s([*computing, *communicating], timeline.iteration_s)


def _computing(timeline: Timeline, device: int) -> list[Interval]:
    return [
        (event.start_s, event.end_s)
        for event in timeline.events
        if event.device == device and isinstance(event.action, Compute | Step)
    ]


def _communicating(timeline: Timeline, device: int) -> list[Interval]:
    own = [
        (event.start_s, event.end_s)
        for event in timeline.events
        if event.device == device and not isinstance(event.action, Compute | Step)
    ]
    return own + [
        (one.start_s, one.end_s) for one in timeline.transfers if device in (one.source, one.target)
    ]


def _covered_s(intervals: Iterable[Interval], iteration_s: float) -> float:
    """Length of the union of intervals within [0, iteration_s].

    >>> _covered_s([(1.0, 3.0), (2.0, 4.0), (6.0, 9.0)], 8.0)
    5.0
    """
    covered, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, iteration_s)
        if end > start:
            covered += end - start
            reached = end
    return covered


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """One iteration of the actions of a program, in arrays. A `Timeline` is made from them where
    someone looks at one.

    Attributes:
        code: the actions.
        start_s: (n,) of each action; of a receive, the start of the transfer. Sends have none.
        end_s: (n,) of each action; of a receive, the end of the transfer. Sends have none.
        piece_bytes: size of each piece of the code.
        iteration_s: from the first start, at 0, to the last end.
        post_s: (n,) of sends and receives, when the device came to it; of all-reduces, when the
            device had the gradients.
        posted_s: (n,) of sends and receives, when it was posted.
        cut_at: (C,) computations in which the gradients of an all-reduce got there.
        cut_of: (C,) the all-reduce of each of them.
    """

    code: Code
    start_s: Floats
    end_s: Floats
    piece_bytes: tuple[int, ...]
    iteration_s: float
    post_s: Floats
    posted_s: Floats
    cut_at: Ints
    cut_of: Ints


def timeline_of(times: Times) -> Timeline:
    """Events and transfers, one by one."""
    code, owner = times.code, times.code.owner()
    start_s, end_s = occupied(times)
    occupying = np.flatnonzero(~transfers(code) | (end_s > start_s))
    # In the order of the lists where several have no length.
    occupying = occupying[np.lexsort((code.devices[owner[occupying]], start_s[occupying]))]
    received = np.flatnonzero(code.kind == ActionKind.RECEIVE)
    target = code.devices[owner[received]]
    by_start = np.lexsort((target, code.peer[received], times.start_s[received]))
    received, target = received[by_start], target[by_start]

    def span(start_s: Floats, end_s: Floats, some: Ints) -> Iterable[Interval]:
        return zip(start_s[some].tolist(), end_s[some].tolist(), strict=True)

    events = tuple(
        Event(device, action, start_s, end_s)
        for device, action, (start_s, end_s) in zip(
            code.devices[owner[occupying]].tolist(), decode(code, occupying),
            span(start_s, end_s, occupying),
            strict=True,
        )
    )  # fmt: skip
    moved = tuple(
        Transfer(
            source, device, Direction.BACKWARD if backward else Direction.FORWARD, microbatch,
            code.pieces[piece].tensor, start_s, end_s, times.piece_bytes[piece],
            code.pieces[piece].box,
        )
        for source, device, backward, microbatch, piece, (start_s, end_s) in zip(
            code.peer[received].tolist(), target.tolist(), code.backward[received].tolist(),
            code.microbatch[received].tolist(), code.piece[received].tolist(),
            span(times.start_s, times.end_s, received),
            strict=True,
        )
    )  # fmt: skip
    return Timeline(times.iteration_s, events, moved)


def transfers(code: Code) -> Bools:
    """(n,) whether each action is a send or receive."""
    moving: Bools = (code.kind == ActionKind.SEND) | (code.kind == ActionKind.RECEIVE)
    return moving


def occupied(times: Times) -> tuple[Floats, Floats]:
    """(n,) each: from when until when each action took time of its device."""
    moving = transfers(times.code)
    return (
        np.where(moving, times.post_s, times.start_s),
        np.where(moving, times.posted_s, times.end_s),
    )


def shares_s(times: Times) -> tuple[Floats, Floats, Floats]:
    """(D,) each: `compute_s`, `communication_s` and `idle_s` of all devices at once."""
    code, owner = times.code, times.code.owner()
    received = np.flatnonzero(code.kind == ActionKind.RECEIVE)
    position = np.zeros(int(code.devices.max()) + 1, dtype=np.int64)
    position[code.devices] = np.arange(len(code.devices))
    # What keeps a device busy: its own actions, and transfers to and from it.
    start_s, end_s = occupied(times)
    own = np.flatnonzero(~transfers(code) | (end_s > start_s))
    some = np.concatenate([own, received, received])
    devices = np.concatenate([owner[own], owner[received], position[code.peer[received]]])
    start_s = np.concatenate([start_s[own], np.tile(times.start_s[received], 2)])
    end_s = np.concatenate([end_s[own], np.tile(times.end_s[received], 2)])
    # Short integers are sorted in linear time.
    short = devices.astype(np.uint16 if len(code.devices) < 2**16 else np.int64)
    by_device = np.argsort(short, kind="stable")
    some, start_s, end_s = some[by_device], start_s[by_device], end_s[by_device]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(devices, minlength=len(code.devices)))])
    computes = (code.kind == ActionKind.COMPUTE) | (code.kind == ActionKind.STEP)
    compute, busy = np.zeros(len(code.devices)), np.zeros(len(code.devices))
    for d in range(len(code.devices)):
        mine = slice(bounds[d], bounds[d + 1])
        own_start_s, own_end_s, working = start_s[mine], end_s[mine], computes[some[mine]]
        busy[d] = _length_s(own_start_s, own_end_s, times.iteration_s)
        compute[d] = _length_s(own_start_s[working], own_end_s[working], times.iteration_s)
    return compute, busy - compute, times.iteration_s - busy


def _length_s(start_s: Floats, end_s: Floats, iteration_s: float) -> float:
    """`_covered_s` in arrays, addition by addition."""
    by_start = np.lexsort((end_s, start_s))
    start_s, end_s = start_s[by_start], np.minimum(end_s[by_start], iteration_s)
    reached = np.maximum.accumulate(np.concatenate([[0.0], end_s]))
    gained = np.maximum(end_s - np.maximum(start_s, reached[:-1]), 0.0)
    return float(np.cumsum(gained)[-1]) if len(gained) else 0.0
