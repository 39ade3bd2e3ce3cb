"""What crosses two stages, cut where that is faster: each device of a mesh sends or receives only a
part of a tensor over the links between the meshes, and the devices of a mesh make the whole of it
over the links inside.

A stage says how a tensor lies where it enters and where it leaves (`Sharding.inputs`, `outputs`).
If that is whole (R), each device of the reading stage gets all of it, and each device of the making
stage all of its gradient. If it is cut (S<d>), the boxes that are sent have nothing in common
(`splitting.pieces`), and an all-gather inside the stage follows (`splitting.reshardings`); back, a
reduce-scatter takes the place of an all-reduce of the gradient. So nothing but these specs has to
be chosen, and what is chosen stands in the strategy.

Chosen is what takes least time for one microbatch, forward and backward: the transfers, as long as
on the link that carries most, and the collectives of the tensor in both stages. That transfers may
run beside computations is for the simulator to say, which compares both.

Source: the local all-gather of Alpa (Zheng et al., OSDI 2022, section 6); between equal meshes it
is the scatter/gather of Megatron-LM (Narayanan et al., SC 2021, section 4.1).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from planner.artefacts.graph import ITEM_BYTES, Graph, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Spec, dim_of, reads, rule_by, tiles
from planner.artefacts.strategy import (
    Crossing,
    Stage,
    Strategy,
    crossings,
    indices_of,
    shares_devices,
)
from planner.artefacts.topology import Topology
from planner.clusters.routes import latency_s, routes
from planner.costs.stage_pass import stage_collectives_s
from planner.resharding import Piece, pieces
from planner.resharding.conversion import conversion
from planner.resharding.gradients import gradient_spec
from planner.resharding.reshardings import homes
from planner.schedules.pipelines import mesh_end


def with_local_all_gathers(problem: Problem, strategy: Strategy) -> Strategy:
    """The strategy with tensors cut where they leave and enter meshes, if that is faster; else the
    same strategy.
    """
    graph, stages = problem.profile.graph, list(strategy.stages)
    if all(stage.sharding is None for stage in stages) or shares_devices(strategy):
        return strategy
    for crossing in crossings(strategy, graph):
        if crossing.tensor not in graph.outputs:  # its loss is computed as it leaves
            for s, spec in _chosen(problem, stages, crossing).items():
                stages[s] = _with_end(stages[s], crossing.tensor, spec, leaves=s == crossing.source)
    return strategy if tuple(stages) == strategy.stages else replace(strategy, stages=tuple(stages))


def _with_end(stage: Stage, tensor: str, spec: Spec, *, leaves: bool) -> Stage:
    """The stage with another spec of a tensor that leaves or enters it."""
    assert stage.sharding is not None
    sharding = stage.sharding
    specs = sharding.outputs if leaves else sharding.inputs
    if specs.get(tensor, ("R",) * len(spec)) == spec:
        return stage
    specs = {**specs, tensor: spec}
    if leaves:
        return replace(stage, sharding=replace(sharding, outputs=specs))
    return replace(stage, sharding=replace(sharding, inputs=specs))


def _chosen(problem: Problem, stages: list[Stage], crossing: Crossing) -> Mapping[int, Spec]:
    """By stage with a mesh, the spec of a tensor at the stage's edge. Of equals, the present one:
    candidates begin with it.
    """
    source = _End(problem, stages[crossing.source], crossing, leaves=True)
    targets = {s: _End(problem, stages[s], crossing, leaves=False) for s in crossing.targets}
    best: tuple[float, dict[int, Spec]] | None = None
    for own in source.candidates():
        total_s, specs = source.inside_s(own), {crossing.source: own}
        for s, target in targets.items():
            costs = [(_moved_s(problem.topology, source, own, target, one)
                      + target.inside_s(one), one) for one in target.candidates()]  # fmt: skip
            time_s, specs[s] = min(costs, key=lambda cost: cost[0])
            total_s += time_s
        if best is None or total_s < best[0]:
            best = total_s, specs
    assert best is not None
    return {s: spec for s, spec in best[1].items() if stages[s].sharding is not None}


@dataclass(frozen=True, slots=True)
class _End:
    """A tensor at the edge of a stage.

    Attributes:
        crossing: the tensor.
        leaves: whether the stage makes it.
    """

    problem: Problem
    stage: Stage
    crossing: Crossing
    leaves: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tensors_by_name(self.problem.profile.graph)[self.crossing.tensor].shape

    def candidates(self) -> Iterator[Spec]:
        """The present spec, and those with more axes that cut."""
        _, mesh, spec = mesh_end(self.stage, self.crossing.tensor, source=self.leaves)
        yield spec
        whole = [a for a, size in enumerate(mesh) if spec[a] == "R" and size > 1]
        for count in range(1, len(whole) + 1):
            for axes in combinations(whole, count):
                cut = _cut_along(self.shape, mesh, spec, axes)
                if cut is not None:
                    yield cut

    def inside_s(self, spec: Spec) -> float:
        """Time of the tensor's collectives in the stage, in s, if it has a spec at the edge."""
        sharding, graph = self.stage.sharding, self.problem.profile.graph
        if sharding is None:
            return 0.0
        name, item = self.crossing.tensor, ITEM_BYTES[self.crossing.dtype]
        if self.leaves:
            # Replicas that keep parts are one more axis there, along which each has its own.
            home, axes = homes(self.stage, graph)[name], len(sharding.mesh)
            ways = [(home.spec[:axes], home.gradient[:axes])]
        else:
            ways = sorted(set(_wanted(self.stage, graph, name)))
        total_s = 0.0
        for own, gradient in ways:
            old, new = (own, spec) if self.leaves else (spec, own)
            back = (spec, gradient) if self.leaves else (gradient, spec)
            ahead = conversion(self.shape, item, sharding.mesh, old, new)
            steps = [*ahead * (1 + self.stage.recompute)]
            if self.crossing.gradient:
                steps += conversion(self.shape, item, sharding.mesh, *back)
            total_s += max(
                stage_collectives_s(self.problem, group, sharding.mesh, steps)
                for group in self.stage.groups
            )
        return total_s


