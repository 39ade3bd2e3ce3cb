"""A choice program in whole numbers and flat arrays, which all steps of the solver work on.

Costs are multiplied by a power of two and rounded down, so that every sum of them fits 64 bits and
none is more than the cost that it stands for: a bound of the core is one of the program. The least
cost of a node or an edge, and the least bytes of what is held, are taken off and added once.

Of the moments only those stay at which a largest set is held: what is held at another one is held
there, too, and bytes are not negative.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from planner.solvers.program.problem import FORBIDDEN, ChoiceProgram, Numbers
from planner.support.arrays import Ints

NEVER = 1 << 60
"""Cost in the core of what is forbidden. Two of them still fit 64 bits."""
TOTAL_BITS = 56
"""The largest costs of all nodes and edges sum to less than 2^56."""
MOST_SHIFT = 24


class Core(NamedTuple):
    """Nodes, edges and what is held. Strategies of all nodes stand behind each other.

    Attributes:
        start: (n + 1,) first strategy of each node.
        cost: (S,) by strategy; below 2^56, or NEVER.
        ends: (m, 2) nodes u < v of an edge, each pair once.
        edge_start: (m + 1,) first entry of each edge.
        matrix: edge by edge (k_u, k_v), row-major; below 2^56, or NEVER.
        near_start: (n + 1,) first entry in `near` of each node.
        near: (2 m,) edges of each node, by the other end.
        part_node, part_first, part_last: (p,) node and moments of what is held.
        part_start: (p + 1,) first entry in `part_bytes`, of as many as the node has strategies.
        part_bytes: by strategy.
        free: (T,) bytes that are left at each moment.
    """

    start: Ints
    cost: Ints
    ends: Ints
    edge_start: Ints
    matrix: Ints
    near_start: Ints
    near: Ints
    part_node: Ints
    part_first: Ints
    part_last: Ints
    part_start: Ints
    part_bytes: Ints
    free: Ints

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.start) - 1


class Parts(NamedTuple):
    """What is held: the fields `part_...` of a core."""

    node: Ints
    first: Ints
    last: Ints
    start: Ints
    bytes: Ints


def assembled(start: Ints, cost: Ints, ends: Ints, matrix: Ints, parts: Parts, free: Ints) -> Core:
    """A core; the arguments are its fields."""
    sizes, m = np.diff(start), len(ends)
    node, other = ends.T.ravel(), ends[:, ::-1].T.ravel()
    near = np.concatenate([np.arange(m), np.arange(m)])[np.lexsort((other, node))]
    return Core(
        start=start,
        cost=cost,
        ends=ends,
        edge_start=starts(sizes[ends[:, 0]] * sizes[ends[:, 1]]),
        matrix=matrix,
        near_start=starts(np.bincount(node, minlength=len(sizes))),
        near=near.astype(np.int64),
        part_node=parts.node,
        part_first=parts.first,
        part_last=parts.last,
        part_start=parts.start,
        part_bytes=parts.bytes,
        free=free,
    )


class Scale(NamedTuple):
    """cost of the program >= (cost of the core + constant) / 2^shift."""

    shift: int
    constant: int

    def cost(self, core_cost: int) -> Fraction:
        """The cost in the program that one in the core stands for."""
        return Fraction(core_cost + self.constant) / Fraction(2) ** self.shift

    def core_cost(self, cost: float) -> int:
        """The least cost in the core that stands for at least as much; `NEVER` for infinity."""
        if cost == math.inf:
            return NEVER
        return math.ceil(Fraction(cost) * Fraction(2) ** self.shift) - self.constant


def core_of(program: ChoiceProgram) -> tuple[Core, Scale]:
    """The core of a program with at least one node."""
    sizes = np.array([len(one) for one in program.cost], dtype=np.int64)
    start = starts(sizes)
    cost = np.concatenate(program.cost)
    ends = np.array(program.edges, dtype=np.int64).reshape(-1, 2)
    flat = [one.ravel() for one in program.edge_cost]
    matrix = np.concatenate(flat) if flat else np.empty(0, cost.dtype)
    edge_start = starts(sizes[ends[:, 0]] * sizes[ends[:, 1]])
    shift = _shift(cost, start, matrix, edge_start)
    cost, lowest = _scaled(cost, start, shift)
    matrix, lowest_edges = _scaled(matrix, edge_start, shift)
    ends, matrix = _once(ends, edge_start, matrix, sizes)
    parts, free = _parts(program)
    core = assembled(start, cost, ends, matrix, parts, free)
    return core, Scale(shift, lowest + lowest_edges)


def starts(sizes: Numbers) -> Ints:
    """Where rows of these sizes begin, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _allowed(values: Numbers) -> Numbers:
    return values < FORBIDDEN if values.dtype == np.int64 else np.isfinite(values)


