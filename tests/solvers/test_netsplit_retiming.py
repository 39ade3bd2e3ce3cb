"""NetSplit's annealing times only what a move has changed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.solvers.netsplit.fine import blocks_of
from planner.solvers.netsplit.kernels import state_of
from planner.solvers.netsplit.moves import anneal
from planner.solvers.netsplit.search import arrays_of
from planner.solvers.placement.problem import placement_problem_of
from tests.solvers.test_netsplit import alone
from tests.support.netsplit_instances import problem_from


def assert_timed_anew(model, state):
    """The schedule is, to the tick, that of its placement and orders from the beginning."""
    anew = state_of(model, state.where, state.orders)
    assert state.ends.tolist() == anew.ends.tolist()
    for name in ("end", "done", "turn", "previous"):
        assert np.array_equal(getattr(state.kept, name), getattr(anew.kept, name)), name
        assert np.array_equal(getattr(state.kept, name), getattr(state.tried, name)), name
    sent = anew.kept.there >= 0
    assert np.array_equal(state.kept.there[sent], anew.kept.there[sent])
    assert np.array_equal(state.critical[0, : state.num_critical[0]],
                          anew.critical[0, : anew.num_critical[0]])  # fmt: skip


@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    devices=st.integers(2, 5),
    size=st.integers(5, 60),
    moves=st.integers(1, 300),
    tied=st.booleans(),
)
def test_what_a_move_leaves_alone_need_not_be_timed_anew(seed, devices, size, moves, tied):
    problem = placement_problem_of(problem_from(seed, devices, num_operators=size))
    instance, order = alone(problem), range(size)
    model = arrays_of(instance, blocks_of(problem))
    state = state_of(model, [i % devices for i in order], (order, order[::-1]))
    before = float(state.ends.sum())
    anneal(model, state, moves, 0.05 * before, 0.001 * before, seed, tied)
    assert_timed_anew(model, state)


def test_most_moves_are_timed_in_part():
    """Both phases are 200 operators. Half of the moves change nothing but lists and orders."""
    problem = placement_problem_of(problem_from(0, 4))
    model, order = arrays_of(alone(problem)), range(100)
    state = state_of(model, [i % 4 for i in order], (order, order[::-1]))
    before = float(state.ends.sum())
    anneal(model, state, 5000, 1e-3 * before, 1e-5 * before, 0, True)
    begun = int(state.timed[0])
    anneal(model, state, 5000, 1e-3 * before, 1e-5 * before, 1, True)
    assert 0 < state.timed[0] - begun < 5000 * 200 / 2
