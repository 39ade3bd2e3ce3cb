"""The inner loops of the reductions (`reduce.py`), compiled by numba."""

import numpy as np

from planner.solvers.program.core import NEVER, Core
from planner.support.arrays import Bools, Ints
from planner.support.jit import inner, njit

ROW_TO_COLUMN, COLUMN_TO_ROW, SEPARABLE = 1, 2, 4
"""Flags of an edge: each strategy of u leaves one of v, each of v one of u, and the matrix is a sum
of a term of u and one of v."""


@njit
def consistent(core: Core, alive: Bools) -> bool:
    """Takes away strategies without a partner on some edge, until all have one on each.

    Args:
        alive: (S,) strategies that are left; changed.

    Returns:
        False if a node has none left.
    """
    n = len(core.start) - 1
    for s in range(len(core.cost)):
        if core.cost[s] >= NEVER:
            alive[s] = False
    queue = np.arange(n)
    waits = np.ones(n, np.bool_)
    first, count = 0, n
    while count:
        v = queue[first]
        first, count = (first + 1) % n, count - 1
        waits[v] = False
        for at in range(core.near_start[v], core.near_start[v + 1]):
            e = core.near[at]
            u = core.ends[e, 0] + core.ends[e, 1] - v
            lost = _without_partner(core, alive, e, u, v)
            if lost < 0:
                return False
            if lost and not waits[u]:
                queue[(first + count) % n] = u
                waits[u] = True
                count += 1
    return True


@inner
def strides(core: Core, e: int, u: int) -> tuple[int, int]:
    """Steps in an edge's matrix to the next strategy of one end, u, and of the other."""
    v = core.ends[e, 1]
    columns = core.start[v + 1] - core.start[v]
    if u == v:
        return 1, columns
    return columns, 1


@inner
def _without_partner(core: Core, alive: Bools, e: int, u: int, v: int) -> int:
    """Takes strategies of u away that have no partner in v; how many, or -1 if none is left."""
    of_u, of_v = strides(core, e, u)
    lost, left = 0, 0
    for s in range(core.start[u], core.start[u + 1]):
        if not alive[s]:
            continue
        entry = core.edge_start[e] + (s - core.start[u]) * of_u
        found = False
        for t in range(core.start[v], core.start[v + 1]):
            if alive[t] and core.matrix[entry] < NEVER:
                found = True
                break
            entry += of_v
        if found:
            left += 1
        else:
            alive[s] = False
            lost += 1
    return lost if left else -1


@njit
def undominated(core: Core, alive: Bools, part_of: Ints, parts: Ints, todo: Bools) -> int:
    """Takes dominated strategies away. One, b, is if another one, a, never holds more, is allowed
    with every partner of b, and in any surroundings costs no more:

        c(a) - c(b) + sum over edges of max over partners t of b of M(a, t) - M(b, t) <= 0

    To exchange b for a in an assignment keeps it feasible and no dearer, so one optimum stays. One
    strategy goes after the other, so of two that are alike one stays.

    Args:
        alive: (S,) strategies that are left; changed.
        part_of: (n + 1,) where each node's parts begin in `parts`.
        parts: parts of the core, by node.
        todo: (n,) nodes that are looked at; changed to those whose neighbours have lost a strategy
            since. No strategy of another one is dominated that was not before.

    Returns:
        How many were taken away.
    """
    lost = 0
    least = np.empty(len(core.cost), np.int64)
    for i in range(len(core.start) - 1):
        if not todo[i]:
            continue
        todo[i] = False
        before = lost
        _least(core, alive, i, least)
        for b in range(core.start[i], core.start[i + 1]):
            if not alive[b]:
                continue
            for a in range(core.start[i], core.start[i + 1]):
                if a != b and alive[a] and least[a] <= least[b]:
                    if _holds_more(core, part_of, parts, i, a, b):
                        continue
                    if _dominates(core, alive, i, a, b, least[a] - least[b]):
                        alive[b] = False
                        lost += 1
                        break
        if lost > before:
            for at in range(core.near_start[i], core.near_start[i + 1]):
                e = core.near[at]
                todo[core.ends[e, 0] + core.ends[e, 1] - i] = True
    return lost


