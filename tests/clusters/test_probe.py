import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from planner.artefacts.files import read_plan
from planner.artefacts.topology import (
    CollectiveKind,
    CollectiveTable,
    Device,
    DeviceType,
    Host,
    Link,
    Sharing,
    Topology,
    problems,
    table_of,
)
from planner.clusters.probing.collectives import CollectiveTimes, groups_at_once
from planner.clusters.probing.infer import (
    RankDevice,
    SimultaneousTransfers,
    devices_of,
    experiments,
    infer,
)
from planner.clusters.probing.link_fit import PairFit, PairTimes, classes, clusters, fit, fit_all
from planner.clusters.routes import latency_s, routes
from planner.clusters.yaml.read import device_table, read_topology
from planner.clusters.yaml.write import topology_yaml, write_topology
from planner.launcher import probe
from planner.launcher.rendezvous import ProcessRank
from planner.support.errors import LaunchError, TopologyError
from planner.support.units import parse_seconds
from tests.support.shaped_hosts import missing, on_hosts, on_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZES = tuple(1024 * 4**k for k in range(10))
NAMES = tuple(f"rank {r}" for r in range(8))
GPU = DeviceType("X100", 16 * 10**9, {"float32": 1e13, "float16": 8e13}, 9e11, "made up")
CPU = device_table()["cpu"]


def times_of(latency, bandwidth, noise=None, source=0, target=1, sizes=SIZES):
    noise = noise or [1.0] * len(sizes)
    found = tuple((latency + n / bandwidth) * x for n, x in zip(sizes, noise, strict=True))
    return PairTimes(source, target, sizes, found, (0.0,) * len(sizes))


def fits_of(bandwidth, latency=None):
    """Fits from a table of bandwidths by source and target."""
    return {
        (p, q): PairFit(p, q, 1e-5 if latency is None else latency[p][q], row[q], 0.01, 0.01)
        for p, row in enumerate(bandwidth)
        for q in range(len(row))
        if p != q
    }


def table(count, width):
    """(K, K) bandwidths from a function of source and target."""
    return [[width(p, q) for q in range(count)] for p in range(count)]


def found_on(*hosts, type_=GPU):
    return [RankDevice(host, type_) for host in hosts]


def ends(topology):
    return {(link.source, link.target): link.bandwidth_bytes_per_s for link in topology.links}


# ------------------------------------------------------------------------------------ fitting


@given(
    st.floats(1e-7, 1e-2),
    st.floats(1e6, 1e12),
    st.lists(st.floats(0.97, 1.03), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_known_links_are_recovered_under_noise(latency, bandwidth, noise):
    try:
        found = fit(times_of(latency, bandwidth, noise), NAMES)
    except TopologyError:  # noise hides what the bytes take
        assert SIZES[-1] / bandwidth < latency / 10
        return
    assert found.error < 0.04
    fitted = [found.latency_s + n / found.bandwidth_bytes_per_s for n in SIZES]
    assert np.allclose(fitted, times_of(latency, bandwidth).times_s, rtol=0.1)
    if SIZES[-1] / bandwidth > 10 * latency:
        assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.1)
    if SIZES[0] / bandwidth < latency / 10:
        assert found.latency_s == pytest.approx(latency, rel=0.1)


def test_one_disturbed_size_does_not_spoil_the_fit():
    noise = [1.0] * 10
    noise[4] = 6.0
    found = fit(times_of(1e-4, 1e9, noise), NAMES)
    assert found.latency_s == pytest.approx(1e-4, rel=0.1)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert found.error > 0.05


def test_sizes_whose_repetitions_agree_count_more():
    spoilt = times_of(1e-4, 1e9, [3.0, 3.0, 3.0, 3.0, *[1.0] * 6])
    spread = PairTimes(0, 1, SIZES, spoilt.times_s, (2.0,) * 4 + (0.0,) * 6)
    assert fit(spread, NAMES).bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.02)


