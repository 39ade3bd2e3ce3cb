"""NetSplit: every operator gets a device by a constraint model (`model.py`).

    (1) the placement problem, and a first check: if all devices together cannot hold the model,
        there is no placement                                                  `solve`
    (2) known placements: those of other solvers, list schedules (HEFT, m-TOPO, m-ETF, m-SCT),
        Pesto's, and one device alone                                          `_known`
    (3) co-placement to few groups, 2 x devices as in the thesis, and the model on them; from its
        answer the model on more groups, or on single operators if there are few. A bound is proved
        where the result says it: of single operators, and one microbatch      `_by_objectives`
    (4) for the least latency, annealing over single operators from the best of all these by the
        simulator, unless (3) has proved an optimum over single operators      `_single_operators`
    (5) a placement that the evaluator finds no room for is searched again, with less memory on the
        devices that were over; the best of all that fit counts. The published model's answer is a
        plan in any case, with a note                                          `_in_rounds`

The objective latency is the model's own, the objective bottleneck that of `bottleneck.py`.
An iteration of several microbatches depends on both, so both are searched, and from their
placements and the known ones whole iterations (`periodic.py`); the judge chooses.
Engines: CP-SAT, or gurobi if it is asked for and its licence covers the model.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem, Result, Status, switches_of
from planner.artefacts.strategy import Strategy, operator_indices
from planner.clusters.routes import chain
from planner.costs.evaluate import closed_form_s, evaluate, evaluation_work_s
from planner.simulator.objective import objective_s
from planner.solvers.engines.engine import Engine
from planner.solvers.engines.mip import EngineUnavailableError
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.netsplit import bottleneck as netsplit_bottleneck
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit import gurobi as netsplit_gurobi
from planner.solvers.netsplit import periodic, pesto
from planner.solvers.netsplit.fine import Candidate, Judged, Refined, refined
from planner.solvers.netsplit.less_memory import Round, Unfit, in_less_memory
from planner.solvers.netsplit.model import (
    EngineAnswer,
    NetSplitInstance,
    grouped,
    instance_of,
    overflow,
)
from planner.solvers.netsplit.options import NetSplit
from planner.solvers.placement import heft
from planner.solvers.placement.baechi import NoFavouritesError, m_sct_rule, place_m_topo
from planner.solvers.placement.baechi_schedule import (
    DispatchRule,
    NoRoom,
    earliest,
    list_schedule,
)
from planner.solvers.placement.coplacement import coplaced, kept_bytes
from planner.solvers.placement.problem import (
    Placement,
    PlacementProblem,
    placement_problem_of,
    tighter,
)
from planner.solvers.placement.stages import strategies_of
from planner.solvers.placement.timetable import latency_s
from planner.support.brake import Brake, braked
from planner.support.units import format_bytes, format_bytes_apart

log = logging.getLogger(__name__)

TOO_LONG = "its placements have more stages than the time limit has work for"
"""The reason where all placements were left out."""

PER_DEVICE = 2
"""Groups per device of the first model, as in the thesis."""

FINE_GROUPS = 120
"""Groups of the second model: with more, it finds worse placements in the time of a plan."""

FINE_SHARE = 0.7
"""Share of the time for the second model."""

SINGLES_SHARE = 0.8
"""Share of the time for (4), if the last model of (3) is of groups; half of it if that is of single
operators."""

PERIODIC_SHARE = 0.5
"""Share of the time for whole iterations of several microbatches."""

MAX_PERIODIC = 4
"""Number of placements for whole iterations that the simulator sees."""

MAX_SIMULATED = 2_000
"""Strategies of several microbatches with more stages times microbatches than this are ranked by
the closed form."""

COMPUTATIONS_PER_S = 1_000
"""Stages times microbatches of a placement that is cut into stages, per second of the limit, which
is taken as a second at least: the action lists of an eighth of a second. A longer one is left out,
because it is priced several times."""

PAIRS_PER_S, MAX_TABLES = 175_000, 2.0
"""Pairs of devices times operators, of which tables and models are made, per second of an ordinary
core, and how many seconds of that are worth a second of the limit. Measured on 64 devices with 515
operators, on a core at 2.9 GHz shared with others: 12 s."""

PESTO_SHARE = 0.05
"""Share of the time for Pesto's placement."""

