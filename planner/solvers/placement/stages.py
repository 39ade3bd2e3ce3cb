"""A placement of single operators on devices -> a strategy.

A stage runs in one piece, so a placement is cut into segments: sets of operators of one device
between which the flow has no cycle. Ways of cutting it:

    `segments`   as few as there can be: each takes all that its device can run before another
                 device must go on.
    `pieces`     one ends behind every operator that another device waits for, and before every one
                 that waits for another device, so that branches on different devices run side by
                 side also within a microbatch.

`strategies_of` makes a strategy of both, each with its stages in the order in which a list schedule
of one forward pass starts them. `strategy_of` takes the one that is faster by the closed form.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from planner.costs.collectives import transfer_s
from planner.costs.compute import slowdowns, times_on
from planner.costs.evaluate import closed_form_s, evaluate
from planner.graph import Graph, consumers, predecessors, producers, tensors_by_name
from planner.problem import Problem, Recompute
from planner.schedules.orders import default_warmups
from planner.strategy import Stage, Strategy

# `segments` looks at no more downsets than this, and at fewer of graphs with more than 500
# operators.
MOST_DOWNSETS, MOST_LOOKS = 2_000, 1_000_000
# A strategy with more stages than needed has to be faster by more than this.
WORTH_MORE_STAGES = 0.01

Segment = tuple[int, tuple[int, ...]]
# (downset as a bitmask, device) -> the downset after the device's run.
_Run = Callable[[int, int], int]


def strategy_of(
    problem: Problem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> Strategy:
    """The first of `strategies_of` that fits in memory; the first of all if none does."""
    strategies = strategies_of(problem, device_of, order)
    fitting = (one for one in strategies if evaluate(problem, one).shortage is None)
    return next(fitting, strategies[0])


def strategies_of(
    problem: Problem, device_of: Sequence[int], order: Sequence[int] | None = None
) -> tuple[Strategy, ...]:
    """The strategies of a placement, one to three: with few stages, and with more that wait less
    for each other, by forwards and by backwards. The best one by the closed form of the problem's
    objective comes first, that with few stages where they are as good.

    Args:
        device_of: the device of each operator.
        order: the operators as a solver's schedule starts their forwards, a topological order;
            without it, by a list schedule.

    Raises:
        ValueError: if there is not one device for each operator.
    """
    graph = problem.profile.graph
    _check(graph, device_of)
    few = segments(graph, device_of)
    found = [_strategy(problem, [few[i] for i in _order(problem, few)])]
    each = [(p, (v,)) for v, p in enumerate(device_of)]
    there = _order(problem, each) if order is None else order
    for one in (there, _order(problem, each, backward=True)):
        found.append(_strategy(problem, pieces(graph, device_of, one)))

    def price_s(strategy: Strategy) -> float:
        many = len(strategy.stages) > len(few)
        return closed_form_s(problem, strategy) * (1 + WORTH_MORE_STAGES if many else 1)

    # One for each set of stages, whose orders differ little.
    distinct: dict[frozenset[tuple[str, ...]], Strategy] = {}
    for strategy in sorted(found, key=price_s):
        distinct.setdefault(frozenset(s.operators for s in strategy.stages), strategy)
    return tuple(distinct.values())


def _strategy(problem: Problem, parts: Sequence[Segment]) -> Strategy:
    """One stage per segment, in the order given, with the default warm-up depths."""
    options, operators = problem.options, problem.profile.graph.operators
    depths = default_warmups(
        [1] * len(parts), options.num_microbatches, schedule=options.schedule,
        devices=[(device,) for device, _ in parts],
    )  # fmt: skip
    return Strategy(
        tuple(
            Stage.whole(
                tuple(operators[v].name for v in inside),
                (device,),
                depth,
                options.recompute is Recompute.FULL,
            )
            for (device, inside), depth in zip(parts, depths, strict=True)
        ),
        options.schedule,
        options.num_microbatches,
    )


def _check(graph: Graph, device_of: Sequence[int]) -> None:
    if len(device_of) != len(graph.operators):
        raise ValueError(
            f"expected a device for each of {len(graph.operators)} operators, got {len(device_of)}"
        )


# ------------------------------------------------------------------------- as few as possible


def segments(graph: Graph, device_of: Sequence[int]) -> tuple[Segment, ...]:
    """Cuts a placement into few segments, in a topological order of their graph.

    After a downset, a device's run is all that it can do without the others. More done is never
    worse, so some sequence of runs has the fewest segments. Found is the shortest one, by breadth
    first search over the downsets that runs reach, of which those within another one are left out;
    if they are too many, the device with the longest run goes next, the best over the devices that
    may begin.

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
        for v in mine[device]:
            if not feeds[v] & ~done:
                done |= 1 << v
        return done

    everything = (1 << len(device_of)) - 1
    path = _shortest(everything, mine, run) or min(
        (_longest_runs(everything, mine, run, first) for first in mine), key=len
    )
    found, done = [], 0
    for device in path:
        after = run(done, device)
        found.append((device, tuple(v for v in mine[device] if (after & ~done) >> v & 1)))
        done = after
    return tuple((device, inside) for device, inside in found if inside)


