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
from planner.profilers.interpolate import interpolated
from planner.schedules.orders import with_microbatches
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
    """One problem for each size of the microbatch that divides the samples of an iteration; these
    are the same for all.

    Args:
        profiles: of one model, ascending by the size of the microbatch.
        measured_on: the profiles' type of device; None if it is not known.

    Raises:
        OptionError: if a choice is unknown, or the options contradict each other or the profiles.
    """
    counts = nums_microbatches(profiles, len(topology.devices), training)
    return tuple(
        Problem(
            profile,
            topology,
            count,
            training,
            search,
            measured_on,
            calibration,
        )
        for profile, count in zip(profiles, counts, strict=True)
        if count is not None
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


def nums_microbatches(
    profiles: Sequence[Profile], num_devices: int, training: Training
) -> list[int | None]:
    """M for each size of the microbatch; None for sizes that do not divide the samples of an
    iteration.

    Raises:
        OptionError: if no size divides them, or they are given twice.
    """
    samples, given = training.global_batch, training.microbatches
    sizes = [profile.microbatch_size for profile in profiles]
    samples = samples or (given or MICROBATCHES_PER_DEVICE * num_devices) * sizes[-1]
    if all(samples % size for size in sizes):
        raise OptionError(
            f"--global-batch {samples} is no multiple of the profile's microbatch of"
            f" {' or '.join(map(str, sizes))}; take one, --microbatch-size for a size between, or"
            " profile with another --batch"
        )
    return [None if samples % size else _checked_count(samples // size) for size in sizes]


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
