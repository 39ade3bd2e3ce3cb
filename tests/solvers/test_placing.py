"""What a placement of single operators costs, and how one microbatch runs through it."""

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor, View
from planner.artefacts.options import Optimizer
from planner.costs.evaluate import evaluate
from planner.costs.operators import operator_times
from planner.costs.transfers import transfer_s as costs_transfer_s
from planner.simulator.events import run
from planner.solvers.fit import pipeline
from planner.solvers.placement.problem import (
    ConsumedTensor,
    SharedBytes,
    feeds_of,
    least_bytes,
    placement_problem_of,
    tighter,
    transfer_s,
)
from planner.solvers.placement.stages import strategies_of, strategy_of
from planner.solvers.placement.timetable import latency_s, timetable
from tests.support.builders import changed, cluster, graph_of, problem_of, profile_of, unit_type
from tests.support.programs import SYNCHRONOUS
from tests.support.strategies import problems


def diamond(num_devices=2):
    """   1
        /   \\
      0       3      every tensor takes 1 s between devices
        \\   /
          2
    """
    graph = graph_of([[], [0], [0], [1, 2]])
    profile = profile_of(graph, [1.0, 2.0, 3.0, 1.0])
    return placement_problem_of(
        problem_of(profile, cluster([unit_type()] * num_devices, bandwidth=1e3))
    )


def test_a_diamond_on_two_devices():
    # device 0: F0 F1 F1 .. .. .. F3 B3 B3 B1 B1 B1 B1 .. .. .. .. B0 B0
    # 0 -> 1:      t0                      t2'
    # device 1:       F2 F2 F2                B2 B2 B2 B2 B2 B2
    # 1 -> 0:                  t2                               t0'
    table = timetable(diamond(), (0, 0, 1, 0))
    assert table.forward_start_s == (0, 1, 2, 6)
    assert table.backward_start_s == (17, 9, 10, 7)
    sent = [(m.tensor, m.backward, m.source, m.target, m.start_s) for m in table.transfers]
    assert sent == [(0, False, 0, 1, 1), (2, False, 1, 0, 5), (0, True, 1, 0, 16),
                    (2, True, 0, 1, 9)]  # fmt: skip
    assert table.latency_s == 19


def test_a_tensor_goes_once_to_each_device_that_reads_it():
    problem = diamond(3)
    both = timetable(problem, (0, 1, 1, 1))
    assert [(m.tensor, m.source, m.target) for m in both.transfers] == [(0, 0, 1), (0, 1, 0)]
    apart = timetable(problem, (0, 1, 2, 0))
    assert sorted(m.tensor for m in apart.transfers if not m.backward) == [0, 0, 1, 2]


def test_the_order_decides_which_ready_operator_comes_first():
    problem = diamond()
    assert timetable(problem, (0, 0, 0, 0)).forward_start_s == (0, 4, 1, 6)
    assert timetable(problem, (0, 0, 0, 0), (0, 1, 2, 3)).forward_start_s == (0, 1, 3, 6)
    assert timetable(problem, (0, 0, 0, 0), (0, 1, 2, 3)).backward_start_s == (19, 15, 9, 7)


def test_memory_is_what_each_operator_alone_holds_and_what_several_share():
    # a and b share w; only a has v; b's second output t2 is read by nobody; i is an integer.
    graph = Graph(
        operators=(
            Operator("a", "Test", ("x",), ("t0", "i"), ("v", "w", "mask")),
            Operator("b", "Test", ("x", "t0", "i"), ("t1", "t2"), ("w",)),
        ),
        tensors=(
            Tensor("x", (10,), "int8", False), Tensor("t0", (20,), "int8", True),
            Tensor("i", (4,), "int8", False), Tensor("t1", (1,), "int8", True),
            Tensor("t2", (7,), "int8", True),
        ),
        parameters=(
            Parameter("v", (3,), "int8", True), Parameter("w", (5,), "int8", True),
            Parameter("mask", (100,), "int8", False),
        ),
        inputs=("x",),
        outputs=("t1",),
    )  # fmt: skip
    problem = placement_problem_of(
        problem_of(
            profile_of(graph, [1.0, 1.0]),
            cluster([unit_type(memory=1000)] * 2),
            optimizer=Optimizer.ADAM,
            reserve=300,
        )
    )
    assert problem.tensors == (ConsumedTensor(0, (1,), 20, True), ConsumedTensor(0, (1,), 4, False))
    assert problem.parameter_bytes.tolist() == [103, 0]
    assert problem.trainable_bytes.tolist() == [3, 0]
    assert problem.shared_parameters == (SharedBytes((0, 1), 5, True),)
    assert problem.inputs == (SharedBytes((0, 1), 10),)
    assert problem.result_bytes.tolist() == [0, 8]
    assert problem.capacity_bytes.tolist() == [700, 700]
    assert problem.moments == 2
    assert len(timetable(problem, (0, 1)).transfers) == 3  # The integer's gradient stays away.


