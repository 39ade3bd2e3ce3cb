"""Attributes of operators that are divided where the operator runs on one part of its tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.artefacts.operator_types import facts
from planner.operators.binding import Call


def divisible(
    kind: str, call: Call, dim: int | None, rank: int
) -> tuple[tuple[str, ...], ...]:  # fmt: skip
    """The sets of attributes that a rule may divide, the empty one first.

    Args:
        kind: the operator's ONNX type.
        call: of its function.
        dim: the dimension along which its first output is cut; None where it is a sum.
        rank: number of dimensions of this output.

    >>> call = Call(print, (), {"shape": (4, -1, 12, 64)})
    >>> divisible("Reshape", call, 2, 4), divisible("Reshape", call, 1, 4)
    (((), ('shape[2]',)), ((),))
    """
    sets: list[tuple[str, ...]] = [()]
    if dim is None:
        return tuple(sets)
    sizes = call.kwargs.get("shape")
    if kind in ("Reshape", "Expand") and isinstance(sizes, tuple):
        place = dim - (rank - len(sizes))
        if 0 <= place < len(sizes) and sizes[place] > 1:
            sets.append((f"shape[{place}]",))
    if kind == "Resize" and isinstance(given := call.kwargs.get("sizes"), tuple):
        axes = call.kwargs.get("axes") or tuple(range(len(given)))
        assert isinstance(axes, tuple)
        if dim in axes:
            sets.append((f"sizes[{axes.index(dim)}]",))
    if kind == "Split" and call.kwargs.get("split") is not None:
        sets.append(("split",))
    heads = facts(kind).heads
    for names in dict.fromkeys((heads, heads[:1])):
        if names and all(isinstance(call.kwargs.get(name), int) for name in names):
            sets.append(names)
    return tuple(sets)


def localized(call: Call, names: Sequence[str], parts: int) -> Call | None:
    """The call with some of its attributes divided by the number of parts: "group" is a number,
    "shape[2]" one of several, "split" all of them. None where one cannot be divided.

    >>> call = Call(print, (), {"shape": (4, 12, 64), "group": 6})
    >>> localized(call, ["shape[1]", "group"], 2).kwargs
    {'shape': (4, 6, 64), 'group': 3}
    >>> localized(call, ["group"], 4) is None
    True
    """
    kwargs = dict(call.kwargs)
    for one in names:
        name, _, place = one.rstrip("]").partition("[")
        value = kwargs[name]
        numbers: list[Any] = list(value) if isinstance(value, tuple) else [value]
        for i in [int(place)] if place else range(len(numbers)):
            if numbers[i] % parts:
                return None
            numbers[i] //= parts
        kwargs[name] = tuple(numbers) if isinstance(value, tuple) else numbers[0]
    return replace(call, kwargs=kwargs)
