"""Local search for the smallest bottleneck (`model.py`, whose words these are), compiled by numba:
simulated annealing. Arrays are indexed by

    v     items
    e     nets, the home's item first among the items of each
    p, q  devices; D of them
    r     places of work: devices 0 to D - 1, and `line_at(D, p, q)` for the line from p to q
    x, y  positions in the values of a `Csr`
"""

from typing import NamedTuple

import numpy as np

from planner.solvers.annealing import most_allowed
from planner.solvers.bottleneck.model import line_place
from planner.solvers.placement.held_bytes import HeldBytes, HeldState, hold, move_item
from planner.support.arrays import Csr, Floats, Ints
from planner.support.jit import inlined, inner, njit

line_at = inner(line_place)


class BottleneckArrays(NamedTuple):
    """The problem as arrays.

    Attributes:
        work: (items, D) s; inf where an item cannot run.
        items: by net; nets: by item.
        crossing: (nets, D) s that a device pays if it has some but not all items of the net.
        net_bytes: (nets,) size of the transfer; gradient: (nets,) 1 where one comes back.
        latency: (D, D) s per transfer; per_byte: (D, D) s.
        has_lines: whether any transfer takes any time.
        cut: s that a net with items on several devices costs besides.
        held: memory that items need.
        room: (D,) memory in bytes.
        position: (D,) place of each device in the order, if stages are contiguous; else empty.
    """

    work: Floats
    items: Csr
    nets: Csr
    crossing: Floats
    net_bytes: Floats
    gradient: Ints
    latency: Floats
    per_byte: Floats
    has_lines: bool
    cut: float
    held: HeldBytes
    room: Floats
    position: Ints


class PlacementState(NamedTuple):
    """A placement, and the sums over it that a move changes.

    Attributes:
        on: (items,) device of each item.
        load: (D + D D,) work of each place, in s.
        here: (nets, D) number of items of a net on a device.
        held: memory of the devices.
        cuts: (1,) number of nets with items on several devices.
    """

    on: Ints
    load: Floats
    here: Ints
    held: HeldState
    cuts: Ints


class Move(NamedTuple):
    """A move: items, in turn, the device that each goes to, and that where it was."""

    item: Ints
    target: Ints
    source: Ints


@inlined
def charge(costs: BottleneckArrays, state: PlacementState, e: int, sign: int) -> None:
    """Adds the costs of a net to the places that pay them, or with sign -1 takes them off."""
    num = costs.room.shape[0]
    touched = 0
    for p in range(num):
        if state.here[e, p] > 0:
            touched += 1
    if touched < 2:
        return
    state.cuts[0] += sign
    home = state.on[costs.items.values[costs.items.start[e]]]
    for p in range(num):
        if state.here[e, p] == 0:
            continue
        state.load[p] += sign * costs.crossing[e, p]
        if costs.has_lines and p != home:
            there = costs.latency[home, p] + costs.net_bytes[e] * costs.per_byte[home, p]
            state.load[line_at(num, home, p)] += sign * there
            if costs.gradient[e]:
                back = costs.latency[p, home] + costs.net_bytes[e] * costs.per_byte[p, home]
                state.load[line_at(num, p, home)] += sign * back


@inner
def put(costs: BottleneckArrays, state: PlacementState, v: int, q: int) -> None:
    """Moves an item to another device and updates the sums."""
    p = state.on[v]
    # The charge of a net depends on its own counts and on the device of its home: all nets of v are
    # taken off while v is on p, and added when it is on q.
    for x in range(costs.nets.start[v], costs.nets.start[v + 1]):
        charge(costs, state, costs.nets.values[x], -1)
    state.load[p] -= costs.work[v, p]
    state.load[q] += costs.work[v, q]
    state.on[v] = q
    for x in range(costs.nets.start[v], costs.nets.start[v + 1]):
        state.here[costs.nets.values[x], p] -= 1
        state.here[costs.nets.values[x], q] += 1
        charge(costs, state, costs.nets.values[x], 1)
    move_item(costs.held, state.held, v, p, q)


