"""Equal layers: a straight pipeline whose stages have the same number of layers, one device each
(the partition by hand that GPipe, Huang et al. 2019, is given). A layer is an operator with
trained parameters and what follows it up to the next.
"""

from collections.abc import Iterator
from itertools import pairwise

from planner.graph import parameters_by_name
from planner.problem import Problem, Result
from planner.solvers.fit import fastest_first, first_that_fits, pipeline, recompute_choices
from planner.strategy import Strategy
from planner.topology import chain


def solve(problem: Problem, time_limit_s: float) -> Result:
    """As many equal stages as there are devices and layers, on well linked neighbours.

    Args:
        time_limit_s: not needed.
    """
    return first_that_fits(problem, _candidates(problem), "stages with equally many layers")


def _candidates(problem: Problem) -> Iterator[Strategy]:
    """All devices first, then fewer; with one more microbatch in flight first, which hides
    transfers, then without.
    """
    fastest, starts = fastest_first(problem), _layer_starts(problem)
    for recompute in recompute_choices(problem):
        for count in range(min(len(fastest), len(starts)), 0, -1):
            devices = chain(problem.topology, tuple(sorted(fastest[:count])))
            cuts = [starts[len(starts) * s // count] for s in range(1, count)]
            bounds = [0, *cuts, len(problem.profile.operators)]
            stages = [range(a, b) for a, b in pairwise(bounds)]
            where = [[device] for device in devices]
            for extra in (1, 0):
                yield pipeline(problem, stages, where, recompute=recompute, extra=extra)


def _layer_starts(problem: Problem) -> list[int]:
    """The first operator of every layer, ascending; the first layer starts with the graph."""
    graph = problem.profile.graph
    parameters = parameters_by_name(graph)
    found = [
        v
        for v, operator in enumerate(graph.operators)
        if any(parameters[name].trainable for name in operator.parameters)
    ]
    # What comes before the first layer belongs to it.
    return [0, *found[1:]]
