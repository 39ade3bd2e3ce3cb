"""`Topology`: devices, hosts and switches, and the directed links between them.

It answers which links a transfer takes and how wide they are; times come from `costs/`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from heapq import heappop, heappush
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import TopologyError

# The message by which routes are compared: large enough for bandwidth to count.
ROUTED_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class DeviceType:
    """What one kind of device can do.

    Attributes:
        name: as in topologies and profiles.
        memory_bytes: of one device.
        flops: peak FLOP per s by dtype.
        memory_bandwidth_bytes_per_s: of the device's own memory.
        source: where the figures come from.

    Raises:
        ValueError: if a figure is not above 0, or float32's speed is missing.
    """

    name: str
    memory_bytes: int
    flops: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    source: str

    def __post_init__(self) -> None:
        speeds = (
            ("memory_bytes", self.memory_bytes),
            *((f"flops.{dtype}", value) for dtype, value in self.flops.items()),
            ("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s),
        )
        wrong = [f"{name}: expected more than 0, got {v}" for name, v in speeds if not v > 0]
        if "float32" not in self.flops:
            known = ", ".join(self.flops) or "none"
            wrong.append(f"flops: expected float32 among the dtypes, got {known}")
        if wrong:
            raise ValueError("\n".join(wrong))

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP per s for a dtype; float32's for one that is not listed."""
        return self.flops.get(dtype, self.flops["float32"])

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with devices.

    Attributes:
        cores: CPU cores that its devices share, where the devices are processes on them; None
            where each device computes on its own.
        memory_bytes: memory that its devices share, None likewise.
    """

    name: str
    cores: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One unit that runs stages."""

    name: str
    type: str
    host: str


