"""What may be written: one function decides for all commands.

No input is overwritten, by whatever path or link it is named; no two outputs are one file; and a
file that is there already is replaced only if the planner has written one of the same kind, which
its content tells. So nothing foreign is lost by a slip of the hand.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from planner.support.errors import FileError, OptionError
from planner.support.writing import destination

MODEL_ENDING = ".onnx"
HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that the planner writes.

    Attributes:
        name: with its article, such as "a trace".
        recognise: what a file that is there holds, or True, if it is of this kind and the planner
            has written it; else None or False. The file is read once.
        is_model: whether it is an ONNX model, and may be named like one.
    """

    name: str
    recognise: Callable[[Path], object]
    is_model: bool = False


def check_outputs(
    written: Sequence[tuple[Path, FileKind]], read: Mapping[str, Path | None]
) -> list[object]:
    """Refuses to overwrite files that are read or foreign, and paths that cannot be written.

    Args:
        written: the files that will be written.
        read: the files that are read, by their meaning; None for those that were not given.

    Returns:
        For each file, what `FileKind.recognise` gives for the older one that will be replaced; None
        where there is no older one, or an empty one.

    Raises:
        OptionError: if a file would be overwritten that must not be.
        FileError: if a path cannot be written.
    """
    older = []
    for path, kind in written:
        for name, other in read.items():
            if other is not None and same_file(path, other):
                raise OptionError(
                    f"{path} is the {name} itself, and would be overwritten; choose another name"
                )
        if path.is_dir():
            raise OptionError(f"{path} is a folder; name a file in it")
        destination(path)
        older.append(_recognised(path, kind))
    for (one, first), (other, second) in combinations(written, 2):
        if same_file(one, other):
            raise OptionError(
                f"{other}: {first.name} and {second.name} would be one file; choose two names"
            )
    return older


def head_of(path: Path) -> str:
    """The first text of a file, by which its kind is known; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES).decode(errors="replace")
    except OSError:
        return ""


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, by links of either sort, or would, if it were there."""
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except FileNotFoundError:
        return False
    except (OSError, RuntimeError, ValueError):  # a link in a circle, or a name no file can have
        return one.absolute() == other.absolute()


def _recognised(path: Path, kind: FileKind) -> object:
    """What the older file at a path holds; None if there is none, or an empty one.

    Raises:
        OptionError: if it is not of this kind, or the planner has not written it.
        FileError: if the path cannot be read.
    """
    if path.suffix.lower() == MODEL_ENDING and not kind.is_model:
        raise OptionError(
            f"{path}: expected a name for {kind.name}, got that of an ONNX model; choose another"
            " ending"
        )
    try:
        is_empty = path.stat().st_size == 0
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    if is_empty:
        return None
    older = kind.recognise(path)
    if not older:
        raise OptionError(
            f"{path}: expected {kind.name} of the planner to overwrite, got another file; choose"
            " another name, or delete it"
        )
    return older
