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
from planner.launcher.rendezvous import TIMEOUT
from planner.model.record import ANNOTATION_KEY
from planner.model.wire import metadata_of
from planner.support.errors import PlannerError, Stopped
from planner.support.reading import relative
from planner.support.version import __version__
from planner.training.checkpoints import folder as folders
from planner.training.checkpoints.content import Content, optimizer_name
from planner.training.checkpoints.folder import CheckpointRecord
from planner.training.checkpoints.held import Held
from planner.training.checkpoints.writer import FolderLock


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
        content: of this device.
        folder: for the checkpoints.
        keep: number of them that stay, the newest ones.

    Raises:
        FileError: if another training writes there, or the remains of an earlier one cannot be
            removed.
    """

    def __init__(self, content: Content, folder: Path, keep: int) -> None:
        from planner.training.checkpoints.files import say_nothing_of_being_alone

        self._content, self._folder, self._keep = content, folder, keep
        self._copies: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._failed: BaseException | None = None
        self._rank = content.job.plan.ranks.index(content.groups.device)
        names = content.groups.gather(optimizer_name(content.optimizer))
        self._optimizer = next((name for name in names if name is not None), None)
        say_nothing_of_being_alone()
        self._group = None
        if len(names) > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._lock: FolderLock | None = None
        if self._rank == 0:
            self._lock = FolderLock(self._folder)
            folders.tidy(self._folder)

    def close(self) -> None:
        """Lets other trainings write to the folder, after the last checkpoint."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def has_failed(self) -> bool:
        """Whether the last checkpoint could not be written, which `finish` says."""
        return self._failed is not None

    def save(self, step: int, extras: Mapping[str, Any]) -> None:
        """Saves after a step; all ranks do, after the same one.

        Args:
            step: number of steps done.
            extras: as in `CheckpointRecord`.

        Raises:
            PlannerError: if the checkpoint before could not be written.
            Stopped: if another rank is gone.
        """
        self.finish()
        # Not async_save: it ends before the folder has its name, and its future is not that of the
        # checkpoint.
        arguments = (step, self._copied(self._content.to_save()), dict(extras))
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
        model = self._content.job.model
        record = CheckpointRecord(
            step=step,
            model_path=relative(_model_file(self._content.job), self._folder),
            model_hash=model.hash,
            tie=model.tie,
            untie=model.untie,
            optimizer=self._optimizer,
            num_ranks=len(self._content.job.plan.ranks),
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