MAX_FAVOURITES = 2_000
"""With more operators m-SCT is not asked: its linear program takes 0.1 s for 500 operators, and
grows faster than they do."""

MAX_KNOWN = 3
"""Number of known placements that the judge sees besides."""

ROUND_SHARES = (0.8, 0.15, 0.05)
"""Shares of the time for searches with less memory each time."""

PlacementPrice = Callable[[Sequence[int]], float]
"""The objective of a placement, in s."""


@dataclass(frozen=True, slots=True)
class _ObjectiveSearch:
    """The search for one objective.

    Attributes:
        name: name of the objective.
        price: the objective of a placement, in s.
        run: the engine, on an instance, with a limit in s, a placement to start from, and whether
            to prove a bound.
        whole: whether the last instance is always the whole graph of single operators, so that the
            bound holds for it.
    """

    name: str
    price: PlacementPrice
    run: Callable[[NetSplitInstance, float, Sequence[int] | None, bool], EngineAnswer]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class _Case:
    """What all steps of a search work on.

    Attributes:
        model: the placement problem; with less memory than there is, in later rounds.
        time_limit_s: limit of work of all steps together.
        searches: by objective, the most telling one first.
        known: placements of other solvers, with the order in which their operators start.
        stages: cuts a placement into stages: the strategies of it, none if they are too long.
    """

    problem: Problem
    model: PlacementProblem
    time_limit_s: float
    brake: Brake
    searches: tuple[_ObjectiveSearch, ...]
    known: Mapping[Placement, tuple[int, ...] | None]
    stages: Callable[[Candidate], tuple[Strategy, ...]]

    @property
    def near(self) -> list[Placement]:
        """The known placements, the best first."""
        return sorted(self.known, key=self.searches[0].price)

    @property
    def whole(self) -> bool:
        """Whether the last model of the engine is of single operators."""
        return self.model.num_operators <= FINE_GROUPS


@dataclass(frozen=True, slots=True)
class _Found:
    """What the steps of a search have found so far.

    Attributes:
        answer: status and bound of the first objective; not reproducible if any step was cut.
        space: the placements that status and bound are about.
        candidates: placements, the best first.
        strategies: the candidates as stages, the best first.
    """

    answer: EngineAnswer
    space: str
    candidates: tuple[Candidate, ...]
    strategies: tuple[Strategy, ...] = ()

    @property
    def interrupted(self) -> bool:
        """Whether the user has ended the search."""
        return INTERRUPTED in self.space

    def after(self, space: str = "", *, in_time: bool) -> "_Found":
        """The same after one more step.

        Args:
            space: what the step adds.
            in_time: whether it had its time.
        """
        reproducible = self.answer.reproducible and in_time
        answer = replace(self.answer, reproducible=reproducible)
        return replace(self, answer=answer, space="; ".join(filter(None, (self.space, space))))


def solve(problem: Problem, time_limit_s: float, known: Sequence[Strategy] = ()) -> Result:
    """The best placement, as stages.

    Args:
        time_limit_s: limit of work of all searches together, in seconds of an ordinary core.
        known: strategies that fit, to start from.
    """
    published = switches_of(problem.search, NetSplit).relaxed
    placement_problem = replace(placement_problem_of(problem), published_memory=published)
    reason = _too_large(problem, placement_problem)
    if reason is not None:
        return Result(
            Status.INFEASIBLE, None, space=_space(problem, "", 0), reason=reason,
            short_of_memory=True,
        )  # fmt: skip
    placed = [one for one in known if _is_placement(one)]
    if not published and _only_known(placement_problem, time_limit_s):
        return _known_ones(problem, placement_problem, placed)
    with braked(time_limit_s) as brake:
        if published:
            result = _searched(problem, placement_problem, known, time_limit_s, brake)
            return replace(result, unfit=True, work_s=time_limit_s)
        result = _in_rounds(problem, placement_problem, placed, time_limit_s, brake)
        return replace(result, work_s=time_limit_s)


def _only_known(placement_problem: PlacementProblem, time_limit_s: float) -> bool:
    """Whether there is no work for a search: its tables alone take more."""
    pairs = placement_problem.num_devices**2 * placement_problem.num_operators
    return time_limit_s == 0 or pairs > MAX_TABLES * PAIRS_PER_S * time_limit_s


