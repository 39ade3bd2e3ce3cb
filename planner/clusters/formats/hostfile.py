"""DeepSpeed's hostfile -> `Topology`.

    worker-1 slots=4        # four devices
    worker-2 slots=2

It says nothing of devices or links, so both are asked for: the devices of a host are linked to it,
each by a link of one bandwidth, and hosts to one switch, each by a link of another.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.artefacts.topology import (
    Device,
    DeviceType,
    Host,
    Link,
    Topology,
    is_name,
    too_many,
    wrong_name,
)
from planner.clusters.links import both_ways
from planner.support.errors import FileError

FORM = "a DeepSpeed hostfile"
# More slots than a number of nine digits are no number of devices.
_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,9})")
# Half of the latency from device to device, and from host to host, because it takes two links. From
# memory: PCIe and TCP over Ethernet.
INSIDE_LATENCY_S, BETWEEN_LATENCY_S = 10e-6 / 2, 25e-6 / 2


@dataclass(frozen=True, slots=True)
class Slots:
    """A host and its number of devices."""

    host: str
    count: int


def looks_like(text: str) -> bool:
    """Whether a line names slots."""
    return re.search(r"^[ \t]*\S+[ \t]+slots[ \t]*=", text, re.MULTILINE) is not None


def parse(text: str, path: Path) -> tuple[Slots, ...]:
    """The hosts, in order.

    Raises:
        FileError: with the lines that are wrong, all of them.
    """
    slots: dict[str, Slots] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        match = _LINE.fullmatch(words)
        if match is not None and match[1] in slots:
            wrong.append(f"{path}: line {number}: {match[1]} is there twice")
        elif match is not None and not is_name(match[1]):
            wrong.append(f"{path}: line {number}: {wrong_name(match[1])}")
        elif match is not None and int(match[2]) > 0:
            slots[match[1]] = Slots(match[1], int(match[2]))
        elif words:
            wrong.append(f"{path}: line {number}: expected HOST slots=N, got {words!r:.60}")
    if not slots and not wrong:
        wrong.append(f"{path}: expected {FORM}, lines of HOST slots=N, found none")
    size = _too_many(tuple(slots.values()))
    if size is not None:
        wrong.append(f"{path}: slots: {size}")
    if wrong:
        raise FileError("\n".join(wrong))
    return tuple(slots.values())


def _too_many(slots: Sequence[Slots]) -> str | None:
    """Why these are too many devices, hosts or links; None if they are not."""
    devices, hosts = sum(one.count for one in slots), len(slots)
    return too_many(devices, hosts + (hosts > 1), 2 * (devices + hosts))


def to_topology(
    slots: Sequence[Slots],
    name: str,
    types: Mapping[str, DeviceType],
    rates: tuple[float | None, float | None],
    path: Path,
) -> Topology:
    """The cluster. Devices are numbered over all hosts.

    Args:
        types: by host.
        rates: in bytes/s, of the link between a device and its host, and of the link between a host
            and the switch that joins hosts.

    Raises:
        FileError: if a bandwidth is needed and not given.
    """
    _check_rates(slots, *rates, path)
    inside, between = rates
    hosts = [one.host for one in slots for _ in range(one.count)]
    devices = [Device(f"gpu{d}", types[host].name, host) for d, host in enumerate(hosts)]
    links: list[Link] = []
    # A device alone on its host has the host's own way out; a single one needs none at all.
    rate = inside or between
    if rate is not None:
        for device in devices:
            links += both_ways(device.name, device.host, rate, INSIDE_LATENCY_S, "inside")
    joined = len(slots) > 1
    if joined and between is not None:
        for one in slots:
            links += both_ways(one.host, "network", between, BETWEEN_LATENCY_S, "network")
    kinds = {kind.name: kind for kind in types.values()}
    return Topology(
        name=name,
        device_types=tuple(kinds[kind] for kind in sorted({d.type for d in devices})),
        hosts=tuple(Host(one.host) for one in slots),
        devices=tuple(devices),
        switches=("network",) if joined else (),
        links=tuple(links),
        notes=("hosts of a hostfile; latencies of 10 us inside and 25 us between are from memory",),
    )


def _check_rates(
    slots: Sequence[Slots], inside: float | None, between: float | None, path: Path
) -> None:
    needed = (
        (inside, any(one.count > 1 for one in slots), "--inside", "each device's link in its host",
         "12 GB/s"),
        (between, len(slots) > 1, "--between", "each host's link to the others", "25 Gbps"),
    )  # fmt: skip
    wrong = [
        f'{path}: a hostfile says nothing of bandwidth; give that of {what}: {option} "{example}"'
        for rate, is_needed, option, what, example in needed
        if is_needed and rate is None
    ]
    if wrong:
        raise FileError("\n".join(wrong))
