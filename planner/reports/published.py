"""Plans under other planners' cost models."""

from typing import TYPE_CHECKING, Any

from planner.reports.tables import Table, device_runs
from planner.support.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.planning.other_cost_models import ForeignComparison, ForeignRow


def foreign_table(comparison: "ForeignComparison") -> Table:
    """What the solvers under a foreign cost model came up with."""
    rows = tuple(
        (
            row.solver,
            row.status.value,
            str(len(row.stages) or ""),
            str(sum(len(stage.devices) for stage in row.stages) or ""),
            "" if row.bottleneck_s is None else format_seconds(row.bottleneck_s),
            format_seconds(row.solve_s),
        )
        for row in comparison.rows
    )
    marked = comparison.rows.index(comparison.best) if comparison.best.stages else None
    columns = ("solver", "status", ">stages", ">devices", ">bottleneck", ">took")
    return Table(f"Plans, by {comparison.model.value}'s cost model", columns, rows, marked)


def foreign_stage_table(comparison: "ForeignComparison") -> Table:
    """The stages of the best plan."""
    rows = tuple(
        (
            str(s),
            device_runs(stage.devices),
            str(len(stage.operators)),
            format_seconds(stage.forward_s + stage.backward_s),
            format_seconds(stage.communication_s),
            format_seconds(stage.load_s),
            format_bytes(stage.memory_bytes),
            stage.how,
            f"{stage.operators[0]} .. {stage.operators[-1]}",
        )
        for s, stage in enumerate(comparison.best.stages)
    )
    columns = (">stage", "devices", ">operators", ">computation", ">communication", ">load",
               ">memory", "how", "from .. to")  # fmt: skip
    return Table("Stages", columns, rows, optional=("from .. to", ">computation", ">operators"))


def foreign_lines(comparison: "ForeignComparison") -> tuple[str, ...]:
    """Why solvers have no plan, and notes for the user."""
    return (
        *(f"{row.solver}: {row.reason}" for row in comparison.rows if row.reason),
        *(f"note: {note}" for note in comparison.notes),
    )


def foreign_json(comparison: "ForeignComparison") -> dict[str, Any]:
    """The object that `solve --json` prints under a foreign cost model."""
    rows = [_row_json(row, comparison.num_devices) for row in comparison.rows]
    shown = rows[comparison.rows.index(comparison.best)]
    return {
        **shown,
        "cost_model": comparison.model.value,
        "solve_s": sum(row.solve_s for row in comparison.rows),
        "strategy": None,
        "partition": None,
        "compared": rows,
    }


def _row_json(row: "ForeignRow", num_devices: int) -> dict[str, Any]:
    peaks = {d: stage.memory_bytes for stage in row.stages for d in stage.devices}
    planned = bool(row.stages)
    return {
        "solver": row.solver,
        "status": row.status.value,
        "reason": row.reason,
        "solve_s": row.solve_s,
        "bottleneck_s": row.bottleneck_s,
        **dict.fromkeys(
            (
                "iteration_s",
                "throughput",
                "bubble_fraction",
                "lower_bound_s",
                "gap",
            )
        ),
        "space_bound_s": row.bound_s,
        "peak_bytes": [round(peaks.get(d, 0)) for d in range(num_devices)] if planned else None,
        "num_stages": len(row.stages) if planned else None,
        "stages": [
            {
                "devices": list(stage.devices),
                "num_operators": len(stage.operators),
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "communication_s": stage.communication_s,
                "load_s": stage.load_s,
                "how": stage.how,
            }
            for stage in row.stages
        ]
        if planned
        else None,
        "reproducible": row.reproducible if planned else None,
    }
