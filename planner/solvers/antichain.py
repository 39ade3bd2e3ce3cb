"""Dynamic programming over the downsets of the operator graph.

A pipeline is a chain of downsets {} = D_0 < D_1 < ... < D_S = all operators; stage s runs
D_s minus D_{s-1}. Devices are taken from one linear order, from its end, so the last stage has
the last devices. Whatever a stage costs follows from the state

    (D, k, r, W)    D: what is still to be placed; k: devices in use behind it;
                    r, W: width and warm-up depth of the first stage behind the cut

because k and r name the devices of that stage, hence links, device types and memory limits.

    V(all, 0, -, -) = nothing
    V(D', k + r', r', W') = best over D > D' of: stage D minus D' put in front of V(D, k, r, W)

    W' = ceil(W r / r') + 1, or one more; at most ceil(M / r')
    the stage fits the memory of its smallest device, with its stash or, if allowed, without

"Put in front" is `costs.closed_form.extend`: each value is a tuple (round trip, slowest period,
exposed end), whose sum is to be least. No tuple that another one beats in everything can lead to
a better sum, so a state keeps those that none beats (its Pareto front), and of these only what a
bound on the rest does not rule out against the best pipeline so far.

The answer is exact for the closed form, the blocks and the order of devices; the order, and on
hosts with shared cores the number of devices, is an outer loop. On many devices the widths are
restricted, see `_rounds`. The graph is searched coarsely first and then in more and more detail, as
long as the work allows; each search has the last one's pipeline to beat. The inner loops are in
`antichain_kernels.py`. States as in PipeDream (Narayanan et al., SOSP 2019, section 3.1) and
Tarnawski et al. (NeurIPS 2020), which have neither latency nor warm-up in theirs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, permutations, product

import numpy as np

from planner.coarsen import Coarsening, coarsen, summary
from planner.costs.closed_form import objective_s
from planner.costs.collectives import ring_links, slowest_link
from planner.costs.compute import slowdowns, step_s, times_on
from planner.costs.evaluate import evaluate, stage_costs
from planner.costs.memory import limit_bytes, operator_workspaces, stage_memory
from planner.errors import OptionError
from planner.graph import (
    Parameter,
    consumers,
    holders,
    predecessors,
    producers,
    tensors_by_name,
)
from planner.order import Downsets, count_downsets, csr, downsets, members, pack
from planner.problem import Objective, Problem, Recompute, Result, Status
from planner.profile import Profile, storage_owner
from planner.solvers import antichain_kernels as kernels
from planner.solvers import data_parallel, even, pipedream, single
from planner.strategy import ScheduleName, Stage, Strategy
from planner.topology import bandwidth_bytes_per_s, chain, device_type, host_order, pair_widths

# The numbers of downsets of the first search and of the last before all of them, by how much they
# grow, and how much is worth another search.
_DOWNSETS, _MOST_DOWNSETS, _FINER, _WORTH_IT = 40, 10_000, 4, 1.5
# Beyond so many, --exact is refused.
_MOST_EXACT = 200_000
# The work (labels extended, pairs of downsets seen) of the finest search: a second or two.
_WORK = 3e7
# A search that takes more work than this is cut off, unless all was asked for.
_MOST_WORK = 10**8
# On more devices than this, see `_rounds`.
_ALL_WIDTHS = 8
_MARKS = 64
# A label is a way to run what lies behind a cut; a state keeps so many that do not beat each other
# (all of them if the answer must be exact).
_LABELS, _FEW_LABELS, _ALL_LABELS = 32, 4, 2**62
# Orders of distinct device types that are tried.
_TYPE_ORDERS = 6
# Attempts to respect a memory peak that the closed form underrated.
_MEMORY_ATTEMPTS = 6
# Up to so many other pipelines within this factor of the best go to the judge as well.
_OTHERS, _CLOSE = 3, 1.1
# Two figures that differ by less, relatively, are the same but for rounding.
_SAME = 1e-9
# Whose strategies there are to beat where none are known.
_PLAIN = (single.solve, data_parallel.solve, even.solve, pipedream.solve)


@dataclass(frozen=True, slots=True)
class _Found:
    """A pipeline and what the closed form says of it."""

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
class _Round:
    """The combinations of devices of one search.

    Attributes:
        marks: numbers of devices that may be in use behind a cut, ascending; the last is all.
        widths: numbers of replicas that a stage may have, ascending.
        aligned: whether a stage of width r comes only where a multiple of r is in use behind it.
        extras: microbatches in flight beyond the least that a stage may choose from, ascending.
        labels: that a state keeps at most.
    """

    marks: tuple[int, ...]
    widths: tuple[int, ...]
    aligned: bool
    extras: tuple[int, ...]
    labels: int


@dataclass(frozen=True, slots=True)
class _Row:
    """Devices in one linear order, as the kernel sees them.

    Attributes:
        order: the devices.
        moves: how they can be taken.
        labels: that a state keeps.
    """

    order: tuple[int, ...]
    moves: kernels.Moves
    labels: int


@dataclass(frozen=True, slots=True)
class _Searched:
    """What a search over one coarsening came to.

    Attributes:
        found: pipelines, the best last.
        coarse: the blocks.
        bound_s: no pipeline of the space is better, unless something was dropped.
        exact: whether nothing was dropped.
        work: see `_WORK`.
    """

    found: tuple[_Found, ...]
    coarse: Coarsening
    bound_s: float
    exact: bool
    work: float


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The best pipeline of blocks over the orders of devices that are tried, and never one that is
    worse, by the closed form, than the strategies that are known (`Problem.known`, or the plain
    solvers').

    Args:
        time_limit_s: not needed; the work is bounded.

    Raises:
        OptionError: if the graph has too many downsets to look at all of them.
    """
    if problem.options.exact:
        _check_size(problem)
    seeds, rows = _seeds(problem), _rows(problem)
    margin = _Margin()
    for _ in range(_MEMORY_ATTEMPTS):
        searched = _refined(problem, seeds, rows, margin)
        if not searched.found:
            break
        best = searched.found[-1]
        if best in seeds:
            return _result(problem, searched, margin)
        evaluation = evaluate(problem, best.strategy)
        if evaluation.shortage is None:
            return _result(problem, searched, margin)
        # The closed form underrated the peak that is read off the action lists.
        used = evaluation.memory.keys()
        short = max(
            parts.total_bytes - limit_bytes(problem, used, device)
            for device, parts in evaluation.memory.items()
        )
        spare = max(2 * margin.spare_bytes, margin.spare_bytes + short)
        margin = _Margin(True, spare if margin.cautious else 0)
    return _whatever_fits(problem, seeds, rows)


