"""NetSplit's model (`model.py`, whose numbers and symbols these are) as OR-Tools CP-SAT's data: the
one builder of all constraint models.

Literals and starts may be constants. With all groups free the model is the whole one; with some of
them free it is a neighbourhood of a known schedule (`neighbourhoods.py`), which also fixes jobs in
time. Windows and spans leave constraints out, and `gurobi.py` reads the model as a `Mip`.

Operators are optional intervals per device, transfers optional intervals per ordered pair of
devices, and per shared link of its route. Besides, z_gh says whether groups g and h are apart, and
two families follow from (1) to (9) but are far from obvious to the engine:

    (a) heads, tails and least ends of `bounds.py`                                `add_phase`
    (b) S_j >= C_i + (least ticks of a transfer from i to j) z_g(i)g(j); the same of S'
                                                                              `_wait_for_data`

In the published model any number of operators run at once on a device, so it has no intervals: only
(1), (8), (2'), (4') and (5')                                                   `makespan_of`

Source: Perron and Didier, OR-Tools CP-SAT; NetSplit, Nanjing 2023.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any

from planner.solvers.netsplit.bounds import PhaseBounds, SubproblemBounds, edges_of
from planner.solvers.netsplit.jobs import OPERATOR, Job, Resource, occupied_by, retimed
from planner.solvers.netsplit.model import (
    KnownPlacement,
    NetSplitInstance,
    edge_ticks,
    relaxed_times,
    transfer_ticks,
)
from planner.solvers.placement.coplacement import edge_bytes
from planner.support.arrays import Ints

Literal = Any
"""A literal of the engine, or a bool."""

Time = Any
"""An expression of the engine, or an int."""

Items = dict[tuple[int, ...], list[Any]]
"""By resource, the intervals of the jobs that may occupy it."""


ONE_HALF = 0.5
"""Engines of linear programs give a little less than 1 for 1."""


@dataclass(slots=True)
class CpSatModel:
    """The model while it is built.

    Attributes:
        cp: the engine's model.
        known: where the groups are that are not free; its schedule is the hint, if it has one.
        x: x[g][p] of free groups; z: z[g, h], g < h.
        sent: y[t, q][p] by tensor and target, of all that may be sent; empty without (7).
        phases: those that have been added.
        hints: values of the known placement and its schedule.
    """

    instance: NetSplitInstance
    cp: Any
    known: KnownPlacement
    x: dict[int, list[Any]]
    z: dict[tuple[int, int], Any] = field(default_factory=dict)
    sent: dict[Job, dict[int, Literal]] = field(default_factory=dict)
    phases: list["CpSatPhase"] = field(default_factory=list)
    hints: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether all groups are free. Then the known schedule hints at every variable; of a
        neighbourhood, which has to do better, that made answers up to 0.6 % worse.
        """
        return len(self.x) == len(self.instance.groups)

    def free(self, i: int) -> bool:
        """Whether operator i may move."""
        return self.instance.group_of[i] in self.x

    def on(self, i: int, p: int) -> Literal:
        """Whether operator i is on device p."""
        row = self.x.get(self.instance.group_of[i])
        return self.known.device_of[i] == p if row is None else row[p]

    def apart(self, i: int, j: int) -> Any:
        """Z of two operators; None of one group, or where there is no z."""
        g, h = self.instance.group_of[i], self.instance.group_of[j]
        return self.z.get((min(g, h), max(g, h)))

    def device_of(self, values: Sequence[float]) -> tuple[int, ...]:
        """The placement of a solution, given as values of the variables."""
        where = list(self.known.device_of)
        for g, row in self.x.items():
            here = next(p for p, one in enumerate(row) if values[one.index] > ONE_HALF)
            for i in self.instance.groups[g]:
                where[i] = here
        return tuple(where)


