"""Downsets and antichains of a DAG, as bitmasks of any length.

A downset is a set of nodes that holds every predecessor of its members (the papers say ideal). A
pipeline's stages are differences of nested downsets. Each downset is the down-closure of its
maximal nodes, which form an antichain: there are as many of one as of the other.

Downsets ordered by inclusion form a lattice. Its covers, pairs that differ by one node, are found
with the downsets themselves, so that whoever walks pairs of downsets can grow a stage node by node.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.support.arrays import Bools, Ints, Masks
from planner.support.jit import njit

WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class Downsets:
    """Every downset of a DAG with N nodes, smaller ones first: an order in which a downset comes
    after all of its subsets. The first is empty, the last has all nodes.

    Attributes:
        masks: (n, ceil(N / 64)) uint64; node v is bit v mod 64 of word v div 64.
        sizes: (n,) int64, the number of nodes in each.
        start: (n + 1,) int64; the covers of downset i are cover[start[i]:start[i + 1]].
        cover: (e,) int64, a downset with one node more.
        added: (e,) int64, that node; ascending for each i.
    """

    masks: Masks
    sizes: Ints
    start: Ints
    cover: Ints
    added: Ints

    def __len__(self) -> int:
        return len(self.sizes)


def csr(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists of nodes as two arrays: row v is items[start[v]:start[v + 1]].

    Returns:
        start (N + 1,) and items (sum of the lengths,).
    """
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    items = np.fromiter((v for row in rows for v in row), dtype=np.int64, count=int(start[-1]))
    return start, items


