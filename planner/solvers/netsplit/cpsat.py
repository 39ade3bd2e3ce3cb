"""The search of NetSplit's model with OR-Tools CP-SAT (`cpsat_model.py`).

The local search (`search.py`) looks for a schedule near the known one, and windows (`windows.py`)
give bounds. With shared links, spans (`spans.py`) give bounds, neighbourhoods (`neighbourhoods.py`)
better schedules, and of the steps only the last one follows. Else the proof comes step by step,
because a model of half the size is solved much faster than one twice as large, and because
transfers that wait for each other seldom make the best schedule longer:

    step 1   forwards alone, without (7) and (8): F is never less
    step 2   backwards alone, without (7) and (8): B is never less
    step 3   both together with (8), each within the ticks that the other leaves: F + B is never
             less
    step 4   the same near the best schedule, for a better placement if step 3 found none
    step 5   the whole model with the placement of the step before
    step 6   the whole model

A step climbs: it asks for a solution within 0.1 % of the least known bound, proves that there is
none, asks within the next 0.2 %, and so on; the first solution is the optimum. So tight a limit
makes each proof short, and all of them together take a fraction of the work of one search from the
best schedule down. Where the limit ends a climb, every bound below is proved. After steps 3 and 4
the local search goes on from their solutions. The search ends when the bound meets the best
schedule.

CP-SAT runs with one worker and without linear relaxations: on such models its clauses prove in
seconds what takes its other strategies minutes, and one worker repeats itself. In a crowded model
(the devices together need longer for the work than the longest path takes) hardly any step improves
the bound: then steps 1 to 3 are left out, and most of the limit goes into the local search. All
limits are of deterministic work.

Source: Perron and Didier, OR-Tools CP-SAT.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.artefacts.problem import Status
from planner.solvers.engines.mip import Answer
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.netsplit.bounds import SubproblemBounds, subproblem_bounds_of
from planner.solvers.netsplit.cpsat_call import (
    CONSTRAINTS_PER_S,
    CROWDED_PER_S,
    DETERMINISTIC_PER_S,
    FEW_PER_S,
    SearchBudget,
    call,
)
from planner.solvers.netsplit.cpsat_model import (
    CpSatModel,
    add_apart,
    add_both,
    add_phase,
    add_sent,
    add_transfers,
    keep,
    makespan_of,
    model_of,
    num_constraints,
    schedule_in,
)
from planner.solvers.netsplit.jobs import OPERATOR, known_placement_of
from planner.solvers.netsplit.model import (
    EngineAnswer,
    KnownPlacement,
    NetSplitInstance,
    overflow,
)
from planner.solvers.netsplit.neighbourhoods import NeighbourSettings, mended
from planner.solvers.netsplit.search import improved, timed
from planner.solvers.netsplit.spans import Span, joined, merged, spanned
from planner.solvers.netsplit.windows import windowed
from planner.solvers.placement import heft
from planner.support.brake import Brake, braked

log = logging.getLogger(__name__)

TIMED_PER_S = 6_000_000
"""Work of the local search per second of the limit, in operators timed; see `fine.TIMED_PER_S`."""

SEARCH_SHARE, CROWDED_SHARE = 0.05, 0.6
"""Shares of the limit for the local search before the proof; the second for crowded models."""

WINDOWS_SHARE = 0.3
"""Share of the rest for the bounds by windows."""

SPANS_SHARE, NEIGHBOURS_SHARE = 0.35, 0.6
"""With shared links, the same share for the spans, and then that of the limit for the
neighbourhoods."""

POLISH_SHARE = 0.03
"""Share of the limit for the local search after a step."""

NEAR_SHARES = (0.03, 0.3)
"""Largest shares of the rest for the first and the second try to find a placement that fits."""

# Measured on a benchmark graph on four devices: the last step took 30 to 58 s of work down from the
# best schedule, and 21 s up from the bound. The work of a proof grows some tenfold with every half
# percent that it covers.
RISE = 0.001
"""A climb first looks this share above the bound, then twice as far each time."""

STEEP = 3
"""A climb does not widen if this multiple of the last proof's work exceeds the rest."""

