"""The evaluator: times and memory of one strategy, by the primitives of this folder. The judge
(`planning/judge.py`) adds the simulated times.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.artefacts.plan import MemoryParts, StagePrediction
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    Strategy,
    in_parts,
    shares_devices,
    stages_by_device,
    used_devices,
)
from planner.costs.actions import ActionCosts, action_costs
from planner.costs.closed_form import StageCost, objective_s
from planner.costs.peak_memory import peak_memory
from planner.costs.process_memory import library_bytes, process_bytes
from planner.costs.stage_costs import stage_costs, stage_transfers
from planner.costs.stage_memory import StageMemory, device_memory, limit_bytes, stage_memory
from planner.resharding.checks import all_violations
from planner.resharding.sums import gradient_sums
from planner.schedules.actions import ActionKind, Code, Program
from planner.schedules.dry_run import dry_run, meetings_of
from planner.schedules.flows import flow, steady_minibatches
from planner.schedules.program import program
from planner.support.memo import remembered
from planner.support.units import format_bytes, format_bytes_apart

# Work per second of an ordinary core: operators priced, those of split stages, actions of a program
# made and simulated, and computations listed of devices that run several stages. Measured on a core
# at 2.9 GHz shared with others, on Llama 6.7B with 8 to 64 devices.
_OPERATORS_PER_S, _SPLIT_PER_S, _ACTIONS_PER_S, _LISTED_PER_S = 30_000, 7_000, 700_000, 8_000


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One strategy, priced.

    Attributes:
        program: its action lists, proved to run to their end: of an iteration or, under an
            asynchronous schedule, of a flow that reaches the steady state.
        costs: times and sizes of the actions.
        stages: as the closed form sees them.
        times: of each stage, as the action lists have it.
        needs: of each stage, the memory of one replica.
        memory: the peak of each used device.
        shortage: why it does not fit, or None.
    """

    program: Program
    costs: ActionCosts
    stages: tuple[StageCost, ...]
    times: tuple[StagePrediction, ...]
    needs: tuple[StageMemory, ...]
    memory: Mapping[int, MemoryParts]
    shortage: str | None


class Priced(NamedTuple):
    """All of a strategy that needs no action lists; as in `Evaluation`."""

    costs: ActionCosts
    stages: tuple[StageCost, ...]
    times: tuple[StagePrediction, ...]
    needs: tuple[StageMemory, ...]


@remembered(kept=2)
def evaluate(problem: Problem, strategy: Strategy) -> Evaluation:
    """Prices a strategy. The last ones are remembered: the judge asks for the one that a solver has
    evaluated.

    Raises:
        ValueError: if its structure is wrong or its schedule blocks, which is a solver's mistake.
    """
    graph = problem.profile.graph
    wrong = all_violations(strategy, graph, len(problem.topology.devices))
    if wrong:
        raise ValueError("; ".join(wrong))
    costs, stages, times, needs = priced(problem, strategy)
    if strategy.schedule.is_asynchronous:
        lists = flow(strategy, graph, steady_minibatches(strategy))
    else:
        lists = program(strategy, graph, times)
    blocked = dry_run(lists, meetings_of(strategy))
    if blocked:
        raise ValueError(blocked)
    memory = _memory(problem, strategy, lists, needs)
    return Evaluation(
        program=lists,
        costs=costs,
        stages=stages,
        times=times,
        needs=needs,
        memory=memory,
        shortage=_shortage(problem, strategy, memory),
    )


def _times(
    problem: Problem, strategy: Strategy, costs: ActionCosts, stages: Sequence[StageCost]
) -> Iterator[StagePrediction]:
    """The times of each stage, with its transfers where a device runs several."""
    shared = shares_devices(strategy)
    moved = stage_transfers(problem, strategy, costs) if shared else ((),) * len(stages)
    for one, transfers in zip(stages, moved, strict=True):
        yield StagePrediction(one.forward_s, one.backward_s, transfers)


def pricing_work_s(strategy: Strategy) -> float:
    """The work of a strategy's closed form, in seconds of an ordinary core."""
    split = sum(len(one.operators) for one in strategy.stages if in_parts(one))
    whole = sum(len(one.operators) for one in strategy.stages) - split
    return split / _SPLIT_PER_S + whole / _OPERATORS_PER_S


def evaluation_work_s(strategy: Strategy, evaluation: Evaluation) -> float:
    """The work of evaluating a strategy and of simulating it, in seconds of an ordinary core."""
    listed = len(strategy.stages) * strategy.num_microbatches if shares_devices(strategy) else 0
    made = len(evaluation.program.code) / _ACTIONS_PER_S + listed / _LISTED_PER_S
    return pricing_work_s(strategy) + made


def closed_form_s(problem: Problem, strategy: Strategy) -> float:
    """The problem's objective for a sound strategy in closed form, in s; needs no action lists."""
    training, stages = problem.training, priced(problem, strategy).stages
    return objective_s(stages, problem.num_microbatches, training.objective, training.schedule)


@remembered(kept=4)
def priced(problem: Problem, strategy: Strategy) -> Priced:
    """Prices a sound strategy, but for what follows from its action lists."""
    graph = problem.profile.graph
    sums, needs = gradient_sums(strategy, graph), _needs(problem, strategy)
    costs = action_costs(problem, strategy, sums, [need.static.state for need in needs])
    stages = stage_costs(problem, strategy, sums, costs)
    times = tuple(_times(problem, strategy, costs, stages))
    return Priced(costs, stages, times, tuple(needs))


