"""What follows from an artefact, kept as long as the artefact is one of the latest."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Artefact = TypeVar("Artefact")
Value = TypeVar("Value")

MOST_KEPT = 16


def derived(function: Callable[[Artefact], Value]) -> Callable[[Artefact], Value]:
    """Remembers a function's values by the identity of its argument, for the latest `MOST_KEPT`.

    Graphs and profiles are large, and are asked for what follows from them in inner loops: a cache
    by equality would compare one that was read again with the one before field by field each time.

    >>> double = derived(lambda numbers: [2 * n for n in numbers])
    >>> numbers = (1, 2)
    >>> double(numbers) is double(numbers)
    True
    """
    kept: dict[int, tuple[Artefact, Value]] = {}

    @wraps(function)
    def of(artefact: Artefact) -> Value:
        found = kept.get(id(artefact))
        # It is held, so no other one can have its identity meanwhile.
        if found is None:
            found = kept[id(artefact)] = artefact, function(artefact)
            while len(kept) > MOST_KEPT:
                del kept[next(iter(kept))]
        return found[1]

    return of
