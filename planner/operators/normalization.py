"""Normalizations and softmax."""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from planner.errors import OperatorError
from planner.operators.shape import Integers


def batch_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    epsilon: float,
    momentum: float = 0.9,
    spatial: int = 1,
    is_test: int = 1,
    training_mode: int = 0,
    *,
    version: int,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Normalized by the running statistics, in training too; these pass through unchanged."""
    if spatial != 1:
        raise OperatorError(f"spatial: expected 1, got {spatial}")
    if num_outputs > 3 or (num_outputs > 1 and version < 9):
        raise OperatorError(f"expected an output and at most its statistics, got {num_outputs}")
    # torch takes all of one type, or halves with everything else in float32, as under autocast.
    kind = torch.float32 if x.itemsize == 2 and mean.dtype == torch.float32 else x.dtype
    means, variances, scale, b = (one.to(kind) for one in (mean, var, scale, b))
    y = functional.batch_norm(x, means, variances, scale, b, training=False, eps=epsilon)
    return (y, mean, var)[:num_outputs] if num_outputs > 1 else y


def layer_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Normalized over all dimensions from the axis on; then the mean and one over the deviation."""
    shape = x.shape[axis:]
    scale, b = scale.expand(shape), None if b is None else b.expand(shape)
    if num_outputs == 1:
        return functional.layer_norm(x, shape, scale, b, epsilon)
    return torch.native_layer_norm(x, shape, scale, b, epsilon)[:num_outputs]


def rms_normalization(
    x: Tensor, scale: Tensor, axis: int, epsilon: float, stash_type: int = 1
) -> Tensor:
    """LayerNormalization without a mean."""
    shape = x.shape[axis:]
    return functional.rms_norm(x, shape, scale.expand(shape), epsilon)


def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    num_groups: int,
    epsilon: float,
    stash_type: int = 1,
    *,
    version: int,
) -> Tensor:
    """Normalized per group. Scale and bias are per channel, up to version 20 per group."""
    if version < 21:
        width = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(width), bias.repeat_interleave(width)
    return torch.group_norm(x, num_groups, scale, bias, epsilon)


def instance_normalization(input: Tensor, scale: Tensor, b: Tensor, epsilon: float) -> Tensor:
    """GroupNormalization, a group per channel; torch.instance_norm refuses planes of one number."""
    return torch.group_norm(input, input.shape[1], scale, b, epsilon)


def mean_variance_normalization(x: Tensor, axes: Integers) -> Tensor:
    """(x - mean) / (deviation + 1e-9)."""
    centred = x - torch.mean(x, axes, keepdim=True)
    deviation = torch.sqrt(torch.mean(centred * centred, axes, keepdim=True))
    return centred / (deviation + 1e-9)


def lp_normalization(input: Tensor, axis: int, p: int) -> Tensor:
    """Divided by the p-norm; zeros stay."""
    norm = torch.linalg.vector_norm(input, p, dim=axis, keepdim=True)
    return input / torch.where(norm == 0, torch.ones_like(norm), norm)


def local_response_normalization(
    x: Tensor, size: int, alpha: float, beta: float, bias: float
) -> Tensor:
    """Computes x / (bias + alpha / size * sum of squares of neighbour channels) ** beta."""
    if size % 2:  # torch has the larger half of an even neighbourhood at the other side
        return functional.local_response_norm(x, size, alpha, beta, bias)
    before, after = (size - 1) // 2, size // 2
    squares = functional.pad((x * x).flatten(2), (0, 0, before, after))
    sums = squares.unfold(1, size, 1).sum(-1).reshape(x.shape)
    return x / (bias + alpha / size * sums) ** beta


def softmax(input: Tensor, axis: int, *, version: int) -> Tensor:
    """Softmax along the axis; up to version 12 over all dimensions from it on."""
    if version >= 13:
        return torch.softmax(input, axis)
    return torch.softmax(_rows(input, axis), 1).reshape(input.shape)


def log_softmax(input: Tensor, axis: int, *, version: int) -> Tensor:
    """The logarithm of Softmax."""
    if version >= 13:
        return torch.log_softmax(input, axis)
    return torch.log_softmax(_rows(input, axis), 1).reshape(input.shape)


def hardmax(input: Tensor, axis: int, *, version: int) -> Tensor:
    """1 at the first largest number, else 0; along the axes of Softmax."""
    if version < 13:
        return hardmax(_rows(input, axis), 1, version=13).reshape(input.shape)
    first = torch.argmax(input, axis, keepdim=True)
    return torch.zeros_like(input).scatter(axis, first, 1)


def _rows(input: Tensor, axis: int) -> Tensor:
    axis = axis + input.dim() if axis < 0 else axis
    return input.reshape(prod(input.shape[:axis]), prod(input.shape[axis:]))
