"""Time of transfers and collectives on a topology: as measured, where its tables have the group;
else inside hosts and over them (`over_hosts.py`), or on one ring through all devices, whichever
moves large buffers faster.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import TypeVar

import numpy as np

from planner.artefacts.topology import CollectiveKind, CollectiveTable, Topology, table_of
from planner.clusters.routes import chain, pair_widths
from planner.costs.over_hosts import Rings, at_once, rings_over_hosts, rows_by_host
from planner.resharding.conversion import LOCAL, Collective, Step
from planner.support.arrays import Floats
from planner.support.memo import remembered

Bytes = TypeVar("Bytes", float, Floats)

_LARGE, _FASTER = 2**36, 0.99
"""Bytes of a buffer so large that only bandwidths matter, and a gain that is none of rounding."""


def transfer_s(
    topology: Topology,
    sources: Sequence[int],
    targets: Sequence[int],
    size_bytes: Bytes,
    messages: int = 1,
) -> Bytes:
    """Time of a transfer on an idle network, in s, over the slowest path from any of some devices
    to any of some others:

        messages x latency + size / bandwidth

    0 where no two of them differ.

    Args:
        size_bytes: of all messages, which follow each other; an array gives an array of times.
        messages: 0 for the time of the bytes alone.
    """
    latency, rate = slowest_link(topology, sources, targets)
    return messages * latency + size_bytes / rate


def slowest_link(
    topology: Topology, sources: Sequence[int], targets: Sequence[int]
) -> tuple[float, float]:
    """The largest latency in s and the smallest bandwidth in bytes/s from any of the sources to
    any of the targets; (0, inf) where no two differ. For compiled searches, which add up times
    themselves; others call `transfer_s`.
    """
    latency, width = pair_widths(topology)
    pairs = np.ix_(np.asarray(sources, dtype=np.intp), np.asarray(targets, dtype=np.intp))
    return float(latency[pairs].max(initial=0.0)), float(width[pairs].min(initial=np.inf))


@remembered(kept=65536)
def ring_links(topology: Topology, devices: tuple[int, ...]) -> tuple[float, float]:
    """Latency in s and bandwidth in bytes/s with which `ring_allreduce_s` gives the time of an
    all-reduce over a group of at least 2 devices. Searches use it.

    Without measured times these are the largest latency and the smallest bandwidth between
    neighbours of the best ring through the devices (see `routes.chain`), or stand for the time
    inside hosts and over them, and the form is exact. With measured times (`Topology.tables`) they
    stand for a straight line below these (see `line_below`), so that the time in a search is a
    bound on that of `allreduce_s`. With one or two measured times, the line runs through them.
    """
    table = table_of(topology, devices)
    if table is not None:
        points = _measured(topology, devices, table)
    elif rows := host_rows(topology, devices):
        points = _points_over_hosts(topology, rows, lambda n: _over_hosts_s(topology, rows, n))
    else:
        return _ring(topology, devices)
    start_s, s_per_byte = line_below(points)
    messages = 2 * (len(devices) - 1)
    rate = messages / len(devices) / s_per_byte if s_per_byte > 0 else math.inf
    return start_s / messages, rate


def _ring(topology: Topology, devices: tuple[int, ...]) -> tuple[float, float]:
    """The largest latency and the smallest bandwidth between neighbours of the best ring."""
    ring = chain(topology, devices, closed=True)
    latency, width = pair_widths(topology)
    hops = list(ring), [*ring[1:], ring[0]]
    return float(latency[hops].max()), float(width[hops].min())


def half_line(
    topology: Topology, devices: tuple[int, ...], kind: CollectiveKind
) -> tuple[float, float]:
    """Start in s, and s per byte, of the time of an all-gather or a reduce-scatter over a group of
    at least 2 devices: exact without measured times, else no more than `allgather_s` or
    `reducescatter_s`. Searches use it.
    """
    table = table_of(topology, devices, kind)
    if table is not None:
        return line_below(_measured(topology, devices, table))
    if rows := host_rows(topology, devices):
        return line_below(
            _points_over_hosts(topology, rows, lambda n: _half_s(topology, devices, kind, n))
        )
    latency, rate = ring_links(topology, devices)
    rounds = len(devices) - 1
    return rounds * latency, rounds / len(devices) / rate


def ring_allreduce_s(size_bytes: float, num_ranks: int, latency: float, bandwidth: float) -> float:
    """Time of a ring all-reduce, in s. Compiled by the solvers that search with it.

    Each of the n ranks sends 2 (n - 1) messages of size_bytes / n:

        t = 2 (n - 1) (latency + size_bytes / n / bandwidth)

    Args:
        size_bytes: the buffer on each rank.
        num_ranks: n, the size of the group, at least 1; 1 costs nothing.
        latency: of the slowest link of the ring, in s.
        bandwidth: of the slowest link of the ring, in bytes/s.

    Source: Patarasuk and Yuan, JPDC 2009.

    >>> ring_allreduce_s(4_000, 4, 1.0, 1_000.0)
    12.0
    """
    return 2 * (num_ranks - 1) * (latency + size_bytes / num_ranks / bandwidth)


# ---- groups over hosts


@remembered(kept=65536)
def host_rows(topology: Topology, devices: tuple[int, ...]) -> Rings:
    """The devices of a group on each host, where its collectives run inside hosts and over them;
    none where one ring through all devices moves a large buffer as fast, or a table has the time.

    Args:
        devices: ascending.
    """
    rows = rows_by_host(topology, devices)
    if not rows or table_of(topology, devices) is not None:
        return ()
    ring_s = ring_allreduce_s(_LARGE, len(devices), *_ring(topology, devices))
    return rows if _over_hosts_s(topology, rows, _LARGE) < _FASTER * ring_s else ()


def _over_hosts_s(topology: Topology, rows: Rings, size_bytes: float, crowd: float = 1.0) -> float:
    """Time of an all-reduce inside hosts and over them, in s."""
    inside_s = max(
        sum(_half_s(topology, row, kind, size_bytes) for kind in _HALVES) for row in rows
    )  # fmt: skip
    return inside_s + _parts_over_hosts_s(topology, rows, size_bytes, crowd)


def _parts_over_hosts_s(topology: Topology, rows: Rings, size_bytes: float, crowd: float) -> float:
    """Time of the all-reduces over hosts of the part of each device of a host, in s."""
    latency, rate = rings_over_hosts(topology, rows)
    return ring_allreduce_s(size_bytes / len(rows[0]), len(rows), latency, rate / crowd)


def _points_over_hosts(
    topology: Topology, rows: Rings, time_s: Callable[[float], float]
) -> "_Points":
    """Times of a collective inside hosts and over them at the sizes between which they lie on
    straight lines, and beyond.
    """
    tables = [table_of(topology, row, kind) for row in rows for kind in CollectiveKind]
    sizes = {size for table in tables if table is not None for size, _ in table.times}
    most = max(sizes, default=_LARGE)
    every = sorted({0, *sizes, 2 * most, 4 * most})
    return tuple((float(size), time_s(size)) for size in every)


@remembered(kept=65536)
def crowding(topology: Topology, groups: tuple[tuple[int, ...], ...]) -> float:
    """How many times as long as alone the bytes of a collective take where it runs over several
    groups at once: their rings share the links that they have in common, such as the card of a
    host. 1 where a table has the time of a group.

    Args:
        groups: of equally many devices, each ascending.
    """
    first = groups[0]
    if len(groups) < 2 or len(first) < 2 or table_of(topology, first) is not None:
        return 1.0
    every = [_rings(topology, group) for group in groups]
    alone = min(at_once(topology, rings)[1] for rings in every)
    together = at_once(topology, [ring for rings in every for ring in rings])[1]
    return max(1.0, alone / together)


def _rings(topology: Topology, group: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The rings on which collectives of a group run at once: those over hosts, or one."""
    rows = host_rows(topology, group)
    return list(zip(*rows, strict=True)) if rows else [chain(topology, group, closed=True)]


