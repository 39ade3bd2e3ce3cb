import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.schedules import event_loop, rules
from planner.schedules.dependencies import dependencies, tasks
from planner.schedules.dry_run import _free_paths
from planner.schedules.tasks import ContentionGroups
from tests.support.programs import written

LISTS = ("0F0 0F1 0B0 0B1 O", "1F0 1B0", "")
TIMES_S = st.lists(st.floats(0, 10) | st.just(float("nan")), min_size=7, max_size=7)


def job_of(lists, duration_s):
    code = written(*lists).code
    nothing = np.zeros(len(code))
    return tasks(code, dependencies(code), np.zeros(0, np.int64), np.array(duration_s), nothing)


@given(TIMES_S)
def test_lists_that_never_meet_are_timed_as_the_compiled_rules_time_them(duration_s):
    job, paths = job_of(LISTS, duration_s), _free_paths(0)
    alone = ContentionGroups(np.full(3, -1), np.zeros((0, 1)))
    got, expected = rules.run(job, paths, alone), event_loop.run(job, paths, alone)
    for name, one, other in zip(got._fields, got, expected, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("lists", [("0F0 0>1:0:x", "1<0:0:x 1F0"), ("0B0 A0 O", "1B0 A0 O")])
def test_lists_that_meet_are_run_by_the_compiled_rules(lists, monkeypatch):
    code = written(*lists, sums=[(0, 1)]).code
    known, nothing = dependencies(code), np.ones(len(code))
    job = tasks(code, known, np.array([2]), nothing, nothing)
    alone = ContentionGroups(np.full(2, -1), np.zeros((0, 1)))
    assert rules.run(job, _free_paths(len(known.source)), alone).ended
    monkeypatch.setattr(event_loop, "run", lambda *given: given)
    assert rules.run(job, None, alone) == (job, None, alone)


def test_devices_that_slow_each_other_are_run_by_the_compiled_rules():
    job = job_of(("0F0", "1F0"), [1.0, 1.0])
    pair = ContentionGroups(np.zeros(2, np.int64), np.array([[1.0, 1.0, 3.0]]))
    assert rules.run(job, _free_paths(0), pair).end_s.tolist() == [3.0, 3.0]
