"""Plan and model -> annotated file."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto

from planner.artefacts.files import artefact_hash
from planner.artefacts.plan import Plan
from planner.model.annotated.annotations import annotate
from planner.model.annotated.weights import WEIGHTS, copies, fill, settle
from planner.model.load import Model
from planner.model.protos import set_metadata
from planner.model.record import ANNOTATION_KEY
from planner.support.errors import FileError, ModelError
from planner.support.writing import file_error, writing

MODEL_HASH, STRATEGY_HASH = "planner.model_hash", ANNOTATION_KEY

# ONNX Runtime 1.31 reads nothing newer; annotations exist from IR version 11 on.
MIN_IR_VERSION, MAX_IR_VERSION, MAX_OPSET = 11, 13, 26


def write_partition(
    model: Model, plan: Plan, path: Path, also: Mapping[Path, bytes] | None = None
) -> None:
    """Writes the model with the stages, devices and transfers of a plan (`annotations.py`).

    Args:
        model: that the plan was made for.
        plan: the annotations.
        path: of the new file. Weights go along, or are referred to (`weights.py`).
        also: files that are written with it, or not at all: their contents.

    Raises:
        FileError: if the plan was made for another model, or a file cannot be read or written.
        ModelError: if the model's operator set is newer than ONNX Runtime takes.
    """
    if plan.model_hash != model.hash:
        raise FileError(
            f"{model.path}: the plan was made for model {short(plan.model_hash)}, this one is"
            f" {short(model.hash)}; run: planner profile {shlex.quote(model.path.name)}, then"
            " planner solve"
        )
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    proto.ir_version = _ir_version(model)
    annotate(proto, model, plan)
    copy = settle(proto, model, path)
    notes = {MODEL_HASH: model.hash, STRATEGY_HASH: artefact_hash(plan.strategy)}
    set_metadata(proto, notes if copy is None else {**notes, WEIGHTS: copy})
    contents = {path: proto.SerializeToString(deterministic=True), **(also or {})}
    copied = copies(model, path, copy)
    with writing(*copied, *contents) as files:
        for file, (target, source) in zip(files, copied.items(), strict=False):
            fill(file, source, target, model.path)
        for file, (target, content) in zip(files[len(copied) :], contents.items(), strict=True):
            with file_error(target):
                file.write(content)


def short(content: str | None) -> str:
    """The first digits of a hash, for messages."""
    return content[:6] if content else "(unknown)"


def _ir_version(model: Model) -> int:
    for opset in model.proto.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > MAX_OPSET:
            raise ModelError(
                f"{model.path}: expected opset {MAX_OPSET} or older, because ONNX Runtime takes no"
                f" more, got {opset.version}; export the model with an older opset"
            )
    return min(max(model.proto.ir_version, MIN_IR_VERSION), MAX_IR_VERSION)
