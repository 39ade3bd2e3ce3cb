"""Operators that read an image at places that are computed: grids, regions, deformed kernels.

A region is a box of an image; its bins are (P, Q) rectangles in it. N images or regions, C
channels, H rows, W columns.
"""

import torch
from torch import Tensor
from torch.nn import functional

from planner.operators.convolution import padded, pairs
from planner.operators.shape import Integers
from planner.support.errors import OperatorError

_GRID_MODES = {
    "bilinear": "bilinear", "linear": "bilinear", "nearest": "nearest", "bicubic": "bicubic",
    "cubic": "bicubic",
}  # fmt: skip


def grid_sample(
    x: Tensor, grid: Tensor, align_corners: int, mode: str, padding_mode: str
) -> Tensor:
    """The image at the places of the grid, which are between -1 and 1."""
    if mode not in _GRID_MODES:
        raise OperatorError(f"mode: expected one of {', '.join(_GRID_MODES)}, got {mode!r}")
    if x.dim() not in (4, 5) or (x.dim() == 5 and _GRID_MODES[mode] == "bicubic"):
        raise OperatorError(
            f"expected images of 2 dimensions, or of 3 that are not cubic, got {tuple(x.shape)}"
        )
    return functional.grid_sample(
        x, grid.to(x.dtype), _GRID_MODES[mode], padding_mode, align_corners=bool(align_corners)
    )


def affine_grid(theta: Tensor, size: Integers, align_corners: int) -> Tensor:
    """The places of an image of the size after an affine map."""
    return functional.affine_grid(theta, list(size), align_corners=bool(align_corners))


def roi_align(
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
    coordinate_transformation_mode: str = "output_half_pixel",
    *,
    version: int,
) -> Tensor:
    """The mean or the largest of several interpolated points in each bin of each region.

    Without a `sampling_ratio` a bin has as many points per side as it is long. There are never more
    than a region of the whole image needs; a larger region is an error when it is met.
    """
    if mode not in ("avg", "max"):
        raise OperatorError(f"mode: expected avg or max, got {mode!r}")
    shifted = version >= 16 and coordinate_transformation_mode == "half_pixel"
    left, top, right, bottom = (rois * spatial_scale - (0.5 if shifted else 0.0)).unbind(1)
    rows = _points(top, bottom, output_height, x.shape[2], sampling_ratio, shifted)
    columns = _points(left, right, output_width, x.shape[3], sampling_ratio, shifted)
    image = x[batch_indices.long()]
    if mode == "max":
        return _largest_corner(image, rows, columns)
    shares = [_hats(*one, size) for one, size in zip((rows, columns), x.shape[2:], strict=True)]
    # (N, P, H), (N, Q, W): how much each row and each column counts in a bin.
    return torch.einsum("nph,nchw,nqw->ncpq", shares[0], image, shares[1])


