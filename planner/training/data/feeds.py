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
from planner.training.data.batching import BatchLayout, BatchSizeHistory, Feed
from planner.training.data.datasets import data_name, dataset_feed, given_data, is_dataset
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
    """Reads the data that a device needs: the inputs of the graph that its stages read or count
    denominators in, and the targets of the losses that they compute.
    """
    return BatchReader(job.model.graph, job.losses, _needs(job, part), job.device)


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
    if loop.data is None:
        return _each(mine, _synthetic(job, _needs(job, part), layout.seed))
    if not reader.reads:
        return _each(mine, lambda step, microbatch: Batch({}, {}))
    where, data = given_data(loop.data, "--data", layout.seed)
    if callable(data) and not is_dataset(data):
        return _each(mine, _called(where, data, reader))
    return dataset_feed(where, data, layout, mine, reader)


def _each(mine: Sequence[int], batch_of: Callable[[int, int], Batch]) -> Feed:
    """A feed of a function of (step, microbatch)."""

    def microbatches(step: int, history: BatchSizeHistory) -> Iterator[Batch]:
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


def _called(
    where: str, function: Callable[..., object], reader: BatchReader
) -> Callable[[int, int], Batch]:
    """Data of a function of the user, called as `function(step, microbatch, {input: (shape,
    dtype)})` on every rank that needs the microbatch; it has to return the same everywhere.
    """

    def batch_of(step: int, microbatch: int) -> Batch:
        place = f"{where}: step {step}, microbatch {microbatch}"
        try:
            returned = function(step, microbatch, dict(reader.wanted))
        except Exception as error:
            raise LaunchError(f"{place}: {type(error).__name__}: {error}") from error
        return reader.returned(returned, place)

    return batch_of


def number_of_steps(loop: Loop, feed: Feed, groups: Groups) -> int:
    """The steps of a training; those of its epochs are known to ranks that read data. Every rank
    calls it.

    Raises:
        LaunchError: if ranks read different datasets, or epochs have no length.
    """
    if loop.data is None:
        return loop.steps or USUAL_STEPS
    name = data_name(loop.data, "--data")
    facts = groups.gather((feed.steps_per_epoch, feed.fingerprint))
    lengths: set[int] = {length for length, _ in facts if length is not None}
    prints = {one for _, one in facts if one is not None}
    if len(lengths) > 1:
        raise LaunchError(
            f"{name}: expected the same dataset on all ranks, got epochs"
            f" of {' and '.join(map(str, sorted(lengths)))} steps"
        )
    if len(prints) > 1:
        raise LaunchError(
            f"{name}: expected the same samples on all ranks, got different ones; draw them by"
            " torch's, numpy's or Python's own generators, which have the same seed on all ranks,"
            " or give generators of your own a seed"
        )
    if loop.epochs is None:
        return loop.steps or USUAL_STEPS
    if not lengths:
        raise LaunchError(
            f"--epochs {loop.epochs}: expected data with a length, got {name}; give the dataset a"
            " __len__, or give --steps"
        )
    return loop.epochs * lengths.pop()
