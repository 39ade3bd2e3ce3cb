"""Names that come from files may hold anything, and reach terminal and files as mere text."""

import io
import json
import os
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ET
from operator import itemgetter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from planner.artefacts.topology import Device, Host, Link, Topology
from planner.clusters.yaml.write import topology_yaml
from planner.commands import terminal as printing
from planner.reports.drawing.topology_svg import svg
from planner.reports.drawing.tree import tree
from planner.reports.tables import Column, table
from planner.support.printable import printable
from tests.commands.test_cli import ROOT
from tests.commands.test_outputs import PAIR
from tests.support.builders import unit_type
from tests.support.commands import run

# Clears the screen, turns the line around, is markup to rich, XML, DOT and YAML, and a line of its
# own.
HOSTILE = (
    "\x1b[2J\x9b31m\u202e[bold red][/]:smile:</text><script>&\"';}\\\r\nError: all is lost \x07"
)
MARKUP = "[bold red][/]:smile:"


def unseen(text):
    """The characters of a text that no output may have."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"}


def hostile_model(path):
    """A chain of MatMul and Relu in which every name is hostile."""
    rng, nodes, weights, x = np.random.default_rng(0), [], [], f"x{HOSTILE}"
    for i in range(3):
        weight = rng.normal(size=(16, 16)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{i}{HOSTILE}"))
        for kind, inputs in (("MatMul", [x, f"w{i}{HOSTILE}"]), ("Relu", [f"MatMul{i}{HOSTILE}"])):
            x = f"{kind}{i}{HOSTILE}"
            nodes.append(helper.make_node(kind, inputs, [x], name=f"{kind} {i}{HOSTILE}"))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"batch{HOSTILE}", 16])
        for name in (f"x{HOSTILE}", x)
    ]
    graph = helper.make_graph(nodes, f"graph{HOSTILE}", ends[:1], ends[1:], weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model of hostile names, and what was made of it."""
    folder = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        hostile_model(folder / "m.onnx")
        Path("pair.yaml").write_text(PAIR)
        run("profile", "m.onnx", "--batch", "4", "--device", "T4", "-o", "p.json")
        solve = ("solve", "--profile", "p.json", "--topology", "pair.yaml", "--solver", "even")
        run(*solve, "-o", "s.json")
    return folder


