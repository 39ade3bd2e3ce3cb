"""A stage that is split over a mesh, as one of its devices sees it: a profile of the local
operators and tensors, which the rest of this folder prices and measures like any other one.

Operators run at their local shapes. A resharding (`resharding/reshardings.py`) is an operator of
its own where it is started (`resharding/overlap.py`): without overlap in front of the first that
reads the copy, or, of a tensor that leaves the stage, at the end. The copy is a tensor that its
readers stash, unless they gather it again, and its gradient is another. So what is held ahead is
alive from there on, and the gradients that wait are so until the backward has come there. Such an
operator takes no time here; `stage_pass.py` has that of its collectives, which depends on the
devices.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from math import prod
from typing import NamedTuple

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    LossChoice,
    Operator,
    Parameter,
    Tensor,
    View,
    consumers,
    differentiated,
    holders,
    losses_of,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.operator_types import PRODUCTS
from planner.artefacts.profile import LossCost, OperatorCost, Profile, view_bases, with_times
from planner.artefacts.sharding import Rule, Sharding, blocks_of, local_shape, rule_by
from planner.artefacts.strategy import Stage, indices_of, operator_indices
from planner.costs.casts import cast_weights, short_copies
from planner.costs.mesh_memory import bucket_scatters, conversion_bytes
from planner.costs.passes import RerunOperators
from planner.resharding import Resharding, reshardings
from planner.resharding.conversion import Collective, Step
from planner.resharding.cut_losses import vocabulary_parallel_steps
from planner.resharding.over_replicas import over_replicas
from planner.resharding.overlap import PassOrder, pass_order
from planner.resharding.reshardings import has_gradient, homes, leaving, reads_back
from planner.resharding.statistics import Sides, statistics_steps
from planner.support.memo import remembered

_PERMUTING = frozenset({"Einsum"})
"""Operators that multiply copies of what they read, with its dimensions in another order."""


@dataclass(frozen=True, slots=True)
class LocalStage:
    """A split stage on one of its devices.

    Attributes:
        profile: of the local operators, the reshardings, and one operator more that reads what
            other stages read.
        inside: the operators of the stage and its reshardings, by their indices there.
        graph_index: per operator, its index in the whole graph; -1 of a resharding.
        conversions: by index, the reshardings.
        regathered: by the index of an operator, the reshardings that its backward runs again.
        losses: by index of what makes an output whose classes are cut, the all-reduces of its loss.
        statistics: by index of an operator whose statistics are of a cut dimension, the all-reduces
            of its forward and of its backward.
        share: per operator, of the work of the whole one.
        loss_share: per operator, of the losses of what it makes.
        order: where the reshardings are started.
        operator_rows: the operators of the stage, by their indices there.
        copy_rows: the reshardings, as `order` numbers them, by their indices there.
        segments: the operators of each segment that is run again, by their indices there, with the
            reshardings that they read.
        cast_bytes: per operator, what is read and written in a forward, and in a backward, to make
            copies of gathered weights in the type of autocast: in front of the first that reads
            one, or of one that gathers it again.
        parameter_shares: per operator, of the elements of its trained parameters, those that it
            reads, and those of their gradients that lie on the device; 1 without any.
    """

    profile: Profile
    inside: tuple[int, ...]
    graph_index: tuple[int, ...]
    conversions: Mapping[int, Resharding]
    regathered: Mapping[int, tuple[int, ...]]
    losses: Mapping[int, tuple[Step, ...]]
    statistics: Mapping[int, Sides]
    share: tuple[float, ...]
    loss_share: tuple[float, ...]
    order: PassOrder
    operator_rows: tuple[int, ...]
    copy_rows: tuple[int, ...]
    segments: tuple[RerunOperators, ...]
    cast_bytes: tuple[tuple[int, int], ...]
    parameter_shares: tuple[tuple[float, float], ...]


def work_share(rule: Rule, mesh: Sequence[int]) -> float:
    """The part of an operator's work that each device does: 1/n on an axis along which anything
    that it reads or makes is cut. Where all is whole or a summand, each does all of it.

    >>> from planner.artefacts.sharding import rule_of
    >>> [work_share(rule_of([line]), (4,)) for line in ("S2,S0->P", "R,R->R", "P,R->P")]
    [0.25, 1.0, 1.0]
    """
    share = 1.0
    for axis, size in zip(rule.axes, mesh, strict=True):
        if axis.shares_work:
            share /= size
    return share


def local_stage(profile: Profile, stage: Stage) -> LocalStage:
    """The profile of a split stage on each of its devices.

    Raises:
        ValueError: if a spec does not divide what it cuts.
    """
    whole = over_replicas(stage, profile.graph)
    number = {device: i for i, device in enumerate(whole.devices)}
    groups = tuple(tuple(number[device] for device in group) for group in whole.groups)
    one = _Pass(whole.operators, groups, whole.recompute, whole.prefetch, whole.recomputed)
    return _local_stage(profile, whole.sharding, one)


class _Pass(NamedTuple):
    """What a local stage follows from, beside its sharding: searches ask for many stages that
    differ in nothing of it.

    Attributes:
        groups: its devices are numbers, because it does not matter which they are.
    """

    operators: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    recompute: bool
    prefetch: int | None
    recomputed: tuple[tuple[str, ...], ...]


@remembered(kept=256)
def _local_stage(profile: Profile, sharding: Sharding | None, one: _Pass) -> LocalStage:
    stage = Stage(warmup=1, sharding=sharding, **one._asdict())
    return _Builder(profile, stage).built()


@remembered
def _gradient_views(profile: Profile) -> Mapping[str, tuple[str, ...]]:
    """By output, the inputs whose gradients lie in the storage of its gradient."""
    found: dict[str, tuple[str, ...]] = {}
    for view in profile.gradient_views:
        found[view.base] = (*found.get(view.base, ()), view.tensor)
    return found


class _Row(NamedTuple):
    """An operator of the local graph.

    Attributes:
        graph_index: its index in the whole graph; -1 of one that is not there.
        share: of the work of the whole operator.
        regathered: by their rows, the reshardings that its backward runs again.
        cast_bytes, parameter_shares: as in `LocalStage`.
    """

    operator: Operator
    cost: OperatorCost
    graph_index: int
    share: float
    regathered: tuple[int, ...] = ()
    cast_bytes: tuple[int, int] = (0, 0)
    parameter_shares: tuple[float, float] = (1.0, 1.0)


class _LocalReads(NamedTuple):
    """What an operator of the stage reads.

    Attributes:
        names: of each tensor and parameter, the local one that is read.
        held: the parameters that are read as they lie.
        gathered: the copies of others.
        regathered: by their rows, the reshardings that the backward runs again.
        copies: what these make; it is not kept for the backward.
    """

    names: dict[str, str]
    held: tuple[str, ...]
    gathered: tuple[str, ...]
    regathered: tuple[int, ...]
    copies: frozenset[str]


class _Builder:
    """Puts the local graph together, in the stage's order."""

    def __init__(self, profile: Profile, stage: Stage) -> None:
        if stage.sharding is None:
            raise ValueError("expected a stage with a mesh, got one without")
        self.profile, self.stage, self.sharding = profile, stage, stage.sharding
        self.graph = profile.graph
        self.whole: dict[str, Tensor | Parameter] = {
            **tensors_by_name(self.graph), **parameters_by_name(self.graph)
        }  # fmt: skip
        self.local: dict[str, Tensor | Parameter] = {}
        self.rows: list[_Row] = []
        self.conversions: dict[int, Resharding] = {}
        self.copies: dict[str, Resharding] = {}  # by what they make
        self.bases: dict[str, str] = {}  # of views
        self.gradient_views: list[View] = []
        # By (tensor, reader), the copy that it reads; "" reads what leaves.
        self.read_as: dict[tuple[str, str], str] = {}
        # By operator's name, the reshardings that its backward runs again.
        self.regathered: dict[str, tuple[int, ...]] = {}
        self.order = pass_order(stage, self.graph)
        self.operator_rows: list[int] = []
        self.copy_rows = [-1] * len(self.order.start)

    def _run(self, indices: Sequence[int]) -> None:
        """Adds the operators, each conversion where it is started."""
        copies, todo = reshardings(self.stage, self.graph), deque(self.order.order)
        for place in range(len(indices) + 1):
            while todo and self.order.start[todo[0]] == place:
                self.copy_rows[todo[0]] = len(self.rows)
                self._convert(copies[todo.popleft()])
            if place < len(indices):
                self.operator_rows.append(len(self.rows))
                self._operator(indices[place])
        self._hold_in_flight()

    def _hold_in_flight(self) -> None:
        """Adds to the operators what is held beside them for collectives that run meanwhile, but
        for copies and gradients, which are tensors: buffers, of one collective at a time, and
        parameters that are gathered again ahead.
        """
        order, rows, end = self.order, self.operator_rows, len(self.rows)
        buffers, ahead = [0] * (end + 1), [0] * (end + 1)
        for c, row in enumerate(self.copy_rows):
            until = rows[order.first[c]] if order.first[c] < len(rows) else end
            size = max(self._taken(self.conversions[row])) if row + 1 < until else 0
            for i in range(row, until) if size else ():
                buffers[i] = max(buffers[i], size)
        for first, until, size in self._scatters() if self.stage.prefetch is not None else ():
            for i in range(first, until):
                buffers[i] = max(buffers[i], size)
        # Changes of the bytes from row to row.
        for at, places in order.again.items():
            for place in places:
                if place < at:
                    size = self._gathered_bytes(self.rows[rows[place]])
                    ahead[rows[place] + 1] += size
                    ahead[rows[at] + 1] -= size
        for i, both in enumerate(zip(buffers[:end], accumulate(ahead), strict=False)):
            row_i = self.rows[i]
            if any(both) and row_i.graph_index >= 0:
                workspace = row_i.cost.workspace_bytes + sum(both)
                self.rows[i] = row_i._replace(cost=replace(row_i.cost, workspace_bytes=workspace))

    def _scatters(self) -> Iterator[tuple[int, int, int]]:
        """The rows beside which the gradients of a bucket are scattered in a backward, the first
        and the one behind the last, and the bytes that this takes: from the operator on that makes
        the last of them, until that of the next bucket.
        """
        places = {self.rows[row].graph_index: row for row in self.operator_rows}
        users = holders(self.graph)
        made = sorted(
            (min(places[v] for name in names for v in users[name] if v in places), size)
            for names, size in bucket_scatters(self.stage, self.graph)
        )
        behind = 0
        for row, size in made:
            yield behind, row + 1, size
            behind = row + 1

    def _gathered_bytes(self, row: "_Row") -> int:
        """What is held while the parameters of an operator are gathered again ahead."""
        made = [self.rows[i].operator.outputs[0] for i in row.regathered]
        return self._bytes(made) + max(self._taken(self.conversions[i])[0] for i in row.regathered)

    def built(self) -> LocalStage:
        """The local stage."""
        indices, made_by = indices_of(self.stage, self.graph), producers(self.graph)
        inside = set(indices)
        read = dict.fromkeys(n for v in indices for n in self.graph.operators[v].inputs)
        inputs = tuple(name for name in read if made_by.get(name) not in inside)
        self._place(inputs)
        self._run(indices)
        count = len(self.rows)
        outputs = self._outside()
        profile = replace(
            self.profile,
            graph=Graph(
                operators=tuple(row.operator for row in self.rows),
                tensors=tuple(one for one in self.local.values() if isinstance(one, Tensor)),
                parameters=tuple(one for one in self.local.values() if isinstance(one, Parameter)),
                inputs=inputs,
                outputs=outputs,
                losses=self._losses(outputs),
            ),
            operators=tuple(row.cost for row in self.rows),
            views=tuple(View(name, base) for name, base in self.bases.items()),
            gradient_views=tuple(dict.fromkeys(self.gradient_views)),
            modules=(),
            tie=(),
            untie=(),
            loss_costs=tuple(self._loss_costs()),
            growth=None,
        )
        return LocalStage(
            profile=profile,
            inside=tuple(range(count)),
            graph_index=tuple(row.graph_index for row in self.rows),
            conversions=self.conversions,
            regathered={i: row.regathered for i, row in enumerate(self.rows) if row.regathered},
            losses=self._compared(),
            statistics=self._statistics(),
            share=tuple(row.share for row in self.rows),
            loss_share=tuple(self._loss_share(row.graph_index) for row in self.rows),
            order=self.order,
            operator_rows=tuple(self.operator_rows),
            copy_rows=tuple(self.copy_rows),
            segments=tuple(self._segments()),
            cast_bytes=tuple(row.cast_bytes for row in self.rows),
            parameter_shares=tuple(row.parameter_shares for row in self.rows),
        )

    def _segments(self) -> Iterator[RerunOperators]:
        for one in self.order.reruns.values():
            rows = [self.operator_rows[place] for place in one.places]
            kept = frozenset(self.operator_rows[place] for place in one.kept)
            yield RerunOperators(
                frozenset([*rows, *(self.copy_rows[c] for c, _ in one.starts)]), kept
            )

    def _place(self, names: Iterable[str]) -> None:
        """Adds tensors and parameters as they lie at home."""
        at_home, mesh = homes(self.stage, self.graph), self.sharding.mesh
        for name in names:
            one = self.whole[name]
            self.local[name] = replace(one, shape=local_shape(one.shape, at_home[name].spec, mesh))

    def _convert(self, copy: Resharding) -> None:
        """Adds a resharding."""
        one, mesh = self.whole[copy.tensor], self.sharding.mesh
        name = f"{copy.tensor} as {','.join(copy.new)}, {','.join(copy.gradient_old)}"
        name += " leaving" * copy.leaves
        name += f" in segment {copy.segment}" if copy.segment >= 0 else ""
        read = (copy.tensor,)
        inputs, held = ((), read) if isinstance(one, Parameter) else (read, ())
        self._place(held)
        shape = local_shape(one.shape, copy.new, mesh)
        with_backward = {self.graph.operators[v].name for v in differentiated(self.graph)}
        flows = copy.leaves or not with_backward.isdisjoint(copy.readers)
        gradient = flows and has_gradient(copy.tensor, self.graph)
        self.local[name] = Tensor(name, shape, copy.dtype, gradient)
        for reader in copy.readers or ("",):
            self.read_as[copy.tensor, reader] = name
        for reader in copy.again:
            self.regathered[reader] = (*self.regathered.get(reader, ()), len(self.rows))
        # Slices without blocks lie in the tensor that they are cut from, and keep all of it.
        if all(
            step.kind is Collective.SLICE and blocks_of(step.target) == 1 for step in copy.forward
        ):
            self.bases[name] = copy.tensor
            if inputs and not (copy.forward or copy.backward):
                self.gradient_views.append(View(copy.tensor, name))
        self.conversions[len(self.rows)] = self.copies[name] = copy
        operator = Operator(f"make {name}", "Reshard", inputs, (name,), held)
        cost = OperatorCost(
            operator.name, 0.0, 0.0, self._bytes([name]), self._bytes(held), 0, 0, (), 0,
            workspace_bytes=max(self._taken(copy)),
        )  # fmt: skip
        self.rows.append(_Row(operator, cost, -1, 0.0))

    def _taken(self, copy: Resharding) -> tuple[int, int]:
        """Bytes beside what a resharding reads and makes, forward and backward. What it makes of
        the gradient of a parameter is among them, as it is in the workspace of other operators.
        """
        one, mesh = self.whole[copy.tensor], self.sharding.mesh
        item_bytes = back_bytes = ITEM_BYTES[copy.dtype]
        if isinstance(one, Parameter):
            back_bytes = one.gradient_item_bytes
        forward, backward = (
            conversion_bytes(local_shape(one.shape, spec, mesh), item, mesh, steps)
            for spec, item, steps in (
                (copy.old, item_bytes, copy.forward),
                (copy.gradient_old, back_bytes, copy.backward),
            )
        )
        if not isinstance(one, Parameter):
            return forward.most - forward.result, backward.most - backward.result
        # What is sent in another type is converted to it first, as gradients that are added up are.
        sent = prod(local_shape(one.shape, copy.old, mesh)) * item_bytes
        sent *= copy.dtype != one.dtype
        added = prod(local_shape(one.shape, copy.gradient_old, mesh)) * back_bytes
        added *= copy.dtype != (one.gradient_dtype or one.dtype)
        return forward.most - forward.result + round(sent), backward.most + round(added)

    def _operator(self, v: int) -> None:
        """Adds an operator of the stage at its local shapes."""
        operator = self.graph.operators[v]
        reads = self._reads(operator)
        self._place(operator.outputs)
        self._place(reads.held)
        inputs = dict.fromkeys((*(reads.names[n] for n in operator.inputs), *reads.gathered))
        share = work_share(rule_by(self.sharding, operator), self.sharding.mesh)
        self.rows.append(
            _Row(
                replace(operator, inputs=tuple(inputs), parameters=reads.held),
                self._cost(operator, self.profile.operators[v], reads, share),
                v,
                share,
                reads.regathered,
                self._cast_bytes(operator, reads),
                self._parameter_shares(operator, reads),
            )
        )
        bases, of_gradients = view_bases(self.profile), _gradient_views(self.profile)
        for name in operator.outputs:
            if name in bases:
                self.bases[name] = reads.names[bases[name]]
            for tensor in of_gradients.get(name, ()):
                self.gradient_views.append(View(reads.names[tensor], name))

    def _reads(self, operator: Operator) -> _LocalReads:
        """What an operator reads, once the reshardings in front of it are there."""
        names = {
            name: self.read_as.get((name, operator.name), name)
            for name in (*operator.inputs, *operator.parameters)
        }
        regathered = self.regathered.get(operator.name, ())
        return _LocalReads(
            names,
            held=tuple(n for n in operator.parameters if names[n] == n),
            gathered=tuple(names[n] for n in operator.parameters if names[n] != n),
            regathered=regathered,
            copies=frozenset(self.rows[i].operator.outputs[0] for i in regathered),
        )

    def _cost(
        self, operator: Operator, cost: OperatorCost, reads: _LocalReads, share: float
    ) -> OperatorCost:
        """The cost of an operator at its local shapes.

        Args:
            share: of the work of the whole operator.
        """
        of_outputs, of_all, of_moved = self._byte_shares(operator, reads.names, cost.bytes_moved)
        stashed = self._saved_copies(operator, cost)
        saved = {n: size for n, size in {**stashed, **self._gathered_casts(operator, reads)}.items()
                 if not self._comes_short(n, reads)}  # fmt: skip
        # A backward that gathers a parameter again makes its shorter copy again, too.
        remade = {n: size for n, size in saved.items()
                  if self._owner(reads.names[n]) in reads.copies
                  and size < ITEM_BYTES[self.whole[n].dtype]}  # fmt: skip
        kept = [reads.names.get(name, name) for name in cost.stash_tensors]
        if reads_back(operator, (), self.graph):
            # Parameters are not stashed, because they are there anyway; their copies are not.
            kept += [reads.names[n] for n in operator.parameters
                     if n not in reads.held and n not in saved]  # fmt: skip
        # Copies are as large as what is read, and the rest is in proportion to what is made.
        rest = cost.stash_private_bytes - sum(
            prod(self.whole[n].shape) * size for n, size in stashed.items()
        )
        copied, remade_bytes = self._copied(saved, reads), self._copied(remade, reads)
        workspace = round(cost.workspace_bytes * of_all) + round(remade_bytes)
        gathering = (self._taken(self.conversions[i])[0] for i in reads.regathered)
        return replace(
            with_times(cost, cost.forward_s * share, cost.backward_s * share),
            output_bytes=self._bytes(operator.outputs),
            parameter_bytes=self._bytes(reads.held),
            flops=round(cost.flops * share),
            bytes_moved=round(cost.bytes_moved * of_moved),
            stash_tensors=tuple(
                dict.fromkeys(n for n in kept if self._owner(n) not in reads.copies)
            ),
            stash_private_bytes=round(copied - remade_bytes + rest * of_outputs),
            workspace_bytes=self._bytes(reads.copies) + max((workspace, *gathering)),
        )

    def _owner(self, name: str) -> str:
        """The tensor in whose storage another lies."""
        while name in self.bases:
            name = self.bases[name]
        return name

    def _saved_copies(self, operator: Operator, cost: OperatorCost) -> dict[str, float]:
        """The tensors and parameters of which an operator keeps a copy for its backward, not
        themselves, and bytes of an element of that: those in the type of autocast. Else copies
        in another order of dimensions: the fewest that are together as large as what it keeps
        besides.
        """
        short = short_copies(self.profile, operator_indices(self.graph)[operator.name])
        if short:
            return dict(short)
        read = [n for n in (*operator.inputs, *operator.parameters) if n not in cost.stash_tensors]
        read = [n for n in read if n not in cast_weights(self.profile)]
        for count in range(1, len(read) + 1) if operator.type in _PERMUTING else ():
            for some in combinations(dict.fromkeys(read), count):
                if sum(self.whole[n].bytes for n in some) == cost.stash_private_bytes:
                    return {n: ITEM_BYTES[self.whole[n].dtype] for n in some}
        return {}

    def _gathered_casts(self, operator: Operator, reads: _LocalReads) -> dict[str, float]:
        """The gathered weights of which a product keeps a copy in the type of autocast, and bytes
        of an element of that.
        """
        if operator.type not in PRODUCTS or not reads_back(operator, (), self.graph):
            return {}
        own = cast_weights(self.profile).intersection(operator.parameters).difference(reads.held)
        return dict.fromkeys(sorted(own), ITEM_BYTES[self.profile.dtype])

    def _comes_short(self, name: str, reads: _LocalReads) -> bool:
        """Whether a copy is gathered in the type of autocast."""
        whole = self.whole[name]
        return isinstance(whole, Parameter) and self.local[reads.names[name]].dtype != whole.dtype

    def _cast_bytes(self, operator: Operator, reads: _LocalReads) -> tuple[int, int]:
        """As `LocalStage.cast_bytes`; a backward that gathers again converts again, too."""
        if operator.type not in PRODUCTS:
            return 0, 0
        own = cast_weights(self.profile).intersection(operator.parameters).difference(reads.held)
        items = ITEM_BYTES["float32"] + ITEM_BYTES[self.profile.dtype]
        every = again = 0.0
        for name in own:
            copy = self.copies[reads.names[name]]
            short = self._comes_short(name, reads)
            spec = copy.old if short else copy.new
            size = items * prod(local_shape(self.whole[name].shape, spec, self.sharding.mesh))
            every += size * (not short or copy.readers[0] == operator.name)
            again += size * (self._owner(reads.names[name]) in reads.copies)
        return round(every), round(again)

    def _parameter_shares(self, operator: Operator, reads: _LocalReads) -> tuple[float, float]:
        """As `LocalStage.parameter_shares`."""
        at_home, mesh = homes(self.stage, self.graph), self.sharding.mesh
        known = parameters_by_name(self.graph)
        trained = [known[name] for name in operator.parameters if known[name].trainable]
        every = sum(prod(one.shape) for one in trained)
        if not every:
            return 1.0, 1.0
        read = sum(prod(self.local[reads.names[one.name]].shape) for one in trained)
        held = sum(
            prod(local_shape(one.shape, at_home[one.name].gradient, mesh)) for one in trained
        )
        return read / every, held / every

    def _copied(self, copies: Mapping[str, float], reads: _LocalReads) -> float:
        """Bytes of local copies of what an operator reads, by bytes of an element."""
        return sum(prod(self.local[reads.names[n]].shape) * size for n, size in copies.items())

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self.local[name].bytes for name in names)

    def _byte_shares(
        self, operator: Operator, named: Mapping[str, str], bytes_moved: int
    ) -> tuple[float, float, float]:
        """The local part of the bytes that an operator makes, of all that it touches, and of those
        that it moves: where it moves less than it touches, it picks what it makes, as a lookup in a
        table does.

        Args:
            bytes_moved: by the whole operator.
        """
        made, read = self._bytes(operator.outputs), self._bytes(named.values())
        made_whole = sum(self.whole[n].bytes for n in operator.outputs)
        both = made_whole + sum(self.whole[n].bytes for n in named)
        of_outputs = made / made_whole if made_whole else 1.0
        of_all = (made + read) / both if both else 1.0
        return of_outputs, of_all, of_outputs if bytes_moved < both else of_all

    def _outside(self) -> tuple[str, ...]:
        """Adds an operator that reads what other stages read. Gives the outputs of the local graph:
        those of the model that the stage makes, and that operator's.
        """
        inside, read_by = set(indices_of(self.stage, self.graph)), consumers(self.graph)
        sent, results = [], []
        for name in leaving(self.stage, self.graph):
            local = self._leaves_as(name)
            if any(v not in inside for v in read_by[name]):
                sent.append(local)
            if name in self.graph.outputs:
                results.append(local)
        outside = "(other stages)"
        self.local[outside] = Tensor(outside, (), "float32", False)
        operator = Operator(outside, "Outside", tuple(sent), (outside,), ())
        # A profile has an operator that takes time; a stage of views has none.
        cost = OperatorCost(outside, 1e-9, 0.0, 4, 0, 0, 0, (), 0)
        self.rows.append(_Row(operator, cost, -1, 0.0))
        # A graph needs an output with a loss; without one of the model's that is this scalar.
        return (outside, *results)

    def _leaves_as(self, name: str) -> str:
        """The local tensor that leaves the stage for one that is read elsewhere."""
        return self.read_as.get((name, ""), name)

    def _losses(self, outputs: Sequence[str]) -> tuple[LossChoice, ...]:
        mine = {self._leaves_as(one.output): one for one in losses_of(self.graph)}
        return tuple(replace(one, output=n) for n, one in mine.items() if n in outputs)

    def _compared(self) -> dict[int, tuple[Step, ...]]:
        """The all-reduces of losses, by index of what makes the output."""
        made_by = {name: i for i, row in enumerate(self.rows) for name in row.operator.outputs}
        steps = vocabulary_parallel_steps(self.graph, self.stage)
        named = {self._leaves_as(name): some for name, some in steps.items()}
        return {made_by[name]: some for name, some in named.items() if name in made_by}

    def _statistics(self) -> dict[int, Sides]:
        """The all-reduces inside operators, by their rows."""
        shapes, found = {name: one.shape for name, one in self.whole.items()}, {}
        for i, row in enumerate(self.rows):
            if row.graph_index >= 0:
                own = self.graph.operators[row.graph_index]
                rule = rule_by(self.sharding, own)
                forward, backward = statistics_steps(own, rule, shapes, self.sharding.mesh)
                if row.graph_index not in differentiated(self.graph):
                    backward = ()
                if forward:
                    found[i] = forward, backward
        return found

    def _loss_share(self, v: int) -> float:
        """The local part of the outputs with losses that an operator makes."""
        made = self.graph.operators[v].outputs if v >= 0 else ()
        lost = {one.output for one in losses_of(self.graph)}.intersection(made)
        whole = sum(self.whole[name].bytes for name in lost)
        return self._bytes(self._leaves_as(name) for name in lost) / whole if whole else 1.0

    def _loss_costs(self) -> Iterable[LossCost]:
        at_home = homes(self.stage, self.graph)
        for one in self.profile.loss_costs:
            name = self._leaves_as(one.output)
            if name in self.local and one.output in at_home:
                part = self.local[name].bytes / self.whole[one.output].bytes
                yield LossCost(name, one.forward_s * part, one.backward_s * part)
