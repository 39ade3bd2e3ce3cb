"""A dataset of the user -> the microbatches of one device.

The batch of a step are M microbatches of b samples, over all replicas: the b M samples that a loop
on one device would take. Microbatch m has samples b m to b (m + 1) of them, whichever device runs
it, so every partition of a plan trains on the same numbers.

    map-style dataset    samples in the order of the epoch; a device fetches only its own ones
    DataLoader of one    the same, with its sampler, its collate_fn and its workers
    iterable dataset     each device that reads data goes through all samples, and keeps its own
    DataLoader of one    the same with batches of b M samples

What is left at the end of an epoch and fills no step is left out. Epochs and the numbers that a
dataset draws follow from the seed: a microbatch is fetched with Python's, numpy's and torch's
generators seeded by seed, step and microbatch. So inputs and targets fit each other, though the
first stage fetches the ones and the last stage the others.
"""

import inspect
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from planner.launcher.feed import Batch
from planner.support.errors import LaunchError
from planner.support.named import function_named
from planner.training.dealing import Deal, History, Request, seed_of, seeded_generators
from planner.training.samples import Reader

# ------------------------------------------------------------------------------ what is given


def given(value: object, option: str) -> tuple[str, object]:
    """What a user gives for data: how messages call it, and a function or a dataset.

    Args:
        value: "module:callable", the callable, or a dataset.
        option: that gives it.

    Raises:
        LaunchError: if it is neither; a callable without required parameters is called.
    """
    where = said(value, option)
    if isinstance(value, str):
        value = function_named(value, option, LaunchError)
    if is_dataset(value) or not callable(value):
        return where, _checked_dataset(where, value)
    required = _num_required(value)
    if required == 3:
        return where, value
    if required != 0:
        raise LaunchError(
            f"{where}: expected a function of three required arguments (step, microbatch, inputs),"
            f" or one of none that returns a dataset, got one of {required}"
        )
    try:
        made: object = value()
    except Exception as error:
        raise LaunchError(f"{where}: {type(error).__name__}: {error}") from error
    return where, _checked_dataset(where, made)


def said(value: object, option: str) -> str:
    """How messages call data that a user has given."""
    return f"{option} {value}" if isinstance(value, str) else option


def is_dataset(value: object) -> bool:
    """Whether it is a dataset or a DataLoader; a class of them is none."""
    if isinstance(value, type):
        return False
    return (
        isinstance(value, Dataset) or hasattr(value, "__getitem__") or isinstance(value, Iterable)
    )


def _checked_dataset(where: str, value: object) -> object:
    if not is_dataset(value) or isinstance(value, str | dict):
        raise LaunchError(
            f"{where}: expected a map-style dataset, an iterable one or a DataLoader, got"
            f" {type(value).__name__}"
        )
    return value


def _num_required(function: Callable[..., object]) -> int:
    """The number of parameters that have to be given; 3 where they cannot be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return 3
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 3
    return sum(one.default is one.empty and one.kind is not one.VAR_KEYWORD for one in parameters)


# ------------------------------------------------------------------------------ map-style


class _Requested(Dataset[Any]):
    """A dataset that is asked for the samples of a microbatch at once."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, request: Request) -> list[Any]:
        seed, indices = request
        with seeded_generators(seed):
            many = getattr(self._dataset, "__getitems__", None)
            samples = [self._dataset[i] for i in indices] if many is None else many(indices)
        return list(samples)


