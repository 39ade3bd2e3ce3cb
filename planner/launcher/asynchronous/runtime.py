"""The loop over one device's actions in a flow: minibatch after minibatch, without a gap.

The lists of a flow number its minibatches. Number m is microbatch m mod M of step
first + floor(m / M), and data, losses and drawn numbers go by the latter, as in other schedules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from planner.launcher.asynchronous.updates import StageUpdates
from planner.launcher.asynchronous.versions import Versions
from planner.launcher.failures.page import Phase
from planner.launcher.feed import Feed
from planner.launcher.gradients import GradientBuffers
from planner.launcher.runtime import Record, Runtime, StageRunner, Tensors
from planner.launcher.split.boxes import Boxes
from planner.launcher.world import World
from planner.profilers.storages import MemoryWatch
from planner.schedules.actions import Action, Compute, Direction, Step


@dataclass(slots=True)
class FlowRecord:
    """The actions of one device in a flow.

    Attributes:
        first: the index of its first step.
        record: of all its actions; times since the start of the flow.
        ended_s: per step, the end of its last action on this device, since the start of the flow.
    """

    first: int = 0
    record: Record = field(default_factory=Record)
    ended_s: list[float] = field(default_factory=list)


class VersionedStage:
    """The passes of one stage, each with the version of the parameters that its minibatch uses.

    Args:
        stage: runs them.
        versions: of its parameters.
        num_replicas: R; this device runs every R-th minibatch.
    """

    def __init__(self, stage: StageRunner, versions: Versions, num_replicas: int) -> None:
        self.input_names, self.output_names = stage.input_names, stage.output_names
        self._stage, self._versions, self._num_replicas = stage, versions, num_replicas

    def forward(
        self, microbatch: int, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Tensors, float]:
        """As `StageRunner.forward`."""
        with self._versions.forward(microbatch // self._num_replicas):
            return self._stage.forward(microbatch, tensors, targets)

    def backward(self, microbatch: int, gradients: Mapping[str, Tensor]) -> Tensors:
        """As `StageRunner.backward`."""
        with self._versions.backward(microbatch // self._num_replicas):
            return self._stage.backward(microbatch, gradients)


class FlowRuntime(Runtime):
    """Runs the action lists of flows on one device.

    Attributes:
        last: the actions of the last flow.

    Args:
        boxes: describes the tensors that it sends and receives.
        stages: the one that this device runs, by its index.
        gradients: of its trainable parameters.
        updates: makes the steps of the stage.
        world: the other devices.
        seed: of the numbers that operators draw.
        num_microbatches: M, the minibatches of a step, over all replicas.
    """

    def __init__(
        self, boxes: Boxes, stages: Mapping[int, VersionedStage], gradients: GradientBuffers,
        updates: StageUpdates, world: World, seed: int, num_microbatches: int,
    ) -> None:  # fmt: skip
        waiting = frozenset({Direction.BACKWARD})  # as every list with a backward before a forward
        super().__init__([], boxes, stages, gradients, updates, world, waiting, seed)
        self._updates, self._num_microbatches = updates, num_microbatches
        self._losses: dict[int, float] = {}  # of this device, by step
        self.last = FlowRecord()

    def take(self, actions: Sequence[Action]) -> None:
        """Takes the list of the next flow; its all-reduces have the numbers of their buckets."""
        self._actions = actions
        self._sums.follow(actions)

    def flow(self, fetch: Feed, first: int, watch: MemoryWatch | None = None) -> Iterator[Record]:
        """Runs a flow; gives the loss and the time of each step, without its actions, when this
        device has run the last action of it.

        Args:
            fetch: gives the data of a microbatch of a step.
            first: the index of the first step.
            watch: of the memory in use.
        """
        self._step_index, self._losses = first, {}
        self._begin(first, watch)
        self.last = FlowRecord(first, self._record)
        closing = self._closing()
        for i, action in enumerate(self._actions):
            if isinstance(action, Compute):
                self._prepare(action, fetch)
            self._run(action)
            if i in closing:
                self.last.ended_s.append(self._record.events[-1][2])
                if i < max(closing):
                    yield self._told(closing[i])
        self._end()
        yield self._told(closing[max(closing)])

    def _closing(self) -> dict[int, int]:
        """The optimizer's steps after the last backward of each step of the training: their places
        in the list, and the index of that step.
        """
        last: dict[int, int] = {}
        current = self._step_index
        for i, action in enumerate(self._actions):
            if isinstance(action, Compute) and action.direction is Direction.BACKWARD:
                current, _ = self._place(action.microbatch)
            elif isinstance(action, Step):
                last[current] = i
        return {i: step for step, i in last.items()}

    def _place(self, microbatch: int) -> tuple[int, int]:
        """The step that a minibatch of the flow belongs to, and its number there."""
        step, inside = divmod(microbatch, self._num_microbatches)
        return self._step_index + step, inside

    def _prepare(self, compute: Compute, fetch: Feed) -> None:
        """What comes before a pass: data, or the learning rate of the step behind it."""
        step, microbatch = self._place(compute.microbatch)
        self._page.turn_to(step)
        if compute.direction is Direction.BACKWARD:
            self._updates.begin(step)
            return
        self._page.enter(Phase.BETWEEN)
        self._batches = {compute.microbatch: fetch(step, microbatch)}

    def _lost(self, microbatch: int, loss: float) -> None:
        """The loss of a step is the mean over its minibatches."""
        self._batches = {}
        step, _ = self._place(microbatch)
        self._losses[step] = self._losses.get(step, 0.0) + loss / self._num_microbatches
        self._updates.lost(loss)

    def _told(self, step: int) -> Record:
        """The loss and the time of a step that has ended on this device."""
        done = self.last
        at = step - done.first
        begun_s = done.ended_s[at - 1] if at else 0.0
        return Record(self._losses.pop(step), self._start_s + begun_s, done.ended_s[at] - begun_s)
