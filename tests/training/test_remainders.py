"""The end of an epoch makes a shorter step, and data goes on from its state: under every plan the
losses and weights are those of a plain PyTorch loop in float64.
"""

from dataclasses import replace

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
EXACT = ("counted_epochs", "stateful_sampler", "drawing", "collating", "StatefulStream",
         "stateful_loader", "DrawingStream")  # fmt: skip
"""Data that has a state."""
ON_TWO = ("counted_epochs", "drawing", "seeded_loader")
AFTER = (2, 3, 5)
"""Steps after which it goes on: within an epoch, at the end of one, and in another one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remainders")
    write_plans(folder, write_model(folder))
    return folder


@pytest.fixture(scope="module")
def told(folder):
    """What rank 0 tells of all launches."""
    launches = {
        f"{plan} {data}": {"plan": plan, "data": data, "steps": STEPS, "keep": f"{plan} {data}"}
        for data, plan in CASES
    }
    for plan in ("pipeline", "replicas", "zero3"):
        how = {"plan": plan, "data": "of_43", "own": True, "keep": f"own {plan}"}
        launches[f"own {plan}"] = how
    launches["flow"] = {"plan": "flow", "data": "of_43", "epochs": 2}
    launches["epochs"] = {"plan": "pipeline", "data": "of_43", "epochs": 2}
    every = {"steps": STEPS, "plan": "pipeline"}
    for data in ON_TWO:
        launches[data] = {**every, "data": data, "keep": data, "checkpoint_every": 1,
                          "checkpoint_keep": STEPS}  # fmt: skip
        for step in AFTER:
            launches[f"{data} {step}"] = {
                **every, "data": data, "keep": f"{data} {step}",
                "resume": f"{data}/step-{step:08d}",
            }  # fmt: skip
    launches["elsewhere"] = {
        "plan": "replicas", "data": "drawing", "steps": STEPS, "resume": "drawing/step-00000005",
    }  # fmt: skip
    return run_all(folder, launches)


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


@pytest.mark.parametrize(("data", "plan"), CASES)
def test_a_shorter_step_is_that_of_a_plain_loop_under_every_plan(folder, told, data, plan):
    losses, state = by_torch(batches(SAME.get(data, data)), STEPS)
    found = told[f"{plan} {data}"]
    assert found["losses"] == pytest.approx(losses, rel=1e-9)
    assert_learned(folder / f"{plan} {data}", state)
    assert found["notes"].count(LEFT[SAME.get(data, data)]) == 1


@pytest.mark.parametrize("plan", ["pipeline", "replicas", "zero3"])
def test_a_short_batch_of_an_own_loop_is_a_shorter_step(folder, told, plan):
    losses, state = by_torch(batches("of_43"), 3)
    assert told[f"own {plan}"]["losses"] == pytest.approx(losses, rel=1e-9)
    assert_learned(folder / f"own {plan}", state)


def test_epochs_count_shorter_steps(told):
    losses, _ = by_torch(batches("of_43"), 6)
    assert told["epochs"]["losses"] == pytest.approx(losses, rel=1e-9)


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


@pytest.mark.parametrize("data", ON_TWO)
def test_both_ranks_of_a_pipeline_go_on(folder, told, data):
    for step in AFTER:
        assert told[f"{data} {step}"]["losses"] == told[data]["losses"][step:]
        first, second = parameters(folder / data), parameters(folder / f"{data} {step}")
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_state_that_is_lost_is_said(folder, told, tmp_path):
    path, how = folder / "alone.json", {"model": folder / "net.onnx", "threads": 1, "steps": 2}
    how["data"] = f"{HERE}:drawing_workers"
    planner.launch(path, checkpoint=tmp_path / "kept", checkpoint_every=1, **how)
    after = planner.launch(path, resume=tmp_path / "kept/step-00000001", **how)
    (note,) = [note for note in after.notes if "dataset.chance in worker processes" in note]
    assert note.startswith(
        f"--data {HERE}:drawing_workers: dataset.chance in worker processes and "
    )
    assert "the state is as at the begin of a training, not as at the checkpoint;" in note
    (note,) = [note for note in told["elsewhere"]["notes"] if "dataset.chance" in note]
    assert "checkpoint (no rank read the same microbatches when it was written); draw from" in note
