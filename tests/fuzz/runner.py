"""A command of the planner in a forked process, with limits of time and memory.

The process that forks has imported everything and has run every command once, so that a case does
not pay for it.
"""

import faulthandler
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CRASHED = 70  # exit code of a command that ended with an exception


@dataclass(frozen=True, slots=True)
class Limits:
    """What a command may take.

    Attributes:
        seconds: until it is called hanging.
        data_bytes: of memory that it may ask for.
    """

    seconds: float = 60.0
    data_bytes: int = 6 * 2**30


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: exit code; None if a signal ended it.
        signal: that ended it; None if none did.
        timed_out: whether it ran past the limit, and was killed.
        seconds: it ran.
        stdout: what it printed.
        stderr: the same, of errors.
    """

    code: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    stdout: bytes
    stderr: bytes


def run(
    arguments: Sequence[str],
    folder: Path,
    aside: Path,
    limits: Limits,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """Runs `planner ARGUMENTS` in a folder.

    Args:
        folder: to run in.
        aside: another one, for what is printed and for caches.
        limits: of the command.
        before: called in the new process; tests put a mistake into the package with it.
    """
    out, err = aside / "stdout", aside / "stderr"
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    # The writing end is open until the process and all that it started have ended.
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of threads, which do not exist in the new process; those here are idle.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _be_the_command(arguments, folder, aside, (out, err), limits, before)
    os.close(writing)
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(child, child)  # as the child does; whoever comes first
    try:
        ended = bool(select.select([reading], [], [], limits.seconds)[0])
        seconds = time.monotonic() - started
        if not ended:
            os.killpg(child, signal.SIGKILL)
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    return Outcome(
        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        timed_out=not ended,
        seconds=seconds,
        stdout=out.read_bytes(),
        stderr=err.read_bytes(),
    )


def _be_the_command(
    arguments: Sequence[str],
    folder: Path,
    aside: Path,
    streams: tuple[Path, Path],
    limits: Limits,
    before: Callable[[], None] | None,
) -> None:
    """Never returns."""
    code = CRASHED
    try:
        os.setpgid(0, 0)
        _redirect(streams)
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = str(aside / "cache")
        _limit(limits)
        # Where it was, if it is killed.
        faulthandler.dump_traceback_later(max(0.5, limits.seconds - 1), file=2)
        if before is not None:
            before()
        code = _invoke(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, UnicodeError):
                code = CRASHED
        os._exit(code)


def _redirect(streams: tuple[Path, Path]) -> None:
    """Files for standard output and error, nothing for input; as text that Python writes there."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _limit(limits: Limits) -> None:
    """Memory by the system; of processor time as much as a command can use at all, in case that
    nobody is left who would end it.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (limits.data_bytes, limits.data_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = 4 * round(limits.seconds) + 4
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _invoke(arguments: Sequence[str]) -> int:
    """The exit code, as `planner` has it."""
    import cli

    sys.argv = ["planner", *arguments]
    try:
        cli.start()
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        if end.code is not None:
            print(end.code, file=sys.stderr)
        return 0 if end.code is None else 1
    return 0
