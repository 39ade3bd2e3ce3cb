"""What is wrong with how the stages of a strategy are split: one message for each mistake.

`strategy.violations` checks what can be said of stages without their rules; `all_violations` checks
that first, and then these.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from planner.artefacts.graph import (
    Graph,
    Operator,
    Parameter,
    Tensor,
    consumers,
    holders,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.plan import Plan
from planner.artefacts.sharding import (
    AT_REST,
    CHUNKS,
    OWN,
    Sharding,
    Spec,
    blocks_of,
    dim_of,
    reads,
    rule_by,
    tiles,
)
from planner.artefacts.strategy import Stage, Strategy, indices_of, shared_level, violations
from planner.support.errors import FileError

_Described = Mapping[str, Tensor | Parameter]


def all_violations(strategy: Strategy, graph: Graph, num_devices: int) -> tuple[str, ...]:
    """Everything that is wrong with a strategy; empty if it is sound.

    Args:
        num_devices: the devices that there are; indices run below it.
    """
    return violations(strategy, graph, num_devices) or sharding_violations(strategy, graph)


def sharding_violations(strategy: Strategy, graph: Graph) -> tuple[str, ...]:
    """Everything that is wrong with the shardings of a strategy whose structure is sound; empty if
    all stages can be priced and run.
    """
    wrong: list[str] = []
    for s, stage in enumerate(strategy.stages):
        wrong += [f"stage {s}: {one}" for one in _of_sharing(stage, graph)]
        if stage.sharding is not None:
            found = [*_of_stage(stage, stage.sharding, graph)]
            wrong += [f"stage {s}: {one}" for one in found]
    if not wrong and any(stage.sharding is not None for stage in strategy.stages):
        wrong += _of_ties(strategy, graph)
        if strategy.schedule.is_asynchronous:
            wrong.append("a stage is split, which the schedule pipedream cannot run")
    return tuple(wrong)


def _of_sharing(stage: Stage, graph: Graph) -> Iterator[str]:
    """Of what lies in parts over replicas."""
    held = {name for v in indices_of(stage, graph) for name in graph.operators[v].parameters}
    for name in sorted(stage.zero_of.keys() - held):
        yield f"zero_of.{name}: expected a parameter of the stage"
    if stage.sharding is not None and shared_level(stage):
        for kind in ("parameters", "gradients", "states"):
            for name, spec in sorted(getattr(stage.sharding, kind).items()):
                if CHUNKS in spec:
                    yield f"{kind}.{name}: expected no chunks along the mesh beside `over`"


def _of_crossings(names: Iterable[str], specs: Mapping[str, Spec]) -> Iterator[str]:
    """Of tensors that cross stages."""
    for name in sorted(names):
        if any(blocks_of(part) > 1 for part in specs.get(name, ())):
            yield (
                f"{name}: {','.join(specs[name])}: expected a spec without blocks of a tensor that"
                " crosses stages"
            )


def _of_stage(stage: Stage, sharding: Sharding, graph: Graph) -> Iterator[str]:
    operators = {graph.operators[i].name: graph.operators[i] for i in indices_of(stage, graph)}
    for name in sorted(sharding.rules.keys() - operators.keys()):
        yield f"rules.{name}: expected an operator of the stage"
    made = {name for operator in operators.values() for name in operator.outputs}
    read = {name for operator in operators.values() for name in operator.inputs} - made
    described: _Described = {**tensors_by_name(graph), **parameters_by_name(graph)}
    yield from _at_rest(sharding, operators.values(), {"inputs": read, "outputs": made}, described)
    leaving = {n for n in made if any(graph.operators[v].name not in operators
                                      for v in consumers(graph)[n])}  # fmt: skip
    for names, specs in ((read - {*graph.inputs}, sharding.inputs), (leaving, sharding.outputs)):
        yield from _of_crossings(names, specs)
    yield from _of_rules(stage, sharding, graph, described)
    yield from _of_states(sharding, graph)


def _at_rest(
    sharding: Sharding, operators: Iterable[Operator], known: Mapping[str, Collection[str]],
    described: _Described,
) -> Iterator[str]:  # fmt: skip
    """Of specs of tensors and parameters that lie on the devices between operators.

    Args:
        operators: of the stage.
        known: names of the tensors that it reads and makes.
    """
    held = {name for operator in operators for name in operator.parameters}
    for kind in AT_REST:
        for name, spec in sorted(getattr(sharding, kind).items()):
            if name not in known.get(kind, held):
                noun = "a tensor" if kind in known else "a parameter"
                yield f"{kind}.{name}: expected {noun} of the stage"
            elif OWN in spec or (CHUNKS in spec and kind in known):
                yield f"{kind}.{name}: expected S, R or P for each axis, got {','.join(spec)}"
            elif problem := _indivisible(described[name].shape, spec, sharding.mesh):
                yield f"{kind}.{name}: {problem}"


def _of_rules(
    stage: Stage, sharding: Sharding, graph: Graph, described: _Described
) -> Iterator[str]:  # fmt: skip
    sound = True
    for i in indices_of(stage, graph):
        operator = graph.operators[i]
        rule = sharding.rules.get(operator.name)
        if rule is None:
            continue
        names = (*reads(operator), *operator.outputs)
        counts = (len(rule.inputs), len(rule.outputs))
        if counts != (len(reads(operator)), len(operator.outputs)):
            sound = False
            yield (
                f"rules.{operator.name}: expected specs of {len(reads(operator))} inputs"
                f" ({', '.join(reads(operator))}) and {len(operator.outputs)} outputs, got"
                f" {counts[0]} and {counts[1]}"
            )
            continue
        for name, spec in zip(names, (*rule.inputs, *rule.outputs), strict=True):
            if {CHUNKS, OWN}.intersection(spec):
                sound = False
                yield (
                    f"rules.{operator.name}: {name}: expected S, R or P for each axis, got"
                    f" {','.join(spec)}"
                )
            elif problem := _indivisible(described[name].shape, spec, sharding.mesh):
                sound = False
                yield f"rules.{operator.name}: {name}: {problem}"
    if sound:
        yield from _of_summands(stage, sharding, graph)


def _of_summands(stage: Stage, sharding: Sharding, graph: Graph) -> Iterator[str]:
    """Only floats are added up: neither tensors nor parameters of other types can be summands."""
    described: _Described = {**tensors_by_name(graph), **parameters_by_name(graph)}
    for i in indices_of(stage, graph):
        operator = graph.operators[i]
        rule = rule_by(sharding, operator)
        names = (*reads(operator), *operator.outputs)
        for name, spec in zip(names, (*rule.inputs, *rule.outputs), strict=True):
            if "P" in spec and "float" not in described[name].dtype:
                yield (
                    f"rules.{operator.name}: {name}: expected S or R of {described[name].dtype},"
                    " which is not added up, got P"
                )


def _indivisible(shape: Sequence[int], spec: Spec, mesh: tuple[int, ...]) -> str | None:
    """Why a tensor cannot lie in a spec."""
    try:
        tiles(shape, spec, mesh, 0)
    except ValueError as error:
        return str(error)
    return None


def _of_states(sharding: Sharding, graph: Graph) -> Iterator[str]:
    """A gradient or state lies as its parameter, or is cut further along axes where that is whole;
    a state at least as far as its gradient.
    """
    whole = ("R",) * len(sharding.mesh)
    known = parameters_by_name(graph)
    for name in sorted({*sharding.gradients, *sharding.states}):
        lies = sharding.parameters.get(name, whole)
        gradient = sharding.gradients.get(name, lies)
        state = sharding.states.get(name, gradient)
        if name in known and not known[name].trainable:
            yield f"states.{name}: expected a parameter that is trained"
        for kind, (before, after) in zip(
            ("gradients", "states"), pairwise((lies, gradient, state)), strict=True
        ):
            if any(a not in ("R", b) for a, b in zip(before, after, strict=True)):
                yield (
                    f"{kind}.{name}: expected {','.join(before)}, cut further only where that is R,"
                    f" got {','.join(after)}"
                )
        if gradient not in (lies, state):
            yield (
                f"gradients.{name}: expected the spec of the parameter or that of the state,"
                f" {','.join(state)}, got {','.join(gradient)}"
            )
        for axis, part in enumerate(state):
            if part != lies[axis] and dim_of(part) in map(dim_of, lies[axis + 1 :]):
                yield (
                    f"states.{name}: {part}: expected another dimension than one that the"
                    f" parameter is cut along on a later axis, {','.join(lies)}"
                )


def _of_ties(strategy: Strategy, graph: Graph) -> Iterator[str]:
    """A parameter of several stages lies in the same way in all of them."""
    users = holders(graph)
    stage_at = {name: s for s, one in enumerate(strategy.stages) for name in one.operators}
    for parameter in graph.parameters:
        stages = sorted({stage_at[graph.operators[v].name] for v in users[parameter.name]})
        ways = {_lies(strategy.stages[s], parameter.name) for s in stages}
        if len(ways) > 1 and any(part != "R" for way in ways for part in "".join(way[1])):
            yield (
                f"parameter {parameter.name} is used in stages {', '.join(map(str, stages))} and"
                " does not lie in the same way there: "
                + " and ".join(sorted(",".join(way[1]) or "whole" for way in ways))
            )


def _lies(stage: Stage, name: str) -> tuple[tuple[int, ...], Spec]:
    """Mesh and specs of a parameter, its gradient and its state."""
    if stage.sharding is None:
        return (), ()
    sharding = stage.sharding
    whole = ("R",) * len(sharding.mesh)
    lies = sharding.parameters.get(name, whole)
    gradient = sharding.gradients.get(name, lies)
    return sharding.mesh, (*lies, *sharding.states.get(name, gradient))


def check_fits(plan: Plan, strategy_name: str, graph: Graph) -> None:
    """Whether the strategy of a plan is one of the operators of a graph.

    Args:
        strategy_name: the plan's, for messages.
        graph: of its profile.

    Raises:
        FileError: if it is not.
    """
    wrong = all_violations(plan.strategy, graph, max(plan.ranks) + 1)
    if wrong:
        raise FileError(
            f"{strategy_name}: the strategy does not fit its profile: {'; '.join(wrong)}; run:"
            " planner solve"
        )
