"""Meshes over the devices of a cluster, and layouts of stages on them.

Devices are taken host by host, so that a mesh lies inside a host where it fits: the last axis of a
mesh over neighbours, then the first axis, then replicas, then stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import isqrt

import numpy as np

from planner.artefacts.graph import consumers, producers, tensors_by_name
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.profile import has_rules
from planner.artefacts.sharding import Sharding
from planner.clusters.routes import host_order
from planner.costs.operators import operator_times
from planner.costs.transfers import transfer_s
from planner.solvers.fit import fastest_first
from planner.support.arrays import Floats

NO_RULES = "the profile has no rules by which operators are split; planner profile makes them"
NOTHING_TO_SPLIT = "no operator can be split over the devices"
NOTHING_FASTER = "no split was found that is faster than the plans that are known"
ONE_DEVICE = "there is one device, and operators are split over several"
WHOLE = (1, 0)
"""`Stage.over` and `Stage.zero` of replicas that share nothing."""


def not_split(problem: Problem, space: str) -> Result | None:
    """Why no operator of a problem can be split; None if one may be.

    Args:
        space: what was to be looked at, for the result.
    """
    if not has_rules(problem.profile):
        return Result(Status.UNKNOWN, None, space=space, reason=NO_RULES)
    if len(problem.topology.devices) == 1:
        return Result(Status.INFEASIBLE, None, space=space, reason=ONE_DEVICE)
    return None


def host_by_host(problem: Problem, size: int = 1) -> tuple[int, ...]:
    """All devices, host by host; those that make up no whole group of a size in their host last.

    With hosts of 2, 3 and 3 devices and groups of 2: 0, 1; 2, 3; 5, 6; and then 4 and 7.
    """
    devices = problem.topology.devices
    whole, left = list[int](), list[int]()
    for _, host in groupby(
        host_order(problem.topology, range(len(devices))), lambda device: devices[device].host
    ):
        members = [*host]
        end = len(members) // size * size
        whole += members[:end]
        left += members[end:]
    return (*whole, *left)


def smallest_host(problem: Problem) -> int:
    """The number of devices of the host that has fewest."""
    hosts = [device.host for device in problem.topology.devices]
    return min(hosts.count(host) for host in set(hosts))


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def groups_of(
    devices: Sequence[int], mesh: Sequence[int], replicas: int, stages: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per stage, its groups.

    >>> groups_of(range(8), (2,), 2, 2)
    (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    """
    size = int(np.prod(mesh))
    return tuple(
        tuple(
            tuple(devices[(s * replicas + r) * size + i] for i in range(size))
            for r in range(replicas)
        )
        for s in range(stages)
    )


def stage_cuts(problem: Problem, count: int) -> tuple[tuple[int, ...], ...]:
    """The operators in so many stages of about the same time, each cut where few bytes cross:
    within a tenth of a stage around the place where the times are equal.
    """
    times = operator_times(problem, fastest_first(problem)[0])
    done = np.cumsum(times.forward_s + times.backward_s)
    crossing = crossing_bytes(problem)
    bounds, size = [0], len(done)
    for s in range(1, count):
        aim, slack = done[-1] * s / count, done[-1] / count / 10
        near = [
            v
            for v in range(max(bounds[-1] + 1, 1), size - (count - s) + 1)
            if abs(done[v - 1] - aim) <= slack
        ]
        least = max(bounds[-1] + 1, int(np.searchsorted(done, aim)))
        near = near or [min(least, size - (count - s))]
        bounds.append(min(near, key=lambda v: (crossing[v], abs(done[v - 1] - aim), v)))
    bounds.append(size)
    return tuple(tuple(range(a, b)) for a, b in pairwise(bounds))


def crossing_bytes(problem: Problem) -> list[int]:
    """Bytes that cross the cut in front of each operator, with gradients."""
    graph = problem.profile.graph
    made_by, read_by, tensors = producers(graph), consumers(graph), tensors_by_name(graph)
    change = [0] * (len(graph.operators) + 2)
    for name, v in made_by.items():
        if read_by[name]:
            size = tensors[name].bytes * (2 if tensors[name].gradient else 1)
            change[v + 1] += size
            change[read_by[name][-1] + 1] -= size
    return [int(n) for n in np.cumsum(change)]


def crossing_s(problem: Problem, groups: Sequence[Sequence[tuple[int, ...]]]) -> Floats:
    """(p - 1, N + 1) time to send what crosses a cut in front of each operator, behind each stage
    but the last.

    Args:
        groups: per stage.
    """
    sizes = np.array([*crossing_bytes(problem)], dtype=float)
    sizes = sizes[: len(problem.profile.operators) + 1]
    made = []
    for before, behind in pairwise(groups):
        sources, targets = ([d for group in some for d in group] for some in (before, behind))
        made.append(transfer_s(problem.topology, sources, targets, sizes, messages=2))
    return np.array(made).reshape(len(made), len(sizes))


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages before they are a strategy.

    Attributes:
        operators: per stage, by index.
        groups: per stage.
        shardings: per stage; None of one that is not split.
        recut: the same with other cuts, for stages of which some recompute; None if the cuts stay.
        number: in the order in which equally good ones are taken.
        work_s: the work of making it, in seconds of an ordinary core.
        sharing: `Stage.over` and `Stage.zero` of all stages; None for whole copies, or the
            optimizer's state in parts where these do not fit.
        levels: `Stage.zero_of` of all stages.
        recomputed: segments of the only stage that run again, unless more have to; None for those
            of the first choice (`segments.recompute_choices`).
    """

    operators: Sequence[Sequence[int]]
    groups: Sequence[Sequence[tuple[int, ...]]]
    shardings: Sequence[Sharding | None]
    recut: Callable[[Sequence[bool]], "Layout"] | None = None
    number: int = 0
    work_s: float = 0.0
    sharing: tuple[int, int] | None = None
    levels: Mapping[str, int] = field(default_factory=dict)
    recomputed: tuple[tuple[str, ...], ...] | None = None
