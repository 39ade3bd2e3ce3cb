"""The fields of a topology file -> `Topology`: `extends`, templates of hosts, numbered names,
patterns, levels and measured times; with everything that contradicts itself.

A topology is put together in a draft: first the topology that it extends, then copies of templates,
then its own hosts, devices, switches and links. Mistakes are noted with the path of their field and
left out.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import accumulate, product
from operator import mul
from typing import Any

from planner.artefacts.topology import (
    CollectiveKind,
    CollectiveTable,
    Device,
    DeviceType,
    Host,
    HostLink,
    Level,
    Link,
    Sharing,
    Topology,
    is_name,
    parts_of,
    tables_among,
    too_many,
    wrong_name,
)
from planner.clusters.links import both_ways
from planner.clusters.yaml.schema import (
    BodySchema,
    DeviceSchema,
    HostSchema,
    LevelSchema,
    LinkSchema,
    TableSchema,
    available_bytes,
    available_cores,
)

# Sections that `levels` makes up, so that a file with levels may not have them.
_EXPLICIT_ONLY = ("hosts", "devices", "switches", "links")
_ENDS = "expected `between: [a, b]` for both directions, or `from: a` with `to: b`"
_EITHER = "expected either `levels` with `device`, or `devices` with `links`"
MAX_LEVELS = 64
_EMPTY = Topology("", (), (), (), (), ())


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


def build(body: BodySchema, where: str, context: BodyContext) -> Topology:
    """The topology that a body describes; its name and notes are left empty.

    Args:
        where: path of the body in its file with a full stop at its end, empty for the file itself.
        context: see there; mistakes are added to it.
    """
    base = None
    if body.extends is not None:
        base = context.other(f"{where}extends", body.extends)
        if base is None:
            return _EMPTY
    regular = bool(body.levels)
    if base is not None and base.levels:
        regular = regular or body.model_fields_set.isdisjoint(_EXPLICIT_ONLY)
    against = _EXPLICIT_ONLY if regular else ("device", "host")
    clashing = [name for name in against if name in body.model_fields_set]
    if not (body.levels or body.devices or body.hosts or base):
        context.wrong.append(f"{where}{_EITHER}, got neither")
        return _EMPTY
    if clashing:
        ruler = "levels" if regular else "devices"
        context.wrong.append(
            f"{where}{', '.join(clashing)}: {_EITHER}, got {ruler}; leave out what is not meant"
        )
        return _EMPTY
    if regular:
        topology = _regular(body, base, where, context)
    else:
        draft = _Draft(where, context)
        draft.extend(base or _EMPTY)
        draft.add(body)
        topology = draft.topology()
    return _with_tables(topology, body.tables, where, context)


def extended(base: Topology, body: BodySchema, types: Mapping[str, DeviceType]) -> Topology:
    """A topology with the changes of a body, made as in a file that extends it.

    Args:
        base: keeps its name and its notes, and is still a hierarchy of levels where neither single
            links nor the types of some devices are changed.
        body: sound; it names only hosts, devices, links and levels of the base.
        types: device types that devices may become, besides those of the base.
    """
    context = BodyContext(types, frozenset(), lambda place, name: None, None, [])
    draft = _Draft("", context)
    draft.extend(base)
    draft.add(body)
    levels = _changed_levels(body, base.levels, "", context)
    for level in (one for one in levels if one not in base.levels):
        # A level's latency is that between two of its members, which are two of its links apart.
        link = LinkSchema.model_construct(
            name=level.name, bandwidth=level.bandwidth_bytes_per_s, latency=level.latency_s / 2
        )
        draft.change_kind("", link)
    assert not context.wrong, context.wrong
    made = draft.topology()
    kinds = made.device_types if body.devices else base.device_types
    regular = not body.links and len(kinds) == 1
    return replace(
        made,
        name=base.name,
        notes=base.notes,
        device_types=kinds,
        levels=tuple(levels) if regular else (),
    )


def vertex_names(topology: Topology) -> Iterator[str]:
    """The names of all vertices: hosts, devices, switches."""
    yield from (host.name for host in topology.hosts)
    yield from (device.name for device in topology.devices)
    yield from topology.switches


def renamed(topology: Topology, new: Mapping[str, str]) -> Topology:
    """The topology with other names for its vertices.

    Args:
        new: by old name, for every vertex and every end of a link.
    """
    return replace(
        topology,
        hosts=tuple(replace(host, name=new[host.name]) for host in topology.hosts),
        devices=tuple(
            replace(device, name=new[device.name], host=new[device.host])
            for device in topology.devices
        ),
        switches=tuple(new[switch] for switch in topology.switches),
        links=tuple(
            replace(link, source=new[link.source], target=new[link.target])
            for link in topology.links
        ),
        tables=tuple(
            replace(table, devices=tuple(new[device] for device in table.devices))
            for table in topology.tables
        ),
    )


def _pattern(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _matching(name: str, known: Iterable[str]) -> list[str]:
    """The names that one stands for: a pattern of several, itself where it is known."""
    if not _pattern(name):
        return [name] if name in known else []
    return [one for one in known if fnmatchcase(one, name)]


# ------------------------------------------------------------------------------ vertices and links


@dataclass
class _Draft:
    """Vertices and links of a topology that is being put together.

    Attributes:
        where: path of its body in the file.
        links: by their ends.
        numbers: the next number of numbered names, by the part before the number.
        own: names and ends of links that the body itself gave, which may not come twice. Others
            came with templates and the extended topology, and may be changed.
        partial: whether a template is missing, so that names may be unknown for that reason.
        pairs: of ends that its links stand for, so far.
    """

    where: str
    context: BodyContext
    types: dict[str, DeviceType] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    switches: dict[str, None] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    tables: list[CollectiveTable] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    own: set[object] = field(default_factory=set)
    partial: bool = False
    pairs: int = 0

    def complain(self, place: str, what: str) -> None:
        """Notes a mistake in a field."""
        self.context.wrong.append(f"{self.where}{place}: {what}")

    def topology(self) -> Topology:
        """The draft as a topology."""
        used = sorted({device.type for device in self.devices.values()})
        known = self._types()
        return Topology(
            name="",
            device_types=tuple(known[name] for name in used if name in known),
            hosts=tuple(self.hosts.values()),
            devices=tuple(self.devices.values()),
            switches=tuple(self.switches),
            links=tuple(self.links.values()),
            tables=tuple(self.tables),
        )

    def extend(self, other: Topology) -> None:
        """Takes over another topology."""
        for kind in other.device_types:
            clashing = self.types.setdefault(kind.name, kind) != kind
            if clashing and kind.name not in self.context.own_types:
                self.complain(
                    f"device_types.{kind.name}",
                    "missing; it is defined in two ways by what this topology is made of",
                )
        self.hosts |= {host.name: host for host in other.hosts}
        self.devices |= {device.name: device for device in other.devices}
        self.switches |= dict.fromkeys(other.switches)
        self.links |= {(link.source, link.target): link for link in other.links}
        self.tables += other.tables
        for name in vertex_names(other):
            self._count(name)

    def add(self, body: BodySchema) -> None:
        """Adds the sections of a body."""
        for i, host in enumerate(body.hosts):
            self._add_hosts(f"hosts[{i}]", host)
        for i, device in enumerate(body.devices):
            self._add_devices(f"devices[{i}]", device)
        for i, switch in enumerate(body.switches):
            if switch not in self.switches or switch in self.own:
                self._claim(f"switches[{i}]", switch)
            self.switches[switch] = None
        for i, link in enumerate(body.links):
            self._add_links(f"links[{i}]", link)

    def _types(self) -> dict[str, DeviceType]:
        """The device types that are known here."""
        own = {name: self.context.types[name] for name in self.context.own_types}
        return {**self.context.types, **self.types, **own}

    # Names ----------------------------------------------------------------------------------------

    @property
    def _vertices(self) -> Mapping[str, object]:
        return ChainMap(self.switches, self.hosts, self.devices)  # type: ignore[arg-type]

    def _count(self, name: str) -> None:
        """Keeps numbered names from being given again."""
        stem, digits = _split(name)
        if digits:
            self.numbers[stem] = max(self.numbers.get(stem, 0), int(digits) + 1)

    def _next(self, stem: str) -> str:
        number = self.numbers.get(stem, 0)
        self.numbers[stem] = number + 1
        return f"{stem}{number}"

    def _claim(self, place: str, name: str) -> bool:
        """Whether a name may be given to a new vertex."""
        if not is_name(name):
            self.complain(place, wrong_name(name))
            return False
        if name in self._vertices:
            self.complain(place, f"{name}: the name is used twice")
            return False
        self.own.add(name)
        self._count(name)
        return True

    # Vertices -------------------------------------------------------------------------------------

    def _add_hosts(self, place: str, given: HostSchema) -> None:
        """Copies of a template, a change of inherited hosts, or new hosts."""
        stem = given.name or "host"
        if given.template is not None:
            self._copy_hosts(place, given, given.template)
        elif given.name is None and given.count is None:
            self.complain(f"{place}.name", "missing, or `template`")
        elif (old := self._inherited(place, "host", stem, given.count, self.hosts)) is not None:
            self.hosts |= {name: _changed_host(self.hosts[name], given) for name in old}
        elif self._has_room(place, switches=given.count or 1):
            for name in self._new(f"{place}.name", stem, given.count):
                self.hosts[name] = _host(given, name)

    def _copy_hosts(self, place: str, given: HostSchema, name: str) -> None:
        if given.model_fields_set - {"template", "count"}:
            self.complain(place, "a template brings all but the count; leave out the rest")
            return
        template = self.context.other(f"{self.where}{place}.template", name)
        if template is None:
            self.partial = True
            return
        count = given.count or 1
        if self._has_room(place, *(count * each for each in parts_of(template))):
            for _ in range(count):
                self._copy(template)

    def _inherited(
        self, place: str, kind: str, name: str, count: int | None, known: Iterable[str]
    ) -> list[str] | None:
        """The names from an extended topology that an entry changes; None where it makes new ones.

        Args:
            kind: "host" or "device", for the message.
        """
        if count is not None:
            return None
        old = [one for one in _matching(name, known) if one not in self.own]
        if not old and not _pattern(name):
            return None
        if not old and not self.partial:
            self.complain(f"{place}.name", f"no {kind} to change matches {name!r}")
        return old

    def _has_room(self, place: str, devices: int = 0, switches: int = 0, links: int = 0) -> bool:
        """Whether there may be so many more parts, hosts counted as switches. If not, that is a
        mistake, and names may be unknown for this reason.
        """
        return self._fits(
            place,
            len(self.devices) + devices,
            len(self.hosts) + len(self.switches) + switches,
            len(self.links) + links,
        )

    def _fits(self, place: str, devices: int, switches: int, links: int) -> bool:
        size = too_many(devices, switches, links)
        if size is not None:
            self.complain(place, size)
            self.partial = True
        return size is None

    def _new(self, place: str, name: str, count: int | None) -> Iterator[str]:
        names = [name] if count is None else (self._next(name) for _ in range(count))
        for one in names:
            if self._claim(place, one):
                yield one

    def _copy(self, template: Topology) -> None:
        """Takes over a template under names that are numbered on."""
        self.extend(
            renamed(
                template, {name: self._next(_split(name)[0]) for name in vertex_names(template)}
            )
        )

    def _add_devices(self, place: str, given: DeviceSchema) -> None:
        self._check_device(place, given)
        old = self._inherited(place, "device", given.name, given.count, self.devices)
        if old is not None:
            changes = _given(type=given.type, host=given.host)
            self.devices |= {name: replace(self.devices[name], **changes) for name in old}
            return
        for key, value in (("type", given.type), ("host", given.host)):
            if value is None:
                self.complain(f"{place}.{key}", "missing")
        if not self._has_room(place, given.count or 1):
            return
        for name in self._new(f"{place}.name", given.name, given.count):
            self.devices[name] = Device(name, given.type or "", given.host or "")

    def _check_device(self, place: str, given: DeviceSchema) -> None:
        types = self._types()
        if given.type is not None and given.type not in types:
            self.complain(f"{place}.type", _unknown_type(given.type, types))
        if given.host is not None and given.host not in self.hosts and not self.partial:
            self.complain(f"{place}.host", f"unknown host {given.host!r}")

    # Links ----------------------------------------------------------------------------------------

    def _add_links(self, place: str, given: LinkSchema) -> None:
        if given.between is None and given.source is None:
            self.change_kind(place, given)
            return
        both = given.between is not None
        a, b = given.between or (given.source or "", given.target or "")
        fields = ("between", "between") if both else ("from", "to")
        ends = [self._ends(f"{place}.{key}", end) for key, end in zip(fields, (a, b), strict=True)]
        if a == b and not _pattern(a):
            self.complain(place, f"{a} is linked to itself; leave that link out")
        self.pairs += len(ends[0]) * len(ends[1])
        if not self._fits(place, 0, 0, self.pairs):
            return
        ways = {(p, q): None for p, q in product(*ends) if p != q}
        if both:
            ways = dict.fromkeys(one for p, q in ways for one in ((p, q), (q, p)))
        self._claim_links(place, ways)
        self._put_links(place, list(ways), given)

    def _claim_links(self, place: str, ways: Iterable[tuple[str, str]]) -> None:
        """Notes that the body gives these links, which it may not give twice."""
        twice = [way for way in ways if way in self.own]
        self.own |= set(ways)
        if twice:
            (p, q), *more = twice
            also = f", and {len(more)} more" if more else ""
            self.complain(place, f"{p} -> {q} is there twice{also}")

    def _put_links(self, place: str, ways: Sequence[tuple[str, str]], given: LinkSchema) -> None:
        """New links, which replace older ones; or, with only some of the fields, changes of links
        that are all there already.
        """
        missing = [name for name in ("bandwidth", "latency") if getattr(given, name) is None]
        changes = _link_changes(given)
        if missing and changes and ways and all(way in self.links for way in ways):
            self.links |= {way: replace(self.links[way], **changes) for way in ways}
            return
        for name in missing:
            self.complain(f"{place}.{name}", "missing")
        figures = {"bandwidth_bytes_per_s": 1.0, "latency_s": 0.0, **changes}
        self.links |= {way: Link(*way, **figures) for way in ways}

    def _ends(self, place: str, name: str) -> list[str]:
        ends = _matching(name, self._vertices)
        if self.partial:
            return ends
        if not ends and _pattern(name):
            self.complain(place, f"no device, host or switch matches {name!r}")
        elif not ends:
            self.complain(place, f"unknown device, host or switch {name!r}")
        return ends

    def change_kind(self, place: str, given: LinkSchema) -> None:
        """Changes the links of a name that are there already."""
        known = sorted({link.name for link in self.links.values() if link.name})
        if not given.name:
            self.complain(place, f"{_ENDS}, or the `name` of links that are there already")
        elif given.name not in known:
            there = ", ".join(known) or "none"
            self.complain(
                f"{place}.name",
                f"no link is called {given.name!r}; there are: {there}; a new one needs `between`",
            )
        else:
            self.links |= {
                ends: replace(link, **_link_changes(given))
                for ends, link in self.links.items()
                if link.name == given.name
            }


def _split(name: str) -> tuple[str, str]:
    """A name's part before its number, and the number: ("gpu", "12")."""
    stem = name.rstrip("0123456789")
    return stem, name[len(stem) :]


