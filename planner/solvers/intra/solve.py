"""`intra-op`: the best split of every operator on all devices, one stage.

Each view of the devices (`space.py`) is a choice program over all rules of all operators and all
ways in which parameters, gradients and state may lie (`build.py`), as in the intra-operator pass of
Alpa (Zheng et al., OSDI 2022, section 4). An iteration is no sum: collectives run beside
computations. So a program is solved for several weights of collectives, and the judge compares the
answers. Memory that a program does not count, such as workspaces, is taken off the limit, and the
program is solved again.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from planner.artefacts.options import Recompute
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import has_rules
from planner.costs.evaluate import evaluate
from planner.costs.stage_memory import limit_bytes
from planner.resharding.checks import all_violations
from planner.solvers.engines.watch import also_interrupt
from planner.solvers.intra.build import Built, Parts, built, sharding_of
from planner.solvers.intra.space import View
from planner.solvers.program.problem import Choice, ChoiceProgram
from planner.solvers.program.solve import solve as solve_program
from planner.solvers.segments import Again, recompute_choices
from planner.solvers.sharded.best import best_of, strategy_of
from planner.solvers.sharded.layout import (
    NO_RULES,
    NOTHING_TO_SPLIT,
    ONE_DEVICE,
    WHOLE,
    Layout,
    divisors,
    host_by_host,
    smallest_host,
)

LOGGER = logging.getLogger(__name__)

IN_LINE = (Parts(1, 1, 1, 1), Parts(1, 1, 0.1, 1))
BESIDE = (*IN_LINE[:1], Parts(1, 1, 0.1, 0.3), Parts(1, 0.3, 0.1, 0.1), Parts(1, 0.1, 0.1, 0.1))
"""Weights of the parts of an iteration: all of them wait, or some run beside computations; sums of
gradients always may."""
LOWERED = 2
"""Times that the limit of memory is lowered, at most."""
MARGIN = 1.02
"""By how much more than what a plan takes beyond the limit."""
WORK_SHARE = 0.02
"""Of the limit of work, for one program."""
LEAST_WORK_S, MOST_WORK_S = 0.5, 5.0
CLOCK = 10
"""A program's limit on the wall over that of its work, for proofs, which count none."""


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The best plan of all views.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core.
    """
    space = "all splits of one stage over all devices"
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    if len(problem.topology.devices) == 1:
        return Result(Status.INFEASIBLE, None, space=space, reason=ONE_DEVICE)
    work_s = min(max(WORK_SHARE * time_limit_s, LEAST_WORK_S), MOST_WORK_S)
    found = [
        replace(layout, number=number)
        for number, layout in enumerate(
            layout for view in views(problem) for layout in _layouts(problem, view, work_s)
        )
    ]
    if not found:
        return Result(Status.UNKNOWN, None, space=space, reason=NOTHING_TO_SPLIT)
    return best_of(problem, found, space, time_limit_s)


def views(problem: Problem) -> Iterator[View]:
    """All devices as replicas of equal meshes: of one axis, and of two, the second one inside
    hosts.
    """
    devices, host = host_by_host(problem), smallest_host(problem)
    asynchronous = problem.training.schedule.is_asynchronous
    for replicas in divisors(len(devices)):
        if problem.num_microbatches % replicas or (asynchronous and replicas > 1):
            continue
        left = len(devices) // replicas
        yield View((left,), replicas, devices)
        for inner in divisors(left):
            if 1 < inner < left and host % inner == 0:
                yield View((left // inner, inner), replicas, devices)


def _layouts(problem: Problem, view: View, work_s: float) -> list[Layout]:
    """The layouts of a view: without recomputation, or, where none fits and it may be, with it."""
    ways = {Recompute.NONE: (False,), Recompute.FULL: (True,)}.get(
        problem.training.recompute, (False, True)
    )
    found: list[Layout] = []
    for again in ways:
        made = built(problem, view, again=again)
        for weights in BESIDE if problem.training.overlap else IN_LINE:
            layout = _fitting(problem, made, weights, work_s)
            if layout is not None and layout not in found:
                found.append(layout)
        if found:
            break
    return found


def _fitting(problem: Problem, made: Built, weights: Parts, work_s: float) -> Layout | None:
    """The answer of a program, with a limit of memory at which it fits; None if there is none."""
    devices = made.view.devices
    limit = min(limit_bytes(problem, devices, d) for d in devices)
    layout = None
    for _ in range(1 + LOWERED):
        answer = _answer(made.program(weights, limit), work_s)
        LOGGER.info(
            "%s x %d replicas: %.6g of at least %.6g s",
            made.view.mesh, made.view.replicas, answer.cost, answer.bound,
        )  # fmt: skip
        if answer.picks is None:
            return layout
        layout = _layout(problem, made, answer.picks)
        choices = recompute_choices(problem)
        again = next((c for c in choices if c is Again.LAYERS), choices[-1])
        strategy = strategy_of(problem, layout, [again if made.again else choices[0]])
        if all_violations(strategy, problem.profile.graph, len(devices)):
            return None
        memory = evaluate(problem, strategy).memory
        over = max(memory[d].total_bytes - limit_bytes(problem, devices, d) for d in devices)
        if over <= 0:
            return layout
        limit -= round(MARGIN * over)
        if limit <= 0:
            return layout
    return layout


def _answer(program: ChoiceProgram, work_s: float) -> Choice:
    """The answer of a program.

    Raises:
        KeyboardInterrupt: if the user has pressed Ctrl-C, which ends all programs and not this one
            alone.
    """
    heard: list[bool] = []
    interrupt = partial(heard.append, True)
    until_s = time.monotonic() + CLOCK * work_s
    also_interrupt.append(interrupt)
    try:
        answer = solve_program(program, work_s, lambda: until_s - time.monotonic())
    finally:
        also_interrupt.remove(interrupt)
    if heard:
        raise KeyboardInterrupt
    return answer


def _layout(problem: Problem, made: Built, picks: tuple[int, ...]) -> Layout:
    sharding, levels = sharding_of(problem, made, picks)
    view = made.view
    return Layout(
        operators=(tuple(range(len(problem.profile.graph.operators))),),
        groups=[view.groups],
        shardings=[sharding if math.prod(view.mesh) > 1 else None],
        sharing=(view.replicas, 0) if view.replicas > 1 else WHOLE,
        levels=levels,
    )
