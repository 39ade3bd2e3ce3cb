"""Factors of vTrain's runs with one host that `truth.py` does not judge by (a few minutes).

    python -m tests.bench.truth_factors
    python -m tests.bench.truth_factors --each 5

They are those of `planner calibrate --measured`, with each model left out in turn, and say what
Megatron-LM's host takes over that of computed profiles (`tests/support/measured/assumptions.py`).
"""

import argparse

from planner.artefacts.calibration import UNCALIBRATED
from planner.reports.traces import factor_lines
from planner.simulator.factors import TimedRun, fit_factors
from tests.support.measured.predict import planned
from tests.support.measured.rows import Row, rows
from tests.support.measured.sample import sampled

SOURCE = "vtrain-single"
EACH = 10
"""Every tenth of the rows that are left, for their plans take seconds each."""


def timed(row: Row) -> TimedRun:
    """The run of a row, as it is predicted without factors."""
    ran = planned(row, calibration=UNCALIBRATED)
    return TimedRun(row.name, repr(row.network), ran.problem, ran.plan.strategy, row.iteration_s)


def main() -> None:
    """Prints the factors, and each run without and with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=EACH, metavar="N", help="of the rows left")
    options = parser.parse_args()
    every = [row for row in rows() if row.source == SOURCE and not row.lacks]
    judged = sampled(every)
    left = [row for row in every if row not in judged][:: options.each]
    found = fit_factors([timed(row) for row in left])
    print("\n".join(factor_lines(found)))
    for one in found.checked:
        print(f"{one.name}: {one.measured_s:.4g} s, {one.before_s:.4g} s, {one.after_s:.4g} s")


if __name__ == "__main__":
    main()
