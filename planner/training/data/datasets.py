"""A dataset of the user -> the microbatches of one device.

The batch of a step are M microbatches of b samples, over all replicas: the b M samples that a loop
on one device would take. Microbatch m has samples b m to b (m + 1) of them, whichever device runs
it, so every partition of a plan trains on the same numbers.

    map-style dataset    samples in the order of the epoch; a device fetches only its own ones
    DataLoader of one    the same, with its sampler, its collate_fn and its workers
    iterable dataset     each device that reads data goes through all samples, and keeps its own
    DataLoader of one    the same with batches of b M samples

What is left at the end of an epoch makes a step of fewer microbatches; samples that fill no
microbatch are left out. With drop_last=True, and under asynchronous schedules, only whole steps are
made.

Epochs and the numbers that a dataset draws follow from the seed: a microbatch is fetched with
Python's, numpy's and torch's generators seeded by seed, step and microbatch. So inputs and targets
fit each other, though the first stage fetches the ones and the last stage the others.
"""

import inspect
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from planner.launcher.batch import Batch
from planner.launcher.failures.requests import REQUEST
from planner.support.errors import LaunchError
from planner.support.named import function_named
from planner.training.data.batching import (
    BatchLayout,
    BatchSizeHistory,
    Feed,
    Note,
    Place,
    ReadData,
    ReadTwice,
    Request,
    StepData,
    left_out,
    seed_of,
    seeded_generators,
    unnoted,
    words_of_place,
)
from planner.training.data.fingerprints import Prints, prints
from planner.training.data.orders import EpochOrders, with_inner
from planner.training.data.samples import BatchReader, Named
from planner.training.data.states import bring_back, has_state, held, kept, left_as_it_is

# ------------------------------------------------------------------------------ what is given


def given_data(value: object, option: str, seed: int) -> tuple[str, object]:
    """What a user gives for data: how messages call it, and a function or a dataset.

    Args:
        value: "module:callable", the callable, or a dataset.
        option: that gives it.
        seed: of what a callable draws, which is the same on all ranks.

    Raises:
        LaunchError: if it is neither; a callable without required parameters is called.
    """
    where = data_name(value, option)
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
        with seeded_generators(seed_of(seed, "dataset")):
            dataset: object = value()
    except Exception as error:
        raise LaunchError(f"{where}: {type(error).__name__}: {error}") from error
    return where, _checked_dataset(where, dataset)


def data_name(value: object, option: str) -> str:
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


