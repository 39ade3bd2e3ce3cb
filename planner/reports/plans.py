"""The plans of solvers, as tables, bars, lines of text, CSV and JSON."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.artefacts.modules import from_to
from planner.artefacts.options import Objective, Offload, Optimizer, Recompute
from planner.artefacts.plan import Plan, said_times
from planner.artefacts.problem import Problem, Status
from planner.artefacts.profile import Source
from planner.artefacts.strategy import Stage, shared_level
from planner.planning.judge import calibration_note, comparable_s, objective_s
from planner.planning.portfolio import SolverComparison, SolverRow
from planner.planning.problems import MICROBATCHES_PER_DEVICE
from planner.reports.tables import (
    MAX_ROWS,
    Column,
    Table,
    chosen,
    count,
    csv_text,
    device_runs,
    first_rows,
    json_row,
    json_rows,
    percent,
    signed,
    table,
)
from planner.schedules.versions import alive
from planner.support.outputs import FileKind, head_of
from planner.support.units import format_bytes, format_seconds

# Nearer than this, two plans are as fast as each other.
NOTICEABLE = 5e-4
# A number in the path of a module.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def samples_per_s(rate: float) -> str:
    """A rate in four digits, or all of a larger number.

    >>> samples_per_s(11780.4), samples_per_s(1.23456)
    ('11780', '1.235')
    """
    return f"{rate:.0f}" if rate >= 1000 else f"{rate:.4g}"


def _peak_bytes(plan: Plan) -> int:
    """The memory of the fullest device."""
    return max(device.memory.total_bytes for device in plan.prediction.devices)


def _off(plan: Plan) -> float:
    """The error of what searches rank by, which may ignore what only the simulator sees."""
    return plan.prediction.closed_form_s / plan.prediction.iteration_s - 1


def space_gap(plan: Plan) -> float | None:
    """How far a plan is above its solver's bound for its own space, at most, relatively; None where
    it has none. Below 0 where the solver's prices are above the simulator's.
    """
    bound_s = plan.certificate.space_bound_s
    return objective_s(plan) / bound_s - 1 if bound_s else None


PLAN_COLUMNS: tuple[Column[Plan], ...] = (
    Column("iteration_s", lambda plan: plan.prediction.iteration_s, "iteration", format_seconds),
    Column("bottleneck_s", lambda plan: plan.prediction.bottleneck_s, "bottleneck", format_seconds),
    Column("latency_s", lambda plan: plan.prediction.latency_s, "latency", format_seconds),
    Column("throughput", lambda plan: plan.prediction.throughput, "samples/s", samples_per_s),
    Column("bubble_fraction", lambda plan: plan.prediction.bubble_fraction, "bubble", percent,
           gives_way=3),
    Column("lower_bound_s", lambda plan: plan.certificate.lower_bound_s),
    Column("peak_bound_s", lambda plan: plan.certificate.peak_bound_s),
    Column("gap", lambda plan: plan.certificate.gap, "gap", percent, gives_way=4),
    Column("space_bound_s", lambda plan: plan.certificate.space_bound_s),
    Column("space_gap", space_gap),
    Column("peak_bytes", _peak_bytes, "peak memory", format_bytes, gives_way=6),
    Column("closed_form", _off, "closed form", signed, gives_way=1),
    Column("num_stages", lambda plan: len(plan.strategy.stages), "stages"),
    Column("num_devices", lambda plan: len(plan.prediction.devices), "devices", gives_way=5),
    Column("stages", lambda plan: _stages_json(plan)),
    Column("reproducible", lambda plan: plan.reproducible),
    Column("engine", lambda plan: plan.engine),
    Column("profiled_on", lambda plan: plan.profiled_on),
)  # fmt: skip
"""The judge's figures of a plan."""
_PLAN_JSON = (
    "iteration_s bottleneck_s latency_s throughput bubble_fraction gap space_bound_s space_gap"
    " peak_bytes num_stages stages reproducible"
)
_ROW_JSON = (
    "solver status reason shortage solve_s microbatch_size source engine profiled_on lower_bound_s"
    " peak_bound_s " + _PLAN_JSON
)
CSV_KEYS = (
    "solver status iteration_s bottleneck_s latency_s throughput bubble_fraction peak_bytes"
    " lower_bound_s gap space_bound_s num_stages num_devices solve_s reason"
)
MEASURED_KEYS = "measured_throughput least_throughput most_throughput measured_steps same_as"
"""The figures that `compare --run` adds, before the reason why a plan was not measured."""
_CSV_HEADS = tuple(
    keys.replace(" ", ",") + "\n" for keys in (CSV_KEYS, f"{CSV_KEYS} {MEASURED_KEYS} not_measured")
)
TABLE_FILE = FileKind("a table", lambda path: head_of(path).startswith(_CSV_HEADS))


