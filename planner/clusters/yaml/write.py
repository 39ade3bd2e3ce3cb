"""`Topology` -> YAML that `clusters.read_topology` reads back as the same topology.

Every quantity is written in the largest unit in which six digits say it exactly, else with all its
digits in the smallest one. Levels, patterns and templates are written as what they make up.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from planner import units
from planner.clusters.yaml.read import TOPOLOGY_FORMAT, device_table
from planner.files import write_atomically
from planner.topology import Device, DeviceType, Host, Link, Sharing, Table, Topology

# What needs no quotes in YAML, within brackets too, and is not read as something else than text.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_NO_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_RATES = {k: v for k, v in units.BYTES_PER_S.items() if k.endswith("B/s") and "i" not in k}


def write_topology(topology: Topology, path: Path, comments: Sequence[str] = ()) -> None:
    """Writes a topology.

    Raises:
        FileError: if it cannot be written.
    """
    write_atomically(path, topology_yaml(topology, comments).encode())


def topology_yaml(topology: Topology, comments: Sequence[str] = ()) -> str:
    """The text of the file.

    Args:
        topology: sound; its levels are not written, only what they make up.
        comments: lines above all else, without the #.
    """
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [f"format: {TOPOLOGY_FORMAT}", f"name: {_text(topology.name)}"]
    lines += _section("notes", map(_text, topology.notes))
    lines += _section("hosts", map(_host, topology.hosts))
    lines += _section("devices", map(_device, topology.devices))
    lines += _section("switches", map(_text, topology.switches))
    lines += _section("links", _links(topology.links))
    lines += _section("tables", map(_table, topology.tables))
    lines += _types(topology.device_types)
    return "\n".join(lines) + "\n"


def _section(name: str, entries: Iterator[str]) -> list[str]:
    found = [f"  - {entry}" for entry in entries]
    return [f"{name}:", *found] if found else []


def _map(entries: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in entries.items()) + "}"


def _list(entries: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, entries))}]"


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT:
        return text
    return json.dumps(text, ensure_ascii=False)


def _host(host: Host) -> str:
    entries = {"name": _text(host.name)}
    if host.cores is not None:
        entries["cores"] = str(host.cores)
    if host.memory_bytes is not None:
        entries["memory"] = _size(host.memory_bytes)
    return _map(entries)


def _device(device: Device) -> str:
    return _map(
        {"name": _text(device.name), "type": _text(device.type), "host": _text(device.host)}
    )


def _links(links: Sequence[Link]) -> Iterator[str]:
    """One line for a link and the next one, where that is the same in the other direction."""
    i = 0
    while i < len(links):
        link = links[i]
        figures = {
            "bandwidth": _exact(link.bandwidth_bytes_per_s, _RATES, units.parse_rate),
            "latency": _time(link.latency_s),
        }
        name = {"name": _text(link.name)} if link.name else {}
        if link.sharing is not Sharing.FAIR:
            figures["sharing"] = link.sharing.value
        back = replace(link, source=link.target, target=link.source)
        if links[i + 1 : i + 2] == (back,):
            yield _map({**name, "between": _list([link.source, link.target]), **figures})
            i += 2
        else:
            ends = {"from": _text(link.source), "to": _text(link.target)}
            yield _map({**name, **ends, **figures})
            i += 1


def _table(table: Table) -> str:
    entries = {"groups": f"[{_list(table.devices)}]", "num_devices": str(table.num_devices)}
    times = dict(table.times)
    start_s = times.pop(0, None)
    if start_s is not None:
        entries["latency"] = _time(start_s)
    entries["times"] = _map({_size(size): _time(time_s) for size, time_s in times.items()})
    return _map(entries)


def _types(types: Sequence[DeviceType]) -> list[str]:
    """The types that do not ship with the planner."""
    lines = []
    for one in types:
        if device_table().get(one.name) == one:
            continue
        flops = {
            _text(dtype): _exact(value, units.FLOPS, units.parse_flops)
            for dtype, value in one.flops.items()
        }
        bandwidth = _exact(one.memory_bandwidth_bytes_per_s, _RATES, units.parse_rate)
        lines += [
            f"  {_text(one.name)}:",
            f"    memory: {_size(one.memory_bytes)}",
            f"    flops: {_map(flops)}",
            f"    memory_bandwidth: {bandwidth}",
            f"    source: {json.dumps(one.source, ensure_ascii=False)}",
        ]
    return ["device_types:", *lines] if lines else []


def _size(size_bytes: int) -> str:
    return _exact(size_bytes, units.BYTES, units.parse_bytes)


def _time(time_s: float) -> str:
    return _exact(time_s, units.SECONDS, units.parse_seconds)


def _exact(value: float, factors: Mapping[str, float], parse: Callable[[str], float]) -> str:
    """A quantity that is read back as the same number.

    >>> _exact(12_500_000.0, _RATES, units.parse_rate), _size(16 * 1024**3), _time(0.0)
    ('12.5 MB/s', '16 GiB', '0 s')
    """
    for unit, factor in sorted(factors.items(), key=lambda unit: -unit[1]):
        short = f"{value / factor:.6g}"
        if value >= factor and "e" not in short and parse(f"{short} {unit}") == value:
            return f"{short} {unit}"
    base = next(unit for unit, factor in factors.items() if factor == 1)
    return f"{value:g} {base}" if value == 0 else f"{value!r} {base}"
