"""This process as one rank of several: how it ends, and whether it says why.

The ranks of a host share a folder (`status.py`). Whoever fails, or is ended by a signal, claims the
report there before it speaks, and the first one gets it. Without a folder, nobody can claim it from
another rank, and each one speaks. A rank that SIGKILL ends says nothing. Under `planner launch
--nproc` the launcher sees it, beside torchrun the other ranks do: the lock of its status is free.

A thread of each rank waits for the end of the parent, and for signals, which Python would handle
only when gloo returns. It ends the process group: the rank and its children. Asking Linux for a
signal at the parent's death (PR_SET_PDEATHSIG) would end the rank before it can end its children.

The command line speaks for its ranks. A script of the user ends by Python's own hook for errors
that nobody has caught, so that is where such a rank speaks.

Torchrun's ranks have a monitor beside them (`monitor.py`), because a rank that is stopped cannot
see that it hangs.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from types import TracebackType
from typing import NoReturn

from planner.launcher.failures.requests import REQUEST
from planner.launcher.failures.status import (
    Phase,
    Status,
    StatusFile,
    claim_report,
    is_reported,
    memory_words,
    status_paths,
    where,
    who,
)
from planner.support.errors import PlannerError, Stopped

LAUNCHER, FOLDER, LISTENER = "PLANNER_LAUNCHER", "PLANNER_RANKS", "PLANNER_LISTENER_FD"
"""Variables that the launcher gives to its ranks: its process id, the folder of the ranks and, for
rank 0, the socket that the store listens on.
"""
FAILED = 1
LEFT = 75
"""Exit code of a rank that ends because another one has."""
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
GRACE_S = 3.0
"""Time that Ctrl-C gives a rank to end by itself, in s."""
POLL_S = 0.5
"""Interval at which the parent is looked for where it cannot be waited for, in s."""
REPORT_S = 1.0
"""Longest time that a report may hold up the end of a rank, in s."""


@dataclass(slots=True)
class RankProcess:
    """This process, as one of several.

    Attributes:
        rank: over all hosts.
        parent: process id of the launcher or of torchrun's agent; None under anything else.
        has_launcher: whether the parent is `planner launch --nproc`, or `topology probe`: it says
            how ranks have ended.
        listener: descriptor of the socket for the store, on rank 0 of a launcher.
        folder: of the ranks of this host; None if they have none.
        status: where it writes the action that it is in.
    """

    rank: int
    parent: int | None = None
    has_launcher: bool = False
    listener: int | None = None
    folder: Path | None = None
    status: StatusFile = field(default_factory=StatusFile)
    _reporting: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def reporter_lock(self, *, of_an_end: bool = False) -> Iterator[bool]:
        """Whether this rank says why the launch ends; while it does, no SIGTERM ends it.

        Args:
            of_an_end: whether it is that a process has ended, which a launcher says itself.
        """
        with self._reporting:
            yield self._claims_report(of_an_end)

    def report_before_exit(self, text: str, *, of_an_end: bool = False) -> None:
        """Says why the launch ends, if no other rank has, before this process ends at once: neither
        a report that is under way nor a reader that does not read holds it up for long.
        """
        if not self._reporting.acquire(timeout=REPORT_S):
            return
        with suppress(OSError):
            if self._claims_report(of_an_end) and select([], [2], [], REPORT_S)[1]:
                os.write(2, f"Error: {text}\n".encode())

    def _claims_report(self, of_an_end: bool) -> bool:
        if of_an_end and self.has_launcher:
            return False
        return self.folder is None or claim_report(self.folder)

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
        self.status.enter(Phase.ENDED)

    def lost_ranks(self) -> dict[int, Status]:
        """The ranks of this host that have ended without a word, as far as can be seen."""
        found = {}
        paths = {} if self.folder is None else status_paths(self.folder)
        for rank in sorted(paths.keys() - {self.rank}):
            with suppress(OSError, ValueError):  # it is about to be made, or the folder is gone
                file = StatusFile.at(paths[rank])
                if file.has_died():
                    found[rank] = file.look()
        return found

    def has_lost_others(self) -> bool:
        """Whether the launch is over, as far as can be seen: another rank has failed."""
        return bool(self.lost_ranks()) or (self.folder is not None and is_reported(self.folder))

    def end_children_of_lost_ranks(self) -> None:
        """Ends what the lost ranks have started: torchrun ends the groups of living ones only.
        Their groups keep the numbers of their leaders from being given to other processes.
        """
        for status in self.lost_ranks().values():
            if status.leads_group:
                with suppress(OSError):  # nobody is left in it
                    os.killpg(status.process, signal.SIGKILL)

    def lost_rank_message(self) -> str:
        """What is known about the rank whose end ends this one."""
        lost = self.lost_ranks()
        if not lost:
            return f"rank {self.rank} stops because another rank has ended"
        if len(lost) > 1:
            ranks = " and ".join(f"rank {rank}" for rank in lost)
            return (
                f"{ranks} have ended without a word: by code that they ran, killed by a signal, or"
                " out of memory"
            )
        ((rank, status),) = lost.items()
        return (
            f"{who(rank, status)} has ended without a word{where(status)}: by code that it ran,"
            f" killed by a signal, or out of memory{memory_words(status)}"
        )


_current: RankProcess | None = None
_alone = StatusFile()


def current_rank() -> RankProcess | None:
    """This process as one of several; None if it is none, or `enter` was not called."""
    return _current


def current_status() -> StatusFile:
    """Where this process writes the action that it is in."""
    return _alone if _current is None else _current.status


def enter() -> RankProcess | None:
    """Makes this process one of several, if it was started as such: it begins to wait for the end
    of its parent and for signals.

    The launcher's variables are taken out of the environment: this rank's own children are no
    ranks.
    """
    global _current
    if not os.environ.get("RANK", "").isdigit():
        return None
    _current = rank = _from_environment(os.environ)
    for name in (LAUNCHER, FOLDER, LISTENER):
        os.environ.pop(name, None)
    if rank.listener is not None:
        os.set_inheritable(rank.listener, False)
    # Whoever loses the store's process would print a page about it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if rank.folder is not None:
        with suppress(OSError):  # a folder that is full, or a process that a rank has started
            rank.status = StatusFile.of_this_process(rank.folder, rank.rank)
    _wait_in_thread(rank)
    is_first = os.environ.get("LOCAL_RANK") == "0"
    if is_first and rank.folder and rank.parent and not rank.has_launcher:
        _start_monitor(rank.folder, rank.parent)
    return rank


def _from_environment(variables: Mapping[str, str]) -> RankProcess:
    rank = int(variables["RANK"])
    if LAUNCHER in variables:
        listener = int(variables[LISTENER]) if LISTENER in variables else None
        ours = Path(variables[FOLDER])
        return RankProcess(rank, int(variables[LAUNCHER]), True, listener, ours)
    if "TORCHELASTIC_RUN_ID" not in variables:
        return RankProcess(rank)
    error_file = variables.get("TORCHELASTIC_ERROR_FILE")  # FOLDER/LOCAL_RANK/error.json
    folder = Path(error_file).parent.parent if error_file else None
    is_there = folder is not None and folder.is_dir()
    return RankProcess(rank, os.getppid(), folder=folder if is_there else None)


def _start_monitor(folder: Path, agent: int) -> None:
    """Starts the monitor of torchrun's ranks.

    Args:
        agent: process id of torchrun's.
    """
    root = Path(__file__).resolve().parents[3]
    module = "planner.launcher.failures.monitor"
    command = [sys.executable, "-m", module, str(folder), str(agent), os.environ["WORLD_SIZE"]]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


# ------------------------------------------------------------------------ the thread that waits


def _wait_in_thread(rank: RankProcess) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # Python writes the number of a signal into the pipe at once, and calls the handler when the
    # main thread can. The handler acts where a user's event loop has taken the pipe over.
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, frame: _in_thread(_terminated, rank, "handler"))
    _in_thread(_wait, rank, reader)


def _in_thread(function: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def _wait(rank: RankProcess, signals: int) -> None:
    life = None if rank.parent is None else _life_of(rank.parent)
    waited_for = [signals] if life is None else [signals, life]
    while True:
        ready, _, _ = select(waited_for, [], [], POLL_S if life is None else None)
        if life in ready or rank.parent not in (None, os.getppid()):
            orphaned = f"rank {rank.rank} ends because the process that started it has ended"
            _end(rank, orphaned, signal.SIGKILL, LEFT)
        numbers = os.read(signals, 64) if signals in ready else b""
        if signal.SIGTERM in numbers:
            _terminated(rank, "thread")
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


def report_and_exit(message: str) -> NoReturn:
    """Ends this process, and what it has started, from any thread."""
    if _current is None:
        os.write(2, f"Error: {message}\n".encode())
        os._exit(LEFT)
    _end(_current, message, signal.SIGKILL, LEFT)


def _terminated(rank: RankProcess, way: str) -> None:
    """Ends the rank as SIGTERM does, which torchrun sends when another rank has ended. If none has,
    it may be a request to save first.

    Args:
        way: that the signal has come, see `EndRequest`.
    """
    if not rank.has_lost_others() and REQUEST.takes(signal.SIGTERM, way):
        return
    status = rank.status.look()
    ended = f"{who(rank.rank, status)} was ended by SIGTERM{where(status)}"
    message = rank.lost_rank_message() if rank.lost_ranks() else ended
    _end(rank, message, signal.SIGTERM, TERMINATED, of_an_end=True)


def _end(
    rank: RankProcess, message: str, number: int, code: int, *, of_an_end: bool = False
) -> NoReturn:
    """Ends the rank and what it has started, and what lost ranks have."""
    rank.report_before_exit(message, of_an_end=of_an_end)
    rank.end_children_of_lost_ranks()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), number)
    os._exit(code)


# --------------------------------------------------------------------------- a script of the user

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_hooks: list[Hook] = []


def enter_from_script() -> None:
    """Makes the process of a user's script one of several, if torchrun has started it and it is
    none yet. Python tells the main thread alone of signals, so that one has to call it.
    """
    if _current is not None or threading.current_thread() is not threading.main_thread():
        return
    rank, usual = enter(), sys.excepthook
    if rank is not None:
        _hooks.append(lambda *error: _report_and_leave(rank, usual, *error))
        take_error_hook()


def take_error_hook() -> None:
    """Takes Python's hook again: torch.distributed wraps it in one that keeps what is written until
    it returns, which it does not.
    """
    sys.excepthook = _hooks[0] if _hooks else sys.excepthook


def _report_and_leave(
    rank: RankProcess,
    usual: Hook,
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """Says why this rank ends, if no other one has, and ends it."""
    sys.stdout.flush()
    if isinstance(error, KeyboardInterrupt):
        rank.leave(INTERRUPTED)
    with rank.reporter_lock() as is_reporter:
        if is_reporter and not isinstance(error, PlannerError):
            usual(kind, error, traceback)
        elif is_reporter:
            text = rank.lost_rank_message() if isinstance(error, Stopped) else str(error)
            print(f"Error: {text}", file=sys.stderr, flush=True)  # noqa: T201, the rank's report
    if isinstance(error, Stopped):
        rank.end_children_of_lost_ranks()
        rank.leave(LEFT)
    rank.leave(FAILED)
