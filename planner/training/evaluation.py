"""An evaluation: the forward passes of a step's action lists, over data of its own.

Modules, parameters and the order of actions are those of the training. Operators compute as in
evaluation (`planner.operators.running`), whatever the file says of its training. Each replica has
running statistics, and other state, of its own microbatches; all take those of the first one, which
are those of the model, as in DistributedDataParallel. Every sample counts once: the last microbatch
is filled up with its last sample, and the rows of that are cut off before anything is computed from
them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from planner.artefacts.graph import Graph
from planner.artefacts.losses import Loss
from planner.launcher.batch import Batch
from planner.launcher.device_part import DevicePart
from planner.launcher.executor import Executor, StepSums
from planner.launcher.failures.rank import current_status
from planner.launcher.failures.status import Phase
from planner.launcher.gradients import GradientBuckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.stage import StageModule, Tensors
from planner.launcher.totals import LossTotals
from planner.launcher.transfers import boxes_of
from planner.operators.running import REFUSALS
from planner.schedules.actions import (
    Action,
    Compute,
    Direction,
    Receive,
    Send,
    of_microbatches,
    text,
)
from planner.support.errors import LaunchError, words_of
from planner.training.data.agreement import DataAgreement
from planner.training.data.batching import BatchLayout
from planner.training.data.datasets import EvalData
from planner.training.metrics import Meter, metrics_of


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of the model in the middle of a training.

    Attributes:
        step: number of steps before it.
        figures: loss, accuracy and the user's, by name.
    """

    step: int
    figures: Mapping[str, float]