_OF_OTHER_SIZES = (Source.INTERPOLATED, Source.SCALED)
"""Sources of times that are those of other sizes of the microbatch."""


def solver_columns(comparison: SolverComparison) -> tuple[Column[SolverRow], ...]:
    """The figures of a solver's answer and of its plan."""

    def bound_s(row: SolverRow) -> float:
        return (comparison if row.plan is None else row.plan.certificate).lower_bound_s

    def note(row: SolverRow) -> str:
        if row.plan is None:
            proved = row.status is Status.INFEASIBLE and row.short_of_memory
            return "does not fit" if proved else "no plan"
        best, unfit = row is comparison.best, row.shortage is not None
        return "; ".join(["best"] * best + ["does not fit"] * unfit)

    def size(row: SolverRow) -> str:
        made = f" {row.source.value}" if row.source in _OF_OTHER_SIZES else ""
        return f"{row.microbatch_size}{made}"

    return (
        *(column.of(lambda row: row.plan) for column in PLAN_COLUMNS),
        Column("solver", lambda row: row.solver, "solver", left=True),
        Column("status", lambda row: row.status.value),
        Column("reason", lambda row: row.reason),
        Column("shortage", lambda row: row.shortage),
        Column("solve_s", lambda row: row.solve_s, "took", format_seconds, gives_way=2),
        Column("microbatch_size", lambda row: row.microbatch_size),
        Column("size", size, "microbatch"),
        Column("source", lambda row: row.source.value),
        Column("lower_bound_s", bound_s),
        Column("note", note, "", left=True),
    )


def comparison_table(comparison: SolverComparison) -> Table:
    """A row for every solver."""
    rows, best = comparison.rows, comparison.best
    objectives = {row.plan.certificate.objective for row in rows if row.plan}
    several_sizes = len({row.microbatch_size for row in rows}) > 1
    of_others = any(row.source in _OF_OTHER_SIZES for row in rows)
    pinned = any(row.problem.training.microbatch_size is not None for row in rows)
    size = "size" if several_sizes or of_others or pinned else ""
    # The gap is the objective's, so the objective has a column.
    others = [f"{one}_s" for one in (Objective.BOTTLENECK, Objective.LATENCY) if one in objectives]
    keys = (
        f"solver {size} num_stages num_devices {' '.join(others)} iteration_s throughput"
        " bubble_fraction gap peak_bytes closed_form solve_s note"
    )
    return table(
        "Strategies, judged by the simulator",
        rows,
        chosen(solver_columns(comparison), keys),
        None if best is None else rows.index(best),
    )


