"""Convolutions and matrix products, with their pads.

Pads are pairs (before, after) per spatial dimension. Torch knows equal ones only; the others are
made first.
"""

import torch
from torch import Tensor
from torch.nn import functional

from planner.operators.shape import Integers
from planner.support.errors import OperatorError

Pairs = tuple[tuple[int, int], ...]

_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_CONV_TRANSPOSE = {
    1: functional.conv_transpose1d,
    2: functional.conv_transpose2d,
    3: functional.conv_transpose3d,
}


def spatial_rank(x: Tensor) -> int:
    """The number of spatial dimensions: 1 to 3."""
    if x.dim() not in (3, 4, 5):
        raise OperatorError(f"expected 1 to 3 spatial dimensions, got a tensor {tuple(x.shape)}")
    return x.dim() - 2


def pairs(
    auto_pad: str,
    pads: Integers | None,
    sizes: Integers,
    kernel: Integers,
    strides: Integers,
    dilations: Integers,
) -> Pairs:
    """The pads, written out or computed by the rule of `auto_pad`.

    SAME makes ceil(size / stride) windows; of an odd pad the larger half is at the end for
    SAME_UPPER and at the beginning for SAME_LOWER.
    """
    rank = len(kernel)
    match auto_pad:
        case "NOTSET":
            pads = pads or (0,) * 2 * rank
            return tuple(zip(pads[:rank], pads[rank:], strict=True))
        case "VALID":
            return ((0, 0),) * rank
        case "SAME_UPPER" | "SAME_LOWER":
            windows = zip(sizes, kernel, strides, dilations, strict=True)
            totals = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in windows]
            return tuple(halves(total, auto_pad == "SAME_UPPER") for total in totals)
    raise OperatorError(f"auto_pad: expected NOTSET, VALID or SAME_*, got {auto_pad!r}")


def halves(total: int, upper: bool) -> tuple[int, int]:
    """The larger half at the end if `upper`, else at the beginning."""
    small = total // 2
    return (small, total - small) if upper else (total - small, small)


def padded(x: Tensor, pads: Pairs, value: float = 0.0) -> Tensor:
    """Pads the spatial dimensions; negative pads cut."""
    flat = [n for pair in reversed(pads) for n in pair]
    return functional.pad(x, flat, value=value) if any(flat) else x


def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    auto_pad: str = "NOTSET",
    dilations: Integers | None = None,
    group: int = 1,
    kernel_shape: Integers | None = None,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """Convolution; the kernel's shape is the weight's."""
    rank, kernel = spatial_rank(x), tuple(w.shape[2:])
    _same_kernel(kernel_shape, kernel)
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    sides = pairs(auto_pad, pads, tuple(x.shape[2:]), kernel, strides, dilations)
    if all(before == after for before, after in sides):
        padding = tuple(before for before, _ in sides)
        return _CONV[rank](x, w, b, strides, padding, dilations, group)
    return _CONV[rank](padded(x, sides), w, b, strides, 0, dilations, group)


def _same_kernel(kernel_shape: Integers | None, kernel: Integers) -> None:
    if kernel_shape is not None and tuple(kernel_shape) != kernel:
        raise OperatorError(f"kernel_shape: expected the weight's {kernel}, got {kernel_shape}")


def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    auto_pad: str = "NOTSET",
    dilations: Integers | None = None,
    group: int = 1,
    kernel_shape: Integers | None = None,
    output_padding: Integers | None = None,
    output_shape: Integers | None = None,
    pads: Integers | None = None,
    strides: Integers | None = None,
) -> Tensor:
    """The transpose of Conv: made without pads, then cut (or grown) to its place."""
    rank, kernel = spatial_rank(x), tuple(w.shape[2:])
    _same_kernel(kernel_shape, kernel)
    strides, dilations = strides or (1,) * rank, dilations or (1,) * rank
    extra, sizes = output_padding or (0,) * rank, tuple(x.shape[2:])
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = tuple(n * s for n, s in zip(sizes, strides, strict=True))
    if output_shape is None:
        sides = pairs(auto_pad, pads, sizes, kernel, strides, dilations)
    else:
        windows = zip(sizes, kernel, strides, dilations, strict=True)
        full = ((n - 1) * s + (k - 1) * d + 1 for n, k, s, d in windows)
        wanted = zip(full, extra, output_shape[-rank:], strict=True)
        sides = tuple(halves(n + e - out, auto_pad == "SAME_UPPER") for n, e, out in wanted)
    cut = tuple((-before, e - after) for (before, after), e in zip(sides, extra, strict=True))
    simple = all(e == 0 for e in extra) and all(a == b >= 0 for a, b in sides)
    padding = tuple(before for before, _ in sides) if simple else (0,) * rank
    bias = b if simple else None
    y = _CONV_TRANSPOSE[rank](x, w, bias, strides, padding, 0, group, dilations)
    if simple:
        return y
    y = padded(y, cut)
    return y if b is None else y + b.reshape(-1, *(1,) * rank)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transa: int = 0,
    transb: int = 0,
    broadcast: int = 1,
) -> Tensor:
    """Computes alpha A B + beta C, A and B transposed if asked, C broadcast where it must be."""
    a = a.t() if transa else a
    b = b.t() if transb else b
    if c is None:
        return a @ b if alpha == 1 else alpha * (a @ b)
    if not a.is_floating_point():
        alpha, beta = _whole(alpha, "alpha"), _whole(beta, "beta")
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _whole(number: float, name: str) -> int:
    if number != int(number):
        raise OperatorError(f"{name}: expected a whole number for integer matrices, got {number}")
    return int(number)


def einsum(*inputs: Tensor, equation: str) -> Tensor:
    """Einstein's sum."""
    return torch.einsum(equation, *inputs)


def causal_conv_with_state(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    activation: str = "none",
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """Each channel (samples, channels, positions) with the positions before it, those before the
    first from the state; then the state after it.
    """
    if activation not in ("none", "silu", "swish"):
        raise OperatorError(f"activation: expected none, silu or swish, got {activation!r}")
    kept = weight.shape[2] - 1
    if past_state is None:
        past_state = input.new_zeros((*input.shape[:2], kept))
    whole = torch.cat([past_state, input], 2)
    y = functional.conv1d(whole, weight, bias, groups=input.shape[1])
    y = y if activation == "none" else functional.silu(y)
    return (y, whole.narrow(2, whole.shape[2] - kept, kept)) if num_outputs > 1 else y
