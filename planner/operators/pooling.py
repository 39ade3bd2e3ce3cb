"""Pooling over windows and over whole images.

Where torch's own pooling does not reach (uneven pads, pads over half a kernel, dilated averages),
the input is padded so that every window lies in it, and the windows are taken without pads.
"""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from planner.operators.convolution import Pairs, padded, pairs, spatial_rank
from planner.operators.shape import Integers

_MAX_POOL = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVG_POOL = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def grown(
    sizes: Integers,
    sides: Pairs,
    kernel: Integers,
    strides: Integers,
    dilations: Integers,
    ceil_mode: int,
) -> Pairs:
    """Pads such that the windows fill the input exactly.

    With `ceil_mode` a last, incomplete window counts if it starts before the pad at the end.
    """
    made = []
    for n, (before, after), k, s, d in zip(sizes, sides, kernel, strides, dilations, strict=True):
        reach = (k - 1) * d + 1
        steps, rest = divmod(n + before + after - reach, s)
        if ceil_mode and rest and (steps + 1) * s < n + before:
            steps += 1
        # The pad behind that the last window needs; negative where it starts before the end.
        made.append((before, steps * s + reach - n - before))
    return tuple(made)


def _torch_can(sides: Pairs, kernel: Integers) -> bool:
    return all(a == b and 2 * a <= k for (a, b), k in zip(sides, kernel, strict=True))


