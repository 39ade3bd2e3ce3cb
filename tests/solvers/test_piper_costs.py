"""A profile as Piper sees it: layers with times, parameters and memory of both ways to run them."""

import pytest

from planner.solvers.piper.costs import as_piper_graph
from tests.support.builders import KB, cluster, graph_of, problem_of, profile_of, unit_type

PARAMETERS, TENSORS = [3 * KB, 5 * KB, 7 * KB], [20 * KB, 30 * KB, 40 * KB]


@pytest.fixture
def layers():
    """(vanilla, with recomputation) of each layer of a chain of three operators."""
    profile = profile_of(graph_of([[], [0], [1]], TENSORS, PARAMETERS), [1.0, 2.0, 3.0])
    problem = problem_of(profile, cluster([unit_type()] * 2))
    found = as_piper_graph(problem, 2, 10**9, 4)
    assert [(edge.source, edge.dest) for edge in found.edges] == [(0, 1), (1, 2)]
    assert [edge.bytes for edge in found.edges] == TENSORS[:2]
    return [node.tmpcs["1"] for node in found.nodes]


def test_recomputation_runs_the_forward_twice(layers):
    assert [way.time_s for way, _ in layers] == [3.0, 6.0, 9.0]
    assert [way.time_s for _, way in layers] == [4.0, 8.0, 12.0]


def test_parameters_and_their_state_are_held_whatever_is_in_flight(layers):
    assert [way.parameter_bytes for way, _ in layers] == PARAMETERS
    for (vanilla, _), size in zip(layers, PARAMETERS, strict=True):
        assert vanilla.memory_b_bytes >= 2 * size


def test_what_recomputation_does_not_keep_in_flight_it_needs_once(layers):
    for vanilla, again in layers:
        assert vanilla.memory_a_bytes > 0
        assert again.memory_b_bytes == vanilla.memory_b_bytes + vanilla.memory_a_bytes
