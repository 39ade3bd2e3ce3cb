"""Bounds that hold in every schedule of NetSplit's full model (`model.py`, whose symbols these
are), before any search: least ticks before and behind each operator in a phase.

Legend: a_i ticks of i on its fastest device; c_ij ticks of a transfer from i to j over the fastest
path; h_j (head) no schedule starts j earlier; t_j (tail) no schedule ends the phase earlier than
that after the end of j. D devices.

    (h1) rank the operators that feed j by falling h + a + c. In any schedule, let number k + 1 be
         the first of them that is not on j's device. Then the k before it run one after the other
         on j's device, so h_j is at least the end of these k; and j waits for the transfer of
         number k + 1, so h_j is at least its h + a + c. The minimum over all k holds in every
         schedule                                                                   `_by_feeds`
    (h2) a set of operators that all come before j, of work w, runs on some k of the D devices. Each
         of these is busy with the set between the head of its first operator and the way of its
         last one before j starts. The k first ones are different operators, and so are the k last
         ones, so
         k h_j >= sum of least k heads + w + sum of least k ways;
         the minimum over all k holds in every schedule; k is at most the number of groups in the
         set                                                                        `_by_work`
    (h3) tails are the heads of the reversed phase                           `phase_bounds_of`
    (h4) F, or B, is at least h_i + a_i + t_i, and (h2) of sets of all operators, with tails for
         ways                                                                       `_least_end`

(h2) is asked for the sets of operators with at least a certain head and at least a certain way,
`MARKS` of the ways. This is where most of the bound for few devices comes from: operators that
every path runs through leave all devices but one idle, and (h2) adds that up over all of them.

Source: this project's; (h2) is the energetic reasoning of Baptiste, Le Pape and Nuijten,
Constraint-Based Scheduling, 2001, ch. 3, on chains of sets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from planner.clusters.routes import fastest_way_s
from planner.solvers.netsplit.model import NetSplitInstance
from planner.support.arrays import Csr, Ints, csr
from planner.support.jit import inner, njit
from planner.support.memo import remembered

MARKS = 24
"""Ways that (h2) is asked for; all of them give the benchmark's seeds 0 to 2 the same bounds."""

BESIDE = -1
"""Instead of ticks c: the two operators are in one group, so nothing is ever sent."""

NONE = 2**62
"""More ticks than any schedule has."""


@dataclass(frozen=True, slots=True)
class PhaseBounds:
    """The bounds of a phase, in ticks.

    Attributes:
        head: (N,) h; tail: (N,) t.
        least: lower bound of F, or of B.
        crowded: whether the work, shared equally by all devices, takes longer than the longest path
            through the graph.
    """

    head: tuple[int, ...]
    tail: tuple[int, ...]
    least: int
    crowded: bool


