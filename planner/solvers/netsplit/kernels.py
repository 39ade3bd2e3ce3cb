"""The inner loop of `netsplit_search.py`, compiled by numba: simulated annealing over schedules.
Arrays are indexed by

i, j  operators, in topological order          p, q  devices
t     tensors                                  g     groups of operators that share a device
e     what devices keep once for all groups that need it

A schedule is coded as a placement and two orders of the operators, one per phase, such that what
feeds comes first. It is decoded by giving every operator of an order the earliest start behind what
its device and its channels were given before; a message leaves when its last sender there has
ended, behind the messages that its channel was given before.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from planner.support.arrays import Bools, Ints
from planner.support.jit import inner, njit

FAR = 10
"""The most places that an operator moves in an order at once."""


class Lists(NamedTuple):
    """Rows of different lengths: row i is values[start[i]:start[i + 1]]."""

    start: Ints
    values: Ints


def lists_of(rows: Iterable[Iterable[int]]) -> Lists:
    """The same as arrays."""
    listed = [list(row) for row in rows]
    start = np.cumsum([0, *(len(row) for row in listed)], dtype=np.int64)
    return Lists(start, np.array([x for row in listed for x in row], dtype=np.int64))


class Plant(NamedTuple):
    """The model's numbers.

    Attributes:
        ticks: (2, N, D) of forwards and backwards.
        away: (T, D, D) of messages from p to q.
        maker: (T,) operator; gradient: (T,) whether one comes back.
        readers: operators by tensor; makes: tensors by operator; reads: the same of what it reads.
        before: operators that feed each; after: those that it feeds.
        group_of: (N,); members: operators by group.
        keeps: entries by group; kept: (E,) bytes of each entry.
        room: (D,) bytes.
    """

    ticks: Ints
    away: Ints
    maker: Ints
    gradient: Bools
    readers: Lists
    makes: Lists
    reads: Lists
    before: Lists
    after: Lists
    group_of: Ints
    members: Lists
    keeps: Lists
    kept: Ints
    room: Ints


class State(NamedTuple):
    """A schedule while it is changed, and room to work in.

    Attributes:
        where: (N,) device of each operator.
        orders: (2, N) operators as they are given their starts, by phase; turns: its inverse.
        ends: (2,) ticks F and B.
        held: (E, D) groups on a device that need an entry; used: (D,) bytes.
        end: (2, N) when operators end.
        there: (2, T, D) when a tensor is on a device, or its gradient back from there; -1 if it is
            not sent.
        left: (T, D) readers whose backwards are still to come.
        moved: (2,) groups of a move; source, target: (2,) their devices before and after.
    """

    where: Ints
    orders: Ints
    turns: Ints
    ends: Ints
    held: Ints
    used: Ints
    end: Ints
    there: Ints
    left: Ints
    moved: Ints
    source: Ints
    target: Ints


def state_of(plant: Plant, where: Sequence[int], orders: Sequence[Sequence[int]]) -> State:
    """The schedule of a placement and orders."""
    num, (devices,), (tensors,) = len(where), plant.room.shape, plant.maker.shape
    state = State(
        where=np.array(where, dtype=np.int64),
        orders=np.array(orders, dtype=np.int64),
        turns=np.argsort(np.array(orders, dtype=np.int64), axis=1),
        ends=np.zeros(2, np.int64),
        held=np.zeros((len(plant.kept), devices), np.int64),
        used=np.zeros(devices, np.int64),
        end=np.zeros((2, num), np.int64),
        there=np.full((2, tensors, devices), -1),
        left=np.zeros((tensors, devices), np.int64),
        moved=np.zeros(2, np.int64),
        source=np.zeros(2, np.int64),
        target=np.zeros(2, np.int64),
    )
    fill(plant, state)
    return state


@inner
def _forwards(plant: Plant, state: State) -> int:
    """F; sets when operators end and when tensors are where."""
    (devices,), where, end, there = plant.room.shape, state.where, state.end[0], state.there[0]
    free, channel = np.zeros(devices, np.int64), np.zeros((devices, devices), np.int64)
    there[:] = -1
    last = 0
    for i in state.orders[0]:
        p = where[i]
        begin = free[p]
        for x in range(plant.reads.start[i], plant.reads.start[i + 1]):
            t = plant.reads.values[x]
            ready = end[plant.maker[t]] if where[plant.maker[t]] == p else there[t, p]
            begin = max(begin, ready)
        end[i] = free[p] = begin + plant.ticks[0, i, p]
        last = max(last, end[i])
        for x in range(plant.makes.start[i], plant.makes.start[i + 1]):
            t = plant.makes.values[x]
            for y in range(plant.readers.start[t], plant.readers.start[t + 1]):
                q = where[plant.readers.values[y]]
                if q != p and there[t, q] < 0:
                    sent = max(channel[p, q], end[i]) + plant.away[t, p, q]
                    there[t, q] = channel[p, q] = sent
    return last


@inner
def _backwards(plant: Plant, state: State) -> int:
    """B; sets when operators end and when gradients are back, by where they come from."""
    (devices,), where, end, there = plant.room.shape, state.where, state.end[1], state.there[1]
    free, channel = np.zeros(devices, np.int64), np.zeros((devices, devices), np.int64)
    left = state.left
    there[:], left[:] = -1, 0
    for t in range(plant.maker.shape[0]):
        for y in range(plant.readers.start[t], plant.readers.start[t + 1]):
            left[t, where[plant.readers.values[y]]] += 1
    last = 0
    for i in state.orders[1]:
        p = where[i]
        begin = free[p]
        for x in range(plant.makes.start[i], plant.makes.start[i + 1]):
            t = plant.makes.values[x]
            if plant.gradient[t]:
                for y in range(plant.readers.start[t], plant.readers.start[t + 1]):
                    q = where[plant.readers.values[y]]
                    ready = end[plant.readers.values[y]] if q == p else there[t, q]
                    begin = max(begin, ready)
        end[i] = free[p] = begin + plant.ticks[1, i, p]
        last = max(last, end[i])
        for x in range(plant.reads.start[i], plant.reads.start[i + 1]):
            t = plant.reads.values[x]
            q = where[plant.maker[t]]
            left[t, p] -= 1
            if plant.gradient[t] and q != p and left[t, p] == 0:
                sent = max(channel[p, q], end[i]) + plant.away[t, p, q]
                there[t, p] = channel[p, q] = sent
    return last


@njit
def fill(plant: Plant, state: State) -> None:
    """Counts what devices keep, and schedules both phases."""
    state.held[:], state.used[:] = 0, 0
    for g in range(plant.members.start.shape[0] - 1):
        p = _device(plant, state, g)
        for x in range(plant.keeps.start[g], plant.keeps.start[g + 1]):
            e = plant.keeps.values[x]
            if state.held[e, p] == 0:
                state.used[p] += plant.kept[e]
            state.held[e, p] += 1
    state.ends[0], state.ends[1] = _forwards(plant, state), _backwards(plant, state)


@inner
def _device(plant: Plant, state: State, g: int) -> int:
    return int(state.where[plant.members.values[plant.members.start[g]]])


@inner
def _one_of(rows: Lists, i: int) -> int:
    """One of a row by chance, -1 if it is empty."""
    first, last = rows.start[i], rows.start[i + 1]
    return int(rows.values[np.random.randint(first, last)]) if first < last else -1


@inner
def _put(plant: Plant, state: State, g: int, q: int) -> None:
    """Moves a group to a device."""
    p = _device(plant, state, g)
    for x in range(plant.keeps.start[g], plant.keeps.start[g + 1]):
        e = plant.keeps.values[x]
        state.held[e, p] -= 1
        if state.held[e, p] == 0:
            state.used[p] -= plant.kept[e]
        if state.held[e, q] == 0:
            state.used[q] += plant.kept[e]
        state.held[e, q] += 1
    for x in range(plant.members.start[g], plant.members.start[g + 1]):
        state.where[plant.members.values[x]] = q


@inner
def _draw(plant: Plant, state: State) -> int:
    """Chooses one or two groups and their devices. Returns how many."""
    devices, groups = plant.room.shape[0], plant.members.start.shape[0] - 1
    g = np.random.randint(0, groups)
    p = _device(plant, state, g)
    q = (p + np.random.randint(1, devices)) % devices
    state.moved[0], state.source[0], state.target[0] = g, p, q
    chance, h = np.random.random(), -1
    if chance < 0.25:
        h = np.random.randint(0, groups)
        if _device(plant, state, h) != q:
            h = -1
    elif chance < 0.5:
        reader = _one_of(plant.after, _one_of(plant.members, g))
        if reader >= 0 and plant.group_of[reader] != g and state.where[reader] != q:
            h = plant.group_of[reader]
    if h < 0:
        return 1
    state.moved[1], state.source[1] = h, _device(plant, state, h)
    state.target[1] = p if state.source[1] == q else q
    return 2


@inner
def _shift(order: Ints, turn: Ints, first: Lists, then: Lists, at: int, by: int) -> int:
    """Moves the operator at a place of an order by so many places, as far as what comes first and
    what comes then allow. Returns the place that it comes to.
    """
    i, to = order[at], at
    if by > 0:
        most = min(at + by, order.shape[0] - 1)
        for x in range(then.start[i], then.start[i + 1]):
            most = min(most, turn[then.values[x]] - 1)
        while to < most:
            order[to] = order[to + 1]
            turn[order[to]] = to
            to += 1
    else:
        least = max(at + by, 0)
        for x in range(first.start[i], first.start[i + 1]):
            least = max(least, turn[first.values[x]] + 1)
        while to > least:
            order[to] = order[to - 1]
            turn[order[to]] = to
            to -= 1
    order[to], turn[i] = i, to
    return to


@inner
def _taken(now: int, new: int, heat: float) -> bool:
    """Whether a move stays."""
    return new <= now or np.random.random() < np.exp((now - new) / heat)


@inner
def _move(plant: Plant, state: State, heat: float) -> None:
    """Tries another placement."""
    size = _draw(plant, state)
    for k in range(size):
        _put(plant, state, state.moved[k], state.target[k])
    if (state.used <= plant.room).all():
        forward, backward = _forwards(plant, state), _backwards(plant, state)
        if _taken(state.ends.sum(), forward + backward, heat):
            state.ends[0], state.ends[1] = forward, backward
            return
    for k in range(size - 1, -1, -1):
        _put(plant, state, state.moved[k], state.source[k])


@inner
def _reorder(plant: Plant, state: State, phase: int, heat: float) -> None:
    """Tries another order."""
    order, turn = state.orders[phase], state.turns[phase]
    first, then = (plant.after, plant.before) if phase else (plant.before, plant.after)
    at, by = np.random.randint(0, order.shape[0]), np.random.randint(1, FAR + 1)
    to = _shift(order, turn, first, then, at, by if np.random.random() < 0.5 else -by)
    if to == at:
        return
    end = _backwards(plant, state) if phase else _forwards(plant, state)
    if _taken(state.ends[phase], end, heat):
        state.ends[phase] = end
    else:
        _shift(order, turn, first, then, to, at - to)


@njit
def anneal(plant: Plant, state: State, moves: int, hot: float, cold: float, seed: int) -> None:
    """Changes a schedule to the best that is found from it: a move that makes it worse stays by
    chance, the less the worse and the later.

    Args:
        hot, cold: temperatures of the first move and of the last, in ticks.
    """
    np.random.seed(seed)
    best, where, orders = state.ends.sum(), state.where.copy(), state.orders.copy()
    cooling = (cold / hot) ** (1.0 / max(moves - 1, 1))
    heat = hot
    for _ in range(moves):
        heat *= cooling
        kind = np.random.randint(0, 4)
        if kind >= 2:
            _reorder(plant, state, kind - 2, heat)
        elif plant.room.shape[0] > 1:
            _move(plant, state, heat)
        if state.ends.sum() < best:
            best, where[:], orders[:] = state.ends.sum(), state.where, state.orders
    state.where[:], state.orders[:] = where, orders
    for phase in range(2):
        for k in range(where.shape[0]):
            state.turns[phase, orders[phase, k]] = k
    fill(plant, state)