def _wanted(stage: Stage, graph: Graph, tensor: str) -> Iterator[tuple[Spec, Spec]]:
    """The specs in which operators of a stage read a tensor, and make its gradient."""
    assert stage.sharding is not None
    for v in indices_of(stage, graph):
        operator = graph.operators[v]
        if tensor in operator.inputs:
            rule = rule_by(stage.sharding, operator)
            for name, spec in zip(reads(operator), rule.inputs, strict=True):
                if name == tensor:
                    yield spec, gradient_spec(rule, spec)


def _cut_along(
    shape: tuple[int, ...], mesh: tuple[int, ...], spec: Spec, axes: Iterable[int]
) -> Spec | None:
    """The spec with some axes cutting, too, each along the first dimension that can be cut, one
    that no other axis cuts if there is any; None if there is no such dimension.

    >>> _cut_along((4, 6), (2, 2), ("R", "S0"), [0])
    ('S1', 'S0')
    """
    parts = list(spec)
    for axis in axes:
        taken = {dim_of(part) for part in parts}
        dims = sorted(range(len(shape)), key=lambda dim: (dim in taken, dim))
        for dim in dims:
            tried = [*parts[:axis], f"S{dim}", *parts[axis + 1 :]]
            if _divides(shape, tuple(tried), mesh):
                parts = tried
                break
        else:
            return None
    return tuple(parts)


def _divides(shape: tuple[int, ...], spec: Spec, mesh: tuple[int, ...]) -> bool:
    try:
        tiles(shape, spec, mesh, 0)
    except ValueError:
        return False
    return True


def _moved_s(
    topology: Topology, source: _End, own: Spec, target: _End, other: Spec
) -> float:  # fmt: skip
    """Time of the transfers of one microbatch, the tensor's and its gradient's, in s."""
    first, second = source.stage.groups[0], target.stage.groups[0]
    ends = [
        (group, mesh_end(end.stage, "", source=end.leaves)[1], spec)
        for group, end, spec in ((first, source, own), (second, target, other))
    ]
    item = ITEM_BYTES[source.crossing.dtype]
    total_s = transfers_s(topology, pieces(source.shape, *ends), item)
    if source.crossing.gradient:
        total_s += transfers_s(topology, pieces(source.shape, *reversed(ends)), item)
    return total_s


def transfers_s(topology: Topology, some: Iterable[Piece], item_bytes: float) -> float:
    """Time of transfers that begin together, in s: as long as the link that carries most needs, and
    the largest latency.

    Args:
        some: the pieces; source and target are devices.
        item_bytes: of an element.
    """
    loads, late_s = Counter[int](), 0.0
    for one in some:
        if one.source == one.target:
            continue
        size = prod(stop - start for start, stop in one.box)
        for link in routes(topology)[one.source, one.target]:
            loads[link] += size
        late_s = max(late_s, latency_s(topology, one.source, one.target))
    slowest_s = max(
        (size * item_bytes / topology.links[link].bandwidth_bytes_per_s
         for link, size in loads.items()), default=0.0,
    )  # fmt: skip
    return late_s + slowest_s
