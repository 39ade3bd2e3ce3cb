import json
import os
import random
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from planner.artefacts.graph import LossChoice, View, tensors_by_name
from planner.artefacts.losses import losses
from planner.artefacts.profile import Source, WholeStep, stash_bytes
from planner.artefacts.strategy import Stage
from planner.artefacts.weight_gradients import backward_weight_share
from planner.costs.casts import kept_casts
from planner.costs.stage_memory import stage_memory
from planner.model.load import ReadOptions, load
from planner.operators import input_names, parameters, synthetic, to_torch
from planner.profilers.cache import cache_for
from planner.profilers.classes import TensorLayout, class_name, contiguous, surroundings
from planner.profilers.measured import (
    ModelTimer,
    _scaled_to_step,
    _TimesInStep,
    measure,
    session,
)
from planner.profilers.reliability import Conditions, cache_agrees, interval, warnings
from planner.profilers.runnable import unit
from planner.profilers.summary import summary
from planner.profilers.timing import MAX_CALLS, OperatorTimer, Stopwatch, forwards_s
from planner.support.caches import with_checksum, without_checksum
from planner.support.errors import OptionError
from tests.support.models import MODELS, cached

FLOAT = 4  # bytes


def read(folder, text, weights=None, **options):
    """A model from ONNX's text syntax, with random weights of the shapes given."""
    header = '<ir_version: 10, opset_import: ["" : 17]> '
    proto = onnx.parser.parse_model(header + text)
    numbers = np.random.default_rng(0)
    for name, shape in (weights or {}).items():
        value = numbers.uniform(0.1, 0.9, shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return load(path, ReadOptions(**options))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def profiled(model, **options):
    return measure(model, model_path="model.onnx", **{"repetitions": 1, "budget_s": 0.0, **options})


RESIDUAL = """agraph (float[2,3,8,8] x) => (float[2,4,8,8] y) {
    c = Conv <pads = [1,1,1,1]> (x, w)
    b = BatchNormalization (c, scale, shift, mean, var)
    r = Relu (b)
    d = Conv <pads = [1,1,1,1]> (r, v)
    s = Add (d, r)
    t = Add (s, d)
    y = Relu (t)
}"""
RESIDUAL_WEIGHTS = {
    "w": (4, 3, 3, 3), "v": (4, 4, 3, 3), "scale": 4, "shift": 4, "mean": 4, "var": 4,
}  # fmt: skip

ATTENTION = """agraph (int64[2,5] ids, int64[2,5] mask)
    => (float[2,5,11] logits, float[2,5,8] side) <
    int64[4] split = {2, 5, 2, 4}, int64[3] join = {2, 5, 8}, int64[2] last = {1, 2},
    int64[3] lengths = {8, 8, 8}, float eight = {8.0}, float low = {-10000.0}, float one = {1.0}
> {
    e = Gather (table, ids)
    n = LayerNormalization (e, scale, shift)
    qkv = MatMul (n, w)
    q, k, v = Split <axis = 2> (qkv, lengths)
    qs = Reshape (q, split)
    ks = Reshape (k, split)
    vs = Reshape (v, split)
    qt = Transpose <perm = [0,2,1,3]> (qs)
    kt = Transpose <perm = [0,2,3,1]> (ks)
    vt = Transpose <perm = [0,2,1,3]> (vs)
    a = MatMul (qt, kt)
    scaled = Div (a, eight)
    wide = Unsqueeze (mask, last)
    seen = Cast <to = 1> (wide)
    unseen = Sub (one, seen)
    bias = Mul (unseen, low)
    masked = Add (scaled, bias)
    p = Softmax <axis = -1> (masked)
    o = MatMul (p, vt)
    ot = Transpose <perm = [0,2,1,3]> (o)
    joined = Reshape (ot, join)
    h = Add (joined, e)
    back = Transpose <perm = [1,0]> (table)
    same = Identity (back)
    logits = MatMul (h, same)
    side = Tanh (h)
}"""
ATTENTION_WEIGHTS = {"table": (11, 8), "scale": 8, "shift": 8, "w": (8, 24)}


def residual(folder):
    return read(folder, RESIDUAL, RESIDUAL_WEIGHTS)


def attention(folder):
    return read(folder, ATTENTION, ATTENTION_WEIGHTS)


# ---- synthetic inputs


def test_the_same_seed_gives_the_same_inputs_and_each_microbatch_its_own(tmp_path):
    model = residual(tmp_path)
    x = synthetic.inputs(model, seed=3, microbatch=1)["x"]
    assert x.shape == (2, 3, 8, 8)
    assert torch.equal(x, synthetic.inputs(model, seed=3, microbatch=1)["x"])
    assert not torch.equal(x, synthetic.inputs(model, seed=3, microbatch=2)["x"])
    assert not torch.equal(x, synthetic.inputs(model, seed=4, microbatch=1)["x"])


def test_integers_index_the_smallest_table_that_they_reach(tmp_path):
    text = """agraph (int64[400] ids, int64[400] other) => (float[1,400] y) <int64[1] zero = {0}> {
        direct = Gather (large, ids)
        wide = Unsqueeze (ids, zero)
        narrow = Cast <to = 6> (wide)
        moved = Gather <axis = 1> (small, narrow)
        a = ReduceMean <axes = [1], keepdims = 0> (direct)
        b = ReduceMean <axes = [0, 1], keepdims = 0> (moved)
        c = Cast <to = 1> (other)
        s = Mul (a, c)
        y = Add (b, s)
    }"""
    model = read(tmp_path, text, {"large": (1000, 2), "small": (2, 7)})
    made = synthetic.inputs(model, seed=0, microbatch=0)
    assert set(made["ids"].tolist()) == set(range(7))
    assert made["ids"].dtype == torch.int64
    assert made["other"].unique().tolist() == [1]


@pytest.mark.parametrize(
    ("body", "classes"),
    [
        ("c = GatherElements <axis = 1> (y, i)", 3),
        ("c = GatherND <batch_dims = 1> (y, i)", 3),
        ("c = ScatterElements <axis = 1> (y, i, u)", 3),
        ("f = Squeeze (i, one) c = NegativeLogLikelihoodLoss (y, f)", 3),
        ("f = Squeeze (i, one) c = SoftmaxCrossEntropyLoss (y, f)", 3),
        ("f = Squeeze (i, one) c = OneHot (f, five, zeroone)", 5),
        (
            "b = Equal (i, ignored) n = Not (b) k = Where (n, i, none) p = Concat <axis = 0> (k, k)"
            " s = Slice (p, none1, two) c = GatherElements <axis = 1> (y, s)",
            3,
        ),
        ("l = CastLike (i, none) c = GatherElements <axis = 1> (y, l)", 3),
        (
            "f = Squeeze (i, one) r = Concat <axis = 1> (y, u) m = Reshape (y, four)"
            " d = RoiAlign (m, r, f) c = Reshape (d, flat)",
            4,
        ),
        ("c = Cast <to = 1> (i)", 0),
    ],
)
def test_labels_are_drawn_among_the_classes(body, classes, tmp_path):
    text = f"""agraph (int64[400,1] i, float[400,2] x, float[400,1] u) =>
        (float[400,3] y, float[N] c)
        <int64[1] one = {{1}}, int64 five = {{5}}, float[2] zeroone = {{0, 1}}, int64 none = {{0}},
         int64 ignored = {{-100}}, int64[1] none1 = {{0}}, int64[1] two = {{400}},
         int64[4] four = {{4, 3, 10, 10}}, int64[1] flat = {{-1}}> {{
        y = MatMul (x, w)
        {body}
    }}"""
    made = synthetic.inputs(read(tmp_path, text, {"w": (2, 3)}), seed=0, microbatch=0)["i"]
    assert set(made.flatten().tolist()) == (set(range(classes)) if classes else {1})


def test_targets_are_classes_of_the_last_dimension_or_normal(tmp_path):
    model = attention(tmp_path)

    def target(function):
        choice = LossChoice(model.graph.outputs[0], function)
        (loss,) = losses(replace(model.graph, losses=(choice,)))
        return synthetic.target(loss, seed=0, microbatch=0)

    assert target("cross-entropy").shape == (2, 5)
    assert target("nll").dtype == torch.int64
    assert set(target("cross-entropy").flatten().tolist()) <= set(range(11))
    assert target("mse").shape == (2, 5, 11)
    assert set(target("bce").flatten().tolist()) == {0.0, 1.0}


# ---- the stash of one operator


def test_relu_keeps_its_output_and_a_convolution_its_input(tmp_path):
    profile = profiled(residual(tmp_path))
    first, norm, relu, second, add, _, last = profile.operators
    assert first.stash_tensors == ("x",)
    assert (relu.stash_tensors, relu.stash_private_bytes) == (("r",), 0)
    assert second.stash_tensors == ("r",)
    assert (add.stash_tensors, add.stash_private_bytes) == ((), 0)
    assert last.stash_tensors == ("y",)
    tensor = 2 * 4 * 8 * 8 * FLOAT
    assert stash_bytes(profile, [2, 3]) == tensor
    assert stash_bytes(profile, [4]) == 0
    assert norm.stash_tensors == ("c",)
    assert stash_bytes(profile, range(7)) == 2 * 3 * 8 * 8 * FLOAT + 3 * tensor + (
        norm.stash_private_bytes
    )


def test_a_product_keeps_both_factors_and_a_view_is_kept_as_what_it_shows(tmp_path):
    text = """agraph (float[6,4] x) => (float[12,12] y) <int64[2] shape = {12, 2}> {
        a = MatMul (x, w)
        z = Reshape (a, shape)
        c = Transpose (z)
        d = Identity (c)
        y = MatMul (z, d)
    }"""
    profile = profiled(read(tmp_path, text, {"w": (4, 4)}))
    assert profile.views == (View("z", "a"), View("c", "z"), View("d", "c"))
    assert profile.operators[0].stash_tensors == ("x",)
    assert profile.operators[4].stash_tensors == ("z", "d")
    tensor = 6 * 4 * FLOAT
    assert stash_bytes(profile, [4]) == 2 * tensor  # both factors come from elsewhere
    assert stash_bytes(profile, [2, 3, 4]) == tensor
    assert stash_bytes(profile, range(5)) == 2 * tensor


def test_copies_that_are_kept_are_no_workspace(tmp_path):
    text = """agraph (float[2,6,3,4] x) => (float[2,3,6,6] y) {
        a = MatMul (x, w)
        b = Transpose <perm = [0,2,1,3]> (a)
        c = Transpose <perm = [0,2,3,1]> (a)
        y = MatMul (b, c)
    }"""
    product = profiled(read(tmp_path, text, {"w": (4, 4)})).operators[-1]
    tensor = 2 * 6 * 3 * 4 * FLOAT
    assert product.stash_private_bytes == 2 * tensor  # both factors in the order that it needs
    assert product.workspace_bytes == 0  # gradients of both come out as they are


def test_a_parameter_is_not_stashed_even_where_it_is_seen_through_a_view(tmp_path):
    model = attention(tmp_path)
    profile = profiled(model)
    index = {operator.name: i for i, operator in enumerate(model.graph.operators)}
    maker = {name: o.name for o in model.graph.operators for name in o.outputs}
    views = [index[maker["back"]], index[maker["same"]]]
    *_, head, _ = range(len(profile.operators))
    assert profile.operators[head].stash_tensors == ("h", "same")
    # The view is a copy where it comes from elsewhere, and costs nothing where it is made.
    copied = stash_bytes(profile, [head]) - stash_bytes(profile, [*views, head])
    tensors = {tensor.name: tensor for tensor in model.graph.tensors}
    assert copied == tensors["same"].bytes


# ---- the stash of sets of operators, against what autograd keeps when they run as one


def tensors_of(model, held):
    """Every tensor of the model, from one run."""
    values = synthetic.inputs(model, seed=0, microbatch=0)
    for i in range(len(model.graph.operators)):
        module = to_torch(model, [i], values=held)
        with torch.no_grad():
            made = module(*[values[name] for name in module.input_names])
        values.update(zip(module.output_names, made, strict=True))
    return values


def kept_bytes(model, operators, values, held):
    """What autograd keeps while the operators run as one module, parameters left out."""
    module = to_torch(model, operators, values=held)
    described = tensors_by_name(model.graph)
    received = [
        values[name]
        .clone(memory_format=torch.contiguous_format)
        .requires_grad_(described[name].gradient)
        for name in input_names(model.graph, operators)
    ]
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        outputs = module(*received)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    for parameter in (*module.parameters(), *module.buffers()):
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    assert outputs
    return sum(storages.values())


def assert_exact(model, profile, num_ranges=6):
    held = parameters(model, [p.name for p in model.graph.parameters])
    values = tensors_of(model, held)
    choose, n = random.Random(0), len(model.graph.operators)
    cuts = [sorted(choose.sample(range(n + 1), 2)) for _ in range(num_ranges)]
    found, expected = {}, {}
    for start, end in [(0, n), *cuts]:
        found[start, end] = stash_bytes(profile, range(start, end))
        expected[start, end] = kept_bytes(model, range(start, end), values, held)
    assert found == expected
    assert found[0, n] > 0


@pytest.mark.parametrize("build", [residual, attention])
def test_the_stash_of_any_range_of_operators_is_exact(build, tmp_path):
    model = build(tmp_path)
    assert_exact(model, profiled(model), num_ranges=40)


def test_a_transposed_weight_that_comes_from_elsewhere_is_stashed(tmp_path):
    model = attention(tmp_path)
    *_, head, _ = range(len(model.graph.operators))
    held = parameters(model, [p.name for p in model.graph.parameters])
    expected = kept_bytes(model, [head], tensors_of(model, held), held)
    assert stash_bytes(profiled(model), [head]) == expected


@pytest.mark.parametrize("name", ["squeezenet", pytest.param("shufflenet", marks=pytest.mark.slow)])
def test_the_stash_of_any_range_of_a_real_network_is_exact(name, tmp_path):
    model = load(cached(name, tmp_path), ReadOptions(batch=1))
    assert_exact(model, profiled(model), num_ranges=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("squeezenet", "shufflenet")])
