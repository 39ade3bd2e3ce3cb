"""Operators that pick or place numbers by index, and sort them.

Negative indices count from the end everywhere.
"""

import torch
from torch import Tensor
from torch.nn import functional

from planner.support.errors import OperatorError

_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _from_front(indices: Tensor, size: int) -> Tensor:
    return torch.where(indices < 0, indices + size, indices).to(torch.int64)


def gather(data: Tensor, indices: Tensor | float, axis: int, padding_idx: int = -1) -> Tensor:
    """Whole slices picked along the axis; from a table of vectors, an embedding, whose row
    `padding_idx` gets no gradient.
    """
    if not isinstance(indices, Tensor):
        return data.select(axis, int(indices))
    axis = axis + data.dim() if axis < 0 else axis
    indices = _from_front(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2 and data.is_floating_point():
        return functional.embedding(indices, data, None if padding_idx < 0 else padding_idx)
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return data.index_select(axis, indices.reshape(-1)).reshape(shape)


def gather_elements(data: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Single numbers picked along the axis."""
    return torch.gather(data, axis, _from_front(indices, data.shape[axis]))


def gather_nd(data: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    """Slices picked by the last dimension of the indices: an index into data, after the batch
    dimensions.
    """
    batch = [
        torch.arange(data.shape[b], device=data.device).reshape(
            [-1 if i == b else 1 for i in range(indices.dim() - 1)]
        )
        for b in range(batch_dims)
    ]
    return data[(*batch, *indices.to(torch.int64).unbind(-1))]


def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str = "none"
) -> Tensor:
    """The inverse of GatherElements."""
    indices = _from_front(indices, data.shape[axis])
    if reduction == "none":
        return torch.scatter(data, axis, indices, updates)
    return torch.scatter_reduce(data, axis, indices, updates, _reduction(reduction))


def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    """The inverse of GatherND."""
    depth = indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=data.device)
    for size, index in zip(data.shape[:depth], indices.unbind(-1), strict=True):
        flat = flat * size + _from_front(index, size)
    rows = data.reshape(-1, data.shape[depth:].numel())
    flat = flat.reshape(-1, 1).expand(-1, rows.shape[1])
    return scatter_elements(rows, flat, updates.reshape(flat.shape), 0, reduction).reshape(
        data.shape
    )


def _reduction(name: str) -> str:
    if name not in _REDUCTIONS:
        known = ", ".join(("none", *_REDUCTIONS))
        raise OperatorError(f"reduction: expected one of {known}, got {name!r}")
    return _REDUCTIONS[name]


def one_hot(indices: Tensor, depth: int, values: Tensor, axis: int) -> Tensor:
    """values[1] where the position along the new axis is the index, else values[0]."""
    depth = int(depth)
    axis = axis + indices.dim() + 1 if axis < 0 else axis
    steps = torch.arange(depth, device=indices.device)
    steps = steps.reshape([-1 if i == axis else 1 for i in range(indices.dim() + 1)])
    off, on = values.unbind()
    return torch.where(_from_front(indices, depth).unsqueeze(axis) == steps, on, off)


def top_k(
    x: Tensor, k: int, axis: int, largest: int = 1, sorted: int = 1, *, num_outputs: int
) -> Tensor | tuple[Tensor, ...]:
    """The largest numbers and their indices. Equal numbers keep their order, as ONNX asks and
    torch.topk does not promise.
    """
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    values, indices = values.narrow(axis, 0, k), indices.narrow(axis, 0, k)
    return (values, indices) if num_outputs > 1 else values


def reverse_sequence(
    input: Tensor, sequence_lens: Tensor, batch_axis: int, time_axis: int
) -> Tensor:
    """Per sample the first positions, as many as its length, in the opposite order."""
    shape = [1] * input.dim()
    length = sequence_lens.reshape([-1 if i == batch_axis else n for i, n in enumerate(shape)])
    position = torch.arange(input.shape[time_axis], device=input.device)
    position = position.reshape([-1 if i == time_axis else n for i, n in enumerate(shape)])
    index = torch.where(position < length, length - 1 - position, position)
    return torch.gather(input, time_axis, index.expand(input.shape))


def tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    """The cache with the update from each sample's index on; `circular` starts again at the end."""
    if mode not in ("linear", "circular"):
        raise OperatorError(f"mode: expected linear or circular, got {mode!r}")
    axis = axis + update.dim() if axis < 0 else axis
    index = torch.arange(update.shape[axis], device=update.device)
    index = index.reshape([-1 if i == axis else 1 for i in range(update.dim())])
    if write_indices is not None:
        index = index + write_indices.reshape(-1, *(1,) * (update.dim() - 1))
    if mode == "circular":
        index = index % past_cache.shape[axis]
    return torch.scatter(past_cache, axis, index.expand(update.shape), update)
