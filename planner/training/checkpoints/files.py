"""Tensors written and read by torch.distributed.checkpoint, which takes a second to load and is
imported by ranks that write or read a checkpoint.

It writes one file per rank, and an index of its own, which is a pickle: other programs can read a
checkpoint by it, and here nobody does, since to read one may run code. The record has the same
places (`folder.SavedTensor`), so a reader needs no other rank. Each device writes the boxes that it
has and reads the boxes that it needs, whatever boxes other devices wrote: one saved box after the
other is in memory meanwhile.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planner.support.errors import FileError, LaunchError
from planner.training.checkpoints.folder import Checkpoint, SavedTensor, TensorPlace
from planner.training.checkpoints.held import Held, whole

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


def say_nothing_of_being_alone() -> None:
    """Turns off the warning that one process alone writes or reads, in all threads."""
    warnings.filterwarnings("ignore", message=_ALONE)


def _chunks(held: Held) -> list[tuple[ChunkStorageMetadata, Tensor]]:
    """The boxes of a tensor in torch's words, and their values."""
    return [
        (ChunkStorageMetadata(torch.Size(start), part.shape), part)
        for start, part in held.parts().items()
    ]


# ------------------------------------------------------------------------------------ writing


class _Writing(DefaultSavePlanner):
    """Writes each box of `Held`s as one chunk of its tensor."""

    def create_local_plan(self) -> SavePlan:
        """The boxes of this rank."""
        items: list[WriteItem] = []
        self._parts: dict[MetadataIndex, Tensor] = {}
        for name, held in self.state_dict.items():
            properties = TensorProperties(dtype=held.values.dtype)
            for chunk, part in _chunks(held):
                index = MetadataIndex(name, chunk.offsets)
                about = TensorWriteData(chunk, properties, torch.Size(held.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=about))
                self._parts[index] = part
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values of a box."""
        return self._parts[index]


def write(
    held: Mapping[str, Held], folder: Path, group: dist.ProcessGroup | None
) -> dict[str, SavedTensor]:
    """Writes the tensors of all ranks; each rank gives the boxes that no other one gives.

    Args:
        held: by name, in memory of the CPU.
        folder: that rank 0 has made.
        group: of all ranks, which nobody else uses meanwhile; None for one process alone.

    Returns:
        The tensors of all ranks with the places of their boxes, by name.

    Raises:
        LaunchError: if a rank could not write.
        RuntimeError: if a rank is gone.
    """
    # The tensors are copies in memory already, so nothing is copied ahead.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    planner = _Writing(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        index = save(
            dict(held), storage_writer=writer, planner=planner, process_group=group,
            no_dist=group is None,
        )  # fmt: skip
    except CheckpointException as error:
        raise _explained(error, folder) from None
    return {
        name: _saved(name, about, index.storage_data)
        for name, about in index.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def _saved(
    name: str, about: TensorStorageMetadata, where: Mapping[MetadataIndex, _StorageInfo]
) -> SavedTensor:
    parts = []
    for chunk in about.chunks:
        info = where[MetadataIndex(name, chunk.offsets)]
        parts.append(
            TensorPlace(
                tuple(chunk.offsets), tuple(chunk.sizes),
                info.relative_path, info.offset, info.length,
            )
        )  # fmt: skip
    dtype = str(about.properties.dtype).removeprefix("torch.")
    return SavedTensor(tuple(about.size), dtype, tuple(parts))


def _explained(error: CheckpointException, folder: Path) -> LaunchError:
    """The first rank that could not write, and why."""
    rank, (cause, _) = min(error.failures.items())
    why = (cause.strerror if isinstance(cause, OSError) else None) or f"{cause}"
    return LaunchError(
        f"{folder.parent}: rank {rank} cannot write a checkpoint: {why}; make room for it, or name"
        " another folder"
    )


# ------------------------------------------------------------------------------------ reading


class _Reading(DefaultLoadPlanner):
    """Reads the boxes of `Held`s out of whatever boxes were saved."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes `Held`s, which torch's own planner does not know."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What the boxes have in common with the saved ones."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        self._parts: dict[MetadataIndex, Tensor] = {}
        for name, held in self.state_dict.items():
            about = self.metadata.state_dict_metadata[name]
            assert isinstance(about, TensorStorageMetadata)
            chunks = _chunks(held)
            items += create_read_items_for_chunk_list(name, about, [chunk for chunk, _ in chunks])
            self._parts |= {MetadataIndex(name, chunk.offsets): part for chunk, part in chunks}
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The values of a box."""
        return self._parts[index]


def fill(held: Mapping[str, Held], start: Checkpoint) -> None:
    """Reads tensors of a checkpoint, as far as a device has them.

    Args:
        held: by name, of the shapes that the checkpoint has; their values are filled.

    Raises:
        FileError: if the files are not what they were when they were written.
    """
    if not held:
        return
    with warnings.catch_warnings():
        say_nothing_of_being_alone()
        try:
            reader = _Reader(start.path, {name: start.record.tensors[name] for name in held})
            planner = _Reading(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(dict(held), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            _, (cause, _) = min(error.failures.items())
            raise FileError(
                f"{start.path}: damaged: tensors cannot be read from its files"
                f" ({type(cause).__name__}); take another checkpoint"
            ) from cause


def whole_tensors(start: Checkpoint, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a checkpoint, whole, by name.

    Raises:
        FileError: if the files are not what they were when they were written.
    """
    tensors = {name: start.record.tensors[name].empty() for name in names}
    fill({name: whole(tensor) for name, tensor in tensors.items()}, start)
    return tensors


class _Reader(FileSystemReader):
    """Reads tensors whose places are known, so that the index in the folder is not unpickled.

    Args:
        folder: of the checkpoint.
        saved: the tensors by name.
    """

    def __init__(self, folder: Path, saved: Mapping[str, SavedTensor]) -> None:
        super().__init__(folder)
        self._saved = saved

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, from the places."""
        tensors: dict[str, STORAGE_TYPES] = {}
        where = {}
        for name, saved in self._saved.items():
            properties = TensorProperties(dtype=getattr(torch, saved.dtype))
            chunks = []
            for part in saved.parts:
                start = torch.Size(part.start)
                chunks.append(ChunkStorageMetadata(start, torch.Size(part.shape)))
                info = _StorageInfo(part.file, part.offset, part.length)
                where[MetadataIndex(name, start)] = info
            tensors[name] = TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
        return Metadata(tensors, storage_data=where, storage_meta=StorageMeta(load_id=self.load_id))
