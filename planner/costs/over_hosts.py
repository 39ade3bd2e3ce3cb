"""All-reduces, all-gathers and reduce-scatters of groups with several devices on each of several
hosts, as libraries run them where every device has a card of its own, or a share of its host's:

    all-reduce      reduce-scatter inside each host; an all-reduce of each part over the hosts, on
                    the cards of the device that has it; all-gather inside
    all-gather      of each part over the hosts, then inside
    reduce-scatter  inside, then of each part over the hosts

With m devices on each host, m rings of one device per host run at once. Where they share a link,
such as the one card of a host, each has its part of it. A group is priced so where that moves large
buffers faster than one ring through all of its devices.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from planner.artefacts.topology import Topology
from planner.clusters.routes import chain, pair_widths, routes
from planner.support.memo import remembered

Rings = tuple[tuple[int, ...], ...]


@remembered(kept=65536)
def rows_by_host(topology: Topology, devices: tuple[int, ...]) -> Rings:
    """The devices of a group on each host, host by host; none unless there are several hosts, and
    on each of them equally many devices, and several.
    """
    on_host: dict[str, list[int]] = {}
    for device in sorted(devices):
        on_host.setdefault(topology.devices[device].host, []).append(device)
    rows = tuple(tuple(row) for row in on_host.values())
    even = len({len(row) for row in rows}) == 1
    return rows if even and len(rows) > 1 and len(rows[0]) > 1 else ()


@remembered(kept=65536)
def rings_over_hosts(topology: Topology, rows: Rings) -> tuple[float, float]:
    """Latency in s and bandwidth in bytes/s of each of the rings, a device per host, that run at
    once.

    Args:
        rows: as `rows_by_host` gives them.
    """
    order = chain(topology, tuple(row[0] for row in rows), closed=True)
    hosts = [next(h for h, row in enumerate(rows) if row[0] == device) for device in order]
    return at_once(topology, [[rows[h][k] for h in hosts] for k in range(len(rows[0]))])


def at_once(topology: Topology, rings: Sequence[Sequence[int]]) -> tuple[float, float]:
    """The largest latency, and the smallest bandwidth that a pair of neighbours has, of rings that
    run at once: a link that several pairs use is shared by them evenly.

    Args:
        rings: devices in the order of each ring.
    """
    hops = [hop for ring in rings for hop in _hops(ring)]
    known, (latency, _) = routes(topology), pair_widths(topology)
    users = Counter(link for hop in hops for link in known[hop])
    shares = (topology.links[link].bandwidth_bytes_per_s / n for link, n in users.items())
    return max(float(latency[hop]) for hop in hops), min(shares)


def _hops(ring: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pairs of neighbours in the direction of the ring."""
    yield from pairwise(ring)
    yield ring[-1], ring[0]
