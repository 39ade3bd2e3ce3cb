"""Why devices idle: the time in which a device neither computes nor communicates, by cause.

Between two actions of a device is a gap, whose cause is the last thing that the device waited for:

    warm-up       before its first computation, which waits for its first inputs
    output        of an earlier stage, for a forward
    gradient      of a later stage, for a backward
    sending       a result of the device that another one has not received yet
    all-reduce    the other members of an all-reduce
    cool-down     after its last action, while others still work
    own           nothing: the host's own time, which only a measured timeline has

The part of a gap in which a transfer or posting of the device runs is communication. The rest is
idle. So computation, communication and all causes make up the iteration. Simulated and measured
timelines are read alike.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.artefacts.graph import Graph
from planner.artefacts.strategy import Strategy, crossings, stages_by_device
from planner.schedules.actions import AllReduce, Compute, Direction
from planner.simulator.timeline import Event, Interval, Timeline, Transfer


class Cause(StrEnum):
    """Why a device idles."""

    WARM_UP = "warm-up"
    OUTPUT = "output"
    GRADIENT = "gradient"
    SENDING = "sending"
    ALL_REDUCE = "all-reduce"
    COOL_DOWN = "cool-down"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class Wait:
    """What a device waits for.

    Attributes:
        cause: why.
        stage: the one whose output or gradient came last, None for other causes.
        device: the one that it came from, or that a result is sent to; None for other causes.
    """

    cause: Cause
    stage: int | None = None
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """A time in which a device idles, in s."""

    device: int
    wait: Wait
    start_s: float
    end_s: float


def idle_times(timeline: Timeline, strategy: Strategy, graph: Graph) -> tuple[Idle, ...]:
    """All of them, by device, then start.

    Args:
        strategy: that the timeline is of.
        graph: of its operators.
    """
    events: dict[int, list[Event]] = defaultdict(list)
    for one in timeline.events:
        events[one.device].append(one)
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in timeline.transfers:
        transfers[transfer.source].append(transfer)
        transfers[transfer.target].append(transfer)
    makers = _Makers(strategy, graph)
    idle: list[Idle] = []
    for device in sorted({*events, *transfers}):
        # What transfers of the device cover is communication.
        moving = _union([(transfer.start_s, transfer.end_s) for transfer in transfers[device]])
        arriving: dict[tuple[Direction, int], list[Transfer]] = defaultdict(list)
        leaving: dict[float, list[Transfer]] = defaultdict(list)
        for transfer in transfers[device]:
            if transfer.target == device:
                arriving[transfer.direction, transfer.microbatch].append(transfer)
            else:
                leaving[transfer.end_s].append(transfer)
        for gap, event in _gaps(events[device], timeline.iteration_s):
            wait = _wait(event, gap, arriving, leaving, makers)
            idle += [Idle(device, wait, *part) for part in _without(gap, moving)]
    return tuple(idle)


def by_cause(times: Iterable[Idle], strategy: Strategy) -> Mapping[int, Mapping[Wait, float]]:
    """Per used device, the seconds that it waits for each thing, the longest first."""
    waits_s: dict[int, dict[Wait, float]] = {device: {} for device in stages_by_device(strategy)}
    for idle in times:
        known = waits_s.setdefault(idle.device, {})
        known[idle.wait] = known.get(idle.wait, 0.0) + idle.end_s - idle.start_s
    return {
        device: dict(sorted(waits.items(), key=lambda one: -one[1]))
        for device, waits in waits_s.items()
    }


class _Makers:
    """Which stage a tensor or gradient comes from."""

    def __init__(self, strategy: Strategy, graph: Graph) -> None:
        self._crossing = {one.tensor: one for one in crossings(strategy, graph)}
        self._stages = stages_by_device(strategy)

    def stage(self, transfer: Transfer) -> int | None:
        """The stage that made the tensor of a transfer; of those of a device that read a tensor and
        have added up its gradient, the first.
        """
        one = self._crossing.get(transfer.tensor)
        if one is None or transfer.direction is Direction.FORWARD:
            return None if one is None else one.source
        there = self._stages.get(transfer.source, ())
        return next((s for s in one.targets if s in there), None)


def _gaps(events: Sequence[Event], iteration_s: float) -> Iterator[tuple[Interval, Event | None]]:
    """Times between a device's actions, each with the action behind it, None at the end. The first
    gap is known by its start, 0.
    """
    reached = 0.0
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        if event.start_s > reached:
            yield (reached, event.start_s), event
        reached = max(reached, event.end_s)
    if iteration_s > reached:
        yield (reached, iteration_s), None


def _wait(
    event: Event | None,
    gap: Interval,
    arriving: Mapping[tuple[Direction, int], Sequence[Transfer]],
    leaving: Mapping[float, Sequence[Transfer]],
    makers: _Makers,
) -> Wait:
    """What a device waited for in a gap before an action."""
    if event is None:
        return Wait(Cause.COOL_DOWN)
    if isinstance(event.action, AllReduce):
        return Wait(Cause.ALL_REDUCE)
    if not isinstance(event.action, Compute):
        return Wait(Cause.OWN)
    if gap[0] == 0.0:
        return Wait(Cause.WARM_UP)
    direction, microbatch = event.action.direction, event.action.microbatch
    came = [f for f in arriving.get((direction, microbatch), ()) if gap[0] < f.end_s <= gap[1]]
    last = max(came, key=lambda transfer: (transfer.end_s, transfer.source), default=None)
    if last is None or last.end_s < gap[1]:
        for transfer in leaving.get(gap[1], ()):
            if transfer.direction is direction:
                return Wait(Cause.SENDING, device=transfer.target)
    if last is None:
        return Wait(Cause.OWN)
    cause = Cause.OUTPUT if direction is Direction.FORWARD else Cause.GRADIENT
    return Wait(cause, makers.stage(last), last.source)


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times as intervals that neither overlap nor touch, ascending.

    >>> _union([(3.0, 4.0), (1.0, 2.0), (2.0, 2.5)])
    [(1.0, 2.5), (3.0, 4.0)]
    """
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        elif end > start:
            union.append((start, end))
    return union


def _without(gap: Interval, covered: Sequence[Interval]) -> Iterator[Interval]:
    """What is left of a gap without some intervals that do not overlap, ascending.

    >>> list(_without((0.0, 5.0), [(-1.0, 1.0), (2.0, 3.0), (6.0, 7.0)]))
    [(1.0, 2.0), (3.0, 5.0)]
    """
    reached, end = gap
    for start, stop in covered[max(0, bisect_right(covered, (reached, reached)) - 1) :]:
        if start >= end:
            break
        if start > reached:
            yield reached, start
        reached = max(reached, stop)
    if reached < end:
        yield reached, end
