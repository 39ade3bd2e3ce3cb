"""A limit of work holds for building models and for judging, too."""

import math
from dataclasses import replace

import pytest
from ortools.sat.python import cp_model

from planner.judging import judge as judging
from planner.judging.portfolio import attempts, comparison
from planner.problem import Status
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit.bounds import phase_bounds_of
from planner.solvers.netsplit.cpsat_model import (
    add_apart,
    add_channels,
    add_transfers,
    num_constraints,
    phase_of,
    placement_of,
)
from planner.solvers.netsplit.model import instance_of, known_placement_of
from planner.solvers.placement.problem import placement_problem_of
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.netsplit_instances import problem_from


def single_operators(num_devices, num_operators=30):
    problem = placement_problem_of(problem_from(0, num_devices, num_operators))
    return instance_of(problem, [(i,) for i in range(problem.num_operators)])


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("num_devices", [4, 12])
def test_the_size_of_a_model_is_known_before_it_is_built(num_devices, channels):
    instance = single_operators(num_devices)
    known = known_placement_of(instance, [0] * instance.problem.num_operators)
    model = placement_of(instance, cp_model.CpModel(), known.device_of, memory=False)
    add_apart(model, known.device_of)
    if channels:
        add_transfers(model, known.device_of)
    for backward in (False, True):
        bounds = phase_bounds_of(instance, backward=backward)
        phase = phase_of(model, bounds, known, 10**9, backward=backward)
        if channels:
            add_channels(model, phase, known, 10**9)
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


def test_no_more_variants_are_simulated_when_the_work_is_done():
    profile = profile_of(graph_of([[], [0], [1], [2]]), [1.0] * 4)
    problem = problem_of(profile, cluster([unit_type()] * 3))
    (one, other) = attempts(problem, ["even", "single"], math.inf, lambda name: None).of_solvers
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
    made = attempts(problem, ["even"], math.inf, lambda name: None)
    assert comparison([made]).notes == ()
    (attempt,) = made.of_solvers
    cut = replace(attempt, result=replace(attempt.result, reproducible=False))
    assert comparison([replace(made, of_solvers=(cut,))]).notes == (
        "the brake cut the search of even: it took 10 times its limit in processor time; another"
        " run may find another plan",
    )
