"""Dynamic programming over the downsets of the operator graph.

A pipeline is a chain of downsets {} = D_0 < D_1 < ... < D_S = all operators; stage s runs
D_s minus D_{s-1}. Devices are taken from one linear order, from its end, so the last stage has
the last devices. Whatever a stage costs follows from the state

    (D, k, r, W)    D: what is still to be placed; k: devices in use behind it;
                    r, W: width and warm-up depth of the first stage behind the cut

because k and r name the devices of that stage, hence links, device types and memory limits.

    V(all, 0, -, -) = nothing
    V(D', k + r', r', W') = best over D > D' of: stage D minus D' put in front of V(D, k, r, W)

    W' = ceil(W r / r') + 1, or one more where something crosses the cut; at most ceil(M / r')
    the stage fits the memory of its smallest device, with its stash or, if allowed, without

"Put in front" is `costs.closed_form.extend`: each value is a triple (round trip, slowest period,
exposed end), whose sum is to be least. No triple that another one beats in all three can lead to
a better sum, so a state keeps the triples that none beats (its Pareto front).

The answer is exact for the closed form, the blocks and the order of devices; the order, and on
hosts with shared cores the number of devices, is an outer loop. The inner loops are in
`antichain_kernels.py`. States as in PipeDream (Narayanan et al., SOSP 2019, section 3.1) and
Tarnawski et al. (NeurIPS 2020), which have neither latency nor warm-up in theirs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations, product

import numpy as np

from planner.coarsen import Coarsening, coarsen
from planner.costs.collectives import ring_links, slowest_link
from planner.costs.compute import slowdown, step_s, times_on
from planner.costs.evaluate import evaluate
from planner.costs.memory import limit_bytes, stage_memory
from planner.graph import consumers, holders, predecessors, producers, tensors_by_name
from planner.order import downsets, members, pack
from planner.problem import Objective, Optimizer, Problem, Recompute, Result, Status
from planner.profile import storage_owner
from planner.solvers import antichain_kernels as kernels
from planner.strategy import ScheduleName, Stage, Strategy
from planner.topology import chain, device_type

# Without other orders the graph is coarsened to so many downsets, or to fewer where so much work
# (stages x combinations x widths) would be exceeded: some seconds.
_DOWNSETS, _FEWEST_DOWNSETS, _WORK = 400, 24, 7e7
# On more devices than this, the number of replicas of a stage is a power of two or all devices, all
# stages have the default warm-up depth or all one more, and states keep few labels.
_ALL_WIDTHS = 8
# A label is a way to run what lies behind a cut; a state keeps so many that do not beat each other.
_LABELS, _FEW_LABELS = 32, 4
# Orders of distinct device types that are tried.
_TYPE_ORDERS = 6
# A first search over so few downsets gives the real one something to beat.
_ROUGH_DOWNSETS = 40
# Attempts to respect a memory peak that the closed form underrated.
_MEMORY_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class _Found:
    """A pipeline and what the closed form says of it."""

    objective_s: float
    strategy: Strategy
    exact: bool


def solve(problem: Problem, time_limit_s: float) -> Result:
    """The best pipeline of blocks over the orders of devices that are tried.

    Args:
        time_limit_s: not needed; the work is bounded by the number of downsets.
    """
    profile = problem.profile
    weights = [o.forward_s + o.backward_s for o in profile.operators]
    feeds = predecessors(profile.graph)
    coarse = coarsen(feeds, weights, _max_downsets(problem))
    rough = coarsen(feeds, weights, min(_ROUGH_DOWNSETS, coarse.num_downsets))
    found = _fitting(problem, rough, coarse)
    space = _space(problem, coarse)
    if found is None:
        # The closed form of memory is an estimate from above: no proof that nothing fits.
        return _whatever_fits(problem, rough, space)
    if not found.exact:
        space += "; some ways to run a state were dropped, or memory was judged with a margin"
    count = len(problem.topology.devices)
    everything = len(coarse.blocks) == len(profile.operators) and count <= _ALL_WIDTHS
    return Result(
        Status.OPTIMAL if everything and found.exact else Status.FEASIBLE,
        found.strategy,
        bound_s=found.objective_s if found.exact else None,
        space=space,
    )


def _space(problem: Problem, coarse: Coarsening) -> str:
    count = len(problem.topology.devices)
    orders = " or ".join(_shown(order) for order in _orders(problem))
    some = ""
    if count > _ALL_WIDTHS:
        some = (
            f", {' '.join(map(str, _widths(problem, count)))} replicas, all stages with the default"
            " warm-up depth or all with one more"
        )
    return (
        f"pipelines of {len(coarse.blocks)} blocks ({coarse.num_downsets} downsets) made of"
        f" {len(problem.profile.operators)} operators, devices in the order {orders}{some}, by the"
        " closed forms of time and memory"
    )


def _shown(order: tuple[int, ...]) -> str:
    """An order of devices in words, shortened where it is the order of the indices."""
    natural = order == tuple(range(len(order))) and len(order) > 2
    return f"0..{len(order) - 1}" if natural else " ".join(map(str, order))


def _widths(problem: Problem, count: int) -> tuple[int, ...]:
    """The numbers of replicas that a stage may have on `count` devices, ascending."""
    most = min(count, problem.options.num_microbatches)
    if count <= _ALL_WIDTHS:
        return tuple(range(1, most + 1))
    return tuple(sorted({2**i for i in range(most.bit_length())} | {most}))


def _max_downsets(problem: Problem) -> int | None:
    """How many downsets to coarsen to; None for all."""
    options, count = problem.options, len(problem.topology.devices)
    if options.exact or options.max_downsets is not None:
        return options.max_downsets
    combinations = sum(len(_moves(problem, count, r).k) for r in _rhythms(count))
    per_pair = combinations * len(_widths(problem, count))
    rounds = len(_orders(problem)) * len(_numbers_of_devices(problem))
    affordable = math.isqrt(int(2 * _WORK / (per_pair * rounds)))
    return max(_FEWEST_DOWNSETS, min(_DOWNSETS, affordable))


def _fitting(problem: Problem, rough: Coarsening, coarse: Coarsening) -> _Found | None:
    """The best pipeline whose peak, read off its action lists, fits; where the closed form
    underrated it, the search is repeated with less memory.
    """
    spare = 0
    for _ in range(_MEMORY_ATTEMPTS):
        start = _search(problem, rough, None, spare)
        found = _search(problem, coarse, start, spare)
        if found is None:
            return None
        evaluation = evaluate(problem, found.strategy)
        if evaluation.shortage is None:
            return replace(found, exact=found.exact and spare == 0)
        used = evaluation.memory.keys()
        spare += max(
            parts.total_bytes - limit_bytes(problem, used, device)
            for device, parts in evaluation.memory.items()
        )
    return None


def _whatever_fits(problem: Problem, rough: Coarsening, space: str) -> Result:
    """The best pipeline that ignores memory, if it fits after all; else why not."""
    ignoring = _search(problem, rough, None, 0, ignore_memory=True)
    assert ignoring is not None, "without a memory limit one stage on one device is a pipeline"
    shortage = evaluate(problem, ignoring.strategy).shortage
    if shortage is None:
        return Result(Status.FEASIBLE, ignoring.strategy, space=space)
    return Result(Status.UNKNOWN, None, space=space, reason=shortage)


def _orders(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Linear orders of the devices to try: by index and by links; where devices differ, also
    backwards, and type by type in every order of the types.
    """
    topology = problem.topology
    natural = tuple(range(len(topology.devices)))
    orders = [natural, chain(topology, natural)]
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


