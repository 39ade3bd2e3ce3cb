"""State that datasets and samplers of a user hold: their generators, and what they give by
`state_dict()`, as torchdata's stateful ones do.

    in vars()                          np.random.Generator and RandomState, random.Random,
                                       torch.Generator
    state_dict() and load_state_dict() of anything that is found on the way there

A checkpoint keeps it as JSON (`encoded`), because to read a pickle may run code. A sampler or
dataset without such methods is not pickled either: what it counts itself comes back by drawing its
orders again (`orders.py`), and else is lost, which a note says.
"""

import random
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_PLAIN = (str, bytes, int, float, complex, type, Tensor, np.ndarray, np.generic, FunctionType,
          ModuleType, nn.Module)  # fmt: skip
MOST_ITEMS, MOST_OBJECTS = 64, 1000
"""Longer lists are samples, and not parts of a dataset such as transforms."""


def held(root: object, name: str) -> dict[str, object]:
    """The generators, and the objects with a state dict, that something holds, by their places in
    it; modules with parameters are left out.

    Args:
        name: the place of the root.

    >>> class Noisy:
    ...     def __init__(self):
    ...         self.steps = [random.Random(3), "x"]
    >>> [*held(Noisy(), "dataset")]
    ['dataset.steps[0]']
    """
    found: dict[str, object] = {}
    seen: set[int] = set()
    waiting = [(name, root)]
    while waiting and len(seen) < MOST_OBJECTS:
        place, one = waiting.pop()
        one = getattr(one, "__self__", one)  # of a bound method, its object
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, GENERATORS):
            found[place] = one
        elif not isinstance(one, _PLAIN):
            if has_state(one):
                found[place] = one
            waiting += reversed([*_inside(one, place)])
    return found


def has_state(one: object) -> bool:
    """Whether something gives its state, and takes it back."""
    both = (getattr(one, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, both))


def _inside(one: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(one, list | tuple):
        if len(one) <= MOST_ITEMS:
            yield from ((f"{place}[{i}]", item) for i, item in enumerate(one))
    elif isinstance(one, dict):
        if len(one) <= MOST_ITEMS:
            yield from ((f"{place}[{key!r}]", item) for key, item in one.items())
    else:
        yield from ((f"{place}.{key}", item) for key, item in getattr(one, "__dict__", {}).items())


# ------------------------------------------------------------------------------ one object


def state_of(one: object) -> Any:
    """The state of a generator, or of an object with a state dict."""
    match one:
        case np.random.Generator():
            return one.bit_generator.state
        case np.random.RandomState():
            return one.get_state(legacy=False)
        case random.Random():
            return one.getstate()
        case torch.Generator():
            return one.get_state()
        case _:
            return one.state_dict()  # type: ignore[attr-defined]


def set_state(one: object, state: Any) -> None:
    """Gives a generator or object the state that `state_of` has given."""
    match one:
        case np.random.Generator():
            one.bit_generator.state = state
        case np.random.RandomState():
            one.set_state(state)
        case random.Random():
            one.setstate(state)
        case torch.Generator():
            one.set_state(state)
        case _:
            one.load_state_dict(state)  # type: ignore[attr-defined]


@contextmanager
def left_as_it_is(*some: Mapping[str, object]) -> Iterator[None]:
    """A context after which generators and objects (`held`) have the state that they had."""
    before = [(one, state_of(one)) for each in some for one in each.values()]
    try:
        yield
    finally:
        for one, state in before:
            set_state(one, state)


# ------------------------------------------------------------------------------ as JSON


def kept(some: Mapping[str, object]) -> dict[str, Any]:
    """The states of generators and objects (`held`) as JSON, by place. One that JSON cannot have is
    left out.
    """
    found = {}
    for place, one in some.items():
        try:
            found[place] = encoded(state_of(one))
        except TypeError:
            continue
    return found


def bring_back(some: Mapping[str, object], states: Mapping[str, Any]) -> list[str]:
    """Gives generators and objects the states that `kept` has given; the places of those that have
    none.
    """
    for place in some.keys() & states.keys():
        set_state(some[place], decoded(states[place]))
    return sorted(some.keys() - states.keys())


def encoded(value: Any) -> Any:
    """A value as JSON that `decoded` reads: numbers, texts, bytes, tensors and arrays in lists,
    tuples and dicts.

    Raises:
        TypeError: if it is or has something else.

    >>> decoded(encoded({"a": (1, 2.5, None), 3: torch.tensor([4])}))
    {'a': (1, 2.5, None), 3: tensor([4])}
    """
    match value:
        case None | bool() | int() | float() | str():
            if type(value) in (type(None), bool, int, float, str):
                return value
        case bytes():
            return {"bytes": b64encode(value).decode()}
        case list():
            return [encoded(one) for one in value]
        case tuple():
            return {"tuple": [encoded(one) for one in value]}
        case dict():
            return {"dict": [[encoded(key), encoded(one)] for key, one in value.items()]}
        case Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            kind = str(value.dtype).removeprefix("torch.")
            return {"tensor": kind, "shape": [*value.shape], "content": b64encode(content).decode()}
        case np.ndarray() | np.generic():
            array = np.asarray(value)
            if array.dtype.kind in "biufc":
                text = b64encode(array.tobytes()).decode()
                return {"array": array.dtype.str, "shape": [*array.shape], "content": text}
    raise TypeError(f"a checkpoint cannot keep a {type(value).__name__}")


def decoded(value: Any) -> Any:
    """The value that `encoded` has written."""
    if isinstance(value, list):
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return b64decode(value["bytes"])
    if "tuple" in value:
        return tuple(decoded(one) for one in value["tuple"])
    if "dict" in value:
        return {decoded(key): decoded(one) for key, one in value["dict"]}
    content = bytearray(b64decode(value["content"]))
    if "array" in value:
        array = np.frombuffer(content, np.dtype(value["array"])).reshape(value["shape"])
        return array if value["shape"] else array[()]
    dtype = getattr(torch, value["tensor"])
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
