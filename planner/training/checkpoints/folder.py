"""A folder with checkpoints, and the record of each.

    DIR/step-00000010/checkpoint.json    its record: what was trained, and the place of each tensor
                      __0_0.distcp ...   the tensors of rank 0, by torch.distributed.checkpoint
                      .metadata          that one's own index, for other programs
    DIR/.step-00000020.part/             being written, or cut off there

The record is written last, and only then does the folder get its name. A checkpoint is whole if
its record can be read and every file in it has the size that the record says.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.artefacts.files import artefact_bytes, read_artefact
from planner.artefacts.strict import parsed_json
from planner.support.errors import FileError
from planner.support.reading import read_text
from planner.support.writing import file_error

if TYPE_CHECKING:
    import torch

FORMAT = "planner-checkpoint/2"
_WHOLE_FORMAT = "planner-checkpoint/1"  # each tensor whole in one place
RECORD = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,12})")
_PART = re.compile(r"\.step-\d{8,12}\.(part|old)")
_FILES = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|checkpoint\.json")
MAX_SHOWN = 5


# Names of tensors begin so; the names of the model's parameters follow.
PARAMETERS, STATISTICS = "parameters/", "statistics/"
OPTIMIZER, RANDOM, DATA = "optimizer/", "random/", "data/"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a box of a tensor is in a checkpoint.

    Attributes:
        start: of the box in the whole tensor, in each dimension.
        shape: of the box.
        file: name of the file.
        offset: of its first byte.
        length: its bytes in the file, as torch.save writes it.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: of the whole tensor.
        dtype: torch's name of its type, such as "float32".
        parts: the places of boxes that have each element once.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorPlace, ...]

    @property
    def torch_dtype(self) -> "torch.dtype":
        """Its type."""
        import torch

        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def empty(self) -> "torch.Tensor":
        """A whole tensor to be filled."""
        import torch

        return torch.empty(self.shape, dtype=self.torch_dtype)


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint is of.

    Attributes:
        step: number of steps that were done.
        model_path: the ONNX file as seen from the folder with the checkpoints.
        model_hash: content hash of the model.
        tie, untie: initializers that the user tied and untied, see `planner.model.load`.
        optimizer: its name, see `content.optimizer_name`; None if nothing was trained.
        num_ranks: number of processes that trained.
        tensors: all tensors by name: PARAMETERS and a trained parameter; STATISTICS,
            a replica, / and a running statistic; OPTIMIZER, a parameter, / and the optimizer's word
            for that tensor; RANDOM, a rank, / and a generator; DATA and a rank, bytes of JSON.
        files: sizes of all files but the record, in bytes, by name.
        versions: of the software that wrote it.
        extras: whatever else a `Trainer` wants to have back.
    """

    step: int
    model_path: str
    model_hash: str
    tie: tuple[str, ...]
    untie: tuple[str, ...]
    optimizer: str | None
    num_ranks: int
    tensors: dict[str, SavedTensor]
    files: dict[str, int]
    versions: dict[str, str] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def trained(self) -> frozenset[str]:
        """The names of the parameters that were trained."""
        return frozenset(
            name.removeprefix(PARAMETERS) for name in self.tensors if name.startswith(PARAMETERS)
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
        path: its folder.
        record: what it is of.
        notes: why later ones were passed over, for people.
    """

    path: Path
    record: CheckpointRecord
    notes: tuple[str, ...] = ()

    @property
    def model_path(self) -> Path:
        """The ONNX file that was trained, there or not."""
        return self.path.absolute().parent / self.record.model_path


# -------------------------------------------------------------------------------- finding


def name_of(step: int) -> str:
    """The name of the checkpoint of a step.

    >>> name_of(10)
    'step-00000010'
    """
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint by its name; None if it is not named like one."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def named(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their steps, whole or not, ascending; none if it is not there.

    Raises:
        FileError: if it cannot be read.
    """
    try:
        paths = list(folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise FileError(
            f"{folder}: expected a folder with checkpoints, got: {error.strerror or error}; name"
            " another one"
        ) from None
    steps = {step: path for path in paths if (step := step_of(path)) is not None}
    return dict(sorted(steps.items()))


def read(path: Path) -> Checkpoint:
    """A checkpoint by its own folder.

    Raises:
        FileError: if it is cut off or damaged.
    """
    if not (path / RECORD).is_file():
        raise FileError(f"{path}: cut off: expected a file {RECORD} in it, got none")
    record = _record(path / RECORD)
    for name, size in record.files.items():
        file = path / name
        got = file.stat().st_size if file.is_file() else None
        if got != size:
            real = "no such file" if got is None else f"{got}"
            raise FileError(f"{path}: cut off: {name}: expected {size} bytes, got {real}")
    return Checkpoint(path, record)


def _record(path: Path) -> CheckpointRecord:
    """The record in a file, of this format or of the one before."""
    made_by = "planner launch --checkpoint DIR"
    text = read_text(path, FORMAT, f"make one with: {made_by}")
    with suppress(ValueError, RecursionError):  # told by `read_artefact`
        plain = parsed_json(text)
        if isinstance(plain, dict) and plain.get("format") == _WHOLE_FORMAT:
            text = json.dumps({**plain, "format": FORMAT, "tensors": _parted(plain.get("tensors"))})
    record: CheckpointRecord = read_artefact(CheckpointRecord, FORMAT, path, made_by, text)
    return record


def _parted(tensors: Any) -> Any:
    """The tensors of a record of the format before, with one place each."""
    if not isinstance(tensors, dict):
        return tensors
    parted = {}
    for name, plain in tensors.items():
        if isinstance(plain, dict) and isinstance(plain.get("shape"), list):
            place = {key: value for key, value in plain.items() if key != "dtype"}
            whole = {**place, "start": [0] * len(plain["shape"])}
            plain = {"shape": plain["shape"], "dtype": plain.get("dtype"), "parts": [whole]}
        parted[name] = plain
    return parted


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder that is whole; None if there is none."""
    found, _ = _newest(folder)
    return None if found is None else found.path


def find(path: Path) -> Checkpoint:
    """The checkpoint that a user names: itself, or the folder with it, of which the newest one that
    is whole is taken.

    Raises:
        FileError: if there is none.
    """
    if not path.exists():
        raise FileError(f"{path}: expected a folder with checkpoints, found none; check the path")
    if step_of(path.absolute()) is not None or (path / RECORD).exists():
        try:
            return read(path)
        except FileError as error:
            raise FileError(f"{error}; give {path.parent} to take the one before") from None
    found, flaws = _newest(path)
    if found is not None:
        notes = tuple(f"{flaw}; {found.path.name} is taken" for flaw in flaws)
        return Checkpoint(found.path, found.record, notes)
    if flaws:
        shown = flaws[:MAX_SHOWN]
        if len(flaws) > MAX_SHOWN:
            shown.append(f"and {len(flaws) - MAX_SHOWN} more")
        raise FileError("\n".join([*shown, f"{path}: no checkpoint in it is whole; start again"]))
    raise FileError(
        f"{path}: expected checkpoints such as {name_of(10)} in it, found none; check the path"
    )


def _newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and what is wrong with the ones after it."""
    flaws: list[str] = []
    for path in reversed(named(folder).values()):
        try:
            return read(path), flaws
        except FileError as error:
            flaws += str(error).splitlines()[:1]
    return None, flaws


# -------------------------------------------------------------------------------- writing


def begin(folder: Path, step: int) -> Path:
    """A new empty folder to fill, beside the checkpoints.

    Raises:
        FileError: if it cannot be made.
    """
    part = folder / f".{name_of(step)}.part"
    with file_error(folder):
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
    return part


def publish(part: Path, record: CheckpointRecord) -> Path:
    """Gives a filled folder its record, and then its name; an older one of that step goes.

    What a reader finds after a crash:

        before the record is on the disk    a part, which is no checkpoint, and the older one
        before the older one has gone       the same
        before the part has its name        no checkpoint of this step; the step before is taken
        after that                          the new one; its record and names are on the disk

    Raises:
        FileError: if it cannot be written, or something else stands there.
    """
    path = part.parent / name_of(record.step)
    with file_error(part.parent):
        with (part / RECORD).open("wb") as file:
            file.write(artefact_bytes(record, FORMAT))
            file.flush()
            os.fsync(file.fileno())
        _sync(part)
        discard(path)
        part.rename(path)
        _sync(part.parent)
    return path


def sizes(part: Path, needed: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the files in a folder that is filled.

    Args:
        needed: the least bytes of the files that the ranks have written, by name.

    Raises:
        FileError: if one is not here.
    """
    there = {path.name: path.stat().st_size for path in part.iterdir()}
    for name, least in needed.items():
        if there.get(name, -1) < least:
            raise FileError(
                f"{part.parent}: expected a folder that all hosts share, but {name}, which a rank"
                " has written, is not there on the host of rank 0; name a shared one"
            )
    return there


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest checkpoints that are whole; those to which somebody has added
    files stay.
    """
    kept = 0
    for path in reversed(named(folder).values()):
        if kept == keep:
            if not _foreign(path):
                discard(path)
            continue
        try:
            read(path)
        except FileError:
            continue  # one that is cut off stays until its step is saved again
        kept += 1


def tidy(folder: Path) -> None:
    """Removes the parts of checkpoints that killed runs have left.

    Raises:
        FileError: if one cannot be removed.
    """
    with file_error(folder):
        for path in folder.iterdir() if folder.exists() else ():
            if _PART.fullmatch(path.name):
                shutil.rmtree(path)


def discard(path: Path) -> None:
    """Removes a checkpoint, if it is there: at once by its name, then its files. So after a crash
    within it, the rest has a name that no reader takes, and `tidy` removes it.

    Raises:
        FileError: if it holds files that are none of a checkpoint.
    """
    if not path.exists():
        return
    if foreign := _foreign(path):
        raise FileError(
            f"{path}: holds {foreign[0]!r}, which is no part of a checkpoint, and would be removed;"
            " move it away"
        )
    old = path.with_name(f".{path.name}.old")
    if old.exists():
        shutil.rmtree(old)
    path.rename(old)
    shutil.rmtree(old)


def _foreign(path: Path) -> list[str]:
    """The names in the folder of a checkpoint that are none of its own."""
    return sorted(one.name for one in path.iterdir() if not _FILES.fullmatch(one.name))


def _sync(folder: Path) -> None:
    """Lets the names in a folder reach the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
