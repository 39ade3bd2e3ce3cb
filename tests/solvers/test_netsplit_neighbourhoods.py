"""Neighbourhoods of a schedule with shared links: what they find is feasible, and better."""

import logging
import math
import threading
from collections import defaultdict

import pytest
from hypothesis import strategies as st

from planner.solvers.engines.watch import SearchWatch
from planner.solvers.netsplit import neighbourhoods as netsplit_neighbourhoods
from planner.solvers.netsplit.cpsat_call import SearchBudget
from planner.solvers.netsplit.jobs import (
    OPERATOR,
    jobs_of,
    known_placement_of,
    retimed,
    schedule_of,
)
from planner.solvers.netsplit.model import (
    canonical,
    instance_of,
    overflow,
    transfer_ticks,
)
from planner.solvers.netsplit.neighbourhoods import NeighbourSettings, mended
from planner.solvers.netsplit.spans import joined, spanned
from planner.solvers.placement import heft
from planner.solvers.placement.problem import placement_problem_of
from tests.solvers.test_netsplit import (
    alone,
    brute_force,
    partly_trained,
    placement_problems,
    placements,
)
from tests.solvers.test_netsplit_search import watch_of
from tests.support.linked_problems import linked_problems
from tests.support.netsplit_instances import problem_from
from tests.support.often import often

AMPLE = 1e6


class Seen(SearchWatch):
    """Goes on whatever it sees."""

    def __init__(self):
        super().__init__(logging.getLogger(__name__), 1.0)
        self.values = []

    def see(self, incumbent=math.inf, bound=0.0):
        self.values.append(incumbent)


def settings_for(instance, limit=AMPLE, watch=None):
    """Neighbourhoods with the bounds of spans."""
    budget = SearchBudget.begun(watch_of(instance), 1.0, 0)
    spans = spanned(instance, budget, 1.0)
    bounds = joined(instance, range(instance.problem.num_operators), spans)
    sets = [span.operators for span in spans]
    return NeighbourSettings(limit, 0.0, 0, watch or Seen(), bounds, sets)


def assert_feasible(instance, device_of, schedule):
    """(2) to (8) of a schedule, from the problem alone."""
    assert overflow(instance, device_of) <= 0
    for backward in (False, True):
        assert_phase(instance, device_of, schedule, backward)


def assert_phase(instance, device_of, schedule, backward):
    problem, busy = instance.problem, defaultdict(list)
    *start, length = schedule.phase(backward)
    ticks = instance.backward if backward else instance.forward
    end = [s + int(ticks[i, device_of[i]]) for i, s in enumerate(start)]
    assert min(start) >= 0
    assert max(end) <= length
    for i, p in enumerate(device_of):
        busy[p].append((start[i], end[i]))
    for t, tensor in enumerate(problem.tensors):
        if backward and not tensor.gradient:
            continue
        home = device_of[tensor.producer]
        for q in {device_of[j] for j in tensor.consumers}:
            before, after = [tensor.producer], [j for j in tensor.consumers if device_of[j] == q]
            if backward:
                before, after = after, before
            arrived = max(end[i] for i in before)
            if q != home:
                pair = (q, home) if backward else (home, q)
                begin = (schedule.returned if backward else schedule.sent)[t, q]
                assert begin >= arrived
                arrived = begin + transfer_ticks(instance, tensor.bytes, *pair)
                busy[pair].append((begin, arrived))
                for k, link in enumerate(problem.shared):
                    own = round(tensor.bytes * link.seconds_per_byte / instance.tick_s)
                    if pair in link.pairs:
                        left = arrived if link.exclusive else begin + own
                        busy["link", k].append((begin, left))
            assert arrived <= min(start[j] for j in after)
    for times in busy.values():
        for (_, left), (begin, _) in zip(sorted(times), sorted(times)[1:], strict=False):
            assert left <= begin


@often(15, 40, linked_problems(max_nodes=4) | partly_trained(4) | placement_problems(4), st.data())
def test_a_neighbourhood_of_everything_has_the_best_schedule(problem, data):
    instance = alone(problem)
    fitting = list(placements(instance))
    if not fitting:
        return
    known = known_placement_of(instance, data.draw(st.sampled_from(fitting)))
    best, _ = mended(instance, known, settings_for(instance))
    assert best.latest == best.schedule.latency == brute_force(instance)
    assert canonical(instance, best.device_of) == best.device_of
    assert_feasible(instance, best.device_of, best.schedule)


