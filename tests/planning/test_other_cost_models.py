"""Foreign graphs under their own cost models: against brute force, against the published programs'
results, and as files and commands.
"""

import csv
import json
import os
import re
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

import cli
from planner.artefacts.formats.dnn_partitioning import (
    DnnEdge,
    DnnGraph,
    DnnNode,
    colocated,
    dnn_partitioning_profile,
    read_dnn_partitioning,
)
from planner.artefacts.formats.piper import (
    RECOMPUTED,
    VANILLA,
    PiperEdge,
    PiperGraph,
    PiperNode,
    Tmpc,
    piper_profile,
    read_piper,
)
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.planning.other_cost_models import (
    ForeignModel,
    ForeignOptions,
    solve_foreign,
    solve_profile,
)
from planner.reports.published import published_json
from planner.solvers.dnn_partitioning import costs as dnn_partitioning
from planner.solvers.dnn_partitioning.solve import split
from planner.solvers.graphs import windows
from planner.solvers.graphs.downsets import windowed
from planner.solvers.piper import costs as piper
from planner.solvers.piper.equal import equal_stages
from planner.solvers.piper.solve import PiperOptions, allowed, plan
from planner.support.errors import FileError, OptionError
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.profiles import read_any_profile
from tests.support.strategies import dags

GIB = 1024**3
REFERENCE = Path(
    os.environ.get("PLANNER_REFERENCE", Path(__file__).parents[3] / "shared" / "reference")
)


def chains(feeds):
    """All ways to cut a DAG into a chain of differences of downsets, as lists of sets of nodes."""

    def after(done):
        if len(done) == len(feeds):
            yield []
            return
        left = [v for v in range(len(feeds)) if v not in done]
        for chosen in product((False, True), repeat=len(left)):
            stage = {v for v, inside in zip(left, chosen, strict=True) if inside}
            if stage and all(done | stage >= set(feeds[v]) for v in stage):
                for rest in after(done | stage):
                    yield [stage, *rest]

    yield from after(frozenset())


# -------------------------------------------------------------------------------- dnn-partitioning


def dnn_graph(feeds, times, costs=None, sizes=None, colors=None, cpu=None, refused=(), **changes):
    """A graph of forward nodes, from predecessor lists; the cost of each node's output in ms."""
    count = len(feeds)
    costs, sizes = costs or [1.0] * count, sizes or [1.0] * count
    cpu, colors = cpu or [100.0] * count, colors or [None] * count
    nodes = tuple(
        DnnNode(v, times[v], cpu[v], False, v not in refused, f"n{v}", colors[v], sizes[v])
        for v in range(count)
    )
    edges = tuple(DnnEdge(u, v, costs[u], 8.0) for v, us in enumerate(feeds) for u in us)
    fields = {"num_devices": 2, "num_cpus": 0, "memory_bytes": 1e9, **changes}
    return DnnGraph(nodes=nodes, edges=edges, **fields)


def largest_load_ms(graph, stages):
    return max(1e3 * dnn_partitioning.load_s(graph, s.nodes, cpu=s.cpu) for s in stages)


def test_a_load_counts_each_output_that_crosses_once():
    #   0 -> 1, 2, 3;  1, 2 -> 3          0 alone: its own output; 1, 2: those of 0, 1 and 2
    graph = dnn_graph([[], [0], [0], [0, 1, 2]], [1, 2, 4, 8], [10, 20, 40, 80])
    assert dnn_partitioning.load_s(graph, [0]) == pytest.approx(11e-3)
    assert dnn_partitioning.load_s(graph, [1, 2]) == pytest.approx((6 + 10 + 20 + 40) * 1e-3)
    assert dnn_partitioning.load_s(graph, [1, 2], cpu=True) == pytest.approx(200e-3)
    assert dnn_partitioning.load_s(graph, [0, 1, 2, 3]) == pytest.approx(15e-3)


def test_a_chain_is_cut_where_it_is_balanced_and_cheap():
    # 3 3 | 3 3 is balanced, but 3 3 3 -(0)- 3 sends for nothing
    graph = dnn_graph([[], [0], [1], [2]], [3, 3, 3, 3], [9, 9, 0, 9])
    answer = split(graph, 2, 1e9)
    assert [s.nodes for s in answer.stages] == [(0, 1, 2), (3,)]
    assert answer.status is Status.OPTIMAL


