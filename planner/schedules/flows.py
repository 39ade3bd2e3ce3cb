"""Flows: minibatches that run through a pipeline without a gap, under PipeDream's schedule
(Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3).

    flow        N minibatches, numbered from 0 on. Before it all replicas of a stage have the same
                parameters, its version 0. Behind it the pipeline is empty.
    iteration   M minibatches of a flow, the unit in which times and losses are told.
    round       minibatches k R to k R + R - 1 of a stage with R replicas, one per replica. When a
                replica has run its backward of round k, the gradients of the round are summed over
                the replicas, and the optimizer makes version k + 1 of the stage.

A replica runs W forwards, then a backward and a forward in turn (1F1B). So its k-th forward meets
version max(0, k - W + 1), which `versions.py` knows and its backward uses too (weight stashing).

All-reduces are numbered through the rounds: the b-th of B of round k is k B + b. A stage with more
replicas than another one has fewer rounds.
"""

from dataclasses import replace
from math import lcm

from planner.artefacts.graph import Graph
from planner.artefacts.strategy import Strategy
from planner.schedules.actions import Program
from planner.schedules.program import program

SETTLING_PERIODS = 12
"""In which a flow becomes periodic, usually."""


def flow(strategy: Strategy, graph: Graph, num_minibatches: int) -> Program:
    """The action lists of a flow.

    Args:
        strategy: sound, of an asynchronous schedule.
        num_minibatches: N, a multiple of `period`.

    Raises:
        ValueError: if the strategy is of another schedule, or N is no such multiple.
    """
    if not strategy.schedule.is_asynchronous:
        raise ValueError(f"a flow is of an asynchronous schedule, not {strategy.schedule.value}")
    if num_minibatches < 1 or num_minibatches % period(strategy):
        raise ValueError(f"expected a multiple of {period(strategy)}, got {num_minibatches}")
    return program(replace(strategy, num_microbatches=num_minibatches), graph)


def period(strategy: Strategy) -> int:
    """The least number of minibatches that is whole rounds of every stage."""
    return lcm(*(stage.num_replicas for stage in strategy.stages))


def in_flight(strategy: Strategy) -> int:
    """The most minibatches in flight in the pipeline: those of the stage that has the most."""
    return max(stage.warmup * stage.num_replicas for stage in strategy.stages)


def steady_minibatches(strategy: Strategy) -> int:
    """Minibatches of a flow that is long enough to show an iteration in the steady state: one that
    fills the pipeline, some rounds in which it settles, an iteration, and one that empties it.
    """
    full = -(-in_flight(strategy) // period(strategy))  # periods in flight
    settled = 2 * full + SETTLING_PERIODS
    return (settled + full) * period(strategy) + strategy.num_microbatches
