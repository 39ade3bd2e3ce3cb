"""A topology as its connections, and as a tree of text; `topology_svg.py` draws it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.artefacts.topology import Host, Link, Topology
from planner.clusters.places import host_of_vertex, neighbours
from planner.support.memo import remembered
from planner.support.printable import printable
from planner.support.units import format_bytes, format_rate, format_seconds

# A line of the tree names at most this number of other ends of links.
MAX_ENDS = 8


@dataclass(frozen=True, slots=True)
class Connection:
    """Two vertices that are linked, both directions together.

    Attributes:
        a: the vertex that the first of its links starts at.
        b: the other one.
        label: name, bandwidth and latency; of directions that differ, both.
        width: bandwidth alone; of directions that differ, both.
        bandwidth_bytes_per_s: of the wider direction.
    """

    a: str
    b: str
    label: str
    width: str
    bandwidth_bytes_per_s: float


def connections(topology: Topology) -> tuple[Connection, ...]:
    """The connections, in the order of the links."""
    between: dict[frozenset[str], list[Link]] = {}
    for link in topology.links:
        between.setdefault(frozenset((link.source, link.target)), []).append(link)
    return tuple(
        Connection(
            links[0].source,
            links[0].target,
            " / ".join(dict.fromkeys(map(_figures, links))),
            " / ".join(dict.fromkeys(format_rate(x.bandwidth_bytes_per_s) for x in links)),
            max(link.bandwidth_bytes_per_s for link in links),
        )
        for links in between.values()
    )


def _figures(link: Link) -> str:
    name = f"{link.name} " if link.name else ""
    return f"{name}{format_rate(link.bandwidth_bytes_per_s)}, {format_seconds(link.latency_s)}"


def _host_link_words(host: Host) -> Iterator[str]:
    link = host.host_link
    if link is not None:
        shared = f", {link.num_devices} devices on each link" if link.num_devices > 1 else ""
        yield f"host link {format_rate(link.bandwidth_bytes_per_s)}{shared}"


@dataclass(frozen=True, slots=True)
class _TreeLine:
    """A line of the tree and the lines below it.

    Attributes:
        name: of the vertex.
        words: its type or memory, and the figures of its link up.
        others: the ends of its further links, by their figures.
        below: the vertices that hang on it.
    """

    name: str
    words: tuple[str, ...]
    others: tuple[tuple[str, tuple[str, ...]], ...]
    below: tuple["_TreeLine", ...]

    def all(self) -> Iterator["_TreeLine"]:
        """The node and all nodes below it."""
        yield self
        for node in self.below:
            yield from node.all()

    @property
    def text(self) -> str:
        """The text behind the name."""
        parts = list(self.words)
        for figures, ends in self.others:
            more = f" and {len(ends) - MAX_ENDS} more" if len(ends) > MAX_ENDS else ""
            parts.append(f"to {' '.join(ends[:MAX_ENDS])}{more}: {figures}")
        return "; ".join(parts)

    @property
    def stem(self) -> str:
        """Its name without the number."""
        return self.name.rstrip("0123456789")

    @property
    def shape(self) -> object:
        """Equal for nodes that are drawn together: everything but the names. Ends of links inside
        the node are numbered, so that equal insides are equal.
        """
        index = {node.name: str(i) for i, node in enumerate(self.all())}

        def of(node: "_TreeLine") -> object:
            ends = ((f, tuple(index.get(end, end) for end in ends)) for f, ends in node.others)
            return node.words, tuple(ends), tuple(map(of, node.below))

        return of(self)


def tree(topology: Topology) -> str:
    """Hosts, switches, devices and links as a tree of text. Switches that join hosts are at the
    top; the further links of a vertex stand behind it. Runs of neighbours that are alike are drawn
    once. Control codes in names are escaped.
    """
    up = upward(topology)
    below: dict[str | None, list[str]] = {}
    names = [host.name for host in topology.hosts]
    for vertex in (*topology.switches, *names, *(device.name for device in topology.devices)):
        below.setdefault(up.get(vertex), []).append(vertex)
    label = {frozenset((one.a, one.b)): one.label for one in connections(topology)}
    devices = {device.name: device for device in topology.devices}
    hosts = {host.name: host for host in topology.hosts}
    rank = dict.fromkeys(names, 1) | dict.fromkeys(devices, 2)

    def node(vertex: str) -> _TreeLine:
        words = [devices[vertex].type] if vertex in devices else []
        if vertex in hosts:
            cores, memory = hosts[vertex].cores, hosts[vertex].memory_bytes
            words += [f"{cores} cores"] if cores else []
            words += [format_bytes(memory)] if memory else []
            words += _host_link_words(hosts[vertex])
        parent = up.get(vertex, "")
        words += [label[ends] for ends in [frozenset((vertex, parent))] if ends in label]
        others: dict[str, list[str]] = {}
        for other in neighbours(topology)[vertex]:
            listed_there = up.get(other) == vertex or rank.get(other, 0) > rank.get(vertex, 0)
            if other != parent and not listed_there:
                others.setdefault(label[frozenset((vertex, other))], []).append(other)
        ends = tuple((figures, tuple(names)) for figures, names in others.items())
        return _TreeLine(vertex, tuple(words), ends, tuple(map(node, below.get(vertex, ()))))

    count = len(topology.devices)
    lines = [f"{printable(topology.name)}: {count} device{'s' * (count > 1)}"]
    lines += _drawn([node(vertex) for vertex in below[None]], "")
    return "\n".join(lines)


@remembered
def upward(topology: Topology) -> Mapping[str, str]:
    """The vertex that each vertex hangs on; none for those at the top.

    A device hangs on the switch in its host that it is linked to, if there is one such switch, else
    on its host; a switch in a host on the one before it on the way to the host, else on the host;
    a host on the first switch that joins it to others; such a switch on one above it.
    """
    return {**_inside_hosts(topology), **_above_hosts(topology)}


def _inside_hosts(topology: Topology) -> Mapping[str, str]:
    """The same of devices, and of switches in hosts."""
    home, beside, switches = host_of_vertex(topology), neighbours(topology), {*topology.switches}

    def switches_in(host: str, vertex: str) -> list[str]:
        """The switches in a host that a vertex is linked to."""
        return [other for other in beside[vertex] if other in switches and home[other] == host]

    up: dict[str, str] = {}
    for device in topology.devices:
        inner = switches_in(device.host, device.name)
        up[device.name] = inner[0] if len(inner) == 1 else device.host
    for host in topology.hosts:
        ring = [host.name]
        for vertex in ring:
            new = [other for other in switches_in(host.name, vertex) if other not in up]
            up |= dict.fromkeys(new, vertex)
            ring += new
    for switch in topology.switches:
        host_name = home[switch]
        if host_name is not None:
            up.setdefault(switch, host_name)
    return up


def _above_hosts(topology: Topology) -> Mapping[str, str]:
    """The same of hosts, and of switches that join them."""
    home, beside, height_of = host_of_vertex(topology), neighbours(topology), heights(topology)
    inside: dict[str | None, list[str]] = {}
    for vertex, place in home.items():
        inside.setdefault(place, []).append(vertex)
    up: dict[str, str] = {}
    for host in topology.hosts:
        ends = [host.name, *inside[host.name]]
        above = [other for vertex in ends for other in beside[vertex] if home[other] is None]
        if above:
            up[host.name] = above[0]
    for switch, height in height_of.items():
        above = [other for other in beside[switch] if height_of.get(other, 0) == height + 1]
        if above:
            up[switch] = above[0]
    return up


@remembered
def depths(topology: Topology) -> Mapping[str, int]:
    """Per switch in a host, the number of switches between the two in the tree."""
    home, up = host_of_vertex(topology), upward(topology)
    depth = {}
    for switch in topology.switches:
        if home[switch] is not None:
            depth[switch], above = 0, up[switch]
            while above != home[switch]:
                depth[switch], above = depth[switch] + 1, up[above]
    return depth


@remembered
def heights(topology: Topology) -> Mapping[str, int]:
    """Per switch that joins hosts, its distance from them in links; 1 for the lowest."""
    home, beside = host_of_vertex(topology), neighbours(topology)
    outer = [switch for switch in topology.switches if home[switch] is None]
    ring = [s for s in outer if any(home[other] is not None for other in beside[s])]
    height = dict.fromkeys(ring, 1)
    while ring:
        higher = dict.fromkeys(
            o for s in ring for o in beside[s] if home[o] is None and o not in height
        )
        height |= dict.fromkeys(higher, max(height.values()) + 1)
        ring = list(higher)
    return height | {switch: 1 for switch in outer if switch not in height}


def _drawn(nodes: Sequence[_TreeLine], indent: str) -> list[str]:
    """The lines of siblings."""
    lines = []
    runs = [list(run) for _, run in groupby(nodes, key=lambda one: (one.stem, one.shape))]
    for i, run in enumerate(runs):
        last = i == len(runs) - 1
        branch, further = ("└─ ", "   ") if last else ("├─ ", "│  ")
        names = run[0].name if len(run) == 1 else f"{run[0].name} .. {run[-1].name} ({len(run)})"
        text = f"  {run[0].text}" if run[0].text else ""
        lines.append(f"{indent}{branch}{printable(names + text)}")
        if len(run) > 1 and run[0].below:
            lines.append(f"{indent}{further}each:")
        lines += _drawn(run[0].below, indent + further)
    return lines
