"""PipeDream's optimizer, number for number as its reference code computes.

It walks a chain of states (`states.pipedream_states`) and the levels of a regular hierarchy from
the inside out. At each level A[i][j][m] is the least time per minibatch of the states i..j on m
machines, by the formulas (1) to (5) of `costs.py`; the level outside takes A[i][j][n] as
the computation of i..j on one of its machines. The plan is read off the outermost A[0][S-1][n]:
splits there, then splits of each of those stages at the level inside, and so on.

The reference keeps ranges by the index of their states, also where a range starts behind a state
that does not come before all of it; so does this, and such a range costs the difference of two
prefixes that are not nested. Two things are ours: what is infeasible has a status, where the
reference stops with an exception, and of splits that are equally fast the one behind the earliest
state and with the fewest machines is taken, so that plans repeat.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1, and the optimizer published with it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from planner.artefacts.graph import Graph, consumers, predecessors
from planner.artefacts.plan import MAX_MICROBATCHES
from planner.artefacts.problem import Problem, Result, Status, switches_of
from planner.artefacts.strategy import ScheduleName, Strategy, asynchronous_violations
from planner.solvers.fit import first_that_fits, pipeline
from planner.solvers.pipedream import kernels
from planner.solvers.pipedream.costs import (
    PipeDreamReport,
    StageReport,
    StateCosts,
    data_parallel_s,
    in_flight,
    state_costs,
    transfer_s,
    whole_s,
)
from planner.solvers.pipedream.options import PipeDream
from planner.solvers.pipedream.states import States, pipedream_states
from planner.solvers.segments import Again, recompute_choices
from planner.support.arrays import Floats
from planner.support.units import format_bytes

SPACE = "PipeDream's splits of its states, by its own cost model"

# More states are not enumerated, nor as many as would take more steps than this: some seconds.
_STATES, _STEPS = 3000, 2e9
# The memory constraint where no device memory is given.
_MEMORY_BYTES = 16_000_000_000


@dataclass(frozen=True, slots=True)
class Optimum:
    """The answer of the optimizer.

    Attributes:
        report: what it says of its plan; None if there is none.
        operators: per stage of the report, the indices of its operators.
        status: infeasible or unknown where there is no plan.
        reason: why there is none.
    """

    report: PipeDreamReport | None
    operators: tuple[tuple[int, ...], ...] = ()
    status: Status = Status.OPTIMAL
    reason: str | None = None


def solve(problem: Problem, time_limit_s: float) -> Result:
    """PipeDream's plan as a flat pipeline, its stages on the devices of the levels in order.

    Args:
        time_limit_s: not needed; the number of states is bounded.
    """
    best = optimum(problem)
    wrong = _not_a_strategy(problem, best)
    if wrong is not None:
        return wrong
    strategies = (_strategy(problem, best, recompute=r) for r in recompute_choices(problem))
    return replace(first_that_fits(problem, strategies, SPACE), report=best.report)


def solve_alone(problem: Problem) -> Result:
    """PipeDream's plan as PipeDream judges it, whether it fits by the planner's count or not, with
    PipeDream's schedule. Its iteration has at least as many minibatches as are asked for, and whole
    rounds of every stage.
    """
    best = optimum(problem)
    if best.report is None:
        return Result(best.status, None, space=SPACE, reason=best.reason)
    least = math.lcm(*(len(stage.devices) for stage in best.report.stages))
    count = -(-problem.num_microbatches // least) * least
    training = replace(problem.training, schedule=ScheduleName.PIPEDREAM)
    own = replace(problem, training=training, num_microbatches=count)
    strategy = _strategy(own, best, recompute=recompute_choices(own)[0])
    wrong = next(asynchronous_violations(strategy, problem.profile.graph), None)
    if count > MAX_MICROBATCHES:
        wrong = f"whole rounds of all stages of PipeDream's plan are {least} minibatches, too many"
    if wrong is not None:
        return Result(Status.UNKNOWN, None, space=SPACE, reason=wrong, report=best.report)
    return Result(Status.OPTIMAL, strategy, space=SPACE, report=best.report)


def _not_a_strategy(problem: Problem, best: Optimum) -> Result | None:
    """Why the optimizer's plan is no strategy, or None if it is one."""
    if best.report is None:
        return Result(best.status, None, space=SPACE, reason=best.reason)
    widest = max(len(stage.devices) for stage in best.report.stages)
    if widest <= problem.num_microbatches:
        return None
    reason = (
        f"a stage of PipeDream's plan has {widest} replicas, and there are only"
        f" {problem.num_microbatches} microbatches; give --microbatches {widest} or more"
    )
    return Result(Status.UNKNOWN, None, space=SPACE, reason=reason, report=best.report)


