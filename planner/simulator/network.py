"""The routes between devices as the compiled rules (`schedules/event_loop.py`) need them."""

from typing import NamedTuple

import numpy as np

from planner.artefacts.topology import Sharing, Topology
from planner.clusters.routes import routes
from planner.schedules.tasks import Paths
from planner.support.arrays import Bools, Floats, Ints
from planner.support.memo import remembered


class Network(NamedTuple):
    """The routes of some ordered pairs of devices.

    Attributes:
        latency_s: (P,) of each pair.
        bytes_per_s: (P,) of each pair, without other transfers.
        bounds: (P + 1,) where the links of each pair begin.
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


@remembered
def exclusive_links(topology: Topology) -> Bools:
    """(L,) whether each link carries one transfer at a time."""
    return np.array([link.sharing is Sharing.EXCLUSIVE for link in topology.links], dtype=bool)


def paths(topology: Topology, ways: Network) -> Paths:
    """What the transfers of some pairs run over: exclusive links of several pairs are gates, and
    fair ones are shared.
    """
    several = np.bincount(ways.links, minlength=len(topology.links)) > 1
    exclusive = exclusive_links(topology)
    gates, shared = several & exclusive, several & ~exclusive
    queued, sharing = gates[ways.links], _of_same_pair(shared[ways.links], ways.bounds)
    return Paths(
        latency_s=ways.latency_s,
        bytes_per_s=ways.bytes_per_s,
        first_place=_counted(queued)[ways.bounds],
        place_gate=(np.cumsum(gates) - 1)[ways.links[queued]],
        num_gates=int(gates.sum()),
        first_hop=_counted(sharing)[ways.bounds],
        hop_link=ways.links[sharing],
        link_bytes_per_s=np.array([link.bandwidth_bytes_per_s for link in topology.links]),
    )


def _counted(marked: Bools) -> Ints:
    """(n + 1,) how many are marked before each one, and in all."""
    return np.concatenate([[0], np.cumsum(marked)])


def _of_same_pair(marked: Bools, bounds: Ints) -> Bools:
    """Every link on the route of a pair that has a marked one."""
    before = _counted(marked)[bounds]
    return np.repeat(before[1:] > before[:-1], np.diff(bounds))
