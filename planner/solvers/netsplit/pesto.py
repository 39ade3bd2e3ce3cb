"""Pesto: a placement with the least forward makespan, by an integer program.

The program is the forward half of NetSplit's (`model.py`, whose symbols these are):

    minimise   F
    subject to (1) sum_p x_gp = 1
               (2) C_i = S_i + sum_p f_ip x_g(i)p;  F >= C_i
               (3), (4) a reader starts when the tensor has arrived from the other device
               (6) operators on a device do not overlap
               (7) transfers from p to q do not overlap
               (8) memory of p >= the bytes that p keeps for training

There is no backward: it takes no time, and no gradient is sent. So an optimum here need not be one
of a training step. Three things are not as NetSplit prints Pesto:

- S_i = 0 for operators that nothing feeds has become S_i >= 0, which (6) needs.
- (6) and (7) are added: without them, all operators on one device at once are optimal wherever they
  fit.
- (8) is added: the minimum that training keeps, `least_bytes`.

With more than `GROUPS` operators, those that exchange most share a device.

`--pesto-printed` is the program as NetSplit prints it, (6-2) to (6-7) there: no (6), (7) and (8),
with the edges of NetSplit's published model:

    minimise   F
    subject to (6-2), (6-4) F >= C_i = S_i + sum_p f_ip x_ip
               (6-3) S_i = 0 where none feeds i
               (6-5) sum_p x_ip = 1
               (6-6), (6-7) S_j >= C_i + M_ij for each edge

Its placement is a plan even where it does not fit by the planner's count.

Source: Hafeez et al., Middleware 2021; on more than two devices as in NetSplit, Nanjing 2023.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.artefacts.problem import Problem, Result, switches_of
from planner.costs.stage_memory import limit_bytes
from planner.solvers.fit import placed
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit.less_memory import Round, Unfit, in_less_memory
from planner.solvers.netsplit.model import (
    EngineAnswer,
    NetSplitInstance,
    grouped,
    instance_of,
    overflow,
    relaxed_times,
)
from planner.solvers.netsplit.options import Pesto
from planner.solvers.placement import heft
from planner.solvers.placement.baechi import place_m_topo
from planner.solvers.placement.baechi_schedule import NoRoom, earliest, list_schedule
from planner.solvers.placement.coplacement import coplaced, kept_bytes
from planner.solvers.placement.problem import (
    Placement,
    PlacementProblem,
    placement_problem_of,
)
from planner.solvers.placement.stages import strategies_of, strategy_of
from planner.solvers.placement.timetable import latency_s
from planner.support.brake import Brake
from planner.support.units import format_bytes

ROUND_SHARES = (0.7, 0.2, 0.1)
"""Shares of the time for searches with less memory each time."""

GROUPS = 200
"""With more groups, the program hardly improves on its start in the time of a plan."""


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The placement, if the evaluator finds room for it as well; otherwise the search is repeated
    with less memory.

    Args:
        time_limit_s: limit of all searches together.
    """
    if switches_of(problem.search, Pesto).pesto_printed:
        return _as_printed(problem, time_limit_s)
    placement_problem = replace(placement_problem_of(problem), published_memory=False)
    num_groups = len(groups_of(placement_problem))
    space = f"least forward makespan, with memory, of {num_groups} groups of operators; no backward"

    def search(model: PlacementProblem, share: float) -> Round:
        answer = place(model, time_limit_s * share, problem.search.seed)
        if answer.device_of is None:
            reason = _reason(problem, model)
            none = Result(answer.status, None, space=space, reason=reason, short_of_memory=True)
            return Round(none)
        result = placed(problem, answer.device_of, space)
        if result.strategy is None:
            strategy = strategy_of(problem, answer.device_of)
            return Round(result, Unfit(answer.device_of, strategy, result.reason or ""))
        return Round(replace(
            result, status=answer.status, bound_s=answer.bound_s, reproducible=answer.reproducible
        ))  # fmt: skip

    return in_less_memory(problem, placement_problem, ROUND_SHARES, search)