def _check_size(problem: Problem) -> None:
    feeds = predecessors(problem.profile.graph)
    if count_downsets(feeds, _MOST_EXACT) > _MOST_EXACT:
        raise OptionError(
            f"--exact: the graph has more than {_MOST_EXACT} downsets, too many to look at all"
            " pairs of them; give --max-downsets N instead, or neither"
        )


def _seeds(problem: Problem) -> tuple[_Found, ...]:
    """Strategies that fit and are there to beat, the best last: the known ones, and those of the
    plain solvers.
    """
    alone = replace(problem, known=())
    plain = (solver(alone, math.inf).strategy for solver in _PLAIN)
    known = dict.fromkeys((*problem.known, *(one for one in plain if one is not None)))
    priced = [_Found(_price_s(problem, strategy), strategy) for strategy in known]
    return tuple(sorted(priced, key=lambda one: -one.objective_s))


def _price_s(problem: Problem, strategy: Strategy) -> float:
    """What the closed form says of a strategy, sums of tied gradients included."""
    options, stages = problem.options, stage_costs(problem, strategy)
    return objective_s(stages, options.num_microbatches, options.objective, options.schedule)


def _result(problem: Problem, searched: _Searched, margin: _Margin) -> Result:
    *others, best = searched.found
    exact = searched.exact and margin == _Margin()
    space = _space(problem, searched.coarse)
    if not exact:
        space += "; some ways to run a state were dropped, or memory was judged with a margin"
    proved = exact and best.objective_s <= searched.bound_s * (1 + _SAME)
    everything = searched.coarse.exact and len(problem.topology.devices) <= _ALL_WIDTHS
    close = [one.strategy for one in others if one.objective_s <= _CLOSE * best.objective_s]
    return Result(
        Status.OPTIMAL if everything and proved else Status.FEASIBLE,
        best.strategy,
        bound_s=searched.bound_s if exact else None,
        space=space,
        others=tuple(close[-_OTHERS:]),
    )


