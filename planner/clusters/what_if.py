"""A cluster with something else in it: other figures, fewer devices, more hosts. Each function
makes a new topology and says what is different, so that a plan for it can be compared.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from planner.clusters.places import homes, joint, neighbours, without_dead_ends
from planner.clusters.routes import routes
from planner.errors import OptionError, UnitError
from planner.topology import (
    Device,
    DeviceType,
    Host,
    Level,
    Link,
    Table,
    Topology,
    tables_among,
    take,
)
from planner.units import (
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)

# Of what exists, messages name so many.
MOST_NAMES = 12
SECTIONS = ("links", "levels", "devices", "device_types", "hosts")
# What a device type is called whose speed is not its own any more: a profile that was measured on
# the true one is rescaled to it.
CHANGED = " (what if)"


@dataclass(frozen=True, slots=True)
class Changed:
    """A topology after changes.

    Attributes:
        topology: with the changes, which its notes tell.
        said: each change in words.
    """

    topology: Topology
    said: tuple[str, ...]


def what_if(
    topology: Topology,
    settings: Sequence[str] = (),
    dropped: Sequence[str] = (),
    added: Sequence[tuple[str, Topology | None]] = (),
    types: Mapping[str, DeviceType] | None = None,
) -> Changed:
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
    said: list[str] = []
    for name, other in added:
        step = add_host(topology, name, other)
        topology, said = step.topology, [*said, *step.said]
    for setting in settings:
        step = set_value(topology, setting, types or {})
        topology, said = step.topology, [*said, *step.said]
    for name in dropped:
        step = drop(topology, name)
        topology, said = step.topology, [*said, *step.said]
    routes(topology)
    notes = (*topology.notes, *(f"what if: {one}" for one in said))
    return Changed(replace(topology, notes=notes), tuple(said))


def _known(names: Iterable[str]) -> str:
    """What exists, for messages; the first ones of many."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return (", ".join(found[:MOST_NAMES]) or "none") + more


def _unknown(what: str, name: str, names: Iterable[str]) -> OptionError:
    return OptionError(f"unknown {what} {name!r}; known: {_known(names)}")


# -------------------------------------------------------------------------------- set


