"""The profile of a strategy is found again where it was."""

import json
from dataclasses import replace
from pathlib import Path

from planner.api import lookup as origins
from planner.artefacts.files import artefact_hash, read_plan, read_profile, write_profile
from planner.artefacts.topology import take
from planner.planning.portfolio import compare
from tests.planning.conftest import PAIR, chain_of_three
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.commands import run


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
    write_profile(chain_of_three(3e-3), Path("elsewhere/mine.json"))
    newest = artefact_hash(read_profile(Path("profiles/newest.json")))
    assert f"profiles/newest.json is {newest[:12]}" in simulated("s.json", code=1)


def test_a_profile_that_is_given_goes_before_the_strategys_own(folder):
    solve("s.json")
    said = simulated("s.json", "--profile", "profiles/newest.json", code=1)
    assert "profiles/newest.json is" in said


def test_the_part_of_a_topology_that_a_plan_is_for_is_found_at_once(monkeypatch):
    """Next to as many devices as it uses, or of all; and none is looked for in another topology."""
    whole = cluster([unit_type()] * 64, 1e9, 0.0)
    hashed = []
    monkeypatch.setattr(
        origins, "artefact_hash", lambda one: hashed.append(one) or artefact_hash(one)
    )
    problem = problem_of(profile_of(graph_of([[], [0]]), [1.0] * 2), take(whole, 4), 1)
    plan = compare(problem, ("single",)).best.plan
    for part in (take(whole, 4), whole):
        made_for = replace(plan, topology_hash=artefact_hash(part))
        hashed.clear()
        assert origins.topology_of(made_for, "s.json", whole, "w", is_given=True) == part
        assert len(hashed) <= 5
    hashed.clear()
    other = replace(whole, name="another")
    assert origins.topology_of(plan, "s.json", other, "w", is_given=True) == other
    assert not hashed
