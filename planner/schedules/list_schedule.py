"""List schedules of tasks that exclude each other on resources, compiled by numba. `task_list.py`
lists the tasks.

A task occupies resources from its start on: first its own one, until it ends, then others, each for
a time of its own. A device is the own resource of what it computes, a channel between two devices
that of a transfer, and the links on the way are the others. A task without resources begins when
all before it have ended: it is a delay. Tasks that share a resource follow the same one of two
rules:

    FIFO      a task takes its resources when it becomes ready, behind those that were ready before
    PRIORITY  an idle resource takes the task of the least rank that is ready

A graph may repeat: there are some rounds of all tasks, and a task may let another one go in the
round `window` later. An order of tasks that is given is a chain of tasks that wait for each other.

Time goes from moment to moment at which tasks end. All that ends at a moment ends before anything
begins, so a resource chooses among all that is ready by then. Of transfers that become ready at the
same moment, the first is the one whose maker began first. So schedules do not depend on the order
in which equal times leave a heap.

Arrays are indexed by

j       tasks of a round, n of them        task   tasks of all rounds: m n + j in round m
r       resources                          turn   places in `begun`
x       positions in the values of a `Csr`
"""

from typing import NamedTuple

import numpy as np

from planner.support.arrays import Bools, Csr, Floats, Ints
from planner.support.jit import inlined, inner, njit

EVENTS, BEGUN, LOOKED_AT, WAITING = range(4)
"""Entries of `TaskRun.counts`."""


class TaskGraph(NamedTuple):
    """Tasks as arrays; n of them in a round.

    Attributes:
        lasts_s: (n,) duration, in s.
        use: resources by task, its own one first.
        busy_s: per value of `use`, for how long from the task's start on, in s.
        then: by task, those that wait for it.
        num_before: (n,) number of tasks that it waits for.
        rank: (n,) of PRIORITY, in the first round; a round later it is n more.
        fifo: (n,) whether the rule is FIFO.
        again: (n,) the task that waits for this one `window` rounds later, -1 for none.
        num_resources: number of resources.
        num_rounds: number of rounds; `num_before` counts nothing of earlier ones.
        window: see `again`; at least 1.
    """

    lasts_s: Floats
    use: Csr
    busy_s: Floats
    then: Csr
    num_before: Ints
    rank: Ints
    fifo: Bools
    again: Ints
    num_resources: int
    num_rounds: int = 1
    window: int = 1


class TaskRun(NamedTuple):
    """The arrays that a list schedule is made in.

    Attributes:
        start_s, end_s: of each task, in s; inf if it has not begun.
        begun: tasks in the order in which they took their resources.
        missing: number of tasks that each task still waits for.
        free_s: (R,) when a resource is free.
        queue_start, queue_size: (R + 1,) and (R,) of the queues of resources in the next two.
        queue_rank, queue_task: heaps by rank: ready tasks that need a resource alone.
        waiting: ready tasks with the rule PRIORITY that need several resources, by rank.
        looked_at: resources that became idle, or got a task, at this moment, ascending. No other
            one can begin anything. is_looked_at: (R,) whether a resource is among them.
        event_s: heap of the times of events; event: the turn of the task that ends then, or the
            number of all tasks where only a link becomes free.
        counts: (4,) the lengths of the heap, of `begun`, of `looked_at` and of `waiting`.
    """

    start_s: Floats
    end_s: Floats
    begun: Ints
    missing: Ints
    free_s: Floats
    queue_start: Ints
    queue_size: Ints
    queue_rank: Ints
    queue_task: Ints
    waiting: Ints
    looked_at: Ints
    is_looked_at: Bools
    event_s: Floats
    event: Ints
    counts: Ints


