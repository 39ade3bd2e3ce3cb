"""Helpers of constructive solvers: of some strategies they take the first that fits."""

from collections.abc import Iterable, Iterator, Sequence

from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import Stage, Strategy, asynchronous_violations, used_devices
from planner.costs.evaluate import evaluate, evaluation_work_s, pricing_work_s
from planner.costs.operators import first_of_each_type, operator_times
from planner.costs.peak_memory import static_memory
from planner.costs.stage_memory import limit_bytes, stage_memory
from planner.schedules.orders import default_warmups
from planner.solvers.placement.stages import strategies_of
from planner.solvers.segments import Again, running_again


def fastest_first(problem: Problem) -> tuple[int, ...]:
    """The devices by the time of the whole model on one of them, then by index."""
    devices = problem.topology.devices
    total_s = {}
    for kind, device in first_of_each_type(problem.topology).items():
        times = operator_times(problem, device)
        total_s[kind] = float(times.forward_s.sum() + times.backward_s.sum())
    return tuple(sorted(range(len(devices)), key=lambda d: (total_s[devices[d].type], d)))


def pipeline(
    problem: Problem,
    operators: Sequence[Sequence[int]],
    devices: Sequence[Sequence[int]],
    *,
    recompute: Again,
    extra: int = 0,
) -> Strategy:
    """A strategy from the stages' operators and devices, with the default warm-up depths.

    Args:
        operators: per stage, indices into the graph.
        devices: per stage, indices into the topology.
        recompute: what all stages run again.
        extra: more microbatches in flight per stage.
    """
    graph = problem.profile.graph
    depths = default_warmups(
        [len(d) for d in devices], problem.num_microbatches, extra, problem.training.schedule
    )
    return Strategy(
        stages=tuple(
            running_again(
                problem,
                Stage.whole(
                    operators=tuple(graph.operators[v].name for v in sorted(inside)),
                    devices=tuple(where),
                    warmup=depth,
                    recompute=False,
                ),
                recompute,
            )
            for inside, where, depth in zip(operators, devices, depths, strict=True)
        ),
        schedule=problem.training.schedule,
        num_microbatches=problem.num_microbatches,
        vertical_sync=problem.training.vertical_sync,
    )


def first_that_fits(problem: Problem, strategies: Iterable[Strategy], space: str) -> Result:
    """The first strategy that the schedule can run and that fits in memory; what is wrong with the
    last if none does.

    Args:
        strategies: in the order of preference, at least one.
        space: what they are, for the result.
    """
    reason, short, work_s, passed_over = None, False, 0.0, None
    for strategy in _distinct(strategies):
        reason = next(asynchronous_violations(strategy, problem.profile.graph), None)
        passed_over = None
        if reason is not None:
            continue
        if surely_short(problem, strategy):
            short, passed_over, work_s = True, strategy, work_s + pricing_work_s(strategy)
            continue
        evaluation = evaluate(problem, strategy)
        reason, work_s = evaluation.shortage, work_s + evaluation_work_s(strategy, evaluation)
        if reason is None:
            return Result(Status.FEASIBLE, strategy, space=space, work_s=work_s)
        short = True
    if passed_over is not None:
        reason = evaluate(problem, passed_over).shortage
    return Result(
        Status.INFEASIBLE, None, space=space, reason=reason, short_of_memory=short, work_s=work_s
    )


def surely_short(problem: Problem, strategy: Strategy) -> bool:
    """Whether a device has no room for what a stage keeps all the time, and for the stash of the
    microbatches that are in flight before its first backward: then the strategy cannot fit. No
    action lists are made for that. Only of strategies whose devices run one stage each.
    """
    used, profile = used_devices(strategy), problem.profile
    for s, stage in enumerate(strategy.stages):
        need = stage_memory(profile, stage)
        least = static_memory(problem, strategy, {s: need}).total_bytes
        if not stage.reruns_whole and not strategy.schedule.is_asynchronous:
            rounds = strategy.num_microbatches // stage.num_replicas
            least += min(stage.warmup, rounds) * need.kept_bytes
        if any(least > limit_bytes(problem, used, d) for d in stage.devices):
            return True
    return False


def _distinct(strategies: Iterable[Strategy]) -> Iterator[Strategy]:
    seen = []
    for strategy in strategies:
        if strategy not in seen:
            seen.append(strategy)
            yield strategy


def placed(
    problem: Problem, device_of: Sequence[int], space: str, order: Sequence[int] | None = None
) -> Result:
    """The strategies of a placement of single operators that fit in memory, for the judge to choose
    from; the shortage of the first if none does.

    Args:
        device_of: the device of each operator.
        space: what placements are looked at, for the result.
        order: the operators as the solver's schedule starts them, if it has one.
    """
    strategies = strategies_of(problem, device_of, order)
    fitting = [one for one in strategies if evaluate(problem, one).shortage is None]
    if fitting:
        return Result(Status.FEASIBLE, fitting[0], space=space, others=tuple(fitting[1:]))
    shortage = evaluate(problem, strategies[0]).shortage
    return Result(Status.INFEASIBLE, None, space=space, reason=shortage, short_of_memory=True)
