"""Rows of a table of measured iterations -> the runs that factors are fitted to: the plan of each
row is megatron's at the row's degrees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from planner.artefacts.calibration import UNCALIBRATED
from planner.artefacts.measured import MeasuredRow
from planner.artefacts.options import Search, Training
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import DeviceType, Topology, take
from planner.planning.problems import problems_for, sized
from planner.planning.sizes import best_over_sizes
from planner.schedules.orders import default_warmups
from planner.simulator.factors import TimedRun
from planner.solvers.sharded.options import Megatron
from planner.support.errors import OptionError, PlannerError

LIMITS_S = (0.0, 7.0, 60.0)
"""Work for a plan, in seconds of an ordinary core: without any the judge simulates no variants of
the strategy that ran, but for many devices the solver may not come to an answer.
"""
UNLIMITED = 2**42
"""Bytes of memory of a device: what ran did fit, whatever is predicted."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the rows of a table ran with.

    Attributes:
        profiles: of one or several models, ascending by the size of the microbatch.
        topology: a row ran on its first devices.
        measured_on: the profiles' type of device; None if it is not known.
    """

    profiles: Sequence[Profile]
    topology: Topology
    measured_on: DeviceType | None


def timed_runs(
    rows: Sequence[MeasuredRow],
    place: Place,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[TimedRun, ...]:
    """The runs of all rows, in their order.

    Args:
        progress: called with the number of rows done, and of all.

    Raises:
        OptionError: if rows have no plan, with a line for each.
    """
    runs, wrong = [], []
    for done, row in enumerate(rows):
        progress(done, len(rows))
        try:
            runs.append(_run(row, place))
        except PlannerError as error:
            wrong.append(f"{row.name}: {error}")
    progress(len(rows), len(rows))
    if wrong:
        raise OptionError("\n".join(wrong))
    return tuple(runs)


def _run(row: MeasuredRow, place: Place) -> TimedRun:
    """The run of a row.

    Raises:
        PlannerError: if it has no plan.
    """
    count = len(place.topology.devices)
    if row.num_devices > count:
        raise OptionError(
            f"t x d x p: expected at most the {count} devices of {place.topology.name}, got"
            f" {row.num_devices}"
        )
    training = Training(
        global_batch=row.batch,
        microbatch_size=row.microbatch,
        optimizer=row.optimizer,
        recompute=row.recompute,
        device_memory=UNLIMITED,
    )
    degrees = Megatron(
        tensor_degree=row.tensor,
        data_degree=row.data,
        pipeline_degree=row.pipeline,
        sequence_parallel=row.sequence_parallel,
        over_replicas=row.over_replicas,
    )
    problems = problems_for(
        profiles := sized(_of_model(row.model, place.profiles), training),
        take(place.topology, row.num_devices),
        training,
        Search(switches=(degrees,)),
        UNCALIBRATED,
        place.measured_on,
    )
    for limit_s in LIMITS_S:
        plans = best_over_sizes(problems, profiles, ("megatron",), limit_s)
        if plans.plan is not None:
            strategy = with_usual_warmup(plans.plan.strategy)
            return TimedRun(row.name, row.model, plans.problems[-1], strategy, row.time_s)
    raise OptionError(plans.comparison.rows[0].reason or "there is no such plan")


def with_usual_warmup(strategy: Strategy) -> Strategy:
    """The same stages with the usual numbers of microbatches in flight of their schedule."""
    depths = default_warmups(
        [stage.num_replicas for stage in strategy.stages],
        strategy.num_microbatches,
        schedule=strategy.schedule,
        devices=[stage.devices for stage in strategy.stages],
    )
    stages = zip(strategy.stages, depths, strict=True)
    return replace(strategy, stages=tuple(replace(one, warmup=depth) for one, depth in stages))


def _of_model(name: str, profiles: Sequence[Profile]) -> Sequence[Profile]:
    """The profiles of the model of a row."""
    by_model: dict[str, list[Profile]] = {}
    for profile in profiles:
        by_model.setdefault(PurePath(profile.model_path or "").stem, []).append(profile)
    known = ", ".join(by_model)
    if not name and len(by_model) > 1:
        raise OptionError(f"model: expected one of {known}, as there are several profiles")
    if name and name not in by_model:
        raise OptionError(f"model: expected one of {known}, got {name!r}; give --profile")
    own = by_model[name] if name else profiles
    if len({(one.model_hash, one.device_type, one.dtype) for one in own}) > 1:
        raise OptionError(f"--profile: expected one of the model {name or known}, got several")
    return own
