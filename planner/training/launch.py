"""`launch`: the planner's own loop of a training: steps, log, evaluations, checkpoints, report."""

import math
import shlex
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TypedDict

import torch

from planner.artefacts.plan import Plan
from planner.launcher.clocks import Clock
from planner.launcher.device_part import staying
from planner.launcher.executor import IterationRecord
from planner.launcher.failures.errors import peak_bytes
from planner.launcher.failures.rank import current_rank
from planner.launcher.failures.requests import REQUEST
from planner.launcher.job import TrainingJob, check_ranks
from planner.launcher.rendezvous import process_rank
from planner.launcher.totals import why_nothing_counts
from planner.launcher.trained_groups import with_rest
from planner.launcher.updates import StepResult
from planner.profilers.storages import watching
from planner.simulator.traces.read import measured_by
from planner.simulator.traces.write import write_trace
from planner.support.errors import LaunchError, Preempted
from planner.training.checkpoints.folder import Checkpoint, name_of
from planner.training.checkpoints.start import check_left
from planner.training.evaluation import Evaluation
from planner.training.log import Log
from planner.training.options import Checkpoints, TrainingRequest
from planner.training.report import LaunchReport, RankMeasurements, make_report
from planner.training.trainer import Trainer

Progress = Callable[[int, int, float | None], None]
KEPT_STEPS = 50  # the last ones, whose actions are kept


class _Timed:
    """Steps of one kind, and their times.

    Attributes:
        records: of the last ones.
        times: start and length of each.
    """

    def __init__(self) -> None:
        self.records: deque[IterationRecord] = deque(maxlen=KEPT_STEPS)
        self.times: list[tuple[float, float]] = []

    def add(self, record: IterationRecord) -> None:
        """One more."""
        self.records.append(record)
        self.times.append((record.begun_s, record.iteration_s))


def launch(
    request: TrainingRequest, report: Callable[[str], None], progress: Progress
) -> LaunchReport | None:
    """Trains as is request; every rank that torchrun starts calls it.

    Args:
        request: the plan and the options.
        report: gets a line of text from a rank that idles.
        progress: on rank 0, gets after each step the number of steps done, that of all, and the
            loss of all ranks where it is known.

    Returns:
        The report on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one; that one has a message for the user.
        Preempted: if a signal has asked to save and to end, on all ranks.
    """
    plan, trace = request.plan, request.launching.trace
    trainer = Trainer.open(request, partial(check_ranks, plan, request.path))
    if trainer is None:
        process = process_rank()
        assert process is not None, "one process alone has a device"
        report(f"rank {process.rank} idles: the strategy needs {len(plan.ranks)} of the ranks")
        return None
    with _end_requests(request.checkpoints), trainer, trainer.errors():
        loop = _OwnLoop(trainer, request, progress)
        ranks, clocks = loop.run()
        data_notes = () if loop.is_early else trainer.notes()
    if loop.is_early:
        folder = request.checkpoints.checkpoint
        raise Preempted(
            f"{folder}: {name_of(trainer.next_step)} of {trainer.num_steps} steps is written, as a"
            f" signal asked; go on with --resume {shlex.quote(str(folder))}"
        )
    if trainer.rank > 0:
        return None
    job, graph = trainer.job, trainer.job.model.graph
    planned = replace(plan, ranks=job.plan.ranks, hosts=())
    launch_report = make_report(planned, graph, job.losses, ranks, clocks)
    notes = (
        *job.model.notes,
        *_resume_notes(trainer.start),
        *_option_notes(plan, job.plan),
        *launch_report.notes,
        *data_notes,
        *_uncounted_notes(job, ranks),
        *_skip_notes(trainer.optimizer_step.skipped, launch_report.steps),
        *(() if trainer.evaluator is None else trainer.evaluator.notes),
    )
    if trace is not None:
        names = {device.device: device.name for device in plan.prediction.devices}
        write_trace(launch_report.timeline, names, trace, measured_by(plan))
    failure = _failure(launch_report.loss, loop.results, trainer.num_steps)
    if failure is not None and request.checkpoints.checkpoint is not None:
        path = request.checkpoints.checkpoint / name_of(trainer.num_steps)
        failure = f"{failure}; {path} has the weights of the last step"
    return replace(
        launch_report, notes=notes, evaluations=tuple(loop.evaluations),
        groups=with_rest(job.groups, graph), failure=failure,
    )  # fmt: skip


