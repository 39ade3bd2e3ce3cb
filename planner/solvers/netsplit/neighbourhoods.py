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
    (n3) all other jobs are free in time, those of W also in place: (2) to (8) of `model.py`
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.solvers.engines.watch import SearchWatch
from planner.solvers.netsplit.bounds import JointBounds, PhaseBounds, edges_of
from planner.solvers.netsplit.cpsat_call import worker
from planner.solvers.netsplit.jobs import (
    OPERATOR,
    Job,
    PhaseJobs,
    Resource,
    jobs_of,
    occupied_by,
    retimed,
)
from planner.solvers.netsplit.model import KnownPlacement, NetSplitInstance
from planner.solvers.placement.coplacement import kept_bytes
from planner.solvers.placement.problem import bytes_by_device
from planner.support.arrays import Ints

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

Literals = Mapping[int, Any]
"""Whether a tensor is sent from each device; True if it certainly is."""


@dataclass(slots=True)
class _Neighbourhood:
    """A neighbourhood while its model is built.

    Attributes:
        free: W.
        x: x of model.py by free group.
        sent: by tensor and target, whether it is sent there from each other device.
        hints: values of the known schedule.
    """

    instance: NetSplitInstance
    known: KnownPlacement
    jobs: Sequence[PhaseJobs]
    cp: Any
    free: frozenset[int]
    x: dict[int, list[Any]]
    sent: dict[Job, Literals] = field(default_factory=dict)
    hints: list[tuple[Any, int]] = field(default_factory=list)

    def on(self, i: int, p: int) -> Any:
        """Whether operator i is on device p: a variable, or known."""
        row = self.x.get(self.instance.group_of[i])
        return self.known.device_of[i] == p if row is None else row[p]


@dataclass(frozen=True, slots=True)
class NeighbourSettings:
    """How neighbourhoods are searched.

    Attributes:
        limit: units of deterministic work; per_constraint: those of building a constraint.
        seed: seed of the engine.
        watch: is told of better schedules, and ends the search, within a neighbourhood, too.
        bounds: of forwards and of backwards; joint: of both together.
        spans: operators of the spans of `spans.py`.
    """

    limit: float
    per_constraint: float
    seed: int
    watch: SearchWatch
    bounds: Sequence[PhaseBounds]
    joint: JointBounds
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
                if worked >= settings.limit or settings.watch.done:
                    return known, worked
                asked[k] = known.latest
                better, work = _better(_begun(instance, known, phases, free), settings, most)
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


def _begun(
    instance: NetSplitInstance,
    known: KnownPlacement,
    jobs: Sequence[PhaseJobs],
    groups: Sequence[int],
) -> _Neighbourhood:
    """The neighbourhood of some groups, with (1).

    Args:
        jobs: of both phases of the known schedule.
    """
    from ortools.sat.python import cp_model

    cp, devices = cp_model.CpModel(), range(instance.problem.num_devices)
    free = frozenset(i for g in groups for i in instance.groups[g])
    x = {g: [cp.new_bool_var("") for _ in devices] for g in groups}
    one = _Neighbourhood(instance, known, jobs, cp, free, x)
    open_to = _open_to(instance, known, groups)
    for g, row in x.items():
        cp.add_exactly_one(row[p] for p in open_to)
        for p in sorted(set(devices) - open_to):
            cp.add(row[p] == 0)
        here = known.device_of[instance.groups[g][0]]
        one.hints += [(literal, int(p == here)) for p, literal in enumerate(row)]
    return one


def _open_to(instance: NetSplitInstance, known: KnownPlacement, groups: Sequence[int]) -> set[int]:
    """The devices that free groups may go to: their own, and those with the most room."""
    used = bytes_by_device(kept_bytes(instance.problem), known.device_of)
    room = instance.problem.capacity_bytes
    own = {known.device_of[instance.groups[g][0]] for g in groups}
    others = sorted(set(range(len(room))) - own, key=lambda p: (used[p] - int(room[p]), p))
    return own | set(others[: max(0, DEVICES - len(own))])


