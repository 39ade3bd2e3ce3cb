"""What the portfolio asks, and how often."""

import json

import pytest

from planner.costs import evaluate as evaluator
from planner.files import read_plan
from planner.judging.portfolio import compare
from planner.solvers import SOLVERS, baselines
from planner.solvers.pipedream import solve as pipedream
from tests.support.builders import cluster, graph_of, hierarchy, problem_of, profile_of, unit_type
from tests.support.commands import run


def small(topology):
    """A chain that no solver splits well enough to end the search."""
    graph = graph_of([[], [0], [1], [2]], [8000] * 4, [10**6] * 4)
    return problem_of(profile_of(graph, [1e-3, 3e-3, 1e-3, 2e-3]), topology)


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of a function of a module."""

    def count(module, name):
        calls, function = [], getattr(module, name)

        def counting(*arguments, **named):
            calls.append(arguments)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, counting)
        return calls

    return count


def test_every_solver_is_asked_once_though_one_starts_from_the_others(counted):
    pipedreams = counted(pipedream, "optimum")
    evens = counted(baselines, "_pipelines")
    rows = {row.solver: row for row in compare(small(hierarchy([2], [1e8]))).rows}
    assert all(rows[name].plan for name in ("antichain", "even", "pipedream"))
    assert len(pipedreams) == len(evens) == 1


def test_the_judge_finds_what_a_solver_has_evaluated_also_when_a_plan_is_known(counted):
    problem = small(cluster([unit_type()] * 2, bandwidth=1e8))
    programs = counted(evaluator, "program")
    rows = compare(problem, ["single", "data-parallel"]).rows
    assert all(row.plan for row in rows)
    strategies = {strategy for strategy, *_ in programs}
    assert len(programs) == len(strategies) > 1


def test_antichain_alone_answers_as_it_does_in_the_portfolio():
    problem = small(hierarchy([2], [1e8]))
    (alone,) = compare(problem, ["antichain"]).rows
    among = {row.solver: row for row in compare(problem, time_limit_s=100.0).rows}
    assert alone.plan.strategy == among["antichain"].plan.strategy
    answers = {}
    SOLVERS["antichain"](problem, 10.0, (), answers)
    assert set(answers) == set(SOLVERS["antichain"].starts_from)


def test_solve_asks_pipedream_once_and_shows_its_report(folder, counted):
    calls = counted(pipedream, "optimum")
    given = ["--profile", "elsewhere/mine.json", "--topology", "pair.yaml"]
    text = run("solve", *given, "--solver", "pipedream").output
    assert "PipeDream's cost model, per minibatch" in text
    assert len(calls) == 1


def test_pipedreams_own_cost_model_is_shown_beside_the_same_strategy_as_launched(folder):
    given = ["--profile", "elsewhere/mine.json", "--topology", "pair.yaml"]
    given += ["--cost-model", "pipedream"]
    found = json.loads(run("solve", *given, "--json").stdout)
    plan = read_plan(folder / "strategy.json")
    assert found["pipedream"]["launched_iteration_s"] == plan.prediction.iteration_s
    assert found["latency_s"] is None  # the planner's figures are not mixed with PipeDream's
    text = run("solve", *given).output
    count = plan.strategy.num_microbatches
    assert f"as launched, synchronously: an iteration of {count} minibatches takes" in text


@pytest.mark.parametrize("objective", ["latency", "bottleneck"])
def test_the_objective_is_shown_and_the_gap_is_its_own(folder, objective):
    given = ["--profile", "elsewhere/mine.json", "--topology", "pair.yaml"]
    plain = run("solve", *given, "--solver", "even").output.splitlines()
    given += ["--objective", objective]
    found = json.loads(run("solve", *given, "--json").stdout)
    for row in (found, *(row for row in found["compared"] if row["gap"] is not None)):
        assert row["latency_s"] > 0
        expected = row[f"{objective}_s"] / row["lower_bound_s"] - 1
        assert row["gap"] == pytest.approx(expected, abs=1e-12)
    shown = run("solve", *given, "--solver", "even").output.splitlines()
    (head,) = (line for line in shown if "samples/s" in line)
    assert objective in head
    assert not any(objective in line for line in plain if "samples/s" in line)
