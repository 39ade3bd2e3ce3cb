"""Times and sizes of the actions of a strategy: all that the simulator asks for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.artefacts.graph import ITEM_BYTES
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    GradientSum,
    Stage,
    Strategy,
    crossings,
    shared_level,
    used_devices,
)
from planner.artefacts.topology import Topology, device_type
from planner.costs.operators import hosts_with_contention, launch_s, slowdown, slowdowns
from planner.costs.stage_pass import backward_left_s, gather_beside_s, gather_s, stage_pass
from planner.costs.transfers import crowding, gradient_sum_s
from planner.costs.update import step_s
from planner.resharding.over_replicas import over_replicas


@dataclass(frozen=True, slots=True)
class ContentionGroup:
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
        backward_left_s: by (all-reduce, device), what is left of the last backward before the
            all-reduce when that has made all gradients that are summed, in s; where there is no
            entry they are there when the device comes to the all-reduce.
        step_s: by device, time of the optimizer's step, in s.
        head_s: by device, by how much its first forward takes longer, in s, because parameters are
            gathered beside it that the last step has changed.
        post_s: by device, how long posting a send or a receive keeps it from its next action, in s.
        copy_s_per_byte: by device, time that posting takes longer for each byte of the tensor, for
            copies that its own processor makes.
        link_share: share of a tensor's bytes that moves over its route after it was posted.
        contention: devices that slow each other; times of their computations and steps are those
            of a device that computes alone.
    """

    forward_s: Mapping[tuple[int, int], float]
    backward_s: Mapping[tuple[int, int], float]
    tensor_bytes: Mapping[str, int]
    sum_s: tuple[float, ...]
    step_s: Mapping[int, float]
    backward_left_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    head_s: Mapping[int, float] = field(default_factory=dict)
    post_s: Mapping[int, float] = field(default_factory=dict)
    copy_s_per_byte: Mapping[int, float] = field(default_factory=dict)
    link_share: float = 1.0
    contention: tuple[ContentionGroup, ...] = ()
    item_bytes: Mapping[str, float] = field(default_factory=dict)


def action_costs(
    problem: Problem,
    strategy: Strategy,
    sums: Sequence[GradientSum],
    state_bytes: Sequence[int],
) -> ActionCosts:
    """Times and sizes of all actions.

    Args:
        sums: of gradients.
        state_bytes: of each stage, what the optimizer steps through for it on each device.
            Parameters that another stage on the device has, too, are stepped through once.
    """
    topology, calibration = problem.topology, problem.calibration
    used, crossing = used_devices(strategy), crossings(strategy, problem.profile.graph)
    contention = _contention_groups(problem, strategy)
    slow = slowdowns(problem, used)
    slow |= {device: 1.0 for group in contention for device in group.devices}
    own = [d for d in slow if topology.devices[d].type == calibration.device_type]
    times, arrives_s = _DeviceTimes(problem, slow), 0.0
    for s, stage in enumerate(strategy.stages):
        # Before its forwards no microbatch comes to the next stage.
        arrives_s += times.add(s, stage, state_bytes[s], arrives_s)
    of_sums = sum_factor(problem, slow)
    return ActionCosts(
        forward_s=times.forward,
        backward_s=times.backward,
        tensor_bytes={one.tensor: one.bytes for one in crossing},
        sum_s=tuple(
            of_sums * gradient_sum_s(topology, one.devices, one.bytes, one.shards, crowd)
            + max(launch_s(problem, device) for device in one.devices)
            for one, crowd in zip(sums, crowds(topology, sums), strict=True)
        ),
        backward_left_s={
            (index, device): slow[device] * time_s
            for (index, device), time_s in backward_left_s(problem, strategy, sums).items()
        },
        step_s={
            d: (calibration.steps if d in own else 1.0) * time_s
            + times.gather[d]
            + launch_s(problem, d)
            for d, time_s in times.step.items()
        },
        head_s=times.head,
        link_share=link_share(problem, slow),
        post_s=dict.fromkeys(own, calibration.post_s),
        copy_s_per_byte=dict.fromkeys(own, calibration.copy_s_per_byte),
        contention=contention,
        item_bytes={one.tensor: ITEM_BYTES[one.dtype] for one in crossing},
    )


