"""The forward and backward of a stage on one device: its operators, and the collectives between
them.

What is approximated in a split stage: the time of a part of an operator is

    measured    max(min(t, floor), t x share), if the part itself was not measured
    computed    floor + (t - floor) x share      each kernel is launched, however small its part

where the share is 1/n for each axis of n devices along which the work is cut (of a computed profile
that of the roofline with local FLOPs and bytes), and the floor is the time of the fastest operator,
at most t; of a computed profile that of an empty kernel, if that is less. The host starts the
kernels of a part in the same time as those of the whole operator. Local slices, zeros and
additions of summands take no time. Where the part itself was measured (`OperatorCost.parts`), its
share is known, and counts on devices of the profile's type.

Sums of gradients run beside the backward that makes the gradients. A device sums one bucket of
gradients (`strategy.gradient_sums`) after the other, on a stream of its own. A bucket is ready when
the last of its gradients is made, which is within the last backward before the sum. The optimizer's
step waits for all sums. A sum takes nothing from a computation beside it, with one exception: among
processes of one host that leave no core to spare, a sum is work for the cores that compute, too.
There it begins behind the backward, so that both times add up. A device that runs several stages
sums behind its backwards, too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from planner.artefacts.clocks import on_clocks_s
from planner.artefacts.graph import holders
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Part, Profile, is_computed
from planner.artefacts.roofline import EMPTY_KERNEL_S, loss_times_s, roofline_s
from planner.artefacts.segments import segments_of
from planner.artefacts.sharding import Rule, rule_by
from planner.artefacts.strategy import (
    GradientSum,
    Stage,
    Strategy,
    in_parts,
    indices_of,
    not_runnable,
    stages_by_device,
    used_devices,
)
from planner.artefacts.topology import DeviceType, Host, device_type, hosts_by_name
from planner.artefacts.weight_gradients import backward_weight_share, parameter_work
from planner.costs.local_stage import LocalStage, local_stage
from planner.costs.offloading import host_copies, host_of
from planner.costs.operators import operator_times
from planner.costs.pass_times import (
    PassTimes,
    SideDurations,
    TimedGather,
    alone_times,
    backward_times,
    forward_times,
)
from planner.costs.transfers import conversion_s
from planner.resharding.conversion import LOCAL, Step
from planner.resharding.over_replicas import over_replicas
from planner.resharding.overlap import PassOrder
from planner.resharding.sums import gathered_bytes, gathered_together, starts_within, state_steps
from planner.support.arrays import Floats, Ints
from planner.support.memo import remembered


@dataclass(frozen=True, slots=True)
class StagePass:
    """Forward and backward of one microbatch on one device of a replica, which has its host to
    itself; n operators and reshardings in the order of `LocalStage`.

    Attributes:
        operators: (n,) index in the graph; -1 of a resharding.
        compute_s: (2, n) forward and backward of each, of the device alone.
        collective_s: (2, n) the collectives of each: of reshardings, of operators that gather
            parameters again before their backward or add up statistics, and of losses over cut
            classes.
        times: when each of them starts and ends in the forward, and in the backward.
    """

    operators: Ints
    compute_s: Floats
    collective_s: Floats
    times: tuple[PassTimes, PassTimes]

    @property
    def forward_s(self) -> float:
        """The whole forward, in s."""
        return self.times[0].total

    @property
    def backward_s(self) -> float:
        """The whole backward, with the segments that it runs again, in s."""
        return self.times[1].total

    def by_operator_s(self) -> Floats:
        """(2, N) forward and backward of the operators alone, each with what is waited for between
        it and the one before, the last one with what is behind it, too.
        """
        rows = np.flatnonzero(self.operators >= 0)
        there, back = (np.array(side.end)[rows] for side in self.times)
        ends = np.array([there, back[::-1]])
        ends[:, -1] = self.forward_s, self.backward_s
        each: Floats = np.diff(ends, axis=1, prepend=0.0)
        each[1] = each[1][::-1]
        return each


def stage_pass(problem: Problem, stage: Stage, device: int) -> StagePass:
    """The pass of a stage on one of its devices."""
    return _stage_passes(problem, stage)[device]


@remembered(kept=64)
def _stage_passes(problem: Problem, stage: Stage) -> Mapping[int, StagePass]:
    """The passes by device: of devices of one type, or of one type in one replica of a split stage,
    the same.

    Raises:
        ValueError: if its groups do not have the devices of its mesh.
    """
    if obstacle := not_runnable(stage):
        raise ValueError(f"a stage {obstacle}")
    stage = over_replicas(stage, problem.profile.graph)
    known: dict[tuple[str, tuple[int, ...], Host | None], StagePass] = {}
    passes = {}
    for group in stage.groups:
        for device in group:
            host = host_of(problem.topology, device) if stage.offloaded else None
            key = problem.topology.devices[device].type, group if stage.sharding else (), host
            if key not in known:
                known[key] = _stage_pass(problem, stage, group, device)
            passes[device] = known[key]
    return passes


def _stage_pass(problem: Problem, stage: Stage, group: tuple[int, ...], device: int) -> StagePass:
    if stage.sharding is None:
        operators = np.array(indices_of(stage, problem.profile.graph), dtype=np.int64)
        known = operator_times(problem, device)
        device_s, host_s = known.device_s[:, operators], known.host_s[:, operators]
        alone = alone_times(
            *on_clocks_s(device_s, host_s, launch_blocking=known.launch_blocking),
            segments_of(stage, problem.profile.graph),
            host_copies(problem, stage, device),
        )  # fmt: skip
        return StagePass(operators, device_s, np.zeros_like(device_s), alone)
    durations, local = (
        _durations(problem, stage, group, device), local_stage(problem.profile, stage)
    )  # fmt: skip
    return StagePass(
        np.array(local.graph_index, dtype=np.int64),
        np.array([side.compute for side in durations]),
        np.array([np.add(side.moved, side.asked) for side in durations]),
        pass_with(problem, stage, (group, device), local.order),
    )


def pass_with(
    problem: Problem, stage: Stage, place: tuple[tuple[int, ...], int], order: PassOrder
) -> tuple[PassTimes, PassTimes]:
    """Forward and backward of a split stage with its collectives started in some order.

    Args:
        place: the devices of a mesh, and one of them.
        order: may be another one than the stage's own.
    """
    group, device = place
    local, both = local_stage(problem.profile, stage), _durations(problem, stage, group, device)
    beside, copies = _runs_beside(problem, group), host_copies(problem, stage, device)
    return (
        forward_times(local, order, both[0], beside=beside, copies=copies),
        backward_times(local, order, both[1], beside=beside, ahead=both[0], copies=copies),
    )


@remembered(kept=64)
def _durations(
    problem: Problem, stage: Stage, group: tuple[int, ...], device: int
) -> tuple[SideDurations, SideDurations]:
    """The durations of a forward and of a backward of a split stage."""
    local = local_stage(problem.profile, stage)
    both_s = _own_times_s(problem, stage, device)
    assert stage.sharding is not None
    own, made = np.array(local.graph_index), []
    host_s = np.where(own >= 0, operator_times(problem, device).host_s[:, own], 0.0)
    on_both = on_clocks_s(both_s, host_s, launch_blocking=problem.profile.launch_blocking)
    for side, (compute_s, started_s) in enumerate(zip(*on_both, strict=True)):
        moved, asked = ([0.0] * len(local.graph_index) for _ in range(2))
        for row, steps in _moved_steps(local, side).items():
            moved[row] = stage_collectives_s(problem, group, stage.sharding.mesh, steps)
        for row, steps in _asked_steps(local, side).items():
            asked[row] = stage_collectives_s(problem, group, stage.sharding.mesh, steps)
        share = _weight_shares(problem.profile, local)
        weights = (both_s[side] * share).tolist()
        made.append(SideDurations(compute_s.tolist(), moved, asked, weights, started_s.tolist()))
    return made[0], made[1]


def _weight_shares(profile: Profile, local: LocalStage) -> Floats:
    """(n,) of the backward of each operator with its losses, the part in which it makes gradients
    of parameters.
    """
    own = np.array(local.graph_index)
    shares = np.array(backward_weight_share(profile)) * (1.0 - _loss_shares(profile)[1])
    return np.where(own >= 0, shares[own], 0.0)


def _runs_beside(problem: Problem, group: tuple[int, ...]) -> bool:
    """Whether the collectives of a split stage run beside its computations, if all devices of the
    topology are used.
    """
    return sums_overlap_compute(problem, range(len(problem.topology.devices)), group)


# ------------------------------------------------------------------------ parts of operators


def part_of(rule: Rule, mesh: Sequence[int]) -> Part | None:
    """The part of an operator that each device of a mesh runs; None where that is the whole.

    >>> from planner.artefacts.sharding import rule_of
    >>> part_of(rule_of(["S0,R->S0", "R,R->R", "S1,S0->P"]), (2, 3, 4))
    ((2, 4), ('S0,R->S0', 'S1,S0->P'))
    >>> part_of(rule_of(["P,R->P"]), (2,)) is None
    True
    """
    cut = [(size, one) for size, one in zip(mesh, rule.axes, strict=True) if size > 1 and one.cuts]
    return (tuple(size for size, _ in cut), tuple(str(one) for _, one in cut)) if cut else None


def split_parts(profile: Profile, stage: Stage) -> dict[int, Part]:
    """The parts that the devices of a stage run, by index of the operator; whole operators are left
    out.
    """
    graph, sharding = profile.graph, over_replicas(stage, profile.graph).sharding
    if sharding is None:
        return {}
    both = {v: part_of(rule_by(sharding, graph.operators[v]), sharding.mesh)
            for v in indices_of(stage, graph)}  # fmt: skip
    return {v: part for v, part in both.items() if part is not None}


@remembered(kept=256)
def _measured_shares(profile: Profile, stage: Stage) -> Floats:
    """(2, N) shares of the forward and backward times of the operators of `local_stage`; nan where
    the part was not measured.
    """
    whole = local_stage(profile, stage).graph_index
    shares = np.full((2, len(whole)), np.nan)
    for v, part in split_parts(profile, stage).items():
        for one in profile.operators[v].parts:
            if one.part == part:
                shares[:, whole.index(v)] = one.forward, one.backward
    return shares


def part_times_s(problem: Problem, stage: Stage, device: int) -> tuple[tuple[int, ...], Floats]:
    """The operators of a split stage with its conversions, by index in the graph, -1 of a
    conversion; and (2, n) their times, forward and backward, in s, without collectives, copies of
    gathered weights and sums of gradients.
    """
    return local_stage(problem.profile, stage).graph_index, _part_times_s(problem, stage, device)


def sums_of_gradients_s(problem: Problem, device: int) -> Floats:
    """(N,) the time in which each operator adds whole gradients of its parameters to those of other
    microbatches, in s.
    """
    profile, lost = problem.profile, _loss_shares(problem.profile)[1]
    backward_s = operator_times(problem, device).device_s[1]
    added_s: Floats = backward_s * (1.0 - lost) * parameter_work(profile)[1]
    return added_s


def _own_times_s(problem: Problem, stage: Stage, device: int) -> Floats:
    """(2, n) times of the operators of `local_stage`, forward and backward, without collectives."""
    local, kind = local_stage(problem.profile, stage), device_type(problem.topology, device)
    times_s = _part_times_s(problem, stage, device)
    times_s += np.array(local.cast_bytes).T / kind.memory_bandwidth_bytes_per_s
    own, held = np.array(local.graph_index), np.array(local.parameter_shares)[:, 1]
    times_s[1] += np.where(own >= 0, sums_of_gradients_s(problem, device)[own], 0.0) * held
    return times_s


def _part_times_s(problem: Problem, stage: Stage, device: int) -> Floats:
    """The same without copies of gathered weights and sums of gradients."""
    profile, times = problem.profile, operator_times(problem, device)
    local, kind = local_stage(profile, stage), device_type(problem.topology, device)
    own = np.array(local.graph_index)
    whole_s = np.where(own >= 0, times.device_s[:, own], 0.0)
    floor_s = np.array(shortest_part_s(problem, device))[:, None]
    computed = is_computed(profile)
    share = _roofline_shares(profile, local, kind) if computed else np.array(local.share)
    measured = _measured_shares(profile, stage)
    if kind.name != profile.device_type:
        measured = np.full_like(measured, np.nan)
    of_loss = _loss_shares(profile)[:, own]
    fixed, added = (one[..., own] for one in parameter_work(profile))
    alone_s, lost_s = whole_s * (1.0 - of_loss), whole_s * of_loss
    t = alone_s * np.stack((np.ones_like(added), 1.0 - added))
    least = np.minimum(t + lost_s, floor_s)
    fixed_s = alone_s * fixed
    grows_s = t - fixed_s
    launch = np.minimum(grows_s, least) if computed else 0.0
    part = launch + (grows_s - launch) * share + fixed_s * np.array(local.parameter_shares)[:, 0]
    loss_s = lost_s * np.array(local.loss_share)
    linear = np.maximum(np.where(share == 1.0, t, part) + loss_s, least)
    times_s: Floats = np.where(np.isnan(measured), linear, t * measured + loss_s)
    return times_s


def shortest_part_s(problem: Problem, device: int) -> tuple[float, float]:
    """The time that no part of an operator takes less than on the device, forward and backward, in
    s.
    """
    forward_s, backward_s = operator_times(problem, device).device_s
    return _shortest_s(problem.profile, forward_s), _shortest_s(problem.profile, backward_s)


def _shortest_s(profile: Profile, times_s: Floats) -> float:
    """Of one direction."""
    taken = times_s[times_s > 0]
    fastest_s = float(taken.min()) if len(taken) else 0.0
    # A measured time of the fastest operator is that of a call. A computed one may be computation:
    # 141 us for a Llama on an A100, which as a floor made a tensor degree of 8 a quarter too slow.
    return min(fastest_s, EMPTY_KERNEL_S) if is_computed(profile) else fastest_s


def _roofline_shares(profile: Profile, local: LocalStage, kind: DeviceType) -> Floats:
    """(N,) time of the local FLOPs and bytes over that of the whole ones."""
    shares = np.array(local.share)
    for i, v in enumerate(local.graph_index):
        if v >= 0 and local.share[i] < 1.0:
            whole_s = roofline_s(profile.operators[v], kind, profile.dtype)
            if whole_s > 0:
                here = local.profile.operators[i]
                shares[i] = min(1.0, roofline_s(here, kind, profile.dtype) / whole_s)
    return shares


def _loss_shares(profile: Profile) -> Floats:
    """(2, N) of the time of each operator with the losses of its outputs, the part of these."""
    lost = loss_times_s(profile)
    own = np.array([[one.forward_s, one.backward_s] for one in profile.operators]).T
    both = own + lost
    return np.divide(lost, both, out=np.zeros_like(lost), where=both > 0)


# -------------------------------------------------------------------------- collectives


def collective_steps(profile: Profile, stage: Stage) -> tuple[Sequence[Step], Sequence[Step]]:
    """The steps of a forward, and of a backward with the segments that it runs again."""
    local = local_stage(profile, stage)
    forward, backward = (
        [(row, step) for row, steps in steps_by_row(local, side).items() for step in steps]
        for side in range(2)
    )
    again = frozenset().union(*(one.operators for one in local.segments))
    return [step for _, step in forward], [
        *(step for row, step in forward if row in again), *(step for _, step in backward)
    ]  # fmt: skip


def steps_by_row(local: LocalStage, side: int) -> Mapping[int, Sequence[Step]]:
    """The steps of each resharding and operator in a forward (0) or a backward (1), by row."""
    steps = _moved_steps(local, side)
    for row, some in _asked_steps(local, side).items():
        steps[row] = (*steps.get(row, ()), *some)
    return steps


def _moved_steps(local: LocalStage, side: int) -> dict[int, Sequence[Step]]:
    """The steps of the reshardings of a stage, by row, in a forward (0) or a backward (1); of
    operators those that gather parameters again before their backward.
    """
    if side == 0:
        return {i: copy.forward for i, copy in local.conversions.items()}
    steps: dict[int, Sequence[Step]] = {i: one.backward for i, one in local.conversions.items()}
    for i, copies in local.regathered.items():
        steps[i] = tuple(step for copy in copies for step in local.conversions[copy].forward)
    return steps


def _asked_steps(local: LocalStage, side: int) -> dict[int, Sequence[Step]]:
    """The steps of statistics of cut dimensions, and in a forward of losses over cut classes, by
    row.
    """
    steps: dict[int, Sequence[Step]] = {i: both[side] for i, both in local.statistics.items()}
    for i, some in local.losses.items() if side == 0 else ():
        steps[i] = (*steps.get(i, ()), *some)
    return steps


def stage_collectives_s(
    problem: Problem, group: tuple[int, ...], mesh: tuple[int, ...], steps: Sequence[Step]
) -> float:
    """Time of steps inside a stage, in s: as the topology says, corrected by the calibration where
    that is for all devices.

    Args:
        group: the devices of the mesh, row-major.
        mesh: size of each axis.
    """
    known, devices = problem.calibration, problem.topology.devices
    time_s = conversion_s(problem.topology, group, mesh, steps)
    if not all(devices[d].type == known.device_type for d in group):
        return time_s
    return known.collectives * time_s + known.collective_s * count_collectives(steps)


def count_collectives(steps: Iterable[Step]) -> int:
    """The number of steps that send something."""
    return sum(step.kind not in LOCAL for step in steps)


def gather_s(problem: Problem, stage: Stage, group: tuple[int, ...]) -> float:
    """Time, in s, in which the parameters are gathered again after a step on parts of them: in
    buckets of parameters that are gathered by the same steps.
    """
    return sum(time_s for _, time_s in step_gathers(problem, stage, group))


def gather_beside_s(problem: Problem, stage: Stage, group: tuple[int, ...], device: int) -> float:
    """By how much a forward takes longer, in s, that the same gathers run beside, which were
    started when it began.
    """
    ((_, delay_s),) = gather_delays_s(problem, stage, (group, device), [stage.gathered_ahead])
    return delay_s


def gather_delays_s(
    problem: Problem,
    stage: Stage,
    place: tuple[tuple[int, ...], int],
    budgets: Iterable[int | None],
) -> list[tuple[int | None, float]]:
    """The same with some values of `Stage.gathered_ahead`, each with its time.

    Args:
        place: the devices of a mesh, and one of them.
    """
    (group, device), graph = place, problem.profile.graph
    gathers = step_gathers(problem, stage, group)
    if not gathers or not _runs_beside(problem, group):
        return [(budget, sum(time_s for _, time_s in gathers)) for budget in budgets]
    whole = over_replicas(stage, graph)
    local, (durations, _) = (
        local_stage(problem.profile, whole), _durations(problem, whole, group, device)
    )  # fmt: skip
    row, users = {name: i for i, name in enumerate(whole.operators)}, holders(graph)
    readers = [
        min(row[graph.operators[v].name] for name in names for v in users[name]
            if graph.operators[v].name in row) for names, _ in gathers
    ]  # fmt: skip
    copies = host_copies(problem, whole, device)
    run = partial(forward_times, local, local.order, durations, beside=True, copies=copies)
    alone_s = run().total

    @cache
    def delay_s(starts: tuple[int, ...]) -> float:
        timed = [
            TimedGather(0 if at < 0 else readers[at], reader, time_s)
            for at, reader, (_, time_s) in zip(starts, readers, gathers, strict=True)
        ]
        return run(gathers=timed).total - alone_s

    sizes = gathered_bytes(stage, graph)
    return [(budget, delay_s(starts_within(sizes, budget))) for budget in budgets]


def step_gathers(
    problem: Problem, stage: Stage, group: tuple[int, ...]
) -> list[tuple[tuple[str, ...], float]]:
    """The parameters that are gathered together after a step, and the time of that, in s.

    Args:
        group: the devices that share them, row-major.
    """
    mesh = over_replicas(stage, problem.profile.graph).mesh
    steps = state_steps(stage, problem.profile.graph) if mesh else {}
    found = []
    for names in gathered_together(stage, problem.profile.graph) if mesh else ():
        together = [
            replace(same[0], bytes=sum(step.bytes for step in same))
            for same in zip(*(steps[name].gather for name in names), strict=True)
        ]
        found.append((names, stage_collectives_s(problem, group, mesh, together)))
    return found


# ------------------------------------------------------------ sums of gradients beside a backward


def sums_overlap_compute(problem: Problem, used: Collection[int], devices: Sequence[int]) -> bool:
    """Whether sums over some devices run beside their computations: not where the host waits for
    each kernel, nor where all cores of a host compute.

    Args:
        used: all devices that compute.
        devices: at least two of them.
    """
    if problem.profile.launch_blocking:
        return False
    topology = problem.topology
    hosts = {topology.devices[device].host for device in devices}
    if len(hosts) > 1:
        return True
    cores = hosts_by_name(topology)[min(hosts)].cores
    return cores is None or sum(topology.devices[d].host in hosts for d in used) < cores


def backward_left_s(
    problem: Problem, strategy: Strategy, sums: Sequence[GradientSum]
) -> dict[tuple[int, int], float]:
    """By (sum, device), what is left of the last backward before a sum when it has made all
    gradients of the bucket, in s, on a device that computes alone; only of sums that run beside it.
    """
    if not sums:
        return {}
    used = used_devices(strategy)
    stages = {d: mine[0] for d, mine in stages_by_device(strategy).items() if len(mine) == 1}
    overlaps: dict[tuple[int, ...], bool] = {}
    left: dict[tuple[int, int], float] = {}
    for index, one in enumerate(sums):
        if one.devices not in overlaps:
            overlaps[one.devices] = sums_overlap_compute(problem, used, one.devices)
        if not overlaps[one.devices]:
            continue
        for device in stages.keys() & one.devices:
            stage = strategy.stages[stages[device]]
            after = _gradients_left_s(stage_pass(problem, stage, device), stage, problem.profile)
            left[index, device] = min(after[name] for name in one.parameters)
    return left


@remembered(kept=64)
def _gradients_left_s(one: StagePass, stage: Stage, profile: Profile) -> Mapping[str, float]:
    """By parameter, what is left of the backward when its gradient is there, in s: behind the
    backward of its first reader, or where that of its copy has come home.
    """
    back, made_s = one.times[1], dict[str, float]()
    if in_parts(stage):
        for row, copy in local_stage(profile, stage).conversions.items():
            made_s[copy.tensor] = max(made_s.get(copy.tensor, 0.0), back.end[row])
    for row, v in enumerate(one.operators.tolist()):
        for name in profile.graph.operators[v].parameters if v >= 0 else ():
            made_s[name] = max(made_s.get(name, 0.0), back.gradient[row])
    return {name: back.total - end_s for name, end_s in made_s.items()}
