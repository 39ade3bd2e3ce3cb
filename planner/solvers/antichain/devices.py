"""Devices as the antichain solver takes them: linear orders, the combinations that a pipeline can
have along one of them, and what a stage runs on.

A combination is the state (k, r, W) of `solve.py` without its downset. The figures that depend on
the devices of a stage alone (links, speeds, memory) are looked up here once for each combination.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations, product

import numpy as np

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName
from planner.artefacts.topology import device_type
from planner.clusters.routes import chain, host_order, pair_widths
from planner.costs.actions import link_share, sum_factor
from planner.costs.operators import first_of_each_type, launch_s, slowdowns
from planner.costs.process_memory import least_reserve_bytes
from planner.costs.stage_memory import limit_bytes
from planner.costs.stage_pass import sums_overlap_compute
from planner.costs.transfers import ring_links, slowest_link
from planner.costs.update import step_s
from planner.solvers.antichain import kernels
from planner.solvers.antichain.parts import Lines, levels_of, lines_of
from planner.support.arrays import Floats, Ints, csr

# On more devices than this, see `rounds`.
ALL_WIDTHS = 8
_MARKS = 64
# A label is a way to run everything behind a cut. Maximum number of labels that a state keeps, of
# those that do not beat each other: usually; on many devices; if the answer must be exact.
_LABELS, _FEW_LABELS, _ALL_LABELS = 32, 4, 2**62
# Orders of distinct device types that are tried.
_TYPE_ORDERS = 6


@dataclass(frozen=True, slots=True)
class Round:
    """The combinations of devices of one search.

    Attributes:
        marks: numbers of devices that may be in use behind a cut, ascending; the last is all.
        widths: numbers of replicas that a stage may have, ascending.
        aligned: whether a stage of width r comes only where a multiple of r is in use behind it.
        extras: microbatches in flight beyond the least that a stage may choose from, ascending.
        labels: maximum number of labels that a state keeps.
    """

    marks: tuple[int, ...]
    widths: tuple[int, ...]
    aligned: bool
    extras: tuple[int, ...]
    labels: int


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Devices in one linear order, as the kernel sees them.

    Attributes:
        order: the devices.
        moves: how they can be taken.
        labels: maximum number of labels that a state keeps.
    """

    order: tuple[int, ...]
    moves: kernels.Moves
    labels: int


