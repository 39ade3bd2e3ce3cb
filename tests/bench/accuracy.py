"""How accurate the simulator is: plans predicted, then run, on a quiet machine (40 minutes).

Plans are drawn by a seed.

    python -m tests.bench.accuracy [--write] [--only whole|split] [--keep FOLDER]
        [--models NAME,...] [--steps N] [--two N] [--four N] [--slow N]
    python -m tests.bench.accuracy --from FOLDER

Plans without split operators are drawn; of those with split operators there is one of each kind
(`tests/support/split_kinds.py`), predicted with measured times of the parts that it runs. Each of
the two has tables of its own in the document.

Each rank of a run has a core of its own, as long as there are enough. The machine should do nothing
else. Profiles and topologies are measured first, on the same cores. Where there can be network
namespaces, some plans run between two of them, whose link is slow.

Of an incomplete run, `--from` reads the plans that were run.

A shared machine computes faster at one time than at another. So a fixed piece of work is timed
around every profile and every run. Their ratio, the pace, says how much longer the same work took
at the run than at the profile, and errors are also given for predictions that are longer by it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import numpy as np
import torch

from planner.artefacts.calibration import UNCALIBRATED
from planner.artefacts.files import read_profile, write_plan, write_profile
from planner.artefacts.profile import Part
from planner.clusters.yaml.read import read_topology
from planner.costs.stage_pass import split_parts
from planner.profilers.cache import processor
from planner.profilers.contention_worker import WORK
from planner.profilers.origin import profiled_model
from planner.profilers.parts import measure_parts
from planner.reports.tables import percent
from planner.reports.traces import calibrate_lines
from planner.simulator.traces.calibrate import (
    CheckedCalibration,
    MeasuredRun,
    calibrate,
    fit,
    predicted_s,
)
from planner.simulator.traces.read import read_trace
from tests.bench.solvers import put
from tests.support.accuracy_plans import SUBJECTS, Drawn, Subject, draw, draw_split
from tests.support.models import cached
from tests.support.shaped_hosts import missing, on_hosts, on_ranks

ROOT = Path(__file__).parents[2]
PINNED = str(ROOT / "tests/support/pinned.py")
DOCUMENT = ROOT / "docs" / "accuracy.md"
# Names of the tables in the document.
TABLES = {"whole": "accuracy", "split": "accuracy of split plans"}
SEED, STEPS, REPEATS = 1, 8, 2
TWO, FOUR, SLOW = 5, 1, 3
RATE_MBIT, PORT = 200, 29621
PACE_S, PACE_FILE = 0.3, "pace.json"


def planner(
    arguments: Sequence[str],
    folder: Path,
    nproc: int = 1,
    rate_mbit: int | None = None,
    program: str = PINNED,
) -> str:
    """The output of `planner ARGUMENTS` with a core per rank.

    Args:
        rate_mbit: rate of each rank's link, if each rank is a host; None goes over loopback.
        program: the program that a rank on this host runs.
    """
    if rate_mbit is not None:
        command = on_ranks(shlex.join(arguments), PORT, Path(PINNED))
        done = on_hosts(command, *[rate_mbit] * nproc, cwd=folder)
    else:
        start = [sys.executable]
        if nproc > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        done = subprocess.run(
            [*start, program, *arguments], cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"planner {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def say(line: str) -> None:
    """Prints a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def pace_s() -> float:
    """Time of a fixed piece of work on one core: the geometric mean of one that computes and one
    that moves bytes.
    """
    torch.set_num_threads(1)
    times_s = []
    for make in WORK.values():
        run, own = make(), []
        until = time.monotonic() + PACE_S
        while time.monotonic() < until:
            begun = time.perf_counter()
            run()
            own.append(time.perf_counter() - begun)
        times_s.append(median(own))
    return geometric_mean(times_s)


