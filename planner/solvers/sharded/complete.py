"""A whole sharding of each stage from the rules of its operators: how parameters lie, and tensors
at the edges of stages.

A parameter lies as all its readers, in all stages, want it, where they want the same, or else as
the first of them that cuts it. A tensor from another stage, or from outside, comes as its readers
want it where they agree, and else whole; between stages nothing is in blocks. Nothing comes, leaves
or lies as a summand. The classes of an output are cut, along one axis, only where the loss can be
computed so.
"""

from collections.abc import Iterable, Mapping, Sequence

from planner.artefacts.graph import Graph, consumers, producers, tensors_by_name
from planner.artefacts.losses import losses
from planner.artefacts.profile import SplitRule
from planner.artefacts.sharding import (
    Rule,
    Sharding,
    Spec,
    blocks_of,
    dim_of,
    reads,
    rule_of,
    tiles,
)
from planner.artefacts.strategy import Stage
from planner.resharding.reshardings import leaving
from planner.support.memo import remembered

_losses = remembered(losses)


def shardings(
    graph: Graph,
    stages: Sequence[Sequence[int]],
    mesh: tuple[int, ...],
    lines: Sequence[Sequence[SplitRule]],
    lies: Mapping[str, Spec] | None = None,
) -> tuple[Sharding, ...]:
    """A sharding for each stage, all of the same mesh.

    Args:
        stages: per stage, its operators by index.
        lines: per axis and operator, its rule.
        lies: by name, how parameters and inputs of the model lie, if not as their readers want.
    """
    lies = lies or {}
    rules = {
        operator.name: rule_of(axis[v].line for axis in lines)
        for v, operator in enumerate(graph.operators)
    }
    parameters = dict(_at_rest(graph, range(len(graph.operators)), rules, mesh, parameters=True))
    parameters |= {name: spec for name, spec in lies.items() if name in parameters}

    def of(inside: Sequence[int]) -> Sharding:
        held = {name for v in inside for name in graph.operators[v].parameters}
        names = tuple(graph.operators[v].name for v in inside)
        stage = Stage(names, (tuple(range(len(mesh))),), 1, False)
        coming = _at_rest(graph, inside, rules, mesh)
        return Sharding(
            mesh=mesh,
            rules={n: rules[n] for n in names if any(axis.is_split for axis in rules[n].axes)},
            parameters=_cut((name, spec) for name, spec in parameters.items() if name in held),
            inputs=_cut((n, _at_edge(graph, n, lies.get(n, wanted))) for n, wanted in coming),
            outputs=_cut(_leaving(graph, stage, rules)),
        )

    return tuple(map(of, stages))


def _cut(specs: Iterable[tuple[str, Spec]]) -> dict[str, Spec]:
    """Those that are not whole, by name."""
    return {name: spec for name, spec in specs if set(spec) != {"R"}}


def _at_rest(
    graph: Graph,
    inside: Iterable[int],
    rules: Mapping[str, Rule],
    mesh: tuple[int, ...],
    *,
    parameters: bool = False,
) -> Iterable[tuple[str, Spec]]:
    """How parameters lie, or else how tensors come that no operator inside makes, by name."""
    some, made_by = list(inside), producers(graph)
    there = set(some)
    wanted: dict[str, list[Spec]] = {}
    for v in some:
        operator = graph.operators[v]
        for name, spec in zip(reads(operator), rules[operator.name].inputs, strict=True):
            held = name in operator.parameters
            if held is parameters and (held or made_by.get(name) not in there):
                wanted.setdefault(name, []).append(spec)
    shapes = {one.name: one.shape for one in graph.tensors}
    shapes |= {one.name: one.shape for one in graph.parameters}
    for name, specs in wanted.items():
        yield name, _agreed(shapes[name], specs, mesh, first_cut=parameters)


def _agreed(
    shape: tuple[int, ...], specs: Sequence[Spec], mesh: tuple[int, ...], *, first_cut: bool
) -> Spec:  # fmt: skip
    """One spec for readers that want several."""
    parts = []
    for of_axis in zip(*specs, strict=True):
        cuts = [part for part in of_axis if part.startswith("S")]
        agree = len(set(of_axis)) == 1
        parts.append(cuts[0] if cuts and (agree or first_cut) else "R")
    spec = tuple(parts)
    try:
        tiles(shape, spec, mesh, 0)
    except ValueError:  # axes that cut one dimension together need not divide it
        return ("R",) * len(mesh)
    return spec


def _leaving(
    graph: Graph, stage: Stage, rules: Mapping[str, Rule]
) -> Iterable[tuple[str, Spec]]:  # fmt: skip
    """How tensors leave: as they are made, but no sums."""
    by_name, made_by = tensors_by_name(graph), producers(graph)
    for name in leaving(stage, graph):
        operator = graph.operators[made_by[name]]
        spec = rules[operator.name].outputs[operator.outputs.index(name)]
        keeps = [
            part if part.startswith("S") and may_leave(graph, name, part) else "R" for part in spec
        ]
        if name in graph.outputs:  # classes are compared along one axis
            cut = [a for a, part in enumerate(keeps) if dim_of(part) in _class_dims(graph, name)]
            keeps = ["R" if a in cut[1:] else part for a, part in enumerate(keeps)]
        whole = ("R",) * len(spec)
        yield name, _at_edge(graph, name, tuple(keeps)) if by_name[name].shape else whole


def _at_edge(graph: Graph, name: str, spec: Spec) -> Spec:
    """How a tensor crosses the edge of a stage: whole between stages where it is in blocks."""
    if name in graph.inputs or not consumers(graph)[name]:
        return spec
    return tuple("R" if blocks_of(part) > 1 else part for part in spec)


def may_leave(graph: Graph, name: str, part: str) -> bool:
    """Whether a tensor may leave a stage in a part: not as a summand, and an output of the model
    only as its losses can be computed from parts: classes are cut where each device can compare
    those that it has.
    """
    if name not in graph.outputs or part == "R":
        return part != "P"
    dim = dim_of(part)
    return dim is not None and all(
        loss.has_target
        and not loss.is_users
        and (loss.class_dim != dim or (loss.compares_parts and blocks_of(part) == 1))
        for loss in _losses(graph)
        if loss.output.name == name
    )


def _class_dims(graph: Graph, name: str) -> set[int | None]:
    """The dimensions of the classes of an output."""
    return {one.class_dim for one in _losses(graph) if one.output.name == name} - {None}
