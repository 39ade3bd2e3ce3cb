"""Plans, profiles and launches as rows of plain text and as the machine's JSON."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.plan import Comparison, Row
from planner.prediction import MemoryParts, Plan, Prediction, StagePrediction, said_times
from planner.problem import Status
from planner.profile import Source
from planner.profilers.summary import EdgeSizes, Summary
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.costs.pipedream import PipeDreamReport
    from planner.foreign import ForeignComparison
    from planner.launch.report import LaunchReport
    from planner.profile import Profile
    from planner.profilers.analytic import Fit
    from planner.profilers.compare import EngineComparison, EngineRow
    from planner.profilers.measured import Effort


PEAK_MEMORY = ">peak memory (without reserve / of the process)"
# Of a table of stages.
MOST_ROWS = 24


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people.

    Attributes:
        title: above it.
        columns: the heads; those of numbers start with ">" and are set to the right.
        rows: as many cells as columns, each.
        marked: index of a row to stand out, or None.
        optional: heads of columns that may be left out where there is no room, the first one
            first.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    optional: tuple[str, ...] = ()

    def without(self, head: str) -> "Table":
        """The same table without a column."""
        kept = [i for i, column in enumerate(self.columns) if column != head]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, what: str) -> str:
    """A number of things.

    >>> _count(1, "step"), _count(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# -------------------------------------------------------------------------------- solve


def comparison_table(comparison: Comparison) -> Table:
    """What all solvers came up with."""
    best = comparison.best
    sizes = {row.microbatch_size for row in comparison.rows}
    profiled = all(row.source is not Source.INTERPOLATED for row in comparison.rows)
    columns = ("solver", ">microbatch", ">stages", ">devices", ">iteration", ">samples/s",
               ">bubble", ">gap", ">peak memory", ">closed form", ">took", "")  # fmt: skip
    table = Table(
        "Strategies, judged by the simulator",
        columns,
        tuple(_row_cells(row, row is best) for row in comparison.rows),
        marked=None if best is None else comparison.rows.index(best),
        optional=(">closed form", ">took", ">bubble", ">gap", ">devices", ">peak memory"),
    )
    return table.without(">microbatch") if len(sizes) == 1 and profiled else table


def _row_cells(row: Row, best: bool) -> tuple[str, ...]:
    took = format_seconds(row.solve_s)
    if row.plan is None:
        short = "does not fit" if row.status is Status.INFEASIBLE else "no plan"
        return (row.solver, _size(row), *[""] * 8, took, short)
    prediction = row.plan.prediction
    off = prediction.closed_form_s / prediction.iteration_s - 1
    return (
        row.solver,
        _size(row),
        str(len(row.plan.strategy.stages)),
        str(len(prediction.devices)),
        format_seconds(prediction.iteration_s),
        _throughput(prediction.throughput),
        _percent(prediction.bubble_fraction),
        _percent(row.plan.certificate.gap),
        format_bytes(_peak_bytes(prediction)),
        f"{100 * off:+.1f} %",
        took,
        "best" if best else "",
    )


def _size(row: Row) -> str:
    """Of the microbatch; one that was not profiled is marked."""
    between = row.source is Source.INTERPOLATED
    return f"{row.microbatch_size}{' interpolated' if between else ''}"


def _throughput(samples_per_s: float) -> str:
    """Four digits, or all of a larger number.

    >>> _throughput(11780.4), _throughput(1.23456)
    ('11780', '1.235')
    """
    return f"{samples_per_s:.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"


def _peak_bytes(prediction: Prediction) -> int:
    return max(device.memory.total_bytes for device in prediction.devices)


def stage_table(plan: Plan) -> Table:
    """The stages of a plan; of many, the first and the last ones."""
    rows: list[tuple[str, ...]] = []
    peaks = {d.device: d.memory.total_bytes for d in plan.prediction.devices}
    for s, stage in enumerate(plan.strategy.stages):
        times = plan.prediction.stages[s]
        memory = max(peaks[device] for device in stage.devices)
        rows.append(
            (
                str(s),
                _devices(stage.devices),
                str(len(stage.operators)),
                format_seconds(times.forward_s),
                format_seconds(times.backward_s),
                str(stage.warmup),
                "yes" if stage.recompute else "",
                format_bytes(memory),
                f"{stage.operators[0]} .. {stage.operators[-1]}",
            )
        )
    columns = (">stage", "devices", ">operators", ">forward", ">backward", ">in flight",
               "recompute", ">peak memory", "from .. to")  # fmt: skip
    optional = ("from .. to", "recompute", ">in flight", ">operators")
    title = "Stages, per microbatch"
    if len(rows) > MOST_ROWS:
        ends = MOST_ROWS // 2
        title += f" (the first and the last {ends} of {len(rows)}; the strategy file has all)"
        rows = [*rows[:ends], ("..", *[""] * (len(columns) - 1)), *rows[-ends:]]
    return Table(title, columns, tuple(rows), optional=optional)


def _devices(devices: tuple[int, ...]) -> str:
    """Indices with runs shortened.

    >>> _devices((0, 1, 2, 5))
    '0-2 5'
    """
    runs: list[list[int]] = []
    for d in sorted(devices):
        if runs and d == runs[-1][-1] + 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return " ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def times_line(plan: Plan) -> str:
    """Where the times come from that a plan is made of."""
    return f"operator times: {said_times(plan)}"


def certificate_lines(plan: Plan) -> tuple[str, ...]:
    """How far from the best a plan is, and in which space it was searched."""
    certificate = plan.certificate
    return (
        f"lower bound {format_seconds(certificate.lower_bound_s)} for the {certificate.objective}"
        f" over all strategies: this plan is at most {_percent(certificate.gap)} above the best",
        f"{plan.solver}: {plan.status} over {certificate.space}",
    )


def row_json(row: Row, lower_bound_s: float, num_devices: int) -> dict[str, Any]:
    """One solver's fields of `solve --json`.

    Args:
        num_devices: of the topology; `peak_bytes` has one entry for each.
    """
    plan = row.plan
    found: dict[str, Any] = {
        "solver": row.solver,
        "status": row.status.value,
        "reason": row.reason,
        "solve_s": row.solve_s,
        "microbatch_size": row.microbatch_size,
        "source": row.source.value,
        "engine": None if plan is None else plan.engine,
        "profiled_on": None if plan is None else plan.profiled_on,
        "lower_bound_s": lower_bound_s,
        "iteration_s": None, "bottleneck_s": None, "throughput": None, "bubble_fraction": None,
        "gap": None, "space_bound_s": None, "peak_bytes": None, "num_stages": None,
        "stages": None, "reproducible": None,
    }  # fmt: skip
    if plan is None:
        return found
    prediction = plan.prediction
    found["lower_bound_s"] = plan.certificate.lower_bound_s
    peaks = {d.device: d.memory.total_bytes for d in prediction.devices}
    return found | {
        "iteration_s": prediction.iteration_s,
        "bottleneck_s": prediction.bottleneck_s,
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
            }
            for stage, times in zip(plan.strategy.stages, prediction.stages, strict=True)
        ],
        "reproducible": plan.reproducible,
    }