@given(problems(max_nodes=6, max_devices=4))
def test_times_are_those_of_the_evaluator(problem):
    placement_problem = placement_problem_of(problem)
    for p in range(placement_problem.num_devices):
        assert np.array_equal(
            placement_problem.forward_s[:, p], operator_times(problem, p).forward_s
        )
        assert np.array_equal(
            placement_problem.backward_s[:, p], operator_times(problem, p).backward_s
        )
        for q in range(placement_problem.num_devices):
            known = costs_transfer_s(problem.topology, (p,), (q,), 12345)
            assert transfer_s(placement_problem, 12345, p, q) == pytest.approx(known, rel=1e-12)


def test_processes_on_shared_cores_slow_each_other_down():
    profile = profile_of(graph_of([[]]), [1.0])
    problem = placement_problem_of(problem_of(profile, cluster([unit_type()] * 4, cores=2)))
    assert problem.forward_s.tolist() == [[2.0] * 4]


@st.composite
def placements(draw):
    problem = draw(problems(max_nodes=8, max_devices=3))
    # A device runs several stages, which asynchronous schedules do not allow.
    options = {"schedule": draw(st.sampled_from(SYNCHRONOUS))}
    problem = changed(problem, **options)
    device = st.integers(0, len(problem.topology.devices) - 1)
    count = len(problem.profile.operators)
    return problem, tuple(draw(st.lists(device, min_size=count, max_size=count)))


@st.composite
def stashes(draw):
    """A placed problem in which any operator stashes any of its tensors or makes a view."""
    problem, device_of = draw(placements())
    profile, costs, views = problem.profile, [], []
    for operator, cost in zip(profile.graph.operators, profile.operators, strict=True):
        tensors = [*operator.inputs, *operator.outputs]
        stash = tuple(t for t in tensors if draw(st.booleans()))
        private = draw(st.integers(0, 99))
        costs.append(replace(cost, stash_tensors=stash, stash_private_bytes=private))
        if draw(st.booleans()):
            views.append(View(operator.outputs[0], operator.inputs[0]))
    profile = replace(profile, operators=tuple(costs), views=tuple(views))
    options = {"optimizer": draw(st.sampled_from(Optimizer))}
    return changed(problem, profile=profile, **options), device_of


@given(stashes())
def test_no_placement_needs_less_than_the_least(drawn):
    problem, device_of = drawn
    least = least_bytes(placement_problem_of(problem))
    for strategy in strategies_of(problem, device_of):
        for p, parts in evaluate(problem, strategy).memory.items():
            inside = {v for v, device in enumerate(device_of) if device == p}
            need = sum(size for those, size in least.items() if not inside.isdisjoint(those))
            assert need <= parts.total_bytes - parts.reserve_bytes


def test_what_does_not_fit_is_beyond_the_memory_that_is_left():
    problem = problem_of(
        profile_of(graph_of([[], [0]]), [1.0, 1.0]),
        cluster([unit_type(memory=5_500)] * 2),
        num_microbatches=1,
        reserve=1_000,
    )
    placement_problem, strategy = placement_problem_of(problem), strategy_of(problem, (0, 1))
    over = {p: m.total_bytes - 5_500 for p, m in evaluate(problem, strategy).memory.items()}
    assert over[0] > 0 and over[1] > 0
    # A parameter with its gradient each, t0, and x on device 0; t1 belongs to no operator alone.
    least = least_bytes(placement_problem)
    assert sum(least.values()) == 2 * 2_000 + 1_000 + 1_000
    less = tighter(problem, placement_problem, (0, 1), strategy, least)
    assert less.capacity_bytes.tolist() == [min(4_000 - over[0] / 2, 3_000 - over[1] / 2)] * 2
    roomy = changed(problem, device_memory=10**6)
    same = tighter(roomy, placement_problem, (0, 1), strategy, least)
    assert same.capacity_bytes.tolist() == placement_problem.capacity_bytes.tolist()


