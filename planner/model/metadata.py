"""The metadata of an ONNX file of any size, without reading its graph and weights, and without
loading onnx.
"""

from io import BytesIO
from pathlib import Path

from planner.model.wire import BYTES, fields

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
