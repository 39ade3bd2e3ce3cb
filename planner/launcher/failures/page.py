"""`Page`: where a rank writes the action that it is in, for whoever watches it.

A page is memory that is shared with another process. What the rank wrote last can be read when it
hangs, when it is stopped, and after a signal has killed it. Writing takes less than a microsecond:
there is no lock, and a reader may see half of a change, so it has to see the same twice.

    0    the action: phase, stage, microbatch, device at the other end; step; since when; the
         longest one of its kind before
    64   the beat of a thread: how many; the memory that the process uses
    128  what stays: process id, predicted memory, the limit of the user, and the rank in words
"""

import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct

from planner.launcher.failures.system import used_bytes

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
BEAT_S = 1.0
"""Interval of the beats of a rank, in s."""
HANG_TIMEOUT_S = 20.0
"""Usual value of --hang-timeout, in s."""

_ACTION, _BEAT, _FACTS = Struct("=4iq2d"), Struct("=2q"), Struct("=2qdi")
_BEAT_AT, _FACTS_AT = 64, 128
_WORDS_AT = _FACTS_AT + _FACTS.size
_MAX_WORDS = 512
_NONE = -1


class Phase(IntEnum):
    """What the main thread of a rank is in."""

    STARTING = 0
    MEETING = 1
    BETWEEN = 2
    BARRIER = 3
    RECEIVE = 4
    SEND = 5
    FORWARD = 6
    BACKWARD = 7
    ALL_REDUCE = 8
    STEP = 9
    ENDED = 10


WAITING = frozenset({Phase.MEETING, Phase.BARRIER, Phase.RECEIVE, Phase.SEND, Phase.ALL_REDUCE})
"""Phases that last until other ranks have done something."""
USERS = frozenset({Phase.STARTING, Phase.BETWEEN})
"""Phases whose length the user's functions and files decide: data, evaluation, checkpoints."""


@dataclass(frozen=True, slots=True)
class Doing:
    """The action that a rank is in.

    Attributes:
        phase: its kind.
        stage: of a computation or transfer; -1 for none. Of an all-reduce, its number.
        microbatch: of a computation or transfer; -1 for none.
        device: at the other end of a transfer; -1 for none.
        step: of the optimizer.
        since_s: when it began, by the clock of this host.
        longest_s: the longest one of its kind before; 0 if it is the first one.
    """

    phase: Phase
    stage: int
    microbatch: int
    device: int
    step: int
    since_s: float
    longest_s: float

    def __str__(self) -> str:
        """Such as "at 1F3 of step 5"."""
        of_step = f"of step {self.step}"
        work = f"{self.stage}{'B' if self.phase is Phase.BACKWARD else 'F'}{self.microbatch}"
        match self.phase:
            case Phase.STARTING:
                return "while it starts"
            case Phase.MEETING:
                return "while it waits for the other ranks to start"
            case Phase.BETWEEN:
                return f"before step {self.step}, with its data for example"
            case Phase.BARRIER:
                return f"at the start {of_step}, waiting for the other ranks"
            case Phase.RECEIVE:
                return f"waiting for device {self.device} {self._transfer()} {of_step}"
            case Phase.SEND:
                return f"waiting for its results to be sent, {of_step}"
            case Phase.ALL_REDUCE:
                return f"in all-reduce A{self.stage} {of_step}"
            case Phase.STEP:
                return f"in the optimizer (O) {of_step}"
            case Phase.ENDED:
                return "after its last step"
        return f"at {work} {of_step}"

    def _transfer(self) -> str:
        return f"in stage {self.stage}, microbatch {self.microbatch},"


@dataclass(frozen=True, slots=True)
class Glance:
    """A page as a reader finds it.

    Attributes:
        doing: the action.
        beats: of the rank's thread so far.
        used_bytes: memory of the process at the last beat; 0 where it is not known.
        process: its number; 0 before it has started.
        predicted_bytes: peak of its device, by the plan; 0 where it is not known.
        hang_timeout_s: --hang-timeout; 0 if nothing is a hang.
        words: the rank in words, such as "stage 1"; "" before it has read the plan.
    """

    doing: Doing
    beats: int
    used_bytes: int
    process: int
    predicted_bytes: int
    hang_timeout_s: float
    words: str


