"""Whether operators that compute something else in training than in evaluation do the latter.

Within `evaluating`, BatchNormalization normalizes by its running statistics and leaves them as they
are, and Dropout keeps everything, whatever the file says. The modules of a training can so be
evaluated without a second copy of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_evaluates: ContextVar[bool] = ContextVar("evaluates", default=False)


@contextmanager
def evaluating() -> Iterator[None]:
    """A context in which operators compute as in evaluation."""
    token = _evaluates.set(True)
    try:
        yield
    finally:
        _evaluates.reset(token)


def evaluates() -> bool:
    """Whether operators compute as in evaluation here."""
    return _evaluates.get()
