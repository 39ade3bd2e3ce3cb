"""As little as a strategy has to run again, or to keep in the host's memory, to fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy, asynchronous_violations, used_devices
from planner.costs.evaluate import Evaluation, evaluate, evaluation_work_s
from planner.costs.overlap import evaluated_with_overlap, with_overlap
from planner.costs.stage_memory import limit_bytes
from planner.resharding.checks import all_violations
from planner.solvers.segments import (
    Again,
    choice_orders,
    freed_share,
    num_optional,
    running_again,
    share_of_others,
    with_fewer,
)

_ROUNDS = 5
"""Times that stages which do not fit are made to recompute more, at least; in the last all are."""


def that_fits(
    problem: Problem, first: Strategy, choices: tuple[Again, ...],
    remade: Callable[[Sequence[Again]], Strategy],
) -> tuple[Strategy, str | None, float]:  # fmt: skip
    """A strategy, why it does not fit, if it does not, and the work, in s of an ordinary core.
    Where the first one does not fit, stages whose devices are short of memory run more again, step
    by step, and in the end as few layers as they fit with.

    Args:
        first: the strategy in which each stage does the first of the choices.
        choices: what stages may run again, in the order of preference.
        remade: the strategy whose stages run again what is chosen for each.
    """
    recompute = [choices[0]] * len(first.stages)
    shortage, work_s, lacking = None, 0.0, 0
    rounds = max(_ROUNDS, len(choices) + 1)
    for attempt in range(rounds + 1):
        strategy = first if shortage is None else overlapped(problem, remade(recompute))
        strategy, evaluation = evaluated_with_overlap(problem, strategy)
        work_s += evaluation_work_s(strategy, evaluation)
        if evaluation.shortage is None:
            room = _room(problem, strategy, evaluation)
            strategy, more_s = _with_fewer_segments(problem, (strategy, recompute), room, lacking)
            return strategy, None, work_s + more_s
        shortage = shortage or evaluation.shortage
        lacking = lacking or -_room(problem, strategy, evaluation)
        short = _short(problem, strategy, evaluation)
        if attempt == rounds - 1:
            short = set(range(len(recompute)))
        more = [
            _more(problem, strategy, evaluation, s, choices[choices.index(one) :])
            if s in short
            else one
            for s, one in enumerate(recompute)
        ]
        if more == recompute:
            break
        recompute = more
    return strategy, shortage, work_s


def with_least_again(problem: Problem, strategy: Strategy) -> Iterator[tuple[Strategy, float]]:
    """What a strategy becomes if each of its stages runs again, or keeps in the host's memory, only
    what it has to, and the work: one for each order of preference (`segments.choice_orders`) in
    which it fits; none for one that does neither.
    """
    if not any(one.recompute or one.offloaded for one in strategy.stages):
        return

    def remade(recompute: Sequence[Again]) -> Strategy:
        stages = zip(strategy.stages, recompute, strict=True)
        return replace(strategy, stages=tuple(
            running_again(problem, replace(stage, prefetch=None, gathered_ahead=None), what)
            for stage, what in stages
        ))  # fmt: skip

    for choices in choice_orders(problem):
        first = overlapped(problem, remade([choices[0]] * len(strategy.stages)))
        least, shortage, work_s = that_fits(problem, first, choices, remade)
        if shortage is None:
            yield least, work_s


def overlapped(problem: Problem, strategy: Strategy) -> Strategy:
    """A strategy with its collectives beside its computations, if it is sound."""
    return strategy if what_is_wrong(problem, strategy) else with_overlap(problem, strategy)


def what_is_wrong(problem: Problem, strategy: Strategy) -> str | None:
    """Why a strategy cannot be run, if it cannot: the rules of two axes may not go together."""
    graph = problem.profile.graph
    wrong = next(asynchronous_violations(strategy, graph), None)
    return wrong or next(iter(all_violations(strategy, graph, len(problem.topology.devices))), None)


def _more(
    problem: Problem, strategy: Strategy, evaluation: Evaluation, s: int, choices: Sequence[Again]
) -> Again:
    """What a stage runs again that does not fit as it is: the next choice that saves something,
    about enough if that is a part of its layers.

    Args:
        choices: that of now, and those behind it.
    """
    now, *left = choices
    if _needs_whole_stash(strategy):
        left = [one for one in left if one is not Again.STAGE]
    if Again.LAYERS in left and left[0] is Again.SELECTED:
        stage, used = strategy.stages[s], used_devices(strategy)
        share = freed_share(problem.profile, stage, Again.SELECTED)
        for d in stage.devices:
            memory = evaluation.memory[d]
            lacking = memory.total_bytes - limit_bytes(problem, used, d)
            if share * memory.stash_bytes < lacking:
                return Again.LAYERS
    return left[0] if left else now


def _with_fewer_segments(
    problem: Problem, found: tuple[Strategy, Sequence[Again]], room: int, lacking: int
) -> tuple[Strategy, float]:
    """A strategy whose stages run as few layers again, or keep as few in the host's memory, as they
    fit with (`segments.with_fewer`), and the work. All stages leave out the same part of theirs,
    and hold as much ahead as before.

    Args:
        found: a strategy, and what each of its stages runs again.
        room: bytes that its fullest device has left.
        lacking: by how many it is short without recomputation, about.
    """
    strategy, recompute = found
    chosen = [*zip(strategy.stages, recompute, strict=True)]
    every = [num_optional(problem, *one) for one in chosen]
    all_of = most = max(every)
    best, least, work_s = strategy, 0, 0.0
    # Without any of them.
    others = max(share_of_others(problem, *one) for one in chosen)
    lacking = max(1, round(lacking - others * (lacking + room)))
    while most - least > 1:
        # Memory is nearly linear in their number.
        count = least + round((most - least) * lacking / max(lacking + room, 1))
        count = min(max(count, least + 1), most - 1)
        stages = tuple(
            with_fewer(problem, *one, -(-count * n // all_of)) if n else one[0]
            for one, n in zip(chosen, every, strict=True)
        )
        less = replace(strategy, stages=stages)
        evaluation = evaluate(problem, less)
        work_s += evaluation_work_s(less, evaluation)
        if evaluation.shortage is None:
            best, most, room = less, count, _room(problem, less, evaluation)
        else:
            least, lacking = count, -_room(problem, less, evaluation)
    return best, work_s


def _room(problem: Problem, strategy: Strategy, evaluation: Evaluation) -> int:
    """Bytes that the fullest device has left; less than 0 where it is short of them."""
    used = used_devices(strategy)
    return min(limit_bytes(problem, used, d) - evaluation.memory[d].total_bytes for d in used)


def _needs_whole_stash(strategy: Strategy) -> bool:
    """Whether recomputation saves nothing: the only stage has one microbatch in flight, whose
    backward needs all that a forward keeps.
    """
    return len(strategy.stages) == 1 and strategy.stages[0].warmup == 1


def _short(problem: Problem, strategy: Strategy, evaluation: Evaluation) -> set[int]:
    """The stages whose devices are over their limits."""
    used = used_devices(strategy)
    return {
        s
        for s, stage in enumerate(strategy.stages)
        for d in stage.devices
        if evaluation.memory[d].total_bytes > limit_bytes(problem, used, d)
    }
