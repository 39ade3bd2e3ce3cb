"""`Trainer`: one device's part of a training, step after step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from planner.artefacts.options import Optimizer as OptimizerName
from planner.artefacts.strategy import GradientSum
from planner.launcher.asynchronous import Flow
from planner.launcher.batch import Batch
from planner.launcher.device_part import as_it_crosses, make_part, shorter_dtype
from planner.launcher.executor import Executor, IterationRecord, TrainingStep
from planner.launcher.gradients import GradientBuckets, buckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.mesh.lines import all_lines
from planner.launcher.options import Loop
from planner.launcher.rates import rate_factor
from planner.launcher.transfers import boxes_of
from planner.launcher.updates import (
    DEFAULT_LEARNING_RATES,
    OptimizerStep,
    UpdateRules,
    loss_scale,
    make_optimizer,
    owned_parameters,
)
from planner.launcher.versions import CurrentWeights, Weights
from planner.profilers.storages import MemoryWatch
from planner.resharding.sums import owns, silent
from planner.schedules.actions import Compute, Direction, waiting_for_sends
from planner.training.data.batching import BatchSizeHistory
from planner.training.data.datasets import EvalData
from planner.training.data.feeds import (
    layout_of,
    make_feed,
    number_of_steps,
    reader_of,
    training_seed,
)
from planner.training.evaluation import Evaluator
from planner.training.steady import steps_to_show


class Trainer:
    """The part of one device; every rank makes one, and all call `step` equally often.

    Attributes:
        groups: the other devices.
        part: its stages and parameters.
        microbatches: indices of those that it runs, ascending.
        buckets: of the gradients of its trained parameters.
        weights: changes the same.
        optimizer: of the same; None if there are none.
        optimizer_step: everything that a step does around the optimizer.
        executor: runs its actions.
        flow: runs the steps of an asynchronous schedule; None for other schedules.
        num_steps: steps of the whole training.
        layout: how samples become microbatches.
        history: the sizes of all batches since the first step.
        evaluate: gives the figures of an evaluation; all ranks call it together. None without data.
        next_step: the index of the step that `step` runs next.

    Args:
        job: what is trained.
        loop: how.
        rank: of this process.
    """

    def __init__(self, job: TrainingJob, loop: Loop, rank: int) -> None:
        plan = job.plan
        if job.device == "cpu":
            torch.set_num_threads(loop.threads or plan.threads or 1)
        else:
            torch.cuda.set_device(job.device)
        scale = loss_scale(shorter_dtype(job))
        self._losses = job.losses
        self._actions = job.program.lists[plan.ranks[rank]]
        computed = (one for one in self._actions if isinstance(one, Compute))
        self.microbatches = sorted({one.microbatch for one in computed})
        sums, lines = buckets(job.program.sums), all_lines(plan.strategy)
        self.groups = Groups(plan.ranks, rank, replace(job.program, sums=sums), job.device, lines)
        self.part = make_part(job, self.groups, lambda: scale.value)
        self.layout = layout_of(job, loop)
        self.history = self.layout.history
        self._feed = make_feed(job, self.part, loop, self.microbatches)
        self._coming: Iterator[Batch] | None = None  # from the next step on
        eval_data = self._eval_data(job, loop.eval_data)
        self.num_steps = number_of_steps(loop, self._feed, self.groups)
        crossing = as_it_crosses(job.model.graph, plan)
        self.evaluate: Evaluator | None = None
        if eval_data is not None:
            self.evaluate = Evaluator(
                job, self.part, crossing, self.groups, eval_data, self.layout, loop.metrics
            )
        self.optimizer = make_optimizer(
            OptimizerName(plan.optimizer), list(self.part.optimizer_parameters.values()),
            loop.learning_rate, loop.weight_decay,
        )  # fmt: skip
        self.buckets = GradientBuckets(
            self.part.gradient_accumulators, sums, self.groups, self.part.shards,
            silent(plan.strategy, job.model.graph, self.groups.device),
        )  # fmt: skip
        rules = _rules(job, loop, self.num_steps, self.groups)
        boxes = boxes_of(plan.strategy, crossing, self.groups.device)
        asynchronous = plan.strategy.schedule.is_asynchronous
        # In flows, unlike in one step of few microbatches, a backward comes before a forward.
        backwards = frozenset({Direction.BACKWARD})
        waiting = backwards if asynchronous else waiting_for_sends(job.program.code)
        self.executor = Executor(
            self.part.stages, boxes, self.buckets, self.groups, waiting, training_seed(job, loop)
        )
        self.next_step = 0
        self.weights: Weights = CurrentWeights()
        self.flow: Flow | None = None
        if asynchronous:
            self.flow = Flow(
                job, self.part, self.buckets, self.optimizer, rules, self.groups, self.executor
            )
            self.weights, self.optimizer_step = self.flow.weights, self.flow.optimizer_step
            return
        self.buckets.follow(self._actions)
        self.optimizer_step = OptimizerStep(
            self.optimizer, self.buckets, self._owned(job, sums), self.part.shards, self.weights,
            rules=rules, scale=scale, together=self.groups.add_up,
        )  # fmt: skip

    def _owned(self, job: TrainingJob, sums: Sequence[GradientSum]) -> tuple[Tensor, ...]:
        """What this device steps and counts for all that have the same."""
        strategy, graph, device = job.plan.strategy, job.model.graph, self.groups.device
        if all(stage.sharding is None for stage in strategy.stages):
            return owned_parameters(self.part.trained, sums, device)
        stepped = self.part.optimizer_parameters.items()
        return tuple(one for name, one in stepped if owns(strategy, graph, device, name))

    def _eval_data(self, job: TrainingJob, data: object) -> EvalData | None:
        """What this device reads of the data of evaluations."""
        if data is None:
            return None
        reader = reader_of(job, self.part)
        return EvalData(data, "--eval-data", self.layout, self.microbatches, reader)

    def extras(self) -> dict[str, Any]:
        """The state besides weights, statistics and optimizer, as JSON."""
        scale = self.optimizer_step.scale
        return {
            "loss_scale": {"value": scale.value, "good_steps": scale.good_steps},
            "batches": [[*part] for part in self.history.parts],
        }

    def restore(self, extras: Mapping[str, Any], step: int) -> None:
        """Goes on as after some steps.

        Args:
            extras: what `extras` has given; fields that are not there stay as they are.
            step: the index of the step that is next.
        """
        if "loss_scale" in extras and self.optimizer_step.scale.is_dynamic:
            self.optimizer_step.scale.value = float(extras["loss_scale"]["value"])
            self.optimizer_step.scale.good_steps = int(extras["loss_scale"]["good_steps"])
        if "batches" in extras:
            parts = tuple((int(begin), int(size)) for begin, size in extras["batches"])
            self.history = BatchSizeHistory(parts).then(step, self.layout.samples)
        self.next_step, self._coming = step, None

    def run(self, num_steps: int) -> Iterator[IterationRecord]:
        """Some steps, one after the other; under an asynchronous schedule a flow of them, which is
        over with the last one.

        Args:
            num_steps: how many.
        """
        if self.flow is None:
            for _ in range(num_steps):
                yield self.step()
            return
        for record in self.flow.run(self._data(), self.next_step, num_steps):
            self.next_step += 1
            yield record

    def watched(self, watch: MemoryWatch, data: Mapping[int, Batch]) -> IterationRecord:
        """Steps in which memory is watched, enough of them for its peak: one, or under an
        asynchronous schedule a flow in which all versions are alive.

        Args:
            watch: of the memory in use.
            data: that of one step, made before memory is watched. Copies of it are used, and freed
                after their last use, as the data of a real feed is.

        Returns:
            All actions.
        """
        batches = Copies(data)
        if self.flow is None:
            return self.step(batches, watch)
        count = steps_to_show(self.flow.strategy)
        steps = self.flow.run(_again_and_again(batches), self.next_step, count, watch)
        self.next_step += sum(1 for _ in steps)
        return self.executor.record

    def batches(self) -> dict[int, Batch]:
        """The data of this device in the next step, by microbatch."""
        coming = self._data()
        return {m: self.local(next(coming)) for m in self.microbatches}

    def _data(self) -> Iterator[Batch]:
        """The microbatches of this device from the next step on."""
        if self._coming is None:
            self._coming = self._feed.microbatches(self.next_step, self.history)
        return self._coming

    def local(self, batch: Batch) -> Batch:
        """The part of a microbatch that this device needs, of the data that it is given."""
        return self.part.local(batch, self._losses)

    def step(
        self, batches: Mapping[int, Batch] | None = None, watch: MemoryWatch | None = None
    ) -> IterationRecord:
        """One step of the training. Under an asynchronous schedule it is a flow of its own.

        Args:
            batches: the data of this device, by microbatch; None takes that of `batches`.
            watch: of the memory in use.
        """
        if batches is None:
            batches = self.batches()
        if self.flow is not None:
            coming = _again_and_again(batches)
            (record,) = self.flow.run(coming, self.next_step, 1, watch)
        else:
            work = TrainingStep(self.next_step, batches, self.optimizer_step)
            record = self.executor.run(self._actions, work, step=self.next_step, watch=watch)
            record.loss = work.loss
        self.next_step += 1
        return record


def _again_and_again(batches: Mapping[int, Batch]) -> Iterator[Batch]:
    """The same data in all steps."""
    while True:
        for microbatch in sorted(batches):
            yield batches[microbatch]


class Copies(Mapping[int, Batch]):
    """Microbatches whose data is copied at each access, so that it is freed after its last use, as
    data of a real feed is. The originals stay in memory.

    Args:
        batches: the originals, by microbatch.
    """

    def __init__(self, batches: Mapping[int, Batch]) -> None:
        self._batches = batches

    def __getitem__(self, microbatch: int) -> Batch:
        batch = self._batches[microbatch]
        return Batch(_clones(batch.inputs), _clones(batch.targets))

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _rules(job: TrainingJob, loop: Loop, num_steps: int, groups: Groups) -> UpdateRules:
    rate = loop.learning_rate
    if rate is None:
        rate = DEFAULT_LEARNING_RATES[OptimizerName(job.plan.optimizer)]
    factor = rate_factor(loop.lr_schedule, num_steps)
    reports = any(groups.gather(loop.tells or loop.log is not None))
    return UpdateRules(rate, factor, loop.clip, loop.nan, reports)
