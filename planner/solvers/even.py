"""Equal layers: a straight pipeline whose stages have the same number of layers, one device each
(the partition by hand that GPipe, Huang et al. 2019, is given). A layer is an operator with
trained parameters and what follows it up to the next. On more than 64 devices such pipelines run
side by side, as replicas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from planner.clusters.routes import chain
from planner.graph import parameters_by_name
from planner.problem import Problem, Result
from planner.solvers.fit import fastest_first, first_that_fits, pipeline, recompute_choices
from planner.strategy import Strategy

# On more devices, a pipeline has at most so many stages; halves of that are tried, and first of all
# one with at most so many forwards, which is simulated in a second.
_MOST_STAGES, _FORWARDS = 64, 2**16


def solve(problem: Problem, time_limit_s: float) -> Result:
    """As many equal stages as there are devices and layers, on well linked neighbours; on more
    than 64 devices, up to 64 stages.

    Args:
        time_limit_s: not needed.
    """
    return _solved(replace(problem, known=()))


@lru_cache(maxsize=4)
def _solved(problem: Problem) -> Result:
    """Remembered, because another solver asks for it as well."""
    return first_that_fits(problem, _candidates(problem), "stages with equally many layers")


def _candidates(problem: Problem) -> Iterator[Strategy]:
    """All devices first, then fewer; with one more microbatch in flight first, which hides
    transfers, then without.
    """
    fastest, starts = fastest_first(problem), _layer_starts(problem)
    most = min(len(fastest), len(starts), _MOST_STAGES)
    counts: Sequence[int] = range(most, 0, -1)
    if len(fastest) > _MOST_STAGES:
        counts = _affordable_first([most >> i for i in range(most.bit_length())], problem)
    for recompute in recompute_choices(problem):
        for count in counts:
            width = _replicas(problem, count)
            used = tuple(sorted(fastest[: count * width]))
            devices = chain(problem.topology, used)
            cuts = [starts[len(starts) * s // count] for s in range(1, count)]
            bounds = [0, *cuts, len(problem.profile.operators)]
            stages = [range(a, b) for a, b in pairwise(bounds)]
            where = [devices[s * width : (s + 1) * width] for s in range(count)]
            for extra in (1, 0):
                yield pipeline(problem, stages, where, recompute=recompute, extra=extra)


def _affordable_first(counts: Sequence[int], problem: Problem) -> Sequence[int]:
    """The largest number of stages that takes few forwards, then larger ones, which need less
    memory, then the others.

    Args:
        counts: numbers of stages, descending.
    """
    forwards = _FORWARDS // problem.options.num_microbatches
    few = [count for count in counts if count <= forwards]
    many = [count for count in counts if count > forwards]
    return [*few[:1], *reversed(many), *few[1:]]


def _replicas(problem: Problem, count: int) -> int:
    """How many pipelines of so many stages run side by side."""
    devices = len(problem.topology.devices)
    if devices <= _MOST_STAGES:
        return 1
    return max(1, min(devices // count, problem.options.num_microbatches))


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
