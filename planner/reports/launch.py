"""What a launch measured beside what was predicted."""

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.launcher.torchrun import torchrun_command
from planner.plan import MemoryParts, StagePrediction
from planner.reports.tables import Table, count
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.launcher.report import LaunchReport


PEAK_MEMORY = ">peak memory (without reserve / of the process)"
LIVE_MEMORY = ">peak memory (without reserve / of tensors / of the process)"


def launch_tables(report: "LaunchReport") -> tuple[Table, ...]:
    """Predicted beside measured: the iteration, each stage, each device."""
    predicted, measured = report.predicted_iteration_s, report.measured_iteration_s
    stages = [
        (f"stage {s} {what}", *_versus(before, after, report.comparable))
        for s, stage in enumerate(report.stages)
        for what, before, after in _directions(stage.predicted, stage.measured)
    ]
    iteration = ("iteration", *_versus(predicted, measured, report.comparable))
    watched = any(device.live_bytes is not None for device in report.devices)
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
            " / ".join(
                format_bytes(size)
                for size in (
                    without_reserve(device.predicted.memory),
                    *(() if device.live_bytes is None else (device.live_bytes,)),
                    device.peak_bytes,
                )
            ),
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
            ("", ">compute", ">communication", ">idle", LIVE_MEMORY if watched else PEAK_MEMORY),
            tuple(devices),
            optional=(">idle", ">communication"),
        ),
    )


def without_reserve(memory: MemoryParts) -> int:
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
    return f"{count(report.steps, 'step')}, loss {report.loss[0]:.4f} -> {report.loss[-1]:.4f}"


def launch_json(report: "LaunchReport") -> dict[str, Any]:
    """The object that `launch --json` prints."""
    return {
        "steps": report.steps,
        "loss": [loss if math.isfinite(loss) else None for loss in report.loss],
        "measured_iteration_s": report.measured_iteration_s,
        "predicted_iteration_s": report.predicted_iteration_s,
        "peak_bytes": list(report.peak_bytes),
        "live_bytes": [device.live_bytes for device in report.devices],
        "predicted_live_bytes": [
            without_reserve(device.predicted.memory) for device in report.devices
        ],
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


def run_lines(strategy: Path, num_ranks: int) -> tuple[str, ...]:
    """The commands that run a strategy, for people."""
    alone = f"planner launch {shlex.quote(str(strategy))}"
    if num_ranks == 1:
        return (f"run it: {alone}",)
    return (
        f"run it: {torchrun_command(strategy, num_ranks)}",
        f"    or: {alone} --nproc {num_ranks}",
    )
