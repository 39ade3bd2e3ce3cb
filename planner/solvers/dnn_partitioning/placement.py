"""dnn-partitioning's problem without contiguity: nodes of one color share a device, and that is all
(`solvers/bottleneck/model.py`, whose items are the color classes; a device pays for each output
that it has a part of, a CPU of the host does not). The search starts from the best contiguous
split.

Source: Tarnawski et al., NeurIPS 2020, section 3 (throughput), the integer program.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.artefacts.formats.dnn_partitioning import MILLI, DnnGraph, colors
from planner.solvers.bottleneck import search as bottleneck
from planner.solvers.bottleneck.model import BottleneckNet, BottleneckProblem
from planner.solvers.dnn_partitioning.costs import outputs
from planner.solvers.dnn_partitioning.solve import DnnSplit, DnnStage
from planner.solvers.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class DnnPlacement:
    """An answer.

    Attributes:
        split: what each device does, as stages by their first nodes; status of all placements.
        bound_s: no placement has a smaller largest load.
        reproducible: False where the clock cut the search.
        note: what the user should know.
    """

    split: DnnSplit
    bound_s: float
    reproducible: bool
    note: str


def place(
    graph: DnnGraph,
    num_devices: int,
    memory_bytes: float,
    known: Sequence[DnnStage],
    time_limit_s: float,
    seed: int = 0,
    engine: Engine | None = None,
) -> DnnPlacement:
    """The placement with the smallest largest load, contiguous or not.

    Args:
        num_devices: k; the CPUs are the graph's.
        memory_bytes: of each device.
        known: the stages of a contiguous split to start from; none if none is known.
        engine: gurobi, or else HiGHS.
    """
    problem, color = bottleneck_of(graph, num_devices, memory_bytes), colors(graph)
    starts = [_placement(known, color, num_devices)] if known else []
    answer = bottleneck.solve(problem, starts, time_limit_s, seed=seed, engine=engine)
    stages: tuple[DnnStage, ...] = ()
    if answer.on is not None:
        nodes: dict[int, list[int]] = {}
        for v, c in enumerate(color):
            nodes.setdefault(answer.on[c], []).append(v)
        stages = tuple(DnnStage(tuple(vs), p >= num_devices) for p, vs in nodes.items())
    split = DnnSplit(answer.status, stages, 0)
    return DnnPlacement(split, answer.bound_s, answer.reproducible, answer.note)


def bottleneck_of(graph: DnnGraph, num_devices: int, memory_bytes: float) -> BottleneckProblem:
    """The problem, CPUs behind the devices; arguments as `place`."""
    color = colors(graph)
    num = num_devices + graph.num_cpus
    work = np.zeros((max(color, default=-1) + 1, num))
    size = np.zeros(len(work))
    for node, c in zip(graph.nodes, color, strict=True):
        work[c, :num_devices] += node.time_ms * MILLI if node.supported else np.inf
        work[c, num_devices:] += node.cpu_time_ms * MILLI
        size[c] += node.size_bytes
    crossing: dict[tuple[int, ...], float] = {}
    for cost_ms, touched in outputs(graph):
        items = tuple(sorted({color[v] for v in touched}))
        if len(items) > 1 and cost_ms > 0:
            crossing[items] = crossing.get(items, 0.0) + cost_ms * MILLI
    room = np.full(num, np.inf)
    room[:num_devices] = memory_bytes
    alike = (tuple(range(num_devices)), tuple(range(num_devices, num)))
    return BottleneckProblem(
        work_s=work,
        nets=tuple(BottleneckNet(items[0], items[1:], cost) for items, cost in crossing.items()),
        pays=tuple(p < num_devices for p in range(num)),
        latency_s=np.zeros((num, num)),
        seconds_per_byte=np.zeros((num, num)),
        kept=tuple(((c,), float(size[c])) for c in range(len(work)) if size[c] > 0),
        room_bytes=room,
        alike=tuple(known for known in alike if known),
    )


def _placement(
    stages: Sequence[DnnStage], color: Sequence[int], num_devices: int
) -> tuple[int, ...]:
    """Device of each color class."""
    on, free = [0] * (max(color) + 1), [0, num_devices]
    for stage in stages:
        for v in stage.nodes:
            on[color[v]] = free[stage.cpu]
        free[stage.cpu] += 1
    return tuple(on)
