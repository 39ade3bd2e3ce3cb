"""Clusters as tables, lines of text and JSON: the presets; a cluster with the bandwidth between its
devices and the links that bound its collectives; the result of a probe.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from planner.artefacts.topology import CollectiveKind, DeviceType, Topology, device_type, table_of
from planner.clusters.presets import Preset, presets
from planner.clusters.routes import bandwidth_bytes_per_s, chain, pair_widths, routes
from planner.costs.transfers import allreduce_s, collective_s, crowding, host_rows
from planner.reports.tables import (
    Column,
    Table,
    chosen,
    count,
    first_rows,
    json_rows,
    listed,
    percent,
    table,
)
from planner.support.arrays import Floats
from planner.support.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from planner.clusters.probing.collectives import CollectiveTimes
    from planner.clusters.probing.link_fit import LinkClass, Pair
    from planner.launcher.probe import Probed

# Size of the all-reduces that are shown.
SHOWN_BYTES = 100_000_000
# Rows of a matrix: devices, or hosts where there are more devices.
MAX_DEVICES, MAX_HOSTS = 16, 8

PRESET_COLUMNS: tuple[Column[Preset], ...] = (
    Column("name", lambda preset: preset.name, "name", left=True),
    Column("num_devices", lambda preset: preset.num_devices, "devices"),
    Column("num_hosts", lambda preset: preset.num_hosts, "hosts"),
    Column("device_types", lambda preset: preset.device_types, "types",
           lambda types: ", ".join(f"{n} x {kind}" for kind, n in types.items()), left=True,
           gives_way=1),
    Column("description", lambda preset: preset.description, "description", left=True),
)  # fmt: skip


def presets_table() -> Table:
    """The topologies that ship with the planner."""
    return table("Topologies that ship with the planner", presets(), PRESET_COLUMNS)


def presets_json() -> dict[str, Any]:
    """The object that `topology list --json` prints."""
    return {"presets": json_rows(presets(), PRESET_COLUMNS)}


# -------------------------------------------------------------------------------- one cluster


class _Devices(NamedTuple):
    """The devices of one type on a host, or on each of several equal hosts."""

    hosts: Sequence[str]
    num_devices: int
    type: DeviceType


_DEVICE_COLUMNS: tuple[Column[_Devices], ...] = (
    Column("", lambda row: _run_text(row.hosts), "host", left=True),
    Column("", lambda row: row.num_devices, "devices"),
    Column("", lambda row: row.type.name, "type", left=True),
    Column("", lambda row: row.type.memory_bytes, "memory", format_bytes),
    Column("", lambda row: row.type.flops, "TFLOP/s",
           lambda flops: ", ".join(f"{dtype} {v / 1e12:.4g}" for dtype, v in flops.items()),
           left=True, gives_way=2),
    Column("", lambda row: row.type.memory_bandwidth_bytes_per_s, "memory bandwidth", format_rate,
           gives_way=1),
)  # fmt: skip


def devices_table(topology: Topology) -> Table:
    """The devices of each type on each host; equal hosts together."""
    kinds: dict[str, Counter[str]] = {host.name: Counter() for host in topology.hosts}
    for device in topology.devices:
        kinds[device.host][device.type] += 1
    index = {device.type: d for d, device in enumerate(topology.devices)}
    rows = [
        _Devices(hosts, number, device_type(topology, index[kind]))
        for _, run in groupby(kinds, kinds.__getitem__)
        for hosts in [tuple(run)]
        for kind, number in sorted(kinds[hosts[0]].items())
    ]
    return table(f"{topology.name}: devices", rows, _DEVICE_COLUMNS)


def _run_text(names: Sequence[str]) -> str:
    """Neighbours that are alike, such as "host0 .. host3 (4)"."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def bandwidth_table(topology: Topology) -> Table:
    """Bandwidth from every device (rows) to every other one (columns) in GB/s; between hosts where
    there are many devices.
    """
    _, width = pair_widths(topology)
    return _matrix(topology, width / 1e9, "Bandwidth from row to column, GB/s")


def latency_table(topology: Topology) -> Table:
    """The same for latencies, in us."""
    latency, _ = pair_widths(topology)
    return _matrix(topology, latency * 1e6, "Latency from row to column, us")


