"""Memory of a device that is no tensor's: what the process takes that runs there.

    process   = context, with the kernels and handles of libraries + communicators of its groups
    reserve   = the larger of the process and of what plans leave free (`--reserve`)
    workspace = buffers of libraries that multiply matrices, one of each thread that does

What is left free is there for runtime and libraries, too, so neither counts twice. Workspaces lie
among the tensors (in `torch.cuda.max_memory_allocated`), all else only where a driver counts
(`nvidia-smi`). Groups are those of a launch (launcher/groups.py): one of each ordered pair of
devices that sends, one of all devices of each sum of gradients, or of those that keep the same part
of it, and one of each line of a mesh. Devices that are processes on a CPU take nothing of this
kind: their type has no `ProcessMemory`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from planner.artefacts.graph import Graph
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, Strategy, indices_of
from planner.artefacts.topology import device_type
from planner.resharding.over_replicas import with_axes
from planner.schedules.actions import ActionKind, Code, Program
from planner.support.memo import remembered

_MULTIPLYING = frozenset({"Gemm", "MatMul", "Einsum"})
"""Operators that call such a library themselves; convolutions have workspaces of their own."""


def least_reserve_bytes(problem: Problem, device: int) -> int:
    """The least memory of a device that tensors cannot have, whatever the plan is."""
    process = device_type(problem.topology, device).process
    return max(problem.training.reserve, process.context_bytes)


def process_bytes(problem: Problem, strategy: Strategy, lists: Program) -> Mapping[int, int]:
    """What the process of each used device takes beside tensors, in bytes.

    Args:
        lists: of the strategy.
    """
    types = {d: device_type(problem.topology, d).process for d in lists.code.devices.tolist()}
    if not any(one.group_bytes or one.first_group_bytes for one in types.values()):
        return {device: one.context_bytes for device, one in types.items()}
    groups = num_groups(strategy, problem.profile.graph, lists)
    return {device: one.with_groups(groups[device]) for device, one in types.items()}


def num_groups(strategy: Strategy, graph: Graph, lists: Program) -> Counter[int]:
    """By device, the number of groups with communicators that it is in."""
    groups = Counter[int]()
    for pair in _pairs(lists.code):
        groups.update(pair)
    summed = {some for one in lists.sums for some in one.shards or (one.devices,)}
    for some in summed:
        if len(some) > 1:
            groups.update(some)
    for stage in with_axes(strategy, graph).stages:
        lines = sum(size > 1 for size in stage.mesh)
        groups.update({device: lines for group in stage.groups for device in group})
    return groups


def _pairs(code: Code) -> Iterable[tuple[int, int]]:
    """The ordered pairs of devices that send."""
    sends = code.kind == ActionKind.SEND
    source, target = code.devices[code.owner()[sends]], code.peer[sends]
    size = int(code.devices.max(initial=0)) + 1
    for pair in np.unique(source.astype(np.int64) * size + target).tolist():
        yield divmod(pair, size)


def library_bytes(problem: Problem, stages: Iterable[Stage], device: int) -> int:
    """Workspaces of libraries that multiply matrices on a device, in bytes.

    Args:
        stages: that the device runs.
    """
    own, graph = (
        device_type(problem.topology, device).process.workspace_bytes,
        problem.profile.graph,
    )
    return own if own and any(_multiplies(one, graph) for one in stages) else 0


@remembered
def _multiplies(stage: Stage, graph: Graph) -> bool:
    return any(graph.operators[v].type in _MULTIPLYING for v in indices_of(stage, graph))
