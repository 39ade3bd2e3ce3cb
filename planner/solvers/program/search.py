"""The search for assignments: conditioned elimination on random blocks at prices of memory, and new
starts from other prices.

A block is improved at perturbed prices; of what changes, the parts that are better and fit are
taken (`search_kernels.take`). A new start draws prices around the best ones, takes the messages'
assignment there, raises prices where it does not fit until it does, and improves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import numpy as np

from planner.solvers.program.core import Core, starts
from planner.solvers.program.elimination_kernels import draw_from, eliminated, ordered
from planner.solvers.program.kernels import left_over
from planner.solvers.program.prices import CALL_WORK, Prices, fits, true_cost
from planner.solvers.program.search_kernels import ball, take
from planner.support.arrays import Floats, Ints

BLOCK = 1000
"""Nodes of a block."""
ENTRIES = 2e5
"""Of the largest table of an elimination, at most."""
RAISED = 1.4
"""Factor of the price of a moment that is over the limit."""
MOST_RAISES = 80
FIRST_SHARE = 0.02
"""The first price of a moment lets all its bytes cost this share of the assignment."""


@dataclass
class Searcher:
    """A search over one core.

    Attributes:
        prices: the active moments and their prices.
        seed: of the draws.
        over: says whether to end; asked between blocks.
        entries: of the largest table of an elimination.
        picks: the best assignment that fits; None without one.
        cost: of it, in the core.
        work: entries of tables that were added up so far.
    """

    prices: Prices
    seed: int
    over: Callable[[], bool] = lambda: False
    entries: float = ENTRIES
    picks: Ints | None = None
    cost: int = 2**62
    work: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        draw_from(self.seed)
        core = self.core
        self._parts = np.argsort(core.part_node, kind="stable")
        self._part_of = starts(np.bincount(core.part_node, minlength=core.num_nodes))

    @property
    def core(self) -> Core:
        """That is searched."""
        return self.prices.core

    @property
    def all_work(self) -> int:
        """Entries of matrices and tables that were looked at so far."""
        return self.work + self.prices.work

    def see(self, picks: Ints) -> bool:
        """Keeps an assignment if it is the best that fits; whether it is."""
        cost = true_cost(self.core, picks)
        if cost < self.cost and fits(self.core, picks):
            self.cost, self.picks = cost, picks.copy()
            return True
        return False

    def blocks(self, share: float = 1.0) -> "list[Ints]":
        """Random connected blocks that have a share of all nodes between them."""
        n = self.core.num_nodes
        seen = np.zeros(n, np.bool_)
        size = min(n, max(1, int(BLOCK * self.rng.uniform(0.5, 1.0)))) if n > BLOCK else n
        found: list[Ints] = []
        for seed in self.rng.permutation(n):
            if not seen[seed]:
                found.append(ball(self.core, seed, size, seen))
            if seen.sum() >= share * n:
                break
        return _joined(found, size)

    def improved(self, theta: Ints, picks: Ints, block: Ints) -> Ints:
        """An assignment whose nodes of a block are the best at some costs, memory aside."""
        new = picks.copy()
        order = ordered(self.core, block, log(self.entries))
        self.work += CALL_WORK + eliminated(self.core, theta, order, new) + len(block) ** 2
        return new

    def at_prices(self, theta: Ints, sweeps: int) -> Ints:
        """A good assignment at some costs, memory aside."""
        self.prices.bound(theta, 0, sweeps)
        picks = self.prices.rounded(theta)
        for block in self.blocks():
            picks = self.improved(theta, picks, block)
            if self.over():
                break
        return picks

    def repaired(self, price: Floats, sweeps: int) -> tuple[Ints, Floats] | None:
        """An assignment that fits, at prices that are raised until one does, and these.

        Args:
            price: of the active moments, to start from.
        """
        for _ in range(MOST_RAISES):
            theta, _ = self.prices.theta(price)
            picks = self.at_prices(theta, sweeps)
            left = left_over(self.core, picks)
            if (left >= 0).all():
                return picks, price
            peaks = self.prices.peaks(left)
            self.prices.activate(peaks)
            price = np.concatenate([price, np.zeros(len(self.prices.moments) - len(price))])
            cost = max(true_cost(self.core, picks), 1)
            for t in peaks:
                at = self.prices.moments.index(t)
                first = FIRST_SHARE * cost / max(int(self.core.free[t]), 1)
                price[at] = max(price[at] * RAISED, first)
            if self.over():
                return None
        return None

    def polish(self, picks: Ints, rounds: int, price: Floats) -> Ints:
        """Improves an assignment that fits, block by block, at prices around some."""
        left = left_over(self.core, picks)
        picks = picks.copy()
        failed = 0
        while failed < rounds:
            factor = self.rng.uniform(0.5, 1.3, size=len(price)) * self.rng.uniform(0.7, 1.2)
            theta, _ = self.prices.theta(price * factor)
            gained = 0
            for block in self.blocks():
                new = self.improved(theta, picks, block)
                gained += take(self.core, self._part_of, self._parts, picks, new, left)
                if self.over():
                    return picks
            failed = 0 if gained < 0 else failed + 1
        return picks

    def restart(self) -> bool:
        """One new start; whether it found something better."""
        spread = float(self.rng.choice([0.02, 0.1, 0.3]))
        count = len(self.prices.price)
        price = self.prices.price * np.exp(spread * self.rng.standard_normal(count))
        kept = self.prices.terms.copy()
        found = self.repaired(price, 4)
        self.prices.terms = kept
        if found is None:
            return False
        picks, price = found
        return self.see(self.polish(picks, 2, price))


def _joined(blocks: "list[Ints]", size: int) -> "list[Ints]":
    """Small blocks put together, up to a size."""
    joined: list[Ints] = []
    for block in blocks:
        if joined and len(joined[-1]) + len(block) <= size:
            joined[-1] = np.concatenate([joined[-1], block])
        else:
            joined.append(block)
    return joined
