"""Clusters as rows of plain text: the presets; the devices of one, the width of its links, and the
links that bound its collectives.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.artefacts.files import shipped
from planner.artefacts.topology import Topology, device_type, table_of
from planner.clusters.routes import bandwidth_bytes_per_s, chain, pair_widths, routes
from planner.clusters.yaml.read import read_topology
from planner.costs.collectives import allreduce_s
from planner.reports.tables import Table
from planner.support.arrays import Floats
from planner.support.units import format_bytes, format_rate, format_seconds

# Size of the all-reduces that are shown.
SHOWN_BYTES = 100_000_000
# Rows of a matrix: devices, or hosts where there are more devices.
MAX_DEVICES, MAX_HOSTS = 16, 8


@dataclass(frozen=True, slots=True)
class Preset:
    """A topology that ships.

    Attributes:
        name: as `--topology` takes it.
        num_devices: all; where the file says `count: auto`, one per core of this machine.
        num_hosts: the machines.
        device_types: number of devices by the name of their type.
        description: the first sentence of the file.
    """

    name: str
    num_devices: int
    num_hosts: int
    device_types: dict[str, int]
    description: str


def presets() -> tuple[Preset, ...]:
    """The topologies that ship with the planner, by name.

    Raises:
        FileError: if one is malformed.
    """
    shipping = []
    for path in sorted(shipped("topologies").glob("*.yaml")):
        if path.stem == "devices":
            continue
        topology = read_topology(path)
        kinds = Counter(device.type for device in topology.devices)
        shipping.append(
            Preset(
                path.stem,
                len(topology.devices),
                len(topology.hosts),
                dict(sorted(kinds.items())),
                first_sentence(path.read_text()),
            )
        )
    return tuple(shipping)


def first_sentence(text: str) -> str:
    r"""The first sentence of a file's leading comment; empty without a comment.

    >>> first_sentence("# Two cards of\n# unequal size. Made up.\nformat: x")
    'Two cards of unequal size.'
    """
    lines: list[str] = []
    for line in text.splitlines():
        words = line.removeprefix("#").strip()
        if not line.startswith("#") or not words:
            break
        lines.append(words)
    return re.split(r"(?<=\.)\s", " ".join(lines), maxsplit=1)[0]


def presets_table(shipping: tuple[Preset, ...]) -> Table:
    """The presets for people."""
    return Table(
        "Topologies that ship with the planner",
        ("name", ">devices", ">hosts", "types", "description"),
        tuple(
            (
                one.name,
                str(one.num_devices),
                str(one.num_hosts),
                ", ".join(f"{n} x {kind}" for kind, n in one.device_types.items()),
                one.description,
            )
            for one in shipping
        ),
        optional=("types",),
    )


# -------------------------------------------------------------------------------- one cluster


def devices_table(topology: Topology) -> Table:
    """The devices of each type on each host; equal hosts together."""
    there: dict[str, Counter[str]] = {host.name: Counter() for host in topology.hosts}
    for device in topology.devices:
        there[device.host][device.type] += 1
    runs: list[list[str]] = []
    for name, kinds in there.items():
        if runs and there[runs[-1][0]] == kinds:
            runs[-1].append(name)
        else:
            runs.append([name])
    index = {device.type: d for d, device in enumerate(topology.devices)}
    rows = []
    for run in runs:
        for kind, count in sorted(there[run[0]].items()):
            speed = device_type(topology, index[kind])
            flops = ", ".join(f"{dtype} {v / 1e12:.4g}" for dtype, v in speed.flops.items())
            rows.append(
                (
                    _run(run),
                    str(count),
                    kind,
                    format_bytes(speed.memory_bytes),
                    flops,
                    format_rate(speed.memory_bandwidth_bytes_per_s),
                )
            )
    columns = ("host", ">devices", "type", ">memory", "TFLOP/s", ">memory bandwidth")
    optional = (">memory bandwidth", "TFLOP/s")
    return Table(f"{topology.name}: devices", columns, tuple(rows), optional=optional)


def _run(names: Sequence[str]) -> str:
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
    count = len(topology.devices)
    if count <= MAX_DEVICES or len(topology.hosts) == 1:
        names = [device.name for device in topology.devices]
        groups, most, what = [[d] for d in range(count)], MAX_DEVICES, "devices"
    else:
        names, most, what = [host.name for host in topology.hosts], MAX_HOSTS, "hosts"
        groups = [
            [d for d, device in enumerate(topology.devices) if device.host == name]
            for name in names
        ]
    if len(names) > most:
        title += f" (the first {most} of {len(names)} {what})"
    rows = []
    for name, group in list(zip(names, groups, strict=True))[:most]:
        cells = (_cell(figures, group, other) for other in groups[:most])
        rows.append((name, *cells))
    return Table(title, ("", *(f">{name}" for name in names[:most])), tuple(rows))


def _cell(figures: Floats, rows: list[int], columns: list[int]) -> str:
    there = figures[np.ix_(rows, columns)][np.not_equal.outer(rows, columns)]
    if not there.size:
        return "-"
    return " - ".join(dict.fromkeys(f"{value:.4g}" for value in (there.min(), there.max())))


def classes_table(topology: Topology) -> Table:
    """The number of ordered pairs of devices for each bandwidth and latency, the widest first."""
    latency, width = pair_widths(topology)
    apart = ~np.eye(len(latency), dtype=bool)
    widths, of_width = np.unique(width[apart], return_inverse=True)
    latencies, of_latency = np.unique(latency[apart], return_inverse=True)
    both, counts = np.unique(of_width * len(latencies) + of_latency, return_counts=True)
    pairs: dict[tuple[str, str], tuple[float, int]] = {}
    # Differences of rounding are none.
    for code, n in zip(both.tolist(), counts.tolist(), strict=True):
        w, s = widths[code // len(latencies)], latencies[code % len(latencies)]
        shown = format_rate(w), format_seconds(s)
        pairs[shown] = w, pairs.get(shown, (w, 0))[1] + n
    widest_first = sorted(pairs.items(), key=lambda one: -one[1][0])
    rows = [(*shown, str(n)) for shown, (_, n) in widest_first]
    return Table("Pairs of devices", (">bandwidth", ">latency", ">pairs"), tuple(rows))


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
    """

    group: str
    devices: tuple[str, ...]
    slowest_link: str
    bandwidth_bytes_per_s: float
    time_s: float
    measured: bool


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
    )


