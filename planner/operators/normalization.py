"""Normalizations and softmax."""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from planner.operators.running import evaluates, is_updated
from planner.operators.shape import Integers
from planner.support.errors import OperatorError


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
    always: int = 0,
    *,
    num_outputs: int,
    read_outputs: tuple[bool, ...],
) -> Tensor | tuple[Tensor | None, ...]:
    """Normalized by the statistics of x in training, else by the running statistics.

    The other outputs are the running statistics after this microbatch, and up to version 13 those
    of x. ONNX has the variance of a population in both. The running variance that `updating` keeps
    is PyTorch's, with the variance of a sample: it is that of the loop that a launch stands for.

    Args:
        x: (N, C, ...).
        scale: (C,).
        b: (C,).
        mean: (C,) running means.
        var: (C,) running variances.
        training_mode: whether it trains, in all versions: `planner.model.load` has looked at
            `is_test` and the number of outputs.
        always: whether it trains in evaluation, too.

    Raises:
        OperatorError: if it trains on one number per channel.
    """
    if spatial != 1:
        raise OperatorError(f"spatial: expected 1, got {spatial}")
    # torch takes all of one type, or halves with everything else in float32, as under autocast.
    kind = torch.float32 if x.itemsize == 2 and mean.dtype == torch.float32 else x.dtype
    scale, b = scale.to(kind), b.to(kind)
    if not training_mode or (evaluates() and not always):
        means, variances = mean.to(kind), var.to(kind)
        y = functional.batch_norm(x, means, variances, scale, b, training=False, eps=epsilon)
        return (y, mean, var, mean, var)[:num_outputs] if num_outputs > 1 else y
    if x.numel() == x.shape[1]:
        raise OperatorError(
            f"expected several numbers per channel to normalise by, got x of {list(x.shape)};"
            " give a larger microbatch, or --batch-norm frozen"
        )
    # The attribute has 7 digits: 0.9 is read as 0.89999998, which would be seen in float64.
    new = round(1 - momentum, 7)
    if is_updated(mean):
        means, variances = mean.to(kind), var.to(kind)
        y = functional.batch_norm(x, means, variances, scale, b, True, new, epsilon)
        if kind != mean.dtype:
            mean.copy_(means)
            var.copy_(variances)
    else:
        y = functional.batch_norm(x, None, None, scale, b, True, new, epsilon)
    if not any(read_outputs[1:]):
        return (y, *(None,) * (num_outputs - 1)) if num_outputs > 1 else y
    others = (0, *range(2, x.dim()))
    batch_var, batch_mean = (one.to(mean.dtype) for one in torch.var_mean(x, others, correction=0))
    running = (torch.lerp(mean, batch_mean, new), torch.lerp(var, batch_var, new))
    return (y, *running, batch_mean, batch_var)[:num_outputs]


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
    scale, b = _as_long(scale, x).expand(shape), None if b is None else _as_long(b, x).expand(shape)
    if num_outputs == 1:
        return functional.layer_norm(x, shape, scale, b, epsilon)
    return torch.native_layer_norm(x, shape, scale, b, epsilon)[:num_outputs]


def rms_normalization(
    x: Tensor, scale: Tensor, axis: int, epsilon: float, stash_type: int = 1
) -> Tensor:
    """LayerNormalization without a mean."""
    shape = x.shape[axis:]
    return functional.rms_norm(x, shape, _as_long(scale, x).expand(shape), epsilon)


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
    scale, bias = _as_long(scale, x), _as_long(bias, x)
    if version < 21:
        width = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(width), bias.repeat_interleave(width)
    return torch.group_norm(x, num_groups, scale, bias, epsilon)


def instance_normalization(input: Tensor, scale: Tensor, b: Tensor, epsilon: float) -> Tensor:
    """GroupNormalization, a group per channel; torch.instance_norm refuses planes of one number."""
    scale, b = _as_long(scale, input), _as_long(b, input)
    return torch.group_norm(input, input.shape[1], scale, b, epsilon)


def mean_variance_normalization(x: Tensor, axes: Integers) -> Tensor:
    """(x - mean) / (deviation + 1e-9)."""
    deviation, mean = torch.std_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (deviation + 1e-9)


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


def _as_long(parameter: Tensor, x: Tensor) -> Tensor:
    """A parameter in the type of x, if that is longer: torch takes longer parameters only."""
    return parameter.to(x.dtype) if parameter.itemsize < x.itemsize else parameter


def _rows(input: Tensor, axis: int) -> Tensor:
    axis = axis + input.dim() if axis < 0 else axis
    return input.reshape(prod(input.shape[:axis]), prod(input.shape[axis:]))
