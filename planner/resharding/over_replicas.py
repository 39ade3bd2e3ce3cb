"""A stage whose parameters, gradients and optimizer state lie in parts over its replicas, as one
whose mesh has the replicas as one more axis, the last one.

    level 0  whole on every replica
    level 1  the optimizer's state in parts: gradients are added up whole over the microbatches of a
             replica, and scattered once per iteration
    level 2  the gradients, too: scattered in every backward
    level 3  the parameters, too: gathered for every forward and backward

(ZeRO-1, -2 and -3 of Rajbhandari et al., SC 2020; FSDP is level 3.) Each replica runs microbatches
of its own: along the axis of the replicas tensors are OWN, parameters are read whole, and their
gradients are summands. What is cut is a device's own part of a parameter after the other axes, in
chunks of rows. A parameter that several stages hold keeps level 0, and so does a scalar.

So one machine converts, prices and runs both: where this stage has the parts, `reshardings`,
`parameter_specs` and what builds on them ask for `over_replicas(stage, graph)`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from planner.artefacts.graph import Graph, Operator, Parameter, holders, parameters_by_name
from planner.artefacts.sharding import (
    AT_REST,
    CHUNKS,
    OWN,
    AxisRule,
    Rule,
    Sharding,
    Spec,
    reads,
    rule_by,
)
from planner.artefacts.strategy import Stage, Strategy, indices_of, shared_level
from planner.support.memo import remembered


def _level_of(stage: Stage, parameter: Parameter, graph: Graph) -> int:
    """The level of a parameter of a stage."""
    readers = [graph.operators[v] for v in holders(graph)[parameter.name]]
    if not parameter.shape or any(one.name not in stage.operators for one in readers):
        return 0
    level = stage.zero_of.get(parameter.name, stage.zero)
    if parameter.trainable:
        return level
    # Each replica has running statistics, and other state, of its own microbatches.
    is_state = parameter.state or any(one.type == "BatchNormalization" for one in readers)
    return 0 if is_state or level < 3 else level


@remembered
def over_replicas(stage: Stage, graph: Graph) -> Stage:
    """The stage with its replicas as an axis of the mesh; itself where nothing lies over them.

    Its groups are those that share: `Stage.over` replicas each, device by device of the mesh.
    """
    if not shared_level(stage):
        return stage
    groups = tuple(
        tuple(stage.groups[first + k][i] for i in range(len(stage.groups[first]))
              for k in range(stage.over))
        for first in range(0, stage.num_replicas, stage.over)
    )  # fmt: skip
    levels = _Levels(stage.operators, stage.over, stage.zero, tuple(stage.zero_of.items()))
    sharding = _sharding(graph, stage.sharding, levels)
    return replace(stage, groups=groups, sharding=sharding, over=1, zero=0, zero_of={})


def with_axes(strategy: Strategy, graph: Graph) -> Strategy:
    """The strategy with `over_replicas` of all its stages."""
    stages = tuple(over_replicas(stage, graph) for stage in strategy.stages)
    return strategy if stages == strategy.stages else replace(strategy, stages=stages)


class _Levels(NamedTuple):
    """What lies over replicas, of which operators; `zero_of` by name."""

    operators: tuple[str, ...]
    over: int
    zero: int
    zero_of: tuple[tuple[str, int], ...]


@remembered
def _sharding(graph: Graph, own: Sharding | None, levels: _Levels) -> Sharding:
    """Of all stages that differ in nothing else the same, as `local_stage` needs it."""
    names, over, zero, zero_of = levels
    stage = Stage(names, (), 1, False, own, over, zero, dict(zero_of))
    whole = ("R",) * len(stage.mesh)
    operators = [graph.operators[v] for v in indices_of(stage, graph)]
    made = {name for one in operators for name in one.outputs}
    read = {name for one in operators for name in one.inputs} - made
    held = sorted({name for one in operators for name in one.parameters})
    known = parameters_by_name(graph)
    level = {name: _level_of(stage, known[name], graph) for name in held}

    def tensors(names: Iterable[str], specs: Mapping[str, Spec]) -> dict[str, Spec]:
        return {name: (*specs.get(name, whole), OWN) for name in sorted(names)}

    def cut(least: int, specs: Mapping[str, Spec], names: Iterable[str]) -> dict[str, Spec]:
        """How parameters lie that are cut from a level on, and those that lie so already."""
        return {
            name: (*specs.get(name, whole), CHUNKS if level[name] >= least else "R")
            for name in names
            if level[name] >= least or name in specs
        }

    at_rest = {kind: getattr(own, kind, {}) for kind in AT_REST}
    gradients = {**at_rest["parameters"], **at_rest["gradients"]}
    trained = [name for name in held if known[name].trainable]
    return Sharding(
        mesh=(*stage.mesh, stage.over),
        rules={one.name: _rule(stage, one, known) for one in operators},
        parameters=cut(3, at_rest["parameters"], held),
        inputs=tensors(read, at_rest["inputs"]),
        outputs=tensors(made, at_rest["outputs"]),
        gradients=cut(2, gradients, trained),
        states=cut(1, {**gradients, **at_rest["states"]}, trained),
    )


def _rule(stage: Stage, operator: Operator, parameters: Mapping[str, Parameter]) -> Rule:
    """The rule of an operator with one axis more."""
    axes = () if stage.sharding is None else rule_by(stage.sharding, operator).axes
    inputs = tuple("R" if name in parameters else OWN for name in reads(operator))
    return Rule((*axes, AxisRule(inputs, (OWN,) * len(operator.outputs))))
