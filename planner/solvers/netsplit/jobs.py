"""The jobs of a schedule of NetSplit's full model: operators and transfers, the resources that they
occupy, how long the phase goes on behind each, and the earliest schedule of a given order.

Legend: i operator; t tensor; q the device that t is sent to, or its gradient from. A job is
(`OPERATOR`, i) or (t, q). A resource is a device (p, p), a channel (p, q) or a link (`LINK`, l).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.solvers.netsplit.model import (
    KnownPlacement,
    NetSplitInstance,
    TickSchedule,
    busy_ticks,
    canonical,
    grouped,
    relaxed_times,
    ticks_by_way,
    transfer_ticks,
)
from planner.solvers.placement.timetable import LINK, timetable

OPERATOR = -1
"""Instead of a tensor, in jobs that are operators."""

Job = tuple[int, int]
Resource = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PhaseJobs:
    """The jobs of a phase.

    Attributes:
        start: when each starts; ticks: how long each lasts.
        busy: ticks for which each occupies each of its resources, from its start on.
        tail: least ticks from the start of each to the end of the phase, if all jobs that start
            later keep their order on all resources.
        end: F or B.
    """

    start: Mapping[Job, int]
    ticks: Mapping[Job, int]
    busy: Mapping[Job, Mapping[Resource, int]]
    tail: Mapping[Job, int]
    end: int


def occupied_by(
    instance: NetSplitInstance, t: int, way: tuple[int, int]
) -> tuple[int, dict[Resource, int]]:
    """Ticks of a transfer of tensor t from p to q, and for how many it occupies each resource.

    Args:
        way: (p, q).
    """
    size = instance.problem.tensors[t].bytes
    ticks = transfer_ticks(instance, size, *way)
    links = {(LINK, k): busy for k, busy in busy_ticks(instance, size, *way)}
    return ticks, {way: ticks, **links}


def _occupied(
    instance: NetSplitInstance, device_of: Sequence[int], job: Job, *, backward: bool
) -> tuple[int, dict[Resource, int]]:
    """`occupied_by` of any job of a placement."""
    t, other = job
    if t == OPERATOR:
        here, own = device_of[other], instance.backward if backward else instance.forward
        ticks = int(own[other, here])
        return ticks, {(here, here): ticks}
    home = device_of[instance.problem.tensors[t].producer]
    return occupied_by(instance, t, (other, home) if backward else (home, other))


def jobs_of(
    instance: NetSplitInstance,
    device_of: Sequence[int],
    schedule: TickSchedule,
    *,
    backward: bool,
) -> PhaseJobs:
    """The jobs of a phase of a schedule."""
    *starts, end = schedule.phase(backward)
    start: dict[Job, int] = {(OPERATOR, i): begin for i, begin in enumerate(starts)}
    start |= schedule.returned if backward else schedule.sent
    ticks, busy = dict[Job, int](), dict[Job, dict[Resource, int]]()
    for job in start:
        ticks[job], busy[job] = _occupied(instance, device_of, job, backward=backward)
    then = _then(instance, device_of, start, backward=backward)
    tail, behind = dict[Job, int](), defaultdict[Resource, int](int)
    for job in reversed(_sorted(instance, start, backward=backward)):
        after = max((tail[other] for other in then[job]), default=0)
        tail[job] = max(
            ticks[job] + after, *(taken + behind[one] for one, taken in busy[job].items())
        )
        for one in busy[job]:
            behind[one] = tail[job]
    return PhaseJobs(start, ticks, busy, tail, end)


def _then(
    instance: NetSplitInstance,
    device_of: Sequence[int],
    jobs: Mapping[Job, float],
    *,
    backward: bool,
) -> dict[Job, list[Job]]:
    """The jobs that wait for each one's data."""
    then = dict[Job, list[Job]]((job, []) for job in jobs)
    for t, tensor in enumerate(instance.problem.tensors):
        if backward and not tensor.gradient:
            continue
        maker = OPERATOR, tensor.producer
        for j in tensor.consumers:
            sent = t, device_of[j]
            chain = [maker, sent, (OPERATOR, j)] if sent in jobs else [maker, (OPERATOR, j)]
            chain = chain[::-1] if backward else chain
            for first, second in pairwise(chain):
                then[first].append(second)
    return then


