"""Downsets and antichains of a DAG, as bitmasks.

A downset is a set of nodes that holds every predecessor of its members (the papers say ideal). A
pipeline's stages are differences of nested downsets. Each downset is the down-closure of its
maximal nodes, which form an antichain: there are as many of one as of the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class Downsets:
    """Every downset of a DAG with N nodes, smaller ones first: an order in which a downset comes
    after all of its subsets.

    Attributes:
        masks: (n, ceil(N / 64)) uint64; node v is bit v mod 64 of word v div 64.
        sizes: (n,) int64, the number of nodes in each.
    """

    masks: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)


def _successors(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in predecessors]
    for v, feeds in enumerate(predecessors):
        for u in feeds:
            found[u].append(v)
    return found


def _grow(predecessors: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The downsets by size: those with 0 nodes, with 1 node, ..., each list ascending."""
    needs = [sum(1 << u for u in feeds) for feeds in predecessors]
    successors = _successors(predecessors)
    level = {0: sum(1 << v for v, need in enumerate(needs) if not need)}
    while level:
        yield sorted(level)
        above: dict[int, int] = {}
        for downset, ready in level.items():
            left = ready
            while left:
                bit = left & -left
                left ^= bit
                larger = downset | bit
                if larger not in above:
                    opened = sum(
                        1 << w
                        for w in successors[bit.bit_length() - 1]
                        if needs[w] & larger == needs[w]
                    )
                    above[larger] = ready ^ bit | opened
        level = above


def count_downsets(predecessors: Sequence[Sequence[int]], limit: int | None = None) -> int:
    """The number of downsets; limit + 1 if there are more than the limit.

    Args:
        predecessors: per node of the DAG, those that feed it.

    >>> count_downsets([[], [0], [0], [1, 2]])
    6
    """
    found = 0
    for level in _grow(predecessors):
        found += len(level)
        if limit is not None and found > limit:
            return limit + 1
    return found


def downsets(predecessors: Sequence[Sequence[int]]) -> Downsets:
    """All downsets of a DAG.

    Args:
        predecessors: per node, those that feed it.
    """
    levels = list(_grow(predecessors))
    words = max(1, -(-len(predecessors) // WORD_BITS))
    packed = b"".join(mask.to_bytes(words * 8, "little") for level in levels for mask in level)
    masks = np.frombuffer(packed, dtype="<u8").reshape(-1, words).astype(np.uint64)
    sizes = np.repeat(np.arange(len(levels), dtype=np.int64), [len(level) for level in levels])
    return Downsets(masks, sizes)


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
