"""Constraint models as mixed integer programs have the same optimum."""

import math

import pytest
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from planner.artefacts.problem import Status
from planner.solvers.engines.cp_as_mip import mip_of
from planner.solvers.engines.mip import MipLimits, highs
from planner.support.brake import Brake
from tests.support.often import often

LENGTH = 20


def by_cp_sat(cp):
    """Status and value."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = Status(solver.status_name(solver.solve(cp)).lower())
    return status, math.inf if status is Status.INFEASIBLE else solver.objective_value


def by_highs(cp):
    answer = highs(mip_of(cp), MipLimits(math.inf), {}, Brake(60.0))
    return answer.status, answer.value


@st.composite
def schedules(draw):
    """Jobs on two machines, in the words that NetSplit's models have: some wait for others, some
    only if they are on a machine, and each machine runs one at a time.
    """
    cp, num = cp_model.CpModel(), draw(st.integers(2, 4))
    start = [cp.new_int_var(draw(st.integers(0, 3)), LENGTH, "") for _ in range(num)]
    x = [[cp.new_bool_var("") for _ in range(2)] for _ in range(num)]
    ticks = [[draw(st.integers(1, 4)) for _ in range(2)] for _ in range(num)]
    end = cp.new_int_var(0, draw(st.sampled_from([LENGTH, 6])), "")
    for i, row in enumerate(x):
        cp.add_exactly_one(row)
        cp.add(end >= start[i] + sum(t * one for t, one in zip(ticks[i], row, strict=True)))
    pairs = [(i, j) for j in range(num) for i in range(j)]
    for i, j in draw(st.lists(st.sampled_from(pairs), max_size=2)):
        apart = cp.new_bool_var("")
        for p in range(2):
            cp.add_bool_or(~x[i][p], x[j][p], apart)
            cp.add_bool_or(~x[i][p], ~x[j][p], ~apart)
        cp.add(start[j] >= start[i] + ticks[i][0] + 2 * apart)
        cp.add(start[j] <= start[i] + 9).only_enforce_if([x[i][0], ~x[j][1]])
    for i, j in draw(st.lists(st.sampled_from(pairs), max_size=1)):
        cp.add_implication(x[i][0], ~x[j][0])
    for one in draw(st.lists(st.sampled_from([row[0] for row in x]), max_size=2)):
        cp.add_bool_or([~x[0][0]]).only_enforce_if(one)
    room = draw(st.integers(10**10, 4 * 10**10))
    for p in range(2):
        cp.add(sum(10**10 * row[p] for row in x) <= room)
        cp.add_no_overlap([
            cp.new_optional_fixed_size_interval_var(start[i], ticks[i][p], row[p], "")
            for i, row in enumerate(x)
        ] + [cp.new_fixed_size_interval_var(0, draw(st.integers(1, 2)), "")])  # fmt: skip
    cp.minimize(end + 2 * start[0])
    return cp


@often(20, 80, schedules())
def test_highs_finds_the_optimum_of_a_constraint_model(cp):
    status, value = by_cp_sat(cp)
    assert by_highs(cp) == (status, pytest.approx(value))


def test_two_intervals_of_one_start_are_never_both_there():
    cp = cp_model.CpModel()
    start, both = cp.new_int_var(0, 9, ""), [cp.new_bool_var("") for _ in range(2)]
    cp.add_no_overlap([cp.new_optional_fixed_size_interval_var(start, 2, one, "") for one in both])
    cp.minimize(start - sum(both))
    assert by_highs(cp) == by_cp_sat(cp) == (Status.OPTIMAL, -1)


def test_what_no_row_says_is_an_error():
    cp = cp_model.CpModel()
    cp.add_all_different([cp.new_int_var(0, 3, "") for _ in range(2)])
    with pytest.raises(ValueError, match="no row says"):
        mip_of(cp)
