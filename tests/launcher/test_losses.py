"""Losses of models that PyTorch has exported, trained beside a plain PyTorch loop."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner import launch
from planner.artefacts.files import write_plan
from planner.artefacts.graph import LossChoice, loss_outputs
from planner.artefacts.losses import losses
from planner.artefacts.options import LossOptions
from planner.artefacts.strategy import ScheduleName
from planner.model.load import ReadOptions, load
from planner.operators import synthetic
from planner.reports.launch import launch_json, loss_lines
from planner.support.errors import LaunchError, OptionError
from tests.support.launch_worker import Case, make_plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the quick exporter

ROOT = Path(__file__).resolve().parents[2]
STEPS, MICROBATCHES, RATE, SEED = 5, 3, 0.2, 3  # the seed is that of `make_plan`
WORDS, CLASSES = 11, 7


class OwnLoss(nn.Module):
    """A language model that gets labels, shifts them, and returns its loss and its logits."""

    def __init__(self, by_hand):
        super().__init__()
        self.by_hand = by_hand
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.words(ids)))
        scores, shifted = logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1)
        if not self.by_hand:
            return logits, functional.cross_entropy(scores, shifted)
        known = shifted != -100
        classes = torch.where(known, shifted, 0)
        picked = -torch.log_softmax(scores, 1).gather(1, classes[:, None])[:, 0]
        return logits, torch.where(known, picked, 0.0).sum() / known.sum()


class TwoHeads(nn.Module):
    """Classes from the middle of the network, values from its end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.classes, self.values = nn.Linear(8, CLASSES), nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.classes(h), self.values(torch.tanh(self.second(h)))


def exported(module, inputs, path, names):
    """Exported without merging initializers, so that all of the module's parameters are trained."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    torch.onnx.export(
        module, inputs, path, dynamo=False, output_names=names, do_constant_folding=False,
        input_names=[f"in{i}" for i in range(len(inputs))],
    )  # fmt: skip
    return path


def torch_losses(module, loss_of):
    """The loss of each step of plain PyTorch."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum(loss_of(m) for m in range(MICROBATCHES)) / MICROBATCHES
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < found[0]
    return found


def two_stages(path, model, split, devices, **changes):
    """A strategy file for two stages."""
    names = [operator.name for operator in model.graph.operators]
    parts = [((devices[0],), tuple(names[:split])), ((devices[1],), tuple(names[split:]))]
    case = Case((1, 1), MICROBATCHES, ScheduleName.GPIPE, dtype="float32", **changes)
    write_plan(make_plan(case, model, parts, losses=model.graph.losses), path)
    return path


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_model_that_computes_its_loss_trains_as_in_pytorch(by_hand, tmp_path):
    module, ids = OwnLoss(by_hand), torch.zeros(2, 5, dtype=torch.int64)
    path = exported(module, (ids, ids), tmp_path / "net.onnx", ["logits", "loss"])
    model = load(path)
    assert model.graph.losses == (LossChoice("loss", "own"),)
    data = [synthetic.inputs(model, seed=SEED, microbatch=m) for m in range(MICROBATCHES)]
    for one in data:
        assert set(one["in1"].flatten().tolist()) <= set(range(CLASSES))
    assert len({n for one in data for n in one["in1"].flatten().tolist()}) > 3
    strategy = two_stages(tmp_path / "strategy.json", model, 3, (0, 0))
    report = launch(strategy, steps=STEPS, learning_rate=RATE)
    expected = torch_losses(module, lambda m: module(data[m]["in0"], data[m]["in1"])[1])
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert loss_lines(report)[0] == "loss: 'loss' [] itself, which the model computes"


def two_heads(tmp_path, monkeypatch):
    """The module, the model with a loss of each head, and data for both."""
    module = TwoHeads()
    path = exported(module, (torch.zeros(4, 6),), tmp_path / "net.onnx", ["classes", "values"])
    model = load(
        path, ReadOptions(loss=LossOptions(("classes", "values"), {"values": "smooth-l1"}))
    )
    assert loss_outputs(model.graph) == ("classes", "values")
    data = [
        (
            synthetic.inputs(model, seed=SEED, microbatch=m)["in0"],
            *(synthetic.target(one, seed=SEED, microbatch=m) for one in losses(model.graph)),
        )
        for m in range(MICROBATCHES)
    ]

    def loss_of(m):
        x, classes, values = data[m]
        scores, regressed = module(x)
        return functional.cross_entropy(scores, classes) + functional.smooth_l1_loss(
            regressed, values
        )

    # Between the heads: the first stage ends with the classes' loss.
    made = [operator.outputs[0] for operator in model.graph.operators]
    monkeypatch.chdir(tmp_path)
    return model, made.index("classes") + 1, data, torch_losses(module, loss_of)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_losses_on_two_stages_train_as_in_pytorch(recompute, tmp_path, monkeypatch):
    model, split, _, expected = two_heads(tmp_path, monkeypatch)
    first, second = model.graph.operators[:split], model.graph.operators[split:]
    assert any("classes" in o.outputs for o in first) and any("values" in o.outputs for o in second)
    path = two_stages(Path("strategy.json"), model, split, (0, 0), recompute=recompute)
    report = launch(path, steps=STEPS, learning_rate=RATE)
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert [one["function"] for one in launch_json(report)["losses"]] == [
        "cross-entropy", "smooth-l1",
    ]  # fmt: skip


