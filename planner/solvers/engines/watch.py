"""How a search is watched: it logs its best value and bound whenever one improves, and Ctrl-C or
the brake ends it with the best answer so far.
"""

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from planner.support.brake import Brake
from planner.support.units import format_seconds

INTERRUPTED = "interrupted"
"""The note of an answer that Ctrl-C cut short."""

AGAIN_S = 0.1
"""Interval between checks for an interruption while an engine runs."""

also_interrupt: list[Callable[[], object]] = []
"""Called when Ctrl-C ends a watched search: other processes that search at the same time."""

_watches: list[tuple["SearchWatch", Any]] = []
"""Of the searches that run inside each other, the outermost first, each with what handled Ctrl-C
before it."""

T = TypeVar("T")


def _nothing() -> None:
    pass


class SearchWatch:
    """The best value and bound of a search, and whether it should end.

    Attributes:
        brake: ends the engines when it is over; None for no brake.
        interrupted: whether the user pressed Ctrl-C.
        enough: the gap at which the search may end.
        listen: installs the signal handler again, because engines replace it.
    """

    def __init__(
        self,
        log: logging.Logger,
        tick_s: float,
        gap: float = 0.0,
        brake: Brake | None = None,
    ) -> None:
        """At the start, nothing is known.

        Args:
            log: where progress is logged.
            tick_s: length of a tick.
            gap: (incumbent - bound) / bound at which the search may end.
            brake: of the search.
        """
        self.interrupted, self.brake = False, brake
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
        """Ticks of the lower bound."""
        return self._bound

    @property
    def gap(self) -> float:
        """(incumbent - bound) / bound; inf as long as one is unknown."""
        return self._incumbent / self._bound - 1 if self._bound > 0 else math.inf

    @property
    def cut(self) -> bool:
        """Whether the user or the brake ends the search."""
        return self.interrupted or (self.brake is not None and self.brake.over())

    @property
    def done(self) -> bool:
        """Whether the search should end: cut, proved, or within the gap."""
        return self.cut or self._incumbent <= self._bound or self.gap <= self.enough

    def see(self, incumbent: float = math.inf, bound: float = 0.0) -> None:
        """Takes in a value or a bound; logs it if it is better; stops the engine when both meet.

        Args:
            incumbent: ticks of a schedule.
            bound: ticks of a lower bound.
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
        """Asks the running engines to end."""
        for stop in list(self._stops):
            stop()

    def run(self, engine: Callable[[], T], stop: Callable[[], object]) -> T:
        """The result of an engine, run in another thread so that this one hears signals meanwhile.

        Args:
            stop: ends the engine soon, from any thread.
        """
        self._stops.append(stop)
        beside = ThreadPoolExecutor(1)
        try:
            result = beside.submit(engine)
            while not wait([result], timeout=AGAIN_S).done:
                # Gurobi replaces the signal handler when it begins, and an engine that has not
                # begun ignores a stop, so both are repeated.
                if self.cut:
                    stop()
                else:
                    self.listen()
            return result.result()
        finally:
            self._stops.remove(stop)
            beside.shutdown(wait=False)


@contextmanager
def interruptible(watch: SearchWatch) -> Iterator[SearchWatch]:
    """The first Ctrl-C ends the watched search and those that it is a part of; the second has its
    usual effect. Signals reach only the main thread, so in other threads nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield watch
        return

    def heard(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, _watches[0][1])
        for one, _ in _watches:
            one.interrupted = True
            one.stop()
        for interrupt in list(also_interrupt):
            interrupt()

    watch.listen = lambda: signal.signal(signal.SIGINT, heard)
    _watches.append((watch, before))
    watch.listen()
    try:
        yield watch
    finally:
        if not watch.interrupted or len(_watches) == 1:  # else what is around it has heard, too
            signal.signal(signal.SIGINT, before)
        _watches.pop()
