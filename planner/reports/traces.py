"""Measured traces beside predicted ones, and a calibration by them, as tables, lines and JSON."""

from math import isfinite
from typing import TYPE_CHECKING, Any

from planner.reports.tables import (
    Column,
    Table,
    chosen,
    count,
    json_row,
    json_rows,
    percent,
    signed,
    table,
)
from planner.support.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.simulator.traces.calibrate import CheckedCalibration, CheckedRun
    from planner.simulator.traces.comparison import ComparedTime, TraceComparison

# Corrections of single types of operators that are shown.
SHOWN_DEVIATION = 0.05
SAME = 1e-3
"""A factor is 1, up to this: no run depends on it."""

# ------------------------------------------------------------------ planner compare-trace

TIME_COLUMNS: "tuple[Column[ComparedTime], ...]" = (
    Column("what", lambda one: one.what, "", left=True),
    Column("count", lambda one: one.count, "count"),
    Column("bytes", lambda one: one.bytes, "bytes", format_bytes, sparse=True),
    Column("predicted_s", lambda one: one.predicted_s, "predicted", format_seconds),
    Column("measured_s", lambda one: one.measured_s, "measured", format_seconds),
    Column("", lambda one: one.error, "error",
           lambda error: signed(error) if isfinite(error) else "-"),
)  # fmt: skip


def trace_tables(comparison: "TraceComparison") -> tuple[Table, ...]:
    """Mean times of actions, of transfers and of devices."""
    actions = (comparison.iteration, *comparison.stages, *comparison.sums, *comparison.steps)
    of_devices = [column for column in TIME_COLUMNS if column.key != "count"]
    tables = [
        table("Mean times, predicted and measured", actions, TIME_COLUMNS),
        table("Mean times of transfers", comparison.links, TIME_COLUMNS),
        table("Devices, per iteration", comparison.devices, of_devices),
    ]
    return tuple(one for one in tables if one.rows)


def trace_json(comparison: "TraceComparison", overlay: str | None) -> dict[str, Any]:
    """The object that `compare-trace --json` prints."""

    def plain(one: "ComparedTime") -> dict[str, Any]:
        size = "" if one.bytes is None else "bytes"
        return json_row(one, chosen(TIME_COLUMNS, f"what count predicted_s measured_s {size}"))

    return {
        "predicted_iteration_s": comparison.iteration.predicted_s,
        "measured_iteration_s": comparison.iteration.measured_s,
        **{
            name: [plain(one) for one in getattr(comparison, name)]
            for name in ("stages", "links", "sums", "steps", "devices")
        },
        "overlay": overlay,
    }


# ---------------------------------------------------------------------- planner calibrate

RUN_COLUMNS: "tuple[Column[CheckedRun], ...]" = (
    Column("name", lambda run: run.name, "run", left=True),
    Column("measured_s", lambda run: run.measured_s, "measured", format_seconds),
    Column("before_s", lambda run: run.before_s, "before", format_seconds),
    Column("", lambda run: run.before_s / run.measured_s - 1, "error", signed),
    Column("after_s", lambda run: run.after_s, "after", format_seconds),
    Column("", lambda run: run.after_s / run.measured_s - 1, "error", signed),
)


def calibrate_table(result: "CheckedCalibration") -> Table:
    """The iteration time of every run: measured, predicted before and predicted after."""
    title = f"Iteration times; after: predicted by a calibration without this {result.left_out}"
    return table(title, result.checked, RUN_COLUMNS)


def calibration_lines(result: "CheckedCalibration", *, by_table: bool) -> tuple[str, ...]:
    """The calibration in words.

    Args:
        by_table: whether it was fitted to a table of times, and not to traces.
    """
    return factor_lines(result) if by_table else calibrate_lines(result)


def _errors_line(result: "CheckedCalibration") -> str:
    known = result.calibration
    return (
        f"{count(known.runs, 'run')} of {count(known.models, 'model')}, mean error"
        f" {percent(result.error_before)} before, {percent(result.error_after)} after; each run"
        f" was predicted by a calibration without this {result.left_out}"
    )


def calibrate_lines(result: "CheckedCalibration") -> tuple[str, ...]:
    """The calibration in words."""
    known = result.calibration
    special = ", ".join(
        f"{one.type} {one.forward:+.2f} / {one.backward:+.2f}"
        for one in known.deviations
        if max(abs(one.forward), abs(one.backward)) >= SHOWN_DEVIATION
    )
    whole = " in the whole step" if known.whole else ""
    types = f"; added for single types: {special}" if special else ""
    copying = ""
    if known.copy_s_per_byte > 0:
        copying = f" and copies its bytes at {format_rate(1 / known.copy_s_per_byte)}"
    lines = [
        _errors_line(result),
        f"operators take {known.forward:.2f} (forward) and {known.backward:.2f} (backward) of their"
        f" times{whole}{types}",
        f"a loss takes {format_seconds(known.loss_forward_s_per_byte * 1e6)} forward and"
        f" {format_seconds(known.loss_backward_s_per_byte * 1e6)} backward per"
        f" {format_bytes(1e6)} of its input; each computation takes"
        f" {format_seconds(known.launch_s)} more",
        f"posting a transfer takes {format_seconds(known.post_s)}{copying};"
        f" {percent(known.wire)} of its bytes then take time on the link",
        f"all-reduces take {known.sums:.2f} and steps {known.steps:.2f} of their predicted times",
    ]
    if (known.collectives, known.collective_s) != (1.0, 0.0):
        lines.append(
            f"collectives inside stages take {known.collectives:.2f} of their predicted times"
            f" and {format_seconds(known.collective_s)} more each"
        )
    return tuple(lines)


def factor_lines(result: "CheckedCalibration") -> tuple[str, ...]:
    """A calibration by a table in words."""
    from planner.simulator.factors import at_their_least, factors_of

    factors, unsure = factors_of(result.calibration), at_their_least(result.calibration)
    lines = [
        _errors_line(result),
        f"efficiency: computations have {1 / factors['slowness']:.2f} of the profile's speed",
        f"launch: each computation, sum and step takes {format_seconds(factors['launch'])} more",
        f"network: communication takes {factors['network']:.2f} of its predicted time",
    ]
    if abs(factors["host"] - 1) > SAME:
        lines.append(f"host: it starts kernels in {factors['host']:.2f} of the profile's times")
    if unsure:
        those = ", ".join(unsure)
        lines.append(f"at the least that is searched: {those}; these runs do not tell it")
    return tuple(lines)


def calibrate_json(result: "CheckedCalibration", written: list[str]) -> dict[str, Any]:
    """The object that `calibrate --json` prints."""
    from planner.artefacts.files import to_plain

    return {
        "error_before": result.error_before,
        "error_after": result.error_after,
        "left_out": result.left_out,
        "runs": json_rows(result.checked, RUN_COLUMNS),
        "calibration": to_plain(result.calibration),
        "written": written,
    }