class Evaluator:
    """Evaluates a model that is being trained; every rank makes one, and all call it together. It
    is the `Work` of its executor, in passes of up to M microbatches.

    Attributes:
        notes: on what is left out.

    Args:
        job: what is trained.
        part: of this device.
        graph: with the types of elements that tensors have where they cross stages.
        groups: the other devices.
        data: the samples.
        layout: how they become microbatches.
        totals: counts what the model's own losses are divided by.
        names: functions of the user, besides loss and accuracy.

    Raises:
        LaunchError: if ranks have different data, or the file trains only.
    """

    def __init__(
        self, job: TrainingJob, part: DevicePart, graph: Graph, groups: Groups, data: EvalData,
        layout: BatchLayout, totals: LossTotals, names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        record = job.model.record
        if record is not None and record.unlike:
            raise LaunchError(
                f"{data.where}: the file cannot be evaluated as the module: {record.unlike}"
            )
        self._job, self._part, self._groups, self._data = job, part, groups, data
        self._layout, self._metrics = layout, metrics_of(job.losses, names)
        self._totals, self._of_data = totals, dict[str, float]()
        boxes = boxes_of(job.plan.strategy, graph, groups.device)
        no_gradients = GradientBuckets({}, (), groups)
        self._executor = Executor(part.stages, boxes, no_gradients, groups, seed=layout.seed)
        # Without backward passes, each forward still finds what it needs: that comes from forward
        # passes alone, and these keep their order.
        self._forwards = [
            one
            for one in job.program.lists[groups.device]
            if isinstance(one, Compute | Send | Receive) and one.direction is Direction.FORWARD
        ]
        self._status = current_status()
        self._meter, self._first = Meter(self._metrics), 0
        self._coming: Iterator[Batch] = iter(())
        self._batches: dict[int, Batch] = {}  # of microbatches between their first and last stage
        self.notes: tuple[str, ...] = ()
        agreed = DataAgreement(data.where, data.read, layout, groups).num_samples
        assert agreed is not None, "some rank reads samples, and knows how many there are"
        self._num_samples = agreed
        left = self._num_samples % layout.size
        if left and not all(_has_rows(loss, layout.size) for loss in job.losses):
            self._num_samples -= left
            self.notes = (
                f"evaluation leaves out the last {left} samples: the loss is one of whole"
                f" microbatches of {layout.size}",
            )

    def __call__(self) -> dict[str, float]:
        """The figures, on all ranks."""
        share_states(self._part, self._groups)
        self._part.shards.settle()  # replicas with fewer microbatches run fewer forwards
        self._meter = Meter(self._metrics)
        self._of_data = self._denominators(-(-self._num_samples // self._layout.size))
        self._coming = self._data.microbatches(self._num_samples, filled=True)
        total = self._layout.passes(self._num_samples)
        for first in range(0, total, self._layout.count):
            self._first, count = first, min(self._layout.count, total - first)
            self._executor.run(of_microbatches(self._forwards, count), self)
        self._status.enter(Phase.BARRIER)
        sums = self._groups.add_up(self._meter.sums())
        self._status.enter(Phase.BETWEEN)
        return self._meter.figures(sums)

    def _denominators(self, num_microbatches: int) -> dict[str, float]:
        """The totals of all data, as if it were one step, where a loss that the model computes
        itself has denominators. For these the data is read once more.
        """
        if not any(one.of for one in self._job.denominators):
            return {}
        counts = dict.fromkeys(self._totals.names, 0.0)
        for batch in self._data.microbatches(self._num_samples, filled=False):
            for name, count in self._totals.own([batch]).items():
                counts[name] += count
        sums = StepSums(0, counts).added_up(self._groups.add_up)
        return self._totals.of_step(sums.counts, num_microbatches)

    def meet(self, actions: Sequence[Action]) -> Sequence[Action]:
        """Never: an evaluation is no step."""
        raise NotImplementedError

    def place(self, microbatch: int) -> tuple[int, int]:
        """As `Work.place`; every pass draws the same numbers."""
        return 0, microbatch

    def begin(self, action: Compute) -> None:
        """Fetches the data of a microbatch before its first stage here."""
        if action.microbatch not in self._batches:
            self._status.enter(Phase.EVALUATION)
            self._batches[action.microbatch] = next(self._coming)

    def forward(self, action: Compute, stage: StageModule, tensors: Tensors) -> Tensors:
        """As `Work.forward`, in evaluation; judges the outputs."""
        batch = self._batches[action.microbatch].on(self._job.device)
        if action.stage == max(self._part.stages):
            del self._batches[action.microbatch]
        inputs = self._part.places[action.stage].inputs(batch.inputs)
        try:
            outputs = stage.evaluate({**inputs, **tensors}, self._of_data)
        except REFUSALS as error:
            raise LaunchError(
                f"--eval-data: at {text(action)}: {type(error).__name__}: {words_of(error)}"
            ) from error
        size = self._layout.size
        rows = min(size, self._num_samples - (self._first + action.microbatch) * size)
        if rows <= 0:  # run for other replicas only
            return outputs
        whole = _cut(self._whole(action.stage, outputs), rows, size)
        self._status.enter(Phase.EVALUATION)
        self._meter.add(whole, _cut(batch.targets, rows, size))
        return outputs

    def backward(self, action: Compute, stage: StageModule, gradients: Tensors) -> Tensors:
        """Never: an evaluation has forward passes only."""
        raise NotImplementedError

    def step(self) -> None:
        """Never."""
        raise NotImplementedError

    def _whole(self, stage: int, outputs: Tensors) -> Tensors:
        """The outputs that have losses in which something counts, whole. Of those that a mesh has
        in parts the first of its devices gets them for all, and the others none.
        """
        place = self._part.places[stage]
        lost = (loss.output for loss in self._job.losses if loss.output.name in outputs)
        lost = (one for one in lost if self._of_data.get(one.name, 1.0))
        whole = {one.name: place.whole_output(one, outputs[one.name]) for one in lost}
        return whole if place.mesh.index == 0 else {}


def _has_rows(loss: Loss, size: int) -> bool:
    """Whether an output has a row for each sample."""
    return loss.has_target and loss.output.shape[:1] == (size,)


def _cut(tensors: Mapping[str, Tensor], rows: int, size: int) -> Tensors:
    """The first rows of tensors that have one for each sample."""
    return {
        name: one[:rows] if rows < size and one.shape[:1] == (size,) else one
        for name, one in tensors.items()
    }


def share_states(part: DevicePart, groups: Groups) -> None:
    """Gives all replicas of a stage the state of the first one; all ranks call it."""
    for s, place in sorted(part.places.items()):
        alike = [group[place.mesh.index] for group in place.stage.groups]
        for _, one in sorted(part.stages[s].states.items()):
            state = one.cpu().contiguous()
            groups.share(state, alike)
            one.copy_(state)
