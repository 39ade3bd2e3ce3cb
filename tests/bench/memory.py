"""Peak memory of 100 plans, predicted and tracked (15 minutes).

Plans are drawn by a seed, on the models of the accuracy benchmark. Kinds are whole, split, shared,
ahead, layers, offloaded, autocast and short; the first three have tables in docs/accuracy.md.

    python -m tests.bench.memory [--write] [--only KIND]
        [--models NAME,...] [--seed N] [--keep FOLDER]

On a CPU, a tracker counts storages from their making to their end. The machine may do other things.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

from planner.artefacts.files import write_plan
from planner.artefacts.options import Optimizer
from planner.artefacts.problem import Problem
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import (
    ScheduleName,
    Stage,
    Strategy,
    in_parts,
    stages_by_device,
)
from planner.artefacts.topology import HostLink, Topology
from planner.costs.evaluate import evaluate
from planner.costs.peak_memory import peak_memory
from planner.costs.stage_memory import stage_memory
from planner.model.load import ReadOptions, load
from planner.profilers.measured import measure
from planner.profilers.rules import with_rules
from planner.reports.tables import percent
from planner.resharding.overlap import held_ahead_bytes
from planner.schedules.orders import default_warmups
from planner.solvers.segments import Again, in_order, segments_by_worth
from tests.bench.solvers import ROOT, put, table
from tests.support.accuracy_plans import SUBJECTS, planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.memory_runs import OVER, UNDER, RankPeak, SlowLinks, run
from tests.support.models import cached
from tests.support.split_kinds import KINDS, split_plan

DOCUMENT = ROOT / "docs" / "accuracy.md"
SEED = 2
# Numbers of replicas of the stages, and numbers of plans per model, by number of ranks.
WIDTHS = {
    1: ((1,),),
    2: ((2,), (1, 1)),
    4: ((4,), (2, 2), (1, 2, 1), (1, 1, 1, 1), (3, 1), (1, 3), (2, 1, 1)),
}
COUNTS = {1: 2, 2: 5, 4: 5}
RERUN = 0.3
# Names of the tables in the document, and kinds of plans that have none there.
TABLES = {
    "whole": "memory", "split": "memory of split plans",
    "shared": "memory of state over replicas",
}  # fmt: skip
PRINTED = ("ahead", "layers", "offloaded", "autocast", "short")
TYPES = {
    "autocast": {"dtype": "bfloat16"},
    "short": {"dtype": "bfloat16", "parameters": "bfloat16"},
}

Plans = Mapping[str, tuple[Problem, Strategy]]
"""Problems and strategies by the names of their plans."""


def profiled(name: str, folder: Path, *, rules: bool = False, **types: str) -> Profile:
    """The profile of a model. Times have no influence on bytes, so they are measured hastily.

    Args:
        rules: whether those by which operators are split are sought, too.
        types: of the computation and of parameters, as `measure` takes them.
    """
    cached(name, folder, SUBJECTS[name].build)
    sizes = {key: int(size) for key, size in (text.split("=") for text in SUBJECTS[name].dims)}
    model = load(folder / f"{name}.onnx", ReadOptions(batch=SUBJECTS[name].batch, dimensions=sizes))
    quick = {"repetitions": 1, "budget_s": 0.0, "cached": False}
    profile = measure(model, model_path=f"{name}.onnx", **types, **quick)
    profile = with_rules(profile, model) if rules else profile
    return replace(profile, warnings=())


def drawn(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """Plans of a model without split operators, by number of ranks."""
    dice = random.Random(f"{name} {seed}")
    names = [operator.name for operator in profile.graph.operators]
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for ranks, count in COUNTS.items():
        some = by_ranks.setdefault(ranks, {})
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
            title = (
                f"{name}.{'+'.join(map(str, replicas))}.{schedule.value}.M{number}"
                f".W{'-'.join(map(str, warmups))}.at{'-'.join(map(str, cuts)) or '0'}"
                f".{optimizer.value}"
                f"{'.recompute' if again else ''}"
            )
            strategy = Strategy(tuple(parts), schedule, number)
            options = asked(number, schedule=schedule, optimizer=optimizer)
            some[title] = Problem(profile, cpus(ranks), **options), strategy
    return by_ranks


def split(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """Plans of a model with split operators, one of each kind that it has, by number of ranks."""
    dice = random.Random(f"{name} split {seed}")
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for ranks, kinds in KINDS.items():
        for kind in kinds:
            number, optimizer = dice.randint(2, 6), dice.choice(list(Optimizer))
            recompute = dice.choices(("none", "full"), (1 - RERUN, RERUN))[0]
            options = asked(number, optimizer=optimizer, recompute=recompute)
            plan = split_plan(profile, cpus(ranks), kind, options)
            if plan is not None:
                again = ".recompute" if recompute == "full" else ""
                title = f"{name}.{kind}.M{number}.{optimizer.value}{again}"
                by_ranks.setdefault(ranks, {})[title] = plan
    return by_ranks


def shared(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """Plans of a model whose replicas keep parts, by number of ranks: two replicas, four in pairs,
    and a pipeline of two stages with two replicas each.
    """
    dice = random.Random(f"{name} shared {seed}")
    names = tuple(operator.name for operator in profile.graph.operators)
    middle = len(names) // 2
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for ranks, (kind, widths) in product((2, 4), (("one", (0,)), ("pipeline", (0, 2)))):
        for level in (1, 2, 3) if (ranks, kind) != (2, "pipeline") else ():
            number, optimizer = ranks * dice.randint(1, 2), dice.choice(list(Optimizer))
            again = dice.random() < RERUN
            bounds = [0, *([middle] if kind == "pipeline" else []), len(names)]
            replicas = ranks // len(widths)
            depths = default_warmups([replicas] * len(widths), number, 0, ScheduleName.ONE_F_ONE_B)
            stages = tuple(
                replace(
                    Stage.whole(names[a:b], range(first, first + replicas), depth, again),
                    over=2, zero=level,
                )
                for (a, b), first, depth in zip(pairwise(bounds), widths, depths, strict=True)
            )  # fmt: skip
            title = f"{name}.{kind}.zero{level}.M{number}.{optimizer.value}"
            title += ".recompute" if again else ""
            strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, number)
            problem = Problem(profile, cpus(ranks), **asked(number, optimizer=optimizer))
            by_ranks.setdefault(ranks, {})[title] = problem, strategy
    return by_ranks


def ahead(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """The plans of `split` and `shared` with collectives beside computations, by number of ranks:
    they hold nothing ahead, a part of all that they can, or all.
    """
    dice = random.Random(f"{name} ahead {seed}")
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for plans in (split(name, profile, seed), shared(name, profile, seed)):
        for ranks, some in plans.items():
            for title, (problem, strategy) in some.items():
                share = dice.choice((0, 1 / 8, 1 / 3, 1))
                stages = tuple(
                    replace(one, prefetch=int(share * held_ahead_bytes(one, profile.graph)[1]))
                    if in_parts(one)
                    else one
                    for one in strategy.stages
                )
                beside = problem, replace(strategy, stages=stages)
                by_ranks.setdefault(ranks, {})[f"{title}.ahead{share:.0%}"] = beside
    return by_ranks


def again(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """The plans of all other kinds on up to two ranks, a part of whose layers runs again: about
    half of the plans keep attention and every second product.
    """
    dice = random.Random(f"{name} again {seed}")
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for ranks, plans in every(name, profile, seed).items():
        for title, (problem, strategy) in plans.items():
            stages, what = [], dice.choice((Again.LAYERS, Again.SELECTED))
            for one in strategy.stages:
                some = segments_by_worth(profile, one, what)
                kept = in_order(one, some[: dice.randint(1, len(some))] if some else ())
                stages.append(replace(one, recompute=bool(kept), recomputed=kept))
            parted = problem, replace(strategy, stages=tuple(stages))
            name_of_kind = f"{title.removesuffix('.recompute')}.{what.name.lower()}"
            by_ranks.setdefault(ranks, {})[name_of_kind] = parted
    return by_ranks


def offloaded(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """The plans of `again`, with activations of a part of the layers in the host's memory, some of
    which run again.
    """
    dice = random.Random(f"{name} offloaded {seed}")
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for ranks, plans in again(name, profile, seed).items():
        for title, (problem, strategy) in plans.items():
            stages = []
            for one in strategy.stages:
                layers = in_order(one, segments_by_worth(profile, one))
                rerun = tuple(some for some in one.recomputed if dice.random() < 0.5)
                selected = {some[0]: some for some in rerun}
                kept = tuple(selected.get(some[0], some) for some in layers if dice.random() < 0.7)
                stages.append(replace(one, recompute=bool(rerun), recomputed=rerun, offloaded=kept))
            waiting = problem, replace(strategy, stages=tuple(stages))
            by_ranks.setdefault(ranks, {})[f"{title.removesuffix('.layers')}.offloaded"] = waiting
    return by_ranks


def every(name: str, profile: Profile, seed: int) -> Mapping[int, Plans]:
    """The plans of all other kinds on up to two ranks; all have different names."""
    by_ranks: dict[int, dict[str, tuple[Problem, Strategy]]] = {}
    for make in (drawn, split, shared, ahead):
        for ranks, plans in make(name, profile, seed).items():
            if ranks <= 2:
                by_ranks.setdefault(ranks, {}).update(plans)
    return by_ranks


def cpus(count: int) -> Topology:
    """Processes on one host."""
    return cluster([unit_type("cpu")] * count, bandwidth=1e9, host_link=HostLink(1e9))


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank of a plan.

    Attributes:
        peak: predicted and measured.
        least_bytes: predicted for transfers that never wait.
        late_bytes: the largest measured with slow links; None where these were not run, because the
            first measurement was near the prediction.
    """

    peak: RankPeak
    least_bytes: int
    late_bytes: int | None = None

    @property
    def most(self) -> RankPeak:
        """The larger peak of the two measurements."""
        return replace(self.peak, live_bytes=max(self.peak.live_bytes, self.late_bytes or 0))


