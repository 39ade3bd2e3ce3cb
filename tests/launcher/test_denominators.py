"""What a model's own loss is divided by, as its graph shows it."""

from math import inf

import onnx
import pytest

from planner.artefacts.losses import losses
from planner.launcher.denominators import denominators, inputs_of
from planner.model.load import load

HEADER = """
<ir_version: 10, opset_import: ["" : 18]>
agraph (float[{n},4] x, int64[{n}] y, float[{n}] m, float[{n},4] v, float s) => (float loss)
<float[4,5] w = {{{w}}}, float[5] c = {{1, 2, 3, 4, 5}}, float one = {{1}}, float zero = {{0}},
 int64[1] first = {{0}}, int64[1] last = {{1}}, int64 no = {{-1}}>
{{ h = MatMul (x, w) e = ReduceSum <keepdims: int = 0> (h, last) {body} }}
"""


def read(path, body, n=3):
    text = HEADER.format(n=n, w=", ".join(str(i % 7 - 3) for i in range(20)), body=body)
    onnx.save(onnx.parser.parse_model(text), path)
    return load(path)


def found(path, body, n=3):
    """The operators that divide by a denominator, their sums, and whether the loss has no other
    part.
    """
    model = read(path, body, n)
    (loss,) = losses(model.graph)
    made = denominators(model, loss)
    return [(model.nodes[one.operator].type, one.summed) for one in made.of], made.complete


DIVIDED = "total = ReduceSum <keepdims: int = 0> (l) d = ReduceSum <keepdims: int = 0> (m) "
MASKED = "l = Mul (e, m) " + DIVIDED


@pytest.mark.parametrize(
    ("body", "summed"),
    [
        ("loss = SoftmaxCrossEntropyLoss (h, y)", [("SoftmaxCrossEntropyLoss", ("y",))]),
        (
            "p = LogSoftmax <axis: int = 1> (h)"
            " loss = NegativeLogLikelihoodLoss <ignore_index: int = 2> (p, y, c)",
            [("NegativeLogLikelihoodLoss", ("y", "c"))],
        ),
        (MASKED + "loss = Div (total, d)", [("Div", ("d",))]),
        (MASKED + "t = Div (total, d) u = Neg (t) loss = Mul (one, u)", [("Div", ("d",))]),
        (MASKED + "r = Reciprocal (d) loss = Mul (r, total)", [("Reciprocal", ("d",))]),
        (MASKED + "k = Max (d, one) t = Add (k, one) loss = Div (total, t)", [("Div", ("d",))]),
        ("d = ReduceSum <keepdims: int = 0> (m) q = Div (m, d) l = Mul (e, q)"
         " loss = ReduceSum <keepdims: int = 0> (l)", [("Div", ("d",))]),
        # The number of samples with a weight in their row.
        (MASKED + "a = ReduceMax <keepdims: int = 0> (v, last) b = Greater (a, zero)"
         " f = Cast <to: int = 1> (b) k = ReduceSum <keepdims: int = 0> (f)"
         " loss = Div (total, k)", [("Div", ("k",))]),
        # A condition that keeps from a division by zero.
        (MASKED + "t = Div (total, d) b = Greater (d, zero) loss = Where (b, t, zero)",
         [("Div", ("d",))]),
    ],
)  # fmt: skip
def test_denominators_that_depend_on_inputs_alone(body, summed, tmp_path):
    assert found(tmp_path / "net.onnx", body) == (summed, True)


def test_terms_of_a_sum_have_denominators_of_their_own(tmp_path):
    body = MASKED + (
        "a = SoftmaxCrossEntropyLoss (h, y) b = Div (total, d) t = Sub (a, b)"
        " r = ReduceMean <keepdims: int = 0> (h) loss = Add (t, r)"
    )
    assert found(tmp_path / "net.onnx", body) == (
        [("SoftmaxCrossEntropyLoss", ("y",)), ("Div", ("d",))],
        False,
    )


