"""What overlap gains over a slow link, predicted and measured, on a quiet machine (20 minutes).

Split plans are run with their collectives beside computations and in line.

    python -m tests.bench.overlap [--models NAME,...] [--kinds NAME,...] [--steps N] [--keep FOLDER]

Two network namespaces are joined by a link of 200 Mbit/s, with a rank in each. Topology and
profiles are measured first. Each plan is run in both ways by turns, and the gain is that of the
medians.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from planner.artefacts.files import read_profile, write_plan
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.clusters.yaml.read import read_topology
from planner.costs.overlap import with_overlap
from tests.bench.accuracy import RATE_MBIT, planner, say
from tests.bench.solvers import table
from tests.support.accuracy_plans import SUBJECTS, planned
from tests.support.builders import asked
from tests.support.models import cached
from tests.support.shaped_hosts import missing
from tests.support.split_kinds import KINDS, split_plan

# Samples of a microbatch: a pass takes about as long as what it sends.
BATCH = {"gpt2": 12, "llama": 12, "bert": 12}
LEVELS = (1, 2, 3)
MICROBATCHES, REPEATS = 2, 2
COLUMNS = ("plan", "in line s", "beside s", "gain", "in line s", "beside s", "gain", "held ahead")


@dataclass(frozen=True)
class Pair:
    """A plan in both ways."""

    name: str
    in_line: Plan
    beside: Plan


def problems_of(folder: Path, models: Sequence[str]) -> Iterator[tuple[str, Problem]]:
    """Measures topology and profiles, unless the folder has them."""
    if not (folder / "slow.yaml").exists():
        say(f"probing a link of {RATE_MBIT} Mbit/s")
        planner(["topology", "probe", "-o", "slow.yaml"], folder, 2, RATE_MBIT)
    topology = read_topology(folder / "slow.yaml")
    for name in models:
        if not (folder / f"{name}.json").exists():
            say(f"profiling {name}")
            cached(name, folder, SUBJECTS[name].build)
            dims = [text for dim in SUBJECTS[name].dims for text in ("--dim", dim)]
            planner(
                ["profile", f"{name}.onnx", "--batch", str(BATCH[name]), *dims, "-o",
                 f"{name}.json"],
                folder,
            )  # fmt: skip
        profile = read_profile(folder / f"{name}.json")
        yield name, Problem(profile, topology, **asked(MICROBATCHES))


def pairs_of(name: str, problem: Problem, kinds: Sequence[str]) -> Iterator[Pair]:
    """The plans of a model that gain anything, or whose state lies in parts."""
    options = asked(MICROBATCHES)
    for kind in KINDS[2]:
        made = split_plan(problem.profile, problem.topology, kind, options)
        if made is not None and kind in kinds:
            yield from _pair(f"{name}-{kind}", *made)
    names = tuple(one.name for one in problem.profile.graph.operators)
    for level in LEVELS:
        if f"over{level}" in kinds:
            whole = Stage.whole(names, (0, 1), 1, recompute=False)
            stage = replace(whole, over=2, zero=level)
            strategy = Strategy((stage,), ScheduleName.ONE_F_ONE_B, MICROBATCHES)
            yield from _pair(f"{name}-over{level}", problem, strategy)


def _pair(name: str, problem: Problem, strategy: Strategy) -> Iterator[Pair]:
    stages = tuple(replace(stage, prefetch=None) for stage in strategy.stages)
    in_line = replace(strategy, stages=stages)
    beside = with_overlap(problem, in_line)
    if beside == in_line:
        say(f"{name}: nothing runs beside its computations")
        return
    yield Pair(name, planned(problem, in_line), planned(problem, beside))


def measured_s(folder: Path, pair: Pair, steps: int) -> tuple[float, float]:
    """Median times of an iteration in line and beside, run by turns."""
    times: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for way, plan in (("in line", pair.in_line), ("beside", pair.beside)):
            path = folder / f"{pair.name}.strategy.json"
            write_plan(plan, path)
            out = planner(
                ["launch", path.name, "--steps", str(steps), "--json"], folder, 2, RATE_MBIT
            )
            report = json.loads(out.splitlines()[-1])
            times.setdefault(way, []).append(report["measured_iteration_s"])
    return median(times["in line"]), median(times["beside"])


def row(pair: Pair, measured: tuple[float, float]) -> list[str]:
    """A line of the table."""
    predicted = [one.prediction.iteration_s for one in (pair.in_line, pair.beside)]
    cells = [pair.name]
    for before_s, after_s in (predicted, measured):
        cells += [f"{before_s:.3f}", f"{after_s:.3f}", f"{100 * (1 - after_s / before_s):+.1f} %"]
    held = max(stage.prefetch or 0 for stage in pair.beside.strategy.stages)
    return [*cells, f"{held / 1e6:.1f} MB"]


def main() -> None:
    """Prints the table, predicted and then measured."""
    every = (*KINDS[2], *(f"over{level}" for level in LEVELS))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument("--kinds", default=",".join(every))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="folder of topology, profiles and plans")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for name, problem in problems_of(folder, options.models.split(",")):
            for pair in pairs_of(name, problem, options.kinds.split(",")):
                rows.append(row(pair, measured_s(folder, pair, options.steps)))
                say(" | ".join(rows[-1]))
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