class Sharing(StrEnum):
    """What becomes of transfers that want a link at the same time: they share its bandwidth, or
    one has all of it and the others wait.
    """

    FAIR = "fair"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two vertices: devices, hosts or switches.

    Attributes:
        name: of its kind, such as "nic"; links of one kind share it, empty for none.
        sharing: among the transfers that it carries; simulated, and no matter to closed forms.
    """

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float
    name: str = ""
    sharing: Sharing = Sharing.FAIR


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a regular hierarchy: `count` members joined at `bandwidth` per member."""

    name: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Table:
    """Measured times of an all-reduce over any `num_devices` of some devices.

    Attributes:
        devices: their names; where they are more than `num_devices`, all pairs of them are alike.
        num_devices: n, the size of a group, at least 2.
        times: (bytes on each device, time in s), ascending by bytes; 0 bytes may be among them.
    """

    devices: tuple[str, ...]
    num_devices: int
    times: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster.

    Attributes:
        name: for people.
        device_types: those that its devices have.
        hosts: the machines.
        devices: in index order; strategies name them by index.
        switches: vertices of the link graph that are neither device nor host.
        links: directed.
        levels: the regular hierarchy that it was written as, innermost first; empty if it was not.
        notes: what a user should know of the figures, shown with every plan.
        tables: measured all-reduces, which take precedence over what the links say.
    """

    name: str
    device_types: tuple[DeviceType, ...]
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    levels: tuple[Level, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, len(self.devices), len(self.links)))


def device_type(topology: Topology, device: int) -> DeviceType:
    """The type of a device."""
    name = topology.devices[device].type
    return next(one for one in topology.device_types if one.name == name)


@lru_cache(maxsize=8)
def hosts_by_name(topology: Topology) -> Mapping[str, Host]:
    """The hosts by name."""
    return {host.name: host for host in topology.hosts}


def _width_of(part: Link | Level) -> Iterator[str]:
    if not part.bandwidth_bytes_per_s > 0:
        yield f"bandwidth: expected more than 0 B/s, got {part.bandwidth_bytes_per_s:g}"
    if not part.latency_s >= 0:
        yield f"latency: expected at least 0 s, got {part.latency_s:g}"


def problems(topology: Topology) -> tuple[str, ...]:
    """Everything that is wrong with a topology; empty if it is sound."""
    found = []
    names = [d.name for d in topology.devices] + list(topology.switches)
    names += [h.name for h in topology.hosts]
    found += [f"{n}: the name is used twice" for n, k in sorted(Counter(names).items()) if k > 1]
    vertices, types = set(names), {t.name for t in topology.device_types}
    hosts = {host.name for host in topology.hosts}
    for i, device in enumerate(topology.devices):
        if device.type not in types:
            found.append(
                f"devices[{i}].type: unknown device type {device.type!r};"
                f" known: {', '.join(sorted(types))}"
            )
        if device.host not in hosts:
            found.append(f"devices[{i}].host: unknown host {device.host!r}")
    narrow = [
        f"levels[{i}].{wrong}"
        for i, level in enumerate(topology.levels)
        for wrong in _width_of(level)
    ]
    found += narrow
    repeated = Counter(level.name for level in topology.levels)
    found += [f"levels: the name {n!r} is used twice" for n, k in repeated.items() if k > 1]
    # A link of `between` is there in both directions: what holds for both is said once.
    said = []
    for link in topology.links:
        where = f"links: {link.source} -> {link.target}"
        said += [
            f"links: unknown device, host or switch {vertex!r}"
            for vertex in (link.source, link.target)
            if vertex not in vertices
        ]
        if link.source == link.target:
            said.append(f"links: {link.source} is linked to itself; leave that link out")
        if not narrow:
            said += [f"{where}: {wrong}" for wrong in _width_of(link)]
    found += dict.fromkeys(said)
    ends = Counter((link.source, link.target) for link in topology.links)
    found += [
        f"links: {a} -> {b} is there twice"
        for a, b in sorted(e for e, times in ends.items() if times > 1 and e[0] != e[1])
    ]
    found += _problems_of_tables(topology)
    if not topology.devices:
        found.append("devices: there is none")
    return tuple(found)


def _problems_of_tables(topology: Topology) -> Iterator[str]:
    names = {device.name for device in topology.devices}
    for i, table in enumerate(topology.tables):
        where = f"tables[{i}]"
        yield from (
            f"{where}: unknown device {name!r}" for name in table.devices if name not in names
        )
        if not 2 <= table.num_devices <= len(set(table.devices)):
            yield (
                f"{where}: expected a group of 2 to {len(set(table.devices))} devices, got"
                f" {table.num_devices}"
            )
        sizes = [size for size, _ in table.times]
        if sizes != sorted(set(sizes)) or not sizes or sizes[-1] <= 0 or sizes[0] < 0:
            yield f"{where}: expected sizes in ascending order, the last above 0 B"
        if not all(0 <= time_s < np.inf for _, time_s in table.times):
            yield f"{where}: expected times of at least 0 s"


def unlike_pairs(topology: Topology, table: Table) -> str | None:
    """Why a table cannot hold for every group of its devices, if the topology is connected: two
    pairs of them differ in latency or bandwidth, or two of them in type. None where it can.

    Computes routes only where it must: devices with equal links to the same vertices are alike.
    """
    if table.num_devices == len(table.devices):
        return None
    position, ends = _devices_and_ends(topology)
    among = [position[name] for name in table.devices]
    if len({topology.devices[d].type for d in among}) > 1:
        return "they are of several types"
    if len({ends[name] for name in table.devices}) == 1:
        return None
    pairs = np.array(list(permutations(among, 2)))
    for known, what in zip(pair_widths(topology), ("latency", "bandwidth"), strict=True):
        of_pairs = known[tuple(pairs.T)]
        unlike = np.flatnonzero(~np.isclose(of_pairs, of_pairs[0], rtol=1e-9, atol=0.0))
        if len(unlike):
            two = (pairs[0], pairs[unlike[0]])
            a, b = (" -> ".join(topology.devices[d].name for d in pair) for pair in two)
            return f"{a} and {b} differ in {what}"
    return None


@lru_cache(maxsize=8)
def _devices_and_ends(
    topology: Topology,
) -> tuple[Mapping[str, int], Mapping[str, frozenset[tuple[str, bool, float, float]]]]:
    """Index of each device by name, and its links: where to or from, whether to, how wide, how
    late.
    """
    position = {device.name: d for d, device in enumerate(topology.devices)}
    found: dict[str, set[tuple[str, bool, float, float]]] = {name: set() for name in position}
    for link in topology.links:
        for own, other, out in (
            (link.source, link.target, True),
            (link.target, link.source, False),
        ):
            if own in found:
                found[own].add((other, out, link.bandwidth_bytes_per_s, link.latency_s))
    return position, {name: frozenset(ends) for name, ends in found.items()}


def is_connected(topology: Topology) -> bool:
    """Whether every device surely reaches every other one: all of them lie around one host or
    switch. Where it says no, there may be other ways; `routes` knows.

    Takes two searches of the links for each host and switch next to the first device, and
    computes no route.
    """
    devices = {device.name for device in topology.devices}
    onward: dict[str, list[str]] = {}
    back: dict[str, list[str]] = {}
    for link in topology.links:
        onward.setdefault(link.source, []).append(link.target)
        back.setdefault(link.target, []).append(link.source)

    def reaches_all(start: str, ways: Mapping[str, list[str]]) -> bool:
        seen, ahead = {start}, [start]
        while ahead:
            for vertex in ways.get(ahead.pop(), ()):
                if vertex not in seen:
                    seen.add(vertex)
                    if vertex not in devices:  # A path ends where it comes to a device.
                        ahead.append(vertex)
        return devices <= seen

    starts = (v for v in onward.get(topology.devices[0].name, ()) if v not in devices)
    return any(all(reaches_all(start, ways) for ways in (onward, back)) for start in starts)


def take(topology: Topology, num_devices: int) -> Topology:
    """The same cluster with its first devices only, and the hosts that have one of them.

    A host that has none is a switch now where it joins others.

    Raises:
        TopologyError: if there are fewer.
    """
    if not 1 <= num_devices <= len(topology.devices):
        raise TopologyError(
            f"topology {topology.name} has {len(topology.devices)} devices, --gpus asks for"
            f" {num_devices}; ask for fewer or take a larger topology"
        )
    gone = {d.name for d in topology.devices[num_devices:]}
    kept = topology.devices[:num_devices]
    busy = {d.host for d in kept}
    switches = list(topology.switches)
    links = [link for link in topology.links if not {link.source, link.target} & gone]
    for host in topology.hosts:
        if host.name in busy:
            continue
        own = [link for link in links if host.name in (link.source, link.target)]
        if len({end for link in own for end in (link.source, link.target)}) > 2:
            switches.append(host.name)
        else:
            links = [link for link in links if link not in own]
    return replace(
        topology,
        hosts=tuple(h for h in topology.hosts if h.name in busy),
        devices=kept,
        switches=tuple(switches),
        links=tuple(links),
        levels=_levels_of(topology.levels, num_devices),
        tables=tables_among(topology.tables, {device.name for device in kept}),
    )


def tables_among(tables: Sequence[Table], names: Set[str]) -> tuple[Table, ...]:
    """What measured times say of the devices with these names."""
    kept = [replace(t, devices=tuple(n for n in t.devices if n in names)) for t in tables]
    return tuple(table for table in kept if len(table.devices) >= table.num_devices)


def table_of(topology: Topology, devices: Sequence[int]) -> Table | None:
    """The measured times that hold for a group of devices: of several tables the one of the
    fewest devices, of those the first.
    """
    group = {topology.devices[d].name for d in devices}
    holding = [t for among, t in _tables(topology).get(len(group), ()) if group <= among]
    return min(holding, key=lambda table: len(table.devices), default=None)


@lru_cache(maxsize=8)
def _tables(topology: Topology) -> Mapping[int, list[tuple[frozenset[str], Table]]]:
    """The tables by the size of their groups, each with its devices."""
    found: dict[int, list[tuple[frozenset[str], Table]]] = {}
    for table in topology.tables:
        found.setdefault(table.num_devices, []).append((frozenset(table.devices), table))
    return found


def _levels_of(levels: tuple[Level, ...], num_devices: int) -> tuple[Level, ...]:
    """The hierarchy of the first devices of one; empty where they are none."""
    inner = 1
    for j, level in enumerate(levels):
        count, rest = divmod(num_devices, inner)
        if rest == 0 and count <= level.count:
            return (*levels[:j], replace(level, count=count)) if count > 1 or j == 0 else levels[:j]
        inner *= level.count
    return ()


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

    latency_s: npt.NDArray[np.float64]
    bandwidth_bytes_per_s: npt.NDArray[np.float64]
    # (K, K) the link that enters the target, and the one that leaves the source.
    _last: npt.NDArray[np.int64]
    _first: npt.NDArray[np.int64]
    # Per vertex of the core that a path starts at, the link before each vertex of the core.
    _before: tuple[Mapping[str, int], ...]
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
        while vertex != start:
            path.append(self._before[self._core[start]][vertex])
            vertex = self._links[path[-1]].source
        return (first, *reversed(path))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return permutations(range(len(self.latency_s)), 2)

    def __len__(self) -> int:
        return len(self.latency_s) * (len(self.latency_s) - 1)


@lru_cache(maxsize=8)
def routes(topology: Topology) -> Routes:
    """Per ordered pair of devices, the fastest path for a message of `ROUTED_BYTES` that runs
    through no other device; of equally fast ones, a link from device to device, else that of the
    first links.

    Takes O(C L log C + K^2 P) for C hosts and switches, L links and P links into a device.

    Raises:
        TopologyError: if two devices are not connected.
    """
    names = {device.name: p for p, device in enumerate(topology.devices)}
    vertices = dict.fromkeys(v for link in topology.links for v in (link.source, link.target))
    core = {v: c for c, v in enumerate(v for v in vertices if v not in names)}
    out, into, direct = _links_of_devices(topology, names)
    trees = [_shortest_paths(topology, core, start) for start in core]
    count = len(names)
    # From each device to each vertex of the core, and on from there to each device.
    to_core = _Table.empty((count, len(core)))
    for p, i in out:
        link, tree = topology.links[i], trees[core[topology.links[i].target]]
        to_core.offer(
            p, link.latency_s + tree.latency_s, np.minimum(link.bandwidth_bytes_per_s, tree.width),
            _time_s(link) + tree.time_s, i, i,
        )  # fmt: skip
    found = _Table.empty((count, count))
    for p, q, i in direct:
        link = topology.links[i]
        found.offer((p, q), link.latency_s, link.bandwidth_bytes_per_s, _time_s(link), i, i)
    for q, i in into:
        link, c = topology.links[i], core[topology.links[i].source]
        found.offer(
            (slice(None), q), to_core.latency_s[:, c] + link.latency_s,
            np.minimum(to_core.width[:, c], link.bandwidth_bytes_per_s),
            to_core.time_s[:, c] + _time_s(link), to_core.first[:, c], i,
        )  # fmt: skip
    np.fill_diagonal(found.latency_s, 0.0)
    np.fill_diagonal(found.width, np.inf)
    np.fill_diagonal(found.time_s, 0.0)
    if np.isinf(found.time_s).any():
        p, q = np.argwhere(np.isinf(found.time_s))[0]
        raise TopologyError(
            f"topology {topology.name}: no path leads from {topology.devices[p].name} to"
            f" {topology.devices[q].name}; add a link, or a switch that both are linked to"
        )
    for table in (found.latency_s, found.width):
        table.setflags(write=False)
    return Routes(
        found.latency_s, found.width, found.last, found.first,
        tuple(tree.before for tree in trees), core, topology.links,
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
class _Table:
    """The best path so far for each pair of a source and a target; arrays of one shape.

    Attributes:
        latency_s: of the path; width: its least bandwidth; time_s: by which paths are compared.
        first: index of its first link; last: of the link that enters the target.
    """

    latency_s: npt.NDArray[np.float64]
    width: npt.NDArray[np.float64]
    time_s: npt.NDArray[np.float64]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> "_Table":
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
class _Tree:
    """The fastest paths from one vertex of the core to the others.

    Attributes:
        latency_s: (C,) of the path; inf where there is none.
        width: (C,) its least bandwidth in bytes/s; inf at the start itself.
        time_s: (C,) by which paths are compared.
        before: the last link of the path to each vertex that is reached, by name.
    """

    latency_s: npt.NDArray[np.float64]
    width: npt.NDArray[np.float64]
    time_s: npt.NDArray[np.float64]
    before: Mapping[str, int]


def _shortest_paths(topology: Topology, core: Mapping[str, int], start: str) -> _Tree:
    """Dijkstra's algorithm over hosts and switches."""
    leaving = _core_links(topology)
    latency, width, time = (np.full(len(core), np.inf) for _ in range(3))
    latency[core[start]] = time[core[start]] = 0.0
    before: dict[str, int] = {}
    ahead, done = [(0.0, core[start], start)], set[str]()
    while ahead:
        time_s, c, vertex = heappop(ahead)
        if vertex in done:
            continue
        done.add(vertex)
        for i in leaving.get(vertex, ()):
            link = topology.links[i]
            d = core[link.target]
            if time_s + _time_s(link) < time[d]:
                time[d] = time_s + _time_s(link)
                latency[d] = latency[c] + link.latency_s
                width[d] = min(width[c], link.bandwidth_bytes_per_s)
                before[link.target] = i
                heappush(ahead, (time[d], d, link.target))
    return _Tree(latency, width, time, before)


