"""The inner loop of `periodic.py`, compiled by numba: a list schedule of M microbatches for a
placement, and simulated annealing over placements. Arrays are indexed by

u     units of operators that run in one piece     p, q  devices
t     tensors between units                        m     microbatches
s     trained parameters that several units read   j     tasks of a microbatch

The schedule is the one that `schedules/shared.py` makes of the stages: an idle device takes a
backward that is ready, else a forward, of the oldest microbatch. A forward waits for the tensors
that it reads, and for the backward of its unit `window` microbatches before; a backward for its
forward and for the gradients of what its unit has made. A tensor goes once to each device that
reads it, and one gradient comes back from there, the sum of those of its readers. The transfers of
an ordered pair of devices follow each other in the order in which they are ready, and so do those
over a shared link (`solvers/placement/links.py`).

So a microbatch is a round of a `TaskGraph`: task u is the forward of a unit, task U + u its
backward, and the transfers follow. Resources are the devices, the channels p D + q, and the links.
"""

from typing import NamedTuple

import numpy as np

from planner.schedules.list_schedule import TaskGraph, TaskRun, run_of, simulate
from planner.solvers.annealing import Annealing, cooled, most_allowed
from planner.solvers.placement.held_bytes import (
    HeldBytes,
    HeldState,
    excess_bytes,
    hold,
    nothing_held,
)
from planner.support.arrays import Bools, Csr, Floats, Ints
from planner.support.jit import inlined, inner, njit

SWAP_CHANCE, WALK_CHANCE, NEIGHBOUR_CHANCE = 0.15, 0.35, 0.5
"""Chances that a unit that moves swaps with another one, that a walk through the graph from it
comes along, or that it goes to the device of a neighbour."""

WALK_ON = 0.8
"""Chance that a walk goes on by one more unit."""


class PeriodicModel(NamedTuple):
    """The model as arrays.

    Attributes:
        forward_s, backward_s: (U, D).
        maker: (T,) the unit that makes a tensor; gradient: (T,) whether one comes back.
        bytes: (T,).
        readers: units by tensor; makes: tensors that a unit makes; reads: those that it reads.
        near: units that feed a unit or read from it.
        latency_s, seconds_per_byte: (D, D).
        route: shared links by pair p D + q; link_seconds_per_byte: (L,) of a shared link;
            exclusive: (L,) whether a transfer keeps it as long as it lasts.
        held: bytes that devices keep with `window` microbatches in flight.
        shared: units by parameter; sum_bytes: (S,) of its gradient.
        room_bytes: (D,).
        num_microbatches: those of the schedule; more: those that follow in the same rhythm.
        window: most microbatches of a unit in flight.
    """

    forward_s: Floats
    backward_s: Floats
    maker: Ints
    gradient: Bools
    bytes: Ints
    readers: Csr
    makes: Csr
    reads: Csr
    near: Csr
    latency_s: Floats
    seconds_per_byte: Floats
    route: Csr
    link_seconds_per_byte: Floats
    exclusive: Bools
    held: HeldBytes
    shared: Csr
    sum_bytes: Ints
    room_bytes: Ints
    num_microbatches: int
    more: int
    window: int


class Scratch(NamedTuple):
    """Arrays that a placement is priced in.

    Attributes:
        tasks: of the largest size; `again` and `fifo` are the same for all placements.
        run: the schedule of all microbatches.
        there, back: (T, D) the transfer of a tensor to a device, and of its gradient back; 0 where
            there is none.
        held: of the placement.
    """

    tasks: TaskGraph
    run: TaskRun
    there: Ints
    back: Ints
    held: HeldState


def scratch_of(model: PeriodicModel) -> Scratch:
    """Arrays of the model's sizes."""
    (units, devices), (tensors,) = model.forward_s.shape, model.maker.shape
    sent = 2 * int(np.minimum(np.diff(model.readers.start), devices - 1).sum())
    size, links = 2 * units + sent, int(np.diff(model.route.start).max(initial=0))
    again, fifo = np.full(size, -1), np.arange(size) >= 2 * units
    again[units : 2 * units] = range(units)
    edges = np.zeros(units + 2 * sent + 2 * len(model.readers.values), np.int64)
    uses = 2 * units + sent * (1 + links)
    tasks = TaskGraph(
        lasts_s=np.zeros(size),
        use=Csr(np.zeros(size + 1, np.int64), np.zeros(uses, np.int64)),
        busy_s=np.zeros(uses),
        then=Csr(np.zeros(size + 1, np.int64), edges),
        num_before=np.zeros(size, np.int64),
        rank=np.zeros(size, np.int64),
        fifo=fifo,
        again=again,
        num_resources=devices + devices**2 + len(model.exclusive),
        num_rounds=model.num_microbatches,
        window=model.window,
    )
    rounds = model.num_microbatches
    return Scratch(
        tasks=tasks,
        run=run_of(size * rounds, tasks.num_resources, uses * rounds),
        there=np.zeros((tensors, devices), np.int64),
        back=np.zeros((tensors, devices), np.int64),
        held=nothing_held(model.held, devices),
    )


