"""Control flow, sequences and functions become plain operators that compute the same.

What they compute is compared with ONNX Runtime, which runs the model as it stands.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from planner.artefacts.operator_types import OPERATOR_TYPES
from planner.model.expansion.control_flow import CONTROL_FLOW
from planner.model.expansion.inlining import INLINED_OPERATORS, function_graph
from planner.model.load import Model, ReadOptions, content_hash, first_consumers, load
from planner.operators import to_torch
from planner.support.errors import ModelError, OperatorError

SCOPES = "pkg.torch.onnx.name_scopes"


def proto(body: str, opset: int = 18, **weights: object) -> ModelProto:
    """A model from ONNX's text form, with initializers."""
    found = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> model {body}')
    found.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()
    )
    return found


def written(folder: Path, model: ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def loaded(tmp_path):
    """Loads a model, and compares what it computes with ONNX Runtime."""

    def run(body: str | ModelProto, opset: int = 18, options: dict | None = None, **weights):
        model = proto(body, opset, **weights) if isinstance(body, str) else body
        found = load(written(tmp_path, model), ReadOptions(**(options or {})))
        assert_same(model, found)
        return found

    return run


def assert_same(model: ModelProto, found: Model) -> None:
    """The planner's module computes what ONNX Runtime does."""
    shapes = {tensor.name: tensor.shape for tensor in found.graph.tensors}
    feed = {name: floats(*shapes[name], seed=i) for i, name in enumerate(found.graph.inputs)}
    names = [output.name for output in model.graph.output]
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    expected = dict(zip(names, session.run(names, feed), strict=True))
    module = to_torch(found)
    made = module(*(torch.from_numpy(feed[name]) for name in module.input_names))
    assert set(module.output_names) == {name for name in names if name not in found.values}
    for name, tensor in zip(module.output_names, made, strict=True):
        np.testing.assert_allclose(
            tensor.detach().numpy(), expected[name], rtol=1e-5, atol=1e-6, err_msg=name
        )


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operators(model: Model) -> list[str]:
    return [operator.name for operator in model.graph.operators]


def types(model: Model) -> str:
    return " ".join(operator.type for operator in model.graph.operators)


# Branches

BRANCH = """({inputs}float[2] x) => (float[2] y) {{
    {before}
    z = If (c) <then_branch = one () => (float[2] t) {{ a = Mul(x, w)  t = Relu(a) }},
                else_branch = two () => (float[2] t) {{ b = Add(x, w)  t = Neg(b) }}>
    y = Mul(z, v) }}"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("c = Constant <value = bool {1}> ()", "Mul Relu Mul"),
        ("c = Constant <value = bool {0}> ()", "Add Neg Mul"),
        ("s = Shape(x)  n = Squeeze(s)  two = Constant <value = int64 {2}> () c = Equal(n, two)",
         "Mul Relu Mul"),
    ],
)  # fmt: skip
def test_the_branch_of_a_constant_condition_is_inlined(loaded, before, expected):
    body = BRANCH.format(inputs="", before=before)
    model = loaded(body, w=floats(2), v=floats(2))
    assert types(model) == expected
    assert {p.name for p in model.graph.parameters if p.trainable} == {"w", "v"}
    outer = next(n.name for n in model.proto.graph.node if n.op_type == "If")
    assert operators(model)[0].startswith(f"{outer}/")
    assert set(model.expanded.values()) == {outer}
    # The last operator of the branch has the name that the If gives its output.
    assert model.graph.operators[1].outputs == ("z",)


@pytest.mark.parametrize("threshold", [0.0, 9.0])
def test_a_condition_on_float_initializers_is_computed(loaded, threshold):
    before = (
        "g = Greater(table, limit)  i = Cast <to = 6> (g)  m = ReduceMax(i)  c = Cast <to = 9> (m)"
    )
    weights = {"table": np.float32([0.5, 1.5]), "limit": np.float32([threshold])}
    model = loaded(BRANCH.format(inputs="", before=before), w=floats(2), v=floats(2), **weights)
    assert types(model) == ("Mul Relu Mul" if threshold == 0 else "Add Neg Mul")


def test_a_condition_on_a_trained_parameter_is_refused(loaded):
    before = "g = Greater(w, w)  i = Cast <to = 6> (g)  m = ReduceMax(i)  c = Cast <to = 9> (m)"
    body = BRANCH.format(inputs="", before=before)
    with pytest.raises(ModelError, match="If_4: a shape or condition depends on the values of 'w'"):
        loaded(body, w=floats(2), v=floats(2))
    assert types(loaded(body, w=floats(2), v=floats(2), options={"freeze": ["w"]})) == "Add Neg Mul"


def test_a_condition_on_data_is_refused_with_node_and_module(loaded, tmp_path):
    model = proto(BRANCH.format(inputs="bool c, ", before=""), w=floats(2), v=floats(2))
    node = model.graph.node[0]
    node.metadata_props.add(key=SCOPES, value="['', 'encoder.gate', 'cond']")
    said = r"If_0 \(in encoder.gate\): expected a constant condition for If, got 'c', which depends"
    with pytest.raises(ModelError, match=said):
        load(written(tmp_path, model))


def test_a_branch_that_only_passes_a_tensor_on_is_no_operator(loaded):
    body = """(float[2] x) => (float[2] y, float[2] z) {
        a = Mul(x, w)
        c = Constant <value = bool {1}> ()
        z = If (c) <then_branch = one () => (float[2] t) { t = Identity(a) },
                    else_branch = two () => (float[2] t) { t = Neg(a) }>
        y = Relu(a) }"""
    assert types(loaded(body, w=floats(2))) == "Mul Identity Relu"


# Loops

STEPS = """(float[2, 3] x) => (float[2, 3] y, float[4, 2, 3] all) {{
    y, all = Loop (m, {condition}, x) <body = step (int64 i, bool c, float[2, 3] h) =>
        (bool d, float[2, 3] k, float[2, 3] s) {{
            d = Identity(c)  f = Cast <to = 1> (i)  a = MatMul(h, w)  b = Add(a, f)
            k = Tanh(b)  s = Mul(k, scale) }}> }}"""


@pytest.mark.parametrize("opset", [12, 15, 16])
@pytest.mark.parametrize("operator", ["LessOrEqual", "GreaterOrEqual"])
def test_comparisons_have_shapes_in_all_opsets(loaded, operator, opset):
    """Before opset 16 they are functions of other operators, without an inference of their own."""
    body = "(float[2,1,3] x) => (float[2,4,3] y) { b = OPERATOR (x, w) y = Where (b, x, w) }"
    loaded(body.replace("OPERATOR", operator), opset, w=floats(4, 3))


@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize("condition", ["", "yes"])
def test_a_loop_is_unrolled(loaded, condition, opset):
    more = {"yes": np.array(True)} if condition else {}
    model = loaded(STEPS.format(condition=condition), opset, w=floats(3, 3), m=np.array(4),
                   scale=floats(3), **more)  # fmt: skip
    step = "MatMul Add Tanh Mul "
    assert types(model) == step * 4 + "Unsqueeze " * 4 + "Concat"
    assert operators(model)[:5] == [
        "Loop_0/0/MatMul_2", "Loop_0/0/Add_3", "Loop_0/0/Tanh_4", "Loop_0/0/Mul_5",
        "Loop_0/1/MatMul_2",
    ]  # fmt: skip
    # One parameter each, however often it is read; the state of the last step has the Loop's name.
    assert {p.name for p in model.graph.parameters} == {"w", "scale"}
    assert set(model.graph.outputs) == {"y", "all"}
    assert set(model.expanded) == set(operators(model))


def test_the_order_of_names_is_the_same_each_time(loaded):
    weights = {"w": floats(3, 3), "m": np.array(4), "scale": floats(3)}
    first, second = (loaded(STEPS.format(condition=""), **weights) for _ in range(2))
    assert first.graph == second.graph
    assert first.hash == second.hash == content_hash(first.proto)


def test_a_loop_ends_when_its_condition_does(loaded):
    body = """(float[2] x) => (float[2] y) {
        m = Constant <value = int64 {9223372036854775807}> ()
        yes = Constant <value = bool {1}> ()
        h = Loop (m, yes, x) <body = step (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            two = Constant <value = int64 {2}> ()  d = Less(i, two)  k = Mul(h, w) }>
        y = Relu(h) }"""
    assert types(loaded(body, w=floats(2))) == "Mul Mul Mul Relu"


def test_a_loop_without_iterations_passes_its_state_on(loaded):
    body = """(float[2] x) => (float[2] y, float[?, 2] all) {
        a = Mul(x, w)
        zero = Constant <value = int64 {0}> ()
        h, all = Loop (zero, , a) <body = step (int64 i, bool c, float[2] h) =>
            (bool d, float[2] k, float[2] s) { d = Identity(c)  k = Neg(h)  s = Identity(k) }>
        y = Relu(h) }"""
    model = loaded(body, w=floats(2))
    assert types(model) == "Mul Relu"
    assert model.values["all"].shape == (0, 2)


def test_a_loop_that_ends_when_the_data_say_so_is_refused(loaded):
    body = """(float[2] x) => (float[2] y) {
        m = Constant <value = int64 {5}> ()
        yes = Constant <value = bool {1}> ()
        y = Loop (m, yes, x) <body = step (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            k = Mul(h, w)  s = ReduceSum <keepdims = 0> (k)  d = Greater(s, zero) }> }"""
    with pytest.raises(ModelError, match=r"Loop_2: expected a condition .* after iteration 0"):
        loaded(body, w=floats(2), zero=np.float32(0))


def test_a_number_of_iterations_in_the_data_is_refused(loaded):
    body = """(int64 m, float[2] x) => (float[2] y) {
        y = Loop (m, , x) <body = step (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            d = Identity(c)  k = Mul(h, w) }> }"""
    with pytest.raises(ModelError, match="Loop_0: expected a constant number of iterations"):
        loaded(body, w=floats(2))


@pytest.mark.parametrize("condition", ["", "yes"])
def test_too_many_iterations_are_refused(loaded, condition):
    body = """(float[2] x) => (float[2] y) {
        y = Loop (m, %s, x) <body = step (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            d = Identity(c)  k = Mul(h, w) }> }"""
    more = {"yes": np.array(True)} if condition else {}
    with pytest.raises(
        ModelError, match=r"Loop_0: Loop is unrolled, .* the limit is 10000: export"
    ):
        loaded(body % condition, w=floats(2), m=np.array(6000), **more)


def test_weights_inside_a_loop_are_one_parameter(loaded):
    model = proto(STEPS.format(condition=""), m=np.array(4), scale=floats(3))
    body = model.graph.node[0].attribute[0].g
    body.initializer.append(numpy_helper.from_array(floats(3, 3), "w"))
    found = loaded(model)
    assert {p.name for p in found.graph.parameters if p.trainable} == {"w"}
    assert {node.inputs[1] for node in found.nodes if node.type == "MatMul"} == {"w"}


def test_constants_inside_a_loop_are_held_once(loaded):
    body = """(float[2] x) => (float[2] y) {
        a = Mul(x, w)
        y = Loop (m, , a) <body = step (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            d = Identity(c)  t = Constant <value = float[2] {1, 2}> ()  k = Mul(h, t) }> }"""
    model = loaded(body, w=floats(2), m=np.array(3))
    assert [node.inputs[1] for node in model.nodes] == ["w", *["Loop_1/t"] * 3]


def test_loops_nest(loaded):
    body = """(float[2] x) => (float[2] y) {
        y = Loop (m, , x) <body = outer (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            d = Identity(c)
            k = Loop (m, , h) <body = inner (int64 j, bool e, float[2] p) => (bool f, float[2] q) {
                f = Identity(e)  g = Add(i, j)  r = Cast <to = 1> (g)  s = Mul(p, w)
                q = Add(s, r) }> }> }"""
    model = loaded(body, w=floats(2), m=np.array(2))
    assert operators(model) == [
        f"Loop_0/{i}/Loop_1/{j}/{name}"
        for i in (0, 1)
        for j in (0, 1)
        for name in ("Mul_3", "Add_4")
    ]
    assert set(model.expanded.values()) == {"Loop_0"}


def test_names_that_exist_already_are_made_unique(loaded):
    body = """(float[2] x) => (float[2] y) {
        [Loop_1_0] a = Mul(x, w)
        [L] b = Loop (m, , a) <body = step (int64 i, bool c, float[2] h) => (bool d, float[2] k) {
            d = Identity(c)  [N] k = Mul(h, w) }>
        ["L/0/N"] y = Neg(b) }"""
    body = body.replace('["L/0/N"] ', "")
    model = proto(body, w=floats(2), m=np.array(2))
    model.graph.node[2].name = "L/0/N"
    assert operators(loaded(model)) == ["Loop_1_0", "L/0/N_", "L/1/N", "L/0/N"]


# Scan

SCANNED = """(float[5, 2] x, float[2, 5] z) => (float[2] y, float[2, 5] all) {{
    y, all = Scan (start, x, z) <num_scan_inputs = 2 {attributes}, body = step
        (float[2] h, float[2] p, float[2] q) => (float[2] k, float[2] s) {{
            a = Mul(h, w)  b = Add(a, p)  k = Sub(b, q)  s = Tanh(k) }}> }}"""


@pytest.mark.parametrize(
    "reverse", ["", ", scan_input_directions = [0, 1], scan_output_directions = [1]"]
)
@pytest.mark.parametrize("opset", [11, 18])
def test_a_scan_is_unrolled(tmp_path, opset, reverse):
    axes = ", scan_input_axes = [0, -1], scan_output_axes = [-1]"
    body = SCANNED.format(attributes=axes + reverse)
    model = proto(body, opset, w=floats(2), start=floats(2, seed=1))
    found = load(written(tmp_path, model), ReadOptions(freeze=["start"]))
    assert types(found).startswith("Split Split Squeeze Squeeze Mul Add Sub Tanh Squeeze")
    assert types(found).endswith("Unsqueeze Concat")
    assert {p.name for p in found.graph.parameters if p.trainable} == {"w"}
    assert_scanned(found, reverse)


def assert_scanned(found: Model, reverse: str) -> None:
    """Computed here, since onnx.reference knows neither axes nor directions of a Scan."""
    x, z = floats(5, 2, seed=2), floats(2, 5, seed=3)
    h, w, rows = floats(2, seed=1), floats(2), []
    for i in range(5):
        h = h * w + x[i] - z[:, 4 - i if reverse else i]
        rows.append(np.tanh(h))
    module = to_torch(found)
    given = {"x": torch.from_numpy(x), "z": torch.from_numpy(z)}
    made = dict(zip(module.output_names, module(*(given[n] for n in module.input_names)),
                    strict=True))  # fmt: skip
    expected = np.stack(rows[::-1] if reverse else rows, axis=1)
    np.testing.assert_allclose(made["y"].detach().numpy(), h, rtol=1e-5)
    np.testing.assert_allclose(made["all"].detach().numpy(), expected, rtol=1e-5)


# Sequences and optionals


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ("s = SequenceConstruct(a, b, x)  y = ConcatFromSequence <axis = 0> (s)", "Concat"),
        ("s = SequenceConstruct(a, b)  y = ConcatFromSequence <axis = -1, new_axis = 1> (s)",
         "Unsqueeze Unsqueeze Concat"),
        ("e = SequenceEmpty()  s = SequenceInsert(e, a)  t = SequenceInsert(s, b, zero)"
         "  p = SequenceAt(t, zero)  q = SequenceAt(t, last)  y = Sub(p, q)", "Sub"),
        ("s = SequenceConstruct(a, b, x)  t = SequenceErase(s, zero)  u = SequenceErase(t)"
         "  n = SequenceLength(u)  f = Cast <to = 1> (n)  p = SequenceAt(u, zero)  y = Mul(p, f)",
         "Mul"),
        ("s = SplitToSequence <axis = 1> (a)  y = ConcatFromSequence <axis = 0> (s)",
         "Split Concat"),
        ("s = SplitToSequence <axis = 1, keepdims = 0> (a)"
         "  y = ConcatFromSequence <axis = 0, new_axis = 1> (s)",
         "Gather Gather Unsqueeze Unsqueeze Concat"),
        ("s = SequenceConstruct(a, b)  t = SequenceMap (s, b) <body = each (float[2, 2] p, "
         "float[2, 2] q) => (float[2, 2] r) { r = Sub(p, q) }>"
         "  y = ConcatFromSequence <axis = 0> (t)",
         "Sub Sub Concat"),
        ("s = SequenceConstruct(a, b)  o = Optional(s)  h = OptionalHasElement(o)"
         "  f = Cast <to = 1> (h)  t = OptionalGetElement(o)  p = SequenceAt(t, last)"
         "  y = Mul(p, f)", "Mul"),
        ("s = SequenceEmpty()  r = Loop (two, , s) <body = step (int64 i, bool c, seq(float) q) =>"
         " (bool d, seq(float) r) { d = Identity(c)  f = Cast <to = 1> (i)  p = Mul(a, f)"
         "  r = SequenceInsert(q, p) }>  y = ConcatFromSequence <axis = 0> (r)", "Mul Mul Concat"),
    ],
)  # fmt: skip
def test_sequences_are_lists_that_are_known(loaded, sequence, expected):
    body = f"(float[2, 2] x) => (float y) {{ a = Mul(x, w)  b = Neg(a)  {sequence} }}"
    model = proto(body, zero=np.array(0), last=np.array(-1), two=np.array(2), w=floats(2, 2))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    found = loaded(model)
    assert types(found).removeprefix("Mul ").removeprefix("Neg ") == expected


def test_what_came_of_a_node_belongs_to_it(loaded):
    body = """(float[2, 2] x) => (float[4, 2] y) {
        a = Mul(x, w)  s = SplitToSequence <axis = 1, keepdims = 0> (a)
        n = SequenceLength(s)  f = Cast <to = 1> (n)  b = Mul(a, f)
        t = SequenceInsert(s, w0)  y = ConcatFromSequence <axis = 0, new_axis = 1> (t) }"""
    with pytest.raises(ModelError):  # three rows of two numbers are no [4, 2]
        loaded(body.replace("w0", "nothing"), w=floats(2, 2))
    model = loaded(body.replace("float[4, 2] y", "float[3, 2] y"), w=floats(2, 2), w0=floats(2))
    names = operators(model)
    assert names[1:] == [
        *("ConcatFromSequence_6/Gather_0", "ConcatFromSequence_6/Gather_1"),
        *(f"ConcatFromSequence_6/Unsqueeze_{i}" for i in range(3)), "ConcatFromSequence_6/Concat",
    ]  # fmt: skip
    assert first_consumers(model)["SplitToSequence_1"] == "ConcatFromSequence_6/Gather_0"
    assert first_consumers(model)["ConcatFromSequence_6"] == "ConcatFromSequence_6/Gather_0"


# Functions


def test_functions_of_operators_are_those_without_an_entry_in_the_table():
    schemas = onnx.defs.get_all_schemas()
    functions = {
        schema.name
        for schema in schemas
        if not schema.domain and (schema.has_function or schema.has_context_dependent_function)
    }
    supported = {kind for kind, row in OPERATOR_TYPES.items() if row.function is not None}
    expanded = {*supported, *CONTROL_FLOW}
    assert {"DynamicQuantizeLinear"} == INLINED_OPERATORS
    assert functions <= expanded


def test_an_operator_without_a_function_in_torch_is_replaced_by_its_definition(loaded):
    body = """(float[2, 5] x) => (float[2, 5] y, uint8[2, 5] q) {
        y = Mul(x, w)  q, s, z = DynamicQuantizeLinear(y) }"""
    model = loaded(body, w=floats(5))
    assert set(model.expanded.values()) == {"DynamicQuantizeLinear_1"}
    assert all(name.startswith("DynamicQuantizeLinear_1/") for name in operators(model)[1:])


@pytest.mark.parametrize("past", ["", "s"])
def test_a_definition_may_depend_on_types_and_absent_inputs(past):
    node = helper.make_node(
        "CausalConvWithState", ["x", "w", "", past], ["y", "p"], activation="silu"
    )
    shapes = {"x": (1, 4, 8), "w": (4, 1, 3), "s": (1, 4, 2)}
    types = {n: helper.make_tensor_type_proto(TensorProto.FLOAT, s) for n, s in shapes.items()}
    opsets = [helper.make_opsetid("", 27)]
    graph = function_graph(node, types, opsets, 13)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=13)
    whole = helper.make_model(
        helper.make_graph([node], "g", graph.input, graph.output), opset_imports=opsets
    )
    feed = {name: floats(*shapes[name]) for name in shapes if name != "s" or past}
    for made, due in zip(
        ReferenceEvaluator(model).run(None, feed), ReferenceEvaluator(whole).run(None, feed),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(made, due, rtol=1e-5, atol=1e-6)


def test_a_window_is_a_constant(loaded):
    body = """(float[2, 6] x) => (float[2, 6] y) {
        n = Constant <value = int64 {6}> ()  h = HannWindow(n)  a = Mul(x, h)  y = Mul(a, w) }"""
    assert types(loaded(body, w=floats(6))) == "Mul Mul"


NESTED = """<ir_version: 10, opset_import: ["" : 18, "own" : 1]>
    model (float[2] x) => (float[2] y) {
        a = Mul(x, w)  b = own.Outer(a)  y = own.Outer(b) }
    <domain: "own", opset_import: ["" : 18, "own" : 1]> Outer (a) => (c) {
        b = own.Inner <alpha = 0.5> (a)  c = Neg(b) }
    <domain: "own", opset_import: ["" : 18]> Inner <alpha> (a) => (b) {
        b = LeakyRelu <alpha: float = @alpha> (a) }"""


def test_functions_of_the_model_bring_the_metadata_of_their_calls(loaded):
    model = onnx.parser.parse_model(NESTED)
    model.graph.initializer.append(numpy_helper.from_array(floats(2), "w"))
    plain = loaded(model)
    for i, node in enumerate(model.graph.node):
        node.metadata_props.add(key=SCOPES, value=f"['', 'layer.{i}', 'call']")
    found = loaded(model)
    assert types(found) == "Mul LeakyRelu Neg LeakyRelu Neg"
    assert found.graph == plain.graph
    assert found.hash == plain.hash == content_hash(model)
    layers = [one.value for node in found.proto.graph.node for one in node.metadata_props]
    assert layers == [f"['', 'layer.{i}', 'call']" for i in (0, 1, 1, 2, 2)]


def test_functions_that_call_each_other_are_refused(tmp_path):
    model = onnx.parser.parse_model(
        NESTED.replace("LeakyRelu <alpha: float = @alpha>", "own.Outer")
    )
    model.functions[1].opset_import.add(domain="own", version=1)
    with pytest.raises(ModelError, match="'Outer' calls 'Inner' calls 'Outer'"):
        load(written(tmp_path, model))


def test_an_unknown_operator_in_a_branch_not_taken_is_no_problem(loaded, tmp_path):
    body = BRANCH.format(inputs="", before="c = Constant <value = bool {1}> ()")
    model = proto(body.replace("Neg(b)", "Foo(b)"), w=floats(2), v=floats(2))
    assert types(load(written(tmp_path, model))) == "Mul Relu Mul"
    model = proto(body.replace("Relu(a)", "Foo(a)"), w=floats(2), v=floats(2))
    with pytest.raises(OperatorError, match="Foo version 18 is no operator"):
        load(written(tmp_path, model))
