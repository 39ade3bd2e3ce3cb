"""Limits of work: the answer depends neither on clocks nor on processes, and the brake says so
where it has cut something.
"""

import csv
import math
import os
import signal
import time
from dataclasses import replace

import pytest

from planner.artefacts.problem import Status
from planner.planning import beside as processes
from planner.planning import portfolio as judging
from planner.planning.portfolio import comparison
from planner.planning.sizes import best_over_sizes
from planner.reports.plans import compare_csv, comparison_table, row_json
from planner.solvers import SOLVERS
from planner.solvers.engines.watch import SearchWatch, interruptible
from planner.solvers.netsplit.solve import log
from planner.support import brake
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.netsplit_instances import problem_from

# Two branches of unequal operators, which neither replicas nor any pipeline share evenly.
BRANCHES = [[], [0], [0], [1], [2], [3], [4], [5, 6]]


def branchy(size=1, num_microbatches=6):
    graph = graph_of(BRANCHES, [4000 * size] * 8, [10**6] * 8)
    times = [1e-3, 3e-3, 2e-3, 1e-3, 5e-3, 2e-3, 1e-3, 4e-3]
    profile = profile_of(graph, [size * one for one in times])
    topology = cluster([unit_type(bandwidth=1e11)] * 3, bandwidth=1e8, latency=1e-5)
    return problem_of(replace(profile, microbatch_size=size), topology, num_microbatches)


def untimed(found):
    rows = tuple(replace(row, answer=replace(row.answer, solve_s=None)) for row in found.rows)
    return replace(found, rows=rows)


@pytest.fixture
def with_cores(monkeypatch):
    """Asks all questions of a round at once, on so many cores; counts the child processes."""
    made = []

    class Child(processes._Child):
        def __init__(self, task):
            made.append(self)
            super().__init__(task)

    def set_cores(count):
        monkeypatch.setattr(processes, "cores", lambda: count)
        monkeypatch.setattr(processes, "_Child", Child)
        monkeypatch.setattr(judging, "FEW_OPERATORS", 0)
        monkeypatch.setattr(judging, "LEAST_BESIDE_S", 0.0)
        made.clear()
        return made

    return set_cores


def test_one_and_two_processes_find_the_same(with_cores):
    problems = [branchy(1, 12), branchy(2, 6)]
    answers, children = [], []
    for count in (1, 2):
        made = with_cores(count)
        plans = best_over_sizes(problems, [one.profile for one in problems], None, 3.0)
        found, _ = plans.comparison, plans.problems
        answers.append(untimed(found))
        children.append(len(made))
    assert answers[0] == answers[1]
    assert answers[0].best.plan.reproducible
    assert children[0] == 0 < children[1]


def test_a_clock_that_jumps_changes_nothing(monkeypatch):
    problem = branchy()
    calm = judging.compare(problem, time_limit_s=2.0)
    now_s = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now_s)))
    hurried = judging.compare(problem, time_limit_s=2.0)
    assert untimed(hurried) == untimed(calm)
    assert any(row.solver == "netsplit" and row.plan for row in calm.rows)


def test_the_brake_cuts_a_search_and_is_reported(monkeypatch):
    problem = problem_from(3, 3, num_operators=30)
    whole = judging.compare(problem, time_limit_s=2.0)
    used_s = iter(range(0, 10**9, 7))
    monkeypatch.setattr(brake, "processor_s", lambda: float(next(used_s)))
    cut = judging.compare(problem, time_limit_s=2.0)
    assert whole.notes == ()
    (note,) = cut.notes
    assert note.startswith("the brake cut the search")
    assert whole.best.plan.reproducible
    assert cut.best is not None
    assert not cut.best.plan.reproducible