class _DeviceTimes:
    """Times of the devices of a strategy, in s, as its stages are added one after the other.

    Attributes:
        forward: by (stage, device).
        backward: by (stage, device).
        step: by device, the optimizer's, without a calibration.
        gather: by device, what is gathered behind its step.
        head: as `ActionCosts.head_s`.

    Args:
        slow: by device, its slowdown.
    """

    def __init__(self, problem: Problem, slow: Mapping[int, float]) -> None:
        self._problem, self._slow = problem, slow
        self.forward: dict[tuple[int, int], float] = {}
        self.backward: dict[tuple[int, int], float] = {}
        self.step, self.gather = dict.fromkeys(slow, 0.0), dict.fromkeys(slow, 0.0)
        self.head: dict[int, float] = {}

    def add(self, s: int, stage: Stage, state_bytes: int, arrives_s: float) -> float:
        """Adds a stage; gives the time of its fastest forward.

        Args:
            s: its index.
            state_bytes: of it, what the optimizer steps through.
            arrives_s: before that no microbatch comes to it.
        """
        problem, slow = self._problem, self._slow
        shared = over_replicas(stage, problem.profile.graph)
        for group in (shared if shared_level(stage) >= 2 else stage).groups:
            both_s = _replica_pass_s(problem, stage, group, slow)
            for device in group:
                self.forward[s, device], self.backward[s, device] = both_s
        for group in shared.groups:
            gathered_s, head_s = gather_s(problem, stage, group), 0.0
            if stage.prefetch is not None:
                head_s = gather_beside_s(problem, stage, group, group[0]) - arrives_s
                gathered_s = 0.0
            for device in group:
                self.gather[device] += gathered_s
                self.step[device] += slow[device] * step_s(
                    problem, state_bytes, device_type(problem.topology, device)
                )
                if head_s > 0:
                    self.head[device] = slow[device] * head_s
        return min(self.forward[s, device] for device in stage.devices)


def crowds(topology: Topology, sums: Sequence[GradientSum]) -> list[float]:
    """How many times as long as alone the bytes of each sum take: sums of the same parameters, on
    devices that hold other parts of them, run at once.
    """
    groups: dict[tuple[str, ...], dict[tuple[int, ...], None]] = {}
    for one in sums:
        groups.setdefault(one.parameters, {})[one.devices] = None
    return [crowding(topology, tuple(groups[one.parameters])) for one in sums]


def _replica_pass_s(
    problem: Problem, stage: Stage, group: tuple[int, ...], slow: Mapping[int, float]
) -> tuple[float, float]:
    """Forward and backward of one microbatch on some devices of a stage, in s: of the slowest, as
    they run in step. Collectives are work for the cores of a host, too, so contention
    slows them as it slows computation.

    Args:
        slow: by device, its slowdown.
    """
    passes = [
        (slow[device], launch_s(problem, device), stage_pass(problem, stage, device))
        for device in group
    ]
    forward_s = max(factor * (start_s + one.forward_s) for factor, start_s, one in passes)
    backward_s = max(factor * (start_s + one.backward_s) for factor, start_s, one in passes)
    if stage.reruns_whole:
        backward_s += max(factor * one.forward_s for factor, _, one in passes)
    return forward_s, backward_s


def link_share(problem: Problem, used: Iterable[int]) -> float:
    """The share of a tensor's bytes that moves over its route after it was posted; all of it
    between other types of devices than the calibration's.
    """
    kind, devices = problem.calibration.device_type, problem.topology.devices
    return problem.calibration.wire if all(devices[d].type == kind for d in used) else 1.0


def sum_factor(problem: Problem, used: Iterable[int]) -> float:
    """By how much all-reduces take longer than the topology says; those between other types of
    devices than the calibration's are left as they are.
    """
    kind, devices = problem.calibration.device_type, problem.topology.devices
    return problem.calibration.sums if all(devices[d].type == kind for d in used) else 1.0


def _contention_groups(problem: Problem, strategy: Strategy) -> tuple[ContentionGroup, ...]:
    """The used devices of each host on which contention was measured, where there are several."""
    by_host: dict[str, list[int]] = {}
    for device in used_devices(strategy):
        by_host.setdefault(problem.topology.devices[device].host, []).append(device)
    return tuple(
        ContentionGroup(
            tuple(some),
            (1.0, *(slowdown(problem, host, n, len(some)) for n in range(1, len(some) + 1))),
        )
        for host, some in by_host.items()
        if len(some) > 1 and host in hosts_with_contention(problem)
    )


def with_full_contention(costs: ActionCosts) -> ActionCosts:
    """The costs where all devices of a group compute all the time, without groups: so the closed
    form has them, which does not know the devices that compute at a moment.
    """
    if not costs.contention:
        return costs
    slow = {device: group.slowdown[-1] for group in costs.contention for device in group.devices}

    # The keys are of a stage or an all-reduce, and a device.
    def slower(times: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        return {key: slow.get(key[1], 1.0) * time_s for key, time_s in times.items()}

    return replace(
        costs,
        forward_s=slower(costs.forward_s),
        backward_s=slower(costs.backward_s),
        backward_left_s=slower(costs.backward_left_s),
        step_s={d: slow.get(d, 1.0) * time_s for d, time_s in costs.step_s.items()},
        contention=(),
    )
