"""What the tensors of a process take while an iteration runs.

On CUDA the allocator knows. On a CPU nobody does, so every operator's results are looked at: a
storage counts from the operator that made it until nothing refers to it any more. What kernels take
for themselves while they run is not seen. Looking slows an iteration down, so it is done in one of
its own.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.launch.feed import Batch


class Watch(Protocol):
    """Knows how much memory is in use."""

    def peak_bytes(self) -> int:
        """The most bytes that tensors took since this was asked before."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages of tensors on a CPU.

    Args:
        there: tensors that there are already.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: set[int] = set()
        self._bytes = self._peak_bytes = 0
        for tensor in there:
            self._count(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator and counts what it made."""
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._count(one)
        return made

    def peak_bytes(self) -> int:
        """The most bytes that storages took since this was asked before."""
        peak, self._peak_bytes = self._peak_bytes, self._bytes
        return peak

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # A storage that ends gives its address free, and says so before.
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self._bytes += size
        self._peak_bytes = max(self._peak_bytes, self._bytes)
        weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._bytes -= size


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
