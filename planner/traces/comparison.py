"""Two traces of one strategy, predicted and measured, side by side: in figures, and in one file."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

from planner.errors import OptionError
from planner.schedules.actions import AllReduce, Compute, Direction, Receive, Send, Step, text
from planner.simulator.timeline import Event, Flow, Timeline, communication_s, compute_s, idle_s
from planner.traces.read import Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ComparedTime:
    """Mean times of equal things.

    Attributes:
        what: they are.
        count: of them in each trace.
        predicted_s: mean.
        measured_s: mean.
        bytes: of transfers, all together; else None.
    """

    what: str
    count: int
    predicted_s: float
    measured_s: float
    bytes: int | None = None

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; 0 where both are nothing."""
        if self.measured_s == 0.0:
            return 0.0 if self.predicted_s == 0.0 else float("inf")
        return (self.predicted_s - self.measured_s) / self.measured_s


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """Predicted beside measured.

    Attributes:
        iteration: the whole.
        stages: forwards and backwards of each stage, over its replicas and microbatches.
        links: transfers of each ordered pair of devices.
        sums: of gradients, from when the last member has come.
        steps: of the optimizer, per device.
        devices: their compute, communication and idle time.
    """

    iteration: ComparedTime
    stages: tuple[ComparedTime, ...]
    links: tuple[ComparedTime, ...]
    sums: tuple[ComparedTime, ...]
    steps: tuple[ComparedTime, ...]
    devices: tuple[ComparedTime, ...]


def compare_traces(predicted: Trace, measured: Trace) -> TraceComparison:
    """The figures of two traces of one strategy.

    Raises:
        OptionError: if they do not hold the same actions and transfers.
    """
    before, after = predicted.timeline, measured.timeline
    _check_alike(before, after, {**measured.names, **predicted.names})
    return TraceComparison(
        iteration=ComparedTime("iteration", 1, before.iteration_s, after.iteration_s),
        stages=_versus(
            [
                {
                    key: found
                    for key, found in _grouped(timeline.events, _stage).items()
                    if key is not None
                }
                for timeline in (before, after)
            ],
            lambda key: f"stage {key[0]} {'backward' if key[1] else 'forward'}",
        ),
        links=_links(before, after, measured.names),
        sums=_versus([_sums_s(before), _sums_s(after)], lambda index: f"sum {index}"),
        steps=_versus(
            [_steps_s(before), _steps_s(after)], lambda device: f"step on {measured.names[device]}"
        ),
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
    """Both in one timeline, each device twice, and the names of all: what `chrome_trace` takes."""
    twins = ((predicted, "predicted"), (measured, "measured"))
    names: dict[int, str] = {}
    events: list[Event] = []
    flows: list[Flow] = []
    memory: dict[int, tuple[tuple[float, int], ...]] = {}
    for side, (trace, what) in enumerate(twins):
        names |= {2 * device + side: f"{name} {what}" for device, name in trace.names.items()}
        events += [replace(e, device=2 * e.device + side) for e in trace.timeline.events]
        flows += [
            replace(f, source=2 * f.source + side, target=2 * f.target + side)
            for f in trace.timeline.flows
        ]
        memory |= {2 * d + side: points for d, points in trace.timeline.memory.items()}
    both = Timeline(
        iteration_s=max(trace.timeline.iteration_s for trace, _ in twins),
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.device))),
        flows=tuple(sorted(flows, key=lambda f: (f.start_s, f.source, f.target))),
        memory=memory,
    )
    return both, names


def _check_alike(predicted: Timeline, measured: Timeline, names: Mapping[int, str]) -> None:
    def contents(timeline: Timeline) -> set[tuple[str, str]]:
        # Only a simulator says how long posting a transfer takes.
        events = {
            (names[e.device], text(e.action))
            for e in timeline.events
            if not isinstance(e.action, Send | Receive)
        }
        return events | {
            (names[f.source], f"{f.tensor} ({f.direction}{f.microbatch}) to {names[f.target]}")
            for f in timeline.flows
        }

    before, after = contents(predicted), contents(measured)
    for more, other, which in ((before, after, "predicted"), (after, before, "measured")):
        if alone := sorted(more - other):
            device, what = alone[0]
            raise OptionError(
                f"the traces are not of one strategy: only the {which} one has {what} on {device},"
                f" and {len(alone) - 1} more; simulate the strategy that was launched"
            )


def _stage(event: Event) -> tuple[int, bool] | None:
    action = event.action
    if not isinstance(action, Compute):
        return None
    return action.stage, action.direction is Direction.BACKWARD


def _grouped(events: Iterable[Event], key: Callable[[Event], T]) -> dict[T, list[float]]:
    found: dict[T, list[float]] = defaultdict(list)
    for event in events:
        found[key(event)].append(event.end_s - event.start_s)
    return found


def _versus(
    sides: Sequence[Mapping[T, list[float]]], name: Callable[[T], str]
) -> tuple[ComparedTime, ...]:
    before, after = sides
    return tuple(
        ComparedTime(name(key), len(after[key]), fmean(before[key]), fmean(after[key]))
        for key in sorted(after)  # type: ignore[type-var]
    )


def _links(before: Timeline, after: Timeline, names: Mapping[int, str]) -> tuple[ComparedTime, ...]:
    def grouped(flows: Iterable[Flow]) -> dict[tuple[int, int], list[Flow]]:
        found: dict[tuple[int, int], list[Flow]] = defaultdict(list)
        for flow in flows:
            found[flow.source, flow.target].append(flow)
        return found

    def mean_s(flows: Sequence[Flow]) -> float:
        return fmean(flow.end_s - flow.start_s for flow in flows)

    expected, found = grouped(before.flows), grouped(after.flows)
    return tuple(
        ComparedTime(
            f"{names[pair[0]]} to {names[pair[1]]}",
            len(flows),
            mean_s(expected[pair]),
            mean_s(flows),
            sum(flow.bytes for flow in flows),
        )
        for pair, flows in sorted(found.items())
    )


def _sums_s(timeline: Timeline) -> dict[int, list[float]]:
    """The time of each sum, from when its last member came."""
    found: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        if isinstance(event.action, AllReduce):
            found[event.action.sum].append(event)
    return {
        index: [max(e.end_s for e in members) - max(e.start_s for e in members)]
        for index, members in found.items()
    }


def _steps_s(timeline: Timeline) -> dict[int, list[float]]:
    return {
        event.device: [event.end_s - event.start_s]
        for event in timeline.events
        if isinstance(event.action, Step)
    }
