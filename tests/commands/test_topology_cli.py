"""`planner topology` and the what-if options of `solve`, as a user meets them."""

import json
import xml.etree.ElementTree as ET

import pytest

import cli
from planner.artefacts.files import read_plan, shipped
from planner.clusters.yaml.read import find_topology, read_topology
from planner.commands.terminal import PIPED_WIDTH
from planner.reports.tables import Table
from tests.support.commands import chain_on_two_hosts, run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a chain of six operators and two hosts of two T4."""
    monkeypatch.chdir(tmp_path)
    chain_on_two_hosts(tmp_path)
    return tmp_path


def solved(*arguments):
    fast = ["--solver", "data-parallel", "--solver", "even", "--topology", "pair.yaml"]
    return json.loads(run("solve", *fast, *arguments, "--json").stdout)


# ------------------------------------------------------------------------------ help


@pytest.mark.parametrize("name", ["list", "show", "import"])
def test_every_subcommand_has_help_with_an_example(name):
    assert f"planner topology {name}" in run("topology", name, "--help").output
    for parameter in cli.main.commands["topology"].commands[name].params:
        if parameter.param_type_name == "option":
            assert parameter.help


# ------------------------------------------------------------------------------ list


def test_all_presets_are_listed_with_a_sentence():
    found = json.loads(run("topology", "list", "--json").stdout)["presets"]
    files = {p.stem for p in shipped("topologies").glob("*.yaml")} - {"devices"}
    assert {one["name"] for one in found} == files
    assert all(one["description"].endswith(".") for one in found)
    (p3,) = (one for one in found if one["name"] == "p3")
    assert (p3["num_devices"], p3["num_hosts"]) == (8, 1)
    assert p3["device_types"] == {"V100-SXM2-16GB": 8}
    assert "8 x V100-SXM2-16GB" in run("topology", "list").output


# ------------------------------------------------------------------------------ show


def test_a_cluster_is_shown_with_tree_matrices_and_collectives(folder):
    text = run("topology", "show", "pair.yaml").output
    for part in (
        "└─ switch", "host0 .. host1 (2)", "Bandwidth from row to column, GB/s", "Latency",
        "Pairs of devices", "all-reduce over",
    ):  # fmt: skip
        assert part in text
    row = next(line.split() for line in text.splitlines() if line.startswith("  gpu0"))
    assert row == ["gpu0", "-", "10", "0.125", "0.125"]


def test_the_slowest_link_of_each_collective_is_named(folder):
    found = json.loads(run("topology", "show", "pair.yaml", "--json").stdout)
    everything, one_host = found["allreduces"][:2]
    assert everything["group"] == "all"
    assert everything["slowest_link"].startswith("host host")
    assert everything["bandwidth_bytes_per_s"] == 125e6
    # Halves inside both hosts, and each half over the card that the two of a host share.
    inside_s, over_s = 5e-6 + 50e6 / 10e9, 60e-6 - 5e-6 + 25e6 / (125e6 / 2)
    assert everything["time_s"] == pytest.approx(2 * inside_s + 2 * over_s, rel=1e-6)
    assert (everything["over_hosts"], everything["measured"]) == (True, False)
    assert one_host["group"] == "host0"
    assert one_host["ring"] == ["gpu0", "gpu1"]
    assert found["bandwidth_bytes_per_s"][0] == [0.0, 10e9, 125e6, 125e6]


def test_a_large_cluster_is_shown_between_hosts():
    text = run("topology", "show", "gb200-nvl72").output
    assert "(the first 8 of 18 hosts; --json has all)" in text
    assert max(map(len, text.splitlines())) <= PIPED_WIDTH


def test_measured_collectives_are_marked():
    found = json.loads(run("topology", "show", "dgx-a100", "--json").stdout)
    assert found["allreduces"][0]["measured"] is True


def test_the_first_devices_alone_can_be_shown(folder):
    found = json.loads(run("topology", "show", "pair.yaml", "--gpus", "3", "--json").stdout)
    assert [device["name"] for device in found["devices"]] == ["gpu0", "gpu1", "gpu2"]
    assert "has 4 devices" in run("topology", "show", "pair.yaml", "--gpus", "9", code=1).output


def test_a_picture_is_written(folder):
    assert "wrote pair.svg" in run("topology", "show", "pair.yaml", "--svg", "pair.svg").output
    ET.parse(folder / "pair.svg")
    message = run("topology", "show", "pair.yaml", "--svg", "pair.yaml", code=1).output
    assert "is the topology itself" in message


def test_a_topology_that_is_not_there_lists_the_presets():
    assert "presets" in run("topology", "show", "nowhere", code=1).output


# ------------------------------------------------------------------------------ import


def test_a_hostfile_becomes_a_topology_that_solve_takes(folder):
    (folder / "hostfile").write_text("a slots=2\nb slots=1\n")
    arguments = ["topology", "import", "hostfile", "--type", "a=T4", "--type", "b=L4"]
    rates = ["--inside", "12 GB/s", "--between", "10Gbps", "-o", "new.yaml"]
    assert "wrote new.yaml" in run(*arguments, *rates).output
    text = (folder / "new.yaml").read_text()
    assert text.startswith("# Imported from hostfile by planner topology import.\n")
    assert str(folder) not in text
    found = read_topology(folder / "new.yaml")
    assert [device.type for device in found.devices] == ["T4", "T4", "L4"]
    assert len(json.loads(run(*arguments, *rates, "--json").stdout)["notes"]) == 1


@pytest.mark.parametrize(
    ("types", "said"),
    [
        (["--type", "a"], "expected NAME=TYPE, got 'a'"),
        (["--type", "a=T4", "--type", "a=L4"], "a is given more than once"),
    ],
)
def test_types_of_an_import_are_given_once_by_name(folder, types, said):
    (folder / "hostfile").write_text("a slots=2\n")
    output = run("topology", "import", "hostfile", *types, "-o", "new.yaml", code=2).output
    assert f"Invalid value for '--type': {said}" in output
    assert not (folder / "new.yaml").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--from", "astra-sim", "--device", "T4"], "expected an ASTRA-sim network YAML"),
        ([], "give --device TYPE"),
        (["-o", "hostfile"], "is the file itself"),
    ],
)
def test_a_mistake_of_an_import_is_one_message_and_writes_nothing(folder, more, said):
    (folder / "hostfile").write_text("a slots=2\n")
    output = [] if "-o" in more else ["-o", "new.yaml"]
    assert said in run("topology", "import", "hostfile", *more, *output, code=1).output
    assert not (folder / "new.yaml").exists()


# ------------------------------------------------------------------------------ what if


def test_what_if_solves_before_and_after(folder):
    found = solved("--set", "levels.host.bandwidth=200Gbps")
    before = solved()
    assert found["what_if"]["changes"] == ["levels.host.bandwidth: 125 MB/s -> 25 GB/s"]
    assert found["what_if"]["before"]["iteration_s"] == before["iteration_s"]
    assert found["iteration_s"] < before["iteration_s"]
    assert "what_if" not in before


def test_the_same_samples_are_planned_before_and_after(folder):
    found = solved("--drop", "gpu3")
    plan = read_plan(folder / "strategy.json")
    assert len(found["peak_bytes"]) == 3
    assert plan.strategy.num_microbatches == 16
    assert "what if: without gpu3" in plan.notes


def test_what_changed_and_what_it_brings_is_printed(folder):
    arguments = ["solve", "--solver", "data-parallel", "--topology", "pair.yaml"]
    text = run(*arguments, "--add-host", "host0", "--set", "devices.gpu3.type=L4").output
    assert "changed: with another host0 (2 devices), linked to switch like it" in text
    assert "changed: gpu3: T4 -> L4" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("  devices  "))
    assert row == ["devices", "4", "6"]
    assert next(line for line in text.splitlines() if "iteration  " in line)


def test_a_faster_type_makes_the_plan_faster(folder):
    found = solved("--set", "device_types.T4.flops.float32=16.2 TFLOP/s")
    assert found["iteration_s"] < found["what_if"]["before"]["iteration_s"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--set", "links.x.bandwidth=1Gbps"], "unknown link 'x'; known: gpu, host, gpu0-host0"),
        (["--drop", "gpu9"], "unknown device or host 'gpu9'; known: gpu0"),
        (["--add-host", "px"], "expected a host of the topology, host0, host1, or another"),
        (["--cost-model", "piper", "--drop", "gpu0"], "is for --cost-model planner or pipedream"),
    ],
)
def test_a_change_that_makes_no_sense_is_one_message(folder, more, said):
    assert said in run("solve", "--topology", "pair.yaml", *more, code=1).output
    assert not (folder / "strategy.json").exists()


def test_no_plan_after_a_change_is_said_beside_the_plan_before(folder):
    arguments = [
        "solve",
        "--solver",
        "data-parallel",
        "--topology",
        "pair.yaml",
        "--reserve",
        "0 B",
    ]
    text = run(*arguments, "--set", "device_types.T4.memory=1 KiB", code=3).output
    row = next(line for line in text.splitlines() if "no plan fits" in line and "fits " in line)
    assert row.split() == ["plan", "fits", "no", "plan", "fits"]


def test_sensitivity_says_what_bounds_the_plan(folder):
    found = solved("--sensitivity")["sensitivity"]
    assert [one["change"] for one in found] == sorted(one["change"] for one in found)
    assert {one["name"] for one in found} == {"gpu", "host", "T4", "all links together"}
    text = run("solve", "--topology", "pair.yaml", "--solver", "even", "--sensitivity").output
    assert "this plan most: twice as fast, an iteration takes" in text


def test_tables_of_the_library_are_tables_of_the_report():
    from planner.reports.topology import devices_table

    shown = devices_table(read_topology(find_topology("mixed-a100-t4")))
    assert isinstance(shown, Table)
    assert [row[0] for row in shown.rows] == ["host0", "host1 .. host2 (2)"]
