"""`analytic`: a profile for a type of device that is not there, computed from the operators' work
and the device's speeds. `rescale`: one from a profile that was measured on another type of device.

Each kernel takes

    launch + max(flops / (compute share x peak), bytes / (memory share x memory bandwidth))

with the shares of its kind of work (efficiencies.py); the time of an operator's pass is the sum
over its kernels. A view takes no time. One effect is left out: a kernel that is too small to fill
the device reaches less than its share.

Source: the roofline of Williams, Waterman and Patterson, CACM 2009.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planner.artefacts.graph import main_dtype, retyped
from planner.artefacts.profile import ROOFLINE, Profile, Source
from planner.artefacts.roofline import device_is_unknown, rescaled_times, unknown_speeds
from planner.artefacts.topology import DeviceType
from planner.model.load import Model
from planner.profilers.devices import autocast_dtype, versions
from planner.profilers.efficiencies import DeviceFamily, Kernel, device_family
from planner.profilers.origin import TimedOperator, profile_fields
from planner.support.arrays import Floats
from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.profilers.facts import Facts

MIN_SHARE = 1e-3
"""Operators that take less than this share of the step are left out where times are compared."""


def analytic(
    model: Model, *, model_path: str | None, kind: DeviceType, dtype: str | None = None
) -> Profile:
    """The computed profile of a model on a type of device. No weights are read.

    Args:
        model: the model, with the batch of one microbatch.
        model_path: path that is written into the profile, as it is.
        kind: the type of device.
        dtype: type of floating-point work where autocast allows it; None takes the dtype of most
            parameter bytes.

    Raises:
        OptionError: if the dtype is unknown.
        OperatorError: if an operator has no conversion, or cannot run without numbers.
    """
    from planner.profilers.facts import facts
    from planner.profilers.losses import computed_losses

    shorter = autocast_dtype(model.graph, dtype)
    dtype = shorter or main_dtype(model.graph)
    known_facts = facts(model, shorter)
    graph = retyped(model.graph, {n: d for one in known_facts for n, d in one.dtypes.items()})
    assumed = device_family(kind, dtype)
    rates = kind.peak_flops(dtype), kind.memory_bandwidth_bytes_per_s

    def seconds(passes: Sequence[Sequence[Kernel]]) -> Floats:
        return _Passes(passes, assumed).seconds(*rates)

    forward_s = seconds([one.kernels for one in known_facts])
    backward_s = seconds([one.backward_kernels for one in known_facts])
    loss_costs, unknown = computed_losses(graph, seconds)
    timed = [
        TimedOperator(fact.stash, fact.flops, fact.bytes_moved, *times_s)
        for fact, *times_s in zip(known_facts, forward_s, backward_s, strict=True)
    ]
    return Profile(
        **profile_fields(model, model_path, graph, timed, known_facts),
        dtype=dtype,
        device_type=kind.name,
        source=Source.ANALYTIC,
        threads=1 if kind.name == "cpu" else None,
        repetitions=0,
        spread=0.0,
        whole_step=None,
        versions=versions(),
        engine=ROOFLINE,
        warnings=(*unknown_speeds(dtype, (kind,)), *unknown),
        loss_costs=loss_costs,
    )


class _Passes:
    """The kernels of several passes as arrays.

    Attributes:
        num_passes: number of passes.
        launch_s: time of a kernel that does nothing.
        owner: (K,) the pass that kernel k belongs to.
        flops: (K,) floating-point operations over the share that its kind reaches.
        bytes: (K,) bytes over the share that its kind reaches.
    """

    def __init__(self, passes: Sequence[Sequence[Kernel]], assumed: DeviceFamily) -> None:
        kernels = [kernel for one in passes for kernel in one]
        shares = [assumed.efficiencies[kernel.work] for kernel in kernels]
        self.num_passes = len(passes)
        self.launch_s = assumed.launch_s
        self.owner = np.repeat(np.arange(len(passes)), [len(one) for one in passes])
        self.flops = np.array([k.flops / s.compute for k, s in zip(kernels, shares, strict=True)])
        self.bytes = np.array([k.bytes / s.memory for k, s in zip(kernels, shares, strict=True)])

    def seconds(self, peak_flops: float, bandwidth_bytes_per_s: float) -> Floats:
        """(number of passes,) time of each pass, in s, on a device of these two speeds."""
        each = np.maximum(self.flops / peak_flops, self.bytes / bandwidth_bytes_per_s)
        total = np.bincount(self.owner, self.launch_s + each, self.num_passes)
        return total.astype(np.float64)


# ---- from a profile of another device


def rescale(profile: Profile, kind: DeviceType, measured_on: DeviceType | None) -> Profile:
    """The profile for another type of device: times are multiplied by the ratio of the rooflines.
    `solve` does the same where a topology has other devices than the profile.

    Args:
        profile: the profile.
        kind: the type of device that is wanted.
        measured_on: the profile's own type of device, if it is known.

    Returns:
        The profile itself, if it is for that type already.

    Raises:
        OptionError: if the profile says too little to be rescaled.
    """
    if kind.name == profile.device_type:
        return profile
    if device_is_unknown(profile):
        raise OptionError(
            f"the profile does not name the device that it was made on, so it cannot be rescaled"
            f" to {kind.name}; solve takes its times as they are on every device"
        )
    times = rescaled_times(profile, kind, measured_on)
    assert measured_on is not None  # or there are no times
    costs = zip(profile.operators, times.forward_s, times.backward_s, strict=True)
    how = f"rescaled from {profile.device_type} ({profile.source}) by the ratio of the rooflines"
    return replace(
        profile,
        operators=tuple(
            replace(cost, forward_s=float(forward_s), backward_s=float(backward_s), parts=())
            for cost, forward_s, backward_s in costs
        ),
        device_type=kind.name,
        source=Source.RESCALED,
        threads=1 if kind.name == "cpu" else None,
        whole_step=None,
        warnings=(*profile.warnings, how, *unknown_speeds(profile.dtype, (measured_on, kind))),
        contention=None,
        loss_costs=(),  # in the times of the operators that make the outputs
    )


# ---- against what was measured


@dataclass(frozen=True, slots=True)
class RooflineFit:
    """How well the roofline explains a measured profile, after its two constants are fitted.

    Attributes:
        peak_flops: the fitted peak, in FLOP/s.
        memory_bandwidth_bytes_per_s: the fitted memory bandwidth.
        num_operators: number of operators above `MIN_SHARE` of the measured step; the other figures
            are about these.
        median_error: median of |log(predicted time / measured time)|.
        p90_error: 90th percentile of |log(predicted time / measured time)|.
        rank_correlation: rank correlation of predicted and measured times.
    """

    peak_flops: float
    memory_bandwidth_bytes_per_s: float
    num_operators: int
    median_error: float
    p90_error: float
    rank_correlation: float


def fit_constants(facts: "Sequence[Facts]", measured: Profile) -> RooflineFit:
    """The peak FLOP/s and the memory bandwidth of a device that explain a measured profile best.

    They minimize the mean of |log(predicted / measured)| over the operators' forward and backward
    times together: ratios, because times differ by orders of magnitude, and absolute values,
    because a few operators are always disturbed. The minimum is sought on a grid of logarithms
    that gets finer around the best point.

    Args:
        facts: the facts about the model's operators, in the graph's order.
        measured: the model's profile.

    Raises:
        ValueError: if the two are of different models, or no operator has a kernel.
    """
    if len(facts) != len(measured.operators):
        raise ValueError(f"{len(facts)} facts, but {len(measured.operators)} operators")
    taken_s = np.array([one.forward_s + one.backward_s for one in measured.operators])
    kernels = [(*one.kernels, *one.backward_kernels) for one in facts]
    chosen = [i for i in range(len(facts)) if kernels[i] and taken_s[i] > MIN_SHARE * taken_s.sum()]
    if not chosen:
        raise ValueError("no operator has a kernel")
    # Only the name and the types with a speed decide the family; the speeds are what is fitted.
    kind = DeviceType(measured.device_type, 1, {measured.dtype: 1.0, "float32": 1.0}, 1.0, "")
    passes = _Passes([kernels[i] for i in chosen], device_family(kind, measured.dtype))
    taken_s = taken_s[chosen]

    def errors(point: Floats) -> Floats:
        ratio: Floats = np.log(passes.seconds(*np.exp(point)) / taken_s)
        return np.abs(ratio)

    # The rates at which all FLOPs, and all bytes, would take the whole time.
    work = np.array([passes.flops.sum(), passes.bytes.sum()])
    best = np.log(np.maximum(work, 1.0) / taken_s.sum())
    for step in GRID_STEPS:
        around = np.arange(-GRID_HALF, GRID_HALF + 1) * step
        points = [best + np.array([a, b]) for a in around for b in around]
        # Among equally good points the nearest: a rate that bounds no operator stays as it is.
        best = min(points, key=lambda point: (errors(point).mean(), *np.abs(point - best)))
    peak, bandwidth = np.exp(best)
    return RooflineFit(
        peak_flops=float(peak),
        memory_bandwidth_bytes_per_s=float(bandwidth),
        num_operators=len(chosen),
        median_error=float(np.median(errors(best))),
        p90_error=float(np.percentile(errors(best), 90)),
        rank_correlation=rank_correlation(passes.seconds(peak, bandwidth), taken_s),
    )


GRID_HALF = 8
GRID_STEPS = (0.5, 0.1, 0.02, 0.004, 0.0008)
"""Logarithms. The first grid spans a factor of 50 each way from the rates at which all work would
take the whole time; every other grid spans more than a step of the one before."""


def rank_correlation(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. It is 1 where all
    values of both are equal, and 0 where all values of one are.

    Args:
        a: (N,) numbers.
        b: (N,) numbers.

    >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
    0.8
    """
    first, second = (_ranks(np.asarray(values, dtype=np.float64)) for values in (a, b))
    first, second = first - first.mean(), second - second.mean()
    norm = np.sqrt((first @ first) * (second @ second))
    if norm == 0:
        return float(not first.any() and not second.any())
    return float(round(first @ second / norm, 12))


def _ranks(values: Floats) -> Floats:
    """(N,) the rank of each value, from 1; equal values share the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count - 1) / 2)[place], dtype=np.float64)
