"""Downsets against brute force and networkx."""

import networkx as nx
from hypothesis import given

from planner.solvers.graphs.downsets import count_downsets, downsets, members, pack
from tests.support.strategies import dags


def subsets_closed_under_predecessors(feeds):
    for mask in range(1 << len(feeds)):
        inside = {v for v in range(len(feeds)) if mask >> v & 1}
        if all(inside.issuperset(feeds[v]) for v in inside):
            yield sorted(inside)


@given(dags(max_nodes=8))
def test_finds_exactly_the_sets_that_hold_their_predecessors(feeds):
    subsets = downsets(feeds)
    assert sorted(members(m) for m in subsets.masks) == sorted(
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


def test_a_chain_longer_than_a_word_has_one_downset_more_than_nodes():
    feeds = [[v - 1] if v else [] for v in range(150)]
    subsets = downsets(feeds)
    assert subsets.masks.shape == (151, 3)
    assert members(subsets.masks[130]) == list(range(130))


def test_counting_stops_at_the_limit():
    assert count_downsets([[] for _ in range(40)], limit=1000) == 1001


def test_pack_and_members_are_inverse():
    assert [members(m) for m in pack([[0, 63, 64], []], 70)] == [[0, 63, 64], []]
