"""Files with fields that stand for nothing: each is one message, with the path in front."""

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from planner.model.inspection import inspect
from planner.model.load import load
from planner.model.validate import MAX_LINES, check
from planner.support.errors import ModelError, OperatorError, OptionError

LINEAR = "(float[3, 4] x) => (float[3, 2] y) { y = MatMul(x, w) }"
ADVICE = "; export the model again"


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def model(body=LINEAR, opset=18, **weights):
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> model {body}'
    proto = onnx.parser.parse_model(text)
    arrays = weights or {"w": floats(4, 2)}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items()
    )
    return proto


def complaint(folder, proto, read=load, error=ModelError):
    """What is said of a model, without the path; `inspect` must say something, too."""
    path = folder / "m.onnx"
    path.write_bytes(proto if isinstance(proto, bytes) else proto.SerializeToString())
    with pytest.raises(error) as caught:
        read(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return "\n".join(line.removeprefix(f"{path}: ") for line in lines)


def weight(**fields):
    proto = model()
    for name, value in fields.items():
        setattr(proto.graph.initializer[0], name, value)
    return proto


def external(**entries):
    proto = model()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return proto


def with_dims(*dims):
    proto = model()
    proto.graph.initializer[0].dims[:] = dims
    return proto


W = "graph.initializer[0] 'w': "
TYPE = f"expected an element type of ONNX {onnx.__version__}, got"


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (weight(data_type=999), f"{W}{TYPE} 999"),
        (weight(data_type=0), f"{W}{TYPE} 0"),
        (weight(raw_data=b"123"), f"{W}expected 32 bytes for float[4, 2], got 3"),
        (with_dims(-4, 2), f"{W}expected at most 1e+15 elements and no negative size, got [-4, 2]"),
        (with_dims(2**62, 2**62),
         f"{W}expected at most 1e+15 elements and no negative size, got {[2**62] * 2}"),
        (external(), f"{W}external data: expected the name of a file, got None"),
        (external(location="a\0b"),
         f"{W}external data: expected the name of a file, got 'a\\x00b'"),
        (external(location="w", offset="abc"),
         f"{W}external data: offset: expected a number of bytes, got 'abc'"),
        (external(location="w", offset="-8"),
         f"{W}external data: offset: expected a number of bytes, got '-8'"),
        (external(location="w", length="9" * 30),
         f"{W}external data: length: expected a number of bytes, got '{'9' * 30}'"),
        (external(location="w", length="4"),
         f"{W}external data: length: expected 32 bytes for float[4, 2], got 4"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_none_is_named(tmp_path, proto, said):
    assert complaint(tmp_path, proto) == said + ADVICE
    assert complaint(tmp_path, proto, inspect) == said + ADVICE


def test_values_behind_the_end_of_their_file_are_one_message(tmp_path):
    (tmp_path / "w").write_bytes(bytes(16))
    proto = external(location="w", offset="0", length="32")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    loaded = load(tmp_path / "m.onnx")
    with pytest.raises(Exception, match="expected the values of 'w'") as caught:
        loaded.values["w"]
    assert "\n" not in str(caught.value)


def test_lists_of_numbers_are_counted(tmp_path):
    proto = model()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.float_data.extend([1.0] * 8)
    check(proto)
    tensor.data_type = TensorProto.FLOAT16  # whose bits are in another list
    assert complaint(tmp_path, proto) == f"{W}expected 8 numbers for float16[4, 2], got 0{ADVICE}"


@pytest.mark.parametrize("kind", sorted({*TensorProto.DataType.values()} - {0}))
def test_tensors_of_all_types_are_sound(kind):
    """As onnx itself writes them, as bytes and as numbers."""
    if kind == TensorProto.STRING:
        values = [b"a"] * 6
    else:
        values = np.zeros((2, 3), helper.tensor_dtype_to_np_dtype(kind))
    proto = model()
    proto.graph.initializer.append(helper.make_tensor("t", kind, (2, 3), values))
    if kind != TensorProto.STRING:
        proto.graph.initializer.append(numpy_helper.from_array(values, "u"))
    check(proto)


@pytest.mark.parametrize("field", ["name", "input", "domain", "doc_string"])
def test_text_that_is_no_utf_8_is_found_in_every_field(tmp_path, field):
    proto = model()
    node = proto.graph.node[0]
    if field == "input":
        node.input[1] = "QQQQ"
    else:
        setattr(node, field, "QQQQ")
    content = proto.SerializeToString().replace(b"QQQQ", b"Q\xff\xfeQ")
    text = "texts" if field == "input" else "text"
    said = f"graph.node[0].{field}: expected {text} in UTF-8, got other bytes"
    assert complaint(tmp_path, content) == said + ADVICE


def test_attributes_without_a_value_name_their_node(tmp_path):
    body = '(float[3, 4] x) => (float[3, 4] y) { z = Mul(x, w) y = Gelu<approximate="QQQQ">(z) }'
    content = model(body, 20, w=floats(4)).SerializeToString().replace(b"QQQQ", b"Q\xff\xfeQ")
    assert complaint(tmp_path, content).startswith(
        "Gelu_1: Gelu: attribute 'approximate': expected a value, got 'utf-8' codec can't decode"
    )
    proto = model(
        "(float[3, 4] x) => (float[3, 4] y) { z = Mul(x, w) y = Softmax(z) }", w=floats(4)
    )
    reference = AttributeProto(name="axis", ref_attr_name="a", type=AttributeProto.INT)
    proto.graph.node[1].attribute.append(reference)
    assert "that of 'a', which is around no function" in complaint(tmp_path, proto)


def test_values_of_attributes_are_in_the_model_itself(tmp_path):
    proto = model("(float[3, 4] x) => (float[3, 4] y) { z = Mul(x, w) y = Add(z, c) }", w=floats(4))
    outside = TensorProto(dims=[4], data_type=1, data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="/etc/passwd")
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=outside))
    said = "expected the values of 'value' in the model's file, got them in '/etc/passwd'"
    assert said in complaint(tmp_path, proto)