def _host(given: HostSchema, name: str) -> Host:
    """The host of this name; `auto` asks the machine."""
    link = given.host_link
    return Host(
        name,
        available_cores() if given.cores == "auto" else given.cores,  # type: ignore[arg-type]
        available_bytes() if given.memory == "auto" else given.memory,  # type: ignore[arg-type]
        None if link is None else HostLink(link.bandwidth, link.devices, link.memory),
    )


def _changed_host(host: Host, given: HostSchema) -> Host:
    """A host with the figures that are given."""
    names = {"cores": "cores", "memory": "memory_bytes", "host_link": "host_link"}
    new = _host(given, host.name)
    given_names = given.model_fields_set & names.keys()
    return replace(host, **{names[one]: getattr(new, names[one]) for one in given_names})


def _link_changes(given: LinkSchema) -> dict[str, Any]:
    """The fields of a `Link` that are given, without its ends."""
    return _given(
        bandwidth_bytes_per_s=given.bandwidth,
        latency_s=given.latency,
        name=given.name or None,
        sharing=None if given.sharing is None else Sharing(given.sharing),
    )


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


# ---------------------------------------------------------------------------------------- levels


def _unknown_type(name: str, known: Iterable[str]) -> str:
    """The message on an unknown device type."""
    return (
        f"unknown device type {name!r}; known: {', '.join(sorted(known))};"
        " define others under `device_types`"
    )


