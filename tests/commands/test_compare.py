"""`planner compare`: every solver on one problem, judged by the simulator."""

import csv
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import write_profile
from planner.artefacts.options import Objective
from planner.clusters.yaml.read import shipped_device_type
from planner.commands.terminal import listening
from planner.planning.portfolio import GOOD_ENOUGH, compare
from planner.solvers.registry import automatic
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.commands import run

PAIR = """
format: planner-topology/1
name: pair
device: T4
levels: [{name: gpu, count: 2, bandwidth: 10 GB/s, latency: 5 us}]
"""


def two_branches(memory=10**9):
    """Two branches of three operators between a first and a last one, on two devices."""
    graph = graph_of([[], [0], [1], [2], [0], [4], [5], [3, 6]], [1000] * 8, [10**6] * 8)
    profile = replace(profile_of(graph, [0.01] * 8), device_type="unit")
    topology = cluster([unit_type(memory=memory)] * 2, bandwidth=1e9)
    return problem_of(profile, topology, 1, objective=Objective.LATENCY)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the branches as a profile and two T4."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    (tmp_path / "profiles").mkdir()
    profile = replace(two_branches().profile, device_type="T4")
    write_profile(profile, tmp_path / "profiles" / "branches.json")
    return tmp_path


def test_every_solver_has_a_row_however_good_an_earlier_one_is():
    found = compare(two_branches(), automatic(), 2.0, full_time=True)
    assert [row.solver for row in found.rows] == list(automatic())
    gaps = [row.plan.certificate.gap for row in found.rows if row.plan]
    assert min(gaps[:-1]) <= GOOD_ENOUGH  # here solve would have stopped
    missing = {row.solver: row.reason for row in found.rows if row.plan is None}
    splitting = {"megatron", "zero", "intra-op", "inter-op", "expert", "heuristic"}
    assert set(missing) == {"pipedream", *splitting}
    no_rules = "the profile has no rules by which operators are split; planner profile makes them"
    assert missing["megatron"] == missing["zero"] == no_rules
    assert "levels" in missing["pipedream"]


def test_the_command_shows_table_bars_and_reasons_and_writes_csv(folder):
    arguments = ["--topology", "pair.yaml", "--time-limit", "2s", "--csv", "rows.csv"]
    text = run("compare", *arguments).output
    for said in ("Strategies, judged by the simulator", "█", "the best plan is", "wrote rows.csv"):
        assert said in text
    rows = list(csv.DictReader(Path("rows.csv").read_text().splitlines()))
    assert [row["solver"] for row in rows] == list(automatic(rules=False))
    planned = [row for row in rows if row["iteration_s"]]
    assert len(planned) == len(rows)
    for row in planned:
        assert float(row["gap"]) >= 0
        assert float(row["iteration_s"]) >= float(row["lower_bound_s"])
    assert not Path("strategy.json").exists()


def test_json_has_the_fields_of_solve_for_every_solver(folder):
    arguments = ["--topology", "pair.yaml", "--solver", "single", "--solver", "heft", "--json"]
    found = json.loads(run("compare", *arguments).stdout)
    assert [row["solver"] for row in found["compared"]] == ["single", "heft"]
    assert found["iteration_s"] == min(row["iteration_s"] for row in found["compared"])
    assert found["strategy"] is None


def test_a_changed_cluster_is_compared_on(folder):
    arguments = ["--topology", "pair.yaml", "--solver", "single", "--json"]
    before = json.loads(run("compare", *arguments).stdout)
    after = json.loads(
        run("compare", *arguments, "--set", "devices.gpu0.type=V100-SXM2-16GB").stdout
    )
    assert after["iteration_s"] < before["iteration_s"]


def test_nothing_that_fits_exits_with_3(folder):
    arguments = ["--topology", "pair.yaml", "--device-memory", "1 KiB", "--reserve", "0 B"]
    assert "alone take" in run("compare", *arguments, code=3).output


def test_rows_are_not_written_over_the_profile(folder):
    arguments = ["--topology", "pair.yaml", "--csv", "profiles/branches.json"]
    assert "is the profile itself" in run("compare", *arguments, code=1).output


def test_netsplit_takes_its_switches(folder):
    given = ["compare", "--topology", "pair.yaml", "--solver", "netsplit", "--json"]
    given += ["--objective", "latency", "--microbatches", "1"]
    published = json.loads(run(*given, "--relaxed").stdout)
    full = json.loads(run(*given, "--engine", "gurobi").stdout)
    # Without no-overlap one device does all branches at once, or so it thinks.
    assert published["space_bound_s"] <= full["space_bound_s"] * 1.001
    assert published["bottleneck_s"] >= full["bottleneck_s"] * 0.999
    given[given.index("latency")] = "bottleneck"
    apart = json.loads(run(*given, "--no-contiguous").stdout)
    together = json.loads(run(*given, "--contiguous").stdout)
    assert apart["bottleneck_s"] <= together["bottleneck_s"] * 1.001


def test_a_plan_that_fits_as_published_only_is_written_with_a_note(folder):
    profile = replace(two_branches().profile, device_type="T4")
    # (5-18) does not count this stash.
    costs = tuple(replace(cost, stash_private_bytes=10**8) for cost in profile.operators)
    write_profile(replace(profile, operators=costs), folder / "profiles" / "branches.json")
    given = ["--topology", "pair.yaml", "--solver", "netsplit", "--microbatches", "1"]
    context = shipped_device_type("T4").process.context_bytes
    given += ["--device-memory", f"{context + 10**8} B", "--reserve", "0 B"]
    assert "no strategy fits" in run("solve", *given, code=3).output
    text = " ".join(run("solve", *given, "--relaxed").output.split())
    assert "note: it does not fit by the planner's count: stage" in text
    assert Path("strategy.json").exists()
    text = " ".join(run("compare", *given, "--relaxed").output.split())
    assert "note: netsplit's plan does not fit by the planner's count: stage" in text


def test_what_solvers_log_is_shown_and_warnings_are_lines_on_standard_error(capsys):
    states, log = [], logging.getLogger("planner.solvers.netsplit.cpsat")
    with listening(states.append, logging.INFO):
        log.info("incumbent %s", "12 ms")
        log.warning("no licence")
    log.info("nobody hears this")
    assert states == ["incumbent 12 ms"]
    assert capsys.readouterr().err == "warning: no licence\n"
