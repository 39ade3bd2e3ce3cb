"""Topologies as YAML: what a file may say, what it comes to, and what is said of mistakes in it."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.artefacts.topology import HostLink, Link, ProcessMemory, Sharing, problems, take
from planner.clusters.routes import bandwidth_bytes_per_s, routes
from planner.clusters.yaml.read import device_table, preset_names, read_topology
from planner.clusters.yaml.write import write_topology
from planner.costs.evaluate import closed_form_s, evaluate
from planner.costs.transfers import (
    allgather_s,
    allreduce_s,
    line_below,
    ring_allreduce_s,
    ring_links,
)
from planner.planning.portfolio import compare
from planner.solvers import SOLVERS
from planner.support.errors import FileError
from tests.support.brute_force import least_objective_s
from tests.support.builders import graph_of, problem_of, profile_of

HEAD = "format: planner-topology/1\nname: NAME\n"

# gpu0 --+             +-- gpu2
#        pcie0 -- host0
# gpu1 --+
BASE = """
notes: [made up]
hosts: [{name: host0, cores: 4}]
devices: [{name: gpu, count: 3, type: T4, host: host0}]
switches: [pcie0]
links:
  - {name: pcie, between: ["gpu[01]", pcie0], bandwidth: 12 GB/s, latency: 5 us}
  - {name: up, between: [pcie0, host0], bandwidth: 10 GB/s, latency: 1 us}
  - {name: pcie, between: [gpu2, host0], bandwidth: 12 GB/s, latency: 5 us}
"""
LEVELS = """
device: T4
host: {cores: 3}
levels:
  - {name: gpu, count: 2, bandwidth: 12 GB/s, latency: 5 us}
  - {name: nic, count: 2, bandwidth: 1 GB/s, latency: 20 us}
"""


@pytest.fixture
def read(tmp_path):
    """Writes files, by name, and reads the last one."""

    def written(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(HEAD.replace("NAME", name) + text)
        return read_topology(tmp_path / f"{[*files][-1]}.yaml")

    return written


@pytest.fixture
def said(read):
    """What is said of the files, without the path of the last one."""

    def complaint(**files):
        with pytest.raises(FileError) as caught:
            read(**files)
        return [line.split(".yaml: ", 1)[1] for line in str(caught.value).splitlines()]

    return complaint


def widths(topology, name):
    """Bandwidths of the links of a name, in GB/s."""
    return {one.bandwidth_bytes_per_s / 1e9 for one in topology.links if one.name == name}


def names(topology):
    return [device.name for device in topology.devices]


# ---------------------------------------------------------------------------- names and patterns


def test_count_numbers_names_and_patterns_link_all_that_match(read):
    found = read(base=BASE)
    assert names(found) == ["gpu0", "gpu1", "gpu2"]
    assert {(link.source, link.target) for link in found.links if link.target == "pcie0"} == {
        ("gpu0", "pcie0"), ("gpu1", "pcie0"), ("host0", "pcie0"),
    }  # fmt: skip
    assert len(routes(found)[0, 2]) == 3
    assert problems(found) == ()


def test_a_pattern_on_both_sides_links_every_pair_once(read):
    mesh = BASE + "  - {name: nvlink, between: [gpu*, gpu*], bandwidth: 20 GB/s, latency: 1 us}\n"
    found = read(mesh=mesh)
    assert sum(link.name == "nvlink" for link in found.links) == 6
    assert len(routes(found)[2, 0]) == 1


def test_numbers_go_on_where_other_hosts_have_devices_of_another_type(read):
    found = read(
        uneven="""
hosts: [{name: host, count: 2}]
devices:
  - {name: gpu, count: 3, type: A100-SXM4-40GB, host: host0}
  - {name: gpu, count: 1, type: T4, host: host1}
links:
  - {between: [gpu*, host0], bandwidth: 12 GB/s, latency: 5 us}
  - {between: [host0, host1], bandwidth: 1 GB/s, latency: 5 us}
  - {between: [gpu3, host1], bandwidth: 12 GB/s, latency: 5 us}
