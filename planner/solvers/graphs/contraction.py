"""The order in which the operators of a graph are merged into blocks, down to a single one.

Two ways to merge never make a cycle, and every block that has a neighbour has one of them:

    u with the first of its consumers v    no other consumer of u comes before v
    v with the last of its sources u       no other source of v comes after u

"First" and "last" speak of places in one topological order, in which the merged block takes the
place of v or of u. A merger gives up the cuts that have u in front and v behind. Each could move
to the other end of v (v goes in front) or of u (u goes behind), at the price of

    t(v) + s (what v sends - what only v receives)
    t(u) + s (what u receives - what u sends)

with t the time, s the seconds per byte; and of the other block's time where a branch beside it
has to wait for it. Where the lower of the two is not above 0, nobody wants these cuts: a heavy
edge. The others are given up in the order of price x time of the block that results, so that
blocks stay small and what is heavy stays alone.

Waists tell whether a branch is beside a block: blocks that come before or after every other one
by dependency. Blocks on both sides of a waist depend on each other.

Repeated layers get the same prices, and what has the same price at the same place of a layer is
one decision: merged in all layers before anything else.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from planner.artefacts.graph import Graph, Tensor, consumers, predecessors, producers

# Waists are looked for again when so few of the blocks are left.
_STALE = 0.6
# An operator up to this share of the mean time is called cheap.
_CHEAP = 0.1


class MergeRule(StrEnum):
    """Why operators were merged."""

    CHEAP = "as cheap"
    HEAVY_EDGE = "over heavy edges"
    CHAIN = "along chains"
    BRANCH = "at the ends of branches"
    UNRELATED = "as unrelated"


@dataclass(frozen=True, slots=True)
class Merger:
    """One step of a contraction. A block goes by the number of one of its operators.

    Attributes:
        kept: the block that grows.
        gone: the block that it takes in.
        behind: whether the block that results stands at the place of `gone`.
        rule: why.
        decision: mergers with the same number belong together.
    """

    kept: int
    gone: int
    behind: bool
    rule: MergeRule
    decision: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """What some mergers come to; blocks are numbered in topological order.

    Attributes:
        members: per block, its operators ascending.
        predecessors: per block, the blocks that feed it, ascending.
        merged: how many mergers were made by which rule.
    """

    members: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    merged: tuple[tuple[MergeRule, int], ...]


def contract(
    graph: Graph, times: Sequence[float], alike: Sequence[int], s_per_byte: float
) -> tuple[Merger, ...]:
    """The mergers from the operators to one block, those that lose least first.

    Args:
        graph: the operators, which give the first topological order.
        times: per operator, in s.
        alike: per operator, the one that it repeats; itself where it repeats none.
        s_per_byte: what it costs to send a byte from stage to stage.
    """
    contraction = _Contraction(graph, times, alike, s_per_byte)
    contraction.run()
    return tuple(contraction.mergers)


def blocks_after(graph: Graph, mergers: Sequence[Merger]) -> Blocks:
    """What the first mergers of a contraction come to."""
    feeds = predecessors(graph)
    place, into = list(range(len(feeds))), list(range(len(feeds)))
    for merger in mergers:
        into[merger.gone] = merger.kept
        if merger.behind:
            place[merger.kept] = place[merger.gone]
    # Backwards, what a block went into is known already.
    for merger in reversed(mergers):
        into[merger.gone] = into[merger.kept]
    order = sorted(set(into), key=place.__getitem__)
    number = {block: i for i, block in enumerate(order)}
    members: list[list[int]] = [[] for _ in order]
    before: list[set[int]] = [set() for _ in order]
    for v, sources in enumerate(feeds):
        block = number[into[v]]
        members[block].append(v)
        before[block].update(number[into[u]] for u in sources)
    rules = Counter(merger.rule for merger in mergers)
    return Blocks(
        members=tuple(tuple(inside) for inside in members),
        predecessors=tuple(tuple(sorted(us - {i})) for i, us in enumerate(before)),
        merged=tuple((rule, rules[rule]) for rule in MergeRule if rules[rule]),
    )


def crossing_bytes(tensor: Tensor) -> int:
    """What crosses a cut for a tensor: itself, and its gradient back."""
    return tensor.bytes * (2 if tensor.gradient else 1)


class _Contraction:
    """A graph that is being contracted.

    Attributes:
        mergers: so far.
    """

    def __init__(
        self, graph: Graph, times: Sequence[float], alike: Sequence[int], s_per_byte: float
    ) -> None:
        feeds = predecessors(graph)
        size = len(feeds)
        self.mergers: list[Merger] = []
        self._alike, self._s_per_byte = alike, s_per_byte
        self._cheap = _CHEAP * sum(times) / size
        self._blocks = set(range(size))
        self._place = list(range(size))
        self._time = list(times)
        self._before = [set(sources) for sources in feeds]
        self._after: list[set[int]] = [set() for _ in feeds]
        for v, sources in enumerate(feeds):
            for u in sources:
                self._after[u].add(v)
        self._wire(graph)
        self._find_waists()

    def _wire(self, graph: Graph) -> None:
        """Tensors between operators: their bytes, makers and readers; per block, those that it
        makes for others and gets from others.
        """
        made_by, read_by = producers(graph), consumers(graph)
        between = [t for t in graph.tensors if t.name in made_by and read_by[t.name]]
        self._bytes = [crossing_bytes(t) for t in between]
        self._readers = [set(read_by[t.name]) for t in between]
        self._last = [max(readers) for readers in self._readers]
        self._made: list[set[int]] = [set() for _ in graph.operators]
        self._read: list[set[int]] = [set() for _ in graph.operators]
        for i, tensor in enumerate(between):
            self._made[made_by[tensor.name]].add(i)
            for v in self._readers[i]:
                self._read[v].add(i)

    def run(self) -> None:
        """Merges until one block is left."""
        decided: tuple[float, int] | None = None
        decision = -1
        while self._heap:
            loss, same, _, u, v = heapq.heappop(self._heap)
            # Entries stay in the heap when blocks merge. Those of blocks that are gone are left out
            # here; those that have become dearer wait for their turn again.
            if u not in self._blocks or v not in self._after[u]:
                continue
            # Only between decisions, so that a decision sees the same waists in all layers.
            if decided != (loss, same) and len(self._blocks) < _STALE * self._when_found:
                self._find_waists()
                continue
            now = self._loss(u, v)
            if now is None or now > loss:
                self._offer({(u, v)})
                continue
            # The same loss at the same place of a layer: the same decision.
            decision += decided != (loss, same)
            decided = loss, same
            self._merge(u, v, self._rule(u, v, loss), decision)
        self._merge_unrelated(decision + 1)

    def _order(self) -> list[int]:
        """The blocks in topological order."""
        return sorted(self._blocks, key=self._place.__getitem__)

    def _find_waists(self) -> None:
        """Notes the places of waists, and prices every merger afresh.

        A block comes after all earlier ones if it is the only block so far that feeds none so far;
        and before all later ones if it is the only one from there on that is fed by none from
        there on.
        """
        order = self._order()
        number = {v: i for i, v in enumerate(order)}
        first = [min((number[w] for w in self._after[v]), default=-1) for v in order]
        last = [max((number[u] for u in self._before[v]), default=-1) for v in order]
        after_all = _only_ends(range(len(order)), first)
        before_all = _only_ends(reversed(range(len(order))), last)
        self._waists = [self._place[order[i]] for i in sorted(after_all & before_all)]
        self._when_found = len(order)
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._offer({*map(self._with_first, order), *map(self._with_last, order)})

    def _waist(self, place: int, until: int) -> bool:
        """Whether there is a waist from one place to another."""
        at = bisect_left(self._waists, place)
        return at < len(self._waists) and self._waists[at] <= until

    def _offer(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Queues mergers; those that could make a cycle are left out."""
        for u, v in pairs:
            loss = self._loss(u, v) if u != v else None
            if loss is not None:
                heapq.heappush(self._heap, (loss, self._alike[u], self._place[u], u, v))

    def _with_first(self, u: int) -> tuple[int, int]:
        """A block and the first of its consumers; itself if it has none."""
        return u, min(self._after[u], key=self._place.__getitem__, default=u)

    def _with_last(self, v: int) -> tuple[int, int]:
        """The last of a block's sources, itself if it has none, and the block."""
        return max(self._before[v], key=self._place.__getitem__, default=v), v

    def _loss(self, u: int, v: int) -> float | None:
        """What merging u with its consumer v gives up; None if it could make a cycle."""
        price = self._price(u, v)
        if price is None or price <= 0:
            return price
        return price * (self._time[u] + self._time[v])

    def _price(self, u: int, v: int) -> float | None:
        """What it costs to move a cut between u and v elsewhere, in s; None likewise."""
        behind, in_front = self._price_behind(u, v), self._price_in_front(u, v)
        if behind is None or in_front is None:
            return in_front if behind is None else behind
        return min(behind, in_front)

    def _price_behind(self, u: int, v: int) -> float | None:
        """What it costs to put u behind the cut as well, in s; None if v is not the first of its
        consumers.
        """
        here, price = self._place[v], self._time[u]
        places = [self._place[w] for w in self._after[u]]
        if min(places) != here:
            return None
        if len(places) > 1:
            places.remove(here)
            if not self._waist(here, min(places)):
                price += self._time[v]
        sent = sum([self._bytes[i] for i in self._made[u]])
        received = 0
        for i in self._read[u]:
            # What is read behind the cut for sure crosses it anyway.
            if v not in self._readers[i] and not self._waist(here, self._last_other(i, u, v)):
                received += self._bytes[i]
        return price + self._s_per_byte * (received - sent)

    def _price_in_front(self, u: int, v: int) -> float | None:
        """What it costs to put v in front of the cut as well, in s; None if u is not the last of
        its sources.
        """
        here, price = self._place[u], self._time[v]
        places = [self._place[w] for w in self._before[v]]
        if max(places) != here:
            return None
        if len(places) > 1:
            places.remove(here)
            if not self._waist(max(places), here):
                price += self._time[u]
        sent = sum([self._bytes[i] for i in self._made[v]])
        received = 0
        for i in self._read[v]:
            other = self._last_other(i, u, v)
            # What is read nowhere else behind the cut need not cross it any more.
            if other < 0 or self._waist(other, here):
                received += self._bytes[i]
        return price + self._s_per_byte * (sent - received)

    def _last_other(self, i: int, u: int, v: int) -> int:
        """The place of tensor i's last reader besides u and v; -1 if there is none."""
        place = self._place
        if self._last[i] != place[u] and self._last[i] != place[v]:
            return self._last[i]
        return max([place[w] for w in self._readers[i] if w not in (u, v)], default=-1)

    def _merge(self, u: int, v: int, rule: MergeRule, decision: int) -> None:
        """Puts v into u."""
        place = self._place
        # The block comes after all sources of v: where u is not the last of them it takes the place
        # of v, and then v is the first of u's consumers, so it still comes before all others.
        behind = v in self._after[u] and place[u] < max([place[w] for w in self._before[v]])
        self.mergers.append(Merger(u, v, behind, rule, decision))
        self._join(u, v)
        moved = place[u], place[v]
        if behind:
            place[u] = place[v]
        for i in self._read[u]:
            if self._last[i] in moved:
                self._last[i] = max([place[w] for w in self._readers[i]])
        around = (u, *self._before[u]), (u, *self._after[u])
        self._offer({*map(self._with_first, around[0]), *map(self._with_last, around[1])})

    def _rule(self, u: int, v: int, loss: float) -> MergeRule:
        if min(self._time[u], self._time[v]) <= self._cheap:
            return MergeRule.CHEAP
        if loss <= 0:
            return MergeRule.HEAVY_EDGE
        alone = len(self._after[u]) == 1 and len(self._before[v]) == 1
        return MergeRule.CHAIN if alone else MergeRule.BRANCH

    def _join(self, u: int, v: int) -> None:
        """Gives u all that v has."""
        self._blocks.remove(v)
        self._time[u] += self._time[v]
        self._made[u] |= self._made[v]
        for i in self._read[v]:
            self._readers[i].remove(v)
            self._readers[i].add(u)
        self._read[u] |= self._read[v]
        # Made and read inside from now on; what nobody else reads is sent no more.
        for i in self._made[u] & self._read[u]:
            self._read[u].remove(i)
            self._readers[i].remove(u)
            if not self._readers[i]:
                self._made[u].remove(i)
        for x in self._before[v]:
            self._after[x].remove(v)
            self._after[x].add(u)
        for x in self._after[v]:
            self._before[x].remove(v)
            self._before[x].add(u)
        self._before[u] = (self._before[u] | self._before[v]) - {u}
        self._after[u] = (self._after[u] | self._after[v]) - {u, v}

    def _merge_unrelated(self, decision: int) -> None:
        """Merges neighbours in the order where no block feeds another."""
        while len(self._blocks) > 1:
            order = self._order()
            for u, v in list(pairwise(order))[::2]:
                self._merge(u, v, MergeRule.UNRELATED, decision)
                decision += 1


def _only_ends(numbers: Iterable[int], partner: Sequence[int]) -> set[int]:
    """Of numbers gone through in order, those at which no other one so far lacks its partner."""
    # A number begins to wait at its turn, and ends the wait of all whose partner it is. If one
    # waits then, it is the number itself, which waits for later ones or for ever.
    ends, waiting, awaited = set(), 0, Counter(p for p in partner if p >= 0)
    for i in numbers:
        waiting += 1 - awaited[i]
        if waiting == 1:
            ends.add(i)
    return ends
