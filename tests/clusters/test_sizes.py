"""Limits to the size of a cluster, wherever it comes from, and names that it may have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.topology import (
    MAX_DEVICES,
    MAX_LINKS,
    MAX_SWITCHES,
    Host,
    Level,
    is_name,
    problems,
    too_many,
)
from planner.clusters.formats import astra_sim, hostfile, nvidia_smi
from planner.clusters.routes import routes
from planner.clusters.yaml.build import from_levels, too_many_levels
from planner.clusters.yaml.read import device_table, read_topology
from planner.clusters.yaml.write import topology_yaml, write_topology
from planner.support.errors import FileError
from planner.support.reading import MAX_CLUSTER_BYTES
from tests.support.commands import run
from tests.support.work import few_calls, safety_net

T4 = device_table()["T4"]
TYPE = ("--device", "T4")


def yaml(folder, text):
    """A topology file."""
    path = folder / "big.yaml"
    path.write_text(f"format: planner-topology/1\nname: big\n{text}")
    return path


def refused(path, message):
    """The topology in a file is refused, after not much more than reading its YAML."""
    lines = len(path.read_text().splitlines())
    with few_calls(100_000 + 3_000 * lines), pytest.raises(FileError, match=message):
        read_topology(path)


def levels(*counts):
    """Levels, innermost first, as lines of YAML."""
    lines = (
        f"  - {{name: l{i}, count: {count}, bandwidth: 1 GB/s, latency: 1 us}}"
        for i, count in enumerate(counts)
    )
    return "\n".join(("device: T4", "levels:", *lines, ""))


@pytest.mark.parametrize("counts", [[2] * 16, [2] * 40, [100_000], [100_000] * 12])
def test_levels_are_limited_by_their_product(tmp_path, counts):
    refused(yaml(tmp_path, levels(*counts)), rf"levels: expected at most {MAX_DEVICES} devices")


def test_levels_of_one_member_are_limited_too(tmp_path):
    refused(yaml(tmp_path, levels(*[1] * 500)), "levels: expected at most 64 levels, got 500")


def test_the_largest_hierarchies_are_read():
    for counts in ([MAX_DEVICES], [2] * 11, [8, MAX_DEVICES // 8]):
        given_levels = [Level(str(i), count, 1.0, 0.0) for i, count in enumerate(counts)]
        assert too_many_levels(given_levels) is None
        made = from_levels(tuple(given_levels), T4, Host(""))
        assert problems(made) == ()


def test_copies_of_copies_are_limited_by_their_product(tmp_path):
    templates = "".join(
        f"  t{i}:\n    hosts:\n" + f"      - {{template: t{i + 1}, count: 10}}\n" for i in range(30)
    )
    last = (
        "  t30:\n    hosts: [{name: h}]\n    devices: [{name: gpu, type: T4, host: h}]\n"
        "    links: [{between: [gpu, h], bandwidth: 1 GB/s, latency: 1 us}]\n"
    )
    text = f"templates:\n{templates}{last}hosts:\n  - {{template: t0, count: 10}}\n"
    refused(yaml(tmp_path, text), r"templates\.t26\.hosts\[0\]: expected at most \d+ devices, got")


def test_a_wrong_template_is_made_once_however_often_it_is_named(tmp_path):
    entry = "      - {template: %s}\n" * 8
    templates = "".join(f"  t{i}:\n    hosts:\n" + entry % ((f"t{i + 1}",) * 8) for i in range(30))
    text = f"templates:\n{templates}  t30:\n    hosts: [{{name: '*', count: 2}}]\n"
    refused(yaml(tmp_path, f"{text}hosts: [{{template: t0}}]\n"), "expected a name of printable")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: [{name: h, count: 5000}]", r"hosts\[0\]: expected at most 2048 hosts and"),
        (
            "hosts: [{name: h}]\ndevices: [{name: g, count: 90000, type: T4, host: h}]",
            r"devices\[0\]: expected at most 4096 devices, got 90000",
        ),
        (
            "hosts: [{name: h}]\ndevices: [{name: g, count: 4000, type: T4, host: h}]\n"
            "links: [{between: ['g*', 'g*'], bandwidth: 1 GB/s, latency: 1 us}]",
            rf"links\[0\]: expected at most {MAX_LINKS} links, got 16000000",
        ),
    ],
)  # fmt: skip
def test_numbers_of_parts_are_limited(tmp_path, text, message):
    refused(yaml(tmp_path, text), message)


def test_gpus_size_no_topology_beyond_the_limit():
    message = run("topology", "show", "local.yaml", "--gpus", "1000000000", code=1).output
    assert f"expected at most {MAX_DEVICES} devices, got 1000000000" in message


def test_as_many_links_as_there_may_be_fit_a_file_that_is_read():
    made = from_levels((Level("g", 512, 1e9, 1e-6),), T4, Host(""))
    # No two directions alike, so that each link has a line of its own.
    apart = [
        replace(link, latency_s=link.latency_s + i * 1e-9) for i, link in enumerate(made.links)
    ]
    text = topology_yaml(replace(made, links=tuple(apart))).encode()
    assert len(text) * MAX_LINKS / len(apart) < MAX_CLUSTER_BYTES


# ------------------------------------------------------------------------------ imports


def imported(folder, text, *options, code=1):
    """The output of an import, and whether a file was written."""
    source, target = folder / "cluster.txt", folder / "cluster.yaml"
    source.write_text(text)
    output = run("topology", "import", str(source), *options, "-o", str(target), code=code).output
    assert target.exists() is (code == 0)
    return output


def astra(shapes, counts, bandwidth="1.0", latency="1.0"):
    """An ASTRA-sim network."""
    count = shapes.count(",") + 1
    figures = (", ".join([one] * count) for one in (bandwidth, latency))
    return "topology: [{}]\nnpus_count: [{}]\nbandwidth: [{}]\nlatency: [{}]\n".format(
        shapes, counts, *figures
    )


@pytest.mark.parametrize(
    ("shapes", "counts", "what"),
    [
        ("Ring", "1000000000", "devices, got 1000000000"),
        ("Ring, Switch, Ring", "100000, 100000, 100000", "devices, got 1000000000000000"),
        ("FullyConnected", "3000", f"{MAX_LINKS} links, got 8997000"),
        ("FullyConnected, Ring", "180, 10", f"{MAX_LINKS} links, got"),
    ],
)
def test_an_astra_sim_network_is_limited_by_the_product(tmp_path, shapes, counts, what):
    output = imported(tmp_path, astra(shapes, counts), *TYPE)
    assert "npus_count: expected at most" in output
    assert what in output


@given(st.lists(st.tuples(st.sampled_from(sorted(astra_sim.SHAPES)), st.integers(2, 5)),
                min_size=1, max_size=4))  # fmt: skip
def test_parts_of_an_astra_sim_network_are_counted_as_they_are_made(dimensions):
    made = [astra_sim.NetworkDimension(shape, count, 1.0, 0.0) for shape, count in dimensions]
    topology = astra_sim.to_topology(made, "x", T4)
    hosts_and_switches = len(topology.hosts) + len(topology.switches)
    parts = len(topology.devices), hosts_and_switches, len(topology.links)
    assert astra_sim._parts(made) == parts


@pytest.mark.parametrize(
    "value", ["[1]", "[[1], 2]", "{a: 1}", "null", "9" * 400, "0x" + "f" * 5000]
)
@pytest.mark.parametrize("field", ["topology", "npus_count", "bandwidth", "latency"])
def test_lists_in_lists_and_absurd_numbers_are_wrong_fields(tmp_path, field, value):
    text = astra("Ring", "4").splitlines()
    text = "\n".join(f"{field}: [{value}]" if line.startswith(field) else line for line in text)
    path = tmp_path / "x.yml"
    with pytest.raises(FileError, match=rf"{field}(\[0\])?: expected"):
        astra_sim.parse(text, path)


@pytest.mark.parametrize("slots", ["1000000000", "4097", "9" * 5000])
def test_a_hostfile_is_limited(tmp_path, slots):
    output = imported(tmp_path, f"a slots={slots}\n", *TYPE, "--inside", "1 GB/s")
    assert "expected at most 4096 devices" in output or "expected HOST slots=N" in output


def test_the_slots_of_a_hostfile_are_added_up(tmp_path):
    text = "".join(f"host{i} slots=100\n" for i in range(41))
    output = imported(tmp_path, text, *TYPE, "--inside", "1 GB/s", "--between", "1 GB/s")
    assert "slots: expected at most 4096 devices, got 4100" in output


def test_an_nvidia_smi_matrix_is_limited():
    names = [f"GPU{i}" for i in range(200)]
    with pytest.raises(FileError, match="expected at most 128 GPUs of one machine, got 200"):
        nvidia_smi.parse("\t" + "\t".join(names), Path("topo.txt"))


# In time that grows with the square of the length, these would take hours.
LONG = 2_000_000


@pytest.mark.parametrize("text", ["\n" * LONG + "x", " " * LONG + "x", "GPU0 " + "\n" * LONG])
def test_a_format_is_told_in_time_that_grows_with_the_text(text):
    with safety_net():
        assert not hostfile.looks_like(text)
        assert not nvidia_smi.looks_like(text)


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name", ["a\x1b[31m", "gpu[0]", "a*", "what?", "a\x7f", "a\u202eb", "\x9b1m"]
)
def test_a_host_of_no_fit_name_is_refused(tmp_path, name):
    output = imported(tmp_path, f"{name} slots=2\n", *TYPE, "--inside", "1 GB/s")
    assert "line 1: expected a name of printable characters without any of * ? [, got" in output
    assert "\x1b" not in output


def test_lists_of_lists_of_lists_are_not_written_out(tmp_path):
    laughs = ["&a0 [x, x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    path = tmp_path / "c.yaml"
    path.write_text(f"format: [{', '.join(laughs)}]\n")
    with pytest.raises(FileError, match="format: expected 'planner-topology/1', got a list"):
        read_topology(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? - {hosts: a}\n", "expected names before colons, got a mapping or a list"),
        ('"a\\uDFFFb": 2\n', "expected a valid string, unable to parse raw data"),
    ],
)
def test_odd_keys_are_refused(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(f"format: planner-topology/1\nname: c\n{text}")
    with pytest.raises(FileError, match=message):
        read_topology(path)


@pytest.mark.parametrize("name", ['"a\\x1bb"', '"a\\nb"', '"\\ud800"'])
def test_names_in_a_file_are_checked_likewise(tmp_path, name):
    text = f"hosts: [{{name: {name}}}]\ndevices: [{{name: g, type: T4, host: {name}}}]\n"
    with pytest.raises(FileError, match=r"hosts\[0\].name: expected a name of printable|no YAML"):
        read_topology(yaml(tmp_path, text))


def test_names_of_levels_are_checked_too(tmp_path):
    text = levels(2).replace("name: l0", 'name: "l\\e[0m"')
    with pytest.raises(FileError, match="expected a name of printable characters"):
        read_topology(yaml(tmp_path, text))


HOSTS = st.text(st.characters(blacklist_categories=["Z", "C"]), min_size=1, max_size=12).filter(
    lambda name: not set(name) & set("#*?[") and name != "network"
)


@given(st.lists(HOSTS, min_size=1, max_size=3, unique=True))
def test_what_a_hostfile_may_name_is_read_back(tmp_path_factory, hosts):
    folder = tmp_path_factory.mktemp("hosts")
    text = "".join(f"{host} slots=2\n" for host in hosts)
    try:
        slots = hostfile.parse(text, folder / "hostfile")
    except FileError:
        return
    kinds = dict.fromkeys((one.host for one in slots), T4)
    made = hostfile.to_topology(slots, "x", kinds, (1e9, 1e9), folder)
    if problems(made):  # a host that is called like a device
        return
    write_topology(made, folder / "c.yaml", ["Imported from x."])
    assert [host.name for host in read_topology(folder / "c.yaml").hosts] == hosts


def test_the_name_of_the_file_cannot_change_what_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Path("a\nb: c\x1b[0m\udcff\u2028d.txt")
    source.write_text("host0 slots=2\n")
    run("topology", "import", str(source), *TYPE, "--inside", "1 GB/s", "-o", "c.yaml")
    shown = json.loads(run("topology", "show", "c.yaml", "--json").stdout)
    assert shown["name"] == r"a\nb: c\x1b[0m\udcff\u2028d"


def test_which_names_are_names():
    assert is_name("worker-1.example.org")
    assert is_name("gpu]")
    assert not is_name("")


# ------------------------------------------------------------------------------ up to the limits


def test_sizes_up_to_the_limits_are_allowed():
    assert too_many(MAX_DEVICES, MAX_SWITCHES, MAX_LINKS) is None
    assert "links" in (too_many(1, 1, MAX_LINKS + 1) or "")


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[2] * 11, [8, 512], [2, 2047]])
def test_the_largest_topologies_have_routes(counts):
    made = from_levels(
        tuple(Level(str(i), count, 1e9, 1e-6) for i, count in enumerate(counts)), T4, Host("")
    )
    assert len(routes(made)) == len(made.devices) * (len(made.devices) - 1)