""".replace("[gpu*, host0]", '["gpu[0-2]", host0]')
    )
    assert [(d.name, d.type, d.host) for d in found.devices][2:] == [
        ("gpu2", "A100-SXM4-40GB", "host0"), ("gpu3", "T4", "host1"),
    ]  # fmt: skip


def test_links_of_levels_have_the_levels_names(read):
    found = read(levels=LEVELS)
    assert (widths(found, "gpu"), widths(found, "nic")) == ({12}, {1})


# -------------------------------------------------------------------------------------- templates


def test_copies_of_a_template_are_numbered_on_and_may_be_uneven(read):
    found = read(
        base=BASE,
        pod="""
templates:
  small:
    hosts: [{name: host0}]
    devices: [{name: gpu0, type: L4, host: host0}]
    links: [{between: [gpu0, host0], bandwidth: 6 GB/s, latency: 5 us}]
hosts:
  - {template: base, count: 2}
  - {template: small}
switches: [network]
links:
  - {name: nic, between: [host*, network], bandwidth: 25 Gbps, latency: 5 us}
""",
    )
    assert names(found) == [f"gpu{i}" for i in range(7)]
    assert [d.host for d in found.devices] == ["host0"] * 3 + ["host1"] * 3 + ["host2"]
    assert [d.type for d in found.devices] == ["T4"] * 6 + ["L4"]
    assert set(found.switches) == {"pcie0", "pcie1", "network"}
    assert found.notes == ("made up",)
    # gpu4 -> pcie1 -> host1 -> network -> host2 -> gpu6
    assert len(routes(found)[4, 6]) == 5
    assert bandwidth_bytes_per_s(found, 4, 6) == 3.125e9


def test_what_a_template_brought_may_be_changed_by_name(read):
    found = read(
        base=BASE,
        pod="""
hosts: [{template: base, count: 2}, {name: host1, cores: 2}]
devices: [{name: gpu5, type: L4}]
links:
  - {name: up, bandwidth: 6 GB/s}
  - {between: [host0, host1], bandwidth: 25 Gbps, latency: 5 us}
""",
    )
    assert [d.type for d in found.devices] == ["T4"] * 5 + ["L4"]
    assert [host.cores for host in found.hosts] == [4, 2]
    assert widths(found, "up") == {6}


# ---------------------------------------------------------------------------------------- extends


def test_an_extension_changes_what_it_names_and_adds_the_rest(read):
    base = read(base=BASE)
    found = read(
        base=BASE,
        more="""
extends: base
notes: [changed]
hosts: [{name: host1}]
devices:
  - {name: gpu*, type: L4}
  - {name: gpu3, type: T4, host: host1}
links:
  - {name: up, latency: 3 us}
  - {name: fast, between: [gpu2, host0], bandwidth: 24 GB/s, latency: 5 us}
  - {between: [gpu3, host1], bandwidth: 12 GB/s, latency: 5 us}
  - {between: [host0, host1], bandwidth: 1 GB/s, latency: 5 us}
