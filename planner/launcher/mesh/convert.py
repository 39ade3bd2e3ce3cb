"""The steps of `resharding.conversion` on the local tensors of one device, with their gradients.

A conversion is one function of autograd, with steps forward and steps of its own backward: what a
gradient needs does not follow from the forward steps alone (`resharding/gradients.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.artefacts.sharding import CHUNKS
from planner.launcher.mesh.lines import ConversionGroup, Mesh
from planner.operators.parts.slices import chunk_rows, joined, padded, part_of, parts
from planner.resharding.conversion import Collective, Step


def converted(tensor: Tensor, steps: Sequence[Step], mesh: Mesh) -> Tensor:
    """What this device has after some steps; the tensor itself where they do nothing here."""
    for step in steps:
        line = mesh.lines[step.axis]
        if line.size > 1:
            tensor = _DONE[step.kind](tensor, step, line)
    return tensor


def _all_gather(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    # Nothing here may hold the copy that is sent while the result is joined.
    return joined(line.all_gather(_sent(tensor, step, line)), step.source, step.rows)


def _sent(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    """What a device sends in an all-gather."""
    own = tensor.contiguous()
    return padded(own, chunk_rows(step.rows, line.size)) if step.source == CHUNKS else own


def _all_to_all(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    return joined(line.all_to_all(parts(tensor, line.size, step.target)), step.source)


def _all_reduce(tensor: Tensor, _: Step, line: ConversionGroup) -> Tensor:
    return line.all_reduce(tensor)


def _reduce_scatter(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    total = line.reduce_scatter(parts(tensor, line.size, step.target))
    if step.target == CHUNKS:
        return total[: len(_slice(tensor, step, line))]
    return total


def _slice(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    return part_of(tensor, line.size, step.target, line.rank)


def _first(tensor: Tensor, _: Step, line: ConversionGroup) -> Tensor:
    return tensor if line.rank == 0 else torch.zeros_like(tensor)


def _scatter(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    every = tensor.new_zeros((line.size, *tensor.shape))
    every[line.rank] = tensor
    return joined(every, step.source)


_DONE: Mapping[Collective, Callable[[Tensor, Step, ConversionGroup], Tensor]] = {
    Collective.ALL_GATHER: _all_gather,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SLICE: _slice,
    Collective.FIRST: _first,
    Collective.SCATTER: _scatter,
}


class Conversion(nn.Module):
    """A tensor in other specs, and its gradient back in those of its home.

    Attributes:
        tensor: name of the tensor.
        sink: takes the gradient instead of the tensor, where it is of another shape than that.

    Args:
        tensor: name of the tensor.
        mesh: of the stage.
        forward_steps: from the tensor to the copy.
        backward_steps: from the copy's gradient to the tensor's; None where no gradient flows.
    """

    def __init__(
        self,
        tensor: str,
        mesh: Mesh,
        forward_steps: Sequence[Step],
        backward_steps: Sequence[Step] | None,
    ) -> None:
        super().__init__()
        self.tensor, self.mesh = tensor, mesh
        self.forward_steps, self.backward_steps = tuple(forward_steps), backward_steps
        self.sink: Callable[[Tensor], None] | None = None

    def forward(self, tensor: Tensor) -> Tensor:
        """The converted copy."""
        if self.backward_steps is None:
            return converted(tensor.detach(), self.forward_steps, self.mesh)
        made: Tensor = _Reshard.apply(tensor, self)  # type: ignore[no-untyped-call]
        return made


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: Conversion) -> Tensor:
        ctx.how = how
        ctx.set_materialize_grads(False)
        made = converted(tensor, how.forward_steps, how.mesh)
        # A function of autograd must not give back its input itself.
        return made.view_as(made) if made is tensor else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        how: Conversion = ctx.how
        if gradient is None:
            return None, None
        home = converted(gradient, how.backward_steps or (), how.mesh)
        if how.sink is None:
            return home, None
        how.sink(home)
        return None, None
