"""The inner loop of `search.py`, compiled by numba: simulated annealing over schedules.
Arrays are indexed by

i, j  operators, in topological order          p, q  devices
t     tensors                                  g, h  groups of operators that share a device
e     entries of memory, held once for all groups that need them
x, y  positions in the values of a `Ragged`

A schedule is coded as a placement and two orders of the operators, one per phase, in each of which
an operator comes behind all that it waits for. Decoding gives every operator of an order the
earliest start behind the operators that its device was given before. A transfer leaves when its
last sender has ended, behind the transfers that its channel was given before. So every code has a
feasible schedule; only schedules in which a tensor overtakes another one on a channel have no code.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from planner.support.arrays import Bools, Ints
from planner.support.jit import inner, njit

FORWARD, BACKWARD = 0, 1
"""The phases: rows of the arrays that have one per phase."""

FAR = 10
"""Largest number of places that an operator moves in an order at once."""

SWAP_CHANCE, FOLLOW_CHANCE = 0.25, 0.25
"""Chances that a group that moves swaps with another one, or takes the group of a reader along."""


class Ragged(NamedTuple):
    """Rows of different lengths: row i is values[start[i]:start[i + 1]]."""

    start: Ints
    values: Ints


def ragged(rows: Iterable[Iterable[int]]) -> Ragged:
    """Rows as arrays."""
    listed = [list(row) for row in rows]
    start = np.cumsum([0, *(len(row) for row in listed)], dtype=np.int64)
    return Ragged(start, np.array([x for row in listed for x in row], dtype=np.int64))


class ModelArrays(NamedTuple):
    """The model as arrays.

    Attributes:
        ticks: (2, N, D) of operators, by phase.
        way: (D, D) the way from p to q; away: (T, W) ticks of the transfer of a tensor on a way.
        maker: (T,) the operator that makes a tensor; gradient: (T,) whether one comes back.
        readers: operators by tensor; makes: tensors that an operator makes; reads: those it reads.
        before: operators that feed each operator; after: operators that it feeds.
        group_of: (N,) group of each operator; members: operators by group.
        keeps: entries of memory by group; kept: (E,) bytes of each entry.
        room: (D,) memory in bytes.
    """

    ticks: Ints
    way: Ints
    away: Ints
    maker: Ints
    gradient: Bools
    readers: Ragged
    makes: Ragged
    reads: Ragged
    before: Ragged
    after: Ragged
    group_of: Ints
    members: Ragged
    keeps: Ragged
    kept: Ints
    room: Ints


class SearchState(NamedTuple):
    """A schedule while it is changed, and scratch arrays.

    Invariant between moves: `turns`, `ends`, `held` and `used` follow from `where` and `orders`.

    Attributes:
        where: (N,) device of each operator.
        orders: (2, N) operators in the order in which they get their starts, by phase.
        turns: (2, N) place of each operator in its order, the inverse of `orders`.
        ends: (2,) ticks F and B.
        held: (E, D) number of groups on a device that need an entry; used: (D,) bytes.
        end: (2, N) scratch: when operators end.
        there: (2, T, D) scratch: when a tensor has arrived on a device, or its gradient from that
            device; -1 if it is not sent.
        left: (T, D) scratch: readers on a device whose backwards are still to come.
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


def state_of(
    model: ModelArrays, where: Sequence[int], orders: Sequence[Sequence[int]]
) -> SearchState:
    """The schedule of a placement and orders."""
    num, (devices,), (tensors,) = len(where), model.room.shape, model.maker.shape
    state = SearchState(
        where=np.array(where, dtype=np.int64),
        orders=np.array(orders, dtype=np.int64),
        turns=np.argsort(np.array(orders, dtype=np.int64), axis=1),
        ends=np.zeros(2, np.int64),
        held=np.zeros((len(model.kept), devices), np.int64),
        used=np.zeros(devices, np.int64),
        end=np.zeros((2, num), np.int64),
        there=np.full((2, tensors, devices), -1),
        left=np.zeros((tensors, devices), np.int64),
        moved=np.zeros(2, np.int64),
        source=np.zeros(2, np.int64),
        target=np.zeros(2, np.int64),
    )
    fill(model, state)
    return state


