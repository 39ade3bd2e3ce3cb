"""From layouts to strategies that fit: recomputation where memory is short, and the best closed
forms first.
"""

from collections.abc import Iterable, Sequence

from planner.costs.evaluate import Evaluation, closed_form_s, evaluate
from planner.costs.memory import limit_bytes
from planner.problem import Problem, Result, Status
from planner.schedules.orders import default_warmups
from planner.solvers.fit import recompute_choices
from planner.solvers.sharded.layout import Layout
from planner.splitting.checks import all_violations
from planner.strategy import Stage, Strategy, asynchronous_violations, used_devices

OTHERS = 9
"""Strategies besides the best that the judge may choose among: closed forms of layouts are some
percent from the simulator, and `megatron` has up to four layouts at each point of its grid.
"""
_ROUNDS = 3
"""Times that stages which do not fit are made to recompute; then all are."""


def best_of(problem: Problem, layouts: Iterable[Layout], space: str) -> Result:
    """The strategies of layouts that fit with the best closed forms."""
    found: list[tuple[float, int, Layout]] = []
    reason, short = None, False
    first = recompute_choices(problem)[0]
    for layout in layouts:
        strategy = strategy_of(problem, layout, [first] * len(layout.operators))
        wrong = next(asynchronous_violations(strategy, problem.profile.graph), None)
        wrong = wrong or next(iter(_wrong(problem, strategy)), None)
        if wrong is None:
            found.append((closed_form_s(problem, strategy), len(found), layout))
        reason = reason or wrong
    fitting: list[tuple[float, Strategy]] = []
    for least_s, _, layout in sorted(found, key=lambda one: one[:2]):
        # A layout that recomputes takes longer than it does here.
        if len(fitting) > OTHERS and least_s >= fitting[OTHERS][0]:
            break
        strategy, shortage = _that_fits(problem, layout)
        if shortage is None:
            fitting.append((closed_form_s(problem, strategy), strategy))
            fitting.sort(key=lambda one: one[0])
        reason, short = reason or shortage, short or shortage is not None
    if not fitting:
        return Result(Status.INFEASIBLE, None, space=space, reason=reason, short_of_memory=short)
    strategies = tuple(strategy for _, strategy in fitting[: OTHERS + 1])
    return Result(Status.FEASIBLE, strategies[0], space=space, others=strategies[1:])


def strategy_of(problem: Problem, layout: Layout, recompute: Sequence[bool]) -> Strategy:
    """The strategy of a layout.

    Args:
        recompute: of each stage.
    """
    options, graph = problem.options, problem.profile.graph
    widths = [len(groups) for groups in layout.groups]
    depths = default_warmups(widths, options.num_microbatches, 0, options.schedule)
    stages = tuple(
        Stage(
            operators=tuple(graph.operators[v].name for v in inside),
            groups=tuple(groups),
            warmup=depth,
            recompute=again,
            sharding=sharding,
        )
        for inside, groups, sharding, depth, again in zip(
            layout.operators, layout.groups, layout.shardings, depths, recompute, strict=True
        )
    )
    return Strategy(
        stages, options.schedule, options.num_microbatches, vertical_sync=options.vertical_sync
    )


def _that_fits(problem: Problem, layout: Layout) -> tuple[Strategy, str | None]:
    """A strategy of a layout, and why it does not fit, if it does not. Stages whose devices are
    short of memory recompute, and then the stages are cut anew.
    """
    choices = recompute_choices(problem)
    recompute = [choices[0]] * len(layout.operators)
    shortage = None
    for attempt in range(_ROUNDS + 1):
        strategy = strategy_of(problem, layout, recompute)
        evaluation = evaluate(problem, strategy)
        if evaluation.shortage is None:
            return strategy, None
        shortage = shortage or evaluation.shortage
        short = _short(problem, strategy, evaluation)
        if len(choices) == 1 or all(recompute[s] for s in short):
            break
        if attempt == _ROUNDS - 1:
            short = set(range(len(recompute)))
        recompute = [again or s in short for s, again in enumerate(recompute)]
        if layout.recut is not None:
            layout = layout.recut(recompute)
    return strategy, shortage


def _short(problem: Problem, strategy: Strategy, evaluation: Evaluation) -> set[int]:
    """The stages whose devices are over their limits."""
    used = used_devices(strategy)
    return {
        s
        for s, stage in enumerate(strategy.stages)
        for d in stage.devices
        if evaluation.memory[d].total_bytes > limit_bytes(problem, used, d)
    }


def _wrong(problem: Problem, strategy: Strategy) -> tuple[str, ...]:
    """What is wrong with a strategy: the rules of two axes may not go together."""
    graph = problem.profile.graph
    return all_violations(strategy, graph, len(problem.topology.devices))
