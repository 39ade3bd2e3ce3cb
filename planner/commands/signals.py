"""How SIGINT (Ctrl-C) and SIGTERM end the program: with one line, and exit code 128 + the signal.

While Python imports, they end it at once. While a command runs they are exceptions, so that what
was begun can be tidied up. Ranks of a launcher have handlers of their own.

This module is imported before all others, so it imports nothing that takes time.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from types import FrameType
from typing import Any, NoReturn

STOPPED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
WORDS = {STOPPED: "stopped", TERMINATED: "stopped by SIGTERM"}
"""What is printed, by exit code."""

GRACE_S = 5.0
"""Time for a command to end by itself after SIGTERM, in s: Python handles a signal only between its
own steps, and a call of another language may take long."""


AGAIN_S = 0.01
"""Time after which a signal is sent again that nobody has taken, in s."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Signals end the program at once meanwhile. In the middle of an import, an exception may be
    swallowed, or be seen as another one.
    """
    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    taken = [number for number in usual if _ours() and signal.getsignal(number) is usual[number]]
    for number in taken:
        signal.signal(number, _end_at_once)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, usual[number])


class _State(Enum):
    """What a signal meets."""

    LOADING = auto()
    RUNNING = auto()
    OVER = auto()


_state = _State.LOADING


@contextmanager
def tidying_up() -> Iterator[None]:
    """A command runs meanwhile: a signal is an exception. Once it is over, its result stands."""
    global _state
    _state = _State.RUNNING
    try:
        yield
    finally:
        _state = _State.OVER


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Signals end the program meanwhile. If one of them ends it, it does not wait for its threads:
    engines end late. When the program ends by itself, a signal cuts Python's own clean-up short.
    """
    if not _ours():
        yield
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _handle)
    sys.unraisablehook = _again
    _watch()
    atexit.register(_ignore_signals)  # the first to be registered is the last to be called
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is _handle:
                signal.signal(number, lambda number, frame: os._exit(code))
        if code in WORDS:
            _flush()
            os._exit(code)
        raise


def _ignore_signals() -> None:
    """Python's very last steps would give signals their usual effect again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    """Acts on a signal. Python swallows an exception where there is nobody to take it, as in a
    destructor; then the signal comes again a little later.
    """
    if _state is _State.LOADING or (_state is _State.RUNNING and _imports(frame)):
        _say_and_exit(128 + number)
    if _state is _State.RUNNING:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported: a command loads its libraries when it needs them."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _again(swallowed: "sys.UnraisableHookArgs") -> None:
    """Sends the signal again whose exception was swallowed; says other exceptions as usual."""
    if not issubclass(swallowed.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(swallowed)
        return
    number = signal.SIGTERM if issubclass(swallowed.exc_type, Terminated) else signal.SIGINT
    threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()


def _ours() -> bool:
    """Whether this thread may handle signals, and this process is no rank of a launcher."""
    return threading.current_thread() is threading.main_thread() and "RANK" not in os.environ


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    _say_and_exit(128 + number)


def _say_and_exit(code: int) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"{WORDS[code]}\n".encode())
    os._exit(code)


def _flush() -> None:
    """Writes what was printed; what cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def _watch() -> None:
    """Starts a thread that ends a program which does not end by itself after SIGTERM."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python writes the number of a signal into the pipe at once.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader,), daemon=True).start()


def _wait(reader: int) -> None:
    while True:
        numbers = os.read(reader, 64)
        # A launcher has a handler of its own, and waits for its ranks.
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _handle:
            time.sleep(GRACE_S)
            _say_and_exit(TERMINATED)