@often(8, 30, linked_problems(max_nodes=8), st.data())
def test_small_neighbourhoods_keep_a_schedule_feasible(problem, data):
    """Most jobs are early or late then."""
    size = problem.num_operators
    where = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    sets = {g: tuple(i for i, h in enumerate(where) if h == g) for g in where}
    groups = data.draw(st.sampled_from([sorted(sets.values()), [(i,) for i in range(size)]]))
    instance = instance_of(problem, groups)
    known = known_placement_of(instance, [i % problem.num_devices for i in range(size)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(netsplit_neighbourhoods, "SIZES", ((2, 0.03), (3, 0.03)))
        patch.setattr(netsplit_neighbourhoods, "MARGIN", 0.0)
        best, _ = mended(instance, known, settings_for(instance))
    assert best.latest <= known.latest
    assert best.latest == best.schedule.latency
    assert_feasible(instance, best.device_of, best.schedule)


@pytest.mark.parametrize("devices", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_neighbourhoods_improve_a_list_schedule_and_repeat_themselves(devices):
    problem = placement_problem_of(problem_from(0, devices, num_operators=40))
    instance = alone(problem)
    known, watch = known_placement_of(instance, heft.place(problem)), Seen()
    few = settings_for(instance, 0.15, watch)
    best, worked = mended(instance, known, few)
    assert best.latest < 0.99 * known.latest
    assert watch.values == sorted(watch.values, reverse=True)
    assert watch.values[-1] == best.latest
    assert worked >= 0.15
    # Memory is tight here, and HEFT heeds none.
    assert overflow(instance, best.device_of) <= max(0, overflow(instance, known.device_of))
    assert mended(instance, known, few) == (best, worked)


def test_a_search_ends_within_a_neighbourhood(monkeypatch):
    instance = alone(placement_problem_of(problem_from(1, 3, num_operators=20)))
    known, watch = known_placement_of(instance, heft.place(instance.problem)), Seen()
    stopped, endless = threading.Event(), netsplit_neighbourhoods.worker

    def waiting(seed, work):
        solver = endless(seed, work)

        def solve(model):
            watch.interrupted = True
            assert stopped.wait(60), "nobody stops the engine"
            return solver.__class__.solve(solver, model)

        monkeypatch.setattr(solver, "stop_search", stopped.set)
        monkeypatch.setattr(solver, "solve", solve)
        return solver

    monkeypatch.setattr(netsplit_neighbourhoods, "worker", waiting)
    mended(instance, known, settings_for(instance, AMPLE, watch))
    assert stopped.is_set()


def test_without_work_a_schedule_stays():
    problem = placement_problem_of(problem_from(0, 4, num_operators=16))
    known = known_placement_of(alone(problem), heft.place(problem))
    instance = alone(problem)
    assert mended(instance, known, settings_for(instance, 0.0)) == (known, 0.0)


@often(30, 100, linked_problems(max_nodes=7), st.data())
def test_a_schedule_timed_anew_is_no_longer_and_its_tails_are_the_rest(problem, data):
    instance = alone(problem)
    devices, size = st.integers(0, problem.num_devices - 1), problem.num_operators
    known = known_placement_of(instance, data.draw(st.lists(devices, min_size=size, max_size=size)))
    jobs = [
        jobs_of(instance, known.device_of, known.schedule, backward=backward)
        for backward in (False, True)
    ]
    assert retimed(instance, known.device_of, [one.start for one in jobs]) == known
    # As late as possible is a schedule, too, and as long.
    latest = [{job: one.end - one.tail[job] for job in one.start} for one in jobs]
    for one, start in zip(jobs, latest, strict=True):
        assert all(start[job] >= begin for job, begin in one.start.items())
        assert max(one.tail[OPERATOR, i] for i in range(size)) == one.end
    assert retimed(instance, known.device_of, latest).latest == known.latest
    assert schedule_of(instance, known.device_of) == known.schedule
