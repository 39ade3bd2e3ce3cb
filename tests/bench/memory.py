"""Peak memory as predicted beside what live tensors take: plans drawn by a seed, on the models of
the accuracy benchmark.

    python -m tests.bench.memory [--write] [--models NAME,...] [--seed N] [--keep FOLDER]

On a CPU, a tracker counts storages from their making to their end. The machine may do other things.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from planner.costs.evaluate import evaluate
from planner.costs.memory import device_memory, peak_memory
from planner.files import write_plan
from planner.model import load
from planner.problem import Optimizer, Options, Problem
from planner.profilers.measured import measure
from planner.profiles import Profile
from planner.reports.tables import percent
from planner.schedules.orders import default_warmups
from planner.strategy import (
    ScheduleName,
    Stage,
    Strategy,
    stages_by_device,
)
from tests.bench.solvers import ROOT, put, table
from tests.support.accuracy_plans import SUBJECTS, planned
from tests.support.builders import cluster, unit_type
from tests.support.memory_runs import OVER, UNDER, Late, Taken, run
from tests.support.models import cached

DOCUMENT = ROOT / "docs" / "accuracy.md"
SEED = 2
# Replicas of the stages and how many plans of a model have that many ranks.
WIDTHS = {
    1: ((1,),),
    2: ((2,), (1, 1)),
    4: ((4,), (2, 2), (1, 2, 1), (1, 1, 1, 1), (3, 1), (1, 3), (2, 1, 1)),
}
COUNTS = {1: 2, 2: 5, 4: 5}
RERUN = 0.3


def profiled(name: str, folder: Path) -> Profile:
    """Bytes are exact whatever the times are, so these are measured hastily."""
    cached(name, folder, SUBJECTS[name].build)
    sizes = {key: int(size) for key, size in (text.split("=") for text in SUBJECTS[name].dims)}
    model = load(folder / f"{name}.onnx", batch=SUBJECTS[name].batch, dimensions=sizes)
    quick = {"repetitions": 1, "budget_s": 0.0, "cached": False}
    return replace(measure(model, model_path=f"{name}.onnx", **quick), warnings=())


def drawn(
    name: str, profile: Profile, seed: int
) -> Mapping[int, Mapping[str, tuple[Strategy, Optimizer]]]:
    """Strategies of a model and their optimizers, by ranks and by what is said of them."""
    dice = random.Random(f"{name} {seed}")
    names = [operator.name for operator in profile.graph.operators]
    found: dict[int, dict[str, tuple[Strategy, Optimizer]]] = {}
    for ranks, count in COUNTS.items():
        some = found.setdefault(ranks, {})
        while len(some) < count:
            replicas = dice.choice(WIDTHS[ranks])
            schedule = dice.choice((ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE))
            number = dice.randint(max(replicas), 8)
            again = dice.random() < RERUN
            cuts = sorted(dice.sample(range(1, len(names)), len(replicas) - 1))
            warmups = default_warmups(replicas, number, dice.randint(0, 1), schedule)
            parts, first = [], 0
            for s, (start, end) in enumerate(pairwise([0, *cuts, len(names)])):
                devices = tuple(range(first, first + replicas[s]))
                parts.append(Stage.whole(tuple(names[start:end]), devices, warmups[s], again))
                first += replicas[s]
            optimizer = dice.choice(list(Optimizer))
            said = (
                f"{name}.{'+'.join(map(str, replicas))}.{schedule.value}.M{number}"
                f".W{'-'.join(map(str, warmups))}.at{'-'.join(map(str, cuts)) or '0'}"
                f".{optimizer.value}"
                f"{'.recompute' if again else ''}"
            )
            some[said] = Strategy(tuple(parts), schedule, number), optimizer
    return found


@dataclass(frozen=True)
class Row:
    """One rank of a plan.

    Attributes:
        taken: what was predicted and measured.
        least_bytes: what is predicted if nothing that is sent ever waits.
        late_bytes: the most that it took when its links were slow, where that was run: if it took
            much less than predicted.
    """

    taken: Taken
    least_bytes: int
    late_bytes: int | None = None

    @property
    def most(self) -> Taken:
        """With slow links, where these were run."""
        return replace(self.taken, live_bytes=max(self.taken.live_bytes, self.late_bytes or 0))


def unhindered(problem: Problem, strategy: Strategy) -> list[int]:
    """By rank, the peak if nothing that is sent ever waits."""
    code = evaluate(problem, strategy).program.code
    found = []
    for d, mine in enumerate(stages_by_device(strategy).values()):
        needs = device_memory(problem.profile, {s: strategy.stages[s] for s in mine})
        peak = peak_memory(problem, strategy, code, d, needs, waits=False)
        found.append(peak.total_bytes - peak.reserve_bytes)
    return found


def measured(folder: Path, models: Sequence[str], seed: int) -> list[Row]:
    """What every rank of every plan takes: one start of torchrun per number of ranks."""
    found: list[Row] = []
    profiles = {name: profiled(name, folder) for name in models}
    for ranks in WIDTHS:
        here = folder / str(ranks)
        here.mkdir(exist_ok=True)
        least: dict[str, list[int]] = {}
        for name, profile in profiles.items():
            (here / f"{name}.onnx").write_bytes((folder / f"{name}.onnx").read_bytes())
            for said, (strategy, optimizer) in drawn(name, profile, seed)[ranks].items():
                options = Options(
                    strategy.num_microbatches, schedule=strategy.schedule, optimizer=optimizer
                )
                topology = cluster([unit_type("cpu")] * ranks, bandwidth=1e9)
                problem = Problem(profile, topology, options)
                path = here / f"{said}.strategy.json"
                write_plan(planned(problem, strategy), path)
                least[path.name] = unhindered(problem, strategy)
        took = run(here, ranks, timeout_s=1800)
        rows = [Row(one, least[one.plan][one.rank]) for one in took]
        found += [row if row.taken.share <= OVER else run_late(row, here, ranks) for row in rows]
    return found


def run_late(row: Row, folder: Path, ranks: int) -> Row:
    """Runs a plan again with the links slow on which a rank sends, forward and back."""
    one, here = row.taken, folder / "late"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    for file in (one.plan, f"{one.plan.split('.')[0]}.onnx"):
        shutil.copy(folder / file, here)
    took = [
        again
        for back, waits in ((False, True), (False, False), (True, False))
        for again in run(here, ranks, timeout_s=600, late=Late(one.rank, back, waits))
    ]
    return replace(row, late_bytes=max(t.live_bytes for t in took if t.rank == one.rank))


def document(rows: Sequence[Row], seed: int) -> str:
    """What was found, in Markdown."""
    found = [row.taken for row in rows]
    right = sum(one.right for one in found)
    between = sum(
        UNDER * row.least_bytes <= row.taken.live_bytes <= row.taken.predicted_bytes / UNDER
        for row in rows
    )
    plans = {one.plan for one in found}
    lines = [
        f"{len(found)} devices of {len(plans)} plans, seed {seed}: {right} within"
        f" {100 * (UNDER - 1):.0f} and +{100 * (OVER - 1):.0f} %; mean error"
        f" {percent(fmean(abs(one.share - 1) for one in found))}, least"
        f" {100 * (min(one.share for one in found) - 1):+.1f} %, most"
        f" {100 * (max(one.share for one in found) - 1):+.1f} %. {between} are between what is"
        " predicted if nothing that is sent ever waits and what is predicted (to 2 %).",
    ]
    late = [row for row in rows if row.late_bytes is not None]
    if late:
        lines.append(
            f"{len(late)} over by more were run again with slow links:"
            f" {sum(row.most.right for row in late)} are within the limits of the most that they"
            f" took then, the largest"
            f" {100 * (max(row.most.share for row in late) - 1):+.1f} %."
        )
    cells = [
        [one.plan.removesuffix(".strategy.json"), one.rank, f"{row.least_bytes / 1e6:.2f}",
         f"{one.live_bytes / 1e6:.2f}",
         "" if row.late_bytes is None else f"{row.late_bytes / 1e6:.2f}",
         f"{one.predicted_bytes / 1e6:.2f}",
         f"{100 * (one.share - 1):+.1f} %"]
        for row, one in zip(rows, found, strict=True)
    ]  # fmt: skip
    head = [
        "plan",
        "rank",
        "MB if nothing waits",
        "live MB",
        "with slow links",
        "predicted MB",
        "error",
    ]
    return "\n".join([*lines, "", table(head, cells), ""])


def main() -> None:
    """Runs the plans and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep", type=Path, help="folder for plans and models")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = measured(folder, options.models.split(","), options.seed)
    text = document(found, options.seed)
    print(text)
    if options.write:
        put(DOCUMENT, "memory", f"\n{text}")
    for row in found:
        if not row.taken.right:
            errors = [f"{100 * (one.share - 1):+.1f} %" for one in (row.taken, row.most)]
            said = f"{errors[0]}, with slow links {errors[1]}"
            print(f"outside: {row.taken.plan} rank {row.taken.rank} {said}", file=sys.stderr)


if __name__ == "__main__":
    main()
