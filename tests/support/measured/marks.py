"""What the predictions have reached: a file of marks, which later predictions are held against.

A mark is of one source, or of all, and of the rows that it was made from. Of other rows nothing can
be said by it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.reports.tables import percent
from tests.support.measured.predict import LeftOut, Predicted
from tests.support.measured.rows import Row
from tests.support.measured.scores import score

ROUNDING = 5e-4
"""Errors are marked in tenths of a percent."""
ADVICE = "make bench-truth ARGS='--write --record'"


@dataclass(frozen=True)
class Mark:
    """The figures of a source that must not get worse.

    Attributes:
        rows: a hash of the names and measured times of the rows.
        known_error: mean error of the times of known rows, without signs; None without such rows.
        in_order: pairs of plans that are predicted in the measured order.
        pairs: all of them.
        refused: runs that ran, by which the prediction does not fit.
        left_out: rows without a prediction.
    """

    rows: str
    known_error: float | None
    in_order: int
    pairs: int
    refused: int
    left_out: int


def mark(answers: Sequence[Predicted | LeftOut]) -> Mark:
    """The figures of some rows."""
    made = [one for one in answers if isinstance(one, Predicted)]
    known = [one for one in made if one.row.known]
    whole = score(made) if made else None
    return Mark(
        rows=_hash([one.row for one in answers]),
        known_error=round(score(known).mape, 3) if known else None,
        in_order=0 if whole is None else whole.in_order,
        pairs=0 if whole is None else whole.pairs,
        refused=0 if whole is None else whole.unfit,
        left_out=len(answers) - len(made),
    )


def _hash(rows: Sequence[Row]) -> str:
    told = sorted((row.source, row.name, row.iteration_s) for row in rows)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def write_marks(marks: Mapping[str, Mark], path: Path) -> None:
    """Writes marks by their sources; those of other sources stay."""
    plain = {name: asdict(one) for name, one in sorted({**read_marks(path), **marks}.items())}
    path.write_text(json.dumps(plain, indent=1) + "\n")


def read_marks(path: Path) -> dict[str, Mark]:
    """The marks by their sources; none without the file."""
    if not path.exists():
        return {}
    return {name: Mark(**plain) for name, plain in json.loads(path.read_text()).items()}


def worse(own: Mapping[str, Mark], recorded: Mapping[str, Mark]) -> list[str]:
    """A line for each figure that is worse than its mark, or that has none."""
    return [line for name, one in own.items() for line in _worse(name, one, recorded.get(name))]


def _worse(name: str, own: Mark, recorded: Mark | None) -> Iterator[str]:
    if recorded is None or own.rows != recorded.rows:
        yield f"{name}: there are no marks for these rows; record them with: {ADVICE}"
        return
    before, after = recorded.known_error, own.known_error
    if before is not None and (after is None or after > before + ROUNDING):
        now = "none is predicted" if after is None else percent(after)
        yield f"{name}: error of known rows: {now}, the mark is {percent(before)}"
    if own.in_order * recorded.pairs < recorded.in_order * own.pairs:
        yield (
            f"{name}: pairs in order: {own.in_order} of {own.pairs}, the mark is"
            f" {recorded.in_order} of {recorded.pairs}"
        )
    for what, now, then in (
        ("runs that ran and do not fit", own.refused, recorded.refused),
        ("rows without a prediction", own.left_out, recorded.left_out),
    ):
        if now > then:
            yield f"{name}: {what}: {now}, the mark is {then}"
