"""Clipping, decay, schedules, loss scale and NaN in a launch, beside PyTorch's own loop."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import planner
from planner import launch
from planner.launcher.gradients import GradientBuckets
from planner.launcher.stash.versions import CurrentWeights
from planner.launcher.updates import (
    BACKOFF,
    FIRST_SCALE,
    LossScale,
    OptimizerStep,
    StepResult,
    UpdateRules,
    loss_scale,
)
from planner.support.errors import FileError, LaunchError, OptionError
from planner.training.launch import _failure
from tests.support.commands import run
from tests.support.mode_runs import launched, loop, net, profile_of, run_all, write_strategy

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
HOW = {
    "lr_schedule": "cosine:2:8", "weight_decay": 0.05, "clip": 1.0, "optimizer": "momentum",
    "nan": "stop",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, and its profile."""
    folder = tmp_path_factory.mktemp("updates")
    net(folder / "net.onnx")
    return folder, profile_of(folder / "net.onnx")


def by_torch(path, steps=STEPS):
    """Losses and state of a loop with torch's own clipping and schedulers, and the norms."""
    module, norms, rates = net(path.parent / "same.onnx"), [], []
    known = torch.optim.lr_scheduler

    def begin(optimizer):
        warm = known.LinearLR(optimizer, 0.5, total_iters=1)
        cosine = known.CosineAnnealingLR(optimizer, 6)
        rates.append(known.SequentialLR(optimizer, [warm, cosine], milestones=[2]))

    def before():
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), HOW["clip"]).item())

    losses = loop(
        module, path, steps, 0.1, optimizer="momentum", weight_decay=0.05, begin=begin,
        before=before, after=lambda: rates[0].step(),
    )  # fmt: skip
    return losses, module.state_dict(), norms


@pytest.fixture(scope="module")
def by_hand(made):
    return by_torch(made[0] / "net.onnx")


def assert_state(held, state):
    for name, value in held.items():
        torch.testing.assert_close(value, state[name], rtol=1e-7, atol=1e-7)


def test_one_process_updates_as_torch_does(made, by_hand):
    folder, profile = made
    path = write_strategy(folder / "alone.json", profile, (1,), optimizer="momentum")
    report, held, _ = launched(path, STEPS, **HOW)
    losses, state, norms = by_hand
    assert min(norms) < HOW["clip"] < max(norms), "clipping has to matter, and not always"
    assert report.loss == pytest.approx(losses, rel=1e-7)
    assert_state(held, state)


@pytest.fixture(scope="module")
def together(made):
    """Losses and state by rank of several strategies in one start of torchrun on two ranks."""
    folder, profile = made
    for name, widths in {"pipeline": (1, 1), "replicas": (2,)}.items():
        write_strategy(folder / f"{name}.strategy.json", profile, widths, optimizer="momentum")
        (folder / f"{name}.settings.json").write_text(json.dumps(HOW))
    run_all(folder, 2, STEPS)
    names = ("pipeline", "replicas")
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in (0, 1)] for name in names}


@pytest.mark.parametrize("name", ["pipeline", "replicas"])
def test_the_norm_is_that_of_all_ranks(together, by_hand, name):
    """Half of the gradients, or all of them twice, would be clipped by another factor."""
    losses, state, _ = by_hand
    ranks = together[name]
    assert ranks[0][0] == pytest.approx(losses, rel=1e-7)
    for _, held, running in ranks:
        assert_state({n: held[n] for n in held if n not in running}, state)


class Shards:
    """Stands for shards of parameters that have none."""

    def cut(self):
        pass

    gather = settle = cut


@pytest.fixture
def weight():
    """A parameter in float64 of two replicas whose gradients add up to 6, and its buckets."""
    one = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    buckets = GradientBuckets({"w": one}, (), SimpleNamespace(device=0))
    one.grad.fill_(6.0)
    return one, buckets


def step_of(weight, **how):
    parameter, buckets = weight
    rules = UpdateRules(0.5, lambda step: 1.0, nan="stop", clip=how.pop("clip", None))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return OptimizerStep(
        optimizer, buckets, (parameter,), Shards(), CurrentWeights(), rules=rules, **how
    )


def test_a_stage_that_steps_alone_takes_the_mean_over_its_replicas(weight):
    step = step_of(weight, mean_over=2)
    step.step(0, 0.25)
    assert weight[0].item() == 1.0 - 0.5 * 3.0
    assert weight[0].grad.item() == 0.0
    assert (step.last.norm, step.last.loss) == (3.0, 0.25)
    with pytest.raises(LaunchError, match=r"lower --lr, or look at the data of this step$"):
        step.step(7, float("nan"))


def test_ranks_that_step_together_clip_by_the_norm_of_all(weight):
    """The other ranks have a gradient of 8, so that the norm is 10, and a loss of 1."""
    step = step_of(weight, clip=5.0, together=lambda own: [own[0] + 64.0, own[1] + 1.0, own[2]])
    step.step(0, 0.25)
    assert weight[0].item() == pytest.approx(1.0 - 0.5 * 3.0)
    assert (step.last.norm, step.last.loss) == (10.0, 1.25)
    with pytest.raises(LaunchError, match=r"--nan skip leaves such steps out$"):
        step.step(7, float("nan"))


