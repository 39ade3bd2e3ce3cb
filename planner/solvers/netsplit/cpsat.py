"""NetSplit's model in OR-Tools CP-SAT (`netsplit_cpsat_model.py`): how it is searched.

First a schedule near the known one is looked for (`netsplit_search`) and small parts of the graph
tell bounds (`netsplit_windows`), then the proof comes step by step, because a model of half the
size is solved much faster than one that is twice as large, and because messages that wait for each
other seldom make the best schedule longer:

    step 1   forwards alone, with neither (7) nor (8): F is never less
    step 2   backwards alone, likewise: B is never less
    step 3   both together with (8), each within what the other leaves: F + B is never less
    step 4   the same near the best schedule, for a better placement if step 3 found none
    step 5   all of it, but with the placement of the step before
    step 6   all of it

A step climbs: it asks for what is within 0.1 % of the least that is known, proves that there is no
such thing, asks for what is within the next 0.2 %, and so on; what it finds at last is the optimum.
Times are so tight then that each proof is short, and all of them together take a fraction of the
work of a single one from the best schedule down; where the limit ends a climb, all that is below is
proved. After steps 3 and 4 the local search goes on from what they found. The search ends when no
schedule is better than the best.

Without linear relaxations and with one worker: on such models CP-SAT's clauses prove in seconds
what takes its other strategies minutes, and one worker repeats itself. Where there is more work
than the devices can share within the longest path, hardly any step improves the bound: then steps
1 to 3 are left out and most of the limit goes into the local search. Everything is limited by
deterministic work.

Source: Perron and Didier, OR-Tools CP-SAT.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.problem import Status
from planner.solvers.engines.watch import INTERRUPTED, Watch, interruptible
from planner.solvers.netsplit.bounds import Joint, Limits, joint_of, limits_of
from planner.solvers.netsplit.cpsat_model import (
    Model,
    Phase,
    add_apart,
    add_channels,
    add_crossings,
    add_joint,
    keep,
    phase_of,
    placement_of,
)
from planner.solvers.netsplit.cpsat_relaxed import relaxed
from planner.solvers.netsplit.cpsat_run import (
    CROWDED_PER_S,
    DETERMINISTIC_PER_S,
    FEW_PER_S,
    Found,
    Run,
    call,
)
from planner.solvers.netsplit.model import Answer, Instance, Known, Schedule, known_of, overflow
from planner.solvers.netsplit.search import improved, timed
from planner.solvers.netsplit.windows import windowed
from planner.solvers.placement import heft
from planner.support.jit import compile_clock

log = logging.getLogger(__name__)

MOVES_PER_S = 200_000
"""Moves of the local search per second of the limit, for a graph with `MOVES_SIZE` operators and
edges."""

MOVES_SIZE = 300

SEARCH_SHARE, CROWDED_SHARE = 0.05, 0.6
"""Of the limit, for the local search before the proof; the second where work decides."""

WINDOWS_SHARE = 0.3
"""Of what is left, for the bounds by windows."""

POLISH_SHARE = 0.03
"""The same, after a step."""

NEAR_SHARES = (0.03, 0.3)
"""The most of what is left, to find a good placement that fits, and any if there is none yet."""

RISE = 0.001
"""A step looks so far above the least first, and then twice as far each time."""

STEEP = 3
"""It looks no further than before if so many times the work is more than there is left."""

FEW_OPERATORS = 20
"""Up to so many operators, everything is proved at once, whatever the strategy; up to so many
groups, the steps prove more than the local search finds, and windows tell nothing new."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Which parts of the model are built.

    Attributes:
        share: the most that it takes of what the steps before it have left.
        phases: False for forwards, True for backwards.
        channels: whether there is (7); memory: whether there is (8).
        kept: whether the placement is that of the step before.
        near: whether it looks near the best schedule for a better one instead of climbing.
    """

    share: float
    phases: tuple[bool, ...]
    channels: bool = False
    memory: bool = False
    kept: bool = False
    near: bool = False


_BOTH = (False, True)
_STEPS = (
    _Step(0.06, (False,)),
    _Step(0.06, (True,)),
    _Step(0.3, _BOTH, memory=True),
    _Step(0.65, _BOTH, memory=True, near=True),
    _Step(0.15, _BOTH, memory=True, channels=True, kept=True, near=True),
    _Step(1.0, _BOTH, memory=True, channels=True),
)


@dataclass(slots=True)
class _Search:
    """A search of the full model while it goes on.

    Attributes:
        known: the best schedule.
        limits: of forwards and of backwards, with what steps have proved of them.
        total: F + B is at least that.
        joint: what is known of both phases together.
        kept: the placement of a step without (7), if it fits.
        infeasible: whether nothing fits.
    """

    instance: Instance
    run: Run
    known: Known
    limits: list[Limits]
    total: int
    joint: Joint
    kept: tuple[int, ...] | None = None
    infeasible: bool = False

    @property
    def crowded(self) -> bool:
        """Whether work decides about the length, and there are many placements."""
        many = len(self.instance.groups) > FEW_OPERATORS
        return many and any(limits.crowded for limits in self.limits)

    def asks(self, step: _Step) -> bool:
        """Whether a step may tell something."""
        if step.near:
            return step.kept == (self.kept is not None)
        return step.channels or not self.crowded


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
    with interruptible(watch), compile_clock() as compiling_s:
        run = Run.begun(watch, time_limit_s, seed, compiling_s)
        answer = (relaxed if instance.relaxed else _full)(instance, run, start)
    if watch.interrupted:
        return replace(answer, reproducible=False, note=INTERRUPTED)
    return answer


def _full(instance: Instance, run: Run, start: Sequence[int] | None) -> Answer:
    """Local search, then the steps."""
    if start is None:
        found = _near(instance, heft.place(instance.placing), run)
        if found.status == "INFEASIBLE":
            return Answer(Status.INFEASIBLE, None, math.inf, None)
        start = found.device_of
    limits = [limits_of(instance, backward=backward) for backward in _BOTH]
    joint = joint_of(limits)
    search = _Search(instance, run, known_of(instance, start), limits, joint.least, joint)
    run.watch.see(bound=search.total)
    if search.known.fits:
        run.watch.see(search.known.latest)
        share = CROWDED_SHARE if search.crowded else SEARCH_SHARE
        run.per_s = _per_s(search)
        search.known = _improved(search, search.known, share)
    if len(instance.groups) > FEW_OPERATORS and not run.watch.done:
        search.limits, search.joint = windowed(instance, limits, run, WINDOWS_SHARE)
        search.total = search.joint.least
        run.watch.see(bound=search.total)
    for step in _STEPS:
        if search.asks(step) and not run.watch.done:
            _climb(search, step)
    return _answer(search)


def _per_s(search: _Search) -> float:
    """Units of deterministic work per second."""
    if search.crowded:
        return CROWDED_PER_S
    many = len(search.instance.groups) > FEW_OPERATORS
    return DETERMINISTIC_PER_S if many else FEW_PER_S


def _improved(search: _Search, known: Known, share: float) -> Known:
    """The best schedule near a known one that a share of the whole limit finds."""
    instance, run = search.instance, search.run
    if instance.placing.num_operators <= FEW_OPERATORS:
        return known
    edges = sum(len(flow.consumers) for flow in instance.placing.tensors)
    per_s = MOVES_PER_S * MOVES_SIZE / (instance.placing.num_operators + edges)
    return improved(instance, known, int(per_s * run.draw(share)), run.watch, run.over, run.seed)


def _climb(search: _Search, step: _Step) -> None:
    """Looks for what a step's model has just above the least that is known of it, and further above
    while there is nothing; or for all that is better than the best schedule.
    """
    run, rise = search.run, RISE
    until_s = run.left_s * (1 - step.share)
    while not run.watch.done and run.left_s > until_s:
        worst, begun_s = _worst(search, step), run.left_s
        at_once = step.near or worst <= (1 + 2 * rise) * _least(search, step)
        most = worst if at_once else int((1 + rise) * _least(search, step))
        found = _solved(search, step, most, 1 - until_s / run.left_s)
        if found.status != "INFEASIBLE" or most == worst:
            _learn(search, step, found)
            return
        _raise(search, step, most + 1)
        if STEEP * (begun_s - run.left_s) < run.left_s - until_s:
            rise *= 2


def _least(search: _Search, step: _Step) -> int:
    """Ticks that a step's objective is known not to be below."""
    return search.total if len(step.phases) == 2 else search.limits[step.phases[0]].least


