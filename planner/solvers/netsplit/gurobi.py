"""NetSplit's model by gurobi: the constraint model of `cpsat_model.py`, read as a mixed integer
program by `solvers/engines/cp_as_mip.py`. A known schedule's ticks limit all times, so M is no
larger.

Besides (1) to (9) there is

    (b') F, or B, is at least the ticks of all operators on a device                `_complete`

which follows from (6), but not while variables are fractions: then big-M constraints say nothing,
and this one bounds the phase by the work of a device.

Rows grow with the square of operators and transfers: this engine is for small instances, and for a
second opinion. The bundled licence takes 2,000 variables and 2,000 constraints.

Source: Gurobi Optimization, https://docs.gurobi.com/projects/optimizer.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from planner.artefacts.problem import Status
from planner.solvers.engines.cp_as_mip import mip_of
from planner.solvers.engines.mip import Answer, MipLimits, gurobi
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.netsplit.bounds import subproblem_bounds_of
from planner.solvers.netsplit.cpsat_model import (
    CpSatModel,
    CpSatPhase,
    add_both,
    add_sent,
    add_transfers,
    makespan_of,
    model_of,
    schedule_in,
)
from planner.solvers.netsplit.jobs import known_placement_of
from planner.solvers.netsplit.model import EngineAnswer, KnownPlacement, NetSplitInstance
from planner.support.brake import Brake

log = logging.getLogger(__name__)

WORK_PER_S = 1.0
"""Work units per second of the limit; gurobi does about one per second."""

INTEGRALITY = 1e-9
"""How far integers may be from whole numbers: by gurobi's default, a big-M constraint would be
broken by 1e-5 of the schedule."""


def solve(
    instance: NetSplitInstance,
    time_limit_s: float,
    start: Sequence[int] | None,
    *,
    seed: int = 0,
    gap: float = 0.0,
    brake: Brake | None = None,
) -> EngineAnswer:
    """The best placement that a search from a known one finds.

    Args:
        time_limit_s: limit of deterministic work, in seconds of an ordinary core.
        start: a placement that fits, to start from and to beat; None if none is known.
        seed: seed of the engine.
        gap: (latency - bound) / bound at which the search may end.
        brake: of the search that this is a part of.

    Raises:
        EngineUnavailableError: if there is no licence, or it does not cover so large a model.
    """
    watch = SearchWatch(log, instance.tick_s, gap, brake)
    # A gap is of the incumbent here.
    enough = watch.enough / (1 + watch.enough)
    limits = MipLimits(math.inf, seed, enough, WORK_PER_S * time_limit_s, INTEGRALITY)
    with interruptible(watch):
        answer = _solved(instance, watch, limits, known_placement_of(instance, start))
    if watch.interrupted:
        return replace(answer, reproducible=False, note=INTERRUPTED)
    return replace(answer, reproducible=not watch.cut)


def _solved(
    instance: NetSplitInstance, watch: SearchWatch, limits: MipLimits, known: KnownPlacement
) -> EngineAnswer:
    model = model_of(instance, known, memory=True)
    if instance.relaxed:
        model.cp.minimize(makespan_of(model))
    else:
        add_sent(model)
        add_both(model, subproblem_bounds_of(instance), known.latest, _complete)
    if known.fits:
        watch.see(known.latest)
    # Where the known placement does not fit, it is no start.
    hint = {one.index: float(value) for one, value in model.hints if known.fits}
    answer = gurobi(mip_of(model.cp), limits, hint, watch.brake, watch)
    return _read(model, answer)


def _read(model: CpSatModel, answer: Answer) -> EngineAnswer:
    """The engine's answer as NetSplit's: of the full model, its order timed anew."""
    instance, known = model.instance, model.known
    bound_s = max(0.0, answer.bound) * instance.tick_s - instance.lost_s
    if answer.values is None and not known.fits:
        bound = None if answer.status is Status.INFEASIBLE else bound_s
        return EngineAnswer(answer.status, None, math.inf, bound)
    latest, order = float(known.latest), None
    if answer.values is not None and instance.relaxed:
        known, latest = replace(known, device_of=model.device_of(answer.values)), answer.value
    elif answer.values is not None:
        known = schedule_in(model, answer.values)
        latest, order = known.latest, known.schedule.orders[0] if known.schedule else None
    # The optimum is a whole number of ticks.
    status = Status.OPTIMAL if latest <= answer.bound + 0.5 else Status.FEASIBLE
    return EngineAnswer(status, known.device_of, latest * instance.tick_s, bound_s, order=order)


def _complete(phase: CpSatPhase) -> None:
    """The transfers of a phase, and (b')."""
    add_transfers(phase)
    for p, ticks in enumerate(phase.ticks.T.tolist()):
        work = sum(t * phase.model.on(i, p) for i, t in enumerate(ticks))
        phase.model.cp.add(phase.end >= work)
