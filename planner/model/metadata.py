"""The metadata of an ONNX file of any size, without reading its graph and weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from onnx import ModelProto

from planner.model.wire import BYTES, fields

# Field of ModelProto -> its number; every other field is skipped.
_METADATA = ModelProto.DESCRIPTOR.fields_by_name["metadata_props"].number
# More than any record of a module; beyond it, a file is not the planner's.
MAX_ENTRY_BYTES = 1 << 28


def metadata_of(path: Path) -> dict[str, str]:
    """The entries of a model's metadata; none if the file is no ONNX model, or cannot be read."""
    try:
        with path.open("rb") as file:
            proto = ModelProto.FromString(b"".join(_entries(file)))
    except (OSError, EOFError, ValueError, DecodeError):
        return {}
    return {one.key: one.value for one in proto.metadata_props}


def _entries(file: BinaryIO) -> Iterator[bytes]:
    """The fields of a model that are metadata, as they stand in the file.

    Raises:
        EOFError: if the file breaks off.
        ValueError: if it is no protobuf.
    """
    for field in fields(file, 0, file.seek(0, 2)):
        if (field.number, field.wire) != (_METADATA, BYTES):
            continue
        if field.end - field.content > MAX_ENTRY_BYTES:
            raise ValueError(f"{field.end - field.content} bytes of metadata")
        file.seek(field.start)
        yield file.read(field.end - field.start)