def comparison_json(
    comparison: Comparison, num_devices: int, strategy: str | None, partition: str | None
) -> dict[str, Any]:
    """The object that `solve --json` prints.

    Args:
        strategy: path of the strategy file, None if none was written.
        partition: path of the annotated model, None likewise.
    """
    rows = [row_json(row, comparison.lower_bound_s, num_devices) for row in comparison.rows]
    best = comparison.best
    shown = rows[comparison.rows.index(best)] if best else _nothing(comparison, num_devices)
    return {
        **shown,
        "solve_s": sum(row.solve_s for row in comparison.rows),
        "strategy": strategy,
        "partition": partition,
        "compared": rows,
    }


def _nothing(comparison: Comparison, num_devices: int) -> dict[str, Any]:
    last = comparison.rows[-1]
    row = replace(
        last,
        solver="portfolio",
        status=comparison.status,
        plan=None,
        reason=shortage(comparison),
        solve_s=0.0,
    )
    return row_json(row, comparison.lower_bound_s, num_devices)


def shortage(comparison: Comparison) -> str:
    """Why there is no plan: the reason of the solver that searches most, else of the last."""
    reasons = {row.solver: row.reason for row in comparison.rows if row.reason}
    return reasons.get("antichain") or [Status.UNKNOWN.value, *reasons.values()][-1]


