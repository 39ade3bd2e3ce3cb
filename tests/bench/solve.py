"""How long `planner solve` takes on the shipped profiles.

Medians of fresh processes, compiled kernels in the cache.

    python -m tests.bench.solve [--runs N]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planner.artefacts.files import shipped

ROOT = Path(__file__).parents[2]


def seconds(profile, gpus, folder):
    """Wall time of one process, time of `solve` itself, and the object that it prints."""
    command = [sys.executable, str(ROOT / "cli.py"), "solve", "--profile", str(profile),
               "--topology", "p3.yaml", "--gpus", str(gpus), "--json"]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    wall = time.perf_counter() - start
    solved = json.loads(done.stdout)
    return wall, solved["solve_s"], solved


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(f"{'profile':24} {'gpus':>4} {'process s':>10} {'solvers s':>10} {'gap':>7}  solver")
    with tempfile.TemporaryDirectory() as folder:
        for profile in sorted(shipped("profiles").glob("*.json")):
            for gpus in (2, 4, 8):
                seconds(profile, gpus, folder)  # compiles, once
                samples = [seconds(profile, gpus, folder) for _ in range(runs)]
                wall = statistics.median(s[0] for s in samples)
                inside = statistics.median(s[1] for s in samples)
                first = samples[0][2]
                print(
                    f"{profile.stem:24} {gpus:4} {wall:10.2f} {inside:10.2f}"
                    f" {100 * first['gap']:6.1f}%  {first['solver']}"
                )


if __name__ == "__main__":
    main()
