"""Which groups of ranks are measured at once, and what their times say about other groups.

The lines along an axis of a mesh all run the same collective at the same time, and so do the
replicas of all stages, more or less. So groups that cover all ranks are measured together: what
they share, such as the cores of a host or its network card, is in their times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.artefacts.topology import CPU, CollectiveKind, CollectiveTable, Device
from planner.support.units import format_seconds, parse_seconds

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Collectives of one kind that several groups of ranks ran at once.

    Attributes:
        groups: of equally many ranks, ascending; no rank is in two of them.
        sizes_bytes: of the largest buffer on each rank, ascending.
        times_s: of each size, a mean over ranks and repetitions.
        kind: of the collective.
    """

    groups: Groups
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE

    @property
    def num_ranks(self) -> int:
        """The size of each group."""
        return len(self.groups[0])


def groups_at_once(devices: Sequence[Device]) -> tuple[Groups, ...]:
    """The groups that are measured together: of powers of two ranks, and of all. Those of some size
    are the lines of a mesh along its inner axis, and then along its outer one, unless they are
    alike.

    Args:
        devices: of the ranks.

    >>> groups_at_once([Device(f"gpu{rank}", "A100", "ab"[rank // 2]) for rank in range(4)])
    (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),))
    >>> groups_at_once([Device(f"cpu{rank}", "cpu", "a") for rank in range(4)])
    (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    """
    count, found = len(devices), list[Groups]()
    for size in (2**k for k in range(1, count.bit_length()) if 2**k < count):
        num = count // size
        inner = tuple(tuple(range(first, first + size)) for first in range(0, num * size, size))
        outer = tuple(tuple(range(first, num * size, num)) for first in range(num))
        both = inner, outer
        alike = num == 1 or all(_like(group, devices) != group for one in both for group in one)
        found += (inner,) if alike else both
    return (*found, (tuple(range(count)),)) if count > 1 else ()


def _like(group: tuple[int, ...], devices: Sequence[Device]) -> tuple[int, ...]:
    """The ranks of which any so many are like a group: all processes of a host on its cores, which
    meet in its memory; and else the group alone, for GPUs have links of many kinds.
    """
    here = {devices[rank].host for rank in group}
    if len(here) > 1 or any(devices[rank].type != CPU for rank in group):
        return group
    return tuple(rank for rank, one in enumerate(devices) if one.host in here)


def tables_of(one: CollectiveTimes, devices: Sequence[Device]) -> Iterator[CollectiveTable]:
    """The tables of a topology that hold some measured times.

    Args:
        devices: of the ranks.
    """
    times = zip(one.sizes_bytes, (written_s(time_s) for time_s in one.times_s), strict=True)
    points = tuple(times)
    for some in dict.fromkeys(_like(group, devices) for group in one.groups):
        names = tuple(devices[rank].name for rank in some)
        yield CollectiveTable(names, one.num_ranks, points, one.kind)


def written_s(time_s: float) -> float:
    """A time of three digits, as it is written."""
    return parse_seconds(format_seconds(max(0.0, time_s)))
