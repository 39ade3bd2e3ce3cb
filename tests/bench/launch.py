"""Steps of the launcher beside PyTorch's own loops, on a quiet machine (3 minutes).

These are a plain loop on one device, torch.distributed.pipelining's Schedule1F1B on two,
fully_shard on two, and DistributedDataParallel on two, over loopback and, where there can be
network namespaces, over a slow link.

    python -m tests.bench.launch [--rounds N] [--steps N] [--rate MBIT]

The contenders take turns in the same processes, some steps each per round, with one thread per
process. A row has the medians over the rounds, the ratio of these, and the quartiles of the ratios
of single rounds. Nothing else should run meanwhile: the load average stands in each row.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

from tests.support.launch_rivals import BEHIND, DUELS, LAUNCH, TORCH, prepare
from tests.support.shaped_hosts import missing, on_hosts, on_ranks

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests/support/launch_rivals.py"
GOAL, PORT = 1.03, 29641

Times = dict[str, list[float]]


def over_loopback(name: str, folder: Path, rounds: int, steps: int) -> Times:
    """Seconds per step of each round, by contender."""
    start = [sys.executable]
    if DUELS[name].num_ranks > 1:
        count = str(DUELS[name].num_ranks)
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
    return _answer(
        subprocess.run(
            [*start, str(WORKER), name, str(folder), str(rounds), str(steps)],
            capture_output=True, text=True, check=False,
        )
    )  # fmt: skip


def over_a_link(name: str, folder: Path, rounds: int, steps: int, rate_mbit: int) -> Times:
    """The same with a host of its own for each rank."""
    arguments = shlex.join([name, str(folder), str(rounds), str(steps)])
    command = on_ranks(arguments, PORT, WORKER)
    return _answer(on_hosts(command, *[rate_mbit] * DUELS[name].num_ranks, cwd=folder))


def _answer(done: subprocess.CompletedProcess[str]) -> Times:
    if done.returncode:
        sys.exit(done.stderr)
    times_s: Times = json.loads(done.stdout.splitlines()[-1])
    return times_s


def row(title: str, times_s: Times, who: str) -> str:
    """The launcher beside a contender."""
    own_s, other_s = median(times_s[LAUNCH]), median(times_s[who])
    ratios = [a / b for a, b in zip(times_s[LAUNCH], times_s[who], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return (
        f"{title:<28} {who:<32} {1e3 * own_s:>8.1f} ms {1e3 * other_s:>8.1f} ms"
        f" {own_s / other_s:>6.3f} {low:>6.3f} to {high:.3f} {os.getloadavg()[0]:>5.2f}"
    )


def main() -> None:
    """All duels, a row for each pair of contenders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="of each contender per round")
    parser.add_argument("--rate", type=int, default=2000, help="of the slow link, in Mbit/s")
    options = parser.parse_args()
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    print(
        f"{'plan':<28} {'beside':<32} {'launch':>11} {'other':>11} {'ratio':>6}"
        f" {'of rounds':>15} {'load':>5}"
    )
    missed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        runs = [(name, over_loopback, ()) for name in DUELS]
        reason = missing()
        if reason is None:
            runs.append(("replicas", over_a_link, (options.rate,)))
        for name, start, more in runs:
            times_s = start(name, folder, options.rounds, options.steps, *more)
            title = f"{name}, {options.rate} Mbit/s" if more else name
            print(row(title, times_s, TORCH), flush=True)
            if BEHIND in times_s:
                print(row(title, times_s, BEHIND), flush=True)
            if median(times_s[LAUNCH]) > GOAL * median(times_s[TORCH]):
                missed.append(title)
    print(f"at most {GOAL} times PyTorch: " + (f"not {', '.join(missed)}" if missed else "all"))
    if reason is not None:
        print(f"no slow link: {reason}")


if __name__ == "__main__":
    main()
