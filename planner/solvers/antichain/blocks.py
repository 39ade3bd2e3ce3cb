"""Blocks of operators as the antichain solver's kernel takes them: the times of their downsets, and
the tensors and parameters that they touch.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from planner.artefacts.graph import (
    Graph,
    Parameter,
    consumers,
    holders,
    loss_outputs,
    producers,
    tensors_by_name,
)
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile, storage_owner
from planner.costs.casts import cast_bytes
from planner.costs.operators import first_of_each_type, operator_times
from planner.solvers.antichain import kernels
from planner.solvers.antichain.parts import may_share, shared_workspaces, workspaces
from planner.solvers.graphs.coarsen import Coarsening
from planner.solvers.graphs.downsets import Downsets, pack, sums_over
from planner.support.arrays import Floats, csr


def times_of(problem: Problem, coarse: Coarsening, subsets: Downsets) -> kernels.DownsetTimes:
    """The times of the downsets of blocks on every type of device."""
    times = [
        operator_times(problem, device) for device in first_of_each_type(problem.topology).values()
    ]
    fastest = np.min([t.forward_s + t.backward_s for t in times], axis=0)

    def of_downsets(per_operator: Floats) -> Floats:
        blocks = np.array([per_operator[list(block)].sum() for block in coarse.blocks])
        return sums_over(subsets, blocks)

    return kernels.DownsetTimes(
        forward=np.array([of_downsets(t.forward_s) for t in times]),
        backward=np.array([of_downsets(t.backward_s) for t in times]),
        ahead=of_downsets(fastest),
    )


@dataclass(frozen=True, slots=True)
class _Uses:
    """The blocks that touch each tensor, by its name.

    Attributes:
        maker: the block that makes it, -1 for the model's inputs.
        read: the blocks that read it.
        kept: the blocks that keep it from forward to backward.
    """

    maker: Mapping[str, int]
    read: Mapping[str, AbstractSet[int]]
    kept: Mapping[str, AbstractSet[int]]

    def touching(self, name: str) -> list[int]:
        """The blocks that make, read or keep it, ascending."""
        return sorted(self.kept[name] | self.read[name] | {self.maker[name]} - {-1})

    def local(self, name: str) -> bool:
        """Whether only the block that makes it touches it."""
        maker = self.maker[name]
        return maker >= 0 and self.kept[name] <= {maker} and self.read[name] <= {maker}


def sets_of(problem: Problem, coarse: Coarsening, cautious: bool) -> kernels.Sets:
    """Tensors and parameters with the blocks that touch them.

    Stashed views count as the tensor that they are a view of, wherever it was made: never less than
    `costs/stage_memory.py` counts for a stage. Views of parameters cost memory only where they are
    sent to.

    Args:
        cautious: whether workspaces are those of a pass over the whole graph, which no stage
            exceeds, rather than those of single blocks.
    """
    graph, count = problem.profile.graph, len(coarse.blocks)
    block_of = {v: b for b, block in enumerate(coarse.blocks) for v in block}
    uses, free = _uses(problem.profile, block_of), in_parameters(problem.profile)
    # A tensor that one block alone touches is part of what that block keeps.
    shared = [tensor for tensor in graph.tensors if not uses.local(tensor.name)]
    tensor_start, touched = csr(_by_block([uses.touching(t.name) for t in shared], count))
    holding = holders(graph)
    used_in = [sorted({block_of[v] for v in holding[p.name]}) for p in graph.parameters]
    parameter_start, held = csr(_by_block(used_in, count))
    casts = cast_bytes(problem.profile)
    size = np.array([p.bytes + casts.get(p.name, 0) for p in graph.parameters], dtype=float)
    trained = np.array([p.bytes * p.trainable for p in graph.parameters], dtype=float)
    return kernels.Sets(
        size=np.array([t.bytes for t in shared], dtype=float),
        maker=np.array([uses.maker[t.name] for t in shared], dtype=np.int64),
        gradient=np.array([t.gradient for t in shared], dtype=float),
        free=np.array([t.name in free for t in shared], dtype=np.bool_),
        kept=pack([sorted(uses.kept[t.name]) for t in shared], count),
        read=pack([sorted(uses.read[t.name]) for t in shared], count),
        tensor_start=tensor_start,
        tensors=touched,
        parameter_size=size,
        parameter_trained=np.divide(trained, size, out=np.zeros_like(size), where=size > 0),
        parameter_users=pack(used_in, count),
        parameter_start=parameter_start,
        parameters=held,
        tied=np.array(_tied(graph.parameters, used_in), dtype=np.int64),
        private=_private_bytes(problem.profile, coarse, uses, free),
        workspace=np.array(_workspaces(problem, coarse, cautious), dtype=float),
        returned=_returned_bytes(graph, uses, count),
    )


def _uses(profile: Profile, block_of: Mapping[int, int]) -> _Uses:
    graph = profile.graph
    tensors, made_by, read_by = tensors_by_name(graph), producers(graph), consumers(graph)
    everything, results = frozenset(range(len(graph.operators))), set(graph.outputs)
    kept: dict[str, set[int]] = {name: set() for name in tensors}
    for v, operator in enumerate(graph.operators):
        # The model's outputs stay until the backward pass, like stashed tensors.
        returned_here = results.intersection(operator.outputs)
        for name in (*profile.operators[v].stash_tensors, *sorted(returned_here)):
            owner = storage_owner(profile, name, everything)
            kept[owner if owner in tensors else name].add(block_of[v])
    return _Uses(
        maker={name: block_of[made_by[name]] if name in made_by else -1 for name in tensors},
        read={name: {block_of[v] for v in read_by[name]} for name in tensors},
        kept=kept,
    )


def _by_block(blocks_of: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Per block, the places in a list of sets of blocks that have it."""
    places: list[list[int]] = [[] for _ in range(count)]
    for place, blocks in enumerate(blocks_of):
        for b in blocks:
            places[b].append(place)
    return places


