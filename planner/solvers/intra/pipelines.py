"""`inter-op`: pipelines whose stages are split by the programs of `intra-op`, as in the
inter-operator pass of Alpa (Zheng et al., OSDI 2022, section 5); and single stages on some of the
devices.

    p   stages, of about the same time         r   replicas of a stage
    n   devices of a stage, p n in all         mesh of a replica, of n / r devices

The points (p, r, mesh) are those of Megatron-LM's grid, with all meshes of the views of `intra-op`
(`solve.py`): p divides the devices, and n is that part of them; with one stage, n are the devices
of one host, of two, and so on, but not of all. The most promising are tried first
(`solvers/sharded/promise.py`).

A point is cut by the times of whole operators, and then by those of the operators as they were
split (`solvers/sharded/cuts.py`). The program of a stage (`stages.py`) counts an iteration as
M / r + p - 1 microbatches, for that is how long a pipeline of equal stages takes. Bubbles,
transfers and conversions between stages are for the judge.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.artefacts.options import Offload, Recompute
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import Strategy
from planner.costs.operators import operator_times
from planner.costs.stage_memory import limit_bytes
from planner.costs.stage_pass import stage_pass
from planner.schedules.orders import default_warmups
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.intra.built import Parts
from planner.solvers.intra.solve import BEHIND, SHORT, views, weights_of
from planner.solvers.intra.space import View
from planner.solvers.intra.stage_programs import Split, Stage, StagePrograms
from planner.solvers.intra.stages import Part, part_of
from planner.solvers.sharded.best import LayoutSearch, Priced
from planner.solvers.sharded.cuts import balanced_cuts
from planner.solvers.sharded.degrees import MAX_STAGES
from planner.solvers.sharded.layout import (
    NOTHING_FASTER,
    NOTHING_TO_SPLIT,
    WHOLE,
    Layout,
    crossing_s,
    divisors,
    host_by_host,
    not_split,
    smallest_host,
)
from planner.solvers.sharded.promise import Promise, promises
from planner.support.arrays import Floats
from planner.support.memo import remembered

LOGGER = logging.getLogger(__name__)

NO_PARTS = "the devices do not make up equal parts of at least two"
FAR = 1.5
"""Points that promise so many times the time of the best plan are left."""

Cuts = tuple[tuple[int, ...], ...]
"""Per stage, its operators by index."""


class Point(NamedTuple):
    """A point of the grid.

    Attributes:
        stages: p.
        view: of the devices of the first stage.
    """

    stages: int
    view: View


def solve(
    problem: Problem, time_limit_s: float, known: Sequence[Strategy] = ()
) -> Result:  # fmt: skip
    """The best plan of the grid.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
        known: strategies to beat. The search leaves what is slower, and starts from none of them.
    """
    space = "pipelines of equal submeshes, each stage split by a choice program"
    if (unsplit := not_split(problem, space)) is not None:
        return unsplit
    grid = _by_promise(problem)
    if not grid:
        return Result(Status.INFEASIBLE, None, space=space, reason=NO_PARTS)
    with interruptible(SearchWatch(LOGGER, 1.0)) as watch:
        search = _Search(problem, known)
        whole = search.run(grid, time_limit_s, watch)
    if watch.interrupted:
        space += f", as far as they were looked at ({INTERRUPTED})"
    elif not whole:
        space += ", as far as the time limit has work for them"
    return search.result(space, reproducible=not watch.interrupted)


def points(problem: Problem) -> Iterator[Point]:
    """All points of the grid."""
    devices, host = host_by_host(problem), smallest_host(problem)
    count, most = len(devices), min(MAX_STAGES, len(problem.profile.operators))
    for size in divisors(count)[1:-1]:
        numbers = {count // size} if count // size <= most else set()
        for p in sorted(numbers | ({1} if size % host == 0 else set())):
            for view in views(problem, devices[:size]):
                yield Point(p, view)


def promised_s(problem: Problem) -> float:
    """What the best point promises for an iteration, in s; inf where nothing seems to fit."""
    return min((one.iteration_s for one, _ in _by_promise(problem) if not one.too_large),
               default=math.inf)  # fmt: skip


@remembered
def _by_promise(problem: Problem) -> list[tuple[Promise, Point]]:
    """The grid, the most promising points first."""
    grid = [*points(problem)]
    degrees = [(math.prod(one.view.mesh), one.view.replicas, one.stages) for one in grid]
    promised = promises(problem, host_by_host(problem), degrees)
    order = sorted(range(len(grid)), key=lambda i: (promised[i], i))
    return [(promised[i], grid[i]) for i in order]


class _Search:
    """The points so far."""

    def __init__(self, problem: Problem, known: Sequence[Strategy]) -> None:
        self._problem, training = problem, problem.training
        self._found, self._programs = LayoutSearch(problem, known), StagePrograms(problem)
        # Collectives of a short stage find little beside which they can run.
        self._weights = weights_of(problem)[::-1]
        keeps = training.recompute is Recompute.NONE and training.offload is Offload.NO
        self._may_run_again = not keeps and not training.recompute.is_everywhere
        self._parts: dict[tuple[int, ...], Part | None] = {}
        self._seen: list[Layout] = []

    @property
    def _work_s(self) -> float:
        return self._found.work_s + self._programs.work_s

    def run(
        self, grid: Sequence[tuple[Promise, Point]], limit_s: float, watch: SearchWatch
    ) -> bool:
        """Whether all points were looked at that promise anything."""
        for promise, point in grid:
            best_s = self._found.best_s
            if watch.interrupted or (self._work_s >= limit_s and best_s < math.inf):
                return False
            if promise.iteration_s <= FAR * best_s:
                self._look(point)
                LOGGER.info("%d stages of %s x %d: %.6g s", point.stages, point.view.mesh,
                            point.view.replicas, self._found.best_s)  # fmt: skip
        return True

    def result(self, space: str, *, reproducible: bool) -> Result:
        """The answer."""
        found, reproducible = self._found, reproducible and self._programs.in_time
        if not found.fitting:
            behind = NOTHING_TO_SPLIT if found.known_s == math.inf else NOTHING_FASTER
            return Result(
                Status.UNKNOWN, None, space=space, reason=found.reason or behind,
                reproducible=reproducible, short_of_memory=found.short, work_s=self._work_s,
            )  # fmt: skip
        first, *others = found.best
        return Result(
            Status.FEASIBLE, first, space=space, others=tuple(others),
            reproducible=reproducible, work_s=self._work_s,
        )  # fmt: skip

    def _look(self, point: Point) -> None:
        """Looks at a point."""
        times = operator_times(self._problem, point.view.devices[0])
        share = point.view.replicas / len(point.view.devices)
        cuts = self._cuts(point, times.forward_s * share, times.backward_s * share)
        for number, weights in enumerate(self._weights):
            best = self._tried(point, cuts, weights)
            if best is not None and number == 0:
                again = self._cuts(point, *_by_operator_s(self._problem, best.strategy))
                other = None if again == cuts else self._tried(point, again, weights)
                if other is not None and other.estimate_s < best.estimate_s:
                    best, cuts = other, again
            if best is None or best.estimate_s > BEHIND * self._found.best_s:
                return

    def _cuts(self, point: Point, forward_s: Floats, backward_s: Floats) -> Cuts:
        """The operators of each stage, by the times of all operators."""
        sent_s = crossing_s(self._problem, _groups(self._problem, point))
        rounds = self._problem.num_microbatches / point.view.replicas
        return balanced_cuts(forward_s, backward_s, sent_s, [False] * point.stages, rounds)

    def _tried(self, point: Point, cuts: Cuts, weights: Parts) -> Priced | None:
        """The plan of a point that is cut so, before it recomputes; None if there is none."""
        stages = self._stages(point, cuts)
        if stages is None:
            return None
        splits = self._programs.splits(stages, weights)
        best = self._seen_as(point, cuts, splits)
        if self._may_run_again and max(one.dearer for one in splits) > SHORT:
            # What is kept may be made again instead, and then it does not count.
            free = [replace(one, in_flight=0) for one in stages]
            self._seen_as(point, cuts, self._programs.splits(free, weights))
        return best

    def _seen_as(
        self, point: Point, cuts: Cuts, splits: Sequence[Split]
    ) -> Priced | None:  # fmt: skip
        """Looks at the plan of stages that are split so."""
        sharing = point.view.sharing
        layout = Layout(
            operators=cuts,
            groups=_groups(self._problem, point),
            shardings=[one.sharding for one in splits],
            sharing=(sharing, 0) if sharing > 1 else WHOLE,
            levels={name: level for one in splits for name, level in one.levels.items()},
        )
        found = self._found.see(layout)
        if found is not None and layout not in self._seen:
            self._seen.append(layout)
            self._found.make_fit(found)
        return found

    def _stages(self, point: Point, cuts: Cuts) -> list[Stage] | None:
        """The stages; None if there is one in which no gradient begins."""
        problem, replicas, made = self._problem, point.view.replicas, list[Stage]()
        groups = _groups(problem, point)
        used = [d for some in groups for group in some for d in group]
        depths = default_warmups(
            [replicas] * point.stages, problem.num_microbatches, 0, problem.training.schedule
        )
        rounds = problem.num_microbatches / replicas + point.stages - 1
        for inside, some, depth in zip(cuts, groups, depths, strict=True):
            if inside not in self._parts:
                self._parts[inside] = part_of(problem, inside)
            part, own = self._parts[inside], tuple(d for group in some for d in group)
            if part is None:
                return None
            least = min(limit_bytes(problem, used, d) for d in own)
            made.append(Stage(part, replace(point.view, devices=own), least, depth, rounds))
        return made


def _groups(problem: Problem, point: Point) -> list[tuple[tuple[int, ...], ...]]:
    """Per stage, its groups."""
    devices, size = host_by_host(problem), len(point.view.devices)
    return [
        replace(point.view, devices=devices[s * size : (s + 1) * size]).groups
        for s in range(point.stages)
    ]


def _by_operator_s(problem: Problem, strategy: Strategy) -> tuple[Floats, Floats]:
    """(N,) forward and backward of the operators as a strategy splits them."""
    made = [stage_pass(problem, one, one.devices[0]).by_operator_s() for one in strategy.stages]
    forward_s, backward_s = np.concatenate(made, axis=1)
    return forward_s, backward_s
