"""Operators that have to be in one stage, because they share state that forward changes.

Solvers are not told. They get a problem in which such a set of operators is one operator; in a
strategy for it, the stage of this operator has the whole set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from planner.artefacts.graph import (
    Graph,
    Operator,
    View,
    joint_operators,
    parameters_by_name,
    predecessors,
    tensors_by_name,
    unread_tensors,
)
from planner.artefacts.problem import Problem, Result, switches_of
from planner.artefacts.profile import OperatorCost, Profile, storage_owner
from planner.artefacts.strategy import Stage, Strategy, operator_indices
from planner.artefacts.weight_gradients import backward_weight_share
from planner.solvers.manual import Manual
from planner.support.errors import OptionError
from planner.support.memo import remembered

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A problem for solvers.

    Attributes:
        problem: in which sets of operators are one.
        members: by the name of such an operator, the names of the set, in the graph's order.
        order: by name, the place of each operator of the whole graph.
    """

    problem: Problem
    members: Mapping[str, Names]
    order: Mapping[str, int]

    def parted(self, result: Result) -> Result:
        """A solver's answer as one to the whole problem."""
        if not self.members or result.strategy is None:
            return result
        others = tuple(map(self._parted, result.others))
        return replace(result, strategy=self._parted(result.strategy), others=others)

    def joined(self, strategy: Strategy) -> Strategy:
        """A strategy for the whole problem as solvers have it."""
        last = {name: one for one, names in self.members.items() for name in names}

        def stage(one: Stage) -> Stage:
            names = dict.fromkeys(last.get(name, name) for name in one.operators)
            return replace(one, operators=tuple(names))

        return replace(strategy, stages=tuple(map(stage, strategy.stages)))

    def _parted(self, strategy: Strategy) -> Strategy:
        def stage(one: Stage) -> Stage:
            names = [n for name in one.operators for n in self.members.get(name, (name,))]
            sharding = one.sharding
            if sharding is not None:  # joint operators run whole, as all that have no rule do
                rules = {n: rule for n, rule in sharding.rules.items() if n not in self.members}
                sharding = replace(sharding, rules=rules)
            names.sort(key=self.order.__getitem__)
            return replace(one, operators=tuple(names), sharding=sharding)

        return replace(strategy, stages=tuple(map(stage, strategy.stages)))


def joined(problem: Problem) -> Joined:
    """The problem with one operator for each set that has to be in one stage; it has the name of
    the last one, and takes over the pins of all.

    Raises:
        OptionError: if the user cuts within such a set.
    """
    graph = problem.profile.graph
    sets = joint_operators(graph)
    names = [tuple(graph.operators[v].name for v in one) for one in sets]
    members = {some[-1]: some for some in names}
    if not sets:
        return Joined(problem, members, {})
    last = {name: some[-1] for some in names for name in some}
    for cut in switches_of(problem.search, Manual).cuts:
        if last.get(cut, cut) != cut:
            raise OptionError(
                f"--cuts {cut}: forward changes state that operators before and behind it share, up"
                f" to {last[cut]}: cut there, or in front of them"
            )
    pins = dict.fromkeys((last.get(name, name), device) for name, device in problem.search.pins)
    profile = _joined_profile(problem.profile)
    search = replace(problem.search, pins=tuple(pins))
    return Joined(
        replace(problem, profile=profile, search=search), members, operator_indices(graph)
    )


def _blocks(graph: Graph) -> list[tuple[int, ...]]:
    """The sets and the single operators that are in none, in topological order."""
    block_of = {v: one for one in joint_operators(graph) for v in one}
    blocks = [block_of.get(v, (v,)) for v in range(len(graph.operators))]
    feeds = predecessors(graph)
    needs = {
        block: {blocks[u] for v in block for u in feeds[v]} - {block}
        for block in dict.fromkeys(blocks)
    }
    return list(TopologicalSorter(needs).static_order())


