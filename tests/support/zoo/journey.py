"""A network on the user's way: export, profile, solve for two devices, launch on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import planner
from tests.support.zoo import ZOO, build
from tests.support.zoo.pipeline import middle, write_feed
from tests.support.zoo.reference import LEARNING_RATE, NUM_MICROBATCHES, STEPS

ROOT = Path(__file__).parents[3]
TRAINING = planner.Training(microbatches=NUM_MICROBATCHES, optimizer="adamw")
LAUNCH_S = 300


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


def profiled(path):
    """The profile of a model, measured as fast as possible."""
    return planner.profile(path, repetitions=1, budget_s=0.0, cache=False)


def solved(profile):
    """The plans of the portfolio for two processes on this machine."""
    return planner.solve(profile, gpus=2, training=TRAINING, time_limit_s=5)


def two_stages(profile):
    """A plan of two stages on two processes, cut in the middle."""
    switches = planner.own_options({"cuts": (middle(profile.graph),)})
    search = planner.Search(switches=switches)
    return planner.solve(profile, gpus=2, training=TRAINING, search=search, solvers=["manual"]).plan


def launched(name, path, plan, steps=STEPS):
    """The losses of a plan's training on two processes.

    Args:
        path: the model, in a folder of its own.
    """
    folder = path.parent
    planner.write_strategy(plan, folder / "strategy.json", model=path)
    data = write_feed(name, planner.read_model(path), folder)
    command = [
        sys.executable, str(ROOT / "cli.py"), "launch", "strategy.json", "--nproc", "2", "--json",
        "--steps", str(steps), "--lr", str(LEARNING_RATE), "--data", data,
        "--loss", ZOO[name].loss,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=LAUNCH_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise planner.PlannerError(f"launch: {done.stderr.strip()}")
    return json.loads(done.stdout)["loss"]