def test_the_brake_is_ten_times_the_limit_of_processor_time(monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(brake, "processor_s", lambda: now_s[0])
    with brake.braked(3.0) as own:
        now_s[0] += 29.9
        assert not own.over()
        now_s[0] += 0.2
        assert own.over()
        now_s[0] = 0.0
        assert own.over()
        assert own.cut


def test_a_limit_that_is_used_up_is_said_and_the_plan_repeats():
    problem = problem_from(3, 3, num_operators=30)
    with brake.braked(1.0) as own:
        search = judging.Search(1.0, lambda name: None, own)
        search.ask([problem], None)
        first_s = 1.0 - search.left_s
    found = judging.compare(problem, time_limit_s=0.9999 * first_s)
    assert found.notes == (
        "the time limit left no work to improve some plans of antichain, netsplit; --time-limit"
        " gives more",
    )
    assert found.best.plan.reproducible
    assert untimed(found) == untimed(judging.compare(problem, time_limit_s=0.9999 * first_s))


def test_a_solver_that_was_not_asked_has_no_time():
    problem = problem_of(profile_of(graph_of([[]]), [1.0]), cluster([unit_type()]))
    found = judging.compare(problem)
    asked, *others = found.rows
    assert asked.solve_s > 0
    assert others
    assert all(row.solve_s is None for row in others)
    assert row_json(others[0], found, 1)["solve_s"] is None
    table = comparison_table(found)
    took = table.heads.index("took")
    assert [bool(cells[took]) for cells in table.rows] == [True] + [False] * len(others)
    cells = [row["solve_s"] for row in csv.DictReader(compare_csv(found).splitlines())]
    assert cells == [str(asked.solve_s)] + [""] * len(others)


def test_a_task_whose_process_fails_is_run_again(with_cores):
    with_cores(2)
    here = os.getpid()

    def only_here():
        if os.getpid() != here:
            os._exit(3)
        return "second"

    assert processes.beside([lambda: "first", only_here], True) == ["first", "second"]

    def wrong():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        processes.beside([lambda: "first", wrong], True)


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_ctrl_c_in_a_search_ends_the_other_process(with_cores):
    made = with_cores(2)

    def searched():
        with interruptible(SearchWatch(log, 1.0)) as watch:
            os.kill(os.getpid(), signal.SIGINT)
            return watch.interrupted

    assert processes.beside([searched, lambda: time.sleep(600)], True) == [True, None]
    assert gone(made[0]._process)


def test_ctrl_c_while_the_other_process_is_awaited_ends_it(with_cores):
    made = with_cores(2)
    here = os.getpid()

    def interrupts():
        time.sleep(0.2)
        os.kill(here, signal.SIGINT)
        time.sleep(600)

    assert processes.beside([lambda: "first", interrupts], True) == ["first", None]
    assert gone(made[0]._process)


def test_an_error_ends_the_other_process(with_cores):
    made = with_cores(2)

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.beside([interrupted, lambda: time.sleep(600)], True)
    assert gone(made[0]._process)


def test_the_solvers_that_improve_have_an_answer_without_work():
    problem = problem_from(3, 3, num_operators=30)
    for name, solver in SOLVERS.items():
        if solver.improves and not solver.needs_rules:
            first, best = solver(problem, 0.0), solver(problem, 1.0)
            assert first.status in (Status.FEASIBLE, Status.OPTIMAL)
            assert first.work_s < best.work_s, name


def test_the_work_of_a_solver_is_counted_alike_each_time():
    problem = branchy()
    for name in judging.portfolio(rules=False):
        one, other = SOLVERS[name](problem, 1.0), SOLVERS[name](problem, 1.0)
        assert one == other
        assert math.isfinite(one.work_s)


def test_attempts_that_the_brake_ended_are_not_reproducible():
    problem = branchy()
    made = judging.ask_solvers(problem, ["even"], 1.0, lambda name: None)
    assert comparison([made]).best.plan.reproducible
    found = comparison([replace(made, cut=True)])
    assert not found.best.plan.reproducible
    assert found.notes[0].startswith("the brake cut the search: it took 10 times its limit")