""",
    )
    assert found.name == "more"
    assert found.notes == ("made up", "changed")
    assert [d.type for d in found.devices] == ["L4"] * 3 + ["T4"]
    assert [host.cores for host in found.hosts] == [4, None]
    assert {one.latency_s for one in found.links if one.name == "up"} == {3e-6}
    assert widths(found, "up") == {10}
    # A link between the same ends replaces the one that was there.
    assert widths(found, "fast") == {24}
    assert len(found.links) == len(base.links) + 4


def test_a_link_with_some_of_its_fields_changes_the_one_that_is_there(read):
    base = read(base=BASE)
    link = base.links[0]
    ends = f"{{from: {link.source}, to: {link.target}, "
    found = read(base=BASE, more=f"extends: base\nlinks: [{ends}bandwidth: 7 GB/s}}]\n")
    assert found.links[0] == replace(link, bandwidth_bytes_per_s=7e9)
    assert found.links[1:] == base.links[1:]


def test_a_new_link_needs_all_of_its_figures(read, said):
    link = "{between: [gpu0, gpu2], bandwidth: 7 GB/s}"
    (wrong,) = said(base=BASE, more=f"extends: base\nlinks: [{link}]\n")
    assert wrong == "links[0].latency: missing"


def test_an_extension_of_levels_changes_levels_by_name(read):
    more = "extends: levels\nlevels: [{name: nic, bandwidth: 2 GB/s}]\n"
    found = read(levels=LEVELS, more=more)
    assert [level.bandwidth_bytes_per_s for level in found.levels] == [12e9, 2e9]
    assert widths(found, "nic") == {2}
    assert {host.cores for host in found.hosts} == {3}


def test_an_extension_of_levels_keeps_measured_times(read):
    measured = LEVELS + "tables: [{busbw: {1 GB: 2 GB/s}}]\n"
    more = "extends: measured\nlevels: [{name: gpu, latency: 4 us}]\n"
    assert read(measured=measured, more=more).tables == read(measured=measured).tables != ()


def test_levels_with_something_added_are_no_levels_any_more(read):
    found = read(levels=LEVELS, more="extends: levels\ndevices: [{name: gpu3, type: L4}]\n")
    assert found.levels == ()
    assert [d.type for d in found.devices] == ["T4"] * 3 + ["L4"]


def test_an_extension_without_anything_is_the_same_under_another_name(read):
    same = read(levels=LEVELS, alias="extends: levels\n")
    assert (same.name, same.levels) == ("alias", read(levels=LEVELS).levels)


def test_a_file_may_extend_the_preset_of_its_own_name(read):
    found = read(p3="extends: p3\ndevices: [{name: gpu*, type: V100-SXM2-32GB}]\n")
    assert {device.type for device in found.devices} == {"V100-SXM2-32GB"}


def test_links_are_shared_fairly_unless_the_file_says_otherwise(read, said):
    pcie = "links: [{name: pcie, sharing: exclusive}]\n"
    base, found = read(base=BASE), read(base=BASE, more="extends: base\n" + pcie)
    assert {link.sharing for link in base.links} == {Sharing.FAIR}
    kinds = {(link.name == "pcie", link.sharing) for link in found.links}
    assert kinds == {(True, Sharing.EXCLUSIVE), (False, Sharing.FAIR)}
    (wrong,) = said(base=BASE, more="extends: base\n" + pcie.replace("exclusive", "half"))
    assert wrong.startswith("links[0].sharing: ")
    assert "'fair' or 'exclusive'" in wrong


def test_extensions_may_not_lead_in_a_circle(said):
    wrong = said(a="extends: b\n", b="extends: a\n")
    assert "extends: b: leads in a circle; name another topology" in wrong
    own = "templates: {t: {hosts: [{template: t}]}}\nhosts: [{template: t}]\n"
    assert said(own=own) == ["templates.t.hosts[0].template: t -> t leads in a circle"]


def test_what_is_wrong_with_a_topology_that_is_extended_is_said_with_its_file(read, tmp_path):
    with pytest.raises(FileError) as caught:
        read(base=BASE.replace("12 GB/s", "12"), more="extends: base\n")
    first, *others = str(caught.value).splitlines()
    assert first == f"{tmp_path / 'more.yaml'}: extends: base is not sound:"
    assert len(others) == 2
    assert all(
        line.startswith(f"{tmp_path / 'base.yaml'}: links[") and "bandwidth" in line
        for line in others
    )


def test_types_defined_in_two_ways_are_an_error_unless_the_file_says_which(read, said):
    kind = """
device_types:
  MINE: {memory: SIZE, flops: {float32: 1 TFLOP/s}, memory_bandwidth: 1 GB/s, source: made up}
"""
    own = BASE.replace("T4", "MINE")
    files = {
        "small": own + kind.replace("SIZE", "1 GB"),
        "large": own + kind.replace("SIZE", "2 GB"),
    }
    both = """
hosts: [{template: small}, {template: large}]
links: [{between: [host0, host1], bandwidth: 1 GB/s, latency: 5 us}]
"""
    assert said(**files, both=both) == [
        "device_types.MINE: missing; it is defined in two ways by what this topology is made of"
    ]
    found = read(**files, both=both + kind.replace("SIZE", "3 GB"))
    assert [one.memory_bytes for one in found.device_types] == [3 * 10**9]


def test_a_type_says_what_a_process_takes_of_its_devices(read, said, tmp_path):
    kind = """
