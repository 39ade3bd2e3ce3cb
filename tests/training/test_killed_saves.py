"""SIGKILL of a rank while a checkpoint is written: the last one that is whole goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from planner.training.checkpoints.folder import latest, step_of
from tests.support.checkpoint_runs import tensors_of
from tests.support.mode_runs import net, profile_of, write_strategy

ROOT = Path(__file__).resolve().parents[2]
KILLS, STEPS, SLOW_S = 10, 60, 0.1

# A rank that trains, and takes its time between its file and the index.
CLI = f"""
import json, os, sys, time
from pathlib import Path
from planner.support.errors import PlannerError
from planner.launcher.failures import rank
rank.enter()
from planner.training.checkpoints import files
from planner import launch
Path("pid." + os.environ["RANK"]).write_text(str(os.getpid()))
write_data = files.FileSystemWriter.write_data

def slow(*given):
    done = write_data(*given)
    time.sleep({SLOW_S})
    return done

files.FileSystemWriter.write_data = slow
folder, resume = json.loads(sys.argv[3])
kept = dict(checkpoint=folder, checkpoint_every=2, resume=resume)
try:
    launch(Path(sys.argv[2]), steps={STEPS}, learning_rate=0.1, **kept)
except PlannerError as error:
    sys.exit(f"Error: {{error}}")
rank.current_rank().leave(0)  # as the command line does
"""
START = """
import sys
from pathlib import Path
import planner
from planner.launcher.failures import monitor
monitor.CLI = Path("cli.py").absolute()
sys.exit(planner.start_launch("two.json", 2, sys.argv[1:]))
"""


started = []


@pytest.fixture
def here(tmp_path):
    net(tmp_path / "net.onnx")
    profile = profile_of(tmp_path / "net.onnx")
    write_strategy(tmp_path / "two.json", profile, (1, 1), optimizer="adam")
    (tmp_path / "cli.py").write_text(CLI)
    yield tmp_path
    for launcher in started:  # after a failure
        launcher.terminate()
        launcher.communicate()
    started.clear()


def start(here, kept, resume=None):
    """The launcher of two ranks."""
    for old in here.glob("pid.*"):
        old.unlink()
    launcher = subprocess.Popen(
        [sys.executable, "-c", START, json.dumps([kept, resume])],
        cwd=here, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started.append(launcher)
    return launcher


def parts(folder):
    """The checkpoints that are being written, or were: names by inode and name."""
    found = {}
    for path in folder.glob(".step-*.part"):
        with suppress(FileNotFoundError):  # it has got its name
            found[path.stat().st_ino, path.name] = path.name
    return found


def kill_during_a_save(here, kept, launcher, chance):
    """Kills a rank at a random time after the beginning of a save, a few saves on; gives the step
    that was being saved.
    """
    old, new, due = parts(here / kept), {}, chance.randint(1, 4)
    deadline = time.monotonic() + 60
    while len(new) < due:
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.stderr.read()
        new |= {key: name for key, name in parts(here / kept).items() if key not in old}
        time.sleep(0.001)
    time.sleep(chance.uniform(0, SLOW_S))
    rank = chance.randrange(2)
    os.kill(int((here / f"pid.{rank}").read_text()), signal.SIGKILL)
    launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    return max(new.values())


@pytest.mark.slow
def test_ten_kills_during_a_save_lose_nothing_that_was_saved(here):
    whole = start(here, "whole")
    _, said = whole.communicate(timeout=120)
    assert whole.returncode == 0, said
    chance, cut = random.Random(0), 0
    for kill in range(KILLS):
        resume = "kept" if kill and latest(here / "kept") else None
        last = kill_during_a_save(here, "kept", start(here, "kept", resume), chance)
        cut += (here / "kept" / last).exists()
        newest = latest(here / "kept")
        if newest is not None:
            tensors_of(newest)
            assert step_of(newest) >= int(last.split("-")[1].removesuffix(".part")) - 2
    assert cut >= KILLS // 2, "hardly any was cut off: nothing was tried"
    rest = start(here, "kept", "kept")
    _, said = rest.communicate(timeout=120)
    assert rest.returncode == 0, said
    first, second = tensors_of(here / "whole"), tensors_of(here / "kept")
    assert step_of(latest(here / "kept")) == STEPS
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert not list((here / "kept").glob(".step-*"))
