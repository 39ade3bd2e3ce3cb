"""The best prices: a cutting plane in the prices of the active moments.

Every assignment x, whether it fits or not, bounds L (`prices.py`) from above at all prices:

    L(lambda) <= cost(x) - sum_t lambda_t left_t(x)

The master, a small linear program, takes the prices at which the least of these is largest, in a
box around the best prices so far; the messages and the elimination at these prices give a bound and
the next assignment. Its highest peaks become active, so few of many thousand moments ever are.
"""

from typing import NamedTuple

import numpy as np

from planner.solvers.program.kernels import left_over
from planner.solvers.program.prices import true_cost
from planner.solvers.program.search import Searcher
from planner.support.arrays import Floats, Ints

GROWS, SHRINKS = 2.0, 0.4
LEAST_RADIUS = 1e-4
CLOSE = 1e-7
"""Relative distance of the master's value from the best bound at which the prices are the best."""
MOST_CUTS = 80


class _Cut(NamedTuple):
    cost: float
    left: Ints


class Climb:
    """The cutting plane over a search's prices.

    Attributes:
        bound: the best so far, in the core; -2^62 before the first.
        done: whether the prices are the best, as far as messages and elimination can say.
    """

    def __init__(self, search: Searcher) -> None:
        self.search = search
        self.bound, self.done = -(2**62), False
        self._cuts: list[_Cut] = []
        self._radius = 1.0
        self._first: Floats = np.zeros(0)

    def begin(self) -> None:
        """The bound at the prices so far; without prices, also prices at which an assignment fits,
        if one is found.
        """
        search, prices = self.search, self.search.prices
        if len(prices.moments):
            self._evaluate(prices.price)
            return
        self._evaluate(np.zeros(0))
        found = search.repaired(np.zeros(len(prices.moments)), 10)
        if found is not None:
            search.see(found[0])
            self._add(found[0])
            self._first = found[1]
            prices.price = found[1] * 0.7
            self._evaluate(prices.price)

    def step(self) -> None:
        """One price more."""
        prices = self.search.prices
        self._first = _padded(self._first, len(prices.moments))
        price, value = self._master()
        if value - self.bound <= CLOSE * abs(self.bound) or self._radius < LEAST_RADIUS:
            self.done = True
            return
        before = self.bound
        at_edge = self._evaluate(price)
        gained = self.bound - before
        if gained > 0.1 * (value - before):
            self._radius *= GROWS
        elif gained <= 0 and not at_edge:
            self._radius *= SHRINKS

    def _evaluate(self, price: Floats) -> bool:
        """The bound and an assignment at prices; whether a new moment became active."""
        search, prices = self.search, self.search.prices
        theta, given = prices.theta(price)
        bound = prices.bound(theta, given)
        if bound > self.bound:
            self.bound, prices.price = bound, price
        picks = prices.rounded(theta)
        for block in search.blocks():
            picks = search.improved(theta, picks, block)
        search.see(picks)
        return self._add(picks)

    def _add(self, picks: Ints) -> bool:
        prices = self.search.prices
        left = left_over(prices.core, picks)
        self._cuts = [*self._cuts, _Cut(float(true_cost(prices.core, picks)), left)][-MOST_CUTS:]
        if len(left) and left.min() < 0:
            return prices.activate(prices.peaks(left))
        return False

    def _master(self) -> tuple[Floats, float]:
        """The prices in the box at which the cuts allow most, and what they allow."""
        from ortools.linear_solver import pywraplp

        prices = self.search.prices
        unit = max(abs(cut.cost) for cut in self._cuts) or 1.0
        free = np.maximum(prices.core.free[prices.moments].astype(float), 1.0)
        centre = prices.price * free / unit
        reach = np.maximum(_padded(self._first, len(free)) * free / unit, centre)
        reach = np.maximum(reach, reach.max(initial=0.01) * 0.3) * self._radius
        solver = pywraplp.Solver.CreateSolver("GLOP")
        value = solver.NumVar(-solver.infinity(), solver.infinity(), "")
        price = [
            solver.NumVar(max(0.0, at - by), at + by, "")
            for at, by in zip(centre, reach, strict=True)
        ]
        for cut in self._cuts:
            row = solver.Constraint(-solver.infinity(), cut.cost / unit)
            row.SetCoefficient(value, 1.0)
            for one, left in zip(price, cut.left[prices.moments] / free, strict=True):
                row.SetCoefficient(one, float(left))
        solver.Maximize(value)
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return prices.price, float(self.bound)
        found = np.array([one.solution_value() for one in price])
        return np.maximum(found, 0.0) * unit / free, value.solution_value() * unit


def _padded(price: Floats, count: int) -> Floats:
    return np.concatenate([price, np.zeros(count - len(price))])
