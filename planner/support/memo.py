"""Values that follow from artefacts, remembered by the identity of these."""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar, overload

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")

MAX_KEPT = 16


@overload
def remembered(function: Callable[Arguments, Value], /) -> Callable[Arguments, Value]: ...


@overload
def remembered(
    *, kept: int
) -> Callable[[Callable[Arguments, Value]], Callable[Arguments, Value]]: ...  # fmt: skip


def remembered(
    function: Callable[..., Value] | None = None, /, *, kept: int = MAX_KEPT
) -> Callable[..., object]:  # fmt: skip
    """Remembers a function's latest values: of artefacts by their identity, of plain values such as
    numbers, names and tuples of them by equality.

    Graphs and profiles are large, and inner loops ask for values that follow from them: a memo by
    equality would compare a graph that was read again with the one before, field by field.
    An artefact is an instance of a dataclass. The first argument has to be one; each of the others
    has to be one, or None, in all calls, or in none. An argument by position and the same one by
    name are two questions.

    Args:
        kept: number of values; the oldest is given up first.

    >>> from dataclasses import make_dataclass
    >>> numbers = make_dataclass("Numbers", ["values"])([1, 2])
    >>> times = remembered(lambda numbers, factor: [factor * n for n in numbers.values])
    >>> times(numbers, 2) is times(numbers, 2)
    True
    """
    if function is None:
        return lambda function: _remembering(function, kept)
    return _remembering(function, kept)


def _remembering(function: Callable[..., Value], kept: int) -> Callable[..., Value]:
    memo: dict[object, tuple[object, Value]] = {}
    changing = Lock()

    @wraps(function)
    def of(first: object, *others: object, **named: object) -> Value:
        # Most functions have one argument, and are called most.
        key: object = id(first)
        if others or named:
            key = (key, *map(_key, others), *((name, _key(one)) for name, one in named.items()))
        entry = memo.get(key)  # needs no lock: threads that miss together compute the value twice
        if entry is None:
            value = function(first, *others, **named)
            # The arguments are held, so no other artefact can have their identity meanwhile.
            entry = (first, others, named), value
            with changing:
                memo[key] = entry
                while len(memo) > kept:
                    del memo[next(iter(memo))]
        return entry[1]

    of.cache_clear = memo.clear  # type: ignore[attr-defined]  # as `lru_cache` has it
    return of


def _key(argument: object) -> object:
    return id(argument) if is_dataclass(argument) else argument
