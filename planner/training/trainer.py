"""`Trainer`: one device's part of a training, from meeting the other ranks to leaving them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch

from planner.artefacts.graph import gradient_dtype
from planner.artefacts.options import Optimizer as OptimizerName
from planner.launcher.asynchronous import Flow, check_schedule, flow_end
from planner.launcher.batch import Batch, StepBatches
from planner.launcher.device_part import as_it_crosses, make_part, shorter_dtype
from planner.launcher.executor import Executor, IterationRecord, StepSize, TrainingStep
from planner.launcher.failures.errors import introduce, with_causes
from planner.launcher.failures.hosts import hosts_watched
from planner.launcher.failures.rank import current_status, take_error_hook
from planner.launcher.failures.requests import REQUEST
from planner.launcher.failures.status import Phase
from planner.launcher.gradients import GradientBuckets, buckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob, prepare, with_choices
from planner.launcher.mesh.lines import all_lines
from planner.launcher.options import Loop
from planner.launcher.rates import rate_factor
from planner.launcher.rendezvous import (
    HASH_DIGITS,
    LaunchAgreement,
    ProcessRank,
    compare_ranks,
    failure_reported,
    meet_others,
    process_rank,
)
from planner.launcher.totals import loss_totals
from planner.launcher.trained_groups import optimizer_groups, settings, trained_groups
from planner.launcher.transfers import boxes_of
from planner.launcher.updates import (
    DEFAULT_LEARNING_RATES,
    LossScale,
    OptimizerStep,
    UpdateRules,
    loss_scale,
    make_optimizer,
)
from planner.launcher.versions import CurrentWeights, Weights
from planner.profilers.storages import MemoryTracker
from planner.resharding.sums import non_contributing, owns
from planner.schedules.actions import Compute, Direction, waiting_for_sends
from planner.training.checkpoints.content import Content
from planner.training.checkpoints.folder import Checkpoint
from planner.training.checkpoints.saver import Saver
from planner.training.checkpoints.start import GROUPS, check_fits, start_of
from planner.training.data.agreement import DataAgreement
from planner.training.data.batching import BatchSizeHistory, StepData
from planner.training.data.datasets import EvalData, data_name
from planner.training.data.feeds import (
    epoch_of,
    layout_of,
    make_feed,
    number_of_steps,
    reader_of,
    training_seed,
)
from planner.training.evaluation import Evaluator
from planner.training.options import TrainingRequest
from planner.training.steady import steps_to_show

SET_RATE = "set_lr"
"""Among the extras of a checkpoint: the learning rate that the user's loop has set last."""


