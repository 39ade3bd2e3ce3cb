"""The inner loop of `search.py` and `fine.py`, compiled by numba: when the operators of a schedule
end, anew only as far as a move changes that. Arrays (`search_arrays.py`) are indexed by

i, j  operators, in topological order          p, q  devices
t     tensors                                  g, h  groups of operators that share a device
r     resources of transfers: channels and shared links
c     columns of the ticks of transfers    x, y  positions in the values of a `Csr`

A schedule is coded as a placement and two orders of the operators, one per phase, in each of which
an operator comes behind all that it waits for. Devices run their operators in this order, each as
soon as it can. Transfers leave in the order of time: a transfer that is ready first occupies its
channel and its links first. So every code has a feasible schedule; only schedules in which a
transfer gives way to one that is ready later have no code.

Operators are timed in the order in which they end. What has happened up to a moment does not depend
on what comes later, so after a move the timing goes on from the first end that the move touches:

    (1) lists: a device does as before until the operator ends behind which its list is another
        one                                                                          `_relisted`
    (2) messages: those that an operator sends, and when, depend on the devices of its readers, or
        of the makers of what it reads and of their other readers                     `_touched`
    (3) `marks` keep the states of devices and links at every `stride`-th end; all else follows from
        the ends of operators before                                                   `_resume`

Of the two phases, the one with less to time comes first; then the other one has to stay within what
is left, which most moves do not, soon after what they have changed (`moves._both`).
"""

from collections.abc import Sequence

from planner.solvers.netsplit.search_arrays import (
    BACKWARD,
    FORWARD,
    NEVER,
    ModelArrays,
    SearchState,
    blank_state,
    stride_of,
)
from planner.solvers.placement.held_bytes import hold
from planner.support.arrays import Ints
from planner.support.jit import inlined, inner, njit

# Timed from the first change on, by functions that hand no arrays over, hot annealing on
# AmoebaNet-D (1,046 operators, 3 devices, batch 64) does 23,800 moves per s instead of 7,600, on a
# core shared with other processes, and comes to the same placement.
LISTED = 8
"""Listing as many operators counts as the work of timing one."""


def state_of(
    model: ModelArrays, where: Sequence[int], orders: Sequence[Sequence[int]]
) -> SearchState:
    """The schedule of a placement and orders."""
    state = blank_state(model, where, orders)
    fill(model, state)
    return state


# ------------------------------------------------------------------------------- what has changed


@inner
def first_change(model: ModelArrays, state: SearchState, phase: int) -> int:
    """Lists the operators of all devices anew; the number of ends, in the schedule that is kept,
    before the first one that may be another one now.
    """
    num, turn = state.where.shape[0], _relisted(model, state, phase)
    state.timed[0] += num // LISTED
    # The last one is timed in any case, so that its end is the length.
    turn = min(turn, num - 1)
    for j in range(num):
        if state.where[j] != state.placed[j]:
            turn = min(turn, _touched(model, state, phase, j))
    return int(turn)


@inner
def _relisted(model: ModelArrays, state: SearchState, phase: int) -> int:
    """(1): lists the operators of all devices anew; the number of ends up to which no device comes
    to an operator that was not the next one in its list.
    """
    devices, num = model.room.shape[0], state.where.shape[0]
    where, order, head, same = state.where, state.orders[phase], state.head, state.unchanged
    first, lists = state.tried.first[phase], state.tried.lists[phase]
    old_first, old = state.kept.first[phase], state.kept.lists[phase]
    first[:], state.total[phase] = 0, 0
    for i in range(num):
        p = where[i]
        first[p + 1] += 1
        state.total[phase, p] += model.ticks[phase, i, p]
    for p in range(devices):
        first[p + 1] += first[p]
        head[p], same[p] = first[p], True
    turn = num
    for k in range(num):
        i = order[k]
        p = where[i]
        x = head[p]
        head[p] = x + 1
        lists[x] = i
        if same[p]:
            y = x - first[p] + old_first[p]
            if y >= old_first[p + 1] or old[y] != i:
                same[p] = False
                turn = min(turn, _behind(state, phase, p, y))
    for p in range(devices):
        y = head[p] - first[p] + old_first[p]
        if same[p] and y < old_first[p + 1]:  # the old list goes on
            turn = min(turn, _behind(state, phase, p, y))
    return int(turn)


@inlined
def _behind(state: SearchState, phase: int, p: int, y: int) -> int:
    """The number of ends until the operator in front of a place in the list of p has ended."""
    if y == state.kept.first[phase, p]:
        return 0
    return int(state.kept.turn[phase, state.kept.lists[phase, y - 1]]) + 1


