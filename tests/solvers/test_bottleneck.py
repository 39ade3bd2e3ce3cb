"""The smallest bottleneck: against every placement, under both cost models."""

import ctypes
import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.formats.dnn_partitioning import DnnEdge, DnnGraph, DnnNode
from planner.artefacts.problem import Status
from planner.planning.other_cost_models import ForeignOptions, solve_foreign
from planner.reports.published import published_json
from planner.solvers.bottleneck import search as bottleneck
from planner.solvers.bottleneck.kernels import anneal
from planner.solvers.bottleneck.model import (
    BottleneckNet,
    BottleneckProblem,
    bottleneck_s,
    contract,
    fits,
    simple_bound_s,
    works_s,
)
from planner.solvers.bottleneck.program import (
    MEAN_WORK_WEIGHT,
    canonical,
    neighbourhood,
    program_of,
)
from planner.solvers.dnn_partitioning import costs as dnn_partitioning
from planner.solvers.dnn_partitioning.placement import bottleneck_of, place
from planner.solvers.dnn_partitioning.solve import split
from planner.solvers.engines import mip
from planner.solvers.engines.engine import Engine
from planner.solvers.engines.mip import EngineUnavailableError, Mip, MipLimits, gurobi, highs
from planner.support.brake import Brake
from tests.support import reference
from tests.support.often import often

LIMIT_S = 2.0
NO_LIMIT = MipLimits(1_000_000)


@st.composite
def problems(draw):
    """Up to 5 items on 2 or 3 devices: equal or not, some barred, little memory or none, paid
    crossings or messages or both, contiguous or not.
    """
    count, num = draw(st.integers(1, 5)), draw(st.integers(2, 3))
    numbers = st.integers(0, 9)
    equal = draw(st.booleans())
    work = np.array(draw(st.lists(numbers, min_size=count * num, max_size=count * num)), float)
    work = work.reshape(count, num)
    if equal:
        work[:] = work[:, :1]
    elif draw(st.booleans()):
        work[draw(st.integers(0, count - 1)), draw(st.integers(0, num - 1))] = np.inf
    nets = []
    for home in range(count - 1):
        readers = draw(st.sets(st.integers(home + 1, count - 1), max_size=3))
        if readers:
            nets.append(
                BottleneckNet(
                    home, tuple(sorted(readers)), draw(numbers), draw(numbers), draw(st.booleans())
                )
            )
    per_byte = np.zeros((num, num))
    if draw(st.booleans()):
        per_byte = np.ones((num, num)) - np.eye(num)
        if not equal:
            per_byte[0, 1] = 0.25
    kept = [((v,), float(draw(numbers))) for v in range(count)]
    if count > 1:
        kept.append(((0, count - 1), float(draw(numbers))))
    room = draw(st.sampled_from([np.inf, 12.0, 20.0]))
    devices = tuple(range(num))
    return BottleneckProblem(
        work_s=work,
        nets=tuple(nets),
        pays=(True,) * num if equal else (True,) * (num - 1) + (False,),
        latency_s=np.zeros((num, num)),
        seconds_per_byte=per_byte,
        kept=tuple(kept),
        room_bytes=np.full(num, room),
        alike=(devices,) if equal else tuple((p,) for p in devices),
        order=draw(st.sampled_from([None, devices])),
    )


def placements(problem):
    """All that are allowed."""
    every = product(range(problem.num_devices), repeat=problem.num_items)
    return [on for on in every if fits(problem, on)]


def least_s(problem):
    return min((bottleneck_s(problem, on) for on in placements(problem)), default=np.inf)


#   0 --2 s--> 1, 2      0 and 1 on device 0, 2 on 1: both pay, once; a device that need not, not
def test_a_device_pays_once_for_a_net_that_it_has_a_part_of():
    problem = BottleneckProblem(
        work_s=np.ones((3, 2)),
        nets=(BottleneckNet(0, (1, 2), 2.0),),
        pays=(True, True),
        latency_s=np.zeros((2, 2)),
        seconds_per_byte=np.zeros((2, 2)),
        kept=(),
        room_bytes=np.full(2, np.inf),
        alike=((0, 1),),
    )
    assert works_s(problem, (0, 0, 1))[:2].tolist() == [4, 3]
    assert works_s(problem, (1, 1, 1))[:2].tolist() == [0, 3]
    assert works_s(replace(problem, pays=(True, False)), (0, 0, 1))[:2].tolist() == [4, 1]


