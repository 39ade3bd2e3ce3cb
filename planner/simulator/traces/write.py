"""`Timeline` -> Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each device is a process with a track of computation, a track of the collectives inside of it where
stages are split, a track of all-reduces, a track per peer and direction of transfers, and a counter
of memory where it is known. An arrow leads from each send to
its receive. The format: "Trace Event Format", Google, 2016.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.artefacts.files import format_in
from planner.schedules.actions import AllReduce, Direction, text
from planner.simulator.collectives import TimedCollective
from planner.simulator.timeline import Timeline, Transfer
from planner.support.outputs import FileKind
from planner.support.reading import MAX_TRACE_BYTES
from planner.support.writing import write_atomically

_Record = dict[str, Any]
_Track = tuple[int, str]

TRACE_FORMAT = "planner-trace/1"
COMPUTE, SUMS, TRANSFER = "compute", "sums", "transfer"
INSIDE = "collectives"
TRACE_FILE = FileKind(
    "a trace", lambda path: format_in(path, MAX_TRACE_BYTES).startswith("planner-trace")
)


def chrome_trace(
    timeline: Timeline,
    names: Mapping[int, str],
    about: Mapping[str, Any] | None = None,
    inside: Sequence[TimedCollective] = (),
) -> dict[str, Any]:
    """The trace as the object that its JSON file holds; times in us, as the format requires.

    Args:
        timeline: the timeline.
        names: names of all devices in the timeline, by index.
        about: further entries of `otherData`, which viewers ignore.
        inside: collectives inside of computations.
    """
    tracks = _tracks(timeline, names, inside)
    records = [*_headers(tracks, names), *_actions(timeline, tracks)]
    for number, transfer in enumerate(timeline.transfers):
        records += _transfer(transfer, number, tracks, names)
    records += _memory(timeline)
    records += [
        _slice(one.name, INSIDE, one.start_s, one.end_s)
        | {"pid": _pid(one.device), "tid": tracks[one.device, INSIDE]}
        for one in inside
    ]
    other = {"format": TRACE_FORMAT, "iteration_s": timeline.iteration_s, **(about or {})}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": records}


def write_trace(
    timeline: Timeline,
    names: Mapping[int, str],
    path: Path,
    about: Mapping[str, Any] | None = None,
    inside: Sequence[TimedCollective] = (),
) -> None:
    """Writes the trace to a file, whole or not at all. Arguments are those of `chrome_trace`."""
    content = json.dumps(chrome_trace(timeline, names, about, inside), sort_keys=True)
    write_atomically(path, (content + "\n").encode())


def _pid(device: int) -> int:
    # Perfetto takes process 0 for the idle process of an operating system.
    return device + 1


def _tracks(
    timeline: Timeline, names: Mapping[int, str], inside: Sequence[TimedCollective]
) -> dict[_Track, int]:
    """The thread number of each track, by device and name; no two processes share one.

    Viewers sort tracks by their number: computation, collectives inside, all-reduces, then by peer
    its sends and its receives.
    """
    # (device, kind of track, order among tracks of this kind, name)
    tracks: set[tuple[int, int, int, str]] = set()
    for event in timeline.events:
        tracks.add((event.device, 0, 0, COMPUTE))
        if isinstance(event.action, AllReduce):
            tracks.add((event.device, 1, 0, SUMS))
    tracks |= {(one.device, 0, 1, INSIDE) for one in inside}
    for transfer in timeline.transfers:
        tracks.add((transfer.source, 2, 2 * transfer.target, _sending(transfer, names)))
        tracks.add((transfer.target, 2, 2 * transfer.source + 1, _receiving(transfer, names)))
    return {(device, name): tid for tid, (device, _, _, name) in enumerate(sorted(tracks), start=1)}


def _sending(transfer: Transfer, names: Mapping[int, str]) -> str:
    return f"to {names[transfer.target]}"


def _receiving(transfer: Transfer, names: Mapping[int, str]) -> str:
    return f"from {names[transfer.source]}"


def _headers(tracks: Mapping[_Track, int], names: Mapping[int, str]) -> Iterator[_Record]:
    for device in sorted({device for device, _ in tracks}):
        process = {"ph": "M", "pid": _pid(device)}
        yield process | {"name": "process_name", "args": {"name": names[device]}}
        yield process | {"name": "process_sort_index", "args": {"sort_index": device}}
    for (device, track), tid in tracks.items():
        thread = {"ph": "M", "pid": _pid(device), "tid": tid}
        yield thread | {"name": "thread_name", "args": {"name": track}}
        yield thread | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _slice(name: str, kind: str, start_s: float, end_s: float) -> _Record:
    # Rounded to ns first, or a slice might seem to end after the next one's start.
    start_us = _us(start_s)
    length_us = round(_us(end_s) - start_us, 3)
    return {"ph": "X", "name": name, "cat": kind, "ts": start_us, "dur": length_us}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _actions(timeline: Timeline, tracks: Mapping[_Track, int]) -> Iterator[_Record]:
    for event in timeline.events:
        kind = SUMS if isinstance(event.action, AllReduce) else COMPUTE
        place = {"pid": _pid(event.device), "tid": tracks[event.device, kind]}
        yield _slice(text(event.action), kind, event.start_s, event.end_s) | place


def _transfer(
    transfer: Transfer, number: int, tracks: Mapping[_Track, int], names: Mapping[int, str]
) -> Iterator[_Record]:
    """Two slices, one at either end, and the arrow between them."""
    gradient = transfer.direction is Direction.BACKWARD
    name = f"{transfer.microbatch}:{'d/' if gradient else ''}{transfer.tensor}"
    sender = transfer.source, _sending(transfer, names)
    receiver = transfer.target, _receiving(transfer, names)
    for end, mark in ((sender, "s"), (receiver, "f")):
        place = {"pid": _pid(end[0]), "tid": tracks[end]}
        body = _slice(name, TRANSFER, transfer.start_s, transfer.end_s)
        yield body | place | {"args": {"bytes": transfer.bytes}}
        # An arrow belongs to the slice around its time; the end says so by "bp".
        middle = {"ts": _us((transfer.start_s + transfer.end_s) / 2)}
        arrow = {"ph": mark, "id": number, "name": "transfer", "cat": "transfer"}
        yield arrow | place | middle | ({"bp": "e"} if mark == "f" else {})


def _memory(timeline: Timeline) -> Iterator[_Record]:
    for device, changes in sorted(timeline.memory.items()):
        for time_s, size_bytes in changes:
            count = {"ph": "C", "name": "memory", "pid": _pid(device), "ts": _us(time_s)}
            yield count | {"args": {"bytes": size_bytes}}
