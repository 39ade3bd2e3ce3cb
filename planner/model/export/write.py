"""ONNX files, with the weights beside them where they are too large for one."""

import tempfile
from pathlib import Path

import onnx_ir as ir

from planner.model.record import EXPORTED_FILE
from planner.support.errors import FileError
from planner.support.outputs import FileKind
from planner.support.writing import destination, write_atomically

MAX_FILE_BYTES = 1_800_000_000
"""Weights beyond this are written beside the model: protobuf ends at 2 GiB."""


def write_model(model: ir.Model, path: Path) -> tuple[Path, ...]:
    """Writes a model so that nobody sees half of it: PATH, and PATH.data if it is large.

    Returns:
        the files that were written.

    Raises:
        FileError: if they cannot be written.
    """
    values = model.graph.initializers.values()
    size = sum(one.const_value.nbytes for one in values if one.const_value is not None)
    if size <= MAX_FILE_BYTES:
        write_atomically(path, ir.to_proto(model).SerializeToString(deterministic=True))
        return (path,)
    data = path.with_name(f"{path.name}.data")
    check_data(path, data, EXPORTED_FILE)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            ir.save(model, Path(folder) / path.name, external_data=data.name)
            (Path(folder) / data.name).replace(data)
            (Path(folder) / path.name).replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path, data


def check_data(path: Path, data: Path, kind: FileKind) -> None:
    """Refuses to write the weights over a file that is not those of an earlier model of its kind,
    and where ONNX would not find them: beside a link.

    Args:
        path: of the model.
        data: of the weights.
        kind: of the model.

    Raises:
        FileError: if one of them is refused.
    """
    for one in (path, data):
        if destination(one) != one.parent.resolve() / one.name:
            raise FileError(
                f"{one}: is a link, and weights beyond {MAX_FILE_BYTES} bytes are written beside"
                " the model, where links are not followed; name a file"
            )
    if data.exists() and not (path.is_file() and kind.recognise(path)):
        raise FileError(
            f"{data}: is not the data of {kind.name} {path.name}, and would be overwritten; choose"
            " another name for the model, or delete the file"
        )
