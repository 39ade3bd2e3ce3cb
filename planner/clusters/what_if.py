"""A cluster with something else in it: other figures, fewer devices, more hosts. Each function
makes a new topology and names the changes, so that a plan for it can be compared.

A figure is set in the way of a file that extends the topology (`yaml/build.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from typing import Any

from pydantic import TypeAdapter, ValidationError

from planner.artefacts.topology import (
    Device,
    DeviceType,
    Host,
    Level,
    Link,
    Topology,
    problems,
    tables_among,
    take,
)
from planner.clusters.places import homes, joint, neighbours, without_dead_ends
from planner.clusters.routes import routes
from planner.clusters.yaml.build import changed_level, extended, renamed, vertex_names
from planner.clusters.yaml.schema import (
    BodySchema,
    Bytes,
    DeviceSchema,
    Flops,
    HostSchema,
    LevelSchema,
    LinkSchema,
    Rate,
)
from planner.support.errors import OptionError
from planner.support.units import format_bytes, format_rate, format_seconds

# Messages list at most this number of the names that exist.
MAX_NAMES = 12
SECTIONS = ("links", "levels", "devices", "device_types", "hosts")
# The end of the name of a device type whose speed was set: a profile that was measured on the true
# type is rescaled to it.
CHANGED = " (what if)"


@dataclass(frozen=True, slots=True)
class ChangedTopology:
    """A topology after changes.

    Attributes:
        topology: with the changes, which stand in its notes.
        changes: each change in words.
    """

    topology: Topology
    changes: tuple[str, ...]


def what_if(
    topology: Topology,
    settings: Sequence[str] = (),
    dropped: Sequence[str] = (),
    added: Sequence[tuple[str, Topology | None]] = (),
    types: Mapping[str, DeviceType] | None = None,
) -> ChangedTopology:
    """The topology with hosts added, then figures set, then devices dropped.

    Args:
        settings: see `set_value`.
        dropped: see `drop`.
        added: names and what they stand for; see `add_host`.
        types: device types that devices may become, besides those of the topology.

    Raises:
        OptionError: if a change names what does not exist, or makes no sense.
        TopologyError: if two devices are not connected any more.
    """
    changes: list[str] = []
    for name, other in added:
        step = add_host(topology, name, other)
        topology, changes = step.topology, [*changes, *step.changes]
    for setting in settings:
        step = set_value(topology, setting, types or {})
        topology, changes = step.topology, [*changes, *step.changes]
    for name in dropped:
        step = drop(topology, name)
        topology, changes = step.topology, [*changes, *step.changes]
    if wrong := problems(topology):
        raise OptionError("; ".join(wrong))
    routes(topology)
    notes = (*topology.notes, *(f"what if: {one}" for one in changes))
    return ChangedTopology(replace(topology, notes=notes), tuple(changes))


def _known(names: Iterable[str]) -> str:
    """The known names, for messages; the first ones of many."""
    known = list(dict.fromkeys(names))
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return (", ".join(known[:MAX_NAMES]) or "none") + more


def _unknown(what: str, name: str, names: Iterable[str]) -> OptionError:
    return OptionError(f"unknown {what} {name!r}; known: {_known(names)}")


# -------------------------------------------------------------------------------- set


def set_value(topology: Topology, setting: str, types: Mapping[str, DeviceType]) -> ChangedTopology:
    """The topology with one figure set: PATH=VALUE, where PATH is one of

        links.NAME.bandwidth, .latency      a link's name, or its ends as a-b (both directions)
        levels.NAME.bandwidth, .latency     all links of a level
        devices.NAME.type                   another type
        device_types.NAME.memory, .memory_bandwidth, .flops.DTYPE
        hosts.NAME.cores, .memory           shared by its devices

    Args:
        types: device types that devices may become, besides those of the topology.

    Raises:
        OptionError: if there is no such thing or the value is wrong; with the known names.
    """
    path, equals, value = setting.partition("=")
    section, _, rest = path.strip().partition(".")
    if not equals or not rest:
        raise OptionError(
            f"--set {setting}: expected PATH=VALUE such as links.nic.bandwidth=200Gbps or"
            " devices.gpu3.type=T4"
        )
    try:
        match section:
            case "links":
                return _set_link(topology, rest, value)
            case "levels":
                return _set_level(topology, rest, value)
            case "devices":
                return _set_device(topology, rest, value, types)
            case "device_types":
                return _set_type(topology, rest, value)
            case "hosts":
                return _set_host(topology, rest, value)
        raise _unknown("section", section, SECTIONS)
    except OptionError as error:
        raise OptionError(f"--set {setting}: {error}") from None


def _split(what: str, rest: str, names: Iterable[str], fields: Sequence[str]) -> tuple[str, str]:
    """The name and the field of NAME.FIELD; names may have dots themselves.

    Raises:
        OptionError: if there is no such name or field.
    """
    known = list(dict.fromkeys(names))
    name = max((n for n in known if rest.startswith(f"{n}.")), key=len, default=None)
    if name is None:
        raise _unknown(what, rest.rpartition(".")[0] or rest, known)
    field = rest.removeprefix(f"{name}.")
    if field not in fields:
        raise _unknown("field", field, fields)
    return name, field


def _checked(kind: Any, value: object) -> Any:
    """A value of a topology file, by its type or schema.

    Raises:
        OptionError: if a file may not have it.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise OptionError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _set_link(topology: Topology, rest: str, value: str) -> ChangedTopology:
    names = [link.name for link in topology.links if link.name]
    ends = [f"{link.source}-{link.target}" for link in topology.links]
    name, field = _split("link", rest, [*names, *ends], ("bandwidth", "latency"))
    if name in names:
        meant = [i for i, link in enumerate(topology.links) if link.name == name]
        places = [{"name": name}]
    else:
        meant = [
            i
            for i, link in enumerate(topology.links)
            if name in (f"{link.source}-{link.target}", f"{link.target}-{link.source}")
        ]
        links = [topology.links[i] for i in meant]
        places = [{"from": link.source, "to": link.target} for link in links]
    changes = [_checked(LinkSchema, {**place, field: value}) for place in places]
    after = extended(topology, BodySchema(links=changes), {})
    figures = [_span([one.links[i] for i in meant], field) for one in (topology, after)]
    return _without_stale_tables(
        topology, after, meant, f"links.{name}.{field}: {' -> '.join(figures)}"
    )


