"""Fitted pairs -> `Topology`: looks for the links, switches and shared network cards that explain
the latency and bandwidth of each pair (`link_fit.py`).

    experiments the transfers to run at once, which show whether a host's devices share a card
    infer       fits -> link graph, whose paths have the pairs' bandwidths again

Within a host the fastest group of devices that all see each other and the rest alike is put on a
switch, then the next one, and the remaining devices on the host itself; pairs in no such group (the
NVLinks of a mesh) get links of their own. Hosts meet in a network switch; devices that share their
host's network card reach it through a switch that is as wide as the card. Where no such graph
explains the measurements, every pair gets a link of its own, and the result has a note of it.

Nothing is measured here, but in `launcher/probe.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import inf

import numpy as np

from planner.artefacts.topology import (
    CPU,
    Device,
    DeviceType,
    Host,
    Link,
    Topology,
    problems,
)
from planner.clusters.links import components
from planner.clusters.probing.collectives import CollectiveTimes, tables_of, written_s
from planner.clusters.probing.link_fit import (
    LARGE_SPREAD,
    TOLERANCE,
    LinkClass,
    Pair,
    PairFit,
    classes,
    clusters,
    geometric_middle,
)
from planner.clusters.routes import routes
from planner.support.arrays import Floats
from planner.support.errors import TopologyError
from planner.support.units import format_rate, parse_rate

# Devices share a network card if their transfers at once get less than this share of the bandwidth
# that they get one by one.
OWN_CARDS = 0.85
NETWORK = "network"


@dataclass(frozen=True, slots=True)
class RankDevice:
    """One rank and the device that it computes on.

    Attributes:
        host: name of its host, the same for all ranks there.
        type: of the device.
        host_cores: CPU cores that the ranks of the host share; None where each has a GPU.
        host_memory_bytes: memory that they share; None where each has a GPU.
    """

    host: str
    type: DeviceType
    host_cores: int | None = None
    host_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SimultaneousTransfers:
    """Transfers out of one host that ran at once.

    Attributes:
        pairs: source and target of each.
        bytes_per_s: moved by all of them together.
    """

    pairs: tuple[Pair, ...]
    bytes_per_s: float


# -------------------------------------------------------------------------------- the graph


def experiments(hosts: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """The transfers to run at once: from each host with several devices, one transfer per device
    to a device elsewhere, to as many different ones as there are. A host is left out if it has only
    one device, or the others have only one together.

    Args:
        hosts: the host of each rank.

    >>> experiments(["a", "a", "b", "b"])
    (((0, 2), (1, 3)), ((2, 0), (3, 1)))
    """
    crowds = []
    for host in dict.fromkeys(hosts):
        here = [p for p, name in enumerate(hosts) if name == host]
        ranks = [[q for q, name in enumerate(hosts) if name == o] for o in dict.fromkeys(hosts)]
        others = [group for group in ranks if group != here]
        # One from each of the other hosts, then the second of each, ...
        depth = max(map(len, others), default=0)
        there = [group[i] for i in range(depth) for group in others if i < len(group)]
        if len(here) > 1 and len(there) > 1:
            crowds.append(tuple(zip(here, there, strict=False)))
    return tuple(crowds)


@dataclass(frozen=True, slots=True)
class Subtree:
    """A vertex of the graph and the devices that hang on it; a device alone is one, too.

    Attributes:
        name: of the vertex.
        latency_s: from the vertex to each of its devices, by index.
        width: the bandwidth of its links, as a multiple of the bandwidth that one of its devices
            has alone.
    """

    name: str
    latency_s: Mapping[int, float]
    width: float = 1.0


@dataclass(slots=True)
class _Builder:
    """The graph as it grows.

    Attributes:
        bandwidth: (K, K) of each pair in bytes/s, the same for pairs that agree.
        latency: (K, K) of each pair in s.
        links: by their ends.
        switches: in the order in which they were added.
    """

    bandwidth: Floats
    latency: Floats
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    switches: list[str] = field(default_factory=list)

    def put(self, source: str, target: str, bandwidth: float, latency: float) -> None:
        """Adds a link, with figures of three digits, as they are written."""
        self.links[source, target] = Link(
            source,
            target,
            parse_rate(format_rate(bandwidth)),
            written_s(latency),
        )

    def join(self, parts: list[Subtree], pairs: set[Pair], center: str, prefix: str) -> None:
        """Links subtrees so that the pairs of them have their bandwidths.

        Args:
            parts: at least one.
            pairs: of indices into parts; the other pairs are linked elsewhere.
            center: the vertex in the middle.
            prefix: of the names of further switches.
        """
        # Each round takes pairs away, by merging parts or by links of their own, so it ends.
        while pairs:
            star = self._star(parts, pairs)
            if star is not None:
                self._put_star(parts, pairs, center, star)
                return
            # No star explains all pairs: the fastest get a switch or links of their own, and the
            # others are looked at again.
            fastest = self._fastest(parts, pairs)
            groups = self._groups(parts, pairs, fastest)
            for group in groups:
                parts, pairs = self._merge(parts, pairs, group, f"{prefix}.switch")
            if not groups:
                for i, j in sorted(fastest):
                    p, q = parts[i], parts[j]
                    self.put(p.name, q.name, self._width(p, q), self._far(p, q))
                pairs = pairs - fastest

    def _block(self, table: Floats, p: Subtree, q: Subtree) -> Floats:
        return table[np.ix_(list(p.latency_s), list(q.latency_s))]

    def _width(self, p: Subtree, q: Subtree) -> float:
        return float(np.median(self._block(self.bandwidth, p, q)))

    def _far(self, p: Subtree, q: Subtree) -> float:
        """Latency between the vertices of two subtrees: the latency between their devices, less
        that inside the subtrees.
        """
        inner = np.add.outer([*p.latency_s.values()], [*q.latency_s.values()])
        return max(0.0, float(np.median(self._block(self.latency, p, q) - inner)))

    def _alike(self, p: Subtree, q: Subtree) -> bool:
        block = self._block(self.bandwidth, p, q)
        return float(block.max()) <= float(block.min()) * (1 + TOLERANCE)

    def _star(self, parts: list[Subtree], pairs: set[Pair]) -> tuple[Floats, Floats] | None:
        """Bandwidths out of each subtree and into it, such that the bandwidth of each pair is the
        smaller one of the two that it passes; None if there are none.
        """
        out, into = np.zeros(len(parts)), np.zeros(len(parts))
        # A pair is at most as wide as either of its two links, so each link is at least as wide as
        # its widest pair. The least such widths are the only candidates: wider links would only
        # widen pairs.
        for i, j in pairs:
            width = self._width(parts[i], parts[j])
            out[i], into[j] = max(out[i], width), max(into[j], width)
        for i, j in pairs:
            block = self._block(self.bandwidth, parts[i], parts[j])
            width = min(out[i], into[j])
            if width > block.min() * (1 + TOLERANCE) or width < block.max() / (1 + TOLERANCE):
                return None
        return out, into

    def _put_star(
        self, parts: list[Subtree], pairs: set[Pair], center: str, star: tuple[Floats, Floats]
    ) -> dict[int, float]:
        """Links the subtrees with a center.

        Returns:
            The latency in s from each subtree to the center, by index: least squares of the sums
            for all pairs.
        """
        ordered = sorted(pairs)
        rows = np.zeros((len(ordered), len(parts)))
        for row, (i, j) in enumerate(ordered):
            rows[row, i] = rows[row, j] = 1.0
        far = np.array([self._far(parts[i], parts[j]) for i, j in ordered])
        half = np.maximum(0.0, np.linalg.lstsq(rows, far, rcond=None)[0])
        for i, part in enumerate(parts):
            if star[0][i] > 0:
                self.put(part.name, center, star[0][i] * part.width, half[i])
            if star[1][i] > 0:
                self.put(center, part.name, star[1][i] * part.width, half[i])
        return {i: float(half[i]) for i in range(len(parts))}

    def _fastest(self, parts: list[Subtree], pairs: set[Pair]) -> set[Pair]:
        ordered = sorted(pairs)
        groups = clusters([self._width(parts[i], parts[j]) for i, j in ordered])
        return {ordered[i] for i in groups[-1]}

    def _groups(
        self, parts: list[Subtree], pairs: set[Pair], fastest: set[Pair]
    ) -> list[list[Subtree]]:
        """Groups of subtrees, never all of them, that a switch explains: the fastest pairs join
        them, each sees each other one, they are a star among themselves, and every subtree outside
        sees all of them alike.
        """
        groups = []
        for group in components(fastest):
            others = [k for k in range(len(parts)) if k not in group]
            inner = {(i, j) for i, j in pairs if i in group and j in group}
            members = [parts[i] for i in group]
            if (
                others
                and len(inner) == len(group) * (len(group) - 1)
                and self._star(members, _renumbered(inner, group)) is not None
                and all(self._sees_alike(parts, pairs, group, k) for k in others)
            ):
                groups.append(members)
        return groups

    def _sees_alike(
        self, parts: list[Subtree], pairs: set[Pair], group: list[int], other: int
    ) -> bool:
        whole = Subtree("", {p: 0.0 for i in group for p in parts[i].latency_s})
        return (
            all((i, other) in pairs and (other, i) in pairs for i in group)
            and self._alike(whole, parts[other])
            and self._alike(parts[other], whole)
        )

    def _merge(
        self, parts: list[Subtree], pairs: set[Pair], members: list[Subtree], prefix: str
    ) -> tuple[list[Subtree], set[Pair]]:
        """Puts members on a switch of their own, which stands for them from then on.

        Returns:
            The subtrees with the switch as the last one, and the pairs between them.
        """
        group = [i for i, part in enumerate(parts) if part in members]
        name = f"{prefix}{sum(one.startswith(prefix) for one in self.switches)}"
        self.switches.append(name)
        inner = _renumbered({(i, j) for i, j in pairs if i in group and j in group}, group)
        star = self._star(members, inner)
        assert star is not None  # `_groups` asked for it
        half = self._put_star(members, inner, name, star)
        far = {
            p: latency + half[i]
            for i, part in enumerate(members)
            for p, latency in part.latency_s.items()
        }
        # New indices: the others move up, every member becomes the switch. Pairs of members are
        # linked now, and fall out as pairs of the switch with itself.
        others = [k for k in range(len(parts)) if k not in group]
        merged = [*(parts[k] for k in others), Subtree(name, far)]
        new = {k: i for i, k in enumerate(others)} | dict.fromkeys(group, len(others))
        return merged, {(new[i], new[j]) for i, j in pairs if new[i] != new[j]}


def _renumbered(pairs: set[Pair], group: list[int]) -> set[Pair]:
    return {(group.index(i), group.index(j)) for i, j in pairs}


@dataclass(frozen=True, slots=True)
class Inferred:
    """The result.

    Attributes:
        topology: devices in rank order.
        classes: the pairs, merged where they agree.
        off: the largest difference of a path's bandwidth from its pair's fit, as a share.
    """

    topology: Topology
    classes: tuple[LinkClass, ...]
    off: float


def infer(
    name: str,
    ranks: Sequence[RankDevice],
    fits: Mapping[Pair, PairFit],
    together: Sequence[SimultaneousTransfers] = (),
    collectives: Sequence[CollectiveTimes] = (),
) -> Inferred:
    """The topology that explains the measurements.

    Args:
        name: of the topology.
        ranks: in the order of their numbers.
        fits: of every ordered pair of ranks.
        together: transfers that ran at once, out of each host that could be asked.
        collectives: they become the topology's tables.

    Raises:
        ValueError: if a pair is missing.
    """
    pairs = set(permutations(range(len(ranks)), 2))
    if set(fits) != pairs:
        raise ValueError(f"expected a fit for every pair, got {sorted(pairs ^ set(fits))} wrong")
    bare = _without_links(name, ranks, collectives)
    builder = _Builder(*_matrices(len(ranks), fits))
    own = {d.name: Subtree(d.name, {rank: 0.0}) for rank, d in enumerate(bare.devices)}
    for host in bare.hosts:
        parts = [own[d.name] for d in bare.devices if d.host == host.name]
        builder.join(parts, set(permutations(range(len(parts)), 2)), host.name, host.name)
    notes = _build_network(builder, bare, own, fits, together)
    topology = replace(bare, switches=tuple(builder.switches), links=tuple(builder.links.values()))
    if _off(topology, fits) > TOLERANCE:
        topology = replace(bare, links=_own_links(bare, builder))
        notes = ["no switches explain the measurements: every pair has a link of its own, which"
                 " shares its bandwidth with no other pair"]  # fmt: skip
    assert not problems(topology)
    return Inferred(
        replace(topology, notes=(*notes, _quality(fits))),
        classes(fits, _kinds(topology)),
        _off(topology, fits),
    )


def _without_links(
    name: str, ranks: Sequence[RankDevice], collectives: Sequence[CollectiveTimes]
) -> Topology:
    """The devices, their hosts and types, and the measured collectives."""
    devices = devices_of(ranks)
    hosts = {one.host: Host(one.host, one.host_cores, one.host_memory_bytes) for one in ranks}
    # Ranks may have measured one type each, a little differently: the first one's figures count.
    types = {one.type.name: one.type for one in reversed(ranks)}
    return Topology(
        name,
        tuple(types[known] for known in sorted(types)),
        tuple(hosts.values()),
        devices, (), (),
        tables=tuple(table for one in collectives for table in tables_of(one, devices)),
    )  # fmt: skip


def devices_of(ranks: Sequence[RankDevice]) -> tuple[Device, ...]:
    """The devices of all ranks, as the topology names them."""
    return tuple(
        Device(f"{CPU if one.type.name == CPU else 'gpu'}{rank}", one.type.name, one.host)
        for rank, one in enumerate(ranks)
    )


def _quality(fits: Mapping[Pair, PairFit]) -> str:
    """A note on the errors of the fits."""
    worst = max((one.error for one in fits.values()), default=0.0)
    spread = max((one.spread for one in fits.values()), default=0.0)
    disturbed = "; something else ran, or links change" if spread > LARGE_SPREAD else ""
    return (
        f"measured by planner topology probe: fitted within {worst:.0%}, repetitions within"
        f" {spread:.0%}{disturbed}"
    )


def _matrices(count: int, fits: Mapping[Pair, PairFit]) -> tuple[Floats, Floats]:
    """(K, K) bandwidth and latency of each pair; pairs that agree have one bandwidth."""
    bandwidth, latency = np.full((count, count), inf), np.zeros((count, count))
    ordered = sorted(fits)
    for group in clusters([fits[pair].bandwidth_bytes_per_s for pair in ordered]):
        width = geometric_middle([fits[ordered[i]].bandwidth_bytes_per_s for i in group])
        for i in group:
            bandwidth[ordered[i]], latency[ordered[i]] = width, fits[ordered[i]].latency_s
    return bandwidth, latency


def _build_network(
    builder: _Builder,
    bare: Topology,
    own: Mapping[str, Subtree],
    fits: Mapping[Pair, PairFit],
    together: Sequence[SimultaneousTransfers],
) -> list[str]:
    """Links the hosts.

    Returns:
        Notes on assumptions that were made.
    """
    if len(bare.hosts) < 2:
        return []
    host_of = [device.host for device in bare.devices]
    parts, notes, sits = [], [], []
    for host in bare.hosts:
        here = [rank for rank, name in enumerate(host_of) if name == host.name]
        gain, was_measured = _gain(here, fits, together)
        if len(here) > 1 and not was_measured:
            notes.append(f"{host.name}: that its devices share a network card is assumed")
        if len(here) == 1 or gain >= OWN_CARDS * len(here):
            parts += [own[bare.devices[rank].name] for rank in here]
            sits += [host.name] * len(here)
            continue
        card = f"{host.name}.nic"
        builder.switches.append(card)
        for rank in here:
            # To the card a device is as wide as its widest transfer to another host; the card
            # itself, a subtree of its own, is `gain` times as wide.
            elsewhere = [q for q, name in enumerate(host_of) if name != host.name]
            device = bare.devices[rank].name
            builder.put(device, card, builder.bandwidth[rank, elsewhere].max(), 0.0)
            builder.put(card, device, builder.bandwidth[elsewhere, rank].max(), 0.0)
        parts.append(Subtree(card, dict.fromkeys(here, 0.0), gain))
        sits.append(host.name)
    # Pairs within a host are linked already.
    pairs = {(i, j) for i, j in permutations(range(len(parts)), 2) if sits[i] != sits[j]}
    builder.switches.append(NETWORK)
    builder.join(parts, pairs, NETWORK, NETWORK)
    if not any(NETWORK in ends for ends in builder.links):
        builder.switches.remove(NETWORK)
    return notes


def _gain(
    here: Sequence[int], fits: Mapping[Pair, PairFit], together: Sequence[SimultaneousTransfers]
) -> tuple[float, bool]:
    """The bandwidth of all devices of a host at once, as a multiple of that of one alone, and
    whether it was measured.
    """
    for one in together:
        if one.pairs[0][0] in here:
            alone = np.median([fits[pair].bandwidth_bytes_per_s for pair in one.pairs])
            share = one.bytes_per_s / float(alone) / len(one.pairs)
            return (len(here) if share >= OWN_CARDS else max(1.0, share * len(one.pairs))), True
    return 1.0, False


def _off(topology: Topology, fits: Mapping[Pair, PairFit]) -> float:
    """The largest difference of a path's bandwidth from its pair's fit, as a share of it; inf if
    a path is missing.
    """
    if not fits:
        return 0.0
    try:
        width = routes(topology).bandwidth_bytes_per_s
    except TopologyError:
        return inf
    ratios = [width[pair] / one.bandwidth_bytes_per_s for pair, one in fits.items()]
    return float(max(max(ratios) - 1, 1 / min(ratios) - 1))


def _own_links(bare: Topology, builder: _Builder) -> tuple[Link, ...]:
    flat = _Builder(builder.bandwidth, builder.latency)
    for p, q in permutations(range(len(bare.devices)), 2):
        ends = bare.devices[p].name, bare.devices[q].name
        flat.put(*ends, builder.bandwidth[p, q], builder.latency[p, q])
    return tuple(flat.links.values())


def _kinds(topology: Topology) -> dict[Pair, str]:
    """The course of the path of each pair of devices, in words."""
    if len(topology.devices) < 2:
        return {}
    hosts = {host.name for host in topology.hosts}
    kinds = {}
    for p, q in permutations(range(len(topology.devices)), 2):
        path = [topology.links[i] for i in routes(topology)[p, q]]
        inner = {link.target for link in path[:-1]}
        if topology.devices[p].host != topology.devices[q].host:
            kinds[p, q] = "other host"
        elif not inner:
            kinds[p, q] = "link of their own"
        elif not inner & hosts:
            kinds[p, q] = "same switch"
        else:
            kinds[p, q] = "same host" if len(inner) == 1 else "other switch of the host"
    return kinds
