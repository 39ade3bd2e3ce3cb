"""From a stage on a view to a choice program, and back from its answer to a sharding.

Nodes are operators (their rules), parameters (how they, their gradients and their state lie),
tensors from outside (how they come), and shared copies (made or not): a tensor in a spec that
several readers want, which is converted once for all of them. Edges are the conversions between
what one makes and another one wants, there and back.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    Parameter,
    Tensor,
    consumers,
    differentiated,
    holders,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.losses import losses
from planner.artefacts.operator_types import VIEW, facts
from planner.artefacts.problem import Problem
from planner.artefacts.profile import storage_owner
from planner.artefacts.sharding import CHUNKS, OWN, Rule, Spec, dim_of, local_shape, reads
from planner.costs.casts import cast_share, cast_weights
from planner.costs.local_stage import work_share
from planner.costs.stage_memory import parameter_bytes
from planner.costs.update import state_copies
from planner.resharding.gradients import gradient_spec
from planner.resharding.reshardings import reads_back
from planner.resharding.sums import ParameterSpecs
from planner.solvers.intra.prices import Prices
from planner.solvers.intra.space import (
    Lies,
    View,
    classes,
    comes,
    lies_of,
    strategies,
    with_replicas,
)
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


class Parts(NamedTuple):
    """Seconds of an iteration by what they are, or weights of these.

    Attributes:
        compute: of operators and of the optimizer's step.
        inside: collectives inside passes.
        sums: of gradients, which run beside the last backward.
        gathers: of parameters behind the step.
    """

    compute: Any = 0.0
    inside: Any = 0.0
    sums: Any = 0.0
    gathers: Any = 0.0

    def weighted(self, weights: "Parts") -> Any:
        """The weighted sum."""
        return sum(w * one for w, one in zip(weights, self, strict=True))


@dataclass
class Built:
    """A program, and what its nodes stand for.

    Attributes:
        view: the devices.
        again: whether forwards run again.
        node_s: per node, (k,) seconds of an iteration.
        edges: per edge, its nodes.
        edge_s: per edge, (k, l) seconds; inf where both do not go together.
        held: per node, (k,) bytes; None for none.
        kept: per node, what it holds besides unless that is made again.
        unsure: edges that may cost less.
        rules: per operator, its strategies; operator v is node v.
        lies: by name, node and strategies of a parameter.
        inputs: by name, node and specs of a tensor from outside.
    """

    view: View
    again: bool
    rules: list[tuple[Rule, ...]]
    node_s: list[Parts] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_s: list[Parts] = field(default_factory=list)
    held: list[Floats | None] = field(default_factory=list)
    kept: list[Floats | None] = field(default_factory=list)
    unsure: set[int] = field(default_factory=set)
    lies: dict[str, tuple[int, tuple[Lies, ...]]] = field(default_factory=dict)
    inputs: dict[str, tuple[int, tuple[Spec, ...]]] = field(default_factory=dict)

    def node(
        self, seconds: Parts, bytes_: Floats | None = None, kept_bytes: Floats | None = None
    ) -> int:  # fmt: skip
        """Adds a node; its index.

        Args:
            bytes_: that it holds whatever the schedule.
            kept_bytes: that it holds unless they are made again.
        """
        self.node_s.append(seconds)
        self.held.append(bytes_)
        self.kept.append(kept_bytes)
        return len(self.node_s) - 1

    def edge(self, u: int, v: int, seconds: Parts, *, sure: bool = True) -> None:
        """Adds an edge, if it costs anything.

        Args:
            sure: whether it always costs that; it may cost less.
        """
        if any(np.any(one) for one in seconds):
            if not sure:
                self.unsure.add(len(self.edges))
            self.edges.append((u, v))
            self.edge_s.append(seconds)

    def program(
        self, weights: Parts, limit_bytes: int, kept: float = 1.0, *, sure: bool = False
    ) -> ChoiceProgram:
        """The program with weights.

        Args:
            kept: share of what is held unless it is made again.
            sure: whether only edges count that always cost as much.
        """
        edges = [e for e in range(len(self.edges)) if not (sure and e in self.unsure)]
        return ChoiceProgram(
            tuple(one.weighted(weights) for one in self.node_s),
            tuple(self.edges[e] for e in edges),
            tuple(self.edge_s[e].weighted(weights) for e in edges),
            tuple((*_held(a), *_held(b, kept)) for a, b in zip(self.held, self.kept, strict=True)),
            limit_bytes,
        )


def _held(bytes_: Floats | None, share: float = 1.0) -> tuple[Held, ...]:
    """What a node holds, by its strategies."""
    if bytes_ is None or not share or not bytes_.any():
        return ()
    return (Held(0, 0, np.ceil(share * bytes_).astype(np.int64)),)


def built(problem: Problem, view: View, *, again: bool) -> Built:
    """The program of all operators of a problem on a view.

    Args:
        again: whether forwards run again in backwards, and nothing is stashed.
    """
    return _Builder(problem, view, again=again).built()


class _Builder:
    def __init__(self, problem: Problem, view: View, *, again: bool) -> None:
        self.problem, self.view, self.again = problem, view, again
        self.forwards = 2.0 if again else 1.0
        self.graph = problem.profile.graph
        self.prices = Prices(problem, view)
        self.replicated = view.replicas > 1
        self.with_backward = differentiated(self.graph)
        # Operators of equal layers are of one class, and share all tables.
        self.class_of = classes(problem.profile)
        by_class = {}
        for v, k in enumerate(self.class_of):
            if k not in by_class:
                by_class[k] = strategies(problem.profile, v, view.mesh)
        self.mesh_rules = [by_class[k] for k in self.class_of]
        self.rules = [self._with_replicas(v) for v in range(len(self.graph.operators))]
        self._wanted: dict[object, tuple[Ends, ...]] = {}
        self._tables: dict[object, Any] = {}
        self.made = Built(view, again, self.mesh_rules)

    def _with_replicas(self, v: int) -> list[Rule]:
        operator = self.graph.operators[v]
        return [with_replicas(one, operator, replicated=self.replicated)
                for one in self.mesh_rules[v]]  # fmt: skip

    def _table(self, key: object, make: Callable[[], Any]) -> Any:
        """A table that was made before for the same key."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def built(self) -> Built:
        """The program."""
        self._operators()
        for name in tensors_by_name(self.graph):
            self._tensor(name)
        for one in self.graph.parameters:
            self._parameter(one)
        return self.made

    def _operators(self) -> None:
        rounds, stashed = self.prices.rounds, self._stashed()
        for v, both in enumerate(self.prices.compute_s(self.mesh_rules)):
            asked = self._table(("asked", self.class_of[v]), partial(self._statistics_s, v))
            leaving = np.zeros(both.shape[1])
            for o, name in enumerate(self.graph.operators[v].outputs):
                if name in self.graph.outputs:
                    leaving += [self._leaving_s(name, one, o) for one in self.rules[v]]
            self.made.node(
                Parts(
                    compute=rounds * (self.forwards * both[0] + both[1]),
                    inside=rounds * (self.forwards * asked[0] + asked[1] + leaving),
                    sums=np.zeros_like(leaving),
                    gathers=np.zeros_like(leaving),
                ),
                kept_bytes=None if self.again else self._stash_bytes(v, stashed),
            )

    def _statistics_s(self, v: int) -> Floats:
        """(2, k) seconds of the all-reduces inside an operator, forward and backward."""
        return np.array([self.prices.statistics_s(v, one) for one in self.mesh_rules[v]]).T

    def _stashed(self) -> frozenset[str]:
        """The owners of storages that are kept for the backward."""
        profile, inside = self.problem.profile, set(range(len(self.graph.operators)))
        return frozenset(
            storage_owner(profile, name, inside)
            for one in profile.operators
            for name in one.stash_tensors
        )

    def _stash_bytes(self, v: int, stashed: Collection[str]) -> Floats:
        """(k,) bytes that an operator makes and that are kept."""
        tensors, operator = tensors_by_name(self.graph), self.graph.operators[v]
        own = self.problem.profile.operators[v].stash_private_bytes - self._casts_bytes(v)
        kept = [(o, tensors[name]) for o, name in enumerate(operator.outputs) if name in stashed]
        mesh = self.view.mesh
        return np.array([
            own * work_share(rule, mesh)
            + sum(prod(local_shape(one.shape, rule.outputs[o], mesh)) * ITEM_BYTES[one.dtype]
                  for o, one in kept)
            for rule in self.mesh_rules[v]
        ])  # fmt: skip

    def _casts_bytes(self, v: int) -> int:
        """Of what an operator keeps for itself, copies of its weights in a shorter type, which are
        not kept where weights are gathered.
        """
        operator, known = self.graph.operators[v], parameters_by_name(self.graph)
        made = tensors_by_name(self.graph)[operator.outputs[0]].dtype
        if made == "float32":
            return 0
        copies = sum(prod(known[n].shape) for n in operator.parameters) * ITEM_BYTES[made]
        return min(round(copies), self.problem.profile.operators[v].stash_private_bytes)

    def _leaving_s(self, name: str, rule: Rule, o: int) -> float:
        """Of an output of the model: conversions for leaving, there and back, and its loss."""
        one, spec = tensors_by_name(self.graph)[name], rule.outputs[o]
        leaves = leaving_spec(self.graph, name, spec)
        item = ITEM_BYTES[one.dtype]
        there = self.forwards * self.prices.converted_s(one.shape, item, spec, leaves)
        there += self.prices.loss_s(name, leaves[: len(self.view.mesh)])
        if not one.gradient:
            return there
        back = gradient_spec(rule, spec)
        return there + self.prices.converted_s(one.shape, item, leaves, back)

    # ---- tensors

    def _tensor(self, name: str) -> None:
        readers = list(dict.fromkeys(consumers(self.graph)[name]))
        if not readers:
            return
        tensor = tensors_by_name(self.graph)[name]
        wants = [self._wants(v, name, tensor.gradient) for v in readers]
        source, homes, key = self._source(name, [w.spec for some in wants for w in some])
        item = ITEM_BYTES[tensor.dtype]
        number = Counter(want for some in wants for want in set(some))
        shared = [want for want, count in number.items() if count > 1]
        copies = {}
        for want, copy_s in zip(shared, self._copies_s(key, homes, shared, tensor), strict=True):
            if copy_s.any():
                copies[want] = self._free_node(2)
                self.made.edge(source, copies[want], Parts(inside=copy_s))
        for v, some in zip(readers, wants, strict=True):
            table = self._table(
                ("ends", key, tensor.shape, item, some),
                partial(self._matrix, homes, some, tensor.shape, item),
            )
            if shared:
                table = np.where([[number[want] > 1 for want in some]], 0.0, table)
            self.made.edge(source, v, Parts(inside=table))
            for want in set(some) & copies.keys():
                needs = np.zeros((2, len(some)))
                needs[0, [i for i, one in enumerate(some) if one == want]] = inf
                self.made.edge(copies[want], v, Parts(compute=needs))

    def _copies_s(
        self, key: object, homes: Sequence[Ends], shared: Sequence[Ends], tensor: Tensor
    ) -> list[Floats]:
        """Per shared copy, (k, 2) what it costs in an iteration not to make it, and to make it."""
        item = ITEM_BYTES[tensor.dtype]

        def make() -> list[Floats]:
            table = self._matrix(homes, shared, tensor.shape, item)
            return [np.stack([0.0 * column, column], axis=1) for column in table.T]

        return list(self._table(("copies", key, tensor.shape, item, tuple(shared)), make))

    def _matrix(
        self, homes: Sequence[Ends], wants: Sequence[Ends], shape: tuple[int, ...], item: float
    ) -> Floats:
        """(homes, wants) seconds of an iteration to convert a tensor."""
        rows, columns = list(dict.fromkeys(homes)), list(dict.fromkeys(wants))
        small = np.array([[self._ends_s(shape, item, h, w) for w in columns] for h in rows])
        at = [rows.index(one) for one in homes], [columns.index(one) for one in wants]
        table: Floats = self.prices.rounds * small[np.ix_(*at)]
        return table

    def _wants(self, v: int, name: str, has_gradient: bool) -> tuple[Ends, ...]:
        at = reads(self.graph.operators[v]).index(name)
        flows = has_gradient and v in self.with_backward
        key = self.class_of[v], at, flows
        if key not in self._wanted:
            self._wanted[key] = tuple(
                Ends(rule.inputs[at], gradient_spec(rule, rule.inputs[at]) if flows else None)
                for rule in self.rules[v]
            )
        return self._wanted[key]

    def _source(
        self, name: str, wanted: Sequence[Spec]
    ) -> tuple[int, tuple[Ends, ...], object]:  # fmt: skip
        """The node that makes a tensor, how it lies by the node's strategies, and a key of that."""
        v = producers(self.graph).get(name)
        if v is not None:
            o = self.graph.operators[v].outputs.index(name)
            key = "made", self.class_of[v], o
            rules = self.rules[v]
            homes = [Ends(one.outputs[o], gradient_spec(one, one.outputs[o])) for one in rules]
            return v, tuple(homes), key
        specs = comes(wanted, len(self.view.sizes))
        if self.replicated:
            specs = tuple(dict.fromkeys((*one[:-1], OWN) for one in specs))
        node = self._free_node(len(specs))
        self.made.inputs[name] = node, specs
        return node, tuple(Ends(one, one) for one in specs), specs

    def _free_node(self, count: int) -> int:
        return self.made.node(Parts(*np.zeros((4, count))))

    def _ends_s(self, shape: tuple[int, ...], item: float, home: Ends, want: Ends) -> float:
        there = self.forwards * self.prices.converted_s(shape, item, home.spec, want.spec)
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
        lies = lies_of(one, wanted, self.view)
        node = self._parameter_node(one, lies, {*wanted})
        self.made.lies[one.name] = node, lies
        for k, v in enumerate(readers):
            wants = self._wants(v, one.name, one.trainable)
            key = one.shape, one.dtype, one.trainable, lies, self.class_of[v], wants
            inside, sums = self._table(key, partial(self._parameter_table, one, lies, wants, v))
            # Readers share one gradient, which is added up once, and may share copies.
            self.made.edge(node, v, Parts(inside=inside, sums=sums if k == 0 else 0.0), sure=k == 0)

    def _parameter_table(
        self, one: Parameter, lies: Sequence[Lies], wants: Sequence[Ends], v: int
    ) -> tuple[Floats, Floats]:
        """(lies, wants) of what it costs inside passes, and once, that an operator reads it."""
        columns = list(dict.fromkeys(wants))
        small = np.array([[self._parameter_s(one, lie, w, v) for w in columns] for lie in lies])
        inside, sums = np.moveaxis(small[:, [columns.index(w) for w in wants]], 2, 0)
        return inside, sums

    def _parameter_node(
        self, one: Parameter, lies: Sequence[Lies], wanted: Collection[Spec]
    ) -> int:  # fmt: skip
        """Its step, gathers behind that, and bytes that it, its gradient and its state take; and
        those of a copy in the type of autocast, where it lies as one of the specs that its readers
        may want.
        """
        problem, item = self.problem, ITEM_BYTES[one.dtype]
        state = state_copies(problem.profile.parameter_dtype, problem.training.optimizer)
        share = cast_share(problem.profile) * (one.name in cast_weights(problem.profile))
        rows = []
        for lie in lies:
            home, gradient, stepped = (
                lie.at(least, replicated=self.replicated) for least in (3, 2, 1)
            )
            size = parameter_bytes(one, ParameterSpecs(home, gradient, stepped), self.view.sizes)
            rows.append((
                self.prices.step_s(size.state),
                self.prices.once_s(one.shape, item, stepped, home),
                size.parameter + size.gradient + state * size.state,
                share * size.parameter if home[: len(self.view.mesh)] in wanted
                and CHUNKS not in home else 0.0,
            ))  # fmt: skip
        step_s, gather_s, held, cast = np.array(rows).T
        return self.made.node(Parts(step_s, 0.0 * step_s, 0.0 * step_s, gather_s), held, cast)

    def _parameter_s(
        self, one: Parameter, lie: Lies, want: Ends, v: int
    ) -> tuple[float, float]:  # fmt: skip
        """What it costs inside passes, and once, that an operator reads a parameter."""
        prices, item = self.prices, ITEM_BYTES[one.dtype]
        home = lie.at(3, replicated=self.replicated)
        there = prices.converted_s(one.shape, item, home, want.spec)
        if want.gradient is None:
            return prices.rounds * self.forwards * there, 0.0
        operator = self.graph.operators[v]
        bias = len(one.shape) == 1 and facts(operator.type).bias is not None
        # A segment that is run again keeps what it has gathered. Readers of a view read back.
        again = self.again or facts(operator.type).moves is VIEW
        again = again or (not bias and reads_back(operator, {one.name}, self.graph))
        gradient = tuple(
            "P" if part == "R" and made == "P" else part
            for part, made in zip(lie.at(2, replicated=self.replicated), want.gradient, strict=True)
        )
        back_item = one.gradient_item_bytes
        back = prices.converted_s(one.shape, back_item, want.gradient, gradient)
        state = lie.at(1, replicated=self.replicated)
        sums = prices.once_s(one.shape, back_item, gradient, state)
        return prices.rounds * (there * (1 + again) + back), sums


def leaving_spec(graph: Graph, name: str, spec: Spec) -> Spec:
    """How an output of the model leaves: as it is made where its losses can be computed from such
    parts, with classes cut along one axis at most.
    """
    classes = {one.class_dim for one in losses(graph) if one.output.name == name} - {None}
    leaves: list[str] = []
    for part in spec:
        cut = part.startswith("S") and may_leave(graph, name, part)
        again = dim_of(part) in classes and any(dim_of(one) in classes for one in leaves)
        leaves.append(part if part == OWN or (cut and not again) else "R")
    return tuple(leaves)
