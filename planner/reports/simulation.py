"""One simulated iteration as tables, a chart of text and JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from planner.artefacts.plan import DevicePrediction, Plan
from planner.reports.drawing.gantt import SIGNS, Activity, gantt
from planner.reports.plans import plan_json
from planner.reports.tables import Column, Table, count, first_rows, json_rows, percent, table
from planner.schedules.actions import AllReduce, Compute, Receive, Step, text
from planner.simulator.account import Account
from planner.simulator.critical_path import PathStep
from planner.simulator.idle import Cause, Wait
from planner.simulator.timeline import Timeline
from planner.support.printable import printable
from planner.support.units import format_bytes, format_seconds

# Narrower charts show nothing.
MIN_CELLS = 10
Span = tuple[str, str]
"""Text, and the activity that it shows: a value of `Activity`, or "" for text beside the chart."""
MAX_PARTS = 12
"""Number of lines in the table of the critical path."""

HEADS: Mapping[Cause, str] = {
    Cause.WARM_UP: "warm-up", Cause.OUTPUT: "for outputs", Cause.GRADIENT: "for gradients",
    Cause.SENDING: "for sends", Cause.ALL_REDUCE: "for all-reduces", Cause.COOL_DOWN: "cool-down",
    Cause.OWN: "own",
}  # fmt: skip


def _device_columns(
    iteration_s: float, account: "Account | None" = None
) -> tuple[Column[DevicePrediction], ...]:
    """The figures of a device in an iteration."""
    idle = {} if account is None else account.idle
    return (
        Column("device", lambda one: one.device),
        Column("name", lambda one: one.name, "device", left=True),
        Column("", lambda one: one.type, "type", left=True, gives_way=1),
        Column("compute_s", lambda one: one.compute_s, "compute", format_seconds),
        Column("communication_s", lambda one: one.communication_s, "communication", format_seconds),
        Column("idle_s", lambda one: one.idle_s, "idle", format_seconds),
        Column("", lambda one: one.compute_s / iteration_s, "busy", percent, gives_way=2),
        Column("", lambda one: one.memory.total_bytes, "peak memory", format_bytes),
        Column("process_bytes", lambda one: one.memory.process_bytes or None, "of the process",
               format_bytes, sparse=True, gives_way=2),
        Column("idle", lambda one: _idle_json(idle.get(one.device, {}))),
    )  # fmt: skip


def device_table(plan: Plan) -> Table:
    """Compute, communication and idle time of each device in an iteration, and its memory."""
    iteration_s = plan.prediction.iteration_s
    title = f"Devices, in an iteration of {format_seconds(iteration_s)}"
    return table(title, plan.prediction.devices, _device_columns(iteration_s))


def idle_table(idle: Mapping[int, Mapping[Wait, float]], names: Mapping[int, str]) -> Table:
    """Idle time of each device in an iteration, by cause.

    Args:
        idle: idle time in s of each device, by cause, the longest first.
        names: names of the devices.
    """

    def of_cause(cause: Cause, device: int) -> float:
        return sum(time_s for wait, time_s in idle[device].items() if wait.cause is cause)

    def longest(device: int) -> str:
        waits = ((wait, time_s) for wait, time_s in idle[device].items() if wait.stage is not None)
        return next((f"stage {wait.stage} ({_time(time_s)})" for wait, time_s in waits), "")

    columns: list[Column[int]] = [
        Column("", lambda device: names[device], "device", left=True),
        *(
            Column("", partial(of_cause, cause), HEADS[cause], _time, gives_way=gives_way)
            for cause in Cause
            for gives_way in [2 if cause is Cause.OWN else 0]
        ),
        Column("", longest, "longest wait", left=True, gives_way=1),
    ]
    return table("Idle time by cause", tuple(idle), columns)


def _time(time_s: float) -> str:
    """A time as text; empty for 0."""
    return format_seconds(time_s) if time_s > 0 else ""


def path_table(path: Sequence[PathStep], names: Mapping[int, str]) -> Table:
    """The parts of the iteration's length: actions of the critical path, by kind and place."""
    parts: dict[tuple[str, str], list[float]] = {}
    for step in path:
        parts.setdefault(_kind_and_place(step, names), []).append(step.end_s - step.start_s)
    whole_s = path[-1].end_s if path else 0.0
    rows = sorted(
        ((*part, times_s) for part, times_s in parts.items() if sum(times_s) > 0),
        key=lambda row: -sum(row[2]),
    )
    columns: list[Column[tuple[str, str, list[float]]]] = [
        Column("", lambda row: row[0], "action", left=True),
        Column("", lambda row: row[1], "place", left=True),
        Column("", lambda row: len(row[2]), "count"),
        Column("", lambda row: sum(row[2]), "time", format_seconds),
        Column("", lambda row: sum(row[2]) / whole_s, "of the iteration", percent),
    ]
    title = f"The critical path, {count(len(path), 'action')}"
    return table(*first_rows(title, rows, "parts", most=MAX_PARTS), columns)


