"""Factors of tables: fits find those that the times were made with, and say what is left open."""

from dataclasses import replace

import numpy as np
import pytest

from planner.artefacts.calibration import Calibration
from planner.costs.evaluate import evaluate
from planner.simulator.events import run as simulated
from planner.simulator.factors import (
    FACTORS,
    LEAST,
    MIN_RUNS,
    TimedRun,
    at_their_least,
    factors_of,
    fit_factors,
)
from tests.simulator.traces.test_calibrate import plan_with, problem_with
from tests.support.builders import cluster, unit_type

TRUE = Calibration(
    device_type="unit", forward=1.4, backward=1.4, launch_s=5e-3, collectives=1.8, sums=1.8,
    wire=1.8,
)  # fmt: skip


def timed(seed, cut, num_microbatches=4, known=TRUE, host_s=0.0):
    """A run on a machine that is as the calibration says.

    Args:
        host_s: in which the host starts the kernels of an operator, in each direction.
    """
    slow = cluster([unit_type(bandwidth=1e10)] * 2, bandwidth=2e7, latency=1e-4)
    problem = problem_with(seed, num_microbatches=num_microbatches)
    quick = tuple(
        replace(
            one,
            forward_s=one.forward_s / 10,
            backward_s=one.backward_s / 10,
            host_forward_s=host_s,
            host_backward_s=host_s,
        )
        for one in problem.profile.operators
    )
    profile = replace(problem.profile, operators=quick)
    problem = replace(problem, profile=profile, topology=slow)
    strategy = plan_with(problem, cut).strategy
    evaluation = evaluate(replace(problem, calibration=known), strategy)
    measured_s = simulated(evaluation.program, evaluation.costs, problem.topology).iteration_s
    return TimedRun(f"{seed} {cut}", f"{seed}", problem, strategy, measured_s)


def table(*seeds, known=TRUE, host_s=0.0):
    return [timed(seed, cut, count, known, host_s)
            for seed in seeds for cut in (0, 3, 5) for count in (2, 6)]  # fmt: skip


def test_the_factors_are_found_that_the_times_were_made_with():
    found = fit_factors(table(0, 1))
    assert list(factors_of(found.calibration).values()) == pytest.approx(
        [1.4, 5e-3, 1.0, 1.8], rel=0.03
    )
    assert (found.calibration.backward, found.calibration.wire) == (
        found.calibration.forward,
        found.calibration.sums,
    )
    assert (found.calibration.device_type, found.calibration.models) == ("unit", 2)
    assert found.calibration.runs == len(found.checked) == 12
    assert (found.left_out, found.calibration.whole) == ("model", False)
    assert found.error_before > 0.2 > 0.01 > found.error_after


def test_times_of_the_uncorrected_simulator_need_no_factors():
    found = fit_factors(table(0, 1, known=Calibration()))
    assert list(factors_of(found.calibration).values()) == pytest.approx([1, 0, 1, 1], abs=1e-3)
    assert found.error_before == 0.0


def test_a_slow_host_is_told_from_slow_kernels():
    """Of some runs the host bounds the passes, of others the device."""
    known = replace(TRUE, forward=0.8, backward=0.8, host=2.5 / 0.8, launch_s=0.0)
    runs = [*table(0, known=known, host_s=0.02), *table(1, known=known, host_s=1e-4)]
    found = fit_factors(runs)
    assert factors_of(found.calibration) == pytest.approx(
        {"slowness": 0.8, "launch": 0.0, "host": 2.5, "network": 1.8}, rel=0.03, abs=2e-4
    )
    assert found.calibration.host == pytest.approx(2.5 / 0.8, rel=0.05)
    assert found.error_before > 0.2


def test_a_run_is_predicted_by_others():
    """One of ten takes half as much time more than the others tell; they are not misled by it."""
    runs = [replace(one, model="one") for one in table(0, 1)[:10]]
    odd = replace(runs[3], measured_s=1.5 * runs[3].measured_s)
    found = fit_factors([*runs[:3], odd, *runs[4:]])
    assert found.left_out == "run"
    assert found.checked[3].after_s == pytest.approx(runs[3].measured_s, rel=0.02)
    in_its_fit = [one for i, one in enumerate(found.checked) if i % 5 != 3]
    assert max(abs(one.after_s / one.measured_s - 1) for one in in_its_fit) > 0.02


def test_a_factor_that_is_as_small_as_may_be_is_named():
    """No network is a tenth of what these times would need."""
    free = Calibration(device_type="unit", collectives=1e-6, sums=1e-6, wire=0.0)
    found = fit_factors(table(0, 1, known=free)).calibration
    assert at_their_least(found) == ("network",)
    assert factors_of(found)["network"] == pytest.approx(LEAST[FACTORS.index("network")])
    assert at_their_least(TRUE) == ()


def test_the_fewest_runs_are_each_left_out_once():
    runs = table(2)[:MIN_RUNS]
    found = fit_factors(runs)
    assert [one.name for one in found.checked] == [one.name for one in runs]
    assert np.isfinite([one.after_s for one in found.checked]).all()
