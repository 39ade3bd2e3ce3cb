"""Where the vertices of a topology are drawn: positions in a plane, in pixels.

Hosts are boxes in a grid. The devices of a host stand in rows below its switches, or on a circle
where some of them are linked to each other directly. Switches that join hosts stand above all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.artefacts.topology import Host, Topology
from planner.clusters.places import host_of_vertex, neighbours
from planner.clusters.routes import chain
from planner.reports.drawing.svg import text_width
from planner.reports.drawing.tree import depths, heights, upward
from planner.support.memo import remembered

# Devices in a row of a host.
MAX_IN_A_ROW = 8
# Room between things, in a host and between hosts; the latter has lines in it.
GAP, GUTTER = 16.0, 44.0
DEVICE_HEIGHT, SWITCH_HEIGHT, HEADER = 36.0, 22.0, 24.0
# Between a row and the next one, for the lines.
STEP = 40.0
ASPECT = 1.6


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its centre and its size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> float:
        """Its left edge."""
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        """Its upper edge."""
        return self.y - self.height / 2

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.y + self.height / 2

    def at(self, dx: float, dy: float) -> "Box":
        """The same, moved."""
        return Box(self.x + dx, self.y + dy, self.width, self.height)

    def meets(self, other: "Box") -> bool:
        """Whether the two have a point in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is.

    Attributes:
        vertices: devices, switches and hosts, by name; a host is where its links meet.
        frames: around a host and everything in it, by the host's name.
        round: the hosts whose devices stand on a circle.
        rows: by device, its row in the host, 0 for the upper one.
        lines: by host, the row of the grid.
        width: of the picture, in pixels.
        height: of the picture, in pixels.
    """

    vertices: Mapping[str, Box]
    frames: Mapping[str, Box]
    round: frozenset[str]
    rows: Mapping[str, int]
    lines: Mapping[str, int]
    width: float
    height: float


def layout(topology: Topology) -> Layout:
    """Positions of everything; the same topology gives the same ones."""
    insides = {host.name: _inside(topology, host) for host in topology.hosts}
    frames, lines = _grid(topology, {name: frame for name, (_, frame) in insides.items()})
    top = 30.0 + _switch_rows(topology) * (SWITCH_HEIGHT + STEP)
    frames = {name: frame.at(GUTTER, top) for name, frame in frames.items()}
    vertices: dict[str, Box] = {}
    for name, (boxes, _) in insides.items():
        frame = frames[name]
        vertices |= {v: box.at(frame.left, frame.top) for v, box in boxes.items()}
    vertices |= _outer(topology, vertices, frames, top)
    everything = [*vertices.values(), *frames.values()]
    shift = max(0.0, GAP - min(box.left for box in everything))
    vertices = {name: box.at(shift, 0.0) for name, box in vertices.items()}
    frames = {name: box.at(shift, 0.0) for name, box in frames.items()}
    everything = [*vertices.values(), *frames.values()]
    return Layout(
        vertices,
        frames,
        frozenset(host.name for host in topology.hosts if _is_round(topology, host)),
        {d: row for host in topology.hosts for d, row in _rows(topology, host).items()},
        lines,
        max(box.right for box in everything) + GUTTER,
        max(box.bottom for box in everything) + GAP,
    )


# -------------------------------------------------------------------------------- one host


def _devices(topology: Topology, host: Host) -> Sequence[str]:
    """The devices of a host, those of one switch beside each other."""
    return _devices_by_host(topology)[host.name]


@remembered
def _devices_by_host(topology: Topology) -> Mapping[str, Sequence[str]]:
    up = upward(topology)
    order = {switch: i for i, switch in enumerate(topology.switches)}
    names: dict[str, list[str]] = {host.name: [] for host in topology.hosts}
    for device in topology.devices:
        names[device.host].append(device.name)
    return {
        host: sorted(devices, key=lambda name: order.get(up[name], -1))
        for host, devices in names.items()
    }


def _is_round(topology: Topology, host: Host) -> bool:
    """Whether at least three of its devices are linked to each other directly."""
    devices = set(_devices(topology, host))
    beside = neighbours(topology)
    return sum(not devices.isdisjoint(beside[name]) for name in devices) > 2


def _rows(topology: Topology, host: Host) -> dict[str, int]:
    return {name: i // MAX_IN_A_ROW for i, name in enumerate(_devices(topology, host))}


def _inside(topology: Topology, host: Host) -> tuple[dict[str, Box], Box]:
    """The vertices in a host, relative to the upper left corner of its frame, and the frame."""
    drawn = _circle if _is_round(topology, host) else _stack
    boxes = drawn(topology, host)
    width = max(box.right for box in boxes.values()) + GAP
    height = max(box.bottom for box in boxes.values()) + GAP
    width = max(width, text_width(host.name, 13) + 2 * GAP)
    if not _is_round(topology, host):
        boxes[host.name] = Box(width / 2, HEADER / 2, width, HEADER)
    return boxes, Box(width / 2, height / 2, width, height)


def _device_width(topology: Topology, names: Iterable[str]) -> float:
    chosen = set(names)
    texts = [text for d in topology.devices if d.name in chosen for text in (d.name, d.type)]
    return max(64.0, *(text_width(text, 9.5) + 10 for text in texts))


def _switch_box(name: str) -> Box:
    return Box(0.0, 0.0, max(44.0, text_width(name, 11) + 14), SWITCH_HEIGHT)


def _inner(topology: Topology, host: Host) -> list[list[str]]:
    """The switches in a host, by their depth below it in the tree."""
    home = host_of_vertex(topology)
    depth = {s: depths(topology)[s] for s in topology.switches if home[s] == host.name}
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for switch, row in depth.items():
        rows[row].append(switch)
    return rows


def _stack(topology: Topology, host: Host) -> dict[str, Box]:
    """Rows: the switches of a host, the nearer to it the higher, and its devices."""
    names, above = _devices(topology, host), _inner(topology, host)
    width = _device_width(topology, names)
    y = HEADER + STEP + len(above) * (SWITCH_HEIGHT + STEP) + DEVICE_HEIGHT / 2
    boxes = {}
    for i, name in enumerate(names):
        row, column = divmod(i, MAX_IN_A_ROW)
        x = GAP + width / 2 + column * (width + GAP)
        boxes[name] = Box(x, y + row * (DEVICE_HEIGHT + GAP + 6), width, DEVICE_HEIGHT)
    for depth in reversed(range(len(above))):
        y = HEADER + STEP + depth * (SWITCH_HEIGHT + STEP) + SWITCH_HEIGHT / 2
        boxes |= _spread(topology, above[depth], boxes, y)
    return boxes


def _spread(
    topology: Topology, switches: Sequence[str], below: Mapping[str, Box], y: float
) -> dict[str, Box]:
    """Switches of one row, side by side, each over the middle of the vertices that hang on it."""
    up, beside = upward(topology), neighbours(topology)
    middle = sum(box.x for box in below.values()) / max(1, len(below))

    def wanted(switch: str) -> float:
        # The middle of its children in the tree; without any, of all that it is linked to.
        hanging = [box.x for name, box in below.items() if up.get(name) == switch]
        hanging = hanging or [below[name].x for name in beside[switch] if name in below]
        return sum(hanging) / len(hanging) if hanging else middle

    # From left to right in the order of the wanted places, each as near to its own as the one
    # before lets it: the row may grow to the right, and never overlaps.
    placed: dict[str, Box] = {}
    left = GAP
    for switch in sorted(switches, key=wanted):
        box = _switch_box(switch)
        x = max(wanted(switch), left + box.width / 2)
        placed[switch] = box.at(x, y)
        left = x + box.width / 2 + GAP
    return placed


def _circle(topology: Topology, host: Host) -> dict[str, Box]:
    """Devices on a circle, neighbours on the widest ring beside each other; the host in the
    middle, its switches between.
    """
    names = _devices(topology, host)
    index = {device.name: d for d, device in enumerate(topology.devices)}
    ring = chain(topology, tuple(sorted(index[name] for name in names)), closed=True)
    width = _device_width(topology, names)
    inner = _inner(topology, host)
    # The circumference has room for all devices and three gaps after each.
    radius = max(170.0 if inner else 96.0, len(names) * (width + 3 * GAP) / (2 * math.pi))
    middle_x = middle_y = 2 * radius
    boxes = {}
    for i, d in enumerate(ring):
        # Clockwise from the top, which is the middle between the last and the first device.
        angle = 2 * math.pi * (i + 0.5) / len(ring) - math.pi / 2
        boxes[topology.devices[d].name] = Box(
            middle_x + radius * math.cos(angle),
            middle_y + radius * math.sin(angle),
            width,
            DEVICE_HEIGHT,
        )
    up = upward(topology)
    for depth, switches in reversed(list(enumerate(inner))):
        # The deeper a switch, the farther out it stands, up to about half of the radius, in the
        # direction of its devices; spread evenly if these are all around.
        share = 0.3 + 0.12 * min(depth, 2)
        for i, switch in enumerate(switches):
            near = [boxes[name] for name in boxes if up.get(name) == switch]
            angle = 2 * math.pi * (i + 0.25) / len(switches)
            if near:
                dx = sum(box.x for box in near) / len(near) - middle_x
                dy = sum(box.y for box in near) / len(near) - middle_y
                angle = math.atan2(dy, dx) if math.hypot(dx, dy) > 1 else angle
            # Boxes are wider than high, so they need more room across.
            x = middle_x + 1.3 * share * radius * math.cos(angle)
            boxes[switch] = _switch_box(switch).at(x, middle_y + share * radius * math.sin(angle))
    boxes[host.name] = Box(middle_x, middle_y, text_width(host.name, 11) + 14, SWITCH_HEIGHT)
    left = min(box.left for box in boxes.values()) - GAP
    top = min(box.top for box in boxes.values()) - HEADER - GAP / 2
    return {name: box.at(-left, -top) for name, box in boxes.items()}


# -------------------------------------------------------------------------------- all hosts


def _grid(topology: Topology, frames: Mapping[str, Box]) -> tuple[dict[str, Box], dict[str, int]]:
    """The frames of the hosts in rows, and the row of each. Where several switches have hosts, the
    hosts of each are a column; else the length of the rows makes the picture wider than high.
    """
    wide = max(frame.width for frame in frames.values()) + GUTTER
    high = max(frame.height for frame in frames.values()) + GUTTER
    up, groups = upward(topology), dict[str | None, list[str]]()
    for name in frames:
        groups.setdefault(up.get(name), []).append(name)
    if len(groups) > 1:
        rows = [
            [column[i] if i < len(column) else None for column in groups.values()]
            for i in range(max(map(len, groups.values())))
        ]
    else:
        names, count = list[str | None](frames), len(frames)
        # columns x wide = ASPECT x rows x high, with columns x rows = count.
        columns = max(1, math.ceil(math.sqrt(count * ASPECT * high / wide)))
        # The same number of rows, with lengths as equal as possible.
        columns = math.ceil(count / math.ceil(count / columns))
        rows = [names[start : start + columns] for start in range(0, count, columns)]
    placed, lines = {}, {}
    y = 0.0
    for line, row in enumerate(rows):
        there = [(column, name) for column, name in enumerate(row) if name is not None]
        for column, name in there:
            placed[name] = frames[name].at(column * wide, y)
            lines[name] = line
        y += max(frames[name].height for _, name in there) + GUTTER
    return placed, lines


def _switch_rows(topology: Topology) -> int:
    return max(heights(topology).values(), default=0)


def _outer(
    topology: Topology, vertices: Mapping[str, Box], frames: Mapping[str, Box], top: float
) -> dict[str, Box]:
    """The switches that join hosts, in rows by their height, each over the vertices it joins."""
    placed: dict[str, Box] = {}
    height = heights(topology)
    home = host_of_vertex(topology)
    places = {v: frames[home[v] or ""] for v in vertices}
    for level in range(1, _switch_rows(topology) + 1):
        row = [switch for switch in topology.switches if height.get(switch) == level]
        y = top - STEP - (level - 1) * (SWITCH_HEIGHT + STEP) - SWITCH_HEIGHT / 2
        placed |= _spread(topology, row, {**places, **placed}, y)
    return placed