MAX_BUILD = 2.0
"""Seconds for building the model of a step, per second of the limit, above which no step is made.
Smaller models, of forwards alone or of windows, are then worth little, too."""

LINKED_PER_S = 900
"""Operators times devices per second, of which spans and neighbourhoods are made with shared links;
measured on a core at 2.9 GHz shared with others: 9 s for 999 operators on 8 devices."""

FEW_OPERATORS = 20
"""Small graphs: with at most this many operators the local search is skipped; with at most this
many groups the steps prove more than the local search finds, and windows add nothing."""


@dataclass(frozen=True, slots=True)
class _ProofStep:
    """The parts of the model that a step builds.

    Attributes:
        share: largest share of the budget's rest.
        phases: False for forwards, True for backwards.
        channels: whether with (7); memory: whether with (8).
        kept: whether the placement is that of the step before.
        near: whether to look for a better schedule near the best one instead of climbing.
    """

    share: float
    phases: tuple[bool, ...]
    channels: bool = False
    memory: bool = False
    kept: bool = False
    near: bool = False


_BOTH = (False, True)
_STEPS = (
    _ProofStep(0.06, (False,)),
    _ProofStep(0.06, (True,)),
    _ProofStep(0.3, _BOTH, memory=True),
    _ProofStep(0.65, _BOTH, memory=True, near=True),
    _ProofStep(0.15, _BOTH, memory=True, channels=True, kept=True, near=True),
    _ProofStep(1.0, _BOTH, memory=True, channels=True),
)


@dataclass(slots=True)
class _FullSearch:
    """The state of a search of the full model.

    Attributes:
        known: the best schedule.
        bounds: raised by the steps.
        kept: the placement of a step without (7), if it fits.
        infeasible: whether no placement fits.
    """

    instance: NetSplitInstance
    budget: SearchBudget
    known: KnownPlacement
    bounds: SubproblemBounds
    kept: tuple[int, ...] | None = None
    infeasible: bool = False

    @property
    def crowded(self) -> bool:
        """Whether a phase is crowded, and there are many placements."""
        many = len(self.instance.groups) > FEW_OPERATORS
        return many and any(phase.crowded for phase in self.bounds.phases)

    @property
    def linked(self) -> bool:
        """Whether transfers wait for each other on shared links, and there are many placements."""
        many = len(self.instance.groups) > FEW_OPERATORS
        return many and bool(self.instance.problem.shared) and not self.crowded

    def asks(self, step: _ProofStep) -> bool:
        """Whether a step can improve a bound or the schedule."""
        if self.linked:
            return step.channels and not step.kept
        if step.near:
            return step.kept == (self.kept is not None)
        return step.channels or not self.crowded


def solve(
    instance: NetSplitInstance,
    time_limit_s: float,
    start: Sequence[int] | None,
    *,
    seed: int = 0,
    gap: float = 0.0,
    brake: Brake | None = None,
    prove: bool = True,
) -> EngineAnswer:
    """The best placement that a search from a known one finds.

    Args:
        time_limit_s: limit of deterministic work, in seconds of an ordinary core.
        start: a placement that fits, to start from and to beat; None if none is known.
        seed: seed of all random choices.
        gap: (latency - bound) / bound at which the search may end.
        brake: of the search that this is a part of; None where it is the whole.
        prove: whether a better bound is worth time. Else, in graphs of many operators, all of it is
            that of the local search.
    """
    with braked(time_limit_s) as own:
        watch = SearchWatch(log, instance.tick_s, gap, brake or own)
        with interruptible(watch):
            budget = SearchBudget.begun(watch, time_limit_s, seed)
            if instance.relaxed:
                answer = _relaxed(instance, budget, start)
            else:
                answer = _full(instance, budget, start, prove=prove)
    if watch.interrupted:
        return replace(answer, reproducible=False, note=INTERRUPTED)
    return replace(answer, reproducible=not watch.cut)


