"""Clusters with something else in them, and what bounds a plan."""

from dataclasses import replace
from itertools import permutations

import pytest

from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import (
    CollectiveTable,
    Device,
    Host,
    HostLink,
    Link,
    Topology,
    problems,
)
from planner.clusters.places import host_of_vertex, network_switch
from planner.clusters.routes import bandwidth_bytes_per_s, latency_s
from planner.clusters.what_if import CHANGED, drop, set_value, what_if
from planner.clusters.yaml.read import find_topology, read_topology
from planner.costs.evaluate import evaluate
from planner.costs.transfers import allreduce_s
from planner.planning.sensitivity import ALL_LINKS, link_classes, sensitivity
from planner.simulator.steady import iterate
from planner.support.errors import OptionError
from tests.support.builders import cluster, graph_of, hierarchy, problem_of, profile_of, unit_type
from tests.support.split import megatron, mlp, one_stage

FOUR_HOSTS = """
format: planner-topology/1
name: four
device: T4
levels:
  - {name: gpu, count: 2, bandwidth: 12 GB/s, latency: 5 us}
  - {name: host, count: 4, bandwidth: 25 Gbps, latency: 20 us}
"""


@pytest.fixture
def four(tmp_path):
    """Four hosts of two T4 each, written as levels."""
    (tmp_path / "four.yaml").write_text(FOUR_HOSTS)
    return read_topology(tmp_path / "four.yaml")


def both(a, b, rate, name=""):
    return [Link(a, b, rate, 1e-6, name), Link(b, a, rate, 1e-6, name)]


def two_hosts():
    """d0 and d1 on a, d2 on b; each host has a card, which alone leads to the network.

    d0 d1 - a - card0 - network - card1 - b - d2
    """
    return Topology(
        name="two",
        device_types=(unit_type(),),
        hosts=(Host("a"), Host("b")),
        devices=(Device("d0", "unit", "a"), Device("d1", "unit", "a"), Device("d2", "unit", "b")),
        switches=("card0", "card1", "network"),
        links=(
            *both("d0", "a", 1e10), *both("d1", "a", 1e10), *both("d2", "b", 1e10),
            *both("a", "card0", 2e9), *both("b", "card1", 2e9),
            *both("card0", "network", 1e9, "nic"), *both("card1", "network", 1e9, "nic"),
        ),
    )  # fmt: skip


# ------------------------------------------------------------------------------ places


def test_a_card_stands_in_its_host_and_the_network_in_none():
    home = host_of_vertex(two_hosts())
    assert (home["card0"], home["card1"], home["network"]) == ("a", "b", None)
    assert network_switch(two_hosts()) == "network"


def test_a_switch_of_one_host_joins_none():
    assert network_switch(cluster([unit_type()] * 3)) is None


def test_a_switch_that_joins_racks_joins_hosts_though_one_host_is_nearer():
    """a - main - rack0 - b, c and main - rack1 - d, e: main is beside a, but leads on twice."""
    hosts = "abcde"
    ends = [("a", "main"), ("main", "rack0"), ("main", "rack1")]
    ends += [("b", "rack0"), ("c", "rack0"), ("d", "rack1"), ("e", "rack1")]
    ends += [(f"d{i}", host) for i, host in enumerate(hosts)]
    topology = Topology(
        "racks", (unit_type(),), tuple(map(Host, hosts)),
        tuple(Device(f"d{i}", "unit", host) for i, host in enumerate(hosts)),
        ("main", "rack0", "rack1"), tuple(link for pair in ends for link in both(*pair, 1e9)),
    )  # fmt: skip
    home = host_of_vertex(topology)
    assert [home[switch] for switch in topology.switches] == [None, None, None]


# ------------------------------------------------------------------------------ set


def test_a_link_is_set_by_its_name_or_by_its_ends_in_both_directions():
    for path in ("links.nic.bandwidth", "links.card0-network.bandwidth"):
        changed = set_value(two_hosts(), f"{path}=200Gbps", {})
        assert changed.changes == (f"{path}: 1 GB/s -> 25 GB/s",)
    slower = set_value(two_hosts(), "links.nic.bandwidth=4Gbps", {}).topology
    assert bandwidth_bytes_per_s(slower, 0, 2) == 5e8
    apart = set_value(two_hosts(), "links.network-card0.latency=1 ms", {}).topology
    for pair in ((0, 2), (2, 0)):
        assert latency_s(apart, *pair) == pytest.approx(1e-3 + 5e-6)


def test_a_level_is_set_in_all_its_links_and_stays_a_level(four):
    changed = set_value(four, "levels.host.bandwidth=200Gbps", {}).topology
    assert bandwidth_bytes_per_s(changed, 0, 2) == 12e9
    assert changed.levels[1].bandwidth_bytes_per_s == 25e9
    far = set_value(four, "levels.host.latency=100 us", {}).topology
    assert latency_s(far, 0, 2) == pytest.approx(105e-6)
    assert latency_s(far, 0, 1) == pytest.approx(5e-6)