def test_nodes_of_one_color_stay_together_and_orphans_find_their_place():
    #   forward 0 -> 1, backward 2 (of 1) -> 3 (of 0), 3 -> 4 (of nobody, so after 0 turned round)
    nodes = (
        DnnNode(0, 1, 9, False, True, color=7),
        DnnNode(1, 1, 9, False, True, color=8),
        DnnNode(2, 1, 9, True, True, color=8),
        DnnNode(3, 1, 9, True, True, color=7),
        DnnNode(4, 1, 9, True, True, color=9),
    )
    edges = (DnnEdge(0, 1, 1), DnnEdge(1, 2, 1), DnnEdge(2, 3, 1), DnnEdge(3, 4, 1))
    blocks = colocated(DnnGraph(2, 0, 1e9, nodes, edges))
    assert blocks.members == ((4,), (0, 3), (1, 2))
    assert blocks.predecessors == ((), (0,), (1,))


def test_colors_on_a_cycle_are_one_block():
    graph = dnn_graph([[], [0], [1]], [1, 1, 1], colors=[1, 2, 1])
    assert colocated(graph).members == ((0, 1, 2),)


def test_what_no_device_supports_goes_to_a_cpu_or_nowhere():
    feeds, times = [[], [0]], [1, 1]
    with_cpu = dnn_graph(feeds, times, cpu=[5, 5], refused={1}, num_cpus=1)
    assert [(s.nodes, s.cpu) for s in split(with_cpu, 2, 1e9).stages] == [
        ((0,), False),
        ((1,), True),
    ]
    without = dnn_graph(feeds, times, refused={1})
    assert split(without, 2, 1e9).status is Status.INFEASIBLE
    assert "runs on no device" in solve_foreign(without, ForeignOptions()).rows[0].reason


@st.composite
def dnn_graphs(draw):
    feeds = draw(dags(max_nodes=6))
    count = len(feeds)
    small = st.integers(0, 6).map(float)
    lists = {
        name: draw(st.lists(small, min_size=count, max_size=count))
        for name in ("times", "costs", "sizes", "cpu")
    }
    for v in draw(st.sets(st.integers(0, count - 1))):  # such nodes may be joined with others
        lists["times"][v] = lists["sizes"][v] = lists["cpu"][v] = 0.0
    colors = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    refused = draw(st.sets(st.integers(0, count - 1), max_size=1))
    return dnn_graph(
        feeds, colors=colors, refused=refused, num_cpus=draw(st.integers(0, 1)), **lists
    )


@given(dnn_graphs(), st.integers(1, 3), st.integers(3, 40))
def test_the_split_has_the_smallest_largest_load_of_all(graph, num_devices, memory):
    blocks = colocated(graph)
    best = float("inf")
    for chain in chains(blocks.predecessors):
        parts = [[v for b in stage for v in blocks.members[b]] for stage in chain]
        for on_cpu in product((False, True), repeat=len(parts)):
            if sum(on_cpu) > graph.num_cpus or len(parts) - sum(on_cpu) > num_devices:
                continue
            fits = all(
                cpu
                or (
                    dnn_partitioning.memory_bytes(graph, part) <= memory
                    and all(graph.nodes[v].supported for v in part)
                )
                for part, cpu in zip(parts, on_cpu, strict=True)
            )
            if fits:
                loads = (
                    dnn_partitioning.load_s(graph, part, cpu=cpu)
                    for part, cpu in zip(parts, on_cpu, strict=True)
                )
                best = min(best, 1e3 * max(loads))
    answer = split(graph, num_devices, memory)
    if best == float("inf"):
        assert answer.status is Status.INFEASIBLE
        assert not answer.stages
        return
    assert answer.status is Status.OPTIMAL
    assert largest_load_ms(graph, answer.stages) == pytest.approx(best, rel=1e-12, abs=1e-12)
    assert sorted(v for s in answer.stages for v in s.nodes) == list(range(len(graph.nodes)))


@given(dnn_graphs())
def test_fewer_downsets_give_a_plan_that_is_no_better_and_says_so(graph):
    exact, some = split(graph, 3, 1e9), split(graph, 3, 1e9, max_downsets=4)
    assert bool(exact.stages) == bool(some.stages)
    if exact.stages:
        best = largest_load_ms(graph, exact.stages)
        assert largest_load_ms(graph, some.stages) >= best - 1e-9
    assert some.status in (exact.status, Status.FEASIBLE, Status.UNKNOWN)


@given(dags(min_nodes=4, max_nodes=9), st.integers(10, 60))
def test_a_window_leaves_at_most_so_many_downsets(feeds, limit):
    subsets, whole = windowed(feeds, range(len(feeds)), limit)
    everything, _ = windowed(feeds, range(len(feeds)), None)
    assert whole == (len(everything.masks) <= limit)
    assert len(subsets.masks) <= limit
    assert {tuple(m) for m in subsets.masks} <= {tuple(m) for m in everything.masks}


