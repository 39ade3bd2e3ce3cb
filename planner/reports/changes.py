"""The gain from changes of a cluster, and the bounds of a plan, as rows of text and as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem
from planner.artefacts.roofline import fits_any_device
from planner.planning.portfolio import SolverComparison
from planner.planning.sensitivity import Gain
from planner.reports.plans import comparison_json
from planner.reports.tables import Table
from planner.support.units import format_bytes, format_seconds

# Smaller changes are shown as none.
NOTICEABLE = 5e-4


def _shift(before: float, after: float) -> str:
    """A relative change.

    >>> _shift(2.0, 1.5), _shift(1.0, 1.0)
    ('-25.0 %', 'none')
    """
    change = after / before - 1
    return "none" if abs(change) < NOTICEABLE else f"{100 * change:+.1f} %"


def what_if_table(
    before: SolverComparison, after: SolverComparison, num_devices: Sequence[int]
) -> Table:
    """The best plans before and after.

    Args:
        num_devices: of the topology before and after.
    """
    plans = [None if one.best is None else one.best.plan for one in (before, after)]
    rows = [("devices", *map(str, num_devices), "")]
    if None in plans:
        fits = ("no plan fits" if plan is None else "fits" for plan in plans)
        rows.append(("plan", *fits, ""))
    for what, figure, shown in _FIGURES:
        values = [figure(plan) for plan in plans if plan is not None]
        shift = _shift(*values) if len(values) == 2 else ""
        cells = ("" if plan is None else shown(figure(plan)) for plan in plans)
        rows.append((what, *cells, shift))
    bounds = (before.lower_bound_s, after.lower_bound_s)
    rows.append(("lower bound", *map(format_seconds, bounds), _shift(*bounds)))
    stages = ("" if plan is None else str(len(plan.strategy.stages)) for plan in plans)
    used = ("" if plan is None else str(len(plan.prediction.devices)) for plan in plans)
    rows += [("stages", *stages, ""), ("devices in use", *used, "")]
    return Table("What would it bring", ("", ">before", ">after", ">change"), tuple(rows))


def _peak_bytes(plan: Plan) -> float:
    return max(device.memory.total_bytes for device in plan.prediction.devices)


# The figures of two plans that are compared: name, value, text.
_FIGURES: tuple[tuple[str, Callable[[Plan], float], Callable[[float], str]], ...] = (
    ("iteration", lambda plan: plan.prediction.iteration_s, format_seconds),
    ("samples/s", lambda plan: plan.prediction.throughput, "{:.4g}".format),
    ("peak memory", _peak_bytes, format_bytes),
)


def what_if_json(
    changes: Sequence[str], before: SolverComparison, num_devices: int
) -> dict[str, Any]:
    """The field `what_if` of `solve --json`, whose other fields are those after the changes.

    Args:
        changes: of the topology, in words.
        num_devices: before them.
    """
    plain = comparison_json(before, num_devices, None, None)
    without = ("strategy", "partition", "compared")
    return {
        "changes": list(changes),
        "before": {name: value for name, value in plain.items() if name not in without},
    }


def sensitivity_table(gains: Sequence[Gain]) -> Table:
    """The gain from each resource that is twice as fast, the largest first."""
    bounding = 0 if gains and gains[0].change <= -NOTICEABLE else None
    return Table(
        "The same plan, where one thing is twice as fast",
        ("what", ">count", "", ">iteration", ">change"),
        tuple(
            (
                gain.name,
                str(gain.count),
                gain.kind,
                format_seconds(gain.iteration_s),
                _shift(1.0, 1.0 + gain.change),
            )
            for gain in gains
        ),
        marked=bounding,
    )


def sensitivity_line(gains: Sequence[Gain]) -> str:
    """The resource that bounds the plan, in a sentence."""
    single = [gain for gain in gains if not gain.together]
    best = single[0]
    verb = "bound" if best.kind == "links" else "bounds"
    if best.change > -NOTICEABLE:
        return "no single device type or kind of link bounds this plan"
    return (
        f"{best.kind} {best.name} {verb} this plan most: twice as fast, an iteration takes"
        f" {format_seconds(best.iteration_s)} ({_shift(1.0, 1.0 + best.change)})"
    )


def changes_without_effect(problem: Problem, changes: Sequence[str]) -> tuple[str, ...]:
    """Notes on changes that have no effect on the plan."""
    speeds = [one for one in changes if one.startswith("device_types.") and ".memory:" not in one]
    if not speeds or not fits_any_device(problem.profile):
        return ()
    return (
        "the profile does not say on what it was made, so its times are the same on every device,"
        " however fast",
    )