def test_the_stash_of_random_stages_of_every_model_is_exact(name, tmp_path, monkeypatch):
    monkeypatch.setattr("planner.profilers.measured.free_bytes", lambda device: 0)  # saves time
    sizes = {"seq": 32} if name in ("gpt2", "bert") else {}
    model = load(cached(name, tmp_path), ReadOptions(batch=2, dimensions=sizes))
    assert_exact(model, profiled(model, cached=False), num_ranges=8)


# ---- times and the rest


@pytest.mark.parametrize("build", [residual, attention])
def test_the_backward_passes_of_trials_give_the_gradients_of_the_whole_step(build, tmp_path):
    model = build(tmp_path)
    graph = model.graph
    held = parameters(model, [p.name for p in graph.parameters])
    trained = {p.name: held[p.name] for p in graph.parameters if p.trainable}
    values = synthetic.inputs(model, seed=0, microbatch=0)
    output, *_ = to_torch(model, values=held)(*values.values())
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, list(trained.values()), gradient)
    alive, trials = dict(values), []
    for i, around in enumerate(surroundings(graph)):
        one = unit(model, i, "cpu", held)
        trials.append(OperatorTimer(one, one.leaves(alive), around, Stopwatch("cpu"), None))
        made = one.forward(*one.leaves(alive))
        alive.update((n, v.detach().requires_grad_(v.requires_grad))
                     for n, v in zip(one.outputs, made, strict=True))  # fmt: skip
    found = {name: torch.zeros_like(value) for name, value in trained.items()}
    arriving = {graph.outputs[0]: gradient}
    for trial in reversed(trials):
        trial.arriving = {name: arriving[name] for name in trial.arriving}
        trial.summands = {name: arriving[name] for name in trial.summands}
        trial.totals = {name: found[name] for name in trial.totals}
        passed = trial._gradients([trial.inputs], [trial._run(trial.inputs)])
        if passed:
            leaves = [n for n, leaf in zip(trial.unit.inputs, trial.inputs, strict=True)
                      if leaf.requires_grad]  # fmt: skip
            names = (*leaves, *trial.unit.weights)
            leaving = zip(names, passed(), strict=True)
            arriving.update((name, one) for name, one in leaving if one is not None)
    torch.testing.assert_close(list(found.values()), list(expected))


