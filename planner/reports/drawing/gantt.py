"""A timeline as rows of text, one per device: a picture for the terminal, without its colours."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from planner.schedules.actions import Action, AllReduce, Compute, Direction, Step
from planner.simulator.timeline import Timeline


class Activity(StrEnum):
    """The activities of a device that have a colour and a sign of their own."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SUM = "all-reduce"
    STEP = "step"
    POST = "posting"
    TRANSFER = "transfer"
    IDLE = "idle"


# The signs that fill a cell behind the number of its microbatch.
SIGNS: Mapping[Activity, str] = {
    Activity.FORWARD: "-", Activity.BACKWARD: "=", Activity.SUM: "+", Activity.STEP: "o",
    Activity.POST: "'", Activity.TRANSFER: "~", Activity.IDLE: " ",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Segment:
    """Cells of a row that show the same thing."""

    kind: Activity
    text: str


@dataclass(frozen=True, slots=True)
class GanttRow:
    """One device.

    Attributes:
        device: index into the topology.
        segments: from left to right; their texts are as long as the picture is wide.
    """

    device: int
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """The row without colours."""
        return "".join(segment.text for segment in self.segments)


def kind_of(action: Action) -> Activity:
    """The kind of an action that occupies its device."""
    match action:
        case Compute(Direction.FORWARD):
            return Activity.FORWARD
        case Compute():
            return Activity.BACKWARD
        case AllReduce():
            return Activity.SUM
        case Step():
            return Activity.STEP
        case _:
            return Activity.POST


# The content of a cell: the kind, and the stage and microbatch of a computation, else -1.
_Shown = tuple[Activity, int, int]


def gantt(timeline: Timeline, width: int) -> tuple[GanttRow, ...]:
    """The picture, by device. A cell shows the activity that takes most of its time, a transfer
    only where the device does nothing else. A computation bears the number of its microbatch where
    there is room, behind the number of its stage where the device runs several.

    Args:
        width: the number of cells in a row, at least 1.
    """
    cell_s = timeline.iteration_s / width
    devices = {event.device for event in timeline.events}
    devices |= {
        end for transfer in timeline.transfers for end in (transfer.source, transfer.target)
    }
    shares: dict[int, list[dict[_Shown, float]]] = {
        device: [defaultdict(float) for _ in range(width)] for device in devices
    }
    moving = {device: [0.0] * width for device in devices}
    stages: dict[int, set[int]] = defaultdict(set)
    for event in timeline.events:
        stage, microbatch = -1, -1
        if isinstance(event.action, Compute):
            stage, microbatch = event.action.stage, event.action.microbatch
            stages[event.device].add(stage)
        for cell, share_s in _cells(event.start_s, event.end_s, cell_s, width):
            shares[event.device][cell][kind_of(event.action), stage, microbatch] += share_s
    for transfer in timeline.transfers:
        for cell, share_s in _cells(transfer.start_s, transfer.end_s, cell_s, width):
            for device in (transfer.source, transfer.target):
                moving[device][cell] += share_s
    rows = []
    for device in sorted(devices):
        cells = zip(shares[device], moving[device], strict=True)
        shown = [_most(share, moved_s, cell_s) for share, moved_s in cells]
        several = len(stages[device]) > 1
        runs = [(content, len(list(some))) for content, some in groupby(shown)]
        segments = (_segment(content, length, several) for content, length in runs)
        rows.append(GanttRow(device, tuple(segments)))
    return tuple(rows)


def _cells(
    start_s: float, end_s: float, cell_s: float, width: int
) -> Iterator[tuple[int, float]]:  # fmt: skip
    """The cells that a time span touches, and its share in each, in s."""
    if cell_s <= 0.0:
        return
    first, last = int(start_s / cell_s), int(end_s / cell_s)
    for cell in range(max(0, first), min(width - 1, last) + 1):
        share_s = min(end_s, (cell + 1) * cell_s) - max(start_s, cell * cell_s)
        if share_s > 0.0:
            yield cell, share_s


def _most(shares: Mapping[_Shown, float], moving_s: float, cell_s: float) -> _Shown:
    """The content of a cell: of equally long activities, the first one."""
    idle_s = max(0.0, cell_s - sum(shares.values()))
    rest: _Shown = (Activity.TRANSFER if moving_s >= idle_s / 2 > 0.0 else Activity.IDLE, -1, -1)
    return max([*shares.items(), (rest, idle_s)], key=lambda one: one[1])[0]


def _segment(shown: _Shown, length: int, several: bool) -> Segment:
    kind, stage, microbatch = shown
    name = "" if microbatch < 0 else f"{stage}:{microbatch}" if several else str(microbatch)
    text = name if len(name) <= length else ""
    return Segment(kind, text.ljust(length, SIGNS[kind]))
