"""Downsets of a DAG, as bitmasks of any length.

A downset is a set of nodes that holds every predecessor of its members (the papers say ideal). A
pipeline's stages are differences of nested downsets.

Downsets ordered by inclusion form a lattice. Its covers, pairs that differ by one node, are
enumerated with the downsets themselves, so that whoever walks pairs of downsets can grow a stage
node by node.

Symbols of the enumeration:

    i, x   downsets, in the order of their discovery; 0 is the empty one
    e      covers: downset i with one of its ready nodes added
    u, v   nodes; a node is ready in a downset that holds its predecessors, but not the node
    w      words of a mask
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.support.arrays import Floats, Ints, Masks, csr
from planner.support.jit import inner, njit

WORD_BITS = 64


class Downsets(NamedTuple):
    """Every downset of a DAG with N nodes, smaller ones first: an order in which a downset comes
    after all of its subsets. The first is empty, the last has all nodes. (A tuple, so that kernels
    take it as it is; the number of downsets is the length of `masks`.)

    Attributes:
        masks: (n, ceil(N / 64)) uint64; node v is bit v mod 64 of word v div 64.
        start: (n + 1,) int64; the covers of downset i are cover[start[i]:start[i + 1]].
        cover: (e,) int64, a downset with one node more.
        added: (e,) int64, that node; ascending for each i.
    """

    masks: Masks
    start: Ints
    cover: Ints
    added: Ints


def successors(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per node, those that it feeds, ascending."""
    fed: list[list[int]] = [[] for _ in predecessors]
    for v, feeds in enumerate(predecessors):
        for u in feeds:
            fed[u].append(v)
    return fed


def downsets(predecessors: Sequence[Sequence[int]]) -> Downsets:
    """All downsets of a DAG.

    Args:
        predecessors: per node, those that feed it, each once.
    """
    return _enumerated(predecessors, np.iinfo(np.int64).max)


def downsets_within(predecessors: Sequence[Sequence[int]], limit: int) -> Downsets | None:
    """All downsets of a DAG, or None if there are more than the limit; arguments as `downsets`."""
    subsets = _enumerated(predecessors, limit)
    return subsets if len(subsets.masks) <= limit else None


def count_downsets(predecessors: Sequence[Sequence[int]], limit: int | None = None) -> int:
    """The number of downsets; limit + 1 if there are more than the limit.

    >>> count_downsets([[], [0], [0], [1, 2]])
    6
    """
    if limit is None:
        return len(downsets(predecessors).masks)
    return min(len(_enumerated(predecessors, limit).masks), limit + 1)


