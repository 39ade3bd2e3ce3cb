"""A problem of the contest as a choice program."""

import numpy as np

from planner.artefacts.formats.iopddl import ContestProblem
from planner.solvers.program.problem import FORBIDDEN, ChoiceProgram, Held
from planner.support.arrays import Ints


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
