"""Few enough downsets, for graphs that are not merged: far operators wait for each other.

In one topological order, every operator waits for all that stand more than a window of places
before it. A window of 0 leaves that order alone, a wide one leaves everything.
"""

from collections.abc import Sequence

from planner.order import Downsets, count_downsets, downsets, downsets_within


def windowed(
    predecessors: Sequence[Sequence[int]], order: Sequence[int], limit: int | None
) -> tuple[Downsets, bool]:
    """The downsets of a DAG, or some of them if there are too many: those that the widest window
    leaves within the limit.

    Args:
        predecessors: per node, those that feed it.
        order: the nodes in topological order.
        limit: the most downsets, at least one more than nodes to be of use; None for no limit.

    Returns:
        The downsets, and whether they are all.
    """
    if limit is None:
        return downsets(predecessors), True
    found = downsets_within(predecessors, limit)
    if found is not None:
        return found, True
    fits, too_wide = 0, len(order)
    while too_wide - fits > 1:
        middle = (fits + too_wide) // 2
        if count_downsets(_waiting(predecessors, order, middle), limit) <= limit:
            fits = middle
        else:
            too_wide = middle
    return downsets(_waiting(predecessors, order, fits)), False


def _waiting(
    predecessors: Sequence[Sequence[int]], order: Sequence[int], window: int
) -> list[list[int]]:
    """Per node, those that feed it and those to wait for; of the latter the last ones, which wait
    for the others themselves.

    >>> _waiting([[], [], [], []], [0, 1, 2, 3], 1)
    [[], [], [0], [0, 1]]
    """
    found: list[list[int]] = [[] for _ in order]
    for i, v in enumerate(order):
        before = order[max(0, i - 2 * window - 1) : max(0, i - window)]
        found[v] = sorted({*predecessors[v], *before})
    return found