@inner
def _forwards(model: ModelArrays, state: SearchState) -> int:
    """F; sets when operators end and when tensors arrive."""
    (devices,), where = model.room.shape, state.where
    end, there = state.end[FORWARD], state.there[FORWARD]
    free, channel = np.zeros(devices, np.int64), np.zeros((devices, devices), np.int64)
    there[:] = -1
    last = 0
    # The maker of a tensor stands in front of its readers in the order. So the maker has its end,
    # and the tensor its arrival, by the time a reader comes.
    for i in state.orders[FORWARD]:
        p = where[i]
        begin = free[p]
        for x in range(model.reads.start[i], model.reads.start[i + 1]):
            t = model.reads.values[x]
            ready = end[model.maker[t]] if where[model.maker[t]] == p else there[t, p]
            begin = max(begin, ready)
        end[i] = free[p] = begin + model.ticks[FORWARD, i, p]
        last = max(last, end[i])
        for x in range(model.makes.start[i], model.makes.start[i + 1]):
            t = model.makes.values[x]
            for y in range(model.readers.start[t], model.readers.start[t + 1]):
                q = where[model.readers.values[y]]
                # A channel takes transfers in the order of their makers and fills no gap, so the
                # clock of its last arrival is all that there is to know.
                if q != p and there[t, q] < 0:  # once to each device
                    sent = max(channel[p, q], end[i]) + model.away[t, model.way[p, q]]
                    there[t, q] = channel[p, q] = sent
    return last


@inner
def _backwards(model: ModelArrays, state: SearchState) -> int:
    """B; sets when operators end and when gradients arrive, by the device that they come from."""
    (devices,), where = model.room.shape, state.where
    end, there = state.end[BACKWARD], state.there[BACKWARD]
    free, channel = np.zeros(devices, np.int64), np.zeros((devices, devices), np.int64)
    left = state.left
    there[:], left[:] = -1, 0
    for t in range(model.maker.shape[0]):
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            left[t, where[model.readers.values[y]]] += 1
    last = 0
    # `left` tells the last reader on a device: the readers there sum their gradients, and one sum
    # is sent. All readers stand in front of the maker in this order.
    for i in state.orders[BACKWARD]:
        p = where[i]
        begin = free[p]
        for x in range(model.makes.start[i], model.makes.start[i + 1]):
            t = model.makes.values[x]
            if model.gradient[t]:
                for y in range(model.readers.start[t], model.readers.start[t + 1]):
                    q = where[model.readers.values[y]]
                    ready = end[model.readers.values[y]] if q == p else there[t, q]
                    begin = max(begin, ready)
        end[i] = free[p] = begin + model.ticks[BACKWARD, i, p]
        last = max(last, end[i])
        for x in range(model.reads.start[i], model.reads.start[i + 1]):
            t = model.reads.values[x]
            q = where[model.maker[t]]
            left[t, p] -= 1  # the gradient leaves with the last reader of this device
            if model.gradient[t] and q != p and left[t, p] == 0:
                sent = max(channel[p, q], end[i]) + model.away[t, model.way[p, q]]
                there[t, p] = channel[p, q] = sent
    return last


@njit
def fill(model: ModelArrays, state: SearchState) -> None:
    """Computes the memory of all devices, and schedules both phases."""
    state.held[:], state.used[:] = 0, 0
    for g in range(model.members.start.shape[0] - 1):
        p = _device(model, state, g)
        for x in range(model.keeps.start[g], model.keeps.start[g + 1]):
            e = model.keeps.values[x]
            if state.held[e, p] == 0:
                state.used[p] += model.kept[e]
            state.held[e, p] += 1
    state.ends[FORWARD], state.ends[BACKWARD] = _forwards(model, state), _backwards(model, state)


@inner
def _device(model: ModelArrays, state: SearchState, g: int) -> int:
    """The device of a group."""
    return int(state.where[model.members.values[model.members.start[g]]])


@inner
def _one_of(rows: Ragged, i: int) -> int:
    """A random value of a row, -1 if it is empty."""
    first, last = rows.start[i], rows.start[i + 1]
    return int(rows.values[np.random.randint(first, last)]) if first < last else -1


@inner
def _put(model: ModelArrays, state: SearchState, g: int, q: int) -> None:
    """Moves a group to a device; applied in reverse with the old device, it undoes itself."""
    p = _device(model, state, g)
    for x in range(model.keeps.start[g], model.keeps.start[g + 1]):
        e = model.keeps.values[x]
        state.held[e, p] -= 1
        if state.held[e, p] == 0:
            state.used[p] -= model.kept[e]
        if state.held[e, q] == 0:
            state.used[q] += model.kept[e]
        state.held[e, q] += 1
    for x in range(model.members.start[g], model.members.start[g + 1]):
        state.where[model.members.values[x]] = q


