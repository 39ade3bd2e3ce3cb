"""Collectives inside the computations of split stages, as parts of a timeline. The event loop knows
a computation as one piece; where its collectives are follows from the order of its operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, Strategy
from planner.costs.local_stage import local_stage
from planner.costs.stage_pass import stage_collectives_s, stage_pass
from planner.resharding import Resharding
from planner.resharding.conversion import LOCAL
from planner.resharding.over_replicas import over_replicas
from planner.schedules.actions import Compute, Direction
from planner.simulator.timeline import Timeline
from planner.support.arrays import Floats

# Of a computation: the share of its time before a collective, that with it, and the collective.
_Part = tuple[float, float, str]


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """Collectives of one resharding, or of a loss over cut classes, on one device.

    Attributes:
        device: index into the topology.
        name: the kinds and the tensor.
        start_s: since the start of the iteration, in s.
        end_s: since the start of the iteration, in s.
    """

    device: int
    name: str
    start_s: float
    end_s: float


def collectives(
    problem: Problem, strategy: Strategy, timeline: Timeline
) -> tuple[TimedCollective, ...]:  # fmt: skip
    """The collectives of all split stages that take time, in the order of the computations."""
    known: dict[tuple[int, tuple[int, ...], Direction], list[_Part]] = {}
    found = []
    for event in timeline.events:
        if not isinstance(event.action, Compute):
            continue
        stage = over_replicas(strategy.stages[event.action.stage], problem.profile.graph)
        if stage.sharding is None:
            continue
        group = next(group for group in stage.groups if event.device in group)
        key = event.action.stage, group, event.action.direction
        if key not in known:
            known[key] = list(_parts(problem, stage, group, event.action.direction))
        start_s, length_s = event.start_s, event.end_s - event.start_s
        found += [
            TimedCollective(event.device, name, start_s + a * length_s, start_s + b * length_s)
            for a, b, name in known[key]
        ]
    return tuple(found)


def _parts(
    problem: Problem,
    stage: Stage,
    group: tuple[int, ...],
    direction: Direction,
) -> Iterator[_Part]:
    assert stage.sharding is not None
    local, own = local_stage(problem.profile, stage), stage_pass(problem, stage, group[0])
    each_s = own.compute_s + own.collective_s
    count = len(own.operators)
    # By side, as in `StagePass`, and place in the forward.
    order = [(1, i) for i in reversed(range(count))]
    if direction is Direction.FORWARD or stage.recompute:
        there = [(0, i) for i in range(count)]
        order = there + order if direction is Direction.BACKWARD else there
    each = np.array([each_s[at] for at in order])
    ends: Floats = np.cumsum(each)
    total_s = float(ends[-1])
    for (is_back, i), end_s, time_s in zip(order, ends.tolist(), each.tolist(), strict=True):
        begun_s = end_s - time_s
        if is_back:
            for copy in local.regathered.get(i, ()):
                gathered_s = begun_s + float(own.collective_s[0, copy])
                yield begun_s / total_s, gathered_s / total_s, _name(local.conversions[copy])
                begun_s = gathered_s
        elif i in local.losses:
            # The loss follows what makes its output.
            steps = local.losses[i]
            lost_s = stage_collectives_s(problem, group, stage.sharding.mesh, steps)
            name = f"all-reduce of the loss of {local.profile.graph.operators[i].outputs[0]}"
            yield (end_s - lost_s) / total_s, end_s / total_s, name
            end_s -= lost_s
        if i in local.statistics:
            steps = local.statistics[i][is_back]
            summed_s = stage_collectives_s(problem, group, stage.sharding.mesh, steps)
            name = f"all-reduce in {'d/' * is_back}{local.profile.graph.operators[i].name}"
            yield begun_s / total_s, (begun_s + summed_s) / total_s, name
        if i in local.conversions and end_s > begun_s:
            name = _name(local.conversions[i], is_back=bool(is_back))
            if name:
                yield begun_s / total_s, end_s / total_s, name


def _name(one: Resharding, *, is_back: bool = False) -> str:
    """The kinds of a resharding's collectives and its tensor, or the gradient of that; empty where
    nothing is sent.
    """
    steps = one.backward if is_back else one.forward
    kinds = ", ".join(step.kind.value for step in steps if step.kind not in LOCAL)
    return f"{kinds} of {'d/' * is_back}{one.tensor}" if kinds else ""