def reason_lines(comparison: Comparison) -> tuple[str, ...]:
    """Why some solvers have no plan; each reason once, after the solvers that gave it."""
    solvers: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        if row.plan is None:
            solvers.setdefault(row.reason or row.status.value, {})[row.solver] = None
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in solvers.items())


def no_plan_lines(comparison: Comparison) -> tuple[str, ...]:
    """Why there is no plan at all, and what the user can change."""
    reasons = reason_lines(comparison)
    if len(reasons) == 1:
        reasons = (shortage(comparison),)
    return (
        "no strategy fits:",
        *(f"  {reason}" for reason in reasons),
        "what can be changed: a smaller --reserve, more --device-memory, another --optimizer, a"
        " smaller --batch when profiling, more devices",
    )


# -------------------------------------------------------------------------------- profile


def profile_table(summary: Summary) -> Table:
    """Time per operator type."""
    rows = tuple(
        (
            row.type,
            str(row.count),
            format_seconds(row.time_s),
            _percent(row.forward_share),
            _percent(row.backward_share),
            "" if row.backward_per_forward is None else f"{row.backward_per_forward:.2f}",
        )
        for row in summary.rows
    )
    columns = ("operator", ">count", ">time", ">of forward", ">of backward", ">backward/forward")
    optional = (">backward/forward", ">count")
    return Table("Time per operator type, one microbatch", columns, rows, optional=optional)


def profile_lines(profile: "Profile", summary: Summary) -> tuple[str, ...]:
    """What a profile holds and how far it can be trusted."""
    parameters = profile.graph.parameters
    trained = [p for p in parameters if p.trainable]
    frozen = [p.name for p in parameters if not p.trainable]
    lines = [
        f"{_count(len(profile.operators), 'operator')},"
        f" {format_bytes(sum(p.bytes for p in trained))} in"
        f" {_count(len(trained), 'trainable parameter')}, microbatch of {profile.microbatch_size},"
        f" {profile.dtype}, {profile.source.value} on {profile.device_type} by"
        f" {profile.engine or 'an engine that is not said'}",
        f"trainable: {_patterns([p.name for p in trained])}",
        f"not trainable: {_patterns(frozen) or 'none'}",
    ]
    if summary.whole_s is not None and summary.sum_per_whole and summary.drift is not None:
        lines.append(
            f"operators one by one take {format_seconds(summary.sum_s)}, the whole step"
            f" {format_seconds(summary.whole_s)}: ratio {summary.sum_per_whole:.3f};"
            f" drift from before to after {100 * summary.drift:+.1f} %;"
            f" {_count(profile.repetitions, 'repetition')} per operator, which differ by"
            f" {_percent(profile.spread)}"
        )
    return tuple(lines)


