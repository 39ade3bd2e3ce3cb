"""Bytes on a device: the needs of a stage, and the peak that an action list reaches.

`stage_memory` says how large each kind of thing is that a stage keeps for one microbatch;
`holdings` puts together, over the actions of a list, for which reasons bytes are held.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import (
    Graph,
    loss_outputs,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.losses import losses
from planner.artefacts.options import Optimizer
from planner.artefacts.plan import MemoryParts
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.strategy import Stage, Strategy, indices_of
from planner.artefacts.topology import device_type, hosts_by_name
from planner.costs.local_stage import local_stage
from planner.costs.passes import (
    backward_excess,
    forward_excess,
    read_from_outside,
    used_outside,
)
from planner.costs.waiting import gradients_waiting, outputs_waiting
from planner.schedules.actions import ActionKind, Code, piece_bytes
from planner.schedules.versions import alive
from planner.support.arrays import Bools, Ints


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory that one replica of a stage needs.

    Attributes:
        parameter_bytes: weights, buffers and constants, each once.
        trainable_bytes: the trained part of them.
        gradient_bytes: of their gradients: as many, or fewer where these are cut further, or more
            where parts of them are stepped.
        state_bytes: of what the optimizer steps through, which is the size of one moment.
        kept_bytes: alive from the forward to the backward of one microbatch: tensors stashed by
            autograd and by the loss, and the stage's inputs and outputs.
        boundary_bytes: the stage's inputs and the outputs that others read. Only these are kept if
            the forward is run again; an output stays until it has been sent.
        output_bytes: those outputs that are no input, no parameter, and no view of one.
        returned_bytes: gradients that go back to earlier stages, until they have been sent.
        forward_workspace_bytes: most bytes above `kept_bytes` while its forward runs: activations
            that live only inside the pass, and memory that kernels take for themselves.
        backward_workspace_bytes: the same of its backward, which lets go of the stash on its way
            and makes gradients.
        left_bytes: gradients that stay on the device after its backward, for an earlier stage that
            adds to them or uses them.
        taken_bytes: those that have waited for its backward and are gone after it.
        copied_bytes: outputs that are parts of something larger: copies of them are sent.
        scatter_bytes: taken while a bucket of its gradients becomes those of parts.
        gather_bytes: taken while its parameters are gathered from parts, after a step.
    """

    parameter_bytes: int
    trainable_bytes: int
    gradient_bytes: int
    state_bytes: int
    kept_bytes: int
    boundary_bytes: int
    output_bytes: int
    returned_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    left_bytes: int = 0
    taken_bytes: int = 0
    copied_bytes: int = 0
    scatter_bytes: int = 0
    gather_bytes: int = 0


def stage_memory(profile: Profile, stage: Stage, before: Iterable[Stage] = ()) -> StageMemory:
    """Memory that one replica of a stage needs; of one that is split, each of its devices.

    Args:
        before: earlier stages on the same device; parameters that they hold, and tensors that they
            read or make, are there already.
    """
    graph = profile.graph
    if stage.sharding is not None:
        local = local_stage(profile, stage)
        need = memory_of(local.profile, local.inside)
        return replace(
            need,
            parameter_bytes=need.parameter_bytes + local.copied_bytes,
            gradient_bytes=local.gradient_bytes,
            state_bytes=local.state_bytes,
            scatter_bytes=local.scatter_bytes,
            gather_bytes=local.gather_bytes,
        )
    return memory_of(
        profile, indices_of(stage, graph), [v for one in before for v in indices_of(one, graph)]
    )


