"""The jobs of a schedule of NetSplit's full model: operators and transfers, the resources that they
occupy, and how long the phase goes on behind each.

Legend: i operator; t tensor; q the device that t is sent to, or its gradient from. A job is
(`OPERATOR`, i) or (t, q). A resource is a device (p, p), a channel (p, q) or a link (`LINK`, l).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.solvers.netsplit.model import (
    NetSplitInstance,
    TickSchedule,
    busy_ticks,
    canonical,
    phase_retimed,
    transfer_ticks,
)
from planner.solvers.placement.timetable import LINK

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
    own = instance.backward if backward else instance.forward
    for job in start:
        t, other = job
        if t == OPERATOR:
            here = device_of[other]
            ticks[job] = int(own[other, here])
            busy[job] = {(here, here): ticks[job]}
        else:
            home = device_of[instance.problem.tensors[t].producer]
            way = (other, home) if backward else (home, other)
            ticks[job], busy[job] = occupied_by(instance, t, way)
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
    jobs: Mapping[Job, int],
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


def _sorted(instance: NetSplitInstance, start: Mapping[Job, int], *, backward: bool) -> list[Job]:
    """The jobs as they start. Among equal starts, those that others wait for come first."""

    def key(job: Job) -> tuple[int, int, int, Job]:
        t, other = job
        i = other if t == OPERATOR else instance.problem.tensors[t].producer
        return start[job], -i if backward else i, (t == OPERATOR) == backward, job

    return sorted(start, key=key)


def retimed(
    instance: NetSplitInstance, device_of: Sequence[int], starts: Sequence[Mapping[Job, int]]
) -> tuple[tuple[int, ...], TickSchedule]:
    """The placement with devices named by (9), and the schedule in which every job starts as soon
    as it can in the order of given starts.

    Args:
        starts: of the jobs of the forwards and of the backwards.
    """
    named = canonical(instance, device_of)
    name = dict(zip(device_of, named, strict=True))
    phases = []
    for backward, start in enumerate(starts):
        new = {(t, at if t == OPERATOR else name[at]): s for (t, at), s in start.items()}
        jobs = []
        for job in _sorted(instance, new, backward=bool(backward)):
            t, other = job
            i = other if t == OPERATOR else instance.problem.tensors[t].producer
            jobs.append((new[job], i, 0, t, -1 if t == OPERATOR else other))
        phases.append(phase_retimed(instance, named, jobs, backward=bool(backward)))
    (forward, sent, forward_end), (backwards, returned, backward_end) = phases
    schedule = TickSchedule(forward, backwards, sent, returned, forward_end, backward_end)
    return named, schedule
