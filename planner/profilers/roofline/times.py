"""The times of operators' passes, from their kernels and a device's speeds.

Each kernel takes

    launch + max(flops / (compute share x peak), bytes / (memory share x memory bandwidth))

with the shares of its kind of work (profilers/efficiencies.py). A view takes no time. The pass of
an operator is the sum over its kernels. A host starts kernels while the device runs those before.
That is a time of its own, since operators in a row share both clocks (artefacts/clocks.py):

    time of an elementwise kernel x `STARTS`, summed over the kernels

Not counted are views, which take the host of the H100 below 4 us each forward.

Source: the roofline of Williams, Waterman and Patterson, CACM 2009.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.artefacts.growth import Kernel, Rates, Work
from planner.support.arrays import Floats

_PRODUCT, _CONVOLUTION, _ATTENTION = (2.4, 1.8), (2.1, 2.7), (3.0, 4.0)
STARTS: Mapping[Work, tuple[float, float]] = {
    Work.PRODUCT: _PRODUCT,
    Work.BATCHED_PRODUCT: _PRODUCT,
    Work.UNALIGNED_PRODUCT: _PRODUCT,
    Work.CONVOLUTION: _CONVOLUTION,
    Work.SMALL_WINDOW: _CONVOLUTION,
    Work.FEW_CHANNELS: _CONVOLUTION,
    Work.NORMALIZATION: (1.6, 2.1),
    Work.ATTENTION: _ATTENTION,
    Work.CAUSAL_ATTENTION: _ATTENTION,
    Work.CAUSAL_ATTENTION_BACKWARD: _ATTENTION,
}
"""Time in which a host starts a kernel, forward and backward, over that of an elementwise one; 1 of
other kinds. Measured where the latter was (`efficiencies._HOST`), in us: products of matrices 19
and, with a bias, 33 forward, 30 and 38 a product backward; convolutions 23 and 49; softmax, layer
and batch normalization 12, 19 and 22 forward, 18, 46 and 51 backward; flash attention 33 and 72."""

_INDEX = {work: i for i, work in enumerate(Work)}


@dataclass(frozen=True, slots=True)
class PassKernels:
    """The kernels of the two passes of an operator, or of a loss."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


class PassSeconds(NamedTuple):
    """The times of an operator or a loss, as of `OperatorCost`."""

    forward_s: float
    backward_s: float
    host_forward_s: float
    host_backward_s: float


def both_passes_s(kernels: Sequence[PassKernels], rates: Rates) -> list[PassSeconds]:
    """The times of each, rounded to nanoseconds."""
    forward, backward = Passes([k.forward for k in kernels]), Passes([k.backward for k in kernels])
    sides_s = (
        forward.seconds(rates),
        backward.seconds(rates),
        rates.host_forward_s * forward.starts(0),
        rates.host_backward_s * backward.starts(1),
    )
    rounded_s = ([round(time_s, 9) for time_s in one.tolist()] for one in sides_s)
    return [PassSeconds(*each_s) for each_s in zip(*rounded_s, strict=True)]


class Passes:
    """The kernels of several passes as arrays.

    Attributes:
        num_passes: number of passes.
        owner: (K,) the pass that kernel k belongs to.
        work: (K,) its kind, as an index into `Work`.
        flops: (K,) its floating-point operations.
        bytes: (K,) bytes that it reads and writes.
    """

    def __init__(self, passes: Sequence[Sequence[Kernel]]) -> None:
        kernels = [kernel for one in passes for kernel in one]
        self.num_passes = len(passes)
        self.owner = np.repeat(np.arange(len(passes)), [len(one) for one in passes])
        self.work = np.array([_INDEX[kernel.work] for kernel in kernels], dtype=int)
        self.flops = np.array([kernel.flops for kernel in kernels], dtype=np.float64)
        self.bytes = np.array([kernel.bytes for kernel in kernels], dtype=np.float64)

    def bounds_s(self, rates: Rates) -> tuple[Floats, Floats]:
        """(K,) time of each kernel's operations alone, and of its bytes alone, in s."""
        return (
            self.flops / _by_index(rates.flops_per_s)[self.work],
            self.bytes / _by_index(rates.bytes_per_s)[self.work],
        )

    def seconds(self, rates: Rates) -> Floats:
        """(number of passes,) time of each pass, in s, at these speeds."""
        each = np.maximum(*self.bounds_s(rates))
        return np.bincount(self.owner, rates.launch_s + each, self.num_passes).astype(float)

    def starts(self, side: int) -> Floats:
        """(number of passes,) time in which the host starts the kernels of each pass, over that of
        an elementwise kernel.

        Args:
            side: 0 of forward passes, 1 of backward passes.
        """
        factors = np.array([STARTS.get(work, (1.0, 1.0))[side] for work in Work])
        return np.bincount(self.owner, factors[self.work], self.num_passes).astype(float)


def _by_index(speeds: Mapping[Work, float]) -> Floats:
    """(number of kinds,) speeds by the index of their kind; NaN where no kernel needs one."""
    return np.array([speeds.get(work, np.nan) for work in Work])
