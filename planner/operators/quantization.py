"""Numbers in few bits and back. A scale is one number, one per index of an axis, or one per block
of an axis.
"""

import torch
from torch import Tensor


def quantize_linear(
    x: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """round(x / scale) + zero point, held within the integers of the output's type."""
    x = x if x.is_floating_point() else x.to(y_scale.dtype)
    whole = torch.round(x / _spread(y_scale, x, axis, block_size))
    if y_zero_point is not None:
        whole = whole + _spread(y_zero_point, x, axis, block_size).to(whole.dtype)
    limits = torch.iinfo(dtype)
    return whole.clamp(limits.min, limits.max).to(dtype)


def dequantize_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """(x - zero point) times scale."""
    wide = torch.promote_types(x_scale.dtype, torch.float32)
    value = x.to(wide)
    if x_zero_point is not None:
        value = value - _spread(x_zero_point, x, axis, block_size).to(wide)
    return (value * _spread(x_scale, x, axis, block_size)).to(dtype)


def _spread(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """The scale or zero point, in a shape that broadcasts with x."""
    if scale.numel() == 1:
        return scale.reshape(())
    axis = axis + x.dim() if axis < 0 else axis
    if block_size:
        return scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return scale.reshape([-1 if i == axis else 1 for i in range(x.dim())])