@pytest.mark.parametrize("version", [-1, 2**31, 2**62])
def test_absurd_versions_are_refused(tmp_path, version):
    proto = model()
    proto.ir_version = version
    assert complaint(tmp_path, proto).startswith("ir_version: expected a number such as")
    proto = model()
    proto.opset_import.add(domain="own", version=version if version > 0 else -(2**40))
    assert complaint(tmp_path, proto).startswith("opset_import: expected a version of own, got")


def test_one_domain_has_one_version(tmp_path):
    proto = model()
    proto.opset_import.add(domain="ai.onnx", version=13)
    said = "opset_import: expected one version of ai.onnx, got [13, 18]"
    assert complaint(tmp_path, proto) == said + ADVICE


def test_operators_of_a_domain_that_is_not_imported(tmp_path):
    proto = model()
    proto.graph.node[0].output[0] = "z"
    proto.graph.node.append(helper.make_node("Gelu", ["z"], ["y"], domain="com.microsoft"))
    said = complaint(tmp_path, proto, error=OperatorError)
    assert said.startswith("opset_import: expected a version of the domain 'com.microsoft'")


def test_names_stand_for_one_value(tmp_path):
    proto = model()
    proto.graph.initializer.append(numpy_helper.from_array(floats(2), "w"))
    said = "graph.initializer: expected each name once, got 'w' 2 times"
    assert complaint(tmp_path, proto) == said + ADVICE
    proto = model()
    del proto.graph.output[:]
    said = "graph.output: expected at least one output, each with a name"
    assert complaint(tmp_path, proto) == said + ADVICE


def test_some_problems_of_many_are_listed(tmp_path):
    proto = model()
    proto.graph.initializer.extend(TensorProto(name=f"t{i}", data_type=77) for i in range(20))
    lines = complaint(tmp_path, proto).splitlines()
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == "and 15 more like these"


def calling(bodies):
    """A model that calls f0, from function -> functions that it calls, one after the other."""
    proto = model()
    proto.opset_import.add(domain="own", version=1)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    for name, called in bodies.items():
        nodes = [
            helper.make_node(one, [f"t{i}"], [f"t{i + 1}"], domain="own" if one in bodies else "")
            for i, one in enumerate(called)
        ]
        last = [f"t{len(called)}"]
        proto.functions.append(helper.make_function("own", name, ["t0"], last, nodes, imports))
    proto.graph.node[0].output[0] = "z"
    proto.graph.node.append(helper.make_node("f0", ["z"], ["y"], domain="own"))
    return proto


@pytest.mark.parametrize(
    ("bodies", "said"),
    [
        ({"f0": ["f0"]}, "expected some that do not call themselves, but 'f0' calls 'f0'"),
        ({"f0": ["f1"], "f1": ["f2"], "f2": ["f1"]},
         "expected some that do not call themselves, but 'f1' calls 'f2' calls 'f1'"),
        ({**{f"f{i}": [f"f{i + 1}"] * 2 for i in range(40)}, "f40": ["Relu"]},
         f"expected calls of at most 1000000 nodes, got {2**40 + 1}"),
        ({**{f"f{i}": [f"f{i + 1}"] for i in range(600)}, "f600": ["Relu"]},
         "expected at most 500 calls in a row, got more"),
    ],
)  # fmt: skip
def test_functions_that_never_end_are_refused(tmp_path, bodies, said):
    assert complaint(tmp_path, calling(bodies)) == f"functions: {said}{ADVICE}"


