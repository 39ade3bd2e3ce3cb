"""What feeds a training on one device: a function of the user, a dataset, or random numbers."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
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
    seed_of,
    seeded_generators,
    unnoted,
)
from planner.training.data.datasets import (
    data_errors,
    data_name,
    dataset_feed,
    given_data,
    is_dataset,
)
from planner.training.data.fingerprints import Prints, prints
from planner.training.data.samples import BatchReader, NeededData


def training_seed(job: TrainingJob, loop: Loop) -> int:
    """The seed of synthetic data and of the numbers that operators and datasets draw."""
    return job.plan.seed if loop.seed is None else loop.seed


def layout_of(job: TrainingJob, loop: Loop) -> BatchLayout:
    """How samples become the microbatches of a training."""
    plan = job.plan
    return BatchLayout(
        plan.microbatch_size, plan.strategy.num_microbatches, training_seed(job, loop), loop.shuffle
    )


def reader_of(job: TrainingJob, part: DevicePart) -> BatchReader:
    """Reads the data that a device needs: the inputs of the graph that its stages read, and the
    targets of the losses that they compute.
    """
    return BatchReader(job.model.graph, job.losses, _needs(job, part), job.device)


def _needs(job: TrainingJob, part: DevicePart) -> NeededData:
    read = {name for stage in part.stages.values() for name in stage.input_names}
    made = {name for stage in part.stages.values() for name in stage.output_names}
    return NeededData(
        inputs=frozenset(read & {*job.model.graph.inputs}),
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
    if loop.data is None:
        return _each(mine, _synthetic(job, _needs(job, part), layout.seed))
    if not reader.reads:
        return _each(mine, lambda step, microbatch: Batch({}, {}))
    where, data = given_data(loop.data, "--data", layout.seed)
    if callable(data) and not is_dataset(data):
        return _function_feed(where, data, layout.seed, mine, reader)
    return dataset_feed(where, data, layout, mine, reader)


def _each(mine: Sequence[int], batch_of: Callable[[int, int], Batch]) -> Feed:
    """A feed of a function of (step, microbatch)."""

    def microbatches(step: int, history: BatchSizeHistory, note: Note = unnoted) -> Iterator[Batch]:
        for at in count(step):
            for microbatch in mine:
                yield batch_of(at, microbatch)

    return Feed(microbatches)


def _synthetic(job: TrainingJob, needs: NeededData, seed: int) -> Callable[[int, int], Batch]:
    """Random data, the same in every step and on every rank."""

    @cache
    def of(microbatch: int) -> Batch:
        how: dict[str, Any] = {"seed": seed, "microbatch": microbatch, "device": job.device}
        every = synthetic.inputs(job.model, **how) if needs.inputs else {}
        targets = {
            loss.output.name: synthetic.target(loss, **how)
            for loss in job.losses
            if loss.output.name in needs.targets
        }
        return Batch({name: every[name] for name in sorted(needs.inputs)}, targets)

    return lambda step, microbatch: of(microbatch)


def _function_feed(
    where: str, function: Callable[..., object], seed: int, mine: Sequence[int],
    reader: BatchReader,
) -> Feed:  # fmt: skip
    """Data of a function of the user, called as `function(step, microbatch, {input: (shape,
    dtype)})` on every rank that needs the microbatch; it has to return the same everywhere. What it
    draws follows from the seed, the step and the microbatch.
    """

    def returned(step: int, microbatch: int) -> tuple[object, str]:
        place = f"{where}: step {step}, microbatch {microbatch}"
        with data_errors(place), seeded_generators(seed_of(seed, step, microbatch)):
            return function(step, microbatch, dict(reader.wanted)), place

    def microbatches(step: int, history: BatchSizeHistory, note: Note = unnoted) -> Iterator[Batch]:
        for at in count(step):
            for m in mine:
                yield batch(at, m, note)

    def batch(step: int, microbatch: int, note: Note) -> Batch:
        """One of them; nothing else holds its data, so that it can be freed after its use."""
        item, place = returned(step, microbatch)
        found = reader.returned(item, place)
        note(step, microbatch, lambda: reader.named(item, place))
        return found

    def read(
        place: Place, history: BatchSizeHistory, most: int | None
    ) -> tuple[Prints, Sequence[Any]]:
        step, microbatch = place
        assert step is not None, "no function gives the data of an evaluation"
        return prints(reader.named(*returned(step, microbatch))), ()

    return Feed(microbatches, read=ReadData(tuple(mine), read=read))


def number_of_steps(loop: Loop, feed: Feed, groups: Groups) -> int:
    """The steps of a training; those of its epochs are known to ranks that read data. Every rank
    calls it.

    Raises:
        LaunchError: if epochs have no length.
    """
    if loop.data is None:
        return loop.steps or USUAL_STEPS
    lengths: set[int] = {one for one in groups.gather(feed.steps_per_epoch) if one is not None}
    if loop.epochs is None:
        return loop.steps or USUAL_STEPS
    if not lengths:
        raise LaunchError(
            f"--epochs {loop.epochs}: expected data with a length, got"
            f" {data_name(loop.data, '--data')}; give the dataset a __len__, or give --steps"
        )
    return loop.epochs * max(lengths)
