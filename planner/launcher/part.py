"""`TrainingJob` -> the stages, parameters and data of one device."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from planner.graph import Graph, main_dtype, parameters_by_name, retyped
from planner.launcher.gradients import GradientBuffers
from planner.launcher.job import TrainingJob
from planner.launcher.runtime import StageRunner
from planner.model.losses import Loss
from planner.operators import parameters, to_torch
from planner.operators.losses import Criterion, criterion
from planner.operators.running import autocast
from planner.plan import Plan
from planner.strategy import operator_indices


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


def make_part(job: TrainingJob, device: int, scale: Callable[[], float] = lambda: 1.0) -> Part:
    """The stages of a device, with the parameters of the model's file.

    Args:
        scale: gives the factor of the losses in a backward pass.
    """
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
    shorter = shorter_dtype(job)
    stages = {
        s: StageRunner(
            to_torch(job.model, operators, values, job.device),
            graph,
            plan.strategy.stages[s].recompute,
            _criteria(job, operators),
            partial(autocast, job.device, shorter),
            scale,
        )
        for s, operators in mine.items()
    }
    trained = {name: values[name] for name in held if described[name].trainable}
    return Part(stages, values, trained)


def shorter_dtype(job: TrainingJob) -> str | None:
    """The type that autocast computes in; None if that is the model's own."""
    return job.plan.dtype if job.plan.dtype != main_dtype(job.model.graph) else None


def _criteria(job: TrainingJob, operators: list[int]) -> dict[str, Criterion]:
    """The losses of the outputs that a stage makes, each over the number of microbatches that a
    step of the optimizer takes the mean of.
    """
    made = {name for v in operators for name in job.model.graph.operators[v].outputs}
    strategy = job.plan.strategy
    num_microbatches = 1 if strategy.schedule.is_asynchronous else strategy.num_microbatches

    def share(loss: Loss) -> Criterion:
        whole = criterion(loss)
        return lambda output, target: whole(output, target) / num_microbatches

    return {loss.output.name: share(loss) for loss in job.losses if loss.output.name in made}


def staying(
    part: Part,
    gradients: GradientBuffers,
    optimizer: Optimizer | None,
    versions: Iterable[Tensor] = (),
) -> Iterator[Tensor]:
    """The tensors of a device that stay from iteration to iteration.

    Args:
        versions: memory for versions of its parameters.
    """
    yield from part.values.values()
    yield from versions
    yield from gradients.everything()
    for state in () if optimizer is None else optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def as_it_crosses(graph: Graph, plan: Plan) -> Graph:
    """The graph with the types of elements that tensors have where they cross stages, which
    autocast changes.
    """
    return retyped(graph, {crossing.tensor: crossing.dtype for crossing in plan.crossings})
