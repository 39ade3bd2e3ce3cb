"""`intra-op`: the best split of every operator on all devices, one stage.

Each view of the devices (`space.py`) is a choice program over all rules of all operators and all
ways in which parameters, gradients and state may lie (`build.py`), as in the intra-operator pass of
Alpa (Zheng et al., OSDI 2022, section 4). An iteration is no sum: collectives run beside
computations. So a program is solved for several weights of its parts, and the judge compares the
answers. Memory that a program does not count, such as workspaces, is taken off the limit, and the
program is solved again. Where no plan fits at nearly the cost without a stash, a program is solved
that also chooses which blocks run again (`blocks.py`).

**The search.** Every view has a bound (`bound.py`), at first that over all strategies
(`costs/bounds.py`). The view with the least one is looked at next: its program is built, its bound
raised as far as that goes, and then plans are made on it. A view whose bound is above the best plan
is left. So the least bound of all views is one of the space, wherever the search ends. Meshes of
one axis come first: they take a small part of the work, and their plans rule most others out. What
is left of the limit goes to programs whose answers are far above their bounds.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.artefacts.options import Objective, Offload
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import Strategy, used_devices
from planner.costs.bounds import lower_bound_s
from planner.costs.evaluate import evaluate
from planner.costs.stage_memory import limit_bytes
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.intra.answer import segments_of, sharding_of
from planner.solvers.intra.blocks import Block, blocks_of
from planner.solvers.intra.bound import Bound, on_shared_cores
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.space import View
from planner.solvers.program.problem import Choice, ChoiceProgram, cost_of, peak_bytes
from planner.solvers.program.solve import solve as solve_program
from planner.solvers.sharded.best import LayoutSearch, Priced
from planner.solvers.sharded.layout import (
    NOTHING_FASTER,
    NOTHING_TO_SPLIT,
    WHOLE,
    Layout,
    divisors,
    host_by_host,
    not_split,
    smallest_host,
)
from planner.support.brake import braked

LOGGER = logging.getLogger(__name__)

IN_LINE = (Parts(1, 1, 0.1, 1, unsure=1), Parts(1, 1, 1, 1, unsure=1))
BESIDE = (
    Parts(1, 0.1, 0.1, 0.1, unsure=0.1, waits=0.4),
    Parts(1, 0.1, 0.1, 0.1, unsure=0.1, waits=0.9),
    Parts(1, 0.1, 1, 1, unsure=0.1, waits=0.2),
    Parts(1, 1, 0.1, 0.3, unsure=1),
)
"""Weights of the parts of an iteration for plans: all of them wait, or some run beside
computations; sums of gradients always may. A bound has better ones than the first."""
BESIDE_TOO, WAITS = 0.1, 0.4
"""Added to the weights of a bound, for what is beside something longer may wait, too; and the least
weight of what an operator waits for right behind the one before: little runs beside that."""
LOWERED = 4
"""Times that the limit of memory is lowered, at most."""
SHORT, DEAR = 1.02, 1.2
"""Where the stash makes an answer so many times dearer, one is tried whose blocks may run again;
where it is the second, before other weights are.
"""
MARGIN = 1.02
"""By how much more than what a plan takes beyond the limit."""
OPEN, DEEPER = 1.02, 4
"""An answer that costs so many times its bound had too little work; it gets so many times as much
if there is some left in the end."""
BEHIND = 1.03
"""Of a view whose first plan takes so many times as long as the best one, no others are made."""
WORK_SHARE = 0.005
"""Of the limit of work, for one program."""
LEAST_WORK_S, MOST_WORK_S = 0.2, 2.0
BOUND_SHARE = 0.2
"""Of the work for a program, where only its bound is asked for."""
GAP = 5e-3
"""Of a program's answer to its bound, which is good enough."""
NODES_PER_S, PROGRAM_S, ENTRIES_PER_S = 6_000, 0.03, 3 * 10**8
"""Nodes of programs that are built, per second of an ordinary core, seconds for each program, and
entries per second that its solver looks at, measured on Llama 7B."""
NOT_YET = "the time limit ended the search before there was a plan"
PATIENCE, FIRST_S, PROMISING = 2, 5.0, 0.8
"""So many times the limit of work are spent as long as there is no plan, or memory is short and
blocks may run again, or a view without a plan has a bound of this part of the best plan; without a
plan at least so many seconds of an ordinary core, which the first one on 64 devices takes."""
BUILT_SHARE = 0.5
"""Of the limit of work, behind which a plan is made before more programs are built."""
RAISES = 3
"""So many programs raise the bound of a view before there are plans on it, and others behind."""


