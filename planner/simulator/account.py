"""The description of one iteration of a strategy: its timeline with memory, the causes of idle
time, and the critical path. Under an asynchronous schedule it is a window of a flow in the steady
state (`steady.py`), and so are its parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy, stages_by_device
from planner.costs.evaluate import Evaluation, evaluate
from planner.costs.peak_memory import dynamic_bytes, static_memory
from planner.costs.stage_memory import StageMemory
from planner.schedules.actions import ActionKind, Code
from planner.simulator.critical_path import PathStep, critical_path
from planner.simulator.idle import Wait, by_cause, idle_times
from planner.simulator.steady import Curve, cropped, iterate, within
from planner.simulator.timeline import Timeline, Times, occupied, timeline_of
from planner.support.arrays import Floats, Ints


@dataclass(frozen=True, slots=True)
class Account:
    """One iteration.

    Attributes:
        timeline: with the memory of each device over time.
        idle: per used device, the seconds that it waits for each thing.
        path: the critical one.
    """

    timeline: Timeline
    idle: Mapping[int, Mapping[Wait, float]]
    path: tuple[PathStep, ...]


def account(problem: Problem, strategy: Strategy) -> Account:
    """Simulates a strategy and reads everything off.

    Raises:
        ValueError: if its structure is wrong or its schedule blocks.
    """
    evaluation = evaluate(problem, strategy)
    iteration = iterate(problem, strategy, evaluation)
    times = iteration.times
    whole = _timeline_with_memory(problem, strategy, evaluation, times)
    # Of a flow the causes are those within the flow, and the path is a part of the flow's.
    idle = idle_times(whole, strategy, problem.profile.graph)
    path = critical_path(times, problem.topology)
    return Account(
        cropped(whole, iteration),
        by_cause(within(idle, iteration), strategy),
        tuple(within(path, iteration)),
    )


def _timeline_with_memory(
    problem: Problem, strategy: Strategy, evaluation: Evaluation, times: Times
) -> Timeline:
    """The timeline of a strategy that has been evaluated and simulated."""
    memory = memory_over_time(problem, strategy, evaluation.needs, times)
    return replace(timeline_of(times), memory=memory)


def memory_over_time(
    problem: Problem, strategy: Strategy, needs: tuple[StageMemory, ...], times: Times
) -> Mapping[int, Curve]:
    """Per used device, the bytes that it uses; their maximum is the peak of
    `costs/peak_memory.py`.

    A device holds parameters, gradients and the optimizer's state all the time; buffers from the
    posting of their receive on; the workspace of an action from its start to its end.

    Args:
        needs: of each stage, the memory of one replica.
        times: of the actions of the strategy's program.
    """
    start_s, end_s = occupied(times)
    curves = {}
    for d, (device, mine) in enumerate(stages_by_device(strategy).items()):
        own = slice(times.code.start[d], times.code.start[d + 1])
        stages = {s: needs[s] for s in mine}
        # A moment of rest after each action shows the bytes that it leaves.
        rested = _with_rests(times.code, d)
        kept, buffers, workspace = dynamic_bytes(problem, strategy, rested, 0, stages)
        use = kept + buffers + workspace + static_memory(problem, strategy, stages).total_bytes
        # An all-reduce beside a computation needs nothing, so its moments may wait for that.
        moments = np.maximum.accumulate(np.stack([start_s[own], end_s[own]], axis=1).ravel())
        curves[device] = _curve(moments, use)
    return curves


def _with_rests(code: Code, device: int) -> Code:
    """The list of one device, by its position, with an action that needs nothing after each."""
    own = np.repeat(np.arange(code.start[device], code.start[device + 1]), 2)
    rests = np.arange(len(own)) % 2 == 1
    return replace(
        code,
        devices=code.devices[[device]],
        start=np.array([0, len(own)]),
        kind=np.where(rests, ActionKind.STEP, code.kind[own]).astype(np.int8),
        **{
            name: getattr(code, name)[own]
            for name in ("backward", "stage", "microbatch", "piece", "peer")
        },
    )


def _curve(moments: Floats, use: Ints) -> Curve:
    """The points at which the use changes; of one moment, the last one and larger ones before it.

    >>> _curve(np.array([0.0, 0.0, 1.0, 1.0, 2.0]), np.array([5, 7, 9, 6, 6]))
    ((0.0, 7), (1.0, 9), (1.0, 6))
    """
    points: list[tuple[float, int]] = []
    for moment, now in zip(moments.tolist(), use.tolist(), strict=True):
        while points and points[-1][0] == moment and points[-1][1] <= now:
            points.pop()
        if not points or points[-1][1] != now:
            points.append((moment, now))
    return tuple(points)
