"""`planner simulate`, as a user meets it."""

import json
import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from planner.artefacts.files import write_profile
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.schedules.orders import default_warmups, with_microbatches
from tests.support.builders import graph_of, profile_of
from tests.support.commands import PAIR, chain_on_two_hosts, run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a chain of six operators and two hosts of two T4."""
    monkeypatch.chdir(tmp_path)
    chain_on_two_hosts(tmp_path)
    return tmp_path


def solved(*arguments):
    given = ["solve", "--topology", "pair.yaml", "--solver", "even", "--json", *arguments]
    return json.loads(run(*given).stdout)


def simulated(*arguments):
    return json.loads(run("simulate", *arguments, "--json").stdout)


def test_what_solve_said_is_said_again(folder):
    planned = solved("--gpus", "3")
    again = simulated("strategy.json", "--topology", "pair.yaml")
    for name in ("iteration_s", "throughput", "bubble_fraction", "gap", "stages", "num_stages",
                 "lower_bound_s", "status", "solver"):  # fmt: skip
        assert again[name] == planned[name], name
    assert [one["device"] for one in again["timeline"]] == [0, 1, 2]
    for one in again["timeline"]:
        parts = one["compute_s"] + one["communication_s"] + one["idle_s"]
        assert parts == pytest.approx(again["iteration_s"])


def test_a_plan_for_more_processes_than_cores_finds_its_topology_again(folder):
    num_processes = str(os.cpu_count() + 1)
    given = ["--topology", "local", "--gpus", num_processes, "--solver", "data-parallel"]
    planned = json.loads(run("solve", *given, "--json").stdout)
    assert simulated("strategy.json")["iteration_s"] == planned["iteration_s"]


def test_the_table_shows_stages_and_devices(folder):
    solved()
    text = run("simulate", "strategy.json", "--topology", "pair.yaml").output
    for said in ("Stages, per microbatch", "Devices, in an iteration of", "gpu0", "lower bound"):
        assert said in text


def test_devices_idle_for_reasons_and_the_critical_path_is_as_long_as_the_iteration(folder):
    solved()
    found = simulated("strategy.json", "--topology", "pair.yaml")
    for one in found["timeline"]:
        assert sum(wait["idle_s"] for wait in one["idle"]) == pytest.approx(one["idle_s"])
    causes = {wait["cause"] for one in found["timeline"] for wait in one["idle"]}
    assert {"warm-up", "cool-down"} <= causes
    path = found["critical_path"]
    assert path[0]["start_s"] == 0
    assert path[-1]["end_s"] == found["iteration_s"]
    for before, after in pairwise(path):
        assert before["end_s"] == after["start_s"]


def test_the_picture_has_a_row_for_every_device(folder):
    solved()
    given = ["strategy.json", "--topology", "pair.yaml", "--gantt", "--svg", "plan.svg"]
    text = run("simulate", *given).output
    rows = [line for line in text.splitlines() if line.startswith("gpu") and line.endswith("|")]
    assert [row.split()[0] for row in rows] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert len({len(row) for row in rows}) == 1
    assert "numbers are microbatches" in text
    assert "transfer" in text.split("The critical path")[1]
    assert ET.fromstring(Path("plan.svg").read_text()).tag.endswith("svg")


def test_too_many_actions_for_a_picture_are_said(folder, monkeypatch):
    monkeypatch.setattr("planner.planning.plans.MAX_ACTIONS", 10)
    solved()
    given = ["strategy.json", "--topology", "pair.yaml"]
    assert simulated(*given)["critical_path"] is None
    assert "take fewer --microbatches" in run("simulate", *given, "--gantt", code=1).output


def test_a_trace_is_written_that_has_all_devices(folder):
    solved()
    given = ["strategy.json", "--topology", "pair.yaml", "--trace", "trace.json"]
    assert "wrote trace.json" in run("simulate", *given).output
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 4


def test_more_microbatches_and_other_links_are_what_if(folder):
    planned = solved()
    given = ["strategy.json", "--topology", "pair.yaml"]
    longer = simulated(*given, "--microbatches", "32")
    assert longer["bubble_fraction"] < planned["bubble_fraction"]
    assert longer["iteration_s"] > planned["iteration_s"]
    slower = simulated(*given, "--set", "levels.host.bandwidth=1Mbps")
    assert slower["iteration_s"] > planned["iteration_s"]


@pytest.mark.parametrize(
    "changes",
    ["--set levels.host.bandwidth=1Mbps", "--drop host1", "--add-host host0 --drop host1"],
)
def test_a_strategy_for_a_changed_topology_says_what_to_give(folder, changes):
    planned = solved(*changes.split(), "--solver", "data-parallel")
    own = f"--topology pair {changes}"
    said = run("simulate", "strategy.json", code=1).output
    assert f"made for a topology pair that was changed; give the same options, {own}," in said
    same = run("simulate", "strategy.json", *own.split(), "--json")
    assert json.loads(same.stdout)["iteration_s"] == planned["iteration_s"]
    assert "was planned with" not in same.output
    other = run("simulate", "strategy.json", "--topology", "pair", "--set",
                "levels.host.bandwidth=2Mbps").output  # fmt: skip
    assert f"was planned with {changes}, and is simulated with --set" in other
    assert f"planner simulate strategy.json {own}" in other
    Path("strategy.json").rename("my strategy.json")
    quoted = run("simulate", "my strategy.json", "--topology", "pair").output
    assert f"planner simulate 'my strategy.json' {own}" in quoted


def test_a_topology_that_is_too_small_is_told_the_changes(folder):
    solved("--add-host", "host0", "--solver", "data-parallel")
    said = run("simulate", "strategy.json", "--topology", "pair", code=1).output
    assert "the strategy's need" in said and "; it was planned with --add-host host0" in said


def test_every_replica_needs_a_microbatch(folder):
    given = ["solve", "--topology", "pair.yaml", "--gpus", "3", "--cuts", "op2", "--replicas"]
    run(*given, "2,1", "--solver", "manual")
    longer = ["simulate", "strategy.json", "--topology", "pair.yaml", "--microbatches"]
    said = run(*longer, "1", code=1).output
    assert "--microbatches 1: stage 0 has 2 replicas and needs at least 2 microbatches" in said
    run(*longer, "2")


def test_a_strategy_of_other_operators_does_not_fit_its_profile(folder):
    solved("--gpus", "3")
    plain = json.loads(Path("strategy.json").read_text())
    plain["strategy"]["stages"][0]["operators"][0] = "other"
    Path("strategy.json").write_text(json.dumps(plain))
    for command in (["simulate", "strategy.json", "--topology", "pair.yaml"],
                    ["convert", "strategy.json", "graph.txt"]):  # fmt: skip
        said = " ".join(run(*command, code=1).output.split())
        assert "does not fit its profile: operators missing or unknown: ['op0', 'other']" in said


def test_ones_own_cuts_need_no_strategy(folder):
    given = ["--topology", "pair.yaml", "--gpus", "3", "--cuts", "op2", "--replicas", "2,1"]
    names = [
        o["name"] for o in json.loads(Path("profiles/chain.json").read_text())["graph"]["operators"]
    ]
    given[given.index("op2")] = names[2]
    mine = simulated(*given)
    assert mine["solver"] == "manual"
    assert [stage["devices"] for stage in mine["stages"]] == [[0, 1], [2]]
    tight = [*given, "--device-memory", "1 MiB", "--reserve", "0 B"]
    assert "do not fit" in run("simulate", *tight, code=3).output


def test_the_profile_and_the_topology_are_the_strategys(folder):
    solved("--gpus", "3")
    assert simulated("strategy.json")["num_stages"] == 3  # pair.yaml is found by its name
    Path("pair.yaml").rename("two.yaml")
    missing = run("simulate", "strategy.json", code=1).output
    assert "made for topology pair" in missing
    assert "--topology" in missing
    Path("two.yaml").rename("pair.yaml")
    graph = graph_of([[], [0]], [1000] * 2, [10**6] * 2)
    other = replace(profile_of(graph, [0.01] * 2), device_type="T4")
    write_profile(other, folder / "other.json")
    given = ["strategy.json", "--topology", "pair.yaml", "--profile", "other.json"]
    assert "made for profile" in run("simulate", *given, code=1).output


def test_another_topology_is_taken_when_it_is_named(folder):
    planned = solved()
    Path("slow.yaml").write_text(PAIR.replace("1 Gbps", "10 Mbps"))
    found = simulated("strategy.json", "--topology", "slow.yaml")
    assert found["iteration_s"] > planned["iteration_s"]
    Path("small.yaml").write_text(PAIR.replace("count: 2", "count: 1", 1))
    few = run("simulate", "strategy.json", "--topology", "small.yaml", code=1).output
    assert "has 2 devices, the strategy's need 4" in few


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a strategy, or --cuts"),
        (["strategy.json", "--schedule", "gpipe"], "--schedule gpipe is for your own cuts"),
        (["strategy.json", "--gpus", "2"], "--gpus is for your own cuts"),
        (["nothing.json"], "nothing.json"),
        (["pair.yaml"], "pair.yaml"),
        (["strategy.json", "--trace", "strategy.json"], "is the strategy itself"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message(folder, arguments, said):
    solved()
    result = run("simulate", *arguments, code=1)
    assert said in result.output
    assert "Traceback" not in result.output


def test_stages_keep_their_depth_beyond_the_default_for_another_number_of_microbatches():
    for schedule, extra in ((ScheduleName.ONE_F_ONE_B, 1), (ScheduleName.GPIPE, 0)):
        deep = default_warmups((1, 1, 1), 12, extra, schedule)
        stages = tuple(
            Stage.whole((f"o{s}",), (s,), depth, False) for s, depth in enumerate(deep)
        )  # fmt: skip
        strategy = Strategy(stages, schedule, 12)
        more = with_microbatches(strategy, 24)
        expected = default_warmups((1, 1, 1), 24, extra, schedule)
        assert tuple(stage.warmup for stage in more.stages) == expected
        fewer = with_microbatches(strategy, 2)
        assert all(stage.warmup <= 2 for stage in fewer.stages)
        assert with_microbatches(strategy, 12) == strategy
