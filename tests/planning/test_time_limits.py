"""The time limit holds under every cost model, and so do limits to numbers of devices."""

import math
import sys
import time

import pytest

from planner.artefacts.formats.dnn_partitioning import DnnEdge, DnnGraph, DnnNode, colocated
from planner.artefacts.formats.piper import VANILLA, PiperEdge, PiperGraph, PiperNode, Tmpc
from planner.artefacts.problem import Status
from planner.planning.other_cost_models import ForeignOptions, solve_foreign
from planner.solvers.dnn_partitioning.joining import joined
from planner.solvers.dnn_partitioning.solve import _items
from planner.solvers.piper.solve import PiperOptions, plan
from planner.support.errors import OptionError

GIB = 1024**3
LOOKS = 500


def wide_graph(num_layers, num_branches, degrees=(1, 2, 4, 8), configurations=3):
    """Branches side by side, of layers that may be run in several ways that no other one beats."""
    edges = [(v, v + num_branches) for v in range(num_layers - num_branches)]
    nodes = []
    for v in range(num_layers):
        before = {str(u): 0.0 for u, w in edges if w == v}
        behind = {str(w): 0.0 for u, w in edges if u == v}
        ways = {
            str(t): tuple(
                Tmpc(f"{VANILLA}{x}" if x else VANILLA, (5 + x + v % 3) / t, float(GIB >> x),
                     float(GIB >> x), float(GIB >> x), before, behind)
                for x in range(configurations)
            )
            for t in degrees
        }  # fmt: skip
        nodes.append(PiperNode(v, ways, f"layer{v % 7}"))
    links = tuple(PiperEdge(u, w, 1e6) for u, w in edges)
    return PiperGraph(512, 1e15, 1e10, 512, tuple(nodes), links)


@pytest.fixture(scope="module")
def compiled():
    """Piper's kernels, so that no test waits for them."""
    plan(wide_graph(4, 1), PiperOptions(4, 1e15, 1e10, 4))


@pytest.fixture
def looks(monkeypatch):
    """The readings of a clock that goes on by 1 ms when it is looked at, and not otherwise."""
    made = []

    def process_time():
        made.append(len(made) / 1000)
        return made[-1]

    monkeypatch.setattr(time, "process_time", process_time)
    return made


@pytest.mark.parametrize(("layers", "branches"), [(120, 4), (60, 4)])
def test_piper_keeps_the_time_limit_and_has_a_plan(compiled, looks, layers, branches):
    graph = wide_graph(layers, branches)
    options = ForeignOptions(time_limit_s=LOOKS / 1000, max_downsets=20_000)
    comparison = solve_foreign(graph, options)
    assert LOOKS / 2 < len(looks) < 1.1 * LOOKS
    piper = comparison.rows[0]
    assert piper.status in (Status.FEASIBLE, Status.UNKNOWN)
    assert not piper.reproducible
    assert piper.stages or "no plan by the end of" in (piper.reason or "")


def test_piper_looks_at_all_downsets_only_as_long_as_it_may(compiled, looks):
    solve_foreign(wide_graph(60, 20), ForeignOptions(time_limit_s=LOOKS / 1000, exact=True))
    assert LOOKS / 2 < len(looks) < 1.1 * LOOKS


def test_the_clock_changes_nothing_where_there_is_time(compiled):
    graph = wide_graph(9, 2)
    options = PiperOptions(8, 1e15, 1e10, 8)
    limited, endless = plan(graph, options, 60.0), plan(graph, options, math.inf)
    assert limited == endless
    assert limited.in_time
    assert limited.status is Status.OPTIMAL


def chain_of_nothing(count):
    """A chain whose nodes weigh nothing but each tenth."""
    weights = [float(v % 10 == 0) for v in range(count)]
    nodes = (DnnNode(v, one, one, False, True, size_bytes=one) for v, one in enumerate(weights))
    edges = tuple(DnnEdge(v, v + 1, 1.0) for v in range(count - 1))
    return DnnGraph(4, 0, 1e9, tuple(nodes), edges)


@pytest.mark.parametrize("field", ["num_devices", "num_cpus"])
def test_numbers_of_devices_are_limited(field):
    graph = chain_of_nothing(3)
    fields = {"num_devices": 4, "num_cpus": 0, field: 50_000}
    graph = DnnGraph(**fields, memory_bytes=1e9, nodes=graph.nodes, edges=graph.edges)
    with pytest.raises(OptionError, match="expected at most 4096 devices, got 5000"):
        solve_foreign(graph, ForeignOptions())


def test_gpus_are_limited_under_every_foreign_model():
    for graph in (chain_of_nothing(3), wide_graph(3, 1)):
        with pytest.raises(OptionError, match="expected at most 4096 devices, got 1000000000"):
            solve_foreign(graph, ForeignOptions(num_devices=10**9))


def lines_run(function):
    """Number of lines of Python that a call runs."""
    count, before = 0, sys.gettrace()

    def see(frame, event, argument):
        nonlocal count
        count += event == "line"
        return see

    sys.settrace(see)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_the_work_of_joining_items_without_weight_grows_with_their_number():
    lines = []
    for count in (400, 800):
        graph = chain_of_nothing(count)
        items = _items(graph, colocated(graph))
        lines.append(lines_run(lambda items=items: joined(items, lambda: math.inf)))
        assert len(joined(items, lambda: math.inf).members) == count // 10
    assert lines[1] < 2.2 * lines[0]


def test_items_are_joined_as_long_as_there_is_time():
    graph = chain_of_nothing(100)
    items = _items(graph, colocated(graph))
    assert joined(items, lambda: 0.0) == items