def run_of(num_tasks: int, num_resources: int, num_uses: int) -> TaskRun:
    """The arrays of graphs up to a size.

    Args:
        num_tasks: of all rounds.
        num_uses: values of `TaskGraph.use`, times rounds.
    """

    def of_tasks() -> Ints:
        return np.zeros(num_tasks, np.int64)

    def of_resources() -> Ints:
        return np.zeros(num_resources, np.int64)

    return TaskRun(
        start_s=np.zeros(num_tasks),
        end_s=np.zeros(num_tasks),
        begun=of_tasks(),
        missing=of_tasks(),
        free_s=np.zeros(num_resources),
        queue_start=np.zeros(num_resources + 1, np.int64),
        queue_size=of_resources(),
        queue_rank=of_tasks(),
        queue_task=of_tasks(),
        waiting=of_tasks(),
        looked_at=of_resources(),
        is_looked_at=np.zeros(num_resources, np.bool_),
        event_s=np.zeros(num_tasks + num_uses),
        event=np.zeros(num_tasks + num_uses, np.int64),
        counts=np.zeros(4, np.int64),
    )


# ------------------------------------------------------------------------------------------ heaps


@inlined
def _push(keys: Floats | Ints, items: Ints, first: int, size: int, key: float, item: int) -> None:
    """Puts an item into a heap by key, then item, that begins at `first` of two arrays."""
    at = size
    while at > 0:
        up = (at - 1) // 2
        if keys[first + up] < key or (keys[first + up] == key and items[first + up] < item):
            break
        keys[first + at], items[first + at] = keys[first + up], items[first + up]
        at = up
    keys[first + at], items[first + at] = key, item


@inlined
def _pop(keys: Floats | Ints, items: Ints, first: int, size: int) -> int:
    """Takes the least item out of a heap; the heap has one less afterwards."""
    least, count, at = items[first], size - 1, 0
    key, item = keys[first + count], items[first + count]
    while True:
        down = 2 * at + 1
        if down >= count:
            break
        a, b = first + down, first + down + 1
        if down + 1 < count and (keys[b] < keys[a] or (keys[b] == keys[a] and items[b] < items[a])):
            down, a = down + 1, b
        if key < keys[a] or (key == keys[a] and item < items[a]):
            break
        keys[first + at], items[first + at] = keys[a], items[a]
        at = down
    keys[first + at], items[first + at] = key, item
    return int(least)


# --------------------------------------------------------------------------------------- schedule


@inlined
def _look_at(run: TaskRun, r: int) -> None:
    """Notes that a resource may begin a task now."""
    if not run.is_looked_at[r]:
        run.is_looked_at[r] = True
        at = run.counts[LOOKED_AT]
        run.counts[LOOKED_AT] += 1
        while at > 0 and run.looked_at[at - 1] > r:
            run.looked_at[at] = run.looked_at[at - 1]
            at -= 1
        run.looked_at[at] = r


@inlined
def _add_event(run: TaskRun, time_s: float, turn: int) -> None:
    _push(run.event_s, run.event, 0, run.counts[EVENTS], time_s, turn)
    run.counts[EVENTS] += 1


@inlined
def _take(graph: TaskGraph, run: TaskRun, task: int, start_s: float) -> None:
    """A task takes its resources."""
    j, turn = task % len(graph.lasts_s), run.counts[BEGUN]
    run.start_s[task], run.end_s[task] = start_s, start_s + graph.lasts_s[j]
    run.begun[turn] = task
    run.counts[BEGUN] = turn + 1
    _add_event(run, run.end_s[task], turn)
    first, last = graph.use.start[j], graph.use.start[j + 1]
    for x in range(first, last):
        run.free_s[graph.use.values[x]] = start_s + graph.busy_s[x]
        # Those that wait for a link are looked at when it becomes free.
        if x > first and not graph.fifo[j]:
            _add_event(run, start_s + graph.busy_s[x], len(run.begun))


@inlined
def _ready(graph: TaskGraph, run: TaskRun, task: int, now_s: float) -> None:
    """A task waits for nothing more."""
    size = len(graph.lasts_s)
    j = task % size
    first, last = graph.use.start[j], graph.use.start[j + 1]
    if graph.fifo[j]:
        start_s = now_s
        for x in range(first, last):
            start_s = max(start_s, run.free_s[graph.use.values[x]])
        _take(graph, run, task, start_s)
        return
    rank = graph.rank[j] + task - j
    if last == first + 1:
        r = graph.use.values[first]
        _push(run.queue_rank, run.queue_task, run.queue_start[r], run.queue_size[r], rank, task)
        run.queue_size[r] += 1
        _look_at(run, r)
        return
    at = run.counts[WAITING]
    run.counts[WAITING] += 1
    while at > 0:
        other = run.waiting[at - 1]
        if graph.rank[other % size] + other - other % size < rank:
            break
        run.waiting[at] = other
        at -= 1
    run.waiting[at] = task


