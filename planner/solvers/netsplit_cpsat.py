"""NetSplit's model in OR-Tools CP-SAT (`netsplit_cpsat_model.py`): how it is searched.

First a schedule near the known one is looked for (`netsplit_search`) and small parts of the graph
tell bounds (`netsplit_windows`), then the proof comes step by step, because a model of half the
size is solved much faster than one that is twice as large, and because messages that wait for each
other seldom make the best schedule longer:

    step 1   forwards alone, with neither (7) nor (8): F is never less
    step 2   backwards alone, likewise: B is never less
    step 3   both together with (8), each within what the other leaves: F + B is never less
    step 4   all of it, but with the placement of the step before
    step 5   all of it

Every step looks for what is better than the best schedule, and the search ends when there is no
such thing or the bound says so. After step 3 the local search goes on from what it found. Step 5
starts from nothing: near the best schedule there is seldom a better one, and that there is none is
proved sooner. Without linear relaxations and with one worker: on such models CP-SAT's clauses prove
in seconds what takes its other strategies minutes, and one worker repeats itself. Where there is
more work than the devices can share within the longest path, hardly any step improves the bound:
then steps 1 and 2 are left out and most of the limit goes into the local search. Everything is
limited by deterministic work.

Source: Perron and Didier, OR-Tools CP-SAT.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.jit import compile_clock
from planner.problem import Status
from planner.solvers import heft
from planner.solvers.netsplit_bounds import Joint, Limits, joint_of, limits_of
from planner.solvers.netsplit_cpsat_model import (
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
from planner.solvers.netsplit_cpsat_relaxed import relaxed
from planner.solvers.netsplit_cpsat_run import (
    CROWDED_PER_S,
    DETERMINISTIC_PER_S,
    FEW_PER_S,
    Found,
    Run,
    call,
)
from planner.solvers.netsplit_model import (
    Answer,
    Instance,
    Known,
    Schedule,
    known_of,
    overflow,
)
from planner.solvers.netsplit_search import improved, timed
from planner.solvers.netsplit_watch import INTERRUPTED, Watch, interruptible
from planner.solvers.netsplit_windows import windowed

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

NEAR_SHARES = (0.02, 0.3)
"""The most of what is left, to find a good placement that fits, and any if there is none yet."""

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
    """

    share: float
    phases: tuple[bool, ...]
    channels: bool = False
    memory: bool = False
    kept: bool = False


_BOTH = (False, True)
_STEPS = (
    _Step(0.2, (False,)),
    _Step(0.25, (True,)),
    _Step(0.5, _BOTH, memory=True),
    _Step(0.1, _BOTH, memory=True, channels=True, kept=True),
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
        kept: the placement of the step without (7), if it fits.
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
        if step.kept:
            return self.kept is not None
        return step.memory or not self.crowded


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
            _learn(search, step, _solved(search, step))
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


def _learn(search: _Search, step: _Step, found: Found) -> None:
    """Takes in what a step found: a bound, unless it kept a placement; and a schedule, or what may
    become one.
    """
    if found.status == "INFEASIBLE":
        search.infeasible = not search.known.fits
        if search.known.fits and not step.kept:
            search.total = search.known.latest
    elif len(step.phases) == 1:
        which = step.phases[0]
        least = max(search.limits[which].least, found.bound)
        search.limits[which] = replace(search.limits[which], least=least)
        search.total = max(search.total, sum(limits.least for limits in search.limits))
    elif found.device_of is not None:
        _adopt(search, step, found, found.device_of)
    if len(step.phases) == 2 and not step.kept:
        search.total = max(search.total, found.bound)
    search.run.watch.see(bound=search.total)


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


def _solved(search: _Search, step: _Step) -> Found:
    """Builds a step's model and solves it."""
    from ortools.sat.python import cp_model

    instance, known = search.instance, search.known
    model = placement_of(instance, cp_model.CpModel(), known.device_of, memory=step.memory)
    if step.kept and search.kept is not None:
        keep(model, search.kept)
    add_apart(model, known.device_of)
    if step.channels:
        add_crossings(model, known.device_of)
    phases = [_phase(search, step, model, backward) for backward in step.phases]
    ends = [phase.end for phase in phases]
    if len(phases) > 1:
        model.cp.add_linear_constraint(sum(ends), search.total, _most(known))
        add_joint(model, phases[0], phases[1], search.joint)
    model.cp.minimize(sum(ends))
    besides = search.limits[not step.phases[0]].least if len(ends) == 1 else 0
    return call(
        model,
        search.run,
        step.share,
        besides=None if step.kept else besides,
        starts=[phase.start for phase in phases],
        ends=ends,
        whole=step.channels,
        hinted=step.kept or not step.channels,
    )


def _most(known: Known) -> int:
    """Ticks of a schedule that is worth finding."""
    return known.latest - 1 if known.fits else known.latest


def _phase(search: _Search, step: _Step, model: Model, backward: bool) -> Phase:
    """A phase of a step's model, which leaves the other its least time."""
    known, latest = search.known, _most(search.known) - search.limits[not backward].least
    phase = phase_of(model, search.limits[backward], known, latest, backward=backward)
    if step.channels:
        add_channels(model, phase, known, latest)
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