def fans(count, width):
    """Diamonds in a row: (width branches of 4 nodes) x count; 4 branches have 5^4 downsets."""
    feeds, last = [], None
    for _ in range(count):
        feeds.append([] if last is None else [last])
        start, ends = len(feeds) - 1, []
        for _ in range(width):
            before = start
            for _ in range(4):
                feeds.append([before])
                before = len(feeds) - 1
            ends.append(before)
        feeds.append(ends)
        last = len(feeds) - 1
    return feeds


def test_tens_of_thousands_of_downsets_are_searched_whole():
    feeds = fans(30, 4)
    times = [0.1 + (v * 37 % 19) / 10 for v in range(len(feeds))]
    graph = dnn_graph(feeds, times, [(v * 53 % 11) / 20 for v in range(len(feeds))])
    answer = split(graph, 8, 1e9)
    assert answer.status is Status.OPTIMAL
    assert answer.num_downsets > 18_000


def grid(rows, columns):
    """A recurrent network unrolled: a layer per row, a time step per column."""
    feeds = []
    for column in range(columns):
        for row in range(rows):
            above = [len(feeds) - 1] if row else []
            feeds.append([*above, *([len(feeds) - rows] if column else [])])
    return feeds


def test_nodes_that_weigh_nothing_are_no_reason_to_enumerate():
    feeds = [[]]
    for _ in range(10):  # each has two parts that nobody reads
        last = len(feeds) - 1 if len(feeds) == 1 else len(feeds) - 3
        feeds += [[last], [len(feeds)], [len(feeds)]]
    weights = [1.0] + [1.0, 0.0, 0.0] * 10
    graph = dnn_graph(feeds, weights, sizes=weights, cpu=weights)
    answer = split(graph, 3, 1e9)
    assert answer.status is Status.OPTIMAL
    assert answer.num_downsets == 12
    assert largest_load_ms(graph, answer.stages) == 5.0
    assert sorted(v for s in answer.stages for v in s.nodes) == list(range(len(feeds)))


def test_a_node_that_weighs_nothing_joins_the_neighbour_that_it_is_dearer_to_leave():
    weights = [5.0, 0.0, 5.0]
    graph = dnn_graph([[], [0], [1]], weights, [1.0, 10.0, 1.0], sizes=weights, cpu=weights)
    answer = split(graph, 2, 1e9)
    assert [s.nodes for s in answer.stages] == [(0,), (1, 2)]
    assert largest_load_ms(graph, answer.stages) == 6.0


def test_the_clock_cuts_a_split_which_says_so_and_keeps_its_best():
    feeds = grid(6, 6)
    graph = dnn_graph(feeds, [1.0 + v % 5 for v in range(len(feeds))], num_devices=4)
    whole, cut = split(graph, 4, 1e9), split(graph, 4, 1e9, time_limit_s=0.0)
    assert (whole.status, whole.reproducible) == (Status.OPTIMAL, True)
    assert (cut.status, cut.reproducible) == (Status.FEASIBLE, False)
    assert cut.bound_s <= whole.bound_s < 1e-3 * largest_load_ms(graph, cut.stages)
    assert whole.bound_s == pytest.approx(1e-3 * largest_load_ms(graph, whole.stages))


def test_a_split_that_is_cut_short_is_no_optimum_in_the_table():
    feeds = grid(6, 6)
    graph = dnn_graph(feeds, [1.0 + v % 5 for v in range(len(feeds))], num_devices=4)
    row = solve_foreign(graph, ForeignOptions(time_limit_s=0.0)).best
    assert (row.solver, row.status, row.reproducible) == (
        "dnn-partitioning", Status.FEASIBLE, False,
    )  # fmt: skip
    assert 0 < row.bound_s < row.bottleneck_s


def test_where_the_clock_came_first_the_reason_is_the_clock():
    # Two branches of 7 bytes; no cut of the linear order, which takes turns, leaves 7 on each side.
    sizes = [1.0, 3.0, 1.0, 3.0, 5.0, 1.0]
    graph = dnn_graph([[], [], [0], [1], [2], [3]], [1.0] * 6, sizes=sizes)
    row = solve_foreign(graph, ForeignOptions(time_limit_s=0.0, memory_bytes=7)).rows[0]
    assert (row.status, row.stages) == (Status.UNKNOWN, ())
    assert "--time-limit" in row.reason
    assert solve_foreign(graph, ForeignOptions(memory_bytes=7)).rows[0].status is Status.OPTIMAL


def test_all_downsets_are_enumerated_as_long_as_there_is_time(monkeypatch):
    monkeypatch.setattr(windows, "FIRST_DOWNSETS", 300)
    feeds = grid(6, 6)
    graph = dnn_graph(feeds, [1.0] * len(feeds))
    whole = split(graph, 2, 1e9, max_downsets=None)
    cut = split(graph, 2, 1e9, max_downsets=None, time_limit_s=0.0)
    assert (whole.status, whole.num_downsets) == (Status.OPTIMAL, 924)
    assert (cut.status, cut.reproducible, cut.num_downsets <= 300) == (Status.FEASIBLE, False, True)