def _stage_columns(plan: Plan) -> tuple[Column[int], ...]:
    """The figures of a stage of a plan, from its index. Versions are those of the parameters that a
    replica keeps under an asynchronous schedule.
    """
    stages, times = plan.strategy.stages, plan.prediction.stages
    peaks = {device.device: device.memory.total_bytes for device in plan.prediction.devices}
    process = {device.device: device.memory.process_bytes for device in plan.prediction.devices}
    waiting = {device.device: device.memory.host_bytes for device in plan.prediction.devices}
    several = plan.strategy.schedule.is_asynchronous
    return (
        Column("", lambda s: s, "stage"),
        Column("devices", lambda s: list(stages[s].devices), "devices", device_runs, left=True),
        Column("", lambda s: _mesh_text(stages[s]), "mesh", left=True, sparse=True),
        Column("", lambda s: sharing_text(stages[s]), "in parts", left=True, sparse=True),
        Column("prefetch_bytes", lambda s: stages[s].prefetch, "held ahead", format_bytes,
               sparse=True, gives_way=3),
        Column("num_operators", lambda s: len(stages[s].operators), "operators", gives_way=4),
        Column("forward_s", lambda s: times[s].forward_s, "forward", format_seconds),
        Column("backward_s", lambda s: times[s].backward_s, "backward", format_seconds),
        Column("", lambda s: stages[s].warmup, "in flight", gives_way=3),
        Column("", lambda s: alive(plan.strategy, s) if several else None, "versions", sparse=True),
        Column("", lambda s: _again_text(stages[s]), "recompute", left=True,
               gives_way=2),
        Column("", lambda s: max(peaks[d] for d in stages[s].devices), "peak memory", format_bytes),
        Column("process_bytes", lambda s: max(process[d] for d in stages[s].devices) or None,
               "of the process", format_bytes, sparse=True, gives_way=3),
        Column("host_bytes", lambda s: max(waiting[d] for d in stages[s].devices) or None,
               "in host memory", format_bytes, sparse=True),
        *([Column("modules", lambda s: list(plan.modules[s]))] if plan.modules else []),
        Column("", lambda s: _span(plan, s), "from .. to", left=True, gives_way=1),
    )  # fmt: skip


def _again_text(stage: Stage) -> str:
    """What a stage runs again in its backward."""
    if stage.recomputed:
        keeps = len(stage.segment_by_operator) > sum(map(len, stage.recomputed))
        return count(len(stage.recomputed), "segment") + ", selective" * keeps
    return "yes" if stage.recompute else ""


def _stages_json(plan: Plan) -> list[dict[str, Any]]:
    return json_rows(range(len(plan.strategy.stages)), _stage_columns(plan))


def _span(plan: Plan, stage: int) -> str:
    """A stage's first and last module, or operator if the model names no modules."""
    if plan.modules:
        return from_to(plan.modules[stage])
    operators = plan.strategy.stages[stage].operators
    return f"{operators[0]} .. {operators[-1]}"


def stage_table(plan: Plan) -> Table:
    """The stages of a plan; of many, the first and the last ones."""
    title, rows, ends = "Stages, per microbatch", range(len(plan.strategy.stages)), MAX_ROWS // 2
    if len(rows) <= MAX_ROWS:
        return table(title, rows, _stage_columns(plan))
    title += f" (the first and the last {ends} of {len(rows)}; the strategy file has all)"
    shown = table(title, [*rows[:ends], *rows[-ends:]], _stage_columns(plan))
    gap = ("..", *[""] * (len(shown.columns) - 1))
    return replace(shown, rows=(*shown.rows[:ends], gap, *shown.rows[ends:]))


def _mesh_text(stage: Stage) -> str:
    """The mesh of a split stage, with its replicas, such as "2 x 4, 3 replicas"; "" of others."""
    if stage.sharding is None:
        return ""
    mesh = " x ".join(map(str, stage.sharding.mesh))
    return mesh if stage.num_replicas == 1 else f"{mesh}, {stage.num_replicas} replicas"


def sharing_text(stage: Stage) -> str:
    """What replicas of a stage keep in parts, such as "ZeRO-3 over 8"; "" where they keep all."""
    if not shared_level(stage):
        return ""
    levels = "/".join(map(str, sorted({stage.zero, *stage.zero_of.values()} - {0})))
    return f"ZeRO-{levels} over {stage.over}"


