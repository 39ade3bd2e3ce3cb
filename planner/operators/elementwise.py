"""Operators that work on each number alone: arithmetic, activations, comparisons, casts."""

from functools import reduce

import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.nn import functional

from planner.support.errors import OperatorError


def div(a: Tensor, b: Tensor) -> Tensor:
    """The quotient; of integers, rounded towards zero."""
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


def mod(a: Tensor, b: Tensor, fmod: int) -> Tensor:
    """The remainder, with the sign of the divisor, or with fmod that of the dividend."""
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def power(x: Tensor, y: Tensor | float) -> Tensor:
    """The power, in the type of the base."""
    return torch.pow(x, y).to(x.dtype)


def total(*data: Tensor) -> Tensor:
    """The sum of all inputs."""
    return reduce(torch.add, data)


def mean(*data: Tensor) -> Tensor:
    """The mean of all inputs."""
    return reduce(torch.add, data) / len(data)


def maximum(*data: Tensor) -> Tensor:
    """The largest of all inputs."""
    return reduce(torch.maximum, data)


def minimum(*data: Tensor) -> Tensor:
    """The smallest of all inputs."""
    return reduce(torch.minimum, data)


def clip(
    input: Tensor,
    min: Tensor | float | None = None,
    max: Tensor | float | None = None,
    open_bounds: int = 0,
) -> Tensor:
    """The number held between min and max; max wins where min is above it. The gradient at a bound
    is one or, if `planner export` has marked the bounds as open, zero.

    Raises:
        OperatorError: if open bounds are no numbers.
    """
    if open_bounds:
        if not isinstance(min, float | int) or not isinstance(max, float | int):
            raise OperatorError("min, max: expected numbers beside a mark of open bounds")
        return functional.hardtanh(input, min, max)
    if isinstance(min, Tensor) == isinstance(max, Tensor) and not (min is None and max is None):
        return torch.clamp(input, min, max)  # type: ignore[arg-type]  # both of one kind
    input = input if min is None else torch.clamp(input, min=min)
    return input if max is None else torch.clamp(input, max=max)


def bit_shift(x: Tensor, y: Tensor, direction: str) -> Tensor:
    """Bits shifted to the LEFT or to the RIGHT."""
    match direction:
        case "LEFT":
            return torch.bitwise_left_shift(x, y)
        case "RIGHT":
            return torch.bitwise_right_shift(x, y)
    raise OperatorError(f"direction: expected LEFT or RIGHT, got {direction!r}")


def is_inf(x: Tensor, detect_negative: int, detect_positive: int) -> Tensor:
    """Whether a number is infinite, with the given signs."""
    negative = torch.isneginf(x) & bool(detect_negative)
    return negative | (torch.isposinf(x) & bool(detect_positive))


def cast(input: Tensor, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """Numbers in another type; 8-bit floats, with `saturate` and `round_mode`, are refused."""
    try:
        name = helper.tensor_dtype_to_np_dtype(to).name
    except KeyError:
        name = TensorProto.DataType.Name(to)
    if name not in _CAST:
        raise OperatorError(f"to: expected one of {', '.join(sorted(_CAST))}, got {name}")
    return input.to(_CAST[name])


_CAST = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}


def cast_like(
    input: Tensor, target_type: Tensor, saturate: int = 1, round_mode: str = "up"
) -> Tensor:
    """Numbers in the type of another tensor."""
    return input.to(target_type.dtype)


def p_relu(x: Tensor, slope: Tensor, *, version: int) -> Tensor:
    """LeakyRelu with a slope that is broadcast to x; up to version 6 it is per channel."""
    if version < 7 and x.dim() > 2 and slope.numel() > 1:
        slope = slope.reshape(-1, *(1,) * (x.dim() - 2))
    return torch.where(x > 0, x, x * slope)


def selu(x: Tensor, alpha: float, gamma: float) -> Tensor:
    """Elu times gamma."""
    return gamma * functional.elu(x, alpha)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); above 40 that is x in double precision too."""
    return functional.softplus(x, threshold=40)


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Computes alpha x + beta, held between 0 and 1, where its gradient is zero."""
    return functional.hardtanh(alpha * x + beta, 0, 1)


def gelu(x: Tensor, approximate: str) -> Tensor:
    """The normal distribution function times x, exactly, or with `approximate` by tanh."""
    if approximate not in ("none", "tanh"):
        raise OperatorError(f"approximate: expected none or tanh, got {approximate!r}")
    return functional.gelu(x, approximate=approximate)


def swish(x: Tensor, alpha: float) -> Tensor:
    """Computes x sigmoid(alpha x)."""
    return functional.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


def swi_glu(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Swish of a, times b."""
    return swish(a, alpha) * b


def thresholded_relu(x: Tensor, alpha: float) -> Tensor:
    """The number x above alpha, else 0."""
    return functional.threshold(x, alpha, 0)


def shrink(input: Tensor, bias: float, lambd: float) -> Tensor:
    """The number x, nearer to zero by the bias; zero within lambd of zero."""
    outer = torch.where(input < -lambd, input + bias, input - bias).to(input.dtype)
    return torch.where(input.abs() > lambd, outer, torch.zeros_like(input))


def bit_cast(input: Tensor, to: int, *, dtype: torch.dtype) -> Tensor:
    """The same bits as numbers of another type."""
    return input.view(dtype)
