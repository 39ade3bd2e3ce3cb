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
compute, everything is, and takes as much longer as processes share cores.

For weights w >= 0 of the queues Q with sum 1, an iteration takes at least sum_q w_q Q_q. The least
of that over all assignments is a choice program, and its bound is one of the view, if only that
counts which every schedule pays and holds. The best weights are those of a Lagrangian dual:

    max_w  min_x  sum_q w_q Q_q(x)

The assignment x of some weights says that the bound of weights w is at most sum_q w_q Q_q(x). So a
cutting plane (Kelley, 1960) takes the weights for which the least of these is largest, and ends
where that is hardly more than the bound.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from planner.artefacts.problem import Problem
from planner.costs.operators import slowdown
from planner.costs.stage_pass import sums_overlap_compute
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.space import View
from planner.solvers.program.problem import Choice, ChoiceProgram
from planner.support.arrays import Floats

LEAST_WEIGHT = 1e-6
"""Of a queue: what is forbidden stays so, and of equal assignments one that sends less counts."""
CLOSE, IDLE = 5e-3, 2
"""Relative distance from the best bound that the cuts allow, at which it is the best; and how many
programs one after the other may raise it by less before others would hardly raise it.
"""
FLOATS = 1 - 1e-9
"""A bound over the sum that it is of, which is of floating point numbers."""


def queues(problem: Problem, view: View) -> tuple[Parts, ...]:
    """Weights of the parts of an iteration, by each of which it is at least as long."""
    if (everything := on_shared_cores(problem, view.devices)) is not None:
        return (everything,)
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


def on_shared_cores(problem: Problem, devices: Sequence[int]) -> Parts | None:
    """The weights where everything waits for everything, as collectives are work for the cores that
    compute, or the host waits for each kernel; None where they run beside computations. Processes
    that share cores are slower than one alone, with the collectives in their passes, too
    (`costs/actions.py`).
    """
    topology = problem.topology
    if sums_overlap_compute(problem, range(len(topology.devices)), devices):
        return None
    hosts = Counter(topology.devices[d].host for d in devices)
    slow = min(
        count / max(n / slowdown(problem, host, n, count) for n in range(1, count + 1))
        for host, count in hosts.items()
    )
    return Parts(slow, slow, 1, 1)


class Bound:
    """The bound of a view, which can be raised.

    Args:
        made: of the view, without blocks that run again.
        limit_bytes: of memory, on each device.
        first: weights to begin with, such as the best ones of a view like this; None begins with
            computations.

    Attributes:
        value_s: no plan on the view takes less; inf where none fits.
        done: whether other weights would hardly raise it.
        weights: of the queues, for which it is the bound.
        raises: number of programs that were asked.
    """

    def __init__(
        self, problem: Problem, made: Built, limit_bytes: int, first: Floats | None = None
    ) -> None:
        self.made, self.value_s, self.done, self.weights = made, 0.0, False, first
        self._limit_bytes, self._most_s = limit_bytes, math.inf
        self._queues = queues(problem, made.view)
        self.raises = 0
        self._idle = 0  # programs one after the other that raised it by less than `CLOSE`
        self._cuts: list[list[float]] = []  # what an assignment takes in each queue

    def raised(self, answer: Callable[[ChoiceProgram], Choice]) -> Choice:
        """Raises the bound by the answer to a program with other weights, if they do; that answer.

        Args:
            answer: to a program whose costs are seconds of an iteration.
        """
        before_s = self.value_s, self._most_s
        self.raises += 1
        weights = self._master()[0] if self._cuts or self.weights is None else self.weights
        found = answer(self.made.program(self._parts(weights), self._limit_bytes, kept=False))
        if FLOATS * found.bound > self.value_s:
            self.value_s, self.weights = FLOATS * found.bound, weights
        if found.picks is not None:
            seconds = self.made.seconds(found.picks)
            self._cuts.append([float(seconds.weighted(one)) for one in self._queues])
            self._most_s = self._master()[1]
        self._idle = 0 if self.value_s > (1 + CLOSE) * before_s[0] else self._idle + 1
        gains = not self._idle or (self._idle < IDLE and self._most_s < before_s[1])
        close = self._most_s <= (1 + CLOSE) * self.value_s
        self.done = found.picks is None or close or not gains
        return found

    @property
    def parts(self) -> Parts | None:
        """Weights of the parts of an iteration for which it is the bound; None without one."""
        return None if self.weights is None or not self.value_s else self._parts(self.weights)

    def _parts(self, weights: Floats) -> Parts:
        """Weights of the parts of an iteration."""
        return Parts(*(np.array(self._queues).T @ weights).tolist())

    def _master(self) -> tuple[Floats, float]:
        """The weights for which the cuts allow most, and what they allow: without cuts, all weight
        on the first queue.
        """
        from ortools.linear_solver import pywraplp

        solver = pywraplp.Solver.CreateSolver("GLOP")
        value = solver.NumVar(0.0, solver.infinity(), "")
        weights = [solver.NumVar(LEAST_WEIGHT, 1.0, "") for _ in self._queues]
        solver.Add(sum(weights) == 1.0)
        for cut in self._cuts or [[1.0] + [0.0] * (len(weights) - 1)]:
            solver.Add(value <= sum(w * one for w, one in zip(weights, cut, strict=True)))
        solver.Maximize(value)
        solver.Solve()
        found = np.array([one.solution_value() for one in weights])
        return found / found.sum(), value.solution_value()
