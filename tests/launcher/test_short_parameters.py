"""bfloat16 parameters with float32 copies in the optimizer, and float32 parameters with bfloat16
copies that stay for a step, train as plain PyTorch loops under autocast do.
"""

import json
import math
import shutil
from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import planner
from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.strategy import ScheduleName
from planner.support.errors import FileError, OptionError
from planner.training.checkpoints.folder import find
from tests.support.checkpoint_runs import tensors_of
from tests.support.memory_runs import run
from tests.support.ranks import ROOT, forked
from tests.support.short_runs import (
    CLIP,
    HERE,
    RATE,
    STEPS,
    by_replica,
    by_round,
    by_torch,
    in_turn,
    model_of,
    write,
)

HOW = {"learning_rate": RATE, "threads": 1, "shuffle": False, "steps": STEPS,
       "data": f"{HERE}:data"}  # fmt: skip
TOGETHER = {
    "replicas": by_replica, "zero1": by_replica, "zero2": by_round, "zero3": by_round,
    "beside": by_round, "again": by_round, "pipeline": in_turn,
}  # fmt: skip
"""By the plan, the order in which it adds up gradients."""
ENDS = {"": torch.bfloat16, " in full": torch.float32, " cast": None}
"""By the end of a plan's name, the type in which gradients are added up; None where parameters are
float32, of which products read copies.
"""
RESUMED = ("replicas", "zero1", "zero3", "beside", "megatron", "pipeline")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the strategies, and the float32 parameters that they begin with."""
    folder = tmp_path_factory.mktemp("short")
    model, values = model_of(folder)
    write(folder, model)
    return folder, values


@pytest.fixture(scope="module")
def told(made):
    """What the launches on two ranks told, in one start of these."""
    folder, _ = made
    launches = {
        f"{name}{end}": {**HOW, "strategy": f"{name}{end}.json"}
        for name in (*TOGETHER, "megatron")
        for end in ENDS
    }
    for name in RESUMED:
        own = {**HOW, "strategy": f"{name}.json"}
        launches[f"half {name}"] = {**own, "steps": STEPS // 2}
        launches[f"rest {name}"] = {**own, "resume": f"half {name}"}
    other = {**HOW, "strategy": "replicas.json", "resume": "half zero3"}
    launches["zero3 then replicas"] = other
    runs = {name: {**own, "keep": name} for name, own in launches.items()}
    (folder / "launches.json").write_text(json.dumps(runs))
    forked(ROOT / "tests/support/short_runs.py", 2, folder)
    return json.loads((folder / "told.json").read_text())


def copies_of(path):
    """The float32 parameters of a checkpoint, by name."""
    start = "parameters/"
    return {n.removeprefix(start): one for n, one in tensors_of(path).items() if n[:11] == start}


def differing(found, expected):
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", TOGETHER)
def test_two_devices_train_as_a_plain_loop_bit_for_bit(made, told, name, end):
    losses, copies = by_torch(made[1], TOGETHER[name], ENDS[end])
    assert told[name + end]["loss"] == pytest.approx(losses, rel=1e-12)
    found = copies_of(made[0] / f"{name}{end}")
    if ENDS[end] is not None:
        assert differing(found, copies) == []
    for key, copy in copies.items():  # a fused step rounds the ends of parts in another way
        torch.testing.assert_close(found[key], copy, rtol=0, atol=1e-8)


@pytest.mark.parametrize("end", ENDS)
def test_split_products_train_as_a_plain_loop_to_the_digits_of_bfloat16(made, told, end):
    """Their sums are rounded at other places."""
    losses, copies = by_torch(made[1], in_turn, ENDS[end])
    assert told[f"megatron{end}"]["loss"] == pytest.approx(losses, rel=2e-3)
    found = copies_of(made[0] / f"megatron{end}")
    for name, copy in copies.items():
        moved = (copy - made[1][name]).norm()
        assert (found[name] - copy).norm() < 0.05 * moved


@pytest.mark.parametrize("name", RESUMED)
def test_a_training_goes_on_bit_for_bit(made, told, name):
    assert told[f"rest {name}"]["loss"] == told[name]["loss"][STEPS // 2 :]
    expected = tensors_of(made[0] / name)
    assert differing(tensors_of(made[0] / f"rest {name}"), expected) == []


def test_a_training_goes_on_in_another_form(made, told):
    losses, copies = by_torch(made[1], by_round)
    assert told["zero3 then replicas"]["loss"] == pytest.approx(losses[STEPS // 2 :], rel=2e-3)
    found = copies_of(made[0] / "zero3 then replicas")
    for name, copy in copies.items():
        assert (found[name] - copy).norm() < 0.05 * (copy - made[1][name]).norm()


def test_parts_of_float32_copies_are_no_rounded_parameters(made, told):
    """Before the first step they are those of the file."""
    start = find(made[0] / "half zero3").record
    assert {one.dtype for name, one in start.tensors.items() if "random/" not in name} == {
        "float32"
    }
    found = copies_of(made[0] / "half zero3")
    assert all(not torch.equal(one, one.bfloat16().float()) for one in found.values())


# ------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("end", ENDS)
def test_one_device_clips_the_norm_of_float32_gradients(made, end, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    kept = made[0] / f"clipped{end}"
    report = planner.launch(made[0] / f"one{end}.json", clip=CLIP, checkpoint=kept, **HOW)
    losses, copies = by_torch(made[1], in_turn, ENDS[end], CLIP)
    assert report.loss == pytest.approx(losses, rel=1e-3)
    found = copies_of(kept)
    for name, copy in copies.items():
        torch.testing.assert_close(found[name], copy, rtol=0, atol=1e-3)


def test_weights_are_the_float32_copies(made, tmp_path):
    kept, path = tmp_path / "kept", tmp_path / "new.onnx"
    planner.launch(made[0] / "one.json", checkpoint=kept, **HOW)
    planner.write_weights(kept, path, model=made[0] / "net.onnx")
    written = {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
    for name, copy in copies_of(kept).items():
        assert written[name].dtype == np.float32
        assert np.array_equal(written[name], copy.numpy())


@pytest.mark.parametrize(("first", "then"), [("one", "one cast"), ("one cast", "one")])
def test_checkpoints_of_both_types_of_parameters_continue_each_other(made, tmp_path, first, then):
    """From the same float32 numbers and moments."""
    half = {**HOW, "steps": STEPS // 2}
    planner.launch(made[0] / f"{first}.json", checkpoint=tmp_path / "half", **half)
    resumed = {"resume": tmp_path / "half", "checkpoint": tmp_path / "kept"}
    report = planner.launch(made[0] / f"{then}.json", **resumed, **HOW)
    before, after = copies_of(tmp_path / "half"), copies_of(tmp_path / "kept")
    losses, _ = by_torch(made[1], in_turn, ENDS[then.removeprefix("one")])
    assert report.loss == pytest.approx(losses[STEPS // 2 :], rel=1e-2)
    for name, one in before.items():
        assert 0 < (after[name] - one).abs().max() < 2 * RATE * STEPS
    with planner.trainer(made[0] / f"{then}.json", resume=tmp_path / "kept", threads=1) as trainer:
        held = trainer.state_dict()
    assert differing(held, after) == []


def test_steps_are_seen_that_bfloat16_would_lose(made, tmp_path):
    """A weight of 1 and a step of 1e-4: 8 bits of mantissa have no number between."""
    how = {**HOW, "learning_rate": 1e-4, "checkpoint": tmp_path / "kept"}
    planner.launch(made[0] / "one.json", **how)
    found = copies_of(tmp_path / "kept")
    for name, value in made[1].items():
        moved = (found[name] - value).abs()
        assert 1e-4 < moved.max() < 2e-3


def test_an_asynchronous_pipeline_steps_copies(made, tmp_path):
    """One stage alone steps after every microbatch: as a loop of steps of one microbatch."""
    plan = read_plan(made[0] / "one.json")
    strategy = replace(plan.strategy, schedule=ScheduleName.PIPEDREAM)
    write_plan(replace(plan, strategy=strategy), made[0] / "flow.json")
    planner.launch(made[0] / "flow.json", checkpoint=tmp_path / "kept", **HOW)
    _, copies = by_torch(made[1], in_turn, torch.bfloat16, math.inf, 1)
    assert differing(copies_of(tmp_path / "kept"), copies) == []


def test_another_type_than_the_plans_is_refused(made):
    with pytest.raises(OptionError, match="--dtype float32: expected bfloat16, as the plan has"):
        planner.launch(made[0] / "one.json", dtype="float32", **HOW)


def test_a_strategy_says_its_types(made, tmp_path):
    plain = json.loads((made[0] / "one in full.json").read_text())
    assert (plain["parameter_dtype"], plain["gradient_dtype"]) == ("bfloat16", "float32")
    assert plain["format"] == "planner-strategy/3"
    assert "gradient_dtype" not in json.loads((made[0] / "one.json").read_text())
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps({**plain, "parameter_dtype": "float16"}))
    with pytest.raises(FileError, match="parameter_dtype: expected one of bfloat16, got 'float16'"):
        read_plan(path)


# ------------------------------------------------------------------------------ memory


def test_tracked_memory_is_predicted(made, tmp_path):
    """Not counted are some scalars: the optimizer's numbers of steps, and the loss. Threads of gloo
    may hold tensors as small as these a little longer that stages send inside.
    """
    shutil.copy(made[0] / "net.onnx", tmp_path)
    names = [*TOGETHER, "megatron"]
    for name, end in product(names, ENDS):
        own = made[0] / f"{name}{end}.json"
        shutil.copy(own, tmp_path / f"{name}{end.replace(' ', '-')}.strategy.json")
    peaks = run(tmp_path, 2, 200)
    assert len(peaks) == 2 * len(ENDS) * len(names)
    wrong = [
        (one.plan, one.rank, one.predicted_bytes, one.live_bytes)
        for one in peaks
        if one.predicted_bytes > 1.08 * one.live_bytes
        or (
            one.plan.startswith(("replicas", "pipeline"))
            and one.predicted_bytes < one.live_bytes - 200
        )
    ]
    assert wrong == []
