"""The simulated figure of a strategy that an objective minimises."""

from dataclasses import replace

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Strategy
from planner.costs.closed_form import bottleneck_s
from planner.costs.evaluate import Evaluation, Priced, evaluate
from planner.schedules.actions import ActionKind
from planner.schedules.orders import with_microbatches
from planner.schedules.program import program
from planner.simulator.events import run
from planner.simulator.steady import iterate
from planner.simulator.timeline import Times


def objective_s(problem: Problem, strategy: Strategy) -> float:
    """The figure of a strategy for the objective of its problem, in s; a bottleneck has a closed
    form.

    Raises:
        ValueError: as of `evaluate`.
    """
    evaluation = evaluate(problem, strategy)
    if problem.training.objective is Objective.BOTTLENECK:
        return bottleneck_s(evaluation.stages, strategy.schedule)
    iteration = iterate(problem, strategy, evaluation)
    if problem.training.objective is Objective.ITERATION:
        return iteration.iteration_s
    return latency_s(problem, strategy, evaluation, iteration.times)


def latency_s(
    problem: Problem,
    strategy: Strategy,
    known: Evaluation | Priced,
    times: Times | None = None,
) -> float:
    """When the last backward of one microbatch ends that is alone, in s; the same under all
    schedules.

    Args:
        known: the costs of the strategy.
        times: of the strategy with its own number of microbatches, if these are known.
    """
    asynchronous = strategy.schedule.is_asynchronous
    if times is None or strategy.num_microbatches > 1 or asynchronous:
        if asynchronous:
            one_f_one_b = ScheduleName.ONE_F_ONE_B
            strategy = replace(strategy, schedule=one_f_one_b, vertical_sync=False)
        lists = program(
            with_microbatches(strategy, 1),
            problem.profile.graph,
            known.times,
        )
        times = run(lists, known.costs, problem.topology)
    return float(times.end_s[times.code.kind == ActionKind.COMPUTE].max(initial=0.0))
