"""The closed form beside the simulator, under calibrations: it knows every term of them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.artefacts.calibration import UNCALIBRATED, Calibration
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import ScheduleName
from planner.costs.closed_form import iteration_s
from planner.costs.evaluate import evaluate
from planner.simulator.events import run
from tests.support.builders import asked, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.programs import split


def both_s(problem, strategy):
    """The iteration time in closed form and simulated."""
    evaluation = evaluate(problem, strategy)
    closed_s = iteration_s(evaluation.stages, problem.num_microbatches, strategy.schedule)
    return closed_s, run(evaluation.program, evaluation.costs, problem.topology).iteration_s


@pytest.mark.parametrize(
    ("count", "known", "expected_s"),
    [
        (1, {}, 6.0 + 2.0),
        (1, {"wire": 2.0}, 6.0 + 4.0),
        (4, {}, 15.0),
        # Of the last stage, four forwards and backwards; a forward and a backward of the first, and
        # its step.
        (4, {"launch_s": 0.5}, 15.0 + 0.5 * (8 + 2 + 1)),
    ],
)
def test_a_calibration_by_hand(count, known, expected_s):
    # Two stages of 1 s and 2 s. 10 bytes take 1 s there and 1 s back, at once if there are four.
    graph = graph_of([[], [0]], [10, 10])
    topology = cluster([unit_type()] * 2, 10.0 if count == 1 else 1e15)
    problem = problem_of(profile_of(graph, [1.0, 1.0]), topology, count)
    problem = replace(problem, calibration=Calibration(device_type="unit", **known))
    closed_s, simulated_s = both_s(problem, split(graph, [1], [1, 1], count))
    assert closed_s == pytest.approx(simulated_s, rel=1e-9)
    assert closed_s == pytest.approx(expected_s, rel=1e-9)


def test_posting_keeps_a_device_from_its_next_computation():
    graph = graph_of([[], [0]], [10, 10])
    problem = problem_of(profile_of(graph, [1.0, 1.0]), cluster([unit_type()] * 2, 1e15), 4)
    known = Calibration(device_type="unit", post_s=0.25, copy_s_per_byte=0.025)
    problem = replace(problem, calibration=known)
    closed_s, simulated_s = both_s(problem, split(graph, [1], [1, 1], 4))
    # A microbatch is sent and comes back: 7 s. The others take 3 s and two postings of 0.5 s each,
    # but for one receive, which is posted while the second stage waits for the first microbatch.
    assert closed_s == pytest.approx(7.0 + 3 * 4.0)
    assert simulated_s == pytest.approx(7.0 + 3 * 4.0 - 0.5)


def pipeline(rng):
    """A problem with a pipeline of up to 4 stages of two operators each."""
    size = 2 * rng.randint(1, 4)
    graph = graph_of(
        [[v - 1] if v else [] for v in range(size)],
        [rng.choice([8, 80, 800]) for _ in range(size)],
        [rng.choice([10, 1000]) for _ in range(size)],
    )
    profile = profile_of(
        graph,
        [rng.uniform(0.5, 1.5) for _ in range(size)],
        [rng.uniform(1, 3) for _ in range(size)],
    )
    widths = [rng.choice([1, 1, 1, 2]) for _ in range(size // 2)]
    count = rng.randint(max(widths), 8)
    schedule = rng.choice([ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B])
    topology = cluster([unit_type()] * sum(widths), rng.choice([400.0, 4000.0, 1e9]), 0.01)
    strategy = split(graph, list(range(2, size, 2)), widths, count, schedule)
    recompute = rng.random() < 0.3
    stages = tuple(replace(stage, recompute=recompute) for stage in strategy.stages)
    return (
        Problem(profile, topology, **asked(count, schedule=schedule)),
        replace(strategy, stages=stages),
    )


def calibration(rng, **others):
    """Corrections of all terms that a pipeline of whole operators has, but for posting."""
    return Calibration(
        device_type="unit",
        forward=rng.uniform(0.8, 1.3),
        backward=rng.uniform(0.8, 1.3),
        launch_s=rng.uniform(0, 0.3),
        wire=rng.uniform(0.3, 1.0),
        sums=rng.uniform(0.5, 2.0),
        steps=rng.uniform(0.5, 2.0),
        **others,
    )


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("posting", [False, True])
def test_under_a_calibration_it_is_as_close_to_the_simulator_as_without(count, posting):
    rng = random.Random(0)
    errors = []
    for _ in range(count):
        problem, strategy = pipeline(rng)
        others = {"post_s": rng.uniform(0, 0.1), "copy_s_per_byte": rng.uniform(0, 1e-4)}
        known = calibration(rng, **others if posting else {})
        pairs = (
            both_s(replace(problem, calibration=one), strategy) for one in (UNCALIBRATED, known)
        )
        errors.append([abs(closed_s / simulated_s - 1) for closed_s, simulated_s in pairs])
    plain, calibrated = np.array(errors).T
    exact = (plain < 1e-9).mean(), (calibrated < 1e-9).mean()
    worse = [
        np.quantile(calibrated, share) - np.quantile(plain, share) for share in (0.5, 0.75, 0.9)
    ]
    if posting:  # which is not the same for all microbatches
        assert max(worse) < 0.0125
    else:
        assert exact[1] > exact[0] - 0.01 > 0.6
        assert max(worse) < 0.005
