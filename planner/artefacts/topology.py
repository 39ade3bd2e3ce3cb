"""`Topology`: devices, hosts and switches, and the directed links between them.

`clusters/routes.py` says which links a transfer takes; times come from `costs/`.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np

from planner.artefacts.graph import LEFT_OUT_AS_DEFAULT
from planner.support.errors import TopologyError
from planner.support.memo import remembered

MAX_DEVICES, MAX_SWITCHES, MAX_LINKS = 4096, 2048, 2**15
"""Of a topology: devices; hosts and switches together; links, each direction counted. Tables of
pairs of devices grow with the square of the devices, and paths with the product of switches and
links: the largest take about 1.2 GiB and half a minute (`tests/clusters/test_sizes.py`)."""


CPU = "cpu"
"""The device type of a process on cores of its host, which it shares with others."""

_PATTERN = frozenset("*?[")

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory that a process takes of its device beside tensors, in bytes; 0 of processes on CPUs.

    Attributes:
        context_bytes: of the driver's context, with the kernels and handles of libraries.
        first_group_bytes: of the communicator of its first group of processes.
        group_bytes: of that of each further one.
        workspace_bytes: buffers in which libraries multiply matrices, of all threads that do. The
            allocator of tensors has them, unlike the others.

    Raises:
        ValueError: if one is negative.
    """

    context_bytes: int = 0
    first_group_bytes: int = 0
    group_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        wrong = [one.name for one in fields(self) if getattr(self, one.name) < 0]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: expected at least 0")

    def with_groups(self, number: int) -> int:
        """What is no tensor's, with the communicators of some groups.

        >>> ProcessMemory(700, 500, 400, 64).with_groups(3)
        2000
        """
        groups = self.first_group_bytes + (number - 1) * self.group_bytes if number else 0
        return self.context_bytes + groups


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Speed and memory of one kind of device.

    Attributes:
        name: as in topologies and profiles.
        memory_bytes: of one device.
        flops: peak FLOP per s by dtype.
        memory_bandwidth_bytes_per_s: of the device's own memory.
        source: where the figures come from.
        process: memory that a process takes of a device beside tensors.

    Raises:
        ValueError: if a figure is not above 0, or float32's speed is missing.
    """

    name: str
    memory_bytes: int
    flops: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    source: str
    process: ProcessMemory = field(default=ProcessMemory(), metadata=LEFT_OUT_AS_DEFAULT)

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


@dataclass(frozen=True, slots=True)
class HostLink:
    """The links between the devices of a host and its memory.

    Attributes:
        bandwidth_bytes_per_s: of one link, in each direction.
        num_devices: how many devices share a link.
        memory_bytes: of the host, for activations that wait there; None where nothing limits them.

    Raises:
        ValueError: if a figure is not above 0.
    """

    bandwidth_bytes_per_s: float
    num_devices: int = 1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        memory_bytes = 1 if self.memory_bytes is None else self.memory_bytes
        if not (self.bandwidth_bytes_per_s > 0 and self.num_devices > 0 and memory_bytes > 0):
            raise ValueError(f"expected figures above 0, got {self}")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with devices.

    Attributes:
        cores: CPU cores that its devices share, where the devices are processes on them; None
            where each device computes on its own.
        memory_bytes: memory that its devices share; None where each device has its own.
        host_link: between its devices and its own memory; None where that is not known, so that
            activations cannot wait there.
    """

    name: str
    cores: int | None = None
    memory_bytes: int | None = None
    host_link: HostLink | None = field(default=None, metadata=LEFT_OUT_AS_DEFAULT)


@dataclass(frozen=True, slots=True)
class Device:
    """One unit that runs stages."""

    name: str
    type: str
    host: str


class Sharing(StrEnum):
    """How transfers use a link at the same time: they share its bandwidth, or one has all of it and
    the others wait.
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


class CollectiveKind(StrEnum):
    """The collectives that can be measured."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True, slots=True)
