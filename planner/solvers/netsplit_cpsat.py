"""NetSplit's model (`netsplit_model.py`, whose numbers and symbols these are) in OR-Tools CP-SAT.

Operators are optional intervals per device, messages optional intervals per ordered pair of
devices. Besides, z_gh says whether groups g and h are apart, and the model has what follows from
(1) to (9) but is far from obvious to the engine:

    (a) F >= head + (the work of some operators) / D + tail, with the least time before and behind
        them; the same of B                                                    `_least_ends`
    (b) S_j >= C_i + (least ticks of what i sends j) z_g(i)g(j); the same of S'    `_edges`
    (c) no start is before the longest path to it, no end after the known schedule's

The hard part is the proof. It comes step by step, because a model of half the size is solved much
faster than one that is twice as large, and because memory and messages that wait for each other
seldom make the best schedule longer:

    step 1   forwards alone, with neither (7) nor (8): F is never less               `_stages`
    step 2   backwards alone, likewise: B is never less
    step 3   both together, likewise, each within what the other leaves: F + B is never less
    step 4   both with (8), from the best placement so far
    step 5   all of it, likewise; either ends when it is as good as the bound so far

Without linear relaxations and with one worker: on such models CP-SAT's clauses prove in seconds
what takes its other strategies minutes, and one worker repeats itself. Where there is more work
than the devices can share within the longest path, (a) is the bound and nothing here improves it:
then steps 1 to 3 are left out, and workers that take turns look for better schedules near the known
ones instead. Either is limited by deterministic time.

Source: Perron and Didier, OR-Tools CP-SAT.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from planner.problem import Status
from planner.solvers import heft
from planner.solvers.coplacement import edge_bytes
from planner.solvers.netsplit_model import (
    Answer,
    Instance,
    Known,
    edge_ticks,
    known_of,
    message_ticks,
    overflow,
    relaxed_times,
    schedule_of,
)
from planner.solvers.placing import Ints

log = logging.getLogger(__name__)

DETERMINISTIC_PER_S = 0.15
"""Units of deterministic work per second of the limit. On two cores at 2.9 GHz that other processes
used as well, a second did 0.07 to 0.12, so that the clock cuts there only."""

CROWDED_PER_S = 0.35
"""The same with workers that take turns."""

CROWDED_WORKERS = 6
CROWDED_STRATEGIES = ("no_lp", "quick_restart_no_lp")

STEP_SHARES = (0.2, 0.25, 0.4, 0.5, 1.0)
"""The most that each step takes of what the steps before it have left."""

FEW_OPERATORS = 20
"""Up to so many, everything is proved whatever the strategy."""

MARKS = 12
"""(a) is said for so many least times before operators times as many behind them."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Which parts of the model are built.

    Attributes:
        phases: False for forwards, True for backwards.
        channels: whether there is (7); memory: whether there is (8).
    """

    phases: tuple[bool, ...]
    channels: bool = False
    memory: bool = False


_BOTH = (False, True)
_STEPS = (
    _Step((False,)),
    _Step((True,)),
    _Step(_BOTH),
    _Step(_BOTH, memory=True),
    _Step(_BOTH, memory=True, channels=True),
)


@dataclass(slots=True)
class _Left:
    """What is left to search with.

    Attributes:
        work: deterministic time; until_s: the clock's end.
        whole: what this is a share of.
    """

    work: float
    until_s: float
    whole: "_Left | None" = None

    def share(self, part: float) -> "_Left":
        """A part of it; what that does not use is left here."""
        now_s = time.monotonic()
        return _Left(part * self.work, now_s + part * (self.until_s - now_s), self)

    def seconds(self) -> float:
        """By the clock."""
        return max(self.until_s - time.monotonic(), 0.01)

    def take(self, work: float) -> None:
        """Work was done."""
        self.work = max(self.work - work, 0.001)
        if self.whole is not None:
            self.whole.take(work)


@dataclass(slots=True)
class _Bounds:
    """What is known in ticks while the steps go on.

    Attributes:
        forward: F is at least that; backward: B; total: F + B.
    """

    forward: int
    backward: int
    total: int

    def least(self, backward: bool) -> int:
        """Of a phase."""
        return self.backward if backward else self.forward


@dataclass(slots=True)
class _Model:
    """The model while it is built.

    Attributes:
        cp: the engine's model; x: x[g][p]; z: z[g, h], g < h; y: y[t][p][q] of tensors that may
            cross, empty without (7).
        hints: values of the known placement.
    """

    instance: Instance
    cp: Any
    x: list[list[Any]]
    z: dict[tuple[int, int], Any]
    y: dict[int, list[list[Any]]]
    hints: list[tuple[Any, int]]

    def on(self, i: int, p: int) -> Any:
        """Whether operator i is on device p."""
        return self.x[self.instance.group_of[i]][p]

    def apart(self, i: int, j: int) -> Any:
        """Whether two operators of different groups are apart."""
        g, h = self.instance.group_of[i], self.instance.group_of[j]
        return self.z[min(g, h), max(g, h)]


@dataclass(frozen=True, slots=True)
class _Found:
    """What one call of the engine says.

    Attributes:
        status: CP-SAT's name of it; device_of: None without a placement.
        value: of the objective; bound: no solution is below it; in ticks.
        in_time: whether the clock did not cut.
    """

    status: str
    device_of: tuple[int, ...] | None
    value: int
    bound: int
    in_time: bool


def solve(instance: Instance, time_limit_s: float, start: Sequence[int] | None) -> Answer:
    """The best placement that is found from a known one.

    Args:
        time_limit_s: of the wall clock; the limit that is meant is `DETERMINISTIC_PER_S` of it.
        start: a placement that fits, to start from and to beat; None if none is known.
    """
    crowded = _is_crowded(instance)
    work = (CROWDED_PER_S if crowded else DETERMINISTIC_PER_S) * time_limit_s
    left = _Left(work, time.monotonic() + time_limit_s)
    if instance.relaxed:
        known = known_of(instance, start)
        return _answer(instance, known, _run_relaxed(instance, known, left), 0)
    if start is None:
        start = _near(instance, heft.place(instance.placing), left.share(STEP_SHARES[0]))
    known = known_of(instance, start)
    guess = known if known.fits else known_of(instance, heft.place(instance.placing))
    bounds = _Bounds(_least_ends(instance, False)[2], _least_ends(instance, True)[2], 0)
    in_time, found = True, None
    for step, share in zip(_STEPS, STEP_SHARES, strict=True):
        if crowded and not step.memory:
            continue
        bounds.total = max(bounds.total, bounds.forward + bounds.backward)
        if known.fits and known.latest <= bounds.total:
            return _answer(instance, known, None, bounds.total)
        near = replace(known, device_of=guess.device_of)
        found = _run(instance, step, near, bounds, left.share(share), crowded=crowded)
        in_time = in_time and found.in_time
        _learn(bounds, step, found)
        if not step.channels and found.device_of is not None and len(step.phases) == 2:
            guess = known_of(instance, found.device_of)
            if overflow(instance, found.device_of) <= 0 and guess.latest < known.latest:
                known = guess
    answer = _answer(instance, known, found, bounds.total)
    return replace(answer, reproducible=answer.reproducible and in_time)


def _learn(bounds: _Bounds, step: _Step, found: _Found) -> None:
    """Every step but the last is a relaxation, so its bound holds for all that follow."""
    match step.phases:
        case (False,):
            bounds.forward = max(bounds.forward, found.bound)
        case (True,):
            bounds.backward = max(bounds.backward, found.bound)
        case _:
            bounds.total = max(bounds.total, found.bound)


def _near(instance: Instance, wish: Sequence[int], left: _Left) -> tuple[int, ...] | None:
    """A placement that fits with as much work as can be where a given one has it; None if there is
    none or none was found.
    """
    from ortools.sat.python import cp_model

    known = known_of(instance, wish)
    model = _placement(instance, cp_model.CpModel(), known.device_of, memory=True)
    work = (instance.forward + instance.backward).min(axis=1)
    model.cp.maximize(
        sum(
            (1 + int(work[list(group)].sum())) * model.x[g][known.device_of[group[0]]]
            for g, group in enumerate(instance.groups)
        )
    )
    return _call(model, left).device_of


def _run(
    instance: Instance,
    step: _Step,
    known: Known,
    bounds: _Bounds,
    left: _Left,
    *,
    crowded: bool,
) -> _Found:
    """One step.

    Args:
        known: a placement for hints, and the ticks that need not be exceeded.
    """
    from ortools.sat.python import cp_model

    model = _placement(instance, cp_model.CpModel(), known.device_of, memory=step.memory)
    _apart(model, known.device_of)
    if step.channels:
        _crossings(model, known.device_of)
    ends = []
    for backward in step.phases:
        most = known.latest - bounds.least(not backward)
        phase = _phase(model, backward, bounds.least(backward), most)
        if step.channels:
            _channels(model, phase, most)
        ends.append(phase.end)
    schedule = schedule_of(instance, known.device_of)
    for backward, end in zip(step.phases, ends, strict=True):
        model.hints.append((end, schedule.backward_end if backward else schedule.forward_end))
    objective = sum(ends)
    if len(ends) > 1:
        model.cp.add_linear_constraint(objective, bounds.total, known.latest)
    model.cp.minimize(objective)
    return _call(model, left, crowded=crowded)


def _call(model: _Model, left: _Left, *, crowded: bool = False) -> _Found:
    """Solves what is built."""
    from ortools.sat.python import cp_model

    for variable, value in model.hints:
        model.cp.add_hint(variable, value)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers, parameters.linearization_level, parameters.random_seed = 1, 0, 0
    if crowded:
        parameters.num_workers, parameters.interleave_search = CROWDED_WORKERS, True
        parameters.subsolvers.extend(CROWDED_STRATEGIES)
    parameters.max_deterministic_time, parameters.max_time_in_seconds = left.work, left.seconds()
    status = solver.status_name(solver.solve(model.cp, _progress(model.instance)))
    left.take(solver.response_proto.deterministic_time)
    device_of = None
    if status in ("OPTIMAL", "FEASIBLE"):
        where = [
            next(p for p, one in enumerate(row) if solver.boolean_value(one)) for row in model.x
        ]
        device_of = tuple(where[g] for g in model.instance.group_of)
    return _Found(
        status,
        device_of,
        round(solver.objective_value) if device_of is not None else 0,
        math.ceil(solver.best_objective_bound - 1e-6) if status != "INFEASIBLE" else 0,
        solver.wall_time < parameters.max_time_in_seconds,
    )


def _progress(instance: Instance) -> Any:
    """Says incumbent, bound and gap whenever a better schedule is found."""
    from ortools.sat.python import cp_model

    class Progress(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            found, bound = self.objective_value, self.best_objective_bound
            log.info(
                "netsplit: incumbent %.6g s, bound %.6g s, gap %.1f %%",
                found * instance.tick_s,
                bound * instance.tick_s,
                100 * (found / bound - 1) if bound > 0 else 100.0,
            )

    return Progress()


def _answer(instance: Instance, known: Known, found: _Found | None, bound: int) -> Answer:
    """The last step's answer, or the known placement where there is none.

    Source: https://developers.google.com/optimization/cp/cp_solver (CpSolverStatus).
    """
    bound = max(bound, found.bound if found else 0)
    bound_s = max(0.0, bound * instance.tick_s - instance.lost_s)
    in_time = found is None or found.in_time
    if found is not None and found.device_of is not None:
        status = Status.OPTIMAL if found.value <= bound else Status.FEASIBLE
        latency_s = found.value * instance.tick_s
        return Answer(status, found.device_of, latency_s, bound_s, reproducible=in_time)
    if known.fits:
        status = Status.OPTIMAL if known.latest <= bound else Status.FEASIBLE
        latency_s = known.latest * instance.tick_s
        return Answer(status, known.device_of, latency_s, bound_s, reproducible=in_time)
    if found is not None and found.status == "INFEASIBLE":
        return Answer(Status.INFEASIBLE, None, math.inf, None)
    return Answer(Status.UNKNOWN, None, math.inf, bound_s, reproducible=in_time)


# ------------------------------------------------------------------------------------ placement


def _placement(instance: Instance, cp: Any, known: Sequence[int], *, memory: bool) -> _Model:
    """(1), (8) and (9)."""
    devices = range(instance.placing.num_devices)
    x = [[cp.new_bool_var("") for _ in devices] for _ in instance.groups]
    model = _Model(instance, cp, x, {}, {}, [])
    for group, row in zip(instance.groups, x, strict=True):
        cp.add_exactly_one(row)  # (1)
        model.hints += [(one, int(p == known[group[0]])) for p, one in enumerate(row)]
    if memory:
        _memory(model)
    if not instance.relaxed:
        for alike in instance.alike:  # (9)
            for p, q in pairwise(alike):
                for g, row in enumerate(x):
                    cp.add_bool_or([x[h][p] for h in range(g)]).only_enforce_if(row[q])
    return model


def _memory(model: _Model) -> None:
    """(8), left out for devices that everything fits on."""
    instance, cp = model.instance, model.cp
    everything = sum(instance.alone_bytes) + sum(instance.together_bytes.values())
    for p, room in enumerate(instance.placing.capacity_bytes):
        if everything <= room:
            continue
        use = [size * row[p] for size, row in zip(instance.alone_bytes, model.x, strict=True)]
        for groups, size in sorted(instance.together_bytes.items()):
            held = cp.new_bool_var("")
            for g in groups:
                cp.add_implication(model.x[g][p], held)
            use.append(size * held)
        cp.add(sum(use) <= int(room))


def _apart(model: _Model, known: Sequence[int]) -> None:
    """Sets up z, for all groups that something is sent between."""
    instance, cp = model.instance, model.cp
    for i, j in edge_bytes(instance.placing):
        g, h = sorted((instance.group_of[i], instance.group_of[j]))
        if g == h or (g, h) in model.z:
            continue
        z = model.z[g, h] = cp.new_bool_var("")
        for here, there in zip(model.x[g], model.x[h], strict=True):
            cp.add_bool_or(~here, there, z)
            cp.add_bool_or(~here, ~there, ~z)
        model.hints.append((z, int(known[i] != known[j])))


def _crossings(model: _Model, known: Sequence[int]) -> None:
    """(3), of tensors with readers in other groups than their maker's."""
    instance, cp, devices = model.instance, model.cp, range(model.instance.placing.num_devices)
    for t, flow in enumerate(instance.placing.tensors):
        home = model.x[instance.group_of[flow.producer]]
        readers = _far_readers(instance, t)
        if not readers:
            continue
        y = model.y[t] = [[cp.new_bool_var("") for _ in devices] for _ in devices]
        for p in devices:
            for q in devices:
                here = known[flow.producer] == p and any(known[j] == q for j in readers)
                model.hints.append((y[p][q], int(here and p != q)))
                if p == q:
                    cp.add(y[p][q] == 0)
                    continue
                cp.add_implication(y[p][q], home[p])
                cp.add_bool_or(*(model.on(j, q) for j in readers), ~y[p][q])
                for j in readers:
                    cp.add_bool_or(~home[p], ~model.on(j, q), y[p][q])


