"""Local search for the smallest bottleneck (`bottleneck_model.py`, whose words these are), compiled
by numba: simulated annealing. Arrays are indexed by

    v     items
    e     nets, the home's item first among the items of each
    s     entries of what devices keep
    p, q  devices; D of them
    r     places of work: devices 0 to D - 1, and D + D p + q for the line from p to q
"""

from typing import NamedTuple

import numpy as np

from planner.support.arrays import Floats, Ints
from planner.support.jit import inner, njit


class Costs(NamedTuple):
    """What items cost, in seconds and bytes.

    Attributes:
        work: (items, D) s; inf where an item cannot run.
        net_start: (nets + 1,) the items of net e are net_item[net_start[e]:net_start[e + 1]].
        net_item: see net_start.
        in_start: (items + 1,) the nets of item v are in_net[in_start[v]:in_start[v + 1]].
        in_net: see in_start.
        crossing: (nets, D) s that a device pays if it has some but not all items of the net.
        message: (nets,) bytes; gradient: (nets,) 1 where one comes back.
        latency: (D, D) s per message; per_byte: (D, D) s.
        has_lines: whether any message takes any time.
        cut: s that a net with items on several devices counts for beside its costs.
        kept_start: (items + 1,) the entries that item v needs are
            kept[kept_start[v]:kept_start[v + 1]].
        kept: see kept_start.
        kept_bytes: (entries,).
        room: (D,) bytes.
        position: (D,) of the devices in their order, if stages are contiguous; else empty.
    """

    work: Floats
    net_start: Ints
    net_item: Ints
    in_start: Ints
    in_net: Ints
    crossing: Floats
    message: Floats
    gradient: Ints
    latency: Floats
    per_byte: Floats
    has_lines: bool
    cut: float
    kept_start: Ints
    kept: Ints
    kept_bytes: Floats
    room: Floats
    position: Ints


class State(NamedTuple):
    """A placement and what follows from it.

    Attributes:
        on: (items,) device of each item.
        load: (D + D D,) s of each place of work.
        here: (nets, D) items of a net on a device.
        holds: (entries, D) items on a device that need an entry.
        used: (D,) bytes.
        cuts: (1,) nets with items on several devices.
    """

    on: Ints
    load: Floats
    here: Ints
    holds: Ints
    used: Floats
    cuts: Ints


@inner
def charge(costs: Costs, state: State, e: int, sign: int) -> None:
    """Adds what a net costs, or takes it off."""
    num = state.used.shape[0]
    touched = 0
    for p in range(num):
        if state.here[e, p] > 0:
            touched += 1
    if touched < 2:
        return
    state.cuts[0] += sign
    home = state.on[costs.net_item[costs.net_start[e]]]
    for p in range(num):
        if state.here[e, p] == 0:
            continue
        state.load[p] += sign * costs.crossing[e, p]
        if costs.has_lines and p != home:
            there = costs.latency[home, p] + costs.message[e] * costs.per_byte[home, p]
            state.load[num + num * home + p] += sign * there
            if costs.gradient[e]:
                back = costs.latency[p, home] + costs.message[e] * costs.per_byte[p, home]
                state.load[num + num * p + home] += sign * back


@inner
def put(costs: Costs, state: State, v: int, q: int) -> None:
    """Moves an item to another device."""
    p = state.on[v]
    for x in range(costs.in_start[v], costs.in_start[v + 1]):
        charge(costs, state, costs.in_net[x], -1)
    state.load[p] -= costs.work[v, p]
    state.load[q] += costs.work[v, q]
    state.on[v] = q
    for x in range(costs.in_start[v], costs.in_start[v + 1]):
        state.here[costs.in_net[x], p] -= 1
        state.here[costs.in_net[x], q] += 1
        charge(costs, state, costs.in_net[x], 1)
    for x in range(costs.kept_start[v], costs.kept_start[v + 1]):
        s = costs.kept[x]
        state.holds[s, p] -= 1
        if state.holds[s, p] == 0:
            state.used[p] -= costs.kept_bytes[s]
        if state.holds[s, q] == 0:
            state.used[q] += costs.kept_bytes[s]
        state.holds[s, q] += 1


@inner
def placed(costs: Costs, on: Ints) -> State:
    """The state of a placement."""
    num, items = costs.room.shape[0], on.shape[0]
    nets, entries = costs.message.shape[0], costs.kept_bytes.shape[0]
    load, used = np.zeros(num + num * num), np.zeros(num)
    here = np.zeros((nets, num), np.int64)
    holds = np.zeros((entries, num), np.int64)
    state = State(on.copy(), load, here, holds, used, np.zeros(1, np.int64))
    for v in range(items):
        load[on[v]] += costs.work[v, on[v]]
        for x in range(costs.in_start[v], costs.in_start[v + 1]):
            here[costs.in_net[x], on[v]] += 1
        for x in range(costs.kept_start[v], costs.kept_start[v + 1]):
            if holds[costs.kept[x], on[v]] == 0:
                used[on[v]] += costs.kept_bytes[costs.kept[x]]
            holds[costs.kept[x], on[v]] += 1
    for e in range(nets):
        charge(costs, state, e, 1)
    return state


