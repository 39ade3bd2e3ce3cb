"""A line of JSON for each step and each evaluation, on rank 0.

    {"format": "planner-log/1"}
    {"step": 1, "loss": 2.31, "lr": 0.01, "s": 0.052}
    {"step": 100, "evaluation": {"loss": 0.41, "accuracy": 0.88}}

Steps are counted from 1; "norm", "scale" and "skipped" are there where they are known. A number
that is not finite is null, because JSON has no other.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from planner.launcher.updates import StepResult
from planner.support.errors import FileError
from planner.support.outputs import FileKind, head_of

FORMAT = "planner-log/1"
_HEAD = json.dumps({"format": FORMAT})
LOG_FILE = FileKind("a log", lambda path: head_of(path).startswith(_HEAD))


class Log:
    """Writes lines, each of which is in the file when the next step begins.

    Args:
        path: of the file.
        goes_on: whether lines are added to those that are there, as where a training is resumed.

    Raises:
        FileError: if it cannot be written.
    """

    def __init__(self, path: Path, *, goes_on: bool = False) -> None:
        try:
            adds = goes_on and path.exists()
            self._file: IO[str] = path.open("a" if adds else "w", encoding="utf-8")
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
        if not adds:
            self._write({"format": FORMAT})

    def step(self, step: int, update: StepResult, seconds: float) -> None:
        """A step that is done.

        Args:
            step: its index, from 0.
            update: what became of it.
            seconds: it took.
        """
        line: dict[str, object] = {"step": step + 1, "loss": update.loss, "lr": update.rate}
        if update.norm is not None:
            line["norm"] = update.norm
        if update.scale != 1:
            line["scale"] = update.scale
        if update.skipped:
            line["skipped"] = True
        self._write({**line, "s": round(seconds, 6)})

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """An evaluation after a step."""
        self._write({"step": step + 1, "evaluation": {n: _known(v) for n, v in figures.items()}})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        known = {name: _known(value) for name, value in line.items()}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()


def _known(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
