"""Co-placement: operators between which much is sent get one device together, before any model is
built.

Union-find over the edges between operators, by falling bytes, ties by the operators:

    (1) the two groups of an edge become one if what they keep together fits the smallest device
    (2) a union that does not fit is skipped, and the walk goes on with the next edge
    (3) it ends when fewer groups are left than asked for, or no edge is

A group says where its operators run, not when: they are scheduled one by one, because a group need
not be convex, and as one block it might have to wait for itself.

What a set of operators keeps follows the constraint model's memory. As published: parameters times
alpha, and every tensor that they touch with its gradient, once however many of them touch it.

Source: NetSplit, Nanjing 2023, co-placement.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from planner.solvers.placement.problem import Placing, least_bytes

Kept = Mapping[tuple[int, ...], int]


def kept_bytes(placing: Placing) -> Kept:
    """All bytes that devices keep, by the operators that need them: each entry is held once by
    every device with at least one of its operators.

    A parameter counts alpha = 2 + moments times if it is trained (itself, gradient, moments: 4 for
    Adam, 3 with momentum, 2 for plain SGD), else once; a tensor twice if a gradient comes back,
    and a result of the model twice; what autograd keeps besides tensors once. Where the problem is
    not to be `doubled`, what the evaluator counts at the least.
    """
    if not placing.doubled:
        return least_bytes(placing)
    alpha = 2 + placing.moments
    found = Counter[tuple[int, ...]]()
    for i in range(placing.num_operators):
        trained = int(placing.trainable_bytes[i])
        frozen = int(placing.parameter_bytes[i]) - trained
        made = 2 * int(placing.result_bytes[i]) + int(placing.private_bytes[i])
        found[i,] += alpha * trained + frozen + made
    for shared in (*placing.shared_parameters, *placing.inputs):
        found[shared.operators] += shared.bytes * (alpha if shared.trainable else 1)
    for flow in placing.tensors:
        touching = tuple(sorted({flow.producer, *flow.consumers}))
        found[touching] += flow.bytes * (2 if flow.gradient else 1)
    return found


def need_bytes(kept: Kept, operators: Collection[int]) -> int:
    """What a device with these operators keeps."""
    inside = set(operators)
    return sum(size for those, size in kept.items() if not inside.isdisjoint(those))


def edge_bytes(placing: Placing) -> Mapping[tuple[int, int], int]:
    """Bytes that each operator sends to each of those that read what it makes."""
    found = Counter[tuple[int, int]]()
    for flow in placing.tensors:
        for j in flow.consumers:
            found[flow.producer, j] += flow.bytes
    return found


def coplaced(placing: Placing, least: int) -> tuple[tuple[int, ...], ...]:
    """The groups, by their first operators; each operator is in one, and each group that has more
    than one operator fits the smallest device.

    Args:
        least: the walk ends when fewer groups than this are left; 2 x devices in the thesis.
    """
    kept, room = kept_bytes(placing), int(placing.capacity_bytes.min())
    entries: list[set[tuple[int, ...]]] = [set() for _ in range(placing.num_operators)]
    for those in kept:
        for i in those:
            entries[i].add(those)
    leader = list(range(placing.num_operators))

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    left = placing.num_operators
    heaviest_first = sorted(edge_bytes(placing).items(), key=lambda edge: (-edge[1], edge[0]))
    for (i, j), _ in heaviest_first:
        if left < least:
            break
        a, b = sorted((find(i), find(j)))
        if a == b:
            continue
        union = entries[a] | entries[b]
        if sum(kept[those] for those in union) <= room:
            leader[b], entries[a], left = a, union, left - 1
    groups: dict[int, list[int]] = {}
    for i in range(placing.num_operators):
        groups.setdefault(find(i), []).append(i)
    return tuple(tuple(group) for group in groups.values())