@pytest.mark.parametrize(
    ("times", "complaint"),
    [
        (times_of(1e-5, 2e13), "rank 0 -> rank 1: expected at most 10 TB/s"),
        (times_of(1e-5, -1e12, sizes=SIZES[:6]), "say nothing about the bandwidth"),
        (times_of(-4e-5, 1e9, sizes=(100_000, 200_000, 400_000)), None),
        (times_of(-9e-5, 1e9, sizes=(100_000, 200_000, 400_000)), "a latency of at least 0 s"),
        (times_of(1e-5, 1e9, [1, 50, 0.02, 1, 50, 0.02, 1, 50, 0.02, 1]), "only within"),
        (PairTimes(0, 1, (1, 2), (0.0, 1.0), (0.0, 0.0)), "times above 0 s"),
        (PairTimes(0, 1, (1,), (1.0,), (0.0,)), "two sizes or more"),
    ],
)
def test_absurd_measurements_are_refused(times, complaint):
    if complaint is None:
        assert fit(times, NAMES).latency_s == 0.0
        return
    with pytest.raises(TopologyError, match=complaint) as caught:
        fit(times, NAMES)
    assert "rank 0 -> rank 1: " in str(caught.value)
    assert "probe again" in str(caught.value) or "--largest" in str(caught.value)


def test_all_absurd_pairs_are_named_at_once():
    wrong = [times_of(1e-5, 2e13), times_of(1e-5, 2e13, source=2), times_of(1e-5, 1e9, source=3)]
    with pytest.raises(TopologyError) as caught:
        fit_all(wrong, NAMES)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "rank 0 -> rank 1",
        "rank 2 -> rank 1",
    ]


# ------------------------------------------------------------------------------------ merging


@given(st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=30))
def test_clusters_hold_only_what_agrees(values):
    groups = clusters(values)
    assert sorted(i for group in groups for i in group) == list(range(len(values)))
    for group in groups:
        inside = [values[i] for i in group]
        assert max(inside) <= min(inside) * 1.15
    highest = [max(values[i] for i in group) for group in groups]
    assert highest == sorted(highest)


def test_pairs_are_merged_only_where_bandwidth_and_latency_agree():
    fits = fits_of(
        [[0, 100, 108], [102, 0, 50], [100, 51, 0]],
        [[0, 1.0, 1.0], [1.0, 0, 1.0], [2.0, 1.0, 0]],
    )
    found = classes(fits, dict.fromkeys(fits, "same host"))
    assert [one.pairs for one in found] == [((0, 1), (0, 2), (1, 0)), ((2, 0),), ((1, 2), (2, 1))]
    assert found[0].bandwidth_bytes_per_s == pytest.approx((100 * 108) ** 0.5)


# ---------------------------------------------------------------------------------- the graph


def test_devices_of_one_host_that_are_alike_hang_on_the_host():
    found = infer("x", found_on(*["a"] * 4), fits_of(table(4, lambda p, q: 1e9)))
    assert ends(found.topology) == {
        link: 1e9 for p in range(4) for link in ((f"gpu{p}", "a"), ("a", f"gpu{p}"))
    }
    assert [one.kind for one in found.classes] == ["same host"]
    assert found.topology.switches == ()


def test_two_pcie_groups_become_switches():
    fits = fits_of(table(5, lambda p, q: 12e9 if (p < 2) == (q < 2) else 8e9))
    found = infer("x", found_on(*["a"] * 5), fits)
    assert found.topology.switches == ("a.switch0", "a.switch1")
    assert ends(found.topology)["a.switch0", "a"] == 8e9
    assert {one.kind for one in found.classes} == {"same switch", "other switch of the host"}
    assert found.off < 1e-9
    assert latency_s(found.topology, 0, 4) == pytest.approx(1e-5)


def test_a_mesh_of_nvlinks_becomes_links_beside_the_host():
    # 0 - 1, 1 - 2, 2 - 3, 3 - 0 are linked, the diagonals are not.
    fits = fits_of(table(4, lambda p, q: 20e9 if (p - q) % 2 else 6e9))
    found = infer("x", found_on(*["a"] * 4), fits)
    assert found.topology.switches == ()
    assert ends(found.topology)["gpu0", "gpu1"] == 20e9
    assert ends(found.topology)["gpu0", "a"] == 6e9
    assert {one.kind for one in found.classes} == {"link of their own", "same host"}


