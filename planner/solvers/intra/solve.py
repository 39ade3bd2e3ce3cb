"""`intra-op`: the best split of every operator on all devices, one stage.

Each view of the devices (`space.py`) is a choice program over all rules of all operators and all
ways in which parameters, gradients and state may lie (`build.py`), as in the intra-operator pass of
Alpa (Zheng et al., OSDI 2022, section 4). An iteration is no sum: collectives run beside
computations. So a program is solved for several weights of its parts, and the judge compares the
answers. Memory that a program does not count, such as workspaces, is taken off the limit, and the
program is solved again. Where the stash makes an answer dearer, blocks may run again: then a
program is solved in which each of them is a node (`blocks.py`).

**The bound.** Computations are one queue of a device, collectives inside passes and gathers behind
the step another one, sums of gradients a third. An iteration takes at least as long as each, so for
weights w of the three at least (w1 C + w2 I + w3 S) / (w1 + w2 + w3). The least of that over all
assignments is what the program's own bound is a bound of, if only that counts which every schedule
pays and holds. The largest over the weights bounds the view, and the least over the views the
space. Where a bound says that nothing on a view is faster than the best plan so far, the view is
left.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import has_rules
from planner.artefacts.strategy import Strategy, used_devices
from planner.costs.evaluate import evaluate
from planner.costs.stage_memory import limit_bytes
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.intra.answer import in_order_of_use, segments_of, sharding_of
from planner.solvers.intra.blocks import Block, blocks_of
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.space import View
from planner.solvers.program.problem import Choice, ChoiceProgram, cost_of, peak_bytes
from planner.solvers.program.solve import solve as solve_program
from planner.solvers.sharded.best import LayoutSearch
from planner.solvers.sharded.layout import (
    NO_RULES,
    NOTHING_FASTER,
    NOTHING_TO_SPLIT,
    ONE_DEVICE,
    WHOLE,
    Layout,
    divisors,
    host_by_host,
    smallest_host,
)

LOGGER = logging.getLogger(__name__)

IN_LINE = (Parts(1, 1, 0.1, 1), Parts(1, 1, 1, 1))
BESIDE = (Parts(1, 0.1, 0.1, 0.1), Parts(1, 0.1, 1, 1), Parts(1, 1, 0.1, 0.3))
"""Weights of the parts of an iteration: all of them wait, or some run beside computations; sums of
gradients always may."""
LOWERED = 4
"""Times that the limit of memory is lowered, at most."""
SHORT = 1.02
"""Where the stash makes an answer so many times dearer, one is tried whose blocks may run again."""
MARGIN = 1.02
"""By how much more than what a plan takes beyond the limit."""
BEHIND = 1.03
"""Of a view whose first plan takes so many times as long as the best one, no more are made."""
WORK_SHARE = 0.005
"""Of the limit of work, for one program."""
LEAST_WORK_S, MOST_WORK_S = 0.2, 2.0
GAP = 5e-3
"""Of a program's answer to its bound, which is good enough."""
NODES_PER_S = 2_500
"""Of programs that are built, per second of an ordinary core, measured on Llama 7B."""
CLOCK = 10
"""A program's limit on the wall over that of its work, for proofs, which count none."""


def solve(
    problem: Problem, time_limit_s: float, known: Sequence[Strategy] = ()
) -> Result:  # fmt: skip
    """The best plan of all views.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
        known: strategies to beat. The search leaves what is slower, and starts from none of them.
    """
    space = "all splits of one stage over all devices"
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    if len(problem.topology.devices) == 1:
        return Result(Status.INFEASIBLE, None, space=space, reason=ONE_DEVICE)
    with interruptible(SearchWatch(LOGGER, 1.0)) as watch:
        search = _Search(problem, time_limit_s, watch, known)
        bound_s = min(map(search.view, views(problem)), default=math.inf)
    return search.result(space, bound_s)