def _numbers_of_devices(problem: Problem) -> Sequence[int]:
    """How many devices to plan for: all, except where using fewer makes each of them faster."""
    topology = problem.topology
    shared = any(h.cores is not None or h.memory_bytes is not None for h in topology.hosts)
    count = len(topology.devices)
    return range(1, count + 1) if shared else (count,)


def _search(
    problem: Problem,
    coarse: Coarsening,
    start: _Found | None,
    spare_bytes: int,
    *,
    ignore_memory: bool = False,
) -> _Found | None:
    """The best pipeline over all orders and numbers of devices."""
    subsets = downsets(coarse.predecessors)
    sets = _sets(problem, coarse)
    pairs = kernels.pair_bytes(subsets.masks, sets)
    cuts = kernels.cut_bytes(subsets.masks, sets)
    kinds = _first_of_each_type(problem)
    inside = [members(mask) for mask in subsets.masks]
    forward, backward, ahead = _downset_times(problem, coarse, inside, kinds)
    best, exact = start, True
    counts = _numbers_of_devices(problem)
    for order, count in product(_orders(problem), counts):
        # All of them may be used, and are slowed down as if they were.
        used = order[:count]
        machine = _machine(problem, used, kinds, spare_bytes, ignore_memory=ignore_memory)
        for rhythm in _rhythms(count):
            moves = _moves(problem, count, rhythm)
            objective, rows, dropped = kernels.search(
                pairs, cuts, forward, backward, ahead, machine, moves, _training(problem, count),
                np.array(_widths(problem, count), dtype=np.int64), count,
                _LABELS if count <= _ALL_WIDTHS else _FEW_LABELS,
                best.objective_s if best else np.inf,
            )  # fmt: skip
            exact = exact and not dropped
            if len(rows):
                strategy = _strategy(problem, coarse, subsets.masks, rows, moves, used)
                best = _Found(float(objective), strategy, exact)
    return None if best is None else replace(best, exact=exact)


