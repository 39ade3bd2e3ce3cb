"""Parameters and passes of a stage that is split, on one device of its mesh."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from planner.artefacts import graph as graphs
from planner.artefacts.graph import parameters_by_name
from planner.artefacts.losses import Loss
from planner.artefacts.sharding import Sharding, Spec
from planner.artefacts.strategy import Stage, Strategy
from planner.launcher.feed import Batch
from planner.launcher.split.convert import converted, local_part
from planner.launcher.split.losses import split_criterion, tells
from planner.launcher.split.mesh import Mesh, line_of
from planner.launcher.world import World
from planner.model.load import Model
from planner.operators import parameters
from planner.operators.losses import Criterion
from planner.resharding.conversion import conversion


def place_of(stage: Stage, device: int) -> tuple[int, int]:
    """The replica of a device in a stage, and its position in the replica's mesh."""
    return next(
        (replica, group.index(device))
        for replica, group in enumerate(stage.groups)
        if device in group
    )


@dataclass(frozen=True, slots=True)
class SplitPlace:
    """The place of a device in a stage that is split.

    Attributes:
        index: of the stage.
        stage: itself.
        replica: of the device.
        mesh: with the device's position in it.
    """

    index: int
    stage: Stage
    replica: int
    mesh: Mesh

    @property
    def sharding(self) -> Sharding:
        """How the stage is split."""
        assert self.stage.sharding is not None
        return self.stage.sharding

    def connect(self, world: World) -> None:
        """Gives the mesh its lines; every rank has made the same world."""
        group = self.stage.groups[self.replica]
        self.mesh.connect(
            [
                world.line(tuple(group[i] for i in line_of(self.mesh.sizes, self.mesh.index, axis)))
                if size > 1
                else None
                for axis, size in enumerate(self.mesh.sizes)
            ]
        )

    def batch(self, batch: Batch, losses: Iterable[Loss]) -> Batch:
        """The part of a microbatch that this device needs: its parts of inputs and targets. Class
        indices stay whole (`losses.py`).
        """
        inputs = self.inputs(batch.inputs)
        targets = dict(batch.targets)
        for loss in losses:
            name = loss.output.name
            if name in targets and loss.class_dim is None:
                spec = spec_in(self.sharding.outputs, name, self.sharding)
                targets[name] = _own(targets[name], spec, self.mesh)
        return Batch(inputs, targets)

    def whole_output(self, output: graphs.Tensor, local: Tensor) -> Tensor:
        """An output of the model, from its local parts; all devices of the mesh call it."""
        spec = spec_in(self.sharding.outputs, output.name, self.sharding)
        return self.whole(output.shape, spec, local)

    def whole(self, shape: tuple[int, ...], spec: Spec, local: Tensor) -> Tensor:
        """A tensor of some shape from its local parts; all devices of the mesh call it."""
        sizes = self.mesh.sizes
        steps = conversion(shape, local.itemsize, sizes, spec, ("R",) * len(sizes))
        return converted(local, steps, self.mesh)

    def part(self, whole: Tensor, spec: Spec) -> Tensor:
        """The local part of a whole tensor."""
        return local_part(whole, spec, self.mesh)

    def inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of inputs that this device needs."""
        return {
            name: _own(one, spec_in(self.sharding.inputs, name, self.sharding), self.mesh)
            for name, one in inputs.items()
        }


def place_in(strategy: Strategy, device: int) -> SplitPlace | None:
    """The place of a device in the only stage that it runs, if that is split."""
    for s, stage in enumerate(strategy.stages):
        if stage.sharding is not None and device in stage.devices:
            replica, index = place_of(stage, device)
            return SplitPlace(s, stage, replica, Mesh(stage.sharding.mesh, index))
    return None


def _own(whole: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """A local part in memory of its own, so that the whole can go."""
    part = local_part(whole, spec, mesh)
    return part if part.shape == whole.shape else part.clone()


def spec_in(specs: Mapping[str, Spec], name: str, sharding: Sharding) -> Spec:
    """The spec of something by name; whole where it is left out."""
    return specs.get(name, ("R",) * len(sharding.mesh))


def local_parameters(
    model: Model, names: Iterable[str], sharding: Sharding, mesh: Mesh, device: str
) -> dict[str, Tensor]:
    """The parts of parameters that this device has, by name, in memory of their own.

    One after the other is read whole, so that no more than one of them is in memory at once.
    """
    known, values = parameters_by_name(model.graph), dict[str, Tensor]()
    for name in names:
        whole = parameters(model, [name], device)[name]
        spec = spec_in(sharding.parameters, name, sharding)
        part = _own(whole.detach(), spec, mesh).contiguous()
        trainable = name in known and known[name].trainable
        values[name] = nn.Parameter(part) if trainable else part
    return values


@dataclass(frozen=True, slots=True)
class SplitLosses:
    """The losses of outputs that a stage makes.

    Attributes:
        criteria: by output, of its local part.
        unreported: outputs whose loss another device of the mesh reports.
    """

    criteria: dict[str, Criterion]
    unreported: frozenset[str]


def split_losses(losses: Iterable[Loss], sharding: Sharding, mesh: Mesh) -> SplitLosses:
    """The losses of a stage on this device.

    Args:
        losses: of outputs that the stage makes.

    Raises:
        LaunchError: if a loss cannot be computed from parts.
    """
    criteria, unreported = {}, set()
    for loss in losses:
        name = loss.output.name
        spec = spec_in(sharding.outputs, name, sharding)
        criteria[name] = split_criterion(loss, spec, mesh)
        if not tells(loss, spec, mesh):
            unreported.add(name)
    return SplitLosses(criteria, frozenset(unreported))
