"""A topology as SVG. `topology_layout.py` has the positions; here lines are led and drawn.

A link upwards leaves its vertex at the top, runs up to a bus below the vertex that it leads to, and
along it; from the second row of devices or hosts on, it goes up beside them. Links between equals,
and all links in a host with a circle, are straight. Colour and width show the bandwidth: the
legend has all kinds, and labels stand where there is room.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.artefacts.topology import Topology
from planner.clusters.places import host_of_vertex
from planner.reports.drawing.svg import (
    PLAIN,
    document,
    element,
    escape,
    rectangle,
    text_width,
    words,
)
from planner.reports.drawing.topology_layout import GAP, Box, Layout, layout
from planner.reports.drawing.tree import Connection, connections, depths, heights
from planner.support.units import format_bytes

# For people who see colours differently: Okabe and Ito, 2008; the widest links first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
DEVICE_COLOURS = ("#dbe9f6", "#e4f2dc", "#fdeacc", "#f3e0ee", "#e6e6e6", "#fff7c2")
FRAME = "#f6f7f9"
NARROWEST, WIDEST = 1.0, 5.0
LABEL, LEGEND = 9.0, 11.0
# Up to this number of connections, each straight one may have a label; else one of a kind in each
# host.
MAX_LABELS = 32

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Line:
    """A connection as it is drawn.

    Attributes:
        shows: the connection.
        points: its corners.
        home: the host that it is in, None outside.
    """

    shows: Connection
    points: tuple[Point, ...]
    home: str | None


def svg(topology: Topology) -> str:
    """The picture: a whole SVG file, the same for the same topology."""
    places = layout(topology)
    lines = _lines(topology, places)
    kinds = _kinds(lines)
    legend, bottom = _legend(kinds, lines, places)
    width = max(places.width, *(text_width(kind, LEGEND) + 140 for kind in kinds), 200.0)
    body = [
        *_frames(topology, places),
        *(_stroke(line, *kinds[line.shows.label]) for line in _widest_first(lines)),
        *_nodes(topology, places),
        *_labels(lines, places),
        *legend,
    ]
    title = f"{topology.name}: {len(topology.devices)} devices"
    return document(title, width, bottom, body)


def _kinds(lines: Sequence[_Line]) -> Mapping[str, tuple[str, float]]:
    """Colour and width of the lines by their label, the widest first."""
    rates = {line.shows.label: line.shows.bandwidth_bytes_per_s for line in lines}
    order = sorted(rates, key=lambda label: (-rates[label], label))
    least, most = min(rates.values(), default=1.0), max(rates.values(), default=1.0)
    span = math.log(most / least)
    kinds = {}
    for i, label in enumerate(order):
        share = math.log(rates[label] / least) / span if span else 0.5
        width = NARROWEST + share * (WIDEST - NARROWEST)
        kinds[label] = (COLOURS[min(i, len(COLOURS) - 1)], width)
    return kinds


def _widest_first(lines: Sequence[_Line]) -> list[_Line]:
    return sorted(lines, key=lambda line: -line.shows.bandwidth_bytes_per_s)


# -------------------------------------------------------------------------------- lines


def _lines(topology: Topology, places: Layout) -> tuple[_Line, ...]:
    """The connections with their corners."""
    home, rank = host_of_vertex(topology), _ranks(topology)
    ordered = []
    for connection in connections(topology):
        low, high = sorted((connection.a, connection.b), key=lambda v: rank[v])
        ordered.append((connection, low, high))
    # A lane is a bus to one vertex for links of one kind. Those below vertices of one rank in one
    # host run beside each other, so that no two lines cover each other; six lanes have room.
    lanes: dict[tuple[str | None, int], list[tuple[str, str]]] = {}
    for high, label in dict.fromkeys((high, c.label) for c, _, high in ordered):
        lanes.setdefault((home[high], rank[high]), []).append((high, label))
    ups: dict[str, list[str]] = {}
    for _, low, high in ordered:
        if rank[low] < rank[high]:
            ups.setdefault(low, []).append(high)
    lines = []
    for connection, low, high in ordered:
        shared = home[low] if home[low] == home[high] else None
        lane = lanes[home[high], rank[high]].index((high, connection.label)) % 6
        if rank[low] == rank[high] or shared in places.round:
            ends = places.vertices[low], places.vertices[high]
            points: tuple[Point, ...] = tuple((box.x, box.y) for box in ends)
        else:
            # Lines up from one vertex start side by side, around its middle.
            port = 9.0 * (ups[low].index(high) - (len(ups[low]) - 1) / 2)
            points = _upwards(low, high, home[low] if shared is None else None, lane, port, places)
        lines.append(_Line(connection, points, shared))
    return tuple(lines)


def _ranks(topology: Topology) -> Mapping[str, int]:
    """How high each vertex stands: devices, switches of hosts, hosts, switches that join them."""
    # Hosts stand above any chain of switches in them.
    of_hosts = len(topology.switches) + 1
    rank = {device.name: 0 for device in topology.devices}
    rank |= {host.name: of_hosts for host in topology.hosts}
    rank |= {switch: of_hosts - 1 - depth for switch, depth in depths(topology).items()}
    return rank | {switch: of_hosts + height for switch, height in heights(topology).items()}


def _upwards(
    low: str, high: str, leaves: str | None, lane: int, port: float, places: Layout
) -> tuple[Point, ...]:
    """The corners of a line up.

    Args:
        leaves: the host that it leaves, if any.
        lane: which of the buses beside each other it takes.
        port: how far beside the middle of the lower vertex it starts.
    """
    start, end = places.vertices[low], places.vertices[high]
    x, points = start.x + port, [(start.x + port, start.top)]
    bus = end.bottom + 8 + 5 * lane
    # From a lower row of devices: up into the gap above its row, then into the gap beside it, so
    # that the line passes between the devices of the rows above.
    if places.rows.get(low, 0) > 0 and (leaves or low) not in places.round:
        y = start.top - 6 - 2 * lane
        points.append((x, y))
        x = start.left - GAP / 2 + port / 3
        points.append((x, y))
    # From a host in a lower line of the grid: the same way between the hosts of the lines above.
    if leaves is not None and places.lines[leaves] > 0:
        frame = places.frames[leaves]
        y = frame.top - 8 - 4 * lane
        points.append((x, y))
        x = frame.left - 10 - 4 * lane
        points.append((x, y))
    if end.left <= x <= end.right:
        return (*points, (x, end.bottom))
    return (*points, (x, bus), (end.x, bus), (end.x, end.bottom))


def _stroke(line: _Line, colour: str, width: float) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in line.points)
    tip = escape(f"{line.shows.a} - {line.shows.b}: {line.shows.label}")
    return element(
        "polyline",
        element("title", tip),
        points=corners,
        fill="none",
        stroke=colour,
        stroke_width=width,
        stroke_linejoin="round",
    )


# -------------------------------------------------------------------------------- things


def _outlined(box: Box, fill: str, stroke: str, corner: float = 4.0) -> str:
    return rectangle(box.left, box.top, box.width, box.height, fill, rx=corner, stroke=stroke)


def _frames(topology: Topology, places: Layout) -> Iterator[str]:
    for host in topology.hosts:
        frame = places.frames[host.name]
        yield _outlined(frame, FRAME, PLAIN, 6.0)
        if host.name in places.round:
            yield words(host.name, frame.left + 8, frame.top + 16, 11, "start", font_weight="bold")


def _nodes(topology: Topology, places: Layout) -> Iterator[str]:
    """Hosts, switches and devices; a host without links in the middle of a circle is left out."""
    linked = {v for link in topology.links for v in (link.source, link.target)}
    for host in topology.hosts:
        if host.name not in places.round:
            shared = [f"{host.cores} cores"] if host.cores else []
            shared += [format_bytes(host.memory_bytes)] if host.memory_bytes else []
            box = places.vertices[host.name]
            text = ", ".join([host.name, *shared])
            text = text if text_width(text, 11.0) < box.width else host.name
            yield _outlined(box, "#dde2e8", PLAIN)
            yield words(text, box.x, box.y + 4, 11, font_weight="bold")
        elif host.name in linked:
            yield from _switch(host.name, places.vertices[host.name])
    for switch in topology.switches:
        yield from _switch(switch, places.vertices[switch])
    types = list(dict.fromkeys(device.type for device in topology.devices))
    for device in topology.devices:
        box = places.vertices[device.name]
        colour = DEVICE_COLOURS[types.index(device.type) % len(DEVICE_COLOURS)]
        yield _outlined(box, colour, "#7f8c99")
        yield words(device.name, box.x, box.y - 3, 11.0)
        yield words(device.type, box.x, box.y + 11, 9.0)


def _switch(name: str, box: Box) -> Iterator[str]:
    yield _outlined(box, "#ececf4", "#5c5c7a", box.height / 2)
    yield words(name, box.x, box.y + 4, 11.0)


# -------------------------------------------------------------------------------- words


def _labels(lines: Sequence[_Line], places: Layout) -> Iterator[str]:
    """Bandwidths beside the lines, where they cover nothing."""
    taken = list(places.vertices.values())
    labelled: set[tuple[str | None, str]] = set()
    for line in lines:
        kind = (line.home, line.shows.label)
        if kind in labelled and (len(lines) > MAX_LABELS or len(line.points) > 2):
            continue
        width = text_width(line.shows.width, LABEL)
        for x, y in _spots(line.points):
            box = Box(x, y, width, LABEL + 2)
            if box.left > 0 and not any(box.meets(other) for other in taken):
                taken.append(box)
                labelled.add(kind)
                yield _outlined(box, FRAME, "none", 2.0)
                yield words(line.shows.width, x, y + LABEL / 2 - 1, LABEL)
                break


def _spots(points: Sequence[Point]) -> Iterator[Point]:
    """Where a label may stand on a line: on its longest pieces first, in the middle first."""
    pieces = sorted(pairwise(points), key=lambda piece: -math.dist(*piece))
    for (x, y), (to_x, to_y) in pieces:
        for share in (0.5, 0.36, 0.64, 0.25, 0.75):
            yield x + share * (to_x - x), y + share * (to_y - y)


def _legend(
    kinds: Mapping[str, tuple[str, float]], lines: Sequence[_Line], places: Layout
) -> tuple[list[str], float]:
    """A sample of each kind of link with its figures, and the lower end of the picture."""
    samples, y = [], places.height + 8
    for label, (colour, width) in kinds.items():
        count = sum(line.shows.label == label for line in lines)
        text = f"{label}  ({count} link{'s' * (count > 1)})"
        samples.append(
            element("line", x1=GAP, y1=y, x2=GAP + 36, y2=y, stroke=colour, stroke_width=width)
        )
        samples.append(words(text, GAP + 46, y + 4, LEGEND, "start"))
        y += 18
    return samples, y