def _strategy(problem: Problem, best: Optimum, *, recompute: Again) -> Strategy:
    stages = best.report.stages if best.report is not None else ()
    return pipeline(problem, best.operators, [s.devices for s in stages], recompute=recompute)


# -------------------------------------------------------------------------------- the search


def optimum(problem: Problem) -> Optimum:
    """The plan that PipeDream's optimizer finds, and its report."""
    levels = problem.topology.levels
    if not levels or math.prod(level.count for level in levels) != len(problem.topology.devices):
        return _unknown(
            f"PipeDream plans for a regular hierarchy, and topology {problem.topology.name} is not"
            " written as one; describe it with `levels:`"
        )
    graph = problem.profile.graph
    kept = _planned(graph)
    limit = _most_states([level.count for level in levels])
    states = pipedream_states(_relabelled(graph, kept), limit)
    if states is None:
        return _unknown(
            f"the graph has more than {limit} states of PipeDream's, too many to look at all pairs"
            " of them in seconds; use --solver antichain"
        )
    reached = states.downsets[-1].bit_count()
    if reached < len(kept):
        lost = next(v for i, v in enumerate(kept) if not states.downsets[-1] >> i & 1)
        return _unknown(
            f"PipeDream starts at the first operator, {graph.operators[kept[0]].name}, and its last"
            f" state leaves out {len(kept) - reached} operators, such as"
            f" {graph.operators[lost].name}"
        )
    costs = state_costs(problem, states, kept)
    tables, best = _search(problem, states, costs)
    if not math.isfinite(best[-1][-1, -1, 0]):
        return Optimum(None, (), Status.INFEASIBLE, _why_infeasible(problem, len(states)))
    return _flattened(problem, states, costs, kept, tables, best)


def _unknown(reason: str) -> Optimum:
    return Optimum(None, (), Status.UNKNOWN, reason)


def _planned(graph: Graph) -> tuple[int, ...]:
    """The operators that PipeDream plans: all but sinks called __getitem__, if that leaves any."""
    read_by, everything = consumers(graph), range(len(graph.operators))
    kept = tuple(
        v
        for v in everything
        if not graph.operators[v].type.startswith("__getitem__")
        or any(read_by[name] for name in graph.operators[v].outputs)
    )
    return kept or tuple(everything)


def _relabelled(graph: Graph, kept: Sequence[int]) -> list[list[int]]:
    """Predecessors among the operators that are kept, by their places there."""
    place = {v: i for i, v in enumerate(kept)}
    feeds = predecessors(graph)
    return [[place[u] for u in feeds[v] if u in place] for v in kept]


def _most_states(counts: Sequence[int]) -> int:
    """How many states there may be for the search to end in seconds.

    Each level takes n^2 / 2 steps for each chain i <= k < j of states; the outermost has i = 0.
    """
    inner = sum(n * n / 12 for n in counts[:-1])
    outer = counts[-1] ** 2 / 4
    cubic = (_STEPS / inner) ** (1 / 3) if inner else math.inf
    return int(min(_STATES, cubic, (_STEPS / outer) ** 0.5))


def _search(
    problem: Problem, states: States, costs: StateCosts
) -> tuple[list[kernels.LevelTables], list[Floats]]:
    """The tables and the optima of every level, innermost first."""
    options, levels = switches_of(problem.search, PipeDream), problem.topology.levels
    limit_bytes = _limit_bytes(problem)
    compute = costs.compute_s[None, :] - np.concatenate(([0.0], costs.compute_s[:-1]))[:, None]
    tables, optima = [], []
    inside = 1
    for level in levels:
        table = kernels.LevelTables(
            compute=np.ascontiguousarray(compute),
            parameters=costs.parameter_bytes,
            activations=costs.activation_bytes,
            outputs=costs.output_bytes,
            before=states.before,
            machines=level.count,
            bandwidth=level.bandwidth_bytes_per_s,
            inside=inside,
            widest=1 if options.straight_pipeline else level.count,
            memory=limit_bytes,
            ratio=options.activation_compression or 0.0,
            fewer=options.fewer_machines,
            final=level is levels[-1],
        )
        best = kernels.fill(table)
        tables.append(table)
        optima.append(best)
        compute, inside = best[:, -1, :].T, level.count
    return tables, optima


