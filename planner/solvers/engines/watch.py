"""How a search is watched: it says what it knows whenever that gets better, and Ctrl-C ends it with
the best that it has.
"""

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from planner.units import format_seconds

INTERRUPTED = "interrupted"
"""The note of an answer that came early because of it."""

AGAIN_S = 0.1
"""While an engine runs, it is looked after so often."""

T = TypeVar("T")


def _nothing() -> None:
    pass


class Watch:
    """What a search knows by now.

    Attributes:
        interrupted: whether the user wants it to end.
        enough: the gap at which it may end.
        listen: makes sure that signals are heard.
    """

    def __init__(self, log: logging.Logger, tick_s: float, gap: float = 0.0) -> None:
        """Nothing is known.

        Args:
            log: says it.
            tick_s: length of a tick.
            gap: (incumbent - bound) / bound at which the search may end.
        """
        self.interrupted = False
        self.enough, self._log, self._tick_s = gap, log, tick_s
        self._incumbent, self._bound = math.inf, 0.0
        self._stops: list[Callable[[], object]] = []
        self.listen: Callable[[], object] = _nothing

    @property
    def incumbent(self) -> float:
        """Ticks of the best schedule; inf without one."""
        return self._incumbent

    @property
    def bound(self) -> float:
        """Ticks that no schedule is shorter than."""
        return self._bound

    @property
    def gap(self) -> float:
        """(incumbent - bound) / bound; inf if nothing is known of either."""
        return self._incumbent / self._bound - 1 if self._bound > 0 else math.inf

    @property
    def done(self) -> bool:
        """Whether there is nothing left to search for, or none shall go on."""
        return self.interrupted or self._incumbent <= self._bound or self.gap <= self.enough

    def see(self, incumbent: float = math.inf, bound: float = 0.0) -> None:
        """Takes in what was found, and says it if it is news; ends the engine if nothing is left.

        Args:
            incumbent: ticks of a schedule; bound: of which none is shorter.
        """
        if incumbent >= self._incumbent and bound <= self._bound:
            return
        self._incumbent = min(self._incumbent, incumbent)
        # Rounding in the engine may put its bound a little above the optimum.
        self._bound = min(max(self._bound, bound), self._incumbent)
        if self._incumbent < math.inf:
            self._log.info(
                "incumbent %s, bound %s, gap %s",
                format_seconds(self._incumbent * self._tick_s),
                format_seconds(self._bound * self._tick_s),
                f"{100 * self.gap:.1f} %" if self._bound > 0 else "unknown",
            )
        if self._incumbent <= self._bound:
            self.stop()

    def stop(self) -> None:
        """Asks the engines that run now to end."""
        for stop in list(self._stops):
            stop()

    def run(self, engine: Callable[[], T], stop: Callable[[], object]) -> T:
        """What an engine gives, which runs beside this thread so that signals are heard meanwhile.

        Args:
            stop: ends it soon, from any thread.
        """
        self._stops.append(stop)
        beside = ThreadPoolExecutor(1)
        try:
            result = beside.submit(engine)
            while not wait([result], timeout=AGAIN_S).done:
                # Gurobi takes the signal for itself when it begins; and an engine that has not
                # begun hears nothing, so it is told again.
                if self.interrupted:
                    stop()
                else:
                    self.listen()
            return result.result()
        finally:
            self._stops.remove(stop)
            beside.shutdown(wait=False)


@contextmanager
def interruptible(watch: Watch) -> Iterator[None]:
    """The first Ctrl-C ends the search that is watched; the next does what it did before. In other
    threads than the main one, which signals do not reach, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return

    def heard(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        watch.interrupted = True
        watch.stop()

    watch.listen = lambda: signal.signal(signal.SIGINT, heard)
    watch.listen()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
