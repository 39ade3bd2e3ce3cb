"""Bytes on a device: what a stage takes, and the peak that an action list reaches."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.graph import (
    Graph,
    consumers,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.prediction import MemoryParts
from planner.problem import Optimizer, Problem
from planner.profile import Profile, storage_owner
from planner.schedules import Code, Ints, Kind
from planner.strategy import Strategy
from planner.topology import device_type, hosts_by_name


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
        workspace_bytes: activations and gradients that live only inside one pass, and the largest
            workspace of an operator's kernels.
        left_bytes: gradients that stay on the device after its backward, for an earlier stage that
            adds to them or uses them.
        taken_bytes: those that have waited for its backward and are gone after it.
    """

    parameter_bytes: int
    trainable_bytes: int
    kept_bytes: int
    boundary_bytes: int
    returned_bytes: int
    workspace_bytes: int
    left_bytes: int = 0
    taken_bytes: int = 0


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


def stage_memory(
    profile: Profile, operators: Iterable[int], before: Iterable[int] = ()
) -> StageMemory:
    """What one replica of a stage with these operators needs.

    Args:
        before: operators of earlier stages on the same device; parameters that they hold, and
            tensors that they read or make, are there already.
    """
    graph, inside = profile.graph, frozenset(operators)
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    there = _touched(graph, before)
    held = [
        parameters[name]
        for name in {n for v in inside for n in graph.operators[v].parameters} - there
    ]
    inputs, made = read_from_outside(graph, inside), used_outside(graph, inside)
    kept = {
        storage_owner(profile, name, inside)
        for v in inside
        for name in profile.operators[v].stash_tensors
    }
    kept |= {storage_owner(profile, n, inside) for n in (*inputs, *made)}
    coming = [name for name in inputs if name not in there]
    private = sum(profile.operators[v].stash_private_bytes for v in inside)
    return StageMemory(
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=sum(p.bytes for p in held if p.trainable),
        kept_bytes=private
        + sum(tensors[n].bytes for n in kept - there if n in tensors)
        + _loss_bytes(graph, inside),
        boundary_bytes=sum(tensors[n].bytes for n in {*coming, *made}),
        returned_bytes=sum(tensors[name].bytes for name in coming if tensors[name].gradient),
        workspace_bytes=max(_workspaces(profile, inside, kept).values(), default=0),
    )


def _touched(graph: Graph, operators: Iterable[int]) -> set[str]:
    """Parameters and tensors that operators read or make."""
    return {
        name
        for v in operators
        for names in (graph.operators[v].parameters, graph.operators[v].inputs,
                      graph.operators[v].outputs)
        for name in names
    }  # fmt: skip


def device_memory(
    profile: Profile, stages: Mapping[int, Collection[int]]
) -> Mapping[int, StageMemory]:
    """What the stages of one device need; what several of them use counts with the first.

    Args:
        stages: the operators of each, by its index, ascending.
    """
    found: dict[int, StageMemory] = {}
    left, taken = _waiting_bytes(profile.graph, stages)
    before: list[int] = []
    for s, inside in stages.items():
        need = stage_memory(profile, inside, before)
        found[s] = replace(need, left_bytes=left[s], taken_bytes=taken[s])
        before += inside
    return found


def _waiting_bytes(
    graph: Graph, stages: Mapping[int, Collection[int]]
) -> tuple[Counter[int], Counter[int]]:
    """Per stage of a device, the bytes of gradients that begin to wait with its backward, and of
    those that have waited for it. A tensor's gradient begins with the last stage that reads it and
    goes to the one that makes it, or, if that is elsewhere, goes back from the first reader.
    """
    tensors = tensors_by_name(graph)
    made_in = {name: s for s, inside in stages.items() for v in inside
               for name in graph.operators[v].outputs}  # fmt: skip
    read_in: dict[str, list[int]] = {}
    for s, inside in stages.items():
        for name in read_from_outside(graph, inside):
            read_in.setdefault(name, []).append(s)
    left, taken = Counter[int](), Counter[int]()
    for name, readers in read_in.items():
        home = made_in.get(name, readers[0])
        if tensors[name].gradient and home != readers[-1]:
            left[readers[-1]] += tensors[name].bytes
            taken[home] += tensors[name].bytes
    return left, taken