class Page:
    """The page of one rank.

    Args:
        memory: its bytes, at least `PAGE_BYTES`; None takes memory that nobody shares.
    """

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory: mmap.mmap | bytearray = memory or bytearray(PAGE_BYTES)
        self._key, self._since_s = 0, time.monotonic()
        self._longest_s = {0: 0.0}
        self._step = 0

    def begin(self, hang_timeout_s: float = HANG_TIMEOUT_S) -> None:
        """The rank's process begins, and a thread of it to beat."""
        self.enter(Phase.STARTING)
        self.tell("", 0, hang_timeout_s)
        threading.Thread(target=self._beat_on, daemon=True).start()

    def enter(
        self, phase: int, stage: int = _NONE, microbatch: int = _NONE, device: int = _NONE
    ) -> None:
        """The main thread begins an action."""
        now_s = time.monotonic()
        longest_s = self._longest_s
        spent_s = now_s - self._since_s
        if spent_s > longest_s[self._key]:
            longest_s[self._key] = spent_s
        self._since_s = now_s
        # Actions are of one kind if they are of the same phase and stage.
        self._key = key = phase << 16 | stage & 0xFFFF
        if key not in longest_s:
            longest_s[key] = 0.0
        _ACTION.pack_into(
            self._memory, 0, phase, stage, microbatch, device, self._step, now_s, longest_s[key]
        )

    def begin_step(self, step: int) -> None:
        """A step of the optimizer begins: the rank waits for the others."""
        self._step = step
        self.enter(Phase.BARRIER)

    def turn_to(self, step: int) -> None:
        """The actions that follow are of another step, without a wait in between."""
        self._step = step

    def end_step(self) -> None:
        """A step of the optimizer has ended."""
        self._step += 1
        self.enter(Phase.BETWEEN)

    def tell(self, words: str, predicted_bytes: int, hang_timeout_s: float) -> None:
        """Says once who the rank is; see `Glance`."""
        raw = words.encode()[:_MAX_WORDS]
        self._memory[_WORDS_AT : _WORDS_AT + len(raw)] = raw
        _FACTS.pack_into(
            self._memory, _FACTS_AT, os.getpid(), predicted_bytes, hang_timeout_s, len(raw)
        )

    def look(self) -> Glance:
        """The page as it is now."""
        phase, *rest = _ACTION.unpack_from(self._memory, 0)
        beats, used = _BEAT.unpack_from(self._memory, _BEAT_AT)
        process, predicted, timeout_s, length = _FACTS.unpack_from(self._memory, _FACTS_AT)
        words = bytes(self._memory[_WORDS_AT : _WORDS_AT + length]).decode(errors="ignore")
        doing = Doing(Phase(phase), *rest)
        return Glance(doing, beats, used, process, predicted, timeout_s, words)

    def _beat_on(self) -> None:
        beats = 0
        while True:
            beats += 1
            _BEAT.pack_into(self._memory, _BEAT_AT, beats, used_bytes(os.getpid()) or 0)
            time.sleep(BEAT_S)


def pages_file(num_ranks: int) -> int:
    """A descriptor of memory for the pages of ranks, without a name in the file system."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("planner-pages")
    else:  # not Linux
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_ranks * PAGE_BYTES)
    return descriptor


def page_of(descriptor: int, index: int) -> Page:
    """One page of a file of pages."""
    return Page(mmap.mmap(descriptor, PAGE_BYTES, offset=index * PAGE_BYTES))


def page_in(path: Path, *, make: bool = False) -> Page:
    """The page in a file of its own.

    Raises:
        OSError: if there is no such file, or it cannot be made.
        ValueError: if it is no page yet.
    """
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    try:
        if make:
            os.ftruncate(descriptor, PAGE_BYTES)
        return page_of(descriptor, 0)
    finally:
        os.close(descriptor)
