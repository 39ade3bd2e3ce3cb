"""Options under `--schedule pipedream`; the length of a step in the middle of a flow."""

import json
from dataclasses import replace

import pytest
import torch

import planner
from planner import launch
from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.options import LossOptions
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.launcher.job import prepare
from planner.launcher.options import Loop
from planner.launcher.rendezvous import ProcessRank
from planner.operators import randomness
from planner.reports.launch import launch_json, launch_tables
from planner.schedules.actions import Compute, Direction, Step, waiting_for_sends
from planner.simulator.timeline import Event, Timeline
from planner.simulator.traces.read import read_trace
from planner.support.errors import LaunchError, OptionError
from planner.training.steady import cropped, steady_window
from planner.training.trainer import Trainer
from tests.support.mode_runs import SEED, net, profile_of, write_strategy
from tests.support.own_loops import batches
from tests.training.test_own_loop import Quiet


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, its profile, and a strategy of one device."""
    folder = tmp_path_factory.mktemp("rules")
    net(folder / "net.onnx")
    profile = profile_of(folder / "net.onnx")
    path = write_strategy(folder / "alone.json", profile, (1,), schedule=ScheduleName.PIPEDREAM)
    return folder, profile, path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip": 1.0},
            "--clip 1.0: it needs the gradients of all stages, and under the schedule pipedream"
            " each stage steps for itself; leave it out, or plan with --schedule 1f1b",
        ),
        ({"nan": "skip"}, "--nan skip: it leaves out a step in all stages, and under"),
        ({"dtype": "float16"}, "--dtype float16: it has a loss scale for all stages, and under"),
    ],
)
def test_options_that_need_all_stages_are_refused(made, options, message):
    with pytest.raises(OptionError) as error:
        launch(made[2], steps=1, **options)
    assert str(error.value).startswith(message)


def test_a_plan_of_float16_is_refused(made):
    path = made[0] / "half.json"
    write_plan(replace(read_plan(made[2]), dtype="float16"), path)
    with pytest.raises(OptionError, match=r"--dtype float16: it has a loss scale"):
        launch(path, steps=1)


def wild(step, microbatch, inputs):
    """Data of the user, which is not finite from the second minibatch of step 1 on."""
    shape, dtype = inputs["x"]
    value = float("inf") if (step, microbatch) >= (1, 1) else 0.5
    return {"x": torch.full(shape, value, dtype=dtype)}, torch.zeros(shape[:1], dtype=torch.int64)


def test_nan_stops_at_the_minibatch_that_brings_it(made):
    with pytest.raises(LaunchError) as error:
        launch(made[2], steps=3, nan="stop", data="tests.launcher.asynchronous.test_rules:wild")
    said = str(error.value)
    assert said.startswith("step 1: expected a finite loss and finite gradients, got a loss of nan")
    assert "(--nan stop); lower --lr" in said
    assert launch(made[2], steps=2, nan="stop").steps == 2


def test_a_report_has_the_time_of_a_minibatch(made, tmp_path):
    told = []
    report = launch(
        made[2], steps=6, trace=tmp_path / "trace.json", track_memory=True,
        log_file=tmp_path / "log.jsonl", progress=lambda *done: told.append(done),
    )  # fmt: skip
    assert told == [(i + 1, 6, loss) for i, loss in enumerate(report.loss)]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines[1:]] == [*report.loss]
    found = launch_json(report)
    assert found["measured_minibatch_s"] == report.measured_iteration_s / 4
    assert found["predicted_minibatch_s"] == report.predicted_iteration_s / 4
    assert [row[0] for row in launch_tables(report)[0].rows[:2]] == ["iteration", "minibatch"]
    assert found["live_bytes"][0] == pytest.approx(found["predicted_live_bytes"][0], rel=0.1)
    timeline = read_trace(tmp_path / "trace.json").timeline
    assert sum(isinstance(one.action, Step) for one in timeline.events) == 4
    passes = [one.action for one in timeline.events if isinstance(one.action, Compute)]
    assert sum(one.direction is Direction.FORWARD for one in passes) == 4
    assert all(0 <= one.start_s <= one.end_s for one in timeline.events)
    json.dumps(found)


def test_a_flow_that_hangs_only_after_its_first_step_is_refused(made):
    """Stage 1 wants two minibatches ahead, stage 0 sends one at a time."""
    folder, profile, _ = made
    path = write_strategy(
        folder / "pair.json", profile, (1, 1), schedule=ScheduleName.PIPEDREAM, num_microbatches=1
    )
    plan = read_plan(path)
    stages = zip(plan.strategy.stages, (1, 2), strict=True)
    stuck = tuple(replace(stage, warmup=ahead) for stage, ahead in stages)
    for strategy, hangs in ((plan.strategy, False), (replace(plan.strategy, stages=stuck), True)):
        given = replace(plan, strategy=strategy), path, None, ProcessRank(0, 2, 0, 2)
        if not hangs:
            assert prepare(*given, (LossOptions(), "cpu")).plan.strategy == strategy
            continue
        with pytest.raises(LaunchError, match=r"the schedule would hang: device 0 waits at 0B0"):
            prepare(*given, (LossOptions(), "cpu"))


def pipeline(widths, warmups, num_microbatches):
    stages, first = [], 0
    for s, width in enumerate(widths):
        devices = range(first, first + width)
        stages.append(Stage.whole((f"op{s}",), devices, warmups[s], False))
        first += width
    return Strategy(tuple(stages), ScheduleName.PIPEDREAM, num_microbatches)


def test_a_step_in_the_middle_of_a_flow_is_measured():
    """Three minibatches are in flight, so the first two steps fill and the last two empty."""
    strategy = pipeline((1, 1, 1), (3, 2, 1), 2)
    ends_s = [9.0, 12.0, 14.0, 16.1, 18.0, 19.0, 19.5]
    window = steady_window(strategy, 0.0, ends_s)
    assert (window.step, window.is_steady) == (2, True)
    assert window.step_s == pytest.approx(2.0)
    assert (window.start_s, window.end_s) == (12.0, 14.0)


def test_a_short_flow_is_measured_as_well_as_can_be():
    strategy = pipeline((1, 1, 1), (3, 2, 1), 2)
    window = steady_window(strategy, 1.0, [9.0, 12.0])
    assert (window.step, window.step_s, window.is_steady) == (1, 3.0, False)
    window = steady_window(strategy, 1.0, [9.0])
    assert (window.step, window.step_s, window.is_steady) == (0, 8.0, False)


def test_a_short_flow_is_noted(made):
    folder, profile, _ = made
    path = write_strategy(
        folder / "few.json", profile, (1,), schedule=ScheduleName.PIPEDREAM, num_microbatches=1
    )
    (note,) = [one for one in launch(path, steps=2).notes if "pipeline" in one]
    assert note == (
        "the longest run without emptying the pipeline is 2 steps, and the prediction is of a full"
        " one: expected at least 3; give more --steps, or save and evaluate less often"
    )
    assert not any("pipeline" in one for one in launch(path, steps=3).notes)


def test_a_part_of_a_timeline_cuts_off_what_is_outside():
    action = Compute(Direction.FORWARD, 0, 0)
    times = [(0.0, 1.0), (0.5, 2.5), (2.0, 3.0), (2.5, 5.0), (4.0, 6.0)]
    whole = Timeline(6.0, tuple(Event(0, action, *one) for one in times), ())
    part = cropped(whole, 1.0, 4.0)
    assert part.iteration_s == 3.0
    assert [(one.start_s, one.end_s) for one in part.events] == [(0, 1.5), (1, 2), (1.5, 3)]


def test_a_loop_of_ones_own_steps_after_each_minibatch(made):
    module, model = Quiet(made[0]), made[0] / "quiet"
    model.mkdir()
    net(model / "net.onnx", noise=False)
    path = write_strategy(
        model / "s.json", profile_of(model / "net.onnx"), (1,), schedule=ScheduleName.PIPEDREAM
    )
    optimizer, expected, found = torch.optim.SGD(module.parameters(), 0.1), [], []
    with planner.trainer(path, learning_rate=0.1, nan="stop") as trainer:
        for step, (x, classes) in enumerate(batches()):
            found.append(trainer.step((x, classes)))
            shares = []
            for m, part in enumerate(zip(x.chunk(4), classes.chunk(4), strict=True)):
                with randomness.random_operators(SEED, step, m):
                    loss = torch.nn.functional.cross_entropy(module(part[0]), part[1])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                shares.append(loss.item())
            expected.append(sum(shares) / 4)
            if step == 1:
                trainer.set_lr(0.03)
                optimizer.param_groups[0]["lr"] = 0.03
        state = trainer.state_dict()
    assert found == pytest.approx(expected, rel=1e-12)
    for name, value in module.net.named_parameters():
        torch.testing.assert_close(state[name], value.data, rtol=1e-12, atol=1e-12)
    with pytest.raises(OptionError, match=r"--clip 1.0: it needs the gradients of all stages"):
        planner.trainer(path, clip=1.0)


def test_forwards_of_a_flow_wait_for_no_sends_however_few_microbatches_a_step_has(made):
    """The list of one step has no backward before a forward then, but those of flows have."""
    folder, profile, _ = made
    path = write_strategy(
        folder / "one.json", profile, (1,), schedule=ScheduleName.PIPEDREAM, num_microbatches=1
    )
    seat = ProcessRank(0, 1, 0, 1)
    job = prepare(read_plan(path), path, None, seat, (LossOptions(), "cpu"))
    assert waiting_for_sends(job.program.code) == {*Direction}
    assert Trainer(job, Loop(), 0).executor._waiting == {Direction.BACKWARD}
