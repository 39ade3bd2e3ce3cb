"""The stages of a strategy as the closed form sees them (`closed_form.py`), from the costs of its
actions.

Where a device runs several stages, the flow is no chain of neighbours: stages run beside each
other, and a tensor goes from any stage to any later one. So one microbatch is timed by a list
schedule: every device runs its stages in their order, backwards in the reverse one, and a tensor or
gradient is there one transfer after it was made, whatever else is on the links. From it come the
round trips, and the devices' loads from sums over their stages.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

from planner.artefacts.graph import ITEM_BYTES, tensors_by_name
from planner.artefacts.plan import StageTransfer
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import (
    Crossing,
    GradientSum,
    Strategy,
    crossings,
    deliveries,
    shares_devices,
    stages_by_device,
    used_devices,
)
from planner.costs.actions import ActionCosts, crowds, sum_factor, with_full_contention
from planner.costs.closed_form import StageCost, exposed_sum_s
from planner.costs.operators import launch_s
from planner.costs.stage_pass import sums_overlap_compute
from planner.costs.transfers import gradient_sum_s, transfer_s
from planner.resharding import Piece, pieces
from planner.schedules.pipelines import mesh_end
from planner.schedules.task_list import TaskList

_Devices = tuple[int, ...]


def stage_costs(
    problem: Problem, strategy: Strategy, sums: Sequence[GradientSum], costs: ActionCosts
) -> tuple[StageCost, ...]:
    """The stages of a strategy.

    Transfers of a pipeline are those over the cut behind a stage. Where devices run several stages,
    they are counted by channel, that is by ordered pair of devices: c is the busiest one out of a
    stage's devices, g the busiest one into them, per microbatch.

    Args:
        sums: of gradients.
        costs: of the actions.
    """
    costs, stages = with_full_contention(costs), strategy.stages
    traffic = _Traffic(problem, strategy, costs)
    shared = shares_devices(strategy)
    forward = [max(costs.forward_s[s, d] for d in one.devices) for s, one in enumerate(stages)]
    backward = [max(costs.backward_s[s, d] for d in one.devices) for s, one in enumerate(stages)]
    moved = traffic.channels() if shared else traffic.cuts()
    trips_s = [*traffic.round_trips_s(forward, backward), 0.0] if shared else None
    together = {stages[mine[0]].devices: mine for mine in stages_by_device(strategy).values()}
    made = []
    for s, stage in enumerate(stages):
        others = [t for t in together.get(stage.devices, ()) if t != s]
        send_s, return_s, post_s, post_back_s = moved[s]
        alone_s = forward[s] + backward[s] + send_s + return_s
        again_s = forward[s] if stage.reruns_whole else 0.0
        own_s = _own_sum_s(problem, strategy, s, sums, backward[s] - again_s, costs)
        made.append(
            StageCost(
                forward_s=forward[s],
                backward_s=backward[s],
                send_s=send_s,
                return_s=return_s,
                # What the first forward waits for counts as if it were at the end.
                tail_s=own_s
                + max(costs.step_s[d] + costs.head_s.get(d, 0.0) for d in stage.devices),
                num_replicas=stage.num_replicas,
                warmup=stage.warmup,
                others_forward_s=sum(forward[t] for t in others) + post_s,
                others_backward_s=sum(backward[t] for t in others) + post_back_s,
                beside_s=alone_s - (trips_s[s] - trips_s[s + 1]) if trips_s else 0.0,
            )
        )
    return tuple(made)


class _Moved(NamedTuple):
    """What a stage exchanges per microbatch, in s.

    Attributes:
        send_s: c.
        return_s: g.
        post_s: for which posting in its forwards keeps its device from the next action.
        post_back_s: the same in its backwards.
    """

    send_s: float
    return_s: float
    post_s: float
    post_back_s: float


class _Size(NamedTuple):
    """What a device sends or receives of a tensor: number of messages, and bytes."""

    messages: int
    bytes: float


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What crosses between the stages of a strategy."""

    problem: Problem
    strategy: Strategy
    costs: ActionCosts

    @property
    def _crossing(self) -> tuple[Crossing, ...]:
        return crossings(self.strategy, self.problem.profile.graph)

    def _link_s(self, sources: _Devices, targets: _Devices, size_bytes: float) -> float:
        """Time of a transfer after it was posted, in s."""
        size_bytes *= self.costs.link_share
        return transfer_s(self.problem.topology, sources, targets, size_bytes)

    def _post_s(self, devices: _Devices, sizes: Iterable[_Size]) -> float:
        """Time for which posting keeps the slowest of some devices, in s."""
        costs, sizes = self.costs, tuple(sizes)
        if not costs.post_s:
            return 0.0
        messages, size_bytes = sum(n for n, _ in sizes), sum(size for _, size in sizes)
        return max(
            messages * costs.post_s.get(d, 0.0) + size_bytes * costs.copy_s_per_byte.get(d, 0.0)
            for d in devices
        )

    def cuts(self) -> list[_Moved]:
        """By stage of a pipeline, the transfers over the cut behind it; a device posts what comes
        and what goes.
        """
        stages = self.strategy.stages
        there: list[list[_Size]] = [[] for _ in range(len(stages) + 1)]
        back: list[list[_Size]] = [[] for _ in range(len(stages) + 1)]
        for s in range(len(stages) - 1):
            over = [one for one in self._crossing if one.source <= s < one.targets[-1]]
            for one in over:
                size, size_back = self._sent(s, one)
                there[s + 1].append(size)
                if one.gradient:
                    back[s + 1].append(size_back)
        moved = []
        for s, stage in enumerate(stages):
            here, sends, returns = stage.devices, there[s + 1], back[s + 1]
            ahead = stages[s + 1].devices if s + 1 < len(stages) else here
            moved.append(
                _Moved(
                    sum(self._link_s(here, ahead, n) for _, n in sends) + self._post_s(here, sends),
                    sum(self._link_s(ahead, here, n) for _, n in returns)
                    + self._post_s(ahead, returns),
                    self._post_s(here, [*there[s], *sends]),
                    self._post_s(here, [*back[s], *returns]),
                )
            )
        return moved

    def _sent(self, s: int, crossing: Crossing) -> tuple[_Size, _Size]:
        """A tensor that crosses the cut behind a stage, and its gradient: the most that a device
        sends or receives. From a stage to the first that reads it and is behind the cut.
        """
        target = next(t for t in crossing.targets if t > s)
        stages = self.strategy.stages[crossing.source], self.strategy.stages[target]
        if all(stage.sharding is None for stage in stages):
            return _Size(1, crossing.bytes), _Size(1, crossing.bytes)
        ends = (
            mesh_end(stages[0], crossing.tensor, source=True),
            mesh_end(stages[1], crossing.tensor, source=False, first=len(stages[0].groups[0])),
        )
        shape = tensors_by_name(self.problem.profile.graph)[crossing.tensor].shape
        there, back = pieces(shape, *ends), pieces(shape, ends[1], ends[0])
        item_bytes = ITEM_BYTES[crossing.dtype]
        return _busiest(there, item_bytes), _busiest(back, item_bytes)

    def transfers(self) -> Iterable[tuple[Crossing, int, int, float, float]]:
        """Per transfer from stage to stage: the tensor, both stages, and the times of the tensor
        and of its gradient from the end of the computation on, in s.
        """
        stages = self.strategy.stages
        for one in self._crossing:
            source = stages[one.source].devices
            for t in one.targets:
                target = stages[t].devices
                posted = [_Size(1, one.bytes)] if source != target else []
                there_s = self._link_s(source, target, one.bytes) + self._post_s(source, posted)
                back_s = self._link_s(target, source, one.bytes) + self._post_s(target, posted)
                yield one, one.source, t, there_s, back_s if one.gradient else 0.0

    def channels(self) -> list[_Moved]:
        """By stage, the busiest channel out of its devices, and into them: tensors and gradients
        together; a device posts those of all its stages.
        """
        stages = self.strategy.stages
        busy: dict[tuple[_Devices, _Devices], float] = defaultdict(float)
        posted: dict[tuple[_Devices, bool], list[_Size]] = defaultdict(list)
        for one, s, t, there_s, back_s in self.transfers():
            if t in deliveries(self.strategy, one):
                source, target = stages[s].devices, stages[t].devices
                busy[source, target] += there_s
                busy[target, source] += back_s
                for way in (False, True)[: 1 + one.gradient]:
                    posted[source, way].append(_Size(1, one.bytes))
                    posted[target, way].append(_Size(1, one.bytes))
        return [
            _Moved(
                max((time_s for (a, _), time_s in busy.items() if a == here), default=0.0),
                max((time_s for (_, b), time_s in busy.items() if b == here), default=0.0),
                self._post_s(here, posted[here, False]),
                self._post_s(here, posted[here, True]),
            )
            for here in (stage.devices for stage in stages)
        ]

    def round_trips_s(self, forward: Sequence[float], backward: Sequence[float]) -> list[float]:
        """Per stage, the time of one microbatch from the start of its forward to the end of its
        backward; at least that of later stages. From the first one on it is the whole latency.
        """
        tasks, size = TaskList(), len(self.strategy.stages)
        there, back = list(map(tasks.add, forward)), list(map(tasks.add, backward))
        for s in range(size):
            tasks.chain(there[s], back[s])
        for mine in stages_by_device(self.strategy).values():
            tasks.chain(*(there[s] for s in mine), *(back[s] for s in reversed(mine)))
        for one, s, t, there_s, back_s in self.transfers():
            tasks.chain(there[s], tasks.add(there_s), there[t])
            if one.gradient:
                tasks.chain(back[t], tasks.add(back_s), back[s])
        made = tasks.times()
        start, end = made.start_s[:size].tolist(), made.end_s[size : 2 * size].tolist()
        own = (last - first for first, last in zip(reversed(start), reversed(end), strict=True))
        # Where a later stage's trip is longer, since its device was busy, an earlier stage waits
        # for it: no trip is shorter than one behind it. The microbatch has passed when the last
        # backward has ended, which need not be that of the first stage.
        trips = list(accumulate(own, max))[::-1]
        trips[0] = max(end)
        return trips