@often(15, 60, problems())
def test_the_best_placement_is_found_and_proved(problem):
    expected, known = least_s(problem), placements(problem)
    for starts in ([], known[-1:]):
        answer = bottleneck.solve(problem, starts, LIMIT_S)
        if not known:
            assert (answer.status, answer.on) == (Status.INFEASIBLE, None)
            continue
        assert answer.status is Status.OPTIMAL
        assert fits(problem, answer.on)
        assert bottleneck_s(problem, answer.on) == pytest.approx(expected, rel=1e-5)
        assert answer.bound_s == pytest.approx(expected, rel=1e-5)


@settings(max_examples=60)
@given(problems())
def test_no_placement_beats_the_bound_that_needs_no_search(problem):
    assert simple_bound_s(problem) <= least_s(problem) * (1 + 1e-12)


@settings(max_examples=60)
@given(problems(), st.integers(0, 20))
def test_contracting_loses_no_placement_within_the_limit(problem, limit_s):
    small, into = contract(problem, limit_s)
    within = [on for on in placements(problem) if bottleneck_s(problem, on) <= limit_s]
    kept = {tuple(on[v] for v in into) for on in placements(small)}
    assert set(within) <= kept
    for on in placements(small):
        whole = tuple(on[v] for v in into)
        assert works_s(problem, whole) == pytest.approx(works_s(small, on))


@settings(max_examples=40)
@given(problems(), st.integers(0, 3))
def test_annealing_keeps_to_what_is_allowed_and_counts_right(problem, seed):
    for start in placements(problem)[:1]:
        on, value = anneal(bottleneck._costs(problem), np.array(start), seed, 300, 0.1)
        assert fits(problem, on.tolist())
        assert value == pytest.approx(bottleneck_s(problem, on.tolist()))
        assert value <= bottleneck_s(problem, start) + 1e-9


@settings(max_examples=40)
@given(problems(), st.data())
def test_a_neighbourhood_moves_only_what_it_may_and_gets_no_worse(problem, data):
    known = placements(problem)
    if not known:
        return
    start, devices = data.draw(st.sampled_from(known)), (0, 1)
    model = program_of(problem, symmetric=False)
    solved = highs(neighbourhood(model, start, devices), NO_LIMIT, model.hint(start), Brake(60.0))
    on = model.placement(solved.values)
    assert fits(problem, on)
    for p, q in zip(start, on, strict=True):
        assert (q in devices) if p in devices else (p == q)
    most_s = tidied_s(problem, start, devices)
    assert tidied_s(problem, on, devices) <= most_s * (1 + 2e-6) + 1e-9


def tidied_s(problem, on, devices):
    """What a neighbourhood minimises: the largest work that has an end on some devices, and a part
    of the sum of these works.
    """
    num = problem.num_devices
    works = works_s(problem, on)
    ends = [{p} for p in range(num)] + [{p, q} for p in range(num) for q in range(num)]
    touched = works[[not places.isdisjoint(devices) for places in ends]]
    return touched.max() + MEAN_WORK_WEIGHT * touched.sum() / len(devices)


@settings(max_examples=40)
@given(problems())
def test_renamed_devices_satisfy_the_symmetry_rows(problem):
    problem = replace(problem, order=None)
    model = program_of(problem, symmetric=True)
    for on in placements(problem)[:5]:
        named = canonical(problem, on)
        assert bottleneck_s(problem, named) == pytest.approx(bottleneck_s(problem, on))
        values = model.hint(named)
        fixed = {j for row in model.x for j in row}
        for terms, low, high in model.mip.rows:
            if set(terms) <= fixed:
                total = sum(a * values[j] for j, a in terms.items())
                assert low - 1e-9 <= total <= high + 1e-9


@settings(max_examples=20)
@given(problems())
def test_both_engines_say_the_same(problem):
    ours, theirs = (bottleneck.solve(problem, [], LIMIT_S, engine=e) for e in (None, Engine.GUROBI))
    assert ours.status is theirs.status
    assert not theirs.note
    assert ours.bound_s == pytest.approx(theirs.bound_s, rel=1e-5)


def test_a_start_that_is_not_allowed_is_left_out():
    problem = BottleneckProblem(
        work_s=np.array([[1.0, np.inf], [1.0, 1.0]]),
        nets=(),
        pays=(True, True),
        latency_s=np.zeros((2, 2)),
        seconds_per_byte=np.zeros((2, 2)),
        kept=(),
        room_bytes=np.full(2, np.inf),
        alike=((0,), (1,)),
    )
    answer = bottleneck.solve(problem, [(1, 1)], LIMIT_S)
    assert (answer.status, answer.on) == (Status.OPTIMAL, (0, 1))


# ----------------------------------------------------------------------------------- engines


def knapsack():
    """min -3 a - 2 b, 2 a + 2 b <= 3, both 0 or 1."""
    program = Mip()
    a, b = program.variable(integer=True), program.variable(integer=True)
    program.objective = {a: -3.0, b: -2.0}
    program.row({a: 2.0, b: 2.0}, high=3.0)
    return program


