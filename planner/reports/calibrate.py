"""A calibration and its errors, as a table, as lines of text and as JSON."""

from typing import TYPE_CHECKING, Any

from planner.reports.tables import Table, count, percent
from planner.support.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.simulator.traces.calibrate import CheckedCalibration

SHOWN_DEVIATION = 0.05


def calibrate_table(result: "CheckedCalibration") -> Table:
    """The iteration time of every run: measured, predicted before and predicted after."""
    return Table(
        f"Iteration times; after: by a calibration without this {result.left_out}",
        ("run", ">measured", ">before", ">error", ">after", ">error"),
        tuple(
            (
                one.name,
                format_seconds(one.measured_s),
                format_seconds(one.before_s),
                f"{100 * (one.before_s / one.measured_s - 1):+.1f} %",
                format_seconds(one.after_s),
                f"{100 * (one.after_s / one.measured_s - 1):+.1f} %",
            )
            for one in result.checked
        ),
    )


def calibrate_lines(result: "CheckedCalibration") -> tuple[str, ...]:
    """The calibration in words."""
    known = result.calibration
    copied_bytes_per_s = 1 / known.copy_s_per_byte if known.copy_s_per_byte > 0 else None
    special = [
        f"{one.type} {one.forward:+.2f} / {one.backward:+.2f}"
        for one in known.deviations
        if max(abs(one.forward), abs(one.backward)) >= SHOWN_DEVIATION
    ]
    return (
        f"{count(known.runs, 'run')} of {count(known.models, 'model')}, mean error"
        f" {percent(result.error_before)} before, {percent(result.error_after)} after; each run"
        f" was predicted by a calibration without this {result.left_out}",
        f"operators take {known.forward:.2f} (forward) and {known.backward:.2f} (backward) of their"
        f" times{' in the whole step' if known.whole else ''}"
        + (f"; added for single types: {', '.join(special)}" if special else ""),
        f"a loss takes {format_seconds(known.loss_forward_s_per_byte * 1e6)} forward and"
        f" {format_seconds(known.loss_backward_s_per_byte * 1e6)} backward per"
        f" {format_bytes(1e6)} of its input; each computation takes"
        f" {format_seconds(known.launch_s)} more",
        f"posting a transfer takes {format_seconds(known.post_s)}"
        + (
            f" and copies its bytes at {format_rate(copied_bytes_per_s)}"
            if copied_bytes_per_s
            else ""
        )
        + f"; {percent(known.wire)} of its bytes are left for the link",
        f"all-reduces take {known.sums:.2f} and steps {known.steps:.2f} of their predicted times",
        *(
            [
                f"collectives inside stages take {known.collectives:.2f} of their predicted times"
                f" and {format_seconds(known.collective_s)} more each"
            ]
            if (known.collectives, known.collective_s) != (1.0, 0.0)
            else []
        ),
    )


def calibrate_json(result: "CheckedCalibration", written: list[str]) -> dict[str, Any]:
    """The object that `calibrate --json` prints."""
    from planner.artefacts.files import to_plain

    return {
        "error_before": result.error_before,
        "error_after": result.error_after,
        "left_out": result.left_out,
        "runs": [
            {
                "name": one.name,
                "measured_s": one.measured_s,
                "before_s": one.before_s,
                "after_s": one.after_s,
            }
            for one in result.checked
        ],
        "calibration": to_plain(result.calibration),
        "written": written,
    }
