"""strategy.json -> `TrainingJob`: everything that a rank knows before it meets the others."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from planner.artefacts.graph import Graph, losses_of, retyped, with_parameters_in
from planner.artefacts.losses import Loss, chosen, losses
from planner.artefacts.options import LossOptions
from planner.artefacts.options import Optimizer as OptimizerName
from planner.artefacts.plan import Plan
from planner.artefacts.strategy import Strategy, crossings, operator_indices, used_devices
from planner.costs.update import state_copies
from planner.launcher.denominators import Denominators, denominators
from planner.launcher.failures.monitor import torchrun_command
from planner.launcher.options import Loop
from planner.launcher.rendezvous import ProcessRank, choose_device
from planner.launcher.source import read_model
from planner.launcher.trained_groups import TrainedGroup
from planner.model.load import Model
from planner.operators.losses import criterion
from planner.profilers.devices import autocast_dtype
from planner.profilers.facts import facts
from planner.resharding.checks import all_violations
from planner.schedules.actions import Program
from planner.schedules.dry_run import dry_run, meetings_of
from planner.schedules.flows import flow, steady_minibatches
from planner.schedules.program import program
from planner.support.errors import FileError, LaunchError, OptionError
from planner.support.units import format_bytes


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that a rank knows before it meets the others.

    Attributes:
        plan: strategy.json.
        model: trained as the plan says.
        program: the action lists of all devices.
        losses: of one microbatch; their sum is trained.
        device: where this rank computes, in torch's words.
        groups: of the trained parameters; those in none are the rest.
    """

    plan: Plan
    model: Model
    program: Program
    losses: tuple[Loss, ...]
    device: str
    groups: tuple[TrainedGroup, ...] = ()

    @property
    def denominators(self) -> tuple[Denominators, ...]:
        """Of each loss."""
        return tuple(denominators(self.model, loss) for loss in self.losses)


def check_ranks(plan: Plan, path: Path, process: ProcessRank | None) -> None:
    """Raises unless there are enough processes for a plan.

    Args:
        path: of the plan.
        process: this one; None if it is alone.

    Raises:
        FileError: if the plan's ranks are not its devices.
        LaunchError: if there are too few processes.
    """
    needed = len(plan.ranks)
    if tuple(sorted(plan.ranks)) != used_devices(plan.strategy):
        raise FileError(
            f"{path}: ranks: expected each of the devices {used_devices(plan.strategy)} once, "
            f"got {plan.ranks}; run: planner solve"
        )
    if process is None and needed > 1:
        raise LaunchError(
            f"{path}: the strategy uses {needed} devices, and this is one process; run one of\n"
            f"  {torchrun_command(path, needed)}\n"
            f"  planner launch {shlex.quote(str(path))} --nproc {needed}"
        )
    if process is not None and process.world_size < needed:
        raise LaunchError(
            f"{path}: the strategy uses {needed} devices, torchrun started "
            f"{'1 process' if process.world_size == 1 else f'{process.world_size} processes'}; "
            f"run: {torchrun_command(path, needed)}"
        )


