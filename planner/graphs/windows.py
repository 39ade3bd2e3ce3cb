"""Few enough downsets without merging: far nodes wait for each other.

In one topological order, every node waits for all that stand more than a window of places before
it. A window of 0 leaves that order alone, a wide one leaves everything. Every downset that remains
is one of the DAG's.
"""

from collections.abc import Sequence

from planner.graphs.downsets import Downsets, count_downsets, downsets, downsets_within


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
    return downsets(waiting(predecessors, order, widest(predecessors, order, limit))), False


def widest(predecessors: Sequence[Sequence[int]], order: Sequence[int], limit: int) -> int:
    """The widest window that leaves at most `limit` downsets, of which there are more without; 0
    if none does. Arguments as `windowed`.
    """
    fits, too_wide = 0, 1
    while count_downsets(waiting(predecessors, order, too_wide), limit) <= limit:
        fits, too_wide = too_wide, 2 * too_wide
    while too_wide - fits > 1:
        middle = (fits + too_wide) // 2
        if count_downsets(waiting(predecessors, order, middle), limit) <= limit:
            fits = middle
        else:
            too_wide = middle
    return fits


def waiting(
    predecessors: Sequence[Sequence[int]], order: Sequence[int], window: int
) -> tuple[tuple[int, ...], ...]:
    """Per node, those that feed it and those to wait for; of the latter the last ones, which wait
    for the others themselves.

    >>> waiting([[], [], [], []], [0, 1, 2, 3], 1)
    ((), (), (0,), (0, 1))
    """
    found: list[tuple[int, ...]] = [()] * len(order)
    for i, v in enumerate(order):
        before = order[max(0, i - 2 * window - 1) : max(0, i - window)]
        found[v] = tuple(sorted({*predecessors[v], *before}))
    return tuple(found)
