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
from planner.support.arrays import Bools, Floats, Ints
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


def entries_of(core: Core, order: Order) -> float:
    """The entries of all tables of an elimination."""
    sizes = np.diff(core.start)[order.node].astype(float)
    wide = np.append(np.log(sizes)[order.scope], 0.0)  # a scope may be empty, also the last one
    sums = np.add.reduceat(wide, order.scope_start[:-1]) * (np.diff(order.scope_start) > 0)
    return float((sizes * np.exp(sums)).sum())


class _Graph(NamedTuple):
    """The nodes of a block that are left, while an order is made.

    Attributes:
        near: (b, b) which are neighbours.
        size: (b,) logarithm of the number of strategies.
        table: (b,) logarithm of the entries of each node's table.
        degree: (b,) number of neighbours.
        done: (b,) which are eliminated or fixed.
    """

    near: Bools
    size: Floats
    table: Floats
    degree: Ints
    done: Bools


@inner
def _graph(core: Core, block: Ints) -> _Graph:
    b = len(block)
    local = np.full(len(core.start) - 1, -1, np.int64)
    size = np.empty(b, np.float64)
    for k in range(b):
        local[block[k]] = k
        size[k] = np.log(float(core.start[block[k] + 1] - core.start[block[k]]))
    near, degree, table = np.zeros((b, b), np.bool_), np.zeros(b, np.int64), size.copy()
    for k in range(b):
        for at in range(core.near_start[block[k]], core.near_start[block[k] + 1]):
            e = core.near[at]
            other = local[core.ends[e, 0] + core.ends[e, 1] - block[k]]
            if other >= 0:
                near[k, other] = True
                degree[k] += 1
                table[k] += size[other]
    return _Graph(near, size, table, degree, np.zeros(b, np.bool_))


@inner
def _leave(graph: _Graph, k: int) -> Ints:
    """Takes a node out of the graph and out of its neighbours' tables; these neighbours."""
    around = np.flatnonzero(graph.near[k])
    for j in around:
        graph.near[k, j] = graph.near[j, k] = False
        graph.table[j] -= graph.size[k]
        graph.degree[j] -= 1
    graph.done[k] = True
    return around


@inner
def _connect(graph: _Graph, around: Ints) -> None:
    """Makes some nodes neighbours of each other."""
    for j in around:
        for k in around:
            if j != k and not graph.near[j, k]:
                graph.near[j, k] = True
                graph.table[j] += graph.size[k]
                graph.degree[j] += 1


@inner
def _smallest(graph: _Graph) -> int:
    """The node with the smallest table."""
    best = -1
    for k in range(len(graph.done)):
        if not graph.done[k] and (best < 0 or graph.table[k] < graph.table[best]):
            best = k
    return best


@inner
def _drawn(graph: _Graph) -> int:
    """A node that stays fixed: any, and rather one with many neighbours."""
    best, heaviest = -1, -1.0
    for k in range(len(graph.done)):
        if not graph.done[k]:
            weight = np.random.random() * graph.degree[k]
            if weight > heaviest:
                best, heaviest = k, weight
    return best


@njit
def ordered(core: Core, block: Ints, log_cap: float) -> Order:
    """An order whose tables have at most exp(log_cap) entries each; draws nodes that stay fixed
    from numba's own generator.

    Args:
        block: different nodes.
    """
    b = len(block)
    graph = _graph(core, block)
    node, count = np.empty(b, np.int64), 0
    scopes, filled = np.empty(max(b * 4, 16), np.int64), 0
    scope_start = np.zeros(b + 1, np.int64)
    room = ROOM * np.exp(log_cap)
    for _ in range(b):
        best = _smallest(graph)
        entries = np.exp(graph.table[best] - graph.size[best])
        if graph.table[best] > log_cap or entries > room:
            _leave(graph, _drawn(graph))
            continue
        room -= entries
        around = _leave(graph, best)
        _connect(graph, around)
        while filled + len(around) > len(scopes):
            scopes = np.concatenate((scopes, np.empty(len(scopes), np.int64)))
        scopes[filled : filled + len(around)] = around
        filled += len(around)
        node[count] = best
        count += 1
        scope_start[count] = filled
    return _order(core, block, node[:count], scope_start[: count + 1], scopes)


@inner
def _order(core: Core, block: Ints, node: Ints, scope_start: Ints, scopes: Ints) -> Order:
    """The order of some nodes of a block, whose scopes have places in the block, and nodes that
    were drawn later: these are fixed from the start, so they are in no scope.
    """
    place, at = np.full(len(block), -1, np.int64), np.full(len(core.start) - 1, -1, np.int64)
    for c in range(len(node)):
        place[node[c]] = c
        at[block[node[c]]] = c
    kept, begin = 0, np.zeros(len(node) + 1, np.int64)
    for c in range(len(node)):
        for k in range(scope_start[c], scope_start[c + 1]):
            if place[scopes[k]] >= 0:
                scopes[kept] = place[scopes[k]]
                kept += 1
        begin[c + 1] = kept
        scopes[begin[c] : kept].sort()
    return Order(block[node], begin, scopes[:kept], at)


@njit
def draw_from(seed: int) -> None:
    """Begins numba's own draws anew."""
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
    work: int = entries * size * tables
    return work


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
