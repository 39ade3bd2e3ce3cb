"""From a stage on a view to a choice program.

Nodes are operators (their rules), parameters (how they, their gradients and their state lie),
tensors from outside (how they come), and shared copies (made or not): a tensor in a spec that
several readers want, which is converted once for all of them. Edges are the conversions between
what one makes and another one wants, there and back.

An operator of a block that may run again has its rules once for each state of the block. A node for
the state itself would be tied to all of them; instead edges tie each operator to one before it, so
that the state goes along the edges that there are anyway, and tables stay small.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from planner.artefacts.graph import (
    ITEM_BYTES,
    Parameter,
    Tensor,
    consumers,
    differentiated,
    holders,
    producers,
    tensors_by_name,
)
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.sharding import OWN, Rule, Spec, reads
from planner.resharding.gradients import gradient_spec
from planner.solvers.intra.blocks import Block, Blocks, Mode
from planner.solvers.intra.built import Built, Parts
from planner.solvers.intra.parameters import ParameterTables
from planner.solvers.intra.policy import anything
from planner.solvers.intra.prices import Prices, leaving_spec
from planner.solvers.intra.reads import Asked, Ends, Read, Reader, copies_of, needs_of, shared_wants
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
from planner.solvers.intra.stash import Span, Stash, Waiting
from planner.support.arrays import Floats, Ints


def built(
    problem: Problem, view: View, blocks: Sequence[Block] = (), *, rounds: float | None = None
) -> Built:
    """The program of all operators of a problem on a view.

    Args:
        blocks: those that may run again.
        rounds: microbatches of a replica in an iteration; None for all of them in turn.
    """
    return _Builder(problem, view, blocks, rounds=rounds).built()


class _Builder:
    def __init__(
        self, problem: Problem, view: View, blocks: Sequence[Block], *, rounds: float | None
    ) -> None:
        self.problem, self.view = problem, view
        self.graph, self.blocks = problem.profile.graph, Blocks(problem.profile.graph, blocks)
        self.prices = Prices(problem, view, rounds)
        self.parameters = ParameterTables(self.prices)
        self.replica_axes = len(view.replica_axes)
        self.with_backward = differentiated(self.graph)
        self.priced_as, self.mesh_rules = _strategies(problem.profile, view)
        count = range(len(self.graph.operators))
        self.modes = [self.blocks.modes(v) for v in count]
        # Operators of equal layers are of one class, and share all tables.
        first: dict[object, int] = {}
        self.class_of = [first.setdefault((self.priced_as[v], self.modes[v]), v) for v in count]
        self.rules: list[list[Rule]] = []
        for v, k in enumerate(self.class_of):
            self.rules.append(self.rules[k] if k < v else self._with_replicas(v))
        self._tables: dict[object, Any] = {}
        self.stash = Stash(
            problem, view.mesh, self.blocks, self.mesh_rules, self.class_of, self._table
        )  # fmt: skip
        strategies_of = [some * len(self.modes[v]) for v, some in enumerate(self.mesh_rules)]
        self.made = Built(view, self.blocks.last, strategies_of, blocks=self.blocks.every)

    def _with_replicas(self, v: int) -> list[Rule]:
        operator = self.graph.operators[v]
        return [with_replicas(one, operator, self.replica_axes) for one in self.mesh_rules[v]]

    def _table(self, key: object, make: Callable[[], Any]) -> Any:
        """A table that was made before for the same key."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def built(self) -> Built:
        """The program."""
        waiting = self._operators()
        self._blocks(waiting)
        for name in tensors_by_name(self.graph):
            self._tensor(name)
        for one in self.graph.parameters:
            self._parameter(one)
        return self.made

    def _operators(self) -> list[tuple[int, Waiting]]:
        """Adds the operators. Gives the tensors of some that blocks need which run again."""
        found = []
        for v, both in enumerate(self.prices.compute_s(self.mesh_rules, self.priced_as)):
            seconds = self._table(
                ("operator", self.class_of[v], self._leaves(v)), partial(self._operator_s, v, both)
            )
            spans, waiting = self.stash.of(v)
            self.made.node(seconds, stash=spans)
            found += [(v, one) for one in waiting]
        return found

    def _leaves(self, v: int) -> tuple[str, ...]:
        """The outputs of an operator that leave the model."""
        return tuple(n for n in self.graph.operators[v].outputs if n in self.graph.outputs)

    def _operator_s(self, v: int, both: Floats) -> Parts:
        """Seconds of an iteration by the strategies of an operator.

        Args:
            both: (2, k) by its rules, of a forward and a backward.
        """
        rounds, asked = self.prices.rounds, self._statistics_s(v)
        leaving, lost = np.zeros((2, len(both[0])))
        for name in self._leaves(v):
            o = self.graph.operators[v].outputs.index(name)
            leaving += [self._leaving_s(name, one, o) for one in self.rules[v]]
            lost += [self._lost_s(name, one.outputs[o]) for one in self.rules[v]]
        modes = self.modes[v]
        compute = [(1 + (mode is Mode.AGAIN)) * both[0] + both[1] for mode in modes]
        inside = [(1 + mode.in_segment) * asked[0] + asked[1] + leaving for mode in modes]
        nothing = np.zeros(len(modes) * len(leaving))
        return Parts(
            rounds * np.concatenate(compute), rounds * np.concatenate(inside), nothing, nothing,
            forward=np.tile(both[0], len(modes)), backward=np.tile(both[1], len(modes)),
            unsure=rounds * np.tile(lost, len(modes)),
        )  # fmt: skip

    def _statistics_s(self, v: int) -> Floats:
        """(2, k) seconds of the all-reduces inside an operator, forward and backward."""
        return np.array([self.prices.statistics_s(v, one) for one in self.mesh_rules[v]]).T

    def _leaving_s(self, name: str, rule: Rule, o: int) -> float:
        """Of an output of the model: conversions for leaving, there and back, and its loss, where
        it is of what the operator makes.
        """
        one, spec = tensors_by_name(self.graph)[name], rule.outputs[o]
        leaves = leaving_spec(self.graph, name, spec)
        item = ITEM_BYTES[one.dtype]
        there = self.prices.converted_s(one.shape, item, spec, leaves)
        if leaves == spec:
            there += self.prices.loss_s(name, leaves[: len(self.view.mesh)])
        if not one.gradient:
            return there
        back = gradient_spec(rule, spec)
        return there + self.prices.converted_s(one.shape, item, leaves, back)

    def _lost_s(self, name: str, spec: Spec) -> float:
        """The loss of an output of the model that is converted first. Passes do without it."""
        leaves = leaving_spec(self.graph, name, spec)
        return 0.0 if leaves == spec else self.prices.loss_s(name, leaves[: len(self.view.mesh)])

    # ---- blocks

    def _blocks(self, waiting: Sequence[tuple[int, Waiting]]) -> None:
        """Ties the operators of each block to one state, and adds the tensors that some blocks need
        if they run again.
        """
        for u, v in self.blocks.links():
            barred = self._table(
                ("tied", self.class_of[u], self.class_of[v]), partial(self._barred, u, v)
            )
            self.made.edge(u, v, Parts(compute=barred))
        for v, one in waiting:
            self._waiting(v, one)

    def _barred(self, u: int, v: int) -> Floats:
        """(k, l) infinity where strategies of two operators are of other states of their block."""
        barred: Floats = np.where(self._states(u)[:, None] == self._states(v), 0.0, inf)
        return barred

    def _states(self, v: int) -> Ints:
        """(k,) the state of its block by the strategies of an operator."""
        return np.repeat(np.arange(len(self.modes[v])), len(self.mesh_rules[v]))

    def _waiting(self, v: int, one: Waiting) -> None:
        """Adds a tensor that some blocks need if they run again: by its bytes, and the first of
        these blocks, if there is one.
        """
        sizes, begins = sorted(set(one.bytes.tolist())), (one.until, *one.blocks)
        each = [(size, begin) for size in sizes for begin in begins]
        spans = [
            Span(begin, one.until - 1, np.array([size * (begin == b) for size, b in each]))
            for begin in one.blocks
        ]
        node = self.made.node(Parts(*np.zeros((4, len(each)))), stash=spans)
        other = one.bytes[:, None] != [size for size, _ in each]
        self.made.edge(v, node, Parts(compute=np.where(other, inf, 0.0)))
        for k in one.blocks:
            block = self.blocks.every[k]
            runs = np.array([bool(block.segments[s]) for s in self._states(block.first)])
            late = runs[:, None] & [begin > k for _, begin in each]
            self.made.edge(block.first, node, Parts(compute=np.where(late, inf, 0.0)))

    # ---- tensors

    def _tensor(self, name: str) -> None:
        readers = list(dict.fromkeys(consumers(self.graph)[name]))
        if not readers:
            return
        tensor = tensors_by_name(self.graph)[name]
        asked = self._asked(readers, name, tensor.gradient)
        source, homes, key = self._source(name, asked)
        mask = self._mask(name, (key, homes), asked)
        table = self._table(
            ("tensor", key, mask, tensor.shape, tensor.dtype, asked),
            partial(self._read, homes, asked, tensor, mask),
        )
        self._edges(source, readers, table, waiting=True)

    def _edges(
        self, source: int, readers: Sequence[int], read: Read, *, waiting: bool
    ) -> None:  # fmt: skip
        """From what is read to shared copies and readers, and between these.

        Args:
            waiting: whether readers wait for shared copies.
        """
        copies = [self._free_node(one.shape[1]) for one in read.copies]
        for node, copy_s in zip(copies, read.copies, strict=True):
            self.made.edge(source, node, Parts(inside=copy_s, waits=waiting * copy_s))
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

    def _read(self, homes: Sequence[Ends], asked: Asked, tensor: Tensor, mask: Mask) -> Read:
        """What it costs in an iteration to read a tensor.

        Args:
            homes: how it lies, by strategies of what makes it.
        """
        wants = [self._wants(one) for one in asked]
        shared, together = shared_wants(wants), len({one.segment for one in asked}) == 1
        table = self._matrix(homes, shared, tensor, mask) if shared else np.zeros((len(homes), 0))
        copies = copies_of(shared, table, together=together)
        direct = []
        for some in wants:
            table = self._matrix(homes, some, tensor, mask)
            alone = np.where([[want in shared for want in some]], 0.0, table)
            direct.append(Parts(inside=alone, waits=alone))
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

    def _asked(self, readers: Sequence[int], name: str, has_gradient: bool) -> Asked:
        """The readers of a tensor."""
        blocks = [self.blocks.of(v) for v in readers]
        number = {k: n for n, k in enumerate(dict.fromkeys(blocks))}
        return tuple(
            Reader(
                self.class_of[v],
                reads(self.graph.operators[v]).index(name),
                has_gradient and v in self.with_backward,
                number[k],
                tuple(1.0 + (mode is Mode.AGAIN) for mode in self.modes[v] for _ in self.rules[v]),
            )
            for v, k in zip(readers, blocks, strict=True)
        )

    def _wants(self, asked: Reader) -> tuple[Ends, ...]:
        v, at = asked.operator, asked.place
        wants: tuple[Ends, ...] = self._table(
            ("wants", asked),
            lambda: tuple(
                Ends(
                    rule.inputs[at],
                    gradient_spec(rule, rule.inputs[at]) if asked.flows else None,
                    asked.segment if mode.in_segment else -1,
                )
                for mode in self.modes[v]
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
            key, rules = ("made", self.class_of[v], o), self.rules[v] * len(self.modes[v])
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
        specs = tuple((*one, *[OWN] * self.replica_axes) for one in specs)
        node = self._free_node(len(specs))
        self.made.inputs[name] = node, specs
        return node, tuple(Ends(one, one) for one in specs), specs

    def _free_node(self, count: int) -> int:
        return self.made.node(Parts(*np.zeros((4, count))))

    def _ends_s(self, shape: tuple[int, ...], item: float, home: Ends, want: Ends) -> float:
        there = want.forwards * self.prices.converted_s(shape, item, home.spec, want.spec)
        if want.gradient is None or home.gradient is None:
            return there
        return there + self.prices.converted_s(shape, item, want.gradient, home.gradient)

    # ---- parameters

    def _parameter(self, one: Parameter) -> None:
        readers = list(dict.fromkeys(holders(self.graph)[one.name]))
        if not readers:
            return
        asked = self._asked(readers, one.name, one.trainable)
        given = tuple(policy.lies.get(one.name) for policy in self.view.policies)
        homes, (seconds, size, cast), read = self._table(
            ("parameter", replace(one, name=""), given, asked),
            lambda: self.parameters.of(one, asked, [self._wants(reader) for reader in asked]),
        )
        node = self.made.node(seconds, size, [Span(0, self.blocks.last, cast)])
        self.made.lies[one.name] = node, tuple(home.lies for home in homes)
        self._edges(node, readers, read, waiting=False)


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
