"""Choice programs: equal to brute force and CP-SAT, and no step loses an assignment that counts."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.artefacts.problem import Status
from planner.solvers.program import solve as program_solve
from planner.solvers.program.core import NEVER, core_of, starts
from planner.solvers.program.dual import Climb
from planner.solvers.program.elimination_kernels import eliminated, ordered
from planner.solvers.program.fixing import fixed
from planner.solvers.program.kernels import (
    bound_of,
    left_over,
    price,
    starts_of_messages,
    sweep,
)
from planner.solvers.program.prices import Prices
from planner.solvers.program.problem import (
    FORBIDDEN,
    ChoiceProgram,
    Held,
    cost_of,
    peak_bytes,
)
from planner.solvers.program.proof import nodes_within, proved
from planner.solvers.program.reduce import reduced
from planner.solvers.program.reduce_kernels import undominated
from planner.solvers.program.search import Searcher
from planner.solvers.program.solve import solve


def drawn(seed, num_nodes, num_strategies, *, forbidden=0.2, dense=0.5, kind=np.int64):
    """A random program, tight in memory."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, num_strategies + 1, num_nodes)
    never = FORBIDDEN if kind == np.int64 else np.inf
    cost = tuple(rng.integers(-5, 50, k).astype(kind) for k in sizes)
    edges, matrices = [], []
    for u, v in itertools.permutations(range(num_nodes), 2):
        if rng.random() < dense / 2:
            matrix = rng.integers(-5, 50, (sizes[u], sizes[v])).astype(kind)
            matrix[rng.random(matrix.shape) < forbidden] = never
            edges.append((u, v))
            matrices.append(matrix)
    held = []
    for i in range(num_nodes):
        spans = [sorted(rng.integers(0, 6, 2).tolist()) for _ in range(rng.integers(0, 4))]
        held.append(tuple(Held(a, b, rng.integers(0, 9, sizes[i])) for a, b in spans))
    limit = int(rng.integers(3 * num_nodes, 6 * num_nodes))
    return ChoiceProgram(cost, tuple(edges), tuple(matrices), tuple(held), limit)


def all_picks(program):
    return itertools.product(*(range(len(one)) for one in program.cost))


def fits(program, picks):
    return program.limit_bytes is None or peak_bytes(program, picks) <= program.limit_bytes


def brute_force(program):
    """The least cost of an assignment that fits; inf if none does."""
    return min(
        (cost_of(program, x) for x in all_picks(program) if fits(program, x)), default=math.inf
    )


def answer(program, seed=0, limit_s=5.0, left_s=lambda: 1e6):
    return solve(program, limit_s, left_s, seed)


programs = st.builds(
    drawn,
    st.integers(0, 10**6),
    st.integers(1, 7),
    st.integers(1, 5),
    forbidden=st.sampled_from([0.0, 0.2, 0.6]),
    dense=st.sampled_from([0.2, 0.6]),
)


@settings(max_examples=60)
@given(programs)
def test_the_answer_is_that_of_brute_force(program):
    found, best = answer(program), brute_force(program)
    if best == math.inf:
        assert (found.status, found.picks, found.bound) == (Status.INFEASIBLE, None, math.inf)
        return
    assert found.status is Status.OPTIMAL
    assert found.cost == found.bound == best == cost_of(program, found.picks)
    assert fits(program, found.picks)


@settings(max_examples=60)
@given(programs, st.integers(-20, 20), st.sampled_from([0.3, 5.0]))
def test_only_what_costs_less_than_the_most_is_asked_for(program, apart, limit_s):
    best = brute_force(program)
    if best == math.inf:
        return
    most = best + apart
    found = solve(program, limit_s, lambda: 1e6, most=most)
    assert found.bound <= best
    if apart > 0:
        assert found.cost == best
    elif found.picks is None:
        assert found.status is Status.UNKNOWN and found.bound == most
    else:  # what reductions leave is an answer, too
        assert found.cost == best


@settings(max_examples=40)
@given(programs, st.sampled_from([0.02, 0.5]), st.sampled_from([0.3, 5.0]))
def test_an_answer_is_as_near_to_the_bound_as_asked(program, gap, limit_s):
    best = brute_force(program)
    found = solve(program, limit_s, lambda: 1e6, gap=gap)
    if best == math.inf:
        assert found.status is Status.INFEASIBLE
        return
    assert found.bound <= best <= found.cost
    assert found.cost - found.bound <= gap * max(0, found.bound) + 1
    assert fits(program, found.picks)


def nothing_else(*_):
    raise AssertionError("a search")


@settings(max_examples=60)
@given(programs)
def test_without_a_limit_of_memory_elimination_is_the_answer(program):
    program = replace(program, limit_bytes=None)
    with mock.patch.object(program_solve, "_searched", nothing_else):
        found = answer(program)
    best = brute_force(program)
    assert found.cost == found.bound == best
    assert found.status is (Status.INFEASIBLE if best == math.inf else Status.OPTIMAL)