def parameter_table(plan: Plan) -> Table | None:
    """The shardings of the parameters of split stages; None if no stage is split. Parameters of
    modules whose paths differ only in numbers have one row.
    """
    stages_of: dict[tuple[str, str, str, str], list[int]] = {}
    for s, stage in enumerate(plan.strategy.stages):
        split = stage.sharding
        for name in sorted({*split.parameters, *split.gradients, *split.states} if split else ()):
            assert split is not None
            whole = ("R",) * len(split.mesh)
            parameter = split.parameters.get(name, whole)
            gradient = split.gradients.get(name, parameter)
            state = split.states.get(name, gradient)
            row = (_NUMBER.sub("*", name), " ".join(parameter), " ".join(gradient), " ".join(state))
            stages_of.setdefault(row, []).append(s)
    if not stages_of:
        return None
    differ = any(len(set(specs)) > 1 for _, *specs in stages_of)
    title, rows = first_rows(
        "Sharded parameters, axis by axis",
        [(*specs, stages) for specs, stages in stages_of.items()],
        "rows",
        "the strategy file",
    )
    columns: list[Column[tuple[Any, ...]]] = [
        Column("", lambda row: row[0], "parameter", left=True),
        Column("", lambda row: len(row[4]), "count"),
        Column("", lambda row: set(row[4]), "stages", device_runs, left=True),
        Column("", lambda row: row[1], "sharding", left=True),
        Column("", lambda row: row[2], "gradient", left=True),
        Column("", lambda row: row[3], "optimizer state", left=True),
    ]
    return table(title, rows, columns if differ else columns[:4])


def times_line(plan: Plan) -> str:
    """The source of the times that a plan is based on, and the type of parameters that is not the
    model's.
    """
    times = f"operator times: {said_times(plan)}"
    if plan.parameter_dtype is None:
        return times
    added = plan.gradient_dtype or plan.parameter_dtype
    return (
        f"{times}; {plan.parameter_dtype} parameters, of which the optimizer steps float32 copies;"
        f" gradients are added up in {added}"
    )


def certificate_lines(plan: Plan) -> tuple[str, ...]:
    """The distance of a plan from the best one, and the space of its search."""
    certificate = plan.certificate
    peak_s = certificate.peak_bound_s
    other_kernels = f"; {format_seconds(peak_s)} with any kernels" if peak_s else ""
    return (
        f"lower bound {format_seconds(certificate.lower_bound_s)} for the {certificate.objective}"
        f" over all strategies with the profile's times and rules{other_kernels}: this plan is at"
        f" most {percent(certificate.gap)} above the best",
        f"{plan.solver}: {plan.status} over {certificate.space}{_within(plan)}",
    )


def _within(plan: Plan) -> str:
    """The distance of a plan from the best one of its solver's space; "" where little is known."""
    bound_s, gap = plan.certificate.space_bound_s, space_gap(plan)
    if bound_s is None or gap is None or gap < 0 or plan.status == Status.OPTIMAL.value:
        return ""
    return (
        f"; nothing in this space takes less than {format_seconds(bound_s)}: this plan is at most"
        f" {percent(gap)} above the best of it"
    )


def plan_json(plan: Plan, num_devices: int) -> dict[str, Any]:
    """The judge's figures of a plan, in the fields of `solve --json`.

    Args:
        num_devices: of the topology; `peak_bytes` has one entry for each.
    """
    plain = json_row(plan, chosen(PLAN_COLUMNS, _PLAN_JSON))
    return {**plain, "peak_bytes": _peaks(plan, num_devices)}


def _peaks(plan: Plan, num_devices: int) -> list[int]:
    peaks = {device.device: device.memory.total_bytes for device in plan.prediction.devices}
    return [peaks.get(d, 0) for d in range(num_devices)]


