"""Neighbourhoods of a schedule with shared links: some groups get any devices, and everything that
runs at their time gets any order, by CP-SAT.

The code of `kernels.py` sends each message as soon as it is ready. Where links are shared, better
schedules let an urgent message overtake, and only one that is planned with the operators around it
can do that. Legend: W the operators of the free groups; jobs are operators and transfers; r
resources: devices, channels and shared links. Of each phase of the known schedule,

    (n1) jobs that end before those of W begin are early: they stay where they are
    (n2) jobs that begin after those of W end are late: they keep their order on every resource, so
         that tail_v, the time from the start of v to the end of the phase, stays the same. What
         comes before v, by data or on a resource, ends at least tail_v before the phase
    (n3) all other jobs are free in time, those of W also in place: (2) to (8) of `model.py`, by
         the builder of the whole model (`cpsat_model.py`)
    (n4) the answer must be better; its order is timed anew, as early as possible

Free groups are a number of neighbours in topological order, and go over the graph round after
round; then those of whole spans (`spans.py`). A neighbourhood without a better schedule is asked
again only after another one had one. The bounds of single operators, and of pairs of cuts, are
constraints: without them no span is solved.

Without shared links they do not pay beside annealing (`fine.py`). On nasnet-12 (529 operators,
batch 64, after 12 s of annealing) 199 neighbourhoods of 14 operators gave nothing, 186 of them
proved; as many seconds more of annealing shortened the microbatch by 1.5 to 2.1 %. On AmoebaNet-D
(1,046 operators) 34 neighbourhoods of 24 operators gave 0.5 % in 12 s, annealing 1.6 to 2.3 % in 18
s.

Source: Shaw, CP 1998, LNCS 1520 (large neighbourhoods); (n1) and (n2) are this project's.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.solvers.engines.watch import SearchWatch
from planner.solvers.netsplit.bounds import SubproblemBounds
from planner.solvers.netsplit.cpsat_call import answer_of, worker
from planner.solvers.netsplit.cpsat_model import (
    CpSatModel,
    FixedJobs,
    add_both,
    add_sent,
    add_transfers,
    model_of,
    schedule_in,
)
from planner.solvers.netsplit.jobs import OPERATOR, Job, PhaseJobs, jobs_of
from planner.solvers.netsplit.model import KnownPlacement, NetSplitInstance
from planner.solvers.placement.coplacement import kept_bytes
from planner.solvers.placement.problem import bytes_by_device

SIZES = ((8, 0.03), (16, 0.06))
"""Free groups of a neighbourhood, and units of deterministic work for it, at most: the next number
once no neighbourhood has a better schedule."""

SPAN_WORK = 0.5
"""The same for whole spans, after these."""

MOST = 40
"""Free groups of a span at most."""

AGAIN = 3
"""Then all neighbourhoods once more, each with this multiple of the work."""

DEVICES = 5
"""Devices that free groups may go to, if they are on fewer."""

MARGIN = 0.3
"""Jobs up to this share of the time of W before and behind it are free in time."""


@dataclass(frozen=True, slots=True)
class NeighbourSettings:
    """How neighbourhoods are searched.

    Attributes:
        limit: units of deterministic work; per_constraint: those of building a constraint.
        seed: seed of the engine.
        watch: is told of better schedules, and ends the search, within a neighbourhood, too.
        bounds: of the whole graph.
        spans: operators of the spans of `spans.py`.
    """

    limit: float
    per_constraint: float
    seed: int
    watch: SearchWatch
    bounds: SubproblemBounds
    spans: Sequence[Sequence[int]] = ()


def mended(
    instance: NetSplitInstance, known: KnownPlacement, settings: NeighbourSettings
) -> tuple[KnownPlacement, float]:
    """The best schedule found from a known one by its neighbourhoods; and the work that it took.

    Args:
        known: a placement with a schedule.
    """
    worked, phases = 0.0, _jobs(instance, known)
    for sets, most in _frees(instance, settings):
        # Where the schedule is as it was, an answer is, too.
        asked = dict[int, int]()
        while any(asked.get(k) != known.latest for k in range(len(sets))):
            for k, free in enumerate(sets):
                if asked.get(k) == known.latest:
                    continue
                proved = known.latest <= settings.bounds.least
                if proved or worked >= settings.limit or settings.watch.done:
                    return known, worked
                asked[k] = known.latest
                open_to = _open_to(instance, known, free)
                model = model_of(instance, known, memory=True, groups=free, open_to=open_to)
                better, work = _better(model, phases, settings, most)
                worked += work
                if better is not None:
                    known, phases = better, _jobs(instance, better)
                    settings.watch.see(known.latest)
    return known, worked


def _frees(
    instance: NetSplitInstance, settings: NeighbourSettings
) -> Iterator[tuple[list[list[int]], float]]:
    """Sets of free groups, and units of work for each at most."""
    groups = sorted(range(len(instance.groups)), key=lambda g: instance.groups[g][0])
    spans = ([instance.group_of[i] for i in span] for span in settings.spans)
    whole = [free for span in spans if len(free := list(dict.fromkeys(span))) <= MOST]
    for factor in (1, AGAIN):
        for size, most in SIZES:
            firsts = range(0, max(1, len(groups) - size // 2), size // 2)
            yield [groups[first : first + size] for first in firsts], factor * most
        yield whole, factor * SPAN_WORK


def _jobs(instance: NetSplitInstance, known: KnownPlacement) -> list[PhaseJobs]:
    """The jobs of both phases of a known schedule."""
    assert known.schedule is not None
    return [
        jobs_of(instance, known.device_of, known.schedule, backward=backward)
        for backward in (False, True)
    ]


def _open_to(instance: NetSplitInstance, known: KnownPlacement, groups: Sequence[int]) -> set[int]:
    """The devices that free groups may go to: their own, and those with the most room."""
    used = bytes_by_device(kept_bytes(instance.problem), known.device_of)
    room = instance.problem.capacity_bytes
    own = {known.device_of[instance.groups[g][0]] for g in groups}
    others = sorted(set(range(len(room))) - own, key=lambda p: (used[p] - int(room[p]), p))
    return own | set(others[: max(0, DEVICES - len(own))])


def _better(
    model: CpSatModel, jobs: Sequence[PhaseJobs], settings: NeighbourSettings, limit: float
) -> tuple[KnownPlacement | None, float]:
    """(n4): a better schedule of a neighbourhood, None if none is found; and the work.

    Args:
        model: with (1) and (8).
        jobs: of both phases of the known schedule.
        limit: units of work at most.
    """
    cp = model.cp
    add_sent(model)
    fixed = [_fixed(model, one) for one in jobs]
    add_both(model, settings.bounds, model.known.latest - 1, add_transfers, fixed)
    for variable, value in model.hints:
        cp.add_hint(variable, value)
    solver = worker(settings.seed, limit)
    solver.parameters.cp_model_probing_level = solver.parameters.symmetry_level = 0
    solved = settings.watch.run(lambda: solver.solve(cp), solver.stop_search)
    answer = answer_of(solver, cp, solved)
    work = solver.response_proto.deterministic_time
    work += settings.per_constraint * len(cp.proto.constraints)
    return None if answer.values is None else schedule_in(model, answer.values), work


def _fixed(model: CpSatModel, jobs: PhaseJobs) -> FixedJobs:
    """(n1) and (n2) of a phase."""
    moved = {job for job in jobs.start if _is_moved(model, job)}
    first = min(jobs.start[job] for job in moved)
    last = max(jobs.start[job] + jobs.ticks[job] for job in moved)
    # Jobs close to W are free in time, but not in place: an order that differs near the ends of W
    # is often what a better schedule needs.
    margin = int(MARGIN * (last - first))
    early, late = dict[Job, int](), dict[Job, int]()
    left, behind = defaultdict[tuple[int, ...], int](int), defaultdict[tuple[int, ...], int](int)
    for job, start in jobs.start.items():
        if job in moved:
            continue
        if start + jobs.ticks[job] <= first - margin:
            early[job] = start
            for resource, taken in jobs.busy[job].items():
                left[resource] = max(left[resource], start + taken)
        elif start >= last + margin:
            late[job] = jobs.tail[job]
            for resource in jobs.busy[job]:
                behind[resource] = max(behind[resource], jobs.tail[job])
    return FixedJobs(early, left, late, behind)


def _is_moved(model: CpSatModel, job: Job) -> bool:
    """Whether a job of the known schedule is of W, or a transfer from or to W."""
    t, i = job
    if t == OPERATOR:
        return model.free(i)
    tensor = model.instance.problem.tensors[t]
    return any(model.free(j) for j in (tensor.producer, *tensor.consumers))