def prepare(
    folder: Path,
    models: Sequence[str],
    ranks: Sequence[int],
    slow: bool,
    subjects: Mapping[str, Subject] = SUBJECTS,
) -> None:
    """Topologies and profiles, measured here."""
    for name in models:
        cached(name, folder, subjects[name].build)
    for nproc in ranks:
        say(f"probing {nproc} ranks")
        planner(["topology", "probe", "-o", f"cluster{nproc}.yaml"], folder, nproc)
    if slow:
        say(f"probing a link of {RATE_MBIT} Mbit/s")
        planner(["topology", "probe", "-o", "slow.yaml"], folder, 2, RATE_MBIT)
    paces_s = {}
    for name in models:
        say(f"profiling {name}")
        before_s = pace_s()
        subject = subjects[name]
        dims = [text for dim in subject.dims for text in ("--dim", dim)]
        # On all cores, which the processes share whose slowdown it measures.
        planner(
            ["profile", f"{name}.onnx", "--batch", str(subject.batch), *dims, "--no-cache",
             "-o", f"{name}.json"],
            folder,
            program=str(ROOT / "cli.py"),
        )  # fmt: skip
        paces_s[name] = fmean((before_s, pace_s()))
    (folder / PACE_FILE).write_text(json.dumps(paces_s))


def drawn(
    folder: Path, models: Sequence[str], counts: Mapping[int, int], slow: int, kinds: Sequence[str]
) -> list[Drawn]:
    """The plans, drawn for the measured profiles and topologies.

    Args:
        counts: number of plans of each model over loopback, by number of ranks; of split plans only
            whether there are any.
        slow: number of plans of each model over a slow link, of those that are not split.
        kinds: of the names of `TABLES`.
    """
    topologies = {n: read_topology(folder / f"cluster{n}.yaml") for n in (2, 4) if counts[n]}
    plans: list[Drawn] = []
    for name in models:
        profile = read_profile(folder / f"{name}.json")
        if "split" in kinds:
            plans += draw_split(name, profile, topologies, SEED)
        if "whole" not in kinds:
            continue
        plans += draw(name, profile, topologies, SEED, counts)
        if slow:
            shaped = {2: read_topology(folder / "slow.yaml")}
            plans += draw(name, profile, shaped, SEED, {2: slow}, RATE_MBIT)
    return plans


def refine(folder: Path, plans: Sequence[Drawn]) -> bool:
    """Measures the parts of operators that plans run and whose times are not known, as `planner
    solve --refine` does, and writes them into the profiles; whether there were any.
    """
    wanted: dict[str, dict[int, set[Part]]] = {}
    for one in plans:
        profile = one.problem.profile
        for stage in one.plan.strategy.stages:
            for v, part in split_parts(profile, stage).items():
                if all(known.part != part for known in profile.operators[v].parts):
                    wanted.setdefault(one.model, {}).setdefault(v, set()).add(part)
    for name, parts in wanted.items():
        say(f"measuring {sum(map(len, parts.values()))} parts of {name}")
        path = folder / f"{name}.json"
        profile = read_profile(path)
        model = profiled_model(profile, folder / f"{name}.onnx")
        write_profile(measure_parts(model, profile, parts, cached=False).profile, path)
    return bool(wanted)


def measure(folder: Path, plans: Sequence[Drawn], steps: int, repeats: int) -> None:
    """Runs every plan, and all of them again."""
    for one in plans:
        write_plan(one.plan, folder / f"{one.name}.strategy.json")
    for repeat in range(repeats):
        for one in plans:
            begun, before_s = time.monotonic(), pace_s()
            out = planner(
                ["launch", f"{one.name}.strategy.json", "--steps", str(steps), "--json",
                 "--trace", f"{one.name}.{repeat}.trace.json"],
                folder,
                one.ranks,
                one.rate_mbit,
            )  # fmt: skip
            report = json.loads(out.splitlines()[-1])
            report["pace_s"] = fmean((before_s, pace_s()))
            say(
                f"{one.name} {one.said}: predicted {one.plan.prediction.iteration_s:.3f} s,"
                f" measured {report['measured_iteration_s']:.3f} s"
                f" ({time.monotonic() - begun:.0f} s)"
            )
            (folder / f"{one.name}.{repeat}.json").write_text(json.dumps(report))


