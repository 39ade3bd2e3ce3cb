"""State that a forward pass changes, and what differs in evaluation.

Forward passes of a training update state inside of `updating`; nowhere else does anything change.
So running a model again, to profile it or for a backward pass, leaves no trace.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from planner.operators.running import evaluates

_updated: ContextVar[frozenset[int]] = ContextVar("updated", default=frozenset())
_before: ContextVar[Mapping[int, Tensor]] = ContextVar("before", default={})  # noqa: B039


@contextmanager
def updating(states: Iterable[Tensor]) -> Iterator[None]:
    """A context in which operators update these tensors.

    Args:
        states: running statistics of normalizations, and state of the module's own.
    """
    token = _updated.set(frozenset(map(id, states)))
    try:
        yield
    finally:
        _updated.reset(token)


def is_updated(state: Tensor) -> bool:
    """Whether operators update a tensor here."""
    return id(state) in _updated.get()


@contextmanager
def reading(before: Mapping[int, Tensor]) -> Iterator[None]:
    """A context in which operators read other values of state: those of a microbatch.

    Args:
        before: by the id of the tensor that is updated.
    """
    token = _before.set(before)
    try:
        yield
    finally:
        _before.reset(token)


def value_of(state: Tensor) -> Tensor:
    """The value of state that the operators of this microbatch read."""
    return _before.get().get(id(state), state)


def next_state(value: Tensor, state: Tensor) -> Tensor:
    """Its first argument, which is the value of the state from the next microbatch on."""
    value = value.detach()
    if is_updated(state):
        state.copy_(value)
    return value


def by_mode(training: Tensor, evaluation: Tensor) -> Tensor:
    """The first argument in training, the second one in evaluation."""
    return evaluation if evaluates() else training