def _whatever_fits(problem: Problem, seeds: Sequence[_Found], rows: Sequence[_Row]) -> Result:
    """The best of the known strategies and of pipelines found without regard to memory that fit
    after all; else why there is none. (That the search finds nothing is no proof.)
    """
    coarse = _coarsened(problem, _DOWNSETS)
    endless = [_shifted(row, -math.inf) for row in rows]
    ignoring = _search(problem, coarse, endless, (), _MOST_WORK, True).found
    space = f"{_space(problem, coarse)}; with memory left out of the search"
    fitting, shortage = list(seeds), "no pipeline of these widths uses these devices"
    for one in ignoring:
        short = evaluate(problem, one.strategy).shortage
        if short is None:
            fitting.append(one)
        else:
            shortage = short
    if not fitting:
        return Result(Status.UNKNOWN, None, space=space, reason=shortage)
    best = min(fitting, key=lambda one: one.objective_s)
    return Result(Status.FEASIBLE, best.strategy, space=space)


def _space(problem: Problem, coarse: Coarsening) -> str:
    """What was searched, in words."""
    count = len(problem.topology.devices)
    orders = " or ".join(_shown(order) for order in _orders(problem))
    some = ""
    if count > _ALL_WIDTHS:
        every, powers = _rounds(problem, count)[::2]
        aligned = " at multiples of their width" if powers.aligned else ""
        some = (
            f", stages of any multiple of {every.marks[0]} devices or of"
            f" {' '.join(map(str, powers.widths))}{aligned}, cuts after every {powers.marks[0]},"
            " all stages with the default warm-up depth or all with one more"
        )
    return (
        f"pipelines of {summary(coarse)}; devices in the order {orders}{some}; by the closed"
        " forms of time and memory"
    )


def _shown(order: tuple[int, ...]) -> str:
    """An order of devices in words, shortened where it is long."""
    natural = order == tuple(range(len(order))) and len(order) > 2
    if natural:
        return f"0..{len(order) - 1}"
    if len(order) <= 2 * _ALL_WIDTHS:
        return " ".join(map(str, order))
    return f"{' '.join(map(str, order[:4]))} .. {order[-1]}"


# ------------------------------------------------------------------- coarse, then in more detail


def _refined(
    problem: Problem, seeds: tuple[_Found, ...], rows: Sequence[_Row], margin: _Margin
) -> _Searched:
    """The best pipeline over finer and finer blocks, as far as the work allows or the options ask.

    Args:
        seeds: pipelines to beat, the best last.
    """
    options = problem.options
    asked = options.exact or options.max_downsets is not None
    rows = [_shifted(row, margin.spare_bytes) for row in rows]
    most_work = np.iinfo(np.int64).max if asked else _MOST_WORK
    limit: int | None = min(_DOWNSETS, options.max_downsets or _DOWNSETS)
    cautious = margin.cautious
    searched = _search(problem, _coarsened(problem, limit), rows, seeds, most_work, cautious)
    while not searched.coarse.exact:
        limit = _finer(problem, limit, searched)
        if limit is None and not options.exact:
            break
        coarse = _coarsened(problem, limit)
        searched = _search(problem, coarse, rows, searched.found, most_work, cautious)
    return searched


def _finer(problem: Problem, limit: int | None, searched: _Searched) -> int | None:
    """How many downsets to coarsen to after a search: four times as many, or, where nobody asked
    for more, what the work allows. None for all of them, or where it is enough.
    """
    options, count = problem.options, searched.coarse.num_downsets
    if limit is None or limit == options.max_downsets:
        return None
    if options.exact:
        return _FINER * limit if _FINER * limit <= _MOST_DOWNSETS else None
    if options.max_downsets is not None:
        return min(_FINER * limit, options.max_downsets)
    # Pairs, and with them the work, grow with the square.
    affordable = math.isqrt(int(count**2 * _WORK / searched.work))
    finer = min(_FINER * limit, affordable, _MOST_DOWNSETS)
    return finer if finer >= _WORTH_IT * count and finer > limit else None


def _coarsened(problem: Problem, limit: int | None) -> Coarsening:
    profile = problem.profile
    times = [o.forward_s + o.backward_s for o in profile.operators]
    order = _orders(problem)[0]
    rates = [bandwidth_bytes_per_s(problem.topology, p, q) for p, q in pairwise(order)]
    usual = float(np.median(rates)) if rates else math.inf
    return coarsen(profile.graph, times, limit, s_per_byte=1 / usual)


