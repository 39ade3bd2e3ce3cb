"""Activations that wait in the host's memory from the forward to the backward of a stage
(`Stage.offloaded`), by the rule of `costs/offloading.py`.

Autograd is given a place for each tensor that a backward will read. Behind an offloaded segment
(`segments.py`) the storages of those kept in it are copied to buffers of the host, once each,
however many views of them are kept. The device lets go of them when the next segment has ended.
They come back before the backward of the last segment that keeps them, started one segment ahead.
Parameters and what is made of them alone, inputs and outputs of the stage, and what is kept outside
of such segments, too, stay where they are.

On CUDA the copies run on a stream of their own, from and to pinned memory. On CPUs they are made at
once, and the buffers are not among the tensors that a tracker counts.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from planner.artefacts.segments import LEAST_OFFLOADED_BYTES
from planner.operators.running import runs_again
from planner.profilers.storages import tracked_apart
from planner.support.contexts import holding

_pass: ContextVar["HostPass | None"] = ContextVar("host pass", default=None)

_Copies = Sequence[tuple[UntypedStorage, UntypedStorage]]
"""Targets and sources."""


class HostMemory:
    """Buffers in the host's memory for the activations of one device. They are used again, because
    to pin memory takes longer than to copy it.

    Attributes:
        now_bytes: of buffers in use.
        peak_bytes: the most of them so far.

    Args:
        device: in torch's words.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.now_bytes = self.peak_bytes = 0
        is_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._free: dict[int, list[UntypedStorage]] = {}

    def take(self, size_bytes: int) -> UntypedStorage:
        """A buffer of a size in bytes."""
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        free = self._free.get(size_bytes)
        if free:
            return free.pop()
        with tracked_apart():
            is_pinned = self._stream is not None
            made = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            return made.untyped_storage()

    def give(self, buffer: UntypedStorage) -> None:
        """Takes back a buffer whose last copy has been started."""
        self.now_bytes -= buffer.nbytes()
        self._free.setdefault(buffer.nbytes(), []).append(buffer)

    def start(self, copies: _Copies) -> Callable[[], None]:
        """Starts copies, behind what the device does now; gives how to let it wait for them."""
        if self._stream is None:
            _copy(copies)
            return _nothing
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            _copy(copies)
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)


def _copy(copies: _Copies) -> None:
    with tracked_apart(), torch.no_grad():
        for target, source in copies:
            _bytes_in(target).copy_(_bytes_in(source), non_blocking=True)