def _shortest(everything: int, devices: Iterable[int], run: _Run) -> tuple[int, ...] | None:
    """The devices in the order of their runs, as few as can be; None if it takes too long."""
    left = min(MOST_DOWNSETS, MOST_LOOKS // everything.bit_length())
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
        level = {
            done: path
            for done, path in after.items()
            if not any(done & ~other == 0 for other in after if other != done)
        }
    return level[everything]


def _longest_runs(
    everything: int, devices: Iterable[int], run: _Run, first: int
) -> tuple[int, ...]:
    """The same by the longest run each time, after that of a given device."""
    path, done = [first], run(0, first)
    while done != everything:
        runs = {device: run(done, device) for device in devices}
        best = max(devices, key=lambda device: runs[device].bit_count())
        path.append(best)
        done = runs[best]
    return tuple(path)


# ------------------------------------------------------------------ as independent as possible


def pieces(graph: Graph, device_of: Sequence[int], order: Sequence[int]) -> tuple[Segment, ...]:
    """Cuts a placement so that no operator waits for a tensor longer than its order asks, nor does
    a tensor wait to be sent.

    The operators of each device are taken in order. One that others wait for elsewhere is the last
    of its piece. One that waits for another device begins a piece, unless an operator before it on
    its device has waited for the same piece there or a later one. So every piece ends before
    those begin that wait for it, and there is no cycle.

    Args:
        device_of: the device of each operator.
        order: the operators, topologically sorted.

    Returns:
        per piece, its device and operators, ascending; in the order of their first operators.
    """
    _check(graph, device_of)
    feeds = predecessors(graph)
    sends = {u for v, before in enumerate(feeds) for u in before if device_of[u] != device_of[v]}
    found: list[tuple[int, list[int]]] = []
    open_piece: dict[int, int] = {}
    piece_of: dict[int, int] = {}
    # Per device, the latest piece of each other device that it has waited for.
    waited: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(lambda: -1))
    for v in order:
        device = device_of[v]
        for u in feeds[v]:
            other = device_of[u]
            if other != device and piece_of[u] > waited[device][other]:
                waited[device][other] = piece_of[u]
                open_piece.pop(device, None)
        if device not in open_piece:
            open_piece[device] = len(found)
            found.append((device, []))
        piece_of[v] = open_piece[device]
        found[piece_of[v]][1].append(v)
        if v in sends:
            del open_piece[device]
    return tuple((device, tuple(sorted(inside))) for device, inside in found)


# ---------------------------------------------------------------------------------- the order


