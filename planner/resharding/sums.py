"""The sums of gradients of an iteration, over replicas and over the lines of meshes.

A gradient that lies as summands along an axis of a mesh is added up over the lines of that axis,
together with those of the other replicas of the stage, once per iteration. Along an axis that cuts
it each part is added up for itself. Along one on which all have the same, each coordinate does the
same sum for itself. Where nothing is split, that is `strategy.gradient_sums`.

Where the optimizer's state is cut along an axis of summands (ZeRO-1), the sum is a reduce-scatter
along it, and each device keeps the part that it steps; the parts are then added up over replicas.
After the step the parameter is gathered again from the parts (`state_steps`).

A parameter of several stages lies in the same way in all of them. Their gradients may differ: where
one stage has summands along an axis and another one has the same on all devices, the first device
of the latter's lines gives its gradient for all, and the others are `non_contributing`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from planner.artefacts.graph import ITEM_BYTES, Graph, Parameter, holders, parameters_by_name
from planner.artefacts.sharding import Spec, local_shape
from planner.artefacts.strategy import (
    GradientSum,
    Stage,
    Strategy,
    buckets,
    indices_of,
    stage_of,
)
from planner.artefacts.strategy import gradient_sums as unsplit_sums
from planner.resharding.conversion import Step, conversion
from planner.resharding.over_replicas import over_replicas, with_axes
from planner.resharding.reshardings import homes
from planner.support.memo import remembered


@dataclass(frozen=True, slots=True)
class ParameterSpecs:
    """How a parameter lies on the mesh of a stage; that of an unsplit one has no axes.

    Attributes:
        parameter: the parameter itself.
        gradient: its gradient, as it is added up over the microbatches.
        state: the optimizer's state.
    """

    parameter: Spec
    gradient: Spec
    state: Spec


@remembered
def parameter_specs(stage: Stage, graph: Graph) -> Mapping[str, ParameterSpecs]:
    """How the parameters of a stage lie, by name; those that are not trained, in one way."""
    stage = over_replicas(stage, graph)
    sharding = stage.sharding
    if sharding is None:
        whole = ParameterSpecs((), (), ())
        return {
            name: whole for v in indices_of(stage, graph) for name in graph.operators[v].parameters
        }
    known = parameters_by_name(graph)
    lies = {}
    for name, home in homes(stage, graph).items():
        if name in known:
            cut = sharding.gradients.get(name, home.spec)
            lies[name] = (
                ParameterSpecs(home.spec, home.gradient, sharding.states.get(name, cut))
                if known[name].trainable
                else ParameterSpecs(home.spec, home.spec, home.spec)
            )
    return lies


def gradient_sums(strategy: Strategy, graph: Graph) -> tuple[GradientSum, ...]:
    """The sums of an iteration, in their one global order: first those of single stages, which are
    ready early, then those over several stages, of tied parameters. Parameters of the same devices
    are parted into buckets in the order in which a backward makes their gradients, and sums of
    several groups are in the order in which it completes them, so that none waits for one that is
    ready later, such as that of all norms.

    Raises:
        ValueError: if a parameter of several stages does not lie in the same way in all of them.
    """
    strategy = with_axes(strategy, graph)
    if all(stage.sharding is None for stage in strategy.stages):
        return unsplit_sums(strategy, graph)
    users, used_in = holders(graph), stages_of(strategy, graph)
    groups: dict[tuple[int, _Group], list[Parameter]] = {}
    # Parameters that lie alike in the same stages have the same groups.
    alike: dict[tuple[tuple[int, ...], tuple[ParameterSpecs, ...]], list[list[Parameter]]] = {}
    for parameter in graph.parameters:
        if not parameter.trainable or not used_in[parameter.name]:
            continue
        stages = [strategy.stages[s] for s in used_in[parameter.name]]
        lies = tuple(parameter_specs(stage, graph)[parameter.name] for stage in stages)
        key = used_in[parameter.name], lies
        if key not in alike:
            alike[key] = [
                groups.setdefault((len(stages), group), [])
                for group in _groups(parameter.name, stages, graph)
                if len(group.devices) > 1
            ]
        here = _local(parameter, stages[0], graph)
        for held in alike[key]:
            held.append(here)
    made = [
        (count, -min(users[some[-1].name]), GradientSum(
            group.devices, tuple(p.name for p in some), sum(p.gradient_bytes for p in some),
            group.shards,
        ))
        for (count, group), held in groups.items()
        for some in _in_buckets(held, users)
    ]  # fmt: skip
    # In the order of their devices instead, the sum of all norms under sequence parallelism, ready
    # last, came first and hid all overlap: 549 instead of 378 ms on 32 H100.
    made.sort(key=lambda one: (*one[:2], one[2].devices, one[2].shards))
    return tuple(one for *_, one in made)


def stages_of(strategy: Strategy, graph: Graph) -> Mapping[str, tuple[int, ...]]:
    """The stages that hold each parameter, ascending."""
    stages, users = stage_of(strategy, graph), holders(graph)
    return {
        one.name: tuple(sorted({stages[v] for v in users[one.name]})) for one in graph.parameters
    }


@dataclass(frozen=True, slots=True)
class _Group:
    """Devices of one sum, ascending, and those of them that keep the same part, if they do not all
    keep the whole sum.
    """

    devices: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...] = ()


def _groups(name: str, stages: Sequence[Stage], graph: Graph) -> Iterator[_Group]:
    """The sums of one parameter."""
    lies = [parameter_specs(stage, graph)[name] for stage in stages]
    on_one_mesh = len({stage.mesh for stage in stages}) == 1
    if not _lies_alike(lies, on_one_mesh):
        raise ValueError(f"parameter {name} lies differently in stages that share it")
    if not on_one_mesh:
        yield _Group(tuple(sorted({d for stage in stages for d in stage.devices})))
        return
    gradient, state = _combined(lies), lies[0].state
    summed = [axis for axis, part in enumerate(gradient) if part == "P"]
    scattered = [axis for axis in summed if state[axis] != "R"]
    for kept_by in _by_part(stages, summed, scattered):
        shards = tuple(tuple(sorted(kept_by[key])) for key in sorted(kept_by))
        yield _Group(tuple(sorted(chain(*shards))), shards if scattered else ())


def _lies_alike(lies: Sequence[ParameterSpecs], on_one_mesh: bool) -> bool:
    """Whether stages hold a parameter and its state in the same way; on different meshes, whole."""
    if on_one_mesh:
        return len({(one.parameter, one.state) for one in lies}) == 1
    return all(part == "R" for one in lies for part in (*one.parameter, *one.state))


def _by_part(
    stages: Sequence[Stage], summed: Sequence[int], scattered: Sequence[int]
) -> list[dict[tuple[int, ...], list[int]]]:
    """The devices that add up one part of a gradient, for each part; by the part of the sum that
    they keep.

    Args:
        stages: on meshes of one shape.
        summed: axes along which gradients are summands.
        scattered: those of them along which the sum is kept in parts.

    On a mesh (2, 2) with axis 1 summed and scattered, and 2 replicas (devices 0 to 3, 4 to 7), the
    outer key is the coordinate on axis 0, the inner one that on axis 1:

        (0,): {(0,): [0, 4], (1,): [1, 5]}      devices 0, 1, 4, 5 add up; 0 and 4 keep one half
        (1,): {(0,): [2, 6], (1,): [3, 7]}
    """
    found: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for stage in stages:
        for group in stage.groups:
            for index, device in enumerate(group):
                where = coordinates(index, stage.mesh)
                part = tuple(c for axis, c in enumerate(where) if axis not in summed)
                kept = tuple(where[axis] for axis in scattered)
                found.setdefault(part, {}).setdefault(kept, []).append(device)
    return [found[part] for part in sorted(found)]


def _combined(lies: Sequence[ParameterSpecs]) -> Spec:
    """How the gradients of several stages lie together."""
    return tuple(
        "P" if "P" in parts else parts[0]
        for parts in zip(*(one.gradient for one in lies), strict=True)
    )


def non_contributing(strategy: Strategy, graph: Graph, device: int) -> frozenset[str]:
    """The parameters whose gradient a device does not add to their sum, because another device of
    its mesh gives the same.
    """
    strategy, found, known = with_axes(strategy, graph), set(), parameters_by_name(graph)
    for name, used_in in stages_of(strategy, graph).items():
        stages = [strategy.stages[s] for s in used_in]
        own = next((stage for stage in stages if device in stage.devices), None)
        if own is None or own.sharding is None or not known[name].trainable:
            continue
        lies = [parameter_specs(stage, graph)[name] for stage in stages]
        mesh = own.mesh
        apart = len({stage.mesh for stage in stages}) > 1
        # On different meshes all devices of all stages are in one sum (`_groups`), and of devices
        # of a line that have the same gradient only the first may add it.
        summed = "P" * len(mesh) if apart else "".join(part[0] for part in _combined(lies))
        group = next(group for group in own.groups if device in group)
        where = coordinates(group.index(device), mesh)
        if _is_given_again(summed, parameter_specs(own, graph)[name].gradient, where):
            found.add(name)
    return frozenset(found)


def _is_given_again(summed: str, gradient: Spec, where: Sequence[int]) -> bool:
    """Whether a device earlier on an axis of summands has the same gradient.

    Args:
        summed: per axis, P where gradients are summands.
        gradient: on the mesh of the device.
        where: its coordinates.
    """
    return any(
        total == "P" and part == "R" and coordinate > 0
        for total, part, coordinate in zip(summed, gradient, where, strict=True)
    )


def owns(
    strategy: Strategy, graph: Graph, device: int, name: str, spec: Spec | None = None,
    replica: int = 0,
) -> bool:  # fmt: skip
    """Whether a device is the first one of those that hold the same part of a tensor: in one
    replica of the first stage that has the parameter, and at the start of each axis that does not
    cut the tensor.

    Args:
        name: of the parameter that the tensor belongs to.
        spec: of the tensor on the mesh of that stage, its sharing replicas an axis; None for that
            of the optimizer's state.
        replica: of the stage.
    """
    own = strategy.stages[stages_of(strategy, graph)[name][0]]
    stage = over_replicas(own, graph)
    group = stage.groups[replica // own.over]
    if device not in group:
        return False
    where = coordinates(group.index(device), stage.mesh)
    lies = parameter_specs(stage, graph)[name].state if spec is None else spec
    first = [0] * len(own.mesh) + [replica % own.over] * (len(where) - len(own.mesh))
    return all(
        part != "R" or coordinate == at
        for part, coordinate, at in zip(lies, where, first, strict=True)
    )


@dataclass(frozen=True, slots=True)
class StateSteps:
    """What is done with a parameter whose state is cut further than it is.

    Attributes:
        scatter: the steps that make the gradient of the part out of the accumulated one; where that
            lies as the state does, none.
        gather: the steps that make the parameter out of its parts, after the optimizer's step.
    """

    scatter: tuple[Step, ...]
    gather: tuple[Step, ...]


@remembered
def state_steps(stage: Stage, graph: Graph) -> Mapping[str, StateSteps]:
    """The parameters of a stage whose state is cut further than they are, by name."""
    stage, found, known = over_replicas(stage, graph), {}, parameters_by_name(graph)
    for name, lies in parameter_specs(stage, graph).items():
        if lies.state == lies.parameter:
            continue
        one, mesh = known[name], stage.mesh
        # Axes on which summands become a whole are those of the all-reduce behind.
        cut = tuple(
            "P" if before == "P" and after == "R" else after
            for before, after in zip(lies.gradient, lies.state, strict=True)
        )
        found[name] = StateSteps(
            scatter=conversion(one.shape, one.gradient_item_bytes, mesh, lies.gradient, cut),
            gather=conversion(one.shape, ITEM_BYTES[one.dtype], mesh, lies.state, lies.parameter),
        )
    return found


def steps_key(steps: Iterable[Step]) -> tuple[tuple[str, int, str, str], ...]:
    """What steps do, however large the tensor is: parameters of the same can go together."""
    return tuple((step.kind.value, step.axis, step.source, step.target) for step in steps)


@remembered
def gathered_together(stage: Stage, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that are gathered at once from the parts that were stepped: of one
    type, by the same steps, and not too many; in the order in which a forward reads them.
    """
    known, users, inside = parameters_by_name(graph), holders(graph), {*indices_of(stage, graph)}
    gathers = state_steps(stage, graph)
    first = {name: min(v for v in users[name] if v in inside) for name in gathers}
    alike: dict[tuple[object, ...], list[Parameter]] = {}
    for name in sorted(gathers, key=lambda n: (first[n], n)):
        key = steps_key(gathers[name].gather), known[name].dtype
        alike.setdefault(key, []).append(known[name])
    found = [
        tuple(one.name for one in bucket) for some in alike.values() for bucket in buckets(some)
    ]
    return tuple(sorted(found, key=lambda names: first[names[0]]))


