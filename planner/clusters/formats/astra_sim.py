"""ASTRA-sim's network YAML (its analytical network) -> `Topology`.

    topology: [Ring, Switch]        one per dimension, the innermost first
    npus_count: [4, 2]              8 devices
    bandwidth: [200.0, 50.0]        GB/s of each link and direction
    latency: [50.0, 2000.0]         ns of each link

Devices that differ in one dimension only are joined by it: in a Ring each is linked to the next and
the last to the first, in FullyConnected each to each, in a Switch each to one switch, so that two
are two links apart. Between devices that differ in several dimensions messages pass other devices;
as a path here never runs through a device, each has a router of its own, on which its links meet
and which is as wide as all of them together. Each group of the innermost dimension is a host.

The routers choose the fastest path, where ASTRA-sim goes dimension by dimension.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

from planner.artefacts.topology import Device, DeviceType, Host, Link, Topology, too_many
from planner.clusters.links import both_ways
from planner.clusters.yaml.schema import yaml_of
from planner.support.errors import FileError, shown

FORM = "an ASTRA-sim network YAML"
FIELDS = ("topology", "npus_count", "bandwidth", "latency")
GB_PER_S, NS = 1e9, 1e-9
# In GB/s or ns: more is no figure of a link, and might not be a number in other units.
MAX_FIGURE = 1e100


@dataclass(frozen=True, slots=True)
class NetworkDimension:
    """One dimension: `count` devices joined by links of a shape."""

    shape: str
    count: int
    bandwidth_bytes_per_s: float
    latency_s: float


def looks_like(text: str) -> bool:
    """Whether a text has the keys of a network."""
    lines = {line.partition(":")[0].strip() for line in text.splitlines() if ":" in line}
    return {"topology", "npus_count"} <= lines


def parse(text: str, path: Path) -> tuple[NetworkDimension, ...]:
    """The dimensions, the innermost first.

    Raises:
        FileError: if it is no YAML, with the line, or has wrong fields, all of them.
    """
    plain = yaml_of(text, path)
    if not isinstance(plain, dict):
        raise FileError(f"{path}: expected {FORM}, a mapping, got {shown(plain)}")
    lines = {line.partition(":")[0].strip(): i for i, line in enumerate(text.splitlines(), start=1)}
    wrong = list(_wrong(plain))
    if wrong:
        places = [lines.get(field.partition("[")[0]) for field, _ in wrong]
        raise FileError(
            "\n".join(
                f"{path}: {'' if line is None else f'line {line}: '}{field}: {what}"
                for line, (field, what) in zip(places, wrong, strict=True)
            )
        )
    columns = zip(*(plain[field] for field in FIELDS), strict=True)
    dimensions = tuple(
        NetworkDimension(shape, count, rate * GB_PER_S, latency * NS)
        for shape, count, rate, latency in columns
    )
    size = too_many(*_parts(dimensions))
    if size is not None:
        raise FileError(f"{path}: npus_count: {size}")
    return dimensions


def _parts(dimensions: Sequence[NetworkDimension]) -> tuple[int, int, int]:
    """The numbers of devices, of hosts and switches together, and of links, before any is made."""
    count, inner = prod(one.count for one in dimensions), dimensions[0].count
    switches = sum(count // one.count for one in dimensions if one.shape == "Switch")
    pairs = sum(count // one.count * _num_pairs(one) for one in dimensions)
    routers = 0 if _is_direct(dimensions) else count
    return count, count // inner + switches + routers, 2 * (pairs + routers)


def _num_pairs(dimension: NetworkDimension) -> int:
    """How many pairs of ends a shape joins in one group."""
    n = dimension.count
    return {"Ring": n if n > 2 else 1, "FullyConnected": n * (n - 1) // 2}.get(dimension.shape, n)


def _is_direct(dimensions: Sequence[NetworkDimension]) -> bool:
    """Whether devices are linked without routers."""
    return len(dimensions) == 1 and dimensions[0].shape != "Ring"


def _wrong(plain: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields and the mistakes in them."""
    for field, (what, is_good) in _CHECKS.items():
        value = plain.get(field)
        if field not in plain:
            yield field, f"missing; expected a list, {what}, one for each dimension"
        elif not isinstance(value, list) or not value:
            yield field, f"expected a list, {what}, one for each dimension, got {shown(value)}"
        else:
            wrong = ((i, one) for i, one in enumerate(value) if not is_good(one))
            yield from ((f"{field}[{i}]", f"expected {what}, got {shown(one)}") for i, one in wrong)
    counts = {f: len(v) for f in FIELDS if isinstance(v := plain.get(f), list)}
    if len(counts) == len(FIELDS) and len(set(counts.values())) > 1:
        yield "topology", f"expected lists of one length, got {_lengths(counts)}"
    unknown = (str(field) for field in plain if field not in FIELDS)
    yield from ((field, f"unknown field; known: {', '.join(FIELDS)}") for field in unknown)