def _worst(search: _Search, step: _Step) -> int:
    """Ticks of a step's objective beyond which there is nothing worth finding."""
    known = search.known
    worst = known.latest - 1 if known.fits else known.latest
    if len(step.phases) == 1:
        worst -= search.limits[not step.phases[0]].least
    return worst


def _raise(search: _Search, step: _Step, least: int) -> None:
    """Takes in that a step's objective is not below some ticks."""
    if len(step.phases) == 1:
        which = step.phases[0]
        least = max(least, search.limits[which].least)
        search.limits[which] = replace(search.limits[which], least=least)
        least = sum(limits.least for limits in search.limits)
    search.total = max(search.total, least)
    search.run.watch.see(bound=search.total)


def _learn(search: _Search, step: _Step, found: Found) -> None:
    """Takes in what a step found: a bound, unless it kept a placement; and a schedule, or what may
    become one.
    """
    if found.status == "INFEASIBLE":
        search.infeasible = not search.known.fits
        if search.known.fits and not step.kept:
            search.total = search.known.latest
            search.run.watch.see(bound=search.total)
        return
    if not step.kept:
        _raise(search, step, found.bound)
    if len(step.phases) == 2 and found.device_of is not None:
        _adopt(search, step, found, found.device_of)


def _adopt(search: _Search, step: _Step, found: Found, device_of: tuple[int, ...]) -> None:
    """Takes in a step's placement, if it fits."""
    if step.channels:
        forward, backward = found.starts
        schedule = Schedule(forward, backward, {}, {}, *found.ends)
        _take(search, Known(device_of, True, schedule.latency, schedule))
    elif overflow(search.instance, device_of) <= 0:
        search.kept = device_of
        near = timed(search.instance, device_of, *found.starts)
        _take(search, _improved(search, near, POLISH_SHARE))


