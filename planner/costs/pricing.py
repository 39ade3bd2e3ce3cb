"""What the actions of a strategy cost: stage by stage, then put together."""

from collections.abc import Mapping, Sequence

from planner.costs.actions import ActionCosts
from planner.costs.collectives import allreduce_s
from planner.costs.compute import slowdowns, step_s, times_on
from planner.problem import Problem
from planner.strategy import Crossing, GradientSum, Stage, Strategy, used_devices
from planner.topology import device_type

# By device type: forward and backward of one microbatch and the optimizer's step, in s.
StagePrice = Mapping[str, tuple[float, float, float]]


def stage_price(
    problem: Problem, stage: Stage, operators: Sequence[int], trainable_bytes: int
) -> StagePrice:
    """What a stage costs on each type of its devices, if a device has its host to itself.

    Args:
        operators: indices of the stage's operators, ascending.
        trainable_bytes: of the parameters that it trains.
    """
    topology = problem.topology
    found: dict[str, tuple[float, float, float]] = {}
    for device in stage.devices:
        kind = topology.devices[device].type
        if kind not in found:
            times = times_on(problem, device)
            found[kind] = (
                float(times.forward_s[operators].sum()),
                float(times.backward_s[operators].sum()),
                step_s(problem.options.optimizer, trainable_bytes, device_type(topology, device)),
            )
    return found


def action_costs(
    problem: Problem,
    strategy: Strategy,
    prices: Sequence[StagePrice],
    crossing: Sequence[Crossing],
    sums: Sequence[GradientSum],
) -> ActionCosts:
    """What all actions cost.

    Args:
        prices: of each stage.
        crossing: the tensors that cross stages.
        sums: of gradients.
    """
    topology, found = problem.topology, problem.calibration
    slow = slowdowns(topology, used_devices(strategy))
    own = [d for d in slow if topology.devices[d].type == found.device_type]
    alike = len(own) == len(slow)  # transfers and sums between other types are left as they are
    forward, backward, step = {}, {}, dict.fromkeys(slow, 0.0)
    for s, stage in enumerate(strategy.stages):
        for device in stage.devices:
            alone = prices[s][topology.devices[device].type]
            f, b, own_step_s = (slow[device] * time_s for time_s in alone)
            step[device] += own_step_s
            forward[s, device], backward[s, device] = f, b + (f if stage.recompute else 0.0)
    return ActionCosts(
        forward_s=forward,
        backward_s=backward,
        tensor_bytes={one.tensor: one.bytes for one in crossing},
        sum_s=tuple(
            (found.sums if alike else 1.0) * allreduce_s(topology, one.devices, one.bytes)
            for one in sums
        ),
        step_s={d: (found.steps if d in own else 1.0) * time_s for d, time_s in step.items()},
        wire=found.wire if alike else 1.0,
        launch_s=dict.fromkeys(own, found.launch_s),
        post_s=dict.fromkeys(own, found.post_s),
        copy_s_per_byte=dict.fromkeys(own, found.copy_s_per_byte),
    )
