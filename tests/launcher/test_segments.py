"""Segments of a stage that are run again in its backward."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from planner.artefacts.losses import losses
from planner.artefacts.segments import Segment, segments_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, violations
from planner.launcher.segments import with_segments
from planner.launcher.stage import StageModule
from planner.operators import parameters, to_torch
from planner.operators.losses import criterion
from planner.operators.running import autocast
from tests.support.split_models import MODELS, loaded
from tests.support.split_plans import data, random_segments


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: loaded(make(folder / f"{name}.onnx")) for name, make in MODELS.items()}


class Note(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def forward(self, _):
        self.note()


def whole(model, segments=()):
    names = tuple(one.name for one in model.graph.operators)
    stage = Stage.whole(names, (0,), 1, bool(segments))
    return replace(stage, recomputed=segments)


def gradients(model, stage, dtype=None):
    """Losses and gradients of two microbatches in flight, and how often operators have run."""
    values = parameters(model, [one.name for one in model.graph.parameters])
    module = to_torch(model, values=values)
    ran, noted = [], []
    for node in tuple(module.graph.nodes):
        if "onnx_name" in node.meta:
            with module.graph.inserting_after(node):
                note = partial(ran.append, node.meta["onnx_name"])
                module.add_submodule(f"note{len(noted)}", Note(note))
                noted.append(module.graph.call_module(f"note{len(noted)}", (node,)))
    module.recompile()
    (loss,) = losses(model.graph)
    precision = partial(autocast, "cpu", dtype)
    runner = StageModule(
        module, model.graph, False, {loss.output.name: criterion(loss)}, precision,
        parted=partial(with_segments, stage=stage, graph=model.graph, precision=precision),
    )  # fmt: skip
    told = []
    batches = data(model, 2)
    for m, (inputs, target) in enumerate(batches):
        told.append(runner.forward(m, inputs, {loss.output.name: target}, {})[1].loss)
    for m in range(len(batches)):
        runner.backward(m, {})
    return told, {n: v.grad for n, v in values.items() if v.requires_grad}, ran


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_a_pass_that_keeps_everything(models, name, dtype):
    model, chance = models[name], random.Random(3)
    expected = gradients(model, whole(model), dtype)
    for _ in range(3):
        segments = random_segments(whole(model).operators, chance)
        found = gradients(model, whole(model, segments), dtype)
        assert found[0] == expected[0]
        for parameter, gradient in expected[1].items():
            assert torch.equal(found[1][parameter], gradient), parameter


def test_the_operators_of_segments_run_twice_and_others_once(models):
    model = models["gpt"]
    names = whole(model).operators
    segments = (names[2:9], names[9:14], names[20:21])
    _, _, ran = gradients(model, whole(model, segments))
    again = {name for some in segments for name in some}
    runs = segments_of(whole(model, segments), model.graph)
    assert len(runs) == 3
    # Two microbatches.
    assert {name: ran.count(name) for name in names} == {
        name: 4 if name in again else 2 for name in names
    }


def test_a_segment_runs_again_before_its_last_operator_with_a_backward(models):
    model = models["mlp"]
    names = whole(model).operators
    (one,) = segments_of(whole(model, (names[1:4],)), model.graph)
    assert one == Segment(1, 4, 3)


@pytest.mark.parametrize(
    "segments, words",
    [
        ([[0, 2]], "segment 0: expected operators that follow each other"),
        ([[3, 4], [1, 2]], "segment 1: expected operators behind those of the segment before"),
        ([[1, 2], [2, 3]], "segment 1: expected operators behind"),
        ([[]], "segment 0: expected operators of the stage"),
    ],
)
def test_segments_that_are_none_are_told(models, segments, words):
    model = models["gpt"]
    names = whole(model).operators
    some = tuple(tuple(names[i] for i in one) for one in segments)
    stage = whole(model, some)
    wrong = violations(Strategy((stage,), ScheduleName.GPIPE, 1), model.graph, 1)
    assert any(words in one for one in wrong), wrong
    unset = replace(whole(model, (names[:2],)), recompute=False)
    wrong = violations(Strategy((unset,), ScheduleName.GPIPE, 1), model.graph, 1)
    assert any("`recompute` is false" in one for one in wrong), wrong
