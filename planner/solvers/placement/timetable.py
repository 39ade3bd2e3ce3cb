"""How one microbatch runs through a placement: a list schedule of its forwards, then of its
backwards.

    (1) a device runs one operator at a time; an ordered pair of devices has a channel, for one
        transfer at a time; a transfer also waits for the shared links of its route, and occupies
        each as `links.py` says
    (2) a tensor goes once to each other device that reads it; such a device sends one gradient
        back, when all of its readers there have run backward
    (3) the first backward starts when the last forward has ended
    (4) of the jobs that are ready and find all that they need idle, the one of the highest rank
        starts

Devices, channels and links are the resources of jobs: (p, p) is device p, (p, q) the channel from p
to q, (LINK, l) shared link l.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from planner.schedules.task_list import TaskList, TaskTimes
from planner.solvers.placement.links import Pair
from planner.solvers.placement.problem import (
    PlacementProblem,
    busy_s,
    links_of_pairs,
    transfer_s,
)

LINK = -1
"""In place of a device: the resource is a shared link."""


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """The transfer of a tensor, or of its gradient.

    Attributes:
        tensor: index into `PlacementProblem.tensors`.
        backward: whether it is the gradient.
        source: device that sends; target: device that receives.
        start_s: when it leaves; end_s: when it has arrived.
    """

    tensor: int
    backward: bool
    source: int
    target: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timetable:
    """The starts of all operators and transfers of one microbatch.

    Attributes:
        forward_start_s: per operator, of its forward; backward_start_s: of its backward.
        transfers: those of forwards first.
        latency_s: when the last backward ends.
    """

    forward_start_s: tuple[float, ...]
    backward_start_s: tuple[float, ...]
    transfers: tuple[TimedTransfer, ...]
    latency_s: float


def latency_s(
    problem: PlacementProblem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> float:
    """Time of one microbatch, forward and backward, under `timetable`, in s."""
    return timetable(problem, device_of, order).latency_s


def timetable(
    problem: PlacementProblem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> Timetable:
    """The list schedule of a placement.

    Args:
        device_of: device of each operator.
        order: operators by falling rank in the forwards, by rising rank in the backwards. Without
            it, the rank is the longest path to the end of the phase.
    """
    there, sent = _phase(problem, device_of, order, backward=False, begin_s=0.0)
    back_order = None if order is None else order[::-1]
    back, returned = _phase(problem, device_of, back_order, backward=True, begin_s=there.makespan_s)
    num = problem.num_operators
    return Timetable(
        forward_start_s=tuple(there.start_s[:num].tolist()),
        backward_start_s=tuple(back.start_s[:num].tolist()),
        transfers=(
            *_timed(sent, there, num, backward=False), *_timed(returned, back, num, backward=True)
        ),
        latency_s=back.makespan_s,
    )  # fmt: skip


_Transfers = list[tuple[int, int, int]]
"""Transfers of a phase, behind its operators: the tensor, from which device, and to which one."""


def _phase(
    problem: PlacementProblem,
    device_of: Sequence[int],
    order: Sequence[int] | None,
    *,
    backward: bool,
    begin_s: float,
) -> tuple[TaskTimes, _Transfers]:
    """All forwards, or all backwards, of a microbatch: N operators, then the transfers."""
    times, tasks = problem.backward_s if backward else problem.forward_s, TaskList()
    sent: _Transfers = []
    for i, p in enumerate(device_of):
        tasks.add(float(times[i, p]), (p, p))
    for t, tensor in enumerate(problem.tensors):
        if tensor.gradient or not backward:
            sent += _connect(problem, tasks, device_of, t, backward=backward)
    return tasks.times(_urgency(tasks, order).__getitem__, begin_s), sent


def _connect(
    problem: PlacementProblem, tasks: TaskList, device_of: Sequence[int], t: int, *, backward: bool
) -> _Transfers:
    """Lets the readers of a tensor wait for it, or its producer for its gradients: (2)."""
    tensor, readers, sent = problem.tensors[t], dict[int, list[int]](), []
    home = device_of[tensor.producer]
    for j in tensor.consumers:
        readers.setdefault(device_of[j], []).append(j)
    for q, there in readers.items():
        first, last = (there, [tensor.producer]) if backward else ([tensor.producer], there)
        if q != home:
            way = (q, home) if backward else (home, q)
            transfer = _transfer(problem, tasks, t, way)
            sent.append((t, *way))
            for i in first:
                tasks.chain(i, transfer)
            first = [transfer]
        for i, j in product(first, last):
            tasks.chain(i, j)
    return sent


def _transfer(problem: PlacementProblem, tasks: TaskList, t: int, way: Pair) -> int:
    """Lists the transfer of a tensor, or of its gradient."""
    size = problem.tensors[t].bytes
    links = (
        ((LINK, link), busy_s(problem, problem.shared[link], size, *way))
        for link in links_of_pairs(problem).get(way, ())
    )
    return tasks.add(transfer_s(problem, size, *way), way, links)


def _urgency(tasks: TaskList, order: Sequence[int] | None) -> list[float]:
    """The more urgent a task, the lower: operators by their longest path to the end, or by a given
    order; a transfer is as urgent as its most urgent reader.
    """
    if order is None:
        return [-longest_s for longest_s in tasks.longest_s()]
    turn = {i: float(k) for k, i in enumerate(order)}
    return [
        turn[i] if i in turn else min(turn[j] for j in then) for i, then in enumerate(tasks.then)
    ]


def _timed(
    sent: _Transfers, times: TaskTimes, num: int, *, backward: bool
) -> Iterator[TimedTransfer]:
    starts, ends = times.start_s[num:].tolist(), times.end_s[num:].tolist()
    for (t, p, q), start_s, end_s in zip(sent, starts, ends, strict=True):
        yield TimedTransfer(t, backward, p, q, start_s, end_s)