def _search(
    problem: Problem,
    coarse: Coarsening,
    rows: Sequence[_Row],
    found: tuple[_Found, ...],
    most_work: int,
    cautious: bool,
) -> _Searched:
    """The best pipeline over all rows of devices.

    Args:
        found: pipelines to beat, the best last.
        cautious: see `_Margin`.
    """
    subsets = downsets(coarse.predecessors)
    sets = _sets(problem, coarse, cautious)
    lattice = _lattice(problem, coarse, subsets)
    cuts = kernels.cut_bytes(subsets.masks, sets)
    exact, work, bound_s = True, 0.0, math.inf
    for row in rows:
        best_s = found[-1].objective_s if found else math.inf
        objective, stages, dropped, extended = kernels.search(
            lattice, sets, cuts, row.moves, _training(problem, len(row.order)),
            kernels.Limits(best_s, row.labels, most_work),
        )  # fmt: skip
        exact, work = exact and not dropped, work + extended + len(subsets) ** 2 / 2
        bound_s = min(bound_s, float(objective))
        if len(stages):
            strategy = _strategy(problem, coarse, subsets, stages, row)
            priced_s = _price_s(problem, strategy) if len(sets.tied) else float(objective)
            better = (_Found(priced_s, strategy),)
            found = (*found, *better) if priced_s < best_s else (*better, *found)
    return _Searched(found, coarse, bound_s, exact, work)


# ---------------------------------------------------------------------------- devices in a row


