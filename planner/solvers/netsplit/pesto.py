"""Pesto: a placement with the least forward makespan, by an integer program.

The program is the forward half of NetSplit's (`netsplit_model.py`, whose symbols these are):

    minimise   F
    subject to (1) sum_p x_gp = 1
               (2) C_i = S_i + sum_p f_ip x_g(i)p;  F >= C_i
               (3), (4) a reader starts when the tensor has come, which takes time between devices
               (6) operators on a device do not overlap
               (7) messages from p to q do not overlap
               (8) memory of p >= what p keeps for training

There is no backward: no time of it, and no gradient on its way. So what is optimal here need not be
for a training step. Three things are not as NetSplit prints Pesto:

- S_i = 0 for operators that none feeds has become S_i >= 0, which (6) needs.
- (6) and (7), without which all operators on one device at once are optimal wherever they fit.
- (8), which it leaves out: what training keeps at the least, see `placing.least_bytes`.

Where there are more than `GROUPS` operators, those that exchange most share a device.

Source: Hafeez et al., Middleware 2021; on more than two devices as in NetSplit, Nanjing 2023.
"""

from dataclasses import replace

import numpy as np

from planner.costs.memory import limit_bytes
from planner.problem import Problem, Result, Status
from planner.solvers.fit import placed
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit.model import Answer, Instance, grouped, instance_of, overflow
from planner.solvers.placement import heft, m_etf, m_topo
from planner.solvers.placement.coplacement import coplaced, kept_bytes
from planner.solvers.placement.list_schedule import NoRoom
from planner.solvers.placement.problem import Placing, latency_s, placing_of, tighter
from planner.solvers.placement.stages import strategy_of
from planner.units import format_bytes

ROUND_SHARES = (0.7, 0.2, 0.1)
"""Of the time, for searches with less memory each time."""

GROUPS = 200
"""Finer than that, the program is hardly better than what it starts from in the time of a plan."""


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if the evaluator finds room for it as well; what it finds none for is tried
    again with that much less memory.
    """
    placing = replace(placing_of(problem), doubled=False)
    space = (
        f"least forward makespan, with memory, of {len(groups_of(placing))} groups of operators;"
        " no backward"
    )
    shortage = None
    for share in ROUND_SHARES:
        answer = place(placing, time_limit_s * share, problem.options.seed)
        if answer.device_of is None:
            # With less memory, what the program says is not said of the problem.
            status = Status.UNKNOWN if shortage else answer.status
            reason = shortage or _reason(problem, placing)
            return Result(status, None, space=space, reason=reason)
        result = placed(problem, answer.device_of, space)
        if result.strategy is not None:
            again = shortage is not None
            return replace(
                result, status=Status.FEASIBLE if again else answer.status,
                bound_s=None if again else answer.bound_s, reproducible=answer.reproducible,
            )  # fmt: skip
        shortage = result.reason
        strategy = strategy_of(problem, answer.device_of)
        placing = tighter(problem, placing, answer.device_of, strategy, kept_bytes(placing))
    return Result(Status.UNKNOWN, None, space=space, reason=shortage)


def place(placing: Placing, time_limit_s: float, seed: int = 0) -> Answer:
    """The device of each operator, and a bound on the forward makespan.

    Args:
        seed: of the engine.
    """
    groups = groups_of(placing)
    whole, forward = instance_of(placing, groups), forward_of(placing)
    instance = replace(
        instance_of(forward, groups),
        alone_bytes=whole.alone_bytes,
        together_bytes=whole.together_bytes,
    )
    return netsplit_cpsat.solve(instance, max(0.0, time_limit_s), _start(whole, forward), seed=seed)


def groups_of(placing: Placing) -> tuple[tuple[int, ...], ...]:
    """The operators that share a device: each by itself where they are few."""
    if placing.num_operators <= GROUPS:
        return tuple((i,) for i in range(placing.num_operators))
    return coplaced(placing, GROUPS)


def forward_of(placing: Placing) -> Placing:
    """The same with a backward that takes no time and sends nothing."""
    tensors = tuple(replace(flow, gradient=False) for flow in placing.tensors)
    return replace(placing, backward_s=np.zeros_like(placing.backward_s), tensors=tensors)


def _start(whole: Instance, forward: Placing) -> tuple[int, ...] | None:
    """The best of some list schedules that keeps groups together and fits, if there is one."""
    by_etf = m_etf.place(whole.placing)
    found = [heft.place(forward), m_topo.place(whole.placing)]
    found += [] if isinstance(by_etf, NoRoom) else [by_etf]
    found += [(p,) * forward.num_operators for p in range(forward.num_devices)]
    fitting = [one for one in (grouped(whole, f) for f in found) if overflow(whole, one) <= 0]
    return min(fitting, key=lambda one: latency_s(forward, one), default=None)


def _reason(problem: Problem, placing: Placing) -> str:
    devices = range(placing.num_devices)
    limit = max(limit_bytes(problem, devices, d) for d in devices)
    return (
        f"no placement was found to fit: training keeps"
        f" {format_bytes(sum(kept_bytes(placing).values()))} on {len(devices)} devices, the limit"
        f" is {format_bytes(limit)} each (reserve {format_bytes(problem.options.reserve_bytes)})"
    )
