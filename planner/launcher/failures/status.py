"""`StatusFile`: where a rank writes the action that it is in, for whoever watches it.

The ranks of a host have a folder, which `planner launch --nproc` or torchrun makes:

    FOLDER/rank-3   the status of rank 3, whose process holds a lock on it
    FOLDER/report   made by the one process that says why the launch ends

A status file is memory that is shared with other processes. What the rank wrote last can be read
when it hangs, when it is stopped, and after a signal has killed it. The system releases the lock
with the process, so a free lock before `Phase.ENDED` is a rank that died without a word. Writing
takes less than a microsecond: there is no lock around it, and a reader may see half of a change, so
it has to see the same twice.

    0    the action: phase, stage, microbatch, device at the other end; step; since when; the
         longest one of its kind before
    64   the memory that the process uses, as its monitor has seen it last
    128  what stays: process id, predicted memory, the limit of the user, whether the process leads
         its group and has a lock, and the rank in words
"""

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct

from planner.support.units import format_bytes

STATUS_BYTES = mmap.ALLOCATIONGRANULARITY
HANG_TIMEOUT_S = 20.0
"""Usual value of --hang-timeout, in s."""

_ACTION, _USED, _FACTS = Struct("=4iq2d"), Struct("=q"), Struct("=2qdi2?")
_USED_AT, _FACTS_AT = 64, 128
_DESCRIPTION_AT = _FACTS_AT + _FACTS.size
_MAX_DESCRIPTION = 512
_NONE = -1
_RANK, _REPORT = "rank-", "report"


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
    DATA = 11
    EVALUATION = 12


WAITING = frozenset({Phase.MEETING, Phase.BARRIER, Phase.RECEIVE, Phase.SEND, Phase.ALL_REDUCE})
"""Phases that last until other ranks have done something."""
USERS = frozenset({Phase.STARTING, Phase.BETWEEN, Phase.DATA, Phase.EVALUATION})
"""Phases whose length the user's functions and files decide: data, evaluation, checkpoints."""


@dataclass(frozen=True, slots=True)
class CurrentAction:
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
            case Phase.DATA:
                return f"while reading data for step {self.step}"
            case Phase.EVALUATION:
                return f"in the evaluation before step {self.step}"
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
class Status:
    """A status file as a reader finds it.

    Attributes:
        action: that the rank is in.
        used_bytes: memory of the process as last seen; 0 where it is not known.
        process: its number; 0 before it has started.
        predicted_bytes: peak of its device, by the plan; 0 where it is not known.
        hang_timeout_s: --hang-timeout; 0 if nothing is a hang.
        leads_group: whether the process leads a process group of its own.
        has_lock: whether it has a lock on the file.
        description: the rank in words, such as "stage 1"; "" before it has read the plan.
    """

    action: CurrentAction
    used_bytes: int
    process: int
    predicted_bytes: int
    hang_timeout_s: float
    leads_group: bool
    has_lock: bool
    description: str


