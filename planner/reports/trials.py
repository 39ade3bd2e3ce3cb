"""Plans that were launched on this machine: measured samples/s beside the predicted ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from planner.planning.portfolio import SolverComparison
from planner.reports.compare import (
    MEASURED_HEAD,
    NOTICEABLE,
    TABLE_HEAD,
    compare_rows,
    csv_text,
)
from planner.reports.plans import comparison_json, samples_per_s
from planner.reports.tables import Table, count, printable_lines
from planner.training.trials import Trial

STOPPED = "the command was stopped before its turn"
MAX_PAIRS = 3
"""Pairs in the other order that are named."""


def complete(comparison: SolverComparison, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """A trial for each plan of a comparison, in their order, also where only the first ones had
    their turn.
    """
    plans = [(row.solver, row.plan) for row in comparison.rows if row.plan is not None]
    left = (Trial(solver, plan, reason=STOPPED) for solver, plan in plans[len(trials) :])
    return (*trials, *left)


def by_row(comparison: SolverComparison, trials: Sequence[Trial]) -> Iterator[Trial | None]:
    """The trial of each row; None where the row has no plan."""
    left = iter(trials)
    return (None if row.plan is None else next(left) for row in comparison.rows)


def trials_table(trials: Sequence[Trial], steps: int) -> Table:
    """A row for every plan; the fastest one as measured is marked."""
    ran = [k for k, trial in enumerate(trials) if trial.iterations_s]
    return Table(
        f"Launched on this machine, {count(steps, 'step')} of each plan: samples/s predicted, and"
        " as measured",
        ("solver", ">predicted", ">mean", ">least", ">most", ">predicted/mean", ""),
        tuple(map(_cells, trials)),
        marked=max(ran, key=lambda k: trials[k].throughput, default=None),
        optional=(">least", ">most"),
    )


def _cells(trial: Trial) -> tuple[str, ...]:
    predicted = trial.plan.prediction.throughput
    equal = "" if trial.same_as is None else f"the plan of {trial.same_as}"
    if not trial.iterations_s:
        why = ": ".join(filter(None, (equal, f"not run: {trial.reason}")))
        return trial.solver, samples_per_s(predicted), *[""] * 4, why
    measured = (trial.throughput, trial.least_throughput, trial.most_throughput)
    rates = map(samples_per_s, (predicted, *measured))
    return trial.solver, *rates, f"{predicted / trial.throughput:.3f}", equal


@dataclass(frozen=True, slots=True)
class Order:
    """Whether plans are as fast, compared with each other, as they were predicted to be.

    Attributes:
        num_pairs: pairs of different plans that were run and whose predictions differ.
        reversed: of these, the pairs that were measured in the other order, the faster one first.
    """

    num_pairs: int
    reversed: tuple[tuple[str, str], ...]

    @property
    def num_as_predicted(self) -> int:
        """Pairs that were measured in the order predicted."""
        return self.num_pairs - len(self.reversed)


def order_of(trials: Sequence[Trial]) -> Order:
    """The order of the plans that were run, each once."""
    ran = [trial for trial in trials if trial.iterations_s and trial.same_as is None]
    num_pairs, other = 0, []
    for pair in combinations(ran, 2):
        slow, fast = sorted(pair, key=lambda trial: trial.plan.prediction.throughput)
        if fast.plan.prediction.throughput < slow.plan.prediction.throughput * (1 + NOTICEABLE):
            continue  # predicted to be as fast as each other
        num_pairs += 1
        if slow.throughput >= fast.throughput:
            other.append((slow.solver, fast.solver))
    return Order(num_pairs, tuple(other))


def order_line(order: Order) -> str:
    """The same in words; empty where there is nothing to compare."""
    if not order.num_pairs:
        return ""
    pairs = count(order.num_pairs, "pair")
    named = [f"{fast} is faster than {slow}" for fast, slow in order.reversed[:MAX_PAIRS]]
    more = len(order.reversed) - len(named)
    return "; ".join(
        [
            f"measured in the order predicted: {order.num_as_predicted} of {pairs} of plans",
            *named,
            *([f"and {more} more"] if more else []),
        ]
    )


def note_lines(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Reasons why prediction and measurement may differ, each once, after its solvers."""
    solvers: dict[str, list[str]] = {}
    for trial in trials:
        for note in trial.notes if trial.same_as is None else ():
            solvers.setdefault(note, []).append(trial.solver)
    return tuple(f"{', '.join(names)}: {note}" for note, names in solvers.items())


def trials_csv(comparison: SolverComparison, trials: Sequence[Trial]) -> str:
    """The lines of `compare --csv`, with what was measured behind them."""
    rows = zip(compare_rows(comparison), by_row(comparison, trials), strict=True)
    return csv_text(
        TABLE_HEAD + MEASURED_HEAD, [(*cells, *_measured_cells(trial)) for cells, trial in rows]
    )


def _measured_cells(trial: Trial | None) -> tuple[object, ...]:
    if trial is None or not trial.iterations_s:
        reason = "" if trial is None else printable_lines(trial.reason or "")
        return *[""] * (len(MEASURED_HEAD) - 1), reason
    figures = (trial.throughput, trial.least_throughput, trial.most_throughput)
    return *figures, len(trial.iterations_s), trial.same_as or "", ""


def trials_json(
    comparison: SolverComparison, trials: Sequence[Trial], num_devices: int
) -> dict[str, Any]:
    """The object that `compare --run --json` prints: that of `compare`, with "measured", or the
    reason "not_measured", in each row, and the order.
    """
    plain, order = comparison_json(comparison, num_devices, None, None), order_of(trials)
    rows = zip(plain["compared"], by_row(comparison, trials), strict=True)
    return {
        **plain,
        "compared": [{**fields, **_measured(trial)} for fields, trial in rows],
        "order": {"pairs": order.num_pairs, "as_predicted": order.num_as_predicted},
    }


def _measured(trial: Trial | None) -> dict[str, Any]:
    if trial is None or not trial.iterations_s:
        return {"measured": None, "not_measured": "no plan" if trial is None else trial.reason}
    figures = {
        "throughput": trial.throughput,
        "least_throughput": trial.least_throughput,
        "most_throughput": trial.most_throughput,
        "iterations_s": list(trial.iterations_s),
        "same_as": trial.same_as,
        "notes": list(trial.notes),
    }
    return {"measured": figures, "not_measured": None}
