"""Reductions that keep an optimum, to a fixpoint, and the way back to the nodes from before.

    (r1) a strategy without an allowed partner on some edge goes (arc consistency)
    (r2) a strategy that another one dominates goes                   `undominated`
    (r3) a node with one strategy is none: its costs go to its neighbours, its bytes are not free
    (r4) an edge whose matrix is a sum a(x_u) + b(x_v) is none: a and b go to its nodes
    (r5) if every strategy of v leaves one of u, then x_u = f(x_v) in every allowed assignment: u's
         costs, edges and bytes become v's, at the strategy f(x_v)

(r1), (r3), (r4) and (r5) keep all allowed assignments with their costs and bytes, (r2) an optimum.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.solvers.program.core import NEVER, Core, Parts, assembled, starts, without_least
from planner.solvers.program.reduce_kernels import (
    COLUMN_TO_ROW,
    ROW_TO_COLUMN,
    SEPARABLE,
    consistent,
    kind,
    kinds,
    picked,
    undominated,
)
from planner.support.arrays import Bools, Ints


class Merge(NamedTuple):
    """x_gone = map[x_into]; `into` is -1, and map has one entry, where the strategy is settled."""

    gone: int
    into: int
    map: Ints


class Step(NamedTuple):
    """One step of a reduction.

    Attributes:
        kept: (S,) strategies that are left.
        start: (n + 1,) before the step.
        merges: in the order in which they were made; by nodes from before.
        nodes: those that are left, ascending.
    """

    kept: Bools
    start: Ints
    merges: tuple[Merge, ...]
    nodes: Ints


class Reduced(NamedTuple):
    """A core after its reduction.

    Attributes:
        core: what is left; may have no nodes.
        constant: cost of what is settled.
        steps: of the reduction, in their order.
    """

    core: Core
    constant: int
    steps: tuple[Step, ...]

    def expanded(self, picks: Ints) -> Ints:
        """The strategies of the nodes from before, from those of the core."""
        for step in reversed(self.steps):
            picks = _before(step, picks)
        return picks

    def shrunk(self, picks: Ints) -> Ints | None:
        """The strategies of the core's nodes, from those from before; None if one is gone."""
        for step in self.steps:
            at = step.start[:-1] + picks
            if not step.kept[at].all():
                return None
            before = np.concatenate([[0], np.cumsum(step.kept)])
            picks = (before[at] - before[step.start[:-1]])[step.nodes]
        return picks

    def then(self, later: "Reduced") -> "Reduced":
        """This reduction and one of its core."""
        return Reduced(later.core, self.constant + later.constant, self.steps + later.steps)


def _before(step: Step, picks: Ints) -> Ints:
    """Strategies before a step."""
    left = np.zeros(len(step.start) - 1, np.int64)
    left[step.nodes] = picks
    for merge in reversed(step.merges):
        left[merge.gone] = merge.map[0 if merge.into < 0 else left[merge.into]]
    kept = np.flatnonzero(step.kept)
    first = np.searchsorted(kept, step.start[:-1])
    strategies: Ints = kept[first + left] - step.start[:-1]
    return strategies


def reduced(core: Core, alive: Bools | None = None, *, dominance: bool = True) -> Reduced | None:
    """A core after all reductions; None if it is found to have no assignment that is allowed and
    fits.

    Args:
        alive: (S,) strategies that are left; None for all.
        dominance: whether strategies may go that are allowed, (r2).
    """
    steps: list[Step] = []
    constant = 0
    while True:
        alive = _left(core, alive, dominance)
        if alive is None:
            return None
        changed = not alive.all()
        start, thin = core.start, _without(core, alive)
        core, merges, nodes, more = _merged(thin)
        constant += more
        if not changed and not merges and len(core.ends) == len(thin.ends):
            return None if (core.free < 0).any() else Reduced(core, constant, tuple(steps))
        steps.append(Step(alive, start, merges, nodes))
        alive = None


