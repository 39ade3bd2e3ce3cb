"""PipeDream's optimizer: against its reference's results, against brute force, and by hand."""

import csv
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.graph import predecessors
from planner.artefacts.problem import Problem, Status, switches_of
from planner.artefacts.strategy import violations
from planner.costs.evaluate import evaluate
from planner.planning.portfolio import solve_by_pipedream_costs
from planner.schedules.orders import default_warmups
from planner.solvers import SOLVERS
from planner.solvers.pipedream import solve as solver
from planner.solvers.pipedream.costs import in_flight
from planner.solvers.pipedream.options import PipeDream
from planner.solvers.pipedream.states import augmented_antichain, next_antichains, pipedream_states
from tests.support.builders import (
    asked,
    changed,
    cluster,
    graph_of,
    hierarchy,
    problem_of,
    profile_of,
    unit_type,
)
from tests.support.profiles import read_any_profile
from tests.support.strategies import dags

REFERENCE = Path(
    os.environ.get("PLANNER_REFERENCE", Path(__file__).parents[3] / "shared" / "reference")
)
GB = 10**9


def objective_of(problem):
    report = solver.optimum(problem).report
    return None if report is None else report.objective_s


# ------------------------------------------------------------------------------ by hand


def chain(times, parameters=None, outputs=None):
    feeds = [[v - 1] if v else [] for v in range(len(times))]
    graph = graph_of(feeds, outputs, parameters or [0] * len(times))
    return profile_of(graph, [t / 2 for t in times], [t / 2 for t in times])


def test_a_chain_without_parameters_is_replicated_or_split_evenly():
    problem = problem_of(chain([1.0, 1.0, 1.0, 1.0]), hierarchy([4]))
    assert objective_of(problem) == pytest.approx(1.0)


def test_synchronisation_makes_the_heavy_part_its_own_stage():
    # 4 (2-1) 1e9 B / (1e9 B/s x 2) = 2 s to synchronise operator 2 between two machines, none to
    # synchronise 0 and 1: they run on two machines, operator 2 alone on the third.
    profile = chain([1.0, 1.0, 1.0], parameters=[0, 0, GB])
    problem = problem_of(profile, hierarchy([3]))
    report = solver.optimum(problem).report
    assert [stage.devices for stage in report.stages] == [(0, 1), (2,)]
    assert report.objective_s == pytest.approx(1.0)
    assert [stage.antichain for stage in report.stages] == [(), ("op2",)]
    assert [stage.in_flight for stage in report.stages] == [2, 1]
    assert report.single_s == pytest.approx(3.0)
    # (3 + 4 x 2 x 1e9 / (1e9 x 3)) / 3
    assert report.data_parallel_s == pytest.approx((3 + 8 / 3) / 3)
    assert report.pipeline_speedup == pytest.approx(3.0)
    assert report.data_parallel_speedup == pytest.approx(3 / report.data_parallel_s)
    assert report.advantage == pytest.approx(report.data_parallel_s)


def test_transfers_count_only_with_a_compression_ratio():
    profile = chain([1.0, 1.0], parameters=[2 * GB, 2 * GB], outputs=[GB, GB])
    problem = problem_of(profile, hierarchy([2]))
    free = solver.optimum(problem).report
    assert (free.objective_s, free.transfers_counted) == (pytest.approx(1.0), False)
    assert free.stages[0].transfer_s == free.stages[1].transfer_s == pytest.approx(2.0)
    for ratio, expected in ((1.0, 2.0), (4.0, 1.0)):
        options = {"switches": (PipeDream(activation_compression=ratio),)}
        assert objective_of(changed(problem, **options)) == pytest.approx(expected)


