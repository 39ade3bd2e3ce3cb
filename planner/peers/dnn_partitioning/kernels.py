"""The inner loop of `dnn_partitioning.py`, compiled by numba. Arrays are indexed by

i, j  downsets D_i, smaller ones first; D_0 is empty, D_{n-1} holds every block
v     blocks
e     outputs that more than one block touches; equal ones are one, at their total cost
c, m  CPUs and devices in use
"""

from typing import NamedTuple

import numpy as np

from planner.graphs.downsets import Downsets, sums_over
from planner.support.arrays import Floats, Ints
from planner.support.jit import njit


class Loads(NamedTuple):
    """What blocks cost.

    Attributes:
        time: (blocks,) ms on a device; inf where it cannot run there.
        cpu_time: (blocks,) ms on a CPU.
        size: (blocks,) bytes.
        cost: (outputs,) ms.
        degree: (outputs,) blocks that an output touches.
        touch_start: (blocks + 1,) the outputs that touch block v are
            touch[touch_start[v]:touch_start[v + 1]].
        touch: see touch_start.
    """

    time: Floats
    cpu_time: Floats
    size: Floats
    cost: Floats
    degree: Ints
    touch_start: Ints
    touch: Ints


@njit
def touched_before(subsets: Downsets, loads: Loads, i: int, count: Ints) -> None:
    """Writes, per output, how many blocks of downset i it touches."""
    count[:] = 0
    for v in range(loads.time.shape[0]):
        if (subsets.masks[i, v // 64] >> np.uint64(v % 64)) & np.uint64(1):
            for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
                count[loads.touch[x]] += 1


@njit
def smallest_largest_load(
    subsets: Downsets, loads: Loads, limit: tuple[int, int], memory: float, known: float
) -> tuple[Floats, Ints]:
    """For every downset, the smallest largest load of c CPUs and m devices that share it, each with
    at least one block.

        best[c, m, j] = min over D_i within D_j of
            max(best[c, m-1, i], load(D_j minus D_i)), max(best[c-1, m, i], CPU load)

    From each D_i a stage grows along the covers, block by block, depth first. A stage's times, its
    memory, and the cost of those of its outputs that D_i touches too never shrink while it grows,
    so it stops where they exceed what is known or allowed. Of a D_i, only those (c, m) matter that
    leave those devices and CPUs that are left no more than the known load each, if they share what
    is left as evenly as can be.

    Args:
        limit: the numbers of CPUs and of devices.
        memory: of a device, in bytes.
        known: a largest load, in ms; what is not below it is not looked for.

    Returns:
        best: (CPUs + 1, devices + 1, n) ms; inf where there is nothing below `known`.
        cut: likewise, 2 i + (1 if the last stage is on a CPU else 0), of the D_i that attains it.
    """
    n, blocks, outputs = subsets.masks.shape[0], loads.time.shape[0], loads.cost.shape[0]
    best = np.full((limit[0] + 1, limit[1] + 1, n), np.inf)
    cut = np.full((limit[0] + 1, limit[1] + 1, n), -1, np.int64)
    best[0, 0, 0] = 0.0
    # What a block takes at least, and the most of such work that a CPU does in its time.
    work, cpu_share = np.zeros(blocks), 0.0
    for v in range(blocks):
        work[v] = loads.time[v]
        if limit[0] > 0:
            work[v] = min(loads.time[v], loads.cpu_time[v])
            if work[v] > 0:
                cpu_share = max(cpu_share, work[v] / loads.cpu_time[v])
    done = sums_over(subsets, work)
    states = np.zeros(((limit[0] + 1) * (limit[1] + 1), 2), np.int64)
    seen = np.full(n, -1, np.int64)
    before, inside = np.zeros(outputs, np.int64), np.zeros(outputs, np.int64)
    # Along the path: a downset and its next cover to try; the stage's time, its crossing cost, the
    # part of it that stays, its memory, and its time on a CPU.
    at, turn = np.zeros(blocks + 1, np.int64), np.zeros(blocks + 1, np.int64)
    figures = np.zeros((blocks + 1, 5))
    for i in range(n - 1):
        live = 0
        for c in range(limit[0] + 1):
            for m in range(limit[1] + 1):
                left = limit[1] - m + cpu_share * (limit[0] - c)
                if best[c, m, i] < known and (done[n - 1] - done[i]) * (1 - 1e-12) <= known * left:
                    states[live, 0], states[live, 1] = c, m
                    live += 1
        if live == 0:
            continue
        touched_before(subsets, loads, i, before)
        depth = 0
        at[0], turn[0] = i, subsets.start[i]
        while depth >= 0:
            if turn[depth] == subsets.start[at[depth] + 1]:
                depth -= 1
                if depth >= 0:
                    v = subsets.added[turn[depth] - 1]
                    for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
                        inside[loads.touch[x]] -= 1
                continue
            j, v = subsets.cover[turn[depth]], subsets.added[turn[depth]]
            turn[depth] += 1
            if seen[j] == i:
                continue
            seen[j] = i
            time, crossing = figures[depth, 0] + loads.time[v], figures[depth, 1]
            staying, size = figures[depth, 2], figures[depth, 3] + loads.size[v]
            cpu_time = figures[depth, 4] + loads.cpu_time[v]
            for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
                e = loads.touch[x]
                inside[e] += 1
                if inside[e] == 1:
                    crossing += loads.cost[e]
                    if before[e] > 0:
                        staying += loads.cost[e]
                if inside[e] == loads.degree[e]:
                    crossing -= loads.cost[e]
            on_device = time + staying < known and size <= memory
            on_cpu = limit[0] > 0 and cpu_time < known
            if not on_device and not on_cpu:
                for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
                    inside[loads.touch[x]] -= 1
                continue
            for s in range(live):
                c, m = states[s]
                load = max(best[c, m, i], time + crossing)
                if on_device and load < known and m < limit[1] and load < best[c, m + 1, j]:
                    best[c, m + 1, j], cut[c, m + 1, j] = load, 2 * i
                    if j == n - 1:
                        known = load
                load = max(best[c, m, i], cpu_time)
                if on_cpu and load < known and c < limit[0] and load < best[c + 1, m, j]:
                    best[c + 1, m, j], cut[c + 1, m, j] = load, 2 * i + 1
                    if j == n - 1:
                        known = load
            depth += 1
            at[depth], turn[depth] = j, subsets.start[j]
            figures[depth, 0], figures[depth, 1], figures[depth, 2] = time, crossing, staying
            figures[depth, 3], figures[depth, 4] = size, cpu_time
    return best, cut
