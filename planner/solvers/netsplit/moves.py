"""The moves of `search.py` and `fine.py`, compiled by numba: simulated annealing over the schedules
of `kernels.py`, whose letters these are; b are blocks of groups that move together.

A move puts some groups on other devices, or changes the place of an operator in an order. Half of
the moves begin with an operator of a chain that is as long as its phase: no other one can shorten
it. A move is kept if the schedule is no longer than a length that is drawn before, so a longer one
need not be timed to its end.

After every move that is kept, the order becomes that in which operators end (`_sorted_anew`), which
changes no schedule, but keeps operators that run at the same time together: a group that goes to
another device finds its place there.

A placement that exceeds the memory is no answer, but the search may start from one: as long as
bytes are over, moves are kept that leave fewer of them over, and no others.
"""

import numpy as np

from planner.solvers.annealing import Annealing, cooled, most_allowed
from planner.solvers.netsplit.kernels import (
    decode,
    device,
    fill,
    first_change,
    keep,
    least_end,
    undo,
)
from planner.solvers.netsplit.search_arrays import (
    BACKWARD,
    FORWARD,
    NEVER,
    ModelArrays,
    SearchState,
)
from planner.solvers.placement.held_bytes import excess_bytes, move_item
from planner.support.arrays import Csr, Ints
from planner.support.jit import inlined, inner, njit

FAR = 4
"""Largest number of operators of its device that an operator passes at once."""

PUSH_CHANCE, WALK_CHANCE, BLOCK_CHANCE = 0.2, 0.3, 0.2
"""Chances that a group that moves pushes another one out, that a walk through the graph from it
comes along, or that a whole block moves instead."""

BACK_CHANCE = 0.7
"""Chance that a group that was pushed out goes where the first one came from."""

EXCHANGE_CHANCE = 0.01
"""Chance that two devices exchange all their groups instead: no smaller move does that where memory
is short.
"""

CRITICAL_CHANCE = 0.5
"""Chance that a move begins with an operator of a chain that is as long as its phase."""

WALK_ON = 0.75
"""Chance that a walk goes on by one more group."""


@inlined
def _one_of(rows: Csr, i: int) -> int:
    """A random value of a row, -1 if it is empty."""
    first, last = rows.start[i], rows.start[i + 1]
    return int(rows.values[np.random.randint(first, last)]) if first < last else -1


@inlined
def _put(model: ModelArrays, state: SearchState, g: int, q: int) -> None:
    """Moves a group to a device; applied in reverse with the old device, it undoes itself."""
    p = device(model, state, g)
    move_item(model.held, state.held, g, p, q)
    for x in range(model.members.start[g], model.members.start[g + 1]):
        state.where[model.members.values[x]] = q


@inlined
def _take_along(model: ModelArrays, state: SearchState, size: int, g: int, q: int) -> int:
    """Moves one more group, unless it is there; the number of groups moved."""
    p = device(model, state, g)
    if p == q:
        return size
    state.moved[size], state.source[size] = g, p
    _put(model, state, g, q)
    return size + 1


@inner
def _walk(model: ModelArrays, state: SearchState, size: int, g: int, q: int) -> int:
    """Moves groups along a walk through the graph from a group; the number of groups moved."""
    while size < state.moved.shape[0] and np.random.random() < WALK_ON:
        i = _one_of(model.members, g)
        near = model.after if np.random.random() < 0.5 else model.before
        j = _one_of(near, i)
        if j < 0:
            break
        g = model.group_of[j]
        size = _take_along(model, state, size, g, q)
    return size


@inlined
def _chosen(state: SearchState, phase: int) -> int:
    """A random operator: often one of the chain that makes a phase as long as it is."""
    if np.random.random() < CRITICAL_CHANCE:
        return int(state.critical[phase, np.random.randint(0, state.num_critical[phase])])
    return int(np.random.randint(0, state.where.shape[0]))


@inner
def _push_out(model: ModelArrays, state: SearchState, size: int, p: int, q: int) -> int:
    """Moves a group of q, which the first group has gone to, to the first one's device p or to any
    other; that may push out another one in turn. The number of groups moved.
    """
    groups, devices = model.members.start.shape[0] - 1, model.room.shape[0]
    while size < groups and q != p:
        h = np.random.randint(0, groups)
        known = device(model, state, h) != q
        for k in range(size):
            known = known or state.moved[k] == h
        if known:
            break
        q = p if np.random.random() < BACK_CHANCE else np.random.randint(0, devices)
        size = _take_along(model, state, size, h, q)
    return size


