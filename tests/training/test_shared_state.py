"""Parameters, gradients and optimizer state in parts over replicas train as a plain PyTorch loop
over whole batches does, in float64: in every form, resumed in another one, and at epochs' ends.
"""

import json
import math

import pytest
import torch

from tests.support.checkpoint_runs import tensors_of
from tests.support.counted_runs import CLIP, RATE, STEPS, batches, by_torch, model_of, samples
from tests.support.ranks import ROOT, forked
from tests.support.shared_runs import BATCH, BESIDE, HERE, LEFT, WIDTH, write, write_split

HOW = {"learning_rate": RATE, "clip": CLIP, "threads": 1, "shuffle": False}
WHOLE = {**HOW, "steps": STEPS, "data": f"{HERE}:data"}
TWO = ("zero1", "zero2", "zero3", "again", "layers1", "layers3", "selected", "mixed")
ENDS = ("zero2", "zero3", f"zero1{BESIDE}", f"zero3{BESIDE}")
"""Trained by epochs with a shorter step at the end, and evaluated."""
SPLIT = ("states", "gradients", "parameters")
"""What lies in uneven chunks on a mesh of two."""
FOUR = ("four", "searched", "hybrid", "mesh", "pipeline1", "pipeline2", "pipeline3")
BOTH = ("", BESIDE)
RESUMED = {
    "zero3": ("replicas", "zero1"), "replicas": ("zero3", "zero2"),
    f"zero1{BESIDE}": (f"zero3{BESIDE}", "zero1"),
}  # fmt: skip
"""By the form of the first half, those of the second."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the strategies, and the parameters that they begin with."""
    folder = tmp_path_factory.mktemp("shared")
    model, values = model_of(folder, BATCH, WIDTH)
    write(folder, model)
    write_split(folder, model_of(folder, 2 * BATCH, WIDTH)[0])
    return folder, values


def run(folder, num_ranks, launches):
    """What some launches told, in one start of ranks."""
    runs = {
        name: {**how, "model": str(folder / how.get("model", f"net{BATCH}.onnx")), "keep": name}
        for name, how in launches.items()
    }
    (folder / "launches.json").write_text(json.dumps(runs))
    forked(ROOT / "tests/support/shared_runs.py", num_ranks, folder)
    return json.loads((folder / "told.json").read_text())


def each(names, how):
    """Launches of strategies, in line with computations and beside them."""
    both = [name + end for name in names for end in BOTH]
    return {name: {**how, "strategy": f"{name}.json"} for name in both}


@pytest.fixture(scope="module")
def two(made):
    """Of two ranks."""
    launches = each(TWO, WHOLE) | each(SPLIT, {**WHOLE, "model": f"net{2 * BATCH}.onnx"})
    for name in ENDS:
        end = {**HOW, "epochs": 2, "data": f"{HERE}:some", "eval_data": f"{HERE}:few"}
        launches[f"{name} some"] = {**end, "strategy": f"{name}.json"}
    launches["one"] = {
        **WHOLE, "strategy": f"zero1{BESIDE}.json", "eval_data": f"{HERE}:one", "eval_every": 2,
    }  # fmt: skip
    for first, others in RESUMED.items():
        half = {**WHOLE, "strategy": f"{first}.json", "steps": STEPS // 2}
        launches[f"half {first}"] = half
        for name in others:
            rest = {**WHOLE, "strategy": f"{name}.json", "resume": f"half {first}"}
            launches[f"{first} then {name}"] = rest
    return run(made[0], 2, launches)


@pytest.fixture(scope="module")
def four(made):
    """Of four ranks."""
    return run(made[0], 4, each(FOUR, WHOLE))


def check(folder, name, told, expected):
    """Losses and parameters."""
    losses, values = expected
    assert [None if math.isnan(one) else one for one in told["loss"]] == [
        one if one is None else pytest.approx(one, rel=1e-9) for one in losses
    ]
    held = tensors_of(folder / name)
    for parameter, value in values.items():
        torch.testing.assert_close(held[f"parameters/{parameter}"], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("beside", BOTH)
@pytest.mark.parametrize("name", [*TWO, *SPLIT])
def test_two_devices_that_share_train_as_a_plain_loop(made, two, name, beside):
    check(made[0], name + beside, two[name + beside], by_torch(made[1], batches()))


@pytest.mark.slow
@pytest.mark.parametrize("beside", BOTH)
@pytest.mark.parametrize("name", FOUR)
def test_four_devices_that_share_train_as_a_plain_loop(made, four, name, beside):
    check(made[0], name + beside, four[name + beside], by_torch(made[1], batches()))


def test_the_solver_that_searched_chose_parts(made):
    """Among the plans of four devices is one that it found."""
    stages = json.loads((made[0] / "searched.json").read_text())["strategy"]["stages"]
    assert any(stage.get("zero") for stage in stages)


@pytest.mark.parametrize("name", [f"{a} then {b}" for a, some in RESUMED.items() for b in some])
def test_a_training_goes_on_in_another_form(made, two, name):
    losses, values = by_torch(made[1], batches())
    check(made[0], name, two[name], (losses[STEPS // 2 :], values))


def test_a_replica_without_a_microbatch_to_evaluate_gathers_with_the_others(made, two):
    check(made[0], "one", two["one"], by_torch(made[1], batches()))
    losses = [figures["loss"] for _, figures in two["one"]["evaluations"]]
    assert len(losses) == STEPS // 2 and losses[-1] < losses[0]


@pytest.mark.parametrize("name", [f"{name} some" for name in ENDS])
def test_the_end_of_an_epoch_has_a_microbatch_for_each_replica(made, two, name):
    """Of 43 samples, 36 make steps of 12 and 6 a shorter one; one is left out. Evaluation runs four
    microbatches, of which the last one has no sample.
    """
    x, y = samples()
    given = [(x[i:j], y[i:j]) for i, j in ((0, 12), (12, 24), (24, 36), (36, LEFT - 1))] * 2
    losses, values = by_torch(made[1], given)
    check(made[0], name, two[name], (losses, values))
    h = torch.nn.functional.layer_norm(values["words"][x[:7]], (WIDTH,), values["g"], values["b"])
    scores = torch.nn.functional.gelu(h @ values["w1"]) @ values["w2"]
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), y[:7].flatten())
    _, figures = two[name]["evaluations"][-1]
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert any("1 of 43 samples of each epoch" in one for one in two[name]["notes"])
