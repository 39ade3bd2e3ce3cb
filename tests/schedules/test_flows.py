"""Flows of PipeDream's schedule, and the versions of parameters that their minibatches meet.

The tables are worked out by hand from the paper's rule (Narayanan et al., SOSP 2019, sections 3.2
and 3.3), minibatch by minibatch.
"""

from dataclasses import replace
from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.strategy import ScheduleName, violations
from planner.schedules.actions import AllReduce, Compute, Direction, Send, Step
from planner.schedules.dry_run import dry_run
from planner.schedules.flows import flow
from planner.schedules.orders import default_warmups
from planner.schedules.versions import alive, version_of, versions_kept
from tests.schedules.test_schedules import picture
from tests.support.programs import as_graph, chain, in_buckets, split


def straight(num_stages, num_minibatches=6, widths=None):
    graph = chain(num_stages)
    widths = widths or [1] * num_stages
    cuts = list(range(1, num_stages))
    return split(graph, cuts, widths, num_minibatches, "pipedream"), graph


def table(strategy, num_minibatches):
    """Per stage, the version of each minibatch."""
    return [
        [version_of(strategy, s, m) for m in range(num_minibatches)]
        for s in range(len(strategy.stages))
    ]


# ------------------------------------------------------------------------------------ lists


def test_a_flow_of_3_stages_steps_after_every_backward():
    strategy, graph = straight(3)
    assert picture(flow(strategy, graph, 4), (Compute, Step)) == (
        "0F0 0F1 0F2 0B0 O 0F3 0B1 O 0B2 O 0B3 O\n"
        "1F0 1F1 1B0 O 1F2 1B1 O 1F3 1B2 O 1B3 O\n"
        "2F0 2B0 O 2F1 2B1 O 2F2 2B2 O 2F3 2B3 O"
    )


def test_gradients_are_sent_before_their_round_is_summed():
    strategy, graph = straight(2, 4, [1, 2])
    lists = flow(strategy, graph, 4)
    assert [one.devices for one in lists.sums] == [(1, 2)] * 4
    assert picture(lists, (Compute, Send, AllReduce, Step)) == (
        "0F0 0>1:0:t0 0F1 0>2:1:t0 0F2 0>1:2:t0 0B0 O 0F3 0>2:3:t0 0B1 O 0B2 O 0B3 O\n"
        "1F0 1B0 1>0:0:d/t0 A0 O 1F2 1B2 1>0:2:d/t0 A1 O\n"
        "1F1 1B1 1>0:1:d/t0 A0 O 1F3 1B3 1>0:3:d/t0 A1 O"
    )


def test_all_reduces_are_numbered_round_by_round_over_the_buckets_of_all_stages():
    graph = as_graph([[], [0], [1], [2]])
    strategy = split(graph, [2], [2, 2], 4, "pipedream")
    lists = in_buckets(strategy, graph, 4)
    assert [one.parameters for one in lists.sums] == [("w1",), ("w0",), ("w3",), ("w2",)] * 2
    assert picture(lists, (AllReduce, Step)) == "\n".join(
        ["A0 A1 O A4 A5 O"] * 2 + ["A2 A3 O A6 A7 O"] * 2
    )


def test_a_flow_is_whole_rounds_of_every_stage():
    strategy, graph = straight(2, 6, [2, 3])
    with pytest.raises(ValueError, match="expected a multiple of 6, got 8"):
        flow(strategy, graph, 8)
    with pytest.raises(ValueError, match="of an asynchronous schedule, not 1f1b"):
        flow(split(graph, [1], [1, 1], 4), graph, 4)


