"""What the tensors of a process take while an iteration runs.

On CUDA the allocator knows. On a CPU storages are tracked (`StorageTracker`), which slows an
iteration down, so it is done in one of its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from planner.launch.feed import Batch
from planner.profilers.storages import StorageTracker


class Watch(Protocol):
    """Knows how much memory is in use."""

    def peak_bytes(self) -> int:
        """The most bytes that tensors took since this was asked before."""


class CudaPeaks:
    """What PyTorch's allocator for CUDA has given out."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most bytes since this was asked before."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


@contextmanager
def watching(device: str, there: Iterable[Tensor]) -> Iterator[Watch]:
    """A context in which memory is watched.

    Args:
        device: in torch's words.
        there: the tensors that stay from iteration to iteration.
    """
    if device != "cpu":
        yield CudaPeaks()
        return
    with StorageTracker(there) as tracker:
        yield tracker


class Copies(Mapping[int, Batch]):
    """Data that is copied when a microbatch asks for it, and gone when it is through with it: where
    data waits before is the feed's matter.

    Args:
        batches: by microbatch.
    """

    def __init__(self, batches: Mapping[int, Batch]) -> None:
        self._batches = batches

    def __getitem__(self, microbatch: int) -> Batch:
        batch = self._batches[microbatch]
        target = None if batch.target is None else batch.target.clone()
        return Batch({name: tensor.clone() for name, tensor in batch.inputs.items()}, target)

    def __iter__(self) -> Iterator[int]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
