"""The steps of `resharding.conversion` on the local tensors of one device, with their gradients.

A conversion has steps forward and steps of its own backward: what a gradient needs does not follow
from the forward steps alone (`resharding/gradients.py`). It is two functions of autograd, its start
and its end, between which it runs beside computations (`resharding/overlap.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.artefacts.sharding import CHUNKS
from planner.launcher.mesh.lines import ConversionGroup, Mesh
from planner.launcher.mesh.queue import Done, Pending
from planner.operators.parts.slices import chunk_rows, joined, padded, part_of, parts
from planner.resharding.conversion import Collective, Step, sends


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
    """A tensor in other specs, and its gradient back in those of its home. Calling it starts that;
    `finished` gives the copy.

    Attributes:
        tensor: name of the tensor.
        sink: takes the gradient instead of the tensor, where it is of another shape than that.
        dtype: into which the tensor is converted before the steps; None for its own.
        gradient_dtype: into which the copy's gradient is, before its steps; None for its own.

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
        self.dtype: torch.dtype | None = None
        self.gradient_dtype: torch.dtype | None = None

    def forward(self, tensor: Tensor) -> "StartedCopy":
        """Starts to make the copy."""
        running = _Running(self)
        if self.backward_steps is None:
            running.start_copy(tensor)
            return StartedCopy(None, running)
        there: Tensor = _Start.apply(tensor, running)  # type: ignore[no-untyped-call]
        return StartedCopy(there, running)

    def started(self, tensor: Tensor) -> Pending[Tensor]:
        """The copy alone, which has no gradient."""
        return start(tensor.to(self.dtype or tensor.dtype), self.forward_steps, self.mesh)


def start(tensor: Tensor, steps: Sequence[Step], mesh: Mesh) -> Pending[Tensor]:
    """Starts some steps, as `converted`; those that send nothing are done at once."""
    if sends(step for step in steps if mesh.lines[step.axis].size > 1):
        return mesh.queue.start(partial(converted, steps=steps, mesh=mesh), tensor)
    return Done(converted(tensor, steps, mesh))


class _Running:
    """The part of a conversion that is on its way: in a forward that of the copy, in a backward
    that of its gradient. It is taken once.

    Args:
        how: the conversion.
    """

    def __init__(self, how: Conversion) -> None:
        self.how = how
        self._pending: Pending[Tensor] | None = None

    def start_copy(self, tensor: Tensor) -> None:
        self._pending = self.how.started(tensor.detach())

    def start_gradient(self, gradient: Tensor) -> None:
        how = self.how
        gradient = gradient.to(how.gradient_dtype or gradient.dtype)
        self._pending = start(gradient, how.backward_steps or (), how.mesh)

    def take(self) -> Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None, "it was started"
        return pending.wait()


class StartedCopy(NamedTuple):
    """A copy on its way.

    Attributes:
        stand_in: for the tensor, in autograd's graph between start and end; None where no gradient
            flows.
        running: the copy.
    """

    stand_in: Tensor | None
    running: _Running


def finished(copy: StartedCopy) -> Tensor:
    """Waits for a copy, and gives it."""
    if copy.stand_in is None:
        return copy.running.take()
    made: Tensor = _Finish.apply(*copy)  # type: ignore[no-untyped-call]
    return made


class _Start(torch.autograd.Function):
    """Autograd runs backwards in the reverse order of forwards. So that of a copy's end, which is
    behind those of all who read it, starts the conversion of the gradient, and that of its start
    waits for it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, running: _Running) -> Tensor:
        ctx.running = running
        ctx.set_materialize_grads(False)
        running.start_copy(tensor)
        return stand_in(tensor.device).detach()

    @staticmethod
    def backward(ctx: Any, there: Tensor | None) -> Any:
        if there is None:
            return None, None
        home, sink = ctx.running.take(), ctx.running.how.sink
        if sink is None:
            return home, None
        sink(home)
        return None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Tensor, running: _Running) -> Tensor:
        ctx.running = running
        ctx.set_materialize_grads(False)
        return running.take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None
        ctx.running.start_gradient(gradient)
        return stand_in(gradient.device), None


@cache
def stand_in(device: torch.device) -> Tensor:
    """A number that stands for a tensor in autograd's graph, and for its gradient there."""
    return torch.zeros((), device=device)
