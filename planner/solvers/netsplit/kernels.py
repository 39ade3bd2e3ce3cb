"""The inner loop of `search.py`, compiled by numba: simulated annealing over schedules.
Arrays are indexed by

i, j  operators, in topological order          p, q  devices
t     tensors                                  g, h  groups of operators that share a device
e     entries of memory, held once for all groups that need them
r     resources of transfers: channels and shared links
c     columns of the ticks of transfers    x, y  positions in the values of a `Ragged`

A schedule is coded as a placement and two orders of the operators, one per phase, in each of which
an operator comes behind all that it waits for. Devices run their operators in this order, each as
soon as it can. Transfers leave in the order of time: a transfer that is ready first occupies its
channel and its links first. So every code has a feasible schedule; only schedules in which a
transfer gives way to one that is ready later have no code.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from planner.support.arrays import Bools, Ints
from planner.support.jit import inlined, inner, njit

FORWARD, BACKWARD = 0, 1
"""The phases: rows of the arrays that have one per phase."""

NEVER = 2**62
"""More ticks than any schedule has."""


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
        tail: (2, N) least ticks behind each operator, by phase.
        least: (2,) lower bounds of F and B.
        way: (D, D) the column of the way from p to q; away: (T, C) ticks of the transfer of a
            tensor on a way, or for which it occupies a link of a width.
        route: resources by channel p D + q, the channel first; column: of each of its values.
        free: (R,) scratch: when a resource is free.
        maker: (T,) the operator that makes a tensor; gradient: (T,) whether one comes back.
        readers: operators by tensor; makes: tensors that an operator makes; reads: those it reads.
        before: operators that feed each operator; after: operators that it feeds.
        group_of: (N,) group of each operator; members: operators by group.
        blocks: groups that may move together.
        keeps: entries of memory by group; kept: (E,) bytes of each entry.
        room: (D,) memory in bytes.
    """

    ticks: Ints
    tail: Ints
    least: Ints
    way: Ints
    away: Ints
    route: Ragged
    column: Ints
    free: Ints
    maker: Ints
    gradient: Bools
    readers: Ragged
    makes: Ragged
    reads: Ragged
    before: Ragged
    after: Ragged
    group_of: Ints
    members: Ragged
    blocks: Ragged
    keeps: Ragged
    kept: Ints
    room: Ints


class SearchState(NamedTuple):
    """A schedule while it is changed, and scratch arrays.

    Invariant between moves: `turns`, `ends`, `held` and `used` follow from `where` and `orders`.

    Attributes:
        where: (N,) device of each operator.
        orders: (2, N) operators in the order of their devices, by phase.
        turns: (2, N) place of each operator in its order, the inverse of `orders`.
        ends: (2,) ticks F and B.
        held: (E, D) number of groups on a device that need an entry; used: (D,) bytes.
        end: (2, N) scratch: when operators end; done: (2, N) operators as they end.
        there: (2, T, D) scratch: when a tensor has arrived on a device, or its gradient from that
            device; -1 if it is not sent.
        left: (T, D) scratch: readers on a device whose backwards are still to come.
        ready: (N,) scratch: when what an operator waits for is there; waits: (N,) number of things
            that it waits for.
        lists: (N,) scratch: operators by device, in order; first: (D + 1,) where each device's
            begin; head: (D,) the next one of each device.
        newest: (D,) scratch: the last operator that each device has run, -1 for none.
        free: (D,) scratch: when a device is free; rest: (D,) ticks of what it has yet to run;
            next_end: (D,) when its next operator ends, `NEVER` if that is not known yet.
        previous: (2, N) scratch: the operator that ran before on the same device, -1 for none.
        critical: (2, N) operators of a chain that is as long as the phase, by phase, as long as
            `num_critical`, (2,), says: each waits for the next one, or for a transfer from it.
        moved: (G,) scratch: groups of a move; source: (G,) their devices before.
        best: (1,) ticks F + B of the best schedule that fits, `NEVER` without one; best_where,
            best_orders: its placement and orders.
    """

    where: Ints
    orders: Ints
    turns: Ints
    ends: Ints
    held: Ints
    used: Ints
    end: Ints
    done: Ints
    there: Ints
    left: Ints
    ready: Ints
    waits: Ints
    lists: Ints
    first: Ints
    head: Ints
    newest: Ints
    free: Ints
    rest: Ints
    next_end: Ints
    previous: Ints
    critical: Ints
    num_critical: Ints
    moved: Ints
    source: Ints
    best: Ints
    best_where: Ints
    best_orders: Ints


