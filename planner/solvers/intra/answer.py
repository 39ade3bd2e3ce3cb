"""From the answer of a choice program to a sharding."""

from collections.abc import Mapping, Sequence

from planner.artefacts.graph import producers
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Sharding, Spec
from planner.solvers.intra.built import Built
from planner.solvers.intra.prices import leaving_spec


def sharding_of(
    problem: Problem, made: Built, picks: Sequence[int]
) -> tuple[Sharding, dict[str, int]]:
    """The sharding of an answer, and the levels of parameters over replicas."""
    graph, mesh = problem.profile.graph, made.view.mesh
    rules = {operator.name: made.rules[v][picks[v]] for v, operator in enumerate(graph.operators)}
    lies = {name: some[picks[node]] for name, (node, some) in made.lies.items()}
    parameters, gradients, states = (
        {name: one.at(least) for name, one in lies.items()} for least in (3, 2, 1)
    )
    made_by = producers(graph)
    outputs = {}
    for name in (one for one in graph.outputs if one in made_by):
        operator = graph.operators[made_by[name]]
        spec = rules[operator.name].outputs[operator.outputs.index(name)]
        outputs[name] = leaving_spec(graph, name, spec)
    inputs = {name: some[picks[node]][: len(mesh)] for name, (node, some) in made.inputs.items()}
    sharding = Sharding(
        mesh=mesh,
        rules={name: one for name, one in rules.items() if any(a.is_split for a in one.axes)},
        parameters=_unlike(parameters, {}, mesh),
        inputs=_unlike(inputs, {}, mesh),
        outputs=_unlike(outputs, {}, mesh),
        gradients=_unlike(gradients, parameters, mesh),
        states=_unlike(states, gradients, mesh),
    )
    return sharding, {name: one.level for name, one in lies.items() if one.level}


def segments_of(made: Built, picks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The segments of an answer that run again (`Stage.recomputed`)."""
    some = (block.segments[made.state(block, picks)] for block in made.blocks)
    return tuple(one for one in some if one)


def _unlike(
    specs: Mapping[str, Spec], usual: Mapping[str, Spec], mesh: tuple[int, ...]
) -> dict[str, Spec]:
    """The specs that are not the usual ones; usual is whole where nothing is said."""
    whole = ("R",) * len(mesh)
    return {name: spec for name, spec in specs.items() if spec != usual.get(name, whole)}
