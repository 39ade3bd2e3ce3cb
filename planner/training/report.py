"""`LaunchReport`: measured times and memory of a launch beside the plan's prediction."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.losses import Loss
from planner.artefacts.plan import DevicePrediction, Plan, StagePrediction, said_times
from planner.launcher.clocks import Clock
from planner.launcher.executor import IterationRecord
from planner.launcher.trained_groups import TrainedGroup
from planner.profilers.devices import is_of_type
from planner.schedules.actions import Compute, Direction
from planner.simulator.timeline import Event, Timeline, Transfer, communication_s, compute_s, idle_s
from planner.training.evaluation import Evaluation
from planner.training.steady import cropped, steady_window, steps_to_show


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """Times of one stage per microbatch, on its slowest replica.

    Attributes:
        devices: its replicas.
        predicted: times predicted by the plan.
        measured: measured times, medians over microbatches and steps.
    """

    devices: tuple[int, ...]
    predicted: StagePrediction
    measured: StagePrediction


@dataclass(frozen=True, slots=True)
class MeasuredDevice:
    """One device during the median iteration, by the definitions of the prediction.

    Attributes:
        rank: the rank that ran it.
        predicted: the plan's prediction.
        compute_s: measured time in which it computes.
        communication_s: measured time in which it does not compute, and a transfer or all-reduce of
            its own runs.
        idle_s: the rest of the iteration.
        peak_bytes: peak memory; on CUDA that of torch's allocator, on a CPU that of the process.
        live_bytes: peak memory of tensors in an iteration in which memory was watched; None
            without one.
        host_bytes: most bytes of activations that waited in the host's memory.
    """

    rank: int
    predicted: DevicePrediction
    compute_s: float
    communication_s: float
    idle_s: float
    peak_bytes: int
    live_bytes: int | None
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """The result of a launch, on rank 0.

    Attributes:
        steps: number of optimizer steps.
        loss: loss of each step, before its update.
        measured_iteration_s: median time of an iteration without the first step, from when the
            first rank leaves a barrier to the last rank's end.
        predicted_iteration_s: time of an iteration predicted by the plan.
        stages: the stages, in their order.
        devices: the devices, by rank.
        timeline: timeline of the median iteration.
        comparable: whether prediction and measurement are about the same types of devices.
        notes: reasons why the figures differ, among them why they are not comparable.
        times: origin of the operator times in the prediction.
        losses: the losses whose sum was trained.
        failure: why nothing was learned, for people: the loss is not finite from some step on.
        evaluations: in their order.
        num_minibatches: minibatches of an iteration, under an asynchronous schedule; else None.
        iterations_s: time of each iteration, from the first step on, which warms up; under an
            asynchronous schedule of the first one and of those with a full pipeline.
        groups: of the trained parameters, the rest last; empty where the user names none.
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
    losses: tuple[Loss, ...] = ()
    failure: str | None = None
    evaluations: tuple[Evaluation, ...] = ()
    num_minibatches: int | None = None
    iterations_s: tuple[float, ...] = ()
    groups: tuple[TrainedGroup, ...] = ()

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak memory of each device, by rank."""
        return tuple(device.peak_bytes for device in self.devices)


@dataclass(frozen=True, slots=True)
class RankMeasurements:
    """The measurements of one rank.

    Attributes:
        device: index of its device in the topology.
        loss: its share of the loss, per step.
        begun_s: start of each step that was run with all microbatches, on the rank's clock; of all
            steps that were run, where none has all of them.
        iterations_s: length of each of them.
        records: the records of the last of them; under an asynchronous schedule, that of a flow.
        peak_bytes: as in `MeasuredDevice`.
        peaks_bytes: peak memory at each event of an iteration in which memory was watched, as in
            `IterationRecord`; None without one.
        type: its device's own name for its type.
        threads: number of torch's threads.
        ended_s: of each step of that flow, since its start; empty under other schedules.
        uncounted: number of steps without counted targets, which were not run, the same on all
            ranks; under an asynchronous schedule that of minibatches of which it reports the loss.
        are_whole: whether these steps have all microbatches.
        host_bytes: as in `MeasuredDevice`.
    """

    device: int
    loss: tuple[float, ...]
    begun_s: tuple[float, ...]
    iterations_s: tuple[float, ...]
    records: tuple[IterationRecord, ...]
    peak_bytes: int
    peaks_bytes: tuple[int, ...] | None
    type: str
    threads: int
    ended_s: tuple[float, ...] = ()
    uncounted: int = 0
    are_whole: bool = True
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Measured:
    """The times of a training.

    Attributes:
        iteration_s: of a typical iteration.
        iterations_s: of the first one and those that tell.
        timeline: of a typical one.
        kept: indices of the records with the times of actions.
        notes: on what they are.
    """

    iteration_s: float
    iterations_s: tuple[float, ...]
    timeline: Timeline
    kept: range
    notes: tuple[str, ...] = ()


def make_report(
    plan: Plan,
    graph: Graph,
    losses: Sequence[Loss],
    ranks: Sequence[RankMeasurements],
    clocks: Sequence[Clock],
) -> LaunchReport:
    """The report of a launch.

    Args:
        plan: the plan that was run.
        graph: the model's graph.
        losses: the losses that were trained.
        ranks: the measurements of all ranks, by rank.
        clocks: the clocks of all ranks, by rank.
    """
    steps = len(ranks[0].loss)
    measure = _steady if plan.strategy.schedule.is_asynchronous else _typical
    measured = measure(plan, graph, ranks, clocks)
    timeline, kept = measured.timeline, measured.kept
    notes = _incomparable(plan, ranks)
    loss = tuple(sum(shares) for shares in zip(*(one.loss for one in ranks), strict=True))
    return LaunchReport(
        steps=steps,
        loss=loss,
        measured_iteration_s=measured.iteration_s,
        iterations_s=measured.iterations_s,
        predicted_iteration_s=plan.prediction.iteration_s,
        stages=tuple(_stage(plan, s, ranks, kept) for s in range(len(plan.strategy.stages))),
        devices=tuple(_device(plan, rank, one, timeline) for rank, one in enumerate(ranks)),
        timeline=timeline,
        comparable=not notes,
        notes=(
            *notes, *_threads(plan, ranks), *_short(steps), *measured.notes,
            *_diverged(loss, ranks[0].uncounted),
        ),
        times=said_times(plan),
        losses=tuple(losses),
        num_minibatches=(
            plan.strategy.num_microbatches if plan.strategy.schedule.is_asynchronous else None
        ),
    )  # fmt: skip


def _typical(
    plan: Plan, graph: Graph, ranks: Sequence[RankMeasurements], clocks: Sequence[Clock]
) -> _Measured:
    """The times of iterations that follow each other, each begun by all ranks together."""
    steps = len(ranks[0].begun_s)
    # (steps, ranks) start of each step on rank 0's clock, on which ranks can be compared.
    begun_s = [
        [clock.on_rank_0(one.begun_s[i]) for one, clock in zip(ranks, clocks, strict=True)]
        for i in range(steps)
    ]
    iterations_s = [
        max(begun + one.iterations_s[i] for begun, one in zip(begun_s[i], ranks, strict=True))
        - min(begun_s[i])
        for i in range(steps)
    ]
    measured_s = median(iterations_s[1:] or iterations_s)  # the first step warms up
    # Only the last steps have records, so these indices count from the end: -1 is the last step in
    # `iterations_s` as well as in `records`. The first step is among them only if it is alone.
    kept = range(-min(len(ranks[0].records), max(1, steps - 1)), 0)
    # A real iteration, not a mean of several: in it times add up, and no transfer ends before its
    # start.
    typical = min(kept, key=lambda i: (abs(iterations_s[i] - measured_s), i))
    late_s = [begun - min(begun_s[typical]) for begun in begun_s[typical]]
    timeline = _measured_timeline(
        graph,
        {one.device: one.records[typical] for one in ranks},
        {one.device: late for one, late in zip(ranks, late_s, strict=True)},
    )
    timeline = replace(timeline, memory=_memory(ranks, typical, late_s))
    return _Measured(measured_s, tuple(iterations_s), timeline, kept)


def _steady(
    plan: Plan, graph: Graph, ranks: Sequence[RankMeasurements], clocks: Sequence[Clock]
) -> _Measured:
    """The times of iterations that run through each other, from the longest flow."""
    pairs = [
        (one, one.records[-1].begun_s, clock) for one, clock in zip(ranks, clocks, strict=True)
    ]
    begun_s = min(clock.on_rank_0(begun) for _, begun, clock in pairs)
    ends_s = [
        max(clock.on_rank_0(begun + one.ended_s[i]) for one, begun, clock in pairs) - begun_s
        for i in range(len(ranks[0].ended_s))
    ]
    window = steady_window(plan.strategy, 0.0, ends_s)
    # Clocks go at different speeds, so a flow is not equally late all the time.
    late_s = {
        one.device: clock.on_rank_0(begun + one.ended_s[window.step]) - begun_s
        - one.ended_s[window.step]
        for one, begun, clock in pairs
    }  # fmt: skip
    whole = _measured_timeline(graph, {one.device: one.records[-1] for one in ranks}, late_s)
    timeline = cropped(whole, window.start_s, window.end_s)
    notes = () if window.is_steady else (_unsteady(plan, len(ends_s)),)
    return _Measured(window.step_s, window.steps_s, timeline, range(-1, 0), notes)


def _unsteady(plan: Plan, steps: int) -> str:
    """A note on a flow that was too short."""
    length = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"the longest run without emptying the pipeline is {length}, and the prediction is of a"
        f" full one: expected at least {steps_to_show(plan.strategy)}; give more --steps, or save"
        " and evaluate less often"
    )


def _stage(plan: Plan, s: int, ranks: Sequence[RankMeasurements], kept: range) -> MeasuredStage:
    """Predicted and measured times of a stage, from the records of the kept steps. In shorter ones
    a replica may have no microbatch.
    """
    stage = plan.strategy.stages[s]

    def slowest_s(direction: Direction) -> float:
        times_s = (
            [
                end - start
                for i in kept
                for action, start, end in one.records[i].events
                if isinstance(action, Compute)
                and (action.stage, action.direction) == (s, direction)
            ]
            for one in ranks
            if one.device in stage.devices
        )
        return max(median(of_one) for of_one in times_s if of_one)

    measured = StagePrediction(slowest_s(Direction.FORWARD), slowest_s(Direction.BACKWARD))
    return MeasuredStage(stage.devices, plan.prediction.stages[s], measured)


def _device(plan: Plan, rank: int, own: RankMeasurements, timeline: Timeline) -> MeasuredDevice:
    """Predicted and measured figures of a rank's device."""
    predicted = next(d for d in plan.prediction.devices if d.device == own.device)
    return MeasuredDevice(
        rank=rank,
        predicted=predicted,
        compute_s=compute_s(timeline, own.device),
        communication_s=communication_s(timeline, own.device),
        idle_s=idle_s(timeline, own.device),
        peak_bytes=own.peak_bytes,
        live_bytes=None if own.peaks_bytes is None else max(own.peaks_bytes),
        host_bytes=own.host_bytes,
    )