def max_pool(
    x: Tensor,
    kernel_shape: Integers,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Integers | None = None,
    pads: Integers | None = None,
    storage_order: int = 0,
    strides: Integers | None = None,
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Largest number of each window, and its place in the whole tensor."""
    if not x.is_floating_point():  # 8-bit integers, which float32 holds exactly
        given = (kernel_shape, auto_pad, ceil_mode, dilations, pads, storage_order, strides)
        y = max_pool(x.float(), *given, num_outputs=num_outputs)
        return y.to(x.dtype) if isinstance(y, Tensor) else (y[0].to(x.dtype), y[1])
    rank, sizes = spatial_rank(x), tuple(x.shape[2:])
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    sides = pairs(auto_pad, pads, sizes, kernel_shape, strides, dilations)
    if num_outputs == 1 and _torch_can(sides, kernel_shape):
        padding = tuple(before for before, _ in sides)
        return _MAX_POOL[rank](x, kernel_shape, strides, padding, dilations, bool(ceil_mode))
    sides = grown(sizes, sides, kernel_shape, strides, dilations, ceil_mode)
    wide = padded(x, sides, float("-inf"))
    if num_outputs == 1:
        return _MAX_POOL[rank](wide, kernel_shape, strides, 0, dilations)
    y, index = _MAX_POOL[rank](wide, kernel_shape, strides, 0, dilations, return_indices=True)
    return y, _place(index, tuple(wide.shape[2:]), sides, sizes, storage_order)


def _place(
    index: Tensor, wide: Integers, sides: Pairs, sizes: Integers, storage_order: int
) -> Tensor:
    """Index in a padded plane -> index in the whole tensor; column major if storage_order."""
    # The index is one number in mixed radix, the sizes of the padded plane: taken apart from the
    # last axis on, and put together again in the sizes without pads.
    coordinates = []
    for size, (before, _) in reversed(list(zip(wide, sides, strict=True))):
        coordinates.append(index % size - before)
        index = index // size
    if not storage_order:
        coordinates.reverse()
    order = reversed(sizes) if storage_order else sizes
    place = torch.zeros_like(index)
    for coordinate, size in zip(coordinates, order, strict=True):
        place = place * size + coordinate
    n, c = index.shape[:2]
    planes = torch.arange(n * c, device=index.device).reshape(n, c, *(1,) * len(sizes))
    return place + planes * prod(sizes)


def average_pool(
    x: Tensor,
    kernel_shape: Integers,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Integers | None = None,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """Mean of each window; pads count with `count_include_pad`, positions that `ceil_mode` adds
    never do.
    """
    rank, sizes = spatial_rank(x), tuple(x.shape[2:])
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    sides = pairs(auto_pad, pads, sizes, kernel_shape, strides, dilations)
    if set(dilations) == {1} and _torch_can(sides, kernel_shape):
        padding = tuple(before for before, _ in sides)
        counted = bool(count_include_pad)
        return _AVG_POOL[rank](x, kernel_shape, strides, padding, bool(ceil_mode), counted)
    wide = grown(sizes, sides, kernel_shape, strides, dilations, ceil_mode)
    # The number of positions that count in each window is its sum over an image of ones; those
    # beyond the given pads are zeros.
    ones = torch.ones_like(x[:1, :1])
    if count_include_pad:
        inside = tuple((b, min(a, w)) for (b, a), (_, w) in zip(sides, wide, strict=True))
        ones = padded(ones, inside, 1.0)
        rest = tuple((0, w - i) for (_, i), (_, w) in zip(inside, wide, strict=True))
        count = window_sum(padded(ones, rest), kernel_shape, strides, dilations)
    else:
        count = window_sum(padded(ones, wide), kernel_shape, strides, dilations)
    return window_sum(padded(x, wide), kernel_shape, strides, dilations) / count


def window_sum(x: Tensor, kernel: Integers, strides: Integers, dilations: Integers) -> Tensor:
    """Sum over each window, plane by plane."""
    planes = x.reshape(-1, 1, *x.shape[2:])
    ones = torch.ones((1, 1, *kernel), dtype=x.dtype, device=x.device)
    sums = _CONV[len(kernel)](planes, ones, None, strides, 0, dilations)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def lp_pool(
    x: Tensor,
    kernel_shape: Integers,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Integers | None = None,
    p: float = 2,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """p-norm of each window; the gradient of zeros is zero."""
    rank, sizes = spatial_rank(x), tuple(x.shape[2:])
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    sides = pairs(auto_pad, pads, sizes, kernel_shape, strides, dilations)
    wide = grown(sizes, sides, kernel_shape, strides, dilations, ceil_mode)
    powers = padded(x.abs() ** p, wide)
    sums = window_sum(powers, kernel_shape, strides, dilations)
    zero = sums == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, sums) ** (1 / p))


def _spatial(x: Tensor) -> Integers:
    return tuple(range(2, x.dim()))


def global_average_pool(x: Tensor) -> Tensor:
    """Mean of each plane."""
    return torch.mean(x, _spatial(x), keepdim=True)


def global_max_pool(x: Tensor) -> Tensor:
    """Largest number of each plane; the first of equals gets the gradient, as in MaxPool."""
    return x.flatten(2).max(-1).values.reshape(*x.shape[:2], *(1,) * (x.dim() - 2))


def global_lp_pool(x: Tensor, p: float) -> Tensor:
    """p-norm of each plane."""
    norm: Tensor = torch.linalg.vector_norm(x, p, dim=_spatial(x), keepdim=True)
    return norm


def max_unpool(
    x: Tensor,
    i: Tensor,
    output_shape: Integers | None = None,
    *,
    kernel_shape: Integers,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """The numbers of MaxPool back at their places, zeros elsewhere; an output shape that is larger
    than the pooled image has more zeros behind.
    """
    rank = len(kernel_shape)
    strides, pads = strides or (1,) * rank, pads or (0,) * 2 * rank
    sizes = [
        (n - 1) * strides[d] - pads[d] - pads[rank + d] + kernel_shape[d]
        for d, n in enumerate(x.shape[2:])
    ]
    shape = (*x.shape[:2], *sizes)
    y = x.new_zeros(prod(shape)).scatter(0, i.flatten(), x.flatten()).reshape(shape)
    if output_shape is None:
        return y
    more = [(0, new - old) for new, old in zip(output_shape[2:], sizes, strict=True)]
    return padded(y, tuple(more))
