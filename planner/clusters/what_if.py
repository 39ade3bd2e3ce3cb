"""A cluster with something else in it: other figures, fewer devices, more hosts. Each function
makes a new topology and names the changes, so that a plan for it can be compared.

A figure is set in the way of a file that extends the topology (`yaml/build.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from operator import attrgetter, methodcaller
from typing import Any

from pydantic import TypeAdapter, ValidationError

from planner.artefacts.topology import (
    Device,
    DeviceType,
    Host,
    HostLink,
    Level,
    Link,
    Topology,
    problems,
    tables_among,
    take,
)
from planner.clusters.places import host_of_vertex, neighbours, network_switch, without_dead_ends
from planner.clusters.routes import routes
from planner.clusters.yaml.build import extended, renamed, vertex_names
from planner.clusters.yaml.schema import BodySchema, Bytes, Flops, HostLinkSchema, Rate
from planner.support.errors import OptionError
from planner.support.units import format_bytes, format_rate, format_seconds

# Messages list at most this number of the names that exist.
MAX_NAMES = 12
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
        hosts.NAME.host_link.bandwidth, .devices, .memory

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
        if section not in SECTIONS:
            raise _unknown("section", section, SECTIONS)
        before = SECTIONS[section](topology)
        name, field = _split(before, rest)
        after = _with_value(topology, section, (name, field), value, types)
    except OptionError as error:
        raise OptionError(f"--set {setting}: {error}") from None
    figures = " -> ".join(
        _figure(one, name, field) for one in (before, SECTIONS[section](after))
    )  # fmt: skip
    if section == "devices":
        return ChangedTopology(after, (f"{name}: {figures}",))
    change = f"{section}.{name}.{field}: {figures}"
    if section in ("links", "levels"):
        return _without_stale_tables(topology, after, _links_by_name(topology)[name], change)
    return ChangedTopology(after, (change,))


@dataclass(frozen=True, slots=True)
class _Section:
    """Things of a topology whose figures may be set.

    Attributes:
        what: the word for one of them.
        things: by the names that stand for them.
        fields: by name, how a figure is found, and how it is shown.
    """

    what: str
    things: Mapping[str, Sequence[Any]]
    fields: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], str]]]


_OF_LINKS = {
    "bandwidth": (attrgetter("bandwidth_bytes_per_s"), format_rate),
    "latency": (attrgetter("latency_s"), format_seconds),
}


def _links(topology: Topology) -> _Section:
    return _Section("link", {
        name: [topology.links[i] for i in some] for name, some in _links_by_name(topology).items()
    }, _OF_LINKS)  # fmt: skip


def _levels(topology: Topology) -> _Section:
    if not topology.levels:
        raise OptionError("this topology is not written as levels; set links.NAME.bandwidth")
    return _Section("level", {level.name: [level] for level in topology.levels}, _OF_LINKS)


def _devices(topology: Topology) -> _Section:
    devices = {device.name: [device] for device in topology.devices}
    return _Section("device", devices, {"type": (attrgetter("type"), str)})


def _device_types(topology: Topology) -> _Section:
    dtypes = sorted({dtype for kind in topology.device_types for dtype in kind.flops})
    fields: dict[str, tuple[Callable[[Any], Any], Callable[[Any], str]]] = {
        "memory": (attrgetter("memory_bytes"), format_bytes),
        "memory_bandwidth": (attrgetter("memory_bandwidth_bytes_per_s"), format_rate),
    }
    for dtype in dtypes:
        peak = methodcaller("peak_flops", dtype)
        fields[f"flops.{dtype}"] = peak, lambda flops: f"{flops / 1e12:.4g} TFLOP/s"
    return _Section("device type", {n: [kind] for n, kind in _types(topology).items()}, fields)


_LINK = "host_link."
_LINK_FIELDS = {
    "bandwidth": "bandwidth_bytes_per_s", "devices": "num_devices", "memory": "memory_bytes",
}  # fmt: skip


def _hosts(topology: Topology) -> _Section:
    def or_own(shown: Callable[[int], str]) -> Callable[[int | None], str]:
        return lambda shared: "each device's own" if shared is None else shown(shared)

    def of_link(name: str, shown: Callable[[Any], str], unset: str = "none") -> Any:
        return (lambda host: host.host_link and getattr(host.host_link, name),
                lambda figure: unset if figure is None else shown(figure))  # fmt: skip

    hosts = {host.name: [host] for host in topology.hosts}
    return _Section("host", hosts, {
        "cores": (attrgetter("cores"), or_own(str)),
        "memory": (attrgetter("memory_bytes"), or_own(format_bytes)),
        f"{_LINK}bandwidth": of_link(_LINK_FIELDS["bandwidth"], format_rate),
        f"{_LINK}devices": of_link(_LINK_FIELDS["devices"], str),
        f"{_LINK}memory": of_link(_LINK_FIELDS["memory"], format_bytes, "not limited"),
    })  # fmt: skip


SECTIONS: Mapping[str, Callable[[Topology], _Section]] = {
    "links": _links,
    "levels": _levels,
    "devices": _devices,
    "device_types": _device_types,
    "hosts": _hosts,
}


def _split(section: _Section, rest: str) -> tuple[str, str]:
    """The name and the field of NAME.FIELD; names may have dots themselves.

    Raises:
        OptionError: if there is no such name or field.
    """
    name = max((n for n in section.things if rest.startswith(f"{n}.")), key=len, default=None)
    if name is None:
        raise _unknown(section.what, rest.rpartition(".")[0] or rest, section.things)
    field = rest.removeprefix(f"{name}.")
    if field not in section.fields:
        raise _unknown("field", field, section.fields)
    return name, field


def _figure(section: _Section, name: str, field: str) -> str:
    """A figure in words: one value, or the least and the most."""
    find, shown = section.fields[field]
    values = [find(thing) for thing in section.things[name]]
    ends = values if len(values) == 1 else (min(values), max(values))
    return " to ".join(dict.fromkeys(map(shown, ends)))


def _with_value(
    topology: Topology,
    section: str,
    place: tuple[str, str],
    value: str,
    types: Mapping[str, DeviceType],
) -> Topology:
    """The topology with a figure set, in the way of a file that extends it.

    Args:
        place: the name and the field in the section.

    Raises:
        OptionError: if a file may not have the value.
    """
    name, field = place
    if section == "device_types":
        return _with_type(topology, name, field, value)
    if field.startswith(_LINK):
        return _with_host_link(topology, name, field.removeprefix(_LINK), value)
    known = {*types, *(kind.name for kind in topology.device_types)}
    if section == "devices" and value not in known:
        raise _unknown("device type", value, sorted(known))
    number = field == "cores" and value.isascii() and value.isdecimal()
    entries: list[dict[str, object]] = [{"name": name, field: int(value) if number else value}]
    if section == "links" and name not in {link.name for link in topology.links}:
        ends = [topology.links[i] for i in _links_by_name(topology)[name]]
        entries = [{"from": link.source, "to": link.target, field: value} for link in ends]
    return extended(topology, _checked(BodySchema, {section: entries}), types)


def _with_host_link(topology: Topology, name: str, field: str, value: str) -> Topology:
    """The topology with a figure of the links between the devices of a host and its memory.

    Raises:
        OptionError: if a file may not have the value, or there is no such link.
    """
    number = int(value) if field == "devices" and value.isdecimal() else value
    given = _checked(HostLinkSchema, {"bandwidth": "1 B/s", field: number})
    figure = {_LINK_FIELDS[field]: getattr(given, field)}
    host = next(one for one in topology.hosts if one.name == name)
    if host.host_link is None and field != "bandwidth":
        raise OptionError(f"host {name} has no host_link; set {_LINK}bandwidth first")
    link = HostLink(**figure) if host.host_link is None else replace(host.host_link, **figure)
    hosts = (replace(one, host_link=link) if one is host else one for one in topology.hosts)
    return replace(topology, hosts=tuple(hosts))


def _checked(kind: Any, value: object) -> Any:
    """A value of a topology file, by its type or schema.

    Raises:
        OptionError: if a file may not have it.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise OptionError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _types(topology: Topology) -> dict[str, DeviceType]:
    """The device types by name. A type with another speed has a new name; the next figure may be
    set under the old one.
    """
    types = {kind.name: kind for kind in topology.device_types}
    return {name.removesuffix(CHANGED): kind for name, kind in types.items()} | types


