"""What is known of every schedule of NetSplit's full model (`netsplit_model.py`, whose symbols
these are) before any search: least ticks before and behind each operator in a phase.

Legend: a_i ticks of i on its fastest device; c_ij ticks of what i sends j over the fastest path;
h_j (head) no schedule starts j earlier; t_j (tail) nor ends the phase earlier than that after j has
ended. D devices.

    (h1) of the operators that feed j, by falling h_i + a_i + c_ij, let the first that is elsewhere
         than j be number k + 1. The k before it run one after the other on j's device, so that h_j
         is at least the end of these k and at least h + a + c of number k + 1; for the best k
                                                                                    `_by_feeds`
    (h2) a set of operators that all come before j, of work w, which runs on k of the D devices,
         keeps them from the least k heads in it to the least k ways from its operators to j:
         k h_j >= sum of least k heads + w + sum of least k ways; for the best k, which is at most
         the number of the set's groups                                             `_by_work`
    (h3) tails are the heads of the reversed phase                                   `limits_of`
    (h4) F, or B, is at least h_i + a_i + t_i, and (h2) of sets of all operators, with tails for
         ways                                                                       `_least_end`

(h2) is asked for the sets of operators with at least a certain head and at least a certain way,
`MARKS` of the ways. This is where most of the bound of few devices comes from: operators that every
path runs through leave all devices but one idle, and (h2) adds that up over all of them.

Source: this project's; (h2) is the energetic reasoning of Baptiste, Le Pape and Nuijten,
Constraint-Based Scheduling, 2001, ch. 3, on chains of sets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.solvers.netsplit.kernels import Lists, lists_of
from planner.solvers.netsplit.model import Instance, messages_of
from planner.support.arrays import Ints
from planner.support.jit import inner, njit

MARKS = 24
"""With all of them, the bounds of the benchmark's seeds 0 to 2 are the same."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a phase, in ticks.

    Attributes:
        head: per operator; tail: likewise.
        least: F, or B, is at least that.
        crowded: whether the work, shared by all devices, takes longer than the longest way through
            the graph.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...]
    least: int
    crowded: bool


@dataclass(frozen=True, slots=True)
class Joint:
    """Of both phases together, in ticks.

    Attributes:
        before: (N,) J; behind: (N,) K.
        least: F + B is at least that.
    """

    before: tuple[int, ...]
    behind: tuple[int, ...]
    least: int


def joint_of(limits: Sequence[Limits]) -> Joint:
    """What the phases alone say.

    Args:
        limits: of forwards and of backwards.
    """
    forward, backward = limits
    return Joint(
        tuple(h + t for h, t in zip(forward.head, backward.tail, strict=True)),
        tuple(t + h for t, h in zip(forward.tail, backward.head, strict=True)),
        forward.least + backward.least,
    )


def edges_of(instance: Instance, *, backward: bool) -> list[tuple[int, int, int]]:
    """(first, then, tensor): what waits for what in a phase, in an order in which all that comes
    before an operator is before what comes after it.
    """
    edges = [
        (j, flow.producer, t) if backward else (flow.producer, j, t)
        for t, flow in enumerate(instance.placing.tensors)
        for j in flow.consumers
        if flow.gradient or not backward
    ]
    return sorted(edges, reverse=backward)


def limits_of(instance: Instance, *, backward: bool) -> Limits:
    """Heads, tails and the least length of a phase."""
    num, groups = instance.placing.num_operators, np.array(instance.group_of)
    ticks = (instance.backward if backward else instance.forward).min(axis=1)
    far = _least_messages(instance)
    ways: dict[tuple[int, int], int] = {}
    for i, j, t in edges_of(instance, backward=backward):
        together = instance.group_of[i] == instance.group_of[j]
        ways[i, j] = max(ways.get((i, j), -1), -1 if together else far[t])
    last = num - 1
    if backward:
        there = {(last - i, last - j): c for (i, j), c in ways.items()}
        back = {(j, i): c for (i, j), c in ways.items()}
        up, down = slice(None, None, -1), slice(None)
    else:
        there, back = ways, {(last - j, last - i): c for (i, j), c in ways.items()}
        up, down = slice(None), slice(None, None, -1)
    devices = instance.placing.num_devices
    head = _heads(ticks[up], groups[up], *_lists(there, num), devices, MARKS)[up]
    tail = _heads(ticks[down], groups[down], *_lists(back, num), devices, MARKS)[down]
    least = int(_least_end(ticks, groups, head, tail, devices, MARKS))
    least = max(least, int((head + ticks + tail).max()))
    crowded = int(ticks.sum()) > devices * _longest(ticks, ways, backward=backward)
    return Limits(tuple(head.tolist()), tuple(tail.tolist()), least, crowded)


