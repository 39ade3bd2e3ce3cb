"""Tensors written and read by torch.distributed.checkpoint, which takes a second to load and is
imported by ranks that write or read a checkpoint.

It writes one file per rank, and an index of its own, which is a pickle: other programs can read a
checkpoint by it, and here nobody does, since to read one may run code. The record has the same
places (`folder.TensorPlace`), so a reader needs no other rank, and each reads its own tensors only.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
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
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planner.support.errors import FileError, LaunchError
from planner.training.checkpoints.folder import TensorPlace

_ALONE = "torch.distributed is disabled, unavailable or uninitialized"


def say_nothing_of_being_alone() -> None:
    """Turns off the warning that one process alone writes or reads, in all threads."""
    warnings.filterwarnings("ignore", message=_ALONE)


def write(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> dict[str, TensorPlace]:
    """Writes the tensors of all ranks; each rank gives those that no other one gives.

    Args:
        tensors: by name, in memory of the CPU.
        folder: that rank 0 has made.
        group: of all ranks, which nobody else uses meanwhile; None for one process alone.

    Returns:
        The places of the tensors of all ranks, by name.

    Raises:
        LaunchError: if a rank could not write.
        RuntimeError: if a rank is gone.
    """
    # The tensors are copies in memory already, so nothing is copied ahead.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        index = save(
            dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None
        )
    except CheckpointException as error:
        raise _explained(error, folder) from None
    return {
        name: _place(about, index.storage_data[MetadataIndex(name, about.chunks[0].offsets)])
        for name, about in index.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def _place(about: TensorStorageMetadata, info: _StorageInfo) -> TensorPlace:
    dtype = str(about.properties.dtype).removeprefix("torch.")
    return TensorPlace(tuple(about.size), dtype, info.relative_path, info.offset, info.length)


def _explained(error: CheckpointException, folder: Path) -> LaunchError:
    """The first rank that could not write, and why."""
    rank, (cause, _) = min(error.failures.items())
    why = (cause.strerror if isinstance(cause, OSError) else None) or f"{cause}"
    return LaunchError(
        f"{folder.parent}: rank {rank} cannot write a checkpoint: {why}; make room for it, or name"
        " another folder"
    )


def fill(tensors: Mapping[str, Tensor], folder: Path, places: Mapping[str, TensorPlace]) -> None:
    """Reads tensors of a checkpoint.

    Args:
        tensors: by name, of the shapes and types that the checkpoint says; they are filled.
        folder: of the checkpoint.
        places: of all of its tensors.

    Raises:
        FileError: if the files are not what they were when they were written.
    """
    if not tensors:
        return
    with warnings.catch_warnings():
        say_nothing_of_being_alone()
        try:
            reader = _Reader(folder, {name: places[name] for name in tensors})
            load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            _, (cause, _) = min(error.failures.items())
            raise FileError(
                f"{folder}: damaged: tensors cannot be read from its files"
                f" ({type(cause).__name__}); take another checkpoint"
            ) from cause


class _Reader(FileSystemReader):
    """Reads tensors whose places are known, so that the index in the folder is not unpickled.

    Args:
        folder: of the checkpoint.
        places: by name.
    """

    def __init__(self, folder: Path, places: Mapping[str, TensorPlace]) -> None:
        super().__init__(folder)
        self._places = places

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, from the places."""
        tensors: dict[str, STORAGE_TYPES] = {}
        where = {}
        for name, place in self._places.items():
            start, size = torch.Size([0] * len(place.shape)), torch.Size(place.shape)
            properties = TensorProperties(dtype=getattr(torch, place.dtype))
            chunk = ChunkStorageMetadata(offsets=start, sizes=size)
            tensors[name] = TensorStorageMetadata(properties, size, [chunk])
            where[MetadataIndex(name, start)] = _StorageInfo(place.file, place.offset, place.length)
        return Metadata(tensors, storage_data=where, storage_meta=StorageMeta(load_id=self.load_id))