def _left(core: Core, alive: Bools | None, dominance: bool) -> Bools | None:
    """(r1) and (r2), to their fixpoint."""
    alive = np.ones(len(core.cost), np.bool_) if alive is None else alive.copy()
    order = np.argsort(core.part_node, kind="stable")
    part_of = starts(np.bincount(core.part_node, minlength=core.num_nodes))
    node, todo = np.repeat(np.arange(core.num_nodes), np.diff(core.start)), None
    while True:
        before = alive.copy()
        if not consistent(core, alive):
            return None
        if todo is None:
            todo = np.ones(core.num_nodes, np.bool_)
        else:
            ends, lost = core.ends, np.zeros(core.num_nodes, np.bool_)
            lost[node[before != alive]] = True
            todo[ends[lost[ends[:, 0]], 1]] = todo[ends[lost[ends[:, 1]], 0]] = True
        if not dominance or not undominated(core, alive, part_of, order, todo):
            return alive


def _without(core: Core, alive: Bools) -> Core:
    """The core of the strategies that are left."""
    if alive.all():
        return core
    before = np.concatenate([[0], np.cumsum(alive)])
    start = before[core.start]
    place = before[:-1] - np.repeat(start[:-1], np.diff(core.start))
    sizes = np.diff(start)
    edge_start = starts(sizes[core.ends[:, 0]] * sizes[core.ends[:, 1]])
    own = np.repeat(core.start[core.part_node] - core.part_start[:-1], np.diff(core.part_start))
    size = core.part_bytes[alive[np.arange(len(core.part_bytes)) + own]]
    part_start = starts(sizes[core.part_node])
    parts, free = without_least(
        Parts(core.part_node, core.part_first, core.part_last, part_start, size), core.free
    )
    matrix = picked(core, alive, place, start, edge_start)
    return assembled(start, core.cost[alive], core.ends, matrix, parts, free)


