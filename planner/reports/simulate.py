"""One simulated iteration as rows of plain text and as the machine's JSON."""

from typing import Any

from planner.prediction import Plan
from planner.reports.solve import plan_json
from planner.reports.tables import Table, percent
from planner.units import format_bytes, format_seconds


def device_table(plan: Plan) -> Table:
    """What each device does during an iteration."""
    whole_s = plan.prediction.iteration_s
    return Table(
        f"Devices, in an iteration of {format_seconds(whole_s)}",
        ("device", "type", ">computes", ">communicates", ">idles", ">busy", ">peak memory"),
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


def simulation_json(plan: Plan, num_devices: int, trace: str | None) -> dict[str, Any]:
    """The object that `simulate --json` prints.

    Args:
        num_devices: of the topology; `peak_bytes` has one entry for each.
        trace: path of the trace, None if none was written.
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
            }
            for one in plan.prediction.devices
        ],
        "notes": list(plan.notes),
        "trace": trace,
    }