def _with_type(topology: Topology, name: str, field: str, value: str) -> Topology:
    """The topology with another figure of a device type."""
    old = _types(topology)[name]
    if field == "memory":
        new = replace(old, memory_bytes=_checked(Bytes, value))
    elif field == "memory_bandwidth":
        new = replace(old, memory_bandwidth_bytes_per_s=_checked(Rate, value))
    else:
        flops = {**old.flops, field.removeprefix("flops."): _checked(Flops, value)}
        new = replace(old, flops=flops)
    if field != "memory" and not old.name.endswith(CHANGED):
        new = replace(new, name=old.name + CHANGED)
    devices = tuple(
        replace(device, type=new.name) if device.type == old.name else device
        for device in topology.devices
    )
    types = {kind.name: kind for kind in (*topology.device_types, new)}
    return _of_devices(topology, devices, types)


def _links_by_name(topology: Topology) -> dict[str, list[int]]:
    """The links that share a name, and those in both directions between ends that are written as
    a-b; where a name looks like ends, it is the name that counts.
    """
    named: dict[str, list[int]] = {}
    between: dict[str, list[int]] = {}
    for i, link in enumerate(topology.links):
        if link.name:
            named.setdefault(link.name, []).append(i)
        for ends in (f"{link.source}-{link.target}", f"{link.target}-{link.source}"):
            between.setdefault(ends, []).append(i)
    forward = (f"{link.source}-{link.target}" for link in topology.links)
    return named | {ends: between[ends] for ends in forward if ends not in named}


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


def _of_devices(
    topology: Topology, devices: tuple[Device, ...], types: Mapping[str, DeviceType]
) -> Topology:
    """The topology with these devices and their types: still a hierarchy where it was one, if they
    are all of one type.
    """
    used = sorted({device.type for device in devices})
    after = replace(topology, devices=devices, device_types=tuple(types[name] for name in used))
    return replace(after, levels=topology.levels if len(used) == 1 else ())


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
    switch = network_switch(topology)
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
    home = host_of_vertex(topology)
    devices = {device.name for device in topology.devices}
    into = [x for x in topology.links if x.target == switch and home[x.source] is not None]
    per_device = all(link.source in devices for link in into)
    groups: dict[str | None, list[Link]] = {}
    for link in into:
        groups.setdefault(link.source if per_device else home[link.source], []).append(link)
    rates = {sum(link.bandwidth_bytes_per_s for link in links) for links in groups.values()}
    latencies = {max(link.latency_s for link in links) for links in groups.values()}
    names = {link.name for link in into}
    link = Link(
        into[0].source,
        switch,
        min(rates),
        max(latencies),
        names.pop() if len(names) == 1 else "",
    )
    return _Uplink(link, per_device, len(rates) > 1 or len(latencies) > 1)


def _part(other: Topology, host: Host) -> Topology:
    """One host of a topology with its devices and their measured all-reduces, and the switches and
    links inside it.
    """
    home = host_of_vertex(other)
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
    home = host_of_vertex(topology)
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