def test_where_tables_are_too_large_for_elimination_others_work(monkeypatch):
    program = replace(drawn(3, 7, 5, forbidden=0.0, dense=0.9), limit_bytes=None)
    monkeypatch.setattr(program_solve, "WHOLE_ENTRIES", 4.0)
    assert answer(program).cost == brute_force(program)
    monkeypatch.setattr(program_solve, "_searched", nothing_else)
    with pytest.raises(AssertionError, match="a search"):
        answer(program)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_costs_may_be_floats(seed):
    program = drawn(seed, 5, 4, kind=np.float64)
    program = ChoiceProgram(
        tuple(one * 1e-3 for one in program.cost), program.edges,
        tuple(one * 1e-3 for one in program.edge_cost), program.held, program.limit_bytes,
    )  # fmt: skip
    found, best = answer(program), brute_force(program)
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert found.bound <= best


@settings(max_examples=100)
@given(programs)
def test_reduced_and_original_assignments_cost_and_hold_the_same(program):
    core, scale = core_of(program)
    small = reduced(core)
    best = brute_force(program)
    if small is None:
        assert best == math.inf
        return
    costs = []
    for picks in itertools.product(*map(range, np.diff(small.core.start))):
        picks = np.array(picks, np.int64)
        cost = price(small.core, small.core.cost, picks)
        if cost < NEVER:
            before = small.expanded(picks)
            assert scale.cost(cost + small.constant) == cost_of(program, before.tolist())
            assert (small.shrunk(before) == picks).all()
            room = bool((left_over(small.core, picks) >= 0).all())
            assert room == fits(program, before.tolist())
            costs += [cost_of(program, before.tolist())] if room else []
    assert min(costs, default=math.inf) == best


@settings(max_examples=100)
@given(programs)
def test_without_dominance_every_assignment_stays(program):
    core, _ = core_of(program)
    small = reduced(core, dominance=False)
    allowed = {x for x in all_picks(program) if cost_of(program, x) < math.inf}
    if small is None:
        assert not any(fits(program, x) for x in allowed)
        return
    sizes = map(range, np.diff(small.core.start))
    kept = [np.array(x, np.int64) for x in itertools.product(*sizes)]
    kept = [x for x in kept if price(small.core, small.core.cost, x) < NEVER]
    assert {tuple(small.expanded(x).tolist()) for x in kept} == allowed


@settings(max_examples=100)
@given(programs)
def test_no_bound_is_above_the_optimum_and_the_optimum_survives_fixing(program):
    core, scale = core_of(program)
    small, best = reduced(core), brute_force(program)
    if small is None or not small.core.num_nodes or best == math.inf:
        return
    search = Searcher(Prices(small.core), 0)
    climb = Climb(search)
    climb.begin()
    for _ in range(30):
        if climb.done:
            break
        climb.step()
    assert scale.cost(climb.bound + small.constant) <= best
    known = int(best * 2**scale.shift) - scale.constant - small.constant
    rest = fixed(search.prices, known)
    assert rest is not None, "the optimum costs no more than itself"
    again = proved(Prices(rest.core), known, lambda: 100.0) if rest.core.num_nodes else None
    cost = rest.constant if again is None else again.cost + rest.constant
    assert scale.cost(cost + small.constant) == best


@settings(max_examples=60)
@given(programs)
def test_messages_stay_a_bound_and_elimination_finds_the_optimum_without_memory(program):
    core, scale = core_of(program)
    small = reduced(core, dominance=False)
    if small is None or not small.core.num_nodes:
        return
    core = small.core
    free = min(cost_of(program, x) for x in all_picks(program))
    begin = starts_of_messages(core)
    terms = np.zeros(begin[-1, 0], np.int64)
    before = bound_of(core, core.cost, begin, terms)
    for _ in range(5):
        sweep(core, core.cost, begin, terms, True)
        bound = sweep(core, core.cost, begin, terms, False)
        assert bound == bound_of(core, core.cost, begin, terms) >= before - len(core.near)
        assert scale.cost(bound + small.constant) <= free
        before = bound
    picks = np.zeros(core.num_nodes, np.int64)
    order = ordered(core, np.arange(core.num_nodes), math.log(1e6))
    eliminated(core, core.cost, order, picks)
    assert scale.cost(price(core, core.cost, picks) + small.constant) == free


@settings(max_examples=60)
@given(programs)
def test_elimination_beside_fixed_nodes_is_never_worse(program):
    core, _ = core_of(program)
    small = reduced(core, dominance=False)
    if small is None or not small.core.num_nodes:
        return
    core = small.core
    picks = np.zeros(core.num_nodes, np.int64)
    before = price(core, core.cost, picks)
    order = ordered(core, np.arange(core.num_nodes), math.log(8))
    assert len(order.node) <= core.num_nodes
    eliminated(core, core.cost, order, picks)
    assert price(core, core.cost, picks) <= before


