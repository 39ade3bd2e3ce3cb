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
from planner.training.data.batching import (
    BatchLayout,
    BatchSizeHistory,
    Place,
    ReadData,
    words_of_place,
)
from planner.training.data.fingerprints import Prints, number, prints
from planner.training.data.samples import Named

FIRST_STEPS, EVERY = 4, 50
"""Microbatches are compared in the first steps after a start, and in each one whose index is a
multiple of the second number."""
OFTEN, SPACING = 10, 20
"""So many first steps of epochs are compared, and later ones if there were so many steps since."""
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
_REPEATED = (
    "the same samples are other ones when they are read again: the data draws from a generator of"
    " its own, whose numbers would repeat on each rank, as these read different samples; draw"
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
        self._orders: dict[int, int | None] = {}  # not compared yet, by epoch
        self._count, self._last = 0, 0  # of comparisons, and the step of the last one
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
            self._refuse_orders({0: _order_of(data, 0)})
        read = [m for one in facts.values() for m in one.microbatches]
        self._several, self._shared = len(facts) > 1, len({*read}) < len(read)
        self._ordered = any(one.order is not None for one in facts.values())
        for place in next(iter(facts.values())).probes if facts else ():
            if _unlike({rank: one.probes[place] for rank, one in facts.items()}) is not None:
                own = None if data is None else data.probes[place]
                self._refuse(place, layout.history, own, _UNSEEDED)
        if self._several and len({one.microbatches for one in facts.values()}) > 1:
            self._check_apart(facts)

    def _check_apart(self, facts: Mapping[int, _Facts]) -> None:
        """Where ranks read different microbatches, a sample has to be the same whenever and
        wherever it is read.
        """
        if not all(one.can_read for one in facts.values()):
            return
        data, history = self._data, self._layout.history
        place = next(iter(next(iter(facts.values())).probes), (0, 0))
        own, again = None, None
        if data is not None and data.read is not None:
            own, again, _ = data.read(place, history, 1)
        value = None if own is None else number(own)
        (low, high), (_, draws) = self._groups.extremes([value, float(own != again)])
        if low < high:
            self._refuse(place, history, own, _UNSEEDED)
        if draws:
            raise LaunchError(f"{self._where}: {words_of_place(place)}: {_REPEATED}")

    @contextmanager
    def step(self, step: int, history: BatchSizeHistory) -> Iterator[None]:
        """Compares the data of a step that the ranks read meanwhile, if that is due.

        Raises:
            LaunchError: if ranks have different data.
        """
        self._first = step if self._first is None else self._first
        position = None
        if self._several and self.num_samples is not None:
            position = history.position(step, self.num_samples)
        begins = position is not None and (position.first == 0 or step == self._first)
        if begins and position is not None:
            self._orders[position.epoch] = _order_of(self._data, position.epoch)
        often = self._count < OFTEN or step - self._last >= SPACING
        is_due = self._shared and compares_all(step - self._first, step)
        if not is_due and not (begins and often and (self._shared or self._ordered)):
            yield
            return
        self._due = step if self._shared else None
        yield
        self._due, self._last, self._count = None, step, self._count + 1
        self._compare(step, history)

    def note(self, step: int, microbatch: int, named: Callable[[], Named]) -> None:
        """Takes prints of a microbatch where they will be compared."""
        if step == self._due:
            self._prints[microbatch] = prints(named())

    def _compare(self, step: int, history: BatchSizeHistory) -> None:
        own, self._prints, orders, self._orders = self._prints, {}, self._orders, {}
        order = None if None in orders.values() else _crc(orders)
        values = [order, *(number(own[m]) if m in own else None for m in range(self._layout.count))]
        current_status().enter(Phase.BARRIER)
        unlike = [low < high for low, high in self._groups.extremes(values)]
        current_status().enter(Phase.BETWEEN)
        if unlike[0]:
            self._refuse_orders(orders)
        if any(unlike):
            m = unlike.index(True) - 1
            self._refuse((step, m), history, own.get(m), _ELSEWHERE)

    def _refuse_orders(self, orders: Mapping[int, int | None]) -> None:
        """Says which epoch has different orders, the first samples that differ, and why.

        Args:
            orders: numbers of this rank's, by epoch; of the last epoch the order itself is known.
        """
        data, own, current = self._data, None, max(orders)
        if data is not None and data.order is not None:
            own = data.orderer, orders, [*map(str, data.order(current)[:SHOWN])]
        known = _known(self._groups.gather(own))
        pair = _unlike({rank: one[1] for rank, one in known.items()})
        assert pair is not None, "their numbers differ"
        (cause, one, first), (_, two, second) = (known[rank] for rank in pair)
        epoch = next(epoch for epoch in one if one[epoch] != two[epoch])
        samples = ((i, a, b) for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
        words = ""
        if epoch == current:
            words = next((f", samples {a} and {b} at position {i}" for i, a, b in samples), "")
        raise LaunchError(
            f"{self._where}: rank {pair[0]} and rank {pair[1]} have different orders of the samples"
            f" of epoch {epoch}{words}: {cause}"
        )

    def _refuse(
        self, place: Place, history: BatchSizeHistory, own: Prints | None, drawn: str
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
                one, two, indices = self._data.read(place, history, None)
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
    """A number of the order of an epoch; None without one."""
    return None if data is None or data.order is None else _crc(data.order(epoch))


def _crc(value: object) -> int:
    """A number below 2 ** 32."""
    return crc32(repr(value).encode())