def _span(parts: Sequence[Link | Level], field: str) -> str:
    """A figure of some links or levels: one value, or the least and the most."""
    if field == "bandwidth":
        rates = [part.bandwidth_bytes_per_s for part in parts]
        shown = [format_rate(rate) for rate in (min(rates), max(rates))]
    else:
        times = [part.latency_s for part in parts]
        shown = [format_seconds(time_s) for time_s in (min(times), max(times))]
    return " to ".join(dict.fromkeys(shown))


def _without_stale_tables(
    before: Topology, after: Topology, links: Sequence[int], changes: str
) -> ChangedTopology:
    """The topology after a change of links, without the measured collectives over them."""
    position = {device.name: d for d, device in enumerate(before.devices)}
    ways = (routes(before), routes(after)) if before.tables else ()
    kept = tuple(
        table
        for table in before.tables
        if not any(
            set(links).intersection(way[position[a], position[b]])
            for a, b in permutations(table.devices, 2)
            for way in ways
        )
    )
    gone = len(before.tables) - len(kept)
    more = (f"without {gone} of {len(before.tables)} tables of measured collectives, which were"
            " over other links",) if gone else ()  # fmt: skip
    return ChangedTopology(replace(after, tables=kept), (changes, *more))


def _set_level(topology: Topology, rest: str, value: str) -> ChangedTopology:
    levels = topology.levels
    if not levels:
        raise OptionError("this topology is not written as levels; set links.NAME.bandwidth")
    names = [level.name for level in levels]
    name, field = _split("level", rest, names, ("bandwidth", "latency"))
    depth = names.index(name)
    new = changed_level(_checked(LevelSchema, {"name": name, field: value}), levels[depth], None)
    assert new is not None
    # A level's latency is that between two of its members, which are two of its links apart.
    links = LinkSchema.model_construct(
        name=name, bandwidth=new.bandwidth_bytes_per_s, latency=new.latency_s / 2
    )
    after = replace(
        extended(topology, BodySchema(links=[links]), {}),
        levels=(*levels[:depth], new, *levels[depth + 1 :]),
    )
    meant = [i for i, link in enumerate(topology.links) if link.name == name]
    figures = [_span([level], field) for level in (levels[depth], new)]
    return _without_stale_tables(
        topology, after, meant, f"levels.{name}.{field}: {' -> '.join(figures)}"
    )


