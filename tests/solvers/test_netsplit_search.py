"""Around the constraint model: bounds before the search, local search, limits, interruption."""

import logging
import os
import signal
import threading
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.options import Objective
from planner.artefacts.problem import Result, Status
from planner.artefacts.strategy import Stage
from planner.simulator.objective import objective_s
from planner.solvers.engines.engine import Engine
from planner.solvers.engines.mip import NO_LICENCE
from planner.solvers.engines.watch import INTERRUPTED, SearchWatch, interruptible
from planner.solvers.netsplit import cpsat as netsplit_cpsat
from planner.solvers.netsplit import cpsat_call as netsplit_cpsat_call
from planner.solvers.netsplit import gurobi as netsplit_gurobi
from planner.solvers.netsplit import solve as netsplit
from planner.solvers.netsplit.bounds import phase_bounds_of
from planner.solvers.netsplit.jobs import known_placement_of
from planner.solvers.netsplit.kernels import state_of
from planner.solvers.netsplit.model import EngineAnswer, instance_of, overflow
from planner.solvers.netsplit.options import NetSplit
from planner.solvers.netsplit.search import arrays_of, improved, timed
from planner.solvers.placement.problem import least_bytes, placement_problem_of
from tests.solvers.test_netsplit import (
    alone,
    brute_force,
    jobs_of,
    partly_trained,
    placement_problem_from,
    placement_problems,
    placements,
)
from tests.support.builders import KB, changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.netsplit_instances import problem_from
from tests.support.often import often

LOG = logging.getLogger("test")


def never():
    return False


def watch_of(instance, gap=0.0):
    return SearchWatch(LOG, instance.tick_s, gap)


# ---------------------------------------------------------------------------- bounds before search


@settings(max_examples=40)
@given(partly_trained(4))
def test_no_schedule_is_shorter_than_the_bound_before_the_search(problem):
    instance = alone(problem)
    least = sum(phase_bounds_of(instance, backward=backward).least for backward in (False, True))
    assert least <= brute_force(instance)


@st.composite
def grouped_schedules(draw):
    """A model with groups; by phase the starts, ends and length of a list schedule."""
    problem = draw(partly_trained(6))
    size = problem.num_operators
    index = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    sets = {g: tuple(i for i, h in enumerate(index) if h == g) for g in index}
    instance = instance_of(problem, sorted(sets.values()))
    devices = st.integers(0, problem.num_devices - 1)
    where = [draw(devices) for _ in instance.groups]
    known = known_placement_of(instance, [where[g] for g in instance.group_of])
    phases = []
    for backward in (False, True):
        *starts, length = known.schedule.phase(backward)
        ticks = instance.backward if backward else instance.forward
        ends = [s + int(ticks[i, known.device_of[i]]) for i, s in enumerate(starts)]
        phases.append((starts, ends, length))
    return instance, phases


@settings(max_examples=60)
@given(grouped_schedules())
def test_heads_and_tails_hold_in_list_schedules_of_groups(drawn):
    instance, phases = drawn
    for backward, (starts, ends, length) in enumerate(phases):
        bounds = phase_bounds_of(instance, backward=bool(backward))
        assert bounds.least <= length
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            assert bounds.head[i] <= start
            assert end + bounds.tail[i] <= length


# Two devices, four operators of 1 s between a first and a last one of 1 s:
#         / 1, 2, 3, 4 \
#       0                5         1 s, then 2 s on both, then 1 s; backwards twice as long.
def test_operators_that_all_paths_run_through_leave_the_other_device_idle():
    problem = placement_problem_from(
        [[], [0], [0], [0], [0], [1, 2, 3, 4]], [1] * 6, [1] * 6, count=2
    )
    instance = alone(problem)
    bounds = phase_bounds_of(instance, backward=False)
    assert bounds.least * instance.tick_s == pytest.approx(4, rel=1e-3)
    assert bounds.head[5] * instance.tick_s == pytest.approx(3, rel=1e-3)
    assert bounds.crowded is False
    back = phase_bounds_of(instance, backward=True)
    assert back.least * instance.tick_s == pytest.approx(8, rel=1e-3)