def _bytes_in(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _nothing() -> None:
    pass


# ------------------------------------------------------------------- a pass, and its storages


class HostPass:
    """One microbatch of a stage, from its forward to its backward.

    Args:
        memory: of the host.
        staying: tensors that stay on the device.
    """

    def __init__(self, memory: HostMemory, staying: Iterable[Tensor]) -> None:
        self._memory = memory
        self._segments: list[_SegmentCopies] = []
        self._inside = False
        self._known: dict[int, _Storage] = {}
        for one in staying:
            self.stay(one)

    def forward(self) -> AbstractContextManager[object]:
        """A context in which a stage runs its forward."""
        return self._forward()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with holding(_pass, self), saved_tensors_hooks(self.keep, restored):
            yield
        if self._segments:
            self._segments[-1].let_go()
        self._known = {}

    @contextmanager
    def segment(self) -> Iterator["_SegmentCopies"]:
        """A context in which an offloaded segment runs its forward."""
        before = self._segments[-1] if self._segments else None
        own = _SegmentCopies(self._memory, before)
        self._segments.append(own)
        self._inside = True
        try:
            yield own
        finally:
            self._inside = False
        own.copy_out()
        if before is not None:
            before.let_go()

    def begin_backward(self) -> None:
        """Starts the first copies back."""
        if self._segments:
            self._segments[-1].start()

    def keep(self, tensor: Tensor) -> "Tensor | _Place":
        """What autograd keeps instead of a tensor."""
        one = self._storage_of(tensor)
        if not self._inside:
            one.stay(tensor.untyped_storage())
        elif one.may_wait(self._memory.device):
            one.wait_with(self._segments[-1])
        return tensor if one.stays else _Place.of(tensor, one)

    def stay(self, tensor: Tensor) -> None:
        """Notes that a tensor stays on the device."""
        self._storage_of(tensor).stay(tensor.untyped_storage())

    def _storage_of(self, tensor: Tensor) -> "_Storage":
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        # A new storage may have the address of one that is gone.
        if known is None or known.original() is not storage:
            known = self._known[storage._cdata] = _Storage(storage)
        return known


class _Storage:
    """A storage that a forward keeps.

    Attributes:
        original: it, as long as the device has it.
        stays: whether it stays there.
        here: it, or its copy that has come back; None while it is only in the host's memory.

    Args:
        storage: itself.
    """

    def __init__(self, storage: UntypedStorage) -> None:
        self.original = weakref.ref(storage)
        self.stays = False
        self.here: UntypedStorage | None = None
        self._group: _SegmentCopies | None = None
        self._buffer: UntypedStorage | None = None
        self._give = _nothing

    def stay(self, storage: UntypedStorage) -> None:
        """It stays on the device, for something else keeps it there."""
        self._give()
        self.stays, self._buffer, self._give = True, None, _nothing
        # Places that were given before refer to it.
        self.here = storage if self._group is not None else None

    def may_wait(self, device: torch.device) -> bool:
        """Whether it is copied to the host's memory; else it stays."""
        storage = self.original()
        assert storage is not None, "it is being kept"
        if self._group is None and not self.stays:
            is_large = storage.nbytes() >= LEAST_OFFLOADED_BYTES
            self.stays = not (is_large and storage.device.type == device.type)
        return not self.stays

    def wait_with(self, group: "_SegmentCopies") -> None:
        """It comes back with the activations of a segment."""
        if self._group is None:
            self.here = self.original()
            group.leaving.append(self)
        if self._group is not group:
            self._group = group
            group.returning.append(weakref.ref(self))

    def returns_with(self, group: "_SegmentCopies") -> bool:
        """Whether it comes back with the activations of a segment."""
        return not self.stays and self._group is group

    def copy_out(self, memory: HostMemory) -> tuple[UntypedStorage, UntypedStorage]:
        """Its copy to the host's memory."""
        assert self.here is not None, "the device has it"
        self._buffer = buffer = memory.take(self.here.nbytes())
        self._give = give = weakref.finalize(self, memory.give, buffer)
        give.atexit = False
        return buffer, self.here

    def copy_back(self, device: torch.device) -> tuple[UntypedStorage, UntypedStorage]:
        """Its copy back; the host's memory is free behind that."""
        assert self._buffer is not None, "it is in the host's memory"
        buffer, self._buffer = self._buffer, None
        made = torch.empty(buffer.nbytes(), dtype=torch.uint8, device=device)
        self.here = made.untyped_storage()
        self._give()
        return self.here, buffer

    def found(self) -> UntypedStorage:
        """It, or its copy, once that is there."""
        if not self.stays:
            assert self._group is not None, "places are of storages that wait"
            self._group.ready()
        assert self.here is not None, "it is back"
        return self.here


class _SegmentCopies:
    """The copies of an offloaded segment.

    Attributes:
        leaving: the storages that are copied out behind its forward.
        returning: those that may come back with it. Autograd lets go of what it does not need.

    Args:
        memory: of the host.
        before: the segment before it.
    """

    def __init__(self, memory: HostMemory, before: "_SegmentCopies | None") -> None:
        self._memory, self._before = memory, before
        self.leaving: list[_Storage] = []
        self.returning: list[weakref.ref[_Storage]] = []
        self._wait: Callable[[], None] | None = None
        self._is_ready = False

    def copy_out(self) -> None:
        """Starts to copy what leaves."""
        self.leaving = [one for one in self.leaving if not one.stays]
        self._wait = self._memory.start([one.copy_out(self._memory) for one in self.leaving])

    def let_go(self) -> None:
        """Waits for these copies, and lets go of what was copied."""
        if self._wait is not None:
            self._wait()
        for one in self.leaving:
            if not one.stays:
                one.here = None
        self.leaving, self._wait = [], None

    def start(self) -> None:
        """Starts to copy back, once."""
        if self._wait is None:
            some = [one for one in (ref() for ref in self.returning) if one is not None]
            self._wait = self._memory.start(
                [one.copy_back(self._memory.device) for one in some if one.returns_with(self)]
            )

    def ready(self) -> None:
        """Waits until all are back, and starts the copies of the segment before."""
        if self._is_ready:
            return
        self._is_ready = True
        self.start()
        assert self._wait is not None, "it was started"
        self._wait()
        if self._before is not None:
            self._before.start()


class _Place(NamedTuple):
    """A tensor that waits, as it lies in its storage."""

    storage: _Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, storage: _Storage) -> "_Place":
        """The place of a tensor."""
        return cls(
            storage, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
            tensor.requires_grad,
        )  # fmt: skip

    def tensor(self) -> Tensor:
        """The tensor, without a graph."""
        found = self.storage.found()
        made = torch.empty(0, dtype=self.dtype, device=found.device)
        return made.set_(found, self.offset, self.shape, self.stride)


def restored(kept: "Tensor | _Place") -> Tensor:
    """The tensor that was kept."""
    return kept.tensor() if isinstance(kept, _Place) else kept


# ---------------------------------------------------------- for what keeps tensors in a forward


def kept(one: Any) -> Any:
    """What is kept instead of a tensor until its backward; anything else as it is."""
    own = _pass.get()
    return own.keep(one) if own is not None and isinstance(one, Tensor) else one


def given_again(one: Any) -> Any:
    """What was kept, to compute with it."""
    return one.tensor().requires_grad_(one.requires_grad) if isinstance(one, _Place) else one


def staying(made: Any) -> None:
    """Notes what stays on the device, whatever keeps it."""
    own = _pass.get()
    if own is None or runs_again():
        return
    for one in tree_leaves(made):
        if isinstance(one, Tensor):
            own.stay(one)


def current_pass() -> HostPass | None:
    """The pass whose forward runs here; None where nothing waits in the host's memory."""
    return _pass.get()
