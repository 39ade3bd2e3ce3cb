"""Downsets and antichains of a DAG, as bitmasks of any length.

A downset is a set of nodes that holds every predecessor of its members (the papers say ideal). A
pipeline's stages are differences of nested downsets. Each downset is the down-closure of its
maximal nodes, which form an antichain: there are as many of one as of the other.

Downsets ordered by inclusion form a lattice. Its covers, pairs that differ by one node, are found
with the downsets themselves, so that whoever walks pairs of downsets can grow a stage node by node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.jit import njit

WORD_BITS = 64

Ints = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint64]


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
    """All downsets, or more than `most` of them."""
    return Downsets(*_enumerate(*csr(predecessors), *csr(successors(predecessors)), most))


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
def _larger(old: Ints, size: int) -> Ints:
    found = np.empty(size, np.int64)
    found[: old.shape[0]] = old
    return found


@njit
def _enumerate(
    feeds_start: Ints, feeds: Ints, fed_start: Ints, fed: Ints, most: int
) -> tuple[Masks, Ints, Ints, Ints, Ints]:
    """The fields of `Downsets`; more than `most` rows if there are more downsets than that.

    Breadth first: the covers of a downset are made by adding each node that is ready. Those that
    were found before are looked up in a hash table with linear probing.
    """
    num_nodes = feeds_start.shape[0] - 1
    words = max(1, (num_nodes + 63) // 64)
    one = np.uint64(1)
    room, edge_room, slots = 64, 256, 256
    masks = np.zeros((room, words), np.uint64)
    hashes = np.zeros(room, np.uint64)
    sizes, start = np.zeros(room, np.int64), np.zeros(room + 1, np.int64)
    cover, added = np.zeros(edge_room, np.int64), np.zeros(edge_room, np.int64)
    table = np.full(slots, -1, np.int64)
    for v in range(num_nodes):
        if feeds_start[v + 1] == feeds_start[v]:
            if start[1] == edge_room:
                edge_room *= 2
                cover, added = _larger(cover, edge_room), _larger(added, edge_room)
            added[start[1]] = v
            start[1] += 1
    count, i = 1, 0
    while i < count and count <= most:
        for e in range(start[i], start[i + 1]):
            v = added[e]
            bit = one << np.uint64(v % 64)
            code = hashes[i] ^ _key(v)
            slot = np.int64(code % np.uint64(slots))
            found = -1
            while table[slot] >= 0:
                x = table[slot]
                if hashes[x] == code:
                    same = True
                    for w in range(words):
                        expected = masks[i, w] | bit if w == v // 64 else masks[i, w]
                        same = same and masks[x, w] == expected
                    if same:
                        found = x
                        break
                slot = (slot + 1) % slots
            if found >= 0:
                cover[e] = found
                continue
            if count == room:
                room *= 2
                grown = np.zeros((room, words), np.uint64)
                grown[:count] = masks
                masks = grown
                codes = np.zeros(room, np.uint64)
                codes[:count] = hashes
                hashes = codes
                sizes, start = _larger(sizes, room), _larger(start, room + 1)
            cover[e] = count
            masks[count] = masks[i]
            masks[count, v // 64] |= bit
            hashes[count], sizes[count] = code, sizes[i] + 1
            table[slot] = count
            # Ready are those that were, and what v was the last to hold up; ascending.
            top = start[count]
            while top + start[i + 1] - start[i] + fed_start[v + 1] - fed_start[v] > edge_room:
                edge_room *= 2
                cover, added = _larger(cover, edge_room), _larger(added, edge_room)
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
            if 2 * count > slots:
                slots *= 4
                table = np.full(slots, -1, np.int64)
                for x in range(1, count):
                    place = np.int64(hashes[x] % np.uint64(slots))
                    while table[place] >= 0:
                        place = (place + 1) % slots
                    table[place] = x
        i += 1
    edges = start[count]
    return masks[:count], sizes[:count], start[: count + 1], cover[:edges], added[:edges]


def ancestors(predecessors: Sequence[Sequence[int]]) -> Masks:
    """(N, words) masks of all nodes with a path to each node; the node itself is left out.

    Args:
        predecessors: per node, those that feed it; nodes are in topological order.
    """
    count = len(predecessors)
    found = np.zeros((count, max(1, -(-count // WORD_BITS))), dtype=np.uint64)
    for v, feeds in enumerate(predecessors):
        for u in feeds:
            found[v] |= found[u]
            found[v, u // WORD_BITS] |= np.uint64(1 << (u % WORD_BITS))
    return found


def descendants(predecessors: Sequence[Sequence[int]]) -> Masks:
    """(N, words) masks of all nodes that each node has a path to; arguments as `ancestors`."""
    count = len(predecessors)
    found = np.zeros((count, max(1, -(-count // WORD_BITS))), dtype=np.uint64)
    for v in reversed(range(count)):
        for u in predecessors[v]:
            found[u] |= found[v]
            found[u, v // WORD_BITS] |= np.uint64(1 << (v % WORD_BITS))
    return found


def pack(members: Sequence[Sequence[int]], num_nodes: int) -> npt.NDArray[np.uint64]:
    """Sets of nodes as masks like those of `Downsets`: (len(members), ceil(N / 64)) uint64."""
    words = max(1, -(-num_nodes // WORD_BITS))
    found = np.zeros((len(members), words), dtype=np.uint64)
    for row, nodes in enumerate(members):
        for v in nodes:
            found[row, v // WORD_BITS] |= np.uint64(1 << (v % WORD_BITS))
    return found


def members(mask: npt.NDArray[np.uint64]) -> list[int]:
    """The nodes of one mask, ascending."""
    bits = np.unpackbits(mask.astype("<u8").view(np.uint8), bitorder="little")
    return [int(v) for v in np.flatnonzero(bits)]


def antichain(mask: npt.NDArray[np.uint64], predecessors: Sequence[Sequence[int]]) -> list[int]:
    """The maximal nodes of a downset, ascending."""
    inside = members(mask)
    feeding = {u for v in inside for u in predecessors[v]}
    return [v for v in inside if v not in feeding]