# ---- the gradients of inputs apart from those of weights


PRODUCTS = """agraph (float[2,3,8,8] x) => (float[2,4,5] y) <int64[3] rows = {2, 8, 32}> {
    c = Conv <pads = [1,1,1,1]> (x, w)
    r = Relu (c)
    d = Conv <pads = [1,1,1,1]> (r, v, b)
    s = Reshape (d, rows)
    m = MatMul (s, u)
    t = Transpose <perm = [0,2,1]> (m)
    p = MatMul (t, m)
    y = MatMul (p, z)
}"""
PRODUCTS_WEIGHTS = {"w": (4, 3, 3, 3), "v": (4, 4, 3, 3), "b": 4, "u": (32, 4), "z": (4, 5)}
BOTH = {"d", "m", "y"}
"""Those that compute the gradients of an input and of a weight; the first one reads samples."""


def operations(run):
    """The FLOPs of products while something runs, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


def count_flops(monkeypatch, flop_s):
    """A clock on which only products take time, as long for each FLOP."""

    def seconds(watch, run, host_s=0.0):
        flops, result = operations(run)
        return 1e-9 + flop_s * flops, result

    monkeypatch.setattr(Stopwatch, "seconds", seconds)


@pytest.mark.parametrize("flop_s", [1e-3, 1e-9])
def test_the_time_of_a_weights_gradient_is_what_a_backward_without_it_is_spared(
    flop_s, tmp_path, monkeypatch
):
    """Where a backward is timed by one call, and where by several."""
    count_flops(monkeypatch, flop_s)
    profile = profiled(read(tmp_path, PRODUCTS, PRODUCTS_WEIGHTS), cached=False)
    for operator, cost, share in zip(
        profile.graph.operators, profile.operators, backward_weight_share(profile), strict=True
    ):
        apart = operator.outputs[0] in BOTH
        assert (cost.backward_weight_s is not None) == apart
        if apart:
            assert share == pytest.approx(0.5, rel=0.01)
            assert cost.backward_weight_s == pytest.approx(flop_s * cost.flops, rel=0.01)


def test_a_backward_without_weights_computes_the_same_gradients_of_inputs_and_no_others(tmp_path):
    model = read(tmp_path, PRODUCTS, PRODUCTS_WEIGHTS)
    held = parameters(model, [p.name for p in model.graph.parameters])
    alive, compared = dict(synthetic.inputs(model, seed=0, microbatch=0)), set()
    for i, around in enumerate(surroundings(model.graph)):
        one = unit(model, i, "cpu", held)
        timer = OperatorTimer(one, one.leaves(alive), around, Stopwatch("cpu"), None, halves=True)
        outputs = timer._run(timer.inputs)
        inputs_only = timer._gradients([timer.inputs], [outputs], weights=False)
        together = timer._gradients([timer.inputs], [outputs])
        if inputs_only and one.weights:
            few_flops, few = operations(inputs_only)
            all_flops, every = operations(together)
            assert all_flops == 2 * few_flops > 0
            assert len(every) == len(few) + len(one.weights)
            torch.testing.assert_close(few, every[: len(few)])
            compared.add(one.outputs[0])
        alive.update((n, v.detach().requires_grad_(v.requires_grad))
                     for n, v in zip(one.outputs, outputs, strict=True))  # fmt: skip
    assert compared == BOTH


def test_the_cache_has_the_time_of_a_weights_gradient(tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    count_flops(monkeypatch, 1e-3)
    (once, first), (twice, second) = (
        measured(tmp_path, PRODUCTS, PRODUCTS_WEIGHTS) for _ in range(2)
    )
    assert (first.num_cached, second.num_timed) == (0, 0)
    assert sum(cost.backward_weight_s is not None for cost in once.operators) == len(BOTH)
    assert twice.operators == once.operators


# ---- classes of operators, and the cache


CHAIN = """agraph (float[2,8] x) => (float[2,8] y) {
    a = Relu (x)
    b = MatMul (a, w)
    c = Relu (b)
    d = MatMul (c, v)
    e = Relu (d)
    y = MatMul (e, u)
}"""
CHAIN_WEIGHTS = {"w": (8, 8), "v": (8, 8), "u": (8, 8)}


def measured(folder, text=CHAIN, weights=CHAIN_WEIGHTS, **options):
    """A profile and what it took."""
    seen = []
    profile = profiled(read(folder, text, weights), effort=seen.append, **options)
    return profile, seen[0]


def quiet_machine(monkeypatch):
    """No sign of other processes, so that what is found is kept."""
    monkeypatch.setattr("planner.profilers.measured.signs_of_load", lambda *_: ())


def test_operators_of_one_class_are_measured_once_and_share_their_figures(tmp_path):
    profile, effort = measured(tmp_path, cached=False)
    first, product, relu, second, again, third = profile.operators
    # No gradient reaches x, so neither the first Relu nor the first product costs as much.
    assert effort.num_classes == effort.num_timed == 4
    assert first.backward_s == 0 < relu.backward_s
    assert (relu.forward_s, relu.backward_s) == (again.forward_s, again.backward_s)
    assert (second.forward_s, second.backward_s) == (third.forward_s, third.backward_s)
    assert (relu.stash_tensors, again.stash_tensors) == (("c",), ("e",))
    assert product.stash_tensors == ("a",)


def test_what_was_measured_before_is_not_measured_again(tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    once, first = measured(tmp_path)
    twice, second = measured(tmp_path)
    assert (first.num_timed, first.num_cached, first.kept) == (4, 0, True)
    assert (second.num_timed, second.num_cached, second.num_classes) == (0, 4, 4)
    assert once.whole_step.alone_s == twice.whole_step.alone_s
    assert once.views == twice.views
    longer = CHAIN.replace("y = MatMul (e, u)", "f = MatMul (e, u) y = Tanh (f)")
    _, third = measured(tmp_path, longer)
    assert (third.num_timed, third.num_cached) == (1, 4)
    _, apart = measured(tmp_path, cached=False)
    assert apart.num_cached == 0


def test_what_was_measured_on_a_busy_machine_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("planner.profilers.measured.signs_of_load", lambda *_: ("busy",))
    _, first = measured(tmp_path)
    _, second = measured(tmp_path)
    assert not first.kept
    assert second.num_cached == 0


def test_what_does_not_agree_with_the_step_of_today_is_measured_again(tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    monkeypatch.setattr("planner.profilers.reliability.LEAST_STEP_S", 0.0)
    monkeypatch.setattr("planner.profilers.reliability.AGREEMENT", (0.1, 10.0))
    once, _ = measured(tmp_path)
    assert measured(tmp_path)[1].num_timed == 0
    for entry in (tmp_path / "cache").rglob("*.entry"):
        name = f"{entry.parent.name}/{entry.name}"
        plain = json.loads(without_checksum(name, entry.read_bytes()))
        if isinstance(plain, dict):
            slower = {**plain, "forward_s": 1000 * plain["forward_s"]}
            entry.write_bytes(with_checksum(name, json.dumps(slower).encode()))
    again, second = measured(tmp_path)
    assert (second.num_timed, second.num_cached) == (4, 0)
    assert sum(o.forward_s for o in again.operators) < 50 * sum(o.forward_s for o in once.operators)
    third, last = measured(tmp_path)
    assert last.num_timed == 0
    assert third.whole_step.alone_s == again.whole_step.alone_s


@pytest.mark.parametrize("build", [residual, attention])
def test_operators_sum_up_to_the_whole_step_and_equal_ones_are_equal(build, tmp_path):
    profile = profiled(build(tmp_path))
    whole = profile.whole_step
    sums = [
        sum(getattr(o, side) for o in profile.operators) for side in ("forward_s", "backward_s")
    ]
    assert sum(sums) == pytest.approx((whole.before_s + whole.after_s) / 2, rel=1e-3)
    assert min(sums) > 0
    assert whole.alone_s > 0


def test_times_within_a_step_replace_those_alone(tmp_path):
    profile = profiled(read(tmp_path, CHAIN, CHAIN_WEIGHTS))
    count = len(profile.operators)
    alone = tuple(
        replace(o, forward_s=1.0, backward_s=float(i), backward_weight_s=i / 4 if i % 2 else None)
        for i, o in enumerate(profile.operators)
    )
    profile = replace(profile, operators=alone, whole_step=WholeStep(30.0, 34.0))
    in_passes = [float(i + 1) for i in range(count)]
    found = _scaled_to_step(profile, _TimesInStep(2 * sum(in_passes), 45.0, (), (), in_passes))
    assert [o.forward_s for o in found.operators] == [2 * s for s in in_passes]
    assert [o.backward_s for o in found.operators] == [3.0 * i for i in range(count)]
    assert [o.backward_weight_s for o in found.operators] == [
        0.75 * i if i % 2 else None for i in range(count)
    ]
    assert found.whole_step == WholeStep(30.0, 34.0, alone_s=count + 15.0)
    scaled = _scaled_to_step(
        profile, _TimesInStep(5.0 * count, 45.0, (), (), None)
    )  # on CUDA, as alone
    assert [o.forward_s for o in scaled.operators] == [5.0] * count


@pytest.mark.parametrize("host_s", [0.0, 0.1, 0.6, 5.0])
def test_both_clocks_of_operators_together_take_the_time_of_the_whole_step(tmp_path, host_s):
    profile, draws = profiled(residual(tmp_path)), random.Random(3)
    alone = tuple(
        replace(
            one, forward_s=draws.random(), backward_s=draws.random(),
            host_forward_s=host_s * draws.random(), host_backward_s=host_s * draws.random(),
        )
        for one in profile.operators
    )  # fmt: skip
    profile = replace(profile, operators=alone, whole_step=WholeStep(30.0, 34.0))
    found = _scaled_to_step(profile, _TimesInStep(20.0, 44.0, (), (), None))
    assert ticked_s([(one.forward_s, one.host_forward_s) for one in found.operators]) == (
        pytest.approx(20.0)
    )
    backward = [(one.backward_s, one.host_backward_s) for one in reversed(found.operators)]
    assert ticked_s(backward) == pytest.approx(44.0)
    for one, before in zip(found.operators, alone, strict=True):
        assert one.host_forward_s * before.forward_s == pytest.approx(
            before.host_forward_s * one.forward_s
        )


def ticked_s(run):
    """The end of operators, kernel by kernel, on a device and its host."""
    device = host = 0.0
    for device_s, host_s in run:
        host += host_s
        device = max(device + device_s, host)
    return device


def test_a_gpu_is_timed_with_all_kernels_in_its_queue_and_its_host_apart(tmp_path, monkeypatch):
    """On clocks of a GPU that is not there: a FLOP takes 1 ns, a call of the host 7 us."""
    held = []

    def seconds(watch, run, host_s=0.0):
        flops, result = operations(run)
        held.append(host_s)
        return 1e-6 + 1e-9 * flops, result

    def host_seconds(watch, run):
        result = run()
        calls = len(result) if isinstance(result, list) and isinstance(result[0], tuple) else 1
        return 7e-6 * calls, result

    monkeypatch.setattr(Stopwatch, "is_host", False)
    monkeypatch.setattr(Stopwatch, "seconds", seconds)
    monkeypatch.setattr(Stopwatch, "host_seconds", host_seconds)
    model = read(tmp_path, PRODUCTS, PRODUCTS_WEIGHTS)
    here = session(model.graph, "cpu", 1, None, cached=False)
    made = ModelTimer(model, here, 1, 0.0, 0).run(lambda done, total: None)
    assert {one.host_forward_s for one in made.operators} == {7e-6}
    assert all(one.host_backward_s for one in made.operators if one.backward_s)
    assert all(one.forward_s < 7e-6 + 1e-9 * one.flops for one in made.operators)
    assert {cost.host_forward_s for cost in made.in_step.losses} == {7e-6}
    assert 0.0 in held  # the whole step, which waits for its host as a launch does
    assert max(held) == pytest.approx(MAX_CALLS * 7e-6)


@pytest.mark.parametrize(("host_s", "cycles"), [(0.0, None), (1e-4, 400_000), (1.0, 40_000_000)])
def test_a_gpu_is_held_until_its_host_has_started_all_kernels(monkeypatch, host_s, cycles):
    """In the order of calls, for there is no GPU here."""
    steps = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            steps.append("record")

        def synchronize(self):
            steps.append("wait")

        def elapsed_time(self, end):
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: steps.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", steps.append)
    watch = Stopwatch("cpu")
    watch.device = "cuda"
    time_s, _ = watch.seconds(lambda: steps.append("run"), host_s)
    assert time_s == pytest.approx(3e-3)
    held = [] if cycles is None else [cycles]
    assert steps == ["wait", *held, "record", "run", "record", "wait"]
    steps.clear()
    host_s, _ = watch.host_seconds(lambda: steps.append("run"))
    assert steps == ["wait", "run"]
    assert host_s > 0


def test_operators_of_a_pass_find_what_those_before_have_made(tmp_path):
    model = read(tmp_path, CHAIN, CHAIN_WEIGHTS)
    held = parameters(model, [p.name for p in model.graph.parameters])
    units = [unit(model, i, "cpu", held) for i in range(len(model.graph.operators))]
    inputs = synthetic.inputs(model, seed=0, microbatch=0)
    seen = []
    watched = [
        replace(one, forward=lambda *given, one=one: seen.append(one.forward(*given)) or seen[-1])
        for one in units
    ]
    times_s = forwards_s(watched, inputs, None, Stopwatch("cpu"))
    assert len(times_s) == len(units)
    expected, *_ = to_torch(model, values=held)(*inputs.values())
    torch.testing.assert_close(seen[-1][0], expected)
    assert seen[-1][0].grad_fn.next_functions[0][0] is not None  # the whole pass is kept


def test_nothing_is_measured_again_on_a_busy_machine(tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    measured(tmp_path)
    monkeypatch.setattr("planner.profilers.measured.cache_agrees", lambda profile, usual: False)
    monkeypatch.setattr("planner.profilers.measured.signs_of_load", lambda *_: ("busy",))
    assert measured(tmp_path)[1].num_timed == 0


@pytest.mark.parametrize(("usual", "agreed"), [(1.0, False), (1.2, True), (1.25, True)])
def test_a_ratio_agrees_with_the_usual_one_of_the_model(usual, agreed, tmp_path):
    profile = profiled(read(tmp_path, CHAIN, CHAIN_WEIGHTS))
    total_s = sum(o.forward_s + o.backward_s for o in profile.operators)
    slow = [replace(o, forward_s=o.forward_s / total_s, backward_s=o.backward_s / total_s)
            for o in profile.operators]  # fmt: skip
    whole = WholeStep(1 / 1.2, 1 / 1.2)
    assert cache_agrees(replace(profile, operators=tuple(slow), whole_step=whole), usual) is agreed


@pytest.mark.parametrize("change", [{"threads": 2}, {"dtype": "bfloat16"}])
def test_other_conditions_are_measured_anew(change, tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    measured(tmp_path)
    _, other = measured(tmp_path, **change)
    assert other.num_cached == 0


@pytest.mark.parametrize("what", ["get_device_name", "version"])
def test_another_machine_or_version_is_measured_anew(what, tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    measured(tmp_path)
    if what == "version":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr("planner.profilers.measured.processor", lambda: "another one")
    assert measured(tmp_path)[1].num_cached == 0


def test_a_folder_that_cannot_be_written_is_said_and_harms_nothing(tmp_path, monkeypatch):
    quiet_machine(monkeypatch)
    (tmp_path / "cache").write_text("in the way")
    profile, effort = measured(tmp_path)
    assert len(profile.operators) == 6
    assert "cannot be written" in effort.cache_problem


@pytest.mark.parametrize("damage", ["empty", "cut", "other JSON", "another entry", "a folder"])
def test_a_damaged_entry_is_measured_anew_and_said(tmp_path, monkeypatch, caplog, damage):
    quiet_machine(monkeypatch)
    measured(tmp_path)
    entries = sorted((tmp_path / "cache").rglob("*.entry"))
    operators = [one for one in entries if "ratio" not in one.name]
    other = operators[0].read_bytes()
    for entry in entries:
        kept = entry.read_bytes()
        if damage == "a folder":
            entry.unlink()
            entry.mkdir()
            continue
        damaged = {"empty": b"", "cut": kept[:-5], "other JSON": b"{}", "another entry": other}
        entry.write_bytes(damaged[damage])
    _, again = measured(tmp_path)
    assert again.num_timed == (3 if damage == "another entry" else 4)
    (record,) = caplog.records  # one for all
    assert re.search(r"\.entry: expected an entry of the cache, but .+ made anew", record.message)
    if damage == "a folder":
        assert "cannot be written: Is a directory" in again.cache_problem
    else:
        assert measured(tmp_path)[1].num_timed == 0


def test_an_entry_of_another_user_is_not_used(tmp_path, monkeypatch, caplog):
    quiet_machine(monkeypatch)
    measured(tmp_path)
    user = os.geteuid()
    for entry in (tmp_path / "cache").rglob("*.entry"):
        os.chown(entry, 12345, -1) if user == 0 else pytest.skip("needs root")
    assert measured(tmp_path)[1].num_timed == 4
    assert "it belongs to user 12345" in caplog.text


def names_of(model):
    """The names of the classes of a model's operators whose tensors are all contiguous."""
    tensors = tensors_by_name(model.graph)
    layouts = {
        n: contiguous(t.shape, t.dtype, requires_grad=t.gradient) for n, t in tensors.items()
    }
    arounds = surroundings(model.graph)
    return [class_name(model, i, layouts, around) for i, around in enumerate(arounds)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Softmax <axis = 1> (a)", "Softmax <axis = 0> (a)"),
        ("Pow (a, two)", "Pow (a, three)"),
        ("Slice (a, zero, one)", "Slice (a, zero, both)"),
        ("Mul (a, a)", "Mul (a, b)"),
    ],
)
def test_a_class_says_all_that_decides_what_is_computed(before, after, tmp_path):
    text = """agraph (float[2,8] x) => (float[n,8] y) <
        float two = {2.0}, float three = {3.0}, int64[1] zero = {0}, int64[1] one = {1},
        int64[1] both = {2}
    > { a = Mul (x, w) b = Tanh (x) y = OPERATOR }"""
    models_ = [
        read(tmp_path, text.replace("OPERATOR", one), {"w": (8,)}) for one in (before, after)
    ]
    one, other = (names_of(model)[-1] for model in models_)
    assert one != other