class MapSource:
    """The samples of a map-style dataset, or of a DataLoader of one, in the order of each epoch.

    Attributes:
        where: it is from, for messages.
        num_samples: of an epoch.

    Raises:
        LaunchError: if its length is not known, or its batches are not those of a step.
    """

    def __init__(self, where: str, data: Any, deal: Deal, *, whole_steps: bool = True) -> None:
        self.where, self._deal = where, deal
        self._loader = data if isinstance(data, DataLoader) else None
        self.dataset: Any = data.dataset if self._loader is not None else data
        self._orders: dict[int, list[Any]] = {}
        if whole_steps and self._loader is not None:
            self._check_batch(self._loader.batch_size)
        self.num_samples = len(self.order(0))
        if whole_steps and self.num_samples < deal.samples:
            raise LaunchError(
                f"{where}: expected at least the samples of one step, {deal}, got"
                f" {self.num_samples}; give more data, or plan with smaller microbatches"
            )

    def order(self, epoch: int) -> list[Any]:
        """The indices of the samples of an epoch."""
        if epoch not in self._orders:
            with told(self.where), seeded_generators(seed_of(self._deal.seed, "epoch", epoch)):
                self._orders = {epoch: self._drawn(epoch)}
        return self._orders[epoch]

    def first(self, request: Request) -> Any:
        """One microbatch, collated; without workers."""
        collate = default_collate if self._loader is None else self._loader.collate_fn
        return collate(_Requested(self.dataset).__getitems__(request))

    def fetched(self, requests: Iterable[Request]) -> Iterator[Any]:
        """The microbatches of some requests, collated; by the workers of the DataLoader."""
        how = {} if self._loader is None else _options(self._loader)
        how.setdefault("collate_fn", default_collate)
        how["generator"] = torch.Generator()  # or it would draw torch's own numbers
        return iter(DataLoader(_Requested(self.dataset), batch_sampler=_Endless(requests), **how))

    def _check_batch(self, batch_size: int | None) -> None:
        if batch_size is not None and batch_size != self._deal.samples:
            raise LaunchError(
                f"{self.where}: expected a DataLoader with the samples of a whole step, batch_size="
                f"{self._deal}, got {batch_size}"
            )

    def _drawn(self, epoch: int) -> list[Any]:
        size = len(self.dataset)
        sampler = None if self._loader is None else self._loader.sampler
        if self._loader is None or (isinstance(sampler, RandomSampler) and not _special(sampler)):
            shuffled = self._loader is not None or self._deal.shuffle
            return torch.randperm(size).tolist() if shuffled else [*range(size)]
        if self._loader.batch_size is None:  # a batch sampler of the user
            batches = [[*batch] for batch in _of_epoch(self._loader.batch_sampler, epoch)]
            return [i for batch in self._whole(batches) for i in batch]
        if isinstance(sampler, SequentialSampler):
            return [*range(size)]
        return [*_of_epoch(sampler, epoch)]

    def _whole(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Batches of a batch sampler; the last one may be short, and is left out."""
        for batch in batches[:-1] or batches:
            self._check_batch(len(batch))
        return [batch for batch in batches if len(batch) == self._deal.samples]


def _special(sampler: RandomSampler) -> bool:
    """Whether it draws other than each sample once."""
    return bool(sampler.replacement) or sampler.num_samples != len(sampler.data_source)


def _of_epoch(sampler: Any, epoch: int) -> Iterable[Any]:
    """A sampler of the user's at the start of an epoch."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):  # else it draws torch's own numbers
        generator.manual_seed(torch.initial_seed())
    return sampler  # type: ignore[no-any-return]


class _Endless:
    """Requests as a batch sampler."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """What is taken over from a DataLoader of the user."""
    names = ("collate_fn", "num_workers", "timeout", "multiprocessing_context")
    how = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        how["prefetch_factor"] = loader.prefetch_factor
        how["worker_init_fn"] = partial(_begin_worker, loader.worker_init_fn)
    return how


def _begin_worker(of_user: Callable[[int], object] | None, index: int) -> None:
    """Gives signals back their usual meaning: a rank takes them for its own end."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if of_user is not None:
        of_user(index)


@dataclass(frozen=True, slots=True)
class _Course:
    """Which samples a device reads, microbatch after microbatch.

    It knows nothing of the feed that reads them. A DataLoader's iterator holds the requests; if
    these held the feed, which holds the iterator, workers would end when the garbage collector
    comes, and it waits for them.

    Attributes:
        source: the samples.
        deal: how they become microbatches.
        mine: indices of the microbatches of the device, ascending.
        history: the batches of all steps.
    """

    source: MapSource
    deal: Deal
    mine: Sequence[int]
    history: History

    def after(self, step: int, microbatch: int) -> tuple[int, int]:
        """The step and the microbatch that come next."""
        at = self.mine.index(microbatch) + 1
        return (step, self.mine[at]) if at < len(self.mine) else (step + 1, self.mine[0])

    def requests(self, step: int, microbatch: int) -> Iterator[Request]:
        """From a microbatch on, without end."""
        while True:
            epoch, first = self.history.position(step, self.source.num_samples)
            begin = first + microbatch * self.deal.size
            indices = self.source.order(epoch)[begin : begin + self.deal.size]
            if len(indices) < self.deal.size:
                raise LaunchError(
                    f"{self.source.where}: expected {self.source.num_samples} samples in epoch"
                    f" {epoch}, as in the first one, got {len(self.source.order(epoch))}"
                )
            yield seed_of(self.deal.seed, step, microbatch), indices
            step, microbatch = self.after(step, microbatch)


class MapFeed:
    """The microbatches of one device out of a map-style dataset.

    Attributes:
        steps_per_epoch: whole steps that an epoch has samples for.

    Args:
        source: the samples.
        deal: how they become microbatches.
        mine: indices of the microbatches of this device, ascending.
        read: makes tensors of them.
    """

    def __init__(self, source: MapSource, deal: Deal, mine: Sequence[int], read: Reader) -> None:
        self._course = _Course(source, deal, mine, History(((0, deal.samples),)))
        self._source, self._read = source, read
        self.steps_per_epoch: int | None = source.num_samples // deal.samples
        self._due: tuple[int, int] | None = None
        self._coming: Iterator[Any] = iter(())

    @property
    def history(self) -> History:
        """The batches of all steps."""
        return self._course.history

    @history.setter
    def history(self, history: History) -> None:
        self._course, self._due = replace(self._course, history=history), None

    def __call__(self, step: int, microbatch: int) -> Batch:
        """One microbatch of a step."""
        where = f"{self._source.where}: step {step}, microbatch {microbatch}"
        with told(where):
            if self._due != (step, microbatch):
                self._coming = self._source.fetched(self._course.requests(step, microbatch))
            item = next(self._coming)
        self._due = self._course.after(step, microbatch)
        return self._read.microbatch(item, where)

    def check(self) -> None:
        """Reads the first microbatch, without workers.

        Raises:
            LaunchError: if it does not fit the model.
        """
        microbatch = self._course.mine[0]
        where = f"{self._source.where}: step 0, microbatch {microbatch}"
        with told(where):
            item = self._source.first(next(self._course.requests(0, microbatch)))
        self._read.microbatch(item, where)


# ------------------------------------------------------------------------------ iterable


class StreamFeed:
    """The microbatches of one device out of an iterable dataset, or of a DataLoader of one.

    Attributes:
        steps_per_epoch: None where the dataset has no length.
    """

    def __init__(
        self, where: str, data: Any, deal: Deal, mine: Sequence[int], read: Reader
    ) -> None:
        self._where, self._data, self._deal, self._read = where, data, deal, read
        self._loads = isinstance(data, DataLoader)
        sized = data.dataset if self._loads else data
        length = len(sized) if isinstance(sized, Sized) else None
        self.steps_per_epoch = None if length is None else length // deal.samples
        self.history = History(((0, deal.samples),))
        self._mine = mine
        self._begin()

    def __call__(self, step: int, microbatch: int) -> Batch:
        """One microbatch of a step."""
        where = f"{self._where}: step {step}, microbatch {microbatch}"
        with told(where):
            if step < self._step:
                self._begin()
            while self._step < step:
                self._advance()
            if self._loads:
                return self._read.part(self._batch, microbatch, self._deal.count, where)
            begin = microbatch * self._deal.size
            item = default_collate(self._batch[begin : begin + self._deal.size])
        return self._read.microbatch(item, where)

    def check(self) -> None:
        """Reads the first step.

        Raises:
            LaunchError: if it does not fit the model.
        """
        self(0, self._mine[0])

    def _begin(self) -> None:
        self._step, self._epoch = -1, -1
        self._batch: Any = None
        self._items: Iterator[Any] = iter(())

    def _advance(self) -> None:
        """Reads the samples of the next step, of the next epoch where this one has ended."""
        batch = self._next()
        if batch is None:
            self._epoch += 1
            with seeded_generators(seed_of(self._deal.seed, "epoch", self._epoch)):
                self._items = iter(self._data)
            batch = self._next()
        if batch is None:
            raise self._too_short()
        self._batch, self._step = batch, self._step + 1

    def _next(self) -> Any:
        """The samples of a step; None where there are not enough left."""
        samples = self.history.samples(self._step + 1)
        with seeded_generators(seed_of(self._deal.seed, self._step + 1, "stream")):
            if not self._loads:
                batch = [one for _, one in zip(range(samples), self._items, strict=False)]
                return batch if len(batch) == samples else None
            loaded = next(self._items, None)
        # The last batch of an epoch may be short; one at the begin is told by whoever reads it.
        return None if self._step >= 0 and (_rows(loaded) or samples) < samples else loaded

    def _too_short(self) -> LaunchError:
        if self._epoch == 0:
            return LaunchError(
                f"{self._where}: expected at least the samples of one step, {self._deal}, got"
                " fewer; give more data, or plan with smaller microbatches"
            )
        return LaunchError(
            f"{self._where}: expected a dataset that can be read again in epoch {self._epoch}, got"
            f" nothing after the first {self._step + 1} steps; return one whose __iter__ begins"
            f" anew, or give --steps {self._step + 1}"
        )


def _rows(item: object) -> int | None:
    """The size of the first dimension of the first tensor of a batch."""
    if isinstance(item, torch.Tensor):
        return item.shape[0] if item.dim() else None
    inside = item.values() if isinstance(item, Mapping) else item
    if not isinstance(inside, Iterable) or isinstance(inside, str):
        return None
    return next((rows for one in inside if (rows := _rows(one)) is not None), None)


@contextmanager
def told(where: str) -> Iterator[None]:
    """Names the place of what a dataset raises."""
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:
        # Of a worker, the last line of a traceback says what has happened.
        words = (str(error).strip().splitlines() or [""])[-1]
        raise LaunchError(f"{where}: {type(error).__name__}: {words}") from error


DatasetFeed = MapFeed | StreamFeed


def dataset_feed(
    where: str, data: Any, deal: Deal, mine: Sequence[int], read: Reader
) -> DatasetFeed:
    """The microbatches of one device out of a dataset of any kind.

    Raises:
        LaunchError: if it does not have the samples of one step.
    """
    inner = data.dataset if isinstance(data, DataLoader) else data
    unbatched = isinstance(data, DataLoader) and data.batch_sampler is None
    if isinstance(inner, IterableDataset) or not hasattr(inner, "__getitem__") or unbatched:
        return StreamFeed(where, data, deal, mine, read)
    return MapFeed(MapSource(where, data, deal), deal, mine, read)
