"""The YAML of a topology as it stands in a file: fields, units, and every mistake in them."""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode

from planner.artefacts.strict import file_error
from planner.artefacts.topology import DeviceType, ProcessMemory
from planner.support import units
from planner.support.errors import FileError, UnitError, shown

# The largest number of anything in a file: nobody has more, and all members are written out.
MAX_NUMBER = 100_000


def _unit(parse: Callable[[str], float]) -> Callable[[object], float]:
    def convert(value: object) -> float:
        try:
            return parse(value if isinstance(value, str) else shown(value))
        except UnitError as error:
            raise ValueError(str(error)) from None

    return convert


def _above_0(parse: Callable[[str], float]) -> Callable[[object], float]:
    def convert(value: object) -> float:
        quantity = _unit(parse)(value)
        if quantity <= 0:
            raise ValueError(f"expected more than 0, got {value!r}")
        return quantity

    return convert


def _or_auto(convert: Callable[[object], float]) -> BeforeValidator:
    return BeforeValidator(lambda value: value if value == "auto" else convert(value))


def _number_of(what: str, least: int = 1) -> Callable[[object], int]:
    def convert(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"expected a whole number of {what}, got {shown(value)}")
        if value > MAX_NUMBER:
            raise ValueError(f"expected at most {MAX_NUMBER} {what}, got {shown(value)}")
        return value

    return convert


Bytes = Annotated[int, BeforeValidator(_above_0(units.parse_bytes))]
Size = Annotated[int, BeforeValidator(_unit(units.parse_bytes))]
Rate = Annotated[float, BeforeValidator(_above_0(units.parse_rate))]
Seconds = Annotated[float, BeforeValidator(_unit(units.parse_seconds))]
Flops = Annotated[float, BeforeValidator(_above_0(units.parse_flops))]
Count = Annotated[int, BeforeValidator(_number_of("members"))]
CountOrAuto = Annotated[int | str, _or_auto(_number_of("members or auto"))]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class ProcessSchema(_Schema):
    """Memory that a process takes of a device beside tensors."""

    context: Size = 0
    first_group: Size = 0
    group: Size = 0
    workspace: Size = 0

    def sound(self) -> ProcessMemory:
        """The same as an artefact."""
        return ProcessMemory(self.context, self.first_group, self.group, self.workspace)


class DeviceTypeSchema(_Schema):
    """A device type, without its name."""

    memory: Bytes
    flops: dict[str, Flops]
    memory_bandwidth: Rate
    source: str
    process: ProcessSchema = ProcessSchema()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        self.named("")
        return self

    def named(self, name: str) -> DeviceType:
        """The device type of this name."""
        return DeviceType(
            name, self.memory, self.flops, self.memory_bandwidth, self.source, self.process.sound()
        )


class HostLinkSchema(_Schema):
    """The links between the devices of a host and its memory."""

    bandwidth: Rate
    devices: Annotated[int, BeforeValidator(_number_of("devices"))] = 1
    memory: Bytes | None = None


class HostSchema(_Schema):
    """A host, several with numbered names, or copies of the topology that is the template."""

    name: str | None = None
    count: Count | None = None
    template: str | None = None
    cores: Annotated[int | str | None, _or_auto(_number_of("cores or auto"))] = None
    memory: Annotated[int | str | None, _or_auto(_above_0(units.parse_bytes))] = None
    host_link: HostLinkSchema | None = None


class DeviceSchema(_Schema):
    """A device, or several with numbered names."""

    name: str
    count: Count | None = None
    type: str | None = None
    host: str | None = None


class LinkSchema(_Schema):
    """Links between the vertices that two names or patterns stand for."""

    name: str = ""
    between: list[str] | None = None
    source: str | None = Field(default=None, alias="from")
    target: str | None = Field(default=None, alias="to")
    bandwidth: Rate | None = None
    latency: Seconds | None = None
    sharing: Literal["fair", "exclusive"] | None = None

    @model_validator(mode="after")
    def _ends(self) -> Self:
        one_way = (self.source is not None) + (self.target is not None)
        between = self.between is not None
        if one_way == 1 or (one_way and between) or len(self.between or "ab") != 2:
            raise ValueError(
                "expected `between: [a, b]` for both directions, or `from: a` with `to: b`"
            )
        return self


class LevelSchema(_Schema):
    """A level of a regular hierarchy."""

    name: str
    count: CountOrAuto | None = None
    bandwidth: Rate | None = None
    latency: Seconds | None = None


