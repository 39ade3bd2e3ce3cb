"""Measured figures of a launch beside the predicted ones, as tables and as JSON."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.artefacts.losses import loss_json
from planner.artefacts.losses import loss_lines as chosen_losses
from planner.launcher.failures.monitor import torchrun_command
from planner.reports.tables import Column, Table, count, json_rows, table
from planner.support.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.launcher.trained_groups import TrainedGroup
    from planner.training.evaluation import Evaluation
    from planner.training.report import LaunchReport, MeasuredDevice, MeasuredStage


class _Time(NamedTuple):
    """The predicted and the measured time of something, in s."""

    name: str
    predicted_s: float
    measured_s: float


STAGE_COLUMNS: "tuple[Column[MeasuredStage], ...]" = (
    Column("devices", lambda stage: list(stage.devices)),
    Column("predicted_forward_s", lambda stage: stage.predicted.forward_s),
    Column("predicted_backward_s", lambda stage: stage.predicted.backward_s),
    Column("measured_forward_s", lambda stage: stage.measured.forward_s),
    Column("measured_backward_s", lambda stage: stage.measured.backward_s),
)


GROUP_COLUMNS: "tuple[Column[TrainedGroup], ...]" = (
    Column("names", lambda group: list(group.globs)),
    Column("num_parameters", lambda group: len(group.names)),
    Column("num_elements", lambda group: group.num_elements),
    Column("lr_factor", lambda group: group.lr_factor),
    Column("weight_decay", lambda group: group.weight_decay),
)
"""Without names, the rest; without a weight decay, that of the launch."""


def launch_tables(report: "LaunchReport") -> tuple[Table, ...]:
    """Predicted and measured times of the iteration, of each stage and of each device."""
    times = [
        _Time("iteration", report.predicted_iteration_s, report.measured_iteration_s),
        *_minibatch(report),
    ]
    for s, stage in enumerate(report.stages):
        before, after = stage.predicted, stage.measured
        times.append(_Time(f"stage {s} forward", before.forward_s, after.forward_s))
        times.append(_Time(f"stage {s} backward", before.backward_s, after.backward_s))

    def ratio(time: _Time) -> str:
        if not report.comparable or not time.measured_s:
            return "not comparable"
        return f"{time.predicted_s / time.measured_s:.3f}"

    columns: list[Column[_Time]] = [
        Column("", lambda time: time.name, "", left=True),
        Column("", lambda time: time.predicted_s, "predicted", format_seconds),
        Column("", lambda time: time.measured_s, "measured", format_seconds),
        Column("", ratio, "predicted/measured"),
    ]
    title = f"Predicted and measured; operator times: {report.times}"
    devices = "Devices, per iteration: predicted / measured"
    return (
        table(title, times, columns),
        table(devices, report.devices, _device_columns(report.devices)),
    )


def _device_columns(devices: "Sequence[MeasuredDevice]") -> "tuple[Column[MeasuredDevice], ...]":
    """Predicted beside measured figures of a device; with the peak of tensors if it was watched."""
    watched = any(device.live_bytes is not None for device in devices)
    peaks = "of tensors / of the process" if watched else "of the process"

    def memory(device: "MeasuredDevice") -> str:
        live = [] if device.live_bytes is None else [device.live_bytes]
        sizes_bytes = (device.predicted.memory.tensor_bytes, *live, device.peak_bytes)
        return " / ".join(map(format_bytes, sizes_bytes))

    def host_memory(device: "MeasuredDevice") -> str | None:
        sizes_bytes = device.predicted.memory.host_bytes, device.host_bytes
        return " / ".join(map(format_bytes, sizes_bytes)) if any(sizes_bytes) else None

    def pair(predicted_s: float, measured_s: float) -> str:
        return f"{format_seconds(predicted_s)} / {format_seconds(measured_s)}"

    return (
        Column("", lambda one: f"rank {one.rank} on {one.predicted.name}", "", left=True),
        Column("", lambda one: pair(one.predicted.compute_s, one.compute_s), "compute"),
        Column("", lambda one: pair(one.predicted.communication_s, one.communication_s),
               "communication", gives_way=2),
        Column("", lambda one: pair(one.predicted.idle_s, one.idle_s), "idle", gives_way=1),
        Column("", memory, f"peak memory (without reserve / {peaks})"),
        Column("", host_memory, "in host memory", sparse=True),
    )  # fmt: skip


def _minibatch(report: "LaunchReport") -> tuple[_Time, ...]:
    """The times of one minibatch, if each leads to a step."""
    number = report.num_minibatches
    if number is None:
        return ()
    predicted_s, measured_s = report.predicted_iteration_s, report.measured_iteration_s
    return (_Time("minibatch", predicted_s / number, measured_s / number),)


def loss_lines(report: "LaunchReport") -> tuple[str, ...]:
    """The losses, the number of steps, and the first and last value."""
    values = " -> ".join(
        f"{loss:.4f}" if math.isfinite(loss) else "not finite"
        for loss in (report.loss[0], report.loss[-1])
    )
    last = report.evaluations[-1:]
    return (
        *chosen_losses(report.losses),
        *_group_line(report.groups),
        f"{count(report.steps, 'step')}, loss {values}",
        *(f"evaluation after {count(one.step, 'step')}: {figures(one)}" for one in last),
    )


def _group_line(groups: "Sequence[TrainedGroup]") -> list[str]:
    """The groups of parameters, in one line; none where the user names none."""
    said = []
    for group in groups:
        decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
        factor = "" if group.lr_factor == 1 else f", learning rate x {group.lr_factor:g}"
        said.append(
            f"{' '.join(group.globs) or 'the rest'}: {count(len(group.names), 'parameter')} with"
            f" {count(group.num_elements, 'element')}{factor}{decay}"
        )
    return [f"parameter groups: {'; '.join(said)}"] if said else []


def figures(evaluation: "Evaluation") -> str:
    """Such as "loss 0.4132, accuracy 0.8810"."""
    return ", ".join(f"{name} {value:.4f}" for name, value in evaluation.figures.items())


def launch_json(report: "LaunchReport") -> dict[str, Any]:
    """The object that `launch --json` prints."""
    return {
        "steps": report.steps,
        "losses": loss_json(report.losses),
        "param_groups": json_rows(report.groups, GROUP_COLUMNS),
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
        "predicted_live_bytes": [device.predicted.memory.tensor_bytes for device in report.devices],
        "host_bytes": [device.host_bytes for device in report.devices],
        "predicted_host_bytes": [device.predicted.memory.host_bytes for device in report.devices],
        "comparable": report.comparable,
        "operator_times": report.times,
        "notes": list(report.notes),
        "stages": json_rows(report.stages, STAGE_COLUMNS),
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
