"""The edge: each name becomes a file once, and each file is read once."""

import os
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import planner
from planner.api import lookup
from planner.artefacts.files import write_profile
from planner.clusters.yaml import read
from tests.commands.test_cli import TOPOLOGY, mlp
from tests.support.commands import run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a profile, its model, and a topology."""
    monkeypatch.chdir(tmp_path)
    mlp(tmp_path / "mlp.onnx")
    Path("pair.yaml").write_text(TOPOLOGY)
    run("profile", "mlp.onnx", "--device", "T4", "-o", "profiles/mlp.json")
    return tmp_path


@pytest.fixture
def counted(folder, monkeypatch):
    """How often each text file of the folder is opened for reading, and each name is looked up."""
    opened, found = Counter(), Counter()

    def counting(function, counter, of):
        def counted(name, *arguments, **options):
            counter.update(of(name, *arguments))
            return function(name, *arguments, **options)

        return counted

    def inside(path, flags, *others):
        path = Path(os.fsdecode(path)).resolve() if not isinstance(path, int) else Path("/")
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        text = path.suffix in (".json", ".yaml") and path.is_file() and folder in path.parents
        return [path.name] if text and not writes else []

    monkeypatch.setattr(os, "open", counting(os.open, opened, inside))
    for module, name in (
        (read, "find_topology"),
        (lookup, "find_profile"),
        (import_module("planner.model.load"), "load"),
    ):
        lookup_of = counting(getattr(module, name), found, lambda name, *others: [str(name)])
        monkeypatch.setattr(module, name, lookup_of)
    return opened, found


SOLVE = ("solve", "--solver", "even", "--profile", "mlp", "--topology", "pair")


def test_solve_finds_each_name_and_reads_each_file_once(counted):
    opened, found = counted
    run(*SOLVE)
    assert found == {"mlp": 1, "pair": 1, "mlp.onnx": 1}
    assert opened == {"mlp.json": 1, "pair.yaml": 1}
    run(*SOLVE)  # which replaces a strategy
    assert opened["strategy.json"] == 1


def test_a_choice_among_profiles_reads_each_file_once(counted):
    Path("profiles/older.json").write_bytes(Path("profiles/mlp.json").read_bytes())
    os.utime("profiles/older.json", (1, 1))
    opened, found = counted
    run("solve", "--solver", "even", "--topology", "pair")
    assert found == {"pair": 1, "mlp.onnx": 1}
    assert opened == {"mlp.json": 1, "older.json": 1, "pair.yaml": 1}


def test_simulate_finds_each_name_and_reads_each_file_once(counted):
    run(*SOLVE)
    for counter in counted:
        counter.clear()
    opened, found = counted
    run("simulate", "strategy.json", "--trace", "trace.json")
    assert found == {"pair": 1}
    assert opened == {"strategy.json": 1, "mlp.json": 1, "pair.yaml": 1}


def test_inputs_that_are_read_are_taken_as_they_are(folder):
    inputs = planner.read_inputs("mlp", topology="pair", gpus=1)
    assert planner.read_inputs(inputs) is inputs
    with pytest.raises(ValueError, match="the inputs are read already"):
        planner.solve(inputs, topology="pair")
    Path("pair.yaml").unlink()
    Path("profiles/mlp.json").unlink()
    assert planner.solve(inputs, solvers=("even",)).num_devices == 1


def test_inputs_have_the_paths_of_what_was_read_and_none_of_what_was_given(folder):
    inputs = planner.read_inputs("mlp", topology="pair")
    paths = {"profile": "profiles/mlp.json", "topology": "pair.yaml", "model": "mlp.onnx"}
    assert inputs.paths == {meaning: Path(path) for meaning, path in paths.items()}
    (profile,) = inputs.profiles
    given = planner.read_inputs(replace(profile, model_path=None), topology=inputs.topology)
    assert given.paths == {}
    assert given.model is inputs.model is None
    assert planner.read_inputs("mlp", topology="pair", with_model=True).model is not None


def test_the_inputs_of_a_search_are_no_strategy(folder):
    with pytest.raises(ValueError, match="expected the inputs of a strategy"):
        planner.simulate(planner.read_inputs("mlp", topology="pair"))


def test_a_strategy_is_read_with_what_it_was_made_for(folder):
    run(*SOLVE, "--gpus", "1", "-o", "plans/s.json")
    inputs = planner.read_plan_inputs("plans/s.json")
    assert inputs.plan == planner.read_strategy("plans/s.json")
    assert len(inputs.topology.devices) == 1
    assert inputs.paths["strategy's profile"].samefile("profiles/mlp.json")
    assert inputs.paths["strategy's model"].samefile("mlp.onnx")
    assert planner.simulate(inputs) == planner.simulate("plans/s.json")
    write_profile(replace(inputs.profiles[0], threads=2), Path("other.json"))
    with pytest.raises(planner.PlannerError, match=r"plans/s\.json: made for profile"):
        planner.read_plan_inputs("plans/s.json", profile="other.json")


@pytest.mark.parametrize("written", [(), ("--trace", "trace.json"), ("--log-file", "log.jsonl")])
def test_launch_reads_the_strategy_once(counted, written):
    run(*SOLVE, "--gpus", "1")
    for counter in counted:
        counter.clear()
    opened, _ = counted
    run("launch", "strategy.json", "--steps", "1", *written)
    assert opened == {"strategy.json": 1}


@pytest.mark.parametrize("written", [(), ("--trace", "trace.json")])
def test_the_parent_of_ranks_reads_the_strategy_once(counted, written, monkeypatch):
    run(*SOLVE, "--gpus", "1")
    for counter in counted:
        counter.clear()
    opened, _ = counted
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "planner.launcher.failures.monitor.start_ranks",
        lambda command, nproc, **how: started.append((command[:2], nproc)) or 0,
    )
    run("launch", "strategy.json", "--nproc", "1", *written)
    assert opened == {"strategy.json": 1}
    assert started == [(["launch", "strategy.json"], 1)]


@pytest.mark.parametrize("more", [(), ("--nproc", "1")])
def test_launch_starts_nothing_where_it_would_overwrite_a_file(folder, more, monkeypatch):
    run(*SOLVE, "--gpus", "1")
    before = Path("mlp.onnx").read_bytes()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(
        "planner.launcher.failures.monitor.start_ranks", lambda *given, **how: pytest.fail()
    )
    message = run("launch", "strategy.json", "--trace", "mlp.onnx", *more, code=1).output
    assert "mlp.onnx is the strategy's model itself, and would be overwritten" in message
    assert Path("mlp.onnx").read_bytes() == before


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_on_other_hosts_hear_that_the_strategy_cannot_be_read(folder, monkeypatch, rank):
    told = []
    seat = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**seat, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    rendezvous = import_module("planner.launcher.rendezvous")
    monkeypatch.setattr(rendezvous, "common_store", lambda *seat: None)
    monkeypatch.setattr(rendezvous, "report_failure", lambda store, *said: told.append(said))
    with pytest.raises(planner.PlannerError, match="there is no such file"):
        planner.launch("none.json")
    with pytest.raises(planner.PlannerError, match="there is no such file"):
        planner.trainer("none.json")
    assert [(rank, "none.json" in said) for rank, said in told] == [(rank, True), (rank, True)]

    def refuse(plan):
        raise planner.PlannerError("would overwrite")

    run(*SOLVE, "--gpus", "1")
    with pytest.raises(planner.PlannerError, match="would overwrite"):
        planner.launch("strategy.json", check=refuse)
    assert told[2:] == [(rank, "would overwrite")]
