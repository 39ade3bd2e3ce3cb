"""The program of `intra-op` beside all splits of small graphs, as the simulator times them."""

import math
import time
from dataclasses import replace

import pytest

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.simulator.estimate import estimate_s
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Parts
from planner.solvers.intra.solve import views
from planner.solvers.program.solve import solve
from tests.support.small_splits import (
    blocks_in,
    every_answer,
    given,
    held_bytes,
    small,
    strategy_of,
)

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
# Graph as above, blocks by their first operators and those behind their last ones; meshes.
BLOCKS = (
    ((3, 7, 2, 1), ((0, 2), (2, 4), (4, 6)), ((1,), (2,))),
    ((105, 7, 2, 1), ((0, 2), (2, 4), (4, 6)), ((2,), (4,))),
    ((65, 7, 2, 1), ((0, 3), (3, 6)), TWO_AXES),
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


def check(problem, view, blocks=()):
    """Compares the answers for all limits of memory that change them; what each runs again."""
    made, again = built(problem, view, blocks), []
    best = front(every_answer(problem, made))
    for limit, (time_s, _) in zip([math.inf, *(size - 1 for _, size in best)], best, strict=False):
        found = answer(made, None if limit == math.inf else limit)
        assert found.status is Status.OPTIMAL
        assert found.cost == pytest.approx(time_s, rel=1e-9)
        strategy = strategy_of(problem, made, found.picks)
        assert estimate_s(problem, strategy) == pytest.approx(time_s, rel=1e-9)
        assert held_bytes(problem, strategy) <= limit
        again.append(strategy.stages[0].recomputed)
    assert answer(made, best[-1][1] - 1).status is Status.INFEASIBLE
    return again


@pytest.mark.parametrize(("graph", "meshes", "bandwidth"), CASES)
def test_no_split_of_a_small_graph_is_better(graph, meshes, bandwidth):
    profile, limits = small(*graph), 0
    for count in (2, 4):
        problem = given(profile, count, bandwidth, recompute=Recompute.NONE)
        for view in (one for one in views(problem) if one.mesh in meshes):
            limits += len(check(problem, view))
    assert limits > 1


@pytest.mark.parametrize(("meshes", "bandwidth"), [(ONE_AXIS, 1e8), (TWO_AXES, 1e9)])
def test_no_split_of_a_graph_with_a_tied_parameter_is_better(meshes, bandwidth):
    """Its readers share copies and one sum of gradients."""
    problem = given(small(*TIED[meshes], tied=True), 4, bandwidth, recompute=Recompute.NONE)
    for view in (one for one in views(problem) if one.mesh in meshes):
        check(problem, view)


@pytest.mark.parametrize(("graph", "bounds", "meshes"), BLOCKS)
def test_no_split_whose_blocks_run_again_is_better(graph, bounds, meshes):
    profile = small(*graph)
    blocks, again = blocks_in(profile, bounds), []
    for problem in (given(profile, count, 1e8) for count in (2, 4)):
        for view in (one for one in views(problem) if one.mesh in meshes and one.replicas < 4):
            again += check(problem, view, blocks)
    assert len(blocks) == len(bounds)
    assert len(set(again)) > 2


def test_no_split_whose_blocks_keep_products_is_better():
    """Each block is kept, runs again, or but for the products inside."""
    profile = small(44, 7, 2, 1)
    problem = given(profile, 4, 1e8)
    blocks = blocks_in(profile, ((0, 3), (3, 6)), selected=True)
    view = next(one for one in views(problem) if one.mesh == (2,) and one.replicas == 2)
    again = check(problem, view, blocks)
    assert {len(some) for one in again for some in one} == {2, 3}


def test_no_split_whose_blocks_all_run_again_is_better():
    graph, bounds, _ = BLOCKS[0]
    profile = small(*graph)
    problem = given(profile, 4, 1e8, recompute=Recompute.FULL)
    blocks = [replace(one, segments=one.segments[1:]) for one in blocks_in(profile, bounds)]
    every = tuple(one.segments[0] for one in blocks)
    for view in (one for one in views(problem) if one.mesh in ONE_AXIS):
        assert set(check(problem, view, blocks)) == {every}