#   0, 1, 2 of 1 s -> 3; a message takes 5 s: two wait for each other on the device of 3, or a
#   message is waited for: 3 starts after 3 s at least.
def test_what_feeds_an_operator_runs_beside_it_or_sends():
    problem = placement_problem_from([[], [], [], [0, 1, 2]], [1] * 4, [5 * KB] * 4, count=4)
    bounds = phase_bounds_of(alone(problem), backward=False)
    assert bounds.head[3] * alone(problem).tick_s == pytest.approx(3, rel=1e-3)


def test_one_device_is_a_bound_by_itself():
    problem = placement_problem_from([[], [], [0, 1]], [1, 2, 3], count=1)
    instance = alone(problem)
    assert phase_bounds_of(instance, backward=False).least == instance.forward.sum()


# ------------------------------------------------------------------------------------ local search


def violations(instance, known):
    """The constraints of the full model that a schedule breaks."""
    schedule, device_of, num = known.schedule, known.device_of, instance.problem.num_operators
    jobs = jobs_of(instance, device_of)
    tensors = instance.problem.tensors
    names = []
    for t, tensor in enumerate(tensors):
        for q in dict.fromkeys(device_of[j] for j in tensor.consumers):
            if q != device_of[tensor.producer]:
                names.append(schedule.sent[t, q])
                names += [schedule.returned[t, q]] if tensor.gradient else []
    turn = schedule.forward_end
    starts = [*schedule.forward_start, *(turn + s for s in schedule.backward_start)]
    backward = [False] * num + [True] * num
    order = 0
    for tensor in tensors:
        for q in dict.fromkeys(device_of[j] for j in tensor.consumers):
            if q != device_of[tensor.producer]:
                for back in (False, True) if tensor.gradient else (False,):
                    starts.append(names[order] + (turn if back else 0))
                    backward.append(back)
                    order += 1
    ends = [start + job[0] for start, job in zip(starts, jobs, strict=True)]
    broken = [(k, b) for k, job in enumerate(jobs) for b in job[2] if starts[k] < ends[b]]
    for k, (_, one, _) in enumerate(jobs):
        for m, (_, other, _) in enumerate(jobs[:k]):
            for place in one.keys() & other.keys():
                apart = starts[k] >= starts[m] + other[place] or starts[m] >= starts[k] + one[place]
                if one[place] and other[place] and not apart:
                    broken.append((k, m))
    if max(ends) != schedule.latency:
        broken.append("latency")
    return broken


@settings(max_examples=40)
@given(placement_problems(max_nodes=6), st.data())
def test_the_local_search_gives_feasible_schedules_no_worse_than_its_start(problem, data):
    instance = alone(problem)
    fitting = list(placements(instance))
    if not fitting:
        return
    known = known_placement_of(instance, data.draw(st.sampled_from(fitting)))
    better = improved(instance, known, 20_000, watch_of(instance), never, 1)
    assert better.latest <= known.latest
    assert overflow(instance, better.device_of) <= 0
    assert violations(instance, better) == []


def least_coded(instance, fitting):
    """The least latency in ticks over all placements that fit and all orders of each phase."""
    edges = [(t.producer, j) for t in instance.problem.tensors for j in t.consumers]
    orders = [
        order
        for order in permutations(range(instance.problem.num_operators))
        if all(order.index(i) < order.index(j) for i, j in edges)
    ]
    model = arrays_of(instance)
    lengths = (
        np.array([state_of(model, one, (order, order[::-1])).ends for order in orders])
        for one in fitting
    )
    return min(int(both.min(axis=0).sum()) for both in lengths)


@often(5, 15, placement_problems(max_nodes=4))
def test_the_local_search_finds_the_optimum_of_small_problems(problem):
    instance = alone(problem)
    fitting = list(placements(instance))
    if not fitting:
        return
    better = improved(
        instance, known_placement_of(instance, fitting[0]), 160_000, watch_of(instance), never, 1
    )
    assert brute_force(instance) <= better.latest <= least_coded(instance, fitting)