def _first_of_each_type(problem: Problem) -> Mapping[str, int]:
    """A device of every type."""
    found: dict[str, int] = {}
    for index, device in enumerate(problem.topology.devices):
        found.setdefault(device.type, index)
    return found


def _downset_times(
    problem: Problem,
    coarse: Coarsening,
    inside: Sequence[Sequence[int]],
    kinds: Mapping[str, int],
) -> tuple[kernels.Floats, kernels.Floats, kernels.Floats]:
    """(types, n) forward and backward of every downset of blocks, and (n,) both with every
    operator on the type where it is fastest, in s.
    """
    times = [times_on(problem, device) for device in kinds.values()]
    fastest = np.min([t.forward_s + t.backward_s for t in times], axis=0)

    def of_downsets(per_operator: kernels.Floats) -> kernels.Floats:
        blocks = np.array([per_operator[list(block)].sum() for block in coarse.blocks])
        return np.array([blocks[list(members)].sum() for members in inside])

    forward = np.array([of_downsets(t.forward_s) for t in times])
    backward = np.array([of_downsets(t.backward_s) for t in times])
    return forward, backward, of_downsets(fastest)


def _sets(problem: Problem, coarse: Coarsening) -> kernels.Sets:
    """Tensors and parameters with the blocks that touch them.

    Stashed views count as the tensor that they are a view of, wherever it was made, and views of
    parameters as tensors: never less than `costs.memory` counts for a stage.
    """
    profile, graph = problem.profile, problem.profile.graph
    block_of = {v: b for b, block in enumerate(coarse.blocks) for v in block}
    tensors, made_by, read_by = tensors_by_name(graph), producers(graph), consumers(graph)
    everything = range(len(graph.operators))
    inside = frozenset(everything)
    kept: dict[str, set[int]] = {name: set() for name in tensors}
    for v in everything:
        for name in profile.operators[v].stash_tensors:
            owner = storage_owner(profile, name, inside)
            kept[owner if owner in tensors else name].add(block_of[v])
    read = {name: {block_of[v] for v in read_by[name]} for name in tensors}
    made = {n: {block_of[made_by[n]]} if n in made_by else set[int]() for n in tensors}
    needs = [stage_memory(profile, block) for block in coarse.blocks]
    private = np.array([sum(profile.operators[v].stash_private_bytes for v in block)
                        for block in coarse.blocks], dtype=float)  # fmt: skip
    table = []
    for name, tensor in tensors.items():
        touched = kept[name] | read[name] | made[name]
        if len(touched) > 1 or not made[name]:
            table.append(name)
        elif kept[name]:
            private[next(iter(touched))] += tensor.bytes
    # The loss and what the model returns stay until the backward pass.
    last = made_by.get(graph.outputs[0])
    if last is not None:
        private[block_of[last]] += 2 * tensors[graph.outputs[0]].bytes
    count, users = len(coarse.blocks), holders(graph)
    return kernels.Sets(
        size=np.array([tensors[n].bytes for n in table], dtype=float),
        made=pack([sorted(made[n]) for n in table], count),
        kept=pack([sorted(kept[n]) for n in table], count),
        read=pack([sorted(read[n]) for n in table], count),
        gradient=np.array([tensors[n].gradient for n in table], dtype=float),
        parameter_size=np.array([p.bytes for p in graph.parameters], dtype=float),
        parameter_trained=np.array([p.trainable for p in graph.parameters], dtype=float),
        parameter_users=pack(
            [sorted({block_of[v] for v in users[p.name]}) for p in graph.parameters], count
        ),
        private=private,
        workspace=np.array([need.workspace_bytes for need in needs], dtype=float),
    )


def _rhythms(count: int) -> tuple[tuple[int, ...], ...]:
    """Which numbers of further microbatches in flight a search lets every stage choose from; one
    search for each.
    """
    return ((0, 1),) if count <= _ALL_WIDTHS else ((0,), (1,))


def _moves(problem: Problem, count: int, rhythm: Sequence[int]) -> kernels.Moves:
    """Every (k, r, W) that a pipeline on `count` devices can have, from the last stage on."""
    widths = _widths(problem, count)
    index = {(0, 0, 0): 0}
    states = [(0, 0, 0)]
    then: list[list[list[int]]] = []
    for state in states:
        row = [[-1, -1] for _ in range(count + 1)]
        for width in (r for r in widths if state[0] + r <= count):
            for choice, warmup in enumerate(_warmups(problem, state, width, rhythm)):
                following = (state[0] + width, width, warmup)
                if following not in index:
                    index[following] = len(states)
                    states.append(following)
                row[width][choice] = index[following]
        then.append(row)
    k, r, w = np.array(states, dtype=np.int64).T.copy()
    return kernels.Moves(k, r, w, np.array(then, dtype=np.int64))