def num_constraints(instance: NetSplitInstance, phases: Sequence[bool], *, channels: bool) -> int:
    """About how many constraints a model has, and so how long it takes to build: most are written
    for every ordered pair of devices.

    Args:
        phases: False for forwards, True for backwards.
        channels: whether with (3) and (7).
    """
    devices = instance.problem.num_devices
    pairs = devices * (devices - 1)
    count = devices * len(instance.groups)
    for t, tensor in enumerate(instance.problem.tensors):
        readers = len(_far_readers(instance, t))
        if not readers:
            continue
        count += 2 * devices * readers  # z
        for backward in phases:
            if backward and not tensor.gradient:
                continue
            count += pairs * readers  # (b)
            count += pairs * (readers + 2) * channels  # (4), (5), (7)
        count += pairs * (readers + 2) * channels  # (3)
    return count


# ------------------------------------------------------------------------------------ placement


def model_of(
    instance: NetSplitInstance,
    known: KnownPlacement,
    *,
    memory: bool,
    groups: Sequence[int] | None = None,
    open_to: Collection[int] | None = None,
) -> CpSatModel:
    """(1) and, with memory, (8); (9) if all groups are free.

    Args:
        groups: those that are free; None for all.
        open_to: the devices that these may go to; None for all.
    """
    from ortools.sat.python import cp_model

    cp, devices = cp_model.CpModel(), range(instance.problem.num_devices)
    free = range(len(instance.groups)) if groups is None else groups
    where = devices if open_to is None else open_to
    model = CpSatModel(
        instance, cp, known, {g: [cp.new_bool_var("") for _ in devices] for g in free}
    )
    for g, row in model.x.items():
        cp.add_exactly_one([row[p] for p in sorted(where)])  # (1)
        for p in sorted({*devices} - {*where}):
            cp.add(row[p] == 0)
        here = known.device_of[instance.groups[g][0]]
        model.hints += [(one, int(p == here)) for p, one in enumerate(row)]
    if memory:
        _add_memory(model)
    if groups is None and not instance.relaxed:
        _name_devices(model)
    return model


def _name_devices(model: CpSatModel) -> None:
    """(9). No placement is lost: swap alike devices until their first groups ascend."""
    for alike in model.instance.alike:
        for p, q in pairwise(alike):
            for g, row in model.x.items():
                before = [model.x[h][p] for h in range(g)]
                model.cp.add_bool_or(before).only_enforce_if(row[q])


def keep(model: CpSatModel, device_of: Sequence[int]) -> None:
    """Fixes the placement."""
    for g, row in model.x.items():
        model.cp.add(row[device_of[model.instance.groups[g][0]]] == 1)


def _add_memory(model: CpSatModel) -> None:
    """(8), left out for devices that everything fits on."""
    instance, cp = model.instance, model.cp
    kept: list[tuple[tuple[int, ...], int]] = [
        ((g,), size) for g, size in enumerate(instance.alone_bytes)
    ]
    kept += sorted(instance.together_bytes.items())
    everything = sum(size for _, size in kept)
    for p, room in enumerate(instance.problem.capacity_bytes):
        if everything <= room:
            continue
        use = [_held(model, groups, size, p) for groups, size in kept]
        if not all(isinstance(part, int) for part in use):
            cp.add(sum(use) <= int(room))


def _held(model: CpSatModel, groups: Sequence[int], size: int, p: int) -> Any:
    """The bytes that a device holds if it has one of some groups."""
    instance, where = model.instance, model.known.device_of
    fixed = [where[instance.groups[g][0]] for g in groups if g not in model.x]
    free = [model.x[g][p] for g in groups if g in model.x]
    if p in fixed or not free:
        return size * (p in fixed)
    if len(free) == 1:
        return size * free[0]
    held = model.cp.new_bool_var("")
    # One direction is enough: to say that bytes are held that nobody needs only costs room.
    for one in free:
        model.cp.add_implication(one, held)
    return size * held


