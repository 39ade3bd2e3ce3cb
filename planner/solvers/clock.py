"""A limit of processor time that a search under a foreign cost model keeps. Other programs have no
say in it; compiling does not count.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from planner.support.brake import compile_clock

# Instead of no limit, so that differences are numbers.
ENDLESS_S = 1e9


@contextmanager
def clock(time_limit_s: float) -> Iterator[Callable[[], float]]:
    """Gives a function that tells the seconds that are left."""
    compiling_s = compile_clock()
    end_s = time.process_time() + min(time_limit_s, ENDLESS_S)
    yield lambda: end_s + compiling_s() - time.process_time()