class Trainer:
    """The part of one device; every rank makes one, and all call the same methods.

    It is a context manager: its end is `close`.

    Attributes:
        job: what is trained.
        rank: of this process.
        groups: the other devices.
        part: its stages and parameters.
        microbatches: indices of those that it runs, ascending.
        reader: reads the data that it needs.
        buckets: of the gradients of its trained parameters.
        weights: changes the same.
        optimizer: of the same; None if there are none.
        optimizer_step: everything that a step does around the optimizer.
        executor: runs its actions.
        totals: that its losses are divided by.
        flow: runs the steps of an asynchronous schedule; None for other schedules.
        num_steps: steps of the whole training.
        layout: how samples become microbatches.
        least: samples that a step has at least.
        first_reader: the first rank that reads data; None if none does.
        size: of steps.
        history: the sizes of all batches since the first step.
        evaluator: for --eval-data; None without it.
        content: of its checkpoints.
        start: the checkpoint that it has gone on from; None for none.
        next_step: the index of the step that `step` runs next.
        should_end: whether a signal has asked a rank to save and to end; after a step, or after a
            flow, it is the same on all ranks.

    Args:
        job: what is trained.
        loop: how.
        rank: of this process.
        start: the checkpoint that it will go on from (`resume`).
    """

    def __init__(
        self, job: TrainingJob, loop: Loop, rank: int, start: Checkpoint | None = None
    ) -> None:
        plan = job.plan
        if job.device == "cpu":
            torch.set_num_threads(loop.threads or plan.threads or 1)
        else:
            torch.cuda.set_device(job.device)
        self.job, self.rank, self._watched = job, rank, ExitStack()
        self._actions = job.program.lists[plan.ranks[rank]]
        computed = (one for one in self._actions if isinstance(one, Compute))
        self.microbatches = sorted({one.microbatch for one in computed})
        sums, lines = buckets(job.program.sums), all_lines(plan.strategy, job.model.graph)
        self.groups = Groups(plan.ranks, rank, replace(job.program, sums=sums), job.device, lines)
        scale = loss_scale(shorter_dtype(job))
        self.part = make_part(job, self.groups, lambda: scale.value)
        self.layout, self.reader = layout_of(job, loop), reader_of(job, self.part)
        self.totals = loss_totals(job, self.part)
        with current_status().during(Phase.DATA):
            self._feed = make_feed(job, self.part, loop, self.microbatches)
        self._coming: Iterator[StepData] | None = None  # from the next step on
        self._given_data, self._lost = loop.data, tuple[str, ...]()
        self._set_rate: float | None = None
        self._takes_rate = loop.learning_rate is None
        where = data_name(loop.data, "--data")
        self._agreement = DataAgreement(where, self._feed.read, self.layout, self.groups)
        epoch = epoch_of(
            self._agreement.num_samples, self._feed.least, self.reader.reads, self.groups
        )
        self.least = epoch.least or self.layout.least
        self.size = StepSize(self.layout.count, len(epoch.readers))
        self.first_reader = min(epoch.readers, default=None)
        self.history, self.next_step = self._history(start), 0
        self.evaluator: Evaluator | None = None
        if loop.eval_data is not None:
            self.evaluator = self._evaluator(loop.eval_data, "--eval-data", loop.metrics)
        self.num_steps = number_of_steps(loop, epoch, self.history)
        self.optimizer = make_optimizer(
            OptimizerName(plan.optimizer),
            optimizer_groups(job.groups, self.part.optimizer_parameters),
            loop.learning_rate, loop.weight_decay,
        )  # fmt: skip
        if self.optimizer is not None:
            self.optimizer.register_step_pre_hook(lambda *_: self.part.forget_casts())
        self.buckets = GradientBuckets(
            self.part.gradient_accumulators, sums, self.groups, self.part.shards,
            non_contributing(plan.strategy, job.model.graph, self.groups.device),
            gradient_dtype(job.model.graph),
        )  # fmt: skip
        self.content = Content(job, self.part, self.optimizer, self.groups, self._data_state)
        self.start: Checkpoint | None = None
        self.should_end = False
        self._savers: dict[Path, Saver] = {}
        self.executor = self._executor(training_seed(job, loop))
        rules = _rules(job, loop, self.num_steps, self.groups)
        self.flow: Flow | None = None
        if plan.strategy.schedule.is_asynchronous:
            self.flow = Flow(
                job, self.part, self.buckets, self.optimizer, rules, self.groups, self.executor,
                self.totals,
            )  # fmt: skip
            self.weights: Weights = self.flow.weights
            self.optimizer_step = self.flow.optimizer_step
        else:
            self.weights = CurrentWeights()
            self.optimizer_step = self._optimizer_step(rules, scale)

    def _executor(self, seed: int) -> Executor:
        """Runs the actions of this device."""
        plan, program = self.job.plan, self.job.program
        crossing = as_it_crosses(self.job.model.graph, plan)
        # In flows, unlike in one step of few microbatches, a backward comes before a forward.
        backwards = frozenset({Direction.BACKWARD})
        flows = plan.strategy.schedule.is_asynchronous
        waiting = backwards if flows else waiting_for_sends(program.code)
        boxes = boxes_of(plan.strategy, crossing, self.groups.device)
        return Executor(self.part.stages, boxes, self.buckets, self.groups, waiting, seed)

    def _optimizer_step(self, rules: UpdateRules, scale: LossScale) -> OptimizerStep:
        """The steps of this device; it counts the gradients that no device before it has."""
        strategy, graph = self.job.plan.strategy, self.job.model.graph
        owned = tuple(
            parameter
            for name, parameter in self.part.stepped.items()
            if owns(strategy, graph, self.groups.device, name)
        )
        self.buckets.follow(self._actions)
        return OptimizerStep(
            self.optimizer, self.buckets, owned, self.part.shards, self.weights,
            rules=rules, scale=scale, masters=self.part.masters, together=self.groups.add_up,
            is_counted=len(self.job.losses) == 1 and self.job.losses[0].is_users,
        )  # fmt: skip

    # ------------------------------------------------------------------------ begin and end

    @classmethod
    def open(
        cls, request: TrainingRequest, check: Callable[[ProcessRank | None], None]
    ) -> "Trainer | None":
        """Meets the other ranks, reads what is trained, and goes on from a checkpoint.

        Args:
            check: refuses, before ranks meet, what does not fit the place of this process among
                those that torchrun has started (None outside it).

        Returns:
            The trainer; None on a rank that idles.

        Raises:
            PlannerError: if files, options and processes do not fit each other.
            Stopped: on a rank that has lost another one.
        """
        plan, loop, process = request.plan, request.loop, process_rank()
        with failure_reported(process):
            check_schedule(plan, loop)
            check(process)
        process = process or ProcessRank(0, 1, 0, 1)
        agreed = meet_others(plan, request.options, process)
        if process.rank >= len(plan.ranks):
            return None
        device = agreed.ranks[process.rank]
        introduce(plan, device, loop.hang_timeout)
        with ExitStack() as watched:
            watched.enter_context(hosts_watched(agreed.hosts, process.rank))
            with with_causes(plan, device):
                job, start = _read_job(request, agreed, process)
                trainer = cls(job, loop, process.rank, start)
                take_error_hook()
                if start is not None:
                    trainer.resume(start)
            trainer._watched = watched.pop_all()
        current_status().enter(Phase.BETWEEN)
        return trainer

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Gives errors their rank, stage and action, and tells them to other hosts."""
        with ExitStack() as failing:
            failing.push(self._watched)
            with with_causes(self.job.plan, self.groups.device):
                yield
            failing.pop_all()

    def close(self) -> None:
        """After the last step, with all other ranks."""
        with self.errors():
            self.part.shards.settle()
            self.groups.barrier()
        self.groups.close()
        self._close_savers()
        self._watched.close()

    def _close_savers(self) -> None:
        while self._savers:
            _, saver = self._savers.popitem()
            saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.close()
        else:  # the other ranks cannot be met any more
            self._close_savers()
            self._watched.__exit__(*error)

    # ------------------------------------------------------------------------ checkpoints

    def resume(self, start: Checkpoint) -> None:
        """Goes on from a checkpoint.

        Raises:
            FileError: if the checkpoint does not fit this device, or is damaged.
            LaunchError: if the ranks do not see the same one.
        """
        self.content.restore(start)
        self.history = self._history(start)
        self._restore_data(start)
        self.restore(start.record.extras, start.record.step)
        self.start = start

    def saver(self, folder: Path, keep: int) -> Saver:
        """The writer of checkpoints into a folder."""
        if folder not in self._savers:
            self._savers[folder] = Saver(self.content, folder, keep)
        return self._savers[folder]

    def extras(self) -> dict[str, Any]:
        """The state besides weights, statistics and optimizer, as JSON."""
        scale = self.optimizer_step.scale
        set_rate = {} if self._set_rate is None else {SET_RATE: self._set_rate}
        return {
            **set_rate,
            "loss_scale": {"value": scale.value, "good_steps": scale.good_steps},
            "batches": [[*part] for part in self.history.parts],
            GROUPS: settings(self.job.groups),
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
        if SET_RATE in extras and self._takes_rate:
            self.set_rate(float(extras[SET_RATE]))
        self.next_step, self._coming = step, None

    def set_rate(self, learning_rate: float) -> None:
        """Changes the learning rate, before its schedule, from the next step on; also of a training
        that goes on from a checkpoint, unless it is launched with --lr.
        """
        self._set_rate = learning_rate
        self.optimizer_step.set_rate(learning_rate)

    def _data_state(self) -> Any:
        """The state of the data that this rank reads, as JSON, before the next step."""
        state = self._feed.state(self.next_step, self.history)
        return None if state is None else {**state, "microbatches": self.microbatches}

    def _restore_data(self, start: Checkpoint) -> None:
        """Gives samplers and datasets the state that they had on this rank, else on another one
        that read the same microbatches. The orders of samples are the same on all ranks.
        """
        saved = self.content.saved_data(start)
        ranks = sorted(saved, key=lambda rank: (rank != self.rank, rank))
        same = [one for one in ranks if saved[one]["microbatches"] == self.microbatches]
        state = saved[(same or ranks)[0]] if saved else {}
        lost = self._feed.restore(state, bool(same))
        if not lost:
            return
        why = ""
        if saved and not same:
            why = " (no rank read the same microbatches when it was written)"
        self._lost = (
            f"{data_name(self._given_data, '--data')}: {' and '.join(lost)}: the state is as at the"
            f" begin of a training, not as at the checkpoint{why}; draw from torch's, numpy's or"
            " Python's own generators, which follow from the seed, or read without workers",
        )

    def _history(self, start: Checkpoint | None) -> BatchSizeHistory:
        """The sizes of all batches: those before a checkpoint, and those of this launch."""
        samples = self.layout.samples
        if start is None or "batches" not in start.record.extras:
            return BatchSizeHistory.begun(samples, self.least)
        before = BatchSizeHistory.read(start.record.extras["batches"])
        return before.then(start.record.step, samples, self.least)

    # ------------------------------------------------------------------------ steps

    def steps(self, count: int, every: Iterable[int | None] = ()) -> Iterator[IterationRecord]:
        """Some steps, one after the other; under an asynchronous schedule in flows.

        Args:
            count: how many.
            every: intervals in steps at which the pipeline has to be empty; None is never.
        """
        end, intervals = self.next_step + count, tuple(every)
        while self.next_step < end:
            if self.flow is None:
                yield self.step()
                continue
            stop = flow_end(self.next_step, end, self.layout.count, intervals)
            data = self._minibatches()
            for record in self.flow.run(data, self.next_step, stop - self.next_step):
                self.next_step += 1
                if self.next_step == stop:
                    self._agree_on_end()
                yield record

    def step(
        self, data: StepBatches | None = None, watch: MemoryTracker | None = None
    ) -> IterationRecord:
        """One step of the training. Under an asynchronous schedule it is a flow of its own.

        Args:
            data: of this device; None takes that of `batches`.
            watch: of the memory in use.
        """
        if data is None:
            data = self.batches()
        if self.flow is not None:
            coming = _again_and_again(data.by_microbatch)
            (record,) = self.flow.run(coming, self.next_step, 1, watch)
            self._agree_on_end()
        else:
            work = TrainingStep(
                self.next_step, data, self.optimizer_step, self.totals, self.size,
                self.groups,
            )  # fmt: skip
            record = self.executor.run(self._actions, work, step=self.next_step, watch=watch)
            record.loss, record.is_whole = work.loss, work.is_whole
            self.should_end = self.should_end or work.sums.end_requests > 0
        self.next_step += 1
        return record

    def _agree_on_end(self) -> None:
        """After a flow, where all ranks meet once more."""
        current_status().enter(Phase.BARRIER)
        (requests,) = self.groups.add_up([float(REQUEST.is_made)])
        self.should_end = self.should_end or requests > 0
        current_status().enter(Phase.BETWEEN)

    def watched(self, watch: MemoryTracker, data: StepBatches) -> IterationRecord:
        """Steps in which memory is watched, enough of them for its peak: one, or under an
        asynchronous schedule a flow in which all versions are alive.

        Args:
            watch: of the memory in use.
            data: that of one step, made before memory is watched. Copies of it are used, and freed
                after their last use, as the data of a real feed is.

        Returns:
            All actions.
        """
        batches = _Copies(data.by_microbatch)
        if self.flow is None:
            return self.step(StepBatches(data.num_microbatches, batches), watch)
        count = steps_to_show(self.flow.strategy)
        steps = self.flow.run(_again_and_again(batches), self.next_step, count, watch)
        self.next_step += sum(1 for _ in steps)
        return self.executor.record

    @property
    def uncounted(self) -> int:
        """Number of steps so far without counted targets, which were not run; under an asynchronous
        schedule that of minibatches, on the ranks that report their losses.
        """
        return self.optimizer_step.uncounted if self.flow is None else self.flow.uncounted

    def batches(self) -> StepBatches:
        """The data of this device in the next step."""
        comparing = self._agreement.step(self.next_step, self.history)
        with comparing, current_status().during(Phase.DATA):
            data = next(self._data())
            batches = zip(self.microbatches, map(self.local, data.batches), strict=False)
            return StepBatches(data.num_microbatches, dict(batches))

    def local(self, batch: Batch) -> Batch:
        """The part of a microbatch that this device needs, of the data that it is given."""
        return self.part.local(batch, self.job.losses)

    def _data(self) -> Iterator[StepData]:
        """The data of this device from the next step on."""
        if self._coming is None:
            self._coming = self._feed.steps(self.next_step, self.history, self._agreement.note)
        return self._coming

    def _minibatches(self) -> Iterator[Batch]:
        """The microbatches of this device from the next step on; those of that step are compared
        with other ranks' first.
        """
        with self._agreement.step(self.next_step, self.history):
            begun = deque(next(self._data()).batches)
        later = chain.from_iterable(data.batches for data in self._data())
        return chain((begun.popleft() for _ in range(len(begun))), later)

    def notes(self) -> tuple[str, ...]:
        """On data that is left out and state that was lost, as far as any rank knows; all ranks
        call it.
        """
        known = self.groups.gather((*self._feed.notes(), *self._lost))
        return tuple(dict.fromkeys(note for notes in known for note in notes))

    # ------------------------------------------------------------------------ evaluation

    def evaluate(self, data: object, option: str, metrics: Sequence[str] = ()) -> dict[str, float]:
        """The figures of the model as it is, over data of a user.

        Args:
            option: how messages call the data.
            metrics: functions of the user, besides loss and accuracy.
        """
        return self._evaluator(data, option, metrics)()

    def _evaluator(self, data: object, option: str, metrics: Sequence[str]) -> Evaluator:
        with current_status().during(Phase.EVALUATION):
            samples = EvalData(data, option, self.layout, self.microbatches, self.reader)
        crossing = as_it_crosses(self.job.model.graph, self.job.plan)
        return Evaluator(
            self.job, self.part, crossing, self.groups, samples, self.layout, self.totals, metrics
        )


def _read_job(
    request: TrainingRequest, agreed: LaunchAgreement, process: ProcessRank
) -> tuple[TrainingJob, Checkpoint | None]:
    """What is trained, and the checkpoint to go on from; every rank with a device calls it.

    Raises:
        PlannerError: if files and options do not fit each other, or the ranks have others.
        Stopped: if another rank has ended.
    """
    choices = request.loss, request.launching.device
    job = prepare(request.plan, request.path, request.launching.model, process, choices)
    job = replace(job, groups=trained_groups(job.model, request.loop))
    # Before any rank can write a checkpoint.
    start = start_of(request.checkpoints, restarted=agreed.restarted)
    if start is not None:
        check_fits(start, job)
    compare_ranks(process, len(job.plan.ranks), {
        "model": job.model.hash[:HASH_DIGITS],
        "checkpoint": "" if start is None else start.path.name,
        "kind of device": job.device.partition(":")[0],
    })  # fmt: skip
    with_ranks = replace(request.plan, ranks=agreed.ranks, hosts=())
    return with_choices(replace(job, plan=with_ranks), request.loop), start


def _again_and_again(batches: Mapping[int, Batch]) -> Iterator[Batch]:
    """The same data in all steps."""
    while True:
        for microbatch in sorted(batches):
            yield batches[microbatch]


class _Copies(dict[int, Batch]):
    """Microbatches whose data is copied at each access, so that it is freed after its last use, as
    data of a real feed is. The originals stay in memory.
    """

    def __getitem__(self, microbatch: int) -> Batch:
        batch = super().__getitem__(microbatch)
        inputs, targets = (
            {name: tensor.clone() for name, tensor in tensors.items()}
            for tensors in (batch.inputs, batch.targets)
        )
        return replace(batch, inputs=inputs, targets=targets)


def _rules(job: TrainingJob, loop: Loop, num_steps: int, groups: Groups) -> UpdateRules:
    rate = loop.learning_rate
    if rate is None:
        rate = DEFAULT_LEARNING_RATES[OptimizerName(job.plan.optimizer)]
    factor = rate_factor(loop.lr_schedule, num_steps)
    reports = any(groups.gather(loop.reports_loss or loop.log_file is not None))
    return UpdateRules(rate, factor, loop.clip, loop.nan, reports)
