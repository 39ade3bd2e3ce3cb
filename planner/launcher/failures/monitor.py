"""`Monitor`: looks after the ranks of a host, and ends those that hang.

    planner launch --nproc N, planner topology probe --nproc N
        The ranks are children of this process, which is their monitor.
    python -m planner.launcher.failures.monitor FOLDER AGENT WORLD_SIZE
        Beside torchrun's ranks, whose agent knows nothing of hangs: it kills the rank that hangs,
        and torchrun ends the others, or starts all again. It ends with the agent or the last rank.

Under `--nproc` each rank leads a session of its own, so its children are ended with it, and Ctrl-C
reaches this process alone. Ranks whose parent is killed end by themselves (`rank.py`). The store is
rank 0's. It listens on a socket that is bound to the loopback address here; torchrun's listens on
all addresses of the host.
"""

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from planner.launcher.failures.rank import (
    FOLDER,
    INTERRUPTED,
    LAUNCHER,
    LEFT,
    LISTENER,
    TERMINATED,
)
from planner.launcher.failures.requests import AGAIN_S
from planner.launcher.failures.status import (
    Phase,
    Status,
    StatusFile,
    claim_report,
    ended_by_itself,
    is_reported,
    memory_words,
    status_paths,
    where,
    who,
)
from planner.launcher.failures.watch import Hang, HangDetector, lives, used_bytes
from planner.support.errors import LaunchError
from planner.support.forked import signal_name

# A checkout and an installed wheel both have cli.py beside the package.
CLI = Path(__file__).resolve().parents[3] / "cli.py"
LOOPBACK = "127.0.0.1"
POLL_S = 0.05
"""Interval at which the launcher asks whether its ranks have ended, in s."""
LOOK_S = 0.5
"""Interval at which the status files are looked at, in s."""
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


