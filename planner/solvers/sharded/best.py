"""From layouts to strategies that fit: recomputation where memory is short, and the best estimates
(`simulator/estimate.py`) first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import Stage, Strategy
from planner.costs.evaluate import evaluation_work_s
from planner.costs.overlap import evaluated_with_overlap
from planner.costs.update import has_state
from planner.schedules.orders import default_warmups
from planner.simulator.estimate import ERROR, estimate_s, estimate_work_s
from planner.solvers.fewest import overlapped, that_fits, what_is_wrong
from planner.solvers.segments import (
    Again,
    choice_orders,
    recompute_choices,
    running_again,
)
from planner.solvers.sharded.layout import WHOLE, Layout

OTHERS, UNSURE = 9, (1 + ERROR) / (1 - ERROR)
"""Strategies besides the best that the judge may choose among, as variants of them gain some
percent; and the factor to the best estimate up to which one more may be the best.
"""
FEW, FIRST_S, PRICED_SHARE = 2, 1.0, 0.7
"""Layouts that are looked at whatever they take; the work for which more are looked at where none
fits, in seconds of an ordinary core; and the share of the limit after which no more are.
"""


def best_of(
    problem: Problem, layouts: Iterable[Layout], space: str, limit_s: float = math.inf
) -> Result:
    """The strategies of layouts that fit with the best estimates.

    Args:
        layouts: in the order of promise. Of equal estimates that with the smaller number wins.
        limit_s: limit of work, in seconds of an ordinary core. `FEW` layouts are looked at whatever
            they take, and more for `FIRST_S` where none fits.
    """
    search, rest = LayoutSearch(problem), iter(layouts)
    most_s = max(limit_s, FIRST_S)
    while not search.fitting and search.work_s <= most_s:
        some = search.priced(rest, PRICED_SHARE * limit_s)
        if not some:
            break
        search.fit(some, limit_s)
    whole = next(rest, None) is None and not search.cut
    if not search.fitting:
        return Result(
            Status.INFEASIBLE if whole else Status.UNKNOWN, None, space=space,
            reason=search.reason, short_of_memory=search.short, work_s=search.work_s,
        )  # fmt: skip
    if not whole:
        space += ", as far as the time limit has work for it"
    strategies = search.best
    return Result(
        Status.FEASIBLE, strategies[0], space=space, others=strategies[1:], work_s=search.work_s
    )


class Priced(NamedTuple):
    """A layout without recomputation, or with that which it gives.

    Attributes:
        estimate_s: its time.
        number: of the layout.
        strategy: the layout's.
    """

    estimate_s: float
    number: int
    layout: Layout
    strategy: Strategy


class LayoutSearch:
    """The layouts that were looked at.

    Args:
        known: strategies to beat, which are no answers.

    Attributes:
        known_s: the best estimate of the known strategies; inf without one.
        fitting: estimates and strategies, the best first.
        reason: why the first layout that is none did not do.
        short: whether one did not fit.
        cut: whether the limit left out layouts that were priced, though none fits.
        tried: whether one was made to fit.
        work_s: in seconds of an ordinary core.
    """

    def __init__(self, problem: Problem, known: Sequence[Strategy] = ()) -> None:
        self.problem = problem
        self.known_s = min((estimate_s(problem, one) for one in known), default=math.inf)
        self.fitting: list[tuple[float, Strategy]] = []
        self.reason: str | None = None
        self.short, self.cut, self.tried, self.work_s = False, False, False, 0.0

    @property
    def best(self) -> tuple[Strategy, ...]:
        """The best `OTHERS` and one more, and all others that may be as fast as the best."""
        return tuple(
            strategy
            for k, (time_s, strategy) in enumerate(self.fitting)
            if k <= OTHERS or time_s < self._enough_s
        )

    @property
    def best_s(self) -> float:
        """The best estimate, also of known strategies, in s; inf as long as none fits."""
        return min(self.known_s, self.fitting[0][0] if self.fitting else math.inf)

    @property
    def _enough_s(self) -> float:
        """The estimate from which on a strategy is none of the best."""
        return max(self.fitting[OTHERS][0], UNSURE * self.fitting[0][0])

    def priced(self, layouts: Iterator[Layout], limit_s: float) -> list[Priced]:
        """The estimates of the next layouts without recomputation, the best first. None are left if
        it is empty.

        Args:
            limit_s: the work after which no more than `FEW` are taken.
        """
        problem, first = self.problem, recompute_choices(self.problem)[0]
        found: list[Priced] = []
        for layout in layouts:
            strategy = overlapped(
                problem, strategy_of(problem, layout, [first] * len(layout.groups))
            )
            wrong = what_is_wrong(problem, strategy)
            if wrong is None:
                value_s = estimate_s(problem, strategy)
                found.append(Priced(value_s, layout.number, layout, strategy))
            self.reason = self.reason or wrong
            self.work_s += layout.work_s + estimate_work_s(strategy)
            if len(found) >= FEW and self.work_s > limit_s:
                break
        return sorted(found, key=lambda one: one[:2])

    def fit(self, found: Sequence[Priced], limit_s: float) -> None:
        """Makes strategies of layouts that fit.

        Args:
            found: see `priced`.
            limit_s: the work after which the first one that fits is the last; where none does,
                `FIRST_S` if that is more. The best one is tried whatever was done before.
        """
        fitting = self.fitting
        for least_s, _, layout, first in found:
            # A layout that recomputes takes longer than it does here.
            if len(fitting) > OTHERS and least_s >= self._enough_s:
                break
            # Prices alone may take more than the limit where there are many devices.
            if self.tried and self.work_s > (limit_s if fitting else max(limit_s, FIRST_S)):
                self.cut = not fitting
                break
            self.tried = True
            self._fit(layout, first)

    def _fit(self, layout: Layout, first: Strategy) -> Strategy:
        """Makes strategies of a layout that fit; the last one."""
        strategy = first
        for choices in choice_orders(self.problem):
            strategy, shortage, work_s = _that_fits(self.problem, layout, first, choices)
            self.work_s += work_s
            if shortage is None:
                self.fitting.append((estimate_s(self.problem, strategy), strategy))
                self.fitting.sort(key=lambda one: one[0])
            self.reason = self.reason or shortage
            self.short = self.short or shortage is not None
            if not any(one.recompute or one.offloaded for one in strategy.stages):
                break
        return strategy

    def see(self, layout: Layout) -> Priced | None:
        """Looks at one layout whatever that takes; None if it is no strategy."""
        return next(iter(self.priced(iter([layout]), math.inf)), None)

    def make_fit(self, one: Priced) -> Strategy:
        """Makes strategies of a layout that fit; the last one. A layout that is slower without
        recomputation than the best strategy is left as it is.
        """
        if one.estimate_s >= UNSURE * self.best_s:
            return one.strategy
        return self._fit(one.layout, one.strategy)


def strategy_of(problem: Problem, layout: Layout, recompute: Sequence[Again]) -> Strategy:
    """The strategy of a layout.

    Args:
        recompute: what each stage runs again; of the first choice, what the layout says.
    """
    graph, first = problem.profile.graph, recompute_choices(problem)[0]
    widths = [len(groups) for groups in layout.groups]
    depths = default_warmups(widths, problem.num_microbatches, 0, problem.training.schedule)
    over, zero = layout.sharing or WHOLE
    stages = []
    for inside, groups, sharding, depth, again in zip(
        layout.operators, layout.groups, layout.shardings, depths, recompute, strict=True
    ):
        held = {name for v in inside for name in graph.operators[v].parameters}
        stage = Stage(
            operators=tuple(graph.operators[v].name for v in inside),
            groups=tuple(groups),
            warmup=depth,
            recompute=bool(layout.recomputed),
            sharding=sharding,
            over=over,
            zero=zero,
            zero_of={name: one for name, one in layout.levels.items() if name in held},
            recomputed=layout.recomputed or (),
        )
        is_given = layout.recomputed is not None and again is first
        stages.append(stage if is_given else running_again(problem, stage, again))
    return Strategy(
        tuple(stages),
        problem.training.schedule,
        problem.num_microbatches,
        vertical_sync=problem.training.vertical_sync,
    )


def _that_fits(
    problem: Problem, layout: Layout, first: Strategy, choices: tuple[Again, ...]
) -> tuple[Strategy, str | None, float]:
    """As `fewest.that_fits`, of a layout. Where memory is short, replicas keep the optimizer's
    state in parts before anything is run again; where stages run again, they are cut anew.

    Args:
        first: the layout's strategy as it was priced.
        choices: what its stages may run again, in the order of preference.
    """
    shortage, work_s = None, 0.0
    sharing = _distributed_optimizer(problem, layout)
    if sharing != layout.sharing:
        whole, evaluation = evaluated_with_overlap(problem, first)
        work_s, shortage = evaluation_work_s(whole, evaluation), evaluation.shortage
        if shortage is None:
            return whole, None, work_s
        layout = replace(layout, sharing=sharing)
        nothing = [choices[0]] * len(layout.groups)
        first = overlapped(problem, strategy_of(problem, layout, nothing))

    def remade(recompute: Sequence[Again]) -> Strategy:
        again = layout
        if layout.recut is not None:
            again = replace(layout.recut([one.reruns for one in recompute]), sharing=layout.sharing)
        return strategy_of(problem, again, recompute)

    strategy, still, more_s = that_fits(problem, first, choices, remade)
    return strategy, still and (shortage or still), work_s + more_s


def _distributed_optimizer(problem: Problem, layout: Layout) -> tuple[int, int] | None:
    """The layout's sharing, or where that is not given that of Megatron-LM's distributed optimizer:
    each replica of a stage keeps and steps a part of the optimizer's state, if that has one.
    """
    asynchronous = problem.training.schedule.is_asynchronous
    replicas = {len(groups) for groups in layout.groups}
    if asynchronous or layout.sharing is not None or len(replicas) > 1 or replicas == {1}:
        return layout.sharing
    return (max(replicas), 1) if has_state(problem) else None