def successors(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per node, those that it feeds, ascending."""
    found: list[list[int]] = [[] for _ in predecessors]
    for v, feeds in enumerate(predecessors):
        for u in feeds:
            found[u].append(v)
    return found


def downsets(predecessors: Sequence[Sequence[int]]) -> Downsets:
    """All downsets of a DAG.

    Args:
        predecessors: per node, those that feed it, each once.
    """
    return _enumerated(predecessors, np.iinfo(np.int64).max)


def downsets_within(predecessors: Sequence[Sequence[int]], limit: int) -> Downsets | None:
    """All downsets of a DAG, or None if there are more than the limit; arguments as `downsets`."""
    found = _enumerated(predecessors, limit)
    return found if len(found) <= limit else None


def count_downsets(predecessors: Sequence[Sequence[int]], limit: int | None = None) -> int:
    """The number of downsets; limit + 1 if there are more than the limit.

    >>> count_downsets([[], [0], [0], [1, 2]])
    6
    """
    if limit is None:
        return len(downsets(predecessors))
    return min(len(_enumerated(predecessors, limit)), limit + 1)


def _enumerated(predecessors: Sequence[Sequence[int]], most: int) -> Downsets:
    """All downsets, or more than `most` of them.

    The arrays are allocated here, and larger ones where they do not suffice: compiling is quicker
    without.
    """
    feeds, fed = csr(predecessors), csr(successors(predecessors))
    words = max(1, -(-len(predecessors) // WORD_BITS))
    room, width = _ROOM, 4
    while True:
        masks = np.zeros((room, words), dtype=np.uint64)
        hashes, sizes = np.zeros(room, dtype=np.uint64), np.zeros(room, dtype=np.int64)
        start, cover = np.zeros(room + 1, dtype=np.int64), np.zeros(width * room, dtype=np.int64)
        added, table = np.zeros_like(cover), np.full(4 * room, -1, dtype=np.int64)
        count = _enumerate(*feeds, *fed, most, masks, hashes, sizes, start, cover, added, table)
        if count > 0:
            edges = int(start[count])
            return Downsets(
                masks[:count].copy(), sizes[:count].copy(), start[: count + 1].copy(),
                cover[:edges].copy(), added[:edges].copy(),
            )  # fmt: skip
        if count == _TOO_FEW_ROWS:
            room *= 4
        else:
            width *= 4


_ROOM = 1024
# What `_enumerate` says where its arrays are too small.
_TOO_FEW_ROWS, _TOO_FEW_COVERS = -1, -2


@njit
def _key(node: int) -> np.uint64:
    """A number per node that looks random; a downset's hash is the xor of its nodes'. (The
    finalizer of splitmix64: Steele, Lea and Flood, OOPSLA 2014.)
    """
    x = np.uint64(node + 1) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit
def _enumerate(
    feeds_start: Ints,
    feeds: Ints,
    fed_start: Ints,
    fed: Ints,
    most: int,
    masks: Masks,
    hashes: Masks,
    sizes: Ints,
    start: Ints,
    cover: Ints,
    added: Ints,
    table: Ints,
) -> int:
    """Fills the fields of `Downsets`, and gives their number; more than `most` if there are more
    than that.

    Breadth first: the covers of a downset are made by adding each node that is ready. Those that
    were found before are looked up in a hash table with linear probing.
    """
    num_nodes, words = feeds_start.shape[0] - 1, masks.shape[1]
    slots = np.uint64(table.shape[0])
    one = np.uint64(1)
    for v in range(num_nodes):
        if feeds_start[v + 1] == feeds_start[v]:
            if start[1] == cover.shape[0]:
                return _TOO_FEW_COVERS
            added[start[1]] = v
            start[1] += 1
    count, i = 1, 0
    while i < count and count <= most:
        for e in range(start[i], start[i + 1]):
            v = added[e]
            bit = one << np.uint64(v % 64)
            code = hashes[i] ^ _key(v)
            slot = np.int64(code % slots)
            while table[slot] >= 0:
                x = table[slot]
                same = hashes[x] == code
                for w in range(words):
                    expected = masks[i, w] | bit if w == v // 64 else masks[i, w]
                    same = same and masks[x, w] == expected
                if same:
                    break
                slot = (slot + 1) % table.shape[0]
            if table[slot] >= 0:
                cover[e] = table[slot]
                continue
            if count == masks.shape[0]:
                return _TOO_FEW_ROWS
            top = start[count]
            if top + start[i + 1] - start[i] + fed_start[v + 1] - fed_start[v] > cover.shape[0]:
                return _TOO_FEW_COVERS
            cover[e] = table[slot] = count
            hashes[count], sizes[count] = code, sizes[i] + 1
            for w in range(words):
                masks[count, w] = masks[i, w] | bit if w == v // 64 else masks[i, w]
            # Ready are those that were, and what v was the last to hold up; ascending.
            for y in range(start[i], start[i + 1]):
                if y != e:
                    added[top] = added[y]
                    top += 1
            for y in range(fed_start[v], fed_start[v + 1]):
                ready = True
                for z in range(feeds_start[fed[y]], feeds_start[fed[y] + 1]):
                    u = feeds[z]
                    ready = ready and (masks[count, u // 64] >> np.uint64(u % 64)) & one == one
                if ready:
                    place = top
                    while place > start[count] and added[place - 1] > fed[y]:
                        added[place] = added[place - 1]
                        place -= 1
                    added[place] = fed[y]
                    top += 1
            count += 1
            start[count] = top
        i += 1
    return count


def pack(members: Sequence[Sequence[int]], num_nodes: int) -> Masks:
    """Sets of nodes as masks like those of `Downsets`: (len(members), ceil(N / 64)) uint64."""
    words = max(1, -(-num_nodes // WORD_BITS))
    found = np.zeros((len(members), words), dtype=np.uint64)
    for row, nodes in enumerate(members):
        for v in nodes:
            found[row, v // WORD_BITS] |= np.uint64(1 << (v % WORD_BITS))
    return found


def members(mask: Masks) -> list[int]:
    """The nodes of one mask, ascending."""
    bits = np.unpackbits(mask.astype("<u8").view(np.uint8), bitorder="little")
    return [int(v) for v in np.flatnonzero(bits)]


def antichain(mask: Masks, predecessors: Sequence[Sequence[int]]) -> list[int]:
    """The maximal nodes of a downset, ascending."""
    inside = members(mask)
    feeding = {u for v in inside for u in predecessors[v]}
    return [v for v in inside if v not in feeding]


# -------------------------------------------------------------------- PipeDream's states


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
    found = inside
    for x in _bits(inside):
        behind = relations.ancestors[x] | 1 << x
        for z in _bits(relations.ancestors[x] & relations.forks):
            if relations.feeds[z] & ~behind:
                found |= 1 << z
    return found


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
    found = _next(relations, inside, _augmented(relations, inside))
    return tuple(dict.fromkeys(tuple(_bits(mask)) for mask in found))


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
            before[index[there]] |= before[k] | 1 << k
    return States(
        antichains=tuple(tuple(_bits(augmented[mask])) for mask in order),
        downsets=tuple(_closed(relations, augmented[mask]) for mask in order),
        before=bit_matrix(before, len(order)),
    )


def _closed(relations: _Relations, inside: int) -> int:
    """The members and all that comes before them."""
    found = inside
    for x in _bits(inside):
        found |= relations.ancestors[x]
    return found


def _depth_first(edges: dict[int, list[int]]) -> list[int]:
    """Topological order of the states by depth-first search from the first one: a state goes in
    front of all that was finished before it.
    """
    finished: list[int] = []
    first = next(iter(edges))
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