def solve(
    problem: Problem, time_limit_s: float, known: Sequence[Strategy] = ()
) -> Result:  # fmt: skip
    """The best plan of all views.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
        known: strategies to beat. The search leaves what is slower, and starts from none of them.
    """
    space = "all splits of one stage over all devices"
    if (unsplit := not_split(problem, space)) is not None:
        return unsplit
    with interruptible(SearchWatch(LOGGER, 1.0)) as watch:
        search = _Search(problem, time_limit_s, watch, known)
        search.run()
    return search.result(space)


def views(problem: Problem, some: Sequence[int] | None = None) -> Iterator[View]:
    """Devices as replicas of equal meshes, those of more replicas first: meshes of one axis,
    and of two, the second one inside hosts, where the mesh is or there is one replica. Replicas
    keep parts over all of them, and over those of a host.

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
        within = host // left if host % left == 0 else 1
        if 1 < within < replicas:
            yield View((left,), replicas, devices, over=within)
        for inner in divisors(left):
            if 1 < inner < left and host % inner == 0 and (replicas == 1 or host % left == 0):
                yield View((left // inner, inner), replicas, devices)


def weights_of(problem: Problem) -> tuple[Parts, ...]:
    """Weights of the parts of an iteration, each for plans."""
    everything = on_shared_cores(problem, range(len(problem.topology.devices)))
    if everything is not None:
        return (everything._replace(unsure=everything.inside),)
    return BESIDE if problem.training.overlap else IN_LINE


@dataclass
class _Looked:
    """What is known of a view.

    Attributes:
        least_s: no plan on it takes less, as far as that is known without its program.
        bound: with its program; None as long as that is not built.
        again: its program with blocks that run again; None as long as that is not built.
        more: bytes that plans on it take beyond those that a program counts.
        tried: number of weights for which plans were made on it, or need not be.
        due: the last ones, if blocks may run again for them; None if that was tried or need not be.
        first_s: about the time of the fastest plan for the first weights, without recomputation.
        is_short: whether plans that fit are `DEAR` for these unless blocks do.
        is_open: whether a program had too little work since it was looked at again.
    """

    view: View
    least_s: float
    bound: Bound | None = None
    again: Built | None = None
    more: int = 0
    tried: int = 0
    due: Parts | None = None
    first_s: float = math.inf
    is_short: bool = False
    is_open: bool = False

    @property
    def bound_s(self) -> float:
        """No plan on it takes less."""
        return self.least_s if self.bound is None else max(self.least_s, self.bound.value_s)


class _Tried(NamedTuple):
    """What became of a program.

    Attributes:
        cost: of its answer; inf without one whose plan fits.
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
        self._blocks, self._runs_again = blocks_of(problem), training.recompute.is_everywhere
        self._may_wait = training.offload is not Offload.NO  # activations, in the host's memory
        self._bounded = training.objective is Objective.ITERATION
        least_s = lower_bound_s(problem) if self._bounded else 0.0
        self._views = [_Looked(view, least_s) for view in views(problem)]
        self._weights = weights_of(problem)
        self._one_queue = len(self._weights) == 1

    def result(self, space: str) -> Result:
        """The answer."""
        found, cut = self._found, self._watch.interrupted
        bound_s = min((one.bound_s for one in self._views), default=math.inf)
        if cut:
            space += f", as far as they were looked at ({INTERRUPTED})"
        elif self._ended:
            space += ", as far as the time limit has work for them"
        if not found.fitting:
            behind = NOTHING_TO_SPLIT if found.known_s == math.inf else NOTHING_FASTER
            behind = NOT_YET if self._ended and not cut else behind
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
        """Whether the user has had enough, or the limit of work is spent."""
        limit_s = self._limit_s
        if any(map(self._is_urgent, self._views)):
            limit_s = PATIENCE * limit_s
        if self._found.best_s == math.inf:  # known plans count
            limit_s = max(PATIENCE * self._limit_s, FIRST_S)
        return self._watch.interrupted or self._found.work_s >= limit_s

    def _is_urgent(self, one: _Looked) -> bool:
        """Whether blocks may run again on a view, or the first plan may be far faster than the best
        one so far.
        """
        built, best_s = one.bound is not None, self._found.best_s
        promises = built and not one.tried and one.bound_s < PROMISING * best_s < math.inf
        return self._is_due(one) or promises

    def _is_due(self, one: _Looked) -> bool:
        """Whether blocks may run again on a view next, and other weights come later."""
        return one.due is not None and (one.is_short or one.tried == len(self._weights))

    def run(self) -> None:
        """Looks at the views, that with the least bound first."""
        while not self._ended:
            left = [
                one
                for one in self._views
                if (one.due or one.tried < len(self._weights)) and one.bound_s < self._most_s
            ]
            if left:
                self._look(min(left, key=self._turn))
            elif not self._deepened():
                break

    def _deepened(self) -> bool:
        """Whether views are looked at again, with more work for programs that had not enough."""
        again = [one for one in self._views if one.is_open and one.bound_s < self._most_s]
        for one in again:
            assert one.bound is not None
            one.bound.done, one.is_open, one.tried = False, False, 0
        self._work_s *= DEEPER
        return bool(again)

    def _turn(self, one: _Looked) -> tuple[bool, bool, int, bool, bool, float]:
        """Smaller is looked at earlier."""
        over = self._found.work_s >= self._limit_s and not self._is_urgent(one)
        late = not self._found.fitting and self._found.work_s > BUILT_SHARE * self._limit_s
        due = one.due is not None
        # Programs of replicas alone are small, so their first plans are there soon.
        axes = len(one.view.mesh) if math.prod(one.view.mesh) > 1 or one.tried else 0
        # Than the first weights of all views of as many axes.
        later = one.tried > self._is_due(one)
        return over, late and one.bound is None, axes, later, due, one.bound_s

    @property
    def _most_s(self) -> float:
        """The bound from which on a view is left."""
        return self._found.best_s if self._bounded else math.inf

    def _look(self, one: _Looked) -> None:
        """Goes on with a view."""
        if one.bound is None:
            made, limit = self._built(one.view), self._limit_bytes(one.view)
            alike = (other.bound for other in self._views
                     if other.view.replicas == one.view.replicas and other.bound)  # fmt: skip
            first = next((bound.weights for bound in alike), None)
            one.bound = Bound(self._problem, made, limit, first)
        elif one.due is not None and self._is_due(one):
            self._plans_again(one, one.due)
        elif self._bounded and not one.bound.done and (one.tried or one.bound.raises < RAISES):
            work_s = BOUND_SHARE * self._work_s
            one.bound.raised(lambda program: self._answer(one, program, self._most_s, work_s))
            LOGGER.info("%s x %d: at least %.6g s", one.view.mesh, one.view.replicas, one.bound_s)
        else:
            self._plans(one, one.bound)

    def _limit_bytes(self, view: View) -> int:
        return min(limit_bytes(self._problem, view.devices, d) for d in view.devices)

    def _plans(self, one: _Looked, bound: Bound) -> None:
        """Makes plans on a view, for one of the weights.

        Args:
            bound: of the view, with its program without blocks that run again.
        """
        made, weights = bound.made, self._weights[one.tried]
        if not one.tried and bound.parts is not None and not self._one_queue:
            weights = _of_plans(bound.parts)
        limit = self._limit_bytes(one.view)
        least = self._weighted(one, made.program(weights, limit, kept=False), weights)
        if least.picks is None or self._ended:
            one.tried = len(self._weights)
            return
        one.tried += 1
        if self._runs_again and self._blocks:
            one.again = one.again or self._built(one.view, self._blocks[0])
            found = self._tried(one, one.again, weights)
        else:
            found = self._tried(one, made, weights, least.picks)
            if found.cost > SHORT * least.cost:
                one.due, one.is_short = weights, found.cost > DEAR * least.cost
                one.first_s = min(one.first_s, found.least_s)
                if self._may_wait:
                    self._fitted(self._found.see(_layout(self._problem, made, least.picks)))
                return
        self._leave_behind(one, found)

    def _leave_behind(self, one: _Looked, found: _Tried) -> None:
        """Makes no more plans on a view if all of its first weights are far behind the best one."""
        one.first_s = min(one.first_s, found.least_s)
        if one.tried == 1 and one.first_s > BEHIND * self._found.best_s:
            one.tried = len(self._weights)

    def _plans_again(self, one: _Looked, weights: Parts) -> None:
        """Makes plans on a view with blocks that run again, until one fits."""
        one.due = None
        for blocks in self._blocks:
            one.again = one.again or self._built(one.view, blocks)
            found = self._tried(one, one.again, weights)
            self._leave_behind(one, found)
            if found.cost < math.inf:
                break
            one.again = None

    def _total(self, weights: Parts) -> float:
        """What the weights of an iteration's parts come to, as far as they have queues of their
        own.
        """
        if self._one_queue:
            return 1.0
        inside = max(weights.inside + weights.waits, weights.gathers)
        if self._problem.training.overlap:
            return float(weights.compute + inside + weights.sums)
        return float(max(weights.compute, inside) + weights.sums)

    def _built(self, view: View, blocks: Sequence[Block] = ()) -> Built:
        made = built(self._problem, view, blocks)
        self._found.work_s += len(made.node_s) / NODES_PER_S
        return made

    def _tried(
        self, one: _Looked, made: Built, weights: Parts, known: Sequence[int] | None = None
    ) -> _Tried:
        """What becomes of a program: its answer, with a limit of memory at which the plan fits.

        Args:
            made: of a view.
            known: the answer where less memory counts; it is that of this program if it fits.
        """
        limit = self._limit_bytes(one.view)
        cost, found, before = math.inf, None, 0
        for _ in range(1 + LOWERED):
            program = made.program(weights, limit - one.more)
            answer = _known(program, known) or self._weighted(one, program, weights)
            if answer.status is Status.INFEASIBLE and one.more > before:
                one.more = (one.more + before) // 2
                continue
            if answer.picks is None:
                break
            before = one.more
            found = self._found.see(_layout(self._problem, made, answer.picks))
            over = 0 if found is None else self._over(found.strategy)
            if over <= 0:
                cost = answer.cost
                break
            one.more = limit - peak_bytes(program, answer.picks) + over
            if one.more >= limit:
                break
        self._fitted(found)
        return _Tried(cost, 0.0 if found is None else found.estimate_s)

    def _fitted(self, found: Priced | None) -> None:
        """Makes strategies that fit of a layout that was not there before."""
        if found is not None and found.layout not in self._seen:
            self._seen.append(found.layout)
            self._found.make_fit(found)

    def _over(self, strategy: Strategy) -> int:
        """By how many bytes a limit is lowered for what a plan takes beyond it."""
        memory, used = evaluate(self._problem, strategy).memory, used_devices(strategy)
        over = (memory[d].total_bytes - limit_bytes(self._problem, used, d) for d in used)
        return round(MARGIN * max(0, *over))

    def _weighted(self, one: _Looked, program: ChoiceProgram, weights: Parts) -> Choice:
        """The answer of a program, if a plan may be faster by it than the best one."""
        return self._answer(one, program, self._most_s * self._total(weights), self._work_s)

    def _answer(self, one: _Looked, program: ChoiceProgram, most: float, work_s: float) -> Choice:
        """The answer of a program, if it is less than something."""
        answer, taken_s = answered(self._problem, program, work_s, most)
        self._found.work_s += taken_s
        self._in_time = self._in_time and answer.reproducible
        one.is_open = one.is_open or min(answer.cost, most) > OPEN * answer.bound
        return answer


