"""Translations that keep PyTorch's gradient at special points, and its values there.

torch's exporter takes an operator apart into others of ONNX. Where the operator has no derivative,
or several possible ones, the parts often have another one than PyTorch chose: a square root at zero
makes zero times infinity of a standard deviation, a maximum shares a gradient among equals that
PyTorch gives to the first of them. tests/support/special_points.py has the points, and
docs/operators.md what comes of them.
"""

from collections.abc import Callable, Sequence
from math import inf, isinf, log, pi
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops.core import (
    aten_scatter_reduce as scatter_without_mean,
)
from onnxscript.function_libs.torch_lib.ops.nn import (
    aten_celu as celu_in_float32,
)
from onnxscript.function_libs.torch_lib.ops.nn import (
    aten_scaled_dot_product_attention as without_hidden_rows,
)

from planner.model.scopes import OPEN_MARK

op: Any = opset18  # its types are those of its own front end
aten = torch.ops.aten
BOOL, INT64 = ir.DataType.BOOL.value, ir.DataType.INT64.value


def number(value: float, like: Any) -> Any:
    """A number in the type of a tensor, with all the digits of that type."""
    return op.CastLike(op.Constant(value=ir.tensor(np.asarray(value, np.float64))), like)


def axes(*dims: int) -> Any:
    """Dimensions as an input of ONNX."""
    return op.Constant(value_ints=list(dims))


def _safe_root(squares: Any, exponent: float = 0.5) -> Any:
    """A power below one of numbers from zero on, with the gradient zero at zero."""
    zero = op.Equal(squares, number(0.0, squares))
    root = op.Where(zero, number(1.0, squares), squares)
    root = op.Sqrt(root) if exponent == 0.5 else op.Pow(root, number(exponent, squares))
    return op.Where(zero, number(0.0, squares), root)


# ---- bounds


def _clamp(self: Any, min: float | None = None, max: float | None = None) -> Any:
    """`clamp` between numbers: Clip, whose gradient is one at the bounds."""
    if not self.dtype.is_floating_point() and isinstance(min or max, float):
        raise NotImplementedError("clamp of integers between floats")
    return _clip(self, min, max)


def _clip(x: Any, low: float | None, high: float | None) -> Any:
    return op.Clip(x, *(None if one is None else number(one, x) for one in (low, high)))


def _clamp_max(self: Any, max: float) -> Any:
    """`clamp_max` with a number."""
    return _clamp(self, None, max)