def _full(
    instance: NetSplitInstance, budget: SearchBudget, start: Sequence[int] | None, *, prove: bool
) -> EngineAnswer:
    """Local search, windows, then the steps; the local search alone, where the models of the steps
    are too large to be built in the limit, or nothing has to be proved.
    """
    too_large = _build_s(instance) > MAX_BUILD * budget.whole_s
    if start is None:
        if too_large:
            return EngineAnswer(Status.UNKNOWN, None, math.inf, None)
        fitting = _near(instance, heft.place(instance.problem), budget)
        if fitting is Status.INFEASIBLE:
            return EngineAnswer(Status.INFEASIBLE, None, math.inf, None)
        start = None if isinstance(fitting, Status) else fitting
    known = known_placement_of(instance, start)
    search = _FullSearch(instance, budget, known, subproblem_bounds_of(instance))
    budget.watch.see(bound=search.bounds.least)
    alone = not prove and known.fits and instance.problem.num_operators > FEW_OPERATORS
    if known.fits:
        budget.watch.see(known.latest)
        share = CROWDED_SHARE if search.crowded else SEARCH_SHARE
        budget.per_s = _per_s(search)
        search.known = _improved(search, known, 1.0 if alone else share)
    if not too_large and not alone:
        _prove(search)
    return _answer(search)


def _build_s(instance: NetSplitInstance) -> float:
    """Seconds of the limit that building the models of the steps takes."""
    build_s = num_constraints(instance, _BOTH, channels=False) / CONSTRAINTS_PER_S
    if instance.problem.shared:
        placements = instance.problem.num_operators * instance.problem.num_devices
        build_s += placements / LINKED_PER_S
    return build_s


def _prove(search: _FullSearch) -> None:
    """Spans or windows, then the steps."""
    if search.linked:
        _between_cuts(search)
    elif len(search.instance.groups) > FEW_OPERATORS and not search.budget.watch.done:
        search.bounds = windowed(search.instance, search.bounds, search.budget, WINDOWS_SHARE)
        search.budget.watch.see(bound=search.bounds.least)
    for step in _STEPS:
        if search.asks(step) and not search.budget.watch.done:
            _climb(search, step)


def _between_cuts(search: _FullSearch) -> None:
    """Spans, then neighbourhoods by their bounds, then the spans merged."""
    instance, budget = search.instance, search.budget
    everything = range(instance.problem.num_operators)

    def learn(spans: list[Span]) -> None:
        bounds = joined(instance, everything, spans)
        search.bounds = replace(bounds, least=max(search.bounds.least, bounds.least))
        budget.watch.see(bound=search.bounds.least)

    spans = spanned(instance, budget, SPANS_SHARE)
    learn(spans)
    if search.known.fits and not budget.watch.done:
        search.known = _mended(search, spans, NEIGHBOURS_SHARE)
    for fewer in merged(instance, spans, budget, search.known.latest):
        learn(fewer)


def _per_s(search: _FullSearch) -> float:
    """Units of deterministic work per second."""
    if search.crowded:
        return CROWDED_PER_S
    many = len(search.instance.groups) > FEW_OPERATORS
    return DETERMINISTIC_PER_S if many else FEW_PER_S


def _improved(search: _FullSearch, known: KnownPlacement, share: float) -> KnownPlacement:
    """The best schedule that the local search finds near a known one, in a share of the limit."""
    instance, budget = search.instance, search.budget
    if instance.problem.num_operators <= FEW_OPERATORS:
        return known
    work = int(TIMED_PER_S * budget.draw(share))
    return improved(instance, known, work, budget.watch, budget.over, budget.seed)


