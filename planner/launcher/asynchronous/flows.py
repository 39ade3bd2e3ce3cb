"""Trains in flows, as `planner/schedules/flows.py` describes them.

A flow ends where all stages have to be at the same minibatch: at a checkpoint, at an evaluation, at
the end of the training, and after LONGEST minibatches, which bounds the lists. These places depend
on the options and on steps counted from the very first one. So a training that goes on from a
checkpoint comes to the same weights as one that was not interrupted.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from torch.optim import Optimizer

from planner.launcher import ending
from planner.launcher.asynchronous.runtime import FlowRecord, FlowRuntime, VersionedStage
from planner.launcher.asynchronous.updates import StageUpdates
from planner.launcher.asynchronous.versions import Versions
from planner.launcher.failures.page import Phase
from planner.launcher.feed import Feed
from planner.launcher.gradients import GradientBuffers, buckets
from planner.launcher.job import TrainingJob
from planner.launcher.part import Part, as_it_crosses
from planner.launcher.runtime import Record
from planner.launcher.split.boxes import boxes_of
from planner.launcher.updates import Rules, Update
from planner.launcher.world import World
from planner.profilers.storages import MemoryWatch
from planner.schedules.actions import Action, AllReduce, Program
from planner.schedules.flows import flow
from planner.schedules.versions import versions

LONGEST = 4096
"""Minibatches of a flow, at most, where a step has no more."""


def flow_end(step: int, num_steps: int, num_microbatches: int, every: Iterable[int | None]) -> int:
    """The number of steps at which a flow ends that begins after some steps.

    Args:
        step: steps before it.
        num_steps: of the whole training.
        num_microbatches: M, minibatches of a step.
        every: intervals in steps at which the pipeline has to be empty; None is never.

    >>> flow_end(10, 100, 8, [25, None]), flow_end(510, 2000, 8, [None]), flow_end(90, 100, 8, [])
    (25, 512, 100)
    """
    longest = max(1, LONGEST // num_microbatches)
    intervals = [longest, *(one for one in every if one is not None)]
    return min(num_steps, *((step // one + 1) * one for one in intervals))


def device_actions(program: Program, device: int) -> list[Action]:
    """The list of one device; its all-reduces have the numbers of their buckets, which are the same
    in each round.
    """
    number = {one: i for i, one in enumerate(buckets(program.sums))}
    return [
        AllReduce(number[program.sums[action.sum]]) if isinstance(action, AllReduce) else action
        for action in program.lists[device]
    ]


class Flows:
    """Runs the flows of one device.

    Attributes:
        strategy: that is trained.
        versions: of the parameters of its stage.
        updates: makes its steps.
        runtime: runs its actions.
        longest: the actions of the longest flow; of several, the last one.

    Args:
        job: what is trained, under an asynchronous schedule.
        part: of this device, with one stage.
        gradients: of its trained parameters.
        optimizer: of the same.
        world: the other devices.
        rules: how steps are done.
        seed: of the numbers that operators draw.
    """

    def __init__(
        self, job: TrainingJob, part: Part, gradients: GradientBuffers,
        optimizer: Optimizer | None, world: World, rules: Rules, seed: int,
    ) -> None:  # fmt: skip
        ((self._stage, runner),) = part.stages.items()
        self.strategy, self._graph = job.plan.strategy, job.model.graph
        self._device = world.device
        stage = self.strategy.stages[self._stage]
        self._num_replicas = stage.num_replicas
        self._replica = stage.devices.index(world.device)
        self.versions = Versions(runner.module, part.trained, gradients)
        self.updates = StageUpdates(optimizer, gradients, self.versions, stage.num_replicas, rules)
        passes = VersionedStage(runner, self.versions, stage.num_replicas)
        self.runtime = FlowRuntime(
            boxes_of(self.strategy, as_it_crosses(job.model.graph, job.plan), world.device),
            {self._stage: passes}, gradients,
            self.updates, world, seed, self.strategy.num_microbatches,
        )  # fmt: skip
        self._losses = world.late_sums() if rules.tells else None
        self._known: dict[int, list[Action]] = {}  # by the number of minibatches
        self.longest = FlowRecord()

    def run(
        self, fetch: Feed, first: int, num_steps: int, watch: MemoryWatch | None = None
    ) -> Iterator[Record]:
        """Runs a flow; gives the loss and the time of each step, as soon as this device has ended
        it and the loss of all ranks is known, where somebody asks for that.

        Args:
            fetch: gives the data of a microbatch of a step.
            first: the index of the first step.
            num_steps: of the training, M minibatches each.
            watch: of the memory in use.
        """
        count = num_steps * self.strategy.num_microbatches
        mine = np.arange(self._replica, count, self._num_replicas)
        used = versions(self.strategy, self._stage, mine).tolist()
        actions = self._actions(count)
        self.runtime.take(actions)
        self.versions.begin(used)
        ended: deque[tuple[int, Record]] = deque()
        for step, record in enumerate(self.runtime.flow(fetch, first, watch), first):
            ended.append((step, record))
            if self._losses is not None:
                self._losses.start(record.loss)
            yield from self._told(ended, last=step == first + num_steps - 1)
        if len(self.runtime.last.ended_s) >= len(self.longest.ended_s):
            self.longest = self.runtime.last

    def _told(self, ended: deque[tuple[int, Record]], *, last: bool) -> Iterator[Record]:
        """The steps that have ended, once their losses are known, all after the last one."""
        totals: list[float | None] = [None] * len(ended)
        if self._losses is not None:
            if last:
                ending.page().enter(Phase.BARRIER)  # the last minibatches of other ranks still run
            totals = [*self._losses.known(all_of_them=last)]
            ending.page().enter(Phase.BETWEEN)
        for total in totals:
            step, record = ended.popleft()
            self.updates.last = Update(self.updates.rate_at(step), total)
            yield record

    def _actions(self, num_minibatches: int) -> list[Action]:
        """The list of this device in a flow."""
        if num_minibatches not in self._known:
            program = flow(self.strategy, self._graph, num_minibatches)
            self._known[num_minibatches] = device_actions(program, self._device)
        return self._known[num_minibatches]