def test_functions_that_call_others_are_read(tmp_path):
    proto = calling({"f0": ["f1", "f1"], "f1": ["Relu"]})
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    types = [one.type for one in load(tmp_path / "m.onnx").graph.operators]
    assert types == ["MatMul", "Relu", "Relu"]


IMAGE = "(float[2, 3, 8, 8] x) => (float y) {{ z = Mul(x, w) y = {} }}"


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ("Add(z)", "Add_1: Add: expected 2 inputs, got 1"),
        ("Relu(z, z)", "Relu_1: Relu: expected 1 inputs, got 2"),
        ("Loop(z)", "Loop_1: Loop: expected at least 2 inputs, got 1"),
        ("Concat(z, z)", "Concat_1: Concat: expected the attribute 'axis', got none"),
        ("Softmax<axis = 1.5>(z)", "Softmax_1: Softmax: attribute 'axis': expected INT, got FLOAT"),
        ("MaxPool<kernel_shape = [20, 20]>(z)",
         "MaxPool_1: MaxPool makes 'y' [2, 3, -11, -11] of z [2, 3, 8, 8]; expected sizes"),
        ("Conv(z, k)", "Conv_1: Conv does not take z [2, 3, 8, 8], k [4, 3, 0, 0]"),
        ("Cast<to = 0>(z)", "Cast_1: Cast does not take z [2, 3, 8, 8]"),
    ],
)  # fmt: skip
def test_a_node_that_does_not_fit_is_named(tmp_path, node, said):
    proto = model(IMAGE.format(node), w=floats(8), k=np.zeros((4, 3, 0, 0), np.float32))
    assert complaint(tmp_path, proto).startswith(said)


def test_an_input_without_an_element_type_is_named(tmp_path):
    proto = model()
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    assert (
        complaint(tmp_path, proto) == f"x: expected an input with an element type, got none{ADVICE}"
    )


def test_an_output_without_elements_has_no_loss(tmp_path):
    proto = model(IMAGE.format("Resize(z, , s)"), w=floats(8), s=np.float32([1, 1, 0, 0]))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(
        OptionError, match=r"output 'y' is empty, \[2, 3, 0, 0\], and a loss is a mean"
    ):
        load(tmp_path / "m.onnx")


@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.COMPLEX64])
def test_other_types_of_values_are_one_message(tmp_path, kind):
    proto = model()
    values = [b"a"] * 8 if kind == TensorProto.STRING else np.zeros(8, np.complex64)
    proto.graph.initializer[0].CopyFrom(helper.make_tensor("w", kind, (4, 2), values))
    assert "\n" not in complaint(tmp_path, proto)


BODY = helper.make_graph(
    [helper.make_node("Relu", ["q"], ["o"])],
    "body",
    [helper.make_tensor_value_info("q", 1, None)],
    [helper.make_tensor_value_info("o", 1, None)],
)


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "said"),
    [
        ("Loop", ["n", "c", "z"], {}, "expected a graph with 3 inputs and at least 2 outputs"),
        ("Loop", ["w", "c", "z"], {}, "expected a graph with 3 inputs and at least 2 outputs"),
        ("If", ["w"], {}, "expected one condition for If, got 8"),
        ("Scan", ["z"], {"num_scan_inputs": 9}, "num_scan_inputs: expected 1 to 1, got 9"),
        ("Scan", ["z"], {"num_scan_inputs": 1, "scan_input_axes": [9]},
         "expected 'z' with an axis 9, got the shape [3, 2]"),
        ("Scan", ["z"], {"num_scan_inputs": 1, "scan_input_axes": [0, 0]},
         "scan_input_axes: expected 1 integers, got 2"),
    ],
)  # fmt: skip
def test_control_flow_that_does_not_fit_its_graph(tmp_path, operator, inputs, attributes, said):
    proto = model(w=floats(4, 2), n=np.array(3), c=np.array(True))
    proto.graph.node[0].output[0] = "z"
    names = ("then_branch", "else_branch") if operator == "If" else ("body",)
    graphs = dict.fromkeys(names, BODY)
    proto.graph.node.append(helper.make_node(operator, inputs, ["y"], **attributes, **graphs))
    assert said in complaint(tmp_path, proto)


def test_a_file_of_noise_is_no_traceback(tmp_path):
    """Each byte of a small model replaced in turn."""
    content = model().SerializeToString()
    path = tmp_path / "m.onnx"
    for at in range(0, len(content), 3):
        for byte in (0, 0x7F, 0xFF):
            path.write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
            try:
                load(path)
            except Exception as error:  # the planner's own only
                assert type(error).__module__ == "planner.support.errors", (at, byte, error)
