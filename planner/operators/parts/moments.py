"""Normalizations and softmax whose statistics are of a dimension that is cut: each device makes
sums over its part, and the devices of the line add them up, once in a forward and once in a
backward. The result is that of the whole operator, not of the statistics of a part.

Batch normalization along samples is SyncBatchNorm. Sums of moments are added up in double
precision: of a mean m and a variance v, each device gives n m and n (v + m^2), and the variance of
all is a difference of two such figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.operators import normalization
from planner.operators.parts.line import Cut, MeshAxisGroup
from planner.operators.running import evaluates, is_updated

_Lines = tuple[MeshAxisGroup, ...]


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
    cuts: tuple[Cut, ...],
) -> Tensor | tuple[Tensor | None, ...]:
    """BatchNormalization of a part of the samples or positions, by the statistics of all."""
    if not training_mode or (evaluates() and not always):
        return normalization.batch_normalization(
            x, scale, b, mean, var, epsilon, momentum, spatial, is_test, training_mode, always,
            num_outputs=num_outputs, read_outputs=read_outputs,
        )  # fmt: skip
    own = (1, -1, *(1,) * (x.dim() - 2))
    how = _How((0, *range(2, x.dim())), epsilon, _lines(cuts))
    y, *moments = _normalized(x, scale.view(own), b.view(own), how)
    batch_mean, batch_var = (one.view(-1) for one in moments)
    new, number = round(1 - momentum, 7), how.number(x)
    if is_updated(mean):
        mean.copy_(torch.lerp(mean, batch_mean.to(mean.dtype), new))
        of_sample = batch_var * (number / max(number - 1, 1))
        var.copy_(torch.lerp(var, of_sample.to(var.dtype), new))
    assert not any(read_outputs[1:]), "there is no rule where the statistics are read"
    return (y, *(None,) * (num_outputs - 1)) if num_outputs > 1 else y


def layer_normalization(
    x: Tensor,
    scale: Tensor,
    b: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    *,
    num_outputs: int,
    cuts: tuple[Cut, ...],
) -> Tensor:
    """LayerNormalization of which each device has a part of what is normalized."""
    assert num_outputs == 1, "there is no rule where the statistics are read"
    how = _How(tuple(range(axis % x.dim(), x.dim())), epsilon, _lines(cuts))
    return _normalized(x, scale, b, how)[0]


def rms_normalization(
    x: Tensor,
    scale: Tensor,
    axis: int,
    epsilon: float,
    stash_type: int = 1,
    *,
    cuts: tuple[Cut, ...],
) -> Tensor:
    """RMSNormalization of which each device has a part of what is normalized."""
    how = _How(tuple(range(axis % x.dim(), x.dim())), epsilon, _lines(cuts), centred=False)
    return _normalized(x, scale, None, how)[0]


def group_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    num_groups: int,
    epsilon: float,
    stash_type: int = 1,
    *,
    version: int,
    cuts: tuple[Cut, ...],
) -> Tensor:
    """GroupNormalization of a part of the positions, by the statistics of all."""
    if version < 21:
        width = x.shape[1] // num_groups
        scale, bias = scale.repeat_interleave(width), bias.repeat_interleave(width)
    grouped = x.reshape(x.shape[0], num_groups, -1, *x.shape[2:])
    own = (1, num_groups, -1, *(1,) * (x.dim() - 2))
    how = _How(tuple(range(2, grouped.dim())), epsilon, _lines(cuts))
    return _normalized(grouped, scale.view(own), bias.view(own), how)[0].flatten(1, 2)


def instance_normalization(
    input: Tensor, scale: Tensor, b: Tensor, epsilon: float, *, cuts: tuple[Cut, ...]
) -> Tensor:
    """InstanceNormalization of a part of the positions, by the statistics of all."""
    return group_normalization(input, scale, b, input.shape[1], epsilon, version=21, cuts=cuts)


def softmax(input: Tensor, axis: int, *, version: int, cuts: tuple[Cut, ...]) -> Tensor:
    """Softmax over numbers of which each device has a part."""
    made: Tensor = _Softmax.apply(input, axis, _lines(cuts))  # type: ignore[no-untyped-call]
    return made


def log_softmax(input: Tensor, axis: int, *, version: int, cuts: tuple[Cut, ...]) -> Tensor:
    """The logarithm of `softmax`."""
    made: Tensor = _LogSoftmax.apply(input, axis, _lines(cuts))  # type: ignore[no-untyped-call]
    return made


@dataclass(frozen=True, slots=True)
class _How:
    """How numbers are normalized.

    Attributes:
        dims: that the statistics are of.
        epsilon: added to the variance.
        lines: of the devices with the parts.
        centred: whether the mean is taken off; else the variance is the mean of squares.
    """

    dims: tuple[int, ...]
    epsilon: float
    lines: _Lines
    centred: bool = True

    def number(self, x: Tensor) -> int:
        """The numbers that a statistic is of, on all devices."""
        own = prod(x.shape[dim] for dim in self.dims)
        return own * prod(line.size for line in self.lines)


def _lines(cuts: Sequence[Cut]) -> _Lines:
    return tuple(cut.line for cut in cuts)


def _all_reduce(own: Tensor, lines: _Lines) -> Tensor:
    """The sum over the devices of all lines, one line after the other."""
    for line in lines:
        own = line.all_reduce(own)
    return own


def _wide(x: Tensor) -> Tensor:
    """Halves as float32, in which statistics are made."""
    return x.float() if x.itemsize == 2 else x


def _normalized(
    x: Tensor, scale: Tensor, b: Tensor | None, how: _How
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + epsilon) scale + b; the mean and the variance.

    Args:
        scale, b: in shapes that broadcast to that of x.
    """
    made: tuple[Tensor, Tensor, Tensor] = _Normalized.apply(x, scale, b, how)  # type: ignore[no-untyped-call]
    return made