def gathered_bytes(stage: Stage, graph: Graph) -> list[int]:
    """Of each of `gathered_together`, the bytes that a device holds when it is gathered."""
    lies, known = parameter_specs(stage, graph), parameters_by_name(graph)
    mesh = over_replicas(stage, graph).mesh

    def whole_bytes(name: str) -> float:
        one = known[name]
        return prod(local_shape(one.shape, lies[name].parameter, mesh)) * ITEM_BYTES[one.dtype]

    return [round(sum(map(whole_bytes, names))) for names in gathered_together(stage, graph)]


def gather_starts(stage: Stage, graph: Graph) -> tuple[int, ...]:
    """Where those of `gathered_together` are started: per bucket, the one in front of whose first
    reader that is, or -1 with the step. That is the first from which on all that are started and
    not read yet have no more bytes than `Stage.gathered_ahead`.
    """
    return starts_within(gathered_bytes(stage, graph), stage.gathered_ahead)


def starts_within(sizes: Sequence[int], most: int | None) -> tuple[int, ...]:
    """The same of buckets of some bytes with at most so many ahead; None for any number."""
    if most is None:
        return (-1,) * len(sizes)
    starts, ahead, first = list[int](), 0, 0
    for i, size in enumerate(sizes):
        ahead += size
        while first < i and ahead > most:
            ahead -= sizes[first]
            first += 1
        starts.append(first if first or ahead > most else -1)
    return tuple(starts)


