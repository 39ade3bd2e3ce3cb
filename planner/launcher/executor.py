"""`Executor`: the only loop over the actions of a device, and what it records."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch

from planner.launcher import clocks
from planner.launcher.batch import StepBatches
from planner.launcher.failures.errors import current_place
from planner.launcher.failures.rank import current_status
from planner.launcher.failures.requests import REQUEST
from planner.launcher.failures.status import Phase
from planner.launcher.gradients import GradientBuckets
from planner.launcher.groups import Groups
from planner.launcher.stage import LocalHandover, StageModule, Tensors
from planner.launcher.totals import LossTotals
from planner.launcher.transfers import Arrival, Boxes, Exchange, PostedTransfer, dense
from planner.launcher.updates import OptimizerStep
from planner.operators.randomness import random_operators
from planner.operators.running import REFUSALS
from planner.profilers.storages import MemoryTracker
from planner.schedules.actions import (
    Action,
    AllReduce,
    Compute,
    Direction,
    Receive,
    Send,
    Step,
    of_microbatches,
    waits,
)
from planner.support.errors import LaunchError

Event = tuple[Action, float, float]
"""A computation, all-reduce or step; its start and end since the start of the list, in s."""
_PHASES = {Direction.FORWARD: Phase.FORWARD, Direction.BACKWARD: Phase.BACKWARD}


@dataclass(slots=True)
class IterationRecord:
    """The actions of one device in one iteration; times since the iteration's start, in s.

    Attributes:
        loss: its share of the iteration's loss.
        begun_s: when the iteration started, on this process's clock.
        iteration_s: how long it took.
        events: in their order.
        sends: by target, in order: when each was posted.
        receives: by source, in order: the receive, when it was posted, when it was there.
        peaks_bytes: by event, the most memory from the end of the one before to its end, where it
            was watched.
        is_whole: whether all microbatches of a usual step were run.
    """

    loss: float = 0.0
    begun_s: float = 0.0
    iteration_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    sends: dict[int, list[float]] = field(default_factory=dict)
    receives: dict[int, list[tuple[Receive, float, float]]] = field(default_factory=dict)
    peaks_bytes: list[int] = field(default_factory=list)
    is_whole: bool = True


class Work(Protocol):
    """The meaning of the actions of a list: a step of a training, an evaluation, or a flow."""

    def meet(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Before the first action of a step of the training: meets all other ranks.

        Args:
            actions: of a whole step.

        Returns:
            Those that are run, of the same microbatches on all ranks.
        """

    def place(self, microbatch: int) -> tuple[int, int]:
        """The step that a microbatch of the list belongs to, and its number there; random numbers
        and messages go by these.
        """

    def begin(self, action: Compute) -> None:
        """Before a pass, outside its time."""

    def forward(self, action: Compute, stage: StageModule, tensors: Tensors) -> Tensors:
        """The outputs of a stage.

        Args:
            tensors: inputs of the stage that other stages have made.
        """

    def backward(self, action: Compute, stage: StageModule, gradients: Tensors) -> Tensors:
        """The gradients of the inputs of a stage.

        Args:
            gradients: of the outputs that other stages read.
        """

    def step(self) -> None:
        """The optimizer's step."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Numbers that the ranks add up before the first action of a step, which costs no message more
    than a barrier; those of one rank, or the sums.

    Attributes:
        microbatches: of the step, of those ranks that know how many it has.
        counts: that losses are divided by, by name (`LossTotals`); the same names on all ranks.
        end_requests: number of ranks that signals have asked to save and to end.
    """

    microbatches: float
    counts: Mapping[str, float]
    end_requests: float = 0

    def added_up(self, together: Callable[[Sequence[float]], Sequence[float]]) -> "StepSums":
        """The sums over all ranks, each of which calls it.

        Args:
            together: adds up numbers over all ranks, and is a barrier for none.
        """
        names = sorted(self.counts)
        own = [self.microbatches, self.end_requests, *(self.counts[name] for name in names)]
        microbatches, end_requests, *counts = together(own)
        return StepSums(microbatches, dict(zip(names, counts, strict=True)), end_requests)


@dataclass(frozen=True, slots=True)
class StepSize:
    """The number of microbatches that a step has, as all ranks come to know it.

    Attributes:
        usual: M, of all steps but shorter ones at the end of an epoch.
        num_readers: number of ranks that read data, and know it of each step.
    """

    usual: int
    num_readers: int

    def of(self, own: int | None, total: float) -> int:
        """Of a step.

        Args:
            own: the number that this rank knows.
            total: of the numbers that the ranks know.

        Raises:
            LaunchError: if ranks know different ones.
        """
        number = round(total / self.num_readers) if self.num_readers else self.usual
        if own not in (None, number) or number * self.num_readers != total:
            raise LaunchError(
                f"expected the same data on all ranks, got {own} microbatches of this step here and"
                " another number elsewhere; give all ranks the same dataset"
            )
        return number