@pytest.mark.parametrize(
    "body",
    [
        # A mean over a fixed number, and a sum.
        "loss = ReduceMean <keepdims: int = 0> (h)",
        'loss = SoftmaxCrossEntropyLoss <reduction: string = "sum"> (h, y)',
        # Activations decide.
        MASKED + "k = ReduceSum <keepdims: int = 0> (h) loss = Div (total, k)",
        "a = ArgMax <axis: int = 1, keepdims: int = 0> (h) loss = SoftmaxCrossEntropyLoss (h, a)",
        # A number of the microbatch that is no sum over samples.
        MASKED + "loss = Div (total, s)",
        MASKED + "k = ReduceMax <keepdims: int = 0> (m) loss = Div (total, k)",
        # Of all samples together, though a sum follows.
        MASKED + "a = ReduceMax <keepdims: int = 0> (v, first)"
        " k = ReduceSum <keepdims: int = 0> (a) loss = Div (total, k)",
        MASKED + "i = Unsqueeze (m, first) a = ReduceMax <keepdims: int = 0> (i, last)"
        " k = ReduceSum <keepdims: int = 0> (a) loss = Div (total, k)",
        # Pairs of samples.
        MASKED + "i = Unsqueeze (m, first) j = Unsqueeze (m, last) k = Equal (i, j)"
        " f = Cast <to: int = 1> (k) t = ReduceSum <keepdims: int = 0> (f) loss = Div (total, t)",
        # Each sample has its own.
        "k = ReduceSum <keepdims: int = 0> (v, last) l = Div (e, k)"
        " loss = ReduceMean <keepdims: int = 0> (l)",
        # Drawn in every pass anew.
        "r = RandomUniformLike (m) b = Greater (r, m) f = Cast <to: int = 1> (b) l = Mul (e, f)"
        " total = ReduceSum <keepdims: int = 0> (l) d = ReduceSum <keepdims: int = 0> (f)"
        " loss = Div (total, d)",
        # The loss is not linear in the quotient, or in part of its paths.
        MASKED + "t = Div (total, d) loss = Sqrt (t)",
        MASKED + "t = Div (total, d) u = Sqrt (t) loss = Add (t, u)",
        MASKED + "t = Div (total, d) loss = Mul (t, t)",
        MASKED + "t = Div (total, d) u = ReduceMean <keepdims: int = 0> (h) loss = Mul (t, u)",
        MASKED + "t = Div (total, d) k = SoftmaxCrossEntropyLoss (h, y) u = Mul (t, one)"
        " q = Add (k, u) loss = Div (q, d)",
        # Whole numbers are rounded.
        MASKED + "k = Cast <to: int = 7> (d) f = Cast <to: int = 1> (k) loss = Div (total, f)",
    ],
)
def test_other_losses_stay_means_of_microbatches(body, tmp_path):
    assert found(tmp_path / "net.onnx", body) == ([], False)


def test_a_term_may_share_tensors_with_a_mean(tmp_path):
    """What the mean is linear in is read by other operators, which no quotient flows through."""
    body = (
        "g = Add (h, c) p = LogSoftmax <axis: int = 1> (g) a = NegativeLogLikelihoodLoss (p, y)"
        " r = ReduceMean <keepdims: int = 0> (g) loss = Add (a, r)"
    )
    assert found(tmp_path / "net.onnx", body) == ([("NegativeLogLikelihoodLoss", ("y",))], False)


def test_the_mean_of_one_sample_is_no_mean_of_a_batch(tmp_path):
    """In microbatches of one sample, its own sum has one element, too."""
    body = (
        "k = ReduceSum <keepdims: int = 0> (v, last) l = Div (e, k)"
        " loss = ReduceMean <keepdims: int = 0> (l)"
    )
    assert found(tmp_path / "net.onnx", body, n=1) == ([], False)


def test_an_input_may_have_several_rows_for_each_sample(tmp_path):
    """Labels of tokens, which are flattened before they come in."""
    body = "t = Reshape (h, rows) loss = SoftmaxCrossEntropyLoss (t, z)"
    header = HEADER.replace("float s)", "float s, int64[15] z)")
    header = header.replace("int64[1] first", "int64[2] rows = {{15, 1}}, int64[1] first")
    text = header.format(n=3, w=", ".join(["1"] * 20), body=body)
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    model = load(tmp_path / "net.onnx")
    (one,) = denominators(model, losses(model.graph)[0]).of
    assert one.summed == ("z",)


def test_a_denominator_of_a_step_is_bounded_once(tmp_path):
    """Counts of 0 and 6 in two microbatches: 6 / 2 each, not (2 + 6) / 2."""
    body = MASKED + "two = Add (one, one) k = Max (d, two) t = Add (k, one) loss = Div (total, t)"
    model = read(tmp_path / "net.onnx", body)
    (one,) = denominators(model, losses(model.graph)[0]).of
    assert one.of_step(6.0, 2) == (6 + 1) / 2
    assert one.of_step(0.0, 2) == (2 + 1) / 2
    assert inputs_of(one.summed, model.graph) == {"m"}


def test_means_are_averaged_before_they_are_bounded(tmp_path):
    body = "l = Mul (e, m) total = ReduceMean <keepdims: int = 0> (l)" + (
        " d = ReduceMean <keepdims: int = 0> (m) k = Max (d, one) loss = Div (total, k)"
    )
    model = read(tmp_path / "net.onnx", body)
    (one,) = denominators(model, losses(model.graph)[0]).of
    assert (one.of_step(6.0, 2), one.of_step(1.0, 2)) == (3.0, 1.0)


def test_nothing_counted_divides_by_infinity(tmp_path):
    model = read(tmp_path / "net.onnx", MASKED + "loss = Div (total, d)")
    (one,) = denominators(model, losses(model.graph)[0]).of
    assert one.of_step(0.0, 4) == inf
