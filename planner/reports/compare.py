"""Solvers beside each other: a picture of bars, CSV, and who won by how much."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from planner.planning.judge import comparable_s, objective_s
from planner.planning.portfolio import SolverComparison
from planner.reports.drawing.bars import bars
from planner.reports.tables import percent
from planner.support.outputs import FileKind, head_of
from planner.support.printable import printable_lines
from planner.support.units import format_seconds

# Nearer than this, two plans are as fast as each other.
NOTICEABLE = 5e-4


def compare_bars(comparison: SolverComparison, width: int) -> tuple[str, ...]:
    """The time of each solver's plan, the best first, with a mark at the lower bound.

    Args:
        width: of the longest bar, in columns.
    """
    plans = sorted(
        ((row.solver, row.plan) for row in comparison.rows if row.plan is not None),
        key=lambda one: comparable_s(one[1]),
    )
    if not plans:
        return ()
    objective, bound_s = plans[0][1].certificate.objective, comparison.lower_bound_s
    drawn = bars(
        [(name, objective_s(plan), format_seconds(objective_s(plan))) for name, plan in plans],
        width,
        bound_s,
    )
    return (f"{objective}; the mark is the lower bound, {format_seconds(bound_s)}", *drawn)


TABLE_HEAD = (
    "solver", "status", "iteration_s", "bottleneck_s", "latency_s", "throughput",
    "bubble_fraction", "peak_bytes", "lower_bound_s", "gap", "space_bound_s", "num_stages",
    "num_devices", "solve_s", "reason",
)  # fmt: skip
MEASURED_HEAD = (
    "measured_throughput", "least_throughput", "most_throughput", "measured_steps", "same_as",
    "not_measured",
)  # fmt: skip
"""The columns that `compare --run` adds."""
_HEADS = tuple(",".join(head) + "\n" for head in (TABLE_HEAD, TABLE_HEAD + MEASURED_HEAD))
TABLE_FILE = FileKind("a table", lambda path: head_of(path).startswith(_HEADS))


def compare_csv(comparison: SolverComparison) -> str:
    """A line per solver; times in s, sizes in bytes, empty where there is no plan."""
    return csv_text(TABLE_HEAD, compare_rows(comparison))


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows below their head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def compare_rows(comparison: SolverComparison) -> Iterator[tuple[object, ...]]:
    """The cells of each solver, below `TABLE_HEAD`."""
    for row in comparison.rows:
        plan, figures = row.plan, [""] * 5 + [""] + [comparison.lower_bound_s] + [""] * 4
        if plan is not None:
            said, sure = plan.prediction, plan.certificate
            figures = [
                said.iteration_s, said.bottleneck_s, said.latency_s, said.throughput,
                said.bubble_fraction, max(d.memory.total_bytes for d in said.devices),
                sure.lower_bound_s, sure.gap,
                "" if sure.space_bound_s is None else sure.space_bound_s,
                len(plan.strategy.stages), len(said.devices),
            ]  # fmt: skip
        reason = printable_lines(row.reason or "")
        took_s = "" if row.solve_s is None else row.solve_s
        yield row.solver, row.status.value, *figures, took_s, reason


def winner_line(comparison: SolverComparison) -> str:
    """Which solver won, and by how much over plain data parallelism; empty without a plan."""
    best = comparison.best
    if best is None or best.plan is None:
        return ""
    rows = [row for row in comparison.rows if row.solver == "data-parallel"]
    plans = [row.plan for row in rows if row.plan is not None]
    if not rows:
        return f"the best plan is {best.solver}'s"
    if not plans:
        return f"the best plan is {best.solver}'s; plain data parallelism has none"
    gain = min(map(comparable_s, plans)) / comparable_s(best.plan) - 1
    if gain < NOTICEABLE:
        how = "" if best.solver == "data-parallel" else ", which is as fast as data parallelism"
        return f"the best plan is {best.solver}'s{how}"
    return f"the best plan is {best.solver}'s, {percent(gain)} faster than plain data parallelism"
