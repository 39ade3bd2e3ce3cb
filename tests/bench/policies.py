"""The recipes alone, and whether another state of the code has better or worse ones (10 minutes).

Each of `data-parallel`, `zero`, `megatron`, `expert` and `heuristic` plans all shipped profiles on
2, 4 and 8 devices of their type, and a Llama of 6.7 billion parameters on 8 to 64 of A100 and H100,
as in docs/split.md. A row is kept in the file as soon as it is there, and is not planned again.

    python -m tests.bench.policies measure FILE [--only WORD ..] [--root CHECKOUT]
    python -m tests.bench.policies compare BEFORE AFTER

`compare` prints all rows whose iteration differs by more than 0.1 %, and the sums of CPU seconds.
"""

import argparse
import json
import sys
import time
from itertools import chain, product
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIFFERS = 0.001
LIMIT_S = 5.0
RECIPES = (
    ("data-parallel", {}),
    ("zero", {"zero_stage": 1}),
    ("zero", {"zero_stage": 3}),
    ("megatron", {}),
    ("expert", {}),
    ("heuristic", {}),
)
HOSTS = {
    "bert": "p3-16xlarge", "bert-large-a100": "p4d", "gpt2": "p3-16xlarge",
    "gpt2-medium-a100": "p4d", "llama7b-a100": "p4d", "llama7b-h100": "p5",
    "llama7b-v100": "p3-16xlarge", "resnet50": "p3-16xlarge",
}  # fmt: skip
DEVICES, SAMPLES = (2, 4, 8), 4
LARGE, MANY = {"llama7b-a100": "p4d-x8", "llama7b-h100": "p5-x8"}, (8, 16, 32, 64)


def cases():
    """Profile, topology, number of devices, samples of an iteration, and the limit; by its name."""
    small = ((name, HOSTS[name], gpus, SAMPLES * gpus) for name in HOSTS for gpus in DEVICES)
    large = ((name, LARGE[name], gpus, gpus) for gpus in MANY for name in LARGE)
    for one, (solver, switches) in product(chain(large, small), RECIPES):
        words = [*map(str, one), solver, *(f"{k}={v}" for k, v in switches.items())]
        yield " ".join(words), (*one, solver, switches)


def planned(name, topology, gpus, samples, solver, switches):
    """The iteration of a recipe's plan, in s, or why there is none; and its CPU seconds."""
    import planner
    from planner.artefacts.options import Search, Training
    from planner.solvers.sharded.options import Zero

    given = (Zero(**switches),) if switches else ()
    begin_s = time.process_time()
    plans = planner.solve(
        name, topology=planner.read_topology(topology, gpus),
        training=Training(global_batch=samples, optimizer="adam"),
        search=Search(switches=given), solvers=(solver,), calibration=False, time_limit_s=LIMIT_S,
    )  # fmt: skip
    reasons = [row.reason for row in plans.comparison.rows if row.reason]
    return {
        "iteration_s": plans.plan.prediction.iteration_s if plans.plan else None,
        "reason": None if plans.plan else reasons[0],
        "cpu_s": round(time.process_time() - begin_s, 2),
    }


def measure(file, root, words):
    """Plans all that the file does not have, with the checkout at `root`.

    Args:
        words: of the names of cases; those that have one of them are planned. All without words.
    """
    sys.path.insert(0, str(root))
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text()) if file.exists() else {}
    for name, case in cases():
        if name not in rows and (not words or words.intersection(name.split())):
            rows[name] = planned(*case)
            file.write_text(json.dumps(rows, indent=1))
            print(name, *rows[name].values(), flush=True)


def compare(before, after):
    """Prints rows that differ, and the sums of CPU seconds of those that both have."""
    first, second = (json.loads(file.read_text()) for file in (before, after))
    names = [name for name in first if name in second]
    for name in names:
        old, new = first[name]["iteration_s"], second[name]["iteration_s"]
        if old != new and not (old and new and abs(new / old - 1) <= DIFFERS):
            change = f"{new / old - 1:+.2%}" if old and new else "no plan" if old else "a plan"
            print(f"{name}: {old} -> {new} s, {change}")
    sums = [sum(one[name]["cpu_s"] for name in names) for one in (first, second)]
    print(f"{len(names)} rows, {sums[0]:.0f} -> {sums[1]:.0f} s of CPU")


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("file", type=Path)
    one.add_argument("--root", type=Path, default=ROOT)
    one.add_argument("--only", nargs="*", default=(), metavar="WORD")
    two = commands.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.file, given.root, set(given.only))
    else:
        compare(given.before, given.after)


if __name__ == "__main__":
    main()