def _known_ones(
    problem: Problem, placement_problem: PlacementProblem, placed: Sequence[Strategy]
) -> Result:
    """The best of the placements that take no search.

    Args:
        placed: known placements that fit.
    """
    fitting: dict[Strategy, None] = dict.fromkeys(placed)
    shortage, work_s = None, 0.0
    for device_of, order in _known(problem, placement_problem, placed).items():
        if _too_long(problem, placement_problem, device_of, 0.0):
            continue
        for one in strategies_of(problem, device_of, order):
            evaluation = evaluate(problem, one)
            work_s += evaluation_work_s(one, evaluation)
            shortage = shortage or evaluation.shortage
            if evaluation.shortage is None:
                fitting[one] = None
    space = _space(problem, "list schedules", placement_problem.num_operators)
    result = Result(
        Status.UNKNOWN, None, space=space, reason=shortage or TOO_LONG,
        short_of_memory=shortage is not None, work_s=work_s,
    )  # fmt: skip
    return _best_of(problem, result, tuple(fitting)) if fitting else result


def _too_long(
    problem: Problem,
    placement_problem: PlacementProblem,
    device_of: Placement,
    time_limit_s: float,
) -> bool:
    """Whether a placement has more stages, about one for each tensor that is sent, than are priced
    in the limit. Of one microbatch, and as published, every placement is taken.
    """
    one = problem.num_microbatches == 1 or problem.training.objective is Objective.LATENCY
    if one or placement_problem.published_memory:
        return False
    sent = sum(
        len({device_of[j] for j in tensor.consumers} - {device_of[tensor.producer]})
        for tensor in placement_problem.tensors
    )
    most = COMPUTATIONS_PER_S * max(1.0, time_limit_s)
    return sent * problem.num_microbatches > most


def _in_rounds(
    problem: Problem,
    placement_problem: PlacementProblem,
    placed: Sequence[Strategy],
    time_limit_s: float,
    brake: Brake,
) -> Result:
    """Searches with less memory each time, until the answer fits.

    Args:
        placed: known placements that fit.
    """
    # Whatever is found later, the best of all placements counts.
    fitting: dict[Strategy, None] = dict.fromkeys(placed)
    indices, cut = operator_indices(problem.profile.graph), False

    def fits(one: Strategy) -> bool:
        nonlocal cut
        cut = cut or brake.over()
        return not cut and evaluate(problem, one).shortage is None

    def search(model: PlacementProblem, share: float) -> Round:
        nonlocal cut
        result = _searched(problem, model, placed, time_limit_s * share, brake)
        if result.strategy is None:
            return Round(result)
        shortage = evaluate(problem, result.strategy).shortage
        if shortage is None and problem.num_microbatches > 1:
            return Round(result)
        own = [result.strategy] if shortage is None else []
        fitting.update(dict.fromkeys((*own, *filter(fits, result.others))))
        if shortage is None:
            return Round(result)
        # A rival's strategy may fit, but a better one may be found with less memory.
        interrupted = INTERRUPTED in result.space
        cut = cut or (not interrupted and brake.over())
        unfit = Unfit(_of_strategy(result.strategy, indices), result.strategy, shortage)
        return Round(result, unfit, ended=interrupted or cut)

    result = in_less_memory(problem, placement_problem, ROUND_SHARES, search)
    if problem.num_microbatches > 1 and result.strategy is not None:
        # The judge evaluates and simulates the rest, as far as there is time.
        return replace(result, others=tuple(dict.fromkeys((*result.others, *fitting))))
    if cut:
        result = replace(result, reproducible=False)
    return _best_of(problem, result, tuple(fitting)) if fitting else result


def _best_of(problem: Problem, result: Result, fitting: Sequence[Strategy]) -> Result:
    """The result with the best of all strategies that fit: by the simulator, or by the closed form
    if they are so long that the judge simulates them only as far as there is time.

    Args:
        result: of the last search.
    """
    longest = max(len(one.stages) * one.num_microbatches for one in fitting)
    simulated = problem.num_microbatches == 1 or longest <= MAX_SIMULATED
    price_s = objective_s if simulated else closed_form_s
    best = min(fitting, key=lambda one: price_s(problem, one))
    status = result.status if best == result.strategy else Status.FEASIBLE
    others = tuple(one for one in fitting if one != best)
    bound_s = None if result.strategy is None else result.bound_s
    return replace(
        result, status=status, strategy=best, bound_s=bound_s, reason=None, others=others,
        short_of_memory=False,
    )  # fmt: skip


