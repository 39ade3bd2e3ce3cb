"""Seconds of what a split costs on a view, by the prices of the judge.

What a microbatch costs counts once for each microbatch of a replica; sums of gradients, the step
and gathers behind it count once. The latter go in buckets, so a parameter pays the part of a bucket
that it fills.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from planner.artefacts.graph import (
    ITEM_BYTES,
    Graph,
    Parameter,
    parameters_by_name,
    producers,
)
from planner.artefacts.losses import losses
from planner.artefacts.operator_types import PRODUCTS
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import OWN, Rule, Sharding, Spec, dim_of, local_shape, reads
from planner.artefacts.strategy import BUCKET_BYTES, MAX_BUCKETS, Stage
from planner.artefacts.topology import device_type
from planner.costs.casts import cast_weights
from planner.costs.stage_pass import part_times_s, stage_collectives_s, sums_of_gradients_s
from planner.costs.update import gradient_copies, step_s
from planner.resharding.conversion import LOCAL, Step, conversion
from planner.resharding.cut_losses import vocabulary_parallel_steps
from planner.resharding.sent_types import sent_types
from planner.resharding.statistics import statistics_steps
from planner.solvers.intra.space import View
from planner.solvers.sharded.complete import may_leave
from planner.solvers.sharded.rules import named
from planner.support.arrays import Floats
from planner.support.memo import remembered


class Prices:
    """The prices on a view.

    Attributes:
        rounds: microbatches of a replica in an iteration.
    """

    def __init__(self, problem: Problem, view: View, rounds: float | None = None) -> None:
        self.problem, self.view = problem, view
        self.rounds = problem.num_microbatches / view.replicas if rounds is None else rounds
        self._kind = device_type(problem.topology, view.group[0])
        self._added_s = sums_of_gradients_s(problem, view.group[0])
        every = sum(one.bytes for one in problem.profile.graph.parameters)
        self._bucket_bytes = max(BUCKET_BYTES, every // MAX_BUCKETS)
        self._bucket_bytes *= gradient_copies(problem.profile)
        self.converted_s = lru_cache(maxsize=None)(self._converted_s)
        self.once_s = lru_cache(maxsize=None)(self._once_s)

    def compute_s(
        self, rules: Sequence[Sequence[Rule]], same: Sequence[int]
    ) -> list[Floats]:  # fmt: skip
        """Per operator, (2, k) forward and backward of a microbatch by each of its rules.

        Args:
            same: per operator, one that has the same rules and costs the same by them.
        """
        own = tuple((v, tuple(rules[v])) for v in sorted(set(same)))
        found = _compute_s(self.problem, self.view.mesh, self.view.groups[0], own)
        return [found[v] for v in same]

    def statistics_s(self, v: int, rule: Rule) -> tuple[float, float]:
        """All-reduces inside an operator, forward and backward."""
        profile = self.problem.profile
        about, operator = named(profile.graph), profile.graph.operators[v]
        shapes = {name: about[name].shape for name in reads(operator)}
        both = statistics_steps(operator, rule, shapes, self.view.mesh)
        there, back = (
            stage_collectives_s(self.problem, self.view.groups[0], self.view.mesh, side)
            for side in both
        )
        return there, back

    def loss_s(self, name: str, leaves: Spec) -> float:
        """All-reduces of the loss of an output that leaves in a spec of the mesh."""
        sharding = Sharding(self.view.mesh, {}, {}, {}, {name: leaves})
        stage = Stage((), (self.view.groups[0],), 1, False, sharding)
        steps = vocabulary_parallel_steps(self.problem.profile.graph, stage).get(name, ())
        return stage_collectives_s(self.problem, self.view.groups[0], self.view.mesh, steps)

    def _converted_s(self, shape: tuple[int, ...], item: float, old: Spec, new: Spec) -> float:
        """Of a conversion of a tensor. Nothing changes along replicas that have their own."""
        if old == new:
            return 0.0
        while old[-1] == new[-1] == OWN:
            old, new = old[:-1], new[:-1]
        steps = conversion(shape, item, self.view.sizes[: len(old)], old, new)
        return stage_collectives_s(self.problem, self.view.group, self.view.sizes, steps)

    def _once_s(self, shape: tuple[int, ...], item: float, old: Spec, new: Spec) -> float:
        """Of a conversion of a parameter or its gradient in a bucket, which is full."""
        if old == new:
            return 0.0
        sizes = self.view.sizes
        if len(self.view.replica_axes) == 2 and old[-2:] == ("P", "P") and new[-2:] == ("R", "R"):
            # What no replica keeps a part of is one sum over all of them.
            sizes, old, new = (*self.view.mesh, self.view.replicas), old[:-1], new[:-1]
        total = 0.0
        for step in conversion(shape, item, sizes, old, new):
            if step.kind in LOCAL or not step.bytes:
                continue
            size = max(step.bytes, self._bucket_bytes)
            whole = self._collective_s(replace(step, bytes=size), sizes)
            total += whole * step.bytes / size
        return total

    def _collective_s(self, step: Step, sizes: tuple[int, ...]) -> float:
        return stage_collectives_s(self.problem, self.view.group, sizes, [step])

    def sent_as(self, one: Parameter) -> str:
        """The type in which a parameter is gathered."""
        return sent_types(self.problem.profile.graph).get(one.name, one.dtype)

    def gathered_s(self, one: Parameter, lies: Spec, spec: Spec) -> float:
        """Of the conversion of a parameter for a pass."""
        return self.converted_s(one.shape, ITEM_BYTES[self.sent_as(one)], lies, spec)

    def cast_s(self, one: Parameter, v: int, lies: Spec, spec: Spec) -> float:
        """Of a copy in the type of autocast of a weight that is converted for an operator."""
        profile = self.problem.profile
        operator = profile.graph.operators[v]
        if operator.type not in PRODUCTS or one.name not in cast_weights(profile):
            return 0.0
        short = self.sent_as(one) != one.dtype and self.gathered_s(one, lies, spec) > 0
        elements = prod(local_shape(one.shape, lies if short else spec, self.view.sizes))
        items = ITEM_BYTES["float32"] + ITEM_BYTES[profile.dtype]
        return round(elements * items) / self._kind.memory_bandwidth_bytes_per_s

    def added_s(self, one: Parameter, v: int, gradient: Spec) -> float:
        """Of an operator's part of the sum of the gradients of a parameter, which lie so."""
        known = parameters_by_name(self.problem.profile.graph)
        held = (known[name] for name in self.problem.profile.graph.operators[v].parameters)
        every = sum(prod(other.shape) for other in held if other.trainable)
        here = prod(local_shape(one.shape, gradient, self.view.sizes))
        return float(self._added_s[v]) * here / every

    def step_s(self, size_bytes: float) -> float:
        """Of the optimizer, through so many bytes of parameters."""
        return step_s(self.problem, size_bytes, self._kind)


