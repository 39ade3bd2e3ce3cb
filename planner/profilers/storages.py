"""Live bytes of tensors. On CUDA the allocator counts them. On a CPU a tracker counts storages; it
slows everything down, so nothing is timed meanwhile.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.support.contexts import holding

_apart: ContextVar[bool] = ContextVar("apart", default=False)


def tracked_apart() -> AbstractContextManager[None]:
    """A context whose tensors a tracker of a CPU does not count: those of the host's memory."""
    return holding(_apart, True)


class MemoryTracker(Protocol):
    """Knows the memory in use."""

    def peak_bytes(self) -> int:
        """The most bytes that tensors took since the last call; starts a new peak."""

    def now_bytes(self) -> int:
        """The bytes that tensors take now."""


@contextmanager
def watching(device: str, there: Iterable[Tensor]) -> Iterator[MemoryTracker]:
    """A context in which memory is watched.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        there: the tensors that exist already.
    """
    if device != "cpu":
        yield CudaMemory(device)
        return
    with StorageTracker(there) as tracker:
        yield tracker


class CudaMemory:
    """Memory that PyTorch's allocator for CUDA has given out.

    Args:
        device: "cuda" or "cuda:N".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.peak_bytes()

    def peak_bytes(self) -> int:
        """The most bytes given out since the last call; starts a new peak."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def now_bytes(self) -> int:
        """The bytes given out now."""
        return torch.cuda.memory_allocated(self._device)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages of tensors while it is entered.

    A storage counts from the operator that made it until nothing refers to it any more. Buffers
    that kernels take and free while they run are not seen.

    Args:
        there: the tensors that exist already.
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
        """Runs an operator and counts the storages that it made."""
        made = func(*args, **(kwargs or {}))
        for one in () if _apart.get() else tree_leaves(made):
            if isinstance(one, Tensor):
                self._count(one)
        return made

    def peak_bytes(self) -> int:
        """The most bytes that storages took since the last call; starts a new peak."""
        peak, self._peak_bytes = self._peak_bytes, self._bytes
        return peak

    def now_bytes(self) -> int:
        """The bytes that storages take now."""
        return self._bytes

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # The address of a storage is unique while it lives. A new one may get the same address, but
        # only after the finalizer of the old one has run, which takes the address out of the set.
        # The finalizer holds no storage: it knows the address and the size only.
        address, size_bytes = storage._cdata, storage.nbytes()
        if address in self._alive:
            return
        self._alive.add(address)
        self._bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._bytes)
        weakref.finalize(storage, self._forget, address, size_bytes).atexit = False

    def _forget(self, address: int, size_bytes: int) -> None:
        self._alive.discard(address)
        self._bytes -= size_bytes
