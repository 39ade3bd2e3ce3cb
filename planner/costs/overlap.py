"""Sums of gradients that run beside the backward that makes the gradients.

A device sums one bucket of gradients (`strategy.gradient_sums`) after the other, on a stream of its
own. A bucket is ready when the last of its gradients is made, which is within the last backward
before the sum. The optimizer's step waits for all sums. A sum takes nothing from a computation
beside it, with one exception: among processes of one host that leave no core to spare, a sum is
work for the cores that compute, too. There it begins behind the backward, so that both times add
up. A device that runs several stages sums behind its backwards, too.
"""

from collections.abc import Collection, Sequence

import numpy as np

from planner.artefacts.graph import holders
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    GradientSum,
    Stage,
    Strategy,
    indices_of,
    stages_by_device,
    used_devices,
)
from planner.artefacts.topology import hosts_by_name
from planner.costs.compute import times_on
from planner.costs.local_stage import local_stage
from planner.costs.split import conversion_times, local_times

# A stage and a type of device.
_Place = tuple[int, str]


def runs_beside(problem: Problem, used: Collection[int], devices: Sequence[int]) -> bool:
    """Whether sums over some devices run beside their computations.

    Args:
        used: all devices that compute.
        devices: at least two of them.
    """
    topology = problem.topology
    hosts = {topology.devices[device].host for device in devices}
    if len(hosts) > 1:
        return True
    cores = hosts_by_name(topology)[min(hosts)].cores
    return cores is None or sum(topology.devices[d].host in hosts for d in used) < cores


def left_s(
    problem: Problem, strategy: Strategy, sums: Sequence[GradientSum]
) -> dict[tuple[int, int], float]:
    """By (sum, device), what is left of the last backward before a sum when it has made all
    gradients of the bucket, in s, on a device that computes alone; only of sums that run beside it.
    """
    if not sums:
        return {}
    used, users = used_devices(strategy), holders(problem.profile.graph)
    types = [device.type for device in problem.topology.devices]
    stages = {d: mine[0] for d, mine in stages_by_device(strategy).items() if len(mine) == 1}
    after: dict[_Place, dict[int, float]] = {}
    beside: dict[tuple[int, ...], bool] = {}
    left: dict[tuple[int, int], float] = {}
    for index, one in enumerate(sums):
        if one.devices not in beside:
            beside[one.devices] = runs_beside(problem, used, one.devices)
        if not beside[one.devices]:
            continue
        readers = sorted({v for name in one.parameters for v in users[name]})
        known: dict[_Place, float] = {}
        for device in one.devices:
            if device in stages:
                place = stages[device], types[device]
                if place not in after:
                    after[place] = _backwards_after(problem, strategy, place[0], device)
                if place not in known:
                    known[place] = next(after[place][v] for v in readers if v in after[place])
                left[index, device] = known[place]
    return left


def _backwards_after(
    problem: Problem, strategy: Strategy, stage: int, device: int
) -> dict[int, float]:
    """By operator of a stage, the time of the backwards behind its own, in s."""
    stages = strategy.stages
    if stages[stage].sharding is not None:
        return _split_backwards_after(problem, stages[stage], device)
    operators = sorted(indices_of(strategy.stages[stage], problem.profile.graph))
    backward_s = times_on(problem, device).backward_s[operators]
    before = np.concatenate([[0.0], np.cumsum(backward_s)[:-1]])
    return dict(zip(operators, before.tolist(), strict=True))


def _split_backwards_after(problem: Problem, stage: Stage, device: int) -> dict[int, float]:
    """The same of a split stage, with the collectives in its backward."""
    local = local_stage(problem.profile, stage)
    group = next(group for group in stage.groups if device in group)
    backward_s = local_times(problem, stage, device).backward_s
    backward_s = backward_s + conversion_times(problem, stage, group)[1]
    before = np.concatenate([[0.0], np.cumsum(backward_s)[:-1]])
    each = zip(local.whole, before.tolist(), strict=True)
    return {v: time_s for v, time_s in each if v >= 0}