@inlined
def _less(graph: TaskGraph, run: TaskRun, task: int, now_s: float) -> None:
    """A task waits for one thing less."""
    run.missing[task] -= 1
    if run.missing[task] == 0:
        _ready(graph, run, task, now_s)


@inlined
def _end(graph: TaskGraph, run: TaskRun, task: int, now_s: float) -> None:
    """What follows from the end of a task."""
    size = len(graph.lasts_s)
    j = task % size
    if not graph.fifo[j]:
        _look_at(run, graph.use.values[graph.use.start[j]])
    for x in range(graph.then.start[j], graph.then.start[j + 1]):
        _less(graph, run, task - j + graph.then.values[x], now_s)
    if graph.again[j] >= 0:
        later = task - j + graph.window * size + graph.again[j]
        if later < len(graph.lasts_s) * graph.num_rounds:
            _less(graph, run, later, now_s)


@inlined
def _begin_idle(graph: TaskGraph, run: TaskRun, now_s: float) -> None:
    """PRIORITY: idle resources begin what has the least rank."""
    for k in range(run.counts[LOOKED_AT]):
        r = run.looked_at[k]
        run.is_looked_at[r] = False
        if run.queue_size[r] > 0 and run.free_s[r] <= now_s:
            task = _pop(run.queue_rank, run.queue_task, run.queue_start[r], run.queue_size[r])
            run.queue_size[r] -= 1
            _take(graph, run, task, now_s)
    run.counts[LOOKED_AT] = 0
    left = 0
    for k in range(run.counts[WAITING]):
        task, idle = run.waiting[k], True
        j = task % len(graph.lasts_s)
        for x in range(graph.use.start[j], graph.use.start[j + 1]):
            idle = idle and run.free_s[graph.use.values[x]] <= now_s
        if idle:
            _take(graph, run, task, now_s)
        else:
            run.waiting[left] = task
            left += 1
    run.counts[WAITING] = left


@inner
def _begin(graph: TaskGraph, run: TaskRun, begin_s: float) -> None:
    """Before anything has begun."""
    size, rounds = len(graph.lasts_s), graph.num_rounds
    run.start_s[: size * rounds] = np.inf
    run.end_s[: size * rounds] = np.inf
    run.free_s[:] = begin_s
    run.counts[:] = 0
    run.queue_size[:] = 0
    run.is_looked_at[:] = False
    run.queue_start[:] = 0
    for j in range(size):
        if not graph.fifo[j]:
            run.queue_start[graph.use.values[graph.use.start[j]] + 1] += rounds
    for r in range(graph.num_resources):
        run.queue_start[r + 1] += run.queue_start[r]
    for m in range(rounds):
        run.missing[m * size : (m + 1) * size] = graph.num_before
    for m in range(graph.window, rounds):
        for j in range(size):
            if graph.again[j] >= 0:
                run.missing[m * size + graph.again[j]] += 1
    for task in range(size * rounds):
        if run.missing[task] == 0:
            _ready(graph, run, task, begin_s)


@njit
def simulate(graph: TaskGraph, run: TaskRun, begin_s: float, limit_s: float) -> float:
    """Makes the list schedule of a graph in `run`; when the last task ends, in s, or any time above
    the limit if that is later.

    Args:
        run: for graphs of this size or more.
        begin_s: before which no task starts, in s.
    """
    _begin(graph, run, begin_s)
    now_s = begin_s
    while True:
        _begin_idle(graph, run, now_s)
        if run.counts[EVENTS] == 0:
            return float(now_s)
        now_s = run.event_s[0]
        if now_s > limit_s:
            return float(now_s)
        while run.counts[EVENTS] > 0 and run.event_s[0] <= now_s:
            turn = _pop(run.event_s, run.event, 0, run.counts[EVENTS])
            run.counts[EVENTS] -= 1
            if turn < len(run.begun):
                _end(graph, run, run.begun[turn], now_s)
