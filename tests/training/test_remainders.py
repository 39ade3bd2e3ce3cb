"""The end of an epoch makes a shorter step, and data goes on from its state: under every plan the
losses and weights are those of a plain PyTorch loop in float64.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

import planner
from planner.artefacts.files import artefact_bytes
from planner.support.errors import LaunchError
from planner.training.checkpoints.folder import FORMAT, find
from tests.support import remainder_runs
from tests.support.checkpoint_runs import tensors_of
from tests.support.group_runs import write_model
from tests.support.remainder_runs import (
    HERE,
    RATE,
    batches_of,
    by_torch,
    run_all,
    words,
    write_plans,
)

PLANS = ("alone", "pipeline", "gpipe", "recomputed", "to and fro", "replicas", "split", "zero1",
         "zero2", "zero3")  # fmt: skip
STEPS = 7
OTHERS = {"ten": ("alone", "replicas", "zero3"), "loader": ("pipeline",), "Stream": ("pipeline",),
          "stream_loader": ("alone", "replicas")}  # fmt: skip
SAME = {"loader": "of_43", "Stream": "of_43", "stream_loader": "of_43"}
CASES = [(data, plan) for data in ("of_43", "of_37") for plan in PLANS] + [
    (data, plan) for data, plans in OTHERS.items() for plan in plans
]
LEFT = {
    "of_43": "3 of 43 samples of each epoch fill no microbatch of 4 and are left out",
    "of_37": "1 of 37 samples of each epoch fills no microbatch of 4 and is left out",
    "ten": "2 of 10 samples of each epoch fill no microbatch of 4 and are left out",
}
WHOLE = "11 of 43 samples of each epoch fill no step of 16 (4 microbatches of 4) and are left out"
QUICK = [("of_37", "pipeline"), ("of_37", "replicas"), ("of_37", "zero3"), ("ten", "replicas"),
         ("stream_loader", "replicas")]  # fmt: skip
"""Cases that `make test` runs."""
EXACT = ("counted_epochs", "stateful_sampler", "drawing", "collating", "StatefulStream",
         "stateful_loader", "DrawingStream")  # fmt: skip
"""Data that has a state."""
AFTER = (2, 3, 5)
"""Steps after which it goes on: within an epoch, at the end of one, and in another one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remainders")
    write_plans(folder, write_model(folder))
    return folder


def launches(cases, own, states, after):
    """The launches on two ranks, by name.

    Args:
        cases: data and plans.
        own: plans of own loops.
        states: data with a state.
        after: steps after which it goes on.
    """
    made = {
        f"{plan} {data}": {"plan": plan, "data": data, "steps": STEPS, "keep": f"{plan} {data}"}
        for data, plan in cases
    }
    for plan in own:
        made[f"own {plan}"] = {"plan": plan, "data": "of_43", "own": True, "keep": f"own {plan}"}
    for data in states:
        how = {"plan": "pipeline", "data": data, "steps": STEPS}
        every = {"checkpoint_every": 1, "checkpoint_keep": STEPS}
        made[data] = {**how, "keep": data, **every}
        for step in after:
            start = {"keep": f"{data} {step}", "resume": f"{data}/step-{step:08d}"}
            made[f"{data} {step}"] = how | start
    return made


@pytest.fixture(scope="module")
def told(folder):
    """What rank 0 tells of the launches of `make test`."""
    some = launches([case for case in CASES if case in QUICK], ["replicas"], ["drawing"], [3])
    some["flow"] = {"plan": "flow", "data": "of_43", "epochs": 2}
    return run_all(folder, some)


@pytest.fixture(scope="module")
def rest(folder):
    """What rank 0 tells of all other ones."""
    cases = [case for case in CASES if case not in QUICK]
    some = launches(cases, ["pipeline", "zero3"], ["counted_epochs", "seeded_loader"], AFTER)
    some["epochs"] = {"plan": "pipeline", "data": "of_43", "epochs": 2}
    return run_all(folder, some)


def batches(data):
    """Those of an epoch, by the name of the data."""
    return batches_of(getattr(remainder_runs, data)())


