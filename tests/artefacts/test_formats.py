"""graph.txt read, written and told from other formats; every published file read, with totals that
a plain reader here finds too.
"""

import json
import os
from collections import defaultdict
from math import ceil
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.api.conversion import convert
from planner.artefacts.files import write_profile
from planner.artefacts.formats.any import READERS, detect
from planner.artefacts.formats.graph_txt import (
    GRAPH_TXT,
    GraphText,
    TextNode,
    annotate,
    from_profile,
    parse,
    to_dot,
    to_profile,
    to_text,
)
from planner.artefacts.graph import predecessors
from planner.artefacts.profile import Profile, Source
from planner.artefacts.roofline import rescaled_times
from planner.costs.bounds import longest_path_s
from planner.support.errors import FileError
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.profiles import read_any_profile
from tests.support.strategies import dags

REFERENCE = Path(
    os.environ.get("PLANNER_REFERENCE", Path(__file__).parents[3] / "shared" / "reference")
)
WHERE = Path("graph.txt")


def line(name, description, forward=1.0, backward=2.0, activation="8.0", parameter="0.0"):
    return (
        f"{name} -- {description} -- forward_compute_time={forward},"
        f" backward_compute_time={backward}, activation_size={activation},"
        f" parameter_size={parameter}"
    )


#   node1 (input) -> node3 -> node4 -> node6
#                       \-> node5 (__getitem__)
SMALL = "\n".join(
    [
        line("node1", "Input0", 5.0, 5.0, "16.0"),
        line("node4", "Linear(8, 2) -- odd", 0.5, 1.5, "4.0", "[40.0; 2.5]"),
        line("node3", "LSTM(8)", 1.0, 2.0, "[8.0; 4.0; 4.0]", "64.0"),
        line("node5", "__getitem__(1)", 0.0, 0.0, "4.0"),
        line("node6", "Add", 0.25, 0.0, "4.0"),
        "\tnode1 -- node3",
        "\tnode3 -- node4",
        "\tnode3 -- node5",
        "\tnode4 -- node6",
        "",
    ]
)


def small():
    return to_profile(parse(SMALL, WHERE), WHERE)


# ------------------------------------------------------------------------------ text -> profile


def test_a_graph_becomes_a_profile_in_topological_order():
    profile = small()
    graph = profile.graph
    assert [o.name for o in graph.operators] == ["node3", "node4", "node5", "node6"]
    assert predecessors(graph) == ((), (0,), (0,), (1,))
    assert graph.inputs == ("node1",)
    assert [(o.forward_s, o.backward_s) for o in profile.operators] == [
        (0.001, 0.002), (0.0005, 0.0015), (0.0, 0.0), (0.00025, 0.0)
    ]  # fmt: skip
    assert {t.name: t.bytes for t in graph.tensors} == {
        "node1": 16, "node3": 16, "node4": 4, "node5": 4, "node6": 4
    }  # fmt: skip
    # Fractions are rounded up to whole bytes.
    assert {p.name: p.bytes for p in graph.parameters} == {
        "node3.parameters": 64,
        "node4.parameters": 43,
    }
    assert [o.stash_tensors for o in profile.operators] == [(o.name,) for o in profile.operators]
    assert (profile.source, profile.device_type) == (Source.IMPORTED, "imported")
    assert (profile.model_path, profile.model_hash) == (None, None)


def test_names_are_written_without_control_characters():
    node = TextNode("a\x1b[2J", "Linear\u202e", 1.0, 2.0, (8.0,), (0.0,))
    graph = GraphText((node,), (("a\x1b[2J", "a\x1b[2J"),))
    for text in (to_text(graph), to_dot(graph)):
        assert "a\\x1b[2J" in text.replace("\\\\", "\\") and "\x1b" not in text
        assert "\u202e" not in text


def test_inputs_have_no_gradient_and_everything_else_has():
    assert {t.name for t in small().graph.tensors if not t.gradient} == {"node1"}


