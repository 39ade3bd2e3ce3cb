"""A user's own loop under torchrun: its end where a rank fails, and after a restart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.mode_runs import net, profile_of, write_strategy

ROOT = Path(__file__).parents[2]
LOOP = """
import os, signal, sys, time, torch, planner
from tests.support.own_loops import STEPS, batches

first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
rank = int(os.environ["RANK"])
given = batches()
with planner.trainer("two.json", learning_rate=0.1, threads=1, hang_timeout=2, {how}) as trainer:
    for step in range(trainer.steps_done, STEPS):
        if step == 3 and rank == 1 and first:
            {act}
        trainer.step(given[step])
        {after}
    state = trainer.state_dict()
if rank == 0:
    torch.save((step, state), "state.pt")
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def run(folder, act, how="", after="", *options):
    (folder / "loop.txt").write_text(LOOP.format(act=act, how=how, after=after))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", "loop.txt"], cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    net(tmp_path / "net.onnx")
    write_strategy(tmp_path / "two.json", profile_of(tmp_path / "net.onnx"), (1, 1))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("act", "message"), [
    ("raise ValueError('mine')", "ValueError: mine"),
    ("given[step] = (given[step][0][:3], given[step][1][:3])",
     "Error: planner.trainer: rank 0 and rank 1 read different kinds of input 'x': (16, 3, 6, 6)"),
    (KILL, "Error: rank 1 (stage 1) has ended without a word before step 3"),
    ("time.sleep(10 ** 6)", "Error: rank 1 (stage 1) hangs: it has stood for"),
])  # fmt: skip
def test_one_rank_says_why_a_loop_ends(folder, act, message):
    done = run(folder, act)
    assert done.returncode != 0
    own = done.stderr.partition("torch/distributed/elastic")[0]
    said = [line for line in own.splitlines() if line.startswith(("Error: ", "ValueError"))]
    assert len(said) == 1, done.stderr
    assert said[0].startswith(message)


@pytest.mark.slow
def test_a_loop_that_torchrun_restarts_goes_on_from_what_it_has_saved(folder):
    how, after = 'checkpoint="kept"', "trainer.save()"
    assert run(folder, "pass", 'checkpoint="whole"', after).returncode == 0
    step, whole = torch.load(folder / "state.pt")
    (folder / "state.pt").unlink()
    done = run(folder, KILL, how, after, "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "rank 1 (stage 1) has ended without a word before step 3" in done.stderr
    again, state = torch.load(folder / "state.pt")
    assert again == step
    assert state.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
