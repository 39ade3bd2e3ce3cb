"""Operators that the user wants on certain devices (`--pin NAME=DEVICE`).

Solvers are not told. They get a cluster in which each of these devices is of a type of its own, and
on every other type the operator takes very long (`costs/operators.py`): a search that knows devices
of several types avoids it. The judge sees the real cluster, and refuses a strategy that breaks a
pin.
"""

from dataclasses import replace

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import device_type
from planner.costs.operators import pinned


def with_pinned_types(problem: Problem) -> Problem:
    """The problem for solvers: devices that operators are pinned to have types of their own."""
    apart = sorted({*pinned(problem).values()})
    if not apart:
        return problem
    topology = problem.topology
    devices, types = list(topology.devices), list(topology.device_types)
    for d in apart:
        kind = replace(device_type(topology, d), name=f"{devices[d].type} {devices[d].name}")
        types.append(kind)
        devices[d] = replace(devices[d], type=kind.name)
    return replace(
        problem, topology=replace(topology, devices=tuple(devices), device_types=tuple(types))
    )


def violated_pin(problem: Problem, strategy: Strategy) -> str | None:
    """Which pin a strategy breaks, in words; None if it keeps them all."""
    where = pinned(problem)
    if not where:
        return None
    operators, devices = problem.profile.graph.operators, problem.topology.devices
    stage_of = {name: stage for stage in strategy.stages for name in stage.operators}
    for v, d in where.items():
        used = stage_of[operators[v].name].devices
        if used != (d,):
            names = ", ".join(devices[p].name for p in used)
            return f"{operators[v].name} is pinned to {devices[d].name}, and would be on {names}"
    return None
