"""When each part of a pass of a split stage starts and ends: operators on one stream, collectives
on another one, by the rule of `resharding/overlap.py`.

    a collective starts when what it converts is there and its stream is free
    an operator starts when the one before has ended, and the collectives that it reads
    a pass ends with the last of both

Collectives that operators wait for on the spot (statistics, losses) are in the same queue. Where
collectives are work for the cores that compute, too (`stage_pass.sums_overlap_compute`), nothing
runs beside them, so that all times add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.costs.local_stage import LocalStage
from planner.resharding.overlap import PassOrder


@dataclass(frozen=True, slots=True)
class SideDurations:
    """Durations of a forward or backward, in s; rows as in `LocalStage`.

    Attributes:
        compute: per row, of an operator alone.
        moved: per row, of the collectives of a resharding; of an operator in a backward, those that
            gather its parameters again.
        asked: per row, of the collectives that an operator waits for on the spot.
        weights: per row, the part of `compute` in which an operator makes the gradients of its
            parameters.
    """

    compute: Sequence[float]
    moved: Sequence[float]
    asked: Sequence[float]
    weights: Sequence[float]


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Times of a forward or backward since its start, in s; rows as in `LocalStage`.

    Attributes:
        moved: per row, start and end of its collectives in the queue; by resharding, or by operator
            that gathers its parameters again. Those that take no time are left out.
        asked: per row, the same of those that an operator waits for on the spot.
        end: per row, when an operator has ended, or in a backward when the gradient of a resharding
            is there.
        gradient: per row of an operator, when the gradients of its parameters are there.
        total: the end of the pass.
    """

    moved: Mapping[int, tuple[float, float]]
    asked: Mapping[int, tuple[float, float]]
    end: Sequence[float]
    gradient: Sequence[float]
    total: float


class _Streams:
    """The clocks of both streams.

    Args:
        beside: whether collectives run beside computations.
        rows: their number.
    """

    def __init__(self, rows: int, *, beside: bool) -> None:
        self.main = self.queue = 0.0
        self.moved: dict[int, tuple[float, float]] = {}
        self.asked: dict[int, tuple[float, float]] = {}
        self.ready, self.end, self.gradient = ([0.0] * rows for _ in range(3))
        self._beside = beside

    def start(self, row: int, duration: float) -> None:
        """Puts collectives into the queue; what sends nothing is done at once."""
        if not duration:
            self.ready[row] = self.main
            return
        begun = max(self.main, self.queue)
        self.queue = self.ready[row] = begun + duration
        self.moved[row] = begun, self.queue
        if not self._beside:
            self.main = self.queue

    def wait(self, row: int) -> None:
        """Goes on when the collectives of a row have ended."""
        self.main = max(self.main, self.ready[row])

    def ask(self, row: int, duration: float) -> None:
        """Runs collectives on the spot."""
        if duration:
            begun = max(self.main, self.queue)
            self.main = self.queue = begun + duration
            self.asked[row] = begun, self.main

    def times(self) -> PassTimes:
        """All that has run."""
        total = max(self.main, self.queue)
        return PassTimes(self.moved, self.asked, self.end, self.gradient, total)


def alone_times(
    forward_s: Sequence[float], backward_s: Sequence[float]
) -> "tuple[PassTimes, PassTimes]":
    """The times of the forward and the backward of operators without collectives.

    >>> [one.end for one in alone_times([1.0, 2.0], [3.0, 4.0])]
    [[1.0, 3.0], [7.0, 4.0]]
    """
    there = [*accumulate(forward_s)]
    back = [*accumulate(reversed(backward_s))][::-1]
    return PassTimes({}, {}, there, there, sum(forward_s)), PassTimes(
        {}, {}, back, back, sum(backward_s)
    )


def forward_times(
    local: LocalStage, order: PassOrder, durations: SideDurations, *, beside: bool,
    before: Sequence[tuple[int, float]] = (),
) -> PassTimes:  # fmt: skip
    """The times of a forward.

    Args:
        order: of the stage, which may be another one than that of the rows.
        durations: of the forward; a loss is asked for behind its operator, statistics before.
        beside: whether collectives run beside computations.
        before: collectives that are in the queue when the forward begins: the place of the operator
            that waits for each, and its duration.
    """
    streams, todo = _Streams(len(durations.compute), beside=beside), iter(order.order)
    waited, awaited = _waited_at(order), dict[int, float]()
    for place, duration in before:
        streams.queue += duration
        awaited[place] = streams.queue
    due = next(todo, None)
    for place, row in enumerate((*local.operator_rows, None)):
        while due is not None and order.start[due] == place:
            copy = local.copy_rows[due]
            streams.start(copy, durations.moved[copy])
            due = next(todo, None)
        for c in waited.get(place, ()):
            streams.wait(local.copy_rows[c])
        if row is None:
            break
        streams.main = max(streams.main, awaited.get(place, 0.0))
        if row not in local.losses:
            streams.ask(row, durations.asked[row])
        streams.main += durations.compute[row]
        if row in local.losses:
            streams.ask(row, durations.asked[row])
        streams.end[row] = streams.gradient[row] = streams.main
    return streams.times()


def backward_times(
    local: LocalStage, order: PassOrder, durations: SideDurations, *, beside: bool
) -> PassTimes:
    """The times of a backward, as `forward_times`."""
    streams = _Streams(len(durations.compute), beside=beside)
    started, late = _waited_at(order), _late(order)
    waits: dict[int, list[int]] = {}
    for c in order.order:
        waits.setdefault(order.start[c], []).append(c)
    count = len(local.operator_rows)
    for place in range(count, -1, -1):
        if place < count:
            _operator(streams, local, (order, durations), place, is_late=place in late)
        # The copies that are read first here: their gradients are complete.
        for c in reversed(started.get(place, ())):
            row = local.copy_rows[c]
            streams.start(row, durations.moved[row])
            for other in order.late.get(c, ()):
                at = local.operator_rows[other]
                streams.main += durations.weights[at]
                streams.gradient[at] = streams.main
        for c in reversed(waits.get(place, ())):
            streams.wait(local.copy_rows[c])
            streams.end[local.copy_rows[c]] = streams.main
    return streams.times()


def _operator(
    streams: _Streams,
    local: LocalStage,
    how: tuple[PassOrder, SideDurations],
    place: int,
    *,
    is_late: bool,
) -> None:
    """The backward of an operator, for one of `late` without the gradients of its parameters."""
    order, durations = how
    row = local.operator_rows[place]
    for other in order.again.get(place, ()):
        at = local.operator_rows[other]
        streams.start(at, durations.moved[at])
    if row in local.regathered:
        streams.wait(row)
    streams.ask(row, durations.asked[row])
    streams.main += durations.compute[row] - durations.weights[row] * is_late
    streams.end[row] = streams.gradient[row] = streams.main


def _waited_at(order: PassOrder) -> dict[int, list[int]]:
    """The reshardings by the place of their first reader, in the order in which they start."""
    found: dict[int, list[int]] = {}
    for c in order.order:
        found.setdefault(order.first[c], []).append(c)
    return found


def _late(order: PassOrder) -> frozenset[int]:
    """The operators of `PassOrder.late`."""
    return frozenset(place for places in order.late.values() for place in places)
