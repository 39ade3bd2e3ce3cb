"""Topologies on disk: YAML, written by people, with units -> `Topology`. Also the table of device
types and the presets that ship with the planner.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from planner import units
from planner.errors import FileError, TopologyError, UnitError
from planner.files import complaint, read_text, said, shipped, without_format
from planner.topology import Device, DeviceType, Host, Level, Link, Topology, problems, routes

TOPOLOGY_FORMAT = "planner-topology/1"
DEVICES_FORMAT = "planner-devices/1"


def _unit(parse: Callable[[str], float]) -> Callable[[object], float]:
    def convert(value: object) -> float:
        try:
            return parse(value if isinstance(value, str) else said(value))
        except UnitError as error:
            raise ValueError(str(error)) from None

    return convert


def _above_0(parse: Callable[[str], float]) -> Callable[[object], float]:
    def convert(value: object) -> float:
        found = _unit(parse)(value)
        if found <= 0:
            raise ValueError(f"expected more than 0, got {value!r}")
        return found

    return convert


def _or_auto(convert: Callable[[object], float]) -> BeforeValidator:
    return BeforeValidator(lambda value: value if value == "auto" else convert(value))


def _number_of(what: str) -> Callable[[object], int]:
    def convert(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"expected a whole number of {what} or auto, got {said(value)}")
        return value

    return convert


Bytes = Annotated[int, BeforeValidator(_above_0(units.parse_bytes))]
Rate = Annotated[float, BeforeValidator(_above_0(units.parse_rate))]
Seconds = Annotated[float, BeforeValidator(_unit(units.parse_seconds))]
Flops = Annotated[float, BeforeValidator(_above_0(units.parse_flops))]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _DeviceType(_Schema):
    memory: Bytes
    flops: dict[str, Flops]
    memory_bandwidth: Rate
    source: str

    @model_validator(mode="after")
    def _sound(self) -> Self:
        self.named("")
        return self

    def named(self, name: str) -> DeviceType:
        return DeviceType(name, self.memory, self.flops, self.memory_bandwidth, self.source)


class _Host(_Schema):
    name: str = "host0"
    cores: Annotated[int | str | None, _or_auto(_number_of("cores"))] = None
    memory: Annotated[int | str | None, _or_auto(_above_0(units.parse_bytes))] = None

    def resolved(self, name: str | None = None) -> Host:
        return Host(
            name or self.name,
            available_cores() if self.cores == "auto" else self.cores,  # type: ignore[arg-type]
            available_bytes() if self.memory == "auto" else self.memory,  # type: ignore[arg-type]
        )


class _Device(_Schema):
    name: str
    type: str
    host: str


class _Link(_Schema):
    between: list[str] | None = None
    source: str | None = Field(default=None, alias="from")
    target: str | None = Field(default=None, alias="to")
    bandwidth: Rate
    latency: Seconds

    def links(self) -> list[Link]:
        """Both directions of `between`, the one of `from` and `to`."""
        if self.between is not None and len(self.between) == 2 and not (self.source or self.target):
            a, b = self.between
            return [Link(p, q, self.bandwidth, self.latency) for p, q in ((a, b), (b, a))]
        if self.between is None and self.source is not None and self.target is not None:
            return [Link(self.source, self.target, self.bandwidth, self.latency)]
        raise ValueError(
            "expected `between: [a, b]` for both directions, or `from: a` with `to: b`"
        )


class _Level(_Schema):
    name: str
    count: Annotated[int | str, _or_auto(_number_of("members"))]
    bandwidth: Rate
    latency: Seconds


class _Topology(_Schema):
    name: str
    notes: list[str] = []
    device_types: dict[str, _DeviceType] = {}
    hosts: list[_Host] = []
    devices: list[_Device] = []
    switches: list[str] = []
    links: list[_Link] = []
    device: str | None = None
    host: _Host | None = None
    levels: list[_Level] = []


# What `levels` makes up, so that a file with levels may not give it.
_EXPLICIT_ONLY = ("devices", "hosts", "switches", "links")


class _DeviceTable(_Schema):
    device_types: dict[str, _DeviceType]


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _yaml(schema: type[_Schema], form: str, path: Path) -> Any:
    advice = "see the presets in topologies/ for examples"
    content = read_text(path, form, advice)
    try:
        plain = YAML(typ="safe", pure=True).load(content)
    except MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise FileError(f"{path}: {where}this is no YAML: {error.problem}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise FileError(f"{path}: this is no YAML: {why}") from None
    plain = without_format(plain, path, form, advice)
    try:
        return schema.model_validate(plain)
    except ValidationError as error:
        raise complaint(path, error) from None


@cache
def device_table() -> dict[str, DeviceType]:
    """The device types that ship with the planner, by name."""
    table = _yaml(_DeviceTable, DEVICES_FORMAT, shipped("topologies") / "devices.yaml")
    return {name: one.named(name) for name, one in table.device_types.items()}


def find_topology(name: str) -> Path:
    """The file of a topology: a path, else in ./topologies, else a preset that ships.

    Raises:
        FileError: if there is none; it lists the presets.
    """
    wanted = [name] if name.endswith((".yaml", ".yml")) else [name, f"{name}.yaml"]
    for folder in (Path(), Path("topologies"), shipped("topologies")):
        for file in wanted:
            if (folder / file).is_file():
                return folder / file
    presets = sorted(p.name for p in shipped("topologies").glob("*.yaml") if p.stem != "devices")
    raise FileError(
        f"{name}: no such topology: neither a file, nor in topologies/, nor one of the presets"
        f" {', '.join(presets)}"
    )


def read_topology(path: Path, num_devices: int | None = None) -> Topology:
    """The topology in a YAML file; device types that it does not define come from the shipped
    table.

    Args:
        num_devices: the devices asked for, which sizes `count: auto`; None gives one per core.

    Raises:
        FileError: if it is missing or malformed, all problems at once.
    """
    schema: _Topology = _yaml(_Topology, TOPOLOGY_FORMAT, path)
    expected = "expected either `levels` with `device`, or `devices` with `links`"
    if not schema.levels and not schema.devices:
        raise FileError(f"{path}: {expected}, got neither")
    given, ruler = schema.model_fields_set, "levels" if schema.levels else "devices"
    against = _EXPLICIT_ONLY if schema.levels else ("device", "host")
    clashing = [name for name in against if name in given]
    if clashing:
        raise FileError(
            f"{path}: {', '.join(clashing)}: {expected}, got {ruler}; leave out what is not meant"
        )
    try:
        found = _from_levels(schema, num_devices) if schema.levels else _explicit(schema)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None
    wrong = problems(found)
    if wrong:
        raise FileError("\n".join(f"{path}: {one}" for one in wrong))
    if not schema.levels:
        try:
            routes(found)
        except TopologyError as error:
            raise FileError(f"{path}: {error}") from None
    return found


def _types(schema: _Topology, used: set[str]) -> tuple[DeviceType, ...]:
    own = {name: one.named(name) for name, one in schema.device_types.items()}
    known = device_table() | own
    missing = sorted(used - set(known))
    if missing:
        raise ValueError(
            f"unknown device type {missing[0]!r}; known: {', '.join(sorted(known))};"
            " define others under `device_types`"
        )
    return tuple(known[name] for name in sorted(used))


def _explicit(schema: _Topology) -> Topology:
    links = []
    for i, link in enumerate(schema.links):
        try:
            links += link.links()
        except ValueError as error:
            raise ValueError(f"links[{i}]: {error}") from None
    return Topology(
        name=schema.name,
        device_types=_types(schema, {d.type for d in schema.devices}),
        hosts=tuple(h.resolved() for h in schema.hosts),
        devices=tuple(Device(d.name, d.type, d.host) for d in schema.devices),
        switches=tuple(schema.switches),
        links=tuple(links),
        notes=tuple(schema.notes),
    )


def _from_levels(schema: _Topology, num_devices: int | None) -> Topology:
    """Expands the shorthand: members of a level hang on a switch of that level, each by a link
    with half of the level's latency, so that two members are one latency apart.
    """
    if schema.device is None:
        raise ValueError("device: missing; `levels` needs the type of all devices")
    if schema.host is not None and "name" in schema.host.model_fields_set:
        raise ValueError("host.name: unknown field; `levels` names its hosts itself")
    # Devices are named after the innermost level.
    host_name = "machine" if schema.levels[0].name == "host" else "host"
    levels = []
    for level in schema.levels:
        count = (num_devices or available_cores()) if level.count == "auto" else int(level.count)
        levels.append(Level(level.name, count, level.bandwidth, level.latency))
    hosts: list[Host] = []
    devices: list[Device] = []
    switches: list[str] = []
    links: list[Link] = []

    def grow(depth: int, prefix: str) -> str:
        """The vertex that stands for one member of level `depth`."""
        if depth < 0:
            devices.append(
                Device(f"{levels[0].name}{len(devices)}", schema.device or "", hosts[-1].name)
            )
            return devices[-1].name
        if depth == 0:
            hosts.append((schema.host or _Host()).resolved(f"{host_name}{len(hosts)}"))
            vertex = hosts[-1].name
        else:
            vertex = f"switch{prefix}"
            switches.append(vertex)
        level = levels[depth]
        for i in range(level.count):
            member = grow(depth - 1, f"{prefix}.{i}")
            for a, b in ((member, vertex), (vertex, member)):
                links.append(Link(a, b, level.bandwidth_bytes_per_s, level.latency_s / 2))
        return vertex

    grow(len(levels) - 1, "")
    return Topology(
        name=schema.name,
        device_types=_types(schema, {schema.device}),
        hosts=tuple(hosts),
        devices=tuple(devices),
        switches=tuple(switches),
        links=tuple(links),
        levels=tuple(levels),
        notes=tuple(schema.notes),
    )
