"""Every solver on small problems; exact ones against brute force."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.bounds import lower_bound_s
from planner.costs.closed_form import bottleneck_s, iteration_s, latency_s
from planner.costs.evaluate import evaluate
from planner.order import downsets, members
from planner.plan import OUT_OF_TIME, compare, objective_s
from planner.problem import Objective, Recompute, Status
from planner.solvers import SOLVERS
from planner.solvers.antichain import _orders
from planner.strategy import ScheduleName, Stage, Strategy
from tests.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.strategies import problems


@pytest.fixture(params=SOLVERS)
def solver(request):
    return SOLVERS[request.param]


def price(problem, strategy):
    """The closed form of the objective, or None if the strategy does not fit."""
    evaluation = evaluate(problem, strategy)
    if evaluation.shortage:
        return None
    match problem.options.objective:
        case Objective.ITERATION:
            phases = strategy.schedule is ScheduleName.GPIPE
            return iteration_s(evaluation.stages, strategy.num_microbatches, phases=phases)
        case Objective.BOTTLENECK:
            return bottleneck_s(evaluation.stages)
    return latency_s(evaluation.stages)


def pipelines(problem):
    """Every pipeline in the space of the antichain solver, by recursion from the last stage."""
    options, operators = problem.options, problem.profile.graph.operators
    feeds = [[int(name[1:]) for name in operator.inputs if name != "x"] for operator in operators]
    sets = [frozenset(members(mask)) for mask in downsets(feeds).masks]
    num_microbatches = options.num_microbatches

    def grow(rest, order, behind):
        if not rest:
            yield Strategy(tuple(behind), options.schedule, num_microbatches)
            return
        for inside in (rest - before for before in sets if before < rest):
            for width in range(1, min(len(order), num_microbatches) + 1):
                most = -(-num_microbatches // width)
                depths = {most}
                if options.schedule is ScheduleName.ONE_F_ONE_B:
                    ahead = behind[0].warmup * behind[0].num_replicas if behind else 0
                    least = min(most, -(-ahead // width) + 1)
                    depths = {least, min(most, least + 1)} if behind else {1}
                for depth in sorted(depths):
                    names = tuple(operators[v].name for v in sorted(inside))
                    stage = Stage(names, order[-width:], depth, False)
                    yield from grow(rest - inside, order[:-width], [stage, *behind])

    for order in _orders(problem):
        yield from grow(frozenset(range(len(operators))), order, [])


@settings(max_examples=60)
@given(problems(max_nodes=5, max_devices=3))
def test_antichain_finds_the_same_objective_as_brute_force(problem):
    problem = replace(problem, options=replace(problem.options, recompute=Recompute.NONE))
    prices = [price(problem, strategy) for strategy in pipelines(problem)]
    result = SOLVERS["antichain"](problem, 10.0)
    assert result.status is Status.OPTIMAL
    assert price(problem, result.strategy) == pytest.approx(min(prices), rel=1e-9)
    assert result.bound_s == pytest.approx(min(prices), rel=1e-9)


@settings(max_examples=60)
@given(problems(max_nodes=6, max_devices=4))
def test_no_plan_is_below_the_lower_bound_or_worse_than_another_row(problem):
    comparison = compare(problem)
    assert comparison.best is not None
    for row in comparison.rows:
        if row.plan is not None:
            assert objective_s(row.plan) >= comparison.lower_bound_s * (1 - 1e-9)
            assert objective_s(comparison.best.plan) <= objective_s(row.plan)


def test_every_solver_plans_a_chain(solver):
    profile = profile_of(graph_of([[], [0], [1], [2]]), [1.0, 2.0, 1.0, 2.0])
    problem = problem_of(profile, cluster([unit_type()] * 2))
    result = solver(problem, 10.0)
    assert evaluate(problem, result.strategy).shortage is None


def test_every_solver_says_why_nothing_fits(solver):
    profile = profile_of(graph_of([[], [0]], parameter_bytes=[600, 600]), [1.0, 1.0])
    problem = problem_of(profile, cluster([unit_type(memory=700)] * 2))
    result = solver(problem, 10.0)
    assert result.status in (Status.INFEASIBLE, Status.UNKNOWN)
    assert result.strategy is None
    assert "the limit is 700 B" in result.reason


def test_memory_drives_the_antichain_solver_to_cut():
    # Parameters and gradients alone take 8,000 B for the whole, 4,000 B for half of it.
    graph = graph_of([[], [0], [1], [2]], tensor_bytes=[10] * 4)
    profile = profile_of(graph, [1.0] * 4, stash=False)
    problem = problem_of(profile, cluster([unit_type(memory=9_000)] * 2, bandwidth=1e12))
    strategy = SOLVERS["antichain"](problem, 10.0).strategy
    assert [len(stage.operators) for stage in strategy.stages] == [2, 2]


def test_recomputation_is_used_only_where_the_stash_does_not_fit():
    graph = graph_of([[], [0]], tensor_bytes=[4000, 10], parameter_bytes=[10, 10])
    profile = profile_of(graph, [1.0, 1.0])
    roomy = problem_of(profile, cluster([unit_type(memory=10**6)]))
    assert not SOLVERS["antichain"](roomy, 10.0).strategy.stages[0].recompute
    # Four in flight with GPipe: 4 x (1000 + 4000 + 10 + 10) B do not fit, 4 x 1010 B do.
    tight = replace(
        roomy,
        topology=cluster([unit_type(memory=17_000)]),
        options=replace(roomy.options, schedule=ScheduleName.GPIPE),
    )
    strategy = SOLVERS["antichain"](tight, 10.0).strategy
    assert strategy.stages[0].recompute
    assert evaluate(tight, strategy).memory[0].stash_bytes < 17_000 < 4 * 5020
    never = replace(tight, options=replace(tight.options, recompute=Recompute.NONE))
    assert SOLVERS["antichain"](never, 10.0).strategy is None


@given(problems(max_nodes=5, max_devices=3), st.integers(0, 4000))
def test_what_fits_on_one_device_is_never_called_infeasible(problem, spare):
    options = replace(problem.options, recompute=Recompute.NONE)
    roomy = replace(problem, options=options)
    alone = SOLVERS["single"](roomy, 10.0).strategy
    (peak,) = (parts.total_bytes for parts in evaluate(roomy, alone).memory.values())
    tight = replace(roomy, options=replace(options, device_memory_bytes=peak + spare))
    comparison = compare(tight)
    assert comparison.best is not None
    assert SOLVERS["antichain"](tight, 10.0).status is not Status.INFEASIBLE


def test_more_processes_on_a_host_never_make_a_model_infeasible():
    graph = graph_of([[]], parameter_bytes=[1000])
    for count in (1, 2, 8, 50):
        topology = cluster([unit_type()] * count, cores=2, memory=10_000)
        problem = problem_of(profile_of(graph, [1.0]), topology, reserve_bytes=1000)
        assert compare(problem).best is not None


def test_a_search_out_of_time_says_which_solvers_were_not_asked():
    profile = profile_of(graph_of([[], [0], [1]]), [1.0, 2.0, 1.0])
    comparison = compare(problem_of(profile, cluster([unit_type()] * 2)), time_limit_s=0.0)
    assert [row.reason for row in comparison.rows[1:]] == [OUT_OF_TIME] * 3
    assert not comparison.best.plan.reproducible


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


def test_sixty_four_devices_are_planned_in_bounded_work():
    profile = profile_of(graph_of([[v - 1] if v else [] for v in range(60)]), [1e-3] * 60)
    problem = problem_of(profile, cluster([unit_type()] * 64, 1e12), num_microbatches=64)
    result = SOLVERS["antichain"](problem, 10.0)
    assert result.status is Status.FEASIBLE
    assert "1 2 4 8 16 32 64 replicas" in result.space


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


def test_the_cube_mesh_order_follows_double_links():
    matrix = ["02112000", "20120100", "11020020", "12200001",
              "20000211", "01002012", "00201102", "00011220"]  # fmt: skip
    links = [
        (p, q, int(matrix[p][q]) * 21.7e9)
        for p in range(8)
        for q in range(p)
        if matrix[p][q] != "0"
    ]
    problem = problem_of(
        profile_of(graph_of([[]]), [1.0]), cluster([unit_type()] * 8, 12e9, links=links)
    )
    chosen = _orders(problem)[1]
    widths = [int(matrix[a][b]) for a, b in pairwise(chosen)]
    assert widths == [2] * 7
