"""`TrainingJob` -> the stages and parameters of one device, and its places in their meshes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.artefacts import graph as graphs
from planner.artefacts.graph import Graph, main_dtype, parameters_by_name, retyped
from planner.artefacts.losses import Loss
from planner.artefacts.plan import Plan
from planner.artefacts.sharding import Spec
from planner.artefacts.strategy import Stage, indices_of
from planner.launcher.batch import Batch
from planner.launcher.denominators import Denominator, inputs_of
from planner.launcher.gradients import GradientBuckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.master_copies import MasterCopies
from planner.launcher.mesh.convert import converted
from planner.launcher.mesh.late_gradients import late_parameters
from planner.launcher.mesh.lines import Mesh, lines_of, queued, replica_and_index
from planner.launcher.mesh.losses import reports_loss, split_criterion
from planner.launcher.mesh.module import split_module
from planner.launcher.mesh.queue import queue_on
from planner.launcher.mesh.shards import OptimizerShards
from planner.launcher.stage import StageModule
from planner.launcher.stash.offload import HostMemory
from planner.launcher.stash.segments import with_segments
from planner.model.load import Model
from planner.operators.casting import WeightCast, cast_once
from planner.operators.convert import written
from planner.operators.losses import Criterion, LossValue
from planner.operators.running import autocast
from planner.resharding.conversion import conversion
from planner.resharding.over_replicas import over_replicas
from planner.resharding.sums import parameter_specs
from planner.support.errors import LaunchError


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The place of a device in one of its stages.

    Attributes:
        stage: itself.
        replica: of the device.
        mesh: with the device's position in it; that of a stage that is not split has no axes, so
            that the local part of everything is the whole.
        shared: the stage with its replicas as an axis, where parameters lie in parts over them
            (`resharding/over_replicas.py`); else the stage itself.
        shared_mesh: that of `shared`.
    """

    stage: Stage
    replica: int
    mesh: Mesh
    shared: Stage
    shared_mesh: Mesh

    def spec(self, kind: str, name: str) -> Spec:
        """How something lies on the mesh; what is left out is whole.

        Args:
            kind: "inputs" or "outputs", the field of `Sharding`.
        """
        sharding = self.stage.sharding
        specs: Mapping[str, Spec] = {} if sharding is None else getattr(sharding, kind)
        return specs.get(name, ("R",) * len(self.mesh.sizes))

    def whole(self, shape: tuple[int, ...], spec: Spec, local: Tensor) -> Tensor:
        """A tensor of some shape from its local parts; all devices of the mesh call it."""
        sizes = self.mesh.sizes
        steps = conversion(shape, local.itemsize, sizes, spec, ("R",) * len(sizes))
        return converted(local, steps, self.mesh)

    def whole_output(self, output: graphs.Tensor, local: Tensor) -> Tensor:
        """An output of the model, from its local parts; all devices of the mesh call it."""
        return self.whole(output.shape, self.spec("outputs", output.name), local)

    def part(self, whole: Tensor, spec: Spec) -> Tensor:
        """The local part of a whole tensor, in memory of its own, so that the whole can go."""
        part = self.mesh.local_part(whole, spec)
        return part if part.shape == whole.shape else part.clone()

    def inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of inputs that this device needs."""
        return {name: self.part(one, self.spec("inputs", name)) for name, one in inputs.items()}

    def batch(self, batch: Batch, losses: Iterable[Loss]) -> Batch:
        """The part of a microbatch that this device needs: its parts of inputs and targets. Class
        indices stay whole (`mesh/losses.py`).
        """
        targets = dict(batch.targets)
        for loss in losses:
            name = loss.output.name
            if name in targets and loss.class_dim is None:
                targets[name] = self.part(targets[name], self.spec("outputs", name))
        return Batch(self.inputs(batch.inputs), targets)


def stage_place(stage: Stage, graph: Graph, groups: Groups) -> StagePlace:
    """The place of this device in a stage that it runs."""
    shared = over_replicas(stage, graph)
    (replica, mesh), (_, shared_mesh) = (_mesh(one, groups) for one in (stage, shared))
    if shared.sharding is not None and stage.prefetch is not None:
        queue = queue_on(groups.torch_device)
        mesh, shared_mesh = queued(mesh, queue), queued(shared_mesh, queue)
    return StagePlace(stage, replica, mesh, shared, shared_mesh)


def _mesh(stage: Stage, groups: Groups) -> tuple[int, Mesh]:
    """The replica of this device, and its place in the replica's mesh."""
    replica, index = replica_and_index(stage, groups.device)
    lines = [groups.line(line) for line in lines_of(stage, groups.device)]
    return replica, Mesh(stage.mesh, index, lines)


