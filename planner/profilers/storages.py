"""Live bytes of tensors on a CPU, where no allocator knows them."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