@remembered(kept=64)
def _compute_s(
    problem: Problem,
    mesh: tuple[int, ...],
    group: tuple[int, ...],
    rules: tuple[tuple[int, tuple[Rule, ...]], ...],
) -> dict[int, Floats]:
    """By operator, (2, k) forward and backward of a microbatch by each of its rules.

    Args:
        rules: of some operators, by index.
    """
    graph = problem.profile.graph
    found = {v: np.zeros((2, len(some))) for v, some in rules}
    for k in range(max(len(some) for _, some in rules)):
        chosen = {v: some[k] for v, some in rules if k < len(some)}
        stage = Stage(
            tuple(graph.operators[v].name for v in chosen), (group,), 1, False,
            _as_read(graph, mesh, chosen),
        )  # fmt: skip
        index, both = part_times_s(problem, stage, group[0])
        for v, time_s in zip(index, both.T, strict=True):
            if v >= 0:
                found[v][:, k] = time_s
    return found


def _as_read(graph: Graph, mesh: tuple[int, ...], rules: Mapping[int, Rule]) -> Sharding:
    """The sharding of some operators whose tensors and parameters come and lie as they are read:
    then nothing is converted where that may be.

    Args:
        rules: by index of the operator.
    """
    made_by, at_rest = producers(graph), dict[str, Spec]()
    for v, rule in rules.items():
        for name, spec in zip(reads(graph.operators[v]), rule.inputs, strict=True):
            if made_by.get(name) not in rules and "P" not in spec:
                at_rest.setdefault(name, spec)
    parameters = {name: at_rest.pop(name) for name in parameters_by_name(graph) if name in at_rest}
    own = {graph.operators[v].name: rule for v, rule in rules.items()}
    leaving = {
        name: leaving_spec(graph, name, spec)
        for v, rule in rules.items()
        for name, spec in zip(graph.operators[v].outputs, rule.outputs, strict=True)
        if name in graph.outputs
    }
    return Sharding(mesh, own, parameters, at_rest, leaving)


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
