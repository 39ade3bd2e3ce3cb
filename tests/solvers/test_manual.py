"""The user's own cuts."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.files import write_profile
from planner.artefacts.graph import predecessors
from planner.artefacts.strategy import violations
from planner.planning.portfolio import compare
from planner.solvers.manual import Manual, solve, stages_of
from planner.support.errors import OptionError
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.commands import run

# 0 -> 1 -> 2 -> 5 and 0 -> 3 -> 4 -> 5
BRANCHES = [[], [0], [1], [0], [3], [2, 4]]


def problem(cuts, replicas=(), devices=3, memory=10**9):
    profile = profile_of(graph_of(BRANCHES, [1000] * 6, [1000] * 6), [0.01] * 6)
    topology = cluster([unit_type(memory=memory)] * devices)
    return problem_of(profile, topology, 4, switches=(Manual(tuple(cuts), tuple(replicas)),))


def names(graph, *stages):
    return [[graph.operators[v].name for v in inside] for inside in stages]


def test_a_stage_holds_its_last_operator_and_what_it_needs():
    graph = problem([]).profile.graph
    two = [o.name for o in graph.operators]
    assert stages_of(graph, [two[2]]) == ((0, 1, 2), (3, 4, 5))
    assert stages_of(graph, [two[1], two[4]]) == ((0, 1), (3, 4), (2, 5))
    assert stages_of(graph, []) == ((0, 1, 2, 3, 4, 5),)


def test_stages_take_devices_in_order_as_many_as_are_asked_for():
    graph = problem([]).profile.graph
    asked = problem([graph.operators[2].name], (2, 1))
    strategy = solve(asked, 1.0).strategy
    assert [stage.devices for stage in strategy.stages] == [(0, 1), (2,)]
    assert [len(stage.operators) for stage in strategy.stages] == [3, 3]


@pytest.mark.parametrize(
    ("cuts", "replicas", "said"),
    [
        (["nothing"], (), "there is no operator nothing"),
        ([2, 1], (), "is in a stage before"),
        ([5], (), "nothing is left after"),
        ([2], (1, 1, 1), "expected 2 numbers, one per stage, got 3"),
        ([2], (2, 2), "4 devices are needed, there are 3"),
    ],
)
def test_a_mistake_in_the_cuts_is_said(cuts, replicas, said):
    graph = problem([]).profile.graph
    named = [graph.operators[v].name if isinstance(v, int) else v for v in cuts]
    with pytest.raises(OptionError, match=said):
        solve(problem(named, replicas), 1.0)


def test_a_name_that_is_nearly_right_is_offered():
    graph = problem([]).profile.graph
    right = graph.operators[2].name
    with pytest.raises(OptionError, match=f"did you mean .*{right}"):
        solve(problem([right + "x"]), 1.0)


def test_cuts_that_do_not_fit_are_a_row_with_a_reason():
    graph = problem([]).profile.graph
    comparison = compare(problem([graph.operators[2].name], memory=3000), ["manual"], 1.0)
    assert comparison.best is None
    assert comparison.rows[0].reason


@st.composite
def cut_graphs(draw):
    size = draw(st.integers(2, 8))
    feeds = [[]] + [
        sorted(draw(st.sets(st.integers(0, v - 1), min_size=1, max_size=2)))
        for v in range(1, size)
    ]  # fmt: skip
    cuts = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    return feeds, cuts


@given(cut_graphs())
def test_stages_are_differences_of_downsets_and_a_right_strategy(drawn):
    feeds, cuts = drawn
    graph = graph_of(feeds)
    try:
        stages = stages_of(graph, [graph.operators[v].name for v in cuts])
    except OptionError:
        return
    stage_of = {v: s for s, inside in enumerate(stages) for v in inside}
    assert sorted(stage_of) == list(range(len(feeds)))
    for v, before in enumerate(predecessors(graph)):
        assert all(stage_of[u] <= stage_of[v] for u in before)
    profile = profile_of(graph, [0.01] * len(feeds))
    asked = problem_of(
        profile,
        cluster([unit_type()] * 4),
        switches=(Manual(tuple(graph.operators[v].name for v in cuts)),),
    )
    assert not violations(solve(asked, 1.0).strategy, graph, 4)


def test_solve_and_compare_judge_the_cuts_like_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = problem([])
    write_profile(replace(given.profile, device_type="T4"), tmp_path / "p.json")
    (tmp_path / "t.yaml").write_text(
        "format: planner-topology/1\nname: t\ndevice: T4\n"
        "levels: [{name: gpu, count: 3, bandwidth: 10 GB/s, latency: 5 us}]\n"
    )
    cut = given.profile.graph.operators[2].name
    arguments = ["--profile", "p.json", "--topology", "t.yaml", "--cuts", cut, "--replicas", "2,1"]
    rows = json.loads(
        run("compare", *arguments, "--solver", "single", "--solver", "manual", "--json").stdout
    )
    assert [row["solver"] for row in rows["compared"]] == ["single", "manual"]
    mine = json.loads(run("solve", *arguments, "--solver", "manual", "--json").stdout)
    assert mine["iteration_s"] == rows["compared"][1]["iteration_s"]
    assert [stage["devices"] for stage in mine["stages"]] == [[0, 1], [2]]
    assert "needs --cuts" in run("solve", *arguments[:4], "--solver", "manual", code=1).output
    assert (
        "expected a whole number of at least 1"
        in run("solve", *arguments[:6], "--replicas", "a", code=2).output
    )


def test_an_unknown_cut_is_answered_with_names_that_there_are():
    few, many = (graph_of([[v - 1] if v else [] for v in range(n)]) for n in (3, 48))
    with pytest.raises(OptionError, match=r"no operator zebra; the operators: op0, op1, op2$"):
        stages_of(few, ["zebra"])
    with pytest.raises(OptionError, match=r"did you mean .*op12.*\? planner convert .* all names"):
        stages_of(many, ["op12x"])
    with pytest.raises(OptionError) as error:
        stages_of(many, ["zebra"])
    assert "some of the 48 operators, in their order: op0, op4, op8, " in str(error.value)
    assert str(error.value).endswith(
        "op44; planner convert PROFILE.json graph.txt writes all names"
    )