class CollectiveTable:
    """Measured times of a collective over any `num_devices` of some devices.

    Attributes:
        devices: their names; where they are more than `num_devices`, all pairs of them are alike,
            or they are processes on the cores of one host.
        num_devices: n, the size of a group, at least 2.
        times: (bytes, time in s), ascending by bytes; 0 bytes may be among them. The bytes are
            those of the largest buffer on each device: what it has after an all-gather, before any
            other.
        kind: of the collective.
    """

    devices: tuple[str, ...]
    num_devices: int
    times: tuple[tuple[int, float], ...]
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE


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
        notes: limits of the figures, shown with every plan.
        tables: measured collectives, which take precedence over the links.
    """

    name: str
    device_types: tuple[DeviceType, ...]
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    switches: tuple[str, ...]
    links: tuple[Link, ...]
    levels: tuple[Level, ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[CollectiveTable, ...] = ()


def device_type(topology: Topology, device: int) -> DeviceType:
    """The type of a device."""
    name = topology.devices[device].type
    return next(one for one in topology.device_types if one.name == name)


@remembered
def hosts_by_name(topology: Topology) -> Mapping[str, Host]:
    """The hosts by name."""
    return {host.name: host for host in topology.hosts}


def too_many(num_devices: int, num_switches: int, num_links: int) -> str | None:
    """Why no topology may have so many parts; None if one may.

    Args:
        num_switches: hosts and switches together.
        num_links: each direction counted.
    """
    for what, count, most in (
        ("devices", num_devices, MAX_DEVICES),
        ("hosts and switches", num_switches, MAX_SWITCHES),
        ("links", num_links, MAX_LINKS),
    ):
        if count > most:
            # Python writes out no number of 4,300 digits.
            got = f"{count}" if count < 10**30 else "far more"
            return f"expected at most {most} {what}, got {got}"
    return None


def is_name(name: str) -> bool:
    r"""Whether a device, host or switch may be called so: all of its characters can be seen, and
    none makes a pattern of it where a file names it.

    >>> is_name("gpu 0"), is_name("gpu[0]"), is_name("gpu\x1b0"), is_name("")
    (True, False, False, False)
    """
    return bool(name) and name.isprintable() and _PATTERN.isdisjoint(name)


def wrong_name(name: str) -> str:
    """The message on a name that nothing may have."""
    return f"expected a name of printable characters without any of * ? [, got {name!a:.60}"


def parts_of(topology: Topology) -> tuple[int, int, int]:
    """The numbers of devices, of hosts and switches together, and of links."""
    return (
        len(topology.devices),
        len(topology.hosts) + len(topology.switches),
        len(topology.links),
    )


def _width_of(part: Link | Level) -> Iterator[str]:
    if not part.bandwidth_bytes_per_s > 0:
        yield f"bandwidth: expected more than 0 B/s, got {part.bandwidth_bytes_per_s:g}"
    if not part.latency_s >= 0:
        yield f"latency: expected at least 0 s, got {part.latency_s:g}"


def problems(topology: Topology) -> tuple[str, ...]:
    """Everything that is wrong with a topology; empty if it is sound."""
    size = too_many(*parts_of(topology))
    names = [d.name for d in topology.devices] + list(topology.switches)
    names += [h.name for h in topology.hosts]
    narrow = [
        f"levels[{i}].{wrong}"
        for i, level in enumerate(topology.levels)
        for wrong in _width_of(level)
    ]
    repeated = _twice(level.name for level in topology.levels)
    # A link of `between` is there in both directions: problems of both are reported once.
    of_links = dict.fromkeys(_problems_of_links(topology.links, {*names}, widths=not narrow))
    return (
        *([] if size is None else [size]),
        *_problems_of_names(names),
        *_problems_of_devices(topology),
        *narrow,
        *(f"levels: the name {name!r} is used twice" for name in repeated),
        *of_links,
        *(
            f"links: {source} -> {target} is there twice"
            for source, target in sorted(_twice((one.source, one.target) for one in topology.links))
            if source != target
        ),
        *_problems_of_tables(topology),
        *([] if topology.devices else ["devices: there is none"]),
    )


def _twice(values: Iterable[T]) -> list[T]:
    """Those that are there more than once."""
    return [one for one, times in Counter(values).items() if times > 1]


def _problems_of_names(names: Sequence[str]) -> Iterator[str]:
    unfit = [name for name in names if not is_name(name)]
    if unfit:
        more = f"; {len(unfit) - 1} more are like it" if len(unfit) > 1 else ""
        yield f"{wrong_name(unfit[0])}{more}"
    yield from (f"{name}: the name is used twice" for name in sorted(_twice(names)))


def _problems_of_devices(topology: Topology) -> Iterator[str]:
    types = {one.name for one in topology.device_types}
    hosts = {host.name for host in topology.hosts}
    for i, device in enumerate(topology.devices):
        if device.type not in types:
            known = ", ".join(sorted(types))
            yield f"devices[{i}].type: unknown device type {device.type!r}; known: {known}"
        if device.host not in hosts:
            yield f"devices[{i}].host: unknown host {device.host!r}"


def _problems_of_links(
    links: Iterable[Link], vertices: Collection[str], *, widths: bool
) -> Iterator[str]:
    """
    Args:
        widths: whether bandwidths and latencies are looked at.
    """
    for link in links:
        for vertex in (link.source, link.target):
            if vertex not in vertices:
                yield f"links: unknown device, host or switch {vertex!r}"
        if link.source == link.target:
            yield f"links: {link.source} is linked to itself; leave that link out"
        if widths:
            where = f"links: {link.source} -> {link.target}"
            yield from (f"{where}: {wrong}" for wrong in _width_of(link))


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
        TopologyError: if there are fewer, or none is asked for.
    """
    if num_devices < 1:
        raise TopologyError(f"--gpus: expected a positive number, got {num_devices}")
    if num_devices > len(topology.devices):
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
        # Its own name is among the ends. With two others paths may lead through it; with one at
        # most it is a dead end.
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


