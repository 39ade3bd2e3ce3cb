"""Counts of work: the same on every machine, however busy it is."""

import signal
import sys
from contextlib import contextmanager

import pytest


@contextmanager
def few_calls(most):
    """Fails where a block calls more than `most` Python functions."""
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call"
        if count > most:
            sys.setprofile(None)
            pytest.fail(f"more than {most} calls")

    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def safety_net(limit_s=60):
    """Ends a block that takes for ever; one that is right takes next to nothing."""

    def late(number, frame):
        pytest.fail(f"not at an end after {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