def _points(
    start: Tensor, end: Tensor, bins: int, size: int, ratio: int, shifted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis, (N, bins, points) places and whether the image reaches there, and (N, 1, 1)
    the points of each bin that count.
    """
    length = end - start if shifted else (end - start).clamp(min=1.0)
    width = (length / bins).reshape(-1, 1, 1)
    if ratio > 0:
        most = ratio
        count = torch.full_like(width, ratio)
    else:
        most = -(-size // bins) + 1
        count = torch.ceil(width)
        torch._assert_async(
            (count <= most).all(),
            f"RoiAlign: a region is longer than the {size} numbers of the image; give it a"
            " sampling_ratio",
        )
    point = torch.arange(most, dtype=start.dtype, device=start.device)
    corner = torch.arange(bins, dtype=start.dtype, device=start.device).reshape(-1, 1) * width
    place = start.reshape(-1, 1, 1) + corner + (point + 0.5) * width / count.clamp(min=1)
    inside = (place >= -1) & (place <= size) & (point < count)
    return place.clamp(0, size - 1), inside, count.clamp(min=1)


def _hats(place: Tensor, inside: Tensor, count: Tensor, size: int) -> Tensor:
    """(N, bins, size) share of each row in each bin: the mean of linear interpolations."""
    row = torch.arange(size, dtype=place.dtype, device=place.device)
    hats = (1 - (place.unsqueeze(-1) - row).abs()).clamp(min=0) * inside.unsqueeze(-1)
    return hats.sum(2) / count


def _largest_corner(
    image: Tensor, rows: tuple[Tensor, Tensor, Tensor], columns: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """ONNX's maximum: over the four weighted corners of all points, each for itself."""
    shape = (*rows[0].shape, *columns[0].shape[1:])  # N, P, points, Q, points
    region = torch.arange(len(image), device=image.device).reshape(-1, 1, 1)
    valid = rows[1].flatten(1).unsqueeze(2) & columns[1].flatten(1).unsqueeze(1)
    counted = [_counted(one).flatten(1) for one in (rows, columns)]
    used = counted[0].unsqueeze(2) & counted[1].unsqueeze(1)
    best = None
    for row, row_share in _corners(rows[0], image.shape[2]):
        for column, column_share in _corners(columns[0], image.shape[3]):
            share = row_share.unsqueeze(2) * column_share.unsqueeze(1) * valid
            value = image[region, :, row.unsqueeze(2), column.unsqueeze(1)] * share.unsqueeze(-1)
            value = torch.where(used.unsqueeze(-1), value, float("-inf"))
            best = value if best is None else torch.maximum(best, value)
    assert best is not None
    return best.reshape(*shape, -1).amax((2, 4)).permute(0, 3, 1, 2)


def _counted(axis: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Whether a point is one of its bin's, inside of the image or not."""
    place, _, count = axis
    return (torch.arange(place.shape[2], device=place.device) < count).expand(place.shape)


def _corners(place: Tensor, size: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """The index below and above each place, and their shares; (N, bins * points)."""
    place = place.flatten(1)
    low = place.floor().clamp(max=size - 1)
    share = place - low
    high = (low + 1).clamp(max=size - 1)
    return (low.long(), 1 - share), (high.long(), share)


def max_roi_pool(x: Tensor, rois: Tensor, pooled_shape: Integers, spatial_scale: float) -> Tensor:
    """The largest number in each bin of each region, whose edges are rounded; 0 of an empty bin."""
    image = x[rois[:, 0].long()]
    left, top, right, bottom = torch.floor(rois[:, 1:] * spatial_scale + 0.5).unbind(1)
    rows = _bins(top, bottom, pooled_shape[0], x.shape[2])
    columns = _bins(left, right, pooled_shape[1], x.shape[3])
    parts = []
    for q in range(pooled_shape[1]):
        inside = columns[:, q].reshape(len(rois), 1, 1, -1)
        strip = torch.where(inside, image, float("-inf")).amax(3)
        bins = [
            torch.where(rows[:, p].unsqueeze(1), strip, float("-inf")).amax(2)
            for p in range(pooled_shape[0])
        ]
        parts.append(torch.stack(bins, -1))
    y = torch.stack(parts, -1)
    return torch.where(y == float("-inf"), torch.zeros_like(y), y)


def _bins(start: Tensor, end: Tensor, bins: int, size: int) -> Tensor:
    """(N, bins, size): whether a row lies in a bin."""
    width = ((end - start + 1).clamp(min=1) / bins).unsqueeze(1)
    bin_ = torch.arange(bins, device=start.device)
    first = (torch.floor(bin_ * width) + start.unsqueeze(1)).clamp(0, size)
    behind = (torch.ceil((bin_ + 1) * width) + start.unsqueeze(1)).clamp(0, size)
    row = torch.arange(size, device=start.device)
    return (row >= first.unsqueeze(2)) & (row < behind.unsqueeze(2))


def deform_conv(
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    dilations: Integers | None = None,
    group: int = 1,
    kernel_shape: Integers | None = None,
    offset_group: int = 1,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """A convolution whose kernel positions are moved by the offsets, and weighted by the mask."""
    if x.dim() != 4:
        raise OperatorError(f"expected images of 2 dimensions, got a tensor {tuple(x.shape)}")
    kernel, strides, dilations = tuple(w.shape[2:]), strides or (1, 1), dilations or (1, 1)
    sides = pairs("NOTSET", pads, tuple(x.shape[2:]), kernel, strides, dilations)
    x, taps = padded(x, sides), kernel[0] * kernel[1]
    count, (rows, columns) = len(x), offset.shape[2:]
    moved = offset.reshape(count * offset_group, taps, 2, rows, columns)
    places = [_places(kernel[i], strides[i], dilations[i], moved.shape[3 + i], x) for i in range(2)]
    # (taps, rows, columns) the place of each tap without offsets, tap by tap row after row
    y = places[0].unsqueeze(1).expand(-1, kernel[1], -1).reshape(taps, rows, 1) + moved[:, :, 0]
    z = places[1].unsqueeze(0).expand(kernel[0], -1, -1).reshape(taps, 1, columns) + moved[:, :, 1]
    # grid_sample's -1 and 1 are the outer edges of the first and last number
    grid = torch.stack([(2 * z + 1) / x.shape[3] - 1, (2 * y + 1) / x.shape[2] - 1], -1)
    images = x.reshape(count * offset_group, -1, *x.shape[2:])
    read = functional.grid_sample(images, grid.flatten(1, 2), align_corners=False)
    read = read.reshape(count, offset_group, -1, taps, rows * columns)
    if mask is not None:
        read = read * mask.reshape(count, offset_group, 1, taps, -1)
    read = read.reshape(count, group, -1, rows * columns)
    weight = w.reshape(group, w.shape[0] // group, -1)
    made = (weight @ read).reshape(count, -1, rows, columns)
    return made if b is None else made + b.reshape(-1, 1, 1)


def _places(kernel: int, stride: int, dilation: int, size: int, like: Tensor) -> Tensor:
    """(kernel, size) where each tap reads for each output, along one axis."""
    tap = torch.arange(kernel, dtype=like.dtype, device=like.device) * dilation
    output = torch.arange(size, dtype=like.dtype, device=like.device) * stride
    return tap.unsqueeze(1) + output
