"""Calibrations: fits find what runs were made with, files are strict, and solve uses them."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from planner.api.lookup import newest_profile
from planner.artefacts.calibration import (
    UNCALIBRATED,
    Calibration,
    CalibrationFile,
    Deviation,
    whole_share,
)
from planner.artefacts.files import (
    artefact_hash,
    calibration_path,
    read_calibration,
    read_plan,
    write_calibration,
    write_profile,
)
from planner.artefacts.profile import Contention, WholeStep
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.clusters.yaml.write import write_topology
from planner.costs.evaluate import evaluate
from planner.costs.operators import operator_times
from planner.schedules.actions import AllReduce, Compute
from planner.simulator.events import simulate
from planner.simulator.traces.calibrate import MeasuredRun, calibrate, fit, predicted_s, regression
from planner.simulator.traces.read import measured_by
from planner.simulator.traces.runs import read_runs
from planner.simulator.traces.write import write_trace
from planner.support.errors import FileError, OptionError
from tests.support.accuracy_plans import planned
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.commands import run
from tests.support.split import megatron, mlp, one_stage, zero

TYPES = ("Conv", "MatMul", "Relu")
TRUE = Calibration(
    device_type="unit", whole=True, forward=1.3, backward=0.8,
    deviations=(Deviation("Conv", 0.2, -0.1), Deviation("MatMul", -0.1, 0.1)),
    loss_forward_s_per_byte=2e-9, loss_backward_s_per_byte=4e-9, launch_s=2e-4, post_s=3e-4,
    copy_s_per_byte=2e-10, wire=0.5, sums=0.5, steps=1.5,
)  # fmt: skip


def problem_with(seed, schedule=ScheduleName.ONE_F_ONE_B, num_microbatches=4):
    """A chain of eight operators of three types with drawn times, on two devices."""
    dice = np.random.default_rng(seed)
    graph = graph_of([[], *([v] for v in range(7))], [400_000] * 8, [10**7] * 8)
    operators = tuple(
        replace(operator, type=str(dice.choice(TYPES))) for operator in graph.operators
    )
    forward = dice.uniform(0.005, 0.03, 8)
    profile = profile_of(replace(graph, operators=operators), forward.tolist())
    whole_s = 0.9 * sum(one.forward_s + one.backward_s for one in profile.operators)
    profile = replace(profile, whole_step=WholeStep(whole_s, whole_s), device_type="unit")
    topology = cluster([unit_type(bandwidth=1e10)] * 2, bandwidth=1e9, latency=1e-4)
    return problem_of(profile, topology, num_microbatches, schedule=schedule)


def plan_with(problem, cut):
    """Two stages, cut before an operator; data parallel with cut 0."""
    names = [operator.name for operator in problem.profile.graph.operators]
    count, schedule = problem.num_microbatches, problem.training.schedule
    if cut == 0:
        stages = (Stage.whole(tuple(names), (0, 1), 1, False),)
    else:
        stages = (
            Stage.whole(tuple(names[:cut]), (0,), 2, False),
            Stage.whole(tuple(names[cut:]), (1,), 1, False),
        )
    return planned(problem, Strategy(stages, schedule, count))


def run_of(problem, cut, known=TRUE, name=""):
    """What a machine would measure that is as the calibration says."""
    plan = plan_with(problem, cut)
    evaluation = evaluate(replace(problem, calibration=known), plan.strategy)
    timeline = simulate(evaluation.program, evaluation.costs, problem.topology)
    return MeasuredRun(name or f"{cut}", problem, plan, timeline)


RUNS = [run_of(problem_with(seed), cut) for seed in range(4) for cut in (0, 2, 3, 5, 6)]


def test_regression_finds_what_made_the_values_and_keeps_to_the_prior_where_nothing_is_said():
    rows = np.array([[1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [1.0, 3.0, 0.0]])
    found = regression(
        rows, rows @ [2.0, 0.5, 9.0], np.full(3, 1e-3), np.array([1.0, 0.0, 7.0]), np.ones(3),
        np.zeros(3),
    )  # fmt: skip
    assert found == pytest.approx([2.0, 0.5, 7.0], rel=1e-3)


def test_regression_sets_to_its_least_what_would_be_less():
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    found = regression(
        rows, np.array([4.0, 3.0, 1.0]), np.full(3, 0.01), np.zeros(2), np.full(2, 100.0),
        np.zeros(2),
    )  # fmt: skip
    assert found[1] == 0.0 and found[0] > 0.0


def squares(x, rows, values, errors, means, widths):
    """What the regression minimises."""
    return (((rows @ x - values) / (errors * values)) ** 2).sum() + (
        ((x - means) / widths) ** 2
    ).sum()


def best_active_set(rows, values, errors, means, widths, least):
    """Brute force: every choice of the parameters that are at their bound."""
    matrix = np.vstack([rows / (errors * values)[:, None], np.diag(1 / widths)])
    target = np.concatenate([1 / errors, means / widths])
    candidates = []
    for free in map(np.array, product([False, True], repeat=len(means))):
        x = least.copy()
        rest = target - matrix[:, ~free] @ least[~free]
        x[free] = np.linalg.lstsq(matrix[:, free], rest, rcond=None)[0]
        if (x >= least).all():
            candidates.append(x)
    return min(candidates, key=lambda x: squares(x, rows, values, errors, means, widths))


def test_regression_frees_a_parameter_that_it_had_set_to_its_bound():
    rows = np.array([[1.0, 0.0, 1.0], [3.0, 1.0, 3.0], [0.0, 3.0, 3.0]])
    found = regression(
        rows, np.array([3.0, 5.0, 1.0]), np.full(3, 0.1), np.zeros(3), np.full(3, 10.0),
        np.zeros(3),
    )  # fmt: skip
    # Without bounds the first two are negative; with the second at 0 the first is not.
    assert found == pytest.approx([1.647434, 0.0, 0.333348], abs=1e-6)


def test_regression_equals_brute_force_over_the_parameters_at_their_bounds():
    dice = np.random.default_rng(2)
    at_bound = 0
    for _ in range(100):
        count, num_rows = dice.integers(2, 6), dice.integers(2, 10)
        least = dice.choice([0.0, 0.3], count)
        problem = (
            dice.uniform(0.0, 3.0, (num_rows, count)), dice.uniform(0.1, 5.0, num_rows),
            np.full(num_rows, 0.05), dice.uniform(0.0, 1.0, count),
            10 ** dice.uniform(-1.0, 2.0, count),
        )  # fmt: skip
        found = regression(*problem, least)
        assert found == pytest.approx(best_active_set(*problem, least), rel=1e-6, abs=1e-8)
        at_bound += (found == least).any()
    assert at_bound > 50


def test_a_fit_explains_the_runs_it_was_made_from():
    known = fit(RUNS)
    for one in RUNS:
        assert predicted_s(one, known) == pytest.approx(one.timeline.iteration_s, rel=0.02)
        assert abs(predicted_s(one, UNCALIBRATED) / one.timeline.iteration_s - 1) > 0.01
    assert known.post_s == pytest.approx(TRUE.post_s, rel=0.3)
    assert known.sums == pytest.approx(TRUE.sums, rel=0.05)
    assert known.steps == pytest.approx(TRUE.steps, rel=0.1)
    assert known.wire == pytest.approx(TRUE.wire, rel=0.05)


def with_sums_beside(one, share):
    """The same run where a share of each all-reduce went on within the last backward, which took
    longer by as much: what is behind it begins and ends as before.
    """
    events = list(one.timeline.events)
    for device in one.plan.ranks:
        own = [e for e in events if e.device == device]
        last = max((e for e in own if isinstance(e.action, Compute)), key=lambda e: e.end_s)
        sums = [e for e in own if isinstance(e.action, AllReduce)]
        longer_s = share * (max(e.end_s for e in sums) - last.end_s)
        events[events.index(last)] = replace(last, end_s=last.end_s + longer_s)
    return replace(one, timeline=replace(one.timeline, events=tuple(events)))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_sums_that_made_the_last_backward_longer_count_like_those_behind_it(share):
    def crowded(problem):
        hosts = tuple(replace(one, cores=2) for one in problem.topology.hosts)
        return replace(problem, topology=replace(problem.topology, hosts=hosts))

    runs = [run_of(crowded(problem_with(seed)), 0) for seed in range(4)]
    known, beside = fit(runs), fit([with_sums_beside(one, share) for one in runs])
    assert known.sums == pytest.approx(TRUE.sums, rel=0.05)
    assert beside.sums == pytest.approx(known.sums, rel=0.02)
    assert beside.backward == pytest.approx(known.backward, rel=0.001)


def test_a_fit_is_about_times_alone_where_devices_slow_each_other():
    def slowed(problem):
        hosts = tuple(replace(one, cores=2) for one in problem.topology.hosts)
        profile = replace(problem.profile, contention=Contention(2, {2: 1.6}))
        return replace(problem, profile=profile, topology=replace(problem.topology, hosts=hosts))

    runs = [run_of(slowed(problem_with(seed)), cut) for seed in range(4) for cut in (0, 2, 3, 5, 6)]
    known, alone = fit(runs), fit(RUNS)
    for one in runs:
        assert predicted_s(one, known) == pytest.approx(one.timeline.iteration_s, rel=0.03)
    assert (known.forward, known.backward, known.steps) == pytest.approx(
        (alone.forward, alone.backward, alone.steps), rel=0.03
    )


def split_run(num_microbatches, latency, bandwidth, split, known):
    """What a machine would measure of a multilayer perceptron whose operators are split."""
    topology = cluster([unit_type("T4", bandwidth=1e9)] * 2, bandwidth, latency)
    profile = mlp((0.5e-3, 4e-3, 2e-3, 4e-3))
    measured_on = topology.device_types[0]
    problem = problem_of(profile, topology, num_microbatches, measured_on=measured_on)
    strategy = one_stage(profile, split, ((0, 1),), num_microbatches, warmup=1)
    plan = planned(problem, strategy)
    evaluation = evaluate(replace(problem, calibration=known), strategy)
    timeline = simulate(evaluation.program, evaluation.costs, topology)
    return MeasuredRun("", problem, plan, timeline)


def test_collectives_inside_stages_have_a_factor_and_a_time_of_their_own():
    true = replace(UNCALIBRATED, device_type="T4", collectives=1.6, collective_s=4e-4)
    runs = [
        split_run(num_microbatches, latency, bandwidth, split, true)
        for num_microbatches in (2, 4)
        for latency in (1e-4, 1e-3)
        for bandwidth in (1e6, 1e7)
        for split in (megatron(2), zero(2, 1), zero(2, 3))
    ]
    known = fit(runs)
    assert known.collectives == pytest.approx(1.6, rel=0.05)
    assert known.collective_s == pytest.approx(4e-4, rel=0.2)
    for one in runs:
        assert predicted_s(one, known) == pytest.approx(one.timeline.iteration_s, rel=0.02)
        assert predicted_s(one, UNCALIBRATED) < one.timeline.iteration_s
    # Where devices of another type take part, they are left as they are.
    other = replace(runs[0].problem, calibration=replace(known, device_type="unit"))
    assert predicted_s(replace(runs[0], problem=other), UNCALIBRATED) == pytest.approx(
        runs[0].plan.prediction.iteration_s
    )


def test_it_holds_for_models_that_were_left_out():
    found = calibrate(RUNS)
    assert found.left_out == "model" and len(found.checked) == len(RUNS)
    assert found.error_before > 0.03
    assert found.error_after < 0.25 * found.error_before


def test_with_one_model_runs_are_left_out_and_one_run_alone_proves_nothing():
    assert calibrate(RUNS[:5]).left_out == "run"
    alone = calibrate(RUNS[:1])
    assert alone.checked[0].after_s == alone.checked[0].before_s


def test_without_a_calibration_nothing_changes():
    problem = problem_with(0)
    plan = plan_with(problem, 3)
    other = replace(problem, calibration=replace(TRUE, device_type="another"))
    assert predicted_s(RUNS[0], UNCALIBRATED) == plan_with(problem, 0).prediction.iteration_s
    assert plan_with(other, 3).prediction == plan.prediction


def test_operator_times_by_hand():
    problem = replace(problem_with(0), calibration=TRUE)
    profile = problem.profile
    alone = operator_times(replace(problem, calibration=UNCALIBRATED), 0)
    times = operator_times(problem, 0)
    forward, backward = times.forward_s, times.backward_s
    assert whole_share(profile) == pytest.approx(0.9)
    for v, operator in enumerate(profile.graph.operators):
        f, b = {"Conv": (1.5, 0.7), "MatMul": (1.2, 0.9), "Relu": (1.3, 0.8)}[operator.type]
        loss = 400_000 if v == 7 else 0
        assert forward[v] == pytest.approx(0.9 * f * alone.forward_s[v] + loss * 2e-9)
        assert backward[v] == pytest.approx(0.9 * b * alone.backward_s[v] + loss * 4e-9)


def test_a_calibration_with_impossible_figures_is_refused():
    with pytest.raises(ValueError, match="forward: expected a number above 0") as error:
        Calibration(forward=0.0, post_s=-1.0, deviations=(Deviation("Conv", -2.0, 0.0),))
    assert "post_s" in str(error.value) and "'Conv'" in str(error.value)


# ------------------------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A profile, its topology, and traces of two runs."""
    monkeypatch.chdir(tmp_path)
    problem = problem_with(1)
    profile = replace(problem.profile, device_type="T4")
    write_profile(profile, tmp_path / "profiles" / "chain.json")
    kind = unit_type("T4", bandwidth=1e10)
    problem = replace(
        problem, profile=profile,
        topology=cluster([kind] * 2, bandwidth=1e9, latency=1e-4),
    )  # fmt: skip
    for cut in (2, 3):
        one = run_of(problem, cut, replace(TRUE, device_type="T4"))
        names = {d: f"gpu{d}" for d in (0, 1)}
        write_trace(one.timeline, names, tmp_path / f"run{cut}.json", measured_by(one.plan))
    return tmp_path, problem


