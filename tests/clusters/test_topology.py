"""Topologies: what is wrong with one, its first devices, routes, chains and rings."""

from dataclasses import replace
from itertools import pairwise, permutations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.topology import Level, Link, problems, take
from planner.clusters.routes import ROUTED_BYTES, bandwidth_bytes_per_s, chain, pair_widths, routes
from planner.clusters.yaml.read import find_topology, read_topology
from planner.support.errors import TopologyError
from tests.support.builders import cluster, unit_type
from tests.support.programs import hosts

REGULAR = """
format: planner-topology/1
name: regular
device: cpu
levels:
  - {name: gpu, count: 2, bandwidth: 4 GB/s, latency: 5 us}
  - {name: host, count: 3, bandwidth: 2 GB/s, latency: 5 us}
  - {name: rack, count: 2, bandwidth: 1 GB/s, latency: 5 us}
"""


@pytest.fixture
def regular(tmp_path):
    (tmp_path / "t.yaml").write_text(REGULAR)
    return read_topology(tmp_path / "t.yaml")


def test_each_problem_is_said_once_and_where_it_was_made(regular):
    pair = cluster([unit_type()] * 2)
    assert problems(pair) == ()
    loop = replace(pair, links=(*pair.links, *[Link("d0", "d0", 1.0, 0.0)] * 2))
    assert problems(loop) == ("links: d0 is linked to itself; leave that link out",)
    flat = replace(
        regular,
        levels=(replace(regular.levels[0], bandwidth_bytes_per_s=0.0), *regular.levels[1:]),
        links=tuple(replace(link, bandwidth_bytes_per_s=0.0) for link in regular.links),
    )
    assert problems(flat) == ("levels[0].bandwidth: expected more than 0 B/s, got 0",)
    narrow = replace(pair, links=(replace(pair.links[0], bandwidth_bytes_per_s=0.0),))
    assert problems(narrow) == ("links: d0 -> host: bandwidth: expected more than 0 B/s, got 0",)


@pytest.mark.parametrize(
    ("num_devices", "counts", "num_hosts"),
    [
        (1, (1,), 1), (2, (2,), 1), (3, (), 2), (4, (2, 2), 2), (5, (), 3), (6, (2, 3), 3),
        (8, (), 4), (12, (2, 3, 2), 6),
    ],
)  # fmt: skip
def test_the_first_devices_keep_their_hosts_and_true_levels(
    regular, num_devices, counts, num_hosts
):
    found = take(regular, num_devices)
    assert tuple(level.count for level in found.levels) == counts
    assert len(found.hosts) == num_hosts
    assert problems(found) == ()
    whole = routes(regular)
    for (p, q), path in routes(found).items():
        assert [found.links[i] for i in path] == [regular.links[i] for i in whole[p, q]]


def test_a_host_without_devices_that_joins_others_is_a_switch():
    base = cluster([unit_type()] * 3)
    devices = (*base.devices[:2], replace(base.devices[2], host="other"))
    both = replace(base, hosts=(*base.hosts, replace(base.hosts[0], name="other")), devices=devices)
    ends = [("d0", "other"), ("d1", "other"), ("d2", "other")]
    links = tuple(Link(*pair, 1e9, 0.0) for a, b in ends for pair in ((a, b), (b, a)))
    found = take(replace(both, links=links), 2)
    assert found.switches == ("other",)
    assert len(routes(found)[0, 1]) == 2


def test_levels_with_one_member(regular):
    one = Level("gpu", 1, 1e9, 0.0)
    four = replace(cluster([unit_type()] * 4), levels=(one, Level("host", 4, 1e9, 0.0)))
    assert [level.count for level in take(four, 1).levels] == [1]
    assert [level.count for level in take(four, 3).levels] == [1, 3]


def test_the_chain_of_a_cube_mesh():
    assert chain(read_topology(find_topology("p3")), tuple(range(8))) == (0, 1, 3, 2, 6, 7, 5, 4)