def orders_of(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Linear orders of the devices to try: by index, by links, host after host and across the
    hosts; where devices differ, also backwards, and type by type in every order of the types.
    """
    topology = problem.topology
    natural = tuple(range(len(topology.devices)))
    by_host = host_order(topology, natural)
    orders = [natural, chain(topology, natural), by_host, _transposed(problem, by_host)]
    types = sorted({d.type for d in topology.devices})
    if len(types) > 1:
        orders += [order[::-1] for order in orders]
        of_type = {
            kind: chain(topology, tuple(i for i in natural if topology.devices[i].type == kind))
            for kind in types
        }
        for some in islice(permutations(types), _TYPE_ORDERS):
            orders.append(tuple(i for kind in some for i in of_type[kind]))
    return tuple(dict.fromkeys(orders))


def _transposed(problem: Problem, by_host: Sequence[int]) -> tuple[int, ...]:
    """The first device of every host, then the second of every host, and so on."""
    place: dict[str, int] = {}
    key = {}
    for d in by_host:
        host = problem.topology.devices[d].host
        key[d] = place.get(host, 0)
        place[host] = key[d] + 1
    return tuple(sorted(by_host, key=lambda d: key[d]))


def numbers_of_devices(problem: Problem) -> Sequence[int]:
    """How many devices to plan for: all, except where using fewer makes each of them faster; then
    any number up to 16, powers of two, and all.
    """
    topology = problem.topology
    shared = any(h.cores is not None or h.memory_bytes is not None for h in topology.hosts)
    count = len(topology.devices)
    if not shared:
        return (count,)
    few = range(1, min(count, 2 * ALL_WIDTHS) + 1)
    return sorted({*few, *(2**i for i in range(count.bit_length())), count})


def rounds_of(problem: Problem, count: int) -> tuple[Round, ...]:
    """The searches for one order of `count` devices.

    Up to 8 devices: every width, and every stage chooses its warm-up depth. On more: all stages
    have the default warm-up depth or all one more, and either the widths are any multiple of an
    eighth of the devices, or powers of two and all, with cuts after every device or, where that
    would be more than 64 places, after every 2, 4, 8, ... devices. On more than 16, these are
    aligned.
    """
    every = tuple(range(1, count + 1))
    possible = frozenset(r for r in every if _can_have(problem, r))
    asynchronous = problem.training.schedule.is_asynchronous
    if count <= ALL_WIDTHS:
        labels = _ALL_LABELS if problem.search.exact else _LABELS
        return (Round(every, tuple(sorted(possible)), False, (0, 1), labels),)
    most = max(possible)
    unit = -(-count // ALL_WIDTHS)
    eighths = (*range(unit, count, unit), count)
    between = {b - a for a in (0, *eighths) for b in eighths if b > a}
    step = 2 ** max(0, math.ceil(math.log2(count / _MARKS)))
    marks = (*range(step, count, step), count)
    powers = {2**i for i in range(count.bit_length()) if 2**i >= step} | {count, most}
    return tuple(
        Round(some, tuple(sorted(widths & possible)), aligned, (extra,), _FEW_LABELS)
        for some, widths, aligned in (
            (eighths, between | {most}, False),
            (marks, powers, count > 2 * ALL_WIDTHS),
        )
        for extra in ((0,) if asynchronous else (0, 1))
    )


def _can_have(problem: Problem, num_replicas: int) -> bool:
    """Whether the microbatches of an iteration can be dealt to this number of replicas."""
    count = problem.num_microbatches
    if problem.training.schedule.is_asynchronous:
        return count % num_replicas == 0
    return num_replicas <= count


def _warmups(
    problem: Problem, state: tuple[int, int, int], width: int, extras: Sequence[int]
) -> tuple[int, ...]:
    """The choices of W' of a stage in front of a state, ascending: the least that does not stall,
    and more by the extras. For PipeDream it is NOAM (`orders.default_warmups`).
    """
    k, r, warmup = state
    if problem.training.schedule is ScheduleName.PIPEDREAM:
        return (-(-(k + width) // width),)
    most = -(-problem.num_microbatches // width)
    if problem.training.schedule.has_phases:
        return (most,)
    if k == 0:
        return (1,)
    least = -(-warmup * r // width) + 1
    return tuple(sorted({min(most, least + extra) for extra in extras}))


def rows_of(problem: Problem) -> tuple[DeviceRow, ...]:
    """The devices in all orders, in all numbers, with all ways to take them."""
    rows = []
    for order, count in product(orders_of(problem), numbers_of_devices(problem)):
        # All of them may be used, and are slowed down as if they were.
        used = order[:count]
        for one in rounds_of(problem, count):
            rows.append(DeviceRow(used, _moves(problem, used, one), one.labels))
    return tuple(rows)


def with_less_memory(row: DeviceRow, spare_bytes: float) -> DeviceRow:
    """The same devices, with that much memory of each to be left empty."""
    return replace(row, moves=row.moves._replace(limit=row.moves.limit - spare_bytes))


def _moves(problem: Problem, order: tuple[int, ...], one: Round) -> kernels.Moves:
    """Every combination that a pipeline on these devices can have, from the last stage on."""
    marks = frozenset(one.marks)
    index = {(0, 0, 0): 0}
    states = [(0, 0, 0)]
    rows: list[list[int]] = []
    links = []
    between: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}
    for state in states:
        k, r, _ = state
        row = []
        for width in one.widths:
            if k + width not in marks or (one.aligned and k % width):
                continue
            if k and (k, r, width) not in between:
                stage, front = stage_devices(order, k, r), stage_devices(order, k + width, width)
                between[k, r, width] = (
                    *slowest_link(problem.topology, front, stage),
                    *slowest_link(problem.topology, stage, front),
                )
            for warmup in _warmups(problem, state, width, one.extras):
                following = (k + width, width, warmup)
                if following not in index:
                    index[following] = len(states)
                    states.append(following)
                row.append(index[following])
                links.append(between[k, r, width] if k else (0.0, math.inf, 0.0, math.inf))
        rows.append(row)
    start, to = csr(rows)
    k_, r_, w_ = np.array(states, dtype=np.int64).T.copy()
    there = np.array(links, dtype=float).reshape(-1, 4).T.copy()
    share = link_share(problem, order)
    there[[1, 3]] = np.divide(
        there[[1, 3]], share, out=np.full_like(there[[1, 3]], np.inf), where=share > 0
    )
    stages = _stages_on(problem, order, [(k, r) for k, r, _ in states])
    return kernels.Moves(
        k=k_, r=r_, w=w_, weight=_weights(problem, r_),
        levels=np.array([levels_of(problem, r) for _, r, _ in states], dtype=np.int64),
        start=start, to=to,
        latency=there[0], rate=there[1], back_latency=there[2], back_rate=there[3],
        **stages,
    )  # fmt: skip


def stage_devices(order: tuple[int, ...], k: int, r: int) -> tuple[int, ...]:
    """The devices of a stage of width r that brings the devices in use to k."""
    return order[len(order) - k : len(order) - k + r]


def _stages_on(
    problem: Problem,
    order: tuple[int, ...],
    stages: Sequence[tuple[int, int]],
) -> dict[str, Floats]:
    """The fields of `kernels.Moves` that a stage's devices decide, for stages (k, r); 0 for the
    first, which stands for none.
    """
    topology, kinds = problem.topology, first_of_each_type(problem.topology)
    slow = slowdowns(problem, order)
    speed = np.array([slow[d] for d in order])
    kind = np.array([list(kinds).index(topology.devices[d].type) for d in order])
    rooms = [limit_bytes(problem, order, d) - least_reserve_bytes(problem, d) for d in order]
    room = np.array(rooms, dtype=float)
    known = problem.calibration
    own = [topology.devices[d].type == known.device_type for d in order]
    steps = [
        (known.steps if mine else 1.0) * step_s(problem, 1, device_type(topology, d))
        for d, mine in zip(order, own, strict=True)
    ]
    step = speed * np.array(steps)
    launch = np.array([launch_s(problem, d) for d in order])
    decided = {name: np.zeros(len(stages)) for name in ("limit", "step", "launch", "post", "copy")}
    decided["factor"] = np.zeros((len(kinds), len(stages)))
    decided["type_launch"] = np.zeros((len(kinds), len(stages)))
    for c, (k, r) in enumerate(stages):
        if k == 0:
            continue
        where = slice(len(order) - k, len(order) - k + r)
        decided["limit"][c], decided["step"][c] = room[where].min(), step[where].max()
        decided["launch"][c] = launch[where].max()
        if any(own[where]):
            decided["post"][c], decided["copy"][c] = known.post_s, known.copy_s_per_byte
        for row in range(len(kinds)):
            there = kind[where] == row
            decided["factor"][row, c] = speed[where].max(where=there, initial=0.0)
            slowed = speed[where] * launch[where]
            decided["type_launch"][row, c] = slowed.max(where=there, initial=0.0)
    return decided | _sums_on(problem, order, stages)


def _sums_on(
    problem: Problem, order: tuple[int, ...], stages: Sequence[tuple[int, int]]
) -> dict[str, Floats]:
    """The fields of `kernels.Moves` about sums of gradients, and about what replicas exchange that
    keep parts.
    """
    topology = problem.topology
    # Sums between other types of devices are left as they are.
    of_sums = sum_factor(problem, order)
    latency, width = pair_widths(topology)
    # A table may beat the best link, and so may a sum inside hosts and over them.
    one_ring = not topology.tables and len({topology.devices[d].host for d in order}) == 1
    of_rings = ("ring_latency", "tie_latency", "beside")
    decided = {name: np.zeros(len(stages)) for name in of_rings}
    decided |= {name: np.full(len(stages), math.inf) for name in ("ring_rate", "tie_rate")}
    decided |= {name: np.zeros((2, len(stages))) for name in ("gather", "scatter", "part_sum")}
    rings: dict[tuple[int, int], tuple[float, float, bool]] = {}
    lines: dict[tuple[int, int], Lines] = {}
    for c, (k, r) in enumerate(stages):
        where = slice(len(order) - k, len(order) - k + r)
        if k > r and one_ring:
            pairs = np.ix_(order[where], order[len(order) - k + r :])
            decided["tie_latency"][c] = of_sums * latency[pairs].min()
            decided["tie_rate"][c] = width[pairs].max() / of_sums
        if r < 2:
            continue
        devices = tuple(sorted(order[where]))
        if (k, r) not in rings:
            beside = sums_overlap_compute(problem, order, devices)
            rings[k, r] = *ring_links(topology, devices), beside
        latency_s, rate, decided["beside"][c] = rings[k, r]
        decided["ring_latency"][c] = of_sums * latency_s
        decided["ring_rate"][c] = rate / of_sums
        if levels_of(problem, r) > 1:
            if (k, r) not in lines:
                lines[k, r] = lines_of(problem, devices, of_sums)
            for name, line in zip(("gather", "scatter", "part_sum"), lines[k, r], strict=True):
                decided[name][:, c] = line
    return decided


def _weights(problem: Problem, widths: Ints) -> Floats:
    """What a stage's period counts in the objective, by its width; 0 where there is no stage."""
    rounds = -(-problem.num_microbatches // np.maximum(widths, 1))
    gaps = rounds if problem.training.schedule.is_asynchronous else rounds - 1.0
    weights = {
        Objective.ITERATION: gaps,
        Objective.BOTTLENECK: 1.0 / np.maximum(widths, 1),
        Objective.LATENCY: np.zeros(len(widths)),
    }[problem.training.objective]
    return np.where(widths > 0, weights, 0.0)