def _measured_timeline(
    graph: Graph, records: Mapping[int, IterationRecord], late_s: Mapping[int, float]
) -> Timeline:
    """One iteration of all devices, from when the first one leaves the barrier.

    Args:
        graph: the model's graph.
        records: the record of each device.
        late_s: by device, the time from when the first one left the barrier to when it left.
    """
    events = [
        Event(device, action, late_s[device] + start, late_s[device] + end)
        for device, record in records.items()
        for action, start, end in record.events
    ]
    transfers = chain.from_iterable(
        _flows(graph, source, target, records, late_s)
        for target, record in records.items()
        for source in record.receives
    )
    return Timeline(
        iteration_s=max(late_s[d] + record.iteration_s for d, record in records.items()),
        events=tuple(sorted(events, key=lambda e: (e.start_s, e.device))),
        transfers=tuple(sorted(transfers, key=lambda f: (f.start_s, f.source, f.target))),
    )


def _memory(
    ranks: Sequence[RankMeasurements], typical: int, late_s: Sequence[float]
) -> dict[int, tuple[tuple[float, int], ...]]:
    """Memory in use during each action, by device.

    The times are those of the typical iteration, which was not watched: watching slows an iteration
    down, but its actions are the same in the same order, unless both are shorter steps of other
    numbers of microbatches.
    """
    return {
        one.device: tuple(
            (late + start, peak_bytes)
            for (_, start, _), peak_bytes in zip(
                one.records[typical].events, one.peaks_bytes, strict=True
            )
        )
        for one, late in zip(ranks, late_s, strict=True)
        if one.peaks_bytes is not None and len(one.peaks_bytes) == len(one.records[typical].events)
    }