def row_json(row: SolverRow, comparison: SolverComparison, num_devices: int) -> dict[str, Any]:
    """One solver's fields of `solve --json`; `num_devices` is that of `plan_json`."""
    plain = json_row(row, chosen(solver_columns(comparison), _ROW_JSON))
    return {**plain, "peak_bytes": None if row.plan is None else _peaks(row.plan, num_devices)}


def comparison_json(
    comparison: SolverComparison, num_devices: int, strategy: str | None, partition: str | None
) -> dict[str, Any]:
    """The object that `solve --json` prints.

    Args:
        strategy: path of the strategy file, None if none was written.
        partition: path of the annotated model, None if none was written.
    """
    best = comparison.best
    if best is None:
        last, why = comparison.rows[-1], _why_none(comparison)
        result = replace(
            last.answer.result,
            status=comparison.status,
            reason=_reason(why),
            short_of_memory=why.short_of_memory,
        )
        best = replace(last, answer=replace(last.answer, solver="portfolio", result=result))
    return {
        **row_json(best, comparison, num_devices),
        "solve_s": sum(row.solve_s or 0.0 for row in comparison.rows),
        "strategy": strategy,
        "partition": partition,
        "compared": [row_json(row, comparison, num_devices) for row in comparison.rows],
    }


def _why_none(comparison: SolverComparison) -> SolverRow:
    """The row with the reason why there is no plan: of the solver that searches most, else of the
    last that gave one.
    """
    rows = [row for row in comparison.rows if row.reason] or list(comparison.rows)
    return [*rows, *(row for row in rows if row.solver == "antichain")][-1]


def _reason(row: SolverRow) -> str:
    return row.reason or Status.UNKNOWN.value


def reason_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """Why some solvers have no plan, or one that leaves devices idle; each reason once, after the
    solvers that gave it.
    """
    solvers: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        if row.plan is None or row.reason is not None:
            solvers.setdefault(row.reason or row.status.value, {})[row.solver] = None
    return tuple(f"{', '.join(names)}: {reason}" for reason, names in solvers.items())


def samples_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """The samples of an iteration, where the user did not say how many, and plans with microbatches
    of several sizes were compared.
    """
    problems = [row.problem for row in comparison.rows]
    training, sizes = problems[0].training, {one.profile.microbatch_size for one in problems}
    if len(sizes) == 1 or training.global_batch or training.microbatches:
        return ()
    samples = problems[0].profile.microbatch_size * problems[0].num_microbatches
    return (
        f"no --global-batch is given: an iteration has {samples} samples,"
        f" {MICROBATCHES_PER_DEVICE} microbatches of the largest profiled size per device",
    )


def calibration_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """The calibration that all plans were judged with, if there is one."""
    problem = comparison.rows[0].problem
    types = {device.type for device in problem.topology.devices}
    return tuple(filter(None, [calibration_note(problem, types)]))


def unfit_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """Plans that do not fit by the planner's count, and why."""
    return tuple(
        f"{row.solver}'s plan does not fit by the planner's count: {row.shortage}"
        for row in comparison.rows
        if row.plan is not None and row.shortage is not None
    )


def no_plan_lines(comparison: SolverComparison) -> tuple[str, ...]:
    """The reasons why there is no plan; possible changes if a solver lacked memory. Other reasons
    contain their own advice.
    """
    reasons = reason_lines(comparison)
    if len(reasons) == 1:
        reasons = (_reason(_why_none(comparison)),)
    short = [row.problem for row in comparison.rows if row.short_of_memory]
    return (
        "no strategy fits:" if short else "no plan:",
        *(f"  {reason}" for reason in reasons),
        *([f"possible changes: {', '.join(_memory_savings(short))}"] if short else []),
    )


