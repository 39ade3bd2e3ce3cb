"""The shorthand for regular hierarchies, `levels`, written out as devices, switches and links."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from planner.clusters.yaml.schema import BodySchema, LevelSchema
from planner.topology import Device, DeviceType, Host, Level, Link, Topology, tables_among

EITHER = "expected either `levels` with `device`, or `devices` with `links`"
EMPTY = Topology("", (), (), (), (), ())


@dataclass(frozen=True, slots=True)
class Source:
    """Where a body comes from.

    Attributes:
        types: the device types that it may name.
        own_types: names of those that its file defines, which replace others of the name.
        other: another topology, by the name of a template, a preset or a file; None after it has
            noted what is wrong with it.
        num_devices: what `count: auto` of levels is.
        wrong: lines of the form "path of the field: what is wrong", to be added to.
    """

    types: Mapping[str, DeviceType]
    own_types: Set[str]
    other: Callable[[str, str], Topology | None]
    num_devices: int | None
    wrong: list[str]


def unknown_type(name: str, known: Iterable[str]) -> str:
    """What is said of a device type that is not known."""
    return (
        f"unknown device type {name!r}; known: {', '.join(sorted(known))};"
        " define others under `device_types`"
    )


def regular_topology(
    body: BodySchema, base: Topology | None, where: str, source: Source
) -> Topology:
    """A regular hierarchy; of one that it extends, levels of the same name are changed."""
    found = list(base.levels) if base else []
    if base is not None and not found:
        source.wrong.append(f"{where}levels: {EITHER}; what is extended has devices")
        return EMPTY
    old = {level.name: i for i, level in enumerate(found)}
    for i, given in enumerate(body.levels):
        before = found[old[given.name]] if given.name in old else None
        level = changed_level(given, before, source.num_devices)
        if level is None:
            missing = (n for n in ("count", "bandwidth", "latency") if getattr(given, n) is None)
            source.wrong.extend(f"{where}levels[{i}].{name}: missing" for name in missing)
        elif given.name in old:
            found[old[given.name]] = level
        else:
            found.append(level)
    device = body.device or (base.devices[0].type if base else None)
    host = body.host
    if host is not None and host.model_fields_set - {"cores", "memory"}:
        field_name = min(host.model_fields_set - {"cores", "memory"})
        source.wrong.append(
            f"{where}host.{field_name}: unknown field; `levels` names its hosts itself"
        )
    if device is None:
        source.wrong.append(f"{where}device: missing; `levels` needs the type of all devices")
        return EMPTY
    types = {**source.types, **({t.name: t for t in base.device_types} if base else {})}
    if device not in types:
        source.wrong.append(f"{where}device: {unknown_type(device, types)}")
        return EMPTY
    kept = host.resolved("") if host else (base.hosts[0] if base else Host(""))
    if not found:
        return EMPTY
    made = from_levels(tuple(found), types[device], kept)
    names = {one.name for one in made.devices}
    return replace(made, tables=tables_among(base.tables, names) if base else ())


def changed_level(given: LevelSchema, old: Level | None, num_devices: int | None) -> Level | None:
    """The old level with the fields that are given, or a new level; None where a new one misses a
    field.

    Args:
        num_devices: see `LevelSchema.changes`.
    """
    changes = given.changes(num_devices)
    if old is not None:
        return replace(old, **changes)
    return Level(given.name, **changes) if len(changes) == 3 else None


def from_levels(levels: tuple[Level, ...], kind: DeviceType, host: Host) -> Topology:
    """A regular hierarchy: members of a level hang on a switch of that level, each by a link with
    half of the level's latency, so that two members are one latency apart.

    Args:
        levels: at least one, innermost first; their names are those of their links.
        kind: the type of all devices.
        host: cores and memory of all hosts.
    """
    # Devices are named after the innermost level.
    host_name = "machine" if levels[0].name == "host" else "host"
    hosts: list[Host] = []
    devices: list[Device] = []
    switches: list[str] = []
    links: list[Link] = []

    def grow(depth: int, prefix: str) -> str:
        """The vertex that stands for one member of level `depth`."""
        if depth < 0:
            devices.append(Device(f"{levels[0].name}{len(devices)}", kind.name, hosts[-1].name))
            return devices[-1].name
        if depth == 0:
            hosts.append(replace(host, name=f"{host_name}{len(hosts)}"))
            vertex = hosts[-1].name
        else:
            vertex = f"switch{prefix}"
            switches.append(vertex)
        level = levels[depth]
        for i in range(level.count):
            member = grow(depth - 1, f"{prefix}.{i}")
            for a, b in ((member, vertex), (vertex, member)):
                links.append(
                    Link(a, b, level.bandwidth_bytes_per_s, level.latency_s / 2, level.name)
                )
        return vertex

    grow(len(levels) - 1, "")
    return Topology(
        name="",
        device_types=(kind,),
        hosts=tuple(hosts),
        devices=tuple(devices),
        switches=tuple(switches),
        links=tuple(links),
        levels=levels,
    )
