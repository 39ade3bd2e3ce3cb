"""All-reduces inside operators whose statistics are of a dimension that is cut (`@moments`): each
device sums up its part, and the devices of a line add up what they have, in the forward and in the
backward (`operators/parts/moments.py`).
"""

from collections.abc import Mapping, Sequence
from math import prod

from planner.artefacts.graph import Operator
from planner.artefacts.sharding import MOMENTS, Rule, dim_of, local_shape, reads
from planner.resharding.conversion import Collective, Step

Sides = tuple[tuple[Step, ...], tuple[Step, ...]]
"""Steps of a forward and of a backward."""

# By type, the figures per statistic in each all-reduce of a forward, and in the backward's one.
_FIGURES: Mapping[str, tuple[tuple[int, ...], int]] = {
    "BatchNormalization": ((2,), 2),  # mean and square; and sums of the gradient, twice
    "GroupNormalization": ((2,), 2),
    "InstanceNormalization": ((2,), 2),
    "LayerNormalization": ((2,), 2),
    "LogSoftmax": ((1, 1), 1),  # the largest number, then the sum of exponentials
    "RMSNormalization": ((1,), 1),
    "Softmax": ((1, 1), 1),
}
_BYTES = {"LogSoftmax": 4, "Softmax": 4}
"""Of a figure, of operators that do not add up in double precision."""


def statistics_steps(
    operator: Operator, rule: Rule, shapes: Mapping[str, Sequence[int]], mesh: tuple[int, ...]
) -> Sides:
    """The all-reduces inside an operator; none where its rule has no mark.

    Args:
        shapes: of all that it reads, whole.
        mesh: size of each axis.

    Raises:
        KeyError: if there are no statistics of the operator's type.
    """
    axes = [axis for axis, one in enumerate(rule.axes) if MOMENTS in one.marks and mesh[axis] > 1]
    if not axes:
        return (), ()
    forward, backward = _FIGURES[operator.type]
    size = _number(operator, rule, shapes, mesh) * _BYTES.get(operator.type, 8)

    def steps(figures: Sequence[int]) -> tuple[Step, ...]:
        return tuple(
            Step(Collective.ALL_REDUCE, axis, "P", "R", count * size)
            for count in figures
            for axis in axes
        )

    return steps(forward), steps((backward,))


def _number(
    operator: Operator, rule: Rule, shapes: Mapping[str, Sequence[int]], mesh: tuple[int, ...]
) -> int:
    """The statistics that a device has. A group of a group normalization counts as one for each of
    its channels: the number of groups is not known here, and these are few.
    """
    names = reads(operator)
    local = [
        local_shape(shapes[name], spec, mesh) for name, spec in zip(names, rule.inputs, strict=True)
    ]
    x, *others = local
    match operator.type:
        case "BatchNormalization":
            return x[1]
        case "GroupNormalization" | "InstanceNormalization":
            return x[0] * x[1]
        case "LayerNormalization" | "RMSNormalization":
            return prod(x) // max(1, prod(others[0]))
    cut = next(d for part in rule.inputs[0] if (d := dim_of(part)) is not None)
    return prod(x) // max(1, x[cut])