class TrainingStep:
    """A step of a training whose optimizer steps once, after all microbatches; a `Work`.

    Attributes:
        loss: this device's share of the step's loss, as far as its forward passes have run; nan in
            a step without counted targets.
        sums: over all ranks, once they have met.
        is_whole: whether it has the usual number of microbatches, and is run, once they have met.

    Args:
        index: of the step.
        data: of this device.
        optimizer: makes the step.
        totals: that the losses are divided by.
        size: of steps.
        groups: the other devices.
    """

    def __init__(
        self, index: int, data: StepBatches, optimizer: OptimizerStep, totals: LossTotals,
        size: StepSize, groups: Groups,
    ) -> None:  # fmt: skip
        self._index, self._data, self._optimizer = index, data, optimizer
        self._totals_of, self._size = totals, size
        self._together, self._device = groups.add_up, groups.torch_device
        self._totals = dict[str, float]()
        counts = totals.own([*data.by_microbatch.values()])
        self.sums = StepSums(data.num_microbatches or 0, counts, float(REQUEST.is_made))
        self.loss, self._count = 0.0, 0.0
        self._num_microbatches, self.is_whole = size.usual, False

    def meet(self, actions: Sequence[Action]) -> Sequence[Action]:
        """As `Work.meet`. A step without counted targets in any loss is not run."""
        self.sums = self.sums.added_up(self._together)
        number = self._size.of(self._data.num_microbatches, self.sums.microbatches)
        self._num_microbatches = number
        self._totals = self._totals_of.of_step(self.sums.counts, number)
        if not self._totals_of.counts_any(self._totals):
            self.loss = self._optimizer.leave_out(self._index)
            return ()
        self.is_whole = number == self._size.usual
        return actions if self.is_whole else of_microbatches(actions, number)

    def place(self, microbatch: int) -> tuple[int, int]:
        """As `Work.place`."""
        return self._index, microbatch

    def begin(self, action: Compute) -> None:
        """Nothing: the data is there."""

    def forward(self, action: Compute, stage: StageModule, tensors: Tensors) -> Tensors:
        """As `Work.forward`."""
        batch = self._data.by_microbatch[action.microbatch].on(self._device)
        inputs = {**batch.inputs, **tensors}
        outputs, one = stage.forward(action.microbatch, inputs, batch.targets, self._totals)
        self.loss += one.loss
        self._count += one.counted
        return outputs

    def backward(self, action: Compute, stage: StageModule, gradients: Tensors) -> Tensors:
        """As `Work.backward`."""
        return stage.backward(action.microbatch, gradients)

    def step(self) -> None:
        """As `Work.step`."""
        self.loss = self._optimizer.step(
            self._index, self.loss, self._count, self._num_microbatches
        )