COMMANDS = [
    ("inspect", "m.onnx"),
    ("inspect", "m.onnx", "--batch", "4"),
    ("profile", "m.onnx", "--batch", "4", "--device", "T4", "-o", "p2.json"),
    ("solve", "--profile", "p.json", "--topology", "pair.yaml", "--solver", "even", "-o", "t.json"),
    ("compare", "--profile", "p.json", "--topology", "pair.yaml", "--solver", "even",
     "--csv", "r.csv"),
    ("simulate", "s.json", "--topology", "pair.yaml", "--gantt", "--svg", "i.svg", "--trace",
     "i.json"),
    ("convert", "s.json", "g.txt", "--profile", "p.json"),
    ("convert", "p.json", "p.txt"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_output_of_a_command_has_control_codes(made, monkeypatch, command):
    monkeypatch.chdir(made)
    done = run(*command)
    assert unseen(done.output) == set()
    assert not re.search(r"^Error: all is lost", done.output, re.MULTILINE)


MISTAKES = [
    ("profile", "m.onnx", "--device", "T4"),  # its batch has no size
    ("inspect", f"{HOSTILE}.onnx"),
    ("profile", "m.onnx", "--batch", "4", "--freeze", f"w9{HOSTILE}"),
    ("solve", "--profile", "p.json", "--topology", "pair.yaml", "--pin", f"{HOSTILE}=gpu0"),
    ("solve", "--profile", f"{HOSTILE}", "--topology", "pair.yaml"),
    ("solve", "--profile", "p.json", "--topology", f"{HOSTILE}.yaml"),
    ("simulate", f"{HOSTILE}.json"),
    ("convert", f"{HOSTILE}.json", "x.json"),
]


@pytest.mark.parametrize("command", MISTAKES, ids=range(len(MISTAKES)))
def test_no_message_has_control_codes(made, monkeypatch, command):
    monkeypatch.chdir(made)
    said = run(*command, code=1).output
    assert said.startswith("Error: ")
    assert unseen(said) == set()


def test_a_file_name_that_is_no_unicode_can_be_named(made, monkeypatch):
    monkeypatch.chdir(made)
    name = os.fsdecode(b"\xff.json")
    process = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "convert", "p.json", os.fsencode(name)],
        capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert process.stdout == b"wrote \\udcff.json\n"
    assert Path(name).is_file()
    Path(name).unlink()


def test_a_picture_of_an_iteration_and_a_trace_are_sound(made, monkeypatch):
    monkeypatch.chdir(made)
    run(*next(one for one in COMMANDS if one[0] == "simulate"))
    assert not [one for one in ET.parse("i.svg").iter() if one.tag.endswith("script")]
    assert json.loads(Path("i.json").read_text())["traceEvents"]


def hostile_topology():
    kind = unit_type(f"T4{HOSTILE}")
    host, switch, device = (f"{word}{HOSTILE}" for word in ("host", "switch", "gpu"))
    ends = ((device, switch), (switch, device), (switch, host), (host, switch))
    return Topology(
        name=f"pair{HOSTILE}",
        device_types=(kind,),
        hosts=(Host(host),),
        devices=(Device(device, kind.name, host),),
        switches=(switch,),
        links=tuple(Link(a, b, 1e9, 1e-6, name=f"wire{HOSTILE}") for a, b in ends),
    )


def test_a_picture_of_a_cluster_has_names_as_text():
    drawn = svg(hostile_topology())
    root = ET.fromstring(drawn)
    assert not [one for one in root.iter() if one.tag.endswith("script")]
    texts = [one.text for one in root.iter() if one.text]
    assert f"gpu{printable(HOSTILE)}" in texts
    assert unseen(drawn) == set()


def test_the_tree_of_a_cluster_has_a_line_for_each_thing():
    drawn = tree(hostile_topology())
    assert unseen(drawn) == set()
    assert len(drawn.splitlines()) == 4  # the cluster, its host, switch and device


def test_comments_of_a_topology_are_comments():
    text = topology_yaml(hostile_topology(), [f"Imported from {HOSTILE}", "x\nname: mine"])
    assert unseen(text) == set()
    comments, rest = text.split("format:")[0], text.split("format:")[1]
    assert all(line.startswith("#") for line in comments.splitlines())
    assert rest.count("\nname:") == 1


def test_a_drawing_for_graphviz_has_a_line_for_each_node_and_edge(made, monkeypatch):
    monkeypatch.chdir(made)
    run("convert", "s.json", "drawn.txt", "--profile", "p.json")
    text = Path("drawn.dot").read_text()
    assert unseen(text) == set()
    quoted = r'"(?:[^"\\]|\\.)*"'
    node, edge = rf"  {quoted} \[label={quoted}, fillcolor={quoted}\];", rf"  {quoted} -> {quoted};"
    lines = text.splitlines()
    assert lines[0] == "digraph stages {"
    assert lines[-1] == "}"
    assert all(re.fullmatch(f"{node}|{edge}", line) for line in lines[2:-1])


# ------------------------------------------------------------------------------ the terminal


def test_no_cell_head_or_title_is_markup(monkeypatch):
    text = io.StringIO()
    screen = Console(file=text, force_terminal=True, width=160, highlight=False)
    monkeypatch.setattr(printing, "console", lambda **_: screen)
    head = f"{MARKUP}\x1b[3J"
    columns = (
        Column("", itemgetter(0), MARKUP, left=True),
        Column("", itemgetter(1), head),
    )
    printing.show(table(MARKUP, [(MARKUP, f"{MARKUP}\x1b[2J\n")], columns))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue())  # rich's own colours
    assert shown.count(MARKUP) == 5
    assert "\\x1b[2J\\n" in shown
    assert "\\x1b[3J" in shown
    assert unseen(shown) == set()


def test_a_bar_and_a_spinner_bear_any_name(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    text = Terminal()
    screen = Console(file=text, force_terminal=True, width=160, highlight=False)
    monkeypatch.setattr(printing, "console", lambda **_: screen)
    monkeypatch.setattr(sys, "stderr", text)
    with printing.bar(f"{MARKUP}\x07.onnx") as tick:
        tick(1, 2)
    with printing.spinner() as begin:
        begin(f"{MARKUP}\x07.solver")
        screen.print()
    assert f"{MARKUP}\\x07.onnx" in text.getvalue()
    assert f"Solving: {MARKUP}\\x07.solver" in text.getvalue()


@pytest.mark.parametrize("text", ["conv1", "größe", "語", "a b", "C:\\models", "x.0/MatMul"])
def test_usual_names_stay_as_they_are(text):
    assert printable(text) == text