def _too_large(problem: Problem, placement_problem: PlacementProblem) -> str | None:
    """Why all devices together cannot hold the model; None if they can."""
    need = sum(kept_bytes(placement_problem).values())
    room = int(placement_problem.capacity_bytes.clip(0).sum())
    if need <= room:
        return None
    needs, there = format_bytes_apart(need, room)
    largest = int(placement_problem.capacity_bytes.max()) + problem.training.reserve
    return (
        f"parameters, gradients, optimizer state and stash need {needs}; the limit is"
        f" {format_bytes(largest)} per device, and all devices together have {there}"
        f" besides their reserves"
    )


def _searched(
    problem: Problem,
    placement_problem: PlacementProblem,
    strategies: Sequence[Strategy],
    time_limit_s: float,
    brake: Brake,
) -> Result:
    """The answers of all steps as stages, the best first.

    Args:
        strategies: known ones, to start from.
    """

    @cache
    def stages(one: Candidate) -> tuple[Strategy, ...]:
        if _too_long(problem, placement_problem, one.device_of, time_limit_s):
            return ()
        return strategies_of(problem, one.device_of, one.order)

    case = _Case(
        problem, placement_problem, time_limit_s, brake,
        tuple(_searches(problem, placement_problem, brake)),
        _known(problem, placement_problem, strategies), stages,
    )  # fmt: skip
    found = _by_objectives(case)
    for step in (_single_operators, _as_stages, _whole_iterations):
        found = step(case, found)
    return _result(problem, found)


def _by_objectives(case: _Case) -> _Found:
    """(3): the answers of the engines, the first one's status and bound, and known placements."""
    rest_s = case.time_limit_s - _singles_s(case) - _iterations_s(case)
    found: list[_Found] = []
    for search in case.searches:
        if not any(one.interrupted for one in found):
            found.append(_best(case, search, rest_s / len(case.searches)))
    candidates = tuple(own for one in found for own in one.candidates)
    if candidates and not case.model.published_memory:
        # By the simulator, one of these may be better.
        also = (Candidate(device_of, case.known[device_of]) for device_of in case.near[:MAX_KNOWN])
        candidates += tuple(also)
    return replace(found[0], candidates=candidates)


def _single_operators(case: _Case, found: _Found) -> _Found:
    """(4)."""
    singles_s = _singles_s(case)
    if not singles_s or (case.whole and _settled(case.problem, found.answer)):
        return found
    starts = found.candidates or [Candidate(one, case.known[one]) for one in case.near]
    refined = _refined(case, starts, singles_s)
    candidates = (*refined.candidates, *found.candidates)
    answer = replace(
        found.answer,
        status=Status.FEASIBLE if candidates else Status.UNKNOWN,
        bound_s=found.answer.bound_s if case.whole else refined.bound_s,
    )
    found = replace(found, answer=answer, candidates=candidates)
    return found.after("then over single operators, by annealing", in_time=refined.in_time)


def _as_stages(case: _Case, found: _Found) -> _Found:
    """The candidates as strategies, each once. To cut a placement into stages takes a while, so
    once the time is over the first ones count.
    """
    seen: dict[Strategy, None] = {}
    for one in found.candidates:
        if seen and case.brake.over():
            return replace(found, strategies=tuple(seen)).after(in_time=False)
        seen.update(dict.fromkeys(case.stages(one)))
    return replace(found, strategies=tuple(seen))


def _whole_iterations(case: _Case, found: _Found) -> _Found:
    """Strategies for whole iterations of several microbatches come first, those that fit."""
    limit_s, problem, brake = _iterations_s(case), case.problem, case.brake
    if not limit_s or found.interrupted:
        return found
    starts = (*(one.device_of for one in found.candidates), *case.near)
    watch = SearchWatch(log, 1.0, brake=brake)
    with interruptible(watch):

        def over() -> bool:
            return watch.cut

        best = periodic.improved(
            case.model, starts, problem.num_microbatches, limit_s, over, problem.search.seed
        )
        fitting: dict[Strategy, None] = {}
        for each in best[:MAX_PERIODIC]:
            for one in periodic.candidates(problem, each):
                if not over() and evaluate(problem, one).shortage is None:
                    fitting[one] = None
        in_time = not over()
    found = replace(found, strategies=tuple(dict.fromkeys((*fitting, *found.strategies))))
    found = found.after("then whole iterations, by annealing", in_time=in_time)
    return found.after(INTERRUPTED, in_time=False) if watch.interrupted else found