def test_the_local_search_repeats_itself_and_the_seed_changes_it():
    instance = alone(placement_problem_of(problem_from(0, 4)))
    start = known_placement_of(instance, (0,) * 50 + (1,) * 30 + (2,) * 10 + (3,) * 10)
    one, again, other = (
        improved(instance, start, 500_000, watch_of(instance), never, seed) for seed in (1, 1, 2)
    )
    assert (one.device_of, one.latest) == (again.device_of, again.latest)
    assert (one.device_of, one.latest) != (other.device_of, other.latest)


def test_the_local_search_keeps_groups_together():
    problem = placement_problem_of(problem_from(0, 4, num_operators=30))
    groups = [tuple(range(g, 30, 10)) for g in range(10)]
    instance = instance_of(problem, groups)
    loose = replace(instance, problem=replace(problem, capacity_bytes=np.full(4, 10**13)))
    better = improved(
        loose, known_placement_of(loose, (0,) * 30), 400_000, watch_of(loose), never, 0
    )
    assert len(set(better.device_of)) > 1
    assert all(len({better.device_of[i] for i in group}) == 1 for group in groups)


def test_a_schedule_is_timed_anew_in_the_order_of_its_starts():
    instance = alone(placement_problem_of(problem_from(1, 4)))
    known = known_placement_of(instance, [i % 4 for i in range(100)])
    better = timed(
        instance, known.device_of, known.schedule.forward_start, known.schedule.backward_start
    )
    assert violations(instance, better) == []


# ----------------------------------------------------------------------------------------- climbs


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_a_climb_in_small_steps_finds_what_one_search_from_above_finds(seed, monkeypatch):
    instance = alone(placement_problem_of(problem_from(seed, 3, num_operators=16)))
    latencies_s = {}
    for rise in (1e-4, 10.0):
        monkeypatch.setattr(netsplit_cpsat, "RISE", rise)
        answer = netsplit_cpsat.solve(instance, 60.0, None)
        assert answer.status is Status.OPTIMAL
        assert answer.bound_s == pytest.approx(answer.latency_s - instance.lost_s)
        latencies_s[rise] = answer.latency_s
    assert latencies_s[1e-4] == latencies_s[10.0]


def test_a_start_that_is_not_found_at_once_is_looked_for_longer(monkeypatch):
    instance = alone(placement_problem_of(problem_from(1, 3, num_operators=16)))
    wanted = netsplit_cpsat.solve(instance, 60.0, None)
    monkeypatch.setattr(netsplit_cpsat, "NEAR_SHARES", (0.0, 0.3))
    monkeypatch.setattr(netsplit_cpsat_call, "MIN_CALL_S", 0.0)
    seen = []

    def near(instance, wish, run):
        seen.append(before(instance, wish, run))
        return seen[-1]

    before = netsplit_cpsat._near
    monkeypatch.setattr(netsplit_cpsat, "_near", near)
    answer = netsplit_cpsat.solve(instance, 60.0, None)
    assert isinstance(seen[0], tuple)
    assert (answer.status, answer.latency_s) == (Status.OPTIMAL, wanted.latency_s)


def test_what_a_climb_has_proved_when_it_is_cut_holds():
    instance = alone(placement_problem_of(problem_from(1, 3, num_operators=20)))
    best = netsplit_cpsat.solve(instance, 60.0, None)
    assert best.status is Status.OPTIMAL
    for limit_s in (0.2, 0.3, 0.4):
        cut = netsplit_cpsat.solve(instance, limit_s, None)
        assert 0 < cut.bound_s <= best.latency_s <= cut.latency_s


# ---------------------------------------------------------------------------------------- limits


def test_a_gap_that_is_asked_for_ends_the_search_and_is_no_optimum():
    instance = alone(placement_problem_of(problem_from(0, 2, num_operators=30)))
    answer = netsplit_cpsat.solve(instance, 30.0, None, gap=0.5)
    assert answer.status is Status.FEASIBLE
    assert answer.reproducible
    assert answer.latency_s <= 1.5 * answer.bound_s + 2 * instance.lost_s


