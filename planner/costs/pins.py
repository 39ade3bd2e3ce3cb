"""Operators that the user wants on certain devices (`--pin NAME=DEVICE`).

Solvers are not told. They get a cluster in which each of these devices is of a type of its own, and
on every other type the operator takes `PENALTY` times as long as the whole model
(`costs/compute.py`): a search that knows devices of several types avoids it. The judge sees the
real cluster, and refuses a strategy that breaks a pin.
"""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy, operator_indices
from planner.artefacts.topology import device_type
from planner.support.errors import OptionError

PENALTY = 1000.0


def pinned(problem: Problem) -> Mapping[int, int]:
    """The device of each operator that has to be on one, by indices.

    Raises:
        OptionError: if an operator or a device is unknown, or an operator is pinned twice.
    """
    device_of: dict[int, int] = {}
    if not problem.search.pins:
        return device_of
    operators = operator_indices(problem.profile.graph)
    devices = {device.name: d for d, device in enumerate(problem.topology.devices)}
    for operator, device in problem.search.pins:
        if operator not in operators:
            near = get_close_matches(operator, operators, n=3)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise OptionError(f"--pin: there is no operator {operator}{meant}")
        if device not in devices:
            known = ", ".join(list(devices)[:8]) + ", .." * (len(devices) > 8)
            raise OptionError(f"--pin: there is no device {device}; there are {known}")
        if device_of.setdefault(operators[operator], devices[device]) != devices[device]:
            raise OptionError(f"--pin: {operator} is pinned to two devices")
    return device_of


def separated(problem: Problem) -> Problem:
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


def broken(problem: Problem, strategy: Strategy) -> str | None:
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
