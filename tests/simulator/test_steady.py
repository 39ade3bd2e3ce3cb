"""Time per minibatch of PipeDream's schedule, against a replay of its rule in plain Python."""

from dataclasses import replace
from itertools import chain as joined
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.strategy import ScheduleName
from planner.costs.closed_form import iteration_s as closed_form_s
from planner.costs.evaluate import evaluate
from planner.schedules.actions import Compute, Step
from planner.simulator import steady
from planner.simulator.account import account
from planner.simulator.steady import iterate
from planner.simulator.timeline import communication_s, compute_s, idle_s, shares_s
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.programs import split

# A multiple of all periods and cycles that occur, and enough minibatches to settle in.
MINIBATCHES, LATER = 720, 480


def pipelined(forward_s, backward_s, widths, count, **options):
    """A problem with a stage for each operator, on links that take no time, and its strategy."""
    graph = graph_of([[s - 1] if s else [] for s in range(len(widths))])
    problem = problem_of(
        profile_of(graph, forward_s, backward_s), cluster([unit_type()] * sum(widths), 1e30),
        count, schedule=ScheduleName.PIPEDREAM, **options,
    )  # fmt: skip
    strategy = split(graph, range(1, len(widths)), widths, count, "pipedream")
    return problem, strategy


def replayed_s(forward_s, backward_s, widths):
    """Time per minibatch by PipeDream's rule: NOAM - 1 forwards, then a forward and a backward in
    turn. A replica goes on when all replicas of its stage have run the backwards of a round.
    """
    rounds = [MINIBATCHES // width for width in widths]
    orders = []
    for s, width in enumerate(widths):
        ahead = min(-(-sum(widths[s:]) // width) - 1, rounds[s])
        warm = [("F", k) for k in range(ahead)]
        pairs = [[("F", k + ahead), ("B", k)] for k in range(rounds[s] - ahead)]
        last = [("B", k) for k in range(rounds[s] - ahead, rounds[s])]
        orders.append([*warm, *joined(*pairs), *last])
    end = {}
    at = {(s, r): 0 for s, width in enumerate(widths) for r in range(width)}
    free = dict.fromkeys(at, 0.0)
    moved = True
    while moved:
        moved = False
        for s, r in at:
            while at[s, r] < len(orders[s]):
                way, k = orders[s][at[s, r]]
                m = k * widths[s] + r
                waits = [("F", s - 1, m)] if way == "F" and s else []
                waits += [("B", s + 1, m)] if way == "B" and s + 1 < len(widths) else []
                # The action before is over; after a backward, so are those of the whole round.
                before = orders[s][at[s, r] - 1] if at[s, r] else ("", 0)
                if before[0] == "B":
                    waits += [("B", s, before[1] * widths[s] + i) for i in range(widths[s])]
                if any(one not in end for one in waits):
                    break
                start = max([free[s, r], *(end[one] for one in waits)])
                free[s, r] = end[way, s, m] = start + (forward_s if way == "F" else backward_s)[s]
                at[s, r] += 1
                moved = True
    ends = [
        max(end["B", s, m] for s in range(len(widths)) for m in range(first, first + 60))
        for first in (LATER - 300, LATER - 60)
    ]
    return (ends[1] - ends[0]) / 240


@settings(max_examples=40)
@given(st.data())
def test_time_per_minibatch_equals_that_of_the_replay(data):
    widths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    whole = st.integers(1, 9).map(float)
    forward_s, backward_s = (
        data.draw(st.lists(whole, min_size=len(widths), max_size=len(widths))) for _ in "fb"
    )
    problem, strategy = pipelined(forward_s, backward_s, widths, 2 * lcm(*widths))
    iteration = iterate(problem, strategy, evaluate(problem, strategy))
    assert iteration.unsettled == 0.0
    found_s = iteration.iteration_s / strategy.num_microbatches
    assert found_s == pytest.approx(replayed_s(forward_s, backward_s, widths), rel=1e-6)


def test_by_hand():
    #   0F0 0F1 0B0 0F2 0B1 0F3 ..   2 s a minibatch: the stage is busy all the time
    #       1F0 1B0 1F1 1B1 ..       the other one waits
    problem, strategy = pipelined([1.0, 0.25], [1.0, 0.25], [1, 1], 4)
    iteration = iterate(problem, strategy, evaluate(problem, strategy))
    assert iteration.iteration_s == pytest.approx(4 * 2.0)
    # With 2 replicas the slower stage takes 1 s a minibatch.
    problem, strategy = pipelined([1.0, 0.25], [1.0, 0.25], [2, 1], 4)
    iteration = iterate(problem, strategy, evaluate(problem, strategy))
    assert iteration.iteration_s == pytest.approx(4 * 1.0)


def test_a_chain_of_waits_that_turns_around_behind_a_slow_link():
    # The first link takes 3 s each way, all passes 1 s. Stage 0 has 3 minibatches in flight, and
    # stage 1 runs backwards one minibatch behind its forwards: 2 of them every 2 + 3 + 2 + 3 s. The
    # round trip to the last stage, 12 s for 3 minibatches, is shorter than that.
    graph = graph_of([[], [0], [1]], [3 * 10**9, 1, 1], [0] * 3)
    problem = problem_of(
        profile_of(graph, [1.0] * 3, [1.0] * 3, stash=False), cluster([unit_type()] * 3, 1e9), 4,
        schedule=ScheduleName.PIPEDREAM,
    )  # fmt: skip
    strategy = split(graph, [1, 2], [1, 1, 1], 4, "pipedream")
    evaluation = evaluate(problem, strategy)
    assert iterate(problem, strategy, evaluation).iteration_s == pytest.approx(4 * 5.0)
    closed_s = closed_form_s(evaluation.stages, 4, ScheduleName.PIPEDREAM)
    assert closed_s == pytest.approx(4 * 5.0)


def test_a_step_and_a_sum_come_after_every_minibatch():
    # 4,000 B of parameters: a step takes 4 passes at 16 kB/s, 1 s; a sum over 2 devices 2 x 2,000 B
    # at 4 kB/s, 1 s. Both are shared by the 2 minibatches of a round.
    graph = graph_of([[]], [10], [4000])
    topology = cluster([replace(unit_type(), memory_bandwidth_bytes_per_s=16e3)] * 2, 4e3, cores=2)
    problem = problem_of(
        profile_of(graph, [2.0], [3.0]), topology, 4, schedule=ScheduleName.PIPEDREAM
    )  # fmt: skip
    strategy = split(graph, [], [2], 4, "pipedream")
    evaluation = evaluate(problem, strategy)
    assert iterate(problem, strategy, evaluation).iteration_s == pytest.approx(4 * 7.0 / 2)
    one_f_one_b = replace(strategy, schedule=ScheduleName.ONE_F_ONE_B)
    flushed = iterate(problem, one_f_one_b, evaluate(problem, one_f_one_b))
    assert flushed.iteration_s == pytest.approx(2 * 5.0 + 2.0)


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 3), (3, 1, 2)])
def test_an_iteration_of_twice_as_many_minibatches_takes_twice_as_long(widths):
    forward_s, backward_s = [1.0, 2.0, 1.5][: len(widths)], [2.5, 3.0, 1.0][: len(widths)]
    times_s = []
    for count in (1, 2, 16):
        problem, strategy = pipelined(forward_s, backward_s, list(widths), count * lcm(*widths))
        times_s.append(iterate(problem, strategy, evaluate(problem, strategy)).iteration_s / count)
    assert times_s == pytest.approx([times_s[0]] * 3, rel=1e-9)


