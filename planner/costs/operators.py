"""Times of operators on a device, alone and beside other devices.

Operators that the user wants on certain devices (`--pin NAME=DEVICE`) take `PENALTY` times as long
as the whole model on all others. Solvers are not told of pins: a search that knows devices of
several types avoids the others (`planning/pins.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

import numpy as np

from planner.artefacts.calibration import UNCALIBRATED, Calibration, Deviation, whole_share
from planner.artefacts.graph import loss_outputs, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, slowdown_among
from planner.artefacts.roofline import OperatorTimes, rescaled_times
from planner.artefacts.strategy import operator_indices
from planner.artefacts.topology import DeviceType, Topology, device_type, hosts_by_name
from planner.support.arrays import Floats
from planner.support.errors import OptionError
from planner.support.memo import remembered

PENALTY = 1000.0


def operator_times(problem: Problem, device: int) -> OperatorTimes:
    """Times of the operators on a device that has its host to itself: those of the profile,
    rescaled to the device's type, and corrected by a calibration of that type. Of operators that
    are pinned to another device, prohibitive ones.
    """
    kind, known = device_type(problem.topology, device), problem.calibration
    known = known if kind.name == known.device_type else UNCALIBRATED
    times = _calibrated_times(problem.profile, kind, problem.measured_on, known)
    elsewhere = [v for v, d in pinned(problem).items() if d != device]
    if not elsewhere:
        return times
    device_s = times.device_s.copy()
    device_s[0, elsewhere] += PENALTY * float((times.forward_s + times.backward_s).sum())
    return replace(times, device_s=device_s)


def sums_are_bounds(problem: Problem) -> bool:
    """Whether a stage may take longer than its operators add to the passes of the whole model,
    which searches sum up: on some device the host bounds some of a direction, and the device
    others. Where the host waits for each kernel, both add up.
    """
    if problem.profile.launch_blocking:
        return False
    for device in first_of_each_type(problem.topology).values():
        times = operator_times(problem, device)
        waiting = times.host_s > times.device_s
        if (waiting.any(axis=1) & (times.device_s > times.host_s).any(axis=1)).any():
            return True
    return False


def first_of_each_type(topology: Topology) -> Mapping[str, int]:
    """A device of every type, in the order of the devices."""
    first: dict[str, int] = {}
    for index, device in enumerate(topology.devices):
        first.setdefault(device.type, index)
    return first


@remembered(kept=64)
def _calibrated_times(
    profile: Profile, kind: DeviceType, measured_on: DeviceType | None, calibration: Calibration
) -> OperatorTimes:
    """The formula of `planner/artefacts/calibration.py`."""
    alone = rescaled_times(profile, kind, measured_on)
    if calibration is UNCALIBRATED:
        return alone
    scale = whole_share(profile) if calibration.whole else 1.0
    known = {one.type: one for one in calibration.deviations}
    none = Deviation("", 0.0, 0.0)
    deviations = [known.get(operator.type, none) for operator in profile.graph.operators]
    lost = loss_input_bytes(profile)
    factors = np.array([
        calibration.forward + np.array([d.forward for d in deviations]),
        calibration.backward + np.array([d.backward for d in deviations]),
    ])  # fmt: skip
    per_byte = calibration.loss_forward_s_per_byte, calibration.loss_backward_s_per_byte
    return replace(
        alone,
        device_s=scale * alone.device_s * factors + np.outer(per_byte, lost),
        host_s=calibration.host * scale * alone.host_s * factors,
    )


def loss_input_bytes(profile: Profile) -> Floats:
    """(N,) bytes that each operator makes of the outputs that losses are computed from."""
    lost, tensors = loss_outputs(profile.graph), tensors_by_name(profile.graph)
    return np.array(
        [
            sum(tensors[name].bytes for name in operator.outputs if name in lost)
            for operator in profile.graph.operators
        ],
        dtype=float,
    )


def pinned(problem: Problem) -> Mapping[int, int]:
    """The device of each operator that has to be on one, by indices.

    Raises:
        OptionError: if an operator or a device is unknown, or an operator is pinned twice.
    """
    device_of: dict[int, int] = {}
    if not problem.search.pins:
        return device_of
    operators = operator_indices(problem.profile.graph)
    devices = {device.name: d for d, device in enumerate(problem.topology.devices)}
    for operator, device in problem.search.pins:
        if operator not in operators:
            near = get_close_matches(operator, operators, n=3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise OptionError(f"--pin: there is no operator {operator}{meant}")
        if device not in devices:
            known = ", ".join(list(devices)[:8]) + ", .." * (len(devices) > 8)
            raise OptionError(f"--pin: there is no device {device}; there are {known}")
        if device_of.setdefault(operators[operator], devices[device]) != devices[device]:
            raise OptionError(f"--pin: {operator} is pinned to two devices")
    return device_of


def launch_s(problem: Problem, device: int) -> float:
    """Time to start a computation, a sum or a step on a device, in s: none where times were
    measured operator by operator, because those contain it.
    """
    known = problem.calibration
    return known.launch_s if problem.topology.devices[device].type == known.device_type else 0.0


# ----------------------------------------------------------------------------- contention


def slowdown(problem: Problem, host: str, num_computing: int, num_devices: int) -> float:
    """How much slower each of some devices of a host computes while others of those used wait.

    That is measured (`Profile.contention`) or, on other hosts with cores that their devices share,
    max(1, n / cores) for n that compute; 1 where devices have their own processors.

    Args:
        num_computing: at least 1.
        num_devices: used ones of the host, with those that wait.
    """
    contention, cores = problem.profile.contention, hosts_by_name(problem.topology)[host].cores
    if contention is not None and host in hosts_with_contention(problem):
        return slowdown_among(contention, num_computing, num_devices)
    return max(1.0, num_computing / cores) if cores is not None else 1.0


def slowdowns(problem: Problem, used: Iterable[int]) -> dict[int, float]:
    """The slowdown of each used device while all used devices of its host compute."""
    devices, running = problem.topology.devices, tuple(used)
    busy = Counter(devices[d].host for d in running)
    slow = {host: slowdown(problem, host, n, n) for host, n in busy.items()}
    return {d: slow[devices[d].host] for d in running}


def hosts_with_contention(problem: Problem) -> frozenset[str]:
    """The hosts for which the profile's contention holds: all their devices are of the profile's
    type and share as many cores as it was measured on. Other hosts keep the rule of `slowdown`.
    """
    return _hosts_with_contention(problem.profile, problem.topology)


@remembered
def _hosts_with_contention(profile: Profile, topology: Topology) -> frozenset[str]:
    if profile.contention is None:
        return frozenset()
    others = {one.host for one in topology.devices if one.type != profile.device_type}
    alike = {host.name for host in topology.hosts if host.cores == profile.contention.cores}
    return frozenset(alike - others)
