"""`planner.trainer`: a user's own loop beside the same loop in plain PyTorch, in float64."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner
from planner.artefacts.options import Optimizer
from planner.launcher.updates import make_optimizer
from planner.operators import randomness
from planner.support.errors import FileError, LaunchError, OptionError
from planner.training.data.fingerprints import fingerprint, number, prints
from planner.training.data.samples import Named
from tests.support.mode_runs import MICROBATCHES, RATIO, SEED, net, profile_of, write_strategy
from tests.support.own_loops import RATES, SAMPLES, STEPS, batches, run_all
from tests.support.ranks import forked


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model without noise and its strategies."""
    folder = tmp_path_factory.mktemp("own_loop")
    net(folder / "net.onnx", noise=False)
    profile = profile_of(folder / "net.onnx")
    for name, widths in {"alone": (1,), "pipeline": (1, 1), "replicas": (2,)}.items():
        write_strategy(folder / f"{name}.json", profile, widths, optimizer="momentum")
    return folder


def stored(number):
    """A number as an attribute of an ONNX file has it: in float32."""
    return float(np.float32(number))


class Quiet(nn.Module):
    """The module of the model without noise, whose dropout draws a launch's numbers."""

    def __init__(self, folder):
        super().__init__()
        self.net = net(folder / "same.onnx", noise=False)
        for norm in (self.net.bn1, self.net.bn2):
            norm.eps = stored(norm.eps)

    def forward(self, x):
        one = self.net
        x = one.bn1(one.conv1(x)).relu()
        x = one.bn2(one.conv2(x)).relu().mean((2, 3))
        if self.training:
            x = x * randomness.dropout_mask("drop", x.shape, stored(RATIO)) / (1 - stored(RATIO))
        return one.fc(x)


def by_torch(folder, own=lambda m: True):
    """Losses, state and figures of a plain loop of PyTorch: gradients of microbatches accumulated,
    torch's clipping and SGD, and a learning rate for each step.

    Args:
        own: microbatches whose statistics batch normalizations keep.
    """
    module = Quiet(folder)
    optimizer = torch.optim.SGD(module.parameters(), 1.0, momentum=0.9, weight_decay=0.05)
    assert type(optimizer) is type(make_optimizer(Optimizer.MOMENTUM, [*module.parameters()], 1.0))
    losses = []
    for step, (x, classes) in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.zero_grad()
        losses.append(0.0)
        for m, (inputs, target) in enumerate(
            zip(x.chunk(MICROBATCHES), classes.chunk(MICROBATCHES), strict=True)
        ):
            kept = {n: one.clone() for n, one in module.named_buffers()}
            with randomness.random_operators(SEED, step, m):
                loss = nn.functional.cross_entropy(module(inputs), target) / MICROBATCHES
            loss.backward()
            losses[-1] += loss.item()
            if not own(m):
                for name, one in module.named_buffers():
                    one.copy_(kept[name])
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    x, classes = (torch.cat(one) for one in zip(*batches(3)[1:], strict=True))
    with torch.no_grad():
        logits = module.eval()(x)
    figures = {
        "loss": nn.functional.cross_entropy(logits, classes).item(),
        "accuracy": (logits.argmax(1) == classes).double().mean().item(),
    }
    state = {name.removeprefix("net."): one for name, one in module.state_dict().items()}
    return losses, state, figures


def assert_same(found, expected, tolerance=1e-12):
    losses, state, figures = found
    assert losses == pytest.approx(expected[0], rel=tolerance)
    assert figures == pytest.approx(expected[2], rel=tolerance)
    learned = {name for name in expected[1] if not name.endswith("num_batches_tracked")}
    assert state.keys() == learned
    for name in learned:
        torch.testing.assert_close(state[name], expected[1][name], rtol=tolerance, atol=tolerance)


HOW = {"optimizer": "momentum", "weight_decay": 0.05, "clip": 1.0}
OTHER_VALUES = "planner.trainer: rank 0 and rank 1 read different "
WHOLE = (
    "give each rank the batch of the whole step, without DistributedSampler, and with shuffle=True"
    " only after the same torch.manual_seed on all ranks"
)