def _loss_bytes(graph: Graph, inside: Collection[int]) -> int:
    """The loss keeps a tensor as large as its input (log-probabilities, or the difference)."""
    if producers(graph).get(graph.outputs[0]) not in inside:
        return 0
    return tensors_by_name(graph)[graph.outputs[0]].bytes


def operator_workspaces(profile: Profile) -> tuple[int, ...]:
    """Per operator, the bytes of activations and gradients that are alive only inside one pass over
    the whole graph while it runs. In a stage there are no more, besides the gradients of what
    leaves it.
    """
    everything = range(len(profile.operators))
    inside = frozenset(everything)
    kept = {
        storage_owner(profile, name, inside)
        for operator in profile.operators
        for name in operator.stash_tensors
    }
    found = _workspaces(profile, inside, kept)
    return tuple(found[v] for v in everything)


def _workspaces(profile: Profile, inside: Collection[int], kept: Collection[str]) -> dict[int, int]:
    """Most bytes that live only inside one pass while each operator runs, forward or backward."""
    forward = _forward_alive(profile, inside, kept)
    backward = _backward_alive(profile.graph, inside)
    return {v: max(forward[v], backward[v]) + profile.operators[v].workspace_bytes for v in inside}


def _forward_alive(
    profile: Profile, inside: Collection[int], kept: Collection[str]
) -> dict[int, int]:
    """Bytes of tensors that are made and dropped again inside a forward pass, while each of its
    operators runs.
    """
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
    found, alive = {}, 0
    for v in sorted(inside):
        for name in graph.operators[v].outputs:
            if owners[name] == name and name in last:
                alive += tensors[name].bytes
                dropped[max(v, last[name])] += tensors[name].bytes
        found[v] = alive
        alive -= dropped[v]
    return found


def _backward_alive(graph: Graph, inside: Collection[int]) -> dict[int, int]:
    """Bytes of gradients alive while each operator of a backward pass runs: a tensor's from its
    last reader's backward to its maker's, and those of the operator's own parameters.
    """
    tensors, parameters, made_by = (
        tensors_by_name(graph), parameters_by_name(graph), producers(graph)
    )  # fmt: skip
    alive: dict[str, int] = {
        name: tensors[name].bytes
        for name in used_outside(graph, inside)
        if tensors[name].gradient or name == graph.outputs[0]
    }
    found, now = {}, sum(alive.values())
    for v in sorted(inside, reverse=True):
        operator = graph.operators[v]
        for name in operator.inputs:
            if tensors[name].gradient and name not in alive:
                alive[name] = tensors[name].bytes
                now += alive[name]
        own = sum(parameters[n].bytes for n in operator.parameters if parameters[n].trainable)
        found[v] = now + own
        for name in operator.outputs:
            if made_by.get(name) == v:
                now -= alive.pop(name, 0)
    return found


def static_bytes(parameter_bytes: int, trainable_bytes: int, optimizer: Optimizer) -> int:
    """Parameters, gradients and optimizer state, in bytes."""
    return parameter_bytes + (1 + optimizer.num_moments) * trainable_bytes


def search_bytes(
    static: float, kept: float, entering: float, leaving: float, workspace: float, warmup: int,
    rounds: int,
) -> float:  # fmt: skip
    """Peak of a stage without recomputation in closed form, for search: what is static, W
    microbatches in flight with their inputs and outputs, one more set of inputs on its way, two of
    the gradients of what leaves (one in use, one on its way), one of gradients that go back, and
    the workspace. With a single microbatch nothing more is on its way. Compiled by the solver that
    searches with it.

    Args:
        entering: bytes of the tensors that come from earlier stages.
        leaving: bytes of the gradients of what crosses the cut behind the stage.
        rounds: microbatches per replica.
    """
    coming = min(2, rounds)
    return static + warmup * kept + coming * (entering + leaving) + workspace


