"""Topologies: what is wrong with one, its first devices, chains and rings."""

from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from planner.clusters import find_topology, read_topology
from planner.topology import Level, Link, bandwidth_bytes_per_s, chain, problems, routes, take
from tests.builders import cluster, unit_type

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
