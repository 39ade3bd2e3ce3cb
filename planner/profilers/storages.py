"""Live bytes of tensors. On CUDA the allocator knows them. On a CPU storages are tracked, which
slows everything down, so it is done where no time is taken.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(Protocol):
    """Knows how much memory is in use."""

    def peak_bytes(self) -> int:
        """The most bytes that tensors took since this was asked before."""

    def now_bytes(self) -> int:
        """What they take now."""


@contextmanager
def watching(device: str, there: Iterable[Tensor]) -> Iterator[Watch]:
    """A context in which memory is watched.

    Args:
        device: in torch's words.
        there: the tensors that there are already.
    """
    if device != "cpu":
        yield CudaMemory(device)
        return
    with StorageTracker(there) as tracker:
        yield tracker


class CudaMemory:
    """What PyTorch's allocator for CUDA has given out.

    Args:
        device: in torch's words.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.peak_bytes()

    def peak_bytes(self) -> int:
        """The most bytes since this was asked before."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def now_bytes(self) -> int:
        """What is given out now."""
        return torch.cuda.memory_allocated(self._device)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages of tensors while it is entered: a storage counts from the
    operator that made it until nothing refers to it any more. What kernels take for themselves
    while they run is not seen.

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

    def now_bytes(self) -> int:
        """What storages take now."""
        return self._bytes

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