class _Collated(Dataset[Any]):
    """A dataset that is asked for a microbatch at once, by its seed and the indices of its samples.

    Args:
        dataset: of the user.
        collate: of the user, or torch's; it may draw, too.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitems__(self, request: Request) -> Any:
        seed, indices = request
        with seeded_generators(seed):
            many = getattr(self._dataset, "__getitems__", None)
            try:
                samples = [self._dataset[i] for i in indices] if many is None else many(indices)
                return self._collate(list(samples))
            except SystemExit as end:  # a worker would end without a word
                raise RuntimeError(f"SystemExit: {end}") from end


def _as_it_is(item: Any) -> Any:
    return item


class MapSource:
    """The samples of a map-style dataset, or of a DataLoader of one, in the order of each epoch.

    Attributes:
        where: it is from, for messages.
        num_samples: of an epoch.
        least: samples that a step has at least.

    Args:
        in_steps: whether it is read in the batches of steps, which then have to fit.

    Raises:
        LaunchError: if its length is not known, or its batches are not those of a step.
    """

    def __init__(
        self, where: str, data: Any, layout: BatchLayout, *, in_steps: bool = True
    ) -> None:
        self.where, self._layout = where, layout
        self._loader = data if isinstance(data, DataLoader) else None
        self.dataset: Any = data.dataset if self._loader is not None else data
        self.held = {} if self.num_workers else held(self.dataset, "dataset") | self._of_collate()
        sampler = self._sampler()
        self._orders = EpochOrders(
            self._order, None if _goes_by_epoch(sampler) else sampler, leaves=not in_steps
        )
        self.least = layout.least
        if in_steps and self._loader is not None:
            _check_batch(self.where, layout, self._loader.batch_size)
            self.least = layout.samples if self._loader.drop_last else layout.least
        self.num_samples = len(self.order(0))
        if in_steps and self.num_samples < self.least:
            raise _too_few(where, layout, self.least, str(self.num_samples))

    def order(self, epoch: int) -> list[Any]:
        """The indices of the samples of an epoch."""
        return self._orders(epoch)

    def state(self, epoch: int) -> dict[str, Any]:
        """What the sampler, the dataset and its collate_fn hold in an epoch, as JSON."""
        return {"sampler": self._orders.state(epoch), "dataset": kept(self.held)}

    def restore(self, state: Mapping[str, Any], same: bool) -> list[str]:
        """Goes on from a state; gives the places of those that are lost.

        Args:
            same: whether it is that of a rank that read the same microbatches.
        """
        with data_errors(self.where):
            lost = self._orders.restore(state.get("sampler"))
            lost += bring_back(self.held, state.get("dataset", {}) if same else {})
        if self.num_workers:
            lost += [f"{place} in worker processes" for place in held(self.dataset, "dataset")]
        return lost

    @property
    def num_workers(self) -> int:
        """Processes that read the dataset, each of which has its own copy of it; 0 for none."""
        return 0 if self._loader is None else self._loader.num_workers

    def _of_collate(self) -> dict[str, object]:
        return {} if self._loader is None else held(self._loader.collate_fn, "collate_fn")

    def _sampler(self) -> Any:
        """Of the user; None where there is none."""
        if self._loader is None or self._loader.batch_size is not None:
            return None if self._loader is None else self._loader.sampler
        return self._loader.batch_sampler

    def _order(self, epoch: int) -> list[Any]:
        seed = seed_of(self._layout.seed, "epoch", epoch)
        with data_errors(self.where), seeded_generators(seed):
            return self._drawn(epoch)

    @property
    def orderer(self) -> str:
        """Why ranks may have other orders, and what to do about it."""
        sampler = None if self._loader is None else self._loader.batch_sampler
        sampler = getattr(sampler, "sampler", sampler)
        if isinstance(sampler, DistributedSampler):
            return "leave DistributedSampler out, as each rank takes its part of what all read"
        return (
            f"the {type(sampler).__name__} goes by RANK, or draws from a generator of its own"
            " without a seed; give it a seed, or let it draw from torch's, numpy's or Python's"
        )

    def first(self, request: Request) -> Any:
        """One microbatch, collated; without workers."""
        return self._collated().__getitems__(request)

    def fetched(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The microbatches of some requests, collated; by the workers of the DataLoader."""
        how = {} if self._loader is None else _options(self._loader)
        how["generator"] = torch.Generator()  # or it would draw torch's own numbers
        return iter(
            DataLoader(self._collated(), batch_sampler=requests, collate_fn=_as_it_is, **how)
        )

    def _collated(self) -> _Collated:
        collate = default_collate if self._loader is None else self._loader.collate_fn
        return _Collated(self.dataset, collate)

    def _drawn(self, epoch: int) -> list[Any]:
        size = len(self.dataset)
        sampler = None if self._loader is None else self._loader.sampler
        if self._loader is None or (isinstance(sampler, RandomSampler) and not _special(sampler)):
            shuffled = self._loader is not None or self._layout.shuffle
            return torch.randperm(size).tolist() if shuffled else [*range(size)]
        if self._loader.batch_size is None:  # a batch sampler of the user
            batches = [[*batch] for batch in _of_epoch(self._loader.batch_sampler, epoch)]
            return [i for batch in self._checked(batches) for i in batch]
        if isinstance(sampler, SequentialSampler):
            return [*range(size)]
        return [*_of_epoch(sampler, epoch)]

    def _checked(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Batches of a batch sampler; the last one may be short."""
        for i, batch in enumerate(batches):
            if i < len(batches) - 1 or len(batch) > self._layout.samples:
                _check_batch(self.where, self._layout, len(batch))
        return batches


def _goes_by_epoch(sampler: object) -> bool:
    """Whether the order of any epoch can be drawn at once: from the seed, or by set_epoch."""
    if sampler is None or hasattr(sampler, "set_epoch"):
        return True
    every = [*with_inner(sampler)]
    seeded = getattr(sampler, "generator", None)  # as `_of_epoch` does
    return all(type(one).__module__.startswith("torch.utils.data") for one in every) and all(
        one is seeded for one in held(sampler, "").values()
    )


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


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """What is taken over from a DataLoader of the user."""
    names = ("num_workers", "timeout", "multiprocessing_context")
    how = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        how["prefetch_factor"] = loader.prefetch_factor
        how["worker_init_fn"] = partial(_begin_worker, loader.worker_init_fn, REQUEST.signals)
    return how


def _begin_worker(
    of_user: Callable[[int], object] | None, requests: Sequence[int], index: int
) -> None:
    """Gives signals back their usual meaning: a rank takes them for its own end. Those that ask a
    training to save are ignored, because a cluster sends them to workers, too.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in requests:
        signal.signal(number, signal.SIG_IGN)
    if of_user is not None:
        of_user(index)


# A DataLoader's iterator holds the requests. If these held the feed, which holds the iterator,
# workers would end when the garbage collector comes, and it waits for them.
def _requests(
    source: MapSource, layout: BatchLayout, mine: Sequence[int], step: int,
    history: BatchSizeHistory,
) -> Iterator[Request]:  # fmt: skip
    """The samples of the microbatches of a device, from a step on, without end."""
    for at in count(step):
        epoch, first, samples = history.position(at, source.num_samples)
        for microbatch in _of_step(mine, samples // layout.size):
            begin = first + microbatch * layout.size
            indices = source.order(epoch)[begin : begin + layout.size]
            if len(indices) < layout.size:
                raise LaunchError(
                    f"{source.where}: expected {source.num_samples} samples in epoch {epoch}, as in"
                    f" the first one, got {len(source.order(epoch))}"
                )
            yield seed_of(layout.seed, at, microbatch), indices


def _of_step(mine: Sequence[int], num_microbatches: int) -> list[int]:
    """The microbatches of a device that a step has."""
    return [m for m in mine if m < num_microbatches]


def _map_feed(
    source: MapSource, layout: BatchLayout, mine: Sequence[int], reader: BatchReader
) -> Feed:
    """The microbatches of one device out of a map-style dataset."""

    def steps(step: int, history: BatchSizeHistory, note: Note = unnoted) -> Iterator[StepData]:
        coming = source.fetched(_requests(source, layout, mine, step, history))
        for at in count(step):
            number = history.position(at, source.num_samples).samples // layout.size
            due, noted = _of_step(mine, number), partial(note, at)
            yield StepData(number, _read(coming, reader, f"{source.where}: step {at}", due, noted))

    def request(place: Place, history: BatchSizeHistory) -> Request:
        step, m = place
        assert step is not None, "no evaluation"
        return next(_requests(source, layout, (m,), step, history))

    def state(step: int, history: BatchSizeHistory) -> dict[str, Any] | None:
        found = source.state(history.position(step, source.num_samples).epoch)
        return found if any(found.values()) else None

    history = BatchSizeHistory.begun(layout.samples, source.least)
    last_step = history.end_of(1, source.num_samples) - 1
    number = history.position(last_step, source.num_samples).samples // layout.size
    read = _read_data(source, layout, mine, reader, request, (last_step, number - 1))
    note = left_out(layout, source.least, source.num_samples)
    return Feed(
        steps, source.num_samples, source.least, read, lambda: () if note is None else (note,),
        state, source.restore,
    )  # fmt: skip


def _read(
    coming: Iterator[Any], reader: BatchReader, where: str, due: Iterable[int],
    note: Callable[[int, Callable[[], Named]], None],
) -> Iterator[Batch]:  # fmt: skip
    """The next microbatches."""
    for m in due:
        yield _next_batch(coming, reader, f"{where}, microbatch {m}", partial(note, m))


def _read_data(
    source: MapSource, layout: BatchLayout, mine: Sequence[int], reader: BatchReader,
    request: Callable[[Place, BatchSizeHistory], Request], last: Place,
) -> ReadData:  # fmt: skip
    """A map-style dataset for the comparison with other ranks. Its first microbatch, and the first
    sample of its last one, are read; the dataset is left as it is.

    Raises:
        LaunchError: if the first microbatch does not fit the model.
    """

    def item_at(place: Place, history: BatchSizeHistory, most: int | None) -> tuple[Any, Any]:
        seed, indices = request(place, history)
        with data_errors(f"{source.where}: {words_of_place(place)}"):
            return source.first((seed, indices[:most])), indices[:most]

    def read(place: Place, history: BatchSizeHistory, most: int | None) -> ReadTwice:
        with left_as_it_is(source.held):
            (one, indices), (two, _) = (item_at(place, history, most) for _ in range(2))
        first, again = (prints(reader.named(item, source.where)) for item in (one, two))
        return first, again, indices

    first: Place = (None if last[0] is None else 0, 0)
    with left_as_it_is(source.held):
        item, _ = item_at(first, layout.history, None)
        where = f"{source.where}: {words_of_place(first)}"
        reader.microbatch(item, where)
        probes = {first: prints(reader.named(item, where))}
        if last != first:
            item, _ = item_at(last, layout.history, 1)
            probes[last] = prints(reader.named(item, where))
    return ReadData(tuple(mine), source.num_samples, source.order, source.orderer, probes, read)


def _next_batch(
    coming: Iterator[Any], reader: BatchReader, where: str,
    note: Callable[[Callable[[], Named]], None],
) -> Batch:  # fmt: skip
    """The next microbatch; nothing else holds its data, so that it can be freed after its use."""
    with data_errors(where):
        item = next(coming)
    found = reader.microbatch(item, where)
    note(lambda: reader.named(item, where))
    return found


class EvalData:
    """The samples of an evaluation, as one device reads them.

    Attributes:
        where: they are from, for messages.
        num_samples: None where this device reads none.
        read: the data, for the comparison with other ranks; None where this device reads none.

    Args:
        data: as a user gives it.
        layout: how samples become microbatches.
        mine: the microbatches of a step that this device runs, ascending.
        reader: makes tensors of them.

    Raises:
        LaunchError: if it is no dataset of known length, or does not fit the model.
    """

    def __init__(
        self, data: object, option: str, layout: BatchLayout, mine: Sequence[int],
        reader: BatchReader,
    ) -> None:  # fmt: skip
        self._layout, self._mine, self._reader = layout, mine, reader
        self.where, self.num_samples = data_name(data, option), None
        self.read: ReadData | None = None
        if not reader.reads:
            return
        self.where, found = given_data(data, option, layout.seed)
        inner: Any = found.dataset if isinstance(found, DataLoader) else found
        sized = hasattr(inner, "__getitem__") and hasattr(inner, "__len__")
        if isinstance(inner, IterableDataset) or not sized:
            raise LaunchError(
                f"{self.where}: expected a dataset with __getitem__ and __len__, or a DataLoader of"
                f" one, got {type(inner).__name__}"
            )
        self._source = MapSource(self.where, found, layout, in_steps=False)
        self.num_samples = self._source.num_samples
        if not self.num_samples:
            raise LaunchError(f"{self.where}: expected at least one sample, got none")
        last = None, (self.num_samples - 1) // layout.size
        self.read = _read_data(
            self._source, layout, mine, reader, lambda place, _: self._request(place[1]), last
        )

    def microbatches(self, num_samples: int, *, filled: bool) -> Iterator[Batch]:
        """The data of this device, in the order of the microbatches among all.

        Args:
            num_samples: that are evaluated.
            filled: whether there is data of microbatches without samples, too, which are run for
                other replicas.
        """
        total, per_step = -(-num_samples // self._layout.size), self._layout.count
        total = self._layout.passes(num_samples) if filled else total
        mine = [i for i in range(total) if i % per_step in self._mine]
        if not self._reader.reads:
            yield from (Batch({}, {}) for _ in mine)
            return
        with left_as_it_is(self._source.held):  # all evaluations draw the same
            coming = self._source.fetched(map(self._request, mine))
            for i in mine:
                where = f"{self.where}: microbatch {i}"
                yield _next_batch(coming, self._reader, where, lambda named: None)

    def _request(self, index: int) -> Request:
        order, size = self._source.order(0), self._layout.size
        first = min(index, (len(order) - 1) // size) * size
        inside = order[first : first + size]
        seed = seed_of(self._layout.seed, "evaluation", index)
        return seed, [*inside, *[inside[-1]] * (size - len(inside))]


# ------------------------------------------------------------------------------ iterable


class _Stream:
    """The samples of an iterable dataset, or the batches of a DataLoader of one, step by step.

    Args:
        where: they are from, for messages.
        data: the dataset or DataLoader.
        layout: how samples become microbatches.
        reader: knows how many samples a batch has.
    """

    def __init__(self, where: str, data: Any, layout: BatchLayout, reader: BatchReader) -> None:
        self._where, self._data, self._layout, self._reader = where, data, layout, reader
        self._loads = isinstance(data, DataLoader)
        self.least = layout.least
        if self._loads:
            self.least = layout.samples if data.drop_last else layout.least
            _check_batch(where, layout, data.batch_size)
        inner = data.dataset if self._loads else data
        self.num_samples = len(inner) if isinstance(inner, Sized) else None
        if self.num_samples is not None and self.num_samples < self.least:
            raise _too_few(where, layout, self.least, str(self.num_samples))
        self._note = None
        if self.num_samples is not None:
            self._note = left_out(layout, self.least, self.num_samples)
        # Without a state dict the dataset is read again from its begin, and comes to its state so.
        reads_here = not self._loads or not data.num_workers
        stateful = next((one for one in (data, inner) if has_state(one)), None)
        if stateful is inner and not reads_here:
            stateful = None
        self.held = {} if stateful is None else held(stateful, "dataset")
        self._begin: tuple[int, int] | None = None  # epoch and step that it goes on from
        self._epoch_read = 0

    def notes(self) -> tuple[str, ...]:
        """On samples that are left out, as soon as an epoch is over."""
        return () if self._note is None else (self._note,)

    def state(self, step: int, history: BatchSizeHistory) -> Any:
        """As `Feed.state`; None where the dataset has no state dict."""
        if not self.held:
            return None
        return {"epoch": self._epoch_read, "step": step, "dataset": kept(self.held)}

    def restore(self, state: Any, same: bool) -> list[str]:
        """As `Feed.restore`."""
        with data_errors(self._where):
            lost = bring_back(self.held, state.get("dataset", {}))
        if self.held and "dataset" not in lost and "epoch" in state:
            self._begin = state["epoch"], state["step"]
        return lost

    def steps(self, step: int, history: BatchSizeHistory) -> Iterator[tuple[Any, int]]:
        """What there is for each step from one on, and how many microbatches it makes, in the next
        epoch where one has ended: a list of samples, or a batch of a DataLoader.
        """
        first, at = self._begin or (0, 0)
        goes_on, self._begin = self._begin is not None, None
        for epoch in count(first):
            self._epoch_read = epoch
            with seeded_generators(seed_of(self._layout.seed, "epoch", epoch)):
                items = iter(self._data)
            begin = at
            for batch, number in self._epoch(items, at, history, from_its_begin=not goes_on):
                at += 1
                if at > step:
                    yield batch, number
            if at == begin and not goes_on:
                raise self._ended(epoch, at)
            goes_on = False

    def _epoch(
        self, items: Iterator[Any], step: int, history: BatchSizeHistory, *, from_its_begin: bool
    ) -> Iterator[tuple[Any, int]]:
        """The steps of an epoch, from one on."""
        seen, is_short = 0, False
        while not is_short:
            _, samples, least = history.sizes(step)
            batch, size = self._next(items, step, samples)
            seen += size
            is_short = size < samples
            self._epoch_read += is_short
            if is_short and self._loads and next(items, None) is not None:
                raise LaunchError(
                    f"{self._where}: step {step}: expected a batch of {self._layout} samples, as"
                    f" only the last one of an epoch may be short, got {size}"
                )
            if size >= least:
                yield batch, self._layout.microbatches(size) if is_short else self._layout.count
            step += 1
        if self._note is None and self.num_samples is None and from_its_begin:
            self._note = left_out(self._layout, self.least, seen)

    def _next(self, items: Iterator[Any], step: int, samples: int) -> tuple[Any, int]:
        """What is next for a step, and its number of samples."""
        with seeded_generators(seed_of(self._layout.seed, step, "stream")):
            if not self._loads:
                batch = list(islice(items, samples))
                return batch, len(batch)
            loaded = next(items, None)
        if loaded is None:
            return None, 0
        size = self._reader.num_samples(
            loaded, self._layout.size, self._layout.count, f"{self._where}: step {step}"
        )
        return loaded, size

    def _ended(self, epoch: int, steps: int) -> LaunchError:
        """There is nothing in an epoch that makes a step."""
        if epoch == 0:
            return _too_few(self._where, self._layout, self.least, "fewer")
        return LaunchError(
            f"{self._where}: expected a dataset that can be read again in epoch {epoch}, got"
            f" nothing after the first {steps} steps; return one whose __iter__ begins anew, or"
            f" give --steps {steps}"
        )


def _check_batch(where: str, layout: BatchLayout, batch_size: int | None) -> None:
    if batch_size is not None and batch_size != layout.samples:
        raise LaunchError(
            f"{where}: expected a DataLoader with the samples of a whole step, batch_size="
            f"{layout}, got {batch_size}"
        )


def _too_few(where: str, layout: BatchLayout, least: int, got: str) -> LaunchError:
    """A dataset without a step."""
    count = least // layout.size
    some = "one microbatch" if count == 1 else f"{count} microbatches, as many as replicas"
    of_least = f"one step, {layout}" if least == layout.samples else f"{some}, {least}"
    return LaunchError(
        f"{where}: expected at least the samples of {of_least}, got {got}; give more data, or plan"
        " with smaller microbatches"
    )


def _stream_feed(
    where: str, data: Any, layout: BatchLayout, mine: Sequence[int], reader: BatchReader
) -> Feed:
    """The microbatches of one device out of an iterable dataset, or of a DataLoader of one."""
    loads = isinstance(data, DataLoader)
    stream = _Stream(where, data, layout, reader)

    def part(batch: Any, m: int, place: str) -> Batch:
        if loads:
            return reader.part(batch, m, place)
        return reader.microbatch(collated(batch, m, place), place)

    def parts(batch: Any, due: Iterable[int], place: str) -> Iterator[Batch]:
        for m in due:
            yield part(batch, m, f"{place}, microbatch {m}")

    def collated(batch: Any, m: int, place: str) -> Any:
        with data_errors(place):
            return default_collate(batch[m * layout.size : (m + 1) * layout.size])

    def named(batch: Any, m: int, place: str) -> Named:
        if loads:
            return reader.named_part(batch, m, place)
        return reader.named(collated(batch, m, place), place)

    def steps(step: int, history: BatchSizeHistory, note: Note = unnoted) -> Iterator[StepData]:
        coming = stream.steps(step, history)
        for at in count(step):
            place = f"{where}: step {at}"
            with data_errors(f"{place}, microbatch {mine[0]}"):
                batch, number = next(coming)
            for m in range(number):  # those of other devices are read, too
                note(at, m, partial(named, batch, m, f"{place}, microbatch {m}"))
            yield StepData(number, parts(batch, _of_step(mine, number), place))

    probes: dict[Place, Prints] = {}
    with data_errors(f"{where}: step 0"):
        inner = data.dataset if loads else data
        can_restart = iter(inner) is not iter(inner)
    if can_restart:  # else the first step would be lost
        place = f"{where}: step 0, microbatch 0"
        with data_errors(place), left_as_it_is(stream.held):
            history = BatchSizeHistory.begun(layout.samples, stream.least)
            batch, number = next(stream.steps(0, history))
        part(batch, 0, place)
        probes = {(0, m): prints(named(batch, m, place)) for m in {0, number - 1}}
    read = ReadData(tuple(range(layout.count)), stream.num_samples, probes=probes)
    return Feed(
        steps, stream.num_samples, stream.least, read, stream.notes, stream.state, stream.restore
    )


@contextmanager
def data_errors(where: str) -> Iterator[None]:
    """Names the place of what a dataset raises."""
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:
        # Of a worker, the last line of a traceback says what has happened.
        words = (str(error).strip().splitlines() or [""])[-1]
        raise LaunchError(f"{where}: {type(error).__name__}: {words}") from error


def dataset_feed(
    where: str, data: Any, layout: BatchLayout, mine: Sequence[int], reader: BatchReader
) -> Feed:
    """The microbatches of one device out of a dataset of any kind, of which the first is read.

    Raises:
        LaunchError: if it does not have the samples of one step, or these do not fit the model.
    """
    inner = data.dataset if isinstance(data, DataLoader) else data
    unbatched = isinstance(data, DataLoader) and data.batch_sampler is None
    if isinstance(inner, IterableDataset) or not hasattr(inner, "__getitem__") or unbatched:
        return _stream_feed(where, data, layout, mine, reader)
    return _map_feed(MapSource(where, data, layout), layout, mine, reader)