def set_value(topology: Topology, setting: str, types: Mapping[str, DeviceType]) -> Changed:
    """The topology with one figure set: PATH=VALUE, where PATH is one of

        links.NAME.bandwidth, .latency      a link's name, or its ends as a-b (both directions)
        levels.NAME.bandwidth, .latency     all links of a level
        devices.NAME.type                   another type
        device_types.NAME.memory, .memory_bandwidth, .flops.DTYPE
        hosts.NAME.cores, .memory           what its devices share

    Args:
        types: device types that devices may become, besides those of the topology.

    Raises:
        OptionError: if there is no such thing or the value is wrong; with what there is.
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
    except (OptionError, UnitError) as error:
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


def _above_0(parse: Callable[[str], float], value: str) -> float:
    found = parse(value)
    if found <= 0:
        raise OptionError(f"expected more than 0, got {value!r}")
    return found


def _width(part: Link, field: str, value: str) -> Link:
    if field == "bandwidth":
        return replace(part, bandwidth_bytes_per_s=_above_0(parse_rate, value))
    return replace(part, latency_s=parse_seconds(value))


def _span(links: Iterable[Link], field: str) -> str:
    """The figures that some links have: one, or from the least to the most."""
    if field == "bandwidth":
        figures = [link.bandwidth_bytes_per_s for link in links]
        shown = [format_rate(figure) for figure in (min(figures), max(figures))]
    else:
        figures = [link.latency_s for link in links]
        shown = [format_seconds(figure) for figure in (min(figures), max(figures))]
    return " to ".join(dict.fromkeys(shown))


def _set_link(topology: Topology, rest: str, value: str) -> Changed:
    named = [link.name for link in topology.links if link.name]
    ends = [f"{link.source}-{link.target}" for link in topology.links]
    name, field = _split("link", rest, [*named, *ends], ("bandwidth", "latency"))
    meant = {
        i
        for i, link in enumerate(topology.links)
        if name in (link.name, f"{link.source}-{link.target}", f"{link.target}-{link.source}")
    }
    return _with_links(topology, meant, field, value, f"links.{name}.{field}")


def _with_links(topology: Topology, meant: set[int], field: str, value: str, path: str) -> Changed:
    before = [topology.links[i] for i in sorted(meant)]
    links = tuple(
        _width(link, field, value) if i in meant else link for i, link in enumerate(topology.links)
    )
    said = f"{path}: {_span(before, field)} -> {_span((links[i] for i in meant), field)}"
    return _without_stale_tables(topology, replace(topology, links=links, levels=()), meant, said)


def _without_stale_tables(before: Topology, after: Topology, links: set[int], said: str) -> Changed:
    """The topology after a change of links, without the measured all-reduces over them."""
    position = {device.name: d for d, device in enumerate(before.devices)}
    ways = (routes(before), routes(after)) if before.tables else ()
    kept = tuple(
        table
        for table in before.tables
        if not any(
            links.intersection(way[position[a], position[b]])
            for a, b in permutations(table.devices, 2)
            for way in ways
        )
    )
    gone = len(before.tables) - len(kept)
    more = (f"without {gone} of {len(before.tables)} tables of measured all-reduces, which were"
            " over other links",) if gone else ()  # fmt: skip
    return Changed(replace(after, tables=kept), (said, *more))


def _set_level(topology: Topology, rest: str, value: str) -> Changed:
    """A level's figure holds between two members of it, which are two links apart."""
    levels = topology.levels
    if not levels:
        raise OptionError("this topology is not written as levels; set links.NAME.bandwidth")
    names = [level.name for level in levels]
    name, field = _split("level", rest, names, ("bandwidth", "latency"))
    depth = names.index(name)
    old, height = levels[depth], _heights(topology)
    if field == "bandwidth":
        new = replace(old, bandwidth_bytes_per_s=_above_0(parse_rate, value))
        figures = [format_rate(level.bandwidth_bytes_per_s) for level in (old, new)]
    else:
        new = replace(old, latency_s=parse_seconds(value))
        figures = [format_seconds(level.latency_s) for level in (old, new)]
    meant = {
        i
        for i, link in enumerate(topology.links)
        if {height[link.source], height[link.target]} == {depth, depth + 1}
    }
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=new.bandwidth_bytes_per_s,
            latency_s=new.latency_s / 2,
        )
        if i in meant
        else link
        for i, link in enumerate(topology.links)
    )
    after = replace(topology, links=links, levels=(*levels[:depth], new, *levels[depth + 1 :]))
    said = f"levels.{name}.{field}: {' -> '.join(figures)}"
    return _without_stale_tables(topology, after, meant, said)


def _heights(topology: Topology) -> Mapping[str, int]:
    """Per vertex, how many links it is above the devices."""
    beside = neighbours(topology)
    height = {device.name: 0 for device in topology.devices}
    ring = list(height)
    while ring:
        ring = list(dict.fromkeys(o for v in ring for o in beside[v] if o not in height))
        height |= dict.fromkeys(ring, max(height.values()) + 1)
    return height


def _set_device(
    topology: Topology, rest: str, value: str, types: Mapping[str, DeviceType]
) -> Changed:
    name, _ = _split("device", rest, (device.name for device in topology.devices), ("type",))
    known = {**types, **{kind.name: kind for kind in topology.device_types}}
    if value not in known:
        raise _unknown("device type", value, sorted(known))
    before = next(device.type for device in topology.devices if device.name == name)
    devices = tuple(
        replace(device, type=value) if device.name == name else device
        for device in topology.devices
    )
    return Changed(_of_devices(topology, devices, known), (f"{name}: {before} -> {value}",))


def _of_devices(
    topology: Topology, devices: tuple[Device, ...], types: Mapping[str, DeviceType]
) -> Topology:
    """With these devices, the types that they have, and levels only where they are alike."""
    used = sorted({device.type for device in devices})
    return replace(
        topology,
        devices=devices,
        device_types=tuple(types[name] for name in used),
        levels=topology.levels if len(used) == 1 else (),
    )


