"""Bytes on a device: what a stage takes, and the peak that an action list reaches."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.graph import (
    Graph,
    consumers,
    holders,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.prediction import MemoryParts
from planner.problem import Optimizer, Problem
from planner.profile import Profile, storage_owner
from planner.schedules import Action, Compute, Direction, Receive, waits
from planner.strategy import Strategy
from planner.topology import device_type


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What one replica of a stage needs.

    Attributes:
        parameter_bytes: weights, buffers and constants, each once.
        trainable_bytes: the trained part of them: the size of the gradients and of one moment.
        kept_bytes: alive from the forward to the backward of one microbatch: what autograd
            stashes, the stage's inputs and outputs, and what the loss keeps.
        boundary_bytes: the stage's inputs and the outputs that others read: what is kept if the
            forward is run again, because an output stays until it has been sent.
        returned_bytes: gradients that go back to earlier stages, until they have been sent.
        workspace_bytes: activations and gradients that live only inside one pass.
    """

    parameter_bytes: int
    trainable_bytes: int
    kept_bytes: int
    boundary_bytes: int
    returned_bytes: int
    workspace_bytes: int


def read_from_outside(graph: Graph, inside: Collection[int]) -> tuple[str, ...]:
    """Tensors that a set of operators reads and does not make, in order of first use."""
    made = {name for v in inside for name in graph.operators[v].outputs}
    read = dict.fromkeys(name for v in sorted(inside) for name in graph.operators[v].inputs)
    return tuple(name for name in read if name not in made)


def used_outside(graph: Graph, inside: Collection[int]) -> tuple[str, ...]:
    """Tensors that a set of operators makes for others or for the model's user."""
    read_by, results = consumers(graph), set(graph.outputs)
    return tuple(
        name
        for v in sorted(inside)
        for name in graph.operators[v].outputs
        if name in results or any(w not in inside for w in read_by[name])
    )


def stage_memory(profile: Profile, operators: Iterable[int]) -> StageMemory:
    """What one replica of a stage with these operators needs."""
    graph, inside = profile.graph, frozenset(operators)
    tensors, users = tensors_by_name(graph), holders(graph)
    held = [p for p in graph.parameters if any(v in inside for v in users[p.name])]
    inputs = read_from_outside(graph, inside)
    kept = {
        storage_owner(profile, name, inside)
        for v in inside
        for name in profile.operators[v].stash_tensors
    }
    kept |= {storage_owner(profile, n, inside) for n in (*inputs, *used_outside(graph, inside))}
    private = sum(profile.operators[v].stash_private_bytes for v in inside)
    return StageMemory(
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=sum(p.bytes for p in held if p.trainable),
        kept_bytes=private
        + sum(tensors[n].bytes for n in kept if n in tensors)
        + _loss_bytes(graph, inside),
        boundary_bytes=sum(tensors[n].bytes for n in {*inputs, *used_outside(graph, inside)}),
        returned_bytes=sum(tensors[name].bytes for name in inputs if tensors[name].gradient),
        workspace_bytes=max(
            _forward_workspace(profile, inside, kept), _backward_workspace(graph, inside)
        ),
    )


def _loss_bytes(graph: Graph, inside: Collection[int]) -> int:
    """The loss keeps a tensor as large as its input (log-probabilities, or the difference)."""
    if producers(graph).get(graph.outputs[0]) not in inside:
        return 0
    return tensors_by_name(graph)[graph.outputs[0]].bytes


def _forward_workspace(profile: Profile, inside: Collection[int], kept: Collection[str]) -> int:
    """Most bytes of tensors that are made and dropped again inside a forward pass."""
    graph = profile.graph
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    owners = {
        name: storage_owner(profile, name, inside)
        for v in inside
        for name in graph.operators[v].outputs
    }
    last: dict[str, int] = {}
    for name, owner in owners.items():
        if owner not in kept and owner in tensors:
            last[owner] = max((last.get(owner, -1), *(w for w in read_by[name] if w in inside)))
    dropped = Counter[int]()
    alive = peak = 0
    for v in sorted(inside):
        for name in graph.operators[v].outputs:
            if owners[name] == name and name in last:
                alive += tensors[name].bytes
                dropped[max(v, last[name])] += tensors[name].bytes
        peak = max(peak, alive)
        alive -= dropped[v]
    return peak


