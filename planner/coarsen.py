"""A graph made smaller, so that its downsets can be counted: operators that run together anyway
are merged into blocks.

Merging is only ever along an edge whose contraction leaves a DAG: a block whose only consumer is
the next, or whose only source is the previous one. The cheapest merger comes first, so blocks
end up with similar times and heavy operators stay alone. Cuts inside a block are lost, which is
why bounds are computed on the graph itself.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.order import count_downsets


@dataclass(frozen=True, slots=True)
class Coarsening:
    """Blocks of nodes and the DAG between them.

    Attributes:
        blocks: per block, its nodes ascending; blocks are in topological order.
        predecessors: per block, the blocks that feed it, ascending.
        num_downsets: of the DAG of blocks.
    """

    blocks: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    num_downsets: int


class _Blocks:
    """The DAG of blocks while it is being contracted."""

    def __init__(self, predecessors: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        self.nodes = {v: [v] for v in range(len(predecessors))}
        self.weight = dict(enumerate(weights))
        self.before = {v: set(feeds) for v, feeds in enumerate(predecessors)}
        self.after: dict[int, set[int]] = {v: set() for v in range(len(predecessors))}
        for v, feeds in enumerate(predecessors):
            for u in feeds:
                self.after[u].add(v)
        self.heap: list[tuple[float, int, int]] = []
        for v in range(len(predecessors)):
            self._offer(v)

    def _offer(self, v: int) -> None:
        """Queues the mergers of v that leave a DAG for sure."""
        if len(self.before[v]) == 1:
            (u,) = self.before[v]
            heapq.heappush(self.heap, (self.weight[u] + self.weight[v], u, v))
        if len(self.after[v]) == 1:
            (w,) = self.after[v]
            heapq.heappush(self.heap, (self.weight[v] + self.weight[w], v, w))

    def cheapest(self) -> tuple[int, int]:
        """The blocks to merge next."""
        while self.heap:
            weight, u, v = heapq.heappop(self.heap)
            if u not in self.nodes or v not in self.nodes or v not in self.after[u]:
                continue
            still = weight == self.weight[u] + self.weight[v]
            if still and (len(self.before[v]) == 1 or len(self.after[u]) == 1):
                return u, v
        # Neighbours in a topological order have nothing between them.
        order = self.order()
        return min(pairwise(order), key=lambda pair: self.weight[pair[0]] + self.weight[pair[1]])

    def merge(self, u: int, v: int) -> None:
        """Puts v into u."""
        self.nodes[u] += self.nodes.pop(v)
        self.weight[u] += self.weight.pop(v)
        for x in self.before.pop(v) - {u}:
            self.after[x].remove(v)
            self.after[x].add(u)
            self.before[u].add(x)
        for x in self.after.pop(v):
            self.before[x].remove(v)
            self.before[x].add(u)
            self.after[u].add(x)
        self.after[u].discard(v)
        for x in (u, *sorted(self.before[u]), *sorted(self.after[u])):
            self._offer(x)

    def order(self) -> list[int]:
        """The blocks in topological order, the one with the earliest node first."""
        missing = {v: len(feeds) for v, feeds in self.before.items()}
        ready = [(min(self.nodes[v]), v) for v, count in missing.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            _, v = heapq.heappop(ready)
            found.append(v)
            for w in self.after[v]:
                missing[w] -= 1
                if not missing[w]:
                    heapq.heappush(ready, (min(self.nodes[w]), w))
        return found

    def frozen(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Blocks and their predecessors by position in topological order."""
        order = self.order()
        position = {v: i for i, v in enumerate(order)}
        return (
            tuple(tuple(sorted(self.nodes[v])) for v in order),
            tuple(tuple(sorted(position[u] for u in self.before[v])) for v in order),
        )


# Between two counts of the downsets, this share of the blocks is merged.
_SHARE = 0.05


def coarsen(
    predecessors: Sequence[Sequence[int]], weights: Sequence[float], max_downsets: int | None
) -> Coarsening:
    """Merges nodes until there are few downsets.

    Args:
        predecessors: per node of a DAG, those that feed it.
        weights: per node, what merging should keep balanced: its time.
        max_downsets: the most downsets to leave, at least 2; None merges nothing.
    """
    blocks = _Blocks(predecessors, weights)
    while True:
        merged, feeds = blocks.frozen()
        count = count_downsets(feeds, max_downsets)
        if max_downsets is None or count <= max_downsets:
            return Coarsening(merged, feeds, count)
        for _ in range(max(1, int(_SHARE * len(merged)))):
            blocks.merge(*blocks.cheapest())
