"""Resize and Upsample.

Along each axis by itself, an output position is a weighted sum of a few source positions, its taps
(1 for nearest, 2 for linear, 4 for cubic, more with antialias). Their indices and weights are
computed once per geometry, with numpy.
"""

from functools import lru_cache
from math import ceil, floor

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from planner.operators.shape import Integers, Numbers, positive
from planner.support.arrays import Bools, Floats, Ints
from planner.support.errors import OperatorError

# Taps on each side of an output position.
_MODES = {"nearest": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "cubic": 2}


def upsample(
    x: Tensor,
    scales: Numbers | None = None,
    height_scale: float | None = None,
    width_scale: float | None = None,
    *,
    mode: str,
) -> Tensor:
    """The predecessor of Resize."""
    if scales is None:
        scales = (1.0, 1.0, float(height_scale or 1), float(width_scale or 1))
    return resize(x, scales=scales, mode=mode, version=10)


def resize(
    x: Tensor,
    roi: Numbers | None = None,
    scales: Numbers | None = None,
    sizes: Integers | None = None,
    antialias: int = 0,
    axes: Integers | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    *,
    version: int,
) -> Tensor:
    """The given axes at new sizes, or by scales. Up to version 10 asymmetric and by floor."""
    if mode not in _MODES:
        raise OperatorError(f"mode: expected one of {', '.join(_MODES)}, got {mode!r}")
    if version <= 10:
        coordinate_transformation_mode, nearest_mode = "asymmetric", "floor"
    axes = positive(axes if axes is not None else tuple(range(x.dim())), x.dim())
    targets = _targets(x, axes, scales, sizes, keep_aspect_ratio_policy)
    crops = _crops(coordinate_transformation_mode, roi, len(axes))
    fused = None
    if not antialias and mode != "cubic":
        fused = _fused(x, axes, targets, mode, coordinate_transformation_mode, nearest_mode)
    if fused is not None:
        return fused
    for axis, (size, scale), crop in zip(axes, targets, crops, strict=True):
        geometry = (x.shape[axis], size, scale, coordinate_transformation_mode, crop)
        kernel = (mode, nearest_mode, cubic_coeff_a, exclude_outside, antialias)
        if size != x.shape[axis] or scale != 1 or crop is not None:
            x = _along(x, axis, *_taps(geometry, kernel), extrapolation_value)
    return x


def _targets(
    x: Tensor, axes: Integers, scales: Numbers | None, sizes: Integers | None, policy: str
) -> list[tuple[int, float]]:
    """Per axis the new size, and the scale of its coordinates, which may be no quotient of sizes:
    a scale of 1.3 makes 5 positions 6, still 1 / 1.3 apart.
    """
    old = [x.shape[axis] for axis in axes]
    if scales:
        return [(floor(n * s), s) for n, s in zip(old, scales, strict=True)]
    if not sizes:
        raise OperatorError("scales, sizes: expected one of them to be a constant, got neither")
    ratios = [size / n for size, n in zip(sizes, old, strict=True)]
    match policy:
        case "stretch":
            return list(zip(sizes, ratios, strict=True))
        case "not_larger" | "not_smaller":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            return [(floor(n * ratio + 0.5), ratio) for n in old]
    raise OperatorError(
        f"keep_aspect_ratio_policy: expected stretch, not_larger or not_smaller, got {policy!r}"
    )


def _crops(transformation: str, roi: Numbers | None, rank: int) -> list[tuple[float, float] | None]:
    if transformation != "tf_crop_and_resize":
        return [None] * rank
    if not roi:
        raise OperatorError("roi: expected a constant for tf_crop_and_resize, got none")
    return list(zip(roi[:rank], roi[rank:], strict=True))


def _fused(
    x: Tensor, axes: Integers, targets: list[tuple[int, float]], mode: str, how: str, nearest: str
) -> Tensor | None:
    """The result of torch's own interpolation where it is the same, for whole images and exact
    scales; else None.
    """
    goal = list(x.shape)
    for axis, (size, scale) in zip(axes, targets, strict=True):
        goal[axis] = size
        if size != x.shape[axis] * scale:
            return None
    spatial = goal[2:]
    if x.dim() not in (3, 4, 5) or goal[:2] != list(x.shape[:2]) or not x.is_floating_point():
        return None
    if mode == "nearest":
        same = how == "asymmetric" and nearest == "floor"
        return (
            functional.interpolate(x, spatial, mode="nearest") if same and _whole(targets) else None
        )
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}[x.dim()]
    if how == "half_pixel" or (how == "pytorch_half_pixel" and min(spatial) > 1):
        return functional.interpolate(x, spatial, mode=linear, align_corners=False)
    if how == "align_corners" and min(spatial) > 1:
        return functional.interpolate(x, spatial, mode=linear, align_corners=True)
    return None