@pytest.fixture(scope="module")
def together(made):
    """What two ranks have written of all loops."""
    return run_all(made)


def test_one_process_is_a_plain_loop(made):
    losses = []
    with planner.trainer(made / "alone.json", learning_rate=1.0, **HOW) as trainer:
        for step, batch in enumerate(batches()):
            trainer.set_lr(RATES[step])
            losses.append(trainer.step(batch))
        assert (trainer.steps_done, trainer.lr) == (STEPS, RATES[-1])
        found = losses, trainer.state_dict(), trainer.evaluate(batches(3)[1:])
    assert_same(found, by_torch(made))


def test_two_stages_are_a_plain_loop(made, together):
    expected = by_torch(made)
    for found in together["pipeline"]:
        assert_same(found, expected)


def test_two_replicas_are_a_plain_loop(made, together):
    """But for running statistics: those of the first replica, of every other microbatch."""
    expected = by_torch(made, own=lambda m: m % 2 == 0)
    for found in together["replicas"]:
        assert_same(found, expected)


def test_a_loop_goes_on_from_a_checkpoint_on_another_strategy(made, together):
    losses, _, _ = by_torch(made)
    for found, _, _ in together["resumed"]:
        assert found == pytest.approx(losses, rel=1e-12)


def test_ranks_that_differ_are_told_and_not_trained(together):
    for batch, rate in together["refused"]:
        assert batch.startswith(f"{OTHER_VALUES}values of input 'x' in row 0 (step 0): {WHOLE}")
        assert rate.startswith("step 0: expected the same learning rate on all ranks, got 0.")


# ------------------------------------------------------------------------------ one process


@pytest.fixture
def alone(made):
    with planner.trainer(made / "alone.json", **HOW) as trainer:
        yield trainer


def test_a_batch_has_the_forms_of_a_data_loader(made):
    x, classes = batches()[0]
    forms = [(x, classes), [x, classes], ({"x": x}, classes), {"x": x, "logits": classes},
             {"x": x, "labels": classes}]  # fmt: skip
    losses = set()
    for form in forms:
        with planner.trainer(made / "alone.json", **HOW) as trainer:
            losses.add(trainer.step(form))
    assert len(losses) == 1
    loader = DataLoader(TensorDataset(x, classes), batch_size=SAMPLES)
    with planner.trainer(made / "alone.json", **HOW) as trainer:
        assert {trainer.step(batch) for batch in loader} == losses


def test_an_evaluation_takes_datasets_and_batches_of_any_size(alone):
    x, classes = batches()[0]
    found = alone.evaluate(TensorDataset(x, classes))
    assert alone.evaluate([(x[:7], classes[:7]), (x[7:], classes[7:])]) == pytest.approx(found)
    assert alone.evaluate({"x": a, "label": b} for a, b in [(x, classes)]) == pytest.approx(found)


@pytest.mark.parametrize(("change", "message"), [
    (lambda x, y: (x[:3], y[:3]), "step 0: expected a batch of 16 samples, or of at least 4, got"),
    (lambda x, y: (x[:8], y), "step 0: target of 'logits': expected 16 samples on dimension 0 (4"),
    (lambda x, y: (x.float(), y), "step 0: input 'x': expected a tensor of shape (4, 3, 6, 6) and"),
    (lambda x, y: (x, y + 3), "step 0: target of 'logits': expected class indices from 0 to 4"),
    (lambda x, y: x, "step 0: expected ('x', target of 'logits'), or a dict of them by name, got"),
    (lambda x, y: None, "step 0: expected the batch of the whole step, got None"),
])  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(alone, change, message):
    with pytest.raises(LaunchError) as error:
        alone.step(change(*batches()[0]))
    assert str(error.value).startswith(message)


def test_batches_without_rows_cannot_be_evaluated_on(alone):
    x, classes = batches()[0]
    with pytest.raises(
        LaunchError, match="evaluate: batch 0: expected tensors with a row for each"
    ):
        alone.evaluate([(x, classes[:3])])


