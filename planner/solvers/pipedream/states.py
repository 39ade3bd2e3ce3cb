"""The states of PipeDream's optimizer and their order, as its code finds them.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1, and the optimizer published with it.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.solvers.graphs.downsets import successors
from planner.support.arrays import Bools


@dataclass(frozen=True, slots=True)
class States:
    """The states of PipeDream's optimizer, in its order: every one comes after its predecessors.

    A state is an antichain, augmented by those nodes before it that feed something outside.

    Attributes:
        antichains: per state the augmented antichain, ascending.
        downsets: per state the nodes at or before it, as a bitmask.
        before: (n, n) whether state [j, k], that is k, is a strict predecessor of j.
    """

    antichains: tuple[tuple[int, ...], ...]
    downsets: tuple[int, ...]
    before: Bools

    def __len__(self) -> int:
        return len(self.downsets)


def _bits(mask: int) -> Iterator[int]:
    """The nodes of a bitmask, ascending."""
    while mask:
        # The lowest bit that is set.
        low = mask & -mask
        mask ^= low
        yield low.bit_length() - 1


def bit_matrix(masks: Sequence[int], num_nodes: int) -> Bools:
    """(len(masks), N) whether a bitmask has a node.

    >>> bit_matrix([0b01, 0b10], 2).tolist()
    [[True, False], [False, True]]
    """
    width = max(1, -(-num_nodes // 8))
    packed = b"".join(mask.to_bytes(width, "little") for mask in masks)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), width)
    return np.unpackbits(rows, axis=1, bitorder="little")[:, :num_nodes].astype(np.bool_)


@dataclass(frozen=True, slots=True)
class _Relations:
    """Who comes before and after whom, as bitmasks per node.

    Attributes:
        ancestors: all that come before it.
        descendants: all that come after it.
        feeds: those that it feeds.
        forks: the nodes that feed more than one.
    """

    ancestors: tuple[int, ...]
    descendants: tuple[int, ...]
    feeds: tuple[int, ...]
    forks: int


def _relations(predecessors: Sequence[Sequence[int]]) -> _Relations:
    """The relations of a DAG whose nodes are in topological order."""
    after = successors(predecessors)
    ancestors = [0] * len(predecessors)
    for v, before in enumerate(predecessors):
        for u in before:
            ancestors[v] |= ancestors[u] | 1 << u
    descendants = [0] * len(predecessors)
    for v in reversed(range(len(predecessors))):
        for w in after[v]:
            descendants[v] |= descendants[w] | 1 << w
    feeds = tuple(sum(1 << w for w in set(row)) for row in after)
    forks = sum(1 << v for v, mask in enumerate(feeds) if mask & (mask - 1))
    return _Relations(tuple(ancestors), tuple(descendants), feeds, forks)


def _augmented(relations: _Relations, inside: int) -> int:
    """An antichain and, for each member x, the nodes z before x that feed something that is neither
    before x nor x itself.
    """
    augmented = inside
    for x in _bits(inside):
        behind = relations.ancestors[x] | 1 << x
        for z in _bits(relations.ancestors[x] & relations.forks):
            if relations.feeds[z] & ~behind:
                augmented |= 1 << z
    return augmented


def augmented_antichain(
    antichain: Sequence[int], predecessors: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """What of a downset is still to be sent on: its antichain and the nodes before one of its
    members that feed something besides what leads to that member. The test is made for each
    member, not for all together, so that it names more nodes than necessary.

    Args:
        antichain: nodes of which none comes before another.
        predecessors: per node, those that feed it, in topological order.

    Source: PipeDream's optimizer (Narayanan et al., SOSP 2019), as its code computes.

    >>> augmented_antichain([1], [[], [0], [0]])
    (0, 1)
    """
    return tuple(_bits(_augmented(_relations(predecessors), sum(1 << v for v in antichain))))


def _next(relations: _Relations, inside: int, augmented: int) -> Iterator[int]:
    """The antichains that come next: one node more, that an augmented member feeds and after which
    no augmented member comes, without those that are before another member then.
    """
    for u in _bits(augmented):
        for o in _bits(relations.feeds[u] & ~inside):
            # Then o is in the downset already.
            if relations.descendants[o] & augmented:
                continue
            larger = inside | 1 << o
            hidden = 0
            for x in _bits(larger):
                hidden |= relations.ancestors[x]
            yield larger & ~hidden


def next_antichains(
    antichain: Sequence[int], predecessors: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The antichains that PipeDream goes to from one, in the order in which it finds them.

    >>> next_antichains([0], [[], [0], [0], [1, 2]])
    ((1,), (2,))
    """
    relations = _relations(predecessors)
    inside = sum(1 << v for v in antichain)
    masks = _next(relations, inside, _augmented(relations, inside))
    return tuple(dict.fromkeys(tuple(_bits(mask)) for mask in masks))


def pipedream_states(predecessors: Sequence[Sequence[int]], limit: int) -> States | None:
    """The states that PipeDream's optimizer walks through, from the first node without
    predecessors on, in its depth-first topological order; None if there are more than the limit.

    Nodes that no state comes to are in none of its downsets.

    Args:
        predecessors: per node of the DAG, those that feed it, in topological order.

    >>> pipedream_states([[], [0], [0], [1, 2]], 10).antichains
    ((0,), (0, 2), (0, 1), (0, 1, 2), (3,))
    """
    relations = _relations(predecessors)
    augmented = {1: _augmented(relations, 1)}
    edges: dict[int, list[int]] = {}
    queue = deque([1])
    while queue:
        here = queue.popleft()
        edges[here] = list(dict.fromkeys(_next(relations, here, augmented[here])))
        for there in edges[here]:
            if there not in augmented:
                augmented[there] = _augmented(relations, there)
                queue.append(there)
        if len(augmented) > limit:
            return None
    order = _depth_first(edges)
    index = {mask: j for j, mask in enumerate(order)}
    before = [0] * len(order)
    for k, mask in enumerate(order):
        for there in edges[mask]:
            # The order is topological, so what comes before state k is complete at its turn.
            before[index[there]] |= before[k] | 1 << k
    return States(
        antichains=tuple(tuple(_bits(augmented[mask])) for mask in order),
        downsets=tuple(_closed(relations, augmented[mask]) for mask in order),
        before=bit_matrix(before, len(order)),
    )


def _closed(relations: _Relations, inside: int) -> int:
    """The members and all that comes before them."""
    downset = inside
    for x in _bits(inside):
        downset |= relations.ancestors[x]
    return downset


def _depth_first(edges: dict[int, list[int]]) -> list[int]:
    """Topological order of the states by depth-first search from the first one: a state goes in
    front of all that was finished before it.
    """
    finished: list[int] = []
    first = next(iter(edges))
    # A stack instead of recursion: a chain may have more states than Python has frames.
    seen, path = {first}, [(first, iter(edges[first]))]
    while path:
        mask, ahead = path[-1]
        for there in ahead:
            if there not in seen:
                seen.add(there)
                path.append((there, iter(edges[there])))
                break
        else:
            finished.append(mask)
            path.pop()
    return finished[::-1]
