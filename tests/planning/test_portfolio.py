"""What the portfolio asks, and how often."""

import json
from dataclasses import replace

import pytest

from planner.artefacts.files import read_plan
from planner.artefacts.options import Objective
from planner.artefacts.strategy import ScheduleName
from planner.costs import evaluate as evaluator
from planner.planning import portfolio
from planner.planning.portfolio import ask_solvers, compare
from planner.solvers import SOLVERS, baselines
from planner.solvers.intra import solve as intra
from planner.solvers.netsplit.options import NetSplit, Pesto
from planner.solvers.pipedream import solve as pipedream
from tests.support.builders import cluster, graph_of, hierarchy, problem_of, profile_of, unit_type
from tests.support.commands import run
from tests.support.split_models import loaded, mlp
from tests.support.split_profiles import problem as split_problem
from tests.support.split_profiles import profiled


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


def test_netsplit_is_asked_for_several_microbatches_where_towers_pay():
    """Two towers of 12 ms and a head of 30 us, 8 microbatches: side by side they take 8 x 12.03 ms,
    in a pipeline one period more, and replicas have to sum 10 MB of gradients.
    """
    graph = graph_of([[], [], [0, 1]], [8] * 3, [10**7] * 3)
    profile = profile_of(graph, [4e-3, 4e-3, 1e-5])
    compared = compare(problem_of(profile, hierarchy([2], [1e9]), 8))
    seconds = {row.solver: row.plan.prediction.iteration_s for row in compared.rows}
    assert seconds["single"] == pytest.approx(8 * 24.03e-3, rel=1e-4)
    assert seconds["antichain"] == pytest.approx(8 * 12.03e-3 + 12e-3, rel=1e-4)
    assert seconds["netsplit"] == pytest.approx(8 * 12.03e-3, rel=1e-4)
    assert seconds["data-parallel"] > seconds["antichain"]
    assert compared.best.solver == "netsplit"


def test_netsplit_is_not_asked_for_several_microbatches_that_replicas_have_to_share():
    """Without replicas, 8 microbatches of the middle operator take 8 x 27 ms."""
    profile = profile_of(graph_of([[], [0], [1]], [8] * 3, [10**6] * 3), [1e-3, 9e-3, 1e-3])
    problem = problem_of(profile, hierarchy([4], [1e9]), 8)
    last = compare(problem).rows[-1]
    assert (last.solver, last.plan) == ("netsplit", None)
    assert last.reason == "not asked: without replicas nothing is faster than 219 ms"


def test_the_judge_finds_what_a_solver_has_evaluated_also_when_a_plan_is_known(counted):
    problem = small(cluster([unit_type()] * 2, bandwidth=1e8))
    programs = counted(evaluator, "program")
    rows = compare(problem, ["single", "data-parallel"]).rows
    assert all(row.plan for row in rows)
    strategies = {strategy for strategy, *_ in programs}
    assert len(programs) == len(strategies) > 1


def with_private_stash(*memory):
    """Two operators side by side whose kernels keep 40 kB each, which (5-18) does not count.

    Args:
        memory: of each device.
    """
    graph = graph_of([[], [0], [0], [1, 2]], [1000] * 4, [1000] * 4)
    profile = profile_of(graph, [0.1, 1.0, 1.0, 0.1])
    costs = [
        replace(cost, stash_private_bytes=40_000 if 0 < v < 3 else 0)
        for v, cost in enumerate(profile.operators)
    ]
    return problem_of(
        replace(profile, operators=tuple(costs)),
        cluster([unit_type(f"{n} bytes", memory=n) for n in memory]), 1, unit_type(),
        objective=Objective.LATENCY,
        switches=(NetSplit(relaxed=True), Pesto(pesto_printed=True)),
    )  # fmt: skip


@pytest.mark.parametrize("solver", ["netsplit", "pesto"])
def test_a_plan_that_fits_as_published_only_is_a_plan_with_a_note(solver):
    (row,) = compare(with_private_stash(30_000, 30_000), [solver]).rows
    assert row.plan is not None
    assert "the limit is 29.3 KiB" in row.shortage
    assert f"it does not fit by the planner's count: {row.shortage}" in row.plan.notes
    (row,) = compare(with_private_stash(10**6, 10**6), [solver]).rows
    assert row.plan is not None
    assert row.shortage is None


