"""Blocks of operators: what is merged, what is put in order, and what repeats."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.graph import (
    Graph,
    Operator,
    Parameter,
    Tensor,
    consumers,
    predecessors,
    producers,
)
from planner.solvers.graphs.coarsen import coarsen, summary
from planner.solvers.graphs.contraction import MergeRule, blocks_after, contract
from planner.solvers.graphs.downsets import count_downsets, downsets, members
from planner.solvers.graphs.repeats import Repeat, repeats, representatives
from tests.support.builders import graph_of
from tests.support.strategies import dags

CHAIN = [[], [0], [1], [2]]


class Model:
    """Operators one by one: `add` returns the tensor that the new one makes."""

    def __init__(self):
        self.operators, self.times, self.parameters = [], [], []
        self.tensors = [Tensor("x", (64, 64), "float32", False)]

    def add(self, kind, inputs, time=1.0, shape=(64, 64), weight=None):
        name = f"t{len(self.operators)}"
        held = (f"w{len(self.operators)}",) if weight else ()
        self.parameters += [Parameter(w, weight, "float32", True) for w in held]
        inputs = tuple(dict.fromkeys(inputs))
        self.operators.append(Operator(f"op{name}", kind, inputs, (name,), held))
        self.tensors.append(Tensor(name, shape, "float32", True))
        self.times.append(time)
        return name

    def graph(self):
        return Graph(
            tuple(self.operators), tuple(self.tensors), tuple(self.parameters), ("x",),
            (self.tensors[-1].name,),
        )  # fmt: skip


def transformer(layers, noise=lambda i: 1.0):
    """Layers of 15 operators with three branches and a residual; a mask that all of them read.

    noise: factor on the time of operator i.
    """
    model = Model()

    def add(kind, inputs, time, **more):
        return model.add(kind, inputs, time * noise(len(model.operators)), **more)

    mask = add("Where", [add("Cast", ["x"], 0.001)], 0.001)
    x = add("Gather", ["x"], 0.1, weight=(1000, 64))
    for _ in range(layers):
        y = add("LayerNormalization", [x], 0.05, weight=(64,))
        q, k, v = (
            add("Transpose", [add("MatMul", [y], 1.0, weight=(64, 64))], 0.01) for _ in range(3)
        )
        scores = add("Add", [add("MatMul", [q, k], 0.3, shape=(256, 64)), mask], 0.05,
                     shape=(256, 64))  # fmt: skip
        weights = add("Softmax", [scores], 0.1, shape=(256, 64))
        x = add("Add", [x, add("MatMul", [weights, v], 0.3)], 0.02)
        wide = add("Gelu", [add("MatMul", [x], 4.0, shape=(64, 256), weight=(64, 256))], 0.1,
                   shape=(64, 256))  # fmt: skip
        x = add("MatMul", [wide], 4.0, weight=(256, 64))
    add("MatMul", [x], 2.0, weight=(64, 1000))
    return model.graph(), model.times


PERIOD = 15


def nasnet(cells):
    """Cells of five branches that read the two cells before them: hardly any waists."""
    model = Model()
    before = last = model.add("Conv", ["x"], weight=(3, 64))
    for cell in range(cells):
        branches = []
        for branch in range(5):
            source = model.add("Relu", [(before, last)[branch % 2]], 0.05)
            for _ in range(2):
                source = model.add("Conv", [source], 1.0 + 0.1 * (cell + branch), weight=(64, 64))
            branches.append(source)
        before, last = last, model.add("Concat", branches, 0.1)
    return model.graph(), model.times


def fan(branches):
    """A source, heavy branches of one operator, and their sum."""
    model = Model()
    source = model.add("Relu", ["x"], 0.1)
    model.add("Sum", [model.add("Conv", [source], 5.0 + i) for i in range(branches)], 0.1)
    return model.graph(), model.times


def contracted_edges(feeds, blocks):
    block_of = {v: b for b, block in enumerate(blocks) for v in block}
    edges = {(block_of[u], block_of[v]) for v, us in enumerate(feeds) for u in us}
    return {(a, b) for a, b in edges if a != b}


@st.composite
def profiled(draw, max_nodes=12):
    """A graph with times, and the price of a byte."""
    feeds = draw(dags(max_nodes=max_nodes))
    size = len(feeds)
    sizes = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    times = draw(st.lists(st.floats(0, 9), min_size=size, max_size=size))
    return graph_of(feeds, sizes), times, draw(st.sampled_from([0.0, 0.1, 10.0]))


# ----------------------------------------------------------------------------- within the budget


@given(profiled(), st.integers(2, 20))
def test_blocks_partition_the_operators_into_a_dag_within_the_budget(case, budget):
    graph, times, s_per_byte = case
    coarse = coarsen(graph, times, budget, s_per_byte=s_per_byte)
    assert sorted(v for block in coarse.blocks for v in block) == list(range(len(times)))
    assert coarse.num_downsets == count_downsets(coarse.predecessors) <= budget
    stated = {(a, b) for b, sources in enumerate(coarse.predecessors) for a in sources}
    edges = contracted_edges(predecessors(graph), coarse.blocks)
    assert edges == stated if coarse.window is None else edges <= stated
    assert all(a < b for a, b in stated)


@given(profiled(), st.integers(2, 20))
def test_every_downset_of_blocks_is_one_of_the_graph(case, budget):
    graph, times, s_per_byte = case
    feeds = predecessors(graph)
    coarse = coarsen(graph, times, budget, s_per_byte=s_per_byte)
    for mask in downsets(coarse.predecessors).masks:
        inside = {v for block in members(mask) for v in coarse.blocks[block]}
        assert all(inside.issuperset(feeds[v]) for v in inside)


@given(profiled())
def test_every_step_of_a_contraction_leaves_a_dag(case):
    graph, times, s_per_byte = case
    mergers = contract(graph, times, range(len(times)), s_per_byte)
    assert len(mergers) == len(times) - 1
    for count in range(len(mergers) + 1):
        blocks = blocks_after(graph, mergers[:count])
        assert len(blocks.members) == len(times) - count
        assert sum(merged for _, merged in blocks.merged) == count
        edges = contracted_edges(predecessors(graph), blocks.members)
        assert edges == {(a, b) for b, us in enumerate(blocks.predecessors) for a in us}
        assert all(a < b for a, b in edges)


def test_without_a_budget_nothing_is_merged():
    graph, times = fan(4)
    coarse = coarsen(graph, times, None)
    assert coarse.blocks == tuple((v,) for v in range(6))
    assert coarse.exact
    assert coarse.num_downsets == 2**4 + 2


def test_within_the_budget_nothing_is_merged():
    coarse = coarsen(graph_of(CHAIN), [1.0] * 4, 5)
    assert coarse.exact
    assert summary(coarse) == "4 operators (5 downsets), none merged"


def test_a_budget_below_two_is_refused():
    with pytest.raises(ValueError, match="max_downsets: expected at least 2, got 1"):
        coarsen(graph_of(CHAIN), [1.0] * 4, 1)


# -------------------------------------------------------------------------------- what is merged


def test_cheap_operators_are_merged_before_heavy_ones():
    coarse = coarsen(graph_of(CHAIN), [5.0, 0.1, 0.2, 5.0], 4)
    assert coarse.blocks == ((0,), (1, 2), (3,))
    assert coarse.merged == ((MergeRule.CHEAP, 1),)


def test_operators_that_exchange_much_are_merged():
    graph = graph_of(CHAIN, [10, 1000, 10, 10])
    coarse = coarsen(graph, [1.0] * 4, 4, s_per_byte=0.01)
    assert coarse.blocks == ((0,), (1, 2), (3,))
    assert coarse.merged == ((MergeRule.HEAVY_EDGE, 1),)


def test_without_a_price_of_bytes_only_times_count():
    graph = graph_of(CHAIN, [10, 1000, 10, 10])
    assert coarsen(graph, [2.0, 2.0, 2.0, 1.0], 4).blocks == ((0,), (1,), (2, 3))


def test_what_all_layers_read_is_merged_into_the_front():
    graph, times = transformer(6)
    coarse = coarsen(graph, times, 40, s_per_byte=1e-6)
    mask = 1
    (home,) = (block for block in coarse.blocks if mask in block)
    assert max(home) < 3 + PERIOD, "with something of the first layer"


def test_unrelated_operators_are_merged_in_the_end():
    coarse = coarsen(graph_of([[] for _ in range(9)]), [1.0] * 9, 2)
    assert coarse.blocks == (tuple(range(9)),)
    assert coarse.merged == ((MergeRule.UNRELATED, 8),)


def test_heavy_operators_side_by_side_are_ordered_and_stay_alone():
    graph, times = fan(8)
    coarse = coarsen(graph, times, 12)
    assert coarse.window == 0
    heavy = [block for block in coarse.blocks if set(block) & set(range(1, 9))]
    assert len(heavy) == 8
    assert not coarse.exact


def test_a_merger_is_reported_by_its_rule():
    graph, times = transformer(12)
    coarse = coarsen(graph, times, 60, s_per_byte=1e-6)
    assert sum(count for _, count in coarse.merged) == len(times) - len(coarse.blocks)
    said = summary(coarse)
    assert said.startswith(
        f"{len(times)} operators in {len(coarse.blocks)} blocks ({coarse.num_downsets} downsets): "
    )
    assert "merged as cheap" in said
    assert "12 layers of 15 operators alike" in said


# --------------------------------------------------------------------------------- how good it is


def best_bottleneck(graph, times, coarse, num_stages, s_per_byte):
    """The least time of the slowest stage, transfers on both sides included, over pipelines of
    blocks: plain dynamic programming over pairs of downsets.
    """
    made_by, read_by = producers(graph), consumers(graph)
    cuts = []
    for mask in downsets(coarse.predecessors).masks:
        inside = {v for block in members(mask) for v in coarse.blocks[block]}
        crossing = sum(
            2 * t.bytes
            for t in graph.tensors
            if made_by.get(t.name) in inside and not inside.issuperset(read_by[t.name])
        )
        cuts.append((sum(1 << v for v in inside), sum(times[v] for v in inside), crossing))
    best = [{0: 0.0}]
    for _ in range(num_stages):
        reached = {}
        for i, (inside, at, crossing) in enumerate(cuts):
            stages = (
                max(slowest, at - cuts[j][1] + s_per_byte * (crossing + cuts[j][2]))
                for j, slowest in best[-1].items()
                if j < i and not cuts[j][0] & ~inside
            )
            least = min(stages, default=None)
            if least is not None:
                reached[i] = least
        best.append(reached)
    return min(of_cuts.get(len(cuts) - 1, float("inf")) for of_cuts in best)


@pytest.mark.parametrize(("name", "limit"), [("transformer", 1.02), ("nasnet", 1.08)])
@pytest.mark.parametrize("s_per_byte", [0.0, 2e-6])
def test_little_is_lost_on_a_fifth_of_the_downsets(name, limit, s_per_byte):
    graph, times = transformer(8) if name == "transformer" else nasnet(1)
    exact = coarsen(graph, times, None)
    coarse = coarsen(graph, times, exact.num_downsets // 5, s_per_byte=s_per_byte)
    least = best_bottleneck(graph, times, exact, 4, s_per_byte)
    assert best_bottleneck(graph, times, coarse, 4, s_per_byte) <= limit * least


@pytest.mark.parametrize("budget", [2, 30, 400])
def test_wide_cells_without_waists_fit_the_budget(budget):
    graph, times = nasnet(12)
    assert count_downsets(predecessors(graph), 20_000) > 20_000
    coarse = coarsen(graph, times, budget, s_per_byte=1e-6)
    assert budget / 2 < coarse.num_downsets <= budget


# ----------------------------------------------------------------------------------- what repeats


def test_layers_that_repeat_are_found():
    graph, times = transformer(12)
    assert repeats(graph, times) == (Repeat(3, PERIOD, 12),)


def test_noise_of_measuring_does_not_hide_repeats():
    graph, times = transformer(12, noise=lambda i: 0.9 + 0.2 * (i * 7 % 11) / 10)
    assert repeats(graph, times) == (Repeat(3, PERIOD, 12),)


def test_a_layer_that_takes_much_longer_is_no_repeat():
    third = range(3 + 2 * PERIOD, 3 + 3 * PERIOD)
    graph, times = transformer(12, noise=lambda i: 3.0 if i in third else 1.0)
    runs = [repeat for repeat in repeats(graph, times) if repeat.period == PERIOD]
    assert runs == [Repeat(3, PERIOD, 2), Repeat(3 + 3 * PERIOD, PERIOD, 9)]


def test_layers_with_other_shapes_are_no_repeats():
    model = Model()
    x = "x"
    for width in (8, 8, 8, 8, 16, 32):
        x = model.add("Gemm", [x], shape=(width, 8))
        x = model.add("Add", [model.add("Relu", [x], shape=(width, 8)), x], shape=(width, 8))
    assert repeats(model.graph(), model.times) == (Repeat(1, 3, 3),)


def test_an_operator_stands_for_those_that_repeat_it():
    assert representatives(7, (Repeat(1, 2, 2),)) == [0, 1, 2, 1, 2, 5, 6]


def test_layers_of_one_operator_repeat_too():
    graph = graph_of([[v - 1] if v else [] for v in range(12)])
    assert repeats(graph, [1.0] * 12) == (Repeat(1, 1, 11),)


def test_repeated_layers_are_cut_alike():
    graph, times = transformer(12, noise=lambda i: 0.9 + 0.2 * (i * 7 % 11) / 10)
    for budget in (40, 60, 100, 150):
        coarse = coarsen(graph, times, budget, s_per_byte=1e-6)
        home = {v: block for block in coarse.blocks for v in block}
        starts = [3 + PERIOD * layer for layer in range(1, 11)]
        for a, b in pairwise(starts):
            for v in range(PERIOD):
                shifted = tuple(w + b - a for w in home[a + v])
                assert shifted == home[b + v], f"budget {budget}, layer at {b}"


def test_a_deep_transformer_fits_a_small_budget():
    graph, times = transformer(700)
    coarse = coarsen(graph, times, 1000, s_per_byte=1e-6)
    assert len(times) == 10_504
    assert 500 < coarse.num_downsets <= 1000
    assert summary(coarse).endswith("700 layers of 15 operators alike") or coarse.window == 0
