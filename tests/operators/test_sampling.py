"""Operators that draw numbers: which ones, how many of which, and that runs repeat them."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch.nn import functional

from planner.model.load import load
from planner.operators import to_torch
from planner.operators.normalization import batch_normalization
from planner.operators.randomness import (
    dropout_mask,
    random_operators,
    standard_normal,
    standard_uniform,
)
from planner.operators.state import updating
from planner.profilers.facts import facts
from planner.support.errors import OperatorError

SIZE = 20_000


def read(tmp_path, text, opset=17):
    """The model of a graph in ONNX's text form, with a trained zero added to its first input."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    first = proto.graph.input[0]
    zero = np.zeros(1, helper.tensor_dtype_to_np_dtype(first.type.tensor_type.elem_type))
    proto.graph.node.insert(0, helper.make_node("Add", ["given", "zero"], [first.name]))
    first.name = "given"
    proto.graph.initializer.append(numpy_helper.from_array(zero, "zero"))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return load(path)


def run(tmp_path, text, *inputs, opset=17):
    return tuple(y.detach() for y in to_torch(read(tmp_path, text, opset))(*inputs))


def name_of(model, kind):
    return next(node.name for node in model.nodes if node.type == kind)


ones = torch.ones(SIZE)


@pytest.mark.parametrize(
    ("body", "mean", "variance"),
    [
        (f"y = RandomNormal <mean = 2.0, scale = 3.0, shape = [{SIZE}]> ()", 2, 9),
        ("y = RandomNormalLike <mean = -1.0, scale = 0.5> (x)", -1, 0.25),
        (f"y = RandomUniform <low = 1.0, high = 4.0, shape = [{SIZE}]> ()", 2.5, 0.75),
        ("y = RandomUniformLike <low = 0.0, high = 2.0> (x)", 1, 1 / 3),
        ("h = Mul (x, fifth) y = Bernoulli (h)", 0.2, 0.16),
        ("y = Dropout (x, fifth, yes)", 1, 0.25),
    ],
)
def test_numbers_have_the_mean_and_variance_that_onnx_says(tmp_path, body, mean, variance):
    constants = "<float fifth = {0.2}, bool yes = {1}>"
    text = f"agraph (float[{SIZE}] x) => (float[{SIZE}] z) {constants} {{ {body} z = Add (y, x) }}"
    (z,) = run(tmp_path, text, ones)
    y = (z - 1).double()
    off = 4 * (variance / SIZE) ** 0.5  # four standard deviations of the mean
    assert y.mean().item() == pytest.approx(mean, abs=off)
    assert y.var().item() == pytest.approx(variance, rel=0.1)


def test_multinomial_draws_classes_by_their_chances(tmp_path):
    text = """agraph (float[2,3] x) => (float[2,9000] y) {
        i = Multinomial <sample_size = 9000> (x)
        f = Cast <to = 1> (i)
        largest = ReduceMax <keepdims = 0> (x)
        y = Add (f, largest)
    }"""
    chances = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]])
    scores = chances.log() + 3  # any constant
    y = run(tmp_path, text, scores)[0] - scores.max()
    shares = torch.stack([torch.bincount(row.round().long(), minlength=3) / 9000 for row in y])
    torch.testing.assert_close(shares, chances, atol=0.025, rtol=0)


DROPOUT = """agraph (float[50,40] x) => (float[50,40] y, float[50,40] kept)
    <float ratio = {0.25}, bool yes = {1}> {
        y, mask = Dropout (x, ratio, yes)
        kept = Cast <to = 1> (mask)
    }"""


def test_dropout_is_pytorchs_with_its_mask(tmp_path):
    x = torch.randn(50, 40, requires_grad=True)
    model = read(tmp_path, DROPOUT)
    y, kept = to_torch(model)(x)
    assert 0.7 < kept.mean() < 0.8
    torch.testing.assert_close(y, x * kept / 0.75)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, kept / 0.75)
    assert torch.equal(kept.bool(), dropout_mask(name_of(model, "Dropout"), x.shape, 0.25))


def test_dropout_draws_as_torch_does_from_the_same_seed():
    mask = dropout_mask("node", (1000,), 0.3)
    torch.manual_seed(_seed("0 0 0 node"))
    assert torch.equal(mask, functional.dropout(torch.ones(1000), 0.3) > 0)


def _seed(text):
    from hashlib import sha256

    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


