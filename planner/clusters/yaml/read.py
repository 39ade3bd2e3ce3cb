"""Topologies on disk: YAML, written by people, with units -> `Topology`. Also the table of device
types and the presets that ship with the planner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner.artefacts.files import shipped
from planner.artefacts.strict import file_error
from planner.artefacts.topology import DeviceType, Topology, is_connected, problems
from planner.clusters.routes import routes, unlike_pairs
from planner.clusters.yaml.build import BodyContext, build
from planner.clusters.yaml.schema import (
    BodySchema,
    DeviceTableSchema,
    TopologySchema,
    checked_topology,
    yaml_of,
)
from planner.support.errors import FileError, OptionError, TopologyError
from planner.support.reading import MAX_CLUSTER_BYTES, read_document

TOPOLOGY_FORMAT = "planner-topology/1"
DEVICES_FORMAT = "planner-devices/1"
_ADVICE = "see the presets in topologies/ for examples"


@cache
def device_table() -> dict[str, DeviceType]:
    """The device types that ship with the planner, by name."""
    path = shipped("topologies") / "devices.yaml"
    try:
        table = DeviceTableSchema.model_validate(_fields(path, DEVICES_FORMAT))
    except ValidationError as error:
        raise file_error(path, error) from None
    return {name: one.named(name) for name, one in table.device_types.items()}


def _fields(path: Path, form: str) -> dict[str, Any]:
    return read_document(path, form, _ADVICE, yaml_of, MAX_CLUSTER_BYTES)


def shipped_device_type(name: str) -> DeviceType:
    """The device type of that name in the table that ships with the planner.

    Raises:
        OptionError: if there is none; it lists them.
    """
    known = device_table()
    if name not in known:
        raise OptionError(
            f"unknown device type {name!r}; known: {', '.join(sorted(known))}; give one of them,"
            " or measure on the device itself"
        )
    return known[name]


def preset_names() -> tuple[str, ...]:
    """The topologies that ship with the planner, by name."""
    files = shipped("topologies").glob("*.yaml")
    return tuple(sorted(path.stem for path in files if path.stem != "devices"))


def find_topology(name: str) -> Path:
    """The file of a topology: a path, else in ./topologies, else a preset that ships.

    Raises:
        FileError: if there is none; it lists the presets.
    """
    return _find(name, Path(), ())


def _find(name: str, folder: Path, without: tuple[Path, ...]) -> Path:
    """The file of a topology that is named in a folder.

    Args:
        without: files that it may not be; so a file of a preset's name may extend the preset.
    """
    circle = False
    wanted = [name] if name.endswith((".yaml", ".yml")) else [name, f"{name}.yaml"]
    for place in dict.fromkeys((folder, Path("topologies"), shipped("topologies"))):
        for file in wanted:
            path = place / file
            there = path.exists() and not path.is_dir()  # a pipe will do
            if there and path.resolve() not in without:
                return path
            circle = circle or there
    if circle:
        raise FileError(f"{name}: leads in a circle; name another topology")
    raise FileError(
        f"{name}: no such topology: neither a file, nor in topologies/, nor one of the presets"
        f" {', '.join(f'{preset}.yaml' for preset in preset_names())}"
    )


def read_topology(path: Path, num_devices: int | None = None) -> Topology:
    """The topology in a YAML file; device types that it does not define come from the shipped
    table.

    Args:
        num_devices: the devices asked for, which sizes `count: auto`; None gives one per core.

    Raises:
        FileError: if it is missing or malformed, all problems at once.
    """
    return _read(path, num_devices, ())


def _read(path: Path, num_devices: int | None, users: tuple[Path, ...]) -> Topology:
    """A topology that some files extend or use as a template, the outermost first."""
    fields = _fields(path, TOPOLOGY_FORMAT)
    schema, wrong = checked_topology(fields, path)
    file = _File(path, schema, num_devices, users)
    topology = replace(build(schema, "", file.context(file.types)), name=schema.name)
    topology = replace(topology, notes=tuple(dict.fromkeys((*file.notes, *schema.notes))))
    own = file.wrong or problems(topology) or _contradictions(topology)
    wrong += [f"{path}: {one}" for one in own]
    wrong += file.wrong_elsewhere
    if wrong:
        raise FileError("\n".join(dict.fromkeys(wrong)))
    return topology


def _contradictions(topology: Topology) -> tuple[str, ...]:
    """The mistakes of a topology, sound otherwise, that show only in its routes."""
    if not topology.levels and not is_connected(topology):
        try:
            routes(topology)
        except TopologyError as error:
            return (str(error),)
    wrong = []
    for table in topology.tables:
        why = unlike_pairs(topology, table)
        if why:
            wrong.append(
                f"tables: not all groups of {table.num_devices} of {len(table.devices)} devices are"
                f" alike: {why}; name the group that was measured under `groups`"
            )
    return tuple(wrong)


@dataclass
class _File:
    """A file that is being read.

    Attributes:
        users: files that it is read for, the outermost first.
        notes: of the topologies that it uses.
        wrong: mistakes in it, without its path.
        wrong_elsewhere: mistakes in other files, with their paths.
        made: the topologies that it extends and its templates, by name; None where unsound.
    """

    path: Path
    schema: TopologySchema
    num_devices: int | None
    users: tuple[Path, ...]
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    wrong_elsewhere: list[str] = field(default_factory=list)
    made: dict[str, Topology | None] = field(default_factory=dict)

    @property
    def types(self) -> dict[str, DeviceType]:
        """The device types that it may name."""
        own = self.schema.device_types
        return device_table() | {name: one.named(name) for name, one in own.items()}

    def context(self, types: Mapping[str, DeviceType], within: tuple[str, ...] = ()) -> BodyContext:
        """Where a body of it comes from; `within` names the templates that it is inside of."""
        return BodyContext(
            types=types,
            own_types=frozenset(self.schema.device_types),
            other=lambda place, name: self._other(place, name, within),
            num_devices=self.num_devices,
            wrong=self.wrong,
        )

    def _other(self, place: str, name: str, within: tuple[str, ...]) -> Topology | None:
        """A topology that is extended or is a template; None after its problems are noted. Each is
        made once: templates of templates would be made for every way that leads to them.
        """
        if name in within:
            self.wrong.append(f"{place}: {' -> '.join((*within, name))} leads in a circle")
            return None
        if name not in self.made:
            body = self.schema.templates.get(name)
            self.made[name] = (
                self._from_file(place, name) if body is None else self._template(name, body, within)
            )
        return self.made[name]

    def _template(self, name: str, body: BodySchema, within: tuple[str, ...]) -> Topology | None:
        before = len(self.wrong)
        topology = build(body, f"templates.{name}.", self.context(self.types, (*within, name)))
        return topology if len(self.wrong) == before else None

    def _from_file(self, place: str, name: str) -> Topology | None:
        users = (*self.users, self.path.resolve())
        try:
            path = _find(name, self.path.parent, users)
        except FileError as error:
            self.wrong.append(f"{place}: {error}")
            return None
        try:
            topology = _read(path, self.num_devices, users)
        except FileError as error:
            self.wrong.append(f"{place}: {name} is not sound:")
            self.wrong_elsewhere += str(error).splitlines()
            return None
        self.notes += topology.notes
        return topology
