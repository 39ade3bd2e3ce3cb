"""NetSplit's model in OR-Tools CP-SAT (`netsplit_cpsat_model.py`): how it is searched.

First a schedule near the known one is looked for (`netsplit_search`), then the proof comes step by
step, because a model of half the size is solved much faster than one that is twice as large, and
because memory and messages that wait for each other seldom make the best schedule longer:

    step 1   forwards alone, with neither (7) nor (8): F is never less
    step 2   backwards alone, likewise: B is never less
    step 3   both together, likewise, each within what the other leaves: F + B is never less
    step 4   both with (8), from the best placement so far
    step 5   all of it, likewise; any of them ends when the best is as good as the bound so far

After a step that gives placements, the local search goes on from there. Without linear relaxations
and with one worker: on such models CP-SAT's clauses prove in seconds what takes its other
strategies minutes, and one worker repeats itself. Where there is more work than the devices can
share within the longest path, `netsplit_bounds` is the bound and hardly anything here improves it:
then steps 1 to 3 are left out, and more time goes into the local search. Everything is limited by
deterministic work.

Source: Perron and Didier, OR-Tools CP-SAT.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.problem import Status
from planner.solvers import heft
from planner.solvers.netsplit_bounds import Limits, limits_of
from planner.solvers.netsplit_cpsat_model import (
    add_apart,
    add_channels,
    add_crossings,
    phase_of,
    placement_of,
)
from planner.solvers.netsplit_cpsat_relaxed import makespan_of
from planner.solvers.netsplit_cpsat_run import Found, Run, call
from planner.solvers.netsplit_model import Answer, Instance, Known, known_of, overflow
from planner.solvers.netsplit_search import improved
from planner.solvers.netsplit_watch import INTERRUPTED, Watch, interruptible

log = logging.getLogger(__name__)

MOVES_PER_S = 100_000
"""Moves of the local search per second of the limit, for a graph with `MOVES_SIZE` operators and
edges."""

MOVES_SIZE = 300

SEARCH_SHARE, CROWDED_SHARE = 0.1, 0.5
"""Of the limit, for the local search before the proof; the second where work decides."""

POLISH_SHARE = 0.03
"""The same, after a step."""

STEP_SHARES = (0.2, 0.25, 0.4, 0.5, 1.0)
"""The most that each step takes of what the steps before it have left."""

NEAR_SHARE = 0.2
"""The same, to find a placement that fits."""

FEW_OPERATORS = 20
"""Up to so many, everything is proved whatever the strategy."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Which parts of the model are built.

    Attributes:
        phases: False for forwards, True for backwards.
        channels: whether there is (7); memory: whether there is (8).
    """

    phases: tuple[bool, ...]
    channels: bool = False
    memory: bool = False


_BOTH = (False, True)
_STEPS = (
    _Step((False,)),
    _Step((True,)),
    _Step(_BOTH),
    _Step(_BOTH, memory=True),
    _Step(_BOTH, memory=True, channels=True),
)


@dataclass(slots=True)
class _Search:
    """A search of the full model while it goes on.

    Attributes:
        known: the best schedule; guess: a placement that may not fit, for hints.
        limits: of forwards and of backwards, with what steps have proved of them.
        total: F + B is at least that.
    """

    instance: Instance
    run: Run
    known: Known
    guess: Known
    limits: list[Limits]
    total: int

    @property
    def crowded(self) -> bool:
        """Whether work decides about the length, of more than few operators."""
        many = self.instance.placing.num_operators > FEW_OPERATORS
        return many and any(limits.crowded for limits in self.limits)


def solve(
    instance: Instance,
    time_limit_s: float,
    start: Sequence[int] | None,
    *,
    seed: int = 0,
    gap: float = 0.0,
) -> Answer:
    """The best placement that is found from a known one.

    Args:
        time_limit_s: of the wall clock, and of deterministic work.
        start: a placement that fits, to start from and to beat; None if none is known.
        seed: for everything that draws lots.
        gap: (latency - bound) / bound at which the search may end.
    """
    watch = Watch(log, instance.tick_s, gap)
    run = Run.begun(watch, time_limit_s, seed)
    with interruptible(watch):
        search = _relaxed if instance.relaxed else _full
        answer = search(instance, run, start)
    if watch.interrupted:
        return replace(answer, reproducible=False, note=INTERRUPTED)
    return answer


# ------------------------------------------------------------------------------------ full model


def _full(instance: Instance, run: Run, start: Sequence[int] | None) -> Answer:
    """Local search, then the steps."""
    wish = heft.place(instance.placing)
    if start is None:
        start = _near(instance, wish, run)
    known = known_of(instance, start)
    limits = [limits_of(instance, backward=backward) for backward in _BOTH]
    total = sum(one.least for one in limits)
    guess = known if known.fits else known_of(instance, wish)
    search = _Search(instance, run, known, guess, limits, total)
    if known.fits:
        run.watch.see(known.latest, total)
        _improve(search, CROWDED_SHARE if search.crowded else SEARCH_SHARE)
    found = None
    for step, share in zip(_STEPS, STEP_SHARES, strict=True):
        if search.crowded and not step.memory:
            continue
        if run.watch.done:
            break
        found = _step(search, step, share)
        _learn(search, step, found)
    return _answer(search, found)


def _improve(search: _Search, share: float) -> None:
    """Looks for better schedules near the best, with a share of the whole limit."""
    placing = search.instance.placing
    size = placing.num_operators + sum(len(flow.consumers) for flow in placing.tensors)
    limit_s = search.run.draw(share)
    moves = int(limit_s * MOVES_PER_S * MOVES_SIZE / size)
    run = search.run
    search.known = improved(search.instance, search.known, moves, run.watch, run.over, run.seed)


def _learn(search: _Search, step: _Step, found: Found) -> None:
    """Takes in what a step found. Every step but the last is a relaxation, so its bound holds for
    all that follow, and its placement may be a good one.
    """
    if len(step.phases) == 1:
        backward = step.phases[0]
        least = max(search.limits[backward].least, found.bound)
        search.limits[backward] = replace(search.limits[backward], least=least)
        search.total = max(search.total, sum(limits.least for limits in search.limits))
    else:
        search.total = max(search.total, found.bound)
        if not step.channels and found.device_of is not None:
            _polish(search, found.device_of)
    search.run.watch.see(search.known.latest if search.known.fits else math.inf, search.total)


def _polish(search: _Search, device_of: Sequence[int]) -> None:
    """Looks for better schedules near a placement, if it fits."""
    search.guess = known_of(search.instance, device_of)
    if overflow(search.instance, device_of) > 0:
        return
    before, search.known = search.known, search.guess
    _improve(search, POLISH_SHARE)
    if before.fits and before.latest <= search.known.latest:
        search.known = before


def _step(search: _Search, step: _Step, share: float) -> Found:
    """Builds a step's model and solves it."""
    from ortools.sat.python import cp_model

    instance, most, limits = search.instance, search.known.latest, search.limits
    hint = search.known if search.known.fits else search.guess
    model = placement_of(instance, cp_model.CpModel(), hint.device_of, memory=step.memory)
    add_apart(model, hint.device_of)
    if step.channels:
        add_crossings(model, hint.device_of)
    phases = []
    for backward in step.phases:
        latest = most - limits[not backward].least
        phases.append(phase_of(model, limits[backward], hint, latest, backward=backward))
        if step.channels:
            add_channels(model, phases[-1], hint, latest)
    if len(phases) > 1:
        objective = phases[0].end + phases[1].end
        model.cp.add_linear_constraint(objective, search.total, most)
        elsewhere = 0
    else:
        objective, elsewhere = phases[0].end, limits[not step.phases[0]].least
    model.cp.minimize(objective)
    return call(
        model,
        search.run,
        share,
        elsewhere=elsewhere,
        starts=phases[0].start if step.channels else (),
        gap=search.run.watch.enough if step.channels else 0.0,
    )