def _set_type(topology: Topology, rest: str, value: str) -> Changed:
    types = {kind.name: kind for kind in topology.device_types}
    fields = ["memory", "memory_bandwidth"]
    fields += sorted({f"flops.{dtype}" for kind in types.values() for dtype in kind.flops})
    name, field = _split("device type", rest, types, fields)
    old = types[name]
    if field == "memory":
        new = replace(old, memory_bytes=round(_above_0(parse_bytes, value)))
        figures = [format_bytes(kind.memory_bytes) for kind in (old, new)]
    elif field == "memory_bandwidth":
        new = replace(old, memory_bandwidth_bytes_per_s=_above_0(parse_rate, value))
        figures = [format_rate(kind.memory_bandwidth_bytes_per_s) for kind in (old, new)]
    else:
        dtype = field.removeprefix("flops.")
        new = replace(old, flops={**old.flops, dtype: _above_0(parse_flops, value)})
        figures = [f"{kind.peak_flops(dtype) / 1e12:.4g} TFLOP/s" for kind in (old, new)]
    if field != "memory" and not name.endswith(CHANGED):
        new = replace(new, name=name + CHANGED)
    devices = tuple(
        replace(device, type=new.name) if device.type == name else device
        for device in topology.devices
    )
    return Changed(
        _of_devices(topology, devices, {**types, new.name: new}),
        (f"device_types.{name}.{field}: {' -> '.join(figures)}",),
    )


def _set_host(topology: Topology, rest: str, value: str) -> Changed:
    names = [host.name for host in topology.hosts]
    name, field = _split("host", rest, names, ("cores", "memory"))
    old = topology.hosts[names.index(name)]
    if field == "memory":
        new = replace(old, memory_bytes=round(_above_0(parse_bytes, value)))
        figures = [_or_own(host.memory_bytes, format_bytes) for host in (old, new)]
    elif value.isascii() and value.isdecimal() and int(value) > 0:
        new = replace(old, cores=int(value))
        figures = [_or_own(host.cores, str) for host in (old, new)]
    else:
        raise OptionError(f"expected a whole number of cores, got {value!r}")
    hosts = tuple(new if host.name == name else host for host in topology.hosts)
    said = f"hosts.{name}.{field}: {' -> '.join(figures)}"
    return Changed(replace(topology, hosts=hosts), (said,))


def _or_own(shared: int | None, shown: Callable[[int], str]) -> str:
    return "each device's own" if shared is None else shown(shared)


# -------------------------------------------------------------------------------- drop


def drop(topology: Topology, name: str) -> Changed:
    """The topology without a device, or without a host and its devices. What is left of a host
    that joins others is a switch.

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
    return Changed(fewer, (f"without {name}{count}",))


def _levels_without(topology: Topology, gone: set[str]) -> tuple[Level, ...]:
    """The hierarchy without some devices; empty where it is none any more, which it stays without
    whole members of the outermost level.
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


def add_host(topology: Topology, name: str, other: Topology | None) -> Changed:
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
    nic, differ = _uplink(topology, switch)
    before, doors = len(topology.devices), list[str]()
    for host in other.hosts:
        part = _part(other, host)
        rename = _renamed(topology, part)
        devices = _devices_named(part, rename)
        each = [device.name for device in devices]
        ends = [rename[_door(part, name)]] if nic.source else each
        doors += ends
        uplinks = [
            replace(nic, source=a, target=b)
            for end in ends
            for a, b in ((end, switch), (switch, end))
        ]
        types = {kind.name: kind for kind in (*part.device_types, *topology.device_types)}
        topology = replace(
            topology,
            hosts=(*topology.hosts, *_host_named(part, rename)),
            switches=(*topology.switches, *(rename[s] for s in part.switches)),
            links=(*topology.links, *_links_named(part.links, rename), *uplinks),
            levels=(),
            tables=(*topology.tables, *_tables_named(part, rename)),
        )
        topology = _of_devices(topology, (*topology.devices, *devices), types)
    new = (*topology.notes, *other.notes)
    topology = replace(topology, notes=tuple(dict.fromkeys(new)))
    hosts_of = "1 host" if len(other.hosts) == 1 else f"{len(other.hosts)} hosts"
    said = (
        f"with {hosts_of} of {name} ({len(topology.devices) - before} devices): {_known(doors)}"
        f" linked to {switch} at {format_rate(nic.bandwidth_bytes_per_s)},"
        f" {format_seconds(nic.latency_s)}, as {'the least of ' * differ}the hosts there"
    )
    return Changed(topology, (said,))


