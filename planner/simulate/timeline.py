"""`Timeline`: what every device did when, simulated or measured.

The simulator fills it from costs and the launcher from its clock, so that prediction and
measurement are compared and drawn by the same code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planner.schedules import Action, AllReduce, Direction

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Event:
    """An action that occupied a device: a computation, a sum of gradients or a step.

    Attributes:
        device: index into the topology.
        start_s: since the start of the iteration, in s.
        end_s: likewise.
    """

    device: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Flow:
    """The transfer of one tensor, or (backward) of its gradient.

    Attributes:
        source: the device that sends.
        target: the device that receives.
        start_s: when both ends had posted it and the one before it had ended, in s.
        end_s: when it was there, in s.
        bytes: its size.
    """

    source: int
    target: int
    direction: Direction
    microbatch: int
    tensor: str
    start_s: float
    end_s: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One iteration.

    Attributes:
        iteration_s: from the first start, at 0, to the last end.
        events: by start, then device.
        flows: by start, then source, then target.
        memory: per device, (time in s, bytes in use from then on), ascending; empty where it is
            not known.
    """

    iteration_s: float
    events: tuple[Event, ...]
    flows: tuple[Flow, ...]
    memory: Mapping[int, tuple[tuple[float, int], ...]] = field(default_factory=dict)


def compute_s(timeline: Timeline, device: int) -> float:
    """Time in which a device computes: forwards, backwards and steps."""
    return _covered_s(_computing(timeline, device), timeline.iteration_s)


def communication_s(timeline: Timeline, device: int) -> float:
    """Time in which a device does not compute and a transfer or sum of its own runs."""
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
        if event.device == device and not isinstance(event.action, AllReduce)
    ]


def _communicating(timeline: Timeline, device: int) -> list[Interval]:
    sums = [
        (event.start_s, event.end_s)
        for event in timeline.events
        if event.device == device and isinstance(event.action, AllReduce)
    ]
    flows = [(f.start_s, f.end_s) for f in timeline.flows if device in (f.source, f.target)]
    return sums + flows


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