def add_apart(model: CpSatModel) -> None:
    """Adds z, for all pairs of groups with an edge between them; all groups are free."""
    group, known = model.instance.group_of, model.known.device_of
    for i, j in edge_bytes(model.instance.problem):
        g, h = sorted((group[i], group[j]))
        if g != h and add_pair(model, g, h):
            model.hints.append((model.z[g, h], int(known[i] != known[j])))


def add_pair(model: CpSatModel, g: int, h: int) -> bool:
    """Adds z of two groups, g < h; False if it is there."""
    if (g, h) in model.z:
        return False
    cp, z = model.cp, model.cp.new_bool_var("")
    # On the device of g: either h is not there, so z, or it is, so not z. As g has exactly one
    # device, z is decided.
    for here, there in zip(model.x[g], model.x[h], strict=True):
        cp.add_bool_or(~here, there, z)
        cp.add_bool_or(~here, ~there, ~z)
    model.z[g, h] = z
    return True


def add_sent(model: CpSatModel) -> None:
    """(3), for tensors with readers in other groups than their producer's."""
    instance, known = model.instance, model.known.device_of
    devices = range(instance.problem.num_devices)
    for t, tensor in enumerate(instance.problem.tensors):
        i, readers = tensor.producer, _far_readers(instance, t)
        free = [j for j in readers if model.free(j)]
        certain = {known[j] for j in readers if not model.free(j)}
        homes = devices if model.free(i) else (known[i],)
        for q in devices if free else sorted(certain):
            # Where a fixed reader is on q, the tensor is sent there from wherever it is made.
            sent = {
                p: model.on(i, p) if q in certain else _add_sent(model, i, free, p, q)
                for p in homes
                if p != q
            }
            if sent:
                model.sent[t, q] = sent


def _add_sent(model: CpSatModel, i: int, readers: Sequence[int], p: int, q: int) -> Any:
    """The variable y of a tensor of i, with (3) in both directions: only if i is on p and a reader
    on q, and then always.
    """
    cp, known, y = model.cp, model.known.device_of, model.cp.new_bool_var("")
    home, read = model.on(i, p), [model.on(j, q) for j in readers]
    if model.is_whole:
        model.hints.append((y, int(known[i] == p and any(known[j] == q for j in readers))))
    away = [] if home is True else [~home]
    if home is not True:
        cp.add_implication(y, home)
    cp.add_bool_or(*read, ~y)
    for there in read:
        cp.add_bool_or(*away, ~there, y)
    return y


def _far_readers(instance: NetSplitInstance, t: int) -> list[int]:
    """The readers of a tensor in other groups than its producer's. Operators of one group are never
    apart.
    """
    tensor, group = instance.problem.tensors[t], instance.group_of
    return [j for j in tensor.consumers if group[j] != group[tensor.producer]]


