"""`planner launch --nproc N` and `planner topology probe --nproc N`: torchrun, no tracebacks."""

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from planner.errors import LaunchError
from planner.files import read_plan

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A checkout and an installed wheel both have cli.py beside the package.
CLI = Path(__file__).resolve().parents[2] / "cli.py"


def torchrun_command(strategy: Path, num_ranks: int) -> str:
    """The command that starts the ranks of a strategy, to be shown to the user."""
    path = shlex.quote(str(strategy))
    return f"torchrun --nproc-per-node {num_ranks} --no-python planner launch {path}"


def start_torchrun(strategy: Path, nproc: int, arguments: Sequence[str] = ()) -> int:
    """Runs `planner launch STRATEGY ARGUMENTS` in N processes, and waits for them.

    Ctrl-C ends all processes.

    Args:
        strategy: path of strategy.json.
        nproc: N, at least the number of the strategy's devices.
        arguments: the other options, without --nproc.

    Returns:
        The exit code: 0, or 1 if a rank has failed and printed the reason, or 128 + the signal that
        ended all.

    Raises:
        FileError: if the strategy cannot be read.
        LaunchError: if there are too few processes, or a rank was killed.
    """
    needed = len(read_plan(strategy).ranks)
    if nproc < needed:
        raise LaunchError(
            f"{strategy}: the strategy uses {needed} devices, --nproc is {nproc}; "
            f"run: planner launch {shlex.quote(str(strategy))} --nproc {needed}"
        )
    return start_ranks(["launch", str(strategy), *arguments], nproc)


def start_ranks(command: Sequence[str], nproc: int) -> int:
    """Runs `planner COMMAND` in N processes, and waits for them.

    Ctrl-C ends all processes.

    Args:
        command: the command and its options, without --nproc.
        nproc: N.

    Returns:
        The exit code: 0, or 1 if a rank has failed and printed the reason, or 128 + the signal that
        ended all.

    Raises:
        LaunchError: if a rank was killed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with _quiet_torchrun():
        try:
            run.main(["--standalone", "--nproc-per-node", str(nproc), str(CLI), *command])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                raise LaunchError(_obituary(rank, -failure.exitcode)) from None
            return 1
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _obituary(rank: int, number: int) -> str:
    name = signal.Signals(number).name
    why = "; it may have been out of memory" if number == signal.SIGKILL else ""
    return f"rank {rank} was ended by {name}{why}"


@contextmanager
def _quiet_torchrun() -> Iterator[None]:
    """Silences torchrun's messages about ranks, which print their own, and restores the signal
    handlers and the environment that torchrun changes.
    """
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    disabled_level = logging.root.manager.disable
    had_threads = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    logging.disable()  # its loggers have levels of their own
    sys.stdout.flush()
    try:
        yield
    finally:
        logging.disable(disabled_level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if not had_threads:
            os.environ.pop("OMP_NUM_THREADS", None)
