"""`LaunchReport`: what a launch measured, beside what the plan predicted."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from planner.graph import Graph, tensors_by_name
from planner.launcher.clocks import Clock
from planner.launcher.runtime import Record
from planner.plan import DevicePrediction, Plan, StagePrediction, said_times
from planner.schedules.actions import Compute, Direction
from planner.simulator.timeline import Event, Flow, Timeline, communication_s, compute_s, idle_s


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """One stage, per microbatch on its slowest replica.

    Attributes:
        devices: its replicas.
        predicted: by the plan.
        measured: medians over microbatches and steps.
    """

    devices: tuple[int, ...]
    predicted: StagePrediction
    measured: StagePrediction


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """One device during the median iteration, by the definitions of the prediction.

    Attributes:
        rank: that ran it.
        predicted: by the plan.
        compute_s: measured time in which it computes.
        communication_s: measured time in which it does not compute and a transfer or sum of its
            own runs.
        idle_s: the rest of the iteration.
        peak_bytes: on CUDA what torch allocated, on a CPU the whole process.
        live_bytes: the most that tensors took in the iteration in which memory was watched; None
            where there was none.
    """

    rank: int
    predicted: DevicePrediction
    compute_s: float
    communication_s: float
    idle_s: float
    peak_bytes: int
    live_bytes: int | None


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """A launch, as rank 0 tells it.

    Attributes:
        steps: optimizer steps.
        loss: of each step, before its update.
        measured_iteration_s: median without the first step; from when the first rank leaves a
            barrier to the last rank's end.
        predicted_iteration_s: by the plan.
        stages: in their order.
        devices: by rank.
        timeline: of the median iteration.
        comparable: whether prediction and measurement speak of the same type of device.
        notes: what makes the figures differ, among them why they are not comparable.
        times: where the operator times come from that the prediction is made of.
    """

    steps: int
    loss: tuple[float, ...]
    measured_iteration_s: float
    predicted_iteration_s: float
    stages: tuple[MeasuredStage, ...]
    devices: tuple[MeasuredDevice, ...]
    timeline: Timeline
    comparable: bool
    notes: tuple[str, ...]
    times: str

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per device, by rank."""
        return tuple(device.peak_bytes for device in self.devices)


@dataclass(frozen=True, slots=True)
class Findings:
    """What one rank measured.

    Attributes:
        device: index into the topology.
        loss: its share of it, per step.
        begun_s: when each step began, on the rank's clock.
        iterations_s: how long each step took.
        records: of the last steps.
        peak_bytes: see `MeasuredDevice`.
        peaks_bytes: of each event of an iteration in which memory was watched, see `Record`; None
            where there was none.
        type: what its device calls itself.
        threads: of torch.
    """

    device: int
    loss: tuple[float, ...]
    begun_s: tuple[float, ...]
    iterations_s: tuple[float, ...]
    records: tuple[Record, ...]
    peak_bytes: int
    peaks_bytes: tuple[int, ...] | None
    type: str
    threads: int


def make_report(
    plan: Plan, graph: Graph, findings: Sequence[Findings], clocks: Sequence[Clock]
) -> LaunchReport:
    """The report from what all ranks found, by rank, and from their clocks."""
    steps = len(findings[0].loss)
    # (steps, ranks) on rank 0's clock.
    begun_s = [
        [clock.on_rank_0(found.begun_s[i]) for found, clock in zip(findings, clocks, strict=True)]
        for i in range(steps)
    ]
    iterations_s = [
        max(begun + f.iterations_s[i] for begun, f in zip(begun_s[i], findings, strict=True))
        - min(begun_s[i])
        for i in range(steps)
    ]
    measured_s = median(iterations_s[1:] or iterations_s)  # the first step warms up
    # The records of the last steps, counted from the end; the first step's only if it is alone.
    kept = range(-min(len(findings[0].records), max(1, steps - 1)), 0)
    typical = min(kept, key=lambda i: (abs(iterations_s[i] - measured_s), i))
    late_s = [begun - min(begun_s[typical]) for begun in begun_s[typical]]
    timeline = measured_timeline(
        graph,
        {f.device: f.records[typical] for f in findings},
        {f.device: late for f, late in zip(findings, late_s, strict=True)},
    )
    timeline = replace(timeline, memory=_memory(findings, typical, late_s))
    notes = _incomparable(plan, findings)
    loss = tuple(sum(each) for each in zip(*(f.loss for f in findings), strict=True))
    return LaunchReport(
        steps=steps,
        loss=loss,
        measured_iteration_s=measured_s,
        predicted_iteration_s=plan.prediction.iteration_s,
        stages=tuple(_stage(plan, s, findings, kept) for s in range(len(plan.strategy.stages))),
        devices=tuple(_device(plan, rank, f, timeline) for rank, f in enumerate(findings)),
        timeline=timeline,
        comparable=not notes,
        notes=(*notes, *_threads(plan, findings), *_short(steps), *_diverged(loss)),
        times=said_times(plan),
    )