def allreduce_s(
    topology: Topology, devices: tuple[int, ...], size_bytes: float, crowd: float = 1.0
) -> float:
    """Time of an all-reduce over a group of devices, in s: as measured where the topology's
    tables have the group, else inside hosts and over them, or on a ring over its slowest link.

    Measured times are joined by straight lines. No size is faster than a smaller one. Before the
    smallest size they start at the latencies of the ring's 2 (n - 1) messages, unless the table
    has the time of 0 bytes; beyond the largest they go on by the slope of `_lower_hull`, which is
    the last one where times bend upwards only.

    Args:
        devices: ascending indices; one alone costs nothing.
        size_bytes: the buffer on each device.
        crowd: as `crowding` gives it.
    """
    if len(devices) < 2:
        return 0.0
    measured_s = _measured_s(topology, devices, CollectiveKind.ALL_REDUCE, size_bytes)
    if measured_s is not None:
        return measured_s
    if rows := host_rows(topology, devices):
        return _over_hosts_s(topology, rows, size_bytes, crowd)
    latency, rate = _ring(topology, devices)
    return ring_allreduce_s(size_bytes, len(devices), latency, rate / crowd)


def _measured_s(
    topology: Topology, devices: tuple[int, ...], kind: CollectiveKind, size_bytes: float
) -> float | None:
    """Time of a collective as measured, in s; None if it was not."""
    table = table_of(topology, devices, kind)
    if table is None:
        return None
    points = _measured(topology, devices, table)
    sizes, times = zip(*points, strict=True)
    if size_bytes <= sizes[-1]:
        return float(np.interp(size_bytes, sizes, times))
    (a, a_s), (b, b_s) = _lower_hull(points)[-2:]
    return b_s + (size_bytes - b) * (b_s - a_s) / (b - a)


