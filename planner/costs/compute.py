"""Time of operators, stages and optimizer steps on a device."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.artefacts.calibration import Calibration, calibrated_s
from planner.artefacts.graph import producers
from planner.artefacts.problem import Optimizer, Problem
from planner.artefacts.profile import OperatorCost, Profile, Source, slowdown_among
from planner.artefacts.topology import DeviceType, Topology, device_type
from planner.costs.pins import PENALTY, pinned
from planner.support.arrays import Floats
from planner.support.derived import derived
from planner.support.errors import OptionError


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Times of all operators on one type of device, each with the losses of its outputs.

    Attributes:
        forward_s: (N,) forward pass of operator v for one microbatch, in s.
        backward_s: (N,) the same for the backward pass.
    """

    forward_s: Floats
    backward_s: Floats


def roofline_s(cost: OperatorCost, kind: DeviceType, dtype: str) -> float:
    """The least time of an operator's forward pass on a type of device, in s:

        max(flops / peak, bytes / memory bandwidth)

    Source: Williams, Waterman and Patterson, CACM 2009.
    """
    return max(
        cost.flops / kind.peak_flops(dtype), cost.bytes_moved / kind.memory_bandwidth_bytes_per_s
    )


def fits_any_device(profile: Profile) -> bool:
    """Whether nothing is known of the device that the profile's times are for, so that they are
    taken as they are on every one: imported formats do not say it.
    """
    sources = (Source.IMPORTED, Source.INTERPOLATED)
    return profile.source in sources and profile.device_type == Source.IMPORTED.value


def rescaled(profile: Profile, topology: Topology) -> tuple[str, ...]:
    """The device types of a topology for which the profile's times are rescaled."""
    if fits_any_device(profile):
        return ()
    return tuple(k.name for k in topology.device_types if k.name != profile.device_type)


def loss_times_s(profile: Profile) -> tuple[Floats, Floats]:
    """(N,) times of the losses of each operator's outputs, forward and backward, in s."""
    made_by, count = producers(profile.graph), len(profile.operators)
    known = [one for one in profile.loss_costs if one.output in made_by]
    at = np.array([made_by[one.output] for one in known], dtype=int)
    sides = ([one.forward_s for one in known], [one.backward_s for one in known])
    forward, backward = (np.bincount(at, side, count).astype(float) for side in sides)
    return forward, backward


@derived(kept=64)
def operator_times(
    profile: Profile, kind: DeviceType, measured_on: DeviceType | None
) -> OperatorTimes:
    """Times of the operators on a type of device: the profile's own, or, on another type, times
    the ratio of the rooflines. Where the profile's device is unknown for good, its own everywhere.

    Args:
        kind: the type of device to know the times of.
        measured_on: the profile's type of device, if it is known.

    Raises:
        OptionError: if the times must be rescaled and the profile's device is not known.
    """
    forward = np.array([o.forward_s for o in profile.operators])
    backward = np.array([o.backward_s for o in profile.operators])
    lost = loss_times_s(profile)
    if kind.name == profile.device_type or fits_any_device(profile):
        return OperatorTimes(forward + lost[0], backward + lost[1])
    if measured_on is None:
        raise OptionError(
            f"the profile was made on {profile.device_type!r}, whose speed is not known, so it"
            f" cannot be rescaled to {kind.name}; describe it under `device_types` of the topology"
        )
    here = np.array([roofline_s(o, measured_on, profile.dtype) for o in profile.operators])
    there = np.array([roofline_s(o, kind, profile.dtype) for o in profile.operators])
    unknown = (here == 0) & (forward > 0)
    if unknown.any():
        name = profile.operators[int(np.flatnonzero(unknown)[0])].name
        raise OptionError(
            f"the profile says neither FLOPs nor bytes of {int(unknown.sum())} operators, such as"
            f" {name}, so their times cannot be rescaled from {profile.device_type} to"
            f" {kind.name}; use a topology of {profile.device_type} devices"
        )
    # An operator that does nothing forward is a view, whose backward pass moves bytes.
    slower = measured_on.memory_bandwidth_bytes_per_s / kind.memory_bandwidth_bytes_per_s
    ratio = np.divide(there, here, out=np.full_like(here, slower), where=here > 0)
    # A loss moves bytes, too.
    return OperatorTimes(forward * ratio + lost[0] * slower, backward * ratio + lost[1] * slower)


