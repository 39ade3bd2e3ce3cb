"""From a stage on a view to a choice program, and back from its answer to a sharding.

Nodes are operators (their rules), parameters (how they, their gradients and their state lie),
tensors from outside (how they come), and shared copies (made or not): a tensor in a spec that
several readers want, which is converted once for all of them. Edges are the conversions between
what one makes and another one wants, there and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import NamedTuple

import numpy as np

from planner.artefacts.graph import (
    ITEM_BYTES,
    Parameter,
    consumers,
    differentiated,
    holders,
    parameters_by_name,
    tensors_by_name,
)
from planner.artefacts.operator_types import facts
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Rule, Sharding, Spec, local_shape, reads
from planner.resharding.gradients import gradient_spec
from planner.resharding.reshardings import reads_back
from planner.solvers.intra.prices import Prices
from planner.solvers.intra.space import Lies, View, comes, lies_of, strategies, with_replicas
from planner.solvers.program.problem import ChoiceProgram, Held
from planner.solvers.sharded.complete import may_leave
from planner.support.arrays import Floats


class Ends(NamedTuple):
    """A tensor as one of its ends has it.

    Attributes:
        spec: of itself.
        gradient: of its gradient; None where none flows.
    """

    spec: Spec
    gradient: Spec | None


@dataclass
class Built:
    """A program, and what its nodes stand for.

    Attributes:
        program: computations and collectives, weighted.
        compute, collectives: per node, (k,) seconds of an iteration.
        edge_s: per edge, seconds of its collectives.
        rules: per operator, its strategies; operator v is node v.
        lies: by name, node and strategies of a parameter.
        inputs: by name, node and specs of a tensor from outside.
    """

    view: View
    rules: list[tuple[Rule, ...]]
    compute: list[Floats] = field(default_factory=list)
    collectives: list[Floats] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_s: list[Floats] = field(default_factory=list)
    edge_once_s: list[Floats] = field(default_factory=list)
    held: list[tuple[Held, ...]] = field(default_factory=list)
    lies: dict[str, tuple[int, tuple[Lies, ...]]] = field(default_factory=dict)
    inputs: dict[str, tuple[int, tuple[Spec, ...]]] = field(default_factory=dict)

    def node(self, compute: Floats, collectives: Floats, held: tuple[Held, ...] = ()) -> int:
        self.compute.append(compute)
        self.collectives.append(collectives)
        self.held.append(held)
        return len(self.compute) - 1

    def edge(self, u: int, v: int, seconds: Floats, once: Floats | None = None) -> None:
        if seconds.any() or (once is not None and once.any()):
            self.edges.append((u, v))
            self.edge_s.append(seconds)
            self.edge_once_s.append(np.zeros_like(seconds) if once is None else once)

    def program(self, weights: tuple[float, float], limit_bytes: int | None) -> ChoiceProgram:
        """Computations and collectives, those inside passes and those of the step weighted."""
        inside, once = weights
        cost = tuple(
            one + inside * other for one, other in zip(self.compute, self.collectives, strict=True)
        )
        edge_cost = tuple(
            inside * one + once * other
            for one, other in zip(self.edge_s, self.edge_once_s, strict=True)
        )
        held = tuple(self.held) if limit_bytes is not None else ((),) * len(cost)
        return ChoiceProgram(cost, tuple(self.edges), edge_cost, held, limit_bytes)


def built(problem: Problem, view: View, *, shared: bool = True) -> Built:
    """The program of all operators of a problem on a view.

    Args:
        shared: whether replicas may keep parts.
    """
    return _Builder(problem, view, shared=shared).built()


class _Builder:
    def __init__(self, problem: Problem, view: View, *, shared: bool) -> None:
        self.problem, self.view = problem, view
        self.graph = problem.profile.graph
        self.prices = Prices(problem, view)
        self.replicated = view.replicas > 1
        self.shared = shared and self.replicated
        self.with_backward = differentiated(self.graph)
        self.mesh_rules = [strategies(problem.profile, v, view.mesh)
                           for v in range(len(self.graph.operators))]  # fmt: skip
        self.rules = [
            [with_replicas(one, operator, replicated=self.replicated) for one in some]
            for operator, some in zip(self.graph.operators, self.mesh_rules, strict=True)
        ]
        self.made = Built(view, self.mesh_rules)

    def built(self) -> Built:
        self._operators()
        for name in tensors_by_name(self.graph):
            self._tensor(name)
        for one in self.graph.parameters:
            self._parameter(one)
        return self.made

    def _operators(self) -> None:
        rounds = self.prices.rounds
        for v, time_s in enumerate(self.prices.compute_s(self.mesh_rules)):
            asked = np.array([self.prices.statistics_s(v, one) for one in self.mesh_rules[v]])
            leaving = np.zeros(len(asked))
            for o, name in enumerate(self.graph.operators[v].outputs):
                if name in self.graph.outputs:
                    leaving += [self._leaving_s(name, one, o) for one in self.rules[v]]
            self.made.node(rounds * time_s, rounds * (asked + leaving))

    def _leaving_s(self, name: str, rule: Rule, o: int) -> float:
        """An output of the model, converted into a spec in which it may leave, and back."""
        spec = rule.outputs[o]
        leaves = tuple(
            part if part == "M" or (part[0] == "S" and may_leave(self.graph, name, part)) else "R"
            for part in spec
        )
        one = tensors_by_name(self.graph)[name]
        there = self.prices.converted_s(one.shape, ITEM_BYTES[one.dtype], spec, leaves)
        if not one.gradient:
            return there
        back = gradient_spec(rule, spec)
        return there + self.prices.converted_s(one.shape, ITEM_BYTES[one.dtype], leaves, back)

    # ---- tensors

    def _tensor(self, name: str) -> None:
        tensor = tensors_by_name(self.graph)[name]
        readers = list(dict.fromkeys(consumers(self.graph)[name]))
        if not readers:
            return
        wants = [self._wants(v, name, tensor.gradient) for v in readers]
        source, homes = self._source(name, [want.spec for some in wants for want in some])
        known: dict[tuple[Ends, Ends], float] = {}

        def price(home: Ends, want: Ends) -> float:
            key = home, want
            if key not in known:
                known[key] = self._ends_s(tensor.shape, ITEM_BYTES[tensor.dtype], home, want)
            return known[key]

        count: dict[Ends, int] = {}
        for some in wants:
            for want in set(some):
                count[want] = count.get(want, 0) + 1
        copies = {}
        for want, number in count.items():
            if number > 1:
                copy_s = np.array([[0.0, price(home, want)] for home in homes])
                if copy_s.any():
                    node = self.made.node(np.zeros(2), np.zeros(2))
                    copies[want] = node
                    self.made.edge(source, node, self.prices.rounds * copy_s)
        for v, some in zip(readers, wants, strict=True):
            self.made.edge(source, v, self.prices.rounds * np.array(
                [[0.0 if count[want] > 1 else price(home, want) for want in some] for home in homes]
            ))  # fmt: skip
            for want in set(some) & copies.keys():
                needs = np.zeros((2, len(some)))
                needs[0, [i for i, one in enumerate(some) if one == want]] = inf
                self.made.edge(copies[want], v, needs)

    def _wants(self, v: int, name: str, has_gradient: bool) -> list[Ends]:
        operator = self.graph.operators[v]
        at = reads(operator).index(name)
        flows = has_gradient and v in self.with_backward
        return [
            Ends(rule.inputs[at], gradient_spec(rule, rule.inputs[at]) if flows else None)
            for rule in self.rules[v]
        ]

    def _source(self, name: str, wanted: Sequence[Spec]) -> tuple[int, list[Ends]]:
        """The node that makes a tensor, and how it lies by the node's strategies."""
        for v, operator in self._makers():
            if name in operator.outputs:
                o = operator.outputs.index(name)
                return v, [
                    Ends(rule.outputs[o], gradient_spec(rule, rule.outputs[o]))
                    for rule in self.rules[v]
                ]
        specs = comes(tensors_by_name(self.graph)[name], wanted, len(self.view.sizes))
        if self.replicated:
            specs = tuple(dict.fromkeys((*one[:-1], "M") for one in specs))
        node = self.made.node(np.zeros(len(specs)), np.zeros(len(specs)))
        self.made.inputs[name] = node, specs
        return node, [Ends(one, one) for one in specs]

    def _makers(self):
        return enumerate(self.graph.operators)

    def _ends_s(self, shape: tuple[int, ...], item: float, home: Ends, want: Ends) -> float:
        there = self.prices.converted_s(shape, item, home.spec, want.spec)
        if want.gradient is None or home.gradient is None:
            return there
        return there + self.prices.converted_s(shape, item, want.gradient, home.gradient)

    # ---- parameters

    def _parameter(self, one: Parameter) -> None:
        readers = list(dict.fromkeys(holders(self.graph)[one.name]))
        if not readers:
            return
        n = len(self.view.mesh)
        wanted = [end.spec[:n] for v in readers for end in self._wants(v, one.name, False)]
        lies = lies_of(one, wanted, self.view, shared=self.shared)
        node = self.made.node(np.zeros(len(lies)), np.zeros(len(lies)), self._held(one, lies))
        self.made.lies[one.name] = node, lies
        for k, v in enumerate(readers):
            wants = self._wants(v, one.name, one.trainable)
            known: dict[tuple[int, Ends], tuple[float, float]] = {}
            seconds, once = (np.zeros((len(lies), len(wants))) for _ in range(2))
            for i, lie in enumerate(lies):
                for j, want in enumerate(wants):
                    if (i, want) not in known:
                        known[i, want] = self._parameter_s(one, lie, want, v, first=k == 0)
                    seconds[i, j], once[i, j] = known[i, want]
            self.made.edge(node, v, seconds, once)

    def _held(self, one: Parameter, lies: Sequence[Lies]) -> tuple[Held, ...]:
        return ()

    def _parameter_s(
        self, one: Parameter, lie: Lies, want: Ends, v: int, *, first: bool
    ) -> tuple[float, float]:  # fmt: skip
        prices, item = self.prices, ITEM_BYTES[one.dtype]
        home = lie.at(3, replicated=self.replicated)
        there = prices.converted_s(one.shape, item, home, want.spec)
        if want.gradient is None:
            return prices.rounds * there, 0.0
        operator = self.graph.operators[v]
        bias = len(one.shape) == 1 and facts(operator.type).bias is not None
        again = there if not bias and reads_back(operator, {one.name}, self.graph) else 0.0
        gradient = tuple(
            "P" if part == "R" and made == "P" else part
            for part, made in zip(lie.at(2, replicated=self.replicated), want.gradient, strict=True)
        )
        back_item = one.gradient_item_bytes
        back = prices.converted_s(one.shape, back_item, want.gradient, gradient)
        micro = prices.rounds * (there + again + back)
        if not first:
            return micro, 0.0
        state = lie.at(1, replicated=self.replicated)
        local = prod(local_shape(one.shape, state, self.view.sizes)) * item
        once = prices.once_s(one.shape, back_item, gradient, state)
        once += prices.once_s(one.shape, item, state, home)
        return micro, once + prices.step_s(local)