def test_levels_are_planned_from_the_inside_out():
    # The heavy first operator fills a host of two by data parallelism, the rest the other host.
    profile = chain([2.0, 1.0, 1.0], parameters=[0, 10 * GB, 10 * GB])
    problem = problem_of(profile, hierarchy([2, 2], [1e12, 1e9]))
    report = solver.optimum(problem).report
    assert [stage.devices for stage in report.stages] == [(0, 1), (2,), (3,)]
    assert [stage.replicas for stage in report.stages] == [(2, 1), (1, 1), (1, 1)]
    assert report.objective_s == pytest.approx(1.0)


def test_replicas_over_two_levels_take_the_same_place_in_every_host():
    profile = chain([1.0, 1.0], parameters=[1, GB])
    problem = problem_of(profile, hierarchy([2, 2], [1e9, 1e18]))
    report = solver.optimum(problem).report
    # Inside a host, synchronising is dear; between hosts it is free: one split, twice.
    assert [stage.devices for stage in report.stages] == [(0, 2), (1, 3)]
    assert [stage.replicas for stage in report.stages] == [(1, 2), (1, 2)]
    assert report.objective_s == pytest.approx(0.5)


def test_fewer_machines_leaves_out_those_that_cost_more_than_they_bring():
    profile = chain([1.0, 1.0], parameters=[100 * GB, 100 * GB])
    problem = problem_of(profile, hierarchy([3]))
    assert objective_of(problem) > 2.0
    options = {"switches": (PipeDream(fewer_machines=True),)}
    report = solver.optimum(changed(problem, **options)).report
    assert report.objective_s == pytest.approx(1.0)
    assert report.unused_devices == (2,)


def test_getitem_sinks_run_where_their_producer_does():
    graph = graph_of([[], [0], [1], [0]])
    sink = replace(graph.operators[3], type="__getitem__(1)")
    graph = replace(graph, operators=(*graph.operators[:3], sink), outputs=("t2",))
    problem = problem_of(profile_of(graph, [1.0, 1.0, 1.0, 0.0]), hierarchy([3]))
    options = {"switches": (PipeDream(straight_pipeline=True),)}
    strategy = SOLVERS["pipedream"](changed(problem, **options), 10.0).strategy
    assert [stage.operators for stage in strategy.stages] == [("op0", "op3"), ("op1",), ("op2",)]


def test_in_flight_follows_the_machines_behind():
    assert [in_flight(n, r) for n, r in ((7, 4), (3, 2), (1, 1))] == [2, 2, 1]


# ------------------------------------------------------------------------------ statuses


def test_a_topology_without_levels_is_refused_with_advice():
    problem = problem_of(chain([1.0, 1.0]), cluster([unit_type()] * 2))
    result = SOLVERS["pipedream"](problem, 10.0)
    assert result.status is Status.UNKNOWN
    assert "describe it with `levels:`" in result.reason


def test_a_straight_pipeline_of_more_machines_than_states_is_infeasible():
    options = {"switches": (PipeDream(straight_pipeline=True),)}
    result = SOLVERS["pipedream"](problem_of(chain([1.0]), hierarchy([2]), **options), 10.0)
    assert result.status is Status.INFEASIBLE
    assert "a straight pipeline has one stage for each of 2 machines" in result.reason


def test_a_memory_constraint_that_nothing_meets_is_infeasible():
    # A pipeline of two keeps one more minibatch in front; on two levels the inner ones do.
    profile = chain([1.0, 1.0], parameters=[100, 100])
    own = PipeDream(memory_constraint=True, straight_pipeline=True)
    options = {"switches": (own,), "device_memory": 50}
    result = SOLVERS["pipedream"](problem_of(profile, hierarchy([2]), **options), 10.0)
    assert result.status is Status.INFEASIBLE
    assert "memory constraint of 50 B" in result.reason


def test_more_replicas_than_microbatches_are_no_strategy():
    problem = problem_of(chain([1.0]), hierarchy([4]), num_microbatches=3)
    result = SOLVERS["pipedream"](problem, 10.0)
    assert result.status is Status.UNKNOWN
    assert "give --microbatches 4 or more" in result.reason


