"""A line of JSON for each step and each evaluation, on rank 0.

    {"format": "planner-log/1"}
    {"step": 1, "loss": 2.31, "lr": 0.01, "s": 0.052}
    {"step": 100, "evaluation": {"loss": 0.41, "accuracy": 0.88}}

Steps are counted from 1; "norm", "scale" and "skipped" are there where they are known. A step in
which no target counts is skipped, and has "counted": 0. A number that is not finite is null,
because JSON has no other.
"""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from planner.launcher.updates import StepResult
from planner.support.errors import FileError
from planner.support.outputs import FileKind, head_of
from planner.training.evaluation import Evaluation

FORMAT = "planner-log/1"
_HEAD = json.dumps({"format": FORMAT})
LOG_FILE = FileKind("a log", lambda path: head_of(path).startswith(_HEAD))


class Log:
    """Writes lines, each of which is in the file when the next step begins.

    Args:
        path: of the file.
        done: number of steps that are done. Their lines stay, and those of later steps, which are
            done again, go. With none the file begins anew.

    Raises:
        FileError: if it cannot be written.
    """

    def __init__(self, path: Path, done: int) -> None:
        try:
            kept = _lines_up_to(done, path) if done and path.exists() else []
            self._file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
        self._file.writelines(kept)
        if not kept:
            self._write({"format": FORMAT})

    def step(self, done: int, result: StepResult, seconds: float) -> None:
        """A step that is done.

        Args:
            done: number of steps done.
            result: of the step.
            seconds: it took.
        """
        line: dict[str, object] = {"step": done, "loss": result.loss, "lr": result.rate}
        if result.norm is not None:
            line["norm"] = result.norm
        if result.scale != 1:
            line["scale"] = result.scale
        if result.skipped:
            line["skipped"] = True
        if not result.counted:
            line["counted"] = 0
        self._write({**line, "s": round(seconds, 6)})

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation after a step."""
        figures = {name: _known(value) for name, value in evaluation.figures.items()}
        self._write({"step": evaluation.step, "evaluation": figures})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        known = {name: _known(value) for name, value in line.items()}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()


def _known(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_up_to(done: int, path: Path) -> list[str]:
    """The lines of a log that are no later than some steps. A line that was cut off goes."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        with suppress(ValueError):
            plain = json.loads(line)
            if isinstance(plain, dict) and plain.get("step", 0) <= done and line.endswith("\n"):
                kept.append(line)
    return kept
