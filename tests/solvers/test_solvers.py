"""Every solver on small problems."""

import pytest
from hypothesis import strategies as st

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.artefacts.strategy import ScheduleName
from planner.costs.bounds import lower_bound_s
from planner.costs.evaluate import evaluate
from planner.planning.judge import objective_s
from planner.planning.portfolio import OUT_OF_TIME, compare
from planner.reports.plans import reason_lines
from planner.solvers.registry import SOLVERS, automatic, portfolio
from tests.support.builders import (
    changed,
    cluster,
    graph_of,
    hierarchy,
    problem_of,
    profile_of,
    unit_type,
)
from tests.support.often import often
from tests.support.strategies import problems


@pytest.fixture(params=automatic(rules=False))
def solver(request):
    return SOLVERS[request.param]


@often(20, 60, problems(max_nodes=6, max_devices=4))
def test_no_plan_is_below_the_lower_bound_or_worse_than_another_row(problem):
    comparison = compare(problem)
    assert comparison.best is not None
    for row in comparison.rows:
        if row.plan is not None:
            assert objective_s(row.plan) >= comparison.lower_bound_s * (1 - 1e-9)
            assert objective_s(comparison.best.plan) <= objective_s(row.plan)


def test_every_solver_plans_a_chain(solver):
    profile = profile_of(graph_of([[], [0], [1], [2]]), [1.0, 2.0, 1.0, 2.0])
    problem = problem_of(profile, hierarchy([2]))
    result = solver(problem, 10.0)
    assert evaluate(problem, result.strategy).shortage is None


def test_every_solver_says_why_nothing_fits(solver):
    profile = profile_of(graph_of([[], [0]], parameter_bytes=[600, 600]), [1.0, 1.0])
    problem = problem_of(profile, hierarchy([2], kind=unit_type(memory=700)))
    result = solver(problem, 10.0)
    assert result.status in (Status.INFEASIBLE, Status.UNKNOWN)
    assert result.strategy is None
    assert "the limit is 700 B" in result.reason


@often(20, 100, problems(max_nodes=5, max_devices=3), st.integers(0, 4000))
def test_what_fits_on_one_device_is_never_called_infeasible(problem, spare):
    roomy = changed(problem, recompute=Recompute.NONE)
    alone = SOLVERS["single"](roomy, 10.0).strategy
    (peak,) = (parts.total_bytes for parts in evaluate(roomy, alone).memory.values())
    tight = changed(roomy, device_memory=peak + spare)
    comparison = compare(tight)
    assert comparison.best is not None
    assert SOLVERS["antichain"](tight, 10.0).status is not Status.INFEASIBLE


def test_more_processes_on_a_host_never_make_a_model_infeasible():
    graph = graph_of([[]], parameter_bytes=[1000])
    for count in (1, 2, 8, 50):
        topology = cluster([unit_type()] * count, cores=2, memory=10_000)
        problem = problem_of(profile_of(graph, [1.0]), topology, reserve=1000)
        assert compare(problem).best is not None


def test_a_search_without_work_left_says_which_solvers_were_not_asked():
    profile = profile_of(graph_of([[], [0], [1]]), [1.0, 2.0, 1.0])
    slow = cluster([unit_type()] * 2, bandwidth=1e3)
    comparison = compare(problem_of(profile, slow), time_limit_s=0.0)
    reasons = {row.solver: row.reason for row in comparison.rows}
    assert reasons == {
        name: None if SOLVERS[name].always_asked else OUT_OF_TIME for name in portfolio(rules=False)
    }
    assert comparison.best.solver == "data-parallel"
    assert comparison.best.plan.reproducible


def test_a_plan_within_one_percent_of_the_bound_ends_the_search():
    problem = problem_of(profile_of(graph_of([[]]), [1.0]), cluster([unit_type()]))
    rows = compare(problem).rows
    assert rows[0].plan.certificate.gap < 0.01
    assert all("within 1% of the bound" in row.reason for row in rows[1:])


def test_baselines_take_the_fast_devices_first():
    kinds = [unit_type("slow", flops=1e11)] * 2 + [unit_type()] * 2
    profile = profile_of(graph_of([[], [0]]), [1.0, 1.0])
    problem = problem_of(profile, cluster(kinds), num_microbatches=2)
    assert SOLVERS["single"](problem, 10.0).strategy.stages[0].devices == (2,)
    assert SOLVERS["data-parallel"](problem, 10.0).strategy.stages[0].devices == (2, 3)
    even = SOLVERS["even"](problem, 10.0).strategy
    assert sorted(d for stage in even.stages for d in stage.devices) == [2, 3]


@pytest.mark.parametrize(
    ("microbatches", "schedule", "where", "reason"),
    [
        (1, "1f1b", "1 of 2", "1 microbatch per iteration for 2 devices: a device needs at least"),
        (
            3,
            "pipedream",
            "1 of 2",
            "3 microbatches cannot be dealt evenly to 2 devices, as the sch",
        ),
        (
            3,
            "1f1b",
            "all",
            "3 microbatches cannot be dealt evenly to 2 devices: some compute 2 and",
        ),
        (21, "1f1b", "all", None),
        (4, "pipedream", "all", None),
    ],
)
def test_data_parallelism_says_why_it_leaves_devices_idle(microbatches, schedule, where, reason):
    profile = profile_of(graph_of([[], [0]]), [1.0, 1.0])
    schedule = ScheduleName(schedule)
    problem = problem_of(profile, hierarchy([2]), num_microbatches=microbatches, schedule=schedule)
    comparison = compare(problem, ("data-parallel", "single"))
    (row, _) = comparison.rows
    assert row.answer.result.space == f"one stage on {where} devices"
    assert row.reason is None if reason is None else row.reason.startswith(reason)
    assert reason is None or f"data-parallel: {row.reason}" in reason_lines(comparison)


def test_bounds_of_a_mixed_cluster_use_each_type_at_its_speed():
    fast, slow = unit_type("unit", flops=1e12), unit_type("slow", flops=0.5e12)
    profile = profile_of(graph_of([[], [0], [1]]), [1.0, 1.0, 1.0])  # 9 s of work per microbatch
    problem = problem_of(profile, cluster([fast, slow]), num_microbatches=10)
    # Rates 1 and 1/2: T (1 + 1/2) = 9 s, ten times.
    assert lower_bound_s(problem) == pytest.approx(60.0)


def test_devices_on_shared_cores_count_only_as_many_as_there_are_cores():
    profile = profile_of(graph_of([[]]), [1.0])
    problem = problem_of(profile, cluster([unit_type()] * 4, cores=2), num_microbatches=8)
    assert lower_bound_s(problem) == pytest.approx(8 * 3.0 / 2)
