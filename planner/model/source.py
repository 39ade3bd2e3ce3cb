"""`Source`: an ONNX file that was read and checked once, which is where every reading of it begins.

What follows are passes: functions from a `Source` to another one, which change nothing in place
(`repair.repaired`), or to what is known of its nodes (`expansion.expand.fold`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from onnx import ModelProto

from planner.model.canonical import content_hash, unique_names
from planner.model.expansion.inlining import inlined
from planner.model.origins import Origin
from planner.model.record import ModuleRecord, read_record
from planner.model.validate import check
from planner.model.values import Values
from planner.model.weights import ModelFile
from planner.support.errors import FileError, ModelError


@dataclass(frozen=True, slots=True)
class Source:
    """A model as it is read, with nothing bound and nothing folded.

    Attributes:
        file: that it is in.
        proto: checked, functions inlined and nodes named. Large initializers are left in the file,
            external data beside it.
        values: its initializers, read when asked for.
        record: of the module, by `planner export`; None in other files.
        origins: the module's tensor that an initializer is, where the file says it.
        named: the parameters and buffers that the exporter's notes name.
        sources: per initializer that the file does not have, the one that its value comes from;
            "zeros" for a bias.
        warnings: everything that was repaired, for people.
    """

    file: ModelFile
    proto: ModelProto
    values: Values
    record: ModuleRecord | None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    named: frozenset[Origin] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def hash(self) -> str:
        """The content hash, for which all weights in the file are read. Not of a repaired model."""
        return content_hash(self.proto, self.file)


def open_source(path: Path) -> Source:
    """The content of an ONNX file. Each mistake is an error whose every line begins with the path.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if it holds fields that stand for nothing, or a damaged record of its module.
    """
    file = ModelFile(path)
    proto = _proto_of(file)
    try:
        record = read_record(proto)
    except ModelError as error:
        raise of_file(path, error) from None
    return Source(file, proto, Values(proto.graph.initializer, file), record)


def hash_of(path: Path) -> str:
    """The content hash of the model in a file, whose dimensions need not be known.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if it holds fields that stand for nothing.
    """
    file = ModelFile(path)
    return content_hash(_proto_of(file), file)


def read_proto(path: Path) -> ModelProto:
    """The content of an ONNX file, functions inlined and nodes named. External data stays outside,
    and large initializers in the file.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if it holds fields that stand for nothing.
    """
    return _proto_of(ModelFile(path))


def of_file(path: Path, error: ModelError) -> ModelError:
    """The same mistake with the path in front of each line."""
    return type(error)("\n".join(f"{path}: {line}" for line in str(error).splitlines()))


def _proto_of(file: ModelFile) -> ModelProto:
    path = file.path
    try:
        proto = file.proto()
    except FileNotFoundError:
        raise FileError(f"{path}: expected an ONNX model, found no file; check the path") from None
    except IsADirectoryError:
        raise FileError(
            f"{path}: expected an ONNX model, this is a folder; give the .onnx file in it"
        ) from None
    except OSError as error:
        raise FileError(f"{path}: expected an ONNX model, got: {error.strerror}") from None
    except DecodeError:
        raise FileError(
            f"{path}: expected an ONNX model, got a file that is none, or only part of one; "
            "export the model again"
        ) from None
    if not proto.ByteSize():
        raise FileError(
            f"{path}: expected an ONNX model, the file is empty; export the model again"
        )
    if not proto.graph.node:
        raise FileError(
            f"{path}: expected an ONNX model, got one without operators; export the model again"
        )
    try:
        check(proto)
        proto = inlined(proto)
    except ModelError as error:
        raise of_file(path, error) from None
    for node, name in zip(proto.graph.node, unique_names(proto.graph.node), strict=True):
        node.name = name
    return proto
