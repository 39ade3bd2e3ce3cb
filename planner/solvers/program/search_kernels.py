"""The inner loops of the search for assignments (`search.py`), compiled by numba."""

import numpy as np

from planner.solvers.program.core import NEVER, Core
from planner.support.arrays import Bools, Ints
from planner.support.jit import inner, njit


@njit
def ball(core: Core, seed: int, size: int, seen: Bools) -> Ints:
    """Up to `size` nodes that were not seen, nearest to one of them first; they are seen then."""
    nodes = np.empty(size, np.int64)
    nodes[0], count, at = seed, 1, 0
    seen[seed] = True
    while at < count and count < size:
        i = nodes[at]
        at += 1
        degree = core.near_start[i + 1] - core.near_start[i]
        shift = np.random.randint(0, max(degree, 1))
        for k in range(degree):
            e = core.near[core.near_start[i] + (k + shift) % degree]
            j = core.ends[e, 0] + core.ends[e, 1] - i
            if not seen[j] and count < size:
                seen[j] = True
                nodes[count] = j
                count += 1
    return nodes[:count].copy()


@inner
def _difference(core: Core, nodes: Ints, old: Ints, now: Ints) -> int:
    """By how much the costs around some nodes change; NEVER if it comes to what is forbidden.

    Args:
        nodes: of which the strategies differ.
        old, now: assignments that differ at these nodes alone.
    """
    change = 0
    for i in nodes:
        change += core.cost[core.start[i] + now[i]] - core.cost[core.start[i] + old[i]]
        for at in range(core.near_start[i], core.near_start[i + 1]):
            e = core.near[at]
            u, v = core.ends[e, 0], core.ends[e, 1]
            if u + v - i < i and old[u + v - i] != now[u + v - i]:
                continue  # its other end has counted the edge
            columns = core.start[v + 1] - core.start[v]
            entry = core.matrix[core.edge_start[e] + now[u] * columns + now[v]]
            if entry >= NEVER:
                return NEVER
            change += entry - core.matrix[core.edge_start[e] + old[u] * columns + old[v]]
    return change


@inner
def _used(
    core: Core, part_of: Ints, parts: Ints, nodes: Ints, old: Ints, now: Ints, change: Ints
) -> None:
    """(T,) by how much the bytes held at each moment grow, into `change`."""
    change[:] = 0
    for i in nodes:
        for at in range(part_of[i], part_of[i + 1]):
            p = parts[at]
            begin = core.part_start[p]
            more = core.part_bytes[begin + now[i]] - core.part_bytes[begin + old[i]]
            if more != 0:
                change[core.part_first[p]] += more
                change[core.part_last[p] + 1] -= more
    total = 0
    for t in range(len(change)):
        total += change[t]
        change[t] = total


@inner
def _components(core: Core, picks: Ints, new: Ints) -> tuple[Ints, Ints]:
    """The nodes that change, by connected component: where each begins, and the nodes."""
    changed = np.flatnonzero(picks != new)
    nodes = np.empty(len(changed), np.int64)
    begin = np.zeros(len(changed) + 1, np.int64)
    seen = np.zeros(len(picks), np.bool_)
    count, groups = 0, 0
    for seed in changed:
        if seen[seed]:
            continue
        seen[seed] = True
        nodes[count] = seed
        at, count = count, count + 1
        while at < count:
            i = nodes[at]
            at += 1
            for k in range(core.near_start[i], core.near_start[i + 1]):
                e = core.near[k]
                j = core.ends[e, 0] + core.ends[e, 1] - i
                if not seen[j] and picks[j] != new[j]:
                    seen[j] = True
                    nodes[count] = j
                    count += 1
        groups += 1
        begin[groups] = count
    return begin[: groups + 1], nodes


@njit
def take(core: Core, part_of: Ints, parts: Ints, picks: Ints, new: Ints, left: Ints) -> int:
    """Takes over what is better and fits of another assignment: all of it, or else the connected
    components of changed nodes, one by one, each with its exact cost and bytes.

    Args:
        part_of, parts: the parts of each node.
        picks: that fit; changed.
        left: (T,) bytes that they leave free; changed.

    Returns:
        By how much the cost changed; at most 0.
    """
    begin, nodes = _components(core, picks, new)
    groups = len(begin) - 1
    if groups == 0:
        return 0
    change = np.empty(len(left) + 1, np.int64)
    whole = _difference(core, nodes, picks, new)
    if whole < 0 and _taken(core, part_of, parts, nodes, picks, new, left, change):
        return whole
    if groups == 1:
        return 0
    gain = np.empty(groups, np.int64)
    now = picks.copy()
    for g in range(groups):
        group = nodes[begin[g] : begin[g + 1]]
        now[group] = new[group]
        gain[g] = _difference(core, group, picks, now)
        now[group] = picks[group]
    total = 0
    for g in np.argsort(gain):
        group = nodes[begin[g] : begin[g + 1]]
        if gain[g] > 0:
            break
        now[group] = new[group]
        if _taken(core, part_of, parts, group, picks, now, left, change):
            total += gain[g]
        else:
            now[group] = picks[group]
    return total


@inner
def _taken(
    core: Core, part_of: Ints, parts: Ints, group: Ints, picks: Ints, now: Ints, left: Ints,
    change: Ints,
) -> bool:  # fmt: skip
    """Changes the strategies of some nodes, if that fits; whether it does."""
    _used(core, part_of, parts, group, picks, now, change)
    for t in range(len(left)):
        if change[t] > left[t] and change[t] > 0:
            return False
    for t in range(len(left)):
        left[t] -= change[t]
    for i in group:
        picks[i] = now[i]
    return True