def test_the_same_seed_gives_the_same_answer_and_progress_is_said(caplog):
    instance = alone(placement_problem_of(problem_from(2, 4, num_operators=20)))
    with caplog.at_level(logging.INFO, "planner.solvers.netsplit.cpsat"):
        answers = {
            netsplit_cpsat.solve(instance, 60.0, None, seed=seed, gap=0.04).device_of
            for seed in (7, 7)
        }
    assert len(answers) == 1
    lines = [r.getMessage() for r in caplog.records]
    assert lines
    for line in lines:
        assert line.startswith("incumbent ")
        assert ", bound " in line
        assert line.endswith(" %")


def test_gurobi_says_its_progress_too(caplog):
    instance = alone(placement_problem_from([[], [], [0], [1]], [1, 2, 3, 4], count=2))
    with caplog.at_level(logging.INFO, "planner.solvers.netsplit.gurobi"):
        answer = netsplit_gurobi.solve(instance, 30.0, (0, 0, 0, 0), seed=3)
    assert answer.status is Status.OPTIMAL
    assert any("incumbent" in r.getMessage() for r in caplog.records)


def test_a_watch_says_only_news(caplog):
    watch = SearchWatch(LOG, 1e-3)
    with caplog.at_level(logging.INFO, "test"):
        watch.see(bound=11.9)
        watch.see(incumbent=12.3)
        watch.see(incumbent=12.5, bound=11.0)
    assert [r.getMessage() for r in caplog.records] == [
        "incumbent 12.3 ms, bound 11.9 ms, gap 3.4 %"
    ]


# ------------------------------------------------------------------------------------ interruption


