"""What a device does in one iteration: a list of actions. The simulator times the lists and the
launcher runs them.

    F, B        forward and backward of (stage, microbatch); each waits for the receives that were
                posted for it, and some wait for sends: see `waiting_for_sends`.
    Send        starts to send a tensor (or its gradient) of one microbatch, right after the
                action that made it. It does not hold up the list.
    Receive     posts the buffer for a tensor, one action of the same kind ahead, so that the
                transfer hides behind the computation. It does not hold up the list either.
    AllReduce   adds up gradients over devices; all devices run their all-reduces in one global
                order.
    Step        the optimizer.

Under an asynchronous schedule all-reduces and a step come after every backward: see `flows.py`.

A transfer starts when both ends have posted it, and ends for both at once (rendezvous). The
transfers of an ordered pair of devices run first in, first out.

The text form: "2F0" and "2B0" are forward and backward of microbatch 0 in stage 2; "2>5:0:x"
sends tensor x of microbatch 0 from stage 2 to device 5, and "3<1:0:x" receives it for stage 3 from
device 1; "2>5:0:d/x" sends the gradient of x; "2>5:0:x[0:4,8:16]" sends a box of x, from index 0 to
below 4 in its first dimension and from 8 to below 16 in its second; "A0" is the first all-reduce of
gradients, and "O" the step.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple
from urllib.parse import quote, unquote

import numpy as np

from planner.artefacts.graph import Tensor
from planner.artefacts.sharding import Box
from planner.artefacts.strategy import GradientSum
from planner.support.arrays import Bools, Ints, Kinds


class Piece(NamedTuple):
    """A part of a tensor that is sent.

    Attributes:
        tensor: its name.
        box: of one microbatch of the tensor; None is all of it.
    """

    tensor: str
    box: Box | None = None


def piece_bytes(tensor: Tensor, box: Box | None) -> int:
    """Size of a tensor, or of a part of it, for one microbatch."""
    if box is None:
        return tensor.bytes
    return replace(tensor, shape=tuple(stop - start for start, stop in box)).bytes


class Direction(StrEnum):
    """Forward or backward."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward or backward of one microbatch in one stage."""

    direction: Direction
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Send:
    """Starts to send a tensor, or (backward) its gradient, to a device.

    Attributes:
        stage: the stage of this device whose action made it.
        box: the part of it that is sent; None is all of it.
    """

    direction: Direction
    stage: int
    microbatch: int
    tensor: str
    device: int
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class Receive:
    """Posts the buffer for a tensor, or (backward) its gradient, from a device.

    Attributes:
        stage: the stage of this device whose action waits for it.
        box: the part of it that is received; None is all of it.
    """

    direction: Direction
    stage: int
    microbatch: int
    tensor: str
    device: int
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Adds up gradients over devices: an index into `Program.sums`."""

    sum: int


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer's step on this device."""


Action = Compute | Send | Receive | AllReduce | Step


class ActionKind(IntEnum):
    """What an action is, in arrays."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    ALL_REDUCE = 3
    STEP = 4


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """Action lists as arrays, one after the other: there can be millions of actions.

    Attributes:
        devices: (D,) the device of each list, ascending.
        start: (D + 1,) where each list begins, and the last one ends.
        kind: (n,) a `ActionKind`.
        backward: (n,) whether the direction is backward.
        stage: (n,) of computations, sends and receives.
        microbatch: (n,) of computations, sends and receives.
        piece: (n,) of sends and receives, an index into `pieces`; of an all-reduce, its number.
        peer: (n,) of sends and receives, the device at the other end.
        pieces: the tensors, or parts of them, that are sent.
    """

    devices: Ints
    start: Ints
    kind: Kinds
    backward: Bools
    stage: Ints
    microbatch: Ints
    piece: Ints
    peer: Ints
    pieces: tuple[Piece, ...]

    def __len__(self) -> int:
        return len(self.kind)

    def owner(self) -> Ints:
        """(n,) the position of each action's device in `devices`."""
        return np.repeat(np.arange(len(self.devices)), np.diff(self.start))