def test_what_was_learned_is_a_checkpoint(made, tmp_path):
    with planner.trainer(made / "alone.json", checkpoint=tmp_path / "run", **HOW) as trainer:
        trainer.step(batches()[0])
        assert trainer.save() == tmp_path / "run" / "step-00000001"
        state = trainer.state_dict()
        trainer.step(batches()[1])
        assert trainer.save(str(tmp_path / "other")).is_dir()
    done = planner.write_weights(tmp_path / "run", None, tmp_path / "state.pt")
    assert done.step == 1
    written = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(value, written[name]) for name, value in state.items())
    with pytest.raises(FileError, match="has checkpoints of another launch"):
        planner.trainer(made / "alone.json", checkpoint=tmp_path / "run", **HOW)
    with (
        planner.trainer(made / "alone.json", **HOW) as trainer,
        pytest.raises(FileError, match="has checkpoints of another launch"),
    ):
        trainer.save(tmp_path / "run")


def test_a_folder_to_save_in_has_to_be_named(alone):
    with pytest.raises(OptionError, match="save: expected a folder; give one here"):
        alone.save()


def test_a_trainer_that_is_closed_says_so(made):
    with planner.trainer(made / "alone.json", **HOW) as trainer:
        pass
    trainer.close()
    with pytest.raises(LaunchError, match="the trainer is closed"):
        trainer.step(batches()[0])


@pytest.mark.parametrize(("how", "message"), [
    ({"lr_schedule": "cosine"}, "lr_schedule cosine: expected cosine:W:N with the step N"),
    ({"clip": -1.0}, "--clip: expected a finite number above 0"),
    ({"metrics": ["none:such"]}, "metrics none:such: ModuleNotFoundError"),
    ({"optimizer": "adam"}, "--optimizer adam: expected at most the state that was planned"),
])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(made, how, message):
    with pytest.raises(planner.PlannerError) as error:
        planner.trainer(made / "alone.json", **how)
    assert str(error.value).startswith(message)


def test_one_process_for_two_devices_is_refused_with_the_command(made, monkeypatch):
    monkeypatch.setattr("sys.argv", ["my loop"])
    with pytest.raises(LaunchError) as error:
        planner.trainer(made / "pipeline.json")
    assert str(error.value).endswith(
        "the strategy uses 2 devices, a process each, and this is one process; run: torchrun"
        " --nproc-per-node 2 'my loop'"
    )


def test_a_plan_needs_its_model(made):
    plan = planner.read_strategy(made / "alone.json")
    with pytest.raises(OptionError, match="trainer: expected the ONNX file of the plan"):
        planner.trainer(plan)
    with planner.trainer(plan, made / "net.onnx", **HOW) as trainer:
        assert trainer.step(batches()[0]) > 0


def test_a_rate_that_was_set_stays_when_a_training_goes_on(made, tmp_path):
    path, how = made / "alone.json", {"learning_rate": 1.0, "threads": 1}
    first, second, _ = batches(3)
    with planner.trainer(path, checkpoint=tmp_path / "kept", **how) as trainer:
        trainer.step(first)
        trainer.save()
        trainer.set_lr(0.05)
        trainer.step(second)
        trainer.save()
    for step, rate in ((1, 1.0), (2, 0.05)):
        start = tmp_path / "kept" / f"step-{step:08d}"
        with planner.trainer(path, resume=start, **how) as trainer:
            assert trainer.lr == rate
    log = {"steps": 3, "log_file": tmp_path / "log", "resume": tmp_path / "kept"}
    for given, rate in ((None, 0.05), (0.2, 0.2)):
        planner.launch(path, learning_rate=given, **log)
        *_, last = map(json.loads, (tmp_path / "log").read_text().splitlines())
        assert last["lr"] == rate, "--lr is newer than what was set"


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_learning_rate_that_makes_no_sense_is_refused(alone, rate):
    with pytest.raises(OptionError, match="set_lr: expected a finite number of at least 0"):
        alone.set_lr(rate)


@pytest.mark.parametrize("name", ["steps", "data", "trace", "checkpoint_every", "output"])
def test_options_of_the_planners_loop_are_no_options_of_ones_own(made, name):
    with pytest.raises(TypeError, match=f"trainer.. got an unexpected keyword argument '{name}'"):
        planner.trainer(made / "alone.json", **{name: None})