def _backward_workspace(graph: Graph, inside: Collection[int]) -> int:
    """Most bytes of gradients alive at once in a backward pass: a tensor's from its last reader's
    backward to its maker's, and those of an operator's own parameters while it runs.
    """
    tensors, parameters, made_by = (
        tensors_by_name(graph), parameters_by_name(graph), producers(graph)
    )  # fmt: skip
    alive: dict[str, int] = {
        name: tensors[name].bytes
        for name in used_outside(graph, inside)
        if tensors[name].gradient or name == graph.outputs[0]
    }
    peak = now = sum(alive.values())
    for v in sorted(inside, reverse=True):
        operator = graph.operators[v]
        for name in operator.inputs:
            if tensors[name].gradient and name not in alive:
                alive[name] = tensors[name].bytes
                now += alive[name]
        own = sum(parameters[n].bytes for n in operator.parameters if parameters[n].trainable)
        peak = max(peak, now + own)
        for name in operator.outputs:
            if made_by.get(name) == v:
                now -= alive.pop(name, 0)
    return peak


def static_bytes(parameter_bytes: int, trainable_bytes: int, optimizer: Optimizer) -> int:
    """Parameters, gradients and optimizer state, in bytes."""
    return parameter_bytes + (1 + optimizer.num_moments) * trainable_bytes


def search_bytes(
    static: float, kept: float, entering: float, leaving: float, workspace: float, warmup: int
) -> float:
    """Peak of a stage without recomputation in closed form, for search: what is static, W
    microbatches in flight with their inputs and outputs, one more set of inputs on its way, two of
    the gradients of what leaves (one in use, one on its way), one of gradients that go back, and
    the workspace. Compiled by the solver that searches with it.

    Args:
        entering: bytes of the tensors that come from earlier stages.
        leaving: bytes of the gradients of what crosses the cut behind the stage.
    """
    return static + warmup * kept + 2 * entering + 2 * leaving + workspace


def search_recompute_bytes(
    static: float, kept: float, inputs: float, entering: float, leaving: float, workspace: float,
    warmup: int,
) -> float:  # fmt: skip
    """The same with recomputation: only inputs and outputs are in flight, and the stash of the one
    microbatch that is being run again.

    Args:
        inputs: bytes of all inputs of the stage and of what crosses the cut behind it.
    """
    return static + warmup * inputs + kept + 2 * entering + 2 * leaving + workspace


def own_limit_bytes(problem: Problem, device: int) -> int:
    """The memory of a device: the option's if it is given, else its type's."""
    given = problem.options.device_memory_bytes
    return device_type(problem.topology, device).memory_bytes if given is None else given


def limit_bytes(problem: Problem, used: Collection[int], device: int) -> int:
    """The memory that a device of the problem may use while the devices `used` run: its own or
    the option's, and no more than its share where its host's memory is shared.
    """
    topology = problem.topology
    own = own_limit_bytes(problem, device)
    name = topology.devices[device].host
    host = next(h for h in topology.hosts if h.name == name)
    if host.memory_bytes is None:
        return own
    sharing = sum(topology.devices[d].host == name for d in {*used, device})
    return min(own, host.memory_bytes // sharing)


def peak_memory(
    problem: Problem,
    strategy: Strategy,
    actions: Sequence[Action],
    stages: Mapping[int, StageMemory],
) -> MemoryParts:
    """The peak of one device, read off its action list.

    Args:
        actions: the device's list.
        stages: what the stages on the device need, by index.
    """
    tensors = tensors_by_name(problem.profile.graph)
    moments = problem.options.optimizer.num_moments
    trainable = sum(one.trainable_bytes for one in stages.values())
    base = MemoryParts(
        parameter_bytes=sum(one.parameter_bytes for one in stages.values()),
        gradient_bytes=trainable,
        optimizer_bytes=moments * trainable,
        reserve_bytes=problem.options.reserve_bytes,
    )
    posted: list[Receive] = []
    buffers = kept = returned = 0
    peak = base
    for action in actions:
        workspace = again = 0
        if isinstance(action, Receive):
            posted.append(action)
            buffers += tensors[action.tensor].bytes
        elif isinstance(action, Compute):
            stage = stages[action.stage]
            recompute = strategy.stages[action.stage].recompute
            inflight = stage.boundary_bytes if recompute else stage.kept_bytes
            arrived = [r for r in posted if waits(action, r)]
            posted = [r for r in posted if not waits(action, r)]
            used = sum(tensors[r.tensor].bytes for r in arrived)
            workspace = stage.workspace_bytes
            if action.direction is Direction.FORWARD:
                # What arrived becomes one of the inputs that are kept.
                buffers -= used
                kept += inflight
            elif recompute:
                again = stage.kept_bytes
        now = MemoryParts(
            base.parameter_bytes, base.gradient_bytes, base.optimizer_bytes,
            kept + again, buffers + returned, workspace, base.reserve_bytes,
        )  # fmt: skip
        if now.total_bytes > peak.total_bytes:
            peak = now
        if isinstance(action, Compute) and action.direction is Direction.BACKWARD:
            buffers -= used
            kept -= inflight
            returned = stage.returned_bytes
    return peak
