"""The inner loop of `periodic.py`, compiled by numba: a list schedule of M microbatches for a
placement, and simulated annealing over placements. Arrays are indexed by

u     units of operators that run in one piece     p, q  devices
t     tensors between units                        m     microbatches
s     trained parameters that several units read

The schedule is the one that `schedules/shared.py` makes of the stages: an idle device takes a
backward that is ready, else a forward, of the oldest microbatch. A forward waits for the tensors
that it reads, and for the backward of its unit `window` microbatches before; a backward for its
forward and for the gradients of what its unit has made. A tensor goes once to each device that
reads it, and one gradient comes back from there, the sum of those of its readers. The transfers of
an ordered pair of devices follow each other in the order in which they are ready, and so do those
over a shared link (`solvers/placement/links.py`).
"""

from typing import NamedTuple

import numpy as np

from planner.solvers.netsplit.search_arrays import Ragged
from planner.support.arrays import Bools, Floats, Ints
from planner.support.jit import inner, njit

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
        fixed_bytes: (U,) kept for all microbatches; stash_bytes: (U,) kept for each in flight.
        shared: units by parameter; shared_bytes: (S,) of each with its gradient and moments;
            sum_bytes: (S,) of its gradient.
        room_bytes: (D,).
        num_microbatches: those of the schedule; more: those that follow in the same rhythm.
        window: most microbatches of a unit in flight.
    """

    forward_s: Floats
    backward_s: Floats
    maker: Ints
    gradient: Bools
    bytes: Ints
    readers: Ragged
    makes: Ragged
    reads: Ragged
    near: Ragged
    latency_s: Floats
    seconds_per_byte: Floats
    route: Ragged
    link_seconds_per_byte: Floats
    exclusive: Bools
    fixed_bytes: Ints
    stash_bytes: Ints
    shared: Ragged
    shared_bytes: Ints
    sum_bytes: Ints
    room_bytes: Floats
    num_microbatches: int
    more: int
    window: int


class Scratch(NamedTuple):
    """Arrays that a schedule is made in.

    Attributes:
        missing: (2, M, U) what a forward or backward still waits for.
        left: (M, T, D) readers on a device whose backwards are still to come.
        ready: (D, 2 U M) heaps of tasks by urgency; num_ready: (D,).
        event_s: heap of the times of events; event: what happens then.
        channel_s: (D, D) when a channel is free; link_s: (L,) when a shared link is.
        running: (D,) the task of a device, -1 if it is idle.
        in_flight, most: (U,) microbatches between forward and backward, now and at most.
        last_s: (M,) when a microbatch has ended.
    """

    missing: Ints
    left: Ints
    ready: Ints
    num_ready: Ints
    event_s: Floats
    event: Ints
    channel_s: Floats
    link_s: Floats
    running: Ints
    in_flight: Ints
    most: Ints
    last_s: Floats


def scratch_of(model: PeriodicModel) -> Scratch:
    """Arrays of the model's sizes."""
    (units, devices), (tensors,), rounds = (
        model.forward_s.shape, model.maker.shape, model.num_microbatches
    )  # fmt: skip
    events = devices + 2 * tensors * devices * rounds + 1
    return Scratch(
        missing=np.zeros((2, rounds, units), np.int64),
        left=np.zeros((rounds, tensors, devices), np.int64),
        ready=np.zeros((devices, 2 * units * rounds), np.int64),
        num_ready=np.zeros(devices, np.int64),
        event_s=np.zeros(events),
        event=np.zeros(events, np.int64),
        channel_s=np.zeros((devices, devices)),
        link_s=np.zeros(len(model.exclusive)),
        running=np.zeros(devices, np.int64),
        in_flight=np.zeros(units, np.int64),
        most=np.zeros(units, np.int64),
        last_s=np.zeros(rounds),
    )


# ------------------------------------------------------------------------------------------ heaps


# A heap is two arrays, of keys and of items; an array of keys alone is its own items.


@inner
def _push(keys: Floats | Ints, items: Ints, size: int, key: float, item: int) -> int:
    """Puts an item in; gives the number of items."""
    at = size
    while at > 0:
        up = (at - 1) // 2
        if keys[up] <= key:
            break
        keys[at], items[at] = keys[up], items[up]
        at = up
    keys[at], items[at] = key, item
    return size + 1


@inner
def _pop(keys: Floats | Ints, items: Ints, size: int) -> int:
    """Takes the item of the least key out; the heap has one less afterwards."""
    first, last_key, last = items[0], keys[size - 1], items[size - 1]
    count, at = size - 1, 0
    while True:
        down = 2 * at + 1
        if down >= count:
            break
        if down + 1 < count and keys[down + 1] < keys[down]:
            down += 1
        if keys[down] >= last_key:
            break
        keys[at], items[at] = keys[down], items[down]
        at = down
    keys[at], items[at] = last_key, last
    return int(first)