def _better(
    one: _Neighbourhood, settings: NeighbourSettings, most: float
) -> tuple[KnownPlacement | None, float]:
    """A better schedule of a neighbourhood, None if none is found; and the work.

    Args:
        most: units of work at most.
    """
    cp, latest, bounds = one.cp, one.known.latest, settings.bounds
    _add_memory(one)
    _add_sent(one)
    phases = [
        _add_phase(one, bounds[backward], latest - bounds[not backward].least, backward)
        for backward in (False, True)
    ]
    _add_joint(one, phases, settings.joint)
    ends = sum(phase.end for phase in phases)
    cp.add_linear_constraint(ends, min(settings.joint.least, latest - 1), latest - 1)
    cp.minimize(ends)
    for variable, value in one.hints:
        cp.add_hint(variable, value)
    solver = worker(settings.seed, most)
    solver.parameters.cp_model_probing_level = solver.parameters.symmetry_level = 0
    solved = settings.watch.run(lambda: solver.solve(cp), solver.stop_search)
    status = solver.status_name(solved)
    work = solver.response_proto.deterministic_time
    work += settings.per_constraint * len(cp.proto.constraints)
    return (_read(one, phases, solver) if status in ("OPTIMAL", "FEASIBLE") else None), work


def _add_memory(one: _Neighbourhood) -> None:
    """(8), with what the fixed groups hold as a number."""
    instance, cp = one.instance, one.cp
    where = [one.known.device_of[group[0]] for group in instance.groups]
    kept: list[tuple[tuple[int, ...], int]] = [
        ((g,), size) for g, size in enumerate(instance.alone_bytes)
    ]
    kept += sorted(instance.together_bytes.items())
    for p, room in enumerate(instance.problem.capacity_bytes):
        use: list[Any] = []
        for groups, size in kept:
            free = [g for g in groups if g in one.x]
            if any(where[g] == p for g in groups if g not in one.x):
                use.append(size)
            elif len(free) == 1:
                use.append(size * one.x[free[0]][p])
            elif free:
                held = cp.new_bool_var("")
                for g in free:
                    cp.add_implication(one.x[g][p], held)
                use.append(size * held)
        if not all(isinstance(part, int) for part in use):
            cp.add(sum(use) <= int(room))


def _add_sent(one: _Neighbourhood) -> None:
    """(3): where tensors are sent from and to."""
    instance, cp, device_of = one.instance, one.cp, one.known.device_of
    devices = range(instance.problem.num_devices)
    for t, tensor in enumerate(instance.problem.tensors):
        i = tensor.producer
        free = [j for j in tensor.consumers if j in one.free]
        certain = {device_of[j] for j in tensor.consumers if j not in one.free}
        for q in devices:
            if q not in certain and not free:
                continue
            # Operators of one group are never apart, and (3) says so by their x.
            homes = devices if i in one.free else (device_of[i],)
            sent = one.sent[t, q] = {}
            for p in homes:
                if p == q:
                    continue
                home = one.on(i, p)
                if q in certain:
                    sent[p] = home
                    continue
                y = sent[p] = cp.new_bool_var("")
                cp.add_bool_or(*(one.on(j, q) for j in free), ~y)
                if home is not True:
                    cp.add_implication(y, home)
                for j in free:
                    cp.add_bool_or(*([] if home is True else [~home]), ~one.on(j, q), y)


