"""Sums of gradients beside the backward: buckets, what is left of a backward, the closed form."""

from dataclasses import replace
from unittest import mock

import pytest

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, gradient_sums
from planner.artefacts.topology import Host
from planner.costs.bounds import lower_bound_s
from planner.costs.closed_form import exposed_sum_s
from planner.costs.evaluate import evaluate
from planner.costs.stage_pass import backward_left_s, sums_overlap_compute
from planner.simulator.events import run
from tests.support.builders import asked, cluster, graph_of, profile_of, unit_type

MB = 10**6


def chain_of(sizes_mb):
    """Operators in a row with a parameter each."""
    feeds = [[v - 1] if v else [] for v in range(len(sizes_mb))]
    return graph_of(feeds, [1000] * len(sizes_mb), [size * MB for size in sizes_mb])


def replicas_of(graph, count, num_microbatches=None):
    names = tuple(operator.name for operator in graph.operators)
    stage = Stage.whole(names, range(count), 1, False)
    return Strategy((stage,), ScheduleName.ONE_F_ONE_B, num_microbatches or count)


def on_hosts(topology, hosts):
    """The topology with its devices on hosts by name; each has as many cores as are given."""
    devices = [
        replace(d, host=h) for d, h in zip(topology.devices, [n for n, _ in hosts], strict=True)
    ]
    there = tuple(Host(name, cores=cores) for name, cores in dict(hosts).items())
    return replace(topology, devices=tuple(devices), hosts=there)


def problem_of(sizes_mb, count, bandwidth=1e9, times=None):
    graph = chain_of(sizes_mb)
    profile = profile_of(graph, times or [0.01] * len(sizes_mb))
    profile = replace(profile, device_type="unit")
    return Problem(profile, cluster([unit_type()] * count, bandwidth=bandwidth), **asked(count))


def test_a_host_that_waits_for_kernels_waits_for_sums_too():
    free = problem_of([10, 10], 2)
    assert sums_overlap_compute(free, [0, 1], [0, 1])
    awaited = replace(free, profile=replace(free.profile, launch_blocking=True))
    assert not sums_overlap_compute(awaited, [0, 1], [0, 1])


def test_buckets_grow_to_25_mib_in_the_order_of_a_backward():
    graph = chain_of([10, 10, 10, 40, 5])
    sums = gradient_sums(replicas_of(graph, 2), graph)
    names = [p.name for p in graph.parameters]
    # Backwards: 5 and 40 alone because they are above 1 and 4 MiB, 10 because 20 is above 16 MiB.
    assert [one.parameters for one in sums] == [
        (names[4],), (names[3],), (names[2],), (names[1], names[0]),
    ]  # fmt: skip
    assert [one.bytes for one in sums] == [5 * MB, 40 * MB, 10 * MB, 20 * MB]


def test_a_model_of_many_bytes_has_no_more_buckets_than_help():
    graph = chain_of([1000] * 100)
    sizes = [one.bytes // (1000 * MB) for one in gradient_sums(replicas_of(graph, 2), graph)]
    assert sizes == [1] * 6 + [3] * 31 + [1]  # of at most 1 MiB to 1 GiB, then of 3.125 GB


def test_what_is_left_of_a_backward_are_the_operators_before():
    problem = problem_of([30, 30, 30], 2, times=[1.0, 2.0, 3.0])
    backward_s = [cost.backward_s for cost in problem.profile.operators]
    strategy = replicas_of(problem.profile.graph, 2)
    sums = gradient_sums(strategy, problem.profile.graph)
    left = backward_left_s(problem, strategy, sums)
    assert left[0, 0] == left[0, 1] == pytest.approx(backward_s[0] + backward_s[1])
    assert left[1, 0] == pytest.approx(backward_s[0])
    assert left[2, 0] == 0.0


def test_processes_that_leave_no_core_sum_behind_their_backwards():
    problem = problem_of([30, 30], 2)
    strategy = replicas_of(problem.profile.graph, 2)
    sums = gradient_sums(strategy, problem.profile.graph)
    for hosts, beside in (
        ([("a", 2), ("a", 2)], False),
        ([("a", 3), ("a", 3)], True),
        ([("a", None), ("a", None)], True),
        ([("a", 1), ("b", 1)], True),
    ):
        there = replace(problem, topology=on_hosts(problem.topology, hosts))
        assert sums_overlap_compute(there, (0, 1), (0, 1)) is beside
        assert bool(backward_left_s(there, strategy, sums)) is beside


def test_on_slow_links_buckets_hide_behind_the_backward():
    # 4 buckets of 25 MB at 0.5 GB/s take 0.2 s together, beside a backward of 4 x 0.1 s.
    problem = problem_of([25] * 4, 2, bandwidth=5e8, times=[0.15] * 4)
    strategy = replicas_of(problem.profile.graph, 2)
    evaluation = evaluate(problem, strategy)
    (stage,) = evaluation.stages
    whole_s = sum(evaluation.costs.sum_s)
    one_s = evaluation.costs.sum_s[-1]
    step_s = evaluation.costs.step_s[0]
    passes_s = stage.forward_s + stage.backward_s
    assert evaluation.costs.backward_left_s
    found_s = run(evaluation.program, evaluation.costs, problem.topology).iteration_s
    assert found_s == pytest.approx(passes_s + one_s + step_s)
    behind = replace(evaluation.costs, backward_left_s={})
    found_s = run(evaluation.program, behind, problem.topology).iteration_s
    assert found_s == pytest.approx(passes_s + whole_s + step_s)
    assert stage.tail_s == pytest.approx(one_s * 25 * 2**20 / 25e6 + step_s, rel=1e-3)
    assert lower_bound_s(problem) <= found_s


def test_the_closed_form_is_that_of_even_buckets():
    # n buckets of S / n, of which the k-th is ready at b k / n and waits for the one before it.
    with mock.patch("planner.costs.closed_form.BUCKET_BYTES", 1.0):
        for n in (1, 2, 5):
            for sum_s, backward_s in ((1.0, 4.0), (4.0, 1.0), (3.0, 3.0), (1.0, 0.0)):
                end_s = 0.0
                for k in range(1, n + 1):
                    end_s = max(end_s, backward_s * k / n) + sum_s / n
                found_s = exposed_sum_s(sum_s, float(n), backward_s, True)
                assert found_s == pytest.approx(end_s - backward_s)
                assert exposed_sum_s(sum_s, float(n), backward_s, False) == sum_s