def _uplink(topology: Topology, switch: str) -> tuple[Link, bool]:
    """The link that another host needs into a switch that joins hosts, and whether hosts differ
    there, so that the least is taken. It has no source where each device has one of its own; else
    it stands for all links of a host together.
    """
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
        "" if of_devices else next(iter(own)),
        switch,
        min(rates),
        max(latencies),
        names.pop() if len(names) == 1 else "",
    )
    return nic, len(set(rates)) > 1 or len(set(latencies)) > 1


def _part(other: Topology, host: Host) -> Topology:
    """One host of a topology with what stands in it."""
    home = homes(other)
    inside = {vertex for vertex, where in home.items() if where == host.name}
    return replace(
        other,
        hosts=(host,),
        devices=tuple(device for device in other.devices if device.host == host.name),
        switches=tuple(switch for switch in other.switches if switch in inside),
        links=tuple(x for x in other.links if x.source in inside and x.target in inside),
        levels=(),
    )


def _door(part: Topology, name: str) -> str:
    """The vertex that leads out of a host: itself, or where it has no links, the first switch in
    it that has some.
    """
    beside = neighbours(part)
    doors = [v for v in (part.hosts[0].name, *part.switches) if beside[v]]
    if not doors:
        raise OptionError(
            f"--add-host {name}: {part.hosts[0].name} of topology {part.name} has no links inside,"
            " neither to its devices nor to a switch of its own; link its devices to it"
        )
    return doors[0]


def _copy_host(topology: Topology, name: str) -> Changed:
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
    part = replace(
        topology,
        hosts=(host,),
        devices=tuple(device for device in topology.devices if device.host == name),
        switches=tuple(switch for switch in topology.switches if switch in inside),
    )
    rename = _renamed(topology, part) | {vertex: vertex for vertex in outside}
    devices = _devices_named(part, rename)
    more = replace(
        topology,
        hosts=(*topology.hosts, *_host_named(part, rename)),
        devices=(*topology.devices, *devices),
        switches=(*topology.switches, *(rename[switch] for switch in part.switches)),
        links=(*topology.links, *_links_named(around, rename)),
        levels=(),
        tables=(*topology.tables, *_tables_named(part, rename)),
    )
    count = f"{len(devices)} device" + "s" * (len(devices) != 1)
    said = f"with another {name} ({count}), linked to {', '.join(sorted(outside))} like it"
    return Changed(more, (said,))


def _renamed(topology: Topology, part: Topology) -> dict[str, str]:
    """New names for all vertices of a part that none has yet, by the old ones: numbers at the end
    are counted on.
    """
    taken = set(neighbours(topology))
    found: dict[str, str] = {}
    names = [*(host.name for host in part.hosts), *(device.name for device in part.devices)]
    for name in (*names, *part.switches):
        new, stem, number = name, name.rstrip("0123456789"), 0
        while new in taken:
            new, number = f"{stem}{number}", number + 1
        taken.add(new)
        found[name] = new
    return found


def _host_named(part: Topology, rename: Mapping[str, str]) -> tuple[Host, ...]:
    return tuple(replace(host, name=rename[host.name]) for host in part.hosts)


def _devices_named(part: Topology, rename: Mapping[str, str]) -> tuple[Device, ...]:
    return tuple(
        replace(device, name=rename[device.name], host=rename[device.host])
        for device in part.devices
    )


def _links_named(links: Iterable[Link], rename: Mapping[str, str]) -> tuple[Link, ...]:
    return tuple(
        replace(link, source=rename[link.source], target=rename[link.target]) for link in links
    )


def _tables_named(part: Topology, rename: Mapping[str, str]) -> tuple[Table, ...]:
    """The measured all-reduces among the devices of a part."""
    own = tables_among(part.tables, {device.name for device in part.devices})
    return tuple(replace(t, devices=tuple(rename[d] for d in t.devices)) for t in own)
