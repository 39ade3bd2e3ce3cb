"""From a stage on a view to a choice program, and back from its answer to a sharding.

Nodes are operators (their rules), parameters (how they, their gradients and their state lie),
tensors from outside (how they come), and shared copies (made or not): a tensor in a spec that
several readers want, which is converted once for all of them. Edges are the conversions between
what one makes and another one wants, there and back.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
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
from planner.artefacts.profile import Profile, storage_owner
from planner.artefacts.sharding import CHUNKS, OWN, Rule, Spec, dim_of, local_shape, reads
from planner.costs.casts import cast_share, cast_weights
from planner.costs.stage_memory import parameter_bytes
from planner.costs.update import state_copies
from planner.resharding.gradients import gradient_spec
from planner.resharding.reshardings import reads_back
from planner.resharding.sums import ParameterSpecs
from planner.solvers.intra.policy import anything
from planner.solvers.intra.prices import Prices
from planner.solvers.intra.space import (
    Lies,
    Mask,
    View,
    allowed,
    classes,
    comes,
    conversion_mask,
    lies_of,
    masked,
    part_pairs,
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


Asked = tuple[tuple[int, int, bool], ...]
"""Of readers: an operator of the same class, the place at which it reads, and whether a gradient
flows back."""


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

    def edge(self, u: int, v: int, seconds: Parts) -> None:
        """Adds an edge, if it costs anything."""
        if any(np.any(one) for one in seconds):
            self.edges.append((u, v))
            self.edge_s.append(seconds)

    def program(
        self, weights: Parts, limit_bytes: int | None, kept: float = 1.0
    ) -> ChoiceProgram:  # fmt: skip
        """The program with weights.

        Args:
            kept: share that counts of what is held unless it is made again.
        """
        return ChoiceProgram(
            tuple(one.weighted(weights) for one in self.node_s),
            tuple(self.edges),
            tuple(one.weighted(weights) for one in self.edge_s),
            tuple((*_held(a), *_held(b, kept)) for a, b in zip(self.held, self.kept, strict=True)),
            limit_bytes,
        )


def _held(bytes_: Floats | None, share: float = 1.0) -> tuple[Held, ...]:
    """What a node holds, by its strategies."""
    if bytes_ is None or not share or not bytes_.any():
        return ()
    return (Held(0, 0, np.ceil(share * bytes_).astype(np.int64)),)


def built(problem: Problem, view: View, *, again: bool, rounds: float | None = None) -> Built:
    """The program of all operators of a problem on a view.

    Args:
        again: whether forwards run again in backwards, and nothing is stashed.
        rounds: microbatches of a replica in an iteration; None for all of them in turn.
    """
    return _Builder(problem, view, again=again, rounds=rounds).built()


class _Read(NamedTuple):
    """Seconds of an iteration to read a tensor.

    Attributes:
        copies: per shared copy, (k, 2) not to make it, and to make it.
        direct: per reader, (k, l) of what it costs for this reader alone.
        needs: per reader, shared copies by index, with (2, l) whether they have to be made.
    """

    copies: list[Floats]
    direct: list[Parts]
    needs: list[list[tuple[int, Floats]]]


class _Home(NamedTuple):
    """How a parameter is at home.

    Attributes:
        lies: how it lies.
        summed: along each axis, whether a reader makes summands of its gradient; None where there
            is one reader, whose strategy says that.
    """

    lies: Lies
    summed: tuple[bool, ...] | None


class _Builder:
    def __init__(
        self, problem: Problem, view: View, *, again: bool, rounds: float | None
    ) -> None:  # fmt: skip
        self.problem, self.view, self.again = problem, view, again
        self.forwards = 2.0 if again else 1.0
        self.graph = problem.profile.graph
        self.prices = Prices(problem, view, rounds)
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

    def _edges(self, source: int, readers: Sequence[int], read: _Read) -> None:
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
    ) -> _Read:
        """What it costs in an iteration to read a tensor.

        Args:
            homes: how it lies, by strategies of what makes it.
            wants: per reader, how it is wanted, by strategies.
        """
        shared = _shared(wants)
        table = self._matrix(homes, shared, tensor, mask) if shared else np.zeros((len(homes), 0))
        copies = _copies(shared, table)
        direct = []
        for some in wants:
            table = self._matrix(homes, some, tensor, mask)
            alone = np.where([[want in shared for want in some]], 0.0, table)
            direct.append(Parts(inside=alone))
        return _Read([*copies.values()], direct, [_needs(copies, some) for some in wants])

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
            partial(self._parameter_tables, one, asked),
        )
        node = self.made.node(*own)
        self.made.lies[one.name] = node, tuple(home.lies for home in homes)
        self._edges(node, readers, read)

    def _parameter_tables(
        self, one: Parameter, asked: Asked
    ) -> tuple[tuple[_Home, ...], tuple[Parts, Floats, Floats], _Read]:
        """How a parameter may be at home, what that costs and takes, and what its readers cost."""
        n, wants = len(self.view.mesh), [self._wants(reader) for reader in asked]
        lies = lies_of(one, [want.spec[:n] for some in wants for want in some], self.view)
        # Tied ones are few. Constants have a reader in each layer, which pays for itself.
        tied = one.trainable and len(asked) > 1
        homes = tuple(
            _Home(lie, summed) for lie in lies for summed in (_sums(wants) if tied else (None,))
        )
        shared = _shared(wants) if tied else ()
        first = [[self._first_s(one, home, want) for want in shared] for home in homes]
        copies = _copies(shared, np.array(first).reshape(len(homes), len(shared)))
        direct = [
            self._parameter_table(one, homes, (some, shared), reader)
            for some, reader in zip(wants, asked, strict=True)
        ]
        needs = [_needs(copies, some) for some in wants]
        own = self._parameter_node(one, homes, {want.spec[:n] for some in wants for want in some})
        return homes, own, _Read([*copies.values()], direct, needs)

    def _parameter_table(
        self, one: Parameter, homes: Sequence[_Home],
        wants: tuple[Sequence[Ends], Collection[Ends]], reader: tuple[int, int, bool],
    ) -> Parts:  # fmt: skip
        """(homes, wants) of what it costs that an operator reads it.

        Args:
            wants: by the operator's strategies, and those of shared copies.
        """
        some, shared = wants
        columns = list(dict.fromkeys(some))
        small = np.array([
            [self._parameter_s(one, home, want, reader, alone=want not in shared)
             for want in columns]
            for home in homes
        ])  # fmt: skip
        compute, inside, sums = np.moveaxis(small[:, [columns.index(w) for w in some]], 2, 0)
        return Parts(compute=compute if compute.any() else 0.0, inside=inside, sums=sums)

    def _parameter_node(
        self, one: Parameter, homes: Sequence[_Home], wanted: Collection[Spec]
    ) -> tuple[Parts, Floats, Floats]:
        """Its step, sums of its gradient if it is tied, gathers behind the step, and bytes that it,
        its gradient and its state take; and those of a copy in the type of autocast, where it lies
        as a reader may want it.
        """
        problem, item = self.problem, ITEM_BYTES[one.dtype]
        state = state_copies(problem.profile.parameter_dtype, problem.training.optimizer)
        share = cast_share(problem.profile) * (one.name in cast_weights(problem.profile))
        n, rows = len(self.view.mesh), []
        for home in homes:
            lies, gradient, stepped = (
                home.lies.at(least, replicated=self.replicated) for least in (3, 2, 1)
            )
            size = parameter_bytes(one, ParameterSpecs(lies, gradient, stepped), self.view.sizes)
            rows.append((
                self.prices.step_s(size.state),
                0.0 if home.summed is None else self._sums_s(one, home.lies, home.summed),
                self.prices.once_s(one.shape, item, stepped, lies),
                size.parameter + size.gradient + state * size.state,
                share * size.parameter * (CHUNKS not in lies and lies[:n] in wanted),
            ))  # fmt: skip
        step_s, sum_s, gather_s, size, cast = np.array(rows).T
        return Parts(step_s, 0.0 * step_s, sum_s, gather_s), size, cast

    def _gradient(self, lies: Lies, summed: Sequence[bool]) -> Spec:
        """How the gradient of a parameter lies."""
        spec = lies.at(2, replicated=self.replicated)
        return tuple("P" if part == "R" and summand else part
                     for part, summand in zip(spec, summed, strict=True))  # fmt: skip

    def _sums_s(self, one: Parameter, lies: Lies, summed: Sequence[bool]) -> float:
        gradient, state = self._gradient(lies, summed), lies.at(1, replicated=self.replicated)
        return self.prices.once_s(one.shape, one.gradient_item_bytes, gradient, state)

    def _first_s(self, one: Parameter, home: _Home, want: Ends) -> float:
        """To gather a parameter for forwards, and to bring its gradient home."""
        lies = home.lies.at(3, replicated=self.replicated)
        there = self.prices.converted_s(one.shape, ITEM_BYTES[one.dtype], lies, want.spec)
        back = 0.0
        if want.gradient is not None:
            gradient = self._gradient(home.lies, home.summed or _summed(want))
            back = self.prices.converted_s(
                one.shape, one.gradient_item_bytes, want.gradient, gradient
            )
        return self.prices.rounds * (self.forwards * there + back)

    def _parameter_s(
        self, one: Parameter, home: _Home, want: Ends, reader: tuple[int, int, bool], *, alone: bool
    ) -> tuple[float, float, float]:
        """What it costs in copies in a shorter type, in collectives inside passes, and once, that
        an operator reads a parameter.

        Args:
            alone: whether it makes a copy of its own.
        """
        prices, made = self.prices, _summed(want)
        if home.summed is not None and any(
            here and not there for here, there in zip(made, home.summed, strict=True)
        ):
            return inf, 0.0, 0.0
        lies = home.lies.at(3, replicated=self.replicated)
        normalizes = self.graph.operators[reader[0]].type == "BatchNormalization"
        if lies != want.spec and not one.trainable and (one.state or normalizes):
            return inf, 0.0, 0.0  # what an operator gives another value lies as it is read
        first = self._first_s(one, home, want) if alone else 0.0
        later = self._reads_again(one, reader) and want.gradient is not None and not self.again
        mine = want.gradient is not None and home.summed is None
        sums = self._sums_s(one, home.lies, made) if mine else 0.0
        there = prices.converted_s(one.shape, ITEM_BYTES[one.dtype], lies, want.spec)
        at_home = lies, want.gradient and self._gradient(home.lies, home.summed or made)
        # What a device has it does not gather again.
        casts = self.forwards + later if there > 0 or want.gradient is None else 1.0
        casts *= prices.cast_s(one, reader[0], want.spec) if at_home != tuple(want) else 0.0
        return prices.rounds * casts, first + prices.rounds * later * there, sums

    def _reads_again(self, one: Parameter, reader: tuple[int, int, bool]) -> bool:
        """Whether the backward of an operator gathers a parameter again. Readers of a view read
        back. A segment that is run again keeps what it has gathered.
        """
        v, at, _ = reader
        operator = self.graph.operators[v]
        bias = len(one.shape) == 1 and facts(operator.type).bias is not None
        return facts(operator.type).moves is VIEW or (
            not bias and reads_back(operator, {reads(operator)[at]}, self.graph)
        )


def _shared(wants: Sequence[Sequence[Ends]]) -> list[Ends]:
    """What several readers may want."""
    number = Counter(want for some in wants for want in set(some))
    return [want for want, count in number.items() if count > 1]


def _copies(shared: Sequence[Ends], table: Floats) -> dict[Ends, Floats]:
    """The shared copies that cost anything: (k, 2) not to make it, and to make it.

    Args:
        table: (k, shared) what they cost.
    """
    return {
        want: np.stack([np.zeros_like(column), column], axis=1)
        for want, column in zip(shared, table.T, strict=True)
        if column.any()
    }


def _needs(copies: Collection[Ends], some: Sequence[Ends]) -> list[tuple[int, Floats]]:
    """The copies that a reader may want, by index, with (2, l) whether they have to be made."""
    needs = []
    for at, want in enumerate(copies):
        if want in some:
            without = np.zeros((2, len(some)))
            without[0, [i for i, one in enumerate(some) if one == want]] = inf
            needs.append((at, without))
    return needs


def _summed(want: Ends) -> tuple[bool, ...]:
    """Along each axis, whether a reader makes summands of the gradient of what it wants."""
    return tuple(part == "P" for part in want.gradient or ("R",) * len(want.spec))


def _sums(wants: Sequence[Sequence[Ends]]) -> list[tuple[bool, ...]]:
    """All that `_summed` may be of several readers together."""
    found = {_summed(want) for want in wants[0]}
    for some in wants[1:]:
        found = {tuple(a or b for a, b in zip(one, _summed(want), strict=True))
                 for one in found for want in some}  # fmt: skip
    return sorted(found)


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
