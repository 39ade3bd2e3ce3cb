"""A stage of a pipeline as a problem of its own: its program (`build.py`) is that of all operators
of a smaller profile.

What the stage reads of other stages is an input there, which comes whole or as an operator reads
it, and its gradient leaves in the same parts. What other stages read of it is an output there, at
which gradients begin as those of a loss over single elements do: it leaves as it is made, but no
sums. What the transfers take is for the judge, which also lets tensors cross in other parts
(`solvers/sharded/edges.py`).

Stages of equal layers have equal programs, in which operators, tensors and parameters have other
names. So they share the answers: a pipeline of eight equal stages has three programs, that of the
first, of the last, and of those between.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from planner.artefacts.graph import (
    FLOAT_DTYPES,
    Graph,
    LossChoice,
    consumers,
    losses_of,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.losses import LossName
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import AT_REST, Sharding, blocks_of
from planner.solvers.intra.space import classes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """A stage.

    Attributes:
        problem: of its operators alone.
        names: of its tensors and parameters, in the order in which they appear.
        key: equal of stages whose programs differ in names only.
    """

    problem: Problem
    names: tuple[str, ...]
    key: tuple[object, ...]


def part_of(problem: Problem, inside: Sequence[int]) -> Part | None:
    """The problem of some operators.

    Args:
        inside: the operators, by index.

    Returns:
        None if no gradient can begin there: it makes nothing that has one and that leaves it.
    """
    profile, graph = problem.profile, problem.profile.graph
    leaving = [*_leaving(graph, inside)]
    lost = tuple(one for one in losses_of(graph) if one.output in leaving)
    tensors = tensors_by_name(graph)
    begins = (LossChoice(name, LossName.MSE) for name in leaving
              if tensors[name].gradient and tensors[name].dtype in FLOAT_DTYPES)  # fmt: skip
    if not lost:
        lost = tuple(begins)[:1]
    if not lost:
        return None
    own = _graph(graph, inside, leaving, lost)
    within = _profile(profile, own, inside)
    search = replace(problem.search, pins=())
    names, key = _key(profile, inside, own)
    return Part(replace(problem, profile=within, search=search), names, key)


def as_in(sharding: Sharding, one: Part, other: Part) -> Sharding:
    """The sharding of a stage as that of another one with an equal key."""
    operators = (
        [operator.name for operator in part.problem.profile.graph.operators]
        for part in (one, other)
    )
    rules = renamed(sharding.rules, dict(zip(*operators, strict=True)))
    names = dict(zip(one.names, other.names, strict=True))
    specs = (renamed(getattr(sharding, kind), names) for kind in AT_REST)
    return Sharding(sharding.mesh, rules, *specs)


def renamed(some: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """The same values by other names."""
    return {names[name]: one for name, one in some.items()}


def unblocked(sharding: Sharding, graph: Graph) -> Sharding:
    """The sharding without blocks of tensors that cross stages.

    Args:
        graph: the whole one.
    """
    made, read = producers(graph), consumers(graph)

    def whole(specs: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple("R" if blocks_of(part) > 1 else part for part in spec)
            if name in made and read[name]
            else spec
            for name, spec in specs.items()
        }

    return replace(sharding, inputs=whole(sharding.inputs), outputs=whole(sharding.outputs))


def _leaving(graph: Graph, inside: Sequence[int]) -> Iterator[str]:
    """What some operators make that others read, or that the model returns."""
    own, read = set(inside), consumers(graph)
    for v in inside:
        for name in graph.operators[v].outputs:
            if name in graph.outputs or not own.issuperset(read[name]):
                yield name


def _graph(
    graph: Graph, inside: Sequence[int], leaving: Sequence[str], lost: tuple[LossChoice, ...]
) -> Graph:
    operators = tuple(graph.operators[v] for v in inside)
    made = [name for one in operators for name in one.outputs]
    coming = dict.fromkeys(name for one in operators for name in one.inputs)
    inputs = tuple(name for name in coming if name not in {*made})
    tensors, parameters = tensors_by_name(graph), parameters_by_name(graph)
    held = dict.fromkeys(name for one in operators for name in one.parameters)
    return Graph(
        operators,
        tuple(tensors[name] for name in (*inputs, *made)),
        tuple(parameters[name] for name in held),
        inputs,
        tuple(leaving),
        lost,
    )


def _profile(profile: Profile, graph: Graph, inside: Sequence[int]) -> Profile:
    made = producers(graph)
    return replace(
        profile,
        graph=graph,
        operators=tuple(profile.operators[v] for v in inside),
        views=tuple(one for one in profile.views if one.tensor in made),
        gradient_views=tuple(one for one in profile.gradient_views if one.base in made),
        modules=tuple(profile.modules[v] for v in inside) if profile.modules else (),
        loss_costs=tuple(one for one in profile.loss_costs if one.output in graph.outputs),
        whole_step=None,
        growth=None,
    )


def _key(
    profile: Profile, inside: Sequence[int], graph: Graph
) -> tuple[tuple[str, ...], tuple[object, ...]]:
    """`Part.names` and `Part.key`."""
    number: dict[str, int] = {}
    of_class, parameters = classes(profile), parameters_by_name(graph)

    def numbers(names: Sequence[str]) -> tuple[int, ...]:
        return tuple(number.setdefault(name, len(number)) for name in names)

    operators = tuple(
        (
            of_class[v],
            numbers((*one.inputs, *one.parameters, *one.outputs)),
            numbers(profile.operators[v].stash_tensors),
            tuple(replace(parameters[name], name="") for name in one.parameters),
        )
        for v, one in zip(inside, graph.operators, strict=True)
    )
    made = producers(graph)
    ends = (
        numbers(graph.outputs),
        tuple((number[one.output], one.function, one.class_dim) for one in losses_of(graph)),
        tuple(numbers((one.tensor, one.base)) for one in profile.views if one.tensor in made),
    )
    return tuple(number), (operators, *ends)