def test_runs_are_read_from_traces_with_their_profile_and_topology(folder):
    path, problem = folder
    kinds = {kind.name: kind for kind in problem.topology.device_types}
    traces = [path / "run2.json", path / "run3.json"]
    found = read_runs(traces, [problem.profile], [problem.topology], kinds)
    assert [len(one.plan.strategy.stages[0].operators) for one in found] == [2, 3]
    with pytest.raises(OptionError, match=r"run2\.json: the run used the profile .* add it with"):
        read_runs(traces, [problem_with(5).profile], [problem.topology], kinds)
    other = replace(problem.topology, name="other")
    with pytest.raises(OptionError, match="not among the given ones; add it with --topology"):
        read_runs(traces, [problem.profile], [other], kinds)
    write_trace(found[0].timeline, {0: "a", 1: "b"}, path / "predicted.json")
    with pytest.raises(FileError, match="this one was simulated"):
        read_runs([path / "predicted.json"], [problem.profile], [problem.topology], kinds)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("compute", list.pop, "got 1 missing: O on gpu1"),
        ("compute", lambda slices: slices.append(slices[0]), "got 1 too many: 0F0 on gpu0"),
        ("compute", lambda slices: slices[0].update(dur=0.0), "take time, got 0F0 of 0 s"),
    ],
)
def test_a_measured_trace_has_every_action_of_its_plan_once(folder, kind, change, said):
    path, problem = folder
    kinds = {one.name: one for one in problem.topology.device_types}
    plain = json.loads((path / "run2.json").read_text())
    is_slice = [one["ph"] == "X" and one["cat"] == kind for one in plain["traceEvents"]]
    slices = [one for one, own in zip(plain["traceEvents"], is_slice, strict=True) if own]
    others = [one for one, own in zip(plain["traceEvents"], is_slice, strict=True) if not own]
    slices.sort(key=lambda one: (one["name"] == "O", one["pid"], one["ts"]))
    change(slices)
    (path / "run2.json").write_text(json.dumps({**plain, "traceEvents": [*others, *slices]}))
    with pytest.raises(FileError, match=said):
        read_runs([path / "run2.json"], [problem.profile], [problem.topology], kinds)