class StatusFile:
    """The status of one rank.

    Args:
        file: descriptor of its file; None takes memory that nobody shares.
    """

    def __init__(self, file: int | None = None) -> None:
        self._file = file
        self._memory: mmap.mmap | bytearray
        self._memory = bytearray(STATUS_BYTES) if file is None else mmap.mmap(file, STATUS_BYTES)
        self._has_lock = False
        self._key, self._since_s = 0, time.monotonic()
        self._longest_s = {0: 0.0}
        self._step = 0

    @classmethod
    def of_this_process(cls, folder: Path, rank: int) -> "StatusFile":
        """The status file of this rank; its process holds the lock from now on.

        Raises:
            OSError: if it cannot be made, or if this is a process that the rank has started.
        """
        import fcntl  # not on Windows

        file = os.open(folder / f"{_RANK}{rank}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.write(file, bytes(STATUS_BYTES))  # a full disk refuses now; later it would be a signal
        made = cls(file)
        with suppress(OSError):  # a file system without locks
            fcntl.lockf(file, fcntl.LOCK_EX)
            made._has_lock = True
        made.enter(Phase.STARTING)
        made.describe("", 0, HANG_TIMEOUT_S)
        return made

    @classmethod
    def at(cls, path: Path) -> "StatusFile":
        """The status file of another process.

        Raises:
            OSError: if there is none.
            ValueError: if it is none yet.
        """
        file = os.open(path, os.O_RDWR)
        try:
            return cls(file)
        except ValueError:
            os.close(file)
            raise

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
        # Actions are of one kind if they are of the same phase and stage. Both are in one number,
        # so that the longest one before is one look-up, which takes no microsecond. All-reduces
        # whose numbers differ by 65,536 share one, which is harmless: they last about as long.
        self._key = key = phase << 16 | stage & 0xFFFF
        if key not in longest_s:
            longest_s[key] = 0.0
        _ACTION.pack_into(
            self._memory, 0, phase, stage, microbatch, device, self._step, now_s, longest_s[key]
        )

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The main thread is in an action of its own meanwhile, and then in the one before."""
        before, *where = _ACTION.unpack_from(self._memory, 0)
        self.enter(phase)
        yield
        self.enter(before, *where[:3])

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

    def describe(self, description: str, predicted_bytes: int, hang_timeout_s: float) -> None:
        """Says once who the rank is; see `Status`."""
        raw = description.encode()[:_MAX_DESCRIPTION]
        self._memory[_DESCRIPTION_AT : _DESCRIPTION_AT + len(raw)] = raw
        process = os.getpid()
        _FACTS.pack_into(
            self._memory, _FACTS_AT, process, predicted_bytes, hang_timeout_s, len(raw),
            process == os.getpgrp(), self._has_lock,
        )  # fmt: skip

    def note_memory(self, used_bytes: int) -> None:
        """The monitor has seen how much memory the rank's process uses."""
        _USED.pack_into(self._memory, _USED_AT, used_bytes)

    def look(self) -> Status:
        """The status as it is now."""
        phase, *where = _ACTION.unpack_from(self._memory, 0)
        (used_bytes,) = _USED.unpack_from(self._memory, _USED_AT)
        process, predicted_bytes, timeout_s, length, leads, has_lock = _FACTS.unpack_from(
            self._memory, _FACTS_AT
        )
        words = bytes(self._memory[_DESCRIPTION_AT : _DESCRIPTION_AT + length])
        return Status(
            CurrentAction(Phase(phase), *where), used_bytes, process, predicted_bytes, timeout_s,
            leads, has_lock, words.decode(errors="ignore"),
        )  # fmt: skip

    def has_died(self) -> bool:
        """Whether the rank's process has ended without a word; another process asks."""
        if self._file is None or self._has_lock or not self.look().has_lock:
            return False
        import fcntl  # not on Windows

        try:  # a shared lock, so that two who ask do not take each other for the rank
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # the rank's process holds it
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return self.look().action.phase is not Phase.ENDED


def status_paths(folder: Path) -> dict[int, Path]:
    """Where the status of each rank of a host is. A rank opens no second time the file that is its
    own: to close that would release its lock.
    """
    return {int(path.name.removeprefix(_RANK)): path for path in folder.glob(f"{_RANK}*")}


def claim_report(folder: Path) -> bool:
    """Whether this process is the first one of a host that asks: it says why the launch ends."""
    try:
        os.close(os.open(folder / _REPORT, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # the folder is gone or full: rather two reports than none
        return True
    return True


def is_reported(folder: Path) -> bool:
    """Whether a process has said why the launch ends."""
    return (folder / _REPORT).exists()


def who(rank: int, status: Status | None) -> str:
    """A rank with its stages, such as "rank 1 (stage 3)"."""
    if status is None or not status.description:
        return f"rank {rank}"
    return f"rank {rank} ({status.description})"


def ended_by_itself(name: str, code: int, status: Status | None) -> str:
    """What is said of a process that code of its own has ended, or code that it called.

    Args:
        name: of the rank.
        code: its exit code.
    """
    return f"{name} ended by itself with exit code {code}{where(status)}"


def where(status: Status | None) -> str:
    """The action that a rank is in, with a blank before it; "" where it is not known."""
    return f" {status.action}" if status is not None and status.process else ""


def memory_words(status: Status | None) -> str:
    """The memory that a process used last, beside the plan's; "" where it is not known."""
    if status is None or not status.used_bytes:
        return ""
    used = f" ({format_bytes(status.used_bytes)} in use"
    if not status.predicted_bytes:
        return f"{used})"
    return f"{used}, {format_bytes(status.predicted_bytes)} predicted)"
