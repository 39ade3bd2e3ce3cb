"""The inner loop of `dry_run.py`, compiled by numba."""

import numpy as np

from planner.support.arrays import Ints, Kinds
from planner.support.jit import njit

# `actions.Kind`, as numbers that are compiled in.
COMPUTE, SEND, RECEIVE, SUM = 0, 1, 2, 3


@njit
def ends(
    start: Ints, kind: Kinds, key: Ints, num_keys: int, holds: Ints, pair: Ints,
    source: Ints, target: Ints, receives: Ints, first: Ints, members: Ints,
) -> bool:  # fmt: skip
    """Whether lists run to their end; arguments as in `actions.Code` and `dry_run.Wiring`,
    whose transfers all have both ends.
    """
    count = len(start) - 1
    position = start[:-1].copy()
    sent, posted = np.zeros(len(target), np.int64), np.zeros(len(target), np.int64)
    missing, come = np.zeros(num_keys, np.int64), np.zeros(len(members), np.int64)
    # What a device waits for: the key of a computation, or -2 - sum; -1 where it does not.
    waits = np.full(count, -1)
    ready = np.arange(count)
    num_ready = count
    while num_ready:
        num_ready -= 1
        d = ready[num_ready]
        waits[d] = -1
        while position[d] < start[d + 1]:
            i = position[d]
            arrived = -1
            if kind[i] == SEND:
                p = pair[i]
                if holds[i] >= 0:
                    missing[holds[i]] += 1
                if sent[p] < posted[p]:
                    arrived = receives[first[p] + sent[p]]
                sent[p] += 1
            elif kind[i] == RECEIVE:
                p = pair[i]
                missing[key[i]] += 1
                if posted[p] < sent[p]:
                    arrived = i
                posted[p] += 1
            elif kind[i] == COMPUTE and missing[key[i]]:
                waits[d] = key[i]
                break
            elif kind[i] == SUM:
                come[key[i]] += 1
                if come[key[i]] < members[key[i]]:
                    waits[d] = -2 - key[i]
                    position[d] += 1
                    break
                for other in range(count):
                    if waits[other] == -2 - key[i]:
                        waits[other] = -1
                        ready[num_ready] = other
                        num_ready += 1
            if arrived >= 0:
                missing[key[arrived]] -= 1
                other = target[pair[i]]
                if waits[other] == key[arrived] and not missing[key[arrived]]:
                    waits[other] = -1
                    ready[num_ready] = other
                    num_ready += 1
                held, other = holds[arrived], source[pair[i]]
                if held >= 0:
                    missing[held] -= 1
                    if waits[other] == held and not missing[held]:
                        waits[other] = -1
                        ready[num_ready] = other
                        num_ready += 1
            position[d] += 1
    for d in range(count):
        if position[d] < start[d + 1] or waits[d] != -1:
            return False
    return True
