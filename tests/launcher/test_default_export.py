"""A file of torch's default exporter trains the module that it was exported from."""

import pytest
import torch
from torch.nn import functional
from torch.optim import AdamW

from planner import launch
from planner.artefacts.files import write_plan
from planner.artefacts.plan import (
    Certificate,
    DevicePrediction,
    MemoryParts,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, crossings
from planner.model.annotated import check_agreement, write_partition
from planner.model.load import load
from tests.support import exports

STEPS, NUM_MICROBATCHES, LEARNING_RATE = 10, 2, 1e-3
MODULE = "feed"
FEED = """\
import torch

STEPS = torch.load("feed.pt")


def batch(step, microbatch, inputs):
    tokens, target = STEPS[step][microbatch]
    return {"input_ids": tokens}, target
"""


def two_stages(model):
    """Both stages on one device, in this process; the tied head is in the second one."""
    names = [operator.name for operator in model.graph.operators]
    half = next(i for i in range(len(names) // 2, len(names)) if names[i] == "node_layer_norm_2")
    stages = tuple(
        Stage.whole(tuple(part), (0,), warmup, False)
        for part, warmup in ((names[:half], 2), (names[half:], 1))
    )
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, NUM_MICROBATCHES)
    device = DevicePrediction(0, "cpu0", "cpu", 0.5, 0.1, 0.4, MemoryParts())
    return Plan(
        strategy=strategy,
        prediction=Prediction(
            1.0, 1.0, 1.0, 1.0, 0.0, 1.0, (StagePrediction(0.1, 0.2),) * 2, (device,)
        ),
        certificate=Certificate("iteration", 1.0, 0.0, None, ""),
        solver="manual", status="feasible", reproducible=True, ranks=(0,),
        crossings=crossings(strategy, model.graph), model_path=model.path.name,
        model_hash=model.hash, train=tuple(p.name for p in model.graph.parameters if p.trainable),
        profile_hash="", topology="test", topology_hash="", dimensions=model.dimensions,
        microbatch_size=model.batch, dtype="float32", optimizer="adamw", threads=1, seed=0,
        notes=(), versions={},
    )  # fmt: skip


def microbatches():
    generator = torch.Generator().manual_seed(5)

    def tokens():
        return torch.randint(100, (2, 16), generator=generator)

    return [[(tokens(), tokens()) for _ in range(NUM_MICROBATCHES)] for _ in range(STEPS)]


def by_pytorch(module, steps):
    """The losses of a plain loop over the module itself."""
    optimizer = AdamW(module.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        whole = 0.0
        for tokens, target in step:
            loss = functional.cross_entropy(module(tokens).movedim(2, 1), target) / len(step)
            loss.backward()
            whole += loss.item()
        optimizer.step()
        losses.append(whole)
    return losses


@pytest.mark.slow
def test_a_default_export_of_gpt2_trains_28_parameters_as_pytorch_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, _ = exports.exported(exports.gpt2, tmp_path / "gpt2.onnx")
    model = load(tmp_path / "gpt2.onnx")
    assert len([*module.parameters()]) == 28
    assert sum(p.trainable for p in model.graph.parameters) == 28
    text = "\n".join(model.warnings)
    assert "merged equal values" in text
    assert "planner export" in text
    assert "node_layer_norm" in text

    steps = microbatches()
    torch.save(steps, "feed.pt")
    (tmp_path / MODULE).with_suffix(".py").write_text(FEED)
    plan = two_stages(model)
    write_plan(plan, tmp_path / "strategy.json")
    write_partition(model, plan, tmp_path / "strategy.onnx")
    check_agreement(plan, tmp_path / "strategy.onnx")
    assert load(tmp_path / "strategy.onnx").hash == model.hash
    report = launch(
        tmp_path / "strategy.json", steps=STEPS, learning_rate=LEARNING_RATE,
        loss="cross-entropy", data=f"{MODULE}:batch",
    )  # fmt: skip
    assert report.loss == pytest.approx(by_pytorch(module, steps), rel=1e-5)