def _end_requests(checkpoints: Checkpoints) -> AbstractContextManager[None]:
    """Takes signals for requests to save and to end meanwhile, if there is a folder to save to."""
    if checkpoints.checkpoint is None:
        return nullcontext()
    return REQUEST.awaited(checkpoints.save_signal, is_rank=current_rank() is not None)


def _resume_notes(start: Checkpoint | None) -> tuple[str, ...]:
    """On the checkpoint that a launch went on from."""
    return () if start is None else (*start.notes, f"went on from {start.path}")


def _option_notes(planned: Plan, run: Plan) -> list[str]:
    """On options that are not the planned ones, which changes times and memory."""
    pairs = (planned.optimizer, run.optimizer), (planned.dtype, run.dtype)
    return [f"planned for {one}, run with {other}" for one, other in pairs if one != other]


def _uncounted_notes(job: TrainingJob, ranks: Sequence[RankMeasurements]) -> list[str]:
    """On steps, or minibatches that step alone, without counted targets."""
    alone = job.plan.strategy.schedule.is_asynchronous
    number = sum(one.uncounted for one in ranks) if alone else ranks[0].uncounted
    if not number:
        return []
    why = why_nothing_counts(job)
    if alone:
        return [f"{number} minibatches had a loss and gradients of zero: {why}"]
    return [f"{number} of {len(ranks[0].loss)} steps left out: {why}"]


def _skip_notes(skipped: int, steps: int) -> list[str]:
    """On steps that left the weights as they were."""
    if not skipped:
        return []
    return [f"{skipped} of {steps} steps left out: a loss or gradient was not finite"]


def _failure(losses: Sequence[float], results: Sequence[StepResult], num_steps: int) -> str | None:
    """Why a launch has failed whose losses are not finite from some step on to the last one; None
    if it has not. Steps that were not run have no loss. If the last step was left out (--nan skip),
    the weights of before are sound.

    Args:
        losses: of the steps of this launch.
        results: of the same.
        num_steps: of the whole training.
    """
    run = [i for i, result in enumerate(results) if result.counted]
    wrong = [*takewhile(lambda i: not math.isfinite(losses[i]), reversed(run))]
    if not wrong or (results[wrong[0]].skipped and len(wrong) < len(run)):
        return None
    begun = num_steps - len(losses)
    return (
        f"the loss is not finite from step {begun + wrong[-1]} on to the last one,"
        f" {num_steps - 1}; lower --lr, bound gradients by --clip, or look at the data of that step"
    )