def _near(instance: Instance, wish: Sequence[int], run: Run) -> tuple[int, ...] | None:
    """A placement that fits with as much work as can be where a given one has it; None if there is
    none or none was found.
    """
    from ortools.sat.python import cp_model

    known = known_of(instance, wish)
    model = placement_of(instance, cp_model.CpModel(), known.device_of, memory=True)
    work = (instance.forward + instance.backward).min(axis=1)
    model.cp.maximize(
        sum(
            (1 + int(work[list(group)].sum())) * model.x[g][known.device_of[group[0]]]
            for g, group in enumerate(instance.groups)
        )
    )
    return call(model, run, NEAR_SHARE).device_of


def _answer(search: _Search, found: Found | None) -> Answer:
    """The last step's schedule or the best that was known, whichever is shorter.

    Source: https://developers.google.com/optimization/cp/cp_solver (CpSolverStatus).
    """
    instance, known, run = search.instance, search.known, search.run
    bound_s = max(0.0, search.total * instance.tick_s - instance.lost_s)
    value, device_of = known.latest, known.device_of
    order = known.schedule.orders[0] if known.schedule else None
    if found is not None and found.device_of and found.starts and (not known.fits or found.value < known.latest):
        value, device_of = found.value, found.device_of
        order = tuple(sorted(range(len(found.starts)), key=lambda i: (found.starts[i], i)))
    elif not known.fits:
        if found is not None and found.status == "INFEASIBLE":
            return Answer(Status.INFEASIBLE, None, math.inf, None)
        return Answer(Status.UNKNOWN, None, math.inf, bound_s, reproducible=run.in_time)
    status = Status.OPTIMAL if value <= search.total else Status.FEASIBLE
    return Answer(
        status, device_of, value * instance.tick_s, bound_s, reproducible=run.in_time, order=order
    )


# ------------------------------------------------------------------------------- published model


def _relaxed(instance: Instance, run: Run, start: Sequence[int] | None) -> Answer:
    """The model as it was published, in one step."""
    from ortools.sat.python import cp_model

    known = known_of(instance, start)
    model = placement_of(instance, cp_model.CpModel(), known.device_of, memory=True)
    model.cp.minimize(makespan_of(model, known))
    found = call(model, run, 1.0, elsewhere=0)
    bound_s = max(0.0, found.bound * instance.tick_s - instance.lost_s)
    if found.device_of is not None and (not known.fits or found.value <= known.latest):
        value, device_of = found.value, found.device_of
    elif known.fits:
        value, device_of = known.latest, known.device_of
    elif found.status == "INFEASIBLE":
        return Answer(Status.INFEASIBLE, None, math.inf, None)
    else:
        return Answer(Status.UNKNOWN, None, math.inf, bound_s, reproducible=run.in_time)
    status = Status.OPTIMAL if value <= found.bound else Status.FEASIBLE
    return Answer(status, device_of, value * instance.tick_s, bound_s, reproducible=run.in_time)
