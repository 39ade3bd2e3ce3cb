"""m-ETF: earliest task first, with a limit to memory.

    (1) of all ready operators and devices with enough free memory, take the pair with the earliest
        start = max(device is free, data are there); ties by topological order, then by device
    (2) repeat until all operators are placed, or fail if one fits nowhere

Ready operators, data and memory are those of `list_schedule.py`. Starts never fall, because what
becomes ready does so when something ends; so asking, from event to event, what could start now
takes the pairs in this order.

Source: Jeon et al., Baechi, SoCC 2020, section 3.2; ETF: Hwang et al., SIAM J. Comput. 1989.
"""

from planner.problem import Problem, Result, Status
from planner.solvers.fit import placed
from planner.solvers.placement.list_schedule import NoRoom, earliest, list_schedule
from planner.solvers.placement.problem import Placing, placing_of

_SPACE = "the earliest start for each operator"


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if the evaluator finds room for it as well.

    Args:
        time_limit_s: not needed.
    """
    done = list_schedule(placing_of(problem), earliest)
    if isinstance(done, NoRoom):
        return Result(Status.UNKNOWN, None, space=_SPACE, reason=done.reason(problem))
    return placed(problem, done.device_of, _SPACE, done.order)


def place(placing: Placing) -> tuple[int, ...] | NoRoom:
    """The device of each operator."""
    done = list_schedule(placing, earliest)
    return done if isinstance(done, NoRoom) else tuple(done.device_of)
