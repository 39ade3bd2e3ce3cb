"""`python -m tests.fuzz`."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.bugs import BUGS
from tests.fuzz.pool import Job, Report, run_all
from tests.fuzz.runner import Limits
from tests.fuzz.suites import SUITES, suite_of


def main() -> int:
    """Runs the cases that are asked for; 1 if one has problems."""
    given = _arguments()
    if given.only is not None:
        numbers = given.only
    else:
        numbers = [n for n in range(given.cases) if given.suite in (None, suite_of(n))]
    limits = Limits(seconds=given.seconds)
    jobs = [Job(given.seed, number, limits, given.bug, given.keep) for number in numbers]
    started, codes, wrong = time.monotonic(), Counter[str](), []
    for count, report in enumerate(run_all(jobs, min(given.workers, len(jobs))), start=1):
        codes[f"{suite_of(report.job.number)} {report.codes[-1]}"] += 1
        if report.problems or given.only is not None or given.verbose:
            print(described(report), flush=True)
        if report.problems:
            wrong.append(report)
        if count % 500 == 0:
            print(f"{count} cases, {time.monotonic() - started:.0f} s", flush=True)
    ends = ", ".join(f"{name}: {count}" for name, count in sorted(codes.items()))
    print(f"{len(jobs)} cases, {len(wrong)} with problems, {time.monotonic() - started:.0f} s")
    print(f"exit codes by suite: {ends}")
    return 1 if wrong else 0


def described(report: Report) -> str:
    """A case in a few lines."""
    job = report.job
    head = f"{suite_of(job.number)} {job.number}: {report.seconds:.1f} s: {report.what[:300]!a}"
    lines = [head, f"  {report.command}", *(f"  PROBLEM {one!a}" for one in report.problems)]
    lines += [f"    {line!a}" for line in report.message.splitlines()[-4:]]
    if report.problems:
        lines.append(f"  again: python -m tests.fuzz --seed {job.seed} --only {job.number}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=5000, help="the first N (default: 5000)")
    parser.add_argument("--suite", choices=SUITES, help="of these only those of a suite")
    parser.add_argument("--only", type=int, nargs="+", metavar="CASE", help="these cases")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the inputs in a folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of a command")
    parser.add_argument("--bug", choices=BUGS, help="put a mistake of bugs.py into the package")
    parser.add_argument("--verbose", action="store_true", help="show cases without problems")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