@pytest.mark.parametrize("engine", [highs, gurobi])
def test_an_engine_tells_best_from_none(engine):
    solved = engine(knapsack(), NO_LIMIT, {}, Brake(60.0))
    assert (solved.status, solved.values, solved.bound) == (Status.OPTIMAL, [1.0, 0.0], -3.0)
    program = knapsack()
    program.row({0: 1.0, 1: 1.0}, low=2.0)
    assert engine(program, NO_LIMIT, {}, Brake(60.0)).status is Status.INFEASIBLE


@pytest.mark.parametrize("engine", [highs, gurobi])
def test_a_hint_that_breaks_a_row_changes_nothing(engine):
    solved = engine(knapsack(), NO_LIMIT, {0: 1.0, 1: 1.0}, Brake(60.0))
    assert (solved.status, solved.values) == (Status.OPTIMAL, [1.0, 0.0])


@pytest.mark.skipif(os.name != "posix", reason="C's buffer is flushed through its library")
def test_what_the_library_prints_is_not_on_standard_output(capfd):
    print("before")
    with mip._library_on_standard_error():
        ctypes.CDLL(None).printf(b"from C\n")
    print("after")
    assert tuple(capfd.readouterr()) == ("before\nafter\n", "from C\n")


def test_an_engine_that_claims_no_placement_beside_a_known_one_is_not_believed(monkeypatch):
    def nothing(program, limits, hint, brake):
        return replace(highs(program, limits, hint, brake), status=Status.INFEASIBLE, values=None)

    monkeypatch.setattr(bottleneck, "highs", nothing)
    problem = two_chains()
    answer = bottleneck.solve(problem, [(0,) * 6], LIMIT_S)
    assert answer.status is Status.FEASIBLE
    assert answer.on is not None
    assert answer.bound_s == simple_bound_s(problem)


#   0 -> 1 -> 2,  3 -> 4 -> 5:  3 s each, an output 1 s, on 2 devices that hold 4 each
def two_chains():
    return BottleneckProblem(
        work_s=np.array([[3.0], [4.0], [2.0], [3.0], [3.0], [4.0]]) * np.ones((1, 2)),
        nets=tuple(BottleneckNet(v, (v + 1,), 1.0) for v in (0, 1, 3, 4)),
        pays=(True, True),
        latency_s=np.zeros((2, 2)),
        seconds_per_byte=np.zeros((2, 2)),
        kept=tuple(((v,), 1.0) for v in range(6)),
        room_bytes=np.array([6.0, 6.0]),
        alike=((0, 1),),
    )


def test_a_program_too_large_for_a_licence_is_solved_by_the_other_engine(monkeypatch, caplog):
    def refuses(program, limits, hint, brake):
        raise EngineUnavailableError("gurobi: model too large for its licence (error 10010)")

    monkeypatch.setattr(bottleneck, "gurobi", refuses)
    answer = bottleneck.solve(two_chains(), [], LIMIT_S, engine=Engine.GUROBI)
    assert answer.status is Status.OPTIMAL
    assert "error 10010" in answer.note
    assert answer.note in caplog.text


def test_the_same_problem_gives_the_same_answer():
    problem = two_chains()
    first, second = (bottleneck.solve(problem, [(0,) * 6], LIMIT_S) for _ in range(2))
    assert first == second and first.reproducible


# -------------------------------------------------------------------------- dnn-partitioning


@st.composite
def dnn_graphs(draw):
    """Up to 6 nodes, some of one color, some backward, with a CPU or without."""
    count = draw(st.integers(1, 6))
    small = st.integers(0, 9)
    first_backward = draw(st.integers(1, count))
    nodes = tuple(
        DnnNode(
            v,
            draw(small),
            5.0 * draw(small),
            v >= first_backward,
            draw(st.integers(0, 9)) > 0,
            f"n{v}",
            draw(st.sampled_from([None, 0, 1])),
            float(draw(small)),
        )
        for v in range(count)
    )
    costs = [float(draw(small)) for _ in range(count)]
    pairs = [(u, v) for v in range(count) for u in range(v)]
    chosen = draw(st.sets(st.sampled_from(pairs), max_size=8)) if pairs else set()
    edges = tuple(DnnEdge(u, v, costs[u]) for u, v in sorted(chosen))
    return DnnGraph(
        draw(st.integers(1, 3)), draw(st.integers(0, 1)), float(draw(st.integers(5, 40))),
        nodes, edges,
    )  # fmt: skip