def _far_readers(instance: Instance, t: int) -> list[int]:
    """The readers of a tensor that are in other groups than its maker."""
    flow, group = instance.placing.tensors[t], instance.group_of
    return [j for j in flow.consumers if group[j] != group[flow.producer]]


# ---------------------------------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class _Phase:
    """All forwards, or all backwards, with their variables.

    Attributes:
        backward: which; start: S or S' of each operator; done: C or C'; end: F or B.
        lines: optional intervals by place: (p, p) for a device, (p, q) for messages.
    """

    backward: bool
    start: list[Any]
    done: list[Any]
    end: Any
    lines: dict[tuple[int, int], list[Any]]


def _ticks_of(instance: Instance, backward: bool) -> Ints:
    return instance.backward if backward else instance.forward


def _edges(instance: Instance, backward: bool) -> list[tuple[int, int, int]]:
    """(first, then, tensor): what waits for what in a phase, in an order in which all that comes
    before an operator is before what comes after it.
    """
    edges = [
        (j, flow.producer, t) if backward else (flow.producer, j, t)
        for t, flow in enumerate(instance.placing.tensors)
        for j in flow.consumers
        if flow.gradient or not backward
    ]
    return sorted(edges, reverse=backward)


def _way(p: int, other: int, backward: bool) -> tuple[int, int]:
    """The channel of a tensor made on p, or of its gradient's way back."""
    return (other, p) if backward else (p, other)


