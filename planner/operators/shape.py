"""Operators that move numbers without changing them, and operators that make numbers."""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from planner.support.errors import OperatorError

# Attributes, and inputs that are constants.
Integers = tuple[int, ...]
Numbers = tuple[float, ...]


def positive(axes: Integers, rank: int) -> Integers:
    """Axes counted from the front."""
    return tuple(axis + rank if axis < 0 else axis for axis in axes)


def identity(input: Tensor, stop_gradient: int = 0) -> Tensor:
    """The input itself; no gradient flows back through one that `planner export` has marked."""
    return input.detach() if stop_gradient else input


def reshape(data: Tensor, shape: Integers, allowzero: int = 0) -> Tensor:
    """0 keeps a dimension unless `allowzero`; -1 takes the remaining elements."""
    if not allowzero:
        shape = tuple(data.shape[i] if dim == 0 else dim for i, dim in enumerate(shape))
    return data.reshape(shape)


def flatten(input: Tensor, axis: int) -> Tensor:
    """To two dimensions: before the axis and from it on."""
    axis = axis + input.dim() if axis < 0 else axis
    return input.reshape(prod(input.shape[:axis]), prod(input.shape[axis:]))


def transpose(data: Tensor, perm: Integers | None = None) -> Tensor:
    """Without `perm` the dimensions are reversed."""
    return data.permute(perm if perm is not None else tuple(reversed(range(data.dim()))))


def squeeze(data: Tensor, axes: Integers | None = None) -> Tensor:
    """Without `axes` every dimension of size 1 goes."""
    if axes is None:
        return data.squeeze()
    gone = positive(axes, data.dim())
    if any(data.shape[axis] != 1 for axis in gone):
        raise OperatorError(
            f"axes: expected dimensions of size 1 of {tuple(data.shape)}, got {axes}"
        )
    return data.squeeze(gone)


def unsqueeze(data: Tensor, axes: Integers) -> Tensor:
    """The axes are those of the result."""
    rank = data.dim() + len(axes)
    new = positive(axes, rank)
    sizes = iter(data.shape)
    return data.reshape([1 if axis in new else next(sizes) for axis in range(rank)])


def concat(*inputs: Tensor, axis: int = 1) -> Tensor:
    """One after the other along the axis."""
    return torch.cat(inputs, dim=axis)