@inlined
def _touched(model: ModelArrays, state: SearchState, phase: int, j: int) -> int:
    """(2): the number of ends before the first operator sends otherwise because j has moved."""
    # A forward sends to the devices of readers, so the makers of what j reads may send otherwise. A
    # backward sends the sum of the readers on a device when the last of them has ended. So another
    # reader may send otherwise if it is, or was, on the device that j has left or has come to; and
    # the readers of what j makes send to its device. `turn` is a place among ends, and all before
    # the least of these places stays.
    turn, turns, where, placed = NEVER, state.kept.turn, state.where, state.placed
    for x in range(model.reads.start[j], model.reads.start[j + 1]):
        t = model.reads.values[x]
        if phase == FORWARD:
            turn = min(turn, turns[phase, model.maker[t]])
        elif model.gradient[t]:
            # Sums of gradients, on the device that j has left and on the one where it is now.
            for y in range(model.readers.start[t], model.readers.start[t + 1]):
                k = model.readers.values[y]
                if k != j and (
                    where[k] == where[j] or where[k] == placed[j]
                    or placed[k] == where[j] or placed[k] == placed[j]
                ):  # fmt: skip
                    turn = min(turn, turns[phase, k])
    if phase == BACKWARD:
        for x in range(model.makes.start[j], model.makes.start[j + 1]):
            t = model.makes.values[x]
            if model.gradient[t]:
                for y in range(model.readers.start[t], model.readers.start[t + 1]):
                    turn = min(turn, turns[phase, model.readers.values[y]])
    return int(turn)