@inner
def placed(costs: BottleneckArrays, on: Ints) -> PlacementState:
    """The state of a placement."""
    num, items = costs.room.shape[0], on.shape[0]
    nets, entries = costs.net_bytes.shape[0], costs.held.bytes.shape[0]
    held = HeldState(np.zeros((entries, num), np.int64), np.zeros(num))
    hold(costs.held, held, on)
    load, here = np.zeros(num + num * num), np.zeros((nets, num), np.int64)
    state = PlacementState(on.copy(), load, here, held, np.zeros(1, np.int64))
    for v in range(items):
        load[on[v]] += costs.work[v, on[v]]
        for x in range(costs.nets.start[v], costs.nets.start[v + 1]):
            here[costs.nets.values[x], on[v]] += 1
    for e in range(nets):
        charge(costs, state, e, 1)
    return state


@inner
def height(load: Floats, count: int) -> tuple[float, float]:
    """The largest load, and the 64-norm of all loads, which grows with the number of loads near the
    largest one. Without it annealing would see no progress until the last of several equal largest
    loads is gone.

    Args:
        count: number of places.
    """
    top = 0.0
    for r in range(count):
        top = max(top, load[r])
    if top == 0.0:
        return 0.0, 0.0
    total = 0.0
    for r in range(count):
        # Shares of the largest load, so that no power overflows.
        share = load[r] / top
        for _ in range(6):  # share ** 64
            share *= share
        total += share
    return top, top * total ** (1 / 64)


@inner
def in_order(costs: BottleneckArrays, state: PlacementState, v: int) -> bool:
    """Whether no reader of an item's nets is on a device before the home's."""
    for x in range(costs.nets.start[v], costs.nets.start[v + 1]):
        e = costs.nets.values[x]
        home = costs.position[state.on[costs.items.values[costs.items.start[e]]]]
        for y in range(costs.items.start[e] + 1, costs.items.start[e + 1]):
            if costs.position[state.on[costs.items.values[y]]] < home:
                return False
    return True


LONGEST, ONWARD = 32, 0.6
"""Largest run of items that one move takes, and the chance of each item after the first."""

TRIES = 8
"""Draws of a cut net, before any two items will do."""

SWAP_CHANCE, ANY_ITEM_CHANCE, ANY_DEVICE_CHANCE = 0.3, 0.5, 0.3
"""Chances that a move swaps two items; that the first of these is any item instead of one at a cut
net; and that a run goes to any device instead of the other side of the cut."""

REFRESH = 10_000
"""Moves after which the sums are computed anew, because rounding errors add up."""


@inlined
def _cut_pair(costs: BottleneckArrays, state: PlacementState) -> tuple[int, int]:
    """Two items of a net on different devices, after some draws any two of a net or any one item
    twice.
    """
    nets = costs.net_bytes.shape[0]
    v = u = np.random.randint(state.on.shape[0])
    for _ in range(TRIES if nets > 0 else 0):
        e = np.random.randint(nets)
        first, end = costs.items.start[e], costs.items.start[e + 1]
        v = costs.items.values[np.random.randint(first, end)]
        u = costs.items.values[np.random.randint(first, end)]
        if state.on[v] != state.on[u]:
            break
    return v, u


@inlined
def _draw_swap(state: PlacementState, move: Move, v: int) -> int:
    """A swap of an item, or of any one, with any other; the number of items that move."""
    items = state.on.shape[0]
    u = np.random.randint(items)
    if np.random.random() < ANY_ITEM_CHANCE:
        v = np.random.randint(items)
    move.item[0], move.item[1] = v, u
    move.target[0], move.target[1] = state.on[u], state.on[v]
    return 0 if state.on[v] == state.on[u] else 2


