"""From a user's request to problems."""

from dataclasses import replace

import pytest

from planner.artefacts.calibration import UNCALIBRATED
from planner.artefacts.options import Search, Training
from planner.artefacts.topology import MAX_DEVICES
from planner.planning.problems import MAX_MICROBATCHES, problems_for, samples_of, sizes_for
from planner.profilers.interpolate import interpolated
from planner.support.errors import OptionError
from tests.support.builders import cluster, graph_of, profile_of, unit_type
from tests.support.growing import growing

PROFILES = [profile_of(graph_of([[]], [1000], [1000]), [0.01])]


def asked(profiles, devices=2, **training):
    """The size and the number of microbatches of each problem."""
    topology = cluster([unit_type()] * devices)
    how = Training(**training), Search(), UNCALIBRATED, unit_type()
    problems = problems_for(profiles, topology, *how)
    return [(one.profile.microbatch_size, one.num_microbatches) for one in problems]


def test_the_usual_number_of_microbatches_is_allowed_on_the_most_devices():
    assert samples_of(PROFILES, MAX_DEVICES, Training()) == MAX_MICROBATCHES // 4
    assert asked(PROFILES, 2) == [(1, 8)]


@pytest.mark.parametrize(
    "training", [Training(microbatches=10**9), Training(global_batch=MAX_MICROBATCHES + 1)]
)
def test_more_microbatches_than_could_be_simulated_are_refused(training):
    with pytest.raises(OptionError, match="expected at most 65536 microbatches per"):
        asked(PROFILES, microbatches=training.microbatches, global_batch=training.global_batch)


def test_a_profile_good_for_any_size_takes_any_number_of_samples():
    assert sizes_for([growing(4)], 6) == [1, 2, 3, 6]
    assert asked([growing(4)], global_batch=6) == [(3, 2)]
    assert asked([growing(4)], global_batch=7) == [(1, 7)]
    assert asked([growing(4)], global_batch=8) == [(4, 2)]
    assert asked([growing(4)]) == [(4, 8)]


def test_a_profile_good_for_any_size_takes_as_many_samples_as_there_may_be_microbatches():
    assert asked([growing(1)], global_batch=3 * MAX_MICROBATCHES) == [(3, MAX_MICROBATCHES)]
    assert sizes_for([growing(1)], 2 * MAX_MICROBATCHES)[0] == 2


@pytest.mark.parametrize("size", [4, None])
def test_samples_that_a_size_does_not_divide_are_refused_where_it_is_the_only_one(size):
    profile = growing(4) if size else replace(growing(4), growth=None)
    with pytest.raises(OptionError, match="6 is no multiple of the profile's microbatch of 4"):
        asked([profile], global_batch=6, microbatch_size=size)


def test_between_two_sizes_profiled_one_is_taken_that_divides_the_samples():
    profiles = [replace(interpolated([growing(4)], n), growth=None) for n in (4, 9)]
    assert asked(profiles, global_batch=30) == [(6, 5)]
    assert sizes_for(profiles, 30) == [5, 6]
