"""When each part of a pass of a split stage starts and ends: operators on one stream, collectives
on another one, by the rule of `resharding/overlap.py`.

    a collective starts when what it converts is there and its stream is free
    an operator starts when the one before has ended, and the collectives that it reads
    a pass ends with the last of both

Collectives that operators wait for on the spot (statistics, losses) are in the same queue. Where
collectives are work for the cores that compute, too (`stage_pass.sums_overlap_compute`), nothing
runs beside them, so that all times add up.

A segment that is run again is a forward of its own, between the backwards of two operators. In it
operators whose results are held take no time.

An operator ends no earlier than the host has started its kernels (artefacts/clocks.py). Both clocks
start with the pass, as those of a launch do, which waits for the device behind each pass. Copies
between a device and its host's memory are on a third stream (`offloading.py`), which the device
waits for and the host does not. The time in which the host starts collectives and copies is left
out.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from planner.artefacts.segments import Segment
from planner.costs.local_stage import LocalStage
from planner.costs.offloading import NO_COPIES, CopyClock, HostCopies
from planner.resharding.overlap import PassOrder, Rerun
from planner.support.arrays import Floats

_Span = tuple[float, float]


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
        host: per row, in which the host starts the kernels of an operator.
    """

    compute: Sequence[float]
    moved: Sequence[float]
    asked: Sequence[float]
    weights: Sequence[float]
    host: Sequence[float]


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
        moved_again: as `moved`, of the segments that a backward runs again.
        asked_again: as `asked`, of these.
    """

    moved: Mapping[int, _Span]
    asked: Mapping[int, _Span]
    end: Sequence[float]
    gradient: Sequence[float]
    total: float
    moved_again: Mapping[int, _Span] = field(default_factory=dict)
    asked_again: Mapping[int, _Span] = field(default_factory=dict)


class TimedGather(NamedTuple):
    """A gather of parameters behind a step, beside the next forward.

    Attributes:
        start: the place of the operator in front of which it is started; 0 with the step, too.
        reader: the place of the operator that waits for it.
        duration: in s.
    """

    start: int
    reader: int
    duration: float


class _Streams:
    """The clocks of both streams, and of the host.

    Args:
        beside: whether collectives run beside computations.
        rows: their number.
    """

    def __init__(self, rows: int, *, beside: bool) -> None:
        self.main = self.queue = self.host = 0.0
        self.moved, self.asked = dict[int, _Span](), dict[int, _Span]()
        self.again = dict[int, _Span](), dict[int, _Span]()  # moved and asked in segments
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

    def compute(self, duration: float, host: float) -> None:
        """Runs an operator that the host starts."""
        self.host += host
        self.main = max(self.main + duration, self.host)

    def ask(self, row: int, duration: float) -> None:
        """Runs collectives on the spot."""
        if duration:
            begun = max(self.main, self.queue)
            self.main = self.queue = begun + duration
            self.asked[row] = begun, self.main

    def times(self) -> PassTimes:
        """All that has run."""
        total = max(self.main, self.queue)
        return PassTimes(self.moved, self.asked, self.end, self.gradient, total, *self.again)


def alone_times(
    device_s: Floats, host_s: Floats, segments: Sequence[Segment] = (),
    copies: HostCopies = NO_COPIES,
) -> tuple[PassTimes, PassTimes]:  # fmt: skip
    """The times of the forward and the backward of operators without collectives.

    Args:
        device_s: (2, n) forward and backward of each on the device.
        host_s: (2, n) in which the host starts their kernels.
        segments: that the backward runs again.
        copies: between the device and its host.

    >>> device_s, host_s = np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros((2, 2))
    >>> [one.end for one in alone_times(device_s, host_s)]
    [[1.0, 3.0], [7.0, 4.0]]
    >>> alone_times(device_s, host_s, [Segment(first=0, end=1, last=0)])[1].end
    [8.0, 4.0]
    >>> alone_times(device_s, host_s, [Segment(first=0, end=2, last=1, kept=(1,))])[1].end
    [8.0, 5.0]
    >>> [one.end for one in alone_times(device_s, np.array([[0.0, 4.0], [3.0, 3.0]]))]
    [[1.0, 4.0], [7.0, 4.0]]
    """
    count, last = device_s.shape[1], {one.last: one for one in segments}
    forward, backward = np.stack((device_s, host_s), axis=2).tolist()
    there, clock = _Streams(count, beside=True), CopyClock(copies)
    for v in range(count):
        there.compute(*forward[v])
        there.main = clock.behind(v, there.main)
        there.end[v] = there.gradient[v] = there.main
    there.main = clock.end(there.main)
    back, clock = _Streams(count, beside=True), CopyClock(copies)
    back.main = clock.begin(0.0)
    for v in reversed(range(count)):
        back.main = clock.before(v, back.main)
        for i in last[v].computed if v in last else ():
            back.compute(*forward[i])
        back.compute(*backward[v])
        back.end[v] = back.gradient[v] = back.main
    return there.times(), back.times()


def forward_times(
    local: LocalStage, order: PassOrder, durations: SideDurations, *, beside: bool,
    gathers: Sequence[TimedGather] = (), copies: HostCopies = NO_COPIES,
) -> PassTimes:  # fmt: skip
    """The times of a forward.

    Args:
        order: of the stage, which may be another one than that of the rows.
        durations: of the forward; a loss is asked for behind its operator, statistics before.
        beside: whether collectives run beside computations.
        gathers: those behind a step, in the order in which they are started.
        copies: between the device and its host.
    """
    streams, clock = _Streams(len(durations.compute), beside=beside), CopyClock(copies)
    awaited, todo = dict[int, float](), deque(gathers)
    starts = [(c, order.start[c]) for c in order.order]
    ahead = _Ahead(streams, local, durations, starts, order.first)
    for place, row in enumerate(local.operator_rows):
        while todo and todo[0].start <= place:
            one = todo.popleft()
            awaited[one.reader] = streams.queue = max(streams.main, streams.queue) + one.duration
        ahead.up_to(place)
        streams.main = max(streams.main, awaited.get(place, 0.0))
        ahead.run(row)
        streams.main = clock.behind(place, streams.main)
        streams.end[row] = streams.gradient[row] = streams.main
    ahead.up_to(len(local.operator_rows))
    streams.main = clock.end(streams.main)
    return streams.times()


class _Ahead:
    """A forward, of a whole stage or of one of its segments.

    Args:
        durations: of the forward.
        starts: reshardings in the order in which they are started, each with the place of the
            operator before which it is.
        first: as in `PassOrder`.
    """

    def __init__(
        self, streams: _Streams, local: LocalStage, durations: SideDurations,
        starts: Sequence[tuple[int, int]], first: Sequence[int],
    ) -> None:  # fmt: skip
        self._streams, self._local, self._durations = streams, local, durations
        self._todo = iter(starts)
        self._due = next(self._todo, None)
        self._waited: dict[int, list[int]] = {}
        for c, _ in starts:
            self._waited.setdefault(first[c], []).append(c)

    def up_to(self, place: int) -> None:
        """Starts the collectives before an operator, and waits for those that it reads."""
        while self._due is not None and self._due[1] == place:
            copy = self._local.copy_rows[self._due[0]]
            self._streams.start(copy, self._durations.moved[copy])
            self._due = next(self._todo, None)
        for c in self._waited.get(place, ()):
            self._streams.wait(self._local.copy_rows[c])

    def run(self, row: int, *, computes: bool = True) -> None:
        """Runs an operator.

        Args:
            computes: whether it is computed, and not only the collectives that it asks for.
        """
        asks_behind = row in self._local.losses
        if not asks_behind:
            self._streams.ask(row, self._durations.asked[row])
        if computes:
            self._streams.compute(self._durations.compute[row], self._durations.host[row])
        if asks_behind:
            self._streams.ask(row, self._durations.asked[row])


def backward_times(
    local: LocalStage, order: PassOrder, durations: SideDurations, *, beside: bool,
    ahead: SideDurations | None = None, copies: HostCopies = NO_COPIES,
) -> PassTimes:  # fmt: skip
    """The times of a backward, as `forward_times`.

    Args:
        ahead: durations of the forward, where segments of it are run again.
        copies: between the device and its host.
    """
    streams, clock = _Streams(len(durations.compute), beside=beside), CopyClock(copies)
    streams.main = clock.begin(0.0)
    started, late = _waited_at(order), _late(order)
    waits: dict[int, list[int]] = {}
    for c in order.order:
        waits.setdefault(order.start[c], []).append(c)
    count = len(local.operator_rows)
    for place in range(count, -1, -1):
        if place < count:
            _start_again(streams, local, (order, durations), place)
            streams.main = clock.before(place, streams.main)
            if ahead is not None and place in order.reruns:
                _run_again(streams, local, (order, ahead), order.reruns[place])
            _operator(streams, local, durations, place, is_late=place in late)
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


def _start_again(
    streams: _Streams, local: LocalStage, how: tuple[PassOrder, SideDurations], place: int
) -> None:
    """Starts to gather parameters again before the backward of an operator."""
    order, durations = how
    for other in order.again.get(place, ()):
        at = local.operator_rows[other]
        streams.start(at, durations.moved[at])


def _run_again(
    streams: _Streams, local: LocalStage, how: tuple[PassOrder, SideDurations], again: Rerun
) -> None:
    """A segment that is run again."""
    order, durations = how
    mine = streams.moved, streams.asked
    streams.moved, streams.asked = streams.again
    ahead = _Ahead(streams, local, durations, again.starts, order.first)
    for place in again.places:
        ahead.up_to(place)
        ahead.run(local.operator_rows[place], computes=place not in again.kept)
    streams.moved, streams.asked = mine


def _operator(
    streams: _Streams, local: LocalStage, durations: SideDurations, place: int, *, is_late: bool
) -> None:
    """The backward of an operator, for one of `late` without the gradients of its parameters."""
    row = local.operator_rows[place]
    if row in local.regathered:
        streams.wait(row)
    streams.ask(row, durations.asked[row])
    streams.compute(durations.compute[row] - durations.weights[row] * is_late, durations.host[row])
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
