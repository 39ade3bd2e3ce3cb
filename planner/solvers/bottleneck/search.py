"""The search for the placement with the smallest bottleneck (`model.py`).

    (1) simulated annealing from the best known placement                   `_annealed`
    (2) items that no better placement parts are merged                     `contract`
    (3) neighbourhoods, solved exactly: the items of the busiest device (or of both ends of the
        busiest line) and of one other device are placed anew on these, until no neighbourhood
        helps                                                               `_improved`
    (4) the whole program, from the best placement: its bound, and often the proof   `_proved`

The bound always holds for the whole problem: (2) loses no better placement, and where the program
is too large, or has not got far, the bound that needs no search remains.

HiGHS does (3) and (4). Measured on published instances (dnn-partitioning, 32 to 177 items on 4 to 7
devices) against CP-SAT with two workers, on two busy cores: of the instances that either proves in
seconds, HiGHS needed 4 s for the hardest and CP-SAT 21 s; after 40 s on ResNet-50, HiGHS had a
placement 1.4 % from its bound, and CP-SAT none.
Moves, neighbourhoods and nodes are counted, so that answers repeat.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.problem import Status
from planner.solvers.bottleneck.kernels import BottleneckArrays, anneal
from planner.solvers.bottleneck.model import (
    SAME,
    BottleneckProblem,
    bottleneck_s,
    contract,
    devices_of,
    fits,
    simple_bound_s,
    works_s,
)
from planner.solvers.bottleneck.program import (
    BottleneckProgram,
    canonical,
    neighbourhood,
    program_of,
)
from planner.solvers.engines.engine import Engine
from planner.solvers.engines.mip import (
    GAP,
    Answer,
    EngineUnavailableError,
    Mip,
    MipLimits,
    Terms,
    gurobi,
    highs,
)
from planner.solvers.placement.held_bytes import held_bytes
from planner.support.arrays import csr, transposed
from planner.support.brake import Brake, braked

log = logging.getLogger(__name__)

HEATS = (0.001, 0.003, 0.01)
"""First temperatures of the annealing runs, each from the best placement so far."""

MOVES_PER_S = 15_000
"""Moves of each annealing run per second of the limit; a move takes 0.4 to 0.7 microseconds."""

CUT_SHARE = 1e-3
"""Cost of a cut net in annealing, as a share of the bound, where transfers overlap with computation
and stages need not be contiguous: there a cut looks free, but adds a stage."""

ROUNDS_PER_S = 1.0
"""Neighbourhoods per second of the limit; most take less than half of one."""

ROUND_NODES, ROUND_GAP = 500, 1e-4
"""Limits of a neighbourhood's search."""

NODE_ENTRIES_PER_S = 200_000
"""Nodes of the whole program's search times its size, per second of the limit."""

MAX_ENTRIES = 300_000
"""Coefficients of the largest program that is built: a larger one takes too long to start."""
SOLVED_PER_S, FEW_ENTRIES = 20_000, 10_000
"""Coefficients of the largest whole program per second of the limit, and of a program that is
solved whatever that takes. No limit of nodes holds at the root, where 9,000 took 0.1 s, 47,000 2 s
and 66,000 8 s, measured on a core at 2.9 GHz shared with others."""
BUILT_PER_S = 30_000
"""Coefficients that a program may have per second of the limit where no placement is known."""


@dataclass(frozen=True, slots=True)
class BottleneckAnswer:
    """The answer of the search.

    Attributes:
        status: status among all placements; optimal to `GAP`.
        on: (items,) device of each; None if the status is infeasible or unknown.
        bound_s: no placement has a smaller bottleneck; inf if there is none.
        reproducible: False where the brake cut the search.
        note: a sentence for the user, such as the engine that could not be used.
    """

    status: Status
    on: tuple[int, ...] | None
    bound_s: float
    reproducible: bool = True
    note: str = ""


class _BottleneckBudget:
    """The limits of one search, and whether the brake or a licence has changed them."""

    def __init__(self, time_limit_s: float, seed: int, engine: Engine | None, brake: Brake) -> None:
        self.limit_s, self.seed, self.engine = time_limit_s, seed, engine
        self.brake, self.note = brake, ""

    def solve(self, mip: Mip, limits: MipLimits, hint: Terms) -> Answer:
        """The answer of the chosen engine, or of HiGHS if gurobi cannot be used."""
        if self.engine is Engine.GUROBI:
            try:
                return gurobi(mip, limits, hint, self.brake)
            except EngineUnavailableError as error:
                if not self.note:
                    self.note = f"{error}, so HiGHS solved it"
                    log.warning("%s", self.note)
        return highs(mip, limits, hint, self.brake)


