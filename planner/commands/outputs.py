"""The paths of what is written: nothing that is read may be overwritten, and what cannot be written
is refused before the work.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner import api
from planner.commands.printing import say
from planner.errors import OptionError

if TYPE_CHECKING:
    from planner.api import Plan, Profile


def check_output(written: Sequence[Path], read: Mapping[str, Path | None]) -> None:
    """Refuses to overwrite a file that is read, and paths that cannot be written.

    Args:
        written: the files that will be written.
        read: the files that are read, by what they are.
    """
    for path in written:
        if path.is_dir():
            raise OptionError(f"{path} is a folder; name a file in it")
        _check_writable(path)
        for name, other in read.items():
            if other is not None and path.resolve() == other.resolve():
                raise OptionError(
                    f"{path} is the {name} itself, and would be overwritten; choose another name"
                )


def _check_writable(path: Path) -> None:
    """Refuses a path in a folder that neither exists nor can be made, or that takes no files."""
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir():
        raise OptionError(f"{path}: cannot be written: {folder} is no folder; choose another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(
            f"{path}: cannot be written: the folder {folder} takes no files of yours;"
            " choose another one"
        )


def check_strategy_output(output: Path, read: Mapping[str, Path | None]) -> None:
    """The same for a strategy and for the annotated model beside it."""
    if output.suffix.lower() == ".onnx":
        raise OptionError(
            f"-o {output}: expected a name such as {output.with_suffix('.json')}; the annotated"
            " model is written beside the strategy and has the ending .onnx"
        )
    check_output([output], read)
    check_output([output.with_suffix(".onnx")], read)


def say_overwritten(path: Path, artefacts: "Sequence[Profile] | Plan") -> None:
    """Says on standard error what an older file answers, if that is another question."""
    line = api.other_question(path, artefacts)
    if line is not None:
        say(f"note: {line}", err=True)
