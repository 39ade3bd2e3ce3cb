"""Simulated annealing: what its loops share. A loop draws a move, times what it leads to, and keeps
it or takes it back. These loops are one per model, because kernels that are handed functions would
be compiled anew in every process (`support/jit.py`).

Source: Metropolis et al., Journal of Chemical Physics 21(6), 1953.
"""

from typing import NamedTuple

import numpy as np

from planner.support.jit import inlined


class Annealing(NamedTuple):
    """A run.

    Attributes:
        moves: their number.
        hot, cold: temperatures of the first and the last move, in the unit of the cost.
        seed: of the draws.
    """

    moves: int
    hot: float
    cold: float
    seed: int


@inlined
def most_allowed(now: float, heat: float) -> float:
    """The largest cost that a move may lead to from a cost: a rise by x is allowed by the chance
    exp(-x / heat). It is drawn before the move is timed, so that a longer schedule need not be
    timed to its end.
    """
    return float(now - heat * np.log(1.0 - np.random.random()))


@inlined
def cooled(hot: float, cold: float, share: float) -> float:
    """The temperature after a share of the moves; it falls geometrically."""
    return float(hot * (cold / hot) ** share)