def _iterations_s(case: _Case) -> float:
    """The time for whole iterations of several microbatches, in s; 0 where they are not searched:
    the published model has none, and on one device there is nothing to place.
    """
    searched = not case.model.published_memory and case.model.num_devices > 1
    return PERIODIC_SHARE * case.time_limit_s if searched and _several(case.problem) else 0.0


def _result(problem: Problem, found: _Found) -> Result:
    """The result with the strategies that were found, the best first."""
    answer, space, strategies = found.answer, found.space, found.strategies
    if not strategies:
        return Result(
            Status.UNKNOWN if answer.device_of is not None else answer.status,
            None, space=space,
            reason=f"no placement fits in {space}" if answer.device_of is None else TOO_LONG,
            reproducible=answer.reproducible,
            short_of_memory=answer.status is Status.INFEASIBLE,
        )  # fmt: skip
    of_iteration = problem.training.objective is Objective.ITERATION
    known_best = answer.device_of is None and answer.status is not Status.FEASIBLE
    return Result(
        # A proof of the latency leaves the optimizer's step out.
        Status.FEASIBLE if of_iteration or known_best else answer.status,
        strategies[0],
        bound_s=None if _several(problem) else answer.bound_s,
        space=space,
        reproducible=answer.reproducible,
        others=strategies[1:],
    )


def _several(problem: Problem) -> bool:
    """Whether the objective is an iteration of several microbatches."""
    of_iteration = problem.training.objective is Objective.ITERATION
    return of_iteration and problem.num_microbatches > 1


def _settled(problem: Problem, answer: EngineAnswer) -> bool:
    """Whether an answer over single operators is proved, and fits by the evaluator."""
    if answer.device_of is None or answer.status is not Status.OPTIMAL:
        return answer.status is Status.INFEASIBLE
    strategies = strategies_of(problem, answer.device_of, answer.order)
    return any(evaluate(problem, one).shortage is None for one in strategies)


def _singles_s(case: _Case) -> float:
    """The time for single operators, in s; 0 where they are not searched: the published model has
    groups only, and several microbatches run at once in other schedules than this search has.
    """
    problem = case.problem
    of_latency = problem.training.objective is not Objective.BOTTLENECK and not _several(problem)
    if not of_latency or case.model.num_devices == 1 or case.model.published_memory:
        return 0.0
    return case.time_limit_s * SINGLES_SHARE * (0.5 if case.whole else 1.0)


def _refined(case: _Case, starts: Sequence[Candidate], time_limit_s: float) -> Refined:
    """Annealing over single operators, from the best of some placements and Pesto's by the
    simulator, or the first one if none fits.
    """
    problem, brake = case.problem, case.brake

    def judged(model: PlacementProblem, one: Candidate) -> Judged:
        strategies = case.stages(one)
        fitting = [s for s in strategies if evaluate(problem, s).shortage is None]
        if fitting:
            return Judged(min(objective_s(problem, strategy) for strategy in fitting))
        kept = kept_bytes(model)
        return Judged(math.inf, tighter(problem, model, one.device_of, strategies[0], kept))

    seed, watch = problem.search.seed, SearchWatch(log, 1.0, brake=brake)
    pesto_s = PESTO_SHARE * time_limit_s
    with interruptible(watch):
        rival = pesto.place(case.model, pesto_s, seed, brake)
        if rival.device_of is not None:
            starts = [*starts, Candidate(rival.device_of)]
        start, least_s, in_time = starts[0], math.inf, rival.reproducible
        for one in starts:
            if brake.over():
                in_time = False
                break
            value_s = judged(case.model, one).value_s
            if value_s < least_s:
                start, least_s = one, value_s
        found = refined(case.model, start, time_limit_s - pesto_s, judged, watch, seed)
    return replace(found, in_time=found.in_time and in_time)


