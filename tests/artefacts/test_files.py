"""Files: every mistake is a `FileError` that names the file and the field."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import (
    artefact_hash,
    read_plan,
    read_profile,
    to_plain,
    write_atomically,
    write_profile,
)
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.plan import Plan
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.strict import reader
from planner.clusters.yaml.read import find_topology, read_topology
from planner.model.load import load
from planner.support import units
from planner.support.errors import FileError, UnitError
from tests.support.builders import graph_of, profile_of

EXPLICIT = """
format: planner-topology/1
name: pair
hosts: [{name: host0, cores: CORES, memory: MEMORY}]
devices: [{name: a, type: MINE, host: host0}, {name: b, type: MINE, host: host0}]
links: [{between: [a, b], bandwidth: WIDTH, latency: 5 us}]
device_types:
  MINE: {memory: SIZE, flops: {DTYPE: SPEED}, memory_bandwidth: RATE, source: made up}
"""
SOUND = {
    "CORES": "2", "MEMORY": "auto", "WIDTH": "1 GB/s", "SIZE": "16 GiB", "DTYPE": "float32",
    "SPEED": "1 TFLOP/s", "RATE": "600 GB/s",
}  # fmt: skip
LEVELS = """
format: planner-topology/1
name: regular
device: cpu
levels: [{name: NAME, count: COUNT, bandwidth: 1 GB/s, latency: 5 us}]
"""
WORDS = "expected a whole number of cores or auto, got"


def explicit(**changes):
    text = EXPLICIT
    for name, value in (SOUND | changes).items():
        text = text.replace(name, value)
    return text


def levels(name="process", count="2", more=""):
    return LEVELS.replace("NAME", name).replace("COUNT", count) + more


def complaint(folder, content, read=read_topology, name="t.yaml"):
    """What is said of a file, without its path."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError) as caught:
        read(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return "\n".join(line.removeprefix(f"{path}: ") for line in lines)


def test_sound_topologies_are_read(tmp_path):
    (tmp_path / "t.yaml").write_text(explicit())
    assert read_topology(tmp_path / "t.yaml").hosts[0].cores == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"CORES": "0"}, f"hosts[0].cores: {WORDS} 0"),
        ({"CORES": "many"}, f"hosts[0].cores: {WORDS} 'many'"),
        ({"CORES": "-2"}, f"hosts[0].cores: {WORDS} -2"),
        ({"MEMORY": "0 B"}, "hosts[0].memory: expected more than 0, got '0 B'"),
        ({"MEMORY": "[1]"}, "hosts[0].memory: expected a size such as '80 GiB', got 'a list'"),
        ({"WIDTH": "0 GB/s"}, "links[0].bandwidth: expected more than 0, got '0 GB/s'"),
        ({"SIZE": "0 B"}, "device_types.MINE.memory: expected more than 0, got '0 B'"),
        ({"SPEED": "0 FLOP/s"},
         "device_types.MINE.flops.float32: expected more than 0, got '0 FLOP/s'"),
        ({"RATE": "0 GB/s"},
         "device_types.MINE.memory_bandwidth: expected more than 0, got '0 GB/s'"),
        ({"DTYPE": "float16"},
         "device_types.MINE.flops: expected float32 among the dtypes, got float16"),
        ({"CORES": "0", "SIZE": "1e400 GiB"},
         f"hosts[0].cores: {WORDS} 0\ndevice_types.MINE.memory: expected a size such as '80 GiB',"
         " got '1e400 GiB', which is too large"),
    ],
)  # fmt: skip
def test_the_field_of_a_wrong_figure_is_named(tmp_path, changes, said):
    assert complaint(tmp_path, explicit(**changes)) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "expected planner-topology/1, the file is empty"),
        ("- 1\n", "expected planner-topology/1, a mapping, got a list"),
        ("name: x\n", "format: expected 'planner-topology/1', got nothing"),
        ("name: \x07\n", "this is no YAML"),
        ("when: 2024-13-45\n", "this is no YAML"),
        (b"\xff\xfe\x00", "this is a binary file"),
        (levels(count="2.5"),
         "levels[0].count: expected a whole number of members or auto, got 2.5"),
        (levels(more="device_types: [1]"), "device_types: expected a mapping, got a list"),
        (levels(more="links: []\nhosts: []"), "hosts, links: expected either `levels`"),
        (levels(more="host: {name: mine}"), "host.name: unknown field"),
        (explicit() + "host: {cores: 2}\n", "host: expected either `levels`"),
        (explicit().replace("between: [a, b]", "from: a, to: b"), "no path leads from b to a"),
        (explicit().replace("[a, b]", "[a, a]"), "links[0]: a is linked to itself"),
    ],
)  # fmt: skip
def test_a_topology_that_is_none(tmp_path, content, said):
    found = complaint(tmp_path, content)
    assert said in found
    assert len(found.splitlines()) == 1