def test_neither_names_nor_the_values_of_weights_are_in_a_class(tmp_path):
    weights = dict.fromkeys(CHAIN_WEIGHTS, (8, 8))
    first = names_of(read(tmp_path, CHAIN, weights))
    renamed = CHAIN.replace(" b", " other").replace("(b", "(other")
    assert names_of(read(tmp_path, renamed, {"u": (8, 8), "v": (8, 8), "w": (8, 8)})) == first
    assert first[2] == first[4]


def test_layouts_and_gradients_are_in_a_class(tmp_path):
    model = read(tmp_path, CHAIN, CHAIN_WEIGHTS)
    around = surroundings(model.graph)[2]
    flow = contiguous((2, 8), "float32", requires_grad=True)
    turned = TensorLayout((2, 8), "float32", (1, 2), requires_grad=True)
    without = replace(around, reached=frozenset())
    names = [class_name(model, 2, {"b": one}, around) for one in (flow, turned)]
    assert len({*names, class_name(model, 2, {"b": flow}, without)}) == 3


def test_where_gradients_are_summed(tmp_path):
    model = attention(tmp_path)
    graph = model.graph
    by_name = dict(zip((o.outputs[0] for o in graph.operators), surroundings(graph), strict=True))
    # e is read by the normalization and, later, by the sum h; the table by Gather and Transpose.
    assert by_name["n"].summed == {"e"}
    assert by_name["h"].summed == frozenset()
    assert (by_name["e"].summed, by_name["e"].complete) == ({"table"}, {"table"})
    assert (by_name["back"].summed, by_name["back"].complete) == (frozenset(), frozenset())
    assert by_name["side"].reached == frozenset()


