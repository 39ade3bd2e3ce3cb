"""NetSplit's second objective: the smallest bottleneck under the planner's own cost model, as
`bottleneck_model.py` has it. Items are groups of operators that share a device (`coplacement`), or
single operators.

As in the closed form (`costs/closed_form.py`), transfers overlap with the computation, and each
direction between two devices is a line of its own: w are the seconds of both passes, c is 0, m
those of a message, whose gradient takes the line back. What a device keeps is `netsplit_model`'s
(8).
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.solvers.bottleneck import search as bottleneck
from planner.solvers.bottleneck.model import Bottleneck, Net, works_s
from planner.solvers.engines.engine import Engine
from planner.solvers.netsplit.model import Answer, Instance, grouped
from planner.solvers.placement.problem import Placing


def bottleneck_s(placing: Placing, device_of: Sequence[int]) -> float:
    """The bottleneck of a placement, in s.

    Args:
        device_of: device of each operator.
    """
    return float(works_s(_problem_of(placing, range(placing.num_operators)), device_of).max())


def solve(
    instance: Instance,
    time_limit_s: float,
    start: Sequence[int] | None,
    order: Sequence[int] | None = None,
    seed: int = 0,
    engine: Engine | None = None,
) -> Answer:
    """The best placement that is found; `latency_s` of the answer is its bottleneck.

    Args:
        time_limit_s: of the wall clock; the limits that are meant are counted.
        start: a placement that fits, to start from; None if none is known.
        order: of the devices, for contiguous stages; None allows any placement.
        engine: gurobi, or else HiGHS.
    """
    problem = bottleneck_of(instance, order)
    starts = []
    if start is not None:
        whole = grouped(instance, start)
        starts.append([whole[group[0]] for group in instance.groups])
    found = bottleneck.solve(problem, starts, time_limit_s, seed, engine)
    bound_s = found.bound_s if math.isfinite(found.bound_s) else None
    if found.on is None:
        return Answer(found.status, None, math.inf, bound_s, found.reproducible, found.note)
    device_of = tuple(found.on[g] for g in instance.group_of)
    value_s = float(works_s(problem, found.on).max())
    return Answer(found.status, device_of, value_s, bound_s, found.reproducible, found.note)


def bottleneck_of(instance: Instance, order: Sequence[int] | None = None) -> Bottleneck:
    """The problem of an instance; order as `solve`."""
    problem = _problem_of(instance.placing, instance.group_of)
    alone = (((g,), size) for g, size in enumerate(instance.alone_bytes) if size)
    kept = [*alone, *sorted(instance.together_bytes.items())]
    return Bottleneck(
        work_s=problem.work_s,
        nets=problem.nets,
        pays=problem.pays,
        latency_s=problem.latency_s,
        seconds_per_byte=problem.seconds_per_byte,
        kept=tuple((groups, float(size)) for groups, size in kept),
        room_bytes=instance.placing.capacity_bytes.astype(np.float64),
        alike=instance.alike,
        order=None if order is None else tuple(order),
    )


def _problem_of(placing: Placing, group_of: Sequence[int]) -> Bottleneck:
    """The problem without memory and order."""
    num = placing.num_devices
    work = np.zeros((max(group_of, default=-1) + 1, num))
    np.add.at(work, list(group_of), placing.forward_s + placing.backward_s)
    nets = []
    for flow in placing.tensors:
        home = group_of[flow.producer]
        readers = tuple(sorted({group_of[j] for j in flow.consumers} - {home}))
        if readers:
            nets.append(Net(home, readers, bytes=flow.bytes, gradient=flow.gradient))
    return Bottleneck(
        work_s=work,
        nets=tuple(nets),
        pays=(False,) * num,
        latency_s=placing.latency_s,
        seconds_per_byte=placing.seconds_per_byte,
        kept=(),
        room_bytes=np.full(num, np.inf),
        alike=(),
    )
