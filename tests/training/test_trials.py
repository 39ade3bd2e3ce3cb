"""Which plans this host can run, and how fast they were."""

from dataclasses import replace

import pytest

from planner.planning.portfolio import compare
from planner.training.trials import Host, Trial, obstacle
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

TWO_CORES = Host(2, ())
TWO_H200 = Host(2, ("NVIDIA H200", "NVIDIA H200"))


def data_parallel(*types, **changes):
    """A plan that uses a device of each of these types."""
    profile = profile_of(graph_of([[], [0]], [10, 10], [10, 10]), [0.5, 0.5])
    kinds = [unit_type(name) for name in types]
    problem = problem_of(profile, cluster(kinds), len(types), measured_on=unit_type())
    (row,) = compare(problem, ("data-parallel",), 1.0).rows
    assert len(row.plan.ranks) == len(types)
    return replace(row.plan, **changes)


@pytest.mark.parametrize(("plan", "host", "words"), [
    (data_parallel("cpu", "cpu"), TWO_CORES, None),
    (data_parallel("cpu", "cpu", "cpu"), TWO_CORES, "needs 3 processes; this host has 2 cores"),
    (data_parallel("cpu", "cpu"), Host(1, ()), "needs 2 processes; this host has 1 core"),
    (data_parallel("cpu", "cpu", hosts=("a", "b")), TWO_CORES,
     "planned for 2 hosts (a, b); this is one"),
    (data_parallel("T4", "T4"), TWO_CORES, "needs 2 T4 GPUs; this host has no GPUs"),
    (data_parallel("H200-SXM", "H200-SXM"), TWO_H200, None),
    (data_parallel("H200-SXM"), TWO_H200, None),
    (data_parallel("T4"), TWO_H200, "planned for T4; GPU 0 of this host is NVIDIA H200"),
    (data_parallel("H200-SXM", "T4"), TWO_H200,
     "planned for T4; GPU 1 of this host is NVIDIA H200"),
    (data_parallel("cpu", "H200-SXM"), TWO_H200,
     "planned for H200-SXM and cpu; a launch computes on either"),
])  # fmt: skip
def test_a_plan_that_the_host_cannot_run_as_planned_has_a_reason(plan, host, words):
    assert obstacle(plan, host) == words


def trial(solver, predicted, *iterations_s, **fields):
    """A trial of four samples per iteration."""
    plan = data_parallel("cpu", "cpu", microbatch_size=2)
    plan = replace(plan, prediction=replace(plan.prediction, throughput=predicted))
    return Trial(solver, plan, iterations_s, **fields)


def test_samples_per_second_are_those_of_all_iterations_together():
    one = trial("heft", 3.0, 1.0, 3.0, 0.5)
    assert one.throughput == pytest.approx(12 / 4.5)
    assert (one.least_throughput, one.most_throughput) == (4 / 3, 8)
