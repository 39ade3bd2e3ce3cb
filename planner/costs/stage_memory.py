"""Bytes on a device that a stage needs: what is there all the time, and what it keeps for one
microbatch. `peak_memory.py` puts them together over the actions of a list.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.artefacts.graph import (
    Graph,
    Parameter,
    loss_outputs,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.losses import losses
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.segments import segments_of
from planner.artefacts.sharding import dim_of, local_shape
from planner.artefacts.strategy import Stage, in_parts, indices_of
from planner.artefacts.topology import device_type, hosts_by_name
from planner.costs.casts import held_private_bytes, kept_casts
from planner.costs.local_stage import local_stage
from planner.costs.mesh_memory import (
    gather_bytes,
    local_bytes,
    local_gradient_bytes,
    scatter_bytes,
)
from planner.costs.offloading import NOT_OFFLOADED, Offloaded, stage_offload
from planner.costs.passes import (
    RerunOperators,
    backward_workspace_bytes,
    forward_workspace_bytes,
    is_short,
    loss_copy_bytes,
    read_from_outside,
    rerun_operators,
    there_before,
    used_outside,
)
from planner.costs.update import stepped_bytes, update_copies
from planner.resharding.over_replicas import over_replicas
from planner.resharding.sums import ParameterSpecs, parameter_specs
from planner.support.memo import remembered


class StaticBytes(NamedTuple):
    """Bytes of a stage's parameters on a device of it, and of their update.

    Attributes:
        parameter: weights, buffers and constants, each once, the parts of them that are stepped and
            do not lie in one piece in their parameter, and copies of weights in the type of
            autocast.
        trainable: the trained part of the weights.
        gradient: of their gradients: as many, or fewer where these are cut further, or more where
            parts of them are stepped.
        state: of the parts that are stepped; the optimizer's state is a multiple
            (`update.state_copies`).
        scatter: taken while a bucket of gradients becomes those of parts.
        gather: taken while parameters are gathered from parts, after a step.
        step: taken by float32 gradients in the step.
        casts: of copies of weights in the type of autocast, which `parameter` contains; each
            version of parameters has its own.
    """

    parameter: int
    trainable: int
    gradient: int
    state: int
    scatter: int
    gather: int
    step: int = 0
    casts: int = 0


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory that one replica of a stage needs, on each of its devices.

    Attributes:
        static: of its parameters.
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
        host_bytes: of one microbatch that wait in the host's memory, and not on the device.
    """

    static: StaticBytes
    kept_bytes: int
    boundary_bytes: int
    output_bytes: int
    returned_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    left_bytes: int = 0
    taken_bytes: int = 0
    copied_bytes: int = 0
    host_bytes: int = 0


def stage_memory(profile: Profile, stage: Stage, before: Iterable[Stage] = ()) -> StageMemory:
    """Memory that one replica of a stage needs; of one that is split, each of its devices.

    Args:
        before: earlier stages on the same device; parameters that they hold, and tensors that they
            read or make, are there already.
    """
    shared = _touched(profile.graph, (v for one in before for v in indices_of(one, profile.graph)))
    if not in_parts(stage):
        own = stage.operators, stage.recompute, stage.recomputed, stage.offloaded
        return _whole_memory(profile, own, frozenset(shared))
    static, offload = _stage_static_bytes(stage, profile, shared), stage_offload(profile, stage)
    local = local_stage(profile, stage)
    return _memory(local.profile, local.inside, shared, static, local.segments, offload)


@remembered(kept=1024)
def _whole_memory(
    profile: Profile,
    own: tuple[tuple[str, ...], bool, tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]],
    shared: frozenset[str],
) -> StageMemory:
    """Of a stage without parts, in which it does not matter where and when it runs.

    Args:
        own: its operators, and what it runs again and keeps in the host's memory.
    """
    operators, recompute, recomputed, offloaded = own
    stage = Stage(operators, ((0,),), 1, recompute, recomputed=recomputed, offloaded=offloaded)
    graph, indices = profile.graph, indices_of(stage, profile.graph)
    segments = rerun_operators(segments_of(stage, graph), indices)
    static, offload = _stage_static_bytes(stage, profile, shared), stage_offload(profile, stage)
    return _memory(profile, indices, shared, static, segments, offload)


def memory_of(
    profile: Profile, operators: Iterable[int], before: Iterable[int] = ()
) -> StageMemory:
    """The memory of unsplit operators, by their indices, as searches have them.

    Args:
        before: operators of earlier stages on the same device.
    """
    inside, shared = tuple(operators), _touched(profile.graph, before)
    names = tuple(profile.graph.operators[v].name for v in inside)
    stage = Stage.whole(names, (0,), warmup=1, recompute=False)
    return _memory(profile, inside, shared, _stage_static_bytes(stage, profile, shared))


class ParameterBytes(NamedTuple):
    """Bytes of a parameter on each device of a mesh.

    Attributes:
        parameter: of its values, and of the part that is stepped where that is a copy.
        gradient: of its gradient, and of that of the part that is stepped where that is another.
        state: of the part that is stepped; the optimizer's state is a multiple.
    """

    parameter: int
    gradient: int
    state: int


