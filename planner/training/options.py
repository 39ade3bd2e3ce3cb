"""Options of a training besides its loop, and `TrainingRequest`, which holds all options."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.artefacts.options import LossOptions
from planner.launcher.failures.requests import SAVE_SIGNALS
from planner.launcher.options import DeviceKind, Loop, check
from planner.support.errors import FileError, OptionError
from planner.support.options import Options, option, options_from

if TYPE_CHECKING:
    from planner.artefacts.plan import Plan


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
    save_signal: str | None = option(
        "Signal upon which a training saves and ends, as upon SIGTERM; Slurm's --signal sends one.",
        choices=SAVE_SIGNALS, parse=lambda text: text.removeprefix("SIG"),
    )  # fmt: skip
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
    allow_nan: bool = option("Write weights that are not finite, too.", False)


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """What a user asks of a training.

    Attributes:
        plan: strategy.json.
        path: of strategy.json; messages name it, and the model is relative to its folder.
        loop: how it trains.
        loss: functions and dimensions of classes that replace those of the plan.
        launching: where it runs.
        checkpoints: to write and to go on from.
    """

    plan: "Plan"
    path: Path
    loop: Loop
    loss: LossOptions
    launching: Launching
    checkpoints: Checkpoints

    @property
    def options(self) -> tuple[Options, ...]:
        """All options, which the ranks compare."""
        return self.loop, self.loss, self.launching, self.checkpoints


def options_of(
    function: str, how: Mapping[str, Any], without: Collection[str] = ()
) -> tuple[Loop, LossOptions, Launching, Checkpoints]:
    """The options of a training from the keyword arguments of a function.

    Args:
        function: its name, for the message.
        without: options that it does not take.

    Raises:
        TypeError: if it takes no option of that name.
        OptionError: if a value is wrong.
    """
    kinds = (Loop, LossOptions, Launching, Checkpoints)
    loop, loss, launching, checkpoints = options_from(
        function, how, *kinds, without={"output", *without}
    )
    return loop, loss, launching, checkpoints


def check_options(loop: Loop, checkpoints: Checkpoints) -> None:
    """Raises the first contradiction between options, before any file is read.

    Raises:
        PlannerError: a message for the user.
    """
    try:
        check(loop)
        check_folder(checkpoints)
    except OptionError as error:
        if loop.config is None:
            raise
        raise OptionError(
            f"{error} (with the options of {loop.config.rpartition(' ')[0]})"
        ) from None


def check_folder(checkpoints: Checkpoints) -> None:
    """Refuses a folder that cannot be there, and what has no meaning without a folder.

    Raises:
        OptionError: if --checkpoint-every or --save-signal stands alone.
        FileError: if no folder can be there.
    """
    folder = checkpoints.checkpoint
    if folder is None:
        for flag, value in (
            ("--checkpoint-every", checkpoints.checkpoint_every),
            ("--save-signal", checkpoints.save_signal),
        ):
            if value is not None:
                raise OptionError(
                    f"{flag} {value}: expected a folder for the checkpoints; give --checkpoint DIR,"
                    " too"
                )
        return
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    if not there.is_dir():
        raise FileError(f"{folder}: expected a folder for checkpoints, {there} is none")
    if not os.access(there, os.W_OK | os.X_OK):
        raise FileError(
            f"{folder}: expected a folder for checkpoints, but {there} takes no files of yours;"
            " name another one"
        )