def _memory_savings(problems: Sequence[Problem]) -> Iterator[str]:
    """Changes by which a plan may fit; none that the question has already.

    Args:
        problems: without a plan, of one question.
    """
    training = problems[0].training
    profile = min((one.profile for one in problems), key=lambda one: one.microbatch_size)
    if training.reserve > 0:
        yield "a smaller --reserve"
    yield "devices with more memory" if training.device_memory is None else "more --device-memory"
    if less := [one for one in Optimizer if one.num_moments < training.optimizer.num_moments]:
        yield f"--optimizer {' or '.join(less)}"
    if training.recompute is Recompute.NONE:
        yield f"--recompute {Recompute.AUTO}"
    linked = all(host.host_link is not None for host in problems[0].topology.hosts)
    if training.offload is Offload.NO and linked and not training.schedule.is_asynchronous:
        yield f"--offload {Offload.AUTO}"
    size = profile.microbatch_size
    if training.microbatch_size is not None and size > 1:
        yield f"a smaller --microbatch-size than {size}"
    elif size > 1 and not problems[0].any_size:
        if size in profile.dimensions.values():
            yield f"a smaller --batch than {size} when profiling"
        else:  # the file has the size of the batch written into it
            yield f"a model exported with a smaller batch than {size}"
    yield "more devices"


# ------------------------------------------------------------------- beside each other


def compare_bars(comparison: SolverComparison, width: int) -> tuple[str, ...]:
    """The time of each solver's plan, the best first, with a mark at the lower bound.

    Args:
        width: columns that there are.
    """
    plans = sorted(
        ((row.solver, row.plan) for row in comparison.rows if row.plan is not None),
        key=lambda one: comparable_s(one[1]),
    )
    if not plans:
        return ()
    objective, bound_s = plans[0][1].certificate.objective, comparison.lower_bound_s
    figures = [(name, objective_s(plan), format_seconds(objective_s(plan))) for name, plan in plans]
    names, _, texts = zip(*figures, strict=True)
    room = width - max(map(len, names)) - max(map(len, texts)) - 2 * len("  ")
    drawn = bars(figures, max(MIN_BAR, min(MAX_BAR, room)), bound_s)
    return (f"{objective}; the mark is the lower bound, {format_seconds(bound_s)}", *drawn)


# Columns of the longest bar.
MIN_BAR, MAX_BAR = 8, 48
EIGHTHS = " ▏▎▍▌▋▊▉█"
BOUND = "│"


def bars(
    figures: Sequence[tuple[str, float, str]], width: int, bound: float = 0.0
) -> tuple[str, ...]:
    """A line per figure: its name, a bar, and the figure as it is written.

    Args:
        figures: name, figure of at least 0, and the text behind the bar.
        width: of the longest bar, in columns.
        bound: a lower bound of the figures, which is marked; 0 for none.

    >>> bars([("a", 2.0, "2 s"), ("bb", 1.0, "1 s")], 4)
    ('a   ████  2 s', 'bb  ██    1 s')
    >>> bars([("a", 2.0, "2 s")], 4, bound=1.0)
    ('a  ██│█  2 s',)
    """
    longest = max((figure for _, figure, _ in figures), default=0.0) or 1.0
    names = max((len(name) for name, _, _ in figures), default=0)
    mark = int(width * bound / longest)
    lines = []
    for name, figure, text in figures:
        bar = _bar(width * figure / longest).ljust(width)
        if 0 < mark < width:
            bar = bar[:mark] + BOUND + bar[mark + 1 :]
        lines.append(f"{name.ljust(names)}  {bar}  {text}")
    return tuple(lines)


def _bar(length: float) -> str:
    """A bar of this length in columns, to an eighth of one; at least an eighth above 0."""
    eighths = max(round(8 * length), 1 if length > 0 else 0)
    whole, rest = divmod(eighths, 8)
    return EIGHTHS[8] * whole + (EIGHTHS[rest] if rest else "")


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


def compare_csv(comparison: SolverComparison) -> str:
    """A line per solver; times in s, sizes in bytes, empty where there is no plan."""
    return csv_text(comparison.rows, chosen(solver_columns(comparison), CSV_KEYS))