def place(
    problem: PlacementProblem, time_limit_s: float, seed: int = 0, brake: Brake | None = None
) -> EngineAnswer:
    """The device of each operator, and a bound on the forward makespan.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
        seed: seed of the engine.
        brake: of the search that this is a part of; None where it is the whole.
    """
    groups = groups_of(problem)
    whole, forward = instance_of(problem, groups), forward_of(problem)
    instance = replace(
        instance_of(forward, groups),
        alone_bytes=whole.alone_bytes,
        together_bytes=whole.together_bytes,
    )
    start, limit_s = _start(whole, forward), max(0.0, time_limit_s)
    return netsplit_cpsat.solve(instance, limit_s, start, seed=seed, brake=brake)


def _as_printed(problem: Problem, time_limit_s: float) -> Result:
    """The placement of the printed program, whether it fits or not."""
    placement_problem = placement_problem_of(problem)
    answer = place_as_printed(placement_problem, time_limit_s, problem.search.seed)
    num_groups = len(groups_of(placement_problem))
    space = f"least forward makespan of {num_groups} groups of operators, as printed in NetSplit"
    if answer.device_of is None:
        return Result(answer.status, None, space=space, reason="the time limit was reached")
    strategies = strategies_of(problem, answer.device_of, answer.order)
    return Result(
        answer.status, strategies[0], bound_s=answer.bound_s, space=space,
        reproducible=answer.reproducible, others=strategies[1:], unfit=True,
    )  # fmt: skip


def place_as_printed(problem: PlacementProblem, time_limit_s: float, seed: int = 0) -> EngineAnswer:
    """The device of each operator by (6-2) to (6-7), and a bound on the forward makespan; arguments
    as of `place`.
    """
    groups = groups_of(problem)
    roomy = replace(forward_of(problem), capacity_bytes=problem.capacity_bytes.clip(0))
    instance = replace(
        instance_of(roomy, groups, relaxed=True),
        forward_only=True,
        alone_bytes=(0,) * len(groups),
        together_bytes={},
    )
    alone = [(p,) * problem.num_operators for p in range(problem.num_devices)]
    starts = [grouped(instance, heft.place(roomy)), *alone]
    start = min(starts, key=lambda device_of: max(_ends(instance, device_of)))
    return netsplit_cpsat.solve(instance, max(0.0, time_limit_s), start, seed=seed)


def _ends(instance: NetSplitInstance, device_of: Placement) -> Iterator[int]:
    """C of each operator, in ticks."""
    starts, _ = relaxed_times(instance, device_of)
    return (t + int(instance.forward[i, device_of[i]]) for i, t in enumerate(starts))


def groups_of(problem: PlacementProblem) -> tuple[tuple[int, ...], ...]:
    """The operators that share a device; each by itself if there are few."""
    if problem.num_operators <= GROUPS:
        return tuple((i,) for i in range(problem.num_operators))
    return coplaced(problem, GROUPS)


def forward_of(problem: PlacementProblem) -> PlacementProblem:
    """The same with a backward that takes no time and sends nothing."""
    tensors = tuple(replace(tensor, gradient=False) for tensor in problem.tensors)
    return replace(problem, backward_s=np.zeros_like(problem.backward_s), tensors=tensors)


def _start(whole: NetSplitInstance, forward: PlacementProblem) -> Placement | None:
    """The best list schedule, or single device, that keeps groups together and fits, if any."""
    by_etf = list_schedule(whole.problem, earliest)
    starts = [heft.place(forward), place_m_topo(whole.problem)]
    starts += [] if isinstance(by_etf, NoRoom) else [tuple(by_etf.device_of)]
    starts += [(p,) * forward.num_operators for p in range(forward.num_devices)]
    together = [grouped(whole, start) for start in starts]
    fitting = [start for start in together if overflow(whole, start) <= 0]
    return min(fitting, key=lambda start: latency_s(forward, start), default=None)


def _reason(problem: Problem, placement_problem: PlacementProblem) -> str:
    devices = range(placement_problem.num_devices)
    limit = max(limit_bytes(problem, devices, d) for d in devices)
    need = format_bytes(sum(kept_bytes(placement_problem).values()))
    return (
        f"no placement was found to fit: training keeps {need} on {len(devices)} devices, the limit"
        f" is {format_bytes(limit)} each (reserve {format_bytes(problem.training.reserve)})"
    )
