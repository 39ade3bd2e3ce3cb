"""Activations that wait in pinned memory, with copies that are late."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from planner.artefacts.losses import losses
from planner.artefacts.strategy import Stage
from planner.launcher.stage import StageModule
from planner.launcher.stash import offload
from planner.launcher.stash.offload import HostMemory
from planner.launcher.stash.segments import with_segments
from planner.operators import parameters, to_torch
from planner.operators.losses import criterion
from planner.operators.running import autocast
from tests.support.split_models import MODELS, loaded
from tests.support.split_plans import data, random_segments

DEVICE, LATE_CYCLES = "cuda:0", 2_000_000
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(model, stage):
    """Losses and gradients of two microbatches in flight, and the host's memory."""
    values = parameters(model, [one.name for one in model.graph.parameters], DEVICE)
    (loss,) = losses(model.graph)
    precision = partial(autocast, DEVICE, None)
    host = HostMemory(DEVICE) if stage.offloaded else None
    runner = StageModule(
        to_torch(model, values=values, device=DEVICE), model.graph, False,
        {loss.output.name: criterion(loss)}, precision,
        parted=partial(with_segments, stage=stage, graph=model.graph, precision=precision),
        host=host,
    )  # fmt: skip
    told = []
    for m, (inputs, target) in enumerate(data(model, 2)):
        inputs = {name: one.to(DEVICE) for name, one in inputs.items()}
        target = {loss.output.name: target.to(DEVICE)}
        told.append(runner.forward(m, inputs, target, {})[1].loss)
    for m in range(2):
        runner.backward(m, {})
    torch.cuda.synchronize()
    return told, {n: v.grad for n, v in values.items() if v.requires_grad}, host


@pytest.mark.parametrize("name", MODELS)
def test_late_copies_change_no_gradient(tmp_path, monkeypatch, name):
    model, chance = loaded(MODELS[name](tmp_path / "model.onnx")), random.Random(5)
    names = tuple(one.name for one in model.graph.operators)
    stage = Stage.whole(names, (0,), 1, False)
    expected = trained(model, stage)
    copy = offload._copy

    def late(copies):
        torch.cuda._sleep(LATE_CYCLES)
        copy(copies)
        torch.cuda._sleep(LATE_CYCLES)

    monkeypatch.setattr(offload, "_copy", late)
    monkeypatch.setattr(offload, "LEAST_OFFLOADED_BYTES", 0)
    for _ in range(3):
        segments = random_segments(model.graph, chance)
        again = tuple(one for one in segments if chance.random() < 0.5)
        waiting = tuple(
            one if one in again else names[names.index(one[0]) : names.index(one[-1]) + 1]
            for one in segments
        )
        own = replace(stage, offloaded=waiting, recomputed=again, recompute=bool(again))
        told, gradients, host = trained(model, own)
        assert told == pytest.approx(expected[0], rel=1e-12)
        for parameter, gradient in expected[1].items():
            torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-11, atol=1e-13)
        assert host.now_bytes == 0 and host.peak_bytes > 0
