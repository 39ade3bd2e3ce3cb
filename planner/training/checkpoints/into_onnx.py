"""A checkpoint's weights as a copy of the user's ONNX file, and as a state dict."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from onnx import TensorProto, helper

from planner.model.export.forms import remove_annotations, to_evaluation
from planner.model.export.write import MAX_FILE_BYTES, check_data
from planner.model.record import WEIGHTS_FILE, WEIGHTS_KEY, evaluated, write_record
from planner.support.errors import FileError, ModelError
from planner.support.outputs import FileKind
from planner.support.writing import file_error, writing
from planner.training.checkpoints.folder import MAX_SHOWN, Checkpoint
from planner.training.checkpoints.learned import LearnedModel
from planner.training.options import WeightsForm

ALIGNED_BYTES = 4096
"""External data begins at multiples of this, so that it can be mapped into memory."""
MIN_EXTERNAL_BYTES = 1024
"""Smaller tensors stay in the model, as onnx has it: it reads shapes among them there."""
_MARK = b"planner state dict"


@dataclass(frozen=True, slots=True)
class Weights:
    """What was written.

    Attributes:
        step: number of steps that were done.
        num_parameters: number of trained parameters.
        num_statistics: number of running statistics.
        form: of the model; None where no model was written.
        num_changed: nodes that were brought into that form.
        files: that were written.
        notes: for people.
    """

    step: int
    num_parameters: int
    num_statistics: int
    form: WeightsForm | None
    num_changed: int
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def _is_state_dict(path: Path) -> bool:
    """Whether a file ends with the planner's mark, the comment of the zip archive that it is."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_MARK), 2)
            return file.read() == _MARK
    except OSError:  # it is shorter, or cannot be read
        return False


STATE_DICT_FILE = FileKind("a state dict", _is_state_dict)


def write_weights(
    start: Checkpoint,
    path: Path | None,
    state_dict: Path | None = None,
    *,
    model_path: Path | None = None,
    form: WeightsForm = WeightsForm.EVALUATION,
    allow_nan: bool = False,
) -> Weights:
    """Writes the trained model, or its state dict, or both.

    Args:
        start: the checkpoint.
        path: of the new ONNX file; weights of 1.8 GB or more are written to PATH.data beside it.
        state_dict: of the new file with a dict of tensors by names of initializers.
        model_path: the ONNX file that was trained, if it is not where the checkpoint says.
        form: of the new ONNX file.
        allow_nan: whether weights that are not finite are written, too.

    Raises:
        FileError: if the model is not there or another one, the checkpoint is damaged, has weights
            that are not finite, or a file cannot be written.
        ModelError: if the model cannot hold the weights, or has no evaluation form.
    """
    model = LearnedModel(start, model_path or _model_of(start))
    changed = 0 if path is None else _formed(model, start, form)
    data = None if path is None else _data_of(path, model)
    files = [one for one in (data, path, state_dict) if one is not None]
    with writing(*files) as opened:
        by_path = dict(zip(files, opened, strict=True))
        if path is not None:
            _write_model(model, by_path[path], path, None if data is None else by_path[data])
        if state_dict is not None:
            _write_state_dict(model, by_path[state_dict], state_dict)
        damaged = _not_finite(model)
        if damaged and not allow_nan:
            raise FileError(
                f"{start.path}: {damaged[0]}; take an earlier checkpoint, or write them with"
                " --allow-nan"
            )
    return Weights(
        step=start.record.step,
        num_parameters=len(start.record.trained),
        num_statistics=len(model.learned) - len(start.record.trained),
        form=None if path is None else form,
        num_changed=changed,
        files=tuple(one for one in (path, data, state_dict) if one is not None),
        notes=(*start.notes, *model.notes, *damaged),
    )


def _model_of(start: Checkpoint) -> Path:
    """The model that a checkpoint says it was trained from."""
    if not start.model_path.is_file():
        raise FileError(
            f"{start.path}: trained from {start.model_path}, which is not there; give --model FILE"
        )
    return start.model_path


def _not_finite(model: LearnedModel) -> tuple[str, ...]:
    """The weights that are not finite, in words, if there are any."""
    if not model.not_finite:
        return ()
    names = [repr(name) for name in sorted(model.not_finite)]
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    shown = ", ".join(names[:MAX_SHOWN])
    return (f"{len(names)} of {len(model.learned)} weights are not finite: {shown}{more}",)


def _formed(model: LearnedModel, start: Checkpoint, form: WeightsForm) -> int:
    """Brings the model into a form, and says in its metadata what it is; gives the number of nodes
    that were changed.
    """
    model.place_all()
    changed = 0
    if form is WeightsForm.EVALUATION:
        if model.record is not None and model.record.unlike:
            raise ModelError(
                f"{start.path}: the file cannot be evaluated as the module: {model.record.unlike};"
                " write the weights with --form training, or --state-dict alone"
            )
        before = _initializers(model)
        changed = to_evaluation(model.proto)
        if model.record is not None:
            removed = before - _initializers(model)
            write_record(model.proto, evaluated(model.record, removed))
    remove_annotations(model.proto)
    said = f"step {start.record.step} of model {start.record.model_hash}"
    model.proto.metadata_props.add(key=WEIGHTS_KEY, value=said)
    return changed


def _initializers(model: LearnedModel) -> set[str]:
    return {tensor.name for tensor in model.proto.graph.initializer}


def _data_of(path: Path, model: LearnedModel) -> Path | None:
    """The file for the weights, where there are too many for one."""
    size = sum(map(_num_bytes, model.proto.graph.initializer))
    if size <= MAX_FILE_BYTES:
        return None
    data = path.with_name(f"{path.name}.data")
    check_data(path, data, WEIGHTS_FILE)
    return data


def _num_bytes(tensor: TensorProto) -> int:
    item = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return int(prod(tensor.dims) * item)


def _write_model(
    model: LearnedModel, file: BinaryIO, path: Path, data: BinaryIO | None
) -> None:  # fmt: skip
    for tensor in model.proto.graph.initializer:
        if tensor.data_type == TensorProto.STRING:
            continue
        content = model.content(tensor)
        full = TensorProto(
            name=tensor.name, dims=tensor.dims, data_type=tensor.data_type,
            doc_string=tensor.doc_string,
        )  # fmt: skip
        if data is None or len(content) < MIN_EXTERNAL_BYTES:
            full.raw_data = content
        else:
            with file_error(path):
                _write_external(full, content, data, f"{path.name}.data")
        tensor.CopyFrom(full)
    with file_error(path):
        file.write(model.proto.SerializeToString(deterministic=True))


def _write_external(tensor: TensorProto, content: bytes, data: BinaryIO, location: str) -> None:
    offset = -(-data.tell() // ALIGNED_BYTES) * ALIGNED_BYTES
    data.seek(offset)
    data.write(content)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", len(content))):
        tensor.external_data.add(key=key, value=str(value))


def _write_state_dict(model: LearnedModel, file: BinaryIO, path: Path) -> None:
    """As torch.save has it, with the planner's mark as the comment of the archive."""
    with file_error(path):
        torch.save(model.state_dict(), file)
        file.seek(-2, 2)  # the length of the comment, which is the end of an archive without one
        file.write(len(_MARK).to_bytes(2, "little") + _MARK)
