"""`TrainingJob` -> the stages, parameters and data of one device."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from planner.artefacts.graph import Graph, main_dtype, parameters_by_name, retyped
from planner.artefacts.losses import Loss
from planner.artefacts.plan import Plan
from planner.artefacts.strategy import operator_indices
from planner.launcher.gradients import GradientBuckets
from planner.launcher.job import TrainingJob
from planner.launcher.split.module import split_module
from planner.launcher.split.part import SplitPlace, local_parameters, place_in, split_losses
from planner.launcher.split.states import States, connect_sinks
from planner.launcher.stage import StageModule
from planner.operators import parameters, to_torch
from planner.operators.losses import Criterion, criterion
from planner.operators.running import autocast
from planner.resharding.sums import state_steps


@dataclass(frozen=True, slots=True)
class Part:
    """The stages and parameters of one device.

    Attributes:
        stages: by index.
        values: its parameters by name, or its parts of them; several stages share tied ones.
        trained: those of them that are trained.
        place: in the mesh of its only stage, where that is split.
        states: shards of parameters, where the optimizer's state is cut further than these.
    """

    stages: dict[int, StageModule]
    values: dict[str, Tensor]
    trained: dict[str, Tensor]
    place: SplitPlace | None = None
    states: States | None = None

    @property
    def stepped(self) -> dict[str, Tensor]:
        """By the names of the trained parameters, what the optimizer steps."""
        shards = {} if self.states is None else self.states.shards
        return {name: shards.get(name, value) for name, value in self.trained.items()}

    @property
    def accumulating(self) -> dict[str, Tensor]:
        """By the names of the trained parameters, what has the gradients of the backwards."""
        if self.states is None:
            return self.trained
        cut = {name: self.states.shards[name] for name in self.states.cut_gradients}
        return {**self.trained, **cut}


def make_part(job: TrainingJob, device: int, scale: Callable[[], float] = lambda: 1.0) -> Part:
    """The stages of a device, with the parameters of the model's file.

    Args:
        scale: gives the factor of the losses in a backward pass.

    Raises:
        LaunchError: if a stage is split in a way that cannot be run.
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
    described = parameters_by_name(graph)
    precision = partial(autocast, job.device, shorter_dtype(job))
    place = place_in(plan.strategy, device)
    if place is not None:
        values = local_parameters(job.model, held, place.sharding, place.mesh, job.device)
        module = split_module(job.model, place.stage, place.mesh, values, job.device)
        losses = split_losses(_made_in(job, mine[place.index]), place.sharding, place.mesh)
        runner = StageModule(
            module, graph, place.stage.recompute, _over(losses.criteria, job), precision, scale,
            losses.unreported,
        )  # fmt: skip
        stages = {place.index: runner}
    else:
        values = parameters(job.model, held, job.device)
        stages = {
            s: StageModule(
                to_torch(job.model, operators, values, job.device),
                graph,
                plan.strategy.stages[s].recompute,
                _over({one.output.name: criterion(one) for one in _made_in(job, operators)}, job),
                precision,
                scale,
            )
            for s, operators in mine.items()
        }
    trained = {name: values[name] for name in held if described[name].trainable}
    if place is None or not state_steps(place.stage, graph):
        return Part(stages, values, trained, place)
    states = States(place, values, graph)
    connect_sinks(states, stages[place.index].module)
    return Part(stages, values, trained, place, states)


def shorter_dtype(job: TrainingJob) -> str | None:
    """The type that autocast computes in; None if that is the model's own."""
    return job.plan.dtype if job.plan.dtype != main_dtype(job.model.graph) else None


def _made_in(job: TrainingJob, operators: list[int]) -> list[Loss]:
    """The losses of the outputs that some operators make."""
    made = {name for v in operators for name in job.model.graph.operators[v].outputs}
    return [loss for loss in job.losses if loss.output.name in made]


def _over(criteria: Mapping[str, Criterion], job: TrainingJob) -> dict[str, Criterion]:
    """Losses by output, each over the number of microbatches that a step of the optimizer takes the
    mean of.
    """
    strategy = job.plan.strategy
    num_microbatches = 1 if strategy.schedule.is_asynchronous else strategy.num_microbatches

    def share(whole: Criterion) -> Criterion:
        return lambda output, target: whole(output, target) / num_microbatches

    return {name: share(whole) for name, whole in criteria.items()}


def staying(
    part: Part,
    gradients: GradientBuckets,
    optimizer: Optimizer | None,
    versions: Iterable[Tensor] = (),
) -> Iterator[Tensor]:
    """The tensors of a device that stay from iteration to iteration.

    Args:
        versions: memory for versions of its parameters.
    """
    yield from part.values.values()
    yield from part.stepped.values()
    yield from versions
    yield from gradients.everything()
    for state in () if optimizer is None else optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def as_it_crosses(graph: Graph, plan: Plan) -> Graph:
    """The graph with the types of elements that tensors have where they cross stages, which
    autocast changes.
    """
    return retyped(graph, {crossing.tensor: crossing.dtype for crossing in plan.crossings})
