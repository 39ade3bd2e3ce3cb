"""A function that runs in a process of its own: what ends that process does not end this one.

The process is a fork. It knows all that this one knows, also what no other interpreter could
import: models in memory, closures, functions that the user has defined in a script or a notebook.
It starts in 10 ms, where a new interpreter needs 2 s to import torch.

A fork has the calling thread alone, so a lock that another thread holds at that moment is never
given back there. That other thread may be a progress bar's or that of an idle pool; functions that
compute on one thread do not meet their locks. Standard output and standard error, which a progress
bar locks, are other objects in the fork. Should it stand still nevertheless, it is ended.

Only Linux forks. On macOS the system's libraries do not survive a fork, and Windows has none: there
the function runs in this process.
"""

import ctypes
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Self, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

FORKS = sys.platform == "linux"
"""Whether functions run in processes of their own."""
CPU_LIMIT_S = 120
"""CPU time for one answer; the system ends a process that takes longer."""
LOOK_S, STILL_LOOKS = 1.0, 120
"""Interval at which a process without an answer is looked at, and the number of looks in a row
without any CPU time used after which it is ended. They are counted, not timed: Ctrl-Z stops both
processes."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class EndedError(Exception):
    """A process ended before it answered; the text says by what, such as "SIGSEGV"."""


class _Child(NamedTuple):
    process: int
    connection: "Connection[Any, Any]"


class Forked(Generic[Question, Answer]):
    """A function whose process starts with the first question; after its end, another one starts
    with the next question. What the function keeps between questions ends with its process.

    It is a context, at whose end the process is ended. If this process dies, so does the other.
    """

    def __init__(
        self, function: Callable[[Question], Answer], cpu_limit_s: int | None = None
    ) -> None:
        """Starts nothing.

        Args:
            function: its questions and answers can be pickled; it may keep its process from ending
                in any way, and does not use what other threads have locked.
            cpu_limit_s: CPU time for one answer; None for `CPU_LIMIT_S`.
        """
        self._function = function
        self._cpu_limit_s = cpu_limit_s
        self._child: _Child | None = None
        self._waiting: list[Question] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, question: Question) -> Answer:
        """The function's answer.

        Raises:
            EndedError: if the process ended before it answered.
            RuntimeError: if the function raised an error, whose traceback it has.
        """
        self.ask(question)
        return self.answer()

    def ask(self, question: Question) -> None:
        """Asks, and does not wait: this process does something else meanwhile. Where nothing forks,
        the function runs when the answer is wanted.

        Raises:
            EndedError: if the process has ended.
        """
        if self._child is None:
            self._start()
        if self._child is None:
            self._waiting = [question]
            return
        try:
            self._child.connection.send(question)
        except ConnectionError:
            raise EndedError(self._end()) from None

    def answer(self, over: Callable[[], bool] = lambda: False) -> Answer:
        """The answer to what was asked.

        Args:
            over: says whether to wait no longer: the process is ended then.

        Raises:
            EndedError: if the process ended before it answered, or was ended.
            RuntimeError: if the function raised an error, whose traceback it has.
        """
        if self._child is None:
            return self._function(self._waiting.pop())
        try:
            if not _has_answered(self._child, over):
                self._end()
                raise EndedError(f"no progress in {round(STILL_LOOKS * LOOK_S)} s")
            answer, error = self._child.connection.recv()
        except (EOFError, ConnectionError):
            raise EndedError(self._end()) from None
        if error is not None:
            raise RuntimeError(error)
        made: Answer = answer
        return made

    def _start(self) -> None:
        """Starts the process, where the system lets it."""
        if not FORKS:
            return
        from multiprocessing import Pipe

        own, other = Pipe()
        parent = os.getpid()
        with _undisturbed():
            try:
                process = os.fork()
            except OSError:  # too many processes, or no memory for another one
                own.close()
                other.close()
                return
            if process == 0:
                own.close()
                _serve(self._function, other, parent, self._cpu_limit_s)
            self._child = _Child(process, own)
        other.close()

    def _end(self) -> str:
        """Ends the process, if there is one, and says by what it had ended."""
        if self._child is None:
            return ""
        process, connection = self._child
        self._child = None
        connection.close()
        try:
            os.kill(process, signal.SIGKILL)  # one that has ended already stays as it ended
            return _words(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        except (
            ChildProcessError,
            ProcessLookupError,
        ):  # whoever runs Python waits for all children
            return "an unknown signal"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Neither Ctrl-C nor SIGTERM comes between a fork and what each side does first; Python, from
    3.12 on, does not warn of other threads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_answered(child: _Child, over: Callable[[], bool]) -> bool:
    """Waits until a process has answered or ended; False if it stands still, or nobody waits on."""
    used: int | None = None
    still = 0
    while not child.connection.poll(LOOK_S):
        if over():
            return False
        before, used = used, _ticks(child.process)
        still = still + 1 if used is not None and used == before else 0
        if still >= STILL_LOOKS:
            return False
    return True


def _ticks(process: int) -> int | None:
    """CPU time that a process has used, in the system's ticks; None where the system hides it."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


def signal_name(number: int) -> str:
    """The name of a signal.

    >>> signal_name(11)
    'SIGSEGV'
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal_name(-code)
    return f"{name} after {CPU_LIMIT_S} s of CPU time" if name == "SIGXCPU" else name


# ---- in the process


def _serve(
    function: Callable[[Any], object],
    questions: "Connection[Any, Any]",
    parent: int,
    cpu_limit_s: int | None,
) -> NoReturn:
    """Answers questions until the parent closes the connection. The process ends without the steps
    with which Python ends one: what there is to tidy up is the parent's.
    """
    try:
        _detach(parent)
        while True:
            question = questions.recv()
            _limit(CPU_LIMIT_S if cpu_limit_s is None else cpu_limit_s)
            questions.send(_answered(function, question))
    except (EOFError, ConnectionError):
        os._exit(0)
    finally:
        os._exit(1)


def _answered(function: Callable[[Any], object], question: object) -> tuple[object, str | None]:
    """The answer, or the traceback of an error: another process may not know the error's class."""
    try:
        return function(question), None
    except Exception as error:
        return None, "".join(traceback.format_exception(error))


def _detach(parent: int) -> None:
    """Lets go of what is the parent's: its signals, its streams, its garbage."""
    signal.set_wakeup_fd(-1)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the parent, which ends this process
    for number in (signal.SIGTERM, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_DUMPABLE, 0)  # no file as large as the parent's memory
    if os.getppid() != parent:  # it ended before this process asked to be told
        os._exit(0)
    with suppress(OSError):  # there is no standard error
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    gc.freeze()  # no destructor of the parent's objects runs here


def _limit(cpu_limit_s: int) -> None:
    """Gives the process CPU time for one answer."""
    import resource  # not on Windows

    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit_s = ceil(process_time()) + cpu_limit_s
    if most != resource.RLIM_INFINITY:
        limit_s = min(limit_s, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, most))