class _Normalized(torch.autograd.Function):
    """Keeps what torch's own normalizations keep: the input and two figures per statistic."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, b: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, number = _wide(x), how.number(x)
        if how.centred:
            var, mean = torch.var_mean(wide, how.dims, correction=0, keepdim=True)
        else:
            var = wide.square().mean(how.dims, keepdim=True)
            mean = torch.zeros_like(var)
        mean, var = mean.double(), var.double()
        own = torch.stack([mean, var + mean.square()] if how.centred else [var])
        share = number / prod(line.size for line in how.lines)
        *means, square = _all_reduce(own * share, how.lines) / number
        mean = means[0] if means else mean
        var = (square - mean.square()).clamp(min=0)
        shift, slope = mean.to(wide.dtype), (var + how.epsilon).rsqrt().to(wide.dtype)
        factor = slope * scale
        y = torch.addcmul(-shift * factor if b is None else b - shift * factor, wide, factor)
        ctx.save_for_backward(x, scale, shift, slope)
        ctx.how, ctx.has_shift = how, b is not None and ctx.needs_input_grad[2]
        ctx.shift_shape = None if b is None else b.shape
        ctx.mark_non_differentiable(mean, var)
        return y.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, slope = ctx.saved_tensors
        how, given = ctx.how, _wide(gradients[0])
        even = (_wide(x) - shift) * slope
        own_scale = (given * even).sum_to_size(scale.shape) if ctx.needs_input_grad[1] else None
        flowing = given * scale
        sums = [(flowing * even).sum(how.dims, keepdim=True)]
        if how.centred:
            sums.append(flowing.sum(how.dims, keepdim=True))
        along, *level = _all_reduce(torch.stack(sums).double(), how.lines) / how.number(x)
        rest = flowing.sub_(even.mul_(along.to(even.dtype)))
        if level:
            rest = rest.sub_(level[0].to(rest.dtype))
        own_shift = given.sum_to_size(ctx.shift_shape) if ctx.has_shift else None
        return rest.mul_(slope).to(x.dtype), own_scale, own_shift, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, lines: _Lines) -> Tensor:
        powers, _ = _powers(_wide(x), axis, lines)
        y = powers.div_(_all_reduce(powers.sum(axis, keepdim=True), lines)).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.axis, ctx.lines = axis, lines
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (y,), given = ctx.saved_tensors, gradients[0]
        both = _wide(given) * y
        total = _all_reduce(both.sum(ctx.axis, keepdim=True), ctx.lines)
        return torch.addcmul(both, y.to(both.dtype), total, value=-1).to(y.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, lines: _Lines) -> Tensor:
        wide = _wide(x)
        powers, largest = _powers(wide, axis, lines)
        total = _all_reduce(powers.sum(axis, keepdim=True), lines)
        y = (wide - (largest + total.log())).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.axis, ctx.lines = axis, lines
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (y,), given = ctx.saved_tensors, _wide(gradients[0])
        total = _all_reduce(given.sum(ctx.axis, keepdim=True), ctx.lines)
        return torch.addcmul(given, _wide(y).exp(), total, value=-1).to(y.dtype), None, None


def _powers(x: Tensor, axis: int, lines: _Lines) -> tuple[Tensor, Tensor]:
    """Exponentials of numbers less the largest of all devices, and that number."""
    largest = x.amax(axis, keepdim=True)
    for line in lines:
        largest = line.all_reduce_max(largest)
    return (x - largest).exp_(), largest
