"""How samples become the microbatches of steps, and the numbers that datasets draw meanwhile."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from planner.launcher.batch import Batch
from planner.operators.randomness import seeded
from planner.training.data.fingerprints import Prints
from planner.training.data.samples import Named

Request = tuple[int, list[Any]]
"""A seed, and the indices of the samples of one microbatch."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How samples become microbatches.

    Attributes:
        size: b, samples of a microbatch.
        count: M, microbatches of a step.
        seed: of the order of samples and of what datasets draw.
        shuffle: whether map-style datasets are drawn in another order in each epoch.
        short_steps: whether the samples left at the end of an epoch make a step of fewer
            microbatches. Under an asynchronous schedule they do not.
        unit: of the microbatches of a shorter step, each replica of a stage has as many where the
            replicas run them together (`shared_level`): a step has a multiple of this number.
    """

    size: int
    count: int
    seed: int
    shuffle: bool
    short_steps: bool = True
    unit: int = 1

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.size * self.count

    @property
    def least(self) -> int:
        """Samples that a step has at least."""
        return self.size * self.unit if self.short_steps else self.samples

    @property
    def history(self) -> "BatchSizeHistory":
        """Of a training that begins with this layout."""
        return BatchSizeHistory.begun(self.samples, self.least)

    def microbatches(self, samples: int) -> int:
        """The number of microbatches of a step of so many samples; others are left out."""
        return samples // self.least * self.least // self.size

    def passes(self, samples: int) -> int:
        """The number of microbatches that an evaluation of so many samples runs: the last ones may
        have fewer samples, or none.
        """
        return -(-samples // (self.size * self.unit)) * self.unit

    def __str__(self) -> str:
        return f"{self.samples} ({self.count} microbatches of {self.size})"


class BatchSizes(NamedTuple):
    """The batches of the steps from one on.

    Attributes:
        begin: the step.
        samples: of a step.
        least: samples at the end of an epoch that make a shorter step; as many as `samples` where
            only whole steps are made. Of the shorter step only multiples of it count.
    """

    begin: int
    samples: int
    least: int

    def steps(self, num_samples: int) -> int:
        """Number of steps that some samples make at the end of an epoch."""
        whole, left = divmod(num_samples, self.samples)
        return whole + (left >= self.least)


class StepPosition(NamedTuple):
    """The samples of a step: its epoch, the first one in the order of the epoch, and how many."""

    epoch: int
    first: int
    samples: int


@dataclass(frozen=True, slots=True)
class BatchSizeHistory:
    """The batches of all steps so far: a training may be resumed with larger or smaller ones.

    Attributes:
        parts: ascending; the first begins at step 0.
    """

    parts: tuple[BatchSizes, ...]

    @classmethod
    def begun(cls, samples: int, least: int) -> "BatchSizeHistory":
        """Of a training that begins with steps of so many samples."""
        return cls((BatchSizes(0, samples, least),))

    @classmethod
    def read(cls, parts: Iterable[Sequence[int]]) -> "BatchSizeHistory":
        """Of a checkpoint. Those of before there were shorter steps say nothing of the least."""
        return cls(
            tuple(BatchSizes(begin, size, *(rest or [size])) for begin, size, *rest in parts)
        )

    def sizes(self, step: int) -> BatchSizes:
        """Of a step."""
        return next(part for part in reversed(self.parts) if part.begin <= step)

    def position(self, step: int, num_samples: int) -> StepPosition:
        """The samples of a step. Those at the end of an epoch that make no step are left out.

        With nine samples, three steps of 4 samples and then steps of 2, both of at least 2:

            step     0    1    2    3    4    5    6
            epoch    0    0    1    1    1    2    2     one sample is left out of each epoch
            first    0    4    0    4    6    0    2

        and with steps of 4 samples, of at least 1:

            step     0    1    2    3    4    5    6
            epoch    0    0    0    1    1    1    2
            first    0    4    8    0    4    8    0
            samples  4    4    1    4    4    1    4

        >>> BatchSizeHistory.read([[0, 4, 2], [3, 2, 2]]).position(4, num_samples=9)
        StepPosition(epoch=1, first=6, samples=2)
        """
        epoch, first = 0, 0
        ends = (*(part.begin for part in self.parts[1:]), step)
        for part, end in zip(self.parts, ends, strict=True):
            steps, left = max(0, min(end, step) - part.begin), part.steps(num_samples - first)
            if steps < left:
                first += steps * part.samples
            else:
                more, steps = divmod(steps - left, part.steps(num_samples))
                epoch, first = epoch + 1 + more, steps * part.samples
        sizes = self.sizes(step)
        count = min(sizes.samples, num_samples - first) // sizes.least
        return StepPosition(epoch, first, count * sizes.least)

    def end_of(self, epochs: int, num_samples: int) -> int:
        """Number of steps after which some epochs are over.

        >>> BatchSizeHistory.begun(4, 1).end_of(2, num_samples=9)
        6
        """
        ends = (*(part.begin for part in self.parts[1:]), None)
        for part, end in zip(self.parts, ends, strict=True):
            epoch, first, _ = self.position(part.begin, num_samples)
            steps = part.begin + part.steps(num_samples - first)
            steps += (epochs - epoch - 1) * part.steps(num_samples)
            if end is None or steps <= end:
                break
        return steps

    def then(self, step: int, samples: int, least: int) -> "BatchSizeHistory":
        """With other batches from a step on."""
        kept = tuple(part for part in self.parts if part.begin < step)
        same = bool(kept) and kept[-1][1:] == (samples, least)
        return BatchSizeHistory(kept if same else (*kept, BatchSizes(step, samples, least)))


@dataclass(frozen=True, slots=True)
class StepData:
    """The data of one device in a step.

    Attributes:
        num_microbatches: of the step, over all replicas: M, or fewer at the end of an epoch; None
            where this device reads no data, and does not know.
        batches: those microbatches that this device runs, ascending, as they are read.
    """

    num_microbatches: int | None
    batches: Iterator[Batch]


Place = tuple[int | None, int]
"""A step (None in an evaluation) and a microbatch."""


def words_of_place(place: Place) -> str:
    """How messages call it."""
    step, microbatch = place
    words = f"microbatch {microbatch}"
    return words if step is None else f"step {step}, {words}"


ReadTwice = tuple[Prints, Prints, Sequence[Any]]
"""The prints of a microbatch and of the same, read again; and the indices of its samples."""


@dataclass(frozen=True, slots=True)
class ReadData:
    """Data as one rank reads it.

    Attributes:
        microbatches: indices of those that the rank reads in each step.
        num_samples: of an epoch; None without a known length.
        order: gives the indices of the samples of an epoch; None for data with an order of its own.
        orderer: why ranks may have other orders, and what to do about it.
        probes: some samples that all ranks have read.
        read: reads the first samples of a microbatch twice (None is all of them), and leaves the
            data as it is. It gives the prints of both, and the indices of the samples, where they
            have some. None where data can be read once.
    """

    microbatches: tuple[int, ...]
    num_samples: int | None = None
    order: Callable[[int], Sequence[Any]] | None = None
    orderer: str = ""
    probes: Mapping[Place, Prints] = field(default_factory=dict)
    read: "Callable[[Place, BatchSizeHistory, int | None], ReadTwice] | None" = None


Note = Callable[[int, int, Callable[[], Named]], None]
"""Is shown each microbatch before the device takes its part of it: step, index, data."""


def unnoted(step: int, microbatch: int, named: Callable[[], Named]) -> None:
    """A `Note` of nothing."""


class Steps(Protocol):
    """The data of a device, step by step."""

    def __call__(
        self, step: int, history: BatchSizeHistory, note: Note = unnoted
    ) -> Iterator[StepData]:
        """That from a step on, without end.

        Args:
            history: the sizes of all batches.
            note: is shown each microbatch first.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """The data of one device.

    Attributes:
        steps: the same.
        num_samples: of an epoch; None without a known length.
        least: samples that a step has at least.
        read: the data, for the comparison with other ranks; None if the device reads none.
        notes: on what is left out, as far as it is known.
        state: of the data before a step, as JSON: what the seed and the step do not tell; None for
            nothing.
        restore: goes on from a state, empty where there is none, and gives the places of what is
            lost; it is told whether that is the state of a rank that read the same microbatches.
    """

    steps: Steps
    num_samples: int | None = None
    least: int | None = None
    read: ReadData | None = None
    notes: Callable[[], tuple[str, ...]] = tuple
    state: "Callable[[int, BatchSizeHistory], Any]" = lambda step, history: None
    restore: "Callable[[Mapping[str, Any], bool], list[str]]" = lambda state, same: []


def left_out(layout: BatchLayout, least: int, num_samples: int) -> str | None:
    """A note on the samples of each epoch that are in no step; None if all are in one.

    Args:
        least: samples that a step has at least.
        num_samples: of an epoch.
    """
    left = num_samples % layout.samples % least
    if not left:
        return None
    count, unit = least // layout.size, f"step of {layout}"
    if least != layout.samples:
        unit = f"microbatch of {least}" if count == 1 else f"{count} microbatches of {layout.size}"
    fill = "fills" if left == 1 else "fill"
    are = "is" if left == 1 else "are"
    return f"{left} of {num_samples} samples of each epoch {fill} no {unit} and {are} left out"


def seed_of(*parts: object) -> int:
    """A seed of 32 bits that follows from the parts."""
    return seeded(*parts).initial_seed() % 2**32


def seed_generators(seed: int) -> None:
    """Lets Python, numpy and torch draw on the CPU from a seed."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """A context in which Python, numpy and torch draw on the CPU from a seed; afterwards they go on
    as before.
    """
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