def test_a_flow_that_has_not_settled_is_made_longer_and_at_last_given_up(monkeypatch):
    problem, strategy = pipelined([1.0, 2.0], [2.0, 1.0], [2, 3], 6)
    evaluation = evaluate(problem, strategy)
    settled = iterate(problem, strategy, evaluation)
    monkeypatch.setattr(steady, "_LONGEST_CYCLE", 0)
    monkeypatch.setattr(steady, "MAX_ACTIONS", 8 * len(evaluation.program.code))
    given_up = iterate(problem, strategy, evaluation)
    assert given_up.num_minibatches == 8 * settled.num_minibatches
    assert given_up.iteration_s == pytest.approx(settled.iteration_s, rel=0.02)


def test_parts_of_a_window_add_up_to_the_iteration():
    problem, strategy = pipelined([1.0, 2.0, 0.5], [2.0, 1.0, 2.5], [2, 1, 3], 12)
    iteration = iterate(problem, strategy, evaluate(problem, strategy))
    described = account(problem, strategy)
    timeline = described.timeline
    assert timeline.iteration_s == iteration.iteration_s
    computing, communicating, idle = shares_s(iteration.window)
    for d, waits in described.idle.items():
        assert compute_s(timeline, d) == pytest.approx(computing[d])
        assert communication_s(timeline, d) == pytest.approx(communicating[d], abs=1e-9)
        assert idle_s(timeline, d) == pytest.approx(idle[d], abs=1e-9)
        assert sum(waits.values()) == pytest.approx(idle[d], abs=1e-9)
    steps = [one.end_s - one.start_s for one in described.path]
    assert sum(steps) == pytest.approx(iteration.iteration_s)
    assert described.path[0].start_s == 0.0
    # Each replica runs its share of the minibatches, those at the two ends in part.
    for d, stage in ((d, s) for s, one in enumerate(strategy.stages) for d in one.devices):
        work_s = problem.profile.operators[stage].forward_s
        work_s += problem.profile.operators[stage].backward_s
        rounds = 12 // strategy.stages[stage].num_replicas
        own = [e for e in timeline.events if e.device == d and isinstance(e.action, Compute | Step)]
        assert sum(e.end_s - e.start_s for e in own) == pytest.approx(rounds * work_s)


def test_memory_of_a_window_stays_within_the_peak():
    problem, strategy = pipelined([1.0, 2.0, 0.5], [2.0, 1.0, 2.5], [1, 1, 1], 4)
    evaluation = evaluate(problem, strategy)
    for device, curve in account(problem, strategy).timeline.memory.items():
        moments_s, use = np.array(curve).T
        assert moments_s[0] == 0.0
        assert (np.diff(moments_s) >= 0).all()
        assert use.max() == evaluation.memory[device].total_bytes
