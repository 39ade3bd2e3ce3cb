"""Blocks of operators as the antichain solver's kernel takes them: the lattice of their downsets
with its times, and the tensors and parameters that they touch.
"""

from collections.abc import Sequence

import numpy as np

from planner.costs.compute import times_on
from planner.costs.passes import block_workspace_bytes, operator_workspaces
from planner.graph import Parameter, consumers, holders, producers, tensors_by_name
from planner.graphs.coarsen import Coarsening
from planner.graphs.downsets import Downsets, csr, pack
from planner.problem import Problem
from planner.profiles import Profile, storage_owner
from planner.solvers.antichain import arrays, kernels
from planner.solvers.antichain.devices import first_of_each_type
from planner.support.arrays import Floats


def lattice_of(problem: Problem, coarse: Coarsening, subsets: Downsets) -> arrays.Lattice:
    """The downsets of blocks with their times on every type of device."""
    times = [times_on(problem, device) for device in first_of_each_type(problem).values()]
    fastest = np.min([t.forward_s + t.backward_s for t in times], axis=0)

    def of_downsets(per_operator: Floats) -> Floats:
        blocks = np.array([per_operator[list(block)].sum() for block in coarse.blocks])
        return kernels.sums(subsets.start, subsets.cover, subsets.added, blocks)

    return arrays.Lattice(
        subsets.masks, subsets.start, subsets.cover, subsets.added,
        forward=np.array([of_downsets(t.forward_s) for t in times]),
        backward=np.array([of_downsets(t.backward_s) for t in times]),
        ahead=of_downsets(fastest),
    )  # fmt: skip


def sets_of(problem: Problem, coarse: Coarsening, cautious: bool) -> arrays.Sets:
    """Tensors and parameters with the blocks that touch them.

    Stashed views count as the tensor that they are a view of, wherever it was made: never less than
    `costs.memory` counts for a stage. Views of parameters cost memory only where they are sent to.
    """
    profile, graph = problem.profile, problem.profile.graph
    block_of = {v: b for b, block in enumerate(coarse.blocks) for v in block}
    tensors, made_by, read_by = tensors_by_name(graph), producers(graph), consumers(graph)
    everything, results = range(len(graph.operators)), set(graph.outputs)
    inside = frozenset(everything)
    kept: dict[str, set[int]] = {name: set() for name in tensors}
    for v in everything:
        # What the model returns stays until the backward pass, like what is stashed.
        returned_here = results.intersection(graph.operators[v].outputs)
        for name in (*profile.operators[v].stash_tensors, *sorted(returned_here)):
            owner = storage_owner(profile, name, inside)
            kept[owner if owner in tensors else name].add(block_of[v])
    read = {name: {block_of[v] for v in read_by[name]} for name in tensors}
    maker = {name: block_of[made_by[name]] if name in made_by else -1 for name in tensors}
    if cautious:
        alone = operator_workspaces(profile)
        workspace = [max(alone[v] for v in block) for block in coarse.blocks]
    else:
        workspace = [block_workspace_bytes(profile, block) for block in coarse.blocks]
    private = np.array([sum(profile.operators[v].stash_private_bytes for v in block)
                        for block in coarse.blocks], dtype=float)  # fmt: skip
    table, free = [], in_parameters(profile)
    for name, tensor in tensors.items():
        touched = kept[name] | read[name]
        if maker[name] < 0 or touched - {maker[name]}:
            table.append(name)
        elif kept[name] and name not in free:
            private[maker[name]] += tensor.bytes
    # The loss keeps a tensor of the size of its input.
    last = made_by.get(graph.outputs[0])
    if last is not None:
        private[block_of[last]] += tensors[graph.outputs[0]].bytes
    count, users = len(coarse.blocks), holders(graph)
    returned = np.zeros(count)
    for name in results & made_by.keys():
        returned[block_of[made_by[name]]] += tensors[name].bytes
    used_in = [sorted({block_of[v] for v in users[p.name]}) for p in graph.parameters]
    touching: list[list[int]] = [[] for _ in coarse.blocks]
    for t, name in enumerate(table):
        for b in kept[name] | read[name] | {maker[name]} - {-1}:
            touching[b].append(t)
    holding: list[list[int]] = [[] for _ in coarse.blocks]
    for p, blocks in enumerate(used_in):
        for b in blocks:
            holding[b].append(p)
    (tensor_start, touched_tensors), (parameter_start, held) = csr(touching), csr(holding)
    return arrays.Sets(
        size=np.array([tensors[n].bytes for n in table], dtype=float),
        maker=np.array([maker[n] for n in table], dtype=np.int64),
        gradient=np.array([tensors[n].gradient for n in table], dtype=float),
        free=np.array([n in free for n in table], dtype=np.bool_),
        kept=pack([sorted(kept[n]) for n in table], count),
        read=pack([sorted(read[n]) for n in table], count),
        tensor_start=tensor_start,
        tensors=touched_tensors,
        parameter_size=np.array([p.bytes for p in graph.parameters], dtype=float),
        parameter_trained=np.array([p.trainable for p in graph.parameters], dtype=float),
        parameter_users=pack(used_in, count),
        parameter_start=parameter_start,
        parameters=held,
        tied=np.array(_tied(graph.parameters, used_in), dtype=np.int64),
        private=private,
        workspace=np.array(workspace, dtype=float),
        returned=returned,
    )


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
