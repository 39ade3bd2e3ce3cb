"""Action lists where a device runs several stages.

A device with one stage keeps the order of its schedule (`orders.SCHEDULES`). The others are
list-scheduled, on an estimate of the times: a device that is idle takes a backward that is ready,
else a forward, of the oldest microbatch. All that a stage sends to another one is there together,
and the transfers between two devices follow each other. What a computation waits for:

    F of (s, m)   F of m in the stages that feed s, and in the stage before s on its device;
                  F of (s, m - 1); B of (s, m - W_s), so that no more than W_s are in flight
    B of (s, m)   F of (s, m); B of m in the stages that send gradients to s, and in the stage
                  after s on its device; B of (s, m - 1)

GPipe has no W, but the first backward of a device waits for its last forward. If all devices are
list-scheduled, none of this can block: of the oldest microbatch that is under way, the first
forward or, after them all, the last backward that has not run waits for nothing.

So the stages of a device run each microbatch in their order, and backwards in the reverse one. A
tensor that several of them read is received by the first for all, and goes back from it: its
gradients have been added up by then. A tensor between two of them is neither sent nor received.

A device receives from another one in the order in which that sends. A receive is posted one
computation of its stage and direction ahead, as in other lists. The first of a kind has none before
it, and is posted when its tensor is expected, so that a short stage does not hold up its transfer.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from planner.artefacts.plan import StagePrediction
from planner.artefacts.strategy import (
    Crossing,
    GradientSum,
    Strategy,
    deliveries,
    stages_by_device,
)
from planner.schedules.actions import Action, AllReduce, Compute, Direction, Receive, Send, Step
from planner.schedules.orders import SCHEDULES
from planner.schedules.task_list import TaskList

_F, _B = Direction.FORWARD, Direction.BACKWARD


def lists(
    strategy: Strategy,
    crossing: Sequence[Crossing],
    sums: Sequence[GradientSum],
    times: Sequence[StagePrediction],
) -> dict[int, tuple[Action, ...]]:
    """The action list of every used device.

    Args:
        crossing: the tensors that cross stages.
        sums: the all-reduces of gradients, in their global order.
        times: of each stage; without them a forward takes as long as it has operators, and a
            backward twice that.
    """
    order = _list_schedule(strategy, _waits(strategy, crossing), times)
    sends, streams = _transfers(strategy, crossing, order)
    receives = _posted(order, streams)
    by_device: dict[int, tuple[Action, ...]] = {}
    for device, computations in order.on.items():
        actions: list[Action] = []
        for compute in computations:
            actions += [*receives.get(compute, ()), compute, *sends.get(compute, ())]
        actions += [AllReduce(i) for i, one in enumerate(sums) if device in one.devices]
        by_device[device] = (*actions, Step())
    return by_device


def device_of(strategy: Strategy, stage: int, microbatch: int) -> int:
    """The device that runs a microbatch in a stage."""
    devices = strategy.stages[stage].devices
    return devices[microbatch % len(devices)]


# ------------------------------------------------------------------------------ the order


@dataclass(frozen=True, slots=True)
class _Order:
    """What the devices compute, and when by the estimate.

    Attributes:
        on: per device, its computations in order.
        start_s: of each; infinite where the schedule blocks before it.
        end_s: of each; infinite where the schedule blocks before it.
    """

    on: dict[int, list[Compute]]
    start_s: dict[Compute, float]
    end_s: dict[Compute, float]


def _waits(strategy: Strategy, crossing: Sequence[Crossing]) -> dict[Compute, list[Compute]]:
    """What each computation waits for."""
    stages, microbatches = range(len(strategy.stages)), range(strategy.num_microbatches)
    waits: dict[Compute, list[Compute]] = {
        Compute(_F, s, m): [] for m in microbatches for s in stages
    }
    waits |= {Compute(_B, s, m): [Compute(_F, s, m)] for m in microbatches for s in stages}
    # (direction, the stage that waits, the one that it waits for)
    between = [(_F, t, one.source) for one in crossing for t in one.targets]
    between += [(_B, one.source, t) for one in crossing if one.gradient for t in one.targets]
    for m in microbatches:
        for direction, later, earlier in dict.fromkeys(between):
            waits[Compute(direction, later, m)].append(Compute(direction, earlier, m))
    for device, mine in stages_by_device(strategy).items():
        alone = len(mine) == 1
        for before, after in (
            pairwise(_in_turn(strategy, device, mine)) if alone else _shared(strategy, mine)
        ):
            waits[after].append(before)
    return waits


def _in_turn(strategy: Strategy, device: int, mine: Sequence[int]) -> list[Compute]:
    """The order of a device that runs one stage; of one that runs several, each microbatch there
    and back before the next one.
    """
    if len(mine) == 1:
        stage = strategy.stages[mine[0]]
        some = range(stage.devices.index(device), strategy.num_microbatches, stage.num_replicas)
        turns = SCHEDULES[strategy.schedule](len(some), stage.warmup)
        return [Compute(direction, mine[0], some[k]) for direction, k in turns]
    both = [*((_F, s) for s in mine), *((_B, s) for s in reversed(mine))]
    return [Compute(*one, m) for m in range(strategy.num_microbatches) for one in both]


def _shared(strategy: Strategy, mine: Sequence[int]) -> Iterable[tuple[Compute, Compute]]:
    """Pairs (earlier, later) of computations of a device that runs several stages."""
    num_microbatches, phases = strategy.num_microbatches, strategy.schedule.has_phases
    for m in range(num_microbatches):
        for s, after in pairwise(mine):
            yield Compute(_F, s, m), Compute(_F, after, m)
            yield Compute(_B, after, m), Compute(_B, s, m)
        for s in mine:
            if m > 0:
                yield Compute(_F, s, m - 1), Compute(_F, s, m)
                yield Compute(_B, s, m - 1), Compute(_B, s, m)
            if not phases and m >= strategy.stages[s].warmup:
                yield Compute(_B, s, m - strategy.stages[s].warmup), Compute(_F, s, m)
    if phases:
        yield Compute(_F, mine[-1], num_microbatches - 1), Compute(_B, mine[-1], 0)


def _urgency(compute: Compute) -> tuple[bool, int, int]:
    """A device takes the least one first: backwards, then older microbatches, then the first stage
    in its direction.
    """
    forward = compute.direction is _F
    return forward, compute.microbatch, compute.stage if forward else -compute.stage


def _list_schedule(
    strategy: Strategy,
    waits: Mapping[Compute, Sequence[Compute]],
    times: Sequence[StagePrediction],
) -> _Order:
    """All computations on their devices. Where warm-up depths block, the others come last, in an
    order that is sound on each device, for the dry run to find.
    """
    place = {c: device_of(strategy, c.stage, c.microbatch) for c in waits}
    tasks, computes = _listed(strategy, waits, times, place), list(waits)
    made = tasks.times(lambda i: _urgency(computes[i]))
    order = _Order(
        {device: [] for device in sorted(set(place.values()))},
        dict(zip(computes, made.start_s.tolist(), strict=False)),
        dict(zip(computes, made.end_s.tolist(), strict=False)),
    )
    for i in made.begun[made.begun < len(computes)].tolist():
        order.on[place[computes[i]]].append(computes[i])
    if inf in order.start_s.values():
        for device, mine in stages_by_device(strategy).items():
            blocked = (c for c in _in_turn(strategy, device, mine) if order.start_s[c] == inf)
            order.on[device] += blocked
    return order


def _listed(
    strategy: Strategy,
    waits: Mapping[Compute, Sequence[Compute]],
    times: Sequence[StagePrediction],
    place: Mapping[Compute, int],
) -> TaskList:
    """The computations as tasks, in the order of `waits`, then the transfers between devices."""
    tasks, moving_s = TaskList(), _transfers_s(times)
    number = {c: tasks.add(_duration_s(strategy, c, times), (place[c],)) for c in waits}
    for later, before in waits.items():
        for one in before:
            # Without the times of transfers devices took microbatches in their order while others
            # had arrived: 91.0 instead of 84.7 ms per iteration for two towers of convolutions with
            # a common trunk, over ports of 25 Gbit/s.
            moved_s = moving_s.get((one.direction, one.stage, later.stage), 0.0)
            channel = place[one], place[later]
            if channel[0] == channel[1] or not moved_s:
                tasks.chain(number[one], number[later])
            else:
                tasks.chain(number[one], tasks.add(moved_s, channel, fifo=True), number[later])
    return tasks


def _transfers_s(times: Sequence[StagePrediction]) -> dict[tuple[Direction, int, int], float]:
    """By direction and stages, from which and to which, how long it takes to send all that one
    makes for the other.
    """
    moving_s = {}
    for s, stage in enumerate(times):
        for one in stage.transfers:
            moving_s[_F, s, one.stage] = one.send_s
            moving_s[_B, one.stage, s] = one.return_s
    return moving_s


def _duration_s(strategy: Strategy, compute: Compute, times: Sequence[StagePrediction]) -> float:
    forward = compute.direction is _F
    if times:
        stage = times[compute.stage]
        return stage.forward_s if forward else stage.backward_s
    return len(strategy.stages[compute.stage].operators) * (1.0 if forward else 2.0)


# -------------------------------------------------------------------------- the transfers

_Streams = dict[tuple[int, int], list[tuple[Receive, float]]]


def _transfers(
    strategy: Strategy, crossing: Sequence[Crossing], order: _Order
) -> tuple[dict[Compute, list[Send]], _Streams]:
    """The sends after each computation; and per pair of devices (source, target) the receives
    of the target, in the order of the sends, and when each tensor is expected.
    """
    leaving: dict[tuple[Direction, int], list[tuple[str, int]]] = {}
    for one in crossing:
        for target in deliveries(strategy, one):
            leaving.setdefault((_F, one.source), []).append((one.tensor, target))
            if one.gradient:
                leaving.setdefault((_B, target), []).append((one.tensor, one.source))
    sends: dict[Compute, list[Send]] = {}
    streams: _Streams = {}
    for device, computations in order.on.items():
        for made in computations:
            direction, s, m = made.direction, made.stage, made.microbatch
            for tensor, other in leaving.get((direction, s), ()):
                peer = device_of(strategy, other, m)
                sends.setdefault(made, []).append(Send(direction, s, m, tensor, peer))
                receive = Receive(direction, other, m, tensor, device)
                streams.setdefault((device, peer), []).append((receive, order.end_s[made]))
    return sends, streams


def _posted(order: _Order, streams: _Streams) -> dict[Compute, list[Receive]]:
    """The receives that are posted before each computation."""
    slots: dict[int, dict[Compute, int]] = {}
    ahead: dict[Compute, int | None] = {}
    starts: dict[int, list[float]] = {}
    for device, computations in order.on.items():
        slots[device] = {compute: i for i, compute in enumerate(computations)}
        starts[device] = [order.start_s[compute] for compute in computations]
        last: dict[tuple[Direction, int], int] = {}
        for i, compute in enumerate(computations):
            kind = compute.direction, compute.stage
            ahead[compute] = last.get(kind)
            last[kind] = i
    posted: dict[Compute, list[Receive]] = {}
    for (_, device), stream in sorted(streams.items()):
        wanted = []
        for receive, expected_s in stream:
            compute = Compute(receive.direction, receive.stage, receive.microbatch)
            slot = ahead[compute]
            if slot is None:
                # During the computation that the device runs when the tensor is expected, but
                # before the one that needs it.
                running = bisect_right(starts[device], expected_s) - 1
                slot = max(0, min(running, slots[device][compute] - 1))
            wanted.append(slot)
        # None is posted after one that its peer sends later: transfers of a pair are first in,
        # first out, so a receive that came too late would hold up those behind it, or block.
        by_turn = list(accumulate(reversed(wanted), min))[::-1]
        for (receive, _), slot in zip(stream, by_turn, strict=True):
            posted.setdefault(order.on[device][slot], []).append(receive)
    return posted
