"""From a user's request to problems."""

import pytest

from planner.artefacts.options import Training
from planner.artefacts.topology import MAX_DEVICES
from planner.planning.problems import MAX_MICROBATCHES, nums_microbatches
from planner.support.errors import OptionError
from tests.support.builders import graph_of, profile_of

PROFILES = [profile_of(graph_of([[]], [1000], [1000]), [0.01])]


def test_the_usual_number_of_microbatches_is_allowed_on_the_most_devices():
    assert nums_microbatches(PROFILES, MAX_DEVICES, Training()) == [MAX_MICROBATCHES // 4]


@pytest.mark.parametrize(
    "training", [Training(microbatches=10**9), Training(global_batch=MAX_MICROBATCHES + 1)]
)
def test_more_microbatches_than_could_be_simulated_are_refused(training):
    with pytest.raises(OptionError, match="expected at most 65536 microbatches per"):
        nums_microbatches(PROFILES, 2, training)