@inner
def _exchange(model: ModelArrays, state: SearchState, p: int, q: int) -> int:
    """Moves all groups of two devices to the other one; the number of groups moved."""
    size = 0
    for g in range(model.members.start.shape[0] - 1):
        here = device(model, state, g)
        if here == p:
            size = _take_along(model, state, size, g, q)
        elif here == q:
            size = _take_along(model, state, size, g, p)
    return size


@inner
def _draw(model: ModelArrays, state: SearchState) -> int:
    """Makes a random move, noted in `moved` and `source`. Returns the number of groups moved.

    A block goes to one device; or two devices exchange all their groups; or a group goes to another
    device, alone, pushing groups out there, or with the groups of a walk.
    """
    devices = model.room.shape[0]
    blocks = model.blocks.start.shape[0] - 1
    if blocks > 0 and np.random.random() < BLOCK_CHANCE:
        b, q, size = np.random.randint(0, blocks), np.random.randint(0, devices), 0
        for x in range(model.blocks.start[b], model.blocks.start[b + 1]):
            size = _take_along(model, state, size, model.blocks.values[x], q)
        return size
    g = model.group_of[_chosen(state, np.random.randint(0, 2))]
    p = device(model, state, g)
    # Any device but p, each by the same chance.
    q = (p + np.random.randint(1, devices)) % devices
    if np.random.random() < EXCHANGE_CHANCE:
        return _exchange(model, state, p, q)
    size = _take_along(model, state, 0, g, q)
    chance = np.random.random()
    if chance < PUSH_CHANCE:
        size = _push_out(model, state, size, p, q)
    elif chance < PUSH_CHANCE + WALK_CHANCE:
        size = _walk(model, state, size, g, q)
    return size


@inner
def _shift(state: SearchState, phase: int, first: Csr, then: Csr, at: int, by: int) -> int:
    """Moves the operator at a place of an order ahead or back past some operators of its device,
    never past an operator that it waits for or that waits for it, so that the order stays
    topological.

    Args:
        first: operators that each waits for in this phase; then: operators that wait for it.
        at: its place; by: operators of its device to pass, negative to the front.

    Returns:
        its new place; the old one if it passes no operator of its device.
    """
    order, turn, where = state.orders[phase], state.turns[phase], state.where
    i = order[at]
    p, to, passed, left = where[i], at, at, abs(by)
    if by > 0:
        last = order.shape[0] - 1
        # The nearest operator that waits for i stops it.
        for x in range(then.start[i], then.start[i + 1]):
            last = min(last, turn[then.values[x]] - 1)
        while passed < last and left > 0:
            passed += 1
            if where[order[passed]] == p:
                to, left = passed, left - 1
    else:
        front = 0
        for x in range(first.start[i], first.start[i + 1]):
            front = max(front, turn[first.values[x]] + 1)
        while passed > front and left > 0:
            passed -= 1
            if where[order[passed]] == p:
                to, left = passed, left - 1
    _slide(order, turn, at, to)
    return to


@inlined
def _slide(order: Ints, turn: Ints, at: int, to: int) -> None:
    """Moves the operator at a place of an order to another one; all between move by one place."""
    i, step = order[at], 1 if to > at else -1
    while at != to:
        order[at] = order[at + step]
        turn[order[at]] = at
        at += step
    order[to], turn[i] = i, to


@inlined
def _sorted_anew(state: SearchState, phase: int) -> None:
    """Makes the order of a phase the one in which its operators end. The operators of each device
    keep theirs.
    """
    for k in range(state.where.shape[0]):
        i = state.kept.done[phase, k]
        state.orders[phase, k], state.turns[phase, i] = i, k


@inlined
def _mirror(state: SearchState) -> None:
    """Makes the order of backwards the reverse of that of forwards."""
    num = state.where.shape[0]
    for k in range(num):
        i = state.orders[FORWARD, num - 1 - k]
        state.orders[BACKWARD, k] = i
        state.turns[BACKWARD, i] = k


@inlined
def _drawn(state: SearchState, heat: float) -> int:
    """The most ticks of both phases together that a move may lead to."""
    return int(most_allowed(state.ends[FORWARD] + state.ends[BACKWARD], heat))


