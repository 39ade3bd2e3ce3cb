"""Evaluations during a launch, beside the module's own in evaluation mode; the log of a launch."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner import launch
from planner.artefacts.strategy import Stage
from planner.reports.launch import launch_json, loss_lines
from planner.support.errors import LaunchError
from planner.training.data.datasets import EvalData
from planner.training.evaluation import share_states
from tests.support import datasets
from tests.support.mode_runs import launched, net, profile_of, run_all, write_strategy
from tests.training.test_datasets import by_torch

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests.support.datasets"
HOW = {
    "data": f"{HERE}:samples", "shuffle": False, "epochs": 2, "eval_data": f"{HERE}:samples",
    "eval_every": 3, "metrics": ["tests.training.test_evaluation:largest"],
}  # fmt: skip


def largest(output, target):
    """A metric of the user: a mean over samples."""
    return output.amax(1).mean()


def text(output, target):
    return "good"


def fails(output, target):
    raise ZeroDivisionError("no samples")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the model, and its profile; without noise, which is no part of training."""
    folder = tmp_path_factory.mktemp("evaluation")
    net(folder / "net.onnx")
    return folder, profile_of(folder / "net.onnx")


def by_module(folder, steps, monkeypatch):
    """Figures of PyTorch's module after some steps; noise is off as it cannot be compared."""
    _, state = by_torch(folder / "net.onnx", datasets.samples(), steps)
    module = net(folder / "same.onnx")
    module.load_state_dict(state)
    monkeypatch.setattr("planner.operators.randomness.standard_normal", quiet)
    x, classes = datasets.tensors()
    with torch.no_grad():
        logits = module.eval()(x)
    return {
        "loss": nn.functional.cross_entropy(logits, classes).item(),
        "accuracy": (logits.argmax(1) == classes).double().mean().item(),
        "largest": logits.amax(1).mean().item(),
    }


def quiet(node, shape, dtype=torch.float32, device="cpu", own_seed=None):
    """No noise."""
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.fixture(scope="module")
def quiet_model(tmp_path_factory):
    """The same model, whose file has no noise either."""
    folder = tmp_path_factory.mktemp("quiet")
    net(folder / "net.onnx", noise=False)
    return folder, profile_of(folder / "net.onnx")


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr("planner.operators.randomness.standard_normal", quiet)


def test_figures_are_those_of_the_module_in_evaluation_mode(
    quiet_model, without_noise, monkeypatch
):
    folder, profile = quiet_model
    path = write_strategy(folder / "alone.json", profile, (1, 1), devices=(0, 0))
    report, _, _ = launched(path, None, **HOW)
    assert [one.step for one in report.evaluations] == [3, 6]
    for one in report.evaluations:
        expected = by_module(folder, one.step, monkeypatch)
        assert one.figures == pytest.approx(expected, rel=1e-6), one.step


def test_training_does_not_notice_evaluations(made):
    folder, profile = made
    path = write_strategy(folder / "alone.json", profile, (1,))
    plain = {name: HOW[name] for name in ("data", "shuffle", "epochs")}
    without, held, _ = launched(path, None, **plain)
    evaluated, same, _ = launched(path, None, **HOW | {"eval_every": 1})
    assert without.loss == evaluated.loss
    assert all(torch.equal(held[name], same[name]) for name in held)


@pytest.fixture(scope="module")
def together(quiet_model):
    """The logs of several strategies, from one start of torchrun on two ranks."""
    folder, profile = quiet_model
    for name, widths in {"pipeline": (1, 1), "replicas": (2,), "uneven": (2, 1)}.items():
        how = HOW | {"log": str(folder / f"{name}.jsonl"), "clip": 100.0}
        write_strategy(folder / f"{name}.strategy.json", profile, widths)
        (folder / f"{name}.settings.json").write_text(json.dumps(how))
    run_all(folder, 3)
    names = ("pipeline", "replicas", "uneven")
    return {name: read_log(folder / f"{name}.jsonl") for name in names}


def read_log(path):
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {"format": "planner-log/1"}
    return lines


def test_a_pipeline_evaluates_as_one_process_does(quiet_model, together):
    folder, profile = quiet_model
    path = write_strategy(folder / "one.json", profile, (1,))
    alone, _, _ = launched(path, None, **HOW)
    found = [line["evaluation"] for line in together["pipeline"] if "evaluation" in line]
    assert len(found) == 2
    for figures, one in zip(found, alone.evaluations, strict=True):
        assert figures == pytest.approx(one.figures, rel=1e-6)


