"""Whole launches of split stages beside one process: losses, evaluations and checkpoints."""

import json
import random
import sys
from dataclasses import replace

import pytest
import torch

from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.training.checkpoints.folder import find
from tests.support.checkpoint_runs import tensors_of
from tests.support.ranks import ROOT, forked
from tests.support.split_launches import EVALS, launched
from tests.support.split_models import gpt, loaded, megatron
from tests.support.split_plans import cut_further, plan_of, random_sharding

OPTIONS = {
    "steps": 4, "learning_rate": 0.05, "every": 2, "eval_data": "evals:data", "eval_every": 2,
    "clip": 0.5,
}  # fmt: skip


def write(folder, name, model, shardings, prefetch=None):
    """A strategy of stages that are cut in the middle, if there are several."""
    names = [one.name for one in model.graph.operators]
    half = len(names) // 2 if len(shardings) > 1 else len(names)
    parts = [names[:half], names[half:]][: len(shardings)]
    stages, first = [], 0
    for some, lies in zip(parts, shardings, strict=True):
        size = 1 if lies is None else lies.num_devices
        group = tuple(range(first, first + size))
        stages.append(Stage(tuple(some), (group,), 1, False, lies, prefetch=prefetch))
        first += size
    strategy = Strategy(tuple(stages), ScheduleName.ONE_F_ONE_B, 2)
    plan = plan_of(model, strategy, optimizer="momentum")
    write_plan(plan, folder / f"{name}.json")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What all launches told, and their folder."""
    folder, chance = tmp_path_factory.mktemp("launches"), random.Random(4)
    model = loaded(gpt(folder / "net.onnx"))
    (folder / "evals.py").write_text(EVALS)
    lies = random_sharding(model, (2,), chance)
    further = cut_further(lies, model, 1, chance)
    write(folder, "split", model, [further])
    write(folder, "beside", model, [further], prefetch=1_000)
    write(folder, "sequence", model, [megatron(model, 2, sequence=True)], prefetch=2**20)
    write(folder, "other", model, [random_sharding(model, (2,), chance)])
    write(folder, "one", model, [None])
    launches = {
        "split": {"strategy": "split.json", "keep": "kept", **OPTIONS},
        "resumed": {
            "strategy": "split.json", "keep": "again", "resume": "kept/step-00000002", **OPTIONS
        },
        "otherwise": {
            "strategy": "other.json", "keep": "other", "resume": "kept/step-00000002", **OPTIONS
        },
        "beside": {"strategy": "beside.json", "keep": "beside", **OPTIONS},
        "beside, resumed": {
            "strategy": "beside.json", "keep": "beside-again", "resume": "beside/step-00000002",
            **OPTIONS,
        },
        "sequence": {"strategy": "sequence.json", "keep": "sequence", **OPTIONS},
    }  # fmt: skip
    (folder / "launches.json").write_text(json.dumps(launches))
    forked(ROOT / "tests/support/split_launches.py", 2, folder)
    sys.path.insert(0, str(folder))
    found = json.loads((folder / "told.json").read_text())
    found["one"] = launched(folder, "one.json", "one", **OPTIONS)
    resume = {"resume": "kept/step-00000002", **OPTIONS}
    found["one, resumed"] = launched(folder, "one.json", "one-resumed", **resume)
    sys.path.remove(str(folder))
    return folder, found


WHOLE = ("split", "beside", "sequence")
"""Launches of all steps on two ranks."""


@pytest.mark.parametrize("name", WHOLE)
def test_losses_are_those_of_one_process(told, name):
    _, found = told
    assert found[name]["loss"] == pytest.approx(found["one"]["loss"], rel=1e-9)


@pytest.mark.parametrize("name", WHOLE)
def test_evaluations_are_those_of_one_process(told, name):
    """Ten samples in microbatches of four, some classes ignored."""
    _, found = told
    for (step, figures), (expected, other) in zip(
        found[name]["evaluations"], found["one"]["evaluations"], strict=True
    ):
        assert step == expected
        assert figures == pytest.approx(other, rel=1e-9)
    assert {"loss", "accuracy"} <= found[name]["evaluations"][0][1].keys()


def test_a_training_goes_on_from_a_checkpoint_bit_for_bit_beside_computations(told):
    folder, found = told
    assert found["beside, resumed"]["loss"] == found["beside"]["loss"][2:]
    expected, after = tensors_of(folder / "beside"), tensors_of(folder / "beside-again")
    assert all(torch.equal(after[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name, kept", [
    ("resumed", "again"), ("otherwise", "other"), ("one, resumed", "one-resumed"),
    ("beside, resumed", "beside-again"),
])  # fmt: skip
def test_a_checkpoint_goes_on_however_it_was_split(told, name, kept):
    folder, found = told
    assert found[name]["loss"] == pytest.approx(found["one"]["loss"][2:], rel=1e-9)
    expected, after = tensors_of(folder / "one"), tensors_of(folder / kept)
    assert expected.keys() == after.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-9, atol=1e-12)


def test_a_checkpoint_has_whole_tensors(told):
    folder, _ = told
    record = find(folder / "kept").record
    assert record.tensors["parameters/words"].shape == (24, 16)
    assert record.tensors["optimizer/words/momentum_buffer"].shape == (24, 16)


def test_a_plan_reads_back_as_it_was(told):
    folder, _ = told
    plan = read_plan(folder / "split.json")
    assert plan.strategy.stages[0].sharding.states
    write_plan(replace(plan), folder / "again.json")
    assert (folder / "again.json").read_text() == (folder / "split.json").read_text()
