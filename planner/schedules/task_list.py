"""Tasks while they are listed, and when a list schedule runs them. `list_schedule.py` says the
rules; it is compiled, so it is imported when tasks are timed.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from planner.support.arrays import Floats, Ints, csr


class TaskTimes(NamedTuple):
    """A list schedule.

    Attributes:
        start_s: of each task; inf if it never starts, as tasks wait for each other in a circle.
        end_s: likewise.
        begun: the tasks that start, in the order in which they took their resources.
    """

    start_s: Floats
    end_s: Floats
    begun: Ints

    @property
    def makespan_s(self) -> float:
        """When the last task ends, of those that start."""
        return float(self.end_s[self.begun].max(initial=0.0))


@dataclass(slots=True)
class TaskList:
    """The tasks of one round while they are listed.

    Attributes:
        lasts_s: duration of each, in s.
        use: its resources, by any names that can be sorted, and for how long each is busy, in s.
        fifo: whether it follows the rule FIFO.
        then: those that wait for it.
        num_before: the number of those that it waits for.
    """

    lasts_s: list[float] = field(default_factory=list)
    use: list[tuple[tuple[Any, float], ...]] = field(default_factory=list)
    fifo: list[bool] = field(default_factory=list)
    then: list[list[int]] = field(default_factory=list)
    num_before: list[int] = field(default_factory=list)

    def add(
        self,
        lasts_s: float,
        own: Hashable = None,
        links: Iterable[tuple[Any, float]] = (),
        *,
        fifo: bool = False,
    ) -> int:
        """Lists a task; its number.

        Args:
            own: its own resource, None for a delay.
            links: further resources, and for how long it occupies each, in s.
        """
        self.lasts_s.append(lasts_s)
        self.use.append(() if own is None else ((own, lasts_s), *links))
        self.fifo.append(fifo or own is None)
        self.then.append([])
        self.num_before.append(0)
        return len(self.lasts_s) - 1

    def chain(self, *tasks: int) -> None:
        """Lets each of some tasks wait for the one before it."""
        for earlier, later in pairwise(tasks):
            self.then[earlier].append(later)
            self.num_before[later] += 1

    def longest_s(self) -> list[float]:
        """Per task, the longest path to the end, with the task itself, in s."""
        missing = list(self.num_before)
        sequence = [i for i, number in enumerate(missing) if number == 0]
        for i in sequence:  # topological: it grows while it is walked
            for j in self.then[i]:
                missing[j] -= 1
                if missing[j] == 0:
                    sequence.append(j)
        longest_s = [0.0] * len(self.lasts_s)
        for i in reversed(sequence):
            longest_s[i] = self.lasts_s[i] + max((longest_s[j] for j in self.then[i]), default=0.0)
        return longest_s

    def times(self, urgency: Callable[[int], Any] = lambda _: 0, begin_s: float = 0.0) -> TaskTimes:
        """The list schedule of the tasks.

        Args:
            urgency: of a task with the rule PRIORITY: the least goes first, of equals the one that
                was listed first.
            begin_s: before which no task starts, in s.
        """
        from planner.schedules.list_schedule import BEGUN, TaskGraph, run_of, simulate

        # Resources are looked at in the order of their names.
        names = sorted({name for row in self.use for name, _ in row})
        number = {name: r for r, name in enumerate(names)}
        size = len(self.lasts_s)
        by_rank = sorted((i for i in range(size) if not self.fifo[i]), key=urgency)
        rank = np.zeros(size, np.int64)
        rank[by_rank] = np.arange(len(by_rank))
        graph = TaskGraph(
            lasts_s=np.array(self.lasts_s, dtype=np.float64),
            use=csr([number[name] for name, _ in row] for row in self.use),
            busy_s=np.array([busy_s for row in self.use for _, busy_s in row], dtype=np.float64),
            then=csr(self.then),
            num_before=np.array(self.num_before, dtype=np.int64),
            rank=rank,
            fifo=np.array(self.fifo, dtype=np.bool_),
            again=np.full(size, -1),
            num_resources=len(names),
        )
        run = run_of(size, len(names), len(graph.busy_s))
        simulate(graph, run, begin_s, np.inf)
        return TaskTimes(run.start_s, run.end_s, run.begun[: run.counts[BEGUN]])
