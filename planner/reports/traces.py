"""Two traces side by side, as tables and as JSON."""

from math import isfinite
from typing import TYPE_CHECKING, Any

from planner.reports.tables import Table
from planner.support.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.simulator.traces.comparison import ComparedTime, TraceComparison


def trace_tables(comparison: "TraceComparison") -> tuple[Table, ...]:
    """Mean times of actions, of transfers and of devices."""
    actions = (
        comparison.iteration, *comparison.stages, *comparison.sums, *comparison.steps
    )  # fmt: skip
    head = ("", ">count", ">predicted", ">measured", ">error")
    tables = [Table("Mean times, predicted and measured", head, tuple(map(_row, actions)))]
    if comparison.links:
        links = tuple(
            (*_row(one)[:2], format_bytes(one.bytes or 0), *_row(one)[2:])
            for one in comparison.links
        )
        heads = ("", ">count", ">bytes", ">predicted", ">measured", ">error")
        tables.append(Table("Mean times of transfers", heads, links))
    rows = tuple((_row(one)[0], *_row(one)[2:]) for one in comparison.devices)
    return (*tables, Table("Devices, per iteration", (head[0], *head[2:]), rows))


def _row(one: "ComparedTime") -> tuple[str, ...]:
    return (
        one.what,
        str(one.count),
        format_seconds(one.predicted_s),
        format_seconds(one.measured_s),
        f"{100 * one.error:+.1f} %" if isfinite(one.error) else "-",
    )


def trace_json(comparison: "TraceComparison", overlay: str | None) -> dict[str, Any]:
    """The object that `compare-trace --json` prints."""

    def plain(one: "ComparedTime") -> dict[str, Any]:
        more = {} if one.bytes is None else {"bytes": one.bytes}
        return {
            "what": one.what,
            "count": one.count,
            "predicted_s": one.predicted_s,
            "measured_s": one.measured_s,
            **more,
        }

    return {
        "predicted_iteration_s": comparison.iteration.predicted_s,
        "measured_iteration_s": comparison.iteration.measured_s,
        **{
            name: [plain(one) for one in getattr(comparison, name)]
            for name in ("stages", "links", "sums", "steps", "devices")
        },
        "overlay": overlay,
    }
