"""dnn-partitioning's problem, solved exactly: the smallest largest load of k devices and l CPUs.

Variables: a chain of downsets {} = D_0, D_1, ..., D_S = everything of the blocks that share a
device (`formats.dnn_partitioning.colocated`); stage s is D_s minus D_{s-1}, on a device or a CPU.

    minimise   max over s of the load of stage s              (`costs.py`)
    subject to (1) at most k stages are on devices and l on CPUs
               (2) what a device holds fits its memory
               (3) a device runs only what it supports

    (a) blocks that no better split parts become one                   `joining.joined`
    (b) the best split of one linear order is the first load to beat, then
        the best ones of a few of the downsets                                `split`
    (c) all pairs of downsets that may lead to a smaller load                 `kernels.walk`

Where there are more downsets than asked for, only those of a window are looked at
(`graphs.downsets.windowed`). The walk is cut where the clock asks for it: the split is then the
best one by that time, with a bound that needs no search.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.artefacts.formats.dnn_partitioning import MILLI, ColorBlocks, DnnGraph, colocated
from planner.artefacts.problem import Status
from planner.solvers.clock import clock
from planner.solvers.dnn_partitioning.costs import outputs
from planner.solvers.dnn_partitioning.joining import Items, joined
from planner.solvers.dnn_partitioning.kernels import (
    DeviceLimits,
    Loads,
    Rest,
    Splits,
    StageWalk,
    open_cost,
    walk,
)
from planner.solvers.graphs.downsets import Downsets, downsets, members, sums_behind, windowed
from planner.solvers.graphs.windows import enumerated
from planner.support.arrays import csr

# Seconds, mostly.
DEFAULT_MAX_DOWNSETS = 200_000
# Downsets times numbers of devices and CPUs: half a GB.
MAX_STATES = 30_000_000
# Parts of the downsets that are walked before all of them, for a load to beat: a walk takes about
# the square of its downsets. Not where a part would be fewer downsets than FEW_DOWNSETS.
PARTS, FEW_DOWNSETS = (64, 8), 500
# Stages that are walked between two looks at the clock: a tenth of a second.
STAGES_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class DnnStage:
    """The part of one device.

    Attributes:
        nodes: their positions in the file, ascending.
        cpu: whether the device is a CPU of the host.
    """

    nodes: tuple[int, ...]
    cpu: bool


@dataclass(frozen=True, slots=True)
class DnnSplit:
    """An answer.

    Attributes:
        status: optimal over all contiguous splits; feasible if only some downsets were looked at,
            or the clock cut the search; infeasible if there is no split; unknown if only some were
            looked at, or the clock cut the search, and none was found.
        stages: in topological order; empty if there are none.
        num_downsets: that were looked at, of the blocks that the search may part.
        bound_s: no contiguous split has a smaller largest load.
        reproducible: False where the clock cut the search.
    """

    status: Status
    stages: tuple[DnnStage, ...]
    num_downsets: int
    bound_s: float = 0.0
    reproducible: bool = True


def split(
    graph: DnnGraph,
    num_devices: int,
    memory_bytes: float,
    max_downsets: int | None = DEFAULT_MAX_DOWNSETS,
    time_limit_s: float = math.inf,
) -> DnnSplit:
    """The contiguous split with the smallest largest load.

    Args:
        num_devices: k; the CPUs are the graph's.
        memory_bytes: of each device.
        max_downsets: the most to look at, fewer with very many devices; None for no limit.
        time_limit_s: of processor time; compiling does not count.
    """
    with clock(time_limit_s) as left_s:
        items = joined(_items(graph, colocated(graph)), left_s)
        count = len(items.members)
        loads = _loads(items)
        limits = _limits(items, min(graph.num_cpus, count), min(num_devices, count), memory_bytes)
        if max_downsets is not None:
            states_each = (limits.cpus + 1) * (limits.devices + 1)
            max_downsets = min(max_downsets, max(MAX_STATES // states_each, count + 1))
        best = _walked(_chain(count), loads, limits, _Best(), lambda: math.inf)
        subsets, everything, in_time = enumerated(
            items.predecessors, range(count), max_downsets, left_s
        )
        for part in PARTS:
            few = len(subsets.masks) // part
            if few > max(FEW_DOWNSETS, count):
                some, _ = windowed(items.predecessors, range(count), few)
                best = _walked(some, loads, limits, best, left_s)
        best = _walked(subsets, loads, limits, best, left_s)
    stages = tuple(_stage(items, *one) for one in best.stages)
    exact = everything and best.whole
    if stages:
        status = Status.OPTIMAL if exact else Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if exact else Status.UNKNOWN
    bound_ms = best.load if exact else _least_load(items, limits)
    in_time = in_time and best.whole
    return DnnSplit(status, stages, len(subsets.masks), MILLI * bound_ms, in_time)


def _chain(count: int) -> Downsets:
    """The downsets of the items in their own order, one after the other."""
    return downsets([(), *((v,) for v in range(count - 1))])


# -------------------------------------------------------------------------------- the walk


@dataclass(frozen=True, slots=True)
class _Best:
    """The best split so far.

    Attributes:
        load: its largest load, in ms; inf without one.
        stages: its items, and whether they are on a CPU, stage by stage.
        whole: whether no walk was cut by the clock.
    """

    load: float = math.inf
    stages: tuple[tuple[tuple[int, ...], bool], ...] = ()
    whole: bool = True


def _walked(
    subsets: Downsets, loads: Loads, limits: DeviceLimits, best: _Best, left_s: Callable[[], float]
) -> _Best:
    """The best split along some downsets, if it beats the one that is known; by the end of the
    time, the best so far.
    """
    n, num_blocks = len(subsets.masks), len(loads.time)
    shape = limits.cpus + 1, limits.devices + 1, n
    splits = Splits(np.full(shape, np.inf), np.full(shape, -1, np.int64))
    splits.best[0, 0, 0] = 0.0
    path = StageWalk(
        seen=np.full(n, -1, np.int64),
        before=np.zeros(len(loads.cost), np.int64),
        inside=np.zeros(len(loads.cost), np.int64),
        at=np.zeros(num_blocks + 1, np.int64),
        turn=np.zeros(num_blocks + 1, np.int64),
        figures=np.zeros((num_blocks + 1, 5)),
        states=np.zeros((shape[0] * shape[1], 2), np.int64),
    )
    work = np.minimum(loads.time, loads.cpu_time) if limits.cpus else loads.time
    rest = Rest(
        work=sums_behind(subsets, work),
        load=sums_behind(subsets, loads.time) + open_cost(subsets, loads),
        cpu_load=sums_behind(subsets, loads.cpu_time),
        bytes=sums_behind(subsets, loads.size),
    )
    i, known = 0, best.load
    while i < n - 1 and left_s() > 0:
        i, known = walk(
            subsets, loads, rest, limits, splits, path, i, known, STAGES_AT_ONCE
        )  # fmt: skip
    whole = best.whole and i >= n - 1
    stages = _stages(subsets, splits) if known < best.load else best.stages
    return _Best(known, stages, whole)


def _stages(subsets: Downsets, splits: Splits) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """The stages of the best split, walked back from its end; see `_Best`."""
    j = len(subsets.masks) - 1
    c, m = (int(x) for x in np.unravel_index(splits.best[..., j].argmin(), splits.best.shape[:2]))
    stages: list[tuple[tuple[int, ...], bool]] = []
    while j:
        i, cpu = divmod(int(splits.cut[c, m, j]), 2)
        stages.append((tuple(members(subsets.masks[j] & ~subsets.masks[i])), bool(cpu)))
        j, c, m = i, c - cpu, m - (1 - cpu)
    return tuple(reversed(stages))


def _stage(items: Items, inside: Sequence[int], cpu: bool) -> DnnStage:
    return DnnStage(tuple(sorted(v for b in inside for v in items.members[b])), cpu)


# -------------------------------------------------------------------------------- the blocks


def _items(graph: DnnGraph, blocks: ColorBlocks) -> Items:
    """The costs of blocks."""
    block_of = {v: b for b, nodes in enumerate(blocks.members) for v in nodes}
    crossing: dict[tuple[int, ...], float] = {}
    for cost, touched in outputs(graph):
        where = tuple(sorted({block_of[v] for v in touched}))
        if len(where) > 1 and cost > 0:
            crossing[where] = crossing.get(where, 0.0) + cost
    nodes = [[graph.nodes[v] for v in inside] for inside in blocks.members]
    return Items(
        members=blocks.members,
        predecessors=blocks.predecessors,
        time=tuple(sum(n.time_ms if n.supported else math.inf for n in one) for one in nodes),
        cpu_time=tuple(sum(n.cpu_time_ms for n in one) for one in nodes),
        size=tuple(sum(n.size_bytes for n in one) for one in nodes),
        crossing=crossing,
    )


def _limits(items: Items, cpus: int, devices: int, memory_bytes: float) -> DeviceLimits:
    pairs = zip(items.time, items.cpu_time, strict=True)
    shares = [min(time, cpu) / cpu for time, cpu in pairs if min(time, cpu) > 0]
    return DeviceLimits(
        cpus, devices, float(memory_bytes), max(shares, default=0.0) if cpus else 0.0
    )


def _least_load(items: Items, limits: DeviceLimits) -> float:
    """A bound on the largest load, in ms: the largest item, and all work spread evenly."""
    pairs = zip(items.time, items.cpu_time, strict=True)
    work = [min(time, cpu) if limits.cpus else time for time, cpu in pairs]
    units = limits.devices + limits.cpu_share * limits.cpus
    return max(max(work), sum(work) / units) if units > 0 else max(work)


def _loads(items: Items) -> Loads:
    """The costs of items, as arrays."""
    touching: list[list[int]] = [[] for _ in items.members]
    for e, where in enumerate(items.crossing):
        for b in where:
            touching[b].append(e)
    start, touch = csr(touching)
    return Loads(
        time=np.array(items.time, dtype=np.float64),
        cpu_time=np.array(items.cpu_time, dtype=np.float64),
        size=np.array(items.size, dtype=np.float64),
        cost=np.array(list(items.crossing.values()), dtype=np.float64),
        degree=np.array([len(where) for where in items.crossing], dtype=np.int64),
        touch_start=start,
        touch=touch,
    )
