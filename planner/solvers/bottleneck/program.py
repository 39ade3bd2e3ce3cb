"""The smallest bottleneck as a mixed integer program (`model.py`, whose symbols these are). Besides
T, the bottleneck, the variables are

    x_vp            whether item v is on device p
    z_ep            whether p, which pays, has some but not all items of net e
    y_epq           whether net e is sent from p to q
    k_sp            whether p keeps entry s of the memory

    minimise   T
    subject to (1) sum_p x_vp = 1
               (2) sum_v w_vp x_vp + sum_e c_ep z_ep <= T
               (3) z_ep >= x_vp - x_home(e)p and z_ep >= x_home(e)p - x_vp for the readers v of e
               (4) sum_p y_epq >= x_vq - x_home(e)q for the readers v of e, y_epq <= x_home(e)p
               (5) sum_e m_epq y_epq + sum over e with a gradient of m_epq y_eqp <= T
               (6) k_sp >= x_vp for the items v that need s;  sum_s bytes_s k_sp <= room_p
               (7) of devices that may be swapped, p before q: v is on q only if a heavier item is
                   on p; for the heaviest items only, by which the devices are told apart
               (8) contiguous: for every net and each k, its home is on one of the first k devices
                   of the order if a reader is

(4) is stronger than y_epq >= x_home(e)p + x_vq - 1, which allows y = 0 in the relaxed program where
the home and a reader are half on each of two devices.

T is in units of the bound that needs no search, and bytes are in units of the largest room, so that
tolerances mean the same for every model.

`neighbourhood` is the same program in which only the items of some devices move, and T covers only
the works with an end on these devices. Ties go to less work in total, which leaves room for the
next neighbourhood.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.solvers.bottleneck.model import (
    BottleneckNet,
    BottleneckProblem,
    devices_of,
    line_place,
    simple_bound_s,
)
from planner.solvers.engines.mip import Mip

SYMMETRY_ITEMS_PER_DEVICE = 3
"""Heaviest items per device that (7) covers; every further one adds rows and rules out less."""

MEAN_WORK_WEIGHT = 0.03
"""Weight of the mean work beside the largest in a neighbourhood."""


@dataclass(frozen=True, slots=True)
class BottleneckProgram:
    """The program of a problem; variables are indices into `mip`.

    Attributes:
        x: x[v][p].
        bottleneck: T.
        row_of: the row of each work, by its place in `works_s`.
        unit_s: unit of T.
    """

    problem: BottleneckProblem
    mip: Mip
    x: tuple[tuple[int, ...], ...]
    bottleneck: int
    row_of: Mapping[int, int]
    unit_s: float

    def placement(self, values: Sequence[float]) -> tuple[int, ...]:
        """Device of each item."""
        return tuple(max(range(len(row)), key=lambda p: values[row[p]]) for row in self.x)

    def hint(self, on: Sequence[int]) -> dict[int, float]:
        """The values of x of a placement."""
        return {j: float(on[v] == p) for v, row in enumerate(self.x) for p, j in enumerate(row)}


def heaviest_first(problem: BottleneckProblem) -> list[int]:
    """Items by falling work where they are fastest."""
    lightest = problem.work_s.min(axis=1)
    return sorted(range(problem.num_items), key=lambda v: -lightest[v])


def canonical(problem: BottleneckProblem, on: Sequence[int]) -> tuple[int, ...]:
    """The same placement with the devices of a class renamed by (7)."""
    class_of = {p: known for known in problem.alike for p in known}
    free = {known: list(known) for known in problem.alike}
    name: dict[int, int] = {}
    for v in heaviest_first(problem):
        if on[v] not in name:
            name[on[v]] = free[class_of[on[v]]].pop(0)
    return tuple(name[p] for p in on)


def program_of(problem: BottleneckProblem, *, symmetric: bool) -> BottleneckProgram:
    """The program.

    Args:
        symmetric: whether devices that may be swapped are told apart, (7).
    """
    mip, unit_s = Mip(), simple_bound_s(problem) or 1.0
    # Only x has to be whole. All others count for a work or for memory, so less is better, and a
    # whole x leaves them 0 or 1 as their least values.
    bottleneck = mip.variable(float("inf"))
    mip.objective = {bottleneck: 1.0}
    x = []
    for row in np.isfinite(problem.work_s):
        x.append(tuple(mip.variable(float(runs), integer=True) for runs in row))
        mip.row(dict.fromkeys(x[-1], 1.0), 1.0, 1.0)  # (1)
    model = BottleneckProgram(problem, mip, tuple(x), bottleneck, {}, unit_s)
    model = replace(model, row_of=_works(model))
    _memory(model)
    if problem.order is not None:
        _contiguous(model, problem.order)
    elif symmetric:
        _symmetry(model)
    return model


def _works(model: BottleneckProgram) -> dict[int, int]:
    """(2) to (5). Returns the row of each work, by its place."""
    problem, mip, num = model.problem, model.mip, model.problem.num_devices
    terms: dict[int, dict[int, float]] = {
        p: {
            row[p]: float(problem.work_s[v, p]) / model.unit_s
            for v, row in enumerate(model.x)
            if np.isfinite(problem.work_s[v, p])
        }
        for p in range(num)
    }
    for net in problem.nets:
        if net.crossing_s > 0:
            for p in np.flatnonzero(problem.pays).tolist():
                terms[p][_cut(model, net, p)] = net.crossing_s / model.unit_s
        if problem.has_lines:
            for (p, q), y in _sent(model, net).items():
                there = terms.setdefault(line_place(num, p, q), {})
                there[y] = problem.transfer_s(net, p, q) / model.unit_s
                if net.gradient:
                    back = terms.setdefault(line_place(num, q, p), {})
                    back[y] = problem.transfer_s(net, q, p) / model.unit_s
    row_of = {}
    for place, parts in terms.items():
        row_of[place] = len(mip.rows)
        mip.row({**parts, model.bottleneck: -1.0}, high=0.0)
    return row_of


def _cut(model: BottleneckProgram, net: BottleneckNet, p: int) -> int:
    """(3). Returns z."""
    z, home = model.mip.variable(), model.x[net.home][p]
    for v in net.readers:
        model.mip.row({z: 1.0, model.x[v][p]: -1.0, home: 1.0}, low=0.0)
        model.mip.row({z: 1.0, model.x[v][p]: 1.0, home: -1.0}, low=0.0)
    return z


def _sent(model: BottleneckProgram, net: BottleneckNet) -> dict[tuple[int, int], int]:
    """(4). Returns y by (p, q)."""
    devices, home = range(model.problem.num_devices), model.x[net.home]
    sent = {}
    for q in devices:
        for p in devices:
            if p != q:
                sent[p, q] = y = model.mip.variable()
                model.mip.row({y: 1.0, home[p]: -1.0}, high=0.0)
        arrives = {sent[p, q]: 1.0 for p in devices if p != q}
        for v in net.readers:
            model.mip.row({**arrives, home[q]: 1.0, model.x[v][q]: -1.0}, low=0.0)
    return sent


def _memory(model: BottleneckProgram) -> None:
    """(6); left out where everything fits every device."""
    problem, mip = model.problem, model.mip
    total = sum(size for _, size in problem.kept)
    limited = [p for p, room in enumerate(problem.room_bytes.tolist()) if room < total]
    unit = float(max([*problem.room_bytes[limited].tolist(), 1.0]))
    for p in limited:
        terms: dict[int, float] = {}
        for items, size in problem.kept:
            k = model.x[items[0]][p] if len(items) == 1 else mip.variable()
            for v in items if len(items) > 1 else ():
                mip.row({k: 1.0, model.x[v][p]: -1.0}, low=0.0)
            terms[k] = terms.get(k, 0.0) + size / unit
        mip.row(terms, high=float(problem.room_bytes[p]) / unit)


def _symmetry(model: BottleneckProgram) -> None:
    """(7)."""
    heavy = heaviest_first(model.problem)
    # No placement is lost: `canonical` renames the devices of any.
    for alike in model.problem.alike:
        told = heavy[: SYMMETRY_ITEMS_PER_DEVICE * len(alike)]
        for p, q in pairwise(alike):
            for k, v in enumerate(told):
                heavier = {model.x[u][p]: -1.0 for u in told[:k]}
                model.mip.row({model.x[v][q]: 1.0, **heavier}, high=0.0)


def _contiguous(model: BottleneckProgram, order: Sequence[int]) -> None:
    """(8)."""
    for home, v in sorted({(net.home, v) for net in model.problem.nets for v in net.readers}):
        for k in range(1, len(order)):
            ahead = {model.x[home][p]: 1.0 for p in order[:k]}
            model.mip.row({**ahead, **{model.x[v][p]: -1.0 for p in order[:k]}}, low=0.0)


def neighbourhood(model: BottleneckProgram, on: Sequence[int], devices: Collection[int]) -> Mip:
    """The program in which only the items on some devices move, and only between these."""
    mip, num = model.mip, model.problem.num_devices
    low, high = list(mip.low), list(mip.high)
    for v, row in enumerate(model.x):
        for p, j in enumerate(row):
            if on[v] not in devices:
                low[j] = high[j] = float(on[v] == p)
            elif p not in devices:
                high[j] = 0.0
    rows, objective = list(mip.rows), {model.bottleneck: 1.0}
    for place, index in model.row_of.items():
        terms, _, _ = rows[index]
        if devices_of(num, place).isdisjoint(devices):
            rows[index] = (terms, -np.inf, np.inf)  # this work is fixed
            continue
        for j, a in terms.items():
            if j != model.bottleneck:
                objective[j] = objective.get(j, 0.0) + MEAN_WORK_WEIGHT * a / len(devices)
    return replace(mip, low=low, high=high, rows=rows, objective=objective)
