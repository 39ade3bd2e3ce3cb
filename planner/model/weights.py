"""`ModelFile`: an ONNX file whose weights stay where they are until somebody asks for them.

protobuf reads a message whole, so a file of 2 GB would take 2 GB of every process that wants to
know its operators. Here the fields of the message are walked, and each initializer of some size
becomes a reference to its bytes in the file, as ONNX has them for data beside the file. Metadata of
the tensor (`INLINE`) says that it is in truth a part of the model, whose hash covers its content.

`planner solve` writes the same references into annotated models, to the file that they are made of.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, TensorProto, helper

from planner.artefacts.graph import ITEM_BYTES
from planner.model.wire import BYTES, Field, fields
from planner.support.errors import FileError
from planner.support.reading import MAX_MODEL_BYTES, check_mapped, read_bytes

if TYPE_CHECKING:
    from onnx_ir import ExternalTensor

INLINE = "planner.inline"
"""Key in the metadata of a tensor whose place is in another file, or in another part of this one,
though it belongs to the model as if its content stood in it."""

MIN_WALKED_BYTES = 2**20
"""A smaller file is read whole."""
MIN_LEFT_BYTES = 2**14
"""A smaller initializer is read with the file. A model of 2 GB has at most 131,072 others."""
_PIECE_BYTES = 2**22

_GRAPH = ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
# Fields of TensorProto that hold its content, by number. Some have the bytes of `raw_data`.
_CONTENT = {
    one.number: one.name
    for one in TensorProto.DESCRIPTOR.fields
    if one.name.endswith("_data")  # external_data is one, too
}
_KINDS = {"float_data": TensorProto.FLOAT, "double_data": TensorProto.DOUBLE}
_NUMBERS: dict[int, int] = {
    int(helper.np_dtype_to_tensor_dtype(np.dtype(name))): int(size)
    for name, size in ITEM_BYTES.items()
    if name != "bfloat16"
} | {int(TensorProto.BFLOAT16): 2}
_PACKED_BITS = {
    "UINT2": 2, "INT2": 2, "UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6,
}  # fmt: skip
"""Bits of an element where several elements share a byte; in numpy, each has a byte of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a tensor are.

    Attributes:
        location: name of the file, relative to the model's folder.
        offset: of the first byte.
        length: number of bytes.
    """

    location: str
    offset: int
    length: int


def place_of(tensor: TensorProto) -> Place:
    """The place of a tensor that is not in the message; its length is that of its shape, where the
    file does not say it.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = int(entries["length"]) if "length" in entries else size_of(tensor)
    return Place(entries["location"], int(entries.get("offset", 0)), length)


def put(tensor: TensorProto, place: Place) -> None:
    """Makes a tensor one whose bytes are elsewhere."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key in ("location", "offset", "length"):
        tensor.external_data.add(key=key, value=str(getattr(place, key)))


def is_stored(tensor: TensorProto) -> bool:
    """Whether the content of a tensor is not in its message."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def is_inline(tensor: TensorProto) -> bool:
    """Whether a tensor whose content is not in its message belongs to the model all the same."""
    return is_stored(tensor) and any(one.key == INLINE for one in tensor.metadata_props)


def element_bits(kind: int) -> int:
    """Bits of an element in a file.

    Args:
        kind: an element type of ONNX, no text.
    """
    packed = _PACKED_BITS.get(TensorProto.DataType.Name(kind))
    return packed or 8 * helper.tensor_dtype_to_np_dtype(kind).itemsize


