"""How one microbatch runs through a placement: a list schedule of its forwards, then of its
backwards.

    (1) a device runs one operator at a time; an ordered pair of devices has a channel, for one
        transfer at a time; a transfer also waits for the shared links of its route, and occupies
        each as `links.py` says
    (2) a tensor goes once to each other device that reads it; such a device sends one gradient
        back, when all of its readers there have run backward
    (3) the first backward starts when the last forward has ended
    (4) of the jobs that are ready and find all that they need idle, the one of the highest rank
        starts

Devices, channels and links are the resources of jobs: (p, p) is device p, (p, q) the channel from p
to q, (LINK, l) shared link l.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from planner.solvers.placement.problem import (
    PlacementProblem,
    busy_s,
    links_of_pairs,
    transfer_s,
)

LINK = -1
"""In place of a device: the resource is a shared link."""


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """The transfer of a tensor, or of its gradient.

    Attributes:
        tensor: index into `PlacementProblem.tensors`.
        backward: whether it is the gradient.
        source: device that sends; target: device that receives.
        start_s: when it leaves; end_s: when it has arrived.
    """

    tensor: int
    backward: bool
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """The starts of all operators and transfers of one microbatch.

    Attributes:
        forward_start_s: per operator, of its forward; backward_start_s: of its backward.
        transfers: those of forwards first.
        latency_s: when the last backward ends.
    """

    forward_start_s: tuple[float, ...]
    backward_start_s: tuple[float, ...]
    transfers: tuple[TimedTransfer, ...]
    latency_s: float


def latency_s(
    problem: PlacementProblem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> float:
    """Time of one microbatch, forward and backward, under `timetable`, in s."""
    return timetable(problem, device_of, order).latency_s


def timetable(
    problem: PlacementProblem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> Timetable:
    """The list schedule of a placement.

    Args:
        device_of: device of each operator.
        order: operators by falling rank in the forwards, by rising rank in the backwards. Without
            it, the rank is the longest path to the end of the phase.
    """
    there = _phase(problem, device_of, order, backward=False, begin_s=0.0)
    turn_s = max(job.end_s for job in there)
    back_order = None if order is None else order[::-1]
    back = _phase(problem, device_of, back_order, backward=True, begin_s=turn_s)
    num = problem.num_operators
    return Timetable(
        forward_start_s=tuple(job.start_s for job in there[:num]),
        backward_start_s=tuple(job.start_s for job in back[:num]),
        transfers=tuple(
            TimedTransfer(job.tensor, backward, *job.place, job.start_s, job.end_s)
            for backward, phase in ((False, there), (True, back))
            for job in phase[num:]
        ),
        latency_s=max(job.end_s for job in back),
    )


@dataclass(slots=True)
class _TimetableJob:
    """An operator or a transfer.

    Attributes:
        place: the device (p, p), or the channel (p, q).
        links: shared links of a transfer, and the time for which it occupies each, in s.
        tensor: index of the tensor that is sent, -1 for an operator.
        then: the jobs that wait for it.
        waits_for: the number of jobs that have yet to end before it.
        rank: of the ready jobs that need a resource, the highest runs first.
    """

    place: tuple[int, int]
    duration_s: float
    links: tuple[tuple[int, float], ...] = ()
    tensor: int = -1
    then: list[int] = field(default_factory=list)
    waits_for: int = 0
    rank: float = 0.0
    start_s: float = 0.0

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def _phase(
    problem: PlacementProblem,
    device_of: Sequence[int],
    order: Sequence[int] | None,
    *,
    backward: bool,
    begin_s: float,
) -> list[_TimetableJob]:
    """All forwards, or all backwards, of a microbatch: N operators, then the transfers."""
    times = problem.backward_s if backward else problem.forward_s
    jobs = [_TimetableJob((p, p), float(times[i, p])) for i, p in enumerate(device_of)]
    for t, tensor in enumerate(problem.tensors):
        if tensor.gradient or not backward:
            _connect(problem, jobs, t, backward=backward)
    _rank(jobs, order)
    _run(jobs, begin_s)
    return jobs


def _connect(
    problem: PlacementProblem, jobs: list[_TimetableJob], t: int, *, backward: bool
) -> None:
    """Lets the readers of a tensor wait for it, or its producer for its gradients: (2)."""
    tensor = problem.tensors[t]
    home = jobs[tensor.producer].place[0]
    readers: dict[int, list[int]] = {}
    for j in tensor.consumers:
        readers.setdefault(jobs[j].place[0], []).append(j)
    for q, there in readers.items():
        first, last = (there, [tensor.producer]) if backward else ([tensor.producer], there)
        if q != home:
            p, q = (q, home) if backward else (home, q)
            transfer = len(jobs)
            jobs.append(_transfer(problem, t, p, q))
            _link(jobs, first, [transfer])
            first = [transfer]
        _link(jobs, first, last)


def _transfer(problem: PlacementProblem, t: int, p: int, q: int) -> _TimetableJob:
    """The transfer of a tensor, or of its gradient, from p to q."""
    size = problem.tensors[t].bytes
    links = (
        (link, busy_s(problem, problem.shared[link], size, p, q))
        for link in links_of_pairs(problem).get((p, q), ())
    )
    return _TimetableJob((p, q), transfer_s(problem, size, p, q), tuple(links), t)


def _link(jobs: list[_TimetableJob], first: Sequence[int], then: Sequence[int]) -> None:
    """Lets jobs wait for others."""
    for i in first:
        jobs[i].then.extend(then)
    for j in then:
        jobs[j].waits_for += len(first)


def _rank(jobs: list[_TimetableJob], order: Sequence[int] | None) -> None:
    """Ranks operators by their longest path to the end, or by a given order; a transfer has the
    rank of its most urgent reader.
    """
    turn = {i: float(len(jobs) - k) for k, i in enumerate(order or ())}
    waits_for = [job.waits_for for job in jobs]
    sequence = [i for i, count in enumerate(waits_for) if count == 0]
    for i in sequence:  # topological: it grows while it is walked
        for j in jobs[i].then:
            waits_for[j] -= 1
            if waits_for[j] == 0:
                sequence.append(j)
    for i in reversed(sequence):
        after = max((jobs[j].rank for j in jobs[i].then), default=0.0)
        jobs[i].rank = after + jobs[i].duration_s if order is None else turn.get(i, after)


def _run(jobs: list[_TimetableJob], begin_s: float) -> None:
    """Gives every job its start, from event to event: a resource becomes free, or jobs ready.

    An operator needs nothing but its device, so devices have their own queues. A transfer may need
    several resources, so all transfers are in one queue, and those that find one of theirs taken
    are passed over.
    """
    queues: dict[tuple[int, int], list[tuple[float, int]]] = {}
    transfers: list[tuple[float, int]] = []
    free_s: dict[tuple[int, int], float] = {}
    events: list[tuple[float, int]] = []

    def wait(i: int) -> None:
        """A job is ready."""
        key = (-jobs[i].rank, i)
        if jobs[i].tensor >= 0:
            insort(transfers, key)
        else:
            heappush(queues.setdefault(jobs[i].place, []), key)

    def begin(i: int, now_s: float) -> None:
        """A job starts: its end, and the ends of its links, are events."""
        jobs[i].start_s = now_s
        free_s[jobs[i].place] = jobs[i].end_s
        heappush(events, (jobs[i].end_s, i))
        for link, lasts_s in jobs[i].links:
            free_s[LINK, link] = now_s + lasts_s
            heappush(events, (now_s + lasts_s, -1))

    def idle(i: int, now_s: float) -> bool:
        """Whether all that a transfer needs is free."""
        needs = (jobs[i].place, *((LINK, link) for link, _ in jobs[i].links))
        return all(free_s.get(one, begin_s) <= now_s for one in needs)

    for i, job in enumerate(jobs):
        if job.waits_for == 0:
            wait(i)
    now_s = begin_s
    while True:
        for place, queue in queues.items():
            if queue and free_s.get(place, begin_s) <= now_s:
                begin(heappop(queue)[1], now_s)
        for key in list(transfers):
            if idle(key[1], now_s):
                transfers.remove(key)
                begin(key[1], now_s)
        if not events:
            return
        now_s = events[0][0]
        # All that ends now does so before any job starts, so that ties do not depend on its order.
        while events and events[0][0] == now_s:
            _, i = heappop(events)
            for j in jobs[i].then if i >= 0 else ():
                jobs[j].waits_for -= 1
                if jobs[j].waits_for == 0:
                    wait(j)
