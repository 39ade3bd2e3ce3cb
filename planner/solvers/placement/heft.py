"""HEFT: heterogeneous earliest finish time.

A training step is taken as one pass: w_ip is the time of forward and backward of operator i on
device p, c_tpq that of tensor t from p to q and, where it has a gradient, of the gradient's way
back. Transfers do not wait for each other.

    (1) upward rank: rank_i = mean over p of w_ip + max over tensors t that i makes and readers j of
        (mean over p != q of c_tpq + rank_j)                                          `_by_rank`
    (2) operators by falling rank, each on the device where it ends first:
            start = the first gap of the device, after all data are there, that is long enough;
        ties to the first device                                                     `schedule`

Memory plays no part in it: whether the placement fits is for the evaluator to say.

Source: Topcuoglu, Hariri and Wu, IEEE TPDS 13(3), 2002.
"""

from bisect import insort

import numpy as np

from planner.problem import Problem, Result
from planner.solvers.fit import placed
from planner.solvers.placement.problem import Flow, Placing, placing_of
from planner.support.arrays import Floats

_SPACE = "the earliest finish for each operator"


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if it fits.

    Args:
        time_limit_s: not needed.
    """
    device_of, start_s = schedule(placing_of(problem))
    order = sorted(range(len(start_s)), key=lambda i: (start_s[i], i))
    return placed(problem, device_of, _SPACE, order)


def place(placing: Placing) -> tuple[int, ...]:
    """The device of each operator."""
    return schedule(placing)[0]


def schedule(placing: Placing) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The device and the start, in s, of each operator."""
    time_s = placing.forward_s + placing.backward_s
    inputs: list[list[tuple[int, Floats]]] = [[] for _ in time_s]
    for flow in placing.tensors:
        for j in flow.consumers:
            inputs[j].append((flow.producer, _ways_s(placing, flow)))
    device_of, start_s, end_s = ([0] * len(time_s), [0.0] * len(time_s), [0.0] * len(time_s))
    busy: list[list[tuple[float, float]]] = [[] for _ in range(placing.num_devices)]
    for i in _by_rank(placing, time_s):
        ready_s = np.zeros(placing.num_devices)
        for j, way_s in inputs[i]:
            ready_s = np.maximum(ready_s, end_s[j] + way_s[device_of[j]])
        starts = [_gap(busy[p], float(ready_s[p]), float(lasts)) for p, lasts in
                  enumerate(time_s[i])]  # fmt: skip
        ends = [start + float(lasts) for start, lasts in zip(starts, time_s[i], strict=True)]
        p = ends.index(min(ends))
        device_of[i], start_s[i], end_s[i] = p, starts[p], ends[p]
        insort(busy[p], (starts[p], ends[p]))
    return tuple(device_of), tuple(start_s)


def _ways_s(placing: Placing, flow: Flow) -> Floats:
    """(D, D) time of a tensor from p to q, and of its gradient back, in s."""
    there = placing.latency_s + flow.bytes * placing.seconds_per_byte
    return there + there.T if flow.gradient else there


def _by_rank(placing: Placing, time_s: Floats) -> list[int]:
    """The operators by falling upward rank."""
    pairs = max(1, placing.num_devices * (placing.num_devices - 1))
    made: list[list[Flow]] = [[] for _ in time_s]
    for flow in placing.tensors:
        made[flow.producer].append(flow)
    rank = [float(mean) for mean in time_s.mean(axis=1)]
    for i in reversed(range(len(rank))):
        rank[i] += max(
            (
                float(_ways_s(placing, flow).sum()) / pairs + max(rank[j] for j in flow.consumers)
                for flow in made[i]
            ),
            default=0.0,
        )
    # Nine digits, so that the order of summation cannot decide.
    return sorted(range(len(rank)), key=lambda i: (-float(f"{rank[i]:.9e}"), i))


def _gap(busy: list[tuple[float, float]], ready_s: float, lasts_s: float) -> float:
    """The start of the first gap from `ready_s` on that is long enough.

    Args:
        busy: (start, end) of what a device runs, ascending.
    """
    start_s = ready_s
    for begin, end in busy:
        if start_s + lasts_s <= begin:
            break
        start_s = max(start_s, end)
    return start_s
