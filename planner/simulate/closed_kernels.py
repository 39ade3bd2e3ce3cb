"""The event loop of `events.py` where no two transfers ever share bandwidth, compiled by numba.

So it is if every link that is used is exclusive, or is on the route of one ordered pair of devices
only. Then a transfer takes latency + bytes / bandwidth from its start on, nothing that has begun is
ever foreseen anew, and there is one event for each action and transfer. The rules, and all times to
the last bit, are those of `events_kernels.py`.

An exclusive link on the routes of several pairs is a gate: transfers queue there, in the order of
the moments at which they were ready, then of their pairs, and begin when they are the first in all
of their queues.
"""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.jit import inner, njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
# (time in s, who): a device whose action ends, or the number of devices + the pair of a transfer.
Queue = list[tuple[float, int]]

# `schedules.Kind`, as numbers that are compiled in.
COMPUTE, SEND, RECEIVE, SUM = 0, 1, 2, 3


class Case(NamedTuple):
    """What is run, on what; D devices, n actions, P pairs, G gates and H places at gates.

    Attributes:
        start: (D + 1,) where the list of each device begins, and the last one ends.
        kind: (n,).
        key: (n,) of computations and receives, as `schedules.Wiring` says; of a sum, the sum.
        pair: (n,) of sends and receives.
        amount: (n,) s, or bytes of a receive.
        post: (n,) s that posting a send or receive takes.
        receives: the receives, by pair, in the order of their lists.
        first: (P + 1,) where the receives of a pair begin.
        target: (P,) position of the device that receives.
        latency: (P,) s.
        rate: (P,) bytes/s.
        place: (P + 1,) where the places of a pair begin.
        gate: (H,) the gate of each place.
        num_gates: G.
        num_keys: how many keys there are.
        members: how many devices come to each sum.
    """

    start: Ints
    kind: npt.NDArray[np.int8]
    key: Ints
    pair: Ints
    amount: Floats
    post: Floats
    receives: Ints
    first: Ints
    target: Ints
    latency: Floats
    rate: Floats
    place: Ints
    gate: Ints
    num_gates: int
    num_keys: int
    members: Ints


class State(NamedTuple):
    """Where everything stands between two events.

    Attributes:
        now: (1,) s.
        at: (D,) the action that a device runs or waits for.
        waits: (D,) key of the computation that it waits for, -1 where it does not.
        missing: by key, receives posted and not there.
        come: by sum, how many members have come.
        sent, posted, begun: (P,) sends, receives and transfers so far.
        busy: (P,) 0, or 1 while a transfer is under way, or 2 while it waits at gates.
        head, tail: (G,) the first and last place in the queue of a gate, -1 without one.
        after: (H,) the next place in the queue.
        fresh, freed: (P,) pairs that got ready for gates, or left them, at this moment.
        listed: (2,) how many of these there are.
        start_s, end_s, post_s, posted_s: (n,) as in `Times`.
    """

    now: Floats
    at: Ints
    waits: Ints
    missing: Ints
    come: Ints
    sent: Ints
    posted: Ints
    begun: Ints
    busy: Ints
    head: Ints
    tail: Ints
    after: Ints
    fresh: Ints
    freed: Ints
    listed: Ints
    start_s: Floats
    end_s: Floats
    post_s: Floats
    posted_s: Floats


@inner
def begin(case: Case, state: State, queue: Queue, pair: int) -> None:
    """Begins the transfer of a pair."""
    receive = case.receives[case.first[pair] + state.begun[pair] - 1]
    state.busy[pair] = 1
    state.start_s[receive] = state.now[0]
    end_s = state.now[0] + case.latency[pair] + case.amount[receive] / case.rate[pair]
    state.end_s[receive] = end_s
    heappush(queue, (end_s, len(state.at) + pair))


@inner
def match(case: Case, state: State, queue: Queue, pair: int) -> None:
    """The next transfer of a pair is ready if both ends have posted it and none is under way. It
    begins, unless it has to queue.
    """
    begun = state.begun[pair]
    if state.busy[pair] or begun == state.sent[pair] or begun == state.posted[pair]:
        return
    state.begun[pair] += 1
    if case.place[pair] < case.place[pair + 1]:
        state.busy[pair] = 2
        state.fresh[state.listed[0]] = pair
        state.listed[0] += 1
    else:
        begin(case, state, queue, pair)


@inner
def take_turn(case: Case, state: State, queue: Queue, pair: int) -> None:
    """Begins a transfer that waits if it is the first in all of its queues."""
    if state.busy[pair] != 2:
        return
    for h in range(case.place[pair], case.place[pair + 1]):
        if state.head[case.gate[h]] != h:
            return
    begin(case, state, queue, pair)


