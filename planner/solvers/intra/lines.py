"""The rules of all operators along the axes of a mesh, all at once, by what policies allow there.

This is the program of the stage of all operators on one mesh (`build.py`), without a limit of
memory; the recipes in `solvers/sharded/` are masks of its space. An iteration is the sum of all
that it takes, with the steps and the sums of gradients spread over its microbatches. Of equally
fast answers that whose operators make fewer bytes is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from planner.artefacts.graph import ITEM_BYTES, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import SplitRule
from planner.artefacts.sharding import Rule, local_shape
from planner.costs.stage_pass import stage_collectives_s
from planner.resharding.conversion import Collective, Step
from planner.solvers.intra.build import built
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.policy import Policy, anything
from planner.solvers.intra.space import View, allowed
from planner.solvers.sharded.rules import share_work
from planner.support.arrays import Floats
from planner.support.memo import remembered

Lines = list[tuple[SplitRule, ...]]
"""Along each axis, the rule of each operator."""

WORK_S, LEFT_S = 1.0, 600.0
"""Limits of work and of time of a program, in s; nearly all of them are solved by elimination."""
FAST = 1e-6
"""By how much collectives take less where an axis has to cut something."""
PER_BYTE_S = 1e-18
"""Of what operators make: less than any time."""
SENT = 2**20
"""Bytes of an all-reduce by which groups are compared."""


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a mesh.

    Attributes:
        size: at least 2.
        policy: what is allowed along it.
        sure: whether something is cut along it though nothing pays: then by what would, over links
            a million times as fast.
    """

    size: int
    policy: Policy
    sure: bool = False


def lines_of(
    problem: Problem, groups: Sequence[tuple[int, ...]], axes: Sequence[Axis], rounds: float
) -> Lines:
    """The rules of all operators.

    Args:
        groups: the devices of each mesh; that with the slowest links counts.
        rounds: microbatches over which the time of steps and sums of gradients is spread.
    """
    if not axes:
        return []
    mesh = tuple(axis.size for axis in axes)
    group = max(groups, key=lambda one: _allreduces_s(problem, one, mesh))
    policies = tuple(axis.policy for axis in axes)
    lines = _chosen(problem, mesh, group, Parts(rounds, rounds, 1.0, 1.0, unsure=rounds), *policies)
    if all(share_work(own) or not axis.sure for axis, own in zip(axes, lines, strict=True)):
        return lines
    fast = Parts(rounds, rounds * FAST, FAST, FAST, unsure=rounds * FAST)
    return _chosen(problem, mesh, group, fast, *policies)


def _allreduces_s(problem: Problem, group: tuple[int, ...], mesh: tuple[int, ...]) -> float:
    steps = [Step(Collective.ALL_REDUCE, a, "P", "R", SENT) for a in range(len(mesh))]
    return stage_collectives_s(problem, group, mesh, steps)


@remembered(kept=64)
def _chosen(
    problem: Problem,
    mesh: tuple[int, ...],
    group: tuple[int, ...],
    weights: Parts,
    *policies: Policy,
) -> Lines:
    """The rules of the best answer. Where parts of which no conversion is allowed lead to no
    answer, every conversion is. They are remembered, because many points of a grid have the same
    mesh, and a search that goes on begins with the same points.
    """
    answer = _answer(problem, mesh, group, weights, policies)
    if answer is None:
        free = tuple(replace(policy, conversion=anything) for policy in policies)
        answer = _answer(problem, mesh, group, weights, free)
    assert answer is not None, "all operators may run whole"
    every = [allowed(problem.profile, *one) for one in zip(policies, mesh, strict=True)]
    return [
        tuple(
            next(one for one in some if one.rule == rule.axes[a])
            for some, rule in zip(own, answer, strict=True)
        )
        for a, own in enumerate(every)
    ]


def _answer(
    problem: Problem,
    mesh: tuple[int, ...],
    group: tuple[int, ...],
    weights: Parts,
    policies: tuple[Policy, ...],
) -> list[Rule] | None:
    """The rules of all operators with the least cost; None if nothing is allowed."""
    from planner.solvers.program.solve import solve  # loads a compiler

    made, made_bytes = _built(problem, mesh, group, *policies)
    program = made.program(weights, None)
    cost = list(program.cost)
    for node, _ in made.lies.values():  # a step is once in an iteration
        cost[node] = made.node_s[node].weighted(Parts(1.0, *weights[1:]))
    for v, size in enumerate(made_bytes):
        cost[v] = cost[v] + PER_BYTE_S * size
    picks = solve(replace(program, cost=tuple(cost)), WORK_S, lambda: LEFT_S).picks
    if picks is None:
        return None
    return [rules[picks[v]] for v, rules in enumerate(made.rules)]


@remembered(kept=8)
def _built(
    problem: Problem, mesh: tuple[int, ...], group: tuple[int, ...], *policies: Policy
) -> tuple[Built, list[Floats]]:
    """The program's tables for one microbatch, and per operator the bytes that it makes by each of
    its rules.
    """
    made = built(problem, View(mesh, 1, group, policies), rounds=1.0)
    graph, tensors = problem.profile.graph, tensors_by_name(problem.profile.graph)
    known: dict[object, Floats] = {}
    sizes = []
    for operator, rules in zip(graph.operators, made.rules, strict=True):
        outputs = [tensors[name] for name in operator.outputs]
        key = id(rules), *((one.shape, one.dtype) for one in outputs)
        if key not in known:
            known[key] = np.array([
                sum(prod(local_shape(one.shape, spec, mesh)) * ITEM_BYTES[one.dtype]
                    for one, spec in zip(outputs, rule.outputs, strict=True))
                for rule in rules
            ])  # fmt: skip
        sizes.append(known[key])
    return made, sizes
