"""Between which calls of a module its gradients and those of a graph part.

Backward passes begin at the loss, where both agree. Tensors of the module are found in the graph by
their numbers, which are the same in both. The last tensor of the forward pass whose gradients
differ lies just before the cause, and the next one whose gradients agree just behind it.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from planner.operators.gradients.events import Place, Seen, Suspect
from planner.operators.gradients.graph_run import Value

_SAME = 1e-9
"""Tensors whose numbers differ by less of their largest magnitude are one and the same."""


@dataclass(frozen=True, slots=True)
class Between:
    """Where gradients part.

    Attributes:
        before: the call with the last tensor whose gradients differ.
        behind: the first call after it with a tensor whose gradients agree; None if none does.
        causes: what the module does there, or hooks that it has, or the operator there.
    """

    before: Place
    behind: Place | None
    causes: tuple[Suspect, ...]


def between(
    seen: Sequence[Seen],
    values: Sequence[Value],
    suspects: Sequence[Suspect],
    agree: Callable[[Tensor | None, Tensor | None], bool],
) -> Between | None:
    """Where the gradients of a module and a graph part; None if no tensor shows it.

    Args:
        seen: tensors of the module, in the order of its calls.
        values: tensors of the graph.
        suspects: what may be the cause.
        agree: whether two gradients are equal but for rounding.
    """
    members = _by_value(seen, values)
    right = {
        i: any(agree(seen[k].gradient, values[i].gradient) for k in group)
        for i, group in members.items()
    }
    wrong = [group for i, group in members.items() if not right[i]]
    if not wrong:
        return None
    last = max(wrong, key=lambda group: seen[group[-1]].place.index)
    first, before = seen[last[0]].place, seen[last[-1]].place
    agreeing = [seen[k] for i, group in members.items() if right[i] for k in group]
    later = [one.place for one in agreeing if one.place.index >= before.index]
    behind = min(later, key=lambda one: one.index, default=None)
    end = before.index if behind is None else behind.index
    lines = {before.line, behind.line if behind else before.line}
    causes = _causes(suspects, range(first.index, end + 1), lines)
    causes = causes or [_operator(behind or before)]
    return Between(before, behind, tuple(causes))


def _causes(suspects: Sequence[Suspect], calls: range, lines: Container[str]) -> list[Suspect]:
    """Those that some calls or lines show; else hooks, which work where their tensor was made, and
    may be registered later.
    """
    near = [
        one
        for one in suspects
        if one.place and (one.place.index in calls or one.place.line in lines)
    ]
    return near or [one for one in suspects if one.place is None or "hook" in one.what]


def _operator(place: Place) -> Suspect:
    """An operator that has another gradient in the file."""
    what = f"{place.function}(), whose gradient in the file is another one at these values"
    return Suspect(f"{what} (at a bound, or where numbers are equal?)", place)


def _by_value(seen: Sequence[Seen], values: Sequence[Value]) -> Mapping[int, list[int]]:
    """For each tensor of the graph that is in the module, its positions there, ascending."""
    known: dict[tuple[int, ...], list[tuple[float, int]]] = defaultdict(list)
    for i, value in enumerate(values):
        known[tuple(value.tensor.shape)].append((float(value.tensor.abs().sum()), i))
    members: dict[int, list[int]] = defaultdict(list)
    for k, one in enumerate(seen):
        tensor = one.tensor.detach().cpu()
        total = float(tensor.abs().sum())
        for other, i in known.get(tuple(tensor.shape), ()):
            near = abs(total - other) <= _SAME * max(total, other)
            if near and _same(tensor, values[i].tensor):
                members[i].append(k)
                break
    return members


def _same(a: Tensor, b: Tensor) -> bool:
    if not a.numel():
        return False
    return float((a - b).abs().max()) <= _SAME * float(b.abs().max())
