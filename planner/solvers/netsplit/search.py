"""Local search for NetSplit's full model (`model.py`): schedules near a known one.

    (1) a schedule is a placement and an order of the operators per phase; every operator starts
        as soon as those before it on its device, and what it reads, let it        `state_of`
    (2) simulated annealing: a group goes to another device, alone, with neighbours or in exchange
        for another group; an operator passes up to `kernels.FAR` others of its device in an order.
        Memory (8) holds throughout                                                 `anneal`
    (3) rounds of annealing, each from the best schedule so far, each with its own seed; the second
        of every two starts hot, the first only warm                                `improved`

Limits are of work: of operators timed. So the search repeats itself.

Source: van Laarhoven, Aarts and Lenstra, Operations Research 40(1), 1992 (the orders); the rest is
this project's.
"""

from collections.abc import Callable, Sequence

import numpy as np

from planner.solvers.annealing import Annealing
from planner.solvers.engines.watch import SearchWatch
from planner.solvers.netsplit.bounds import phase_bounds_of
from planner.solvers.netsplit.kernels import state_of
from planner.solvers.netsplit.model import (
    KnownPlacement,
    NetSplitInstance,
    TickSchedule,
    canonical,
    orders_of,
    transfer_table,
)
from planner.solvers.netsplit.moves import anneal, restore
from planner.solvers.netsplit.search_arrays import (
    BACKWARD,
    FORWARD,
    ModelArrays,
    SearchState,
)
from planner.solvers.placement.held_bytes import held_bytes
from planner.solvers.placement.problem import feeds_of
from planner.support.arrays import Csr, csr, transposed

ROUND = 100_000
"""Moves per round."""

HEATS = (0.003, 0.01)
"""Temperatures at the starts of rounds, in turn, as shares of the latency."""

OF_OPERATOR = 0.2
"""Least temperature at the start of a round, as a share of an operator's mean share of the latency:
in small graphs, every move changes the latency by much.
"""

COLD = 0.0001
"""Temperature at their ends."""

Blocks = Sequence[Sequence[int]]
"""Sets of groups that may move together."""


def improved(
    instance: NetSplitInstance,
    known: KnownPlacement,
    work: int,
    watch: SearchWatch,
    over: Callable[[], bool],
    seed: int,
) -> KnownPlacement:
    """The best schedule found from a known one, or that one.

    Args:
        known: a placement with a schedule.
        work: operators to time, about.
        watch: is told of better schedules.
        over: says before each round whether to end.
    """
    model = arrays_of(instance)
    best, number, cost = known, 0, float(instance.problem.num_operators)
    while work > 0 and best.schedule is not None and not over():
        moves = max(1, round(min(ROUND, work / cost)))
        state = state_of(model, best.device_of, best.schedule.orders)
        begun = int(state.timed[0])
        heat = max(HEATS[number % len(HEATS)], OF_OPERATOR / instance.problem.num_operators)
        run = Annealing(moves, heat * best.latest, COLD * best.latest, seed + number)
        anneal(model, state, run, False)
        # On one device, or in a chain, there may be nothing to move, and so nothing to time.
        spent = max(moves, int(state.timed[0]) - begun)
        cost, number = spent / moves, number + 1
        work -= spent
        restore(model, state)
        latest = int(state.ends.sum())
        if latest < best.latest:
            best = _known(instance, model, state)
            watch.see(incumbent=latest)
    return best


def timed(
    instance: NetSplitInstance,
    device_of: Sequence[int],
    forward: Sequence[int],
    backward: Sequence[int],
) -> KnownPlacement:
    """The schedule of a placement that fits, in the order of given starts.

    Args:
        forward, backward: (N,) starts; they may break (7).
    """
    model = arrays_of(instance)
    return _known(instance, model, state_of(model, device_of, orders_of(forward, backward)))


def arrays_of(instance: NetSplitInstance, blocks: Blocks = ()) -> ModelArrays:
    """The instance as arrays.

    Args:
        blocks: besides single groups, sets of groups that may move together.
    """
    problem, num = instance.problem, instance.problem.num_operators
    feeds = feeds_of(problem)
    bounds = [phase_bounds_of(instance, backward=backward) for backward in (False, True)]
    tensors = problem.tensors
    transfers = transfer_table(instance)
    return ModelArrays(
        ticks=np.array([instance.forward, instance.backward]),
        tail=np.array([phase.tail for phase in bounds], dtype=np.int64),
        least=np.array([phase.least for phase in bounds], dtype=np.int64),
        way=transfers.way,
        away=transfers.ticks,
        route=csr(transfers.resources),
        column=csr(transfers.columns).values,
        free=np.zeros(transfers.num_resources, np.int64),
        maker=np.array([tensor.producer for tensor in tensors], dtype=np.int64),
        gradient=np.array([tensor.gradient for tensor in tensors], dtype=np.bool_),
        readers=csr(tensor.consumers for tensor in tensors),
        makes=csr(transposed([(tensor.producer,) for tensor in tensors], num)),
        reads=csr(transposed([tensor.consumers for tensor in tensors], num)),
        before=csr(feeds),
        after=csr(transposed(feeds, num)),
        group_of=np.array(instance.group_of, dtype=np.int64),
        members=csr(instance.groups),
        blocks=csr(blocks),
        held=held_bytes(instance.kept, len(instance.groups)),
        room=problem.capacity_bytes.copy(),
    )


def without_links(model: ModelArrays) -> ModelArrays:
    """The arrays if transfers of different pairs of devices do not delay each other."""
    first = model.route.start[:-1]
    alone = Csr(np.arange(len(first) + 1), model.route.values[first])
    return model._replace(route=alone, column=model.column[first])


def _known(instance: NetSplitInstance, model: ModelArrays, state: SearchState) -> KnownPlacement:
    """The schedule of a state, with devices named by (9)."""
    state = state_of(model, canonical(instance, state.where.tolist()), state.orders.tolist())
    where, problem = state.where.tolist(), instance.problem
    sent, returned = {}, {}
    tensors_there, gradients_there = state.kept.there[FORWARD], state.kept.there[BACKWARD]
    for t, tensor in enumerate(problem.tensors):
        home = where[tensor.producer]
        for q in range(problem.num_devices):
            if tensors_there[t, q] >= 0:
                sent[t, q] = int(tensors_there[t, q] - model.away[t, model.way[home, q]])
            if gradients_there[t, q] >= 0:
                returned[t, q] = int(gradients_there[t, q] - model.away[t, model.way[q, home]])
    forward, backward = (
        (state.kept.end[phase] - model.ticks[phase, range(len(where)), where]).tolist()
        for phase in (FORWARD, BACKWARD)
    )
    ends = int(state.ends[FORWARD]), int(state.ends[BACKWARD])
    schedule = TickSchedule(tuple(forward), tuple(backward), sent, returned, *ends)
    return KnownPlacement(tuple(where), True, schedule.latency, schedule)