def split(
    input: Tensor, split: Integers | None = None, axis: int = 0, *, num_outputs: int
) -> Tensor | tuple[Tensor, ...]:
    """Without sizes in equal parts, the last one smaller where it must be."""
    sizes = -(-input.shape[axis] // num_outputs) if split is None else list(split)
    parts = tuple(torch.split(input, sizes, dim=axis))
    if len(parts) != num_outputs:
        raise OperatorError(f"split: expected {num_outputs} parts, got {len(parts)}")
    return parts if num_outputs > 1 else parts[0]


def slice_(
    data: Tensor,
    starts: Integers,
    ends: Integers,
    axes: Integers | None = None,
    steps: Integers | None = None,
) -> Tensor:
    """As numpy slices; torch has no negative steps, so those are flipped."""
    index, flipped = [slice(None)] * data.dim(), []
    axes = positive(axes if axes is not None else tuple(range(len(starts))), data.dim())
    for axis, start, end, step in zip(axes, starts, ends, steps or (1,) * len(axes), strict=True):
        taken = range(*slice(start, end, step).indices(data.shape[axis]))
        if step < 0:
            taken = taken[::-1]
            flipped.append(axis)
        index[axis] = slice(taken.start, max(taken.start, taken.stop), taken.step)
    data = data[tuple(index)]
    return data.flip(flipped) if flipped else data


def expand(input: Tensor, shape: Integers) -> Tensor:
    """Broadcast with the shape; a larger dimension of the input stays."""
    goal = torch.broadcast_shapes(input.shape, shape)  # type: ignore[no-untyped-call]
    return torch.broadcast_to(input, goal)


def tile(input: Tensor, repeats: Integers) -> Tensor:
    """Repeated along every dimension."""
    return input.repeat(repeats)


def pad(
    data: Tensor,
    pads: Integers,
    value: float | None = None,
    axes: Integers | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    """All begins, then all ends, of the axes given; negative ones cut."""
    axes = positive(axes if axes is not None else tuple(range(data.dim())), data.dim())
    both = dict(zip(axes, zip(pads[: len(axes)], pads[len(axes) :], strict=True), strict=True))
    if mode == "constant":
        flat = [n for axis in reversed(range(data.dim())) for n in both.get(axis, (0, 0))]
        return functional.pad(data, flat, value=value or 0)
    for axis, (before, after) in both.items():
        if before or after:
            data = data.index_select(axis, _padded(mode, data, axis, before, after))
    return data


def _padded(mode: str, data: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Which index of the axis each index of the padded axis shows."""
    size = data.shape[axis]
    index = torch.arange(-before, size + after, device=data.device)
    match mode:
        case "edge":
            return index.clamp(0, size - 1)
        case "wrap":
            return index % size
        case "reflect":
            index = index % max(2 * (size - 1), 1)
            return torch.minimum(index, 2 * (size - 1) - index)
    raise OperatorError(f"mode: expected constant, reflect, edge or wrap, got {mode!r}")


def trilu(input: Tensor, k: int = 0, *, upper: int) -> Tensor:
    """The upper or the lower triangle, the rest zero."""
    return torch.triu(input, k) if upper else torch.tril(input, k)


def depth_to_space(input: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels to blocks; DCR has the block outside the channel, CRD inside."""
    if mode not in ("DCR", "CRD"):
        raise OperatorError(f"mode: expected DCR or CRD, got {mode!r}")
    if mode == "CRD":
        return functional.pixel_shuffle(input, blocksize)
    n, c, h, w = input.shape
    blocks = input.reshape(n, blocksize, blocksize, c // blocksize**2, h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * blocksize, w * blocksize)


def space_to_depth(input: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Blocks to channels, the inverse of DepthToSpace."""
    if mode not in ("DCR", "CRD"):
        raise OperatorError(f"mode: expected DCR or CRD, got {mode!r}")
    if mode == "CRD":
        return functional.pixel_unshuffle(input, blocksize)
    n, c, h, w = input.shape
    blocks = input.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, -1, h // blocksize, w // blocksize)


def constant(
    value: object = None,
    value_float: float | None = None,
    value_floats: Numbers | None = None,
    value_int: int | None = None,
    value_ints: Integers | None = None,
    *,
    dtype: torch.dtype,
    device: str,
) -> Tensor:
    """Only one of the values is given."""
    values = (value, value_float, value_floats, value_int, value_ints)
    given = next(one for one in values if one is not None)
    return torch.tensor(given, dtype=dtype, device=device)


def constant_of_shape(
    input: Integers, value: Numbers = (0.0,), *, dtype: torch.dtype, device: str
) -> Tensor:
    """One number everywhere."""
    return torch.full(input, value[0], dtype=dtype, device=device)


def shape(data: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """The dimensions from start to end."""
    return torch.tensor(data.shape[start:end], dtype=torch.int64, device=data.device)


def size(data: Tensor) -> Tensor:
    """The number of elements."""
    return torch.tensor(data.numel(), device=data.device)


def range_(
    start: float,
    limit: float,
    delta: float,
    stash_type: int = 1,
    *,
    dtype: torch.dtype,
    device: str,
) -> Tensor:
    """From start, below limit, by delta."""
    return torch.arange(start, limit, delta, dtype=dtype, device=device)


def eye_like(input: Tensor, k: int, *, dtype: torch.dtype) -> Tensor:
    """Ones on the k-th diagonal."""
    ones = torch.ones_like(input, dtype=dtype)
    return torch.triu(torch.tril(ones, k), k)


def center_crop_pad(input_data: Tensor, shape: Integers, axes: Integers | None = None) -> Tensor:
    """The middle of the axes at new sizes, with zeros around what is too small."""
    axes = positive(axes if axes is not None else tuple(range(input_data.dim())), input_data.dim())
    flat = [0] * (2 * input_data.dim())  # (before, after) of every axis, the last one first
    for axis, size in zip(axes, shape, strict=True):
        old = input_data.shape[axis]
        before = (size - old) // 2 if size > old else -((old - size) // 2)
        place = 2 * (input_data.dim() - 1 - axis)
        flat[place : place + 2] = before, size - old - before
    return functional.pad(input_data, flat)


def col_to_im(
    input: Tensor,
    image_shape: Integers,
    block_shape: Integers,
    dilations: Integers | None = None,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """Blocks (samples, channels * numbers of a block, blocks) added up to images."""
    rank = len(image_shape)
    steps, gaps, pads = strides or (1,) * rank, dilations or (1,) * rank, pads or (0,) * 2 * rank
    wide = [n + pads[i] + pads[rank + i] for i, n in enumerate(image_shape)]
    # index[numbers of a block, blocks] in the padded image, from the first axis to the last
    index = torch.zeros((1, 1), dtype=torch.int64, device=input.device)
    for n, k, gap, step in zip(wide, block_shape, gaps, steps, strict=True):
        inner = torch.arange(k, device=input.device).reshape(-1, 1) * gap
        outer = torch.arange(0, n - (k - 1) * gap, step, device=input.device)
        index = (index * n)[:, None, :, None] + (inner + outer)[None, :, None, :]
        index = index.flatten(2).flatten(0, 1)
    columns = input.reshape(len(input), -1, index.numel())
    image = columns.new_zeros((*columns.shape[:2], prod(wide)))
    image = image.index_add(2, index.flatten(), columns).reshape(*columns.shape[:2], *wide)
    for i, n in enumerate(image_shape):
        image = image.narrow(2 + i, pads[i], n)
    return image
