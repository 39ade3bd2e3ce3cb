"""Times and sizes that no strategy can beat, whatever its placement, replication, recomputation and
schedule on the given devices, with free communication. The schedule is any synchronous one, or any
asynchronous one where such a one is asked for.

Where the profile has rules by which operators are split, that is over all strategies with split
operators too: a part of an operator with rules takes at least 1/n of its time on n devices, and no
less than any part takes (`stage_pass.shortest_part_s`). The parts together take no less than the
whole. So the bounds hold for every mesh and every rule of the profile on it, for data, tensor and
sequence parallelism alike, and for all ways in which parameters, gradients and optimizer state lie:
these change collectives, steps and memory, which count for nothing here, and sums of gradients,
of which replicas may do a part each.

A pass of a stage takes no less than the sum of its operators' times on the device, nor than the sum
of their times on the host, which starts every part of an operator in the time of the whole. So each
direction counts the one of which the whole model has more.

They speak of the cost model and not of the machine. A part that would take less than its share,
since it fits into a cache, is known only if it was measured (`OperatorCost.parts`). Ways to split
an operator for which the profile has no rule are not among the strategies. Those of a problem have
microbatches of its profile's size; over all sizes that a search may choose, the least of their
bounds holds (`planning/sizes.py`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from planner.artefacts.graph import loss_outputs, predecessors, producers, tensors_by_name
from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.profile import PartTime, Profile, has_rules
from planner.artefacts.roofline import loss_times_s
from planner.artefacts.topology import Host, hosts_by_name
from planner.costs.operators import (
    first_of_each_type,
    hosts_with_contention,
    operator_times,
    slowdown,
)
from planner.costs.process_memory import least_reserve_bytes
from planner.costs.stage_memory import own_limit_bytes, static_bytes
from planner.costs.stage_pass import shortest_part_s, sums_of_gradients_s
from planner.support.arrays import Bools, Floats
from planner.support.units import format_bytes, format_bytes_apart


def lower_bound_s(problem: Problem) -> float:
    """The largest of the bounds that hold for the problem's objective, in s.

    iteration: M times the fractional assignment, the longest path, and the time that one operator
    takes with its ceil(M / R) microbatches on its busiest replica, if each of the R replicas has
    n devices, R n = K, whichever n is best. Without rules n = 1. Under an asynchronous schedule,
    whose iterations follow each other without a gap, the first of these only.
    bottleneck: the fractional assignment.
    latency: the longest path.
    """
    return _bound_s(problem, len(problem.topology.devices) if has_rules(problem.profile) else 1)


def _bound_s(problem: Problem, most: int) -> float:
    """The same over strategies whose operators are split over at most `most` devices."""
    num_microbatches, count = problem.num_microbatches, len(problem.topology.devices)
    match problem.training.objective:
        case Objective.BOTTLENECK:
            return fractional_s(problem)
        case Objective.LATENCY:
            return longest_path_s(problem, most)
    if problem.training.schedule.is_asynchronous:
        return num_microbatches * fractional_s(problem)
    # An operator that is split over n devices has at most K // n replicas. With fewer, each would
    # have more microbatches. They are dealt whole, so the busiest replica has at least their mean
    # number, rounded up.
    rounds = {n: -(-num_microbatches // (count // n)) for n in range(1, most + 1)}
    return max(
        num_microbatches * fractional_s(problem),
        longest_path_s(problem, most),
        _operator_s(problem, rounds),
    )


def unreplicated_s(problem: Problem) -> float:
    """The same over strategies in which every operator is on one device, in s."""
    bound_s, num_microbatches = _bound_s(problem, 1), problem.num_microbatches
    slowest_s = float(np.max(_fastest(problem).sum(axis=0), initial=0.0))
    match problem.training.objective:
        case Objective.BOTTLENECK:
            return max(bound_s, slowest_s)
        case Objective.LATENCY:
            return bound_s
    if problem.training.schedule.is_asynchronous:
        return max(bound_s, num_microbatches * slowest_s)
    return max(bound_s, _operator_s(problem, {1: num_microbatches}))


def _operator_s(problem: Problem, rounds: Mapping[int, int]) -> float:
    """Least time of an iteration in which one device runs each operator, or a part of it, for
    some microbatches, in s: the longest chain of forwards to the operator, its own forwards and
    backwards, and the longest chain of backwards from it, each on the fastest type of device. The
    largest over all operators.

    Args:
        rounds: by the number of devices that an operator is split over, the microbatches that one
            of them has at least. The least time over all numbers counts.
    """
    forward, backward = _fastest(problem, max(rounds))
    graph = problem.profile.graph
    before, tensors, made_by = predecessors(graph), tensors_by_name(graph), producers(graph)
    head = np.zeros(len(before))
    for v, feeds in enumerate(before):
        head[v] = max((head[u] + forward[u] for u in feeds), default=0.0)
    tail = np.zeros(len(before))
    for v, operator in enumerate(graph.operators):
        up = [made_by[n] for n in operator.inputs if tensors[n].gradient and n in made_by]
        tail[v] = max((tail[u] + backward[u] for u in up), default=0.0)
    # An operator without a backward is done after its last forward.
    tail = np.where(backward > 0, tail, 0.0)
    own = np.min([n * _fastest(problem, parts).sum(axis=0) for parts, n in rounds.items()], axis=0)
    return float(np.max(head + own + tail, initial=0.0))


def _fastest(problem: Problem, most: int = 1) -> Floats:
    """(2, N) forward and backward of each operator on the type that is fastest for it, or of its
    part if it has rules and is split over `most` devices, in s.
    """
    first = first_of_each_type(problem.topology).values()
    kinds = [_times(problem, device, len(problem.topology.devices)) for device in first]
    times = np.array([times for times, _ in kinds])  # (types, 2, N)
    if most > 1:
        # A loss is computed of a part of its output, whoever made that.
        lost = loss_times_s(problem.profile)
        splits = (lost[0] + lost[1] > 0) | [bool(o.rules) for o in problem.profile.operators]
        splits = splits & ~np.array([of_host for _, of_host in kinds])
        # A part takes at least the floor or, where the whole is shorter, the whole, and at least
        # its even share of the work; a smaller number of devices leaves it more of both. A part
        # that was measured may be below either, so its share comes last.
        floors = np.array([shortest_part_s(problem, device) for device in first])[:, :, None]
        parts = np.maximum(np.minimum(times, floors), times / most)
        parts = np.minimum(parts, times * _least_shares(problem.profile, most))
        times = np.where(splits, parts, times)
    fastest: Floats = times.min(axis=0)
    return fastest


def _times(problem: Problem, device: int, replicas: int) -> tuple[Floats, Bools]:
    """(2, N) times of the operators that add up in every pass, and (2, 1) whether they are the
    host's, in each direction.

    Args:
        replicas: of which each adds up a part of the gradients.
    """
    times, added_s = operator_times(problem, device), sums_of_gradients_s(problem, device)
    device_s = times.device_s - np.outer((0.0, 1.0 - 1.0 / replicas), added_s)
    of_host = (times.host_s.sum(axis=1) > device_s.sum(axis=1))[:, None]
    return np.where(of_host, times.host_s, device_s), of_host


def _least_shares(profile: Profile, most: int) -> Floats:
    """(2, N) the least measured share of each operator's forward and backward time, in parts on at
    most `most` devices; 1 where none was measured.
    """
    return _least(profile, lambda part: 1 if prod(part.mesh) <= most else None)


def _together(profile: Profile) -> Floats:
    """(2, N) the least time that all parts of an operator take together, over that of the whole."""
    return _least(profile, lambda part: prod(part.mesh))


def _least(profile: Profile, factor: Callable[[PartTime], int | None]) -> Floats:
    """(2, N) the least of the shares of measured parts, each times its factor, and 1.

    Args:
        factor: of a part; None leaves it out.
    """
    shares = np.ones((2, len(profile.operators)))
    for v, one in enumerate(profile.operators):
        for part in one.parts:
            if (times := factor(part)) is not None:
                both = (times * part.forward, times * part.backward)
                shares[:, v] = np.minimum(shares[:, v], both)
    return shares


def _capacity(problem: Problem) -> Mapping[str, float]:
    """The work that the devices of each type do at once, in devices that compute alone: on a host
    with cores no more than it has cores. Where contention was measured, n devices of a host do
    n / slowdown(n), and any number may be the best.
    """
    hosts = hosts_by_name(problem.topology)
    counts = Counter((d.type, d.host) for d in problem.topology.devices)
    at_once: dict[str, float] = defaultdict(float)
    for (kind, host), count in counts.items():
        if host in hosts_with_contention(problem):
            at_once[kind] += max(n / slowdown(problem, host, n, n) for n in range(1, count + 1))
        else:
            limit = hosts[host].cores
            at_once[kind] += count if limit is None else min(count, limit)
    return at_once


def fractional_s(problem: Problem) -> float:
    """Least time per microbatch if operators could be split over devices at will, in s:

        min T  with  sum_v t_vd x_vd <= T for each device d,  sum_d x_vd = 1 for each operator v

    With one device type this is sum_v t_v / K. With several it is solved as a linear program and
    recomputed from its dual multipliers, so that no tolerance of the solver gets into the bound:
    sum_v min_k (y_k t_vk) / sum_k y_k K_k is a bound for any y >= 0. Where measured parts of an
    operator take less together than the whole, t_vd is that time.
    """
    capacity, share = _capacity(problem), _together(problem.profile)
    # In the order of the names, so that the program's solution does not depend on the devices'.
    first = sorted(first_of_each_type(problem.topology).items())
    replicas = min(len(problem.topology.devices), problem.num_microbatches)
    kinds = [_times(problem, device, replicas) for _, device in first]
    times = np.array([(one * np.where(of_host, 1.0, share)).sum(axis=0) for one, of_host in kinds])
    counts = np.array([capacity[kind] for kind, _ in first], dtype=float)
    if len(kinds) == 1:
        return float(times[0].sum() / counts[0])
    weights = _assignment_duals(times, counts)
    return float((weights[:, None] * times).min(axis=0).sum() / (weights @ counts))


def _assignment_duals(times: Floats, counts: Floats) -> Floats:
    """Multipliers (types,) of the load constraints of the fractional assignment.

    Args:
        times: (types, N) time of each operator on each type, in s.
        counts: (types,) devices of each type.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    scale = 1.0 / max(float(times.max()), 1e-30)
    load = solver.NumVar(0, solver.infinity(), "T")
    share = [[solver.NumVar(0, 1, "") for _ in row] for row in times]
    rows = [
        solver.Add(
            sum(float(t) * scale * x for t, x in zip(row, xs, strict=True)) <= float(c) * load
        )
        for row, xs, c in zip(times, share, counts, strict=True)
    ]
    for column in zip(*share, strict=True):
        solver.Add(sum(column) == 1)
    solver.Minimize(load)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return 1.0 / counts
    weights = np.abs([row.dual_value() for row in rows])
    return weights if weights.sum() > 0 else 1.0 / counts


