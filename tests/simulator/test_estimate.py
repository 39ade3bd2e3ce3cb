"""Estimates from short iterations, beside the whole iteration in the simulator."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.options import Objective
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.costs.closed_form import bottleneck_s
from planner.costs.evaluate import closed_form_s, evaluate, priced
from planner.planning.judge import judge_unchanged
from planner.schedules.program import program
from planner.simulator import estimate
from planner.simulator.estimate import (
    ERROR,
    MAX_COMPUTATIONS,
    OVERRATED,
    estimate_s,
    estimate_work_s,
    estimated_iteration_s,
    least_s,
    simulated_counts,
)
from planner.simulator.events import run
from planner.simulator.objective import objective_s
from planner.simulator.steady import iterate
from tests.support.builders import changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.programs import split
from tests.support.split import megatron, mlp, one_stage, two_stages, zero
from tests.support.split_pipelines import CASES, LONG, random_pipeline, shipped_problem

FAST = unit_type(bandwidth=1e9)


def problem(num_microbatches, count=4, **options):
    topology = cluster([FAST] * count, 1e9, 1e-5)
    return problem_of(mlp(), topology, num_microbatches, measured_on=FAST, **options)


def simulated_s(problem, strategy):
    """The whole iteration."""
    known = priced(problem, strategy)
    lists = program(strategy, problem.profile.graph, known.times)
    return run(lists, known.costs, problem.topology).iteration_s


@pytest.mark.parametrize(
    ("cases", "count", "counts", "most"),
    [
        (CASES[:1] + CASES[2:3], 36, LONG, 8_192),
        pytest.param(CASES, 200, LONG, MAX_COMPUTATIONS, marks=pytest.mark.slow),
        pytest.param(CASES, 200, (48, 100, 300), MAX_COMPUTATIONS, marks=pytest.mark.slow),
    ],
)
def test_random_plans_with_stages_in_parts(cases, count, counts, most, monkeypatch):
    """Iterations of many microbatches are often too long to be simulated whole."""
    monkeypatch.setattr(estimate, "MAX_COMPUTATIONS", most)
    rng, shortened = random.Random(11), 0
    for i in range(count):
        problem, strategy = random_pipeline(shipped_problem(*cases[i % len(cases)]), rng, counts)
        found_s, due_s = estimated_iteration_s(problem, strategy), simulated_s(problem, strategy)
        assert found_s == pytest.approx(due_s, rel=ERROR)
        shortened += simulated_counts(strategy)[1] < strategy.num_microbatches
    assert counts != LONG or shortened >= count / 20


def test_what_a_plan_says_of_stages_in_parts_is_within_the_error():
    rng = random.Random(5)
    for case in CASES[:1] + CASES[2:3]:
        for _ in range(6):
            problem, strategy = random_pipeline(shipped_problem(*case), rng)
            verdict, _ = judge_unchanged(problem, strategy)
            prediction = verdict.prediction
            assert prediction.closed_form_s == pytest.approx(prediction.iteration_s, rel=ERROR)


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("count", [64, 65])
def test_a_stage_has_its_pace_from_the_first_microbatch_on(level, count, monkeypatch):
    monkeypatch.setattr(estimate, "MAX_COMPUTATIONS", 1)
    strategy = one_stage(mlp(), zero(2, level), [[0, 1], [2, 3]], count)
    given = problem(count)
    assert simulated_counts(strategy)[1] < 10
    assert estimate_s(given, strategy) == pytest.approx(simulated_s(given, strategy), rel=1e-9)


@pytest.mark.parametrize("schedule", [ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE])
def test_a_long_pipeline_goes_on_at_its_pace(schedule, monkeypatch):
    monkeypatch.setattr(estimate, "MAX_COMPUTATIONS", 1)
    strategy = two_stages(mlp(), 1, (None, [[0], [1]]), (megatron(2), [[2, 3]]), 101)
    given = problem(101)
    strategy, given = replace(strategy, schedule=schedule), changed(given, schedule=schedule)
    depths = (51, 101) if schedule.has_phases else (2, 1)
    stages = zip(strategy.stages, depths, strict=True)
    strategy = replace(strategy, stages=tuple(replace(s, warmup=depth) for s, depth in stages))
    few, many = simulated_counts(strategy)
    assert few < many < 101
    assert estimate_s(given, strategy) == pytest.approx(simulated_s(given, strategy), rel=1e-9)


def test_a_pipeline_of_whole_operators_is_simulated_too():
    """An early stage that is the slowest hides round trips behind its warm-up. The closed form does
    not see that.
    """
    graph = graph_of([[], [0]], [10, 10])
    profile = profile_of(graph, [2.0, 1.0])
    given = problem_of(profile, cluster([unit_type()] * 2, 10.0), 8)
    strategy = split(graph, [1], [1, 1], 8)
    due_s = simulated_s(given, strategy)
    assert estimate_s(given, strategy) == pytest.approx(due_s, rel=1e-9)
    assert closed_form_s(given, strategy) > due_s * 1.01
    assert least_s(given, strategy) == closed_form_s(given, strategy) / OVERRATED <= due_s


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(4, 5000),
    st.integers(0, 2000),
    st.sampled_from([ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE]),
)
def test_the_numbers_simulated_leave_the_same_rest(widths, count, most, schedule):
    graph = graph_of([[v - 1] if v else [] for v in range(len(widths))])
    strategy = split(graph, list(range(1, len(widths))), widths, count, schedule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "MAX_COMPUTATIONS", most)
        few, many = simulated_counts(strategy)
    assert few <= many <= count
    assert few < many or many == count
    for width in widths:
        assert few % width == many % width == count % width
        assert few >= width


def test_very_many_microbatches_are_no_more_work():
    plans = [one_stage(mlp(), zero(4, 1), [[0, 1, 2, 3]], n) for n in (10, 10_000, 100_000)]
    few_s, many_s, more_s = map(estimate_work_s, plans)
    assert few_s < many_s
    assert more_s == pytest.approx(many_s, rel=0.01)


@pytest.mark.parametrize("objective", [Objective.BOTTLENECK, Objective.LATENCY])
def test_other_objectives(objective):
    given = problem(6, objective=objective)
    strategy = two_stages(mlp(), 1, (None, [[0], [1]]), (megatron(2), [[2, 3]]), 6)
    assert estimate_s(given, strategy) == pytest.approx(objective_s(given, strategy), rel=1e-9)
    if objective is Objective.BOTTLENECK:
        due_s = bottleneck_s(evaluate(given, strategy).stages)
        assert estimate_s(given, strategy) == due_s


def test_stages_in_parts_are_hardly_faster_than_their_estimate():
    given, strategy = problem(8), one_stage(mlp(), megatron(4), [[0, 1, 2, 3]], 8)
    due_s = simulated_s(given, strategy)
    assert 0.95 * due_s < least_s(given, strategy) < due_s


def test_a_flow_is_as_long_as_its_pace_says():
    schedule = ScheduleName.PIPEDREAM
    graph = graph_of([[], [0], [1]], [10] * 3)
    profile = profile_of(graph, [1.0, 2.0, 0.5])
    given = problem_of(profile, cluster([unit_type()] * 4, 100.0), 60, schedule=schedule)
    strategy = split(graph, [1, 2], [1, 2, 1], 60, schedule)
    due_s = iterate(given, strategy, evaluate(given, strategy)).iteration_s
    assert estimate_s(given, strategy) == pytest.approx(due_s, rel=1e-6)
    assert least_s(given, strategy) == 0.0


def test_little_is_known_of_devices_that_run_several_stages():
    graph = graph_of([[], [0], [1]])
    names = [one.name for one in graph.operators]
    given = problem_of(profile_of(graph, [1.0] * 3), cluster([unit_type()] * 2), 4)
    stages = tuple(
        Stage.whole((name,), (device,), 1, False)
        for name, device in zip(names, (0, 1, 0), strict=True)
    )
    assert least_s(given, Strategy(stages, ScheduleName.ONE_F_ONE_B, 4)) == 0.0
