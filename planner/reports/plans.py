"""The solvers' plans, as rows of plain text and as the machine's JSON."""

import re
from dataclasses import replace
from typing import Any

from planner.artefacts.modules import from_to
from planner.artefacts.plan import Plan, Prediction, said_times
from planner.artefacts.problem import Objective, Status
from planner.artefacts.profile import Source
from planner.artefacts.strategy import Stage
from planner.planning.judge import predicted_s
from planner.planning.portfolio import SolverComparison, SolverRow
from planner.reports.tables import Table, device_runs, percent
from planner.schedules.versions import alive
from planner.support.units import format_bytes, format_seconds

# Rows of a table of stages.
MAX_ROWS = 24
# A number in the path of a module.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
MORE_MEMORY = (
    "possible changes: a smaller --reserve, more --device-memory, another --optimizer, a smaller"
    " --batch when profiling, more devices"
)
# The objectives that have a column of their own, beside the iteration.
_OBJECTIVES = {Objective.BOTTLENECK: ">bottleneck", Objective.LATENCY: ">latency"}


def comparison_table(comparison: SolverComparison) -> Table:
    """A row for every solver."""
    best = comparison.best
    sizes = {row.microbatch_size for row in comparison.rows}
    profiled = all(row.source is not Source.INTERPOLATED for row in comparison.rows)
    columns = ("solver", ">microbatch", ">stages", ">devices", *_OBJECTIVES.values(), ">iteration",
               ">samples/s", ">bubble", ">gap", ">peak memory", ">closed form", ">took",
               "")  # fmt: skip
    objectives = {row.plan.certificate.objective for row in comparison.rows if row.plan}
    table = Table(
        "Strategies, judged by the simulator",
        columns,
        tuple(_row_cells(row, row is best) for row in comparison.rows),
        marked=None if best is None else comparison.rows.index(best),
        optional=(">closed form", ">took", ">bubble", ">gap", ">devices", ">peak memory"),
    )
    # The gap is the objective's, so the objective has a column.
    for objective, column in _OBJECTIVES.items():
        table = table if objective in objectives else table.without(column)
    return table.without(">microbatch") if len(sizes) == 1 and profiled else table


def _row_cells(row: SolverRow, best: bool) -> tuple[str, ...]:
    took = "" if row.solve_s is None else format_seconds(row.solve_s)
    if row.plan is None:
        short = "does not fit" if row.status is Status.INFEASIBLE else "no plan"
        return (row.solver, _size(row), *[""] * (8 + len(_OBJECTIVES)), took, short)
    prediction = row.plan.prediction
    off = prediction.closed_form_s / prediction.iteration_s - 1
    return (
        row.solver,
        _size(row),
        str(len(row.plan.strategy.stages)),
        str(len(prediction.devices)),
        *(format_seconds(predicted_s(prediction, objective)) for objective in _OBJECTIVES),
        format_seconds(prediction.iteration_s),
        samples_per_s(prediction.throughput),
        percent(prediction.bubble_fraction),
        percent(row.plan.certificate.gap),
        format_bytes(_peak_bytes(prediction)),
        f"{100 * off:+.1f} %",
        took,
        "; ".join(["best"] * best + ["does not fit"] * (row.shortage is not None)),
    )


def _size(row: SolverRow) -> str:
    """Of the microbatch; one that was not profiled is marked."""
    between = row.source is Source.INTERPOLATED
    return f"{row.microbatch_size}{' interpolated' if between else ''}"


def samples_per_s(rate: float) -> str:
    """A rate in four digits, or all of a larger number.

    >>> samples_per_s(11780.4), samples_per_s(1.23456)
    ('11780', '1.235')
    """
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}"


def _peak_bytes(prediction: Prediction) -> int:
    return max(device.memory.total_bytes for device in prediction.devices)