def search_recompute_bytes(
    static: float, kept: float, boundary: float, entering: float, leaving: float,
    workspace: float, warmup: int, rounds: int,
) -> float:  # fmt: skip
    """The same with recomputation: only inputs and outputs are in flight, and the stash of the one
    microbatch that is being run again.

    Args:
        boundary: bytes of all inputs of the stage, of what crosses the cut behind it, and of the
            model's outputs that it makes.
    """
    coming = min(2, rounds)
    return static + warmup * boundary + kept + coming * (entering + leaving) + workspace


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
    memory_bytes = hosts_by_name(topology)[name].memory_bytes
    if memory_bytes is None:
        return own
    sharing = sum(topology.devices[d].host == name for d in {*used, device})
    return min(own, memory_bytes // sharing)


def peak_memory(
    problem: Problem,
    strategy: Strategy,
    code: Code,
    device: int,
    stages: Mapping[int, StageMemory],
) -> MemoryParts:
    """The peak of one device, read off its action list: the first of equal ones.

    Args:
        code: the lists of all devices.
        device: its position among them.
        stages: what the stages on the device need, by index, together.
    """
    base = standing_memory(problem, stages)
    kept, buffers, workspace = use_bytes(problem, strategy, code, device, stages)
    use = kept + buffers + workspace
    fullest = int(use.argmax()) if len(use) else 0
    if not len(use) or use[fullest] <= 0:
        return base
    return replace(
        base,
        stash_bytes=int(kept[fullest]),
        buffer_bytes=int(buffers[fullest]),
        workspace_bytes=int(workspace[fullest]),
    )


def standing_memory(problem: Problem, stages: Mapping[int, StageMemory]) -> MemoryParts:
    """What a device holds all the time.

    Args:
        stages: as of `peak_memory`.
    """
    trainable = sum(one.trainable_bytes for one in stages.values())
    return MemoryParts(
        parameter_bytes=sum(one.parameter_bytes for one in stages.values()),
        gradient_bytes=trainable,
        optimizer_bytes=problem.options.optimizer.num_moments * trainable,
        reserve_bytes=problem.options.reserve_bytes,
    )


def use_bytes(
    problem: Problem,
    strategy: Strategy,
    code: Code,
    device: int,
    stages: Mapping[int, StageMemory],
) -> tuple[Ints, Ints, Ints]:
    """(n,) stash, buffers and workspace of a device during each action of its list. Arguments as of
    `peak_memory`.
    """
    mine = slice(code.start[device], code.start[device + 1])
    kind, backward, stage = code.kind[mine], code.backward[mine], code.stage[mine]
    tensors = tensors_by_name(problem.profile.graph)
    size = np.array([tensors[name].bytes for name in code.tensors], dtype=np.int64)
    receives, computes = kind == Kind.RECEIVE, kind == Kind.COMPUTE
    forward, back = computes & ~backward, computes & backward

    def of_stage(value: Callable[[int], int]) -> Ints:
        """(n,) a figure of the stage of each computation, 0 elsewhere."""
        table = np.zeros(int(stage.max(initial=0)) + 1, dtype=np.int64)
        for s in stages:
            table[s] = value(s)
        return np.where(computes, table[stage], 0)

    again = {s: strategy.stages[s].recompute for s in stages}
    inflight = of_stage(lambda s: stages[s].boundary_bytes if again[s] else stages[s].kept_bytes)
    rerun = of_stage(lambda s: stages[s].kept_bytes if again[s] else 0)
    workspace = of_stage(lambda s: stages[s].workspace_bytes)
    sent_back = of_stage(lambda s: stages[s].returned_bytes)
    left = of_stage(lambda s: stages[s].left_bytes)
    taken = of_stage(lambda s: stages[s].taken_bytes)
    came = np.zeros(len(kind), dtype=np.int64)
    came[receives] = size[code.tensor[mine][receives]]
    # What has come for a computation leaves the buffers with it.
    turn = (2 * stage + backward) * (int(code.microbatch[mine].max(initial=0)) + 1)
    _, number = np.unique(turn + code.microbatch[mine], return_inverse=True)
    used = np.zeros(len(kind), dtype=np.int64)
    np.add.at(used, number[receives], came[receives])
    used = np.where(computes, used[number], 0)
    # A forward turns what came into inputs that are kept; a backward frees it when it has ended.
    buffers = np.cumsum(came - np.where(forward, used, 0)) - _before(np.where(back, used, 0))
    kept = np.cumsum(np.where(forward, inflight, 0)) - _before(np.where(back, inflight, 0))
    # The gradients that went back last are there until the next ones do.
    latest = np.maximum.accumulate(np.where(back, np.arange(len(kind)), -1))
    latest = np.concatenate([[-1], latest[:-1]])
    returned = np.where(latest >= 0, sent_back[latest], 0)
    returned += _before(np.where(back, left - taken, 0))
    return kept + np.where(back, rerun, 0), buffers + returned, workspace


def _before(changes: Ints) -> Ints:
    """(n,) the sum of all changes before each."""
    return np.cumsum(changes) - changes
