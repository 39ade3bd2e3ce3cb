"""Collectives inside the computations of split stages, as parts of a timeline. The event loop knows
a computation as one piece; where its collectives are follows from the order of its operators.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage, Strategy
from planner.costs.local_stage import LocalStage, local_stage
from planner.costs.stage_pass import stage_pass
from planner.resharding import Resharding
from planner.resharding.conversion import LOCAL
from planner.resharding.over_replicas import over_replicas
from planner.schedules.actions import Compute, Direction
from planner.simulator.timeline import Timeline

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
    """The collectives of a pass, in the order in which they are started."""
    local, own = local_stage(problem.profile, stage), stage_pass(problem, stage, group[0])
    sides = [1] if direction is Direction.BACKWARD else [0]
    if direction is Direction.BACKWARD and stage.reruns_whole:
        sides = [0, 1]
    total_s, begun_s = sum(own.times[side].total for side in sides), 0.0
    for side in sides:
        times = own.times[side]
        every = [
            *((*span, _moved(local, row, is_back=bool(side))) for row, span in times.moved.items()),
            *((*span, _asked(local, row, is_back=bool(side))) for row, span in times.asked.items()),
            *(
                (*span, _moved(local, row, is_back=False))
                for row, span in times.moved_again.items()
            ),
            *(
                (*span, _asked(local, row, is_back=False))
                for row, span in times.asked_again.items()
            ),
        ]
        for start_s, end_s, name in sorted(every):
            yield (begun_s + start_s) / total_s, (begun_s + end_s) / total_s, name
        begun_s += times.total


def _moved(local: LocalStage, row: int, *, is_back: bool) -> str:
    """The name of the collectives of a resharding, or of an operator that gathers parameters
    again.
    """
    if row in local.conversions:
        return _name(local.conversions[row], is_back=is_back)
    return "; ".join(_name(local.conversions[copy]) for copy in local.regathered[row])


def _asked(local: LocalStage, row: int, *, is_back: bool) -> str:
    """The name of the all-reduces that an operator waits for on the spot."""
    operator = local.profile.graph.operators[row]
    if row in local.losses:
        return f"all-reduce of the loss of {operator.outputs[0]}"
    return f"all-reduce in {'d/' * is_back}{operator.name}"


def _name(one: Resharding, *, is_back: bool = False) -> str:
    """The kinds of a resharding's collectives and its tensor, or the gradient of that; empty where
    nothing is sent.
    """
    steps = one.backward if is_back else one.forward
    kinds = ", ".join(step.kind.value for step in steps if step.kind not in LOCAL)
    return f"{kinds} of {'d/' * is_back}{one.tensor}" if kinds else ""