@pytest.mark.parametrize(
    ("opset", "node", "drops"),
    [
        (6, "Dropout <ratio = 0.5> (x)", True),
        (6, "Dropout <ratio = 0.5, is_test = 1> (x)", False),
        (7, "Dropout <ratio = 0.5> (x)", False),
        (11, "Dropout <ratio = 0.5> (x)", False),
        (12, "Dropout (x)", False),
        (12, "Dropout (x, half, no)", False),
        (12, "Dropout (x, half, yes)", True),
        (22, "Dropout (x, , yes)", True),
        (22, "Dropout (x, none, yes)", False),
    ],
)
def test_dropout_trains_where_its_version_says_so(tmp_path, opset, node, drops):
    constants = "<float half = {0.5}, float none = {0.0}, bool yes = {1}, bool no = {0}>"
    text = f"agraph (float[64] x) => (float[64] y) {constants} {{ y = {node} }}"
    (y,) = run(tmp_path, text, torch.ones(64), opset=opset)
    assert (y == 0).any().item() == drops
    assert set(y.tolist()) <= {0.0, 2.0, 1.0} and torch.equal(y, torch.ones(64)) != drops
    model = read(tmp_path, text, opset)
    note = ("1 Dropout drops nothing: the file was exported in evaluation mode; export with"
            " module.train()",)  # fmt: skip
    assert model.notes == (() if drops or "none" in node else note)


def test_a_ratio_of_one_drops_all_and_one_beyond_is_refused(tmp_path):
    text = (
        "agraph (float[4] x) => (float[4] y) <float r = {%s}, bool t = {1}> {y = Dropout (x, r, t)}"
    )
    (y,) = run(tmp_path, text % "1.0", torch.ones(4))
    assert y.tolist() == [0, 0, 0, 0]
    with pytest.raises(OperatorError, match=r"ratio: expected a number from 0 to 1, got 1\.5"):
        run(tmp_path, text % "1.5", torch.ones(4))


def test_numbers_follow_from_seed_step_microbatch_and_node_alone():
    def drawn(seed, step, microbatch, node, own=None):
        with random_operators(seed, step, microbatch):
            return tuple(standard_normal(node, (3,), own_seed=own).tolist())

    first = drawn(1, 2, 3, "a")
    torch.rand(5)  # the global generator has no part in it
    assert drawn(1, 2, 3, "a") == first
    others = {drawn(9, 2, 3, "a"), drawn(1, 9, 3, "a"), drawn(1, 2, 9, "a"), drawn(1, 2, 3, "b"),
              drawn(1, 2, 3, "a", 0.0), drawn(1, 2, 3, "a", 7.0)}  # fmt: skip
    assert len(others - {first}) == 6
    assert tuple(standard_normal("a", (3,)).tolist()) == drawn(0, 0, 0, "a")


def test_a_model_draws_what_the_public_functions_draw(tmp_path):
    text = """agraph (float[3,4] x) => (float[3,4] y) {
        n = RandomNormalLike <seed = 5.0> (x)
        u = RandomUniform <shape = [3,4]> ()
        y = Sum (n, u, x)
    }"""
    model = read(tmp_path, text)
    with random_operators(4, 0, 2):
        (y,) = to_torch(model)(torch.zeros(3, 4))
        normal = standard_normal(name_of(model, "RandomNormalLike"), (3, 4), own_seed=5.0)
        uniform = standard_uniform(name_of(model, "RandomUniform"), (3, 4))
    torch.testing.assert_close(y.detach(), normal + uniform)


def test_equal_operators_share_their_facts_and_keep_a_byte_per_element(tmp_path):
    text = """agraph (float[8,8] x) => (float[8,8] y) <float r = {0.5}, bool t = {1}> {
        a = Dropout (x, r, t)
        b = Dropout (a, r, t)
        y = Relu (b)
    }"""
    _, first, second, _ = facts(read(tmp_path, text))
    assert first.kernels is second.kernels
    assert (first.stash.tensors, first.stash.private_bytes) == ((), 64)


# ---- batch normalization

NORM = """agraph (float[4,3,5] x, float[3] m, float[3] v) => (float[4,3,5] y{results})
    <float[3] s = {{1.0, 2.0, 3.0}}, float[3] b = {{0.5, 0.25, 2.0}}> {{
        {outputs} = BatchNormalization <momentum = 0.8{mode}> (x, s, b, m, v)
    }}"""