def solve(
    problem: BottleneckProblem,
    starts: Sequence[Sequence[int]],
    time_limit_s: float,
    *,
    seed: int = 0,
    engine: Engine | None = None,
    brake: Brake | None = None,
) -> BottleneckAnswer:
    """The best placement found, with a bound.

    Args:
        starts: known placements, (items,) devices; those that do not fit are left out.
        time_limit_s: limit of work, in seconds of an ordinary core.
        engine: gurobi, or else HiGHS.
        brake: of the search that this is a part of; None where it is the whole.
    """
    with braked(time_limit_s) as own:
        budget = _BottleneckBudget(time_limit_s, seed, engine, brake or own)
        answer = _solved(problem, starts, budget)
    return replace(answer, reproducible=not budget.brake.cut, note=budget.note)


def _solved(
    problem: BottleneckProblem, starts: Sequence[Sequence[int]], budget: _BottleneckBudget
) -> BottleneckAnswer:
    if not problem.num_items:
        return BottleneckAnswer(Status.OPTIMAL, (), 0.0)
    if not np.isfinite(problem.work_s).any(axis=1).all():
        return BottleneckAnswer(Status.INFEASIBLE, None, math.inf)
    known = [tuple(on) for on in starts if fits(problem, on)]
    bound_s = simple_bound_s(problem)
    if not known:
        first = _proved(problem, None, budget)
        if first.on is None or first.status is Status.OPTIMAL:
            return first
        known, bound_s = [first.on], max(bound_s, first.bound_s)
    best = min(known, key=lambda on: bottleneck_s(problem, on))
    best = _improved(problem, _annealed(problem, best, budget), budget)
    if bottleneck_s(problem, best) <= bound_s * (1 + GAP):
        return BottleneckAnswer(Status.OPTIMAL, best, bound_s)
    answer = _proved(problem, best, budget)
    return replace(answer, bound_s=max(bound_s, answer.bound_s))


# ---------------------------------------------------------------------------------- annealing


def _annealed(
    problem: BottleneckProblem, on: tuple[int, ...], budget: _BottleneckBudget
) -> tuple[int, ...]:
    """(1)."""
    costs, moves = _costs(problem), max(1, round(MOVES_PER_S * budget.limit_s))
    for k, heat in enumerate(HEATS):
        best, _ = anneal(costs, np.array(on), budget.seed + k, moves, heat)
        on = min(on, tuple(best.tolist()), key=lambda placement: bottleneck_s(problem, placement))
    return on


def _costs(problem: BottleneckProblem) -> BottleneckArrays:
    """The problem as arrays."""
    count = problem.num_items
    nets = [net.items for net in problem.nets]
    crossing = np.array([net.crossing_s for net in problem.nets], dtype=np.float64)
    order = problem.order or ()
    return BottleneckArrays(
        work=np.ascontiguousarray(problem.work_s),
        items=csr(nets),
        nets=csr(transposed(nets, count)),
        crossing=crossing[:, None] * np.array(problem.pays, dtype=np.float64),
        net_bytes=np.array([net.bytes for net in problem.nets], dtype=np.float64),
        gradient=np.array([net.gradient for net in problem.nets], dtype=np.int64),
        latency=np.ascontiguousarray(problem.latency_s),
        per_byte=np.ascontiguousarray(problem.seconds_per_byte),
        has_lines=problem.has_lines,
        cut=CUT_SHARE * simple_bound_s(problem) if _cuts_look_free(problem) else 0.0,
        held=held_bytes(problem.kept, count, whole=False),
        room=np.ascontiguousarray(problem.room_bytes, dtype=np.float64),
        position=np.argsort(order).astype(np.int64),
    )


def _cuts_look_free(problem: BottleneckProblem) -> bool:
    return problem.has_lines and problem.order is None


# ------------------------------------------------------------------------------ neighbourhoods


def _improved(
    problem: BottleneckProblem, on: tuple[int, ...], budget: _BottleneckBudget
) -> tuple[int, ...]:
    """(3), after (2)."""
    if problem.num_devices < 3:
        return on  # a neighbourhood would be the whole
    small, into = contract(problem, bottleneck_s(problem, on) * (1 + SAME))
    if _entries(small) > MAX_ENTRIES:
        return on
    here, model = _small(on, into), program_of(small, symmetric=False)
    rounds, helps = round(ROUNDS_PER_S * budget.limit_s), True
    while helps:
        helps = False
        for devices in _neighbourhoods(small, here):
            if rounds == 0 or budget.brake.over():
                break
            rounds -= 1
            new = _replaced(model, here, devices, budget)
            if _better(small, new, here, devices):
                here, helps = new, True
                break
    return tuple(here[v] for v in into)


def _small(on: Sequence[int], into: Sequence[int]) -> tuple[int, ...]:
    """A placement in terms of merged items, which it must not part."""
    device_of = dict(zip(into, on, strict=True))
    return tuple(device_of[v] for v in range(len(device_of)))


