"""The clocks of a host and a device, beside the longest path through what waits for what."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.clocks import added_s, ends_s, on_clocks_s, pass_times_s

times = st.integers(0, 6).map(float)
passes = st.lists(st.tuples(times, times, times, times), min_size=1, max_size=7)


def longest_path_s(device_s, host_s):
    """The end of a pass: kernels of operator v end behind those of v - 1, and behind a mark that
    the host sets when it has started them.
    """
    graph = nx.DiGraph()
    for v, (device, host) in enumerate(zip(device_s, host_s, strict=True)):
        before = [(kind, v - 1) for kind in ("device", "host")] if v else ["begin", "begin"]
        graph.add_edge(before[0], ("device", v), weight=device)
        graph.add_edge(before[1], ("host", v), weight=host)
        graph.add_edge(("host", v), ("device", v), weight=0.0)
    return nx.dag_longest_path_length(graph)


def both(all_s):
    """(2, n) times of the device, and of the host."""
    return np.array(all_s).T[:2], np.array(all_s).T[2:]


@given(passes)
def test_a_pass_is_the_longest_path_through_both_clocks(all_s):
    device_s, host_s = both(all_s)
    forward, backward = pass_times_s(device_s, host_s)
    assert forward == pytest.approx(longest_path_s(device_s[0], host_s[0]))
    assert backward == pytest.approx(longest_path_s(device_s[1, ::-1], host_s[1, ::-1]))
    assert forward <= np.maximum(device_s, host_s)[0].sum()
    assert forward >= max(device_s[0].sum(), host_s[0].sum())


@given(passes, st.data())
def test_what_operators_add_makes_up_the_passes_and_bounds_those_of_some_in_a_row(all_s, data):
    device_s, host_s = both(all_s)
    found = added_s(device_s, host_s)
    assert found.sum(axis=1) == pytest.approx(pass_times_s(device_s, host_s))
    first = data.draw(st.integers(0, len(all_s) - 1))
    some = slice(first, data.draw(st.integers(first + 1, len(all_s))))
    alone = pass_times_s(device_s[:, some], host_s[:, some])
    assert all(found[:, some].sum(axis=1) <= np.array(alone) + 1e-9)


@given(passes)
def test_a_host_that_waits_for_each_kernel_is_a_longer_path_by_what_waits(all_s):
    device_s, host_s = both(all_s)
    awaited_s = on_clocks_s(device_s, host_s, launch_blocking=True)
    for side, order in ((0, 1), (1, -1)):
        graph = nx.DiGraph([(("device", -1), ("host", 0))])
        for v, one in enumerate(range(len(all_s))[::order]):
            # It starts kernels when those before have run, and the device waits for it.
            graph.add_edge(("device", v - 1), ("host", v), weight=host_s[side, one])
            graph.add_edge(("host", v), ("device", v), weight=device_s[side, one])
        found_s = pass_times_s(*awaited_s)[side]
        assert found_s == pytest.approx(nx.dag_longest_path_length(graph))
    assert all(np.array(pass_times_s(*awaited_s)) >= pass_times_s(device_s, host_s))


def test_without_a_host_operators_add_their_own_times():
    device_s = np.array([[0.1, 0.2, 0.3], [0.7, 0.0, 0.1]])
    assert added_s(device_s, np.zeros((2, 3))) is device_s
    assert ends_s(device_s[0], np.zeros(3)).tolist() == pytest.approx([0.1, 0.3, 0.6])
    assert pass_times_s(np.zeros((2, 0)), np.zeros((2, 0))) == (0.0, 0.0)
