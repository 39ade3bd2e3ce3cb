"""`analytic`: a profile for a type of device that is not there, computed from the operators'
kernels (roofline/times.py). `rescale`: one from a profile of another type of device.

One effect is left out: a kernel that is too small to fill the device reaches less than its share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planner.artefacts.graph import main_dtype, retyped
from planner.artefacts.growth import Growth
from planner.artefacts.profile import (
    COMPILED,
    ROOFLINE,
    LossCost,
    Profile,
    Source,
    step_is_compiled,
    with_times,
)
from planner.artefacts.roofline import NO_SPEED, device_is_unknown, rescaled_times, unknown_speeds
from planner.artefacts.topology import DeviceType
from planner.model.load import Model
from planner.profilers.devices import autocast_dtype, trained_in, versions
from planner.profilers.efficiencies import device_family, family_rates, rates_of
from planner.profilers.origin import TimedOperator, profile_fields
from planner.profilers.roofline.fused import fused, fused_losses
from planner.profilers.roofline.grown import grown
from planner.profilers.roofline.times import Passes, PassKernels, both_passes_s
from planner.support.arrays import Floats
from planner.support.errors import OptionError

if TYPE_CHECKING:
    from planner.profilers.facts import Facts

MIN_SHARE = 1e-3
"""Operators that take less than this share of the step are left out where times are compared."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A computed profile and the kernels behind its times.

    Attributes:
        profile: the profile.
        operators: one per operator of the graph.
        losses: by output, one per loss cost of the profile.
    """

    profile: Profile
    operators: tuple[PassKernels, ...]
    losses: Mapping[str, PassKernels]


def analytic(
    model: Model,
    *,
    model_path: str | None,
    kind: DeviceType,
    dtype: str | None = None,
    parameters: str | None = None,
    gradients: str | None = None,
    compiled: bool = False,
    fused_loss: bool = False,
    launch_blocking: bool = False,
) -> Profile:
    """The computed profile of a model on a type of device. No weights are read.

    Args:
        model: the model, with the batch of one microbatch.
        model_path: path that is written into the profile, as it is.
        kind: the type of device.
        dtype: type of floating-point work where autocast allows it; None takes the dtype of most
            parameter bytes.
        parameters, gradients: as of `devices.trained_in`.
        compiled: whether `torch.compile` compiles the step (roofline/fused.py).
        fused_loss, launch_blocking: as of `Profile`.

    Raises:
        OptionError: if the dtype is unknown.
        OperatorError: if an operator has no conversion, or cannot run without numbers.
    """
    made = computed(
        model, model_path=model_path, kind=kind, dtype=dtype, parameters=parameters,
        gradients=gradients, compiled=compiled, fused_loss=fused_loss,
        launch_blocking=launch_blocking,
    )  # fmt: skip
    return made.profile


def computed(
    model: Model,
    *,
    model_path: str | None,
    kind: DeviceType,
    dtype: str | None = None,
    parameters: str | None = None,
    gradients: str | None = None,
    compiled: bool = False,
    fused_loss: bool = False,
    launch_blocking: bool = False,
) -> Computed:
    """The same with the kernels."""
    from planner.profilers.facts import facts
    from planner.profilers.losses import computed_losses

    shorter = autocast_dtype(model.graph, dtype)
    dtype = shorter or main_dtype(model.graph)
    own, parameter_dtype = trained_in(model.graph, shorter, parameters, gradients)
    model = replace(model, graph=own)
    known_facts = facts(model, shorter)
    graph = retyped(model.graph, {n: d for one in known_facts for n, d in one.dtypes.items()})
    rates = rates_of(kind, dtype, compiled=compiled)
    operators = tuple(PassKernels(one.kernels, one.backward_kernels) for one in known_facts)
    losses, unknown = computed_losses(graph)
    if compiled:
        stashes = [one.stash for one in known_facts]
        operators = fused(graph, operators, stashes, dtype)
    if compiled or fused_loss:
        losses = fused_losses(graph, losses)
    timed = [
        TimedOperator(
            fact.stash,
            sum(kernel.flops for kernel in one.forward),
            sum(kernel.bytes for kernel in one.forward),
            **times_s._asdict(),
        )
        for fact, one, times_s in zip(
            known_facts, operators, both_passes_s(operators, rates), strict=True
        )
    ]
    profile = Profile(
        **profile_fields(model, model_path, graph, timed, known_facts),
        dtype=dtype,
        device_type=kind.name,
        source=Source.ANALYTIC,
        threads=1 if kind.name == "cpu" else None,
        repetitions=0,
        spread=0.0,
        whole_step=None,
        versions=versions(),
        engine=_engine(compiled=compiled, fused_loss=fused_loss, launch_blocking=launch_blocking),
        parameter_dtype=parameter_dtype,
        casts_once=shorter is not None,
        fused_loss=fused_loss,
        launch_blocking=launch_blocking,
        warnings=(*unknown_speeds(dtype, (kind,)), *unknown),
        loss_costs=tuple(
            LossCost(output, *times_s)
            for output, times_s in zip(
                losses, both_passes_s([*losses.values()], rates), strict=True
            )
        ),
    )
    return Computed(profile, operators, losses)


def _engine(*, compiled: bool, fused_loss: bool, launch_blocking: bool) -> str:
    """`Profile.engine`, which plans repeat."""
    words = [
        COMPILED if compiled else ROOFLINE,
        *(["fused loss"] if fused_loss else []),
        *(["launch blocking"] if launch_blocking else []),
    ]
    return ", ".join(words)


# ---- from a profile of another device


def rescale(profile: Profile, kind: DeviceType, measured_on: DeviceType | None) -> Profile:
    """The profile for another type of device: times are multiplied by the ratio of the rooflines.
    `solve` does the same where a topology has other devices than the profile. A computed profile
    with a growth is computed anew, from its kernels.

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
    if profile.growth is not None:
        return _computed_anew(profile, profile.growth, kind)
    if device_is_unknown(profile):
        raise OptionError(
            f"the profile does not name the device that it was made on, so it cannot be rescaled"
            f" to {kind.name}; solve takes its times as they are on every device"
        )
    times = rescaled_times(profile, kind, measured_on)
    assert measured_on is not None  # or there are no times
    costs = zip(profile.operators, times.device_s.T.tolist(), times.host_s.T.tolist(), strict=True)
    how = f"rescaled from {profile.device_type} ({profile.source}) by the ratio of the rooflines"
    return replace(
        profile,
        operators=tuple(
            replace(with_times(cost, device_s[0], device_s[1], (host_s[0], host_s[1])), parts=())
            for cost, device_s, host_s in costs
        ),
        device_type=kind.name,
        source=Source.RESCALED,
        threads=1 if kind.name == "cpu" else None,
        whole_step=None,
        warnings=(*profile.warnings, how, *unknown_speeds(profile.dtype, (measured_on, kind))),
        contention=None,
        loss_costs=(),  # in the times of the operators that make the outputs
    )


def _computed_anew(profile: Profile, growth: Growth, kind: DeviceType) -> Profile:
    """The profile as `analytic` makes it for another type of device."""
    rates = rates_of(kind, profile.dtype, compiled=step_is_compiled(profile))
    there = replace(growth, rates=rates)
    notes = [one for one in profile.warnings if not one.startswith(NO_SPEED)]
    return replace(
        grown(profile, there, profile.microbatch_size),
        device_type=kind.name,
        threads=1 if kind.name == "cpu" else None,
        warnings=(*unknown_speeds(profile.dtype, (kind,)), *notes),
        growth=there,
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
    family = device_family(kind, measured.dtype)
    passes = Passes([kernels[i] for i in chosen])
    taken_s = taken_s[chosen]

    def seconds(point: Floats) -> Floats:
        return passes.seconds(family_rates(family, *map(float, np.exp(point))))

    def errors(point: Floats) -> Floats:
        ratio: Floats = np.log(seconds(point) / taken_s)
        return np.abs(ratio)

    # The rates at which all FLOPs, and all bytes, would take the whole time.
    work = np.array([one.sum() for one in passes.bounds_s(family_rates(family, 1.0, 1.0))])
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
        rank_correlation=rank_correlation(seconds(best), taken_s),
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