def _needs(problem: Problem, strategy: Strategy) -> list[StageMemory]:
    """Per stage, the memory of one replica. Parameters and tensors that stages of one device share
    count once.
    """
    stages = strategy.stages
    if not shares_devices(strategy):
        return [stage_memory(problem.profile, stage) for stage in stages]
    needs: dict[int, StageMemory] = {}
    for mine in dict.fromkeys(stages_by_device(strategy).values()):
        needs |= device_memory(problem.profile, {s: stages[s] for s in mine})
    return [needs[s] for s in range(len(stages))]


def _memory(
    problem: Problem, strategy: Strategy, lists: Program, needs: Sequence[StageMemory]
) -> Mapping[int, MemoryParts]:
    """The peak of every used device, with what its process takes."""
    tensors, stages = _tensor_memory(problem, strategy, lists, needs), stages_by_device(strategy)
    process = process_bytes(problem, strategy, lists)
    return {
        device: replace(
            parts,
            workspace_bytes=parts.workspace_bytes
            + library_bytes(problem, [strategy.stages[s] for s in stages[device]], device),
            reserve_bytes=max(parts.reserve_bytes, process[device]),
            process_bytes=process[device],
        )
        for device, parts in tensors.items()
    }


def _tensor_memory(
    problem: Problem, strategy: Strategy, lists: Program, needs: Sequence[StageMemory]
) -> Mapping[int, MemoryParts]:
    """The same without it; replicas differ by their share of the microbatches."""
    code = lists.code
    position = {device: d for d, device in enumerate(code.devices.tolist())}
    if shares_devices(strategy):
        return {
            device: peak_memory(
                problem, strategy, code, position[device], {s: needs[s] for s in stages}
            )
            for device, stages in stages_by_device(strategy).items()
        }
    by_device = {}
    for s, stage in enumerate(strategy.stages):
        # One for each length of a list: those of the same length differ in numbers only; devices of
        # a mesh besides in the boxes that they exchange.
        peaks: dict[tuple[int, bytes], MemoryParts] = {}
        for device in stage.devices:
            d = position[device]
            mine = slice(code.start[d], code.start[d + 1])
            boxes = b"" if stage.sharding is None else _transfers(code, mine)
            key = int(mine.stop - mine.start), boxes
            if key not in peaks:
                peaks[key] = peak_memory(problem, strategy, code, d, {s: needs[s]})
            by_device[device] = peaks[key]
    return {device: by_device[device] for device in position}


def _transfers(code: Code, mine: slice) -> bytes:
    """The transfers of a list, to compare it with others."""
    moved = (code.kind[mine] == ActionKind.SEND) | (code.kind[mine] == ActionKind.RECEIVE)
    return np.where(moved, code.piece[mine], -1).tobytes()


def _shortage(
    problem: Problem, strategy: Strategy, memory: Mapping[int, MemoryParts]
) -> str | None:
    """The tightest device that is over its limit, in words for the user."""
    used = used_devices(strategy)
    over = [
        (memory[d].total_bytes - limit, s, d)
        for s, stage in enumerate(strategy.stages)
        for d in stage.devices
        if memory[d].total_bytes > (limit := limit_bytes(problem, used, d))
    ]
    if not over:
        return next(host_shortages(problem, memory), None)
    _, s, device = max(over, key=lambda one: (one[0], -one[2]))
    stages = stages_by_device(strategy)[device]
    who = (
        f"stage {s} needs"
        if len(stages) == 1
        else f"stages {', '.join(map(str, stages))} together need"
    )
    parts, name = memory[device], problem.topology.devices[device].name
    need, room = format_bytes_apart(parts.total_bytes, limit_bytes(problem, used, device))
    versions = f" versions {format_bytes(parts.version_bytes)}," if parts.version_bytes else ""
    process = f", {format_bytes(parts.process_bytes)} of it the process" * bool(parts.process_bytes)
    return (
        f"{who} {need} on {name}, the limit is {room}"
        f" (parameters {format_bytes(parts.parameter_bytes)},{versions} gradients"
        f" {format_bytes(parts.gradient_bytes)}, optimizer {format_bytes(parts.optimizer_bytes)},"
        f" stash {format_bytes(parts.stash_bytes)}, buffers {format_bytes(parts.buffer_bytes)},"
        f" workspace {format_bytes(parts.workspace_bytes)}, reserve"
        f" {format_bytes(parts.reserve_bytes)}{process})"
    )


def host_shortages(problem: Problem, memory: Mapping[int, MemoryParts]) -> Iterator[str]:
    """The hosts that have too little memory for the activations that wait there, in words for the
    user.

    Args:
        memory: of the used devices.
    """
    for host in problem.topology.hosts:
        own = [d for d in memory if problem.topology.devices[d].host == host.name]
        waiting = sum(memory[d].host_bytes for d in own)
        limit = None if host.host_link is None else host.host_link.memory_bytes
        if host.memory_bytes is not None and waiting:
            limit = host.memory_bytes - sum(memory[d].total_bytes for d in own)
        if waiting and limit is not None and waiting > limit:
            need, room = format_bytes_apart(waiting, max(limit, 0))
            yield f"{need} of activations wait in the memory of {host.name}, its limit is {room}"
