"""Replicas that keep parts of their stage (`resharding/over_replicas.py`) as the antichain solver's
kernel takes them: what of each block lies in parts, what its passes exchange and keep then, and how
long that takes on the devices of a stage.

All is read off the whole model as one stage of two replicas that share. What a block exchanges does
not depend on what else is in its stage, except for parameters that several blocks use: these lie in
parts only where all of them are in one stage.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import ITEM_BYTES, Parameter, holders, parameters_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import CHUNKS
from planner.artefacts.strategy import Stage
from planner.artefacts.topology import CollectiveKind
from planner.costs.local_stage import LocalStage, local_stage
from planner.costs.operators import first_of_each_type
from planner.costs.passes import block_workspace_bytes, operator_workspaces
from planner.costs.process_memory import least_reserve_bytes
from planner.costs.stage_memory import limit_bytes, memory_of, search_bytes, static_bytes
from planner.costs.stage_pass import sums_of_gradients_s
from planner.costs.transfers import half_line
from planner.resharding import reshardings
from planner.resharding.conversion import LOCAL
from planner.resharding.sums import parameter_specs
from planner.solvers.antichain import kernels
from planner.solvers.graphs.coarsen import Coarsening
from planner.solvers.graphs.downsets import Downsets, sums_over
from planner.support.arrays import Floats
from planner.support.memo import remembered

IN_PASSES = (2, 3)
"""The levels at which passes exchange something."""


@remembered
def may_share(problem: Problem) -> bool:
    """Whether replicas may keep parts: where a device has no room for the whole model and what it
    keeps of one microbatch.
    """
    topology, training = problem.topology, problem.training
    devices = range(len(topology.devices))
    if training.schedule.is_asynchronous or len(devices) == 1:
        return False
    need = memory_of(problem.profile, range(len(problem.profile.operators)))
    static = static_bytes(need.static.parameter, need.static.trainable, problem)
    workspace = max(need.forward_workspace_bytes, need.backward_workspace_bytes)
    room = min(limit_bytes(problem, devices, d) - least_reserve_bytes(problem, d) for d in devices)
    return search_bytes(static, need.kept_bytes, 0, 0, workspace, 1, 1) > room


def levels_of(problem: Problem, width: int) -> int:
    """The number of levels that a stage of some replicas chooses from: with level 0, at which none
    shares; from 2 on all of them have equally many microbatches.
    """
    if width < 2 or not may_share(problem):
        return 1
    return 2 if problem.num_microbatches % width else 4


class Lines(NamedTuple):
    """Start in s, and s per byte, of what replicas exchange: of gathers and scatters in a pass or
    after a step, and of the sums of gradients of which each keeps a part.
    """

    gather: tuple[float, float]
    scatter: tuple[float, float]
    sum: tuple[float, float]


def lines_of(problem: Problem, devices: tuple[int, ...], of_sums: float) -> Lines:
    """The lines of the replicas of a stage.

    Args:
        devices: at least two.
        of_sums: factor of the times of sums.
    """
    known, own = problem.calibration, problem.topology.devices
    gather = half_line(problem.topology, devices, CollectiveKind.ALL_GATHER)
    scatter = half_line(problem.topology, devices, CollectiveKind.REDUCE_SCATTER)

    def corrected(line: tuple[float, float]) -> tuple[float, float]:
        if not all(own[d].type == known.device_type for d in devices):
            return line
        return known.collectives * line[0] + known.collective_s, known.collectives * line[1]

    start, per_byte = scatter
    return Lines(corrected(gather), corrected(scatter), (of_sums * start, of_sums * per_byte))


def parts_of(problem: Problem, coarse: Coarsening, subsets: Downsets) -> kernels.Parts:
    """What lies in parts where replicas share, as `kernels.Parts` has it; nothing where they may
    not.
    """
    if not may_share(problem):
        return kernels.Parts(np.zeros((kernels.NUM_PARTS, 1)), np.zeros((kernels.NUM_PARTS, 1)), 0)
    graph = problem.profile.graph
    figures = _figures(problem)
    block_of = {v: b for b, block in enumerate(coarse.blocks) for v in block}
    sums, tied = np.zeros((kernels.NUM_PARTS, len(coarse.blocks))), []
    for parameter in graph.parameters:
        used_in = {block_of[v] for v in holders(graph)[parameter.name]}
        if len(used_in) == 1:
            sums[:, used_in.pop()] += figures[parameter.name]
        elif parameter.trainable:  # in the order of `kernels.Sets.tied`
            tied.append(figures[parameter.name])
    for v, size in enumerate(_saved_bytes(problem)):
        sums[kernels.SAVED, block_of[v]] += size
    return kernels.Parts(
        sums=np.array([sums_over(subsets, row) for row in sums]),
        tied=np.array(tied).reshape(-1, kernels.NUM_PARTS).T.copy(),
        largest=float(max(one.bytes for one in graph.parameters)),
    )


def _shared(problem: Problem, level: int) -> Stage:
    """The whole model on two devices that share."""
    names = tuple(one.name for one in problem.profile.graph.operators)
    stage = Stage.whole(names, (0, 1), warmup=1, recompute=False)
    return replace(stage, over=2, zero=level)


@remembered
def _figures(problem: Problem) -> Mapping[str, Floats]:
    """By parameter, the rows of `kernels.Parts`."""
    graph = problem.profile.graph
    stage, known = _shared(problem, 3), parameters_by_name(graph)
    rows = {name: np.zeros(kernels.NUM_PARTS) for name in known}
    for name, lies in parameter_specs(stage, graph).items():
        size = known[name].bytes
        if CHUNKS in lies.parameter:
            rows[name][kernels.CUT], rows[name][kernels.ROW] = size, _row_bytes(known[name])
        if CHUNKS in lies.state and known[name].trainable:
            rows[name][kernels.STEPPED] = size
    for name, added_s in _added_s(problem).items():
        rows[name][kernels.ADDED] = added_s * bool(rows[name][kernels.STEPPED])
    for copy in reshardings(stage, graph):
        if copy.tensor not in known:
            continue
        row, size = rows[copy.tensor], known[copy.tensor].bytes
        gathered = size / ITEM_BYTES[known[copy.tensor].dtype] * ITEM_BYTES[copy.dtype]
        gathers = sum(step.kind not in LOCAL for step in copy.forward)
        scatters = sum(step.kind not in LOCAL for step in copy.backward)
        for count, total, times, each in (
            (kernels.GATHERS, kernels.GATHERED, gathers, gathered),
            (kernels.SCATTERS, kernels.SCATTERED, scatters, size),
            (kernels.AGAINS, kernels.AGAIN_BYTES, gathers * len(copy.again), gathered),
        ):
            row[count] += times
            row[total] += times * each
    return rows


def _added_s(problem: Problem) -> Mapping[str, float]:
    """By trained parameter, the time of the sums of its gradients on the slowest type of device."""
    graph, types = problem.profile.graph, first_of_each_type(problem.topology).values()
    most_s = np.max([sums_of_gradients_s(problem, device) for device in types], axis=0)
    known = parameters_by_name(graph)
    found = {one.name: 0.0 for one in graph.parameters if one.trainable}
    for v, operator in enumerate(graph.operators):
        trained = {name: prod(known[name].shape) for name in operator.parameters if name in found}
        for name, elements in trained.items():
            found[name] += float(most_s[v]) * elements / max(1, sum(trained.values()))
    return found


def _row_bytes(parameter: Parameter) -> float:
    return parameter.bytes / max(1, parameter.shape[0])


@remembered
def _saved_bytes(problem: Problem) -> tuple[float, ...]:
    """Per operator, the bytes that it keeps for its backward where parameters are whole, and makes
    again at level 3.
    """
    local = local_stage(problem.profile, _shared(problem, 3))
    known, tensors = parameters_by_name(problem.profile.graph), _copied_bytes(local)
    place = {v: i for i, v in enumerate(local.graph_index) if v >= 0}
    saved = []
    for v, cost in enumerate(problem.profile.operators):
        here = local.profile.operators[place[v]]
        copies = {name for name in here.stash_tensors if name in tensors} - known.keys()
        kept = here.stash_private_bytes + sum(tensors[name] for name in copies)
        saved.append(float(cost.stash_private_bytes - kept))
    return tuple(saved)


def _copied_bytes(local: LocalStage) -> Mapping[str, int]:
    """By name, the bytes of the copies of parameters that are gathered."""
    made = {one.name: one.bytes for one in local.profile.graph.tensors}
    parameters = parameters_by_name(local.profile.graph)
    operators = local.profile.graph.operators
    return {
        operators[i].outputs[0]: made[operators[i].outputs[0]]
        for i, copy in local.conversions.items()
        if copy.tensor in parameters and any(step.kind not in LOCAL for step in copy.forward)
    }


def workspaces(
    profile: Profile, blocks: Iterable[Sequence[int]], *, cautious: bool
) -> list[float]:  # fmt: skip
    """Per block, bytes that live inside one pass.

    Args:
        blocks: operators of the profile.
        cautious: see `blocks.sets_of`.
    """
    if cautious:
        alone = operator_workspaces(profile)
        return [max(alone[v] for v in block) for block in blocks]
    return [block_workspace_bytes(profile, block) for block in blocks]


def shared_workspaces(
    problem: Problem, coarse: Coarsening, *, cautious: bool
) -> Iterator[list[float]]:  # fmt: skip
    """The same where replicas share, for each of `IN_PASSES`."""
    for level in IN_PASSES:
        local = local_stage(problem.profile, _shared(problem, level))
        inside = _with_conversions(local)
        blocks = [[i for v in block for i in inside[v]] for block in coarse.blocks]
        yield workspaces(local.profile, blocks, cautious=cautious)


def _with_conversions(local: LocalStage) -> Mapping[int, Sequence[int]]:
    """By operator of the graph, its index in a local stage, and those of the reshardings that run
    right before it.
    """
    inside: dict[int, list[int]] = {}
    before: list[int] = []
    for i, v in enumerate(local.graph_index):
        before.append(i)
        if v >= 0:
            inside[v], before = before, []
    return inside