def test_gradients_are_divided_by_a_count_that_is_known_late(weight):
    """A gradient of 6 is a sum over 8, with a loss scale of 2. The other rank counts 3, and this
    one 1: the mean is 6 * 8 / 4 / 2, and the other rank's gradient is no part of this norm.
    """
    step = step_of(
        weight, is_counted=True, scale=LossScale(2.0, is_dynamic=True), clip=4.0,
        together=lambda own: [own[0], own[1] + 0.25, own[2] + 3.0],
    )  # fmt: skip
    assert step.step(0, 0.5, 1.0, 8.0) == 0.5 * 8 / 4
    assert (step.last.norm, step.last.loss) == (6.0, 0.75 * 8 / 4)
    assert weight[0].item() == pytest.approx(1.0 - 0.5 * 4.0)


def test_a_step_whose_count_is_zero_is_left_out(weight):
    scale = LossScale(2.0, is_dynamic=True)
    step = step_of(weight, is_counted=True, scale=scale)
    assert math.isnan(step.step(0, 0.0, 0.0, 8.0))
    assert (weight[0].item(), weight[0].grad.item(), scale.good_steps) == (1.0, 0.0, 0)
    assert (step.uncounted, step.skipped, step.last.counted) == (1, 0, False)


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize(("how", "message"), [
    ({"clip": 0.0}, "--clip: expected a finite number above 0, got 0.0"),
    ({"weight_decay": -1.0}, "--weight-decay: expected a finite number of at least 0, got -1.0"),
    ({"nan": "ignore"}, "--nan: expected one of stop, skip, got 'ignore'"),
    ({"steps": 3, "epochs": 2, "data": "a:b"}, "--epochs 2 and --steps 3: expected one"),
    ({"epochs": 2}, "--epochs: synthetic data has no epochs"),
    ({"threads": 1025}, "--threads: expected a whole number from 1 to 1024, got 1025"),
    ({"eval_every": 2}, "--eval-every: there is no data to evaluate on; give --eval-data"),
    ({"optimizer": "adagrad"}, "--optimizer: expected one of sgd, momentum, adam, adamw"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(made, how, message):
    folder, profile = made
    path = write_strategy(folder / "wrong.json", profile, (1,))
    with pytest.raises(OptionError) as error:
        launch(path, **how)
    assert str(error.value).startswith(message)


def test_an_optimizer_with_more_state_than_planned_is_refused(made):
    folder, profile = made
    path = write_strategy(folder / "sgd.json", profile, (1,))
    with pytest.raises(OptionError) as error:
        launch(path, optimizer="adam")
    bytes_ = 2 * 8 * (3 * 6 * 9 + 6 * 2 + 6 * 8 * 9 + 8 * 2 + 8 * 5 + 5)
    assert str(error.value) == (
        "--optimizer adam: expected at most the state that was planned, 0 B on device d0 for sgd,"
        f" got {bytes_ / 1024:.1f} KiB; run: planner solve --optimizer adam"
    )


def test_an_optimizer_with_less_state_is_noted(made):
    folder, profile = made
    path = write_strategy(folder / "adam.json", profile, (1,), optimizer="adam")
    assert "planned for adam, run with sgd" in launch(path, steps=1, optimizer="sgd").notes


# ------------------------------------------------------------------------------ NaN


def poisoned(step, microbatch, inputs):
    """Data that is not finite in one microbatch of step 2."""
    shape, dtype = inputs["x"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(microbatch), dtype=dtype)
    if (step, microbatch) == (2, 1):
        x[0] = torch.nan
    return {"x": x}, torch.arange(shape[0]) % 5


DATA = "tests.training.test_updates:poisoned"


def test_nan_stop_ends_before_the_weights_change(made):
    folder, profile = made
    path = write_strategy(folder / "nan.json", profile, (1,))
    with pytest.raises(LaunchError) as error:
        launch(path, steps=5, nan="stop", data=DATA)
    assert str(error.value).startswith(
        "step 2: expected a finite loss and finite gradients, got a loss of nan and gradients of"
        " norm nan (--nan stop); lower --lr"
    )


FROM_2 = "the loss is not finite from step 2 on to the last one, 4; lower --lr, bound gradients by"


def test_a_launch_whose_loss_stays_nan_fails_and_names_its_weights(tmp_path):
    net(tmp_path / "net.onnx", training=False)
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    options = ["--steps", "5", "--data", DATA, "--checkpoint", str(tmp_path / "kept")]
    done = run("launch", str(path), *options, code=1)
    error = " ".join(done.stderr.split())
    assert error.startswith(f"Error: {FROM_2}")
    step = tmp_path / "kept" / "step-00000005"
    assert error.endswith(f"; {step} has the weights of the last step")
    assert "iteration" in done.stdout
    with pytest.raises(FileError) as refused:
        planner.write_weights(tmp_path / "kept", tmp_path / "trained.onnx", tmp_path / "trained.pt")
    assert str(refused.value) == (
        f"{step}: 8 of 8 weights are not finite: 'bn1.bias', 'bn1.weight', 'bn2.bias',"
        " 'bn2.weight', 'conv1.weight' and 3 more; take an earlier checkpoint, or write them with"
        " --allow-nan"
    )
    assert not {*tmp_path.glob("trained*")}
    written = planner.write_weights(tmp_path / "kept", tmp_path / "trained.onnx", allow_nan=True)
    assert written.notes[-1].startswith("8 of 8 weights are not finite: 'bn1.bias'")


def test_a_launch_that_goes_on_from_a_nan_counts_all_steps(made, tmp_path):
    folder, profile = made
    path = write_strategy(folder / "on.json", profile, (1,))
    launch(path, steps=4, data=DATA, checkpoint=tmp_path / "kept")
    report = launch(path, steps=6, data=DATA, resume=tmp_path / "kept")
    assert report.failure.startswith("the loss is not finite from step 4 on to the last one, 5;")


SOUND, WRONG = StepResult(0.1), StepResult(0.1, skipped=True)
NOT_RUN = StepResult(0.1, skipped=True, counted=False)


@pytest.mark.parametrize(
    ("losses", "results", "since"),
    [
        ([1.0, math.nan, math.inf], [SOUND] * 3, 1),
        ([math.nan, 1.0], [SOUND] * 2, None),
        ([math.nan, math.nan], [WRONG] * 2, 0),  # all left out: nothing was learned
        ([1.0, math.nan], [SOUND, WRONG], None),  # the weights of before are sound
        ([1.0, math.nan], [SOUND, NOT_RUN], None),
        ([math.nan, math.nan], [SOUND, NOT_RUN], 0),
    ],
)
def test_a_launch_fails_if_its_last_losses_are_not_finite(losses, results, since):
    said = _failure(losses, results, len(losses))
    assert (said is None) == (since is None)
    assert since is None or f"from step {since} on" in said


def test_nan_skip_leaves_the_step_out(tmp_path):
    net(tmp_path / "net.onnx", training=False)  # or the running statistics would have learned it
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    report, held, _ = launched(path, 5, nan="skip", data=DATA)
    assert [torch.tensor(one).isfinite().item() for one in report.loss] == [True] * 2 + [
        False, True, True,
    ]  # fmt: skip
    assert "1 of 5 steps left out: a loss or gradient was not finite" in report.notes
    _, before, _ = launched(path, 2, nan="skip", data=DATA)
    _, after, _ = launched(path, 3, nan="skip", data=DATA)
    assert_state(after, before)
    assert all(value.isfinite().all() for value in held.values())


# ------------------------------------------------------------------------------ shorter types


def test_the_loss_scale_follows_the_rules_of_torch():
    ours = LossScale(FIRST_SCALE, is_dynamic=True)
    theirs = torch.amp.GradScaler("cpu", growth_interval=2000)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    good = [*[True] * 1999, False, *[True] * 2000, False, False, True]
    for finite in good:
        theirs.scale(weight.sum() * (1.0 if finite else torch.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.learn(finite=finite)
        assert ours.value == theirs.get_scale()
    assert ours.value == FIRST_SCALE * BACKOFF**2


def test_only_float16_has_a_loss_scale():
    assert [loss_scale(one).value for one in (None, "bfloat16", "float16")] == [1, 1, FIRST_SCALE]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shorter_types_train_as_autocast_does(tmp_path, dtype):
    module = net(tmp_path / "net.onnx", dtype="float32", training=False).eval()
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    report, held, _ = launched(path, 3, dtype=dtype)
    assert f"planned for float32, run with {dtype}" in report.notes
    with torch.autocast("cpu", getattr(torch, dtype), cache_enabled=False):
        losses = loop(module, tmp_path / "net.onnx", 3)
    whole = loop(net(tmp_path / "same.onnx", dtype="float32", training=False).eval(),
                 tmp_path / "net.onnx", 3)  # fmt: skip
    assert report.loss == pytest.approx(losses, rel=2e-3)
    assert report.loss != pytest.approx(whole, rel=1e-6)
    assert all(value.dtype == torch.float32 for value in held.values())


def test_float16_skips_steps_whose_gradients_overflow(tmp_path, monkeypatch):
    net(tmp_path / "net.onnx", dtype="float32")
    path = write_strategy(tmp_path / "s.json", profile_of(tmp_path / "net.onnx"), (1,))
    monkeypatch.setattr("planner.launcher.updates.FIRST_SCALE", 2.0**40)
    report, _, _ = launched(path, 30, dtype="float16")
    (note,) = [one for one in report.notes if "left out" in one]
    assert 10 < int(note.split()[0]) < 30
    assert report.loss[-1] < report.loss[0]


def test_a_type_that_nothing_computes_in_is_refused(made):
    folder, profile = made
    path = write_strategy(folder / "long.json", profile, (1,))
    with pytest.raises(OptionError, match="--dtype: expected float64, the model's own"):
        launch(path, steps=1, dtype="float16")