def _busiest(some: Iterable[Piece], item_bytes: float) -> _Size:
    """The most messages and the most bytes that a device gives or takes."""
    messages, moved = Counter[tuple[bool, int]](), Counter[tuple[bool, int]]()
    for one in some:
        size = prod(stop - start for start, stop in one.box)
        for end in ((True, one.source), (False, one.target)):
            messages[end] += 1
            moved[end] += size
    # A tensor without elements has no pieces.
    return _Size(max(messages.values(), default=0), max(moved.values(), default=0) * item_bytes)


def stage_transfers(
    problem: Problem, strategy: Strategy, costs: ActionCosts
) -> tuple[tuple[StageTransfer, ...], ...]:
    """Per stage, what it sends to later stages on other devices."""
    ahead: list[dict[int, list[float]]] = [{} for _ in strategy.stages]
    for one, s, t, there_s, back_s in _Traffic(problem, strategy, costs).transfers():
        if t in deliveries(strategy, one):
            both = ahead[s].setdefault(t, [0.0, 0.0])
            both[0] += there_s
            both[1] += back_s
    return tuple(
        tuple(StageTransfer(t, *times) for t, times in sorted(each.items())) for each in ahead
    )


def _own_sum_s(
    problem: Problem,
    strategy: Strategy,
    s: int,
    sums: Sequence[GradientSum],
    backward_s: float,
    costs: ActionCosts,
) -> float:
    """What is left of the sums of a stage's gradients behind its last backward, in s: of those
    among its replicas, and all of those with other stages, or of a device with several stages.

    Args:
        backward_s: of the stage, without a forward that is run again.
    """
    devices, tied_s = strategy.stages[s].devices, 0.0
    there = frozenset(devices)
    sizes, counts = (Counter[tuple[_Devices, tuple[_Devices, ...]]]() for _ in range(2))
    crowd: dict[_Devices, float] = {}
    every = zip(sums, costs.sum_s, crowds(problem.topology, sums), strict=True)
    for one, sum_s, crowd[one.devices] in every:
        # It has all devices of a stage or none; of a split one, those of some lines of its mesh.
        if there.issuperset(one.devices):
            sizes[one.devices, one.shards] += one.bytes
            counts[one.devices, one.shards] += 1
        elif devices[0] in one.devices:
            tied_s += sum_s
    if not sizes.total():
        return tied_s
    used = used_devices(strategy)
    factor = sum_factor(problem, used)
    whole_s = {
        (some, shards): factor * gradient_sum_s(problem.topology, some, size, shards, crowd[some])
        + counts[some, shards] * max(launch_s(problem, d) for d in some)
        for (some, shards), size in sizes.items()
    }
    # All at once over the same devices, one after the other over the lines of different axes.
    of_device = {d: sum(t for (some, _), t in whole_s.items() if d in some) for d in there}
    slowest = max(there, key=lambda d: (of_device[d], -d))
    size_bytes = sum(n for (some, _), n in sizes.items() if slowest in some)
    beside = all(sums_overlap_compute(problem, used, some) for some, _ in sizes)
    return exposed_sum_s(of_device[slowest], size_bytes, backward_s, beside) + tied_s
