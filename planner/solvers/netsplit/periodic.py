"""Placements for several microbatches: branches side by side within a microbatch and microbatches
in flight, searched together.

An iteration of M microbatches is as long as M - 1 periods and one microbatch there and back. The
smallest bottleneck (`bottleneck.py`) is the least period, the least latency is the time of one
microbatch, and neither knows of the other: the best period may need more microbatches in flight
than fit, or a way through the devices that is so long that M microbatches never pay for it. Here
the whole iteration is the objective:

    (1) operators in a row become units, so that the rest of the search is on few things  `units_of`
    (2) a list schedule of all forwards and backwards of the first microbatches, by the rule of the
        planner's action lists, gives the time of a placement; the others take a period each
                                                                            `periodic_kernels.py`
    (3) simulated annealing over placements, from each known one, with as many microbatches of a
        unit in flight as the window says; memory is what all of them keep               `improved`
    (4) a placement becomes stages, each with as many microbatches in flight as the schedule had of
        its units at most; the simulator says which of these plans is the best         `candidates`

The number of moves is limited, so the search repeats itself. It is a heuristic: no bound comes from
it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy, operator_indices
from planner.schedules.dry_run import dry_run
from planner.schedules.program import program
from planner.solvers.annealing import Annealing
from planner.solvers.netsplit import periodic_kernels as kernels
from planner.solvers.netsplit.periodic_kernels import PeriodicModel, Scratch, scratch_of
from planner.solvers.placement.held_bytes import held_bytes
from planner.solvers.placement.problem import (
    ConsumedTensor,
    Placement,
    PlacementProblem,
    feeds_of,
    links_of_pairs,
)
from planner.solvers.placement.stages import strategies_of
from planner.support.arrays import Ints, csr, transposed

UNITS = 160
"""A unit takes at most this part of the whole work, unless it is one operator."""

MOVES_PER_S = 2_500_000
"""Moves per second of the limit, times units and microbatches of the schedule; measured on 4
devices 5,500,000 to 6,800,000 on a core at 2.9 GHz."""

MIN_MOVES, MAX_MOVES = 100, 5_000
"""Least and largest number of moves of a placement per round of annealing."""

ROUNDS = 7
"""Rounds of annealing."""

SCHEDULED = 6
"""Microbatches of the schedule besides two for each device."""

TRIALS = 3
"""Known placements that are searched from, the best ones."""

MAX_COMPUTATIONS = 2_000
"""Stages times microbatches of a strategy."""

KEPT = 0.5
"""Share of the placements that are searched on after a round, the best ones."""

HEATS = (0.02, 0.005)
"""Temperatures at the starts of rounds, in turn, as shares of the iteration."""

COLD = 0.0003
"""Temperature at their ends."""


@dataclass(frozen=True, slots=True)
class Periodic:
    """A placement and its list schedule.

    Attributes:
        device_of: device of each operator.
        iteration_s: of the schedule.
        in_flight: per operator, most microbatches between its forward and backward.
    """

    device_of: Placement
    iteration_s: float
    in_flight: tuple[int, ...]


def units_of(problem: PlacementProblem, parts: int = UNITS) -> tuple[tuple[int, ...], ...]:
    """Operators that run in one piece, in topological order: those in a row of which each alone
    reads what the one before makes, as long as they are less than a part of the whole work.

    Args:
        parts: of the whole work.
    """
    feeds = feeds_of(problem)
    readers = [0] * problem.num_operators
    for before in feeds:
        for i in before:
            readers[i] += 1
    time_s = (problem.forward_s + problem.backward_s).mean(axis=1)
    most_s = float(time_s.sum()) / parts
    unit_of: list[int] = []
    units: list[list[int]] = []
    loads_s: list[float] = []
    for v, before in enumerate(feeds):
        u = unit_of[before[0]] if len(before) == 1 and readers[before[0]] == 1 else -1
        if u >= 0 and units[u][-1] == before[0] and loads_s[u] + time_s[v] <= most_s:
            units[u].append(v)
            loads_s[u] += float(time_s[v])
        else:
            u = len(units)
            units.append([v])
            loads_s.append(float(time_s[v]))
        unit_of.append(u)
    return tuple(map(tuple, units))


def model_of(
    problem: PlacementProblem,
    units: Sequence[Sequence[int]],
    num_microbatches: int,
    window: int,
) -> PeriodicModel:
    """The model of some units as arrays.

    Args:
        num_microbatches: M.
        window: most microbatches of a unit in flight.
    """
    rows, scheduled = [list(inside) for inside in units], _scheduled(problem, num_microbatches)
    crossing, shared = _crossing(problem, units), _shared(problem, units)
    makes, reads, near = _joined(crossing, len(units))
    copies, fixed, stash = _kept_bytes(problem)
    window = min(window, scheduled)
    each = (((u,), int((fixed[row] + window * stash[row]).sum())) for u, row in enumerate(rows))
    tied = ((tuple(where), copies * size) for where, size in shared)
    pairs = [(p, q) for p in range(problem.num_devices) for q in range(problem.num_devices)]
    return PeriodicModel(
        forward_s=np.array([problem.forward_s[row].sum(axis=0) for row in rows]),
        backward_s=np.array([problem.backward_s[row].sum(axis=0) for row in rows]),
        maker=np.array([home for home, _, _ in crossing], dtype=np.int64),
        gradient=np.array([tensor.gradient for *_, tensor in crossing], dtype=np.bool_),
        bytes=np.array([tensor.bytes for *_, tensor in crossing], dtype=np.int64),
        readers=csr(others for _, others, _ in crossing),
        makes=csr(makes),
        reads=csr(reads),
        near=csr(near),
        latency_s=problem.latency_s,
        seconds_per_byte=problem.seconds_per_byte,
        route=csr(links_of_pairs(problem).get(pair, ()) for pair in pairs),
        link_seconds_per_byte=np.array([one.seconds_per_byte for one in problem.shared]),
        exclusive=np.array([one.exclusive for one in problem.shared], dtype=np.bool_),
        held=held_bytes((*each, *tied), len(rows)),
        shared=csr(where for where, _ in shared),
        sum_bytes=np.array([size for _, size in shared], dtype=np.int64),
        room_bytes=problem.capacity_bytes,
        num_microbatches=scheduled,
        more=num_microbatches - scheduled,
        window=window,
    )


def _unit_of(units: Sequence[Sequence[int]]) -> dict[int, int]:
    """The unit of each operator."""
    return {v: u for u, inside in enumerate(units) for v in inside}


def _crossing(
    problem: PlacementProblem, units: Sequence[Sequence[int]]
) -> list[tuple[int, list[int], ConsumedTensor]]:
    """The tensors that other units read than the one that makes them: (maker, readers, tensor)."""
    unit_of, crossing = _unit_of(units), []
    for tensor in problem.tensors:
        home = unit_of[tensor.producer]
        others = sorted({unit_of[j] for j in tensor.consumers} - {home})
        if others:
            crossing.append((home, others, tensor))
    return crossing


def _joined(
    crossing: Sequence[tuple[int, Sequence[int], ConsumedTensor]], num_units: int
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """By unit the tensors that it makes, those that it reads, and the units at their other ends."""
    near: list[set[int]] = [set() for _ in range(num_units)]
    for home, others, _ in crossing:
        near[home].update(others)
        for u in others:
            near[u].add(home)
    makes = transposed([(home,) for home, _, _ in crossing], num_units)
    reads = transposed([others for _, others, _ in crossing], num_units)
    return makes, reads, [sorted(units) for units in near]


def _kept_bytes(problem: PlacementProblem) -> tuple[int, Ints, Ints]:
    """How many times a device holds a trained parameter, with its gradient and moments; and (N,)
    bytes that an operator keeps in any case, and for each microbatch in flight.
    """
    extra = 1 + problem.moments
    stash = problem.private_bytes.copy()
    for tensor in problem.tensors:
        if tensor.stashed and tensor.owns:
            stash[tensor.producer] += tensor.bytes
    return 1 + extra, problem.parameter_bytes + extra * problem.trainable_bytes, stash


def _shared(
    problem: PlacementProblem, units: Sequence[Sequence[int]]
) -> list[tuple[list[int], int]]:
    """Trained parameters of several operators: their units and bytes."""
    unit_of = _unit_of(units)
    return [
        (sorted({unit_of[i] for i in one.operators}), one.bytes)
        for one in problem.shared_parameters
        if one.trainable
    ]


def _scheduled(problem: PlacementProblem, num_microbatches: int) -> int:
    """Microbatches of the schedule."""
    return min(num_microbatches, SCHEDULED + 2 * problem.num_devices)


def improved(
    problem: PlacementProblem,
    starts: Iterable[Placement],
    num_microbatches: int,
    limit_s: float,
    over: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> tuple[Periodic, ...]:
    """The best placements found, best first: of all starts and windows at first, of fewer and fewer
    after each round.

    Args:
        starts: known placements; those that do not fit are left out.
        num_microbatches: M.
        limit_s: limit of work, in seconds of an ordinary core.
        over: says before each search of a round whether to end.
        seed: seed of the first round.
    """
    units = units_of(problem)
    trials = [
        trial
        for window in sorted({min(num_microbatches, w) for w in _windows(problem)}, reverse=True)
        for trial in _begun(model_of(problem, units, num_microbatches, window), units, starts)
    ]
    size = len(units) * _scheduled(problem, num_microbatches)
    # Of n placements there are 2 n searches, and as many rounds of one placement, or a few less.
    all_moves = MOVES_PER_S * limit_s / size
    trials = trials[: max(0, int(all_moves / MIN_MOVES - ROUNDS) // 2)]
    moves = min(int(all_moves / (2 * len(trials) + ROUNDS)), MAX_MOVES)
    found: dict[Placement, Periodic] = {}
    for number in range(ROUNDS):
        for trial in trials:
            if not over():
                hot_s, cold_s = HEATS[number % len(HEATS)] * trial.price_s, COLD * trial.price_s
                run = Annealing(moves, hot_s, cold_s, seed + number)
                trial.price_s = kernels.anneal(trial.model, trial.work, trial.where, run)
        for trial in trials:
            one = _periodic(trial, units)
            known = found.get(one.device_of)
            if known is None or one.iteration_s < known.iteration_s:
                found[one.device_of] = one
        trials.sort(key=lambda trial: trial.price_s)
        trials = trials[: max(1, int(KEPT * len(trials)))]
    return tuple(sorted(found.values(), key=lambda one: one.iteration_s))


@dataclass(slots=True, eq=False)
class _Trial:
    """A placement while it is searched.

    Attributes:
        model: with its window.
        work: arrays of the search.
        where: (U,) device of each unit.
        price_s: of the placement.
    """

    model: PeriodicModel
    work: Scratch
    where: Ints
    price_s: float


def _windows(problem: PlacementProblem) -> tuple[int, ...]:
    """Numbers of microbatches in flight that are tried: as many as a pipeline over all devices
    has, half as many, and some more.
    """
    devices = problem.num_devices
    return max(2, devices // 2), devices, devices + 2


def _begun(
    model: PeriodicModel, units: Sequence[Sequence[int]], starts: Iterable[Placement]
) -> Iterator[_Trial]:
    """The searches from the best of some placements that fit with as many microbatches in flight as
    the window says.
    """
    work, begun = scratch_of(model), {}
    for start in starts:
        where = np.array([start[inside[0]] for inside in units], dtype=np.int64)
        if kernels.over_bytes(model, work, where) == 0:
            price_s = kernels.price_s(model, work, where, np.inf)
            begun[tuple(where.tolist())] = _Trial(model, work, where, price_s)
    yield from sorted(begun.values(), key=lambda trial: trial.price_s)[:TRIALS]


def _periodic(trial: _Trial, units: Sequence[Sequence[int]]) -> Periodic:
    """The placement of a search, operator by operator."""
    price_s = kernels.price_s(trial.model, trial.work, trial.where, np.inf)
    in_flight = kernels.most_in_flight(trial.model, trial.work, trial.where)
    device_of, most = [0] * sum(map(len, units)), [0] * sum(map(len, units))
    for u, inside in enumerate(units):
        for v in inside:
            device_of[v], most[v] = int(trial.where[u]), int(in_flight[u])
    return Periodic(tuple(device_of), float(price_s), tuple(most))


def candidates(problem: Problem, one: Periodic) -> Iterator[Strategy]:
    """A placement as stages, with the default warm-ups and with those of its schedule; only those
    whose action lists are short enough to be made in a moment.
    """
    graph = problem.profile.graph
    index = operator_indices(graph)
    for strategy in strategies_of(problem, one.device_of):
        if len(strategy.stages) * strategy.num_microbatches > MAX_COMPUTATIONS:
            continue
        yield strategy
        deep, stages = 1, []
        for stage in reversed(strategy.stages):
            own = max(one.in_flight[index[name]] for name in stage.operators)
            deep = max(deep, min(own, strategy.num_microbatches))
            stages.append(replace(stage, warmup=deep))
        as_scheduled = replace(strategy, stages=tuple(reversed(stages)))
        if as_scheduled != strategy and dry_run(program(as_scheduled, graph)) is None:
            yield as_scheduled