def state_of(
    model: ModelArrays, where: Sequence[int], orders: Sequence[Sequence[int]]
) -> SearchState:
    """The schedule of a placement and orders."""
    num, (devices,), (tensors,) = len(where), model.room.shape, model.maker.shape
    groups = len(model.members.start) - 1
    state = SearchState(
        where=np.array(where, dtype=np.int64),
        orders=np.array(orders, dtype=np.int64),
        turns=np.argsort(np.array(orders, dtype=np.int64), axis=1),
        ends=np.zeros(2, np.int64),
        held=np.zeros((len(model.kept), devices), np.int64),
        used=np.zeros(devices, np.int64),
        end=np.zeros((2, num), np.int64),
        done=np.zeros((2, num), np.int64),
        there=np.full((2, tensors, devices), -1),
        left=np.zeros((tensors, devices), np.int64),
        ready=np.zeros(num, np.int64),
        waits=np.zeros(num, np.int64),
        lists=np.zeros(num, np.int64),
        first=np.zeros(devices + 1, np.int64),
        head=np.zeros(devices, np.int64),
        newest=np.zeros(devices, np.int64),
        free=np.zeros(devices, np.int64),
        rest=np.zeros(devices, np.int64),
        next_end=np.zeros(devices, np.int64),
        previous=np.zeros((2, num), np.int64),
        critical=np.zeros((2, num), np.int64),
        num_critical=np.zeros(2, np.int64),
        moved=np.zeros(groups, np.int64),
        source=np.zeros(groups, np.int64),
        best=np.full(1, NEVER),
        best_where=np.zeros(num, np.int64),
        best_orders=np.zeros((2, num), np.int64),
    )
    fill(model, state)
    return state


# ---------------------------------------------------------------------------------- decoding


@inner
def decode(model: ModelArrays, state: SearchState, phase: int, most: int) -> int:
    """The length of a phase, or any number above `most` if it is longer than that; sets when
    operators end and when tensors arrive.
    """
    (devices,), (num,) = model.room.shape, state.where.shape
    _begin(model, state, phase)
    last = 0
    for turn in range(num):
        # The operator that ends next. Whatever is not known yet waits for one that ends later, so
        # transfers become ready in the order of time.
        p = 0
        for q in range(1, devices):
            if state.next_end[q] < state.next_end[p]:
                p = q
        i, end = state.lists[state.head[p]], state.next_end[p]
        state.rest[p] -= model.ticks[phase, i, p]
        # Neither what waits for i nor what its device has yet to run begins before i ends.
        if end + max(model.tail[phase, i], state.rest[p]) > most:
            return most + 1
        state.end[phase, i] = state.free[p] = end
        state.done[phase, turn] = i
        state.previous[phase, i] = state.newest[p]
        state.newest[p] = i
        state.head[p] += 1
        last = max(last, end)
        _look(model, state, phase, p)
        if phase == FORWARD:
            _pass_on(model, state, i)
        else:
            _pass_back(model, state, i)
    return int(last)


@inner
def _begin(model: ModelArrays, state: SearchState, phase: int) -> None:
    """Before the first operator of a phase."""
    devices, num = model.room.shape[0], state.where.shape[0]
    where, first, order = state.where, state.first, state.orders[phase]
    model.free[:] = 0
    state.there[phase] = -1
    state.ready[:] = 0
    first[:], state.rest[:], state.free[:] = 0, 0, 0
    for i in range(num):
        first[where[i] + 1] += 1
        state.rest[where[i]] += model.ticks[phase, i, where[i]]
    for p in range(devices):
        first[p + 1] += first[p]
        state.head[p] = first[p]
    for k in range(num):
        p = where[order[k]]
        state.lists[state.head[p]] = order[k]
        state.head[p] += 1
    if phase == FORWARD:
        for i in range(num):
            state.waits[i] = model.reads.start[i + 1] - model.reads.start[i]
    else:
        _count_gradients(model, state)
    for p in range(devices):
        state.head[p], state.newest[p] = first[p], -1
        _look(model, state, phase, p)


@inner
def _count_gradients(model: ModelArrays, state: SearchState) -> None:
    """What backwards wait for: each reader on the same device, and one sum of each other device."""
    where = state.where
    state.left[:], state.waits[:] = 0, 0
    for t in range(model.maker.shape[0]):
        i = model.maker[t]
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            q = where[model.readers.values[y]]
            if model.gradient[t] and (q == where[i] or state.left[t, q] == 0):
                state.waits[i] += 1
            state.left[t, q] += 1


@inlined
def _look(model: ModelArrays, state: SearchState, phase: int, p: int) -> None:
    """When the next operator of a device ends, if that is known."""
    state.next_end[p] = NEVER
    if state.head[p] < state.first[p + 1]:
        i = state.lists[state.head[p]]
        if state.waits[i] == 0:
            begin = max(state.free[p], state.ready[i])
            state.next_end[p] = begin + model.ticks[phase, i, p]


@inlined
def _arrive(model: ModelArrays, state: SearchState, phase: int, j: int, time: int) -> None:
    """One of the things that an operator waits for is there."""
    state.ready[j] = max(state.ready[j], time)
    state.waits[j] -= 1
    if state.waits[j] == 0:
        p = state.where[j]
        if state.lists[state.head[p]] == j:
            _look(model, state, phase, p)