device_types:
  MINE:
    memory: 24 GB
    flops: {float32: 1 TFLOP/s}
    memory_bandwidth: 1 GB/s
    source: made up
    process: {context: 600 MiB, first_group: 500 MiB, group: 0.4 GB, workspace: 0 B}
"""
    own = BASE.replace("T4", "MINE")
    found = read(own=own + kind)
    expected = ProcessMemory(600 * 2**20, 500 * 2**20, 4 * 10**8)
    assert [one.process for one in found.device_types] == [expected]
    write_topology(found, tmp_path / "again.yaml")
    assert read_topology(tmp_path / "again.yaml").device_types == found.device_types
    (bare,) = read(bare=own + kind[: kind.index("    process")]).device_types
    assert bare.process == ProcessMemory()
    (problem,) = said(wrong=own + kind.replace("600 MiB", "-1 GB"))
    assert "device_types.MINE.process.context" in problem


def test_shipped_types_take_nothing_on_cpus_and_as_much_as_was_measured_on_an_h100():
    measured = ProcessMemory(767 * 2**20, 492 * 2**20, 390 * 2**20, 64 * 2**20)
    types = device_table()
    assert types["cpu"].process == ProcessMemory()
    assert types["H100-SXM"].process == measured
    assert all(one.process.context_bytes for name, one in types.items() if name != "cpu")


# ---------------------------------------------------------------------------------- measured times

TABLE = (
    BASE
    + "tables:\n  - {groups: [[gpu0, gpu1]], times: {1 KB: 20 us, 1 MB: 40 us, 10 MB: 400 us}}\n"
)


def test_measured_times_take_precedence_over_the_ring(read):
    found, plain = read(table=TABLE), read(plain=BASE)
    for size, time_s in ((1000, 20e-6), (10**6, 40e-6), (10**7, 400e-6)):
        assert allreduce_s(found, (0, 1), size) == pytest.approx(time_s)
    assert allreduce_s(found, (0, 1), 5_500_000) == pytest.approx(220e-6)
    # Beyond the largest by the last slope; before the smallest down to the links' latency.
    assert allreduce_s(found, (0, 1), 2 * 10**7) == pytest.approx(800e-6)
    assert allreduce_s(found, (0, 1), 0) == pytest.approx(min(2 * 10e-6, 20e-6))
    for group in ((0, 2), (0, 1, 2)):
        assert allreduce_s(found, group, 10**7) == allreduce_s(plain, group, 10**7)
        assert ring_links(found, group) == ring_links(plain, group)


def test_a_larger_message_is_never_faster(read):
    noisy = TABLE.replace("1 MB: 40 us", "1 MB: 15 us")
    found = read(noisy=noisy)
    assert allreduce_s(found, (0, 1), 10**6) == pytest.approx(20e-6)


def test_bus_and_algorithm_bandwidth(read):
    tables = """
tables:
  - {groups: [[gpu0, gpu1, gpu2]], busbw: {1 GB: 10 GB/s}}
  - {groups: [[gpu0, gpu2]], latency: 100 us, algbw: {1 GB: 10 GB/s}}
  - {collective: all-gather, groups: [[gpu0, gpu1, gpu2]], busbw: {1 GB: 10 GB/s}}