def _changed_levels(
    body: BodySchema, before: Sequence[Level], where: str, context: BodyContext
) -> list[Level]:
    """Levels, with those of the same name changed, and new ones behind them."""
    levels, old = [*before], {level.name: i for i, level in enumerate(before)}
    for i, given in enumerate(body.levels):
        known = levels[old[given.name]] if given.name in old else None
        level = _changed_level(given, known, context.num_devices)
        if level is None:
            missing = (n for n in ("count", "bandwidth", "latency") if getattr(given, n) is None)
            context.wrong.extend(f"{where}levels[{i}].{name}: missing" for name in missing)
        elif given.name in old:
            levels[old[given.name]] = level
        else:
            levels.append(level)
    return levels


def _regular(body: BodySchema, base: Topology | None, where: str, context: BodyContext) -> Topology:
    """A regular hierarchy. Where it extends another one, levels of the same name are changed."""
    levels = list(base.levels) if base else []
    if base is not None and not levels:
        context.wrong.append(f"{where}levels: {_EITHER}; the extended topology has devices")
        return _EMPTY
    levels = _changed_levels(body, levels, where, context)
    kind = _type_of_all(body, base, where, context)
    size = too_many_levels(levels) if levels else None
    if kind is not None and size is not None:
        context.wrong.append(f"{where}levels: {size}")
    if kind is None or size is not None or not levels:
        return _EMPTY
    kept = base.hosts[0] if base else Host("")
    made = from_levels(tuple(levels), kind, _host(body.host, "") if body.host else kept)
    names = {one.name for one in made.devices}
    return replace(made, tables=tables_among(base.tables, names) if base else ())


