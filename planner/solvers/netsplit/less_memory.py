"""Searches by a model that counts less memory than the evaluator: a placement that does not fit
after all is searched again, with less memory on the devices that were over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import Strategy
from planner.solvers.placement.coplacement import kept_bytes
from planner.solvers.placement.problem import Placement, PlacementProblem, tighter


@dataclass(frozen=True, slots=True)
class Unfit:
    """A placement that the evaluator finds too large.

    Attributes:
        strategy: the placement as stages.
        shortage: why it does not fit.
    """

    device_of: Placement
    strategy: Strategy
    shortage: str


@dataclass(frozen=True, slots=True)
class Round:
    """The answer of a search.

    Attributes:
        unfit: its placement, if that does not fit.
        ended: whether there is no time for another search.
    """

    result: Result
    unfit: Unfit | None = None
    ended: bool = False


def in_less_memory(
    problem: Problem,
    model: PlacementProblem,
    shares: Sequence[float],
    search: Callable[[PlacementProblem, float], Round],
) -> Result:
    """The first result that fits, or that has no placement; unknown with the shortage if none does.
    After the first search it proves neither that a plan is the best, nor that there is none.

    Args:
        model: with the memory of the first search.
        shares: of the time, one for each search.
    """
    result, shortage = None, None
    for share in shares:
        one = search(model, share)
        result = one.result if shortage is None else _of_less_memory(one.result, shortage)
        if one.unfit is None:
            return result
        shortage = one.unfit.shortage
        if one.ended:
            break
        kept = kept_bytes(model)
        model = tighter(problem, model, one.unfit.device_of, one.unfit.strategy, kept)
    if result is None:
        raise ValueError("there is no search")
    return replace(
        result, status=Status.UNKNOWN, strategy=None, others=(), reason=shortage,
        short_of_memory=True,
    )  # fmt: skip


def _of_less_memory(result: Result, shortage: str) -> Result:
    """The result of a search with less memory than there is, as one of the problem.

    Args:
        shortage: why the plan of an earlier search did not fit.
    """
    short = result.strategy is None
    return replace(
        result, status=Status.UNKNOWN if short else Status.FEASIBLE, bound_s=None,
        reason=shortage if short else None, short_of_memory=short,
    )  # fmt: skip