@dataclass(slots=True)
class _Phase:
    """A phase of a neighbourhood while it is built.

    Attributes:
        ticks: (N, D) f or b.
        most: upper limit of all times; end: F or B.
        start: numbers of early jobs, variables of free ones; late: (n2).
        early: by resource, when the last early job leaves it; behind: the largest tail of its late
            jobs.
        items: by resource, start, ticks and presence of free jobs.
    """

    one: _Neighbourhood
    backward: bool
    ticks: Ints
    most: int
    end: Any
    start: dict[Job, Any] = field(default_factory=dict)
    late: set[Job] = field(default_factory=set)
    early: dict[Resource, int] = field(default_factory=lambda: defaultdict(int))
    behind: dict[Resource, int] = field(default_factory=lambda: defaultdict(int))
    items: dict[Resource, list[tuple[Any, int, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @property
    def jobs(self) -> PhaseJobs:
        """Those of the known schedule."""
        return self.one.jobs[self.backward]

    def done(self, i: int) -> Any:
        """C or C'."""
        start, row = self.start[OPERATOR, i], self.ticks[i]
        if i not in self.one.free:
            return start + int(row[self.one.known.device_of[i]])
        if (row == row[0]).all():
            return start + int(row[0])
        return start + sum(int(ticks) * self.one.on(i, p) for p, ticks in enumerate(row))


def _add_phase(one: _Neighbourhood, bounds: PhaseBounds, most: int, backward: bool) -> _Phase:
    """(n1) to (n3) of a phase."""
    cp, instance = one.cp, one.instance
    ticks = instance.backward if backward else instance.forward
    phase = _Phase(one, backward, ticks, most, cp.new_int_var(bounds.least, most, ""))
    one.hints.append((phase.end, phase.jobs.end))
    _add_starts(phase, bounds)
    for i in range(instance.problem.num_operators):
        _add_operator(phase, i, bounds.tail[i])
    for i, j, _ in edges_of(instance, backward=backward):
        if (OPERATOR, i) not in phase.late:
            _wait(phase, phase.done(i), (OPERATOR, j))
    for job, sent in one.sent.items():
        if job in phase.start or job in phase.late:
            for p, literal in sent.items():
                _add_transfer(phase, job, p, literal)
    for resource, items in phase.items.items():
        intervals = [
            cp.new_fixed_size_interval_var(start, ticks, "")
            if literal is True
            else cp.new_optional_fixed_size_interval_var(start, ticks, literal, "")
            for start, ticks, literal in items
        ]
        if phase.early[resource]:
            intervals.append(cp.new_fixed_size_interval_var(0, phase.early[resource], ""))
        if len(intervals) > 1:
            cp.add_no_overlap(intervals)
    return phase


def _add_joint(one: _Neighbourhood, phases: Sequence[_Phase], joint: JointBounds) -> None:
    """Bounds of both phases together, of operators that are early or free in both."""
    there, back = phases
    for i in range(one.instance.problem.num_operators):
        job = OPERATOR, i
        if job in there.start and job in back.start:
            before = there.start[job] + back.end - back.done(i)
            one.cp.add(before >= joint.before[i])
            one.cp.add(there.end - there.done(i) + back.start[job] >= joint.behind[i])
    for (u, v), ticks in sorted(joint.between.items()):
        if all((OPERATOR, i) in phase.start for phase in phases for i in (u, v)):
            forwards = there.done(v) - there.start[OPERATOR, u]
            one.cp.add(forwards + back.done(u) - back.start[OPERATOR, v] >= ticks)


def _add_starts(phase: _Phase, bounds: PhaseBounds) -> None:
    """The starts of all jobs that are not late, and what (n1) and (n2) leave of resources."""
    one, jobs = phase.one, phase.jobs
    moved = {job for job in jobs.start if _is_moved(one, job)}
    first = min(jobs.start[job] for job in moved)
    last = max(jobs.start[job] + jobs.ticks[job] for job in moved)
    margin = int(MARGIN * (last - first))
    for job, start in jobs.start.items():
        if job not in moved and start + jobs.ticks[job] <= first - margin:
            phase.start[job] = start
            for resource, taken in jobs.busy[job].items():
                phase.early[resource] = max(phase.early[resource], start + taken)
        elif job not in moved and start >= last + margin:
            phase.late.add(job)
            for resource in jobs.busy[job]:
                phase.behind[resource] = max(phase.behind[resource], jobs.tail[job])
        else:
            head = bounds.head[job[1]] if job[0] == OPERATOR else 0
            phase.start[job] = one.cp.new_int_var(head, phase.most, "")
            one.hints.append((phase.start[job], start))
    for job in one.sent:
        made = one.instance.problem.tensors[job[0]]
        if job not in jobs.start and (made.gradient or not phase.backward):
            phase.start[job] = one.cp.new_int_var(0, phase.most, "")
    for resource, tail in phase.behind.items():
        one.cp.add(phase.end >= phase.early[resource] + tail)


def _is_moved(one: _Neighbourhood, job: Job) -> bool:
    """Whether a job of the known schedule is of W, or a transfer from or to W."""
    t, i = job
    if t == OPERATOR:
        return i in one.free
    tensor = one.instance.problem.tensors[t]
    return not one.free.isdisjoint((tensor.producer, *tensor.consumers))


def _add_operator(phase: _Phase, i: int, tail: int) -> None:
    """(2), and the places of an operator that is free in time."""
    one, start = phase.one, phase.start.get((OPERATOR, i))
    if start is None or isinstance(start, int):
        return
    one.cp.add(phase.end >= phase.done(i) + tail)
    for p, ticks in enumerate(phase.ticks[i].tolist()):
        _occupy(phase, (p, p), start, ticks, one.on(i, p))


def _add_transfer(phase: _Phase, job: Job, p: int, literal: Any) -> None:
    """(4) or (5), and (7), of a transfer of a tensor that is made on p."""
    one, (t, q) = phase.one, job
    tensor, start = one.instance.problem.tensors[t], phase.start.get(job)
    ticks, busy = occupied_by(one.instance, t, (q, p) if phase.backward else (p, q))
    readers = [(j, on) for j in tensor.consumers if (on := one.on(j, q)) is not False]
    maker = [(tensor.producer, True)]
    before, after = (readers, maker) if phase.backward else (maker, readers)
    for i, there in before:
        if (OPERATOR, i) not in phase.late:
            _wait(phase, phase.done(i), job, literal, there)
    if start is None:
        return
    for j, there in after:
        _wait(phase, start + ticks, (OPERATOR, j), literal, there)
    if not isinstance(start, int):
        for resource, taken in busy.items():
            _occupy(phase, resource, start, taken, literal)


def _occupy(phase: _Phase, resource: Resource, start: Any, ticks: int, literal: Any) -> None:
    """A job that is free in time, on a resource if it is there: (6), (7) and (n2)."""
    if literal is False or not ticks:
        return
    phase.items[resource].append((start, ticks, literal))
    if phase.behind[resource]:
        begun = phase.one.cp.add(phase.end >= start + ticks + phase.behind[resource])
        begun.only_enforce_if([] if literal is True else [literal])


def _wait(phase: _Phase, done: Any, job: Job, *literals: Any) -> None:
    """Lets a job wait for a time, if some literals hold."""
    cp, given = phase.one.cp, [one for one in literals if one is not True]
    if job in phase.late:
        cp.add(phase.end >= done + phase.jobs.tail[job]).only_enforce_if(given)
    elif not isinstance(phase.start[job], int) or not isinstance(done, int):
        cp.add(phase.start[job] >= done).only_enforce_if(given)


def _read(one: _Neighbourhood, phases: Sequence[_Phase], solver: Any) -> KnownPlacement:
    """(n4): the schedule of a solution."""
    where = list(one.known.device_of)
    for g, row in one.x.items():
        for i in one.instance.groups[g]:
            where[i] = next(p for p, literal in enumerate(row) if solver.boolean_value(literal))
    tensors, starts = one.instance.problem.tensors, []
    for phase in phases:
        end = solver.value(phase.end)
        # As late as possible, late jobs come behind all that they wait for.
        begun = {job: end - phase.jobs.tail[job] for job in phase.late}
        for job, start in phase.start.items():
            begun[job] = start if isinstance(start, int) else solver.value(start)
        starts.append({(t, q): s for (t, q), s in begun.items() if t == OPERATOR or (
            where[tensors[t].producer] != q and any(where[j] == q for j in tensors[t].consumers)
        )})  # fmt: skip
    device_of, schedule = retimed(one.instance, where, starts)
    return KnownPlacement(device_of, True, schedule.latency, schedule)
