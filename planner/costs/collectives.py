"""Time of transfers and all-reduces on a topology."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from planner.topology import Topology, bandwidth_bytes_per_s, chain, latency_s, pair_widths


def transfer_s(topology: Topology, source: int, target: int, size_bytes: int) -> float:
    """Time of one message between two devices on an idle network, in s:

        latency + size / bandwidth

    along the topology's path; 0 on the device itself.
    """
    if source == target:
        return 0.0
    rate = bandwidth_bytes_per_s(topology, source, target)
    return latency_s(topology, source, target) + size_bytes / rate


def slowest_link(
    topology: Topology, sources: Sequence[int], targets: Sequence[int]
) -> tuple[float, float]:
    """The largest latency in s and the smallest bandwidth in bytes/s from any of the sources to
    any of the targets; (0, inf) where no two differ.
    """
    latency, width = pair_widths(topology)
    pairs = np.ix_(np.asarray(sources, dtype=np.intp), np.asarray(targets, dtype=np.intp))
    return float(latency[pairs].max(initial=0.0)), float(width[pairs].min(initial=np.inf))


@lru_cache(maxsize=65536)
def ring_links(topology: Topology, devices: tuple[int, ...]) -> tuple[float, float]:
    """The largest latency in s and the smallest bandwidth in bytes/s between neighbours of the
    best ring through the devices (see `topology.chain`).
    """
    ring = chain(topology, devices, closed=True)
    latency, width = pair_widths(topology)
    hops = list(ring), [*ring[1:], ring[0]]
    return float(latency[hops].max()), float(width[hops].min())


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


def allreduce_s(topology: Topology, devices: tuple[int, ...], size_bytes: int) -> float:
    """Time of an all-reduce over a group of devices, in s: a ring over its slowest link.

    Args:
        devices: ascending indices; one alone costs nothing.
        size_bytes: the buffer on each device.
    """
    if len(devices) < 2:
        return 0.0
    return ring_allreduce_s(size_bytes, len(devices), *ring_links(topology, devices))
