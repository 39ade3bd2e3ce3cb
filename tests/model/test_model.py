"""`load` on tiny models written as text, on the light models of onnx, and on small transformers."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from planner.artefacts.graph import Tensor, parameters_by_name, tensors_by_name
from planner.artefacts.profile import BatchNorm
from planner.model.load import Model, ReadOptions, content_hash, first_consumers, load
from planner.model.modes import batch_norm_form
from planner.support.errors import FileError, ModelError, OperatorError
from tests.support import models
from tests.support.models import LIGHT_MODELS, bert, cached, gpt2

CACHE = Path(__file__).parents[2] / ".cache" / "models"


def proto(body: str, opset: int = 18, ir: int = 8, **weights: object) -> ModelProto:
    """A model from ONNX's text form, with initializers."""
    text = f'<ir_version: {ir}, opset_import: ["" : {opset}]> model {body}'
    found = onnx.parser.parse_model(text)
    arrays = {name: np.asarray(value) for name, value in weights.items()}
    found.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return found


def saved(model: ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def loaded(tmp_path):
    """Writes a tiny model and loads it."""

    def run(body: str, opset: int = 18, options: dict | None = None, **weights: object) -> Model:
        return load(saved(proto(body, opset, **weights), tmp_path), ReadOptions(**(options or {})))

    return run


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def types(model: Model) -> str:
    return " ".join(operator.type for operator in model.graph.operators)


def trained(model: Model) -> set[str]:
    return {p.name for p in model.graph.parameters if p.trainable}


LINEAR = "(float[N, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }"
W = floats(4, 2)


# Reading


def test_a_linear_model_becomes_one_operator(loaded):
    model = loaded(LINEAR, w=W, options={"batch": 3})
    (operator,) = model.graph.operators
    assert (operator.name, operator.type) == ("MatMul_0", "MatMul")
    assert (operator.inputs, operator.outputs, operator.parameters) == (("x",), ("y",), ("w",))
    assert tensors_by_name(model.graph) == {
        "x": Tensor("x", (3, 4), "float32", gradient=False),
        "y": Tensor("y", (3, 2), "float32", gradient=True),
    }
    assert (model.batch, model.dimensions) == (3, {"N": 3})
    assert model.nodes[0].inputs == ("x", "w")
    assert model.nodes[0].version == 18


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "found no file"),
        (b"not a model at all", "a file that is none"),
        (b"", "the file is empty"),
        (ModelProto(ir_version=8).SerializeToString(), "without operators"),
        (proto(LINEAR, w=W).SerializeToString()[:-9], "only part of one"),
    ],
)
def test_a_file_that_is_no_model_is_one_message(tmp_path, content, said):
    path = tmp_path / "x.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=said) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_folder_is_no_model(tmp_path):
    with pytest.raises(FileError, match="this is a folder"):
        load(tmp_path)


def test_unknown_operators_are_named_with_version_and_nodes(loaded, tmp_path):
    model = proto("(float[2] x) => (float[2] y) { a = Foo(x) b = Foo(a) y = Add(b, w) }", w=[1.0])
    model.graph.node[0].domain = "com.example"
    model.opset_import.append(helper.make_opsetid("com.example", 3))
    with pytest.raises(OperatorError) as error:
        load(saved(model, tmp_path))
    first, second = str(error.value).splitlines()
    assert "model.onnx: com.example.Foo version 3 is no operator" in first
    assert "used by Foo_0;" in first
    assert "Foo version 18" in second
    assert "used by Foo_1;" in second


@pytest.mark.parametrize(("opset", "fails"), [(9, False), (10, True)])
def test_a_deprecated_operator_is_unknown(loaded, opset, fails):
    body = "(float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y) { a = Mul(x, w) y = Upsample(a, s) }"
    weights = {"w": floats(1), "s": np.float32([1, 1, 2, 2])}
    if fails:
        with pytest.raises(OperatorError, match="Upsample version 10"):
            loaded(body, opset, **weights)
    else:
        assert loaded(body, opset, **weights).graph.tensors[-1].shape == (1, 1, 4, 4)


def test_an_operator_set_from_the_future_is_unknown(loaded):
    with pytest.raises(OperatorError, match="MatMul version 999"):
        loaded(LINEAR, 999, w=W, options={"batch": 1})


def test_nodes_out_of_order_are_refused(loaded):
    with pytest.raises(ModelError, match="Add_0: reads a, which no earlier node makes"):
        loaded("(float[2] x) => (float[2] y) { y = Add(a, w) a = Relu(x) }", w=floats(2))


def test_a_tensor_made_twice_is_refused(loaded):
    with pytest.raises(ModelError, match="Relu_1: makes y, which exists already"):
        loaded("(float[2] x) => (float[2] y) { y = Add(x, w) y = Relu(x) }", w=floats(2))


def test_an_output_that_nothing_makes_is_refused(loaded):
    with pytest.raises(ModelError, match="outputs to be tensors, got: z"):
        loaded("(float[2] x) => (float[2] z) { y = Add(x, w) }", w=floats(2))