@dataclass(frozen=True, slots=True)
class SubproblemBounds:
    """The bounds of some operators alone, or of all, in ticks.

    Attributes:
        phases: of forwards and of backwards.
        before: (N,) J of `windows.py`: least ticks before the forward of an operator plus behind
            its backward; behind: (N,) K: behind its forward plus before its backward.
        least: lower bound of F + B.
        between: D of `spans.py` by pairs u, v: least ticks from the start of u to the end of v
            forwards, plus from the start of v to the end of u backwards.
    """

    phases: tuple[PhaseBounds, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    least: int
    between: Mapping[tuple[int, int], int] = field(default_factory=dict)


def subproblem_bounds_of(instance: NetSplitInstance) -> SubproblemBounds:
    """The bounds that follow from each phase alone."""
    forward, backward = phases = tuple(
        phase_bounds_of(instance, backward=backward) for backward in (False, True)
    )
    return SubproblemBounds(
        phases,
        tuple(h + t for h, t in zip(forward.head, backward.tail, strict=True)),
        tuple(t + h for t, h in zip(forward.tail, backward.head, strict=True)),
        forward.least + backward.least,
    )


def edges_of(instance: NetSplitInstance, *, backward: bool) -> list[tuple[int, int, int]]:
    """(first, then, tensor): all pairs of a phase in which one operator waits for another, sorted
    so that the edges into an operator come before those out of it.
    """
    edges = [
        (j, tensor.producer, t) if backward else (tensor.producer, j, t)
        for t, tensor in enumerate(instance.problem.tensors)
        for j in tensor.consumers
        if tensor.gradient or not backward
    ]
    return sorted(edges, reverse=backward)


@remembered
def phase_bounds_of(instance: NetSplitInstance, *, backward: bool) -> PhaseBounds:
    """Heads, tails and the least length of a phase."""
    num, groups = instance.problem.num_operators, np.array(instance.group_of)
    ticks = (instance.backward if backward else instance.forward).min(axis=1)
    far = least_transfers(instance)
    ways: dict[tuple[int, int], int] = {}
    for i, j, t in edges_of(instance, backward=backward):
        together = instance.group_of[i] == instance.group_of[j]
        ways[i, j] = max(ways.get((i, j), BESIDE), BESIDE if together else far[t])
    # `_heads` wants operators numbered so that feeding ones come first. Reversing a phase reverses
    # its edges, and numbering from the last operator down restores that order.
    last = num - 1
    if backward:
        there = {(last - i, last - j): c for (i, j), c in ways.items()}
        back = {(j, i): c for (i, j), c in ways.items()}
        up, down = slice(None, None, -1), slice(None)
    else:
        there, back = ways, {(last - j, last - i): c for (i, j), c in ways.items()}
        up, down = slice(None), slice(None, None, -1)
    devices = instance.problem.num_devices
    head = _heads(ticks[up], groups[up], *_lists(there, num), devices, MARKS)[up]
    tail = _heads(ticks[down], groups[down], *_lists(back, num), devices, MARKS)[down]
    least = int(_least_end(ticks, groups, head, tail, devices, MARKS))
    least = max(least, int((head + ticks + tail).max()))
    crowded = int(ticks.sum()) > devices * _longest(ticks, ways, backward=backward)
    return PhaseBounds(tuple(head.tolist()), tuple(tail.tolist()), least, crowded)


def least_transfers(instance: NetSplitInstance) -> list[int]:
    """Ticks of each tensor over the fastest path between two devices."""
    problem = instance.problem
    if problem.num_devices < 2:
        return [0] * len(problem.tensors)
    sizes = np.array([tensor.bytes for tensor in problem.tensors], dtype=np.int64)
    fastest_s = fastest_way_s(problem.latency_s, problem.seconds_per_byte, sizes)
    return [int(ticks) for ticks in np.rint(fastest_s / instance.tick_s)]


def _longest(ticks: Ints, ways: Iterable[tuple[int, int]], *, backward: bool) -> int:
    """Ticks of the longest path through the graph."""
    end: list[int] = ticks.tolist()
    for i, j in sorted(ways, reverse=backward):
        end[j] = max(end[j], end[i] + int(ticks[j]))
    return max(end)


def _lists(ways: dict[tuple[int, int], int], num: int) -> tuple[Csr, Ints, Csr]:
    """The operators that feed each one, with c of each; and the operators that it feeds."""
    feeds: list[list[int]] = [[] for _ in range(num)]
    reads: list[list[int]] = [[] for _ in range(num)]
    for i, j in sorted(ways):
        feeds[j].append(i)
        reads[i].append(j)
    away = [ways[i, j] for j, before in enumerate(feeds) for i in before]
    return csr(feeds), np.array(away, dtype=np.int64), csr(reads)


@njit
def _heads(
    ticks: Ints, groups: Ints, feeds: Csr, away: Ints, reads: Csr, devices: int, marks: int
) -> Ints:
    """(N,) heads; every operator has a larger number than those that feed it.

    Args:
        ticks: (N,) a; groups: (N,); away: c by entry of feeds, `BESIDE` within a group.
    """
    num = ticks.shape[0]
    head, way = np.zeros(num, np.int64), np.empty(num, np.int64)
    for j in range(num):
        if feeds.start[j] == feeds.start[j + 1]:
            continue
        # way[i]: longest path from the end of i to the start of j, -1 if there is none.
        # Transfers are left out, because all operators of a path may share a device. Readers have
        # larger numbers, so their ways are final on the way down from j.
        way[: j + 1] = -1
        way[j] = 0
        for i in range(j - 1, -1, -1):
            for x in range(reads.start[i], reads.start[i + 1]):
                k = reads.values[x]
                if k <= j and way[k] >= 0:
                    way[i] = max(way[i], way[k] + (ticks[k] if k < j else 0))
        before = np.flatnonzero(way[:j] >= 0)
        by_work = _by_work(before, ticks, groups, head, way, devices, marks)
        head[j] = max(by_work, _by_feeds(j, ticks, feeds, away, head))
    return head


@inner
def _by_feeds(j: int, ticks: Ints, feeds: Csr, away: Ints, head: Ints) -> int:
    """(h1)."""
    first, last = feeds.start[j], feeds.start[j + 1]
    before = feeds.values[first:last]
    ready = head[before] + ticks[before]
    ranked = np.argsort(-(ready + np.maximum(away[first:last], 0)), kind="mergesort")
    # Number k + 1 is the first one that is elsewhere. One in j's group never is, so it is no case.
    least = _one_by_one(before, ticks, head)  # all of them on j's device
    for k in range(ranked.shape[0]):
        x = ranked[k]
        if away[first + x] != BESIDE:
            here = _one_by_one(before[ranked[:k]], ticks, head)
            least = min(least, max(here, ready[x] + away[first + x]))
    return least


@inner
def _one_by_one(operators: Ints, ticks: Ints, head: Ints) -> int:
    """The earliest end of operators on one device: by rising heads is the best order."""
    end = 0
    for x in np.argsort(head[operators], kind="mergesort"):
        end = max(end, head[operators[x]]) + ticks[operators[x]]
    return end


@inner
def _by_work(
    operators: Ints, ticks: Ints, groups: Ints, head: Ints, way: Ints, devices: int, marks: int
) -> int:
    """(h2), for the sets of operators with at least a certain head and a certain way.

    For each way, operators join the set by falling head, so that each step is one of the sets.
    """
    falling = operators[np.argsort(-head[operators], kind="mergesort")]
    levels = np.unique(way[operators])
    step = max(1, levels.shape[0] // marks)
    seen = np.full(groups.max() + 1, -1)  # the last level at which a group was counted
    least_ways, least_heads = np.empty(devices, np.int64), np.empty(devices, np.int64)
    best = 0
    # The bound holds for every set, so levels that are stepped over cost tightness alone.
    for level in range(0, levels.shape[0], step):
        count, num_groups, work = 0, 0, 0
        for i in falling:
            if way[i] < levels[level]:
                continue
            work += ticks[i]
            # Each level counts its groups anew, without clearing `seen`.
            if seen[groups[i]] != level:
                seen[groups[i]] = level
                num_groups += 1
            # Heads fall, so the newest head is the least, and the D least are the D newest: they
            # shift by one place instead of being sorted in.
            least_heads[1:] = least_heads[:-1].copy()
            least_heads[0] = head[i]
            _insert(least_ways, min(count, devices), way[i])
            count += 1
            total, least = np.int64(work), np.int64(NONE)
            # On k + 1 devices the set has as many first operators, and as many last ones: each
            # device has its own, so they are different, and their groups are, too.
            for k in range(min(count, devices, num_groups)):
                total += least_heads[k] + least_ways[k]
                least = min(least, (total + k) // (k + 1))  # rounded up: ticks are whole
            best = max(best, int(least))
    return best


@inner
def _insert(least: Ints, size: int, value: int) -> None:
    """Inserts a value into the `size` values kept in rising order; the largest one is dropped where
    there is no room.
    """
    k = size
    while k > 0 and least[k - 1] > value:
        if k < least.shape[0]:
            least[k] = least[k - 1]
        k -= 1
    if k < least.shape[0]:
        least[k] = value


@njit
def _least_end(ticks: Ints, groups: Ints, head: Ints, tail: Ints, devices: int, marks: int) -> int:
    """(h2) for the end of a phase, in (h4)."""
    return _by_work(np.arange(ticks.shape[0]), ticks, groups, head, tail, devices, marks)
