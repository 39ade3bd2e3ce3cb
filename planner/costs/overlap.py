"""How much a split stage gathers ahead: the least that hides what can be hidden.

What is held ahead takes memory, so of all budgets of `Stage.prefetch` the smallest one is taken
with which a pass is nearly as fast as with any. Where a plan does not fit with it, what memory is
left decides. A stage whose passes gain nothing has none: its collectives stay in line.
"""

from collections.abc import Sequence
from dataclasses import replace

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, Strategy, in_parts, used_devices
from planner.costs.evaluate import Evaluation, evaluate
from planner.costs.local_stage import local_stage
from planner.costs.stage_memory import limit_bytes
from planner.costs.stage_pass import gather_delays_s, pass_with, sums_overlap_compute
from planner.resharding.conversion import sends
from planner.resharding.over_replicas import over_replicas
from planner.resharding.overlap import PassOrder, held_ahead_bytes, pass_orders
from planner.resharding.reshardings import reshardings
from planner.resharding.sums import gathered_bytes, state_steps

NEARLY = 1.01
"""A pass that takes so much longer than the fastest is as good, if less is held ahead."""

SMALLEST, MOST_BUDGETS = 8, 9
"""The smallest budget that is tried is that part of the largest copy; how many doublings are."""


def with_overlap(problem: Problem, strategy: Strategy) -> Strategy:
    """The strategy with the collectives inside its stages beside their computations, where that is
    faster. Memory does not count.
    """
    if not problem.training.overlap or strategy.schedule.is_asynchronous:
        return strategy
    used = used_devices(strategy)
    first, *others = (_with_budget(problem, stage, used) for stage in strategy.stages)
    # Others are waited for by a microbatch that comes when most of what they gather is there.
    stages = (_in_order_of_need(problem, first), *others)
    return strategy if stages == strategy.stages else replace(strategy, stages=stages)


def _with_budget(problem: Problem, stage: Stage, used: Sequence[int]) -> Stage:
    if not in_parts(stage) or stage.prefetch is not None:
        return stage
    whole = over_replicas(stage, problem.profile.graph)
    if not all(sums_overlap_compute(problem, used, group) for group in whole.groups):
        return stage
    budget = _budget(problem, stage, whole)
    return stage if budget is None else replace(stage, prefetch=budget)


def _budget(problem: Problem, stage: Stage, whole: Stage) -> int | None:
    """The budget of a stage; None where its passes gain nothing.

    Args:
        whole: the stage with its sharing replicas as an axis.
    """
    graph, training = problem.profile.graph, problem.training
    largest, every = held_ahead_bytes(stage, graph)
    most = every if training.prefetch is None else training.prefetch
    # Copies of all layers to the host's memory may hide all else. Fewer may fit, too.
    whole = replace(whole, offloaded=())
    budgets = sorted({0, *(min((largest << k) // SMALLEST, most) for k in range(MOST_BUDGETS))})
    if training.prefetch is not None:
        budgets = [most]
    group = whole.groups[0]
    local = local_stage(problem.profile, stage)
    sides = (0, 0, 1) if stage.reruns_whole else (0, 1)

    def pass_s(order: PassOrder) -> float:
        both = pass_with(problem, whole, (group, group[0]), order)
        return sum(both[side].total for side in sides)

    in_line_s = pass_s(local.order)
    times = [(budget, pass_s(order)) for budget, order in pass_orders(stage, graph, budgets)]
    best_s = min(time_s for _, time_s in times)
    if best_s * NEARLY > in_line_s and not state_steps(stage, graph):
        return None
    return next(budget for budget, time_s in times if time_s <= NEARLY * best_s)


def _in_order_of_need(problem: Problem, stage: Stage) -> Stage:
    """The stage with so many bytes on their way behind a step that its next forward is delayed the
    least: what is read later does not come before the collectives that an operator waits for.
    """
    graph = problem.profile.graph
    whole = over_replicas(stage, graph)
    if stage.prefetch is None or stage.gathered_ahead is not None or not _waits(problem, whole):
        return stage
    every = sum(gathered_bytes(stage, graph))
    group = whole.groups[0]
    budgets = [None, *(every >> k for k in range(1, MOST_BUDGETS)), 0]
    delays_s = gather_delays_s(problem, stage, (group, group[0]), budgets)
    best, _ = min(delays_s, key=lambda one: one[1])
    return replace(stage, gathered_ahead=best)


def _waits(problem: Problem, whole: Stage) -> bool:
    """Whether a stage gathers behind a step, and its forward waits for other collectives."""
    graph = problem.profile.graph
    if not state_steps(whole, graph):
        return False
    converts = any(sends(one.forward) for one in reshardings(whole, graph))
    return converts or bool(local_stage(problem.profile, whole).statistics)


def evaluated_with_overlap(problem: Problem, strategy: Strategy) -> tuple[Strategy, Evaluation]:
    """A strategy whose stages hold as much ahead as they fit with, and its evaluation; in line
    where they fit with nothing more.

    Args:
        strategy: with `with_overlap`.
    """
    evaluation = evaluate(problem, strategy)
    while evaluation.shortage is not None:
        stages = tuple(
            replace(stage, prefetch=_less(problem, strategy, evaluation, s))
            for s, stage in enumerate(strategy.stages)
        )
        if stages == strategy.stages:  # those that are short hold nothing ahead
            break
        strategy = replace(strategy, stages=stages)
        evaluation = evaluate(problem, strategy)
    return strategy, evaluation


def _less(problem: Problem, strategy: Strategy, evaluation: Evaluation, s: int) -> int | None:
    """A smaller budget of a stage that does not fit: by as much as its devices are short of, at
    least by half; None behind 0.
    """
    stage, used = strategy.stages[s], used_devices(strategy)
    short = max(
        evaluation.memory[d].total_bytes - limit_bytes(problem, used, d) for d in stage.devices
    )
    if stage.prefetch is None or short <= 0:
        return stage.prefetch
    return max(0, min(stage.prefetch - short, stage.prefetch // 2)) if stage.prefetch else None