@remembered
def _joined_profile(profile: Profile) -> Profile:
    """The profile in which sets of operators are one."""
    graph, sets = profile.graph, joint_operators(profile.graph)
    order = _blocks(graph)
    made = {block: _operator(graph, block) for block in order}
    operators = tuple(made.values())
    kept = {name for one in operators for name in one.outputs}.union(graph.inputs)
    inside = {graph.operators[v].name for one in sets for v in one}
    makers = {name: one.name for one in graph.operators for name in one.outputs}
    return replace(
        profile,
        graph=replace(
            graph, operators=operators, tensors=tuple(t for t in graph.tensors if t.name in kept)
        ),
        operators=tuple(_cost(profile, block, made[block]) for block in order),
        views=(
            *(one for one in profile.views if makers[one.tensor] not in inside),
            *(view for block in sets for view in _views(profile, block, made[block])),
        ),
        gradient_views=tuple(
            one for one in profile.gradient_views if makers[one.base] not in inside
        ),
        modules=tuple(profile.modules[block[-1]] for block in order) if profile.modules else (),
        growth=None,
    )


def _operator(graph: Graph, block: Sequence[int]) -> Operator:
    """The operator that a set of operators is."""
    if len(block) == 1:
        return graph.operators[block[0]]
    some = [graph.operators[v] for v in block]
    own = {name for one in some for name in one.outputs}
    others = {*range(len(graph.operators))} - {*block}
    read = {name for v in others for name in graph.operators[v].inputs}.union(graph.outputs)
    read |= unread_tensors(graph)
    return Operator(
        name=some[-1].name,
        type=some[-1].type,
        inputs=tuple(dict.fromkeys(n for one in some for n in one.inputs if n not in own)),
        outputs=tuple(n for one in some for n in one.outputs if n in read),
        parameters=tuple(dict.fromkeys(n for one in some for n in one.parameters)),
    )


def _cost(profile: Profile, block: Sequence[int], operator: Operator) -> OperatorCost:
    """The cost of a set of operators that run one after the other."""
    if len(block) == 1:
        return profile.operators[block[0]]
    some, shares = [profile.operators[v] for v in block], backward_weight_share(profile)
    tensors, inside = tensors_by_name(profile.graph), frozenset(block)
    held = parameters_by_name(profile.graph)
    stashed = {storage_owner(profile, n, inside) for one in some for n in one.stash_tensors}
    outer = {*operator.inputs, *operator.outputs}
    return OperatorCost(
        name=operator.name,
        forward_s=_time_s(some, "forward_s"),
        backward_s=_time_s(some, "backward_s"),
        host_forward_s=_time_s(some, "host_forward_s"),
        host_backward_s=_time_s(some, "host_backward_s"),
        output_bytes=sum(tensors[name].bytes for name in operator.outputs),
        parameter_bytes=sum(held[name].bytes for name in operator.parameters),
        flops=sum(one.flops for one in some),
        bytes_moved=sum(one.bytes_moved for one in some),
        stash_tensors=tuple(sorted(stashed & outer)),
        stash_private_bytes=sum(one.stash_private_bytes for one in some)
        + sum(tensors[name].bytes for name in stashed - outer if name in tensors),
        workspace_bytes=max(one.workspace_bytes for one in some),
        interval=max(one.interval for one in some),
        backward_weight_s=sum(shares[v] * profile.operators[v].backward_s for v in block),
        fixed_forward_s=_time_s(some, "fixed_forward_s"),
        fixed_backward_s=_time_s(some, "fixed_backward_s"),
        sums_s=_time_s(some, "sums_s"),
    )


def _time_s(some: Sequence[OperatorCost], name: str) -> float:
    """Of operators together, by the name of the figure."""
    return float(sum(getattr(one, name) for one in some))


def _views(profile: Profile, block: Sequence[int], operator: Operator) -> list[View]:
    """Outputs of a set of operators that share the storage of what it reads."""
    given = {*operator.inputs, *operator.parameters}
    owners = {name: storage_owner(profile, name, frozenset(block)) for name in operator.outputs}
    return [View(name, owner) for name, owner in owners.items() if owner in given]
