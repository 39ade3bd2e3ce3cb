"""The queue of a device: collectives of a split stage, one after the other beside its computations.

All collectives of the lines of a device go through its one queue, in the order in which the thread
that computes has posted them. So all devices of a line run them in the same order, which is that of
`resharding/overlap.py`, whatever computations take.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread, get_ident
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The result of a function in a queue."""

    def wait(self) -> T_co:
        """The result, once it is there; to be called once, because it is not kept.

        Raises:
            Exception: that the function has raised.
        """


class CollectiveQueue(Protocol):
    """Runs functions in the order in which they were posted."""

    def start(self, function: Callable[..., T], *given: Tensor) -> Pending[T]:
        """Posts a function. One that is posted by another one of the queue runs at once, in it.

        Args:
            function: of collectives; autograd records nothing of it.
            given: its arguments. They are held until it has run.
        """
        ...


class Done(Generic[T]):
    """A result that is there."""

    def __init__(self, result: T) -> None:
        self._result: T | None = result

    def wait(self) -> T:
        """As `Pending.wait`."""
        result, self._result = self._result, None
        return result  # type: ignore[return-value]


class InlineQueue:
    """Runs a function at once: nothing runs beside computations."""

    def start(self, function: Callable[..., T], *given: Tensor) -> Pending[T]:
        """As `CollectiveQueue.start`."""
        return Done(function(*given))


INLINE = InlineQueue()

_Posted = tuple[Callable[..., Any], tuple[Tensor, ...], Future[Any]]


class ThreadQueue:
    """A queue on CPUs: a thread, which waits for gloo without the interpreter's lock.

    While memory is watched, functions run in the thread that posts them: a tracker sees its own
    thread only. What they make is held from then on, which is as long as it ever may be.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[_Posted | None] = SimpleQueue()
        # A daemon, so that a rank that fails does not stay for the others. It knows no queue, so
        # that it ends with this one.
        self._thread = Thread(target=_run_all, args=(self._todo,), daemon=True)
        self._thread.start()
        weakref.finalize(self, self._todo.put, None).atexit = False

    def start(self, function: Callable[..., T], *given: Tensor) -> Pending[T]:
        """As `CollectiveQueue.start`."""
        if get_ident() == self._thread.ident:
            return Done(function(*given))
        if is_in_torch_dispatch_mode(include_infra_modes=False):
            self._post(_nothing).wait()  # what was posted before
            return Done(function(*given))
        return self._post(function, *given)

    def _post(self, function: Callable[..., T], *given: Tensor) -> "_InThread[T]":
        ended: Future[T] = Future()
        self._todo.put((function, given, ended))
        return _InThread(ended)


class _InThread(Generic[T]):
    def __init__(self, ended: Future[T]) -> None:
        self._ended: Future[T] | None = ended

    def wait(self) -> T:
        """As `Pending.wait`."""
        ended, self._ended = self._ended, None
        assert ended is not None, "nobody waits twice"
        return ended.result()


def _nothing() -> None:
    pass


def _run_all(todo: SimpleQueue[_Posted | None]) -> None:
    while _run_next(todo):
        pass


def _run_next(todo: SimpleQueue[_Posted | None]) -> bool:
    posted = todo.get()
    if posted is None:
        return False
    function, given, ended = posted
    del posted
    try:
        with torch.no_grad():  # each thread has a mode of its own
            result = function(*given)
    except Exception as error:  # whoever waits raises it
        ended.set_exception(error)
        return True
    del function, given  # whoever learns of the end counts on their memory
    ended.set_result(result)
    return True


class StreamQueue:
    """A queue on CUDA: a stream beside that of computations.

    Args:
        device: "cuda" or "cuda:N".
    """

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, function: Callable[..., T], *given: Tensor) -> Pending[T]:
        """As `CollectiveQueue.start`."""
        computing = torch.cuda.current_stream(self._stream.device)
        if computing == self._stream:
            return Done(function(*given))
        self._stream.wait_stream(computing)
        with torch.no_grad(), torch.cuda.stream(self._stream):
            result = function(*given)
            ended = self._stream.record_event()
        for one in given:
            one.record_stream(self._stream)
        return _OnStream(result, ended)


class _OnStream(Generic[T]):
    def __init__(self, result: T, ended: torch.cuda.Event) -> None:
        self._result: T | None = result
        self._ended = ended

    def wait(self) -> T:
        """As `Pending.wait`; it is the stream that computes which waits."""
        result, self._result = self._result, None
        computing = torch.cuda.current_stream()
        computing.wait_event(self._ended)
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                one.record_stream(computing)
        return result  # type: ignore[return-value]


def queue_on(device: str) -> CollectiveQueue:
    """A queue of its own for a device.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    return ThreadQueue() if device == "cpu" else StreamQueue(device)
