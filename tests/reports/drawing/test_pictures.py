"""Trees of text and SVG of topologies."""

import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest

from planner.artefacts.files import shipped
from planner.artefacts.topology import Device, Host, Link, Topology
from planner.clusters.yaml.read import find_topology, read_topology
from planner.reports.drawing.topology_layout import layout
from planner.reports.drawing.topology_svg import svg
from planner.reports.drawing.tree import tree
from tests.support.builders import cluster, unit_type

PRESETS = sorted(p.stem for p in shipped("topologies").glob("*.yaml") if p.stem != "devices")
RACKS = """
format: planner-topology/1
name: racks
device: T4
levels:
  - {name: gpu, count: 8, bandwidth: 12 GB/s, latency: 5 us}
  - {name: host, count: 4, bandwidth: 25 Gbps, latency: 20 us}
  - {name: rack, count: 4, bandwidth: 10 Gbps, latency: 20 us}
"""


def preset(name) -> Topology:
    return read_topology(find_topology(name))


@pytest.fixture
def racks(tmp_path):
    """16 hosts with 8 devices each, in 4 racks."""
    (tmp_path / "racks.yaml").write_text(RACKS)
    return read_topology(tmp_path / "racks.yaml")


def test_the_tree_of_a_hierarchy_draws_what_is_alike_once(racks):
    assert tree(racks) == (
        "racks: 128 devices\n"
        "└─ switch\n"
        "   └─ switch.0 .. switch.3 (4)  rack 1.25 GB/s, 10 us\n"
        "      each:\n"
        "      └─ host0 .. host3 (4)  host 3.12 GB/s, 10 us\n"
        "         each:\n"
        "         └─ gpu0 .. gpu7 (8)  T4; gpu 12 GB/s, 2.5 us"
    )


def test_the_tree_says_links_between_devices():
    topology = cluster([unit_type()] * 3, links=[(0, 1, 5e9)])
    assert tree(topology) == (
        "test: 3 devices\n"
        "└─ host\n"
        "   ├─ d0  unit; 1 GB/s, 0 ns; to d1: 5 GB/s, 0 ns\n"
        "   ├─ d1  unit; 1 GB/s, 0 ns; to d0: 5 GB/s, 0 ns\n"
        "   └─ d2  unit; 1 GB/s, 0 ns"
    )


def test_the_tree_has_switches_in_hosts_where_they_lead():
    lines = tree(preset("flexflow-k80")).splitlines()
    assert lines[1] == "└─ network"
    assert lines[2].startswith("   └─ host0 .. host15 (16)")
    assert [line.split("─ ")[1].split()[0] for line in lines[4:] if "─ " in line] == [
        "root0", "pcie0", "gpu0",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_drawn_as_valid_xml_with_every_name(name):
    topology = preset(name)
    root = ET.fromstring(svg(topology))
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {device.name for device in topology.devices} <= texts
    assert set(topology.switches) <= texts
    said = "\n".join(text for text in texts if text)
    assert all(host.name in said for host in topology.hosts)
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == len({frozenset((x.source, x.target)) for x in topology.links})
    assert tree(topology)


def test_the_picture_is_the_same_each_time_and_has_its_own_colours(racks):
    picture = svg(racks)
    assert svg(racks) == picture
    root = ET.fromstring(picture)
    paper = root.find("{http://www.w3.org/2000/svg}rect")
    assert paper is not None
    assert (paper.get("width"), paper.get("fill")) == (root.get("width"), "#ffffff")
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert all(text.get("fill") for text in texts)


@pytest.mark.parametrize("name", [*PRESETS, "racks"])
def test_nothing_covers_anything_else(name, racks):
    topology = racks if name == "racks" else preset(name)
    places = layout(topology)
    hosts = {host.name for host in topology.hosts}
    things = {v: box for v, box in places.vertices.items() if v not in hosts or v in places.round}
    for (a, box), (b, other) in combinations(things.items(), 2):
        assert not box.meets(other), f"{a} covers {b}"
    for (a, box), (b, other) in combinations(places.frames.items(), 2):
        assert not box.meets(other), f"host {a} covers {b}"
    everything = [*places.vertices.values(), *places.frames.values()]
    assert all(box.left >= 0 and box.top >= 0 for box in everything)
    assert all(box.right <= places.width and box.bottom <= places.height for box in everything)


def test_switches_over_the_same_hosts_stand_side_by_side():
    switches = tuple(f"rail{i}" for i in range(6))
    topology = Topology(
        "rails", (unit_type(),), (Host("a"), Host("b")),
        (Device("d0", "unit", "a"), Device("d1", "unit", "b")), switches,
        tuple(Link(*pair, 1e9, 0.0) for switch in switches for end in ("a", "b", "d0", "d1")
              for pair in ((end, switch), (switch, end))),
    )  # fmt: skip
    places = layout(topology).vertices
    for a, b in combinations(switches, 2):
        assert not places[a].meets(places[b])
    ET.fromstring(svg(topology))


def test_devices_stand_in_the_frame_of_their_host(racks):
    for topology in (racks, preset("p3-16xlarge-x8"), preset("mixed-a100-t4")):
        places = layout(topology)
        for device in topology.devices:
            box, frame = places.vertices[device.name], places.frames[device.host]
            assert frame.left <= box.left and box.right <= frame.right
            assert frame.top <= box.top and box.bottom <= frame.bottom


def test_wider_links_are_drawn_wider():
    root = ET.fromstring(svg(preset("p3")))
    lines = root.findall("{http://www.w3.org/2000/svg}line")
    widths = [float(line.get("stroke-width", "0")) for line in lines]
    assert len(widths) == 3
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 2 * widths[-1]


def test_names_are_escaped(tmp_path: Path):
    text = RACKS.replace("name: racks", 'name: "a<b & c"').replace("name: gpu", 'name: "g<&"')
    (tmp_path / "odd.yaml").write_text(text)
    root = ET.fromstring(svg(read_topology(tmp_path / "odd.yaml")))
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text == "a<b & c: 128 devices"