@inlined
def _draw_run(state: PlacementState, move: Move, v: int, step: int, q: int) -> int:
    """A run of items on the device of v, from v on; the number of items."""
    p, items, count, longest = state.on[v], state.on.shape[0], 0, 1
    while longest < LONGEST and np.random.random() < ONWARD:
        longest += 1
    while 0 <= v < items and count < longest:
        if state.on[v] == p:
            move.item[count], move.target[count] = v, q
            count += 1
        v += step
    return count


@inlined
def _draw(costs: BottleneckArrays, state: PlacementState, move: Move) -> int:
    """Draws a move. Two items swap; or a run of items on one device, in the order of the items and
    at its end next to a cut net, goes where that net's other items are, or to any device. Returns
    the number of items.
    """
    v, u = _cut_pair(costs, state)
    if np.random.random() < SWAP_CHANCE:
        return _draw_swap(state, move, v)
    p, q = state.on[v], state.on[u]
    if p == q or np.random.random() < ANY_DEVICE_CHANCE:
        q = np.random.randint(costs.room.shape[0])
    if p == q:
        return 0
    # The run starts at the cut and goes away from it, to the side of v.
    return _draw_run(state, move, v, 1 if v > u else -1, q)


@inlined
def _make(costs: BottleneckArrays, state: PlacementState, move: Move, length: int) -> int:
    """Makes a move up to the first item that cannot run at its target; the number of items."""
    for k in range(length):
        v, q = move.item[k], move.target[k]
        if np.isinf(costs.work[v, q]):
            return k
        move.source[k] = state.on[v]
        put(costs, state, v, q)
    return length


@inlined
def _allowed(costs: BottleneckArrays, state: PlacementState, move: Move, length: int) -> bool:
    """Whether a placement fits after a move. Only targets have gained bytes, and only nets of the
    moved items can be out of order.
    """
    for k in range(length):
        if state.held.used[move.target[k]] > costs.room[move.target[k]]:
            return False
        if costs.position.shape[0] > 0 and not in_order(costs, state, move.item[k]):
            return False
    return True


@njit
def anneal(
    costs: BottleneckArrays, start: Ints, seed: int, moves: int, heat: float
) -> tuple[Ints, float]:
    """The best placement that simulated annealing meets, and its largest load in s.

    A move is judged by the 64-norm of all loads, at a temperature that falls from `heat` of the
    first norm to 0; the best placement by its largest load. Both include `costs.cut` for each cut
    net. Only placements are met that fit the memory and, if stages are contiguous, keep the order.

    Args:
        start: (items,) devices; a placement that fits.
        moves: number of moves to try.
        heat: share of the norm by which a move may be worse at first, likely.
    """
    np.random.seed(seed)
    items, num = start.shape[0], costs.room.shape[0]
    count = num + num * num if costs.has_lines else num
    state = placed(costs, start)
    top, norm = height(state.load, count)
    extra = costs.cut * state.cuts[0]
    best, least, norm = start.copy(), top + extra, norm + extra
    none = np.zeros(items + 2, np.int64)
    move = Move(none, none.copy(), none.copy())
    warm = heat * norm
    for turn in range(moves):
        if turn % REFRESH == REFRESH - 1:
            state = placed(costs, state.on)
            norm = height(state.load, count)[1] + costs.cut * state.cuts[0]
        length = _draw(costs, state, move)
        if length == 0:
            continue
        done, kept = _make(costs, state, move, length), False
        if done == length and _allowed(costs, state, move, length):
            new_top, new_norm = height(state.load, count)
            extra = costs.cut * state.cuts[0]
            new_top, new_norm = new_top + extra, new_norm + extra
            # The square makes the temperature fall fast at first.
            left = 1 - turn / moves
            kept = new_norm <= norm or new_norm <= most_allowed(norm, warm * left * left)
        if kept:
            norm = new_norm
            if new_top < least * (1 - 1e-12):  # not by rounding alone
                least = new_top
                best[:] = state.on
        else:
            for k in range(done - 1, -1, -1):
                put(costs, state, move.item[k], move.source[k])
    return best, height(placed(costs, best).load, count)[0]