def _stage(plan: Plan, s: int, findings: Sequence[Findings], kept: range) -> MeasuredStage:
    stage = plan.strategy.stages[s]

    def slowest_s(direction: Direction) -> float:
        return max(
            median(
                end - start
                for i in kept
                for action, start, end in f.records[i].events
                if isinstance(action, Compute)
                and (action.stage, action.direction) == (s, direction)
            )
            for f in findings
            if f.device in stage.devices
        )

    measured = StagePrediction(slowest_s(Direction.FORWARD), slowest_s(Direction.BACKWARD))
    return MeasuredStage(stage.devices, plan.prediction.stages[s], measured)


def _device(plan: Plan, rank: int, found: Findings, timeline: Timeline) -> MeasuredDevice:
    predicted = next(d for d in plan.prediction.devices if d.device == found.device)
    return MeasuredDevice(
        rank=rank,
        predicted=predicted,
        compute_s=compute_s(timeline, found.device),
        communication_s=communication_s(timeline, found.device),
        idle_s=idle_s(timeline, found.device),
        peak_bytes=found.peak_bytes,
        live_bytes=None if found.peaks_bytes is None else max(found.peaks_bytes),
    )


def measured_timeline(
    graph: Graph, records: Mapping[int, Record], late_s: Mapping[int, float]
) -> Timeline:
    """One iteration of all devices, from when the first one leaves the barrier.

    Args:
        late_s: by device, how much later it left the barrier than the first one.
    """
    events = [
        Event(device, action, late_s[device] + start, late_s[device] + end)
        for device, record in records.items()
        for action, start, end in record.events
    ]
    flows = chain.from_iterable(
        _flows(graph, source, target, records, late_s)
        for target, record in records.items()
        for source in record.receives
    )
    return Timeline(
        iteration_s=max(late_s[d] + record.iteration_s for d, record in records.items()),
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.device))),
        flows=tuple(sorted(flows, key=lambda f: (f.start_s, f.source, f.target))),
    )


def _memory(
    findings: Sequence[Findings], typical: int, late_s: Sequence[float]
) -> dict[int, tuple[tuple[float, int], ...]]:
    """What was in use during each action, at the times of an iteration that was not watched."""
    return {
        found.device: tuple(
            (late + start, peak)
            for (_, start, _), peak in zip(
                found.records[typical].events, found.peaks_bytes, strict=True
            )
        )
        for found, late in zip(findings, late_s, strict=True)
        if found.peaks_bytes is not None
    }


def _flows(
    graph: Graph, source: int, target: int, records: Mapping[int, Record],
    late_s: Mapping[int, float],
) -> list[Flow]:  # fmt: skip
    """The transfers of one ordered pair: the k-th send meets the k-th receive."""
    tensors = tensors_by_name(graph)
    found = []
    free_s = 0.0
    pairs = zip(records[source].sends[target], records[target].receives[source], strict=True)
    for sent_s, (receive, posted_s, there_s) in pairs:
        end_s = there_s + late_s[target]
        start_s = min(max(sent_s + late_s[source], posted_s + late_s[target], free_s), end_s)
        free_s = end_s
        found.append(
            Flow(
                source, target, receive.direction, receive.microbatch, receive.tensor,
                start_s, end_s, tensors[receive.tensor].bytes,
            )
        )  # fmt: skip
    return found


def _incomparable(plan: Plan, findings: Sequence[Findings]) -> list[str]:
    """Why prediction and measurement speak of different things; empty if they do not."""
    planned = {d.device: d.type for d in plan.prediction.devices}
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, found in enumerate(findings):
        ranks[planned[found.device], found.type].append(rank)
    return [
        f"not comparable: planned for {type_}, run on {found} (ranks {', '.join(map(str, which))})"
        for (type_, found), which in ranks.items()
        if not _same_type(type_, found)
    ]


def _same_type(planned: str, found: str) -> bool:
    """Whether a topology's type is what a device calls itself.

    >>> _same_type("V100-SXM2-16GB", "Tesla V100-SXM2-16GB"), _same_type("cpu", "NVIDIA H200")
    (True, False)
    """
    short = ["".join(c for c in name.lower() if c.isalnum()) for name in (planned, found)]
    return short[0] == short[1] if "cpu" in short else short[0] in short[1]


def _threads(plan: Plan, findings: Sequence[Findings]) -> list[str]:
    used = findings[0].threads
    if findings[0].type != "cpu" or plan.threads in (None, used):
        return []
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    return [f"profiled with {threads}, run with {used} per rank (--threads)"]


def _diverged(loss: tuple[float, ...]) -> list[str]:
    return [] if all(map(math.isfinite, loss)) else ["the loss is not finite"]


def _short(steps: int) -> list[str]:
    return ["the only step warms up and is slower than the next would be"] if steps == 1 else []