class Executor:
    """Runs the action lists of one device.

    Attributes:
        record: of the current or last list.

    Args:
        stages: by index, those that this device runs.
        boxes: describes the tensors that it sends and receives.
        buckets: of the gradients of its trainable parameters.
        groups: the other devices.
        waiting: directions of computations that wait for sends.
        seed: of the numbers that operators draw.
    """

    def __init__(
        self, stages: Mapping[int, StageModule], boxes: Boxes, buckets: GradientBuckets,
        groups: Groups, waiting: Collection[Direction] = (), seed: int = 0,
    ) -> None:  # fmt: skip
        self._stages, self._boxes, self._buckets, self._groups = stages, boxes, buckets, groups
        self._waiting, self._seed = waiting, seed
        self._handover, self._exchange = LocalHandover(stages), Exchange(groups)
        self.record = IterationRecord()
        self._watch: MemoryTracker | None = None
        self._start_s = 0.0
        self._awaited: list[Arrival] = []
        # By stage and direction: the transfers of the results of the latest computations.
        self._sending: dict[tuple[int, Direction], deque[list[PostedTransfer]]] = {}
        self._outputs: Tensors = {}  # of the last computation, for the sends right after it
        self._status = current_status()

    def run(
        self, actions: Sequence[Action], work: Work, *, step: int | None = None,
        watch: MemoryTracker | None = None,
    ) -> IterationRecord:  # fmt: skip
        """As `events`, to the end of the list."""
        for _ in self.events(actions, work, step=step, watch=watch):
            pass
        return self.record

    def events(
        self, actions: Sequence[Action], work: Work, *, step: int | None = None,
        watch: MemoryTracker | None = None,
    ) -> Iterator[Event]:  # fmt: skip
        """Runs a list; gives each event as soon as it has ended.

        Args:
            actions: the list.
            work: the meaning of its actions.
            step: index of the step of the training that begins, after a barrier of all ranks; None
                where none does.
            watch: of the memory in use.
        """
        self.record, self._watch, due = IterationRecord(), watch, actions
        if step is not None:
            self._status.begin_step(step)
            due = work.meet(actions)
        if due is not actions:
            self._buckets.follow(due)
        self._start_s = self.record.begun_s = clocks.now_s()
        for action in due:
            match action:
                case Receive():
                    self._receive(action)
                case Send():
                    self._send(action)
                case Compute():
                    yield self._compute(action, work)
                case AllReduce(index):
                    self._status.enter(Phase.ALL_REDUCE, index)
                    start_s, end_s = self._buckets.finish(index)
                    yield self._noted(action, start_s - self._start_s, end_s - self._start_s)
                case Step():
                    self._status.enter(Phase.STEP)
                    start_s = self._now_s()
                    work.step()
                    yield self._noted(action, start_s, self._now_s())
        self._status.enter(Phase.SEND)
        self._finish(chain.from_iterable(chain.from_iterable(self._sending.values())))
        self.record.iteration_s = self._now_s()
        self._sending, self._outputs = {}, {}
        assert not self._awaited, "the dry run lets no receive be forgotten"
        if due is not actions:
            self._buckets.follow(actions)
        if step is not None:
            self._status.end_step()

    def _receive(self, action: Receive) -> None:
        shape, dtype = self._boxes.shape(action), self._boxes.dtype(action)
        self._awaited.append(self._exchange.expect(action, shape, dtype))

    def _compute(self, action: Compute, work: Work) -> Event:
        work.begin(action)
        self._outputs = {}  # a transfer keeps the result that it sends
        step, microbatch = work.place(action.microbatch)
        arrived = self._wait_for(action, microbatch)
        self._wait_for_sends(action)
        start_s = self._now_s()
        self._status.enter(_PHASES[action.direction], action.stage, microbatch)
        try:
            with random_operators(self._seed, step, microbatch):
                self._outputs = self._pass(action, work, arrived)
        except REFUSALS as error:
            # The fault of the data or the machine, such as an index beyond a table or too little
            # memory, since all shapes have been checked.
            raise LaunchError(f"{current_place()}: {type(error).__name__}: {error}") from error
        return self._noted(action, start_s, self._now_s())

    def _pass(self, action: Compute, work: Work, arrived: Tensors) -> Tensors:
        stage, s, m = self._stages[action.stage], action.stage, action.microbatch
        if action.direction is Direction.BACKWARD:
            self._buckets.begin(action)
            gradients = work.backward(action, stage, self._handover.gradients(s, m, arrived))
            return self._handover.leave(s, m, gradients)
        outputs = work.forward(action, stage, {**self._handover.tensors(s, m), **arrived})
        self._handover.keep(s, m, {**arrived, **outputs})
        return outputs

    def _wait_for(self, compute: Compute, microbatch: int) -> Tensors:
        """The tensors that a computation needs; several gradients of one tensor are added up."""
        arrived: Tensors = {}
        for arrival in self._awaited:
            receive = arrival.action
            if waits(compute, receive):
                self._status.enter(Phase.RECEIVE, compute.stage, microbatch, receive.device)
                tensor, ended_s = self._exchange.take(arrival, self._boxes.shape(receive))
                posted_s = arrival.transfer.posted_s
                known = self.record.receives.setdefault(receive.device, [])
                known.append((receive, posted_s - self._start_s, ended_s - self._start_s))
                self._boxes.put(arrived, receive, tensor)
        self._awaited = [one for one in self._awaited if not waits(compute, one.action)]
        return arrived

    def _wait_for_sends(self, compute: Compute) -> None:
        """Waits until the results of the second computation before this one, of its stage and
        direction, are sent. So never more than two results of a stage and direction are alive; the
        simulator has the same rule, and `actions.waiting_for_sends` says why it cannot hang.
        """
        sending = self._sending.setdefault((compute.stage, compute.direction), deque())
        # A list of transfers for each computation, the latest last. All but the last one's have to
        # be over: these are the results of the second computation before, and older ones.
        if compute.direction in self._waiting:
            while len(sending) > 1:
                self._status.enter(Phase.SEND, compute.stage)
                self._finish(sending.popleft())
        # A transfer holds its tensor, so those that are over are let go of as early as possible.
        while sending and all(transfer.is_over() for transfer in sending[0]):
            sending.popleft()
        sending.append([])

    def _finish(self, transfers: Iterable[PostedTransfer]) -> None:
        for transfer in transfers:
            self._groups.finish(transfer)

    def _send(self, action: Send) -> None:
        output = self._outputs[action.tensor]
        part = dense(self._boxes.cut(action, output))
        if part.shape == output.shape:
            self._outputs[action.tensor] = part  # one copy for all targets
        transfer = self._exchange.send(action, part)
        self._sending[action.stage, action.direction][-1].append(transfer)
        self.record.sends.setdefault(action.device, []).append(transfer.posted_s - self._start_s)

    def _now_s(self) -> float:
        """Since the start of the list, with all computation done."""
        if self._groups.torch_device != "cpu":
            torch.cuda.current_stream().synchronize()
        return clocks.now_s() - self._start_s

    def _noted(self, action: Action, start_s: float, end_s: float) -> Event:
        event = action, start_s, end_s
        self.record.events.append(event)
        if self._watch is not None:
            self.record.peaks_bytes.append(self._watch.peak_bytes())
        return event
