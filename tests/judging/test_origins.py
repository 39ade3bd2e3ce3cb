"""The profile of a strategy is found again where it was."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.files import artefact_hash, read_plan, read_profile, write_profile
from tests.support.builders import graph_of, profile_of
from tests.support.commands import run

PAIR = """
format: planner-topology/1
name: pair
device: T4
levels: [{name: gpu, count: 2, bandwidth: 10 GB/s, latency: 5 us}]
"""


def profile(time_s):
    return replace(profile_of(graph_of([[], [0], [1]]), [time_s] * 3), device_type="T4")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A profile that is not in ./profiles, where another one is the newest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    for name in ("profiles", "elsewhere", "plans"):
        (tmp_path / name).mkdir()
    write_profile(profile(1e-3), tmp_path / "elsewhere" / "mine.json")
    write_profile(profile(2e-3), tmp_path / "profiles" / "newest.json")
    return tmp_path


def solve(output):
    arguments = ["--profile", "elsewhere/mine.json", "--topology", "pair.yaml", "-o", output]
    return json.loads(run("solve", *arguments, "--solver", "single", "--json").stdout)


def simulated(strategy, *arguments, code=0):
    done = run("simulate", strategy, "--topology", "pair.yaml", "--json", *arguments, code=code)
    return done.output if code else json.loads(done.stdout)["iteration_s"]


def test_simulate_right_after_solve_finds_the_profile(folder):
    planned = solve("plans/s.json")
    assert read_plan(Path("plans/s.json")).profile_path == "../elsewhere/mine.json"
    assert simulated("plans/s.json") == planned["iteration_s"]


def test_the_path_is_as_seen_from_the_strategy_not_from_where_one_works(folder, monkeypatch):
    planned = solve("plans/s.json")
    (folder / "plans" / "pair.yaml").write_text(PAIR)
    monkeypatch.chdir(folder / "plans")
    assert simulated("s.json") == planned["iteration_s"]


def test_a_profile_that_was_moved_is_looked_for_among_the_newest(folder):
    planned = solve("s.json")
    Path("elsewhere/mine.json").rename("profiles/moved.json")
    Path("profiles/newest.json").unlink()
    assert simulated("s.json") == planned["iteration_s"]


def test_another_profile_at_its_place_is_not_taken_for_it(folder):
    solve("s.json")
    write_profile(profile(3e-3), Path("elsewhere/mine.json"))
    newest = artefact_hash(read_profile(Path("profiles/newest.json")))
    assert f"profiles/newest.json is {newest[:12]}" in simulated("s.json", code=1)


def test_a_profile_that_is_given_goes_before_the_strategys_own(folder):
    solve("s.json")
    said = simulated("s.json", "--profile", "profiles/newest.json", code=1)
    assert "profiles/newest.json is" in said
