"""`inter-op`: pipelines whose stages are split by the programs of `intra-op`, as in the
inter-operator pass of Alpa (Zheng et al., OSDI 2022, section 5); and single stages on some of the
devices.

    p   stages, of about the same time         r   replicas of a stage
    n   devices of a stage, p n in all         mesh of a replica, of n / r devices

The points (p, r, mesh) are those of Megatron-LM's grid, with all meshes of the views of `intra-op`
(`solve.py`): p divides the devices, and n is that part of them; with one stage, n are the devices
of one host, of two, and so on, but not of all. The most promising are tried first (`promise.py`).

A point is cut by the times of whole operators, and then by those of the operators as they were
split (`solvers/sharded/cuts.py`). The program of a stage (`stages.py`) counts an iteration as
M / r + p - 1 microbatches, for this is how long a pipeline of equal stages takes, and holds what
its microbatches in flight keep. Bubbles, transfers and conversions between stages are for the
judge. Stages with equal programs share answers.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.artefacts.options import Offload, Recompute
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import has_rules
from planner.artefacts.sharding import Sharding
from planner.artefacts.strategy import Strategy
from planner.costs.operators import operator_times
from planner.costs.stage_memory import limit_bytes
from planner.costs.stage_pass import stage_pass
from planner.schedules.orders import default_warmups
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.intra.answer import in_order_of_use, sharding_of
from planner.solvers.intra.build import Built, Parts, built
from planner.solvers.intra.solve import (
    BEHIND,
    BESIDE,
    CLOCK,
    GAP,
    IN_LINE,
    LEAST_WORK_S,
    NODES_PER_S,
    SHORT,
    views,
)
from planner.solvers.intra.space import View
from planner.solvers.intra.stages import Part, as_in, part_of, renamed, unblocked
from planner.solvers.program.problem import peak_bytes
from planner.solvers.program.solve import solve as solve_program
from planner.solvers.sharded.best import LayoutSearch, Priced
from planner.solvers.sharded.cuts import balanced_cuts
from planner.solvers.sharded.degrees import MAX_STAGES
from planner.solvers.sharded.layout import (
    NO_RULES,
    NOTHING_FASTER,
    NOTHING_TO_SPLIT,
    ONE_DEVICE,
    WHOLE,
    Layout,
    crossing_s,
    divisors,
    host_by_host,
    smallest_host,
)
from planner.solvers.sharded.promise import Promise, promises
from planner.support.arrays import Floats

LOGGER = logging.getLogger(__name__)

FAR = 1.5
"""Points that promise so many times the best plan are left."""

Cuts = tuple[tuple[int, ...], ...]
"""Per stage, its operators by index."""


class Point(NamedTuple):
    """Of the grid.

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
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    if len(problem.topology.devices) == 1:
        return Result(Status.INFEASIBLE, None, space=space, reason=ONE_DEVICE)
    with interruptible(SearchWatch(LOGGER, 1.0)) as watch:
        search = _Search(problem, known)
        whole = search.run(_by_promise(problem), time_limit_s, watch)
    if not whole:
        space += f", as far as {INTERRUPTED if watch.interrupted else 'the limit has work for it'}"
    found = search.found
    if not found.fitting:
        behind = NOTHING_TO_SPLIT if found.known_s == math.inf else NOTHING_FASTER
        return Result(
            Status.UNKNOWN, None, space=space, reason=found.reason or behind,
            reproducible=search.in_time and not watch.interrupted,
            short_of_memory=found.short, work_s=found.work_s,
        )  # fmt: skip
    first, *others = found.best
    return Result(
        Status.FEASIBLE, first, space=space, others=tuple(others),
        reproducible=search.in_time and not watch.interrupted, work_s=found.work_s,
    )  # fmt: skip


def points(problem: Problem) -> Iterator[Point]:
    """All points of the grid."""
    devices, host = host_by_host(problem), smallest_host(problem)
    count, most = len(devices), min(MAX_STAGES, len(problem.profile.operators))
    for size in divisors(count):
        stages = count // size
        if 1 < size < count:
            numbers = {stages} if stages <= most else set()
            if size % host == 0:
                numbers.add(1)
            for p in sorted(numbers):
                for view in views(problem, devices[:size]):
                    yield Point(p, view)