def _sorted(instance: NetSplitInstance, start: Mapping[Job, float], *, backward: bool) -> list[Job]:
    """The jobs as they start. Among equal starts, those that others wait for come first."""

    def key(job: Job) -> tuple[float, int, int, Job]:
        t, other = job
        i = other if t == OPERATOR else instance.problem.tensors[t].producer
        return start[job], -i if backward else i, (t == OPERATOR) == backward, job

    return sorted(start, key=key)


# ------------------------------------------------------------------------------ earliest schedules


def known_placement_of(instance: NetSplitInstance, start: Sequence[int] | None) -> KnownPlacement:
    """A placement that fits as a known one; without one, the upper bound that always holds.

    Args:
        start: device of each operator, or None.
    """
    if start is None:
        problem = instance.problem
        slowest_way = ticks_by_way(instance)[1].max(axis=1).tolist()
        longest = sum(
            2 * len(tensor.consumers) * ticks
            for tensor, ticks in zip(problem.tensors, slowest_way, strict=True)
        )
        slowest = (instance.forward.max(axis=1) + instance.backward.max(axis=1)).sum()
        nowhere = canonical(instance, [0] * problem.num_operators)
        return KnownPlacement(nowhere, False, int(slowest) + longest)
    device_of = canonical(instance, grouped(instance, start))
    if instance.relaxed:
        back = relaxed_times(instance, device_of)[1]
        latest = max(t + int(instance.backward[i, device_of[i]]) for i, t in enumerate(back))
        return KnownPlacement(device_of, True, latest)
    schedule = schedule_of(instance, device_of)
    return KnownPlacement(device_of, True, schedule.latency, schedule)


def schedule_of(instance: NetSplitInstance, device_of: Sequence[int]) -> TickSchedule:
    """The list schedule of a placement: its order is kept, its times are in ticks."""
    seconds = timetable(instance.problem, device_of)
    there: dict[Job, float] = {(OPERATOR, i): s for i, s in enumerate(seconds.forward_start_s)}
    back: dict[Job, float] = {(OPERATOR, i): s for i, s in enumerate(seconds.backward_start_s)}
    for transfer in seconds.transfers:
        if transfer.backward:
            back[transfer.tensor, transfer.source] = transfer.start_s
        else:
            there[transfer.tensor, transfer.target] = transfer.start_s
    return _earliest(instance, device_of, (there, back))


def retimed(
    instance: NetSplitInstance, device_of: Sequence[int], starts: Sequence[Mapping[Job, float]]
) -> KnownPlacement:
    """The placement with devices named by (9), and the schedule in which every job starts as soon
    as it can in the order of given starts.

    Args:
        device_of: a placement that fits.
        starts: of the jobs of the forwards and of the backwards.
    """
    named = canonical(instance, device_of)
    name = dict(zip(device_of, named, strict=True))
    new = [
        {(t, at if t == OPERATOR else name[at]): s for (t, at), s in start.items()}
        for start in starts
    ]
    schedule = _earliest(instance, named, new)
    return KnownPlacement(named, True, schedule.latency, schedule)


def _earliest(
    instance: NetSplitInstance, device_of: Sequence[int], starts: Sequence[Mapping[Job, float]]
) -> TickSchedule:
    """The schedule in which every job starts as soon as it can.

    Args:
        starts: of the jobs of the forwards and of the backwards; only their order counts.
    """
    phases, operators = [], range(instance.problem.num_operators)
    for backward, order in zip((False, True), starts, strict=True):
        then = _then(instance, device_of, order, backward=backward)
        start, ready, free = dict[Job, int](), Counter[Job](), Counter[Resource]()
        for job in _sorted(instance, order, backward=backward):
            ticks, busy = _occupied(instance, device_of, job, backward=backward)
            start[job] = begin = max(ready[job], *(free[one] for one in busy))
            for one, taken in busy.items():
                free[one] = begin + taken
            for after in then[job]:
                ready[after] = max(ready[after], begin + ticks)
        end = max(free[p, p] for p in range(instance.problem.num_devices))
        phases.append((tuple(start.pop((OPERATOR, i)) for i in operators), start, end))
    (forward, sent, forward_end), (back, returned, backward_end) = phases
    return TickSchedule(forward, back, sent, returned, forward_end, backward_end)
