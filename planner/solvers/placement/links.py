"""Links that transfers between several ordered pairs of devices share, and how long a transfer
occupies them.

The simulator lets the transfers over a fair link share its bandwidth, and those over an exclusive
link wait for each other, latency included. A schedule of single transfers cannot halve rates, so
here transfers wait for each other on every shared link:

    exclusive   for as long as the transfer lasts
    fair        for its bytes over the bandwidth of the link. The bytes of all transfers over the
                link take as long as when they share it; only their order is another one.

A link whose pairs together cannot fill it delays nobody, and is left out. A pair of devices has one
transfer at a time in any case.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from planner.artefacts.topology import Sharing, Topology
from planner.clusters.routes import bandwidth_bytes_per_s, routes

Pair = tuple[int, int]
"""An ordered pair of devices, source and target."""


@dataclass(frozen=True, slots=True)
class SharedLink:
    """A link on the routes of several pairs of devices.

    Attributes:
        pairs: these pairs, ascending.
        seconds_per_byte: inverse bandwidth of the link.
        exclusive: whether a transfer keeps it as long as it lasts.
    """

    pairs: tuple[Pair, ...]
    seconds_per_byte: float
    exclusive: bool = False


def shared_links(topology: Topology) -> tuple[SharedLink, ...]:
    """The links that delay transfers between several pairs; of links with the same pairs, the
    narrowest, and an exclusive one before a fair one.
    """
    pairs_of: dict[int, list[Pair]] = defaultdict(list)
    for pair, path in sorted(routes(topology).items()):
        for number in path:
            pairs_of[number].append(pair)
    narrowest: dict[tuple[Pair, ...], SharedLink] = {}
    for number, listed in sorted(pairs_of.items()):
        link, pairs = topology.links[number], tuple(listed)
        exclusive = link.sharing is Sharing.EXCLUSIVE
        if len(pairs) < 2 or not (exclusive or _fills(topology, number, pairs)):
            continue
        shared = SharedLink(pairs, 1.0 / link.bandwidth_bytes_per_s, exclusive)
        known = narrowest.get(pairs)
        if known is None or _longer(known) < _longer(shared):
            narrowest[pairs] = shared
    return tuple(narrowest.values())


def _fills(topology: Topology, number: int, pairs: Sequence[Pair]) -> bool:
    """Whether pairs with one transfer each can bring more bytes per second than a link takes."""
    brought = sum(bandwidth_bytes_per_s(topology, *pair) for pair in pairs)
    return brought > topology.links[number].bandwidth_bytes_per_s


def _longer(link: SharedLink) -> tuple[bool, float]:
    """Orders links with the same pairs by the time for which a transfer occupies them."""
    return link.exclusive, link.seconds_per_byte
