"""The program as a mixed integer program, for HiGHS, with memory rows as they are needed.

Variables: x_is, 1 if node i has strategy s; y_est >= 0 per edge and allowed pair.

    minimise    sum c_i(s) x_is + sum M_e(s, t) y_est
    subject to  (m1) sum_s x_is = 1                                  per node
                (m2) sum_t y_est = x_us,  sum_s y_est = x_vt         per edge and strategy
                (m3) sum u_is(t) x_is / free_t <= 1                  per active moment t

With whole x, y is whole. An optimum that does not fit at some moments makes them active, and the
program is solved again. Costs are divided so that the known best assignment costs 1e6.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from planner.artefacts.problem import Status
from planner.solvers.engines.mip import Mip, MipLimits, highs
from planner.solvers.program.core import NEVER, Core
from planner.solvers.program.kernels import left_over, usage_at
from planner.solvers.program.prices import Prices, true_cost
from planner.support.arrays import Ints
from planner.support.brake import Brake

MOST_ENTRIES = 100_000
"""Allowed pairs of a program that is small enough."""
ROOT_WORK, NODE_WORK = 10_000, 600
"""Of HiGHS, per strategy and allowed pair: until it branches, and for each node of its tree. It
counts nodes, and no other work. Measured on programs of a Llama 7B with 4,000 to 7,000 of both."""
VALUE = 1e6
GAP = 1e-8


class Proved(NamedTuple):
    """The answer of the proof.

    Attributes:
        bound: lower bound in the core, in HiGHS' floating point, rounded down.
        picks: an assignment that fits, if one was found.
        cost: of it, in the core.
        done: whether the bound is that of the whole program, to the gap.
    """

    bound: int
    picks: Ints | None
    cost: int
    done: bool


class UntilWall(Brake):
    """A brake that a function pulls."""

    def __init__(self, left_s: Callable[[], float]) -> None:
        self.cut, self._left = False, left_s

    def left_s(self) -> float:
        """Time that is left, in s; at least 0."""
        return max(0.0, self._left())


class Limits(NamedTuple):
    """When the proof ends.

    Attributes:
        nodes: of HiGHS' tree.
        apart: how far above the bound the cost of the answer may be.
    """

    nodes: float = math.inf
    apart: float = 0.0


NO_LIMITS = Limits()


def nodes_within(core: Core, work: int) -> int:
    """The nodes of its tree for which HiGHS is asked about a core; 0 if it is not asked.

    Args:
        work: entries that are looked at in as much time.
    """
    pairs = int((core.matrix < NEVER).sum())
    if pairs > MOST_ENTRIES:
        return 0
    return max(0, (work // (pairs + len(core.cost)) - ROOT_WORK) // NODE_WORK)


def proved(
    prices: Prices, most: int, left_s: Callable[[], float], limits: Limits = NO_LIMITS
) -> Proved:  # fmt: skip
    """The best assignment of a core, and its proof.

    Args:
        prices: of the core; its active moments are the first rows.
        most: cost of the best known assignment, in the core.
        left_s: tells the time that is left.
    """
    core, gap = prices.core, max(GAP, limits.apart / max(most, 1))
    unit = max(most, 1) / VALUE
    moments = [t for t, one in zip(prices.moments, prices.price, strict=True) if one > 0]
    bound = -(2**62)
    while True:
        mip = program(core, moments, unit)
        answer = highs(mip, MipLimits(limits.nodes, gap=gap), {}, UntilWall(left_s))
        if answer.status is Status.INFEASIBLE:
            return Proved(most, None, most, True)
        if math.isfinite(answer.bound):
            bound = max(bound, math.floor(answer.bound * unit))
        if answer.values is None:
            return Proved(bound, None, most, False)
        picks = _picks(core, answer.values)
        left = left_over(core, picks)
        fits = not len(left) or left.min() >= 0
        done = answer.status is Status.OPTIMAL
        if fits or not done:
            proof = done and fits and gap == GAP
            return Proved(bound, picks if fits else None, true_cost(core, picks), proof)
        new = [t for t in prices.peaks(left) if t not in moments]
        if not new:
            return Proved(bound, None, most, False)
        moments += new


def program(core: Core, moments: "list[int]", unit: float) -> Mip:
    """The program with the memory rows of some moments; x first, in the order of the strategies."""
    mip = Mip()
    objective: dict[int, float] = {}
    for s, cost in enumerate(core.cost.tolist()):
        objective[mip.variable(integer=True)] = cost / unit
        assert s < len(mip.low)
    start = core.start.tolist()
    for i in range(core.num_nodes):
        mip.row(dict.fromkeys(range(start[i], start[i + 1]), 1.0), 1.0, 1.0)
    for e, (u, v) in enumerate(core.ends.tolist()):
        _add_edge(mip, core, e, (start[u], start[u + 1]), (start[v], start[v + 1]), unit, objective)
    for t in moments:
        usage, free = usage_at(core, t), max(int(core.free[t]), 1)
        terms = {int(s): float(usage[s] / free) for s in np.flatnonzero(usage)}
        mip.row(terms, high=float(core.free[t] / free))
    mip.objective = objective
    return mip


def _add_edge(
    mip: Mip, core: Core, e: int, rows: "tuple[int, int]", columns: "tuple[int, int]",
    unit: float, objective: "dict[int, float]",
) -> None:  # fmt: skip
    """(m2) of an edge between two ranges of strategies."""
    matrix = core.matrix[core.edge_start[e] : core.edge_start[e + 1]]
    sums: dict[int, dict[int, float]] = {s: {s: -1.0} for r in (rows, columns) for s in range(*r)}
    width = columns[1] - columns[0]
    for at in np.flatnonzero(matrix < NEVER).tolist():
        y = mip.variable()
        objective[y] = int(matrix[at]) / unit
        sums[rows[0] + at // width][y] = 1.0
        sums[columns[0] + at % width][y] = 1.0
    for terms in sums.values():
        mip.row(terms, 0.0, 0.0)


def _picks(core: Core, values: Sequence[float]) -> Ints:
    """The strategies whose x is largest."""
    x = np.array(values[: len(core.cost)])
    return np.array(
        [int(np.argmax(x[core.start[i] : core.start[i + 1]])) for i in range(core.num_nodes)],
        np.int64,
    )