class Monitor:
    """Looks at the status files of the ranks of a host, again and again.

    Args:
        folder: of the ranks.
        world_size: ranks over all hosts.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self.files: dict[int, StatusFile] = {}
        self._folder = folder
        self._detector = HangDetector(self.files, world_size)

    def look(self, now_s: float) -> Hang | None:
        """Looks at all ranks that have begun, and notes the memory that they use.

        Args:
            now_s: on any clock.

        Returns:
            The first hang, if there is one.
        """
        self.find()
        for file in self.files.values():
            if bytes_now := used_bytes(file.look().process):
                file.note_memory(bytes_now)
        return self._detector.look(now_s)

    def find(self) -> None:
        """Finds the ranks that have begun by now."""
        for rank, path in status_paths(self._folder).items():
            if rank not in self.files:
                with suppress(OSError, ValueError):  # it is about to be made
                    self.files[rank] = StatusFile.at(path)

    def status(self, rank: int) -> Status | None:
        """The last status of a rank; None if it has none."""
        self.find()
        return self.files[rank].look() if rank in self.files else None

    def has_failed(self, rank: int, code: int) -> bool:
        """Whether a rank that has ended with an exit code had not done its work, as far as is
        known. A training that has saved as a signal asked has.
        """
        status = self.status(rank)
        if status is None:
            return code != 0
        return code not in (0, TERMINATED) or status.action.phase is not Phase.ENDED


# -------------------------------------------------------------------------- beside torchrun's ranks


def watch_ranks(folder: Path, agent: int, world_size: int) -> Hang | None:
    """Watches torchrun's ranks of a host until they have ended, or one hangs.

    Args:
        folder: of the ranks.
        agent: process id of torchrun's.
        world_size: ranks over all hosts.
    """
    monitor = Monitor(folder, world_size)
    monitor.find()
    while lives(agent) and any(lives(file.look().process) for file in monitor.files.values()):
        if (hang := monitor.look(time.monotonic())) is not None:
            if claim_report(folder):
                sys.stderr.write(f"Error: {hang.message}\n")
                sys.stderr.flush()
            _kill(monitor.files[rank].look() for rank in hang.ranks)
            return hang
        time.sleep(LOOK_S)
    return None


def _kill(ranks: Iterable[Status]) -> None:
    """Kills ranks, and what they have started."""
    for status in ranks:
        with suppress(ProcessLookupError, PermissionError):
            kill = os.killpg if status.leads_group else os.kill
            kill(status.process, signal.SIGKILL)


# --------------------------------------------------------------------------------- the launcher


def start_ranks(
    command: Sequence[str], nproc: int, streams: Streams = INHERITED,
    passed_on: Sequence[signal.Signals] = (),
) -> int:  # fmt: skip
    """Runs `planner COMMAND` in N processes, and waits for them. None of them is left however this
    function ends, by Ctrl-C for example.

    Args:
        command: the command and its options, without --nproc.
        nproc: N.
        streams: of the ranks.
        passed_on: signals that ask the ranks to save and to end, which is waited for.

    Returns:
        The exit code: 0, 1 if a rank has failed and printed the reason, or TERMINATED if the ranks
        have ended as a signal asked.

    Raises:
        LaunchError: if a rank was killed, or ended by itself.
    """
    sys.stdout.flush()
    # Not by torchrun's agent: of several failed ranks it reports the one with the smallest time in
    # whole seconds, which is often one that only lost its connection, and it imports torch.
    with tempfile.TemporaryDirectory(prefix="planner-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        monitor = Monitor(folder, nproc)
        with _running([sys.executable, "-u", str(CLI), *command], nproc, streams, folder) as ranks:
            with _passing_on(passed_on, ranks) as requests:
                codes, hang = _wait(ranks, monitor)
            by_signal = {LEFT, TERMINATED, *(-one for one in passed_on)}
            if requests and codes and {*codes.values()} <= by_signal:
                sys.stderr.write("stopped by a signal before a step could be saved\n")
                return TERMINATED
            message = _message(codes, monitor, folder) if hang is None else hang.message
            if message is not None:
                raise LaunchError(message)
    if codes and {*codes.values()} == {LEFT}:
        raise LaunchError(f"rank {min(codes)} has lost its connections to the others")
    if codes:
        return 1
    return TERMINATED if any(rank.returncode == TERMINATED for rank in ranks) else 0


@contextmanager
def _passing_on(
    numbers: Sequence[signal.Signals], ranks: Sequence[subprocess.Popen[bytes]]
) -> Iterator[list[float]]:
    """Passes signals on to the ranks meanwhile. The second SIGTERM ends this process.

    Returns:
        When signals have come, by the clock of this process.
    """
    moments: list[float] = []
    before: dict[int, Any] = {}

    def pass_on(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == signal.SIGTERM and moments and now_s - moments[0] >= AGAIN_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)
            return
        if number == signal.SIGTERM or not moments:
            moments.append(now_s)
        for process in ranks:
            if _exit_code(process) is None:
                os.kill(process.pid, number)

    if threading.current_thread() is threading.main_thread():
        before = {one: signal.signal(one, pass_on) or signal.SIG_DFL for one in numbers}
    try:
        yield moments
    finally:
        for one, usual in before.items():
            signal.signal(one, usual)


def _message(codes: Mapping[int, int], monitor: Monitor, folder: Path) -> str | None:
    """Why the first rank has ended that a signal has ended, or that ended by itself; None if a rank
    has said it.

    Args:
        codes: exit codes of the ranks that have failed, negative for signals.
        folder: of the ranks.
    """
    for rank, code in codes.items():
        if code < 0 or code in SIGNAL_OF:
            return _signal_message(rank, SIGNAL_OF.get(code, -code), monitor.status(rank))
    if is_reported(folder):
        return None
    for rank, code in codes.items():
        if code != LEFT:
            status = monitor.status(rank)
            said = ended_by_itself(who(rank, status), code, status)
            return f"{said}: code that it ran has ended the process, by os._exit for example"
    return None


def _signal_message(rank: int, number: int, status: Status | None = None) -> str:
    why = ""
    if number == signal.SIGKILL:
        why = f"; it may have been out of memory{memory_words(status)}"
    return f"{who(rank, status)} was ended by {signal_name(number)}{where(status)}{why}"


@contextmanager
def _running(
    command: Sequence[str], nproc: int, streams: Streams, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes, which have ended when the context does."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with socket.create_server((LOOPBACK, 0)) as listener:
            for rank in range(nproc):
                passed = {LISTENER: listener.fileno()} if rank == 0 else {}
                place = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc,
                    "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": LOOPBACK,
                    "MASTER_PORT": listener.getsockname()[1], LAUNCHER: os.getpid(),
                    FOLDER: folder, **passed,
                }  # fmt: skip
                # One thread each, unless a rank is told otherwise: they share the cores.
                variables = {"OMP_NUM_THREADS": "1", **os.environ}
                variables.update({name: str(value) for name, value in place.items()})
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
        yield ranks
    finally:
        claim_report(folder)  # the launch is over: ranks that run neither speak nor save
        _end(ranks)


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], monitor: Monitor
) -> tuple[dict[int, int], Hang | None]:
    """Waits until all have succeeded, or until the cause of a failure is known.

    Returns:
        Exit codes of the ranks that have failed, negative for signals, and 0 of those that ended
        before they had done their work; and the ranks that hang.
    """
    failed_s, looked_s = math.inf, 0.0
    while True:
        codes = {rank: _exit_code(process) for rank, process in enumerate(ranks)}
        failed = {
            rank: code for rank, code in codes.items()
            if code is not None and monitor.has_failed(rank, code)
        }  # fmt: skip
        now_s = time.monotonic()
        if failed:
            failed_s = min(failed_s, now_s)
        if {*failed.values()} - {LEFT} or now_s - failed_s >= CAUSE_S:
            return failed, None
        if None not in codes.values():
            return failed, None
        if not failed and now_s - looked_s >= LOOK_S:
            looked_s = now_s
            if (hang := monitor.look(now_s)) is not None:
                return {}, hang
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks, with which it ends
    watch_ranks(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
