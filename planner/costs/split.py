"""Times of a split stage: of the parts of its operators, and of its collectives.

What is approximated: the time of a part is

    measured    max(min(t, floor), t x share), if the part itself was not measured
    computed    floor + (t - floor) x share      each kernel is launched, however small its part

where the share is 1/n for each axis of n devices along which the work is cut (of a computed profile
that of the roofline with local FLOPs and bytes), and the floor is the time of the fastest operator,
at most t; of a computed profile that of an empty kernel, if that is less. Local slices, zeros and
additions of summands take no time. Where the part itself was measured (`OperatorCost.parts`), its
share is known, and counts on devices of the profile's type.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from planner.artefacts.problem import Problem
from planner.artefacts.profile import Part, Profile, is_computed
from planner.artefacts.roofline import OperatorTimes, loss_times_s, roofline_s
from planner.artefacts.sharding import Rule, rule_by, rule_lines
from planner.artefacts.strategy import Stage, indices_of
from planner.artefacts.topology import DeviceType, device_type
from planner.costs.collectives import conversion_s
from planner.costs.compute import times_on
from planner.costs.local_stage import LocalStage, local_stage
from planner.resharding.conversion import LOCAL, Step
from planner.resharding.sums import gathered_together, state_steps
from planner.support.arrays import Floats
from planner.support.memo import remembered

EMPTY_KERNEL_S = 5e-6
"""Time of a kernel that does nothing on a GPU, as in `profilers/efficiencies.py`. A large model may
have no operator that is nearly as fast.
"""


def part_of(rule: Rule, mesh: Sequence[int]) -> Part | None:
    """The part of an operator that each device of a mesh runs; None where that is the whole.

    >>> from planner.artefacts.sharding import rule_of
    >>> part_of(rule_of(["S0,R->S0", "R,R->R", "S1,S0->P"]), (2, 3, 4))
    ((2, 4), ('S0,R->S0', 'S1,S0->P'))
    >>> part_of(rule_of(["P,R->P"]), (2,)) is None
    True
    """
    lines, tensors = rule_lines(rule), (*rule.inputs, *rule.outputs)
    axes = [
        axis
        for axis, size in enumerate(mesh)
        if size > 1 and any(spec[axis].startswith("S") for spec in tensors)
    ]
    if not axes:
        return None
    return tuple(mesh[axis] for axis in axes), tuple(lines[axis] for axis in axes)


def split_parts(profile: Profile, stage: Stage) -> dict[int, Part]:
    """The parts that the devices of a stage run, by index of the operator; whole operators are left
    out.
    """
    if stage.sharding is None:
        return {}
    graph, sharding = profile.graph, stage.sharding
    both = {v: part_of(rule_by(sharding, graph.operators[v]), sharding.mesh)
            for v in indices_of(stage, graph)}  # fmt: skip
    return {v: part for v, part in both.items() if part is not None}


@remembered(kept=256)
def measured_shares(profile: Profile, stage: Stage) -> Floats:
    """(2, N) shares of the forward and backward times of the operators of `local_stage`; nan where
    the part was not measured.
    """
    whole = local_stage(profile, stage).whole
    shares = np.full((2, len(whole)), np.nan)
    for v, part in split_parts(profile, stage).items():
        for one in profile.operators[v].parts:
            if one.part == part:
                shares[:, whole.index(v)] = one.forward, one.backward
    return shares


def local_times(problem: Problem, stage: Stage, device: int) -> OperatorTimes:
    """(N,) times of the operators of `local_stage` on a device that has its host to itself, without
    collectives.
    """
    local, times = local_stage(problem.profile, stage), times_on(problem, device)
    kind = device_type(problem.topology, device)
    own = np.array(local.whole)
    mine = own >= 0
    share = np.array(local.share)
    if is_computed(problem.profile):
        share = _roofline_shares(problem.profile, local, kind)
    lost = [_loss_parts(problem.profile, side) for side in range(2)]
    known = measured_shares(problem.profile, stage)
    if kind.name != problem.profile.device_type:
        known = np.full_like(known, np.nan)
    scaled = []
    for whole_s, of_loss, measured in zip(
        (times.forward_s, times.backward_s), lost, known, strict=True
    ):
        both = np.where(mine, whole_s[own], 0.0)
        least = np.minimum(both, floor_s(problem.profile, whole_s))
        t = both * (1.0 - of_loss[own])
        part = t * share
        if is_computed(problem.profile):
            launch = np.minimum(t, least)
            part = launch + (t - launch) * share
        loss_s = both * of_loss[own] * np.array(local.loss_share)
        linear = np.maximum(np.where(share == 1.0, t, part) + loss_s, least)
        scaled.append(np.where(np.isnan(measured), linear, t * measured + loss_s))
    return OperatorTimes(*scaled)


def floor_s(profile: Profile, times_s: Floats) -> float:
    """The time that no part of an operator takes less than, in s.

    Args:
        times_s: of all operators, in one direction.
    """
    taken = times_s[times_s > 0]
    fastest_s = float(taken.min()) if len(taken) else 0.0
    # A measured time of the fastest operator is that of a call. A computed one may be computation:
    # 141 us for a Llama on an A100, which as a floor made a tensor degree of 8 a quarter too slow.
    return min(fastest_s, EMPTY_KERNEL_S) if is_computed(profile) else fastest_s


def _roofline_shares(profile: Profile, local: LocalStage, kind: DeviceType) -> Floats:
    """(N,) time of the local FLOPs and bytes over that of the whole ones."""
    shares = np.array(local.share)
    for i, v in enumerate(local.whole):
        if v >= 0 and local.share[i] < 1.0:
            whole_s = roofline_s(profile.operators[v], kind, profile.dtype)
            if whole_s > 0:
                here = local.profile.operators[i]
                shares[i] = min(1.0, roofline_s(here, kind, profile.dtype) / whole_s)
    return shares


def _loss_parts(profile: Profile, side: int) -> Floats:
    """(N,) of the time of each operator with the losses of its outputs, the part of these.

    Args:
        side: 0 forward, 1 backward.
    """
    lost = loss_times_s(profile)[side]
    own = [(one.forward_s, one.backward_s)[side] for one in profile.operators]
    both = np.array(own) + lost
    return np.divide(lost, both, out=np.zeros_like(lost), where=both > 0)


def conversion_times(
    problem: Problem, stage: Stage, group: tuple[int, ...]
) -> tuple[Floats, Floats]:
    """(N,) times of the collectives of `local_stage`, forward and backward, in s: of reshardings,
    of operators that gather parameters again before their backward, and of losses over cut classes.

    Args:
        group: the devices of the mesh, row-major.
    """
    count, mesh = len(local_stage(problem.profile, stage).whole), _mesh(stage)
    forward, backward = np.zeros(count), np.zeros(count)
    for times_s, side in zip(
        (forward, backward), collective_steps(problem.profile, stage), strict=True
    ):
        for i, steps in side.items():
            times_s[i] = stage_collectives_s(problem, group, mesh, steps)
    return forward, backward


def collective_steps(
    profile: Profile, stage: Stage
) -> tuple[dict[int, tuple[Step, ...]], dict[int, tuple[Step, ...]]]:
    """The steps of the reshardings of `local_stage`, of operators that gather parameters again
    before their backward, and of losses over cut classes, by index, forward and backward.
    """
    local = local_stage(profile, stage)
    forward = {i: copy.forward for i, copy in local.conversions.items()}
    backward = {i: copy.backward for i, copy in local.conversions.items()}
    for i, copies in local.again.items():
        backward[i] = tuple(step for copy in copies for step in local.conversions[copy].forward)
    for i, steps in local.losses.items():
        forward[i] = (*forward.get(i, ()), *steps)
    return forward, backward


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


def operator_times(problem: Problem, stage: Stage, group: tuple[int, ...]) -> tuple[Floats, Floats]:
    """(N,) times of the operators of a stage, forward and backward, in s, in the stage's order;
    each with the collectives in front of it, and the last one with those behind.

    Args:
        group: the devices of the mesh, row-major.
    """
    local, times = local_stage(problem.profile, stage), local_times(problem, stage, group[0])
    ends = [i for i, v in enumerate(local.whole) if v >= 0]
    starts = [0, *(i + 1 for i in ends[:-1])]
    both = zip((times.forward_s, times.backward_s),
               conversion_times(problem, stage, group), strict=True)  # fmt: skip
    forward, backward = (np.add.reduceat(own + moved, starts) for own, moved in both)
    return forward, backward


def gather_s(problem: Problem, stage: Stage, group: tuple[int, ...]) -> float:
    """Time, in s, in which the parameters are gathered again after a step on parts of them: in
    buckets of parameters that are gathered by the same steps.
    """
    if stage.sharding is None:
        return 0.0
    steps = state_steps(stage, problem.profile.graph)
    total = 0.0
    for names in gathered_together(stage, problem.profile.graph):
        together = [
            replace(same[0], bytes=sum(step.bytes for step in same))
            for same in zip(*(steps[name].gather for name in names), strict=True)
        ]
        total += stage_collectives_s(problem, group, stage.sharding.mesh, together)
    return total


def _mesh(stage: Stage) -> tuple[int, ...]:
    if stage.sharding is None:
        raise ValueError("expected a stage with a mesh, got one without")
    return stage.sharding.mesh
