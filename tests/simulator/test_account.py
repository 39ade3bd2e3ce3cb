"""What is read off a timeline: idle times, memory over time and the critical path."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.evaluate import evaluate
from planner.schedules.actions import Compute, Direction, text
from planner.schedules.orders import default_warmups
from planner.schedules.program import program
from planner.simulator.account import account, memory_over_time
from planner.simulator.critical_path import Reason, critical_path
from planner.simulator.events import run, simulate
from planner.simulator.idle import Cause, Wait, by_cause, idle_times
from planner.simulator.timeline import Event, Timeline, communication_s, compute_s, idle_s
from tests.simulator.test_events import ALONE, costs, or_error, timed_cases
from tests.support.programs import (
    chain,
    mesh,
    problems_and_strategies,
    split,
    split_graphs,
    star,
    three_stages,
    with_sharing,
    written,
)

# Critical path, by hand.


def path_text(lists, costs_of, topology):
    steps = critical_path(run(lists, costs_of, topology), topology)
    return " ".join(
        f"{text(s.action)}{'*' if s.transfer else ''}@{s.device}[{s.start_s:g},{s.end_s:g}]"
        f"{s.reason.name}"
        for s in steps
    )


def test_the_path_of_two_stages_goes_there_and_back():
    lists = written("0F0 0>1:0:x 0<1:0:d/x 0B0 O", "1<0:0:x 1F0 1B0 1>0:0:d/x O")
    assert path_text(lists, costs(lists, step_s=0.5), mesh(2, bandwidth=2.0)) == (
        "0F0@0[0,1]START 1<0:0:x*@1[1,3]DATA 1F0@1[3,4]DATA 1B0@1[4,6]DEVICE"
        " 0<1:0:d/x*@0[6,8]DATA 0B0@0[8,10]DATA O@0[10,10.5]DEVICE"
    )


def test_the_path_names_a_receiver_that_is_late_and_a_link_that_is_busy():
    lists = written("0>1:0:x 0>1:1:x", "1F9 1<0:0:x 1<0:1:x 1F1")
    assert path_text(lists, costs(lists), mesh(2, bandwidth=4.0)) == (
        "1F9@1[0,1]START 1<0:0:x*@1[1,2]RECEIVER 1<0:1:x*@1[2,3]LINK 1F1@1[3,4]DATA"
    )


def test_the_path_goes_over_an_exclusive_link_that_another_pair_had():
    lists = written("0>2:0:x", "1>2:0:y", "2<0:0:x 2<1:0:y 2F0")
    narrow = with_sharing(star([9, 9, 9], [9, 9, 2.0]), ALONE)
    assert path_text(lists, costs(lists), narrow) == (
        "2<0:0:x*@2[0,2]START 2<1:0:y*@2[2,4]LINK 2F0@2[4,5]DATA"
    )


def test_the_path_goes_over_a_transfer_that_holds_its_sender():
    lists = written("0B0 0>1:0:d/x 0B1 0B2", "1<0:0:d/x 1B0")
    assert path_text(lists, costs(lists), mesh(2, bandwidth=0.5)) == (
        "0B0@0[0,2]START 1<0:0:d/x*@1[2,10]DATA 0B2@0[10,12]SENDING"
    )


def test_the_path_goes_over_the_last_member_of_a_sum():
    lists = written("0F0 A0 O", "0F1 0F3 A0", sums=[(0, 1)])
    assert path_text(lists, costs(lists, sum_s=3.0, step_s=1.0), mesh(2)) == (
        "0F1@1[0,1]START 0F3@1[1,2]DEVICE A0@0[2,5]MEMBERS O@0[5,6]DEVICE"
    )


def test_the_path_leaves_a_backward_at_the_cut_that_a_sum_waited_for():
    # Device 1 has the gradients of A0 2 s before the end of its backward, device 0 before that.
    lists = written("0F0 0B0 A0 A1 O", "0F1 0F3 0B1 A0 A1 O", sums=[(0, 1), (0, 1)])
    found = replace(
        costs(lists, backward_s=5.0, sum_s=4.0, step_s=1.0),
        backward_left_s={(i, d): 2.0 for i in (0, 1) for d in (0, 1)},
    )
    assert path_text(lists, found, mesh(2)) == (
        "0F1@1[0,1]START 0F3@1[1,2]DEVICE 0B1@1[2,5]DEVICE A0@0[5,9]MEMBERS A1@0[9,13]DEVICE"
        " O@0[13,14]DEVICE"
    )


def test_the_path_goes_over_the_rest_of_a_backward_that_is_longer_than_the_sums():
    lists = written("0B0 A0 O", "0B1 A0 O", sums=[(0, 1)])
    found = replace(
        costs(lists, backward_s=5.0, sum_s=1.0, step_s=1.0),
        backward_left_s={(0, 0): 3.0, (0, 1): 3.0},
    )
    assert path_text(lists, found, mesh(2)) == "0B0@0[0,5]START O@0[5,6]DEVICE"


@settings(max_examples=200)
@given(timed_cases())
def test_the_path_fills_the_iteration_without_gap_or_overlap(case):
    lists, _, topology = case
    times = or_error(run, case)
    if isinstance(times, str):
        return
    steps = critical_path(times, topology)
    assert steps[0].start_s == 0.0
    assert steps[0].reason is Reason.START
    assert all(a.end_s == b.start_s for a, b in pairwise(steps))
    lengths = [Fraction(s.end_s) - Fraction(s.start_s) for s in steps]
    assert sum(lengths) == Fraction(times.iteration_s)
    assert all(s.action in lists.lists[s.device] for s in steps)


# Idle, by hand and by sums.


def pipeline(num_stages=3, num_microbatches=2):
    """A chain of stages of 1 s forward and 2 s backward, free links."""
    graph = chain(num_stages)
    strategy = split(graph, range(1, num_stages), [1] * num_stages, num_microbatches)
    lists = program(strategy, graph)
    return graph, strategy, simulate(lists, costs(lists), mesh(num_stages, 1e30))


def by_cause_in(timeline, strategy, graph):
    return by_cause(idle_times(timeline, strategy, graph), strategy)


def test_a_pipeline_waits_for_its_neighbours():
    # 0: F0 F1 .  .  .  .  .  B0 B0 .  B1 B1       of 3 stages and 2 microbatches; 1 s each, a
    # 1: .  F0 F1 .  .  B0 B0 .  B1 B1              backward 2 s
    # 2: .  .  F0 B0 B0 F1 B1 B1
    graph, strategy, timeline = pipeline()
    assert timeline.iteration_s == 12.0
    found = {d: list(w.items()) for d, w in by_cause_in(timeline, strategy, graph).items()}
    assert found[0] == [(Wait(Cause.GRADIENT, 1, 1), pytest.approx(6.0))]
    assert found[1][0] == (Wait(Cause.GRADIENT, 2, 2), pytest.approx(3.0))
    assert dict(found[1])[Wait(Cause.WARM_UP)] == pytest.approx(1.0)
    assert dict(found[1])[Wait(Cause.COOL_DOWN)] == pytest.approx(2.0)
    assert dict(found[2])[Wait(Cause.WARM_UP)] == pytest.approx(2.0)
    assert dict(found[2])[Wait(Cause.COOL_DOWN)] == pytest.approx(4.0)


def test_a_member_that_is_early_waits_for_the_all_reduce():
    graph = chain(1)
    strategy = split(graph, [], [2], 3)
    lists = program(strategy, graph)
    timeline = simulate(lists, costs(lists, sum_s=1.0), mesh(2))
    assert by_cause_in(timeline, strategy, graph) == {0: {}, 1: {Wait(Cause.ALL_REDUCE): 3.0}}


def test_a_device_waits_for_another_that_does_not_take_what_it_has_sent():
    graph = chain(2)
    lists = written("0F3 0F4 0F5 0F6 0F7 0F8 0<1:0:d/t0 0B0", "1B0 1>0:0:d/t0 1B1 1B2")
    timeline = simulate(lists, costs(lists), mesh(2, 1e30))
    found = by_cause_in(timeline, split(graph, [1], [1, 1], 9), graph)
    assert found[1] == {Wait(Cause.SENDING, device=0): 2.0}


def test_time_between_measured_actions_in_which_nothing_comes_is_the_devices_own():
    graph = chain(1)
    events = (
        Event(0, Compute(Direction.FORWARD, 0, 0), 0.5, 1.0),
        Event(0, Compute(Direction.BACKWARD, 0, 0), 1.25, 2.0),
    )
    found = by_cause_in(Timeline(2.0, events, ()), split(graph, [], [1], 1), graph)
    assert found == {0: {Wait(Cause.WARM_UP): 0.5, Wait(Cause.OWN): 0.25}}


@given(split_graphs(), st.booleans())
def test_computation_communication_and_the_causes_make_up_the_iteration(case, exclusive):
    graph, strategy = case
    lists = program(strategy, graph)
    count = len(lists.lists)
    topology = star([3.0] * count, [2.0] * count, [0.5] * count)
    topology = with_sharing(topology, ALONE) if exclusive else topology
    timeline = simulate(lists, costs(lists, sum_s=1.5, step_s=0.5), topology)
    for device, waits in by_cause_in(timeline, strategy, graph).items():
        busy_s = compute_s(timeline, device) + communication_s(timeline, device)
        assert busy_s + sum(waits.values()) == pytest.approx(timeline.iteration_s, rel=1e-12)
        assert sum(waits.values()) == pytest.approx(idle_s(timeline, device), abs=1e-9)
        assert Wait(Cause.OWN) not in waits
    for one in idle_times(timeline, strategy, graph):
        assert one.start_s < one.end_s


def test_a_device_with_several_stages_is_accounted_for_too():
    problem, strategy = three_stages()
    devices = ((0,), (1,), (0,))
    depths = default_warmups((1, 1, 1), 4, devices=devices)
    stages = zip(strategy.stages, devices, depths, strict=True)
    shared = replace(
        strategy, stages=tuple(replace(s, groups=(d,), warmup=w) for s, d, w in stages)
    )
    found, evaluation = account(problem, shared), evaluate(problem, shared)
    peaks = {d: max(size for _, size in curve) for d, curve in found.timeline.memory.items()}
    assert peaks == {d: parts.total_bytes for d, parts in evaluation.memory.items()}
    assert found.path[-1].end_s == found.timeline.iteration_s
    assert all(a.end_s == b.start_s for a, b in pairwise(found.path))
    for device, waits in found.idle.items():
        assert sum(waits.values()) == pytest.approx(idle_s(found.timeline, device), abs=1e-12)
    # Device 0 waits for the output of stage 1 in stage 2, and for its gradient in stage 0.
    causes = {(one.cause, one.stage) for one in found.idle[0]}
    assert causes <= {(Cause.OUTPUT, 1), (Cause.GRADIENT, 1), (Cause.COOL_DOWN, None)}


# Memory.


@settings(max_examples=60)
@given(problems_and_strategies())
def test_memory_over_time_reaches_the_peak_and_no_more(case):
    problem, strategy = case
    try:
        evaluation = evaluate(problem, strategy)
    except ValueError:
        return
    times = run(evaluation.program, evaluation.costs, problem.topology)
    found = memory_over_time(problem, strategy, evaluation.needs, times)
    assert {d: max(b for _, b in curve) for d, curve in found.items()} == {
        d: parts.total_bytes for d, parts in evaluation.memory.items()
    }
    for curve in found.values():
        assert all(a[0] <= b[0] and a[1] != b[1] for a, b in pairwise(curve))
        assert 0.0 <= curve[0][0] <= curve[-1][0] <= times.iteration_s