# ---------------------------------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class FixedJobs:
    """The jobs of a phase that are not free in time (`neighbourhoods.py`).

    Attributes:
        early: their starts; left: by resource, when the last of them leaves it.
        late: their tails; behind: by resource, the largest tail of those that occupy it.
    """

    early: Mapping[Job, int] = field(default_factory=dict)
    left: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    late: Mapping[Job, int] = field(default_factory=dict)
    behind: Mapping[tuple[int, ...], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CpSatPhase:
    """The variables of all forwards, or of all backwards.

    Attributes:
        backward: whether of backwards.
        mirrored: whether the phase is read from its end: starts are ends, and edges are reversed.
        ticks: (N, D) f or b.
        most: upper limit of all times; end: F or B.
        start: S or S', A or A' by job: numbers of early ones, none of late ones.
    """

    model: CpSatModel
    backward: bool
    mirrored: bool
    ticks: Ints
    most: int
    end: Any
    fixed: FixedJobs
    start: dict[Job, Time] = field(default_factory=dict)

    def done(self, i: int) -> Time:
        """C or C'."""
        start, row = self.start[OPERATOR, i], self.ticks[i]
        if not self.model.free(i):
            return start + int(row[self.model.known.device_of[i]])
        if (row == row[0]).all():
            return start + int(row[0])
        return start + sum(int(ticks) * self.model.on(i, p) for p, ticks in enumerate(row))

    def starts(self, values: Sequence[float]) -> dict[Job, float]:
        """The starts of a solution; those of late jobs as late as possible, behind all that they
        wait for.
        """
        end = values[self.end.index]
        begun = {job: end - tail for job, tail in self.fixed.late.items()}
        for job, start in self.start.items():
            begun[job] = start if isinstance(start, int) else values[start.index]
        return begun


def add_phase(
    model: CpSatModel,
    bounds: PhaseBounds,
    most: int,
    *,
    backward: bool,
    mirrored: bool = False,
    fixed: FixedJobs = FixedJobs(),
) -> CpSatPhase:
    """(2), (6), and (4) or (5) without transfers that wait for each other.

    Args:
        most: upper limit of the phase's end.
        mirrored: whether the phase is read from its end.
        fixed: the jobs that are not free in time.
    """
    instance, cp = model.instance, model.cp
    ticks = instance.backward if backward else instance.forward
    # (a): heads, tails and the least end.
    end = cp.new_int_var(bounds.least, most, "")
    phase = CpSatPhase(model, backward, mirrored, ticks, most, end, fixed)
    known = model.known.schedule
    *starts, length = known.phase(backward) if known is not None else (None,)
    if length is not None:
        model.hints.append((end, length))
    for resource, tail in fixed.behind.items():
        cp.add(end >= fixed.left.get(resource, 0) + tail)
    in_time = []
    for i, head in enumerate(bounds.head):
        if _add_start(phase, (OPERATOR, i), head, starts[i] if starts else None):
            in_time.append(i)
            cp.add(end >= phase.done(i) + bounds.tail[i])
    for i, j, t in edges_of(instance, backward=backward):
        _wait_for_data(phase, *((j, i) if mirrored else (i, j)), t)
    items: Items = defaultdict(list)
    for i in in_time:
        for p, taken in enumerate(ticks[i].tolist()):
            _occupy(phase, items, (p, p), phase.start[OPERATOR, i], taken, model.on(i, p))
    keep_apart(phase, items)  # (6)
    model.phases.append(phase)
    return phase


def _add_start(phase: CpSatPhase, job: Job, head: int, hint: int | None) -> bool:
    """Adds the start of a job, unless it is late; says whether it is free in time."""
    if job in phase.fixed.late:
        return False
    if job in phase.fixed.early:
        phase.start[job] = phase.fixed.early[job]
        return False
    phase.start[job] = start = phase.model.cp.new_int_var(head, phase.most, "")
    if hint is not None:
        phase.model.hints.append((start, hint))
    return True


def _wait_for_data(phase: CpSatPhase, i: int, j: int, t: int) -> None:
    """Lets j wait for i because of tensor t: (b), and where paths differ the transfer's time."""
    model, job = phase.model, (OPERATOR, j)
    apart = model.apart(i, j)
    if (OPERATOR, i) in phase.fixed.late:
        return
    if apart is None:
        wait(phase, phase.done(i), job)
        return
    size, devices = model.instance.problem.tensors[t].bytes, range(phase.ticks.shape[1])
    ways = {
        (p, q): transfer_ticks(model.instance, size, *((q, p) if phase.mirrored else (p, q)))
        for p, q in permutations(devices, 2)
    }
    # (b) has no condition, so it propagates before the devices are known; a condition is needed
    # only for paths that take longer than the fastest.
    least = min(ways.values(), default=0)
    wait(phase, phase.done(i) + least * apart, job)
    for (p, q), ticks in ways.items():
        if ticks > least:
            wait(phase, phase.done(i) + ticks, job, model.on(i, p), model.on(j, q))


def wait(phase: CpSatPhase, done: Time, job: Job, *literals: Literal) -> None:
    """Lets a job wait for a time, if all literals hold."""
    if any(one is False for one in literals):
        return
    cp, given = phase.model.cp, [one for one in literals if one is not True]
    if job in phase.fixed.late:
        cp.add(phase.end >= done + phase.fixed.late[job]).only_enforce_if(given)
    elif not isinstance(phase.start[job], int) or not isinstance(done, int):
        cp.add(phase.start[job] >= done).only_enforce_if(given)


def _occupy(
    phase: CpSatPhase, items: Items, resource: Resource, start: Any, ticks: int, literal: Literal
) -> None:
    """A job that is free in time, on a resource if the literal holds. Late jobs come after it: one
    tail is enough, the largest of them, because they keep their order on the resource.
    """
    if literal is False or not ticks:
        return
    items[resource].append(interval(phase, start, ticks, literal))
    behind = phase.fixed.behind.get(resource)
    if behind:
        begun = phase.model.cp.add(phase.end >= start + ticks + behind)
        begun.only_enforce_if([] if literal is True else [literal])


def interval(phase: CpSatPhase, start: Time, ticks: int, literal: Literal = True) -> Any:
    """An interval that is there if the literal holds."""
    if literal is True:
        return phase.model.cp.new_fixed_size_interval_var(start, ticks, "")
    return phase.model.cp.new_optional_fixed_size_interval_var(start, ticks, literal, "")


def keep_apart(phase: CpSatPhase, items: Items) -> None:
    """Intervals on one resource do not overlap."""
    for resource, intervals in items.items():
        left = phase.fixed.left.get(resource, 0)
        early = [interval(phase, 0, left)] if left else []
        if len(intervals) + len(early) > 1:
            phase.model.cp.add_no_overlap([*intervals, *early])


def add_transfers(phase: CpSatPhase) -> None:
    """(7), with A and A' in (4) and (5); (3) is there."""
    model, tensors = phase.model, phase.model.instance.problem.tensors
    known, items = model.known.schedule, defaultdict[Any, list[Any]](list)
    times = {} if known is None else known.returned if phase.backward else known.sent
    for job, sent in model.sent.items():
        if phase.backward and not tensors[job[0]].gradient:
            continue
        hinted = known is not None and model.is_whole
        in_time = _add_start(phase, job, 0, times.get(job, 0 if hinted else None))
        # One start for all paths to a device, and an interval for each: the producer is on one
        # device, so one of them is there at most, with the ticks of its path.
        for p, literal in sent.items():
            way = (job[1], p) if phase.backward else (p, job[1])
            ticks, busy = occupied_by(model.instance, job[0], way)
            _send(phase, job, ticks, literal)
            for resource, taken in busy.items() if in_time else ():
                _occupy(phase, items, resource, phase.start[job], taken, literal)
    keep_apart(phase, items)


def _send(phase: CpSatPhase, job: Job, ticks: int, is_sent: Literal) -> None:
    """(4) or (5) of a transfer, if it is there.

    Args:
        ticks: m.
    """
    model, (t, q) = phase.model, job
    readers = [(j, model.on(j, q)) for j in _far_readers(model.instance, t)]
    maker = [(model.instance.problem.tensors[t].producer, True)]
    before, after = (readers, maker) if phase.backward else (maker, readers)
    for i, there in before:
        if (OPERATOR, i) not in phase.fixed.late:
            wait(phase, phase.done(i), job, is_sent, there)
    for j, there in after if job in phase.start else ():
        wait(phase, phase.start[job] + ticks, (OPERATOR, j), is_sent, there)


def add_both(
    model: CpSatModel,
    bounds: SubproblemBounds,
    most: int,
    transfers: Callable[[CpSatPhase], None] | None = None,
    fixed: Sequence[FixedJobs] = (FixedJobs(), FixedJobs()),
) -> None:
    """Both phases, each within what the other one leaves of the limit, with F + B as the objective.

    Args:
        most: upper limit of F + B, at least its bound.
        transfers: adds those of a phase: `add_transfers` or `cpsat_ports.add_ports`.
        fixed: by phase, the jobs that are not free in time.
    """
    for backward in (False, True):
        rest, own = most - bounds.phases[not backward].least, bounds.phases[backward]
        phase = add_phase(model, own, rest, backward=backward, fixed=fixed[backward])
        if transfers is not None:
            transfers(phase)
    ends = sum(phase.end for phase in model.phases)
    model.cp.add_linear_constraint(ends, bounds.least, most)
    _add_joint(model, bounds)
    model.cp.minimize(ends)


def _add_joint(model: CpSatModel, bounds: SubproblemBounds) -> None:
    """The least ticks before each operator in both phases together, behind it, and between some;
    of operators that are late in no phase.
    """
    there, back = model.phases
    num = model.instance.problem.num_operators
    known = {i for i in range(num) if all((OPERATOR, i) in one.start for one in model.phases)}
    for i in sorted(known):
        job = OPERATOR, i
        model.cp.add(there.start[job] + back.end - back.done(i) >= bounds.before[i])
        model.cp.add(there.end - there.done(i) + back.start[job] >= bounds.behind[i])
    for (u, v), ticks in sorted(bounds.between.items()):
        if {u, v} <= known:
            forwards = there.done(v) - there.start[OPERATOR, u]
            model.cp.add(forwards + back.done(u) - back.start[OPERATOR, v] >= ticks)


def schedule_in(model: CpSatModel, values: Sequence[float]) -> KnownPlacement:
    """The schedule of a solution with (7), timed anew in its order."""
    where, tensors = model.device_of(values), model.instance.problem.tensors

    def happens(job: Job) -> bool:
        t, q = job
        return t == OPERATOR or (
            where[tensors[t].producer] != q and any(where[j] == q for j in tensors[t].consumers)
        )

    starts = [
        {job: s for job, s in phase.starts(values).items() if happens(job)}
        for phase in model.phases
    ]
    return retimed(model.instance, where, starts)


# --------------------------------------------------------------------------- the published model


def makespan_of(model: CpSatModel) -> Any:
    """(2'), (4') and (5'): the makespan of the published model."""
    instance, cp, worst = model.instance, model.cp, model.known.latest
    num, devices = instance.problem.num_operators, range(instance.problem.num_devices)
    edges = edge_bytes(instance.problem)
    forward, backward = relaxed_times(instance, model.known.device_of)
    there = [cp.new_int_var(0, worst, "") for _ in range(num)]
    back = [cp.new_int_var(0, worst, "") for _ in range(num)]
    model.hints += [*zip(there, forward, strict=True), *zip(back, backward, strict=True)]
    makespan = cp.new_int_var(0, worst, "")
    model.hints.append((makespan, worst))
    lasts = [
        [sum(int(ticks[i, p]) * model.on(i, p) for p in devices) for i in range(num)]
        for ticks in (instance.forward, instance.backward)
    ]
    fed, read = {j for _, j in edges}, {i for i, _ in edges}
    for i in range(num):
        if i not in fed:
            cp.add(there[i] == 0)
        if instance.forward_only or i not in read:
            cp.add(back[i] == there[i] + lasts[0][i])
        cp.add(makespan >= back[i] + lasts[1][i])

    def wait(i: int, j: int, moved: int, *given: Any) -> None:
        cp.add(there[j] >= there[i] + lasts[0][i] + moved).only_enforce_if(given)
        if not instance.forward_only:
            cp.add(back[i] >= back[j] + lasts[1][j] + moved).only_enforce_if(given)

    for (i, j), size in edges.items():
        wait(i, j, 0)
        if instance.group_of[i] == instance.group_of[j]:
            continue
        for p, q in permutations(devices, 2):
            moved = edge_ticks(instance, size, p, q)
            if moved:
                wait(i, j, moved, model.on(i, p), model.on(j, q))
    return makespan