def test_pesto_as_printed_has_a_plan_where_not_even_the_parameters_fit():
    netsplit, pesto = compare(with_private_stash(1000, 1000), ["netsplit", "pesto"]).rows
    assert "alone take" in netsplit.reason
    assert netsplit.plan is None
    assert pesto.plan is not None
    assert pesto.shortage is not None


def test_a_plan_that_fits_goes_before_a_faster_one_that_does_not():
    found = compare(with_private_stash(200_000, 30_000), ["netsplit", "single"], full_time=True)
    netsplit, single = found.rows
    assert "the limit is 29.3 KiB" in netsplit.shortage
    assert netsplit.plan.prediction.latency_s < single.plan.prediction.latency_s
    assert found.best is single
    assert (
        ask_solvers(with_private_stash(30_000, 30_000), ["netsplit"], 5.0, print).best_rank is None
    )


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
    assert plan.strategy.schedule is ScheduleName.PIPEDREAM
    assert "as launched, with PipeDream's schedule:" in text
    assert f"by the simulator; an iteration of {plan.strategy.num_microbatches} minibatches" in text
    synchronous = run("solve", *given[:4], "--solver", "pipedream").output
    assert "as launched, synchronously: an iteration of" in synchronous


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


@pytest.fixture(scope="module")
def splittable(tmp_path_factory):
    """A chain of products that can be split, on links over which data parallelism is slow."""
    model = loaded(mlp(tmp_path_factory.mktemp("waiting") / "mlp.onnx"))
    return split_problem(profiled(model), 4, 2, 1e7)


@pytest.fixture
def given_to(monkeypatch):
    """The strategies and limits that a solver is given, by call."""

    def watch(module):
        calls, function = [], module.solve

        def watching(problem, limit_s, known=()):
            calls.append((known, limit_s))
            return function(problem, limit_s, known)

        monkeypatch.setattr(module, "solve", watching)
        return calls

    return watch


def test_a_solver_that_waits_is_asked_after_others_for_what_is_faster(splittable, given_to):
    calls = given_to(intra)
    rows = {row.solver: row for row in compare(splittable, ["intra-op", "data-parallel"]).rows}
    ((known, _),) = calls
    assert rows["data-parallel"].plan.strategy in known
    assert (
        rows["intra-op"].plan.prediction.iteration_s
        < rows["data-parallel"].plan.prediction.iteration_s
    )


def test_alone_or_to_be_shown_beside_others_it_knows_no_plan(splittable, given_to):
    calls = given_to(intra)
    alone = compare(splittable, ["intra-op"])
    beside = compare(splittable, ["data-parallel", "intra-op"], full_time=True)
    assert [known for known, _ in calls] == [(), ()]
    assert alone.best.plan.strategy == beside.rows[1].plan.strategy


def test_it_has_its_share_of_the_limit_whatever_others_took(splittable, given_to):
    """First answers take more than a limit of a microsecond."""
    calls = given_to(intra)
    rows = {row.solver: row for row in compare(splittable, time_limit_s=1e-6).rows}
    assert [0 < limit_s < 1e-6 for _, limit_s in calls] == [True]
    assert rows["intra-op"].solve_s is not None
    assert rows["even"].reason == "not asked: the time limit was reached"


def test_it_is_not_asked_where_a_plan_is_close_to_the_bound(tmp_path, given_to):
    """Over fast links data parallelism shares all work evenly."""
    calls = given_to(intra)
    fast = split_problem(profiled(loaded(mlp(tmp_path / "mlp.onnx"))), 2, 2, 1e15)
    rows = {row.solver: row for row in compare(fast, ["data-parallel", "intra-op"]).rows}
    assert rows["data-parallel"].plan.certificate.gap < 0.01
    assert calls == [] and rows["intra-op"].plan is None
    assert rows["intra-op"].reason == (
        "not asked: other solvers had a good plan, or the time limit was reached"
    )


def test_a_round_has_a_solver_that_waited_and_one_that_did_not():
    """As long as there are both; threads come first."""

    def of_a_round(*names):
        return [name for _, name in portfolio._of_a_round([(None, name) for name in names])]

    assert of_a_round("inter-op", "intra-op", "antichain") == ["inter-op", "antichain"]
    assert of_a_round("antichain", "megatron", "intra-op") == ["antichain", "intra-op"]
    assert of_a_round("inter-op", "intra-op") == ["inter-op", "intra-op"]
    assert of_a_round("antichain", "megatron") == ["antichain", "megatron"]
    assert of_a_round("intra-op", "netsplit") == ["netsplit", "intra-op"]
    assert of_a_round("megatron") == ["megatron"]
