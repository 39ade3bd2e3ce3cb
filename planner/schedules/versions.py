"""Which version of a stage's parameters a minibatch meets under PipeDream's schedule, and how many
versions a replica keeps (`flows.py` has the words).

Weight stashing. Replica r of a stage runs minibatches m = k R + r, k = 0, 1, ... Before its k-th
forward it has run max(0, k - W + 1) backwards, with a step after each. The forward and the backward
of m both use this version:

    v_s(m) = max(0, k - W_s + 1),  k = floor(m / R_s)

Vertical sync. A minibatch takes the version of its first stage along: version n of stage 0 is made
of n R_0 minibatches, and stage s uses the version that is made of as many, rounded down to whole
rounds, but none that it does not have yet:

    v_s(m) = min(floor(v_0(m) R_0 / R_s), max(0, k - W_s + 1))

So a straight pipeline has v_s(m) = max(0, m - W_0 + 1) in all stages: the paper's w^(t - n + 1).

A version stays as long as a minibatch in flight or, with vertical sync, a later one will use it.
The newest one always stays.
"""

from collections.abc import Iterator

import numpy as np

from planner.artefacts.strategy import Strategy
from planner.schedules.actions import Direction
from planner.schedules.flows import in_flight, period
from planner.schedules.orders import SCHEDULES
from planner.support.arrays import Ints


def version_of(strategy: Strategy, s: int, minibatch: int) -> int:
    """The version of stage s that the forward and the backward of a minibatch use.

    Args:
        s: the stage.
        minibatch: m, its number in the flow.
    """
    return int(versions(strategy, s, np.array([minibatch]))[0])


def versions(strategy: Strategy, s: int, minibatches: Ints) -> Ints:
    """(n,) `version_of` of (n,) minibatches."""
    newest = _newest(strategy, s, minibatches)
    if not strategy.vertical_sync:
        return newest
    first, own = strategy.stages[0].num_replicas, strategy.stages[s].num_replicas
    entered = _newest(strategy, 0, minibatches)
    return np.minimum(entered * first // own, newest)


def _newest(strategy: Strategy, s: int, minibatches: Ints) -> Ints:
    """(n,) the newest version that a stage has when it begins the forward of each minibatch."""
    stage = strategy.stages[s]
    return np.maximum(minibatches // stage.num_replicas - stage.warmup + 1, 0)


def alive(strategy: Strategy, s: int) -> int:
    """The most versions that a replica of stage s keeps at once in a long flow, the newest one and
    those that are still used.
    """
    # By then every first version has gone, and every round is like the one a period before.
    num_minibatches = 2 * (in_flight(strategy) // period(strategy) + 2) * period(strategy)
    return max(
        kept
        for replica in range(strategy.stages[s].num_replicas)
        for kept in versions_kept(strategy, s, replica, num_minibatches)
    )


def versions_kept(
    strategy: Strategy, s: int, replica: int, num_minibatches: int
) -> Iterator[int]:  # fmt: skip
    """How many versions a replica keeps after each forward, and after each step, of a flow.

    Args:
        num_minibatches: N of the flow.
    """
    stage = strategy.stages[s]
    mine = np.arange(replica, num_minibatches, stage.num_replicas)
    used = versions(strategy, s, mine)
    newest = 0
    ended = 0
    for direction, k in SCHEDULES[strategy.schedule](len(mine), stage.warmup):
        if direction is Direction.BACKWARD:
            ended, newest = k + 1, k + 1
        # A version that is used later is kept from now on, if it is there already.
        needed = used[ended:]
        yield len({newest, *needed[needed <= newest].tolist()})
