"""Simulation of one strategy after another that differ in little: one operator in a neighbouring
stage or on another device, or the replicas of one stage. A search over the simulator asks for that,
as FlexFlow's does (Jia et al., MLSys 2019, section 5.3).

Parts that a change leaves alone are taken over from the strategy before:

    prices          of stages with the same operators
    crossings       of tensors that no moved operator makes or reads
    all-reduces     if the devices stay and no moved operator has parameters
    blocks          (`schedules/pipelines.py`) of stages with the same devices, warm-up, and stages
                    and devices to exchange tensors with; the names of the tensors do not matter
    dependencies    and routes, if all blocks stay
    patterns        of lists, of all strategies before
    times           if all blocks stay and all actions take as long as before

Where an action takes another time, the event loop runs from its start: the first forward of any
stage is in the first few percent of an iteration, so there is no later point to go on from. Results
equal those of a full simulation to the last bit, on any links.

Solvers and commands simulate from scratch (`objective.py`, `account.py`), whatever the strategy.
What this module refuses, no user can ask for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.graph import Graph, producers
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    Crossing,
    GradientSum,
    Strategy,
    crossings_among,
    operator_indices,
    shares_devices,
    stage_of,
)
from planner.costs.pricing import ActionCosts, StagePrice, action_costs, stage_price
from planner.resharding.checks import all_violations
from planner.resharding.sums import gradient_sums
from planner.schedules.actions import Lists, Piece, Program
from planner.schedules.pipelines import (
    Block,
    ListPattern,
    ListShape,
    StageTensors,
    assembled,
    renamed,
    rows_of,
    stage_blocks,
    stage_sums,
    stage_tensors,
)
from planner.simulator.events import Prepared, Workload, prepared, run_prepared, workload
from planner.simulator.timeline import Times
from planner.support.memo import remembered

# A chain of strategies that remembers more patterns forgets them all.
MAX_PATTERNS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """A strategy and when its actions run, with all that the next strategy may take over.

    Attributes:
        problem: the one that the strategy answers.
        strategy: with no device that runs several stages.
        program: its action lists.
        costs: of the actions.
        times: of the actions.
    """

    problem: Problem
    strategy: Strategy
    program: Program
    costs: ActionCosts
    times: Times
    # Per operator, its stage.
    _stages: tuple[int, ...]
    _crossing: tuple[Crossing, ...]
    # Of each stage.
    _prices: tuple[StagePrice, ...]
    _patterns: dict[ListShape, ListPattern]
    _shapes: tuple[object, ...]
    _blocks: tuple[tuple[Block, ...], ...]
    _prepared: Prepared
    _workload: Workload

    def moved(self, strategy: Strategy) -> "Simulated":
        """Another strategy for the same problem; the less it differs, the faster. This one stays as
        it is, so that a search may go back to it.

        Raises:
            ValueError: if its structure is wrong or its schedule blocks.
        """
        return _simulated(self.problem, strategy, self)


def simulated(problem: Problem, strategy: Strategy) -> Simulated:
    """A strategy, simulated from scratch.

    Raises:
        ValueError: if its structure is wrong, its schedule blocks or is asynchronous, a stage is
            split over a mesh, or a device runs several stages.
    """
    return _simulated(problem, strategy, None)


def _simulated(problem: Problem, strategy: Strategy, before: Simulated | None) -> Simulated:
    graph = problem.profile.graph
    if shares_devices(strategy):
        raise ValueError("a device runs several stages, whose lists are made all at once")
    if any(stage.sharding is not None for stage in strategy.stages):
        raise ValueError(
            "a stage is split over a mesh, and only blocks of whole stages can be taken over;"
            " simulate it from scratch (`objective.py`)"
        )
    if strategy.schedule.is_asynchronous:
        raise ValueError("an iteration of an asynchronous schedule is part of a flow (`steady.py`)")
    if before is not None and len(before.strategy.stages) != len(strategy.stages):
        before = None
    stages = _stages_after(problem, strategy, before)
    crossing = _crossings_after(problem, stages, before)
    if any(one.targets[0] < one.source for one in crossing):
        raise ValueError("a tensor goes back to an earlier stage")
    sums = _sums_after(graph, strategy, stages, before)
    prices = tuple(_prices_after(problem, strategy, before))
    costs = action_costs(problem, strategy, prices, crossing, sums)
    tensors, tails = stage_tensors(crossing, len(strategy.stages)), stage_sums(strategy, sums)
    shapes = tuple(_shape(strategy, s, tensors[s], len(tails[s])) for s in range(len(tensors)))
    patterns = dict(before._patterns) if before and len(before._patterns) < MAX_PATTERNS else {}
    rows = rows_of(strategy)
    blocks = tuple(
        before._blocks[s]
        if before is not None and before._shapes[s] == shape
        else stage_blocks(strategy, rows, s, tensors[s], len(tails[s]), patterns)
        for s, shape in enumerate(shapes)
    )
    # Lists that differ in the names of tensors only keep their dependencies, which are positions in
    # them, and their routes, which belong to pairs of devices.
    names = tuple(Piece(one.tensor) for one in crossing)
    if before is not None and before._shapes == shapes and before.program.sums == sums:
        code, known = renamed(before.times.code, blocks, tensors, tails, names), before._prepared
    else:
        code = assembled(blocks, tensors, tails, names)
        known = prepared(code, problem.topology)
    lists, work = Program(Lists(code), sums), workload(code, costs)
    # The event loop is a function of `known` and `work` alone: equal input, equal times.
    if before and known is before._prepared and _same(work, before._workload):
        sizes = tuple(one.bytes for one in crossing)
        times = replace(before.times, code=code, piece_bytes=sizes)
    else:
        times = run_prepared(lists, costs, known, work)
    return Simulated(
        problem, strategy, lists, costs, times, stages, crossing, prices, patterns, shapes, blocks,
        known, work,
    )  # fmt: skip


def _same(one: Workload, other: Workload) -> bool:
    """Whether all actions take as long as before."""
    return all(map(np.array_equal, one, other))


def _stages_after(
    problem: Problem, strategy: Strategy, before: Simulated | None
) -> tuple[int, ...]:  # fmt: skip
    """Per operator, its stage.

    Raises:
        ValueError: if the structure of the strategy is wrong; whether a tensor goes back to an
            earlier stage is left to be checked.
    """
    graph, num_devices = problem.profile.graph, len(problem.topology.devices)
    if before is None:
        wrong = all_violations(strategy, graph, num_devices)
        if wrong:
            raise ValueError("; ".join(wrong))
        return stage_of(strategy, graph)
    pairs = list(zip(before.strategy.stages, strategy.stages, strict=True))
    changed = [s for s, (old, new) in enumerate(pairs) if old.operators != new.operators]
    index, stage_of_each = operator_indices(graph), list(before._stages)
    # Every operator was in exactly one stage. That still holds if the changed stages together have
    # the operators that they had, and the rest of `violations` needs no pass over the graph.
    there = [name for s in changed for name in before.strategy.stages[s].operators]
    now = [name for s in changed for name in strategy.stages[s].operators]
    if sorted(there) != sorted(now):
        raise ValueError("the operators are not those of the strategy before")
    for s, stage in enumerate(strategy.stages):
        rounds = -(-strategy.num_microbatches // max(1, stage.num_replicas))
        sound = stage.operators and stage.devices and 1 <= stage.warmup <= rounds
        if not sound or stage.num_replicas > strategy.num_microbatches:
            raise ValueError(f"stage {s} is empty, or has too many replicas or in flight")
        if not 0 <= min(stage.devices) <= max(stage.devices) < num_devices:
            raise ValueError(f"a device index is not in 0..{num_devices - 1}")
    for s in changed:
        for name in strategy.stages[s].operators:
            stage_of_each[index[name]] = s
    return tuple(stage_of_each)


@remembered
def _ranks(graph: Graph) -> Mapping[str, int]:
    """The tensors that operators make, in the order of the crossings."""
    return {name: i for i, name in enumerate(producers(graph))}


def _moved(before: Simulated, stages: Sequence[int]) -> list[int]:
    """The operators whose stage is another one now."""
    return [v for v, (a, b) in enumerate(zip(before._stages, stages, strict=True)) if a != b]


def _crossings_after(
    problem: Problem, stages: Sequence[int], before: Simulated | None
) -> tuple[Crossing, ...]:
    graph = problem.profile.graph
    ranks = _ranks(graph)
    if before is None:
        return tuple(crossings_among(ranks, graph, stages))
    operators = [graph.operators[v] for v in _moved(before, stages)]
    touched = {name for o in operators for name in (*o.inputs, *o.outputs) if name in ranks}
    # How a tensor crosses follows from the stages of its maker and its readers.
    if not touched:
        return before._crossing
    kept = [one for one in before._crossing if one.tensor not in touched]
    new = crossings_among(touched, graph, stages)
    return tuple(sorted([*kept, *new], key=lambda one: ranks[one.tensor]))


def _sums_after(
    graph: Graph, strategy: Strategy, stages: Sequence[int], before: Simulated | None
) -> tuple[GradientSum, ...]:
    if before is not None and _devices(strategy) == _devices(before.strategy):
        moved = _moved(before, stages)
        if not any(graph.operators[v].parameters for v in moved):
            return before.program.sums
    return gradient_sums(strategy, graph)


def _devices(strategy: Strategy) -> list[tuple[int, ...]]:
    return [stage.devices for stage in strategy.stages]


def _prices_after(
    problem: Problem, strategy: Strategy, before: Simulated | None
) -> Iterable[StagePrice]:
    devices = problem.topology.devices
    for s, stage in enumerate(strategy.stages):
        if before is not None and before.strategy.stages[s].operators == stage.operators:
            known = before._prices[s]
            if all(devices[device].type in known for device in stage.devices):
                yield known
                continue
        yield stage_price(problem, stage)


def _shape(strategy: Strategy, s: int, tensors: StageTensors, num_sums: int) -> object:
    """All that the blocks of a stage depend on."""
    stage = strategy.stages[s]
    others = tuple(
        (end.row, end.gradient, strategy.stages[end.row].devices)
        for end in (*tensors.entering, *tensors.leaving)
    )
    return (
        strategy.schedule, strategy.num_microbatches, stage.devices, stage.warmup,
        len(tensors.entering), others, num_sums,
    )  # fmt: skip