def test_the_loss_is_computed_from_the_sink_that_most_nodes_lead_to():
    assert small().graph.outputs == ("node6", "node5")


def test_a_node_called_input_that_is_fed_is_an_operator():
    text = "\n".join([line("a", "Linear"), line("b", "InputNorm"), "\ta -- b"])
    profile = to_profile(parse(text, WHERE), WHERE)
    assert [o.name for o in profile.graph.operators] == ["a", "b"]


def test_imported_times_hold_on_every_device():
    profile = small()
    for kind in (unit_type("V100"), unit_type("other", flops=1.0)):
        times = rescaled_times(profile, kind, None)
        assert list(times.forward_s) == [o.forward_s for o in profile.operators]
    problem = problem_of(profile, cluster([unit_type()]))
    assert longest_path_s(problem) == pytest.approx(0.00525)


def test_stage_ids_that_are_there_are_read():
    text = annotate(SMALL, {"node3": 0, "node4": 1, "node5": 0, "node6": 1})
    stages = {node.name: node.stage for node in parse(text, WHERE).nodes}
    assert stages == {"node1": 0, "node3": 0, "node4": 1, "node5": 0, "node6": 1}
    assert to_profile(parse(text, WHERE), WHERE) == small()


# ------------------------------------------------------------------------------ mistakes


