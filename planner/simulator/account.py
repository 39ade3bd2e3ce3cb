"""All that is known of one iteration of a strategy: its timeline with memory, why devices idle, and
what the iteration's length is made of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.costs.evaluate import Evaluation, evaluate
from planner.problem import Problem
from planner.simulator.critical_path import PathStep, critical_path
from planner.simulator.events import run
from planner.simulator.idle import Wait, idle_by_cause
from planner.simulator.memory_over_time import memory_over_time
from planner.simulator.timeline import Timeline, Times, timeline_of
from planner.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Account:
    """One iteration.

    Attributes:
        timeline: with the memory of each device over time.
        idle: per used device, the seconds that it waits for each thing.
        path: the critical one.
    """

    timeline: Timeline
    idle: Mapping[int, Mapping[Wait, float]]
    path: tuple[PathStep, ...]


def account(problem: Problem, strategy: Strategy) -> Account:
    """Simulates a strategy and reads everything off.

    Raises:
        ValueError: if its structure is wrong or its schedule blocks.
    """
    evaluation = evaluate(problem, strategy)
    times = run(evaluation.program, evaluation.costs, problem.topology)
    timeline = timeline_with_memory(problem, strategy, evaluation, times)
    idle = idle_by_cause(timeline, strategy, problem.profile.graph)
    return Account(timeline, idle, critical_path(times, problem.topology))


def timeline_with_memory(
    problem: Problem, strategy: Strategy, evaluation: Evaluation, times: Times
) -> Timeline:
    """The timeline of a strategy that has been evaluated and simulated."""
    memory = memory_over_time(problem, strategy, evaluation.needs, times)
    return replace(timeline_of(times), memory=memory)
