"""Clusters in other formats: nvidia-smi topo -m, ASTRA-sim's networks, DeepSpeed's hostfiles."""

import pytest

from planner.artefacts.topology import problems
from planner.clusters.formats.importing import detect, import_topology
from planner.clusters.routes import bandwidth_bytes_per_s, latency_s, routes
from planner.clusters.yaml.read import device_table, read_topology
from planner.clusters.yaml.write import write_topology
from planner.support.errors import FileError, OptionError

# As printed for an eight-GPU cube mesh: tabs, colours, a network card, a legend.
CUBE = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV1\tNV1\tNV2\tNV2\tSYS\tSYS\tSYS\tPIX\t0-19,40-59\t0
GPU1\tNV1\t X \tNV2\tNV1\tSYS\tNV2\tSYS\tSYS\tPIX\t0-19,40-59\t0
GPU2\tNV1\tNV2\t X \tNV2\tSYS\tSYS\tNV1\tSYS\tPHB\t0-19,40-59\t0
GPU3\tNV2\tNV1\tNV2\t X \tSYS\tSYS\tSYS\tNV1\tPHB\t0-19,40-59\t0
GPU4\tNV2\tSYS\tSYS\tSYS\t X \tNV1\tNV1\tNV2\tSYS\t20-39,60-79\t1
GPU5\tSYS\tNV2\tSYS\tSYS\tNV1\t X \tNV2\tNV1\tSYS\t20-39,60-79\t1
GPU6\tSYS\tSYS\tNV1\tSYS\tNV1\tNV2\t X \tNV2\tSYS\t20-39,60-79\t1
GPU7\tSYS\tSYS\tSYS\tNV1\tNV2\tNV1\tNV2\t X \tSYS\t20-39,60-79\t1
mlx5_0\tPIX\tPIX\tPHB\tPHB\tSYS\tSYS\tSYS\tSYS\t X \t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the interconnect between NUMA nodes
"""
# Three GPUs behind one switch, two behind another.
GROUPS = """
        GPU0    GPU1    GPU2    GPU3    GPU4    CPU Affinity    NUMA Affinity
