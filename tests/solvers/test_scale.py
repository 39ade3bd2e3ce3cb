"""Deep models on large clusters: everything around the search stays fast, small and readable."""

import tracemalloc
from itertools import pairwise

import pytest

from planner.artefacts.files import read_plan, read_profile, write_plan, write_profile
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import MAX_BUCKETS, gradient_sums
from planner.clusters.yaml.read import device_table, read_topology
from planner.costs.evaluate import evaluate, evaluation_work_s
from planner.planning import judge as judging
from planner.planning.judge import as_plan, judge
from planner.reports.plans import MAX_ROWS, stage_table
from planner.solvers import SOLVERS
from planner.solvers.fit import pipeline
from tests.support.builders import asked, changed
from tests.support.scale import deep_profile, regular_cluster

WIDE = 300 * 2**30  # of memory, so that everything fits


def problem_on(folder, layers, hosts, num_microbatches, memory_bytes=WIDE):
    path = folder / "cluster.yaml"
    path.write_text(regular_cluster(hosts))
    profile = deep_profile(layers, width=256, sequence=128)
    options = asked(num_microbatches, device_memory=memory_bytes)
    kind = device_table()[profile.device_type]
    return Problem(profile, read_topology(path), **options, measured_on=kind)


def pipelines(problem, num_stages, num_replicas):
    """Stages of equally many layers."""
    count = len(problem.profile.operators)
    layers = count // 50
    starts = [1 + 50 * (layers * s // num_stages) for s in range(1, num_stages)]
    bounds = [0, *starts, count]
    operators = [range(a, b) for a, b in pairwise(bounds)]
    devices = [range(s * num_replicas, (s + 1) * num_replicas) for s in range(num_stages)]
    return pipeline(problem, operators, devices, recompute=False)


def judged(problem, strategy):
    result = Result(Status.FEASIBLE, strategy)
    verdict, reason = judge(problem, "test", result)
    assert reason is None
    return as_plan(problem, "test", result, verdict, 1.0)


def test_a_layer_of_the_deep_transformer_has_50_operators(tmp_path):
    profile = deep_profile(3, width=128, sequence=64)
    assert len(profile.operators) == 3 * 50 + 2
    trained = [p for p in profile.graph.parameters if p.trainable]
    assert len(trained) == 3 * 16 + 2
    write_profile(profile, tmp_path / "deep.json")
    assert read_profile(tmp_path / "deep.json") == profile


def test_both_forms_of_a_cluster_are_the_same_topology(tmp_path):
    topologies = []
    for explicit in (False, True):
        (tmp_path / "t.yaml").write_text(regular_cluster(3, 2, explicit=explicit))
        topologies.append(read_topology(tmp_path / "t.yaml"))
    assert len(topologies[0].devices) == len(topologies[1].devices) == 6
    assert {d.host for d in topologies[0].devices} == {d.host for d in topologies[1].devices}
    assert len(topologies[0].links) == len(topologies[1].links)


def test_pipelines_of_128_devices_are_judged_and_written(tmp_path):
    problem = problem_on(tmp_path, 16, 16, 512)
    plan = judged(problem, pipelines(problem, 8, 16))
    write_plan(plan, tmp_path / "strategy.json")
    assert read_plan(tmp_path / "strategy.json") == plan
    assert len(plan.prediction.devices) == 128
    # Replicas of a stage with equally many microbatches need the same.
    peaks = {d.device: d.memory.total_bytes for d in plan.prediction.devices}
    for stage in plan.strategy.stages:
        assert len({peaks[d] for d in stage.devices}) == 1


def test_a_sound_iteration_is_never_shorter_than_its_slowest_device(tmp_path):
    problem = problem_on(tmp_path, 16, 8, 256)
    strategy = pipelines(problem, 4, 16)
    plan = judged(problem, strategy)
    for device in plan.prediction.devices:
        parts = device.compute_s + device.communication_s + device.idle_s
        assert parts == pytest.approx(plan.prediction.iteration_s, rel=1e-9)
    stages = evaluate(problem, strategy).stages
    assert plan.prediction.iteration_s >= 256 / 16 * max(s.forward_s + s.backward_s for s in stages)


def test_what_was_not_simulated_for_its_length_is_said(tmp_path, monkeypatch):
    problem = problem_on(tmp_path, 4, 2, 32)
    strategy = pipelines(problem, 4, 4)
    assert not any("not simulated" in note for note in judged(problem, strategy).notes)
    work_s = evaluation_work_s(strategy, evaluate(problem, strategy))
    monkeypatch.setattr(judging, "MAX_WORK_S", 1.5 * work_s)
    notes = judged(problem, strategy).notes
    assert notes[-1] == (
        "1 of 2 variants of the test plan were not simulated: the work for that was done"
    )


def test_even_runs_pipelines_side_by_side_on_more_than_64_devices(tmp_path):
    problem = problem_on(tmp_path, 8, 16, 512)
    strategy = SOLVERS["even"](problem, 10.0).strategy
    assert [stage.num_replicas for stage in strategy.stages] == [2] * 64
    assert sorted(d for stage in strategy.stages for d in stage.devices) == list(range(128))


def test_many_stages_are_shown_by_the_first_and_the_last(tmp_path):
    problem = problem_on(tmp_path, 32, 8, 64)
    table = stage_table(judged(problem, pipelines(problem, 32, 2)))
    assert len(table.rows) == MAX_ROWS + 1
    assert [row[0] for row in table.rows[10:15]] == ["10", "11", "..", "20", "21"]
    assert "the first and the last 12 of 32" in table.title
    assert table.rows[0][1] == "0-1"
    few = stage_table(judged(problem, pipelines(problem, 8, 8)))
    assert [row[1] for row in few.rows][:2] == ["0-7", "8-15"]
    assert few.title == "Stages, per microbatch"


def test_parameters_of_one_stage_are_summed_over_its_replicas_together(tmp_path):
    problem = problem_on(tmp_path, 8, 4, 64)
    sums = gradient_sums(pipelines(problem, 2, 16), problem.profile.graph)
    assert list(dict.fromkeys(one.devices for one in sums)) == [
        tuple(range(16)), tuple(range(16, 32)),
    ]  # fmt: skip
    buckets = [one for one in sums if one.devices == tuple(range(16))]
    assert 1 < len(buckets) <= 2 * MAX_BUCKETS + 10


@pytest.mark.slow
def test_64_pipelined_stages_of_16_replicas_take_little_memory(tmp_path):
    problem = problem_on(tmp_path, 64, 128, 4096)
    judged(problem, pipelines(problem, 2, 2))
    tracemalloc.start()
    plan = judged(problem, pipelines(problem, 64, 16))
    assert tracemalloc.get_traced_memory()[1] < 2**30
    tracemalloc.stop()
    assert len(plan.prediction.devices) == 1024


def test_the_same_problem_with_less_memory_is_another_problem(tmp_path):
    problem = problem_on(tmp_path, 2, 1, 8)
    strategy = pipelines(problem, 2, 4)
    assert evaluate(problem, strategy).shortage is None
    tight = changed(problem, device_memory=2**30)
    assert evaluate(tight, strategy).shortage is not None