# --------------------------------------------------------------------------------------- schedule
#
# A task is a number that grows with its urgency's rank: backwards first, then older microbatches,
# then the first unit in its direction: (forward M + m) U + (u forward, U - 1 - u backward).


@inner
def _ready(model: PeriodicModel, work: Scratch, p: int, back: int, m: int, u: int) -> None:
    units, rounds = len(model.fixed_bytes), model.num_microbatches
    task = m * units + units - 1 - u if back else (rounds + m) * units + u
    work.num_ready[p] = _push(work.ready[p], work.ready[p], work.num_ready[p], task, task)


@inner
def _less(model: PeriodicModel, work: Scratch, p: int, back: int, m: int, u: int) -> None:
    """A forward or backward waits for one thing less."""
    work.missing[back, m, u] -= 1
    if work.missing[back, m, u] == 0:
        _ready(model, work, p, back, m, u)


@inner
def _begin(model: PeriodicModel, work: Scratch, where: Ints) -> None:
    (units, devices), rounds = model.forward_s.shape, model.num_microbatches
    work.num_ready[:] = 0
    work.channel_s[:] = 0.0
    work.link_s[:] = 0.0
    work.running[:] = -1
    work.in_flight[:] = 0
    work.most[:] = 0
    work.last_s[:] = 0.0
    for t in range(len(model.maker)):
        for q in range(devices):
            work.left[0, t, q] = 0
        for x in range(model.readers.start[t], model.readers.start[t + 1]):
            work.left[0, t, where[model.readers.values[x]]] += 1
    for u in range(units):
        work.missing[0, 0, u] = model.reads.start[u + 1] - model.reads.start[u]
        count = 1
        for x in range(model.makes.start[u], model.makes.start[u + 1]):
            t = model.makes.values[x]
            if model.gradient[t]:
                for q in range(devices):
                    if work.left[0, t, q] > 0:
                        count += 1
        work.missing[1, 0, u] = count
    for m in range(1, rounds):
        work.left[m] = work.left[0]
        late = 1 if m >= model.window else 0
        for u in range(units):
            work.missing[0, m, u] = work.missing[0, 0, u] + late
            work.missing[1, m, u] = work.missing[1, 0, u]
    for m in range(min(rounds, model.window)):
        for u in range(units):
            if work.missing[0, m, u] == 0:
                _ready(model, work, where[u], 0, m, u)


@inner
def _send(
    model: PeriodicModel, work: Scratch, now_s: float, events: int,
    p: int, q: int, back: int, m: int, t: int,
) -> int:  # fmt: skip
    """A transfer from p to q, behind those before it; gives the number of events."""
    devices, rounds, tensors = len(model.room_bytes), model.num_microbatches, len(model.maker)
    first, last = model.route.start[p * devices + q], model.route.start[p * devices + q + 1]
    start_s, size = max(now_s, work.channel_s[p, q]), model.bytes[t]
    for x in range(first, last):
        start_s = max(start_s, work.link_s[model.route.values[x]])
    end_s = start_s + model.latency_s[p, q] + size * model.seconds_per_byte[p, q]
    work.channel_s[p, q] = end_s
    for x in range(first, last):
        link = model.route.values[x]
        passed_s = start_s + size * model.link_seconds_per_byte[link]
        work.link_s[link] = end_s if model.exclusive[link] else passed_s
    other = q if back == 0 else p
    code = devices + ((back * rounds + m) * tensors + t) * devices + other
    return _push(work.event_s, work.event, events, end_s, code)


@inner
def _ended(
    model: PeriodicModel, work: Scratch, where: Ints, now_s: float, events: int, task: int
) -> int:
    """What follows from the end of a task; gives the number of events."""
    (units, devices), rounds = model.forward_s.shape, model.num_microbatches
    back = 1 if task < rounds * units else 0
    m, u = task // units % rounds, task % units
    if back:
        u = units - 1 - u
    p = where[u]
    if back == 0:
        work.in_flight[u] += 1
        work.most[u] = max(work.most[u], work.in_flight[u])
        _less(model, work, p, 1, m, u)
        for x in range(model.makes.start[u], model.makes.start[u + 1]):
            t = model.makes.values[x]
            for q in range(devices):
                if work.left[m, t, q] > 0 and q != p:
                    events = _send(model, work, now_s, events, p, q, 0, m, t)
            if work.left[m, t, p] > 0:
                _arrived(model, work, where, 0, m, t, p)
        return events
    work.in_flight[u] -= 1
    work.last_s[m] = now_s
    if m + model.window < rounds:
        _less(model, work, p, 0, m + model.window, u)
    for x in range(model.reads.start[u], model.reads.start[u + 1]):
        t = model.reads.values[x]
        work.left[m, t, p] -= 1
        if work.left[m, t, p] == 0 and model.gradient[t]:
            home = where[model.maker[t]]
            if home == p:
                _less(model, work, p, 1, m, model.maker[t])
            else:
                events = _send(model, work, now_s, events, p, home, 1, m, t)
    return events


