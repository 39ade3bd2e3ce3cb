"""NetSplit's model (`model.py`, whose numbers and symbols these are) in gurobipy, with big-M
constraints. H, the known schedule's ticks, is the M of all of them. Besides the variables there:

    r_tq       >= x_g(j)q for j in J(t)                              whether t is read on q
    y_tpq      >= x_g(i(t))p + r_tq - 1                              (3)
    o_ab       whether job a comes before job b, for pairs that may meet in one place and that
               nothing else puts in order

    (6)  S_j >= C_i - H (1 - o_ij) - H (2 - x_g(i)p - x_g(j)p), and the same with i and j swapped
    (7)  A_ur >= A_tq + n - H (1 - o) - H (2 - y_tpq - y_usr), and with the two swapped, where n is
         the longest time for which the transfer of t occupies what both occupy
    (9)  as it stands; heads, tails and least ends as in `bounds.py`

Pairs grow with the square of operators and transfers: this engine is for small instances, and for a
second opinion. The bundled licence takes 2,000 variables and 2,000 constraints.

Source: Gurobi Optimization, https://docs.gurobi.com/projects/optimizer.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from planner.artefacts.problem import Status
from planner.solvers.engines.gurobi import gurobi_model
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.netsplit.bounds import phase_bounds_of
from planner.solvers.netsplit.model import (
    EngineAnswer,
    KnownPlacement,
    NetSplitInstance,
    busy_ticks,
    edge_ticks,
    known_placement_of,
    transfer_ticks,
)
from planner.solvers.placement.coplacement import edge_bytes
from planner.solvers.placement.timetable import LINK
from planner.support.arrays import Ints
from planner.support.brake import Brake

log = logging.getLogger(__name__)

WORK_PER_S = 1.0
"""Work units per second of the limit; gurobi does about one per second."""


@dataclass(slots=True)
class _GurobiModel:
    """The model while it is built.

    Attributes:
        grb: the module; model: the engine's model.
        x: x[g][p]; y: y[t, p, q]; horizon: H.
    """

    instance: NetSplitInstance
    grb: Any
    model: Any
    x: list[list[Any]]
    y: dict[tuple[int, int, int], Any]
    horizon: int

    def on(self, i: int, p: int) -> Any:
        """Whether operator i is on device p."""
        return self.x[self.instance.group_of[i]][p]

    def time(self, least: int = 0) -> Any:
        """A new variable for a time in ticks."""
        return self.model.addVar(lb=least, ub=self.horizon)

    def flag(self) -> Any:
        """A new binary variable."""
        return self.model.addVar(vtype=self.grb.GRB.BINARY)


def solve(
    instance: NetSplitInstance,
    time_limit_s: float,
    start: Sequence[int] | None,
    *,
    seed: int = 0,
    gap: float = 0.0,
    brake: Brake | None = None,
) -> EngineAnswer:
    """The best placement that a search from a known one finds.

    Args:
        time_limit_s: limit of deterministic work, in seconds of an ordinary core.
        start: a placement that fits, to start from and to beat; None if none is known.
        seed: seed of the engine.
        gap: (latency - bound) / bound at which the search may end.
        brake: of the search that this is a part of.

    Raises:
        EngineUnavailableError: if there is no licence, or it does not cover so large a model.
    """
    watch = SearchWatch(log, instance.tick_s, gap, brake)
    with gurobi_model() as (grb, model), interruptible(watch):
        model.Params.Seed, model.Params.WorkLimit = seed, WORK_PER_S * time_limit_s
        answer = _solved(instance, grb, model, watch, start)
    if watch.interrupted:
        return replace(answer, reproducible=False, note=INTERRUPTED)
    return replace(answer, reproducible=not watch.cut)


def _solved(
    instance: NetSplitInstance,
    grb: Any,
    model: Any,
    watch: SearchWatch,
    start: Sequence[int] | None,
) -> EngineAnswer:
    # The default stops at 0.01 %, and allows 1e-6 of H in big-M constraints. A gap is of the
    # incumbent here.
    model.Params.MIPGap, model.Params.IntFeasTol = watch.enough / (1 + watch.enough), 1e-9
    known = known_placement_of(instance, start)
    built = _placement(instance, grb, model, known)
    objective = _relaxed(built) if instance.relaxed else _full(built)
    model.setObjective(objective, grb.GRB.MINIMIZE)
    if known.fits:
        watch.see(known.latest)
    watch.run(lambda: model.optimize(_tell(grb, watch)), model.terminate)
    watch.interrupted |= model.Status == grb.GRB.INTERRUPTED and not watch.cut
    bound_s = max(0.0, model.ObjBound) * instance.tick_s - instance.lost_s
    if model.SolCount == 0 and model.Status == grb.GRB.INFEASIBLE and not known.fits:
        return EngineAnswer(Status.INFEASIBLE, None, math.inf, None)
    if model.SolCount == 0 and not known.fits:
        return EngineAnswer(Status.UNKNOWN, None, math.inf, bound_s)
    if model.SolCount == 0:
        latency_s = known.latest * instance.tick_s
        return EngineAnswer(Status.FEASIBLE, known.device_of, latency_s, bound_s)
    # The optimum is a whole number of ticks.
    proved = model.ObjVal <= model.ObjBound + 0.5
    device_of = tuple(max(range(len(row)), key=lambda p: row[p].X) for row in built.x)
    return EngineAnswer(
        Status.OPTIMAL if proved else Status.FEASIBLE,
        tuple(device_of[g] for g in instance.group_of),
        model.ObjVal * instance.tick_s,
        bound_s,
    )


def _tell(grb: Any, watch: SearchWatch) -> Callable[[Any, int], None]:
    """A callback that tells the watch the engine's best value and bound."""

    def called(model: Any, where: int) -> None:
        if where == grb.GRB.Callback.MIP:
            best = model.cbGet(grb.GRB.Callback.MIP_OBJBST)
            watch.see(
                best if best < grb.GRB.INFINITY else math.inf,
                model.cbGet(grb.GRB.Callback.MIP_OBJBND),
            )

    return called


