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
    """All bytes that devices keep by NetSplit's count: as published, or without `published_memory`
    the minimum of the evaluator's count.
    """
    return published_bytes(problem) if problem.published_memory else least_bytes(problem)


def published_bytes(problem: PlacementProblem) -> KeptBytes:
    """The right-hand side of (5-18), which is all that it counts:

        alpha sum_i X_ip weight_i + 2 sum_j max{X_ip : i touches variable j} size_j

    alpha = 2 + moments: a parameter, its gradient and its moments (4 for Adam, 3 with momentum, 2
    for plain SGD), trained or not. Variables are the outputs of operators and the model's inputs,
    with or without a gradient. A parameter of several operators, which (5-18) does not have, is on
    each of their devices once.
    """
    alpha = 2 + problem.moments
    kept = Counter[tuple[int, ...]]()
    for i in range(problem.num_operators):
        kept[i,] += alpha * int(problem.parameter_bytes[i]) + 2 * int(problem.result_bytes[i])
    for shared in problem.shared_parameters:
        kept[shared.operators] += alpha * shared.bytes
    for variable in problem.inputs:
        kept[variable.operators] += 2 * variable.bytes
    for tensor in problem.tensors:
        kept[tuple(sorted({tensor.producer, *tensor.consumers}))] += 2 * tensor.bytes
    return kept


def edge_bytes(problem: PlacementProblem) -> Mapping[tuple[int, int], int]:
    """The bytes that each operator sends to each of its readers."""
    edges = Counter[tuple[int, int]]()
    for tensor in problem.tensors:
        for j in tensor.consumers:
            edges[tensor.producer, j] += tensor.bytes
    return edges


def coplaced(
    problem: PlacementProblem, min_groups: int, most: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """The groups, by their first operators: each operator is in one, and each group of more than
    one operator fits the smallest device.

    Args:
        min_groups: the walk ends when fewer groups are left; 2 x devices in the thesis.
        most: largest number of operators in a group; None for any.
    """
    kept, room = kept_bytes(problem), int(problem.capacity_bytes.min())
    entries: list[set[tuple[int, ...]]] = [set() for _ in range(problem.num_operators)]
    for operators in kept:
        for i in operators:
            entries[i].add(operators)
    leader = list(range(problem.num_operators))
    left, size = problem.num_operators, [1] * problem.num_operators
    heaviest_first = sorted(edge_bytes(problem).items(), key=lambda edge: (-edge[1], edge[0]))
    for (i, j), _ in heaviest_first:
        if left < min_groups:
            break
        a, b = sorted((leader_of(leader, i), leader_of(leader, j)))
        if a == b or (most is not None and size[a] + size[b] > most):
            continue
        # Entries that both groups need are held once, so it is the union of keys that is summed.
        union = entries[a] | entries[b]
        if sum(kept[operators] for operators in union) <= room:
            leader[b], entries[a], left = a, union, left - 1
            size[a] += size[b]
    groups: dict[int, list[int]] = {}
    for i in range(problem.num_operators):
        groups.setdefault(leader_of(leader, i), []).append(i)
    return tuple(tuple(group) for group in groups.values())


def leader_of(leader: list[int], v: int) -> int:
    """The element that stands for the set of v in a union-find; shortens the way to it."""
    while leader[v] != v:
        leader[v] = leader[leader[v]]
        v = leader[v]
    return v
