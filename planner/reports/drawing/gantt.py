"""A timeline as a lane per device, and as rows of text: a picture for the terminal, without its
colours; `gantt_svg.py` draws the same lanes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from planner.schedules.actions import Action, AllReduce, Compute, Direction, Step
from planner.simulator.timeline import Event, Timeline


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


class Bar(NamedTuple):
    """An activity of a device.

    Attributes:
        kind: what the device does.
        start_s, end_s: from the start of the iteration.
        label: of a computation, its microbatch; behind its stage if the device runs several.
    """

    kind: Activity
    start_s: float
    end_s: float
    label: str


class Lane(NamedTuple):
    """One device.

    Attributes:
        device: index into the topology.
        actions: the actions that occupy it, in the order of the timeline.
        transfers: to and from it; they may overlap.
    """

    device: int
    actions: tuple[Bar, ...]
    transfers: tuple[Bar, ...]


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


def lanes(timeline: Timeline) -> tuple[Lane, ...]:
    """The activities of each device, by its index."""
    events: dict[int, list[Event]] = {event.device: [] for event in timeline.events}
    transfers: dict[int, list[Bar]] = {}
    for event in timeline.events:
        events[event.device].append(event)
    for transfer in timeline.transfers:
        bar = Bar(Activity.TRANSFER, transfer.start_s, transfer.end_s, "")
        transfers.setdefault(transfer.source, []).append(bar)
        transfers.setdefault(transfer.target, []).append(bar)
    return tuple(
        Lane(device, tuple(_actions(events.get(device, ()))), tuple(transfers.get(device, ())))
        for device in sorted({*events, *transfers})
    )


def _actions(events: Sequence[Event]) -> Iterator[Bar]:
    """The activities of one device."""
    stages = {event.action.stage for event in events if isinstance(event.action, Compute)}
    for event in events:
        label = ""
        if isinstance(event.action, Compute):
            stage = f"{event.action.stage}:" if len(stages) > 1 else ""
            label = f"{stage}{event.action.microbatch}"
        yield Bar(kind_of(event.action), event.start_s, event.end_s, label)


# The content of a cell: an activity and its label.
_Shown = tuple[Activity, str]


def gantt(timeline: Timeline, width: int) -> tuple[GanttRow, ...]:
    """The picture, by device. A cell shows the activity that takes most of its time, a transfer
    only where the device does nothing else. A computation bears its label where there is room.

    Args:
        width: the number of cells in a row, at least 1.
    """
    cell_s = timeline.iteration_s / width
    return tuple(_row(lane, cell_s, width) for lane in lanes(timeline))


def _row(lane: Lane, cell_s: float, width: int) -> GanttRow:
    shares: list[dict[_Shown, float]] = [defaultdict(float) for _ in range(width)]
    moving_s = [0.0] * width
    for bar in lane.actions:
        for cell, share_s in _cells(bar, cell_s, width):
            shares[cell][bar.kind, bar.label] += share_s
    for bar in lane.transfers:
        for cell, share_s in _cells(bar, cell_s, width):
            moving_s[cell] += share_s
    shown = (_most(*cell, cell_s) for cell in zip(shares, moving_s, strict=True))
    runs = ((content, len(list(same))) for content, same in groupby(shown))
    return GanttRow(lane.device, tuple(_segment(content, length) for content, length in runs))


def _cells(bar: Bar, cell_s: float, width: int) -> Iterator[tuple[int, float]]:
    """The cells that an activity touches, and its share in each, in s."""
    if cell_s <= 0.0:
        return
    first, last = int(bar.start_s / cell_s), int(bar.end_s / cell_s)
    for cell in range(max(0, first), min(width - 1, last) + 1):
        share_s = min(bar.end_s, (cell + 1) * cell_s) - max(bar.start_s, cell * cell_s)
        if share_s > 0.0:
            yield cell, share_s


def _most(shares: Mapping[_Shown, float], moving_s: float, cell_s: float) -> _Shown:
    """The content of a cell: of equally long activities, the first one. Transfers count where they
    fill at least half of the time without actions.
    """
    idle_s = max(0.0, cell_s - sum(shares.values()))
    transfers = idle_s > 0.0 and moving_s >= idle_s / 2
    rest = (Activity.TRANSFER if transfers else Activity.IDLE, "")
    return max([*shares.items(), (rest, idle_s)], key=itemgetter(1))[0]


def _segment(shown: _Shown, length: int) -> Segment:
    kind, label = shown
    text = label if len(label) <= length else ""
    return Segment(kind, text.ljust(length, SIGNS[kind]))
