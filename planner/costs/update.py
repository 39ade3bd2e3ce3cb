"""Bytes and time of the optimizer's step, per byte of trained parameters.

Parameters in bfloat16 have float32 copies, which the optimizer steps, beside its float32 moments
(`Profile.parameter_dtype`; Micikevicius et al., ICLR 2018, section 3.1). Gradients become float32
some parameters at a time, so `stepped_bytes` is what these take for a while.
"""

from collections.abc import Iterable

from planner.artefacts.graph import ITEM_BYTES, Parameter
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import buckets
from planner.artefacts.topology import DeviceType

_FULL_BYTES = ITEM_BYTES["float32"]


def _ratio(dtype: str | None) -> int:
    """Bytes of a float32 copy over those of the parameter; 0 where there is none."""
    return 0 if dtype is None else round(_FULL_BYTES / ITEM_BYTES[dtype])


def state_copies(dtype: str | None, optimizer: Optimizer) -> int:
    """The optimizer's state: its moments, and float32 copies of parameters, over the bytes of the
    parameters.

    Args:
        dtype: as `Profile.parameter_dtype`.
    """
    ratio = _ratio(dtype)
    return ratio * (optimizer.num_moments + 1) if ratio else optimizer.num_moments


def has_state(problem: Problem) -> bool:
    """Whether the optimizer keeps anything besides the parameters."""
    return state_copies(problem.profile.parameter_dtype, problem.training.optimizer) > 0


def gradient_copies(profile: Profile) -> int:
    """Gradients over the bytes of the parameters."""
    trained = [one for one in profile.graph.parameters if one.trainable and one.bytes]
    return max((one.gradient_bytes // one.bytes for one in trained), default=1)


def update_copies(problem: Problem) -> int:
    """Gradients and the optimizer's state over the bytes of the parameters."""
    profile = problem.profile
    state = state_copies(profile.parameter_dtype, problem.training.optimizer)
    return gradient_copies(profile) + state


def step_s(problem: Problem, trainable_bytes: float, kind: DeviceType) -> float:
    """Time of an optimizer step, in s: bound by memory.

    Args:
        trainable_bytes: of the parameters that are trained on the device.
    """
    return step_passes(problem) * trainable_bytes / kind.memory_bandwidth_bytes_per_s


def step_passes(problem: Problem) -> float:
    """Bytes that a step reads and writes, over those of the parameters: it reads parameter and
    gradient, writes the parameter, clears the gradient, and reads and writes each moment. Where
    copies of weights are made once per step, in the next forward, it reads the parameter again and
    writes the copy.

    With float32 copies it reads a gradient, writes and reads it in float32, reads and writes copy
    and moments, reads the copy and writes the parameter, and clears the gradient.
    """
    moments, ratio = problem.training.optimizer.num_moments, _ratio(problem.profile.parameter_dtype)
    if not ratio:
        item = ITEM_BYTES[problem.profile.dtype]
        return 4 + 2 * moments + (1 + item / _FULL_BYTES if problem.profile.casts_once else 0)
    return 2 * gradient_copies(problem.profile) + ratio * (5 + 2 * moments) + 1


def stepped_bytes(profile: Profile, stepped: Iterable[Parameter]) -> int:
    """The most bytes of float32 gradients at a time: those of a bucket.

    Args:
        stepped: the parameters, of the size of the parts that a device steps.
    """
    held = sorted((one for one in stepped if one.bytes), key=lambda one: one.name)
    ratio = _ratio(profile.parameter_dtype)
    if not held or not ratio:
        return 0
    return max(ratio * sum(one.bytes for one in bucket) for bucket in buckets(held))