"""
    found = read(tables=BASE + tables)
    assert allreduce_s(found, (0, 1, 2), 10**9) == pytest.approx(4 / 3 * 0.1)
    assert allgather_s(found, (0, 1, 2), 10**9) == pytest.approx(2 / 3 * 0.1)
    assert allreduce_s(found, (0, 2), 10**9) == pytest.approx(0.1)
    assert allreduce_s(found, (0, 2), 0) == pytest.approx(100e-6)


def test_the_searches_line_is_the_table_where_it_has_one_size(read):
    tables = "tables:\n  - {groups: [[gpu0, gpu1]], latency: 30 us, algbw: {1 GB: 10 GB/s}}\n"
    found = read(tables=BASE + tables)
    for size in (0, 10**3, 10**6, 10**10):
        line_s = ring_allreduce_s(size, 2, *ring_links(found, (0, 1)))
        assert line_s == pytest.approx(allreduce_s(found, (0, 1), size), rel=1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 1.0)), min_size=1, max_size=6,
             unique_by=lambda point: point[0]),
    st.floats(0, 1e-3),
)  # fmt: skip
def test_no_measured_time_is_below_the_searches_line(points, start_s):
    ascending = [(0.0, start_s), *((float(x), t) for x, t in sorted(points))]
    highest = 0.0
    for i, (size, time_s) in enumerate(ascending):
        highest = max(highest, time_s)
        ascending[i] = size, highest
    start, slope = line_below(tuple(ascending))
    assert start >= 0
    assert slope >= 0
    for size, time_s in ascending:
        assert start + slope * size <= time_s * (1 + 1e-9) + 1e-15


def test_a_table_by_size_alone_holds_for_every_group_of_the_size(read):
    alike = """
hosts: [{name: host0}]
devices: [{name: gpu, count: 4, type: T4, host: host0}]
links: [{between: [gpu*, host0], bandwidth: 12 GB/s, latency: 5 us}]
tables:
  - {num_devices: 2, algbw: {1 GB: 5 GB/s}}
  - {groups: [[gpu1, gpu2]], algbw: {1 GB: 4 GB/s}}
"""
    found = read(alike=alike)
    assert allreduce_s(found, (0, 3), 10**9) == pytest.approx(1 / 5)
    # The table of fewer devices goes first.
    assert allreduce_s(found, (1, 2), 10**9) == pytest.approx(1 / 4)
    fewer = take(found, 3)
    assert allreduce_s(fewer, (0, 2), 10**9) == pytest.approx(1 / 5)
    assert len(take(found, 2).tables) == 1
    assert take(found, 1).tables == ()


def test_a_table_by_size_alone_is_refused_where_groups_of_the_size_differ(said):
    (line,) = said(table=BASE + "tables: [{num_devices: 2, algbw: {1 GB: 5 GB/s}}]\n")
    assert line == (
        "tables: not all groups of 2 of 3 devices are alike: gpu0 -> gpu1 and gpu0 -> gpu2 differ"
        " in latency; name the group that was measured under `groups`"
    )


def test_tables_of_a_template_hold_on_every_copy_and_a_host_stands_for_its_devices(read):
    pod = """