def test_functions_of_the_model_are_inlined(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        model (float[2, 4] x) => (float[2, 2] y) { y = own.Twice(x) }
        <domain: "own", opset_import: ["" : 18]> Twice (a) => (b) {
            w = Constant <value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}> ()
            c = MatMul(a, w)  b = Add(c, c) }"""
    model = onnx.parser.parse_model(text)
    with pytest.raises(ModelError, match="found none; name one with --train"):
        load(saved(model, tmp_path))
    weight = next(n.output[0] for n in onnx.inliner.inline_local_functions(model).graph.node)
    found = load(saved(model, tmp_path), ReadOptions(train=[weight]))
    assert types(found) == "MatMul Add"
    assert not found.proto.functions
    assert found.hash == content_hash(model)


def test_a_call_with_more_inputs_than_its_function_is_refused(tmp_path):
    text = """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        model (float[2] x) => (float[2] y) { y = own.Same(x, x) }
        <domain: "own", opset_import: ["" : 18]> Same (a) => (b) { b = Identity(a) }"""
    said = "functions: expected some that can be inlined: Number of actual parameters cannot exceed"
    with pytest.raises(ModelError, match=said):
        load(saved(onnx.parser.parse_model(text), tmp_path))


# Names


def test_empty_and_repeated_names_become_unique(tmp_path):
    body = (
        "(float[2] x) => (float[2] y) { a = Add(x, w) b = Add(a, w) c = Add(b, w) y = Add(c, w) }"
    )
    model = proto(body, w=floats(2))
    for node, name in zip(model.graph.node, ["", "one", "one", "Add_2"], strict=True):
        node.name = name
    names = [operator.name for operator in load(saved(model, tmp_path)).graph.operators]
    assert names == ["Add_0", "one", "Add_2_", "Add_2"]


# Binding


def test_all_unbound_dimensions_are_listed_with_the_option_to_give(loaded):
    body = "(float[N, seq, ?] x, float[N] z) => (float[N] y) { y = Mul(z, w) }"
    with pytest.raises(ModelError) as error:
        loaded(body, w=floats(1))
    lines = [line.split("model.onnx: ")[1] for line in str(error.value).splitlines()]
    assert lines == [
        "dimension 'N' of x[0], z[0] has no size; give --batch with a number, such as --batch 8",
        "dimension 'seq' of x[1] has no size; give --dim with a number, such as --dim seq=128",
        "dimension 'x.2' of x[2] has no size; give --dim with a number, such as --dim x.2=128",
    ]


def test_a_dimension_without_a_name_is_bound_by_tensor_and_axis(loaded):
    body = "(float[N, ?] x) => (float[N, M] y) { y = Mul(x, w) }"
    model = loaded(body, w=floats(1), options={"batch": 2, "dimensions": {"x.1": 5}})
    assert model.graph.tensors[0].shape == (2, 5)
    assert model.dimensions == {"N": 2, "x.1": 5}


def test_batch_binds_the_first_dimension_of_each_input_unless_it_is_given(loaded):
    body = "(float[N, 1] x, float[K, 1] z, float[L, 1] v) => (float[N] y) { y = Mul(x, w) }"
    model = loaded(body, w=floats(1), options={"batch": 2, "dimensions": {"L": 7}})
    assert model.dimensions == {"N": 2, "K": 2, "L": 7}
    assert [tensor.shape[0] for tensor in model.graph.tensors[:3]] == [2, 2, 7]


def test_batch_binds_a_first_dimension_wherever_else_it_stands(loaded):
    body = "(float[N, 1] x, float[3, N] z) => (float[N] y) { y = Mul(x, w) }"
    assert loaded(body, w=floats(1), options={"batch": 2}).graph.tensors[1].shape == (3, 2)


@pytest.mark.parametrize(
    ("first", "options", "said"),
    [
        ("4", {"batch": 8}, "--batch is 8, but the model has the batch size 4"),
        ("N", {"batch": 0}, "--batch: expected a positive number, got 0"),
        ("N", {"dimensions": {"N": -1}}, "--dim N: expected a positive number, got -1"),
        ("N", {"batch": 1, "dimensions": {"M": 2}}, "no dimension of that name; known: N"),
        ("N", {"batch": 1, "dimensions": {"N": 2}}, "--dim gives the same dimension: N=2"),
    ],
)
def test_sizes_that_contradict_the_model_are_refused(loaded, first, options, said):
    body = f"(float[{first}, 4] x) => (float[{first}, 2] y) {{ y = MatMul(x, w) }}"
    with pytest.raises(ModelError, match=said):
        loaded(body, w=W, options=options)


def test_a_batch_that_the_model_has_anyway_is_fine(loaded):
    body = "(float[4, 4] x) => (float[4, 2] y) { y = MatMul(x, w) }"
    assert loaded(body, w=W, options={"batch": 4}).batch == 4
    assert loaded(body, w=W).batch == 4


def test_a_scalar_input_is_one_sample(loaded):
    assert loaded("(float x) => (float[3] y) { y = Mul(x, w) }", w=floats(3)).batch == 1


def test_initializers_among_the_inputs_are_no_inputs(loaded):
    body = "(float[4, 2] w, float[N, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }"
    model = loaded(body, w=W, options={"batch": 3})
    assert model.graph.inputs == ("x",)
    assert model.batch == 3


# Folding


def test_shape_arithmetic_is_folded(loaded):
    body = """(float[N, 4, 5] x) => (float[N, 20] y) {
        s = Shape(x)   n = Gather(s, first)  m = Unsqueeze(n, axes)
        t = Concat <axis = 0> (m, rest)      r = Reshape(x, t)       y = Mul(r, w) }"""
    numbers = {"first": np.array(0), "axes": np.array([0]), "rest": np.array([-1])}
    model = loaded(body, w=floats(20), **numbers, options={"batch": 3})
    assert types(model) == "Reshape Mul"
    assert model.values["t"].tolist() == [3, -1]
    assert tensors_by_name(model.graph)["r"].shape == (3, 20)
    assert [p.name for p in model.graph.parameters] == ["w"]
    assert model.nodes[0].inputs == ("x", "t")


@pytest.mark.parametrize(
    ("attributes", "folded"),
    [
        ("", [2, 3, 4]),
        ("<start = 1>", [3, 4]),
        ("<start = -2, end = -1>", [3]),
        ("<end = 9>", [2, 3, 4]),
    ],
)
def test_shape_takes_start_and_end(loaded, attributes, folded):
    body = (
        f"(float[2, 3, 4] x) => (float[2, 3, 4] y) {{ s = Shape {attributes} (x) y = Mul(x, w) }}"
    )
    assert loaded(body, w=floats(4)).values["s"].tolist() == folded


def test_size_is_folded(loaded):
    model = loaded("(float[2, 3] x) => (float[2, 3] y) { n = Size(x) y = Mul(x, w) }", w=floats(3))
    assert model.values["n"] == 6


def test_a_weight_is_not_folded_through(loaded):
    body = "(float[N, 4] x) => (float[N, 2] y) { t = Transpose(w) y = MatMul(x, t) }"
    model = loaded(body, w=floats(2, 4), options={"batch": 1})
    assert types(model) == "Transpose MatMul"
    assert tensors_by_name(model.graph)["t"] == Tensor("t", (4, 2), "float32", gradient=True)


def test_a_folded_float_that_is_read_is_a_frozen_parameter(loaded):
    body = """(float[N, 4] x) => (float[N, 4] y) {
        c = ConstantOfShape <value = float[1] {2.5}> (four)   a = Add(x, c)   y = Mul(a, w) }"""
    model = loaded(body, w=floats(4), four=np.array([4]), options={"batch": 1})
    assert parameters_by_name(model.graph)["c"].trainable is False
    assert model.values["c"].tolist() == [2.5] * 4


def test_a_large_result_is_not_folded(loaded):
    body = """(float[1] x) => (float[20000000] y) {
        c = ConstantOfShape(many)   a = Add(x, c)   y = Mul(a, w) }"""
    model = loaded(body, w=floats(1), many=np.array([20_000_000]))
    assert types(model) == "ConstantOfShape Add Mul"
    assert model.graph.operators[0].inputs == ()


def test_random_numbers_are_not_folded(loaded):
    body = """(float[3] x) => (float[3] y) {
        r = RandomNormal <shape = [3]> ()   a = Add(x, r)   y = Mul(a, w) }"""
    assert types(loaded(body, w=floats(3))) == "RandomNormal Add Mul"


def test_old_operator_sets_with_attributes_are_folded(loaded):
    body = """(float[N, 3] x) => (float[N, 3, 1] y) {
        u = Unsqueeze <axes = [0]> (one)  s = Squeeze <axes = [0]> (u)
        k = Slice <axes = [0], starts = [1], ends = [3]> (many)
        c = Concat <axis = 0> (s, k)   r = Reshape(x, c)   y = Mul(r, w) }"""
    weights = {"w": floats(1), "one": np.array([-1]), "many": np.array([9, 3, 1, 9])}
    model = loaded(body, 9, options={"batch": 2}, **weights)
    assert types(model) == "Reshape Mul"
    assert tensors_by_name(model.graph)["y"].shape == (2, 3, 1)


def test_small_float_initializers_help_to_infer_shapes(loaded):
    body = "(float[1, 1, 2, 2] x) => (float[1, 1, A, B] y) { a = Mul(x, w) y = Resize(a, , s) }"
    model = loaded(body, w=floats(1), s=np.float32([1, 1, 2, 3]))
    assert tensors_by_name(model.graph)["y"].shape == (1, 1, 4, 6)
    assert trained(model) == {"w"}
    assert model.graph.operators[1].parameters == ()


def test_gather_elements_of_a_longer_table_is_folded(loaded):
    body = """(float[1, 2, 3] x) => (float[1, 2, 3] y) {
        g = GatherElements <axis = 1> (t, i)   a = Gather(w, g)   y = Add(a, x) }"""
    table = np.arange(0, 1000, 2).reshape(1, 500)
    model = loaded(body, w=floats(9, 3), t=table, i=np.array([[1, 3]]))
    assert model.values["g"].tolist() == [[2, 6]]


def test_dead_operators_are_dropped(loaded):
    body = "(float[2] x) => (float[2] y) { d = Relu(x) e = Add(d, v) y = Mul(x, w) }"
    model = loaded(body, w=floats(2), v=floats(2))
    assert types(model) == "Mul"
    assert [p.name for p in model.graph.parameters] == ["w"]


def test_outputs_that_nobody_reads_are_left_out(loaded):
    body = "(float[1, 4] x) => (float[1, 4] y) { d, mask = Dropout(x) y = Mul(d, w) }"
    model = loaded(body, 9, w=floats(4))
    assert model.graph.operators[0].outputs == ("d",)
    assert model.nodes[0].outputs == ("d", "")


def test_an_output_that_is_a_constant_is_not_in_the_graph(loaded):
    model = loaded(
        "(float[2] x) => (int64[1] s, float[2] y) { s = Shape(x) y = Mul(x, w) }", w=floats(2)
    )
    assert model.graph.outputs == ("y",)


def test_a_shape_that_depends_on_data_is_an_error_naming_the_tensor(loaded):
    with pytest.raises(ModelError, match=r"NonZero_1: expected a static shape for 'z'.* a \[4\]"):
        loaded("(float[4] x) => (int64[1, M] z) { a = Mul(x, w) z = NonZero(a) }", w=floats(4))


def test_shapes_that_do_not_fit_are_an_error_naming_the_node(loaded):
    with pytest.raises(ModelError, match=r"MatMul_0: MatMul does not take x \[1, 4\], w \[3, 2\]"):
        loaded(LINEAR, w=floats(3, 2), options={"batch": 1})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("y = Conv(x)", "Conv_0: Conv: expected 2 to 3 inputs, got 1"),
        ("y = Cast(x)", "Cast_0: Cast: expected the attribute 'to', got none"),
        ("y = Concat <axis = 7> (x, x)", "axis must be in"),
    ],
)
def test_malformed_nodes_are_an_error_naming_the_node(loaded, wrong, said):
    with pytest.raises(ModelError, match=said):
        loaded(f"(float[1, 4] x) => (float[1, 4] y) {{ {wrong} }}", w=floats(4))


@pytest.mark.parametrize(
    ("normalization", "opset"),
    [("MeanVarianceNormalization(a)", 18), ("GroupNormalization <num_groups = 2> (a, s, s)", 21)],
)
def test_normalizations_without_inference_keep_the_shape(loaded, normalization, opset):
    body = f"(float[2, 4, 3] x) => (float[A, B, C] y) {{ a = Mul(x, w) y = {normalization} }}"
    model = loaded(body, opset, w=floats(1), s=floats(4))
    assert tensors_by_name(model.graph)["y"].shape == (2, 4, 3)


def test_a_batch_size_in_a_reshape_is_an_error(loaded):
    body = "(float[N, 4, 1] x) => (float[N, 4] y) { r = Reshape(x, s) y = Mul(r, w) }"
    with pytest.raises(ModelError, match=r"Reshape_0: Reshape cannot make \[1, 4\] of \[2, 4, 1\]"):
        loaded(body, w=floats(4), s=np.array([1, 4]), options={"batch": 2})
    assert loaded(body, w=floats(4), s=np.array([1, 4]), options={"batch": 1}).batch == 1


def test_a_model_of_constants_is_refused(loaded):
    with pytest.raises(ModelError, match="got constants only"):
        loaded("(float[2] x) => (int64[1] y) { y = Shape(x) }")


def test_attributes_are_python_values(loaded):
    body = """(float[1, 4, 1, 1] x) => (float[1, 4, 1, 1] y) {
        a = LRN <size = 3, alpha = 0.5> (x)   b = Gelu <approximate = "tanh"> (a)
        c = Transpose <perm = [0, 1, 3, 2]> (b)   y = Mul(c, w) }"""
    attributes = [node.attributes for node in loaded(body, 20, w=floats(1)).nodes]
    assert attributes == [
        {"size": 3, "alpha": 0.5}, {"approximate": "tanh"}, {"perm": (0, 1, 3, 2)}, {},
    ]  # fmt: skip


# Sequences


def test_a_split_to_a_sequence_is_one_split(loaded):
    body = """(float[2, 6] x) => (float[2, 2] y) {
        a = Mul(x, w)  s = SplitToSequence <axis = 1> (a, two)
        p = SequenceAt(s, zero)   q = SequenceAt(s, last)   r = SequenceAt(s, zero)
        b = Add(p, q)   y = Sub(b, r) }"""
    numbers = {"two": np.array(2), "zero": np.array(0), "last": np.array(-1)}
    model = loaded(body, w=floats(6), **numbers)
    assert types(model) == "Mul Split Add Sub"
    split, _, last = model.graph.operators[1:]
    assert (split.name, split.outputs) == ("SplitToSequence_1", ("p", "q"))
    assert model.nodes[1].outputs == ("p", "", "q")
    assert model.values[model.nodes[1].inputs[1]].tolist() == [2, 2, 2]
    assert last.inputs == ("b", "p")
    assert tensors_by_name(model.graph)["q"] == Tensor("q", (2, 2), "float32", gradient=True)
    assert first_consumers(model) == {
        "SequenceAt_2": "Add_5", "SequenceAt_3": "Add_5", "SequenceAt_4": "Sub_6",
    }  # fmt: skip


def test_the_last_part_may_be_smaller(loaded):
    body = """(float[6] x) => (float[2] y) {
        s = SplitToSequence(x, four)  p = SequenceAt(s, one)  y = Mul(p, w) }"""
    model = loaded(body, w=floats(2), four=np.array(4), one=np.array(1))
    assert tensors_by_name(model.graph)["p"].shape == (2,)


def test_uneven_parts_keep_their_sizes(loaded):
    body = """(float[2, 6] x) => (float[2, 5] y) {
        s = SplitToSequence <axis = -1> (x, sizes)  p = SequenceAt(s, one)  y = Mul(p, w) }"""
    model = loaded(body, 11, w=floats(5), sizes=np.array([1, 5]), one=np.array(1))
    assert types(model) == "Split Mul"
    assert model.nodes[0].attributes == {"axis": 1, "split": (1, 5)}


def test_parts_that_lose_the_axis_are_gathered(loaded):
    body = """(float[3, 2] x) => (float[2] y) {
        s = SplitToSequence <keepdims = 0> (x)  p = SequenceAt(s, one)  y = Mul(p, w) }"""
    model = loaded(body, w=floats(2), one=np.array(1))
    assert types(model) == "Gather Mul"
    assert model.values[model.nodes[0].inputs[1]] == 1
    assert tensors_by_name(model.graph)["p"].shape == (2,)


@pytest.mark.parametrize(
    ("sizes", "position", "said"),
    [
        (np.array([2, 3]), 0, r"SplitToSequence_0: expected sizes that add up to 6, got \[2, 3\]"),
        (np.array(0), 0, "got 0"),
        (np.array(3), 2, "SequenceAt_1: expected a position within the 2 tensors of 's', got 2"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(loaded, sizes, position, said):
    body = """(float[6] x) => (float[3] y) {
        s = SplitToSequence(x, sizes)  p = SequenceAt(s, i)  y = Mul(p, w) }"""
    with pytest.raises(ModelError, match=said):
        loaded(body, w=floats(3), sizes=sizes, i=np.array(position))


def test_a_sequence_is_no_tensor(loaded):
    body = """(float[3, 2] x) => (float[3, 2] y) {
        s = SplitToSequence(x)  p = Relu(s)  y = Mul(p, w) }"""
    with pytest.raises(ModelError, match="Relu_1: Relu takes s, a sequence or optional"):
        loaded(body, w=floats(2))


# Folded nodes and their stages


def test_a_folded_node_belongs_to_its_first_consumer(loaded):
    body = """(float[N, 4] x) => (float[N, 4] y) {
        s = Shape(x)  t = Identity(s)  a = Mul(x, w)  d = Relu(x)
        b = Reshape(a, s)  c = Reshape(b, t)  y = Add(c, w) }"""
    model = loaded(body, w=floats(4), options={"batch": 2})
    assert first_consumers(model) == {
        "Shape_0": "Reshape_4", "Identity_1": "Reshape_5", "Relu_3": "Mul_2",
    }  # fmt: skip


# What is trained


def test_a_weight_is_found_whatever_its_name(loaded):
    body = "(float[1, 4] x) => (float[1, 2] y) { a = MatMul(x, val_58) y = Add(a, bias) }"
    assert trained(loaded(body, val_58=W, bias=floats(2))) == {"val_58", "bias"}


def test_a_tied_weight_is_one_parameter(loaded):
    body = """(int64[1, 3] i) => (float[1, 3, 8] y) {
        e = Gather(w, i)   t = Transpose(w)   y = MatMul(e, t) }"""
    model = loaded(body, w=floats(8, 4))
    assert [p.name for p in model.graph.parameters] == ["w"]
    assert [o.parameters for o in model.graph.operators] == [("w",), ("w",), ()]


@pytest.mark.parametrize("opset", [7, 9, 15])
def test_mean_and_variance_of_batch_normalization_are_frozen(loaded, opset):
    body = (
        "(float[1, 4, 2, 2] x) => (float[1, 4, 2, 2] y) { y = BatchNormalization(x, s, b, m, v) }"
    )
    model = loaded(body, opset, **{name: floats(4) for name in "sbmv"})
    assert trained(model) == {"s", "b"}
    assert {p.name for p in model.graph.parameters} == {"s", "b", "m", "v"}


TRIANGLE = np.tril(np.ones((4, 4), np.float32))


@pytest.mark.parametrize(
    ("operator", "value", "is_mask"),
    [
        ("Add", np.where(TRIANGLE == 1, 0, -np.inf), True),
        ("Add", np.where(TRIANGLE == 1, 0, -1e4), True),
        ("Add", np.where(TRIANGLE == 1, 0, -100), True),
        ("Add", np.where(TRIANGLE == 1, 0, -40), False),
        ("Add", np.zeros((4, 4)), False),
        ("Add", np.zeros(4), False),
        ("Add", np.float32([0, 0, 0, -1e9]), False),  # rank 1
        ("Mul", TRIANGLE, True),
        ("Mul", np.ones((4, 4)), False),
        ("Mul", TRIANGLE[:1], False),  # not square
        ("MatMul", TRIANGLE, False),
        ("MatMul", np.eye(4), False),
    ],
)
def test_masks_are_told_by_use_and_content(loaded, operator, value, is_mask):
    body = f"(float[4, 4] x) => (float[4, 4] y) {{ a = MatMul(x, w) y = {operator}(a, m) }}"
    model = loaded(body, w=floats(4, 4), m=value.astype(np.float32))
    assert trained(model) == ({"w"} if is_mask else {"w", "m"})


def test_a_mask_is_recognised_through_views(loaded):
    body = """(float[2, 2] x) => (float[2, 2] y) {
        a = MatMul(x, w)  s = Slice(m, zero, two)  t = Slice(s, zero, two, one)  y = Add(a, t) }"""
    mask = np.where(TRIANGLE == 1, 0, -np.inf).astype(np.float32)
    numbers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])}
    assert trained(loaded(body, w=floats(2, 2), m=mask, **numbers)) == {"w"}


def test_a_late_number_shows_that_a_long_tensor_is_no_mask(loaded):
    value = np.zeros((100, 100), np.float32)
    value[0, 0], value[-1, -1] = -1e9, 0.5
    body = "(float[100, 100] x) => (float[100, 100] y) { a = Mul(x, w) y = Add(a, m) }"
    assert trained(loaded(body, w=floats(1), m=value)) == {"w", "m"}


def test_tables_used_as_index_or_condition_are_frozen(loaded):
    body = """(float[3] x) => (float[3] y) {
        i = Cast <to = 7> (table)  g = Gather(w, i)  c = Greater(x, limit)  y = Where(c, g, x) }"""
    model = loaded(body, w=floats(9), table=np.float32([1, 2, 3]), limit=floats(3))
    assert trained(model) == {"w"}
    assert tensors_by_name(model.graph)["i"].gradient is False


@pytest.mark.parametrize("kind", ["Sign", "Floor", "Round", "Ceil"])
def test_no_gradient_goes_through_steps(loaded, kind):
    body = f"(float[3] x) => (float[3] y) {{ a = Add(x, v) b = {kind}(a) y = Mul(b, w) }}"
    model = loaded(body, v=floats(3), w=floats(3))
    assert trained(model) == {"w"}
    assert [t.name for t in model.graph.tensors if t.gradient] == ["y"]


def test_scalars_and_integers_are_not_trained(loaded):
    body = "(float[3] x) => (float[3] y) { a = Mul(x, half) b = Add(a, w) y = Gather(b, i) }"
    model = loaded(body, w=floats(3), half=np.float32(0.5), i=np.array([0, 1, 2]))
    assert [p.name for p in model.graph.parameters] == ["w"]
    assert model.values["half"] == np.float32(0.5)


def test_long_integer_tables_are_parameters(loaded):
    body = "(float[3] x) => (float[3] y) { a = Mul(x, w) y = Gather(a, i) }"
    model = loaded(body, w=floats(3), i=np.zeros(65, np.int64))
    assert parameters_by_name(model.graph)["i"].trainable is False


def test_only_the_first_output_is_trained(loaded):
    body = "(float[3] x) => (float[3] y, float[3] z) { y = Mul(x, w) z = Mul(x, v) }"
    model = loaded(body, w=floats(3), v=floats(3))
    assert trained(model) == {"w"}
    assert model.graph.outputs == ("y", "z")


def test_the_first_float_output_is_the_loss(loaded):
    body = "(float[3] x) => (int64[1] i, float[3] y) { a = Mul(x, w) i = ArgMax(a) y = Relu(a) }"
    assert trained(loaded(body, w=floats(3))) == {"w"}


def test_gradients_flow_where_a_parameter_is_behind_and_the_loss_ahead(loaded):
    body = """(float[3] x) => (float[3] y, float[3] z) {
        a = Relu(x)  b = Mul(a, w)  c = Relu(b)  y = Add(c, a)  z = Relu(c) }"""
    flags = {t.name: t.gradient for t in loaded(body, w=floats(3)).graph.tensors}
    assert [name for name, gradient in flags.items() if gradient] == ["b", "c", "y"]


def test_choices_of_the_user_go_first(loaded):
    body = """(float[4, 4] x) => (float[4, 4] y) {
        a = MatMul(x, w)   b = Add(a, m)   c = Mul(b, s)   y = Add(c, v) }"""
    mask = np.where(TRIANGLE == 1, 0, -np.inf).astype(np.float32)
    weights = {"w": floats(4, 4), "m": mask, "s": np.float32(2), "v": floats(4)}
    options = {"train": ["m", "s"], "freeze": ["w"]}
    assert trained(loaded(body, **weights, options=options)) == {"m", "s", "v"}


def test_a_constant_that_is_to_be_trained_is_not_folded_through(loaded):
    body = """(float[1, 2] x) => (float[1, 2] y) {
        c = Constant <value = float[2, 2] {1, 2, 3, 4}> ()  t = Transpose(c)  y = MatMul(x, t) }"""
    model = loaded(body, options={"train": ["c"]})
    assert types(model) == "Transpose MatMul"
    assert trained(model) == {"c"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": ["encoder.wieght"]}, "--train encoder.wieght: no value .* near: encoder.weight"),
        ({"freeze": ["nothing"]}, "--freeze nothing: no value of that name"),
        ({"freeze": ["v"], "train": ["v"]}, "--train and --freeze both name 'v'"),
        ({"train": ["i"]}, "--train i: no gradient flows from y to it"),
        ({"freeze": ["v", "encoder.weight"]}, "found none; name one with --train"),
    ],
)
def test_choices_that_make_no_sense_are_refused(tmp_path, options, said):
    body = "(float[3] x) => (float[3] y) { a = Mul(x, w) b = Add(a, v) y = Gather(b, i) }"
    model = proto(body, v=floats(3), i=np.array([0, 1, 2]))
    model.graph.node[0].input[1] = "encoder.weight"
    model.graph.initializer.append(numpy_helper.from_array(floats(3), "encoder.weight"))
    with pytest.raises(ModelError, match=said):
        load(saved(model, tmp_path), ReadOptions(**options))


# Values and external data


def external(folder: Path, delete: bool) -> Path:
    body = (
        "(float[N, 64] x) => (float[N, 64] y) { a = MatMul(x, w) b = Add(a, v) y = Reshape(b, s) }"
    )
    model = proto(body, w=floats(64, 64), v=floats(64), s=np.array([-1, 64]))
    path = folder / "big.onnx"
    onnx.save(model, path, save_as_external_data=True, location="big.data", size_threshold=128)
    if delete:
        (folder / "big.data").unlink()
    return path


def test_weights_in_external_data_are_not_read(tmp_path):
    model = load(external(tmp_path, delete=True), ReadOptions(batch=2))
    assert trained(model) == {"w", "v"}
    with pytest.raises(FileError, match=r"big\.data: expected the values of 'w'"):
        model.values["w"]


def test_external_data_is_read_on_access(tmp_path):
    model = load(external(tmp_path, delete=False), ReadOptions(batch=2))
    assert np.array_equal(model.values["w"], floats(64, 64))
    assert {*model.values} == {"w", "v", "s"}
    assert len(model.values) == 3


def test_bfloat16_values_keep_their_type(loaded):
    body = "(bfloat16[2, 3] x) => (bfloat16[2, 3] y) { y = Mul(x, w) }"
    model = loaded(body, w=floats(3).astype(ml_dtypes.bfloat16))
    assert model.values["w"].dtype == ml_dtypes.bfloat16
    assert [(t.dtype, t.bytes) for t in model.graph.tensors] == [("bfloat16", 12)] * 2


# Hash


SMALL = proto(
    "(float[N, 4] x) => (float[N, 2] y) { a = MatMul(x, w) s = Shape(a) y = Reshape(a, s) }", w=W
)


def test_annotations_do_not_change_the_hash():
    annotated = ModelProto()
    annotated.CopyFrom(SMALL)
    annotated.ir_version, annotated.producer_name, annotated.doc_string = 11, "else", "text"
    annotated.graph.doc_string = "text"
    annotated.configuration.add(name="two devices", num_devices=2)
    helper.set_model_props(annotated, {"model": "hash"})
    annotated.graph.value_info.add(name="a")
    for i, node in enumerate(annotated.graph.node):
        node.name, node.doc_string = f"{node.op_type}_{i}", "text"
        node.device_configurations.add(configuration_id="two devices", pipeline_stage=i)
    assert content_hash(annotated) == content_hash(SMALL)


def test_a_round_trip_through_onnx_ir_does_not_change_the_hash():
    assert content_hash(onnx_ir.to_proto(onnx_ir.from_proto(SMALL))) == content_hash(SMALL)


def test_the_storage_of_an_initializer_does_not_change_the_hash():
    stored = ModelProto()
    stored.CopyFrom(SMALL)
    tensor = helper.make_tensor("w", TensorProto.FLOAT, W.shape, W.ravel().tolist())
    assert tensor.float_data
    stored.graph.initializer[0].CopyFrom(tensor)
    assert content_hash(stored) == content_hash(SMALL)


def test_initializers_among_the_inputs_do_not_change_the_hash():
    listed = ModelProto()
    listed.CopyFrom(SMALL)
    listed.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, W.shape))
    assert content_hash(listed) == content_hash(SMALL)


@pytest.mark.parametrize(
    "changed",
    [
        proto("(float[N, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }", w=W + 1),
        proto("(float[M, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }", w=W),
        proto("(float[N, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }", w=W.astype(np.float64)),
        proto("(float[N, 4] x) => (float[N, 2] y) { y = MatMul(x, w) }", 17, w=W),
        proto("(float[N, 4] x) => (float[N, 2] y) { y = Gemm(x, w) }", w=W),
        proto("(float[N, 4] x) => (float[N, 2] y) { y = Gemm <alpha = 2.0> (x, w) }", w=W),
    ],
)
def test_another_model_has_another_hash(changed):
    assert content_hash(changed) != content_hash(proto(LINEAR, w=W))


def test_versions_of_operators_within_a_branch_are_in_the_hash():
    def versioned(version):
        text = f"""<ir_version: 8, opset_import: ["" : 18, "own" : {version}, "unused" : {version}]>
        model (bool c, float[2] x) => (float[2] y) {{
            y = If (c) <then_branch = t () => (float[2] a) {{ a = own.Strange (x) }},
                        else_branch = e () => (float[2] b) {{ b = Relu (x) }}>
        }}"""
        return onnx.parser.parse_model(text)

    first, second = versioned(1), versioned(2)
    assert content_hash(first) != content_hash(second)
    second.opset_import[1].version = 1
    assert content_hash(first) == content_hash(second)


def test_external_initializers_are_hashed_by_where_they_lie(tmp_path):
    model = onnx.load(external(tmp_path, delete=True), load_external_data=False)
    before = content_hash(model)
    entry = next(e for e in model.graph.initializer[0].external_data if e.key == "offset")
    entry.value = "8192"
    assert content_hash(model) != before


def test_the_hash_of_a_loaded_model_is_that_of_its_file(tmp_path):
    path = saved(SMALL, tmp_path)
    model = load(path, ReadOptions(batch=2))
    assert model.hash == content_hash(onnx.load(path)) == content_hash(model.proto)
    assert model.hash == load(path, ReadOptions(batch=3)).hash


# Real models


OPERATORS = {
    "resnet50": (175, 161), "inception_v1": (143, 116), "inception_v2": (508, 347),
    "densenet121": (910, 606), "vgg19": (45, 38), "alexnet": (23, 16), "squeezenet": (65, 52),
    "shufflenet": (202, 150), "zfnet512": (21, 16),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [  # These two have the operators of AlexNet, and files of 300 MB and more.
        pytest.param(name, marks=[pytest.mark.slow] if name in ("vgg19", "zfnet512") else [])
        for name in LIGHT_MODELS
    ],
)
def test_the_light_models_load_at_batch_2(name):
    model = load(cached(name, CACHE), ReadOptions(batch=2))
    assert (len(model.graph.operators), len(trained(model))) == OPERATORS[name]
    assert tensors_by_name(model.graph)[model.graph.outputs[0]].shape[:2] == (2, 1000)
    assert [t.name for t in model.graph.tensors if not t.gradient] == list(model.graph.inputs)


def test_the_model_of_the_demo_is_in_training_mode(tmp_path, monkeypatch):
    """The first lines that a newcomer reads are no note that something is left out."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    [arguments] = [
        line.partition("tests.support.models")[2].split()
        for line in makefile.splitlines()
        if "tests.support.models resnet50 demo/" in line
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["models", *arguments])
    Path("demo").mkdir()
    models.main()
    model = load(Path(arguments[1]), ReadOptions(batch=4))
    assert model.notes == ()
    assert batch_norm_form(model.nodes) is BatchNorm.TRAINING
    assert (len(model.graph.operators), len(trained(model))) == OPERATORS["resnet50"]


