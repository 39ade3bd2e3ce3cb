"""The record of the module in a model's metadata."""

import pytest
from onnx import ModelProto

from planner.model.record import (
    METADATA_KEY,
    ModuleRecord,
    TensorRecord,
    read_record,
    write_record,
)
from planner.support.errors import ModelError

RECORD = ModuleRecord(
    module="example.Net",
    training=True,
    parameters=(
        TensorRecord("a.weight", "a.weight", (2, 3), "float32", True, ("b.weight",)),
        TensorRecord("c.weight", None, (3,), "float32", True),
        TensorRecord("d.weight", "d.weight", (3,), "float32", False),
    ),
    buffers=(TensorRecord("mask", "mask", (), "bool", False),),
    versions={"torch": "2.13.0"},
)


def test_a_record_is_read_as_it_was_written_and_replaces_an_older_one():
    proto = ModelProto()
    proto.metadata_props.add(key="other", value="kept")
    write_record(proto, RECORD)
    write_record(proto, RECORD)
    assert read_record(proto) == RECORD
    assert [one.key for one in proto.metadata_props] == ["other", METADATA_KEY]


def test_a_model_of_another_exporter_has_no_record():
    assert read_record(ModelProto()) is None


def test_what_is_trained_is_in_the_file_and_requires_a_gradient():
    assert [one.name for one in RECORD.trained] == ["a.weight"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "got something else"), ("[]", "got something else"), ('{"format": 2}', "newer planner")],
)
def test_a_damaged_record_is_an_error(text, expected):
    proto = ModelProto()
    proto.metadata_props.add(key=METADATA_KEY, value=text)
    with pytest.raises(ModelError, match=expected):
        read_record(proto)
