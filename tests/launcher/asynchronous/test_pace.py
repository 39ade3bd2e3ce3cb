"""The time of a minibatch on 2 and 3 ranks, predicted and measured; passes take given times."""

import pytest

from planner.artefacts.strategy import ScheduleName
from tests.support.mode_runs import net, profile_of, write_strategy
from tests.support.paced_runs import paced, run_all

STEPS, COUNT = 8, 4
# Replicas, and forward and backward of each stage in s. Any other schedule that empties the
# pipeline after 4 minibatches takes at least a quarter more where there are several stages.
CASES = {
    "two stages": ((1, 1), [(0.05, 0.1), (0.04, 0.09)]),
    "three stages": ((1, 1, 1), [(0.02, 0.05), (0.05, 0.1), (0.04, 0.06)]),
    "replicas in front": ((2, 1), [(0.1, 0.18), (0.04, 0.08)]),
    "replicas behind": ((1, 2), [(0.04, 0.08), (0.1, 0.18)]),
    "replicas alone": ((2,), [(0.1, 0.2)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each launch reports, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("pace")
    net(folder / "net.onnx")
    profile, found = profile_of(folder / "net.onnx"), {}
    count = len(profile.operators)
    for name, (widths, times_s) in CASES.items():
        bounds = [count * s // len(widths) for s in range(len(widths))]
        write_strategy(
            folder / f"{name}.strategy.json", paced(profile, bounds, times_s), widths,
            schedule=ScheduleName.PIPEDREAM, num_microbatches=COUNT,
        )  # fmt: skip
    found = run_all(folder, 3, STEPS)
    for name, report in found.items():
        print(f"{name}: {report['predicted_minibatch_s']:.4f} {report['measured_minibatch_s']:.4f}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_minibatch_takes_as_long_as_predicted(reports, name):
    widths, times_s = CASES[name]
    slowest_s = max(sum(pair) / width for width, pair in zip(widths, times_s, strict=True))
    report = reports[name]
    if name == "replicas behind":  # three in flight keep one of the two replicas waiting
        assert slowest_s < report["predicted_minibatch_s"] == pytest.approx(0.17, rel=0.02)
    else:
        assert report["predicted_minibatch_s"] == pytest.approx(slowest_s, rel=0.02)
    assert report["measured_minibatch_s"] == pytest.approx(
        report["predicted_minibatch_s"], rel=0.08
    )
