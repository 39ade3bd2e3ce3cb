"""Where the vertices of a topology stand: which switches are inside a host, which join hosts."""

from collections.abc import Mapping
from dataclasses import replace

from planner.artefacts.topology import Topology
from planner.support.memo import remembered


@remembered
def neighbours(topology: Topology) -> Mapping[str, tuple[str, ...]]:
    """Per vertex, those that it is linked to in either direction, in the order of the links."""
    names = [*(d.name for d in topology.devices), *(h.name for h in topology.hosts)]
    beside: dict[str, dict[str, None]] = {name: {} for name in (*names, *topology.switches)}
    for link in topology.links:
        beside[link.source][link.target] = None
        beside[link.target][link.source] = None
    return {name: tuple(others) for name, others in beside.items()}


@remembered
def host_of_vertex(topology: Topology) -> Mapping[str, str | None]:
    """Per vertex, the host that it stands in, by name; None for a switch that joins hosts.

    A switch stands in a host if it is nearer to it, in links, than to every other host, and at most
    one link leads from it out of that host (a network card has one, a switch that joins racks has
    several).
    """
    beside = neighbours(topology)
    home: dict[str, str | None] = {device.name: device.host for device in topology.devices}
    home |= {host.name: host.name for host in topology.hosts}
    # Breadth first from all devices and hosts at once: a switch that is reached from vertices of
    # one host alone is nearest to it, one that two hosts reach at the same time stands in neither.
    ring = list(home)
    while ring:
        reached: dict[str, set[str | None]] = {}
        for vertex in ring:
            for other in beside[vertex]:
                if other not in home:
                    reached.setdefault(other, set()).add(home[vertex])
        home |= {v: owners.pop() if len(owners) == 1 else None for v, owners in reached.items()}
        ring = list(reached)
    for switch in topology.switches:
        home.setdefault(switch, None)

    def joins(switch: str) -> bool:
        return sum(home[other] != home[switch] for other in beside[switch]) > 1

    return home | dict.fromkeys(filter(joins, topology.switches))


def network_switch(topology: Topology) -> str | None:
    """The switch that joins hosts: of several the one with links into most of them, of equals the
    first; None if there is none.
    """
    home, beside = host_of_vertex(topology), neighbours(topology)
    joined = {
        switch: len({home[other] for other in beside[switch]} - {None})
        for switch in topology.switches
        if home[switch] is None
    }
    best = max(joined, key=lambda switch: joined[switch], default=None)
    return best if best is not None and joined[best] > 1 else None


def without_dead_ends(topology: Topology) -> Topology:
    """The topology without switches that lead nowhere, as no path takes them."""
    beside = neighbours(topology)
    gone = {switch for switch in topology.switches if len(beside[switch]) < 2}
    if not gone:
        return topology
    fewer = replace(
        topology,
        switches=tuple(switch for switch in topology.switches if switch not in gone),
        links=tuple(x for x in topology.links if not {x.source, x.target} & gone),
    )
    return without_dead_ends(fewer)
