"""How right the simulator is: plans drawn by a seed, predicted first, run after.

    python -m tests.bench_accuracy [--write] [--keep FOLDER] [--models NAME,...] [--steps N]
    python -m tests.bench_accuracy --from FOLDER

Each rank of a run has a core of its own, as long as there are enough. The machine should do nothing
else. Profiles and topology are measured first, on the same cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.clusters import read_topology
from planner.files import read_profile, write_plan
from tests.accuracy_plans import SUBJECTS, Drawn, draw
from tests.models import cached

ROOT = Path(__file__).parent.parent
PINNED = str(ROOT / "tests" / "pinned.py")
SEED, STEPS, REPEATS = 1, 8, 2
TWO, FOUR = 5, 1


def planner(arguments: Sequence[str], folder: Path, nproc: int = 1) -> str:
    """`planner ARGUMENTS` with a core per rank; what it prints."""
    start = [sys.executable]
    if nproc > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = subprocess.run(
        [*start, PINNED, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"planner {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def say(line: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def prepare(folder: Path, models: Sequence[str], ranks: Sequence[int]) -> None:
    """Topologies and profiles, measured here."""
    for name in models:
        cached(name, folder, SUBJECTS[name].build)
    for nproc in ranks:
        say(f"probing {nproc} ranks")
        planner(["topology", "probe", "-o", f"cluster{nproc}.yaml"], folder, nproc)
    for name in models:
        say(f"profiling {name}")
        subject = SUBJECTS[name]
        dims = [text for dim in subject.dims for text in ("--dim", dim)]
        planner(
            ["profile", f"{name}.onnx", "--batch", str(subject.batch), *dims, "--no-cache",
             "-o", f"{name}.json"],
            folder,
        )  # fmt: skip


def drawn(folder: Path, models: Sequence[str], counts: Mapping[int, int]) -> list[Drawn]:
    """The plans, drawn from what was measured."""
    topologies = {n: read_topology(folder / f"cluster{n}.yaml") for n in (2, 4) if counts[n]}
    return [
        one
        for name in models
        for one in draw(name, read_profile(folder / f"{name}.json"), topologies, SEED, counts)
    ]


def measure(folder: Path, plans: Sequence[Drawn], steps: int, repeats: int) -> None:
    """Runs every plan, and all of them again."""
    for one in plans:
        write_plan(one.plan, folder / f"{one.name}.strategy.json")
    for repeat in range(repeats):
        for one in plans:
            begun = time.monotonic()
            out = planner(
                ["launch", f"{one.name}.strategy.json", "--steps", str(steps), "--json",
                 "--trace", f"{one.name}.{repeat}.trace.json"],
                folder,
                len(one.plan.ranks),
            )  # fmt: skip
            found = json.loads(out.splitlines()[-1])
            say(
                f"{one.name} {one.said}: predicted {one.plan.prediction.iteration_s:.3f} s,"
                f" measured {found['measured_iteration_s']:.3f} s"
                f" ({time.monotonic() - begun:.0f} s)"
            )
            (folder / f"{one.name}.{repeat}.json").write_text(json.dumps(found))


def main() -> None:
    """Measures, or takes what was measured, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--two", type=int, default=TWO, help="plans with two ranks per model")
    parser.add_argument("--four", type=int, default=FOUR, help="plans with four ranks per model")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--keep", type=Path, help="folder for what is measured")
    options = parser.parse_args()
    models = options.models.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        counts = {2: options.two, 4: options.four}
        prepare(folder, models, [n for n in counts if counts[n]])
        plans = drawn(folder, models, counts)
        measure(folder, plans, options.steps, options.repeats)


if __name__ == "__main__":
    main()