def test_operators_without_a_backward_sum_no_gradients(tmp_path):
    graph = attention(tmp_path).graph
    tensors = (replace(t, gradient=t.gradient and t.name != "e") for t in graph.tensors)
    around = surroundings(replace(graph, tensors=tuple(tensors)))
    by_name = dict(zip((o.outputs[0] for o in graph.operators), around, strict=True))
    # The table's gradient is that of Transpose alone, where it is complete.
    assert (by_name["e"].summed, by_name["e"].complete) == (frozenset(), frozenset())
    assert (by_name["back"].summed, by_name["back"].complete) == (frozenset(), {"table"})


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other cache folders")
def test_measurements_are_kept_in_the_users_cache_folder(tmp_path, monkeypatch):
    conditions = ("EPYC", 1, "float32", "2.13.0")
    assert cache_for(*conditions).folder.parent == tmp_path / "cache" / "planner" / "operators"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_for(*conditions).folder.parent == tmp_path / ".cache" / "planner" / "operators"


# ---- how far to trust it


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    numbers = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        samples = numbers.exponential(1.0, 15)
        ordered, middle = sorted(samples), float(np.median(samples))
        half = interval(samples.tolist()) * middle
        hits += ordered[3] <= np.log(2) <= ordered[11]
        assert 2 * half == pytest.approx(ordered[11] - ordered[3], rel=1e-3)
    assert hits / 400 > 0.93


