"""Downsets against brute force and networkx."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from planner.coarsen import coarsen
from planner.order import antichain, count_downsets, downsets, members, pack
from tests.strategies import dags


def subsets_closed_under_predecessors(feeds):
    for mask in range(1 << len(feeds)):
        inside = {v for v in range(len(feeds)) if mask >> v & 1}
        if all(inside.issuperset(feeds[v]) for v in inside):
            yield sorted(inside)


@given(dags(max_nodes=8))
def test_finds_exactly_the_sets_that_hold_their_predecessors(feeds):
    found = downsets(feeds)
    assert sorted(members(m) for m in found.masks) == sorted(
        subsets_closed_under_predecessors(feeds)
    )


@given(dags(max_nodes=8))
def test_as_many_downsets_as_antichains(feeds):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(feeds)))
    graph.add_edges_from((u, v) for v, us in enumerate(feeds) for u in us)
    assert count_downsets(feeds) == sum(1 for _ in nx.antichains(graph))


@given(dags(max_nodes=8))
def test_a_downset_comes_after_its_subsets(feeds):
    seen = []
    for mask in downsets(feeds).masks:
        inside = set(members(mask))
        assert not any(inside < earlier for earlier in seen)
        seen.append(inside)


@given(dags(max_nodes=8))
def test_a_downset_is_the_closure_of_its_antichain(feeds):
    for mask in downsets(feeds).masks:
        closed = set(antichain(mask, feeds))
        for v in reversed(range(len(feeds))):
            if v in closed:
                closed.update(feeds[v])
        assert sorted(closed) == members(mask)


def test_a_chain_longer_than_a_word_has_one_downset_more_than_nodes():
    feeds = [[v - 1] if v else [] for v in range(150)]
    found = downsets(feeds)
    assert len(found) == 151
    assert found.masks.shape == (151, 3)
    assert members(found.masks[130]) == list(range(130))


def test_counting_stops_at_the_limit():
    assert count_downsets([[] for _ in range(40)], limit=1000) == 1001


def test_pack_and_members_are_inverse():
    assert [members(m) for m in pack([[0, 63, 64], []], 70)] == [[0, 63, 64], []]


@given(dags(max_nodes=12), st.integers(2, 20), st.data())
def test_coarsening_partitions_the_nodes_into_a_dag_within_the_budget(feeds, budget, data):
    weights = data.draw(st.lists(st.floats(0, 9), min_size=len(feeds), max_size=len(feeds)))
    coarse = coarsen(feeds, weights, budget)
    assert sorted(v for block in coarse.blocks for v in block) == list(range(len(feeds)))
    assert coarse.num_downsets == count_downsets(coarse.predecessors) <= budget
    block_of = {v: b for b, block in enumerate(coarse.blocks) for v in block}
    edges = {(block_of[u], block_of[v]) for v, us in enumerate(feeds) for u in us}
    expected = {(a, b) for a, b in edges if a != b}
    assert {(a, b) for b, us in enumerate(coarse.predecessors) for a in us} == expected
    assert all(a < b for a, b in expected)


def test_without_a_budget_nothing_is_merged():
    feeds = [[], [0], [0], [1, 2]]
    assert coarsen(feeds, [1.0] * 4, None).blocks == ((0,), (1,), (2,), (3,))


def test_cheap_nodes_are_merged_before_heavy_ones():
    feeds = [[], [0], [1], [2]]  # a chain; 0.1 and 0.2 go together
    assert coarsen(feeds, [5.0, 0.1, 0.2, 5.0], 4).blocks == ((0,), (1, 2), (3,))
