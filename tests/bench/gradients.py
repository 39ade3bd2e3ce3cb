"""Modules with a say in their backward pass, beside PyTorch's plain loop (15 minutes).

    python -m tests.bench.gradients [--only PATTERN] [--dtype NAME] [--json FILE]

Each module is exported, profiled, planned for one device and trained for four steps in this
process, and the module itself by a plain loop. A line says what came of it: equal (losses and
weights to 1e-5 in float32, 1e-9 in float64), refused with the cause named (unnamed: without it),
noted (trained to something else, which a note of the export says), wrong (the same in silence),
draws (not comparable), or failed. Lines whose outcome is not right begin with `!`; then the exit
code is 1.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from tests.support.gradient_kinds import KINDS
from tests.support.gradient_kinds.kind import Outcome
from tests.support.gradient_kinds.trial import Trial, trials

SEVERITY = (
    Outcome.FAILED, Outcome.WRONG, Outcome.NOTED, Outcome.UNNAMED, Outcome.DRAWS, Outcome.EQUAL,
    Outcome.REFUSED,
)  # fmt: skip
"""Outcomes, the gravest first."""
MAX_TEXT = 110


@dataclass(frozen=True)
class Row:
    """What came of a kind.

    Attributes:
        name: of the kind.
        is_right: whether every trial has an outcome that the kind accepts.
        trials: by dtype and optimizer, or the step that ended them.
        seconds: CPU time of all trials.
    """

    name: str
    is_right: bool
    trials: dict[str, Trial]
    seconds: float

    @property
    def worst(self) -> tuple[str, Trial]:
        """The trial to show: one whose outcome is not right, if there is any; the gravest of them;
        and of equal ones that with the largest figure.
        """
        accepted = KINDS[self.name].accepted
        return min(
            self.trials.items(),
            key=lambda item: (
                item[1].outcome in accepted, SEVERITY.index(item[1].outcome), -largest(item[1])
            ),
        )  # fmt: skip


def row(name: str, dtypes: Sequence[torch.dtype]) -> Row:
    """Runs all trials of a kind."""
    kind, made = KINDS[name], {}
    begin_s = time.process_time()
    for dtype in kind.dtypes:
        if dtype not in dtypes:
            continue
        short = str(dtype).removeprefix("torch.")
        with tempfile.TemporaryDirectory() as folder:
            for step, one in trials(name, kind, dtype, Path(folder)):
                made[f"{short} {step}"] = one
    is_right = all(one.outcome in kind.accepted for one in made.values())
    return Row(name, is_right, made, time.process_time() - begin_s)


def line(made: Row) -> str:
    """A row as text: one trial, with its figures."""
    key, one = made.worst
    expected = "/".join(sorted(KINDS[made.name].accepted))
    figures = "" if one.loss is None else f"loss {one.loss:.0e} weights {one.weight:.0e} "
    return (
        f"{' ' if made.is_right else '!'} {made.name:38} {expected:16} {one.outcome:8}"
        f" {key:16} {figures}{one.text[:MAX_TEXT]}"
    )


def largest(one: Trial) -> float:
    """The larger figure of a trial."""
    return max(one.loss or 0.0, one.weight or 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="kinds, such as 'relu*'"
    )
    parser.add_argument("--dtype", choices=["float32", "float64"], help="one of the two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all trials")
    options = parser.parse_args()
    patterns = options.only or ["*"]
    names = [name for name in KINDS if any(fnmatchcase(name, one) for one in patterns)]
    if not names:
        parser.error(f"no kind is called so; known: {', '.join(KINDS)}")
    chosen = [options.dtype] if options.dtype else ["float32", "float64"]
    rows = []
    for name in names:
        made = row(name, [getattr(torch, one) for one in chosen])
        if made.trials:  # a kind may be of the other dtype alone
            rows.append(made)
            print(line(made), flush=True)
    counts = Counter(one.worst[1].outcome for one in rows)
    print(", ".join(f"{counts[one]} {one}" for one in Outcome if counts[one]))
    print(f"{sum(not one.is_right for one in rows)} of {len(rows)} kinds are not as they should be")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rows], indent=1))
    sys.exit(any(not one.is_right for one in rows))


if __name__ == "__main__":
    main()
