"""NetSplit's second objective: the smallest bottleneck under the planner's own cost model, in the
form of `solvers/bottleneck/model.py`. Items are groups of operators that share a device
(`solvers/placement/coplacement.py`), or single operators.

As in the closed form (`costs/closed_form.py`), transfers overlap with the computation, and each
direction between two devices is a line of its own: w is the time of both passes, c is 0, m the time
of a transfer; a gradient takes the line back. Memory is (8) of `model.py`.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.solvers.bottleneck import search as bottleneck
from planner.solvers.bottleneck.model import BottleneckNet, BottleneckProblem, works_s
from planner.solvers.engines.engine import Engine
from planner.solvers.netsplit.model import EngineAnswer, NetSplitInstance, grouped
from planner.solvers.placement.problem import PlacementProblem
from planner.support.brake import Brake


def bottleneck_s(problem: PlacementProblem, device_of: Sequence[int]) -> float:
    """The bottleneck of a placement, in s.

    Args:
        device_of: device of each operator.
    """
    return float(works_s(_problem_of(problem, range(problem.num_operators)), device_of).max())


def solve(
    instance: NetSplitInstance,
    time_limit_s: float,
    start: Sequence[int] | None,
    order: Sequence[int] | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    brake: Brake | None = None,
) -> EngineAnswer:
    """The best placement found; `latency_s` of the answer is its bottleneck.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
        start: a placement that fits, to start from; None if none is known.
        order: order of the devices, for contiguous stages; None allows any placement.
        engine: gurobi, or else HiGHS.
        brake: of the search that this is a part of.
    """
    problem = bottleneck_of(instance, order)
    starts = []
    if start is not None:
        whole = grouped(instance, start)
        starts.append([whole[group[0]] for group in instance.groups])
    answer = bottleneck.solve(problem, starts, time_limit_s, seed=seed, engine=engine, brake=brake)
    bound_s = answer.bound_s if math.isfinite(answer.bound_s) else None
    if answer.on is None:
        return EngineAnswer(
            answer.status, None, math.inf, bound_s, answer.reproducible, answer.note
        )
    device_of = tuple(answer.on[g] for g in instance.group_of)
    value_s = float(works_s(problem, answer.on).max())
    return EngineAnswer(
        answer.status, device_of, value_s, bound_s, answer.reproducible, answer.note
    )


def bottleneck_of(
    instance: NetSplitInstance, order: Sequence[int] | None = None
) -> BottleneckProblem:
    """The problem of an instance; order as `solve`."""
    problem = _problem_of(instance.problem, instance.group_of)
    return BottleneckProblem(
        work_s=problem.work_s,
        nets=problem.nets,
        pays=problem.pays,
        latency_s=problem.latency_s,
        seconds_per_byte=problem.seconds_per_byte,
        kept=tuple((groups, float(size)) for groups, size in instance.kept if size),
        room_bytes=instance.problem.capacity_bytes.astype(np.float64),
        alike=instance.alike,
        order=None if order is None else tuple(order),
    )


def _problem_of(problem: PlacementProblem, group_of: Sequence[int]) -> BottleneckProblem:
    """The problem without memory and order."""
    num = problem.num_devices
    work = np.zeros((max(group_of, default=-1) + 1, num))
    np.add.at(work, list(group_of), problem.forward_s + problem.backward_s)
    nets = []
    for tensor in problem.tensors:
        home = group_of[tensor.producer]
        readers = tuple(sorted({group_of[j] for j in tensor.consumers} - {home}))
        if readers:
            nets.append(BottleneckNet(home, readers, bytes=tensor.bytes, gradient=tensor.gradient))
    return BottleneckProblem(
        work_s=work,
        nets=tuple(nets),
        pays=(False,) * num,
        latency_s=problem.latency_s,
        seconds_per_byte=problem.seconds_per_byte,
        kept=(),
        room_bytes=np.full(num, np.inf),
        alike=(),
    )
