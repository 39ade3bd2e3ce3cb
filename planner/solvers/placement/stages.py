"""A placement of single operators on devices -> a strategy.

A stage runs in one piece, so a placement is cut into segments: sets of operators of one device
whose graph has no cycle. There are two ways of cutting it:

    `segments`   the fewest segments: each takes all operators that its device can run before
                 another device must go on.
    `pieces`     one ends behind every operator that another device waits for, and before every one
                 that waits for another device, so that branches on different devices run side by
                 side also within a microbatch.

`strategies_of` makes strategies of both, their stages in the order in which a list schedule of one
forward pass starts them. `strategy_of` takes the one that is faster by the closed form.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

from planner.artefacts.graph import Graph, consumers, predecessors, producers, tensors_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, Strategy
from planner.costs.evaluate import closed_form_s, evaluate
from planner.costs.operators import operator_times, slowdowns
from planner.costs.transfers import transfer_s
from planner.schedules.orders import default_warmups
from planner.schedules.task_list import TaskList

MAX_DOWNSETS = 2_000
"""Downsets that `segments` reaches before it gives up the exact search."""

MAX_LOOKS = 1_000_000
"""Operators looked at by that search: graphs of more than 500 operators get fewer downsets."""

MAX_FIRSTS = 16
"""First devices that `segments` tries where it gives up the exact search."""

WORTH_MORE_STAGES = 0.01
"""A strategy with more stages than needed has to be faster by more than this share."""

Segment = tuple[int, tuple[int, ...]]
"""A device and its operators, ascending."""

_RunDevice = Callable[[int, int], int]
"""(downset as a bitmask, device) -> the downset after the device has run all that it can."""


def strategy_of(
    problem: Problem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> Strategy:
    """The first of `strategies_of` that fits in memory; the first of all if none does."""
    strategies = strategies_of(problem, device_of, order)
    fitting = (s for s in strategies if evaluate(problem, s).shortage is None)
    return next(fitting, strategies[0])


def strategies_of(
    problem: Problem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> tuple[Strategy, ...]:
    """One to three strategies of a placement: one with the fewest stages, and two with more stages
    that wait less for each other, ordered by forwards and by backwards.

    The best one by the closed form of the problem's objective comes first; the fewest stages win a
    near tie.

    Args:
        device_of: the device of each operator.
        order: the operators as a solver's schedule starts their forwards, a topological order;
            by default that of a list schedule.

    Raises:
        ValueError: if there is not one device for each operator.
    """
    graph = problem.profile.graph
    _check(graph, device_of)
    few = segments(graph, device_of)
    strategies = [_strategy(problem, [few[i] for i in _order(problem, few)])]
    each = [(p, (v,)) for v, p in enumerate(device_of)]
    by_forwards = _order(problem, each) if order is None else order
    for operators in (by_forwards, _order(problem, each, backward=True)):
        strategies.append(_strategy(problem, pieces(graph, device_of, operators)))

    def price_s(strategy: Strategy) -> float:
        many = len(strategy.stages) > len(few)
        return closed_form_s(problem, strategy) * (1 + WORTH_MORE_STAGES if many else 1)

    # Strategies with the same stages in another order differ little: the best of each is kept.
    distinct: dict[frozenset[tuple[str, ...]], Strategy] = {}
    for strategy in sorted(strategies, key=price_s):
        distinct.setdefault(frozenset(s.operators for s in strategy.stages), strategy)
    return tuple(distinct.values())


def _strategy(problem: Problem, parts: Sequence[Segment]) -> Strategy:
    """One stage per segment, in the order given, with the default warm-up depths."""
    operators = problem.profile.graph.operators
    depths = default_warmups(
        [1] * len(parts), problem.num_microbatches, schedule=problem.training.schedule,
        devices=[(device,) for device, _ in parts],
    )  # fmt: skip
    return Strategy(
        tuple(
            Stage.whole(
                tuple(operators[v].name for v in inside),
                (device,),
                depth,
                problem.training.recompute.is_everywhere,
            )
            for (device, inside), depth in zip(parts, depths, strict=True)
        ),
        problem.training.schedule,
        problem.num_microbatches,
        problem.training.vertical_sync,
    )


def _check(graph: Graph, device_of: Sequence[int]) -> None:
    if len(device_of) != len(graph.operators):
        raise ValueError(
            f"expected a device for each of {len(graph.operators)} operators, got {len(device_of)}"
        )


# ------------------------------------------------------------------------- as few as possible


def segments(graph: Graph, device_of: Sequence[int]) -> tuple[Segment, ...]:
    """Cuts a placement into the fewest segments, in a topological order of their graph.

    After a downset, a device's run is all that it can do without the others. A longer run never
    hurts: what could follow the shorter one can follow it as well. So some sequence of whole runs
    has the fewest segments. Breadth-first search over the downsets that runs reach finds it; if
    there are too many, the device with the longest run goes next, and the best first device counts.

    Args:
        device_of: the device of each operator.

    Returns:
        per segment, its device and operators, ascending.
    """
    _check(graph, device_of)
    feeds = [sum(1 << u for u in before) for before in predecessors(graph)]
    mine: dict[int, list[int]] = {device: [] for device in sorted(set(device_of))}
    for v, device in enumerate(device_of):
        mine[device].append(v)

    def run(done: int, device: int) -> int:
        for v in mine[device]:  # topological, so one pass suffices
            if not feeds[v] & ~done:
                done |= 1 << v
        return done

    everything = (1 << len(device_of)) - 1
    path = _shortest(everything, mine, run) or _by_longest_runs(everything, mine, feeds, run)
    cut, done = [], 0
    for device in path:
        after = run(done, device)
        cut.append((device, tuple(v for v in mine[device] if (after & ~done) >> v & 1)))
        done = after
    return tuple((device, inside) for device, inside in cut if inside)


def _shortest(everything: int, devices: Iterable[int], run: _RunDevice) -> tuple[int, ...] | None:
    """The devices of the fewest runs, in their order; None if it takes too long."""
    left = min(MAX_DOWNSETS, MAX_LOOKS // everything.bit_length())
    level: dict[int, tuple[int, ...]] = {0: ()}
    while everything not in level:
        after: dict[int, tuple[int, ...]] = {}
        for done, path in level.items():
            for device in devices:
                reached = run(done, device)
                if reached != done:
                    after.setdefault(reached, (*path, device))
                    left -= 1
        if left < 0:
            return None
        # A downset within another one of as many runs is dropped: whatever completes it completes
        # the larger one in as few runs.
        level = {
            done: path
            for done, path in after.items()
            if not any(done & ~other == 0 for other in after if other != done)
        }
    return level[everything]


def _by_longest_runs(
    everything: int, mine: Mapping[int, Sequence[int]], feeds: Sequence[int], run: _RunDevice
) -> tuple[int, ...]:
    """Devices by the longest run each time, after the best first one of those with long runs.

    Args:
        mine: the operators of each device, ascending.
        feeds: per operator, a bitmask of those that it waits for.
    """
    devices = tuple(mine)
    waits_for = [reduce(or_, (feeds[v] for v in mine[device]), 0) for device in devices]
    at_once = [run(0, device) for device in devices]
    longest = sorted(range(len(devices)), key=lambda k: -at_once[k].bit_count())
    paths = []
    for first in sorted(k for k in longest[:MAX_FIRSTS] if at_once[k]):
        # What each device would add to the downset: changed only by what it waits for.
        done = new = at_once[first]
        path, more = [first], list(at_once)
        more[first] = 0
        sizes = [one.bit_count() for one in more]
        while done != everything:
            for k, waited in enumerate(waits_for):
                if waited & new:
                    more[k] = run(done, devices[k]) & ~done
                    sizes[k] = more[k].bit_count()
            # Never an empty run: some operator that is left has all of its sources, and its device
            # can run.
            best = sizes.index(max(sizes))
            path.append(best)
            new, more[best], sizes[best] = more[best], 0, 0
            done |= new
        paths.append(path)
    return tuple(devices[k] for k in min(paths, key=len))


# ------------------------------------------------------------------ as independent as possible


def pieces(graph: Graph, device_of: Sequence[int], order: Sequence[int]) -> tuple[Segment, ...]:
    """Cuts a placement so that no operator waits for a tensor longer than its order asks, and no
    tensor waits to be sent.

    The operators of each device are taken in order. One that another device waits for is the last
    of its piece. One that waits for another device begins a piece, unless an operator before it on
    its device has waited for the same piece there or a later one. So every piece ends before the
    pieces begin that wait for it, and there is no cycle.

    Args:
        device_of: the device of each operator.
        order: the operators, topologically sorted.

    Returns:
        per piece, its device and operators, ascending; in the order of their first operators.
    """
    _check(graph, device_of)
    feeds = predecessors(graph)
    sends = {u for v, before in enumerate(feeds) for u in before if device_of[u] != device_of[v]}
    cut: list[tuple[int, list[int]]] = []
    open_piece: dict[int, int] = {}
    piece_of: dict[int, int] = {}
    # Per device, the latest piece of each other device that it has waited for.
    waited: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(lambda: -1))
    for v in order:
        device = device_of[v]
        for u in feeds[v]:
            other = device_of[u]
            # Pieces of a device are numbered in their order, so a piece up to the latest one waited
            # for has ended already.
            if other != device and piece_of[u] > waited[device][other]:
                waited[device][other] = piece_of[u]
                open_piece.pop(device, None)
        if device not in open_piece:
            open_piece[device] = len(cut)
            cut.append((device, []))
        piece_of[v] = open_piece[device]
        cut[piece_of[v]][1].append(v)
        # Its readers wait for the end of the piece, so nothing else may follow in it.
        if v in sends:
            del open_piece[device]
    return tuple((device, tuple(sorted(inside))) for device, inside in cut)


# ---------------------------------------------------------------------------------- the order


def _order(problem: Problem, parts: Sequence[Segment], *, backward: bool = False) -> list[int]:
    """The parts in the order in which one forward pass starts them.

    Of the parts of a device whose inputs are there, the one with the longest path to the end
    starts. A part sends all its outputs for a device in one transfer, as long as the longest of
    them, and the transfers of a pair of devices follow each other.

    Args:
        backward: take one backward pass instead, and return the reverse of its order.
    """
    tasks = TaskList()
    for (p, _), time_s in zip(parts, _times_s(problem, parts, backward=backward), strict=True):
        tasks.add(time_s, (p, p))
    waits = _waits(problem, parts, backward=backward)
    sent_s: dict[tuple[int, int], float] = defaultdict(float)
    for (a, b), time_s in waits.items():
        q = parts[b][0]
        sent_s[a, q] = max(sent_s[a, q], time_s)
    sent = {
        (a, q): tasks.add(time_s, (parts[a][0], q), fifo=True)
        for (a, q), time_s in sent_s.items()
        if parts[a][0] != q
    }
    for (a, _), transfer in sent.items():
        tasks.chain(a, transfer)
    for a, b in waits:
        tasks.chain(sent.get((a, parts[b][0]), a), b)
    longest_s = tasks.longest_s()
    times = tasks.times(lambda i: -longest_s[i])
    begun = [i for i in times.begun.tolist() if i < len(parts)]
    # What starts at one moment keeps its order where it waits for each other.
    order = sorted(begun, key=lambda i: (times.start_s[i], -longest_s[i]))
    return order[::-1] if backward else order


def _times_s(problem: Problem, parts: Sequence[Segment], *, backward: bool) -> list[float]:
    """The forward or backward of each part on its device, in s."""
    slow = slowdowns(problem, {device for device, _ in parts})
    by_device = {device: operator_times(problem, device) for device in slow}
    parts_s = []
    for device, inside in parts:
        times = by_device[device]
        each_s = times.backward_s if backward else times.forward_s
        parts_s.append(slow[device] * float(each_s[list(inside)].sum()))
    return parts_s


def _waits(
    problem: Problem, parts: Sequence[Segment], *, backward: bool
) -> dict[tuple[int, int], float]:
    """Pairs of parts (earlier, later), one of which waits for tensors or gradients of the other,
    with the time of the longest transfer between their devices in s.

    A backward also waits where no gradient comes back, for the latency of an empty transfer.
    """
    graph = problem.profile.graph
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    part_of = {v: i for i, (_, inside) in enumerate(parts) for v in inside}
    waits: dict[tuple[int, int], float] = {}
    for name, maker in producers(graph).items():
        sent = 0 if backward and not tensors[name].gradient else tensors[name].bytes
        for other in sorted({part_of[v] for v in read_by[name]} - {part_of[maker]}):
            a, b = (other, part_of[maker]) if backward else (part_of[maker], other)
            sent_s = transfer_s(problem.topology, parts[a][:1], parts[b][:1], sent)
            waits[a, b] = max(waits.get((a, b), 0.0), sent_s)
    return waits
