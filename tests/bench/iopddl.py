"""The iopddl contest's instances within its time limits, beside the best known costs (25 minutes).

The instances are those of the reference folder; each run is `planner solve --json` in a process of
its own, the searches compiled before.

    python -m tests.bench.iopddl                        # A, B, G, L and M, seeds 0 to 2
    python -m tests.bench.iopddl --only B G --seeds 0   # some of them
    python -m tests.bench.iopddl --times 3              # three times the limits, on a busy machine

CPU seconds and the peak of memory are those of both processes, memory of the larger one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PLANNER_REFERENCE", ROOT.parent / "shared" / "reference")) / "iopddl"
# By instance: the contest's limit in s, and the best known cost, optimal for A, B and G.
KNOWN = {
    "A": (60, 6_548_553_650),
    "B": (60, 532_843),
    "G": (120, 217_039),
    "L": (180, 1_967_946_965),
    "M": (180, 49_921_954_251),
}


def solved(path, limit_s, seed):
    """One run: the JSON, seconds on the wall, CPU seconds, and the peak of memory in MiB."""
    begin_s = time.monotonic()
    command = [
        sys.executable, ROOT / "cli.py", "solve", "--cost-model", "iopddl", "--profile", path,
        "--time-limit", f"{limit_s} s", "--seed", str(seed), "--json",
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as out, subprocess.Popen(command, stdout=out) as process:
        # Of this child alone: `getrusage` tells the largest peak of all children so far.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{path}: ended with {process.returncode}")
        out.seek(0)
        answer = json.load(out)
    cpu_s = used.ru_utime + used.ru_stime
    return answer, time.monotonic() - begin_s, cpu_s, used.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[*KNOWN], choices=[*KNOWN])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--times", type=float, default=1.0, help="factor of the time limits")
    options = parser.parse_args()
    solved(FOLDER / "asplos-2025-iopddl-B.json.gz", 300, 0)  # compiles
    head = "inst seed status               cost        lower bound   cost/best       gap"
    print(f"{head}  wall    CPU   MiB")
    for name in options.only:
        limit_s, best = KNOWN[name]
        rows = []
        for seed in options.seeds:
            answer, wall_s, cpu_s, peak_mib = solved(
                FOLDER / f"asplos-2025-iopddl-{name}.json.gz", limit_s * options.times, seed
            )
            rows.append((answer["cost"], answer["gap"]))
            print(
                f"{name:4} {seed:4} {answer['status']:8} {answer['cost']:15}"
                f" {answer['lower_bound']:18} {answer['cost'] / best:11.6f}"
                f" {answer['gap']:9.4%} {wall_s:5.1f} {cpu_s:6.1f} {peak_mib:5.0f}",
                flush=True,
            )
        cost, gap = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:4} median cost/best {cost / best:.6f}, gap {gap:.4%}")


if __name__ == "__main__":
    main()