def _private_bytes(
    profile: Profile, coarse: Coarsening, uses: _Uses, free: AbstractSet[str]
) -> Floats:
    """(blocks,) bytes that a block keeps and that no other block touches."""
    graph = profile.graph
    tensors = tensors_by_name(graph)
    private = np.array([sum(profile.operators[v].stash_private_bytes for v in block)
                        for block in coarse.blocks], dtype=float)  # fmt: skip
    for name, tensor in tensors.items():
        if uses.local(name) and uses.kept[name] and name not in free:
            private[uses.maker[name]] += tensor.bytes
    # A loss keeps a tensor of the size of its input.
    for name in loss_outputs(graph):
        if uses.maker.get(name, -1) >= 0:
            private[uses.maker[name]] += tensors[name].bytes
    return private


def _workspaces(problem: Problem, coarse: Coarsening, cautious: bool) -> list[list[float]]:
    """Per row of `kernels.Sets.workspace` and block, bytes that live inside one pass; argument as
    `sets_of`.
    """
    profile = problem.profile
    whole = workspaces(profile, coarse.blocks, cautious=cautious)
    if not may_share(problem):
        return [whole]
    return [whole, *shared_workspaces(problem, coarse, cautious=cautious)]


def _returned_bytes(graph: Graph, uses: _Uses, count: int) -> Floats:
    """(blocks,) bytes of the model's outputs that a block makes."""
    returned, tensors = np.zeros(count), tensors_by_name(graph)
    for name in set(graph.outputs):
        if uses.maker.get(name, -1) >= 0:
            returned[uses.maker[name]] += tensors[name].bytes
    return returned


def in_parameters(profile: Profile) -> frozenset[str]:
    """Tensors that lie in a parameter's storage where they are made."""
    parameters = {p.name for p in profile.graph.parameters}
    inside = frozenset(range(len(profile.operators)))
    return frozenset(v.tensor for v in profile.views
                     if storage_owner(profile, v.tensor, inside) in parameters)  # fmt: skip


def _tied(parameters: Sequence[Parameter], used_in: Sequence[Sequence[int]]) -> list[int]:
    """The trained parameters that several blocks use.

    Args:
        used_in: per parameter, the blocks that use it.
    """
    pairs = zip(parameters, used_in, strict=True)
    return [p for p, (one, blocks) in enumerate(pairs) if one.trainable and len(blocks) > 1]
