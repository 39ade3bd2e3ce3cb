"""`Topology`: devices, hosts and switches, and the directed links between them.

It answers which links a transfer takes and how wide they are; times come from `costs/`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, permutations

import networkx as nx

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


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection between two vertices: devices, hosts or switches."""

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a regular hierarchy: `count` members joined at `bandwidth` per member."""

    name: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float


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
    """

    name: str
    device_types: tuple[DeviceType, ...]
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    levels: tuple[Level, ...] = ()
    notes: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.devices, len(self.links)))


def device_type(topology: Topology, device: int) -> DeviceType:
    """The type of a device."""
    name = topology.devices[device].type
    return next(one for one in topology.device_types if one.name == name)


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
    found += [
        f"{n}: the name is used twice" for n in sorted({n for n in names if names.count(n) > 1})
    ]
    vertices, types = set(names), {t.name for t in topology.device_types}
    for i, device in enumerate(topology.devices):
        if device.type not in types:
            found.append(
                f"devices[{i}].type: unknown device type {device.type!r};"
                f" known: {', '.join(sorted(types))}"
            )
        if device.host not in {h.name for h in topology.hosts}:
            found.append(f"devices[{i}].host: unknown host {device.host!r}")
    narrow = [
        f"levels[{i}].{wrong}"
        for i, level in enumerate(topology.levels)
        for wrong in _width_of(level)
    ]
    found += narrow
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
    if not topology.devices:
        found.append("devices: there is none")
    return tuple(found)


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
    )


def _levels_of(levels: tuple[Level, ...], num_devices: int) -> tuple[Level, ...]:
    """The hierarchy of the first devices of one; empty where they are none."""
    inner = 1
    for j, level in enumerate(levels):
        count, rest = divmod(num_devices, inner)
        if rest == 0 and count <= level.count:
            return (*levels[:j], replace(level, count=count)) if count > 1 or j == 0 else levels[:j]
        inner *= level.count
    return ()


@lru_cache(maxsize=8)
def routes(topology: Topology) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Per ordered pair of devices, the indices of the links that a transfer takes: the fastest
    path for a message of `ROUTED_BYTES` that runs through no other device.

    Raises:
        TopologyError: if two devices are not connected.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(d.name for d in topology.devices)
    for i, link in enumerate(topology.links):
        time_s = link.latency_s + ROUTED_BYTES / link.bandwidth_bytes_per_s
        graph.add_edge(link.source, link.target, index=i, time_s=time_s)
    names = {d.name for d in topology.devices}
    found = {}
    for p, source in enumerate(topology.devices):

        def weight(
            u: str, v: str, edge: Mapping[str, float], start: str = source.name
        ) -> float | None:
            return edge["time_s"] if u == start or u not in names else None

        paths = nx.single_source_dijkstra_path(graph, source.name, weight=weight)
        for q, target in enumerate(topology.devices):
            if q == p:
                continue
            if target.name not in paths:
                raise TopologyError(
                    f"topology {topology.name}: no path leads from {source.name} to {target.name};"
                    " add a link, or a switch that both are linked to"
                )
            path = paths[target.name]
            found[p, q] = tuple(graph.edges[u, v]["index"] for u, v in pairwise(path))
    return found


@lru_cache(maxsize=65536)
def bandwidth_bytes_per_s(topology: Topology, p: int, q: int) -> float:
    """Bandwidth of the narrowest link between two devices, in this direction."""
    return min(topology.links[i].bandwidth_bytes_per_s for i in routes(topology)[p, q])


@lru_cache(maxsize=65536)
def latency_s(topology: Topology, p: int, q: int) -> float:
    """Sum of the latencies of the links between two devices, in this direction, in s."""
    return sum(topology.links[i].latency_s for i in routes(topology)[p, q])


def host_order(topology: Topology, devices: Sequence[int]) -> tuple[int, ...]:
    """Devices sorted by host, then by index: the order of the ranks of a launch."""
    hosts = {host.name: i for i, host in enumerate(topology.hosts)}
    return tuple(sorted(devices, key=lambda d: (hosts[topology.devices[d].host], d)))


def _width(topology: Topology, p: int, q: int) -> float:
    """Bandwidth of a pair in its narrower direction."""
    return min(bandwidth_bytes_per_s(topology, p, q), bandwidth_bytes_per_s(topology, q, p))


# Up to this many devices, all orders are tried, of mirror images one: 8! / 2 = 20160 for a chain,
# 7! / 2 = 2520 for a ring.
_ALL_ORDERS = 8


@lru_cache(maxsize=4096)
def chain(topology: Topology, devices: tuple[int, ...], *, closed: bool = False) -> tuple[int, ...]:
    """Devices in an order in which neighbours are well linked; `closed` makes the last a
    neighbour of the first (a ring).

    The narrowest pair of neighbours is as wide as can be, then their times for one byte add up to
    as little as can be; exact up to 8 devices, else each device is followed by its widest
    neighbour. Ties go to the lowest indices.

    Args:
        devices: indices, any number.
    """
    if len(devices) < 3:
        return devices
    width = {(p, q): _width(topology, p, q) for p in devices for q in devices if p != q}

    def badness(order: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        ends = (*order, order[0]) if closed else order
        pairs = list(pairwise(ends))
        # Rounded, so that the order of summation cannot decide.
        total = float(f"{sum(1 / width[pair] for pair in pairs):.9e}")
        return -min(width[pair] for pair in pairs), total, order

    if len(devices) <= _ALL_ORDERS:
        first = min(devices)
        rest = sorted(set(devices) - {first})
        # A ring may start anywhere, a chain may not. Mirror images are as good as each other:
        # the one of the lower indices is tried.
        orders = (
            ((first, *o) for o in permutations(rest) if o[0] < o[-1])
            if closed
            else (o for o in permutations(sorted(devices)) if o[0] < o[-1])
        )
        return min(orders, key=badness)
    return min((_nearest(width, start, devices) for start in devices), key=badness)


def _nearest(
    width: Mapping[tuple[int, int], float], start: int, devices: Sequence[int]
) -> tuple[int, ...]:
    order, left = [start], set(devices) - {start}
    while left:
        order.append(max(sorted(left), key=lambda q: width[order[-1], q]))
        left.remove(order[-1])
    return tuple(order)
