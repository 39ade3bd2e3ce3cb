"""The guard of torchrun's ranks on a host: a process beside them that ends those that hang.

    python -m planner.launcher.failures.guard FOLDER AGENT WORLD_SIZE

A rank whose process is stopped cannot see that it hangs, nor can one that is alone on its host be
seen by another. The guard reads the pages of the ranks in torchrun's folder, says which one hangs,
and kills it; torchrun then ends the others, or starts all again. Under `planner launch --nproc`
the launcher itself is the guard.

It imports no torch. It ends with torchrun's agent, or with the last of the ranks.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from planner.launcher.failures import system
from planner.launcher.failures.limits import Hang, Watch
from planner.launcher.failures.page import Page, page_in

LOOK_S = 0.5
"""Interval at which the pages are looked at, in s."""
PAGE = "planner-page-"
"""Begin of the names of the files with the pages."""
WORD_FILE = "planner-word"
"""Name of the file that whoever speaks makes."""


def start_guard(folder: Path, agent: int) -> None:
    """Starts the guard of the ranks whose pages are in a folder.

    Args:
        agent: process id of torchrun's.
    """
    here = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", __name__, str(folder), str(agent), os.environ["WORLD_SIZE"]]
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def take_the_word(folder: Path) -> bool:
    """Whether this process is the first one that asks."""
    try:
        os.close(os.open(folder / WORD_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # torchrun's folder is gone or full: rather twice than never
        return True
    return True


def end_ranks(pages: Iterable[Page]) -> None:
    """Kills ranks, and what they have started."""
    for page in pages:
        process = page.look().process
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process) == process:
                os.killpg(process, signal.SIGKILL)
            else:
                os.kill(process, signal.SIGKILL)


def _pages(folder: Path, known: dict[int, Page]) -> dict[int, Page]:
    """The pages that are there by now, by rank."""
    for file in folder.glob(f"{PAGE}*"):
        rank = int(file.name.removeprefix(PAGE))
        if rank not in known:
            with suppress(OSError, ValueError):  # it is about to be made
                known[rank] = page_in(file)
    return known


def _is_over(agent: int, pages: dict[int, Page]) -> bool:
    return not system.lives(agent) or not any(
        system.lives(page.look().process) for page in pages.values()
    )


def guard(folder: Path, agent: int, world_size: int) -> Hang | None:
    """Watches the ranks of a host until they have ended, or one hangs.

    Args:
        folder: with the pages.
        agent: process id of torchrun's.
        world_size: ranks over all hosts.
    """
    pages = _pages(folder, {})
    watch = Watch(pages, world_size)
    while not _is_over(agent, pages):
        _pages(folder, pages)
        hang = watch.look(time.monotonic())
        if hang is not None:
            if take_the_word(folder):
                sys.stderr.write(f"Error: {hang.message}\n")
                sys.stderr.flush()
            end_ranks(pages[rank] for rank in hang.ranks)
            return hang
        time.sleep(LOOK_S)
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks, with which it ends
    guard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
