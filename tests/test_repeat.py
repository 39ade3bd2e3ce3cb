"""`repeat`: how many samples a measurement takes."""

import pytest

from planner.support import repeat as module
from planner.support.repeat import repeat


@pytest.fixture
def clock(monkeypatch):
    """A clock that is a second later each time that somebody looks."""
    ticks = iter(range(1000))
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(ticks)))


def taken(**how):
    """The numbers of the samples that were kept."""
    return repeat(iter(range(1000)).__next__, **how)


def test_without_a_budget_the_least_number_is_taken():
    assert taken(least=3) == [0, 1, 2]
    assert taken(least=3, precise=lambda samples: pytest.fail()) == [0, 1, 2]


def test_warm_ups_are_thrown_away():
    assert taken(least=2, warm_ups=3) == [3, 4]


def test_samples_end_when_the_budget_is_spent(clock):
    # The first look at the clock is the beginning; after the second sample it is asked each time.
    assert taken(least=2, budget_s=4.0) == [0, 1, 2, 3, 4]


def test_precise_samples_end_before_the_budget_is_spent(clock):
    assert taken(least=2, budget_s=100.0, precise=lambda samples: len(samples) > 3) == [0, 1, 2, 3]


def test_the_most_are_taken_at_the_most_and_the_least_at_the_least(clock):
    assert taken(least=2, most=4, budget_s=100.0) == [0, 1, 2, 3]
    assert taken(least=2, most=4, budget_s=0.0) == [0, 1]