def pack(members: Sequence[Sequence[int]], num_nodes: int) -> Masks:
    """Sets of nodes as masks like those of `Downsets`: (len(members), ceil(N / 64)) uint64."""
    masks = np.zeros((len(members), _num_words(num_nodes)), dtype=np.uint64)
    for row, nodes in enumerate(members):
        for v in nodes:
            masks[row, v // WORD_BITS] |= np.uint64(1 << (v % WORD_BITS))
    return masks


def members(mask: Masks) -> list[int]:
    """The nodes of one mask, ascending."""
    bits = np.unpackbits(mask.astype("<u8").view(np.uint8), bitorder="little")
    return [int(v) for v in np.flatnonzero(bits)]


@njit
def sums_over(subsets: Downsets, values: Floats) -> Floats:
    """(n,) sum of a value per node, (N,), over the nodes of each downset."""
    sums = np.zeros(subsets.masks.shape[0])
    for i in range(sums.shape[0]):
        for e in range(subsets.start[i], subsets.start[i + 1]):
            sums[subsets.cover[e]] = sums[i] + values[subsets.added[e]]
    return sums


@njit
def sums_behind(subsets: Downsets, values: Floats) -> Floats:
    """(n,) sum of a value per node, (N,), over the nodes that are not in each downset."""
    sums = np.zeros(subsets.masks.shape[0])
    for i in range(sums.shape[0] - 2, -1, -1):
        e = subsets.start[i]  # any cover will do
        sums[i] = sums[subsets.cover[e]] + values[subsets.added[e]]
    return sums


def _num_words(num_nodes: int) -> int:
    return max(1, -(-num_nodes // WORD_BITS))


# ------------------------------------------------------------------------ the enumeration


class _Adjacency(NamedTuple):
    """A DAG as lists: the predecessors of v are feeds[feeds_start[v]:feeds_start[v + 1]], its
    successors those of `fed`, ascending.
    """

    feeds_start: Ints
    feeds: Ints
    fed_start: Ints
    fed: Ints


class _Room(NamedTuple):
    """Arrays that the enumeration fills: the fields of `Downsets`, and a hash table of the masks.

    Attributes:
        masks: (room, words).
        hashes: (room,) of each mask.
        start: (room + 1,).
        cover: (width * room,).
        added: (width * room,).
        table: (slots,) the downset in each slot of the hash table, -1 for none.
    """

    masks: Masks
    hashes: Masks
    start: Ints
    cover: Ints
    added: Ints
    table: Ints


_ROOM, _WIDTH = 1024, 4
# Returned by `_enumerate` where its arrays are too small.
_TOO_FEW_ROWS, _TOO_FEW_COVERS = -1, -2


def _enumerated(predecessors: Sequence[Sequence[int]], limit: int) -> Downsets:
    """All downsets, or more than the limit of them.

    The arrays are allocated here, and larger ones where they do not suffice: compiling is quicker
    without.
    """
    graph = _Adjacency(*csr(predecessors), *csr(successors(predecessors)))
    words, rows, width = _num_words(len(predecessors)), _ROOM, _WIDTH
    while True:
        room = _Room(
            masks=np.zeros((rows, words), dtype=np.uint64),
            hashes=np.zeros(rows, dtype=np.uint64),
            start=np.zeros(rows + 1, dtype=np.int64),
            cover=np.zeros(width * rows, dtype=np.int64),
            added=np.zeros(width * rows, dtype=np.int64),
            table=np.full(4 * rows, -1, dtype=np.int64),
        )
        count = _enumerate(graph, limit, room)
        if count > 0:
            edges = int(room.start[count])
            return Downsets(
                room.masks[:count].copy(), room.start[: count + 1].copy(),
                room.cover[:edges].copy(), room.added[:edges].copy(),
            )  # fmt: skip
        if count == _TOO_FEW_ROWS:
            rows *= 4
        else:
            width *= 4


@inner
def _key(node: int) -> np.uint64:
    """A number per node that looks random; a downset's hash is the xor of its nodes'. (The
    finalizer of splitmix64: Steele, Lea and Flood, OOPSLA 2014.)
    """
    x = np.uint64(node + 1) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inner
def _word_with(room: _Room, i: int, v: int, w: int) -> np.uint64:
    """Word w of downset i with node v added."""
    word = room.masks[i, w]
    if w == v // 64:
        word |= np.uint64(1) << np.uint64(v % 64)
    return np.uint64(word)


@inner
def _slot_of(room: _Room, i: int, v: int, code: np.uint64) -> int:
    """The slot of downset i with node v added, whose hash is `code`: the one that it is in, or the
    empty one where it belongs. (Linear probing. The table has four slots for each row, so an empty
    one comes soon.)
    """
    slot = np.int64(code % np.uint64(room.table.shape[0]))
    while room.table[slot] >= 0:
        x = room.table[slot]
        same = room.hashes[x] == code
        for w in range(room.masks.shape[1]):
            same = same and room.masks[x, w] == _word_with(room, i, v, w)
        if same:
            break
        slot = (slot + 1) % room.table.shape[0]
    return int(slot)


@inner
def _holds_predecessors(graph: _Adjacency, room: _Room, i: int, v: int) -> bool:
    """Whether downset i holds every predecessor of a node."""
    one = np.uint64(1)
    holds = True
    for y in range(graph.feeds_start[v], graph.feeds_start[v + 1]):
        u = graph.feeds[y]
        holds = holds and (room.masks[i, u // 64] >> np.uint64(u % 64)) & one == one
    return holds


@inner
def _write_ready(graph: _Adjacency, room: _Room, i: int, e: int, new: int) -> int:
    """Writes the nodes that are ready in downset `new`, which is i with the node of cover e: those
    that were ready in i, and those that this node was the last to hold up; ascending.

    Returns:
        The place behind them in `added`.
    """
    first = top = room.start[new]
    for y in range(room.start[i], room.start[i + 1]):
        if y != e:
            room.added[top] = room.added[y]
            top += 1
    v = room.added[e]
    for y in range(graph.fed_start[v], graph.fed_start[v + 1]):
        freed = graph.fed[y]
        if _holds_predecessors(graph, room, new, freed):
            place = top
            while place > first and room.added[place - 1] > freed:
                room.added[place] = room.added[place - 1]
                place -= 1
            room.added[place] = freed
            top += 1
    return int(top)


@njit
def _enumerate(graph: _Adjacency, limit: int, room: _Room) -> int:
    """Fills the fields of `Downsets`, and gives their number; more than the limit if there are more
    than that. Else one of the two codes for too little room.

    Breadth first: the covers of a downset are made by adding each node that is ready, so a downset
    of s nodes is made, before its own turn comes, from one of s - 1. The nodes to add stand in
    `added` as soon as the downset is made; `cover` follows at its turn.
    """
    masks, hashes, start, added = room.masks, room.hashes, room.start, room.added
    for v in range(graph.feeds_start.shape[0] - 1):
        if graph.feeds_start[v + 1] == graph.feeds_start[v]:
            if start[1] == added.shape[0]:
                return _TOO_FEW_COVERS
            added[start[1]] = v
            start[1] += 1
    count, i = 1, 0
    while i < count and count <= limit:
        for e in range(start[i], start[i + 1]):
            v = added[e]
            code = hashes[i] ^ _key(v)
            slot = _slot_of(room, i, v, code)
            if room.table[slot] < 0:
                if count == masks.shape[0]:
                    return _TOO_FEW_ROWS
                # At most: what is ready in i, and all that v feeds.
                most_ready = start[i + 1] - start[i] + graph.fed_start[v + 1] - graph.fed_start[v]
                if start[count] + most_ready > added.shape[0]:
                    return _TOO_FEW_COVERS
                room.table[slot] = count
                hashes[count] = code
                for w in range(masks.shape[1]):
                    masks[count, w] = _word_with(room, i, v, w)
                start[count + 1] = _write_ready(graph, room, i, e, count)
                count += 1
            # Made now or before, by adding the same nodes in another order.
            room.cover[e] = room.table[slot]
        i += 1
    return count


# ------------------------------------------------------------- windows: fewer, without merging
#
# Far nodes wait for each other. In one topological order, every node waits for all that stand more
# than a window of places before it. A window of 0 leaves that order alone, a wide one leaves
# everything. Every downset that remains is one of the DAG's.


def windowed(
    predecessors: Sequence[Sequence[int]], order: Sequence[int], limit: int | None
) -> tuple[Downsets, bool]:
    """The downsets of a DAG, or some of them if there are too many: those that the widest window
    leaves within the limit.

    Args:
        predecessors: per node, those that feed it.
        order: the nodes in topological order.
        limit: the most downsets, at least one more than nodes to be of use; None for no limit.

    Returns:
        The downsets, and whether they are all.
    """
    if limit is None:
        return downsets(predecessors), True
    everything = downsets_within(predecessors, limit)
    if everything is not None:
        return everything, True
    return downsets(waiting(predecessors, order, widest(predecessors, order, limit))), False


def widest(predecessors: Sequence[Sequence[int]], order: Sequence[int], limit: int) -> int:
    """The widest window that leaves at most `limit` downsets, of which there are more without; 0
    if none does. Arguments as `windowed`.
    """
    # A wider window asks for less waiting, so it leaves every downset that a narrower one does: the
    # number grows with the window, and bisection is right.
    fits, too_wide = 0, 1
    while count_downsets(waiting(predecessors, order, too_wide), limit) <= limit:
        fits, too_wide = too_wide, 2 * too_wide
    while too_wide - fits > 1:
        middle = (fits + too_wide) // 2
        if count_downsets(waiting(predecessors, order, middle), limit) <= limit:
            fits = middle
        else:
            too_wide = middle
    return fits


def waiting(
    predecessors: Sequence[Sequence[int]], order: Sequence[int], window: int
) -> tuple[tuple[int, ...], ...]:
    """Per node, those that feed it and those to wait for; of the latter the last ones, which wait
    for the others themselves.

    >>> waiting([[], [], [], []], [0, 1, 2, 3], 1)
    ((), (), (0,), (0, 1))
    """
    sources: list[tuple[int, ...]] = [()] * len(order)
    for i, v in enumerate(order):
        # The places up to i - window - 1 are waited for. The last of them waits for all up to i - 2
        # window - 2, so the window + 1 places between are enough.
        before = order[max(0, i - 2 * window - 1) : max(0, i - window)]
        sources[v] = tuple(sorted({*predecessors[v], *before}))
    return tuple(sources)