@pytest.mark.slow
@pytest.mark.parametrize(("build", "num_trainable"), [(gpt2, 28), (bert, 42)], ids=["gpt2", "bert"])
def test_small_transformers_load_without_shape_arithmetic(tmp_path, build, num_trainable):
    path = cached("small", tmp_path, lambda: build(2, 128, 1000))
    model = load(path, ReadOptions(batch=2, dimensions={"seq": 32}))
    assert len(trained(model)) == num_trainable
    assert not {"Shape", "Cast", "SequenceAt", "Range"} & {*types(model).split()}
    assert tensors_by_name(model.graph)["logits"].shape == (2, 32, 1000)


@pytest.mark.parametrize("step", ["0", "1e-30", "nan"])
def test_a_range_without_end_is_not_computed(tmp_path, step):
    path = tmp_path / "model.onnx"
    nodes = [
        onnx.helper.make_node("Range", ["first", "last", "step"], ["r"], name="r"),
        onnx.helper.make_node("Add", ["x", "r"], ["y"], name="sum"),
    ]
    value = onnx.helper.make_tensor_value_info
    numbers = {"first": 0.0, "last": 4.0, "step": float(step)}
    graph = onnx.helper.make_graph(
        nodes, "g", [value("x", onnx.TensorProto.FLOAT, [4])],
        [value("y", onnx.TensorProto.FLOAT, [4])],
        [onnx.numpy_helper.from_array(np.array(n, np.float32), k) for k, n in numbers.items()],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph), path)
    with pytest.raises((ModelError, OperatorError), match=r"Range|Add"):
        load(path)
