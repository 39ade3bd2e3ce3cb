"""A profile's times on another type of device, by the roofline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.artefacts.clocks import added_s, clocks_s, on_clocks_s
from planner.artefacts.graph import producers
from planner.artefacts.profile import OperatorCost, Profile, Source
from planner.artefacts.topology import DeviceType, Topology
from planner.support.arrays import Floats
from planner.support.errors import OptionError

EMPTY_KERNEL_S = 5e-6
"""Least time of an operator that computes anything: a host does not start kernels faster (from
memory; on a CPU `profilers/efficiencies.py` says where it is from)."""

CPU = "cpu"
"""The type of devices that are their own hosts."""

NO_SPEED = "no speed of"
"""The beginning of notes on types of devices without a speed."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Times of all operators on one type of device for one microbatch, each with the losses of its
    outputs, in s. The host starts kernels while the device runs those before, so what operators
    take in a row is no sum of times of single ones (`artefacts/clocks.py`).

    Attributes:
        device_s: (2, N) of the device, forward and backward.
        host_s: (2, N) of the host.
        launch_blocking: as of `Profile`.
        forward_s: (N,) the time that the forward of operator v adds to that of the whole model.
        backward_s: (N,) the same for the backward.
    """

    device_s: Floats
    host_s: Floats
    launch_blocking: bool = False
    forward_s: Floats = field(init=False)
    backward_s: Floats = field(init=False)

    def __post_init__(self) -> None:
        both_s = on_clocks_s(self.device_s, self.host_s, launch_blocking=self.launch_blocking)
        forward_s, backward_s = added_s(*both_s)
        object.__setattr__(self, "forward_s", forward_s)
        object.__setattr__(self, "backward_s", backward_s)


def roofline_s(cost: OperatorCost, kind: DeviceType, dtype: str) -> float:
    """The least time of an operator's forward pass on a type of device, in s:

        max(flops / peak, bytes / memory bandwidth)

    Source: Williams, Waterman and Patterson, CACM 2009.
    """
    return max(
        cost.flops / kind.peak_flops(dtype), cost.bytes_moved / kind.memory_bandwidth_bytes_per_s
    )


def unknown_speeds(dtype: str, kinds: Iterable[DeviceType]) -> tuple[str, ...]:
    """Notes on types of devices without a speed for a dtype: float32's is taken."""
    return tuple(
        f"{NO_SPEED} {kind.name} in {dtype} is known; its speed in float32 was taken"
        for kind in kinds
        if dtype not in kind.flops
    )


def device_is_unknown(profile: Profile) -> bool:
    """Whether nothing is known of the device that the profile's times are for, so that they are
    taken as they are on every one: imported formats do not say it.
    """
    sources = (Source.IMPORTED, Source.INTERPOLATED, Source.SCALED)
    return profile.source in sources and profile.device_type == Source.IMPORTED.value


def rescaled(profile: Profile, topology: Topology) -> tuple[str, ...]:
    """The device types of a topology for which the profile's times are rescaled."""
    if device_is_unknown(profile):
        return ()
    return tuple(k.name for k in topology.device_types if k.name != profile.device_type)


def loss_times_s(profile: Profile) -> Floats:
    """(2, N) times of the losses of each operator's outputs, forward and backward, in s."""
    return _of_losses(profile, [(one.forward_s, one.backward_s) for one in profile.loss_costs])


def host_times_s(profile: Profile) -> Floats:
    """(2, N) times in which the host starts each operator's kernels and those of its losses."""
    lost = [(one.host_forward_s, one.host_backward_s) for one in profile.loss_costs]
    host_s: Floats = clocks_s(profile)[1] + _of_losses(profile, lost)
    return host_s


def _of_losses(profile: Profile, times_s: Sequence[tuple[float, float]]) -> Floats:
    """(2, N) times of losses, by the operators that make what these are computed from.

    Args:
        times_s: forward and backward of every loss cost of the profile.
    """
    made_by, made = producers(profile.graph), np.zeros((2, len(profile.operators)))
    for one, both_s in zip(profile.loss_costs, times_s, strict=True):
        if one.output in made_by:
            made[:, made_by[one.output]] += both_s
    return made


def rescaled_times(
    profile: Profile, kind: DeviceType, measured_on: DeviceType | None
) -> OperatorTimes:
    """Times of the operators on a type of device: the profile's own, or, on another type, times
    the ratio of the rooflines. Where the profile's device is unknown for good, its own everywhere.
    A host starts kernels as fast for every type, except on CPUs, which are their own hosts.

    Args:
        kind: the type of device to know the times of.
        measured_on: the profile's type of device, if it is known.

    Raises:
        OptionError: if the times must be rescaled and the profile's device is not known.
    """
    own, _ = clocks_s(profile)
    lost, host = loss_times_s(profile), host_times_s(profile)
    if kind.name == profile.device_type or device_is_unknown(profile):
        return OperatorTimes(own + lost, host, profile.launch_blocking)
    if measured_on is None:
        raise OptionError(
            f"the profile was made on {profile.device_type!r}, whose speed is not known, so it"
            f" cannot be rescaled to {kind.name}; describe it under `device_types` of the topology"
        )
    here = np.array([roofline_s(o, measured_on, profile.dtype) for o in profile.operators])
    there = np.array([roofline_s(o, kind, profile.dtype) for o in profile.operators])
    unknown = (here == 0) & (own[0] > 0)
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
    host = np.zeros_like(host) if kind.name == CPU else host
    return OperatorTimes(own * ratio + lost * slower, host, profile.launch_blocking)
