"""What is asked of a training -> this process's part of it, and its measurements."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from planner.artefacts.plan import Plan
from planner.launcher.asynchronous import check_schedule, flow_end
from planner.launcher.clocks import Clock
from planner.launcher.device_part import staying
from planner.launcher.executor import IterationRecord
from planner.launcher.failures.errors import introduce, peak_bytes, with_causes
from planner.launcher.failures.hosts import hosts_watched
from planner.launcher.job import TrainingJob, check_ranks
from planner.launcher.rendezvous import ProcessRank, failure_reported, meet_others, process_rank
from planner.profilers.storages import watching
from planner.simulator.traces.read import measured_by
from planner.simulator.traces.write import write_trace
from planner.training.checkpoints.folder import Checkpoint
from planner.training.checkpoints.keeping import check_left
from planner.training.checkpoints.saver import Saver, resume
from planner.training.following import Follower
from planner.training.joining import Asked, read_job, seated
from planner.training.report import Evaluation, Findings, LaunchReport, make_report
from planner.training.trainer import Trainer

Progress = Callable[[int, int, float | None], None]
KEPT_STEPS = 50  # the last ones, whose actions are kept


def launch(asked: Asked, report: Callable[[str], None], progress: Progress) -> LaunchReport | None:
    """Trains as is asked; every rank that torchrun starts calls it.

    Args:
        asked: the plan and the options.
        report: gets a line of text from a rank that idles.
        progress: on rank 0, gets after each step the number of steps done, that of all, and the
            loss of all ranks where it is known.

    Returns:
        The report on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one; that one has a message for the user.
    """
    plan, loop, launching = asked.plan, asked.loop, asked.launching
    seat = process_rank()
    with failure_reported(seat):
        check_schedule(plan, loop)
        check_ranks(plan, asked.path, seat)
    seat = seat or ProcessRank(0, 1, 0, 1)
    agreed = meet_others(plan, asked.options, seat)
    if seat.rank >= len(plan.ranks):
        report(f"rank {seat.rank} idles: the strategy needs {len(plan.ranks)} of the ranks")
        return None
    mine = agreed.ranks[seat.rank]
    introduce(plan, mine, loop.hang_timeout)
    with hosts_watched(agreed.hosts, seat.rank), with_causes(plan, mine):
        job, start = read_job(asked, agreed, seat)
        done = _trained(job, asked, start, seat, progress)
    if seat.rank > 0:
        return None
    made = make_report(
        seated(plan, agreed), job.model.graph, job.losses, done.findings, done.clocks
    )
    said = (*_chosen(plan, job.plan), *made.notes, *_skipped(done, made.steps), *done.notes)
    notes = (*job.model.notes, *_resumed(start), *said)
    made = replace(made, notes=notes, evaluations=done.evaluations)
    if launching.trace is not None:
        names = {device.device: device.name for device in plan.prediction.devices}
        write_trace(made.timeline, names, launching.trace, measured_by(plan))
    return made


def _chosen(planned: Plan, run: Plan) -> list[str]:
    """Notes on what was chosen otherwise than planned, which changes times and memory."""
    pairs = (planned.optimizer, run.optimizer), (planned.dtype, run.dtype)
    return [f"planned for {one}, run with {other}" for one, other in pairs if one != other]


def _skipped(done: "_Trained", steps: int) -> list[str]:
    """A note on steps that left the weights as they were."""
    if not done.skipped:
        return []
    return [f"{done.skipped} of {steps} steps left out: a loss or gradient was not finite"]


@dataclass(frozen=True, slots=True)
class _Trained:
    """What a training leaves behind.

    Attributes:
        findings: of all ranks.
        clocks: of all ranks.
        skipped: number of steps that left the weights as they were.
        evaluations: all figures, in their order.
        notes: on the evaluations.
    """

    findings: list[Findings]
    clocks: list[Clock]
    skipped: int
    evaluations: tuple[Evaluation, ...]
    notes: tuple[str, ...]


def _trained(
    job: TrainingJob,
    asked: Asked,
    start: Checkpoint | None,
    seat: ProcessRank,
    progress: Progress,
) -> _Trained:
    """Runs the steps that are left, and what stands around them."""
    trainer = Trainer(job, asked.loop, seat.rank)
    groups = trainer.groups
    if start is not None:
        check_left(start, trainer.num_steps)
        resume(trainer, job, start)
    saver = None
    if asked.checkpoints.checkpoint is not None:
        saver = Saver(trainer, job, asked.checkpoints, trainer.num_steps)
    records: deque[IterationRecord] = deque(maxlen=KEPT_STEPS)
    losses, begun_s, iterations_s = [], [], []
    before = groups.read_clocks()
    follower = Follower(trainer, asked.loop, seat.rank)
    while trainer.next_step < trainer.num_steps:
        for record in trainer.run(_until(trainer, asked) - trainer.next_step):
            done = trainer.next_step
            records.append(record)
            losses.append(record.loss)
            begun_s.append(record.begun_s)
            iterations_s.append(record.iteration_s)
            follower.after(done - 1, record)
            if seat.rank == 0:
                progress(done, trainer.num_steps, trainer.optimizer_step.last.loss)
            if saver is not None:
                saver.after(done)
    follower.close()
    if saver is not None:
        saver.finish()
    clocks = [Clock(*pair) for pair in zip(before, groups.read_clocks(), strict=True)]
    flow = None if trainer.flow is None else trainer.flow.longest
    own = Findings(
        device=groups.device,
        ended_s=() if flow is None else flow.ended_s,
        peaks_bytes=_watched(trainer, job.device) if asked.launching.track_memory else None,
        loss=tuple(losses),
        begun_s=tuple(begun_s),
        iterations_s=tuple(iterations_s),
        records=tuple(records) if flow is None else (flow.record,),
        **_machine(job.device),
    )
    findings = groups.gather(own)
    groups.close()
    return _Trained(
        findings,
        clocks,
        trainer.optimizer_step.skipped,
        tuple(follower.evaluations),
        follower.notes,
    )


def _resumed(start: Checkpoint | None) -> tuple[str, ...]:
    """Notes on the checkpoint that a launch went on from."""
    return () if start is None else (*start.notes, f"went on from {start.path}")


def _until(trainer: Trainer, asked: Asked) -> int:
    """The number of steps up to which a training runs on; under an asynchronous schedule the one
    at which the pipeline has to be empty.
    """
    if trainer.flow is None:
        return trainer.num_steps
    every = asked.checkpoints.checkpoint_every, asked.loop.eval_every
    count = asked.plan.strategy.num_microbatches
    return flow_end(trainer.next_step, trainer.num_steps, count, every)


def _watched(trainer: Trainer, device: str) -> tuple[int, ...]:
    """Memory in more steps, by event, in bytes."""
    stay = staying(trainer.part, trainer.buckets, trainer.optimizer, trainer.weights.tensors())
    data = trainer.batches()
    with watching(device, stay) as watch:
        return tuple(trainer.watched(watch, data).peaks_bytes)


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