class _OwnLoop:
    """The planner's own loop on one rank.

    Attributes:
        evaluations: in their order.
        results: of each step.
        is_early: whether a signal has asked to end before the last step, which is done after a
            checkpoint.
    """

    def __init__(self, trainer: Trainer, request: TrainingRequest, progress: Progress) -> None:
        self._trainer, self._loop, self._progress = trainer, request.loop, progress
        self._checkpoints, self._track_memory = request.checkpoints, request.launching.track_memory
        if trainer.start is not None:
            check_left(trainer.start, trainer.num_steps)
        folder, log_file = request.checkpoints.checkpoint, request.loop.log_file
        self._saver = self._log = None
        if folder is not None:
            self._saver = trainer.saver(folder, request.checkpoints.checkpoint_keep)
        if log_file is not None and trainer.rank == 0:
            self._log = Log(log_file, trainer.next_step)
        self.evaluations, self.results = list[Evaluation](), list[StepResult]()
        self._losses, self._whole, self._short = list[float](), _Timed(), _Timed()
        self.is_early = False

    def run(self) -> tuple[list[RankMeasurements], list[Clock]]:
        """Runs the steps that are left, and what stands around them.

        Returns:
            The measurements and the clocks of all ranks; none if it has ended early.
        """
        trainer = self._trainer
        before = trainer.groups.read_clocks()
        every = self._loop.eval_every, self._checkpoints.checkpoint_every
        for record in trainer.steps(trainer.num_steps - trainer.next_step, every):
            self._after(record)
            if self.is_early:
                break
        if self._log is not None:
            self._log.close()
        if self._saver is not None:
            self._saver.finish()
        if self.is_early:
            return [], []
        clocks = [Clock(*pair) for pair in zip(before, trainer.groups.read_clocks(), strict=True)]
        return trainer.groups.gather(self._measurements()), clocks

    def _after(self, record: IterationRecord) -> None:
        """What follows a step."""
        trainer, saver = self._trainer, self._saver
        done, total, last = trainer.next_step, trainer.num_steps, trainer.optimizer_step.last
        self.is_early = trainer.should_end and saver is not None and done < total
        self._losses.append(record.loss)
        self.results.append(last)
        if last.counted:
            (self._whole if record.is_whole else self._short).add(record)
        if self._log is not None:
            self._log.step(done, last, record.iteration_s)
        # A machine that is about to be taken away has no time for evaluations.
        if not self.is_early and _is_due(done, total, self._loop.eval_every):
            self._evaluate(done)
        if trainer.rank == 0:
            self._progress(done, total, last.loss)
        if saver is not None:
            if saver.has_failed:
                saver.finish()
            if self.is_early or _is_due(done, total, self._checkpoints.checkpoint_every):
                saver.save(done, trainer.extras())

    def _evaluate(self, done: int) -> None:
        if self._trainer.evaluator is not None:
            self.evaluations.append(Evaluation(done, self._trainer.evaluator()))
            if self._log is not None:
                self._log.evaluation(self.evaluations[-1])

    def _measurements(self) -> RankMeasurements:
        """What this rank has measured: of whole steps, if there were any.

        Raises:
            LaunchError: if no step was run.
        """
        trainer, timed = self._trainer, self._whole if self._whole.times else self._short
        if not timed.times:
            why = why_nothing_counts(trainer.job)
            raise LaunchError(f"no step was run: in each of {len(self._losses)}, {why}")
        are_whole = timed is self._whole
        peaks_bytes = _watched(trainer, are_whole) if self._track_memory else None
        begun_s, iterations_s = zip(*timed.times, strict=True)
        flow = None if trainer.flow is None else trainer.flow.longest
        return RankMeasurements(
            device=trainer.groups.device,
            ended_s=() if flow is None else flow.ended_s,
            peaks_bytes=peaks_bytes,
            loss=tuple(self._losses),
            uncounted=trainer.uncounted,
            begun_s=begun_s,
            iterations_s=iterations_s,
            records=tuple(timed.records) if flow is None else (flow.record,),
            are_whole=are_whole,
            host_bytes=trainer.part.host_bytes,
            **_machine(trainer.job.device),
        )


def _is_due(done: int, total: int, every: int | None) -> bool:
    """Whether something that is done at intervals, and at the end, is due after some steps."""
    return done == total or (every is not None and done % every == 0)


def _watched(trainer: Trainer, whole: bool) -> tuple[int, ...]:
    """Memory in more steps, by event, in bytes; the last one is whole, if there are such steps."""
    stay = staying(trainer.part, trainer.buckets, trainer.optimizer, trainer.weights.tensors())
    while True:
        data = trainer.batches()
        with watching(trainer.job.device, stay) as watch:
            record = trainer.watched(watch, data)
        if trainer.optimizer_step.last.counted and record.is_whole >= whole:
            return tuple(record.peaks_bytes)


class _Machine(TypedDict):
    peak_bytes: int
    type: str
    threads: int


def _machine(device: str) -> _Machine:
    threads = torch.get_num_threads()
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        peak = torch.cuda.max_memory_allocated(device)
        return _Machine(peak_bytes=peak, type=name, threads=threads)
    return _Machine(peak_bytes=peak_bytes(), type="cpu", threads=threads)
