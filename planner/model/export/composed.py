"""Operators with a backward pass of their own, composed of operators that have the same gradient.

Each value is that of the operator, to the bit, and its gradient that of another expression: a value
v with the gradient of t is `v.detach() + (t - t.detach())`, whose second term is zero. A trace has
them in place of the operators, and `stops.py` keeps what is detached.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import TorchFunctionMode

_SHORT = (torch.float16, torch.bfloat16)


class Composed(TorchFunctionMode):
    """While a module is traced under it, the operators of `COMPOSED` are what stands there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch."""
        return COMPOSED.get(func, func)(*args, **(kwargs or {}))


def _with_gradient_of(value: Tensor, through: Tensor) -> Tensor:
    """A value with the gradient of another expression, which has to be finite."""
    return value.detach() + (through - through.detach())


# ---- embeddings


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`embedding`; the gradient of a row is divided by the number of times that it is read."""
    rows = functional.embedding(input, weight, padding_idx, max_norm, norm_type, sparse=sparse)
    if not scale_grad_by_freq:
        return rows
    counts = _counts(weight, input)[input.flatten()].view(input.shape)
    return _with_gradient_of(rows, rows / counts.unsqueeze(-1))


def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The same operator below torch.nn.functional."""
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


def _counts(weight: Tensor, indices: Tensor) -> Tensor:
    """(rows,) the number of times that each row of a table is read, in the type of the table."""
    read = indices.flatten().long()
    return weight.new_zeros(weight.shape[0]).scatter_add(
        0, read, weight.new_ones(1).expand(read.shape)
    )


# ---- fake quantization: aten/src/ATen/native/quantized/cpu/kernels/QuantizedOpKernels.cpp


def _fake_quantize_per_tensor(
    x: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> Tensor:
    """`fake_quantize_per_tensor_affine`: the gradient flows where nothing is cut off."""
    if not isinstance(scale, Tensor):
        scale = np.float32(scale)  # as torch's kernel has it
    return _Quantized(x, scale, zero_point, quant_min, quant_max).result()


def _fake_quantize_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> Tensor:
    """`fake_quantize_per_channel_affine`: the same with numbers of each channel."""
    wide = [-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())]
    zero_point = zero_point.view(wide)
    return _Quantized(x, scale.view(wide), zero_point, quant_min, quant_max).result()


def _learnable_per_tensor(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Tensor:
    """`_fake_quantize_learnable_per_tensor_affine`: scale and zero point have a gradient, too."""
    return _learnable(x, scale, zero_point, quant_min, quant_max, grad_factor)


def _learnable_per_channel(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> Tensor:
    """`_fake_quantize_learnable_per_channel_affine`: the same with numbers of each channel."""
    wide = [-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())]
    return _learnable(x, scale.view(wide), zero_point.view(wide), quant_min, quant_max, grad_factor)


def _learnable(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    grad_factor: float,
) -> Tensor:
    """Both with the gradients of scale and zero point.

    Source: Esser et al., Learned Step Size Quantization, ICLR 2020; Bhalgat et al., LSQ+, 2020.
    """
    rounded = zero_point.detach().round().clamp(quant_min, quant_max)
    made = _Quantized(x, scale.detach(), rounded, quant_min, quant_max)
    step = scale.detach()
    of_scale = torch.where(made.inside, (made.value - x) / step, made.value / step).detach()
    of_zero = torch.where(made.inside, torch.zeros_like(x), -step).detach()
    learned = (scale * of_scale + zero_point * of_zero) * grad_factor
    return made.result() + (learned - learned.detach())


class _Quantized:
    """A tensor that is rounded to multiples of a scale.

    Attributes:
        value: the quantized tensor.
        inside: the elements that are within the bounds.
    """

    def __init__(self, x: Tensor, scale: Any, zero_point: Any, low: int, high: int) -> None:
        wide = x.float() if x.dtype in _SHORT else x
        inverse = 1 / scale
        if not isinstance(scale, Tensor):
            scale, inverse = float(scale), float(inverse)
        counted = (wide * inverse).round() + zero_point
        self.x, self.inside = x, (counted >= low) & (counted <= high)
        steps = counted.clamp(low, high) - zero_point
        # By one scale torch multiplies in float32, by those of channels in the type of x.
        by_channel = isinstance(scale, Tensor) and scale.numel() > 1
        self.value: Tensor = ((steps if by_channel else steps.float()) * scale).to(x.dtype)

    def result(self) -> Tensor:
        """The quantized tensor, with the gradient of the elements within the bounds."""
        zero = torch.zeros_like(self.x)
        return self.value.detach() + torch.where(self.inside, self.x - self.x.detach(), zero)


# ---- losses


def _binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`binary_cross_entropy`: the gradient at the probabilities zero and one is finite. That of a
    target that is trained is zero there; torch's is infinite.

    Source: torch's aten/src/ATen/native/Loss.cpp.
    """
    value = functional.binary_cross_entropy(input.detach(), target.detach(), reduction="none")
    slope = (input - target) / ((1 - input) * input).clamp(min=1e-12)
    made = value + (input - input.detach()) * slope.detach()
    if target.requires_grad:
        slope = (1 - input).log() - input.log()
        slope = torch.where(slope.isfinite(), slope, torch.zeros_like(slope))
        made = made + (target - target.detach()) * slope.detach()
    return _reduced(made if weight is None else made * weight, size_average, reduce, reduction)


def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`multi_margin_loss`: the gradient at the margin is zero."""
    scores, target = (input, target) if input.dim() > 1 else (input[None], target.reshape(1))
    target = target.unsqueeze(1)
    short = functional.relu(margin - scores.gather(1, target) + scores) ** p
    short = short if weight is None else short * weight[target]
    loss = short.scatter(1, target, 0.0).sum(1) / scores.shape[1]
    loss = loss if input.dim() > 1 else loss.squeeze(0)
    return _reduced(loss, size_average, reduce, reduction)


def _reduced(
    loss: Tensor, size_average: bool | None, reduce: bool | None, reduction: str
) -> Tensor:
    """A loss of samples reduced by torch's three options, the first two of which are old."""
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


COMPOSED: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    torch.embedding: _torch_embedding,
    functional.binary_cross_entropy: _binary_cross_entropy,
    functional.multi_margin_loss: _multi_margin_loss,
    torch.fake_quantize_per_tensor_affine: _fake_quantize_per_tensor,
    torch.fake_quantize_per_channel_affine: _fake_quantize_per_channel,
    torch._fake_quantize_learnable_per_tensor_affine: _learnable_per_tensor,
    torch._fake_quantize_learnable_per_channel_affine: _learnable_per_channel,
}
"""What an operator of torch is replaced by, by the operator."""