def trusted(profile, before_s, after_s, **conditions):
    found = replace(profile, whole_step=WholeStep(before_s, after_s))
    given = {"threads": 1, "wall_s": 1.0, "cpu_s": 1.0, "too_big": False, **conditions}
    return " | ".join(warnings(found, Conditions(**given)))


def test_warnings_say_how_times_drift_and_whether_others_had_the_cores(tmp_path):
    profile = profiled(residual(tmp_path))
    profile = replace(profile, operators=tuple(replace(o, interval=0.0) for o in profile.operators))
    sum_s = sum(o.forward_s + o.backward_s for o in profile.operators)
    assert trusted(profile, sum_s, sum_s) == ""
    assert "took 10% longer afterwards" in trusted(profile, sum_s, 1.1 * sum_s)
    assert "took 40% shorter afterwards" in trusted(profile, sum_s, 0.6 * sum_s)
    assert "1.50 times its own CPU time" in trusted(profile, sum_s, sum_s, wall_s=1.5)
    assert "1.50 times its own" not in trusted(profile, sum_s, sum_s, wall_s=1.5, threads=None)
    assert "2.00 times as long as the whole" in trusted(profile, sum_s / 2, sum_s / 2)
    assert "not timed in one piece" in trusted(profile, sum_s, sum_s, too_big=True)
    unsure = replace(profile, operators=tuple(replace(o, interval=0.2) for o in profile.operators))
    assert "100% of the time are less precise than 3%" in trusted(unsure, sum_s, sum_s)


