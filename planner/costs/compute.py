"""Time of operators, stages and optimizer steps on a device."""

from collections import Counter
from collections.abc import Iterable, Mapping

from planner.artefacts.calibration import Calibration, calibrated_s
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, slowdown_among
from planner.artefacts.roofline import OperatorTimes, operator_times
from planner.artefacts.topology import DeviceType, Topology, device_type
from planner.costs.pins import PENALTY, pinned
from planner.support.memo import remembered


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


@remembered
def _cores(topology: Topology) -> Mapping[str, int | None]:
    return {host.name: host.cores for host in topology.hosts}


def crowded_hosts(problem: Problem) -> frozenset[str]:
    """The hosts for which the profile's contention holds: all their devices are of the profile's
    type and share as many cores as it was measured on. Other hosts keep the rule of `slowdowns`.
    """
    return _crowded_hosts(problem.profile, problem.topology)


@remembered
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


@remembered(kept=64)
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