def _shift(cost: Numbers, start: Ints, matrix: Numbers, edge_start: Ints) -> int:
    """By which power of two costs are multiplied: largest spreads of all rows sum to 2^56."""
    total = 0.0
    for values, rows in ((cost, start), (matrix, edge_start)):
        if len(values):
            good = np.where(_allowed(values), values.astype(np.float64), 0.0)
            total += float(np.maximum.reduceat(np.abs(good), rows[:-1]).sum())
    if total == 0:
        return 0
    shift = TOTAL_BITS - 2 - int(np.ceil(np.log2(total)))
    return min(shift, MOST_SHIFT) if cost.dtype == np.int64 else shift


def _scaled(values: Numbers, rows: Ints, shift: int) -> tuple[Ints, int]:
    """Costs in the core, from 0 on in each row; the sum of what was taken off."""
    if not len(values):
        return np.empty(0, np.int64), 0
    good = _allowed(values)
    if values.dtype == np.int64:
        plain = np.where(good, values, 0)
        whole = plain << shift if shift >= 0 else plain >> -shift
    else:
        whole = np.floor(np.ldexp(np.where(good, values, 0.0), shift)).astype(np.int64)
    whole = np.where(good, whole, NEVER)
    lowest = np.minimum.reduceat(whole, rows[:-1])
    lowest[lowest == NEVER] = 0
    taken = np.repeat(lowest, np.diff(rows))
    return np.where(good, whole - taken, NEVER), int(lowest.sum())


def _once(ends: Ints, edge_start: Ints, matrix: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Each pair of nodes once, the lower one first; matrices of one pair are added up."""
    found: dict[tuple[int, int], Ints] = {}
    begin, size = edge_start.tolist(), sizes.tolist()
    for e, (u, v) in enumerate(ends.tolist()):
        one = matrix[begin[e] : begin[e + 1]].reshape(size[u], size[v])
        pair, one = ((u, v), one) if u < v else ((v, u), one.T)
        found[pair] = np.minimum(found[pair] + one, NEVER) if pair in found else one
    pairs = sorted(found)
    flat = [found[pair].ravel() for pair in pairs]
    whole = np.concatenate(flat) if flat else matrix
    return np.array(pairs, dtype=np.int64).reshape(-1, 2), whole


def _parts(program: ChoiceProgram) -> tuple[Parts, Ints]:
    """What is held, at the moments that count, and what is free at these; the least bytes of each
    part are taken off both.
    """
    listed = [(i, part) for i, parts in enumerate(program.held) for part in parts]
    if program.limit_bytes is None or not listed:
        none = np.empty(0, np.int64)
        return Parts(none, none, none, np.zeros(1, np.int64), none), none
    node = np.array([i for i, _ in listed], dtype=np.int64)
    first = np.array([part.first for _, part in listed], dtype=np.int64)
    last = np.array([part.last for _, part in listed], dtype=np.int64)
    size = np.concatenate([part.bytes for _, part in listed])
    begin = starts(np.array([len(part.bytes) for _, part in listed]))
    begins = np.unique(first)
    ends_before = np.searchsorted(np.sort(last), [*begins, np.iinfo(np.int64).max])
    moments = begins[np.diff(ends_before) > 0]  # something ends before the next one begins
    first = np.searchsorted(moments, first)
    last = np.searchsorted(moments, last, side="right") - 1
    free = np.full(len(moments), program.limit_bytes, dtype=np.int64)
    return without_least(Parts(node, first, last, begin, size), free)


def without_least(parts: Parts, free: Ints) -> tuple[Parts, Ints]:
    """Parts whose least bytes are 0, without those of which no strategy holds anything, and what
    is free beside the bytes that were taken off.
    """
    node, first, last, begin, size = parts
    if not len(node):
        return parts, free
    counts = np.diff(begin)
    least = np.minimum.reduceat(size, begin[:-1])
    change = np.zeros(len(free) + 1, np.int64)
    np.add.at(change, first, least)
    np.subtract.at(change, last + 1, least)
    size = size - np.repeat(least, counts)
    some = np.maximum.reduceat(size, begin[:-1]) > 0
    size = size[np.repeat(some, counts)]
    kept = Parts(node[some], first[some], last[some], starts(counts[some]), size)
    return kept, free - np.cumsum(change)[:-1]
