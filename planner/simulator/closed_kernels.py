"""The event loop of `events.py` where no two transfers ever share bandwidth, compiled by numba.

So it is if every link that is used is exclusive, or is on the route of one ordered pair of devices
only. Then a transfer takes latency + bytes / bandwidth from its start on, nothing that has begun is
ever foreseen anew, and there is one event for each action and transfer. The rules, and all times to
the last bit, are those of `events_kernels.py`.

An exclusive link on the routes of several pairs is a gate: transfers queue there, in the order of
the moments at which they were ready, then of their pairs, and begin when they are the first in all
of their queues.

The loop is one function, because numba counts a reference for every array that it hands to another
one, which took twice as long as all the rest.
"""

from typing import NamedTuple

import numpy as np

from planner.support.arrays import Floats, Ints, Kinds
from planner.support.jit import inner, njit

# `actions.Kind`, as numbers that are compiled in.
COMPUTE, SEND, RECEIVE, SUM = 0, 1, 2, 3


class Case(NamedTuple):
    """What is run, on what; D devices, n actions, P pairs, G gates and H places at gates.

    Attributes:
        start: (D + 1,) where the list of each device begins, and the last one ends.
        kind: (n,).
        key: (n,) of computations and receives, as `dry_run.Wiring` says; of a sum, the sum.
        holds: (n,) of sends and receives, likewise.
        pair: (n,) of sends and receives.
        amount: (n,) s, or bytes of a receive.
        post: (n,) s that posting a send or receive takes.
        receives: the receives, by pair, in the order of their lists.
        first: (P + 1,) where the receives of a pair begin.
        source: (P,) position of the device that sends.
        target: (P,) of the one that receives.
        latency: (P,) s.
        rate: (P,) bytes/s.
        place: (P + 1,) where the places of a pair begin.
        gate: (H,) the gate of each place.
        num_gates: G.
        num_keys: how many keys there are.
        members: how many devices come to each sum.
    """

    start: Ints
    kind: Kinds
    key: Ints
    holds: Ints
    pair: Ints
    amount: Floats
    post: Floats
    receives: Ints
    first: Ints
    source: Ints
    target: Ints
    latency: Floats
    rate: Floats
    place: Ints
    gate: Ints
    num_gates: int
    num_keys: int
    members: Ints


@inner
def push(times: Floats, whos: Ints, size: int, time: float, who: int) -> int:
    """Adds an event to a binary heap of so many; how many there are now."""
    at = size
    while at and times[(at - 1) >> 1] > time:
        times[at], whos[at] = times[(at - 1) >> 1], whos[(at - 1) >> 1]
        at = (at - 1) >> 1
    times[at], whos[at] = time, who
    return size + 1


