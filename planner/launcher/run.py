"""strategy.json -> this process's part of the training, and its measurements."""

import math
import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from torch.optim import Optimizer

from planner.errors import FileError, LaunchError, OptionError
from planner.files import read_plan
from planner.graph import Graph, losses_of, main_dtype, parameters_by_name, retyped
from planner.launcher.clocks import Clock
from planner.launcher.feed import (
    BatchNeeds,
    Copies,
    Feed,
    synthetic_feed,
    user_feed,
)
from planner.launcher.gradients import GradientBuffers, make_optimizer
from planner.launcher.processes import torchrun_command
from planner.launcher.report import Findings, LaunchReport, make_report
from planner.launcher.runtime import Record, Runtime, StageRunner
from planner.launcher.world import ProcessRank, World, choose_device, process_rank
from planner.model import Model, load
from planner.model.losses import NO_OPTIONS, Loss, LossOptions, chosen, losses
from planner.operators import parameters, to_torch
from planner.operators.criteria import Criterion, criterion
from planner.operators.precision import autocast
from planner.partition import check_agreement
from planner.plan import Plan
from planner.problem import Optimizer as OptimizerName
from planner.profilers.storages import watching
from planner.schedules.actions import Compute, Program, waiting_for_sends
from planner.schedules.dry_run import dry_run
from planner.schedules.program import program
from planner.strategy import operator_indices, used_devices, violations
from planner.support.named import function_named
from planner.traces.read import measured_by
from planner.traces.write import write_trace