def test_a_level_may_be_called_host(tmp_path):
    (tmp_path / "t.yaml").write_text(levels("host"))
    found = read_topology(tmp_path / "t.yaml")
    assert [d.name for d in found.devices] == ["host0", "host1"]
    assert [h.name for h in found.hosts] == ["machine0"]


@pytest.mark.parametrize("preset", ["p3", "p3-8xlarge", "local"])
def test_presets_are_sound(preset):
    assert read_topology(find_topology(preset), 2).devices


# ------------------------------------------------------------------------------------ profiles


def plain_profile():
    graph = graph_of([[], [0]])
    return {"format": "planner-profile/2", **to_plain(profile_of(graph, [1.0, 2.0]))}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("dtype",), "float33", "dtype: expected one of bfloat16"),
        (("microbatch_size",), 0, "microbatch_size: expected at least 1, got 0"),
        (("dimensions",), {"seq": 0}, "dimensions.seq: expected at least 1, got 0"),
        (("graph", "outputs"), [], "graph.outputs: expected the tensor of the loss, got none"),
        (("graph", "inputs"), {"a": 1}, "graph.inputs: expected a list, got a mapping"),
        (("graph", "tensors", 1, "dtype"), "int7", "graph.tensors[1].dtype: expected one of bool"),
        (("graph", "tensors", 1, "shape"), [-1],
         "graph.tensors[1].shape: expected sizes of at least 0, got [-1]"),
        (("graph", "parameters", 0, "shape"), [10**400], "graph.parameters[0].shape: expected at"),
        (("operators", 0, "forward_s"), -1.0,
         "operators[0].forward_s: expected at least 0 and at most 1e+09, got -1.0"),
        (("operators", 0, "backward_s"), 1e308,
         "operators[0].backward_s: expected at least 0 and at most 1e+09, got 1e+308"),
        (("operators", 1, "flops"), -1, "operators[1].flops: expected at least 0"),
        (("operators", 1, "bytes_moved"), -1, "operators[1].bytes_moved: expected at least 0"),
        (("operators", 1, "stash_tensors"), ["x"],
         "operators[1].stash_tensors: expected inputs and outputs of 'op1', got 'x'"),
        (("views",), [{"tensor": "x", "base": "t0"}],
         "views[0].tensor: expected an operator's output, got 'x'"),
        (("views",), [{"tensor": "t1", "base": "w0"}],
         "views[0].base: expected an input or parameter of 'op1', got 'w0'"),
        (("operators",), [], "operators: expected one per operator"),
    ],
)  # fmt: skip
def test_the_field_of_a_wrong_profile_is_named(tmp_path, place, value, said):
    plain = plain_profile()
    inner = plain
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    found = complaint(tmp_path, json.dumps(plain), read_profile, "p.json")
    assert found.startswith(said)
    assert len(found.splitlines()) == 1


def test_all_problems_of_a_profile_are_said_at_once(tmp_path):
    plain = plain_profile() | {"dtype": "x", "microbatch_size": -1}
    assert len(complaint(tmp_path, json.dumps(plain), read_profile).splitlines()) == 2


def test_sizes_of_a_measured_profile_agree_with_its_graph(tmp_path):
    plain = plain_profile() | {"source": "measured"}
    for cost in plain["operators"]:
        cost |= {"output_bytes": 1000, "parameter_bytes": 1000}
    (tmp_path / "p.json").write_text(json.dumps(plain))
    profile = read_profile(tmp_path / "p.json")
    write_profile(profile, tmp_path / "q.json")
    assert read_profile(tmp_path / "q.json") == profile
    plain["operators"][1]["parameter_bytes"] = 7
    found = complaint(tmp_path, json.dumps(plain), read_profile)
    assert found == "operators[1].parameter_bytes: expected 1000 as in the graph, got 7"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x08\x07\x00\xff", "this is a binary file"),
        (b"", "the file is empty"),
        (b"{", "this is no JSON"),
        (b"[" * 100_000, "this is no JSON"),
        (b"[]", "a mapping, got a list"),
    ],
)
def test_a_profile_of_the_wrong_kind(tmp_path, content, said):
    found = complaint(tmp_path, content, read_profile)
    assert said in found
    assert "make one with: planner profile MODEL.onnx" in found