def by_cp_sat(program):
    """The optimum of a model that is not ours."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    x = [[model.new_bool_var("") for _ in one] for one in program.cost]
    terms = []
    for i, one in enumerate(program.cost):
        model.add_exactly_one(x[i])
        terms += [int(c) * x[i][s] for s, c in enumerate(one)]
    for (u, v), matrix in zip(program.edges, program.edge_cost, strict=True):
        both = {
            pair: model.new_bool_var("")
            for pair in zip(*np.nonzero(matrix < FORBIDDEN), strict=True)
        }
        for s in range(len(x[u])):
            model.add(sum(y for (a, _), y in both.items() if a == s) == x[u][s])
        for t in range(len(x[v])):
            model.add(sum(y for (_, b), y in both.items() if b == t) == x[v][t])
        terms += [int(matrix[pair]) * y for pair, y in both.items()]
    for t in range(6):
        model.add(
            sum(
                int(size) * x[i][s]
                for i, parts in enumerate(program.held)
                for part in parts
                if part.first <= t <= part.last
                for s, size in enumerate(part.bytes)
            )
            <= program.limit_bytes
        )
    model.minimize(sum(terms))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return round(solver.objective_value) if status == cp_model.OPTIMAL else math.inf


@pytest.mark.parametrize("seed", [2, 3])
def test_a_hundred_nodes_as_cp_sat(seed):
    program = drawn(seed, 100, 4, forbidden=0.05, dense=0.02)
    found = answer(program)
    assert found.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert found.cost == by_cp_sat(program)


def test_the_same_seed_gives_the_same_answer():
    program = drawn(3, 60, 6, forbidden=0.05, dense=0.05)
    first, second = answer(program, seed=5, limit_s=2.0), answer(program, seed=5, limit_s=2.0)
    assert first == second
    assert first.reproducible


def test_a_proof_has_as_many_nodes_as_there_is_work_for():
    core, _ = core_of(drawn(3, 60, 6, forbidden=0.05, dense=0.05))
    assert nodes_within(core, 10**6) == 0
    assert 0 < nodes_within(core, 10**9) < nodes_within(core, 10**10)


@settings(max_examples=60)
@given(programs)
def test_no_dominated_strategy_is_left(program):
    """Though nodes are looked at again only if their neighbours have lost a strategy."""
    small = reduced(core_of(program)[0])
    if small is None or not small.core.num_nodes:
        return
    core = small.core
    order = np.argsort(core.part_node, kind="stable")
    part_of = starts(np.bincount(core.part_node, minlength=core.num_nodes))
    alive, todo = np.ones(len(core.cost), np.bool_), np.ones(core.num_nodes, np.bool_)
    assert not undominated(core, alive, part_of, order, todo)


def test_without_time_there_is_an_honest_answer():
    program = drawn(2, 100, 4, forbidden=0.05, dense=0.02)
    found = answer(program, left_s=lambda: 0.0)
    assert found.bound <= 2872 <= found.cost


def test_a_limit_below_what_everything_holds_is_infeasible():
    one = np.array([1, 2])
    program = ChoiceProgram((one,), (), (), ((Held(0, 3, np.array([5, 7])),),), 4)
    assert answer(program).status is Status.INFEASIBLE
    assert answer(ChoiceProgram((one,), (), (), program.held, 5)).picks == (0,)
    assert answer(ChoiceProgram((one,), (), (), program.held, None)).cost == 1


ONE, PAIR = np.array([1, 2]), np.array([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (((ONE, np.array([1.0])), (), (), ((), ())), r"cost\[1\]: expected at least one number"),
        (((ONE, ONE), ((0, 2),), (PAIR,), ((), ())), r"edges\[0\]: expected two of nodes 0 to 1"),
        (((ONE, ONE), ((1, 1),), (PAIR,), ((), ())), r"edges\[0\]: expected two of nodes 0 to 1"),
        (((ONE, ONE), ((0, 1),), (PAIR[:1],), ((), ())), r"edge_cost\[0\]: expected shape"),
        (((ONE, ONE), (), (), ((),)), "held: expected an entry per node, 2, got 1"),
        (((ONE,), (), (), ((Held(0, 1, -ONE),),)), r"held\[0\]: expected no negative usage"),
        (((ONE,), (), (), ((Held(2, 1, ONE),),)), r"held\[0\]: expected moments 0 <= first"),
        (((ONE,), (), (), ((Held(0, 1, ONE << 61),),)), "usages with a sum below 2"),
        (((np.array([np.nan]),), (), (), ((),)), "cost: expected numbers, or inf"),
    ],
)
def test_data_that_contradicts_itself_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        ChoiceProgram(*fields)
