"""Bytes on a device: what a stage takes, and the peak that an action list reaches."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.passes import (
    backward_excess,
    forward_excess,
    read_from_outside,
    used_outside,
)
from planner.costs.waiting import gradients_waiting, outputs_waiting
from planner.graph import (
    Graph,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.plan import MemoryParts
from planner.problem import Optimizer, Problem
from planner.profiles import Profile, storage_owner
from planner.schedules.actions import Code, Kind, piece_bytes
from planner.strategy import Strategy
from planner.support.arrays import Ints
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
        output_bytes: of those outputs, what is no input and no parameter, or a view of one.
        returned_bytes: gradients that go back to earlier stages, until they have been sent.
        forward_workspace_bytes: most bytes above `kept_bytes` while its forward runs: activations
            that live only inside the pass, and what kernels hold for themselves.
        backward_workspace_bytes: the same of its backward, which lets go of the stash on its way
            and makes gradients.
        left_bytes: gradients that stay on the device after its backward, for an earlier stage that
            adds to them or uses them.
        taken_bytes: those that have waited for its backward and are gone after it.
        copied_bytes: outputs that are parts of something larger, of which copies are sent.
    """

    parameter_bytes: int
    trainable_bytes: int
    kept_bytes: int
    boundary_bytes: int
    output_bytes: int
    returned_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    left_bytes: int = 0
    taken_bytes: int = 0
    copied_bytes: int = 0


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
    through = {storage_owner(profile, n, inside) for n in (*inputs, *made)}
    kept |= through
    coming = [name for name in inputs if name not in there]
    sent, copied = _storages_sent(profile, inside, made)
    private = sum(profile.operators[v].stash_private_bytes for v in inside)
    loss = _loss_bytes(graph, inside)
    return StageMemory(
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=sum(p.bytes for p in held if p.trainable),
        kept_bytes=private + sum(tensors[n].bytes for n in kept - there if n in tensors) + loss,
        boundary_bytes=sum(tensors[n].bytes for n in {*coming, *sent}),
        output_bytes=sum(tensors[n].bytes for n in sent.difference(inputs)),
        returned_bytes=sum(tensors[name].bytes for name in coming if tensors[name].gradient),
        forward_workspace_bytes=forward_excess(profile, inside, kept - there, loss),
        backward_workspace_bytes=backward_excess(profile, inside, kept - there - through, loss),
        copied_bytes=sum(tensors[n].bytes for n in copied),
    )


def _storages_sent(
    profile: Profile, inside: Collection[int], made: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Of what a stage makes for others, the storages that wait until it has been sent, without
    those of parameters, which are there anyway; and those of them that are copies, because a
    tensor does not fill the storage that it lies in.
    """
    tensors, parameters = tensors_by_name(profile.graph), parameters_by_name(profile.graph)
    owners = {name: storage_owner(profile, name, inside) for name in made}
    copied = {
        name
        for name, owner in owners.items()
        if (tensors.get(owner) or parameters[owner]).bytes != tensors[name].bytes
    }
    whole = {owner for name, owner in owners.items() if name not in copied}
    return copied | whole - parameters.keys(), copied


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
    waits: bool = True,
) -> MemoryParts:
    """The peak of one device, read off its action list: the first of equal ones.

    Args:
        code: the lists of all devices.
        device: its position among them.
        stages: what the stages on the device need, by index, together.
        waits: whether what goes to others is there as long as it may have to wait, whatever links
            and other devices do (`waiting.py`); else it is gone at once.
    """
    base = standing_memory(problem, stages)
    kept, buffers, workspace = use_bytes(problem, strategy, code, device, stages, waits)
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
    waits: bool = True,
) -> tuple[Ints, Ints, Ints]:
    """(n,) stash, buffers and workspace of a device during each action of its list. Arguments as of
    `peak_memory`.
    """
    mine = slice(code.start[device], code.start[device + 1])
    kind, backward, stage = code.kind[mine], code.backward[mine], code.stage[mine]
    tensors = tensors_by_name(problem.profile.graph)
    size = np.array(
        [piece_bytes(tensors[piece.tensor], piece.box) for piece in code.pieces], dtype=np.int64
    )
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
    # The inputs are there already when a forward is run again.
    rerun = of_stage(
        lambda s: stages[s].kept_bytes - stages[s].boundary_bytes + stages[s].output_bytes
        if again[s] else 0
    )  # fmt: skip
    # Outputs that have been sent are gone where the forward is run again; elsewhere they stay, and
    # copies of those that are parts wait beside them. Of several stages, none is counted as sent.
    gone = np.zeros(len(kind), dtype=np.int64)
    copied = of_stage(lambda s: 0 if again[s] else stages[s].copied_bytes)
    copies = _before(np.where(forward, copied, 0) - np.where(back, copied, 0))
    if len(stages) == 1:
        ((s, only),) = stages.items()
        ahead = np.cumsum(forward) - forward - np.cumsum(back)
        waiting = np.zeros_like(ahead)
        if waits:
            waiting = outputs_waiting(strategy, problem.profile.graph, s, forward, back)
        if again[s]:
            gone = (ahead + back - waiting) * only.output_bytes
        copies = waiting * (0 if again[s] else only.copied_bytes)
    # After a forward the copies of its outputs are made.
    forward_workspace = np.maximum(of_stage(lambda s: stages[s].forward_workspace_bytes), copied)
    backward_workspace = of_stage(lambda s: stages[s].backward_workspace_bytes)
    left = of_stage(lambda s: stages[s].left_bytes)
    taken = of_stage(lambda s: stages[s].taken_bytes)
    came = np.zeros(len(kind), dtype=np.int64)
    came[receives] = size[code.piece[mine][receives]]
    # What has come for a computation leaves the buffers with it.
    turn = (2 * stage + backward) * (int(code.microbatch[mine].max(initial=0)) + 1)
    _, number = np.unique(turn + code.microbatch[mine], return_inverse=True)
    used = np.zeros(len(kind), dtype=np.int64)
    np.add.at(used, number[receives], came[receives])
    used = np.where(computes, used[number], 0)
    # A forward turns what came into inputs that are kept; a backward frees it when it has ended.
    buffers = np.cumsum(came - np.where(forward, used, 0)) - _before(np.where(back, used, 0))
    kept = np.cumsum(np.where(forward, inflight, 0)) - _before(np.where(back, inflight, 0))
    # So do gradients that go back; of several stages, those of the latest backward are counted.
    if len(stages) == 1:
        returned = gradients_waiting(strategy, problem.profile.graph, s, forward, back)
    else:
        latest = np.maximum.accumulate(np.where(back, np.arange(len(kind)), -1))
        latest = np.concatenate([[-1], latest[:-1]])
        returned = np.where(latest >= 0, of_stage(lambda s: stages[s].returned_bytes)[latest], 0)
    if not waits:
        copies, returned = np.zeros_like(copies), np.zeros_like(returned)
    returned += _before(np.where(back, left - taken, 0))
    workspace = np.where(back, backward_workspace, forward_workspace)
    return kept - gone + np.where(back, rerun, 0), buffers + returned + copies, workspace


def _before(changes: Ints) -> Ints:
    """(n,) the sum of all changes before each."""
    return np.cumsum(changes) - changes
