"""The downsets that a search under a foreign cost model looks at: all, or those of a window."""

from collections.abc import Callable, Sequence

from planner.solvers.graphs.downsets import Downsets, downsets_within, windowed

# The first enumeration gives up at FIRST_DOWNSETS, each other one at MORE_DOWNSETS times the last
# number: only if PATIENCE times the last one's time is left, because to choose a window takes about
# a dozen enumerations.
FIRST_DOWNSETS, MORE_DOWNSETS, PATIENCE = 4_000, 4, 20


def enumerated(
    feeds: Sequence[Sequence[int]],
    order: Sequence[int],
    limit: int | None,
    left_s: Callable[[], float],
) -> tuple[Downsets, bool, bool]:
    """The downsets to search; whether they are all; and whether there was time for as many as asked
    for.

    Args:
        feeds: per item, those that feed it.
        order: of the items, topological.
        limit: the most to look at; None for no limit.
        left_s: tells the seconds that are left.
    """
    size, fewer = FIRST_DOWNSETS, len(order) + 1
    while True:
        size = size if limit is None else min(size, limit)
        before_s = left_s()
        subsets = downsets_within(feeds, size)
        if subsets is not None:
            return subsets, True, True
        if left_s() < PATIENCE * (before_s - left_s()):
            return *windowed(feeds, order, fewer), False
        if size == limit:
            return *windowed(feeds, order, size), True
        fewer, size = size, MORE_DOWNSETS * size