def slowdowns(problem: Problem, used: Iterable[int]) -> dict[int, float]:
    """How much slower each used device computes while all used devices of its host compute.

    That is measured (`Profile.contention`) or, on other hosts with cores that their devices share,
    max(1, n / cores) for n used devices; 1 where devices have their own processors.
    """
    devices, running = problem.topology.devices, tuple(used)
    busy = Counter(devices[d].host for d in running)
    slow = {host: host_slowdown(problem, host, n) for host, n in busy.items()}
    return {d: slow[devices[d].host] for d in running}


def slowdown(problem: Problem, used: Iterable[int], device: int) -> float:
    """The same for one of the used devices."""
    return slowdowns(problem, used)[device]


def host_slowdown(problem: Problem, host: str, num_devices: int) -> float:
    """The same by the name of a host and the number of its devices that compute."""
    return crowd_slowdown(problem, host, num_devices, num_devices)


def crowd_slowdown(problem: Problem, host: str, num_computing: int, num_devices: int) -> float:
    """The same of some of the used devices of a host, while the others wait."""
    contention, cores = problem.profile.contention, _cores(problem.topology)[host]
    if contention is not None and host in crowded_hosts(problem):
        return slowdown_among(contention, num_computing, num_devices)
    return max(1.0, num_computing / cores) if cores is not None else 1.0


@derived
def _cores(topology: Topology) -> Mapping[str, int | None]:
    return {host.name: host.cores for host in topology.hosts}


def crowded_hosts(problem: Problem) -> frozenset[str]:
    """The hosts for which the profile's contention holds: all their devices are of the profile's
    type and share as many cores as it was measured on. Other hosts keep the rule of `slowdowns`.
    """
    return _crowded_hosts(problem.profile, problem.topology)


@derived
def _crowded_hosts(profile: Profile, topology: Topology) -> frozenset[str]:
    if profile.contention is None:
        return frozenset()
    others = {one.host for one in topology.devices if one.type != profile.device_type}
    alike = {host.name for host in topology.hosts if host.cores == profile.contention.cores}
    return frozenset(alike - others)


def times_on(problem: Problem, device: int) -> OperatorTimes:
    """Times of the operators on a device of the problem that has its host to itself; of those that
    are pinned to another one, prohibitive ones (`pins.py`).
    """
    times = _times_on(problem, device)
    elsewhere = [v for v, d in pinned(problem).items() if d != device]
    if not elsewhere:
        return times
    forward, backward = times.forward_s.copy(), times.backward_s.copy()
    forward[elsewhere] += PENALTY * float((times.forward_s + times.backward_s).sum())
    return OperatorTimes(forward, backward)


def _times_on(problem: Problem, device: int) -> OperatorTimes:
    """Without pins."""
    kind = device_type(problem.topology, device)
    if kind.name != problem.calibration.device_type:
        return operator_times(problem.profile, kind, problem.measured_on)
    return _calibrated_times(problem.profile, kind, problem.measured_on, problem.calibration)


@derived(kept=64)
def _calibrated_times(
    profile: Profile, kind: DeviceType, measured_on: DeviceType | None, calibration: Calibration
) -> OperatorTimes:
    alone = operator_times(profile, kind, measured_on)
    return OperatorTimes(*calibrated_s(calibration, profile, alone.forward_s, alone.backward_s))


def step_s(optimizer: Optimizer, trainable_bytes: int, kind: DeviceType) -> float:
    """Time of an optimizer step, in s: bound by memory, (4 + 2 moments) passes over the
    parameters (read parameter and gradient, write parameter, clear gradient, read and write each
    moment).

    Args:
        trainable_bytes: of the parameters that are trained on the device.
    """
    passes = 4 + 2 * optimizer.num_moments
    return passes * trainable_bytes / kind.memory_bandwidth_bytes_per_s