def test_text_that_is_no_unicode(tmp_path):
    path = tmp_path / "s.json"
    path.write_text('{"format": "planner-strategy/2", "solver": "\\ud800"}')
    with pytest.raises(FileError, match=r"s\.json: .* this is no JSON: .* surrogates not allowed"):
        read_plan(path)


def test_a_name_that_no_file_has():
    with pytest.raises(FileError, match="there is no such file"):
        read_profile(Path("a\0b"))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(FileError, match="this is a folder; give a file in it"):
        read_profile(tmp_path)
    with pytest.raises(FileError, match=r"this is a folder; give the \.onnx file in it"):
        load(tmp_path)


def test_an_empty_model_is_said_to_be_empty(tmp_path):
    (tmp_path / "m.onnx").touch()
    with pytest.raises(FileError, match="the file is empty"):
        load(tmp_path / "m.onnx")


# ------------------------------------------------------------------------------- writing, units


def test_what_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for target in ("file/x.json", "file/y/x.json", "folder"):
        with pytest.raises(FileError, match=f"{target}: cannot be written: .*; name a"):
            write_atomically(tmp_path / target, b"")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.parse_bytes, "1e400 GiB"),
        (units.parse_bytes, "1e308 GiB"),
        (units.parse_seconds, "1e400 s"),
        (units.parse_rate, "1e400 GB/s"),
        (units.parse_flops, "1e300 PFLOP/s"),
    ],
)
def test_a_quantity_is_finite(parse, text):
    with pytest.raises(UnitError, match="too large"):
        parse(text)


def test_a_file_is_parsed_once_until_it_changes(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(plain_profile()))
    profile = read_profile(path)
    assert read_any_profiles(path) == (profile,)
    assert read_any_profiles(path)[0] is profile
    path.write_text(json.dumps(plain_profile() | {"microbatch_size": 3}))
    assert read_profile(path).microbatch_size == 3
    path.write_text(json.dumps(plain_profile()))
    assert artefact_hash(read_profile(path)) == artefact_hash(replace(profile))


def test_an_installed_package_has_its_presets(tmp_path):
    """Laid out as the `package-dir` of pyproject.toml has it."""
    root = Path(__file__).parents[2]
    for source, target in (("planner", "planner"), ("topologies", "planner/data/topologies")):
        shutil.copytree(
            root / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__")
        )
    code = "from planner.clusters.presets import presets; print(*(one.name for one in presets()))"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert {"p3", "local"} <= set(shown.stdout.split())


# ---------------------------------------------------------------------------------- strategies

GOLDEN = Path(__file__).parents[1] / "golden"
SPLIT = Strategy(
    (
        Stage.whole(("a",), (6,), 2, True),
        Stage(
            ("b", "c"), ((0, 1, 2, 3), (8, 9, 10, 11)), 1, False,
            Sharding(
                (2, 2),
                {"b": rule_of(["S0,R->S0", "R,S1->S2 shape[2]"])},
                {"w": ("R", "S1")}, {"x": ("S0", "R")}, {"y": ("R", "R")},
            ),
        ),
    ),
    ScheduleName.ONE_F_ONE_B, 4,
)  # fmt: skip


def test_a_strategy_of_format_1_is_read_as_it_was():
    plan = read_plan(GOLDEN / "skip-1f1b-format-1.json")
    assert isinstance(plan, Plan)
    assert plan.strategy.schedule is ScheduleName.ONE_F_ONE_B
    assert plan.strategy.num_microbatches == 6
    assert plan.strategy.stages == (
        Stage(("op0", "op1"), ((0,),), warmup=5, recompute=False),
        Stage(("op2", "op3"), ((1,),), warmup=3, recompute=False),
        Stage(("op4",), ((2,),), warmup=1, recompute=False),
        Stage(("op5",), ((2,),), warmup=1, recompute=False),
    )
    assert all(stage.sharding is None for stage in plan.strategy.stages)


def test_a_stage_of_whole_operators_has_no_fields_for_a_mesh():
    whole, split = to_plain(SPLIT)["stages"]
    assert whole == {"operators": ["a"], "devices": [6], "warmup": 2, "recompute": True}
    assert split == {
        "operators": ["b", "c"],
        "devices": [0, 1, 2, 3, 8, 9, 10, 11],
        "warmup": 1,
        "recompute": False,
        "mesh": [2, 2],
        "rules": {"b": ["S0,R->S0", "R,S1->S2 shape[2]"]},
        "parameters": {"w": ["R", "S1"]},
        "inputs": {"x": ["S0", "R"]},
        "outputs": {"y": ["R", "R"]},
    }


