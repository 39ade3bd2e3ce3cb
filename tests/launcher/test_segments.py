"""Segments of a stage that are run again in its backward."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from onnx import TensorProto
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.artefacts.losses import losses
from planner.artefacts.segments import Segment, segments_of
from planner.artefacts.strategy import KEEPABLE, ScheduleName, Stage, Strategy, violations
from planner.launcher.stage import StageModule
from planner.launcher.stash.segments import with_segments
from planner.model.export.export import export_module
from planner.operators import parameters, to_torch
from planner.operators.losses import LossValue, criterion
from planner.operators.randomness import random_operators
from planner.operators.running import autocast
from tests.support.split_models import MODELS, Net, loaded
from tests.support.split_plans import data, random_segments

_FLOAT = TensorProto.FLOAT


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


class Counted(TorchDispatchMode):
    """Counts products and attention below autograd, in forwards and backwards."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_a_pass_that_keeps_everything(models, name, dtype):
    model, chance = models[name], random.Random(3)
    expected = gradients(model, whole(model), dtype)
    for _ in range(4):
        segments = random_segments(model.graph, chance)
        found = gradients(model, whole(model, segments), dtype)
        assert found[0] == expected[0]
        for parameter, gradient in expected[1].items():
            assert torch.equal(found[1][parameter], gradient), parameter


def test_statistics_are_updated_once_and_random_numbers_are_those_of_the_first_run(tmp_path):
    net = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4),
    )  # fmt: skip
    export_module(net.train(), (torch.randn(5, 6),), tmp_path / "net.onnx")
    model = loaded(tmp_path / "net.onnx")
    types = [one.type for one in model.graph.operators]
    assert {"BatchNormalization", "Dropout"} <= {*types}
    names = whole(model).operators

    def trained(segments):
        values = parameters(model, [one.name for one in model.graph.parameters])
        module = to_torch(model, values=values)
        runner = StageModule(
            module, model.graph, False, {n: lambda y, _: LossValue(y.square().sum(), None)
                                         for n in model.graph.outputs},
            parted=partial(with_segments, stage=whole(model, segments), graph=model.graph),
        )  # fmt: skip
        losses_told = []
        for m, (inputs, _) in enumerate(data(model, 2)):
            with random_operators(seed=7, step=1, microbatch=m):
                losses_told.append(runner.forward(m, inputs, {}, {})[1].loss)
        for m in range(2):  # the second run takes the numbers of its own microbatch
            runner.backward(m, {})
        made = {n: v.grad for n, v in values.items() if v.requires_grad}
        return losses_told, made | runner.states

    plain, again = trained(()), trained((names[:2], names[2:]))
    assert again[0] == plain[0]
    assert again[1].keys() == plain[1].keys() and len(again[1]) > 6
    for name, value in plain[1].items():
        assert torch.equal(again[1][name], value), name


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


def block(net, h, i):
    """A layer of a Transformer with dropout before, between and behind its products."""

    def dropped(h):
        return net.add("Dropout", h, "ratio", "training")

    def product(h, name, *sizes):
        return net.add("MatMul", h, net.weight(f"{i}{name}", *sizes))

    normed = net.add("LayerNormalization", h, net.weight(f"{i}g", 8), net.weight(f"{i}c", 8))
    q, k, v = (product(normed, name, 8, 8) for name in "qkv")
    mixed = net.add("Attention", q, k, v, q_num_heads=2, kv_num_heads=2, is_causal=1)
    h = net.add("Add", h, dropped(product(mixed, "o", 8, 8)))
    up = net.add("Gelu", product(dropped(h), "u", 8, 32))
    return net.add("Add", h, dropped(product(up, "d", 32, 8)))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """Two layers with dropout and attention."""
    net = Net()
    net.constant("ratio", np.array(0.3, np.float32))
    net.constant("training", np.array(True))
    path = tmp_path_factory.mktemp("blocks") / "net.onnx"
    last = block(net, block(net, "x", 0), 1)
    net.save(path, ((2, 6, 8), _FLOAT), (last, (2, 6, 8)), dtype=_FLOAT, version=23)
    return loaded(path)


def trained(model, segments, dtype=None):
    """Losses, gradients and products of two microbatches in flight, with random numbers."""
    values = parameters(model, [one.name for one in model.graph.parameters])
    precision = partial(autocast, "cpu", dtype)
    stage = whole(model, segments)
    runner = StageModule(
        to_torch(model, values=values), model.graph, False,
        {n: lambda y, _: LossValue(y.float().square().sum(), None) for n in model.graph.outputs},
        precision,
        parted=partial(with_segments, stage=stage, graph=model.graph, precision=precision),
    )  # fmt: skip
    told, counted = [], Counted()
    for m, (inputs, _) in enumerate(data(model, 2)):
        with random_operators(seed=7, step=1, microbatch=m):
            told.append(runner.forward(m, inputs, {}, {})[1].loss)
    with counted:
        for m in range(2):
            runner.backward(m, {})
    return told, {n: v.grad for n, v in values.items() if v.requires_grad}, counted.names


def holes(model, segments):
    """Segments without the products and attention inside them."""
    types = {one.name: one.type for one in model.graph.operators}
    return tuple(
        tuple(n for n in some if n in (some[0], some[-1]) or types[n] not in KEEPABLE)
        for some in segments
    )


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_kept_products_and_attention_are_not_computed_again(blocks, dtype):
    names = whole(blocks).operators
    types = [one.type for one in blocks.graph.operators]
    assert types.count("Attention") == 2 and "Dropout" in types
    every = (names[: len(names) // 2], names[len(names) // 2 :])
    plain, again, kept = (
        trained(blocks, segments, dtype) for segments in ((), every, holes(blocks, every))
    )
    for found in (again, kept):
        assert found[0] == plain[0]
        for name, value in plain[1].items():
            assert torch.equal(found[1][name], value), name
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert (plain[2][flash], again[2][flash], kept[2][flash]) == (0, 4, 0)
    # Six products in each of two layers, of two microbatches.
    products = [sum(one[2][n] for n in ("mm", "addmm")) for one in (plain, again, kept)]
    left_out = {*sum(every, ())} - {*sum(holes(blocks, every), ())}
    assert len(left_out) == 2 * (6 + 1)
    assert products == [products[0], products[0] + 2 * 12, products[0]]


def test_what_is_put_into_the_module_later_runs_in_segments_too(models):
    """As what waits for gathers beside a forward (`launcher/mesh/shards.py`)."""
    model = models["gpt"]
    names = whole(model).operators
    module, ran = to_torch(model), []
    runner = StageModule(
        module, model.graph, False, {},
        parted=partial(with_segments, stage=whole(model, (names,)), graph=model.graph),
    )  # fmt: skip
    node = next(node for node in module.graph.nodes if node.meta.get("onnx_name") == names[3])
    module.add_submodule("waits", Note(partial(ran.append, names[3])))
    with module.graph.inserting_before(node):
        module.graph.call_module("waits", (node.all_input_nodes[0],))
    module.recompile()
    runner.forward(0, data(model, 1)[0][0], {}, {})
    assert ran == [names[3]]


def test_a_segment_runs_again_before_its_last_operator_with_a_backward(models):
    model = models["mlp"]
    names = whole(model).operators
    (one,) = segments_of(whole(model, (names[1:4],)), model.graph)
    assert one == Segment(1, 4, 3)


@pytest.mark.parametrize(
    "segments, words",
    [
        (
            [[0, 2]],
            "segment 0: operator n_add1 (Add) inside it is left out; expected only products",
        ),
        ([[2, 1]], "segment 0: expected operators in the order of the stage"),
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
