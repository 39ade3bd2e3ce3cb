"""Times and sizes of the actions of a strategy: stage by stage (`stage_price`), then put together
(`ActionCosts`), which is all that the simulator asks for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.artefacts.graph import ITEM_BYTES, Graph, parameters_by_name
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    Crossing,
    GradientSum,
    Stage,
    Strategy,
    indices_of,
    not_runnable,
    used_devices,
)
from planner.artefacts.topology import device_type
from planner.costs.collectives import gradient_sum_s
from planner.costs.compute import (
    crowd_slowdown,
    crowded_hosts,
    slowdowns,
    step_s,
    times_on,
)
from planner.costs.local_stage import local_stage
from planner.costs.overlap import left_s
from planner.costs.split import conversion_times, gather_s, local_times

# By device type: forward and backward of one microbatch and the optimizer's step, in s.
StagePrice = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class Crowd:
    """Devices that slow each other while they compute.

    Attributes:
        devices: at least one.
        slowdown: by how many of them compute, from 0 to all: time of a computation over its time
            alone.
    """

    devices: tuple[int, ...]
    slowdown: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """Durations and sizes of the actions of one program.

    Attributes:
        forward_s: by (stage, device), time of the forward of one microbatch, in s.
        backward_s: by (stage, device), time of its backward, recomputation included, in s.
        tensor_bytes: by name, size of each tensor that crosses stages, for one microbatch; its
            gradient has the same size.
        item_bytes: by name, size of an element of those of them that are sent in boxes.
        sum_s: time of each all-reduce of the program, in s.
        left_s: by (all-reduce, device), what is left of the last backward before the all-reduce
            when that has made all gradients that are summed, in s; where there is no entry they
            are there when the device comes to the all-reduce.
        step_s: by device, time of the optimizer's step, in s.
        launch_s: by device, time to start a computation, all-reduce or step, in s: none where times
            were measured operator by operator, because those contain it.
        post_s: by device, how long posting a send or a receive keeps it from its next action, in s.
        copy_s_per_byte: by device, time that posting takes longer for each byte of the tensor, for
            copies that its own processor makes.
        link_share: share of a tensor's bytes that moves over its route after it was posted.
        crowds: devices that slow each other; times of their computations and steps are those of a
            device that computes alone.
    """

    forward_s: Mapping[tuple[int, int], float]
    backward_s: Mapping[tuple[int, int], float]
    tensor_bytes: Mapping[str, int]
    sum_s: tuple[float, ...]
    step_s: Mapping[int, float]
    left_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    launch_s: Mapping[int, float] = field(default_factory=dict)
    post_s: Mapping[int, float] = field(default_factory=dict)
    copy_s_per_byte: Mapping[int, float] = field(default_factory=dict)
    link_share: float = 1.0
    crowds: tuple[Crowd, ...] = ()
    item_bytes: Mapping[str, float] = field(default_factory=dict)


def stage_price(problem: Problem, stage: Stage, trainable_bytes: int | None = None) -> StagePrice:
    """The times of a stage on each type of its devices, if a device has its host to itself; of a
    split one, those of its local operators, without collectives.

    Args:
        trainable_bytes: of the parameters that the optimizer steps through for this stage; None for
            all that it trains. Parameters that another stage on the device has, too, are stepped
            through once.

    Raises:
        ValueError: if its groups do not have the devices of its mesh.
    """
    if obstacle := not_runnable(stage):
        raise ValueError(f"a stage {obstacle}")
    if stage.sharding is not None:
        return _split_price(problem, stage)
    topology, operators = problem.topology, indices_of(stage, problem.profile.graph)
    if trainable_bytes is None:
        trainable_bytes = trained_bytes(problem.profile.graph, operators)
    prices: dict[str, tuple[float, float, float]] = {}
    for device in stage.devices:
        kind = topology.devices[device].type
        if kind not in prices:
            times = times_on(problem, device)
            prices[kind] = (
                float(times.forward_s[operators].sum()),
                float(times.backward_s[operators].sum()),
                step_s(problem.training.optimizer, trainable_bytes, device_type(topology, device)),
            )
    return prices


def _split_price(problem: Problem, stage: Stage) -> StagePrice:
    """The same of a split stage."""
    topology = problem.topology
    state_bytes = local_stage(problem.profile, stage).state_bytes
    prices: dict[str, tuple[float, float, float]] = {}
    for device in stage.devices:
        kind = topology.devices[device].type
        if kind not in prices:
            times = local_times(problem, stage, device)
            prices[kind] = (
                float(times.forward_s.sum()),
                float(times.backward_s.sum()),
                step_s(problem.training.optimizer, state_bytes, device_type(topology, device)),
            )
    return prices


def _in_step(
    problem: Problem,
    stage: Stage,
    group: tuple[int, ...],
    price: StagePrice,
    slow: Mapping[int, float],
) -> tuple[float, float]:
    """Forward and backward of a replica of a stage, in s: of the slowest of its devices, which run
    in step, and its collectives.

    Args:
        price: of the stage.
        slow: by device, its slowdown.
    """
    devices = problem.topology.devices
    alone = [[slow[d] * time_s for time_s in price[devices[d].type]] for d in group]
    forward, backward = max(f for f, *_ in alone), max(b for _, b, _ in alone)
    if stage.sharding is None:
        return forward, backward
    collectives = conversion_times(problem, stage, group)
    return forward + float(collectives[0].sum()), backward + float(collectives[1].sum())


def trained_bytes(graph: Graph, operators: Iterable[int]) -> int:
    """Bytes of the parameters that some operators train."""
    parameters = parameters_by_name(graph)
    held = {name for v in operators for name in graph.operators[v].parameters}
    return sum(parameters[name].bytes for name in held if parameters[name].trainable)


def action_costs(
    problem: Problem,
    strategy: Strategy,
    prices: Sequence[StagePrice],
    crossing: Sequence[Crossing],
    sums: Sequence[GradientSum],
) -> ActionCosts:
    """Times and sizes of all actions.

    Args:
        prices: of each stage.
        crossing: the tensors that cross stages.
        sums: of gradients.
    """
    topology, calibration = problem.topology, problem.calibration
    crowds = _crowds(problem, strategy)
    crowded = {device for crowd in crowds for device in crowd.devices}
    slow = {
        device: 1.0 if device in crowded else factor
        for device, factor in slowdowns(problem, used_devices(strategy)).items()
    }
    own = [d for d in slow if topology.devices[d].type == calibration.device_type]
    alike = len(own) == len(slow)  # transfers between other types are left as they are
    forward, backward, step = {}, {}, dict.fromkeys(slow, 0.0)
    gather = dict.fromkeys(slow, 0.0)
    of_sums = sum_factor(problem, slow)
    for s, stage in enumerate(strategy.stages):
        for group in stage.groups:
            f, b = _in_step(problem, stage, group, prices[s], slow)
            gathered_s = gather_s(problem, stage, group)
            for device in group:
                step[device] += slow[device] * prices[s][topology.devices[device].type][2]
                gather[device] += gathered_s
                forward[s, device], backward[s, device] = f, b + (f if stage.recompute else 0.0)
    return ActionCosts(
        forward_s=forward,
        backward_s=backward,
        tensor_bytes={one.tensor: one.bytes for one in crossing},
        sum_s=tuple(
            of_sums * gradient_sum_s(topology, one.devices, one.bytes, one.keep) for one in sums
        ),
        left_s={
            (index, device): slow[device] * time_s
            for (index, device), time_s in left_s(problem, strategy, sums).items()
        },
        step_s={
            d: (calibration.steps if d in own else 1.0) * time_s + gather[d]
            for d, time_s in step.items()
        },
        link_share=calibration.wire if alike else 1.0,
        launch_s=dict.fromkeys(own, calibration.launch_s),
        post_s=dict.fromkeys(own, calibration.post_s),
        copy_s_per_byte=dict.fromkeys(own, calibration.copy_s_per_byte),
        crowds=crowds,
        item_bytes={one.tensor: ITEM_BYTES[one.dtype] for one in crossing},
    )


def sum_factor(problem: Problem, used: Iterable[int]) -> float:
    """By how much all-reduces take longer than the topology says; those between other types of
    devices than the calibration's are left as they are.
    """
    kind, devices = problem.calibration.device_type, problem.topology.devices
    return problem.calibration.sums if all(devices[d].type == kind for d in used) else 1.0


def _crowds(problem: Problem, strategy: Strategy) -> tuple[Crowd, ...]:
    """The used devices of each host on which contention was measured, where there are several."""
    by_host: dict[str, list[int]] = {}
    for device in used_devices(strategy):
        by_host.setdefault(problem.topology.devices[device].host, []).append(device)
    return tuple(
        Crowd(
            tuple(some),
            (
                1.0,
                *(crowd_slowdown(problem, host, n, len(some)) for n in range(1, len(some) + 1)),
            ),
        )
        for host, some in by_host.items()
        if len(some) > 1 and host in crowded_hosts(problem)
    )


def all_busy(costs: ActionCosts) -> ActionCosts:
    """The costs where all devices of a crowd compute all the time, without crowds: so the closed
    form has them, which does not know the devices that compute at a moment.
    """
    if not costs.crowds:
        return costs
    slow = {device: crowd.slowdown[-1] for crowd in costs.crowds for device in crowd.devices}

    # The keys are of a stage or an all-reduce, and a device.
    def slower(times: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        return {key: slow.get(key[1], 1.0) * time_s for key, time_s in times.items()}

    return replace(
        costs,
        forward_s=slower(costs.forward_s),
        backward_s=slower(costs.backward_s),
        left_s=slower(costs.left_s),
        step_s={d: slow.get(d, 1.0) * time_s for d, time_s in costs.step_s.items()},
        crowds=(),
    )