def tables_among(tables: Sequence[CollectiveTable], names: Set[str]) -> tuple[CollectiveTable, ...]:
    """The measured times of groups of the devices with these names."""
    kept = [replace(t, devices=tuple(n for n in t.devices if n in names)) for t in tables]
    return tuple(table for table in kept if len(table.devices) >= table.num_devices)


def table_of(
    topology: Topology, devices: Sequence[int], kind: CollectiveKind = CollectiveKind.ALL_REDUCE
) -> CollectiveTable | None:
    """The measured times of a collective that hold for a group of devices: of several tables the
    one of the fewest devices, of those the first.
    """
    group = {topology.devices[d].name for d in devices}
    holding = [t for among, t in _tables(topology).get((kind, len(group)), ()) if group <= among]
    return min(holding, key=lambda table: len(table.devices), default=None)


@remembered
def _tables(
    topology: Topology,
) -> Mapping[tuple[CollectiveKind, int], list[tuple[frozenset[str], CollectiveTable]]]:
    """The tables by collective and size of their groups, each with its devices."""
    known: dict[tuple[CollectiveKind, int], list[tuple[frozenset[str], CollectiveTable]]] = {}
    for table in topology.tables:
        key = table.kind, table.num_devices
        known.setdefault(key, []).append((frozenset(table.devices), table))
    return known


def _levels_of(levels: tuple[Level, ...], num_devices: int) -> tuple[Level, ...]:
    """The hierarchy of the first devices of one; empty where they are none."""
    inner = 1
    for j, level in enumerate(levels):
        count, rest = divmod(num_devices, inner)
        if rest == 0 and count <= level.count:
            return (*levels[:j], replace(level, count=count)) if count > 1 or j == 0 else levels[:j]
        inner *= level.count
    return ()
