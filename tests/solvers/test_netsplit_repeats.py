"""NetSplit's limits are of work: as long as the brake cuts nothing, no clock has a say."""

import time

import pytest

from planner.solvers import SOLVERS
from planner.solvers.netsplit import cpsat, cpsat_call, fine, search, windows
from planner.solvers.placement.problem import placement_problem_of
from planner.support import brake
from tests.solvers.test_netsplit import alone
from tests.solvers.test_netsplit_search import never, watch_of
from tests.support.netsplit_instances import problem_from

RATES = (
    (cpsat, "TIMED_PER_S"), (fine, "TIMED_PER_S"), (windows, "WINDOWS_PER_S"),
    (cpsat_call, "DETERMINISTIC_PER_S"),
    *((cpsat, name) for name in ("DETERMINISTIC_PER_S", "CROWDED_PER_S", "FEW_PER_S")),
)  # fmt: skip


def with_clock(monkeypatch, rate):
    """Lets the searches see a processor time that runs at another rate, from an instant on."""
    begin = time.process_time()
    monkeypatch.setattr(brake, "processor_s", lambda: rate * (time.process_time() - begin))


@pytest.mark.parametrize("num_operators", [30, 130])
def test_the_same_bytes_by_a_slow_and_a_fast_clock(monkeypatch, num_operators):
    """With a hundredth of the work that a second is worth, no machine is so slow that the brake
    comes first.
    """
    problem = problem_from(3, 3, num_operators=num_operators)
    for module, name in RATES:
        monkeypatch.setattr(module, name, type(getattr(module, name))(getattr(module, name) / 100))
    answers = []
    for rate in (1.0, 0.01):
        with_clock(monkeypatch, rate)
        answers.append(SOLVERS["netsplit"](problem, 8.0))
    assert answers[0] == answers[1]
    assert answers[0].reproducible
    assert "single operators" in answers[0].space


def test_work_is_counted_in_operators_not_in_moves():
    """The local search ends soon after its limit, however large a move is."""
    instance = alone(placement_problem_of(problem_from(0, 4)))
    start = cpsat.known_placement_of(instance, (0,) * 25 + (1,) * 25 + (2,) * 25 + (3,) * 25)
    counted, anneal = [], search.anneal

    def watched(model, state, *given):
        begun = int(state.timed[0])
        anneal(model, state, *given)
        counted.append(int(state.timed[0]) - begun)

    search.anneal = watched
    try:
        search.improved(instance, start, 2_000_000, watch_of(instance), never, 0)
    finally:
        search.anneal = anneal
    assert 2_000_000 <= sum(counted) < 2_000_000 * 1.2


def test_a_brake_cuts_and_is_reported(monkeypatch):
    problem = problem_from(3, 3, num_operators=30)
    with_clock(monkeypatch, 1e6)
    assert not SOLVERS["netsplit"](problem, 60.0).reproducible
