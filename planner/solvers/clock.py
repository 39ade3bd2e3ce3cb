"""A limit of processor time that a search under a foreign cost model keeps, in Python and in
compiled code. Other programs have no say in it; compiling does not count.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba import objmode

from planner.support.jit import compile_clock, njit

# Instead of no limit, so that differences are numbers.
ENDLESS_S = 1e9


@contextmanager
def clock(time_limit_s: float) -> Iterator[Callable[[], float]]:
    """Gives a function that tells the seconds that are left."""
    with compile_clock() as compiling_s:
        end_s = time.process_time() + min(time_limit_s, ENDLESS_S)
        yield lambda: end_s + compiling_s() - time.process_time()


@njit
def is_over(end_s: float) -> bool:
    """Whether the processor time of this process is past a time, for compiled code: takes
    microseconds. That code cannot tell how long its own compiling took, so whoever calls it has to
    look again.
    """
    with objmode(now_s="float64"):
        now_s = time.process_time()
    return bool(now_s > end_s)
