"""Windows over an image that is cut into parts: each device gets the rows at the edges of its
neighbours' parts that its windows reach (a halo), and makes its own part of the output.

With h rows of the input, stride s, windows that reach over r rows and p rows of pads before the
first, part k of n has the outputs k h / (n s) to (k + 1) h / (n s), whose windows lie on the rows

    k h / n - p  to  (k + 1) h / n - s - p + r

so it needs p rows from the device before and r - s - p from the one after; at both ends of the
image there are pads in their place.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from planner.operators import convolution, pooling
from planner.operators.convolution import Pairs, padded, pairs
from planner.operators.parts.line import Cut
from planner.operators.shape import Integers

_Run = Callable[[Mapping[str, Any], "_Windows"], Tensor]
"""What an operator makes of its arguments and of the windows over a part."""


def reach(kernel: int, dilation: int) -> int:
    """The number of rows that a window reaches over."""
    return (kernel - 1) * dilation + 1


def fits(size: int, made: int, parts: int, window: tuple[int, int, int]) -> bool:
    """Whether windows over parts of a dimension need only the neighbours' rows.

    Args:
        size: of the dimension of the input.
        made: of that of the output.
        window: the rows that it reaches over, its stride, and the pads before the first.

    >>> [fits(224, 112, n, (7, 2, 3)) for n in (2, 16, 64)]
    [True, True, False]
    """
    rows, stride, before = window
    if size % parts or made % parts or size != stride * made or before >= rows:
        return False
    return max(before, rows - stride - before) <= size // parts


def _on_part(function: Callable[..., Any], run: _Run) -> Callable[..., Tensor]:
    """The function of an operator for a part of an image: its arguments, and `cuts`."""
    takes = signature(function)

    @wraps(function)
    def on_part(*args: Any, cuts: tuple[Cut, ...], **kwargs: Any) -> Tensor:
        given = takes.bind(*args, **kwargs).arguments
        assert given.get("num_outputs", 1) == 1, "the places are those in the whole image"
        kernel = tuple(given["w"].shape[2:]) if "w" in given else given["kernel_shape"]
        return run(given, _Windows(given["x"], kernel, given, cuts))

    return on_part


def _with_pads(function: Callable[..., Any], pad: float) -> Callable[..., Tensor]:
    """The function of an operator that pads an image with a value, for a part of it."""

    def run(given: Mapping[str, Any], windows: "_Windows") -> Tensor:
        own = {"x": windows.grown(given["x"], pad), "auto_pad": "NOTSET", "pads": windows.pads()}
        made: Tensor = function(**{**given, **own})
        return made

    return _on_part(function, run)


def _average(given: Mapping[str, Any], windows: "_Windows") -> Tensor:
    """AveragePool of a part of an image: sums of windows over the number of positions in them that
    count, of which each device knows its own.
    """
    kernel, with_pads = windows.kernel, bool(given.get("count_include_pad", 0))
    sides, wide = windows.left, windows.grown(given["x"])
    strides, dilations = windows.strides, windows.dilations
    sizes = tuple(wide.shape[2:])
    grown = pooling.grown(sizes, sides, kernel, strides, dilations, given.get("ceil_mode", 0))
    ones = windows.counted(given["x"], with_pads)
    if with_pads:
        inside = tuple((b, min(a, w)) for (b, a), (_, w) in zip(sides, grown, strict=True))
        rest = tuple((0, w - i) for (_, i), (_, w) in zip(inside, grown, strict=True))
        ones = padded(padded(ones, inside, 1.0), rest)
    else:
        ones = padded(ones, grown)
    count = pooling.window_sum(ones, kernel, strides, dilations)
    return pooling.window_sum(padded(wide, grown), kernel, strides, dilations) / count


conv = _with_pads(convolution.conv, 0.0)
max_pool = _with_pads(pooling.max_pool, float("-inf"))
lp_pool = _with_pads(pooling.lp_pool, 0.0)
average_pool = _on_part(pooling.average_pool, _average)


class _Windows:
    """Windows over an image of which this device has a part.

    Attributes:
        strides, dilations: per spatial dimension.
        sides: pads of the whole image.
        left: pads that are left to make; none along the dimensions that are cut.

    Args:
        x: the part.
        kernel: sizes of the window.
        attributes: of the operator.
        cuts: of the image.
    """

    def __init__(
        self, x: Tensor, kernel: Integers, attributes: Mapping[str, Any], cuts: tuple[Cut, ...]
    ) -> None:
        self.kernel, self.cuts = kernel, cuts
        whole = list(x.shape[2:])
        for cut in cuts:
            whole[cut.dim - 2] *= cut.line.size
        self.strides, self.dilations, self.sides = _how(whole, kernel, attributes)
        cut_dims = {cut.dim - 2 for cut in cuts}
        self.left: Pairs = tuple(
            (0, 0) if i in cut_dims else pair for i, pair in enumerate(self.sides)
        )

    def pads(self) -> Integers:
        """The pads that are left, as ONNX has them."""
        return (*(before for before, _ in self.left), *(after for _, after in self.left))

    def _rows(self, cut: Cut) -> tuple[int, int]:
        """The rows that are needed from the device before and from the one after."""
        i = cut.dim - 2
        before = self.sides[i][0]
        after = reach(self.kernel[i], self.dilations[i]) - self.strides[i] - before
        return before, max(0, after)

    def grown(self, x: Tensor, pad: float = 0.0) -> Tensor:
        """The part with its halo; pads of this value at the ends."""
        for cut in self.cuts:
            before, after = self._rows(cut)
            if before or after:
                made: Tensor = _Halo.apply(x, (before, after), cut, pad)  # type: ignore[no-untyped-call]
                x = made
        return x

    def counted(self, x: Tensor, with_pads: bool) -> Tensor:
        """Ones where a position of the part with its halo counts, for all samples and channels."""
        ones = torch.ones_like(x[:1, :1])
        for cut in self.cuts:
            before, after = self._rows(cut)
            given = self.sides[cut.dim - 2][1]
            first, last = cut.line.rank == 0, cut.line.rank == cut.line.size - 1
            beyond = [int(with_pads and i < given) if last else 1 for i in range(after)]
            flags = [int(with_pads or not first)] * before + [1] * x.shape[cut.dim] + beyond
            row = torch.tensor(flags, dtype=x.dtype, device=x.device)
            shape = [-1 if d == cut.dim else 1 for d in range(x.dim())]
            ones = ones.narrow(cut.dim, 0, 1) * row.reshape(shape)
        return ones


class _Halo(torch.autograd.Function):
    """A part of a tensor with rows of the parts before and after. Backward, the gradients of these
    rows go back to their devices and are added there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: tuple[int, int], cut: Cut, pad: float) -> Tensor:
        ctx.rows, ctx.cut = rows, cut
        (before, after), dim, line = rows, cut.dim, cut.line
        size = x.shape[dim]
        first, last = x.narrow(dim, 0, after), x.narrow(dim, size - before, before)
        front, back = line.exchange(first.contiguous(), last.contiguous())
        front = torch.full_like(front, pad) if line.rank == 0 else front
        back = torch.full_like(back, pad) if line.rank == line.size - 1 else back
        return torch.cat([front, x, back], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (before, after), dim, line = ctx.rows, ctx.cut.dim, ctx.cut.line
        size = gradients[0].shape[dim] - before - after
        front = gradients[0].narrow(dim, 0, before)
        back = gradients[0].narrow(dim, before + size, after)
        to_first, to_last = line.exchange(front.contiguous(), back.contiguous())
        own = gradients[0].narrow(dim, before, size).clone()
        own.narrow(dim, 0, after).add_(to_first)
        own.narrow(dim, size - before, before).add_(to_last)
        return own, None, None, None


def window(
    sizes: Sequence[int], kernel: Integers, attributes: Mapping[str, Any]
) -> tuple[tuple[int, int, int], ...]:
    """Per spatial dimension, as `fits` takes it.

    Args:
        sizes: of the spatial dimensions of the input.
        kernel: sizes of the window.
        attributes: of the operator.
    """
    strides, dilations, sides = _how(sizes, kernel, attributes)
    both = zip(kernel, dilations, strides, sides, strict=True)
    return tuple((reach(k, d), s, before) for k, d, s, (before, _) in both)


def _how(
    sizes: Sequence[int], kernel: Integers, attributes: Mapping[str, Any]
) -> tuple[Integers, Integers, Pairs]:
    """Strides, dilations and pads per spatial dimension."""
    ones = (1,) * len(kernel)
    strides, dilations = (attributes.get(name) or ones for name in ("strides", "dilations"))
    auto_pad, pads = attributes.get("auto_pad", "NOTSET"), attributes.get("pads")
    return strides, dilations, pairs(auto_pad, pads, tuple(sizes), kernel, strides, dilations)
