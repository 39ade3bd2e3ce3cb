"""Whether all ranks read the same data. If not, all of them raise one message.

    at the start                the length, the order of the first epoch, and two samples
    first step of an epoch      its order
    some steps                  microbatches that several ranks read, before these take their parts

Ranks compare one number each. Where these differ all ranks know it, and exchange finer ones: those
of each tensor and row.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from planner.launcher.failures.rank import current_status
from planner.launcher.failures.status import Phase
from planner.launcher.groups import Groups
from planner.support.errors import LaunchError
from planner.training.data.batching import BatchLayout, BatchSizeHistory, StepPosition
from planner.training.data.fingerprints import Prints, number, prints
from planner.training.data.reading import Place, ReadData, words_of_place
from planner.training.data.samples import Named

FIRST_STEPS, EVERY = 4, 50
"""Microbatches are compared in the first steps after a start, in the first one of an epoch, and in
each one whose index is a multiple of the second number."""
SHOWN = 1000
"""Samples at the begin of an order among which the first one that differs is looked for."""

_GLOBAL = "from the generators of torch, numpy or Python, which the launch seeds everywhere alike"
_UNSEEDED = (
    "the data draws from a generator of its own without a seed, such as np.random.default_rng();"
    f" give it a seed, or draw {_GLOBAL}"
)
_ELSEWHERE = (
    "the data draws from a generator of its own, which is in another state on each rank; draw"
    f" {_GLOBAL}"
)
_OTHER_DATA = (
    "give all ranks the whole data, the same files and no part by RANK; make it in a function"
    " without parameters, and give generators of its own a seed"
)
_OTHER_HASHES = (
    "; PYTHONHASHSEED differs, too, and with it the order of sets of strings: set it to the same"
    " number on all ranks"
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a rank tells the others of its data at the start."""

    microbatches: tuple[int, ...]
    num_samples: int | None
    order: int | None
    probes: dict[Place, int]
    can_read: bool


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A batch as one rank has read it, where others have another one.

    Attributes:
        prints: of it.
        indices: of its samples in the dataset; empty where they are not known.
        draws: whether it is another one when it is read again.
        hashed: the hash of a string, by this process.
    """

    prints: Prints
    indices: tuple[Any, ...] = ()
    draws: bool = False
    hashed: int = field(default_factory=lambda: hash("planner"))


def compares_all(since: int, step: int) -> bool:
    """Whether all elements of what is read in a step are compared, since some steps."""
    return since < FIRST_STEPS or step % EVERY == 0


class DataAgreement:
    """Compares the data of all ranks; each of them makes one, and all call the same methods.

    Attributes:
        num_samples: of an epoch, on all ranks; None without a known length.

    Args:
        where: the data is from, for messages.
        data: of this rank; None if it reads none.
        layout: how samples become microbatches.
        groups: the other ranks.

    Raises:
        LaunchError: if ranks have different data.
    """

    def __init__(
        self, where: str, data: ReadData | None, layout: BatchLayout, groups: Groups
    ) -> None:
        self._where, self._data, self._layout, self._groups = where, data, layout, groups
        self._first: int | None = None  # step of this start
        self._due: int | None = None  # step whose microbatches are compared
        self._prints: dict[int, Prints] = {}  # of that step, by microbatch
        facts = _known(groups.gather(None if data is None else _facts(data)))
        lengths = {rank: one.num_samples for rank, one in facts.items()}
        self.num_samples = next(iter(lengths.values()), None)
        if (pair := _unlike(lengths)) is not None:
            counts = " and ".join(f"{lengths[rank]} samples on rank {rank}" for rank in pair)
            raise LaunchError(
                f"{self._where}: expected the same dataset on all ranks, got {counts};"
                f" {_OTHER_DATA}"
            )
        if _unlike({rank: one.order for rank, one in facts.items()}) is not None:
            self._refuse_order(0)
        read = [m for one in facts.values() for m in one.microbatches]
        self._several, self._shared = len(facts) > 1, len({*read}) < len(read)
        self._ordered = any(one.order is not None for one in facts.values())
        for place in next(iter(facts.values())).probes if facts else ():
            if _unlike({rank: one.probes[place] for rank, one in facts.items()}) is not None:
                own = None if data is None else data.probes[place]
                self._refuse(place, None, own, _UNSEEDED)
        apart = self._several and not self._shared
        if apart and all(one.can_read and not one.probes for one in facts.values()):
            self._probe((0, 0))

    def _probe(self, place: Place) -> None:
        """Compares a microbatch that all ranks read, where they have none in common."""
        data, own = self._data, None
        if data is not None and data.read is not None:
            own, _ = data.read(place, None)
        ((low, high),) = self._groups.extremes([None if own is None else number(own)])
        if low < high:
            self._refuse(place, None, own, _UNSEEDED)

    @contextmanager
    def step(self, step: int, history: BatchSizeHistory) -> Iterator[None]:
        """Compares the data of a step that the ranks read meanwhile, if that is due.

        Raises:
            LaunchError: if ranks have different data.
        """
        self._first = step if self._first is None else self._first
        position = self._position(step, history)
        begins = position is not None and (position.first == 0 or step == self._first)
        is_due = compares_all(step - self._first, step) or begins
        if not self._several or not ((is_due and self._shared) or (begins and self._ordered)):
            yield
            return
        self._due = step if self._shared else None
        yield
        self._due = None
        epoch = position.epoch if begins and self._ordered and position is not None else None
        self._compare(step, history, epoch)

    def note(self, step: int, microbatch: int, named: Callable[[], Named]) -> None:
        """Takes prints of a microbatch where they will be compared."""
        if step == self._due:
            self._prints[microbatch] = prints(named())

    def _position(self, step: int, history: BatchSizeHistory) -> StepPosition | None:
        if self.num_samples is None:
            return None
        return history.position(step, self.num_samples)

    def _compare(self, step: int, history: BatchSizeHistory, epoch: int | None) -> None:
        own, self._prints = self._prints, {}
        order = None if epoch is None else _order_of(self._data, epoch)
        values = [order, *(number(own[m]) if m in own else None for m in range(self._layout.count))]
        current_status().enter(Phase.BARRIER)
        unlike = [low < high for low, high in self._groups.extremes(values)]
        current_status().enter(Phase.BETWEEN)
        if unlike[0]:
            assert epoch is not None
            self._refuse_order(epoch)
        if any(unlike):
            m = unlike.index(True) - 1
            self._refuse((step, m), history, own.get(m), _ELSEWHERE)

    def _refuse_order(self, epoch: int) -> None:
        """Says which samples differ in the order of an epoch, and why."""
        data, own = self._data, None
        if data is not None and data.order is not None:
            own = data.orderer, [*map(str, data.order(epoch)[:SHOWN])]
        known = _known(self._groups.gather(own))
        first, other = _unlike(known) or [*known][:2]
        (cause, one), (_, two) = known[first], known[other]
        pairs = enumerate(zip(one, two, strict=False))
        place, (a, b) = next(
            ((i, pair) for i, pair in pairs if pair[0] != pair[1]), (SHOWN, ("", ""))
        )
        words = f"samples {a} and {b} at position {place}" if a != b else f"after position {place}"
        raise LaunchError(
            f"{self._where}: rank {first} and rank {other} have different orders of the samples of"
            f" epoch {epoch}, {words}: {cause}"
        )

    def _refuse(
        self, place: Place, history: BatchSizeHistory | None, own: Prints | None, drawn: str
    ) -> None:
        """Says which tensor and sample differ.

        Args:
            own: the prints of this rank; None if it has not read the microbatch.
            drawn: why, where the data draws by itself.
        """
        finer = None
        if own is not None:
            finer = ReadBatch(own)
            if self._data is not None and self._data.read is not None:
                (one, indices), (two, _) = (self._data.read(place, history) for _ in "12")
                rows = max((len(tensor.rows) for tensor in own), default=0)
                finer = ReadBatch(own, tuple(indices[:rows]), one != two)
        read = self._groups.gather(finer)
        raise LaunchError(difference(self._where, words_of_place(place), read, _OTHER_DATA, drawn))


def difference(
    where: str, place: str, read: Sequence[ReadBatch | None], other: str, drawn: str = ""
) -> str:
    """The message on a batch that ranks have differently.

    Args:
        where: it is from.
        place: of it, such as "step 0, microbatch 1".
        read: by rank; None if it has not read it.
        other: the cause where the data is another one on each rank.
        drawn: the cause where it draws by itself.
    """
    known = _known(read)
    pair = _unlike({rank: one.prints for rank, one in known.items()})
    assert pair is not None, "their numbers differ"
    (first, rank), (one, two) = pair, (known[rank] for rank in pair)
    words = _unlike_tensor(one, two)
    cause = drawn if any(one.draws for one in known.values()) else other
    hashes = _OTHER_HASHES if one.hashed != two.hashed else ""
    return (
        f"{where}: rank {first} and rank {rank} read different {words} ({place}): {cause}{hashes}"
    )


def _unlike_tensor(one: ReadBatch, two: ReadBatch) -> str:
    """The first tensor of two ranks that differs, and the first sample in it."""
    names = [", ".join(tensor.name for tensor in rank.prints) for rank in (one, two)]
    if names[0] != names[1]:
        return f"tensors, {names[0]} and {names[1]},"
    for a, b in zip(one.prints, two.prints, strict=True):
        if a.form != b.form:
            return f"kinds of {a.name}: {a.form} and {b.form}"
        rows = [i for i, pair in enumerate(zip(a.rows, b.rows, strict=True)) if pair[0] != pair[1]]
        if rows:
            named = len(one.indices) == len(a.rows)
            sample = f"sample {one.indices[rows[0]]!r}" if named else f"row {rows[0]}"
            return f"values of {a.name} in {sample}"
    raise AssertionError("the numbers of equal prints are equal")


def _known(values: Sequence[Any]) -> dict[int, Any]:
    """Those that are there, by rank."""
    return {rank: one for rank, one in enumerate(values) if one is not None}


def _unlike(values: Mapping[int, object]) -> tuple[int, int] | None:
    """The first rank, and the first one after it with another value; None if there is none."""
    first, *others = [*values] or [0]
    return next(((first, rank) for rank in others if values[rank] != values[first]), None)


def _facts(data: ReadData) -> _Facts:
    found = {place: number(one) for place, one in data.probes.items()}
    order = _order_of(data, 0)
    return _Facts(data.microbatches, data.num_samples, order, found, data.read is not None)


def _order_of(data: ReadData | None, epoch: int) -> int | None:
    """A number below 2 ** 32 of the order of an epoch; None without one."""
    if data is None or data.order is None:
        return None
    return crc32(repr(data.order(epoch)).encode())
