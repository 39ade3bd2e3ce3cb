"""Two traces of one strategy, predicted and measured: their mean times, and one overlaid trace."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from planner.schedules.actions import AllReduce, Compute, Direction, Receive, Send, Step, text
from planner.simulator.timeline import Event, Timeline, Transfer, communication_s, compute_s, idle_s
from planner.simulator.traces.read import Trace
from planner.support.errors import OptionError
from planner.support.printable import few

T = TypeVar("T", int, tuple[int, bool])


@dataclass(frozen=True, slots=True)
class ComparedTime:
    """Predicted and measured mean time of actions of one kind.

    Attributes:
        what: their name, such as "stage 0 forward".
        count: their number in each trace.
        predicted_s: mean of the predicted times.
        measured_s: mean of the measured times.
        bytes: sum of the sizes, if they are transfers; else None.
    """

    what: str
    count: int
    predicted_s: float
    measured_s: float
    bytes: int | None = None

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; 0 where both are 0."""
        if self.measured_s == 0.0:
            return 0.0 if self.predicted_s == 0.0 else float("inf")
        return (self.predicted_s - self.measured_s) / self.measured_s


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Predicted and measured times of one strategy.

    Attributes:
        iteration: the iteration.
        stages: forwards and backwards of each stage, over its replicas and microbatches.
        links: transfers of each ordered pair of devices.
        sums: all-reduces of gradients, from when the last member has come.
        steps: steps of the optimizer, per device.
        devices: compute, communication and idle time of each device.
    """

    iteration: ComparedTime
    stages: tuple[ComparedTime, ...]
    links: tuple[ComparedTime, ...]
    sums: tuple[ComparedTime, ...]
    steps: tuple[ComparedTime, ...]
    devices: tuple[ComparedTime, ...]


def compare_traces(predicted: Trace, measured: Trace) -> TraceComparison:
    """The mean times in two traces of one strategy.

    Raises:
        OptionError: if the traces do not hold the same actions and transfers.
    """
    before, after = both = predicted.timeline, measured.timeline
    if dict(predicted.names) != dict(measured.names):
        own, other = (sorted(one.names.values()) for one in (predicted, measured))
        raise OptionError(
            f"the traces are not of one strategy: the predicted one is of {few(own)}, the"
            f" measured one of {few(other)}; simulate the strategy that was launched"
        )
    _check_alike(before, after, measured.names)
    return TraceComparison(
        iteration=ComparedTime("iteration", 1, before.iteration_s, after.iteration_s),
        stages=_compared(
            both,
            _stages_s,
            lambda key: f"stage {key[0]} {'backward' if key[1] else 'forward'}",
        ),
        links=_links(before, after, measured.names),
        sums=_compared(both, _all_reduces_s, lambda index: f"all-reduce {index}"),
        steps=_compared(both, _steps_s, lambda device: f"step on {measured.names[device]}"),
        devices=tuple(
            ComparedTime(
                f"{measured.names[device]} {what}", 1, of(before, device), of(after, device)
            )
            for device in sorted(measured.names)
            for what, of in (
                ("compute", compute_s),
                ("communication", communication_s),
                ("idle", idle_s),
            )
        ),
    )


def overlay(predicted: Trace, measured: Trace) -> tuple[Timeline, Mapping[int, str]]:
    """Both traces in one timeline and the names of its devices, for `chrome_trace`.

    Each device is there twice: device d is 2 d as predicted and 2 d + 1 as measured, so that
    viewers, which sort by number, show the two below each other.
    """
    twins = ((predicted, "predicted"), (measured, "measured"))
    names: dict[int, str] = {}
    events: list[Event] = []
    transfers: list[Transfer] = []
    memory: dict[int, tuple[tuple[float, int], ...]] = {}
    for side, (trace, what) in enumerate(twins):
        names |= {2 * device + side: f"{name} {what}" for device, name in trace.names.items()}
        events += [replace(e, device=2 * e.device + side) for e in trace.timeline.events]
        transfers += [
            replace(f, source=2 * f.source + side, target=2 * f.target + side)
            for f in trace.timeline.transfers
        ]
        memory |= {2 * d + side: points for d, points in trace.timeline.memory.items()}
    both = Timeline(
        iteration_s=max(trace.timeline.iteration_s for trace, _ in twins),
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.device))),
        transfers=tuple(sorted(transfers, key=lambda f: (f.start_s, f.source, f.target))),
        memory=memory,
    )
    return both, names


def _check_alike(predicted: Timeline, measured: Timeline, names: Mapping[int, str]) -> None:
    """Refuses timelines that do not hold the same actions and transfers."""
    for timeline in (predicted, measured):
        steps = Counter(e.device for e in timeline.events if isinstance(e.action, Step))
        if max(steps.values(), default=0) > 1:
            raise OptionError(
                "a trace of the schedule pipedream is a part of a run without gaps, so two of them"
                " need not hold the same actions; compare the tables of planner simulate and"
                " planner launch"
            )

    def contents(timeline: Timeline) -> Counter[tuple[str, str]]:
        # Sends and receives are events only in simulated timelines: there posting takes time.
        events = Counter(
            (names[e.device], text(e.action))
            for e in timeline.events
            if not isinstance(e.action, Send | Receive)
        )
        return events + Counter(
            (names[f.source], f"{f.tensor} ({f.direction}{f.microbatch}) to {names[f.target]}")
            for f in timeline.transfers
        )

    ours, theirs = contents(predicted), contents(measured)
    for these, others, which in ((ours, theirs, "predicted"), (theirs, ours, "measured")):
        if alone := sorted((these - others).elements()):
            device, what = alone[0]
            raise OptionError(
                f"the traces are not of one strategy: only the {which} one has {what} on {device},"
                f" and {len(alone) - 1} more; simulate the strategy that was launched"
            )


def _compared(
    timelines: tuple[Timeline, Timeline],
    times_s: Callable[[Timeline], Mapping[T, list[float]]],
    name: Callable[[T], str],
) -> tuple[ComparedTime, ...]:
    """Mean times of groups of actions, sorted by the groups' keys.

    Args:
        timelines: predicted and measured, with the same keys.
        times_s: times of a timeline's actions in s, by key of their group.
        name: name of a group, from its key.
    """
    predicted_s, measured_s = map(times_s, timelines)
    return tuple(
        ComparedTime(name(key), len(own_s), fmean(predicted_s[key]), fmean(own_s))
        for key, own_s in sorted(measured_s.items())
    )


def _stages_s(timeline: Timeline) -> dict[tuple[int, bool], list[float]]:
    """Times of computations by stage, and whether they are backwards."""
    times_s: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for event in timeline.events:
        if isinstance(event.action, Compute):
            key = event.action.stage, event.action.direction is Direction.BACKWARD
            times_s[key].append(event.end_s - event.start_s)
    return times_s


def _links(
    predicted: Timeline, measured: Timeline, names: Mapping[int, str]
) -> tuple[ComparedTime, ...]:
    """Mean times of the transfers of each ordered pair of devices, with their bytes."""

    def by_pair(timeline: Timeline) -> dict[tuple[int, int], list[Transfer]]:
        transfers: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in timeline.transfers:
            transfers[transfer.source, transfer.target].append(transfer)
        return transfers

    def mean_s(transfers: Sequence[Transfer]) -> float:
        return fmean(transfer.end_s - transfer.start_s for transfer in transfers)

    predicted_flows = by_pair(predicted)
    return tuple(
        ComparedTime(
            f"{names[pair[0]]} to {names[pair[1]]}",
            len(transfers),
            mean_s(predicted_flows[pair]),
            mean_s(transfers),
            sum(transfer.bytes for transfer in transfers),
        )
        for pair, transfers in sorted(by_pair(measured).items())
    )


def _all_reduces_s(timeline: Timeline) -> dict[int, list[float]]:
    """The time of each all-reduce, from when its last member came."""
    events: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if isinstance(event.action, AllReduce):
            events[event.action.sum].append(event)
    return {
        index: [max(e.end_s for e in members) - max(e.start_s for e in members)]
        for index, members in events.items()
    }


def _steps_s(timeline: Timeline) -> dict[int, list[float]]:
    """The time of the optimizer's step on each device."""
    return {
        event.device: [event.end_s - event.start_s]
        for event in timeline.events
        if isinstance(event.action, Step)
    }