def longest_path_s(problem: Problem, most: int = 1) -> float:
    """Longest chain of dependent forwards and backwards of one microbatch, each operator on the
    device type that is fastest for it, in s.

    Args:
        most: devices that an operator with rules may be split over.
    """
    forward, backward = _fastest(problem, most)
    graph = problem.profile.graph
    feeds = predecessors(graph)
    there = np.zeros(len(feeds))
    for v, before in enumerate(feeds):
        there[v] = forward[v] + max((there[u] for u in before), default=0.0)
    tensors, made_by = tensors_by_name(graph), producers(graph)
    last = [made_by[name] for name in loss_outputs(graph) if name in made_by]
    if not last:
        return float(there.max(initial=0.0))
    # Backwards start with a loss, which needs its output; from there they go up the graph.
    back = np.full(len(feeds), -np.inf)
    back[last] = there[last] + backward[last]
    for v in range(max(last), -1, -1):
        for name in graph.operators[v].inputs:
            if tensors[name].gradient and name in made_by:
                u = made_by[name]
                back[u] = max(back[u], back[v] + backward[u])
    return float(max(back.max(), there.max()))


def memory_shortage(problem: Problem) -> str | None:
    """Why the model cannot fit however it is split, or None: its parameters, gradients and
    optimizer state alone, each held once, against all memory that there is.
    """
    devices = range(len(problem.topology.devices))
    reserve = max(least_reserve_bytes(problem, device) for device in devices)
    room = sum(_room_bytes(problem, host) for host in problem.topology.hosts)
    parameters = problem.profile.graph.parameters
    need = static_bytes(
        sum(p.bytes for p in parameters),
        sum(p.bytes for p in parameters if p.trainable),
        problem,
    )
    if need <= room:
        return None
    takes, there = format_bytes_apart(need, room)
    return (
        f"parameters, gradients and optimizer state alone take {takes}; all devices"
        f" together have {there} beside the reserve of {format_bytes(reserve)} each"
    )


def _room_bytes(problem: Problem, host: Host) -> int:
    """The most memory beside the reserves that any choice of a host's devices has: where they
    share the host's memory, fewer of them pay fewer reserves.
    """
    devices = [i for i, one in enumerate(problem.topology.devices) if one.host == host.name]
    limits = [own_limit_bytes(problem, i) for i in devices]
    reserves = [least_reserve_bytes(problem, i) for i in devices]
    if host.memory_bytes is None:
        return sum(max(0, limit - one) for limit, one in zip(limits, reserves, strict=True))
    own, least = sorted(limits, reverse=True), min(reserves, default=0)
    return max(
        (min(sum(own[:n]), host.memory_bytes) - n * least for n in range(len(own) + 1)),
        default=0,
    )