def least_warmups(widths, extra):
    """A backward of round k waits for W - 1 rounds of forwards of the next stage behind it, so this
    many rounds in front of the own one; and more by `extra`.
    """
    warmups = [1 + extra]
    for width, behind in reversed(list(pairwise(widths))):
        warmups.insert(0, 1 + extra + -(-(warmups[0] - 1) * behind // width))
    return warmups


# NOAM, the least that blocks nothing, and more.
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([None, 0, 1, 2]))
def test_every_flow_runs_to_its_end_and_meets_the_versions_of_the_rule(widths, extra):
    graph = chain(len(widths))
    noam = default_warmups(widths, 1, schedule=ScheduleName.PIPEDREAM)
    warmups = noam if extra is None else least_warmups(widths, extra)
    assert all(w >= least for w, least in zip(noam, least_warmups(widths, 0), strict=True))
    count = 3 * lcm(*widths)
    strategy = split(graph, range(1, len(widths)), widths, count, "pipedream", warmups)
    lists = flow(strategy, graph, count)
    assert dry_run(lists) is None
    for actions in lists.lists.values():
        steps, met = 0, {}
        for action in actions:
            match action:
                case Step():
                    steps += 1
                case Compute(Direction.FORWARD, stage, m):
                    met[m] = steps
                    assert version_of(strategy, stage, m) == steps
                    with_sync = replace(strategy, vertical_sync=True)
                    assert version_of(with_sync, stage, m) <= steps
                case Compute(Direction.BACKWARD, _, m):
                    assert met.pop(m) <= steps
        assert not met
        assert steps == count // strategy.stages[stage].num_replicas


# ---------------------------------------------------------------------------------- versions


def test_versions_of_2_stages_by_hand():
    strategy, _ = straight(2)
    assert table(strategy, 6) == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert table(replace(strategy, vertical_sync=True), 6) == [[0, 0, 1, 2, 3, 4]] * 2


def test_versions_of_3_stages_by_hand():
    strategy, _ = straight(3)
    assert table(strategy, 6) == [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert table(replace(strategy, vertical_sync=True), 6) == [[0, 0, 0, 1, 2, 3]] * 3


def test_versions_of_a_replicated_first_stage_by_hand():
    # NOAM is ceil(3 / 2) = 2. A step of stage 0 is after 2 minibatches, of stage 1 after each.
    strategy, _ = straight(2, 8, [2, 1])
    assert table(strategy, 8) == [[0, 0, 0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7]]
    # Version 1 of stage 0 is made of minibatches 0 and 1, and so is version 2 of stage 1.
    assert table(replace(strategy, vertical_sync=True), 8) == [
        [0, 0, 0, 0, 1, 1, 2, 2],
        [0, 0, 0, 0, 2, 2, 4, 4],
    ]


def test_versions_of_a_replicated_last_stage_by_hand():
    strategy, _ = straight(2, 8, [1, 2])
    assert table(strategy, 8) == [[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2, 3, 3]]
    # Version n of stage 0 is made of n minibatches, of stage 1 of 2 n.
    assert table(replace(strategy, vertical_sync=True), 8) == [
        [0, 0, 0, 1, 2, 3, 4, 5],
        [0, 0, 0, 0, 1, 1, 2, 2],
    ]


def test_versions_alive_by_hand():
    three, _ = straight(3)
    assert [alive(three, s) for s in range(3)] == [3, 2, 1]
    # With vertical sync the last stage runs minibatch m with version m - 2, and keeps m - 2, m - 1
    # and m, which the next ones will use.
    synced = replace(three, vertical_sync=True)
    assert [alive(synced, s) for s in range(3)] == [3, 3, 3]
    # Stage 1 runs m = 4 with version 2 when it has version 4, and 6 will use that: 2 and 4, since
    # nobody uses 3; then it makes 5, which is there until 6 is made.
    first = replace(straight(2, 8, [2, 1])[0], vertical_sync=True)
    assert [alive(first, s) for s in range(2)] == [2, 3]


def test_versions_kept_one_after_the_other_by_hand():
    # 0F0 0F1 0F2 0B0 O 0F3 0B1 O 0B2 O 0B3 O: version 0 serves 0, 1 and 2, version 1 serves 3.
    three, _ = straight(3)
    assert list(versions_kept(three, 0, 0, 4)) == [1, 1, 1, 2, 2, 3, 2, 1]


def test_noam_is_the_number_of_minibatches_in_flight():
    # NOAM = ceil(machines / machines of the input stage), and from each stage on likewise.
    def noam(*widths):
        return default_warmups(widths, 1, schedule=ScheduleName.PIPEDREAM)

    assert noam(1, 1, 1, 1) == (4, 3, 2, 1)
    assert noam(7, 1) == (2, 1)
    assert noam(1, 7) == (8, 1)
    assert noam(2, 3, 1) == (3, 2, 1)
    assert noam(8) == (1,)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_no_more_versions_are_alive_than_minibatches_in_flight_without_vertical_sync(widths, sync):
    strategy = replace(straight(len(widths), lcm(*widths), widths)[0], vertical_sync=sync)
    for s, stage in enumerate(strategy.stages):
        if not sync:
            assert alive(strategy, s) == stage.warmup
        longer = np.max(list(versions_kept(strategy, s, 0, 40 * lcm(*widths))))
        assert longer <= alive(strategy, s)


# -------------------------------------------------------------------------------- violations


def test_more_in_flight_than_an_iteration_has_is_sound():
    strategy, graph = straight(4, 1)
    assert violations(strategy, graph, 4) == ()


def test_minibatches_that_cannot_be_dealt_evenly_are_refused():
    strategy, graph = straight(2, 5, [1, 2])
    (wrong,) = violations(strategy, graph, 3)
    assert wrong.startswith("stage 1 has 2 replicas, and 5 minibatches cannot be dealt")


def test_a_parameter_of_several_stages_is_refused():
    graph = as_graph([[], [0]], tied=[0, 0])
    (wrong,) = violations(split(graph, [1], [1, 1], 4, "pipedream"), graph, 2)
    assert wrong.startswith("parameter w0 is used in stages 0, 1; under the schedule pipedream")


def test_a_device_with_several_stages_is_refused():
    strategy, graph = straight(2)
    stages = tuple(replace(stage, groups=((0,),)) for stage in strategy.stages)
    assert violations(replace(strategy, stages=stages), graph, 2) == (
        "a device runs several stages, which the schedule pipedream cannot do",
    )


def test_vertical_sync_is_of_this_schedule_only():
    graph = chain(2)
    strategy = replace(split(graph, [1], [1, 1], 4), vertical_sync=True)
    assert violations(strategy, graph, 2) == (
        "vertical sync is of the schedule pipedream, not of 1f1b",
    )
