"""The shorthand for regular hierarchies, `levels`, written out as devices, switches and links."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from planner.artefacts.topology import (
    Device,
    DeviceType,
    Host,
    Level,
    Link,
    Topology,
    tables_among,
    too_many,
)
from planner.clusters.yaml.schema import BodySchema, LevelSchema

EITHER = "expected either `levels` with `device`, or `devices` with `links`"
MAX_LEVELS = 64
EMPTY = Topology("", (), (), (), (), ())


@dataclass(frozen=True, slots=True)
class BodyContext:
    """The things that a body may refer to, and the mistakes in it.

    Attributes:
        types: the device types that it may name.
        own_types: names of the types that its file defines; they replace others of the same name.
        other: gives another topology, by the path of the field and the name of a template, a preset
            or a file; None if it is not sound, after its mistakes are noted.
        num_devices: the value of `count: auto` in levels.
        wrong: a line "path of the field: mistake" for each mistake; grows.
    """

    types: Mapping[str, DeviceType]
    own_types: Set[str]
    other: Callable[[str, str], Topology | None]
    num_devices: int | None
    wrong: list[str]


def unknown_type(name: str, known: Iterable[str]) -> str:
    """The message on an unknown device type."""
    return (
        f"unknown device type {name!r}; known: {', '.join(sorted(known))};"
        " define others under `device_types`"
    )


def regular_topology(
    body: BodySchema, base: Topology | None, where: str, context: BodyContext
) -> Topology:
    """A regular hierarchy. Where it extends another one, levels of the same name are changed."""
    levels = list(base.levels) if base else []
    if base is not None and not levels:
        context.wrong.append(f"{where}levels: {EITHER}; the extended topology has devices")
        return EMPTY
    old = {level.name: i for i, level in enumerate(levels)}
    for i, given in enumerate(body.levels):
        before = levels[old[given.name]] if given.name in old else None
        level = changed_level(given, before, context.num_devices)
        if level is None:
            missing = (n for n in ("count", "bandwidth", "latency") if getattr(given, n) is None)
            context.wrong.extend(f"{where}levels[{i}].{name}: missing" for name in missing)
        elif given.name in old:
            levels[old[given.name]] = level
        else:
            levels.append(level)
    device = body.device or (base.devices[0].type if base else None)
    host = body.host
    if host is not None and host.model_fields_set - {"cores", "memory"}:
        field_name = min(host.model_fields_set - {"cores", "memory"})
        context.wrong.append(
            f"{where}host.{field_name}: unknown field; `levels` names its hosts itself"
        )
    if device is None:
        context.wrong.append(f"{where}device: missing; `levels` needs the type of all devices")
        return EMPTY
    types = {**context.types, **({t.name: t for t in base.device_types} if base else {})}
    if device not in types:
        context.wrong.append(f"{where}device: {unknown_type(device, types)}")
        return EMPTY
    kept = host.resolved("") if host else (base.hosts[0] if base else Host(""))
    if not levels:
        return EMPTY
    size = too_many_levels(levels)
    if size is not None:
        context.wrong.append(f"{where}levels: {size}")
        return EMPTY
    made = from_levels(tuple(levels), types[device], kept)
    names = {one.name for one in made.devices}
    return replace(made, tables=tables_among(base.tables, names) if base else ())


def too_many_levels(levels: Sequence[Level]) -> str | None:
    """Why there is no hierarchy of these levels, before it is written out; None if there is one."""
    if len(levels) > MAX_LEVELS:
        return f"expected at most {MAX_LEVELS} levels, got {len(levels)}"
    # Members of each level, the outermost first; each has a link, and all but the devices a switch.
    members = list(accumulate((level.count for level in reversed(levels)), mul))
    return too_many(members[-1], 1 + sum(members[:-1]), 2 * sum(members))


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
