"""How a rank ends: one rank of a host says why, and none outlives the process that started it.

A rank that fails, or that a signal ends, takes the word before it speaks; the first one gets it.
Under `planner launch --nproc` the word is a byte in a pipe that the launcher has filled, under
torchrun a file in the folder that torchrun makes for the ranks of this host. Under anything else
nobody can take it from another rank, and each one speaks.

A rank that SIGKILL ends says nothing, so torchrun's ranks look after each other: each holds a lock
on a file in that folder, which the system releases with the process. The launcher needs no locks:
it sees how its children end.

A thread of each rank waits for the end of the parent, and for signals, which Python would handle
only when gloo returns. It ends the process group: the rank and its children. Asking Linux for a
signal at the parent's death (PR_SET_PDEATHSIG) would end the rank before it can end its children.

Every rank has a page with the action that it is in (`failures/page.py`). Torchrun's ranks of a host
are watched by a guard, a process beside them, because a rank that is stopped cannot watch itself.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import NoReturn

from planner.launcher.failures.guard import PAGE, start_guard, take_the_word
from planner.launcher.failures.page import Glance, Page, Phase, page_in, page_of
from planner.launcher.failures.words import memory_words, where, who

LAUNCHER, WORD, LISTENER = "PLANNER_LAUNCHER", "PLANNER_WORD_FD", "PLANNER_LISTENER_FD"
PAGES = "PLANNER_PAGES_FD"
"""Variables that the launcher gives to its ranks: its process id, the pipe with the word, for rank
0 the socket that the store listens on, and the memory with the pages of all ranks.
"""
LEFT = 75
"""Exit code of a rank that ends because another one has."""
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
GRACE_S = 3.0
"""Time that Ctrl-C gives a rank to end by itself, in s."""
POLL_S = 0.5
"""Interval at which the parent is looked for where it cannot be waited for, in s."""
SPEAK_S = 1.0
"""Longest time that last words may hold up the end of a rank, in s."""

_NAME = "planner-rank-"


@dataclass(slots=True)
class Rank:
    """This process, as one of several.

    Attributes:
        rank: over all hosts.
        parent: process id of the launcher or of torchrun's agent; None under anything else.
        launched: whether the parent is `planner launch --nproc`, or `topology probe`.
        listener: descriptor of the socket for the store, on rank 0 of a launcher.
        pipe: descriptor of the pipe with the word, under a launcher.
        folder: of the ranks of this host, under torchrun.
        page: where it writes the action that it is in.
    """

    rank: int
    parent: int | None = None
    launched: bool = False
    listener: int | None = None
    pipe: int | None = None
    folder: Path | None = None
    page: Page = field(default_factory=Page)
    _speaking: threading.Lock = field(default_factory=threading.Lock)
    _lock_file: int | None = None

    @contextmanager
    def speaking(self) -> Iterator[bool]:
        """Whether this rank has the word; while it speaks, no SIGTERM ends it."""
        with self._speaking:
            yield self._takes_the_word()

    def say_last(self, text: str) -> None:
        """Speaks, if this rank has the word, before its process ends at once: neither a rank that
        is speaking already nor a reader that does not read holds it up for long.
        """
        if not self._speaking.acquire(timeout=SPEAK_S):
            return
        with suppress(OSError):
            if self._takes_the_word() and select([], [2], [], SPEAK_S)[1]:
                os.write(2, f"Error: {text}\n".encode())

    def _takes_the_word(self) -> bool:
        if self.pipe is not None:
            return os.read(self.pipe, 1) != b""
        if self.folder is None:
            return True
        return take_the_word(self.folder)

    def register(self) -> None:
        """Lets the other ranks of this host see when this one ends."""
        if self.folder is None:
            return
        import fcntl  # not on Windows

        try:
            self._lock_file = os.open(self._file(self.rank), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.getpgrp() == os.getpid():
                os.write(self._lock_file, str(os.getpid()).encode())
        except OSError:  # a file system without locks, or a process that a rank has started
            self._lock_file = None

    def leave(self, code: int) -> NoReturn:
        """Ends this process at once, and what it has started; the other ranks do not miss one that
        has done its work. The main thread calls it.
        """
        if code == 0:
            self.end_work()
        if self.parent is not None and os.getpgrp() == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(os.getpid(), signal.SIGTERM)
        # Not by sys.exit: while Python ends, gloo's threads may still free tensors, for which they
        # need Python, and abort the process. That happened in 7 of 45 short runs with a core per
        # rank.
        os._exit(code)

    def end_work(self) -> None:
        """After the last step: from now on, no other rank misses this one."""
        self.page.enter(Phase.ENDED)
        if self._lock_file is not None:
            self._file(self.rank).unlink(missing_ok=True)

    def missing(self) -> list[int]:
        """The ranks of this host that have ended without leaving, as far as can be seen."""
        if self.folder is None or self._lock_file is None:
            return []
        ranks = {int(path.name.removeprefix(_NAME)) for path in self.folder.glob(f"{_NAME}*")}
        return [rank for rank in sorted(ranks - {self.rank}) if _is_free(self._file(rank))]

    def end_children_of_missing(self) -> None:
        """Ends what the missing ranks have started: torchrun ends the groups of living ones only.
        Their groups keep the numbers of their leaders from being given to other processes.
        """
        for rank in self.missing():
            with suppress(OSError, ValueError):  # no group of its own, or nobody is left in it
                os.killpg(int(self._file(rank).read_bytes()), signal.SIGKILL)

    def _file(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{_NAME}{rank}"

    def loss(self) -> str:
        """What is known about the rank whose end ends this one."""
        missing = self.missing()
        if not missing:
            return f"rank {self.rank} stops because another rank has ended"
        if len(missing) > 1:
            ranks = " and ".join(f"rank {rank}" for rank in missing)
            return f"{ranks} have ended without a word: killed by a signal, or out of memory"
        glance = self._page_of(missing[0])
        return (
            f"{who(missing[0], glance)} has ended without a word{where(glance)}: killed by a "
            f"signal, or out of memory{memory_words(glance)}"
        )

    def _page_of(self, rank: int) -> Glance | None:
        assert self.folder is not None
        try:
            return page_in(self.folder / f"{PAGE}{rank}").look()
        except (OSError, ValueError):  # it ended before it had one
            return None


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock of a file any more."""
    import fcntl  # not on Windows

    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or its rank has left
        return False
    return True