def test_the_slower_of_two_hosts_bounds_a_pair():
    rates = [125e6, 125e6, 12.5e6]
    fits = fits_of(table(3, lambda p, q: min(rates[p], rates[q])))
    found = infer("x", found_on("a", "b", "c", type_=CPU), fits)
    assert [device.name for device in found.topology.devices] == ["cpu0", "cpu1", "cpu2"]
    assert ends(found.topology)["cpu2", "network"] == 12.5e6
    assert ends(found.topology)["cpu0", "network"] == 125e6


def test_directions_may_differ():
    fits = fits_of(table(3, lambda p, q: 1e9 if p else 1e8))
    found = infer("x", found_on("a", "b", "c"), fits)
    assert ends(found.topology)["gpu0", "network"] == 1e8
    assert ends(found.topology)["network", "gpu0"] == 1e9
    assert found.off < 1e-9


def hosts_of_two(together):
    fits = fits_of(table(4, lambda p, q: 10e9 if p // 2 == q // 2 else 1e9))
    return infer("x", found_on("a", "a", "b", "b"), fits, together)


def test_a_network_card_is_shared_where_transfers_at_once_get_no_more():
    pairs = experiments(["a", "a", "b", "b"])
    found = hosts_of_two([SimultaneousTransfers(one, 1.0e9) for one in pairs])
    assert ends(found.topology)["a.nic", "network"] == 1e9
    first, second = (set(routes(found.topology)[p]) for p in ((0, 2), (1, 3)))
    assert first & second
    assert found.off < 1e-9


def test_a_network_card_is_as_wide_as_what_goes_through_it_at_once():
    pairs = experiments(["a", "a", "b", "b"])
    found = hosts_of_two([SimultaneousTransfers(one, 1.5e9) for one in pairs])
    assert ends(found.topology)["a.nic", "network"] == 1.5e9
    assert ends(found.topology)["gpu0", "a.nic"] == 1e9


def test_devices_have_network_cards_of_their_own_where_transfers_do_not_disturb_each_other():
    pairs = experiments(["a", "a", "b", "b"])
    found = hosts_of_two([SimultaneousTransfers(one, 2.0e9) for one in pairs])
    assert ends(found.topology)["gpu0", "network"] == 1e9
    assert not set(routes(found.topology)[0, 2]) & set(routes(found.topology)[1, 3])


def test_a_shared_card_is_assumed_where_it_cannot_be_measured():
    assert experiments(["a", "a", "b"]) == ()
    fits = fits_of(table(3, lambda p, q: 10e9 if max(p, q) < 2 else 1e9))
    found = infer("x", found_on("a", "a", "b"), fits)
    assert "a: that its devices share a network card is assumed" in found.topology.notes
    assert "a.nic" in found.topology.switches


CHAIN = {(0, 1): 1e9, (1, 2): 1e9, (0, 2): 1e7}


def test_hosts_in_a_chain_get_links_to_their_neighbours():
    fits = fits_of(table(3, lambda p, q: CHAIN.get((min(p, q), max(p, q)))))
    found = infer("x", found_on("a", "b", "c"), fits)
    assert found.off < 1e-9
    assert ends(found.topology)["gpu0", "gpu1"] == 1e9
    assert ends(found.topology)["gpu0", "network"] == 1e7


def test_what_no_switch_explains_gets_links_of_its_own():
    # Cards in a chain with a slow link between its ends: by the middle one it would be faster.
    def width(p, q):
        a, b = sorted((p // 2, q // 2))
        return 1e10 if a == b else CHAIN[a, b]

    found = infer("x", found_on(*"aabbcc"), fits_of(table(6, width)))
    assert found.off < 1e-9
    assert len(found.topology.links) == 30
    assert found.topology.switches == ()
    assert "every pair has a link of its own" in found.topology.notes[0]


@st.composite
def trees(draw):
    """Hosts with a bandwidth inside and one outside each; the fits of all pairs, with noise."""
    inner = draw(st.lists(st.sampled_from([2e9, 8e9, 40e9]), min_size=1, max_size=3))
    outer = draw(
        st.lists(st.sampled_from([1e7, 1e8, 1e9]), min_size=len(inner), max_size=len(inner))
    )
    hosts = [h for h in range(len(inner)) for _ in range(draw(st.integers(1, 3)))]
    noise = draw(st.randoms(use_true_random=False))

    def width(p, q):
        a, b = hosts[p], hosts[q]
        return (inner[a] if a == b else min(outer[a], outer[b])) * noise.uniform(0.97, 1.03)

    return [f"host{h}" for h in hosts], table(len(hosts), width)


@given(trees())
def test_paths_have_the_bandwidth_of_their_pairs(drawn):
    hosts, width = drawn
    found = infer("x", found_on(*hosts), fits_of(width))
    assert problems(found.topology) == ()
    assert found.off <= 0.15
    if len(hosts) > 1:
        ways = routes(found.topology).bandwidth_bytes_per_s
        for p, q in permutations(range(len(hosts)), 2):
            assert ways[p, q] == pytest.approx(width[p][q], rel=0.15)


@given(st.integers(2, 6), st.data())
def test_any_bandwidths_at_all_are_reproduced(count, data):
    draw = st.floats(1e6, 1e11)
    width = [data.draw(st.lists(draw, min_size=count, max_size=count)) for _ in range(count)]
    hosts = data.draw(st.lists(st.sampled_from("ab"), min_size=count, max_size=count))
    found = infer("x", found_on(*hosts), fits_of(width))
    assert problems(found.topology) == ()
    assert found.off <= 0.16


PAIRS = ((0, 1), (2, 3))


def test_measured_collectives_become_tables():
    times_s = 1.2345e-4, 2e-4
    sums = [CollectiveTimes(PAIRS, (1024, 4096), times_s, kind) for kind in CollectiveKind]
    found = infer("x", found_on(*"aaaa"), fits_of(table(4, lambda p, q: 1e9)), (), sums)
    times = ((1024, parse_seconds("123 us")), (4096, parse_seconds("200 us")))
    assert found.topology.tables == tuple(
        CollectiveTable(names, 2, times, kind)
        for kind in CollectiveKind
        for names in (("gpu0", "gpu1"), ("gpu2", "gpu3"))
    )


@pytest.mark.parametrize(
    ("hosts", "type_", "known"),
    [
        ("aaaa", CPU, {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}),
        ("aabb", CPU, {(0, 1), (2, 3)}),
        ("aaaa", GPU, {(0, 1), (2, 3)}),
    ],
)
def test_processes_that_share_a_host_are_alike_and_gpus_need_not_be(hosts, type_, known, tmp_path):
    sums = [CollectiveTimes(PAIRS, (1024,), (1e-4,))]
    fits = fits_of(table(4, lambda p, q: 1e9 * (1 + p)))
    found = infer("x", found_on(*hosts, type_=type_), fits, (), sums).topology
    write_topology(found, tmp_path / "x.yaml")
    assert read_topology(tmp_path / "x.yaml") == found
    assert {some for some in combinations(range(4), 2) if table_of(found, some)} == known


@pytest.mark.parametrize(
    ("hosts", "groups"),
    [
        ("a", ()),
        ("aaa", (((0, 1),), ((0, 1, 2),))),
        ("abcd", (PAIRS, ((0, 2), (1, 3)), ((0, 1, 2, 3),))),
        ("aaabbb", (((0, 1), (2, 3), (4, 5)), ((0, 3), (1, 4), (2, 5)),
                    ((0, 1, 2, 3),), ((0, 1, 2, 3, 4, 5),))),
    ],
)  # fmt: skip
def test_lines_along_both_axes_of_a_mesh_are_measured_at_once(hosts, groups):
    assert groups_at_once(devices_of(found_on(*hosts))) == groups


def test_one_device_needs_no_links(tmp_path):
    found = infer("x", found_on("a"), {})
    write_topology(found.topology, tmp_path / "x.yaml")
    assert read_topology(tmp_path / "x.yaml") == found.topology


def test_a_missing_pair_is_the_programmers_mistake():
    with pytest.raises(ValueError, match="a fit for every pair"):
        infer("x", found_on("a", "a"), {})


# --------------------------------------------------------------------------------- the writer

names = st.one_of(
    st.sampled_from(["null", "Yes", "1e3", "0x10", "a: b", "- a", "# a", "é", "{a}", "it's"]),
    st.text("abcxyzAZ019_-. :#'\"", min_size=1, max_size=6),
)
figures = st.floats(1e-3, 1e16)


@st.composite
def topologies(draw):
    """Devices around one switch; any names, any figures, both directions alike or not."""
    count = draw(st.integers(1, 4))
    unlike = draw(st.lists(names, min_size=count + 2, max_size=count + 2, unique=True))
    *devices, host, switch = unlike
    own = DeviceType(draw(names) + "!", draw(st.integers(1, 10**13)),
                     {"float32": draw(figures), "int8": draw(figures)}, draw(figures),
                     draw(names))  # fmt: skip
    types = [draw(st.sampled_from([own, GPU, CPU])) for _ in devices]
    links = []
    for name in devices:
        pair = (name, switch), (switch, name)
        same = draw(figures), draw(st.floats(0, 1e3))
        for a, b in pair:
            width = draw(st.sampled_from([same, (draw(figures), 1e-6)]))
            links.append(Link(a, b, *width, sharing=draw(st.sampled_from(Sharing))))
    tables = ()
    if count > 1:
        points = draw(st.dictionaries(st.integers(0, 10**12), st.floats(0, 1e3), min_size=2))
        kind = draw(st.sampled_from(CollectiveKind))
        tables = (CollectiveTable(tuple(devices), count, tuple(sorted(points.items())), kind),)
    return Topology(
        draw(names),
        tuple(sorted({one.name: one for one in types}.values(), key=lambda one: one.name)),
        (Host(host, draw(st.none() | st.integers(1, 99)), draw(st.none() | st.just(12345))),),
        tuple(Device(n, t.name, host) for n, t in zip(devices, types, strict=True)),
        (switch,),
        tuple(links),
        notes=tuple(draw(st.lists(names, max_size=2, unique=True))),
        tables=tables,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("topologies")


@given(topology=topologies())
def test_what_is_written_is_read_back(folder, topology):
    write_topology(topology, folder / "x.yaml", ["a comment"])
    assert read_topology(folder / "x.yaml") == topology


def test_the_file_is_short_and_has_units(golden):
    fits = fits_of(table(4, lambda p, q: 10e9 if p // 2 == q // 2 else 1e9))
    sums = [CollectiveTimes(((0, 1), (2, 3)), (1024, 1048576), (1e-4, 2.5e-3))]
    found = infer("two-hosts", found_on("a", "a", "b", "b"), fits, (), sums)
    golden("probed.yaml", topology_yaml(found.topology, ["Made up."]))


# ----------------------------------------------------------------------- what ranks are told


def test_two_ranks_on_one_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(probe.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(probe.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match="nccl refuses two ranks on one GPU; start 1 per host"):
        probe._choose("auto", ProcessRank(0, 2, 0, 2))
    assert probe._choose("cpu", ProcessRank(0, 2, 0, 2)) == "cpu"


def test_one_process_alone_is_told_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(LaunchError, match="planner topology probe --nproc N"):
        probe.probe("x")


def planner(*arguments, cwd, **options):
    command = [sys.executable, str(ROOT / "cli.py"), *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False, **options
    )


def test_two_ranks_on_loopback(tmp_path):
    done = planner("topology", "probe", "--nproc", "2", "--device", "cpu", "--largest", "1 MiB",
                   "-o", "here.yaml", "--json", cwd=tmp_path)  # fmt: skip
    if done.returncode == 1 and "probe again" in done.stderr:
        pytest.skip(f"this machine is too busy to be measured: {done.stderr}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    found = read_topology(tmp_path / "here.yaml")
    assert [device.type for device in found.devices] == ["cpu", "cpu"]
    assert len(found.hosts) == 1
    assert found.hosts[0].cores == len(os.sched_getaffinity(0))
    assert said["off"] <= 0.15
    assert [pair["sizes_bytes"] for pair in said["pairs"]] == [list(SIZES[:6])] * 2
    assert [(one.kind, one.num_devices) for one in found.tables] == [(k, 2) for k in CollectiveKind]
    assert [one["kind"] for one in said["collectives"]] == [k.value for k in [*CollectiveKind][1:]]
    assert "Measured on" in (tmp_path / "here.yaml").read_text()
    planned = planner("topology", "probe", "-o", "here.yaml", cwd=tmp_path)
    assert planned.returncode == 1
    assert "torchrun --nproc-per-node N" in planned.stderr


# ----------------------------------------------------------------------------- shaped networks

SLOW_MBIT, FAST_MBIT = 100, 1000


def bytes_through(plan, device):
    """What a strategy sends to a device and from it, for each microbatch, and the gradients that
    it sums there.
    """
    stages = plan.strategy.stages
    crossing = sum(
        one.bytes
        for one in plan.crossings
        for t in one.targets
        if (device in stages[one.source].devices) != (device in stages[t].devices)
    )
    replicated = any(device in s.devices and len(s.devices) > 1 for s in stages)
    return float("inf") if replicated else crossing


def write_wide_model(path, batch=64, narrow=128, wide=4096):
    """x -A-> wide -B-> narrow -C-> narrow -D-> wide ...: cuts are cheap only where it is narrow."""
    random = np.random.default_rng(0)
    nodes, weights, last = [], {}, "x"
    widths = [narrow, wide, narrow, narrow, wide, narrow]
    for k, (a, b) in enumerate(pairwise(widths)):
        weights[f"w{k}"] = (random.standard_normal((a, b)) / a**0.5).astype(np.float32)
        nodes.append(helper.make_node("MatMul", [last, f"w{k}"], [f"h{k}"], f"matmul{k}"))
        nodes.append(helper.make_node("Tanh", [f"h{k}"], [f"y{k}"], f"tanh{k}"))
        last = f"y{k}"
    graph = helper.make_graph(
        nodes,
        "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, narrow])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [batch, widths[-1]])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A folder; skips where there can be no hosts."""
    why = missing()
    if why:
        pytest.skip(why)
    return tmp_path_factory.mktemp("hosts")


RATES = (FAST_MBIT, FAST_MBIT, SLOW_MBIT)
ATTEMPTS = 3  # at a measurement that other work on this machine may spoil


def set_rate(p, q):
    return min(RATES[p], RATES[q]) * 1e6 / 8


@pytest.fixture(scope="module")
def probed(hosts):
    """What `topology probe --json` says of two fast hosts and a slow one."""
    command = on_ranks(
        "topology probe --device cpu --largest '16 MiB' -o probed.yaml --json", 29611
    )
    for _ in range(ATTEMPTS):
        done = on_hosts(command, *RATES, cwd=hosts)
        assert done.returncode == 0 or "probe again" in done.stderr, done.stderr
        if done.returncode == 0:
            said = json.loads(done.stdout)
            if max(off_from_set(said)) <= 0.1:
                break
    assert done.returncode == 0, done.stderr
    return said


def off_from_set(said):
    """By how much each pair's bandwidth is off what was set, as a share."""
    index = {device["name"]: d for d, device in enumerate(said["devices"])}
    return [
        abs(
            pair["bandwidth_bytes_per_s"] / set_rate(index[pair["source"]], index[pair["target"]])
            - 1
        )
        for pair in said["pairs"]
    ]


@pytest.mark.slow
def test_hosts_are_told_apart_and_their_bandwidths_are_what_was_set(probed, hosts):
    found = read_topology(hosts / "probed.yaml")
    assert [device.host for device in found.devices] == ["host0", "host1", "host2"]
    assert max(off_from_set(probed)) <= 0.1, probed["pairs"]
    assert probed["off"] <= 0.15
    ways = routes(found).bandwidth_bytes_per_s
    for p, q in permutations(range(3), 2):
        assert ways[p, q] == pytest.approx(set_rate(p, q), rel=0.2)


@pytest.mark.slow
def test_message_sizes_end_where_one_transfer_would_take_over_a_second(probed):
    for pair in probed["pairs"]:
        slow = "cpu2" in (pair["source"], pair["target"])
        assert pair["sizes_bytes"][-1] == (4 if slow else 16) * 1024**2
        assert pair["times_s"][-1] < 1.0


@pytest.mark.slow
def test_latencies_are_what_was_set(hosts):
    command = "test $NUMBER = 1 || tc qdisc replace dev eth0 root netem delay 5ms"
    done = on_hosts(command, FAST_MBIT, FAST_MBIT, cwd=hosts)
    if done.returncode:
        pytest.skip(f"latency cannot be set, this kernel has no netem: {done.stderr.strip()}")
    probe_it = on_ranks("topology probe --device cpu --largest '64 KiB' -o slow.yaml --json", 29612)
    done = on_hosts(f"{command}; {probe_it}", FAST_MBIT, FAST_MBIT, cwd=hosts)
    assert done.returncode == 0, done.stderr
    for pair in json.loads(done.stdout)["pairs"]:
        assert pair["latency_s"] == pytest.approx(2.5e-3, rel=0.2)  # half of the round trip


# What each part of the model is made out to take: A and E twice as long as B and D.
UNITS = {"matmul0": 2, "matmul1": 1, "matmul3": 1, "matmul4": 2}


@pytest.mark.slow
def test_a_plan_for_the_probed_hosts_avoids_the_slow_link_and_is_faster_there(probed, hosts):
    write_wide_model(hosts / "wide.onnx")
    profiled = planner("profile", "wide.onnx", "--repetitions", "1", cwd=hosts)
    assert profiled.returncode == 0, profiled.stderr
    path = hosts / "profiles" / "wide.json"
    profile = json.loads(path.read_text())
    for operator in profile["operators"]:
        operator["forward_s"] = 5e-3 * UNITS.get(operator["name"], 0.01)
        operator["backward_s"] = 2 * operator["forward_s"]
    path.write_text(json.dumps(profile))
    found = read_topology(hosts / "probed.yaml")
    alike = [replace(one, bandwidth_bytes_per_s=125e6, latency_s=1e-4) for one in found.links]
    equal = replace(found, name="equal", links=tuple(alike), tables=())
    write_topology(equal, hosts / "equal.yaml")
    plans = {}
    for name in ("equal", "probed"):
        arguments = ("--topology", f"{name}.yaml", "--gpus", "3", "--microbatches", "4",
                     "--optimizer", "sgd", "--solver", "antichain",
                     "-o", f"{name}.json")  # fmt: skip
        solved = planner("solve", "--profile", str(path), *arguments, cwd=hosts)
        assert solved.returncode == 0, solved.stderr
        plans[name] = read_plan(hosts / f"{name}.json")
    wide_bytes = 64 * 4096 * 4
    assert bytes_through(plans["equal"], 2) >= wide_bytes
    assert bytes_through(plans["probed"], 2) < wide_bytes / 10

    steps = "; ".join(
        on_ranks(f"launch {name}.json --steps 5 --json > {name}-$NUMBER.txt", port)
        for name, port in (("equal", 29613), ("probed", 29614))
    )
    done = on_hosts(steps, *RATES, cwd=hosts)
    assert done.returncode == 0, done.stderr
    took_s = {
        name: json.loads((hosts / f"{name}-0.txt").read_text())["measured_iteration_s"]
        for name in plans
    }
    assert took_s["probed"] < took_s["equal"] / 1.5, took_s