@dataclass(frozen=True, slots=True, eq=False)
class Lists(Mapping[int, tuple[Action, ...]]):
    """Arrays read as lists of actions, by device."""

    code: Code

    def __getitem__(self, device: int) -> tuple[Action, ...]:
        at = int(np.searchsorted(self.code.devices, device))
        if at == len(self.code.devices) or self.code.devices[at] != device:
            raise KeyError(device)
        return decode(self.code, range(self.code.start[at], self.code.start[at + 1]))

    def __iter__(self) -> Iterator[int]:
        return iter(self.code.devices.tolist())

    def __len__(self) -> int:
        return len(self.code.devices)


@dataclass(frozen=True, slots=True)
class Program:
    """What all devices do in one iteration.

    Attributes:
        lists: per used device, its actions in order; each all-reduce is once in the list of each
            member.
        sums: the all-reduces, in their global order; of a flow (`flows.py`), those of round 0, then
            those of round 1, and so on. The last ones are of no device where its stage has fewer
            rounds.
    """

    lists: Mapping[int, tuple[Action, ...]]
    sums: tuple[GradientSum, ...]

    @property
    def code(self) -> Code:
        """The lists as arrays."""
        return self.lists.code if isinstance(self.lists, Lists) else encode(self.lists)

    @property
    def members(self) -> Ints:
        """How many devices come to each all-reduce."""
        return np.array([len(one.devices) for one in self.sums], dtype=np.int64)


def waiting_for_sends(code: Code) -> frozenset[Direction]:
    """The directions of the computations that wait for sends. Such a computation begins when all
    results of the second one before it, of its stage and direction, are sent. While the results of
    one are on their way the next are made, and no more are kept.

    Backwards wait where no device runs several stages. Forwards wait where, besides, no device has
    a backward before a forward, as with GPipe. Elsewhere the reader of a forward's results may have
    to wait until it is rid of gradients, and both would wait for ever.
    """
    # Without the rule a device behind a slow link piled up gradients: a stage between two replicas
    # and one took 22 % more memory than predicted. Under 1F1B waiting forwards may block, for
    # example with four replicas before one and two more microbatches in flight than needed.
    owner, place = code.owner(), np.arange(len(code))
    computes = code.kind == ActionKind.COMPUTE
    ahead = computes & ~code.backward
    back = computes & code.backward
    least, most = np.full(len(code.devices), len(code)), np.full(len(code.devices), -1)
    np.minimum.at(least, owner[computes], code.stage[computes])
    np.maximum.at(most, owner[computes], code.stage[computes])
    if (least < most).any():
        return frozenset()
    last, first = np.full(len(code.devices), -1), np.full(len(code.devices), len(code))
    np.maximum.at(last, owner[ahead], place[ahead])
    np.minimum.at(first, owner[back], place[back])
    return frozenset(Direction) if (last < first).all() else frozenset({Direction.BACKWARD})


def encode(lists: Mapping[int, Sequence[Action]]) -> Code:
    """Lists of actions as arrays, by device."""
    numbers: dict[Piece, int] = {}
    rows = []
    for device in sorted(lists):
        for action in lists[device]:
            match action:
                case Compute(direction, stage, m):
                    rows.append(
                        (ActionKind.COMPUTE, direction is Direction.BACKWARD, stage, m, 0, 0)
                    )
                case Send(direction, stage, m, name, peer, box) | Receive(
                    direction, stage, m, name, peer, box
                ):
                    kind = ActionKind.SEND if isinstance(action, Send) else ActionKind.RECEIVE
                    piece = numbers.setdefault(Piece(name, box), len(numbers))
                    back = direction is Direction.BACKWARD
                    rows.append((kind, back, stage, m, piece, peer))
                case AllReduce(index):
                    rows.append((ActionKind.ALL_REDUCE, False, 0, 0, index, 0))
                case Step():
                    rows.append((ActionKind.STEP, False, 0, 0, 0, 0))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy()
    return Code(
        np.array(sorted(lists), dtype=np.int64),
        np.cumsum([0, *(len(lists[device]) for device in sorted(lists))]),
        columns[0].astype(np.int8), columns[1].astype(bool), columns[2], columns[3], columns[4],
        columns[5], tuple(numbers),
    )  # fmt: skip


