"""A line of processes, with a collective in the place of gloo's."""

import time
from contextlib import nullcontext
from threading import Event, Thread

import pytest
import torch

from planner.launcher.mesh import lines
from planner.launcher.mesh.lines import ProcessGroupAxis


class Holding:
    """A collective whose thread holds its tensors after its end, as gloo's threads do.

    Args:
        seconds: for how long.
    """

    def __init__(self, seconds):
        self.let_go, self._seconds = Event(), seconds

    def __call__(self, *tensors, **how):
        Thread(target=self._hold, args=(list(tensors),)).start()

    def _hold(self, tensors):
        time.sleep(self._seconds)
        tensors.clear()
        self.let_go.set()


CALLS = {
    "all_reduce": lambda line, one: line.all_reduce(one),
    "all_gather": lambda line, one: line.all_gather(one),
    "reduce_scatter": lambda line, one: line.reduce_scatter(torch.stack([one, one])),
    "all_to_all": lambda line, one: line.all_to_all(torch.stack([one, one])),
}


@pytest.fixture
def held(monkeypatch):
    def hold(seconds):
        collective = Holding(seconds)
        for name in ("all_reduce", "all_to_all_single"):
            monkeypatch.setattr(lines.dist, name, collective)
        for name in ("_GATHER", "_SCATTER"):
            monkeypatch.setattr(lines, name, collective)
        return collective, ProcessGroupAxis(None, (0, 1), 0, nullcontext)

    return hold


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_is_over_when_nobody_holds_its_tensors(held, monkeypatch, name):
    monkeypatch.setattr(lines, "LONGEST_HOLD_S", 60.0)
    collective, line = held(0.05)
    CALLS[name](line, torch.ones(2**15))
    assert collective.let_go.wait(0.02)  # after `clear`, within what a thread needs to say so


def test_a_thread_that_does_not_let_go_is_not_waited_for_long(held):
    collective, line = held(0.5)
    line.all_reduce(torch.ones(2**15))
    assert not collective.let_go.is_set()


def test_small_tensors_are_not_waited_for(held, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_HOLD_S", 60.0)
    collective, line = held(0.5)
    line.all_reduce(torch.ones(4))
    assert not collective.let_go.is_set()
