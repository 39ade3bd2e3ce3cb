"""For how long this process has run, and how long it still may."""

import os
import time
from collections.abc import Callable
from pathlib import Path

_imported_s = time.monotonic()


def age_s() -> float:
    """Time since this process started, in s; where the system does not tell, since this module was
    imported.
    """
    try:
        started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        started_s = started_ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _imported_s


def countdown(limit_s: float) -> Callable[[], float]:
    """A function that tells the time on the wall that is left, in s; negative once it is over."""
    end_s = time.monotonic() + limit_s
    return lambda: end_s - time.monotonic()