def _flows(
    graph: Graph, source: int, target: int, records: Mapping[int, IterationRecord],
    late_s: Mapping[int, float],
) -> list[Transfer]:  # fmt: skip
    """The transfers of one ordered pair of devices: the k-th send belongs to the k-th receive.

    Nobody sees a transfer start. It cannot before its send and its receive are posted, nor before
    the transfer before it on this link has ended; the latest of these is taken.
    """
    tensors = tensors_by_name(graph)
    transfers = []
    free_s = 0.0  # end of the transfer before
    pairs = zip(records[source].sends[target], records[target].receives[source], strict=True)
    for sent_s, (receive, posted_s, there_s) in pairs:
        end_s = there_s + late_s[target]
        # Clocks may be some microseconds apart, so that the end may seem to come first.
        start_s = min(max(sent_s + late_s[source], posted_s + late_s[target], free_s), end_s)
        free_s = end_s
        transfers.append(
            Transfer(
                source, target, receive.direction, receive.microbatch, receive.tensor,
                start_s, end_s, tensors[receive.tensor].bytes,
            )
        )  # fmt: skip
    return transfers


def _incomparable(plan: Plan, ranks: Sequence[RankMeasurements]) -> list[str]:
    """Notes on devices whose type is not the planned one, and on steps without all microbatches,
    which make times incomparable.
    """
    planned = {d.device: d.type for d in plan.prediction.devices}
    of_types: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, one in enumerate(ranks):
        of_types[planned[one.device], one.type].append(rank)
    few = (
        []
        if ranks[0].are_whole
        else [
            f"not comparable: planned for {plan.strategy.num_microbatches} microbatches in a step,"
            " and all steps have fewer"
        ]
    )
    return few + [
        f"not comparable: planned for {type_}, run on {name} (ranks {', '.join(map(str, which))})"
        for (type_, name), which in of_types.items()
        if not is_of_type(name, type_)
    ]


def _threads(plan: Plan, ranks: Sequence[RankMeasurements]) -> list[str]:
    """A note if the number of CPU threads is not that of the profile."""
    used = ranks[0].threads
    if ranks[0].type != "cpu" or plan.threads in (None, used):
        return []
    threads = "1 thread" if plan.threads == 1 else f"{plan.threads} threads"
    return [f"profiled with {threads}, run with {used} per rank (--threads)"]


def _diverged(loss: tuple[float, ...], uncounted: int) -> list[str]:
    """A note if a loss is not finite, besides those of steps that were not run."""
    if len(loss) - sum(map(math.isfinite, loss)) <= uncounted:
        return []
    return ["the loss is not finite: look for weights that are not, or lower --lr"]


def _short(steps: int) -> list[str]:
    """A note if there is only a single step."""
    return ["the only step warms up and is slower than the next would be"] if steps == 1 else []