def parameter_bytes(one: Parameter, lies: ParameterSpecs, mesh: tuple[int, ...]) -> ParameterBytes:
    """The bytes of a parameter; of one that is not trained only those of its values.

    >>> weight = Parameter("w", (8, 8), "float32", True)
    >>> parameter_bytes(weight, ParameterSpecs(("R",), ("P",), ("S1",)), (2,))
    ParameterBytes(parameter=384, gradient=384, state=128)
    """
    size = local_bytes(one, lies.parameter, mesh)
    if not one.trainable:
        return ParameterBytes(size, 0, 0)
    gradient, cut = (local_gradient_bytes(one, of, mesh) for of in (lies.gradient, lies.state))
    state = local_bytes(one, lies.state, mesh)
    # A part that does not lie in one piece in its parameter is there twice.
    further = zip(lies.parameter, lies.state, strict=True)
    apart = {dim_of(after) for before, after in further if before == "R" != after} - {0}
    return ParameterBytes(
        size + (state if apart else 0), gradient + (cut if cut != gradient else 0), state
    )


def _stage_static_bytes(
    stage: Stage, profile: Profile, shared: Collection[str] = ()
) -> StaticBytes:
    """The bytes of the parameters of a stage, as `parameter_specs` places them.

    Args:
        shared: names of parameters that an earlier stage on the same device holds.
    """
    parameter = trainable = gradient = state = 0
    graph = profile.graph
    known, mesh = parameters_by_name(graph), over_replicas(stage, graph).mesh
    stepped = []
    for name, lies in parameter_specs(stage, graph).items():
        if name in shared:
            continue
        size = parameter_bytes(known[name], lies, mesh)
        parameter, gradient, state = (
            parameter + size.parameter, gradient + size.gradient, state + size.state
        )  # fmt: skip
        if known[name].trainable:
            trainable += local_bytes(known[name], lies.parameter, mesh)
            stepped.append(
                replace(known[name], shape=local_shape(known[name].shape, lies.state, mesh))
            )
    casts = sum(n for name, n in kept_casts(stage, profile).items() if name not in shared)
    return StaticBytes(
        parameter + casts,
        trainable,
        gradient,
        state,
        scatter_bytes(stage, graph),
        gather_bytes(stage, graph),
        stepped_bytes(profile, stepped),
        casts,
    )


def _memory(
    profile: Profile, operators: Iterable[int], there: Set[str], static: StaticBytes,
    segments: Sequence[RerunOperators] = (), offload: Offloaded = NOT_OFFLOADED,
) -> StageMemory:  # fmt: skip
    """The memory of a stage.

    Args:
        profile: of the operators at their sizes on the device.
        there: parameters and tensors of earlier stages on the same device.
        segments: of operators that a backward runs again.
        offload: what waits in the host's memory.
    """
    graph, inside = profile.graph, frozenset(operators)
    tensors = tensors_by_name(graph)

    def sizes(names: Iterable[str]) -> int:
        return sum(tensors[name].bytes for name in names)

    inputs, made = read_from_outside(graph, inside), used_outside(graph, inside)
    # Sets of storages, not of tensors: several views may be kept, for several reasons, of a storage
    # that is there once.
    stashing = inside.difference(*(some.operators for some in segments))
    leaving = offload.leaving
    stashed = [name for v in stashing for name in profile.operators[v].stash_tensors]
    held = [name for some in segments for name in there_before(graph, some)]
    kept = {storage_owner(profile, name, inside) for name in (*stashed, *held)}
    through = {storage_owner(profile, n, inside) for n in (*inputs, *made)}
    kept |= through
    coming = [name for name in inputs if name not in there]
    sent, copied = _storages_sent(profile, inside, made)
    private = sum(
        profile.operators[v].stash_private_bytes for v in stashing.difference(leaving.private)
    )
    private += sum(held_private_bytes(profile, v) for some in segments for v in some.kept)
    target = _target_bytes(profile, inside)
    loss = target if profile.fused_loss else _loss_bytes(graph, inside)
    freed = kept - there - through
    kept -= leaving.storages.keys()
    return StageMemory(
        static=static,
        kept_bytes=private + sizes((kept - there) & tensors.keys()) + loss,
        boundary_bytes=sizes({*coming, *sent}),
        output_bytes=sizes(sent.difference(inputs)),
        returned_bytes=sizes(name for name in coming if tensors[name].gradient),
        forward_workspace_bytes=forward_workspace_bytes(
            profile, inside, kept - there, loss, segments, leaving
        ),
        backward_workspace_bytes=backward_workspace_bytes(
            profile, inside, freed, (loss, target), segments,
            coming_back={one.last: one.back_bytes for one in offload.segments},
        ),
        copied_bytes=sizes(copied),
        host_bytes=offload.host_bytes,
    )  # fmt: skip


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
    before: list[Stage] = []
    for s, stage in stages.items():
        need = stage_memory(profile, stage, before)
        needs[s] = replace(need, left_bytes=left[s], taken_bytes=taken[s])
        before.append(stage)
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
    """A loss keeps a tensor as large as its input (log-probabilities, or the difference). Where
    that is in a short type, so as large as the float32 copy of it that the loss is computed from.
    A fused one keeps a number per row, which is not counted, and its targets.
    """
    made_by, tensors = producers(graph), tensors_by_name(graph)
    lost = [tensors[n] for n in loss_outputs(graph) if made_by.get(n) in inside]
    return sum(one.bytes for one in lost if not is_short(one)) + loss_copy_bytes(graph, inside)


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


def static_bytes(parameter_bytes: int, trainable_bytes: int, problem: Problem) -> int:
    """Parameters, gradients and optimizer state, in bytes."""
    return parameter_bytes + update_copies(problem) * trainable_bytes


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
    given = problem.training.device_memory
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