def by_every_placement(graph):
    """The smallest largest load in s over all placements of color classes; inf without any."""
    num = graph.num_devices + graph.num_cpus
    names = [n.color if n.color is not None else ("alone", v) for v, n in enumerate(graph.nodes)]
    classes = sorted(set(names), key=names.index)
    best = np.inf
    for devices in product(range(num), repeat=len(classes)):
        at = dict(zip(classes, devices, strict=True))
        inside = [[v for v, name in enumerate(names) if at[name] == p] for p in range(num)]
        gpus = inside[: graph.num_devices]
        if any(dnn_partitioning.memory_bytes(graph, nodes) > graph.memory_bytes for nodes in gpus):
            continue
        if any(not graph.nodes[v].supported for nodes in gpus for v in nodes):
            continue
        loads = [
            dnn_partitioning.load_s(graph, nodes, cpu=p >= graph.num_devices)
            for p, nodes in enumerate(inside)
        ]
        best = min(best, max(loads))
    return best


@settings(max_examples=60)
@given(dnn_graphs())
def test_dnn_partitioning_without_contiguity_is_as_by_every_placement(graph):
    expected = by_every_placement(graph)
    known = split(graph, graph.num_devices, graph.memory_bytes).stages
    placement = place(graph, graph.num_devices, graph.memory_bytes, known, LIMIT_S)
    if expected == np.inf:
        assert placement.split.status is Status.INFEASIBLE and not placement.split.stages
        return
    value = max(dnn_partitioning.load_s(graph, s.nodes, cpu=s.cpu) for s in placement.split.stages)
    assert placement.split.status is Status.OPTIMAL
    assert value == pytest.approx(expected, rel=1e-5)
    assert placement.bound_s == pytest.approx(expected, rel=1e-5)
    assert sorted(v for s in placement.split.stages for v in s.nodes) == [*range(len(graph.nodes))]


#   3 -> 1 -> 1 -> 3 -> 2 -> 2:  contiguous 5 | 7;  not, 3 1 2 | 1 3 2
def test_the_row_of_placements_comes_first_and_names_its_bound():
    nodes = tuple(
        DnnNode(v, time, 90.0, False, True, f"n{v}") for v, time in enumerate([3, 1, 1, 3, 2, 2])
    )
    edges = tuple(DnnEdge(v, v + 1, 0.01) for v in range(5))
    graph = DnnGraph(2, 0, 1e9, nodes, edges)
    plain = solve_foreign(graph, ForeignOptions())
    comparison = solve_foreign(graph, ForeignOptions(contiguous=False, time_limit_s=LIMIT_S))
    assert [row.solver for row in comparison.rows] == ["netsplit", "dnn-partitioning", "single"]
    assert comparison.rows[1].bottleneck_s == plain.rows[0].bottleneck_s
    assert comparison.best.solver == "netsplit"
    assert comparison.best.bottleneck_s < comparison.rows[1].bottleneck_s
    assert comparison.best.bound_s == pytest.approx(comparison.best.bottleneck_s, rel=1e-5)
    assert any("gap 0.00%" in note for note in comparison.notes)
    assert published_json(comparison)["space_bound_s"] == comparison.best.bound_s


PUBLISHED_MS = {
    "LayerGraphs/bert24_inference": 17.71472,
    "LayerGraphs/bert24_training": 39.78954,
    "OperatorGraphs/bert_l-3_inference": 21.90839,
}


@pytest.mark.slow
@pytest.mark.reference
@pytest.mark.skipif(not reference.rows("dnn-partitioning"), reason="needs the reference inputs")
@pytest.mark.parametrize("name", PUBLISHED_MS)
def test_published_values_are_reached_without_contiguity(name):
    graph = reference.dnn_graph(f"throughput-inputs/{name}.json")
    comparison = solve_foreign(graph, ForeignOptions(contiguous=False, time_limit_s=10.0))
    assert comparison.rows[0].bottleneck_s * 1e3 <= PUBLISHED_MS[name] + 1e-5
    assert comparison.rows[0].bound_s <= comparison.rows[0].bottleneck_s * (1 + 1e-9)


def test_the_items_of_a_dnn_graph_are_its_colors():
    nodes = tuple(DnnNode(v, 1, 2, False, True, color=c) for v, c in enumerate([5, None, 5]))
    graph = DnnGraph(2, 1, 1e9, nodes, (DnnEdge(0, 1, 4.0), DnnEdge(1, 2, 7.0)))
    problem = bottleneck_of(graph, 2, 1e9)
    assert problem.work_s == pytest.approx(np.array([[2, 2, 4], [1, 1, 2]]) * 1e-3)
    assert [net.crossing_s for net in problem.nets] == [pytest.approx(11e-3)]
    assert problem.alike == ((0, 1), (2,))
