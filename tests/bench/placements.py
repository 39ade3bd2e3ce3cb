"""NetSplit's experiments (thesis, Nanjing 2023) anew, and rows beyond them (60 minutes).

One whole batch is one microbatch. Samples/s of every placement are the planner's simulator's.

    python -m tests.bench.placements [--only NETWORK,...] [--cluster NAME,...] [--limit S]
    python -m tests.bench.placements --write

Each row is kept as a file in .cache/placements as soon as it is done, so the table can be made in
pieces: a row that is there is not asked again, unless --again is given or the planner's code has
changed since (--kept accepts rows of older code). --write puts the tables of all rows into
docs/placements.md, between its markers.

Times and memory come from computed profiles, so no model has weights. Limits and seconds are of
this process's processor time, so that other work on the machine takes nothing from a search.
"""

import argparse
import datetime
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from planner.artefacts.options import Objective
from planner.artefacts.problem import Problem, Result
from planner.artefacts.strategy import Strategy
from planner.costs.bounds import fractional_s, lower_bound_s
from planner.costs.operators import operator_times
from planner.planning.judge import judge, judge_unchanged
from planner.planning.portfolio import compare
from planner.solvers import SOLVERS
from planner.solvers.netsplit.options import NetSplit, Pesto
from tests.bench.placement_cases import CASES, CLUSTERS, NETWORKS, PUBLISHED, Case, megabytes
from tests.bench.solvers import ROOT, machine, percent, put, table
from tests.support.builders import changed

