"""Ranks and launchers that are killed: nothing stays, and one line says why."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case

ROOT = Path(__file__).resolve().parents[2]
CLI = str(ROOT / "cli.py")
GONE_S = 10.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

# Every rank starts a process, and writes its number when it trains.
DATA = """
import os, subprocess, torch
from pathlib import Path
def data(step, microbatch, inputs):
    mine = Path("trains-" + os.environ["RANK"])
    if step == 1 and not mine.exists():
        subprocess.Popen(["sleep", "600"])
        mine.write_text(str(os.getpid()))
    shape, dtype = inputs["ids"]
    return {"ids": torch.ones(shape, dtype=dtype)}, torch.zeros(shape, dtype=dtype)
"""


@dataclass
class Launch:
    """A launch that trains for hours.

    Attributes:
        process: the launcher, or torchrun.
        folder: that it runs in.
        mark: in the environment of all its processes.
    """

    process: subprocess.Popen
    folder: Path
    mark: bytes

    def living(self):
        """Its processes, by number."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def rank(self, number, limit_s=60):
        """The process of a rank, once all train."""
        files = [self.folder / f"trains-{rank}" for rank in (0, 1)]
        limit_s += time.monotonic()
        while not all(file.exists() and file.read_text() for file in files):
            assert self.process.poll() is None and time.monotonic() < limit_s, self.said()
            time.sleep(0.02)
        return int(files[number].read_text())

    def said(self):
        """The lines on standard error, once nothing can write to it any more."""
        if self.living():
            self.process.kill()
        return self.process.communicate(timeout=30)[1].splitlines()

    def ends(self):
        """Asserts that all processes end in time; gives the messages."""
        limit_s = time.monotonic() + GONE_S
        while self.living() and time.monotonic() < limit_s:
            time.sleep(0.05)
        assert self.living() == []
        return [line for line in self.said() if line.startswith("Error: ")]


@pytest.fixture
def launch(tmp_path):
    """Starts a launch of a strategy for two devices; both ranks read data."""
    write_case(tmp_path, Case((2,), 4))
    (tmp_path / "mine.py").write_text(DATA)
    mark = f"PLANNER_TEST={uuid.uuid4()}"
    launches = []

    def start(before=None, steps=1000000, strategy="strategy.json"):
        options = [CLI, "launch", strategy, "--steps", str(steps), "--data", "mine:data"]
        command = [sys.executable, *options, "--nproc", "2"]
        name, _, value = mark.partition("=")
        process = subprocess.Popen(
            command if before is None else [*before, *options],
            cwd=tmp_path, env={**os.environ, name: value, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        launches.append(Launch(process, tmp_path, mark.encode()))
        return launches[-1]

    yield start
    for one in launches:
        for number in one.living():
            os.kill(number, signal.SIGKILL)


# ----------------------------------------------------------------------- in the default suite


def test_a_killed_launcher_takes_its_ranks_and_their_children_along(launch):
    one = launch()
    one.rank(0)
    assert len(one.living()) == 5  # the launcher, two ranks, and a child of each
    one.process.kill()
    (message,) = one.ends()
    assert re.fullmatch(
        r"Error: rank [01] ends because the process that started it has ended", message
    )


def test_a_terminated_rank_is_named(launch):
    one = launch()
    os.kill(one.rank(1), signal.SIGTERM)
    assert one.ends() == ["Error: rank 1 was ended by SIGTERM"]
    assert one.process.returncode == 1