GPU0     X      PIX     NODE    NODE    NODE    0-31            N/A
GPU1    PIX      X      NODE    NODE    NODE    0-31            N/A
GPU2    NODE    NODE     X      PIX     PIX     0-31            N/A
GPU3    NODE    NODE    PIX      X      PIX     0-31            N/A
GPU4    NODE    NODE    PIX     PIX      X      0-31            N/A
"""
NETWORK = """\
topology: [ Ring, FullyConnected, Switch ]  # the innermost first
npus_count: [ 4, 2, 2 ]
bandwidth: [ 200.0, 100, 50.0 ]  # GB/s
latency: [ 50.0, 500.0, 2000.0 ]  # ns
"""
HOSTFILE = """\
# two unequal machines
worker-1 slots=4
worker-2 slots=2  # older
"""


@pytest.fixture
def imported(tmp_path):
    """Imports a text."""

    def read(text, **options):
        path = tmp_path / "cluster.txt"
        path.write_text(text)
        return import_topology(path, **options)

    return read


def all_switched(count, cell, numa="0"):
    names = [f"GPU{i}" for i in range(count)]
    rows = [
        "\t".join([name, *("X" if other == name else cell for other in names), "0-31", numa, "N/A"])
        for name in names
    ]
    head = "\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    return "\n".join([head, *rows])


# ------------------------------------------------------------------------------ which one


@pytest.mark.parametrize(
    ("text", "form"),
    [(CUBE, "nvidia-smi"), (GROUPS, "nvidia-smi"), (NETWORK, "astra-sim"), (HOSTFILE, "hostfile")],
)
def test_the_content_says_which_format_it_is(tmp_path, text, form):
    assert detect(text, tmp_path) == form


def test_a_text_of_no_format_is_refused(imported):
    with pytest.raises(FileError, match="looks like none of them; say which with --from"):
        imported("hello\n")


@pytest.mark.parametrize("text", [CUBE, GROUPS, NETWORK, HOSTFILE])
def test_what_is_written_reads_back_as_the_same_links(imported, tmp_path, text):
    rates = {"inside_bytes_per_s": 12e9, "between_bytes_per_s": 3e9} if text == HOSTFILE else {}
    found = imported(text, device="V100-SXM2-16GB", **rates)
    assert problems(found) == ()
    write_topology(found, tmp_path / "new.yaml")
    again = read_topology(tmp_path / "new.yaml")
    assert again.devices == found.devices
    assert again.links == found.links
    assert again.switches == found.switches


# ------------------------------------------------------------------------------ nvidia-smi


def test_nvlinks_are_added_up_and_other_pairs_take_pcie(imported):
    found = imported(CUBE, device="V100-SXM2-32GB")
    assert [device.name for device in found.devices] == [f"gpu{i}" for i in range(8)]
    assert bandwidth_bytes_per_s(found, 0, 3) == 50e9
    assert bandwidth_bytes_per_s(found, 0, 1) == 25e9
    assert bandwidth_bytes_per_s(found, 0, 5) == pytest.approx(12e9 * 10.1 / 12.6)
    assert latency_s(found, 0, 5) == pytest.approx(10e-6)
    assert found.switches == ("numa0", "numa1")


def test_gpus_behind_a_switch_share_its_way_out(imported):
    found = imported(GROUPS, device="TITAN-RTX")
    assert found.switches == ("pcie0", "pcie1", "numa0")
    ways = routes(found)
    shared = {found.links[i].source for i in ways[0, 2]} & {
        found.links[i].source for i in ways[1, 3]
    }
    assert shared == {"pcie0", "numa0", "pcie1"} & shared
    assert ways[0, 2][1] == ways[1, 3][1]
    assert len(ways[0, 1]) == 2


@pytest.mark.parametrize(
    ("cell", "kind", "rate"), [("NV12", "A100-SXM4-40GB", 300e9), ("NV18", "H100-SXM", 450e9)]
)
def test_more_nvlinks_than_the_chip_has_mean_a_switch(imported, cell, kind, rate):
    found = imported(all_switched(8, cell), device=kind)
    assert "nvswitch0" in found.switches
    assert bandwidth_bytes_per_s(found, 0, 7) == rate
    ways = routes(found)
    assert ways[0, 1][0] == ways[0, 7][0]


def test_two_bridged_cards_have_a_link_of_their_own(imported):
    found = imported(all_switched(2, "NV2"), device="TITAN-RTX")
    assert bandwidth_bytes_per_s(found, 0, 1) == 50e9
    assert not any(switch.startswith("nvswitch") for switch in found.switches)


def test_gpus_of_several_types_are_named(imported):
    found = imported(GROUPS, device="T4", types={"GPU4": "L4"})
    assert [device.type for device in found.devices] == ["T4"] * 4 + ["L4"]
    assert {kind.name for kind in found.device_types} == {"L4", "T4"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("GPU1    PIX      X  ", "GPU1    WAT      X  "), "line 4: GPU1, GPU0: expected NV#, PIX"),
        (("GPU1    PIX      X  ", "GPU1    PIX     PIX "), "line 4: GPU1, GPU1: expected X"),
        (("GPU1    PIX      X  ", "GPU1    SYS      X  "), "GPU0 to GPU1 is PIX, but GPU1 to"),
        (("GPU4    NODE    NODE    PIX     PIX      X      0-31            N/A", "GPU4 NODE"),
         "line 7: GPU4: expected 5 cells, one for each GPU, got 1"),
        (("GPU4    NODE", "GPU5    NODE"), "line 2: GPU4 has no row"),
        (("        GPU0    GPU1    GPU2    GPU3    GPU4 ", "        GPU0    GPU1    GPU2    GPU3 "),
         "line 7: GPU4 is not among the columns of line 2"),
    ],
)  # fmt: skip
def test_a_wrong_matrix_says_where(imported, change, said):
    text = GROUPS.replace(*change)
    assert text != GROUPS
    with pytest.raises(FileError) as found:
        imported(text, device="T4", form="nvidia-smi")
    assert said in str(found.value)


def test_pairs_that_make_no_tree_are_refused(imported):
    text = GROUPS.replace(
        "GPU2    NODE    NODE     X      PIX     PIX", "GPU2    NODE    NODE     X      PIX     SYS"
    )
    text = text.replace(
        "GPU4    NODE    NODE    PIX     PIX", "GPU4    NODE    NODE    SYS     PIX"
    )
    with pytest.raises(FileError, match="GPU2 to GPU4 is SYS, but other GPUs are PIX or nearer"):
        imported(text, device="T4")


def test_a_type_without_known_nvlinks_is_refused(imported):
    with pytest.raises(FileError, match="no NVLink is known for device type 'T4', only for P100"):
        imported(CUBE, device="T4")


# ------------------------------------------------------------------------------ ASTRA-sim


def test_dimensions_of_a_network_are_joined_over_routers(imported):
    found = imported(NETWORK, device="H100-SXM")
    assert len(found.devices) == 16
    assert [device.host for device in found.devices[:5]] == ["host0"] * 4 + ["host1"]
    # A neighbour on the ring, one opposite, one in the second dimension, one in the third.
    assert (bandwidth_bytes_per_s(found, 0, 1), latency_s(found, 0, 1)) == (
        200e9,
        pytest.approx(50e-9),
    )
    assert latency_s(found, 0, 3) == pytest.approx(50e-9)
    assert latency_s(found, 0, 2) == pytest.approx(100e-9)
    assert (bandwidth_bytes_per_s(found, 0, 4), latency_s(found, 0, 4)) == (
        100e9,
        pytest.approx(500e-9),
    )
    assert (bandwidth_bytes_per_s(found, 0, 8), latency_s(found, 0, 8)) == (
        50e9,
        pytest.approx(4e-6),
    )


def test_a_network_of_one_switch_needs_no_routers(imported):
    text = "topology: [ Switch ]\nnpus_count: [ 8 ]\nbandwidth: [ 400.0 ]\nlatency: [ 936.25 ]\n"
    found = imported(text, device="H100-SXM")
    assert found.switches == ("switch0.0",)
    assert len(found.links) == 16
    assert latency_s(found, 0, 7) == pytest.approx(2 * 936.25e-9)


def test_a_ring_of_devices_runs_both_ways(imported):
    text = "topology: [ Ring ]\nnpus_count: [ 6 ]\nbandwidth: [ 50.0 ]\nlatency: [ 100.0 ]\n"
    found = imported(text, device="T4")
    assert latency_s(found, 0, 5) == pytest.approx(100e-9)
    assert latency_s(found, 0, 3) == pytest.approx(300e-9)


def test_all_problems_of_a_network_are_said_with_their_lines(imported):
    text = "topology: [ Ring, Star ]\nnpus_count: [ 4, 1 ]\nbandwidth: [ 0, true ]\nmore: 1\n"
    with pytest.raises(FileError) as found:
        imported(text, device="T4")
    message = str(found.value)
    assert "line 1: topology[1]: expected Ring or FullyConnected or Switch, got 'Star'" in message
    assert "line 2: npus_count[1]: expected a whole number above 1, got 1" in message
    assert "line 3: bandwidth[0]: expected GB/s above 0, got 0" in message
    assert "line 3: bandwidth[1]: expected GB/s above 0, got True" in message
    assert "latency: missing" in message
    assert "line 4: more: unknown field" in message


def test_lists_of_different_lengths_are_refused(imported):
    with pytest.raises(FileError, match="lists of one length, got 3 of topology, 2 of npus_count"):
        imported(NETWORK.replace("[ 4, 2, 2 ]", "[ 4, 2 ]"), device="T4")


def test_a_network_that_is_no_yaml_says_the_line(imported):
    with pytest.raises(FileError, match="line 2: this is no YAML"):
        imported("topology: [ Ring ]\nnpus_count: [ 2 }\n", device="T4")


def test_a_list_as_a_key_is_refused(imported):
    with pytest.raises(FileError, match="expected names before colons, got a mapping or a list"):
        imported("? - {topology: [ Ring ]}\ntopology: [ Ring ]\nnpus_count: [ 2 ]\n", device="T4")


# ------------------------------------------------------------------------------ hostfile


def test_a_hostfile_has_uneven_hosts_of_several_types(imported):
    found = imported(
        HOSTFILE, types={"worker-1": "T4"}, device="L4",
        inside_bytes_per_s=12e9, between_bytes_per_s=3e9,
    )  # fmt: skip
    assert [device.type for device in found.devices] == ["T4"] * 4 + ["L4"] * 2
    assert [host.name for host in found.hosts] == ["worker-1", "worker-2"]
    assert bandwidth_bytes_per_s(found, 0, 3) == 12e9
    assert bandwidth_bytes_per_s(found, 0, 4) == 3e9


def test_a_hostfile_needs_the_bandwidths_that_it_does_not_have(imported):
    with pytest.raises(FileError) as found:
        imported(HOSTFILE, device="T4")
    assert '--inside "12 GB/s"' in str(found.value)
    assert '--between "25 Gbps"' in str(found.value)
    alone = imported("here slots=1\n", device="T4", form="hostfile")
    assert (len(alone.devices), alone.links) == (1, ())


def test_wrong_lines_of_a_hostfile_are_all_said(imported):
    with pytest.raises(FileError) as found:
        imported("a slots=2\nb slots=x\na slots=1\nc slots=0\n", device="T4")
    assert [line.split(": ", 1)[1] for line in str(found.value).splitlines()] == [
        "line 2: expected HOST slots=N, got 'b slots=x'",
        "line 3: a is there twice",
        "line 4: expected HOST slots=N, got 'c slots=0'",
    ]


# ------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (HOSTFILE, {}, "give --device TYPE, or --type NAME=TYPE for worker-1, worker-2; known"),
        (HOSTFILE, {"types": {"worker-1": "T4"}}, "--type NAME=TYPE for worker-2; known"),
        (HOSTFILE, {"types": {"x": "T4"}, "device": "T4"}, "has no 'x'; it has worker-1, worker-2"),
        (HOSTFILE, {"device": "T5"}, "unknown device type 'T5'; known: A100"),
        (NETWORK, {"types": {"x": "T4"}}, "give one type with --device"),
        (NETWORK, {}, "does not say which devices there are"),
        (GROUPS, {"device": "T4", "inside_bytes_per_s": 1e9}, "are for hostfiles"),
    ],
)
def test_types_that_are_missing_or_unknown_are_said(imported, text, options, said):
    with pytest.raises(OptionError) as found:
        imported(text, **options)
    assert said in str(found.value)


def test_every_shipped_gpu_has_a_pcie_figure(imported):
    for name in device_table():
        if name not in ("cpu",) and not name.startswith("MI"):
            assert len(imported(GROUPS, device=name).devices) == 5