def stage_table(plan: Plan) -> Table:
    """The stages of a plan; of many, the first and the last ones. Versions are those of the
    parameters that a replica keeps under an asynchronous schedule.
    """
    rows: list[tuple[str, ...]] = []
    peaks = {d.device: d.memory.total_bytes for d in plan.prediction.devices}
    asynchronous = plan.strategy.schedule.is_asynchronous
    for s, stage in enumerate(plan.strategy.stages):
        times = plan.prediction.stages[s]
        memory = max(peaks[device] for device in stage.devices)
        rows.append(
            (
                str(s),
                device_runs(stage.devices),
                mesh_text(stage),
                str(len(stage.operators)),
                format_seconds(times.forward_s),
                format_seconds(times.backward_s),
                str(stage.warmup),
                str(alive(plan.strategy, s)) if asynchronous else "",
                "yes" if stage.recompute else "",
                format_bytes(memory),
                _span(plan, s),
            )
        )
    columns = (">stage", "devices", "mesh", ">operators", ">forward", ">backward", ">in flight",
               ">versions", "recompute", ">peak memory", "from .. to")  # fmt: skip
    optional = ("from .. to", "recompute", ">in flight", ">operators")
    title = "Stages, per microbatch"
    if len(rows) > MAX_ROWS:
        ends = MAX_ROWS // 2
        title += f" (the first and the last {ends} of {len(rows)}; the strategy file has all)"
        rows = [*rows[:ends], ("..", *[""] * (len(columns) - 1)), *rows[-ends:]]
    table = Table(title, columns, tuple(rows), optional=optional)
    table = table if any(row[2] for row in rows) else table.without("mesh")
    return table if asynchronous else table.without(">versions")


def mesh_text(stage: Stage) -> str:
    """The mesh of a split stage, with its replicas, such as "2 x 4, 3 replicas"; "" of others."""
    if stage.sharding is None:
        return ""
    mesh = " x ".join(map(str, stage.sharding.mesh))
    return mesh if stage.num_replicas == 1 else f"{mesh}, {stage.num_replicas} replicas"


def parameter_table(plan: Plan) -> Table | None:
    """How the parameters of split stages lie, those of modules that differ in their numbers only
    together; None where none is cut.
    """
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for s, stage in enumerate(plan.strategy.stages):
        split = stage.sharding
        for name in sorted({*split.parameters, *split.gradients, *split.states} if split else ()):
            assert split is not None
            whole = ("R",) * len(split.mesh)
            lies = split.parameters.get(name, whole)
            gradient = split.gradients.get(name, lies)
            state = split.states.get(name, gradient)
            key = (_NUMBER.sub("*", name), " ".join(lies), " ".join(gradient), " ".join(state))
            found.setdefault(key, []).append(s)
    rows = [
        (name, str(len(stages)), device_runs(tuple(set(stages))), lies, gradient, state)
        for (name, lies, gradient, state), stages in found.items()
    ]
    if not rows:
        return None
    title = "Parameters that are cut, axis by axis"
    if len(rows) > MAX_ROWS:
        title += f" (the first {MAX_ROWS} of {len(rows)}; the strategy file has all)"
        rows = rows[:MAX_ROWS]
    columns = ("parameter", ">number", "stages", "lies", "gradient", "optimizer state")
    table = Table(title, columns, tuple(rows))
    if all(row[3] == row[4] == row[5] for row in rows):
        table = table.without("gradient").without("optimizer state")
    return table


def _span(plan: Plan, stage: int) -> str:
    """A stage's first and last module, or operator where the model names no modules."""
    if plan.modules:
        return from_to(plan.modules[stage])
    operators = plan.strategy.stages[stage].operators
    return f"{operators[0]} .. {operators[-1]}"


def times_line(plan: Plan) -> str:
    """Where the times come from that a plan is made of."""
    return f"operator times: {said_times(plan)}"


def certificate_lines(plan: Plan) -> tuple[str, ...]:
    """How far from the best a plan is, and in which space it was searched."""
    certificate = plan.certificate
    return (
        f"lower bound {format_seconds(certificate.lower_bound_s)} for the {certificate.objective}"
        f" over all strategies by the profile's times and rules: this plan is at most"
        f" {percent(certificate.gap)} above the best",
        f"{plan.solver}: {plan.status} over {certificate.space}",
    )