@inner
def pop(times: Floats, whos: Ints, size: int) -> int:
    """Takes the first event off the heap, which the caller has read; how many are left."""
    size -= 1
    time, who, at = times[size], whos[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if times[child] >= time:
            break
        times[at], whos[at] = times[child], whos[child]
        at = child
    times[at], whos[at] = time, who
    return size


@njit
def run(
    start: Ints, kind: Kinds, key: Ints, holds: Ints, pair: Ints, amount: Floats,
    post: Floats, receives: Ints, first: Ints, source: Ints, target: Ints, latency: Floats,
    rate: Floats, place: Ints, gate: Ints, num_gates: int, num_keys: int, members: Ints,
) -> tuple[bool, Floats, Floats, Floats, Floats]:  # fmt: skip
    """Runs to the end; arguments as in `Case`.

    Returns:
        whether nothing is left over, and the four times of each action as in `Times`.
    """
    num_devices, num_pairs, num_actions = len(start) - 1, len(target), len(kind)
    start_s, end_s = np.zeros(num_actions), np.zeros(num_actions)
    post_s, posted_s = np.zeros(num_actions), np.zeros(num_actions)
    # The action that a device runs or waits for; what it waits for: the key of a computation, or
    # -2 - sum; -1 where it does not.
    at, waits = start[:-1].copy(), np.full(num_devices, -1)
    missing, come = np.zeros(num_keys, np.int64), np.zeros(len(members), np.int64)
    sent, posted = np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64)
    # Transfers so far; 1 while the last of them is under way, 2 while it waits at gates.
    begun, busy = np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64)
    # The queue of a gate: its first and last place, and the place behind each.
    head, tail = np.full(num_gates, -1), np.full(num_gates, -1)
    behind, owner = np.full(len(gate), -1), np.zeros(len(gate), np.int64)
    for p in range(num_pairs):
        owner[place[p] : place[p + 1]] = p
    # Pairs that got ready for gates, or left them, at this moment.
    fresh, num_fresh = np.zeros(num_pairs, np.int64), 0
    freed, num_freed = np.zeros(num_pairs, np.int64), 0
    # Events: the end of a device's action, or, as number of devices + pair, of a transfer.
    times = np.zeros(num_devices + num_pairs)
    whos = np.zeros(num_devices + num_pairs, np.int64)
    size, now, unmoved, sender = 0, 0.0, 0, -1
    while True:
        # Next: a device that moves on, and a pair whose next transfer may be ready.
        device, meeting, posting = -1, -1, False
        if sender >= 0:
            device, sender = sender, -1
        elif unmoved < num_devices:
            device = unmoved
            unmoved += 1
        elif (num_fresh or num_freed) and (not size or times[0] > now):
            # The moment is over: all that got ready joins its queues, and turns are given.
            ready = fresh[:num_fresh]
            ready.sort()
            for p in ready:
                for h in range(place[p], place[p + 1]):
                    behind[h] = -1
                    if head[gate[h]] < 0:
                        head[gate[h]] = h
                    else:
                        behind[tail[gate[h]]] = h
                    tail[gate[h]] = h
            # Of what has ended, those behind it; then all that is new.
            for f in range(num_freed + num_fresh):
                one = freed[f] if f < num_freed else fresh[f - num_freed]
                for h in range(place[one], place[one + 1]):
                    if head[gate[h]] < 0:
                        continue
                    p = owner[head[gate[h]]]
                    turn = busy[p] == 2
                    for g in range(place[p], place[p + 1]):
                        turn = turn and head[gate[g]] == g
                    if turn:
                        busy[p] = 1
                        i = receives[first[p] + begun[p] - 1]
                        start_s[i] = now
                        end_s[i] = now + latency[p] + amount[i] / rate[p]
                        size = push(times, whos, size, end_s[i], num_devices + p)
            num_fresh = num_freed = 0
            continue
        elif not size:
            break
        else:
            now, who = times[0], whos[0]
            size = pop(times, whos, size)
            if who < num_devices:
                device = who
                posting = kind[at[who]] == SEND or kind[at[who]] == RECEIVE
                at[who] += not posting
            else:
                meeting = who - num_devices
                i = receives[first[meeting] + begun[meeting] - 1]
                busy[meeting] = 0
                for h in range(place[meeting], place[meeting + 1]):
                    head[gate[h]] = behind[h]
                if place[meeting] < place[meeting + 1]:
                    freed[num_freed] = meeting
                    num_freed += 1
                missing[key[i]] -= 1
                if not missing[key[i]] and waits[target[meeting]] == key[i]:
                    device = target[meeting]
                    waits[device] = -1
                if holds[i] >= 0:
                    missing[holds[i]] -= 1
                    if not missing[holds[i]] and waits[source[meeting]] == holds[i]:
                        sender = source[meeting]
                        waits[sender] = -1
        while True:
            if meeting >= 0:
                p, meeting = meeting, -1
                if not busy[p] and begun[p] < sent[p] and begun[p] < posted[p]:
                    i = receives[first[p] + begun[p]]
                    begun[p] += 1
                    if place[p] < place[p + 1]:
                        busy[p] = 2
                        fresh[num_fresh] = p
                        num_fresh += 1
                    else:
                        busy[p] = 1
                        start_s[i] = now
                        end_s[i] = now + latency[p] + amount[i] / rate[p]
                        size = push(times, whos, size, end_s[i], num_devices + p)
            if device < 0 or at[device] == start[device + 1]:
                break
            i = at[device]
            if kind[i] == SEND or kind[i] == RECEIVE:
                if not posting:
                    post_s[i] = now
                    if post[i] > 0.0:
                        size = push(times, whos, size, now + post[i], device)
                        break
                posted_s[i], posting, meeting = now, False, pair[i]
                at[device] += 1
                if kind[i] == SEND:
                    sent[meeting] += 1
                    if holds[i] >= 0:
                        missing[holds[i]] += 1
                else:
                    posted[meeting] += 1
                    missing[key[i]] += 1
                continue
            if kind[i] == COMPUTE and missing[key[i]]:
                waits[device] = key[i]
            elif kind[i] == SUM:
                waits[device] = -2 - key[i]
                come[key[i]] += 1
                if come[key[i]] == members[key[i]]:
                    for other in range(num_devices):
                        if waits[other] == -2 - key[i]:
                            waits[other] = -1
                            j = at[other]
                            start_s[j], end_s[j] = now, now + amount[j]
                            size = push(times, whos, size, end_s[j], other)
            else:
                start_s[i], end_s[i] = now, now + amount[i]
                size = push(times, whos, size, end_s[i], device)
            break
    ended = True
    for d in range(num_devices):
        ended = ended and at[d] == start[d + 1]
    for p in range(num_pairs):
        ended = ended and sent[p] == begun[p] and posted[p] == begun[p]
    return ended, start_s, end_s, post_s, posted_s
