"""The blocks that a contiguous split may part, and which of them no better split parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Items:
    """The blocks that the search may part, in topological order, in ms and bytes.

    Attributes:
        members: per item, the positions of its nodes in the file.
        predecessors: per item, those that feed it.
        time: per item, on a device; inf where it cannot run there.
        cpu_time: per item, on a CPU.
        size: per item, bytes.
        crossing: the cost of the outputs that several items touch, by these items, ascending.
    """

    members: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    time: tuple[float, ...]
    cpu_time: tuple[float, ...]
    size: tuple[float, ...]
    crossing: dict[tuple[int, ...], float]


def joined(items: Items, left_s: Callable[[], float]) -> Items:
    """The items, with those that weigh nothing in one with their only neighbour on one side; as far
    as there is time, because it makes the search faster and no better.

    Let u be the only predecessor of v, and v take no time and no memory. In any split that parts
    them, v can move to the stage of u, which is an earlier one: its successors stay behind it. Let
    a be the cost of the outputs that u and v alone touch, and b of those that v touches and u does
    not. The device of u no longer pays a, and pays b at the most; so does the device of v, where
    the outputs of b may cross now. Nobody else pays more. So where b <= a, no split is worse for
    it, and u and v may be one. The same holds, the other way round, for an only successor.

    Args:
        left_s: tells the seconds that are left.
    """
    state = _Joining(items)
    # Only what is beside a new item may be joined where it could not be before.
    ahead = [v for v in range(len(items.members)) if state.is_weightless(v)]
    heapify(ahead)
    while ahead and left_s() > 0:
        v = heappop(ahead)
        u = state.partner(v) if v in state.members else None
        if u is not None:
            for w in state.join(v, u):
                heappush(ahead, w)
    return state.items()


class _Joining:
    """The items while they are joined. One that is in another one keeps the other one's number, so
    the order stays topological: all that comes before or after v comes before or after u too.

    Attributes:
        members: per item that is left.
        feeds: per item, those that feed it; fed: those that it feeds.
        outputs: (place in the order of the costs, cost) by the items that touch the outputs.
        touching: per item, the keys of `outputs` that have it.
    """

    def __init__(self, items: Items) -> None:
        self.given = items
        self.members = dict(enumerate(items.members))
        self.feeds = {v: set(feeds) for v, feeds in enumerate(items.predecessors)}
        self.fed: dict[int, set[int]] = {v: set() for v in self.members}
        for v, feeds in self.feeds.items():
            for u in feeds:
                self.fed[u].add(v)
        self.outputs = {
            frozenset(where): (place, cost)
            for place, (where, cost) in enumerate(items.crossing.items())
        }
        self.touching: dict[int, set[frozenset[int]]] = {v: set() for v in self.members}
        for where in self.outputs:
            for v in where:
                self.touching[v].add(where)

    def is_weightless(self, v: int) -> bool:
        """Whether it takes no time and no memory."""
        one = self.given
        return not (one.time[v] > 0 or one.cpu_time[v] > 0 or one.size[v] > 0)

    def partner(self, v: int) -> int | None:
        """The item that a weightless one may be joined with; None if there is none."""
        for near in (self.feeds[v], self.fed[v]):
            if len(near) == 1:
                (u,) = near
                alone = self.outputs.get(frozenset((u, v)), (0, 0.0))[1]
                others = sorted(self.outputs[where] for where in self.touching[v] if u not in where)
                if sum(cost for _, cost in others) <= alone:
                    return u
        return None

    def join(self, v: int, u: int) -> Iterator[int]:
        """Puts v into u, and gives the weightless items that this may concern."""
        beside = self.feeds[v] | self.fed[v] | self.feeds[u] | self.fed[u] | {u}
        beside = beside.union(*self.touching[v], *self.touching[u])
        self.members[u] = (*self.members[u], *self.members.pop(v))
        for near, back in ((self.feeds, self.fed), (self.fed, self.feeds)):
            own = near.pop(v)
            for w in own:
                back[w].discard(v)
                if w != u:
                    back[w].add(u)
            near[u] = (near[u] | own) - {u, v}
        self._move_outputs(v, u)
        return (w for w in sorted(beside - {v}) if self.is_weightless(w))

    def _move_outputs(self, v: int, u: int) -> None:
        """Gives the outputs that v touches to u. Costs of outputs that the same items touch now are
        summed in the order of the costs, which the sum takes its place in.
        """
        parts: dict[frozenset[int], list[tuple[int, float]]] = {}
        for where in self.touching.pop(v):
            parts.setdefault(where - {v} | {u}, []).append(self.outputs.pop(where))
            for w in where - {v}:
                self.touching[w].discard(where)
        for where, costs in parts.items():
            if len(where) < 2:
                continue
            if where in self.outputs:
                costs.append(self.outputs[where])
            costs.sort()
            self.outputs[where] = costs[0][0], sum(cost for _, cost in costs)
            for w in where:
                self.touching[w].add(where)

    def items(self) -> Items:
        """The items that are left."""
        place = {v: p for p, v in enumerate(sorted(self.members))}
        ordered = sorted(self.outputs.items(), key=lambda one: one[1][0])
        return Items(
            members=tuple(self.members[v] for v in place),
            predecessors=tuple(tuple(sorted(place[u] for u in self.feeds[v])) for v in place),
            time=tuple(self.given.time[v] for v in place),
            cpu_time=tuple(self.given.cpu_time[v] for v in place),
            size=tuple(self.given.size[v] for v in place),
            crossing={tuple(sorted(place[v] for v in where)): cost for where, (_, cost) in ordered},
        )
