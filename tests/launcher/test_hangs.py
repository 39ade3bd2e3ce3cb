"""Ranks that really hang: one message names rank, stage and action, and the launch ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case

CLI = str(Path(__file__).resolve().parents[2] / "cli.py")
STEP = 3
DATA = """
import os, signal, time, torch

def data(step, microbatch, inputs):
    if (step, os.environ["RANK"]) == ({step}, "1"):
        {hang}
    shape, dtype = inputs["ids"]
    return {{"ids": torch.zeros(shape, dtype=dtype)}}, torch.zeros(shape, dtype=torch.int64)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            CLI, "launch", "strategy.json")  # fmt: skip
LAUNCHER = (sys.executable, CLI, "launch", "strategy.json", "--nproc", "2")
WAYS = {"sleeps": "time.sleep(10 ** 6)", "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("command", [LAUNCHER, TORCHRUN], ids=["launcher", "torchrun"])
def test_a_rank_that_hangs_is_named_and_ends_the_launch(tmp_path, command, way):
    write_case(tmp_path, Case((1, 1), 4))
    (tmp_path / "mine.py").write_text(DATA.format(step=STEP, hang=WAYS[way]))
    done = subprocess.run(
        [*command, "--steps", "6", "--data", "mine:data", "--hang-timeout", "2"], cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode != 0
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("Error: "))
    assert said.startswith("Error: rank 1 (stage 1) hangs: it has ")
    assert f"while reading data for step {STEP}" in said