def memory_of(
    profile: Profile, operators: Iterable[int], before: Iterable[int] = ()
) -> StageMemory:
    """The same for sets of operators, by their indices, as searches have them."""
    graph, inside = profile.graph, frozenset(operators)
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    there = _touched(graph, before)
    held = [
        parameters[name]
        for name in {n for v in inside for n in graph.operators[v].parameters} - there
    ]
    inputs, made = read_from_outside(graph, inside), used_outside(graph, inside)
    # Sets of storages, not of tensors: several views may be kept, for several reasons, of a storage
    # that is there once.
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
    loss, target = _loss_bytes(graph, inside), _target_bytes(profile, inside)
    freed = kept - there - through
    trainable = sum(p.bytes for p in held if p.trainable)
    return StageMemory(
        parameter_bytes=sum(p.bytes for p in held),
        trainable_bytes=trainable,
        gradient_bytes=trainable,
        state_bytes=trainable,
        kept_bytes=private + sum(tensors[n].bytes for n in kept - there if n in tensors) + loss,
        boundary_bytes=sum(tensors[n].bytes for n in {*coming, *sent}),
        output_bytes=sum(tensors[n].bytes for n in sent.difference(inputs)),
        returned_bytes=sum(tensors[name].bytes for name in coming if tensors[name].gradient),
        forward_workspace_bytes=forward_excess(profile, inside, kept - there, loss),
        backward_workspace_bytes=backward_excess(profile, inside, freed, loss, target),
        copied_bytes=sum(tensors[n].bytes for n in copied),
    )