hosts: [{template: table, count: 2}]
links: [{between: [host0, host1], bandwidth: 1 GB/s, latency: 5 us}]
tables: [{groups: [[host0, host1], [host1]], busbw: {1 GB: 7 GB/s}}]
"""
    found = read(table=TABLE, pod=pod)
    assert allreduce_s(found, (3, 4), 10**6) == pytest.approx(40e-6)
    assert allreduce_s(found, tuple(range(6)), 10**9) == pytest.approx(2 * 5 / 6 / 7)
    assert allreduce_s(found, (3, 4, 5), 10**9) == pytest.approx(2 * 2 / 3 / 7)


def test_an_extensions_table_goes_before_that_of_what_it_extends(read):
    more = "extends: table\ntables: [{groups: [[gpu0, gpu1]], algbw: {1 GB: 1 GB/s}}]\n"
    assert allreduce_s(read(table=TABLE, more=more), (0, 1), 10**9) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("10 GB/s", "10", "links[1].bandwidth: expected a rate such as '300 GB/s', got '10'"),
        ("10 GB/s", "-3 GB/s",
         "links[1].bandwidth: expected a rate such as '300 GB/s', got '-3 GB/s'"),
        ("10 GB/s", "0 GB/s", "links[1].bandwidth: expected more than 0, got '0 GB/s'"),
        ("latency: 1 us", "latency: 1",
         "links[1].latency: expected a time such as '5 us', got '1'"),
        (", latency: 1 us", "", "links[1].latency: missing"),
        ("[pcie0, host0]", "[pcie0, host9]",
         "links[1].between: unknown device, host or switch 'host9'"),
        ("[pcie0, host0]", "[pcie0, nic*]",
         "links[1].between: no device, host or switch matches 'nic*'"),
        ("[pcie0, host0]", "[pcie0]",
         "links[1]: expected `between: [a, b]` for both directions, or `from: a` with `to: b`"),
        ("between: [pcie0, host0]", "from: pcie0",
         "links[1]: expected `between: [a, b]` for both directions, or `from: a` with `to: b`"),
        ("between: [pcie0, host0], ", "",
         "links[1].name: no link is called 'up'; there are: pcie; a new one needs `between`"),
        ("[gpu2, host0]", '["gpu[12]", "*0"]',
         "links[2]: gpu1 -> pcie0 is there twice, and 1 more"),
        ("[gpu2, host0]", "[pcie0, host0]", "links[2]: pcie0 -> host0 is there twice, and 1 more"),
        ("switches: [pcie0]", "switches: [pcie0, pcie0]",
         "switches[1]: pcie0: the name is used twice"),
        ("switches: [pcie0]", "switches: [pcie0, gpu1]",
         "switches[1]: gpu1: the name is used twice"),
        ("type: T4", "type: T5",
         "devices[0].type: unknown device type 'T5'; known: A100-SXM4-40GB"),
        ("host: host0}]", "host: host1}]", "devices[0].host: unknown host 'host1'"),
        (", host: host0}]", "}]", "devices[0].host: missing"),
        ("count: 3", "count: 0", "devices[0].count: expected a whole number of members, got 0"),
        ("name: gpu, count: 3", "name: gpu*",
         "devices[0].name: no device to change matches 'gpu*'"),
        ("cores: 4}", "cores: 4, template: nowhere}",
         "hosts[0]: a template brings all but the count; leave out the rest"),
        ("{name: host0, cores: 4}", "{template: nowhere}",
         "hosts[0].template: nowhere: no such topology: neither a file"),
        ("[{name: host0, cores: 4}]", "[{cores: 4}]", "hosts[0].name: missing, or `template`"),
        ("cores: 4}", "host_link: {bandwidth: 12}}",
         "hosts[0].host_link.bandwidth: expected a rate"),
        ("cores: 4}", "host_link: {bandwidth: 12 GB/s, devices: 0}}",
         "hosts[0].host_link.devices: expected a whole number of devices, got 0"),
        ("cores: 4}", "host_link: {memory: 1 TB}}", "hosts[0].host_link.bandwidth: "),
        ("cores: 4}", "host_link: 12 GB/s}", "hosts[0].host_link: "),
        ("notes", "extends: nowhere\nnotes", "extends: nowhere: no such topology: neither a file"),
        ("between: [gpu2, host0]", "from: gpu2, to: host0",
         "topology bad: no path leads from gpu0 to gpu2"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_the_path_of_its_field(said, old, new, line):
    assert old in BASE
    first, *_ = said(bad=BASE.replace(old, new, 1))
    assert first.startswith(line)


LINKED = BASE.replace("cores: 4", "host_link: {bandwidth: 12 GB/s, devices: 2, memory: 64 GiB}")


def test_a_host_says_how_its_devices_reach_its_memory(read, tmp_path):
    link = HostLink(12e9, 2, 64 * 2**30)
    assert read(linked=LINKED).hosts[0].host_link == link
    assert read(base=BASE).hosts[0].host_link is None
    copied = read(linked=LINKED, two="hosts: [{template: linked, count: 2}]\nlinks: "
                  "[{between: [host0, host1], bandwidth: 1 GB/s, latency: 1 us}]\n")  # fmt: skip
    assert [host.host_link for host in copied.hosts] == [link, link]
    faster = "hosts: [{name: host0, host_link: {bandwidth: 25 GB/s}}]\n"
    assert read(linked=LINKED, more="extends: linked\n" + faster).hosts[0].host_link == HostLink(
        25e9
    )
    levels = LEVELS.replace("{cores: 3}", "{host_link: {bandwidth: 12 GB/s}}")
    assert {host.host_link for host in read(levels=levels).hosts} == {HostLink(12e9)}
    for topology in (read(linked=LINKED), read(levels=levels)):
        write_topology(topology, tmp_path / "again.yaml")
        assert read_topology(tmp_path / "again.yaml").hosts == topology.hosts


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("{groups: [[gpu0, gpu9]], algbw: {1 GB: 1 GB/s}}",
         "tables[0].groups[0]: unknown device or host 'gpu9'"),
        ("{groups: [[gpu0, gpu*]], algbw: {1 GB: 1 GB/s}}",
         "tables[0].groups[0]: gpu0 is there twice"),
        ("{groups: [[gpu0]], algbw: {1 GB: 1 GB/s}}",
         "tables[0].groups[0]: expected a group of 2 to 1 devices, got 1"),
        ("{num_devices: 4, algbw: {1 GB: 1 GB/s}}",
         "tables[0]: expected a group of 2 to 3 devices, got 4"),
        ("{groups: [[gpu0, gpu1], [gpu1, gpu0]], algbw: {1 GB: 1 GB/s}}",
         "tables[0].groups[1]: these devices have a table of all-reduce already"),
        ("{num_devices: 3}", "tables[0]: expected one of `times`, `busbw` and `algbw`"),
        ("{algbw: {1 GB: 1 GB/s}, busbw: {1 GB: 1 GB/s}}",
         "tables[0]: expected one of `times`, `busbw` and `algbw`"),
        ("{times: {1 GB: 1 s, 1000 MB: 5 s}}",
         "tables[0].times: expected each size once, got 1 GB, 1000 MB"),
        ("{algbw: {1 GB: 1}}",
         "tables[0].algbw.1 GB: expected a rate such as '300 GB/s', got '1'"),
        ("{algbw: {1: 1 GB/s}}",
         "tables[0].algbw[1].[key]: expected a size such as '80 GiB', got '1'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_table_is_said(said, table, line):
    first, *_ = said(bad=f"{BASE}tables: [{table}]\n")
    assert first.startswith(line)


def test_all_mistakes_of_a_file_are_said_at_once(said):
    wrong = (
        BASE.replace("12 GB/s", "12", 1)
        .replace("10 GB/s", "0 GB/s")
        .replace("[gpu2, host0]", "[gpu7, host0]")
        .replace("type: T4", "type: T5")
        .replace("[pcie0]", "[pcie0, host0]")
        .replace("notes:", "colour: red\nnotes:")
    )
    lines = said(bad=wrong + "tables: [{num_devices: 7, algbw: {1 GB: 1 GB/s}}]\n")
    assert [line.split(": ")[0] for line in lines] == [
        "links[0].bandwidth", "links[1].bandwidth", "colour",
        "devices[0].type", "switches[1]", "links[2].between", "tables[0]",
    ]  # fmt: skip


def test_a_level_of_which_something_is_missing_and_one_that_is_there_twice(said):
    assert said(bad=LEVELS.replace(", latency: 5 us", "")) == ["levels[0].latency: missing"]
    twice = said(bad=LEVELS.replace("name: nic", "name: gpu"))
    assert twice == ["levels: the name 'gpu' is used twice"]


# ------------------------------------------------------------------------------- any devices, many


def test_a_thousand_devices_load_without_routing_a_pair(read, monkeypatch):
    def none(*_):
        raise AssertionError("a route was computed")

    with monkeypatch.context() as patched:
        patched.setattr("planner.clusters.routes._shortest_paths", none)
        pod = """
