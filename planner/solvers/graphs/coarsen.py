"""A graph made smaller, so that its downsets can be counted: operators that run together anyway
are merged into blocks, and where that would cost too much, blocks are put in order.

    merging   gives up cuts that are worth little: `contraction.py` says which
    ordering  a block waits for all that stand more than w places before it in the topological
              order, related or not. Every downset that is left is one of the graph's; w = 0 leaves
              one after every block

A long chain can only be merged; among many branches side by side it is better to keep operators
apart and to order them. So both are tried in several proportions, and the one whose cuts are best
is taken: wherever one would want to cut, there should be a downset of about that time that few
bytes leave.

Layers that repeat are found once (`repeats.py`) and merged alike, by the mean of their times. Cuts
inside a block and against the order are lost, which is why bounds are computed on the graph itself.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.artefacts.graph import Graph, consumers, predecessors, producers
from planner.solvers.graphs.contraction import (
    Blocks,
    Merger,
    MergeRule,
    blocks_after,
    contract,
    crossing_bytes,
)
from planner.solvers.graphs.downsets import count_downsets, downsets, waiting, widest
from planner.solvers.graphs.repeats import Repeat, repeats, representatives
from planner.support.arrays import Floats
from planner.support.memo import remembered

# From one try to the next, blocks are merged down to this share of their number.
_FEWER = 0.7
# Number of places at which cuts are judged: a few for every stage of a deep pipeline.
_PLACES = 128


@dataclass(frozen=True, slots=True)
class Coarsening:
    """Blocks of operators and the DAG between them.

    Attributes:
        blocks: per block, its operators ascending; blocks are in topological order.
        predecessors: per block, the blocks that are in every downset with it, ascending: those that
            feed it and those that it has to wait for. Every downset of this DAG is one of the
            graph's.
        num_downsets: of the DAG of blocks.
        merged: how many mergers were made by which rule.
        repeats: the runs of identical layers, which were merged alike; none where nothing was
            merged.
        window: w, how far before a block others may stand that it does not wait for; None where
            blocks only wait for those that feed them.
    """

    blocks: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    num_downsets: int
    merged: tuple[tuple[MergeRule, int], ...] = ()
    repeats: tuple[Repeat, ...] = ()
    window: int | None = None

    @property
    def exact(self) -> bool:
        """Whether every downset of the graph is left."""
        return not self.merged and self.window is None


def summary(coarsening: Coarsening) -> str:
    """What was done to the graph, in words.

    >>> layers = (Repeat(first=0, period=2, count=2),)
    >>> summary(Coarsening(((0, 1), (2, 3)), ((), (0,)), 3, ((MergeRule.CHAIN, 2),), layers))
    '4 operators in 2 blocks (3 downsets): 2 merged along chains, 2 layers of 2 operators alike'
    """
    size = sum(len(block) for block in coarsening.blocks)
    if coarsening.exact:
        return f"{size} operators ({coarsening.num_downsets} downsets), none merged"
    done = [f"{count} merged {rule}" for rule, count in coarsening.merged]
    layers: Counter[int] = Counter()
    for run in coarsening.repeats:
        layers[run.period] += run.count
    done += [
        f"{count} layers of {period} operator{'s' * (period > 1)} alike"
        for period, count in layers.items()
    ]
    if coarsening.window == 0:
        done.append("cut in one order")
    elif coarsening.window is not None:
        done.append(f"cut in one order where more than {coarsening.window} blocks apart")
    return (
        f"{size} operators in {len(coarsening.blocks)} blocks ({coarsening.num_downsets} downsets):"
        f" {', '.join(done)}"
    )


def coarsen(
    graph: Graph, times: Sequence[float], max_downsets: int | None, *, s_per_byte: float = 0.0
) -> Coarsening:
    """Merges and orders operators until there are few downsets.

    Args:
        graph: the operators.
        times: per operator, forward and backward, in s.
        max_downsets: the most downsets to leave; None leaves all.
        s_per_byte: what it costs to send one byte from stage to stage, in s: it weighs bytes that
            cross a cut against balanced times.

    Raises:
        ValueError: if max_downsets is below 2: nothing, and everything.
    """
    if max_downsets is not None and max_downsets < 2:
        raise ValueError(f"max_downsets: expected at least 2, got {max_downsets}")
    feeds = predecessors(graph)
    count = count_downsets(feeds, max_downsets)
    if max_downsets is None or count <= max_downsets:
        return Coarsening(tuple((v,) for v in range(len(feeds))), feeds, count)
    layers, mergers = _contraction(graph, tuple(times), s_per_byte)
    best, least = None, float("inf")
    num_blocks = max_downsets - 1  # which have num_blocks + 1 downsets or more
    while True:
        blocks = blocks_after(graph, mergers[: _how_far(mergers, len(feeds) - num_blocks)])
        option = _ordered(blocks, max_downsets, layers)
        detour = _detour(graph, times, s_per_byte, option)
        if best is None or detour < least:
            best, least = option, detour
        # Fewer blocks would fit without an order as well, and only lose more cuts.
        if option.window is None:
            return best
        num_blocks = int(_FEWER * len(blocks.members))


@remembered(kept=4)
def _contraction(
    graph: Graph, times: tuple[float, ...], s_per_byte: float
) -> tuple[tuple[Repeat, ...], tuple[Merger, ...]]:
    """The repeats of a graph, and its contraction by the mean time of what repeats."""
    layers = repeats(graph, times)
    alike = representatives(len(times), layers)
    total = np.bincount(alike, weights=times, minlength=len(times))
    number = np.bincount(alike, minlength=len(times))
    means = [float(total[v] / number[v]) for v in alike]
    return layers, contract(graph, means, alike, s_per_byte)


def _how_far(mergers: Sequence[Merger], least: int) -> int:
    """The number of mergers, `least` or more, that ends with a whole decision."""
    if least <= 0:
        return 0
    last = mergers[least - 1].decision
    return bisect_right(mergers, last, key=lambda merger: merger.decision)


def _ordered(blocks: Blocks, max_downsets: int, layers: tuple[Repeat, ...]) -> Coarsening:
    """The blocks, in an order with the widest window that leaves few enough downsets."""
    feeds, window = blocks.predecessors, None
    count = count_downsets(feeds, max_downsets)
    if count > max_downsets:
        places = range(len(feeds))
        window = widest(feeds, places, max_downsets)
        feeds = waiting(feeds, places, window)
        count = count_downsets(feeds)
    alike = layers if blocks.merged else ()
    return Coarsening(blocks.members, feeds, count, blocks.merged, alike, window)


def _detour(graph: Graph, times: Sequence[float], s_per_byte: float, option: Coarsening) -> float:
    """How far, in s, the cuts are from where one would want them: over places spread evenly in
    time, the mean fourth power (the worst places matter) of the cheapest cut's distance in time
    and time to send what crosses it.
    """
    at_s, sent_bytes = _cuts(graph, times, option)
    wanted = (np.arange(_PLACES) + 0.5) / _PLACES * at_s[-1]
    cheapest = [(np.abs(place - at_s) + s_per_byte * sent_bytes).min() for place in wanted]
    return float((np.array(cheapest) ** 4).mean())


def _cuts(graph: Graph, times: Sequence[float], option: Coarsening) -> tuple[Floats, Floats]:
    """(n,) the time of every downset of blocks, in s, and (n,) the bytes that leave it."""
    block_s = [sum(times[v] for v in block) for block in option.blocks]
    sends, receives = _crossings(graph, option)
    subsets = downsets(option.predecessors)
    count = len(subsets.masks)
    parent, added = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    # Of the covers that lead to a downset any will do; the last one written stays. Smaller downsets
    # come first, so what a parent has is known.
    parent[subsets.cover] = np.repeat(np.arange(count), np.diff(subsets.start))
    added[subsets.cover] = subsets.added
    inside, at_s, sent_bytes = [0], [0.0], [0]
    for before, block in zip(parent[1:].tolist(), added[1:].tolist(), strict=True):
        now = inside[before] | 1 << block
        # A tensor leaves the downset until the last of its readers is inside.
        arrived = sum(size for size, readers in receives[block] if not readers & ~now)
        inside.append(now)
        at_s.append(at_s[before] + block_s[block])
        sent_bytes.append(sent_bytes[before] + sends[block] - arrived)
    return np.array(at_s), np.array(sent_bytes, dtype=float)


def _crossings(graph: Graph, option: Coarsening) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Per block, the bytes that it makes for others; and of every tensor that it gets from others
    the bytes and, as bits, all the blocks that read it.
    """
    block_of = {v: b for b, block in enumerate(option.blocks) for v in block}
    made_by, read_by = producers(graph), consumers(graph)
    sends = [0] * len(option.blocks)
    receives: list[list[tuple[int, int]]] = [[] for _ in option.blocks]
    for tensor in graph.tensors:
        if tensor.name in made_by:
            maker = block_of[made_by[tensor.name]]
            readers = {block_of[v] for v in read_by[tensor.name]} - {maker}
            bits = sum(1 << block for block in readers)
            sends[maker] += crossing_bytes(tensor) if readers else 0
            for block in readers:
                receives[block].append((crossing_bytes(tensor), bits))
    return sends, receives
