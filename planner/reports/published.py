"""Plans under dnn-partitioning's, Piper's and PipeDream's cost models, as tables, text and JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.artefacts.plan import Plan
from planner.planning.portfolio import SolverComparison
from planner.reports.tables import (
    Column,
    Row,
    Table,
    chosen,
    count,
    device_runs,
    json_row,
    json_rows,
    table,
)
from planner.support.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.planning.other_cost_models import ForeignComparison, ForeignRow, ForeignStage
    from planner.solvers.pipedream.costs import PipeDreamReport, StageReport

# Figures that only the planner's own cost model has.
_UNKNOWN = ("iteration_s", "throughput", "bubble_fraction", "lower_bound_s", "gap")

# ------------------------------------------------------------ dnn-partitioning and Piper

STAGE_COLUMNS: "tuple[Column[ForeignStage], ...]" = (
    Column("devices", lambda stage: list(stage.devices), "devices", device_runs, left=True),
    Column("num_operators", lambda stage: len(stage.operators), "operators", gives_way=3),
    Column("forward_s", lambda stage: stage.forward_s),
    Column("backward_s", lambda stage: stage.backward_s),
    Column("", lambda stage: stage.forward_s + stage.backward_s, "computation", format_seconds,
           gives_way=2),
    Column("communication_s", lambda stage: stage.communication_s, "communication", format_seconds),
    Column("load_s", lambda stage: stage.load_s, "load", format_seconds),
    Column("", lambda stage: stage.memory_bytes, "memory", format_bytes),
    Column("how", lambda stage: stage.how, "details", left=True),
    Column("", lambda stage: f"{stage.operators[0]} .. {stage.operators[-1]}", "from .. to",
           left=True, gives_way=1),
)  # fmt: skip


def _row_columns(num_devices: int) -> "tuple[Column[ForeignRow], ...]":
    """The figures of a solver's answer.

    Args:
        num_devices: number of devices; `peak_bytes` has one entry for each.
    """

    def peaks(row: "ForeignRow") -> list[int]:
        known = {d: stage.memory_bytes for stage in row.stages for d in stage.devices}
        return [round(known.get(d, 0)) for d in range(num_devices)]

    def planned(row: "ForeignRow") -> "ForeignRow | None":
        return row if row.stages else None

    of_plans: tuple[Column[ForeignRow], ...] = (
        Column("peak_bytes", peaks),
        Column("num_stages", lambda row: len(row.stages), "stages"),
        Column("", lambda row: sum(len(stage.devices) for stage in row.stages), "devices"),
        Column("stages", lambda row: json_rows(row.stages, STAGE_COLUMNS)),
        Column("reproducible", lambda row: row.reproducible),
    )
    return (
        Column("solver", lambda row: row.solver, "solver", left=True),
        Column("status", lambda row: row.status.value, "status", left=True),
        Column("reason", lambda row: row.reason),
        *(Column(key, lambda row: None) for key in _UNKNOWN),
        Column("space_bound_s", lambda row: row.bound_s),
        *(column.of(planned) for column in of_plans),
        Column("bottleneck_s", lambda row: row.bottleneck_s, "bottleneck", format_seconds),
        Column("solve_s", lambda row: row.solve_s, "took", format_seconds),
    )


def published_table(comparison: "ForeignComparison") -> Table:
    """A row for every solver."""
    marked = comparison.rows.index(comparison.best) if comparison.best.stages else None
    title = f"Plans, by {comparison.model.value}'s cost model"
    return table(title, comparison.rows, _row_columns(comparison.num_devices), marked)


def published_stage_table(comparison: "ForeignComparison") -> Table:
    """The stages of the best plan."""
    return _stage_table("Stages", comparison.best.stages, STAGE_COLUMNS)


def _stage_table(title: str, stages: Sequence[Row], columns: Iterable[Column[Row]]) -> Table:
    """A row for every stage, behind its index."""
    index: Column[tuple[int, Row]] = Column("", lambda row: row[0], "stage")
    rows = tuple(enumerate(stages))
    return table(title, rows, [index, *(column.of(lambda row: row[1]) for column in columns)])


def published_lines(comparison: "ForeignComparison") -> tuple[str, ...]:
    """Why solvers have no plan, and notes for the user."""
    return (
        *(f"{row.solver}: {row.reason}" for row in comparison.rows if row.reason),
        *(f"note: {note}" for note in comparison.notes),
    )


def published_json(comparison: "ForeignComparison") -> dict[str, Any]:
    """The object that `solve --json` prints under another planner's cost model."""
    keys = f"solver status reason solve_s bottleneck_s {' '.join(_UNKNOWN)} space_bound_s"
    columns = chosen(
        _row_columns(comparison.num_devices),
        f"{keys} peak_bytes num_stages stages reproducible",
    )
    rows = json_rows(comparison.rows, columns)
    return {
        **json_row(comparison.best, columns),
        "cost_model": comparison.model.value,
        "solve_s": sum(row.solve_s for row in comparison.rows),
        "strategy": None,
        "partition": None,
        "compared": rows,
    }