# Sizes in bytes and times in s, both ascending; the first size is 0.
_Points = tuple[tuple[float, float], ...]


@remembered(kept=4096)
def _measured(topology: Topology, devices: tuple[int, ...], table: CollectiveTable) -> _Points:
    """The times of a table for a group, from 0 bytes on."""
    sizes, times = zip(*table.times, strict=True)
    if sizes[0] > 0:
        rounds = 1 + (table.kind is CollectiveKind.ALL_REDUCE)
        latency_s = rounds * (len(devices) - 1) * _ring(topology, devices)[0]
        sizes, times = (0, *sizes), (min(latency_s, *times), *times)
    return tuple(zip(sizes, np.maximum.accumulate(times).tolist(), strict=True))


def _lower_hull(points: _Points) -> list[tuple[float, float]]:
    """The points from first to last between which straight lines pass below all the others; their
    slopes ascend.
    """
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (a, at_a), (b, at_b) = hull[-2:]
            # The slope up to b is less than the one behind it: b is a corner from below. A point on
            # the line between its neighbours is none.
            if (at_b - at_a) * (x - b) < (y - at_b) * (b - a):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def line_below(points: _Points) -> tuple[float, float]:
    """Intercept in s and slope in s per byte of a straight line that no measured time is below,
    neither between the sizes nor beyond them; of all edges of the hull that start at 0 s or later,
    and the tangent through the origin, the one with the least relative distance.

    >>> line_below(((0.0, 1.0), (10.0, 3.0)))
    (1.0, 0.2)
    """
    hull = _lower_hull(points)
    edges = [
        (a_s - a * (b_s - a_s) / (b - a), (b_s - a_s) / (b - a))
        for (a, a_s), (b, b_s) in pairwise(hull)
    ]
    through_origin = (0.0, min(time_s / size for size, time_s in points[1:]))
    # An edge with a negative intercept says nothing of small sizes: it has times below 0 s there.
    # The tangent through the origin is below all times up to the last size, and beyond it where it
    # is no steeper than the last edge.
    lines = [line for line in edges if line[0] >= 0.0]
    lines += [through_origin] if through_origin[1] <= edges[-1][1] else []

    def distance(line: tuple[float, float]) -> float:
        return sum(1 - (line[0] + line[1] * size) / t for size, t in points[1:] if t > 0)

    return min(lines, key=distance)


_HALVES = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
"""The two halves of an all-reduce."""


def allgather_s(
    topology: Topology, devices: tuple[int, ...], size_bytes: float, crowd: float = 1.0
) -> float:
    """Time of an all-gather over a group of devices, in s: as measured, else half of `allreduce_s`.
    On a ring it is n - 1 messages of size_bytes / n, half as many as of an all-reduce.

    Args:
        devices: ascending indices; one alone costs nothing.
        size_bytes: what each device has afterwards.
        crowd: as `crowding` gives it.
    """
    return _half_s(topology, devices, CollectiveKind.ALL_GATHER, size_bytes, crowd)


def reducescatter_s(
    topology: Topology, devices: tuple[int, ...], size_bytes: float, crowd: float = 1.0
) -> float:
    """Time of a reduce-scatter over a group of devices, in s: as measured, else half of
    `allreduce_s`, as for an all-gather.

    Args:
        devices: ascending indices; one alone costs nothing.
        size_bytes: what each device has before.
        crowd: as `crowding` gives it.
    """
    return _half_s(topology, devices, CollectiveKind.REDUCE_SCATTER, size_bytes, crowd)


