"""Options of a training besides its loop: where it runs, and its checkpoints."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from planner.launcher.options import DeviceKind
from planner.support.options import Options, option


@dataclass(frozen=True, slots=True)
class Launching(Options):
    """Where a training runs, and what is measured of it."""

    model: Path | None = option("ONNX file, if it is not where the strategy says.", per_rank=True)
    device: DeviceKind = option(
        "Kind of device to run on: GPUs (cuda), CPUs, or the kind in the strategy (auto).",
        DeviceKind.AUTO,
    )
    trace: Path | None = option(
        "Write a measured iteration as a trace for Perfetto to this file.", per_rank=True
    )
    track_memory: bool = option("Track the memory of one more step, which is slow.", False)


@dataclass(frozen=True, slots=True)
class Checkpoints(Options):
    """The checkpoints to write and to go on from."""

    checkpoint: Path | None = option(
        "Folder for checkpoints. One is written at the end.", metavar="DIR", per_rank=True
    )
    checkpoint_every: int | None = option("Write a checkpoint after every N steps, too.", least=1)
    checkpoint_keep: int = option("Number of checkpoints to keep, the newest ones.", 3, least=1)
    resume: Path | None = option(
        "Go on from a checkpoint, or from the newest one in a folder.", metavar="DIR",
        per_rank=True,
    )  # fmt: skip


class WeightsForm(StrEnum):
    """The form of a model that is written with its weights."""

    EVALUATION = "evaluation"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class WeightsOptions(Options):
    """How a trained model is written."""

    form: WeightsForm = option(
        "BatchNormalization by running statistics and no Dropout (evaluation), or both as in the"
        " model's file (training).",
        WeightsForm.EVALUATION,
    )
    model: Path | None = option(
        "ONNX file that was trained, if it is not where the checkpoint says."
    )
