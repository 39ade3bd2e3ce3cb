"""From a user's request to the problems that solvers get."""

from collections.abc import Sequence
from dataclasses import replace

from planner.artefacts.calibration import Calibration
from planner.artefacts.files import artefact_hash
from planner.artefacts.options import Objective, Optimizer, Recompute, Search, Training
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import Profile
from planner.artefacts.topology import DeviceType, Topology
from planner.profilers.interpolate import interpolated, span
from planner.schedules.orders import with_microbatches
from planner.solvers.sharded.layout import divisors
from planner.support.errors import OptionError

# Microbatches per device and iteration, where nothing is said.
MICROBATCHES_PER_DEVICE = 4
# Per iteration: four times as many as the largest topology has where nothing is said. Action lists
# have two entries for each microbatch and stage.
MAX_MICROBATCHES = 2**16


def problems_for(
    profiles: Sequence[Profile],
    topology: Topology,
    training: Training,
    search: Search,
    calibration: Calibration,
    measured_on: DeviceType | None,
) -> tuple[Problem, ...]:
    """One problem for each profile whose microbatch divides the samples of an iteration, which are
    the same for all. Where none does, one for another size that the profiles are good for.

    Args:
        profiles: of one model, ascending by the size of the microbatch.
        measured_on: the profiles' type of device; None if it is not known.

    Raises:
        OptionError: if a choice is unknown, or the options contradict each other or the profiles.
    """
    samples = samples_of(profiles, len(topology.devices), training)
    return tuple(
        Problem(
            profile,
            topology,
            _checked_count(samples // profile.microbatch_size),
            training,
            search,
            measured_on,
            calibration,
        )
        for profile in _dividing(profiles, samples, training)
    )


def sized(profiles: Sequence[Profile], training: Training) -> tuple[Profile, ...]:
    """The profile of the microbatch that is asked for, interpolated where it was not profiled; all
    profiles, where none is.

    Raises:
        OptionError: if the size is outside those profiled.
    """
    if training.microbatch_size is None:
        return tuple(profiles)
    return (interpolated(profiles, training.microbatch_size),)


def samples_of(profiles: Sequence[Profile], num_devices: int, training: Training) -> int:
    """The samples of an iteration; a number of microbatches is of the largest size."""
    count = training.microbatches or MICROBATCHES_PER_DEVICE * num_devices
    return training.global_batch or count * profiles[-1].microbatch_size


def sizes_for(profiles: Sequence[Profile], samples: int) -> list[int]:
    """The sizes of the microbatch that a search may choose, ascending: those that divide the
    samples of an iteration into at most `MAX_MICROBATCHES`, and that the profiles are good for.
    """
    least, most = span(profiles)
    few = -(-samples // MAX_MICROBATCHES)
    return [n for n in divisors(samples) if max(least, few) <= n <= (most or samples)]


def _dividing(profiles: Sequence[Profile], samples: int, training: Training) -> tuple[Profile, ...]:
    """The profiles whose microbatch divides the samples of an iteration. Where none does, that of
    another size, unless one is asked for: the largest below those profiled, or the next above.

    Raises:
        OptionError: if there is none, or no profile of that size.
    """
    sizes = sizes_for(profiles, samples)
    chosen = tuple(one for one in profiles if one.microbatch_size in sizes)
    if chosen or not sizes or training.microbatch_size is not None:
        return chosen or _whole(profiles, samples)
    below = [size for size in sizes if size <= profiles[-1].microbatch_size]
    return (interpolated(profiles, below[-1] if below else sizes[0]),)


def _whole(profiles: Sequence[Profile], samples: int) -> tuple[Profile, ...]:
    """The profiles whose microbatch divides the samples of an iteration, however often.

    Raises:
        OptionError: if none does.
    """
    sizes = [profile.microbatch_size for profile in profiles]
    if all(samples % size for size in sizes):
        raise OptionError(
            f"--global-batch {samples} is no multiple of the profile's microbatch of"
            f" {' or '.join(map(str, sizes))}; take one, --microbatch-size for another size, or"
            " profile with another --batch"
        )
    return tuple(one for one in profiles if samples % one.microbatch_size == 0)


def _checked_count(num_microbatches: int) -> int:
    """The number of microbatches of an iteration, if there may be so many.

    Raises:
        OptionError: if there may not.
    """
    if num_microbatches > MAX_MICROBATCHES:
        raise OptionError(
            f"expected at most {MAX_MICROBATCHES} microbatches per iteration, got"
            f" {num_microbatches}; give a smaller --microbatches or --global-batch, or profile with"
            " a larger --batch"
        )
    return num_microbatches


def problem_of_plan(
    plan: Plan,
    profile: Profile,
    topology: Topology,
    training: Training,
    calibration: Calibration,
    measured_on: DeviceType | None,
) -> tuple[Problem, Result]:
    """The problem that a plan answered and the solver's answer, or the same strategy elsewhere.

    Args:
        topology: the one that the plan was made for, or another one.
        training: its microbatches (None takes the plan's) and memory; the rest is the plan's.
        measured_on: the profile's type of device; None if it is not known.

    Raises:
        OptionError: if a stage has more replicas than there are microbatches.
    """
    strategy, certificate = plan.strategy, plan.certificate
    count = _checked_count(training.microbatches or strategy.num_microbatches)
    own = replace(
        training,
        objective=Objective(certificate.objective),
        schedule=strategy.schedule,
        vertical_sync=strategy.vertical_sync,
        optimizer=Optimizer(plan.optimizer),
        recompute=Recompute.AUTO,
    )
    search = Search(seed=plan.seed)
    problem = Problem(profile, topology, count, own, search, measured_on, calibration)
    is_own = artefact_hash(topology) == plan.topology_hash
    if is_own and count == strategy.num_microbatches:
        return problem, Result(
            Status(plan.status),
            strategy,
            certificate.space_bound_s,
            certificate.space,
            reproducible=plan.reproducible,
        )
    for s, stage in enumerate(strategy.stages):
        if stage.num_replicas > count:
            raise OptionError(
                f"--microbatches {count}: stage {s} has {stage.num_replicas} replicas and needs at"
                f" least {stage.num_replicas} microbatches"
            )
        if strategy.schedule.is_asynchronous and count % stage.num_replicas:
            raise OptionError(
                f"--microbatches {count}: stage {s} has {stage.num_replicas} replicas and needs a"
                " multiple of that under the schedule pipedream"
            )
    space = "another topology or number of microbatches than was planned for"
    return problem, Result(Status.FEASIBLE, with_microbatches(strategy, count), space=space)