def _set_device(
    topology: Topology, rest: str, value: str, types: Mapping[str, DeviceType]
) -> ChangedTopology:
    name, _ = _split("device", rest, (device.name for device in topology.devices), ("type",))
    known = {*types, *(kind.name for kind in topology.device_types)}
    if value not in known:
        raise _unknown("device type", value, sorted(known))
    before = next(device.type for device in topology.devices if device.name == name)
    after = extended(topology, BodySchema(devices=[DeviceSchema(name=name, type=value)]), types)
    return ChangedTopology(_with_levels_of(topology, after), (f"{name}: {before} -> {value}",))


def _with_levels_of(before: Topology, after: Topology) -> Topology:
    """The topology after a change of devices: still a hierarchy where it was one, if they are all
    of one type.
    """
    return replace(after, levels=before.levels if len(after.device_types) == 1 else ())


def _of_devices(
    topology: Topology, devices: tuple[Device, ...], types: Mapping[str, DeviceType]
) -> Topology:
    """The topology with these devices and their types."""
    used = sorted({device.type for device in devices})
    after = replace(topology, devices=devices, device_types=tuple(types[name] for name in used))
    return _with_levels_of(topology, after)


def _set_type(topology: Topology, rest: str, value: str) -> ChangedTopology:
    types = {kind.name: kind for kind in topology.device_types}
    fields = ["memory", "memory_bandwidth"]
    fields += sorted({f"flops.{dtype}" for kind in types.values() for dtype in kind.flops})
    # A type with another speed has a new name. The next figure may be set under the old one.
    known = {name.removesuffix(CHANGED): name for name in types} | {name: name for name in types}
    given, field = _split("device type", rest, known, fields)
    name = known[given]
    old = types[name]
    if field == "memory":
        new = replace(old, memory_bytes=_checked(Bytes, value))
        figures = [format_bytes(kind.memory_bytes) for kind in (old, new)]
    elif field == "memory_bandwidth":
        new = replace(old, memory_bandwidth_bytes_per_s=_checked(Rate, value))
        figures = [format_rate(kind.memory_bandwidth_bytes_per_s) for kind in (old, new)]
    else:
        dtype = field.removeprefix("flops.")
        new = replace(old, flops={**old.flops, dtype: _checked(Flops, value)})
        figures = [f"{kind.peak_flops(dtype) / 1e12:.4g} TFLOP/s" for kind in (old, new)]
    if field != "memory" and not name.endswith(CHANGED):
        new = replace(new, name=name + CHANGED)
    devices = tuple(
        replace(device, type=new.name) if device.type == name else device
        for device in topology.devices
    )
    return ChangedTopology(
        _of_devices(topology, devices, {**types, new.name: new}),
        (f"device_types.{given}.{field}: {' -> '.join(figures)}",),
    )


def _set_host(topology: Topology, rest: str, value: str) -> ChangedTopology:
    names = [host.name for host in topology.hosts]
    name, field = _split("host", rest, names, ("cores", "memory"))
    number = field == "cores" and value.isascii() and value.isdecimal()
    change = _checked(HostSchema, {"name": name, field: int(value) if number else value})
    after = extended(topology, BodySchema(hosts=[change]), {})
    hosts = [one.hosts[names.index(name)] for one in (topology, after)]
    if field == "cores":
        figures = [_or_own(host.cores, str) for host in hosts]
    else:
        figures = [_or_own(host.memory_bytes, format_bytes) for host in hosts]
    changes = f"hosts.{name}.{field}: {' -> '.join(figures)}"
    return ChangedTopology(_with_levels_of(topology, after), (changes,))


def _or_own(shared: int | None, shown: Callable[[int], str]) -> str:
    return "each device's own" if shared is None else shown(shared)


# -------------------------------------------------------------------------------- drop


