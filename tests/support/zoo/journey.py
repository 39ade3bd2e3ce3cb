"""A network on the user's way: export, profile, solve for two devices, launch on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import planner
from tests.support.zoo import build
from tests.support.zoo.pipeline import middle, read, write_feed
from tests.support.zoo.reference import LEARNING_RATE, NUM_MICROBATCHES, STEPS

ROOT = Path(__file__).parents[3]
TRAINING = planner.Training(microbatches=NUM_MICROBATCHES, optimizer="adamw")


def export_by_planner(name, path):
    """`planner.export` of a network."""
    module, inputs = build(name)
    return planner.export(module, inputs, path)


def export_by_torch(name, path, optimize=True):
    """torch's own exporter with its defaults, under `no_grad` and without caches."""
    module, inputs = build(name)
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    with torch.no_grad():
        torch.onnx.export(module, inputs, path, dynamo=True, optimize=optimize, verbose=False)


def profiled(name, path):
    """The profile of a network's model, measured as fast as possible."""
    return planner.profile(read(name, path), repetitions=1, budget_s=0.0, cache=False)


def solved(profile):
    """The plans of the portfolio for two processes on this machine."""
    return planner.solve(profile, gpus=2, training=TRAINING, time_limit_s=5)


def two_stages(profile):
    """A plan of two stages on two processes, cut in the middle."""
    switches = planner.own_options({"cuts": (middle(profile.graph),)})
    search = planner.Search(switches=switches)
    return planner.solve(profile, gpus=2, training=TRAINING, search=search, solvers=["manual"]).plan


def prepared(name, path, plan, steps=STEPS):
    """Writes everything that a launch of a plan needs, in the folder of the model."""
    folder = path.parent
    planner.write_strategy(plan, folder / "strategy.json", model=path)
    data = write_feed(name, read(name, path), folder)
    options = {"steps": steps, "learning_rate": LEARNING_RATE, "data": data}
    (folder / "launch.json").write_text(json.dumps(options))


def launched(folders):
    """The losses of the trainings that were prepared in the folders, on two processes.

    Returns:
        For each folder the losses, or why there are none.
    """
    for folder in folders:
        for file in folder.glob("error-*.txt"):
            file.unlink()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.support.zoo.worker", *map(str, folders),
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [_losses(folder, done.stderr) for folder in folders]


def _losses(folder, output):
    errors = sorted(folder.glob("error-*.txt"))
    if errors:
        return errors[0].read_text().strip().splitlines()[-1]
    file = folder / "losses.json"
    return json.loads(file.read_text()) if file.is_file() else output.strip().splitlines()[-1]
