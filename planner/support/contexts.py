"""Values that hold in a context."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def holding(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """A context in which a variable has a value, and behind it the one of before.

    >>> colour = ContextVar("colour", default="grey")
    >>> with holding(colour, "red"):
    ...     colour.get()
    'red'
    >>> colour.get()
    'grey'
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