hosts: [{template: dgx-a100, count: 128}]
switches: [network]
links: [{name: nic, between: [gpu*, network], bandwidth: 9.5 GB/s, latency: 5 us}]
"""
        found = read(pod=pod)
    assert (len(found.devices), len(found.hosts), len(found.links)) == (1024, 128, 4096)
    paths = routes(found)
    assert len(paths) == 1024 * 1023
    assert [found.links[i].target for i in paths[0, 1023]] == ["network", "gpu1023"]
    assert [found.links[i].target for i in paths[0, 7]] == ["nvswitch0", "gpu7"]


def uneven(counts, kinds):
    """Hosts with so many devices each, over 1 GB/s."""
    hosts = "\n".join(
        f"  t{i}:\n    hosts: [{{name: host0}}]\n"
        f"    devices: [{{name: gpu, count: {count}, type: {kind}, host: host0}}]\n"
        "    links: [{between: [gpu*, host0], bandwidth: 10 GB/s, latency: 5 us}]"
        for i, (count, kind) in enumerate(zip(counts, kinds, strict=True))
    )
    used = ", ".join(f"{{template: t{i}}}" for i in range(len(counts)))
    return f"""
templates:
{hosts}
hosts: [{used}]
switches: [network]
links: [{{name: nic, between: [host*, network], bandwidth: 1 GB/s, latency: 20 us}}]
"""


@pytest.mark.parametrize(
    ("counts", "kinds"),
    [
        ((5,), ("T4",)),
        ((7,), ("T4",)),
        ((3, 1), ("T4", "T4")),
        ((2, 2), ("A100-SXM4-40GB", "T4")),
        ((3, 1), ("T4", "A100-SXM4-40GB")),
    ],
)
def test_any_devices_are_planned_for_as_well_as_by_brute_force(read, counts, kinds):
    topology = read(uneven=uneven(counts, kinds))
    graph = graph_of([[], [0], [1]], [10**6] * 3, [10**8, 10**6, 10**8])
    work = [(10**11, 10**8)] * 3
    profile = profile_of(graph, [0.02, 0.03, 0.02], work=work)
    problem = problem_of(
        profile, topology, 2 * sum(counts), topology.device_types[0], recompute=Recompute.NONE
    )
    result = SOLVERS["antichain"](problem, 10.0)
    assert result.status is Status.OPTIMAL
    found_s = closed_form_s(problem, result.strategy)
    assert found_s == pytest.approx(least_objective_s(problem), rel=1e-9)
    best = compare(problem).best
    assert best.plan is not None
    assert evaluate(problem, best.plan.strategy).shortage is None


def test_ends_of_routes_meet(read):
    found = read(base=BASE)
    for path in routes(found).values():
        links: list[Link] = [found.links[i] for i in path]
        assert all(a.target == b.source for a, b in pairwise(links))


README = Path(__file__).parents[2] / "topologies" / "README.md"
EXAMPLES = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.startswith("format:")])
def test_the_examples_of_the_readme_are_sound(tmp_path, example):
    (tmp_path / "t.yaml").write_text(example)
    assert read_topology(tmp_path / "t.yaml").devices


def test_the_readmes_tables_are_sound(read):
    (tables,) = (example for example in EXAMPLES if example.startswith("tables:"))
    alike = """