@dataclass(frozen=True, slots=True)
class DevicePart:
    """The stages and parameters of one device.

    Attributes:
        stages: by index.
        places: of the device in them; a stage that is split is the only one.
        values: its local parameters by name; several stages share tied ones.
        trained: those of them that are trained.
        masters: float32 copies of the stepped ones, where these are shorter.
        shards: of the parameters whose optimizer's state is cut further than these.
        casts: copies of weights in the type of autocast, which stay until a step.
        denominators: of the operators of its stages.
        counted: graph inputs that these are counted in.
    """

    stages: dict[int, StageModule]
    places: dict[int, StagePlace]
    values: dict[str, Tensor]
    trained: dict[str, Tensor]
    shards: OptimizerShards
    masters: MasterCopies
    casts: tuple[WeightCast, ...] = ()
    denominators: tuple[Denominator, ...] = ()
    counted: frozenset[str] = frozenset()

    @property
    def stepped(self) -> dict[str, Tensor]:
        """By the names of the trained parameters, the parameters or parts of them that a step
        changes, with its gradients.
        """
        return _stepped(self.trained, self.shards)

    @property
    def optimizer_parameters(self) -> dict[str, Tensor]:
        """By the names of the trained parameters, the tensors that the optimizer steps."""
        return {**self.stepped, **self.masters.copies}

    @property
    def gradient_accumulators(self) -> dict[str, Tensor]:
        """By the names of the trained parameters, the tensors with the gradients of backwards."""
        cut = {name: self.shards.shards[name] for name in self.shards.cut_gradients}
        return {**self.trained, **cut}

    @property
    def host_bytes(self) -> int:
        """The most bytes of activations that have waited in the host's memory."""
        return sum(one.host.peak_bytes for one in self.stages.values() if one.host is not None)

    def forget_casts(self) -> None:
        """Before weights change: lets go of their copies."""
        for one in self.casts:
            one.clear()

    def local(self, batch: Batch, losses: Iterable[Loss]) -> Batch:
        """The part of a microbatch that this device needs, of the data that it is given."""
        counted = {name: one for name, one in batch.inputs.items() if name in self.counted}
        for place in self.places.values():
            batch = place.batch(batch, losses)
        return replace(batch, counted=counted)


def make_part(
    job: TrainingJob, groups: Groups, scale: Callable[[], float] = lambda: 1.0
) -> DevicePart:
    """The stages of this device, with the parameters of the model's file.

    Args:
        scale: gives the factor of the losses in a backward pass.

    Raises:
        LaunchError: if a stage is split in a way that cannot be run.
    """
    graph, described = job.model.graph, parameters_by_name(job.model.graph)
    places = {
        s: stage_place(stage, graph, groups)
        for s, stage in enumerate(job.plan.strategy.stages)
        if groups.device in stage.devices
    }
    held = sorted(
        {
            name
            for place in places.values()
            for v in indices_of(place.stage, graph)
            for name in graph.operators[v].parameters
        }
    )
    place = places[min(places)]  # in all, parameters lie alike
    values, copies = dict[str, Tensor](), dict[str, Tensor]()
    for name, value, copy in _parts(job.model, held, place, job.device):
        values[name] = value
        if copy is not None:
            copies[name] = copy
    denominators = _denominators(job, places.values())
    casts: dict[str, WeightCast] = {}
    stages = {s: _stage_module(job, one, values, scale, casts) for s, one in places.items()}
    shards = OptimizerShards(place.shared, place.shared_mesh, values, graph)
    shards.connect(stages[min(places)].module)
    trained = {name: values[name] for name in held if described[name].trainable}
    masters = MasterCopies(_stepped(trained, shards), copies)
    counted = (inputs_of(one.summed, graph) for one in denominators)
    return DevicePart(
        stages, places, values, trained, shards, masters, tuple(casts.values()), denominators,
        frozenset().union(*counted),
    )  # fmt: skip


def _stepped(trained: Mapping[str, Tensor], shards: OptimizerShards) -> dict[str, Tensor]:
    return {name: shards.shards.get(name, one) for name, one in trained.items()}


def _denominators(job: TrainingJob, places: Iterable[StagePlace]) -> tuple[Denominator, ...]:
    """Those of the operators of some stages."""
    here = {v for place in places for v in indices_of(place.stage, job.model.graph)}
    every = {one.operator: one for loss in job.denominators for one in loss.of}
    return tuple(every[operator] for operator in sorted(here & every.keys()))


def local_parameters(
    model: Model, names: Iterable[str], place: StagePlace, device: str
) -> dict[str, Tensor]:
    """The parts of parameters that this device has, by name, in memory of their own."""
    return {name: value for name, value, _ in _parts(model, names, place, device)}