def test_batch_normalization_in_training_is_that_of_onnxs_reference(tmp_path):
    results = ", float[3] rm, float[3] rv"
    text = NORM.format(results=results, outputs="y, rm, rv", mode=", training_mode = 1")
    x, m, v = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    model = read(tmp_path, text)
    expected = ReferenceEvaluator(model.proto).run(
        None, {"given": x.numpy(), "m": m.numpy(), "v": v.numpy()}
    )
    kept = m.clone(), v.clone()
    with updating([]):
        made = to_torch(model)(x, m, v)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one.detach().numpy(), other, rtol=1e-5, atol=1e-6)
    assert torch.equal(m, kept[0]) and torch.equal(v, kept[1])


def test_batch_normalization_updates_what_it_is_told_to_as_torch_does(tmp_path):
    text = NORM.format(results="", outputs="y, rm, rv", mode=", training_mode = 1")
    x, m, v = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    torchs = torch.nn.BatchNorm1d(3, momentum=0.2)
    torchs.running_mean, torchs.running_var = m.clone(), v.clone()
    torchs(x)
    with updating([m, v]):
        to_torch(read(tmp_path, text))(x, m, v)
    torch.testing.assert_close(m, torchs.running_mean)
    torch.testing.assert_close(v, torchs.running_var)


@pytest.mark.parametrize(
    ("opset", "outputs", "mode", "training"),
    [
        (6, "y", ", is_test = 0", True),
        (6, "y", ", is_test = 1", False),
        (7, "y", "", False),
        (9, "y", "", False),
        (9, "y, rm, rv, sm, sv", "", True),
        (13, "y, rm, rv, sm, sv", "", True),
        (14, "y", "", False),
        (14, "y, rm, rv", ", training_mode = 1", True),
        (15, "y, rm, rv", ", training_mode = 1", True),
    ],
)
def test_batch_normalization_trains_where_its_version_says_so(
    tmp_path, opset, outputs, mode, training
):
    text = NORM.format(results="", outputs=outputs, mode=mode)
    x, m, v = torch.randn(4, 3, 5), torch.randn(3), torch.rand(3)
    (y,) = run(tmp_path, text, x, m, v, opset=opset)
    scale, shift = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 2.0])
    expected = functional.batch_norm(x, m.clone(), v.clone(), scale, shift, training=training)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_halves_are_normalized_with_statistics_in_float32(kind):
    x, m, v = torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3)
    options = {"epsilon": 1e-5, "training_mode": 1, "num_outputs": 1, "read_outputs": (True,)}
    with updating([m, v]):
        y = batch_normalization(x.to(kind), torch.ones(3), torch.zeros(3), m, v, **options)
    assert y.dtype == kind and m.dtype == torch.float32
    torch.testing.assert_close(m, 0.1 * x.mean((0, 2)), rtol=0.02, atol=1e-3)
    expected = functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)


def test_one_number_per_channel_cannot_be_normalized():
    options = {"epsilon": 1e-5, "training_mode": 1, "num_outputs": 1, "read_outputs": (True,)}
    with pytest.raises(OperatorError, match=r"got x of \[1, 3, 1\]; give a larger microbatch"):
        batch_normalization(torch.ones(1, 3, 1), *(torch.ones(3) for _ in range(4)), **options)


def test_statistics_of_a_shorter_type_are_updated_too():
    x, m, v = torch.randn(4, 3, 5).double(), torch.zeros(3), torch.ones(3)
    options = {"epsilon": 1e-5, "training_mode": 1, "num_outputs": 1, "read_outputs": (True,)}
    with updating([m, v]):
        batch_normalization(x, torch.ones(3), torch.zeros(3), m, v, **options)
    torch.testing.assert_close(m, 0.1 * x.mean((0, 2)).float())
    torch.testing.assert_close(v, 0.9 + 0.1 * x.var((0, 2)).float())


def test_gradients_of_batch_normalization_in_training_are_those_of_finite_differences(tmp_path):
    text = NORM.format(results="", outputs="y, rm, rv", mode=", training_mode = 1")
    text = text.replace("float[", "double[").replace("1.0, 2.0", "1.5, 2.0")
    module = to_torch(read(tmp_path, text))
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    m, v = torch.randn(3).double(), torch.rand(3).double()
    assert torch.autograd.gradcheck(lambda x: module(x, m, v)[0], [x])