@given(placements())
def test_everything_waits_for_what_it_needs_and_for_its_turn(drawn):
    problem, device_of = drawn
    placement_problem = placement_problem_of(problem)
    table = timetable(placement_problem, device_of)
    starts = (table.forward_start_s, table.backward_start_s)
    tables = (placement_problem.forward_s, placement_problem.backward_s)
    spans = [
        [(s, s + float(t[i, device_of[i]])) for i, s in enumerate(some)]
        for some, t in zip(starts, tables, strict=True)
    ]
    there, back = spans
    assert min(s for s, _ in back) >= max(e for _, e in there)
    for backward, span in ((False, there), (True, back)):
        for i, tensor in enumerate(placement_problem.tensors):
            if backward and not tensor.gradient:
                continue
            home = device_of[tensor.producer]
            for q in {device_of[j] for j in tensor.consumers}:
                readers = [span[j] for j in tensor.consumers if device_of[j] == q]
                made_s, read_s = (
                    (max(e for _, e in readers), span[tensor.producer][0]) if backward
                    else (span[tensor.producer][1], min(s for s, _ in readers))
                )  # fmt: skip
                if q == home:
                    assert read_s >= made_s
                    continue
                ends = (q, home) if backward else (home, q)
                (one,) = (m for m in table.transfers if (m.tensor, m.backward) == (i, backward)
                          and (m.source, m.target) == ends)  # fmt: skip
                assert made_s <= one.start_s
                assert one.end_s <= read_s
                assert one.end_s - one.start_s == pytest.approx(
                    transfer_s(placement_problem, tensor.bytes, *ends)
                )
    places = {(p, p): [] for p in device_of}
    for span in spans:
        for i, one in enumerate(span):
            places[device_of[i], device_of[i]].append(one)
    for m in table.transfers:
        places.setdefault((m.source, m.target), []).append((m.start_s, m.end_s))
    for one in places.values():
        assert all(a[1] <= b[0] + 1e-15 for a, b in pairwise(sorted(one)))
    assert table.latency_s == max(e for _, e in back)


@given(problems(max_nodes=8, max_devices=3))
def test_alone_on_a_device_one_follows_the_other(problem):
    placement_problem = placement_problem_of(problem)
    total_s = placement_problem.forward_s[:, 0].sum() + placement_problem.backward_s[:, 0].sum()
    alone_s = latency_s(placement_problem, (0,) * placement_problem.num_operators)
    assert alone_s == pytest.approx(total_s)


@pytest.mark.parametrize("cuts", [*combinations(range(1, 6), 1), *combinations(range(1, 6), 2)])
def test_a_chain_takes_as_long_as_in_the_simulator(cuts):
    times = [1.0, 2.0, 0.5, 4.0, 1.5, 3.0]
    graph = graph_of([[], *([v] for v in range(5))], tensor_bytes=[500, 100, 900, 300, 700, 10])
    problem = problem_of(
        profile_of(graph, times), cluster([unit_type()] * 3, bandwidth=1e3), num_microbatches=1
    )
    stages = [range(a, b) for a, b in pairwise((0, *cuts, 6))]
    strategy = pipeline(problem, stages, [[d] for d in range(len(stages))], recompute=False)
    evaluation = evaluate(problem, strategy)
    known_s = run(evaluation.program, evaluation.costs, problem.topology).iteration_s
    device_of = [d for d, inside in enumerate(stages) for _ in inside]
    assert latency_s(placement_problem_of(problem), device_of) == pytest.approx(known_s)


def test_feeds_are_the_predecessors():
    assert feeds_of(diamond()) == ((), (0,), (0,), (1, 2))
