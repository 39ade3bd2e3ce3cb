"""Cases on several processors: each worker is a process that has loaded the planner, and forks."""

import gc
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz import checks
from tests.fuzz.bases import bases
from tests.fuzz.bugs import BUGS
from tests.fuzz.cases import lay_out
from tests.fuzz.runner import LIMITS, Limits, run
from tests.fuzz.suites import case, suite_of


@dataclass(frozen=True, slots=True)
class Job:
    """A case to run.

    Attributes:
        seed: of all cases.
        number: of the case.
        limits: of each of its commands.
        bug: name of a mistake to put into the package first, see `bugs`.
        keep: folder to leave its files in.
    """

    seed: int
    number: int
    limits: Limits = LIMITS
    bug: str | None = None
    keep: Path | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a case.

    Attributes:
        job: the case.
        what: was done to its files.
        command: the last one that ran.
        problems: what is wrong; empty if all is well.
        message: the end of what it printed as errors.
        codes: exit codes of its commands.
        seconds: of all commands.
    """

    job: Job
    what: str
    command: str
    problems: tuple[str, ...]
    message: str
    codes: tuple[int | None, ...]
    seconds: float


def make_ready() -> None:
    """Loads what the commands need; the processes that are forked share it."""
    bases()
    gc.collect()
    gc.freeze()


def run_case(job: Job) -> Report:
    """Runs the commands of a case until one fails."""
    one = case(job.seed, job.number)
    put_in = None if job.bug is None else BUGS[job.bug].put_in
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder, aside = Path(name) / "case", Path(name) / "aside"
        folder.mkdir()
        aside.mkdir()
        lay_out(one.files, folder)
        if job.keep is not None:
            _keep(folder, job)
        found: list[str] = []
        codes: list[int | None] = []
        seconds = 0.0
        for arguments in one.commands:
            before = checks.snapshot(folder)
            outcome = run(arguments, folder, aside, job.limits, put_in)
            after = checks.snapshot(folder)
            found += checks.problems(outcome, arguments, before, after, folder)
            codes.append(outcome.code)
            seconds += outcome.seconds
            if outcome.code != 0 or found:
                break
    message = outcome.stderr.decode(errors="replace")[-2000:]
    command = f"planner {' '.join(arguments)}"
    return Report(job, one.what, command, tuple(found), message, tuple(codes), seconds)


def _keep(folder: Path, job: Job) -> None:
    """Leaves the files of a case where somebody can look at them."""
    assert job.keep is not None
    target = job.keep / f"{suite_of(job.number)}-{job.number}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    lay_out(case(job.seed, job.number).files, target)


def run_all(jobs: Iterable[Job], workers: int) -> Iterator[Report]:
    """The reports of all jobs, as they come."""
    rest = iter(jobs)
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=make_ready) as pool:
        # Few at a time: an error or Ctrl-C need not wait for all that were handed in.
        running: set[Future[Report]] = {
            pool.submit(run_case, job) for job in islice(rest, 2 * workers)
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(run_case, job) for job in islice(rest, len(done))}
            for future in done:
                yield future.result()