def test_every_problem_of_a_file_is_said_with_its_line():
    text = "\n".join(
        [
            line("a", "Linear", forward="soon"),
            line("b", "Linear", backward=-1.0, activation="[1.0; x]"),
            "b",
            line("a", "again"),
            "c -- Linear -- forward_compute_time=1.0, depth=3",
            line("d", "Linear", parameter="nan") + " -- stage_id=first",
            "\ta -- nowhere",
        ]
    )
    with pytest.raises(FileError) as caught:
        parse(text, WHERE)
    message = str(caught.value)
    for part in (
        "graph.txt: line 1: forward_compute_time: expected a time in ms, got 'soon'",
        "graph.txt: line 2: backward_compute_time: expected a time in ms, got '-1.0'",
        "graph.txt: line 2: activation_size: expected bytes, or a list of bytes such as"
        " [8.0; 4.0], got '[1.0; x]'",
        "graph.txt: line 3: expected a node or an edge, got 'b'",
        "graph.txt: line 4: expected each node once, got 'a' again",
        "graph.txt: line 5: depth: unknown field",
        "graph.txt: line 5: backward_compute_time: missing",
        "graph.txt: line 6: parameter_size: expected bytes",
        "graph.txt: line 6: stage_id: expected a number of at least 0, got 'first'",
        "graph.txt: line 7: an edge names 'nowhere', which is no node of the file",
    ):
        assert part in message
    numbers = [int(one.split("line ")[1].split(":")[0]) for one in message.splitlines()[:-1]]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n".join([line("a", "A"), line("b", "B"), "\ta -- b", "\tb -- a"]),
            "line 4: expected edges that never run in a circle, got [ab] -> [ab] -> [ab]",
        ),
        ("\n".join([line("a", "A"), "\ta -- a"]), "line 2: .* in a circle, got a -> a"),
        (line("a", "A", forward="0.5s"), "line 1: .* expected a time in ms, got '0.5s'"),
        (line("a", "A", activation="4MB"), "line 1: .* expected bytes, or a list .*, got '4MB'"),
        (line("a", "A", backward=-0.5), "line 1: backward_compute_time: expected a time in ms"),
        (line("a", "Input0"), "it has only inputs"),
        (line("a", "A", 0.0, 0.0), "all nodes take 0 ms"),
    ],
)
def test_graphs_that_cannot_be_planned_are_refused(text, message, tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_any_profile(path)


@given(st.text(alphabet="ab -=,.[];0123\t\nforward_compute_time", max_size=200))
def test_any_text_is_parsed_or_refused_in_words(text):
    try:
        to_profile(parse(text, WHERE), WHERE)
    except FileError as error:
        assert str(error).startswith("graph.txt: ")


# ------------------------------------------------------------------------------ writing


@st.composite
def graph_texts(draw):
    feeds = draw(dags(max_nodes=6))
    sizes = st.lists(st.floats(0, 1e9), min_size=1, max_size=3).map(tuple)
    nodes = tuple(
        TextNode(
            f"node{v + 1}",
            draw(st.sampled_from(["Linear", "Add(inplace)", "X -- Y", "Input0"])),
            draw(st.sampled_from([0.001, 0.125, 12.0])),
            draw(st.floats(0, 1e3)),
            draw(sizes),
            draw(sizes),
            draw(st.none() | st.integers(0, 9)),
        )
        for v in range(len(feeds))
    )
    edges = tuple((f"node{u + 1}", f"node{v + 1}") for v, us in enumerate(feeds) for u in us)
    return GraphText(nodes, edges)


@given(graph_texts())
def test_what_is_written_reads_back(graph):
    again = parse(to_text(graph), WHERE)
    assert again.edges == graph.edges
    for one, two in zip(again.nodes, graph.nodes, strict=True):
        assert (one.name, one.description, one.stage) == (two.name, two.description, two.stage)
        assert one.backward_ms == pytest.approx(two.backward_ms, rel=1e-14)
        assert one.activation_bytes == pytest.approx(two.activation_bytes, rel=1e-14)


def test_a_profile_goes_to_text_and_back_without_a_change():
    profile = small()
    assert to_profile(from_profile(profile), WHERE) == profile


def test_operators_with_other_names_are_numbered_and_keep_their_names_in_the_description():
    profile = profile_of(graph_of([[], [0], [0, 1]]), [0.001, 0.002, 0.003])
    text = to_text(from_profile(profile, {"op0": 0, "op1": 0, "op2": 1}))
    assert text == (
        "node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000,"
        " activation_size=1000.000, parameter_size=0.000 -- stage_id=0\n"
        "node2 -- Test(op0) -- forward_compute_time=1.000, backward_compute_time=2.000,"
        " activation_size=1000.000, parameter_size=1000.000 -- stage_id=0\n"
        "node3 -- Test(op1) -- forward_compute_time=2.000, backward_compute_time=4.000,"
        " activation_size=1000.000, parameter_size=1000.000 -- stage_id=0\n"
        "node4 -- Test(op2) -- forward_compute_time=3.000, backward_compute_time=6.000,"
        " activation_size=1000.000, parameter_size=1000.000 -- stage_id=1\n"
        "\tnode1 -- node2\n"
        "\tnode2 -- node3\n"
        "\tnode2 -- node4\n"
        "\tnode3 -- node4\n"
    )


def test_annotating_changes_nothing_but_the_last_field():
    stages = {"node3": 0, "node4": 1, "node5": 0, "node6": 1}
    once = annotate(SMALL, stages)
    assert once.replace(" -- stage_id=0", "").replace(" -- stage_id=1", "") == SMALL
    assert annotate(once, stages) == once


def test_the_picture_has_a_colour_per_stage():
    text = parse(annotate(SMALL, {"node3": 0, "node4": 1, "node5": 0, "node6": 1}), WHERE)
    dot = to_dot(text)
    assert dot.startswith("digraph stages {\n") and dot.endswith("}\n")
    assert '"node4" [label="node4: Linear(8, 2) -- odd\\nstage 1", fillcolor="#f28e2b"];' in dot
    assert '  "node3" -> "node4";' in dot
    assert "fillcolor=" not in to_dot(parse(SMALL, WHERE)).split("\n", 2)[2]


# ------------------------------------------------------------------------------ which format


def test_a_format_is_told_by_content_not_by_name(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(SMALL)
    assert detect(path) == GRAPH_TXT
    assert read_any_profile(path) == small()
    write_profile(small(), tmp_path / "graph.txt")
    assert read_any_profile(tmp_path / "graph.txt") == small()


def test_what_is_no_profile_is_refused_with_the_known_formats(tmp_path):
    path = tmp_path / "file"
    for content, found in (
        ("hello\n", "neither JSON nor lines of nodes"),
        ('{"nodes": [', "JSON that breaks off"),
        ('{"nodes": []}', "JSON of no known kind"),
        ("[1]", "JSON of no known kind"),
        ('{"format": "planner-strategy/1"}', "this is a strategy"),
    ):
        path.write_text(content)
        with pytest.raises(FileError) as caught:
            read_any_profile(path)
        assert found in str(caught.value)
        assert all(name in str(caught.value) for name in READERS)


def test_another_version_of_a_profile_is_said_to_be_one(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"format": "planner-profile/0"}))
    with pytest.raises(FileError, match="expected 'planner-profile/2', got 'planner-profile/0'"):
        read_any_profile(path)