def made(folder: Path, models: Sequence[str], counts: Mapping[int, int]) -> list[str]:
    """The models that were profiled in a folder, perhaps not all.

    Raises:
        SystemExit: if the run was stopped before the first launch.
    """
    paces = folder / PACE_FILE
    missing = [f"cluster{n}.yaml" for n in counts if counts[n]]
    missing = [name for name in (PACE_FILE, *missing) if not (folder / name).is_file()]
    if missing:
        sys.exit(
            f"{folder}: expected the measurements of `--keep`, got no {', '.join(missing)}; the run"
            " was stopped before its first plan, or had other --two and --four"
        )
    known = json.loads(paces.read_text())
    return [name for name in models if name in known and (folder / f"{name}.json").is_file()]


def run_plans(folder: Path, plans: Sequence[Drawn]) -> list[Drawn]:
    """The plans that were run at least once; says how many were not.

    Raises:
        SystemExit: if there is none.
    """
    done = [one for one in plans if reports_of(folder, one)]
    if not done:
        sys.exit(f"{folder}: none of {len(plans)} plans was run; run them with --keep {folder}")
    if len(done) < len(plans):
        say(f"{folder}: {len(plans) - len(done)} of {len(plans)} plans were not run")
    return done


def reports_of(folder: Path, one: Drawn) -> list[Path]:
    """The reports of a plan's runs; each is written when the run's trace is there."""
    return sorted(folder.glob(f"{one.name}.?.json"))


# ------------------------------------------------------------------------------- the document


@dataclass(frozen=True)
class PlanTimes:
    """Times of one plan, in s.

    Attributes:
        drawn: the plan.
        measured_s: mean of its runs.
        spread: slowest less fastest run, over the mean.
        before_s: predicted without a calibration.
        after_s: predicted with one from runs of other models.
        pace: how much longer the fixed piece of work took at the runs than at the profile.
    """

    drawn: Drawn
    measured_s: float
    spread: float
    before_s: float
    after_s: float
    pace: float

    @property
    def at_one_pace_s(self) -> float:
        """Predicted without a calibration, at the pace of the runs."""
        return self.before_s * self.pace


def rows_of(
    folder: Path, plans: Sequence[Drawn]
) -> tuple[list[PlanTimes], dict[bool, CheckedCalibration]]:
    """Measured and predicted times of every plan, and the calibrations from all runs with two ranks
    over loopback, by whether operators are split. The predictions use calibrations from runs of
    other models with two ranks over the same network, of plans that split operators as this does.
    """
    runs = {
        one.name: [
            MeasuredRun(path.name, one.problem, one.plan, read_trace(path).timeline)
            for path in (p.with_suffix(".trace.json") for p in reports_of(folder, one))
        ]
        for one in plans
    }
    pairs = [one for one in plans if one.ranks == 2]
    paces_s, rows = json.loads((folder / PACE_FILE).read_text()), []
    for one in plans:
        known_by = (one.rate_mbit, one.splits)
        alike = [other for other in pairs if (other.rate_mbit, other.splits) == known_by]
        others = [run for other in alike if other.model != one.model for run in runs[other.name]]
        first, known = runs[one.name][0], fit(others) if others else UNCALIBRATED
        reports = [json.loads(path.read_text()) for path in reports_of(folder, one)]
        measured = [report["measured_iteration_s"] for report in reports]
        rows.append(
            PlanTimes(
                one,
                fmean(measured),
                (max(measured) - min(measured)) / fmean(measured),
                predicted_s(first, UNCALIBRATED),
                predicted_s(first, known),
                fmean(report["pace_s"] for report in reports) / paces_s[one.model],
            )
        )
    near = [one for one in pairs if one.rate_mbit is None]
    return rows, {
        splits: calibrate(some)
        for splits in (False, True)
        if (some := [run for one in near if one.splits == splits for run in runs[one.name]])
    }


def mean_error(rows: Sequence[PlanTimes], which: str) -> float:
    """Mean of |predicted - measured| / measured."""
    return fmean(abs(getattr(row, which) / row.measured_s - 1) for row in rows)


