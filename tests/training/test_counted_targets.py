"""A microbatch weighs its counted targets over those of the whole step: every plan, and any size of
microbatches, trains as a plain PyTorch loop over whole batches does, in float64.
"""

import json
import math

import pytest
import torch

from planner import launch
from planner.artefacts.strategy import ScheduleName
from planner.support.errors import LaunchError
from tests.support.checkpoint_runs import tensors_of
from tests.support.counted_runs import (
    CLIP,
    RATE,
    STEPS,
    batches,
    by_torch,
    launched,
    model_of,
    write,
)
from tests.support.ranks import ROOT, forked

HERE = "tests.support.counted_runs"
HOW = {"learning_rate": RATE, "clip": CLIP, "threads": 1}
LAUNCH = {**HOW, "steps": STEPS, "data": f"{HERE}:data", "shuffle": False}
OWN = {"loss": f"{HERE}:counted"}
PLANS = {  # kind and microbatch of each plan of two devices
    "pipeline": ("pipeline", 3), "larger": ("pipeline", 6), "again": ("pipeline", 3),
    "replicas": ("replicas", 3), "classes": ("classes", 3), "samples": ("samples", 6),
    "zero": ("zero", 12),
}  # fmt: skip
RUNS = {
    **{name: (name, LAUNCH) for name in PLANS},
    **{f"{name}, own function": (name, {**LAUNCH, **OWN}) for name in ("pipeline", "replicas")},
    **{f"{name}, own loop": (name, {**HOW, "loop": True}) for name in ("pipeline", "zero")},
}
ALONE = {
    **{f"4 x 3{more}": (3, how) for more, how in [
        ("", LAUNCH), (", own function", {**LAUNCH, **OWN}),
        (", own loop", {**HOW, "loop": True}),
        (", own loop and function", {**HOW, **OWN, "loop": True}),
    ]},
    "2 x 6": (6, LAUNCH), "1 x 12": (12, LAUNCH),
}  # fmt: skip
SAID = "all targets of {!r} are -100, which is ignored"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the models by size, and the parameters that they begin with."""
    folder = tmp_path_factory.mktemp("counted")
    models = {batch: model_of(folder, batch) for batch in (3, 4, 6, 12)}
    for batch, (model, _) in models.items():
        write(folder / f"one{batch}.json", model, "one")
    return folder, models


@pytest.fixture(scope="module")
def expected(made):
    """Losses and parameters of the plain loop."""
    return by_torch(made[1][3][1], batches())


@pytest.fixture(scope="module")
def together(made):
    """What the plans of two devices told, in one start of two ranks."""
    folder, models = made
    runs = {}
    for name, (kind, batch) in PLANS.items():
        write(folder / f"{name}.json", models[batch][0], kind, recompute=name == "again")
    for name, (plan, how) in RUNS.items():
        where = {"strategy": f"{plan}.json", "model": f"net{PLANS[plan][1]}.onnx", "keep": name}
        runs[name] = {**how, **where}
    (folder / "launches.json").write_text(json.dumps(runs))
    forked(ROOT / "tests/support/counted_runs.py", 2, folder)
    return json.loads((folder / "told.json").read_text())


def check(folder, name, told, expected):
    """Losses, parameters, and words on the steps that are left out."""
    losses, values = expected
    assert [one is None for one in losses] == [False, True, False, False] * 2
    assert [None if math.isnan(one) else one for one in told["loss"]] == [
        one if one is None else pytest.approx(one, rel=1e-9) for one in losses
    ]
    held = tensors_of(folder / name)
    for parameter, value in values.items():
        found = held[f"parameters/{parameter}"]
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
    why = f"--loss {HERE}:counted counts 0" if "function" in name else SAID.format("matmul4")
    if "loop" in name:
        assert told["notes"] == [f"step {step} is left out: {why}" for step in (1, 5)]
    else:
        assert [one for one in told["notes"] if "-100" in one or "counts" in one] == [
            f"2 of 8 steps left out: {why}"
        ]
        assert not any("finite" in one for one in told["notes"])


@pytest.mark.parametrize("name", RUNS)
def test_two_devices_train_as_a_plain_loop_over_whole_batches(made, together, expected, name):
    check(made[0], name, together[name], expected)


def test_replicas_of_different_numbers_of_microbatches(made, expected, tmp_path):
    folder, models = made
    write(tmp_path / "unequal.json", models[4][0], "unequal")
    model = str(folder / "net4.onnx")
    how = {**LAUNCH, "strategy": "unequal.json", "model": model, "keep": "kept"}
    (tmp_path / "launches.json").write_text(json.dumps({"one": how}))
    forked(ROOT / "tests/support/counted_runs.py", 3, tmp_path)
    check(tmp_path, "kept", json.loads((tmp_path / "told.json").read_text())["one"], expected)


@pytest.mark.parametrize("name", ALONE)
def test_the_size_of_microbatches_does_not_matter(made, expected, name):
    folder, (batch, how) = made[0], ALONE[name]
    told = launched(folder, f"one{batch}.json", name, model=f"net{batch}.onnx", **how)
    check(folder, name, told, expected)


def test_the_log_tells_a_step_without_counted_targets(made, tmp_path):
    folder = made[0]
    launch(folder / "one3.json", model=folder / "net3.onnx", log_file=tmp_path / "log", **LAUNCH)
    lines = [json.loads(one) for one in (tmp_path / "log").read_text().splitlines()[1:]]
    assert [one["step"] for one in lines if one.get("counted") == 0] == [2, 6]
    assert [one["step"] for one in lines if one["loss"] is None and one["skipped"]] == [2, 6]


@pytest.mark.parametrize(("loss", "why"), [
    ({}, SAID.format("matmul4")), (OWN, f"--loss {HERE}:counted counts 0"),
])  # fmt: skip
def test_a_launch_in_which_nothing_counts_is_an_error(made, loss, why):
    folder = made[0]
    how = {**LAUNCH, **loss, "data": f"{HERE}:nothing", "steps": 3}
    with pytest.raises(LaunchError) as error:
        launch(folder / "one3.json", model=folder / "net3.onnx", **how)
    assert str(error.value).endswith(f"no step was run: in each of 3, {why}")


@pytest.mark.parametrize("loss", [{}, OWN])
def test_under_an_asynchronous_schedule_each_minibatch_counts_alone(made, tmp_path, loss):
    """One stage steps after each minibatch. Without momentum, one that counts nothing changes
    nothing; its loss of 0 is in the mean of its step.
    """
    folder, (model, values) = made[0], made[1][3]
    write(tmp_path / "s.json", model, "one", ScheduleName.PIPEDREAM)
    how = {**LAUNCH, **loss, "optimizer": "sgd", "checkpoint": tmp_path / "kept"}
    del how["clip"]
    report = launch(tmp_path / "s.json", model=folder / "net3.onnx", **how)
    small = [
        pair for x, y in batches() for pair in zip(x.split(3), y.split(3), strict=True)
    ]  # fmt: skip
    losses, state = by_torch(values, small, momentum=0.0, clip=math.inf)
    each = torch.tensor([one or 0.0 for one in losses], dtype=torch.float64).view(STEPS, 4)
    assert report.loss == pytest.approx(each.mean(1).tolist(), rel=1e-9)
    held = tensors_of(tmp_path / "kept")
    for name, value in state.items():
        torch.testing.assert_close(held[f"parameters/{name}"], value, rtol=1e-9, atol=1e-12)
    (note,) = [one for one in report.notes if "gradients of zero" in one]
    assert note.startswith(f"{losses.count(None)} minibatches had a loss and gradients of zero: ")