def test_a_single_link_of_a_hierarchy_makes_it_none(four):
    assert set_value(four, "links.host0-switch.bandwidth=1Gbps", {}).topology.levels == ()


def test_a_device_becomes_another_type_and_keeps_its_index(four):
    types = {"L4": replace(unit_type(), name="L4")}
    changed = set_value(four, "devices.gpu3.type=L4", types).topology
    assert [device.type for device in changed.devices][2:5] == ["T4", "L4", "T4"]
    assert {kind.name for kind in changed.device_types} == {"L4", "T4"}
    assert changed.levels == ()
    assert problems(changed) == ()


def test_a_type_with_another_speed_has_another_name_so_that_its_profile_is_rescaled(four):
    faster = set_value(four, "device_types.T4.flops.float32=16.2 TFLOP/s", {}).topology
    assert {device.type for device in faster.devices} == {"T4" + CHANGED}
    larger = set_value(four, "device_types.T4.memory=32 GiB", {}).topology
    assert {device.type for device in larger.devices} == {"T4"}
    assert larger.device_types[0].memory_bytes == 32 * 1024**3


def test_figures_of_a_type_may_be_set_in_any_order(four):
    settings = (
        "device_types.T4.flops.float32=4 TFLOP/s",
        "device_types.T4.memory=8 GB",
        "device_types.T4.memory_bandwidth=100 GB/s",
    )
    changed = [what_if(four, order).topology.device_types for order in permutations(settings)]
    (kind,) = changed[0]
    assert all(types == (kind,) for types in changed)
    assert kind.name == "T4 (what if)"
    assert kind.peak_flops("float32") == 4e12
    assert (kind.memory_bytes, kind.memory_bandwidth_bytes_per_s) == (8 * 10**9, 1e11)


def test_a_host_gets_cores_and_memory(four):
    changed = set_value(four, "hosts.host1.cores=8", {}).topology
    assert [host.cores for host in changed.hosts] == [None, 8, None, None]
    assert set_value(four, "hosts.host1.memory=8 GiB", {}).changes == (
        "hosts.host1.memory: each device's own -> 8 GiB",
    )


def test_a_host_gets_a_link_to_its_memory(four):
    changed = what_if(four, [
        "hosts.host1.host_link.bandwidth=25 GB/s", "hosts.host1.host_link.devices=2",
        "hosts.host1.host_link.memory=64 GB",
    ])  # fmt: skip
    links = [host.host_link for host in changed.topology.hosts]
    assert links == [None, HostLink(25e9, 2, 64 * 10**9), None, None]
    assert changed.changes == (
        "hosts.host1.host_link.bandwidth: none -> 25 GB/s",
        "hosts.host1.host_link.devices: 1 -> 2",
        "hosts.host1.host_link.memory: not limited -> 59.6 GiB",
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("hosts.a.host_link.devices=2", "host a has no host_link; set host_link.bandwidth first"),
        ("hosts.a.host_link.bandwidth=2", "expected a rate such as '300 GB/s', got '2'"),
        ("hosts.a.host_link.devices=some", "expected a whole number of devices"),
        ("hosts.a.host_link.latency=1 s", "known: cores, memory, host_link.bandwidth"),
        ("links.nick.bandwidth=1Gbps", "unknown link 'nick'; known: nic, d0-a"),
        ("links.nic.width=1Gbps", "unknown field 'width'; known: bandwidth, latency"),
        ("links.nic.bandwidth=1", "expected a rate such as '300 GB/s', got '1'"),
        ("links.nic.bandwidth=0 B/s", "expected more than 0"),
        ("links.nic.latency=1 GB", "expected a time"),
        ("levels.host.bandwidth=1Gbps", "not written as levels"),
        ("devices.d9.type=unit", "unknown device 'd9'; known: d0, d1, d2"),
        ("devices.d1.type=X", "unknown device type 'X'; known: unit"),
        ("devices.d1.host=b", "unknown field 'host'; known: type"),
        ("device_types.unit.speed=1", "known: memory, memory_bandwidth, flops.float32"),
        ("device_types.X.memory=1 GiB", "unknown device type 'X'; known: unit"),
        ("hosts.a.cores=half", "expected a whole number of cores or auto, got 'half'"),
        ("host.a.cores=1", "unknown section 'host'; known: links, levels, devices"),
        ("links.nic.bandwidth", "expected PATH=VALUE such as"),
    ],
)
def test_a_wrong_setting_says_what_there_is(setting, said):
    with pytest.raises(OptionError) as found:
        set_value(two_hosts(), setting, {})
    assert str(found.value).startswith(f"--set {setting}: ")
    assert said in str(found.value)


