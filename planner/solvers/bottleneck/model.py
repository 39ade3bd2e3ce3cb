"""The placement with the smallest bottleneck, as data. The bottleneck is the work of the busiest
device, or of the busiest line between two devices, for one microbatch. It bounds the throughput of
a pipeline with enough microbatches in flight.

Legend: items v, operators that share a device; devices p, q, D of them; nets e, each a tensor with
the item home(e) that makes it and the items that read it. w_vp time of v on p; c_ep time that p
pays for a net if it has some but not all of its items; m_epq time of the net's transfer from p to
q. All in s.

    work of device p        sum of w_vp over its items
                          + sum of c_ep over the nets with some items on p and some elsewhere
    work of line (p, q)     sum of m_epq over the nets with home on p and a reader on q
                          + sum of m_epq over those with a gradient, home on q and a reader on p
    bottleneck              the largest work of a device or line

Two cost models are of this form. Where transfers overlap with computation
(`solvers/netsplit/bottleneck.py`), c is 0. Where they are part of a device's load
(`solvers/dnn_partitioning/placement.py`), m is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.clusters.routes import fastest_way_s
from planner.solvers.placement.coplacement import leader_of
from planner.support.arrays import Floats

SAME = 1e-9
"""Relative difference up to which two times are equal."""


@dataclass(frozen=True, slots=True)
class BottleneckNet:
    """A tensor that one item makes and others read.

    Attributes:
        home: the item that makes it.
        readers: the other items that read it, ascending, at least one.
        crossing_s: c, on devices that pay.
        bytes: size of its transfer; gradient: whether a gradient of this size comes back.
    """

    home: int
    readers: tuple[int, ...]
    crossing_s: float = 0.0
    bytes: int = 0
    gradient: bool = False

    @property
    def items(self) -> tuple[int, ...]:
        """All items of the net, the home first."""
        return (self.home, *self.readers)


@dataclass(frozen=True, slots=True, eq=False)
class BottleneckProblem:
    """The problem.

    Attributes:
        work_s: (items, D) w; inf where an item cannot run.
        nets: all nets.
        pays: (D,) whether a device pays c.
        latency_s: (D, D) latency of a transfer; seconds_per_byte: (D, D) inverse bandwidth.
        kept: (items, bytes): bytes that a device keeps if it has any of the items, ascending.
        room_bytes: (D,) memory; inf without a limit.
        alike: classes of devices any two of which may be swapped, each ascending.
        order: order of the devices, if stages are contiguous: no reader is on a device before its
            net's home. None allows any placement.
    """

    work_s: Floats
    nets: tuple[BottleneckNet, ...]
    pays: tuple[bool, ...]
    latency_s: Floats
    seconds_per_byte: Floats
    kept: tuple[tuple[tuple[int, ...], float], ...]
    room_bytes: Floats
    alike: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None = None

    @property
    def num_items(self) -> int:
        """The number of items."""
        return len(self.work_s)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.room_bytes)

    @property
    def has_lines(self) -> bool:
        """Whether any transfer takes any time."""
        return bool(self.latency_s.any() or self.seconds_per_byte.any())

    def transfer_s(self, net: BottleneckNet, p: int, q: int) -> float:
        """The time m of a net's transfer, in s."""
        return float(self.latency_s[p, q] + net.bytes * self.seconds_per_byte[p, q])


def line_place(num_devices: int, p: int, q: int) -> int:
    """The place of the line from p to q among the works, behind the D devices."""
    return num_devices + num_devices * p + q


def devices_of(num_devices: int, place: int) -> set[int]:
    """The device at a place of the works, or the two ends of the line there."""
    return {place} if place < num_devices else set(divmod(place - num_devices, num_devices))


def works_s(problem: BottleneckProblem, on: Sequence[int]) -> Floats:
    """(D + D D,) works of a placement in s, by their places: device p at p, the line from p to q at
    `line_place(D, p, q)`.

    Args:
        on: (items,) device of each.
    """
    num = problem.num_devices
    works = np.zeros(num + num * num)
    for v, p in enumerate(on):
        works[p] += problem.work_s[v, p]
    for net in problem.nets:
        home, touched = on[net.home], {on[v] for v in net.items}
        if len(touched) == 1:
            continue
        for p in touched:
            works[p] += net.crossing_s if problem.pays[p] else 0.0
            if p != home and problem.has_lines:
                works[line_place(num, home, p)] += problem.transfer_s(net, home, p)
                if net.gradient:
                    works[line_place(num, p, home)] += problem.transfer_s(net, p, home)
    return works


def bottleneck_s(problem: BottleneckProblem, on: Sequence[int]) -> float:
    """The bottleneck of a placement, in s; argument as `works_s`."""
    return float(works_s(problem, on).max())


def fits(problem: BottleneckProblem, on: Sequence[int]) -> bool:
    """Whether a placement is allowed: every item can run where it is, the memory suffices, and
    stages are contiguous if they have to be.
    """
    if any(np.isinf(problem.work_s[v, p]) for v, p in enumerate(on)):
        return False
    if (_used_bytes(problem, on) > problem.room_bytes).any():
        return False
    if problem.order is None:
        return True
    place = {p: k for k, p in enumerate(problem.order)}
    return all(place[on[net.home]] <= place[on[v]] for net in problem.nets for v in net.readers)


