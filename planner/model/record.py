"""`ModuleRecord`: the PyTorch module that an ONNX file was exported from, in the file's metadata.

`planner export` writes it. Reading a model takes from it which initializers are parameters, which
are buffers, and which parameters share a tensor, so that nothing has to be guessed from the graph.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from planner.model.wire import metadata_of
from planner.support.errors import ModelError
from planner.support.outputs import FileKind

if TYPE_CHECKING:
    from onnx import ModelProto

METADATA_KEY = "planner.module"
# What `planner solve` annotates has the record, too, and an entry of its own.
ANNOTATION_KEY = "planner.strategy_hash"
# So has what `planner weights` writes.
WEIGHTS_KEY = "planner.trained"
FORMAT = 1


def _is_exported(path: Path) -> bool:
    entries = metadata_of(path)
    return METADATA_KEY in entries and not {ANNOTATION_KEY, WEIGHTS_KEY} & entries.keys()


def _is_trained(path: Path) -> bool:
    entries = metadata_of(path)
    return WEIGHTS_KEY in entries and ANNOTATION_KEY not in entries


def _is_annotated(path: Path) -> bool:
    return ANNOTATION_KEY in metadata_of(path)


ANNOTATED_FILE = FileKind("an annotated model", _is_annotated, is_model=True)
EXPORTED_FILE = FileKind("an exported model", _is_exported, is_model=True)
WEIGHTS_FILE = FileKind("a trained model", _is_trained, is_model=True)


class Checked(StrEnum):
    """What was compared with the module when it was exported."""

    GRADIENTS = "gradients"  # and outputs
    OUTPUTS = "outputs"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A parameter or buffer of the module.

    Attributes:
        name: its first name among `named_parameters()` or `named_buffers()`.
        initializer: its name in the ONNX file; None where no output depends on it, or its value
            was computed into another constant.
        shape: size of each dimension.
        dtype: torch's name of the element type, such as "float32".
        requires_grad: whether the module trains it; False for buffers.
        aliases: its other names: one tensor that several submodules share.
    """

    name: str
    initializer: str | None
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A module as it was exported.

    Attributes:
        module: import path of the module's class, such as "torch.nn.modules.linear.Linear".
        training: whether it was exported in training mode.
        parameters: in the order of `named_parameters()`, each tensor once.
        buffers: in the order of `named_buffers()`, each tensor once.
        versions: of the software that exported it.
        checked: what was compared with the module; None in files of before it was recorded.
        stopped: outputs of the file through which the module lets no gradient flow.
        unlike: why the file does not say what the module computes in evaluation; empty where it
            does, and in files of before it was recorded.
    """

    module: str
    training: bool
    parameters: tuple[TensorRecord, ...]
    buffers: tuple[TensorRecord, ...]
    versions: dict[str, str]
    checked: Checked | None = None
    stopped: tuple[str, ...] = ()
    unlike: str = ""

    @property
    def trained(self) -> tuple[TensorRecord, ...]:
        """The parameters that the module trains and that the file holds."""
        return tuple(p for p in self.parameters if p.requires_grad and p.initializer is not None)


def evaluated(record: ModuleRecord, removed: Collection[str]) -> ModuleRecord:
    """The record of a file in evaluation form.

    Args:
        removed: initializers that no node reads in that form, so that the file has them no more.
    """

    def without(tensors: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
        return tuple(
            replace(one, initializer=None) if one.initializer in removed else one for one in tensors
        )

    parameters, buffers = without(record.parameters), without(record.buffers)
    return replace(record, training=False, parameters=parameters, buffers=buffers)


def record_text(record: ModuleRecord) -> str:
    """A record as the value of `METADATA_KEY`."""
    return json.dumps({"format": FORMAT, **asdict(record)}, sort_keys=True)


def write_record(proto: "ModelProto", record: ModuleRecord) -> None:
    """Puts a record into a model's metadata, in place of an older one."""
    from planner.model.protos import set_metadata  # records are read without onnx

    set_metadata(proto, {METADATA_KEY: record_text(record)})


def read_record(proto: "ModelProto") -> ModuleRecord | None:
    """The record in a model's metadata; None where there is none.

    Raises:
        ModelError: if it is damaged or of a newer format.
    """
    text = next((one.value for one in proto.metadata_props if one.key == METADATA_KEY), None)
    if text is None:
        return None
    try:
        content = json.loads(text)
        if content.pop("format") != FORMAT:
            raise ModelError(
                f"metadata {METADATA_KEY}: expected format {FORMAT}; the file was written by a"
                " newer planner: update the planner"
            )
        return ModuleRecord(
            module=content["module"],
            training=content["training"],
            parameters=_tensors(content["parameters"]),
            buffers=_tensors(content["buffers"]),
            versions=content["versions"],
            checked=Checked(content["checked"]) if content.get("checked") else None,
            stopped=tuple(str(name) for name in content.get("stopped", ())),
            unlike=str(content.get("unlike", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"metadata {METADATA_KEY}: expected what planner export writes, got something else"
            f" ({type(error).__name__}: {error}); export the model again"
        ) from None


def _tensors(entries: Iterable[dict[str, object]]) -> tuple[TensorRecord, ...]:
    return tuple(
        TensorRecord(
            name=str(one["name"]),
            initializer=None if one["initializer"] is None else str(one["initializer"]),
            shape=tuple(int(size) for size in one["shape"]),  # type: ignore[attr-defined]
            dtype=str(one["dtype"]),
            requires_grad=one["requires_grad"] is True,
            aliases=tuple(str(alias) for alias in one["aliases"]),  # type: ignore[attr-defined]
        )
        for one in entries
    )