def _limit_bytes(problem: Problem) -> float:
    """The limit to what a stage stashes, by PipeDream's count; inf for none."""
    if not switches_of(problem.search, PipeDream).memory_constraint:
        return math.inf
    return float(problem.training.device_memory or _MEMORY_BYTES)


def _why_infeasible(problem: Problem, num_states: int) -> str:
    options, levels = switches_of(problem.search, PipeDream), problem.topology.levels
    reasons = []
    if options.memory_constraint:
        reasons.append(
            "every split stashes more activations and parameters in front, by PipeDream's count,"
            f" than the memory constraint of {format_bytes(_limit_bytes(problem))}; give"
            " a larger --device-memory, more levels or no --memory-constraint"
        )
    if options.straight_pipeline:
        counts = " x ".join(str(level.count) for level in levels)
        reasons.append(
            f"a straight pipeline has one stage for each of {counts} machines, and the graph's"
            f" {num_states} states cannot be split so often; take fewer --gpus, give"
            " --fewer-machines or no --straight-pipeline"
        )
    return "; or ".join(reasons)


# -------------------------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class _LevelStage:
    """A stage at one level: states `first`..`last` on some machines.

    Attributes:
        split: whether it is the last stage of a split (2), or a range that is none (1).
    """

    first: int
    last: int
    machines: int
    split: bool


