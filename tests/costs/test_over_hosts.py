"""Collectives of groups over hosts, beside sums by hand and beside one ring through all devices."""

import random
from dataclasses import replace

import pytest

from planner import api
from planner.artefacts.strategy import GradientSum
from planner.artefacts.topology import CollectiveKind, Link
from planner.clusters.routes import chain, pair_widths
from planner.costs.actions import crowds
from planner.costs.transfers import (
    allgather_s,
    allreduce_s,
    collective_s,
    conversion_s,
    crowding,
    gradient_sum_s,
    reducescatter_s,
    ring_allreduce_s,
    ring_links,
)
from planner.resharding.conversion import Collective, Step
from tests.support.builders import islands

INSIDE, BETWEEN, SIZE = 100.0, 10.0, 1000
ONE_CARD = islands([2, 2], INSIDE, BETWEEN)
"""Two hosts of two devices; each host has one card."""


def with_own_cards(counts):
    """Every device has a card of its own to the switch."""
    found = islands(counts, INSIDE, BETWEEN)
    own = [(one.name, "switch") for one in found.devices]
    links = [one for one in found.links if "switch" not in (one.source, one.target)]
    links += [Link(*pair, BETWEEN, 0.0) for a, b in own for pair in ((a, b), (b, a))]
    return replace(found, links=tuple(links))


OWN_CARDS = with_own_cards([2, 2])
GROUP = (0, 1, 2, 3)


def test_the_devices_of_a_host_share_its_card():
    """Half of 1,000 bytes each way inside at 100 bytes/s; then 500 bytes on each of two rings over
    two hosts, at half of 10 bytes/s. A ring through all four takes 1.5 times 1,000 bytes at 10.
    """
    assert allreduce_s(ONE_CARD, GROUP, SIZE) == pytest.approx(5 + 100 + 5)
    assert reducescatter_s(ONE_CARD, GROUP, SIZE) == pytest.approx(5 + 50)
    assert allgather_s(ONE_CARD, GROUP, SIZE) == pytest.approx(50 + 5)


def test_devices_with_cards_of_their_own_use_all_of_them():
    assert allreduce_s(OWN_CARDS, GROUP, SIZE) == pytest.approx(5 + 50 + 5)


def test_one_device_on_each_host_has_one_ring():
    assert allreduce_s(OWN_CARDS, (0, 2), SIZE) == pytest.approx(SIZE / BETWEEN)


def test_a_group_with_more_devices_on_one_host_has_one_ring():
    topology = islands([2, 1], INSIDE, BETWEEN)
    assert allreduce_s(topology, (0, 1, 2), SIZE) == pytest.approx(2 * 2 / 3 * SIZE / BETWEEN)


@pytest.mark.parametrize(("topology", "due"), [(ONE_CARD, 2.0), (OWN_CARDS, 1.0)])
def test_groups_at_once_share_a_card(topology, due):
    assert crowding(topology, ((0, 2), (1, 3))) == pytest.approx(due)
    step = Step(Collective.ALL_REDUCE, 0, "P", "R", SIZE)
    assert conversion_s(topology, GROUP, (2, 2), [step]) == pytest.approx(due * SIZE / BETWEEN)
    sums = [GradientSum(devices, ("w",), SIZE) for devices in ((0, 2), (1, 3))]
    assert crowds(topology, sums) == pytest.approx([due, due])
    alone = [GradientSum((0, 2), ("w",), SIZE), GradientSum((1, 3), ("other",), SIZE)]
    assert crowds(topology, alone) == [1.0, 1.0]


def test_groups_inside_a_host_share_nothing_where_links_are_their_own():
    assert crowding(islands([4], INSIDE, BETWEEN), ((0, 1), (2, 3))) == 1.0


def test_sums_in_parts_share_cards_too():
    """Each device keeps one of two parts: scattered inside a host, added up over hosts."""
    shards = ((0, 2), (1, 3))
    sum_s = gradient_sum_s(ONE_CARD, GROUP, SIZE, shards)
    assert sum_s == pytest.approx(SIZE / 2 / INSIDE + SIZE / 2 / (BETWEEN / 2))


PRESETS = ("p3-16xlarge-x2", "p4d-x8", "p4d-x32", "dgx-a100-x4", "dgx-h100-x4", "p5-x8")


def groups(topology, chance):
    """Equally many devices on each of some hosts."""
    on_host = {}
    for d, one in enumerate(topology.devices):
        on_host.setdefault(one.host, []).append(d)
    hosts = chance.sample(sorted(on_host), chance.randint(2, len(on_host)))
    count = chance.choice([2, 4, 8])
    return tuple(sorted(d for host in hosts for d in on_host[host][:count]))


def flat_s(topology, group, size):
    ring = chain(topology, group, closed=True)
    latency, width = pair_widths(topology)
    hops = list(ring), [*ring[1:], ring[0]]
    return ring_allreduce_s(size, len(group), latency[hops].max(), width[hops].min())


@pytest.mark.parametrize("name", PRESETS)
def test_no_group_is_slower_than_one_ring_and_searches_have_a_bound(name):
    topology, chance = replace(api.read_topology(name), levels=()), random.Random(name)
    for _ in range(20):
        group = groups(topology, chance)
        links = ring_links(topology, group)
        times = [allreduce_s(topology, group, 10**k) for k in range(3, 11)]
        assert times == sorted(times)
        for k, time_s in zip(range(3, 11), times, strict=True):
            assert ring_allreduce_s(10**k, len(group), *links) <= time_s * (1 + 1e-9)
        untabled = replace(topology, tables=())
        large = allreduce_s(untabled, group, 2**28)
        assert large <= flat_s(untabled, group, 2**28) * (1 + 1e-9)
        for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
            assert (
                0 < collective_s(topology, group, kind, 2**28) < allreduce_s(topology, group, 2**28)
            )