def order(rows: Sequence[PlanTimes], which: str) -> tuple[int, int]:
    """Pairs of plans of one model whose measured times differ by more than 5 %: the number of those
    whose predicted times have the same order, and of all.
    """
    right = pairs = 0
    for a, b in combinations(rows, 2):
        far = abs(a.measured_s - b.measured_s) > 0.05 * min(a.measured_s, b.measured_s)
        if a.drawn.model == b.drawn.model and far:
            pairs += 1
            right += (a.measured_s < b.measured_s) == (getattr(a, which) < getattr(b, which))
    return right, pairs


def rank_correlation(rows: Sequence[PlanTimes], which: str) -> float:
    """Spearman's rank correlation of measured and predicted times per model: the mean over models
    with at least three plans.
    """
    by_model: dict[str, list[PlanTimes]] = {}
    for row in rows:
        by_model.setdefault(row.drawn.model, []).append(row)

    def places(values: Sequence[float]) -> Any:
        return np.argsort(np.argsort(values))

    return fmean(
        float(
            np.corrcoef(
                places([row.measured_s for row in some]),
                places([getattr(row, which) for row in some]),
            )[0, 1]
        )
        for some in by_model.values()
        if len(some) > 2
    )


def head(rows: Sequence[PlanTimes], measured: datetime) -> str:
    """The machine and the plans in a sentence."""
    seed = "" if rows[0].drawn.splits else f", seed {SEED}"
    return (
        f"Measured {measured:%Y-%m-%d} on {processor()}, {os.cpu_count()} cores, PyTorch"
        f" {torch.__version__}, gloo, one thread per rank. {len(rows)} plans{seed}."
    )