def _searches(
    problem: Problem, placement_problem: PlacementProblem, brake: Brake
) -> Iterator[_ObjectiveSearch]:
    """The searches for a problem's objective, the most telling one first."""
    own = switches_of(problem.search, NetSplit)
    if problem.training.objective is Objective.BOTTLENECK or _several(problem):
        order = _device_order(problem) if own.contiguous else None
        yield _ObjectiveSearch(
            "the smallest bottleneck",
            lambda device_of: _bottleneck_s(placement_problem, device_of, order),
            lambda instance, limit_s, start, _: netsplit_bottleneck.solve(
                instance, limit_s, start, order, problem.search.seed, own.engine, brake
            ),
            whole=True,
        )
    if problem.training.objective is not Objective.BOTTLENECK:
        yield _ObjectiveSearch(
            "the least latency (times to 0.1 %)",
            lambda device_of: latency_s(placement_problem, device_of),
            lambda instance, limit_s, start, prove: _by_engine(
                problem, instance, limit_s, start, brake, prove=prove
            ),
        )


def _by_engine(
    problem: Problem,
    instance: NetSplitInstance,
    limit_s: float,
    start: Sequence[int] | None,
    brake: Brake,
    *,
    prove: bool,
) -> EngineAnswer:
    """The answer of the chosen engine, or of CP-SAT if that one cannot be used.

    Args:
        prove: whether the bound counts; gurobi has no search without one.
    """
    own = switches_of(problem.search, NetSplit)
    seed, gap = problem.search.seed, own.gap
    note = ""
    if own.engine is Engine.GUROBI:
        try:
            return netsplit_gurobi.solve(instance, limit_s, start, seed=seed, gap=gap, brake=brake)
        except EngineUnavailableError as error:
            note = f"{error}, so OR-Tools solved it"
            log.warning("%s", note)
    answer = netsplit_cpsat.solve(
        instance, limit_s, start, seed=seed, gap=gap, brake=brake, prove=prove
    )
    return replace(answer, note="; ".join(part for part in (note, answer.note) if part))


def _device_order(problem: Problem) -> tuple[int, ...]:
    """The devices in an order in which neighbours are well linked."""
    return chain(problem.topology, tuple(range(len(problem.topology.devices))))


def _bottleneck_s(
    problem: PlacementProblem, device_of: Sequence[int], order: Sequence[int] | None
) -> float:
    """The bottleneck; inf if stages must be contiguous and are not."""
    if order is not None:
        position = {p: k for k, p in enumerate(order)}
        ahead = [position[p] for p in device_of]
        edges = ((tensor.producer, j) for tensor in problem.tensors for j in tensor.consumers)
        if any(ahead[i] > ahead[j] for i, j in edges):
            return math.inf
    return netsplit_bottleneck.bottleneck_s(problem, device_of)


# ---------------------------------------------------------------------------------------- search


def _best(case: _Case, search: _ObjectiveSearch, time_limit_s: float) -> _Found:
    """The answer of the finest model, or a known placement if that is better."""
    relaxed, answers = case.model.published_memory, list[EngineAnswer]()
    levels = _levels_to_whole(case.model) if search.whole else _levels(case.model, relaxed=relaxed)
    known = tuple(case.known)
    for k, instance in enumerate(levels):
        last = k + 1 == len(levels)
        share = 1.0 if len(levels) == 1 else (FINE_SHARE if last else 1 - FINE_SHARE)
        start = _start(instance, known, search.price)
        # A bound of groups is none of single operators, and one of the latency says little about
        # several microbatches.
        prove = relaxed or (last and case.whole and not _several(case.problem))
        answers.append(search.run(instance, time_limit_s * share, start, prove))
        placed, note = answers[-1].device_of, answers[-1].note
        known = known if placed is None else (placed, *known)
        if INTERRUPTED in note:
            break
    instance = levels[len(answers) - 1]
    space = _space(case.problem, search.name, len(instance.groups), note)
    found = _Found(answers[-1], space, _candidates(answers[-1]))
    return found if instance.relaxed else _or_known(search, instance, known, found)


def _candidates(answer: EngineAnswer) -> tuple[Candidate, ...]:
    return () if answer.device_of is None else (Candidate(answer.device_of, answer.order),)