def test_operators_that_no_state_comes_to_are_named():
    #  op0 -> op2,  op1 -> op3: the states start at op0 and never come to op3.
    graph = graph_of([[], [], [0], [1]])
    result = SOLVERS["pipedream"](problem_of(profile_of(graph, [1.0] * 4), hierarchy([2])), 10.0)
    assert result.status is Status.UNKNOWN
    assert "leaves out 2 operators, such as op1" in result.reason


def test_too_many_states_are_not_enumerated():
    graph = graph_of([[], *[[0]] * 14])  # 2^14 antichains
    problem = problem_of(profile_of(graph, [1.0] * 15), hierarchy([2]))
    assert "states of PipeDream's, too many" in SOLVERS["pipedream"](problem, 10.0).reason


def test_a_plan_that_does_not_fit_is_kept_only_under_pipedreams_own_cost_model():
    profile = chain([1.0, 1.0], parameters=[600, 600])
    problem = problem_of(profile, hierarchy([2], kind=unit_type(memory=700)))
    assert SOLVERS["pipedream"](problem, 10.0).strategy is None
    plan = solve_by_pipedream_costs(problem).best.plan
    assert any("does not fit by the planner's count" in note for note in plan.notes)


# ------------------------------------------------------------------------------ brute force


def plans(before, i, j, m, straight, fewer):
    """Every way to put the states i..j on m machines at one level: stages (first, last, machines,
    machines up to here, whether it was split off).
    """
    if not straight or m == 1:
        yield [(i, j, m, m, False)]
    if j == i:
        return
    if fewer and m > 1:
        yield from plans(before, i, j, m - 1, straight, fewer)
    for k in range(i, j):
        if before[j, k]:
            for replicas in range(1, 2 if straight else m):
                if replicas < m:
                    for front in plans(before, i, k, m - replicas, straight, fewer):
                        yield [*front, (k + 1, j, replicas, m, True)]


def brute_force(states, feeds, profile, levels, switches, memory_bytes):
    """The least objective by the formulas of the cost model, or infinity."""
    graph = profile.graph
    sizes = {t.name: t.bytes for t in graph.tensors}
    held = {p.name: p.bytes for p in graph.parameters}
    costs = profile.operators
    inside = [{v for v in range(len(feeds)) if mask >> v & 1} for mask in states.downsets]

    def between(i, j, value):
        return sum(value(v) for v in inside[j]) - (sum(value(v) for v in inside[i - 1]) if i else 0)

    def output(v):
        return sizes[f"t{v}"]

    def stage_s(level, first, last, replicas, used, split):
        count, bandwidth, previous = levels[level]
        weights = between(first, last, lambda v: held[f"w{v}"])
        kept = math.ceil((count - used) / replicas) * (weights + between(first, last, output))
        if switches.memory_constraint and kept > memory_bytes:
            return math.inf
        time = compute_s(level, first, last)
        sync = 4 * (replicas - 1) * weights / (bandwidth * replicas)
        time = (time + (sync if split else sync / previous)) / replicas
        if split and switches.activation_compression is not None:
            ends = [first - 1] if last == len(states) - 1 else [first - 1, last]
            for state in ends:
                sent = sum(output(v) for v in states.antichains[state])
                time = max(
                    time, 2 * sent / (bandwidth * replicas) / switches.activation_compression
                )
        return time

    @cache
    def compute_s(level, i, j):
        if level == 0:
            return between(i, j, lambda v: costs[v].forward_s + costs[v].backward_s)
        return best_s(level - 1, i, j)

    def best_s(level, i, j):
        options = plans(states.before, i, j, levels[level][0], switches.straight_pipeline,
                        switches.fewer_machines)  # fmt: skip
        return min(
            (max(stage_s(level, *stage) for stage in stages) for stages in options),
            default=math.inf,
        )

    return best_s(len(levels) - 1, 0, len(states) - 1)