def _placement(
    instance: NetSplitInstance, grb: Any, model: Any, known: KnownPlacement
) -> _GurobiModel:
    """(1), (8) and (9); the known placement is the start."""
    devices = range(instance.problem.num_devices)
    built = _GurobiModel(instance, grb, model, [], {}, known.latest)
    for group in instance.groups:
        row = [built.flag() for _ in devices]
        for p, one in enumerate(row):
            if known.fits:
                one.Start = float(known.device_of[group[0]] == p)
        model.addConstr(sum(row) == 1)
        built.x.append(row)
    room = instance.problem.capacity_bytes
    # In units of the largest memory, because 1e10 beside 1 is more than the engine's accuracy.
    unit = float(max(room.max(), 1))
    if sum(instance.alone_bytes) + sum(instance.together_bytes.values()) > room.min():
        for p in devices:
            alone = [
                size / unit * row[p]
                for size, row in zip(instance.alone_bytes, built.x, strict=True)
            ]
            together = [
                size / unit * _any(built, groups, p)
                for groups, size in sorted(instance.together_bytes.items())
            ]
            model.addConstr(sum(alone) + sum(together) <= int(room[p]) / unit)
    if not instance.relaxed:
        for alike in instance.alike:
            for p, q in pairwise(alike):
                for g, row in enumerate(built.x):
                    model.addConstr(row[q] <= sum(built.x[h][p] for h in range(g)))
    return built


def _any(built: _GurobiModel, groups: Sequence[int], p: int) -> Any:
    """A variable that is at least 1 if a device has one of some groups."""
    if len(groups) == 1:
        return built.x[groups[0]][p]
    # Neither binary nor bounded from above: it stands only where a larger value makes the model
    # tighter, so the search has no reason to raise it.
    held = built.model.addVar(ub=1.0)
    for g in groups:
        built.model.addConstr(held >= built.x[g][p])
    return held


# ----------------------------------------------------------------------------------- full model


