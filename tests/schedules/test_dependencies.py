import numpy as np

from planner.schedules.actions import Compute, Direction, Send, text
from planner.schedules.dependencies import dependencies
from planner.schedules.program import program
from tests.support.programs import chain, split, written


def words(lists, indices):
    actions = [text(a) for one in lists.lists.values() for a in one]
    return [actions[i] for i in indices]


def test_the_sends_and_receives_of_a_pair_meet_in_their_order():
    lists = program(split(chain(2), [1], [1, 1], 2), chain(2))
    known = dependencies(lists.code)
    assert (known.source.tolist(), known.target.tolist()) == ([0, 1], [1, 0])
    assert known.first.tolist() == [0, 2, 4]
    assert words(lists, known.send) == ["0>1:0:t0", "0>1:1:t0", "1>0:0:d/t0", "1>0:1:d/t0"]
    assert words(lists, known.receive) == ["1<0:0:t0", "1<0:1:t0", "0<1:0:d/t0", "0<1:1:d/t0"]


def test_transfers_end_where_sends_and_receives_first_differ():
    lists = written(
        "0>1:0:x 0>1:0:y 0>1:0:z 0>2:0:x 0>2:0:y", "1<0:0:x 1<0:0:z 1<0:0:z", "2<0:0:x 2<1:0:x"
    )
    known = dependencies(lists.code)
    assert np.diff(known.first).tolist() == [1, 1, 0]
    assert words(lists, known.send) == ["0>1:0:x", "0>2:0:x"]
    assert words(lists, known.receive) == ["1<0:0:x", "2<0:0:x"]


def held_by_sends(lists, device):
    """Per send of a device, the computation that begins only when it is over."""
    actions, own = lists.lists[device], lists.code.start[device]
    counter = dependencies(lists.code).counter[own : own + len(actions)].tolist()
    return {
        text(send): text(one)
        for send, key in zip(actions, counter, strict=True)
        for one, other in zip(actions, counter, strict=True)
        if isinstance(send, Send) and isinstance(one, Compute) and key == other
    }


def test_a_result_that_is_being_sent_holds_the_second_computation_after_its_own():
    lists = program(split(chain(2), [1], [1, 1], 4), chain(2))
    backwards = [a for a in lists.lists[1] if getattr(a, "direction", "") is Direction.BACKWARD]
    made = [text(a) for a in backwards if isinstance(a, Compute)]
    assert made == ["1B0", "1B1", "1B2", "1B3"]
    assert held_by_sends(lists, 1) == {"1>0:0:d/t0": "1B2", "1>0:1:d/t0": "1B3"}
    assert held_by_sends(lists, 0) == {}
    # Forwards wait where they come first.
    first = program(split(chain(2), [1], [1, 1], 4, "gpipe"), chain(2))
    assert held_by_sends(first, 0) == {"0>1:0:t0": "0F2", "0>1:1:t0": "0F3"}
