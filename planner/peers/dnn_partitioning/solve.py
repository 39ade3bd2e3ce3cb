"""dnn-partitioning's problem, solved exactly: the smallest largest load of k devices and l CPUs.

Variables: a chain of downsets {} = D_0, D_1, ..., D_S = everything of the blocks that share a
device (`formats.dnn_partitioning.colocated`); stage s is D_s minus D_{s-1}, on a device or a CPU.

    minimise   max over s of the load of stage s              (`costs/dnn_partitioning.py`)
    subject to (1) at most k stages are on devices and l on CPUs
               (2) what a device holds fits its memory
               (3) a device runs only what it supports

All pairs of downsets that matter are walked (`dnn_partitioning_kernels.py`). The first load to
beat is that of the best split of one linear order. Where there are more downsets than asked for,
only those of a window are looked at (`windows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.formats.dnn_partitioning import Blocks, DnnGraph, colocated
from planner.graphs.downsets import Downsets, csr, downsets, members, windowed
from planner.peers.dnn_partitioning.costs import outputs
from planner.peers.dnn_partitioning.kernels import Loads, smallest_largest_load
from planner.problem import Status
from planner.support.arrays import Floats, Ints

# Mostly seconds, a minute at worst.
DEFAULT_MAX_DOWNSETS = 200_000
# Downsets times numbers of devices and CPUs: half a GB.
MAX_STATES = 30_000_000
TINY_MS = 1e-300


@dataclass(frozen=True, slots=True)
class DnnStage:
    """What one device does.

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
        status: optimal over all contiguous splits; feasible if only some downsets were looked at;
            infeasible if there is no split; unknown if only some were looked at and none was found.
        stages: in topological order; empty if there are none.
        num_downsets: that were looked at.
    """

    status: Status
    stages: tuple[DnnStage, ...]
    num_downsets: int


def split(
    graph: DnnGraph,
    num_devices: int,
    memory_bytes: float,
    max_downsets: int | None = DEFAULT_MAX_DOWNSETS,
) -> DnnSplit:
    """The contiguous split with the smallest largest load.

    Args:
        num_devices: k; the CPUs are the graph's.
        memory_bytes: of each device.
        max_downsets: the most to look at, fewer with very many devices; None for no limit.
    """
    blocks = colocated(graph)
    feeds, count = blocks.predecessors, len(blocks.members)
    limit = min(graph.num_cpus, count), min(num_devices, count)
    if max_downsets is not None:
        states_each = (limit[0] + 1) * (limit[1] + 1)
        max_downsets = min(max_downsets, max(MAX_STATES // states_each, count + 1))
    found, exact = windowed(feeds, range(count), max_downsets)
    subsets, loads, memory = found, _loads(graph, blocks), float(memory_bytes)
    best, _ = smallest_largest_load(_chain(count), loads, limit, memory, np.inf)
    # A hair more, so that the split that attains it is found again, even if it takes no time.
    known = float(best[..., -1].min()) * (1 + 1e-12) + TINY_MS
    best, cut = smallest_largest_load(subsets, loads, limit, memory, known)
    stages = _stages(blocks, subsets, best, cut)
    if stages:
        status = Status.OPTIMAL if exact else Status.FEASIBLE
    else:
        status = Status.INFEASIBLE if exact else Status.UNKNOWN
    return DnnSplit(status, stages, len(subsets.masks))


def _chain(count: int) -> Downsets:
    """The downsets of the blocks in their own order, one after the other."""
    return downsets([(), *((b,) for b in range(count - 1))])


def _loads(graph: DnnGraph, blocks: Blocks) -> Loads:
    """The costs of blocks, in ms and bytes."""
    block_of = {v: b for b, nodes in enumerate(blocks.members) for v in nodes}
    crossing: dict[tuple[int, ...], float] = {}
    for cost, touched in outputs(graph):
        where = tuple(sorted({block_of[v] for v in touched}))
        if len(where) > 1 and cost > 0:
            crossing[where] = crossing.get(where, 0.0) + cost
    touching: list[list[int]] = [[] for _ in blocks.members]
    for e, where in enumerate(crossing):
        for b in where:
            touching[b].append(e)
    start, touch = csr(touching)
    return Loads(
        time=_sums(blocks, [n.time_ms if n.supported else np.inf for n in graph.nodes]),
        cpu_time=_sums(blocks, [node.cpu_time_ms for node in graph.nodes]),
        size=_sums(blocks, [node.size_bytes for node in graph.nodes]),
        cost=np.array(list(crossing.values()), dtype=np.float64),
        degree=np.array([len(where) for where in crossing], dtype=np.int64),
        touch_start=start,
        touch=touch,
    )


def _sums(blocks: Blocks, values: Sequence[float]) -> Floats:
    sums = [sum(values[v] for v in nodes) for nodes in blocks.members]
    return np.array(sums, dtype=np.float64)


def _stages(blocks: Blocks, subsets: Downsets, best: Floats, cut: Ints) -> tuple[DnnStage, ...]:
    """The stages of the best split, walked back from its end; none if there is none."""
    j = len(subsets.masks) - 1
    c, m = (int(x) for x in np.unravel_index(np.argmin(best[..., j]), best.shape[:2]))
    if not np.isfinite(best[c, m, j]):
        return ()
    found: list[DnnStage] = []
    while j:
        i, cpu = divmod(int(cut[c, m, j]), 2)
        inside = members(subsets.masks[j] & ~subsets.masks[i])
        nodes = sorted(v for b in inside for v in blocks.members[b])
        found.append(DnnStage(tuple(nodes), bool(cpu)))
        j, c, m = i, c - cpu, m - (1 - cpu)
    return tuple(reversed(found))