@inner
def height(load: Floats, count: int) -> tuple[float, float]:
    """The largest load, and the 64-norm of all loads, which says how many are near it."""
    top = 0.0
    for r in range(count):
        top = max(top, load[r])
    if top == 0.0:
        return 0.0, 0.0
    total = 0.0
    for r in range(count):
        share = load[r] / top
        for _ in range(6):
            share *= share
        total += share
    return top, top * total ** (1 / 64)


@inner
def in_order(costs: Costs, state: State, v: int) -> bool:
    """Whether what an item's nets read is not behind what makes it."""
    if costs.position.shape[0] == 0:
        return True
    for x in range(costs.in_start[v], costs.in_start[v + 1]):
        e = costs.in_net[x]
        home = costs.position[state.on[costs.net_item[costs.net_start[e]]]]
        for y in range(costs.net_start[e] + 1, costs.net_start[e + 1]):
            if costs.position[state.on[costs.net_item[y]]] < home:
                return False
    return True


LONGEST, ONWARD = 32, 0.6
"""The longest run of items that one move takes, and the chance of each item after the first."""

TRIES = 8
"""For a net that is cut, before any will do."""


@inner
def chosen(costs: Costs, state: State, moved: Ints, target: Ints) -> int:
    """Draws a move. An item swaps with another one; or a run of items on one device, in the order
    of the items and at its end next to a net that is cut, goes where that net's other items are,
    or to any device. Writes items and devices; returns how many.
    """
    items, num, nets = state.on.shape[0], state.used.shape[0], costs.message.shape[0]
    v = u = np.random.randint(items)
    for _ in range(TRIES if nets > 0 else 0):
        e = np.random.randint(nets)
        first, end = costs.net_start[e], costs.net_start[e + 1]
        v = costs.net_item[np.random.randint(first, end)]
        u = costs.net_item[np.random.randint(first, end)]
        if state.on[v] != state.on[u]:
            break
    if np.random.random() < 0.3:
        u = np.random.randint(items)
        if np.random.random() < 0.5:
            v = np.random.randint(items)
        moved[0], moved[1], target[0], target[1] = v, u, state.on[u], state.on[v]
        return 0 if state.on[v] == state.on[u] else 2
    p, q = state.on[v], state.on[u]
    if p == q or np.random.random() < 0.3:
        q = np.random.randint(num)
    if p == q:
        return 0
    count, step, most = 0, 1 if v > u else -1, 1
    while most < LONGEST and np.random.random() < ONWARD:
        most += 1
    while 0 <= v < items and count < most:
        if state.on[v] == p:
            moved[count], target[count] = v, q
            count += 1
        v += step
    return count


@njit
def annealed(costs: Costs, start: Ints, seed: int, moves: int, heat: float) -> tuple[Ints, float]:
    """The best placement that simulated annealing meets, and its largest load in s.

    What is cooled down on is the 64-norm of all loads, from a temperature of `heat` of the first
    one to none; the largest load is what counts; nets that are cut, at `costs.cut` each, are added
    to both. Only placements are met that fit the memory and, if stages are contiguous, keep to the
    order.

    Args:
        start: (items,) devices; a placement that fits.
        moves: how many to try.
        heat: share of the 64-norm by which a move may be worse at first, likely.
    """
    np.random.seed(seed)
    items, num = start.shape[0], costs.room.shape[0]
    count = num + num * num if costs.has_lines else num
    state = placed(costs, start)
    top, norm = height(state.load, count)
    extra = costs.cut * state.cuts[0]
    best, least, norm = start.copy(), top + extra, norm + extra
    moved, target = np.zeros(items + 2, np.int64), np.zeros(items + 2, np.int64)
    back = np.zeros(items + 2, np.int64)
    warm = heat * norm
    for turn in range(moves):
        if turn % 10_000 == 9_999:  # rounding errors add up
            state = placed(costs, state.on)
            norm = height(state.load, count)[1] + costs.cut * state.cuts[0]
        length = chosen(costs, state, moved, target)
        if length == 0:
            continue
        allowed, tried = True, 0
        while tried < length and allowed:
            v, q = moved[tried], target[tried]
            if np.isinf(costs.work[v, q]):
                allowed = False
                break
            back[tried] = state.on[v]
            put(costs, state, v, q)
            tried += 1
        for k in range(tried):
            allowed = allowed and state.used[target[k]] <= costs.room[target[k]]
            allowed = allowed and in_order(costs, state, moved[k])
        higher, longer = height(state.load, count)
        extra = costs.cut * state.cuts[0]
        higher, longer = higher + extra, longer + extra
        left = 1 - turn / moves
        if allowed and (
            longer <= norm
            or np.random.random() < np.exp((norm - longer) / (warm * left * left + 1e-300))
        ):
            norm = longer
            if higher < least * (1 - 1e-12):
                least = higher
                best[:] = state.on
        else:
            for k in range(tried - 1, -1, -1):
                put(costs, state, moved[k], back[k])
    return best, height(placed(costs, best).load, count)[0]