def _mended(search: _FullSearch, spans: Sequence[Span], share: float) -> KnownPlacement:
    """The best schedule that neighbourhoods of the best one give, in a share of the limit."""
    budget, watch = search.budget, search.budget.watch
    limit = share * budget.whole_s * budget.per_s
    known, worked = mended(
        search.instance,
        search.known,
        NeighbourSettings(
            limit,
            budget.per_s / CONSTRAINTS_PER_S,
            budget.seed,
            watch,
            search.bounds,
            [span.operators for span in spans],
        ),
    )
    budget.left_s = max(0.0, budget.left_s - worked / budget.per_s)
    return known


def _climb(search: _FullSearch, step: _ProofStep) -> None:
    """Looks for a solution of a step's model just above its bound, and further above while there is
    none; `near` steps, and climbs that would reach the best schedule, look below that at once.
    """
    budget, rise = search.budget, RISE
    until_s = budget.left_s * (1 - step.share)
    size = num_constraints(search.instance, step.phases, channels=step.channels)
    build_s = size / CONSTRAINTS_PER_S
    while not budget.watch.done and budget.left_s - build_s > until_s:
        worst, begun_s = _worst(search, step), budget.left_s
        budget.left_s -= build_s
        at_once = step.near or worst <= (1 + 2 * rise) * _least(search, step)
        max_ticks = worst if at_once else int((1 + rise) * _least(search, step))
        model = _model(search, step, max_ticks)
        answer = _solved(search, step, model, 1 - until_s / budget.left_s)
        if answer.status is not Status.INFEASIBLE or max_ticks == worst:
            _learn(search, step, answer)
            if len(step.phases) == 2 and answer.values is not None:
                _adopt(search, step, model, answer.values)
            return
        # Steps that climb keep no placement: their models are relaxations of the whole one.
        _raise(search, step, max_ticks + 1)
        if STEEP * (begun_s - budget.left_s) < budget.left_s - until_s:
            rise *= 2


def _least(search: _FullSearch, step: _ProofStep) -> int:
    """The lower bound of a step's objective, in ticks."""
    bounds = search.bounds
    return bounds.least if len(step.phases) == 2 else bounds.phases[step.phases[0]].least


def _worst(search: _FullSearch, step: _ProofStep) -> int:
    """The largest value of a step's objective, in ticks, that would improve the best schedule."""
    known = search.known
    worst = known.latest - 1 if known.fits else known.latest
    if len(step.phases) == 1:
        worst -= search.bounds.phases[not step.phases[0]].least
    return worst


def _raise(search: _FullSearch, step: _ProofStep, least: int) -> None:
    """Takes in a lower bound of a step's objective."""
    phases = list(search.bounds.phases)
    if len(step.phases) == 1:
        which = step.phases[0]
        phases[which] = replace(phases[which], least=max(least, phases[which].least))
        least = sum(phase.least for phase in phases)
    least = max(search.bounds.least, least)
    search.bounds = replace(search.bounds, phases=tuple(phases), least=least)
    search.budget.watch.see(bound=least)


def _learn(search: _FullSearch, step: _ProofStep, answer: Answer) -> None:
    """Takes in what a step's answer proves: its bound, unless the step kept a placement."""
    if answer.status is Status.INFEASIBLE:
        search.infeasible = not search.known.fits
        # Nothing is better than the best schedule; of a kept placement that says nothing.
        if search.known.fits and not step.kept:
            search.bounds = replace(search.bounds, least=search.known.latest)
            search.budget.watch.see(bound=search.bounds.least)
    elif not step.kept:
        _raise(search, step, int(answer.bound))


def _adopt(
    search: _FullSearch, step: _ProofStep, model: CpSatModel, values: Sequence[float]
) -> None:
    """Takes in a step's schedule if the step had (7), else its placement, timed anew if it fits."""
    if step.channels:
        _take(search, schedule_in(model, values))
        return
    device_of = model.device_of(values)
    if overflow(search.instance, device_of) <= 0:
        search.kept = device_of
        forward, backward = (
            [int(phase.starts(values)[OPERATOR, i]) for i in range(len(device_of))]
            for phase in model.phases
        )
        near = timed(search.instance, device_of, forward, backward)
        _take(search, _improved(search, near, POLISH_SHARE))


