"""ONNX files, with the weights beside them where they are too large for one."""

import tempfile
from pathlib import Path

import onnx_ir as ir

from planner.errors import FileError
from planner.files import write_atomically

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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            ir.save(model, Path(folder) / path.name, external_data=data.name)
            (Path(folder) / data.name).replace(data)
            (Path(folder) / path.name).replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path, data
