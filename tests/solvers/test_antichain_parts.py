"""The antichain solver where replicas keep parts of a stage: against brute force by the evaluator,
and where nothing fits otherwise.
"""

import math
from dataclasses import replace
from itertools import combinations, pairwise, product

from hypothesis import strategies as st

from planner.artefacts.graph import Parameter
from planner.artefacts.options import Optimizer, Recompute
from planner.artefacts.problem import Status
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, shared_level
from planner.costs.evaluate import closed_form_s, evaluate
from planner.costs.overlap import with_overlap
from planner.solvers import SOLVERS
from tests.support.builders import changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.often import often

GB = 10**9


def chain(parameters, forward_s, tensors=None, summed=0.0):
    """A profile of a chain of operators with large parameters and small tensors.

    Args:
        summed: the share of backwards in sums of gradients.
    """
    feeds = [[v - 1] if v else [] for v in range(len(parameters))]
    profile = profile_of(graph_of(feeds, tensors or [1000] * len(feeds), parameters), forward_s)
    operators = tuple(replace(one, sums_s=summed * one.backward_s) for one in profile.operators)
    return replace(profile, operators=operators)


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
    """The least closed form of all pipelines that fit by their action lists; None without one. All
    collectives are in line.
    """
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
    optimizer = draw(st.sampled_from(Optimizer))
    least, most = 1 + 0.2 * optimizer.num_moments, 2 + optimizer.num_moments
    return problem_of(
        chain(
            [n * GB for n in parameters],
            [n / 10 for n in forward_s],
            summed=draw(st.sampled_from([0.0, 0.4])),
        ),
        cluster([unit_type()] * count, draw(st.sampled_from([1e9, 1e10, 1e12])), 1e-5),
        num_microbatches=draw(st.sampled_from([2, 3, 4, 6, 12])),
        optimizer=optimizer,
        device_memory=int(draw(st.floats(least, most)) * sum(parameters) * GB),
        recompute=draw(st.sampled_from([Recompute.AUTO, Recompute.NONE])),
        overlap=False,
    )


@often(15, 150, tight_problems())
def test_finds_the_least_of_all_pipelines_in_all_ways(problem):
    """By the evaluator's times and peaks. What a pass takes beside what it keeps is counted in the
    search as over two replicas: at most half of the largest parameter too much.
    """
    result, least = SOLVERS["antichain"](problem, 10.0), least_s(problem)
    largest = max(one.bytes for one in problem.profile.graph.parameters)
    room = problem.training.device_memory - largest // 2 - 10_000
    enough = least_s(changed(problem, device_memory=room))
    if enough is None:
        assert (result.strategy is None) or least is not None
        return
    # A stage that fits whole keeps no parts, though each replica would step fewer bytes then.
    assert least <= closed_form_s(problem, result.strategy) * (1 + 1e-9)
    assert closed_form_s(problem, result.strategy) <= enough * (1 + 1e-6)
    if result.bound_s is not None:
        assert result.bound_s <= closed_form_s(problem, result.strategy) * (1 + 1e-9)


@often(15, 150, tight_problems())
def test_the_bound_holds_for_pipelines_whose_collectives_are_beside_computations(problem):
    beside = changed(problem, overlap=True)
    result = SOLVERS["antichain"](beside, 10.0)
    if result.strategy is not None and result.bound_s is not None:
        every = (with_overlap(beside, one) for one in all_pipelines(beside))
        fitting = (one for one in every if evaluate(beside, one).shortage is None)
        least = min((closed_form_s(beside, one) for one in fitting), default=math.inf)
        assert result.bound_s <= least * (1 + 1e-9)


def test_a_pipeline_with_replicas_keeps_optimizer_state_in_parts_where_nothing_fits_otherwise():
    """Two operators that cannot be cut, with eight parameters of 250 MB each, and Adam's state: one
    whole copy takes 8 GB and 2 GB of gradients in a backward, and in parts over two replicas 1 GB
    less. Links are too slow to scatter gradients in every backward.
    """
    graph = graph_of([[], [0]], [1000] * 2, [GB] * 2)
    names = [[f"w{v}.{k}" for k in range(8)] for v in range(2)]
    parameters = [Parameter(name, (GB // 4,), "int8", True) for some in names for name in some]
    operators = [
        replace(one, parameters=tuple(some))
        for one, some in zip(graph.operators, names, strict=True)
    ]
    graph = replace(graph, operators=tuple(operators), parameters=tuple(parameters))
    problem = problem_of(
        profile_of(graph, [1.0, 1.0]),
        cluster([unit_type()] * 4, 1e9),
        num_microbatches=12,
        optimizer=Optimizer.ADAM,
        device_memory=int(9.5 * GB),
        overlap=False,
    )
    for name in ("single", "data-parallel", "even"):
        assert SOLVERS[name](problem, 10.0).strategy is None
    strategy = SOLVERS["antichain"](problem, 10.0).strategy
    found = [(stage.num_replicas, stage.over, stage.zero) for stage in strategy.stages]
    assert found == [(2, 2, 1), (2, 2, 1)]
    assert evaluate(problem, strategy).shortage is None


def test_no_stage_keeps_parts_where_one_device_has_room_for_the_whole_model():
    problem = problem_of(chain([GB] * 3, [1.0] * 3), cluster([unit_type()] * 4), optimizer="adam")
    result = SOLVERS["antichain"](problem, 10.0)
    assert "in parts" not in result.space
    assert not any(map(shared_level, result.strategy.stages))


def test_no_stage_keeps_parts_under_the_schedule_of_pipedream():
    tight = problem_of(
        chain([GB] * 2, [1.0] * 2), cluster([unit_type()] * 4), optimizer="adam",
        device_memory=3 * GB, schedule=ScheduleName.PIPEDREAM,
    )  # fmt: skip
    result = SOLVERS["antichain"](tight, 10.0)
    assert result.strategy is None
    assert result.status is Status.UNKNOWN


def test_even_keeps_optimizer_state_in_parts_where_no_whole_copies_fit():
    """512 operators of 200 MB in 64 stages of two replicas: 6.4 GB whole, 6.1 GB in parts."""
    problem = problem_of(
        chain([GB // 5] * 512, [1.0] * 512), cluster([unit_type()] * 128, 1e12), 128,
        optimizer=Optimizer.ADAM, recompute=Recompute.NONE,
    )  # fmt: skip
    for room, sharing in ((6.7, (1, 0)), (6.3, (2, 1))):
        tight = changed(problem, device_memory=int(room * GB))
        stages = SOLVERS["even"](tight, 10.0).strategy.stages
        assert {(one.num_replicas, one.over, one.zero) for one in stages} == {(2, *sharing)}
    without = changed(problem, device_memory=3 * GB, optimizer=Optimizer.SGD)
    assert SOLVERS["even"](without, 10.0).strategy is None
