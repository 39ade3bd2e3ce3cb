"""A limit of work holds for building models and for judging, too."""

import math
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from planner.artefacts.options import Objective
from planner.artefacts.problem import Status
from planner.artefacts.strategy import ScheduleName
from planner.costs.evaluate import evaluate
from planner.planning import judge as judging
from planner.planning.portfolio import ask_solvers, comparison
from planner.solvers import baselines, registry
from planner.solvers.fit import surely_short
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit.bounds import phase_bounds_of
from planner.solvers.netsplit.cpsat_model import (
    add_apart,
    add_phase,
    add_sent,
    add_transfers,
    model_of,
    num_constraints,
)
from planner.solvers.netsplit.jobs import known_placement_of
from planner.solvers.netsplit.model import instance_of
from planner.solvers.placement.problem import placement_problem_of
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.netsplit_instances import problem_from
from tests.support.often import often


def single_operators(num_devices, num_operators=30):
    problem = placement_problem_of(problem_from(0, num_devices, num_operators))
    return instance_of(problem, [(i,) for i in range(problem.num_operators)])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("num_devices", [4, 12])
def test_the_size_of_a_model_is_known_before_it_is_built(num_devices, channels):
    instance = single_operators(num_devices)
    known = known_placement_of(instance, [0] * instance.problem.num_operators)
    model = model_of(instance, known, memory=False)
    add_apart(model)
    if channels:
        add_sent(model)
    for backward in (False, True):
        bounds = phase_bounds_of(instance, backward=backward)
        phase = add_phase(model, bounds, 10**9, backward=backward)
        if channels:
            add_transfers(phase)
    built = len(model.cp.proto.constraints)
    estimated = num_constraints(instance, (False, True), channels=channels)
    # (b) has fewer where links are equal, and then no constraint for a pair of devices.
    assert built / 2 < estimated < 12 * built


def test_a_model_that_takes_too_long_to_build_is_not_built(monkeypatch):
    instance = single_operators(6, num_operators=10)
    start = (0,) * instance.problem.num_operators
    asked = []
    solved = netsplit_cpsat._solved
    monkeypatch.setattr(
        netsplit_cpsat, "_solved", lambda *given: asked.append(given) or solved(*given)
    )
    size = num_constraints(instance, (False,), channels=False)
    netsplit_cpsat.solve(instance, 5.0, start)
    assert asked
    asked.clear()
    monkeypatch.setattr(netsplit_cpsat, "CONSTRAINTS_PER_S", size / 5.0)
    answer = netsplit_cpsat.solve(instance, 5.0, start)
    assert not asked
    assert answer.device_of is not None
    assert answer.status is Status.FEASIBLE


@often(
    30,
    100,
    st.integers(1_000, 60_000),
    st.integers(1, 6),
    st.lists(st.integers(0, 4_000), min_size=5, max_size=5),
    st.sampled_from([ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE]),
)
def test_a_strategy_that_is_passed_over_does_not_fit(memory, num_microbatches, sizes, schedule):
    """It is passed over before its action lists are made."""
    graph = graph_of([[], [0], [1], [0, 2], [3]], sizes, [3_000] * 5)
    topology = cluster([unit_type(memory=memory)] * 4)
    problem = problem_of(
        profile_of(graph, [1.0] * 5), topology, num_microbatches, schedule=schedule,
        reserve=0,
    )  # fmt: skip
    for strategy in baselines._pipelines(problem):
        if surely_short(problem, strategy):
            assert evaluate(problem, strategy).shortage is not None


def test_strategies_are_passed_over_without_action_lists(monkeypatch):
    graph = graph_of([[], [0], [1]], parameter_bytes=[10_000] * 3)
    topology = cluster([unit_type(memory=15_000)] * 3)
    problem = problem_of(profile_of(graph, [1.0] * 3), topology, 2, reserve=0)
    assert all(surely_short(problem, one) for one in baselines._pipelines(problem))
    assert "the limit is 14.6 KiB" in baselines.even(problem, 1.0).reason


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_limit_without_end_is_one_of_months(objective, num_microbatches, monkeypatch):
    monkeypatch.setattr(registry, "LONGEST_S", 0.02)
    profile, topology = profile_of(graph_of([[], [0], [1]]), [1e-3] * 3), cluster([unit_type()] * 2)
    problem = problem_of(profile, topology, num_microbatches, objective=objective)
    result = registry.SOLVERS["netsplit"](problem, math.inf)
    assert result.strategy is not None


def test_no_more_variants_are_simulated_when_the_work_is_done():
    profile = profile_of(graph_of([[], [0], [1], [2]]), [1.0] * 4)
    problem = problem_of(profile, cluster([unit_type()] * 3))
    (one, other) = ask_solvers(problem, ["even", "single"], math.inf, lambda name: None).answers
    result = replace(one.result, others=(other.result.strategy,))
    unhurried, _ = judging.judge(problem, "even", result)
    verdict, _ = judging.judge(problem, "even", result, unhurried.work_s * 0.9)
    assert unhurried.notes == ()
    assert 0 < verdict.work_s < unhurried.work_s
    assert verdict.notes == (
        "1 of 2 variants of the even plan were not simulated: the work for that was done",
    )


def test_what_the_brake_cut_is_said_in_a_line():
    profile = profile_of(graph_of([[], [0], [1], [2]]), [1.0] * 4)
    problem = problem_of(profile, cluster([unit_type()] * 3))
    made = ask_solvers(problem, ["even"], math.inf, lambda name: None)
    assert comparison([made]).notes == ()
    (attempt,) = made.answers
    cut = replace(attempt, result=replace(attempt.result, reproducible=False))
    assert comparison([replace(made, answers=(cut,))]).notes == (
        "the brake cut the search of even: it took 10 times its limit in processor time; another"
        " run may find another plan",
    )