@pytest.mark.parametrize("name", ["replicas", "uneven"])
def test_replicas_evaluate_by_the_statistics_of_the_first_one(quiet_model, together, name):
    """With those of each its own, a sample would count differently by the replica it meets."""
    folder, _ = quiet_model
    _, held, _ = torch.load(folder / f"{name}.0.pt")
    module = net(folder / "same.onnx")
    first = {key: held[key] for key in held if key in module.state_dict()}
    if name == "uneven":  # the second stage is on the last rank
        rest = torch.load(folder / f"{name}.2.pt")[1]
        ranks = [torch.load(folder / f"{name}.{rank}.pt")[1] for rank in (0, 1)]
        assert torch.equal(ranks[0]["bn1.running_mean"], ranks[1]["bn1.running_mean"])
        first |= rest
    module.load_state_dict(first, strict=False)
    x, classes = datasets.tensors()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.operators.randomness.standard_normal", quiet)
        loss = nn.functional.cross_entropy(module.eval()(x), classes).item()
    assert together[name][-1]["evaluation"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_the_log_has_a_line_for_each_step(together):
    lines = together["pipeline"]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    steps = [line for line in lines if "evaluation" not in line]
    assert all({*line} == {"step", "loss", "lr", "norm", "s"} for line in steps)
    assert all(line["lr"] == 0.1 and line["s"] > 0 for line in steps)


def test_a_log_has_the_losses_of_the_report(made):
    folder, profile = made
    path = write_strategy(folder / "logged.json", profile, (1,))
    report = launch(path, steps=3, log_file=folder / "log.jsonl")
    assert [line["loss"] for line in read_log(folder / "log.jsonl")] == [*report.loss]


def test_reports_show_evaluations(made):
    folder, profile = made
    path = write_strategy(folder / "shown.json", profile, (1,))
    report = launch(path, **{**HOW, "eval_every": None})
    (last,) = launch_json(report)["evaluations"]
    assert {*last} == {"step", "loss", "accuracy", "largest"}
    assert loss_lines(report)[-1] == (
        f"evaluation after 6 steps: loss {last['loss']:.4f}, accuracy {last['accuracy']:.4f},"
        f" largest {last['largest']:.4f}"
    )


WRONG = {
    "Stream": "expected a dataset with __getitem__ and __len__, or a DataLoader of one, got Stream",
    "none": "expected at least one sample, got none",
    "wide": "microbatch 0: input 'x': expected a tensor of shape (4, 3, 6, 6) and torch.float64,"
    " got shape (4, 3, 6, 5) and torch.float64",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_data_is_told_before_the_first_step(made, name):
    folder, profile = made
    path = write_strategy(folder / "wrong.json", profile, (1,))
    with pytest.raises(LaunchError) as error:
        launch(path, eval_data=f"{HERE}:{name}")
    assert str(error.value) == f"--eval-data {HERE}:{name}: {WRONG[name]}"


@pytest.mark.parametrize(("name", "message"), [
    ("text", "expected a number, or a tensor of one, got str"),
    ("fails", "ZeroDivisionError: no samples"),
])  # fmt: skip
def test_a_metric_that_fails_is_named(made, name, message):
    folder, profile = made
    path = write_strategy(folder / "metric.json", profile, (1,))
    where = f"tests.training.test_evaluation:{name}"
    with pytest.raises(LaunchError) as error:
        launch(path, steps=1, eval_data=f"{HERE}:samples", metrics=(where,))
    assert str(error.value) == f"--metric {where}: {message}"


class Shared:
    """The other devices, of which only `share` is there."""

    def __init__(self, device):
        self.device, self.given = device, []

    def share(self, tensor, devices):
        self.given.append((tensor.tolist(), devices))
        if devices[0] != self.device:
            tensor.fill_(7.0)


@pytest.mark.parametrize(("device", "kept"), [(0, 1.0), (1, 7.0)])
def test_statistics_go_to_the_replicas_of_their_stage_alone(device, kept):
    """One small tensor each, to the device at the same place of each mesh, and no other stage's."""
    stages = Stage.whole(("a",), (0, 1), 1, False), Stage.whole(("b",), (2,), 1, False)
    running = {"mean": torch.tensor([1.0, 1.0])}
    place = SimpleNamespace(stage=stages[0], mesh=SimpleNamespace(index=0))
    part = SimpleNamespace(stages={0: SimpleNamespace(states=running)}, places={0: place})
    groups = Shared(device)
    share_states(part, groups)
    assert groups.given == [([1.0, 1.0], [0, 1])]
    assert running["mean"].tolist() == [kept, kept]


def steps_in(path):
    return [line.get("step") for line in map(json.loads, path.read_text().splitlines())]


def test_the_log_of_a_resumed_training_has_each_step_once(made, tmp_path):
    """The launch before wrote three steps, and its last checkpoint is of the second."""
    folder, profile = made
    path = write_strategy(folder / "logged.json", profile, (1,))
    log, kept = tmp_path / "log", tmp_path / "kept"
    launch(path, steps=3, log_file=log, checkpoint=kept, checkpoint_every=2)
    before = log.read_text()
    log.write_text(before + '{"step": 4, "lo')  # cut off
    launch(path, steps=4, log_file=log, checkpoint=tmp_path / "on", resume=kept / "step-00000002")
    assert steps_in(log) == [None, 1, 2, 3, 4]
    assert log.read_text().startswith("".join(before.splitlines(keepends=True)[:3]))
    launch(path, steps=2, log_file=log)
    assert steps_in(log) == [None, 1, 2]


def test_the_data_of_a_microbatch_goes_behind_its_last_stage(made, monkeypatch):
    folder, profile = made
    path = write_strategy(folder / "parts.json", profile, (1, 1), devices=(0, 0))
    alive, most, microbatches = [], [], EvalData.microbatches

    def remembering(self, num_samples, *, filled):
        coming = microbatches(self, num_samples, filled=filled)

        def fetched():
            most.append(sum(one() is not None for one in alive))
            batch = next(coming)
            alive.append(weakref.ref(batch.inputs["x"]))
            return batch

        return iter(fetched, None)

    monkeypatch.setattr(EvalData, "microbatches", remembering)
    launch(path, steps=1, eval_data=f"{HERE}:samples")
    assert len(most) > 2
    assert set(most) == {0}