def size_of(tensor: TensorProto) -> int:
    """Bytes of a tensor's content, by its shape."""
    return -(-int(prod(tensor.dims)) * element_bits(tensor.data_type) // 8)


class ModelFile:
    """A file, read as one and the same even if another one takes its place meanwhile.

    Attributes:
        path: of the file; that of a model need not be there before `proto` is asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def proto(self) -> ModelProto:
        """The model, large initializers as references.

        Raises:
            OSError: if the file cannot be read.
            FileError: if it is too large.
            DecodeError: if it is no ONNX model.
        """
        if self.path.is_file() and MIN_WALKED_BYTES <= self._status.st_size <= MAX_MODEL_BYTES:
            with os.fdopen(os.dup(self._handle), "rb") as file:
                try:
                    return _structure(file, self.path.name)
                except (EOFError, ValueError):
                    pass  # protobuf is to decide whether it is one, and says what is wrong
        proto: ModelProto = ModelProto.FromString(read_bytes(self.path, MAX_MODEL_BYTES))
        return proto

    def array(self, tensor: TensorProto) -> np.ndarray:
        """The values of a tensor that is not in the message, mapped into memory.

        Raises:
            FileError: if they cannot be read, or the model's file has changed.
        """
        with self._explained(tensor):
            if not self._is_own(tensor):
                return self._outside(tensor).numpy()
            self._check_unchanged()
            kind = helper.tensor_dtype_to_np_dtype(tensor.data_type).newbyteorder("<")
            offset = place_of(tensor).offset
            flat = np.frombuffer(self._map, kind, int(prod(tensor.dims)), offset)
            return flat.reshape(tuple(tensor.dims))

    def copy(self, tensor: TensorProto, write: Callable[[memoryview], object]) -> None:
        """Hands over the bytes of a tensor that is not in the message, piece by piece.

        Raises:
            FileError: if they cannot be read, or the model's file has changed.
        """
        with self._explained(tensor):
            if self._is_own(tensor):
                self._check_unchanged()
                self._copy_own(place_of(tensor), write)
            else:
                self._outside(tensor).tofile(_Sink(write))

    def _copy_own(self, place: Place, write: Callable[[memoryview], object]) -> None:
        piece = memoryview(bytearray(min(_PIECE_BYTES, place.length)))
        at, end = place.offset, place.offset + place.length
        while at < end:
            # Read and not mapped: the pages of a map count as memory of the process until all of it
            # is gone.
            read = os.preadv(self._handle, [piece[: end - at]], at)
            if not read:
                raise ValueError(f"the file ends before byte {end}")
            write(piece[:read])
            at += read

    @contextmanager
    def _explained(self, tensor: TensorProto) -> Iterator[None]:
        """What goes wrong with a file of weights, as an error that names the file."""
        try:
            yield
        except (OSError, ValueError) as error:
            where = self.path.parent / place_of(tensor).location
            raise FileError(
                f"{where}: expected the values of {tensor.name!r}: {error}; "
                "put the data file of the model beside it"
            ) from None

    def _is_own(self, tensor: TensorProto) -> bool:
        return is_inline(tensor) and place_of(tensor).location == self.path.name

    def _outside(self, tensor: TensorProto) -> "ExternalTensor":
        """A tensor in a file beside this one, made anew each time, so that nothing stays mapped."""
        # Half a second to load, and only here are its checks of the path wanted.
        from onnx_ir import ExternalTensor, serde

        made = serde.deserialize_tensor(tensor, self.path.absolute().parent)
        if not isinstance(made, ExternalTensor):
            raise ValueError(f"{tensor.name} is in the message")
        check_mapped(Path(made.path))
        return made

    @cached_property
    def _handle(self) -> int:
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, handle)
        return handle

    @cached_property
    def _status(self) -> os.stat_result:
        return os.fstat(self._handle)

    @cached_property
    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._handle, 0, access=mmap.ACCESS_READ)

    def _check_unchanged(self) -> None:
        before, now = self._status, os.fstat(self._handle)
        if (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            raise FileError(
                f"{self.path}: expected the model that was read, got a file that has changed since;"
                " run the command again"
            )


@dataclass(frozen=True, slots=True)
class _Sink:
    """As much of a file as a tensor is written to."""

    write: Callable[[memoryview], object]


# ------------------------------------------------------------------------------ the message


def _structure(file: BinaryIO, name: str) -> ModelProto:
    """A model, large initializers as references to a file.

    Raises:
        EOFError: if the file breaks off.
        ValueError: if it is no protobuf.
        DecodeError: if it is no ONNX model.
    """
    proto = ModelProto()
    size, begun = file.seek(0, os.SEEK_END), 0
    for field in fields(file, 0, size):
        if (field.number, field.wire) == (_GRAPH, BYTES):
            _merge(proto, file, begun, field.start)
            proto.graph.SetInParent()
            _merge_graph(proto.graph, file, field, name)
            begun = field.end
    _merge(proto, file, begun, size)
    return proto


def _merge_graph(graph: GraphProto, file: BinaryIO, whole: Field, name: str) -> None:
    # protobuf appends the elements of a repeated field when parts of a message are merged one after
    # the other, so initializers keep the file's order, and annotated copies have it, too.
    begun = whole.content
    for field in fields(file, whole.content, whole.end):
        large = field.end - field.content > MIN_LEFT_BYTES
        if large and (field.number, field.wire) == (_INITIALIZER, BYTES):
            reference = _reference(file, field, name)
            if reference is not None:
                _merge(graph, file, begun, field.start)
                graph.initializer.append(reference)
                begun = field.end
    _merge(graph, file, begun, whole.end)


def _merge(message: Message, file: BinaryIO, start: int, end: int) -> None:
    """Adds fields of a message as they stand in the file."""
    if start < end:
        file.seek(start)
        message.MergeFromString(file.read(end - start))


def _reference(file: BinaryIO, whole: Field, name: str) -> TensorProto | None:
    """An initializer without its content; None where that is no single range of numbers, as many as
    the shape says.
    """
    held, begun, tensor = [], whole.content, TensorProto()
    for field in fields(file, whole.content, whole.end):
        if field.number in _CONTENT and field.wire == BYTES:
            _merge(tensor, file, begun, field.start)
            begun = field.end
            held.append(field)
    _merge(tensor, file, begun, whole.end)
    if len(held) != 1 or is_stored(tensor):
        return None
    kind, length = tensor.data_type, held[0].end - held[0].content
    fitting = _KINDS.get(_CONTENT[held[0].number], kind)
    raw = _CONTENT[held[0].number] in ("raw_data", *_KINDS)
    if not raw or fitting != kind or length != prod(tensor.dims) * _NUMBERS.get(kind, -1):
        return None
    put(tensor, Place(name, held[0].content, length))
    tensor.metadata_props.add(key=INLINE, value="")
    return tensor