_here: Rank | None = None
_alone = Page()


def here() -> Rank | None:
    """This process as one of several; None if it is none, or `enter` was not called."""
    return _here


def page() -> Page:
    """Where this process writes the action that it is in."""
    return _alone if _here is None else _here.page


def enter() -> Rank | None:
    """Makes this process one of several, if it was started as such: it begins to wait for the end
    of its parent and for signals.

    The launcher's variables are taken out of the environment: this rank's own children are no
    ranks.
    """
    global _here
    if not os.environ.get("RANK", "").isdigit():
        return None
    _here = _from_environment(os.environ)
    for name in (LAUNCHER, WORD, LISTENER, PAGES):
        os.environ.pop(name, None)
    for descriptor in (_here.pipe, _here.listener):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    # Whoever loses the store's process would print a page about it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _here.register()
    _here.page.begin()
    _watch(_here)
    if _here.folder and _here.parent and os.environ.get("LOCAL_RANK") == "0":
        start_guard(_here.folder, _here.parent)
    return _here


def _from_environment(variables: Mapping[str, str]) -> Rank:
    def number(name: str) -> int | None:
        return int(variables[name]) if name in variables else None

    rank = int(variables["RANK"])
    if LAUNCHER in variables:
        own = page_of(int(variables[PAGES]), rank)
        return Rank(rank, number(LAUNCHER), True, number(LISTENER), number(WORD), page=own)
    if "TORCHELASTIC_RUN_ID" not in variables:
        return Rank(rank)
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/LOCAL_RANK/error.json
    folder = Path(error_file).parent.parent if error_file else None
    if folder is None or not folder.is_dir():
        return Rank(rank, os.getppid())
    return Rank(rank, os.getppid(), folder=folder, page=_made(folder / f"{PAGE}{rank}"))


def _made(file: Path) -> Page:
    try:
        return page_in(file, make=True)
    except OSError:  # torchrun's folder is full: nobody watches this rank
        return Page()


# ------------------------------------------------------------------------ the thread that waits


def _watch(rank: Rank) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python writes the number of a signal into the pipe at once, and calls the handler when the
    # main thread can. The handler acts where a user's event loop has taken the pipe over.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: _in_thread(_terminated, rank))
    _in_thread(_wait, rank, reader)


def _in_thread(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _wait(rank: Rank, signals: int) -> None:
    life = None if rank.parent is None else _life_of(rank.parent)
    waited_for = [signals] if life is None else [signals, life]
    while True:
        ready, _, _ = select(waited_for, [], [], POLL_S if life is None else None)
        if life in ready or rank.parent not in (None, os.getppid()):
            _orphaned(rank)
        numbers = os.read(signals, 64) if signals in ready else b""
        if signal.SIGTERM in numbers:
            _terminated(rank)
        if signal.SIGINT in numbers:
            time.sleep(GRACE_S)  # in which KeyboardInterrupt ends the main thread
            os._exit(INTERRUPTED)


def _life_of(parent: int) -> int | None:
    """A descriptor that becomes readable when the parent ends; None where there is none, or where
    it has ended already.
    """
    try:
        life = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not Linux, or an old one
        return None
    if os.getppid() != parent:  # the number may be another process's by now
        os.close(life)
        return None
    return life


def _orphaned(rank: Rank) -> NoReturn:
    _end(rank, f"rank {rank.rank} ends because the process that started it has ended")


def end_at_once(message: str) -> NoReturn:
    """Ends this process, and what it has started, from any thread."""
    if _here is None:
        os.write(2, f"Error: {message}\n".encode())
        os._exit(LEFT)
    _end(_here, message)


def _end(rank: Rank, message: str) -> NoReturn:
    rank.say_last(message)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(LEFT)


def _terminated(rank: Rank) -> NoReturn:
    """Ends the rank and its children as SIGTERM does. Under a launcher, that one says so. Under
    torchrun, the signal may come from it because another rank has ended.
    """
    if not rank.launched:
        glance = rank.page.look()
        ended = f"{who(rank.rank, glance)} was ended by SIGTERM{where(glance)}"
        rank.say_last(rank.loss() if rank.missing() else ended)
        rank.end_children_of_missing()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGTERM)
    os._exit(TERMINATED)
