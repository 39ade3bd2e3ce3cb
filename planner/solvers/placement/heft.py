"""HEFT: heterogeneous earliest finish time.

A training step is taken as one pass: w_ip is the time of forward and backward of operator i on
device p, c_tpq the time of tensor t from p to q plus, where it has a gradient, of the gradient from
q to p. Transfers do not wait for each other.

    (1) upward rank: rank_i = mean over p of w_ip + max over tensors t that i makes and readers j of
        (mean over p != q of c_tpq + rank_j)                                          `_by_rank`
    (2) operators by falling rank, each on the device where it ends first:
            start = the first gap of the device, after all data are there, that is long enough;
        ties to the first device                                                     `schedule`

HEFT ignores memory: the evaluator checks whether the placement fits.

Source: Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002.
"""

from bisect import insort

import numpy as np

from planner.artefacts.problem import Problem, Result
from planner.solvers.fit import placed
from planner.solvers.placement.problem import (
    ConsumedTensor,
    Placement,
    PlacementProblem,
    placement_problem_of,
)
from planner.support.arrays import Floats

_SPACE = "the earliest finish for each operator"


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if it fits.

    Args:
        time_limit_s: not needed.
    """
    device_of, start_s = schedule(placement_problem_of(problem))
    order = sorted(range(len(start_s)), key=lambda i: (start_s[i], i))
    return placed(problem, device_of, _SPACE, order)


def place(problem: PlacementProblem) -> Placement:
    """The device of each operator."""
    return schedule(problem)[0]


def schedule(problem: PlacementProblem) -> tuple[Placement, tuple[float, ...]]:
    """The device and the start, in s, of each operator."""
    time_s = problem.forward_s + problem.backward_s
    inputs: list[list[tuple[int, Floats]]] = [[] for _ in time_s]
    for tensor in problem.tensors:
        for j in tensor.consumers:
            inputs[j].append((tensor.producer, _ways_s(problem, tensor)))
    device_of, start_s, end_s = [0] * len(time_s), [0.0] * len(time_s), [0.0] * len(time_s)
    busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_devices)]
    for i in _by_rank(problem, time_s):
        ready_s = np.zeros(problem.num_devices)
        for j, way_s in inputs[i]:
            ready_s = np.maximum(ready_s, end_s[j] + way_s[device_of[j]])
        lasts_s = time_s[i].tolist()
        starts = [_gap(busy[p], float(ready_s[p]), lasts) for p, lasts in enumerate(lasts_s)]
        ends = [start + lasts for start, lasts in zip(starts, lasts_s, strict=True)]
        p = ends.index(min(ends))
        device_of[i], start_s[i], end_s[i] = p, starts[p], ends[p]
        insort(busy[p], (starts[p], ends[p]))
    return tuple(device_of), tuple(start_s)


def _ways_s(problem: PlacementProblem, tensor: ConsumedTensor) -> Floats:
    """(D, D) c: time of a tensor from p to q plus that of its gradient back, in s."""
    there = problem.latency_s + tensor.bytes * problem.seconds_per_byte
    return there + there.T if tensor.gradient else there


def _by_rank(problem: PlacementProblem, time_s: Floats) -> list[int]:
    """The operators by falling upward rank."""
    pairs = max(1, problem.num_devices * (problem.num_devices - 1))
    made: list[list[ConsumedTensor]] = [[] for _ in time_s]
    for tensor in problem.tensors:
        made[tensor.producer].append(tensor)
    rank = [float(mean) for mean in time_s.mean(axis=1)]
    for i in reversed(range(len(rank))):
        rank[i] += max(
            (
                float(_ways_s(problem, tensor).sum()) / pairs
                + max(rank[j] for j in tensor.consumers)
                for tensor in made[i]
            ),
            default=0.0,
        )
    # Nine digits, so that the order of summation cannot decide.
    return sorted(range(len(rank)), key=lambda i: (-float(f"{rank[i]:.9e}"), i))


def _gap(busy: list[tuple[float, float]], ready_s: float, lasts_s: float) -> float:
    """The start of the first gap from `ready_s` on that is long enough.

    Args:
        busy: (start, end) of the operators of a device, ascending.
    """
    start_s = ready_s
    for begin, end in busy:
        if start_s + lasts_s <= begin:
            break
        start_s = max(start_s, end)
    return start_s