def _warmups(
    problem: Problem, state: tuple[int, int, int], width: int, rhythm: Sequence[int]
) -> tuple[int, ...]:
    """The choices of W' of a stage in front of a state, ascending: the least that does not stall,
    and more by the rhythm.
    """
    options = problem.options
    k, r, warmup = state
    most = -(-options.num_microbatches // width)
    if options.schedule is ScheduleName.GPIPE:
        return (most,)
    if k == 0:
        return (1,)
    least = -(-warmup * r // width) + 1
    return tuple(sorted({min(most, least + extra) for extra in rhythm}))


def _training(problem: Problem, count: int) -> kernels.Training:
    options = problem.options
    num_microbatches = options.num_microbatches
    widths = range(1, count + 1)
    weight = {
        Objective.ITERATION: [-(-num_microbatches // r) - 1.0 for r in widths],
        Objective.BOTTLENECK: [1.0 / r for r in widths],
        Objective.LATENCY: [0.0 for _ in widths],
    }[options.objective]
    return kernels.Training(
        num_microbatches=num_microbatches,
        moments=options.optimizer.num_moments,
        weight=np.array([0.0, *weight]),
        total=0.0 if options.objective is Objective.BOTTLENECK else 1.0,
        exposed=1.0 if options.objective is Objective.ITERATION else 0.0,
        may_keep=options.recompute is not Recompute.FULL,
        may_recompute=options.recompute is not Recompute.NONE,
        phases=options.schedule is ScheduleName.GPIPE and options.objective is Objective.ITERATION,
    )


def _machine(
    problem: Problem,
    order: tuple[int, ...],
    kinds: Mapping[str, int],
    spare_bytes: int,
    *,
    ignore_memory: bool,
) -> kernels.Machine:
    """The devices as the kernel sees them, for every stage by devices in use and width."""
    topology, count = problem.topology, len(order)
    shape = (count + 1, count + 1)
    factor = np.zeros((len(kinds), *shape))
    limit, ring_latency, ring_rate, step = (np.zeros(shape) for _ in range(4))
    there = np.zeros((2, *shape, count + 1))
    back = np.zeros((2, *shape, count + 1))
    reserve = problem.options.reserve_bytes
    widths = _widths(problem, count)
    for k in range(1, count + 1):
        for r in (r for r in widths if r <= k):
            stage = order[count - k : count - k + r]
            for row, kind in enumerate(kinds):
                slow = [slowdown(topology, order, d) for d in stage
                        if topology.devices[d].type == kind]  # fmt: skip
                factor[row, k, r] = max(slow, default=0.0)
            room = min(limit_bytes(problem, order, d) for d in stage)
            limit[k, r] = np.inf if ignore_memory else room - reserve - spare_bytes
            step[k, r] = max(
                slowdown(topology, order, d) * _step_per_byte(problem.options.optimizer, problem, d)
                for d in stage
            )
            if r > 1:
                ring_latency[k, r], ring_rate[k, r] = ring_links(topology, tuple(sorted(stage)))
            for width in (w for w in widths if w <= count - k):
                front = order[count - k - width : count - k]
                there[:, k, r, width] = slowest_link(topology, front, stage)
                back[:, k, r, width] = slowest_link(topology, stage, front)
    return kernels.Machine(
        factor, limit, ring_latency, ring_rate, step, there[0], there[1], back[0], back[1]
    )


def _step_per_byte(optimizer: Optimizer, problem: Problem, device: int) -> float:
    return step_s(optimizer, 1, device_type(problem.topology, device))


def _strategy(
    problem: Problem,
    coarse: Coarsening,
    masks: kernels.Masks,
    rows: kernels.Ints,
    moves: kernels.Moves,
    order: tuple[int, ...],
) -> Strategy:
    """The strategy that the kernel's rows describe."""
    operators = problem.profile.graph.operators
    stages = []
    for before, behind, c, recompute in rows.tolist():
        blocks = members(masks[behind] & ~masks[before])
        inside = sorted(v for b in blocks for v in coarse.blocks[b])
        first = len(order) - int(moves.k[c])
        stages.append(
            Stage(
                operators=tuple(operators[v].name for v in inside),
                devices=order[first : first + int(moves.r[c])],
                warmup=int(moves.w[c]),
                recompute=bool(recompute),
            )
        )
    return Strategy(tuple(stages), problem.options.schedule, problem.options.num_microbatches)