def drop(topology: Topology, name: str) -> ChangedTopology:
    """The topology without a device, or without a host and its devices. A dropped host that joins
    others stays as a switch.

    Raises:
        OptionError: if there is no such device or host, or no device is left.
    """
    hosts = {host.name for host in topology.hosts}
    gone = [d for d in topology.devices if name in (d.name, d.host)]
    if not gone:
        names = [*(device.name for device in topology.devices), *sorted(hosts)]
        raise OptionError(f"--drop {name}: {_unknown('device or host', name, names)}")
    kept = [device for device in topology.devices if device not in gone]
    if not kept:
        raise OptionError(f"--drop {name}: no device is left; drop fewer")
    levels = _levels_without(topology, {device.name for device in gone})
    fewer = replace(take(replace(topology, devices=(*kept, *gone)), len(kept)), levels=levels)
    fewer = without_dead_ends(fewer)
    fewer = _of_devices(fewer, fewer.devices, {kind.name: kind for kind in fewer.device_types})
    count = f" ({len(gone)} device{'s' * (len(gone) > 1)})" if name in hosts else ""
    return ChangedTopology(fewer, (f"without {name}{count}",))


def _levels_without(topology: Topology, gone: set[str]) -> tuple[Level, ...]:
    """The levels without some devices: fewer members of the outermost level where whole ones are
    gone, else none, as the topology is no regular hierarchy any more.
    """
    levels = topology.levels
    inner = prod(level.count for level in levels[:-1])
    names = [device.name for device in topology.devices]
    members = [names[i : i + inner] for i in range(0, len(names), inner)]
    left = [member for member in members if not gone.intersection(member)]
    if not levels or sum(map(len, left)) < len(names) - len(gone):
        return ()
    return (*levels[:-1], replace(levels[-1], count=len(left)))


# -------------------------------------------------------------------------------- add


def add_host(topology: Topology, name: str, other: Topology | None) -> ChangedTopology:
    """The topology with more hosts.

    Without `other`, one more of a host that there is, with the same links to what it does not
    own. With it, all hosts of another topology, linked to the switch that joins hosts here: where
    every device here has a link of its own to it, so has every new one, else every new host has
    one, as wide as all links of a host here together. Of hosts that differ, the least counts.

    Args:
        name: of the host, or as the other topology was called.

    Raises:
        OptionError: if there is no switch that joins hosts.
    """
    if other is None:
        return _copy_host(topology, name)
    switch = joint(topology)
    if switch is None:
        raise OptionError(
            f"--add-host {name}: topology {topology.name} has no switch that joins hosts, so it"
            " does not say how wide the link to another host would be; write a topology with one"
            " under `switches` and a link from each host to it, or as `levels` with a level of"
            " hosts"
        )
    uplink = _uplink(topology, switch)
    types = {kind.name: kind for kind in (*other.device_types, *topology.device_types)}
    larger, gateways = topology, list[str]()
    for host in other.hosts:
        part = _part(other, host)
        new = _new_names(larger, part)
        gateway = None if uplink.per_device else _gateway(part, name)
        part = renamed(part, new)
        ends = [device.name for device in part.devices] if gateway is None else [new[gateway]]
        ways = [way for end in ends for way in ((end, switch), (switch, end))]
        links = [replace(uplink.link, source=a, target=b) for a, b in ways]
        larger = _joined(larger, replace(part, links=(*part.links, *links)))
        gateways += ends
    larger = _of_devices(larger, larger.devices, types)
    larger = replace(larger, notes=tuple(dict.fromkeys((*topology.notes, *other.notes))))
    hosts_of = "1 host" if len(other.hosts) == 1 else f"{len(other.hosts)} hosts"
    count = len(larger.devices) - len(topology.devices)
    least = "the least of " * uplink.hosts_differ
    changes = (
        f"with {hosts_of} of {name} ({count} devices): {_known(gateways)}"
        f" linked to {switch} at {format_rate(uplink.link.bandwidth_bytes_per_s)},"
        f" {format_seconds(uplink.link.latency_s)}, as {least}the hosts there"
    )
    return ChangedTopology(larger, (changes,))


