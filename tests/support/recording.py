"""A queue of collectives that notes what is posted."""

from functools import partial
from threading import get_ident

from planner.launcher.mesh.queue import ThreadQueue


class RecordingQueue(ThreadQueue):
    """Notes what the thread that computes has posted.

    Attributes:
        posted: in its order, the steps of a conversion, or words for another function; and the
            bytes that it is given.
    """

    def __init__(self):
        super().__init__()
        self.posted = []

    def start(self, function, *given):
        if get_ident() != self._thread.ident:
            self.posted.append((_what(function), sum(one.nbytes for one in given)))
        return super().start(function, *given)


def _what(function):
    if not isinstance(function, partial):
        return function.__name__
    steps = function.keywords.get("steps")
    return f"{function.func.__name__} {function.args[0]}" if steps is None else steps
