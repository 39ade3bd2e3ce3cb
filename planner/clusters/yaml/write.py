"""`Topology` -> YAML that `clusters/yaml/read.py` reads back as the same topology.

Every quantity is written in the largest unit in which six digits are exact, else with all its
digits in the smallest one. Levels, patterns and templates are written out.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from planner.artefacts.topology import (
    CollectiveKind,
    CollectiveTable,
    Device,
    DeviceType,
    Host,
    HostLink,
    Link,
    ProcessMemory,
    Sharing,
    Topology,
)
from planner.clusters.yaml.read import TOPOLOGY_FORMAT, device_table
from planner.support import units
from planner.support.errors import FileError
from planner.support.outputs import FileKind, head_of
from planner.support.printable import printable, printable_lines
from planner.support.reading import MAX_CLUSTER_BYTES
from planner.support.units import format_bytes
from planner.support.writing import write_atomically

_RATES = {k: v for k, v in units.BYTES_PER_S.items() if k.endswith("B/s") and "i" not in k}
# An entry stays on one line, however long.
_WIDTH = 1_000_000
# The first comment of a file that a command has written: a topology by hand is not overwritten.
_BY_US = re.compile(r"# .* by planner topology (probe|import)\b")
TOPOLOGY_FILE = FileKind("a topology", lambda path: _BY_US.match(head_of(path)) is not None)


def write_topology(topology: Topology, path: Path, comments: Sequence[str] = ()) -> None:
    """Writes a topology.

    Raises:
        FileError: if it cannot be written.
    """
    content = topology_yaml(topology, comments).encode()
    if len(content) > MAX_CLUSTER_BYTES:
        raise FileError(
            f"{path}: cannot be written: expected at most {format_bytes(MAX_CLUSTER_BYTES)}, which"
            f" is the most that is read, got {format_bytes(len(content))}; give shorter names"
        )
    write_atomically(path, content)


def topology_yaml(topology: Topology, comments: Sequence[str] = ()) -> str:
    """The text of the file. Characters that cannot be seen are escaped; with them, for want of a
    finer switch, all that are not ASCII.

    Args:
        topology: sound; its levels are written out as devices and links.
        comments: lines above all else, without the #.
    """
    sections = {
        "notes": list(topology.notes),
        "hosts": list(map(_host, topology.hosts)),
        "devices": list(map(_device, topology.devices)),
        "switches": list(topology.switches),
        "links": list(_links(topology.links)),
        "tables": [_table(list(alike)) for _, alike in groupby(topology.tables, _measured)],
        "device_types": _types(topology.device_types),
    }
    file = CommentedMap(format=TOPOLOGY_FORMAT, name=topology.name)
    file.update((name, section) for name, section in sections.items() if section)
    if comments:
        file.yaml_set_start_comment("\n".join(map(printable, comments)))
    text = _dumped(file, allow_unicode=True)
    if printable_lines(text) == text:
        return text
    return _dumped(file, allow_unicode=False)


def _dumped(file: CommentedMap, *, allow_unicode: bool) -> str:
    yaml = YAML()
    yaml.width, yaml.allow_unicode = _WIDTH, allow_unicode
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(file, text)
    return text.getvalue()


def _line(**entries: Any) -> CommentedMap:
    """A mapping on one line, without the entries that are None."""
    line = CommentedMap((key, value) for key, value in entries.items() if value is not None)
    line.fa.set_flow_style()
    return line


def _list(entries: Iterable[object]) -> CommentedSeq:
    """A list on one line."""
    line = CommentedSeq(entries)
    line.fa.set_flow_style()
    return line


def _host(host: Host) -> CommentedMap:
    memory = None if host.memory_bytes is None else _size(host.memory_bytes)
    link = None if host.host_link is None else _host_link(host.host_link)
    return _line(name=host.name, cores=host.cores, memory=memory, host_link=link)


def _host_link(link: HostLink) -> CommentedMap:
    return _line(
        bandwidth=_exact(link.bandwidth_bytes_per_s, _RATES, units.parse_rate),
        devices=None if link.num_devices == 1 else link.num_devices,
        memory=None if link.memory_bytes is None else _size(link.memory_bytes),
    )


def _device(device: Device) -> CommentedMap:
    return _line(name=device.name, type=device.type, host=device.host)


def _links(links: Sequence[Link]) -> Iterator[CommentedMap]:
    """One line for a link and the next one, where that is the same in the other direction."""
    i = 0
    while i < len(links):
        link = links[i]
        back = replace(link, source=link.target, target=link.source)
        both = links[i + 1 : i + 2] == (back,)
        ends = {"from": link.source, "to": link.target}
        yield _line(
            name=link.name or None,
            **({"between": _list([link.source, link.target])} if both else ends),
            bandwidth=_exact(link.bandwidth_bytes_per_s, _RATES, units.parse_rate),
            latency=_time(link.latency_s),
            sharing=None if link.sharing is Sharing.FAIR else link.sharing.value,
        )
        i += 2 if both else 1


def _measured(table: CollectiveTable) -> tuple[object, ...]:
    """What tables of several groups on one line have in common."""
    return table.kind, table.num_devices, table.times


def _table(alike: Sequence[CollectiveTable]) -> CommentedMap:
    table = alike[0]
    times = dict(table.times)
    start_s = times.pop(0, None)
    named = table.kind is not CollectiveKind.ALL_REDUCE
    return _line(
        collective=table.kind.value if named else None,
        groups=_list([_list(one.devices) for one in alike]),
        num_devices=table.num_devices,
        latency=None if start_s is None else _time(start_s),
        times=_line(**{_size(size): _time(time_s) for size, time_s in times.items()}),
    )


def _types(types: Sequence[DeviceType]) -> dict[str, dict[str, object]]:
    """The types that do not ship with the planner, by name."""
    return {
        one.name: {
            "memory": _size(one.memory_bytes),
            "flops": _line(
                **{
                    dtype: _exact(value, units.FLOPS, units.parse_flops)
                    for dtype, value in one.flops.items()
                }
            ),
            "memory_bandwidth": _exact(one.memory_bandwidth_bytes_per_s, _RATES, units.parse_rate),
            "source": one.source,
            **({} if one.process == ProcessMemory() else {"process": _process(one.process)}),
        }
        for one in types
        if device_table().get(one.name) != one
    }


def _process(process: ProcessMemory) -> CommentedMap:
    return _line(
        context=_size(process.context_bytes),
        first_group=_size(process.first_group_bytes),
        group=_size(process.group_bytes),
        workspace=_size(process.workspace_bytes),
    )


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
