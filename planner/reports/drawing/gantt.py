"""A timeline as a lane per device, and as rows of text: a picture for the terminal, without its
colours; `gantt_svg.py` draws the same lanes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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


def _kind_of(action: Action) -> Activity:
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
        yield Bar(_kind_of(event.action), event.start_s, event.end_s, label)


# An activity and the label of a cell, or the cells that show them.
_Shown = tuple[Activity, str]


def gantt(timeline: Timeline, width: int) -> dict[int, tuple[_Shown, ...]]:
    """The picture of each device: activities and the texts of their cells, from left to right. A
    cell shows the activity that takes most of its time, a transfer only where the device does
    nothing else. A computation bears its label where there is room.

    Args:
        width: the number of cells of a device, at least 1.
    """
    cell_s = timeline.iteration_s / width
    return {lane.device: tuple(_texts(lane, cell_s, width)) for lane in lanes(timeline)}


def _texts(lane: Lane, cell_s: float, width: int) -> Iterator[_Shown]:
    shares: list[dict[_Shown, float]] = [defaultdict(float) for _ in range(width)]
    moving_s = [0.0] * width
    for bar in lane.actions:
        for cell, share_s in _cells(bar, cell_s, width):
            shares[cell][bar.kind, bar.label] += share_s
    for bar in lane.transfers:
        for cell, share_s in _cells(bar, cell_s, width):
            moving_s[cell] += share_s
    shown = (_most(*cell, cell_s) for cell in zip(shares, moving_s, strict=True))
    for (kind, label), cells in groupby(shown):
        length = len(list(cells))
        yield kind, (label if len(label) <= length else "").ljust(length, SIGNS[kind])


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
