"""Meshes over the devices of a cluster, and the strategies that run on them.

Devices are taken host by host, so that a mesh lies inside a host where it fits: the last axis of a
mesh over neighbours, then the first axis, then replicas, then stages.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.clusters.routes import host_order
from planner.costs.collectives import lines, ring_links
from planner.costs.compute import times_on
from planner.costs.evaluate import closed_form_s, evaluate
from planner.costs.split import floor_s
from planner.graph import consumers, producers, tensors_by_name
from planner.problem import Problem, Result, Status
from planner.schedules.orders import default_warmups
from planner.sharding import Sharding
from planner.solvers.fit import fastest_first, recompute_choices
from planner.solvers.sharded.along import Axis, Policy, along
from planner.solvers.sharded.rules import AxisRule, Named, rules_of
from planner.splitting.checks import all_violations
from planner.strategy import Stage, Strategy, asynchronous_violations
from planner.topology import device_type

NO_RULES = "the profile has no rules by which operators are split; planner profile makes them"
OTHERS = 3
"""Strategies besides the best that the judge may choose among."""


def host_by_host(problem: Problem) -> tuple[int, ...]:
    """All devices, host by host."""
    return host_order(problem.topology, range(len(problem.topology.devices)))


def smallest_host(problem: Problem) -> int:
    """The number of devices of the host that has fewest."""
    hosts = [device.host for device in problem.topology.devices]
    return min(hosts.count(host) for host in set(hosts))


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(n for n in range(1, number + 1) if number % n == 0)


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


def axis_of(
    problem: Problem, group: Sequence[int], mesh: Sequence[int], axis: int, replicas: int
) -> Axis:
    """The prices along an axis of a mesh: those of its slowest line.

    Args:
        group: the devices of the mesh.
        replicas: of the stage.
    """
    options = problem.options
    links = [ring_links(problem.topology, tuple(sorted(line))) for line in lines(group, mesh, axis)]
    kind = device_type(problem.topology, group[0])
    passes = 4 + 2 * options.optimizer.num_moments
    return Axis(
        size=mesh[axis],
        latency_s=max(latency for latency, _ in links),
        bytes_per_s=min(rate for _, rate in links),
        step_s_per_byte=passes / kind.memory_bandwidth_bytes_per_s,
        num_microbatches=max(1.0, options.num_microbatches / replicas),
    )


def chosen(
    problem: Problem,
    about: dict[str, Named],
    axis: Axis,
    policy: Policy,
    device: int,
    *,
    beam: int | None = None,
) -> tuple[AxisRule, ...]:
    """The rules of all operators along one axis, by the times on a device."""
    times = times_on(problem, device)
    total = (times.forward_s + times.backward_s).tolist()
    floor = floor_s(times.forward_s) + floor_s(times.backward_s)
    rules = rules_of(problem.profile)
    more = {} if beam is None else {"beam": beam}
    return along(problem.profile.graph, rules, about, axis, policy, total, floor, **more)


def stage_cuts(problem: Problem, count: int) -> tuple[tuple[int, ...], ...]:
    """The operators in so many stages of about the same time, each cut where few bytes cross:
    within a tenth of a stage around the place where the times are equal.
    """
    times = times_on(problem, fastest_first(problem)[0])
    done = np.cumsum(times.forward_s + times.backward_s)
    crossing = _crossing_bytes(problem)
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


def _crossing_bytes(problem: Problem) -> list[int]:
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages before they are a strategy.

    Attributes:
        operators: per stage, by index.
        groups: per stage.
        shardings: per stage; None of one that is not split.
    """

    operators: Sequence[Sequence[int]]
    groups: Sequence[Sequence[tuple[int, ...]]]
    shardings: Sequence[Sharding | None]


def strategies(problem: Problem, layout: Layout) -> Iterator[Strategy]:
    """The strategies of a layout, in the order of preference: without recomputation first."""
    options, graph = problem.options, problem.profile.graph
    widths = [len(groups) for groups in layout.groups]
    depths = default_warmups(widths, options.num_microbatches, 0, options.schedule)
    for recompute in recompute_choices(problem):
        stages = tuple(
            Stage(
                operators=tuple(graph.operators[v].name for v in inside),
                groups=tuple(groups),
                warmup=depth,
                recompute=recompute,
                sharding=sharding,
            )
            for inside, groups, sharding, depth in zip(
                layout.operators, layout.groups, layout.shardings, depths, strict=True
            )
        )
        yield Strategy(
            stages, options.schedule, options.num_microbatches, vertical_sync=options.vertical_sync
        )


def best_of(problem: Problem, layouts: Iterable[Layout], space: str) -> Result:
    """The layouts with the best closed forms whose strategies fit."""
    found: list[tuple[float, int, Layout]] = []
    reason = None
    for layout in layouts:
        strategy = next(strategies(problem, layout))
        wrong = next(asynchronous_violations(strategy, problem.profile.graph), None)
        wrong = wrong or next(iter(_wrong(problem, strategy)), None)
        if wrong is None:
            found.append((closed_form_s(problem, strategy), len(found), layout))
        reason = reason or wrong
    fitting: list[Strategy] = []
    for *_, layout in sorted(found, key=lambda one: one[:2]):
        for strategy in strategies(problem, layout):
            shortage = evaluate(problem, strategy).shortage
            if shortage is None:
                fitting.append(strategy)
                break
            reason = reason or shortage
        if len(fitting) > OTHERS:
            break
    if not fitting:
        return Result(Status.INFEASIBLE, None, space=space, reason=reason)
    return Result(Status.FEASIBLE, fitting[0], space=space, others=tuple(fitting[1:]))


def _wrong(problem: Problem, strategy: Strategy) -> tuple[str, ...]:
    """What is wrong with a strategy: the rules of two axes may not go together."""
    graph = problem.profile.graph
    return all_violations(strategy, graph, len(problem.topology.devices))