@pytest.mark.slow
def test_a_constant_foreign_load_is_noticed(tmp_path):
    model = load(cached("squeezenet", tmp_path), ReadOptions(batch=4))
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        profile = profiled(model, cached=False)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert any("its own CPU time" in warning for warning in profile.warnings)


@pytest.mark.slow
def test_a_load_that_comes_midway_makes_the_whole_step_drift(tmp_path):
    model = load(cached("squeezenet", tmp_path), ReadOptions(batch=4))
    cores = len(os.sched_getaffinity(0))
    busy = []

    def midway(done, total):
        if done == total // 2:
            busy.extend(
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(2 * cores)
            )

    try:
        profile = profiled(model, cached=False, progress=midway)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert any("longer afterwards than before" in warning for warning in profile.warnings)


def test_a_model_that_does_not_fit_is_measured_operator_by_operator(tmp_path, monkeypatch):
    monkeypatch.setattr("planner.profilers.measured.free_bytes", lambda device: 1000)
    profile = profiled(residual(tmp_path))
    assert profile.whole_step is None
    assert all(one.forward_s > 0 for one in profile.operators)
    assert any("not timed in one piece" in warning for warning in profile.warnings)


def test_autocast_changes_the_types_of_tensors_and_not_those_of_weights(tmp_path):
    profile = profiled(residual(tmp_path), dtype="bfloat16")
    tensors = tensors_by_name(profile.graph)
    assert profile.dtype == "bfloat16"
    assert (tensors["x"].dtype, tensors["c"].dtype) == ("float32", "bfloat16")
    assert {p.dtype for p in profile.graph.parameters} == {"float32"}
    assert profile.operators[0].output_bytes == 2 * 4 * 8 * 8 * 2
    # The convolution keeps its input as bfloat16, a copy of its own; that of its weight stays.
    assert profile.operators[0].stash_private_bytes == 2 * 2 * 3 * 8 * 8
    assert profile.casts_once
    names = tuple(one.name for one in profile.graph.operators)
    stage = Stage(names, ((0,),), 1, False)
    assert kept_casts(stage, profile) == {"w": 2 * 4 * 3 * 3 * 3, "v": 2 * 4 * 4 * 3 * 3}
    without = replace(profile, casts_once=False)
    own, other = (stage_memory(one, stage).static.parameter for one in (profile, without))
    assert own - other == 2 * 4 * 3 * 3 * (3 + 4)


