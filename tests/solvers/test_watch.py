"""Ctrl-C during searches that run inside each other."""

import logging
import signal

import pytest

from planner.solvers.engines.watch import SearchWatch, interruptible


def watch():
    return SearchWatch(logging.getLogger(__name__), 1.0)


def test_ctrl_c_ends_a_search_and_those_that_it_is_a_part_of():
    outer, inner, stopped = watch(), watch(), []
    before = signal.getsignal(signal.SIGINT)
    with interruptible(outer):
        with interruptible(inner):
            outer._stops.append(lambda: stopped.append("outer"))
            signal.raise_signal(signal.SIGINT)
        assert inner.interrupted and outer.interrupted and stopped == ["outer"]
        # The second one has its usual effect, also when the inner search has ended.
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_search_behind_one_that_was_not_interrupted_hears_ctrl_c():
    outer, first, second = watch(), watch(), watch()
    with interruptible(outer):
        with interruptible(first):
            pass
        with interruptible(second):
            signal.raise_signal(signal.SIGINT)
    assert [one.interrupted for one in (outer, first, second)] == [True, False, True]