@lru_cache(maxsize=8)
def _core_links(topology: Topology) -> Mapping[str, list[int]]:
    """The links from each host and switch to others."""
    names = {device.name for device in topology.devices}
    found: dict[str, list[int]] = {}
    for i, link in enumerate(topology.links):
        if link.source not in names and link.target not in names:
            found.setdefault(link.source, []).append(i)
    return found


def pair_widths(topology: Topology) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Latency in s and bandwidth in bytes/s of every ordered pair of devices: two (K, K) tables
    that cannot be written to, 0 and inf on the diagonal.
    """
    found = routes(topology)
    return found.latency_s, found.bandwidth_bytes_per_s


def bandwidth_bytes_per_s(topology: Topology, p: int, q: int) -> float:
    """Bandwidth of the narrowest link between two devices, in this direction."""
    return float(routes(topology).bandwidth_bytes_per_s[p, q])


def latency_s(topology: Topology, p: int, q: int) -> float:
    """Sum of the latencies of the links between two devices, in this direction, in s."""
    return float(routes(topology).latency_s[p, q])


def host_order(topology: Topology, devices: Sequence[int]) -> tuple[int, ...]:
    """Devices sorted by host, then by index: the order of the ranks of a launch."""
    hosts = {host.name: i for i, host in enumerate(topology.hosts)}
    return tuple(sorted(devices, key=lambda d: (hosts[topology.devices[d].host], d)))


# Up to this many devices, all orders are tried, of mirror images one: 8! / 2 = 20160 for a chain,
# 7! / 2 = 2520 for a ring.
_ALL_ORDERS = 8
# Beyond that, so many steps from neighbour to neighbour are taken: up to 64 devices from every
# start, more devices from fewer.
_STEPS = 4096


@lru_cache(maxsize=4096)
def chain(topology: Topology, devices: tuple[int, ...], *, closed: bool = False) -> tuple[int, ...]:
    """Devices in an order in which neighbours are well linked; `closed` makes the last a
    neighbour of the first (a ring).

    The narrowest pair of neighbours is as wide as can be, then their times for one byte add up to
    as little as can be; exact up to 8 devices. Of more, it is the best of the order by hosts and
    of those that follow each device by its widest neighbour, from up to 64 starts that are spread
    over the devices. Ties go to the lowest indices.

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
def _all_orders(count: int, closed: bool) -> npt.NDArray[np.int64]:
    """(n, count) the orders of few positions. A ring may start anywhere, a chain may not; mirror
    images are as good as each other, and the one of the lower indices is there.
    """
    if closed:
        rest = permutations(range(1, count))
        return np.array([(0, *order) for order in rest if order[0] < order[-1]])
    return np.array([order for order in permutations(range(count)) if order[0] < order[-1]])


def _nearest(width: npt.NDArray[np.float64], start: int) -> list[int]:
    """Positions from a start on, each followed by the widest neighbour that is left."""
    order, left = [start], np.ones(len(width), dtype=bool)
    left[start] = False
    for _ in range(len(width) - 1):
        order.append(int(np.where(left, width[order[-1]], -1.0).argmax()))
        left[order[-1]] = False
    return order
