"""The iteration time of a pipeline in closed form, for search. The simulator is the judge.

S stages, stage s with R_s replicas, W_s microbatches in flight per replica, f_s and b_s seconds
for forward and backward of one microbatch; c_s seconds for all tensors that cross the cut behind
stage s, and g_s for the gradients that come back over it; a_s seconds for the optimizer's step and
for what is left of the sums of gradients behind the backward (`exposed_sum_s`). M microbatches.

    iteration = sum_s (f_s + b_s + c_s + g_s)                 the first microbatch, there and back
              + max_s max((ceil(M / R_s) - 1) p_s, q_s)       the others, at the slowest stage
              + max_s (a_s - sum_{r < s} (b_r + g_{r}))       the exposed end

    p_s = max(f_s + b_s, l_s / W_s)
    q_s = (ceil(M / min(R_s, R_{s+1})) - 1) max(c_s, g_s)

q_s is the time of the transfers over the cut behind stage s: a device sends or receives one tensor
at a time in each direction, so the side with fewer replicas takes longer.

l_s is the round trip of a microbatch from stage s on: no more than W_s are on their way, so one
replica starts a new one at most every l_s / W_s. This is how transfers that the schedule cannot
hide slow a pipeline down. With all microbatches in flight the term falls away. It overrates
pipelines whose slowest stage is an early one, whose round trips hide behind its warm-up.

PipeDream's schedule never ends, and all it takes is the time per minibatch of the slowest stage,
whose optimizer steps after each:

    iteration = M max_s max(p_s / R_s, max(c_s, g_s) / min(R_s, R_{s+1}))
    p_s = max(f_s + b_s + a_s, (l_s + a_s) / W_s,
              (f_s + b_s + c_s + g_s + f_{s+1} + b_{s+1} + a_s) / n_s)
    n_s = W_s - ceil((W_{s+1} - 1) R_{s+1} / R_s)

The last of these is a chain of waits that turns around in the next stage: behind a forward that has
just come, this runs the backward of W_{s+1} - 1 rounds before, and stage s begins n_s rounds later
than it did when that comes back.

GPipe runs all forwards before the backwards, and the slowest stage may be another one there and
back: its second term is such a maximum with f_s and c_s plus another one with b_s and g_s.

The sums run from the last stage to the first, so `extend` puts one more stage in front.

What else occupies the devices of a stage counts in p_s, too: computations of other stages that run
on them, and posting what crosses. Where devices run several stages (`stage_costs.py`), the
sum of all stages is then shortened by the time in which they run beside each other, so that it is
the time of one microbatch in a list schedule with that placement. The same holds for l_s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.artefacts.options import Objective
from planner.artefacts.strategy import BUCKET_BYTES, MAX_BUCKETS, ScheduleName

MANY_ROUNDS = 2**31
"""Microbatches per replica of a flow that does not end."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage as the closed form sees it, times in s per microbatch.

    Attributes:
        forward_s: f of the slowest replica.
        backward_s: b of the slowest replica.
        send_s: c, the tensors over the cut behind the stage.
        return_s: g, the gradients over it.
        tail_s: a, once per iteration, or per microbatch of a replica under PipeDream's schedule.
        num_replicas: R.
        warmup: W.
        others_forward_s: what else occupies its devices beside a forward: forwards of other stages,
            and posting what crosses.
        others_backward_s: the same beside a backward.
        beside_s: of one microbatch, how much of the stage's time and transfers runs beside later
            stages.
    """

    forward_s: float
    backward_s: float
    send_s: float
    return_s: float
    tail_s: float
    num_replicas: int
    warmup: int
    others_forward_s: float = 0.0
    others_backward_s: float = 0.0
    beside_s: float = 0.0


def exposed_sum_s(
    sum_s: float, size_bytes: float, backward_s: float, beside: bool
) -> float:  # fmt: skip
    """Time from the end of the last backward to the end of the sum of its gradients, in s. Compiled
    by the solver that searches with it.

    Gradients are taken to come evenly over the backward, in buckets of equal size. The last bucket,
    a share q of all, is summed behind it, and a sum S that is longer than the backward b before the
    last bucket leaves the rest:

        max(q S, S - (1 - q) b)

    Args:
        sum_s: S, of all gradients at once.
        size_bytes: of the same.
        backward_s: b, without a forward that is run again.
        beside: whether sums run beside computations (`overlap.sums_overlap_compute`).

    >>> exposed_sum_s(4.0, 100 * 2**20, 2.0, True), exposed_sum_s(4.0, 2**20, 2.0, True)
    (2.5, 4.0)
    """
    last = min(1.0, max(BUCKET_BYTES / size_bytes, 1.0 / MAX_BUCKETS)) if beside else 1.0
    return max(last * sum_s, sum_s - (1.0 - last) * backward_s)


def sum_launches(size_bytes: float) -> float:
    """About the number of sums that gradients of a size are parted into: buckets of equal size.
    Compiled by the solver that searches with it.
    """
    return max(1.0, min(size_bytes / BUCKET_BYTES, 1.0 * MAX_BUCKETS))


def extend(
    total: float,
    worst: float,
    worst_back: float,
    exposed: float,
    forward: float,
    backward: float,
    others: float,
    others_back: float,
    send: float,
    back: float,
    tail: float,
    rounds: int,
    warmup: int,
    turn: int,
    weight: float,
    weight_behind: float,
    phases: bool,
    steady: bool,
) -> tuple[float, float, float, float]:
    """Puts one more stage in front of a pipeline. Compiled by the solver that searches with it.

    No result gets smaller where total, worst, worst_back, exposed or weight_behind is larger. So a
    search may drop a pipeline that is at least as large in all of them as another one of the same
    operators and devices.

    Args:
        total: round trip of a microbatch through the stages so far, in s.
        worst: max over them of weight x period, in s; with phases, of the forward's.
        worst_back: with phases, of the backward's period; with `steady`, forward and backward of
            the first of them; else 0.
        exposed: time from the last backward of the first of them to the end, in s.
        forward: f of the new stage.
        backward: b of the new stage.
        others: what else occupies its devices beside a forward, in s.
        others_back: the same beside a backward.
        send: c of the new stage.
        back: g of the new stage.
        tail: a of the new stage.
        rounds: ceil(M / R), microbatches per replica of the new stage.
        warmup: W of the new stage; with `rounds`, any number may be in flight.
        turn: n of the new stage; see `rounds_to_turn`. With `steady` only.
        weight: factor of its period: rounds - 1 for the iteration, or M / R under PipeDream's
            schedule, 1 / R for the bottleneck.
        weight_behind: the same of the stage behind it, 0 if there is none.
        phases: whether all forwards run before all backwards (GPipe).
        steady: whether the optimizer steps after every backward (PipeDream).

    Returns:
        total, worst, worst_back and exposed with the new stage.
    """
    total = total + forward + backward + send + back
    # The side of the cut with fewer replicas has more rounds, so a larger weight.
    crossing = max(weight, weight_behind)
    if phases:
        worst = max(worst, weight * (forward + others), crossing * send)
        worst_back = max(worst_back, weight * (backward + others_back), crossing * back)
    else:
        step = tail if steady else 0.0
        period = (forward + others) + (backward + others_back) + step
        # With all microbatches in flight, no forward waits for a backward.
        if warmup < rounds:
            period = max(period, (total + step) / warmup)
        if steady:
            here = forward + backward
            period = max(period, (here + send + back + worst_back + step) / turn)
            worst_back = here
        worst = max(worst, weight * period, crossing * max(send, back))
    # The stages behind end theirs while the last gradient comes to the new stage, which then runs
    # its backward.
    exposed = 0.0 if steady else max(tail, exposed - backward - back)
    return total, worst, worst_back, exposed


def iteration_s(
    stages: Sequence[StageCost], num_microbatches: int, schedule: ScheduleName
) -> float:  # fmt: skip
    """Time of one iteration of M microbatches, in s.

    Args:
        stages: in the order of the flow.
        num_microbatches: M.

    >>> one = StageCost(1.0, 2.0, 0.0, 0.0, 0.0, num_replicas=1, warmup=2)
    >>> iteration_s([one, one], 4, ScheduleName.ONE_F_ONE_B)
    15.0
    >>> last = StageCost(1.0, 2.0, 0.0, 0.0, 0.0, num_replicas=1, warmup=1)
    >>> iteration_s([one, last], 4, ScheduleName.PIPEDREAM)
    12.0
    """
    if schedule.is_asynchronous:
        return num_microbatches * _steady_s(stages)
    phases = schedule.has_phases
    total = worst = worst_back = exposed = behind = 0.0
    for stage in reversed(stages):
        rounds = -(-num_microbatches // stage.num_replicas)
        total, worst, worst_back, exposed = extend(
            total - stage.beside_s, worst, worst_back, exposed,
            stage.forward_s, stage.backward_s, stage.others_forward_s, stage.others_backward_s,
            stage.send_s, stage.return_s, stage.tail_s,
            rounds, stage.warmup, 1, rounds - 1, behind, phases, False,
        )  # fmt: skip
        behind = rounds - 1
    return total + worst + worst_back + exposed


def _steady_s(stages: Sequence[StageCost]) -> float:
    """Time per minibatch under PipeDream's schedule, in s."""
    # Two chains of waits are left out. One turns around in a stage behind the next one: that would
    # need all later stages in the state. The other comes from replicas that go on together,
    # when the last minibatch of their round is done: stages with many replicas before others with
    # few are underrated. ResNet-50 in 5 stages on 8, 4, 2, 1 and 1 of 16 P100 takes 206 ms here and
    # 315 ms in the simulator.
    total = worst = here = behind = 0.0
    ahead, width = 1, 1  # W and R of the stage behind; of none, 1
    for stage in reversed(stages):
        weight = 1.0 / stage.num_replicas
        turn = rounds_to_turn(stage.warmup, stage.num_replicas, ahead, width)
        total, worst, here, _ = extend(
            total, worst, here, 0.0,
            stage.forward_s, stage.backward_s, stage.others_forward_s, stage.others_backward_s,
            stage.send_s, stage.return_s, stage.tail_s,
            MANY_ROUNDS, stage.warmup, turn, weight, behind, False, True,
        )  # fmt: skip
        ahead, width, behind = stage.warmup, stage.num_replicas, weight
    return worst


