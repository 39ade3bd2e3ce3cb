from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.schedules.actions import AllReduce, Compute, Receive, Send, Step, text
from planner.schedules.dry_run import dry_run
from planner.schedules.orders import default_warmups
from planner.schedules.program import program
from tests.support.builders import graph_of
from tests.support.programs import chain, split


def picture(lists, keep=Compute):
    """The program in text form, a line per device, only actions of the kinds in `keep`."""
    return "\n".join(
        " ".join(text(action) for action in actions if isinstance(action, keep))
        for actions in lists.lists.values()
    )


def test_1f1b_with_3_stages_and_4_microbatches():
    lists = program(split(chain(3), [1, 2], [1, 1, 1], 4), chain(3))
    assert picture(lists) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_gpipe_with_2_stages_and_3_microbatches():
    lists = program(split(chain(2), [1], [1, 1], 3, "gpipe"), chain(2))
    assert picture(lists) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_replicas_take_microbatches_in_turn_even_where_they_do_not_divide():
    lists = program(split(chain(2), [1], [2, 1], 3), chain(2))
    assert picture(lists) == "0F0 0F2 0B0 0B2\n0F1 0B1\n1F0 1B0 1F1 1B1 1F2 1B2"


def test_a_tensor_and_its_gradient_are_posted_one_action_of_their_kind_ahead():
    lists = program(split(chain(2), [1], [1, 1], 2), chain(2))
    assert picture(lists, (Compute, Send, Receive, Step)) == (
        "0F0 0>1:0:t0 0<1:0:d/t0 0F1 0>1:1:t0 0<1:1:d/t0 0B0 0B1 O\n"
        "1<0:0:t0 1<0:1:t0 1F0 1B0 1>0:0:d/t0 1F1 1B1 1>0:1:d/t0 O"
    )


def test_sums_come_in_one_global_order_before_the_step():
    graph = chain(2)
    lists = program(split(graph, [1], [2, 3], 6), graph)
    assert [one.devices for one in lists.sums] == [(0, 1), (2, 3, 4)]
    assert picture(lists, (AllReduce, Step)) == "A0 O\nA0 O\nA1 O\nA1 O\nA1 O"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(6, 40))
def test_warmups_cover_the_microbatches_that_the_next_stage_has_in_flight(widths, num_microbatches):
    warmups = default_warmups(widths, num_microbatches)
    in_flight = [w * r for w, r in zip(warmups, widths, strict=True)]
    for before, after in pairwise(in_flight):
        assert before >= min(after, num_microbatches)


def test_a_replica_without_a_microbatch_only_sums_and_steps():
    graph = graph_of([[], [0]])
    everything = tuple(operator.name for operator in graph.operators)
    strategy = Strategy((Stage.whole(everything, (0, 1), 1, False),), ScheduleName.ONE_F_ONE_B, 1)
    lists = program(strategy, graph)
    assert dry_run(lists) is None
    assert [len(lists.lists[device]) for device in (0, 1)] == [4, 2]
