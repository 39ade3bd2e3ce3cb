"""Segments of a stage whose activations wait in the host's memory."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from planner.artefacts.losses import losses
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.launcher.stage import StageModule
from planner.launcher.stash import offload
from planner.launcher.stash.offload import HostMemory, HostPass
from planner.launcher.stash.segments import (
    KeptOperator,
    OffloadedSegment,
    RecomputedSegment,
    with_segments,
)
from planner.operators import parameters, to_torch
from planner.operators.losses import criterion
from planner.operators.running import autocast
from tests.support.split_models import MODELS, loaded
from tests.support.split_plans import data, random_segments


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: loaded(make(folder / f"{name}.onnx")) for name, make in MODELS.items()}


@pytest.fixture
def any_size(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_OFFLOADED_BYTES", 0)


def whole(model, offloaded=(), recomputed=()):
    names = tuple(one.name for one in model.graph.operators)
    stage = Stage.whole(names, (0,), 1, bool(recomputed))
    return replace(stage, recomputed=recomputed, offloaded=offloaded)


def run_of(model, segment):
    """All operators from the first to the last one of a segment."""
    names = whole(model).operators
    return names[names.index(segment[0]) : names.index(segment[-1]) + 1]


def trained(model, stage, dtype=None):
    """Losses and gradients of two microbatches in flight, and the host's memory."""
    values = parameters(model, [one.name for one in model.graph.parameters])
    (loss,) = losses(model.graph)
    precision = partial(autocast, "cpu", dtype)
    host = HostMemory("cpu") if stage.offloaded else None
    runner = StageModule(
        to_torch(model, values=values), model.graph, False,
        {loss.output.name: criterion(loss)}, precision,
        parted=partial(with_segments, stage=stage, graph=model.graph, precision=precision),
        host=host,
    )  # fmt: skip
    told = []
    batches = data(model, 2)
    for m, (inputs, target) in enumerate(batches):
        told.append(runner.forward(m, inputs, {loss.output.name: target}, {})[1].loss)
    for m in range(len(batches)):
        runner.backward(m, {})
    return told, {n: v.grad for n, v in values.items() if v.requires_grad}, host


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_a_pass_that_keeps_everything(models, any_size, name, dtype):
    model, chance = models[name], random.Random(5)
    expected, peaks = trained(model, whole(model), dtype), []
    for _ in range(3):
        segments = random_segments(model.graph, chance)
        again = tuple(one for one in segments if chance.random() < 0.5)
        waiting = tuple(one if one in again else run_of(model, one) for one in segments)
        stage = whole(model, waiting, again)
        assert violations(Strategy((stage,), ScheduleName.GPIPE, 2), model.graph, 1) == ()
        found = trained(model, stage, dtype)
        assert found[0] == expected[0]
        for parameter, gradient in expected[1].items():
            assert torch.equal(found[1][parameter], gradient), parameter
        assert found[2].now_bytes == 0
        peaks.append(found[2].peak_bytes)
    assert max(peaks) > 0


class Product(nn.Module):
    """Of two factors, which is not computed again."""

    def __init__(self):
        super().__init__()
        self.kept = KeptOperator(torch.mm)

    def forward(self, x, y):
        return self.kept(2.0 * x, y)


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_what_kept_operators_made_stays_on_the_device(any_size):
    x, y = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    memory = HostMemory("cpu")
    one = HostPass(memory, (x, y))
    product, square = OffloadedSegment(RecomputedSegment(Product())), OffloadedSegment(Square())
    with one.forward():
        made = square(product(x, y)).sum()
    # The square keeps the product, which is held.
    assert memory.now_bytes == 0
    one.begin_backward()
    made.backward()
    expected = torch.autograd.grad(((2.0 * x) @ y).square().sum(), (x, y))
    torch.testing.assert_close((x.grad, y.grad), expected)
