"""Random plans: every operator by a random rule, every leaf in a random spec, on a mesh of threads,
equal one process in float64: the loss and the gradient of every parameter.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx import TensorProto
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from planner.artefacts.losses import losses
from planner.artefacts.sharding import Sharding, rule_of
from planner.launcher.device_part import StagePlace, local_parameters
from planner.launcher.mesh import convert
from planner.launcher.mesh import module as modules
from planner.launcher.mesh.module import split_module
from planner.launcher.stage import StageModule
from planner.model.export.export import export_module
from planner.operators import parameters
from planner.profilers.rules import split_rules
from planner.resharding import reshardings
from planner.resharding.conversion import Collective
from planner.support.errors import LaunchError
from tests.support.doubles import doubled
from tests.support.split_models import (
    MODELS,
    WORDS,
    Net,
    gpt,
    loaded,
    megatron,
    mlp,
    whole_line,
)
from tests.support.split_plans import (
    alone,
    cut_further,
    data,
    error,
    random_segments,
    random_sharding,
    split,
    stage_of,
)
from tests.support.threads import on_all
from tests.support.zoo import build
from tests.support.zoo.pipeline import read

LIMIT = 1e-9
MESHES = [(2,), (4,), (2, 2)]
BUDGETS = (0, 2_000, 2**30)
"""Bytes that are held ahead: nothing, some and everything."""
FOUND = ["gpt2", "llama", "t5", "vit", "resnet", "unet", "mixtral"]


def worst(model, sharding, batches, expected, recompute=False, prefetch=None, recomputed=()):
    loss, gradients = expected
    told, found, counts = split(model, sharding, batches, recompute, prefetch, recomputed)
    errors = {name: error(found[name], gradients[name]) for name in gradients}
    errors["loss"] = abs(told - loss) / abs(loss)
    return max(errors.values()), errors, counts


def check(model, mesh, num_plans, seed, rules=None, zero=0, budgets=(None,)):
    batches = data(model, 2)
    expected, chance = alone(model, batches), random.Random(seed)
    for i in range(num_plans):
        sharding = random_sharding(model, mesh, chance, rules=rules)
        if zero:
            sharding = cut_further(sharding, model, zero, chance)
        again, prefetch = i % 4 == 3, budgets[i % len(budgets)]
        segments = random_segments(model.graph, chance) if i % 4 == 1 else ()
        found, errors, _ = worst(model, sharding, batches, expected, again, prefetch, segments)
        assert found < LIMIT, (i, prefetch, segments, sharding, errors)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: loaded(make(folder / f"{name}.onnx")) for name, make in MODELS.items()}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rules_by_hand(models, name, mesh):
    check(models[name], mesh, 4, 1)


def test_parameters_that_are_gathered_in_every_pass(models):
    check(models["gpt"], (2,), 2, 2, zero=3)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_collectives_that_run_beside_computations(models, name, zero):
    check(models[name], (2,), 8, 5 + zero, zero=zero, budgets=BUDGETS)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_rules_that_were_found(tmp_path, name, mesh):
    module, inputs = build(name)
    export_module(module, inputs, tmp_path / "single.onnx")
    model = read(name, doubled(tmp_path / "single.onnx", tmp_path / "double.onnx"))
    check(model, mesh, 24, 3, split_rules(model), budgets=(None, *BUDGETS))


# ------------------------------------------------------------------------------- single plans


@pytest.fixture(scope="module")
def block(tmp_path_factory):
    model = loaded(gpt(tmp_path_factory.mktemp("block") / "gpt.onnx", tied=False))
    batches = data(model, 1)
    return model, batches, alone(model, batches)


def test_megatrons_block_runs_two_all_reduces_each_way(block):
    found, _, counts = worst(block[0], megatron(block[0], 2), block[1], block[2])
    assert found < LIMIT
    assert counts == [{"all-reduce": 4}]


def test_along_the_sequence_it_gathers_and_scatters_twice_each_way(block):
    """The places' gradient and the whole head behind the block gather once more each."""
    found, _, counts = worst(block[0], megatron(block[0], 2, sequence=True), block[1], block[2])
    assert found < LIMIT
    assert counts == [{"all-gather": 4 + 2, "reduce-scatter": 4}]