def _least_messages(instance: Instance) -> list[int]:
    """Ticks of each tensor over the fastest path between two devices."""
    apart = ~np.eye(instance.placing.num_devices, dtype=bool)
    if not apart.any():
        return [0] * len(instance.placing.tensors)
    return [int(ticks[apart].min()) for ticks in messages_of(instance)]


def _longest(ticks: Ints, ways: Iterable[tuple[int, int]], *, backward: bool) -> int:
    """Ticks of the longest way through the graph."""
    end: list[int] = ticks.tolist()
    for i, j in sorted(ways, reverse=backward):
        end[j] = max(end[j], end[i] + int(ticks[j]))
    return max(end)


def _lists(ways: dict[tuple[int, int], int], num: int) -> tuple[Lists, Ints, Lists]:
    """What feeds each operator, with c of each of those; and what it feeds."""
    feeds: list[list[int]] = [[] for _ in range(num)]
    reads: list[list[int]] = [[] for _ in range(num)]
    for i, j in sorted(ways):
        feeds[j].append(i)
        reads[i].append(j)
    away = [ways[i, j] for j, before in enumerate(feeds) for i in before]
    return lists_of(feeds), np.array(away, dtype=np.int64), lists_of(reads)


@njit
def _heads(
    ticks: Ints, groups: Ints, feeds: Lists, away: Ints, reads: Lists, devices: int, marks: int
) -> Ints:
    """(N,) heads; operators are numbered such that what feeds comes first.

    Args:
        ticks: (N,) a; groups: (N,); away: c by entry of feeds, -1 within a group.
    """
    num = ticks.shape[0]
    head, way = np.zeros(num, np.int64), np.empty(num, np.int64)
    for j in range(num):
        if feeds.start[j] == feeds.start[j + 1]:
            continue
        way[: j + 1] = -1
        way[j] = 0
        for i in range(j - 1, -1, -1):
            for x in range(reads.start[i], reads.start[i + 1]):
                k = reads.values[x]
                if k <= j and way[k] >= 0:
                    way[i] = max(way[i], way[k] + (ticks[k] if k < j else 0))
        some = np.flatnonzero(way[:j] >= 0)
        by_work = _by_work(some, ticks, groups, head, way, devices, marks)
        head[j] = max(by_work, _by_feeds(j, ticks, feeds, away, head))
    return head


@inner
def _by_feeds(j: int, ticks: Ints, feeds: Lists, away: Ints, head: Ints) -> int:
    """(h1)."""
    first, last = feeds.start[j], feeds.start[j + 1]
    before = feeds.values[first:last]
    ready = head[before] + ticks[before]
    ranked = np.argsort(-(ready + np.maximum(away[first:last], 0)), kind="mergesort")
    least = _one_by_one(before, ticks, head)
    for k in range(ranked.shape[0]):
        x = ranked[k]
        if away[first + x] >= 0:
            here = _one_by_one(before[ranked[:k]], ticks, head)
            least = min(least, max(here, ready[x] + away[first + x]))
    return least


@inner
def _one_by_one(some: Ints, ticks: Ints, head: Ints) -> int:
    """When operators are over that run on one device."""
    end = 0
    for x in np.argsort(head[some], kind="mergesort"):
        end = max(end, head[some[x]]) + ticks[some[x]]
    return end


@inner
def _by_work(
    some: Ints, ticks: Ints, groups: Ints, head: Ints, way: Ints, devices: int, marks: int
) -> int:
    """(h2), for subsets of some operators with at least a certain head and a certain way."""
    falling = some[np.argsort(-head[some], kind="mergesort")]
    levels = np.unique(way[some])
    step = max(1, levels.shape[0] // marks)
    seen = np.full(groups.max() + 1, -1)
    ways, heads = np.empty(devices, np.int64), np.empty(devices, np.int64)
    best = 0
    for level in range(0, levels.shape[0], step):
        count, num_groups, work = 0, 0, 0
        for i in falling:
            if way[i] < levels[level]:
                continue
            work += ticks[i]
            if seen[groups[i]] != level:
                seen[groups[i]] = level
                num_groups += 1
            # The last heads are the least; of the ways, the least D are kept in order.
            size = min(count, devices)
            heads[1:] = heads[:-1].copy()
            heads[0] = head[i]
            k = size if size < devices else devices
            while k > 0 and ways[k - 1] > way[i]:
                if k < devices:
                    ways[k] = ways[k - 1]
                k -= 1
            if k < devices:
                ways[k] = way[i]
            count += 1
            total, least = np.int64(work), np.int64(2**62)
            for k in range(min(count, devices, num_groups)):
                total += heads[k] + ways[k]
                least = min(least, (total + k) // (k + 1))
            best = max(best, int(least))
    return best


@njit
def _least_end(ticks: Ints, groups: Ints, head: Ints, tail: Ints, devices: int, marks: int) -> int:
    """(h4), of sets."""
    return _by_work(np.arange(ticks.shape[0]), ticks, groups, head, tail, devices, marks)
