"""The times of operators' passes, from their kernels and a device's speeds.

Each kernel takes

    launch + max(flops / (compute share x peak), bytes / (memory share x memory bandwidth))

with the shares of its kind of work (profilers/efficiencies.py). A view takes no time. A host starts
kernels while the device runs those before, so the pass of an operator takes

    max(sum over its kernels, number of its kernels x time in which the host starts one)

This holds for a step whose operators are all bound by the device, or all by the host. In a step of
both kinds the device works off, during small kernels, what the host started ahead; that is left
out, so such a step is predicted to be too long.

Source: the roofline of Williams, Waterman and Patterson, CACM 2009.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.artefacts.growth import Kernel, Rates, Work
from planner.support.arrays import Floats

_INDEX = {work: i for i, work in enumerate(Work)}


@dataclass(frozen=True, slots=True)
class PassKernels:
    """The kernels of the two passes of an operator, or of a loss."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


def both_passes_s(
    kernels: Sequence[PassKernels], rates: Rates
) -> tuple[list[float], list[float]]:  # fmt: skip
    """The forward and the backward time of each, in s, rounded to nanoseconds."""
    forward = Passes([one.forward for one in kernels]).seconds(rates, rates.host_forward_s)
    backward = Passes([one.backward for one in kernels]).seconds(rates, rates.host_backward_s)
    return _rounded(forward), _rounded(backward)


def _rounded(times_s: Floats) -> list[float]:
    return [round(time_s, 9) for time_s in times_s.tolist()]


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

    def seconds(self, rates: Rates, host_s: float = 0.0) -> Floats:
        """(number of passes,) time of each pass, in s, at these speeds.

        Args:
            host_s: time in which the host starts a kernel.
        """
        each = np.maximum(*self.bounds_s(rates))
        total = np.bincount(self.owner, rates.launch_s + each, self.num_passes)
        started = host_s * np.bincount(self.owner, minlength=self.num_passes)
        longer: Floats = np.maximum(total, started)
        return longer


def _by_index(speeds: Mapping[Work, float]) -> Floats:
    """(number of kinds,) speeds by the index of their kind; NaN where no kernel needs one."""
    return np.array([speeds.get(work, np.nan) for work in Work])
