"""How right the first prediction of the demo is, on a quiet machine (10 minutes).

No calibration is used.

    python -m tests.bench.demo [--repeat N] [--processes 1,2] [--steps N] [--no-cache]

ResNet-50 is profiled anew each time, from the caches unless `--no-cache` is given, and planned
for each number of processes, and trained. Nothing else should run meanwhile: the load average of
the last minute stands in each row. The last column is the slowdown that the run itself shows: the
time of a microbatch's forward and backward in it over that in the run of one process, beside that
of the profile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from planner.artefacts.files import read_profile
from planner.artefacts.profile import Profile, slowdown_of
from planner.profilers.summary import summary
from tests.support.models import cached, light

ROOT = Path(__file__).parents[2]
MODEL, BATCH, MICROBATCHES = "resnet50", 4, 4
LEAST, MOST = 0.93, 1.07


def planner(folder: Path, *arguments: str) -> str:
    """The output of `planner ARGUMENTS` in a folder."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *arguments], cwd=folder, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"planner {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def profiled(folder: Path, use_cache: bool) -> Profile:
    """A profile of the model, measured now."""
    arguments = ["profile", f"{MODEL}.onnx", "--batch", str(BATCH), "-o", "profile.json"]
    planner(folder, *arguments, "--cache" if use_cache else "--no-cache")
    return read_profile(folder / "profile.json")


def launched(folder: Path, processes: int, steps: int) -> dict[str, Any]:
    """The report of the best plan for some processes of this machine."""
    plan = f"{processes}.json"
    planner(
        folder, "solve", "--profile", "profile.json", "--topology", "local.yaml", "--gpus",
        str(processes), "--microbatches", str(MICROBATCHES), "-o", plan,
    )  # fmt: skip
    out = planner(
        folder, "launch", plan, "--nproc", str(processes), "--steps", str(steps), "--json"
    )
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def pass_s(report: dict[str, Any]) -> float:
    """Forward and backward of a microbatch through all stages, measured, in s."""
    return sum(s["measured_forward_s"] + s["measured_backward_s"] for s in report["stages"])


def main() -> None:
    """Repeats the demo and prints a row per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--processes", default="1,2", help="numbers of processes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-cache", action="store_true", help="profile without the caches")
    options = parser.parse_args()
    numbers = [int(number) for number in options.processes.split(",")]
    right = 0
    print(
        f"{'run':>3} {'processes':>9} {'predicted':>10} {'measured':>10} {'ratio':>6} {'load':>5}"
        f" {'sum/whole':>9}  slowdown: profile, run"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        cached(MODEL, folder, partial(light, MODEL, train=True))
        for run in range(options.repeat):
            profile = profiled(folder, not options.no_cache)
            for warning in profile.warnings:
                print(f"    {warning}")
            alone_s = None
            share = summary(profile).sum_per_whole or float("nan")
            for processes in numbers:
                load = os.getloadavg()[0]
                report = launched(folder, processes, options.steps)
                predicted_s, measured_s = (
                    report["predicted_iteration_s"], report["measured_iteration_s"],
                )  # fmt: skip
                ratio = predicted_s / measured_s
                right += LEAST <= ratio <= MOST
                known = profile.contention and slowdown_of(profile.contention, processes)
                alone_s = pass_s(report) if processes == 1 else alone_s
                seen = f"{pass_s(report) / alone_s:.3f}" if alone_s else "-"
                print(
                    f"{run:>3} {processes:>9} {predicted_s:>8.3f} s {measured_s:>8.3f} s"
                    f" {ratio:>6.3f} {load:>5.2f} {share:>9.3f}  {known or float('nan'):.3f},"
                    f" {seen}",
                    flush=True,
                )
    print(f"{right} of {options.repeat * len(numbers)} within {LEAST} to {MOST}")


if __name__ == "__main__":
    main()
