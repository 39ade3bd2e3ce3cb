"""Reduced-cost fixing: strategies that no assignment as cheap as a known one can have."""

import numpy as np

from planner.solvers.program.kernels import fix, sweep
from planner.solvers.program.prices import Prices
from planner.solvers.program.reduce import Reduced, reduced

SWEEPS = 30


def fixed(prices: Prices, most: int) -> Reduced | None:
    """A core without strategies that every assignment with costs at most `most` is without, after
    its reductions. None if it has no assignment that costs so little.

    Only (r2) would lose such an assignment, and is left out. The bound with a strategy is that of
    `kernels.fix`, at the best prices: in whole numbers, so without any tolerance.

    Args:
        most: in the core.
    """
    theta, given = prices.theta()
    core = prices.core
    bound = prices.bound(theta, given, SWEEPS)
    if bound > most:
        return None
    alive = np.ones(len(core.cost), np.bool_)
    sweep(core, theta, prices.begin, prices.terms, True)
    fix(core, theta, prices.begin, prices.terms, most + given, alive)
    prices.work += 6 * len(core.matrix)
    return reduced(core, alive, dominance=False)