# --------------------------------------------------------------------------------------- schedule


@inner
def _tasks_of(model: PeriodicModel, work: Scratch, where: Ints) -> TaskGraph:
    """The tasks of a placement, in the arrays of `work`."""
    units, all_tasks, rounds = len(where), work.tasks, model.num_microbatches
    size = _number_transfers(model, work, where)
    all_tasks.num_before[:size] = 0
    for u in range(units):
        # Backwards first, then older microbatches, then the first unit in its direction.
        all_tasks.rank[u], all_tasks.rank[units + u] = rounds * size + u, units - 1 - u
        _add_forward(model, work, where, u)
    for u in range(units):
        _add_backward(model, work, where, u)
    _add_transfers(model, work, where)
    return TaskGraph(
        all_tasks.lasts_s[:size],
        Csr(all_tasks.use.start[: size + 1], all_tasks.use.values),
        all_tasks.busy_s,
        Csr(all_tasks.then.start[: size + 1], all_tasks.then.values),
        all_tasks.num_before[:size],
        all_tasks.rank[:size],
        all_tasks.fifo[:size],
        all_tasks.again[:size],
        all_tasks.num_resources,
        rounds,
        model.window,
    )


@inlined
def _number_transfers(model: PeriodicModel, work: Scratch, where: Ints) -> int:
    """Sets `there` and `back`; the number of tasks."""
    devices, size = model.forward_s.shape[1], 2 * len(where)
    work.there[:] = 0
    work.back[:] = 0
    for t in range(len(model.maker)):
        home = where[model.maker[t]]
        for x in range(model.readers.start[t], model.readers.start[t + 1]):
            work.there[t, where[model.readers.values[x]]] = 1
        work.there[t, home] = 0
        for q in range(devices):
            if work.there[t, q] > 0:
                work.there[t, q] = size
                size += 1
                if model.gradient[t]:
                    work.back[t, q] = size
                    size += 1
    return size


# Tasks are added in the order of their numbers. Their rows of `use` and `then` grow at the end.


@inlined
def _add(tasks: TaskGraph, j: int, lasts_s: float, resource: int) -> None:
    """Adds a task with its own resource."""
    x = tasks.use.start[j]
    tasks.lasts_s[j] = tasks.busy_s[x] = lasts_s
    tasks.use.values[x] = resource
    tasks.use.start[j + 1] = x + 1
    tasks.then.start[j + 1] = tasks.then.start[j]


@inlined
def _wait(tasks: TaskGraph, earlier: int, later: int) -> None:
    """Lets a task wait for the one that was added last."""
    x = tasks.then.start[earlier + 1]
    tasks.then.values[x] = later
    tasks.then.start[earlier + 1] = x + 1
    tasks.num_before[later] += 1


@inlined
def _add_forward(model: PeriodicModel, work: Scratch, where: Ints, u: int) -> None:
    tasks, units, p = work.tasks, len(where), where[u]
    _add(tasks, u, model.forward_s[u, p], p)
    _wait(tasks, u, units + u)
    for x in range(model.makes.start[u], model.makes.start[u + 1]):
        t = model.makes.values[x]
        for q in range(model.forward_s.shape[1]):
            if work.there[t, q] > 0:
                _wait(tasks, u, work.there[t, q])
        for y in range(model.readers.start[t], model.readers.start[t + 1]):
            if where[model.readers.values[y]] == p:
                _wait(tasks, u, model.readers.values[y])


@inlined
def _add_backward(model: PeriodicModel, work: Scratch, where: Ints, u: int) -> None:
    tasks, units, p = work.tasks, len(where), where[u]
    _add(tasks, units + u, model.backward_s[u, p], p)
    for x in range(model.reads.start[u], model.reads.start[u + 1]):
        t = model.reads.values[x]
        if model.gradient[t]:
            home = where[model.maker[t]] == p
            _wait(tasks, units + u, units + model.maker[t] if home else work.back[t, p])


@inlined
def _add_transfers(model: PeriodicModel, work: Scratch, where: Ints) -> None:
    tasks, units, devices = work.tasks, len(where), model.forward_s.shape[1]
    for t in range(len(model.maker)):
        home = where[model.maker[t]]
        for q in range(devices):
            if work.there[t, q] > 0:
                _add_transfer(model, work, work.there[t, q], t, home, q)
                for x in range(model.readers.start[t], model.readers.start[t + 1]):
                    if where[model.readers.values[x]] == q:
                        _wait(tasks, work.there[t, q], model.readers.values[x])
            if work.back[t, q] > 0:
                _add_transfer(model, work, work.back[t, q], t, q, home)
                _wait(tasks, work.back[t, q], units + model.maker[t])