def _patterns(names: Sequence[str]) -> str:
    """Names, those that differ only in numbers together.

    >>> _patterns(["h.0.weight", "h.1.weight", "wte"])
    'h.*.weight (2), wte'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return ", ".join(
        same[0] if len(same) == 1 else f"{pattern} ({len(same)})"
        for pattern, same in groups.items()
    )


def edges_line(sizes: "EdgeSizes | None") -> str:
    """How much a cut would have to send, depending on where it is."""
    if sizes is None:
        return "edges: none"
    tenth, half, most = map(format_bytes, sizes.quantiles)
    return (
        f"edges: {_count(sizes.count, 'tensor')} between operators,"
        f" {format_bytes(sizes.total_bytes)} together; a tenth are up to {tenth}, half up to"
        f" {half}, nine tenths up to {most}, the largest is {format_bytes(sizes.largest_bytes)}"
        f" ({sizes.largest})"
    )


def effort_line(effort: "Effort") -> str:
    """What measuring took, and how much of it the cache saved."""
    shared = (
        f"{_count(effort.num_classes, 'different operator')}: {effort.num_timed} timed in"
        f" {format_seconds(effort.operators_s)}, {effort.num_cached} known from earlier profiles;"
        f" the whole model: {format_seconds(effort.whole_s)}"
    )
    if effort.cache_problem is not None:
        return f"{shared}; not kept for later: {effort.cache_problem}"
    return shared if effort.kept or not effort.num_timed else f"{shared}; not kept for later"


def compare_table(comparison: "EngineComparison") -> Table:
    """Forward time per operator type, by each engine."""
    columns = ("operator", ">count", ">torch", ">ONNX Runtime", ">ONNX Runtime/torch", ">roofline")
    rows = (*comparison.rows, comparison.total)
    table = Table(
        "Forward time per operator type by each engine, one microbatch",
        columns,
        tuple(map(_compare_cells, rows)),
        marked=len(rows) - 1,
        optional=(">count",),
    )
    return table if comparison.total.analytic_s is not None else table.without(">roofline")


def _compare_cells(row: "EngineRow") -> tuple[str, ...]:
    return (
        row.type,
        str(row.count),
        format_seconds(row.torch_s),
        format_seconds(row.onnxruntime_s),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.analytic_s is None else format_seconds(row.analytic_s),
    )


def compare_lines(comparison: "EngineComparison") -> tuple[str, ...]:
    """How far engines agree, and where they do not."""
    ranks = [
        f"{text} {value:.3f}"
        for text, value in (
            (f"with {comparison.engine}", comparison.rank_correlation),
            ("with the roofline", comparison.analytic_rank_correlation),
        )
        if value is not None
    ]
    lines = [
        f"rank correlation of torch over {_count(comparison.num_ranked, 'operator')} above 0.1 % of"
        f" the forward pass: {', '.join(ranks)}"
    ] * bool(ranks)
    lines += [
        f"{one.name} ({one.type}): {format_seconds(one.torch_s)} by torch,"
        f" {format_seconds(one.onnxruntime_s)} by ONNX Runtime"
        for one in comparison.worst
    ]
    return tuple(lines)


def fit_line(fit: "Fit") -> str:
    """How well computed times explain measured ones."""
    return (
        f"the roofline was fitted to this model: {fit.peak_flops / 1e9:.3g} GFLOP/s and"
        f" {fit.memory_bandwidth_bytes_per_s / 1e9:.3g} GB/s; of the whole step its rank"
        f" correlation is {fit.rank_correlation:.3f}, half the operators are off by up to"
        f" {math.expm1(fit.median_error):.0%}, nine tenths by up to {math.expm1(fit.p90_error):.0%}"
    )


def compare_json(comparison: "EngineComparison", fit: "Fit") -> dict[str, Any]:
    """The object `compared` of `profile --json`."""
    return {
        "engine": comparison.engine,
        "rank_correlation": comparison.rank_correlation,
        "analytic_rank_correlation": comparison.analytic_rank_correlation,
        "fit": asdict(fit),
        "types": [
            {
                "type": row.type,
                "count": row.count,
                "torch_s": row.torch_s,
                "onnxruntime_s": row.onnxruntime_s,
                "analytic_s": row.analytic_s,
            }
            for row in comparison.rows
        ],
    }


def profile_json(profile: "Profile", summary: Summary, path: str) -> dict[str, Any]:
    """The object that `profile --json` prints."""
    parameters = profile.graph.parameters
    return {
        "profile": path,
        "model_hash": profile.model_hash,
        "num_operators": len(profile.operators),
        "microbatch_size": profile.microbatch_size,
        "dimensions": profile.dimensions,
        "device_type": profile.device_type,
        "forward_s": sum(o.forward_s for o in profile.operators),
        "backward_s": sum(o.backward_s for o in profile.operators),
        "whole_s": summary.whole_s,
        "drift": summary.drift,
        "spread": profile.spread,
        "source": profile.source.value,
        "engine": profile.engine,
        "warnings": list(profile.warnings),
        "parameter_bytes": sum(p.bytes for p in parameters),
        "trainable": [p.name for p in parameters if p.trainable],
    }


# -------------------------------------------------------------------------------- launch


def launch_tables(report: "LaunchReport") -> tuple[Table, ...]:
    """Predicted beside measured: the iteration, each stage, each device."""
    predicted, measured = report.predicted_iteration_s, report.measured_iteration_s
    stages = [
        (f"stage {s} {what}", *_versus(before, after, report.comparable))
        for s, stage in enumerate(report.stages)
        for what, before, after in _directions(stage.predicted, stage.measured)
    ]
    iteration = ("iteration", *_versus(predicted, measured, report.comparable))
    devices = [
        (
            f"rank {device.rank} on {device.predicted.name}",
            *(
                f"{format_seconds(before)} / {format_seconds(after)}"
                for before, after in (
                    (device.predicted.compute_s, device.compute_s),
                    (device.predicted.communication_s, device.communication_s),
                    (device.predicted.idle_s, device.idle_s),
                )
            ),
            f"{format_bytes(_without_reserve(device.predicted.memory))} /"
            f" {format_bytes(device.peak_bytes)}",
        )
        for device in report.devices
    ]
    return (
        Table(
            f"Predicted and measured; operator times: {report.times}",
            ("", ">predicted", ">measured", ">predicted/measured"),
            (iteration, *stages),
        ),
        Table(
            "Per iteration, predicted / measured",
            ("", ">compute", ">communication", ">idle", PEAK_MEMORY),
            tuple(devices),
            optional=(">idle", ">communication"),
        ),
    )


def _without_reserve(memory: MemoryParts) -> int:
    """What was planned with; measured peaks know of no reserve."""
    return memory.total_bytes - memory.reserve_bytes


def _directions(
    predicted: StagePrediction, measured: StagePrediction
) -> tuple[tuple[str, float, float], ...]:
    return (
        ("forward", predicted.forward_s, measured.forward_s),
        ("backward", predicted.backward_s, measured.backward_s),
    )


def _versus(predicted: float, measured: float, comparable: bool) -> tuple[str, str, str]:
    ratio = f"{predicted / measured:.3f}" if comparable and measured else "not comparable"
    return format_seconds(predicted), format_seconds(measured), ratio


def loss_line(report: "LaunchReport") -> str:
    """First and last loss."""
    return f"{_count(report.steps, 'step')}, loss {report.loss[0]:.4f} -> {report.loss[-1]:.4f}"


def launch_json(report: "LaunchReport") -> dict[str, Any]:
    """The object that `launch --json` prints."""
    return {
        "steps": report.steps,
        "loss": [loss if math.isfinite(loss) else None for loss in report.loss],
        "measured_iteration_s": report.measured_iteration_s,
        "predicted_iteration_s": report.predicted_iteration_s,
        "peak_bytes": list(report.peak_bytes),
        "comparable": report.comparable,
        "operator_times": report.times,
        "notes": list(report.notes),
        "stages": [
            {
                "devices": list(stage.devices),
                "predicted_forward_s": stage.predicted.forward_s,
                "predicted_backward_s": stage.predicted.backward_s,
                "measured_forward_s": stage.measured.forward_s,
                "measured_backward_s": stage.measured.backward_s,
            }
            for stage in report.stages
        ],
    }


# -------------------------------------------------------------------------------- PipeDream


def pipedream_table(report: "PipeDreamReport") -> Table:
    """The stages as PipeDream's cost model sees them."""
    rows = tuple(
        (
            str(s),
            _devices(stage.devices),
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
    unused = _devices(report.unused_devices) or "none"
    return (
        f"PipeDream's cost model, per minibatch: pipeline {format_seconds(report.objective_s)},"
        f" data parallelism {format_seconds(report.data_parallel_s)},"
        f" one machine {format_seconds(report.single_s)}",
        f"speed-up of the pipeline over one machine {report.pipeline_speedup:.4g},"
        f" of data parallelism over one machine {report.data_parallel_speedup:.4g},"
        f" of the pipeline over data parallelism {report.advantage:.4g}",
        f"{_count(report.num_states, 'state')}; devices not used: {unused}",
    )


def pipedream_json(report: "PipeDreamReport") -> dict[str, Any]:
    """The object `pipedream` of `solve --json`."""
    return {
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


# What only the planner's own cost model knows.
_FOREIGN_NULLS = ("iteration_s", "throughput", "bubble_fraction", "gap", "lower_bound_s",
                  "space_bound_s")  # fmt: skip


def under_foreign_model(plain: dict[str, Any], objective_s: float | None) -> dict[str, Any]:
    """The object of `solve --json` under a foreign cost model: `bottleneck_s` is its objective,
    and what it does not know is null.

    Args:
        plain: as `comparison_json` makes it, of one row.
    """
    changed = {**dict.fromkeys(_FOREIGN_NULLS), "bottleneck_s": objective_s}
    rows = [{**row, **changed} for row in plain["compared"]]
    return {**plain, **changed, "compared": rows}


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
            _devices(stage.devices),
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
    """Why solvers have no plan, and what the user should know."""
    return (
        *(f"{row.solver}: {row.reason}" for row in comparison.rows if row.reason),
        *(f"note: {note}" for note in comparison.notes),
    )