@inner
def admit(case: Case, state: State, queue: Queue, owner: Ints) -> None:
    """At the end of a moment: what has got ready joins its queues, and what is the first in all of
    its queues begins.
    """
    fresh, freed = state.fresh[: state.listed[0]], state.freed[: state.listed[1]]
    fresh.sort()
    for pair in fresh:
        for h in range(case.place[pair], case.place[pair + 1]):
            gate = case.gate[h]
            state.after[h] = -1
            if state.head[gate] < 0:
                state.head[gate] = h
            else:
                state.after[state.tail[gate]] = h
            state.tail[gate] = h
    for pair in freed:
        for h in range(case.place[pair], case.place[pair + 1]):
            if state.head[case.gate[h]] >= 0:
                take_turn(case, state, queue, owner[state.head[case.gate[h]]])
    for pair in fresh:
        take_turn(case, state, queue, pair)
    state.listed[:] = 0


@inner
def post(case: Case, state: State, queue: Queue, i: int) -> None:
    """A send or receive is there for its other end to meet."""
    pair = case.pair[i]
    state.posted_s[i] = state.now[0]
    if case.kind[i] == SEND:
        state.sent[pair] += 1
    else:
        state.posted[pair] += 1
        state.missing[case.key[i]] += 1
    match(case, state, queue, pair)


@inner
def occupy(case: Case, state: State, queue: Queue, device: int) -> None:
    """Begins the action that a device stands at."""
    i = state.at[device]
    state.start_s[i] = state.now[0]
    state.end_s[i] = state.now[0] + case.amount[i]
    heappush(queue, (state.end_s[i], device))


@inner
def advance(case: Case, state: State, queue: Queue, device: int) -> None:
    """Takes a device to its next action that needs time; begins it if nothing is missing."""
    end = case.start[device + 1]
    while state.at[device] < end:
        i = state.at[device]
        if case.kind[i] != SEND and case.kind[i] != RECEIVE:
            break
        state.post_s[i] = state.now[0]
        if case.post[i] > 0.0:
            heappush(queue, (state.now[0] + case.post[i], device))
            return
        post(case, state, queue, i)
        state.at[device] += 1
    i = state.at[device]
    if i == end:
        return
    if case.kind[i] == COMPUTE and state.missing[case.key[i]]:
        state.waits[device] = case.key[i]
    elif case.kind[i] == SUM:
        state.come[case.key[i]] += 1
        state.waits[device] = -2 - case.key[i]
        if state.come[case.key[i]] == case.members[case.key[i]]:
            for other in range(len(state.at)):
                if state.waits[other] == -2 - case.key[i]:
                    state.waits[other] = -1
                    occupy(case, state, queue, other)
    else:
        occupy(case, state, queue, device)


@inner
def arrive(case: Case, state: State, queue: Queue, pair: int) -> None:
    """Ends a transfer, and hands the tensor to the computation that it is for, which may wait."""
    receive = case.receives[case.first[pair] + state.begun[pair] - 1]
    state.busy[pair] = 0
    if case.place[pair] < case.place[pair + 1]:
        for h in range(case.place[pair], case.place[pair + 1]):
            state.head[case.gate[h]] = state.after[h]
        state.freed[state.listed[1]] = pair
        state.listed[1] += 1
    match(case, state, queue, pair)
    key, target = case.key[receive], case.target[pair]
    state.missing[key] -= 1
    if not state.missing[key] and state.waits[target] == key:
        state.waits[target] = -1
        advance(case, state, queue, target)


@njit
def run(case: Case) -> tuple[bool, Floats, Floats, Floats, Floats]:
    """Runs to the end; whether it is one in which nothing is left over, and the four times of each
    action as in `Times`.
    """
    num_devices, num_pairs = len(case.start) - 1, len(case.target)
    size, places = len(case.kind), len(case.gate)
    state = State(
        np.zeros(1), case.start[:-1].copy(), np.full(num_devices, -1),
        np.zeros(case.num_keys, np.int64), np.zeros(len(case.members), np.int64),
        np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64),
        np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64),
        np.full(case.num_gates, -1), np.full(case.num_gates, -1), np.full(places, -1),
        np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64), np.zeros(2, np.int64),
        np.zeros(size), np.zeros(size), np.zeros(size), np.zeros(size),
    )  # fmt: skip
    owner = np.zeros(places, np.int64)
    for pair in range(num_pairs):
        owner[case.place[pair] : case.place[pair + 1]] = pair
    queue = [(0.0, 0)]
    queue.pop()
    for d in range(num_devices):
        advance(case, state, queue, d)
    while len(queue) or state.listed[0] or state.listed[1]:
        over = not len(queue) or queue[0][0] > state.now[0]
        if over and (state.listed[0] or state.listed[1]):
            admit(case, state, queue, owner)
            continue
        state.now[0], who = heappop(queue)
        if who >= num_devices:
            arrive(case, state, queue, who - num_devices)
            continue
        i = state.at[who]
        if case.kind[i] == SEND or case.kind[i] == RECEIVE:
            post(case, state, queue, i)
        state.at[who] += 1
        advance(case, state, queue, who)
    ended = True
    for d in range(num_devices):
        ended = ended and state.at[d] == case.start[d + 1]
    for p in range(num_pairs):
        ended = ended and state.sent[p] == state.begun[p] and state.posted[p] == state.begun[p]
    return ended, state.start_s, state.end_s, state.post_s, state.posted_s