# --------------------------------------------------------------------------- PipeDream

PIPEDREAM_COLUMNS: "tuple[Column[StageReport], ...]" = (
    Column("devices", lambda stage: list(stage.devices), "devices", device_runs, left=True),
    Column("replicas", lambda stage: list(stage.replicas), "replicas",
           lambda counts: " x ".join(map(str, counts)), left=True),
    Column("num_operators", lambda stage: stage.num_operators, "operators", gives_way=2),
    Column("compute_s", lambda stage: stage.compute_s, "compute", format_seconds),
    Column("synchronisation_s", lambda stage: stage.synchronisation_s, "synchronisation",
           format_seconds),
    Column("transfer_s", lambda stage: stage.transfer_s, "transfer", format_seconds),
    Column("in_flight", lambda stage: stage.in_flight, "in flight", gives_way=3),
    Column("antichain", lambda stage: list(stage.antichain), "split before antichain", " ".join,
           left=True, gives_way=1),
)  # fmt: skip


def pipedream_table(report: "PipeDreamReport") -> Table:
    """The stages, with their times by PipeDream's cost model."""
    head = "transfer" if report.transfers_counted else "transfer (not counted)"
    columns = [
        replace(column, head=head) if column.key == "transfer_s" else column
        for column in PIPEDREAM_COLUMNS
    ]
    return _stage_table("PipeDream's stages, per minibatch", report.stages, columns)


def pipedream_lines(report: "PipeDreamReport") -> tuple[str, ...]:
    """PipeDream's times, speed-ups and unused machines."""
    unused = device_runs(report.unused_devices) or "none"
    return (
        f"PipeDream's cost model, per minibatch: pipeline {format_seconds(report.objective_s)},"
        f" data parallelism {format_seconds(report.data_parallel_s)},"
        f" one machine {format_seconds(report.single_s)}",
        f"speed-up of the pipeline over one machine {report.pipeline_speedup:.4g},"
        f" of data parallelism over one machine {report.data_parallel_speedup:.4g},"
        f" of the pipeline over data parallelism {report.advantage:.4g}",
        f"{count(report.num_states, 'state')}; devices not used: {unused}",
    )


def launched_line(plan: Plan) -> str:
    """The time of PipeDream's strategy as the planner launches it."""
    iteration_s, num_microbatches = plan.prediction.iteration_s, plan.strategy.num_microbatches
    if plan.strategy.schedule.is_asynchronous:
        minibatch_s = format_seconds(iteration_s / num_microbatches)
        return (
            f"as launched, with PipeDream's schedule: {minibatch_s} per minibatch in the steady"
            f" state, by the simulator; an iteration of {num_microbatches} minibatches takes"
            f" {format_seconds(iteration_s)}"
        )
    return (
        f"as launched, synchronously: an iteration of {num_microbatches} minibatches takes"
        f" {format_seconds(iteration_s)}, {format_seconds(iteration_s / num_microbatches)} per"
        " minibatch; PipeDream's figure is of asynchronous training"
    )


def plan_of(report: "PipeDreamReport", comparison: SolverComparison) -> Plan | None:
    """The plan that a report is of; None if it is no strategy, or does not fit."""
    return next((row.plan for row in comparison.rows if row.report is report), None)


def pipedream_json(report: "PipeDreamReport", plan: Plan | None) -> dict[str, Any]:
    """The object `pipedream` of `solve --json`.

    Args:
        plan: the same strategy as it is launched; None if there is none.
    """
    return {
        "launched_iteration_s": None if plan is None else plan.prediction.iteration_s,
        "objective_s": report.objective_s,
        "single_s": report.single_s,
        "data_parallel_s": report.data_parallel_s,
        "pipeline_speedup": report.pipeline_speedup,
        "data_parallel_speedup": report.data_parallel_speedup,
        "pipeline_over_data_parallel": report.advantage,
        "transfers_counted": report.transfers_counted,
        "num_states": report.num_states,
        "unused_devices": list(report.unused_devices),
        "stages": json_rows(
            report.stages,
            chosen(
                PIPEDREAM_COLUMNS,
                "devices num_operators replicas compute_s synchronisation_s transfer_s antichain"
                " in_flight",
            ),
        ),
    }


def under_other_model(plain: dict[str, Any], objective_s: float | None) -> dict[str, Any]:
    """The object of `solve --json` under another planner's cost model: `bottleneck_s` is the
    model's objective, and figures that it does not have are null.

    Args:
        plain: the object that `comparison_json` makes for one row.
        objective_s: the model's objective; None without a plan.
    """
    unknown = dict.fromkeys((*_UNKNOWN, "latency_s", "space_bound_s"))
    changed = {**unknown, "bottleneck_s": objective_s}
    rows = [{**row, **changed} for row in plain["compared"]]
    return {**plain, **changed, "compared": rows}