@dataclass(frozen=True, slots=True)
class _Uplink:
    """The link that another host needs into a switch that joins hosts.

    Attributes:
        link: its figures: the least of those there, and of all links of a host together.
        per_device: whether each device has one of its own.
        hosts_differ: whether the hosts there have several.
    """

    link: Link
    per_device: bool
    hosts_differ: bool


def _uplink(topology: Topology, switch: str) -> _Uplink:
    home = homes(topology)
    own: dict[str, list[Link]] = {}
    for link in topology.links:
        host = home[link.source]
        if link.target == switch and host is not None:
            own.setdefault(host, []).append(link)
    devices = {device.name for device in topology.devices}
    each = [[link] for links in own.values() for link in links]
    of_devices = all(link.source in devices for [link] in each)
    groups = each if of_devices else list(own.values())
    rates = [sum(link.bandwidth_bytes_per_s for link in links) for links in groups]
    latencies = [max(link.latency_s for link in links) for links in groups]
    names = {link.name for links in groups for link in links}
    nic = Link(
        next(iter(own)),
        switch,
        min(rates),
        max(latencies),
        names.pop() if len(names) == 1 else "",
    )
    return _Uplink(nic, of_devices, len(set(rates)) > 1 or len(set(latencies)) > 1)


def _part(other: Topology, host: Host) -> Topology:
    """One host of a topology with its devices and their measured all-reduces, and the switches and
    links inside it.
    """
    home = homes(other)
    inside = {vertex for vertex, where in home.items() if where == host.name}
    devices = [device for device in other.devices if device.host == host.name]
    return replace(
        other,
        hosts=(host,),
        devices=tuple(devices),
        switches=tuple(switch for switch in other.switches if switch in inside),
        links=tuple(x for x in other.links if x.source in inside and x.target in inside),
        levels=(),
        tables=tables_among(other.tables, {device.name for device in devices}),
    )


def _gateway(part: Topology, name: str) -> str:
    """The vertex that leads out of a host: itself, or where it has no links, the first switch in
    it that has some.
    """
    beside = neighbours(part)
    gateways = [v for v in (part.hosts[0].name, *part.switches) if beside[v]]
    if not gateways:
        raise OptionError(
            f"--add-host {name}: {part.hosts[0].name} of topology {part.name} has no links inside,"
            " neither to its devices nor to a switch of its own; link its devices to it"
        )
    return gateways[0]


def _copy_host(topology: Topology, name: str) -> ChangedTopology:
    home = homes(topology)
    inside = {vertex for vertex, where in home.items() if where == name}
    host = next(host for host in topology.hosts if host.name == name)
    around = [x for x in topology.links if {x.source, x.target} & inside]
    outside = {v for x in around for v in (x.source, x.target)} - inside
    if not outside:
        raise OptionError(
            f"--add-host {name}: nothing leads out of {name}, so that another one like it would"
            " not be linked to it; write a topology with a switch that joins hosts"
        )
    copied = replace(_part(topology, host), links=tuple(around))
    copied = renamed(copied, _new_names(topology, copied) | {vertex: vertex for vertex in outside})
    count = f"{len(copied.devices)} device" + "s" * (len(copied.devices) != 1)
    changes = f"with another {name} ({count}), linked to {', '.join(sorted(outside))} like it"
    return ChangedTopology(_joined(topology, copied), (changes,))


def _joined(topology: Topology, part: Topology) -> Topology:
    """The topology with another one beside it, whose links may lead to vertices that are there."""
    return replace(
        topology,
        hosts=(*topology.hosts, *part.hosts),
        devices=(*topology.devices, *part.devices),
        switches=(*topology.switches, *part.switches),
        links=(*topology.links, *part.links),
        levels=(),
        tables=(*topology.tables, *part.tables),
    )


def _new_names(topology: Topology, part: Topology) -> dict[str, str]:
    """Names for all vertices of a part that the topology does not have, by the old ones: a taken
    name gets the first free number at its end.
    """
    taken = set(vertex_names(topology))
    new: dict[str, str] = {}
    for old in vertex_names(part):
        name, stem, number = old, old.rstrip("0123456789"), 0
        while name in taken:
            name, number = f"{stem}{number}", number + 1
        taken.add(name)
        new[old] = name
    return new