def test_tables_over_links_that_change_are_left_out_and_others_stay():
    table = CollectiveTable(("d0", "d1"), 2, ((1_000_000, 1.0),))
    far = CollectiveTable(("d0", "d2"), 2, ((1_000_000, 2.0),))
    topology = replace(two_hosts(), tables=(table, far))
    changed = set_value(topology, "links.nic.bandwidth=4Gbps", {})
    assert changed.topology.tables == (table,)
    assert "without 1 of 2 tables" in changed.changes[1]


# ------------------------------------------------------------------------------ drop


def test_dropping_a_device_keeps_the_others_in_order():
    changed = drop(two_hosts(), "d0").topology
    assert [device.name for device in changed.devices] == ["d1", "d2"]
    assert problems(changed) == ()


def test_dropping_a_host_drops_its_devices():
    changed = drop(two_hosts(), "b")
    assert [device.name for device in changed.topology.devices] == ["d0", "d1"]
    assert changed.changes == ("without b (1 device)",)
    # Its card leads nowhere, and so do the network and the other card then.
    assert changed.topology.switches == ()
    assert len(changed.topology.links) == 4


def test_a_hierarchy_without_a_host_is_still_one_and_without_a_device_is_none(four):
    fewer = drop(four, "host1").topology
    assert [level.count for level in fewer.levels] == [2, 3]
    assert [device.name for device in fewer.devices] == [f"gpu{i}" for i in (0, 1, 4, 5, 6, 7)]
    assert drop(four, "gpu3").topology.levels == ()
    one_each = what_if(four, dropped=["gpu1", "gpu3", "gpu5", "gpu7"]).topology
    assert one_each.levels == ()


def test_dropping_what_is_not_there_says_what_is():
    with pytest.raises(OptionError, match="unknown device or host 'x'; known: d0, d1, d2, a, b"):
        drop(two_hosts(), "x")
    with pytest.raises(OptionError, match="no device is left"):
        what_if(two_hosts(), dropped=["a", "b"])


# ------------------------------------------------------------------------------ add


def test_another_host_like_one_has_its_links_and_its_card():
    changed = what_if(two_hosts(), added=[("a", None)])
    topology = changed.topology
    assert [device.name for device in topology.devices] == ["d0", "d1", "d2", "d3", "d4"]
    assert problems(topology) == ()
    assert bandwidth_bytes_per_s(topology, 0, 3) == 1e9
    assert bandwidth_bytes_per_s(topology, 3, 4) == 1e10
    assert changed.changes == ("with another a (2 devices), linked to network like it",)


def test_a_host_of_another_topology_is_linked_as_wide_as_the_hosts_there():
    other = cluster([unit_type("fast")] * 2, bandwidth=5e10)
    changed = what_if(two_hosts(), added=[("other", other)])
    topology = changed.topology
    assert problems(topology) == ()
    assert len(topology.devices) == 5
    assert bandwidth_bytes_per_s(topology, 3, 4) == 5e10
    assert bandwidth_bytes_per_s(topology, 0, 4) == 1e9
    assert "host linked to network at 1 GB/s, 1 us, as the hosts there" in changed.changes[0]
    assert topology.notes[-1] == f"what if: {changed.changes[0]}"


def test_where_each_device_has_a_card_each_new_one_has_one():
    rails = read_topology(find_topology("dgx-a100-x4"))
    topology = what_if(rails, added=[("p4d", read_topology(find_topology("p4d")))]).topology
    assert len(topology.devices) == 40
    assert bandwidth_bytes_per_s(topology, 0, 39) == bandwidth_bytes_per_s(rails, 0, 8)


def test_without_a_switch_that_joins_hosts_no_host_is_added():
    with pytest.raises(OptionError, match=r"no switch that joins hosts.*under `switches`"):
        what_if(cluster([unit_type()]), added=[("other", two_hosts())])
    with pytest.raises(OptionError, match="nothing leads out of host"):
        what_if(cluster([unit_type()]), added=[("host", None)])


# ------------------------------------------------------------------------------ sensitivity


def data_parallel(problem, devices):
    names = tuple(operator.name for operator in problem.profile.graph.operators)
    stage = Stage.whole(names, tuple(range(devices)), 1, False)
    return Strategy((stage,), ScheduleName.ONE_F_ONE_B, problem.num_microbatches)


def test_a_device_alone_is_bound_by_itself():
    problem = problem_of(profile_of(graph_of([[]]), [1.0]), cluster([unit_type()]))
    (device, links) = sensitivity(problem, data_parallel(problem, 1))
    assert (device.kind, device.name, device.count) == ("device type", "unit", 1)
    assert device.change == pytest.approx(-0.5, abs=1e-6)
    assert links.change == 0