def gantt_lines(
    timeline: Timeline, names: Mapping[int, str], width: int
) -> Sequence[Sequence[Span]]:
    """A line for each device, and the legend.

    Args:
        names: of the devices.
        width: columns that there are.
    """
    names = {device: printable(name) for device, name in names.items()}
    margin = max(map(len, names.values()))
    lines = []
    for device, shown in gantt(timeline, max(MIN_CELLS, width - margin - 3)).items():
        cells = ((text, kind.value) for kind, text in shown)
        lines.append(((names[device].ljust(margin) + " |", ""), *cells, ("|", "")))
    signs = ", ".join(
        f"{SIGNS[kind]} {kind.value}" for kind in Activity if kind is not Activity.IDLE
    )
    indent = " " * (margin + 2)
    legend = textwrap.wrap(
        f"numbers are microbatches; {signs}",
        max(width, margin + MIN_CELLS),
        initial_indent=indent,
        subsequent_indent=indent,
    )
    return (*lines, *(((line, "legend"),) for line in legend))


def _kind_and_place(step: PathStep, names: Mapping[int, str]) -> tuple[str, str]:
    where = names[step.device]
    match step.action:
        case Compute(direction, stage):
            return f"{direction.name.lower()} of stage {stage}", where
        case AllReduce():
            return "all-reduce", where
        case Step():
            return "optimizer step", where
        case Receive(device=source) if step.transfer:
            return "transfer", f"{names[source]} to {where}"
    return "posting of transfers", where


def _path_json(step: PathStep) -> dict[str, Any]:
    return {
        "action": text(step.action), "device": step.device, "transfer": step.transfer,
        "reason": step.reason.value, "start_s": step.start_s, "end_s": step.end_s,
    }  # fmt: skip


def _idle_json(waits: Mapping[Wait, float]) -> list[dict[str, Any]]:
    return [
        {"cause": w.cause.value, "stage": w.stage, "device": w.device, "idle_s": time_s}
        for w, time_s in waits.items()
    ]


def simulation_json(
    plan: Plan, account: Account | None, num_devices: int, trace: str | None, svg: str | None
) -> dict[str, Any]:
    """The object that `simulate --json` prints.

    Args:
        plan: the plan.
        account: causes of idle time and critical path; None where there are too many actions.
        num_devices: number of devices in the topology; `peak_bytes` has one entry for each.
        trace, svg: paths of the trace and of the picture; None if none was written.
    """
    return {
        "solver": plan.solver,
        "status": plan.status,
        "microbatch_size": plan.microbatch_size,
        **plan_json(plan, num_devices),
        "lower_bound_s": plan.certificate.lower_bound_s,
        "timeline": json_rows(
            plan.prediction.devices, _device_columns(plan.prediction.iteration_s, account)
        ),
        "critical_path": None if account is None else [*map(_path_json, account.path)],
        "notes": list(plan.notes),
        "trace": trace,
        "svg": svg,
    }