@inner
def _least(core: Core, alive: Bools, i: int, least: Ints) -> None:
    """Of each strategy of a node, its cost and the least entry of its row on every edge."""
    first = core.start[i]
    for s in range(first, core.start[i + 1]):
        least[s] = core.cost[s]
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        j = core.ends[e, 0] + core.ends[e, 1] - i
        of_i, of_j = strides(core, e, i)
        for s in range(first, core.start[i + 1]):
            entry, lowest = core.edge_start[e] + (s - first) * of_i, NEVER
            for t in range(core.start[j], core.start[j + 1]):
                if alive[t]:
                    lowest = min(lowest, core.matrix[entry])
                entry += of_j
            least[s] = min(least[s] + lowest, NEVER)


@inner
def _holds_more(core: Core, part_of: Ints, parts: Ints, i: int, a: int, b: int) -> bool:
    """Whether strategy a of node i holds more than b in some part."""
    first = core.start[i]
    for at in range(part_of[i], part_of[i + 1]):
        begin = core.part_start[parts[at]]
        if core.part_bytes[begin + a - first] > core.part_bytes[begin + b - first]:
            return True
    return False


@inner
def _dominates(core: Core, alive: Bools, i: int, a: int, b: int, worse: int) -> bool:
    """Whether strategy a of node i is allowed wherever b is, and costs no more there.

    Args:
        worse: by how much a costs more if it has the least entry of its row on every edge, and b
            has that of its own. Where b has it, a has at least its least one: so each edge can only
            raise this, and the rest need not be looked at once it is above 0.
    """
    first = core.start[i]
    for at in range(core.near_start[i], core.near_start[i + 1]):
        e = core.near[at]
        j = core.ends[e, 0] + core.ends[e, 1] - i
        of_i, of_j = strides(core, e, i)
        entry_a = core.edge_start[e] + (a - first) * of_i
        entry_b = core.edge_start[e] + (b - first) * of_i
        most, least_a, least_b = -NEVER, NEVER, NEVER
        for t in range(core.start[j], core.start[j + 1]):
            if alive[t]:
                of_a, of_b = core.matrix[entry_a], core.matrix[entry_b]
                if of_b < NEVER:
                    if of_a >= NEVER:
                        return False
                    most = max(most, of_a - of_b)
                least_a, least_b = min(least_a, of_a), min(least_b, of_b)
            entry_a += of_j
            entry_b += of_j
        worse += most - least_a + least_b
        if worse > 0:
            return False
    return worse <= 0


@njit
def kinds(core: Core) -> Ints:
    """(m,) flags of each edge."""
    flags = np.zeros(len(core.ends), np.int64)
    for e in range(len(core.ends)):
        u, v = core.ends[e, 0], core.ends[e, 1]
        rows = core.start[u + 1] - core.start[u]
        columns = core.start[v + 1] - core.start[v]
        matrix = core.matrix[core.edge_start[e] : core.edge_start[e + 1]].reshape((rows, columns))
        flags[e] = kind(matrix)
    return flags


@njit
def kind(matrix: "np.ndarray[tuple[int, int], np.dtype[np.int64]]") -> int:
    """The flags of a matrix in which every row and column has an allowed entry."""
    rows, columns = matrix.shape
    allowed = 0
    by_sum = True
    for s in range(rows):
        for t in range(columns):
            if matrix[s, t] < NEVER:
                allowed += 1
                by_sum &= matrix[s, t] + matrix[0, 0] == matrix[s, 0] + matrix[0, t]
    flag = 0
    if allowed == rows * columns and by_sum:
        flag |= SEPARABLE
    if allowed == rows:  # each row has at least one
        flag |= ROW_TO_COLUMN
    if allowed == columns:
        flag |= COLUMN_TO_ROW
    return flag


@njit
def picked(core: Core, alive: Bools, place: Ints, start: Ints, edge_start: Ints) -> Ints:
    """The matrices of the strategies that are left.

    Args:
        alive: (S,) these strategies.
        place: (S,) their places among those of their node.
        start: (n + 1,) their first one of each node.
        edge_start: (m + 1,) where the new matrices begin.
    """
    matrix = np.empty(edge_start[-1], np.int64)
    for e in range(len(core.ends)):
        u, v = core.ends[e, 0], core.ends[e, 1]
        entry, columns = core.edge_start[e], start[v + 1] - start[v]
        for s in range(core.start[u], core.start[u + 1]):
            for t in range(core.start[v], core.start[v + 1]):
                if alive[s] and alive[t]:
                    matrix[edge_start[e] + place[s] * columns + place[t]] = core.matrix[entry]
                entry += 1
    return matrix
