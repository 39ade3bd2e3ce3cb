"""`planner convert`, foreign profiles and PipeDream's switches on the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import read_plan, read_profile, write_profile, write_profiles
from planner.artefacts.formats.graph_txt import parse
from tests.support.builders import graph_of, profile_of
from tests.support.commands import run
from tests.support.profiles import read_any_profile

TOPOLOGY = """
format: planner-topology/1
name: two-level
device: V100-SXM2-16GB
levels:
  - {name: gpu, count: 2, bandwidth: 10 GB/s, latency: 0 us}
  - {name: host, count: 2, bandwidth: 1 GB/s, latency: 0 us}
"""


def graph_txt(times=(4.0, 2.0, 2.0, 4.0), parameters=(0, 4_000_000, 4_000_000, 40_000_000)):
    """An input and a chain of layers."""
    lines = [
        "node0 -- Input0 -- forward_compute_time=1.0, backward_compute_time=0.0,"
        " activation_size=4000.0, parameter_size=0.0"
    ]
    lines += [
        f"node{v + 1} -- Linear({v}) -- forward_compute_time={t}, backward_compute_time={t},"
        f" activation_size=[4000.0; {v}.0], parameter_size={p}.0"
        for v, (t, p) in enumerate(zip(times, parameters, strict=True))
    ]
    return "\n".join((*lines, *(f"\tnode{v} -- node{v + 1}" for v in range(len(times)))))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a graph and a topology."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.txt").write_text(graph_txt())
    (tmp_path / "levels.yaml").write_text(TOPOLOGY)
    return tmp_path


def solved(*arguments, code=0):
    """`solve` of the graph on the levels, as JSON."""
    given = ("--profile", "graph.txt", "--topology", "levels.yaml", "--json", *arguments)
    return json.loads(run("solve", *given, code=code).stdout)


# ------------------------------------------------------------------------------ solve


def test_a_graph_txt_is_planned_by_every_solver(folder):
    for solver in ("single", "data-parallel", "antichain", "pipedream", "even"):
        plan = solved("--solver", solver)
        assert plan["solver"] == solver
        assert plan["iteration_s"] > 0
        assert plan["partition"] is None
        assert (plan["pipedream"] is not None) == (solver == "pipedream")
    assert any("the file does not say from which device" in n for n in read_plan(
        Path("strategy.json")).notes)  # fmt: skip


def test_pipedreams_report_stands_beside_the_judges_figures(folder):
    plan = solved("--solver", "pipedream")
    report = plan["pipedream"]
    assert report["single_s"] == pytest.approx(0.024)
    assert report["pipeline_speedup"] == pytest.approx(0.024 / report["objective_s"])
    assert report["data_parallel_speedup"] == pytest.approx(0.024 / report["data_parallel_s"])
    assert [stage["devices"] for stage in report["stages"]] == [
        stage["devices"] for stage in plan["stages"]
    ]
    output = run(
        "solve", "--profile", "graph.txt", "--topology", "levels.yaml", "--solver", "pipedream"
    ).output
    for text in ("PipeDream's stages", "synchronisation", "transfer (not counted)", "split before",
                 "in flight", "one machine 24 ms", "speed-up", "devices not used: none",
                 "Strategies, judged by the simulator", "lower bound"):  # fmt: skip
        assert text in output


def test_under_pipedreams_cost_model_only_its_objective_is_said(folder):
    plan = solved("--cost-model", "pipedream")
    nulls = ("iteration_s", "throughput", "bubble_fraction", "gap", "lower_bound_s")
    for row in (plan, *plan["compared"]):
        assert all(row[name] is None for name in nulls)
        assert row["bottleneck_s"] == plan["pipedream"]["objective_s"]
    assert plan["solver"] == "pipedream"
    assert plan["status"] == "optimal"
    assert len(read_plan(Path("strategy.json")).strategy.stages) == plan["num_stages"]
    output = run(
        "solve", "--profile", "graph.txt", "--topology", "levels.yaml", "--cost-model", "pipedream"
    ).output
    assert "judged by the simulator" not in output
    assert "lower bound" not in output
    assert "chosen by PipeDream's cost model" in output


def test_the_switches_change_the_plan(folder):
    plain = solved("--cost-model", "pipedream")["pipedream"]
    straight = solved("--cost-model", "pipedream", "--straight-pipeline")
    assert [stage["replicas"] for stage in straight["pipedream"]["stages"]] == [[1, 1]] * 4
    counted = solved("--cost-model", "pipedream", "--activation-compression", "1e-6")["pipedream"]
    assert counted["transfers_counted"] and not plain["transfers_counted"]
    assert counted["objective_s"] > plain["objective_s"]
    fewer = solved("--cost-model", "pipedream", "--fewer-machines")["pipedream"]
    assert fewer["objective_s"] <= plain["objective_s"]


def test_a_memory_constraint_that_nothing_meets_exits_with_3_and_says_so(folder):
    given = ("--cost-model", "pipedream", "--straight-pipeline", "--memory-constraint")
    assert solved(*given)["status"] == "optimal"
    plan = solved(*given, "--device-memory", "1 KiB", code=3)
    assert plan["status"] == "infeasible"
    assert "memory constraint of 1 KiB" in plan["reason"]
    assert plan["pipedream"] is None and plan["bottleneck_s"] is None


def test_the_portfolio_says_why_pipedream_has_no_plan_without_levels(folder):
    output = run("solve", "--profile", "graph.txt", "--topology", "p3.yaml", "--gpus", "4",
                 "--solver", "pipedream", "--solver", "even").output  # fmt: skip
    assert "pipedream: PipeDream plans for a regular hierarchy" in output


def test_what_is_refused_for_another_reason_than_memory_is_not_told_to_have_more(folder):
    given = ["--profile", "graph.txt", "--gpus", "4", "--solver", "pipedream"]
    irregular = run("solve", *given, "--topology", "p3.yaml", code=3).output
    assert "no plan:\n  PipeDream plans for a regular hierarchy" in irregular
    few = run("solve", *given, "--topology", "levels.yaml", "--microbatches", "1", code=3).output
    assert "give --microbatches" in few
    small = run("solve", *given, "--topology", "levels.yaml", "--device-memory", "1 KiB", code=3)
    for output, short in ((irregular, False), (few, False), (small.output, True)):
        assert ("possible changes: a smaller --reserve" in output) is short


@pytest.mark.parametrize("ratio", ["0", "-1", "nan", "inf", "much"])
def test_a_compression_that_is_no_number_above_0_is_a_usage_error(folder, ratio):
    result = run("solve", "--activation-compression", ratio, code=2)
    assert "Invalid value for '--activation-compression'" in result.output


def test_another_solver_cannot_be_asked_under_pipedreams_cost_model(folder):
    given = ["--profile", "graph.txt", "--topology", "levels.yaml"]
    result = run("solve", *given, "--cost-model", "pipedream", "--solver", "even", code=1)
    assert "asks only the solver pipedream" in result.output


# ------------------------------------------------------------------------------ convert


def test_a_strategy_annotates_the_graph_that_it_was_made_for(folder):
    plan = solved("--solver", "pipedream")
    before = Path("graph.txt").read_text()
    run("convert", "strategy.json", "graph.txt", "--to", "pipedream")
    after = Path("graph.txt").read_text()
    stages = {n.name: n.stage for n in parse(after, Path("graph.txt")).nodes}
    assert stages["node0"] == 0
    expected = {
        name: s
        for s, stage in enumerate(read_plan(Path("strategy.json")).strategy.stages)
        for name in stage.operators
    }
    assert stages == {"node0": 0, **expected}
    assert max(stages.values()) == plan["num_stages"] - 1
    assert [one.rpartition(" -- stage_id=")[0] or one for one in after.splitlines()] == (
        before.splitlines()
    )
    assert "stage 1" in Path("graph.dot").read_text()
    # The stages change nothing of the profile: the strategy still belongs to it.
    run("convert", "strategy.json", "graph.txt")
    assert Path("graph.txt").read_text() == after


def test_a_strategy_of_a_planners_profile_becomes_a_new_graph(folder):
    profile = profile_of(graph_of([[], [0], [1], [2]]), [0.001] * 4)
    write_profile(profile, Path("profiles/chain.json"))
    run("solve", "--topology", "local.yaml", "--solver", "even", code=1)  # of unknown device
    Path("profiles/chain.json").unlink()
    run("convert", "graph.txt", "profiles/chain.json")
    run("solve", "--topology", "levels.yaml", "--solver", "even")
    run("convert", "strategy.json", "out/stages.txt", "--to", "pipedream")
    nodes = parse(Path("out/stages.txt").read_text(), Path("stages.txt")).nodes
    assert [node.stage for node in nodes] == [0, 0, 0, 1, 2]
    assert Path("out/stages.dot").is_file()


def test_a_strategy_of_another_profile_is_refused(folder):
    run("solve", "--profile", "graph.txt", "--topology", "levels.yaml", "--solver", "single")
    Path("other.txt").write_text(graph_txt(times=(1.0, 1.0, 1.0, 1.0)))
    for arguments in (
        ("strategy.json", "other.txt"),
        ("strategy.json", "new.txt", "--profile", "other.txt"),
    ):
        result = run("convert", *arguments, code=1)
        assert "strategy.json: made for profile" in result.output
        assert "give the one it was made for with --profile" in result.output
    assert not Path("new.txt").exists()
    result = run("convert", "strategy.json", "new.txt", code=1)
    assert "there is no profile" in result.output
    run("convert", "strategy.json", "new.txt", "--profile", "graph.txt")
    assert Path("new.txt").is_file()


def test_profiles_change_formats_and_stay_the_same(folder):
    output = run("convert", "graph.txt", "profile.json").output
    assert output == "wrote profile.json\n"
    profile = read_profile(Path("profile.json"))
    assert profile == read_any_profile(Path("graph.txt"))
    run("convert", "profile.json", "again.txt")
    assert read_any_profile(Path("again.txt")) == profile
    done = json.loads(run("convert", "graph.txt", "p.txt", "--to", "planner", "--json").stdout)
    assert done == {"written": ["p.txt"]}
    assert read_profile(Path("p.txt")) == profile


def test_of_several_profiles_in_a_file_the_one_of_the_strategy_is_taken(folder):
    run("convert", "graph.txt", "one.json")
    one = read_profile(Path("one.json"))
    write_profiles((one, replace(one, microbatch_size=2)), Path("both.json"))
    for path, size in (("one.json", 1), ("both.json", 2)):
        given = ("--topology", "levels.yaml", "--global-batch", "16", "--solver", "pipedream")
        run("solve", "--profile", path, *given)
        assert read_plan(Path("strategy.json")).microbatch_size == size
        run("convert", "strategy.json", f"{size}.txt", "--profile", "both.json")
    run("convert", "both.json", "again.json")
    assert Path("again.json").read_text() == Path("both.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("graph.txt", "graph.txt"), "would be overwritten by itself"),
        (("missing.txt", "x.json"), "missing.txt: there is no such file"),
        (("levels.yaml", "x.json"), "levels.yaml: expected a profile, got neither JSON nor lines"),
        (("graph.txt", "x.json", "--profile", "graph.txt"), "--profile is for strategies"),
        (("strategy.json", "x.json", "--to", "planner"), "which becomes a graph.txt"),
        (("graph.txt", "."), ". is a folder; name a file in it"),
        (("strategy.json", "x.dot"), "the picture is written beside it"),
    ],
)
def test_mistakes_are_said_in_one_message(folder, arguments, message):
    if "strategy.json" in arguments:
        run("solve", "--profile", "graph.txt", "--topology", "levels.yaml", "--solver", "single")
    result = run("convert", *arguments, code=1)
    assert result.output.startswith("Error: ")
    assert message in result.output


def test_the_profile_itself_is_not_overwritten_by_its_stages(folder):
    run("convert", "graph.txt", "profiles/chain.json")
    run("solve", "--topology", "levels.yaml", "--solver", "single")
    result = run("convert", "strategy.json", "profiles/chain.json", code=1)
    assert "is the profile itself" in result.output
