"""Which outputs have a loss, which loss, over which classes: chosen and told."""

from dataclasses import replace

import onnx
import pytest

from planner.artefacts.files import read_profile, to_plain, write_profile
from planner.artefacts.graph import Graph, LossChoice, Operator, Tensor, loss_outputs
from planner.artefacts.losses import chosen, loss_json, loss_lines, losses
from planner.artefacts.options import LossOptions
from planner.model.load import ReadOptions, load
from planner.support.errors import ModelError, OptionError
from tests.support.builders import graph_of, profile_of


def one_output(type_, shape, dtype="float32"):
    """One operator of a type, whose output has a shape."""
    return Graph(
        operators=(Operator("op", type_, ("x",), ("y",), ()),),
        tensors=(Tensor("x", shape, dtype, False), Tensor("y", shape, dtype, True)),
        parameters=(),
        inputs=("x",),
        outputs=("y",),
    )


def with_loss(graph, function="auto", class_dim=None):
    return replace(graph, losses=(LossChoice("y", function, class_dim),))


def read(path, body, options=None, outputs="(float[2,3] y, float loss)", inputs=""):
    header = '<ir_version: 10, opset_import: ["" : 17]> '
    weights = "<float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}>"
    text = f"{header}agraph (float[2,4] x{inputs}) => {outputs} {weights} {{ {body} }}"
    onnx.save(onnx.parser.parse_model(text), path)
    return load(path, ReadOptions(**({} if options is None else {"loss": options})))


@pytest.mark.parametrize(
    ("type_", "shape", "function", "class_dim"),
    [
        ("Gemm", (2, 5), "cross-entropy", 1),
        ("MatMul", (2, 3, 5), "cross-entropy", 2),
        ("Softmax", (2, 3, 5), "cross-entropy", 2),
        ("Conv", (2, 21, 8, 8), "mse", None),
        ("Softmax", (2, 21, 8, 8), "mse", None),
        ("Conv", (2, 3, 4, 8, 8), "mse", None),
        ("Sigmoid", (2, 5), "mse", None),
        ("Tanh", (2, 3, 5), "mse", None),
        ("Gemm", (4, 1), "mse", None),
        ("Gemm", (3,), "mse", None),
        ("ReduceMean", (), "own", None),
        ("SoftmaxCrossEntropyLoss", (1,), "own", None),
        ("SoftmaxCrossEntropyLoss", (8,), "mse", None),
    ],
)
def test_the_rules_of_auto(type_, shape, function, class_dim):
    (loss,) = losses(one_output(type_, shape))
    assert (loss.function, loss.class_dim, loss.automatic) == (function, class_dim, True)
    if class_dim is None:
        assert loss.target_shape == shape and loss.target_dtype == "float32"
    else:
        assert loss.target_shape == tuple(n for i, n in enumerate(shape) if i != class_dim)
        assert loss.target_dtype == "int64" and loss.num_classes == shape[class_dim]


@pytest.mark.parametrize(
    ("graph", "function", "class_dim", "message"),
    [
        (one_output("Gemm", (3,)), "cross-entropy", None, "--loss cross-entropy: expected an out"),
        (one_output("Gemm", (2, 5)), "hinge", None, "--loss: expected one of auto, cross-entropy"),
        (one_output("Gemm", (2, 5)), ":f", None, "or module:function, got ':f'"),
        (one_output("Gemm", (2, 5)), "cross-entropy", 2, "--class-dim 2: expected from -2 to 1"),
        (one_output("Gemm", (2, 5)), "mine:f", -3, "--class-dim -3: expected from -2 to 1"),
        (one_output("Gemm", (2, 5)), "mse", 1, "--class-dim 1: mse of 'y' has no classes"),
        (one_output("Gemm", (2, 5)), "own", None, "--loss own: expected an output of one element"),
        (one_output("ArgMax", (2, 5), "int64"), "auto", None, "is int64, a loss needs floats"),
    ],
)
def test_a_loss_that_does_not_fit_is_one_message(graph, function, class_dim, message):
    with pytest.raises(OptionError) as error:
        losses(with_loss(graph, function, class_dim))
    assert message in str(error.value)


def test_a_class_dimension_may_be_given():
    (loss,) = losses(with_loss(one_output("Conv", (2, 21, 8, 8)), "auto", -3))
    assert (loss.function, loss.class_dim, loss.target_shape) == ("cross-entropy", 1, (2, 8, 8))
    (loss,) = losses(with_loss(one_output("MatMul", (2, 3, 5)), "mine:f", 1))
    assert (loss.class_dim, loss.num_classes) == (1, 3)


def test_options_change_choices():
    choices = (LossChoice("a", "cross-entropy", 1), LossChoice("b"))
    assert chosen(choices, LossOptions(loss="mse")) == (
        LossChoice("a", "mse"), LossChoice("b", "mse"),
    )  # fmt: skip
    assert chosen(choices, LossOptions(loss={"a": "nll"}, class_dim={"b": 2})) == (
        LossChoice("a", "nll", 1), LossChoice("b", "auto", 2),
    )  # fmt: skip
    with pytest.raises(OptionError, match="--loss c=mse: expected an output with a loss, 'a', 'b'"):
        chosen(choices, LossOptions(loss={"c": "mse"}))


