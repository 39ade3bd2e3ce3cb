"""What feeds a training on one device: a function of the user, a dataset, or random numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

from planner.launcher.batch import Batch
from planner.launcher.device_part import DevicePart
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.options import USUAL_STEPS, Loop
from planner.operators import synthetic
from planner.support.errors import LaunchError
from planner.training.data.batching import (
    BatchLayout,
    BatchSizeHistory,
    Feed,
    Note,
    Place,
    ReadData,
    ReadTwice,
    StepData,
    seed_generators,
    seed_of,
    unnoted,
)
from planner.training.data.datasets import (
    data_errors,
    data_name,
    dataset_feed,
    given_data,
    is_dataset,
)
from planner.training.data.fingerprints import prints
from planner.training.data.samples import BatchReader, NeededData


def training_seed(job: TrainingJob, loop: Loop) -> int:
    """The seed of synthetic data and of the numbers that operators and datasets draw."""
    return job.plan.seed if loop.seed is None else loop.seed


def layout_of(job: TrainingJob, loop: Loop) -> BatchLayout:
    """How samples become the microbatches of a training."""
    plan = job.plan
    strategy = plan.strategy
    return BatchLayout(
        plan.microbatch_size, strategy.num_microbatches, training_seed(job, loop), loop.shuffle,
        short_steps=not strategy.schedule.is_asynchronous,
    )  # fmt: skip


def reader_of(job: TrainingJob, part: DevicePart) -> BatchReader:
    """Reads the data that a device needs: the inputs of the graph that its stages read or count
    denominators in, and the targets of the losses that they compute.
    """
    return BatchReader(job.model.graph, job.losses, _needs(job, part))


def _needs(job: TrainingJob, part: DevicePart) -> NeededData:
    read = {name for stage in part.stages.values() for name in stage.input_names}
    made = {name for stage in part.stages.values() for name in stage.output_names}
    return NeededData(
        inputs=frozenset((read | part.counted) & {*job.model.graph.inputs}),
        targets=frozenset(one.output.name for one in job.losses if one.has_target) & made,
    )


def make_feed(job: TrainingJob, part: DevicePart, loop: Loop, mine: Sequence[int]) -> Feed:
    """The data of this device.

    Args:
        mine: indices of its microbatches, ascending.

    Raises:
        LaunchError: if the user's data does not fit the model.
    """
    layout, reader = layout_of(job, loop), reader_of(job, part)
    if not reader.reads:
        return Feed(lambda step, history, note=unnoted: _nothing(mine))
    if loop.data is None:
        return _each(layout, mine, _synthetic(job, _needs(job, part), layout.seed))
    where, data = given_data(loop.data, "--data", layout.seed)
    if callable(data) and not is_dataset(data):
        return _function_feed(where, data, layout, mine, reader)
    return dataset_feed(where, data, layout, mine, reader)


def _each(layout: BatchLayout, mine: Sequence[int], batch_of: Callable[[int, int], Batch]) -> Feed:
    """A feed of a function of (step, microbatch)."""

    def steps(step: int, history: BatchSizeHistory, note: Note = unnoted) -> Iterator[StepData]:
        for at in count(step):
            yield StepData(layout.count, map(partial(batch_of, at), mine))

    return Feed(steps)


def _nothing(mine: Sequence[int]) -> Iterator[StepData]:
    """The data of a device that reads none, in each step."""
    while True:
        yield StepData(None, (Batch({}, {}) for _ in mine))


def _synthetic(job: TrainingJob, needs: NeededData, seed: int) -> Callable[[int, int], Batch]:
    """Random data, the same in every step and on every rank."""

    @cache
    def of(microbatch: int) -> Batch:
        how: dict[str, Any] = {"seed": seed, "microbatch": microbatch}
        every = synthetic.inputs(job.model, **how) if needs.inputs else {}
        targets = {
            loss.output.name: synthetic.target(loss, **how)
            for loss in job.losses
            if loss.output.name in needs.targets
        }
        return Batch({name: every[name] for name in sorted(needs.inputs)}, targets)

    return lambda step, microbatch: of(microbatch)


def _function_feed(
    where: str, function: Callable[..., object], layout: BatchLayout, mine: Sequence[int],
    reader: BatchReader,
) -> Feed:  # fmt: skip
    """Data of a function of the user, called as `function(step, microbatch, {input: (shape,
    dtype)})` on every rank that needs the microbatch; it has to return the same everywhere. What it
    draws follows from the seed, the step and the microbatch.
    """

    def returned(step: int, microbatch: int) -> tuple[object, str]:
        place = f"{where}: step {step}, microbatch {microbatch}"
        seed_generators(seed_of(layout.seed, step, microbatch))
        with data_errors(place):
            return function(step, microbatch, dict(reader.wanted)), place

    def steps(step: int, history: BatchSizeHistory, note: Note = unnoted) -> Iterator[StepData]:
        for at in count(step):
            yield StepData(layout.count, map(partial(batch, at, note=note), mine))

    def batch(step: int, microbatch: int, note: Note) -> Batch:
        """One of them; nothing else holds its data, so that it can be freed after its use."""
        item, place = returned(step, microbatch)
        found = reader.returned(item, place)
        note(step, microbatch, lambda: reader.named(item, place))
        return found

    def read(place: Place, history: BatchSizeHistory, most: int | None) -> ReadTwice:
        step, microbatch = place
        assert step is not None, "no function gives the data of an evaluation"
        one, two = (prints(reader.named(*returned(step, microbatch))) for _ in range(2))
        return one, two, ()

    return Feed(steps, read=ReadData(tuple(mine), read=read))


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of the data of a training, as all ranks know it.

    Attributes:
        num_samples: None without a known length.
        least: samples that a step has at least; None where no rank reads a dataset.
        readers: the ranks that read data, and know how many microbatches a step has.
    """

    num_samples: int | None
    least: int | None
    readers: tuple[int, ...]


def epoch_of(num_samples: int | None, least: int | None, reads: bool, groups: Groups) -> Epoch:
    """An epoch of the data. Every rank calls it.

    Args:
        num_samples: of an epoch, on all ranks.
        least: samples that a step has at least, if this rank reads a dataset.
        reads: whether this rank reads any data.
    """
    facts = groups.gather((least, reads))
    known = (one for one, _ in facts if one is not None)
    readers = tuple(rank for rank, (_, does) in enumerate(facts) if does)
    return Epoch(num_samples, next(known, None), readers)


def number_of_steps(loop: Loop, epoch: Epoch, history: BatchSizeHistory) -> int:
    """The steps of a training, from the very first one.

    Args:
        history: of the batches before and after this launch goes on.

    Raises:
        LaunchError: if epochs have no length.
    """
    if loop.epochs is None or loop.data is None:
        return loop.steps or USUAL_STEPS
    if epoch.num_samples is None:
        raise LaunchError(
            f"--epochs {loop.epochs}: expected data with a length, got"
            f" {data_name(loop.data, '--data')}; give the dataset a __len__, or give --steps"
        )
    return history.end_of(loop.epochs, epoch.num_samples)
