"""Changes of a plan, as tables, lines of text and JSON: by another cluster, by one resource that is
twice as fast, and by measured parts of operators.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.roofline import device_is_unknown
from planner.planning.judge import objective_s
from planner.planning.portfolio import SolverComparison
from planner.planning.refine import Refinement
from planner.planning.sensitivity import Gain
from planner.reports.plans import NOTICEABLE, PLAN_COLUMNS, comparison_json
from planner.reports.tables import Column, Table, chosen, count, json_rows, signed, table
from planner.support.units import format_seconds

_FIGURE = {
    Objective.ITERATION: "per iteration",
    Objective.BOTTLENECK: "at the bottleneck",
    Objective.LATENCY: "of latency",
}
GAIN_COLUMNS: tuple[Column[Gain], ...] = (
    Column("name", lambda gain: gain.name, "resource", left=True),
    Column("count", lambda gain: gain.count, "count"),
    Column("kind", lambda gain: gain.kind, "", left=True),
    Column("iteration_s", lambda gain: gain.iteration_s, "iteration", format_seconds),
    Column("change", lambda gain: gain.change, "change", lambda change: _noticed(change)),
    Column("together", lambda gain: gain.together),
)


def _noticed(change: float) -> str:
    """A relative change that is large enough to be one.

    >>> _noticed(-0.25), _noticed(0.0)
    ('-25.0 %', 'none')
    """
    return "none" if abs(change) < NOTICEABLE else signed(change)


def what_if_table(
    before: SolverComparison, after: SolverComparison, num_devices: Sequence[int]
) -> Table:
    """The best plans before and after.

    Args:
        num_devices: of the topology before and after.
    """
    plans = [None if one.best is None else one.best.plan for one in (before, after)]
    bounds = (before.lower_bound_s, after.lower_bound_s)

    def row(key: str, name: str, *, compared: bool = True) -> tuple[str, ...]:
        (column,) = chosen(PLAN_COLUMNS, key)
        values = [column.value(plan) for plan in plans if plan is not None]
        change = _noticed(values[1] / values[0] - 1) if compared and len(values) == 2 else ""
        texts = ("" if plan is None else column.text(column.value(plan)) for plan in plans)
        return (name, *texts, change)

    fits = ("no plan fits" if plan is None else "fits" for plan in plans)
    rows = [
        ("devices", *map(str, num_devices), ""),
        *([("plan", *fits, "")] if None in plans else []),
        row("iteration_s", "iteration"),
        row("throughput", "samples/s"),
        row("peak_bytes", "peak memory"),
        ("lower bound", *map(format_seconds, bounds), _noticed(bounds[1] / bounds[0] - 1)),
        row("num_stages", "stages", compared=False),
        row("num_devices", "devices in use", compared=False),
    ]
    columns: list[Column[tuple[str, ...]]] = [
        Column("", itemgetter(i), head, left=i == 0)
        for i, head in enumerate(("", "before", "after", "change"))
    ]
    return table("Effect of the changes", rows, columns)


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
    title = "The same plan with one resource twice as fast"
    return table(title, gains, GAIN_COLUMNS, bounding)


def sensitivity_json(gains: Sequence[Gain]) -> list[dict[str, Any]]:
    """The field `sensitivity` of `solve --json`."""
    return json_rows(gains, chosen(GAIN_COLUMNS, "kind name count iteration_s change together"))


def sensitivity_line(gains: Sequence[Gain]) -> str:
    """The resource that bounds the plan, in a sentence."""
    single = [gain for gain in gains if not gain.together]
    best = single[0]
    verb = "bound" if best.kind == "links" else "bounds"
    if best.change > -NOTICEABLE:
        return "no single device type or kind of link bounds this plan"
    return (
        f"{best.kind} {best.name} {verb} this plan most: twice as fast, an iteration takes"
        f" {format_seconds(best.iteration_s)} ({_noticed(best.change)})"
    )


def changes_without_effect(problem: Problem, changes: Sequence[str]) -> tuple[str, ...]:
    """Notes on changes that have no effect on the plan."""
    speeds = [one for one in changes if one.startswith("device_types.") and ".memory:" not in one]
    if not speeds or not device_is_unknown(problem.profile):
        return ()
    return (
        "the profile does not name the device that it was measured on, so its times are the same on"
        " every device",
    )


def refinement_lines(refinement: Refinement) -> tuple[str, ...]:
    """The measurements, the change of the plan, and notes."""
    notes = tuple(f"note: {note}" for note in refinement.notes)
    before, after = refinement.before, refinement.after
    if before is None or after is None:
        return tuple(refinement.notes)
    unit = _FIGURE[Objective(before.certificate.objective)]
    old_s, same_s, new_s = objective_s(before), refinement.same_s, objective_s(after)
    lines = [
        f"refined: parts of {count(refinement.num_operators, 'operator')} of the best plan have"
        f" measured times; {count(refinement.num_timed, 'class', 'classes')} timed,"
        f" {refinement.num_cached} from the cache",
        f"the {before.solver} plan: {format_seconds(old_s)} {unit} by shares of whole operators,"
        f" {format_seconds(same_s)} by measured parts ({signed(same_s / old_s - 1)})",
    ]
    if after.strategy != before.strategy:
        lines.append(
            f"the {after.solver} plan is better by measured parts: {format_seconds(new_s)} {unit};"
            f" {count(refinement.rounds, 'plan')} refined"
        )
    return (*lines, *notes)


def refinement_json(refinement: Refinement) -> dict[str, Any]:
    """The same figures for machines."""
    before, after = refinement.before, refinement.after
    return {
        "rounds": refinement.rounds,
        "operators": refinement.num_operators,
        "timed": refinement.num_timed,
        "cached": refinement.num_cached,
        "solver_before": None if before is None else before.solver,
        "solver": None if after is None else after.solver,
        "before_s": None if before is None else objective_s(before),
        "before_refined_s": None if before is None else refinement.same_s,
        "after_s": None if after is None else objective_s(after),
        "notes": list(refinement.notes),
    }