def rounds_to_turn(warmup: int, width: int, warmup_behind: int, width_behind: int) -> int:
    """n, the rounds of a stage between a forward and the one that waits for the backward that the
    next stage runs right behind its forward of the same minibatch. At least 1, or the stages would
    wait for each other for ever. Compiled by the solver that searches with it.

    >>> rounds_to_turn(4, 1, 3, 1), rounds_to_turn(2, 8, 2, 4)
    (2, 1)
    """
    return max(1, warmup - -(-(warmup_behind - 1) * width_behind // width))


def objective_s(
    stages: Sequence[StageCost],
    num_microbatches: int,
    objective: Objective,
    schedule: ScheduleName,
) -> float:
    """Time of a pipeline by the closed form of an objective, in s.

    Args:
        stages: in the order of the flow.
        num_microbatches: M.
    """
    match objective:
        case Objective.ITERATION:
            return iteration_s(stages, num_microbatches, schedule)
        case Objective.BOTTLENECK:
            return bottleneck_s(stages, schedule)
    return latency_s(stages)


def bottleneck_s(
    stages: Sequence[StageCost], schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
) -> float:  # fmt: skip
    """The largest time per microbatch of a stage over its replicas, or of all stages of a device
    that runs several, in s: the time between two microbatches in the steady state, if enough of
    them are in flight. Transfers overlap with the computation, and are divided by the replicas of
    the side that has fewer. Under PipeDream's schedule a step and the exposed sums before it are a
    part of the stage's time.
    """
    steps = 1.0 if schedule.is_asynchronous else 0.0
    behind = [stage.num_replicas for stage in stages[1:]]
    return max(
        max(
            (_load_s(s) + steps * s.tail_s) / s.num_replicas,
            max(s.send_s, s.return_s) / min(s.num_replicas, ahead),
        )
        for s, ahead in zip(stages, [*behind, stages[-1].num_replicas], strict=True)
    )


def latency_s(stages: Sequence[StageCost]) -> float:
    """Forward and backward of one microbatch alone, in s."""
    return sum(s.forward_s + s.backward_s + s.send_s + s.return_s - s.beside_s for s in stages)


def _load_s(stage: StageCost) -> float:
    """Time of a microbatch in which the stage's device is occupied, in s."""
    forward_s = stage.forward_s + stage.others_forward_s
    return forward_s + (stage.backward_s + stage.others_backward_s)
