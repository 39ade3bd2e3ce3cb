"""What is allowed along an axis of a mesh: a policy masks the space of all splits, so that a recipe
is the best point of a part of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planner.artefacts.sharding import AxisRule


def anything(*_: object) -> bool:
    """Allows everything."""
    return True


def _nothing(*_: object) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed along an axis; by default anything.

    Attributes:
        rule: of an operator, by its index, and a rule of it. That of running whole always is.
        conversion: of a tensor that operators make or that comes from outside, by its name, and the
            parts before and after, which differ.
        comes: the part in which a tensor from outside may come. Whole it always may.
        must: of an operator, whether it is run whole only where no rule of it holds.
        lies: by name, the parts in which parameters and inputs of the model lie, where readers have
            no choice.
        further: whether parameters, gradients and state may lie in more parts than readers want.
    """

    rule: Callable[[int, AxisRule], bool] = anything
    conversion: Callable[[str, str, str], bool] = anything
    comes: Callable[[str, str], bool] = anything
    must: Callable[[int], bool] = _nothing
    lies: Mapping[str, str] = field(default_factory=dict)
    further: bool = True


ANYTHING = Policy()
