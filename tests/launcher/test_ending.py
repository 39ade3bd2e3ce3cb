"""Ranks and launchers that are killed: nothing stays, and one line says why."""

import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case

ROOT = Path(__file__).resolve().parents[2]
CLI = str(ROOT / "cli.py")
START_S = GONE_S = 60.0  # on a busy machine
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# The action that a rank was in.
PLACE = r" (at|before|in|waiting for|while reading) .*step \d+[^;:]*"
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

    def rank(self, number, limit_s=START_S):
        """The process of a rank, once all train."""
        files = [self.folder / f"trains-{rank}" for rank in (0, 1)]
        limit_s += time.monotonic()
        while not all(file.exists() and file.read_text() for file in files):
            assert self.process.poll() is None and time.monotonic() < limit_s
            time.sleep(0.02)
        return int(files[number].read_text())

    def end(self):
        """Ends what is left."""
        for number in self.living():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()

    def said(self):
        """The lines on standard error, once nothing can write to it any more."""
        return self.process.communicate(timeout=GONE_S)[1].splitlines()

    def ends(self, within_s=GONE_S):
        """Asserts that all processes end in time; gives the messages."""
        limit_s = time.monotonic() + within_s
        while self.living() and time.monotonic() < limit_s:
            time.sleep(0.05)
        assert [(n, (Path("/proc") / str(n) / "cmdline").read_bytes()) for n in self.living()] == []
        return [line for line in self.said() if line.startswith(("Error: ", "stopped"))]


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
        one.end()


def addresses(process):
    """The addresses that a process listens on."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(descriptor.readlink().name)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, number = line.split()[:10]
            if state == "0A" and f"socket:[{number}]" in sockets:
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                found.add(ip_address(b"".join(words)))
    return found


# ----------------------------------------------------------------------- in the default suite


def test_a_launch_listens_on_loopback_and_ends_with_its_launcher(launch):
    one = launch()
    ranks = one.rank(0), one.rank(1)
    assert len(one.living()) == 5  # the launcher, two ranks, and a child of each
    assert addresses(one.process.pid) == set()
    assert {*addresses(ranks[0]), *addresses(ranks[1])} == {ip_address("127.0.0.1")}
    one.process.kill()
    (message,) = one.ends()
    assert re.fullmatch(
        r"Error: rank [01] ends because the process that started it has ended", message
    )


def test_a_terminated_rank_is_named(launch):
    one = launch()
    os.kill(one.rank(1), signal.SIGTERM)
    (message,) = one.ends()
    assert re.fullmatch(rf"Error: rank 1 \(stage 0\) was ended by SIGTERM{PLACE}", message)
    assert one.process.returncode == 1


# ------------------------------------------------------------------------------- the slow ones

BYTES = r"[\d.]+ [KMG]iB"
MEMORY = rf" \({BYTES} in use\)"
KILLED = f"; it may have been out of memory{MEMORY}"
WAYS = "by code that it ran, killed by a signal, or out of memory"
LOST = rf"has ended without a word{PLACE}: {WAYS}{MEMORY}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_rank_ends_all_with_one_message(launch, seed):
    is_torchrun, number = bool(seed % 2), seed // 2 % 2
    death = [signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM, signal.SIGSEGV][
        seed // 2
    ]
    one = launch(TORCHRUN if is_torchrun else None)
    target = one.rank(number)
    assert addresses(target) == {ip_address("127.0.0.1")}
    time.sleep(random.Random(seed).uniform(0, 1))
    os.kill(target, death)
    (message,) = one.ends()
    rank = rf"Error: rank {number} \(stage 0\)"
    if death == signal.SIGTERM or not is_torchrun:
        why = KILLED if death == signal.SIGKILL else ""
        assert re.fullmatch(f"{rank} was ended by {death.name}{PLACE}{why}", message)
    else:
        assert re.fullmatch(f"{rank} {LOST}", message)
    assert one.process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_launcher_leaves_nothing(launch, seed):
    moment = random.Random(seed)
    death = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP][seed]
    is_torchrun = seed == 0
    one = launch(TORCHRUN if is_torchrun else None)
    if seed == 1:
        time.sleep(moment.uniform(0, 3))  # while the ranks start
    else:
        one.rank(0)
        time.sleep(moment.uniform(0, 1))
    one.process.send_signal(death)
    messages = one.ends()
    if death == signal.SIGTERM:  # which the launcher can say itself
        assert messages == ["stopped by SIGTERM"]
        assert one.process.returncode == 143
    elif seed != 1:
        (message,) = messages
        assert re.fullmatch(r"Error: rank [01] ends because the process .* has ended", message)


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, TORCHRUN], ids=["nproc", "torchrun"])
def test_a_mistake_that_all_ranks_find_is_said_once(launch, before):
    one = launch(before)
    (one.folder / "mine.py").write_text("def data(step, microbatch, inputs): return 5\n")
    (message,) = one.ends(START_S + GONE_S)
    assert message.startswith("Error: --data mine:data: step 0, microbatch ")
    assert one.process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, TORCHRUN], ids=["nproc", "torchrun"])
def test_a_wrong_strategy_is_said_once(launch, before):
    one = launch(before, strategy="none.json")
    (message,) = one.ends(START_S + GONE_S)
    assert message.startswith("Error: none.json")


@pytest.mark.slow
def test_control_c_ends_all_ranks_with_one_word(launch):
    one = launch()
    one.rank(0)
    one.process.send_signal(signal.SIGINT)
    assert one.said() == ["stopped"]
    assert one.process.returncode == 130
    assert one.living() == []
