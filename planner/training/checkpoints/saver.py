"""`Saver`: checkpoints written while the training goes on.

After a step that is saved, a rank copies its tensors in memory, and the training waits for nothing
else. A thread of each rank then writes them, in a process group of its own, since the training uses
the others meanwhile. Rank 0 names the checkpoint when all ranks are done. A rank writes one
checkpoint after the other; the copies stay, so that the next one needs no new memory.
The plan does not count that memory.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.launcher.job import TrainingJob
from planner.launcher.store import TIMEOUT
from planner.model.metadata import metadata_of
from planner.model.record import ANNOTATION_KEY
from planner.support.errors import LaunchError, PlannerError, Stopped
from planner.support.reading import relative
from planner.support.version import __version__
from planner.training.checkpoints import folder as folders
from planner.training.checkpoints.content import Content, optimizer_name, restore
from planner.training.checkpoints.folder import Checkpoint, Record
from planner.training.checkpoints.held import Held
from planner.training.options import Checkpoints
from planner.training.trainer import Trainer


def resume(trainer: Trainer, job: TrainingJob, start: Checkpoint) -> None:
    """Goes on from a checkpoint; all ranks call it.

    Raises:
        FileError: if the checkpoint does not fit this device, or is damaged.
        LaunchError: if the ranks do not see the same one.
    """
    seen = trainer.groups.gather((start.record.step, start.record.files))
    for rank, (step, files) in enumerate(seen):
        if (step, files) != seen[0]:
            raise LaunchError(
                f"{start.path}: rank {rank} sees a checkpoint of step {step} there, rank 0 another"
                f" one of step {seen[0][0]}; give a folder that all hosts share"
            )
    restore(trainer, job, start)


def _model_file(job: TrainingJob) -> Path:
    """The file that a training began with: not the annotated one, if the user's own is there."""
    path = job.model.path
    if job.plan.model_path is None or ANNOTATION_KEY not in metadata_of(path):
        return path
    own = path.parent / job.plan.model_path
    return own if own.is_file() else path


class Saver:
    """Writes checkpoints of one training; every rank has one, and calls the same methods.

    Args:
        trainer: of this rank.
        job: what it trains.
        checkpoints: with a folder.
        last: the last step of the training, which is saved in any case.

    Raises:
        FileError: if the remains of an earlier run cannot be removed.
    """

    def __init__(
        self, trainer: Trainer, job: TrainingJob, checkpoints: Checkpoints, last: int
    ) -> None:
        from planner.training.checkpoints.files import say_nothing_of_being_alone

        assert checkpoints.checkpoint is not None
        self._trainer, self._job, self._folder = trainer, job, checkpoints.checkpoint
        self._every, self._keep = checkpoints.checkpoint_every, checkpoints.checkpoint_keep
        self._last = last
        self._copies: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failed: BaseException | None = None
        self._rank = job.plan.ranks.index(trainer.groups.device)
        names = trainer.groups.gather(optimizer_name(trainer.optimizer))
        self._optimizer = next((name for name in names if name is not None), None)
        say_nothing_of_being_alone()
        self._group = None
        if len(names) > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        if self._rank == 0:
            folders.tidy(self._folder)

    def after(self, step: int) -> None:
        """Saves, if it is time to, and says of the save before whether it failed.

        Args:
            step: number of steps done.

        Raises:
            PlannerError: if a checkpoint could not be written.
            Stopped: if another rank is gone.
        """
        if self._failed is not None:
            self.finish()
        if step == self._last or (self._every is not None and step % self._every == 0):
            self.save(step)

    def save(self, step: int) -> None:
        """Saves after a step, whether it is time to or not; all ranks do, after the same one.

        Raises:
            PlannerError: if the checkpoint before could not be written.
            Stopped: if another rank is gone.
        """
        self.finish()
        held = self._copied(Content(self._trainer, self._job).to_save())
        arguments = (step, held, dict(self._trainer.extras()))
        # Not async_save: it ends before the folder has its name, and its future is not that of the
        # checkpoint.
        self._thread = Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits until the last checkpoint is written.

        Raises:
            PlannerError: if it could not be written.
            Stopped: if another rank is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if isinstance(failed, PlannerError):
            raise failed
        if isinstance(failed, RuntimeError):
            raise Stopped(f"rank {self._rank} stops because another rank has") from failed
        if failed is not None:
            raise failed

    def _copied(self, held: Mapping[str, Held]) -> dict[str, Held]:
        """Copies of what this device writes, in memory of the CPU that is kept for them."""
        written, copies = {name: one for name, one in held.items() if one.writes}, {}
        for name, one in written.items():
            old = self._copies.get(name)
            if old is None or old.shape != one.values.shape or old.dtype != one.values.dtype:
                old = torch.empty(one.values.shape, dtype=one.values.dtype)
            copies[name] = old.copy_(one.values)
        self._copies = copies
        return {name: replace(one, values=copies[name]) for name, one in written.items()}

    def _run(self, step: int, held: Mapping[str, Held], extras: dict[str, Any]) -> None:
        """The thread of one checkpoint; its error is kept for the training."""
        try:
            self._write(step, held, extras)
        except BaseException as error:  # `finish` raises it
            self._failed = error

    def _write(self, step: int, held: Mapping[str, Held], extras: dict[str, Any]) -> None:
        from planner.training.checkpoints.files import write

        part = self._begun(step)
        tensors = write(held, part, self._group)
        if self._rank > 0:
            return
        needed: dict[str, int] = {}
        for place in (place for one in tensors.values() for place in one.parts):
            needed[place.file] = max(needed.get(place.file, 0), place.offset + place.length)
        model = self._job.model
        record = Record(
            step=step,
            model_path=relative(_model_file(self._job), self._folder),
            model_hash=model.hash,
            tie=model.tie,
            untie=model.untie,
            optimizer=self._optimizer,
            num_ranks=len(self._job.plan.ranks),
            tensors=tensors,
            files=folders.sizes(part, needed),
            versions={"planner": __version__, "torch": torch.__version__},
            extras=extras,
        )
        folders.publish(part, record)
        folders.prune(self._folder, self._keep)

    def _begun(self, step: int) -> Path:
        """The folder to fill, which rank 0 makes before any other rank goes on."""
        made: list[Path | PlannerError | None] = [None]
        if self._rank == 0:
            try:
                made = [folders.begin(self._folder, step)]
            except PlannerError as error:
                made = [error]
        if self._group is not None:
            dist.broadcast_object_list(made, src=0, group=self._group)
        (part,) = made
        if isinstance(part, PlannerError):
            raise part
        assert part is not None
        return part
