"""What no plan on a view is faster than.

An iteration of m microbatches per replica is at least as long as each of these sums, its *queues*.
C are computations, of which a forward is F and a backward B; I are collectives inside passes, in
all passes alike; G is gathered behind the step, S are sums of gradients:

    C                           what a device computes
    I + G                       what it sends in passes
    C - F + G                   G runs beside the first forward at most
    C - B + S                   S runs beside the last backward at most
    C - F - B + G + S
    (1 - 1/m) I + G + S         in front of the last backward, beside it, and behind the step

Where collectives wait, C and I are in one queue, and G too; where they are work for the cores that
compute, everything is.

For weights w >= 0 of the queues Q with sum 1, an iteration takes at least sum_q w_q Q_q. The least
of that over all assignments is a choice program, and its bound is one of the view, if only that
counts which every schedule pays and holds. The best weights are those of a Lagrangian dual:

    max_w  min_x  sum_q w_q Q_q(x)

The assignment x of some weights says that the bound of weights w is at most sum_q w_q Q_q(x). So a
cutting plane (Kelley, 1960) takes the weights for which the least of these is largest, and ends
where that is hardly more than the bound.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.artefacts.problem import Problem
from planner.costs.stage_pass import sums_overlap_compute
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.space import View
from planner.solvers.program.problem import Choice
from planner.support.arrays import Floats

ALL = Parts(1, 1, 1, 1)
LEAST_WEIGHT = 1e-6
"""Of a queue: what is forbidden stays so, and of equal assignments one that sends less counts."""
CLOSE = 5e-3
"""Relative distance from the best bound that the cuts allow, at which it is the best."""
FLOATS = 1 - 1e-9
"""A bound over the sum that it is of, which is of floating point numbers."""


def queues(problem: Problem, view: View) -> tuple[Parts, ...]:
    """Weights of the parts of an iteration, by each of which it is at least as long."""
    devices = range(len(problem.topology.devices))
    if not sums_overlap_compute(problem, devices, view.group):
        return (ALL,)
    before_last = 1 - view.replicas / problem.num_microbatches
    if not problem.training.overlap:
        return Parts(1, 1, gathers=1), Parts(1, before_last, 1, 1, backward=-1)
    return (
        Parts(1),
        Parts(inside=1, gathers=1),
        Parts(1, gathers=1, forward=-1),
        Parts(1, sums=1, backward=-1),
        Parts(1, sums=1, gathers=1, forward=-1, backward=-1),
        Parts(inside=before_last, gathers=1, sums=1),
    )
