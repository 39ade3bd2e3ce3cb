"""The last words of a rank whose script the user wrote: of all ranks of a host, one speaks.

Under `planner launch` the command line sees to it. A script of the user ends by Python's own hook
for errors that nobody has caught, so that is where a rank takes the word.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from planner.launcher import ending
from planner.support.errors import PlannerError, Stopped

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
FAILED = 1
_hooks: list[Hook] = []


def become_a_rank() -> None:
    """Makes this process one of several, if torchrun has started it and it is none yet. Signals
    are told to the main thread alone, so that one has to call it.
    """
    if ending.here() is not None or threading.current_thread() is not threading.main_thread():
        return
    rank = ending.enter()
    if rank is not None:
        _hooks.append(partial(_speak_and_leave, rank, sys.excepthook))
        speak_last()


def speak_last() -> None:
    """Takes the hook again: torch.distributed wraps it in one that keeps what is written until it
    returns, which it does not.
    """
    sys.excepthook = _hooks[0] if _hooks else sys.excepthook


def _speak_and_leave(
    rank: ending.Rank,
    usual: Hook,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Says why this rank ends, if no other one has, and ends it."""
    sys.stdout.flush()
    if isinstance(error, KeyboardInterrupt):
        rank.leave(ending.INTERRUPTED)
    with rank.speaking() as has_the_word:
        if has_the_word and not isinstance(error, PlannerError):
            usual(kind, error, traceback)
        elif has_the_word:
            text = rank.loss() if isinstance(error, Stopped) else str(error)
            print(f"Error: {text}", file=sys.stderr, flush=True)  # noqa: T201, the rank's last words
    if isinstance(error, Stopped):
        rank.end_children_of_missing()
        rank.leave(ending.LEFT)
    rank.leave(FAILED)
