"""Operators that reduce dimensions to one number each, and running sums."""

from collections.abc import Callable

import torch
from torch import Tensor

from planner.operators.shape import Integers
from planner.support.errors import OperatorError


def _reduce(
    function: Callable[[Tensor, Integers], Tensor],
    data: Tensor,
    axes: Integers | None,
    keepdims: int,
    noop: int,
) -> Tensor:
    """Without axes all dimensions are reduced, or with `noop` none."""
    if not axes and noop:
        return function(data.unsqueeze(-1), (-1,)).squeeze(-1)
    axes = tuple(axes) if axes else tuple(range(data.dim()))
    if data.dim() == 0:
        return function(data.reshape(1), (0,)).reshape(())
    reduced = function(data, axes)
    return reduced if keepdims else reduced.squeeze(axes)


def _sum(data: Tensor, axes: Integers) -> Tensor:
    return torch.sum(data, axes, keepdim=True, dtype=data.dtype)


def _prod(data: Tensor, axes: Integers) -> Tensor:
    for axis in axes:
        data = torch.prod(data, axis, keepdim=True, dtype=data.dtype)
    return data


def _extreme(data: Tensor, axes: Integers, *, largest: bool) -> Tensor:
    """The largest or the smallest number; of no numbers, the identity of max or min."""
    if data.numel():
        return (
            torch.amax(data, axes, keepdim=True)
            if largest
            else torch.amin(data, axes, keepdim=True)
        )
    shape = [1 if i in axes or i - data.dim() in axes else n for i, n in enumerate(data.shape)]
    if data.is_floating_point():
        return data.new_full(shape, float("-inf" if largest else "inf"))
    if data.dtype == torch.bool:
        return data.new_full(shape, not largest)
    limits = torch.iinfo(data.dtype)
    return data.new_full(shape, limits.min if largest else limits.max)


def reduce_sum(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Sum."""
    return _reduce(_sum, data, axes, keepdims, noop_with_empty_axes)


def reduce_mean(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Mean."""
    return _reduce(
        lambda x, dims: torch.mean(x, dims, keepdim=True),
        data,
        axes,
        keepdims,
        noop_with_empty_axes,
    )


def reduce_max(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Largest number."""
    return _reduce(
        lambda x, dims: _extreme(x, dims, largest=True), data, axes, keepdims, noop_with_empty_axes
    )


def reduce_min(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Smallest number."""
    return _reduce(
        lambda x, dims: _extreme(x, dims, largest=False), data, axes, keepdims, noop_with_empty_axes
    )


def reduce_prod(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Product."""
    return _reduce(_prod, data, axes, keepdims, noop_with_empty_axes)


def reduce_l1(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Sum of magnitudes."""
    return reduce_sum(data.abs(), axes, keepdims, noop_with_empty_axes)


def reduce_l2(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Square root of the sum of squares."""
    if not data.is_floating_point():
        raise OperatorError(f"data: expected floats, got {data.dtype}")
    return _reduce(
        lambda x, dims: torch.linalg.vector_norm(x, dim=dims, keepdim=True),
        *(data, axes, keepdims, noop_with_empty_axes),
    )


def reduce_sum_square(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Sum of squares."""
    return reduce_sum(data * data, axes, keepdims, noop_with_empty_axes)


def reduce_log_sum(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Logarithm of the sum."""
    return torch.log(reduce_sum(data, axes, keepdims, noop_with_empty_axes))


def reduce_log_sum_exp(
    data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Tensor:
    """Logarithm of the sum of exponentials."""
    return _reduce(
        lambda x, dims: torch.logsumexp(x, dims, keepdim=True),
        *(data, axes, keepdims, noop_with_empty_axes),
    )


def _arg(
    function: Callable[..., Tensor], data: Tensor, axis: int, keepdims: int, last: int
) -> Tensor:
    """Index of the largest or smallest; of equal numbers the first, or with `last` the last one."""
    if last:
        return data.shape[axis] - 1 - _arg(function, data.flip(axis), axis, keepdims, last=0)
    return function(data, dim=axis, keepdim=bool(keepdims))


def arg_max(data: Tensor, axis: int, keepdims: int, select_last_index: int = 0) -> Tensor:
    """Index of the largest number."""
    return _arg(torch.argmax, data, axis, keepdims, select_last_index)


def arg_min(data: Tensor, axis: int, keepdims: int, select_last_index: int = 0) -> Tensor:
    """Index of the smallest number."""
    return _arg(torch.argmin, data, axis, keepdims, select_last_index)


def cum_sum(x: Tensor, axis: int, exclusive: int, reverse: int) -> Tensor:
    """Running sum; `exclusive` leaves out the number itself, `reverse` starts at the end."""
    return _running(torch.cumsum, x, axis, exclusive, reverse, identity=0)


def cum_prod(x: Tensor, axis: int, exclusive: int, reverse: int) -> Tensor:
    """Running product; see `cum_sum`."""
    return _running(torch.cumprod, x, axis, exclusive, reverse, identity=1)


def _running(
    function: Callable[..., Tensor],
    x: Tensor,
    axis: int,
    exclusive: int,
    reverse: int,
    *,
    identity: int,
) -> Tensor:
    x = x.flip(axis) if reverse else x
    if exclusive:
        first = torch.full_like(x.narrow(axis, 0, 1), identity)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], dim=axis)
    x = function(x, axis, dtype=x.dtype)
    return x.flip(axis) if reverse else x
