"""A stage that is split over a mesh, as one of its devices sees it: a profile of the local
operators and tensors, which the rest of this folder prices and measures like any other one.

Operators run at their local shapes. A resharding (`resharding/reshardings.py`) is an operator of
its own in front of the first that reads the copy, or, of a tensor that leaves the stage, at the
end. The copy is a tensor that its readers stash, unless they gather it again, and its gradient is
another. Such an operator takes no time here; `stage_pass.py` has that of its collectives, which
depends on the devices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    LossChoice,
    Operator,
    Parameter,
    Tensor,
    consumers,
    differentiated,
    losses_of,
    parameters_by_name,
    producers,
    tensors_by_name,
)
from planner.artefacts.profile import LossCost, OperatorCost, Profile, Source, View, view_bases
from planner.artefacts.sharding import Rule, Spec, blocks_of, local_shape, rule_by
from planner.artefacts.strategy import Stage, indices_of
from planner.costs.mesh_memory import conversion_bytes
from planner.resharding import Resharding, reshardings
from planner.resharding.conversion import Collective, Step
from planner.resharding.cut_losses import vocabulary_parallel_steps
from planner.resharding.gradients import is_split
from planner.resharding.reshardings import homes, leaving, reads_back
from planner.support.memo import remembered

ROWS = "@rows"
"""Marks a rule by which each device looks all indices up in its part of a table."""

_SHORT_FLOATS = ("float16", "bfloat16")
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
        share: per operator, of the work of the whole one.
        loss_share: per operator, of the losses of what it makes.
    """

    profile: Profile
    inside: tuple[int, ...]
    graph_index: tuple[int, ...]
    conversions: Mapping[int, Resharding]
    regathered: Mapping[int, tuple[int, ...]]
    losses: Mapping[int, tuple[Step, ...]]
    share: tuple[float, ...]
    loss_share: tuple[float, ...]


def work_share(rule: Rule, mesh: Sequence[int]) -> float:
    """The part of an operator's work that each device does: 1/n on an axis along which anything
    that it reads or makes is cut. Where all is whole or a summand, each does all of it.

    >>> from planner.artefacts.sharding import rule_of
    >>> [work_share(rule_of([line]), (4,)) for line in ("S2,S0->P", "R,R->R", "P,R->P")]
    [0.25, 1.0, 1.0]
    """
    share = 1.0
    for axis, size in enumerate(mesh):
        cut = any(spec[axis].startswith("S") for spec in (*rule.inputs, *rule.outputs))
        if is_split(rule, axis) and cut and ROWS not in rule.local[axis]:
            share /= size
    return share


@remembered(kept=256)
def local_stage(profile: Profile, stage: Stage) -> LocalStage:
    """The profile of a split stage on each of its devices.

    Raises:
        ValueError: if a spec does not divide what it cuts.
    """
    return _Builder(profile, stage).built()


@remembered
def _gradient_views(profile: Profile) -> Mapping[str, tuple[str, ...]]:
    """By output, the inputs whose gradients lie in the storage of its gradient."""
    found: dict[str, tuple[str, ...]] = {}
    for view in profile.gradient_views:
        found[view.base] = (*found.get(view.base, ()), view.tensor)
    return found


