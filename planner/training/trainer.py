"""`Trainer`: one device's part of a training, step after step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.artefacts.options import Optimizer as OptimizerName
from planner.artefacts.strategy import GradientSum
from planner.launcher.asynchronous import Flow
from planner.launcher.device_part import DevicePart, as_it_crosses, make_part, shorter_dtype
from planner.launcher.executor import Executor, IterationRecord, TrainingStep
from planner.launcher.feed import Batch, BatchNeeds, Copies, Feed, synthetic_feed, user_feed
from planner.launcher.gradients import GradientBuckets, buckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.mesh.lines import all_lines
from planner.launcher.options import USUAL_STEPS, Loop
from planner.launcher.rates import rate_factor
from planner.launcher.transfers import boxes_of
from planner.launcher.updates import (
    DEFAULT_LEARNING_RATES,
    LossScale,
    OptimizerStep,
    UpdateRules,
    loss_scale,
    make_optimizer,
    owned_parameters,
)
from planner.launcher.versions import CurrentWeights, Versions, Weights
from planner.profilers.storages import MemoryWatch
from planner.resharding.sums import owns, silent
from planner.schedules.actions import Compute, waiting_for_sends
from planner.support.errors import LaunchError
from planner.training.datasets import MapFeed, StreamFeed, dataset_feed, given, is_dataset, said
from planner.training.dealing import Deal, History
from planner.training.evaluation import EvalData, Evaluator
from planner.training.samples import Reader
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
        deal: how samples become microbatches.
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
        self.deal = deal_of(job, loop)
        self.history = History(((0, self.deal.samples),))
        self._feed = make_feed(job, self.part, loop, self.microbatches)
        eval_data = self._eval_data(job, loop.eval_data)
        self.num_steps = _num_steps(loop, self._feed, self.groups)
        crossing = as_it_crosses(job.model.graph, plan)
        self.evaluate: Evaluator | None = None
        if eval_data is not None:
            self.evaluate = Evaluator(
                job, self.part, crossing, self.groups, eval_data, self.deal, loop.metrics
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
        self.executor = Executor(
            self.part.stages, boxes, self.buckets, self.groups,
            waiting_for_sends(job.program.code), seed_of(job, loop),
        )  # fmt: skip
        self.next_step = 0
        self.weights: Weights = CurrentWeights()
        self.flow: Flow | None = None
        if plan.strategy.schedule.is_asynchronous:
            self.flow = self._flow(job, rules)
            return
        self.buckets.follow(self._actions)
        self.optimizer_step = OptimizerStep(
            self.optimizer, self.buckets, self._owned(job, sums), self.part.shards, self.weights,
            rules=rules, scale=scale, together=self.groups.add_up,
        )  # fmt: skip

    def _flow(self, job: TrainingJob, rules: UpdateRules) -> Flow:
        """The flows of this device, which has one stage."""
        ((s, stage),) = self.part.stages.items()
        self.weights = weights = Versions(stage.module, self.part.trained, self.buckets)
        self.optimizer_step = OptimizerStep(
            self.optimizer, self.buckets, tuple(self.part.trained.values()), self.part.shards,
            weights, rules=replace(rules, reports_loss=False), scale=LossScale(),
            mean_over=job.plan.strategy.stages[s].num_replicas,
        )  # fmt: skip
        pending_sums = self.groups.pending_sums() if rules.reports_loss else None
        return Flow(
            job,
            self.groups,
            self.executor,
            self.buckets,
            weights,
            self.optimizer_step,
            pending_sums,
        )

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
        needs = needs_of(job, self.part)
        reader = Reader(job.model.graph, job.losses, needs, job.device)
        reads = reader if needs.inputs or needs.targets else None
        return EvalData(data, "--eval-data", self.deal, self.microbatches, reads)

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
            known = History(tuple((int(begin), int(size)) for begin, size in extras["batches"]))
            self.history = known.then(step, self.deal.samples)
        if isinstance(self._feed, MapFeed | StreamFeed):
            self._feed.history = self.history
        self.next_step = step

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
        for record in self.flow.run(self._feed, self.next_step, num_steps):
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
        steps = self.flow.run(partial(_one_of, batches), self.next_step, count, watch)
        self.next_step += sum(1 for _ in steps)
        return self.executor.record

    def batches(self) -> dict[int, Batch]:
        """The data of this device in the next step, by microbatch."""
        return {m: self.local(self._feed(self.next_step, m)) for m in self.microbatches}

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
            fetch = partial(_one_of, batches)
            (record,) = self.flow.run(fetch, self.next_step, 1, watch)
        else:
            work = TrainingStep(self.next_step, batches, self.optimizer_step)
            record = self.executor.run(self._actions, work, step=self.next_step, watch=watch)
            record.loss = work.loss
        self.next_step += 1
        return record


def _one_of(batches: Mapping[int, Batch], step: int, microbatch: int) -> Batch:
    """The data of a microbatch, the same in all steps."""
    return batches[microbatch]


def _rules(job: TrainingJob, loop: Loop, num_steps: int, groups: Groups) -> UpdateRules:
    rate = loop.learning_rate
    if rate is None:
        rate = DEFAULT_LEARNING_RATES[OptimizerName(job.plan.optimizer)]
    factor = rate_factor(loop.lr_schedule, num_steps)
    reports = any(groups.gather(loop.tells or loop.log is not None))
    return UpdateRules(rate, factor, loop.clip, loop.nan, reports)


def _num_steps(loop: Loop, feed: Feed, groups: Groups) -> int:
    """The steps of a training; those of its epochs are known to ranks that read data."""
    if loop.data is None:
        return loop.steps or USUAL_STEPS
    known = [
        one for one in groups.gather(getattr(feed, "steps_per_epoch", None)) if one is not None
    ]
    if len({*known}) > 1:
        raise LaunchError(
            f"{said(loop.data, '--data')}: expected the same dataset on all ranks, got epochs"
            f" of {' and '.join(map(str, sorted({*known})))} steps"
        )
    if loop.epochs is None:
        return loop.steps or USUAL_STEPS
    if not known:
        raise LaunchError(
            f"--epochs {loop.epochs}: expected data with a length, got"
            f" {said(loop.data, '--data')}; give the dataset a __len__, or give --steps"
        )
    return loop.epochs * int(known[0])


def make_feed(job: TrainingJob, part: DevicePart, loop: Loop, mine: Sequence[int] = ()) -> Feed:
    """The data of this device: the inputs of the graph that its stages read, and the targets of
    the losses that they compute.

    Args:
        mine: indices of its microbatches, ascending.

    Raises:
        LaunchError: if the user's data does not fit the model.
    """
    graph, needs = job.model.graph, needs_of(job, part)
    if loop.data is None:
        return synthetic_feed(job.model, job.losses, needs, seed_of(job, loop), job.device)
    if not needs.inputs and not needs.targets:
        return lambda step, microbatch: Batch({}, {})
    where, data = given(loop.data, "--data")
    if callable(data) and not is_dataset(data):
        return user_feed(where, data, graph, job.losses, needs, job.device)
    reader = Reader(graph, job.losses, needs, job.device)
    feed = dataset_feed(where, data, deal_of(job, loop), mine, reader)
    feed.check()
    return feed


def deal_of(job: TrainingJob, loop: Loop) -> Deal:
    """How samples become the microbatches of this training."""
    plan = job.plan
    return Deal(
        plan.microbatch_size, plan.strategy.num_microbatches, seed_of(job, loop),
        loop.shuffle,
    )  # fmt: skip


def needs_of(job: TrainingJob, part: DevicePart) -> BatchNeeds:
    """The data that a device reads."""
    read = {name for stage in part.stages.values() for name in stage.input_names}
    made = {name for stage in part.stages.values() for name in stage.output_names}
    return BatchNeeds(
        inputs=frozenset(read & {*job.model.graph.inputs}),
        targets=frozenset(one.output.name for one in job.losses if one.has_target) & made,
    )


def seed_of(job: TrainingJob, loop: Loop) -> int:
    """The seed of synthetic data and of the numbers that operators draw."""
    return job.plan.seed if loop.seed is None else loop.seed
