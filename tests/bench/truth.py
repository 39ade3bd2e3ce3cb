"""Predicted beside published times and memory of real clusters, held against marks (15 minutes).

    python -m tests.bench.truth                       # tables, and the marks
    python -m tests.bench.truth --write               # docs/truth.md and docs/truth.svg, too
    python -m tests.bench.truth --record              # marks are recorded, not held against
    python -m tests.bench.truth --source bloom        # only some sources; may be repeated
    python -m tests.bench.truth --rows bloom          # a line for each row of a source

Every row is predicted that the planner can express, by the assumptions in
`tests/support/measured/assumptions.py`; of a source with many rows, some questions
(`tests/support/measured/sample.py`), or more with `--most`. The tables lie beside the project
(`tests/support/reference.py`). Computed profiles are kept in `.cache/truth`.

The command fails where order, the error of known rows, the number of runs that do not fit, or that
of rows without a prediction is worse than the marks in `tests/bench/truth_marks.json`, or a run was
faster than the bound over all kernels.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from planner.reports.tables import signed
from tests.bench.solvers import put, table
from tests.support.measured import page
from tests.support.measured.marks import Mark, mark, read_marks, worse, write_marks
from tests.support.measured.predict import LeftOut, Predicted, predict
from tests.support.measured.rows import FOLDER, PUBLISHED, TABLES, Row, rows
from tests.support.measured.sample import MOST, sampled
from tests.support.measured.scores import below_peak

ROOT = Path(__file__).parents[2]
DOCUMENT, PICTURE = ROOT / "docs" / "truth.md", ROOT / "docs" / "truth.svg"
MARKS = Path(__file__).with_name("truth_marks.json")
ALL = "all"
ROWS = (
    "row", "devices", "t, p, d", "in parts", "recomputed", "predicted s", "measured s", "error",
    "predicted GB", "measured GB", "fits",
)  # fmt: skip
AT_A_TIME = 6
"""Rows that a process gets at once; those of one model follow each other and share a profile."""


def each(made: Sequence[Predicted]) -> str:
    """A line for each prediction."""
    return str(table(ROWS, [_row(one) for one in made]))


def _row(one: Predicted) -> list[str]:
    row = one.row
    return [
        row.name,
        f"{row.num_devices} {row.device}",
        ", ".join(map(str, row.degrees)),
        row.sharing or "-",
        row.recompute,
        f"{one.iteration_s:.4g}",
        f"{row.iteration_s:.4g}",
        signed(one.error),
        f"{one.total_bytes / 1e9:.1f}",
        "-" if row.memory_bytes is None else f"{row.memory_bytes / 1e9:.1f}",
        "yes" if one.fits else "no",
    ]


def answers_to(chosen: Sequence[Row], processes: int) -> Iterator[Predicted | LeftOut]:
    """The predictions of some rows, in their order; says on stderr how far it is."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for number, one in enumerate(pool.map(predict, chosen, chunksize=AT_A_TIME), 1):
            if number % 10 == 0 or number == len(chosen):
                print(f"row {number} of {len(chosen)}", file=sys.stderr, flush=True)
            yield one


def marks_of(answers: Sequence[Predicted | LeftOut]) -> dict[str, Mark]:
    """By source; and of published.csv and of all, where all sources were asked."""
    sources = dict.fromkeys(one.row.source for one in answers)
    own = {name: mark([one for one in answers if one.row.source == name]) for name in sources}
    if sources.keys() != {row.source for row in rows()}:
        return own
    published = [one for one in answers if one.row.source not in TABLES]
    return own | {PUBLISHED: mark(published), ALL: mark(answers)}


def failures(
    answers: Sequence[Predicted | LeftOut], recorded: Mapping[str, Mark] | None
) -> list[str]:
    """What is worse than the marks, or cannot be.

    Args:
        recorded: None to hold nothing against marks.
    """
    wrong = [
        f"{one.row.source}, {one.row.name}: measured {one.row.iteration_s:.4g} s, but no kernels"
        f" take less than {one.peak_bound_s:.4g} s"
        for one in answers
        if below_peak(one)
    ]
    return wrong if recorded is None else [*wrong, *worse(marks_of(answers), recorded)]


def _write(answers: Sequence[Predicted | LeftOut], skipped: Sequence[Row]) -> None:
    for name, text in page.parts(answers, skipped).items():
        put(DOCUMENT, name, text)
    PICTURE.write_text(page.drawn([one for one in answers if isinstance(one, Predicted)]))


def main() -> None:
    """Prints the table that is asked for, and the rows that are left out."""
    if not FOLDER.is_dir():
        raise SystemExit(f"{FOLDER} is not there; set PLANNER_REFERENCE")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = rows()
    known = sorted({row.source for row in every})
    parser.add_argument("--source", action="append", choices=known, help="may be repeated")
    parser.add_argument("--rows", choices=known, metavar="SOURCE", help="a line for each row")
    parser.add_argument("--most", type=int, default=MOST, metavar="N", help="rows of a source")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.name}")
    parser.add_argument("--record", action="store_true", help=f"write {MARKS.name}")
    options = parser.parse_args()
    asked = [options.rows] if options.rows else options.source or known
    if options.write and asked != known:
        parser.error("--write: the page is about all sources; leave out --source and --rows")
    wanted = [row for row in every if row.source in asked]
    chosen = sampled(wanted, options.most)
    answers = list(answers_to(chosen, options.processes))
    made = [one for one in answers if isinstance(one, Predicted)]
    print(each(made) if options.rows else page.sources(made))
    for one in answers:
        if isinstance(one, LeftOut):
            print(f"left out: {one.row.source}, {one.row.name}: {one.reason}")
    if options.write:
        _write(answers, [row for row in wanted if row not in chosen])
    if options.record:
        write_marks(marks_of(answers), MARKS)
    recorded = None if options.record else read_marks(MARKS)
    sys.exit("\n".join(failures(answers, recorded)) or None)


if __name__ == "__main__":
    main()