def _storages_sent(
    profile: Profile, inside: Collection[int], made: Iterable[str]
) -> tuple[set[str], set[str]]:
    """The storages that wait until the tensors that a stage makes for others have been sent, and
    those of them that are copies: of tensors that do not fill the storage that they lie in.
    Storages of parameters are left out, because they are there anyway.
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


def device_memory(profile: Profile, stages: Mapping[int, Stage]) -> Mapping[int, StageMemory]:
    """The memory of the stages of one device; parameters and tensors that several of
    them use count with the first.

    Args:
        stages: by index, ascending.
    """
    needs: dict[int, StageMemory] = {}
    inside = {s: indices_of(stage, profile.graph) for s, stage in stages.items()}
    left, taken = _waiting_bytes(profile.graph, inside)
    before: list[int] = []
    for s, operators in inside.items():
        need = memory_of(profile, operators, before)
        needs[s] = replace(need, left_bytes=left[s], taken_bytes=taken[s])
        before += operators
    return needs


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
    """A loss keeps a tensor as large as its input (log-probabilities, or the difference)."""
    made_by, tensors = producers(graph), tensors_by_name(graph)
    return sum(tensors[n].bytes for n in loss_outputs(graph) if made_by.get(n) in inside)


def _target_bytes(profile: Profile, inside: Collection[int]) -> int:
    """Losses of values compare with targets as large as their outputs. Imported profiles do not say
    what their outputs are.
    """
    if profile.model_hash is None:
        return 0
    made_by = producers(profile.graph)
    return sum(
        one.output.bytes
        for one in losses(profile.graph)
        if one.has_target and one.class_dim is None and made_by.get(one.output.name) in inside
    )


def static_bytes(parameter_bytes: int, trainable_bytes: int, optimizer: Optimizer) -> int:
    """Parameters, gradients and optimizer state, in bytes."""
    return parameter_bytes + (1 + optimizer.num_moments) * trainable_bytes


def search_bytes(
    static: float, kept: float, entering: float, leaving: float, workspace: float, warmup: int,
    rounds: int,
) -> float:  # fmt: skip
    """Peak of a stage without recomputation in closed form, for search.

    It has the static bytes, W microbatches in flight with their inputs and outputs, one more set of
    inputs on its way, two of the gradients of leaving tensors (one in use, one on its way), one of
    gradients that go back, and the workspace. With a single microbatch nothing more is on its way.
    Compiled by the solver that searches with it.

    Args:
        entering: bytes of the tensors that come from earlier stages.
        leaving: bytes of the gradients of the tensors that cross the cut behind the stage.
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
        boundary: bytes of all inputs of the stage, of the tensors that cross the cut behind it,
            and of the model's outputs that it makes.
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
        stages: by index, the needs of the stages on the device.
        waits: whether outputs and gradients stay as long as they may have to wait until they are
            sent, however slow links and other devices are (`waiting.py`); else they go at once.
    """
    base = standing_memory(problem, strategy, stages)
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


def standing_memory(
    problem: Problem, strategy: Strategy, stages: Mapping[int, StageMemory]
) -> MemoryParts:
    """Memory that a device holds all the time, or, of versions of its parameters, at most.

    Args:
        stages: as of `peak_memory`.
    """
    moments = problem.options.optimizer.num_moments
    older = 0
    if strategy.schedule.is_asynchronous:
        older = sum((alive(strategy, s) - 1) * one.trainable_bytes for s, one in stages.items())
    return MemoryParts(
        parameter_bytes=sum(one.parameter_bytes for one in stages.values()),
        version_bytes=older,
        gradient_bytes=sum(one.gradient_bytes for one in stages.values()),
        optimizer_bytes=moments * sum(one.state_bytes for one in stages.values()),
        reserve_bytes=problem.options.reserve_bytes,
    )


class Holding(StrEnum):
    """Why a device holds bytes for a while; see `holdings`."""

    STASH = "stash"
    RERUN = "made again"
    OUTPUTS = "outputs not sent"
    RECEIVED = "received"
    COPIES = "copies not sent"
    GRADIENTS = "gradients not sent"
    LEFT = "gradients for a stage here"
    PARTS = "sums and steps of parts"
    WORKSPACE = "workspace"


IN_STASH = (Holding.STASH, Holding.RERUN, Holding.OUTPUTS)
IN_BUFFERS = (Holding.RECEIVED, Holding.COPIES, Holding.GRADIENTS, Holding.LEFT, Holding.PARTS)


class Contribution(NamedTuple):
    """How the bytes held for one reason change with each action of a list.

    Attributes:
        kind: the reason.
        from_start: (n,) bytes more from the start of each action on.
        from_end: (n,) bytes more from its end on.
    """

    kind: Holding
    from_start: Ints
    from_end: Ints


@dataclass(frozen=True, slots=True)
class _DeviceActions:
    """One device and its list.

    Attributes:
        stages: by index, the needs of its stages.
        forward: (n,) which actions are forwards.
        back: (n,) which are backwards.
        stage: (n,) of each computation.
        waits: as of `peak_memory`.
    """

    strategy: Strategy
    graph: Graph
    stages: Mapping[int, StageMemory]
    forward: Bools
    back: Bools
    stage: Ints
    waits: bool

    def of_stage(self, value: Callable[[StageMemory], int]) -> Ints:
        """(n,) a figure of the stage of each computation, 0 at other actions."""
        return self._spread({s: value(need) for s, need in self.stages.items()})

    def of_recomputed(self, value: Callable[[StageMemory], int], *, again: bool = True) -> Ints:
        """The same of stages that run their forward again, 0 of others; or the other way round."""
        recompute = {s: self.strategy.stages[s].recompute for s in self.stages}
        return self._spread(
            {s: value(need) for s, need in self.stages.items() if recompute[s] is again}
        )

    def _spread(self, values: Mapping[int, int]) -> Ints:
        table = np.zeros(int(self.stage.max(initial=0)) + 1, dtype=np.int64)
        for s, value in values.items():
            table[s] = value
        return np.where(self.forward | self.back, table[self.stage], 0)

    @property
    def alone(self) -> int | None:
        """The only stage of the device; None if there are several."""
        return next(iter(self.stages)) if len(self.stages) == 1 else None


def _stash(own: _DeviceActions) -> Contribution:
    """From the start of a forward to the end of its backward. Outputs that have been sent are gone
    after the forward if it is run again; elsewhere they stay. Of a device with several stages,
    none is counted as sent.
    """
    kept = own.of_recomputed(lambda need: need.kept_bytes, again=False)
    kept += own.of_recomputed(lambda need: need.boundary_bytes)
    sent = np.zeros_like(kept)
    if own.alone is not None:
        sent = own.of_recomputed(lambda need: need.output_bytes)
    # Both ends together free what the start of the forward has added.
    freed = np.where(own.forward, sent, 0) + np.where(own.back, kept - sent, 0)
    return Contribution(Holding.STASH, np.where(own.forward, kept, 0), -freed)


def _rerun(own: _DeviceActions) -> Contribution:
    """While a backward runs its forward again; the inputs are there already."""
    # The outputs are made a second time. Those of the forward have been sent, or count where they
    # wait: in `_outputs`, or in `_stash` on a device with several stages.
    made = own.of_recomputed(lambda need: need.kept_bytes - need.boundary_bytes + need.output_bytes)
    made = np.where(own.back, made, 0)
    return Contribution(Holding.RERUN, made, -made)


def _outputs(own: _DeviceActions) -> Contribution:
    """Outputs of a stage that runs its forward again, as long as they may have to wait."""
    # Outputs are counted as waiting only where the device has one stage, so the largest is its own.
    each = own.of_recomputed(lambda need: need.output_bytes).max(initial=0)
    return _level(Holding.OUTPUTS, _output_bytes_waiting(own, each))


def _copies(own: _DeviceActions) -> Contribution:
    """Copies of outputs that are parts of something larger, as long as they may have to wait: on a
    device with several stages, to the end of the backward.
    """
    copied = own.of_recomputed(lambda need: need.copied_bytes, again=False)
    if own.alone is not None:
        return _level(Holding.COPIES, _output_bytes_waiting(own, copied.max(initial=0)))
    if not own.waits:
        return _level(Holding.COPIES, np.zeros_like(copied))
    made = np.where(own.forward, copied, 0) - np.where(own.back, copied, 0)
    return Contribution(Holding.COPIES, np.zeros_like(made), made)


def _output_bytes_waiting(own: _DeviceActions, each: int) -> Ints:
    """(n,) bytes of outputs that may have to wait; none on a device with several stages.

    Args:
        each: bytes for each forward.
    """
    if own.alone is None or not own.waits or not each:
        return np.zeros(len(own.stage), dtype=np.int64)
    return each * outputs_waiting(own.strategy, own.graph, own.alone, own.forward, own.back)


def _received(own: _DeviceActions, came: Ints, used: Ints) -> Contribution:
    """From the posting of a receive to the computation that it is for. A forward turns the tensors
    into inputs, which its stash contains; a backward frees the gradients when it has ended.

    Args:
        came: (n,) bytes that each receive brings.
        used: (n,) bytes that have come for each computation.
    """
    return Contribution(
        Holding.RECEIVED,
        came - np.where(own.forward, used, 0),
        -np.where(own.back, used, 0),
    )


def _gradients(own: _DeviceActions) -> Contribution:
    """Gradients that go back to earlier stages, as long as they may have to wait: on a device with
    several stages, those of its latest backward.
    """
    nothing = np.zeros(len(own.stage), dtype=np.int64)
    if not own.waits:
        return _level(Holding.GRADIENTS, nothing)
    if own.alone is not None:
        waiting = gradients_waiting(own.strategy, own.graph, own.alone, own.forward, own.back)
        return _level(Holding.GRADIENTS, waiting)
    # Each backward's take the place of the ones before: the differences add up to the latest.
    made = nothing.copy()
    made[own.back] = np.diff(own.of_stage(lambda need: need.returned_bytes)[own.back], prepend=0)
    return Contribution(Holding.GRADIENTS, nothing, made)


def _left(own: _DeviceActions) -> Contribution:
    """Gradients that a backward leaves to another stage of the device, until that one's ends."""
    change = own.of_stage(lambda need: need.left_bytes - need.taken_bytes)
    return Contribution(Holding.LEFT, np.zeros_like(change), np.where(own.back, change, 0))


