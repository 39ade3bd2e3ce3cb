"""Bounds of NetSplit's model between cuts: they hold in every schedule, and see whole spans."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers.netsplit import spans as netsplit_spans
from planner.solvers.netsplit.cpsat_call import SearchBudget
from planner.solvers.netsplit.jobs import schedule_of
from planner.solvers.netsplit.spans import joined, merged, spanned, spans_of
from planner.solvers.placement.problem import placement_problem_of
from tests.solvers.test_netsplit import alone, brute_force, partly_trained, placement_problem_from
from tests.solvers.test_netsplit_search import grouped_schedules, watch_of
from tests.support.builders import KB
from tests.support.linked_problems import linked_problems
from tests.support.netsplit_instances import problem_from
from tests.support.often import often

AMPLE_S = 1e6
NEVER = 2**40


@pytest.fixture
def many_cuts(monkeypatch):
    """Small spans in small graphs."""
    monkeypatch.setattr(netsplit_spans, "HALF", 0.5)
    monkeypatch.setattr(netsplit_spans, "PER_BESIDE", 0.1)


def budget_of(instance, limit_s=AMPLE_S):
    """A limit of work alone, so that a busy machine changes nothing."""
    return SearchBudget.begun(watch_of(instance), limit_s, 0)


def bounds_of(instance, limit_s=AMPLE_S):
    """Bounds of both phases and of both together, of the spans and after each merge."""
    budget, everything = budget_of(instance, limit_s), range(instance.problem.num_operators)
    spans = spanned(instance, budget, 0.5)
    steps = [spans, *merged(instance, spans, budget, NEVER)]
    bounds = [joined(instance, everything, step) for step in steps]
    return [(one.phases, one) for one in bounds]


@pytest.mark.usefixtures("many_cuts")
@often(20, 40, linked_problems(max_nodes=4) | partly_trained(4))
def test_no_schedule_is_shorter_than_spans_say(problem):
    instance = alone(problem)
    least = [joint.least for _, joint in bounds_of(instance)]
    assert least[0] > 0
    assert max(least) <= brute_force(instance)


@pytest.mark.usefixtures("many_cuts")
@often(20, 60, linked_problems(max_nodes=7), st.data())
def test_bounds_hold_in_list_schedules(problem, data):
    instance = alone(problem)
    devices, size = st.integers(0, problem.num_devices - 1), problem.num_operators
    where = data.draw(st.lists(devices, min_size=size, max_size=size))
    schedule = schedule_of(instance, where)
    phases = []
    for backward in (False, True):
        *starts, length = schedule.phase(backward)
        ticks = instance.backward if backward else instance.forward
        ends = [s + int(ticks[i, where[i]]) for i, s in enumerate(starts)]
        phases.append((starts, ends, length))
    for bounds, joint in bounds_of(instance):
        assert_hold(bounds, joint, phases)


@settings(max_examples=30)
@given(grouped_schedules())
@pytest.mark.usefixtures("many_cuts")
def test_and_in_those_of_groups(drawn):
    instance, phases = drawn
    for bounds, joint in bounds_of(instance):
        assert_hold(bounds, joint, phases)


def assert_hold(bounds, joint, phases):
    """All bounds in a schedule, given as starts, ends and length by phase."""
    assert joint.least <= sum(length for *_, length in phases)
    for one, (starts, ends, length) in zip(bounds, phases, strict=True):
        assert one.least <= length
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            assert one.head[i] <= start
            assert one.tail[i] <= length - end
    (there, ends, length), (back, back_ends, back_length) = phases
    for i, (before, behind) in enumerate(zip(joint.before, joint.behind, strict=True)):
        assert before <= there[i] + back_length - back_ends[i]
        assert behind <= length - ends[i] + back[i]
    for (u, v), ticks in joint.between.items():
        assert ticks <= ends[v] - there[u] + back_ends[u] - back[v]


#    / 1 \     / 4 \
#  0       3         6    of 1 s on two devices, backwards twice as long; 2, 5 beside 1, 4.
#    \ 2 /     \ 5 /
DIAMONDS = [[], [0], [0], [1, 2], [3], [3], [4, 5]]


@pytest.mark.parametrize(("message_s", "expected_s"), [(0.25, 15 + 4 * 0.25), (9.0, 21)])
@pytest.mark.usefixtures("many_cuts")
def test_two_diamonds_are_two_spans_that_meet_in_one_operator(message_s, expected_s):
    """0 and 1 run beside 2 and 3, then 3 and 5 beside 4 and 6: 5 operators of 3 s, and a message of
    each diamond and phase is awaited. With long messages all operators run on one device.
    """
    sizes = [int(message_s * KB)] * 7
    instance = alone(placement_problem_from(DIAMONDS, [1] * 7, sizes, count=2))
    ends = [ends for ends, _ in spans_of(instance)]
    assert (None, 3) in {(ends[0][0], one[1]) for one in ends}
    (_, joint), *_ = bounds_of(instance)
    assert joint.least * instance.tick_s == pytest.approx(expected_s, rel=1e-3)


def test_spans_cover_a_graph_of_narrow_places():
    instance = alone(placement_problem_of(problem_from(0, 4)))
    spans = spans_of(instance)
    assert [ends[1] for ends, _ in spans[:-1]] == [ends[0] for ends, _ in spans[1:]]
    assert spans[0][0][0] is None
    assert spans[-1][0][1] is None
    for (_, one), (_, other) in pairwise(spans):
        assert max(one) == min(other)
    assert max(len(operators) for _, operators in spans) < 40
    # 0 to 29 come before all others, and so do 30 to 37 before the rest.
    assert [operators for _, operators in spans[:2]] == [(*range(30),), (*range(29, 39),)]


# 0 -> 1 -> 2, each 1 s forward and 3 s backward on one device, and the reverse on the other: D_01
# is 8 s. The cut 1 may take 4 s on either, and all of it counts once.
@pytest.mark.usefixtures("many_cuts")
def test_a_cut_counts_once_on_uneven_devices():
    problem = placement_problem_from([[], [0], [1]], [1] * 3, [1] * 3, count=2)
    uneven = np.array([[1.0, 3.0]] * 3)
    instance = alone(replace(problem, forward_s=uneven, backward_s=uneven[:, ::-1].copy()))
    least = [joint.least * instance.tick_s for _, joint in bounds_of(instance)]
    assert least[-1] == pytest.approx(12, rel=1e-3)
    assert max(least) <= brute_force(instance) * instance.tick_s


@pytest.mark.usefixtures("many_cuts")
def test_spans_repeat_themselves_and_merges_raise_them():
    instance = alone(placement_problem_of(problem_from(1, 3, num_operators=16)))
    steps = bounds_of(instance)
    assert bounds_of(instance) == steps
    least = [joint.least for _, joint in steps]
    assert least == sorted(least)
    assert least[0] < least[-1]


def test_without_work_spans_say_what_phases_do():
    instance = alone(placement_problem_of(problem_from(0, 4, num_operators=40)))
    (_, joint), *more = bounds_of(instance, limit_s=0.0)
    assert joint.least > 0
    assert not more
