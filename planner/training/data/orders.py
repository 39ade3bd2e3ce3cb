"""`EpochOrders`: the order of the samples in each epoch, as a sampler of the user gives it.

A sampler may count its own epochs, or draw on from where it is. So its orders are drawn one after
the other, 0, 1, .. e, each once. A training that goes on in epoch e draws those before, too, unless
the sampler has a state dict: then it gets the state that it had before it drew epoch e. Generators
that it holds get theirs in any case. If the order is another one nevertheless, that is said. To
draw an earlier epoch once more, the sampler is given the attributes that it had before.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from planner.training.data.states import (
    GENERATORS,
    bring_back,
    has_state,
    held,
    kept,
    set_state,
    state_of,
)

ORDERS, STATES = 2, 16
"""Epochs of which the order, and the state before it, stay: workers fetch what comes after the
steps that are run."""


class EpochOrders:
    """The orders of the epochs.

    Args:
        draw: gives the order of an epoch.
        sampler: of the user; None where any epoch can be drawn at any time.
        leaves: whether the sampler stays as it is, because a training may draw from it, too.
    """

    def __init__(
        self, draw: Callable[[int], list[Any]], sampler: object | None, *, leaves: bool = False
    ) -> None:
        self._draw, self._sampler, self._leaves = draw, sampler, leaves
        self._orders: dict[int, list[Any]] = {}  # the last one last
        self._next = 0  # epoch that the sampler draws next
        self._before: dict[int, _Attributes] = {}
        self._kept: dict[int, tuple[dict[str, Any], int]] = {}

    def __call__(self, epoch: int) -> list[Any]:
        """The indices of the samples of an epoch."""
        if epoch not in self._orders:
            if self._sampler is not None:
                self._go_to(epoch)
            self._drawn(epoch)
        return self._orders[epoch]

    def state(self, epoch: int) -> Any:
        """The state of the sampler before it drew an epoch, or the last one until then, as JSON."""
        last = max((one for one in self._kept if one <= epoch), default=None)
        return None if last is None else [last, *self._kept[last]]

    def restore(self, state: Any) -> list[str]:
        """Goes on from what `state` has given; what is lost, in words."""
        if self._sampler is None or state is None:
            return []
        epoch, states, number = state
        if has_state(self._sampler) and "sampler" in states:
            self._next = epoch
        else:
            self._go_to(epoch)
        self._orders = {}
        lost = bring_back(held(self._sampler, "sampler"), states)
        if not lost and _number(self(epoch)) != number:
            return [f"the order of epoch {epoch} by {type(self._sampler).__name__}"]
        return lost

    def _go_to(self, epoch: int) -> None:
        """Makes an epoch the one that the sampler draws next."""
        if epoch < self._next:
            self._next = max(one for one in self._before if one <= epoch)
            self._before[self._next].bring_back()
        while self._next < epoch:
            self._drawn(self._next)

    def _drawn(self, epoch: int) -> None:
        while len(self._orders) >= ORDERS:
            del self._orders[next(iter(self._orders))]
        if self._sampler is None:
            self._orders[epoch] = self._draw(epoch)
            return
        self._before[epoch] = _Attributes(self._sampler)
        states = kept(held(self._sampler, "sampler"))
        self._orders[epoch] = self._draw(epoch)
        self._kept[epoch] = states, _number(self._orders[epoch])
        self._next = epoch + 1
        if self._leaves:
            self._before[epoch].bring_back()
        for by_epoch in (self._before, self._kept):
            _forget(by_epoch)


def _number(order: list[Any]) -> int:
    """A number below 2 ** 32 that other orders hardly have."""
    return crc32(repr(order).encode())


def _forget(by_epoch: dict[int, Any]) -> None:
    """Leaves the first epoch, from which all can be drawn again, and the last ones."""
    for epoch in sorted(by_epoch.keys() - {0})[:-STATES]:
        del by_epoch[epoch]


class _Attributes:
    """The attributes of a sampler, and of samplers in it, at some time.

    Args:
        sampler: their owner.
    """

    def __init__(self, sampler: object) -> None:
        self._of = [(one, _copied(vars(one))) for one in with_inner(sampler)]
        some = held(sampler, "sampler").values()
        self._generators = [(one, state_of(one)) for one in some if isinstance(one, GENERATORS)]

    def bring_back(self) -> None:
        """Gives them back."""
        for one, attributes in self._of:
            vars(one).clear()
            vars(one).update(_copied(attributes))
        for generator, state in self._generators:
            set_state(generator, state)


def with_inner(sampler: object) -> Iterator[Any]:
    """A sampler, and those that it draws from, as a BatchSampler does; none that is a mere list."""
    if not hasattr(sampler, "__dict__"):
        return
    yield sampler
    for value in vars(sampler).values():
        if isinstance(value, Sampler):
            yield from with_inner(value)


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that a sampler may change in place are copies."""
    return {
        name: value.clone()
        if isinstance(value, Tensor)
        else copy(value)
        if isinstance(value, list | dict | set | np.ndarray)
        else value
        for name, value in attributes.items()
    }
