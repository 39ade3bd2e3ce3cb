"""NetSplit: every operator gets a device by a constraint model (`netsplit_model.py`).

    (1) the placement problem in arrays, and a first answer: if not even all devices together hold
        the model, there is none                                               `placing`
    (2) the best known placement: what other solvers found, list schedules (HEFT, m-ETF, m-TOPO),
        and one device alone                                                   `_known`
    (3) co-placement to few groups, 2 x devices as in the thesis, and the model on them; from its
        answer the model on more groups, each operator by itself where there are few
                                                                               `_levels`
    (4) what the evaluator says does not fit is tried again with that much less memory on the
        devices that were over                                                 `solve`

The objective latency is the model's own. For the bottleneck it is `netsplit_bottleneck`'s. For an
iteration of several microbatches, which has a part of either, both are asked; the judge chooses.
Engines: CP-SAT, or gurobi if it is asked for and covers a model of that size.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.clusters.routes import chain
from planner.costs.evaluate import evaluate
from planner.problem import Objective, Problem, Result, Status, switches_of
from planner.solvers.engines.engine import Engine
from planner.solvers.engines.watch import INTERRUPTED
from planner.solvers.netsplit import bottleneck as netsplit_bottleneck
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit import gurobi as netsplit_gurobi
from planner.solvers.netsplit.model import Answer, Instance, grouped, instance_of, overflow
from planner.solvers.netsplit.options import NetSplit
from planner.solvers.placement import heft, m_topo
from planner.solvers.placement.coplacement import coplaced, kept_bytes
from planner.solvers.placement.list_schedule import NoRoom, earliest, list_schedule
from planner.solvers.placement.problem import Placing, latency_s, placing_of, tighter
from planner.solvers.placement.stages import strategies_of
from planner.strategy import Strategy, operator_indices
from planner.units import format_bytes

log = logging.getLogger(__name__)

PER_DEVICE = 2
"""Co-placement goes on to so many groups per device, as in the thesis."""

FINE_GROUPS = 120
"""The second model's: with more, it finds less in the time of a plan."""

FINE_SHARE = 0.7
"""Of the time, for the second model."""

MOST_KNOWN = 3
"""So many of the known placements are shown to the judge besides."""

ROUND_SHARES = (0.7, 0.2, 0.1)
"""Of the time, for searches with less memory each time; what the evaluator counts holds."""

Device = tuple[int, ...]
Price = Callable[[Sequence[int]], float]


@dataclass(frozen=True, slots=True)
class _Search:
    """One objective.

    Attributes:
        name: of what is minimised.
        price: of a placement, in s.
        run: the engine, on an instance, with a limit in s and a placement to start from.
        whole: whether the last instance is always the whole graph, operators one by one, so that
            the bound speaks of it.
    """

    name: str
    price: Price
    run: Callable[[Instance, float, Sequence[int] | None], Answer]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of a search.

    Attributes:
        answer: the engine's, or with a better placement from elsewhere.
        space: what its status and bound speak of.
        placements: that may be the best, with the order of forwards where there is one; the best by
            the model first.
    """

    answer: Answer
    space: str
    placements: tuple[tuple[Device, Device | None], ...]


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The best placement, as stages.

    Args:
        time_limit_s: for all searches together.
    """
    placing = replace(placing_of(problem), doubled=switches_of(problem.options, NetSplit).relaxed)
    need, room = sum(kept_bytes(placing).values()), int(placing.capacity_bytes.clip(0).sum())
    if need > room:
        largest = int(placing.capacity_bytes.max()) + problem.options.reserve_bytes
        reason = (
            f"parameters with gradients and optimizer state, and what is kept for backwards, take"
            f" {format_bytes(need)}; the limit is {format_bytes(largest)} per device, beside"
            f" reserves all together have {format_bytes(room)}"
        )
        return Result(Status.INFEASIBLE, None, space=_space(problem, "", 0), reason=reason)
    shortage = None
    for share in ROUND_SHARES:
        found = _searched(problem, placing, time_limit_s * share)
        if shortage is not None:
            found = _of_less_memory(found, shortage)
        if found.strategy is None or INTERRUPTED in found.space:
            return found
        fitting = [s for s in (found.strategy, *found.others) if not evaluate(problem, s).shortage]
        if fitting:
            status = found.status if fitting[0] == found.strategy else Status.FEASIBLE
            return replace(found, status=status, strategy=fitting[0], others=tuple(fitting[1:]))
        shortage = evaluate(problem, found.strategy).shortage
        home = _of_strategy(found.strategy, operator_indices(problem.profile.graph))
        placing = tighter(problem, placing, home, found.strategy, kept_bytes(placing))
    return Result(Status.UNKNOWN, None, space=found.space, reason=shortage)