def scattered_buckets(stage: Stage, graph: Graph) -> tuple[tuple[Parameter, ...], ...]:
    """The buckets of the sums of a stage of which each device keeps a part, with parameters of the
    size of their accumulated gradients.
    """
    stage, users = over_replicas(stage, graph), holders(graph)
    groups: dict[_Group, list[Parameter]] = {}
    for name in state_steps(stage, graph):
        here = _local(parameters_by_name(graph)[name], stage, graph)
        for group in _groups(name, [stage], graph):
            if group.shards:
                groups.setdefault(group, []).append(here)
    return tuple(tuple(bucket) for held in groups.values() for bucket in _in_buckets(held, users))


def _in_buckets(
    held: Iterable[Parameter], users: Mapping[str, Sequence[int]]
) -> Iterator[list[Parameter]]:
    """In the order in which a backward makes their gradients."""
    return buckets(sorted(held, key=lambda one: -min(users[one.name])))


def _local(parameter: Parameter, stage: Stage, graph: Graph) -> Parameter:
    """A parameter of the size of its accumulated gradient on one device."""
    gradient = parameter_specs(stage, graph)[parameter.name].gradient
    return replace(parameter, shape=local_shape(parameter.shape, gradient, stage.mesh))


def coordinates(index: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The coordinates of a device of a mesh, by its position.

    >>> coordinates(5, (2, 4))
    (1, 1)
    """
    return tuple(_coordinates(index, mesh))


def _coordinates(index: int, mesh: tuple[int, ...]) -> Iterator[int]:
    rest = prod(mesh)
    for size in mesh:
        rest //= size
        yield index // rest % size
