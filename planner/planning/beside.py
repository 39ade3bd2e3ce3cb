"""Two tasks at once: the second in a child process, where there are two cores to run on.

The child is a copy of this process, so it has the kernels and the tables that are loaded, and
starts in milliseconds. It sends its value back; where it cannot, this process runs the task itself.
So the values are the same with and without a child. Ctrl-C ends a child, and so does the end of
this process. Engines that keep threads must not run in a child, which has a copy of what these left
behind, and not the threads.
"""

import logging
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from planner.solvers.engines import watch

T = TypeVar("T")


def cores() -> int:
    """The cores that this process may run on; 1 where that is not known or it cannot be copied."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def beside(tasks: Sequence[Callable[[], T]], worth_it: bool) -> list[T | None]:
    """The values of one or two tasks, of which neither needs the other; None of the second if
    Ctrl-C ended it.

    Args:
        worth_it: whether two tasks are worth a second process, if there are two cores.
    """
    if len(tasks) == 1 or not worth_it or cores() < 2:
        return [task() for task in tasks]
    first, second = tasks
    child = _Child(second)
    try:
        values = [first(), *child.answer()]
    finally:
        child.end()
    if len(values) == 1:
        values.append(None if child.interrupted else second())
    return values


class _Child(Generic[T]):
    """A copy of this process that runs a task.

    Attributes:
        interrupted: whether it was told to end.
    """

    def __init__(self, task: Callable[[], T]) -> None:
        answer, send = os.pipe()
        ends_with, life = os.pipe()
        with warnings.catch_warnings():
            # Python warns of locks that other threads hold. The copy takes none of theirs: it
            # neither logs nor prints.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            os.close(answer)
            os.close(life)
            _run(task, send, ends_with)
        os.close(send)
        os.close(ends_with)
        self._answer, self._life, self.interrupted = answer, life, False
        watch.also_interrupt.append(self._interrupt)

    def answer(self) -> tuple[T] | tuple[()]:
        """The task's value, if the child has one. Ctrl-C meanwhile ends it."""
        parts = []
        with watch.interruptible(watch.SearchWatch(logging.getLogger(__name__), 1.0)):
            while part := os.read(self._answer, 2**20):
                parts.append(part)
        return (pickle.loads(b"".join(parts)),) if parts else ()

    def _interrupt(self) -> None:
        self.interrupted = True
        os.kill(self._process, signal.SIGKILL)

    def end(self) -> None:
        """Ends the child, if it has not ended, and forgets it."""
        watch.also_interrupt.remove(self._interrupt)
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._answer)
        os.close(self._life)


def _run(task: Callable[[], object], send: int, ends_with: int) -> None:
    """Runs a task in the child, and never returns.

    Args:
        send: where the value goes.
        ends_with: a pipe that closes when the parent has ended.
    """
    code = 1
    try:
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the parent, which decides
        logging.disable()
        threading.Thread(target=_ending, args=(ends_with,), daemon=True).start()
        content = pickle.dumps(task())
        with os.fdopen(send, "wb") as file:
            file.write(content)
        code = 0
    finally:
        os._exit(code)


def _ending(ends_with: int) -> None:
    """Ends this process with its parent."""
    os.read(ends_with, 1)
    os._exit(1)
