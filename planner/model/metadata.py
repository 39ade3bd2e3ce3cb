"""The metadata of an ONNX file of any size, without reading its graph and weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from onnx import ModelProto

# Field of ModelProto -> its number; every other field is skipped.
_METADATA = ModelProto.DESCRIPTOR.fields_by_name["metadata_props"].number
# Wire types of protobuf, with the number of bytes of those that have a fixed one.
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
# More than any record of a module; beyond it, a file is not the planner's.
MAX_ENTRY_BYTES = 1 << 28
MAX_VARINT_BYTES = 10


def metadata_of(path: Path) -> dict[str, str]:
    """The entries of a model's metadata; none where the file is no ONNX model, or cannot be read.

    Source: protobuf.dev/programming-guides/encoding
    """
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
    size = file.seek(0, 2)
    file.seek(0)
    while (start := file.tell()) < size:
        field, wire = divmod(_varint(file), 8)
        if wire == _VARINT:
            _varint(file)
            continue
        if wire != _BYTES and wire not in _FIXED:
            raise ValueError(f"wire type {wire}")
        length = _FIXED[wire] if wire in _FIXED else _varint(file)
        end = file.tell() + length
        if end > size:
            raise EOFError
        if field == _METADATA:
            if length > MAX_ENTRY_BYTES:
                raise ValueError(f"{length} bytes of metadata")
            file.seek(start)
            yield file.read(end - start)
        file.seek(end)


def _varint(file: BinaryIO) -> int:
    """A number of the file: 7 bits per byte, the lowest first; the highest bit says that it goes
    on.
    """
    value = 0
    for at in range(MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise EOFError
        value |= (byte[0] & 0x7F) << (7 * at)
        if byte[0] < 0x80:
            return value
    raise ValueError("a number of more than 10 bytes")
