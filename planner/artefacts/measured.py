"""`MeasuredRow`: a line of a table of measured iterations, and the reader of such tables.

A table is a CSV file whose first line names the columns, such as

    t,d,p,microbatch,batch,time
    1,8,1,2,64,2.46 s
    2,2,2,2,64,2.61 s

`COLUMNS` has all of them. Each line is one run: its degrees, its samples, and what an iteration
took, from its first forward to its last step. A line that begins with # is a comment.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Any

from planner.artefacts.options import Optimizer, Recompute
from planner.artefacts.profile import MAX_SECONDS
from planner.support.errors import FileError, UnitError, shown
from planner.support.reading import read_text
from planner.support.units import parse_seconds

MAX_COUNT = 2**31
MAX_ROWS = 10_000
FORM = "a table of measured iterations"
ADVICE = "expected a line of columns such as t,d,p,microbatch,batch,time, and one for each run"


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measured iteration.

    Attributes:
        line: of the file; the first one has the columns.
        tensor, data, pipeline: degrees; their product is the number of devices.
        microbatch: samples in a microbatch.
        batch: samples in an iteration.
        time_s: of an iteration.
        recompute: whether forwards ran twice.
        over_replicas: what the copies kept in parts, as `--over-replicas` has it.
        sequence_parallel: whether operators between products were split along the sequence.
        optimizer: of the training.
        model: name of its ONNX file without the ending; "" for the only one.
    """

    line: int
    tensor: int
    data: int
    pipeline: int
    microbatch: int
    batch: int
    time_s: float
    recompute: Recompute = Recompute.NONE
    over_replicas: int = 0
    sequence_parallel: bool = False
    optimizer: Optimizer = Optimizer.ADAM
    model: str = ""

    @property
    def num_devices(self) -> int:
        """Devices that it ran on."""
        return self.tensor * self.data * self.pipeline

    @property
    def name(self) -> str:
        """For reports and messages."""
        degrees = f"t {self.tensor}, d {self.data}, p {self.pipeline}"
        return f"line {self.line}: {degrees}, {self.microbatch} of {self.batch}"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:20]) <= MAX_COUNT:
        raise ValueError("a whole number above 0")
    return int(text)


def _level(text: str) -> int:
    if text not in ("0", "1", "2", "3"):
        raise ValueError("0, 1, 2 or 3")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def _recompute(text: str) -> Recompute:
    if text not in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL):
        raise ValueError("none, selective or full")
    return Recompute(text)


def _optimizer(text: str) -> Optimizer:
    if text not in tuple(Optimizer):
        raise ValueError(f"one of {', '.join(Optimizer)}")
    return Optimizer(text)


def _with_unit(text: str) -> float:
    try:
        return _positive(parse_seconds(text))
    except UnitError:
        raise ValueError(
            'a time above 0 with its unit, such as "372 ms" (or numbers in a column time_s or'
            " time_ms)"
        ) from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    return _positive(value)


def _milliseconds(text: str) -> float:
    return _number(text) / 1000


def _positive(value: float) -> float:
    if not (isfinite(value) and 0 < value <= MAX_SECONDS):
        raise ValueError("a time above 0")
    return value


COUNTS: Mapping[str, str] = {
    "t": "tensor", "d": "data", "p": "pipeline", "microbatch": "microbatch", "batch": "batch",
}  # fmt: skip
"""Columns that every table has, and their fields."""
TIMES: Mapping[str, Callable[[str], float]] = {
    "time": _with_unit, "time_s": _number, "time_ms": _milliseconds,
}  # fmt: skip
"""A table has one of these columns."""
OTHERS: Mapping[str, Callable[[str], Any]] = {
    "recompute": _recompute,
    "over_replicas": _level,
    "sequence_parallel": _flag,
    "optimizer": _optimizer,
    "model": str,
}
"""Columns that a table may have, with the names of their fields. An empty cell is as no column."""
COLUMNS = (*COUNTS, *TIMES, *OTHERS)


def read_measured(path: Path) -> tuple[MeasuredRow, ...]:
    """The rows of a table.

    Raises:
        FileError: if the file is missing or no table, with all that is wrong in it.
    """
    lines = _lines(path)
    head = lines[0][1]
    if wrong := list(_wrong_columns(head)):
        raise FileError("\n".join(f"{path}: {one}" for one in wrong))
    if not 1 <= len(lines) - 1 <= MAX_ROWS:
        raise FileError(f"{path}: expected 1 to {MAX_ROWS:,} runs, got {len(lines) - 1:,}")
    rows: list[MeasuredRow] = []
    for number, cells in lines[1:]:
        row, problems = _row(number, head, cells)
        wrong += [f"{path}: line {number}: {one}" for one in problems]
        rows += [] if row is None else [row]
    if wrong:
        raise FileError("\n".join(wrong))
    return tuple(rows)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The numbers and cells of the lines that are neither empty nor comments; at least one."""
    reader = csv.reader(StringIO(read_text(path, FORM, ADVICE).removeprefix("\ufeff")))
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise FileError(f"{path}: line {reader.line_num}: {error}; {ADVICE}") from None
    written = [(n, cells) for n, cells in lines if any(cells) and not cells[0].startswith("#")]
    return written or [(1, [])]


def _wrong_columns(head: list[str]) -> Iterator[str]:
    if missing := [name for name in COUNTS if name not in head]:
        yield f"there is no column {', '.join(missing)}; {ADVICE}"
    times = [name for name in TIMES if name in head]
    if len(times) != 1:
        yield f"expected one of the columns {', '.join(TIMES)}, got {', '.join(times) or 'none'}"
    for name in dict.fromkeys(head):
        if name not in COLUMNS:
            yield f"unknown column {shown(name)}; known: {', '.join(COLUMNS)}"
        elif head.count(name) > 1:
            yield f"column {name!r} is there {head.count(name)} times"


def _row(number: int, head: list[str], cells: list[str]) -> tuple[MeasuredRow | None, list[str]]:
    """A row, or what is wrong with it."""
    if len(cells) != len(head):
        return None, [f"expected {len(head)} cells, got {len(cells)}"]
    fields: dict[str, Any] = {}
    wrong = []
    for name, text in zip(head, cells, strict=True):
        if name in OTHERS and not text:
            continue
        parse = OTHERS.get(name) or TIMES.get(name) or _count
        try:
            fields["time_s" if name in TIMES else COUNTS.get(name, name)] = parse(text)
        except ValueError as error:
            wrong.append(f"{name}: expected {error}, got {shown(text)}")
    if wrong:
        return None, wrong
    row = MeasuredRow(line=number, **fields)
    if row.batch % (row.microbatch * row.data):
        each = f"{row.data} x {row.microbatch}"
        return None, [f"batch: expected a multiple of d x microbatch, {each}, got {row.batch}"]
    return row, []