def test_a_calibration_is_for_the_profile_beside_it(tmp_path):
    profile = problem_with(1).profile
    path = tmp_path / "profiles" / "chain.json"
    write_profile(profile, path)
    assert read_calibration(path, [profile]) is None
    known = CalibrationFile((artefact_hash(profile),), TRUE, 0.2, 0.05, "model")
    write_calibration(known, calibration_path(path))
    assert read_calibration(path, [profile]) == known
    assert newest_profile(path.parent).path == path
    with pytest.raises(FileError, match=r"made for another profile .* or give --no-calibration"):
        read_calibration(path, [replace(profile, threads=2)])
    plain = json.loads(calibration_path(path).read_text())
    plain["calibration"]["wire"], plain["calibration"]["more"] = "much", 1
    calibration_path(path).write_text(json.dumps(plain))
    with pytest.raises(FileError) as error:
        read_calibration(path, [profile])
    assert "calibration.wire" in str(error.value) and "calibration.more" in str(error.value)


def test_calibrate_writes_what_solve_then_uses(folder):
    path, problem = folder
    write_topology(problem.topology, path / "pair.yaml", [])
    arguments = ("calibrate", "run2.json", "run3.json", "--topology", "pair.yaml")
    found = json.loads(run(*arguments, "--json").output)
    assert found["written"] == ["profiles/chain.calibration.json"]
    assert found["left_out"] == "run" and found["error_after"] < found["error_before"]
    said = run(*arguments).output
    assert "run2.json" in said and "mean error" in said
    solving = ("solve", "--topology", "pair.yaml", "--solver", "data-parallel")
    run(*solving, "-o", "with.json")
    run(*solving, "--no-calibration", "-o", "without.json")
    used, unused = (read_plan(path / name).notes for name in ("with.json", "without.json"))
    assert "calibrated from 2 runs of 1 model" in used
    assert not any("calibrated" in note for note in unused)
    run(*arguments[:2], *arguments[3:])
    one = (
        "note: calibrated from 1 run of 1 model, whose chance errors are in all times: give planner"
    )
    for using in (solving, ("compare", *solving[1:])):
        assert one in run(*using).output
        assert "calibrated" not in run(*using, "--no-calibration").output