KEPT_STEPS = 50  # the last ones, whose actions are kept


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `launch` that the training itself asks for."""

    steps: int = 10
    learning_rate: float | None = None
    data: str | None = None
    seed: int | None = None
    threads: int | None = None
    trace: Path | None = None
    track_memory: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The stages and parameters of one device.

    Attributes:
        stages: by index.
        values: its parameters by name; several stages share tied ones.
        trained: those of them that are trained.
    """

    stages: dict[int, StageRunner]
    values: dict[str, Tensor]
    trained: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that a rank knows before it meets the others.

    Attributes:
        plan: strategy.json.
        model: trained as the plan says.
        program: the action lists of all devices.
        losses: of one microbatch; their sum is trained.
        device: where this rank computes, in torch's words.
    """

    plan: Plan
    model: Model
    program: Program
    losses: tuple[Loss, ...]
    device: str


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
    trace: Path | None = None,
    track_memory: bool = False,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], None] = lambda step: None,
) -> LaunchReport | None:
    """Trains as the strategy says; every rank that torchrun starts calls it.

    Args:
        strategy_path: strategy.json.
        model_path: the ONNX file; None takes the plan's, relative to the strategy's folder.
        steps: optimizer steps.
        learning_rate: None takes the optimizer's usual one.
        loss: functions and dimensions of classes that replace those of the plan.
        data: module:function; None draws random data, the same in each step.
        device: auto, cpu or cuda.
        seed: of random data and of random operators; None takes the plan's.
        threads: of torch on a CPU; None takes the profile's.
        trace: file that the median iteration is written to, for Perfetto.
        track_memory: whether to run one more step, whose memory is watched and whose time is not
            reported.
        report: gets a line of text from a rank that idles.
        progress: on rank 0, gets the number of steps done, after each.

    Returns:
        The report on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one; that one has a message for the user.
    """
    settings = Settings(steps, learning_rate, data, seed, threads, trace, track_memory)
    seat = process_rank()
    plan = read_plan(strategy_path)
    _check_ranks(plan, strategy_path, seat)
    seat = seat or ProcessRank(0, 1, 0, 1)
    if seat.rank >= len(plan.ranks):
        report(f"rank {seat.rank} idles: the strategy needs {len(plan.ranks)} of the ranks")
        return None
    job = _prepare(plan, strategy_path, model_path, seat, (loss, device))
    _check_settings(settings)
    return _train(job, settings, seat, progress)


# -------------------------------------------------------------------- before meeting the others


def _check_ranks(plan: Plan, path: Path, seat: ProcessRank | None) -> None:
    needed = len(plan.ranks)
    if tuple(sorted(plan.ranks)) != used_devices(plan.strategy):
        raise FileError(
            f"{path}: ranks: expected each of the devices {used_devices(plan.strategy)} once, "
            f"got {plan.ranks}; run: planner solve"
        )
    if seat is None and needed > 1:
        raise LaunchError(
            f"{path}: the strategy uses {needed} devices, and this is one process; run one of\n"
            f"  {torchrun_command(path, needed)}\n"
            f"  planner launch {shlex.quote(str(path))} --nproc {needed}"
        )
    if seat is not None and seat.world_size < needed:
        raise LaunchError(
            f"{path}: the strategy uses {needed} devices, torchrun started "
            f"{'1 process' if seat.world_size == 1 else f'{seat.world_size} processes'}; "
            f"run: {torchrun_command(path, needed)}"
        )


def _check_settings(settings: Settings) -> None:
    if settings.steps < 1:
        raise OptionError(f"--steps: expected at least 1, got {settings.steps}")
    if settings.threads is not None and settings.threads < 1:
        raise OptionError(f"--threads: expected at least 1, got {settings.threads}")
    rate = settings.learning_rate
    if rate is not None and not 0 <= rate < math.inf:
        raise OptionError(f"--lr: expected a finite number of at least 0, got {rate}")
    if settings.data is not None:
        function_named(settings.data, "--data", LaunchError)


def _prepare(
    plan: Plan,
    path: Path,
    model_path: Path | None,
    seat: ProcessRank,
    choices: tuple[LossOptions, str],
) -> TrainingJob:
    """Checks everything that can be checked without the other ranks.

    Args:
        choices: the options --loss and --device.
    """
    if plan.optimizer not in tuple(OptimizerName):
        raise FileError(
            f"{path}: optimizer: expected one of {', '.join(OptimizerName)}, got {plan.optimizer!r}"
        )
    model = _load(plan, path, model_path)
    partition = path.with_suffix(".onnx")
    if seat.local_rank == 0 and partition.is_file() and not partition.samefile(model.path):
        check_agreement(plan, partition)
    wrong = violations(plan.strategy, model.graph, max(plan.ranks) + 1)
    if wrong:
        raise FileError(
            f"{path}: the strategy does not fit {model.path}: {'; '.join(wrong)}; "
            "run: planner solve"
        )
    lists = program(plan.strategy, model.graph, plan.prediction.stages)
    blocked = dry_run(lists)
    if blocked is not None:
        raise LaunchError(f"{path}: the schedule would hang: {blocked}; run: planner solve")
    types = frozenset(device.type for device in plan.prediction.devices)
    device = choose_device(choices[1], seat, len(plan.ranks), types)
    graph = replace(model.graph, losses=chosen(losses_of(model.graph), choices[0]))
    used = losses(graph)
    for one in used:
        criterion(one)  # raises where the user's function is not there
    return TrainingJob(plan, model, lists, used, device)


def _load(plan: Plan, path: Path, model_path: Path | None) -> Model:
    """The model that the plan was made for, trained as the profile said."""
    if model_path is None and plan.model_path is None:
        raise LaunchError(f"{path}: names no model; give --model FILE")
    file = model_path or path.parent / str(plan.model_path)
    if model_path is None and not file.is_file():
        raise LaunchError(f"{path}: made for {file}, which is not there; give --model FILE")
    read = partial(
        load, file, dimensions=plan.dimensions, tie=plan.tie, untie=plan.untie,
        batch_norm=plan.batch_norm, loss=_planned(plan),
    )  # fmt: skip
    model = read()
    if plan.model_hash not in (None, model.hash):
        raise FileError(
            f"{path}: made for model {str(plan.model_hash)[:12]}, but {file} is "
            f"{model.hash[:12]}; run: planner profile {file} and planner solve, or give the "
            "right one with --model FILE"
        )
    usual = {p.name for p in model.graph.parameters if p.trainable}
    train, freeze = sorted({*plan.train} - usual), sorted(usual - {*plan.train})
    if not train and not freeze:
        return model
    return read(train=train, freeze=freeze)


def _planned(plan: Plan) -> LossOptions:
    """The losses that a plan was made for, as options."""
    return LossOptions(
        outputs=tuple(one.output for one in plan.losses),
        functions={one.output: one.function for one in plan.losses},
        class_dims={one.output: one.class_dim for one in plan.losses if one.class_dim is not None},
    )


# ---------------------------------------------------------------------------- with the others


def _train(
    job: TrainingJob, settings: Settings, seat: ProcessRank, progress: Callable[[int], None]
) -> LaunchReport | None:
    plan, graph = job.plan, job.model.graph
    if job.device == "cpu":
        torch.set_num_threads(settings.threads or plan.threads or 1)
    else:
        torch.cuda.set_device(job.device)
    world = World(plan.ranks, seat.rank, job.program, job.device)
    part = make_part(job, world.device)
    optimizer = make_optimizer(
        OptimizerName(plan.optimizer), list(part.trained.values()), settings.learning_rate
    )
    gradients = GradientBuffers(part.trained, job.program.sums, world.device)
    actions = job.program.lists[world.device]
    runtime = Runtime(
        actions, as_it_crosses(graph, plan), part.stages, gradients, optimizer, world,
        waiting_for_sends(job.program.code), seed_of(job, settings),
    )  # fmt: skip
    feed = make_feed(job, part, settings)
    microbatches = sorted({a.microbatch for a in actions if isinstance(a, Compute)})
    records: deque[Record] = deque(maxlen=KEPT_STEPS)
    losses, begun_s, iterations_s = [], [], []
    before = world.read_clocks()
    for step in range(settings.steps):
        record = runtime.iterate({m: feed(step, m) for m in microbatches}, step=step)
        records.append(record)
        losses.append(record.loss)
        begun_s.append(record.begun_s)
        iterations_s.append(record.iteration_s)
        if seat.rank == 0:
            progress(step + 1)
    clocks = [Clock(*pair) for pair in zip(before, world.read_clocks(), strict=True)]
    peaks_bytes = None
    if settings.track_memory:
        batches = {m: feed(settings.steps, m) for m in microbatches}
        with watching(job.device, staying(part, gradients, optimizer)) as watch:
            record = runtime.iterate(Copies(batches), watch, step=settings.steps)
        peaks_bytes = tuple(record.peaks_bytes)
    own = Findings(
        device=world.device,
        peaks_bytes=peaks_bytes,
        loss=tuple(losses),
        begun_s=tuple(begun_s),
        iterations_s=tuple(iterations_s),
        records=tuple(records),
        **_machine(job.device),
    )
    findings = world.gather(own)
    world.close()
    if seat.rank > 0:
        return None
    report = make_report(plan, graph, job.losses, findings, clocks)
    report = replace(report, notes=(*job.model.notes, *report.notes))
    if settings.trace is not None:
        names = {device.device: device.name for device in plan.prediction.devices}
        write_trace(report.timeline, names, settings.trace, measured_by(plan))
    return report


def staying(
    part: Part, gradients: GradientBuffers, optimizer: Optimizer | None
) -> Iterator[Tensor]:
    """The tensors of a device that stay from iteration to iteration."""
    yield from part.values.values()
    yield from gradients.everything()
    for state in () if optimizer is None else optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def as_it_crosses(graph: Graph, plan: Plan) -> Graph:
    """The graph with the types of elements that tensors have where they cross stages, which
    autocast changes.
    """
    return retyped(graph, {crossing.tensor: crossing.dtype for crossing in plan.crossings})


def make_part(job: TrainingJob, device: int) -> Part:
    """The stages of a device, with the parameters of the model's file."""
    plan, graph = job.plan, job.model.graph
    index_of = operator_indices(graph)
    mine = {
        s: [index_of[name] for name in stage.operators]
        for s, stage in enumerate(plan.strategy.stages)
        if device in stage.devices
    }
    held = sorted(
        {
            name
            for operators in mine.values()
            for v in operators
            for name in graph.operators[v].parameters
        }
    )
    values = parameters(job.model, held, job.device)
    described = parameters_by_name(graph)
    shorter = plan.dtype if plan.dtype != main_dtype(graph) else None
    stages = {
        s: StageRunner(
            to_torch(job.model, operators, values, job.device),
            graph,
            plan.strategy.stages[s].recompute,
            _criteria(job, operators),
            partial(autocast, job.device, shorter),
        )
        for s, operators in mine.items()
    }
    trained = {name: values[name] for name in held if described[name].trainable}
    return Part(stages, values, trained)