def test_a_graph_keeps_lists_and_stages_from_text_to_text(tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(annotate(SMALL, {"node3": 0, "node4": 1, "node5": 0, "node6": 1}))
    convert(source, target)
    assert parse(target.read_text(), target) == parse(source.read_text(), source)
    assert "activation_size=[8.000; 4.000; 4.000]" in target.read_text()
    assert target.read_text().count(" -- stage_id=") == 5


# ------------------------------------------------------------------------------ published files


PUBLISHED = (
    *(f"dnn-partitioning/layer-{name}_{kind}.json"
      for name in ("bert24", "resnet50") for kind in ("inference", "training")),
    *(f"dnn-partitioning/operator-bert_l-3_{kind}.json" for kind in ("inference", "training")),
    *(f"pipedream/{name}.txt"
      for name in ("alexnet", "gnmt", "resnet18", "resnext50", "squeezenet1_0", "vgg16")),
    "piper/bert32a100.json",
)  # fmt: skip


def published(name: str) -> Path:
    """One of the published files; skips the test where they are absent."""
    path = REFERENCE / name
    if not path.is_file():
        pytest.skip(f"{REFERENCE} is not there; set PLANNER_REFERENCE")
    return path


def totals(profile: Profile) -> tuple[int, int, int, int]:
    """Operators, edges, bytes of the operators' outputs, bytes of parameters."""
    graph = profile.graph
    return (
        len(graph.operators),
        sum(len(operator.inputs) for operator in graph.operators),
        sum(tensor.bytes for tensor in graph.tensors if tensor.name not in graph.inputs),
        sum(parameter.bytes for parameter in graph.parameters),
    )


def size_of(text: str) -> int:
    """Whole bytes of "8.0" or "[8.0; 4.0]"."""
    return ceil(sum(float(piece) for piece in text.strip("[]").split(";")))


def plain_graph_txt(path: Path) -> tuple[tuple[int, int, int, int], float]:
    """The totals of a graph.txt, and the time in s, by splitting its lines."""
    lines = path.read_text().splitlines()
    edges = {tuple(one.strip().split(" -- ")) for one in lines if one.startswith("\t")}
    fed = {target for _, target in edges}
    nodes = activation = parameters = 0
    time_ms = 0.0
    for one in lines:
        if one.startswith("\t"):
            continue
        name, description, figures = one.split(" -- ")[0], one.split(" -- ")[1], one
        values = {
            field: figures.split(f"{field}=")[1].split(",")[0]
            for field in ("forward_compute_time", "backward_compute_time", "activation_size",
                          "parameter_size")
        }  # fmt: skip
        if description.startswith("Input") and name not in fed:
            continue
        nodes += 1
        activation += size_of(values["activation_size"])
        parameters += size_of(values["parameter_size"])
        time_ms += sum(float(values[f"{pass_}_compute_time"]) for pass_ in ("forward", "backward"))
    return (nodes, len(edges), activation, parameters), time_ms / 1000


def plain_dnn_partitioning(path: Path) -> tuple[tuple[int, int, int, int], float]:
    """The same of dnn-partitioning's JSON: operators are classes of one color, those on a cycle
    together, edges the outputs of forward nodes that another class reads, parameters what is left
    of the forward nodes' sizes.
    """
    plain = json.loads(path.read_text())
    nodes = {node["id"]: node for node in plain["nodes"]}
    color = {n: ("color", node["colorClass"]) if node.get("colorClass") is not None else ("id", n)
             for n, node in nodes.items()}  # fmt: skip
    reads, sizes, held = set(), defaultdict(float), defaultdict(float)
    forward = {color[n] for n, node in nodes.items() if not node["isBackwardNode"]}
    order = nx.DiGraph()
    order.add_nodes_from(color.values())
    for edge in plain["edges"]:
        source, dest = edge["sourceId"], edge["destId"]
        if not nodes[dest]["isBackwardNode"]:
            order.add_edge(color[source], color[dest])
            if color[source] != color[dest]:
                reads.add((source, color[dest]))
                sizes[source] = max(sizes[source], edge.get("size", 0.0))
        elif nodes[source]["isBackwardNode"] and not {color[source], color[dest]} <= forward:
            order.add_edge(color[dest], color[source])
    for n, node in nodes.items():
        held[color[n]] += 0.0 if node["isBackwardNode"] else node.get("size", 0.0)
    sent = defaultdict(int)
    for n, size in sizes.items():
        sent[color[n]] += round(size)
    parameters = sum(max(0, round(size) - sent[c]) for c, size in held.items())
    time_s = sum(node["fpgaLatency"] for node in nodes.values()) / 1000
    operators = nx.number_strongly_connected_components(order)
    return (operators, len(reads), sum(sent.values()), parameters), time_s


def plain_piper(path: Path) -> tuple[tuple[int, int, int, int], float]:
    """The same of Piper's JSON: every layer as it runs on one device without recomputation."""
    plain = json.loads(path.read_text())
    sizes = {(e["sourceId"], e["communicationCost"]) for e in plain["edges"]}
    ways = [next(way for way in node["TMPCs"]["1"] if way["id"] == "vanilla")
            for node in plain["nodes"]]  # fmt: skip
    parameters = sum(round(way["parameterSize"]) for way in ways)
    outputs = sum(round(size) for _, size in sizes)
    time_s = sum(way["timePerSample"] for way in ways)
    return (len(ways), len(plain["edges"]), outputs, parameters), time_s


@pytest.mark.reference
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_the_totals_that_a_plain_reader_finds(name):
    path = published(name)
    plain = {"dnn-partitioning": plain_dnn_partitioning, "pipedream": plain_graph_txt,
             "piper": plain_piper}[path.parent.name]  # fmt: skip
    due, time_s = plain(path)
    profile = read_any_profile(path)
    inputs = profile.graph.inputs
    found = totals(profile)
    assert min(due) > 0 and time_s > 0
    assert found == due, f"{name}: operators, edges, bytes of outputs and of parameters"
    assert len(inputs) == (name.startswith("pipedream/") and path.read_text().count(" -- Input"))
    computed_s = sum(cost.forward_s + cost.backward_s for cost in profile.operators)
    assert computed_s == pytest.approx(time_s, rel=1e-9)


@pytest.mark.reference
def test_no_published_file_is_left_out():
    published(PUBLISHED[0])
    folders = {Path(name).parent for name in PUBLISHED}
    there = {path.relative_to(REFERENCE).as_posix()
             for folder in folders for path in (REFERENCE / folder).iterdir()
             if path.name != "LICENSE.txt"}  # fmt: skip
    assert there == set(PUBLISHED)


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.endswith(".txt")])
def test_published_graphs_are_read_and_written(name):
    path = published(name)
    text = parse(path.read_text(), path)
    written = to_text(text)
    assert parse(written, path) == text
    assert to_text(parse(written, path)) == written
    profile = read_any_profile(path)
    assert to_profile(parse(to_text(from_profile(profile)), path), path) == profile
