"""Co-placement: operators that exchange many bytes get one device together, before any model is
built.

Union-find over the edges between operators, by falling bytes, ties by the operators:

    (1) the two groups of an edge are merged if the bytes that they keep together fit the smallest
        device
    (2) a union that does not fit is skipped, and the walk goes on with the next edge
    (3) the walk ends when fewer groups are left than asked for, or no edge is

A group says where its operators run, not when. They are scheduled one by one, because a group need
not be convex: as one block it might have to wait for itself.

The bytes that a set of operators keeps are those of the constraint model's memory.

Source: NetSplit, Nanjing 2023, co-placement.
"""

from collections import Counter
from collections.abc import Mapping

from planner.solvers.placement.problem import KeptBytes, PlacementProblem, least_bytes


def kept_bytes(problem: PlacementProblem) -> KeptBytes:
    """All bytes that devices keep by NetSplit's count.

    As published: a trained parameter counts alpha = 2 + moments times (itself, gradient, moments: 4
    for Adam, 3 with momentum, 2 for plain SGD), another one once; a tensor counts twice if a
    gradient comes back, a result of the model always; the stash besides tensors counts once.
    Without `published_memory`: the minimum of the evaluator's count.
    """
    if not problem.published_memory:
        return least_bytes(problem)
    alpha = 2 + problem.moments
    kept = Counter[tuple[int, ...]]()
    for i in range(problem.num_operators):
        trained = int(problem.trainable_bytes[i])
        frozen = int(problem.parameter_bytes[i]) - trained
        made = 2 * int(problem.result_bytes[i]) + int(problem.private_bytes[i])
        kept[i,] += alpha * trained + frozen + made
    for shared in (*problem.shared_parameters, *problem.inputs):
        kept[shared.operators] += shared.bytes * (alpha if shared.trainable else 1)
    for tensor in problem.tensors:
        touching = tuple(sorted({tensor.producer, *tensor.consumers}))
        kept[touching] += tensor.bytes * (2 if tensor.gradient else 1)
    return kept


def edge_bytes(problem: PlacementProblem) -> Mapping[tuple[int, int], int]:
    """The bytes that each operator sends to each of its readers."""
    edges = Counter[tuple[int, int]]()
    for tensor in problem.tensors:
        for j in tensor.consumers:
            edges[tensor.producer, j] += tensor.bytes
    return edges


def coplaced(problem: PlacementProblem, min_groups: int) -> tuple[tuple[int, ...], ...]:
    """The groups, by their first operators: each operator is in one, and each group of more than
    one operator fits the smallest device.

    Args:
        min_groups: the walk ends when fewer groups are left; 2 x devices in the thesis.
    """
    kept, room = kept_bytes(problem), int(problem.capacity_bytes.min())
    entries: list[set[tuple[int, ...]]] = [set() for _ in range(problem.num_operators)]
    for operators in kept:
        for i in operators:
            entries[i].add(operators)
    leader = list(range(problem.num_operators))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    left = problem.num_operators
    heaviest_first = sorted(edge_bytes(problem).items(), key=lambda edge: (-edge[1], edge[0]))
    for (i, j), _ in heaviest_first:
        if left < min_groups:
            break
        a, b = sorted((find(i), find(j)))
        if a == b:
            continue
        # Entries that both groups need are held once, so it is the union of keys that is summed.
        union = entries[a] | entries[b]
        if sum(kept[operators] for operators in union) <= room:
            leader[b], entries[a], left = a, union, left - 1
    groups: dict[int, list[int]] = {}
    for i in range(problem.num_operators):
        groups.setdefault(find(i), []).append(i)
    return tuple(tuple(group) for group in groups.values())