# -------------------------------------------------------------------------------- Piper


def tmpc(name, time_s, parameters, a, b, into=(), out=(), sync=0.0):
    syncs = ({str(u): sync for u in into}, {str(w): sync for w in out})
    return Tmpc(name, time_s, float(parameters), float(a), float(b), *syncs)


def piper_graph(feeds, ways, sent=8.0, **changes):
    """A graph of layers, from predecessor lists; ways: per layer {t: [(name, time, parameters, A,
    B, sync)]}.
    """
    out = [[w for w, us in enumerate(feeds) if v in us] for v in range(len(feeds))]
    nodes = tuple(
        PiperNode(
            v,
            {
                t: tuple(tmpc(*f[:5], feeds[v], out[v], f[5]) for f in figures)
                for t, figures in by_degree.items()
            },
            f"layer{v}",
        )
        for v, by_degree in enumerate(ways)
    )
    edges = tuple(PiperEdge(u, v, sent) for v, us in enumerate(feeds) for u in us)
    fields = {
        "num_devices": 4, "memory_bytes": 100.0, "bandwidth_bytes_per_s": 16.0, "batch": 4,
        **changes,
    }  # fmt: skip
    return PiperGraph(nodes=nodes, edges=edges, **fields)


def options_of(graph, **changes):
    fields = {
        "num_devices": graph.num_devices, "memory_bytes": graph.memory_bytes,
        "bandwidth_bytes_per_s": graph.bandwidth_bytes_per_s, "batch": graph.batch, **changes,
    }  # fmt: skip
    return PiperOptions(**fields)


def largest_time_s(graph, options, answer):
    """The objective of a plan; checks that it is one."""
    total = sum(stage.data_parallel for stage in answer.stages)
    assert total <= options.batch
    assert sum(s.data_parallel * s.tensor_parallel for s in answer.stages) <= options.num_devices
    assert sorted(v for s in answer.stages for v in s.layers) == list(range(len(graph.nodes)))
    times = []
    for stage in answer.stages:
        ways = [graph.nodes[v].tmpcs[str(stage.tensor_parallel)] for v in stage.layers]
        chosen = [way[x] for way, x in zip(ways, stage.tmpcs, strict=True)]
        figures = piper.stage_figures(
            graph, stage.layers, chosen, options.batch, options.bandwidth_bytes_per_s
        )
        assert stage.replicas_to_the_end == total
        assert figures.memory_bytes(stage.data_parallel, total) <= options.memory_bytes
        assert options.batch % stage.data_parallel == 0
        times.append(figures.time_s(stage.data_parallel))
        total -= stage.data_parallel
    return max(times)


def test_the_time_and_memory_of_a_stage_by_hand():
    # layers 0 -> 1 -> 2; the stage {1} sends and receives 8 bytes each, there and back, sync 2 each
    ways = {"1": [(VANILLA, 6.0, 16, 3, 5, 2.0)]}
    graph = piper_graph([[], [0], [1]], [ways] * 3, batch=4, bandwidth_bytes_per_s=16.0)
    one = piper.stage_figures(graph, [1], [graph.nodes[1].tmpcs["1"][0]], 4, 16.0)
    assert one.transfer_s == 2 * (8 + 2) / 16 * 2
    assert one.time_s(1) == 6.0 + 2.5
    assert one.time_s(2) == (6.0 + 2.5) / 2 + 4 * (1 / 2) * 16 / 4 / 16
    assert one.memory_bytes(2, 5) == 3 * 3 + 5


def test_recomputation_makes_a_plan_fit():
    ways = {"1": [(VANILLA, 1.0, 0, 60, 0, 0.0), (RECOMPUTED, 2.0, 0, 20, 0, 0.0)]}
    graph = piper_graph([[], [0]], [ways] * 2, num_devices=1)
    answer = plan(graph, options_of(graph))
    assert answer.status is Status.OPTIMAL
    assert largest_time_s(graph, options_of(graph), answer) == 3.0
    without = plan(graph, options_of(graph, recompute=Recompute.NONE))
    assert without.status is Status.INFEASIBLE
    always = options_of(graph, recompute=Recompute.FULL)
    assert largest_time_s(graph, always, plan(graph, always)) == 4.0