def test_a_sharding_is_read_as_it_was_written():
    assert reader(Strategy).validate_json(json.dumps(to_plain(SPLIT))) == SPLIT


def test_segments_that_leave_out_operators_are_read_as_they_were_written():
    whole = Stage.whole(("a", "b", "c", "d"), (0,), 1, recompute=True)
    stage = replace(whole, recomputed=(("a", "c"), ("d",)))
    strategy = Strategy((stage,), ScheduleName.GPIPE, 1)
    (plain,) = to_plain(strategy)["stages"]
    assert plain["recomputed"] == [["a", "c"], ["d"]]
    assert reader(Strategy).validate_json(json.dumps(to_plain(strategy))) == strategy
    assert stage.segment_by_operator == {"a": 0, "b": 0, "c": 0, "d": 1}


def split_plan(**change):
    """A strategy file whose first stage has some more fields."""
    plain = json.loads((GOLDEN / "skip-1f1b.json").read_text())
    plain["strategy"]["stages"][0] |= {"devices": [0, 1], "mesh": [2], **change}
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": [0, 1, 2]}, "devices: expected a multiple of 2 for the mesh, got 3"),
        ({"mesh": None, "rules": {"b": ["R->R"]}}, "mesh: missing, but there are rules or specs"),
        ({"rules": {"b": ["R-R"]}}, "rules.b: expected a rule such as 'S0,R->S0', got 'R-R'"),
        ({"rules": {"b": "R->R"}}, "rules.b: expected a list, got 'R->R'"),
        ({"inputs": {"x": ["P"]}}, "inputs.x: expected S or R for each axis, got P"),
        ({"stride": 1}, "stride: unknown field"),
    ],
)
def test_the_field_of_a_wrong_mesh_is_named(tmp_path, change, said):
    found = complaint(tmp_path, split_plan(**change), read_plan, "s.json")
    assert found == f"strategy.stages[0].{said}"


# What strategies say that nothing behind the reader may look up


def strategy(folder, at, value):
    """A strategy file of the tests with one field replaced."""
    plain = json.loads((Path(__file__).parents[1] / "golden" / "skip-1f1b.json").read_text())
    part = plain
    for key in at[:-1]:
        part = part[key]
    part[at[-1]] = value
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (["optimizer"], "__class__", "optimizer: expected one of sgd, momentum, adam, adamw, got"),
        (["status"], "unknown", "status: expected one of optimal, feasible, got 'unknown'"),
        (["certificate", "objective"], "speed",
         "certificate.objective: expected one of iteration, bottleneck, latency, got 'speed'"),
        (["dtype"], "nn", "dtype: expected one of bfloat16, float16, float32, float64, got 'nn'"),
        (["crossings", 0, "dtype"], "load", "crossings[0].dtype: expected one of bool, int8"),
        (["threads"], -1, "threads: expected 1 to 4096, got -1"),
        (["threads"], 10**9, "threads: expected 1 to 4096, got 1000000000"),
        (["seed"], 2**64, "seed: expected 0 to 9223372036854775807, got 18446744073709551616"),
        (["microbatch_size"], 0, "microbatch_size: expected 1 to"),
        (["ranks"], [], "ranks: expected each of the devices (0, 1, 2) once, got ()"),
        (["prediction", "devices"], [], "prediction.devices: expected each of the devices"),
        (["prediction", "stages"], [], "prediction.stages: expected one per stage ("),
        (["prediction", "iteration_s"], 0.0, "prediction.iteration_s: expected a time above 0"),
        (["strategy", "stages"], [], "strategy.stages: expected stages on devices from 0 on"),
        (["notes"], ["\ud800"], "expected planner-strategy/2, this is no JSON: 'utf-8' codec"),
        (["seed"], 10**400, "seed: expected 0 to 9223372036854775807, got 100000000000000000"),
        (["strategy", "num_microbatches"], 10**9, "strategy.num_microbatches: expected 1 to"),
    ],
)  # fmt: skip
def test_a_strategy_with_an_unknown_or_absurd_field_is_refused(tmp_path, at, value, said):
    content = strategy(tmp_path, at, value)
    assert complaint(tmp_path, content, read_plan, "s.json").startswith(said)


def test_all_wrong_fields_of_a_strategy_are_said_at_once(tmp_path):
    content = json.loads(strategy(tmp_path, ["optimizer"], "x"))
    lines = complaint(tmp_path, json.dumps({**content, "threads": 0}), read_plan, "s.json")
    assert [line.partition(":")[0] for line in lines.splitlines()] == ["optimizer", "threads"]