class TableSchema(_Schema):
    """Measured collectives, by the bytes of the largest buffer on each device; all-reduces, unless
    another is named.
    """

    collective: Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"] = "all-reduce"
    groups: Annotated[list[list[str]], Field(min_length=1)] | None = None
    num_devices: Annotated[int, BeforeValidator(_number_of("devices, at least 2", 2))] | None = None
    latency: Seconds | None = None
    times: dict[Bytes, Seconds] | None = None
    busbw: dict[Bytes, Rate] | None = None
    algbw: dict[Bytes, Rate] | None = None

    @field_validator("times", "busbw", "algbw", mode="wrap")
    @classmethod
    def _each_size_once(cls, given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        sizes = handler(given)
        if sizes is not None and len(sizes) < len(given):
            raise ValueError(f"expected each size once, got {', '.join(map(str, given))}")
        return sizes

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if sum(bool(one) for one in (self.times, self.busbw, self.algbw)) != 1:
            raise ValueError(
                "expected one of `times`, `busbw` and `algbw`, such as `busbw: {1 GB: 22.6 GB/s}`"
            )
        return self


class BodySchema(_Schema):
    """A description of devices and links, in a file or under `templates`."""

    extends: str | None = None
    hosts: list[HostSchema] = []
    devices: list[DeviceSchema] = []
    switches: list[str] = []
    links: list[LinkSchema] = []
    device: str | None = None
    host: HostSchema | None = None
    levels: list[LevelSchema] = []
    tables: list[TableSchema] = []


class TopologySchema(BodySchema):
    """A file."""

    name: str
    notes: list[str] = []
    device_types: dict[str, DeviceTypeSchema] = {}
    templates: dict[str, BodySchema] = {}


class DeviceTableSchema(_Schema):
    """The file of device types."""

    device_types: dict[str, DeviceTypeSchema]


def core_numbers() -> frozenset[int]:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(core_numbers())


def available_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def yaml_of(text: str, path: Path) -> object:
    """The value of a text in YAML.

    Args:
        path: where the text is from, for messages.

    Raises:
        FileError: if it is no YAML, with the line where that is known.
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise FileError(f"{path}: {where}this is no YAML: {error.problem}") from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: this is no YAML: {str(error).splitlines()[0]}") from None
    except TypeError:  # of ruamel.yaml, where a mapping has a mapping as a key
        raise FileError(
            f"{path}: expected names before colons, got a mapping or a list; look at the"
            " indentation, and for lines that begin with ?"
        ) from None


def key_lines(text: str) -> dict[str, int]:
    """The line of each key of a mapping, from 1; those that come from elsewhere have none.

    Args:
        text: sound YAML.
    """
    mapping = YAML(typ="safe", pure=True).compose(text)
    keys = [key for key, _ in mapping.value] if isinstance(mapping, MappingNode) else []
    return {key.value: key.start_mark.line + 1 for key in keys if isinstance(key.value, str)}


# Sound values that stand for wrong ones while the rest of a file is checked.
_SOUND = {
    "bandwidth": "1 GB/s", "latency": "0 s", "memory": "1 GB", "memory_bandwidth": "1 GB/s",
    "count": 1, "cores": 1, "sharing": "fair",
}  # fmt: skip
_SOUND_TYPE = {
    "memory": "1 GB", "flops": {"float32": "1 FLOP/s"}, "memory_bandwidth": "1 GB/s", "source": "",
}  # fmt: skip


def checked_topology(plain: Mapping[str, Any], path: Path) -> tuple[TopologySchema, list[str]]:
    """A file by its schema, and the mistakes in its fields, a line each. Wrong quantities are
    replaced by sound ones and unknown fields left out, so that the rest can be checked too.

    Raises:
        FileError: with these lines, if nothing can be made of the rest.
    """
    try:
        return TopologySchema.model_validate(plain), []
    except ValidationError as error:
        wrong, said_of_all = error.errors(), file_error(path, error)
    mended = deepcopy(dict(plain))
    for one in wrong:
        _mend(mended, one["loc"], one["type"])
    try:
        return TopologySchema.model_validate(mended), str(said_of_all).splitlines()
    except ValidationError:
        raise said_of_all from None


def _mend(plain: dict[str, Any], location: tuple[int | str, ...], kind: str) -> None:
    """Takes an unknown field out of a file, or replaces a wrong quantity by a sound one."""
    match location:  # what is wrong about the file as a whole, at (), stays
        case ("tables", *_):
            plain.pop("tables", None)
        case ("device_types", name, *_) if isinstance(plain["device_types"], dict):
            plain["device_types"][name] = _SOUND_TYPE
        case ("name",):
            plain["name"] = ""
        case (*outer, last):
            part = _part(plain, outer)
            if kind == "extra_forbidden" and isinstance(part, dict):
                part.pop(last, None)
            elif isinstance(part, dict) and last in _SOUND:
                part[last] = _SOUND[str(last)]


def _part(plain: Any, steps: Sequence[int | str]) -> Any:
    """A part of a file; None if there is none."""
    for step in steps:
        try:
            plain = plain[step]
        except (KeyError, IndexError, TypeError):
            return None
    return plain