@inlined
def _add_transfer(model: PeriodicModel, work: Scratch, j: int, t: int, p: int, q: int) -> None:
    """The transfer of a tensor, or of its gradient, from p to q: its channel, then its links."""
    tasks, devices, size = work.tasks, model.forward_s.shape[1], model.bytes[t]
    channel = p * devices + q
    lasts_s = model.latency_s[p, q] + size * model.seconds_per_byte[p, q]
    _add(tasks, j, lasts_s, devices + channel)
    for x in range(model.route.start[channel], model.route.start[channel + 1]):
        link, y = model.route.values[x], tasks.use.start[j + 1]
        tasks.use.values[y] = devices + devices * devices + link
        passed_s = size * model.link_seconds_per_byte[link]
        tasks.busy_s[y] = lasts_s if model.exclusive[link] else passed_s
        tasks.use.start[j + 1] = y + 1


@njit
def most_in_flight(model: PeriodicModel, work: Scratch, where: Ints) -> Ints:
    """(U,) most microbatches of each unit that are between their forward and their backward."""
    tasks, units, rounds = _tasks_of(model, work, where), len(where), model.num_microbatches
    simulate(tasks, work.run, 0.0, np.inf)
    end_s = work.run.end_s[: len(tasks.lasts_s) * rounds].reshape((rounds, -1))
    most = np.zeros(units, np.int64)
    for u in range(units):
        for m in range(rounds):
            there = (end_s[:, u] <= end_s[m, u]).sum()
            most[u] = max(most[u], there - (end_s[:, units + u] < end_s[m, u]).sum())
    return most


@inner
def _sums_s(model: PeriodicModel, where: Ints) -> float:
    """The time for gradients of parameters that units on several devices read."""
    total_s = 0.0
    for s in range(len(model.sum_bytes)):
        first, last = model.shared.start[s], model.shared.start[s + 1]
        p, slowest = where[model.shared.values[first]], 0.0
        for x in range(first + 1, last):
            q = where[model.shared.values[x]]
            slowest = max(slowest, model.seconds_per_byte[p, q])
        total_s += 2.0 * model.sum_bytes[s] * slowest
    return total_s


@njit
def over_bytes(model: PeriodicModel, work: Scratch, where: Ints) -> int:
    """Bytes by which the devices are over their memory, together."""
    hold(model.held, work.held, where)
    return excess_bytes(work.held, model.room_bytes)


@njit
def price_s(model: PeriodicModel, work: Scratch, where: Ints, limit_s: float) -> float:
    """The time of an iteration as far as the placement decides it; any time above the limit if it
    is longer. Microbatches that are not in the schedule take a period each: what one takes in the
    second half of the schedule.
    """
    tasks, time_s = _tasks_of(model, work, where), _sums_s(model, where)
    time_s += simulate(tasks, work.run, 0.0, limit_s - time_s)
    if model.more == 0 or time_s > limit_s:
        return time_s
    last, size, units = model.num_microbatches - 1, len(tasks.lasts_s), len(where)
    middle, end_s = last // 2, work.run.end_s
    last_s, middle_s = 0.0, 0.0
    for j in range(units, 2 * units):
        last_s = max(last_s, end_s[last * size + j])
        middle_s = max(middle_s, end_s[middle * size + j])
    return float(time_s + model.more * (last_s - middle_s) / (last - middle))


# -------------------------------------------------------------------------------------- annealing


@inner
def _moved(model: PeriodicModel, where: Ints) -> None:
    """Draws a move and makes it."""
    units, devices = model.forward_s.shape
    u = np.random.randint(0, units)
    p = where[u]
    q = (p + np.random.randint(1, devices)) % devices
    first, last = model.near.start[u], model.near.start[u + 1]
    if np.random.random() < NEIGHBOUR_CHANCE and first < last:
        q = where[model.near.values[np.random.randint(first, last)]]
        if q == p:
            q = (p + np.random.randint(1, devices)) % devices
    chance = np.random.random()
    if chance < SWAP_CHANCE:
        v = np.random.randint(0, units)
        if where[v] != p:
            where[u], where[v] = where[v], p
            return
    where[u] = q
    if chance < SWAP_CHANCE + WALK_CHANCE:
        while np.random.random() < WALK_ON:
            first, last = model.near.start[u], model.near.start[u + 1]
            if first == last:
                return
            u = model.near.values[np.random.randint(first, last)]
            where[u] = q


@njit
def anneal(model: PeriodicModel, work: Scratch, where: Ints, run: Annealing) -> float:
    """Simulated annealing. `where` is the best placement afterwards; gives its price in s.

    Args:
        where: (U,) the placement to start from; it must fit.
        run: temperatures in s.
    """
    np.random.seed(run.seed)
    now_s = best_s = price_s(model, work, where, np.inf)
    here, best, tried = where.copy(), where.copy(), where.copy()
    for number in range(run.moves):
        heat_s = cooled(run.hot, run.cold, number / run.moves)
        tried[:] = here
        _moved(model, tried)
        most_s = most_allowed(now_s, heat_s)
        if over_bytes(model, work, tried) > 0:
            continue
        new_s = price_s(model, work, tried, most_s)
        if new_s <= most_s:
            now_s = new_s
            here, tried = tried, here
            if now_s < best_s:
                best_s = now_s
                best[:] = here
    where[:] = best
    return best_s
