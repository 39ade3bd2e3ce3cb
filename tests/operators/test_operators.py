import copy
import re
import warnings
from collections import Counter, defaultdict
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from planner.artefacts.graph import ITEM_BYTES, Graph, Operator, Parameter, Tensor
from planner.artefacts.operator_types import OPERATOR_TYPES, function_of, imported
from planner.model.load import Model, Node, ReadOptions, load
from planner.model.values import Values
from planner.model.weights import ModelFile
from planner.operators import check, input_names, output_names, parameters, to_torch
from planner.support.errors import ModelError, OperatorError
from tests.support.conformance import all_tests
from tests.support.models import MODELS, cached

# ---- models made by hand


def node(kind, inputs, outputs, name="node", version=17, domain="", **attributes):
    return Node(name, kind, domain, version, tuple(inputs), tuple(outputs), attributes)


def model_of(nodes, tensors, constants=None, trained=(), inputs=None, outputs=None):
    """A Model of these nodes; `tensors` maps every name that is no constant to shape and dtype."""
    constants = constants or {}
    made = {name for one in nodes for name in one.outputs if name}
    inputs = [n for n in tensors if n not in made] if inputs is None else inputs
    graph = Graph(
        operators=tuple(
            Operator(
                one.name,
                f"{one.domain}.{one.type}" if one.domain else one.type,
                tuple(dict.fromkeys(n for n in one.inputs if n and n not in constants)),
                tuple(n for n in one.outputs if n),
                tuple(dict.fromkeys(n for n in one.inputs if n in trained)),
            )
            for one in nodes
        ),
        tensors=tuple(
            Tensor(n, tuple(tensors[n][0]), tensors[n][1], False)
            for n in (*inputs, *(n for one in nodes for n in one.outputs if n))
        ),
        parameters=tuple(
            Parameter(n, constants[n].shape, constants[n].dtype.name, True) for n in trained
        ),
        inputs=tuple(inputs),
        outputs=tuple(made if outputs is None else outputs),
    )
    path, proto = Path("model.onnx"), onnx.ModelProto()
    values = Values((), ModelFile(path))
    for name, value in constants.items():
        values.add(name, value)
    return Model(path, proto, "", {}, 1, graph, tuple(nodes), values)


def one_of(kind, arrays, constants=(), outputs=("y",), shape=None, dtype="float64", **attributes):
    """A Model of one node that reads `arrays` in order; those in `constants` are not inputs."""
    tensors = {n: (a.shape, a.dtype.name) for n, a in arrays.items() if n not in constants}
    shape = next(iter(arrays.values())).shape if shape is None else shape
    tensors |= dict.fromkeys(filter(None, outputs), (shape, dtype))
    known = {n: arrays[n] for n in constants}
    return model_of([node(kind, arrays, outputs, **attributes)], tensors, known)