def _take(search: _Search, found: Known) -> None:
    """Keeps a schedule if it is the best."""
    if not search.known.fits or found.latest < search.known.latest:
        search.known = found
    search.run.watch.see(search.known.latest)


def _solved(search: _Search, step: _Step, most: int, share: float) -> Found:
    """Builds a step's model and solves it.

    Args:
        most: ticks of its objective.
        share: of what is left.
    """
    from ortools.sat.python import cp_model

    instance, known = search.instance, search.known
    model = placement_of(instance, cp_model.CpModel(), known.device_of, memory=step.memory)
    if step.kept and search.kept is not None:
        keep(model, search.kept)
    add_apart(model, known.device_of)
    if step.channels:
        add_crossings(model, known.device_of)
    phases = [_phase(search, step, model, most, backward) for backward in step.phases]
    ends = [phase.end for phase in phases]
    if len(phases) > 1:
        model.cp.add_linear_constraint(sum(ends), search.total, most)
        add_joint(model, phases[0], phases[1], search.joint)
    model.cp.minimize(sum(ends))
    besides = search.limits[not step.phases[0]].least if len(ends) == 1 else 0
    return call(
        model,
        search.run,
        share,
        besides=None if step.kept else besides,
        starts=[phase.start for phase in phases],
        ends=ends,
        whole=step.channels,
        hinted=step.near,
    )


def _phase(search: _Search, step: _Step, model: Model, most: int, backward: bool) -> Phase:
    """A phase of a step's model, which leaves the other its least time."""
    latest = most - search.limits[not backward].least if len(step.phases) == 2 else most
    phase = phase_of(model, search.limits[backward], search.known, latest, backward=backward)
    if step.channels:
        add_channels(model, phase, search.known, latest)
    return phase


def _near(instance: Instance, wish: Sequence[int], run: Run) -> Found:
    """A placement that fits with as much work as can be where a given one has it, if there is one
    and it was found.
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
    found = call(model, run, NEAR_SHARES[0])
    return call(model, run, NEAR_SHARES[1]) if found.status == "UNKNOWN" else found


def _answer(search: _Search) -> Answer:
    """The best schedule, with the bound."""
    known, tick_s, in_time = search.known, search.instance.tick_s, search.run.in_time
    bound_s = max(0.0, search.total * tick_s - search.instance.lost_s)
    if search.infeasible:
        return Answer(Status.INFEASIBLE, None, math.inf, None)
    if not known.fits or known.schedule is None:
        return Answer(Status.UNKNOWN, None, math.inf, bound_s, reproducible=in_time)
    return Answer(
        Status.OPTIMAL if known.latest <= search.total else Status.FEASIBLE,
        known.device_of,
        known.latest * tick_s,
        bound_s,
        reproducible=in_time,
        order=known.schedule.orders[0],
    )
