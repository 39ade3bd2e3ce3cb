"""From a stage on a view to a choice program, and back from its answer to a sharding.

Nodes are operators (their rules), parameters (how they, their gradients and their state lie),
tensors from outside (how they come), and shared copies (made or not): a tensor in a spec that
several readers want, which is converted once for all of them. Edges are the conversions between
what one makes and another one wants, there and back.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any

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
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.sharding import OWN, Rule, Spec, dim_of, local_shape, reads
from planner.resharding.gradients import gradient_spec
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.parameters import ParameterTables
from planner.solvers.intra.policy import anything
from planner.solvers.intra.prices import Prices
from planner.solvers.intra.reads import Asked, Ends, Read, copies_of, needs_of, shared_wants
from planner.solvers.intra.space import (
    Mask,
    View,
    allowed,
    classes,
    comes,
    conversion_mask,
    masked,
    part_pairs,
    strategies,
    with_replicas,
)
from planner.solvers.sharded.complete import may_leave
from planner.support.arrays import Floats


def built(problem: Problem, view: View, *, again: bool, rounds: float | None = None) -> Built:
    """The program of all operators of a problem on a view.

    Args:
        again: whether forwards run again in backwards, and nothing is stashed.
        rounds: microbatches of a replica in an iteration; None for all of them in turn.
    """
    return _Builder(problem, view, again=again, rounds=rounds).built()


class _Builder:
    def __init__(
        self, problem: Problem, view: View, *, again: bool, rounds: float | None
    ) -> None:  # fmt: skip
        self.problem, self.view, self.again = problem, view, again
        self.forwards = 2.0 if again else 1.0
        self.graph = problem.profile.graph
        self.prices = Prices(problem, view, rounds)
        self.parameters = ParameterTables(self.prices, again=again)
        self.replicated = view.replicas > 1
        self.with_backward = differentiated(self.graph)
        # Operators of equal layers are of one class, and share all tables.
        self.class_of, self.mesh_rules = _strategies(problem.profile, view)
        self.rules = [self._with_replicas(v) for v in range(len(self.graph.operators))]
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
        for v, both in enumerate(self.prices.compute_s(self.mesh_rules, self.class_of)):
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
        outputs = self.graph.operators[v].outputs
        kept = tuple(o for o, name in enumerate(outputs) if name in stashed)
        size: Floats = self._table(
            ("stash", self.class_of[v], kept), partial(self._kept_bytes, v, kept)
        )
        return size

    def _kept_bytes(self, v: int, outputs: Sequence[int]) -> Floats:
        """(k,) bytes of some outputs, and of what an operator keeps for itself, which is in
        proportion to what it makes.
        """
        tensors, operator = tensors_by_name(self.graph), self.graph.operators[v]
        own = self.problem.profile.operators[v].stash_private_bytes - self._casts_bytes(v)
        every = [tensors[name] for name in operator.outputs]
        rows = []
        for rule in self.mesh_rules[v]:
            made = [prod(local_shape(one.shape, spec, self.view.mesh)) * ITEM_BYTES[one.dtype]
                    for one, spec in zip(every, rule.outputs, strict=True)]  # fmt: skip
            share = sum(made) / max(1, sum(one.bytes for one in every))
            rows.append(own * share + sum(made[o] for o in outputs))
        return np.array(rows)

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
        asked = tuple(self._asked(v, name, tensor.gradient) for v in readers)
        source, homes, key = self._source(name, asked)
        mask = self._mask(name, (key, homes), asked)
        table = self._table(
            ("tensor", key, mask, tensor.shape, tensor.dtype, asked),
            partial(self._read, homes, [self._wants(one) for one in asked], tensor, mask),
        )
        self._edges(source, readers, table)

    def _edges(self, source: int, readers: Sequence[int], read: Read) -> None:
        """From what is read to shared copies and readers, and between these."""
        copies = [self._free_node(2) for _ in read.copies]
        for node, copy_s in zip(copies, read.copies, strict=True):
            self.made.edge(source, node, Parts(inside=copy_s))
        for v, direct, needs in zip(readers, read.direct, read.needs, strict=True):
            self.made.edge(source, v, direct)
            for at, needed in needs:
                self.made.edge(copies[at], v, Parts(compute=needed))

    def _mask(self, name: str, source: tuple[object, Sequence[Ends]], asked: Asked) -> Mask:
        """The conversions of a tensor that are not allowed."""
        if all(one.conversion is anything for one in self.view.policies):
            return ()
        key, homes = source
        pairs = self._table(
            ("pairs", key, asked),
            lambda: part_pairs(
                {one.spec for one in homes}, {w.spec for one in asked for w in self._wants(one)}
            ),
        )
        return conversion_mask(name, pairs, self.view)

    def _read(
        self, homes: Sequence[Ends], wants: Sequence[tuple[Ends, ...]], tensor: Tensor, mask: Mask
    ) -> Read:
        """What it costs in an iteration to read a tensor.

        Args:
            homes: how it lies, by strategies of what makes it.
            wants: per reader, how it is wanted, by strategies.
        """
        shared = shared_wants(wants)
        table = self._matrix(homes, shared, tensor, mask) if shared else np.zeros((len(homes), 0))
        copies = copies_of(shared, table)
        direct = []
        for some in wants:
            table = self._matrix(homes, some, tensor, mask)
            alone = np.where([[want in shared for want in some]], 0.0, table)
            direct.append(Parts(inside=alone))
        return Read([*copies.values()], direct, [needs_of(copies, some) for some in wants])

    def _matrix(
        self, homes: Sequence[Ends], wants: Sequence[Ends], tensor: Tensor, mask: Mask
    ) -> Floats:
        """(homes, wants) seconds of an iteration to convert a tensor; inf of what is not allowed.

        Args:
            mask: along each axis of the mesh, the parts before and after of these.
        """
        shape, item = tensor.shape, ITEM_BYTES[tensor.dtype]
        rows, columns = list(dict.fromkeys(homes)), list(dict.fromkeys(wants))
        small = np.array([
            [inf if masked(mask, h.spec, w.spec) else self._ends_s(shape, item, h, w)
             for w in columns]
            for h in rows
        ])  # fmt: skip
        at = [rows.index(one) for one in homes], [columns.index(one) for one in wants]
        table: Floats = self.prices.rounds * small[np.ix_(*at)]
        return table

    def _asked(self, v: int, name: str, has_gradient: bool) -> tuple[int, int, bool]:
        """An operator of the same class, the place at which it reads, and whether it has a
        gradient.
        """
        at = reads(self.graph.operators[v]).index(name)
        return self.class_of[v], at, has_gradient and v in self.with_backward

    def _wants(self, asked: tuple[int, int, bool]) -> tuple[Ends, ...]:
        v, at, flows = asked
        wants: tuple[Ends, ...] = self._table(
            ("wants", asked),
            lambda: tuple(
                Ends(rule.inputs[at], gradient_spec(rule, rule.inputs[at]) if flows else None)
                for rule in self.rules[v]
            ),
        )
        return wants

    def _source(
        self, name: str, asked: Asked
    ) -> tuple[int, tuple[Ends, ...], object]:  # fmt: skip
        """The node that makes a tensor, how it lies by the node's strategies, and a key of that."""
        v = producers(self.graph).get(name)
        if v is not None:
            o = self.graph.operators[v].outputs.index(name)
            key, rules = ("made", self.class_of[v], o), self.rules[v]
            homes = self._table(
                key,
                lambda: tuple(
                    Ends(one.outputs[o], gradient_spec(one, one.outputs[o])) for one in rules
                ),
            )
            return v, homes, key
        n = len(self.view.mesh)
        wanted = [want.spec[:n] for one in asked for want in self._wants(one)]
        specs = comes(name, wanted, self.view)
        if self.replicated:
            specs = tuple((*one, OWN) for one in specs)
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
        asked = tuple(self._asked(v, one.name, one.trainable) for v in readers)
        given = tuple(policy.lies.get(one.name) for policy in self.view.policies)
        homes, own, read = self._table(
            ("parameter", replace(one, name=""), given, asked),
            lambda: self.parameters.of(one, asked, [self._wants(reader) for reader in asked]),
        )
        node = self.made.node(*own)
        self.made.lies[one.name] = node, tuple(home.lies for home in homes)
        self._edges(node, readers, read)


def _strategies(profile: Profile, view: View) -> tuple[list[int], list[tuple[Rule, ...]]]:
    """Per operator, the first one that costs the same by each rule, and may run by the same; and
    its rules on the mesh.
    """
    every = [allowed(profile, *one) for one in zip(view.policies, view.mesh, strict=True)]
    first: dict[object, int] = {}
    same: list[int] = []
    rules: list[tuple[Rule, ...]] = []
    for v, k in enumerate(classes(profile)):
        axes = tuple(some[v] for some in every)
        must = tuple(policy.must(v) for policy in view.policies)
        at = first.setdefault((k, *(tuple(map(id, some)) for some in axes), must), v)
        same.append(at)
        rules.append(strategies(profile, v, view, axes) if at == v else rules[at])
    return same, rules


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