def row_json(row: SolverRow, lower_bound_s: float, num_devices: int) -> dict[str, Any]:
    """One solver's fields of `solve --json`.

    Args:
        num_devices: of the topology; `peak_bytes` has one entry for each.
    """
    plan = row.plan
    fields: dict[str, Any] = {
        "solver": row.solver,
        "status": row.status.value,
        "reason": row.reason,
        "shortage": row.shortage,
        "solve_s": row.solve_s,
        "microbatch_size": row.microbatch_size,
        "source": row.source.value,
        "engine": None if plan is None else plan.engine,
        "profiled_on": None if plan is None else plan.profiled_on,
        "lower_bound_s": lower_bound_s,
        "iteration_s": None, "bottleneck_s": None, "latency_s": None, "throughput": None,
        "bubble_fraction": None, "gap": None, "space_bound_s": None, "peak_bytes": None,
        "num_stages": None, "stages": None, "reproducible": None,
    }  # fmt: skip
    if plan is None:
        return fields
    fields["lower_bound_s"] = plan.certificate.lower_bound_s
    return fields | plan_json(plan, num_devices)


def plan_json(plan: Plan, num_devices: int) -> dict[str, Any]:
    """The judge's figures of a plan, in the fields of `solve --json`.

    Args:
        num_devices: of the topology; `peak_bytes` has one entry for each.
    """
    prediction = plan.prediction
    peaks = {d.device: d.memory.total_bytes for d in prediction.devices}
    return {
        "iteration_s": prediction.iteration_s,
        "bottleneck_s": prediction.bottleneck_s,
        "latency_s": prediction.latency_s,
        "throughput": prediction.throughput,
        "bubble_fraction": prediction.bubble_fraction,
        "gap": plan.certificate.gap,
        "space_bound_s": plan.certificate.space_bound_s,
        "peak_bytes": [peaks.get(d, 0) for d in range(num_devices)],
        "num_stages": len(plan.strategy.stages),
        "stages": [
            {
                "devices": list(stage.devices),
                "num_operators": len(stage.operators),
                "forward_s": times.forward_s,
                "backward_s": times.backward_s,
                **({"modules": list(plan.modules[s])} if plan.modules else {}),
            }
            for s, (stage, times) in enumerate(
                zip(plan.strategy.stages, prediction.stages, strict=True)
            )
        ],
        "reproducible": plan.reproducible,
    }


def comparison_json(
    comparison: SolverComparison, num_devices: int, strategy: str | None, partition: str | None
) -> dict[str, Any]:
    """The object that `solve --json` prints.

    Args:
        strategy: path of the strategy file, None if none was written.
        partition: path of the annotated model, None if none was written.
    """
    rows = [row_json(row, comparison.lower_bound_s, num_devices) for row in comparison.rows]
    best = comparison.best
    shown = rows[comparison.rows.index(best)] if best else _nothing(comparison, num_devices)
    return {
        **shown,
        "solve_s": sum(row.solve_s or 0.0 for row in comparison.rows),
        "strategy": strategy,
        "partition": partition,
        "compared": rows,
    }


def _nothing(comparison: SolverComparison, num_devices: int) -> dict[str, Any]:
    last = comparison.rows[-1]
    result = replace(last.answer.result, status=comparison.status, reason=shortage(comparison))
    answer = replace(last.answer, solver="portfolio", result=result, solve_s=0.0)
    return row_json(replace(last, answer=answer), comparison.lower_bound_s, num_devices)


def shortage(comparison: SolverComparison) -> str:
    """Why there is no plan: the reason of the solver that searches most, else of the last."""
    reasons = {row.solver: row.reason for row in comparison.rows if row.reason}
    return reasons.get("antichain") or [Status.UNKNOWN.value, *reasons.values()][-1]


def reason_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """Why some solvers have no plan; each reason once, after the solvers that gave it."""
    solvers: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        if row.plan is None:
            solvers.setdefault(row.reason or row.status.value, {})[row.solver] = None
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in solvers.items())


def unfit_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """Plans that do not fit by the planner's count, and why."""
    return tuple(
        f"{row.solver}'s plan does not fit by the planner's count: {row.shortage}"
        for row in comparison.rows
        if row.plan is not None and row.shortage is not None
    )


def no_plan_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """Why there is no plan at all; and, where a solver lacked memory, possible changes. Other
    reasons say themselves what to do.
    """
    reasons = reason_lines(comparison)
    if len(reasons) == 1:
        reasons = (shortage(comparison),)
    short = any(row.short_of_memory for row in comparison.rows)
    return (
        "no strategy fits:" if short else "no plan:",
        *(f"  {reason}" for reason in reasons),
        *([MORE_MEMORY] if short else []),
    )