@st.composite
def piper_graphs(draw):
    feeds = draw(dags(max_nodes=4))
    small = st.integers(0, 8).map(float)

    def way(name):
        return (name, *(draw(small) for _ in range(4)), draw(st.sampled_from([0.0, 0.0, 4.0])))

    ways = []
    for _ in feeds:
        degrees = draw(st.sets(st.sampled_from(["1", "2"]), min_size=1))
        names = [VANILLA, RECOMPUTED, "third"][: draw(st.integers(1, 3))]
        ways.append({t: [way(name) for name in names] for t in sorted(degrees)})
    return piper_graph(
        feeds,
        ways,
        num_devices=draw(st.integers(1, 4)),
        memory_bytes=draw(st.sampled_from([12.0, 25.0, 60.0, 1e6])),
        batch=draw(st.integers(1, 4)),
    )


def best_time_s(graph, options):
    """Brute force: every chain, degrees and configurations."""
    best = float("inf")
    feeds = [sorted(e.source for e in graph.edges if e.dest == v) for v in range(len(graph.nodes))]
    degrees = [
        (t, d)
        for t in (1, 2)
        for d in range(1, options.batch + 1)
        if options.batch % d == 0 and t * d <= options.num_devices
        and t <= (options.max_tensor_parallel or t) and d <= (options.max_data_parallel or d)
    ]  # fmt: skip

    def fastest(stage, t, d, total):
        ways = [graph.nodes[v].tmpcs.get(str(t), ()) for v in stage]
        places = [allowed(way, options.recompute) for way in ways]
        least_s = float("inf")
        for picks in product(*places):
            chosen = [way[x] for way, x in zip(ways, picks, strict=True)]
            figures = piper.stage_figures(
                graph, stage, chosen, options.batch, options.bandwidth_bytes_per_s
            )
            if figures.memory_bytes(d, total) <= options.memory_bytes:
                least_s = min(least_s, figures.time_s(d))
        return least_s

    def behind(parts, devices, total):
        """The largest time of the stages, taken from the end."""
        if not parts:
            return 0.0
        return min(
            (
                max(
                    fastest(sorted(parts[-1]), t, d, total + d),
                    behind(parts[:-1], devices - t * d, total + d),
                )
                for t, d in degrees
                if t * d <= devices and total + d <= options.batch
            ),
            default=float("inf"),
        )

    for chain in chains(feeds):
        if len(chain) <= options.num_devices:
            best = min(best, behind(chain, options.num_devices, 0))
    return best


@limits(max_examples=60)
@given(piper_graphs(), st.sampled_from(Recompute), st.sampled_from([None, 1]))
def test_the_plan_has_the_smallest_largest_time_of_all(graph, recompute, widest):
    options = options_of(graph, recompute=recompute, max_data_parallel=widest)
    best = best_time_s(graph, options)
    answer = plan(graph, options)
    if best == float("inf"):
        assert answer.status is Status.INFEASIBLE
    else:
        assert answer.status is Status.OPTIMAL
        time_s = largest_time_s(graph, options, answer)
        assert time_s == pytest.approx(best, rel=1e-12, abs=1e-12)


@limits(max_examples=30)
@given(piper_graphs())
def test_equal_stages_are_never_better(graph):
    options = options_of(graph)
    equal, best = equal_stages(graph, options), plan(graph, options)
    if equal.stages:
        least = largest_time_s(graph, options, best)
        assert largest_time_s(graph, options, equal) >= least * (1 - 1e-12)


# -------------------------------------------------------------------------------- files

DNN_FILE = {
    "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 1e9,
    "nodes": [
        {"id": 5, "name": "a", "supportedOnFpga": 1, "cpuLatency": 9, "fpgaLatency": 2.5,
         "isBackwardNode": 0, "colorClass": 1, "size": 1000.0},
        {"id": 7, "name": "b", "supportedOnFpga": True, "cpuLatency": 9, "fpgaLatency": 3.0,
         "isBackwardNode": False, "colorClass": 2, "size": 500.0},
        {"id": 9, "name": "a'", "supportedOnFpga": 1, "cpuLatency": 9, "fpgaLatency": 5.0,
         "isBackwardNode": 1, "colorClass": 1, "size": 0},
    ],
    "edges": [{"sourceId": 5, "destId": 7, "cost": 0.5, "size": 100.0},
              {"sourceId": 7, "destId": 9, "cost": 0.25, "size": 100.0}],
}  # fmt: skip

_WAY = {"id": "vanilla", "timePerSample": 0.3, "parameterSize": 64.0, "memoryUsageA": 10.0,
        "memoryUsageB": 128.0}  # fmt: skip
PIPER_FILE = {
    "maxDevices": 2, "maxMemoryPerDevice": 1000.0, "bandwidth": 1000.0, "mbsInBatch": 4,
    "nodes": [
        {"id": 3, "name": "x",
         "TMPCs": {"1": [{**_WAY, "syncTimeFw": {}, "syncTimeBw": {"4": 0.0}}]}},
        {"id": 4, "name": "y",
         "TMPCs": {"1": [{**_WAY, "syncTimeFw": {"3": 0.0}, "syncTimeBw": {}}]}},
    ],
    "edges": [{"sourceId": 3, "destId": 4, "communicationCost": 40.0}],
}  # fmt: skip