def _neighbourhoods(problem: BottleneckProblem, on: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sets of devices: those of the busiest work, alone if they are two, and with one other device;
    those with the least work first.
    """
    works, num = works_s(problem, on), problem.num_devices
    busiest = devices_of(num, int(works.argmax()))
    others = sorted(set(range(num)) - busiest, key=lambda p: (works[p], p))
    if len(busiest) == 2:
        yield tuple(sorted(busiest))
    for p in others:
        yield tuple(sorted({*busiest, p}))


def _replaced(
    model: BottleneckProgram, on: tuple[int, ...], devices: Sequence[int], budget: _BottleneckBudget
) -> tuple[int, ...]:
    """The best placement in which only the items on some devices move, between these."""
    limits = MipLimits(ROUND_NODES, budget.seed, ROUND_GAP)
    solved = budget.solve(neighbourhood(model, on, devices), limits, model.hint(on))
    if solved.values is None:
        return on
    new = model.placement(solved.values)
    return new if fits(model.problem, new) else on


def _better(
    problem: BottleneckProblem, new: Sequence[int], old: Sequence[int], devices: Sequence[int]
) -> bool:
    """Whether a placement is better: by its bottleneck, then by the bottleneck of the devices that
    changed, then by total work.
    """
    for a, b in zip(_heights(problem, new, devices), _heights(problem, old, devices), strict=True):
        if abs(a - b) > SAME * b:
            return a < b
    return False


def _heights(
    problem: BottleneckProblem, on: Sequence[int], devices: Sequence[int]
) -> tuple[float, float, float]:
    """The three times that `_better` compares, in s."""
    works, num = works_s(problem, on), problem.num_devices
    lines = works[num:].reshape(num, num)[list(devices)]
    top = max(works[list(devices)].max(), lines.max())
    return float(works.max()), float(top), float(works.sum())


# ---------------------------------------------------------------------------------- the whole


def _entries(problem: BottleneckProblem) -> int:
    """The number of coefficients of the program, about, before it is built."""
    num = problem.num_devices
    touching = sum(len(net.items) for net in problem.nets)
    lines = 5 * num * num * len(problem.nets) if problem.has_lines else 0
    return 3 * num * problem.num_items + 6 * num * touching + lines


def _proved(
    problem: BottleneckProblem, on: tuple[int, ...] | None, budget: _BottleneckBudget
) -> BottleneckAnswer:
    """(4), after (2): the whole program, from a placement if one is known."""
    bound_s = simple_bound_s(problem)
    limit_s = math.inf if on is None else bottleneck_s(problem, on) * (1 + SAME)
    small, into = contract(problem, limit_s)
    if _entries(small) > _most_entries(on is not None, budget.limit_s):
        return BottleneckAnswer(Status.UNKNOWN if on is None else Status.FEASIBLE, on, bound_s)
    model = program_of(small, symmetric=True)
    nodes = max(1, round(NODE_ENTRIES_PER_S * budget.limit_s / max(model.mip.size, 1)))
    hint = {} if on is None else _hint(model, on, into)
    solved = budget.solve(model.mip, MipLimits(nodes, budget.seed), hint)
    if on is None and solved.status is Status.INFEASIBLE:
        return BottleneckAnswer(Status.INFEASIBLE, None, math.inf)
    if solved.status is not Status.INFEASIBLE and math.isfinite(solved.bound):
        # Merging loses placements beyond the limit, so the bound holds only up to the limit.
        bound_s = max(bound_s, min(solved.bound * model.unit_s, limit_s / (1 + SAME)))
    known = [] if on is None else [on]
    if solved.values is not None:
        merged = model.placement(solved.values)
        known.append(tuple(merged[v] for v in into))
    known = [placement for placement in known if fits(problem, placement)]
    if not known:
        return BottleneckAnswer(Status.UNKNOWN, None, bound_s)
    best = min(known, key=lambda placement: bottleneck_s(problem, placement))
    optimal = bottleneck_s(problem, best) <= bound_s * (1 + 2 * GAP)
    status = Status.OPTIMAL if optimal else Status.FEASIBLE
    return BottleneckAnswer(status, best, bound_s)


def _most_entries(known: bool, limit_s: float) -> float:
    """The coefficients of the largest whole program that is solved. Without a known placement a
    larger one is worth the time, if there is time to build it.
    """
    if not known:
        return max(FEW_ENTRIES, BUILT_PER_S * limit_s)
    return min(MAX_ENTRIES, max(FEW_ENTRIES, SOLVED_PER_S * limit_s))


def _hint(model: BottleneckProgram, on: Sequence[int], into: Sequence[int]) -> dict[int, float]:
    """The values of a known placement, with the devices named as the program names them."""
    here = _small(on, into)
    return model.hint(canonical(model.problem, here) if model.problem.order is None else here)
