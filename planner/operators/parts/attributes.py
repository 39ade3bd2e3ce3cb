"""Attributes of operators that are divided where the operator runs on one part of its tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planner.artefacts.operator_types import facts
from planner.operators.binding import Call

_ATTRIBUTE = re.compile(r"(?P<name>\w+)(\[(?P<index>\d+)\])?")


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
    if dim is None:
        return ((),)
    heads = facts(kind).heads
    counted = [
        names
        for names in dict.fromkeys((heads, heads[:1]))
        if names and all(isinstance(call.kwargs.get(name), int) for name in names)
    ]
    size = _size_of(kind, call, dim, rank)
    return (), *([(size,)] if size else []), *counted


def _size_of(kind: str, call: Call, dim: int, rank: int) -> str:
    """The attribute with the sizes of a dimension of the first output; "" without one."""
    sizes = call.kwargs.get("shape")
    if kind in ("Reshape", "Expand") and isinstance(sizes, tuple):
        place = dim - (rank - len(sizes))
        return f"shape[{place}]" if 0 <= place < len(sizes) and sizes[place] > 1 else ""
    if kind == "Resize" and isinstance(given := call.kwargs.get("sizes"), tuple):
        axes = call.kwargs.get("axes") or tuple(range(len(given)))
        assert isinstance(axes, tuple)
        return f"sizes[{axes.index(dim)}]" if dim in axes else ""
    return "split" if kind == "Split" and call.kwargs.get("split") is not None else ""


def divided(
    kwargs: Mapping[str, Any], names: Iterable[str], parts: int
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a call with some of them divided by the number of parts: "group" is a
    number, "shape[2]" one of several, "split" all of them.

    Raises:
        ValueError: if there is none of a name, or the number of parts does not divide one.

    >>> divided({"shape": (4, 12, 64), "group": 6}, ["shape[1]", "group"], 2)
    {'shape': (4, 6, 64), 'group': 3}
    >>> divided({"group": 6}, ["group"], 4)
    Traceback (most recent call last):
    ValueError: group: expected a number that 4 divides, got 6
    """
    made = dict(kwargs)
    for one in names:
        match = _ATTRIBUTE.fullmatch(one)
        if match is None or made.get(match["name"]) is None:
            raise ValueError(f"there is no attribute {one!r} to divide")
        value = made[match["name"]]
        numbers = list(value) if isinstance(value, list | tuple) else [value]
        for i in range(len(numbers)) if match["index"] is None else [int(match["index"])]:
            if not _divides(parts, numbers[i : i + 1]):
                raise ValueError(f"{one}: expected a number that {parts} divides, got {value}")
            numbers[i] //= parts
        made[match["name"]] = tuple(numbers) if isinstance(value, list | tuple) else numbers[0]
    return made


def _divides(parts: int, some: Sequence[object]) -> bool:
    """Whether there is a number, and it can be divided."""
    return any(isinstance(one, int) and one >= 0 and one % parts == 0 for one in some)
