"""The inner loops of bounds and searches over a core (`core.py`), compiled by numba.

Messages. For each edge (u, v) a term a(x_u) and a term b(x_v) are taken from the matrix and given
to the costs of u and v. Whatever they are, no assignment costs less than

    sum_i min_s [theta_i(s) + its terms] + sum_(u,v) min_(s,t) [M(s, t) - a(s) - b(t)]

because every assignment costs as much as before. All of it is in whole numbers, so it is a bound
without any tolerance. A sweep of TRW-S in the order of the nodes raises it: each node gives equal
shares of its costs to the edges ahead, and each of these gives all it has to the node behind it.

Source: Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", TPAMI
2006; the shares are those of its section 5.
"""

import numpy as np

from planner.solvers.program.core import NEVER, Core
from planner.support.arrays import Bools, Ints
from planner.support.jit import inner, njit

FORWARD, BACKWARD = True, False


@njit
def usage_at(core: Core, moment: int) -> Ints:
    """(S,) bytes that each strategy holds at a moment."""
    usage = np.zeros(len(core.cost), np.int64)
    for p in range(len(core.part_node)):
        if core.part_first[p] <= moment <= core.part_last[p]:
            first = core.start[core.part_node[p]]
            for at in range(core.part_start[p], core.part_start[p + 1]):
                usage[first + at - core.part_start[p]] += core.part_bytes[at]
    return usage


@njit
def left_over(core: Core, picks: Ints) -> Ints:
    """(T,) bytes that an assignment leaves free at each moment; negative where it does not fit."""
    change = np.zeros(len(core.free) + 1, np.int64)
    for p in range(len(core.part_node)):
        size = core.part_bytes[core.part_start[p] + picks[core.part_node[p]]]
        change[core.part_first[p]] += size
        change[core.part_last[p] + 1] -= size
    return core.free - np.cumsum(change)[:-1]


@njit
def price(core: Core, cost: Ints, picks: Ints) -> int:
    """The sum of an assignment's costs; at least NEVER if it takes what is forbidden.

    Args:
        cost: (S,) by strategy, in place of the core's.
    """
    total = 0
    for i in range(len(picks)):
        one = cost[core.start[i] + picks[i]]
        if one >= NEVER:
            return NEVER
        total += one
    for e in range(len(core.ends)):
        u, v = core.ends[e, 0], core.ends[e, 1]
        columns = core.start[v + 1] - core.start[v]
        one = core.matrix[core.edge_start[e] + picks[u] * columns + picks[v]]
        if one >= NEVER:
            return NEVER
        total += one
    return total


@njit
def starts_of_messages(core: Core) -> Ints:
    """(m, 2) where the terms of each edge's two ends begin; the last row is the end of all."""
    begin = np.empty((len(core.ends) + 1, 2), np.int64)
    at = 0
    for e in range(len(core.ends)):
        for side in range(2):
            begin[e, side] = at
            i = core.ends[e, side]
            at += core.start[i + 1] - core.start[i]
    begin[-1] = at
    return begin


@inner
def gather(core: Core, cost: Ints, begin: Ints, terms: Ints, i: int, total: Ints) -> int:
    """A node's costs with its terms, into `total`; the least of them."""
    first, last = core.start[i], core.start[i + 1]
    for s in range(last - first):
        total[s] = cost[first + s]
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        own = begin[e, 1 if core.ends[e, 1] == i else 0]
        for s in range(last - first):
            total[s] += terms[own + s]
    least = 4 * NEVER
    for s in range(last - first):
        least = min(least, total[s])
    return least


@inner
def push(core: Core, begin: Ints, terms: Ints, e: int, side: int) -> None:
    """An edge gives all that it has to one of its ends: 0 is u, 1 is v."""
    u, v = core.ends[e, 0], core.ends[e, 1]
    rows, columns = core.start[u + 1] - core.start[u], core.start[v + 1] - core.start[v]
    of_u, of_v = begin[e, 0], begin[e, 1]
    entry = core.edge_start[e]
    if side == 1:
        for t in range(columns):
            terms[of_v + t] = 4 * NEVER
        for s in range(rows):
            taken = terms[of_u + s]
            for t in range(columns):
                terms[of_v + t] = min(terms[of_v + t], core.matrix[entry + t] - taken)
            entry += columns
    else:
        for s in range(rows):
            least = 4 * NEVER
            for t in range(columns):
                least = min(least, core.matrix[entry + t] - terms[of_v + t])
            terms[of_u + s] = least
            entry += columns