def _matrix(topology: Topology, figures: Floats, title: str) -> Table:
    """Figures between devices; between hosts, from the least to the most, where there are many
    devices; between the first hosts where there are many hosts.
    """
    groups = {device.name: [d] for d, device in enumerate(topology.devices)}
    noun, most = "devices", MAX_DEVICES
    if len(groups) > most and len(topology.hosts) > 1:
        groups, noun, most = {host.name: [] for host in topology.hosts}, "hosts", MAX_HOSTS
        for d, device in enumerate(topology.devices):
            groups[device.host].append(d)
    title, shown = first_rows(title, tuple(groups.items()), noun, most=most)
    columns: list[Column[tuple[str, list[int]]]] = [
        Column("", lambda row: row[0], "", left=True),
        *(Column("", partial(_between, figures, group), name) for name, group in shown),
    ]
    return table(title, shown, columns)


def _between(figures: Floats, columns: list[int], row: tuple[str, list[int]]) -> str:
    """The least and the most of the figures from a row's devices to others."""
    rows = row[1]
    there = figures[np.ix_(rows, columns)][np.not_equal.outer(rows, columns)]
    if not there.size:
        return "-"
    return " - ".join(dict.fromkeys(f"{value:.4g}" for value in (there.min(), there.max())))


def classes_table(topology: Topology) -> Table:
    """The number of ordered pairs of devices for each bandwidth and latency, the widest first."""
    latency, width = pair_widths(topology)
    apart = ~np.eye(len(latency), dtype=bool)
    figures = np.stack((-width[apart], latency[apart]), axis=1)
    # Figures with the same text differ by rounding only.
    pairs: Counter[tuple[str, str]] = Counter()
    for (w, s), number in zip(*np.unique(figures, axis=0, return_counts=True), strict=True):
        pairs[format_rate(-w), format_seconds(s)] += int(number)
    columns: list[Column[tuple[tuple[str, str], int]]] = [
        Column("", lambda row: row[0][0], "bandwidth"),
        Column("", lambda row: row[0][1], "latency"),
        Column("", lambda row: row[1], "pairs"),
    ]
    return table("Pairs of devices", tuple(pairs.items()), columns)


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce of `SHOWN_BYTES` and the link that bounds it.

    Attributes:
        group: its devices in words: all, or those of a host or a type.
        devices: in the order of the ring.
        slowest_link: the narrowest link on the way between neighbours, of several the farthest.
        bandwidth_bytes_per_s: of that link.
        time_s: of the whole.
        measured: whether a table of the topology says it, and not the ring.
        over_hosts: whether it runs inside hosts and over them, and not on the ring.
    """

    group: str
    devices: tuple[str, ...]
    slowest_link: str
    bandwidth_bytes_per_s: float
    time_s: float
    measured: bool
    over_hosts: bool

    @property
    def source(self) -> str:
        """Where the time is from."""
        if self.measured:
            return "measured"
        return "inside and over hosts" if self.over_hosts else "ring"


def collectives(topology: Topology) -> tuple[Collective, ...]:
    """All-reduces over all devices, over those of each host, and over those of each type."""
    groups = {"all": tuple(range(len(topology.devices)))}
    for name, of in (("", "host"), ("all ", "type")):
        members: dict[str, list[int]] = {}
        for d, device in enumerate(topology.devices):
            members.setdefault(getattr(device, of), []).append(d)
        groups |= {f"{name}{key}": tuple(group) for key, group in members.items()}
    known: set[tuple[int, ...]] = set()
    rows = []
    for group, devices in groups.items():
        if len(devices) > 1 and devices not in known:
            known.add(devices)
            rows.append(_collective(topology, group, devices))
    return tuple(rows)


def _collective(topology: Topology, group: str, devices: tuple[int, ...]) -> Collective:
    ring = chain(topology, devices, closed=True)
    hops = [*pairwise(ring), (ring[-1], ring[0])]
    latency, _ = pair_widths(topology)
    p, q = min(hops, key=lambda hop: (bandwidth_bytes_per_s(topology, *hop), -latency[hop]))
    links = [topology.links[i] for i in routes(topology)[p, q]]
    slow = min(links, key=lambda link: link.bandwidth_bytes_per_s)
    return Collective(
        group,
        tuple(topology.devices[d].name for d in ring),
        f"{slow.name + ' ' if slow.name else ''}{slow.source} -> {slow.target}",
        slow.bandwidth_bytes_per_s,
        allreduce_s(topology, devices, SHOWN_BYTES),
        table_of(topology, devices) is not None,
        bool(host_rows(topology, devices)),
    )


COLLECTIVE_COLUMNS: tuple[Column[Collective], ...] = (
    Column("group", lambda one: one.group),
    Column("", lambda one: len(one.devices), "devices"),
    Column("time_s", lambda one: one.time_s, "time for 100 MB", format_seconds),
    Column("measured", lambda one: one.measured),
    Column("over_hosts", lambda one: one.over_hosts),
    Column("", lambda one: one.source, "source", left=True),
    Column("bandwidth_bytes_per_s", lambda one: one.bandwidth_bytes_per_s, "slowest link",
           format_rate),
    Column("slowest_link", lambda one: one.slowest_link, "from -> to", left=True, gives_way=2),
    Column("ring", lambda one: list(one.devices), "ring",
           lambda ring: " ".join(ring[:8]) + (" .." if len(ring) > 8 else ""), left=True,
           gives_way=1),
    Column("bytes", lambda one: SHOWN_BYTES),
)  # fmt: skip


def collectives_table(collectives: Sequence[Collective]) -> Table:
    """The all-reduces; of neighbours that are alike, one."""
    runs = [tuple(run) for _, run in groupby(collectives, _alike)]
    groups: Column[tuple[Collective, ...]] = Column(
        "", lambda run: _run_text([one.group for one in run]), "all-reduce over", left=True
    )
    columns = [groups, *(column.of(lambda run: run[0]) for column in COLLECTIVE_COLUMNS)]
    return table("Collectives", runs, columns)


def _alike(one: Collective) -> tuple[object, ...]:
    """Equal for all-reduces that are shown as one."""
    times = format_seconds(one.time_s), format_rate(one.bandwidth_bytes_per_s)
    return one.group.startswith("all"), len(one.devices), times, one.source


def topology_json(topology: Topology) -> dict[str, object]:
    """The object that `topology show --json` prints: bytes, bytes/s and seconds."""
    latency, width = pair_widths(topology)
    keys = "group ring slowest_link bandwidth_bytes_per_s bytes time_s measured over_hosts"
    off = np.where(np.isfinite(width), width, 0.0)
    return {
        "name": topology.name,
        "notes": list(topology.notes),
        "hosts": [asdict(host) for host in topology.hosts],
        "devices": [asdict(device) for device in topology.devices],
        "switches": list(topology.switches),
        "links": [
            {
                "from": link.source,
                "to": link.target,
                "name": link.name,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
            }
            for link in topology.links
        ],
        "bandwidth_bytes_per_s": off.tolist(),
        "latency_s": latency.tolist(),
        "allreduces": json_rows(collectives(topology), chosen(COLLECTIVE_COLUMNS, keys)),
    }


# -------------------------------------------------------------------------------- a probe

CLASS_COLUMNS: "tuple[Column[LinkClass], ...]" = (
    Column("kind", lambda one: one.kind, "connection", left=True),
    Column("bandwidth_bytes_per_s", lambda one: one.bandwidth_bytes_per_s, "bandwidth",
           format_rate),
    Column("latency_s", lambda one: one.latency_s, "latency", format_seconds),
    Column("error", lambda one: one.error, "fit error", percent),
    Column("spread", lambda one: one.spread, "spread", percent),
    Column("", lambda one: len(one.pairs), "pairs", gives_way=1),
)  # fmt: skip


def class_table(probed: "Probed") -> Table:
    """The classes of pairs."""
    names = [device.name for device in probed.inferred.topology.devices]
    which: Column[LinkClass] = Column(
        "", lambda one: _pairs_text(one.pairs, names), "examples", left=True
    )
    return table(
        "Pairs of devices by bandwidth and latency",
        probed.inferred.classes,
        [*CLASS_COLUMNS, which],
    )


def _pairs_text(pairs: "Sequence[Pair]", names: Sequence[str], most: int = 4) -> str:
    """The first pairs, in words; two directions of one pair are one.

    >>> _pairs_text([(0, 1), (1, 0), (1, 2)], ["a", "b", "c"])
    'a - b, b -> c'
    """
    known, shown = set(pairs), []
    for p, q in pairs:
        if (q, p) not in known:
            shown.append(f"{names[p]} -> {names[q]}")
        elif p < q:
            shown.append(f"{names[p]} - {names[q]}")
    return listed(shown, most)


def measured_table(probed: "Probed") -> Table:
    """Measured collectives beside those computed from the links alone."""
    links = replace(probed.inferred.topology, tables=())
    rows = [
        (one, size_bytes, time_s)
        for one in probed.collectives
        for size_bytes, time_s in list(zip(one.sizes_bytes, one.times_s, strict=True))[-2:]
    ]

    def over_links_s(row: "tuple[CollectiveTimes, int, float]") -> float:
        one, size_bytes, _ = row
        crowd = crowding(links, one.groups)
        return max(collective_s(links, some, one.kind, size_bytes, crowd) for some in one.groups)

    title, shown = first_rows("Collectives of groups at once, largest sizes", rows, "rows")
    columns: list[Column[tuple[CollectiveTimes, int, float]]] = [
        Column("", lambda row: row[0].kind.value, "collective", left=True),
        Column("", lambda row: row[0].num_ranks, "ranks"),
        Column("", lambda row: len(row[0].groups), "groups"),
        Column("", lambda row: row[1], "size", format_bytes),
        Column("", lambda row: row[2], "measured", format_seconds),
        Column("", over_links_s, "over the links", format_seconds),
    ]
    return table(title, shown, columns)


def probe_lines(probed: "Probed") -> tuple[str, ...]:
    """The parts of the topology, and its distance from the measurements."""
    topology = probed.inferred.topology
    return (
        f"{count(len(topology.devices), 'device')}, {count(len(topology.hosts), 'host')},"
        f" {count(len(topology.switches), 'switch', 'switches')},"
        f" {count(len(topology.links), 'link')}; the bandwidth of each path is within"
        f" {percent(probed.inferred.off)} of the measured one",
        *(f"note: {note}" for note in topology.notes),
    )


def probe_comments(probed: "Probed", when: str) -> tuple[str, ...]:
    """Lines for the head of the file: date, method and result.

    Args:
        probed: the result.
        when: a date.
    """
    names = [device.name for device in probed.inferred.topology.devices]
    lines = [
        f"Measured on {when} by planner topology probe, {probed.backend} of torch {probed.torch}.",
        "One-way times: a message one way and one byte back, less half of a round trip of a byte;",
        "medians; latency and bandwidth by least squares of the relative error. Pairs that agree:",
    ]
    lines += [
        f"  {one.kind}: {format_rate(one.bandwidth_bytes_per_s)}, {format_seconds(one.latency_s)},"
        f" fit within {percent(one.error)}, spread {percent(one.spread)}:"
        f" {_pairs_text(one.pairs, names)}"
        for one in probed.inferred.classes
    ]
    return tuple(lines)


def probe_json(probed: "Probed", written: str) -> dict[str, Any]:
    """The object that `topology probe --json` prints."""
    topology = probed.inferred.topology
    names = [device.name for device in topology.devices]
    pairs: Column[LinkClass] = Column(
        "pairs", lambda one: [[names[p], names[q]] for p, q in one.pairs]
    )
    keys = "kind latency_s bandwidth_bytes_per_s error spread"
    class_columns = (*chosen(CLASS_COLUMNS, keys), pairs)
    width = routes(topology).bandwidth_bytes_per_s
    return {
        "written": written,
        "backend": probed.backend,
        "devices": [asdict(device) for device in topology.devices],
        "pairs": [
            {
                "source": names[one.source],
                "target": names[one.target],
                "latency_s": one.latency_s,
                "bandwidth_bytes_per_s": one.bandwidth_bytes_per_s,
                "routed_bytes_per_s": float(width[one.source, one.target]),
                "error": one.error,
                "spread": one.spread,
                "sizes_bytes": list(times.sizes_bytes),
                "times_s": list(times.times_s),
            }
            for times, one in zip(probed.times, probed.fits, strict=True)
        ],
        "classes": json_rows(probed.inferred.classes, class_columns),
        "allreduces": [
            _times_json(one) for one in probed.collectives if one.kind is CollectiveKind.ALL_REDUCE
        ],
        "collectives": [
            {"kind": one.kind.value, **_times_json(one)}
            for one in probed.collectives
            if one.kind is not CollectiveKind.ALL_REDUCE
        ],
        "off": probed.inferred.off,
        "notes": list(topology.notes),
    }


def _times_json(one: "CollectiveTimes") -> dict[str, Any]:
    return {
        "num_ranks": one.num_ranks,
        "groups": [list(some) for some in one.groups],
        "sizes_bytes": list(one.sizes_bytes),
        "times_s": list(one.times_s),
    }
