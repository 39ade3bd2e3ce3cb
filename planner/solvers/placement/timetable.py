"""How one microbatch runs through a placement: a list schedule of its forwards, then of its
backwards.

    (1) a device runs one operator at a time; an ordered pair of devices has a channel, for one
        transfer at a time
    (2) a tensor goes once to each other device that reads it; such a device sends one gradient
        back, when all of its readers there have run backward
    (3) the first backward starts when the last forward has ended
    (4) an idle device or channel takes, of the jobs that are ready, the one of the highest rank

Devices and channels are the places of jobs: (p, p) is device p, (p, q) the channel from p to q.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from planner.solvers.placement.problem import PlacementProblem, transfer_s


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
        place: where it runs.
        tensor: index of the tensor that is sent, -1 for an operator.
        then: the jobs that wait for it.
        waits_for: the number of jobs that have yet to end before it.
        rank: of the ready jobs of a place, the highest runs first.
    """

    place: tuple[int, int]
    duration_s: float
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
            jobs.append(_TimetableJob((p, q), transfer_s(problem, tensor.bytes, p, q), t))
            _link(jobs, first, [transfer])
            first = [transfer]
        _link(jobs, first, last)


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
    """Gives every job its start, from event to event.

    Only places where a job has ended or become ready since the last event can start one.
    """
    ready: dict[tuple[int, int], list[tuple[float, int]]] = {job.place: [] for job in jobs}
    for i, job in enumerate(jobs):
        if job.waits_for == 0:
            heappush(ready[job.place], (-job.rank, i))
    ending: list[tuple[float, int]] = []
    busy: set[tuple[int, int]] = set()
    clock_s, changed = begin_s, list(ready)
    while changed:
        for place in changed:
            if ready[place] and place not in busy:
                _, i = heappop(ready[place])
                busy.add(place)
                jobs[i].start_s = clock_s
                heappush(ending, (jobs[i].end_s, i))
        changed = []
        clock_s = ending[0][0] if ending else clock_s
        # All jobs that end now do so before any starts, so that ties do not depend on their order.
        while ending and ending[0][0] == clock_s:
            _, i = heappop(ending)
            busy.remove(jobs[i].place)
            changed.append(jobs[i].place)
            for j in jobs[i].then:
                jobs[j].waits_for -= 1
                if jobs[j].waits_for == 0:
                    heappush(ready[jobs[j].place], (-jobs[j].rank, j))
                    changed.append(jobs[j].place)