def as_tensor(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


# ---- the table

SUPPORTED = [kind for kind, row in OPERATOR_TYPES.items() if row.function is not None]


@pytest.mark.parametrize("kind", OPERATOR_TYPES)
def test_the_functions_of_a_row_are_there(kind):
    row = OPERATOR_TYPES[kind]
    assert callable(function_of(kind)) == (row.function is not None)
    assert not (row.function and row.refused)
    for name, module in ((row.shapes, "output_types"), (row.flops, "flops")):
        assert not name or callable(imported(name, f"planner.model.{module}"))


# ---- ONNX's own node tests

RANDOM = frozenset({  # ONNX's expected numbers are numpy's, the planner's are torch's
    "test_bernoulli", "test_bernoulli_double", "test_bernoulli_seed",
    "test_training_dropout", "test_training_dropout_default",
    "test_training_dropout_default_mask", "test_training_dropout_mask",
})  # fmt: skip
TOLERANCE = defaultdict(lambda: (1e-3, 1e-6), float16=(4e-3, 4e-3), bfloat16=(4e-2, 4e-2))


@lru_cache(maxsize=1)
def node_cases():
    """By operator, the single-node cases: name, model and arrays by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = defaultdict(list)
        for case in all_tests():
            nodes = case.model.graph.node if case.model else ()
            if len(nodes) == 1 and not nodes[0].domain and nodes[0].op_type in SUPPORTED:
                found[nodes[0].op_type].append((case.name, case.model, arrays_of(case)))
        return found


def arrays_of(case):
    names = [v.name for v in (*case.model.graph.input, *case.model.graph.output)]
    values = [value for part in case.data_sets[0] for value in part]
    values = [numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for v in values]
    return dict(zip(names, values, strict=True))


def inapplicable(name, arrays):
    """Why a case says nothing about a training step on static shapes."""
    if not all(isinstance(a, np.ndarray | np.generic) for a in arrays.values()):
        return "sequence or optional"
    if not all(a.dtype.name in ITEM_BYTES for a in arrays.values()):
        return "string, 8-bit or 4-bit float, 4-bit or 2-bit integer"
    return "random" if name in RANDOM else None


def case_model(proto, arrays, constants):
    (one,) = proto.graph.node
    version = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    attributes = {a.name: attribute(a) for a in one.attribute}
    tensors = {
        n: (arrays[n].shape, arrays[n].dtype.name)
        for n in (*one.input, *one.output)
        if n and n not in constants
    }
    known = {n: np.asarray(arrays[n]) for n in constants}
    made = Node("node", one.op_type, "", version, tuple(one.input), tuple(one.output), attributes)
    return model_of([made], tensors, known)


def attribute(proto):
    value = helper.get_attribute_value(proto)
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def with_static_inputs(proto, arrays, constants=()):
    """The module, with those inputs made constants that it says it needs as such."""
    constants = set(constants)
    while True:
        model = case_model(proto, arrays, constants)
        try:
            return to_torch(model)
        except OperatorError as error:
            needed = re.search(r"must be a constant, but '(.*)' is computed", str(error))
            if not needed:
                raise
            constants.add(needed[1])


def assert_same(module, arrays):
    inputs = [as_tensor(arrays[name]) for name in module.input_names]
    for name, made in zip(module.output_names, module(*inputs), strict=True):
        expected = arrays[name]
        assert str(made.dtype) == f"torch.{expected.dtype.name}"
        assert made.shape == expected.shape
        rtol, atol = TOLERANCE[expected.dtype.name]
        if made.dtype == torch.bfloat16:
            made, expected = made.float(), expected.astype(np.float32)
        np.testing.assert_allclose(made.numpy(), expected, rtol=rtol, atol=atol)
    assert all(tensor._version == 0 for tensor in inputs), "an input was written to"


@pytest.mark.parametrize("operator", SUPPORTED)
def test_computes_what_onnx_says(operator):
    for name, proto, arrays in node_cases()[operator]:
        if inapplicable(name, arrays):
            continue
        rest = set(proto.graph.node[0].input[1:]) - {""}
        try:
            for constants in ((), rest):
                assert_same(with_static_inputs(proto, arrays, constants), arrays)
        except OperatorError as error:  # torch has few functions of these types
            assert re.search(r"not implemented for 'UInt(16|32|64)'", str(error)), name
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_most_of_onnx_node_tests_apply():
    reasons = Counter(
        inapplicable(name, arrays) for cases in node_cases().values() for name, _, arrays in cases
    )
    assert reasons[None] > 950
    assert set(reasons) <= {
        *(None, "sequence or optional", "random"),
        "string, 8-bit or 4-bit float, 4-bit or 2-bit integer",
    }


def test_computes_what_onnx_says_of_models_of_version_6():
    compared = 0
    root = Path(onnx.__file__).parent / "backend" / "test" / "data" / "pytorch-converted"
    for folder in sorted(root.iterdir()):
        try:
            module = to_torch(load(folder / "model.onnx"))
        except ModelError as error:  # without weights, or with the broadcasting of version 6
            assert re.search("found none|'broadcast' is not supported", str(error)), folder
            continue
        data = folder / "test_data_set_0"
        x, y = (
            TensorProto.FromString((data / f).read_bytes()) for f in ("input_0.pb", "output_0.pb")
        )
        (made,) = module(as_tensor(numpy_helper.to_array(x)))
        expected = numpy_helper.to_array(y)
        np.testing.assert_allclose(made.detach().numpy(), expected, rtol=1e-3, atol=1e-5)
        compared += 1
    assert compared > 40


# ---- gradients

DIFFERENTIABLE = {
    "Add": ("2,3 3", {}),
    "Attention": ("1,2,3,4 1,2,3,4 1,2,3,4", {"version": 23, "is_causal": 1}),
    "AveragePool": ("1,2,5,5", {"kernel_shape": (3, 3), "pads": (0, 1, 1, 2)}),
    "BatchNormalization": ("2,3,4 3 3", {"static": {"m": np.zeros(3), "v": np.ones(3)}}),
    "Clip": ("3,4", {}),
    "Conv": ("1,2,5,5 3,2,3,3 3", {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    "ConvTranspose": ("1,2,3,3 2,3,3,3 3", {"pads": (0, 1, 1, 0)}),
    "CumSum": ("2,3", {"static": {"axis": np.array(1)}}),
    "Div": ("2,3 3", {}),
    "Einsum": ("2,3 3,4", {"equation": "ij,jk->ik"}),
    "Gather": ("4,3", {"static": {"i": np.array([[0, -1], [2, 0]])}}),
    "Gelu": ("2,3", {"version": 20}),
    "Gemm": ("2,3 4,3 4", {"transB": 1, "alpha": 0.5}),
    "GroupNormalization": ("2,4,3 4 4", {"num_groups": 2, "version": 21}),
    "InstanceNormalization": ("2,3,4 3 3", {}),
    "LRN": ("1,4,2,2", {"size": 2, "alpha": 0.1}),
    "LayerNormalization": ("2,3,4 4 4", {}),
    "LogSoftmax": ("2,3", {}),
    "MatMul": ("2,3 3,4", {}),
    "Max": ("2,3 2,3", {}),
    "MaxPool": ("1,2,5,5", {"kernel_shape": (2, 2), "pads": (0, 0, 1, 1)}),
    "Pad": ("2,3", {"static": {"pads": np.array([1, 0, 0, 2])}, "mode": "reflect"}),
    "Pow": ("2,3", {"static": {"y": np.array(3.0)}}),
    "RMSNormalization": ("2,3,4 4", {"version": 23}),
    "ReduceL2": ("2,3", {"axes": (1,)}),
    "Resize": ("1,1,3,3", {"static": {"r": np.zeros(0), "s": np.array([1, 1, 1.5, 2.0])},
                           "mode": "cubic"}),
    "ScatterND": ("4,2 2,2", {"static": {"i": np.array([[3], [1]])}, "order": (0, 2, 1)}),
    "Slice": ("4,3", {"static": {"s": np.array([3]), "e": np.array([-9]), "a": np.array([0]),
                                 "t": np.array([-2])}}),
    "Softmax": ("2,3", {}),
    "TopK": ("2,4", {"static": {"k": np.array([2])}, "outputs": ("y", "")}),
    "Where": ("2,3 2,3", {"static": {"c": np.eye(2, 3, dtype=bool)}, "order": (2, 0, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
def test_gradient_is_that_of_finite_differences(kind):
    text, attributes = DIFFERENTIABLE[kind]
    static = attributes.get("static", {})
    shapes = [tuple(map(int, part.split(","))) for part in text.split()]
    random = np.random.default_rng(0)
    arrays = {f"x{i}": random.uniform(0.5, 2, shape) for i, shape in enumerate(shapes)} | static
    names = list(arrays)
    arrays = {names[i]: arrays[names[i]] for i in attributes.get("order", range(len(names)))}
    options = {k: v for k, v in attributes.items() if k not in ("static", "order")}
    module = built(kind, arrays, static, options)
    inputs = [as_tensor(arrays[n]).requires_grad_() for n in module.input_names]
    assert torch.autograd.gradcheck(lambda *xs: module(*xs)[0], inputs)


def built(kind, arrays, static, options):
    """The module, with the shape of the output taken from what the first attempt says."""
    try:
        return to_torch(one_of(kind, arrays, static, shape=(0,), **options))
    except OperatorError as error:
        found = re.search(r"torch makes float64\[(.*)\]", str(error))
        assert found, error
        shape = tuple(map(int, found[1].split(",")))
        return to_torch(one_of(kind, arrays, static, shape=shape, **options))


# ---- the module


def tied():
    """x -MatMul(w)- a -Split- b, c;  d = b + c;  e = MatMul(d, w[:2]);  outputs c and e."""
    w = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    v = np.ones((2, 4), np.float32)
    square, half = ((2, 4), "float32"), ((2, 2), "float32")
    nodes = [
        node("MatMul", ["x", "layer.0.w"], ["a"], "layer.0/matmul"),
        node("Split", ["a"], ["b", "c"], "split", axis=1),
        node("Add", ["b", "c"], ["d"], "2nd add"),
        node("MatMul", ["d", "layer.v"], ["e"], "matmul"),
        node("MatMul", ["e", "layer.0.w"], ["f"], "class"),
    ]
    tensors = {"x": square, "a": square, "b": half, "c": half, "d": half, "e": square, "f": square}
    known = {"layer.0.w": w, "layer.v": v}
    return model_of(nodes, tensors, known, trained=("layer.0.w",), outputs=("f", "c"))


def test_parameters_keep_their_names():
    module = to_torch(tied())
    assert [name for name, _ in module.named_parameters()] == ["layer.0.w"]
    assert [name for name, _ in module.named_buffers()] == ["layer.v"]


def test_nodes_keep_their_names():
    nodes = to_torch(tied()).graph.nodes
    operators = {n.meta["onnx_name"]: n.name for n in nodes if "onnx_name" in n.meta}
    assert operators == {
        "layer.0/matmul": "layer_0_matmul",
        "split": "split",
        "2nd add": "_2nd_add",
        "matmul": "matmul",
        "class": "class_1",
    }
    values = [n.meta["onnx_value"] for n in nodes if "onnx_value" in n.meta]
    assert values == ["x", "layer.0.w", "layer.v", "b", "c"]


def test_names_that_clash_get_underscores_in_every_stage():
    names = ["a", "a.b", "a_.b", "a..b", "forward", "x.training", 'say "w"', "say 'w'", "in.class"]
    size = ((2,), "float32")
    nodes = [node("Add", [f"t{i}", name], [f"t{i + 1}"], f"n{i}") for i, name in enumerate(names)]
    known = {name: np.full(2, 2.0**i, np.float32) for i, name in enumerate(names)}
    tensors = dict.fromkeys([f"t{i}" for i in range(10)], size)
    model = model_of(nodes, tensors, known, trained=names, outputs=["t9"])
    module = to_torch(model)
    targets = [
        "a", "a_.b", "a_.b_", "a_._.b", "forward_", "x.training_", "say__w_", "say__w__",
        "in_.class_",
    ]  # fmt: skip
    assert {name for name, _ in module.named_parameters()} == set(targets)
    assert module(torch.zeros(2))[0].tolist() == [511.0, 511.0]
    for i, target in enumerate(targets):
        stage = to_torch(model, [i])
        assert [name for name, _ in stage.named_parameters()] == [target]


def test_inputs_and_outputs_are_in_the_order_of_the_graph():
    model = tied()
    assert (input_names(model.graph, range(5)), output_names(model.graph, range(5))) == (
        ("x",),
        ("c", "f"),
    )
    assert input_names(model.graph, [3, 2]) == ("b", "c")
    assert output_names(model.graph, [1]) == ("b", "c")
    module = to_torch(model, [2, 1])
    assert (module.input_names, module.output_names) == (("a",), ("c", "d"))


def test_two_stages_can_share_a_parameter():
    model = tied()
    values = parameters(model, ["layer.0.w"])
    first, last = to_torch(model, [0], values), to_torch(model, [4], values)
    assert first.get_parameter("layer.0.w") is last.get_parameter("layer.0.w")
    assert first.get_parameter("layer.0.w") is values["layer.0.w"]


def test_parameters_have_memory_of_their_own():
    model = tied()
    for array in model.values.values():
        array.flags.writeable = False
    found = parameters(model, ["layer.0.w", "layer.v"])
    assert isinstance(found["layer.0.w"], torch.nn.Parameter)
    assert not found["layer.v"].requires_grad
    with torch.no_grad():
        found["layer.0.w"].fill_(7)
    assert model.values["layer.0.w"][0, 0] == 0


def test_a_copy_of_the_module_computes_the_same():
    module, x = to_torch(tied()), torch.ones(2, 4)
    assert torch.equal(copy.deepcopy(module)(x)[1], module(x)[1])


def run(module, known):
    made = module(*(known[name] for name in module.input_names))
    return known | dict(zip(module.output_names, made, strict=True))


@pytest.mark.parametrize("cut", range(6))
def test_both_sides_of_a_cut_compute_the_whole(cut):
    model, x = tied(), {"x": torch.linspace(-1, 1, 8).reshape(2, 4)}
    whole = run(to_torch(model), x)
    parts = run(to_torch(model, range(cut, 5)), run(to_torch(model, range(cut)), x))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@st.composite
def models(draw):
    """Operators of one or two outputs that read what was made before."""
    made, nodes = ["x"], []
    for i in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["Add", "Mul", "Tanh", "TopK"]))
        inputs = [draw(st.sampled_from(made)) for _ in range(2 if kind in ("Add", "Mul") else 1)]
        outputs = [f"t{i}", f"i{i}"] if kind == "TopK" else [f"t{i}"]
        nodes.append(node(kind, inputs + ["k"] * (kind == "TopK"), outputs, f"n{i}"))
        made.append(f"t{i}")
    tensors = dict.fromkeys(made, ((3,), "float32")) | {
        one.outputs[1]: ((3,), "int64") for one in nodes if one.type == "TopK"
    }
    outputs = draw(st.sets(st.sampled_from(made[1:]), min_size=1))
    return model_of(nodes, tensors, {"k": np.array([3])}, inputs=["x"], outputs=sorted(outputs))


@given(models(), st.data())
def test_any_stages_compute_the_whole(model, data):
    size = len(model.nodes)
    cuts = sorted({0, size, *data.draw(st.sets(st.integers(0, size), max_size=3))})
    known = whole = {"x": torch.tensor([0.5, -1.0, 2.0])}
    whole = run(to_torch(model), whole)
    for start, end in pairwise(cuts):
        known = run(to_torch(model, range(start, end)), known)
    assert all(torch.equal(known[name], whole[name]) for name in model.graph.outputs)


# ---- what is refused


def refused(model):
    with pytest.raises(OperatorError) as error:
        check(model)
    return str(error.value)


def test_unknown_operators_are_all_listed_with_the_nodes_that_use_them():
    x = ((2,), "float32")
    nodes = [node("NonZero", ["x"], [f"n{i}"], f"nz{i}") for i in range(5)]
    nodes.append(node("FusedGelu", ["x"], ["g"], "gelu", 1, "com.microsoft"))
    model = model_of(nodes, dict.fromkeys(["x", "g", *(f"n{i}" for i in range(5))], x))
    assert refused(model).splitlines() == [
        "model.onnx: FusedGelu (domain com.microsoft, version 1) is not supported; used by 'gelu';"
        " export the model without it, or give it a function with planner.operators.register"
        ' (docs/operators.md, "Custom operators")',
        "model.onnx: NonZero (domain ai.onnx, version 17) is not supported; used by 'nz0', 'nz1',"
        " 'nz2' and 2 more; the shape of its output depends on data; it is supported where its"
        " inputs are constants",
    ]


def test_an_input_that_must_be_constant_and_is_not_is_named():
    arrays = {"data": np.ones((2, 3)), "where_to": np.array([3, 2])}
    assert (
        "Reshape 'node' (version 17): input 'shape' must be a constant, "
        "but 'where_to' is computed at run time"
    ) in refused(one_of("Reshape", arrays, shape=(3, 2)))


@pytest.mark.parametrize(
    ("kind", "attributes", "message"),
    [
        ("Gelu", {"version": 20, "approximate": "fast"}, "approximate: expected none or tanh"),
        ("Add", {"version": 6, "axis": 0}, "attribute 'axis' is not supported; bring the model"),
        ("Resize", {"mode": "lanczos"}, "'mode': expected"),
        ("MaxPool", {"kernel_shape": (2, 2), "auto_pad": "SAME"}, "auto_pad: expected NOTSET"),
        ("BatchNormalization", {"spatial": 0, "version": 7}, "spatial: expected 1, got 0"),
        ("Elu", {"beta": 1.0}, "attribute 'beta' is not supported"),
        ("Softmax", {"outputs": ("y", "z")}, "only the first of its 2 outputs is supported"),
    ],
)
def test_what_an_operator_cannot_do_is_an_error_that_names_the_node(kind, attributes, message):
    size = {"BatchNormalization": 5, "Add": 2}.get(kind, 1)
    arrays = {f"x{i}": np.ones((1, 1, 4, 4) if not i else (1,)) for i in range(size)}
    assert f"{kind} 'node'" in refused(one_of(kind, arrays, **attributes))
    assert message.replace("'mode'", "mode") in refused(one_of(kind, arrays, **attributes))


def test_a_shape_other_than_the_model_says_is_an_error():
    assert "output 'y': the model says float64[4], torch makes float64[2]" in refused(
        one_of("Relu", {"x": np.ones(2)}, shape=(4,))
    )


def test_a_trained_input_is_no_configuration():
    nodes = [node("Pad", ["x", "pads", "w"], ["y"])]
    known = {"pads": np.array([0, 1]), "w": np.array(0.5, np.float32)}
    tensors = {"x": ((2,), "float32"), "y": ((3,), "float32")}
    assert "input 'value' must be a constant, but 'w' is trained" in refused(
        model_of(nodes, tensors, known, trained=("w",))
    )


# ---- single nodes that ONNX's node tests leave out, against ONNX Runtime

TIES = np.repeat(np.arange(40.0), 5).reshape(1, 200)
LEFT_OUT = [  # operator, version, shape of x or x itself, attributes, further inputs
    ("Softmax", 11, (2, 3, 4), {"axis": 1}, {}),
    ("LogSoftmax", 11, (2, 3, 4), {"axis": 1}, {}),
    ("Hardmax", 11, (2, 3, 4), {"axis": -2}, {}),
    ("MaxPool", 12, (1, 1, 4, 4), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1,
                                   "pads": [0, 0, 2, 1]}, {}),
    ("AveragePool", 11, (1, 1, 4, 4), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1,
                                       "pads": [0, 0, 2, 1]}, {}),
    ("TopK", 11, TIES, {}, {"k": np.array([90])}),
    ("TopK", 9, (2, 5), {"k": 2}, {}),
    ("Clip", 9, (2, 3), {"min": -0.5}, {}),
    ("Pad", 9, (2, 3), {"pads": [0, 1, 2, 0], "value": 1.5}, {}),
    ("Slice", 9, (4, 5), {"starts": [1, -3], "ends": [9, -1]}, {}),
    ("Split", 11, (4, 5), {"axis": 1, "split": [5]}, {}),
    ("Squeeze", 11, (1, 4, 1), {"axes": [-1]}, {}),
    ("Unsqueeze", 11, (4, 2), {"axes": [0, -1]}, {}),
    ("ReduceSum", 11, (2, 3, 4), {"axes": [-1, 0], "keepdims": 0}, {}),
    ("Upsample", 9, (1, 1, 2, 3), {}, {"scales": np.array([1, 1, 1.5, 2], np.float32)}),
    ("Resize", 10, (1, 1, 4, 4), {"mode": "linear"}, {"s": np.array([1, 1, 2, 0.5], np.float32)}),
    ("Gemm", 9, (2, 3), {"beta": 2.0}, {"b": np.ones((3, 2), np.float32),
                                        "c": np.ones(2, np.float32)}),
    ("Div", 13, np.array([-7, 7, -6]), {}, {"b": np.array([2, -2, 4])}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "version", "x", "attributes", "more"), LEFT_OUT)
def test_computes_what_onnx_runtime_does(kind, version, x, attributes, more):
    if isinstance(x, tuple):
        x = np.random.default_rng(0).standard_normal(x)
    x = x.astype(np.float32) if x.dtype == np.float64 else x
    outputs = ["y", "i"] if kind == "TopK" else ["y"]
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *more], outputs, **attributes)],
        "one",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in more.items()],
    )
    opset = [helper.make_opsetid("", version)]
    proto = helper.make_model(graph, opset_imports=opset, ir_version=8)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    made = dict(zip(outputs, session.run(None, {"x": x}), strict=True))
    arrays = {"x": x, **more, **made}
    assert_same(to_torch(case_model(proto, arrays, set(more))), arrays)


def test_an_even_neighbourhood_of_lrn_has_its_larger_half_behind():
    x = np.arange(1.0, 6.0).reshape(1, 5, 1, 1)
    (y,) = to_torch(one_of("LRN", {"x": x}, size=4, alpha=4.0, beta=1.0))(as_tensor(x))
    sums = [14, 30, 54, 50, 41]  # 1 4 9 | 1 4 9 16 | 4 9 16 25 | 9 16 25 | 16 25
    np.testing.assert_allclose(y.reshape(-1), x.reshape(-1) / (1 + np.array(sums)))


# ---- whole models against ONNX Runtime


def compare(name, folder):
    """Largest difference of the logits, relative to the largest logit; then the gradients."""
    path = cached(name, folder)
    model = load(
        path, ReadOptions(batch=2, dimensions={"seq": 16} if name in ("gpt2", "bert") else {})
    )
    module = to_torch(model)
    random, feeds = np.random.default_rng(0), {}
    for tensor in model.graph.tensors[: len(model.graph.inputs)]:
        values = random.standard_normal(tensor.shape) * (1 if "float" in tensor.dtype else 100)
        feeds[tensor.name] = np.abs(values).astype(tensor.dtype)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, feeds)
    (made,) = module(*(as_tensor(feeds[n]) for n in module.input_names))
    difference = np.abs(made.detach().numpy() - expected).max() / np.abs(expected).max()
    made.square().mean().backward()
    trained = [p for p in model.graph.parameters if p.trainable]
    gradients = [p.grad for p in module.parameters()]
    assert len(gradients) == len(trained) > 0
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients)
    return difference


def test_squeezenet_agrees_with_onnx_runtime_and_trains(tmp_path):
    assert compare("squeezenet", tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_agrees_with_onnx_runtime_and_trains(name, tmp_path):
    assert compare(name, tmp_path) < 1e-4