def test_slow_links_of_data_parallelism_come_first():
    """Two devices, a second per microbatch each; the sum of 1 kB at 1 B/s takes a thousand."""
    profile = profile_of(graph_of([[]]), [1.0])
    problem = problem_of(profile, cluster([unit_type()] * 2, bandwidth=1.0), num_microbatches=2)
    links, device = sensitivity(problem, data_parallel(problem, 2))
    assert links.kind == "links"
    assert links.iteration_s == pytest.approx(503, rel=1e-3)
    assert device.iteration_s == pytest.approx(1001.5, rel=1e-3)


def test_links_that_are_twice_as_fast_have_half_the_latency():
    profile = profile_of(graph_of([[]]), [1.0])
    far = cluster([unit_type()] * 2, bandwidth=1e12, latency=8.0)
    problem = problem_of(profile, far, num_microbatches=2)
    links, _ = sensitivity(problem, data_parallel(problem, 2))
    # Two messages of 8 s each, then of 4 s.
    assert links.iteration_s == pytest.approx(3 + 2 * 4, rel=1e-3)


def test_links_are_taken_together_by_name_or_by_figures():
    classes = link_classes(two_hosts())
    assert {name: len(members) for name, members in classes.items()} == {
        "10 GB/s, 1 us": 6, "2 GB/s, 1 us": 4, "nic": 4,
    }  # fmt: skip


def test_two_kinds_of_links_that_are_as_slow_gain_only_together():
    """Both ways lead over both kinds, so the other one stays the narrowest."""
    ends = [("d0", "a", "x"), ("d1", "a", "y")]
    links = tuple(Link(*pair, 1.0, 0.0, name) for p, q, name in ends for pair in ((p, q), (q, p)))
    topology = Topology(
        "t", (unit_type(),), (Host("a"),),
        (Device("d0", "unit", "a"), Device("d1", "unit", "a")), (), links,
    )  # fmt: skip
    problem = problem_of(profile_of(graph_of([[]]), [1.0]), topology, num_microbatches=2)
    gains = {gain.name: gain.change for gain in sensitivity(problem, data_parallel(problem, 2))}
    assert gains["x"] == gains["y"] == 0
    assert gains[ALL_LINKS] < -0.4


def test_a_measured_sum_gains_as_much_as_the_ring_would():
    table = CollectiveTable(("d0", "d1"), 2, ((1000, 10.0),))
    topology = replace(cluster([unit_type()] * 2, bandwidth=1e3), tables=(table,))
    problem = problem_of(profile_of(graph_of([[]]), [1.0]), topology, num_microbatches=2)
    assert allreduce_s(topology, (0, 1), 1000) == 10.0
    links, _ = sensitivity(problem, data_parallel(problem, 2))
    assert links.iteration_s == pytest.approx(3 + 5, rel=1e-3)


def test_gains_of_a_split_plan_are_those_of_the_changed_cluster():
    """A tensor-parallel MLP, whose collectives take as long as its computation."""
    profile, count = mlp(), 4
    topology = cluster([unit_type()] * count, bandwidth=300.0)
    problem = problem_of(profile, topology, num_microbatches=2)
    strategy = one_stage(profile, megatron(count), [range(count)], 2)
    gains = {gain.kind: gain for gain in sensitivity(problem, strategy)}
    links, device = gains["links"], gains["device type"]
    faster = replace(problem, topology=cluster([unit_type()] * count, bandwidth=600.0))
    halved = tuple(
        replace(one, forward_s=one.forward_s / 2, backward_s=one.backward_s / 2)
        for one in profile.operators
    )
    for gain, changed in (
        (links, faster),
        (device, replace(problem, profile=replace(profile, operators=halved))),
    ):
        evaluation = evaluate(changed, strategy)
        assert gain.iteration_s == pytest.approx(iterate(changed, strategy, evaluation).iteration_s)
    assert -0.5 < links.change < -0.1
    assert -0.4 < device.change < -0.1


def test_faster_devices_gain_nothing_where_their_host_is_late():
    """It starts kernels as fast as before."""
    base = profile_of(graph_of([[]]), [1.0])
    late = tuple(
        replace(one, host_forward_s=5.0, host_backward_s=9.0) for one in base.operators
    )  # fmt: skip
    topology = cluster([unit_type()] * 2, bandwidth=1e3)
    problem = problem_of(replace(base, operators=late), topology, num_microbatches=2)
    gains = {one.kind: one for one in sensitivity(problem, data_parallel(problem, 2))}
    assert gains["device type"].change == pytest.approx(0.0, abs=1e-9)


def test_hierarchies_of_the_builders_have_places_too():
    assert network_switch(hierarchy([2, 2], [1e9, 1e9])) is None
