"""The times of operators' passes, from their kernels and a device's speeds.

Each kernel takes

    launch + max(flops / (compute share x peak), bytes / (memory share x memory bandwidth))

with the shares of its kind of work (profilers/efficiencies.py). A view takes no time. The pass of
an operator is the sum over its kernels. A host starts kernels while the device runs those before,
each in the same time; that is a time of its own, since operators in a row share both clocks
(costs/pass_times.py).

Source: the roofline of Williams, Waterman and Patterson, CACM 2009.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.artefacts.growth import Kernel, Rates, Work
from planner.support.arrays import Floats

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
    forward, backward = (
        Passes([getattr(one, side) for one in kernels]).seconds(rates).tolist()
        for side in ("forward", "backward")
    )
    return [
        PassSeconds(
            round(forward_s, 9),
            round(backward_s, 9),
            round(len(one.forward) * rates.host_forward_s, 9),
            round(len(one.backward) * rates.host_backward_s, 9),
        )
        for one, forward_s, backward_s in zip(kernels, forward, backward, strict=True)
    ]


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


def _by_index(speeds: Mapping[Work, float]) -> Floats:
    """(number of kinds,) speeds by the index of their kind; NaN where no kernel needs one."""
    return np.array([speeds.get(work, np.nan) for work in Work])