def _of_less_memory(found: Result, shortage: str) -> Result:
    """What a search with less memory than there is says of the problem: neither that a plan is the
    best, nor that there is none.

    Args:
        shortage: why there was not enough before.
    """
    status = Status.FEASIBLE if found.strategy is not None else Status.UNKNOWN
    reason = None if found.strategy is not None else shortage
    return replace(found, status=status, bound_s=None, reason=reason)


def _searched(problem: Problem, placing: Placing, time_limit_s: float) -> Result:
    """The answers to all that is asked for, the best first, as stages."""
    searches, known = list(_searches(problem, placing)), _known(problem, placing)
    outcomes: list[_Outcome] = []
    for search in searches:
        if not any(INTERRUPTED in outcome.answer.note for outcome in outcomes):
            limit_s = time_limit_s / len(searches)
            outcomes.append(_best(problem, placing, search, tuple(known), limit_s))
    answer, space = outcomes[0].answer, outcomes[0].space
    strategies = tuple(
        dict.fromkeys(
            strategy
            for outcome in outcomes
            for device_of, order in outcome.placements
            for strategy in strategies_of(problem, device_of, order)
        )
    )
    if strategies and not placing.doubled:
        # By the simulator, another placement that is known may be better.
        price = searches[0].price
        near = sorted(known, key=price)[:MOST_KNOWN]
        more = (one for d in near for one in strategies_of(problem, d, known[d]))
        strategies = tuple(dict.fromkeys((*strategies, *more)))
    if not strategies:
        return Result(
            answer.status, None, space=space, reason=f"no placement fits in {space}",
            reproducible=answer.reproducible,
        )  # fmt: skip
    of_iteration = problem.options.objective is Objective.ITERATION
    status = Status.FEASIBLE if of_iteration or answer.device_of is None else answer.status
    return Result(
        status,
        strategies[0],
        bound_s=None if of_iteration else answer.bound_s,
        space=space,
        reproducible=answer.reproducible,
        others=strategies[1:],
    )


def _searches(problem: Problem, placing: Placing) -> Iterator[_Search]:
    """What is minimised, the most telling first."""
    options, own = problem.options, switches_of(problem.options, NetSplit)
    several = options.objective is Objective.ITERATION and options.num_microbatches > 1
    if options.objective is Objective.BOTTLENECK or several:
        order = _device_order(problem) if own.contiguous else None
        yield _Search(
            "the smallest bottleneck",
            lambda device_of: _bottleneck_s(placing, device_of, order),
            lambda instance, limit_s, start: netsplit_bottleneck.solve(
                instance, limit_s, start, order, options.seed, own.engine
            ),
            whole=True,
        )
    if options.objective is not Objective.BOTTLENECK:
        yield _Search(
            "the least latency (times to 0.1 %)",
            lambda device_of: latency_s(placing, device_of),
            lambda instance, limit_s, start: _by_engine(problem, instance, limit_s, start),
        )


def _by_engine(
    problem: Problem, instance: Instance, limit_s: float, start: Sequence[int] | None
) -> Answer:
    """By the engine that is asked for, or by CP-SAT where that cannot be used."""
    own = switches_of(problem.options, NetSplit)
    seed, gap = problem.options.seed, own.gap
    note = ""
    if own.engine is Engine.GUROBI:
        try:
            return netsplit_gurobi.solve(instance, limit_s, start, seed=seed, gap=gap)
        except netsplit_gurobi.EngineUnavailableError as error:
            note = f"{error}, so OR-Tools solved it"
            log.warning("%s", note)
    answer = netsplit_cpsat.solve(instance, limit_s, start, seed=seed, gap=gap)
    return replace(answer, note="; ".join(part for part in (note, answer.note) if part))


def _device_order(problem: Problem) -> tuple[int, ...]:
    """Devices such that neighbours are well linked."""
    return chain(problem.topology, tuple(range(len(problem.topology.devices))))


def _bottleneck_s(placing: Placing, device_of: Sequence[int], order: Sequence[int] | None) -> float:
    """The bottleneck; inf if stages must be contiguous and are not."""
    if order is not None:
        position = {p: k for k, p in enumerate(order)}
        ahead = [position[p] for p in device_of]
        edges = ((flow.producer, j) for flow in placing.tensors for j in flow.consumers)
        if any(ahead[i] > ahead[j] for i, j in edges):
            return math.inf
    return netsplit_bottleneck.bottleneck_s(placing, device_of)


# ---------------------------------------------------------------------------------------- search