def parameters(path):
    """The trained parameters of a checkpoint, by name."""
    tensors = tensors_of(path).items()
    return {n.removeprefix("parameters/"): one for n, one in tensors if n.startswith("parameters/")}


def assert_learned(path, expected):
    found = parameters(path)
    for name in found.keys() & expected.keys():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)
    assert len(found.keys() & expected.keys()) == len(expected)


@cache
def plain(dataset):
    """Losses and parameters of a plain loop over a dataset."""
    return by_torch(batches(dataset), STEPS)


def assert_plain(folder, told, cases):
    for data, plan in cases:
        dataset = SAME.get(data, data)
        losses, state = plain(dataset)
        found = told[f"{plan} {data}"]
        assert found["losses"] == pytest.approx(losses, rel=1e-9), (plan, data)
        assert_learned(folder / f"{plan} {data}", state)
        assert found["notes"].count(LEFT[dataset]) == 1, (plan, data)


def assert_own(folder, told, plans):
    losses, state = by_torch(batches("of_43"), 3)
    for plan in plans:
        assert told[f"own {plan}"]["losses"] == pytest.approx(losses, rel=1e-9), plan
        assert_learned(folder / f"own {plan}", state)


def test_a_shorter_step_is_that_of_a_plain_loop(folder, told):
    assert_plain(folder, told, QUICK)


def test_a_short_batch_of_an_own_loop_is_a_shorter_step(folder, told):
    assert_own(folder, told, ["replicas"])


@pytest.mark.slow
def test_a_shorter_step_is_that_of_a_plain_loop_under_every_plan(folder, rest):
    assert_plain(folder, rest, [case for case in CASES if case not in QUICK])
    assert_own(folder, rest, ["pipeline", "zero3"])


@pytest.mark.slow
def test_epochs_count_shorter_steps(rest):
    losses, _ = by_torch(batches("of_43"), 6)
    assert rest["epochs"]["losses"] == pytest.approx(losses, rel=1e-9)


def test_an_asynchronous_schedule_leaves_the_end_of_an_epoch_out_and_says_so(told):
    assert len(told["flow"]["losses"]) == 4
    assert told["flow"]["notes"].count(WHOLE) == 1


def test_measured_times_are_those_of_whole_steps(folder):
    path = folder / "alone.json"
    how = {"model": folder / "net.onnx", "threads": 1, "track_memory": True}
    report = planner.launch(path, data=f"{HERE}:of_37", epochs=2, **how)
    assert (len(report.loss), len(report.iterations_s)) == (6, 4)
    backwards = [e for e in report.timeline.events if getattr(e.action, "direction", "") == "B"]
    assert len(backwards) == 4
    assert not [note for note in report.notes if "all steps have fewer" in note]
    short = planner.launch(path, data=f"{HERE}:ten", epochs=3, **how)
    assert (len(short.iterations_s), short.comparable) == (3, False)
    said = "not comparable: planned for 4 microbatches in a step, and all steps have fewer"
    assert said in short.notes


def test_rows_of_an_own_batch_that_fill_no_microbatch_are_said_once(folder):
    x, y = words(10)
    with planner.trainer(folder / "alone.json", model=folder / "net.onnx", threads=1) as trainer:
        assert trainer.batch_size == 16
        with pytest.warns(UserWarning, match="step 0: the last 2 rows of the batch fill no") as one:
            found = trainer.step((x[:10], y[:10]))
        assert len(one) == 1
        trainer.step((x[:7], y[:7]))  # a warning would be an error
        with pytest.raises(LaunchError, match="expected a batch of 16 samples, or of at least 4"):
            trainer.step((x[:3], y[:3]))
    losses, _ = by_torch(batches("ten"), 1)
    assert found == pytest.approx(losses[0], rel=1e-9)


