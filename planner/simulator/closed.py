"""Arrays for `closed_kernels.py`: programs whose transfers never share bandwidth."""

from typing import NamedTuple

import numpy as np

from planner.clusters.routes import routes
from planner.schedules.actions import Code
from planner.schedules.dry_run import Wiring
from planner.simulator import closed_kernels as kernels
from planner.support.arrays import Floats, Ints
from planner.support.derived import derived
from planner.topology import Sharing, Topology


class Network(NamedTuple):
    """The routes of some ordered pairs of devices.

    Attributes:
        latency_s: (P,) of each pair.
        bytes_per_s: (P,) likewise.
        bounds: (P + 1,) where the links of a pair begin.
        links: the links of all pairs, indices into the topology's.
    """

    latency_s: Floats
    bytes_per_s: Floats
    bounds: Ints
    links: Ints


def network(topology: Topology, sources: Ints, targets: Ints) -> Network:
    """The routes from each source to its target, (P,) devices each."""
    known = routes(topology)
    paths = [known[p, q] for p, q in zip(sources.tolist(), targets.tolist(), strict=True)]
    return Network(
        known.latency_s[sources, targets],
        known.bandwidth_bytes_per_s[sources, targets],
        np.cumsum([0, *map(len, paths)]),
        np.array([link for path in paths for link in path], dtype=np.int64),
    )


@derived
def exclusive_links(topology: Topology) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """(L,) whether each link carries one transfer at a time."""
    return np.array([link.sharing is Sharing.EXCLUSIVE for link in topology.links], dtype=bool)


def gates(topology: Topology, ways: Network) -> tuple[Ints, Ints, int] | None:
    """Per pair, where its gates begin, (P + 1,), the gates of all pairs, and how many there are.
    None where a link is shared fairly by several pairs.
    """
    users = np.bincount(ways.links, minlength=len(topology.links))
    exclusive = exclusive_links(topology)
    if (users[~exclusive] > 1).any():
        return None
    held = exclusive & (users > 1)
    number = np.cumsum(held) - 1
    gated = held[ways.links]
    place = np.concatenate([[0], np.cumsum(gated)])[ways.bounds]
    return place, number[ways.links[gated]], int(held.sum())


def closed_case(
    topology: Topology, code: Code, wiring: Wiring, members: Ints, ways: Network,
    amount: Floats, post: Floats,
) -> kernels.Case | None:  # fmt: skip
    """What the kernel runs; None where transfers share bandwidth.

    Args:
        ways: of the pairs of the wiring.
        amount: (n,) time of each action in s, or the bytes of a receive.
        post: (n,) s that posting a send or receive takes.
    """
    found = gates(topology, ways)
    if found is None:
        return None
    place, gate, num_gates = found
    return kernels.Case(
        start=code.start, kind=code.kind, key=wiring.key, holds=wiring.holds, pair=wiring.pair,
        amount=amount, post=post, receives=wiring.receives, first=wiring.first,
        source=wiring.source, target=wiring.target, latency=ways.latency_s,
        rate=ways.bytes_per_s, place=place, gate=gate, num_gates=num_gates,
        num_keys=wiring.num_keys, members=members,
    )  # fmt: skip
