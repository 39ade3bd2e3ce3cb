from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.graph import Tensor
from planner.schedules.actions import (
    AllReduce,
    Compute,
    Direction,
    Receive,
    Send,
    Step,
    decode,
    encode,
    parse,
    piece_bytes,
    text,
)
from planner.schedules.program import program
from tests.support.programs import split_graphs

names = st.text(min_size=1)
numbers = st.integers(0, 999)
boxes = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
transfers = [
    st.sampled_from(Direction), numbers, numbers, names, numbers, st.none() | boxes,
]  # fmt: skip


@given(
    st.one_of(
        st.builds(Compute, st.sampled_from(Direction), numbers, numbers),
        st.builds(Send, *transfers),
        st.builds(Receive, *transfers),
        st.builds(AllReduce, numbers),
        st.just(Step()),
    )
)
def test_the_text_of_an_action_parses_back(action):
    assert " " not in text(action)
    assert parse(text(action)) == action


def test_a_box_stands_behind_the_name():
    send = Send(Direction.BACKWARD, 2, 0, "a[b]", 5, ((0, 4), (8, 16)))
    assert text(send) == "2>5:0:d/a%5Bb%5D[0:4,8:16]"
    assert text(replace(send, box=None)) == "2>5:0:d/a%5Bb%5D"


def test_the_size_of_a_piece_is_that_of_its_box():
    tensor = Tensor("x", (2, 3, 4), "float32", True)
    assert piece_bytes(tensor, None) == 96
    assert piece_bytes(tensor, ((0, 2), (1, 3), (0, 1))) == 16


@pytest.mark.parametrize(
    "word",
    [
        "",
        "F0",
        "0X0",
        "0>1",
        "0>1:2:",
        "A",
        "O2",
        "0F0x",
        "0>1:2:x[",
        "0>1:2:x[0:1,]",
        "0>1:2:x[0:1]y",
    ],
)
def test_other_words_are_no_actions(word):
    with pytest.raises(ValueError, match="is no action"):
        parse(word)


def boxed_up(action):
    """The action with a box if it is a transfer of an even microbatch."""
    if isinstance(action, Send | Receive) and action.microbatch % 2 == 0:
        return replace(action, box=((0, 1),))
    return action


@given(split_graphs(max_warmup=4))
def test_lists_and_their_arrays_say_the_same(case):
    graph, strategy = case
    lists = program(strategy, graph)
    again = encode(dict(lists.lists))
    assert decode(again, range(len(again))) == decode(lists.code, range(len(lists.code)))
    boxed = {d: [boxed_up(a) for a in actions] for d, actions in lists.lists.items()}
    code = encode(boxed)
    assert list(decode(code, range(len(code)))) == [a for one in boxed.values() for a in one]
    assert list(lists.lists) == again.devices.tolist()
    with pytest.raises(KeyError):
        lists.lists[99]
