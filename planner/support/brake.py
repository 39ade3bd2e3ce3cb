"""The brake of a search: its limits are of work, and this ends one that takes far more time.

A limit of work is given in seconds of an ordinary core, and each search converts it into what it
counts: moves, nodes, labels, actions. So the answer is the same on a busy machine and on an idle
one. Where a count is wrong, or a machine is slow, the brake ends the search at `TIMES` its limit.
It counts the time of the processor, not that of the wall, so other programs have no say. A search
that it cuts is not reproducible, which its answer says.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TIMES, LEAST_S = 10.0, 1.0
"""Processor time at which the brake ends a search, as a multiple of its limit of work, of which a
second counts at least: libraries have to be loaded and tables made, however small the limit is."""


@dataclass
class Compiling:
    """Time that this process has spent on compiling, in s. `jit.py` counts it: who keeps a limit
    need not load numba, which takes half a second, to know that nothing was compiled.
    """

    total_s: float = 0.0


COMPILING = Compiling()


def compile_clock() -> Callable[[], float]:
    """A function that returns the time spent on compiling since, in s, so that it need not count
    against a limit.
    """
    before_s = COMPILING.total_s
    return lambda: COMPILING.total_s - before_s


def stopwatch() -> Callable[[], float]:
    """A function that returns the time since by the clock on the wall, in s, less that spent on
    compiling.
    """
    begin_s, compiling_s = time.monotonic(), compile_clock()
    return lambda: time.monotonic() - begin_s - compiling_s()


def processor_s() -> float:
    """Processor time of this process and of its child processes that have ended, in s."""
    return sum(os.times()[:4])


class Brake:
    """Says when a search has to end.

    Attributes:
        cut: whether the brake has ended the search.
    """

    def __init__(self, limit_s: float, compiling_s: Callable[[], float] = lambda: 0.0) -> None:
        """The search begins now.

        Args:
            limit_s: its limit of work, in seconds of an ordinary core.
            compiling_s: tells the time spent on compiling, which does not count.
        """
        self.cut = False
        self._end_s = processor_s() + TIMES * max(limit_s, LEAST_S)
        self._compiling_s = compiling_s

    def left_s(self) -> float:
        """Processor time that is left, in s; at least 0."""
        return max(0.0, self._end_s + self._compiling_s() - processor_s())

    def over(self) -> bool:
        """Whether the search has to end. Once it has, it stays so."""
        self.cut = self.cut or self.left_s() == 0
        return self.cut


@contextmanager
def braked(limit_s: float) -> Iterator[Brake]:
    """Gives the brake of a search that begins now.

    Args:
        limit_s: its limit of work, in seconds of an ordinary core.
    """
    yield Brake(limit_s, compile_clock())