def _least_ends(instance: Instance, backward: bool) -> tuple[list[int], list[int], int]:
    """Least ticks before and behind each operator in a phase, wherever operators are; and (a)."""
    ticks = _ticks_of(instance, backward).min(axis=1).tolist()
    head, tail = [0] * len(ticks), [0] * len(ticks)
    edges = _edges(instance, backward)
    for i, j, _ in edges:
        head[j] = max(head[j], head[i] + ticks[i])
    for i, j, _ in reversed(edges):
        tail[i] = max(tail[i], tail[j] + ticks[j])
    least = max(h + own + t for h, own, t in zip(head, ticks, tail, strict=True))
    marks = [{int(np.quantile(values, k / MARKS)) for k in range(MARKS)} for values in (head, tail)]
    for before in marks[0]:
        for behind in marks[1]:
            some = [i for i, h in enumerate(head) if h >= before and tail[i] >= behind]
            work = -(-sum(ticks[i] for i in some) // instance.placing.num_devices)
            if some:
                ends = min(head[i] for i in some) + min(tail[i] for i in some)
                least = max(least, ends + work)
    return head, tail, least


def _is_crowded(instance: Instance) -> bool:
    """Whether (a) is more than the longest path, there or back."""
    for backward in (False, True):
        head, tail, least = _least_ends(instance, backward)
        ticks = _ticks_of(instance, backward).min(axis=1).tolist()
        if least > max(h + own + t for h, own, t in zip(head, ticks, tail, strict=True)):
            return instance.placing.num_operators > FEW_OPERATORS
    return False


def _phase(model: _Model, backward: bool, least: int, most: int) -> _Phase:
    """(2), (4) to (6), with messages that do not wait for each other."""
    instance, cp = model.instance, model.cp
    ticks, devices = _ticks_of(instance, backward), range(instance.placing.num_devices)
    head, tail, _ = _least_ends(instance, backward)
    start = [cp.new_int_var(h, most, "") for h in head]
    done = [
        begin + int(row[0])
        if (row == row[0]).all()
        else begin + sum(int(row[p]) * model.on(i, p) for p in devices)
        for i, (begin, row) in enumerate(zip(start, ticks, strict=True))
    ]
    end = cp.new_int_var(least, most, "")
    for i, ended in enumerate(done):
        cp.add(end >= ended + tail[i])
    phase = _Phase(backward, start, done, end, {})
    for i, j, t in _edges(instance, backward):
        _wait(model, phase, i, j, t)
    for p in devices:
        line = [
            cp.new_optional_fixed_size_interval_var(start[i], int(row[p]), model.on(i, p), "")
            for i, row in enumerate(ticks)
            if row[p]
        ]
        if len(line) > 1:
            cp.add_no_overlap(line)  # (6)
    return phase


def _wait(model: _Model, phase: _Phase, i: int, j: int, t: int) -> None:
    """(b), and where not all paths are alike the message's own time: j waits for i by tensor t."""
    instance, cp = model.instance, model.cp
    flow, devices = instance.placing.tensors[t], range(instance.placing.num_devices)
    if instance.group_of[i] == instance.group_of[j]:
        cp.add(phase.start[j] >= phase.done[i])
        return
    ways = {(p, q): message_ticks(instance, flow.bytes, p, q)
            for p in devices for q in devices if p != q}  # fmt: skip
    least = min(ways.values(), default=0)
    cp.add(phase.start[j] >= phase.done[i] + least * model.apart(i, j))
    for (p, q), ticks in ways.items():
        if ticks > least:
            both = [model.on(i, p), model.on(j, q)]
            cp.add(phase.start[j] >= phase.done[i] + ticks).only_enforce_if(both)


def _channels(model: _Model, phase: _Phase, most: int) -> None:
    """(7), with when messages are sent in (4) and (5)."""
    instance, cp = model.instance, model.cp
    devices = range(instance.placing.num_devices)
    for t, y in model.y.items():
        flow = instance.placing.tensors[t]
        if phase.backward and not flow.gradient:
            continue
        for other in devices:
            sent = cp.new_int_var(0, most, "")
            for p in devices:
                way = _way(p, other, phase.backward)
                ticks = message_ticks(instance, flow.bytes, *way)
                if p == other or not ticks:
                    continue
                phase.lines.setdefault(way, []).append(
                    cp.new_optional_fixed_size_interval_var(sent, ticks, y[p][other], "")
                )
                _send(model, phase, t, sent, ticks, (p, other))
    for line in phase.lines.values():
        if len(line) > 1:
            cp.add_no_overlap(line)


def _send(
    model: _Model, phase: _Phase, t: int, sent: Any, ticks: int, ends: tuple[int, int]
) -> None:
    """When a message may go that takes so many ticks if the tensor's maker and readers are there.

    Args:
        ends: device of the maker, device of the readers.
    """
    cp, maker = model.cp, model.instance.placing.tensors[t].producer
    crosses = model.y[t][ends[0]][ends[1]]
    if phase.backward:
        cp.add(phase.start[maker] >= sent + ticks).only_enforce_if(crosses)
    else:
        cp.add(sent >= phase.done[maker]).only_enforce_if(crosses)
    for j in _far_readers(model.instance, t):
        late = sent >= phase.done[j] if phase.backward else phase.start[j] >= sent + ticks
        cp.add(late).only_enforce_if([crosses, model.on(j, ends[1])])


# -------------------------------------------------------------------------------- published model


def _run_relaxed(instance: Instance, known: Known, left: _Left) -> _Found:
    from ortools.sat.python import cp_model

    model = _placement(instance, cp_model.CpModel(), known.device_of, memory=True)
    makespan = _relaxed(model, known)
    model.cp.minimize(makespan)
    return _call(model, left)


def _relaxed(model: _Model, known: Known) -> Any:
    """(2'), (4') and (5'): the makespan."""
    instance, cp, worst = model.instance, model.cp, known.latest
    num, devices = instance.placing.num_operators, range(instance.placing.num_devices)
    edges = edge_bytes(instance.placing)
    forward, backward = relaxed_times(instance, known.device_of)
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
        if i not in read:
            cp.add(back[i] == there[i] + lasts[0][i])
        cp.add(makespan >= back[i] + lasts[1][i])
    for (i, j), size in edges.items():
        cp.add(there[j] >= there[i] + lasts[0][i])
        cp.add(back[i] >= back[j] + lasts[1][j])
        for p in devices:
            for q in devices:
                moved = edge_ticks(instance, size, p, q)
                if not moved or instance.group_of[i] == instance.group_of[j]:
                    continue
                both = [model.on(i, p), model.on(j, q)]
                cp.add(there[j] >= there[i] + lasts[0][i] + moved).only_enforce_if(both)
                cp.add(back[i] >= back[j] + lasts[1][j] + moved).only_enforce_if(both)
    return makespan
