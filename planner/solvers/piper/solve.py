"""Piper's problem, solved exactly: the smallest largest stage time per sample on K devices.

Variables: a chain of downsets {} = D_0, D_1, ..., D_S = everything of the layers; for stage s,
D_s minus D_{s-1}, degrees t_s and d_s of tensor and data parallelism, and a configuration of
degree t_s for each of its layers.

    minimise   max over s of the time of stage s                   (`costs.py`)
    subject to (1) sum of t_s d_s <= K
               (2) the memory of stage s with ceil((d_s + ... + d_S) / d_s) samples in flight
                   is within the device's
               (3) d_s divides the batch, and d_1 + ... + d_S <= the batch

For each stage and t, `stages` lists those choices of configurations that no other one beats in
every figure: computation and transfers, synchronisation, A and B. That makes the inner
choice exact for every d and number of samples in flight. For a target time, `fewest_in_flight`
finds out whether there is a plan: a dynamic program over downsets and devices whose value is the
sum of the d. The target is bisected, at the end over the times that stages can have.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import pairwise

import numpy as np

from planner.artefacts.formats.piper import (
    RECOMPUTED,
    VANILLA,
    PiperGraph,
    Tmpc,
    layer_predecessors,
)
from planner.artefacts.options import Recompute
from planner.artefacts.problem import Status
from planner.solvers.clock import clock
from planner.solvers.graphs.downsets import Downsets, members
from planner.solvers.graphs.windows import enumerated
from planner.solvers.piper import costs, kernels
from planner.solvers.piper.kernels import Degrees, Layers, Stages
from planner.support.arrays import Floats, Ints, csr

# More would be some millions of stages.
DEFAULT_MAX_DOWNSETS = 2_000
# The number to begin with: a second or less.
FEW_DOWNSETS = 200
# For the choices of a stage while they are made; an eighth is kept.
ROOM = 2_048
# The bisection ends with the list of what is left when the bounds are so close.
CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class PiperOptions:
    """What is planned for, and what plans may do.

    Attributes:
        num_devices: K.
        memory_bytes: of each device.
        bandwidth_bytes_per_s: between any two.
        batch: samples per batch.
        recompute: none leaves out the configurations that recompute activations, full the vanilla
            ones of layers that have others.
        max_tensor_parallel: the largest t; None for no limit.
        max_data_parallel: the largest d; None for no limit.
        max_downsets: the most to look at; None for no limit.
    """

    num_devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    batch: int
    recompute: Recompute = Recompute.AUTO
    max_tensor_parallel: int | None = None
    max_data_parallel: int | None = None
    max_downsets: int | None = DEFAULT_MAX_DOWNSETS


@dataclass(frozen=True, slots=True)
class PiperStage:
    """One stage of a plan.

    Attributes:
        layers: their positions in the file, ascending.
        tensor_parallel: t.
        data_parallel: d.
        replicas_to_the_end: the sum of d over this stage and all that follow.
        tmpcs: the configuration of each layer, by its place in the file.
    """

    layers: tuple[int, ...]
    tensor_parallel: int
    data_parallel: int
    replicas_to_the_end: int
    tmpcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PiperPlan:
    """An answer.

    Attributes:
        status: optimal over all plans; feasible if only some downsets or choices were looked at;
            infeasible if there is no plan; unknown if only some were looked at and none was found.
        stages: in topological order; empty if there are none.
        in_time: False where the clock cut the search: the plan is the best one by then.
    """

    status: Status
    stages: tuple[PiperStage, ...]
    in_time: bool = True


LATE = PiperPlan(Status.UNKNOWN, (), in_time=False)


@dataclass(frozen=True, slots=True)
class _Found:
    """The best plan so far of a search.

    Attributes:
        time_s: its largest stage time; inf without one.
        rows: of `kernels.walk`; None without one.
        in_time: False where the clock cut the search.
    """

    time_s: float
    rows: Ints | None
    in_time: bool = True


def allowed(tmpcs: Sequence[Tmpc], recompute: Recompute) -> list[int]:
    """Which configurations of a layer, for one degree, may be chosen: see `PiperOptions`."""
    barred = {Recompute.NONE: RECOMPUTED, Recompute.FULL: VANILLA}.get(recompute)
    choices = [x for x, tmpc in enumerate(tmpcs) if tmpc.id != barred]
    return choices if choices or recompute is Recompute.NONE else list(range(len(tmpcs)))


def plan(graph: PiperGraph, options: PiperOptions, time_limit_s: float = math.inf) -> PiperPlan:
    """The plan with the smallest largest stage time. A few downsets are looked at first, to have a
    plan when the time is over.

    Args:
        time_limit_s: of processor time; compiling does not count.
    """
    asked, best, best_s = options.max_downsets, LATE, math.inf
    few = max(FEW_DOWNSETS, len(graph.nodes) + 1)
    with clock(time_limit_s) as left_s:
        for most in [few, asked] if asked is None or few < asked else [asked]:
            answer, time_s = _plan_within(graph, options, most, left_s)
            if not answer.in_time and time_s >= best_s:
                return replace(best, in_time=False)
            best, best_s = answer, time_s
            if not best.in_time or best.status in (Status.OPTIMAL, Status.INFEASIBLE):
                break
    return best


def _plan_within(
    graph: PiperGraph,
    options: PiperOptions,
    max_downsets: int | None,
    left_s: Callable[[], float],
) -> tuple[PiperPlan, float]:
    """The best plan over some downsets, and its largest stage time in s."""
    feeds = layer_predecessors(graph)
    order = list(TopologicalSorter(dict(enumerate(feeds))).static_order())
    tensor = sorted({int(t) for node in graph.nodes for t in node.tmpcs})
    tensor = [t for t in tensor if t <= (options.max_tensor_parallel or options.num_devices)]
    if not tensor:
        return PiperPlan(Status.INFEASIBLE, ()), math.inf
    subsets, whole, in_time = enumerated(feeds, order, max_downsets, left_s)
    most = min(options.batch, options.num_devices)
    widest = min(most, options.max_data_parallel or most)
    data = [d for d in range(1, widest + 1) if options.batch % d == 0]
    degrees = Degrees(np.array(tensor), np.array(data), options.num_devices, most)
    layers, tmpcs = _layers(graph, tensor, options)
    limits = len(tensor), float(options.memory_bytes), most
    stages, complete, listed = _listed(subsets, layers, limits, left_s)
    if not listed:
        return LATE, math.inf
    found = _search(stages, degrees, _work(subsets, layers, tensor), left_s)
    in_time = in_time and found.in_time
    exact = complete and whole and in_time
    if found.rows is None:
        status = Status.INFEASIBLE if exact else Status.UNKNOWN
        return PiperPlan(status, (), in_time), math.inf
    chosen, i = [], 0
    for j, t, d, total in found.rows.tolist():
        stage = members(subsets.masks[j] & ~subsets.masks[i])
        x = tensor.index(t)
        picks = _picks(layers, len(tensor), x, stage, d, total, options)
        chosen.append(PiperStage(tuple(stage), t, d, total, tuple(tmpcs[o] for o in picks)))
        i = j
    status = Status.OPTIMAL if exact else Status.FEASIBLE
    return PiperPlan(status, tuple(chosen), in_time), found.time_s


def _listed(
    subsets: Downsets,
    layers: Layers,
    limits: tuple[int, float, int],
    left_s: Callable[[], float],
) -> tuple[Stages, bool, bool]:
    """`kernels.stages`, once more where compiling it took the time.

    Args:
        limits: number of degrees, bytes of a device, most samples in flight.
    """
    num_degrees, memory_bytes, most = limits
    while True:
        end_s = time.process_time() + left_s()
        listed = kernels.stages(subsets, layers, num_degrees, memory_bytes, ROOM, most, end_s)
        if listed[2] or time.process_time() <= end_s or left_s() <= 0:
            return listed


def _layers(
    graph: PiperGraph, tensor: Sequence[int], options: PiperOptions
) -> tuple[Layers, list[int]]:
    """The costs of layers, and the place in the file of each configuration among its siblings.
    Configurations that are worse than a sibling in every way are left out.
    """
    at = {node.id: v for v, node in enumerate(graph.nodes)}
    near: list[list[tuple[int, float, bool]]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        near[at[edge.dest]].append((edge.source, edge.bytes, True))
        near[at[edge.source]].append((edge.dest, edge.bytes, False))
    bandwidth, batch = options.bandwidth_bytes_per_s, options.batch
    counts, rows, tmpcs = [0], [], []
    width = 4 + max(map(len, near))
    for node, neighbours in zip(graph.nodes, near, strict=True):
        for t in tensor:
            siblings = node.tmpcs.get(str(t), ())
            kept: list[tuple[int, Floats]] = []
            for x in allowed(siblings, options.recompute):
                tmpc, row = siblings[x], np.zeros(width)
                sync = costs.sync_s(tmpc.parameter_bytes, batch, bandwidth)
                row[:4] = tmpc.time_s, sync, tmpc.memory_a_bytes, tmpc.memory_b_bytes
                for z, (other, sent, forward) in enumerate(neighbours):
                    syncs = tmpc.sync_forward_bytes if forward else tmpc.sync_backward_bytes
                    row[4 + z] = costs.transfer_s(sent, syncs[str(other)], bandwidth)
                if not any((better <= row).all() for _, better in kept):
                    kept = [(y, worse) for y, worse in kept if not (row <= worse).all()]
                    kept.append((x, row))
            counts.append(counts[-1] + len(kept))
            rows += [row for _, row in kept]
            tmpcs += [x for x, _ in kept]
    table = np.array(rows).reshape(-1, width)
    start, items = csr([[at[other] for other, _, _ in neighbours] for neighbours in near])
    figures, extra = table[:, :4].copy(), table[:, 4:].copy()
    crossing = np.zeros((len(counts) - 1, width - 4))
    for x, (first, last) in enumerate(pairwise(counts)):
        if first < last:
            crossing[x] = extra[first:last].min(axis=0)
            extra[first:last] -= crossing[x]
    mixed = bool((extra > 0).any())
    return Layers(np.array(counts), figures, crossing, extra, mixed, start, items), tmpcs


def _work(subsets: Downsets, layers: Layers, tensor: Sequence[int]) -> Floats:
    """(n,) devices times s per sample that the layers of each downset take at the least; inf
    where one of them cannot run.
    """
    degrees = len(tensor)
    num_layers = len(layers.near_start) - 1
    work = np.full(num_layers, np.inf)
    for v in range(num_layers):
        for x, t in enumerate(tensor):
            first, last = layers.option_start[v * degrees + x : v * degrees + x + 2]
            if first < last:
                work[v] = min(work[v], t * layers.figures[first:last, 0].min())
    bits = np.unpackbits(subsets.masks.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    return np.asarray(np.where(bits[:, :num_layers], work, 0.0).sum(axis=1), dtype=np.float64)


def _search(stages: Stages, degrees: Degrees, work: Floats, left_s: Callable[[], float]) -> _Found:
    """The best answer; the best one by the end of the time."""

    def attempt(target_s: float) -> _Found:
        """An answer that keeps a target; once more where compiling took the time."""
        done = False
        while not done:
            end_s = time.process_time() + left_s()
            least, done = kernels.fewest_in_flight(stages, degrees, work, target_s, end_s)
            if not done and left_s() <= 0:
                return _Found(math.inf, None, in_time=False)
        if least[0, -1] >= kernels.NEVER:
            return _Found(math.inf, None)
        return _Found(*kernels.walk(stages, degrees, least, target_s))

    best = _Found(math.inf, None)
    if not np.isfinite(work[-1]):
        return best
    # Stages may take exactly what the bound says, but for rounding.
    low = high = float(work[-1]) / degrees.num_devices * (1 - 1e-9)
    slowest = float(stages.figures[:, :2].sum(axis=1).max(initial=low))
    slowest += float(stages.outside.max(initial=0.0))
    step = 1 + 1 / 64
    while best.rows is None:
        low, high = high, min(slowest, max(high * step, slowest * 1e-9))
        best, step = attempt(high), step * step
        if best.rows is None and (high >= slowest or not best.in_time):
            return best
    while best.time_s > low * (1 + CLOSE):
        middle = (low + best.time_s) / 2
        answer = attempt(middle)
        if not answer.in_time:
            return replace(best, in_time=False)
        low, best = (middle, best) if answer.rows is None else (low, answer)
    times = np.sort(kernels.times_between(stages, degrees, low, best.time_s))
    first, last = 0, len(times)
    while first < last:
        middle = (first + last) // 2
        answer = attempt(float(times[middle]))
        if not answer.in_time:
            return replace(best, in_time=False)
        if answer.rows is None:
            first = middle + 1
        else:
            last, best = middle, answer
    return best


def _picks(
    layers: Layers, num_degrees: int, x: int, stage: Sequence[int], d: int, total: int,
    options: PiperOptions,
) -> list[int]:  # fmt: skip
    """The fastest configurations of a stage's layers that fit: with d and the samples in flight
    known, a configuration is no more than a time and a size.
    """
    serial, sync, a, b = layers.figures.T
    known = np.zeros_like(layers.figures)
    known[:, 0] = costs.stage_time_s(serial, sync, d)
    known[:, 3] = costs.memory_bytes(a, b, costs.in_flight(total, d))
    priced = layers._replace(figures=known, extra=layers.extra / d)
    inside = np.zeros(len(layers.near_start) - 1, dtype=np.bool_)
    inside[list(stage)] = True
    choices = np.zeros((2, ROOM, 4))
    picks = np.zeros((2, ROOM, len(stage)), dtype=np.int32)
    limit, nothing = float(options.memory_bytes), -1.0
    count, _ = kernels.choose(
        priced, num_degrees, x, np.array(stage), (0, len(stage)), inside, limit, nothing, 1,
        choices, picks, 1,
    )  # fmt: skip
    return [int(o) for o in picks[0, np.argmin(choices[0, :count, 0])]]