def _or_known(
    search: _ObjectiveSearch,
    instance: NetSplitInstance,
    known: Sequence[Placement],
    found: _Found,
) -> _Found:
    """An answer, or a known placement that is better, with a group's members apart or by the list
    schedule.
    """
    fitting = [device_of for device_of in known if overflow(instance, device_of) <= 0]
    best = min(fitting, key=search.price, default=None)
    if best is None or search.price(best) >= _price_of(found.answer, search):
        return found
    if search.price(best) >= found.answer.latency_s:
        return replace(found, candidates=(*found.candidates, Candidate(best)))
    worse = replace(found.answer, status=Status.FEASIBLE, device_of=best, order=None)
    return replace(found, answer=worse, candidates=(Candidate(best), *found.candidates))


def _price_of(answer: EngineAnswer, search: _ObjectiveSearch) -> float:
    return math.inf if answer.device_of is None else search.price(answer.device_of)


def _levels(problem: PlacementProblem, *, relaxed: bool) -> tuple[NetSplitInstance, ...]:
    """The models that are solved one after the other; the published one has few groups only."""
    few = coplaced(problem, PER_DEVICE * problem.num_devices)
    many = coplaced(problem, FINE_GROUPS)
    if problem.num_operators <= FINE_GROUPS:
        many = tuple((i,) for i in range(problem.num_operators))
    chosen = (few,) if relaxed or len(few) == len(many) else (few, many)
    return tuple(instance_of(problem, groups, relaxed=relaxed) for groups in chosen)


def _levels_to_whole(problem: PlacementProblem) -> tuple[NetSplitInstance, ...]:
    """The whole graph; before it, if it is large, `FINE_GROUPS` groups."""
    whole = instance_of(problem, [(i,) for i in range(problem.num_operators)])
    if problem.num_operators <= FINE_GROUPS:
        return (whole,)
    return instance_of(problem, coplaced(problem, FINE_GROUPS)), whole


def _start(
    instance: NetSplitInstance, known: Sequence[Placement], price: PlacementPrice
) -> Placement | None:
    """The best known placement that keeps groups together and fits."""
    candidates = [grouped(instance, device_of) for device_of in known]
    fitting = [device_of for device_of in candidates if overflow(instance, device_of) <= 0]
    best = min(fitting, key=price, default=None)
    return best if best is not None and price(best) < math.inf else None


def _known(
    problem: Problem, placement_problem: PlacementProblem, strategies: Sequence[Strategy]
) -> dict[Placement, tuple[int, ...] | None]:
    """Placements of other solvers, whether they fit or not, with the order in which their operators
    start; None for that of the list schedule.
    """
    indices = operator_indices(problem.profile.graph)
    orders: dict[Placement, tuple[int, ...] | None] = {}
    for device_of in (
        *(_of_strategy(strategy, indices) for strategy in strategies),
        heft.place(placement_problem),
        place_m_topo(placement_problem),
    ):
        orders[device_of] = None
    rules: list[DispatchRule] = [earliest]
    if placement_problem.num_operators <= MAX_FAVOURITES:
        with suppress(NoFavouritesError):
            rules.append(m_sct_rule(placement_problem))
    for rule in rules:
        schedule = list_schedule(placement_problem, rule)
        if not isinstance(schedule, NoRoom):
            orders[tuple(schedule.device_of)] = schedule.order
    total_s = (placement_problem.forward_s + placement_problem.backward_s).sum(axis=0)
    orders.setdefault((int(np.argmin(total_s)),) * placement_problem.num_operators, None)
    return orders


def _is_placement(strategy: Strategy) -> bool:
    """Whether a strategy has neither replicas nor recomputation."""
    return all(len(one.devices) == 1 and not one.recompute for one in strategy.stages)


def _of_strategy(strategy: Strategy, indices: Mapping[str, int]) -> Placement:
    """A strategy as a placement; of replicas, the first device."""
    device_of = [0] * len(indices)
    for stage in strategy.stages:
        for name in stage.operators:
            device_of[indices[name]] = stage.devices[0]
    return tuple(device_of)


def _space(problem: Problem, objective: str, groups: int, note: str = "") -> str:
    """The placements that status and bound are about."""
    parts = ["placements without replicas or recomputation"]
    if objective:
        parts.append(f"{objective} over {groups} groups of operators")
    if switches_of(problem.search, NetSplit).relaxed:
        parts.append("as published: devices and links run any number of jobs at once")
    return "; ".join([*parts, *([note] if note else [])])