def _take(search: _FullSearch, new: KnownPlacement) -> None:
    """Keeps a schedule if it is the best."""
    if not search.known.fits or new.latest < search.known.latest:
        search.known = new
    search.budget.watch.see(search.known.latest)


def _model(search: _FullSearch, step: _ProofStep, max_ticks: int) -> CpSatModel:
    """A step's model.

    Args:
        max_ticks: upper limit of its objective.
    """
    model = model_of(search.instance, search.known, memory=step.memory)
    if step.kept and search.kept is not None:
        keep(model, search.kept)
    add_apart(model)
    if step.channels:
        add_sent(model)
    if len(step.phases) == 2:
        add_both(model, search.bounds, max_ticks, add_transfers if step.channels else None)
    else:
        (backward,) = step.phases
        phase = add_phase(model, search.bounds.phases[backward], max_ticks, backward=backward)
        model.cp.minimize(phase.end)
    return model


def _solved(search: _FullSearch, step: _ProofStep, model: CpSatModel, share: float) -> Answer:
    """The answer for a step's model.

    Args:
        share: largest share of the budget's rest.
    """
    besides = search.bounds.phases[not step.phases[0]].least if len(step.phases) == 1 else 0
    return call(
        model,
        search.budget,
        share,
        besides=None if step.kept else besides,
        whole=step.channels,
        hinted=step.near,
    )


def _near(
    instance: NetSplitInstance, wish: Sequence[int], budget: SearchBudget
) -> tuple[int, ...] | Status:
    """A placement that fits, with as much work as possible where a given one has it; else whether
    there is none, or none was found.

    Args:
        wish: a placement that need not fit.
    """
    known = known_placement_of(instance, wish)
    model = model_of(instance, known, memory=True)
    work = (instance.forward + instance.backward).min(axis=1)
    model.cp.maximize(
        sum(
            (1 + int(work[list(group)].sum())) * model.x[g][known.device_of[group[0]]]
            for g, group in enumerate(instance.groups)
        )
    )
    for share in NEAR_SHARES:
        answer = call(model, budget, share)
        if answer.values is not None:
            return model.device_of(answer.values)
        if answer.status is Status.INFEASIBLE:
            break
    return answer.status


def _answer(search: _FullSearch) -> EngineAnswer:
    """The best schedule, with the bound."""
    known, tick_s = search.known, search.instance.tick_s
    bound_s = max(0.0, search.bounds.least * tick_s - search.instance.lost_s)
    if search.infeasible:
        return EngineAnswer(Status.INFEASIBLE, None, math.inf, None)
    if not known.fits or known.schedule is None:
        return EngineAnswer(Status.UNKNOWN, None, math.inf, bound_s)
    return EngineAnswer(
        Status.OPTIMAL if known.latest <= search.bounds.least else Status.FEASIBLE,
        known.device_of,
        known.latest * tick_s,
        bound_s,
        order=known.schedule.orders[0],
    )


# --------------------------------------------------------------------------- the published model


def _relaxed(
    instance: NetSplitInstance, budget: SearchBudget, start: Sequence[int] | None
) -> EngineAnswer:
    """The best placement by the published model.

    Args:
        start: see `solve`.
    """
    known = known_placement_of(instance, start)
    model = model_of(instance, known, memory=True)
    model.cp.minimize(makespan_of(model))
    if known.fits:
        budget.watch.see(known.latest)
    answer = call(model, budget, 1.0, besides=0, whole=True)
    bound_s = max(0.0, answer.bound * instance.tick_s - instance.lost_s)
    value, device_of = float(known.latest), known.device_of
    if answer.values is not None:
        value, device_of = answer.value, model.device_of(answer.values)
    elif not known.fits:
        bound = None if answer.status is Status.INFEASIBLE else bound_s
        return EngineAnswer(answer.status, None, math.inf, bound)
    status = Status.OPTIMAL if value <= answer.bound else Status.FEASIBLE
    return EngineAnswer(status, device_of, value * instance.tick_s, bound_s)