def answered(
    problem: Problem, program: ChoiceProgram, work_s: float, most: float = math.inf
) -> tuple[Choice, float]:
    """The answer of a program, and the work that it took, in seconds of an ordinary core.

    Args:
        work_s: the limit of that.
        most: only answers that cost less count.
    """
    with braked(work_s) as brake:
        answer = solve_program(program, work_s, brake.left_s, problem.search.seed, most, GAP)
    return answer, PROGRAM_S + answer.work / ENTRIES_PER_S


def _of_plans(bound: Parts) -> Parts:
    """Weights for plans, from those of a bound: what runs beside something else counts a little."""
    return bound._replace(
        compute=bound.compute + BESIDE_TOO,
        inside=bound.inside + BESIDE_TOO,
        sums=bound.sums + BESIDE_TOO,
        gathers=bound.gathers + BESIDE_TOO,
        unsure=bound.inside + BESIDE_TOO,
        waits=max(0.0, WAITS - bound.inside),
    )


def _known(program: ChoiceProgram, picks: Sequence[int] | None) -> Choice | None:
    """The answer that is known already, if it is within the memory."""
    assert program.limit_bytes is not None
    if picks is None or peak_bytes(program, picks) > program.limit_bytes:
        return None
    cost = cost_of(program, picks)
    return Choice(Status.FEASIBLE, tuple(picks), cost, -math.inf)


def _layout(problem: Problem, made: Built, picks: Sequence[int]) -> Layout:
    sharding, levels = sharding_of(problem, made, picks)
    view = made.view
    return Layout(
        operators=(tuple(range(len(problem.profile.graph.operators))),),
        groups=[view.groups],
        shardings=[sharding if math.prod(view.mesh) > 1 else None],
        sharing=(view.sharing, 0) if view.sharing > 1 else WHOLE,
        levels=levels,
        recomputed=segments_of(made, picks) if made.blocks else None,
    )