@inner
def least_end(model: ModelArrays, state: SearchState, phase: int, turn: int) -> int:
    """A lower bound of the length of a phase whose first ends are those that are kept."""
    marks = state.kept.marks[phase]
    return int(max(model.least[phase], marks[turn // stride_of(marks.shape[1]), -1]))


# ----------------------------------------------------------------------------------------- timing


@inner
def decode(model: ModelArrays, state: SearchState, phase: int, most: int, turn: int) -> int:
    """The length of a phase, or any number above `most` if it is longer than that; sets `tried`.

    Args:
        turn: the number of ends that are as before.
    """
    devices, num = model.room.shape[0], state.where.shape[0]
    tried, stride = state.tried, stride_of(state.tried.marks.shape[2])
    turn -= turn % stride
    latest = _resume(model, state, phase, turn)
    state.begun[phase], last = turn, 0
    while turn < num:
        # The operator that ends next. Each device knows when its next operator ends, or that this
        # one waits for another that has yet to end, and all behind it on the device ends later
        # still. So nothing ends before the least of these times, and transfers become ready, and
        # take their links, in the order of time.
        p = 0
        for q in range(1, devices):
            if state.next_end[q] < state.next_end[p]:
                p = q
        if turn % stride == 0:
            _mark(model, state, phase, turn // stride, latest)
        i, last = tried.lists[phase, state.head[p]], state.next_end[p]
        state.rest[p] -= model.ticks[phase, i, p]
        # Neither what waits for i nor what its device has yet to run begins before i ends.
        latest = max(latest, last + model.tail[phase, i])
        if max(latest, last + state.rest[p]) > most:
            last = most + 1
            break
        tried.end[phase, i] = state.free[p] = last
        tried.done[phase, turn], tried.turn[phase, i] = i, turn
        tried.previous[phase, i] = state.newest[p]
        state.newest[p] = i
        state.head[p] += 1
        turn += 1
        if phase == FORWARD:
            _pass_on(model, state, i)
        else:
            _pass_back(model, state, i)
        for q in range(devices):
            if q == p or state.awaits[q] == i:
                _look(model, state, phase, q)
    state.reached[phase] = turn
    state.timed[0] += turn - state.begun[phase]
    return int(last)


@inlined
def _mark(model: ModelArrays, state: SearchState, phase: int, number: int, latest: int) -> None:
    """Notes the states of devices and links.

    Columns: of each device the number of operators that have ended, when it is free, the newest of
    these operators, and their ticks; when each resource of transfers is free; and a lower bound of
    the phase by what has ended.
    """
    devices, resources = model.room.shape[0], model.free.shape[0]
    first, marks = state.tried.first, state.tried.marks
    for p in range(devices):
        marks[phase, number, p] = state.head[p] - first[phase, p]
        marks[phase, number, devices + p] = state.free[p]
        marks[phase, number, 2 * devices + p] = state.newest[p]
        marks[phase, number, 3 * devices + p] = state.total[phase, p] - state.rest[p]
    for r in range(resources):
        marks[phase, number, 4 * devices + r] = model.free[r]
    marks[phase, number, 4 * devices + resources] = latest


@inner
def _resume(model: ModelArrays, state: SearchState, phase: int, turn: int) -> int:
    """(3): the state of devices and links after the first ends; gives the bound of `_mark`.

    Args:
        turn: their number, which `stride` divides.
    """
    devices, resources = model.room.shape[0], model.free.shape[0]
    marks = state.kept.marks[phase]
    mark = marks[turn // stride_of(marks.shape[1])]
    for p in range(devices):
        state.head[p] = state.tried.first[phase, p] + mark[p]
        state.free[p], state.newest[p] = mark[devices + p], mark[2 * devices + p]
        state.rest[p] = state.total[phase, p] - mark[3 * devices + p]
    for r in range(resources):
        model.free[r] = mark[4 * devices + r]
    for k in range(turn, state.where.shape[0]):
        state.tried.turn[phase, state.kept.done[phase, k]] = NEVER
    for p in range(devices):
        _look(model, state, phase, p)
    return int(mark[4 * devices + resources])


@inlined
def _look(model: ModelArrays, state: SearchState, phase: int, p: int) -> None:
    """When the next operator of a device ends, or an operator that it waits for."""
    state.next_end[p], state.awaits[p] = NEVER, -1
    if state.head[p] == state.tried.first[phase, p + 1]:
        return
    i = state.tried.lists[phase, state.head[p]]
    ready = _ready_there(model, state, i) if phase == FORWARD else _ready_back(model, state, i)
    if ready < 0:
        state.awaits[p] = -1 - ready
    else:
        state.next_end[p] = max(state.free[p], ready) + model.ticks[phase, i, p]


@inlined
def _ready_there(model: ModelArrays, state: SearchState, j: int) -> int:
    """When all that j reads is there; -1 - i if operator i has yet to make some of it."""
    ready, q, tried = 0, state.where[j], state.tried
    for x in range(model.reads.start[j], model.reads.start[j + 1]):
        t = model.reads.values[x]
        i = model.maker[t]
        if tried.turn[FORWARD, i] == NEVER:
            return int(-1 - i)
        here = state.where[i] == q
        ready = max(ready, tried.end[FORWARD, i] if here else tried.there[FORWARD, t, q])
    return int(ready)


@inlined
def _ready_back(model: ModelArrays, state: SearchState, i: int) -> int:
    """When all gradients of what i makes are there; -1 - j if operator j has yet to make one."""
    ready, p, tried = 0, state.where[i], state.tried
    for x in range(model.makes.start[i], model.makes.start[i + 1]):
        t = model.makes.values[x]
        if not model.gradient[t]:
            continue
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            j = model.readers.values[y]
            if tried.turn[BACKWARD, j] == NEVER:
                return int(-1 - j)
            q = state.where[j]
            ready = max(ready, tried.end[BACKWARD, j] if q == p else tried.there[BACKWARD, t, q])
    return int(ready)


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
    p, end, there = state.where[i], state.tried.end[FORWARD, i], state.tried.there
    for x in range(model.makes.start[i], model.makes.start[i + 1]):
        t = model.makes.values[x]
        first, last = model.readers.start[t], model.readers.start[t + 1]
        for y in range(first, last):
            there[FORWARD, t, state.where[model.readers.values[y]]] = -1
        for y in range(first, last):
            q = state.where[model.readers.values[y]]
            if q != p and there[FORWARD, t, q] < 0:
                there[FORWARD, t, q] = _send(model, t, p, q, end)


@inlined
def _pass_back(model: ModelArrays, state: SearchState, j: int) -> None:
    """The backward of an operator has ended: the readers of a tensor on a device sum their
    gradients, and one sum is sent with the last of them.
    """
    p, end, there = state.where[j], state.tried.end[BACKWARD, j], state.tried.there
    for x in range(model.reads.start[j], model.reads.start[j + 1]):
        t = model.reads.values[x]
        q = state.where[model.maker[t]]
        if q != p and model.gradient[t] and _is_last(model, state, t, p):
            there[BACKWARD, t, p] = _send(model, t, p, q, end)


@inlined
def _is_last(model: ModelArrays, state: SearchState, t: int, p: int) -> bool:
    """Whether the backwards of all readers of a tensor on p have ended."""
    for y in range(model.readers.start[t], model.readers.start[t + 1]):
        k = model.readers.values[y]
        if state.where[k] == p and state.tried.turn[BACKWARD, k] == NEVER:
            return False
    return True


# ----------------------------------------------------------------------------- keeping or undoing


@inner
def keep(model: ModelArrays, state: SearchState, phase: int) -> None:
    """Keeps the timing of a phase after a move."""
    kept, tried, num = state.kept, state.tried, state.where.shape[0]
    for k in range(state.begun[phase], num):
        i = tried.done[phase, k]
        kept.done[phase, k], kept.turn[phase, i] = i, k
        kept.end[phase, i], kept.previous[phase, i] = tried.end[phase, i], tried.previous[phase, i]
        _copy_there(model, state, tried.there, kept.there, phase, i)
    kept.lists[phase], kept.first[phase] = tried.lists[phase], tried.first[phase]
    stride = stride_of(kept.marks.shape[2])
    for number in range(state.begun[phase] // stride, (num - 1) // stride + 1):
        kept.marks[phase, number] = tried.marks[phase, number]
    trace(model, state, phase)


@inner
def undo(model: ModelArrays, state: SearchState, phase: int) -> None:
    """Takes back the timing of a phase after a move; the placement is still that of the move."""
    kept, tried, num = state.kept, state.tried, state.where.shape[0]
    for k in range(state.begun[phase], num):
        tried.turn[phase, kept.done[phase, k]] = k
    for k in range(state.begun[phase], state.reached[phase]):
        i = tried.done[phase, k]
        tried.end[phase, i], tried.previous[phase, i] = kept.end[phase, i], kept.previous[phase, i]
        _copy_there(model, state, kept.there, tried.there, phase, i)
    for k in range(state.begun[phase], state.reached[phase]):
        tried.done[phase, k] = kept.done[phase, k]


@inlined
def _copy_there(
    model: ModelArrays, state: SearchState, source: Ints, target: Ints, phase: int, i: int
) -> None:
    """Copies when what an operator has sent arrives.

    Args:
        source, target: (2, T, D).
    """
    if phase == BACKWARD:
        p = state.where[i]
        for x in range(model.reads.start[i], model.reads.start[i + 1]):
            t = model.reads.values[x]
            target[phase, t, p] = source[phase, t, p]
        return
    for x in range(model.makes.start[i], model.makes.start[i + 1]):
        t = model.makes.values[x]
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            q = state.where[model.readers.values[y]]
            target[phase, t, q] = source[phase, t, q]


@njit
def fill(model: ModelArrays, state: SearchState) -> None:
    """Computes the memory of all devices, and schedules both phases."""
    for g in range(model.members.start.shape[0] - 1):  # between moves, `source` is free
        state.source[g] = device(model, state, g)
    hold(model.held, state.held, state.source)
    for phase in (FORWARD, BACKWARD):
        _relisted(model, state, phase)
        state.ends[phase] = decode(model, state, phase, NEVER, 0)
        keep(model, state, phase)
    state.placed[:] = state.where


@inner
def trace(model: ModelArrays, state: SearchState, phase: int) -> None:
    """Finds a chain that is as long as a phase that has just been kept, from its end on. A
    transfer that waited for another one is followed to its own sender.
    """
    i, num = state.kept.done[phase, state.where.shape[0] - 1], 0
    while i >= 0:
        state.critical[phase, num] = i
        num += 1
        begin = state.kept.end[phase, i] - model.ticks[phase, i, state.where[i]]
        if phase == FORWARD:
            cause = _cause_there(model, state, i, begin)
        else:
            cause = _cause_back(model, state, i, begin)
        if cause < 0 and begin > 0:
            cause = state.kept.previous[phase, i]
        i = cause
    state.num_critical[phase] = num


@inlined
def _cause_there(model: ModelArrays, state: SearchState, j: int, begin: int) -> int:
    """The maker of a tensor that arrived when the forward of j began; -1 if there is none."""
    q = state.where[j]
    for x in range(model.reads.start[j], model.reads.start[j + 1]):
        t = model.reads.values[x]
        i = model.maker[t]
        here = state.where[i] == q
        if begin == (state.kept.end[FORWARD, i] if here else state.kept.there[FORWARD, t, q]):
            return int(i)
    return -1


@inlined
def _cause_back(model: ModelArrays, state: SearchState, i: int, begin: int) -> int:
    """A reader whose gradient arrived when the backward of i began; -1 if there is none."""
    p = state.where[i]
    for x in range(model.makes.start[i], model.makes.start[i + 1]):
        t = model.makes.values[x]
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            j = model.readers.values[y]
            q = state.where[j]
            here = q == p
            ended = state.kept.end[BACKWARD, j]
            if model.gradient[t] and begin == (ended if here else state.kept.there[BACKWARD, t, q]):
                return int(j)
    return -1


@inlined
def device(model: ModelArrays, state: SearchState, g: int) -> int:
    """The device of a group."""
    return int(state.where[model.members.values[model.members.start[g]]])