def written(folder, plain, name="graph.json"):
    path = folder / name
    path.write_text(json.dumps(plain))
    return path


def test_a_dnn_partitioning_file_is_read_as_it_is(tmp_path):
    graph = read_dnn_partitioning(written(tmp_path, DNN_FILE))
    assert [(n.id, n.time_ms, n.color) for n in graph.nodes] == [
        (5, 2.5, 1),
        (7, 3.0, 2),
        (9, 5.0, 1),
    ]
    assert [bool(n.backward) for n in graph.nodes] == [False, False, True]
    assert graph.edges[1] == DnnEdge(7, 9, 0.25, 100.0)


def test_a_dnn_partitioning_file_as_a_profile(tmp_path):
    profile = read_any_profile(written(tmp_path, DNN_FILE))
    assert [(o.name, o.forward_s, o.backward_s) for o in profile.operators] == [
        ("a", 2.5e-3, 5e-3), ("b", 3e-3, 0.0),
    ]  # fmt: skip
    # What a node occupies beyond its output is a parameter, trained if there is a backward node.
    assert [(p.bytes, p.trainable) for p in profile.graph.parameters] == [(900, True), (500, False)]
    assert [
        t.bytes for t in profile.graph.tensors if t.name in profile.graph.operators[1].inputs
    ] == [100]


def test_a_piper_file_as_a_profile(tmp_path):
    profile = read_any_profile(written(tmp_path, PIPER_FILE))
    first = profile.operators[0]
    assert first.forward_s + first.backward_s == pytest.approx(0.3)
    assert (first.parameter_bytes, first.stash_private_bytes, first.output_bytes) == (64, 10, 40)
    assert piper_profile(read_piper(tmp_path / "graph.json")) == profile


def test_a_layer_without_a_way_to_run_on_one_device_is_no_profile(tmp_path):
    first, second = PIPER_FILE["nodes"]
    nodes = [first, {**second, "TMPCs": {"2": second["TMPCs"]["1"]}}]
    with pytest.raises(
        FileError, match=r"layer y \(id 4\): expected a configuration for one device"
    ):
        read_any_profile(written(tmp_path, {**PIPER_FILE, "nodes": nodes}))


