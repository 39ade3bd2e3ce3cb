"""Measured figures of a launch beside the predicted ones, as tables and as JSON."""

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.artefacts.losses import loss_json
from planner.artefacts.losses import loss_lines as chosen_losses
from planner.artefacts.plan import MemoryParts, StagePrediction
from planner.launcher.processes import torchrun_command
from planner.reports.tables import Table, count
from planner.support.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.training.report import Evaluation, LaunchReport, MeasuredDevice


PEAK_MEMORY = ">peak memory (without reserve / of the process)"
LIVE_MEMORY = ">peak memory (without reserve / of tensors / of the process)"


def launch_tables(report: "LaunchReport") -> tuple[Table, ...]:
    """Predicted and measured times of the iteration, of each stage and of each device."""
    times = [
        ("iteration", report.predicted_iteration_s, report.measured_iteration_s),
        *_minibatch(report),
        *(
            (f"stage {s} {what}", predicted_s, measured_s)
            for s, stage in enumerate(report.stages)
            for what, predicted_s, measured_s in _directions(stage.predicted, stage.measured)
        ),
    ]
    watched = any(device.live_bytes is not None for device in report.devices)
    return (
        Table(
            f"Predicted and measured; operator times: {report.times}",
            ("", ">predicted", ">measured", ">predicted/measured"),
            tuple(
                (what, *_time_cells(predicted_s, measured_s, report.comparable))
                for what, predicted_s, measured_s in times
            ),
        ),
        Table(
            "Devices, per iteration: predicted / measured",
            ("", ">compute", ">communication", ">idle", LIVE_MEMORY if watched else PEAK_MEMORY),
            tuple(map(_device_cells, report.devices)),
            optional=(">idle", ">communication"),
        ),
    )


def _minibatch(report: "LaunchReport") -> tuple[tuple[str, float, float], ...]:
    """The times of one minibatch, where each leads to a step."""
    count = report.num_minibatches
    if count is None:
        return ()
    return (
        (
            "minibatch",
            report.predicted_iteration_s / count,
            report.measured_iteration_s / count,
        ),
    )


def _device_cells(device: "MeasuredDevice") -> tuple[str, ...]:
    times = (
        (device.predicted.compute_s, device.compute_s),
        (device.predicted.communication_s, device.communication_s),
        (device.predicted.idle_s, device.idle_s),
    )
    sizes_bytes = (
        without_reserve(device.predicted.memory),
        *(() if device.live_bytes is None else (device.live_bytes,)),
        device.peak_bytes,
    )
    return (
        f"rank {device.rank} on {device.predicted.name}",
        *(" / ".join(map(format_seconds, pair)) for pair in times),
        " / ".join(map(format_bytes, sizes_bytes)),
    )


def without_reserve(memory: MemoryParts) -> int:
    """Planned memory without the reserve, which is no part of a measured peak."""
    return memory.total_bytes - memory.reserve_bytes


def _directions(
    predicted: StagePrediction, measured: StagePrediction
) -> tuple[tuple[str, float, float], ...]:
    return (
        ("forward", predicted.forward_s, measured.forward_s),
        ("backward", predicted.backward_s, measured.backward_s),
    )


def _time_cells(predicted_s: float, measured_s: float, comparable: bool) -> tuple[str, str, str]:
    ratio = f"{predicted_s / measured_s:.3f}" if comparable and measured_s else "not comparable"
    return format_seconds(predicted_s), format_seconds(measured_s), ratio


def loss_lines(report: "LaunchReport") -> tuple[str, ...]:
    """The losses, the number of steps, and the first and last value."""
    values = " -> ".join(
        f"{loss:.4f}" if math.isfinite(loss) else "not finite"
        for loss in (report.loss[0], report.loss[-1])
    )
    last = report.evaluations[-1:]
    return (
        *chosen_losses(report.losses),
        f"{count(report.steps, 'step')}, loss {values}",
        *(f"evaluation after {count(one.step, 'step')}: {figures(one)}" for one in last),
    )


def figures(evaluation: "Evaluation") -> str:
    """Such as "loss 0.4132, accuracy 0.8810"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in evaluation.figures.items())


def launch_json(report: "LaunchReport") -> dict[str, Any]:
    """The object that `launch --json` prints."""
    return {
        "steps": report.steps,
        "losses": loss_json(report.losses),
        "loss": [_number(loss) for loss in report.loss],
        "evaluations": [
            {"step": one.step, **{name: _number(value) for name, value in one.figures.items()}}
            for one in report.evaluations
        ],
        "iterations_s": list(report.iterations_s),
        "measured_iteration_s": report.measured_iteration_s,
        "predicted_iteration_s": report.predicted_iteration_s,
        **{
            f"{which}_minibatch_s": time_s
            for _, *pair in _minibatch(report)
            for which, time_s in zip(("predicted", "measured"), pair, strict=True)
        },
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


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run_lines(strategy: Path, num_ranks: int) -> tuple[str, ...]:
    """The commands that run a strategy, for people."""
    alone = f"planner launch {shlex.quote(str(strategy))}"
    if num_ranks == 1:
        return (f"run it: {alone}",)
    return (
        f"run it: {torchrun_command(strategy, num_ranks)}",
        f"    or: {alone} --nproc {num_ranks}",
    )
