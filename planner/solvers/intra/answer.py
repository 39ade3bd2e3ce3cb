"""From the answer of a choice program to a sharding, and to one that gathers in good order."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

from planner.artefacts.graph import holders, parameters_by_name, producers
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Sharding, Spec, local_shape
from planner.solvers.intra.build import leaving_spec
from planner.solvers.intra.built import Built
from planner.solvers.intra.space import LEVELS, Lies


def sharding_of(
    problem: Problem, made: Built, picks: Sequence[int]
) -> tuple[Sharding, dict[str, int]]:
    """The sharding of an answer, and the levels of parameters over replicas."""
    graph, mesh = problem.profile.graph, made.view.mesh
    rules = {operator.name: made.rules[v][picks[v]] for v, operator in enumerate(graph.operators)}
    lies = {name: some[picks[node]] for name, (node, some) in made.lies.items()}
    parameters, gradients, states = (
        {name: one.at(least, replicated=False) for name, one in lies.items()} for least in (3, 2, 1)
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


def in_order_of_use(problem: Problem, made: Built, picks: Sequence[int]) -> list[int]:
    """The answer with the levels of weights dealt anew, to as many bytes each: weights that are
    read first have the lowest.

    To the program it makes little difference which weights these are. But what is gathered behind a
    step is in one queue, in the order of its readers, and a weight that is in parts itself is
    gathered behind all of that, so it had better be one that is read late.
    """
    graph, view = problem.profile.graph, made.view
    known, readers = parameters_by_name(graph), holders(graph)
    ordered, dealt = list(picks), dict.fromkeys(LEVELS, 0)
    weights = []
    for name in sorted(made.lies, key=lambda one: min(readers[one])):
        node, lies = made.lies[name]
        by_level = _by_level(lies, lies[picks[node]])
        tied = len({*lies}) < len(lies)
        if len(by_level) == len(LEVELS) and len(known[name].shape) > 1 and not tied:
            now = lies[picks[node]]
            size = prod(local_shape(known[name].shape, now.spec, view.mesh))
            dealt[now.highest] += size
            weights.append((node, size, by_level))
    ends, done = [*accumulate(dealt.values())], 0
    for node, size, by_level in weights:
        ordered[node] = by_level[next(level for level in LEVELS if done < ends[level])]
        done += size
    return ordered


def _by_level(lies: Sequence[Lies], now: Lies) -> dict[int, int]:
    """By level, how a parameter may lie on the same spec, along the same axis."""
    found: dict[int, int] = {}
    for k, one in enumerate(lies):
        along = one.along if now.along is None else now.along
        if one.spec == now.spec and one.along in (None, along):
            found.setdefault(one.highest, k)
    return found


def _unlike(
    specs: Mapping[str, Spec], usual: Mapping[str, Spec], mesh: tuple[int, ...]
) -> dict[str, Spec]:
    """The specs that are not the usual ones; usual is whole where nothing is said."""
    whole = ("R",) * len(mesh)
    return {name: spec for name, spec in specs.items() if spec != usual.get(name, whole)}
