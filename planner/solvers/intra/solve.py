"""`intra-op`: how to split all operators of one stage, by a choice program over all rules, views and
lies (after Alpa's intra-operator pass, Zheng et al., OSDI 2022, section 4).
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import has_rules
from planner.costs.evaluate import evaluate
from planner.costs.stage_memory import limit_bytes
from planner.resharding.checks import all_violations
from planner.simulator.estimate import estimate_s
from planner.solvers.intra.build import Parts, built, sharding_of
from planner.solvers.intra.space import View
from planner.solvers.program.solve import solve as solve_program
from planner.solvers.segments import recompute_choices
from planner.solvers.sharded.best import best_of, strategy_of
from planner.solvers.sharded.layout import (
    NO_RULES,
    ONE_DEVICE,
    Layout,
    divisors,
    host_by_host,
    smallest_host,
)

LOGGER = logging.getLogger(__name__)
IN_LINE = (Parts(1, 1, 1, 1), Parts(1, 1, 0.1, 1))
BESIDE = (Parts(1, 1, 1, 1), Parts(1, 1, 0.1, 0.3), Parts(1, 0.3, 0.1, 0.1))
"""Weights of what an iteration takes: all of it waits, or some runs beside computations."""
ROUNDS = 3
"""Times that the limit of memory is lowered, if a plan takes more than the program counts."""
SECONDS = 5.0
"""Of work for a program."""


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
        meshes += [
            (left // n, n) for n in divisors(min(left, host)) if 1 < n < left and not left % n
        ]
        if left == 1:
            meshes = [(1,)]
        for mesh in meshes:
            yield View(mesh, replicas, devices)


def _layouts(problem: Problem, time_limit_s: float) -> Iterator[Layout]:
    """The layouts of all views, ways to keep activations and weights."""
    recompute = problem.training.recompute
    ways = {Recompute.NONE: (False,), Recompute.FULL: (True,)}.get(recompute, (False, True))
    number = 0
    for view in views(problem):
        for again in ways:
            begin = time.process_time()
            made = built(problem, view, again=again)
            LOGGER.info("view %s x%d: %d nodes, %d edges, built in %.1f s", view.mesh, view.replicas,
                        len(made.node_s), len(made.edges), time.process_time() - begin)  # fmt: skip
            seen = set()
            for weights in BESIDE if problem.training.overlap else IN_LINE:
                for layout in _fitting(problem, view, made, weights, again):
                    number += 1
                    yield replace(layout, number=number)


def _fitting(problem, view, made, weights, again):
    used = view.devices
    limit = min(limit_bytes(problem, used, d) for d in used)
    for _ in range(ROUNDS):
        begin = time.process_time()
        until = time.monotonic() + 60
        answer = solve_program(
            made.program(weights, limit), SECONDS, lambda: until - time.monotonic()
        )
        LOGGER.info("weights %s: cost %.6g, bound %.6g, %s, %.1f s", tuple(weights), answer.cost, answer.bound,
                    answer.status, time.process_time() - begin)  # fmt: skip
        if answer.picks is None:
            return
        sharding, levels = sharding_of(problem, made, answer.picks)
        layout = Layout(
            (tuple(range(len(problem.profile.graph.operators))),),
            [view.groups],
            [sharding if math.prod(view.mesh) > 1 else None],
            sharing=(view.replicas, 0) if view.replicas > 1 else None,
            levels=levels,
        )
        strategy = strategy_of(problem, layout, [recompute_choices(problem)[-1 if again else 0]])
        wrong = all_violations(strategy, problem.profile.graph, len(problem.topology.devices))
        if wrong:
            LOGGER.info("wrong: %s", wrong[0])
            return
        evaluation = evaluate(problem, strategy)
        over = max(evaluation.memory[d].total_bytes - limit_bytes(problem, used, d) for d in used)
        LOGGER.info(
            "  inline %.4g s, over the limit by %.4g GiB",
            estimate_s(problem, strategy),
            over / 2**30,
        )
        if over <= 0 or (again is False and problem.training.recompute is not Recompute.NONE):
            yield layout
            return
        limit -= round(1.02 * over)
    yield layout