def _type_of_all(
    body: BodySchema, base: Topology | None, where: str, context: BodyContext
) -> DeviceType | None:
    """The type of all devices of a hierarchy; None after its mistakes, and those of its host, are
    noted.
    """
    stray = (
        body.host.model_fields_set - {"cores", "memory", "host_link"}
        if body.host is not None
        else None
    )
    if stray:
        context.wrong.append(
            f"{where}host.{min(stray)}: unknown field; `levels` names its hosts itself"
        )
    device = body.device or (base.devices[0].type if base else None)
    if device is None:
        context.wrong.append(f"{where}device: missing; `levels` needs the type of all devices")
        return None
    types = {**context.types, **({t.name: t for t in base.device_types} if base else {})}
    if device not in types:
        context.wrong.append(f"{where}device: {_unknown_type(device, types)}")
    return types.get(device)


def too_many_levels(levels: Sequence[Level]) -> str | None:
    """Why there is no hierarchy of these levels, before it is written out; None if there is one."""
    if len(levels) > MAX_LEVELS:
        return f"expected at most {MAX_LEVELS} levels, got {len(levels)}"
    # Members of each level, the outermost first; each has a link, and all but the devices a switch.
    members = list(accumulate((level.count for level in reversed(levels)), mul))
    return too_many(members[-1], 1 + sum(members[:-1]), 2 * sum(members))