@njit
def sweep(core: Core, cost: Ints, begin: Ints, terms: Ints, forward: bool) -> int:
    """One sweep of TRW-S over all nodes, forward or backward.

    Args:
        cost: (S,) theta, by strategy.
        begin: of `starts_of_messages`.
        terms: of all edges' ends; changed.

    Returns:
        The bound; all edges have nothing left.
    """
    n = len(core.start) - 1
    total = np.empty(_widest(core), np.int64)
    bound = 0
    for k in range(n):
        bound += _visit(core, cost, begin, terms, k if forward else n - 1 - k, forward, total)
    return bound


@inner
def _widest(core: Core) -> int:
    most = 0
    for i in range(len(core.start) - 1):
        most = max(most, core.start[i + 1] - core.start[i])
    return most


@inner
def _visit(
    core: Core, cost: Ints, begin: Ints, terms: Ints, i: int, forward: bool, total: Ints
) -> int:
    """A node gives its shares away; the least of what it keeps."""
    gather(core, cost, begin, terms, i, total)
    size = core.start[i + 1] - core.start[i]
    ahead = 0
    for at in range(core.near_start[i], core.near_start[i + 1]):
        ahead += (core.ends[core.near[at], 0] == i) == forward
    degree = core.near_start[i + 1] - core.near_start[i]
    shares = max(ahead, degree - ahead)
    kept = 4 * NEVER
    for s in range(size):
        share = total[s] // shares if shares else 0
        kept = min(kept, total[s] - ahead * share)
        total[s] = share
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        side = 0 if core.ends[e, 0] == i else 1
        if (side == 0) == forward:
            own = begin[e, side]
            for s in range(size):
                terms[own + s] -= total[s]
            push(core, begin, terms, e, 1 - side)
    return kept


@njit
def bound_of(core: Core, cost: Ints, begin: Ints, terms: Ints) -> int:
    """The bound of any terms."""
    total = np.empty(_widest(core), np.int64)
    bound = 0
    for i in range(len(core.start) - 1):
        bound += gather(core, cost, begin, terms, i, total)
    for e in range(len(core.ends)):
        u, v = core.ends[e, 0], core.ends[e, 1]
        rows, columns = core.start[u + 1] - core.start[u], core.start[v + 1] - core.start[v]
        entry, least = core.edge_start[e], 4 * NEVER
        for s in range(rows):
            for t in range(columns):
                left = core.matrix[entry] - terms[begin[e, 0] + s] - terms[begin[e, 1] + t]
                least = min(least, left)
                entry += 1
        bound += least
    return bound


@njit
def fix(core: Core, cost: Ints, begin: Ints, terms: Ints, most: int, alive: Bools) -> int:
    """A backward sweep that takes away every strategy whose assignments all cost too much.

    When the sweep comes to a node, all its edges have given it all they have, and the bound is that
    before the sweep or more, but for the rounding of shares: less than one for each edge's end. So
    an assignment with strategy s costs at least as much more than that bound as s costs more than
    the least one of its node.

    Args:
        terms: after a forward sweep; changed.
        most: assignments that cost more are of no use. At least the bound.
        alive: (S,) strategies that are left; changed.

    Returns:
        The bound.
    """
    n = len(core.start) - 1
    total = np.empty(_widest(core), np.int64)
    before = bound_of(core, cost, begin, terms) - len(core.near)
    bound = 0
    for k in range(n):
        i = n - 1 - k
        least = gather(core, cost, begin, terms, i, total)
        first = core.start[i]
        for s in range(core.start[i + 1] - first):
            if before + total[s] - least > most:
                alive[first + s] = False
        bound += _visit(core, cost, begin, terms, i, False, total)
    return bound


@njit
def rounded(core: Core, cost: Ints, begin: Ints, terms: Ints, picks: Ints) -> None:
    """An assignment from the terms: each node takes the best strategy beside those before it.

    Args:
        terms: after a backward sweep.
        picks: (n,) is filled.
    """
    total = np.empty(_widest(core), np.int64)
    for i in range(len(core.start) - 1):
        size = core.start[i + 1] - core.start[i]
        for s in range(size):
            total[s] = cost[core.start[i] + s]
        for at in range(core.near_start[i], core.near_start[i + 1]):
            e = core.near[at]
            if core.ends[e, 0] == i:
                for s in range(size):
                    total[s] += terms[begin[e, 0] + s]
            else:
                entry = core.edge_start[e] + picks[core.ends[e, 0]] * size
                for s in range(size):
                    total[s] += min(core.matrix[entry + s], NEVER)
        best = 0
        for s in range(1, size):
            if total[s] < total[best]:
                best = s
        picks[i] = best