class _Builder:
    """Puts the local graph together, in the stage's order."""

    def __init__(self, profile: Profile, stage: Stage) -> None:
        if stage.sharding is None:
            raise ValueError("expected a stage with a mesh, got one without")
        self.profile, self.stage, self.sharding = profile, stage, stage.sharding
        self.graph = profile.graph
        self.indices = indices_of(stage, self.graph)
        self.homes = homes(stage, self.graph)
        self.copies = reshardings(stage, self.graph)
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, Parameter] = {}
        self.operators: list[Operator] = []
        self.costs: list[OperatorCost] = []
        self.graph_index: list[int] = []
        self.share: list[float] = []
        self.conversions: dict[int, Resharding] = {}
        self.bases: dict[str, str] = {}  # of views
        self.gradient_views: list[View] = []
        # By (tensor, reader), the copy that it reads; "" reads what leaves.
        self.read_as: dict[tuple[str, str], str] = {}
        # By operator's name, the reshardings that its backward runs again; then by index.
        self.gathers: dict[str, list[int]] = {}
        self.regathered: dict[int, tuple[int, ...]] = {}

    def built(self) -> LocalStage:
        """The local stage."""
        inside = set(self.indices)
        made_by = producers(self.graph)
        inputs = [
            name
            for name in dict.fromkeys(
                n for v in self.indices for n in self.graph.operators[v].inputs
            )
            if made_by.get(name) not in inside
        ]
        for name in inputs:
            self._tensor(name)
        first: dict[str, list[Resharding]] = {}
        for copy in self.copies:
            for reader in copy.readers[:1]:
                first.setdefault(reader, []).append(copy)
        for v in self.indices:
            operator = self.graph.operators[v]
            for copy in first.get(operator.name, ()):
                self._convert(copy)
            self._operator(v)
        for copy in self.copies:
            if copy.leaves:
                self._convert(copy)
        count = len(self.operators)
        outputs = self._outside()
        profile = replace(
            self.profile,
            graph=Graph(
                operators=tuple(self.operators),
                tensors=tuple(self.tensors.values()),
                parameters=tuple(self.parameters.values()),
                inputs=tuple(inputs),
                outputs=outputs,
                losses=self._losses(outputs),
            ),
            operators=tuple(self.costs),
            views=tuple(View(name, base) for name, base in self.bases.items()),
            gradient_views=tuple(dict.fromkeys(self.gradient_views)),
            modules=(),
            tie=(),
            untie=(),
            loss_costs=tuple(self._loss_costs()),
            source=Source.IMPORTED,  # whose sizes need not be those of the graph
        )
        return LocalStage(
            profile=profile,
            inside=tuple(range(count)),
            graph_index=tuple(self.graph_index),
            conversions=self.conversions,
            regathered=self.regathered,
            losses=self._compared(),
            share=tuple(self.share),
            loss_share=tuple(self._loss_share(v) for v in self.graph_index),
        )

    def _local(self, one: Tensor, spec: Spec, name: str) -> None:
        shape = local_shape(one.shape, spec, self.sharding.mesh)
        self.tensors[name] = replace(one, name=name, shape=shape)

    def _tensor(self, name: str) -> None:
        """Adds a tensor at its home."""
        self._local(tensors_by_name(self.graph)[name], self.homes[name].spec, name)

    def _parameter(self, name: str) -> None:
        """Adds a parameter at its home, if it is not there."""
        if name not in self.parameters:
            one = parameters_by_name(self.graph)[name]
            shape = local_shape(one.shape, self.homes[name].spec, self.sharding.mesh)
            self.parameters[name] = replace(one, shape=shape)

    def _convert(self, copy: Resharding) -> None:
        """Adds a resharding."""
        parameter = parameters_by_name(self.graph).get(copy.tensor)
        name = f"{copy.tensor} as {','.join(copy.new)}, {','.join(copy.gradient_old)}"
        name += " leaving" * copy.leaves
        if parameter is None:
            source: Tensor = tensors_by_name(self.graph)[copy.tensor]
        else:
            self._parameter(copy.tensor)
            source = Tensor(copy.tensor, parameter.shape, parameter.dtype, parameter.trainable)
        with_backward = {self.graph.operators[v].name for v in differentiated(self.graph)}
        flows = source.gradient and (copy.leaves or not with_backward.isdisjoint(copy.readers))
        self._local(replace(source, gradient=flows), copy.new, name)
        inputs = () if parameter else (copy.tensor,)
        held = (copy.tensor,) if parameter else ()
        for reader in copy.readers or ("",):
            self.read_as[copy.tensor, reader] = name
        for reader in copy.again:
            self.gathers.setdefault(reader, []).append(len(self.operators))
        # Slices without blocks lie in the tensor that they are cut from, and keep all of it.
        if all(
            step.kind is Collective.SLICE and blocks_of(step.target) == 1 for step in copy.forward
        ):
            self.bases[name] = copy.tensor
            if not (copy.forward or copy.backward or parameter):
                self.gradient_views.append(View(copy.tensor, name))
        self.conversions[len(self.operators)] = copy
        self.operators.append(Operator(f"make {name}", "Reshard", inputs, (name,), held))
        self.costs.append(
            OperatorCost(
                f"make {name}", 0.0, 0.0, self.tensors[name].bytes,
                sum(self.parameters[n].bytes for n in held), 0, 0, (), 0,
                workspace_bytes=max(self._taken(copy)),
            )
        )  # fmt: skip
        self.graph_index.append(-1)
        self.share.append(0.0)

    def _taken(self, copy: Resharding) -> tuple[int, int]:
        """Bytes beside what a resharding reads and makes, forward and backward. What it makes of
        the gradient of a parameter is among them, as it is in the workspace of other operators.
        """
        known, mesh = self._described()[copy.tensor], self.sharding.mesh
        item_bytes = known.bytes / max(prod(known.shape), 1)
        forward, backward = (
            conversion_bytes(local_shape(known.shape, spec, mesh), item_bytes, mesh, steps)
            for spec, steps in ((copy.old, copy.forward), (copy.gradient_old, copy.backward))
        )
        made = 0 if copy.tensor in self.parameters else backward.result
        return forward.most - forward.result, backward.most - made

    def _operator(self, v: int) -> None:
        """Adds an operator of the stage at its local shapes."""
        operator, cost = self.graph.operators[v], self.profile.operators[v]
        rule = rule_by(self.sharding, operator)
        for name in operator.outputs:
            self._tensor(name)
        named = {n: self.read_as.get((n, operator.name), n)
                 for n in (*operator.inputs, *operator.parameters)}  # fmt: skip
        held = tuple(n for n in operator.parameters if named[n] == n)
        for name in held:
            self._parameter(name)
        gathered = tuple(named[n] for n in operator.parameters if named[n] != n)
        inputs = tuple(dict.fromkeys((*(named[n] for n in operator.inputs), *gathered)))
        share = work_share(rule, self.sharding.mesh)
        of_outputs, of_all, moved = self._byte_shares(operator, named, cost.bytes_moved)
        again = self.gathers.get(operator.name, [])
        if again:
            self.regathered[len(self.operators)] = tuple(again)
        self.operators.append(replace(operator, inputs=inputs, parameters=held))
        copies = {self.operators[i].outputs[0] for i in again}
        short = self._cast(operator, cost)
        cast = short or self._permuted(operator, cost)
        keeps = reads_back(operator, (), self.graph)
        kept = [named[n] for n in operator.parameters if keeps and named[n] != n and n not in cast]
        stash = [
            name
            for name in (*(named.get(n, n) for n in cost.stash_tensors), *kept)
            if self._owner(name) not in copies
        ]
        regathered = {n: size for n, size in short.items() if self._owner(named[n]) in copies}
        self.costs.append(
            replace(
                cost,
                forward_s=cost.forward_s * share,
                backward_s=cost.backward_s * share,
                output_bytes=sum(self.tensors[n].bytes for n in operator.outputs),
                parameter_bytes=sum(self.parameters[n].bytes for n in held),
                flops=round(cost.flops * share),
                bytes_moved=round(cost.bytes_moved * moved),
                stash_tensors=tuple(dict.fromkeys(stash)),
                stash_private_bytes=self._private_bytes(cost, cast, regathered, named, of_outputs),
                workspace_bytes=sum(self.tensors[n].bytes for n in copies)
                + max(
                    round(cost.workspace_bytes * of_all)
                    + round(self._cast_bytes(regathered, named)),
                    *(self._taken(self.conversions[i])[0] for i in again),
                    0,
                ),
            )
        )
        self.graph_index.append(v)
        self.share.append(share)
        bases, of_gradients = view_bases(self.profile), _gradient_views(self.profile)
        for name in operator.outputs:
            if name in bases:
                self.bases[name] = named[bases[name]]
            for tensor in of_gradients.get(name, ()):
                self.gradient_views.append(View(named[tensor], name))

    def _owner(self, name: str) -> str:
        """The tensor in whose storage another lies."""
        while name in self.bases:
            name = self.bases[name]
        return name

    def _cast(self, operator: Operator, cost: OperatorCost) -> dict[str, float]:
        """Under autocast, the tensors and parameters of which an operator keeps a shorter copy for
        its backward, and bytes of an element of that: what it reads as float32 and keeps not as it
        is, where it makes shorter floats and the copies are within what it keeps besides.
        """
        made = tensors_by_name(self.graph)[operator.outputs[0]].dtype
        if made not in _SHORT_FLOATS:
            return {}
        known = self._described()
        names = [n for n in (*operator.inputs, *operator.parameters)
                 if known[n].dtype == "float32" and n not in cost.stash_tensors]  # fmt: skip
        copies = sum(prod(known[n].shape) * ITEM_BYTES[made] for n in names)
        return (
            dict.fromkeys(names, float(ITEM_BYTES[made]))
            if copies <= cost.stash_private_bytes
            else {}
        )

    def _permuted(self, operator: Operator, cost: OperatorCost) -> dict[str, float]:
        """The tensors and parameters of which an operator keeps a copy in another order for its
        backward, and bytes of an element: the fewest that it reads and keeps not
        as they are, and that are together as large as what it keeps besides.
        """
        if operator.type not in _PERMUTING:
            return {}
        known = self._described()
        names = [n for n in dict.fromkeys((*operator.inputs, *operator.parameters))
                 if n not in cost.stash_tensors]  # fmt: skip
        for count in range(1, len(names) + 1):
            for some in combinations(names, count):
                if sum(known[n].bytes for n in some) == cost.stash_private_bytes:
                    return {n: float(ITEM_BYTES[known[n].dtype]) for n in some}
        return {}

    def _described(self) -> Mapping[str, Tensor | Parameter]:
        """All tensors and parameters of the whole model, by name."""
        return {**tensors_by_name(self.graph), **parameters_by_name(self.graph)}

    def _private_bytes(
        self,
        cost: OperatorCost,
        cast: Mapping[str, float],
        regathered: Mapping[str, float],
        named: Mapping[str, str],
        of_outputs: float,
    ) -> int:
        """What an operator keeps besides tensors: copies as large as what it reads, and the rest in
        proportion to what it makes.

        Args:
            cast: as of `_cast` or `_permuted`.
            regathered: those of which the copies are made again in the backward.
        """
        known = self._described()
        whole = sum(prod(known[n].shape) * size for n, size in cast.items())
        here = self._cast_bytes(cast, named) - self._cast_bytes(regathered, named)
        return round(here + (cost.stash_private_bytes - whole) * of_outputs)

    def _cast_bytes(self, cast: Mapping[str, float], named: Mapping[str, str]) -> float:
        """Bytes of shorter copies of what an operator reads."""
        return sum(
            prod((self.tensors.get(named[n]) or self.parameters[named[n]]).shape) * size
            for n, size in cast.items()
        )

    def _byte_shares(
        self, operator: Operator, named: Mapping[str, str], bytes_moved: int
    ) -> tuple[float, float, float]:
        """The local part of the bytes that an operator makes, of all that it touches, and of those
        that it moves: where it moves less than it touches, it picks what it makes, as a lookup in a
        table does.

        Args:
            bytes_moved: by the whole operator.
        """
        tensors, parameters = tensors_by_name(self.graph), parameters_by_name(self.graph)
        made = sum(self.tensors[n].bytes for n in operator.outputs)
        made_whole = sum(tensors[n].bytes for n in operator.outputs)
        read = sum((self.tensors.get(n) or self.parameters[n]).bytes for n in named.values())
        read_whole = sum((tensors.get(n) or parameters[n]).bytes for n in named)
        both = made_whole + read_whole
        of_outputs = made / made_whole if made_whole else 1.0
        of_all = (made + read) / both if both else 1.0
        return of_outputs, of_all, of_outputs if bytes_moved < both else of_all

    def _outside(self) -> tuple[str, ...]:
        """Adds an operator that reads what other stages read. Gives the outputs of the local graph:
        those of the model that the stage makes, and that operator's.
        """
        inside = set(self.indices)
        read_by = consumers(self.graph)
        sent, results = [], []
        for name in leaving(self.stage, self.graph):
            local = self.read_as.get((name, ""), name)
            if any(v not in inside for v in read_by[name]):
                sent.append(local)
            if name in self.graph.outputs:
                results.append(local)
        outside = "(other stages)"
        self.tensors[outside] = Tensor(outside, (), "float32", False)
        self.operators.append(Operator(outside, "Outside", tuple(sent), (outside,), ()))
        # A profile has an operator that takes time; a stage of views has none.
        self.costs.append(OperatorCost(outside, 1e-9, 0.0, 4, 0, 0, 0, (), 0))
        self.graph_index.append(-1)
        self.share.append(0.0)
        # A graph needs an output with a loss; without one of the model's that is this scalar.
        return (outside, *results)

    def _losses(self, outputs: Sequence[str]) -> tuple[LossChoice, ...]:
        mine = {
            self.read_as.get((one.output, ""), one.output): one for one in losses_of(self.graph)
        }
        return tuple(replace(one, output=n) for n, one in mine.items() if n in outputs)

    def _compared(self) -> dict[int, tuple[Step, ...]]:
        """The all-reduces of losses, by index of what makes the output."""
        made_by = {name: i for i, one in enumerate(self.operators) for name in one.outputs}
        steps = vocabulary_parallel_steps(self.graph, self.stage)
        named = {self.read_as.get((name, ""), name): some for name, some in steps.items()}
        return {made_by[name]: some for name, some in named.items() if name in made_by}

    def _loss_share(self, v: int) -> float:
        """The local part of the outputs with losses that an operator makes."""
        made = self.graph.operators[v].outputs if v >= 0 else ()
        lost = {one.output for one in losses_of(self.graph)}.intersection(made)
        here = sum(self.tensors[self.read_as.get((name, ""), name)].bytes for name in lost)
        whole = sum(tensors_by_name(self.graph)[name].bytes for name in lost)
        return here / whole if whole else 1.0

    def _loss_costs(self) -> Iterable[LossCost]:
        for one in self.profile.loss_costs:
            name = self.read_as.get((one.output, ""), one.output)
            if name in self.tensors and one.output in self.homes:
                part = self.tensors[name].bytes / tensors_by_name(self.graph)[one.output].bytes
                yield LossCost(name, one.forward_s * part, one.backward_s * part)
