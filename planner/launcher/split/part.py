"""Parameters and passes of a stage that is split, on one device of its mesh."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from planner.graph import parameters_by_name
from planner.launcher.split.convert import local_part
from planner.launcher.split.losses import split_criterion, tells
from planner.launcher.split.mesh import Mesh
from planner.model import Model
from planner.model.losses import Loss
from planner.operators import parameters
from planner.operators.losses import Criterion
from planner.sharding import Sharding, Spec
from planner.strategy import Stage


def place_of(stage: Stage, device: int) -> tuple[int, int]:
    """The replica of a device in a stage, and its position in the replica's mesh."""
    return next(
        (replica, group.index(device))
        for replica, group in enumerate(stage.groups)
        if device in group
    )


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
        part = local_part(whole.detach(), spec, mesh)
        if part.data_ptr() == whole.data_ptr() and part.shape == whole.shape:
            values[name] = whole
            continue
        part = part.contiguous().clone()
        values[name] = nn.Parameter(part) if known[name].trainable else part
    return values


@dataclass(frozen=True, slots=True)
class SplitLosses:
    """The losses of outputs that a stage makes.

    Attributes:
        criteria: by output, of its local part.
        untold: outputs whose loss another device of the mesh tells.
    """

    criteria: dict[str, Criterion]
    untold: frozenset[str]


def split_losses(losses: Iterable[Loss], sharding: Sharding, mesh: Mesh) -> SplitLosses:
    """The losses of a stage on this device.

    Args:
        losses: of outputs that the stage makes.

    Raises:
        LaunchError: if a loss cannot be computed from parts.
    """
    criteria, untold = {}, set()
    for loss in losses:
        name = loss.output.name
        spec = spec_in(sharding.outputs, name, sharding)
        criteria[name] = split_criterion(loss, spec, mesh)
        if not tells(spec, mesh):
            untold.add(name)
    return SplitLosses(criteria, frozenset(untold))
