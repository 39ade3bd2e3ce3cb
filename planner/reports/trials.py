"""Plans that were launched on this machine: measured samples/s beside the predicted ones."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from planner.planning.portfolio import SolverComparison, SolverRow
from planner.reports.plans import (
    CSV_KEYS,
    MEASURED_KEYS,
    NOTICEABLE,
    PLAN_COLUMNS,
    comparison_json,
    samples_per_s,
    solver_columns,
)
from planner.reports.tables import Column, Table, chosen, count, csv_text, json_row, table
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


def _by_row(comparison: SolverComparison, trials: Sequence[Trial]) -> Iterator[Trial | None]:
    """The trial of each row; None where the row has no plan."""
    left = iter(trials)
    return (None if row.plan is None else next(left) for row in comparison.rows)


TRIAL_COLUMNS: tuple[Column[Trial], ...] = (
    Column("measured_throughput", lambda trial: trial.throughput, "mean", samples_per_s),
    Column("least_throughput", lambda trial: trial.least_throughput, "least", samples_per_s,
           gives_way=1),
    Column("most_throughput", lambda trial: trial.most_throughput, "most", samples_per_s,
           gives_way=2),
    Column("", lambda trial: trial.plan.prediction.throughput / trial.throughput,
           "predicted/mean", "{:.3f}".format),
    Column("iterations_s", lambda trial: list(trial.iterations_s)),
    Column("measured_steps", lambda trial: len(trial.iterations_s)),
    Column("same_as", lambda trial: trial.same_as),
    Column("notes", lambda trial: list(trial.notes)),
)  # fmt: skip
"""The figures of a plan that ran."""


def _ran(trial: Trial) -> Trial | None:
    """The trial of a plan that ran."""
    return trial if trial.iterations_s else None


def _remark(trial: Trial) -> str:
    equal = "" if trial.same_as is None else f"the plan of {trial.same_as}"
    return ": ".join(
        filter(None, (equal, "" if trial.iterations_s else f"not run: {trial.reason}"))
    )


def trials_table(trials: Sequence[Trial], steps: int) -> Table:
    """A row for every plan; the fastest one as measured is marked."""
    ran = [k for k, trial in enumerate(trials) if trial.iterations_s]
    (predicted,) = chosen(PLAN_COLUMNS, "throughput")
    return table(
        f"Launched on this machine, {count(steps, 'step')} of each plan: samples/s as predicted and"
        " as measured",
        trials,
        [
            Column("", lambda trial: trial.solver, "solver", left=True),
            replace(predicted.of(lambda trial: trial.plan), head="predicted"),
            *(column.of(_ran) for column in TRIAL_COLUMNS),
            Column("", _remark, "", left=True),
        ],
        max(ran, key=lambda k: trials[k].throughput, default=None),
    )


class Order(NamedTuple):
    """The measured order of plans beside the predicted one.

    Attributes:
        num_pairs: pairs of different plans that were run and whose predictions differ.
        reversed: the pairs that were measured in the other order, the faster plan first.
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
    named = [f"{fast} is faster than {slow}" for fast, slow in order.reversed]
    more = [f"and {len(named) - MAX_PAIRS} more"] if len(named) > MAX_PAIRS else []
    head = (
        f"measured in the order predicted: {order.num_as_predicted} of"
        f" {count(order.num_pairs, 'pair')} of plans"
    )
    return "; ".join([head, *named[:MAX_PAIRS], *more])


def note_lines(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Reasons why prediction and measurement may differ, each once, after its solvers."""
    solvers: dict[str, list[str]] = {}
    for trial in trials:
        for note in trial.notes if trial.same_as is None else ():
            solvers.setdefault(note, []).append(trial.solver)
    return tuple(f"{', '.join(names)}: {note}" for note, names in solvers.items())


def trials_csv(comparison: SolverComparison, trials: Sequence[Trial]) -> str:
    """The lines of `compare --csv`, with the measured figures behind them."""
    measured = chosen(TRIAL_COLUMNS, MEASURED_KEYS)
    columns: list[Column[tuple[SolverRow, Trial | None]]] = [
        *(one.of(lambda pair: pair[0]) for one in chosen(solver_columns(comparison), CSV_KEYS)),
        *(one.of(lambda pair: pair[1] and _ran(pair[1])) for one in measured),
        Column("not_measured", lambda pair: pair[1] and pair[1].reason),
    ]
    return csv_text(zip(comparison.rows, _by_row(comparison, trials), strict=True), columns)


def trials_json(
    comparison: SolverComparison, trials: Sequence[Trial], num_devices: int
) -> dict[str, Any]:
    """The object that `compare --run --json` prints: that of `compare`, with "measured", or the
    reason "not_measured", in each row, and the order.
    """
    plain, order = comparison_json(comparison, num_devices, None, None), order_of(trials)
    rows = zip(plain["compared"], _by_row(comparison, trials), strict=True)
    return {
        **plain,
        "compared": [{**fields, **_measured_json(trial)} for fields, trial in rows],
        "order": {"pairs": order.num_pairs, "as_predicted": order.num_as_predicted},
    }


def _measured_json(trial: Trial | None) -> dict[str, Any]:
    if trial is None or not trial.iterations_s:
        return {"measured": None, "not_measured": "no plan" if trial is None else trial.reason}
    keys = "least_throughput most_throughput iterations_s same_as notes"
    figures = {"throughput": trial.throughput, **json_row(trial, chosen(TRIAL_COLUMNS, keys))}
    return {"measured": figures, "not_measured": None}
