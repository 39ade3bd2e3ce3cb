"""`fit_factors`: a table of measured iterations -> `Calibration` by few factors.

A table has one time of each run, no times of stages. So it tells no more than a few figures, which
are the same for all runs:

    slowness   of computations: 1 over their efficiency, `Calibration.forward` and `backward`
    launch     time of each forward, backward, sum and step more, `launch_s`
    host       factor of the times in which the host starts kernels, `host` times `forward`
    network    factor of the times of all communication: `collectives`, `sums` and `wire`

The simulated time f of a run is nearly a piecewise linear function of these factors x, because
it is a longest path. Around some factors it is

    f(x + dx) = f(x) + J dx,    J by differences of simulations

and the factors are those of the regression of `traces/calibrate.py`, again and again around its own
answer (Gauss and Newton), until they stay. Of all answers the one with the least sum counts.

The error after calibration is that of runs that were not fitted: of each model in turn, or of every
`FOLDS`th run if there is one model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.artefacts.calibration import Calibration
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Strategy
from planner.costs.evaluate import evaluate
from planner.simulator.events import run as simulated
from planner.simulator.traces.calibrate import CheckedCalibration, CheckedRun, regression
from planner.support.arrays import Floats

FACTORS = ("slowness", "launch", "host", "network")
MEANS, WIDTHS = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.5, 3e-3, 1.0, 0.5])
"""Of the factors' priors: a factor, s, and two factors."""
LEAST, STEPS = np.array([0.1, 0.0, 0.1, 0.1]), np.array([0.02, 2e-5, 0.02, 0.02])
"""The least of each factor, and differences by which simulations are repeated."""
LEAST_ERROR, USUAL_ERROR, MOST_ERROR = 0.002, 0.03, 0.1
"""Relative widths of the error of a run: that of these runs is what a first fit leaves."""
FIXED = 1e-6
"""Width of the prior of what no factor changes."""
FOLDS, MAX_ROUNDS, STAYS = 5, 8, 1e-3
MIN_RUNS = len(FACTORS) + 1


@dataclass(frozen=True, slots=True)
class TimedRun:
    """A run of which the time of an iteration is known, and nothing else.

    Attributes:
        name: the name that reports show.
        model: its name; where there are several, all runs of one are left out at once.
        problem: the problem that the strategy answers, without a calibration.
        strategy: that ran.
        measured_s: time of an iteration.
    """

    name: str
    model: str
    problem: Problem
    strategy: Strategy
    measured_s: float


def fit_factors(runs: Sequence[TimedRun]) -> CheckedCalibration:
    """The factors of some runs, checked by cross-validation.

    Args:
        runs: at least `MIN_RUNS`; all on devices of one type.
    """
    assert len(runs) >= MIN_RUNS, "the caller checks it"
    models = list(dict.fromkeys(one.model for one in runs))
    by_model = len(models) > 1
    groups = [
        models.index(one.model) if by_model else number % FOLDS for number, one in enumerate(runs)
    ]
    lines = _Lines(runs)
    first = _fit(lines, range(len(runs)), MEANS, USUAL_ERROR)
    left = np.array([lines.simulated_s(i, first) for i in range(len(runs))]) / lines.measured_s - 1
    error = float(np.clip(np.sqrt(np.mean(left**2)), LEAST_ERROR, MOST_ERROR))
    whole = _fit(lines, range(len(runs)), first, error)
    after_s = [0.0] * len(runs)
    for group in set(groups):
        others = _fit(lines, [i for i, own in enumerate(groups) if own != group], whole, error)
        for i in (i for i, own in enumerate(groups) if own == group):
            after_s[i] = lines.simulated_s(i, others)
    checked = tuple(
        CheckedRun(one.name, one.measured_s, lines.simulated_s(i, MEANS), after_s[i])
        for i, one in enumerate(runs)
    )
    known = replace(_calibration(whole, _kind(runs[0])), runs=len(runs), models=len(models))
    return CheckedCalibration(known, checked, "model" if by_model else "run")


def factors_of(calibration: Calibration) -> Mapping[str, float]:
    """The factors of a calibration that was fitted to a table."""
    host = calibration.host * calibration.forward
    found = calibration.forward, calibration.launch_s, host, calibration.sums
    return dict(zip(FACTORS, found, strict=True))


def at_their_least(calibration: Calibration) -> tuple[str, ...]:
    """The factors that are as small as a factor may be: the runs do not tell them."""
    found = factors_of(calibration)
    least = dict(zip(FACTORS, LEAST.tolist(), strict=True))
    return tuple(name for name in FACTORS if least[name] > 0 and found[name] <= 1.001 * least[name])


def _calibration(factors: Floats, device_type: str) -> Calibration:
    slowness, launch_s, host, network = factors.tolist()
    return Calibration(
        device_type=device_type,
        forward=slowness,
        backward=slowness,
        host=host / slowness,
        launch_s=launch_s,
        collectives=network,
        sums=network,
        wire=network,
    )


def _kind(run: TimedRun) -> str:
    """The type of a run's devices."""
    return run.problem.topology.devices[run.strategy.stages[0].devices[0]].type


class _Lines:
    """Simulated times of runs, and how they follow the factors; each is computed once."""

    def __init__(self, runs: Sequence[TimedRun]) -> None:
        self.runs = runs
        self.measured_s = np.array([one.measured_s for one in runs])
        self._known: dict[tuple[int, tuple[float, ...]], float] = {}

    def simulated_s(self, i: int, factors: Floats) -> float:
        """The time of run i with some factors, in s."""
        key = i, tuple(factors.tolist())
        if key not in self._known:
            run = self.runs[i]
            problem = replace(run.problem, calibration=_calibration(factors, _kind(run)))
            evaluation = evaluate(problem, run.strategy)
            self._known[key] = simulated(
                evaluation.program, evaluation.costs, problem.topology
            ).iteration_s
        return self._known[key]

    def around(self, some: Sequence[int], factors: Floats) -> tuple[Floats, Floats]:
        """(n,) times of n runs with some factors, and (n, f) what each factor adds to them."""
        times_s = np.array([self.simulated_s(i, factors) for i in some])
        longer_s = [[self.simulated_s(i, factors + step) for step in np.diag(STEPS)] for i in some]
        return times_s, (np.array(longer_s) - times_s[:, None]) / STEPS


def _fit(lines: _Lines, some: Sequence[int], start: Floats, error: float) -> Floats:
    """(f,) the factors that fit some runs best.

    Args:
        start: factors to begin with.
        error: relative width of the error of a run.
    """
    measured_s = lines.measured_s[list(some)]
    answers: list[tuple[float, tuple[float, ...]]] = []
    factors = start
    for _ in range(MAX_ROUNDS):
        times_s, slopes = lines.around(some, factors)
        off = np.concatenate([(times_s / measured_s - 1) / error, (factors - MEANS) / WIDTHS])
        answers.append((float(off @ off), tuple(factors.tolist())))
        # What no factor changes, such as the step, is one more that is 1.
        rest_s = times_s - slopes @ factors
        *found, _ = regression(
            np.column_stack([slopes, rest_s]), measured_s, np.full(len(some), error),
            np.append(MEANS, 1.0), np.append(WIDTHS, FIXED), np.append(LEAST, -np.inf),
        )  # fmt: skip
        moved = np.abs(np.array(found) - factors) / WIDTHS
        factors = np.array(found)
        if moved.max() < STAYS:
            break
    return np.array(min(answers)[1])