def views(problem: Problem, some: Sequence[int] | None = None) -> Iterator[View]:
    """Devices as replicas of equal meshes, those of more replicas first: meshes of one axis,
    and of two, the second one inside hosts, where the mesh is or there is one replica.

    Args:
        some: the devices; None for all, host by host.
    """
    devices, host = tuple(some or host_by_host(problem)), smallest_host(problem)
    asynchronous = problem.training.schedule.is_asynchronous
    for replicas in reversed(divisors(len(devices))):
        if problem.num_microbatches % replicas or (asynchronous and replicas > 1):
            continue
        left = len(devices) // replicas
        yield View((left,), replicas, devices)
        for inner in divisors(left):
            if 1 < inner < left and host % inner == 0 and (replicas == 1 or host % left == 0):
                yield View((left // inner, inner), replicas, devices)


class _Tried(NamedTuple):
    """What became of a program.

    Attributes:
        cost: of its answer; inf without one.
        least_s: about the time of its plan without recomputation; 0 where there is none.
    """

    cost: float
    least_s: float = 0.0


class _Search:
    """The views so far.

    Args:
        limit_s: limit of work, in seconds of an ordinary core.
        watch: says whether the user has had enough.
        known: strategies to beat.
    """

    def __init__(
        self, problem: Problem, limit_s: float, watch: SearchWatch, known: Sequence[Strategy]
    ) -> None:
        self._problem, self._watch, training = problem, watch, problem.training
        self._limit_s, self._in_time = limit_s, True
        self._work_s = min(max(WORK_SHARE * limit_s, LEAST_WORK_S), MOST_WORK_S)
        self._found = LayoutSearch(problem, known)
        self._seen: list[Layout] = []
        self._more = 0  # bytes that plans on a view take beyond those that a program counts
        self._blocks, self._runs_again = blocks_of(problem), training.recompute.is_everywhere

    def result(self, space: str, bound_s: float) -> Result:
        """The answer.

        Args:
            bound_s: of all views.
        """
        found, cut = self._found, self._watch.interrupted
        if cut:
            space += f", as far as they were looked at ({INTERRUPTED})"
        elif self._ended:
            space += ", as far as the time limit has work for them"
        if not found.fitting:
            behind = NOTHING_TO_SPLIT if found.known_s == math.inf else NOTHING_FASTER
            return Result(
                Status.INFEASIBLE if bound_s == math.inf else Status.UNKNOWN, None, space=space,
                reason=found.reason or behind, reproducible=self._in_time and not cut,
                short_of_memory=found.short or bound_s == math.inf, work_s=found.work_s,
            )  # fmt: skip
        first, *others = found.best
        return Result(
            Status.FEASIBLE, first, bound_s or None, space, others=tuple(others),
            reproducible=self._in_time and not cut, work_s=found.work_s,
        )  # fmt: skip

    @property
    def _ended(self) -> bool:
        """Whether the user has had enough, or the limit of work is spent and there is a plan, which
        may be a known one.
        """
        spent = self._found.work_s >= self._limit_s and self._found.best_s < math.inf
        return self._watch.interrupted or spent

    def view(self, view: View) -> float:
        """Looks for plans on a view; none of them is faster than what is returned, in s."""
        bound_s = 0.0
        if self._ended:
            return bound_s
        made = self._built(view)
        again = self._built(view, self._blocks) if self._runs_again else None
        self._more = 0
        limit = min(limit_bytes(self._problem, view.devices, d) for d in view.devices)
        for weights in BESIDE if self._problem.training.overlap else IN_LINE:
            least = self._answer(made.program(weights, limit, kept=False), weights)
            bound_s = max(bound_s, least.bound / self._total(weights))
            if bound_s >= self._found.best_s or self._ended:
                break
            known = None if again else least.picks
            found = self._tried(again or made, weights, limit, known)
            if self._blocks and not again and found.cost > SHORT * least.cost:
                again = self._built(view, self._blocks)
                found = self._tried(again, weights, limit)
            if found.least_s > BEHIND * self._found.best_s:
                break
        LOGGER.info("%s x %d: at least %.6g s", view.mesh, view.replicas, bound_s)
        return bound_s

    def _total(self, weights: Parts) -> float:
        """What the weights of an iteration's parts come to, as far as they have queues of their
        own.
        """
        inside = max(weights.inside, weights.gathers)
        if self._problem.training.overlap:
            return float(weights.compute + inside + weights.sums)
        return float(max(weights.compute, inside) + weights.sums)

    def _built(self, view: View, blocks: Sequence[Block] = ()) -> Built:
        made = built(self._problem, view, blocks)
        self._found.work_s += len(made.node_s) / NODES_PER_S
        return made

    def _tried(
        self, made: Built, weights: Parts, limit: int, known: Sequence[int] | None = None
    ) -> _Tried:
        """What becomes of a program: its answer, with a limit of memory at which the plan fits.

        Args:
            known: the answer where less memory counts; it is that of this program if it fits.
        """
        cost, found, before = math.inf, None, self._more
        for _ in range(1 + LOWERED):
            program = made.program(weights, limit - self._more)
            answer = _known(program, known) or self._answer(program, weights)
            if answer.picks is None and found is not None and answer.status is Status.INFEASIBLE:
                self._more = (self._more + before) // 2
                continue
            if answer.picks is None:
                break
            cost, before = min(cost, answer.cost), self._more
            found = self._found.see(_layout(self._problem, made, answer.picks))
            over = 0 if found is None else self._over(found.strategy)
            if over <= 0:
                break
            self._more = limit - peak_bytes(program, answer.picks) + over
            if self._more >= limit:
                break
        if found is None:
            return _Tried(cost)
        if found.layout not in self._seen:
            self._seen.append(found.layout)
            self._found.make_fit(found)
        return _Tried(cost, found.estimate_s)

    def _over(self, strategy: Strategy) -> int:
        """By how many bytes a limit is lowered for what a plan takes beyond it."""
        memory, used = evaluate(self._problem, strategy).memory, used_devices(strategy)
        over = (memory[d].total_bytes - limit_bytes(self._problem, used, d) for d in used)
        return round(MARGIN * max(0, *over))

    def _answer(self, program: ChoiceProgram, weights: Parts) -> Choice:
        """The answer of a program, if a plan may be faster by it than the best one."""
        self._found.work_s += self._work_s
        until_s = time.monotonic() + CLOCK * self._work_s
        answer = solve_program(
            program, self._work_s, lambda: until_s - time.monotonic(), self._problem.search.seed,
            self._found.best_s * self._total(weights), GAP,
        )  # fmt: skip
        self._in_time = self._in_time and answer.reproducible
        return answer


def _known(program: ChoiceProgram, picks: Sequence[int] | None) -> Choice | None:
    """The answer that is known already, if it is within the memory."""
    assert program.limit_bytes is not None
    if picks is None or peak_bytes(program, picks) > program.limit_bytes:
        return None
    cost = cost_of(program, picks)
    return Choice(Status.FEASIBLE, tuple(picks), cost, -math.inf)


def _layout(problem: Problem, made: Built, picks: Sequence[int]) -> Layout:
    sharding, levels = sharding_of(problem, made, in_order_of_use(problem, made, picks))
    view = made.view
    return Layout(
        operators=(tuple(range(len(problem.profile.graph.operators))),),
        groups=[view.groups],
        shardings=[sharding if math.prod(view.mesh) > 1 else None],
        sharing=(view.replicas, 0) if view.replicas > 1 else WHOLE,
        levels=levels,
        recomputed=segments_of(made, picks) if made.blocks else None,
    )