def test_bfloat16_parameters_are_measured_as_such(tmp_path):
    profile = profiled(residual(tmp_path), dtype="bfloat16", parameters="bfloat16")
    assert (profile.dtype, profile.parameter_dtype) == ("bfloat16", "bfloat16")
    types = {p.name: p.dtype for p in profile.graph.parameters}
    assert types == {
        "w": "bfloat16", "v": "bfloat16", "scale": "bfloat16", "shift": "bfloat16",
        "mean": "float32", "var": "float32",
    }  # fmt: skip
    # The convolution keeps a bfloat16 copy of its input alone.
    assert profile.operators[0].stash_private_bytes == 2 * 2 * 3 * 8 * 8


# ---- times and the rest


def test_every_operator_takes_time_and_those_without_gradient_none_backward(tmp_path):
    model = attention(tmp_path)
    profile = profiled(model, repetitions=2)
    tensors = tensors_by_name(model.graph)
    for operator, one in zip(model.graph.operators, profile.operators, strict=True):
        has_gradient = any(tensors[name].gradient for name in operator.outputs)
        assert one.forward_s > 0, operator
        assert (one.backward_s > 0) == has_gradient, operator
    assert {o.type for o, c in zip(model.graph.operators, profile.operators, strict=True)
            if not c.backward_s} == {"Unsqueeze", "Cast", "Sub", "Mul", "Tanh"}  # fmt: skip


def test_a_product_of_matrices_is_counted_by_flops_and_bytes(tmp_path):
    text = "agraph (float[6,4] x) => (float[6,5] y) { a = MatMul (x, w) y = Relu (a) }"
    product, relu = profiled(read(tmp_path, text, {"w": (4, 5)})).operators
    assert (product.flops, relu.flops) == (2 * 6 * 4 * 5, 0)
    assert product.bytes_moved == (6 * 4 + 4 * 5 + 6 * 5) * FLOAT
    assert (product.output_bytes, product.parameter_bytes) == (6 * 5 * FLOAT, 4 * 5 * FLOAT)


def test_a_profile_says_how_it_was_made(tmp_path):
    model = residual(tmp_path)
    threads = torch.get_num_threads()
    profile = profiled(model, repetitions=2, threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert (profile.source, profile.device_type, profile.dtype) == (
        Source.MEASURED, "cpu", "float32",
    )  # fmt: skip
    assert (profile.threads, profile.microbatch_size) == (threads + 1, 2)
    assert profile.repetitions >= 2
    assert profile.engine == "torch"
    assert profile.model_hash == model.hash
    assert set(profile.versions) == {"onnx", "planner", "python", "torch"}
    assert profile.whole_step.before_s > 0
    assert profile.spread >= 0


def test_progress_ends_at_its_total(tmp_path):
    seen = []
    profiled(residual(tmp_path), repetitions=2, progress=lambda *step: seen.append(step))
    assert seen == [(i, 7) for i in range(1, 8)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OptionError, match="finds 0 of them here; use --device cpu"):
        profiled(residual(tmp_path), device="cuda")


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"repetitions": 0}, {"device": "tpu"}, {"dtype": "int8"}]
)
def test_options_that_make_no_sense_are_errors(options, tmp_path):
    with pytest.raises(OptionError, match="expected"):
        profiled(residual(tmp_path), **options)


def test_the_summary_adds_up(tmp_path):
    profile = profiled(attention(tmp_path))
    found = summary(replace(profile, whole_step=WholeStep(before_s=2.0, after_s=3.0)))
    assert found.drift == 0.5
    assert found.whole_s == 2.5
    assert found.sum_per_whole == found.sum_s / 2.5
    assert sum(row.count for row in found.rows) == len(profile.operators)
    assert sum(row.time_s for row in found.rows) == pytest.approx(found.sum_s)
    assert sum(row.forward_share for row in found.rows) == pytest.approx(1)
    assert sum(row.backward_share for row in found.rows) == pytest.approx(1)
    assert list(found.rows) == sorted(found.rows, key=lambda row: -row.time_s)
    assert summary(replace(profile, whole_step=None)).sum_per_whole is None
