"""The topologies that ship: sound, routed, planned for, and as their sources say."""

import json
from collections import Counter
from dataclasses import replace
from itertools import permutations
from math import inf

import pytest
from click.testing import CliRunner

import cli
from planner.artefacts.files import shipped, write_profile
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.problem import Problem
from planner.artefacts.topology import problems
from planner.clusters.routes import bandwidth_bytes_per_s, pair_widths, routes
from planner.clusters.yaml.read import device_table, find_topology, preset_names, read_topology
from planner.costs.actions import ActionCosts
from planner.costs.transfers import allreduce_s
from planner.planning.portfolio import compare
from planner.simulator.events import simulate
from tests.bench import preset_table
from tests.support.builders import asked, graph_of, profile_of
from tests.support.programs import written

# NVLinks of each pair of a DGX-1V.
MESH = """
0 2 1 1 2 0 0 0
2 0 1 2 0 1 0 0
1 1 0 2 0 0 2 0
1 2 2 0 0 0 0 1
2 0 0 0 0 2 1 1
0 1 0 0 2 0 1 2
0 0 2 0 1 1 0 2
0 0 0 1 1 2 2 0
"""


def preset(name):
    return read_topology(find_topology(name), 2)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_sound_and_every_pair_routed(name):
    topology = preset(name)
    assert topology.name == name
    assert problems(topology) == ()
    latency, width = pair_widths(topology)
    names = {device.name for device in topology.devices}
    for pair in permutations(range(len(topology.devices)), 2):
        links = [topology.links[i] for i in routes(topology)[pair]]
        assert (links[0].source, links[-1].target) == tuple(topology.devices[d].name for d in pair)
        assert not {link.target for link in links[:-1]} & names
        assert 0 < latency[pair] < 1e-3
        assert 1e9 <= width[pair] < inf


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_where_its_figures_come_from(name):
    text = find_topology(name).read_text()
    assert text.startswith("# ")
    comment = text.split("format:")[0]
    sources = ("data sheet", "measured", "from memory", "made up", ".yaml")
    assert any(source in comment.lower() for source in sources)


@pytest.fixture(scope="module")
def resnet50():
    return read_any_profiles(shipped("profiles") / "resnet50.json")[0]


def best_on(name, profile, solvers=None):
    """The best plan of a profile on a preset."""
    topology = preset(name)
    options = asked(2 * len(topology.devices), max_downsets=16)
    measured_on = device_table()[profile.device_type]
    best = compare(
        Problem(profile, topology, **options, measured_on=measured_on), solvers, 2.0
    ).best
    assert best is not None
    assert best.plan is not None
    assert best.plan.prediction.iteration_s > 0
    return best.plan


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs_a_pipeline_and_data_parallelism(resnet50, name):
    num_devices = len(preset(name).devices)
    for solver in ("even", "data-parallel") if num_devices > 1 else ("single",):
        plan = best_on(name, resnet50, [solver])
        used = sum(len(stage.devices) for stage in plan.strategy.stages)
        assert num_devices / 2 < used <= num_devices


# Measured all-reduces, shared links, two types of devices.
DIFFERENT = ("dgx-1v", "flexflow-p100", "mixed-a100-t4")


@pytest.mark.parametrize(
    "name",
    [
        name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.slow)
        for name in preset_names()
    ],
)
def test_every_preset_is_planned_for(resnet50, name):
    best_on(name, resnet50)


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("p3-2xlarge", {"V100-SXM2-16GB": 1}),
        ("p3-8xlarge", {"V100-SXM2-16GB": 4}),
        ("p3-16xlarge-x8", {"V100-SXM2-16GB": 64}),
        ("p3dn", {"V100-SXM2-32GB": 8}),
        ("p4d", {"A100-SXM4-40GB": 8}),
        ("p5", {"H100-SXM": 8}),
        ("p4d-x8", {"A100-SXM4-40GB": 64}),
        ("p4d-x32", {"A100-SXM4-40GB": 256}),
        ("p5-x8", {"H100-SXM": 64}),
        ("dgx-2", {"V100-SXM2-32GB": 16}),
        ("dgx-a100-x4", {"A100-SXM4-80GB": 32}),
        ("dgx-h100-x4", {"H100-SXM": 32}),
        ("gb200-nvl72", {"B200": 72}),
        ("flexflow-p100", {"P100": 16}),
        ("flexflow-k80", {"K80": 64}),
        ("titan-rtx-5", {"TITAN-RTX": 5}),
        ("mixed-a100-t4", {"A100-SXM4-80GB": 8, "T4": 8}),
        ("workstation", {"TITAN-RTX": 1, "T4": 1}),
    ],
)
def test_the_devices_of_a_preset(name, types):
    assert Counter(device.type for device in preset(name).devices) == types


