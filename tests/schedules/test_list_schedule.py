"""List schedules of tasks (`schedules/list_schedule.py`, `schedules/task_list.py`)."""

from random import Random

import numpy as np
import pytest

from planner.schedules.list_schedule import BEGUN, TaskGraph, run_of, simulate
from planner.schedules.task_list import TaskList
from planner.support.arrays import csr


def starts(tasks, urgency=lambda _: 0, begin_s=0.0):
    return tasks.times(urgency, begin_s).start_s.tolist()


def test_an_idle_resource_takes_what_is_most_urgent_of_what_is_ready():
    tasks = TaskList()
    first, low, high = tasks.add(2.0, "a"), tasks.add(1.0, "a"), tasks.add(1.0, "a")
    delay = tasks.add(2.0)
    tasks.chain(delay, high)  # ready at 2, as the first one ends
    urgency = {first: 0, low: 2, high: 1}
    assert starts(tasks, urgency.get) == [0.0, 3.0, 2.0, 0.0]
    assert starts(tasks, urgency.get, begin_s=5.0) == [5.0, 8.0, 7.0, 5.0]
    assert tasks.times(urgency.get).begun.tolist() == [delay, first, high, low]


def test_in_turn_a_task_waits_for_those_that_were_ready_before():
    #   channels  a: 0 2    b: 1     both over link l, which each keeps for 1 of 3 s
    tasks = TaskList()
    sent = [tasks.add(3.0, name, [("l", 1.0)], fifo=True) for name in "aba"]
    assert starts(tasks) == [0.0, 1.0, 3.0]
    late = tasks.add(0.5)
    tasks.chain(late, sent[0])  # ready last now
    assert starts(tasks) == [4.0, 0.0, 1.0, 0.0]
    assert tasks.times().makespan_s == 7.0


def test_a_task_of_several_resources_lets_others_pass_until_all_are_idle():
    tasks = TaskList()
    both, a, a_later, b = (
        tasks.add(1.0, "a", [("l", 1.0)]),
        tasks.add(2.0, "a", [("k", 2.0)]),
        tasks.add(2.0, "a", [("k", 2.0)]),
        tasks.add(5.0, "b", [("l", 3.0)]),
    )
    c = tasks.add(1.0, "c", [("l", 1.0)])
    urgency = {b: 0, both: 1, a: 2, a_later: 3, c: 4}
    # The link is free at 3, before the end of b and in the middle of the second task of a.
    assert starts(tasks, urgency.get) == [4.0, 0.0, 2.0, 0.0, 3.0]


def test_resources_that_are_idle_at_one_moment_begin_in_the_order_of_their_names():
    tasks = TaskList()
    first, second = tasks.add(1.0), tasks.add(1.0)
    on_b, on_a = tasks.add(2.0, "b"), tasks.add(2.0, "a")
    tasks.chain(first, on_b)
    tasks.chain(second, on_a)
    sent = [tasks.add(1.0, "way", fifo=True) for _ in range(2)]
    tasks.chain(on_b, sent[0])
    tasks.chain(on_a, sent[1])
    made = tasks.times()
    assert made.begun.tolist() == [first, second, on_a, on_b, *reversed(sent)]
    assert made.start_s[sent].tolist() == [4.0, 3.0]


def test_tasks_that_wait_for_each_other_never_start():
    tasks = TaskList()
    alone, one, two = (tasks.add(1.0, "a") for _ in range(3))
    tasks.chain(one, two, one)
    made = tasks.times()
    assert made.start_s.tolist() == [0.0, np.inf, np.inf]
    assert (made.begun.tolist(), made.makespan_s) == ([alone], 1.0)


def test_the_longest_path_counts_the_task_itself():
    tasks = TaskList()
    a, b, c, d = (tasks.add(float(time_s)) for time_s in (1, 2, 4, 8))
    tasks.chain(a, b, d)
    tasks.chain(a, c)
    assert tasks.longest_s() == [11.0, 10.0, 4.0, 8.0]
    assert c == 2


@pytest.mark.parametrize("seed", range(40))
def test_rounds_are_tasks_one_after_the_other(seed):
    """A graph that repeats, and the same one written out."""
    draw = Random(seed)
    size, rounds, window = draw.randint(1, 7), draw.randint(1, 5), draw.randint(1, 3)
    own = [draw.randrange(3) for _ in range(size)]  # resource 3 is a channel in turn
    fifo = [draw.random() < 0.3 for _ in range(size)]
    use = [[3] if there else [r] for r, there in zip(own, fifo, strict=True)]
    lasts = [float(draw.randint(0, 4)) for _ in range(size)]
    then = [[j for j in range(i + 1, size) if draw.random() < 0.4] for i in range(size)]
    again = [draw.randrange(size) if draw.random() < 0.5 else -1 for _ in range(size)]
    rank = draw.sample(range(2 * size), size)

    def graph(lasts, use, then, before, rank, fifo, again, **repeated):
        return TaskGraph(
            np.array(lasts), csr(use), np.array(lasts), csr(then), np.array(before),
            np.array(rank), np.array(fifo), np.array(again), 4, **repeated,
        )  # fmt: skip

    before = [sum(j in row for row in then) for j in range(size)]
    some = graph(lasts, use, then, before, rank, fifo, again, num_rounds=rounds, window=window)
    rows, counts = [], before * rounds
    for m in range(rounds):
        for i in range(size):
            rows.append([m * size + j for j in then[i]])
            if again[i] >= 0 and m + window < rounds:
                rows[-1].append((m + window) * size + again[i])
                counts[rows[-1][-1]] += 1
    ranks = [m * size + r for m in range(rounds) for r in rank]
    plain = graph(
        lasts * rounds, use * rounds, rows, counts, ranks, fifo * rounds, [-1] * size * rounds
    )
    runs = [run_of(size * rounds, 4, size * rounds) for _ in range(2)]
    ends = [simulate(*both, 0.0, np.inf) for both in zip((some, plain), runs, strict=True)]
    assert ends[0] == ends[1]
    assert all(run.counts[BEGUN] == size * rounds for run in runs)
    for name in ("start_s", "end_s", "begun"):
        assert np.array_equal(getattr(runs[0], name), getattr(runs[1], name)), name
    # Arrays of a larger graph serve as well, and a limit ends the run.
    larger = run_of(size * rounds + 5, 9, size * rounds + 5)
    assert simulate(some, larger, 0.0, np.inf) == ends[0]
    assert np.array_equal(larger.start_s[: size * rounds], runs[0].start_s)
    assert simulate(some, larger, 0.0, ends[0] / 2) <= ends[0]
