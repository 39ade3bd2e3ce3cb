"""Operators that reduce dimensions to one number each, and running sums."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from planner.operators.shape import Integers
from planner.support.errors import OperatorError


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


def _reduce_l2(data: Tensor, axes: Integers) -> Tensor:
    if not data.is_floating_point():
        raise OperatorError(f"data: expected floats, got {data.dtype}")
    norm: Tensor = torch.linalg.vector_norm(data, dim=axes, keepdim=True)
    return norm


def _operator(name: str, compute: Callable[[Tensor, Integers], Tensor]) -> Callable[..., Tensor]:
    """The function of a Reduce*.

    Args:
        name: of the function, which torch.fx writes into its code.
        compute: reduces some dimensions to a size of 1.
    """

    def reduce(
        data: Tensor, axes: Integers | None = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        """Without axes all dimensions are reduced, or with `noop_with_empty_axes` none."""
        if not axes and noop_with_empty_axes:
            return compute(data.unsqueeze(-1), (-1,)).squeeze(-1)
        axes = tuple(axes) if axes else tuple(range(data.dim()))
        if data.dim() == 0:
            return compute(data.reshape(1), (0,)).reshape(())
        reduced = compute(data, axes)
        return reduced if keepdims else reduced.squeeze(axes)

    reduce.__name__ = reduce.__qualname__ = name
    return reduce


reduce_l1 = _operator("reduce_l1", lambda x, dims: _sum(x.abs(), dims))
reduce_l2 = _operator("reduce_l2", _reduce_l2)
reduce_log_sum = _operator("reduce_log_sum", lambda x, dims: torch.log(_sum(x, dims)))
reduce_log_sum_exp = _operator(
    "reduce_log_sum_exp", lambda x, dims: torch.logsumexp(x, dims, keepdim=True)
)
reduce_max = _operator("reduce_max", partial(_extreme, largest=True))
reduce_mean = _operator("reduce_mean", lambda x, dims: torch.mean(x, dims, keepdim=True))
reduce_min = _operator("reduce_min", partial(_extreme, largest=False))
reduce_prod = _operator("reduce_prod", _prod)
reduce_sum = _operator("reduce_sum", _sum)
reduce_sum_square = _operator("reduce_sum_square", lambda x, dims: _sum(x * x, dims))


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