class _Graph:
    """A core as nodes with neighbours, while nodes are merged.

    Attributes:
        cost: per node, (k,).
        near: per node, the matrix (k, k_j) of each neighbour j.
        parts: per node, what it holds: the part and the bytes by strategy.
        gone: whether a node is merged.
        merges: so far.
        queue: merges to be considered: growth, u, v where x_u may be f(x_v).
    """

    def __init__(self, core: Core) -> None:
        start, begin = core.start.tolist(), core.edge_start.tolist()
        n = core.num_nodes
        self.cost = [core.cost[start[i] : start[i + 1]].copy() for i in range(n)]
        self.near: list[dict[int, Ints]] = [{} for _ in range(n)]
        self.parts: list[list[tuple[int, Ints]]] = [[] for _ in range(n)]
        self.gone = [False] * n
        self.merges: list[Merge] = []
        self.queue: list[tuple[int, int, int]] = []
        self.constant = 0
        flags = kinds(core).tolist()
        for e, (u, v) in enumerate(core.ends.tolist()):
            matrix = core.matrix[begin[e] : begin[e + 1]]
            matrix = matrix.reshape(start[u + 1] - start[u], start[v + 1] - start[v])
            if flags[e] & SEPARABLE:
                self._split(u, v, matrix)
                continue
            self.near[u][v], self.near[v][u] = matrix, matrix.T
        begin = core.part_start.tolist()
        for p, i in enumerate(core.part_node.tolist()):
            self.parts[i].append((p, core.part_bytes[begin[p] : begin[p + 1]]))
        for e, (u, v) in enumerate(core.ends.tolist()):
            if v in self.near[u]:
                self._consider(u, v, flags[e])

    def _split(self, u: int, v: int, matrix: Ints) -> None:
        """(r4)."""
        self.cost[u] = self.cost[u] + matrix[:, 0]
        self.cost[v] = self.cost[v] + matrix[0] - matrix[0, 0]

    def _consider(self, u: int, v: int, flags: int) -> None:
        """Puts the merges that an edge allows into the queue."""
        if flags & COLUMN_TO_ROW:
            heapq.heappush(self.queue, (self._growth(u, v), u, v))
        if flags & ROW_TO_COLUMN:
            heapq.heappush(self.queue, (self._growth(v, u), v, u))

    def _growth(self, u: int, v: int) -> int:
        """Entries of matrices and parts that are copied if u is merged into v."""
        return len(self.cost[v]) * (len(self.near[u]) + len(self.parts[u]))

    def merge_all(self) -> None:
        """(r3) and (r5)."""
        for i in range(len(self.cost)):
            if len(self.cost[i]) == 1:
                self._settle(i)
        while self.queue:
            growth, u, v = heapq.heappop(self.queue)
            if self.gone[u] or self.gone[v] or v not in self.near[u]:
                continue
            now = self._growth(u, v)
            if now > growth:
                heapq.heappush(self.queue, (now, u, v))
            else:
                self._merge(u, v)

    def _settle(self, i: int) -> None:
        """(r3); the bytes of its parts have become 0 already."""
        self.gone[i] = True
        self.merges.append(Merge(i, -1, np.zeros(1, np.int64)))
        self.constant += int(self.cost[i][0])
        for j, matrix in self.near[i].items():
            self.cost[j] = np.minimum(self.cost[j] + matrix[0], NEVER)
            del self.near[j][i]
        self.near[i] = {}

    def _merge(self, u: int, v: int) -> None:
        """(r5), of u into v."""
        between = self.near[u].pop(v)
        del self.near[v][u]
        map_ = between.argmin(axis=0)
        self.gone[u] = True
        self.merges.append(Merge(u, v, map_))
        moved = self.cost[u][map_] + between[map_, np.arange(len(map_))]
        self.cost[v] = np.minimum(self.cost[v] + moved, NEVER)
        for w, matrix in self.near[u].items():
            del self.near[w][u]
            together = matrix[map_]
            if w in self.near[v]:
                together = np.minimum(together + self.near[v][w], NEVER)
            flags = kind(together)
            if flags & SEPARABLE:
                self._split(v, w, together)
                self.near[v].pop(w, None)
                self.near[w].pop(v, None)
                continue
            self.near[v][w], self.near[w][v] = together, together.T
            self._consider(v, w, flags)
        self.near[u] = {}
        self.parts[v] += [(p, size[map_]) for p, size in self.parts[u]]
        self.parts[u] = []


def _merged(core: Core) -> tuple[Core, tuple[Merge, ...], Ints, int]:
    """(r3), (r4) and (r5): the core, the merges, the nodes that are left, and the cost settled."""
    graph = _Graph(core)
    graph.merge_all()
    nodes = np.flatnonzero(~np.array(graph.gone, np.bool_)).astype(np.int64)
    number = {i: at for at, i in enumerate(nodes.tolist())}
    costs = [graph.cost[i] for i in number]
    sizes = np.array([len(one) for one in costs], np.int64)
    pairs = [(i, j) for i in number for j in sorted(graph.near[i]) if i < j]
    ends = np.array([(number[i], number[j]) for i, j in pairs], np.int64).reshape(-1, 2)
    held = [(at, p, size) for i, at in number.items() for p, size in graph.parts[i]]
    owner = np.array([at for at, _, _ in held], np.int64)
    kept = np.array([p for _, p, _ in held], np.int64)
    parts, free = without_least(
        Parts(
            owner, core.part_first[kept], core.part_last[kept], starts(sizes[owner]),
            _flat([size for _, _, size in held]),
        ),
        core.free,
    )  # fmt: skip
    matrix = _flat([graph.near[i][j].ravel() for i, j in pairs])
    whole = assembled(starts(sizes), _flat(costs), ends, matrix, parts, free)
    return whole, tuple(graph.merges), nodes, graph.constant


def _flat(rows: Sequence[Ints]) -> Ints:
    return np.concatenate(rows) if rows else np.empty(0, np.int64)
