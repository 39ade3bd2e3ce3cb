"""Trace files of the planner, predicted or measured -> `Trace`.

They have the format that `write.py` writes. Slices of other categories are skipped: a file may hold
more for people to look at.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

from planner.artefacts.files import plan_from_plain, to_plain
from planner.artefacts.graph import MAX_BYTES
from planner.artefacts.plan import Plan
from planner.artefacts.profile import MAX_SECONDS
from planner.artefacts.strict import parsed_json
from planner.schedules.actions import AllReduce, Direction, parse
from planner.simulator.timeline import Event, Timeline, Transfer
from planner.simulator.traces.write import COMPUTE, SUMS, TRACE_FORMAT, TRANSFER
from planner.support.errors import FileError, shown
from planner.support.reading import MAX_TRACE_BYTES, read_text

ADVICE = (
    "make one with: planner launch strategy.json --trace trace.json, or"
    " planner simulate strategy.json --trace trace.json"
)
_Record = Mapping[str, Any]
MIN_SECONDS = 1e-9  # of an iteration, which errors are shares of
MAX_NUMBER = 2**31 - 1
"""Of devices, tracks, stages, microbatches and all-reduces."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file.

    Attributes:
        timeline: the timeline of one iteration.
        names: names of its devices, by index.
        plan: the plan that was run, in a measured trace; else None.
    """

    timeline: Timeline
    names: Mapping[int, str]
    plan: Plan | None


def measured_by(plan: Plan) -> dict[str, Any]:
    """The entries that a measured trace has besides its timeline: the plan that was run."""
    return {"plan": to_plain(plan)}


def read_trace(path: Path) -> Trace:
    """The trace in a file.

    Raises:
        FileError: if it is missing, no trace of the planner, or malformed.
    """
    form = f"a trace of the planner, {TRACE_FORMAT}"
    try:
        plain = parsed_json(read_text(path, form, ADVICE, MAX_TRACE_BYTES))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: expected {form}, this is no JSON: {error}; {ADVICE}") from None
    about = plain.get("otherData") if isinstance(plain, dict) else None
    if not isinstance(about, dict) or about.get("format") != TRACE_FORMAT:
        raise FileError(f"{path}: expected {form}; {ADVICE}")
    records, iteration_s = plain.get("traceEvents"), about.get("iteration_s")
    if not isinstance(records, list):
        raise FileError(f"{path}: traceEvents: expected a list, got {shown(records)}")
    if not _is_number(iteration_s) or not MIN_SECONDS <= iteration_s <= MAX_SECONDS:
        raise FileError(
            f"{path}: otherData.iteration_s: expected a time of 1 ns to 1e9 s, got"
            f" {shown(iteration_s)}"
        )
    reader = _Reader(path, records)
    plan = about.get("plan")
    return Trace(
        timeline=Timeline(
            iteration_s=float(iteration_s),
            events=tuple(sorted(reader.events, key=lambda e: (e.start_s, e.device))),
            transfers=tuple(
                sorted(reader.transfers, key=lambda f: (f.start_s, f.source, f.target))
            ),
            memory={device: tuple(points) for device, points in reader.memory.items()},
        ),
        names=reader.names,
        plan=None if plan is None else plan_from_plain(plan, path),
    )


class _Reader:
    """Reads the records of a file into names, events, transfers and memory."""

    def __init__(self, path: Path, records: list[Any]) -> None:
        self.names: dict[int, str] = {}
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []
        self.memory: dict[int, list[tuple[float, int]]] = {}
        self._tracks: dict[tuple[int, int], str] = {}
        # Headers first, because they may be anywhere, and the other records refer to them.
        for read in (self._header, self._record):
            for i, record in enumerate(records):
                try:
                    read(record)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    what = f"no {error}" if isinstance(error, KeyError) else str(error)
                    raise FileError(f"{path}: traceEvents[{i}]: {what}; {ADVICE}") from None

    def _header(self, record: _Record) -> None:
        if record["ph"] == "M" and record["name"] == "process_name":
            name, device = str(record["args"]["name"]), _integer(record, "pid") - 1
            if name in self.names.values():
                raise ValueError(f"expected one process {name!r}, got another one")
            self.names[device] = name
        elif record["ph"] == "M" and record["name"] == "thread_name":
            track = _integer(record, "pid"), _integer(record, "tid")
            self._tracks[track] = str(record["args"]["name"])

    def _record(self, record: _Record) -> None:
        if record["ph"] == "X" and record.get("cat") in (COMPUTE, SUMS):
            self._event(record, record["name"])
        elif record["ph"] == "X" and record.get("cat") == TRANSFER:
            self._flow(record, record["name"])
        elif record["ph"] == "C" and record["name"] == "memory":
            point = _time_us(record, "ts") / 1e6, _integer(record["args"], "bytes", MAX_BYTES)
            self.memory.setdefault(self._device(record), []).append(point)

    def _device(self, record: _Record) -> int:
        device = _integer(record, "pid") - 1
        if device not in self.names:
            raise ValueError(f"process {device + 1} has no name")
        return device

    def _event(self, record: _Record, word: str) -> None:
        if any(len(digits) > 9 for digits in re.findall(r"\d+", word.partition(":")[0])):
            raise ValueError(f"{word!r:.60} is no action")
        action = parse(word)
        if isinstance(action, AllReduce) != (record["cat"] == SUMS):
            raise ValueError(f"{word!r} is in a track of {record['cat']}")
        self.events.append(Event(self._device(record), action, *_span(record)))

    def _flow(self, record: _Record, name: str) -> None:
        """Reads a transfer. The file has it at both its ends; the one at the receiver counts."""
        number = _integer(record, "pid"), _integer(record, "tid")
        if number not in self._tracks:
            raise ValueError(f"track {number[1]} of process {number[0]} has no name")
        track = self._tracks[number]
        if not track.startswith("from "):
            return
        sender = track.removeprefix("from ")
        source = next((d for d, known in self.names.items() if known == sender), None)
        microbatch, _, tensor = name.partition(":")
        if source is None or not tensor or not _is_count(microbatch):
            raise ValueError(f"{name!r} from {sender!r} is no transfer between devices of the file")
        direction = Direction.BACKWARD if tensor.startswith("d/") else Direction.FORWARD
        start_s, end_s = _span(record)
        self.transfers.append(
            Transfer(
                source, self._device(record), direction, int(microbatch),
                tensor.removeprefix("d/") if direction is Direction.BACKWARD else tensor,
                start_s, end_s, _integer(record["args"], "bytes", MAX_BYTES),
            )
        )  # fmt: skip


def _span(record: _Record) -> tuple[float, float]:
    """Start and end, in s."""
    start_us, length_us = _time_us(record, "ts"), _time_us(record, "dur")
    return start_us / 1e6, (start_us + length_us) / 1e6


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, float):
        return isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def _time_us(record: _Record, name: str) -> float:
    """A time in us."""
    value = record[name]
    if not _is_number(value) or not abs(value) <= 1e6 * MAX_SECONDS:
        raise ValueError(f"{name}: expected a time in us, got {shown(value)}")
    return float(value)


def _integer(record: _Record, name: str, most: int = MAX_NUMBER) -> int:
    """A number of things, from 0 on."""
    value = record[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name}: expected 0 to {most}, got {shown(value)}")
    return value
