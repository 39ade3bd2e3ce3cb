"""Ranks that are killed while torchrun restarts them: the training ends as if nothing had been."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.training.checkpoints.files import whole_tensors
from planner.training.checkpoints.folder import latest, read
from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case

CLI = str(Path(__file__).resolve().parents[2] / "cli.py")
STEPS, EVERY = 60, 5
# Slow enough to be hit by a signal; each rank writes its number and its step.
DATA = """
import os, time, torch
from pathlib import Path
def data(step, microbatch, inputs):
    Path("at-" + os.environ["RANK"]).write_text(f"{os.getpid()} {step}")
    time.sleep(0.02)
    shape, dtype = inputs["ids"]
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    ids = torch.randint(0, 7, shape, generator=generator).to(dtype)
    return {"ids": ids}, ids
"""


def command(folder):
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "3", CLI, "launch", "strategy.json", "--steps", str(STEPS),
        "--data", "mine:data", "--checkpoint", "kept", "--checkpoint-every", str(EVERY),
    ]  # fmt: skip


def start(folder):
    write_case(folder, Case((2,), 4))
    (folder / "mine.py").write_text(DATA)
    return subprocess.Popen(
        command(folder), cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def weights(folder):
    """The bytes of all tensors of the last checkpoint but the states of generators, which nothing
    draws from, by name.
    """
    last = latest(folder / "kept")
    assert last is not None and last.name.endswith(str(STEPS))
    tensors = whole_tensors(read(last), read(last).record.tensors)
    assert any(name.endswith("w1") for name in tensors)
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in tensors.items()
        if not name.startswith("random/")
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start(folder)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    return weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_weights_after_a_kill_are_those_without(tmp_path, uninterrupted, seed):
    draw = random.Random(seed)
    rank, step = draw.randrange(2), draw.randrange(1, STEPS - 1)
    process, at = start(tmp_path), tmp_path / f"at-{rank}"
    limit_s = time.monotonic() + 90
    while True:
        assert process.poll() is None and time.monotonic() < limit_s
        words = at.read_text().split() if at.exists() else []
        if len(words) == 2 and int(words[1]) >= step:
            break
        time.sleep(0.005)
    os.kill(int(words[0]), signal.SIGKILL)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert f"Error: rank {rank} (stage 0) has ended without a word" in said
    assert weights(tmp_path) == uninterrupted