def test_sentences_say_output_function_and_classes():
    assert loss_lines(losses(one_output("MatMul", (8, 128, 50257)))) == (
        "loss: cross-entropy of 'y' [8, 128, 50257] over dimension 2 (classes), mean over 1024"
        " elements (chosen automatically)",
    )
    assert loss_lines(losses(one_output("Conv", (2, 21, 8, 8)))) == (
        "loss: mse of 'y' [2, 21, 8, 8], mean over 2688 elements (chosen automatically; classes per"
        " pixel: --loss cross-entropy --class-dim 1)",
    )
    (loss,) = losses(with_loss(one_output("ReduceMean", ()), "own"))
    assert loss_lines([loss], ["y", "z"]) == (
        "loss: 'y' [] itself, which the model computes",
        "outputs without a loss: 'z'; planner profile --output NAME chooses",
    )
    assert loss_json([loss]) == [
        {"output": "y", "shape": [], "function": "own", "class_dim": None, "automatic": False}
    ]
    own = [with_loss(one_output("MatMul", shape), "mine:f") for shape in ((2,), (2, 3))]
    assert [line for graph in own for line in loss_lines(losses(graph))] == [
        "loss: mine:f of 'y' [2], targets of the same shape",
        "loss: mine:f of 'y' [2, 3], targets are classes on dimension 1",
    ]


# ------------------------------------------------------------------------------ outputs of a model

LOGITS = "y = MatMul (x, w) "
LOSS = "d = Sub (y, target) loss = ReduceMean <keepdims = 0> (d)"


def test_a_scalar_that_reads_labels_is_the_loss(tmp_path):
    body = f"{LOGITS} d = Sub (y, target) s = ReduceMean <keepdims = 0> (d)"
    model = read(
        tmp_path / "a.onnx", body, outputs="(float[2,3] y, float s)", inputs=", float[2,3] target"
    )
    assert model.graph.losses == (LossChoice("s", "own"),)
    assert model.graph.outputs == ("s", "y")


def test_an_auxiliary_scalar_is_not_the_loss(tmp_path):
    body = f"{LOGITS} s = ReduceMean <keepdims = 0> (y)"
    graph = read(tmp_path / "a.onnx", body, outputs="(float[2,3] y, float s)").graph
    assert graph.losses == () and loss_outputs(graph) == ("y",)


def test_a_scalar_without_a_gradient_is_not_the_loss(tmp_path):
    body = (
        f"{LOGITS} top = ArgMax <axis = 1, keepdims = 0> (y) same = Equal (top, labels)"
        " right = Cast <to = 1> (same) s = ReduceMean <keepdims = 0> (right)"
    )
    model = read(
        tmp_path / "a.onnx", body, outputs="(float[2,3] y, float s)", inputs=", int64[2] labels"
    )
    assert loss_outputs(model.graph) == ("y",)


def test_outputs_are_chosen_by_name(tmp_path):
    inputs = ", float[2,3] target"
    path = tmp_path / "a.onnx"
    model = read(path, LOGITS + LOSS, LossOptions(("y",)), inputs=inputs)
    assert loss_outputs(model.graph) == ("y",)
    model = read(path, LOGITS + LOSS, LossOptions(("y", "loss"), {"y": "l1"}), inputs=inputs)
    assert model.graph.losses == (LossChoice("y", "l1"), LossChoice("loss"))
    assert model.graph.outputs == ("y", "loss")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (LossOptions(("z",)), OptionError, "--output z: expected an output of the model, 'y', 'i'"),
        (LossOptions(("i",)), OptionError, "--output i: expected an output of floats"),
        (LossOptions(("y", "y")), OptionError, "--output y: expected each output once"),
        (LossOptions(("y", "e")), ModelError, "--output e: expected an output that depends"),
        (LossOptions(loss="mse", class_dim=1), OptionError, "mse of 'y' has no classes"),
    ],
)
def test_outputs_that_cannot_have_a_loss_are_refused(tmp_path, options, error, message):
    body = f"{LOGITS} i = ArgMax <axis = 1> (y) e = Exp (x)"
    with pytest.raises(error) as raised:
        read(tmp_path / "a.onnx", body, options, "(float[2,3] y, int64[2,1] i, float[2,4] e)")
    assert message in str(raised.value)


def test_gradients_flow_from_every_loss(tmp_path):
    body = f"{LOGITS} side = Relu (y) r = ReduceMean <keepdims = 0> (side)"
    outputs = "(float[2,3] y, float r)"
    alone = read(tmp_path / "a.onnx", body, outputs=outputs).graph
    both = read(tmp_path / "a.onnx", body, LossOptions(("y", "r")), outputs).graph
    carrying = [{t.name for t in graph.tensors if t.gradient} for graph in (alone, both)]
    assert carrying == [{"y"}, {"y", "side", "r"}]


# ------------------------------------------------------------------------------ files


def test_a_profile_has_losses_only_where_they_were_chosen(tmp_path):
    profile = profile_of(graph_of([[], [0]], [100, 100], [10, 10]), [0.1, 0.1])
    assert "losses" not in to_plain(profile)["graph"]
    last = profile.graph.outputs[0]
    assert replace(profile.graph, losses=(LossChoice(last),)) == profile.graph
    changed = replace(profile, graph=replace(profile.graph, losses=(LossChoice(last, "l1"),)))
    write_profile(changed, tmp_path / "p.json")
    assert to_plain(changed)["graph"]["losses"] == [
        {"output": last, "function": "l1", "class_dim": None}
    ]
    assert read_profile(tmp_path / "p.json") == changed
