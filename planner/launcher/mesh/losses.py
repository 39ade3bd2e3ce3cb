"""Losses of outputs that are cut over the devices of a mesh.

Where n devices have equal parts of an output, a loss that is a mean over the elements of its target
is the sum of n parts: each device computes the mean over its own part and divides it by n. A loss
over classes is a sum over the counted elements (`operators/losses.py`), and each device adds up its
own. All devices have all class indices of a microbatch, and a part of all other targets.

Along an axis where the output is whole, or its classes are cut, each device computes the same loss,
and the first one reports it.
"""

from math import prod

import torch
from torch import Tensor

from planner.artefacts.losses import Loss
from planner.artefacts.sharding import Spec, blocks_of, dim_of
from planner.launcher.mesh.lines import Mesh
from planner.operators.losses import Criterion, LossValue, criterion
from planner.operators.parts import cross_entropy
from planner.support.errors import LaunchError


def split_criterion(loss: Loss, spec: Spec, mesh: Mesh) -> Criterion:
    """The share of a device in a loss, from its part of the output.

    Args:
        spec: of the output.

    Raises:
        LaunchError: if the loss cannot be computed from parts.
    """
    whole = criterion(loss)
    cut = _target_spec(loss, spec)
    n = prod(size for size, part in zip(mesh.sizes, cut, strict=True) if part != "R")
    if all(part == "R" for part in spec):
        return whole
    where = f"output {loss.output.name!r}: its loss ({loss.function})"
    if loss.is_users or not loss.has_target:
        raise LaunchError(f"{where} is computed from all of it; expected R, got {','.join(spec)}")
    if loss.class_dim is None:
        return lambda output, target: LossValue(whole(output, target).value / n)
    whole = _over_classes(loss, spec, mesh) or whole

    # Also without counted elements its backward has to run: it may have collectives that the other
    # devices of the mesh wait in.
    def of_classes(output: Tensor, target: Tensor | None) -> LossValue:
        assert target is not None, "a loss over classes has a target"
        return whole(output, mesh.local_part(target, cut))

    return of_classes


def _over_classes(loss: Loss, spec: Spec, mesh: Mesh) -> Criterion | None:
    """The loss of scores whose classes are cut along an axis; None where they are whole.

    Raises:
        LaunchError: if there is none for this cut.
    """
    axes = [axis for axis, part in enumerate(spec) if dim_of(part) == loss.class_dim]
    if not axes:
        return None
    if len(axes) > 1 or blocks_of(spec[axes[0]]) > 1 or not loss.compares_parts:
        raise LaunchError(
            f"output {loss.output.name!r}: only a cross-entropy of scores can be computed over"
            f" classes that are cut, and along one axis; got {loss.function} of"
            f" {loss.operator or 'an input'} and {','.join(spec)}"
        )
    line, dim = mesh.lines[axes[0]], loss.class_dim or 0

    def compared(output: Tensor, target: Tensor | None) -> LossValue:
        assert target is not None, "a loss over classes has a target"
        long = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        scores = long.movedim(dim, -1).flatten(0, -2).contiguous()
        return LossValue(cross_entropy(scores, target.flatten(), line))

    return compared


def _target_spec(loss: Loss, spec: Spec) -> Spec:
    """The spec of a target that lies as its output does; whole where that cuts the classes.

    >>> from planner.artefacts.graph import Tensor
    >>> loss = Loss("cross-entropy", Tensor("y", (2, 9, 4), "float32", True), "MatMul", 1, True)
    >>> _target_spec(loss, ("S0", "S2"))
    ('S0', 'S1')
    """
    if loss.class_dim is None:
        return spec
    cut = []
    for part in spec:
        dim, blocks = dim_of(part), blocks_of(part)
        if dim == loss.class_dim:
            part = "R"
        elif dim is not None and dim > loss.class_dim:
            part = f"S{dim - 1}" + (f"/{blocks}" if blocks > 1 else "")
        cut.append(part)
    return tuple(cut)


def reports_loss(loss: Loss, spec: Spec, mesh: Mesh) -> bool:
    """Whether a device reports its share of a loss: the first along axes where all have it."""
    return all(
        part != "R" or coordinate == 0
        for part, coordinate in zip(_target_spec(loss, spec), mesh.coordinates, strict=True)
    )