DOCUMENT = ROOT / "docs" / "placements.md"
KEPT = ROOT / ".cache" / "placements"
RIVALS = ("pesto", "m-topo", "m-etf", "m-sct", "heft", "single")
MICROBATCHES = 8
LIMIT_S = 60.0
# Part of NetSplit's limit for each of Pesto, both printed programs, and the pipelines.
SHARE = 0.25
# A lead of less is none.
LEVEL = 0.0005
NETWORKS_HEAD = [
    "network", "operators", "thesis: nodes", "parameters", "MB at 128", "thesis: MB",
    "thesis: batch", "Pesto", "m-TOPO", "m-ETF", "m-SCT", "NetSplit", "lead",
]  # fmt: skip
ROWS_HEAD = [
    "network", "batch", "Pesto", "m-TOPO", "m-ETF", "m-SCT", "HEFT", "one device",
    "Pesto as printed", "NetSplit as published", "NetSplit", "bound", "gap", "lead", "seconds",
]  # fmt: skip
PIPELINES_HEAD = ["network", "batch", "NetSplit, one microbatch",
                  f"{MICROBATCHES} microbatches (solver)", "times"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """The answers to one case.

    Attributes:
        rates: samples/s by solver; None without a plan.
        unfit: solvers whose plan does not fit by the planner's count.
        missing: why a solver has no plan.
        seconds: processor time of each solver with the judge.
        bound: no placement has more samples/s; gap: what NetSplit's lacks of it, relatively.
        parallel: time of all work on the fastest device over that of the longest chain.
        space: what NetSplit searched.
        reproducible: False where the clock cut NetSplit's search.
        pipelines: samples/s in several microbatches, and the solver; only of the thesis's rows.
        limit_s: NetSplit's limit.
        code: digest of the planner that answered; day: of the answers.
    """

    rates: dict[str, float | None]
    unfit: list[str]
    missing: dict[str, str]
    seconds: dict[str, float]
    bound: float
    gap: float | None
    parallel: float
    space: str
    reproducible: bool
    pipelines: tuple[float, str] | None
    limit_s: float
    code: str
    day: str

    @property
    def best_rival(self) -> tuple[float, str]:
        """Samples/s of the best rival whose plan fits, and its name."""
        return max((rate, name) for name in RIVALS if (rate := self.rates[name]) is not None)

    @property
    def lead(self) -> float:
        """NetSplit's throughput over the best rival's, - 1."""
        return (self.rates["netsplit"] or 0.0) / self.best_rival[0] - 1


# ----------------------------------------------------------------------------------- questions


def asked(problem: Problem, name: str) -> tuple[Problem, str]:
    """The question to a column of the table, and the solver that is asked."""
    switch = {"netsplit-published": NetSplit(relaxed=True), "pesto-printed": Pesto(True)}.get(name)
    if switch is None:
        return problem, name
    options = {"switches": (switch,)}
    return changed(problem, **options), name.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """A solver's answer, judged.

    Attributes:
        strategy: the judge's; None without a plan.
        rate: samples/s, by the simulator; latency_s: of the plan.
        fits: whether it fits by the planner's count.
        reason: why there is no plan.
        result: the solver's own.
        seconds: time of the search and the judge.
    """

    strategy: Strategy | None
    rate: float | None
    latency_s: float | None
    fits: bool
    reason: str | None
    result: Result
    seconds: float


def answered(case: Problem, name: str, limit_s: float, known: Sequence[Strategy] = ()) -> Answer:
    """The answer of one column.

    Args:
        known: strategies of others to start from.
    """
    problem, solver = asked(case, name)
    begin = time.monotonic()
    result = SOLVERS[solver](problem, limit_s, tuple(known))
    # With one microbatch that is the latency and the optimizer's step, in the simulator.
    judged = changed(problem, objective=Objective.ITERATION)
    verdict, reason, fits = None, result.reason, True
    if result.strategy is not None:
        verdict, reason = judge(judged, solver, result)
        if verdict is None and result.unfit:
            verdict, fits = judge_unchanged(judged, result.strategy)[0], False
    seconds = time.monotonic() - begin
    if verdict is None:
        return Answer(None, None, None, False, reason, result, seconds)
    prediction = verdict.prediction
    return Answer(
        verdict.strategy, prediction.throughput, prediction.latency_s, fits, None, result, seconds
    )


def row_of(case: Case, limit_s: float) -> Row:
    """The answers of all columns."""
    problem = case.problem(1, Objective.LATENCY)
    answers = {name: answered(problem, name, SHARE * limit_s) for name in RIVALS}
    for name in ("pesto-printed", "netsplit-published"):
        answers[name] = answered(problem, name, SHARE * limit_s)
    known = [one.strategy for one in answers.values() if one.strategy is not None and one.fits]
    ours = answers["netsplit"] = answered(problem, "netsplit", limit_s, tuple(dict.fromkeys(known)))
    path_s, work_s = lower_bound_s(problem), fractional_s(problem)
    bound_s = max(path_s, work_s, ours.result.bound_s or 0.0)
    alone_s = min(_work_s(problem, device) for device in range(len(problem.topology.devices)))
    return Row(
        rates={name: one.rate for name, one in answers.items()},
        unfit=[name for name, one in answers.items() if one.rate is not None and not one.fits],
        missing={name: one.reason or "" for name, one in answers.items() if one.rate is None},
        seconds={name: round(one.seconds, 1) for name, one in answers.items()},
        bound=case.batch / bound_s,
        gap=None if ours.latency_s is None else ours.latency_s / bound_s - 1,
        parallel=alone_s / path_s,
        space=ours.result.space,
        reproducible=ours.result.reproducible,
        pipelines=pipelined(case, SHARE * limit_s) if case.published else None,
        limit_s=limit_s,
        code=code(),
        day=datetime.date.today().isoformat(),
    )


def _work_s(problem: Problem, device: int) -> float:
    """Time of all operators on one device."""
    times = operator_times(problem, device)
    return float((times.forward_s + times.backward_s).sum())


def pipelined(case: Case, limit_s: float) -> tuple[float, str]:
    """Samples/s of the best plan for the same batch in several microbatches, and its solver."""
    best = compare(case.problem(MICROBATCHES, Objective.ITERATION), None, limit_s).best
    if best is None or best.plan is None:
        return 0.0, "nothing fits"
    return best.plan.prediction.throughput, best.solver


# ------------------------------------------------------------------------------------ the rows


def code() -> str:
    """Digest of the planner's modules, of which the answers depend."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "planner").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def kept(case: Case) -> Row | None:
    """The row that was made before."""
    path = KEPT / f"{case.key}.json"
    if not path.is_file():
        return None
    plain = json.loads(path.read_text())
    pipelines = plain.pop("pipelines")
    return Row(pipelines=None if pipelines is None else tuple(pipelines), **plain)


def keep(case: Case, row: Row) -> None:
    """Writes a row, all of it or nothing."""
    KEPT.mkdir(parents=True, exist_ok=True)
    unfinished = KEPT / f"{case.key}.part"
    unfinished.write_text(json.dumps(asdict(row), indent=1))
    unfinished.rename(KEPT / f"{case.key}.json")


# ------------------------------------------------------------------------------------ the text


def cell(row: Row, name: str) -> str:
    """Samples/s of a solver; with a star if the plan does not fit."""
    rate = row.rates[name]
    if rate is None:
        return "-"
    return f"{rate:,.{1 if rate >= 10 else 3}f}" + ("\\*" if name in row.unfit else "")


def cells(case: Case, row: Row) -> list[str]:
    """A line of the table."""
    gap = "-" if row.gap is None else percent(row.gap, 1)
    return [
        case.network, f"{case.batch}",
        *(cell(row, name) for name in (*RIVALS, "pesto-printed", "netsplit-published", "netsplit")),
        f"{row.bound:,.{1 if row.bound >= 10 else 3}f}", gap, percent(row.lead, 1),
        f"{row.seconds['netsplit']:.0f} of {row.limit_s:g}",
    ]  # fmt: skip


def described(name: str) -> list[str]:
    """A network beside the thesis's, with the throughput of each planner there."""
    graph = NETWORKS[name].profile(128).graph
    parameters = sum(p.bytes for p in graph.parameters if p.trainable) // 4
    own = [name, f"{len(graph.operators)}", f"{parameters / 1e6:.1f} M", f"{megabytes(graph):,.0f}"]
    thesis = PUBLISHED.get(name)
    if thesis is None:
        return [*own[:2], "", *own[2:], *[""] * 8]
    return [
        own[0], own[1], f"{thesis.nodes}", own[2], own[3], f"{thesis.megabytes:,}",
        f"{thesis.batch}", *(f"{rate:.2f}" for rate in thesis.throughput),
        percent(thesis.lead, 1),
    ]  # fmt: skip


def level(case: Case, row: Row) -> str | None:
    """Why NetSplit leads nobody in a row; None where it does."""
    if row.lead >= LEVEL:
        return None
    rate, rival = row.best_rival
    gap = "no gap is proved" if row.gap is None else f"at most {percent(row.gap, 1)} can be had"
    return (
        f"- {case.network}, batch {case.batch}, {case.cluster}: level with {rival} ({rate:,.1f});"
        f" {gap} in any placement. The longest chain of operators is {percent(1 / row.parallel, 0)}"
        f" of all work on the fastest device. Tried: {row.space}."
    )


def missing(case: Case, row: Row) -> list[str]:
    """Why some columns of a row have no plan."""
    where = f"{case.network}, batch {case.batch}, {case.cluster}"
    return [f"- {where}, {name}: {_without_stages(reason)}" for name, reason in row.missing.items()]


def _without_stages(reason: str) -> str:
    """A shortage without the list of stages and the sizes."""
    start = reason.find("need")
    short = reason[start:] if reason.startswith("stage") and start > 0 else reason
    return short.partition(" (")[0]


def written(rows: Mapping[Case, Row]) -> dict[str, str]:
    """The parts of the document."""
    parts = {"networks": table(NETWORKS_HEAD, [described(name) for name in NETWORKS])}
    groups = {"thesis": [case for case in rows if case.published]}
    for cluster in CLUSTERS:
        others = [case for case in rows if not case.published and case.cluster == cluster]
        groups[cluster] = others
    for name, group in groups.items():
        parts[name] = table(ROWS_HEAD, [cells(case, rows[case]) for case in group])
    parts["pipelines"] = table(
        PIPELINES_HEAD,
        [
            [case.network, case.batch, cell(rows[case], "netsplit"), f"{rate:,.1f} ({solver})",
             f"{rate / (rows[case].rates['netsplit'] or rate):.1f}"]
            for case in groups["thesis"] if rows[case].pipelines is not None
            for rate, solver in [rows[case].pipelines or (0.0, "")]
        ],
    )  # fmt: skip
    lines = [line for case, row in rows.items() if (line := level(case, row))]
    parts["level"] = "\n".join(lines) or "There is none."
    lines = [line for case, row in rows.items() for line in missing(case, row)]
    parts["missing"] = "\n".join(lines) or "All have a plan."
    spent = sum(sum(row.seconds.values()) for row in rows.values())
    parts["machine"] = (
        f"{machine()}; {len(rows)} rows of {len(CASES)}, {spent / 60:.0f} minutes of all solvers"
    )
    return parts


def main() -> None:
    """Ask for the rows that are not there, or write those that are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NETWORK,...", help=", ".join(NETWORKS))
    parser.add_argument("--cluster", metavar="NAME,...", help=", ".join(CLUSTERS))
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="processor s for NetSplit in each row"
    )
    parser.add_argument("--again", action="store_true", help="ask rows anew that are there")
    parser.add_argument("--kept", action="store_true", help="accept rows of older code")
    parser.add_argument(
        "--write", action="store_true", help="write the document, from all rows that are there"
    )
    options = parser.parse_args()
    time.monotonic = time.process_time  # what all searches look at
    names = [*NETWORKS] if options.only is None else options.only.split(",")
    clusters = [*CLUSTERS] if options.cluster is None else options.cluster.split(",")
    if not {*names} <= {*NETWORKS} or not {*clusters} <= {*CLUSTERS}:
        parser.error(f"known: {', '.join(NETWORKS)}; {', '.join(CLUSTERS)}")
    rows: dict[Case, Row] = {}
    for case in CASES:
        row = kept(case)
        stale = row is not None and row.code != code() and not options.kept
        if case.network in names and case.cluster in clusters:
            if row is None or stale or options.again:
                row = row_of(case, options.limit)
                keep(case, row)
            print(" | ".join([case.cluster, *cells(case, row)]), flush=True)
        if row is not None:
            rows[case] = row
    if options.write:
        if len(rows) < len(CASES):
            absent = ", ".join(case.key for case in CASES if case not in rows)
            print(f"written without rows that are not made yet: {absent}")
        for part, text in written(rows).items():
            put(DOCUMENT, part, text)


if __name__ == "__main__":
    main()
