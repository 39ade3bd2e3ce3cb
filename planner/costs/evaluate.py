"""The evaluator: what one strategy costs, by the primitives of this folder. `plan.py` adds the
simulator's verdict.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.costs.actions import ActionCosts
from planner.costs.closed_form import StageCost
from planner.costs.collectives import allreduce_s, slowest_link
from planner.costs.compute import slowdown, step_s, times_on
from planner.costs.memory import StageMemory, limit_bytes, peak_memory, stage_memory
from planner.graph import tensors_by_name
from planner.prediction import MemoryParts
from planner.problem import Problem
from planner.schedules import Program, dry_run, program
from planner.strategy import (
    Strategy,
    crossings,
    operator_indices,
    used_devices,
    violations,
)
from planner.topology import device_type
from planner.units import format_bytes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One strategy, priced.

    Attributes:
        program: its action lists, proved to run to their end.
        costs: what each action takes.
        stages: as the closed form sees them.
        memory: the peak of each used device.
        shortage: why it does not fit, or None.
    """

    program: Program
    costs: ActionCosts
    stages: tuple[StageCost, ...]
    memory: Mapping[int, MemoryParts]
    shortage: str | None


def evaluate(problem: Problem, strategy: Strategy) -> Evaluation:
    """Prices a strategy.

    Raises:
        ValueError: if its structure is wrong or its schedule blocks, which is a solver's mistake.
    """
    graph = problem.profile.graph
    wrong = violations(strategy, graph, len(problem.topology.devices))
    if wrong:
        raise ValueError("; ".join(wrong))
    lists = program(strategy, graph)
    blocked = dry_run(lists)
    if blocked:
        raise ValueError(blocked)
    indices = operator_indices(graph)
    inside = [[indices[name] for name in stage.operators] for stage in strategy.stages]
    needs = [stage_memory(problem.profile, operators) for operators in inside]
    costs = _action_costs(problem, strategy, lists, inside, needs)
    memory = _memory(problem, strategy, lists, needs)
    return Evaluation(
        program=lists,
        costs=costs,
        stages=_stage_costs(problem, strategy, lists, costs),
        memory=memory,
        shortage=_shortage(problem, strategy, memory),
    )


def _action_costs(
    problem: Problem,
    strategy: Strategy,
    lists: Program,
    inside: list[list[int]],
    needs: list[StageMemory],
) -> ActionCosts:
    graph, topology = problem.profile.graph, problem.topology
    used = used_devices(strategy)
    forward, backward, step = {}, {}, {}
    for s, stage in enumerate(strategy.stages):
        for device in stage.devices:
            times, slow = times_on(problem, device), slowdown(topology, used, device)
            f = float(times.forward_s[inside[s]].sum()) * slow
            b = float(times.backward_s[inside[s]].sum()) * slow
            forward[s, device], backward[s, device] = f, b + (f if stage.recompute else 0.0)
            step[device] = slow * step_s(
                problem.options.optimizer, needs[s].trainable_bytes, device_type(topology, device)
            )
    tensors = tensors_by_name(graph)
    return ActionCosts(
        forward_s=forward,
        backward_s=backward,
        tensor_bytes={c.tensor: tensors[c.tensor].bytes for c in crossings(strategy, graph)},
        sum_s=tuple(allreduce_s(topology, one.devices, one.bytes) for one in lists.sums),
        step_s=step,
    )


def _stage_costs(
    problem: Problem, strategy: Strategy, lists: Program, costs: ActionCosts
) -> tuple[StageCost, ...]:
    crossing = crossings(strategy, problem.profile.graph)
    found = []
    for s, stage in enumerate(strategy.stages):
        send = back = 0.0
        if s + 1 < len(strategy.stages):
            ahead = strategy.stages[s + 1].devices
            over = [c for c in crossing if c.source <= s < c.targets[-1]]
            latency, rate = slowest_link(problem.topology, stage.devices, ahead)
            send = sum(latency + c.bytes / rate for c in over)
            latency, rate = slowest_link(problem.topology, ahead, stage.devices)
            back = sum(latency + c.bytes / rate for c in over if c.gradient)
        sums = [
            costs.sum_s[i]
            for i, one in enumerate(lists.sums)
            if set(one.devices).intersection(stage.devices)
        ]
        found.append(
            StageCost(
                forward_s=max(costs.forward_s[s, d] for d in stage.devices),
                backward_s=max(costs.backward_s[s, d] for d in stage.devices),
                send_s=send,
                return_s=back,
                tail_s=sum(sums) + max(costs.step_s[d] for d in stage.devices),
                num_replicas=stage.num_replicas,
                warmup=stage.warmup,
            )
        )
    return tuple(found)


def _memory(
    problem: Problem, strategy: Strategy, lists: Program, needs: list[StageMemory]
) -> Mapping[int, MemoryParts]:
    """The peak of every used device; replicas differ by their share of the microbatches."""
    return {
        device: peak_memory(
            problem,
            strategy,
            actions,
            {s: needs[s] for s, stage in enumerate(strategy.stages) if device in stage.devices},
        )
        for device, actions in lists.lists.items()
    }


def _shortage(
    problem: Problem, strategy: Strategy, memory: Mapping[int, MemoryParts]
) -> str | None:
    """The tightest device that is over its limit, in words for the user."""
    used = used_devices(strategy)
    over = [
        (memory[d].total_bytes - limit_bytes(problem, used, d), s, d)
        for s, stage in enumerate(strategy.stages)
        for d in stage.devices
        if memory[d].total_bytes > limit_bytes(problem, used, d)
    ]
    if not over:
        return None
    _, s, device = max(over, key=lambda one: (one[0], -one[2]))
    parts, limit = memory[device], limit_bytes(problem, used, device)
    return (
        f"stage {s} needs {format_bytes(parts.total_bytes)} per device, the limit is"
        f" {format_bytes(limit)} (parameters {format_bytes(parts.parameter_bytes)}, gradients"
        f" {format_bytes(parts.gradient_bytes)}, optimizer {format_bytes(parts.optimizer_bytes)},"
        f" stash {format_bytes(parts.stash_bytes)}, buffers {format_bytes(parts.buffer_bytes)},"
        f" workspace {format_bytes(parts.workspace_bytes)}, reserve"
        f" {format_bytes(parts.reserve_bytes)})"
    )