def _used_bytes(problem: BottleneckProblem, on: Sequence[int]) -> Floats:
    """(D,) bytes that devices keep."""
    used = np.zeros(problem.num_devices)
    for items, size in problem.kept:
        used[list({on[v] for v in items})] += size
    return used


def simple_bound_s(problem: BottleneckProblem) -> float:
    """A bottleneck that no placement beats, in s, without a search.

    It is the larger of two: the heaviest item where it is fastest; and all work, shared as if items
    could be split. For the second, T >= sum_v w_vp over the items of every device p. Summed with
    any weights y_p >= 0,

        T >= sum_v min_p y_p w_vp / sum_p y_p;   here y_p = 1 / sum_v w_vp

    which is exact if devices differ by a factor.
    """
    # Any y >= 0 is feasible for the dual of the program with split items, in which an item costs
    # min_p y_p w_vp. Where devices differ by a factor, w_vp = w_v / c_p, this y counts a device by
    # its speed: y_p w_vp is the same on all devices, and the bound is the work over all speeds.
    work = problem.work_s
    runs = np.isfinite(work)
    totals = np.where(runs, work, 0.0).sum(axis=0)
    speed = np.divide(1.0, totals, out=np.ones_like(totals), where=totals > 0)
    if not problem.num_items or not runs.any(axis=1).all():
        return 0.0
    shared = float((work * speed).min(axis=1).sum() / speed.sum())
    return max(shared, float(work.min(axis=1).max()))


# -------------------------------------------------------------------------------- reduction


def contract(
    problem: BottleneckProblem, limit_s: float
) -> tuple[BottleneckProblem, tuple[int, ...]]:
    """The problem with items merged that share a device in every placement with a bottleneck of at
    most `limit_s`, and the new item of each old one. No such placement is lost.

    A net's items are merged if cutting it alone makes the bottleneck larger than that. Merged items
    are heavier, so more nets may follow: until none does.
    """
    into = tuple(range(problem.num_items))
    while True:
        leaders = _leaders(problem, limit_s)
        rank = {v: k for k, v in enumerate(sorted(set(leaders)))}
        if len(rank) == problem.num_items:
            return problem, into
        step = [rank[v] for v in leaders]
        problem, into = _merged(problem, step), tuple(step[v] for v in into)


def _leaders(problem: BottleneckProblem, limit_s: float) -> list[int]:
    """Per item, the lowest of those that it is merged with."""
    sizes = np.array([net.bytes for net in problem.nets], dtype=np.int64)
    sent_s = fastest_way_s(problem.latency_s, problem.seconds_per_byte, sizes)
    leader = list(range(problem.num_items))
    for net, transfer_s in zip(problem.nets, sent_s.tolist(), strict=True):
        if _cut_s(problem, net, transfer_s) > limit_s:
            lowest = min(leader_of(leader, v) for v in net.items)
            for v in net.items:
                leader[leader_of(leader, v)] = lowest
    return [leader_of(leader, v) for v in range(problem.num_items)]


def _cut_s(problem: BottleneckProblem, net: BottleneckNet, transfer_s: float) -> float:
    """A bottleneck that no placement beats, in s, if it cuts a net.

    Args:
        transfer_s: the net's transfer over the fastest way.
    """
    if problem.num_devices < 2:
        return float("inf")
    costs = np.where(problem.pays, net.crossing_s, 0.0)
    # The device of each item pays for the cut; of any two devices, one pays the second least.
    least = float((problem.work_s[list(net.items)] + costs).min(axis=1).max())
    least = max(least, float(np.sort(costs)[1]))
    return max(least, transfer_s) if problem.has_lines else least


def _merged(problem: BottleneckProblem, into: Sequence[int]) -> BottleneckProblem:
    """The problem of merged items. Without lines and order only the items of a net count, so nets
    of the same items become one.
    """
    work = np.zeros((max(into) + 1, problem.num_devices))
    np.add.at(work, list(into), problem.work_s)
    nets: list[BottleneckNet] = []
    summed: dict[tuple[int, ...], float] = {}
    for net in problem.nets:
        home = into[net.home]
        readers = tuple(sorted({into[v] for v in net.readers} - {home}))
        if not readers:
            continue
        if problem.has_lines or problem.order is not None:
            nets.append(replace(net, home=home, readers=readers))
        else:
            items = tuple(sorted((home, *readers)))
            summed[items] = summed.get(items, 0.0) + net.crossing_s
    nets += [BottleneckNet(items[0], items[1:], cost) for items, cost in summed.items()]
    kept: dict[tuple[int, ...], float] = {}
    for items, size in problem.kept:
        where = tuple(sorted({into[v] for v in items}))
        kept[where] = kept.get(where, 0.0) + size
    return replace(problem, work_s=work, nets=tuple(nets), kept=tuple(kept.items()))