def interrupt(after_s):
    """Ctrl-C, some time from now."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_an_interrupted_search_gives_what_it_has():
    instance = alone(placement_problem_of(problem_from(0, 2)))
    netsplit_cpsat.solve(instance, 0.1, None)  # compiles
    before = signal.getsignal(signal.SIGINT)
    timer = interrupt(1.0)
    answer = netsplit_cpsat.solve(instance, 120.0, None)
    timer.join()
    assert (answer.status, answer.reproducible) == (Status.FEASIBLE, False)
    assert answer.note == INTERRUPTED
    assert overflow(instance, answer.device_of) <= 0
    assert signal.getsignal(signal.SIGINT) is before


def test_gurobi_is_interrupted_likewise(capfd):
    instance = alone(placement_problem_of(problem_from(0, 2, num_operators=14)))
    start = netsplit_cpsat.solve(instance, 1.0, None).device_of
    timer = interrupt(1.0)
    answer = netsplit_gurobi.solve(instance, 60.0, start)
    timer.join()
    assert capfd.readouterr().out == ""
    assert (answer.status, answer.note) == (Status.FEASIBLE, INTERRUPTED)


def test_the_second_interruption_is_for_good(request):
    # Processes that a shell starts in the background ignore the signal.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = SearchWatch(LOG, 1.0)
    with pytest.raises(KeyboardInterrupt), interruptible(watch):
        signal.raise_signal(signal.SIGINT)
        assert watch.interrupted
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_that_hears_nothing_yet_is_told_again():
    watch, told = SearchWatch(LOG, 1.0), threading.Event()
    watch.interrupted = True
    assert watch.run(lambda: told.wait(30.0), told.set) is True


def test_signals_are_left_alone_in_other_threads():
    before, inside = signal.getsignal(signal.SIGINT), []

    def work():
        with interruptible(SearchWatch(LOG, 1.0)):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


# ------------------------------------------------------------------------------- the whole solver


def small(**netsplit_options):
    problem = problem_of(
        profile_of(graph_of([[], [], [0], [1]]), [1.0, 2.0, 3.0, 4.0]),
        cluster([unit_type()] * 2, bandwidth=KB),
        num_microbatches=1,
        objective=Objective.LATENCY,
    )
    return changed(problem, switches=(NetSplit(**netsplit_options),))


def test_too_large_for_gurobis_licence_is_solved_by_the_other_engine_and_said(caplog):
    problem = problem_from(0, 2, num_operators=40)
    options = {"switches": (NetSplit(engine=Engine.GUROBI, gap=0.5),)}
    result = netsplit.solve(changed(problem, **options), 3.0)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned
    assert all("10010" in line and "\n" not in line for line in warned)
    assert "error 10010" in result.space
    assert result.strategy is not None


def test_no_licence_for_gurobi_is_said_likewise(monkeypatch, caplog):
    import gurobipy

    class Unlicensed:
        def __init__(self, empty):
            raise gurobipy.GurobiError(NO_LICENCE, "made up")

    monkeypatch.setattr(gurobipy, "Env", Unlicensed)
    result = netsplit.solve(small(engine=Engine.GUROBI), 5.0)
    assert any("no licence (error 10009)" in r.getMessage() for r in caplog.records)
    assert "error 10009" in result.space
    assert result.status is Status.OPTIMAL


def test_other_errors_of_gurobi_are_errors(monkeypatch):
    import gurobipy

    class Broken:
        def __init__(self, empty):
            raise gurobipy.GurobiError(10001, "out of memory")

    monkeypatch.setattr(gurobipy, "Env", Broken)
    with pytest.raises(gurobipy.GurobiError):
        netsplit.solve(small(engine=Engine.GUROBI), 5.0)


def test_the_seed_and_the_gap_reach_both_engines(monkeypatch):
    asked = []

    def solve(instance, limit_s, start, *, seed, gap, brake=None, prove=True):
        asked.append((seed, gap))
        return EngineAnswer(Status.OPTIMAL, (0, 1, 0, 1), 18.0, 18.0)

    monkeypatch.setattr(netsplit_cpsat, "solve", solve)
    monkeypatch.setattr(netsplit_gurobi, "solve", solve)
    for engine in Engine:
        problem = small(engine=engine, gap=0.01)
        netsplit.solve(changed(problem, seed=5), 1.0)
    assert set(asked) == {(5, 0.01)}


@pytest.mark.parametrize(("num_microbatches", "size"), [(1, 130), (4, 30)])
def test_no_time_goes_into_proofs_whose_bound_is_thrown_away(monkeypatch, num_microbatches, size):
    """Of more than 120 operators the bound is that of single operators, of several microbatches
    there is none.
    """

    def proof(*given, **options):
        raise AssertionError("a proof")

    for name in ("windowed", "spanned", "_climb"):
        monkeypatch.setattr(netsplit_cpsat, name, proof)
    problem = replace(problem_from(1, 3, size), num_microbatches=num_microbatches)
    problem = changed(problem, objective=Objective.ITERATION)
    monkeypatch.setattr(netsplit.pesto, "place", lambda *given: EngineAnswer(
        Status.UNKNOWN, None, np.inf, None
    ))  # fmt: skip
    result = netsplit.solve(problem, 2.0)
    assert result.strategy is not None
    assert (result.bound_s is None) == (num_microbatches > 1)


def test_an_iteration_of_one_microbatch_keeps_the_bound_of_its_latency():
    """The optimizer's step comes on top, so the latency's optimum proves no optimum."""
    latency = netsplit.solve(small(), 5.0)
    iteration = netsplit.solve(changed(small(), objective=Objective.ITERATION), 5.0)
    assert latency.status is Status.OPTIMAL
    assert (iteration.status, iteration.bound_s) == (Status.FEASIBLE, latency.bound_s)
    assert iteration.bound_s <= objective_s(small(), iteration.strategy)


def test_what_the_evaluator_finds_too_large_is_tried_again_with_less_memory(monkeypatch):
    """The model counts less than the evaluator, so that one device does not hold it after all."""
    problem = small()
    capacities, real = [], netsplit.evaluate

    def searched(problem, placement_problem, known, limit_s, brake):
        capacities.append(placement_problem.capacity_bytes.tolist())
        # Only with less memory than at first is the work shared.
        together = min(capacities[0]) == min(capacities[-1])
        sets = [(0, 1, 2, 3)] if together else [(0, 2), (1, 3)]
        names = [[f"op{i}" for i in inside] for inside in sets]
        stages = tuple(Stage.whole(tuple(inside), (d,), 1, False) for d, inside in enumerate(names))
        strategy = replace(netsplit_strategy(problem), stages=stages)
        return Result(Status.OPTIMAL, strategy, bound_s=1.0, space="made up")

    def netsplit_strategy(problem):
        return netsplit.strategies_of(problem, (0, 0, 0, 0))[0]

    monkeypatch.setattr(netsplit, "_searched", searched)
    whole = real(problem, netsplit_strategy(problem))
    peak = max(parts.total_bytes for parts in whole.memory.values())
    tight = changed(problem, device_memory=peak - 1)
    result = netsplit.solve(tight, 9.0)
    assert len(capacities) == 2
    # One byte is over, and devices are alike.
    kept = sum(least_bytes(placement_problem_of(tight)).values())
    assert capacities[1] == [kept - 1, kept - 1]
    assert len(result.strategy.stages) == 2
    # What is best with less memory than there is need not be the best.
    assert (result.status, result.bound_s) == (Status.FEASIBLE, None)
    assert real(tight, result.strategy).shortage is None


def test_a_rivals_strategy_that_fits_ends_no_search_for_a_better_one(monkeypatch):
    """NetSplit's own placement is too large at first; with less memory it finds one that fits and
    is better than the rival's.
    """
    problem = small()
    one, split = (netsplit.strategies_of(problem, where)[0] for where in ((0,) * 4, (0, 1, 0, 1)))
    rival = netsplit.strategies_of(problem, (0, 1, 0, 0))[0]
    answers = [
        Result(Status.OPTIMAL, one, space="made up", others=(rival,)),
        Result(Status.OPTIMAL, split, bound_s=1.0, space="made up"),
    ]
    monkeypatch.setattr(netsplit, "_searched", lambda *asked: answers.pop(0))
    needs = [
        max(parts.total_bytes for parts in netsplit.evaluate(problem, s).memory.values())
        for s in (one, rival, split)
    ]
    assert needs[0] > max(needs[1:])
    options = {"device_memory": needs[0] - 1}
    result = netsplit.solve(changed(problem, **options), 10.0)
    assert not answers
    assert (result.strategy, result.others) == (split, (rival,))
    assert result.status is Status.FEASIBLE


def test_a_rivals_strategy_counts_where_nothing_better_is_found(monkeypatch):
    problem = small()
    one, split = (netsplit.strategies_of(problem, where)[0] for where in ((0,) * 4, (0, 1, 0, 1)))
    answer = Result(Status.OPTIMAL, one, bound_s=1.0, space="made up")
    monkeypatch.setattr(netsplit, "_searched", lambda *asked: answer)
    result = netsplit.solve(problem, 10.0, (split,))
    assert (result.strategy, result.status) == (split, Status.FEASIBLE)
    assert netsplit.solve(problem, 10.0).strategy == one


def test_what_never_fits_after_all_is_unknown_with_the_shortage(monkeypatch):
    problem = small()
    strategy = netsplit.strategies_of(problem, (0, 0, 0, 0))[0]
    calls = []

    def searched(problem, placement_problem, known, limit_s, brake):
        calls.append(limit_s)
        return Result(Status.OPTIMAL, strategy, bound_s=1.0, space="made up")

    monkeypatch.setattr(netsplit, "_searched", searched)
    whole = netsplit.evaluate(problem, strategy)
    peak = max(parts.total_bytes for parts in whole.memory.values())
    tight = changed(problem, device_memory=peak - 1)
    result = netsplit.solve(tight, 10.0)
    assert calls == pytest.approx([8.0, 1.5, 0.5])
    assert result.status is Status.UNKNOWN
    assert result.reason


def test_what_has_no_placement_with_less_memory_is_not_infeasible(monkeypatch):
    problem = small()
    strategy = netsplit.strategies_of(problem, (0, 0, 0, 0))[0]
    answers = [
        Result(Status.OPTIMAL, strategy, bound_s=1.0, space="made up"),
        Result(Status.INFEASIBLE, None, bound_s=1.0, space="made up", reason="no placement fits"),
    ]
    monkeypatch.setattr(netsplit, "_searched", lambda *asked: answers.pop(0))
    whole = netsplit.evaluate(problem, strategy)
    peak = max(parts.total_bytes for parts in whole.memory.values())
    tight = changed(problem, device_memory=peak - 1)
    result = netsplit.solve(tight, 10.0)
    assert (result.status, result.bound_s) == (Status.UNKNOWN, None)
    assert "the limit is" in result.reason
