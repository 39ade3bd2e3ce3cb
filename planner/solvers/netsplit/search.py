"""Local search for NetSplit's full model (`netsplit_model.py`): schedules near a known one.

    (1) a schedule is a placement and an order of the operators per phase; every operator starts
        as soon as what is before it in the order lets it                         `state_of`
    (2) simulated annealing: a group goes to another device, alone, with a neighbour or in exchange
        for another group; an operator goes up to `netsplit_kernels.FAR` places ahead or back in an
        order. Memory (8) holds throughout                                          `anneal`
    (3) rounds of it, each from the best so far, each with its own seed; the second of every two
        starts hot, the first only warm                                             `improved`

Limited by the number of moves, so it repeats itself.

Source: van Laarhoven, Aarts and Lenstra, Operations Research 40(1), 1992 (the orders); the rest is
this project's.
"""

from collections.abc import Callable, Sequence

import numpy as np

from planner.solvers.engines.watch import Watch
from planner.solvers.netsplit.kernels import Plant, State, anneal, lists_of, state_of
from planner.solvers.netsplit.model import (
    Instance,
    Known,
    Schedule,
    canonical,
    messages_of,
    orders_of,
)
from planner.solvers.placement.problem import feeds_of

ROUND = 100_000
"""Moves per round."""

HEATS = (0.003, 0.01)
"""Of the latency, the temperatures that rounds start with in turn."""

COLD = 0.0001
"""The same, at their ends."""


def improved(
    instance: Instance,
    known: Known,
    moves: int,
    watch: Watch,
    over: Callable[[], bool],
    seed: int,
) -> Known:
    """The best schedule that is found from a known one, or that one.

    Args:
        known: with a schedule.
        moves: to try.
        watch: is told of better ones.
        over: whether to end before the next round.
    """
    plant = _plant(instance)
    best = known
    for number, first in enumerate(range(0, moves, ROUND)):
        if over() or best.schedule is None:
            break
        state = state_of(plant, best.device_of, best.schedule.orders)
        heat = HEATS[number % len(HEATS)]
        size = min(ROUND, moves - first)
        anneal(plant, state, size, heat * best.latest, COLD * best.latest, seed + number)
        latest = int(state.ends.sum())
        if latest < best.latest:
            best = _known(instance, plant, state)
            watch.see(incumbent=latest)
    return best


def timed(
    instance: Instance, device_of: Sequence[int], forward: Sequence[int], backward: Sequence[int]
) -> Known:
    """The schedule of a placement that fits in the order of some starts, which need not be those of
    a schedule with (7).

    Args:
        forward, backward: (N,) starts.
    """
    plant = _plant(instance)
    return _known(instance, plant, state_of(plant, device_of, orders_of(forward, backward)))


def _plant(instance: Instance) -> Plant:
    """The instance in arrays."""
    placing, num = instance.placing, instance.placing.num_operators
    feeds = feeds_of(placing)
    after: list[list[int]] = [[] for _ in range(num)]
    for j, before in enumerate(feeds):
        for i in before:
            after[i].append(j)
    makes: list[list[int]] = [[] for _ in range(num)]
    reads: list[list[int]] = [[] for _ in range(num)]
    for t, flow in enumerate(placing.tensors):
        makes[flow.producer].append(t)
        for j in flow.consumers:
            reads[j].append(t)
    kept: list[tuple[tuple[int, ...], int]] = [
        ((g,), size) for g, size in enumerate(instance.alone_bytes)
    ]
    kept += sorted((tuple(those), size) for those, size in instance.together_bytes.items())
    keeps: list[list[int]] = [[] for _ in instance.groups]
    for e, (groups, _) in enumerate(kept):
        for g in groups:
            keeps[g].append(e)
    return Plant(
        ticks=np.array([instance.forward, instance.backward]),
        away=messages_of(instance),
        maker=np.array([flow.producer for flow in placing.tensors], dtype=np.int64),
        gradient=np.array([flow.gradient for flow in placing.tensors], dtype=np.bool_),
        readers=lists_of(flow.consumers for flow in placing.tensors),
        makes=lists_of(makes),
        reads=lists_of(reads),
        before=lists_of(feeds),
        after=lists_of(after),
        group_of=np.array(instance.group_of, dtype=np.int64),
        members=lists_of(instance.groups),
        keeps=lists_of(keeps),
        kept=np.array([size for _, size in kept], dtype=np.int64),
        room=placing.capacity_bytes.copy(),
    )


def _known(instance: Instance, plant: Plant, state: State) -> Known:
    """The schedule of a state, with devices named as (9) wants it."""
    state = state_of(plant, canonical(instance, state.where.tolist()), state.orders.tolist())
    where, placing = state.where.tolist(), instance.placing
    sent, returned = {}, {}
    for t, flow in enumerate(placing.tensors):
        home = where[flow.producer]
        for q in range(placing.num_devices):
            if state.there[0, t, q] >= 0:
                sent[t, q] = int(state.there[0, t, q] - plant.away[t, home, q])
            if state.there[1, t, q] >= 0:
                returned[t, q] = int(state.there[1, t, q] - plant.away[t, q, home])
    forward, backward = (
        (state.end[phase] - plant.ticks[phase, range(len(where)), where]).tolist()
        for phase in range(2)
    )
    ends = int(state.ends[0]), int(state.ends[1])
    schedule = Schedule(tuple(forward), tuple(backward), sent, returned, *ends)
    return Known(tuple(where), True, schedule.latency, schedule)
