import numpy as np
import onnx_ir
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from planner.model.values import Values
from planner.model.weights import ModelFile, element_bits, size_of
from planner.model.wire import KEY, METADATA, VALUE, metadata_of

NUMBERS = sorted(set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED, TensorProto.STRING})
NAMED = [TensorProto.DataType.Name(kind) for kind in NUMBERS]
SHAPE = (3, 5)  # 15 elements: the last byte of packed ones is not full


def tensor_of(kind, *, raw):
    array = (np.arange(15).reshape(SHAPE) % 2).astype(helper.tensor_dtype_to_np_dtype(kind))
    proto = numpy_helper.from_array(array, "x")
    if not raw:
        flat = [complex(one) if "complex" in array.dtype.name else float(one) for one in array.flat]
        proto = helper.make_tensor("x", kind, SHAPE, flat)
    return proto, array


@pytest.mark.parametrize("kind", NUMBERS, ids=NAMED)
def test_an_element_takes_as_many_bits_in_a_file_as_onnx_ir_says(kind):
    assert element_bits(kind) == onnx_ir.DataType(kind).bitwidth
    raw, _ = tensor_of(kind, raw=True)
    assert size_of(raw) == len(raw.raw_data)


@pytest.mark.parametrize("raw", [True, False], ids=["bytes", "numbers"])
@pytest.mark.parametrize("kind", NUMBERS, ids=NAMED)
def test_values_of_each_element_type_are_those_that_were_written(tmp_path, kind, raw):
    proto, array = tensor_of(kind, raw=raw)
    values = Values([proto], ModelFile(tmp_path / "model.onnx"))
    assert values["x"].dtype == array.dtype
    assert values["x"].tobytes() == array.tobytes()
    assert values.described("x") == (array.dtype, SHAPE)


def test_texts_are_bytes_in_any_encoding(tmp_path):
    proto = TensorProto(
        name="x", data_type=TensorProto.STRING, dims=[2], string_data=[b"a", b"\xff"]
    )
    assert Values([proto], ModelFile(tmp_path / "model.onnx"))["x"].tolist() == [b"a", b"\xff"]


def test_a_value_that_was_folded_hides_the_initializer_of_its_name(tmp_path):
    proto, _ = tensor_of(TensorProto.FLOAT, raw=True)
    values = Values([proto], ModelFile(tmp_path / "model.onnx"))
    values.hold(proto, "y")
    values.add("x", np.full(2, 7.0))
    target = np.zeros(2)
    values.fill("x", target)
    assert target.tolist() == [7.0, 7.0]
    assert sorted(values) == ["x", "y"]
    assert len(values) == 2
    values.forget("y")
    assert [*values] == ["x"]


def test_metadata_is_read_as_protobuf_reads_it(tmp_path):
    proto = ModelProto(ir_version=8, producer_name="metadata_props")
    for key, value in (("a", "é"), ("", "no key"), ("b", ""), ("a", "again"), ("long", "x" * 300)):
        proto.metadata_props.add(key=key, value=value)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert metadata_of(path) == {one.key: one.value for one in proto.metadata_props}
    entry = proto.metadata_props[0].DESCRIPTOR.fields_by_name
    assert ModelProto.DESCRIPTOR.fields_by_name["metadata_props"].number == METADATA
    assert (entry["key"].number, entry["value"].number) == (KEY, VALUE)


@pytest.mark.parametrize(
    "content",
    [b"\x72\x05\x0a\x03\xff\xfe\xfd", b"\x72\x05\x0a\x09abc", b"\x72\x09abc", b"text"],
    ids=["no UTF-8", "entry breaks off", "file breaks off", "another file"],
)
def test_a_file_that_is_no_model_has_no_metadata(tmp_path, content):
    (tmp_path / "model.onnx").write_bytes(content)
    assert metadata_of(tmp_path / "model.onnx") == {}