def _full(built: _GurobiModel) -> Any:
    """F + B."""
    instance, devices = built.instance, range(built.instance.problem.num_devices)
    for t, tensor in enumerate(instance.problem.tensors):
        home = instance.group_of[tensor.producer]
        groups = sorted({instance.group_of[j] for j in tensor.consumers} - {home})
        for q in devices if groups else ():
            read = _any(built, groups, q)
            for p in devices:
                if p != q:
                    # Bounded from below only: a y of 1 without need adds a transfer, which never
                    # helps.
                    y = built.y[t, p, q] = built.flag()
                    built.model.addConstr(y >= built.x[home][p] + read - 1)
    return _phase(built, instance.forward, backward=False) + _phase(
        built, instance.backward, backward=True
    )


def _phase(built: _GurobiModel, ticks: Ints, *, backward: bool) -> Any:
    """The end of a phase, F or B, with (2) and (4) or (5) to (7)."""
    instance, model = built.instance, built.model
    num, devices = instance.problem.num_operators, range(instance.problem.num_devices)
    bounds = phase_bounds_of(instance, backward=backward)
    end, start = built.time(bounds.least), [built.time(head) for head in bounds.head]
    last = [sum(int(ticks[i, p]) * built.on(i, p) for p in devices) for i in range(num)]
    for i in range(num):
        model.addConstr(end >= start[i] + last[i] + bounds.tail[i])
    # Follows from (6), but not while o and x are fractions: then big-M constraints say nothing, and
    # this one bounds the phase by the work of a device.
    for p in devices:
        model.addConstr(end >= sum(int(ticks[i, p]) * built.on(i, p) for i in range(num)))
    before = _transfers(built, start, last, backward=backward)
    for i, j in combinations(range(num), 2):  # (6)
        # Their order follows from (4) or (5), so it takes no o.
        if j in before[i] or i in before[j]:
            continue
        first = built.flag()
        for p in devices:
            apart = built.horizon * (2 - built.on(i, p) - built.on(j, p))
            late = built.horizon * (1 - first)
            if ticks[i, p] and ticks[j, p]:
                model.addConstr(start[j] >= start[i] + last[i] - late - apart)
                model.addConstr(start[i] >= start[j] + last[j] - built.horizon * first - apart)
    return end


def _transfers(
    built: _GurobiModel, start: Sequence[Any], last: Sequence[Any], *, backward: bool
) -> list[set[int]]:
    """(4) or (5), and (7). Returns all operators before each one in the phase, direct or not: such
    pairs need no (6).
    """
    instance, model, horizon = built.instance, built.model, built.horizon
    num, devices = instance.problem.num_operators, range(instance.problem.num_devices)
    feeds: list[set[int]] = [set() for _ in range(num)]
    sent: dict[tuple[int, int], Any] = {}
    for t, tensor in enumerate(instance.problem.tensors):
        if backward and not tensor.gradient:
            continue
        i = tensor.producer
        for j in tensor.consumers:
            first, then = (j, i) if backward else (i, j)
            feeds[then].add(first)
            model.addConstr(start[then] >= start[first] + last[first])
        for other in devices:
            ways = [p for p in devices if (t, p, other) in built.y]
            if not ways:
                continue
            begin = sent[t, other] = built.time()
            length = sum(
                _ticks(instance, t, p, other, backward=backward) * built.y[t, p, other]
                for p in ways
            )
            for j in tensor.consumers:
                # H is enough for M: all that is scheduled ends by H, so a constraint that does not
                # apply asks for nothing above 0.
                elsewhere = horizon * (1 - built.on(j, other))
                if backward:
                    model.addConstr(begin >= start[j] + last[j] - elsewhere)
                else:
                    model.addConstr(start[j] >= begin + length - elsewhere)
            if backward:
                model.addConstr(start[i] >= begin + length)
            else:
                model.addConstr(begin >= start[i] + last[i])
    _channels(built, sent, backward=backward)
    return _all_before(feeds, range(num) if not backward else range(num - 1, -1, -1))


def _ticks(instance: NetSplitInstance, t: int, p: int, other: int, *, backward: bool) -> int:
    """Ticks of a tensor from p to another device, or of its gradient back to p."""
    way = (other, p) if backward else (p, other)
    return transfer_ticks(instance, instance.problem.tensors[t].bytes, *way)


