"""The memo of values that follow from artefacts."""

import gc
from dataclasses import dataclass, field

import pytest

from planner.support.memo import MAX_KEPT, remembered


@dataclass(frozen=True)
class Numbers:
    values: list[int] = field(default_factory=list)  # without a hash


@pytest.fixture
def calls():
    return []


def test_artefacts_are_known_by_identity_and_plain_values_by_equality(calls):
    @remembered
    def chosen(numbers, others, names=()):
        calls.append(names)
        return [*numbers.values, *others.values]

    one, same = Numbers([1]), Numbers([1])
    first = chosen(one, same, ("a", "b"))
    assert chosen(one, same, tuple("ab")) is first
    assert chosen(one, same, ("a",)) is not first
    assert chosen(one, one, ("a", "b")) is not first
    assert chosen(same, same, ("a", "b")) is not first
    assert len(calls) == 4


def test_arguments_may_be_named(calls):
    @remembered
    def times(numbers, *, factor=1):
        calls.append(factor)
        return [factor * n for n in numbers.values]

    one = Numbers([1])
    assert times(one, factor=2) == times(one, factor=2) == [2]
    assert times(one) == [1]
    assert calls == [2, 1]


@pytest.mark.parametrize("kept", [MAX_KEPT, 2])
def test_the_oldest_value_is_given_up_first(calls, kept):
    def size(numbers):
        calls.append(numbers)
        return len(numbers.values)

    of = remembered(size) if kept == MAX_KEPT else remembered(kept=kept)(size)
    many = [Numbers([i]) for i in range(kept + 1)]
    for one in many:
        of(one)
    calls.clear()
    of(many[-1])
    of(many[1])
    assert calls == []
    of(many[0])
    assert len(calls) == 1


def test_an_artefact_that_is_gone_is_not_taken_for_another_one():
    @remembered(kept=3)
    def first(numbers, digit):
        return numbers.values[0] * digit

    for i in range(200):
        assert first(Numbers([i]), 3) == 3 * i
        gc.collect(0)


def test_a_mistake_is_not_remembered():
    @remembered
    def first(numbers):
        return numbers.values[0]

    numbers = Numbers()
    with pytest.raises(IndexError):
        first(numbers)
    numbers.values.append(7)
    assert first(numbers) == 7
