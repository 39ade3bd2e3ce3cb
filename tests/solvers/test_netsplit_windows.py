"""Bounds of NetSplit's model by windows: they hold in every schedule and see what phases do not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from planner.solvers.netsplit import windows as netsplit_windows
from planner.solvers.netsplit.bounds import subproblem_bounds_of
from planner.solvers.netsplit.cpsat_call import SearchBudget
from planner.solvers.netsplit.jobs import schedule_of
from planner.solvers.netsplit.model import instance_of, part
from planner.solvers.netsplit.windows import windowed
from planner.solvers.placement.links import SharedLink
from planner.solvers.placement.problem import placement_problem_of
from tests.solvers.test_netsplit import alone, brute_force, partly_trained, placement_problem_from
from tests.solvers.test_netsplit_search import grouped_schedules, watch_of
from tests.support.builders import KB
from tests.support.linked_problems import linked_problems
from tests.support.netsplit_instances import problem_from
from tests.support.often import often

AMPLE_S = 1e6
THREE = ((3, 0.03),)
"""Windows of three operators leave out much of even a small graph."""


def bounds_of(instance, limit_s=AMPLE_S, sizes=netsplit_windows.SIZES):
    """Bounds of both phases and of both together, before windows and after; by work alone, so that
    a busy machine changes nothing.
    """
    bounds = subproblem_bounds_of(instance)
    budget = SearchBudget.begun(watch_of(instance), limit_s, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(netsplit_windows, "SIZES", sizes)
        patch.setattr(netsplit_windows, "LINKED_SIZES", sizes)
        better = windowed(instance, bounds, budget, 0.5)
    return bounds.phases, better.phases, better


@often(10, 25, partly_trained(4))
def test_no_schedule_is_shorter_than_windows_say(problem):
    instance = alone(problem)
    _, bounds, joint = bounds_of(instance)
    assert sum(one.least for one in bounds) <= joint.least <= brute_force(instance)


@often(12, 40, linked_problems(max_nodes=4))
def test_nor_where_any_pairs_share_links(problem):
    instance = alone(problem)
    _, bounds, joint = bounds_of(instance)
    assert sum(one.least for one in bounds) <= joint.least <= brute_force(instance)


@often(15, 40, linked_problems(max_nodes=7), st.data())
def test_nor_shorter_than_windows_of_three_say(problem, data):
    instance = alone(problem)
    devices, size = st.integers(0, problem.num_devices - 1), problem.num_operators
    where = data.draw(st.lists(devices, min_size=size, max_size=size))
    assert bounds_of(instance, sizes=THREE)[-1].least <= schedule_of(instance, where).latency


# 0, 1 and 2 of 4 s feed 3 on three devices; a message takes 3 s. Two at once arrive after 7 s, but
# over one link after 10 s; then two of the three run where 3 does, 8 s.
@pytest.mark.parametrize(
    ("links", "expected_s"),
    [
        ((), 7),
        ([[(1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2), (1, 2)]], 8),  # a port in of each device
        ([[(1, 0), (2, 0)]], 7),  # of one device only; 3 runs elsewhere
        ([[(p, q) for p in range(3) for q in range(3) if p != q]], 8),  # a bus
        ([[(0, 2), (1, 0), (2, 1)]], 7),  # a ring: no two of these pairs have the same target
    ],
)
def test_messages_to_an_operator_wait_for_each_other_where_all_ways_meet(links, expected_s):
    feeds = [[], [], [], [0, 1, 2]]
    problem = placement_problem_from(feeds, [4, 4, 4, 1], [3 * KB] * 4, count=3)
    shared = tuple(SharedLink(tuple(pairs), 1 / KB) for pairs in links)
    _, bounds, _ = bounds_of(instance := alone(replace(problem, shared=shared)))
    assert bounds[False].head[3] * instance.tick_s == pytest.approx(expected_s, rel=1e-3)


# 0 of 1 s feeds 1, 2 and 3 of 9 s on four devices; a message takes 2 s. One of the three runs where
# 0 does; the other two wait for messages over one port, 5 s and then 9 s.
def test_messages_from_an_operator_wait_for_each_other_at_its_port():
    problem = placement_problem_from([[], [0], [0], [0]], [1, 9, 9, 9], [2 * KB] * 4, count=4)
    least_s = []
    for shared in ((), problem.shared):
        _, bounds, _ = bounds_of(instance := alone(replace(problem, shared=shared)))
        least_s.append(bounds[False].tail[0] * instance.tick_s)
    assert least_s == pytest.approx([11, 13], rel=1e-3)


@often(15, 40, grouped_schedules())
def test_windows_hold_in_list_schedules_of_groups(drawn):
    instance, phases = drawn
    before, bounds, joint = bounds_of(instance, sizes=THREE)
    assert joint.least <= sum(length for *_, length in phases)
    for was, now, (starts, ends, length) in zip(before, bounds, phases, strict=True):
        assert was.least <= now.least <= length
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            assert was.head[i] <= now.head[i] <= start
            assert was.tail[i] <= now.tail[i] <= length - end
    (there, ends, length), (back, back_ends, back_length) = phases
    for i, (before_i, behind_i) in enumerate(zip(joint.before, joint.behind, strict=True)):
        assert before_i <= there[i] + back_length - back_ends[i]
        assert behind_i <= length - ends[i] + back[i]


# 0 -> 1 -> 2, each 1 s forward and 3 s backward on one device, and the reverse on the other: the
# phases say 3 s each; but whatever runs 0 and 1 takes 4 s for each, and 2 takes 2 s at the least.
# A window of one sees 0 only by the bounds of 1.
def test_forwards_and_backwards_that_want_different_devices_are_seen():
    problem = placement_problem_from([[], [0], [1]], [1] * 3, [1] * 3, count=2)
    uneven = np.array([[1.0, 3.0]] * 3)
    problem = replace(problem, forward_s=uneven, backward_s=uneven[:, ::-1].copy())
    instance = alone(problem)
    bounds, _, joint = bounds_of(instance, sizes=((1, 0.03),))
    assert sum(one.least for one in bounds) * instance.tick_s == pytest.approx(6, rel=1e-3)
    before_s = [ticks * instance.tick_s for ticks in joint.before]
    assert before_s == pytest.approx([0, 4, 8], rel=1e-3)
    assert joint.least * instance.tick_s == pytest.approx(10, rel=1e-3)


#      / 1 -> 3 \
#    0            5   of 1 s each on two devices; messages take 2 s. Feeding 5 from the other device
#      \ 2 -> 4 /    takes a message there and one back, 7 s; all on one device, 5 s.
def test_a_window_that_holds_everything_is_exact():
    feeds = [[], [0], [0], [1], [2], [3, 4]]
    instance = alone(placement_problem_from(feeds, [1] * 6, [2 * KB] * 6, count=2))
    before, bounds, _ = bounds_of(instance)
    assert before[False].head[5] * instance.tick_s == pytest.approx(4, rel=1e-3)
    assert bounds[False].head[5] * instance.tick_s == pytest.approx(5, rel=1e-3)


def test_without_time_there_are_no_windows():
    instance = alone(placement_problem_from([[], [0], [1]], [1, 2, 3], count=2))
    before, bounds, joint = bounds_of(instance, limit_s=1e-6)
    assert (bounds, joint) == (before, subproblem_bounds_of(instance))


def test_windows_repeat_themselves_and_tell_more_than_phases():
    instance = alone(placement_problem_of(problem_from(0, 4, num_operators=40)))
    before, bounds, joint = bounds_of(instance, limit_s=1.0)
    assert bounds_of(instance, limit_s=1.0) == (before, bounds, joint)
    assert joint.least > sum(one.least for one in bounds) > sum(one.least for one in before)


def test_a_part_keeps_its_tensors_and_times():
    problem = placement_problem_from([[], [0], [0, 1], [2]], [1, 2, 3, 4], count=2)
    instance = instance_of(problem, [(0, 2), (1,), (3,)])
    inside = part(instance, [0, 2, 3])
    assert inside.groups == ((0, 1), (2,))
    assert inside.group_of == (0, 0, 1)
    assert (inside.forward == instance.forward[[0, 2, 3]]).all()
    ends = [(tensor.producer, tensor.consumers) for tensor in inside.problem.tensors]
    assert ends == [(0, (1,)), (1, (2,))]
    assert inside.tick_s == instance.tick_s
