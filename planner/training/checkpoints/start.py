"""The checkpoint that a training goes on from."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from planner.launcher.job import TrainingJob
from planner.launcher.trained_groups import settings
from planner.support.errors import FileError, LaunchError
from planner.training.checkpoints.folder import Checkpoint, find, latest, name_of, read
from planner.training.options import Checkpoints

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
GROUPS = "param_groups"
"""Among the extras of a checkpoint: the `settings` of its groups."""


def start_of(
    checkpoints: Checkpoints,
    environment: Mapping[str, str] = os.environ,
    *,
    restarted: bool = False,
) -> Checkpoint | None:
    """The checkpoint that a launch goes on from; None if it starts anew.

    A launch that torchrun has started again goes on from the newest one that it has written, if
    there is one.

    Args:
        environment: says whether torchrun has started this process again.
        restarted: whether it has started another rank again.

    Raises:
        FileError: if there is no whole checkpoint where the user says, or the folder for new ones
            has later ones, which would be taken for those of this training.
    """
    restarted = restarted or int(environment.get(RESTARTS, "0")) > 0
    if checkpoints.checkpoint is not None and restarted:
        own = latest(checkpoints.checkpoint)
        if own is not None:
            return read(own)
    start = None if checkpoints.resume is None else find(checkpoints.resume)
    if checkpoints.checkpoint is not None:
        check_later(checkpoints.checkpoint, -1 if start is None else start.record.step)
    return start


def check_later(folder: Path, step: int) -> None:
    """Refuses a folder that has checkpoints of later steps than a training begins with."""
    last = latest(folder)
    if last is None or read(last).record.step <= step:
        return
    if step < 0:
        raise FileError(
            f"{folder}: has checkpoints of another launch, the last one {last.name}; go on from it"
            f" with --resume {shlex.quote(str(folder))}, or name another folder"
        )
    raise FileError(
        f"{folder}: has {last.name}, of a later step than {name_of(step)} to go on from; delete the"
        " later ones, or write to another folder"
    )


def check_fits(start: Checkpoint, job: TrainingJob) -> None:
    """Refuses a checkpoint that the training of a job cannot go on from.

    Raises:
        FileError: if it is one of another model, of other parameters of it, or of other groups.
    """
    path, record, model = start.path, start.record, job.model
    if record.model_hash != model.hash:
        raise FileError(
            f"{path}: a checkpoint of model {record.model_hash[:12]}, but {model.path} is"
            f" {model.hash[:12]}; give the strategy of the same model, or another folder"
        )
    saved = record.trained
    trained = {one.name for one in model.graph.parameters if one.trainable}
    for only, where in ((trained - saved, "the strategy"), (saved - trained, "the checkpoint")):
        if only:
            raise FileError(
                f"{path}: of another set of trained parameters: {min(only)!r} is trained by"
                f" {where} alone ({len(only)} such); plan with the same --train, --freeze, --tie"
                " and --untie"
            )
    # Checkpoints of before there were groups say nothing of them.
    before = {name: tuple(pair) for name, pair in record.extras.get(GROUPS, {}).items()}
    now = settings(job.groups)
    other = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if other:
        had, has = (_setting(held.get(other[0])) for held in (before, now))
        raise FileError(
            f"{path}: of other groups of parameters: {other[0]!r} was trained with {had}, and"
            f" this launch has {has} ({len(other)} such); give the same --no-weight-decay and"
            " --param-group"
        )


def _setting(pair: tuple[float, float | None] | None) -> str:
    """The options of a parameter, as they are written."""
    factor, decay = (1.0, None) if pair is None else pair
    own = "" if decay is None else f", weight_decay={decay:g}"
    return f"lr_factor={factor:g}{own}"


def check_left(start: Checkpoint, steps: int) -> None:
    """Refuses a checkpoint after which no step is left.

    Args:
        steps: of the whole training, from the very first.

    Raises:
        LaunchError: if all steps are done.
    """
    path, record = start.path, start.record
    if record.step >= steps:
        raise LaunchError(
            f"{path}: {record.step} steps are done, and --steps counts from the very first one:"
            f" expected more than {record.step}, got {steps}"
        )
