"""A problem of the iopddl contest as a choice program, and its answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.formats.iopddl import ContestProblem
from planner.solvers.program.problem import FORBIDDEN, Choice, ChoiceProgram, Held
from planner.support.arrays import Ints
from planner.support.errors import FileError

TO_ANSWER_S, TO_ANSWER = 1.0, 0.1
"""Time for the answer: a second, or a tenth of what is left if that is less."""


def choice_program(problem: ContestProblem) -> ChoiceProgram:
    """The program. An edge of one node is part of its costs. An edge of three nodes or more is one
    more node, whose strategies are their combinations, and which has an edge to each of them that
    forbids other combinations than its own.

    Raises:
        ValueError: if usages are too large for sums of 64 bits.
    """
    costs, sizes = list(problem.costs), [len(one) for one in problem.costs]
    edges: list[tuple[int, int]] = []
    matrices: list[Ints] = []
    for nodes, flat in zip(problem.edges, problem.edge_costs, strict=True):
        if len(nodes) == 2:
            edges.append((nodes[0], nodes[1]))
            matrices.append(flat.reshape(sizes[nodes[0]], sizes[nodes[1]]))
        elif len(nodes) == 1:
            both = costs[nodes[0]] >= FORBIDDEN, flat >= FORBIDDEN
            total = np.where(both[0] | both[1], 0, costs[nodes[0]]) + np.where(both[1], 0, flat)
            costs[nodes[0]] = np.where(both[0] | both[1], FORBIDDEN, total)
        else:
            shape = [sizes[i] for i in nodes]
            for node, pick in zip(nodes, np.indices(shape).reshape(len(shape), -1), strict=True):
                edges.append((node, len(costs)))
                own = np.arange(sizes[node])[:, None] == pick
                matrices.append(np.where(own, 0, FORBIDDEN))
            costs.append(flat)
    held = [
        (Held(first, end - 1, usages),) if end > first else ()
        for (first, end), usages in zip(problem.intervals, problem.usages, strict=True)
    ]
    none: list[tuple[Held, ...]] = [()] * (len(costs) - len(held))
    return ChoiceProgram(
        tuple(costs), tuple(edges), tuple(matrices), (*held, *none), problem.usage_limit
    )


@dataclass(frozen=True, slots=True)
class ContestAnswer:
    """An answer to a problem of the contest.

    Attributes:
        name: of the problem.
        choice: a strategy per node, its cost and a bound.
    """

    name: str
    choice: Choice


def solve_contest(
    problem: ContestProblem,
    name: str,
    limit_s: float,
    left_s: Callable[[], float],
    seed: int = 0,
) -> ContestAnswer:
    """The answer, in time.

    Args:
        name: of its file, for messages.
        limit_s: limit of work, in seconds of an ordinary core.
        left_s: tells the time that is left.
        seed: of all draws.

    Raises:
        FileError: if usages are too large for sums of 64 bits.
    """
    from planner.solvers.program.solve import solve  # compiles

    try:
        program = choice_program(problem)
    except ValueError as error:
        raise FileError(f"{name}: {error}") from None
    spare_s = min(TO_ANSWER_S, TO_ANSWER * max(left_s(), 0.0))
    choice = solve(program, limit_s, lambda: left_s() - spare_s, seed)
    num_nodes = len(problem.costs)
    if choice.picks is not None:  # nodes of wider edges are none of the problem's
        choice = replace(choice, picks=choice.picks[:num_nodes])
    return ContestAnswer(problem.name, choice)