@pytest.mark.slow
def test_two_losses_in_two_processes_train_as_in_pytorch(tmp_path, monkeypatch):
    model, split, _, expected = two_heads(tmp_path, monkeypatch)
    two_stages(Path("strategy.json"), model, split, (0, 1))
    command = [sys.executable, str(ROOT / "cli.py"), "launch", "strategy.json", "--nproc", "2"]
    done = subprocess.run(
        [*command, "--steps", str(STEPS), "--lr", str(RATE), "--loss", "values=smooth-l1",
         "--loss", "classes=auto"],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"loss {expected[0]:.4f} -> {expected[-1]:.4f}" in done.stdout
    assert "loss: smooth-l1 of 'values' [4, 4], mean over 16 elements" in done.stdout
    assert "trained is the sum of the 2 losses" in done.stdout


def test_two_losses_of_one_stage_train_as_in_pytorch(tmp_path, monkeypatch):
    model, _, _, expected = two_heads(tmp_path, monkeypatch)
    path = two_stages(Path("strategy.json"), model, 1, (0, 0))
    assert launch(path, steps=STEPS, learning_rate=RATE).loss == pytest.approx(expected, rel=1e-5)


def test_data_gives_a_target_for_each_loss(tmp_path, monkeypatch):
    model, split, data, expected = two_heads(tmp_path, monkeypatch)
    path = two_stages(Path("strategy.json"), model, split, (0, 0))

    def run(make):
        return launch(path, steps=STEPS, learning_rate=RATE, data=make)

    def both(step, microbatch, inputs):
        x, classes, values = data[microbatch]
        return {"in0": x}, {"classes": classes, "values": values}

    assert run(both).loss == pytest.approx(expected, rel=1e-5)
    for target, message in (
        (data[0][1], "target: expected {'classes': tensor, 'values': tensor}, got Tensor"),
        ({"classes": data[0][1]}, "target of 'values': expected a tensor of shape (4, 4)"),
    ):
        with pytest.raises(LaunchError) as error:
            run(lambda step, m, inputs, target=target: ({"in0": data[0][0]}, target))
        assert message in str(error.value)


def test_launch_overrides_the_losses_of_the_plan(tmp_path, monkeypatch):
    model, split, _, _ = two_heads(tmp_path, monkeypatch)
    path = two_stages(Path("strategy.json"), model, split, (0, 0))
    found = launch(path, steps=1, loss={"classes": "mse"})
    assert [one.function for one in found.losses] == ["mse", "smooth-l1"]
    with pytest.raises(OptionError, match="--loss other=mse: expected an output with a loss"):
        launch(path, steps=1, loss={"other": "mse"})


def test_of_two_losses_each_is_divided_by_its_own_total(tmp_path, monkeypatch):
    """In step 1 no class counts, and in other steps some do; the values of all microbatches do."""
    model, split, data, _ = two_heads(tmp_path, monkeypatch)
    path = two_stages(Path("strategy.json"), model, split, (0, 0))

    def classes_of(step, microbatch):
        classes = data[microbatch][1].clone()
        classes[: 4 if step == 1 else microbatch + 1] = -100
        return classes

    def both(step, microbatch, inputs):
        x, _, values = data[microbatch]
        return {"in0": x}, {"classes": classes_of(step, microbatch), "values": values}

    module = TwoHeads()
    exported(module, (torch.zeros(4, 6),), tmp_path / "same.onnx", ["classes", "values"])
    optimizer, expected = torch.optim.SGD(module.parameters(), lr=RATE), []
    for step in range(STEPS):
        optimizer.zero_grad()
        scores, regressed = module(torch.cat([x for x, _, _ in data]))
        classes = torch.cat([classes_of(step, m) for m in range(MICROBATCHES)])
        loss = functional.smooth_l1_loss(regressed, torch.cat([one for _, _, one in data]))
        if step != 1:
            loss = loss + functional.cross_entropy(scores, classes)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    report = launch(path, steps=STEPS, learning_rate=RATE, data=both)
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert not any("-100" in one for one in report.notes)


def counted(output, target):
    """A loss that says how much it counts."""
    return (output - 1).square().sum(), output.numel()


def test_one_of_two_losses_cannot_say_how_much_it_counts(tmp_path, monkeypatch):
    model, split, _, _ = two_heads(tmp_path, monkeypatch)
    path = two_stages(Path("strategy.json"), model, split, (0, 0))
    with pytest.raises(LaunchError, match=r"--loss of output 'values': \(sum, count\) is possible"):
        launch(path, steps=1, loss={"values": f"{__name__}:counted"})