def _best(
    problem: Problem,
    placing: Placing,
    search: _Search,
    known: tuple[Device, ...],
    time_limit_s: float,
) -> _Outcome:
    """The answer of the finest model, and a placement from before it that may be better.

    Args:
        known: placements to start from.
    """
    levels = (
        _levels_to_whole(placing)
        if search.whole
        else _levels(placing, relaxed=switches_of(problem.options, NetSplit).relaxed)
    )
    answer, instance = None, levels[0]
    for k, instance in enumerate(levels):
        last = k + 1 == len(levels)
        share = 1.0 if len(levels) == 1 else (FINE_SHARE if last else 1 - FINE_SHARE)
        answer = search.run(instance, time_limit_s * share, _start(instance, known, search.price))
        if answer.device_of is not None:
            known = (answer.device_of, *known)
        if INTERRUPTED in answer.note:
            break
    if answer is None:
        raise ValueError("there is no level")
    space = _space(problem, search.name, len(instance.groups), answer.note)
    own = () if answer.device_of is None else ((answer.device_of, answer.order),)
    if instance.relaxed:
        return _Outcome(answer, space, own)
    # With a group's members apart, or by the list schedule that is run, one may be better.
    fitting = [one for one in known if overflow(instance, one) <= 0]
    best = min(fitting, key=search.price, default=None)
    if best is None or search.price(best) >= _price_of(answer, search):
        return _Outcome(answer, space, own)
    if search.price(best) >= answer.latency_s:
        return _Outcome(answer, space, (*own, (best, None)))
    worse = replace(answer, status=Status.FEASIBLE, device_of=best, order=None)
    return _Outcome(worse, space, ((best, None), *own))


def _price_of(answer: Answer, search: _Search) -> float:
    return math.inf if answer.device_of is None else search.price(answer.device_of)


def _levels(placing: Placing, *, relaxed: bool) -> tuple[Instance, ...]:
    """The models that are solved one after the other; the published one has few groups only."""
    few = coplaced(placing, PER_DEVICE * placing.num_devices)
    many = coplaced(placing, FINE_GROUPS)
    if placing.num_operators <= FINE_GROUPS:
        many = tuple((i,) for i in range(placing.num_operators))
    chosen = (few,) if relaxed or len(few) == len(many) else (few, many)
    return tuple(instance_of(placing, groups, relaxed=relaxed) for groups in chosen)


def _levels_to_whole(placing: Placing) -> tuple[Instance, ...]:
    """The whole graph; before it, where it is large, so many groups that much is found."""
    whole = instance_of(placing, [(i,) for i in range(placing.num_operators)])
    if placing.num_operators <= FINE_GROUPS:
        return (whole,)
    return instance_of(placing, coplaced(placing, FINE_GROUPS)), whole


def _start(instance: Instance, known: Sequence[Device], price: Price) -> Device | None:
    """The best known placement that keeps groups together and fits."""
    candidates = [grouped(instance, device_of) for device_of in known]
    candidates = [one for one in candidates if overflow(instance, one) <= 0]
    best = min(candidates, key=price, default=None)
    return best if best is not None and price(best) < math.inf else None


def _known(problem: Problem, placing: Placing) -> dict[Device, Sequence[int] | None]:
    """Placements that others found, that fit the model's memory or not, with the order in which
    their operators start if it is not that of a list schedule.
    """
    indices = operator_indices(problem.profile.graph)
    found: dict[Device, Sequence[int] | None] = {}
    for device_of in (
        *(_of_strategy(strategy, indices) for strategy in problem.known),
        heft.place(placing),
        m_topo.place(placing),
    ):
        found[tuple(device_of)] = None
    by_etf = list_schedule(placing, earliest)
    if not isinstance(by_etf, NoRoom):
        found[tuple(by_etf.device_of)] = by_etf.order
    total_s = (placing.forward_s + placing.backward_s).sum(axis=0)
    found.setdefault((int(np.argmin(total_s)),) * placing.num_operators, None)
    return found


def _of_strategy(strategy: Strategy, indices: Mapping[str, int]) -> Device:
    """A strategy as a placement: of replicas the first."""
    device_of = [0] * len(indices)
    for stage in strategy.stages:
        for name in stage.operators:
            device_of[indices[name]] = stage.devices[0]
    return tuple(device_of)


def _space(problem: Problem, what: str, groups: int, note: str = "") -> str:
    """What status and bound speak of."""
    parts = ["placements without replicas or recomputation"]
    if what:
        parts.append(f"{what} over {groups} groups of operators")
    if switches_of(problem.options, NetSplit).relaxed:
        parts.append("as published: devices and links do any number of things at once")
    return "; ".join([*parts, *([note] if note else [])])