def _half_s(
    topology: Topology, devices: tuple[int, ...], kind: CollectiveKind, size_bytes: float,
    crowd: float = 1.0,
) -> float:  # fmt: skip
    if len(devices) < 2:
        return 0.0
    measured_s = _measured_s(topology, devices, kind, size_bytes)
    if measured_s is not None:
        return measured_s
    rows = host_rows(topology, devices)
    if not rows:
        return allreduce_s(topology, devices, size_bytes, crowd) / 2
    inside_s = max(_half_s(topology, row, kind, size_bytes) for row in rows)
    return inside_s + _parts_over_hosts_s(topology, rows, size_bytes, crowd) / 2


def gradient_sum_s(
    topology: Topology,
    devices: tuple[int, ...],
    size_bytes: int,
    shards: tuple[tuple[int, ...], ...] = (),
    crowd: float = 1.0,
) -> float:
    """Time of a sum of gradients, in s: an all-reduce or, where each device keeps one of n parts,
    a reduce-scatter over devices with different parts, and an all-reduce over those that keep the
    same.

    Args:
        devices: all, ascending.
        size_bytes: of the gradients, on each device.
        shards: the devices of each part.
        crowd: as `crowding` gives it.
    """
    if not shards:
        return allreduce_s(topology, devices, size_bytes, crowd)
    rows = tuple(dict.fromkeys(tuple(sorted(row)) for row in zip(*shards, strict=True)))
    both = crowd * crowding(topology, rows), crowd * crowding(topology, shards)
    scattered_s = max(reducescatter_s(topology, row, size_bytes, both[0]) for row in rows)
    part = size_bytes // len(shards)
    return scattered_s + max(allreduce_s(topology, some, part, both[1]) for some in shards)


def alltoall_s(
    topology: Topology, devices: tuple[int, ...], size_bytes: float, crowd: float = 1.0
) -> float:
    """Time of an all-to-all over a group of devices, in s: each of the n sends a part to every
    other one. As measured, else in n - 1 rounds over the slowest pair:

        (n - 1) (latency + size_bytes / n / bandwidth)

    Args:
        devices: one alone costs nothing.
        size_bytes: the buffer on each device.
        crowd: as `crowding` gives it.
    """
    count = len(devices)
    if count < 2:
        return 0.0
    measured_s = _measured_s(topology, devices, CollectiveKind.ALL_TO_ALL, size_bytes)
    if measured_s is not None:
        return measured_s
    return (count - 1) * transfer_s(topology, devices, devices, crowd * size_bytes / count)


def collective_s(
    topology: Topology, devices: tuple[int, ...], kind: CollectiveKind, size_bytes: float,
    crowd: float = 1.0,
) -> float:  # fmt: skip
    """Time of a collective of any kind over a group of devices, in s.

    Args:
        devices: ascending indices; one alone costs nothing.
        size_bytes: of the largest buffer on each device.
        crowd: as `crowding` gives it.
    """
    times = {
        CollectiveKind.ALL_REDUCE: allreduce_s,
        CollectiveKind.ALL_GATHER: allgather_s,
        CollectiveKind.REDUCE_SCATTER: reducescatter_s,
        CollectiveKind.ALL_TO_ALL: alltoall_s,
    }
    return times[kind](topology, devices, size_bytes, crowd)


def lines(group: Sequence[int], mesh: Sequence[int], axis: int) -> tuple[tuple[int, ...], ...]:
    """The devices of a mesh along each line of an axis, in the order of their coordinates.

    Args:
        group: the devices, row-major.

    >>> lines((4, 5, 6, 7), (2, 2), 0)
    ((4, 6), (5, 7))
    """
    stride = prod(mesh[axis + 1 :])
    return tuple(
        tuple(group[first + k * stride] for k in range(mesh[axis]))
        for first in range(len(group))
        if first // stride % mesh[axis] == 0
    )


def conversion_s(
    topology: Topology, group: tuple[int, ...], mesh: tuple[int, ...], steps: Iterable[Step]
) -> float:
    """Time of the steps of a conversion, in s; each as long as on the slowest line of its axis,
    where all lines run it at once. Local steps take none.

    Args:
        group: the devices of the mesh, row-major.
        mesh: size of each axis.
    """
    return sum(_step_s(topology, group, mesh, s.kind, s.axis, s.bytes) for s in steps)


@remembered(kept=65536)
def _step_s(
    topology: Topology,
    group: tuple[int, ...],
    mesh: tuple[int, ...],
    kind: Collective,
    axis: int,
    size_bytes: int,
) -> float:
    if kind in LOCAL:
        return 0.0
    some = tuple(sorted({tuple(sorted(line)) for line in lines(group, mesh, axis)}))
    crowd = crowding(topology, some)
    return max(
        collective_s(topology, line, CollectiveKind(kind.value), size_bytes, crowd) for line in some
    )