hosts: [{name: host, count: 2}]
devices:
  - {name: gpu, count: 4, type: T4, host: host0}
  - {name: gpu, count: 4, type: T4, host: host1}
switches: [network]
links: [{between: [gpu*, network], bandwidth: 12 GB/s, latency: 5 us}]
"""
    assert len(read(alike=alike + tables).tables) == 4


def test_every_preset_stands_in_the_readme():
    said = README.read_text()
    known = (re.sub(r"-x[48]$", "", name) for name in preset_names())
    assert [name for name in known if name not in said] == []


def test_the_bound_of_a_search_holds_for_measured_times_that_bend(read):
    bent = (
        uneven((3,), ("T4",)) + "tables:\n  - {times: {1 MB: 9 ms, 100 MB: 10 ms, 1 GB: 40 ms}}\n"
    )
    graph = graph_of([[], [0], [1]], [10**6] * 3, [10**8, 10**6, 10**8])
    profile = profile_of(graph, [0.02, 0.03, 0.02], work=[(10**11, 10**8)] * 3)
    topology = read(bent=bent)
    problem = problem_of(profile, topology, 12, topology.device_types[0])
    result = SOLVERS["antichain"](problem, 10.0)
    for strategy in (result.strategy, SOLVERS["data-parallel"](problem, 1.0).strategy):
        price_s = closed_form_s(problem, strategy)
        assert price_s >= result.bound_s * (1 - 1e-9)
