"""One iteration of a strategy: the whole of its lists, or, under an asynchronous schedule, a window
of a long flow (`schedules/flows.py`), whose length is M times the time per minibatch.

The time per minibatch is read off the ends of the optimizer's steps. A flow is deterministic and
has few minibatches in flight, so after some rounds it repeats itself every c periods.
(A period is whole rounds of every stage.) Taken is the least c for which every device ended each of
its last 2 c periods by the same time after that c periods before. A flow without one is simulated
again, twice as long. At a limit to its actions the mean over the whole flow is taken, which is a
little too large, because it has the times in which the pipeline fills and empties. So it is with
stages that exchange nothing: nothing keeps the faster one from running ahead of the other.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from planner.artefacts.graph import Graph
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy, crossings
from planner.costs.evaluate import Evaluation
from planner.schedules.actions import ActionKind, Code
from planner.schedules.flows import flow, in_flight, period, steady_minibatches
from planner.simulator.critical_path import PathStep
from planner.simulator.events import run
from planner.simulator.idle import Idle
from planner.simulator.timeline import Event, Timeline, Times, Transfer
from planner.support.arrays import Floats

# What has a start and an end.
Timed = TypeVar("Timed", Event, Transfer, Idle, PathStep)
# (time in s, bytes in use from then on), ascending by time.
Curve = tuple[tuple[float, int], ...]

# A flow is not made longer than this, which is simulated in some tenths of a second.
MAX_ACTIONS = 200_000
# Periods that may pass until a flow repeats itself.
_LONGEST_CYCLE = 24
# Two times that differ by less, relatively, are the same but for rounding.
_SAME = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """One iteration.

    Attributes:
        times: of the actions of the iteration or, under an asynchronous schedule, of a whole flow.
        start_s: where the iteration begins in them.
        iteration_s: its length.
        unsettled: by how much, relatively, the mean over the second half of the flow differs from
            that over all of it, where it had not settled; else 0.
    """

    times: Times
    start_s: float
    iteration_s: float
    unsettled: float = 0.0

    @property
    def num_minibatches(self) -> int:
        """How many were simulated."""
        return int(self.times.code.microbatch.max(initial=0)) + 1

    @property
    def is_whole(self) -> bool:
        """Whether the iteration is all that was simulated."""
        return self.start_s == 0.0 and self.iteration_s == self.times.iteration_s

    @property
    def window(self) -> Times:
        """The times within the iteration, from 0 on. Actions outside have no length."""
        if self.is_whole:
            return self.times

        def within(moments_s: Floats) -> Floats:
            return np.clip(moments_s - self.start_s, 0.0, self.iteration_s)

        times = self.times
        return replace(
            times,
            start_s=within(times.start_s),
            end_s=within(times.end_s),
            post_s=within(times.post_s),
            posted_s=within(times.posted_s),
            iteration_s=self.iteration_s,
        )


def iterate(problem: Problem, strategy: Strategy, evaluation: Evaluation) -> Iteration:
    """Simulates one iteration of a strategy.

    Args:
        evaluation: of the strategy.
    """
    times = run(evaluation.program, evaluation.costs, problem.topology)
    if not strategy.schedule.is_asynchronous:
        return Iteration(times, 0.0, times.iteration_s)
    graph, least = problem.profile.graph, period(strategy)
    num_minibatches, apart = steady_minibatches(strategy), _are_apart(strategy, graph)
    while True:
        ends_s = _steady_ends_s(strategy, times.code, times)
        # Replicas in numbers without a common factor take turns in patterns of several periods, so
        # two windows of one length may differ for ever.
        repeated = _repeated(ends_s)
        if repeated is not None or apart or 2 * len(times.code) > MAX_ACTIONS:
            break
        num_minibatches *= 2
        longer = flow(strategy, graph, num_minibatches)
        times = run(longer, evaluation.costs, problem.topology)
    if repeated is not None:
        iteration_s, unsettled = repeated * strategy.num_microbatches / least, 0.0
    else:
        iteration_s = times.iteration_s * strategy.num_microbatches / num_minibatches
        later_s = _later_s(ends_s.max(axis=1)) * strategy.num_microbatches / least
        unsettled = abs(later_s / iteration_s - 1)
    # The window ends where the pipeline begins to empty.
    return Iteration(times, float(ends_s[-1].max()) - iteration_s, iteration_s, unsettled)


def _are_apart(strategy: Strategy, graph: Graph) -> bool:
    """Whether some stages exchange nothing with the others, directly or through others."""
    reached, new = {0}, {0}
    ends = [{one.source, *one.targets} for one in crossings(strategy, graph)]
    while new:
        new = {s for some in ends if some & new for s in some} - reached
        reached |= new
    return len(reached) < len(strategy.stages)


def _steady_ends_s(strategy: Strategy, code: Code, times: Times) -> Floats:
    """(P, D) when each device ended its last step of each period of a flow, without the periods in
    which the pipeline empties, in s.
    """
    least = period(strategy)
    widths = {d: stage.num_replicas for stage in strategy.stages for d in stage.devices}
    empties = -(-in_flight(strategy) // least)

    def columns() -> Iterator[Floats]:
        for d, device in enumerate(code.devices.tolist()):
            own = slice(code.start[d], code.start[d + 1])
            ends_s = times.end_s[own][code.kind[own] == ActionKind.STEP]
            rounds = least // widths[device]
            yield ends_s[rounds - 1 :: rounds]

    return np.stack([*columns()], axis=1)[:-empties]


def _repeated(ends_s: Floats) -> float | None:
    """Time per period, in s, of a flow that repeats itself; None if it does not do so yet.

    Args:
        ends_s: (P, D) of the periods of each device.
    """
    for cycle in range(1, min(_LONGEST_CYCLE, (len(ends_s) - 1) // 3) + 1):
        last = ends_s[-2 * cycle :] - ends_s[-3 * cycle : -cycle]
        mean = float(last.mean())
        if np.abs(last - mean).max() <= _SAME * max(mean, 0.0):
            return mean / cycle
    return None


def _later_s(ends_s: Floats) -> float:
    """Mean time per period over the second half of some, in s.

    Args:
        ends_s: (P,) of the periods.
    """
    half = len(ends_s) // 2
    return float(ends_s[-1] - ends_s[half]) / (len(ends_s) - 1 - half)


def cropped(timeline: Timeline, iteration: Iteration) -> Timeline:
    """The part of the timeline of all times that lies within the iteration. What was begun before
    or ends behind is cut off.
    """
    if iteration.is_whole:
        return timeline
    return Timeline(
        iteration.iteration_s,
        tuple(within(timeline.events, iteration)),
        tuple(within(timeline.transfers, iteration)),
        {device: _cropped_curve(curve, iteration) for device, curve in timeline.memory.items()},
    )


def within(some: Iterable[Timed], iteration: Iteration) -> Iterator[Timed]:
    """The parts of times that lie within the iteration, from its start on. Those of no length are
    left out, unless the iteration is all that was simulated.
    """
    first, last = iteration.start_s, iteration.start_s + iteration.iteration_s
    for one in some:
        start_s, end_s = (min(max(s, first), last) - first for s in (one.start_s, one.end_s))
        if iteration.is_whole:
            yield one
        elif start_s < end_s:
            yield replace(one, start_s=start_s, end_s=end_s)


def _cropped_curve(curve: Curve, iteration: Iteration) -> Curve:
    """The points of a curve within the iteration, the first one at its start."""
    before = [use for moment_s, use in curve if moment_s <= iteration.start_s]
    points = [
        (moment_s - iteration.start_s, use)
        for moment_s, use in curve
        if iteration.start_s < moment_s <= iteration.start_s + iteration.iteration_s
    ]
    return ((0.0, before[-1]), *points) if before else tuple(points)