def _workspace(own: _DeviceActions) -> Contribution:
    """While a computation runs. After a forward the copies of its outputs are made."""
    copied = own.of_recomputed(lambda need: need.copied_bytes, again=False)
    forward = np.maximum(own.of_stage(lambda need: need.forward_workspace_bytes), copied)
    backward = own.of_stage(lambda need: need.backward_workspace_bytes)
    size = np.where(own.back, backward, forward)
    return Contribution(Holding.WORKSPACE, size, -size)


def _parts(own: _DeviceActions, sums: Bools, steps: Bools) -> Contribution:
    """Where each device steps parts of its parameters, while their gradients are summed and after
    the step.

    Args:
        sums: (n,) which actions are all-reduces.
        steps: (n,) which are steps.
    """
    scattered = max(need.scatter_bytes for need in own.stages.values())
    gathered = max(need.gather_bytes for need in own.stages.values())
    size = scattered * sums + gathered * steps
    return Contribution(Holding.PARTS, size, -size)


def _level(kind: Holding, held: Ints) -> Contribution:
    """The contribution that amounts to these bytes during each action."""
    return Contribution(kind, np.diff(held, prepend=0), np.zeros_like(held))


def holdings(
    problem: Problem,
    strategy: Strategy,
    code: Code,
    device: int,
    stages: Mapping[int, StageMemory],
    waits: bool = True,
) -> Mapping[Holding, Ints]:
    """By reason, (n,) bytes that a device holds during each action of its list, in addition to its
    `standing_memory`. Arguments as of `peak_memory`.
    """
    graph, mine = problem.profile.graph, slice(code.start[device], code.start[device + 1])
    computes, sums, steps = (
        code.kind[mine] == kind
        for kind in (ActionKind.COMPUTE, ActionKind.ALL_REDUCE, ActionKind.STEP)
    )
    backward = code.backward[mine]
    own = _DeviceActions(
        strategy, graph, stages, computes & ~backward, computes & backward, code.stage[mine], waits
    )
    parts = (
        _stash(own), _rerun(own), _outputs(own), _received(own, *_arrivals(code, mine, graph)),
        _copies(own), _gradients(own), _left(own), _parts(own, sums, steps), _workspace(own),
    )  # fmt: skip
    # One column more: a change at the end of an action is seen by the next action.
    changes = np.zeros((len(parts), len(computes) + 1), dtype=np.int64)
    for row, part in zip(changes, parts, strict=True):
        row[:-1] += part.from_start
        row[1:] += part.from_end
    held = np.cumsum(changes, axis=1)[:, :-1]
    return {part.kind: row for part, row in zip(parts, held, strict=True)}