def collectives_table(shown: Sequence[Collective]) -> Table:
    """The all-reduces; of neighbours that are alike, one."""
    runs: list[list[Collective]] = []
    for one in shown:
        alike = runs and _figures(runs[-1][0]) == _figures(one)
        if alike:
            runs[-1].append(one)
        else:
            runs.append([one])
    rows = []
    for run in runs:
        one = run[0]
        ring = " ".join(one.devices[:8]) + (" .." if len(one.devices) > 8 else "")
        rows.append(
            (
                _run([each.group for each in run]),
                str(len(one.devices)),
                format_seconds(one.time_s),
                "measured" if one.measured else "ring",
                format_rate(one.bandwidth_bytes_per_s),
                one.slowest_link,
                ring,
            )
        )
    columns = ("all-reduce over", ">devices", ">100 MB take", "by", ">slowest link", "which",
               "ring")  # fmt: skip
    return Table("Collectives", columns, tuple(rows), optional=("ring", "which"))


def _figures(one: Collective) -> tuple[object, ...]:
    times = format_seconds(one.time_s), format_rate(one.bandwidth_bytes_per_s)
    return one.group.startswith("all"), len(one.devices), times, one.measured


def topology_json(topology: Topology) -> dict[str, object]:
    """The object that `topology show --json` prints: bytes, bytes/s and seconds."""
    latency, width = pair_widths(topology)
    off = np.where(np.isfinite(width), width, 0.0)
    return {
        "name": topology.name,
        "notes": list(topology.notes),
        "hosts": [
            {"name": host.name, "cores": host.cores, "memory_bytes": host.memory_bytes}
            for host in topology.hosts
        ],
        "devices": [
            {"name": device.name, "type": device.type, "host": device.host}
            for device in topology.devices
        ],
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
        "allreduces": [
            {
                "group": one.group,
                "ring": list(one.devices),
                "slowest_link": one.slowest_link,
                "bandwidth_bytes_per_s": one.bandwidth_bytes_per_s,
                "bytes": SHOWN_BYTES,
                "time_s": one.time_s,
                "measured": one.measured,
            }
            for one in collectives(topology)
        ],
    }
