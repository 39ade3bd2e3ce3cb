"""The fields of a protobuf message in a file, found without reading their content, and the metadata
of an ONNX file of any size. onnx is not loaded.

Source: protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

# Wire types: a number of 7 bits per byte, bytes with their length in front, and numbers of 8 and 4
# bytes. Those of groups are in no ONNX file.
VARINT, BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
_MAX_VARINT_BYTES = 10
_HEAD_BYTES = 2 * _MAX_VARINT_BYTES  # a tag and a length


class Field(NamedTuple):
    """A field of a message. Positions are bytes from the start of the file.

    Attributes:
        number: of the field in its message.
        wire: its wire type.
        start: of the tag.
        content: behind the tag, and behind the length of `BYTES`.
        end: behind the content.
    """

    number: int
    wire: int
    start: int
    content: int
    end: int


def fields(file: BinaryIO, start: int, end: int) -> Iterator[Field]:
    """The fields of the message between two positions of a file, in order.

    The position of the file is another one after each field.

    Raises:
        EOFError: if the message breaks off.
        ValueError: if it is no protobuf.
    """
    while start < end:
        file.seek(start)
        head = file.read(min(_HEAD_BYTES, end - start))
        tag, used = _varint(head, 0)
        number, wire = divmod(tag, 8)
        content = start + used
        if wire == BYTES:
            length, used = _varint(head, used)
            content = start + used
            stop = content + length
        elif wire == VARINT:
            stop = start + _varint(head, used)[1]
        elif wire in _FIXED:
            stop = content + _FIXED[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if stop > end:
            raise EOFError
        yield Field(number, wire, start, content, stop)
        start = stop


def _varint(head: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits per byte, the lowest first; the highest bit of a byte says that it goes
    on. And the position behind it.
    """
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at == len(head):
            raise EOFError
        byte = head[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")


# ---- the metadata of an ONNX file of any size, without its graph and weights

# `ModelProto.metadata_props` and the two texts of a `StringStringEntryProto`, from onnx.proto.
METADATA, KEY, VALUE = 14, 1, 2
# More than any record of a module; beyond it, a file is not the planner's.
MAX_ENTRY_BYTES = 1 << 28


def metadata_of(path: Path) -> dict[str, str]:
    """The entries of a model's metadata; none if the file is no ONNX model, or cannot be read."""
    entries = {}
    try:
        with path.open("rb") as file:
            for field in fields(file, 0, file.seek(0, 2)):
                if (field.number, field.wire) == (METADATA, BYTES):
                    size = field.end - field.content
                    if size > MAX_ENTRY_BYTES:
                        raise ValueError(f"{size} bytes of metadata")
                    file.seek(field.content)
                    entry = _texts(file.read(size))
                    entries[entry.get(KEY, "")] = entry.get(VALUE, "")
    except (OSError, EOFError, ValueError):
        return {}
    return entries


def _texts(entry: bytes) -> dict[int, str]:
    """The texts of a message by the numbers of their fields.

    Raises:
        EOFError: if it breaks off.
        ValueError: if it is no protobuf, or a text is not UTF-8.
    """
    return {
        field.number: entry[field.content : field.end].decode()
        for field in fields(BytesIO(entry), 0, len(entry))
        if field.wire == BYTES
    }
