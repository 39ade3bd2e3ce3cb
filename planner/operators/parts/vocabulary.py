"""A vocabulary that is cut over devices: its table, and the cross-entropy of scores for it.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from typing import Any

import torch
from torch import Tensor

from planner.operators import indexing
from planner.operators.losses import IGNORED_CLASS
from planner.operators.parts.line import Cut, MeshAxisGroup, place


def gather(
    data: Tensor, indices: Tensor, axis: int, padding_idx: int = -1, *, cuts: tuple[Cut, ...]
) -> Tensor:
    """Gather from a part of the slices: zeros where an index is on another device, so that the
    results of all devices sum up to the whole.
    """
    axis = axis + data.dim() if axis < 0 else axis
    rank, size = place(cuts)
    num_rows = data.shape[axis]
    start = rank * num_rows
    index = torch.where(indices < 0, indices + size * num_rows, indices) - start
    inside = (index >= 0) & (index < num_rows)
    padding = padding_idx - start if start <= padding_idx < start + num_rows else -1
    picked = indexing.gather(data, torch.where(inside, index, 0), axis, padding)
    shape = (*(1,) * axis, *indices.shape, *(1,) * (data.dim() - axis - 1))
    return torch.where(inside.reshape(shape), picked, 0.0)


def cross_entropy(scores: Tensor, classes: Tensor, line: MeshAxisGroup) -> Tensor:
    """Summed cross-entropy of scores whose classes are cut over a line; the same on each device.

    Its gradient needs no other device, and is that of the whole loss: each device begins with the
    same gradient of the loss.

    Args:
        scores: (N, C / n) scores of this device's classes.
        classes: (N,) the true classes, from 0 to C; `IGNORED_CLASS` does not count.
    """
    loss: Tensor = _CrossEntropy.apply(scores, classes, line)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, classes: Tensor, line: MeshAxisGroup) -> Tensor:
        index = classes - line.rank * scores.shape[1]
        inside = (index >= 0) & (index < scores.shape[1])
        index = torch.where(inside, index, 0)
        largest = line.all_reduce_max(scores.amax(1))
        powers = torch.exp(scores - largest[:, None])
        own = scores.gather(1, index[:, None])[:, 0] - largest
        own = torch.where(inside, own, 0.0)
        total, true = line.all_reduce(torch.stack([powers.sum(1), own])).unbind()
        weight = (classes != IGNORED_CLASS).to(scores.dtype)
        ctx.save_for_backward(powers / total[:, None], index, inside, weight)
        return ((total.log() - true) * weight).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        share, index, inside, weight = ctx.saved_tensors
        made = share.scatter_add(1, index[:, None], -inside[:, None].to(share.dtype))
        return gradients[0] * weight[:, None] * made, None, None
