"""Placements of single operators, found by annealing and ranked by the simulator.

    (1) the start: of the known placements, the one that the simulator finds fastest; one that
        exceeds the memory may be a start, too, and is mended first                `refined`
    (2) runs of annealing (`kernels.py`) over single operators, each with its own seed. Besides
        operators and their neighbours, blocks of 2 to `BLOCKS[-1]` operators that exchange many
        bytes move together. Each device runs its backwards in the reverse order of its
        forwards, as the action lists do                                           `_run`
    (3) the simulator (`judge`, given by the caller) ranks the answers. The first run and every
        second one after it begin anew from the first start, hot; the others go on from the best by
        the simulator, warm, with its model. Every second run anew leaves shared links out:
        transfers that halve each other's rates may end sooner than those that wait, if one of them
        is large and not urgent
    (4) an answer that the evaluator finds too large makes the memory of the model smaller
        (`tighter`) for the runs after it; after one that fits, half of the last step is taken back

Limits are of work: of operators timed. So the search repeats itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.solvers.annealing import Annealing
from planner.solvers.engines.watch import SearchWatch
from planner.solvers.netsplit.kernels import state_of
from planner.solvers.netsplit.model import NetSplitInstance, canonical, instance_of, orders_of
from planner.solvers.netsplit.moves import anneal, restore
from planner.solvers.netsplit.search import Blocks, arrays_of, without_links
from planner.solvers.netsplit.search_arrays import ModelArrays
from planner.solvers.placement.coplacement import coplaced
from planner.solvers.placement.problem import Placement, PlacementProblem
from planner.solvers.placement.timetable import timetable
from planner.support.arrays import Ints

BLOCKS = (2, 4, 8, 16)
"""Largest numbers of operators in blocks, a level each."""

TIMED_PER_S = 6_000_000
"""Work per second of the limit, in operators timed (`SearchState.timed`); measured on a core at 2.9
GHz shared with many other processes 13,000,000 to 14,000,000 for 500 and 1,000 operators on 3
devices, 5,600,000 for 100 on 4."""

RUN_MOVES = 300
"""Moves of a run per operator, if there is time for several runs."""

MIN_RUNS, MAX_RUNS = 3, 8
"""Least and largest number of runs; more time makes runs longer."""

MIN_MOVES = 10
"""Moves per operator below which there is no run."""

MAX_RUN_MOVES = 10_000
"""Largest number of moves of a run per operator."""

PIECES = 50
"""Pieces of a run about; the temperature of each follows from the work before it, and the watch is
looked at between them."""

HOT, WARM, COLD = 0.003, 0.001, 0.00003
"""Temperatures at the start of a run anew, at that of one that goes on, and at the end of each, as
shares of the latency."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement.

    Attributes:
        device_of: device of each operator.
        order: the operators as their forwards start; None for that of the list schedule.
    """

    device_of: Placement
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """The simulator's word on a candidate.

    Attributes:
        value_s: the objective, in s; inf if it does not fit.
        tighter: the placement problem with less memory, if it does not fit.
    """

    value_s: float
    tighter: PlacementProblem | None = None


@dataclass(frozen=True, slots=True)
class Refined:
    """What the runs found.

    Attributes:
        candidates: of all runs, the best by the judge first; whether any fits is its word.
        bound_s: no placement of single operators has less latency; None if there was no run.
        in_time: False where the brake or the user cut a run.
    """

    candidates: tuple[Candidate, ...] = ()
    bound_s: float | None = None
    in_time: bool = True


Judge = Callable[[PlacementProblem, Candidate], Judged]
"""Judges a candidate of a placement problem."""


def refined(
    problem: PlacementProblem,
    start: Candidate,
    limit_s: float,
    judge: Judge,
    watch: SearchWatch,
    seed: int,
) -> Refined:
    """Anneals from a known placement.

    Args:
        start: the best one known; it need not fit.
        limit_s: limit of work, in seconds of an ordinary core.
        watch: says whether to end, and is told of better placements.
        seed: seed of the first run.
    """
    num, work = problem.num_operators, int(TIMED_PER_S * limit_s)
    # A move costs about as much as timing all operators of a phase.
    if work < MIN_MOVES * num**2:
        return Refined()
    runs = max(MIN_RUNS, min(MAX_RUNS, work // (RUN_MOVES * num**2)))
    work = min(work // runs, MAX_RUN_MOVES * num**2)
    instance = instance_of(problem, [(i,) for i in range(num)])
    arrays = arrays_of(instance, blocks_of(problem))
    bound_s = max(0.0, int(arrays.least.sum()) * instance.tick_s - instance.lost_s)

    def over() -> bool:
        return watch.cut

    if over():
        return Refined(bound_s=bound_s, in_time=False)
    best, unfit = _Best(judge(problem, start).value_s, start), None
    found: list[tuple[float, Candidate]] = []
    too_much: Ints | None = None  # memory with which the last answer did not fit
    turn = 0
    for number in range(runs):
        run = _next_run(turn, start, best, unfit)
        model = without_links(arrays) if run.without_links else arrays
        new = _run(instance, model, run.start, work, (run.heat, COLD), seed + number, over)
        unfit = None
        if new is not None:
            judged = judge(problem, new)
            found.append((judged.value_s, new))
            if judged.value_s < best.value_s:
                best = _Best(judged.value_s, new, run.without_links)
                watch.see(best.value_s)
            if judged.tighter is not None:
                too_much, problem, unfit = problem.capacity_bytes, judged.tighter, new
            elif too_much is not None:
                between = (problem.capacity_bytes + too_much) // 2
                problem = replace(problem, capacity_bytes=between)
            arrays = arrays._replace(room=problem.capacity_bytes.copy())
        turn += unfit is None
        if over():
            break
    ranked = sorted(found, key=lambda one: one[0])
    return Refined(tuple(one for _, one in ranked), bound_s, not over())


@dataclass(frozen=True, slots=True)
class _Best:
    """The best candidate so far.

    Attributes:
        value_s: by the judge; inf if it does not fit.
        without_links: whether it was found without shared links.
    """

    value_s: float
    candidate: Candidate
    without_links: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """Where a run begins, how hot, and whether without shared links."""

    start: Candidate
    heat: float
    without_links: bool


def _next_run(turn: int, start: Candidate, best: _Best, unfit: Candidate | None) -> _Run:
    """Even turns begin anew, hot, every second of them without shared links; odd ones go on from
    the best, warm, with its model. After an answer that did not fit, the same turn again, hot: from
    that answer, to mend it, as long as none fits.
    """
    without_links = best.without_links if turn % 2 else turn % 4 == 2
    if unfit is not None:
        return _Run(start if math.isfinite(best.value_s) else unfit, HOT, without_links)
    if turn % 2:
        return _Run(best.candidate, WARM, without_links)
    return _Run(start, HOT, without_links)


def _run(
    instance: NetSplitInstance,
    model: ModelArrays,
    start: Candidate,
    work: int,
    heats: tuple[float, float],
    seed: int,
    over: Callable[[], bool],
) -> Candidate | None:
    """The best placement of a run that fits the memory of the model; None without one.

    Args:
        work: operators to time; the temperature falls with it.
    """
    order = start.order or _order(instance.problem, start.device_of)
    state = state_of(model, start.device_of, (order, order[::-1]))
    hot, cold = (share * float(state.ends.sum()) for share in heats)
    piece, number = work // PIECES, 0
    done, cost = 0, float(instance.problem.num_operators)
    while done < work and not (number and over()):
        moves = max(1, round(min(piece, work - done) / cost))
        first, last = (hot * (cold / hot) ** (x / work) for x in (done, min(done + piece, work)))
        begun = int(state.timed[0])
        anneal(model, state, Annealing(moves, first, last, seed * 1000 + number), True)
        # A move that finds nothing to move times nothing.
        spent = max(moves, int(state.timed[0]) - begun)
        done, number, cost = done + spent, number + 1, spent / moves
    if not restore(model, state):
        return None
    device_of = canonical(instance, state.where.tolist())
    return Candidate(device_of, tuple(state.orders[0].tolist()))


def _order(problem: PlacementProblem, device_of: Placement) -> tuple[int, ...]:
    """The operators as the list schedule of a placement starts their forwards."""
    times = timetable(problem, device_of)
    return orders_of(times.forward_start_s, times.backward_start_s)[0]


def blocks_of(problem: PlacementProblem) -> Blocks:
    """Sets of 2 to `BLOCKS[-1]` operators that exchange many bytes."""
    levels = (coplaced(problem, 1, most) for most in BLOCKS)
    blocks = (block for level in levels for block in level if len(block) > 1)
    return tuple(dict.fromkeys(blocks))
