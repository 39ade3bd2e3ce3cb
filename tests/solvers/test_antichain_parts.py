"""The antichain solver where replicas keep parts of a stage: against brute force by the evaluator,
and where nothing fits otherwise.
"""

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import strategies as st

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, shared_level
from planner.costs.evaluate import closed_form_s, evaluate
from planner.solvers import SOLVERS
from tests.support.builders import changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.often import often

GB = 10**9


def chain(parameters, forward_s, tensors=None):
    """A profile of a chain of operators with large parameters and small tensors."""
    feeds = [[v - 1] if v else [] for v in range(len(parameters))]
    return profile_of(graph_of(feeds, tensors or [1000] * len(feeds), parameters), forward_s)


def widths_of(num_stages, num_devices):
    """Numbers of replicas of stages that need no more devices than there are."""
    some = product(range(1, num_devices + 1), repeat=num_stages)
    return [one for one in some if sum(one) <= num_devices]


def depths_of(widths, num_microbatches):
    """Warm-up depths, as the solver chooses them."""
    most = [-(-num_microbatches // width) for width in widths]
    found = [(1,)]
    for s in reversed(range(len(widths) - 1)):
        found = [
            (depth, *behind)
            for behind in found
            for least in [-(-behind[0] * widths[s + 1] // widths[s]) + 1]
            for depth in {min(most[s], least), min(most[s], least + 1)}
        ]
    return found


def ways_of(width, num_microbatches, recompute):
    """Levels at which replicas may share, with recomputation and without."""
    levels = range(1 if width == 1 else 2 if num_microbatches % width else 4)
    return list(product(levels, (False, True) if recompute else (False,)))


def all_pipelines(problem):
    """Every pipeline of a chain on devices of one kind, in every way."""
    names = [one.name for one in problem.profile.graph.operators]
    count, rounds = len(problem.topology.devices), problem.num_microbatches
    again = problem.training.recompute is not Recompute.NONE
    for num_stages in range(1, min(len(names), count) + 1):
        for cuts in combinations(range(1, len(names)), num_stages - 1):
            bounds = list(pairwise([0, *cuts, len(names)]))
            for widths in widths_of(num_stages, count):
                if max(widths) > rounds:
                    continue
                first = [count - sum(widths[s:]) for s in range(num_stages)]
                for depths, ways in product(
                    depths_of(widths, rounds),
                    product(*(ways_of(width, rounds, again) for width in widths)),
                ):
                    yield Strategy(
                        tuple(
                            Stage(
                                tuple(names[a:b]),
                                tuple((d,) for d in range(start, start + width)),
                                depth,
                                recompute,
                                over=width if level else 1,
                                zero=level,
                            )
                            for (a, b), start, width, depth, (level, recompute) in zip(
                                bounds, first, widths, depths, ways, strict=True
                            )
                        ),
                        ScheduleName.ONE_F_ONE_B,
                        rounds,
                    )


def least_s(problem):
    """The least closed form of all pipelines that fit by their action lists; None without one."""
    priced = [(closed_form_s(problem, one), i, one) for i, one in enumerate(all_pipelines(problem))]
    fitting = (s for s, _, one in sorted(priced) if evaluate(problem, one).shortage is None)
    return next(fitting, None)


@st.composite
def tight_problems(draw):
    """Chains whose parameters do not fit one device, on two to four devices."""
    count = draw(st.integers(2, 4))
    size = draw(st.integers(2, 3 if count < 4 else 2))
    parameters = draw(st.lists(st.integers(1, 8), min_size=size, max_size=size))
    forward_s = draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    profile = chain([n * GB for n in parameters], [n / 10 for n in forward_s])
    return problem_of(
        profile,
        cluster([unit_type()] * count, draw(st.sampled_from([1e9, 1e10, 1e12])), 1e-5),
        num_microbatches=draw(st.integers(1, 6)),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adam"])),
        device_memory=int(draw(st.floats(0.7, 4.0)) * sum(parameters) * GB),
        recompute=draw(st.sampled_from([Recompute.AUTO, Recompute.NONE])),
    )


@often(15, 150, tight_problems())
def test_finds_the_least_of_all_pipelines_in_all_ways(problem):
    result, least = SOLVERS["antichain"](problem, 10.0), least_s(problem)
    print(least, result.strategy and closed_form_s(problem, result.strategy), result.status, result.bound_s, result.strategy and [(s.num_replicas, s.zero, s.recompute) for s in result.strategy.stages], problem.training.optimizer, problem.training.device_memory/sum(p.bytes for p in problem.profile.graph.parameters))
