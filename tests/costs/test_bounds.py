"""The certificate's lower bound against every strategy there is, judged by the simulator."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.artefacts.graph import predecessors
from planner.artefacts.options import Objective
from planner.artefacts.profile import Contention
from planner.artefacts.strategy import asynchronous_violations
from planner.costs.bounds import lower_bound_s
from planner.costs.closed_form import bottleneck_s, latency_s
from planner.costs.evaluate import evaluate
from planner.planning.judge import with_deeper_warmup
from planner.simulator.steady import iterate
from planner.solvers.fit import pipeline
from planner.solvers.graphs.downsets import downsets, members
from tests.support.builders import changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.strategies import problems


def chains(sets, rest):
    """Every way to run a downset in stages, the first stage first."""
    if not rest:
        yield []
    for before in sets:
        if before < rest:
            for earlier in chains(sets, before):
                yield [*earlier, sorted(rest - before)]


def groups(devices, count):
    """Every way to give disjoint groups of devices to `count` stages."""
    if count == 0:
        yield []
        return
    for width in range(1, len(devices) + 1):
        for chosen in combinations(devices, width):
            left = [d for d in devices if d not in chosen]
            for others in groups(left, count - 1):
                yield [list(chosen), *others]


def all_strategies(problem):
    """Every partition, replication and placement, with two warm-up depths."""
    feeds = predecessors(problem.profile.graph)
    sets = [frozenset(members(mask)) for mask in downsets(feeds).masks]
    everything = list(range(len(problem.topology.devices)))
    for stages in chains(sets, sets[-1]):
        for where in groups(everything, len(stages)):
            if max(map(len, where)) <= problem.num_microbatches:
                one = pipeline(problem, stages, where, recompute=False)
                if not any(asynchronous_violations(one, problem.profile.graph)):
                    yield from {one, with_deeper_warmup(one)}


def judged_s(problem, strategy):
    evaluation = evaluate(problem, strategy)
    match problem.training.objective:
        case Objective.ITERATION:
            return iterate(problem, strategy, evaluation).iteration_s
        case Objective.BOTTLENECK:
            return bottleneck_s(evaluation.stages, strategy.schedule)
    return latency_s(evaluation.stages)


@settings(max_examples=25)
@given(problems(max_nodes=4, max_devices=3))
def test_no_strategy_at_all_is_below_the_bound(problem):
    problem = changed(problem, num_microbatches=3)
    bound = lower_bound_s(problem)
    assert bound > 0
    assert min(judged_s(problem, one) for one in all_strategies(problem)) >= bound * (1 - 1e-9)


@settings(max_examples=25)
@given(problems(max_nodes=4, max_devices=3), st.data())
def test_nor_where_hosts_start_kernels(problem, data):
    def started(one):
        factors = [data.draw(st.sampled_from([0.0, 0.5, 1.5, 4.0])) for _ in range(2)]
        forward_s, backward_s = factors[0] * one.forward_s, factors[1] * one.backward_s
        return replace(one, host_forward_s=forward_s, host_backward_s=backward_s)

    free_s = lower_bound_s(changed(problem, num_microbatches=3))
    profile = problem.profile
    profile = replace(profile, operators=tuple(map(started, profile.operators)))
    problem = changed(problem, profile=profile, num_microbatches=3)
    bound = lower_bound_s(problem)
    assert bound >= free_s * (1 - 1e-9)
    assert min(judged_s(problem, one) for one in all_strategies(problem)) >= bound * (1 - 1e-9)


@settings(max_examples=25)
@given(problems(max_nodes=4, max_devices=3), st.data())
def test_nor_where_processes_slow_each_other_down(problem, data):
    # Above 2, two processes together do less than one alone.
    slow = [data.draw(st.sampled_from([1.0, 1.1, 1.5, 1.9, 2.5])) for _ in range(2)]
    host = replace(problem.topology.hosts[0], cores=2)
    devices = tuple(replace(one, type="unit") for one in problem.topology.devices)
    problem = changed(
        problem,
        profile=replace(problem.profile, contention=Contention(2, {2: slow[0], 3: max(slow)})),
        topology=replace(problem.topology, hosts=(host,), devices=devices),
        num_microbatches=3,
    )
    assume({one.name for one in problem.topology.device_types} >= {"unit"})
    bound = lower_bound_s(problem)
    assert min(judged_s(problem, one) for one in all_strategies(problem)) >= bound * (1 - 1e-9)


@pytest.mark.parametrize("slow", [1.0, 1.25, 1.9])
def test_the_bound_is_reached_by_replicas_that_slow_each_other_down(slow):
    profile = profile_of(graph_of([[], [0]], parameter_bytes=[0, 0]), [1.0, 2.0])
    profile = replace(profile, contention=Contention(2, {2: slow}))
    problem = problem_of(profile, cluster([unit_type()] * 2, 1e18, cores=2), 8)
    everything = pipeline(problem, [[0, 1]], [[0, 1]], recompute=False)
    assert lower_bound_s(problem) == pytest.approx(8 * 9.0 * slow / 2)
    assert judged_s(problem, everything) == pytest.approx(lower_bound_s(problem))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_bound_is_reached_where_nothing_is_in_the_way(devices):
    profile = profile_of(graph_of([[], [0]], parameter_bytes=[0, 0]), [1.0, 2.0])
    problem = problem_of(profile, cluster([unit_type()] * devices, 1e18), 4 * devices)
    everything = pipeline(problem, [[0, 1]], [list(range(devices))], recompute=False)
    assert judged_s(problem, everything) == pytest.approx(lower_bound_s(problem))
