"""`planner launch --nproc N` and `planner topology probe --nproc N`: the ranks of one host, as
children of this process.

Each rank leads a session of its own, so its children are ended with it, and Ctrl-C reaches this
process alone. Ranks whose parent is killed end by themselves: `planner.launcher.ending`.

The store is rank 0's. It listens on a socket that is bound to the loopback address here; torchrun's
listens on all addresses of the host.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from planner.launcher.ending import (
    INTERRUPTED,
    LAUNCHER,
    LEFT,
    LISTENER,
    PAGES,
    TERMINATED,
    WORD,
)
from planner.launcher.failures.guard import LOOK_S
from planner.launcher.failures.limits import Hang, Watch
from planner.launcher.failures.page import Glance, Page, page_of, pages_file
from planner.launcher.failures.words import memory_words, where, who
from planner.support.errors import LaunchError
from planner.support.forked import signal_name

# A checkout and an installed wheel both have cli.py beside the package.
CLI = Path(__file__).resolve().parents[2] / "cli.py"
LOOPBACK = "127.0.0.1"
POLL_S = 0.05
"""Interval at which the ranks are looked at, in s."""
CAUSE_S = 2.0
"""Time in which the cause is found after a rank has ended because another one had, in s."""
END_S = 3.0
"""Time that SIGTERM gives the ranks before SIGKILL, in s."""
Streams = tuple[IO[bytes] | None, IO[bytes] | None]
"""Standard output and standard error; None is that of this process."""
INHERITED: Streams = (None, None)
SIGNAL_OF = {TERMINATED: signal.SIGTERM, INTERRUPTED: signal.SIGINT}


def torchrun_command(strategy: Path, num_ranks: int) -> str:
    """The command that starts the ranks of a strategy, to be shown to the user."""
    path = shlex.quote(str(strategy))
    return f"torchrun --nproc-per-node {num_ranks} --no-python planner launch {path}"


def start_ranks(command: Sequence[str], nproc: int, streams: Streams = INHERITED) -> int:
    """Runs `planner COMMAND` in N processes, and waits for them. None of them is left however this
    function ends, by Ctrl-C for example.

    Args:
        command: the command and its options, without --nproc.
        nproc: N.
        streams: of the ranks.

    Returns:
        The exit code: 0, or 1 if a rank has failed and printed the reason.

    Raises:
        LaunchError: if a rank was killed.
    """
    sys.stdout.flush()
    # Not by torchrun's agent: of several failed ranks it reports the one with the smallest time in
    # whole seconds, which is often one that only lost its connection, and it imports torch.
    with _running([sys.executable, "-u", str(CLI), *command], nproc, streams) as (ranks, pages):
        codes = _wait(ranks, Watch(pages, nproc))
    if isinstance(codes, Hang):
        raise LaunchError(codes.message)
    ended_by = [
        (rank, SIGNAL_OF.get(code, -code))
        for rank, code in codes.items()
        if code < 0 or code in SIGNAL_OF
    ]
    if ended_by:
        rank, number = ended_by[0]
        raise LaunchError(_obituary(rank, number, pages[rank].look()))
    if codes and {*codes.values()} == {LEFT}:
        raise LaunchError(f"rank {min(codes)} has lost its connections to the others")
    return 1 if codes else 0


def _obituary(rank: int, number: int, glance: Glance | None = None) -> str:
    why = ""
    if number == signal.SIGKILL:
        why = f"; it may have been out of memory{memory_words(glance)}"
    return f"{who(rank, glance)} was ended by {signal_name(number)}{where(glance)}{why}"


@contextmanager
def _running(
    command: Sequence[str], nproc: int, streams: Streams
) -> Iterator[tuple[list[subprocess.Popen[bytes]], dict[int, Page]]]:
    """The processes, which have ended when the context does, and their pages."""
    shared = pages_file(nproc)
    pages = {rank: page_of(shared, rank) for rank in range(nproc)}
    word, writer = os.pipe()
    os.write(writer, b"!")
    os.close(writer)  # a second one who wants the word finds the end of the pipe
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            for rank in range(nproc):
                passed = {WORD: word, PAGES: shared}
                passed |= {LISTENER: listener.fileno()} if rank == 0 else {}
                seat = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc,
                    "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": listener.getsockname()[1], LAUNCHER: os.getpid(), **passed,
                }  # fmt: skip
                # One thread each, unless a rank is told otherwise: they share the cores.
                variables = {"OMP_NUM_THREADS": "1", **os.environ}
                variables.update({name: str(value) for name, value in seat.items()})
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=variables,
                        pass_fds=[*passed.values()],
                        start_new_session=True,
                        stdout=streams[0],
                        stderr=streams[1],
                    )
                )
        yield ranks, pages
    finally:
        os.close(word)
        os.close(shared)
        _end(ranks)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], watch: Watch) -> dict[int, int] | Hang:
    """Waits until all have succeeded, or until the cause of a failure is known.

    Returns:
        Exit codes of the ranks that have failed, negative for signals; or the ranks that hang.
    """
    patience, looked_s = CAUSE_S, 0.0
    while True:
        codes = {rank: _exit_code(process) for rank, process in enumerate(ranks)}
        failed = {rank: code for rank, code in codes.items() if code}
        if {*failed.values()} - {LEFT} or (failed and patience <= 0):
            return failed
        if None not in codes.values():
            return failed
        if failed:
            patience -= POLL_S
        elif (now_s := time.monotonic()) - looked_s >= LOOK_S:
            looked_s = now_s
            if (hang := watch.look(now_s)) is not None:
                return hang
        time.sleep(POLL_S)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As `poll` has it. The process stays known to the system where that is possible, so that its
    process group cannot become another one's before it is ended.
    """
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll()
    try:
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # whoever started the planner has it ignore the ends of children
        return process.poll()
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the ranks, and what they have started."""
    running = [process for process in ranks if _exit_code(process) is None]
    for process in running:
        _signal_group(process, signal.SIGTERM)
    limit_s = time.monotonic() + END_S
    while time.monotonic() < limit_s and any(_exit_code(process) is None for process in running):
        time.sleep(POLL_S)
    for process in ranks:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(process.pid, number)
