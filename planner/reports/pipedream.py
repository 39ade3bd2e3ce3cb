"""The plan of PipeDream's optimizer by its own cost model, as a table, lines of text and JSON."""

from typing import TYPE_CHECKING, Any

from planner.artefacts.plan import Plan
from planner.planning.portfolio import SolverComparison
from planner.reports.tables import Table, count, device_runs
from planner.support.units import format_seconds

if TYPE_CHECKING:
    from planner.solvers.pipedream.costs import PipeDreamReport


def pipedream_table(report: "PipeDreamReport") -> Table:
    """The stages, with their times by PipeDream's cost model."""
    rows = tuple(
        (
            str(s),
            device_runs(stage.devices),
            " x ".join(map(str, stage.replicas)),
            str(stage.num_operators),
            format_seconds(stage.compute_s),
            format_seconds(stage.synchronisation_s),
            format_seconds(stage.transfer_s),
            str(stage.in_flight),
            " ".join(stage.antichain),
        )
        for s, stage in enumerate(report.stages)
    )
    transfer = ">transfer" if report.transfers_counted else ">transfer (not counted)"
    columns = (">stage", "devices", "replicas", ">operators", ">compute", ">synchronisation",
               transfer, ">in flight", "split before antichain")  # fmt: skip
    optional = ("split before antichain", ">operators", ">in flight")
    return Table("PipeDream's stages, per minibatch", columns, rows, optional=optional)


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
        "stages": [
            {
                "devices": list(stage.devices),
                "num_operators": stage.num_operators,
                "replicas": list(stage.replicas),
                "compute_s": stage.compute_s,
                "synchronisation_s": stage.synchronisation_s,
                "transfer_s": stage.transfer_s,
                "antichain": list(stage.antichain),
                "in_flight": stage.in_flight,
            }
            for stage in report.stages
        ],
    }


# Keys of figures that only the planner's own cost model has.
_FOREIGN_NULLS = ("iteration_s", "latency_s", "throughput", "bubble_fraction", "gap",
                  "lower_bound_s", "space_bound_s")  # fmt: skip


def under_foreign_model(plain: dict[str, Any], objective_s: float | None) -> dict[str, Any]:
    """The object of `solve --json` under a foreign cost model: `bottleneck_s` is the model's
    objective, and figures that it does not have are null.

    Args:
        plain: the object that `comparison_json` makes for one row.
        objective_s: the model's objective; None without a plan.
    """
    changed = {**dict.fromkeys(_FOREIGN_NULLS), "bottleneck_s": objective_s}
    rows = [{**row, **changed} for row in plain["compared"]]
    return {**plain, **changed, "compared": rows}
