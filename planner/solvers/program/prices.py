"""Prices of memory: lambda_t >= 0 for a byte at moment t, of a few moments, the active ones.

    L(lambda) = min_x [cost(x) + sum_t lambda_t (bytes_t(x) - free_t)] <= cost of any x that fits

The inner minimum is bounded from below by messages (`kernels.py`) and from above by their rounding
and conditioned elimination. Products of prices and bytes are rounded down, those of prices and free
bytes up, so the sum stays a bound in whole numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np

from planner.solvers.program.core import Core
from planner.solvers.program.kernels import (
    bound_of,
    left_over,
    price,
    rounded,
    starts_of_messages,
    sweep,
    usage_at,
)
from planner.support.arrays import Floats, Ints

CONVERGED = 1e-7
"""Relative gain of two sweeps below which messages stay as they are."""
MOST_SWEEPS = 60
MOST_PAID = 2.0**60
"""By all nodes together."""
CALL_WORK = 50_000
"""Entries that count for what a step takes on however small a core."""
PEAKS_AT_ONCE = 4
"""Violated moments that become active at a time, those with the most bytes over."""


@dataclass
class Prices:
    """Prices of a core's active moments, with the messages for them.

    Attributes:
        core: of which no node is without an allowed strategy.
        moments: the active ones, in the order in which they became active.
        usage: (S,) bytes by strategy at each of them.
        price: of a byte at each of them.
        terms: the messages.
        work: entries of matrices that were looked at so far.
    """

    core: Core
    moments: list[int] = field(default_factory=list)
    usage: list[Ints] = field(default_factory=list)
    price: Floats = field(default_factory=lambda: np.zeros(0))
    work: int = 0

    def __post_init__(self) -> None:
        self.begin = starts_of_messages(self.core)
        self.terms = np.zeros(int(self.begin[-1, 0]), np.int64)

    def activate(self, moments: Sequence[int]) -> bool:
        """Makes moments active, at price 0; whether one was not before."""
        new = [t for t in moments if t not in self.moments]
        self.moments += new
        self.usage += [usage_at(self.core, t) for t in new]
        self.price = np.concatenate([self.price, np.zeros(len(new))])
        return bool(new)

    def peaks(self, left: Ints) -> list[int]:
        """The moments with the most bytes over, apart from each other: the highest one of each run
        of moments over the limit, from the highest of all on.
        """
        found: list[int] = []
        below = left < 0
        left = left.copy()
        while len(found) < PEAKS_AT_ONCE and below.any():
            t = int(np.argmin(np.where(below, left, 0)))
            found.append(t)
            fits = np.flatnonzero(~below)
            first = fits[fits < t].max(initial=-1) + 1
            end = fits[fits > t].min(initial=len(left))
            below[first:end] = False
        return found

    def theta(self, price: Floats | None = None) -> tuple[Ints, int]:
        """(S,) costs with the price of bytes, rounded down, and that of free ones, rounded up."""
        theta, given = self.core.cost.copy(), 0
        most = MOST_PAID / (self.core.num_nodes * max(len(self.moments), 1))
        for t, usage, one in zip(
            self.moments, self.usage, self.price if price is None else price, strict=True
        ):
            if one > 0:
                # Less than they would pay is a bound, too, and the sum over all nodes has to fit.
                paid = np.minimum(usage * one, most)
                theta += np.maximum(0.0, np.floor(paid - paid * 2.0**-51)).astype(np.int64)
                given += ceil(Fraction(float(one)) * int(self.core.free[t]))
        return theta, given

    def bound(self, theta: Ints, given: int, sweeps: int = MOST_SWEEPS) -> int:
        """The bound of these prices, after sweeps from the messages of the last ones."""
        self.work += CALL_WORK
        now = bound_of(self.core, theta, self.begin, self.terms)
        for _ in range(sweeps):
            before = now
            sweep(self.core, theta, self.begin, self.terms, True)
            now = sweep(self.core, theta, self.begin, self.terms, False)
            self.work += 4 * len(self.core.matrix)
            if now - before <= CONVERGED * abs(now):
                break
        return now - given

    def rounded(self, theta: Ints) -> Ints:
        """An assignment from the messages, after a backward sweep."""
        picks = np.zeros(self.core.num_nodes, np.int64)
        rounded(self.core, theta, self.begin, self.terms, picks)
        self.work += len(self.core.matrix)
        return picks


def true_cost(core: Core, picks: Ints) -> int:
    """Of an assignment in the core."""
    return int(price(core, core.cost, picks))


def fits(core: Core, picks: Ints) -> bool:
    """Whether an assignment keeps the limit of memory."""
    return bool((left_over(core, picks) >= 0).all())
