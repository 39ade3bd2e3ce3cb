"""The limit of processor time of searches under foreign cost models."""

import time

from planner.solvers.clock import ENDLESS_S, clock
from planner.support.brake import COMPILING


def test_what_is_left_falls_with_processor_time_but_not_while_compiling(monkeypatch):
    spent_s = [100.0]
    monkeypatch.setattr(time, "process_time", lambda: spent_s[0])
    monkeypatch.setattr(COMPILING, "total_s", 7.0)
    with clock(5.0) as left_s:
        assert left_s() == 5.0
        spent_s[0] += 2.0
        assert left_s() == 3.0
        COMPILING.total_s += 1.5
        spent_s[0] += 1.5
        assert left_s() == 3.0
        spent_s[0] += 4.0
        assert left_s() == -1.0


def test_no_limit_leaves_a_number(monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    with clock(float("inf")) as left_s:
        assert left_s() == ENDLESS_S
