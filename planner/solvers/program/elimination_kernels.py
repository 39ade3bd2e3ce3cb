"""Conditioned elimination: the best strategies of some nodes beside the fixed ones of all others,
compiled by numba.

Nodes are eliminated one by one, the one with the smallest table first: the table has the least cost
of the node and of all that was eliminated with it, for each combination of its neighbours'
strategies, and makes these neighbours of each other. If every table would be too large, a node is
drawn that keeps the strategy that it has, one with many neighbours rather than another; all others
are the best beside it. Backwards, each node then takes the best strategy beside its neighbours.

Source: Dechter, "Bucket elimination", AIJ 1999; Dechter and Rish, "Mini-buckets", JACM 2003.
"""

from typing import NamedTuple

import numpy as np

from planner.solvers.program.core import NEVER, Core
from planner.solvers.program.reduce_kernels import strides
from planner.support.arrays import Bools, Ints
from planner.support.jit import inner, njit

ROOM = 30
"""All tables of a block have at most so many times the entries that one may have."""


class Order(NamedTuple):
    """The order in which a block's nodes are eliminated.

    Attributes:
        node: (b,) nodes of the core, in that order.
        scope_start, scope: the neighbours of each when it is eliminated, by their places in the
            order, ascending.
        place: (n,) place of each node of the core in the order; -1 for one that is fixed.
    """

    node: Ints
    scope_start: Ints
    scope: Ints
    place: Ints


@inner
def _adjacency(core: Core, block: Ints, local: Ints) -> Bools:
    """(b, b) which nodes of a block are neighbours."""
    near = np.zeros((len(block), len(block)), np.bool_)
    for k in range(len(block)):
        for at in range(core.near_start[block[k]], core.near_start[block[k] + 1]):
            e = core.near[at]
            other = local[core.ends[e, 0] + core.ends[e, 1] - block[k]]
            if other >= 0:
                near[k, other] = True
    return near