def _changed_level(given: LevelSchema, old: Level | None, num_devices: int | None) -> Level | None:
    """The old level with the fields that are given, or a new level; None where a new one misses a
    field.

    Args:
        num_devices: the value of `count: auto`; None takes the cores of this machine.
    """
    auto = given.count == "auto"
    changes: dict[str, Any] = _given(
        count=(num_devices or available_cores()) if auto else given.count,
        bandwidth_bytes_per_s=given.bandwidth,
        latency_s=given.latency,
    )
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
            figures = level.bandwidth_bytes_per_s, level.latency_s / 2, level.name
            links.extend(both_ways(member, vertex, *figures))
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


# -------------------------------------------------------------------------------- measured times


def _with_tables(
    topology: Topology, given: Sequence[TableSchema], where: str, context: BodyContext
) -> Topology:
    """The topology with more tables, which take precedence over those that it has."""
    tables: dict[tuple[CollectiveKind, int, frozenset[str]], CollectiveTable] = {}
    for i, one in enumerate(given):
        for j, group in enumerate(one.groups or [None]):
            place = f"{where}tables[{i}]" + ("" if group is None else f".groups[{j}]")
            devices = _group(topology, group, place, context)
            if devices is None:
                continue
            count = one.num_devices or len(devices)
            if not 2 <= count <= len(devices):
                context.wrong.append(
                    f"{place}: expected a group of 2 to {len(devices)} devices, got {count}"
                )
                continue
            kind = CollectiveKind(one.collective)
            key = kind, count, frozenset(devices)
            if key in tables:
                context.wrong.append(f"{place}: these devices have a table of {kind} already")
                continue
            tables[key] = CollectiveTable(devices, count, _points(one, count), kind)
    return replace(topology, tables=(*tables.values(), *topology.tables))


