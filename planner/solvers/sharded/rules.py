"""The rules of a profile, read for one axis of a mesh."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.artefacts.graph import ITEM_BYTES, Graph, Operator, parameters_by_name
from planner.artefacts.profile import OperatorCost, Profile, SplitRule
from planner.artefacts.sharding import (
    AxisRule,
    Rule,
    blocks_of,
    dim_of,
    reads,
    rule_of,
    whole_rule,
)
from planner.support.memo import remembered


@remembered
def rules_of(profile: Profile) -> tuple[tuple[SplitRule, ...], ...]:
    """Per operator, all its rules; the first is that every device runs it whole."""

    def of(operator: Operator, cost: OperatorCost) -> tuple[SplitRule, ...]:
        split = (one for one in cost.rules if one.rule.is_split)
        return tuple(dict.fromkeys((SplitRule(str(whole_rule(operator))), *split)))

    both = zip(profile.graph.operators, profile.operators, strict=True)
    return tuple(of(operator, cost) for operator, cost in both)


def weight_parts(graph: Graph, v: int, rule: AxisRule) -> list[str]:
    """The parts in which an operator reads its weights: trained parameters of two dimensions or
    more.
    """
    operator, parameters = graph.operators[v], parameters_by_name(graph)
    held = ((parameters.get(name), part)
            for name, part in zip(reads(operator), rule.inputs, strict=True))  # fmt: skip
    return [part for one, part in held if one and one.trainable and len(one.shape) > 1]


def rule_beside(axes: Sequence[AxisRule]) -> Rule | None:
    """The rule of an operator that runs by one rule along each axis; None where these do not go
    together (`Rule`).
    """
    try:
        return rule_of(map(str, axes))
    except ValueError:
        return None


def share_work(rules: Iterable[SplitRule]) -> bool:
    """Whether the devices share the work of any operator."""
    return any(one.rule.shares_work for one in rules)


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor or parameter.

    Attributes:
        shape: of the part that each device of the axis would have whole.
        item_bytes: of an element.
        gradient: whether it has one.
        parameter: whether it is a parameter.
    """

    shape: tuple[int, ...]
    item_bytes: float
    gradient: bool
    parameter: bool


@remembered
def named(graph: Graph) -> Mapping[str, Named]:
    """All tensors and parameters."""
    found = {
        one.name: Named(one.shape, ITEM_BYTES[one.dtype], one.gradient, False)
        for one in graph.tensors
    }
    return found | {
        one.name: Named(one.shape, ITEM_BYTES[one.dtype], one.trainable, True)
        for one in graph.parameters
    }


def holds(
    one: SplitRule, operator: Operator, about: Mapping[str, Named], size: int
) -> bool:  # fmt: skip
    """Whether a rule of an operator holds on an axis of some devices.

    Args:
        about: all tensors and parameters.
        size: of the axis.
    """
    if one.sizes is not None and size not in one.sizes:
        return False
    parts = zip((*reads(operator), *operator.outputs), one.rule.parts, strict=True)
    return all(divides(about[name].shape, part, size) for name, part in parts)


def divides(shape: Sequence[int], part: str, size: int) -> bool:
    """Whether an axis can cut a tensor so.

    >>> divides((6, 8), "S1", 4), divides((6, 8), "S0", 4), divides((12,), "S0/3", 2)
    (True, False, True)
    """
    dim = dim_of(part)
    if dim is None:
        return True
    return dim < len(shape) and shape[dim] % (size * blocks_of(part)) == 0 and shape[dim] > 0