def sharding_of(problem: Problem, made: Built, picks: Sequence[int]) -> tuple[Sharding, dict[str, int]]:
    """The sharding of an answer, and the levels of parameters over replicas."""
    graph, view = problem.profile.graph, made.view
    n = len(view.mesh)
    whole = ("R",) * n
    rules = {
        operator.name: made.rules[v][picks[v]] for v, operator in enumerate(graph.operators)
    }
    lies = {name: some[picks[node]] for name, (node, some) in made.lies.items()}
    known = parameters_by_name(graph)

    def at(least: int) -> dict[str, Spec]:
        return {name: one.at(least, replicated=False) for name, one in lies.items()}

    parameters, gradients, states = at(3), at(2), at(1)
    outputs = {}
    for operator in graph.operators:
        for o, name in enumerate(operator.outputs):
            if name in graph.outputs:
                spec = rules[operator.name].outputs[o]
                outputs[name] = tuple(
                    part if part[0] == "S" and may_leave(graph, name, part) else "R"
                    for part in spec
                )
    inputs = {name: some[picks[node]][:n] for name, (node, some) in made.inputs.items()}
    sharding = Sharding(
        mesh=view.mesh,
        rules={name: one for name, one in rules.items() if any(a.is_split for a in one.axes)},
        parameters={name: one for name, one in parameters.items() if one != whole},
        inputs={name: one for name, one in inputs.items() if one != whole},
        outputs={name: one for name, one in outputs.items() if one != whole},
        gradients={name: one for name, one in gradients.items()
                   if known[name].trainable and one != parameters[name]},
        states={name: one for name, one in states.items()
                if known[name].trainable and one != gradients[name]},
    )  # fmt: skip
    return sharding, {name: one.level for name, one in lies.items() if one.level}