def _by_promise(problem: Problem) -> list[tuple[Promise, Point]]:
    grid = [*points(problem)]
    degrees = [(math.prod(one.view.mesh), one.view.replicas, one.stages) for one in grid]
    promised = promises(problem, host_by_host(problem), degrees)
    order = sorted(range(len(grid)), key=lambda i: (promised[i], i))
    return [(promised[i], grid[i]) for i in order]


class _Stage(NamedTuple):
    """A stage on its devices.

    Attributes:
        part: its operators.
        view: its devices.
        types: of these.
        limit_bytes: of each of these, the least.
        in_flight: microbatches.
    """

    part: Part
    view: View
    types: tuple[str, ...]
    limit_bytes: int
    in_flight: int


class _Answer(NamedTuple):
    """How a stage is split.

    Attributes:
        sharding: None of a mesh of one device.
        levels: of parameters over replicas.
        dearer: by what factor memory makes it dearer.
    """

    sharding: Sharding | None
    levels: dict[str, int]
    dearer: float


class _Search:
    """The points so far.

    Attributes:
        found: plans.
        in_time: whether all programs ended with their work.
    """

    def __init__(self, problem: Problem, known: Sequence[Strategy]) -> None:
        self._problem, training = problem, problem.training
        self.found, self.in_time = LayoutSearch(problem, known), True
        self._weights = BESIDE[::-1] if training.overlap else IN_LINE
        self._again = training.recompute in (Recompute.FULL, Recompute.SELECTIVE)
        keeps = training.recompute is Recompute.NONE and training.offload is Offload.NO
        self._may_run_again = not keeps and not self._again
        self._parts: dict[tuple[int, ...], Part | None] = {}
        self._built: dict[object, tuple[Part, Built]] = {}
        self._picks: dict[object, tuple[tuple[int, ...] | None, float]] = {}
        self._seen: list[Layout] = []

    def run(
        self, grid: Sequence[tuple[Promise, Point]], limit_s: float, watch: SearchWatch
    ) -> bool:  # fmt: skip
        """Whether all points were looked at that promise anything."""
        found = self.found
        for promise, point in grid:
            if watch.interrupted or (found.work_s >= limit_s and found.best_s < math.inf):
                return False
            if promise.iteration_s <= FAR * found.best_s:
                self._look(point)
        return True

    def _look(self, point: Point) -> None:
        """Looks at a point."""
        times = operator_times(self._problem, point.view.devices[0])
        size = len(point.view.devices) // point.view.replicas
        cuts = self._cuts(point, times.forward_s / size, times.backward_s / size)
        for number, weights in enumerate(self._weights):
            best = self._tried(point, cuts, weights)
            if best is not None and number == 0 and point.stages > 1:
                again = self._cuts(point, *_by_operator_s(self._problem, best.strategy))
                other = None if again == cuts else self._tried(point, again, weights)
                if other is not None and other.estimate_s < best.estimate_s:
                    best, cuts = other, again
            if best is None or best.estimate_s > BEHIND * self.found.best_s:
                return

    def _cuts(self, point: Point, forward_s: Floats, backward_s: Floats) -> Cuts:
        """The operators of each stage, by the times of all operators."""
        if point.stages == 1:
            return (tuple(range(len(forward_s))),)
        sent_s = crossing_s(self._problem, _groups(self._problem, point))
        rounds = self._problem.num_microbatches / point.view.replicas
        return balanced_cuts(forward_s, backward_s, sent_s, [False] * point.stages, rounds)

    def _tried(self, point: Point, cuts: Cuts, weights: Parts) -> Priced | None:
        """The plan of a point that is cut so; None if there is none."""
        stages = self._stages(point, cuts)
        if stages is None:
            return None
        answers = [self._answer(point, one, weights) for one in stages]
        best = self._see(point, cuts, answers)
        if self._may_run_again and max(one.dearer for one in answers) > SHORT:
            free = [replace_flight(one) for one in stages]
            self._see(point, cuts, [self._answer(point, one, weights) for one in free])
        return best

    def _see(
        self, point: Point, cuts: Cuts, answers: Sequence[_Answer]
    ) -> Priced | None:  # fmt: skip
        replicas = point.view.replicas
        layout = Layout(
            operators=cuts,
            groups=_groups(self._problem, point),
            shardings=[one.sharding for one in answers],
            sharing=(replicas, 0) if replicas > 1 else WHOLE,
            levels={name: level for one in answers for name, level in one.levels.items()},
        )
        found = self.found.see(layout)
        if found is not None and layout not in self._seen:
            self._seen.append(layout)
            self.found.make_fit(found)
        return found

    def _stages(self, point: Point, cuts: Cuts) -> list[_Stage] | None:
        """The stages; None if one has no loss and no gradient."""
        problem, made = self._problem, list[_Stage]()
        groups = _groups(problem, point)
        used = [d for some in groups for group in some for d in group]
        devices = problem.topology.devices
        depths = default_warmups(
            [point.view.replicas] * point.stages, problem.num_microbatches, 0,
            problem.training.schedule,
        )  # fmt: skip
        for inside, some, depth in zip(cuts, groups, depths, strict=True):
            if inside not in self._parts:
                self._parts[inside] = part_of(problem, inside)
            part, own = self._parts[inside], tuple(d for group in some for d in group)
            if part is None:
                return None
            made.append(
                _Stage(
                    part,
                    replace(point.view, devices=own),
                    tuple(devices[d].type for d in own),
                    min(limit_bytes(problem, used, d) for d in own),
                    depth,
                )
            )
        return made

    def _answer(self, point: Point, stage: _Stage, weights: Parts) -> _Answer:
        """How a stage is split: as one with an equal program."""
        rounds = self._problem.num_microbatches / point.view.replicas + point.stages - 1
        key = stage.part.key, stage.view.mesh, stage.view.replicas, stage.types, rounds
        if key not in self._built:
            made = built(stage.part.problem, stage.view, again=self._again, rounds=rounds)
            self.found.work_s += len(made.node_s) / NODES_PER_S
            self._built[key] = stage.part, made
        part, made = self._built[key]
        least, least_cost = self._solved(key, made, weights, 0.0, None)
        assert least is not None, "without a limit of memory all operators may run whole"
        held = made.program(weights, stage.limit_bytes, float(stage.in_flight))
        picks, dearer = least, 1.0
        if peak_bytes(held, least) > stage.limit_bytes and stage.in_flight:
            fitting, cost = self._solved(
                key, made, weights, float(stage.in_flight), stage.limit_bytes
            )
            picks = least if fitting is None else fitting
            dearer = math.inf if fitting is None else cost / least_cost
        sharding, levels = sharding_of(
            part.problem, made, in_order_of_use(part.problem, made, picks)
        )
        names = dict(zip(part.names, stage.part.names, strict=True))
        split = math.prod(stage.view.mesh) > 1
        graph = self._problem.profile.graph
        return _Answer(
            unblocked(as_in(sharding, part, stage.part), graph) if split else None,
            renamed(levels, names),
            dearer,
        )

    def _solved(
        self, key: object, made: Built, weights: Parts, kept: float, limit: int | None
    ) -> tuple[tuple[int, ...] | None, float]:
        """The picks of a program and their cost."""
        which = key, weights, kept, limit
        if which not in self._picks:
            t0 = time.perf_counter()
            until_s = time.monotonic() + CLOCK * LEAST_WORK_S
            answer = solve_program(
                made.program(weights, limit, kept), LEAST_WORK_S,
                lambda: until_s - time.monotonic(), self._problem.search.seed, math.inf, GAP,
            )  # fmt: skip
            LOGGER.info(
                "program %d %g %s: %.3f", len(made.node_s), kept, limit, time.perf_counter() - t0
            )
            self.in_time = self.in_time and answer.reproducible
            self.found.work_s += LEAST_WORK_S
            self._picks[which] = answer.picks, answer.cost
        return self._picks[which]


def replace_flight(stage: _Stage) -> _Stage:
    return stage._replace(in_flight=0)


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
