"""Links in both directions, and the groups that pairs join."""

from collections.abc import Iterable

from planner.artefacts.topology import Link


def both_ways(
    a: str, b: str, bandwidth_bytes_per_s: float, latency_s: float, name: str
) -> tuple[Link, Link]:
    """A link from a to b, and the same one back."""
    figures = bandwidth_bytes_per_s, latency_s, name
    return Link(a, b, *figures), Link(b, a, *figures)


def components(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The connected components of some pairs, each ascending.

    >>> components([(3, 4), (0, 2), (2, 5)])
    [[0, 2, 5], [3, 4]]
    """
    joined: list[set[int]] = []
    for i, j in sorted(pairs):
        touched = [one for one in joined if i in one or j in one]
        joined = [one for one in joined if one not in touched]
        joined.append({i, j}.union(*touched))
    return sorted(sorted(one) for one in joined)
