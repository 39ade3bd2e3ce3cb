"""strategy.json -> this process's part of the training, and its measurements."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from planner.files import read_plan
from planner.launcher.checkpoints.folder import Checkpoint
from planner.launcher.checkpoints.keeping import (
    NOTHING_KEPT,
    RESTARTS,
    Keeping,
    check_fits,
    start_of,
)
from planner.launcher.checkpoints.keeping import check as check_keeping
from planner.launcher.checkpoints.saver import Saver, resume
from planner.launcher.clocks import Clock
from planner.launcher.failures.causes import introduce, with_causes
from planner.launcher.failures.hosts import hosts_watched
from planner.launcher.failures.page import HANG_TIMEOUT_S
from planner.launcher.feed import Copies
from planner.launcher.greeting import compare_jobs, failure_told, meet_others
from planner.launcher.job import TrainingJob, check_ranks, prepare
from planner.launcher.part import staying
from planner.launcher.report import Findings, LaunchReport, make_report
from planner.launcher.runtime import Record
from planner.launcher.settings import Settings, check
from planner.launcher.trainer import Trainer
from planner.launcher.world import ProcessRank, process_rank
from planner.model.losses import NO_OPTIONS, LossOptions
from planner.profilers.storages import watching
from planner.traces.read import measured_by
from planner.traces.write import write_trace

KEPT_STEPS = 50  # the last ones, whose actions are kept


def launch(
    strategy_path: Path,
    *,
    model_path: Path | None = None,
    steps: int = 10,
    learning_rate: float | None = None,
    loss: LossOptions = NO_OPTIONS,
    data: str | None = None,
    device: str = "auto",
    seed: int | None = None,
    threads: int | None = None,
    hang_timeout: float = HANG_TIMEOUT_S,
    trace: Path | None = None,
    track_memory: bool = False,
    keeping: Keeping = NOTHING_KEPT,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], None] = lambda step: None,
) -> LaunchReport | None:
    """Trains as the strategy says; every rank that torchrun starts calls it.

    Args:
        strategy_path: strategy.json.
        model_path: the ONNX file; None takes the plan's, relative to the strategy's folder.
        steps: optimizer steps, with those before the checkpoint that it goes on from.
        learning_rate: None takes the optimizer's usual one.
        loss: functions and dimensions of classes that replace those of the plan.
        data: module:function; None draws random data, the same in each step.
        device: auto, cpu or cuda.
        seed: of random data and of random operators; None takes the plan's.
        threads: of torch on a CPU; None takes the profile's.
        hang_timeout: time that a rank may always stand in one action, in s; 0 for ever.
        trace: file that the median iteration is written to, for Perfetto.
        track_memory: whether to run one more step, whose memory is watched and whose time is not
            reported.
        keeping: the checkpoints to write and to go on from.
        report: gets a line of text from a rank that idles.
        progress: on rank 0, gets the number of steps done, after each.

    Returns:
        The report on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one; that one has a message for the user.
    """
    settings = Settings(steps, learning_rate, data, seed, threads, hang_timeout)
    seat = process_rank()
    with failure_told(seat):
        check(settings)
        check_keeping(keeping)
        plan = read_plan(strategy_path)
        check_ranks(plan, strategy_path, seat)
    seat = seat or ProcessRank(0, 1, 0, 1)
    agreed = meet_others(plan, settings, (loss, device), seat)
    if seat.rank >= len(plan.ranks):
        report(f"rank {seat.rank} idles: the strategy needs {len(plan.ranks)} of the ranks")
        return None
    mine = agreed.ranks[seat.rank]
    introduce(plan, mine, settings.hang_timeout)
    with hosts_watched(agreed.hosts, seat.rank), with_causes(plan, mine):
        job = prepare(plan, strategy_path, model_path, seat, (loss, device))
        # Each agent of torchrun counts its own restarts, so the ranks have to agree on them.
        start = start_of(keeping, {RESTARTS: str(int(agreed.restarted))})
        compare_jobs(job, seat, "" if start is None else start.path.name)
        job = replace(job, plan=replace(plan, ranks=agreed.ranks, hosts=()))
        if start is not None:
            check_fits(start, job, settings.steps)
        findings, clocks = _trained(
            job, settings, (keeping, start), seat, progress, track_memory=track_memory
        )
    if seat.rank > 0:
        return None
    made = make_report(job.plan, job.model.graph, job.losses, findings, clocks)
    made = replace(made, notes=(*job.model.notes, *_resumed(start), *made.notes))
    if trace is not None:
        names = {device.device: device.name for device in plan.prediction.devices}
        write_trace(made.timeline, names, trace, measured_by(plan))
    return made


def _trained(
    job: TrainingJob,
    settings: Settings,
    checkpoints: tuple[Keeping, Checkpoint | None],
    seat: ProcessRank,
    progress: Callable[[int], None],
    *,
    track_memory: bool,
) -> tuple[list[Findings], list[Clock]]:
    """Trains; the findings and clocks of all ranks."""
    trainer = Trainer(job, settings, seat.rank)
    world = trainer.world
    keeping, start = checkpoints
    if start is not None:
        resume(trainer, job, start)
    saver = Saver(trainer, job, keeping, settings.steps) if keeping.folder is not None else None
    records: deque[Record] = deque(maxlen=KEPT_STEPS)
    losses, begun_s, iterations_s = [], [], []
    before = world.read_clocks()
    for step in range(trainer.next_step, settings.steps):
        record = trainer.step()
        records.append(record)
        losses.append(record.loss)
        begun_s.append(record.begun_s)
        iterations_s.append(record.iteration_s)
        if seat.rank == 0:
            progress(step + 1)
        if saver is not None:
            saver.after(step + 1)
    if saver is not None:
        saver.finish()
    clocks = [Clock(*pair) for pair in zip(before, world.read_clocks(), strict=True)]
    own = Findings(
        device=world.device,
        peaks_bytes=_watched(trainer, job.device) if track_memory else None,
        loss=tuple(losses),
        begun_s=tuple(begun_s),
        iterations_s=tuple(iterations_s),
        records=tuple(records),
        **_machine(job.device),
    )
    findings = world.gather(own)
    world.close()
    return findings, clocks


def _resumed(start: Checkpoint | None) -> tuple[str, ...]:
    """Notes on the checkpoint that a launch went on from."""
    return () if start is None else (*start.notes, f"went on from {start.path}")


def _watched(trainer: Trainer, device: str) -> tuple[int, ...]:
    """Memory in one more step, by event, in bytes. Its data is freed after its last use, as that
    of a real feed is.
    """
    batches = Copies(trainer.batches())
    stay = staying(trainer.part, trainer.gradients, trainer.optimizer)
    with watching(device, stay) as watch:
        return tuple(trainer.step(batches, watch).peaks_bytes)


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
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return _Machine(peak_bytes=peak * unit, type="cpu", threads=threads)
