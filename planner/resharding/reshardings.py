"""The reshardings of a stage: where the specs of producers and consumers differ.

Costs, simulator and launcher read this one list, so that a collective that is priced is one that
runs. A tensor has a *home*: the spec in which it comes into the stage, lies there as a parameter,
or is made by its operator; so has its gradient, and there the gradients of all consumers add up.
A consumer that wants other specs reads a converted copy; its gradient is converted back. Consumers
that want the same specs share the copy, so that queries, keys and values gather once.

A parameter that is gathered lives only while a pass reads it: operators whose backward needs its
values gather it again (Rajbhandari et al. 2020, section 5.3: with that a step sends half as much
again as data parallelism). A segment that is run again (`Stage.recomputed`) has copies of its own,
which are made anew then, and kept until its backward has read them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    Operator,
    consumers,
    differentiated,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.operator_types import VIEW, facts
from planner.artefacts.sharding import Sharding, Spec, reads, rule_by
from planner.artefacts.strategy import Stage, indices_of, operator_indices
from planner.resharding.conversion import Step, conversion, sends
from planner.resharding.gradients import gradient_spec
from planner.resharding.over_replicas import over_replicas
from planner.resharding.sent_types import sent_types
from planner.support.memo import remembered


@dataclass(frozen=True, slots=True)
class Resharding:
    """A tensor or parameter in other specs than those of its home.

    Attributes:
        tensor: its name.
        readers: names of the operators that read the copy, in the graph's order; none for the copy
            that leaves the stage.
        leaves: whether it is what leaves the stage.
        old: the spec at home.
        new: the spec of the copy.
        gradient_old: the spec of the copy's gradient, as its readers make it.
        gradient_new: the spec of the gradient at home.
        forward: the steps from `old` to `new`.
        backward: the steps from `gradient_old` to `gradient_new`; none where no gradient flows.
        again: of a parameter that is gathered, the operators that do so again in their backward.
        dtype: of the copy, into which the tensor is converted before the steps (`sent_types.py`).
        segment: that its readers are in, by its index in `Stage.recomputed`; -1 where they are in
            none.
    """

    tensor: str
    readers: tuple[str, ...]
    leaves: bool
    old: Spec
    new: Spec
    gradient_old: Spec
    gradient_new: Spec
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    again: tuple[str, ...]
    dtype: str
    segment: int = -1


@dataclass(frozen=True, slots=True)
class Home:
    """Where a tensor or parameter of a stage is without being converted.

    Attributes:
        spec: of itself.
        gradient: of its gradient.
    """

    spec: Spec
    gradient: Spec


@remembered
def homes(stage: Stage, graph: Graph) -> dict[str, Home]:
    """Where all tensors and parameters of a stage are at home, by name.

    The gradient of a parameter that lies whole on an axis is a sum there as soon as one consumer
    makes it so: it is added up over all microbatches before it is reduced. Consumers without a
    backward make none.
    """
    stage = over_replicas(stage, graph)
    sharding = _sharding(stage)
    whole = ("R",) * len(sharding.mesh)
    made_by = producers(graph)
    inside, with_backward = set(indices_of(stage, graph)), differentiated(graph)
    found: dict[str, Home] = {}
    parts: dict[str, list[set[str]]] = {}
    for i in indices_of(stage, graph):
        operator = graph.operators[i]
        rule = rule_by(sharding, operator)
        for name, want in zip(reads(operator), rule.inputs, strict=True):
            if name in operator.parameters:
                made = parts.setdefault(name, [set() for _ in whole])
                for axis, part in enumerate(gradient_spec(rule, want)):
                    if i in with_backward:
                        made[axis].add(part)
            elif made_by.get(name) not in inside:
                spec = sharding.inputs.get(name, whole)
                found[name] = Home(spec, spec)
        for name, spec in zip(operator.outputs, rule.outputs, strict=True):
            found[name] = Home(spec, gradient_spec(rule, spec))
    for name, some in parts.items():
        spec = sharding.parameters.get(name, whole)
        gradient = tuple(
            "P" if part == "R" and "P" in one else part
            for part, one in zip(sharding.gradients.get(name, spec), some, strict=True)
        )
        found[name] = Home(spec, gradient)
    return found


@remembered
def reshardings(stage: Stage, graph: Graph) -> tuple[Resharding, ...]:
    """The reshardings of a stage, in topological order of first use, those that leave it last.

    Args:
        stage: one with a sharding, or whose parameters lie in parts over replicas.

    Raises:
        ValueError: if a spec does not divide what it cuts.
    """
    stage = over_replicas(stage, graph)
    sharding = _sharding(stage)
    at_home = homes(stage, graph)
    segments = stage.segment_by_operator
    readers: dict[tuple[str, Spec, Spec, bool, int], list[str]] = {}
    for name, want, gradient, reader in _wanted(stage, graph):
        home = at_home[name]
        flows = has_gradient(name, graph) and (
            not reader or operator_indices(graph)[reader] in differentiated(graph)
        )
        if want != home.spec or (flows and gradient != home.gradient):
            made_as = gradient if flows else home.gradient
            key = name, want, made_as, not reader, segments.get(reader, -1)
            readers.setdefault(key, []).append(reader)
    made = []
    for (name, want, gradient, leaves, segment), names in readers.items():
        home, (shape, own) = at_home[name], _shape_and_type(name, graph)
        backward: tuple[Step, ...] = ()
        if has_gradient(name, graph):
            back = _gradient_item_bytes(name, graph)
            backward = conversion(shape, back, sharding.mesh, gradient, home.gradient)
        dtype = sent_types(graph).get(name, own)
        forward = conversion(shape, ITEM_BYTES[dtype], sharding.mesh, home.spec, want)
        made.append(
            Resharding(
                tensor=name,
                readers=() if leaves else tuple(names),
                leaves=leaves,
                old=home.spec,
                new=want,
                gradient_old=gradient,
                gradient_new=home.gradient,
                forward=forward,
                backward=backward,
                again=_again(name, names, forward, stage, graph) if segment < 0 else (),
                dtype=dtype if sends(forward) else own,
                segment=segment,
            )
        )
    return tuple(made)


def _again(
    name: str, readers: Iterable[str], forward: Iterable[Step], stage: Stage, graph: Graph
) -> tuple[str, ...]:
    """The readers of a copy, and of views of it that are not converted, that gather it again."""
    parameter = parameters_by_name(graph).get(name)
    if parameter is None or not sends(forward):
        return ()
    sharding, at_home, index = _sharding(stage), homes(stage, graph), operator_indices(graph)
    named = {index[reader] for reader in readers if reader}  # what leaves has none
    todo, views, found = sorted(named), {name}, []
    while todo:
        v = heappop(todo)
        operator = graph.operators[v]
        if v in named or _reads_at_home(operator, views - {name}, sharding, at_home):
            if facts(operator.type).moves is VIEW:
                views.update(operator.outputs)
                following = {i for made in operator.outputs for i in consumers(graph)[made]}
                for i in following.intersection(indices_of(stage, graph)).difference(todo):
                    heappush(todo, i)
            bias = len(parameter.shape) == 1 and facts(operator.type).bias is not None
            if not bias and reads_back(operator, views, graph):
                found.append(operator.name)
    return tuple(found)


def _reads_at_home(
    operator: Operator, views: Collection[str], sharding: Sharding, at_home: Mapping[str, Home]
) -> bool:
    """Whether an operator reads one of some views as it is.

    A view that is itself converted is not followed: the copy has to lie in one storage on all
    devices of a line, and of a conversion the first device may get its input back, the others
    zeros.
    """
    wanted = zip(reads(operator), rule_by(sharding, operator).inputs, strict=True)
    return any(one in views and spec == at_home[one].spec for one, spec in wanted)


def reads_back(operator: Operator, values: Collection[str], graph: Graph) -> bool:
    """Whether the backward of an operator reads some of its parameters or inputs again, because the
    gradient of another input needs them.
    """
    tensors = tensors_by_name(graph)
    others = [name for name in operator.inputs if name not in values]
    return (
        operator_indices(graph)[operator.name] in differentiated(graph)
        and facts(operator.type).saves_inputs
        and any(tensors[name].gradient for name in others)
    )


def _wanted(stage: Stage, graph: Graph) -> Iterator[tuple[str, Spec, Spec, str]]:
    """(tensor, spec, spec of its gradient, reader) of all reads; the reader "" is what leaves."""
    sharding = _sharding(stage)
    whole = ("R",) * len(sharding.mesh)
    for i in indices_of(stage, graph):
        operator = graph.operators[i]
        rule = rule_by(sharding, operator)
        for name, want in zip(reads(operator), rule.inputs, strict=True):
            yield name, want, gradient_spec(rule, want), operator.name
    for name in leaving(stage, graph):
        spec = sharding.outputs.get(name, whole)
        yield name, spec, spec, ""


def leaving(stage: Stage, graph: Graph) -> tuple[str, ...]:
    """The tensors that a stage makes and that are read elsewhere or are outputs of the model."""
    inside = set(stage.operators)
    outside = [operator for operator in graph.operators if operator.name not in inside]
    read_elsewhere = {name for operator in outside for name in operator.inputs}.union(graph.outputs)
    return tuple(
        name
        for i in indices_of(stage, graph)
        for name in graph.operators[i].outputs
        if name in read_elsewhere
    )


def has_gradient(name: str, graph: Graph) -> bool:
    """Whether a gradient of a tensor or parameter is computed."""
    parameter = parameters_by_name(graph).get(name)
    return tensors_by_name(graph)[name].gradient if parameter is None else parameter.trainable


def _shape_and_type(name: str, graph: Graph) -> tuple[tuple[int, ...], str]:
    one = parameters_by_name(graph).get(name) or tensors_by_name(graph)[name]
    return one.shape, one.dtype


def _gradient_item_bytes(name: str, graph: Graph) -> float:
    one = parameters_by_name(graph).get(name)
    if one is None:
        return ITEM_BYTES[tensors_by_name(graph)[name].dtype]
    return one.gradient_item_bytes


def _sharding(stage: Stage) -> Sharding:
    if stage.sharding is None:
        raise ValueError("expected a stage with a mesh, got one without")
    return stage.sharding