@st.composite
def pipedream_problems(draw):
    feeds = [[0] if v and not us else us for v, us in enumerate(draw(dags(max_nodes=5)))]
    size = len(feeds)
    number = st.integers(0, 9)
    graph = graph_of(
        feeds,
        [x * 1000 for x in draw(st.lists(number, min_size=size, max_size=size))],
        [x * 1000 for x in draw(st.lists(number, min_size=size, max_size=size))],
    )
    # Some operators take no time, not all.
    times = draw(st.lists(number, min_size=size, max_size=size).filter(any))
    profile = profile_of(graph, times)
    counts = draw(
        st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 2), (2, 2, 2)])
    )
    bandwidths = [draw(st.sampled_from([1e3, 1e4])) for _ in counts]
    memory_bytes = draw(st.sampled_from([None, 3_000, 10_000, 30_000]))
    switches = PipeDream(
        draw(st.booleans()),
        memory_bytes is not None,
        draw(st.booleans()),
        draw(st.sampled_from([None, 1.0, 2.0])),
    )
    return problem_of(
        profile,
        hierarchy(counts, bandwidths),
        num_microbatches=16,
        switches=(switches,),
        device_memory=memory_bytes,
    )


@settings(max_examples=150)
@given(pipedream_problems())
def test_finds_the_least_objective_of_all_splits(problem):
    graph = problem.profile.graph
    feeds = predecessors(graph)
    states = pipedream_states(feeds, 1000)
    levels, previous = [], 1
    for level in problem.topology.levels:
        levels.append((level.count, level.bandwidth_bytes_per_s, previous))
        previous = level.count
    answer = solver.optimum(problem)
    switches = switches_of(problem.search, PipeDream)
    memory_bytes = problem.training.device_memory
    expected = brute_force(states, feeds, problem.profile, levels, switches, memory_bytes)
    if math.isinf(expected):
        assert answer.status is Status.INFEASIBLE
        assert answer.reason
    else:
        assert answer.report.objective_s == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=150)
@given(pipedream_problems())
def test_every_plan_is_a_sound_strategy_of_devices_in_order(problem):
    answer = solver.optimum(problem)
    if answer.report is None:
        return
    strategy = solver.solve_alone(problem).strategy
    num_devices = len(problem.topology.devices)
    assert violations(strategy, problem.profile.graph, num_devices) == ()
    assert evaluate(problem, strategy)
    used = [d for stage in strategy.stages for d in stage.devices]
    assert sorted((*used, *answer.report.unused_devices)) == list(range(num_devices))
    widths = [stage.num_replicas for stage in strategy.stages]
    depths = default_warmups(widths, 16, 0, strategy.schedule)
    assert tuple(stage.warmup for stage in strategy.stages) == depths
    for stage, reported in zip(strategy.stages, answer.report.stages, strict=True):
        assert len(stage.operators) == reported.num_operators
        assert math.prod(reported.replicas) == stage.num_replicas


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(2, 5))
def test_the_slowest_stage_of_the_report_is_the_objective(times, count):
    problem = problem_of(chain([float(t) for t in times]), hierarchy([count]), num_microbatches=8)
    report = solver.optimum(problem).report
    slowest = max(stage.compute_s + stage.synchronisation_s for stage in report.stages)
    assert slowest == pytest.approx(report.objective_s)


@settings(max_examples=30)
@given(pipedream_problems())
def test_the_same_problem_gives_the_same_plan(problem):
    first = solver.optimum(problem)
    assert solver.optimum(problem) == first


@settings(max_examples=100)
@given(dags(max_nodes=8))
def test_states_come_after_their_predecessors_and_grow(feeds):
    states = pipedream_states(feeds, 1000)
    assert not np.triu(states.before).any()
    for j, k in np.argwhere(states.before):
        assert states.downsets[k] & ~states.downsets[j] == 0
        assert states.downsets[k] != states.downsets[j]


