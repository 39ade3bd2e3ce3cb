"""An evaluation: the forward passes of a step's action lists, over data of its own.

Modules, parameters and the order of actions are those of the training. Operators compute as in
evaluation (`planner.operators.running`), whatever the file says of its training. Each replica has
running statistics of its own microbatches; all take those of the first one, which are those of the
model, as in DistributedDataParallel. Every sample counts once: the last microbatch is filled up
with its last sample, and the rows of that are cut off before anything is computed from them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from planner.artefacts.graph import Graph
from planner.artefacts.losses import Loss
from planner.artefacts.profile import BatchNorm
from planner.launcher import ending
from planner.launcher.exchange import Arrival, Exchange, dense
from planner.launcher.failures.page import Phase
from planner.launcher.feed import Batch
from planner.launcher.job import TrainingJob
from planner.launcher.part import Part
from planner.launcher.runtime import LocalHandover
from planner.launcher.split.boxes import Boxes, boxes_of
from planner.launcher.split.part import place_of
from planner.launcher.world import PostedTransfer, World
from planner.operators.randomness import drawing
from planner.operators.running import REFUSALS
from planner.schedules.actions import Action, Compute, Direction, Receive, Send, text, waits
from planner.support.errors import LaunchError, words_of
from planner.training.datasets import MapSource, given, is_dataset, told
from planner.training.dealing import Deal, Request, seed_of
from planner.training.metrics import Meter, metrics_of
from planner.training.samples import Reader

Tensors = dict[str, Tensor]


class EvalData:
    """The samples of an evaluation, as one device reads them.

    Attributes:
        where: they are from, for messages.
        num_samples: None where this device reads none.

    Args:
        data: as a user gives it.
        deal: how samples become microbatches.
        mine: the microbatches of a step that this device runs.
        read: makes tensors of them; None on a device that needs none.

    Raises:
        LaunchError: if it is no dataset of known length, or does not fit the model.
    """

    def __init__(
        self, data: object, option: str, deal: Deal, mine: Sequence[int], read: Reader | None
    ) -> None:
        self._deal, self._mine, self._read = deal, mine, read
        self.where, self.num_samples = option, None
        if read is None:
            return
        self.where, found = given(data, option)
        inner: Any = found.dataset if isinstance(found, DataLoader) else found
        if (
            not is_dataset(found)
            or isinstance(inner, IterableDataset)
            or not (hasattr(inner, "__getitem__") and hasattr(inner, "__len__"))
        ):
            raise LaunchError(
                f"{self.where}: expected a dataset with __getitem__ and __len__, or a DataLoader of"
                f" one, got {type(inner).__name__}"
            )
        self._source = MapSource(self.where, found, deal, whole_steps=False)
        self.num_samples = self._source.num_samples
        if not self.num_samples:
            raise LaunchError(f"{self.where}: expected at least one sample, got none")
        with told(self.where):
            item = self._source.first(self._request(0, 0))
        read.microbatch(item, f"{self.where}: microbatch 0")

    def batches(self, num_samples: int) -> Callable[[int], Batch]:
        """The data of this device by the index of a microbatch among all, each of which is given
        once.

        Args:
            num_samples: that are evaluated.
        """
        if self._read is None:
            return lambda index: Batch({}, {})
        read, total = self._read, -(-num_samples // self._deal.size)
        own = {m % self._deal.count for m in self._mine}
        indices = [i for i in range(total) if i % self._deal.count in own]
        coming = self._source.fetched(self._request(i, 0) for i in indices)
        due, held = iter(indices), dict[int, object]()

        def batch(index: int) -> Batch:
            where = f"{self.where}: microbatch {index}"
            with told(where):
                while index not in held:
                    held[next(due)] = next(coming)
            return read.microbatch(held.pop(index), where)

        return batch

    def _request(self, index: int, epoch: int) -> Request:
        order, size = self._source.order(epoch), self._deal.size
        inside = order[index * size : (index + 1) * size]
        seed = seed_of(self._deal.seed, "evaluation", index)
        return seed, [*inside, *[inside[-1]] * (size - len(inside))]


class Evaluator:
    """Evaluates a model that is being trained; every rank makes one, and all call it together.

    Attributes:
        notes: on what is left out.

    Args:
        job: what is trained.
        part: of this device.
        graph: with the types of elements that tensors have where they cross stages.
        world: the other devices.
        data: the samples.
        deal: how they become microbatches.
        names: functions of the user, besides loss and accuracy.

    Raises:
        LaunchError: if ranks have different data.
    """

    def __init__(
        self, job: TrainingJob, part: Part, graph: Graph, world: World, data: EvalData, deal: Deal,
        names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._job, self._part, self._world, self._data = job, part, world, data
        self._deal, self._metrics = deal, metrics_of(job.losses, names)
        boxes = boxes_of(job.plan.strategy, graph, world.device)
        self._forwards = Forwards(job.program.lists[world.device], boxes, part, world, deal.seed)
        self.notes: tuple[str, ...] = ()
        known = {one for one in world.gather(data.num_samples) if one is not None}
        if len(known) != 1:
            counts = " and ".join(map(str, sorted(known))) or "no"
            raise LaunchError(
                f"{data.where}: expected the same dataset on all ranks, got {counts} samples"
            )
        (self._num_samples,) = known
        left = self._num_samples % deal.size
        if left and not all(_has_rows(loss, deal.size) for loss in job.losses):
            self._num_samples -= left
            self.notes = (
                f"evaluation leaves out the last {left} samples: the loss is one of whole"
                f" microbatches of {deal.size}",
            )

    def __call__(self) -> dict[str, float]:
        """The figures, on all ranks."""
        share_statistics(self._job, self._part, self._world)
        meter, size = Meter(self._metrics), self._deal.size
        batch_of = self._data.batches(self._num_samples)
        total = -(-self._num_samples // size)
        for first in range(0, total, self._deal.count):

            def judge(microbatch: int, outputs: Tensors, batch: Batch, first: int = first) -> None:
                rows = min(size, self._num_samples - (first + microbatch) * size)
                outputs = self._whole(outputs)
                meter.add(_cut(outputs, rows, size), _cut(batch.targets, rows, size))

            count = min(self._deal.count, total - first)
            self._forwards.run(count, partial(_at, batch_of, first), judge)
        page = ending.page()
        page.enter(Phase.BARRIER)
        sums = self._world.add_up(meter.sums())
        page.enter(Phase.BETWEEN)
        return meter.figures(sums)

    def _whole(self, outputs: Tensors) -> Tensors:
        """The outputs that have losses, whole. Of those that a mesh has in parts the first of its
        devices gets them for all, and the others none.
        """
        place = self._part.place
        if place is None:
            return outputs
        lost = (loss.output for loss in self._job.losses if loss.output.name in outputs)
        whole = {one.name: place.whole_output(one, outputs[one.name]) for one in lost}
        return whole if place.mesh.index == 0 else {}


def _at(batch_of: Callable[[int], Batch], first: int, microbatch: int) -> Batch:
    return batch_of(first + microbatch)


def _has_rows(loss: Loss, size: int) -> bool:
    """Whether an output has a row for each sample."""
    return loss.has_target and loss.output.shape[:1] == (size,)


def _cut(tensors: Mapping[str, Tensor], rows: int, size: int) -> Tensors:
    """The first rows of tensors that have one for each sample."""
    return {
        name: one[:rows] if rows < size and one.shape[:1] == (size,) else one
        for name, one in tensors.items()
    }


def share_statistics(job: TrainingJob, part: Part, world: World) -> None:
    """Gives all replicas of a stage the running statistics of the first one; all ranks call it."""
    if job.plan.batch_norm is BatchNorm.FROZEN:
        return
    for s, runner in sorted(part.stages.items()):
        stage = job.plan.strategy.stages[s]
        _, index = place_of(stage, world.device)
        alike = [group[index] for group in stage.groups]
        for _, one in sorted(runner.running.items()):
            statistic = one.cpu().contiguous()
            world.share(statistic, alike)
            one.copy_(statistic)


class Forwards:
    """Runs the forward passes among the actions of one device.

    Without backward passes, each still finds what it needs: it comes from forward passes alone, and
    these keep their order.

    Args:
        actions: of a step.
        boxes: describes the tensors that it sends and receives.
        part: of this device.
        world: the other devices.
        seed: of the numbers that operators draw.
    """

    def __init__(
        self, actions: Sequence[Action], boxes: Boxes, part: Part, world: World, seed: int
    ) -> None:
        self._actions = [*_forwards(actions)]
        self._boxes, self._stages, self._world = boxes, part.stages, world
        self._place = part.place
        self._exchange, self._seed = Exchange(world), seed
        self._page = ending.page()

    def run(
        self,
        count: int,
        batch_of: Callable[[int], Batch],
        judge: Callable[[int, Tensors, Batch], None],
    ) -> None:
        """Runs the first microbatches of a step.

        Args:
            count: their number.
            batch_of: the data of a microbatch; asked for once for each of this device, in order.
            judge: gets the microbatch, all outputs of a stage, and that data.
        """
        handover = LocalHandover(self._stages)
        awaited: list[Arrival] = []
        sent: list[PostedTransfer] = []
        batches: dict[int, Batch] = {}
        made: Tensors = {}
        for action in self._actions:
            if action.microbatch >= count:
                continue
            if isinstance(action, Receive):
                shape, dtype = self._boxes.shape(action), self._boxes.dtype(action)
                awaited.append(self._exchange.expect(action, shape, dtype))
            elif isinstance(action, Send):
                part = dense(self._boxes.cut(action, made[action.tensor]))
                sent.append(self._exchange.send(action, part))
            else:
                s, m = action.stage, action.microbatch
                if m not in batches:
                    self._page.enter(Phase.BETWEEN)
                    batches[m] = batch_of(m)
                arrived = {**handover.tensors(s, m), **self._taken(action, awaited)}
                self._page.enter(Phase.FORWARD, s, m)
                inputs = batches[m].inputs
                if self._place is not None:
                    inputs = self._place.inputs(inputs)
                made = self._computed(action, {**inputs, **arrived})
                awaited = [one for one in awaited if not waits(action, one.action)]
                handover.keep(s, m, {**arrived, **made})
                judge(m, made, batches[m])
        self._page.enter(Phase.SEND)
        for transfer in sent:
            self._world.finish(transfer)

    def _taken(self, compute: Compute, awaited: Sequence[Arrival]) -> Tensors:
        """The tensors that a computation waits for."""
        taken: Tensors = {}
        for arrival in awaited:
            if waits(compute, arrival.action):
                receive = arrival.action
                self._page.enter(Phase.RECEIVE, compute.stage, compute.microbatch, receive.device)
                tensor, _ = self._exchange.take(arrival, self._boxes.shape(receive))
                self._boxes.put(taken, receive, tensor)
        return taken

    def _computed(self, action: Compute, tensors: Mapping[str, Tensor]) -> Tensors:
        try:
            with drawing(self._seed, 0, action.microbatch):
                return self._stages[action.stage].evaluate(tensors)
        except REFUSALS as error:
            raise LaunchError(
                f"--eval-data: at {text(action)}: {type(error).__name__}: {words_of(error)}"
            ) from error


def _forwards(actions: Sequence[Action]) -> Iterator[Compute | Send | Receive]:
    for action in actions:
        if isinstance(action, Compute | Send | Receive) and action.direction is Direction.FORWARD:
            yield action