@inner
def _draw(model: ModelArrays, state: SearchState) -> int:
    """Draws a move: writes one or two groups and their devices. Returns the number of groups.

    A group goes to another device; a second group either swaps with it or, if it reads from the
    first one, comes along.
    """
    devices, groups = model.room.shape[0], model.members.start.shape[0] - 1
    g = np.random.randint(0, groups)
    p = _device(model, state, g)
    # Any device but p, each by the same chance.
    q = (p + np.random.randint(1, devices)) % devices
    state.moved[0], state.source[0], state.target[0] = g, p, q
    chance, h = np.random.random(), -1
    if chance < SWAP_CHANCE:
        h = np.random.randint(0, groups)
        if _device(model, state, h) != q:
            h = -1
    elif chance < SWAP_CHANCE + FOLLOW_CHANCE:
        reader = _one_of(model.after, _one_of(model.members, g))
        if reader >= 0 and model.group_of[reader] != g and state.where[reader] != q:
            h = model.group_of[reader]
    if h < 0:
        return 1
    state.moved[1], state.source[1] = h, _device(model, state, h)
    # A group that swaps is on q and goes to p; a reader that comes along goes to q.
    state.target[1] = p if state.source[1] == q else q
    return 2


@inner
def _shift(order: Ints, turn: Ints, first: Ragged, then: Ragged, at: int, by: int) -> int:
    """Moves the operator at a place of an order ahead or back, never past an operator that it waits
    for or that waits for it, so that the order stays topological.

    Args:
        first: operators that each waits for in this phase; then: operators that wait for it.
        at: its place; by: places to move, negative to the front.

    Returns:
        its new place.
    """
    i, to = order[at], at
    if by > 0:
        last = min(at + by, order.shape[0] - 1)
        # The nearest operator that waits for i stops it; all between move up by one place.
        for x in range(then.start[i], then.start[i + 1]):
            last = min(last, turn[then.values[x]] - 1)
        while to < last:
            order[to] = order[to + 1]
            turn[order[to]] = to
            to += 1
    else:
        front = max(at + by, 0)
        for x in range(first.start[i], first.start[i + 1]):
            front = max(front, turn[first.values[x]] + 1)
        while to > front:
            order[to] = order[to - 1]
            turn[order[to]] = to
            to -= 1
    order[to], turn[i] = i, to
    return to


@inner
def _taken(now: int, new: int, heat: float) -> bool:
    """Metropolis: whether a move from one length to another is kept."""
    return new <= now or np.random.random() < np.exp((now - new) / heat)


@inner
def _move(model: ModelArrays, state: SearchState, heat: float) -> None:
    """Tries another placement of one or two groups."""
    size = _draw(model, state)
    for k in range(size):
        _put(model, state, state.moved[k], state.target[k])
    # Memory takes no schedule to look at, so it is looked at first. The placement changes both
    # phases.
    if (state.used <= model.room).all():
        forward, backward = _forwards(model, state), _backwards(model, state)
        if _taken(state.ends.sum(), forward + backward, heat):
            state.ends[FORWARD], state.ends[BACKWARD] = forward, backward
            return
    for k in range(size - 1, -1, -1):
        _put(model, state, state.moved[k], state.source[k])


@inner
def _reorder(model: ModelArrays, state: SearchState, phase: int, heat: float) -> None:
    """Tries another order of a phase."""
    order, turn = state.orders[phase], state.turns[phase]
    first, then = model.before, model.after
    if phase == BACKWARD:
        first, then = then, first
    at, by = np.random.randint(0, order.shape[0]), np.random.randint(1, FAR + 1)
    to = _shift(order, turn, first, then, at, by if np.random.random() < 0.5 else -by)
    if to == at:
        return
    # The placement stays, so the other phase and the memory do.
    end = _backwards(model, state) if phase == BACKWARD else _forwards(model, state)
    if _taken(state.ends[phase], end, heat):
        state.ends[phase] = end
    else:
        # Nothing stops the way back: the order before was topological.
        _shift(order, turn, first, then, to, at - to)


@njit
def anneal(
    model: ModelArrays, state: SearchState, moves: int, hot: float, cold: float, seed: int
) -> None:
    """Changes a schedule to the best one that annealing meets from it: a worse one is kept by
    chance, which falls with the loss and with time.

    Args:
        hot, cold: temperatures of the first and the last move, in ticks; it falls geometrically.
    """
    np.random.seed(seed)
    best, where, orders = state.ends.sum(), state.where.copy(), state.orders.copy()
    cooling = (cold / hot) ** (1.0 / max(moves - 1, 1))
    heat = hot
    for _ in range(moves):
        heat *= cooling
        kind = np.random.randint(0, 4)  # 0, 1: a placement; 2, 3: an order of a phase
        if kind >= 2:
            _reorder(model, state, kind - 2, heat)
        elif model.room.shape[0] > 1:
            _move(model, state, heat)
        if state.ends.sum() < best:
            best, where[:], orders[:] = state.ends.sum(), state.where, state.orders
    state.where[:], state.orders[:] = where, orders
    for phase in (FORWARD, BACKWARD):
        for k in range(where.shape[0]):
            state.turns[phase, orders[phase, k]] = k
    fill(model, state)
