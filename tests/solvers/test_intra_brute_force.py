"""The program of `intra-op` beside all splits of small graphs, as the simulator times them."""

import math
import time

import pytest

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.simulator.estimate import estimate_s
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Parts
from planner.solvers.intra.solve import views
from planner.solvers.program.solve import solve
from tests.support.small_splits import every_answer, given, held_bytes, small, strategy_of

ONE_AXIS, TWO_AXES = ((2,), (1,), (4,)), ((2, 2),)
# Seed, operators, those of them with rules, rules of each at most; meshes; bandwidth.
CASES = (
    ((24, 5, 3, 2), ONE_AXIS, 1e9),
    ((26, 7, 3, 1), ONE_AXIS, 1e8),
    ((3, 7, 5, 1), ONE_AXIS, 1e9),
    ((17, 7, 3, 1), TWO_AXES, 1e8),
    ((17, 6, 3, 1), TWO_AXES, 1e9),
    ((1, 4, 3, 2), TWO_AXES, 1e8),
    ((3, 7, 3, 2), TWO_AXES, 1e9),
)
TIED = {ONE_AXIS: (30, 7, 2, 1), TWO_AXES: (48, 7, 2, 1)}


def answer(made, limit):
    """The best answer within a limit of memory, all parts of an iteration added up."""
    until_s = time.monotonic() + 60
    return solve(made.program(Parts(1, 1, 1, 1), limit), 10.0, lambda: until_s - time.monotonic())


def front(priced):
    """Seconds and bytes that nothing else is better than in both, the fastest first."""
    best, fewest = [], math.inf
    for time_s, size in sorted(priced):
        if size < fewest:
            best.append((time_s, size))
            fewest = size
    return best


def check(problem, view, *, again):
    """Compares the answers for all limits of memory that change them; the number of limits."""
    made = built(problem, view, again=again)
    best = front(every_answer(problem, made))
    for limit, (time_s, _) in zip([math.inf, *(size - 1 for _, size in best)], best, strict=False):
        found = answer(made, None if limit == math.inf else limit)
        assert found.status is Status.OPTIMAL
        assert found.cost == pytest.approx(time_s, rel=1e-9)
        strategy = strategy_of(problem, made, found.picks)
        assert estimate_s(problem, strategy) == pytest.approx(time_s, rel=1e-9)
        assert held_bytes(problem, strategy) <= limit
    assert answer(made, best[-1][1] - 1).status is Status.INFEASIBLE
    return len(best)


@pytest.mark.parametrize(("graph", "meshes", "bandwidth"), CASES)
def test_no_split_of_a_small_graph_is_better(graph, meshes, bandwidth):
    profile, limits = small(*graph), 0
    for count in (2, 4):
        problem = given(profile, count, bandwidth, recompute=Recompute.NONE)
        for view in (one for one in views(problem) if one.mesh in meshes):
            limits += check(problem, view)
    assert limits > 1


@pytest.mark.parametrize(("meshes", "bandwidth"), [(ONE_AXIS, 1e8), (TWO_AXES, 1e9)])
def test_no_split_of_a_graph_with_a_tied_parameter_is_better(meshes, bandwidth):
    """Its readers share copies and one sum of gradients."""
    problem = given(small(*TIED[meshes], tied=True), 4, bandwidth, recompute=Recompute.NONE)
    for view in (one for one in views(problem) if one.mesh in meshes):
        check(problem, view)


def test_no_split_with_forwards_that_run_twice_is_better():
    problem = given(small(26, 7, 3, 1), 4, 1e8, recompute=Recompute.FULL)
    for view in (one for one in views(problem) if one.mesh in ONE_AXIS):
        check(problem, view, again=True)
