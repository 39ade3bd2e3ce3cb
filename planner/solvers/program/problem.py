"""The data of a choice program, and what an assignment costs and holds.

    minimise    sum_i c_i(x_i) + sum_(u,v) M_uv(x_u, x_v)
    subject to  sum over what is held at t of its bytes(x_i) <= limit, at every moment t

x_i is the strategy of node i. A node holds bytes in any number of intervals of moments, in each of
them other ones. A cost of at least `FORBIDDEN` (integers), or infinity (floats), forbids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.artefacts.problem import Status

Numbers = npt.NDArray[Any]
"""Integers, int64, or floats, float64."""
FORBIDDEN = 10**18
"""An integer cost from here on forbids a strategy or a pair of them."""
MOST_BYTES = 2**62
"""Sum of the largest bytes of everything that is held: usages stay within 64 bits."""


class Held(NamedTuple):
    """Bytes that a node holds from one moment to another, by its strategy.

    Attributes:
        first, last: the moments, both included.
        bytes: (k,) int64 by strategy, >= 0.
    """

    first: int
    last: int
    bytes: Numbers


@dataclass(frozen=True, slots=True)
class ChoiceProgram:
    """The program.

    Attributes:
        cost: per node, (k,) by strategy; int64, or float64, of all nodes and edges alike.
        edges: per edge, its two nodes; a pair may stand there twice, and in both orders.
        edge_cost: per edge, (k_u, k_v).
        held: per node.
        limit_bytes: at every moment; None for no limit.

    Raises:
        ValueError: if lengths differ, a node is unknown, bytes are negative or too large for sums
            of 64 bits, a moment is negative, or a cost is no number; all of it.
    """

    cost: tuple[Numbers, ...]
    edges: tuple[tuple[int, int], ...]
    edge_cost: tuple[Numbers, ...]
    held: tuple[tuple[Held, ...], ...]
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        problems = [*self._costs(), *self._edges(), *self._held()]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def is_integer(self) -> bool:
        """Whether costs are integers."""
        return not self.cost or self.cost[0].dtype == np.int64

    def _costs(self) -> list[str]:
        kind = np.dtype(np.int64 if self.is_integer else np.float64)
        problems = [
            f"cost[{i}]: expected at least one number of type {kind}, got {one.dtype} {one.shape}"
            for i, one in enumerate(self.cost)
            if one.dtype != kind or one.ndim != 1 or not len(one)
        ]
        if not problems and not self.is_integer:
            everything = np.concatenate([*self.cost, *(one.ravel() for one in self.edge_cost)])
            if np.isnan(everything).any() or (everything == -np.inf).any():
                problems.append("cost: expected numbers, or inf for what is forbidden")
        return problems

    def _edges(self) -> list[str]:
        if len(self.edges) != len(self.edge_cost):
            return [f"edge_cost: expected one per edge, {len(self.edges)}: {len(self.edge_cost)}"]
        n, problems = len(self.cost), []
        for e, ((u, v), matrix) in enumerate(zip(self.edges, self.edge_cost, strict=True)):
            if not (0 <= u < n and 0 <= v < n and u != v):
                problems.append(f"edges[{e}]: expected two of nodes 0 to {n - 1}, got {u} and {v}")
            elif matrix.shape != (len(self.cost[u]), len(self.cost[v])):
                due = (len(self.cost[u]), len(self.cost[v]))
                problems.append(f"edge_cost[{e}]: expected shape {due}, got {matrix.shape}")
            elif matrix.dtype != self.cost[u].dtype:
                problems.append(f"edge_cost[{e}]: expected type {self.cost[u].dtype}")
        return problems

    def _held(self) -> list[str]:
        if len(self.held) != len(self.cost):
            return [f"held: expected an entry per node, {len(self.cost)}, got {len(self.held)}"]
        problems, total = [], 0
        for i, parts in enumerate(self.held):
            for part in parts:
                if part.bytes.shape != self.cost[i].shape:
                    problems.append(
                        f"held[{i}]: expected {len(self.cost[i])} usages, got {len(part.bytes)}"
                    )
                elif part.bytes.min() < 0:
                    problems.append(f"held[{i}]: expected no negative usage")
                elif not 0 <= part.first <= part.last:
                    problems.append(f"held[{i}]: expected moments 0 <= first <= last")
                else:
                    total += int(part.bytes.max())
        if total >= MOST_BYTES:
            problems.append(f"held: expected usages with a sum below 2^62, got {total}")
        return problems


def cost_of(program: ChoiceProgram, picks: Sequence[int]) -> int | float:
    """The cost of an assignment, exact for integers; inf if it takes what is forbidden."""
    costs = [one[picks[i]].item() for i, one in enumerate(program.cost)]
    for (u, v), matrix in zip(program.edges, program.edge_cost, strict=True):
        costs.append(matrix[picks[u], picks[v]].item())
    if not program.is_integer:
        return math.fsum(costs)
    return math.inf if max(costs, default=0) >= FORBIDDEN else sum(costs)


def peak_bytes(program: ChoiceProgram, picks: Sequence[int]) -> int:
    """The most bytes that an assignment holds at a moment."""
    change: dict[int, int] = {}
    for i, parts in enumerate(program.held):
        for part in parts:
            size = int(part.bytes[picks[i]])
            change[part.first] = change.get(part.first, 0) + size
            change[part.last + 1] = change.get(part.last + 1, 0) - size
    held = peak = 0
    for moment in sorted(change):
        held += change[moment]
        peak = max(peak, held)
    return peak


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer.

    Attributes:
        status: OPTIMAL if the bound proves it to be.
        picks: a strategy per node; None if the status is INFEASIBLE or UNKNOWN.
        cost: of the picks; inf without them.
        bound: no assignment costs less; an integer if costs are, else a float; inf if INFEASIBLE.
        reproducible: whether the same program and seed give the same bytes: False if the clock or
            Ctrl-C ended the search.
        work: entries that the first process looked at.
    """

    status: Status
    picks: tuple[int, ...] | None
    cost: int | float
    bound: int | float
    reproducible: bool = True
    work: int = 0

    @property
    def gap(self) -> float:
        """(cost - bound) / |bound|; 0 if both are equal, inf where one is unknown."""
        if self.picks is None or self.bound == -math.inf:
            return math.inf
        if self.cost <= self.bound:
            return 0.0
        return (self.cost - self.bound) / abs(self.bound) if self.bound else math.inf
