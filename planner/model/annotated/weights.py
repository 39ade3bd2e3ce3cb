"""Where the weights of an annotated model are.

    in a file beside the model    there, or in a copy beside the annotated model
    in the model, small           in the annotated model
    in the model, large           where they are: as external data, a range of the model's own file,
                                  if that is beside the annotated model; else in a copy of the file

ONNX lets no location lead out of the folder of a model, not even by a link of either sort.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from onnx import GraphProto, ModelProto, TensorProto

from planner.model.load import Model
from planner.model.protos import set_metadata, subgraphs
from planner.model.weights import INLINE, ModelFile, is_inline, is_stored, place_of, put
from planner.model.wire import metadata_of
from planner.support.errors import FileError
from planner.support.reading import check_mapped

WEIGHTS = "planner.weights"  # the file beside the annotated one that was written for it
MAX_INLINE_BYTES = 2**28
"""Weights of a model that are written into the annotated one again. More would cost time and space
on the disk, and near 2 GB the annotations would exceed protobuf's limit."""


def settle(proto: ModelProto, model: Model, path: Path) -> str | None:
    """Gives the weights that were left in the model's file a place for an annotated model.

    Args:
        proto: a copy of the model's message.
        path: of the annotated model.

    Returns:
        The name of a copy of the model's file that is to lie beside the annotated model; None if
        it needs none.

    Raises:
        FileError: if the weights cannot be read.
    """
    own = [tensor for tensor in proto.graph.initializer if _is_own(tensor, model)]
    if sum(place_of(tensor).length for tensor in own) <= MAX_INLINE_BYTES:
        for tensor in own:
            _take_in(tensor, model.values.file)
        return None
    # A model that is exported anew into the same file takes these weights along. A launch sees that
    # by the hash; ONNX Runtime does not.
    beside = _is_beside(model.path, path)
    location = model.path.name if beside else f"{path.name}.data"
    for tensor in own:
        put(tensor, replace(place_of(tensor), location=location))
    return None if beside else location


def _is_beside(source: Path, path: Path) -> bool:
    """Whether an annotated model may refer to a file of weights where it is."""
    folder, other = source.absolute().parent, path.absolute().parent
    status = source.lstat()
    return folder.resolve() == other.resolve() and not source.is_symlink() and status.st_nlink == 1


def _take_in(tensor: TensorProto, file: ModelFile) -> None:
    """Puts the content of a tensor into its message."""
    content = bytearray()
    file.copy(tensor, content.extend)
    tensor.raw_data = bytes(content)
    tensor.ClearField("data_location")
    del tensor.external_data[:]
    set_metadata(tensor, {INLINE: None})


def copies(model: Model, path: Path, copy: str | None) -> dict[Path, Path]:
    """The files that are to be copied beside an annotated model: the copies, and what they are
    copied from.

    Args:
        model: the original.
        path: of the annotated model.
        copy: the name of a copy of the model's file, as `settle` gives it.

    Raises:
        FileError: if other data lies there.
    """
    source, target = model.path.absolute().parent, path.absolute().parent
    wanted = {} if copy is None else {target / copy: model.path.absolute()}
    if source.resolve() != target.resolve():
        locations = {
            place_of(tensor).location
            for tensor in _external(model.proto.graph)
            if not _is_own(tensor, model)
        }
        wanted |= {target / location: source / location for location in sorted(locations)}
    own = metadata_of(path).get(WEIGHTS)
    return {
        to: origin
        for to, origin in wanted.items()
        if _is_to_copy(origin, to, model.path, may_replace=to.name == own)
    }


def _is_own(tensor: TensorProto, model: Model) -> bool:
    """Whether a tensor was left in the model's own file."""
    return is_inline(tensor) and place_of(tensor).location == model.path.name


def _is_to_copy(source: Path, target: Path, model: Path, *, may_replace: bool) -> bool:
    """Whether a file of weights has not been copied before."""
    if not os.path.lexists(target):
        return True
    if target.exists() and (target.samefile(source) or _same(source, target)):
        return False
    if not may_replace:
        raise FileError(
            f"{target}: is not the data of {model}, and would be overwritten; write the plan into"
            " another folder with -o, or delete the file"
        )
    return True


def fill(copy: BinaryIO, source: Path, target: Path, model: Path) -> None:
    """Fills a copy of a file of weights and gives it the file's time, by which `_same` knows it
    again.
    """
    check_mapped(source)
    try:
        with source.open("rb") as weights:
            shutil.copyfileobj(weights, copy)
            copy.flush()
            status = os.fstat(weights.fileno())
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    except OSError as error:
        raise FileError(
            f"{target}: cannot copy {source}, the weights of {model}: {error.strerror or error}"
        ) from None


def _same(one: Path, other: Path) -> bool:
    """Whether two files have the same size and time, as a copy has."""
    first, second = one.stat(), other.stat()
    return first.st_size == second.st_size and first.st_mtime_ns == second.st_mtime_ns


def _external(graph: GraphProto) -> Iterator[TensorProto]:
    """Tensors whose content lies in a file; those in attributes never do (`model/validate.py`)."""
    yield from filter(is_stored, graph.initializer)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _external(inner)