def _level_stages(t: kernels.LevelTables, best: Floats, i: int, j: int) -> list[_LevelStage]:
    """The stages into which the states i..j are split at a level, first to last."""
    behind: list[_LevelStage] = []
    m = t.machines - 1
    last, size = np.empty((len(t.parameters), t.machines)), np.empty(len(t.parameters))
    while True:
        value, choice = kernels.whole(t, i, j, m), _LevelStage(i, j, m + 1, split=False)
        # The tables hold times only, so the choice is made again, as in `fill`. Of equal times no
        # split goes first, then fewer machines, then the earliest state, then the narrowest stage.
        inherited = t.fewer and m > 0 and j > i and best[j, m - 1, i] < value
        if inherited:
            value = best[j, m - 1, i]
        if m > 0 and j > i:
            kernels.last_stages(t, j, i, last, size)
            width = min(m, t.widest)
            times = [kernels.stashed(t.machines, m + 1, q + 1) for q in range(width)]
            fits = size[i:j, None] * np.array(times)[None, :] <= t.memory
            # Column q: the machines that a last stage on q + 1 of them leaves.
            before = best[i:j, m - width : m, i][:, ::-1]
            option = np.where(fits, np.maximum(before, last[i:j, :width]), np.inf)
            k, q = divmod(int(option.argmin()), width)
            if option[k, q] < value:
                behind.append(_LevelStage(i + k + 1, j, q + 1, split=True))
                j, m = i + k, m - q - 1
                continue
        if inherited:
            m -= 1
            continue
        return [choice, *reversed(behind)]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A stage at the innermost level, with what the levels around it add.

    Attributes:
        first: its first state.
        last: its last state.
        devices: indices into the topology.
        replicas: per level, innermost first.
        synchronisation_s: as in `StageReport`.
        front_s: time per minibatch of the transfer over the cut in front of it, of whatever level.
        behind_s: of the transfer over the cut behind it.
    """

    first: int
    last: int
    devices: tuple[int, ...] = (0,)
    replicas: tuple[int, ...] = ()
    synchronisation_s: float = 0.0
    front_s: float = 0.0
    behind_s: float = 0.0


def _leaves(
    tables: Sequence[kernels.LevelTables], best: Sequence[Floats], around: _Leaf
) -> Iterator[_Leaf]:
    """The stages of the innermost level inside a stage of the outer ones, first to last.

    Args:
        tables: of the levels that are left, innermost first.
        best: the least times of these levels.
        around: that stage; its devices are the first ones of the machines it runs on.
    """
    if not tables:
        yield around
        return
    t, outside = tables[-1], math.prod(around.replicas)
    size = math.prod(table.machines for table in tables[:-1])
    taken = 0
    pieces = _level_stages(t, best[-1], around.first, around.last)
    for piece in pieces:
        m = piece.machines
        inside = 1 if piece.split else t.inside
        held = float(
            t.parameters[piece.last] - (t.parameters[piece.first - 1] if piece.first else 0)
        )
        synchronisation_s = whole_s(0.0, held, m, t.bandwidth, inside) / outside
        front_s = behind_s = 0.0
        if piece.split:
            front_s = _sent_s(t, piece.first - 1, m) / outside
        if len(pieces) > 1 and piece.last < len(t.outputs) - 1:
            behind_s = _sent_s(t, piece.last, m) / outside
        inner = replace(
            around,
            first=piece.first,
            last=piece.last,
            # A machine of this level has `size` devices, so machine r begins r x size devices on.
            devices=tuple(d + (taken + r) * size for d in around.devices for r in range(m)),
            replicas=(m, *around.replicas),
            synchronisation_s=around.synchronisation_s + synchronisation_s,
            front_s=front_s if piece.split else around.front_s,
            behind_s=max(behind_s, around.behind_s) if piece is pieces[-1] else behind_s,
        )
        taken += m
        yield from _leaves(tables[:-1], best[:-1], inner)


def _sent_s(t: kernels.LevelTables, state: int, machines: int) -> float:
    """(3) over the cut behind a state, uncompressed where transfers do not count."""
    return transfer_s(float(t.outputs[state]), machines, t.bandwidth, t.ratio or 1.0)


def _flattened(
    problem: Problem,
    states: States,
    costs: StateCosts,
    kept: Sequence[int],
    tables: Sequence[kernels.LevelTables],
    best: Sequence[Floats],
) -> Optimum:
    """The stages of all levels as one pipeline. An operator runs in the first stage whose last
    state has it at or before it; a stage that this leaves empty is dropped, with its devices.
    """
    graph = problem.profile.graph
    leaves, inside, done = [], [], 0
    for leaf in _leaves(tables, best, _Leaf(0, len(states) - 1)):
        new = states.downsets[leaf.last] & ~done
        done |= new
        if new:
            leaves.append(leaf)
            inside.append([v for i, v in enumerate(kept) if new >> i & 1])
    stage_of = {v: s for s, stage in enumerate(inside) for v in stage}
    # The sinks that were not planned (`_planned`) run with the last of their sources.
    for v, feeds in enumerate(predecessors(graph)):
        if v not in stage_of:
            stage_of[v] = max((stage_of[u] for u in feeds), default=0)
            inside[stage_of[v]].append(v)
    widths = [len(leaf.devices) for leaf in leaves]
    behind = list(accumulate(reversed(widths)))[::-1]
    used = {d for leaf in leaves for d in leaf.devices}
    stages = tuple(
        StageReport(
            devices=leaf.devices,
            num_operators=len(inside[s]),
            replicas=leaf.replicas,
            compute_s=_range(costs.compute_s, leaf) / widths[s],
            synchronisation_s=leaf.synchronisation_s,
            transfer_s=max(leaf.front_s, leaf.behind_s),
            antichain=_names(graph, kept, states.antichains[leaf.first]) if leaf.first else (),
            in_flight=in_flight(behind[s], widths[s]),
        )
        for s, leaf in enumerate(leaves)
    )
    own = switches_of(problem.search, PipeDream)
    report = PipeDreamReport(
        objective_s=float(best[-1][-1, -1, 0]),
        single_s=float(costs.compute_s[-1]),
        data_parallel_s=data_parallel_s(costs, problem.topology.levels),
        transfers_counted=own.activation_compression is not None,
        num_states=len(states),
        unused_devices=tuple(d for d in range(len(problem.topology.devices)) if d not in used),
        stages=stages,
    )
    return Optimum(report, tuple(tuple(sorted(stage)) for stage in inside))


def _range(prefix: Floats, part: _LevelStage | _Leaf) -> float:
    return float(prefix[part.last] - (prefix[part.first - 1] if part.first else 0.0))


def _names(graph: Graph, kept: Sequence[int], places: Sequence[int]) -> tuple[str, ...]:
    return tuple(graph.operators[kept[i]].name for i in places)
