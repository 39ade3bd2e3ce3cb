"""Predicted beside published times and memory of real clusters (an hour at first, then half).

    python -m tests.bench.truth                       # a line for each source
    python -m tests.bench.truth --source bloom        # only some
    python -m tests.bench.truth --rows bloom          # a line for each row of a source
    python -m tests.bench.truth --every 10            # a sample

Every row is predicted that the planner can express, by the assumptions in
`tests/support/measured/assumptions.py`. The tables lie beside the project
(`tests/support/reference.py`). Computed profiles are kept in `.cache/truth`.
"""

import argparse
import sys
from collections.abc import Sequence

from planner.reports.tables import percent, signed
from tests.bench.solvers import table
from tests.support.measured.predict import LeftOut, Predicted, predict
from tests.support.measured.rows import FOLDER, rows
from tests.support.measured.scores import Score, score

SCORES = (
    "source", "rows", "MAPE", "bias", "pairs in order", "regret", "memory", "do not fit",
    "below the bound",
)  # fmt: skip
ROWS = (
    "row", "devices", "t, p, d", "in parts", "recomputed", "predicted s", "measured s", "error",
    "predicted GB", "measured GB", "fits",
)  # fmt: skip


def scores(made: Sequence[Predicted]) -> str:
    """The errors of each source, of all, and of those whose plan was published."""
    sources = dict.fromkeys(one.row.source for one in made)
    groups = {name: [one for one in made if one.row.source == name] for name in sources}
    groups["all"] = list(made)
    groups["known"] = [one for one in made if one.row.known]
    return table(SCORES, [[name, *_cells(score(some))] for name, some in groups.items() if some])


def _cells(one: Score) -> list[str]:
    return [
        str(one.rows),
        percent(one.mape),
        signed(one.bias),
        f"{one.in_order} of {one.pairs}" if one.pairs else "-",
        "-" if one.regret is None else percent(one.regret),
        "-" if one.memory is None else f"{one.memory:.2f}",
        str(one.unfit),
        str(one.below_bound),
    ]


def each(made: Sequence[Predicted]) -> str:
    """A line for each prediction."""
    return table(ROWS, [_row(one) for one in made])


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


def main() -> None:
    """Prints the table that is asked for, and the rows that are left out."""
    if not FOLDER.is_dir():
        raise SystemExit(f"{FOLDER} is not there; set PLANNER_REFERENCE")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = sorted({row.source for row in rows()})
    parser.add_argument("--source", action="append", choices=known, help="may be repeated")
    parser.add_argument("--rows", choices=known, metavar="SOURCE", help="a line for each row")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth row alone")
    options = parser.parse_args()
    asked = [options.rows] if options.rows else options.source or known
    chosen = [row for row in rows() if row.source in asked][:: options.every]
    answers = []
    for number, row in enumerate(chosen, 1):
        print(f"row {number} of {len(chosen)}", end="\r", file=sys.stderr, flush=True)
        answers.append(predict(row))
    made = [one for one in answers if isinstance(one, Predicted)]
    print(each(made) if options.rows else scores(made))
    left_out = [one for one in answers if isinstance(one, LeftOut)]
    if left_out:
        print(f"\nleft out: {len(left_out)} rows")
    for one in left_out:
        print(f"- {one.row.source}, {one.row.name}: {one.reason}")


if __name__ == "__main__":
    main()
