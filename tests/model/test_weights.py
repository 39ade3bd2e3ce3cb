"""Weights that stay in an ONNX file until somebody asks for them."""

import gc
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.model import weights
from planner.model.load import content_hash, hash_of, load, read_proto
from planner.model.weights import INLINE, ModelFile, is_inline, place_of
from planner.operators import parameters
from planner.support.errors import FileError, ModelError

ROWS, COLUMNS = 8, 6
FLOAT, DOUBLE, HALF, SHORT = (
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    """Files are walked, and tensors left in them, from sizes on that tests have."""
    monkeypatch.setattr(weights, "MIN_WALKED_BYTES", 64)
    monkeypatch.setattr(weights, "MIN_LEFT_BYTES", 64)
    monkeypatch.setattr(weights, "_PIECE_BYTES", 50)


def matrix(name, kind=FLOAT, *, raw=True, seed=0):
    """A matrix of ROWS x COLUMNS, in `raw_data` or in the list of numbers of its type."""
    values = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS))
    values = values.astype(helper.tensor_dtype_to_np_dtype(kind))
    if raw:
        return numpy_helper.from_array(values, name)
    return helper.make_tensor(name, kind, values.shape, values.astype(float).flatten())


def model_of(*tensors, functions=(), nodes=None):
    """x -> x @ w0 + w0's likes, one per tensor; y."""
    names = [tensor.name for tensor in tensors]
    if nodes is None:
        nodes = [helper.make_node("Cast", [n], [f"{n}.f"], n, to=FLOAT) for n in names]
        nodes.append(helper.make_node("Sum", [f"{n}.f" for n in names], ["w"], "sum"))
        nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"], "product"))
    x = helper.make_tensor_value_info("x", FLOAT, [2, ROWS])
    y = helper.make_tensor_value_info("y", FLOAT, [2, COLUMNS])
    graph = helper.make_graph(nodes, "net", [x], [y], tensors)
    opsets = [helper.make_opsetid("", 18), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def saved(path, model):
    path.write_bytes(model.SerializeToString())
    return path


MATRICES = (
    matrix("raw"),
    matrix("listed", raw=False, seed=1),
    matrix("doubles", DOUBLE, seed=2),
    matrix("listed.doubles", DOUBLE, raw=False, seed=3),
    matrix("halves", HALF, seed=4),
    matrix("shorts", SHORT, seed=5),
)


@pytest.mark.parametrize("tensor", MATRICES, ids=lambda tensor: tensor.name)
def test_large_initializers_stay_in_the_file(tmp_path, tensor):
    path = saved(tmp_path / "net.onnx", model_of(tensor))
    (found,) = read_proto(path).graph.initializer
    assert is_inline(found)
    place, expected = place_of(found), numpy_helper.to_array(tensor)
    assert place.location == "net.onnx"
    assert path.read_bytes()[place.offset :][: place.length] == expected.tobytes()
    values = load(path).values
    np.testing.assert_array_equal(values[tensor.name], expected)
    assert values.described(tensor.name) == (expected.dtype, expected.shape)


def test_the_rest_of_the_message_is_read_as_protobuf_reads_it(tmp_path):
    little = numpy_helper.from_array(np.arange(3, dtype=np.int64), "little")
    model = model_of(little, *MATRICES, matrix("halves.listed", HALF, raw=False))
    model.metadata_props.add(key="who", value="me")
    model.graph.doc_string = "behind the initializers"
    path = saved(tmp_path / "net.onnx", model)
    walked, whole = ModelFile(path).proto(), onnx.load(path)
    names = [tensor.name for tensor in whole.graph.initializer]
    assert [tensor.name for tensor in walked.graph.initializer] == names
    left = [tensor.name for tensor in walked.graph.initializer if is_inline(tensor)]
    assert left == [tensor.name for tensor in MATRICES]  # half of a list is no range of numbers
    for proto in (walked, whole):
        del proto.graph.initializer[:]
    assert walked == whole


def test_the_hash_is_that_of_the_whole_message(tmp_path):
    model = model_of(*MATRICES)
    path = saved(tmp_path / "net.onnx", model)
    assert load(path).hash == hash_of(path) == content_hash(model)
    changed = model_of(*MATRICES[:-1], matrix("shorts", SHORT, seed=6))
    assert hash_of(saved(tmp_path / "changed.onnx", changed)) != content_hash(model)


def test_a_known_hash_is_taken_and_no_weight_is_read(tmp_path, monkeypatch):
    path = saved(tmp_path / "net.onnx", model_of(*MATRICES[:3]))
    asked = []
    monkeypatch.setattr(ModelFile, "copy", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(ModelFile, "array", lambda *arguments: asked.append(arguments))
    assert load(path, known_hash="abc").hash == "abc"
    assert not asked


def test_parameters_are_the_numbers_of_the_file(tmp_path):
    model = load(saved(tmp_path / "net.onnx", model_of(*MATRICES)))
    found = parameters(model, [tensor.name for tensor in MATRICES])
    for tensor in MATRICES:
        expected = numpy_helper.to_array(tensor)
        if expected.dtype == ml_dtypes.bfloat16:
            expected = expected.astype(np.float32)
        np.testing.assert_array_equal(found[tensor.name].detach().float(), expected.astype("f4"))


def test_calls_of_functions_are_inlined_around_weights(tmp_path):
    body = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    opsets = [helper.make_opsetid("", 18)]
    product = helper.make_function("own", "Product", ["a", "b"], ["c"], body, opsets)
    call = helper.make_node("Product", ["x", "w0"], ["y"], "call", domain="own")
    model = model_of(matrix("w0"), functions=[product], nodes=[call])
    found = load(saved(tmp_path / "net.onnx", model))
    assert [node.op_type for node in found.proto.graph.node] == ["MatMul"]
    assert is_inline(found.proto.graph.initializer[0])
    assert found.hash == content_hash(model)
    np.testing.assert_array_equal(found.values["w0"], numpy_helper.to_array(matrix("w0")))


def test_a_file_that_takes_the_place_is_not_read(tmp_path):
    path = saved(tmp_path / "net.onnx", model_of(matrix("w0")))
    values = load(path).values
    saved(tmp_path / "other.onnx", model_of(matrix("w0", seed=1))).replace(path)
    np.testing.assert_array_equal(values["w0"], numpy_helper.to_array(matrix("w0")))


def test_a_file_that_changes_is_an_error(tmp_path):
    path = saved(tmp_path / "net.onnx", model_of(matrix("w0")))
    values = load(path).values
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(FileError, match=r"net\.onnx: expected the model that was read, got a file"):
        values["w0"]
    with pytest.raises(FileError, match="run the command again"):
        values.fill("w0", np.empty((ROWS, COLUMNS), np.float32))


def test_one_file_is_open_for_a_model_and_none_when_it_is_gone(tmp_path):
    path = saved(tmp_path / "net.onnx", model_of(*MATRICES))

    def opened():
        # Other files may be closed meanwhile, by tests before this one.
        links = [one.readlink() for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        return links.count(path)

    model = load(path)
    arrays = [model.values[tensor.name] for tensor in MATRICES]
    assert 1 <= opened() <= 2  # and the map
    del model, arrays
    gc.collect()
    assert opened() == 0


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.999])
def test_a_file_that_breaks_off_is_refused_as_before(tmp_path, kept):
    content = model_of(*MATRICES).SerializeToString()
    path = tmp_path / "net.onnx"
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(FileError, match="a file that is none, or only part of one"):
        read_proto(path)


def test_a_tensor_of_another_size_than_its_shape_is_refused_as_before(tmp_path):
    wrong = matrix("w0")
    wrong.dims[0] += 1
    path = saved(tmp_path / "net.onnx", model_of(wrong))
    expected = r"'w0': expected 216 bytes for float\[9, 6\], got 192"
    with pytest.raises(ModelError, match=expected):
        read_proto(path)


def test_what_is_no_regular_file_is_read_whole(tmp_path):
    content = model_of(matrix("w0")).SerializeToString()
    out, into = os.pipe()
    os.write(into, content)
    os.close(into)
    (found,) = read_proto(Path(f"/dev/fd/{out}")).graph.initializer
    os.close(out)
    assert found.HasField("raw_data")


def test_a_reference_is_one_that_other_tools_follow(tmp_path):
    path = saved(tmp_path / "net.onnx", model_of(matrix("w0")))
    proto = read_proto(path)
    beside = saved(tmp_path / "structure.onnx", proto)
    onnx.checker.check_model(beside, full_check=True)
    x = np.random.default_rng(1).standard_normal((2, ROWS)).astype(np.float32)
    providers = ["CPUExecutionProvider"]
    one, other = (
        onnxruntime.InferenceSession(file, providers=providers).run(None, {"x": x})[0]
        for file in (path, beside)
    )
    np.testing.assert_array_equal(one, other)
    assert hash_of(beside) == hash_of(path)
    assert [p.key for p in proto.graph.initializer[0].metadata_props] == [INLINE]
