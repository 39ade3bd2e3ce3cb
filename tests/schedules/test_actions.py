import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    text,
)
from planner.schedules.program import program
from tests.support.programs import split_graphs

names = st.text(min_size=1)
numbers = st.integers(0, 999)
transfers = [st.sampled_from(Direction), numbers, numbers, names, numbers]


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


@pytest.mark.parametrize("word", ["", "F0", "0X0", "0>1", "0>1:2:", "A", "O2", "0F0x"])
def test_other_words_are_no_actions(word):
    with pytest.raises(ValueError, match="is no action"):
        parse(word)


@given(split_graphs(max_warmup=4))
def test_lists_and_their_arrays_say_the_same(case):
    graph, strategy = case
    lists = program(strategy, graph)
    again = encode(dict(lists.lists))
    assert decode(again, range(len(again))) == decode(lists.code, range(len(lists.code)))
    assert list(lists.lists) == again.devices.tolist()
    with pytest.raises(KeyError):
        lists.lists[99]
