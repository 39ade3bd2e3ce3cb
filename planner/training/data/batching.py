"""How samples become the microbatches of steps, and the numbers that datasets draw meanwhile."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    """

    size: int
    count: int
    seed: int
    shuffle: bool

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.size * self.count

    @property
    def history(self) -> "BatchSizeHistory":
        """Of a training that begins with this layout."""
        return BatchSizeHistory(((0, self.samples),))

    def __str__(self) -> str:
        return f"{self.samples} ({self.count} microbatches of {self.size})"


@dataclass(frozen=True, slots=True)
class BatchSizeHistory:
    """The batches of all steps so far: a training may be resumed with larger or smaller ones.

    Attributes:
        parts: (step, samples of a step from there on), ascending; the first begins at step 0.
    """

    parts: tuple[tuple[int, int], ...]

    def samples(self, step: int) -> int:
        """Of a step."""
        return next(samples for begin, samples in reversed(self.parts) if begin <= step)

    def position(self, step: int, num_samples: int) -> tuple[int, int]:
        """The epoch and the first sample of a step. Samples at the end of an epoch that fill no
        step are left out, hence `//`.

        With nine samples, three steps of 4 samples and then steps of 2:

            step    0    1    2    3    4    5    6
            epoch   0    0    1    1    1    2    2     one sample is left out of each epoch
            first   0    4    0    4    6    0    2

        >>> BatchSizeHistory(((0, 4), (3, 2))).position(4, num_samples=9)
        (1, 6)
        """
        epoch, first = 0, 0
        ends = (*(begin for begin, _ in self.parts[1:]), step)
        for (begin, samples), end in zip(self.parts, ends, strict=True):
            steps, left = max(0, min(end, step) - begin), (num_samples - first) // samples
            if steps < left:
                first += steps * samples
            else:
                more, steps = divmod(steps - left, num_samples // samples)
                epoch, first = epoch + 1 + more, steps * samples
        return epoch, first

    def then(self, step: int, samples: int) -> "BatchSizeHistory":
        """With batches of another size from a step on."""
        kept = tuple(part for part in self.parts if part[0] < step)
        same = bool(kept) and kept[-1][1] == samples
        return BatchSizeHistory(kept if same else (*kept, (step, samples)))


Place = tuple[int | None, int]
"""A step (None in an evaluation) and a microbatch."""


def words_of_place(place: Place) -> str:
    """How messages call it."""
    step, microbatch = place
    words = f"microbatch {microbatch}"
    return words if step is None else f"step {step}, {words}"


@dataclass(frozen=True, slots=True)
class ReadData:
    """Data as one rank reads it.

    Attributes:
        microbatches: indices of those that the rank reads in each step.
        num_samples: of an epoch; None without a known length.
        order: gives the indices of the samples of an epoch; None for data with an order of its own.
        orderer: why ranks may have other orders, and what to do about it.
        probes: some samples that all ranks have read.
        read: reads the first samples of a microbatch once more (None is all of them), and gives
            their indices, too, where they have some; None where data can be read once.
    """

    microbatches: tuple[int, ...]
    num_samples: int | None = None
    order: Callable[[int], Sequence[Any]] | None = None
    orderer: str = ""
    probes: Mapping[Place, Prints] = field(default_factory=dict)
    read: "Callable[[Place, BatchSizeHistory, int | None], tuple[Prints, Sequence[Any]]] | None" = (
        None
    )


Note = Callable[[int, int, Callable[[], Named]], None]
"""Is shown each microbatch before the device takes its part of it: step, index, data."""


def unnoted(step: int, microbatch: int, named: Callable[[], Named]) -> None:
    """A `Note` of nothing."""


class Microbatches(Protocol):
    """The microbatches of a device."""

    def __call__(
        self, step: int, history: BatchSizeHistory, note: Note = unnoted
    ) -> Iterator[Batch]:
        """Those from a step on, in the order in which the device runs them, without end.

        Args:
            history: the sizes of all batches.
            note: is shown each of them first.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """The data of one device.

    Attributes:
        microbatches: those of the device.
        steps_per_epoch: whole steps that an epoch has samples for; None without a known length.
        read: the data, for the comparison with other ranks; None if the device reads none.
    """

    microbatches: Microbatches
    steps_per_epoch: int | None = None
    read: ReadData | None = None


def seed_of(*parts: object) -> int:
    """A seed of 32 bits that follows from the parts."""
    return seeded(*parts).initial_seed() % 2**32


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """A context in which Python, numpy and torch draw on the CPU from a seed; afterwards they go on
    as before.
    """
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