def test_augmented_antichains_look_at_each_member_alone():
    #  0 -> 1, 0 -> 2: the antichain {1, 2} has read all of 0, and yet 0 is added, because it
    #  feeds 2, which is neither before 1 nor 1.
    assert augmented_antichain([1, 2], [[], [0], [0]]) == (0, 1, 2)
    assert augmented_antichain([1], [[], [0]]) == (1,)


def test_states_stop_at_the_limit():
    feeds = [[], *[[0]] * 5]
    assert pipedream_states(feeds, 32) is not None
    assert pipedream_states(feeds, 31) is None


# ------------------------------------------------------------------------------ the reference


def rows():
    if not (REFERENCE / "expected.csv").is_file():
        return []
    with (REFERENCE / "expected.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["peer"] == "pipedream"]


@cache
def reference_profile(name):
    return read_any_profile(REFERENCE / "pipedream" / f"{name}.txt")


def problem_of_row(row):
    """The problem of a row such as "n=5 5 b=800000000 1000000000", "hierarchical_dp/act1_mem"."""
    counts, bandwidths = row["config"].removeprefix("n=").split(" b=")
    switches = set(row["algorithm"].partition("/")[2].split("_"))
    assert switches <= {"default", "straight", "mem", "fewer", "act1"}
    options = PipeDream(
        straight_pipeline="straight" in switches,
        memory_constraint="mem" in switches,
        fewer_machines="fewer" in switches,
        activation_compression=1.0 if "act1" in switches else None,
    )
    topology = hierarchy([int(n) for n in counts.split()], [float(b) for b in bandwidths.split()])
    return Problem(reference_profile(row["instance"]), topology, **asked(100, switches=(options,)))


def needs_reference():
    if not rows():
        pytest.skip(f"{REFERENCE} is not there; set PLANNER_REFERENCE")


@pytest.mark.reference
def test_all_objectives_of_the_reference_are_met():
    needs_reference()
    finished = [row for row in rows() if row["status"] == "ok"]
    assert len(finished) == 289
    for row in finished:
        objective = objective_of(problem_of_row(row))
        assert objective == pytest.approx(float(row["objective"]), rel=1e-9), row


@pytest.mark.reference
def test_where_the_reference_crashes_there_is_a_plan_or_a_reason():
    needs_reference()
    crashed = [row for row in rows() if row["status"] != "ok"]
    assert len(crashed) == 14
    for row in crashed:
        answer = solver.optimum(problem_of_row(row))
        if answer.report is None:
            assert answer.status is Status.INFEASIBLE
            assert "a straight pipeline has one stage for each of 5 x 5 machines" in answer.reason
        else:
            assert "mem_fewer" in row["algorithm"]


@pytest.mark.reference
def test_states_of_gnmt_are_those_of_the_reference():
    needs_reference()
    problem = problem_of_row(
        {"instance": "gnmt", "algorithm": "x/default", "config": "n=5 5 b=800000000 1000000000"}
    )
    graph = problem.profile.graph
    kept = solver._planned(graph)
    feeds = solver._relabelled(graph, kept)
    names = [graph.operators[v].name for v in kept]

    def named(places):
        return {names[i] for i in places}

    states = pipedream_states(feeds, 1000)
    assert len(states) == 99
    assert named(augmented_antichain([names.index("node10")], feeds)) == {"node8", "node10"}
    assert named(augmented_antichain([names.index("node15")], feeds)) == {"node14", "node15"}
    after = [named(one) for one in next_antichains([names.index("node10")], feeds)]
    assert after == [{"node11"}] or after == [{"node14"}, {"node11"}]
    costs = solver.state_costs(problem, states, kept)
    _, (inner, outer) = solver._search(problem, states, costs)
    expected = [0.007022, 0.1689894, 0.1494326, 0.1258643, 0.1073106]
    assert inner[0, :, 0] == pytest.approx(expected, abs=6e-8)
    assert outer[0, 1, 0] == pytest.approx(0.0801318, abs=6e-8)