def decode(code: Code, some: Sequence[int] | Ints) -> tuple[Action, ...]:
    """Actions from their arrays.

    Args:
        some: indices of the actions.
    """
    where = np.asarray(some, dtype=np.int64)
    columns = (code.kind, code.backward, code.stage, code.microbatch, code.piece, code.peer)
    actions: list[Action] = []
    for kind, backward, stage, m, piece, peer in zip(
        *(column[where].tolist() for column in columns), strict=True
    ):
        direction = Direction.BACKWARD if backward else Direction.FORWARD
        match kind:
            case ActionKind.COMPUTE:
                actions.append(Compute(direction, stage, m))
            case ActionKind.SEND:
                name, box = code.pieces[piece]
                actions.append(Send(direction, stage, m, name, peer, box))
            case ActionKind.RECEIVE:
                name, box = code.pieces[piece]
                actions.append(Receive(direction, stage, m, name, peer, box))
            case ActionKind.ALL_REDUCE:
                actions.append(AllReduce(piece))
            case ActionKind.STEP:
                actions.append(Step())
    return tuple(actions)


def waits(compute: Compute, receive: Receive) -> bool:
    """Whether a computation needs the tensor of this receive."""
    return (compute.direction, compute.stage, compute.microbatch) == (
        receive.direction, receive.stage, receive.microbatch
    )  # fmt: skip


def of_microbatches(actions: Iterable[Action], count: int) -> tuple[Action, ...]:
    """A list without the microbatches from one on.

    It cannot hang where the whole list does not. Passes keep their order, and so do the transfers
    of each pair of devices; each waits for some of what it waits for in the whole list, and for
    nothing else. A sum of gradients still comes after all backwards that add to them.

    >>> " ".join(map(text, of_microbatches(map(parse, "0F0 0F1 0B0 0B1 A0 O".split()), 1)))
    '0F0 0B0 A0 O'
    """
    return tuple(
        one
        for one in actions
        if not isinstance(one, Compute | Send | Receive) or one.microbatch < count
    )


def text(action: Action) -> str:
    """One action in text form; `parse` reads it back."""
    match action:
        case Compute(direction, stage, microbatch):
            return f"{stage}{direction}{microbatch}"
        case Send(device=device) | Receive(device=device):
            arrow = ">" if isinstance(action, Send) else "<"
            mark = "" if action.direction is Direction.FORWARD else "d/"
            name = mark + quote(action.tensor, safe="") + _box_text(action.box)
            return f"{action.stage}{arrow}{device}:{action.microbatch}:{name}"
        case AllReduce(index):
            return f"A{index}"
        case Step():
            return "O"


def _box_text(box: Box | None) -> str:
    return "" if box is None else f"[{','.join(f'{start}:{stop}' for start, stop in box)}]"


_COMPUTE = re.compile(r"(\d+)([FB])(\d+)")

# Brackets in a name are quoted, so that a box can follow it.
_BOX = r"\[((?:\d+:\d+(?:,\d+:\d+)*)?)\]"
_TRANSFER = re.compile(rf"(\d+)([<>])(\d+):(\d+):(d/)?([^\s\[\]]+)(?:{_BOX})?")


def parse(word: str) -> Action:
    """The action that `text` wrote.

    Raises:
        ValueError: if the word is none.

    >>> parse("2B0")
    Compute(direction=<Direction.BACKWARD: 'B'>, stage=2, microbatch=0)
    """
    if word == "O":
        return Step()
    if re.fullmatch(r"A\d+", word):
        return AllReduce(int(word[1:]))
    if match := _COMPUTE.fullmatch(word):
        return Compute(Direction(match[2]), int(match[1]), int(match[3]))
    if match := _TRANSFER.fullmatch(word):
        end = Send if match[2] == ">" else Receive
        direction = Direction.BACKWARD if match[5] else Direction.FORWARD
        return end(
            direction, int(match[1]), int(match[4]), unquote(match[6]), int(match[3]),
            _parsed_box(match[7]),
        )  # fmt: skip
    raise ValueError(f"{word!r} is no action")


def _parsed_box(word: str | None) -> Box | None:
    if word is None:
        return None
    ranges = [one.split(":") for one in word.split(",") if one]
    return tuple((int(start), int(stop)) for start, stop in ranges)