@inner
def _leave(
    near: Bools,
    size: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    k: int,
    table: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> None:
    """Takes a node out of the graph and out of its neighbours' tables."""
    for j in range(len(near)):
        if near[k, j]:
            near[k, j] = near[j, k] = False
            table[j] -= size[k]


@njit
def ordered(core: Core, block: Ints, log_cap: float) -> Order:
    """An order whose tables have at most exp(log_cap) entries each; draws nodes that stay fixed
    from numba's own generator.

    Args:
        block: different nodes.
    """
    b = len(block)
    local = np.full(len(core.start) - 1, -1, np.int64)
    size = np.empty(b, np.float64)
    for k in range(b):
        local[block[k]] = k
        size[k] = np.log(float(core.start[block[k] + 1] - core.start[block[k]]))
    near = _adjacency(core, block, local)
    table = size.copy()
    for k in range(b):
        for j in range(b):
            if near[k, j]:
                table[k] += size[j]
    done = np.zeros(b, np.bool_)
    node, count = np.empty(b, np.int64), 0
    scopes, filled = np.empty(max(b * 4, 16), np.int64), 0
    scope_start = np.zeros(b + 1, np.int64)
    left, room = b, ROOM * np.exp(log_cap)
    while left:
        best = -1
        for k in range(b):
            if not done[k] and (best < 0 or table[k] < table[best]):
                best = k
        entries = np.exp(table[best] - size[best])
        if table[best] > log_cap or entries > room:
            best, heaviest = -1, -1.0
            for k in range(b):
                if not done[k]:
                    degree = 0
                    for j in range(b):
                        degree += near[k, j]
                    weight = np.random.random() * degree
                    if weight > heaviest:
                        best, heaviest = k, weight
            done[best] = True
            left -= 1
            _leave(near, size, best, table)
            continue
        room -= entries
        around = np.flatnonzero(near[best])
        while filled + len(around) > len(scopes):
            scopes = np.concatenate((scopes, np.empty(len(scopes), np.int64)))
        scopes[filled : filled + len(around)] = around
        filled += len(around)
        node[count] = best
        count += 1
        scope_start[count] = filled
        _leave(near, size, best, table)
        for j in around:
            for k in around:
                if j != k and not near[j, k]:
                    near[j, k] = True
                    table[j] += size[k]
        done[best] = True
        left -= 1
    place, at = np.full(b, -1, np.int64), np.full(len(core.start) - 1, -1, np.int64)
    for c in range(count):
        place[node[c]] = c
        at[block[node[c]]] = c
    kept = 0  # a node that was drawn later is in no scope: it was fixed from the start
    for c in range(count):
        first, end = scope_start[c], scope_start[c + 1]
        scope_start[c] = kept
        for k in range(first, end):
            if place[scopes[k]] >= 0:
                scopes[kept] = place[scopes[k]]
                kept += 1
        scopes[scope_start[c] : kept].sort()
    scope_start[count] = kept
    return Order(block[node[:count]], scope_start[: count + 1], scopes[:kept], at)


@njit
def draw_from(seed: int) -> None:
    np.random.seed(seed)


@njit
def eliminated(core: Core, cost: Ints, order: Order, picks: Ints) -> int:
    """Gives the nodes of an order their best strategies; the others stay.

    Args:
        cost: (S,) theta, by strategy.
        picks: (n,) strategies; changed.

    Returns:
        Entries that were added up.
    """
    count = len(order.node)
    sizes = np.empty(count, np.int64)
    begin = np.zeros(count + 1, np.int64)
    for c in range(count):
        sizes[c] = core.start[order.node[c] + 1] - core.start[order.node[c]]
    for c in range(count):
        entries = 1
        for at in range(order.scope_start[c], order.scope_start[c + 1]):
            entries *= sizes[order.scope[at]]
        begin[c + 1] = begin[c] + entries
    message = np.empty(begin[-1], np.int64)
    heads = np.full(count, -1, np.int64)  # messages by the place that eliminates them, linked
    following = np.full(count, -1, np.int64)
    work = 0
    for c in range(count):
        work += _send(core, cost, order, picks, sizes, begin, message, heads, following, c)
        first = order.scope_start[c]
        if first < order.scope_start[c + 1]:
            to = order.scope[first]
            following[c], heads[to] = heads[to], c
    for back in range(count):
        c = count - 1 - back
        _receive(core, cost, order, picks, sizes, begin, message, heads, following, c)
    return work


@inner
def _alone(core: Core, cost: Ints, order: Order, picks: Ints, c: int, own: Ints) -> None:
    """A node's costs beside its fixed neighbours, by its strategies."""
    i = order.node[c]
    for s in range(len(own)):
        own[s] = cost[core.start[i] + s]
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        j = core.ends[e, 0] + core.ends[e, 1] - i
        if order.place[j] < 0:
            of_i, of_j = strides(core, e, i)
            entry = core.edge_start[e] + picks[j] * of_j
            for s in range(len(own)):
                own[s] = min(own[s] + core.matrix[entry + s * of_i], NEVER)


@inner
def _add(
    joint: Ints, size: int, scope: Ints, sizes: Ints, values: Ints, base: int, own: int, step: Ints
) -> None:
    """Adds a table to a larger one.

    Args:
        joint: by the strategies of the scope, the first fastest, and within by the node's own.
        size: the node's own strategies.
        values, base: the table, and where it begins.
        own: its step to the node's next strategy.
        step: its step to the next strategy of each node of the scope; 0 where it has none.
    """
    digit = np.zeros(len(scope), np.int64)
    at, entry = base, 0
    while entry < len(joint):
        if own == 1:
            for s in range(size):
                joint[entry + s] = min(joint[entry + s] + values[at + s], NEVER)
        else:
            for s in range(size):
                joint[entry + s] = min(joint[entry + s] + values[at + s * own], NEVER)
        entry += size
        for d in range(len(scope)):
            digit[d] += 1
            at += step[d]
            if digit[d] < sizes[scope[d]]:
                break
            at -= step[d] * digit[d]
            digit[d] = 0


@inner
def _send(
    core: Core, cost: Ints, order: Order, picks: Ints, sizes: Ints, begin: Ints, message: Ints,
    heads: Ints, following: Ints, c: int,
) -> int:  # fmt: skip
    """Fills the table of a node that is eliminated."""
    i, size = order.node[c], sizes[c]
    scope = order.scope[order.scope_start[c] : order.scope_start[c + 1]]
    entries = begin[c + 1] - begin[c]
    joint = np.empty(entries * size, np.int64)
    own = np.empty(size, np.int64)
    _alone(core, cost, order, picks, c, own)
    for entry in range(entries):
        joint[entry * size : (entry + 1) * size] = own
    step = np.zeros(len(scope), np.int64)
    tables = 1
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        where = order.place[core.ends[e, 0] + core.ends[e, 1] - i]
        if where > c:
            of_i, of_j = strides(core, e, i)
            step[:] = 0
            step[np.searchsorted(scope, where)] = of_j
            _add(joint, size, scope, sizes, core.matrix, core.edge_start[e], of_i, step)
            tables += 1
    other = heads[c]
    while other >= 0:
        step[:] = 0
        stride = 1
        for at in range(order.scope_start[other], order.scope_start[other + 1]):
            where = order.scope[at]
            if where != c:
                step[np.searchsorted(scope, where)] = stride
            stride *= sizes[where]
        _add(joint, size, scope, sizes, message, begin[other], 1, step)
        tables += 1
        other = following[other]
    for entry in range(entries):
        least = joint[entry * size]
        for s in range(1, size):
            least = min(least, joint[entry * size + s])
        message[begin[c] + entry] = least
    return entries * size * tables


@inner
def _receive(
    core: Core, cost: Ints, order: Order, picks: Ints, sizes: Ints, begin: Ints, message: Ints,
    heads: Ints, following: Ints, c: int,
) -> None:  # fmt: skip
    """Gives a node the best strategy beside those of its table's neighbours."""
    i = order.node[c]
    own = np.empty(sizes[c], np.int64)
    _alone(core, cost, order, picks, c, own)
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        j = core.ends[e, 0] + core.ends[e, 1] - i
        if order.place[j] > c:
            of_i, of_j = strides(core, e, i)
            entry = core.edge_start[e] + picks[j] * of_j
            for s in range(sizes[c]):
                own[s] = min(own[s] + core.matrix[entry + s * of_i], NEVER)
    other = heads[c]
    while other >= 0:
        at, stride = begin[other], 1
        for k in range(order.scope_start[other], order.scope_start[other + 1]):
            where = order.scope[k]
            if where != c:
                at += stride * picks[order.node[where]]
            stride *= sizes[where]
        for s in range(sizes[c]):  # the node itself is the first of that table's scope
            own[s] = min(own[s] + message[at + s], NEVER)
        other = following[other]
    picks[i] = np.argmin(own)
