"""`intra-op`: how to split all operators of one stage, by a choice program over all rules, views and
lies (after Alpa's intra-operator pass, Zheng et al., OSDI 2022, section 4).
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import has_rules
from planner.solvers.intra.build import built, sharding_of
from planner.solvers.intra.space import View
from planner.solvers.program.solve import solve as solve_program
from planner.solvers.sharded.best import best_of
from planner.solvers.sharded.layout import (
    NO_RULES,
    ONE_DEVICE,
    Layout,
    divisors,
    groups_of,
    host_by_host,
    smallest_host,
)

LOGGER = logging.getLogger(__name__)
WEIGHTS = ((1.0, 1.0), (1.0, 0.1), (0.3, 0.1))
"""Of collectives in the objective: all of them wait, or most run beside computations."""


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The best plan of all views.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
    """
    space = "all splits of one stage"
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    if len(problem.topology.devices) == 1:
        return Result(Status.INFEASIBLE, None, space=space, reason=ONE_DEVICE)
    return best_of(problem, list(_layouts(problem, time_limit_s)), space, time_limit_s)


def views(problem: Problem) -> Iterator[View]:
    """The views of all devices: replicas, and meshes of up to two axes, one of them inside hosts."""
    devices, most = host_by_host(problem), problem.num_microbatches
    host = smallest_host(problem)
    for replicas in divisors(len(devices)):
        if most % replicas:
            continue
        left = len(devices) // replicas
        meshes = [(left,)]
        meshes += [(left // n, n) for n in divisors(min(left, host)) if 1 < n < left and not left % n]
        if left == 1:
            meshes = [(1,)]
        for mesh in meshes:
            yield View(mesh, replicas, devices)


def _layouts(problem: Problem, time_limit_s: float) -> Iterator[Layout]:
    everything = (tuple(range(len(problem.profile.graph.operators))),)
    number = 0
    for view in views(problem):
        begin = time.process_time()
        made = built(problem, view)
        LOGGER.info("view %s x%d: %d nodes, %d edges, built in %.1f s", view.mesh, view.replicas,
                    len(made.compute), len(made.edges), time.process_time() - begin)  # fmt: skip
        seen = set()
        for weight in WEIGHTS:
            begin = time.process_time()
            until = time.monotonic() + 60
            answer = solve_program(made.program(weight, None), 5.0, lambda: until - time.monotonic())
            LOGGER.info("weights %s: cost %.6g, bound %.6g, %s, %.1f s", weight, answer.cost, answer.bound,
                        answer.status, time.process_time() - begin)  # fmt: skip
            if answer.picks is None or answer.picks in seen:
                continue
            seen.add(answer.picks)
            sharding, levels = sharding_of(problem, made, answer.picks)
            number += 1
            yield Layout(
                everything, [view.groups], [sharding if math.prod(view.mesh) > 1 else None],
                number=number, sharing=(view.replicas, 0) if view.replicas > 1 else None,
                levels=levels,
            )
