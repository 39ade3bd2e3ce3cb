"""Times of stages where a device runs several of them, as the closed form sees them.

There, the flow is no chain of neighbours: stages run beside each other, and a tensor goes from any
stage to any later one. So one microbatch is timed by a list schedule: every device runs its stages
in their order, backwards in the reverse one, and a tensor or gradient is there one transfer after
it was made, whatever else is on the links. From it come the round trips, and the devices' loads
from sums over their stages.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from planner.artefacts.plan import StageTransfer
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    GradientSum,
    Strategy,
    crossings,
    deliveries,
    stages_by_device,
)
from planner.costs.actions import ActionCosts
from planner.costs.closed_form import StageCost
from planner.costs.transfers import slowest_link

_Devices = tuple[int, ...]


def shared_stage_costs(
    problem: Problem, strategy: Strategy, sums: Sequence[GradientSum], costs: ActionCosts
) -> tuple[StageCost, ...]:
    """The stages of a strategy in which a device runs several.

    Transfers are counted by channel, that is by ordered pair of devices: c is the busiest one out
    of a stage's devices, g the busiest one into them, per microbatch.

    Args:
        sums: of gradients.
        costs: of computations, sums and steps.
    """
    stages = strategy.stages
    forward = [max(costs.forward_s[s, d] for d in one.devices) for s, one in enumerate(stages)]
    backward = [max(costs.backward_s[s, d] for d in one.devices) for s, one in enumerate(stages)]
    together = {stages[mine[0]].devices: mine for mine in stages_by_device(strategy).values()}
    out, into = _channels_s(problem, strategy)
    trips = [*_round_trips_s(problem, strategy, forward, backward), 0.0]
    stage_costs = []
    for s, stage in enumerate(stages):
        send, back = out[stage.devices], into[stage.devices]
        others = [t for t in together[stage.devices] if t != s]
        own = [costs.sum_s[i] for i, one in enumerate(sums) if stage.devices[0] in one.devices]
        alone = forward[s] + backward[s] + send + back
        stage_costs.append(
            StageCost(
                forward_s=forward[s],
                backward_s=backward[s],
                send_s=send,
                return_s=back,
                tail_s=sum(own) + max(costs.step_s[d] for d in stage.devices),
                num_replicas=stage.num_replicas,
                warmup=stage.warmup,
                others_forward_s=sum(forward[t] for t in others),
                others_backward_s=sum(backward[t] for t in others),
                beside_s=alone - (trips[s] - trips[s + 1]),
            )
        )
    return tuple(stage_costs)


def stage_transfers(problem: Problem, strategy: Strategy) -> tuple[tuple[StageTransfer, ...], ...]:
    """Per stage, what it sends to later stages on other devices."""
    stages = strategy.stages
    ahead: list[dict[int, list[float]]] = [{} for _ in stages]
    for one in crossings(strategy, problem.profile.graph):
        source = stages[one.source].devices
        for t in deliveries(strategy, one):
            target = stages[t].devices
            both = ahead[one.source].setdefault(t, [0.0, 0.0])
            both[0] += _transfer_s(problem, source, target, one.bytes)
            if one.gradient:
                both[1] += _transfer_s(problem, target, source, one.bytes)
    return tuple(
        tuple(StageTransfer(t, *times) for t, times in sorted(each.items())) for each in ahead
    )


def _transfer_s(problem: Problem, source: _Devices, target: _Devices, size_bytes: int) -> float:
    """Over the slowest path from any of the devices to any of the others, 0 where they are one."""
    latency, rate = slowest_link(problem.topology, source, target)
    return latency + size_bytes / rate


def _channels_s(
    problem: Problem, strategy: Strategy
) -> tuple[dict[_Devices, float], dict[_Devices, float]]:
    """The time per microbatch of the busiest channel out of the devices of a stage, and into them:
    tensors and gradients together.
    """
    stages = strategy.stages
    busy: dict[tuple[_Devices, _Devices], float] = defaultdict(float)
    for one in crossings(strategy, problem.profile.graph):
        source = stages[one.source].devices
        for t in deliveries(strategy, one):
            target = stages[t].devices
            busy[source, target] += _transfer_s(problem, source, target, one.bytes)
            if one.gradient:
                busy[target, source] += _transfer_s(problem, target, source, one.bytes)
    out, into = (dict.fromkeys((stage.devices for stage in stages), 0.0) for _ in range(2))
    for (source, target), time_s in busy.items():
        out[source] = max(out[source], time_s)
        into[target] = max(into[target], time_s)
    return out, into


def _round_trips_s(
    problem: Problem, strategy: Strategy, forward: Sequence[float], backward: Sequence[float]
) -> list[float]:
    """Per stage, the time of one microbatch from the start of its forward to the end of its
    backward; at least that of later stages. From the first one on it is the whole latency.
    """
    stages, size = strategy.stages, len(strategy.stages)
    crossing = crossings(strategy, problem.profile.graph)
    free: dict[_Devices, float] = defaultdict(float)
    there, back, start = [0.0] * size, [0.0] * size, [0.0] * size
    entering: list[list[tuple[int, int]]] = [[] for _ in stages]
    returning: list[list[tuple[int, int]]] = [[] for _ in stages]
    for one in crossing:
        for t in one.targets:
            entering[t].append((one.source, one.bytes))
            if one.gradient:
                returning[one.source].append((t, one.bytes))

    def arrival_s(ends: Sequence[float], arriving: Sequence[tuple[int, int]], s: int) -> float:
        devices = stages[s].devices
        return max(
            (ends[t] + _transfer_s(problem, stages[t].devices, devices, n) for t, n in arriving),
            default=0.0,
        )

    for s in range(size):
        start[s] = max(free[stages[s].devices], arrival_s(there, entering[s], s))
        there[s] = free[stages[s].devices] = start[s] + forward[s]
    for s in reversed(range(size)):
        begin = max(free[stages[s].devices], arrival_s(back, returning[s], s), there[s])
        back[s] = free[stages[s].devices] = begin + backward[s]
    own = (end - begin for begin, end in zip(reversed(start), reversed(back), strict=True))
    trips = list(accumulate(own, max))[::-1]
    trips[0] = max(back)
    return trips