def _orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Linear orders of the devices to try: by index, by links, host after host and across the
    hosts; where devices differ, also backwards, and type by type in every order of the types.
    """
    topology = problem.topology
    natural = tuple(range(len(topology.devices)))
    by_host = host_order(topology, natural)
    orders = [natural, chain(topology, natural), by_host, _transposed(problem, by_host)]
    types = sorted({d.type for d in topology.devices})
    if len(types) > 1:
        orders += [order[::-1] for order in orders]
        of_type = {
            kind: chain(topology, tuple(i for i in natural if topology.devices[i].type == kind))
            for kind in types
        }
        for some in islice(permutations(types), _TYPE_ORDERS):
            orders.append(tuple(i for kind in some for i in of_type[kind]))
    return tuple(dict.fromkeys(orders))


def _transposed(problem: Problem, by_host: Sequence[int]) -> tuple[int, ...]:
    """The first device of every host, then the second of every host, and so on."""
    place: dict[str, int] = {}
    key = {}
    for d in by_host:
        host = problem.topology.devices[d].host
        key[d] = place.get(host, 0)
        place[host] = key[d] + 1
    return tuple(sorted(by_host, key=lambda d: key[d]))


def _numbers_of_devices(problem: Problem) -> Sequence[int]:
    """How many devices to plan for: all, except where using fewer makes each of them faster; then
    any number up to 16, powers of two, and all.
    """
    topology = problem.topology
    shared = any(h.cores is not None or h.memory_bytes is not None for h in topology.hosts)
    count = len(topology.devices)
    if not shared:
        return (count,)
    few = range(1, min(count, 2 * _ALL_WIDTHS) + 1)
    return sorted({*few, *(2**i for i in range(count.bit_length())), count})


def _rounds(problem: Problem, count: int) -> tuple[_Round, ...]:
    """The searches for one order of `count` devices.

    Up to 8 devices: every width, and every stage chooses its warm-up depth. On more: all stages
    have the default warm-up depth or all one more, and either the widths are any multiple of an
    eighth of the devices, or powers of two and all, with cuts after every device or, where that
    would be more than 64 places, after every so many. On more than 16, these are aligned.
    """
    most = problem.options.num_microbatches
    if count <= _ALL_WIDTHS:
        every = tuple(range(1, count + 1))
        labels = _ALL_LABELS if problem.options.exact else _LABELS
        return (_Round(every, tuple(r for r in every if r <= most), False, (0, 1), labels),)
    unit = -(-count // _ALL_WIDTHS)
    eighths = (*range(unit, count, unit), count)
    between = {b - a for a in (0, *eighths) for b in eighths if b > a}
    step = 2 ** max(0, math.ceil(math.log2(count / _MARKS)))
    marks = (*range(step, count, step), count)
    powers = {2**i for i in range(count.bit_length()) if 2**i >= step} | {count, min(count, most)}
    return tuple(
        _Round(some, tuple(sorted(r for r in widths if r <= most)), aligned, (extra,), _FEW_LABELS)
        for some, widths, aligned in (
            (eighths, between | {min(count, most)}, False),
            (marks, powers, count > 2 * _ALL_WIDTHS),
        )
        for extra in (0, 1)
    )


def _warmups(
    problem: Problem, state: tuple[int, int, int], width: int, extras: Sequence[int]
) -> tuple[int, ...]:
    """The choices of W' of a stage in front of a state, ascending: the least that does not stall,
    and more by the extras.
    """
    options = problem.options
    k, r, warmup = state
    most = -(-options.num_microbatches // width)
    if options.schedule is ScheduleName.GPIPE:
        return (most,)
    if k == 0:
        return (1,)
    least = -(-warmup * r // width) + 1
    return tuple(sorted({min(most, least + extra) for extra in extras}))


def _rows(problem: Problem) -> tuple[_Row, ...]:
    """The devices in all orders, in all numbers, with all ways to take them."""
    found = []
    for order, count in product(_orders(problem), _numbers_of_devices(problem)):
        # All of them may be used, and are slowed down as if they were.
        used = order[:count]
        for one in _rounds(problem, count):
            found.append(_Row(used, _moves(problem, used, one), one.labels))
    return tuple(found)


def _shifted(row: _Row, spare_bytes: float) -> _Row:
    """The same devices, with that much memory of each to be left empty."""
    return replace(row, moves=row.moves._replace(limit=row.moves.limit - spare_bytes))


def _moves(problem: Problem, order: tuple[int, ...], one: _Round) -> kernels.Moves:
    """Every combination that a pipeline on these devices can have, from the last stage on."""
    marks = frozenset(one.marks)
    index = {(0, 0, 0): 0}
    states = [(0, 0, 0)]
    rows: list[list[int]] = []
    links = []
    between: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}
    for state in states:
        k, r, _ = state
        row = []
        for width in one.widths:
            if k + width not in marks or (one.aligned and k % width):
                continue
            if k and (k, r, width) not in between:
                stage, front = _behind(order, k, r), _behind(order, k + width, width)
                between[k, r, width] = (
                    *slowest_link(problem.topology, front, stage),
                    *slowest_link(problem.topology, stage, front),
                )
            for warmup in _warmups(problem, state, width, one.extras):
                following = (k + width, width, warmup)
                if following not in index:
                    index[following] = len(states)
                    states.append(following)
                row.append(index[following])
                links.append(between[k, r, width] if k else (0.0, math.inf, 0.0, math.inf))
        rows.append(row)
    start, to = csr(rows)
    k_, r_, w_ = np.array(states, dtype=np.int64).T.copy()
    there = np.array(links, dtype=float).reshape(-1, 4).T.copy()
    stages = _stages_on(problem, order, [(k, r) for k, r, _ in states])
    return kernels.Moves(
        k=k_, r=r_, w=w_, weight=_weights(problem, r_),
        start=start, to=to,
        latency=there[0], rate=there[1], back_latency=there[2], back_rate=there[3],
        **stages,
    )  # fmt: skip


def _behind(order: tuple[int, ...], k: int, r: int) -> tuple[int, ...]:
    """The devices of a stage of width r that brings the devices in use to k."""
    return order[len(order) - k : len(order) - k + r]


def _stages_on(
    problem: Problem,
    order: tuple[int, ...],
    stages: Sequence[tuple[int, int]],
) -> dict[str, kernels.Floats]:
    """The fields of `kernels.Moves` that a stage's devices decide, for stages (k, r); 0 for the
    first, which stands for none.
    """
    topology, kinds = problem.topology, _first_of_each_type(problem)
    slow = slowdowns(topology, order)
    speed = np.array([slow[d] for d in order])
    kind = np.array([list(kinds).index(topology.devices[d].type) for d in order])
    room = np.array([limit_bytes(problem, order, d) for d in order], dtype=float)
    room -= problem.options.reserve_bytes
    per_byte = [step_s(problem.options.optimizer, 1, device_type(topology, d)) for d in order]
    step = speed * np.array(per_byte)
    latency, width = pair_widths(topology)
    zero, infinite = ("limit", "ring_latency", "tie_latency", "step"), ("ring_rate", "tie_rate")
    found = {name: np.zeros(len(stages)) for name in zero}
    found |= {name: np.full(len(stages), math.inf) for name in infinite}
    found["factor"] = np.zeros((len(kinds), len(stages)))
    rings: dict[tuple[int, int], tuple[float, float]] = {}
    for c, (k, r) in enumerate(stages):
        if k == 0:
            continue
        where = slice(len(order) - k, len(order) - k + r)
        found["limit"][c], found["step"][c] = room[where].min(), step[where].max()
        for row in range(len(kinds)):
            found["factor"][row, c] = speed[where].max(where=kind[where] == row, initial=0.0)
        if k > r and not topology.tables:  # a table may beat the best link
            pairs = np.ix_(order[where], order[len(order) - k + r :])
            found["tie_latency"][c], found["tie_rate"][c] = latency[pairs].min(), width[pairs].max()
        if r > 1:
            if (k, r) not in rings:
                rings[k, r] = ring_links(topology, tuple(sorted(order[where])))
            found["ring_latency"][c], found["ring_rate"][c] = rings[k, r]
    return found


def _weights(problem: Problem, widths: kernels.Ints) -> kernels.Floats:
    """What a stage's period counts in the objective, by its width; 0 where there is no stage."""
    rounds = -(-problem.options.num_microbatches // np.maximum(widths, 1))
    found = {
        Objective.ITERATION: rounds - 1.0,
        Objective.BOTTLENECK: 1.0 / np.maximum(widths, 1),
        Objective.LATENCY: np.zeros(len(widths)),
    }[problem.options.objective]
    return np.where(widths > 0, found, 0.0)


def _training(problem: Problem, count: int) -> kernels.Training:
    options = problem.options
    return kernels.Training(
        num_devices=count,
        num_microbatches=options.num_microbatches,
        moments=options.optimizer.num_moments,
        total=0.0 if options.objective is Objective.BOTTLENECK else 1.0,
        exposed=1.0 if options.objective is Objective.ITERATION else 0.0,
        may_keep=options.recompute is not Recompute.FULL,
        may_recompute=options.recompute is not Recompute.NONE,
        phases=options.schedule is ScheduleName.GPIPE and options.objective is Objective.ITERATION,
    )


def _first_of_each_type(problem: Problem) -> Mapping[str, int]:
    """A device of every type."""
    found: dict[str, int] = {}
    for index, device in enumerate(problem.topology.devices):
        found.setdefault(device.type, index)
    return found


# ------------------------------------------------------------------------- blocks and downsets


def _lattice(problem: Problem, coarse: Coarsening, subsets: Downsets) -> kernels.Lattice:
    """The downsets of blocks with their times on every type of device."""
    times = [times_on(problem, device) for device in _first_of_each_type(problem).values()]
    fastest = np.min([t.forward_s + t.backward_s for t in times], axis=0)

    def of_downsets(per_operator: kernels.Floats) -> kernels.Floats:
        blocks = np.array([per_operator[list(block)].sum() for block in coarse.blocks])
        return kernels.sums(subsets.start, subsets.cover, subsets.added, blocks)

    return kernels.Lattice(
        subsets.masks, subsets.start, subsets.cover, subsets.added,
        forward=np.array([of_downsets(t.forward_s) for t in times]),
        backward=np.array([of_downsets(t.backward_s) for t in times]),
        ahead=of_downsets(fastest),
    )  # fmt: skip


def _sets(problem: Problem, coarse: Coarsening, cautious: bool) -> kernels.Sets:
    """Tensors and parameters with the blocks that touch them.

    Stashed views count as the tensor that they are a view of, wherever it was made: never less than
    `costs.memory` counts for a stage. Views of parameters cost memory only where they are sent to.
    """
    profile, graph = problem.profile, problem.profile.graph
    block_of = {v: b for b, block in enumerate(coarse.blocks) for v in block}
    tensors, made_by, read_by = tensors_by_name(graph), producers(graph), consumers(graph)
    everything, results = range(len(graph.operators)), set(graph.outputs)
    inside = frozenset(everything)
    kept: dict[str, set[int]] = {name: set() for name in tensors}
    for v in everything:
        # What the model returns stays until the backward pass, like what is stashed.
        returned_here = results.intersection(graph.operators[v].outputs)
        for name in (*profile.operators[v].stash_tensors, *sorted(returned_here)):
            owner = storage_owner(profile, name, inside)
            kept[owner if owner in tensors else name].add(block_of[v])
    read = {name: {block_of[v] for v in read_by[name]} for name in tensors}
    maker = {name: block_of[made_by[name]] if name in made_by else -1 for name in tensors}
    if cautious:
        alone = operator_workspaces(profile)
        workspace = [max(alone[v] for v in block) for block in coarse.blocks]
    else:
        workspace = [stage_memory(profile, block).workspace_bytes for block in coarse.blocks]
    private = np.array([sum(profile.operators[v].stash_private_bytes for v in block)
                        for block in coarse.blocks], dtype=float)  # fmt: skip
    table, free = [], _in_parameters(profile)
    for name, tensor in tensors.items():
        touched = kept[name] | read[name]
        if maker[name] < 0 or touched - {maker[name]}:
            table.append(name)
        elif kept[name] and name not in free:
            private[maker[name]] += tensor.bytes
    # The loss keeps a tensor of the size of its input.
    last = made_by.get(graph.outputs[0])
    if last is not None:
        private[block_of[last]] += tensors[graph.outputs[0]].bytes
    count, users = len(coarse.blocks), holders(graph)
    returned = np.zeros(count)
    for name in results & made_by.keys():
        returned[block_of[made_by[name]]] += tensors[name].bytes
    used_in = [sorted({block_of[v] for v in users[p.name]}) for p in graph.parameters]
    touching: list[list[int]] = [[] for _ in coarse.blocks]
    for t, name in enumerate(table):
        for b in kept[name] | read[name] | {maker[name]} - {-1}:
            touching[b].append(t)
    holding: list[list[int]] = [[] for _ in coarse.blocks]
    for p, blocks in enumerate(used_in):
        for b in blocks:
            holding[b].append(p)
    (tensor_start, touched_tensors), (parameter_start, held) = csr(touching), csr(holding)
    return kernels.Sets(
        size=np.array([tensors[n].bytes for n in table], dtype=float),
        maker=np.array([maker[n] for n in table], dtype=np.int64),
        gradient=np.array([tensors[n].gradient for n in table], dtype=float),
        free=np.array([n in free for n in table], dtype=np.bool_),
        kept=pack([sorted(kept[n]) for n in table], count),
        read=pack([sorted(read[n]) for n in table], count),
        tensor_start=tensor_start,
        tensors=touched_tensors,
        parameter_size=np.array([p.bytes for p in graph.parameters], dtype=float),
        parameter_trained=np.array([p.trainable for p in graph.parameters], dtype=float),
        parameter_users=pack(used_in, count),
        parameter_start=parameter_start,
        parameters=held,
        tied=np.array(_tied(graph.parameters, used_in), dtype=np.int64),
        private=private,
        workspace=np.array(workspace, dtype=float),
        returned=returned,
    )


def _in_parameters(profile: Profile) -> frozenset[str]:
    """Tensors that lie in a parameter's storage where they are made."""
    parameters = {p.name for p in profile.graph.parameters}
    inside = frozenset(range(len(profile.operators)))
    return frozenset(v.tensor for v in profile.views
                     if storage_owner(profile, v.tensor, inside) in parameters)  # fmt: skip


def _tied(parameters: Sequence[Parameter], used_in: Sequence[Sequence[int]]) -> list[int]:
    """The trained parameters that several blocks use.

    Args:
        used_in: per parameter, the blocks that use it.
    """
    pairs = zip(parameters, used_in, strict=True)
    return [p for p, (one, blocks) in enumerate(pairs) if one.trainable and len(blocks) > 1]


def _strategy(
    problem: Problem,
    coarse: Coarsening,
    subsets: Downsets,
    rows: kernels.Ints,
    devices: _Row,
) -> Strategy:
    """The strategy that the kernel's rows describe."""
    operators, moves = problem.profile.graph.operators, devices.moves
    stages = []
    for before, behind, c, recompute in rows.tolist():
        blocks = members(subsets.masks[behind] & ~subsets.masks[before])
        inside = sorted(v for b in blocks for v in coarse.blocks[b])
        stages.append(
            Stage(
                operators=tuple(operators[v].name for v in inside),
                devices=_behind(devices.order, int(moves.k[c]), int(moves.r[c])),
                warmup=int(moves.w[c]),
                recompute=bool(recompute),
            )
        )
    return Strategy(tuple(stages), problem.options.schedule, problem.options.num_microbatches)