def test_every_problem_of_a_dnn_partitioning_file_is_said(tmp_path):
    first, second, third = (dict(node) for node in DNN_FILE["nodes"])
    first["fpgaLatency"], second["isBackwardNode"] = "2.5", 2
    del third["id"]
    with pytest.raises(FileError) as caught:
        read_dnn_partitioning(
            written(tmp_path, {**DNN_FILE, "nodes": [first, second, third], "x": 1})
        )
    text = str(caught.value)
    for part in ("nodes[0].fpgaLatency: expected", "nodes[1].isBackwardNode", "x: unknown field",
                 "nodes[2].id: missing"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": [{"sourceId": 5, "destId": 6, "cost": 1}]}, "edges[0].destId: expected the id"),
        ({"edges": [*DNN_FILE["edges"], {"sourceId": 5, "destId": 9, "cost": 0.75}]},
         "edges[2].cost: expected 0.5 as on the other edges of node 5, got 0.75"),
        ({"edges": [*DNN_FILE["edges"], {"sourceId": 9, "destId": 5, "cost": 1}]}, "no cycle"),
        ({"edges": [{"sourceId": 9, "destId": 5, "cost": 1}]}, "expected a backward node"),
        ({"nodes": [*DNN_FILE["nodes"], DNN_FILE["nodes"][0]]}, "nodes[3].id: expected each"),
        ({"maxFPGAs": 0}, "maxFPGAs"),
    ],
)  # fmt: skip
def test_a_dnn_partitioning_graph_that_contradicts_itself_is_refused(tmp_path, changes, message):
    with pytest.raises(FileError, match=re.escape(message)):
        read_dnn_partitioning(written(tmp_path, {**DNN_FILE, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": []}, "nodes[0].TMPCs.1[0].syncTimeBw: expected the neighbours []"),
        ({"edges": [{"sourceId": 3, "destId": 8, "communicationCost": 1.0}]}, "edges[0].destId"),
        ({"edges": [*PIPER_FILE["edges"]] * 2}, "edges[1]: expected each edge once"),
        ({"mbsInBatch": 1.5}, "mbsInBatch: expected a valid integer"),
        ({"nodes": []}, "nodes"),
    ],
)
def test_a_piper_graph_that_contradicts_itself_is_refused(tmp_path, changes, message):
    with pytest.raises(FileError, match=re.escape(message)):
        read_piper(written(tmp_path, {**PIPER_FILE, **changes}))


# -------------------------------------------------------------------------------- comparison


def test_rows_say_what_does_not_fit():
    graph = dnn_graph([[], [0]], [1, 2], sizes=[10, 20])
    comparison = solve_foreign(graph, ForeignOptions(memory_bytes=15))
    assert [row.status for row in comparison.rows] == [Status.INFEASIBLE] * 2
    assert comparison.rows[0].reason == (
        "nodes that share a device occupy 20 B, the limit is 15 B; try more devices or"
        " --device-memory"
    )
    plain = published_json(comparison)
    assert plain["status"] == "infeasible"
    assert plain["bottleneck_s"] is None


def test_a_layer_that_never_fits_is_named():
    ways = {"1": [(VANILLA, 1.0, 0, 60, 50, 0.0)]}
    comparison = solve_foreign(piper_graph([[]], [ways]), ForeignOptions())
    assert "layer layer0 (id 0) needs at least 110 B per device" in comparison.rows[0].reason


@pytest.mark.parametrize("recompute", Recompute)
def test_recomputation_is_proposed_only_where_it_was_not_allowed(recompute):
    ways = {"1": [(name, 1.0, 0, 30, 30, 0.0) for name in (VANILLA, RECOMPUTED)]}
    options = ForeignOptions(num_devices=1, recompute=recompute)
    reason = solve_foreign(piper_graph([[], [0]], [ways] * 2), options).rows[0].reason
    assert "no way to cut the layers fits" in reason
    assert ("--recompute auto" in reason) is (recompute is not Recompute.AUTO)


def test_a_profile_of_the_planner_under_foreign_models():
    #   0 - 1 - 2 - 3, the tensor behind 1 is small
    feeds = [[], [0], [1], [2]]
    graph = graph_of(feeds, [10**6, 1000, 10**6, 10**6])
    problem = problem_of(
        profile_of(graph, [0.01] * 4), cluster([unit_type()] * 2), num_microbatches=2,
        reserve=0,
    )  # fmt: skip
    kept = ForeignOptions(exact=True)
    split_in_two = solve_profile(problem, ForeignModel.DNN_PARTITIONING, kept).rows[0]
    # Half of the computation, and the tensor there and back.
    assert split_in_two.bottleneck_s == pytest.approx(0.06 + 2 * 1000 / 1e9)
    assert [len(stage.devices) for stage in split_in_two.stages] == [1, 1]
    planned = solve_profile(problem, ForeignModel.PIPER, kept)
    assert planned.rows[0].bottleneck_s <= 0.06 + 2 * 1000 / 1e9
    assert planned.rows[0].bottleneck_s <= planned.rows[1].bottleneck_s


def test_a_reserve_that_leaves_nothing_is_an_error():
    problem = problem_of(
        profile_of(graph_of([[]]), [0.01]), cluster([unit_type(memory=10)]), num_microbatches=1,
        reserve=10,
    )  # fmt: skip
    with pytest.raises(OptionError, match="leaves nothing"):
        solve_profile(problem, ForeignModel.PIPER, ForeignOptions())


# -------------------------------------------------------------------------------- command line


def solve(*arguments, code=0):
    done = CliRunner().invoke(cli.main, ["solve", *map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout if code in (0, 3) else done.output


def test_a_foreign_file_is_solved_by_the_command(tmp_path):
    path = written(tmp_path, DNN_FILE)
    plain = json.loads(solve("--profile", path, "--cost-model", "dnn-partitioning", "--json"))
    # Apart: 7.5 + 0.5 + 0.25 and 3 + 0.75; together 10.5.
    assert plain["bottleneck_s"] == pytest.approx(8.25e-3)
    assert [stage["devices"] for stage in plain["stages"]] == [[0], [1]]
    assert [plain[name] for name in ("iteration_s", "gap", "bubble_fraction", "strategy")] == [
        None
    ] * 4
    assert plain["status"] == "optimal"
    assert [row["solver"] for row in plain["compared"]] == ["dnn-partitioning", "single"]
    one = json.loads(
        solve("--profile", path, "--cost-model", "dnn-partitioning", "--gpus", 1, "--json")
    )
    assert one["bottleneck_s"] == pytest.approx(10.5e-3)


def test_options_override_a_piper_file(tmp_path):
    path = written(tmp_path, PIPER_FILE)
    asked = ("--profile", path, "--cost-model", "piper", "--json")
    plain = json.loads(solve(*asked))
    # Both layers on two replicas: 0.6 / 2 + 4 / 2 x 128 / 4 / 1000
    assert plain["bottleneck_s"] == pytest.approx(0.3 + 0.064)
    assert plain["peak_bytes"] == [276, 276]
    faster = json.loads(solve(*asked, "--bandwidth", "1 MB/s", "--gpus", 4, "--global-batch", 8))
    assert faster["bottleneck_s"] == pytest.approx(0.15 + 4 * 3 / 4 * 128 / 8 / 1e6)
    told = json.loads(solve(*asked, "--device-memory", "100 B", code=3))
    assert told["status"] == "infeasible"
    assert "needs at least 138 B" in told["reason"]


def test_the_tables_for_people_show_stages_and_reasons(tmp_path):
    path = written(tmp_path, PIPER_FILE)
    text = solve("--profile", path, "--cost-model", "piper")
    assert "by piper's cost model" in text
    assert "t 1, d 2" in text
    text = solve("--profile", path, "--cost-model", "piper", "--device-memory", "1 B", code=3)
    assert "piper: layer x (id 3) needs at least 138 B per device, the limit is 1 B" in text


@pytest.mark.parametrize(
    "arguments",
    [("--cost-model", "piper", "--solver", "even"), ("--bandwidth", "1 GB/s")],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, arguments):
    solve("--profile", written(tmp_path, PIPER_FILE), *arguments, code=1)


def test_options_of_other_profiles_are_refused_where_the_file_has_its_own(tmp_path):
    path = written(tmp_path, PIPER_FILE)
    asked = ("--profile", path, "--cost-model", "piper")
    for flag, value in (("--reserve", "2 GiB"), ("--topology", "p3"), ("--optimizer", "adam")):
        said = " ".join(solve(*asked, flag, value, code=1).split())
        assert flag in said
        assert "is for other profiles; " in said


def test_a_foreign_file_is_solved_under_the_planners_own_model(tmp_path):
    output = tmp_path / "strategy.json"
    for plain in (DNN_FILE, PIPER_FILE):
        told = json.loads(
            solve("--profile", written(tmp_path, plain), "--topology", "p3.yaml", "--gpus", 2,
                  "--json", "-o", output)
        )  # fmt: skip
        assert told["iteration_s"] > 0
        assert told["partition"] is None


# -------------------------------------------------------------------------------- published results


def expected(peer):
    if not (REFERENCE / "expected.csv").is_file():
        pytest.skip(f"{REFERENCE} is not there; set PLANNER_REFERENCE")
    with (REFERENCE / "expected.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["peer"] == peer]


def published_dnn_graph(instance):
    _, kind, name = instance.split("/")
    return read_dnn_partitioning(
        REFERENCE / "dnn-partitioning" / f"{kind.removesuffix('Graphs').lower()}-{name}"
    )


@pytest.mark.reference
def test_the_published_splits_are_found():
    rows = [row for row in expected("dnn-partitioning") if row["algorithm"] in ("dp", "oneFpga")]
    assert len(rows) == 12
    for row in rows:
        graph = published_dnn_graph(row["instance"])
        if row["algorithm"] == "oneFpga":
            load_ms = 1e3 * dnn_partitioning.load_s(graph, range(len(graph.nodes)))
        else:
            answer = split(graph, graph.num_devices, graph.memory_bytes)
            assert answer.status is Status.OPTIMAL
            load_ms = largest_load_ms(graph, answer.stages)
        assert load_ms == pytest.approx(float(row["objective"]), rel=1e-5), row


@pytest.mark.reference
def test_the_published_splits_as_profiles_keep_their_times():
    for path in sorted((REFERENCE / "dnn-partitioning").glob("*.json")):
        graph = read_dnn_partitioning(path)
        profile = dnn_partitioning_profile(graph)
        total_s = sum(o.forward_s + o.backward_s for o in profile.operators)
        assert total_s == pytest.approx(sum(n.time_ms for n in graph.nodes) / 1e3)


@pytest.mark.reference
def test_the_published_plans_of_piper_are_matched_or_beaten():
    rows = expected("piper")
    assert len(rows) == 50
    graph = read_piper(REFERENCE / "piper" / "bert32a100.json")
    for row in rows:
        devices, memory, batch, bandwidth = map(int, re.findall(r"=(\d+)", row["config"]))
        kind = row["algorithm"]
        options = PiperOptions(
            devices,
            memory * GIB,
            float(bandwidth * GIB),
            batch,
            recompute=Recompute.NONE if kind == "piper-noar" else Recompute.AUTO,
            max_tensor_parallel=1 if kind == "piper-notp" else None,
            max_data_parallel=1 if kind == "piper-nodp" else None,
        )
        answer = equal_stages(graph, options) if kind == "2bw" else plan(graph, options)
        if row["status"] == "infeasible":
            assert answer.status is Status.INFEASIBLE, row
            continue
        time_s = largest_time_s(graph, options, answer)
        assert time_s <= float(row["objective"]) * (1 + 1e-11), row
        if kind == "2bw":
            assert time_s == pytest.approx(float(row["objective"]), rel=1e-11), row