def test_a_checkpoint_of_before_goes_on_at_its_place(folder, tmp_path):
    """It began with whole steps alone, two in an epoch of 43 samples. Step 3 is the second one of
    epoch 1, and is followed by the short one.
    """
    path, how = folder / "alone.json", {"model": folder / "net.onnx", "threads": 1}
    how |= {"learning_rate": RATE, "shuffle": False}
    planner.launch(path, data=f"{HERE}:whole_steps", steps=3, checkpoint=tmp_path / "kept", **how)
    start = find(tmp_path / "kept")
    assert start.record.extras["batches"] == [[0, 16, 16]]
    before = replace(start.record, extras={**start.record.extras, "batches": [[0, 16]]})
    (start.path / "checkpoint.json").write_bytes(artefact_bytes(before, FORMAT))
    after = planner.launch(path, data=f"{HERE}:of_43", epochs=3, resume=tmp_path / "kept", **how)
    whole = batches("of_43")
    losses, _ = by_torch([*whole[:2], *whole, *whole], 8)
    assert after.loss == pytest.approx(losses[3:], rel=1e-9)


# ------------------------------------------------------------------------------ states


@pytest.mark.parametrize("data", EXACT)
def test_data_with_a_state_goes_on_as_if_never_interrupted(folder, tmp_path, data):
    path, how = folder / "alone.json", {"model": folder / "net.onnx", "threads": 1}
    how |= {"learning_rate": RATE, "data": f"{HERE}:{data}", "steps": STEPS}
    whole = planner.launch(path, checkpoint=tmp_path / "whole", checkpoint_every=1,
                           checkpoint_keep=STEPS, **how)  # fmt: skip
    for step in AFTER:
        start = tmp_path / "whole" / f"step-{step:08d}"
        after = planner.launch(path, resume=start, checkpoint=tmp_path / f"{step}", **how)
        assert after.loss == whole.loss[step:]
        first, second = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / f"{step}")
        assert {n for n, one in first.items() if not torch.equal(one, second[n])} == set()
        assert not [note for note in after.notes if "begin of a training" in note]


def assert_goes_on(folder, told, data, after):
    for step in after:
        assert told[f"{data} {step}"]["losses"] == told[data]["losses"][step:]
        first, second = parameters(folder / data), parameters(folder / f"{data} {step}")
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_both_ranks_of_a_pipeline_go_on(folder, told):
    assert_goes_on(folder, told, "drawing", [3])


@pytest.mark.slow
def test_both_ranks_of_a_pipeline_go_on_from_every_place(folder, rest):
    for data in ("counted_epochs", "seeded_loader"):
        assert_goes_on(folder, rest, data, AFTER)


def test_another_plan_takes_the_state_of_a_rank_that_read_the_same(folder, told):
    """One device reads all microbatches, as both ranks of the pipeline did."""
    path, start = folder / "alone.json", folder / "drawing/step-00000003"
    how = {"model": folder / "net.onnx", "threads": 1, "learning_rate": RATE, "steps": STEPS}
    after = planner.launch(path, data=f"{HERE}:drawing", resume=start, **how)
    assert after.loss == pytest.approx(told["drawing"]["losses"][3:], rel=1e-12)
    assert not [note for note in after.notes if "dataset.chance" in note]


def test_state_that_is_lost_is_said(folder, told, tmp_path):
    path, how = folder / "alone.json", {"model": folder / "net.onnx", "threads": 1, "steps": 2}
    how["data"] = f"{HERE}:drawing_workers"
    planner.launch(path, checkpoint=tmp_path / "kept", checkpoint_every=1, **how)
    after = planner.launch(path, resume=tmp_path / "kept/step-00000001", **how)
    (note,) = [note for note in after.notes if "dataset.chance in worker processes" in note]
    assert note.startswith(f"--data {HERE}:drawing_workers: dataset.chance in worker processes and")
    assert "the state is as at the begin of a training, not as at the checkpoint; draw" in note
    how |= {"data": f"{HERE}:half_drawing", "steps": STEPS}
    after = planner.launch(folder / "half.json", resume=folder / "drawing/step-00000003", **how)
    (note,) = [note for note in after.notes if "dataset.chance and " in note]
    assert "checkpoint (no rank read the same microbatches when it was written); draw from" in note