@pytest.mark.parametrize("name", ["dgx-1v", "p3", "p3-16xlarge", "p3dn"])
def test_pairs_of_a_cube_mesh_are_as_wide_as_their_links(name):
    topology = preset(name)
    links = [[int(word) for word in line.split()] for line in MESH.split("\n")[1:-1]]
    of = {0: 12e9, 1: 21.7e9, 2: 43.5e9}
    for p, q in permutations(range(8), 2):
        assert bandwidth_bytes_per_s(topology, p, q) == of[links[p][q]]


def test_hosts_of_a_cluster_are_as_wide_as_their_network():
    cluster = preset("p3-16xlarge-x4")
    assert bandwidth_bytes_per_s(cluster, 0, 7) == bandwidth_bytes_per_s(preset("p3"), 0, 7)
    assert {bandwidth_bytes_per_s(cluster, 0, q) for q in range(8, 32)} == {3.125e9}


def test_the_table_of_presets_is_up_to_date():
    assert f"\n{preset_table.text()}\n" in preset_table.FILE.read_text(), "run: make docs"


def test_the_device_table_has_the_types_that_clusters_have():
    kinds = (
        "K80 P100 V100-SXM2-16GB V100-SXM2-32GB TITAN-RTX T4 A10G L4 A100-SXM4-40GB A100-SXM4-80GB"
        " H100-SXM H200-SXM B200 MI250 MI300 cpu"
    )
    assert set(kinds.split()) <= set(device_table())
    assert all(one.source for one in device_table().values())


# --------------------------------------------------------------------------------- shared links


def transfers(topology, pairs, size=10**9):
    """When messages end that all start at once, on one pair of devices each, in s."""
    lines = [""] * len(topology.devices)
    for i, (p, q) in enumerate(pairs):
        lines[p] += f" {p}>{q}:0:t{i}"
        lines[q] += f" {q}<{p}:0:t{i}"
    costs = ActionCosts({}, {}, {f"t{i}": size for i in range(len(pairs))}, (), {})
    timeline = simulate(written(*lines), costs, topology)
    return timeline.iteration_s


@pytest.mark.parametrize(
    ("name", "together", "apart", "rate"),
    [
        # Eight GPUs and one NIC.
        ("p3-16xlarge-x2", [(0, 8), (1, 9)], [(0, 8), (9, 1)], 3.125e9),
        # Two GPUs on one PCIe switch, and the uplink of a host.
        ("flexflow-k80", [(0, 2), (1, 3)], [(0, 1), (2, 3)], 12e9),
        # The host bridge between two PCIe switches.
        ("titan-rtx-5", [(0, 2), (1, 3)], [(0, 2), (3, 4)], 9e9),
    ],
)
def test_transfers_over_a_shared_link_share_its_bandwidth(name, together, apart, rate):
    topology = preset(name)
    assert transfers(topology, together) == pytest.approx(2 * 10**9 / rate, rel=1e-3)
    assert transfers(topology, apart) == pytest.approx(10**9 / rate, rel=1e-3)


# ------------------------------------------------------------------------------- measured times


def test_all_reduces_of_a_dgx_1v_are_those_that_were_measured():
    dgx, p3 = preset("dgx-1v"), preset("p3")
    size = 10**9
    for group, bus in (((0, 2), 22.6), ((0, 1, 2, 3), 85.4), (tuple(range(8)), 134.5)):
        n = len(group)
        assert allreduce_s(dgx, group, size) == pytest.approx(2 * (n - 1) / n / bus)
        assert allreduce_s(dgx, group, size) < allreduce_s(p3, group, size)
    # A pair with two links was not measured.
    assert allreduce_s(dgx, (0, 1), size) == allreduce_s(p3, (0, 1), size)


def test_measured_times_change_the_plan(tmp_path):
    # Eight equal layers with many parameters: a ring makes data parallelism too slow, what was
    # measured does not.
    graph = graph_of([[v - 1] if v else [] for v in range(8)], [10**5] * 8, [7 * 10**8] * 8)
    profile = profile_of(graph, [5e-3] * 8, work=[(10**11, 10**6)] * 8)
    profile = replace(profile, device_type="V100-SXM2-16GB")
    write_profile(profile, tmp_path / "profile.json")
    found = {}
    for name in ("p3", "dgx-1v"):
        output = tmp_path / f"{name}.json"
        arguments = (
            f"solve --profile {tmp_path / 'profile.json'} --topology {name} --microbatches 8"
            f" -o {output} --json"
        )
        done = CliRunner().invoke(cli.main, arguments.split())
        assert done.exit_code == 0, done.output
        plan = json.loads(done.stdout)
        found[name] = [len(stage["devices"]) for stage in plan["stages"]], plan["iteration_s"]
    assert found["dgx-1v"][0] == [8]
    assert found["p3"][0] != [8]
    assert found["dgx-1v"][1] < found["p3"][1]