def _hardtanh(self: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """`hardtanh`: Clip with a mark, as its gradient is zero at the bounds."""
    made = _clip(self, min_val, max_val)
    made.producer().metadata_props[OPEN_MARK] = "1"
    return made


def _relu6(self: Any) -> Any:
    """`relu6`, likewise."""
    return _hardtanh(self, 0.0, 6.0)


def _clamp_tensor(self: Any, min: Any = None, max: Any = None) -> Any:
    """`clamp` between tensors, which get the gradient only where they are the result.

    The exporter's Max and Min share it among equals. Numbers are tensors here, too, if the module
    is in float64.
    """
    low, high = (None if one is None else op.CastLike(one, self) for one in (min, max))
    if all(one is None or not len(one.shape) for one in (min, max)):
        return op.Clip(self, low, high)
    made = self
    if low is not None:
        made = op.Where(op.GreaterOrEqual(made, low), made, op.Max(made, low))
    if high is not None:
        made = op.Where(op.LessOrEqual(made, high), made, op.Min(made, high))
    return made


def _clamp_max_tensor(self: Any, max: Any) -> Any:
    """`clamp_max` with a tensor."""
    return _clamp_tensor(self, None, max)


def _celu(self: Any, alpha: float = 1.0) -> Any:
    """`celu`, in float64 by Elu: ONNX's Celu is of float32 alone."""
    if self.dtype != ir.DataType.DOUBLE:
        return celu_in_float32(self, alpha)
    scale = number(alpha, self)
    below = op.Mul(scale, op.Elu(op.Div(self, scale)))
    return op.Where(op.Greater(self, number(0.0, self)), self, below)


def _nan_to_num(
    self: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    """`nan_to_num`: without a number, zero and the largest and smallest of the type."""
    if not self.dtype.is_floating_point():
        return op.Identity(self)
    largest = self.dtype.max if posinf is None else posinf
    smallest = self.dtype.min if neginf is None else neginf
    made = op.Where(op.IsNaN(self), number(nan or 0.0, self), self)
    made = op.Where(op.Equal(self, number(inf, self)), number(largest, self), made)
    return op.Where(op.Equal(self, number(-inf, self)), number(smallest, self), made)


# ---- the largest of equals


def _max_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """`max` along a dimension, and its index: the first of equals gets the whole gradient."""
    return _extreme(self, op.ArgMax, dim, keepdim)


def _min_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """`min` along a dimension, likewise."""
    return _extreme(self, op.ArgMin, dim, keepdim)


def _extreme(self: Any, index_of: Callable[..., Any], dim: int, keepdim: bool) -> tuple[Any, Any]:
    if not len(self.shape):
        return op.Identity(self), op.Constant(value_int=0)
    if self.dtype == ir.DataType.BOOL:
        raise NotImplementedError("the largest of booleans along a dimension")
    made, index = _picked(self, index_of, dim)
    return (made, index) if keepdim else (op.Squeeze(made, axes(dim)), op.Squeeze(index, axes(dim)))


def _picked(x: Any, index_of: Callable[..., Any], dim: int) -> tuple[Any, Any]:
    """The numbers at an index along a dimension, and the index; the dimension stays, of size 1."""
    index = index_of(x, axis=dim, keepdims=1)
    return op.GatherElements(x, index, axis=dim), index


def _adaptive_max_pool(self: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """`adaptive_max_pool1d`, `2d` and `3d`, and the indices: the first of equals gets the gradient.

    Args:
        self: (N, C, ...) or (C, ...).
        output_size: of each dimension behind C: one, or a divisor of the input's size.
    """
    rank = len(output_size)
    if all(one == 1 for one in output_size):
        before = op.Shape(self, end=-rank)
        flat = op.Reshape(self, op.Concat(before, axes(-1), axis=0))
        shape = op.Concat(before, axes(*(1,) * rank), axis=0)
        made, index = _picked(flat, op.ArgMax, -1)
        return op.Reshape(made, shape), op.Reshape(index, shape)
    sizes = tuple(self.shape)[-rank:]
    if not all(isinstance(n, int) and n % k == 0 for n, k in zip(sizes, output_size, strict=True)):
        raise NotImplementedError("windows of different sizes")
    window = [n // k for n, k in zip(sizes, output_size, strict=True)]
    with_samples = self if len(self.shape) > rank + 1 else op.Unsqueeze(self, axes(0))
    made, index = op.MaxPool(with_samples, kernel_shape=window, strides=window)
    if with_samples is not self:
        made, index = op.Squeeze(made, axes(0)), op.Squeeze(index, axes(0))
    # ONNX counts places in the whole tensor, torch in each plane.
    plane = op.Constant(value_int=int(np.prod(sizes)))
    return made, op.Mod(index, plane)


# ---- deviations and norms


def _std_correction(
    self: Any, dim: Sequence[int] | None = None, correction: float | None = None,
    keepdim: bool = False,
) -> Any:  # fmt: skip
    """`std`: the norm of what is centred, whose gradient is zero where all numbers are equal."""
    return _deviation_and_mean(self, dim, 1 if correction is None else correction, keepdim)[0]


def _std_dim(
    self: Any, dim: Sequence[int] | None = None, unbiased: bool = True, keepdim: bool = False
) -> Any:
    """`std` along dimensions."""
    return _deviation_and_mean(self, dim, int(unbiased), keepdim)[0]


def _std(self: Any, unbiased: bool = True) -> Any:
    """`std` of all numbers."""
    return _deviation_and_mean(self, None, int(unbiased), False)[0]


def _std_mean_correction(
    self: Any, dim: Sequence[int] | None = None, correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """`std_mean`."""
    return _deviation_and_mean(self, dim, 1 if correction is None else correction, keepdim)


def _std_mean_dim(
    self: Any, dim: Sequence[int] | None = None, unbiased: bool = True, keepdim: bool = False
) -> tuple[Any, Any]:
    """`std_mean` along dimensions."""
    return _deviation_and_mean(self, dim, int(unbiased), keepdim)


def _std_mean(self: Any, unbiased: bool = True) -> tuple[Any, Any]:
    """`std_mean` of all numbers."""
    return _deviation_and_mean(self, None, int(unbiased), False)


def _deviation_and_mean(
    self: Any, dim: Sequence[int] | None, correction: float, keepdim: bool
) -> tuple[Any, Any]:
    """The deviation and the mean."""
    rank = len(self.shape)
    dims = [one % rank for one in dim] if dim else list(range(rank))
    mean = op.ReduceMean(self, axes(*dims), keepdims=1)
    norm = op.ReduceL2(op.Sub(self, mean), axes(*dims), keepdims=int(keepdim))
    count = op.ReduceProd(op.Gather(op.Shape(self), axes(*dims)), keepdims=0)
    count = op.Sub(op.CastLike(count, self), number(correction, self))
    deviation = op.Div(norm, op.Sqrt(op.Max(count, number(0.0, self))))
    return deviation, mean if keepdim else op.Squeeze(mean, axes(*dims))


def _vector_norm(
    self: Any, ord: float = 2.0, dim: Sequence[int] | None = None, keepdim: bool = False,
    dtype: int = -1,
) -> Any:  # fmt: skip
    """`linalg_vector_norm`: the gradient of zeros is zero, whatever the order."""
    x = self if dtype in (-1, None) else op.Cast(self, to=dtype)
    dims = axes(*(dim if dim else range(len(self.shape))))
    keepdims = int(keepdim)
    if isinf(ord):
        return (op.ReduceMax if ord > 0 else op.ReduceMin)(op.Abs(x), dims, keepdims=keepdims)
    if ord == 0:
        other = op.Not(op.Equal(x, number(0.0, x)))
        return op.ReduceSum(op.CastLike(other, x), dims, keepdims=keepdims)
    if ord in (1, 2):
        return (op.ReduceL1 if ord == 1 else op.ReduceL2)(x, dims, keepdims=keepdims)
    size = op.Abs(x)
    if ord < 1:  # the derivative of the power itself is infinite at zero
        return _safe_root(op.ReduceSum(_safe_root(size, ord), dims, keepdims=keepdims), 1 / ord)
    powers = op.Pow(size, number(ord, x))
    return _safe_root(op.ReduceSum(powers, dims, keepdims=keepdims), 1 / ord)


MANY = 25
"""Rows from which on torch computes distances by products, if it is free to choose."""


def _cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """`cdist`: distances of all pairs of rows; the gradient of equal rows is zero.

    Args:
        x1: (..., P, M).
        x2: (..., R, M).
        compute_mode: torch's: 0 or None chooses, 1 multiplies, 2 subtracts.
    """
    rows = (x1.shape[-2], x2.shape[-2])
    many = any(isinstance(one, int) and one > MANY for one in rows)
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return _distance_by_products(x1, x2)
    if isinf(p) or p == 0:
        raise NotImplementedError(f"cdist with p={p}")
    return _vector_norm(op.Sub(op.Unsqueeze(x1, axes(-2)), op.Unsqueeze(x2, axes(-3))), p, [-1])


def _distance_by_products(x1: Any, x2: Any) -> Any:
    """The root of |a|^2 + |b|^2 - 2 a b, which torch takes for many rows."""

    def squares(x: Any) -> Any:
        return op.ReduceSumSquare(x, axes(-1), keepdims=1)

    def ones(x: Any) -> Any:
        return op.Expand(number(1.0, x), op.Shape(squares(x)))

    rank = len(x2.shape)
    left = op.Concat(op.Mul(x1, number(-2.0, x1)), squares(x1), ones(x1), axis=-1)
    right = op.Concat(x2, ones(x2), squares(x2), axis=-1)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return _safe_root(_clip(op.MatMul(left, op.Transpose(right, perm=swapped)), 0.0, None))


# ---- logarithms


def _log_sigmoid(self: Any) -> Any:
    """`log_sigmoid`; the exporter's logarithm of a sigmoid is minus infinity below -700."""
    return op.Neg(op.Softplus(op.Neg(self)))


NONE, AVERAGE = range(2)  # torch's reductions of a loss; 2 is the sum


def _reduced(loss: Any, reduction: int) -> Any:
    if reduction == NONE:
        return loss
    return (op.ReduceMean if reduction == AVERAGE else op.ReduceSum)(loss, keepdims=0)


def _binary_cross_entropy_with_logits(
    self: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = AVERAGE
) -> Any:
    """`binary_cross_entropy_with_logits`, as torch computes it: finite for large scores.

    Source: torch's aten/src/ATen/native/Loss.cpp.
    """
    one = number(1.0, self)
    positive = _log_sigmoid(self)
    if pos_weight is not None:
        factor = op.Add(op.Mul(op.Sub(pos_weight, one), target), one)
        positive = op.Mul(factor, positive)
    loss = op.Sub(op.Mul(op.Sub(one, target), self), positive)
    return _reduced(loss if weight is None else op.Mul(loss, weight), reduction)


def _logit(self: Any, eps: float | None = None) -> Any:
    """`logit`: infinite gradients at zero and one."""
    x = self if eps is None else _clip(self, eps, 1 - eps)
    return op.Sub(op.Log(x), op.Log(op.Sub(number(1.0, x), x)))


def _xlogy(self: Any, other: Any) -> Any:
    """`xlogy`: zero times a logarithm is zero; the logarithm is no gradient of that zero."""
    x, y = (one if isinstance(one, ir.Value) else None for one in (self, other))
    x = number(self, other) if x is None else x
    y = number(other, self) if y is None else y
    zero = number(0.0, x)
    nothing = op.And(op.Equal(x, zero), op.LessOrEqual(y, zero))
    # The gradient of y is no number there, in torch as here.
    return op.Where(nothing, zero, op.Mul(op.Where(nothing, zero, x), op.Log(y)))


def _xlog1py(self: Any, other: Any) -> Any:
    """`special.xlog1py`, likewise."""
    return _xlogy(self, op.Add(other, number(1.0, other)))


def _logaddexp(self: Any, other: Any) -> Any:
    """`logaddexp`; the exporter's sum of exponentials is infinite above 709."""
    left = op.Expand(self, op.Shape(other))
    both = (left, op.Expand(other, op.Shape(left)))
    pairs = op.Concat(*(op.Unsqueeze(one, axes(-1)) for one in both), axis=-1)
    return op.ReduceLogSumExp(pairs, axes(-1), keepdims=0)


def _logaddexp2(self: Any, other: Any) -> Any:
    """`logaddexp2`, likewise."""
    unit = number(log(2), self)
    return op.Div(_logaddexp(op.Mul(self, unit), op.Mul(other, unit)), unit)


def _logcumsumexp(self: Any, dim: int) -> Any:
    """`logcumsumexp`, as `cumprod`."""
    return _doubled(self, dim, _logaddexp)


# ---- angles


def _sinc(self: Any) -> Any:
    """`sinc`: one at zero, where its gradient is zero."""
    zero = op.Equal(self, number(0.0, self))
    turned = op.Mul(op.Where(zero, number(1.0, self), self), number(pi, self))
    return op.Where(zero, number(1.0, self), op.Div(op.Sin(turned), turned))


def _atan2(self: Any, other: Any) -> Any:
    """`atan2`: the angle of (other, self); its gradient is zero at the origin.

    The arc tangent is taken of the quotient of the smaller by the larger coordinate, so that
    nothing is divided by zero; what is added depends on signs alone, those of zeros included.
    """
    y, x = self, other
    zero, half, whole = (number(one, y) for one in (0.0, pi / 2, pi))
    steep = op.Greater(op.Abs(y), op.Abs(x))
    small, large = op.Where(steep, x, y), op.Where(steep, y, x)
    origin = op.Equal(large, zero)
    small = op.Where(origin, zero, small)
    angle = op.Atan(op.Div(small, op.Where(origin, number(1.0, y), large)))
    sign = op.Where(_negative(y), number(-1.0, y), number(1.0, y))
    flat = op.Add(angle, op.Where(_negative(x), op.Mul(sign, whole), zero))
    return op.Where(steep, op.Sub(op.Mul(sign, half), angle), flat)


def _negative(x: Any) -> Any:
    """Whether numbers have a minus sign; zeros may have one."""
    zero = number(0.0, x)
    return op.Or(op.Less(x, zero), op.Less(op.Reciprocal(x), zero))


# ---- products and scatters


def _cumprod(self: Any, dim: int, dtype: int = -1) -> Any:
    """`cumprod`: nothing is divided, so zeros do no harm."""
    return _doubled(self if dtype in (-1, None) else op.Cast(self, to=dtype), dim, op.Mul)


def _doubled(x: Any, dim: int, combined: Callable[[Any, Any], Any]) -> Any:
    """All first 1, 2, 3, .. numbers combined, of 1, 2, 4, .. neighbours in turn.

    Source: Hillis and Steele, "Data parallel algorithms", CACM 1986.
    """
    if not len(x.shape):
        return op.Identity(x)
    size, step = x.shape[dim], 1
    if not isinstance(size, int):
        raise NotImplementedError("running products along a symbolic dimension")
    while step < size:
        first = op.Slice(x, axes(0), axes(step), axes(dim))
        before = op.Slice(x, axes(0), axes(size - step), axes(dim))
        behind = op.Slice(x, axes(step), axes(size), axes(dim))
        x = op.Concat(first, combined(before, behind), axis=dim)
        step *= 2
    return x


def _scatter_reduce(
    self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
) -> Any:
    """`scatter_reduce`; the exporter takes the reduction "mean" for no reduction."""
    if reduce != "mean":
        return scatter_without_mean(self, dim, index, src, reduce, include_self)
    if not self.dtype.is_floating_point() or not len(self.shape):
        raise NotImplementedError("the mean of integers, or into a scalar")
    one, zero = number(1.0, self), number(0.0, self)
    nothing, shape = op.Expand(zero, op.Shape(self)), op.Shape(index)
    count = op.ScatterElements(nothing, index, op.Expand(one, shape), axis=dim, reduction="add")
    start = self if include_self else nothing
    total = op.ScatterElements(start, index, src, axis=dim, reduction="add")
    if include_self:
        return op.Div(total, op.Add(count, one))
    return op.Where(op.Equal(count, zero), self, op.Div(total, op.Max(count, one)))


# ---- attention


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention`: a query that may see no key gets zeros, and no gradient.

    For the scores it may see all keys: this changes the mask alone, which is small.
    """
    others = {"scale": scale, "enable_gqa": enable_gqa}
    if attn_mask is None:
        return without_hidden_rows(query, key, value, None, dropout_p, is_causal, **others)
    zero, hidden = number(0.0, query), number(-inf, query)
    boolean = attn_mask.dtype == ir.DataType.BOOL
    allowed = attn_mask if boolean else op.Greater(attn_mask, op.CastLike(hidden, attn_mask))
    sees = op.Cast(op.ReduceMax(op.CastLike(allowed, query), axes(-1), keepdims=1), to=BOOL)
    if boolean:
        mask = op.Where(op.Or(allowed, op.Not(sees)), zero, hidden)
    else:
        mask = op.Where(sees, attn_mask, op.CastLike(zero, attn_mask))
    made = without_hidden_rows(query, key, value, mask, dropout_p, **others)
    return op.Where(sees, made, zero)


AT_SPECIAL_POINTS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp_tensor,
    aten.clamp_min.default: _clamp,
    aten.clamp_min.Tensor: _clamp_tensor,
    aten.clamp_max.default: _clamp_max,
    aten.clamp_max.Tensor: _clamp_max_tensor,
    aten.hardtanh.default: _hardtanh,
    aten.relu6.default: _relu6,
    aten.celu.default: _celu,
    aten.nan_to_num.default: _nan_to_num,
    aten.max.dim: _max_dim,
    aten.min.dim: _min_dim,
    aten.adaptive_max_pool1d.default: _adaptive_max_pool,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    aten.adaptive_max_pool3d.default: _adaptive_max_pool,
    aten.std.default: _std,
    aten.std.dim: _std_dim,
    aten.std.correction: _std_correction,
    aten.std_mean.default: _std_mean,
    aten.std_mean.dim: _std_mean_dim,
    aten.std_mean.correction: _std_mean_correction,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.cdist.default: _cdist,
    aten.log_sigmoid.default: _log_sigmoid,
    aten.binary_cross_entropy_with_logits.default: _binary_cross_entropy_with_logits,
    aten.logaddexp.default: _logaddexp,
    aten.logaddexp2.default: _logaddexp2,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.logit.default: _logit,
    aten.xlogy.Tensor: _xlogy,
    aten.xlogy.Scalar_Self: _xlogy,
    aten.xlogy.Scalar_Other: _xlogy,
    aten.special_xlogy.default: _xlogy,
    aten.special_xlogy.self_scalar: _xlogy,
    aten.special_xlogy.other_scalar: _xlogy,
    aten.special_xlog1py.default: _xlog1py,
    aten.sinc.default: _sinc,
    aten.atan2.default: _atan2,
    aten.cumprod.default: _cumprod,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.scaled_dot_product_attention.default: _attention,
}