def test_ranks_compare_the_metrics_of_evaluations(made, monkeypatch):
    metric, compared = "tests.support.datasets:tensors", []

    def meet(plan, options, process):
        compared.extend(options)
        raise LaunchError("met")

    monkeypatch.setattr("planner.training.trainer.meet_others", meet)
    with pytest.raises(LaunchError, match="met"):
        planner.trainer(made / "alone.json", metrics=[metric], **HOW)
    assert [one.metrics for one in compared if hasattr(one, "metrics")] == [(metric,)]


# Checksums of which the one in the middle is the mean: their sum is three times its own.
THREE = """
import os
import planner
from planner.training import loop
from tests.support.own_loops import batches
rank = int(os.environ["RANK"])
loop.number = lambda prints: 5 + rank
trainer = planner.trainer("three.json", threads=1)
x, classes = batches()[0]
try:
    trainer.step((x, (classes + rank) % 5))
except planner.PlannerError as error:
    print(rank, error, flush=True)
trainer.close()
"""


def test_every_rank_refuses_batches_of_which_its_own_is_the_mean(made, tmp_path):
    write_strategy(made / "three.json", profile_of(made / "net.onnx"), (1, 1, 1))
    (tmp_path / "loop.txt").write_text(THREE)
    said = sorted(forked(tmp_path / "loop.txt", 3, folder=made).splitlines())
    assert said == [
        f"{rank} {OTHER_VALUES}values of target of 'logits' in row 0 (step 0): {WHOLE}"
        for rank in range(3)
    ]


# ------------------------------------------------------------------------------ fingerprints


def test_a_fingerprint_tells_batches_apart():
    x, classes = batches()[0]
    one = fingerprint(Named({"x": x}, {"y": classes}))
    assert one == fingerprint(Named({"x": x.clone()}, {"y": classes.clone()}))
    others = [
        Named({"x": x}, {"y": classes.flip(0)}), Named({"x": x.flip(0)}, {"y": classes}),
        Named({"x": x.float()}, {"y": classes}), Named({"x": x[:8]}, {"y": classes}),
        Named({"x": x, "y": classes}, {}), Named({"x": x, "z": x}, {"y": classes}),
    ]  # fmt: skip
    assert len({one, *map(fingerprint, others)}) == len(others) + 1


def test_a_fingerprint_sees_every_element_of_a_small_tensor():
    x = torch.zeros(4, 1024)
    for place in (0, 1, 700, 4095):
        other = x.clone()
        other.view(-1)[place] = 1
        assert fingerprint(Named({"x": x}, {})) != fingerprint(Named({"x": other}, {}))


def test_prints_see_every_element_and_say_its_row():
    x = torch.zeros(5, 3, 40_000)
    other = x.clone()
    other[3, 1, 29_171] = 1
    (one,), (two,) = (prints(Named({"x": some}, {})) for some in (x, other))
    assert (one.name, one.form) == ("input 'x'", "(5, 3, 40000) torch.float32")
    assert [a == b for a, b in zip(one.rows, two.rows, strict=True)] == [True] * 3 + [False, True]


def test_a_fingerprint_sees_pictures_with_empty_borders():
    x = torch.zeros(64, 1, 28, 28)
    x[..., 4:24, 4:24] = torch.rand(64, 1, 20, 20, generator=torch.Generator().manual_seed(0))
    assert fingerprint(Named({"x": x}, {})) != fingerprint(Named({"x": x.roll(1, 0)}, {}))


def test_a_fingerprint_takes_every_kind_of_tensor():
    for tensor in (torch.zeros(()), torch.zeros(0, 3), torch.zeros(3, 4).T, torch.tensor([True]),
                   torch.zeros(2, dtype=torch.bfloat16)):  # fmt: skip
        named = Named({"x": tensor}, {"y": 3})
        assert 0 <= fingerprint(named) < 2**32
        assert 0 <= number(prints(named)) < 2**32
        assert len(prints(named)[0].rows) == (len(tensor) if tensor.dim() else 1)
