"""The rules of a profile, read for one axis of a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.artefacts.graph import ITEM_BYTES, Graph
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import blocks_of, dim_of, reads, rule_of
from planner.resharding.gradients import gradient_spec
from planner.support.memo import remembered


@dataclass(frozen=True, slots=True)
class AxisRule:
    """A way to run an operator on one axis.

    Attributes:
        line: as text.
        inputs: the part of each spec that it reads, such as "S0".
        outputs: of what it makes.
        read_gradients: the parts of the gradients of its inputs.
        made_gradients: the parts of the gradients of its outputs.
        sizes: of the axis, for which it holds; None for all that divide what is cut.
        is_split: whether the devices do different work.
        cuts: whether anything is cut: else, each does all of it.
    """

    line: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    read_gradients: tuple[str, ...]
    made_gradients: tuple[str, ...]
    sizes: tuple[int, ...] | None
    is_split: bool
    cuts: bool


@remembered(kept=65536)
def axis_rule(graph: Graph, line: str, sizes: tuple[int, ...] | None) -> AxisRule:
    """A rule from its text."""
    rule = rule_of([line])
    inputs, outputs = (tuple(one[0] for one in some) for some in (rule.inputs, rule.outputs))
    parts = (*inputs, *outputs)
    return AxisRule(
        line=line,
        inputs=inputs,
        outputs=outputs,
        read_gradients=tuple(gradient_spec(rule, one)[0] for one in rule.inputs),
        made_gradients=tuple(gradient_spec(rule, one)[0] for one in rule.outputs),
        sizes=sizes,
        is_split=any(part != "R" for part in parts),
        cuts=any(part.startswith("S") for part in parts) and "@rows" not in rule.local[0],
    )


@remembered
def rules_of(profile: Profile) -> tuple[tuple[AxisRule, ...], ...]:
    """Per operator, all its rules; the first is that every device runs it whole."""
    graph = profile.graph
    found = []
    for operator, cost in zip(graph.operators, profile.operators, strict=True):
        whole = f"{','.join('R' for _ in reads(operator))}->"
        whole += ",".join("R" for _ in operator.outputs)
        made = [axis_rule(graph, whole, None)]
        for one in cost.rules:
            rule = axis_rule(graph, one.line, one.sizes)
            if rule.is_split and rule not in made:
                made.append(rule)
        found.append(tuple(made))
    return tuple(found)


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
    rule: AxisRule, names: Sequence[str], made: Sequence[str], about: Mapping[str, Named], size: int
) -> bool:
    """Whether a rule holds on an axis of some devices.

    Args:
        names: what the operator reads.
        made: what it makes.
        about: all tensors and parameters.
        size: of the axis.
    """
    if rule.sizes is not None and size not in rule.sizes:
        return False
    parts = zip((*names, *made), (*rule.inputs, *rule.outputs), strict=True)
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