def _lengths(counts: Mapping[str, int]) -> str:
    """The lengths of lists, for messages."""
    return ", ".join(f"{count} of {field}" for field, count in counts.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < MAX_FIGURE


def to_topology(dimensions: Sequence[NetworkDimension], name: str, kind: DeviceType) -> Topology:
    """The devices `npu0`, `npu1`, .. in ASTRA-sim's order: the innermost dimension counts first."""
    count, inner = prod(one.count for one in dimensions), dimensions[0].count
    direct = _is_direct(dimensions)
    ends = [f"npu{i}" if direct else f"router{i}" for i in range(count)]
    switches = [] if direct else list(ends)
    links: list[Link] = []
    stride = 1
    for depth, dimension in enumerate(dimensions):
        for number, group in enumerate(_groups(count, dimension.count, stride)):
            middle = f"switch{depth}.{number}"
            pairs = SHAPES[dimension.shape]([ends[i] for i in group], middle)
            switches += [middle] if dimension.shape == "Switch" else []
            figures = dimension.bandwidth_bytes_per_s, dimension.latency_s, f"dim{depth}"
            links += [link for a, b in pairs for link in both_ways(a, b, *figures)]
        stride *= dimension.count
    if not direct:
        links += _router_links(ends, links)
    return Topology(
        name=name,
        device_types=(kind,),
        hosts=tuple(Host(f"host{h}") for h in range(count // inner)),
        devices=tuple(Device(f"npu{i}", kind.name, f"host{i // inner}") for i in range(count)),
        switches=tuple(switches),
        links=tuple(links),
        notes=(
            "links as in the ASTRA-sim network; each group of its innermost dimension is a host",
        ),
    )


def _groups(count: int, size: int, stride: int) -> list[list[int]]:
    """Devices that differ in one dimension only: those of a group are `stride` apart."""
    return [
        [first + k * stride for k in range(size)]
        for first in range(count)
        # The first one of a group has position 0 in the dimension.
        if first // stride % size == 0
    ]


def _router_links(routers: Sequence[str], links: Sequence[Link]) -> list[Link]:
    """The links between each device and its router, as wide as all links out of the router."""
    leaving: dict[str, float] = dict.fromkeys(routers, 0.0)
    for link in links:
        if link.source in leaving:
            leaving[link.source] += link.bandwidth_bytes_per_s
    return [
        link
        for i, router in enumerate(routers)
        for link in both_ways(f"npu{i}", router, leaving[router], 0.0, "router")
    ]


def _ring(ends: Sequence[str], middle: str) -> list[tuple[str, str]]:
    """Neighbours. Two of them have one link, as ASTRA-sim counts the bandwidth per link."""
    closed = [(ends[-1], ends[0])] if len(ends) > 2 else []
    return [*pairwise(ends), *closed]


def _each_to_each(ends: Sequence[str], middle: str) -> list[tuple[str, str]]:
    return list(combinations(ends, 2))


def _switch(ends: Sequence[str], middle: str) -> list[tuple[str, str]]:
    return [(end, middle) for end in ends]


# By ASTRA-sim's name of a shape: from the ends that it joins, and a switch's name, to pairs.
SHAPES: Mapping[str, Callable[[Sequence[str], str], list[tuple[str, str]]]] = {
    "Ring": _ring,
    "FullyConnected": _each_to_each,
    "Switch": _switch,
}
# What a value of a field has to be, in words and as a test.
_CHECKS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "topology": (" or ".join(SHAPES), lambda value: isinstance(value, str) and value in SHAPES),
    "npus_count": ("a whole number above 1", lambda value: type(value) is int and value > 1),
    "bandwidth": ("GB/s above 0", lambda value: _is_number(value) and value > 0),
    "latency": ("ns of at least 0", lambda value: _is_number(value) and value >= 0),
}