def zero_3(model, seed):
    """Operators by random rules, all parameters cut."""
    chance = random.Random(seed)
    plain = random_sharding(model, (2,), chance)
    whole = {one.name: ("R",) for one in model.graph.parameters}
    return cut_further(replace(plain, parameters=whole), model, 3, chance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_gathered_as_often_as_is_priced(models, name, seed):
    """ZeRO-3 gathers a parameter in each forward, and again before each backward that reads it."""
    model = models[name]
    sharding = zero_3(model, seed)
    _, _, counts = split(model, sharding, data(model, 1))
    priced, again = 0, 0
    for one in reshardings(stage_of(model, sharding), model.graph):
        again += len(one.again)
        steps = (*one.forward, *one.forward * len(one.again), *one.backward)
        priced += sum(step.kind is Collective.ALL_GATHER for step in steps)
    assert again and counts[0]["all-gather"] == priced


@pytest.mark.parametrize("prefetch", [None, 2_000])
@pytest.mark.parametrize("name", MODELS)
def test_no_gathered_parameter_waits_for_its_backward(models, name, prefetch, monkeypatch):
    """When a backward begins, PyTorch has freed the storages of all copies that come again."""
    model = models[name]
    sharding = zero_3(model, 1)
    again = {one.tensor for one in reshardings(stage_of(model, sharding), model.graph) if one.again}
    end, backward = convert.finished, StageModule.backward
    made, waiting = [], []

    def noted(started):
        copy, name = end(started), started.running.how.tensor
        if name in again:
            made.append((name, StorageWeakRef(copy.untyped_storage())))
        return copy

    def asked(self, *args):
        waiting.extend(name for name, storage in made if not storage.expired())
        return backward(self, *args)

    monkeypatch.setattr(modules, "finished", noted)
    monkeypatch.setattr(StageModule, "backward", asked)
    split(model, sharding, data(model, 1), prefetch=prefetch)
    assert made and not waiting


def normalized(path):
    """Images by way of a BatchNormalization that is trained."""
    net = Net()
    h = net.add("Conv", "x", net.weight("k", 8, 4, 1, 1))
    held = [net.weight("scale", 8), net.weight("shift", 8)]
    running = [net.constant("mean", np.zeros(8)), net.constant("var", np.ones(8))]
    h, *_ = net.add("BatchNormalization", h, *held, *running, outputs=3, training_mode=1)
    h = net.add("Flatten", net.add("GlobalAveragePool", h))
    h = net.add("Gemm", h, net.weight("w", 8, WORDS))
    return net.save(path, ((8, 4, 6, 6), TensorProto.DOUBLE), (h, (8, WORDS)))


def test_running_statistics_follow_where_parameters_are_gathered_again(tmp_path):
    """They are PyTorch's after two microbatches, on both devices and not only in one."""
    model = loaded(normalized(tmp_path / "net.onnx"))
    cut = {one.name: ("S0",) for one in model.graph.parameters if one.trainable}
    stage, batches = stage_of(model, of(model, {}, parameters=cut)), data(model, 2)
    names = ("mean", "var")

    def on_one(mesh):
        held = [one.name for one in model.graph.parameters]
        values = local_parameters(model, held, StagePlace(stage, 0, mesh, stage, mesh), "cpu")
        module = split_module(model, stage, mesh, values, "cpu")
        runner = StageModule(module, model.graph, False, {})
        for m, (inputs, _) in enumerate(batches):
            runner.forward(m, inputs, {}, {})
        return runner.states.keys(), [values[name].clone() for name in names]

    weights = parameters(model, ["k"])["k"].detach()
    expected = nn.BatchNorm2d(8, dtype=torch.float64)
    for inputs, _ in batches:
        expected(functional.conv2d(inputs["x"], weights))
    found, _ = on_all((2,), on_one)
    for running, after in found:
        assert len(running) == 2
        for one, wanted in zip(after, (expected.running_mean, expected.running_var), strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12)


def of(model, rules, **how):
    """A sharding over two devices; what is left out is whole."""
    names = {o.type: o.name for o in model.graph.operators}
    made = {names.get(name, name): rule_of([line]) for name, line in rules.items()}
    how = {"parameters": {}, "inputs": {}, "outputs": {}, **how}
    return Sharding((2,), made, **how)


def by_batch(model, **how):
    """The small network with its batch cut from the input to the output."""
    found = {}
    for operator in model.graph.operators:
        rest = "R" * len(operator.parameters)
        line = ",".join(["S0"] * len(operator.inputs) + list(rest)) + "->S0"
        found[operator.name] = line
    return of(model, found, inputs={"x": ("S0",)}, outputs={model.graph.outputs[0]: ("S0",)}, **how)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return loaded(mlp(tmp_path_factory.mktemp("small") / "mlp.onnx"))


def test_a_loss_counts_classes_that_are_not_ignored(small):
    """Device 0 has 4 samples of which 3 are ignored, device 1 has 4 of which none is."""
    ((inputs, target),) = data(small, 1)
    target = target.clone()
    target[:3] = -100
    batches = [(inputs, target)]
    expected = alone(small, batches)
    assert worst(small, by_batch(small), batches, expected)[0] < LIMIT
    target[:4] = -100
    expected = alone(small, batches)
    assert worst(small, by_batch(small), batches, expected)[0] < LIMIT


def test_a_loss_of_values_is_a_mean_of_parts(small):
    model = replace(small, graph=replace(small.graph, losses=(
        replace(losses_of(small)[0], function="mse", class_dim=None),
    )))  # fmt: skip
    batches = data(model, 1)
    expected = alone(model, batches)
    (output, _) = worst(model, by_batch(model), batches, expected)[:2]
    assert output < LIMIT


def losses_of(model):
    from planner.artefacts.graph import losses_of as of_graph

    return of_graph(model.graph)


def test_classes_that_are_cut_are_compared_over_the_line(small):
    """Each device has half the scores; cross-entropy asks the other one."""
    product = small.graph.operators[-1]
    sharding = of(
        small, {product.name: "R,S1->S1"}, parameters={"w3": ("S1",)},
        outputs={small.graph.outputs[0]: ("S1",)},
    )  # fmt: skip
    batches = data(small, 2)
    found, _, counts = worst(small, sharding, batches, alone(small, batches))
    assert found < LIMIT
    assert counts[0]["max"] == 2 and "all-gather" not in counts[0]


def test_a_loss_over_cut_classes_that_are_no_scores_is_refused(small):
    (loss,) = losses(small.graph)
    from planner.launcher.mesh.losses import split_criterion
    from tests.support.threads import meshes

    mesh = meshes((2,))[0][0]
    with pytest.raises(LaunchError, match="only a cross-entropy of scores"):
        split_criterion(replace(loss, function="nll"), ("S1",), mesh)
    with pytest.raises(LaunchError, match="computed from all of it; expected R, got S0"):
        split_criterion(replace(loss, function="torch.nn.functional:mse_loss"), ("S0",), mesh)


@pytest.mark.parametrize("operator, line, words", [
    ("Gelu", "S1->S0", r"Gelu.*by the rule S1->S0 it makes"),
    ("Gelu", "S1->S1 shape[1]", r"Gelu\): there is no attribute 'shape\[1\]' to divide"),
    ("Gelu", "S1->S1 @halo", r"Gelu.*expected one mark among none, got @halo"),
])  # fmt: skip
def test_a_rule_that_does_not_hold_is_refused(small, operator, line, words):
    with pytest.raises(LaunchError, match=words):
        split(small, of(small, {operator: line}), data(small, 1))


def test_an_attribute_that_cannot_be_divided_is_refused(block):
    model = block[0]
    reshape = next(o for o in model.graph.operators if o.type == "Reshape")
    sharding = Sharding((3,), {reshape.name: rule_of(["R->R shape[2]"])}, {}, {}, {})
    with pytest.raises(LaunchError, match="expected a number that 3 divides"):
        split(model, sharding, block[1])


def test_an_unsplit_stage_on_a_mesh_sends_nothing(block):
    whole = {o.name: rule_of([whole_line(o)]) for o in block[0].graph.operators}
    found, _, counts = worst(block[0], Sharding((2,), whole, {}, {}, {}), block[1], block[2])
    assert found < LIMIT and counts == [{}]
    assert reshardings(stage_of(block[0], Sharding((2,), {}, {}, {}, {})), block[0].graph) == ()


def test_the_reference_is_torchs(small):
    """One process is compared with the same network written in PyTorch."""
    batches = data(small, 1)
    loss, gradients = alone(small, batches)
    ((inputs, target),) = batches
    w = {
        name: torch.from_numpy(small.values[name].copy()).requires_grad_()
        for name in ("g", "b", "w1", "b1", "w2", "w3")
    }
    x = inputs["x"]
    h = functional.layer_norm(x, x.shape[1:], w["g"], w["b"])
    h = functional.gelu(h @ w["w1"] + w["b1"])
    mine = functional.cross_entropy((h @ w["w2"] + x) @ w["w3"], target)
    mine.backward()
    assert mine.item() == pytest.approx(loss, rel=1e-12)
    assert all(error(gradients[name], one.grad) < LIMIT for name, one in w.items())