def _criteria(job: TrainingJob, operators: list[int]) -> dict[str, Criterion]:
    """The losses of the outputs that a stage makes, each over the number of microbatches."""
    made = {name for v in operators for name in job.model.graph.operators[v].outputs}
    num_microbatches = job.plan.strategy.num_microbatches

    def share(loss: Loss) -> Criterion:
        whole = criterion(loss)
        return lambda output, target: whole(output, target) / num_microbatches

    return {loss.output.name: share(loss) for loss in job.losses if loss.output.name in made}


def make_feed(job: TrainingJob, part: Part, settings: Settings) -> Feed:
    """The data of this device: the inputs of the graph that its stages read, and the targets of
    the losses that they compute.
    """
    read = {name for stage in part.stages.values() for name in stage.input_names}
    made = {name for stage in part.stages.values() for name in stage.output_names}
    needs = BatchNeeds(
        inputs=frozenset(read & {*job.model.graph.inputs}),
        targets=frozenset(one.output.name for one in job.losses if one.has_target) & made,
    )
    if settings.data is not None:
        return user_feed(settings.data, job.model.graph, job.losses, needs, job.device)
    return synthetic_feed(job.model, job.losses, needs, seed_of(job, settings), job.device)


def seed_of(job: TrainingJob, settings: Settings) -> int:
    """The seed of synthetic data and of the numbers that operators draw."""
    return job.plan.seed if settings.seed is None else settings.seed


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
