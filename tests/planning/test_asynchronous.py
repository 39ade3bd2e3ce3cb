"""Plans with PipeDream's schedule, from question to file: memory, certificates, commands."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings

from planner.artefacts.files import plan_bytes, read_plan
from planner.artefacts.options import Objective, Optimizer
from planner.artefacts.plan import MAX_MICROBATCHES
from planner.artefacts.problem import Result, Status
from planner.artefacts.strategy import ScheduleName, asynchronous_violations
from planner.costs.bounds import lower_bound_s
from planner.costs.evaluate import evaluate
from planner.planning.judge import judge, judge_unchanged, with_deeper_warmup
from planner.planning.portfolio import solve_by_pipedream_costs
from planner.reports.plans import stage_table
from planner.schedules.versions import alive
from planner.solvers import SOLVERS
from tests.support.builders import (
    changed,
    cluster,
    graph_of,
    hierarchy,
    problem_of,
    profile_of,
    unit_type,
)
from tests.support.commands import run
from tests.support.programs import split
from tests.support.strategies import problems

PIPEDREAM = ScheduleName.PIPEDREAM
FILES = ("--profile", "elsewhere/mine.json", "--topology", "pair.yaml")


def row(widths, count, parameter_bytes=1000, **options):
    """Stages of one operator each, with the same parameters."""
    size = len(widths)
    graph = graph_of([[s - 1] if s else [] for s in range(size)], [10] * size,
                     [parameter_bytes] * size)  # fmt: skip
    profile = profile_of(graph, [1.0] * size)
    topology = cluster([unit_type()] * sum(widths), 1e12)
    problem = problem_of(profile, topology, count, schedule=PIPEDREAM, **options)
    return problem, split(graph, range(1, size), widths, count, "pipedream")


# -------------------------------------------------------------------------------- memory


def test_each_version_beyond_the_first_is_a_copy_of_the_trained_parameters():
    problem, strategy = row([1, 1, 1], 4, optimizer=Optimizer.ADAM)
    memory = evaluate(problem, strategy).memory
    assert [memory[d].version_bytes for d in range(3)] == [2000, 1000, 0]
    assert [memory[d].gradient_bytes for d in range(3)] == [1000] * 3
    assert [memory[d].optimizer_bytes for d in range(3)] == [2000] * 3
    synced = evaluate(problem, replace(strategy, vertical_sync=True)).memory
    assert [synced[d].version_bytes for d in range(3)] == [2000] * 3


def test_all_the_rest_of_the_memory_is_that_of_1f1b_with_as_many_in_flight():
    problem, strategy = row([1, 2, 1], 8)
    asynchronous = evaluate(problem, strategy).memory
    flushed = evaluate(problem, replace(strategy, schedule=ScheduleName.ONE_F_ONE_B)).memory
    for device, parts in asynchronous.items():
        assert replace(parts, version_bytes=0) == flushed[device]


def test_a_shortage_names_the_versions():
    problem, strategy = row([1, 1], 4, 10**9)
    options = {"device_memory": 10**9}
    shortage = evaluate(changed(problem, **options), strategy).shortage
    assert shortage.startswith("stage 0 needs 3.73 GiB on d0, the limit is 954 MiB")
    assert "parameters 954 MiB, versions 954 MiB, gradients 954 MiB" in shortage


# ------------------------------------------------------------------------------ judge, bound


def test_a_judged_plan_keeps_its_minibatches_in_flight():
    problem, strategy = row([1, 1], 4)
    assert with_deeper_warmup(strategy) == strategy
    verdict, _ = judge(problem, "antichain", Result(Status.OPTIMAL, strategy))
    assert verdict.strategy == strategy


def test_the_prediction_is_of_the_steady_state():
    problem, strategy = row([1, 1], 4)
    verdict, _ = judge_unchanged(problem, strategy)
    prediction = verdict.prediction
    # A minibatch takes 3 s in each of two stages, which overlap without a gap.
    assert prediction.iteration_s == pytest.approx(4 * 3.0)
    assert prediction.latency_s == pytest.approx(2 * 3.0)
    assert prediction.bottleneck_s == pytest.approx(3.0)
    assert prediction.bubble_fraction == pytest.approx(0.0, abs=1e-6)
    assert prediction.throughput == pytest.approx(problem.profile.microbatch_size / 3.0)
    # Its flushed twin has a bubble, and the bound of flushed ones does not hold for it.
    assert lower_bound_s(problem) == pytest.approx(4 * 3.0)
    options = {"schedule": ScheduleName.ONE_F_ONE_B}
    assert lower_bound_s(changed(problem, **options)) >= 4 * 3.0


@settings(max_examples=15)
@given(problems(max_nodes=4, max_devices=3))
def test_every_solver_answers_with_what_the_schedule_runs(problem):
    options = {"schedule": PIPEDREAM, "objective": Objective.ITERATION}
    problem = changed(problem, **options)
    bound_s = lower_bound_s(problem)
    for name in ("single", "data-parallel", "even", "pipedream", "antichain"):
        result = SOLVERS[name](problem, 10.0)
        if result.strategy is None:
            assert result.reason
            continue
        assert result.strategy.schedule is PIPEDREAM
        assert not any(asynchronous_violations(result.strategy, problem.profile.graph))
        verdict, _ = judge(problem, name, result)
        assert verdict.prediction.iteration_s >= bound_s * (1 - 1e-9)
    assert SOLVERS["single"](problem, 10.0).strategy is not None
    assert SOLVERS["data-parallel"](problem, 10.0).strategy is not None


def test_placements_and_split_stages_have_no_answer_and_say_why():
    problem, _ = row([1, 1], 4)
    for name in ("heft", "m-etf", "pesto", "netsplit"):
        reason = SOLVERS[name](problem, 10.0).reason
        assert reason == "its devices run several stages, which --schedule pipedream cannot do"
    reason = SOLVERS["intra-op"](problem, 10.0).reason
    assert reason == "it splits operators, which --schedule pipedream cannot do"


def test_operators_that_share_a_parameter_stay_together():
    graph = graph_of([[], [0], [1]], [10] * 3, [1000] * 3)
    first, middle, last = graph.operators
    tied = replace(graph, operators=(first, middle, replace(last, parameters=("w0",))))
    profile = profile_of(tied, [1.0] * 3)
    problem = problem_of(profile, cluster([unit_type()] * 2, 1e12), 3, schedule=PIPEDREAM)
    result = SOLVERS["antichain"](problem, 10.0)
    assert [len(stage.operators) for stage in result.strategy.stages] == [3]
    assert SOLVERS["even"](problem, 10.0).strategy is not None


# --------------------------------------------------------------- PipeDream's own cost model


def test_under_pipedreams_cost_model_the_strategy_is_of_its_schedule_in_whole_rounds():
    # 3 devices, 3 operators of 4 s, 1 s, 1 s: the first one twice, the others together.
    graph = graph_of([[], [0], [1]], [10] * 3, [10] * 3)
    profile = profile_of(graph, [2.0, 0.5, 0.5], [2.0, 0.5, 0.5])
    problem = problem_of(profile, hierarchy([3], [1e9]), 3)
    (row,) = solve_by_pipedream_costs(problem).rows
    strategy = row.plan.strategy
    assert [stage.num_replicas for stage in strategy.stages] == [2, 1]
    assert strategy.schedule is PIPEDREAM
    assert strategy.num_microbatches == 4
    assert [stage.warmup for stage in strategy.stages] == [
        stage.in_flight for stage in row.report.stages
    ]
    assert "an iteration has 4 microbatches, not 3, so that" in " ".join(row.plan.notes)
    # Links are next to free, so that the simulator and PipeDream's model say the same.
    minibatch_s = row.plan.prediction.iteration_s / 4
    assert minibatch_s == pytest.approx(row.report.objective_s, rel=1e-6)


def test_too_many_minibatches_for_whole_rounds_are_no_plan(monkeypatch):
    monkeypatch.setattr("planner.solvers.pipedream.solve.MAX_MICROBATCHES", 3)
    graph = graph_of([[], [0], [1]], [10] * 3, [10] * 3)
    profile = profile_of(graph, [2.0, 0.5, 0.5], [2.0, 0.5, 0.5])
    (row,) = solve_by_pipedream_costs(problem_of(profile, hierarchy([3], [1e9]), 3)).rows
    assert row.plan is None
    assert (
        row.reason == "whole rounds of all stages of PipeDream's plan are 2 minibatches, too many"
    )
    assert MAX_MICROBATCHES == 10**6


# ------------------------------------------------------------------------------- commands


def test_solve_and_simulate_with_vertical_sync(folder):
    shown = run("solve", *FILES, "--schedule", "pipedream", "--vertical-sync", "--reserve", "0 B",
                "--solver", "even").output  # fmt: skip
    plan = read_plan(folder / "strategy.json")
    assert plan.strategy.schedule is PIPEDREAM
    assert plan.strategy.vertical_sync
    assert "versions" in shown
    written = json.loads((folder / "strategy.json").read_text())
    assert written["strategy"]["vertical_sync"] is True
    assert plan_bytes(plan) == (folder / "strategy.json").read_bytes()
    asked = ("simulate", "strategy.json", *FILES, "--reserve", "0 B", "--json")
    found = json.loads(run(*asked, "--trace", "t.json").stdout)
    assert found["iteration_s"] == plan.prediction.iteration_s
    traced = json.loads((folder / "t.json").read_text())["otherData"]
    assert traced["iteration_s"] == plan.prediction.iteration_s
    more = json.loads(run(*asked, "--microbatches", "16").stdout)
    assert more["iteration_s"] / 16 == pytest.approx(
        plan.prediction.iteration_s / plan.strategy.num_microbatches
    )


def test_versions_are_shown_and_left_out_of_the_files_of_other_schedules(folder):
    run("solve", *FILES, "--reserve", "0 B", "--solver", "even")
    text = (folder / "strategy.json").read_text()
    assert "version_bytes" not in text
    assert "vertical_sync" not in text
    assert "versions" not in stage_table(read_plan(folder / "strategy.json")).heads
    run("solve", *FILES, "--reserve", "0 B", "--solver", "even", "--schedule", "pipedream")
    plan = read_plan(folder / "strategy.json")
    table = stage_table(plan)
    at = table.heads.index("versions")
    stages = range(len(plan.strategy.stages))
    assert [cells[at] for cells in table.rows] == [str(alive(plan.strategy, s)) for s in stages]


def test_what_contradicts_the_schedule_is_refused(folder):
    said = run("solve", *FILES, "--vertical-sync", code=1).output
    assert "--vertical-sync is for --schedule pipedream" in said
    said = run("solve", *FILES, "--cost-model", "pipedream", "--schedule", "gpipe", code=1).output
    assert "--schedule gpipe is for --cost-model planner, not for pipedream" in said


def test_a_number_of_microbatches_that_replicas_cannot_share_is_refused(folder):
    run("solve", *FILES, "--schedule", "pipedream", "--solver", "data-parallel", "--reserve", "0 B")
    said = run("simulate", "strategy.json", *FILES, "--microbatches", "3", code=1).output
    assert "stage 0 has 2 replicas and needs a multiple of that" in said