def unhindered(problem: Problem, strategy: Strategy) -> list[int]:
    """The predicted peak of each rank, if transfers never wait."""
    code = evaluate(problem, strategy).program.code
    peaks_bytes = []
    for d, mine in enumerate(stages_by_device(strategy).values()):
        needs = {s: stage_memory(problem.profile, strategy.stages[s]) for s in mine}
        peak = peak_memory(problem, strategy, code, d, needs, waits=False)
        peaks_bytes.append(peak.total_bytes - peak.reserve_bytes)
    return peaks_bytes


def measured(folder: Path, models: Sequence[str], seed: int, kind: str) -> list[RankMemory]:
    """Peak memory of every rank of every plan; one start of torchrun per number of ranks.

    Args:
        kind: one of `TABLES` or `PRINTED`.
    """
    rows: list[RankMemory] = []
    make = {"split": split, "shared": shared, "ahead": ahead, "autocast": every,
            "short": every, "layers": again, "offloaded": offloaded}.get(kind, drawn)  # fmt: skip
    how = {"rules": kind not in ("whole", "shared")}
    types = TYPES.get(kind, {})
    plans = {name: make(name, profiled(name, folder, **how, **types), seed) for name in models}
    for ranks in sorted({ranks for of_model in plans.values() for ranks in of_model}):
        here = folder / f"{kind}{ranks}"
        here.mkdir(exist_ok=True)
        least: dict[str, list[int]] = {}
        for name, of_model in plans.items():
            (here / f"{name}.onnx").write_bytes((folder / f"{name}.onnx").read_bytes())
            for title, (problem, strategy) in of_model.get(ranks, {}).items():
                path = here / f"{title}.strategy.json"
                write_plan(planned(problem, strategy), path)
                least[path.name] = unhindered(problem, strategy)
        first = [
            RankMemory(peak, least[peak.plan][peak.rank])
            for peak in run(here, ranks, timeout_s=1800)
        ]
        rows += [row if row.peak.share <= OVER else run_late(row, here, ranks) for row in first]
    return rows