def _channels(built: _GurobiModel, sent: Mapping[tuple[int, int], Any], *, backward: bool) -> None:
    """(7)."""
    model, horizon = built.model, built.horizon
    for (t, q), (u, r) in combinations(sent, 2):
        first = None
        for p, s, after_t, after_u in _meetings(built, (t, q), (u, r), backward=backward):
            # One order for all the resources that two transfers share: they occupy each from
            # their starts on.
            first = built.flag() if first is None else first
            apart = horizon * (2 - built.y[t, p, q] - built.y[u, s, r])
            model.addConstr(sent[u, r] >= sent[t, q] + after_t - horizon * (1 - first) - apart)
            model.addConstr(sent[t, q] >= sent[u, r] + after_u - horizon * first - apart)


def _meetings(
    built: _GurobiModel, one: tuple[int, int], other: tuple[int, int], *, backward: bool
) -> Iterator[tuple[int, int, int, int]]:
    """(p, s, ticks, ticks): the home devices of two tensors for which their transfers share a
    resource, and the ticks between the starts of both if the first, or the second, goes first.

    Args:
        one, other: (tensor, device that reads it).
    """
    (t, q), (u, r) = one, other
    for p in range(built.instance.problem.num_devices):
        for s in range(built.instance.problem.num_devices):
            if (t, p, q) not in built.y or (u, s, r) not in built.y or (t == u and p != s):
                continue
            busy_t = _busy(built.instance, t, p, q, backward=backward)
            busy_u = _busy(built.instance, u, s, r, backward=backward)
            common = [k for k in busy_t if k in busy_u and busy_t[k] and busy_u[k]]
            if common:
                yield p, s, max(busy_t[k] for k in common), max(busy_u[k] for k in common)


def _busy(
    instance: NetSplitInstance, t: int, p: int, other: int, *, backward: bool
) -> dict[tuple[int, int], int]:
    """By channel and shared link (LINK, l), the ticks for which a transfer occupies them."""
    way = (other, p) if backward else (p, other)
    links = busy_ticks(instance, instance.problem.tensors[t].bytes, *way)
    own = {way: _ticks(instance, t, p, other, backward=backward)}
    return own | {(LINK, k): busy for k, busy in links}


def _all_before(feeds: Sequence[set[int]], order: Sequence[int]) -> list[set[int]]:
    before: list[set[int]] = [set() for _ in feeds]
    for i in order:
        before[i] = feeds[i].union(*(before[j] for j in feeds[i]))
    return before


# -------------------------------------------------------------------------------- published model


def _relaxed(built: _GurobiModel) -> Any:
    """(2'), (4') and (5'): the makespan."""
    instance, model, horizon = built.instance, built.model, built.horizon
    num, devices = instance.problem.num_operators, range(instance.problem.num_devices)
    edges = edge_bytes(instance.problem)

    def duration(ticks: Ints, i: int) -> Any:
        return sum(int(ticks[i, p]) * built.on(i, p) for p in devices)

    there = [built.time() for _ in range(num)]
    back = [built.time() for _ in range(num)]
    makespan = built.time()
    fed, read = {j for _, j in edges}, {i for i, _ in edges}
    for i in range(num):
        if i not in fed:
            model.addConstr(there[i] == 0)
        if i not in read:
            model.addConstr(back[i] == there[i] + duration(instance.forward, i))
        model.addConstr(makespan >= back[i] + duration(instance.backward, i))
    for (i, j), size in sorted(edges.items()):
        forward, backward = duration(instance.forward, i), duration(instance.backward, j)
        model.addConstr(there[j] >= there[i] + forward)
        model.addConstr(back[i] >= back[j] + backward)
        if instance.group_of[i] == instance.group_of[j]:
            continue
        for p in devices:
            for q in devices:
                moved = edge_ticks(instance, size, p, q)
                if moved:
                    other = horizon * (2 - built.on(i, p) - built.on(j, q))
                    model.addConstr(there[j] >= there[i] + forward + moved - other)
                    model.addConstr(back[i] >= back[j] + backward + moved - other)
    return makespan