def _group(
    topology: Topology, names: list[str] | None, place: str, context: BodyContext
) -> tuple[str, ...] | None:
    """Names of devices from names of devices and hosts and patterns, in the order of the devices;
    None where one is wrong.
    """
    devices = [device.name for device in topology.devices]
    if names is None:
        return tuple(devices)
    hosts = [host.name for host in topology.hosts]
    chosen: set[str] = set()
    sound = True
    for name in names:
        some = set(_matching(name, devices))
        at = set(_matching(name, hosts))
        some |= {device.name for device in topology.devices if device.host in at}
        if not some:
            context.wrong.append(f"{place}: unknown device or host {name!r}")
        elif some & chosen:
            context.wrong.append(f"{place}: {min(some & chosen)} is there twice")
        sound = sound and bool(some) and not some & chosen
        chosen |= some
    return tuple(name for name in devices if name in chosen) if sound else None


def _points(given: TableSchema, num_devices: int) -> tuple[tuple[int, float], ...]:
    """(bytes, time in s), ascending by bytes. The bandwidth of the bus is that of nccl-tests: what
    a ring sends of each byte, over the time.
    """
    n = num_devices
    times = dict(given.times or {})
    sent = (1 + (given.collective == "all-reduce")) * (n - 1) / n
    times |= {size: sent * size / rate for size, rate in (given.busbw or {}).items()}
    times |= {size: size / rate for size, rate in (given.algbw or {}).items()}
    if given.latency is not None:
        times[0] = given.latency
    return tuple(sorted(times.items()))