@inner
def _arrived(
    model: PeriodicModel, work: Scratch, where: Ints, back: int, m: int, t: int, q: int
) -> None:
    """A tensor is there for the readers on q, or its gradient is back from q."""
    if back:
        _less(model, work, where[model.maker[t]], 1, m, model.maker[t])
        return
    for x in range(model.readers.start[t], model.readers.start[t + 1]):
        v = model.readers.values[x]
        if where[v] == q:
            _less(model, work, q, 0, m, v)


@njit
def makespan_s(model: PeriodicModel, work: Scratch, where: Ints, limit_s: float) -> float:
    """The time of all microbatches, there and back; any time above the limit if it is longer.

    `work.most` and `work.last_s` say afterwards how many microbatches of each unit were in flight,
    and when each one had ended.
    """
    (units, devices), rounds, tensors = (
        model.forward_s.shape,
        model.num_microbatches,
        len(model.maker),
    )
    _begin(model, work, where)
    now_s, events = 0.0, 0
    while True:
        for p in range(devices):
            if work.running[p] < 0 and work.num_ready[p] > 0:
                task = _pop(work.ready[p], work.ready[p], work.num_ready[p])
                work.num_ready[p] -= 1
                work.running[p] = task
                back = task < rounds * units
                u = units - 1 - task % units if back else task % units
                time_s = model.backward_s[u, p] if back else model.forward_s[u, p]
                events = _push(work.event_s, work.event, events, now_s + time_s, p)
        if events == 0:
            return float(now_s)
        now_s = work.event_s[0]
        if now_s > limit_s:
            return float(now_s)
        # All that ends at this moment ends before anything begins.
        while events > 0 and work.event_s[0] <= now_s:
            code = _pop(work.event_s, work.event, events)
            events -= 1
            if code < devices:
                task, work.running[code] = work.running[code], -1
                events = _ended(model, work, where, now_s, events, task)
            else:
                code -= devices
                q, code = code % devices, code // devices
                t, code = code % tensors, code // tensors
                _arrived(model, work, where, code // rounds, code % rounds, t, q)


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
def excess_bytes(model: PeriodicModel, where: Ints) -> float:
    """By how much the devices are over their memory, together."""
    used = np.zeros(len(model.room_bytes))
    for u in range(len(where)):
        used[where[u]] += model.fixed_bytes[u] + model.window * model.stash_bytes[u]
    for s in range(len(model.shared_bytes)):
        first, last = model.shared.start[s], model.shared.start[s + 1]
        for x in range(first, last):
            p, new = where[model.shared.values[x]], True
            for y in range(first, x):
                new = new and where[model.shared.values[y]] != p
            if new:
                used[p] += model.shared_bytes[s]
    return float(np.maximum(used - model.room_bytes, 0.0).sum())


@njit
def price_s(model: PeriodicModel, work: Scratch, where: Ints, limit_s: float) -> float:
    """The time of an iteration as far as the placement decides it; any time above the limit if it
    is longer. Microbatches that are not in the schedule take a period each: what one takes in the
    second half of the schedule.
    """
    time_s = _sums_s(model, where)
    time_s += makespan_s(model, work, where, limit_s - time_s)
    if model.more == 0 or time_s > limit_s:
        return time_s
    last = model.num_microbatches - 1
    middle = last // 2
    return float(time_s + model.more * (work.last_s[last] - work.last_s[middle]) / (last - middle))


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
def anneal(
    model: PeriodicModel, work: Scratch, where: Ints, moves: int, hot: float, cold: float, seed: int
) -> float:
    """Simulated annealing. `where` is the best placement afterwards; gives its price in s.

    Args:
        where: (U,) the placement to start from; it must fit.
        hot, cold: temperatures at the start and the end, in s.
    """
    np.random.seed(seed)
    now_s = best_s = price_s(model, work, where, np.inf)
    here, best, tried = where.copy(), where.copy(), where.copy()
    for move in range(moves):
        heat_s = hot * (cold / hot) ** (move / moves)
        tried[:] = here
        _moved(model, tried)
        # Metropolis: accepted up to this price.
        most_s = now_s - heat_s * np.log(1.0 - np.random.random())
        if excess_bytes(model, tried) > 0.0:
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
