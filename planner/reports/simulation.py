"""One simulated iteration as tables and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.artefacts.plan import Plan
from planner.reports.plans import plan_json
from planner.reports.tables import Table, count, percent
from planner.schedules.actions import AllReduce, Compute, Receive, Step, text
from planner.simulator.account import Account
from planner.simulator.critical_path import PathStep
from planner.simulator.idle import Cause, Wait
from planner.support.units import format_bytes, format_seconds

MAX_PARTS = 12
"""Number of lines in the table of the critical path."""

HEADS: Mapping[Cause, str] = {
    Cause.WARM_UP: "warm-up", Cause.OUTPUT: "for outputs", Cause.GRADIENT: "for gradients",
    Cause.SENDING: "for sends", Cause.ALL_REDUCE: "for all-reduces", Cause.COOL_DOWN: "cool-down",
    Cause.OWN: "own",
}  # fmt: skip


def device_table(plan: Plan) -> Table:
    """Compute, communication and idle time of each device in an iteration, and its memory."""
    whole_s = plan.prediction.iteration_s
    return Table(
        f"Devices, in an iteration of {format_seconds(whole_s)}",
        ("device", "type", ">compute", ">communication", ">idle", ">busy", ">peak memory"),
        tuple(
            (
                one.name,
                one.type,
                format_seconds(one.compute_s),
                format_seconds(one.communication_s),
                format_seconds(one.idle_s),
                percent(one.compute_s / whole_s),
                format_bytes(one.memory.total_bytes),
            )
            for one in plan.prediction.devices
        ),
        optional=("type", ">busy"),
    )


def idle_table(idle: Mapping[int, Mapping[Wait, float]], names: Mapping[int, str]) -> Table:
    """Idle time of each device in an iteration, by cause.

    Args:
        idle: idle time in s of each device, by cause, the longest first.
        names: names of the devices.
    """
    rows = []
    for device, waits in idle.items():
        by_cause = dict.fromkeys(Cause, 0.0)
        for wait, time_s in waits.items():
            by_cause[wait.cause] += time_s
        longest = next((wait for wait in waits if wait.stage is not None), None)
        wait_cell = "" if longest is None else f"stage {longest.stage} ({_cell(waits[longest])})"
        rows.append((names[device], *map(_cell, by_cause.values()), wait_cell))
    columns = ("device", *(f">{HEADS[cause]}" for cause in Cause), "longest wait")
    return Table("Idle time by cause", columns, tuple(rows), optional=("longest wait", ">own"))


def _cell(time_s: float) -> str:
    """A time as text; empty for 0."""
    return format_seconds(time_s) if time_s > 0 else ""


def path_table(path: Sequence[PathStep], names: Mapping[int, str]) -> Table:
    """The parts of the iteration's length: actions of the critical path, by kind and place."""
    parts: dict[tuple[str, str], list[float]] = {}
    for step in path:
        parts.setdefault(_kind_and_place(step, names), []).append(step.end_s - step.start_s)
    whole_s = path[-1].end_s if path else 0.0
    shown = sorted(parts.items(), key=lambda part: -sum(part[1]))
    return Table(
        f"The critical path, {count(len(path), 'action')}",
        ("action", "place", ">count", ">time", ">of the iteration"),
        tuple(
            (
                what,
                where,
                str(len(times_s)),
                format_seconds(sum(times_s)),
                percent(sum(times_s) / whole_s),
            )
            for (what, where), times_s in shown[:MAX_PARTS]
            if sum(times_s) > 0
        ),
    )


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
        "timeline": [
            {
                "device": one.device,
                "name": one.name,
                "compute_s": one.compute_s,
                "communication_s": one.communication_s,
                "idle_s": one.idle_s,
                "idle": [] if account is None else _idle_json(account.idle[one.device]),
            }
            for one in plan.prediction.devices
        ],
        "critical_path": None if account is None else [*map(_path_json, account.path)],
        "notes": list(plan.notes),
        "trace": trace,
        "svg": svg,
    }