def run_late(row: RankMemory, folder: Path, ranks: int) -> RankMemory:
    """Runs a plan again with slow links from a rank, forward and back."""
    one, here = row.peak, folder / "late"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    for file in (one.plan, f"{one.plan.split('.')[0]}.onnx"):
        shutil.copy(folder / file, here)
    peaks = [
        again
        for back, waits in ((False, True), (False, False), (True, False))
        for again in run(here, ranks, timeout_s=600, late=SlowLinks(one.rank, back, waits))
    ]
    return replace(row, late_bytes=max(t.live_bytes for t in peaks if t.rank == one.rank))


def document(rows: Sequence[RankMemory], seed: int) -> str:
    """The table in Markdown, with its figures in words."""
    peaks = [row.peak for row in rows]
    right = sum(one.right for one in peaks)
    between = sum(
        UNDER * row.least_bytes <= row.peak.live_bytes <= row.peak.predicted_bytes / UNDER
        for row in rows
    )
    plans = {one.plan for one in peaks}
    lines = [
        f"{len(peaks)} devices of {len(plans)} plans, seed {seed}: {right} within"
        f" {100 * (UNDER - 1):.0f} and +{100 * (OVER - 1):.0f} %; mean error"
        f" {percent(fmean(abs(one.share - 1) for one in peaks))}, least"
        f" {100 * (min(one.share for one in peaks) - 1):+.1f} %, most"
        f" {100 * (max(one.share for one in peaks) - 1):+.1f} %. {between} are between the"
        " prediction for transfers that never wait and the prediction (to 2 %).",
    ]
    late = [row for row in rows if row.late_bytes is not None]
    if late:
        lines.append(
            f"{len(late)} that were predicted too high by more were run again with slow links:"
            f" the larger peak is within the limits for {sum(row.most.right for row in late)};"
            f" the largest error is"
            f" {100 * (max(row.most.share for row in late) - 1):+.1f} %."
        )
    cells = [
        [one.plan.removesuffix(".strategy.json"), one.rank, f"{row.least_bytes / 1e6:.2f}",
         f"{one.live_bytes / 1e6:.2f}",
         "" if row.late_bytes is None else f"{row.late_bytes / 1e6:.2f}",
         f"{one.predicted_bytes / 1e6:.2f}",
         f"{100 * (one.share - 1):+.1f} %"]
        for row, one in zip(rows, peaks, strict=True)
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
    parser.add_argument("--only", choices=(*TABLES, *PRINTED), help="one kind of plans")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep", type=Path, help="folder for plans and models")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    if options.write and options.only in PRINTED:
        parser.error(f"--write: plans of --only {options.only} have no table in {DOCUMENT.name}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for kind in [options.only] if options.only else TABLES:
            rows = measured(folder, options.models.split(","), options.seed, kind)
            text = document(rows, options.seed)
            print(text)
            if options.write:
                put(DOCUMENT, TABLES[kind], f"\n{text}")
            tell(rows)


def tell(rows: Sequence[RankMemory]) -> None:
    """Tells which ranks are outside the limits."""
    for row in rows:
        if not row.peak.right:
            errors = [f"{100 * (one.share - 1):+.1f} %" for one in (row.peak, row.most)]
            both = f"{errors[0]}, with slow links {errors[1]}"
            print(f"outside: {row.peak.plan} rank {row.peak.rank} {both}", file=sys.stderr)


if __name__ == "__main__":
    main()
