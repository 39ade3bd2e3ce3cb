"""A topology as SVG. `pictures_layout.py` says where things are; here lines are led and drawn.

A link upwards leaves its vertex at the top, runs up to a bus below the vertex that it leads to, and
along it; from the second row of devices or hosts on, it goes up beside them. Links between equals,
and all links in a host with a circle, are straight. Colour and width say how wide a link is: the
legend has all kinds, and labels stand where there is room.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from planner.clusters.places import homes
from planner.drawing.topology_layout import GAP, Box, Layout, layout, text_width
from planner.drawing.tree import Pair, heights, pairs, upward
from planner.topology import Topology
from planner.units import format_bytes

# For people who see colours differently: Okabe and Ito, 2008; the widest links first.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#666666")
DEVICE_COLOURS = ("#dbe9f6", "#e4f2dc", "#fdeacc", "#f3e0ee", "#e6e6e6", "#fff7c2")
INK, PAPER, FRAME, PLAIN = "#1a1a1a", "#ffffff", "#f6f7f9", "#c9cfd6"
FONT = "font-family='Helvetica, Arial, sans-serif'"
NARROWEST, WIDEST = 1.0, 5.0
LABEL, LEGEND = 9.0, 11.0
# Up to so many connections, each straight one may have a label; else one of a kind in each host.
MOST_LABELS = 32

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Line:
    """A connection as it is drawn.

    Attributes:
        pair: what it shows.
        points: its corners.
        home: the host that it is in, None outside.
    """

    pair: Pair
    points: tuple[Point, ...]
    home: str | None


def svg(topology: Topology) -> str:
    """The picture: a whole SVG file, the same for the same topology. All colours are its own, so
    that it reads on light and on dark pages.
    """
    places = layout(topology)
    lines = _lines(topology, places)
    kinds = _kinds(lines)
    legend, bottom = _legend(kinds, lines, places)
    width = max(places.width, *(text_width(kind, LEGEND) + 140 for kind in kinds), 200.0)
    title = f"{topology.name}: {len(topology.devices)} devices"
    body = [
        f"<rect width='{width:.0f}' height='{bottom:.0f}' fill='{PAPER}'/>",
        *_frames(topology, places),
        *(_stroke(line, *kinds[line.pair.label]) for line in _widest_first(lines)),
        *_nodes(topology, places),
        *_labels(lines, places),
        *legend,
    ]
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{bottom:.0f}'"
        f" viewBox='0 0 {width:.0f} {bottom:.0f}' role='img' {FONT}>"
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *body, "</svg>"]) + "\n"


def _kinds(lines: Sequence[_Line]) -> Mapping[str, tuple[str, float]]:
    """Colour and width of the lines by their label, the widest first."""
    rates = {line.pair.label: line.pair.bandwidth_bytes_per_s for line in lines}
    order = sorted(rates, key=lambda label: (-rates[label], label))
    least, most = min(rates.values(), default=1.0), max(rates.values(), default=1.0)
    span = math.log(most / least)
    found = {}
    for i, label in enumerate(order):
        share = math.log(rates[label] / least) / span if span else 0.5
        width = NARROWEST + share * (WIDEST - NARROWEST)
        found[label] = (COLOURS[min(i, len(COLOURS) - 1)], width)
    return found


def _widest_first(lines: Sequence[_Line]) -> list[_Line]:
    return sorted(lines, key=lambda line: -line.pair.bandwidth_bytes_per_s)


# -------------------------------------------------------------------------------- lines


def _lines(topology: Topology, places: Layout) -> tuple[_Line, ...]:
    """The connections with their corners."""
    home, rank = homes(topology), _ranks(topology)
    ordered = []
    for pair in pairs(topology):
        low, high = sorted((pair.a, pair.b), key=lambda v: rank[v])
        ordered.append((pair, low, high))
    # Lines to different vertices, or of different kinds, keep off each other.
    buses = list(dict.fromkeys((high, pair.label) for pair, _, high in ordered))
    lanes: dict[tuple[str | None, int], list[tuple[str, str]]] = {}
    for high, label in buses:
        lanes.setdefault((home[high], rank[high]), []).append((high, label))
    ups: dict[str, list[str]] = {}
    for _, low, high in ordered:
        if rank[low] < rank[high]:
            ups.setdefault(low, []).append(high)
    found = []
    for pair, low, high in ordered:
        own = home[low] if home[low] == home[high] else None
        lane = lanes[home[high], rank[high]].index((high, pair.label)) % 6
        if rank[low] == rank[high] or own in places.round:
            ends = places.vertices[low], places.vertices[high]
            points: tuple[Point, ...] = tuple((box.x, box.y) for box in ends)
        else:
            port = 9.0 * (ups[low].index(high) - (len(ups[low]) - 1) / 2)
            points = _upwards(low, high, home[low] if own is None else None, lane, port, places)
        found.append(_Line(pair, points, own))
    return tuple(found)


def _ranks(topology: Topology) -> Mapping[str, int]:
    """How high each vertex stands: devices, switches of hosts, hosts, switches that join them."""
    up, home = upward(topology), homes(topology)
    deepest = len(topology.switches) + 1
    found = {device.name: 0 for device in topology.devices}
    found |= {host.name: deepest for host in topology.hosts}
    for switch in topology.switches:
        if home[switch] is not None:
            depth, above = 1, up[switch]
            while above != home[switch]:
                depth, above = depth + 1, up[above]
            found[switch] = deepest - depth
    return found | {switch: deepest + height for switch, height in heights(topology).items()}


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
    if places.rows.get(low, 0) > 0 and (leaves or low) not in places.round:
        y = start.top - 6 - 2 * lane
        points.append((x, y))
        x = start.left - GAP / 2 + port / 3
        points.append((x, y))
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
    tip = escape(f"{line.pair.a} - {line.pair.b}: {line.pair.label}")
    return (
        f"<polyline points='{corners}' fill='none' stroke='{colour}' stroke-width='{width:.1f}'"
        f" stroke-linejoin='round'><title>{tip}</title></polyline>"
    )


# -------------------------------------------------------------------------------- things


def _rectangle(box: Box, fill: str, stroke: str, corner: float = 4.0) -> str:
    return (
        f"<rect x='{box.left:.1f}' y='{box.top:.1f}' width='{box.width:.1f}'"
        f" height='{box.height:.1f}' rx='{corner:.0f}' fill='{fill}' stroke='{stroke}'/>"
    )


def _words(text: str, x: float, y: float, size: float, more: str = "text-anchor='middle'") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{INK}' {more}>"
        f"{escape(text)}</text>"
    )


def _frames(topology: Topology, places: Layout) -> Iterator[str]:
    for host in topology.hosts:
        frame = places.frames[host.name]
        yield _rectangle(frame, FRAME, PLAIN, 6.0)
        if host.name in places.round:
            start = "text-anchor='start' font-weight='bold'"
            yield _words(host.name, frame.left + 8, frame.top + 16, 11.0, start)


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
            yield _rectangle(box, "#dde2e8", PLAIN)
            yield _words(text, box.x, box.y + 4, 11.0, "text-anchor='middle' font-weight='bold'")
        elif host.name in linked:
            yield from _switch(host.name, places.vertices[host.name])
    for switch in topology.switches:
        yield from _switch(switch, places.vertices[switch])
    types = list(dict.fromkeys(device.type for device in topology.devices))
    for device in topology.devices:
        box = places.vertices[device.name]
        colour = DEVICE_COLOURS[types.index(device.type) % len(DEVICE_COLOURS)]
        yield _rectangle(box, colour, "#7f8c99")
        yield _words(device.name, box.x, box.y - 3, 11.0)
        yield _words(device.type, box.x, box.y + 11, 9.0)


def _switch(name: str, box: Box) -> Iterator[str]:
    yield _rectangle(box, "#ececf4", "#5c5c7a", box.height / 2)
    yield _words(name, box.x, box.y + 4, 11.0)


# -------------------------------------------------------------------------------- words


def _labels(lines: Sequence[_Line], places: Layout) -> Iterator[str]:
    """Bandwidths beside the lines, where they cover nothing."""
    taken = list(places.vertices.values())
    said: set[tuple[str | None, str]] = set()
    for line in lines:
        key = (line.home, line.pair.label)
        if key in said and (len(lines) > MOST_LABELS or len(line.points) > 2):
            continue
        width = text_width(line.pair.width, LABEL)
        for x, y in _spots(line.points):
            box = Box(x, y, width, LABEL + 2)
            if box.left > 0 and not any(box.meets(other) for other in taken):
                taken.append(box)
                said.add(key)
                yield _rectangle(box, FRAME, "none", 2.0)
                yield _words(line.pair.width, x, y + LABEL / 2 - 1, LABEL)
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
    """A sample of each kind of link with its figures, and where the picture ends."""
    found, y = [], places.height + 8
    for label, (colour, width) in kinds.items():
        count = sum(line.pair.label == label for line in lines)
        text = f"{label}  ({count} link{'s' * (count > 1)})"
        found.append(
            f"<line x1='{GAP:.0f}' y1='{y:.1f}' x2='{GAP + 36:.0f}' y2='{y:.1f}'"
            f" stroke='{colour}' stroke-width='{width:.1f}'/>"
        )
        found.append(_words(text, GAP + 46, y + 4, LEGEND, "text-anchor='start'"))
        y += 18
    return found, y
