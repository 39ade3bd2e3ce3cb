"""The steps of `resharding.conversion` on the local tensors of one device, with their gradients.

A conversion is one function of autograd, with steps forward and steps of its own backward: what a
gradient needs does not follow from the forward steps alone (`resharding/gradients.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.artefacts.sharding import CHUNKS, Spec, blocks_of, dim_of
from planner.launcher.mesh.lines import ConversionGroup, Mesh
from planner.resharding.conversion import Collective, Step


def converted(tensor: Tensor, steps: Sequence[Step], mesh: Mesh) -> Tensor:
    """What this device has after some steps; the tensor itself where they do nothing here."""
    for step in steps:
        line = mesh.lines[step.axis]
        if line.size > 1:
            tensor = _DONE[step.kind](tensor, step, line)
    return tensor


def _all_gather(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    if step.source == CHUNKS:
        every = line.all_gather(padded(tensor.contiguous(), chunk_rows(step.rows, line.size)))
        return every.flatten(0, 1)[: step.rows]
    return joined(line.all_gather(tensor.contiguous()), step.source)


def _all_to_all(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    return joined(line.all_to_all(parts(tensor, line.size, step.target)), step.source)


def _all_reduce(tensor: Tensor, _: Step, line: ConversionGroup) -> Tensor:
    return line.all_reduce(tensor)


def _reduce_scatter(tensor: Tensor, step: Step, line: ConversionGroup) -> Tensor:
    if step.target == CHUNKS:
        rows = chunk_rows(step.rows, line.size)
        every = padded(tensor.contiguous(), rows * line.size)
        every = every.view(line.size, rows, *tensor.shape[1:])
        return line.reduce_scatter(every)[: part_of(tensor, line.size, CHUNKS, line.rank).shape[0]]
    return line.reduce_scatter(parts(tensor, line.size, step.target))


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


def parts(tensor: Tensor, n: int, cut: str) -> Tensor:
    """(n, *shape) the equal parts of a tensor, contiguous.

    Args:
        cut: along which dimension, and in how many blocks, such as "S1/3".

    >>> parts(torch.arange(6), 2, "S0/3").tolist()
    [[0, 2, 4], [1, 3, 5]]
    """
    dim = _dim_of(cut)
    return views_of_parts(tensor, n, cut).flatten(dim + 1, dim + 2).contiguous()


def views_of_parts(tensor: Tensor, n: int, cut: str) -> Tensor:
    """The same where they lie in the tensor, so that they can be written to, with the dimension
    that is cut as two: blocks, and what a part has of each.

    >>> views_of_parts(torch.arange(6), 2, "S0/3").tolist()
    [[[0], [2], [4]], [[1], [3], [5]]]
    """
    dim, blocks = _dim_of(cut), blocks_of(cut)
    width = tensor.shape[dim] // (blocks * n)
    return _apart(tensor, dim, (blocks, n, width)).movedim(dim + 1, 0)


def joined(some: Tensor, cut: str) -> Tensor:
    """The tensor with these parts.

    Args:
        some: (n, *shape) as `parts` gives them.
        cut: as of `parts`.

    >>> joined(torch.tensor([[0, 2, 4], [1, 3, 5]]), "S0/3").tolist()
    [0, 1, 2, 3, 4, 5]
    """
    dim, blocks = _dim_of(cut), blocks_of(cut)
    if blocks == 1:
        return some.movedim(0, dim).flatten(dim, dim + 1)
    apart = _apart(some, dim + 1, (blocks, some.shape[dim + 1] // blocks))
    return apart.movedim(0, dim + 1).flatten(dim, dim + 2)


def chunk_rows(rows: int, n: int) -> int:
    """Rows of the largest of n chunks."""
    return -(-rows // n)


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with zeros behind its rows, up to so many; itself where it has them."""
    short = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros((short, *tensor.shape[1:]))]) if short else tensor


def _dim_of(cut: str) -> int:
    dim = dim_of(cut)
    assert dim is not None, "a part of a spec that cuts"
    return dim


def _apart(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """A view with several dimensions in the place of one."""
    return tensor.reshape((*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]))


def part_of(tensor: Tensor, n: int, cut: str, k: int) -> Tensor:
    """The k-th of the parts of a tensor, equal but for chunks; where there are no blocks, a view.

    >>> [part_of(torch.arange(5), 4, "C", k).tolist() for k in range(4)]
    [[0, 1], [2, 3], [4], []]
    """
    dim, blocks = _dim_of(cut), blocks_of(cut)
    if cut == CHUNKS:
        rows, width = tensor.shape[0], chunk_rows(tensor.shape[0], n)
        return tensor[min(k * width, rows) : min((k + 1) * width, rows)]
    width = tensor.shape[dim] // (n * blocks)
    if blocks == 1:
        return tensor.narrow(dim, k * width, width)
    return _apart(tensor, dim, (blocks, n, width)).select(dim + 1, k).flatten(dim, dim + 1)


def local_part(whole: Tensor, spec: Spec, mesh: Mesh) -> Tensor:
    """The part of a whole tensor that this device has, under a spec without summands.

    The first axis is the outer one, so cuts are put on from the first.
    """
    for axis, part in enumerate(spec):
        if dim_of(part) is not None:
            whole = part_of(whole, mesh.sizes[axis], part, mesh.coordinates[axis])
    return whole


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