def _parts(
    model: Model, names: Iterable[str], place: StagePlace, device: str
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """The same, each with a copy of the part that is stepped, in the type of the file, where the
    parameter has another one.

    One after the other is read whole, so that no more than one of them is in memory at once.
    """
    known, mesh = parameters_by_name(model.graph), place.shared_mesh
    lies = parameter_specs(place.shared, model.graph)
    for name in names:
        whole, spec = written(model, name, device), ("R",) * len(mesh.sizes)
        part = _own(whole, lies[name].parameter if name in lies else spec, mesh)
        if name not in known or not known[name].trainable:
            yield name, part, None
            continue
        value = nn.Parameter(part.to(getattr(torch, known[name].dtype)))
        copy = None
        if value.dtype != whole.dtype:
            copy = nn.Parameter(_own(whole, lies[name].state if name in lies else spec, mesh))
        del whole, part
        yield name, value, copy


def _own(whole: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """A part of a tensor in memory of its own."""
    part = mesh.local_part(whole, spec)
    return (part if part.shape == whole.shape else part.clone()).contiguous()


def _stage_module(
    job: TrainingJob,
    place: StagePlace,
    values: Mapping[str, Tensor],
    scale: Callable[[], float],
    casts: dict[str, WeightCast],
) -> StageModule:
    """A stage.

    Args:
        casts: copies of weights of other stages of the device; those of this one are added.
    """
    graph, shorter = job.model.graph, shorter_dtype(job)
    module = split_module(
        job.model,
        place.shared,
        place.shared_mesh,
        values,
        job.device,
        _denominators(job, [place]),
        shorter,
    )
    if shorter is not None:
        cast_once(module, graph, (late_parameters,), casts)
    outputs = {name for v in indices_of(place.stage, graph) for name in graph.operators[v].outputs}
    losses = [loss for loss in job.losses if loss.output.name in outputs]
    precision = partial(autocast, job.device, shorter)
    return StageModule(
        module,
        graph,
        place.stage.reruns_whole,
        stage_criteria(losses, place, alone=len(job.losses) == 1),
        precision,
        scale,
        unreported_losses(losses, place),
        partial(with_segments, stage=place.shared, graph=graph, precision=precision),
        HostMemory(job.device) if place.stage.offloaded else None,
    )


def stage_criteria(
    losses: Iterable[Loss], place: StagePlace, *, alone: bool = True
) -> dict[str, Criterion]:
    """The losses of a stage on this device, by output, of its local part.

    Args:
        losses: of outputs that the stage makes.
        alone: whether the model has no other loss, so that it may say itself how much it counts.

    Raises:
        LaunchError: if a loss cannot be computed from parts.
    """
    specs = ((loss, place.spec("outputs", loss.output.name)) for loss in losses)
    found = {loss.output.name: split_criterion(loss, spec, place.mesh) for loss, spec in specs}
    return found if alone else {n: partial(_without_count, n, one) for n, one in found.items()}


def _without_count(
    name: str, criterion: Criterion, output: Tensor, target: Tensor | None
) -> LossValue:
    """One of several losses. Gradients of all are summed by the time that a count would be known.

    Raises:
        LaunchError: if it says itself how much it counts.
    """
    found = criterion(output, target)
    if found.counted is not None:
        raise LaunchError(
            f"--loss of output {name!r}: (sum, count) is possible where the model has no other"
            " loss; return a scalar, for example sum / count"
        )
    return found


def unreported_losses(losses: Iterable[Loss], place: StagePlace) -> frozenset[str]:
    """Outputs whose loss another device of the mesh reports."""
    specs = ((loss, place.spec("outputs", loss.output.name)) for loss in losses)
    return frozenset(
        loss.output.name for loss, spec in specs if not reports_loss(loss, spec, place.mesh)
    )


def shorter_dtype(job: TrainingJob) -> str | None:
    """The type that autocast computes in; None if that is the model's own."""
    plan = job.plan
    same = plan.parameter_dtype is None and plan.dtype == main_dtype(job.model.graph)
    return None if same else plan.dtype


def staying(
    part: DevicePart,
    gradients: GradientBuckets,
    optimizer: Optimizer | None,
    weights: Iterable[Tensor] = (),
) -> Iterator[Tensor]:
    """The tensors of a device that stay from iteration to iteration.

    Args:
        weights: memory for versions of its parameters.
    """
    yield from part.values.values()
    yield from part.stepped.values()
    yield from part.masters.tensors()
    yield from weights
    yield from gradients.everything()
    for state in () if optimizer is None else optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def as_it_crosses(graph: Graph, plan: Plan) -> Graph:
    """The graph with the types of elements that tensors have where they cross stages, which
    autocast changes.
    """
    return retyped(graph, {crossing.tensor: crossing.dtype for crossing in plan.crossings})
