"""Paths between the devices of a topology, how wide and how late they are, and orders of devices
whose neighbours are well linked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import permutations
from math import inf
from typing import Any

import numpy as np

from planner.artefacts.topology import CPU, CollectiveTable, Link, Topology
from planner.support.arrays import Floats, Ints
from planner.support.errors import TopologyError
from planner.support.memo import remembered

# The message by which routes are compared: large enough for bandwidth to count.
ROUTED_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Routes(Mapping[tuple[int, int], tuple[int, ...]]):
    """Per ordered pair of devices, the indices of the links that a transfer takes.

    A path leaves its device, crosses the core (hosts and switches) and enters the other device, or
    is one link from device to device. The core's shortest paths are kept; a pair's path is put
    together when it is asked for, and its latency and bandwidth stand in tables.

    Attributes:
        latency_s: (K, K) sum of the latencies of the links, in s; 0 on the diagonal.
        bandwidth_bytes_per_s: (K, K) bandwidth of the narrowest link; inf on the diagonal.
    """

    latency_s: Floats
    bandwidth_bytes_per_s: Floats
    # (K, K) the link that enters the target, and the one that leaves the source.
    _last: Ints
    _first: Ints
    # Per vertex of the core that a path starts at, (C,) the link before each vertex of the core.
    _before: Mapping[str, Ints]
    # Position in the core by name, and where each link leads from and to.
    _core: Mapping[str, int]
    _links: tuple[Link, ...]

    def __getitem__(self, pair: tuple[int, int]) -> tuple[int, ...]:
        p, q = pair
        if p == q or not (0 <= p < len(self.latency_s) and 0 <= q < len(self.latency_s)):
            raise KeyError(pair)
        first, last = int(self._first[p, q]), int(self._last[p, q])
        if first == last:
            return (first,)
        start, vertex = self._links[first].target, self._links[last].source
        path = [last]
        # From the target back to the vertex where the path enters the core.
        while vertex != start:
            path.append(int(self._before[start][self._core[vertex]]))
            vertex = self._links[path[-1]].source
        return (first, *reversed(path))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return permutations(range(len(self.latency_s)), 2)

    def __len__(self) -> int:
        return len(self.latency_s) * (len(self.latency_s) - 1)


@remembered
def routes(topology: Topology) -> Routes:
    """Per ordered pair of devices, the fastest path for a message of `ROUTED_BYTES` that runs
    through no other device; of equally fast ones, a link from device to device, else that of the
    first links.

    Takes O(C L log C + K^2 P) for C hosts and switches, L links and P links into a device.

    Raises:
        TopologyError: if two devices are not connected.
    """
    names = {device.name: p for p, device in enumerate(topology.devices)}
    core = _core(topology)
    out, into, direct = _links_of_devices(topology, names)
    count = len(names)
    entered = dict.fromkeys(topology.links[i].target for _, i in out)
    trees = {start: _shortest_paths(topology, core, start) for start in entered}
    # A path between devices is a link into the core, a shortest path there, and a link out of it;
    # so offering every link out of a device, then every link into one, tries all of them. Later
    # offers win only if they are faster, so ties go to the first links.
    to_core = _BestPaths.empty((count, len(core)))
    for p, i in out:
        link, tree = topology.links[i], trees[topology.links[i].target]
        to_core.offer(
            p, link.latency_s + tree.latency_s, np.minimum(link.bandwidth_bytes_per_s, tree.width),
            _time_s(link) + tree.time_s, i, i,
        )  # fmt: skip
    best = _BestPaths.empty((count, count))
    # Direct links first: of equally fast paths they are the ones to take.
    for p, q, i in direct:
        link = topology.links[i]
        best.offer((p, q), link.latency_s, link.bandwidth_bytes_per_s, _time_s(link), i, i)
    for q, i in into:
        link, c = topology.links[i], core[topology.links[i].source]
        best.offer(
            (slice(None), q), to_core.latency_s[:, c] + link.latency_s,
            np.minimum(to_core.width[:, c], link.bandwidth_bytes_per_s),
            to_core.time_s[:, c] + _time_s(link), to_core.first[:, c], i,
        )  # fmt: skip
    np.fill_diagonal(best.latency_s, 0.0)
    np.fill_diagonal(best.width, np.inf)
    np.fill_diagonal(best.time_s, 0.0)
    if np.isinf(best.time_s).any():
        p, q = np.argwhere(np.isinf(best.time_s))[0]
        raise TopologyError(
            f"topology {topology.name}: no path leads from {topology.devices[p].name} to"
            f" {topology.devices[q].name}; add a link, or a switch that both are linked to"
        )
    for table in (best.latency_s, best.width):
        table.setflags(write=False)
    return Routes(
        best.latency_s, best.width, best.last, best.first,
        {start: tree.before for start, tree in trees.items()}, core, topology.links,
    )  # fmt: skip


def _time_s(link: Link) -> float:
    return link.latency_s + ROUTED_BYTES / link.bandwidth_bytes_per_s


def _links_of_devices(
    topology: Topology, names: Mapping[str, int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int, int]]]:
    """(device, link) of the links out of devices and into them, (p, q, link) of those between two,
    by the index of the link.
    """
    out, into, direct = [], [], []
    for i, link in enumerate(topology.links):
        if link.source in names and link.target in names:
            direct.append((names[link.source], names[link.target], i))
        elif link.source in names:
            out.append((names[link.source], i))
        elif link.target in names:
            into.append((names[link.target], i))
    return out, into, direct


@dataclass(frozen=True, slots=True)
class _BestPaths:
    """The best path so far for each pair of a source and a target; arrays of one shape.

    Attributes:
        latency_s: of the path; width: its least bandwidth; time_s: by which paths are compared.
        first: index of its first link; last: of the link that enters the target.
    """

    latency_s: Floats
    width: Floats
    time_s: Floats
    first: Ints
    last: Ints

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> "_BestPaths":
        """Without any path."""
        latency_s, width, time_s = (np.full(shape, np.inf) for _ in range(3))
        return cls(latency_s, width, time_s, np.full(shape, -1), np.full(shape, -1))

    def offer(
        self,
        where: Any,
        latency_s: Any,
        width: Any,
        time_s: Any,
        first: Any,
        last: Any,
    ) -> None:
        """Takes other paths for the pairs at `where`, as far as they are faster."""
        faster = np.asarray(time_s) < self.time_s[where]
        for table, value in (
            (self.latency_s, latency_s), (self.width, width), (self.first, first),
            (self.last, last), (self.time_s, time_s),
        ):  # fmt: skip
            table[where] = np.where(faster, value, table[where])


@dataclass(frozen=True, slots=True)
class _CorePaths:
    """The fastest paths from one vertex of the core to the others.

    Attributes:
        latency_s: (C,) of the path; inf where there is none.
        width: (C,) its least bandwidth in bytes/s; inf at the start itself.
        time_s: (C,) by which paths are compared.
        before: (C,) the last link of the path; -1 where there is none, and at the start.
    """

    latency_s: Floats
    width: Floats
    time_s: Floats
    before: Ints


def _shortest_paths(topology: Topology, core: Mapping[str, int], start: str) -> _CorePaths:
    """Dijkstra's algorithm over hosts and switches. On lists, because it takes numbers one by one,
    up to `MAX_SWITCHES` x `MAX_LINKS` times in all.
    """
    links, leaving = topology.links, _core_links(topology)
    latency, width, time = ([inf] * len(core) for _ in range(3))
    before, done = [-1] * len(core), [False] * len(core)
    latency[core[start]] = time[core[start]] = 0.0
    ahead = [(0.0, core[start])]
    while ahead:
        time_s, c = heappop(ahead)
        if done[c]:
            continue
        done[c] = True
        for i, d, link_s in leaving.get(c, ()):
            if time_s + link_s < time[d]:
                time[d] = time_s + link_s
                latency[d] = latency[c] + links[i].latency_s
                width[d] = min(width[c], links[i].bandwidth_bytes_per_s)
                before[d] = i
                heappush(ahead, (time[d], d))
    return _CorePaths(np.array(latency), np.array(width), np.array(time), np.array(before))


@remembered
def _core_links(topology: Topology) -> Mapping[int, list[tuple[int, int, float]]]:
    """The links from each host and switch to others, by positions in the core: the link, where it
    leads, and the time by which paths are compared.
    """
    core = _core(topology)
    leaving: dict[int, list[tuple[int, int, float]]] = {}
    for i, link in enumerate(topology.links):
        if link.source in core and link.target in core:
            entry = i, core[link.target], _time_s(link)
            leaving.setdefault(core[link.source], []).append(entry)
    return leaving


@remembered
def _core(topology: Topology) -> Mapping[str, int]:
    """The position of each host and switch that is linked, by its name."""
    names = {device.name for device in topology.devices}
    vertices = dict.fromkeys(v for link in topology.links for v in (link.source, link.target))
    return {v: c for c, v in enumerate(v for v in vertices if v not in names)}


def pair_widths(topology: Topology) -> tuple[Floats, Floats]:
    """Latency in s and bandwidth in bytes/s of every ordered pair of devices: two (K, K) tables
    that cannot be written to, 0 and inf on the diagonal.
    """
    paths = routes(topology)
    return paths.latency_s, paths.bandwidth_bytes_per_s


def distinct_ways(latency_s: Floats, seconds_per_byte: Floats) -> tuple[Ints, Floats, Floats]:
    """The ways from device to device: few are different, however many devices there are.

    Args:
        latency_s: (K, K) in s; seconds_per_byte: (K, K) inverse bandwidth.

    Returns:
        (K, K) the way of each ordered pair; (W,) latency and (W,) inverse bandwidth of each way.
        Devices to themselves have a way, too.
    """
    both, way = np.unique(latency_s + 1j * seconds_per_byte, return_inverse=True)
    return way.reshape(latency_s.shape), both.real, both.imag


def fastest_way_s(latency_s: Floats, seconds_per_byte: Floats, sizes_bytes: Ints) -> Floats:
    """(n,) least time of a transfer of each size between two devices, in s; with fewer than two
    devices, inf.

    Args:
        latency_s, seconds_per_byte: as `distinct_ways`.
        sizes_bytes: (n,).
    """
    way, latency, per_byte = distinct_ways(latency_s, seconds_per_byte)
    apart = np.unique(way[~np.eye(len(way), dtype=bool)])
    times = latency[apart] + sizes_bytes[:, None] * per_byte[apart]
    return np.asarray(times.min(axis=1, initial=np.inf))


def bandwidth_bytes_per_s(topology: Topology, p: int, q: int) -> float:
    """Bandwidth of the narrowest link between two devices, in this direction."""
    return float(routes(topology).bandwidth_bytes_per_s[p, q])


def latency_s(topology: Topology, p: int, q: int) -> float:
    """Sum of the latencies of the links between two devices, in this direction, in s."""
    return float(routes(topology).latency_s[p, q])


def unlike_pairs(topology: Topology, table: CollectiveTable) -> str | None:
    """Why a table cannot hold for every group of its devices, if the topology is connected: two
    pairs of them differ in latency or bandwidth, or two of them in type. None where it can, and
    for processes on the cores of one host: they meet in its memory, and measured links differ by
    what else ran.

    Computes routes only where it must: devices with equal links to the same vertices are alike.
    """
    if table.num_devices == len(table.devices):
        return None
    position, ends = _devices_and_ends(topology)
    among = [position[name] for name in table.devices]
    types = {topology.devices[d].type for d in among}
    if len(types) > 1:
        return "they are of several types"
    of_one_host = len({topology.devices[d].host for d in among}) == 1
    if (types == {CPU} and of_one_host) or len({ends[name] for name in table.devices}) == 1:
        return None
    apart = ~np.eye(len(among), dtype=np.bool_)
    for known, what in zip(pair_widths(topology), ("latency", "bandwidth"), strict=True):
        of_pairs = known[np.ix_(among, among)]
        alike = np.isclose(of_pairs, of_pairs[0, 1], rtol=1e-9, atol=0.0)
        unlike = np.argwhere(apart & ~alike)
        if len(unlike):
            two = ((0, 1), unlike[0])
            a, b = (" -> ".join(topology.devices[among[d]].name for d in pair) for pair in two)
            return f"{a} and {b} differ in {what}"
    return None


@remembered
def _devices_and_ends(
    topology: Topology,
) -> tuple[Mapping[str, int], Mapping[str, frozenset[tuple[str, bool, float, float]]]]:
    """Index of each device by name, and its links: where to or from, whether to, how wide, how
    late.
    """
    position = {device.name: d for d, device in enumerate(topology.devices)}
    ends_of: dict[str, set[tuple[str, bool, float, float]]] = {name: set() for name in position}
    for link in topology.links:
        for own, other, out in (
            (link.source, link.target, True),
            (link.target, link.source, False),
        ):
            if own in ends_of:
                ends_of[own].add((other, out, link.bandwidth_bytes_per_s, link.latency_s))
    return position, {name: frozenset(ends) for name, ends in ends_of.items()}


def host_order(topology: Topology, devices: Sequence[int]) -> tuple[int, ...]:
    """Devices sorted by host, then by index: the order of the ranks of a launch."""
    hosts = {host.name: i for i, host in enumerate(topology.hosts)}
    return tuple(sorted(devices, key=lambda d: (hosts[topology.devices[d].host], d)))


# Up to this many devices, all orders are tried, of mirror images one: 8! / 2 = 20160 for a chain,
# 7! / 2 = 2520 for a ring.
_ALL_ORDERS = 8


# Beyond that, the number of steps from neighbour to neighbour: up to 64 devices from every start,
# more devices from fewer.
_STEPS = 4096


@remembered(kept=4096)
def chain(topology: Topology, devices: tuple[int, ...], *, closed: bool = False) -> tuple[int, ...]:
    """Devices in an order in which neighbours are well linked; `closed` makes the last a
    neighbour of the first (a ring).

    The narrowest pair of neighbours is as wide as possible, then the sum of their times for one
    byte is as small as possible; exact up to 8 devices. For more devices, it is the best of the
    order by hosts and the orders in which each device is followed by its widest neighbour, from up
    to 64 starts that are spread over the devices. Ties go to the lowest indices.

    Args:
        devices: indices, any number.
    """
    if len(devices) < 3:
        return devices
    ascending = np.array(sorted(devices))
    there = routes(topology).bandwidth_bytes_per_s[np.ix_(ascending, ascending)]
    width = np.minimum(there, there.T)
    if len(devices) <= _ALL_ORDERS:
        orders = _all_orders(len(devices), closed)
    else:
        starts = max(1, min(len(devices), _STEPS // len(devices)))
        position = {device: i for i, device in enumerate(ascending.tolist())}
        orders = np.array([
            [position[device] for device in host_order(topology, devices)],
            *(_nearest(width, len(devices) * i // starts) for i in range(starts)),
        ])  # fmt: skip
    # (orders, devices) between each device and the next one; the last column closes the ring.
    widths = width[orders, np.roll(orders, -1, axis=1)]
    widths = widths if closed else widths[:, :-1]
    narrowest = widths.min(axis=1)
    orders, widths = (one[narrowest == narrowest.max()] for one in (orders, widths))
    total = (1 / widths).sum(axis=1)
    # Nine digits, so that the order of summation cannot decide.
    near = np.flatnonzero(total <= total.min() * (1 + 1e-8))
    best = min(near, key=lambda i: (float(f"{total[i]:.9e}"), orders[i].tolist()))
    return tuple(ascending[orders[best]].tolist())


@cache
def _all_orders(count: int, closed: bool) -> Ints:
    """(n, count) the orders of few positions, without equally good ones: a ring starts at position
    0, and of an order and its mirror image there is one.
    """
    if closed:
        rest = permutations(range(1, count))
        return np.array([(0, *order) for order in rest if order[0] < order[-1]])
    return np.array([order for order in permutations(range(count)) if order[0] < order[-1]])


def _nearest(width: Floats, start: int) -> list[int]:
    """Positions from a start on, each followed by the widest neighbour that is left."""
    order, left = [start], np.ones(len(width), dtype=bool)
    left[start] = False
    for _ in range(len(width) - 1):
        order.append(int(np.where(left, width[order[-1]], -1.0).argmax()))
        left[order[-1]] = False
    return order