def _order(problem: Problem, parts: Sequence[Segment], *, backward: bool = False) -> list[int]:
    """The parts as one forward pass starts them: of those whose inputs have been made, the one that
    can start first; of equals, the one with the longest way to the end. What a part makes for a
    device goes there in one transfer, and the transfers of a pair of devices one after the other.

    Args:
        backward: the reverse of the order in which one backward pass starts them instead.
    """
    time_s = _times_s(problem, parts, backward=backward)
    edges = _edges_s(problem, parts, backward=backward)
    waits = [0] * len(parts)
    for after in edges:
        for b in after:
            waits[b] += 1
    ways = _ways_s(time_s, edges, list(waits))
    inputs_s, free_s = [0.0] * len(parts), dict.fromkeys((device for device, _ in parts), 0.0)
    # By pair of devices; on one device, when it has ended.
    sent_until_s: dict[tuple[int, int], float] = defaultdict(float)
    ready, order = [i for i, count in enumerate(waits) if count == 0], []
    while ready:
        start_s, _, i = min((max(inputs_s[i], free_s[parts[i][0]]), -ways[i], i) for i in ready)
        ready.remove(i)
        order.append(i)
        p = parts[i][0]
        end_s = free_s[p] = start_s + time_s[i]
        sending_s: dict[int, float] = defaultdict(float)
        for b, sent_s in edges[i].items():
            sending_s[parts[b][0]] = max(sending_s[parts[b][0]], sent_s)
        for q, sent_s in sending_s.items():
            sent_until_s[p, q] = max(sent_until_s[p, q], end_s) + sent_s
        for b in edges[i]:
            inputs_s[b] = max(inputs_s[b], sent_until_s[p, parts[b][0]])
            waits[b] -= 1
            if waits[b] == 0:
                ready.append(b)
    return order[::-1] if backward else order


def _times_s(problem: Problem, parts: Sequence[Segment], *, backward: bool) -> list[float]:
    """The forward or backward of each part on its device, in s."""
    slow = slowdowns(problem.topology, {device for device, _ in parts})
    by_device = {device: times_on(problem, device) for device in slow}
    found = []
    for device, inside in parts:
        times = by_device[device]
        each_s = times.backward_s if backward else times.forward_s
        found.append(slow[device] * float(each_s[list(inside)].sum()))
    return found


def _edges_s(
    problem: Problem, parts: Sequence[Segment], *, backward: bool
) -> list[dict[int, float]]:
    """Per part, those that wait for its tensors or gradients, and how long these take to get there,
    in s; backwards keep the order of the flow also where no gradient comes back.
    """
    graph = problem.profile.graph
    tensors, read_by = tensors_by_name(graph), consumers(graph)
    part_of = {v: i for i, (_, inside) in enumerate(parts) for v in inside}
    edges: list[dict[int, float]] = [{} for _ in parts]
    for name, maker in producers(graph).items():
        sent = 0 if backward and not tensors[name].gradient else tensors[name].bytes
        for other in {part_of[v] for v in read_by[name]} - {part_of[maker]}:
            a, b = (other, part_of[maker]) if backward else (part_of[maker], other)
            sent_s = transfer_s(problem.topology, parts[a][0], parts[b][0], sent)
            edges[a][b] = max(edges[a].get(b, 0.0), sent_s)
    return edges


def _ways_s(
    time_s: Sequence[float], edges: Sequence[Mapping[int, float]], waits: list[int]
) -> list[float]:
    """Per part, the longest way to the end, itself and transfers included, in s."""
    sequence = [i for i, count in enumerate(waits) if count == 0]
    for i in sequence:
        for b in edges[i]:
            waits[b] -= 1
            if waits[b] == 0:
                sequence.append(b)
    ways = [0.0] * len(time_s)
    for i in reversed(sequence):
        ways[i] = time_s[i] + max((s + ways[b] for b, s in edges[i].items()), default=0.0)
    return ways
