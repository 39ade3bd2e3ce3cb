"""`EndRequest`: a signal asks a training to save and to end, as clusters do before they take a
machine away.

SIGTERM usually ends a rank at once (`rank.py`). While a training can save, the first one is noted.
Where the ranks meet at the begin of a step they add up how many have been asked
(`executor.StepSums`), and all save and end after that step, also if one of them was asked alone.

Clusters send a signal to all processes of a job, and launchers pass it on to their ranks. So a rank
may hear one request twice: SIGTERM ends it at once from AGAIN_S after the first one on.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

AGAIN_S = 1.0
"""Time after the first SIGTERM from which on another one is no copy of it, in s."""
SAVE_SIGNALS = ("USR1", "USR2", "HUP")
"""Signals that may ask besides SIGTERM."""


def save_signals(name: str | None) -> tuple[signal.Signals, ...]:
    """The signals that ask a training to save and to end.

    Args:
        name: of the signal besides SIGTERM; None for none.
    """
    more = () if name is None else (signal.Signals[f"SIG{name}"],)
    return (signal.SIGTERM, *more)


class EndRequest:
    """What signals have asked this process for.

    Attributes:
        is_awaited: whether a training runs that can save.
        signals: that ask; none before there is such a training.
    """

    def __init__(self) -> None:
        self.is_awaited = self._is_heard = False
        self.signals: tuple[signal.Signals, ...] = ()
        self._first_s: dict[str, float] = {}
        self._before: dict[int, Any] = {}
        self._lock = threading.RLock()

    @property
    def is_made(self) -> bool:
        """Whether a signal has asked the training to save and to end."""
        return self.is_awaited and self._is_heard

    @contextmanager
    def awaited(self, name: str | None, *, is_rank: bool) -> Iterator[None]:
        """A training that can save runs meanwhile. Python tells the main thread alone of signals;
        in others they have their usual effect.

        Args:
            name: of the signal besides SIGTERM; None for none.
            is_rank: whether this process has a thread that waits for SIGTERM (`rank.py`).
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = save_signals(name)
        handled = [one for one in signals if not (is_rank and one == signal.SIGTERM)]
        self._is_heard, self._first_s = False, {}
        self._before = {one: signal.signal(one, self._handle) or signal.SIG_DFL for one in handled}
        self.signals, self.is_awaited = signals, True
        try:
            yield
        finally:
            self.is_awaited = False
            if not self._is_heard:  # else the same request may come once more
                self.signals = ()
            for number, before in self._before.items():
                signal.signal(number, before)

    def takes(self, number: int, way: str) -> bool:
        """Notes a signal as a request, if it is one.

        Args:
            way: that it has come; a process may hear of a signal in two.

        Returns:
            Whether it is; else it ends this process at once.
        """
        if number not in self.signals:
            return False
        now_s = time.monotonic()
        with self._lock:
            is_first, self._is_heard = not self._is_heard, True
        if is_first and os.environ.get("RANK", "0") == "0":
            _say(number)
        if number != signal.SIGTERM:
            return True
        return now_s - self._first_s.setdefault(way, now_s) < AGAIN_S

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.takes(number, "handler"):
            return
        before = self._before[number]
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
        else:
            os.kill(os.getpid(), number)


def _say(number: int) -> None:
    """Says what comes, in any thread and at any moment."""
    agent = ""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        agent = "; torchrun kills it after --shutdown-timeout (30 s, if it is not given)"
    name = signal.Signals(number).name
    text = f"note: {name}: the training saves and ends after a step of all ranks{agent}\n"
    with suppress(OSError):
        os.write(2, text.encode())


REQUEST = EndRequest()
"""Of this process."""
