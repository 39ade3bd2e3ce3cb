"""Dynamic programming over the downsets of the operator graph.

A pipeline is a chain of downsets {} = D_0 < D_1 < ... < D_S = all operators; stage s runs
D_s minus D_{s-1}. Devices are taken from one linear order, from its end, so the last stage has
the last devices. Whatever a stage costs follows from the state

    (D, k, r, W)    D: what is still to be placed; k: devices in use behind it;
                    r, W: width and warm-up depth of the first stage behind the cut

because k and r name the devices of that stage, hence links, device types and memory limits.

    V(all, 0, -, -) = nothing
    V(D', k + r', r', W') = best over D > D' of: stage D minus D' put in front of V(D, k, r, W)

    W' = ceil(W r / r') + 1, or one more; at most ceil(M / r'); for PipeDream ceil((k + r') / r')
    the stage fits the memory of its smallest device, with its stash or, if allowed, without;
    whole or, where one device has no room for the whole model, in parts over its replicas

"Put in front" is `costs.closed_form.extend`: each value is a tuple (round trip, slowest period,
exposed end), whose sum is to be least; for PipeDream's schedule, whose flow has no end, the slowest
period alone. No tuple that another one beats in everything can lead to
a better sum, so a state keeps those that none beats (its Pareto front), and of these only what a
bound on the rest does not rule out against the best pipeline so far.

The answer is exact for the closed form, the blocks and the order of devices; the order, and on
hosts with shared cores the number of devices, is an outer loop. On many devices the widths are
restricted, see `devices.py`. The graph is searched coarsely first and then in more and
more detail, as long as the work allows; each search has the last one's pipeline to beat. What
stages take is put together in `blocks.py`, the inner loops are in `kernels.py`. States as in
PipeDream (Narayanan et al., SOSP 2019, section 3.1) and Tarnawski et al. (NeurIPS 2020), which have
neither latency nor warm-up in theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.artefacts.graph import holders, predecessors
from planner.artefacts.options import Objective, Recompute
from planner.artefacts.problem import Problem, Result, Status
from planner.artefacts.strategy import (
    Stage,
    Strategy,
    shared_level,
    shares_devices,
)
from planner.clusters.routes import bandwidth_bytes_per_s
from planner.costs.evaluate import closed_form_s, evaluate, evaluation_work_s
from planner.costs.operators import sums_are_bounds
from planner.costs.overlap import with_overlap
from planner.costs.stage_memory import limit_bytes
from planner.costs.update import update_copies
from planner.solvers.antichain import kernels
from planner.solvers.antichain.blocks import sets_of, times_of
from planner.solvers.antichain.devices import (
    ALL_WIDTHS,
    DeviceRow,
    orders_of,
    rounds_of,
    rows_of,
    stage_devices,
    with_less_memory,
)
from planner.solvers.antichain.parts import may_share, parts_of
from planner.solvers.graphs.coarsen import Coarsening, coarsen, summary
from planner.solvers.graphs.downsets import Downsets, count_downsets, downsets, members
from planner.support.arrays import Ints
from planner.support.errors import OptionError

# The numbers of downsets of the first search and of the last before all of them, by how much they
# grow, and how much is worth another search.
_DOWNSETS, _MAX_DOWNSETS, _FINER, _WORTH_IT = 40, 10_000, 4, 1.5
# Maximum number of downsets for --exact.
_MAX_EXACT = 200_000
# The work (labels extended, pairs of downsets seen) per second of the limit, and of the finest
# search at most. Measured on a core at 2.9 GHz shared with others: 40 million per second on 64
# devices.
_WORK_PER_S, _WORK = 2e7, 3e7
# A search that takes more work than this is cut off, unless all was asked for.
_MAX_WORK = 10**8
# Attempts to respect a memory peak that the closed form underrated.
_MEMORY_ATTEMPTS = 6
# Up to so many other pipelines go to the judge as well, which simulates those that may be faster:
# of pipelines over shared cards the closed form says little.
_OTHERS = 8
# Two figures that differ by less, relatively, are the same but for rounding.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class _PricedPipeline:
    """A pipeline and its objective by the closed form."""

    objective_s: float
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class _Margin:
    """How carefully memory is judged.

    Attributes:
        cautious: whether workspaces are those of a pass over the whole graph, which no stage
            exceeds, rather than those of single blocks.
        spare_bytes: memory of each device to leave empty.
    """

    cautious: bool = False
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _CoarseAnswer:
    """The answer of a search over one coarsening.

    Attributes:
        pipelines: the best last.
        coarse: the blocks.
        bound_s: no pipeline of the space is better, unless something was dropped.
        exact: whether nothing was dropped.
        work: see `_WORK`.
    """

    pipelines: tuple[_PricedPipeline, ...]
    coarse: Coarsening
    bound_s: float
    exact: bool
    work: float


def solve(problem: Problem, time_limit_s: float, known: Sequence[Strategy] = ()) -> Result:
    """The best pipeline of blocks over the orders of devices that are tried, and never one that is
    worse, by the closed form, than the pipelines that are known.

    Args:
        time_limit_s: limit of work, in seconds of an ordinary core. A first search, over coarse
            blocks, is made whatever it takes.
        known: strategies that fit, to start from and to beat.

    Raises:
        OptionError: if the graph has too many downsets to look at all of them.
    """
    if problem.search.exact:
        _check_size(problem)
    seeds, rows = _seeds(problem, known), rows_of(problem)
    margin, work = _Margin(), 0.0
    for _ in range(_MEMORY_ATTEMPTS):
        searched = _refined(problem, seeds, rows, margin, _WORK_PER_S * time_limit_s - work)
        work += searched.work
        if not searched.pipelines:
            break
        best = searched.pipelines[-1]
        if best in seeds:
            return _result(problem, searched, margin, work)
        evaluation = evaluate(problem, best.strategy)
        if evaluation.shortage is None:
            return _result(problem, searched, margin, work)
        # The closed form underrated the peak that is read off the action lists.
        used = evaluation.memory.keys()
        short = max(
            parts.total_bytes - limit_bytes(problem, used, device)
            for device, parts in evaluation.memory.items()
        )
        spare = max(2 * margin.spare_bytes, margin.spare_bytes + short)
        margin = _Margin(True, spare if margin.cautious else 0)
    fitting = _whatever_fits(problem, seeds, rows)
    return replace(fitting, work_s=fitting.work_s + work / _WORK_PER_S)


def _check_size(problem: Problem) -> None:
    feeds = predecessors(problem.profile.graph)
    if count_downsets(feeds, _MAX_EXACT) > _MAX_EXACT:
        raise OptionError(
            f"--exact: the graph has more than {_MAX_EXACT} downsets, too many to look at all"
            " pairs of them; give --max-downsets N instead, or neither"
        )


def _seeds(problem: Problem, known: Sequence[Strategy]) -> tuple[_PricedPipeline, ...]:
    """The known strategies that are pipelines of whole operators, the space searched here; the best
    last.
    """
    pipelines = dict.fromkeys(
        one
        for one in known
        if not shares_devices(one) and all(stage.sharding is None for stage in one.stages)
    )
    priced = [_PricedPipeline(closed_form_s(problem, strategy), strategy) for strategy in pipelines]
    return tuple(sorted(priced, key=lambda one: -one.objective_s))


def _result(problem: Problem, searched: _CoarseAnswer, margin: _Margin, work: float) -> Result:
    *others, best = searched.pipelines
    bounds = sums_are_bounds(problem)
    exact = searched.exact and margin == _Margin() and not bounds
    space = _space(problem, searched.coarse)
    if not exact:
        space += "; some ways to run a state were dropped, or memory was judged with a margin"
        space += ", or hosts of devices are late at times" * bounds
    proved = exact and best.objective_s <= searched.bound_s * (1 + _SAME)
    everything = searched.coarse.exact and len(problem.topology.devices) <= ALL_WIDTHS
    others.sort(key=lambda one: one.objective_s)
    distinct = dict.fromkeys(one.strategy for one in others if one.strategy != best.strategy)
    return Result(
        Status.OPTIMAL if everything and proved else Status.FEASIBLE,
        best.strategy,
        bound_s=searched.bound_s if exact else None,
        space=space,
        others=tuple(distinct)[:_OTHERS],
        work_s=work / _WORK_PER_S,
    )


def _whatever_fits(
    problem: Problem, seeds: Sequence[_PricedPipeline], rows: Sequence[DeviceRow]
) -> Result:
    """The best of the known strategies and of pipelines found without regard to memory that fit
    after all; else why there is none. (That the search finds nothing is no proof.)
    """
    coarse = _coarsened(problem, _DOWNSETS)
    endless = [with_less_memory(row, -math.inf) for row in rows]
    searched = _search(problem, coarse, endless, (), _MAX_WORK, True)
    work_s = searched.work / _WORK_PER_S
    space = f"{_space(problem, coarse)}; with memory left out of the search"
    fitting, shortage = list(seeds), None
    for one in searched.pipelines:
        evaluation = evaluate(problem, one.strategy)
        short, work_s = evaluation.shortage, work_s + evaluation_work_s(one.strategy, evaluation)
        if short is None:
            fitting.append(one)
        else:
            shortage = short
    if not fitting:
        reason = shortage or "no pipeline of these widths uses these devices"
        users = holders(problem.profile.graph)
        if problem.training.schedule.is_asynchronous and any(len(v) > 1 for v in users.values()):
            reason += (
                "; operators that share a trained parameter have to be in one stage, because every"
                " stage steps by itself"
            )
        short_of_memory = shortage is not None
        return Result(
            Status.UNKNOWN, None, space=space, reason=reason, short_of_memory=short_of_memory,
            work_s=work_s,
        )  # fmt: skip
    best = min(fitting, key=lambda one: one.objective_s)
    return Result(Status.FEASIBLE, best.strategy, space=space, work_s=work_s)


def _space(problem: Problem, coarse: Coarsening) -> str:
    """What was searched, in words."""
    count = len(problem.topology.devices)
    orders = " or ".join(_shown(order) for order in orders_of(problem))
    some, parts = "", ""
    if may_share(problem):
        parts = ", stages that do not fit whole in parts over all their replicas"
    if count > ALL_WIDTHS:
        every, *_, powers = rounds_of(problem, count)
        asynchronous = problem.training.schedule.is_asynchronous
        deeper = "" if asynchronous else " or all with one more"
        aligned = " at multiples of their width" if powers.aligned else ""
        some = (
            f", stages of any multiple of {every.marks[0]} devices or of"
            f" {' '.join(map(str, powers.widths))}{aligned}, cuts after every {powers.marks[0]},"
            f" all stages with the default warm-up depth{deeper}"
        )
    return (
        f"pipelines of {summary(coarse)}; devices in the order {orders}{some}{parts}; by the closed"
        " forms of time and memory"
    )


def _shown(order: tuple[int, ...]) -> str:
    """An order of devices in words, shortened where it is long."""
    natural = order == tuple(range(len(order))) and len(order) > 2
    if natural:
        return f"0..{len(order) - 1}"
    if len(order) <= 2 * ALL_WIDTHS:
        return " ".join(map(str, order))
    return f"{' '.join(map(str, order[:4]))} .. {order[-1]}"


# ------------------------------------------------------------------- coarse, then in more detail


def _refined(
    problem: Problem,
    seeds: tuple[_PricedPipeline, ...],
    rows: Sequence[DeviceRow],
    margin: _Margin,
    work: float,
) -> _CoarseAnswer:
    """The best pipeline over finer and finer blocks, as far as the work allows or the options ask.

    Args:
        seeds: pipelines to beat, the best last.
        work: limit of the work of all searches; the first one is made whatever it takes.
    """
    asked = problem.search.exact or problem.search.max_downsets is not None
    rows = [with_less_memory(row, margin.spare_bytes) for row in rows]
    most_work = np.iinfo(np.int64).max if asked else _MAX_WORK
    limit: int | None = min(_DOWNSETS, problem.search.max_downsets or _DOWNSETS)
    cautious = margin.cautious
    searched = _search(problem, _coarsened(problem, limit), rows, seeds, most_work, cautious)
    done = searched.work
    while not searched.coarse.exact:
        limit = _finer(problem, limit, searched, work - done)
        if limit is None and not problem.search.exact:
            break
        coarse = _coarsened(problem, limit)
        searched = _search(problem, coarse, rows, searched.pipelines, most_work, cautious)
        done += searched.work
    return replace(searched, work=done)


def _finer(problem: Problem, limit: int | None, searched: _CoarseAnswer, work: float) -> int | None:
    """How many downsets to coarsen to after a search: four times as many, or, where nobody asked
    for more, what the work allows. None for all of them, or where it is enough.

    Args:
        work: limit of the next search.
    """
    count = searched.coarse.num_downsets
    if limit is None or limit == problem.search.max_downsets:
        return None
    if problem.search.exact:
        return _FINER * limit if _FINER * limit <= _MAX_DOWNSETS else None
    if problem.search.max_downsets is not None:
        return min(_FINER * limit, problem.search.max_downsets)
    # Pairs, and with them the work, grow with the square.
    affordable = math.isqrt(int(count**2 * max(0.0, min(work, _WORK)) / searched.work))
    finer = min(_FINER * limit, affordable, _MAX_DOWNSETS)
    return finer if finer >= _WORTH_IT * count and finer > limit else None


def _coarsened(problem: Problem, limit: int | None) -> Coarsening:
    profile = problem.profile
    times = [o.forward_s + o.backward_s for o in profile.operators]
    order = orders_of(problem)[0]
    rates = [bandwidth_bytes_per_s(problem.topology, p, q) for p, q in pairwise(order)]
    usual = float(np.median(rates)) if rates else math.inf
    return coarsen(profile.graph, times, limit, s_per_byte=1 / usual)


def _search(
    problem: Problem,
    coarse: Coarsening,
    rows: Sequence[DeviceRow],
    pipelines: tuple[_PricedPipeline, ...],
    most_work: int,
    cautious: bool,
) -> _CoarseAnswer:
    """The best pipeline over all rows of devices.

    Args:
        pipelines: pipelines to beat, the best last.
        cautious: see `_Margin`.
    """
    subsets = downsets(coarse.predecessors)
    sets = sets_of(problem, coarse, cautious)
    times, parts = times_of(problem, coarse, subsets), parts_of(problem, coarse, subsets)
    cuts = kernels.cut_bytes(subsets.masks, sets)
    exact, work, bound_s = True, 0.0, math.inf
    for row in rows:
        best_s = pipelines[-1].objective_s if pipelines else math.inf
        objective, stages, dropped, extended = kernels.search(
            subsets, times, sets, parts, cuts, row.moves, _training(problem, len(row.order)),
            kernels.SearchLimits(best_s, row.labels, most_work),
        )  # fmt: skip
        exact, work = exact and not dropped, work + extended + len(subsets.masks) ** 2 / 2
        bound_s = min(bound_s, float(objective))
        if len(stages):
            strategy = _strategy(problem, coarse, subsets, stages, row)
            estimated = len(sets.tied) or any(shared_level(stage) for stage in strategy.stages)
            priced_s = float(objective)
            if estimated:  # the judge overlaps what is exchanged, as far as it fits
                priced_s = closed_form_s(problem, with_overlap(problem, strategy))
            better = (_PricedPipeline(priced_s, strategy),)
            pipelines = (*pipelines, *better) if priced_s < best_s else (*better, *pipelines)
    return _CoarseAnswer(pipelines, coarse, bound_s, exact, work)


def _training(problem: Problem, count: int) -> kernels.SearchOptions:
    asynchronous, rounds = problem.training.schedule.is_asynchronous, problem.num_microbatches
    # objective = total * round trip + slowest period + back * slowest backward + exposed * end, of
    # the labels of `closed_form.extend`; `trip`: whether the round trip is needed at all.
    match problem.training.objective, asynchronous:
        case Objective.ITERATION, False:
            total, trip, back, exposed, even = 1.0, True, 1.0, 1.0, float(rounds)
        case Objective.ITERATION, True:
            total, trip, back, exposed, even = 0.0, True, 0.0, 0.0, float(rounds)
        case Objective.BOTTLENECK, False:
            total, trip, back, exposed, even = 0.0, False, 1.0, 0.0, 1.0
        case Objective.BOTTLENECK, True:
            total, trip, back, exposed, even = 0.0, False, 0.0, 0.0, 1.0
        case _:
            total, trip, back, exposed, even = 1.0, True, 1.0, 0.0, 0.0
    objective = problem.training.objective
    return kernels.SearchOptions(
        num_devices=count,
        num_microbatches=rounds,
        moments=update_copies(problem) - 1,
        total=total,
        trip=trip,
        back=back,
        exposed=exposed,
        even=even,
        may_keep=not problem.training.recompute.is_everywhere,
        may_recompute=problem.training.recompute is not Recompute.NONE,
        phases=problem.training.schedule.has_phases and objective is Objective.ITERATION,
        steady=asynchronous and objective is not Objective.LATENCY,
        stashing=asynchronous,
        sharing=may_share(problem),
        overlap=problem.training.overlap,
    )


def _strategy(
    problem: Problem,
    coarse: Coarsening,
    subsets: Downsets,
    rows: Ints,
    devices: DeviceRow,
) -> Strategy:
    """The strategy that the kernel's rows describe."""
    operators, moves = problem.profile.graph.operators, devices.moves
    stages = []
    for before, behind, c, recompute, level in rows.tolist():
        blocks = members(subsets.masks[behind] & ~subsets.masks[before])
        inside = sorted(v for b in blocks for v in coarse.blocks[b])
        stage = Stage.whole(
            operators=tuple(operators[v].name for v in inside),
            devices=stage_devices(devices.order, int(moves.k[c]), int(moves.r[c])),
            warmup=int(moves.w[c]),
            recompute=bool(recompute),
        )
        stages.append(replace(stage, over=stage.num_replicas, zero=level) if level else stage)
    return Strategy(
        tuple(stages),
        problem.training.schedule,
        problem.num_microbatches,
        problem.training.vertical_sync,
    )