def _arrivals(code: Code, mine: slice, graph: Graph) -> tuple[Ints, Ints]:
    """(n,) bytes that each receive of a list brings, and those that came for each computation."""
    tensors = tensors_by_name(graph)
    size = np.array(
        [piece_bytes(tensors[piece.tensor], piece.box) for piece in code.pieces], dtype=np.int64
    )
    receives, computes = (
        code.kind[mine] == ActionKind.RECEIVE,
        code.kind[mine] == ActionKind.COMPUTE,
    )
    came = np.zeros(len(receives), dtype=np.int64)
    came[receives] = size[code.piece[mine][receives]]
    # A receive and the computation that it is for have stage, direction and microbatch in common.
    microbatch = code.microbatch[mine]
    turn = (2 * code.stage[mine] + code.backward[mine]) * (int(microbatch.max(initial=0)) + 1)
    # Other actions may get the number of a computation; they neither add to `used` nor read it.
    _, number = np.unique(turn + microbatch, return_inverse=True)
    used = np.zeros(len(came), dtype=np.int64)
    np.add.at(used, number[receives], came[receives])
    return came, np.where(computes, used[number], 0)


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
    held = holdings(problem, strategy, code, device, stages, waits)
    stash, buffers = (_sum(held, kinds) for kinds in (IN_STASH, IN_BUFFERS))
    return stash, buffers, held[Holding.WORKSPACE]


def _sum(held: Mapping[Holding, Ints], kinds: Iterable[Holding]) -> Ints:
    """(n,) bytes held for several reasons together."""
    total: Ints = np.sum([held[kind] for kind in kinds], axis=0)
    return total