def prepare(
    plan: Plan,
    path: Path,
    model_path: Path | None,
    process: ProcessRank,
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
    model = read_model(plan, path, model_path, hashes=process.local_rank == 0)
    model = with_types(model, plan)
    wrong = all_violations(plan.strategy, model.graph, max(plan.ranks) + 1)
    if wrong:
        raise FileError(
            f"{path}: the strategy does not fit {model.path}: {'; '.join(wrong)}; "
            "run: planner solve"
        )
    lists = program(plan.strategy, model.graph, plan.prediction.stages)
    turns = _all_in_turn(plan.strategy, model.graph, lists)
    blocked = dry_run(turns, meetings_of(plan.strategy))
    if blocked is not None:
        raise LaunchError(f"{path}: the schedule would hang: {blocked}; run: planner solve")
    types = frozenset(device.type for device in plan.prediction.devices)
    device = choose_device(choices[1], process, len(plan.ranks), types)
    graph = replace(model.graph, losses=chosen(losses_of(model.graph), choices[0]))
    used = losses(graph)
    for one in used:
        criterion(one)  # raises where the user's function is not there
    return TrainingJob(plan, model, lists, used, device)


def with_types(model: Model, plan: Plan) -> Model:
    """A model with the types of parameters and gradients that a plan says.

    Raises:
        LaunchError: if this version of PyTorch cannot add up gradients in another type than that
            of their parameters.
    """
    if plan.parameter_dtype is None:
        return model
    if plan.gradient_dtype is not None and not hasattr(torch.Tensor, "grad_dtype"):
        raise LaunchError(
            f"gradients in {plan.gradient_dtype}: expected PyTorch 2.10 or later, this is"
            f" {torch.__version__}; plan with a profile without --gradients"
        )
    graph = with_parameters_in(model.graph, plan.parameter_dtype, plan.gradient_dtype)
    return replace(model, graph=graph)


def _all_in_turn(strategy: Strategy, graph: Graph, lists: Program) -> Program:
    """Lists in which everything comes to pass that can in a training: the iteration's, or, under an
    asynchronous schedule, those of a flow in which the pipeline is full for a while.
    """
    if not strategy.schedule.is_asynchronous:
        return lists
    return flow(strategy, graph, steady_minibatches(strategy))


def with_choices(job: TrainingJob, loop: Loop) -> TrainingJob:
    """The job with the optimizer and the type of the computation that a user chose instead of the
    plan's.

    Raises:
        OptionError: if the optimizer keeps more state than was planned, or nothing computes in
            that type.
    """
    plan, graph = job.plan, job.model.graph
    optimizer = OptimizerName(loop.optimizer or plan.optimizer)
    _check_state(job, optimizer)
    plan = replace(plan, optimizer=optimizer.value)
    dtype = loop.dtype or plan.dtype
    if dtype != plan.dtype and plan.parameter_dtype is not None:
        raise OptionError(
            f"--dtype {dtype}: expected {plan.dtype}, as the plan has {plan.parameter_dtype}"
            f" parameters; run: planner profile --dtype {dtype} and planner solve"
        )
    if dtype != plan.dtype:
        shorter = autocast_dtype(graph, dtype)
        if plan.crossings and job.device != "cpu":
            # Autocast treats other operators on a GPU, and nothing says which tensors it changes.
            raise OptionError(
                f"--dtype {dtype}: expected {plan.dtype}, which the plan was made for; on GPUs,"
                f" run: planner profile --dtype {dtype} and planner solve"
            )
        made = facts(job.model, shorter) if shorter and plan.crossings else ()
        types = {name: one for fact in made for name, one in fact.dtypes.items()}
        plan = replace(plan, dtype=dtype, crossings=crossings(plan.strategy, retyped(graph, types)))
    return replace(job, plan=plan)


def _check_state(job: TrainingJob, chosen: OptimizerName) -> None:
    """Refuses an optimizer that keeps more state than was planned."""
    plan, planned = job.plan, OptimizerName(job.plan.optimizer)
    if chosen.num_moments <= planned.num_moments:
        return
    held_bytes = {
        one.device: trained_bytes(job.model.graph, plan.strategy, one.device)
        for one in plan.prediction.devices
    }
    fullest = max(plan.prediction.devices, key=lambda one: held_bytes[one.device])
    needed, known = (
        format_bytes(state_copies(plan.parameter_dtype, kind) * held_bytes[fullest.device])
        for kind in (chosen, planned)
    )
    raise OptionError(
        f"--optimizer {chosen}: expected at most the state that was planned, {known} on device"
        f" {fullest.name} for {planned}, got {needed}; run: planner solve --optimizer {chosen}"
    )


def trained_bytes(graph: Graph, strategy: Strategy, device: int) -> int:
    """Of the parameters that a device trains."""
    index_of = operator_indices(graph)
    held = {
        name
        for stage in strategy.stages
        if device in stage.devices
        for operator in stage.operators
        for name in graph.operators[index_of[operator]].parameters
    }
    return sum(one.bytes for one in graph.parameters if one.trainable and one.name in held)