def document(
    rows: Sequence[PlanTimes], fitted: CheckedCalibration | None, measured: datetime
) -> str:
    """The tables of plans without split operators in Markdown.

    Args:
        rows: the times of all plans.
        fitted: the calibration from runs with two ranks over loopback, None without any.
        measured: time of the last run.
    """
    lines = [
        head(rows, measured),
        "",
        "| ranks | link | plans | spread of equal runs | error before | at one pace |"
        " error after | order right, before | order right, after | rank correlation, after |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks, rate_mbit in ((2, None), (2, RATE_MBIT), (4, None)):
        some = [row for row in rows if (row.drawn.ranks, row.drawn.rate_mbit) == (ranks, rate_mbit)]
        if not some:
            continue
        link = "loopback" if rate_mbit is None else f"{rate_mbit} Mbit/s"
        before, after = order(some, "before_s"), order(some, "after_s")
        correlation = f"{rank_correlation(some, 'after_s'):.3f}" if len(some) > 10 else ""
        lines.append(
            f"| {ranks} | {link} | {len(some)} | {percent(fmean(row.spread for row in some))} |"
            f" {percent(mean_error(some, 'before_s'))} |"
            f" {percent(mean_error(some, 'at_one_pace_s'))} |"
            f" {percent(mean_error(some, 'after_s'))} |"
            f" {before[0]} of {before[1]} | {after[0]} of {after[1]} | {correlation} |"
        )
    lines += calibration_lines(fitted)
    lines += [
        "",
        "| plan | stages, schedule, microbatches, shares of the time | measured | spread | pace |"
        " before | error | at one pace | after | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += with_calibrated(rows)
    return "\n".join(lines) + "\n"


def calibration_lines(fitted: CheckedCalibration | None) -> list[str]:
    """A calibration in words; none without any."""
    if fitted is None:
        return []
    head = "The calibration from all runs with two ranks over loopback:"
    return ["", head, "", *(f"- {line}" for line in calibrate_lines(fitted))]


def with_calibrated(rows: Sequence[PlanTimes]) -> list[str]:
    """A line of the table for each plan."""
    return [
        f"{cells(row)} {1e3 * row.after_s:.1f} ms | {signed(row.after_s, row)} |" for row in rows
    ]


def cells(row: PlanTimes) -> str:
    """The cells of a plan, up to those with a calibration."""
    return (
        f"| {row.drawn.name} | {row.drawn.said} | {1e3 * row.measured_s:.1f} ms |"
        f" {percent(row.spread)} | {row.pace:.3f} | {1e3 * row.before_s:.1f} ms |"
        f" {signed(row.before_s, row)} | {signed(row.at_one_pace_s, row)} |"
    )


def signed(predicted: float, row: PlanTimes) -> str:
    """The error of a predicted time, in s, with its sign."""
    return f"{100 * (predicted / row.measured_s - 1):+.1f} %"


def split_document(
    rows: Sequence[PlanTimes], fitted: CheckedCalibration | None, measured: datetime
) -> str:
    """The tables of plans with split operators in Markdown.

    Args:
        rows: the times of all plans.
        fitted: the calibration from runs with two ranks over loopback, None without any.
        measured: time of the last run.
    """
    lines = [
        head(rows, measured),
        "",
        "| ranks | kind | plans | spread of equal runs | error before | at one pace |"
        " mean, with sign | error after | order right, before | order right, after |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in (2, 4):
        here = [row for row in rows if row.drawn.ranks == ranks]
        kinds = dict.fromkeys(row.drawn.said.split()[0] for row in here)
        for kind in ("all", *kinds) if here else ():
            some = [row for row in here if kind in ("all", row.drawn.said.split()[0])]
            right = [
                f"{order(some, which)[0]} of {order(some, which)[1]}" if kind == "all" else ""
                for which in ("before_s", "after_s")
            ]
            lines.append(
                f"| {ranks} | {kind} | {len(some)} | {percent(fmean(row.spread for row in some))} |"
                f" {percent(mean_error(some, 'before_s'))} |"
                f" {percent(mean_error(some, 'at_one_pace_s'))} |"
                f" {100 * fmean(row.at_one_pace_s / row.measured_s - 1 for row in some):+.1f} % |"
                f" {percent(mean_error(some, 'after_s'))} | {right[0]} | {right[1]} |"
            )
    lines += calibration_lines(fitted)
    lines += [
        "",
        "| plan | kind, schedule, microbatches | measured | spread | pace | before | error |"
        " at one pace | after | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += with_calibrated(rows)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, or reads earlier measurements, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--only", choices=TABLES, help="plans of which operators are so")
    parser.add_argument("--two", type=int, default=TWO, help="plans with two ranks per model")
    parser.add_argument("--four", type=int, default=FOUR, help="plans with four ranks per model")
    parser.add_argument("--slow", type=int, default=SLOW, help="plans over a slow link per model")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--keep", type=Path, help="folder to keep measurements in")
    parser.add_argument("--from", dest="known", type=Path, help="folder with measurements to read")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    options = parser.parse_args()
    models, counts = options.models.split(","), {2: options.two, 4: options.four}
    slow, kinds = options.slow, [options.only] if options.only else [*TABLES]
    if "whole" not in kinds:
        slow = 0
    if options.known is not None and not (options.known / "slow.yaml").is_file():
        slow = 0
    if slow and options.known is None and (why := missing()):
        say(f"no plans over a slow link: {why}")
        slow = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.known or options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.known is None:
            prepare(folder, models, [n for n in counts if counts[n]], slow > 0)
        else:
            models = made(folder, models, counts)
        plans = drawn(folder, models, counts, slow, kinds)
        if options.known is None:
            # With measured parts, solvers may choose others.
            while refine(folder, plans):
                plans = drawn(folder, models, counts, slow, kinds)
            measure(folder, plans, options.steps, options.repeats)
        else:
            plans = run_plans(folder, plans)
        rows, fitted = rows_of(folder, plans)
        last = max(path.stat().st_mtime for path in folder.glob("*.trace.json"))
        measured = datetime.fromtimestamp(last, UTC)
    for kind in kinds:
        some = [row for row in rows if row.drawn.splits == (kind == "split")]
        if not some:
            continue
        make = split_document if kind == "split" else document
        page = make(some, fitted.get(kind == "split"), measured)
        print(page)
        if options.write:
            put(DOCUMENT, TABLES[kind], f"\n{page}")


if __name__ == "__main__":
    main()