@inlined
def _send(model: ModelArrays, t: int, p: int, q: int, ready: int) -> int:
    """Sends a tensor from p to q as soon as its channel and links are free; when it arrives."""
    channel, begin, free = p * model.room.shape[0] + q, ready, model.free
    for x in range(model.route.start[channel], model.route.start[channel + 1]):
        begin = max(begin, free[model.route.values[x]])
    for x in range(model.route.start[channel], model.route.start[channel + 1]):
        free[model.route.values[x]] = begin + model.away[t, model.column[x]]
    return int(begin + model.away[t, model.way[p, q]])


@inlined
def _pass_on(model: ModelArrays, state: SearchState, i: int) -> None:
    """The forward of an operator has ended: its tensors go to their readers, once to a device."""
    p, end, there = state.where[i], state.end[FORWARD, i], state.there
    for x in range(model.makes.start[i], model.makes.start[i + 1]):
        t = model.makes.values[x]
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            j = model.readers.values[y]
            q = state.where[j]
            time = end
            if q != p:
                if there[FORWARD, t, q] < 0:
                    there[FORWARD, t, q] = _send(model, t, p, q, end)
                time = there[FORWARD, t, q]
            _arrive(model, state, FORWARD, j, time)


@inlined
def _pass_back(model: ModelArrays, state: SearchState, j: int) -> None:
    """The backward of an operator has ended: the readers of a tensor on a device sum their
    gradients, and one sum is sent with the last of them.
    """
    p, end, there = state.where[j], state.end[BACKWARD, j], state.there
    for x in range(model.reads.start[j], model.reads.start[j + 1]):
        t = model.reads.values[x]
        i = model.maker[t]
        q = state.where[i]
        state.left[t, p] -= 1
        if model.gradient[t]:
            if q == p:
                _arrive(model, state, BACKWARD, i, end)
            elif state.left[t, p] == 0:
                there[BACKWARD, t, p] = _send(model, t, p, q, end)
                _arrive(model, state, BACKWARD, i, there[BACKWARD, t, p])


@njit
def fill(model: ModelArrays, state: SearchState) -> None:
    """Computes the memory of all devices, and schedules both phases."""
    state.held[:], state.used[:] = 0, 0
    for g in range(model.members.start.shape[0] - 1):
        p = device(model, state, g)
        for x in range(model.keeps.start[g], model.keeps.start[g + 1]):
            e = model.keeps.values[x]
            if state.held[e, p] == 0:
                state.used[p] += model.kept[e]
            state.held[e, p] += 1
    state.ends[FORWARD] = decode(model, state, FORWARD, NEVER)
    state.ends[BACKWARD] = decode(model, state, BACKWARD, NEVER)
    trace(model, state, FORWARD)
    trace(model, state, BACKWARD)


@inner
def trace(model: ModelArrays, state: SearchState, phase: int) -> None:
    """Finds a chain that is as long as a phase that has just been decoded, from its end on. A
    transfer that waited for another one is followed to its own sender.
    """
    i, num = state.done[phase, state.where.shape[0] - 1], 0
    while i >= 0:
        state.critical[phase, num] = i
        num += 1
        begin = state.end[phase, i] - model.ticks[phase, i, state.where[i]]
        cause = _cause_there(model, state, i, begin)
        if phase == BACKWARD:
            cause = _cause_back(model, state, i, begin)
        if cause < 0 and begin > 0:
            cause = state.previous[phase, i]
        i = cause
    state.num_critical[phase] = num


@inner
def _cause_there(model: ModelArrays, state: SearchState, j: int, begin: int) -> int:
    """The maker of a tensor that arrived when the forward of j began; -1 if there is none."""
    q = state.where[j]
    for x in range(model.reads.start[j], model.reads.start[j + 1]):
        t = model.reads.values[x]
        i = model.maker[t]
        here = state.where[i] == q
        if begin == (state.end[FORWARD, i] if here else state.there[FORWARD, t, q]):
            return int(i)
    return -1


@inner
def _cause_back(model: ModelArrays, state: SearchState, i: int, begin: int) -> int:
    """A reader whose gradient arrived when the backward of i began; -1 if there is none."""
    p = state.where[i]
    for x in range(model.makes.start[i], model.makes.start[i + 1]):
        t = model.makes.values[x]
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            j = model.readers.values[y]
            q = state.where[j]
            here = q == p
            ended = state.end[BACKWARD, j]
            if model.gradient[t] and begin == (ended if here else state.there[BACKWARD, t, q]):
                return int(j)
    return -1


@inner
def device(model: ModelArrays, state: SearchState, g: int) -> int:
    """The device of a group."""
    return int(state.where[model.members.values[model.members.start[g]]])
