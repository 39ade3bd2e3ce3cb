"""`Feed`: the data of one device, step by step; `ReadData`: the same for the other ranks, which
compare it with theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.launcher.batch import Batch
from planner.training.data.batching import BatchSizeHistory
from planner.training.data.fingerprints import Prints
from planner.training.data.samples import Named

Place = tuple[int | None, int]
"""A step (None in an evaluation) and a microbatch."""


def words_of_place(place: Place) -> str:
    """How messages call it."""
    step, microbatch = place
    words = f"microbatch {microbatch}"
    return words if step is None else f"step {step}, {words}"


class Read(Protocol):
    """Reads a microbatch once more."""

    def __call__(
        self, place: Place, history: BatchSizeHistory | None, most: int | None = None
    ) -> tuple[Prints, Sequence[Any]]:
        """Its prints, and the indices of its samples, where they have some.

        Args:
            history: the sizes of all batches; None is that of a training without a resume.
            most: number of samples; None is all.
        """


@dataclass(frozen=True, slots=True)
class ReadData:
    """Data as one rank reads it.

    Attributes:
        microbatches: indices of those that the rank reads in each step.
        num_samples: of an epoch; None without a known length.
        order: gives the indices of the samples of an epoch; None for data with an order of its own.
        orderer: why ranks may have other orders, and what to do about it.
        probes: some samples that all ranks have read.
        read: reads microbatches once more; None where data can be read once.
    """

    microbatches: tuple[int, ...]
    num_samples: int | None = None
    order: Callable[[int], Sequence[Any]] | None = None
    orderer: str = ""
    probes: Mapping[Place, Prints] = field(default_factory=dict)
    read: Read | None = None


Note = Callable[[int, int, Callable[[], Named]], None]
"""Is shown each microbatch before the device takes its part of it: step, index, data."""


def unnoted(step: int, microbatch: int, named: Callable[[], Named]) -> None:
    """A `Note` of nothing."""


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


class Steps(Protocol):
    """The data of a device."""

    def __call__(
        self, step: int, history: BatchSizeHistory, note: Note = unnoted
    ) -> Iterator[StepData]:
        """That from a step on, without end.

        Args:
            history: the sizes of all batches.
            note: is shown the microbatches.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """The data of one device.

    Attributes:
        steps: gives it.
        num_samples: of an epoch; None without a known length.
        least: samples that a step has at least.
        read: for the comparison with other ranks; None if the device reads none.
        notes: on what is left out, as far as it is known.
    """

    steps: Steps
    num_samples: int | None = None
    least: int | None = None
    read: ReadData | None = None
    notes: Callable[[], tuple[str, ...]] = tuple
