"""The inner loops of dnn-partitioning's problem (`solve.py`), compiled by numba.

Symbols; arrays are indexed by them:

    i, j  downsets D_i, smaller ones first; D_0 is empty, D_{n-1} holds every block
    v     blocks
    e     outputs that more than one block touches; equal ones are one, at their total cost
    c, m  CPUs and devices in use
    d     the depth of a path of covers from D_i

The stage D_j minus D_i is on a device or on a CPU. An output crosses its boundary if the stage
touches it and another block outside does too.
"""

from typing import NamedTuple

import numpy as np

from planner.solvers.graphs.downsets import Downsets
from planner.support.arrays import Floats, Ints
from planner.support.jit import inlined, inner, njit

# Columns of `StageWalk.figures`, of the stage from D_i to a place on the path: time on a device;
# cost of the outputs that cross; the part of it that D_i touches too; bytes; time on a CPU.
TIME, CROSSING, STAYING, BYTES, CPU_TIME = 0, 1, 2, 3, 4
# Sums in another order differ by less, relatively.
ROUNDING = 1e-12


class Loads(NamedTuple):
    """What blocks cost.

    Attributes:
        time: (blocks,) ms on a device; inf where it cannot run there.
        cpu_time: (blocks,) ms on a CPU.
        size: (blocks,) bytes.
        cost: (outputs,) ms.
        degree: (outputs,) number of blocks that touch an output.
        touch_start: (blocks + 1,) the outputs that block v touches are
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


class Rest(NamedTuple):
    """Everything behind a downset, (n,) each: all blocks that are not in it.

    Attributes:
        work: ms, each block where it is fastest.
        load: ms, as the load of one device.
        cpu_load: ms, as the load of one CPU.
        bytes: as the memory of one device.
    """

    work: Floats
    load: Floats
    cpu_load: Floats
    bytes: Floats


class DeviceLimits(NamedTuple):
    """What a split may use.

    Attributes:
        cpus: of the host.
        devices: k.
        memory: bytes of a device.
        cpu_share: the most work, in ms of the fastest, that a CPU does in a ms.
    """

    cpus: int
    devices: int
    memory: float
    cpu_share: float


class Splits(NamedTuple):
    """The best splits of every downset over c CPUs and m devices.

    Attributes:
        best: (CPUs + 1, devices + 1, n) ms, the smallest largest load; inf for none.
        cut: (CPUs + 1, devices + 1, n) 2 i + (1 if the last stage is on a CPU else 0), of the D_i
            that attains it.
    """

    best: Floats
    cut: Ints


class StageWalk(NamedTuple):
    """Memory of the walk.

    Attributes:
        seen: (n,) the last D_i from which a downset was reached.
        before: (outputs,) blocks of D_i that touch an output.
        inside: (outputs,) blocks of the stage that touch it.
        at: (blocks + 1,) the downset at each depth of the path.
        turn: (blocks + 1,) its next cover to try.
        figures: (blocks + 1, 5) of the stage that ends there, by TIME, CROSSING, ...
        states: (CPUs x devices, 2) the pairs (c, m) of D_i that are worth extending.
    """

    seen: Ints
    before: Ints
    inside: Ints
    at: Ints
    turn: Ints
    figures: Floats
    states: Ints


@inner
def _touched_before(subsets: Downsets, loads: Loads, i: int, count: Ints) -> None:
    """Writes, per output, how many blocks of downset i touch it."""
    count[:] = 0
    for v in range(loads.time.shape[0]):
        if (subsets.masks[i, v // 64] >> np.uint64(v % 64)) & np.uint64(1):
            for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
                count[loads.touch[x]] += 1


@njit
def open_cost(subsets: Downsets, loads: Loads) -> Floats:
    """(n,) ms of the outputs that blocks on both sides of a downset touch."""
    count = np.zeros(loads.cost.shape[0], np.int64)
    total = np.zeros(subsets.masks.shape[0])
    for i in range(total.shape[0]):
        _touched_before(subsets, loads, i, count)
        for e in range(count.shape[0]):
            if 0 < count[e] < loads.degree[e]:
                total[i] += loads.cost[e]
    return total


@njit
def walk(
    subsets: Downsets,
    loads: Loads,
    rest: Rest,
    limits: DeviceLimits,
    splits: Splits,
    path: StageWalk,
    first: int,
    known: float,
    budget: int,
) -> tuple[int, float]:
    """Extends the best splits of D_first and the downsets after it by one stage each:

        best[c, m, j] = min over D_i within D_j of
            max(best[c, m-1, i], load(D_j minus D_i)), max(best[c-1, m, i], CPU load)

    All splits of D_i come from smaller downsets, so they are final at its turn. What is on the
    last device or CPU is known without a walk: everything.

    Args:
        known: ms, a largest load; only smaller ones are looked for.
        budget: number of stages after which to pause.

    Returns:
        The downset to go on with, n - 1 at the end; and the smallest largest load by then.
    """
    n = subsets.masks.shape[0]
    i = first
    while i < n - 1 and budget > 0:
        live, known = _live_states(rest, limits, splits, path.states, i, known)
        if live > 0:
            _touched_before(subsets, loads, i, path.before)
            budget -= _stages_from(subsets, loads, rest, limits, splits, path, live, i, known)
        budget -= 1
        i += 1
    return i, known


@inner
def _product(known: float, units: float) -> float:
    """Work, in ms, that some devices and CPUs do in the known load, which may be inf."""
    return known * units if units > 0 else 0.0


@inner
def _live_states(
    rest: Rest, limits: DeviceLimits, splits: Splits, states: Ints, i: int, known: float
) -> tuple[int, float]:
    """Lists the (c, m) of D_i that are worth extending by stages that leave something behind them,
    and ends the splits of D_i with everything behind it on one device or CPU.

    Safe to leave out are those

    - whose largest load so far is not below the known one;
    - whose rest is too much work: more than the known load for each device and CPU that is left,
      if it is spread evenly. With no CPU left the rest also pays, at least once, for each output
      that crosses its boundary;
    - that another one dominates: with no more CPUs, no more devices and no larger load. Whatever
      follows them can follow it;
    - with one device or CPU left, which has to take everything.

    Returns:
        How many are listed, and the smallest largest load by now.
    """
    best, cut, last = splits.best, splits.cut, splits.best.shape[2] - 1
    live = 0
    for c in range(limits.cpus + 1):
        for m in range(limits.devices + 1):
            load = best[c, m, i]
            if load >= known:
                continue
            whole = max(load, rest.load[i])
            if m < limits.devices and rest.bytes[i] <= limits.memory and whole < known:
                best[c, m + 1, last], cut[c, m + 1, last] = whole, 2 * i
                known = whole
            whole = max(load, rest.cpu_load[i])
            if c < limits.cpus and whole < known:
                best[c + 1, m, last], cut[c + 1, m, last] = whole, 2 * i + 1
                known = whole
            devices, cpus = limits.devices - m, limits.cpus - c
            if devices + cpus < 2 or load >= known:
                continue
            least = rest.work[i] if cpus > 0 else rest.load[i]
            if least * (1 - ROUNDING) > _product(known, devices + limits.cpu_share * cpus):
                continue
            dominated = False
            for s in range(live):
                b, a = states[s]
                dominated = dominated or (b <= c and a <= m and best[b, a, i] <= load)
            if not dominated:
                states[live, 0], states[live, 1] = c, m
                live += 1
    return live, known


@inner
def _stages_from(
    subsets: Downsets,
    loads: Loads,
    rest: Rest,
    limits: DeviceLimits,
    splits: Splits,
    path: StageWalk,
    live: int,
    i: int,
    known: float,
) -> int:
    """Extends the live states of D_i by every stage that begins behind it.

    A stage grows along the covers, block by block, depth first. Its times, its bytes and the cost
    of those of its outputs that D_i touches too (these stay crossing) never shrink while it grows,
    so the walk turns back where they exceed the known load or the memory.

    Returns:
        The number of stages.
    """
    at, turn, figures, seen = path.at, path.turn, path.figures, path.seen
    start, cover, added, last = subsets.start, subsets.cover, subsets.added, len(path.seen) - 1
    most_left = _most_left(path.states[:live], limits)
    taken = d = 0
    at[0], turn[0] = i, start[i]
    while d >= 0:
        if turn[d] == start[at[d] + 1]:
            d -= 1
            if d >= 0:
                _shrink(loads, path, added[turn[d] - 1])
            continue
        j, v = cover[turn[d]], added[turn[d]]
        turn[d] += 1
        # A stage is the same by every path to it, so it is looked at once. `_live_states` has
        # looked at the one that takes everything.
        if seen[j] == i or j == last:
            continue
        seen[j] = i
        taken += 1
        _grow(loads, path, d, v)
        d += 1
        at[d], turn[d] = j, start[j]
        on_device = figures[d, TIME] + figures[d, STAYING] < known
        on_device = on_device and figures[d, BYTES] <= limits.memory
        on_cpu = limits.cpus > 0 and figures[d, CPU_TIME] < known
        if not on_device and not on_cpu:
            turn[d] = start[j + 1]  # no larger stage either: straight back
        # Where too much would be left, as in `_live_states`, a larger stage may still do.
        elif rest.work[j] * (1 - ROUNDING) <= _product(known, most_left):
            _extend(limits, splits, path, live, i, d, known, on_device, on_cpu)
    return taken


@inlined
def _grow(loads: Loads, path: StageWalk, d: int, v: int) -> None:
    """Puts a block into the stage at depth d of the path: the figures at depth d + 1."""
    figures, inside = path.figures, path.inside
    crossing, staying = figures[d, CROSSING], figures[d, STAYING]
    for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
        e = loads.touch[x]
        inside[e] += 1
        if inside[e] == 1:
            crossing += loads.cost[e]
            if path.before[e] > 0:
                staying += loads.cost[e]
        # All blocks that touch it are inside, so it crosses no more: the cost of what crosses
        # may fall while the stage grows, and no walk turns back for it.
        if inside[e] == loads.degree[e]:
            crossing -= loads.cost[e]
    figures[d + 1, TIME] = figures[d, TIME] + loads.time[v]
    figures[d + 1, CPU_TIME] = figures[d, CPU_TIME] + loads.cpu_time[v]
    figures[d + 1, BYTES] = figures[d, BYTES] + loads.size[v]
    figures[d + 1, CROSSING], figures[d + 1, STAYING] = crossing, staying


@inlined
def _shrink(loads: Loads, path: StageWalk, v: int) -> None:
    """Takes the last block out of the stage again; the figures at smaller depths still hold."""
    for x in range(loads.touch_start[v], loads.touch_start[v + 1]):
        path.inside[loads.touch[x]] -= 1


@inlined
def _extend(
    limits: DeviceLimits,
    splits: Splits,
    path: StageWalk,
    live: int,
    i: int,
    d: int,
    known: float,
    on_device: bool,
    on_cpu: bool,
) -> None:
    """Extends the live states of D_i by the stage at depth d of the path, on a device or a CPU."""
    best, cut, j = splits.best, splits.cut, path.at[d]
    device_load = path.figures[d, TIME] + path.figures[d, CROSSING]
    for s in range(live):
        c, m = path.states[s, 0], path.states[s, 1]
        load = max(best[c, m, i], device_load)
        if on_device and load < known and m < limits.devices and load < best[c, m + 1, j]:
            best[c, m + 1, j], cut[c, m + 1, j] = load, 2 * i
        load = max(best[c, m, i], path.figures[d, CPU_TIME])
        if on_cpu and load < known and c < limits.cpus and load < best[c + 1, m, j]:
            best[c + 1, m, j], cut[c + 1, m, j] = load, 2 * i + 1


@inner
def _most_left(states: Ints, limits: DeviceLimits) -> float:
    """The most devices and CPUs that one more stage leaves to some (c, m), a CPU counting for its
    share of a device: a stage takes a device, or a CPU if there are any.
    """
    most = 0.0
    for s in range(states.shape[0]):
        cpus, devices = limits.cpus - states[s, 0], limits.devices - states[s, 1]
        most = max(most, devices + limits.cpu_share * cpus)
    return most - (min(1.0, limits.cpu_share) if limits.cpus > 0 else 1.0)
