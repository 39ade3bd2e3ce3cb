"""`Flow`: trains in flows, as `planner/schedules/flows.py` describes them.

A flow ends where all stages have to be at the same minibatch: at a checkpoint, at an evaluation, at
the end of the training, and after LONGEST minibatches, which bounds the lists. These places depend
on the options and on steps counted from the very first one. So a training that goes on from a
checkpoint comes to the same weights as one that was not interrupted.

The lists of a flow number its minibatches. Number m is microbatch m mod M of step
first + floor(m / M), and data, losses and drawn numbers go by the latter, as in other schedules.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch.optim import Optimizer

from planner.artefacts.plan import Plan
from planner.launcher.batch import Batch
from planner.launcher.device_part import DevicePart
from planner.launcher.executor import Executor, IterationRecord
from planner.launcher.failures.rank import current_status
from planner.launcher.failures.status import Phase
from planner.launcher.gradients import GradientBuckets, buckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.options import Loop, NanRule
from planner.launcher.stage import StageModule, Tensors
from planner.launcher.totals import LossTotals
from planner.launcher.updates import OptimizerStep, StepResult, UpdateRules
from planner.launcher.versions import Versions
from planner.profilers.storages import MemoryTracker
from planner.schedules.actions import Action, AllReduce, Compute, Direction, Program, Step
from planner.schedules.flows import flow
from planner.schedules.versions import versions
from planner.support.errors import OptionError

LONGEST = 4096
"""Minibatches of a flow, at most, where a step has no more."""


def check_schedule(plan: Plan, loop: Loop) -> None:
    """Raises the first option that an asynchronous schedule cannot follow, because its stages never
    meet.

    Raises:
        OptionError: if all stages would have to decide about a step together.
    """
    if not plan.strategy.schedule.is_asynchronous:
        return
    dtype = loop.dtype or plan.dtype
    for given, refused, why, instead in (
        (
            f"--clip {loop.clip}", loop.clip is not None,
            "needs the gradients of all stages", "leave it out",
        ),
        (
            f"--nan {loop.nan}", loop.nan == NanRule.SKIP,
            "leaves out a step in all stages", "give --nan stop",
        ),
        (
            f"--dtype {dtype}", dtype == "float16",
            "has a loss scale for all stages", "give --dtype bfloat16",
        ),
    ):  # fmt: skip
        if refused:
            raise OptionError(
                f"{given}: it {why}, and under the schedule {plan.strategy.schedule} each stage"
                f" steps for itself; {instead}, or plan with --schedule 1f1b"
            )


def flow_end(step: int, num_steps: int, num_microbatches: int, every: Iterable[int | None]) -> int:
    """The number of steps at which a flow ends that begins after some steps.

    Args:
        step: steps before it.
        num_steps: of the whole training.
        num_microbatches: M, minibatches of a step.
        every: intervals in steps at which the pipeline has to be empty; None is never.

    >>> flow_end(10, 100, 8, [25, None]), flow_end(510, 2000, 8, [None]), flow_end(90, 100, 8, [])
    (25, 512, 100)
    """
    longest = max(1, LONGEST // num_microbatches)
    intervals = [longest, *(one for one in every if one is not None)]
    return min(num_steps, *((step // one + 1) * one for one in intervals))


def _device_actions(program: Program, device: int) -> list[Action]:
    """The list of one device; its all-reduces have the numbers of their buckets, which are the same
    in each round.
    """
    number = {one: i for i, one in enumerate(buckets(program.sums))}
    return [
        AllReduce(number[program.sums[action.sum]]) if isinstance(action, AllReduce) else action
        for action in program.lists[device]
    ]


@dataclass(frozen=True, slots=True)
class FlowRecord:
    """The actions of one device in a flow.

    Attributes:
        record: of all its actions; times since the start of the flow.
        ended_s: per step, the end of its last action on this device, since the start of the flow.
    """

    record: IterationRecord = field(default_factory=IterationRecord)
    ended_s: tuple[float, ...] = ()


class Flow:
    """The flows of one device, one after the other; the `Work` of an `Executor`.

    Attributes:
        strategy: that is trained.
        weights: of the only stage of this device.
        optimizer_step: makes their next version.
        longest: the actions of the longest flow; of several, the last one.
        uncounted: number of minibatches so far without counted targets, of those whose loss this
            device reports.

    Args:
        job: what is trained, under an asynchronous schedule.
        part: of this device.
        gradients: of its parameters.
        optimizer: of the same; None if it trains none.
        rules: how steps are done.
        groups: the other devices.
        executor: runs the lists.
        totals: that the losses of a minibatch are divided by.
    """

    def __init__(
        self, job: TrainingJob, part: DevicePart, gradients: GradientBuckets,
        optimizer: Optimizer | None, rules: UpdateRules, groups: Groups, executor: Executor,
        totals: LossTotals,
    ) -> None:  # fmt: skip
        self.strategy, self._graph, self._device = job.plan.strategy, job.model.graph, groups.device
        self._gradients, self._executor, self._totals = gradients, executor, totals
        ((self._stage, place),) = part.places.items()
        self._num_replicas, self._replica = place.stage.num_replicas, place.replica
        self.weights = Versions(part.stages[self._stage].module, part.trained, gradients)
        self.optimizer_step = OptimizerStep(
            optimizer, gradients, tuple(part.trained.values()), part.shards, self.weights,
            rules=replace(rules, reports_loss=False), masters=part.masters,
            mean_over=self._num_replicas,
        )  # fmt: skip
        self._groups = groups
        self._pending_sums = groups.pending_sums() if rules.reports_loss else None
        self._status = current_status()
        self._coming: Iterator[Batch] = iter(())
        self._known: dict[int, list[Action]] = {}  # by the number of minibatches
        self._first = 0  # index of the first step of this flow
        self._current = 0  # of the step that the latest backward belongs to
        self._batch = Batch({}, {})
        self._minibatch_loss = 0.0
        self._losses: dict[int, float] = {}  # of this device, by step
        self.longest, self.uncounted = FlowRecord(), 0

    def run(
        self,
        coming: Iterator[Batch],
        first: int,
        num_steps: int,
        watch: MemoryTracker | None = None,
    ) -> Iterator[IterationRecord]:
        """Runs a flow; gives the loss and the time of each step, as soon as this device has ended
        it and the loss of all ranks is known, where that is needed.

        Args:
            coming: the data of the microbatches of this device from the first step on.
            first: the index of the first step.
            num_steps: of the training, M minibatches each.
            watch: of the memory in use.
        """
        count = num_steps * self.strategy.num_microbatches
        actions = self._actions(count)
        self._gradients.follow(actions)
        mine = np.arange(self._replica, count, self._num_replicas)
        self.weights.begin(versions(self.strategy, self._stage, mine).tolist())
        self._first, self._coming, self._losses = first, coming, {}
        ended: deque[tuple[int, IterationRecord]] = deque()
        for step, record in enumerate(self._steps(actions, watch), first):
            ended.append((step, record))
            if self._pending_sums is not None:
                self._pending_sums.start(record.loss)
            yield from self._known_losses(ended, last=step == first + num_steps - 1)

    def _steps(
        self, actions: list[Action], watch: MemoryTracker | None
    ) -> Iterator[IterationRecord]:
        """The loss and the time of each step, without its actions, when this device has run the
        last action of it; the last step at the end of the list.
        """
        closing, ended_s = self._closing(actions), list[float]()
        events = self._executor.events(actions, self, step=self._first, watch=watch)
        for i, (_, _, end_s) in enumerate(events):
            if i in closing:
                ended_s.append(end_s)
                if len(ended_s) < len(closing):
                    yield self._step_record(ended_s)
        if len(ended_s) >= len(self.longest.ended_s):
            self.longest = FlowRecord(self._executor.record, tuple(ended_s))
        yield self._step_record(ended_s)

    def _closing(self, actions: list[Action]) -> frozenset[int]:
        """The places among the events of a list at which a step of the training ends: the
        optimizer's last step after a backward of it.
        """
        last: dict[int, int] = {}
        current = self._first
        events = (one for one in actions if isinstance(one, Compute | AllReduce | Step))
        for i, action in enumerate(events):
            if isinstance(action, Compute) and action.direction is Direction.BACKWARD:
                current, _ = self.place(action.microbatch)
            elif isinstance(action, Step):
                last[current] = i
        return frozenset(last.values())

    def _step_record(self, ended_s: list[float]) -> IterationRecord:
        """The loss and the time of the step that has ended last on this device."""
        *_, begun_s, end_s = 0.0, *ended_s
        loss = self._losses.pop(self._first + len(ended_s) - 1)
        return IterationRecord(loss, self._executor.record.begun_s + begun_s, end_s - begun_s)

    def _known_losses(
        self, ended: deque[tuple[int, IterationRecord]], *, last: bool
    ) -> Iterator[IterationRecord]:
        """The steps that have ended, once their losses are known, all after the last one."""
        totals: list[float | None] = [None] * len(ended)
        if self._pending_sums is not None:
            if last:
                self._status.enter(Phase.BARRIER)  # the last minibatches of other ranks still run
            totals = [*self._pending_sums.finished(wait=last)]
            self._status.enter(Phase.BETWEEN)
        for total in totals:
            step, record = ended.popleft()
            self.optimizer_step.last = StepResult(self.optimizer_step.rate_at(step), total)
            yield record

    def _actions(self, num_minibatches: int) -> list[Action]:
        """The list of this device in a flow."""
        if num_minibatches not in self._known:
            program = flow(self.strategy, self._graph, num_minibatches)
            self._known[num_minibatches] = _device_actions(program, self._device)
        return self._known[num_minibatches]

    def meet(self, actions: Sequence[Action]) -> Sequence[Action]:
        """As `Work.meet`."""
        self._groups.barrier()
        return actions

    def place(self, microbatch: int) -> tuple[int, int]:
        """As `Work.place`."""
        step, inside = divmod(microbatch, self.strategy.num_microbatches)
        return self._first + step, inside

    def begin(self, action: Compute) -> None:
        """Fetches the data of a forward."""
        step, _ = self.place(action.microbatch)
        self._status.turn_to(step)
        if action.direction is Direction.BACKWARD:
            self._current = step
            return
        self._status.enter(Phase.DATA)
        self._batch = next(self._coming)

    def forward(self, action: Compute, stage: StageModule, tensors: Tensors) -> Tensors:
        """As `Work.forward`, with the version of the weights that the minibatch uses. The loss of a
        step is the mean over its minibatches, each of which is divided by its own total. Without
        counted targets a minibatch has a loss of zero, and gradients of zero in all stages: these
        never meet, so that none of them could leave out its step.
        """
        batch, self._batch = self._batch, Batch({}, {})
        with self.weights.forward(action.microbatch // self._num_replicas):
            here = batch.on(self._groups.torch_device)
            inputs = {**here.inputs, **tensors}
            totals = self._totals.of_microbatch(batch)
            outputs, (loss, counted) = stage.forward(
                action.microbatch, inputs, here.targets, totals
            )
        step, _ = self.place(action.microbatch)
        self._losses[step] = self._losses.get(step, 0.0) + loss / self.strategy.num_microbatches
        self._minibatch_loss = loss
        self.uncounted += self._totals.is_nothing(totals, counted)
        return outputs

    def backward(self, action: Compute, stage: StageModule, gradients: Tensors) -> Tensors:
        """As `Work.backward`, with the version of the weights of its forward."""
        with self.weights.backward(action.microbatch // self._num_replicas):
            return stage.backward(action.microbatch, gradients)

    def step(self) -> None:
        """As `Work.step`: makes the next version, after each minibatch of every replica."""
        self.optimizer_step.step(self._current, self._minibatch_loss)