@pytest.mark.parametrize("closed", [False, True])
def test_no_order_is_better_than_the_chain(closed):
    mesh = read_topology(find_topology("p3"))
    devices = (0, 2, 3, 5, 6)

    def badness(order):
        pairs = pairwise((*order, order[0]) if closed else order)
        widths = [bandwidth_bytes_per_s(mesh, p, q) for p, q in pairs]
        return -min(widths), round(sum(1 / w for w in widths), 18), order

    assert chain(mesh, devices, closed=closed) == min(permutations(devices), key=badness)


@st.composite
def link_graphs(draw):
    """Up to 5 devices, 3 hosts and switches, and any links among them; each device is on a host."""
    count = draw(st.integers(2, 5))
    vertices = [f"d{i}" for i in range(count)] + ["host", "a", "b"]
    widths, latencies = st.sampled_from([1e6, 2e6, 3e6, 1e7]), st.sampled_from([0.0, 0.25, 0.3])
    pairs = st.tuples(st.sampled_from(vertices), st.sampled_from(vertices))
    ends = draw(st.sets(pairs.filter(lambda pair: pair[0] != pair[1]), max_size=20))
    ends |= {pair for v in vertices[:count] for pair in ((v, "host"), ("host", v))}
    links = [Link(a, b, draw(widths), draw(latencies)) for a, b in sorted(ends)]
    return replace(cluster([unit_type()] * count), switches=("a", "b"), links=tuple(links))


@given(link_graphs())
def test_routes_are_as_fast_as_those_of_networkx_and_run_through_no_device(topology):
    graph = nx.DiGraph()
    for link in topology.links:
        time_s = link.latency_s + ROUTED_BYTES / link.bandwidth_bytes_per_s
        graph.add_edge(link.source, link.target, time_s=time_s)
    devices = {device.name for device in topology.devices}
    found, (latency, width) = routes(topology), pair_widths(topology)
    assert len(found) == len(dict(found)) == len(devices) * (len(devices) - 1)
    for (p, q), path in found.items():
        ends = topology.devices[p].name, topology.devices[q].name
        links = [topology.links[i] for i in path]
        assert (links[0].source, links[-1].target) == ends
        assert all(a.target == b.source not in devices for a, b in pairwise(links))
        allowed = graph.subgraph({*set(graph) - devices, *ends})
        least_s = nx.dijkstra_path_length(allowed, *ends, weight="time_s")
        taken_s = sum(one.latency_s + ROUTED_BYTES / one.bandwidth_bytes_per_s for one in links)
        assert taken_s == pytest.approx(least_s, rel=1e-12)
        assert latency[p, q] == pytest.approx(sum(one.latency_s for one in links), abs=1e-12)
        assert width[p, q] == min(one.bandwidth_bytes_per_s for one in links)


def test_a_pair_without_a_path_is_an_error_that_names_it():
    both = cluster([unit_type()] * 2)
    one_way = replace(both, links=tuple(link for link in both.links if link.target != "d0"))
    with pytest.raises(TopologyError, match="no path leads from d1 to d0; add a link"):
        routes(one_way)


def test_tables_of_pairs_cannot_be_written_to():
    for table in pair_widths(cluster([unit_type()] * 2)):
        with pytest.raises(ValueError, match="read-only"):
            table[0, 1] = 0.0


@pytest.mark.parametrize("closed", [False, True])
def test_a_long_chain_stays_on_each_host_until_all_its_devices_are_in_it(closed):
    # Devices are dealt to the hosts in turn, so the order by index would leave the host each time.
    topology = hosts(16, 8)
    dealt = tuple(topology.devices[8 * (i % 16) + i // 16] for i in range(128))
    topology = replace(topology, devices=dealt)
    order = chain(topology, tuple(range(128)), closed=closed)
    assert sorted(order) == list(range(128))
    ends = [*order, order[0]] if closed else order
    changes = sum(dealt[p].host != dealt[q].host for p, q in pairwise(ends))
    assert changes == (16 if closed else 15)


def test_routes_and_a_ring_over_1024_devices():
    topology = hosts(128, 8)
    latency, width = pair_widths(topology)
    assert chain(topology, tuple(range(1024)), closed=True) == tuple(range(1024))
    assert (width[0, 7], width[0, 8]) == (100.0, 10.0)
    assert latency[0, 1023] == pytest.approx(0.04)