@inner
def _both(model: ModelArrays, state: SearchState, tied: bool, most: int) -> bool:
    """Schedules both phases after a move; keeps it if they are not longer than `most` together."""
    turns = first_change(model, state, FORWARD), first_change(model, state, BACKWARD)
    # The phase with less to time goes first, because most moves end in the other one.
    one = FORWARD if turns[FORWARD] >= turns[BACKWARD] else BACKWARD
    other = 1 - one
    within = most - least_end(model, state, other, turns[other])
    first = decode(model, state, one, within, turns[one])
    if first > within:
        undo(model, state, one)
        return False
    second = decode(model, state, other, most - first, turns[other])
    if first + second > most:
        undo(model, state, one)
        undo(model, state, other)
        return False
    state.ends[one], state.ends[other] = first, second
    keep(model, state, one)
    keep(model, state, other)
    state.placed[:] = state.where
    _sorted_anew(state, FORWARD)
    if tied:
        _mirror(state)
    else:
        _sorted_anew(state, BACKWARD)
    return True


@inner
def _move(model: ModelArrays, state: SearchState, tied: bool, heat: float) -> None:
    """Tries another placement of some groups."""
    before = excess_bytes(state.held, model.room)
    size = _draw(model, state)
    # Memory takes no schedule to look at, so it is looked at first.
    over = excess_bytes(state.held, model.room)
    if over == 0 or over < before:
        kept = _both(model, state, tied, NEVER if over < before else _drawn(state, heat))
    else:
        kept = False
    if not kept:
        for k in range(size - 1, -1, -1):
            _put(model, state, state.moved[k], state.source[k])


@inner
def _reorder(model: ModelArrays, state: SearchState, phase: int, tied: bool, heat: float) -> None:
    """Tries another order of a phase; of both if they are tied."""
    first, then = model.before, model.after
    if phase == BACKWARD:
        first, then = then, first
    i = _chosen(state, np.random.randint(0, 2) if tied else phase)
    at, by = state.turns[phase, i], np.random.randint(1, FAR + 1)
    to = _shift(state, phase, first, then, at, by if np.random.random() < 0.5 else -by)
    if to == at:
        return
    if tied:
        _mirror(state)
        if not _both(model, state, tied, _drawn(state, heat)):
            _slide(state.orders[FORWARD], state.turns[FORWARD], to, at)
            _mirror(state)
        return
    # The placement stays, so the other phase and the memory do.
    most = int(most_allowed(state.ends[phase], heat))
    end = decode(model, state, phase, most, first_change(model, state, phase))
    if end <= most:
        state.ends[phase] = end
        keep(model, state, phase)
        _sorted_anew(state, phase)
    else:
        undo(model, state, phase)
        # Nothing stops the way back: the order before was topological.
        _slide(state.orders[phase], state.turns[phase], to, at)


@njit
def anneal(model: ModelArrays, state: SearchState, run: Annealing, tied: bool) -> None:
    """Changes a schedule by simulated annealing, and notes the best one that fits: a worse one is
    kept by chance, which falls with the loss and with time.

    Args:
        run: temperatures in ticks.
        tied: whether each device runs its backwards in the reverse order of its forwards. The
            orders have to be each other's reverse then.
    """
    np.random.seed(run.seed)
    _note(model, state)
    for number in range(run.moves):
        heat = cooled(run.hot, run.cold, (number + 1) / max(run.moves - 1, 1))
        kind = np.random.randint(0, 4)  # 0, 1: a placement; 2, 3: an order of a phase
        if kind >= 2:
            _reorder(model, state, FORWARD if tied else kind - 2, tied, heat)
        elif model.room.shape[0] > 1:
            _move(model, state, tied, heat)
        _note(model, state)


@inlined
def _note(model: ModelArrays, state: SearchState) -> None:
    """Notes the schedule if it is the best that fits."""
    now = state.ends[FORWARD] + state.ends[BACKWARD]
    if now < state.best[0] and excess_bytes(state.held, model.room) == 0:
        state.best[0] = now
        for i in range(state.where.shape[0]):
            state.best_where[i] = state.where[i]
            for phase in (FORWARD, BACKWARD):
                state.best_orders[phase, i] = state.orders[phase, i]


@njit
def restore(model: ModelArrays, state: SearchState) -> bool:
    """Goes back to the best schedule that fits; False if none does."""
    if state.best[0] == NEVER:
        return False
    state.where[:], state.orders[:] = state.best_where, state.best_orders
    for phase in (FORWARD, BACKWARD):
        for k in range(state.where.shape[0]):
            state.turns[phase, state.orders[phase, k]] = k
    fill(model, state)
    return True