def _whole(targets: list[tuple[int, float]]) -> bool:
    return all(scale == int(scale) for _, scale in targets)


def _along(
    x: Tensor,
    axis: int,
    index: Ints,
    weight: Floats,
    outside: Bools,
    extrapolation: float,
) -> Tensor:
    """The weighted sum of the taps along one axis.

    Args:
        index, weight, outside: see `_taps`.
        extrapolation: the value outside the crop.
    """
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    parts = []
    for row, share in zip(index, weight, strict=True):
        part = x.index_select(axis, torch.tensor(row.tolist(), device=x.device))
        if len(index) > 1:
            part = part * torch.tensor(share.tolist(), dtype=x.dtype, device=x.device).reshape(
                shape
            )
        parts.append(part)
    y = parts[0]
    for part in parts[1:]:
        y = y + part
    if outside.any():
        mask = torch.tensor(outside.tolist(), device=x.device).reshape(shape)
        y = torch.where(mask, torch.full_like(y, extrapolation), y)
    return y


@lru_cache(maxsize=256)
def _taps(
    geometry: tuple[int, int, float, str, tuple[float, float] | None],
    kernel: tuple[str, str, float, int, int],
) -> tuple[Ints, Floats, Bools]:
    """(taps, new size) source index and weight of each tap of each output position, and (new size,)
    whether the position lies outside the crop.

    Args:
        geometry: old size, new size, scale, coordinate transformation, crop.
        kernel: mode, nearest mode, the coefficient a of the cubic kernel, whether positions outside
            the source are excluded, whether to antialias.
    """
    old, new, scale, transformation, crop = geometry
    mode, nearest_mode, a, exclude_outside, antialias = kernel
    at = _coordinates(old, new, scale, transformation, crop)
    outside = (at < 0) | (at > old - 1) if crop is not None else np.zeros(new, dtype=bool)
    if mode == "nearest":
        index = np.clip(_nearest(at, nearest_mode), 0, old - 1)[None]
        return index.astype(int), np.ones_like(index), outside
    # Antialiasing widens the kernel by as much as the axis shrinks, so that every source position
    # is a tap somewhere.
    narrow = min(scale, 1.0) if antialias else 1.0
    reach = ceil(_MODES[mode] / narrow)
    offset = np.arange(1 - reach, reach + 1)[:, None]
    position = np.floor(at)[None] + offset
    distance = np.abs(at[None] - position) * narrow
    weight = _cubic(distance, a) if mode == "cubic" else np.clip(1 - distance, 0, None)
    if exclude_outside:
        weight = np.where((position >= 0) & (position < old), weight, 0)
    weight = weight / weight.sum(axis=0)
    # Taps beyond an edge read the edge, with their weights as they are.
    return np.clip(position, 0, old - 1).astype(int), weight, outside


def _coordinates(
    old: int, new: int, scale: float, transformation: str, crop: tuple[float, float] | None
) -> Floats:
    """The place of each output position in the source, by the formulas of ONNX's specification."""
    x = np.arange(new, dtype=float)
    match transformation:
        case "half_pixel":
            return (x + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (x + 0.5) / scale - 0.5 if new > 1 else np.zeros(1)
        case "half_pixel_symmetric":
            centre, adjustment = old / 2, new / (scale * old)
            return centre * (1 - adjustment) + (x + 0.5) / scale - 0.5
        case "align_corners":
            return x * (old - 1) / (old * scale - 1) if new > 1 else np.zeros(1)
        case "asymmetric":
            return x / scale
        case "tf_crop_and_resize" if crop is not None:
            start, end = crop
            if new == 1:
                return np.array([0.5 * (start + end) * (old - 1)])
            return start * (old - 1) + x * (end - start) * (old - 1) / (new - 1)
    raise OperatorError(f"coordinate_transformation_mode: {transformation!r} is not supported")


def _nearest(at: Floats, how: str) -> Floats:
    match how:
        case "round_prefer_floor":
            return np.ceil(at - 0.5)
        case "round_prefer_ceil":
            return np.floor(at + 0.5)
        case "floor":
            return np.floor(at)
        case "ceil":
            return np.ceil(at)
    raise OperatorError(f"nearest_mode: {how!r} is not supported")


def _cubic(x: Floats, a: float) -> Floats:
    """Keys' kernel at distance x."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))
